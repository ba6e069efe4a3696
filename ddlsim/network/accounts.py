"""Network accounting: bytes carried and in flight at any moment, counted in two independent ways.

The kernel books a message on its channels when it ends, and busy seconds when a channel falls idle. Only reading the
accounts adds messages in flight and open intervals, so they cost the running simulation nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ddlsim.network import state as st
from ddlsim.network.busy import busy_rows
from ddlsim.network.state import Bools, Floats, Ints, Net, Places, Records


class Accounts(NamedTuple):
    """Totals of a network simulation, used to check that no bytes are lost or created.

    nbytes            (n_channels,) bytes carried by each channel
    busy              (n_channels,) time in seconds for which each channel was busy
    issued            bytes of all messages issued by senders
    delivered         bytes of messages delivered to receivers
    in_flight         bytes of messages that are waiting, flowing or being received
    issued_crossings  sum over all issued messages of (bytes of the message) * (number of channels on its route)
    left_crossings    the part of `issued_crossings` that has not been carried yet
    passed            (n_channels,) bytes sent instantly by token buckets, which do not add to `busy`
    capacity          (n_channels,) bytes/s without traffic in the opposite direction; the maximum over time if faults
                      change it
    burst             (n_channels,) size of the token bucket in bytes; 0: no token bucket
    """

    nbytes: Floats
    busy: Floats
    issued: float
    delivered: float
    in_flight: float
    issued_crossings: float
    left_crossings: float
    passed: Floats
    capacity: Floats
    burst: Floats


class _Queued(NamedTuple):
    """Messages in queues, a row for each link that their last byte has not left: bytes carried, and bytes still to
    pass."""

    slot: Places
    channel: Ints
    carried: Floats
    ahead: Floats


class _UnderWay(NamedTuple):
    """Messages that use bandwidth, and their bytes carried so far."""

    slot: Places
    carried: Floats


def open_intervals(net: Net, now: float) -> Records:
    """Return the busy intervals that are open at `now`, with this as their end."""
    return busy_rows(*_open_intervals(net, now), now)


def accounts(net: Net, now: float, capacity: Floats) -> Accounts:
    """Return the totals as of `now`; `capacity`, (n_channels,) bytes/s, is the largest one of each channel."""
    n, slots = net.counts.n_linked, net.slots
    live = np.flatnonzero(slots["state"] != st.FREE)
    moving, queued, ahead = _in_flight(net, now)
    channel, of, share = _crossed(net, moving.slot)
    carried = np.bincount(channel, moving.carried[of] * share, n) + np.bincount(queued.channel, queued.carried, n)
    opened, start = _open_intervals(net, now)
    n_hops = net.routes["n_hops"][slots["route"][live]]
    shaped, none = bool(net.counts.shaped), np.zeros(n)
    return Accounts(
        nbytes=_sum(net.channels, "nbytes")[:n] + carried,
        busy=net.channels["busy"][:n] + np.bincount(opened, now - start, n),
        issued=issued(net),
        delivered=net.reals.delivered + net.reals.delivered_low,
        in_flight=float(slots["nbytes"][live].sum()),
        issued_crossings=net.reals.issued_hops + net.reals.issued_hops_low,
        left_crossings=float(ahead[live] @ n_hops) + float(queued.ahead.sum()),
        passed=net.buckets["passed"][:n].copy() if shaped else none,
        capacity=capacity[:n],
        burst=net.buckets["burst"][:n].copy() if shaped else none,
    )


def traffic_of(net: Net, now: float, selected: Bools) -> tuple[Floats, float, int]:
    """Return the traffic of the routes in `selected` (n_routes,): bytes that each channel has carried by `now`,
    (n_channels,), bytes issued, and messages delivered."""
    n = net.counts.n_linked
    routed = net.routed[: len(selected)]
    issued = _sum(routed, "issued")
    used = np.flatnonzero(selected & (issued > 0.0))
    channel, of, share = _between(net, net.routes["first"][used], net.routes["last"][used])
    nbytes = np.bincount(channel, (issued - routed["passed"])[used][of] * share, n)
    before = net.detours[selected[net.detours["route"]] & (net.detours["passed"] > 0.0)]
    channel, of, share = _between(net, before["was_first"], before["was_last"])
    nbytes += np.bincount(channel, before["passed"][of] * share, n)
    live = np.flatnonzero(net.slots["state"] != st.FREE).astype(np.int32)
    live = live[selected[net.slots["route"][live]]]
    _, queued, ahead = _in_flight(net, now)
    channel, of, share = _crossed(net, live)
    nbytes -= np.bincount(channel, ahead[live][of] * share, n)
    is_selected = selected[net.slots["route"][queued.slot]]
    nbytes -= np.bincount(queued.channel[is_selected], queued.ahead[is_selected], n)
    n_messages = int(routed["n_issued"][selected].sum()) - len(live)
    return np.maximum(nbytes, 0.0), math.fsum(issued[used]), n_messages


def _in_flight(net: Net, now: float) -> tuple[_UnderWay, _Queued, Floats]:
    """Return the messages that use bandwidth, those in queues, and the bytes of the message in each slot that are still
    to pass all channels of its route, (n_slots,)."""
    moving, queued = _under_way(net, now), _queued(net, now)
    # messages that have arrived are on no channel
    ahead = np.where(net.slots["state"] == st.DELIVERING, 0.0, net.slots["nbytes"])
    ahead[moving.slot] -= moving.carried
    ahead[queued.slot] = 0.0
    return moving, queued, ahead


def _sum(rows: Records, name: str) -> Floats:
    """Return the values of a compensated sum, one per row (:mod:`ddlsim.network.flows`)."""
    total: Floats = rows[name] + rows[f"{name}_low"]
    return total


def issued(net: Net, selected: Bools | None = None) -> float:
    """Return the bytes of all messages issued so far, or of those on the routes in `selected` (n_routes,)."""
    if selected is None:
        return net.reals.issued + net.reals.issued_low
    return math.fsum(_sum(net.routed[: len(selected)], "issued")[selected])


def _under_way(net: Net, now: float) -> _UnderWay:
    n = net.counts.n_active
    slot = net.flows["slot"][:n].copy()
    nbytes = net.slots["nbytes"][slot]
    wire = nbytes
    if net.counts.shaped:
        frames = net.frames[net.slots["route"][slot]]
        wire = nbytes + frames["header"] * np.ceil(nbytes / frames["payload"])
    handled = net.routes["handled"][net.slots["route"][slot]]
    left = np.maximum(net.flow_end[:n] - now, 0.0) * net.flow_rate[:n] / handled
    return _UnderWay(slot, nbytes * np.clip(1.0 - left / wire, 0.0, 1.0))


def _queued(net: Net, now: float) -> _Queued:
    """Return the positions of the messages in queues at `now`."""
    shift, n = net.counts.hop_shift, net.counts.n_linked
    none = np.zeros(0)
    if not net.counts.n_queued:
        return _Queued(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), none, none)
    flowing = net.slots["state"] == st.FLOWING
    flowing[net.flows["slot"][: net.counts.n_active]] = False
    slot = np.flatnonzero(flowing).astype(np.int32)
    hop = np.arange(1 << shift)
    entry = (slot[:, None] << shift) + hop
    here = (hop < net.trains["hops"][slot][:, None]) & (net.crossings["stage"][entry] < 2)
    here &= net.crossings["channel"][entry] < n
    entry, slot = entry[here], (entry >> shift)[here]
    crossing = net.crossings[entry]
    queue = net.queues[crossing["channel"]]
    left = queue["rate"] * np.maximum(now - queue["time"], 0.0)
    shared = (queue["burst"] < 0) & (queue["head"] > 0.0)
    grown = np.divide(left, queue["head"], out=np.zeros(len(left)), where=shared)
    through = queue["through"] - crossing["through"] + grown
    passed = crossing["passed"] + np.where(crossing["head"] > 0.0, crossing["head"] * through, 0.0)
    passed += np.where(queue["burst"] == entry, left, 0.0)
    nbytes = net.slots["nbytes"][slot]
    carried = nbytes * np.clip(passed / net.trains["wire"][slot], 0.0, 1.0)
    return _Queued(slot.astype(np.int32), crossing["channel"].astype(np.int64), carried, nbytes - carried)


def _crossed(net: Net, slot: Places) -> tuple[Ints, Ints, Floats]:
    """Return (channel, index into `slot`, share of the bytes) for every channel on the routes of the messages."""
    route = net.slots["route"][slot]
    return _between(net, net.routes["first"][route], net.routes["last"][route])


def _between(net: Net, first: Places, last: Places) -> tuple[Ints, Ints, Floats]:
    """Return (channel, i, share of the bytes) for every channel in hops[first[i]:last[i]]."""
    n_hops = last - first
    of = np.repeat(np.arange(len(first)), n_hops)
    place = np.arange(len(of)) - np.repeat(np.cumsum(n_hops) - n_hops, n_hops) + first[of]
    share = net.shares[place] if net.counts.split else np.ones(len(place))
    return net.hops[place].astype(np.int64), of, share


def _open_intervals(net: Net, now: float) -> tuple[Ints, Floats]:
    """Return (channel, start) of the busy intervals that are open at `now`."""
    linked = net.channels[: net.counts.n_linked]
    used = np.flatnonzero((linked["used"] > 0) & (linked["since"] < now))
    return used, net.channels["since"][used]
