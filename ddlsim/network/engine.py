"""The arrays of a network and their contents: routes, compiled schedules, and messages in flight.

The clients of a network, each with its own :class:`~ddlsim.network.network.Network`, share one engine: its channels,
slots and clock. Routes, and with them the counted traffic, belong to one client.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Routes
from ddlsim.cluster.details import LEAST_TIMEOUT, PROTOCOLS, LinkDetail, LinkDetails, route_overhead, window_under_loss
from ddlsim.collectives import Schedule
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.network import state as st
from ddlsim.network.build import (
    add_channels,
    empty_net,
    grow_hops,
    grow_marks,
    grow_slots,
    with_buffers,
    with_queues,
    with_shaping,
    with_split,
)
from ddlsim.network.busy import Logged
from ddlsim.network.changes import CAPACITY, REROUTE, Around, Epochs, Fault, changes_of, shares_of
from ddlsim.network.extensions import enable
from ddlsim.network.program import Program, compile_schedule, write_frames, write_routes
from ddlsim.network.state import Bools, Floats, Ints, Table, grown


class WithSources:
    """A cluster with traffic sources.

    at     nodes that the sources send from; source i is the node ``cluster.n_nodes + i``, with a link of its own behind
           those of the cluster
    rates  (n_sources,) bytes/s
    """

    def __init__(self, cluster: Cluster, at: Sequence[int], rates: Sequence[float]) -> None:
        self.cluster, self.at = cluster, np.asarray(at, dtype=np.int64)
        n = len(at)
        none = np.zeros(n)
        self.channel_capacity: Floats = np.concatenate([cluster.channel_capacity, np.asarray(rates, dtype=np.float64)])
        self.link_channel: Ints = np.concatenate([cluster.link_channel, cluster.n_channels + np.arange(n)])
        self.link_latency: Floats = np.concatenate([cluster.link_latency, none])
        self.send_overhead: Floats = np.concatenate([cluster.send_overhead, none])
        self.recv_overhead: Floats = np.concatenate([cluster.recv_overhead, none])
        self.reduce_time: Floats = np.concatenate([cluster.reduce_time, none])
        self.reverse_link: Ints = np.concatenate([cluster.reverse_link, np.full(n, -1)])
        self.is_switch_port: Bools = np.concatenate([cluster.is_switch_port, np.zeros(n, dtype=np.bool_)])
        self.splits, self.link_seed = cluster.splits, cluster.link_seed
        self.details = None if cluster.details is None else _longer(cluster.details, n)

    def split_routes(self, src: Ints, dst: Ints, flows: Ints | None) -> Routes:
        """Return the routes between nodes; a source's route begins with its link."""
        return self.from_sources(src, self.cluster.split_routes(self.nodes(src), dst, flows))

    def around(self, down: Iterable[int]) -> Around:
        """Return the routes while the links `down` are unavailable."""
        return _Around(self, self.cluster.around(down))

    def nodes(self, src: Ints) -> Ints:
        """Return the nodes of the cluster that messages from nodes or sources leave from."""
        source = src - self.cluster.n_nodes
        return np.where(source >= 0, self.at[np.maximum(source, 0)], src) if (source >= 0).any() else src

    def from_sources(self, src: Ints, routes: Routes) -> Routes:
        """Return routes of the cluster, each with the link of the source in `src`, if any, in front."""
        sources = src >= self.cluster.n_nodes
        at = routes.offsets[:-1][sources]
        links = np.insert(routes.links, at, self.cluster.n_links + src[sources] - self.cluster.n_nodes)
        offsets = routes.offsets + np.concatenate([[0], np.cumsum(sources)])
        return Routes(offsets, links, np.insert(routes.share, at, 1.0), routes.flows)


@dataclass(frozen=True, eq=False)
class _Around:
    """Routes of a cluster with sources while some links are down."""

    with_sources: WithSources
    detours: Around

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes:
        nodes = self.with_sources.nodes(src)
        plain = self.with_sources.cluster.split_routes(nodes, dst, usual.flows) if (nodes != src).any() else usual
        return self.with_sources.from_sources(src, self.detours.routes(nodes, dst, plain))


