"""Scheduled changes of links and nodes, and the epochs between changes of routes.

The changes lie in the order of their times; the compiled kernel handles the instants of messages up to the next one,
then it. Rounds are replayed no further than that, and not at all while a node stands still. Where routes change,
:mod:`ddlsim.network.reroute` has what that means for messages on their way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import change_capacity
from ddlsim.network.reroute import reroute
from ddlsim.network.state import CHANGE, Floats, Ints, Records, View

if TYPE_CHECKING:
    from ddlsim.cluster.cluster import Routes
    from ddlsim.network.engine import Interconnect

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
        free, loaded = (share * float(own[channel]) for own in capacity)
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
