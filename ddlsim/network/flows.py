"""Lists of the flows on each channel and of the channels of each flow, linked to each other; and their bytes.

Bytes issued, delivered and carried are sums of very many terms. A plain sum of n terms may drift by n / 2 units in its
last place (a relative 1e-9 after 2e7 messages of equal size, because each addition is rounded the same way), which the
conservation checks of a run would report. Each sum is therefore two numbers, a high and a low word; the low word
collects the rounding errors of the high word (Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem
B). Booking n messages at once gives the same sum as booking each by itself, so a sum does not depend on how many rounds
the kernel has replayed. Busy seconds are plain sums, because the intervals of a replayed round equal those of the first
one only up to rounding.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.calendar import heap_remove
from ddlsim.network.intrinsics import call_extension
from ddlsim.network.state import ENTER, FLOWING, LAST, View


@inlined
def two_sum(high, low, term):  # type: ignore[no-untyped-def]
    """Add a term to a sum; return its high and low word."""
    total = high + term
    part = total - high
    return total, low + ((high - (total - part)) + (term - part))


@inlined
def add_equal(high, low, term, n):  # type: ignore[no-untyped-def]
    """Add n equal terms to a sum; return its high and low word."""
    total, rest = two_sum(high, low, n * term)
    if n != 1:  # the rounding error of n * term, exact for n below 2^27 (Dekker 1971, the halves of a product)
        half = term * 134217729.0
        half = half - (half - term)
        rest += (n * half - n * term) + n * (term - half)
    return total, rest


@inlined
def book_bytes(net: View, channel, nbytes, n):  # type: ignore[no-untyped-def]
    """Count n messages that a channel has carried."""
    high, low = net.channels[channel].nbytes, net.channels[channel].nbytes_low
    net.channels[channel].nbytes, net.channels[channel].nbytes_low = add_equal(high, low, nbytes, n)


@inlined
def share_of(net: View, h):  # type: ignore[no-untyped-def]
    """Return the share of a message's bytes that takes ``hops[h]`` of its route."""
    return net.shares[h] if net.split == 1 else 1.0


@inlined
def book_issue(net: View, route, nbytes, n):  # type: ignore[no-untyped-def]
    """Count `n` messages of `nbytes` each as issued on a route."""
    net.issued, net.issued_low = add_equal(net.issued, net.issued_low, nbytes, n)
    crossings = n * net.routes[route].n_hops
    net.issued_hops, net.issued_hops_low = add_equal(net.issued_hops, net.issued_hops_low, nbytes, crossings)
    if net.shared == 1:
        high, low = net.routed[route].issued, net.routed[route].issued_low
        net.routed[route].issued, net.routed[route].issued_low = add_equal(high, low, nbytes, n)
        net.routed[route].n_issued += n


@inlined
def link_bytes(net: View, slot):  # type: ignore[no-untyped-def]
    """Return the bytes that determine how long a message uses its links; more than its own if GPUs are slower."""
    return net.slots[slot].nbytes * net.routes[net.slots[slot].route].handled


@inlined
def make_room(net: View, channel):  # type: ignore[no-untyped-def]
    """Double the room of a full channel list, at the end of the pool; repack the pool if that is full."""
    need = 2 * net.channels[channel].room
    if net.pool_used + need > net.pool.size:
        repack(net)
        if net.channels[channel].used < net.channels[channel].room:
            return
    first = net.channels[channel].first
    start = net.pool_used
    for i in range(net.channels[channel].used):
        net.pool[start + i] = net.pool[first + i]
    net.channels[channel].first = start
    net.channels[channel].room = need
    net.pool_used = start + need


@inlined
def repack(net: View):  # type: ignore[no-untyped-def]
    """Move the channel lists together, each with room for twice its flows."""
    copy = net.pool_copy
    at = 0
    for channel in range(net.channels.size):
        first = net.channels[channel].first
        for i in range(net.channels[channel].used):
            copy[at] = net.pool[first + i]
            at += 1
    at = 0
    start = 0
    for channel in range(net.channels.size):
        net.channels[channel].first = start
        for i in range(net.channels[channel].used):
            net.pool[start + i] = copy[at]
            at += 1
        room = max(2 * net.channels[channel].used, 2)
        net.channels[channel].room = room
        start += room
    net.pool_used = start


