"""Max-min fair rates by progressive filling, solved again only where something changed.

Progressive filling raises all rates together; the channel with the least capacity per unfinished flow fills
up first and freezes its flows at that share (Bertsekas and Gallager, Data Networks, section 6.5.2). Two facts
keep the work small after a flow has come or gone:

* only flows connected to the changed channels through shared channels can be affected;
* filling proceeds as before up to the lowest level at which the change matters (`THRESHOLD`: the rate of a
  flow that left, the equal share that a new flow is sure of). Flows frozen below it keep their rate and pass
  no influence on.
"""

from __future__ import annotations

import numpy as np

from ddlsim.network.heap import heap_down, heap_move, heap_push, jit
from ddlsim.network.state import (
    EPOCH,
    HEAP_VALID,
    HOP_SHIFT,
    N_ACTIVE,
    N_DIRTY,
    N_HEAP,
    N_NEW,
    N_SLOTS,
    NOW,
    ROUND_TRANSFER_MAX,
    ROUND_TRANSFER_MIN,
    THRESHOLD,
    Net,
)

SAME_LEVEL = 1.0 + 1e-13  # levels this close are equal but for rounding: their flows get the very same rate
SCAN_LIMIT = 12  # components with fewer channels are filled by scanning instead of with a heap


@jit
def set_rate(net: Net, slot, rate, heap):  # type: ignore[no-untyped-def]
    """Give a flow a new rate and plan its end; an unchanged rate leaves the planned end as it is."""
    now = net.reals[NOW]
    old = net.slot_rate[slot]
    if rate == old:
        return
    if old == np.inf:  # just activated
        transfer = net.slots[slot].nbytes / rate
        end = now + transfer
        if transfer < net.reals[ROUND_TRANSFER_MIN]:
            net.reals[ROUND_TRANSFER_MIN] = transfer
        if transfer > net.reals[ROUND_TRANSFER_MAX]:
            net.reals[ROUND_TRANSFER_MAX] = transfer
    else:
        end = now + max(net.slot_end[slot] - now, 0.0) * (old / rate)
    net.slot_rate[slot] = rate
    net.slot_end[slot] = end
    if not heap:
        return
    if net.slots[slot].heap_place >= 0:
        heap_move(net.heap, net.slots, net.counts[N_HEAP], end, slot)
    else:
        heap_push(net.heap, net.slots, net.counts[N_HEAP], end, slot)
        net.counts[N_HEAP] += 1


@jit
def freeze(net: Net, channel, share, epoch, heap):  # type: ignore[no-untyped-def]
    """Freeze the channel's unfrozen flows at `share`; take it from the other channels they cross."""
    shift = net.counts[HOP_SHIFT]
    net.channels[channel].level = share
    first = net.channels[channel].member
    n = 0
    for i in range(first, first + net.channels[channel].members):  # no branch: which ones is unpredictable
        slot = net.members[i]
        net.freezing[n] = slot
        n += 1 if net.slot_mark[slot] == epoch else 0
    for i in range(n):
        slot = net.freezing[i]
        net.slot_mark[slot] = 0
        for entry in range(slot << shift, net.slot_hop_end[slot]):
            other = net.slot_hops[entry]
            net.channels[other].residual -= share
            net.channels[other].unfrozen -= 1
        set_rate(net, slot, share, heap)


@jit
def collect(net: Net, channel, epoch, threshold):  # type: ignore[no-untyped-def]
    """Find the channels connected to `channel` and their unfrozen flows; return how many channels."""
    shift = net.counts[HOP_SHIFT]
    component = net.component
    members = net.members
    component[0] = channel
    net.channels[channel].mark = epoch
    n = 1
    i = 0
    end = 0
    while i < n:
        at = component[i]
        i += 1
        start = end
        residual = net.channels[at].capacity
        first = net.channels[at].first
        for p in range(first, first + net.channels[at].used):  # no branch, as above
            slot = net.pool[p] >> shift
            rate = net.slot_rate[slot]
            members[end] = slot
            below = rate < threshold
            residual -= rate if below else 0.0
            end += 0 if below else 1
        net.channels[at].residual = residual
        net.channels[at].unfrozen = end - start
        net.channels[at].member = start
        net.channels[at].members = end - start
        if not net.channels[at].level < threshold:
            net.channels[at].level = np.inf
        for j in range(start, end):
            slot = members[j]
            net.slot_mark[slot] = epoch
            for entry in range(slot << shift, net.slot_hop_end[slot]):
                other = net.slot_hops[entry]
                if net.channels[other].mark != epoch:
                    net.channels[other].mark = epoch
                    component[n] = other
                    n += 1
    return n, end


