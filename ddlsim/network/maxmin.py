"""Max-min fair rates by progressive filling, recomputed only where something changed.

Progressive filling raises all rates together; the channel with the least capacity per unfinished flow fills up first
and freezes its flows at that share (Bertsekas and Gallager, Data Networks, section 6.5.2). Two facts limit the work
when a flow begins or ends:

* only flows connected to the changed channels through shared channels can be affected;
* filling proceeds as before up to the lowest level at which the change matters (`THRESHOLD`: the rate of a flow that
  ended, or the equal share that a new flow gets at least). Flows frozen below it keep their rates and propagate no
  change.

If nearly all flows are connected, finding the connected part costs more than it saves. Then all flows above the
threshold are filled again in one sweep over arrays, and ends are found by scanning instead of with a heap (`HEAP_VALID`
is 0 meanwhile).

``flow_next`` is the new rate of a flow; it is negative until the filling has frozen the flow.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.changes import has_changes
from ddlsim.network.filling import (
    ONE,
    SAME,
    ZERO,
    collect_all,
    fill_few,
    fill_hubs,
    fill_many,
    set_all_rates,
    soonest_ends,
)
from ddlsim.network.flows import end_flow, link_bytes, mark_dirty
from ddlsim.network.heap import heap_down, heap_set
from ddlsim.network.state import (
    BLOCK,
    EPOCH,
    FIFO,
    HEAP_VALID,
    HOP_SHIFT,
    LAST,
    N_ACTIVE,
    N_DIRTY,
    N_HEAP,
    N_NEW,
    NARROWEST,
    NOW,
    RERATED,
    ROUND_NEW,
    ROUND_TRANSFER_MAX,
    ROUND_TRANSFER_MIN,
    SHAPED,
    SPLIT,
    THRESHOLD,
    USUALLY_FOUND,
    Net,
)

FEW = 512  # up to this number of channels, a linear scan replaces the heap
FIRST = 8  # channels that are scanned linearly before a heap is built, because no flows may be left by then
PROBE = 64  # every 64th solve, a search replaces the sweep, to find out whether it would now be cheaper


@inlined
def collect(net: Net, channel, epoch, threshold, found):  # type: ignore[no-untyped-def]
    """Find the channels connected to `channel` through flows not below the threshold.

    They are listed in ``fill[].component`` and prepared for the filling; the flows are appended to the first `found`
    ones in `scratch`. Returns (number of channels, number of flows found).
    """
    shift = np.uint64(net.counts[HOP_SHIFT])
    net.fill[0].component = channel
    net.marks[channel] = epoch
    n = 1
    i = 0
    while i < n:
        at = net.fill[i].component
        i += 1
        residual = net.channels[at].capacity
        load = 0.0
        first = net.channels[at].first
        used = net.channels[at].used
        unfrozen = used
        for p in range(first, first + used):
            flow = net.pool[p] >> shift
            rate = net.flow_rate[flow]
            share = net.flow_share[net.pool[p]] if net.counts[SPLIT] == 1 else 1.0
            if rate < threshold:
                residual -= rate * share
                unfrozen -= 1
                continue
            load += share
            if net.flow_next[flow] >= 0.0:
                net.flow_next[flow] = -1.0
                net.scratch[found] = flow
                found += 1
                entry = flow << shift
                while net.flow_hops[entry] != LAST:
                    other = net.flow_hops[entry]
                    if net.marks[other] != epoch:
                        net.marks[other] = epoch
                        net.fill[n].component = other
                        n += 1
                    entry += ONE
        net.filling[at].residual = residual
        net.filling[at].unfrozen = unfrozen
        if net.counts[SPLIT] == 1:
            net.loads[at] = load
        if not net.channels[at].level < threshold:
            net.channels[at].level = np.inf
    return n, found


@inlined
def set_rate(net: Net, flow, rate):  # type: ignore[no-untyped-def]
    """Assign a flow's rate and the planned end that follows; an unchanged rate leaves the planned end as it is."""
    now = net.reals[NOW]
    old = net.flow_rate[flow]
    if old == np.inf:  # just added
        slot = net.flows[flow].slot
        transfer = (link_bytes(net, slot) if net.counts[SHAPED] == 0 else net.wire[slot]) / rate
        end = now + transfer
        net.reals[ROUND_TRANSFER_MIN] = min(net.reals[ROUND_TRANSFER_MIN], transfer)
        net.reals[ROUND_TRANSFER_MAX] = max(net.reals[ROUND_TRANSFER_MAX], transfer)
    elif abs(rate - old) <= SAME * old:
        return
    else:
        end = now + max(net.flow_end[flow] - now, 0.0) * (old / rate)
        net.counts[RERATED] += 1
    net.flow_rate[flow] = rate
    net.flow_end[flow] = end
    if net.counts[HEAP_VALID] == 1:
        net.counts[N_HEAP] = heap_set(net.heap, net.flows, net.counts[N_HEAP], end, flow)


