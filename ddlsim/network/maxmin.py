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
    fill_alike,
    fill_heap,
    fill_hubs,
    is_contended,
    set_all_rates,
    set_limit,
    soonest_ends,
)
from ddlsim.network.flows import end_flow, link_bytes, mark_dirty
from ddlsim.network.heap import heap_down, heap_set
from ddlsim.network.state import BLOCK, LAST, View

FEW = 512  # up to this number of channels, a linear scan replaces the heap
PATIENCE = 8  # levels at which few channels fill up before a heap is built, in the hope that no flows are left then
PROBE = 64  # every 64th solve a sweep is replaced by a search, to see whether searches would be cheaper by now


@inlined
def collect(net: View, channel, epoch, threshold, listed, found, n_limits):  # type: ignore[no-untyped-def]
    """Find the channels connected to `channel` through flows not below the threshold.

    Those that are to be filled are appended to the `listed` ones in ``fill[].component``, the flows to the `found`
    ones in `scratch`. Returns (number of channels, number of flows found, number of limits).
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
                net.scratch[found] = flow
                found += 1
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
    return np.int64(n), found, n_limits


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
    found = -1
    if net.split + net.shaped == 0 and not has_changes(net):
        narrowest = net.narrowest
        found = fill_hubs(n_active, threshold, shift, net.contended, narrowest, channels, net.fill, rates, nexts, pool)
    if found < 0:
        for i in range(net.n_dirty):
            if not channels[net.dirty[i]].level < threshold:
                channels[net.dirty[i]].level = np.inf
        n, found, n_limits = collect_all(
            n_active, threshold, shift, net.contended, channels, net.filling, net.fill, net.loads,
            rates, nexts, net.flow_hops, net.flow_share, pool, net.freezing, net.scratch, net.limits, net.flow_limit,
        )  # fmt: skip
        fill_component(net, n, found, n_limits)
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
            n = found = n_limits = 0
            for i in range(n_dirty):
                channel = net.dirty[i]
                if net.marks[channel] != epoch and net.channels[channel].used > 0:
                    n, found, n_limits = collect(net, channel, epoch, threshold, n, found, n_limits)
            fill_component(net, n, found, n_limits)
            for i in range(found):
                set_rate(net, net.scratch[i], net.flow_next[net.scratch[i]])
            choose(net, found)
        net.n_dirty = 0
        net.threshold = np.inf
    net.round_new = net.n_new
    net.n_new = 0


@inlined
def choose(net: View, found):  # type: ignore[no-untyped-def]
    """Choose between heap and scan, and between search and sweep, by how many flows the last searches have `found`."""
    net.usually_found += (16 * found - net.usually_found) >> 3
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