@inlined
def add_flow(net: View, slot):  # type: ignore[no-untyped-def]
    """Start a flow on the channels of a message's route; its rate is infinite until the next solve."""
    route = net.slots[slot].route
    flow = net.n_active
    entry = flow << net.hop_shift
    for h in range(net.routes[route].first, net.routes[route].last):
        add_to_channel(net, net.hops[h], entry, share_of(net, h))
        entry += 1
    if net.transported == 1 and net.transports[route].channel >= 0:
        add_to_channel(net, net.transports[route].channel, entry, 1.0)
        entry += 1
    net.slots[slot].state = FLOWING
    net.flows[flow].slot = slot
    net.flow_hops[entry] = LAST
    net.flows[flow].heap_place = -1
    net.flow_rate[flow] = np.inf
    net.flow_next[flow] = 0.0
    net.flow_end[flow] = np.inf
    net.n_active = flow + 1
    net.n_new += 1


@inlined
def begin(net: View, slot):  # type: ignore[no-untyped-def]
    """Start a message's transfer."""
    if net.is_fifo == 1:
        call_extension(net.work_queues_code, net, ENTER, slot, 0.0)
    else:
        add_flow(net, slot)


@inlined
def add_to_channel(net: View, channel, entry, share):  # type: ignore[no-untyped-def]
    """Add a share of a flow to a channel; `entry` combines the flow's number and the channel's place on the route."""
    n = net.channels[channel].used
    if n == net.channels[channel].room:
        make_room(net, channel)
    net.pool[net.channels[channel].first + n] = entry
    net.flow_place[entry] = n
    net.flow_hops[entry] = channel
    if net.split == 1:
        net.flow_share[entry] = share
    net.channels[channel].used = n + 1
    if n == 0:
        net.channels[channel].since = net.now
        if net.shaped == 1:
            load_reverse(net, channel)
    elif n == 1:
        net.contended[channel >> 6] |= bit_of(channel)


@inlined
def bit_of(channel):  # type: ignore[no-untyped-def]
    """Return a channel's bit in its word of ``Net.contended``."""
    return np.uint64(1) << (np.uint64(channel) & np.uint64(63))


@inlined
def remove_from_channel(net: View, channel, entry):  # type: ignore[no-untyped-def]
    """Remove a flow from the list of a channel; return how many are left on it."""
    offset = net.channels[channel].first
    n = net.channels[channel].used - 1
    place = net.flow_place[entry]
    if place < n:  # else, as on most links, nothing of the list has to be loaded into the cache
        moved = net.pool[offset + n]
        net.pool[offset + place] = moved
        net.flow_place[moved] = place
    net.channels[channel].used = n
    if n == 1:
        net.contended[channel >> 6] &= ~bit_of(channel)
    return n


@inlined
def load_reverse(net: View, channel):  # type: ignore[no-untyped-def]
    """A channel has become busy: its acknowledgements now use part of the opposite direction."""
    reverse = net.buckets[channel].reverse
    if reverse >= 0:
        change_capacity(net, reverse, net.buckets[reverse].loaded)


@inlined
def free_reverse(net: View, channel):  # type: ignore[no-untyped-def]
    """A channel has become idle: its token bucket refills, and the opposite direction regains its full capacity."""
    net.buckets[channel].since = net.now
    reverse = net.buckets[channel].reverse
    if reverse >= 0:
        change_capacity(net, reverse, net.buckets[reverse].free)