def _longer(details: LinkDetails, n: int) -> LinkDetails:
    """Return link details extended by `n` links without any."""
    plain = LinkDetail()
    columns = {}
    for field in dataclasses.fields(details):
        column = getattr(details, field.name)
        columns[field.name] = np.concatenate([column, np.full(n, getattr(plain, field.name), dtype=column.dtype)])
    return LinkDetails(**columns)


#: a row of state.TRANSPORT
_Transport = tuple[float, ...]
_BY_ITSELF: _Transport = (0.0, 0.0, 0.0, math.inf, math.inf, 0.0, 0.0, 0.0, math.inf, 0.0, -1, -1, 0)
#: properties of a connection (docs/models/transport.md), by their names in state.TRANSPORT; and its `limit` in bytes/s
#: (inf: the path is narrower), and whether messages wait for each other (`ordered`)
_Terms = dict[str, float]


class Transports:
    """The connections of a network: one (or a bundle that acts as one) per pair of nodes and path."""

    def __init__(self, n_channels: int, details: LinkDetails) -> None:
        self._n_channels = n_channels  # including the channels of connections
        self._n = 0
        alike: dict[LinkDetail, int] = {}
        self._kind = [alike.setdefault(details.of(link), len(alike)) for link in range(len(details.transport))]
        self._details = list(alike)
        self._of: dict[Hashable, _Transport] = {}
        self._terms: dict[Hashable, _Terms | None] = {}
        #: rows of state.CONNECTION for new connections, and limits (bytes/s) for new channels, until the engine takes
        #: them
        self.connections: list[tuple[float, float, float, int, int, int, int, int, int, int]] = []
        self.limits: list[float] = []

    def of(self, pair: Sequence[int], links: Sequence[int], latency: float, rate: float) -> _Transport:
        """Return the transport from one node to another along `links`, with `latency` (s) and bottleneck `rate`
        (bytes/s).

        All messages of the same pair and links use the same connection.
        """
        key = (*pair, *links)
        transport = self._of.get(key)
        if transport is None:
            kinds = tuple([self._kind[link] for link in links])
            alike = (kinds, latency, rate)
            if alike not in self._terms:
                self._terms[alike] = _terms([self._details[kind] for kind in kinds], latency, rate)
            transport = self._of[key] = self._new(self._terms[alike])
        return transport

    def _new(self, terms: _Terms | None) -> _Transport:
        if terms is None:
            return _BY_ITSELF
        channel = -1
        if terms["limit"] < math.inf:
            channel = self._n_channels
            self._n_channels += 1
            self.limits.append(terms["limit"])
        self.connections.append((terms["initial"], 0.0, 0.0, -1, -1, 0, int(terms["ordered"]), 0, 0, 0))
        self._n += 1
        terms = terms | {"connection": self._n - 1, "channel": channel}
        return tuple([terms[name] for name in st.TRANSPORT.names or ()])


def _terms(details: Sequence[LinkDetail], latency: float, rate: float) -> _Terms | None:
    """Return the properties of a connection, set by its first link that names a transport; None if no link does.

    Rate limits are the minimum over all links, and a segment is lost if any link loses it.
    """
    named = [detail for detail in details if detail.transport]
    if not named:
        return None
    first, round_trip = named[0], 2.0 * latency
    protocol = PROTOCOLS[first.transport]
    usual = protocol.mtu - protocol.inside
    segment = min((detail.frame_payload for detail in details if detail.frame_payload), default=usual)
    frame = segment + max(detail.frame_header for detail in details)
    loss = 1.0 - math.prod(1.0 - detail.loss for detail in named)
    window = min(first.window or protocol.window, window_under_loss(first.transport, loss, round_trip, segment))
    flow_rate = min((detail.flow_rate for detail in named if detail.flow_rate), default=math.inf)
    limit = first.connections * min(flow_rate, window / round_trip if round_trip else math.inf)
    return _Terms(
        eager=first.rendezvous,
        round_trip=round_trip,
        full=min(limit, rate) * round_trip,
        initial=math.inf if first.warm else first.connections * protocol.segments * segment,
        timeout=round_trip + LEAST_TIMEOUT,
        least=first.connections * protocol.least * frame,
        single=first.connections * frame,
        burst=first.connections * protocol.burst,
        window=first.connections * window,
        window_spread=first.window_spread,
        limit=limit if limit < rate else math.inf,
        ordered=not first.unordered,
        queued_acks=first.queued_acks,
    )