@inlined
def place_new_flows(net: Net):  # type: ignore[no-untyped-def]
    """Assign rates to new flows that share no channel; mark the channels of the others as changed."""
    n_active = net.counts[N_ACTIVE]
    shift = net.counts[HOP_SHIFT]
    for flow in range(n_active - net.counts[N_NEW], n_active):
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
            if net.counts[SPLIT] == 1:
                capacity /= net.flow_share[entry]
            alone = alone and k == 1
            if capacity < rate:
                rate = capacity
                tightest = channel
            entry += 1
        if net.counts[FIFO] == 1:  # then no other flow is on the route, but it may cross a channel twice
            alone = True
            rate = min(rate, share)
        if alone:
            for e in range(first, entry):
                net.channels[net.flow_hops[e]].level = np.inf
            net.channels[tightest].level = rate
            set_rate(net, flow, rate)
            continue
        net.reals[THRESHOLD] = min(net.reals[THRESHOLD], share)
        for e in range(first, entry):
            mark_dirty(net, net.flow_hops[e])


@inlined
def fill_component(net: Net, n, n_flows):  # type: ignore[no-untyped-def]
    """Fill the `n` channels listed in ``fill[].component``, which carry `n_flows` unfrozen flows."""
    shift = np.uint64(net.counts[HOP_SHIFT])
    channels, filling, fill, loads, keys, pool = net.channels, net.filling, net.fill, net.loads, net.keys, net.pool
    nexts, hops, shares, freezing = net.flow_next, net.flow_hops, net.flow_share, net.freezing
    few = FEW if n <= FEW else FIRST
    n, left, last = fill_few(
        n, n_flows, few, shift, channels, filling, fill, loads, keys, pool, nexts, hops, shares, freezing
    )
    if left > ZERO:
        fill_many(n, left, last, shift, channels, filling, fill, loads, pool, nexts, hops, shares, freezing)


@inlined
def sweep(net: Net, threshold):  # type: ignore[no-untyped-def]
    """Fill all flows not below the threshold again; return their number."""
    shift = np.uint64(net.counts[HOP_SHIFT])
    n_active = net.counts[N_ACTIVE]
    n_old = n_active - net.counts[N_NEW]
    channels, rates, nexts, ends, pool = net.channels, net.flow_rate, net.flow_next, net.flow_end, net.pool
    found = -1
    if net.counts[SPLIT] + net.counts[SHAPED] == 0 and not has_changes(net):
        narrowest = net.reals[NARROWEST]
        found = fill_hubs(n_active, threshold, shift, net.contended, narrowest, channels, net.fill, rates, nexts, pool)
    if found < 0:
        n, found = collect_all(
            n_active, threshold, shift, net.occupied, channels, net.filling, net.fill, net.loads,
            rates, nexts, net.flow_hops, net.flow_share, pool, net.freezing,
        )  # fmt: skip
        fill_component(net, n, found)
    net.counts[RERATED] += set_all_rates(n_old, net.reals[NOW], rates, nexts, ends)
    for flow in range(n_old, n_active):
        set_rate(net, flow, net.flow_next[flow])
    return found


