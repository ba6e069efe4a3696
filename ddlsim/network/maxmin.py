"""Max-min fair rates by progressive filling, solved again only where something changed.

Progressive filling raises all rates together; the channel with the least capacity per unfinished flow fills
up first and freezes its flows at that share (Bertsekas and Gallager, Data Networks, section 6.5.2). Two facts
keep the work small after a flow has come or gone:

* only flows connected to the changed channels through shared channels can be affected;
* filling proceeds as before up to the lowest level at which the change matters (`THRESHOLD`: the rate of a
  flow that left, the equal share that a new flow is sure of). Flows frozen below it keep their rate and pass
  no influence on.

Where nearly everything is connected, looking for the connected part costs more than it saves: then all flows
above the threshold are filled again in one sweep over arrays, and ends are found by scanning instead of with
a heap (`HEAP_VALID` is 0 meanwhile).

``flow_next`` is the rate that a flow gets; negative while the filling has not frozen it yet.
"""

from __future__ import annotations

import numpy as np

from ddlsim.network.compiled import inlined
from ddlsim.network.flows import mark_dirty
from ddlsim.network.heap import heap_down, heap_set
from ddlsim.network.state import (
    EPOCH,
    HEAP_VALID,
    HOP_SHIFT,
    N_ACTIVE,
    N_DIRTY,
    N_HEAP,
    N_NEW,
    NOW,
    ROUND_TRANSFER_MAX,
    ROUND_TRANSFER_MIN,
    THRESHOLD,
    Net,
)

SAME = 1e-13  # relative; shares and rates this close differ by rounding only
SCAN_LIMIT = 12  # components with fewer channels are filled by scanning instead of with a heap
PROBE = 64  # every so many solves a sweep is replaced by a search, to see whether it would be cheaper by now


# ---------------------------------------------------------------- what has to be filled again


@inlined
def collect(net: Net, channel, epoch, threshold, found):  # type: ignore[no-untyped-def]
    """Find the channels connected to `channel` through flows not below the threshold.

    They are listed in ``fill[].component`` and ready for the filling; the flows are appended to the `found`
    ones in `scratch`. Returns (number of channels, number of flows found).
    """
    shift = net.counts[HOP_SHIFT]
    net.fill[0].component = channel
    net.channels[channel].mark = epoch
    n = 1
    i = 0
    while i < n:
        at = net.fill[i].component
        i += 1
        residual = net.channels[at].capacity
        first = net.channels[at].first
        used = net.channels[at].used
        unfrozen = used
        for p in range(first, first + used):
            flow = net.pool[p] >> shift
            rate = net.flow_rate[flow]
            if rate < threshold:
                residual -= rate
                unfrozen -= 1
            elif net.flow_next[flow] >= 0.0:
                net.flow_next[flow] = -1.0
                net.scratch[found] = flow
                found += 1
                for entry in range(flow << shift, net.flows[flow].hop_end):
                    other = net.flow_hops[entry]
                    if net.channels[other].mark != epoch:
                        net.channels[other].mark = epoch
                        net.fill[n].component = other
                        n += 1
        net.filling[at].residual = residual
        net.filling[at].unfrozen = unfrozen
        if not net.channels[at].level < threshold:
            net.channels[at].level = np.inf
    return n, found


@inlined
def collect_all(net: Net, threshold):  # type: ignore[no-untyped-def]
    """Make all flows not below the threshold ready for the filling; return (channels, flows) to be filled."""
    shift = net.counts[HOP_SHIFT]
    for channel in range(net.channels.size):
        net.filling[channel].residual = net.channels[channel].capacity
        net.filling[channel].unfrozen = net.channels[channel].used
    found = net.counts[N_ACTIVE]
    for flow in range(net.counts[N_ACTIVE]):
        rate = net.flow_rate[flow]
        net.flow_next[flow] = -1.0
        if rate < threshold:
            net.flow_next[flow] = rate
            found -= 1
            for entry in range(flow << shift, net.flows[flow].hop_end):
                channel = net.flow_hops[entry]
                net.filling[channel].residual -= rate
                net.filling[channel].unfrozen -= 1
    n = 0
    for channel in range(net.channels.size):
        if not net.channels[channel].level < threshold:
            net.channels[channel].level = np.inf
        net.fill[n].component = channel
        n += 1 if net.filling[channel].unfrozen > 0 else 0
    return n, found


