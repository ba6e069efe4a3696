"""Max-min fair rates by progressive filling, recomputed only where something changed.

Progressive filling raises all rates together; the channel with the least capacity per unfinished flow fills up first
and freezes its flows at that share (Bertsekas and Gallager, Data Networks, section 6.5.2). Two facts limit the work
when a flow begins or ends:

* only flows connected to the changed channels through shared channels can be affected;
* filling proceeds as before up to the lowest level at which the change matters (`threshold`: the rate of a flow that
  ended, or the equal share that a new flow gets at least). Flows frozen below it keep their rates and propagate no
  change.

Where nearly everything is connected, looking for the connected part costs more than it saves: then all flows
above the threshold are filled again in one sweep over arrays (`sweeping` is 1 meanwhile). A sweep does not tell how
much is connected, so every PROBE-th solve searches: messages that all begin together in separate parts of a network
soon end one by one. Where a good part of the flows can change at each instant, ends are found by scanning instead of
with a heap (`heap_valid` is 0 meanwhile).

``flow_next`` is the new rate of a flow; it is negative until the filling has frozen the flow.

The filling looks only at *contended* channels, which carry several flows. A channel that carries a single flow limits
it to a known rate, so each flow has one *limit*: the least such rate of its route (:func:`set_limit`). Flows with equal
limits are frozen together when the filling reaches that rate. On symmetric clusters, there are only a few different
limits, and most channels of a route carry a single flow.

In the loops of the filling, places are unsigned, because numba guards signed ones against being negative, and a flow's
channels end with LAST, because compilers unroll loops of known length, which does not pay for two or six hops.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import called, deferred, inlined
from ddlsim.network.calendar import heap_down, heap_set
from ddlsim.network.changes import has_changes
from ddlsim.network.flows import end_flow, link_bytes, mark_dirty
from ddlsim.network.state import BLOCK, LAST, MOST_LIMITS, View

trailing_zeros = deferred("numba.cpython.unsafe.numbers", "trailing_zeros")
INFINITE = 0x7FF0 << 48  # the bits of inf
SAME = 1e-13  # relative; shares and rates this close differ by rounding only
BELOW = 1.0 - 1e-9  # a channel whose level is this far below the threshold carries only slower flows, despite rounding
FROZEN = -(1 << 30)
TWO_SAME = 2.0 * SAME
MOST_HUBS = np.uint64(8)
MANY_ALIKE = np.uint64(16)  # channels with the least share are filled in one pass if they are at least one in 16
ZERO, ONE, TWO, THREE, FOUR, SIX = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4), np.uint64(6)
SIXTY_THREE = np.uint64(63)
NONE = np.uint64(LAST)  # no channel
# values of `flow_limit` besides places in `limits`
UNLIMITED = MOST_LIMITS  # all channels of the flow are contended
LISTED = MOST_LIMITS + 1  # there are more different limits than places: its other channels are filled, too


@inlined
def is_contended(channel, contended):  # type: ignore[no-untyped-def]
    """Whether several flows are on a channel, as a word that is 0 or 1."""
    return (contended[channel >> SIX] >> (channel & SIXTY_THREE)) & ONE


@inlined
def own_rate(entry, channel, channels, loads, shares):  # type: ignore[no-untyped-def]
    """Return the rate at which a flow alone fills a channel, number `entry` of the flows' channels."""
    capacity = channels[channel].capacity
    return capacity / shares[entry] if loads.size > 0 else capacity


@inlined
def set_limit(  # type: ignore[no-untyped-def]
    flow, threshold, shift, contended, channels, filling, fill, n, loads, hops, shares, limits, n_limits, flow_limit
):
    """Note the limit of a flow that is to be filled; return how many channels are listed then, and how many limits.

    If there is no place for another limit, all channels that only this flow uses are listed in ``fill[].component``.
    """
    rate = np.inf
    entry = flow << shift
    other = np.uint64(hops[entry])
    while other != NONE:
        if is_contended(other, contended) == ZERO:
            rate = min(rate, own_rate(entry, other, channels, loads, shares))
            if not channels[other].level < threshold:
                channels[other].level = np.inf
        entry += ONE
        other = np.uint64(hops[entry])
    if rate == np.inf:
        flow_limit[flow] = UNLIMITED
        return n, n_limits
    which = 0
    while which < n_limits and limits[which].rate != rate:
        which += 1
    if which == n_limits and n_limits < MOST_LIMITS:
        limits[which].rate = rate
        limits[which].left = 0
        n_limits += 1
    if which < n_limits:
        flow_limit[flow] = which
        limits[which].left += 1
        return n, n_limits
    flow_limit[flow] = LISTED
    entry = flow << shift
    other = np.uint64(hops[entry])
    while other != NONE:
        if is_contended(other, contended) == ZERO:
            fill[n].component = other
            n += ONE
            filling[other].residual = channels[other].capacity
            filling[other].unfrozen = 1
            if loads.size > 0:
                loads[other] = shares[entry]
        entry += ONE
        other = np.uint64(hops[entry])
    return n, n_limits