@inlined
def solve(net: Net):  # type: ignore[no-untyped-def]
    """Update all rates after the changes of this instant."""
    if net.counts[N_NEW] > 0:
        place_new_flows(net)
    n_dirty = net.counts[N_DIRTY]
    if n_dirty > 0 and net.counts[FIFO] == 0:
        net.counts[EPOCH] += 1
        epoch = net.counts[EPOCH]
        threshold = net.reals[THRESHOLD] * (1.0 - 1e-12)
        found = 0
        if net.counts[HEAP_VALID] == 0 and epoch % PROBE != 0:
            found = sweep(net, threshold)
        else:
            for i in range(n_dirty):
                channel = net.dirty[i]
                if net.marks[channel] != epoch and net.channels[channel].used > 0:
                    before = found
                    n, found = collect(net, channel, epoch, threshold, found)
                    fill_component(net, n, found - before)
            for i in range(found):
                set_rate(net, net.scratch[i], net.flow_next[net.scratch[i]])
        net.counts[N_DIRTY] = 0
        net.reals[THRESHOLD] = np.inf
        choose(net, found)
    net.counts[ROUND_NEW] = net.counts[N_NEW]
    net.counts[N_NEW] = 0


@inlined
def choose(net: Net, found):  # type: ignore[no-untyped-def]
    """Choose between heap and sweep by the number of flows that recent solves had to fill again."""
    net.counts[USUALLY_FOUND] += (16 * found - net.counts[USUALLY_FOUND]) >> 3
    usually = net.counts[USUALLY_FOUND] >> 4
    if net.counts[HEAP_VALID] == 1:
        if usually > 32 and usually * 4 > net.counts[N_ACTIVE]:
            drop_heap(net)
    elif usually * 16 < net.counts[N_ACTIVE]:
        build_heap(net)


@inlined
def drop_heap(net: Net):  # type: ignore[no-untyped-def]
    """Find ends by scanning from now on."""
    for i in range(net.counts[N_HEAP]):
        net.flows[net.heap[i].item].heap_place = -1
    net.counts[N_HEAP] = 0
    net.counts[HEAP_VALID] = 0


@inlined
def build_heap(net: Net):  # type: ignore[no-untyped-def]
    """Find ends with the heap from now on."""
    n = net.counts[N_ACTIVE]
    for flow in range(n):
        net.heap[flow].time = net.flow_end[flow]
        net.heap[flow].item = flow
        net.flows[flow].heap_place = flow
    net.counts[N_HEAP] = n
    for i in range(n // 2 - 1, -1, -1):
        heap_down(net.heap, net.flows, i, n)
    net.counts[HEAP_VALID] = 1


@inlined
def end_flows(net: Net, limit):  # type: ignore[no-untyped-def]
    """End the flows that are due by `limit`; return how many slots `scratch` lists.

    Called after :func:`next_end`, which determines the blocks in which a flow ends.
    """
    n = 0
    if net.counts[HEAP_VALID] == 1:
        while net.counts[N_ACTIVE] > 0 and net.heap[0].time <= limit:
            net.scratch[n] = end_flow(net, net.heap[0].item)
            n += 1
        return n
    size = np.uint64(BLOCK)
    high = np.uint64(net.counts[N_ACTIVE])
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
def next_end(net: Net):  # type: ignore[no-untyped-def]
    """Return when the next flow ends, inf if there is none; store the ends that :func:`end_flows` needs."""
    n = net.counts[N_ACTIVE]
    if net.counts[HEAP_VALID] == 1:
        return net.heap[0].time if n > 0 else np.inf
    return soonest_ends(n, net.flow_end, net.soonest)
