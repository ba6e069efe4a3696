"""Progressive filling on a few arrays: the hot loops of the max-min solve.

Places are unsigned here, because numba guards signed ones against being negative, and a flow's channels end
with LAST, because compilers unroll loops of known length, which does not pay for two or six hops.
"""

from __future__ import annotations

import numpy as np

from ddlsim.network.compiled import called, inlined
from ddlsim.network.state import LAST

SAME = 1e-13  # relative; shares and rates this close differ by rounding only
SCAN_LIMIT = np.uint64(12)  # fewer channels are filled by scanning instead of with a heap
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)


@called
def collect_all(n_active, threshold, shift, channels, filling, fill, rates, nexts, hops):  # type: ignore[no-untyped-def]
    """Make all flows not below the threshold ready for the filling; return (channels, flows) to be filled.

    The channels are listed in ``fill[].component``.
    """
    n_channels = np.uint64(channels.size)
    for channel in range(n_channels):
        filling[channel].residual = channels[channel].capacity
        filling[channel].unfrozen = channels[channel].used
    found = n_active
    for flow in range(np.uint64(n_active)):
        rate = rates[flow]
        nexts[flow] = -1.0
        if rate < threshold:
            nexts[flow] = rate
            found -= 1
            entry = flow << shift
            other = hops[entry]
            while other != LAST:
                filling[other].residual -= rate
                filling[other].unfrozen -= 1
                entry += ONE
                other = hops[entry]
    n = ZERO
    for channel in range(n_channels):
        if not channels[channel].level < threshold:
            channels[channel].level = np.inf
        if filling[channel].unfrozen > 0:
            fill[n].component = channel
            n += ONE
    return np.int64(n), found


@called
def fill_up(n_channels, shift, channels, filling, fill, pool, nexts, hops, freezing):  # type: ignore[no-untyped-def]
    """Fill the `n_channels` channels listed in ``fill[].component`` until all their flows are frozen.

    With few channels all are looked at for the next one. Else they are in a heap by a lower bound of their
    share: shares only rise while others freeze, so an old share will do.
    """
    n = np.uint64(n_channels)
    last = 0.0
    size = ZERO
    scan = n <= SCAN_LIMIT
    if not scan:
        for i in range(n):
            channel = np.uint64(fill[i].component)
            if filling[channel].unfrozen > 0:
                fill[size].key = filling[channel].residual / filling[channel].unfrozen
                fill[size].channel = channel
                size += ONE
        for i in range(size >> ONE):
            sift(fill, (size >> ONE) - ONE - i, size)
    while True:
        best = ZERO
        share = np.inf
        if scan:
            for i in range(n):
                channel = np.uint64(fill[i].component)
                k = filling[channel].unfrozen
                if k > 0 and filling[channel].residual / k < share:
                    share = filling[channel].residual / k
                    best = channel
        else:
            while size > ZERO:
                channel = np.uint64(fill[ZERO].channel)
                k = filling[channel].unfrozen
                if k > 0:
                    share = filling[channel].residual / k
                    if share <= fill[ZERO].key:
                        best = channel
                        break
                    fill[ZERO].key = share
                    share = np.inf
                else:
                    size -= ONE
                    fill[ZERO].key = fill[size].key
                    fill[ZERO].channel = fill[size].channel
                sift(fill, ZERO, size)
        if share == np.inf:
            return
        last = share if share > last * (1.0 + SAME) else last
        freeze(best, last, shift, channels, filling, pool, nexts, hops, freezing)


@inlined
def freeze(channel, share, shift, channels, filling, pool, nexts, hops, freezing):  # type: ignore[no-untyped-def]
    """Freeze the channel's unfrozen flows at `share`; take it from the other channels they cross."""
    channels[channel].level = share
    first = np.uint64(channels[channel].first)
    n = ZERO
    for p in range(first, first + np.uint64(channels[channel].used)):  # no branch: it would be unpredictable
        flow = pool[p] >> shift
        freezing[n] = flow
        n += ONE if nexts[flow] < 0.0 else ZERO
    for i in range(n):
        flow = np.uint64(freezing[i])
        nexts[flow] = share
        entry = flow << shift
        other = hops[entry]
        while other != LAST:
            filling[other].residual -= share
            filling[other].unfrozen -= 1
            entry += ONE
            other = hops[entry]


@inlined
def sift(fill, i, n):  # type: ignore[no-untyped-def]
    """Move entry `i` of the heap of `n` channels away from the root until no child has a lower key."""
    key = fill[i].key
    channel = fill[i].channel
    while True:
        child = TWO * i + ONE
        if child >= n:
            break
        if child + ONE < n and fill[child + ONE].key < fill[child].key:
            child += ONE
        if fill[child].key >= key:
            break
        fill[i].key = fill[child].key
        fill[i].channel = fill[child].channel
        i = child
    fill[i].key = key
    fill[i].channel = channel


@called
def set_all_rates(n_old, now, rates, nexts, ends):  # type: ignore[no-untyped-def]
    """Give flows their next rates and plan their ends; an unchanged rate leaves the planned end as it is.

    Without branches, so that the processor takes several flows at a time.
    """
    for flow in range(np.uint64(n_old)):
        old = rates[flow]
        rate = nexts[flow]
        end = ends[flow]
        left = end - now
        planned = now + (left if left > 0.0 else 0.0) * (old / rate)
        change = rate - old
        changed = (change if change > 0.0 else -change) > SAME * old
        rates[flow] = rate if changed else old
        ends[flow] = planned if changed else end