# ---------------------------------------------------------------- filling


@inlined
def freeze(net: Net, channel, share):  # type: ignore[no-untyped-def]
    """Freeze the channel's unfrozen flows at `share`; take it from the other channels they cross."""
    shift = net.counts[HOP_SHIFT]
    net.channels[channel].level = share
    first = net.channels[channel].first
    n = 0
    for p in range(first, first + net.channels[channel].used):  # no branch: which ones is unpredictable
        flow = net.pool[p] >> shift
        net.freezing[n] = flow
        n += 1 if net.flow_next[flow] < 0.0 else 0
    for i in range(n):
        flow = net.freezing[i]
        net.flow_next[flow] = share
        for entry in range(flow << shift, net.flows[flow].hop_end):
            other = net.flow_hops[entry]
            net.filling[other].residual -= share
            net.filling[other].unfrozen -= 1


@inlined
def fill_up(net: Net, n):  # type: ignore[no-untyped-def]
    """Fill the `n` channels listed in ``fill[].component``.

    With few channels all are looked at for the next one. Else they are in a heap by a lower bound of their
    share: shares only rise while others freeze, so an old share will do.
    """
    fill = net.fill
    last = 0.0
    size = 0
    scan = n <= SCAN_LIMIT
    if not scan:
        for i in range(n):
            channel = fill[i].component
            if net.filling[channel].unfrozen > 0:
                fill[size].key = net.filling[channel].residual / net.filling[channel].unfrozen
                fill[size].channel = channel
                size += 1
        for i in range(size // 2 - 1, -1, -1):
            sift(fill, i, size)
    while True:
        best = -1
        share = np.inf
        if scan:
            for i in range(n):
                channel = fill[i].component
                k = net.filling[channel].unfrozen
                if k > 0 and net.filling[channel].residual / k < share:
                    share = net.filling[channel].residual / k
                    best = channel
        else:
            while size > 0:
                channel = fill[0].channel
                k = net.filling[channel].unfrozen
                share = net.filling[channel].residual / k if k > 0 else np.inf
                if share <= fill[0].key:
                    best = channel
                    break
                if k > 0:
                    fill[0].key = share
                else:
                    size -= 1
                    fill[0].key = fill[size].key
                    fill[0].channel = fill[size].channel
                sift(fill, 0, size)
        if best < 0:
            return
        last = share if share > last * (1.0 + SAME) else last
        freeze(net, best, last)


@inlined
def sift(fill, i, n):  # type: ignore[no-untyped-def]
    """Move entry `i` of the filling heap down."""
    key = fill[i].key
    channel = fill[i].channel
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and fill[child + 1].key < fill[child].key:
            child += 1
        if fill[child].key >= key:
            break
        fill[i].key = fill[child].key
        fill[i].channel = fill[child].channel
        i = child
    fill[i].key = key
    fill[i].channel = channel


# ---------------------------------------------------------------- new rates, new ends


@inlined
def set_rate(net: Net, flow, rate):  # type: ignore[no-untyped-def]
    """Give a flow a new rate and plan its end; an unchanged rate leaves the planned end as it is."""
    now = net.reals[NOW]
    old = net.flow_rate[flow]
    if old == np.inf:  # just added
        transfer = net.slots[net.flows[flow].slot].nbytes / rate
        end = now + transfer
        net.reals[ROUND_TRANSFER_MIN] = min(net.reals[ROUND_TRANSFER_MIN], transfer)
        net.reals[ROUND_TRANSFER_MAX] = max(net.reals[ROUND_TRANSFER_MAX], transfer)
    elif abs(rate - old) <= SAME * old:
        return
    else:
        end = now + max(net.flow_end[flow] - now, 0.0) * (old / rate)
    net.flow_rate[flow] = rate
    net.flow_end[flow] = end
    if net.counts[HEAP_VALID] == 1:
        net.counts[N_HEAP] = heap_set(net.heap, net.flows, net.counts[N_HEAP], end, flow)


@inlined
def set_all_rates(net: Net):  # type: ignore[no-untyped-def]
    """The same for all flows, while there is no heap."""
    now = net.reals[NOW]
    n_active = net.counts[N_ACTIVE]
    n_old = n_active - net.counts[N_NEW]
    rates = net.flow_rate
    nexts = net.flow_next
    ends = net.flow_end
    for flow in range(n_old):  # without branches, so that the processor takes several at a time
        old = rates[flow]
        rate = nexts[flow]
        end = ends[flow]
        left = end - now
        planned = now + (left if left > 0.0 else 0.0) * (old / rate)
        change = rate - old
        changed = (change if change > 0.0 else -change) > SAME * old
        rates[flow] = rate if changed else old
        ends[flow] = planned if changed else end
    for flow in range(n_old, n_active):
        set_rate(net, flow, nexts[flow])


@inlined
def place_new_flows(net: Net):  # type: ignore[no-untyped-def]
    """Rate the flows that are alone on their route; list the channels of the others as changed."""
    shift = net.counts[HOP_SHIFT]
    n_active = net.counts[N_ACTIVE]
    for flow in range(n_active - net.counts[N_NEW], n_active):
        alone = True
        rate = np.inf
        tightest = 0
        share = np.inf
        for entry in range(flow << shift, net.flows[flow].hop_end):
            channel = net.flow_hops[entry]
            k = net.channels[channel].used
            capacity = net.channels[channel].capacity
            alone = alone and k == 1
            if capacity < rate:
                rate = capacity
                tightest = net.flow_hops[entry]
            share = min(share, capacity / k)
        if alone:
            for entry in range(flow << shift, net.flows[flow].hop_end):
                net.channels[net.flow_hops[entry]].level = np.inf
            net.channels[tightest].level = rate
            set_rate(net, flow, rate)
            continue
        net.reals[THRESHOLD] = min(net.reals[THRESHOLD], share)
        for entry in range(flow << shift, net.flows[flow].hop_end):
            mark_dirty(net, net.flow_hops[entry])


@inlined
def solve(net: Net):  # type: ignore[no-untyped-def]
    """Bring all rates up to date after the changes of this instant."""
    if net.counts[N_NEW] > 0:
        place_new_flows(net)
    n_dirty = net.counts[N_DIRTY]
    if n_dirty > 0:
        net.counts[EPOCH] += 1
        epoch = net.counts[EPOCH]
        threshold = net.reals[THRESHOLD] * (1.0 - 1e-12)
        sweep = net.counts[HEAP_VALID] == 0 and epoch % PROBE != 0
        found = 0
        for i in range(n_dirty):
            channel = net.dirty[i]
            if sweep:
                n, found = collect_all(net, threshold)
            elif net.channels[channel].mark == epoch or net.channels[channel].used == 0:
                continue
            else:
                n, found = collect(net, channel, epoch, threshold, found)
            fill_up(net, n)
            if sweep:
                break
        if net.counts[HEAP_VALID] == 1 and found * 2 > net.counts[N_ACTIVE] and found > 128:
            drop_heap(net)
        if sweep:
            set_all_rates(net)
        else:
            for i in range(found):
                set_rate(net, net.scratch[i], net.flow_next[net.scratch[i]])
        net.counts[N_DIRTY] = 0
        net.reals[THRESHOLD] = np.inf
        if net.counts[HEAP_VALID] == 0 and found * 8 < net.counts[N_ACTIVE]:
            build_heap(net)
    net.counts[N_NEW] = 0


@inlined
def drop_heap(net: Net):  # type: ignore[no-untyped-def]
    """From now on, ends are found by scanning."""
    for i in range(net.counts[N_HEAP]):
        net.flows[net.heap[i].item].heap_place = -1
    net.counts[N_HEAP] = 0
    net.counts[HEAP_VALID] = 0


@inlined
def build_heap(net: Net):  # type: ignore[no-untyped-def]
    """From now on, ends are found with the heap."""
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
def next_end(net: Net):  # type: ignore[no-untyped-def]
    """Return when the next flow ends, inf if there is none."""
    n = net.counts[N_ACTIVE]
    if net.counts[HEAP_VALID] == 1:
        return net.heap[0].time if n > 0 else np.inf
    ends = net.flow_end
    a = b = c = d = np.inf  # four chains of comparisons go side by side in the processor
    for i in range(0, n - 3, 4):
        a = min(a, ends[i])
        b = min(b, ends[i + 1])
        c = min(c, ends[i + 2])
        d = min(d, ends[i + 3])
    for i in range(n - n % 4, n):
        a = min(a, ends[i])
    return min(min(a, b), min(c, d))