@inlined
def next_limit(limits, n_limits):  # type: ignore[no-untyped-def]
    """Return the place of the least limit of flows that are left; UNLIMITED, whose rate is inf, if there is none."""
    best = UNLIMITED
    for which in range(n_limits):
        if limits[which].left > 0 and limits[which].rate < limits[best].rate:
            best = which
    return best


@called
def collect_all(  # type: ignore[no-untyped-def]
    n_active, threshold, shift, contended, channels, filling, fill, loads, rates, nexts, hops, shares, pool, freezing,
    flows, limits, flow_limit,
):  # fmt: skip
    """Make all flows not below the threshold ready for the filling; return how many channels, flows and limits these
    are. The channels are listed in ``fill[].component``, the flows in `flows`.

    What is left of a channel that fills up below the threshold is not counted where it carries most flows (that of a
    server, say), one after the other.
    """
    hubs = False
    n_used = ZERO
    for word in range(np.uint64(contended.size)):
        left = contended[word]
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
    n_flows = ZERO
    for flow in range(np.uint64(n_active)):  # without branches, which would be unpredictable
        nexts[flow] = -1.0
        freezing[n_frozen] = flow
        flows[n_flows] = flow
        below = ONE if rates[flow] < threshold else ZERO
        n_frozen += below
        n_flows += ONE - below
    for i in range(n_frozen):
        frozen = np.uint64(freezing[i])
        rate = rates[frozen]
        nexts[frozen] = rate
        entry = frozen << shift
        other = np.uint64(hops[entry])
        while other != NONE:
            if is_contended(other, contended) == ONE and not (hubs and filling[other].unfrozen < 0):
                filling[other].residual -= rate * shares[entry] if loads.size > 0 else rate
                filling[other].unfrozen -= 1
            entry += ONE
            other = np.uint64(hops[entry])
    n = ZERO
    for i in range(n_used):
        channel = np.uint64(fill[i].component)
        if filling[channel].unfrozen > 0:
            fill[n].component = channel
            n += ONE
            if loads.size > 0:
                weigh(channel, shift, channels, loads, pool, shares, nexts)
    n_limits = 0
    for i in range(n_flows):
        n, n_limits = set_limit(
            np.uint64(flows[i]), threshold, shift, contended, channels, filling, fill, n, loads, hops, shares, limits,
            n_limits, flow_limit,
        )  # fmt: skip
    return np.int64(n), np.int64(n_flows), n_limits


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
    n_flows = 0
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
        n_flows += 0 if kept else channels[hub].used
        for j in range(i):  # the general filling would merge levels that differ by rounding only
            if abs(fill[j].key - level) <= TWO_SAME * level and fill[j].key != fill[i].key and not kept:
                return np.int64(-1)
    for i in range(n):
        if fill[i].key > 0.0:
            channels[fill[i].component].level = fill[i].key
    return np.int64(n_flows)


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
def fill_alike(  # type: ignore[no-untyped-def]
    n_channels, n_flows, patience, shift, contended, channels, filling, fill, loads, keys, pool, nexts, hops, shares,
    freezing, flows, limits, n_limits, flow_limit,
):  # fmt: skip
    """Fill the `n_channels` channels listed in ``fill[].component`` until all of the `n_flows` flows listed in `flows`
    are frozen, or `patience` levels have filled few of the channels; return how many channels are listed then, how many
    flows are left, and the last level.

    The shares of all of them are kept up to date in `keys`, and looked through for the least; all channels that have it
    are filled together, which are many on symmetric clusters.
    """
    n = np.uint64(n_channels)
    last = 0.0
    for i in range(n):
        channel = fill[i].component
        filling[channel].place = i
        keys[i] = level_of(channel, filling, loads)
    left = np.uint64(n_flows)
    patience_left = np.uint64(patience)
    while left > ZERO:
        share = least(keys, ZERO, n)
        limit = next_limit(limits, n_limits)
        if limits[limit].rate <= share:
            if limit == UNLIMITED:
                break
            last = limits[limit].rate if limits[limit].rate > last * (1.0 + SAME) else last
            left -= freeze_limited(
                limit, last, n_flows, True, shift, contended, channels, filling, loads, keys, nexts, hops, shares,
                flows, limits, flow_limit,
            )  # fmt: skip
            continue
        if patience_left == ZERO:
            break
        last = share if share > last * (1.0 + SAME) else last
        final = True  # whether all of them are full now, so that their shares need not be kept up to date any more
        for i in range(n):
            final &= keys[i] == share or keys[i] == np.inf
        before = n
        place = ZERO
        while place < n and left > ZERO:
            if keys[place] != share and keys[place] < np.inf:
                place += ONE
                continue
            full = keys[place] == share
            channel = np.uint64(fill[place].component)
            n -= ONE  # the last one takes its place
            moved = np.uint64(fill[n].component)
            keys[place] = keys[n]
            fill[place].component = moved
            filling[moved].place = place
            if full:
                left -= freeze_all(
                    channel, last, left, final, True, shift, contended, channels, filling, loads, keys, pool, nexts,
                    hops, shares, freezing, limits, flow_limit,
                )  # fmt: skip
        if (before - n) * MANY_ALIKE < before:
            patience_left -= ONE
    return n, left, last


