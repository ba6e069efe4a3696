"""Scheduled changes of links and nodes. Compiled.

Changes are sorted by time; the kernel handles the events up to the next change, then the change. Rounds are not
replayed beyond the next change, nor while a node is paused. :mod:`ddlsim.network.reroute` handles messages in flight
when routes change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import change_capacity
from ddlsim.network.reroute import reroute
from ddlsim.network.state import CHANGE, N_CHANGED, N_PAUSED, NEXT_CHANGE, NOW, SHAPED, Floats, Net, Records

#: kinds of changes
CAPACITY, PAUSE, RESUME, REROUTE = 0, 1, 2, 3


@inlined
def has_changes(net: Net):  # type: ignore[no-untyped-def]
    """Whether any change is scheduled, past or future."""
    return net.changes.size > 0


@inlined
def apply_next(net: Net):  # type: ignore[no-untyped-def]
    """Apply the next change; rates follow in this instant's solve."""
    i = net.counts[N_CHANGED]
    net.counts[N_CHANGED] = i + 1
    net.reals[NEXT_CHANGE] = net.changes[i + 1].time if i + 1 < net.changes.size else np.inf
    place = net.changes[i].place
    kind = net.changes[i].kind
    if kind == CAPACITY:
        change_link(net, place, net.changes[i].free, net.changes[i].loaded)
    elif kind == PAUSE:
        net.nodes[place].paused = max(net.nodes[place].paused, net.changes[i].free)
        net.counts[N_PAUSED] += 1
    elif kind == RESUME:
        net.counts[N_PAUSED] -= 1
    else:
        reroute(net, place)


@inlined
def change_link(net: Net, channel, free, loaded):  # type: ignore[no-untyped-def]
    """Set a channel's capacities. A link that goes down loses the tokens of its bucket."""
    if net.counts[SHAPED] == 0:
        change_capacity(net, channel, free)
        return
    now = net.reals[NOW]
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
    pauses: Iterable[tuple[float, float, int]],
    epochs: Iterable[tuple[float, int]] = (),
) -> Records:
    """Return the changes, sorted by time.

    capacity  undisturbed capacity of each channel, (n_channels,) bytes/s: without, and with traffic on its reverse
    links     (time in s, channel, share of its capacity from then on)
    pauses    (start in s, end in s, node)
    epochs    (time in s, number of the epoch of routes from then on)
    """
    rows: list[tuple[float, float, float, int, int]] = []
    for time, channel, share in links:
        share = max(share, NOTHING)
        free, loaded = (share * float(own[channel]) for own in capacity)
        rows.append((time, free, loaded, CAPACITY, channel))
    for start, end, node in pauses:
        rows += [(start, end, 0.0, PAUSE, node), (end, 0.0, 0.0, RESUME, node)]
    rows += [(time, 0.0, 0.0, REROUTE, epoch) for time, epoch in epochs]
    return np.array(sorted(rows, key=lambda row: row[0]), dtype=CHANGE)