#: messages in repeated rounds from which the extension for replays is worth compiling; fewer take less than 0.1 s
REPLAYED_FROM = 1 << 18
_LOG_ROUNDS, _LOG_ROOM = 8, 1 << 16  # busy intervals that fit in the log: per channel, and in addition
_LOG_REPEATS = 1 << 10  # replayed rounds that fit in it
_NOT_JOINED = np.array((-1, st.NOT_JOINED, 0, 0, 0), dtype=st.THREAD)


#: the networks that can be simulated
Interconnect: TypeAlias = Cluster | WithSources


class Engine:
    """Owner of the kernel's arrays.

    Each client has a number and its own routes. ``net`` is replaced when arrays grow.
    """

    def __init__(self, interconnect: Interconnect, *, record: bool = False) -> None:
        self._interconnect = interconnect
        self._link_channel = np.ascontiguousarray(interconnect.link_channel, dtype=np.int64)
        self._link_latency = np.ascontiguousarray(interconnect.link_latency, dtype=np.float64)
        self.net = empty_net(
            interconnect.channel_capacity,
            interconnect.send_overhead,
            interconnect.recv_overhead,
            interconnect.reduce_time,
        )
        details = interconnect.details
        if details is not None and (details.sharing == "fifo").any():
            if interconnect.splits or details.buffer.any():
                paths = "several paths per message (spray, interfaces)"
                feature = "a switch buffer (buffer)" if details.buffer.any() else paths
                raise ConfigError(f"sharing = 'fifo' does not support {feature}; use sharing = 'max-min'")
            self.net = with_queues(self.net)
            enable(self.net.counts, "work_queues")
            if details.rendezvous.any():  # rendezvous: senders wait for receivers
                self.net.counts.ahead = 0
        if interconnect.splits:
            self.net = with_split(self.net)
        self._details = details if details is not None and details.has_effects else None
        if self._details is not None:
            self.net = with_shaping(self.net, self._link_channel, interconnect.reverse_link, self._details)
            enable(self.net.counts, "shape")
            self.net.counts.link_seed = interconnect.link_seed or 0
        self._overhead = details if details is not None and details.overhead.any() else None
        self._transports = None
        if self._details is not None and self.net.counts.transported:
            self._transports = Transports(len(self.net.channels), self._details)
            if self._details.buffer.any():
                ports = np.flatnonzero(interconnect.is_switch_port)
                self.net = with_buffers(self.net, self._link_channel[ports], self._details.buffer[ports])
        plain = self.net.channels["capacity"].copy()
        shaped = self.net.buckets["free"].copy(), self.net.buckets["loaded"].copy()
        #: undisturbed capacity of each channel, bytes/s: without, and with traffic on its reverse
        self.capacity: tuple[Floats, Floats] = (plain, plain) if self._details is None else shaped
        self.net.counts.log_on = int(record)
        self.logged: list[Logged] = []
        if record:
            log = grown(self.net.log, _LOG_ROUNDS * len(self.net.channels) + _LOG_ROOM)
            self.net = self.net._replace(log=log, repeats=grown(self.net.repeats, _LOG_REPEATS * st.SPANS))
        self._table = Table()
        self._used: dict[str, int] = {}
        self._programs: dict[tuple[int, int, int, bytes], int] = {}
        # the keys above contain ids, so the objects must stay alive
        self._kept: list[tuple[Schedule, Sequence[Floats] | None]] = []
        self._shapes: list[Program] = []
        self._free_instances: dict[int, list[int]] = {}
        self.instance_program: list[int] = []
        self._epochs = Epochs(interconnect)
        self._faults: list[Fault] = []
        self._epoch = 0  # current epoch, not counting those begun in ``net.changes``
        self._route_of: dict[tuple[int, bool, int, int], int] = {}
        #: per client: ranges (first, end) of the numbers of its routes
        self.routes_of: list[list[tuple[int, int]]] = []
        #: other objects that clients share, by kind and node
        self.lines: dict[tuple[str, int], Any] = {}
        #: per client: the pairs of nodes of its routes, arrays of shape (n, 2)
        self.pairs_of: list[list[Ints]] = []
        self.n_waiting = 0  # bound on the completions still to be reported
        self._n_repeated = 0  # messages in repeated rounds of all prepared collectives
        self.reserved = 0  # messages that compiled callers may have in flight
        self.now = 0.0  # time up to which the network has been simulated, s
        self.n_entries = 0  # calls by which messages and ranks have entered, without those of compiled callers
        #: simulates an episode that is being replayed (:mod:`ddlsim.network.episodes`); None if there is none
        self.untold: Callable[[], None] | None = None

    @property
    def is_new(self) -> bool:
        """Whether nothing has been prepared or started."""
        return not self._used.get("routes")

    @property
    def table(self) -> Ints:
        """Addresses of the arrays, valid until anything is prepared or sent, or an array grows."""
        return self._table.of(self.net)

    def change(
        self,
        links: Iterable[Fault],
        stops: Iterable[tuple[float, float, int]],
        avoided: Iterable[tuple[float, float, frozenset[int]]],
    ) -> None:
        """Schedule changes of links and nodes; see :meth:`ddlsim.network.network.Network.will_change`."""
        net, avoided = self.net, list(avoided)
        happened = net.counts.n_changed
        self._epoch += Epochs.begun(net.changes[:happened])
        to_come = net.changes[happened:]
        if avoided:
            self._epochs.avoid(avoided)
            to_come = to_come[to_come["kind"] != REROUTE]
        links = list(links)
        self._faults = [fault for fault in self._faults if fault[1] > self.now] + links  # of all clients
        concerned = {channel for _, _, channel, _ in links}
        to_come = to_come[(to_come["kind"] != CAPACITY) | ~np.isin(to_come["place"], list(concerned))]
        shares = shares_of(fault for fault in self._faults if fault[2] in concerned)
        shares = [change for change in shares if self.now <= change[0] < np.inf]
        changes = changes_of(self.capacity, shares, stops, self._epochs.starts if avoided else ())
        changes = np.concatenate([to_come, changes])
        changes = changes[np.argsort(changes["time"], kind="stable")]
        if len(changes):
            enable(net.counts, "change")
        self.net = net._replace(changes=changes)
        net.counts.n_changed = 0
        net.reals.next_change = changes["time"][0] if len(changes) else np.inf

    def prepare(self, schedule: Schedule, nodes: Ints, nbytes: float | Sequence[Floats], client: int) -> int:
        """Prepare an execution of `schedule` for a client, with rank r at ``nodes[r]``; return its id."""
        sizes = None if isinstance(nbytes, (int, float)) else nbytes
        program = self._register(schedule, nodes, sizes, client)
        return self.execution(program, 1.0 if sizes is not None else float(cast(float, nbytes)), client)

    def execution(self, program: int, nbytes: float, client: int) -> int:
        """Prepare an execution of a program, with a buffer of `nbytes` on each rank; return its id."""
        shape = self._shapes[program]
        free = self._free_instances[program]
        instance = free.pop() if free else self._new_instance(program, shape)
        net = self.net
        row = net.instances[instance]
        first, counters, ranks = int(row["threads"]), int(row["counters"]), int(row["ranks"])
        net.threads[first : first + shape.n_ranks * shape.n_lanes] = _NOT_JOINED
        net.counters[counters:ranks] = 0
        net.arrivals[counters:ranks].view(np.int64)[:] = 0  # all fields; assigning records is slow
        net.counters[ranks : ranks + shape.n_ranks] = shape.n_lanes
        row["ranks_left"] = shape.n_ranks
        row["nbytes"] = nbytes
        row["client"] = client
        net.counts.n_live += 1
        net.counts.live_threads += shape.n_ranks * shape.n_lanes
        net.counts.live_sends += net.programs["sends_bound"][program]
        self._n_repeated += shape.n_deliveries - shape.n_messages
        if self._n_repeated > REPLAYED_FROM and not net.counts.replay_rounds_code:
            enable(net.counts, "replay_rounds")
        self.expect(shape.n_ranks)
        self.ensure_slots()
        return instance

    def shape(self, instance: int) -> Program:
        """Return the program of an execution."""
        return self._shapes[self.instance_program[instance]]

    def end(self, instances: Iterable[int]) -> None:
        """End executions that no rank has entered, so that they can be reused."""
        counts = self.net.counts
        for instance in instances:
            shape = self.shape(instance)
            self.net.instances["ranks_left"][instance] = 0
            counts.n_live -= 1
            counts.live_threads -= shape.n_ranks * shape.n_lanes
            counts.live_sends -= self.net.programs["sends_bound"][self.instance_program[instance]]
            self.free([instance])

    def free(self, instances: Iterable[int]) -> None:
        """Make ended executions available for reuse."""
        for instance in instances:
            self._free_instances[self.instance_program[instance]].append(instance)

    def make_room(self) -> None:
        """Enlarge the arrays that the kernel has reported as full."""
        if self.net.counts.log_on:
            self.empty_log()
        self.ensure_slots()

    def share(self) -> None:
        """Count traffic per client from now on. Raises DdlsimError if anything has been started."""
        if not (self.is_new or self.net.counts.shared):
            raise DdlsimError("a network can be shared only before its first message or collective has started")
        self.net.counts.shared = 1

    @functools.cached_property
    def overhead(self) -> int:
        """Number of the client to which overhead is booked, which sends nothing itself."""
        self.routes_of.append([])
        self.pairs_of.append([])
        return len(self.routes_of) - 1

    def own_routes(self, client: int) -> Bools:
        """Return a mask of a client's routes, (n_routes,)."""
        mask = np.zeros(len(self.net.routes), dtype=np.bool_)
        for first, behind in self.routes_of[client]:
            mask[first:behind] = True
        return mask

    def expect(self, n: int) -> None:
        """Make room for `n` more completions."""
        self.n_waiting += n
        if self.n_waiting + self.reserved > len(self.net.out):
            n_out = self.n_waiting + self.reserved
            self.net = self.net._replace(out=grown(self.net.out, n_out), foreign=grown(self.net.foreign, n_out))

    def ensure_slots(self, extra: int = 0) -> None:
        """Make room for all messages that can be in flight, and `extra` ones."""
        counts = self.net.counts
        needed = ((counts.n_queued + st.UNITS) << counts.hop_shift) + 4 * st.UNITS + 4
        while counts.is_fifo and counts.n_free_marks < 2 * needed:
            self.net = grow_marks(self.net)
        need = counts.n_delivering + 2 * (counts.live_sends + self.reserved + extra)
        if need > len(self.net.slots):
            self.net = grow_slots(self.net, need)

    def empty_log(self) -> None:
        """Move the contents of the busy log to ``logged``; growing the log would copy it repeatedly."""
        net = self.net
        used, replays = net.counts.log_used, net.counts.log_repeats
        self.logged.append(Logged(net.log[:used], net.repeats[:replays]))
        net.counts.log_used = net.counts.log_repeats = 0
        net.counts.n_moments = 0  # a round is replayed only if all of it is in the log
        self.net = net._replace(log=np.empty_like(net.log), repeats=np.empty_like(net.repeats))

    def _extend(self, name: str, n: int) -> tuple[int, NDArray[Any]]:
        """Extend one of the growing arrays by `n` items; return their offset and a view of them."""
        start = self._used.get(name, 0)
        array = grown(getattr(self.net, name), start + n)
        self._used[name] = start + n
        self.net = self.net._replace(**{name: array})
        return start, array[start : start + n]

    def _append(self, name: str, values: NDArray[Any] | tuple[float, ...]) -> int:
        """Append values, or one record; return their offset."""
        start, places = self._extend(name, 1 if isinstance(values, tuple) else len(values))
        places[:] = values
        return start

    def _add_routes(
        self,
        src: Ints,
        dst: Ints,
        client: int,
        latency: Floats | None = None,
        flows: Ints | None = None,
        known_time: bool = False,
    ) -> int:
        """Append routes of a client between pairs of nodes; return the number of the first.

        latency  s of each route; None or NaN: that of its links
        flows    numbers of the connections, which ECMP distinguishes
        known_time  True: for messages of collectives whose known time includes latency, overheads and protocols
        """
        usual = self._interconnect.split_routes(src, dst, flows)
        epoch = self._epoch + Epochs.begun(self.net.changes[: self.net.counts.n_changed])
        routes = self._epochs.routes(epoch, src, dst, usual)
        first, rows = self._extend("routes", len(src))
        rows["handled"] = 1.0
        rows["occupies"] = 0.0 if known_time else 1.0
        if self.net.counts.shared:
            self._extend("routed", len(src))
        self.routes_of[client].append((first, first + len(src)))
        self.pairs_of[client].append(np.stack([src, dst], axis=1))
        self._write_routes(rows, routes, latency)
        if self._details is not None:
            _, frames = self._extend("frames", len(src))
            write_frames(frames, routes.offsets, routes.links, self._details.frame_header, self._details.frame_payload)
        if self._transports is not None and known_time:
            self._extend("transports", len(src))[1][:] = np.array(_BY_ITSELF, dtype=st.TRANSPORT)
        elif self._transports is not None:
            self._add_transports(self._transports, np.stack([src, dst], axis=1).tolist(), routes)
        for number, others, changed in self._epochs.later(epoch, src, dst, usual):
            if self.net.counts.is_fifo:
                raise ConfigError(
                    "sharing = 'fifo': queued messages cannot be rerouted around a link that is down; use sharing = "
                    "'max-min'"
                )
            rows = np.zeros(len(src), dtype=st.ROUTE)
            self._write_routes(rows, changed, latency)
            _, detours = self._extend("detours", len(others))
            detours["route"], detours["epoch"] = first + others, number
            for name in ("first", "last", "latency", "n_hops"):
                detours[name] = rows[name][others]
        return first

    def _write_routes(self, rows: NDArray[Any], routes: Routes, latency: Floats | None) -> None:
        """Append the hops of routes, and fill `rows`."""
        base, hops = self._extend("hops", len(routes.links))
        if self.net.counts.split:
            self._append("shares", routes.share)
        share, channel, latency_of = np.array(routes.share), self._link_channel, self._link_latency
        longest = write_routes(rows, hops, base, routes.offsets, routes.links, share, channel, latency_of)
        if self._overhead is not None:
            rows["latency"] += route_overhead(self._overhead, routes)
        if longest:
            self.net = grow_hops(self.net, longest + int(self._transports is not None))
        if latency is not None:
            rows["latency"] = np.where(np.isnan(latency), rows["latency"], latency)

    def _add_transports(self, transports: Transports, pairs: list[list[int]], routes: Routes) -> None:
        """Set the connections of routes; add new ones as needed."""
        if self._details is not None and self._details.buffer.any() and (routes.share < 1.0).any():
            raise ConfigError(
                "buffer: losses at switch ports require single-path routing; remove buffer or routing = 'spray'"
            )
        _, rows = self._extend("transports", len(pairs))
        latency = np.bincount(routes.of, routes.share * self._link_latency[routes.links], len(pairs)).tolist()
        narrowest = np.full(len(pairs), np.inf)
        np.minimum.at(narrowest, routes.of, self.net.buckets["free"][self._link_channel[routes.links]] / routes.share)
        rate, links, ends = narrowest.tolist(), routes.links.tolist(), routes.offsets.tolist()
        rows[:] = np.array(
            [transports.of(pair, links[ends[i] : ends[i + 1]], latency[i], rate[i]) for i, pair in enumerate(pairs)],
            dtype=st.TRANSPORT,
        )
        if transports.connections:
            self._append("connections", np.array(transports.connections, dtype=st.CONNECTION))
        if transports.limits:
            self.net = add_channels(self.net, np.array(transports.limits))
            if self.net.counts.log_on:
                self.net = self.net._replace(log=grown(self.net.log, 2 * len(self.net.channels) + _LOG_ROOM))
        transports.connections.clear()
        transports.limits.clear()

    def pair_routes(self, src: list[int], dst: list[int], client: int, latency: bool = True) -> list[int]:
        """Return the numbers of a client's routes between pairs of nodes.

        latency  False: for messages of collectives whose known time includes latency, overheads and protocols
        """
        pairs = [(client, latency, *pair) for pair in zip(src, dst, strict=True)]
        missing = list(dict.fromkeys(p for p in pairs if p not in self._route_of))
        if missing:
            array = np.array(missing, dtype=np.int64)
            none = None if latency else np.zeros(len(missing))
            first = self._add_routes(array[:, 2], array[:, 3], client, none, known_time=not latency)
            self._route_of.update({pair: first + i for i, pair in enumerate(missing)})
        return [self._route_of[pair] for pair in pairs]

    def _register(self, schedule: Schedule, nodes: Ints, sizes: Sequence[Floats] | None, client: int) -> int:
        key = (client, id(schedule), id(sizes), nodes.tobytes())
        if key in self._programs:
            return self._programs[key]
        shape = compile_schedule(schedule, sizes)
        lanes = shape.messages["src"].astype(np.int64) // shape.n_ranks  # each (a channel of NCCL) has own connections
        self._kept.append((schedule, sizes))
        self._programs[key] = self.add(shape, nodes, client, lanes)
        return self._programs[key]

    def add(self, shape: Program, nodes: Ints, client: int, flows: Ints) -> int:
        """Add a program of a client, with rank r at ``nodes[r]``, and return its number.

        flows  (n_messages,) numbers of the connections of the messages
        """
        # threads are numbered lane by lane, so "wrap" makes ranks of them
        source, target = (nodes.take(shape.messages[end], mode="wrap") for end in ("src", "dst"))
        route = self._add_routes(source, target, client, shape.latency, flows)
        self.net.routes["handled"][route : route + shape.n_messages] = shape.handled
        weight = self._append("weights", shape.weights)
        self._append("headers", shape.headers)
        if shape.headers.any():
            self.net.counts.has_headers = 1
        table = self._append("tables", shape.recv_message + self._used.get("messages", 0))
        step, steps = self._extend("steps", len(shape.steps["next"]))
        message, messages = self._extend("messages", shape.n_messages)
        places = {"step": step, "route": route, "weight": weight}
        places |= {"send": message, "send_end": message, "recv": table, "recv_end": table}
        for rows, columns in ((steps, shape.steps), (messages, shape.messages)):
            for name, column in columns.items():
                rows[name] = column + places.get(name, 0)
        steps["next"] += np.where(steps["next"] < 0, 0, step)
        messages["source"], messages["target"] = source, target
        thread = self._append("tables", np.where(shape.first_step < 0, -1, step + shape.first_step))
        bound = shape.sends_bound + self.net.counts.ahead * shape.n_ranks * shape.n_lanes
        program = self._append("programs", (thread, shape.n_ranks, shape.n_lanes, bound))
        self._shapes.append(shape)
        self._free_instances[program] = []
        return program

    def _new_instance(self, program: int, shape: Program) -> int:
        n_threads = shape.n_ranks * shape.n_lanes
        threads, _ = self._extend("threads", n_threads)
        counters, _ = self._extend("counters", shape.n_messages + shape.n_ranks)
        self.net = self.net._replace(ready=grown(self.net.ready, len(self.net.threads)))
        varying = shape.messages["stride"] * shape.messages["reduce"]
        if self.net.counts.ahead or varying.any():  # a repetition can overtake the one before
            self.net = self.net._replace(arrivals=grown(self.net.arrivals, counters + shape.n_messages))
        if self._transports is not None:
            self.net = self.net._replace(parked=grown(self.net.parked, len(self.net.counters)))
        self.instance_program.append(program)
        return self._append("instances", (0.0, program, threads, counters, counters + shape.n_messages, 0, 0))
