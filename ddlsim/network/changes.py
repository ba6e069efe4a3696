"""Scheduled changes of links and nodes, the epochs between changes of routes, and rerouting.

The changes lie in the order of their times; the compiled kernel handles the instants of messages up to the next one,
then it. Rounds are replayed no further than that, and not at all while a node stands still.

When routes change, a message that waits for its latency then flows over the new route. A flow continues on the new
route with its remaining bytes; what has arrived has crossed the old channels. (A real network also retransmits packets
lost on the way; these are assumed to be few in comparison.) A message keeps its connection and its frame headers. All
bytes of a flow are booked on its channels when it ends. Rerouting therefore books the bytes that have crossed the old
channels at once, and subtracts them from the new ones in advance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import change_capacity
from ddlsim.network.state import CHANGE, Floats, Ints, Records, View

if TYPE_CHECKING:
    from ddlsim.cluster.cluster import Routes
    from ddlsim.network.engine import Interconnect


from ddlsim.network.flows import (
    add_to_channel,
    book_bytes,
    free_reverse,
    log_busy,
    mark_dirty,
    remove_from_channel,
    share_of,
    two_sum,
)
from ddlsim.network.state import CLEARED, FLOWING, LAST, WAITING
from ddlsim.network.transport import release_buffer, reserve_buffer, wire_bytes


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


# ---------------------------------------------------------------- messages in flight


#: kinds of changes
CAPACITY, STOP, RESUME, REROUTE = 0, 1, 2, 3


@inlined
def has_changes(net: View):  # type: ignore[no-untyped-def]
    """Whether any change is scheduled, past or future."""
    return net.changes.size > 0


@inlined
def apply_next(net: View):  # type: ignore[no-untyped-def]
    """Apply the next change; rates follow in this instant's solve."""
    i = net.n_changed
    net.n_changed = i + 1
    net.next_change = net.changes[i + 1].time if i + 1 < net.changes.size else np.inf
    place = net.changes[i].place
    kind = net.changes[i].kind
    if kind == CAPACITY:
        change_link(net, place, net.changes[i].free, net.changes[i].loaded)
    elif kind == STOP:
        net.nodes[place].stopped_until = max(net.nodes[place].stopped_until, net.changes[i].free)
        net.n_stopped += 1
    elif kind == RESUME:
        net.n_stopped -= 1
    else:
        reroute(net, place)


@inlined
def change_link(net: View, channel, free, loaded):  # type: ignore[no-untyped-def]
    """Set a channel's capacities. A link that goes down loses the tokens of its bucket."""
    if net.shaped == 0:
        change_capacity(net, channel, free)
        return
    now = net.now
    if net.channels[channel].used == 0:
        refilled = net.buckets[channel].tokens + (now - net.buckets[channel].since) * net.buckets[channel].free
        net.buckets[channel].tokens = min(refilled, net.buckets[channel].burst)
        net.buckets[channel].since = now
    if free < 1.0:
        net.buckets[channel].tokens = 0.0
    net.buckets[channel].free = free
    net.buckets[channel].loaded = loaded
    reverse = net.buckets[channel].reverse
    busy = reverse >= 0 and net.channels[reverse].used > 0
    change_capacity(net, channel, loaded if busy else free)


#: start and end (s), channel, and factor of its capacity in between
Fault = tuple[float, float, int, float]
#: share of its capacity that a failed link keeps: negligible, but rates must never be 0
NOTHING = 1e-30


def shares_of(faults: Iterable[Fault]) -> list[tuple[float, int, float]]:
    """Return (time in s, channel, share of its capacity from then on); factors of overlapping faults are multiplied."""
    of_channel: dict[int, list[Fault]] = {}
    for fault in sorted(faults, reverse=True):
        of_channel.setdefault(fault[2], []).append(fault)
    shares = []
    for channel, to_come in sorted(of_channel.items()):
        active: list[Fault] = []
        for time in sorted({edge for start, end, *_ in to_come for edge in (start, end)}):
            while to_come and to_come[-1][0] <= time:
                active.append(to_come.pop())
            active = [fault for fault in active if time < fault[1]]
            shares.append((time, channel, math.prod(fault[3] for fault in active)))
    return shares


def changes_of(
    capacity: tuple[Floats, Floats],
    links: Iterable[tuple[float, int, float]],
    stops: Iterable[tuple[float, float, int]],
    epochs: Iterable[tuple[float, int]] = (),
) -> Records:
    """Return the changes, sorted by time.

    capacity  of each channel, (n_channels,), as it is without changes: while nothing and while something flows the
              other way, bytes/s
    links     (s, channel, share of its capacity that it has from then on)
    stops     (s, s until which it lasts, node)
    epochs    (s, number of the routes from then on)
    """
    rows: list[tuple[float, float, float, int, int]] = []
    for time, channel, share in links:
        share = max(share, NOTHING)
        free, loaded = (share * float(rates[channel]) for rates in capacity)
        rows.append((time, free, loaded, CAPACITY, channel))
    for start, end, node in stops:
        rows += [(start, end, 0.0, STOP, node), (end, 0.0, 0.0, RESUME, node)]
    rows += [(time, 0.0, 0.0, REROUTE, epoch) for time, epoch in epochs]
    return np.array(sorted(rows, key=lambda row: row[0]), dtype=CHANGE)


class Around(Protocol):
    """Routes around links that are down (:class:`ddlsim.cluster.routing.Detours`)."""

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes: ...


class Epochs:
    """Times in which the same links are avoided. Epoch 0 begins with the run and avoids none."""

    def __init__(self, interconnect: Interconnect) -> None:
        self._interconnect = interconnect
        self._avoided: list[tuple[float, float, frozenset[int]]] = []
        self._detours: list[Around | None] = [None]
        #: (s, number) of each that begins later
        self.starts: list[tuple[float, int]] = []

    def avoid(self, avoided: Iterable[tuple[float, float, frozenset[int]]]) -> None:
        """Avoid links for a while: (s, s until which it lasts, links), in addition to those named before."""
        self._avoided += avoided
        edges = sorted({edge for start, end, _ in self._avoided for edge in (start, end)})
        self.starts = [(edge, number) for number, edge in enumerate(edges, 1)]
        self._detours = [None]
        for edge in edges:
            down = frozenset[int]().union(*(links for start, end, links in self._avoided if start <= edge < end))
            self._detours.append(self._interconnect.around(sorted(down)) if down else None)

    @staticmethod
    def begun(changes: Records) -> int:
        """Return the number of the epoch that changes which have happened have led to."""
        return int(np.count_nonzero(changes["kind"] == REROUTE))

    def routes(self, epoch: int, src: Ints, dst: Ints, usual: Routes) -> Routes:
        """Return the routes of an epoch; the `usual` ones are those of epoch 0."""
        detours = self._detours[epoch]
        return usual if detours is None else detours.routes(src, dst, usual)

    def later(self, epoch: int, src: Ints, dst: Ints, usual: Routes) -> Iterator[tuple[int, Ints, Routes]]:
        """Go through the epochs after one: (number, which of the routes are no longer those of the one before, all of
        them)."""
        before = self.routes(epoch, src, dst, usual)
        for number in range(epoch + 1, len(self._detours)):
            routes = self.routes(number, src, dst, usual)
            others = [i for i in range(len(src)) if not all(map(np.array_equal, before.path(i), routes.path(i)))]
            if others:
                yield number, np.array(others, dtype=np.int64), routes
            before = routes