@called
def fill_heap(  # type: ignore[no-untyped-def]
    n_channels, n_flows, n_left, last, shift, contended, channels, filling, fill, loads, keys, pool, nexts, hops,
    shares, freezing, flows, limits, n_limits, flow_limit,
):  # fmt: skip
    """Do what :func:`fill_alike` does, to the end, from the level `last` upwards, where many channels have different
    shares; `n_left` flows are left.

    The channels are put in a heap by a lower bound of their share: shares only rise while others freeze, so an old
    share will do.
    """
    left = np.uint64(n_left)
    size = ZERO
    for i in range(np.uint64(n_channels)):
        channel = np.uint64(fill[i].component)
        if filling[channel].unfrozen > 0:
            fill[size].key = level_of(channel, filling, loads)
            fill[size].channel = channel
            size += ONE
    for i in range(size >> ONE):
        sift(fill, (size >> ONE) - ONE - i, size)
    while left > ZERO:
        limit = next_limit(limits, n_limits)
        if size == ZERO or limits[limit].rate <= fill[ZERO].key:
            if limit == UNLIMITED:
                break
            last = limits[limit].rate if limits[limit].rate > last * (1.0 + SAME) else last
            left -= freeze_limited(
                limit, last, n_flows, False, shift, contended, channels, filling, loads, keys, nexts, hops, shares,
                flows, limits, flow_limit,
            )  # fmt: skip
            continue
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
            left -= freeze_all(
                channel, last, left, False, False, shift, contended, channels, filling, loads, keys, pool, nexts, hops,
                shares, freezing, limits, flow_limit,
            )  # fmt: skip
            continue
        sift(fill, ZERO, size)


@inlined
def freeze(flow, full, level, keyed, shift, contended, filling, loads, keys, nexts, hops, shares, flow_limit):  # type: ignore[no-untyped-def]
    """Freeze a flow at `level` and take it off its other channels than `full` that are to be filled, whose shares are
    kept up to date if they are `keyed`."""
    nexts[flow] = level
    listed = flow_limit[flow] == LISTED
    entry = flow << shift
    other = np.uint64(hops[entry])
    while other != NONE:
        if other != full and (listed or is_contended(other, contended) == ONE):
            take(entry, other, level, filling, loads, shares)
            if keyed:
                keys[filling[other].place] = level_of(other, filling, loads)
        entry += ONE
        other = np.uint64(hops[entry])