@jit
def fill_by_scan(net: Net, n, epoch, heap):  # type: ignore[no-untyped-def]
    """Filling for few channels: look at all of them for the next one."""
    last = 0.0
    while True:
        best = -1
        least = np.inf
        for i in range(n):
            channel = net.component[i]
            k = net.channels[channel].unfrozen
            if k > 0:
                share = net.channels[channel].residual / k
                if share < least:
                    least = share
                    best = channel
        if best < 0:
            return
        last = least if least > last * SAME_LEVEL else last
        freeze(net, best, last, epoch, heap)


@jit
def fill_by_heap(net: Net, n, epoch, heap):  # type: ignore[no-untyped-def]
    """Filling with a lazy heap: shares only rise while others freeze, so an old key is a lower bound."""
    fill = net.fill
    last = 0.0
    size = 0
    for i in range(n):
        channel = net.component[i]
        if net.channels[channel].unfrozen > 0:
            fill[size].key = net.channels[channel].residual / net.channels[channel].unfrozen
            fill[size].channel = channel
            size += 1
    for i in range(size // 2 - 1, -1, -1):
        sift(fill, i, size)
    while size > 0:
        channel = fill[0].channel
        k = net.channels[channel].unfrozen
        if k > 0:
            share = net.channels[channel].residual / k
            if share > fill[0].key:
                fill[0].key = share
                sift(fill, 0, size)
                continue
            last = share if share > last * SAME_LEVEL else last
            freeze(net, channel, last, epoch, heap)
        size -= 1
        fill[0].key = fill[size].key
        fill[0].channel = fill[size].channel
        sift(fill, 0, size)


@jit
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


@jit
def mark_dirty(net: Net, channel):  # type: ignore[no-untyped-def]
    net.dirty[net.counts[N_DIRTY]] = channel
    net.counts[N_DIRTY] += 1


@jit
def place_new_flows(net: Net):  # type: ignore[no-untyped-def]
    """Rate the flows that are alone on their route; list the channels of the others as changed."""
    for i in range(net.counts[N_NEW]):
        slot = net.new_slots[i]
        route = net.slots[slot].route
        alone = True
        rate = np.inf
        tightest = -1
        share = np.inf
        for h in range(net.routes[route].first, net.routes[route].last):
            channel = net.hops[h]
            k = net.channels[channel].used
            capacity = net.channels[channel].capacity
            alone = alone and k == 1
            if capacity < rate:
                rate = capacity
                tightest = channel
            share = min(share, capacity / k)
        if alone:
            for h in range(net.routes[route].first, net.routes[route].last):
                net.channels[net.hops[h]].level = np.inf
            net.channels[tightest].level = rate
            set_rate(net, slot, rate, net.counts[HEAP_VALID] == 1)
            continue
        net.reals[THRESHOLD] = min(net.reals[THRESHOLD], share)
        for h in range(net.routes[route].first, net.routes[route].last):
            mark_dirty(net, net.hops[h])
    net.counts[N_NEW] = 0


@jit
def solve(net: Net):  # type: ignore[no-untyped-def]
    """Bring all rates up to date after the changes of this instant."""
    place_new_flows(net)
    n_dirty = net.counts[N_DIRTY]
    if n_dirty == 0:
        return
    net.counts[EPOCH] += 1
    epoch = net.counts[EPOCH]
    heap = net.counts[HEAP_VALID] == 1
    threshold = net.reals[THRESHOLD] * (1.0 - 1e-12)
    touched = 0
    for i in range(n_dirty):
        channel = net.dirty[i]
        if net.channels[channel].mark == epoch or net.channels[channel].used == 0:
            continue
        n, visits = collect(net, channel, epoch, threshold)
        touched += visits
        if heap and visits * 2 > net.counts[N_ACTIVE] and visits > 128:
            heap = False
        if n <= SCAN_LIMIT:
            fill_by_scan(net, n, epoch, heap)
        else:
            fill_by_heap(net, n, epoch, heap)
    net.counts[N_DIRTY] = 0
    net.reals[THRESHOLD] = np.inf
    if net.counts[HEAP_VALID] == 1 and not heap:
        drop_heap(net)
    elif net.counts[HEAP_VALID] == 0 and touched * 8 < net.counts[N_ACTIVE]:
        build_heap(net)


@jit
def drop_heap(net: Net):  # type: ignore[no-untyped-def]
    for i in range(net.counts[N_HEAP]):
        net.slots[net.heap[i].slot].heap_place = -1
    net.counts[N_HEAP] = 0
    net.counts[HEAP_VALID] = 0


@jit
def build_heap(net: Net):  # type: ignore[no-untyped-def]
    n = 0
    for slot in range(net.counts[N_SLOTS]):
        if net.slot_end[slot] < np.inf:
            net.heap[n].time = net.slot_end[slot]
            net.heap[n].slot = slot
            net.slots[slot].heap_place = n
            n += 1
    net.counts[N_HEAP] = n
    for i in range(n // 2 - 1, -1, -1):
        heap_down(net.heap, net.slots, i, n)
    net.counts[HEAP_VALID] = 1