@inlined
def change_capacity(net: View, channel, capacity):  # type: ignore[no-untyped-def]
    """Change a channel's capacity; the rates of its flows follow in this instant's solve.

    A lower capacity changes the filling from the equal share of the channel's flows upwards, a higher one from the
    level at which the channel had filled up.
    """
    before = net.channels[channel].capacity
    net.channels[channel].capacity = capacity
    used = net.channels[channel].used
    if used == 0 or capacity == before:
        return
    if net.is_fifo == 1:
        if net.queues[channel].dirty == 0:
            net.queues[channel].dirty = 1
            mark_dirty(net, channel)
        return
    level = net.channels[channel].level if capacity > before else capacity / used
    if level < np.inf:
        net.threshold = min(net.threshold, level)
        mark_dirty(net, channel)


@inlined
def end_flow(net: View, flow):  # type: ignore[no-untyped-def]
    """End a flow; the last flow takes its number, so that numbers stay contiguous. Returns the slot of the message."""
    shift = net.hop_shift
    now = net.now
    slot = net.flows[flow].slot
    nbytes = net.slots[slot].nbytes
    affected = alike = False
    since = now
    entry = flow << shift
    while net.flow_hops[entry] != LAST:
        channel = net.flow_hops[entry]
        n = remove_from_channel(net, channel, entry)
        book_bytes(net, channel, nbytes * (net.flow_share[entry] if net.split == 1 else 1.0), 1.0)
        if n == 0:
            net.channels[channel].level = np.inf
            net.channels[channel].busy += now - net.channels[channel].since
            if net.log_on == 1 and channel < net.n_linked:
                alike = alike and net.channels[channel].since == since
                since = net.channels[channel].since
                alike = log_busy(net, channel, since, now, alike)
            if net.shaped == 1:
                free_reverse(net, channel)
        elif net.channels[channel].level < np.inf:  # it was saturated, so another flow on it may now be faster
            mark_dirty(net, channel)
            affected = True
        entry += 1
    if affected and net.flow_rate[flow] < net.threshold:
        net.threshold = net.flow_rate[flow]
    if net.heap_valid == 1:
        net.n_heap = heap_remove(net.heap, net.flows, net.n_heap, flow)
    net.n_active -= 1
    if flow != net.n_active:
        renumber(net, net.n_active, flow)
    return slot


@inlined
def renumber(net: View, old, new):  # type: ignore[no-untyped-def]
    """Move flow `old` to the free number `new`."""
    shift = net.hop_shift
    net.flow_rate[new] = net.flow_rate[old]
    net.flow_end[new] = net.flow_end[old]
    net.flows[new].slot = net.flows[old].slot
    place = net.flows[old].heap_place
    net.flows[new].heap_place = place
    if net.heap_valid == 1 and place >= 0:
        net.heap[place].item = new
    to = new << shift
    entry = old << shift
    while net.flow_hops[entry] != LAST:
        channel = net.flow_hops[entry]
        place = net.flow_place[entry]
        net.flow_hops[to] = channel
        net.flow_place[to] = place
        if net.split == 1:
            net.flow_share[to] = net.flow_share[entry]
        net.pool[net.channels[channel].first + place] = to
        to += 1
        entry += 1
    net.flow_hops[to] = LAST


@inlined
def mark_dirty(net: View, channel):  # type: ignore[no-untyped-def]
    net.dirty[net.n_dirty] = channel
    net.n_dirty += 1


@inlined
def log_busy(net: View, channel, start, end, alike):  # type: ignore[no-untyped-def]
    """Log a busy interval, in the row of the previous one if `alike`; return whether the next may join this row."""
    i = net.log_used
    if alike:
        net.log[i - 1].other = channel
        return False
    net.log[i].channel = channel
    net.log[i].other = -1
    net.log[i].start = start
    net.log[i].end = end
    net.log_used = i + 1
    return True


@inlined
def enqueue(net: View, slot, connection):  # type: ignore[no-untyped-def]
    """Append a message to those that wait for their connection."""
    net.line[slot] = -1
    if net.connections[connection].first < 0:
        net.connections[connection].first = slot
    else:
        net.line[net.connections[connection].last] = slot
    net.connections[connection].last = slot