@inlined
def freeze_limited(  # type: ignore[no-untyped-def]
    limit, level, n_flows, keyed, shift, contended, channels, filling, loads, keys, nexts, hops, shares, flows,
    limits, flow_limit,
):  # fmt: skip
    """Freeze the flows that are left of those with a limit; return how many these are."""
    frozen = np.uint64(limits[limit].left)
    limits[limit].left = 0
    rate = limits[limit].rate
    for i in range(np.uint64(n_flows)):
        flow = np.uint64(flows[i])
        if flow_limit[flow] == limit and nexts[flow] < 0.0:
            freeze(flow, NONE, level, keyed, shift, contended, filling, loads, keys, nexts, hops, shares, flow_limit)
            entry = flow << shift
            other = np.uint64(hops[entry])
            while is_contended(other, contended) == ONE or own_rate(entry, other, channels, loads, shares) != rate:
                entry += ONE
                other = np.uint64(hops[entry])
            channels[other].level = level
    return frozen


@inlined
def freeze_all(  # type: ignore[no-untyped-def]
    channel, level, left, final, keyed, shift, contended, channels, filling, loads, keys, pool, nexts, hops, shares,
    freezing, limits, flow_limit,
):  # fmt: skip
    """Freeze the flows that are left on a channel, which is full at `level`, of the `left` ones; return how many these
    are. Nothing of other channels is needed any more if this level is the `final` one."""
    frozen = list_unfrozen(channel, level, shift, channels, pool, nexts, freezing)
    if frozen > ZERO:
        channels[channel].level = level
    if frozen == left:  # the last ones: nothing of other channels is needed any more
        return frozen
    for j in range(frozen):
        flow = np.uint64(freezing[j])
        if flow_limit[flow] < MOST_LIMITS:
            limits[flow_limit[flow]].left -= 1
        if not final:
            freeze(flow, channel, level, keyed, shift, contended, filling, loads, keys, nexts, hops, shares, flow_limit)
    filling[channel].unfrozen = 0
    return frozen


@inlined
def list_unfrozen(channel, level, shift, channels, pool, nexts, freezing):  # type: ignore[no-untyped-def]
    """List the channel's unfrozen flows in `freezing`, give them the rate `level`, and return how many these are. A
    flow that crosses the channel twice counts once."""
    first = np.uint64(channels[channel].first)
    n = ZERO
    for p in range(first, first + np.uint64(channels[channel].used)):  # without a branch, which would be unpredictable
        flow = pool[p] >> shift
        rate = nexts[flow]
        freezing[n] = flow
        n += ONE if rate < 0.0 else ZERO
        nexts[flow] = level if rate < 0.0 else rate
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


FEW = 512  # up to this number of channels, a linear scan replaces the heap
PATIENCE = 8  # levels at which few channels fill up before a heap is built, in the hope that no flows are left then
PROBE = 64  # every 64th solve a sweep is replaced by a search, to see whether searches would be cheaper by now


@inlined
def collect(net: View, channel, epoch, threshold, listed, n_flows, n_limits):  # type: ignore[no-untyped-def]
    """Find the channels connected to `channel` through flows not below the threshold.

    Those that are to be filled are appended to the `listed` ones in ``fill[].component``, the flows to the
    `n_flows` ones in `scratch`. Returns (number of channels, number of flows found, number of limits).
    """
    shift = np.uint64(net.hop_shift)
    start = np.uint64(listed)
    net.fill[start].component = channel
    net.marks[channel] = epoch
    n = start + ONE
    i = start
    while i < n:
        at = net.fill[i].component
        i += ONE
        residual = net.channels[at].capacity
        load = 0.0
        first = net.channels[at].first
        used = net.channels[at].used
        unfrozen = used
        for p in range(first, first + used):
            flow = net.pool[p] >> shift
            rate = net.flow_rate[flow]
            share = net.flow_share[net.pool[p]] if net.split == 1 else 1.0
            if rate < threshold:
                residual -= rate * share
                unfrozen -= 1
                continue
            load += share
            if net.flow_next[flow] >= 0.0:
                net.flow_next[flow] = -1.0
                net.scratch[n_flows] = flow
                n_flows += 1
                entry = flow << shift
                while net.flow_hops[entry] != LAST:
                    other = np.uint64(net.flow_hops[entry])
                    if net.marks[other] != epoch:
                        net.marks[other] = epoch
                        if is_contended(other, net.contended) == ONE:
                            net.fill[n].component = other
                            n += ONE
                    entry += ONE
                n, n_limits = set_limit(
                    flow, threshold, shift, net.contended, net.channels, net.filling, net.fill, n, net.loads,
                    net.flow_hops, net.flow_share, net.limits, n_limits, net.flow_limit,
                )  # fmt: skip
        net.filling[at].residual = residual
        net.filling[at].unfrozen = unfrozen
        if net.split == 1:
            net.loads[at] = load
        if not net.channels[at].level < threshold:
            net.channels[at].level = np.inf
    if net.channels[channel].used == 1:  # not contended: a limit of its flow
        n -= ONE
        net.fill[start].component = net.fill[n].component
    return np.int64(n), n_flows, n_limits


