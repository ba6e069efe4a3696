"""Progressive filling on flat arrays: the hot loops of the max-min solver.

Places are unsigned here, because numba guards signed ones against being negative, and a flow's channels end
with LAST, because compilers unroll loops of known length, which does not pay for two or six hops.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import called, inlined
from ddlsim.network.intrinsics import trailing_zeros
from ddlsim.network.state import BLOCK, LAST

INFINITE = 0x7FF0 << 48  # the bits of inf
SAME = 1e-13  # relative; shares and rates this close differ by rounding only
BELOW = 1.0 - 1e-9  # a channel with a level so much below the threshold has only flows below it, whatever the rounding
FROZEN = -(1 << 30)
TWO_SAME = 2.0 * SAME
MOST_HUBS = np.uint64(8)
MANY_ALIKE = np.uint64(16)  # channels with the least share are filled together if they are one in so many
ZERO, ONE, TWO, THREE, FOUR, SIX = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4), np.uint64(6)


@called
def collect_all(  # type: ignore[no-untyped-def]
    n_active, threshold, shift, occupied, channels, filling, fill, loads, rates, nexts, hops, shares, pool, freezing
):
    """Make all flows not below the threshold ready for the filling; return (channels, flows) to be filled.

    Only channels with flows are looked at, in ascending order: they are few of all where ranks take turns. They are
    listed in ``fill[].component``. What is left of a channel that fills up below the threshold is not
    counted where it carries most flows (that of a server, say), one after the other.
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
    """Do what :func:`collect_all` and the filling do, if each flow meets others on one channel, one of a few hubs, that
    is its bottleneck; return how many flows are not below the threshold, or -1 if that is not so.

    Servers are such hubs. The filling would look at all channels of their clients for each message that begins or ends.
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
        for j in range(i):  # levels that differ by rounding only would become one
            if abs(fill[j].key - level) <= TWO_SAME * level and fill[j].key != fill[i].key and not kept:
                return np.int64(-1)
    for i in range(n):
        if fill[i].key > 0.0:
            channels[fill[i].component].level = fill[i].key
    return np.int64(found)


@inlined
def weigh(channel, shift, channels, loads, pool, shares, nexts):  # type: ignore[no-untyped-def]
    """Sum up the shares of a channel's unfrozen flows."""
    first = np.uint64(channels[channel].first)
    total = 0.0
    for p in range(first, first + np.uint64(channels[channel].used)):
        total += shares[pool[p]] if nexts[pool[p] >> shift] < 0.0 else 0.0
    loads[channel] = total


@inlined
def level_of(channel, filling, loads):  # type: ignore[no-untyped-def]
    """Return the rate at which a channel is full, inf if no flow is left on it."""
    k = filling[channel].unfrozen
    if k <= 0:
        return np.inf
    return filling[channel].residual / (loads[channel] if loads.size > 0 else k)


@inlined
def take(entry, other, level, filling, loads, shares):  # type: ignore[no-untyped-def]
    """Take a flow that is frozen at `level` off the channel `other`, number `entry` of the flows' channels."""
    filling[other].unfrozen -= 1
    if loads.size > 0:
        filling[other].residual -= level * shares[entry]
        loads[other] -= shares[entry]
    else:
        filling[other].residual -= level


@inlined
def least(keys, low, high):  # type: ignore[no-untyped-def]
    """Return the least of ``keys[low:high]``, inf if there are none."""
    a = b = c = d = np.inf  # four chains of comparisons go side by side in the processor
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
    """Note the least planned end of each block of flows; return the least of all, inf if there is no flow.

    Times are positive, so they are in the order of their bits, and compilers use vector instructions for the least of
    integers, but not of floats, of which some could be NaN.
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
    """Fill the `n_channels` channels listed in ``fill[].component`` until all their `n_flows` flows are frozen, or
    `most` channels are full; return how many channels are listed then, how many flows are left, and the last level.

    The shares of all of them are kept up to date in `keys`, and looked through for the least, then once more for all
    channels with that share.
    """
    n = np.uint64(n_channels)
    last = 0.0
    for i in range(n):
        channel = fill[i].component
        filling[channel].place = i
        keys[i] = level_of(channel, filling, loads)
    left = np.uint64(n_flows)
    least_left = n - min(n, np.uint64(most))
    share = np.inf
    place = n  # no channel before it has this share
    while left > ZERO and n > least_left:
        while place < n and keys[place] != share:
            place += ONE
        if place >= n:
            share = least(keys, ZERO, n)
            place = ZERO
            continue
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
                    key = level_of(other, filling, loads)
                    at = np.uint64(filling[other].place)
                    keys[at] = key
                    if key < share:  # by rounding
                        place = n
                        share = -np.inf
                    elif key == share:
                        place = min(place, at)
                entry += ONE
                other = hops[entry]
    return n, left, last


@called
def fill_many(n_channels, n_flows, last, shift, channels, filling, fill, loads, pool, nexts, hops, shares, freezing):  # type: ignore[no-untyped-def]
    """Do what :func:`fill_few` does, to the end, for many channels, from the level `last` upwards.

    As long as a good part of them have the least share (symmetric clusters), these are filled one after the other. Then
    they are put in a heap by a lower bound of their share: shares only rise while others freeze, so an old share will
    do.
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
    for p in range(first, first + np.uint64(channels[channel].used)):  # no branch: it would be unpredictable
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
    """Give flows their next rates and plan their ends; an unchanged rate leaves the planned end as it is.

    Without branches, so that the processor takes several flows at a time. Returns how many rates have changed.
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
