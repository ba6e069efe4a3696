"""Progressive filling on flat arrays: the hot loops of the max-min solver.

Indices are unsigned, because numba checks signed ones for being negative. A flow's list of channels ends with LAST
instead of having a length, because compilers unroll loops of known length, which does not pay for two or six hops.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import called, inlined
from ddlsim.network.intrinsics import trailing_zeros
from ddlsim.network.state import BLOCK, LAST

INFINITE = 0x7FF0 << 48  # the bits of inf
SAME = 1e-13  # relative; shares and rates this close differ by rounding only
BELOW = 1.0 - 1e-9  # a channel whose level is this far below the threshold carries only slower flows, despite rounding
FROZEN = -(1 << 30)
TWO_SAME = 2.0 * SAME
MOST_HUBS = np.uint64(8)
MANY_ALIKE = np.uint64(16)  # channels with the least share are filled in one pass if they are at least one in 16
ZERO, ONE, TWO, THREE, FOUR, SIX = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4), np.uint64(6)


@called
def collect_all(  # type: ignore[no-untyped-def]
    n_active, threshold, shift, occupied, channels, filling, fill, loads, rates, nexts, hops, shares, pool, freezing
):
    """Prepare all flows not below the threshold for the filling; return the numbers of channels and flows to be filled.

    Only channels with flows are examined, in ascending order, because these are few if ranks take turns. They are
    listed in ``fill[].component``. For a channel that fills up below the threshold and carries most of the flows (a
    server's, say), the residual capacity is not computed, which would take one subtraction per flow.
    """
    hubs = False
    n_used = ZERO
    for word in range(np.uint64(occupied.size)):
        left = occupied[word]
        while left != ZERO:
            channel = (word << SIX) + trailing_zeros(left)  # type: ignore[call-arg,unused-ignore]
            left &= left - ONE  # clears the lowest bit
            fill[n_used].component = channel
            n_used += ONE
            filling[channel].residual = channels[channel].capacity
            filling[channel].unfrozen = channels[channel].used
            if 2 * channels[channel].used > n_active and channels[channel].level < threshold * BELOW:
                filling[channel].unfrozen = FROZEN
                hubs = True
            if not channels[channel].level < threshold:
                channels[channel].level = np.inf
    n_frozen = ZERO
    for flow in range(np.uint64(n_active)):  # without branches, which would be unpredictable
        nexts[flow] = -1.0
        freezing[n_frozen] = flow
        n_frozen += ONE if rates[flow] < threshold else ZERO
    for i in range(n_frozen):
        frozen = np.uint64(freezing[i])
        rate = rates[frozen]
        nexts[frozen] = rate
        entry = frozen << shift
        other = hops[entry]
        while other != LAST:
            if not (hubs and filling[other].unfrozen < 0):
                filling[other].residual -= rate * shares[entry] if loads.size > 0 else rate
                filling[other].unfrozen -= 1
            entry += ONE
            other = hops[entry]
    n = ZERO
    for i in range(n_used):
        channel = np.uint64(fill[i].component)
        if filling[channel].unfrozen > 0:
            fill[n].component = channel
            n += ONE
            if loads.size > 0:
                weigh(channel, shift, channels, loads, pool, shares, nexts)
    return np.int64(n), n_active - np.int64(n_frozen)


@called
def fill_hubs(n_active, threshold, shift, contended, narrowest, channels, fill, rates, nexts, pool):  # type: ignore[no-untyped-def]
    """Do what :func:`collect_all` and the filling do if every flow shares a single channel, its bottleneck, and there
    are few such channels (hubs). Return the number of flows not below the threshold; -1 if the conditions do not hold.

    Servers are such hubs. The general filling would examine the channels of all clients whenever a message begins or
    ends.
    """
    n = ZERO
    total = 0
    for word in range(np.uint64(contended.size)):
        left = contended[word]
        while left != ZERO:
            channel = (word << SIX) + trailing_zeros(left)  # type: ignore[call-arg,unused-ignore]
            left &= left - ONE
            total += channels[channel].used
            if n == MOST_HUBS or total > n_active or channels[channel].capacity / channels[channel].used >= narrowest:
                return np.int64(-1)
            fill[n].component = channel
            n += ONE
    if total < n_active:
        return np.int64(-1)
    for flow in range(np.uint64(n_active)):
        nexts[flow] = -1.0
    found = 0
    for i in range(n):
        hub = np.uint64(fill[i].component)
        first = np.uint64(channels[hub].first)
        used = np.uint64(channels[hub].used)
        level = channels[hub].capacity / channels[hub].used
        kept = rates[pool[first] >> shift] < threshold
        if kept and not channels[hub].level < threshold:
            return np.int64(-1)
        for p in range(first, first + used):
            flow = pool[p] >> shift
            if nexts[flow] >= 0.0 or (rates[flow] < threshold) != kept:
                return np.int64(-1)
            nexts[flow] = rates[flow] if kept else level
        fill[i].key = 0.0 if kept else level
        found += 0 if kept else channels[hub].used
        for j in range(i):  # the general filling would merge levels that differ by rounding only
            if abs(fill[j].key - level) <= TWO_SAME * level and fill[j].key != fill[i].key and not kept:
                return np.int64(-1)
    for i in range(n):
        if fill[i].key > 0.0:
            channels[fill[i].component].level = fill[i].key
    return np.int64(found)


@inlined
def weigh(channel, shift, channels, loads, pool, shares, nexts):  # type: ignore[no-untyped-def]
    first = np.uint64(channels[channel].first)
    total = 0.0
    for p in range(first, first + np.uint64(channels[channel].used)):
        total += shares[pool[p]] if nexts[pool[p] >> shift] < 0.0 else 0.0
    loads[channel] = total


@inlined
def level_of(channel, filling, loads):  # type: ignore[no-untyped-def]
    """Return the rate at which a channel is full, inf if all its flows are frozen."""
    k = filling[channel].unfrozen
    if k <= 0:
        return np.inf
    return filling[channel].residual / (loads[channel] if loads.size > 0 else k)


@inlined
def take(entry, other, level, filling, loads, shares):  # type: ignore[no-untyped-def]
    """Subtract a flow that is frozen at `level` from the channel `other`, place `entry` of the flows' channels."""
    filling[other].unfrozen -= 1
    if loads.size > 0:
        filling[other].residual -= level * shares[entry]
        loads[other] -= shares[entry]
    else:
        filling[other].residual -= level


@inlined
def least(keys, low, high):  # type: ignore[no-untyped-def]
    """Return the least of ``keys[low:high]``, inf if there are none."""
    a = b = c = d = np.inf  # four independent chains of comparisons, which the processor executes in parallel
    fours = high - ((high - low) & THREE)
    for i in range(low, fours, FOUR):
        a = min(a, keys[i])
        b = min(b, keys[i + ONE])
        c = min(c, keys[i + TWO])
        d = min(d, keys[i + THREE])
    for i in range(fours, high):
        a = min(a, keys[i])
    return min(min(a, b), min(c, d))


@called
def soonest_ends(n_active, ends, soonest):  # type: ignore[no-untyped-def]
    """Store the least planned end of each block of flows; return the least of all, inf if there is no flow.

    The ends are compared as integers: positive floats are in the order of their bits, and compilers vectorise a minimum
    of integers, but not one of floats, which could be NaN.
    """
    n = np.uint64(n_active)
    size = np.uint64(BLOCK)
    first = np.inf
    for block in range((n + size - ONE) // size):
        low = block * size
        bits = np.int64(INFINITE)
        for flow in range(low, min(low + size, n)):
            end = np.float64(ends[flow]).view(np.int64)
            bits = end if end < bits else bits
        soonest[block] = np.int64(bits).view(np.float64)
        first = min(first, soonest[block])
    return first


@called
def fill_few(  # type: ignore[no-untyped-def]
    n_channels, n_flows, most, shift, channels, filling, fill, loads, keys, pool, nexts, hops, shares, freezing
):
    """Fill the `n_channels` channels listed in ``fill[].component`` until all their `n_flows` flows are frozen or
    `most` channels are full; return the channels still listed, the flows left, and the last level.

    The shares of all channels are kept up to date in `keys`, and searched linearly for the least.
    """
    n = np.uint64(n_channels)
    last = 0.0
    for i in range(n):
        channel = fill[i].component
        filling[channel].place = i
        keys[i] = level_of(channel, filling, loads)
    left = np.uint64(n_flows)
    least_left = n - min(n, np.uint64(most))
    while left > ZERO and n > least_left:
        share = least(keys, ZERO, n)
        place = ZERO
        while keys[place] != share:
            place += ONE
        best = np.uint64(fill[place].component)
        n -= ONE  # the last one takes its place
        moved = np.uint64(fill[n].component)
        keys[place] = keys[n]
        fill[place].component = moved
        filling[moved].place = place
        last = share if share > last * (1.0 + SAME) else last
        channels[best].level = last
        frozen = list_unfrozen(best, shift, channels, pool, nexts, freezing)
        left -= frozen
        if left == ZERO:
            for j in range(frozen):
                nexts[freezing[j]] = last
            break
        for j in range(frozen):
            flow = np.uint64(freezing[j])
            nexts[flow] = last
            entry = flow << shift
            other = hops[entry]
            while other != LAST:
                if other != best:
                    take(entry, other, last, filling, loads, shares)
                    keys[filling[other].place] = level_of(other, filling, loads)
                entry += ONE
                other = hops[entry]
    return n, left, last


@called
def fill_many(n_channels, n_flows, last, shift, channels, filling, fill, loads, pool, nexts, hops, shares, freezing):  # type: ignore[no-untyped-def]
    """Complete the filling of many channels, from the level `last` upwards; see :func:`fill_few`.

    As long as a large part of the channels have the least share (symmetric clusters), these are filled in passes. The
    others are put in a heap by a lower bound of their share: freezing other flows only raises a share, so an old one is
    a bound.
    """
    left = np.uint64(n_flows)
    size = np.uint64(n_channels)
    while True:
        n = size
        size = ZERO
        least_share = np.inf
        for i in range(n):
            channel = np.uint64(fill[i].component)
            if filling[channel].unfrozen > 0:
                share = level_of(channel, filling, loads)
                fill[size].key = share
                fill[size].channel = channel
                fill[size].component = channel
                least_share = min(least_share, share)
                size += ONE
        alike = ZERO
        for i in range(size):
            alike += ONE if fill[i].key == least_share else ZERO
        if left == ZERO or alike * MANY_ALIKE < size:
            break
        last = least_share if least_share > last * (1.0 + SAME) else last
        for i in range(size):
            channel = np.uint64(fill[i].channel)
            if fill[i].key == least_share and level_of(channel, filling, loads) == least_share:
                left -= freeze(channel, last, shift, channels, filling, loads, pool, nexts, hops, shares, freezing)
    for i in range(size >> ONE):
        sift(fill, (size >> ONE) - ONE - i, size)
    while left > ZERO:
        channel = np.uint64(fill[ZERO].channel)
        share = level_of(channel, filling, loads)
        if filling[channel].unfrozen == 0:
            size -= ONE
            fill[ZERO].key = fill[size].key
            fill[ZERO].channel = fill[size].channel
        elif share > fill[ZERO].key:
            fill[ZERO].key = share
        else:
            last = share if share > last * (1.0 + SAME) else last
            left -= freeze(channel, last, shift, channels, filling, loads, pool, nexts, hops, shares, freezing)
            continue
        sift(fill, ZERO, size)


@inlined
def freeze(channel, level, shift, channels, filling, loads, pool, nexts, hops, shares, freezing):  # type: ignore[no-untyped-def]
    """Freeze the flows that are left on a channel, which is full at `level`; return how many these are."""
    channels[channel].level = level
    frozen = list_unfrozen(channel, shift, channels, pool, nexts, freezing)
    for j in range(frozen):
        flow = np.uint64(freezing[j])
        nexts[flow] = level
        entry = flow << shift
        other = hops[entry]
        while other != LAST:
            if other != channel:
                take(entry, other, level, filling, loads, shares)
            entry += ONE
            other = hops[entry]
    filling[channel].unfrozen = 0
    return frozen


@inlined
def list_unfrozen(channel, shift, channels, pool, nexts, freezing):  # type: ignore[no-untyped-def]
    """List the channel's unfrozen flows in `freezing`; return how many these are."""
    first = np.uint64(channels[channel].first)
    n = ZERO
    for p in range(first, first + np.uint64(channels[channel].used)):  # without a branch, which would be unpredictable
        flow = pool[p] >> shift
        freezing[n] = flow
        n += ONE if nexts[flow] < 0.0 else ZERO
    return n


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
    """Assign the next rates and the planned ends that follow from them; return how many rates have changed.

    An unchanged rate leaves the planned end as it is. There are no branches, so that the loop is vectorised.
    """
    n = 0
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
        n += 1 if changed else 0
    return n