@inlined
def set_rate(net: View, flow, rate):  # type: ignore[no-untyped-def]
    """Assign a flow's rate and the planned end that follows; an unchanged rate leaves the planned end as it is."""
    now = net.now
    old = net.flow_rate[flow]
    if old == np.inf:  # just added
        slot = net.flows[flow].slot
        end = now + (link_bytes(net, slot) if net.shaped == 0 else net.wire[slot]) / rate
    elif abs(rate - old) <= SAME * old:
        return
    else:
        end = now + max(net.flow_end[flow] - now, 0.0) * (old / rate)
        net.rerated += 1
    net.flow_rate[flow] = rate
    net.flow_end[flow] = end
    if net.heap_valid == 1:
        net.n_heap = heap_set(net.heap, net.flows, net.n_heap, end, flow)


@inlined
def place_new_flows(net: View):  # type: ignore[no-untyped-def]
    """Assign rates to new flows that share no channel; mark the channels of the others as changed."""
    n_active = net.n_active
    shift = net.hop_shift
    for flow in range(n_active - net.n_new, n_active):
        first = flow << shift
        alone = True
        rate = np.inf
        tightest = 0
        share = np.inf
        entry = first
        while net.flow_hops[entry] != LAST:
            channel = net.flow_hops[entry]
            k = net.channels[channel].used
            capacity = net.channels[channel].capacity
            share = min(share, capacity / k)
            if net.split == 1:
                capacity /= net.flow_share[entry]
            alone = alone and k == 1
            if capacity < rate:
                rate = capacity
                tightest = channel
            entry += 1
        if net.is_fifo == 1:  # then no other flow is on the route, but it may cross a channel twice
            alone = True
            rate = min(rate, share)
        if alone:
            for e in range(first, entry):
                net.channels[net.flow_hops[e]].level = np.inf
            net.channels[tightest].level = rate
            set_rate(net, flow, rate)
            continue
        net.threshold = min(net.threshold, share)
        for e in range(first, entry):
            mark_dirty(net, net.flow_hops[e])


@inlined
def fill_component(net: View, n, n_flows, n_limits):  # type: ignore[no-untyped-def]
    """Fill the `n` channels listed in ``fill[].component`` with the `n_flows` flows listed in `scratch`."""
    shift = np.uint64(net.hop_shift)
    channels, filling, fill, loads, keys, pool = net.channels, net.filling, net.fill, net.loads, net.keys, net.pool
    nexts, hops, shares, freezing = net.flow_next, net.flow_hops, net.flow_share, net.freezing
    patience = n if n <= FEW else PATIENCE
    n, left, last = fill_alike(
        n, n_flows, patience, shift, net.contended, channels, filling, fill, loads, keys, pool, nexts, hops, shares,
        freezing, net.scratch, net.limits, n_limits, net.flow_limit,
    )  # fmt: skip
    if left > ZERO:
        fill_heap(
            n, n_flows, left, last, shift, net.contended, channels, filling, fill, loads, keys, pool, nexts, hops,
            shares, freezing, net.scratch, net.limits, n_limits, net.flow_limit,
        )  # fmt: skip


