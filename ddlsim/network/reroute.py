"""Rerouting of new messages and of messages in flight. Compiled.

A message that waits for its latency then flows over the new route. A flow continues on the new route with its remaining
bytes; what has arrived has crossed the old channels. (A real network also retransmits packets lost on the way; these
are assumed to be few in comparison.) A message keeps its connection and its frame headers.

All bytes of a flow are booked on its channels when it ends. Rerouting therefore books the bytes that have crossed the
old channels at once, and subtracts them from the new ones in advance.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import add_to_channel, free_reverse, log_busy, mark_dirty, remove_from_channel, share_of
from ddlsim.network.shaping import wire_bytes
from ddlsim.network.state import CLEARED, FLOWING, LAST, WAITING, View
from ddlsim.network.sums import book_bytes, two_sum
from ddlsim.network.transport import release_buffer, reserve_buffer


@inlined
def reroute(net: View, epoch):  # type: ignore[no-untyped-def]
    """Switch to the routes of an epoch; rates follow in this instant's solve."""
    ahead = crossings_ahead(net)
    take_ahead(net, -1.0)
    for i in range(net.detours.size):
        if net.detours[i].epoch == epoch:
            route = net.detours[i].route
            if net.shared == 1:
                net.detours[i].passed = net.routed[route].issued - net.routed[route].passed
                net.detours[i].was_first = net.routes[route].first
                net.detours[i].was_last = net.routes[route].last
                net.routed[route].passed = net.routed[route].issued
            net.routes[route].first = net.detours[i].first
            net.routes[route].last = net.detours[i].last
            net.routes[route].n_hops = net.detours[i].n_hops
            net.routes[route].latency = net.detours[i].latency
    take_ahead(net, 1.0)
    more = crossings_ahead(net) - ahead
    net.issued_hops, net.issued_hops_low = two_sum(net.issued_hops, net.issued_hops_low, more)
    for flow in range(net.n_active):
        if not is_on_its_route(net, flow):
            move(net, flow)


@inlined
def crossings_ahead(net: View):  # type: ignore[no-untyped-def]
    """Return the sum over messages in flight of their remaining bytes times the channels of their routes."""
    total = 0.0
    for slot in range(net.slots.size):
        state = net.slots[slot].state
        if state in (WAITING, FLOWING, CLEARED):
            route = net.slots[slot].route
            total += net.slots[slot].nbytes * net.routes[route].n_hops
    for flow in range(net.n_active):
        route = net.slots[net.flows[flow].slot].route
        total -= carried(net, flow) * net.routes[route].n_hops
    return total


@inlined
def take_ahead(net: View, sign):  # type: ignore[no-untyped-def]
    """Subtract (`sign` -1) or add (+1) the bytes still to cross their routes from the bytes issued on these."""
    if net.shared == 0:
        return
    for slot in range(net.slots.size):
        if net.slots[slot].state in (WAITING, FLOWING, CLEARED):
            net.routed[net.slots[slot].route].issued += sign * net.slots[slot].nbytes
    for flow in range(net.n_active):
        net.routed[net.slots[net.flows[flow].slot].route].issued -= sign * carried(net, flow)


@inlined
def carried(net: View, flow):  # type: ignore[no-untyped-def]
    """Return the bytes of a flow's message that have crossed its channels, computed as in ``accounts``."""
    slot = net.flows[flow].slot
    nbytes = net.slots[slot].nbytes
    wire = (nbytes if net.shaped == 0 else wire_bytes(net, slot)) * net.routes[net.slots[slot].route].handled
    left = max(net.flow_end[flow] - net.now, 0.0) * net.flow_rate[flow]
    return nbytes * min(max(1.0 - left / wire, 0.0), 1.0)


@inlined
def is_on_its_route(net: View, flow):  # type: ignore[no-untyped-def]
    """Whether a flow uses the channels of its route."""
    route = net.slots[net.flows[flow].slot].route
    entry = flow << net.hop_shift
    for h in range(net.routes[route].first, net.routes[route].last):
        if net.flow_hops[entry] != net.hops[h]:  # LAST is no channel
            return False
        if net.split == 1 and net.flow_share[entry] != net.shares[h]:
            return False
        entry += 1
    return net.flow_hops[entry] == LAST or net.flow_hops[entry] >= net.n_linked


@inlined
def move(net: View, flow):  # type: ignore[no-untyped-def]
    """Move a flow from its channels to those of its route."""
    slot = net.flows[flow].slot
    route = net.slots[slot].route
    done = carried(net, flow)
    held, place = 0.0, slot << net.hop_shift
    if net.transported == 1:
        held = net.held[place]
    first = flow << net.hop_shift
    entry = first
    while net.flow_hops[entry] != LAST:
        channel = net.flow_hops[entry]
        leave(net, channel, entry, done * (net.flow_share[entry] if net.split == 1 else 1.0))
        if held > 0.0 and entry > first and channel < net.n_linked:
            release_buffer(net, channel, net.held[place + entry - first])
        entry += 1
    entry = first
    for h in range(net.routes[route].first, net.routes[route].last):
        enter(net, net.hops[h], entry, done, share_of(net, h))
        entry += 1
    if held > 0.0:
        reserve_buffer(net, slot, held)
    if net.transported == 1 and net.transports[route].channel >= 0:
        enter(net, net.transports[route].channel, entry, done, 1.0)
        entry += 1
    net.flow_hops[entry] = LAST
    net.threshold = 0.0  # it may have had no bandwidth, so no rate is certain


@inlined
def leave(net: View, channel, entry, nbytes):  # type: ignore[no-untyped-def]
    """Remove a flow from a channel that has carried `nbytes` of it."""
    now = net.now
    book_bytes(net, channel, nbytes, 1.0)
    if remove_from_channel(net, channel, entry) > 0:
        mark_dirty(net, channel)
        return
    since = net.channels[channel].since
    net.channels[channel].level = np.inf
    net.channels[channel].busy += now - since
    if net.log_on == 1 and channel < net.n_linked and since < now:
        log_busy(net, channel, since, now, False)
    if net.shaped == 1:
        free_reverse(net, channel)


@inlined
def enter(net: View, channel, entry, nbytes, share):  # type: ignore[no-untyped-def]
    """Add a share of a flow to a channel, which carries that share of the message without its first `nbytes`."""
    add_to_channel(net, channel, entry, share)
    net.channels[channel].nbytes -= nbytes * share
    mark_dirty(net, channel)