@inlined
def sweep(net: View, threshold):  # type: ignore[no-untyped-def]
    """Fill all flows not below the threshold again, wherever they are."""
    shift = np.uint64(net.hop_shift)
    n_active = net.n_active
    n_old = n_active - net.n_new
    channels, rates, nexts, ends, pool = net.channels, net.flow_rate, net.flow_next, net.flow_end, net.pool
    n_flows = -1
    if net.split + net.shaped == 0 and not has_changes(net):
        narrow = net.narrowest
        n_flows = fill_hubs(n_active, threshold, shift, net.contended, narrow, channels, net.fill, rates, nexts, pool)
    if n_flows < 0:
        for i in range(net.n_dirty):
            if not channels[net.dirty[i]].level < threshold:
                channels[net.dirty[i]].level = np.inf
        n, n_flows, n_limits = collect_all(
            n_active, threshold, shift, net.contended, channels, net.filling, net.fill, net.loads,
            rates, nexts, net.flow_hops, net.flow_share, pool, net.freezing, net.scratch, net.limits, net.flow_limit,
        )  # fmt: skip
        fill_component(net, n, n_flows, n_limits)
    net.rerated += set_all_rates(n_old, net.now, rates, nexts, ends)
    for flow in range(n_old, n_active):
        set_rate(net, flow, net.flow_next[flow])


@inlined
def solve(net: View):  # type: ignore[no-untyped-def]
    """Update all rates after the changes of this instant."""
    if net.n_new > 0:
        place_new_flows(net)
    n_dirty = net.n_dirty
    if n_dirty > 0 and net.is_fifo == 0:
        net.epoch += 1
        epoch = net.epoch
        threshold = net.threshold * (1.0 - 1e-12)
        if net.sweeping == 1 and epoch % PROBE != 0:
            sweep(net, threshold)
        else:
            n = n_flows = n_limits = 0
            for i in range(n_dirty):
                channel = net.dirty[i]
                if net.marks[channel] != epoch and net.channels[channel].used > 0:
                    n, n_flows, n_limits = collect(net, channel, epoch, threshold, n, n_flows, n_limits)
            fill_component(net, n, n_flows, n_limits)
            for i in range(n_flows):
                set_rate(net, net.scratch[i], net.flow_next[net.scratch[i]])
            choose(net, n_flows)
        net.n_dirty = 0
        net.threshold = np.inf
    net.round_new = net.n_new
    net.n_new = 0


@inlined
def choose(net: View, n_flows):  # type: ignore[no-untyped-def]
    """Choose between heap and scan, and between search and sweep, by the `n_flows` of the last searches."""
    net.usually_found += (16 * n_flows - net.usually_found) >> 3
    usually = net.usually_found >> 4
    n_active = net.n_active
    if net.heap_valid == 1:
        if usually > 32 and usually * 16 > n_active:
            for i in range(net.n_heap):
                net.flows[net.heap[i].item].heap_place = -1
            net.n_heap = 0
            net.heap_valid = 0
    elif usually * 64 < n_active:
        build_heap(net)
    net.sweeping = 1 if net.heap_valid == 0 and usually * 2 > n_active else 0


@inlined
def build_heap(net: View):  # type: ignore[no-untyped-def]
    """Find ends with the heap from now on."""
    n = net.n_active
    for flow in range(n):
        net.heap[flow].time = net.flow_end[flow]
        net.heap[flow].item = flow
        net.flows[flow].heap_place = flow
    net.n_heap = n
    for i in range(n // 2 - 1, -1, -1):
        heap_down(net.heap, net.flows, i, n)
    net.heap_valid = 1


@inlined
def end_flows(net: View, limit):  # type: ignore[no-untyped-def]
    """End the flows that are due by `limit`; return how many slots `scratch` lists.

    Called after :func:`next_end`, which determines the blocks in which a flow ends.
    """
    n = 0
    if net.heap_valid == 1:
        while net.n_active > 0 and net.heap[0].time <= limit:
            net.scratch[n] = end_flow(net, net.heap[0].item)
            n += 1
        return n
    size = np.uint64(BLOCK)
    high = np.uint64(net.n_active)
    while high > ZERO:
        low = (high - ONE) // size * size
        if net.soonest[low // size] <= limit:
            for i in range(high - low):
                flow = high - ONE - i  # downwards, because the last flow takes the number of one that ends
                if net.flow_end[flow] <= limit:
                    net.scratch[n] = end_flow(net, np.int64(flow))
                    n += 1
        high = low
    return n


@inlined
def next_end(net: View):  # type: ignore[no-untyped-def]
    """Return when the next flow ends, inf if there is none; store the ends that :func:`end_flows` needs."""
    n = net.n_active
    if net.heap_valid == 1:
        return net.heap[0].time if n > 0 else np.inf
    return soonest_ends(n, net.flow_end, net.soonest)
