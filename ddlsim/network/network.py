"""The face of the network engine: start messages and collectives, let time pass, collect completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddlsim.cluster import LinkDetails
from ddlsim.cluster.cluster import Routes
from ddlsim.collectives import Schedule
from ddlsim.network import accounts, kernel
from ddlsim.network import state as st
from ddlsim.network.accounts import Accounts
from ddlsim.network.build import add_channels, empty_net, grow_hops, grow_slots, with_buffers, with_shaping
from ddlsim.network.busy import BusyIntervals, Logged
from ddlsim.network.changes import REROUTE, changes_of
from ddlsim.network.epochs import Epochs
from ddlsim.network.program import (
    Program,
    compile_schedule,
    write_frames,
    write_messages,
    write_routes,
    write_steps,
)
from ddlsim.network.state import Bools, Floats, Ints, grown
from ddlsim.network.view import Table
from ddlsim.network.ways import Ways

if TYPE_CHECKING:
    from ddlsim.cluster.detours import Detours

_FIRST = 1 << 62  # puts messages before collectives
_LOG_ROUNDS, _LOG_ROOM = 8, 1 << 16  # busy intervals that the log takes: so many of each channel, and so many more
_LOG_REPEATS = 1 << 10  # replays that it takes


class Interconnect(Protocol):
    """What the engine needs to know of a cluster (``ddlsim.cluster.Cluster`` has it)."""

    @property
    def channel_capacity(self) -> Floats: ...
    @property
    def link_channel(self) -> Ints: ...
    @property
    def link_latency(self) -> Floats: ...
    @property
    def send_overhead(self) -> Floats: ...
    @property
    def recv_overhead(self) -> Floats: ...
    @property
    def reduce_time(self) -> Floats: ...
    @property
    def details(self) -> LinkDetails | None: ...
    @property
    def reverse_link(self) -> Ints: ...
    @property
    def is_switch_port(self) -> Bools: ...
    def routes(self, src: Ints, dst: Ints) -> Routes: ...
    def around(self, down: Iterable[int]) -> Detours: ...


class Completions(NamedTuple):
    """What ended at one instant.

    ``time`` s; ``ids``, ``ranks`` (n,): rank ``ranks[i]`` finished collective ``ids[i]``; a message has the
    negative id that :meth:`Network.send` returned. Messages come first, in the order in which they were sent,
    then collectives by id and rank.
    """

    time: float
    ids: Ints
    ranks: Ints


class Network:
    """Messages and collectives on the channels of a cluster, under max-min fair sharing.

    Time never runs by itself: :meth:`advance` moves it. With ``record=True`` busy intervals of all channels
    are kept for timelines.
    """

    def __init__(self, interconnect: Interconnect, *, record: bool = False) -> None:
        self._interconnect = interconnect
        self._link_channel = np.ascontiguousarray(interconnect.link_channel, dtype=np.int64)
        self._link_latency = np.ascontiguousarray(interconnect.link_latency, dtype=np.float64)
        self._net = empty_net(
            interconnect.channel_capacity, interconnect.send_overhead, interconnect.recv_overhead,
            interconnect.reduce_time,
        )  # fmt: skip
        details = interconnect.details
        self._details = details if details is not None and details.acts else None
        if self._details is not None:
            self._net = with_shaping(self._net, self._link_channel, interconnect.reverse_link, self._details)
        self._ways = None
        if self._details is not None and self._net.counts[st.TRANSPORTED]:
            self._ways = Ways(len(self._net.channels), self._details)
            if self._details.buffer.any():
                ports = np.flatnonzero(interconnect.is_switch_port)
                self._net = with_buffers(self._net, self._link_channel[ports], self._details.buffer[ports])
        self._net.counts[st.LOG_ON] = int(record)
        self._logged: list[Logged] = []
        if record:
            log = grown(self._net.log, _LOG_ROUNDS * len(self._net.channels) + _LOG_ROOM)
            self._net = self._net._replace(log=log, repeats=grown(self._net.repeats, _LOG_REPEATS))
        self._table = Table()
        self._used: dict[str, int] = {}
        self._programs: dict[tuple[int, int, bytes], int] = {}
        self._kept: list[
            tuple[Schedule, Sequence[Floats] | None]
        ] = []  # the keys above hold ids, so the objects must live
        self._shapes: list[Program] = []
        self._free_instances: dict[int, list[int]] = {}
        self._instance_program: list[int] = []
        self._epochs = Epochs(interconnect)
        self._route_of: dict[tuple[int, int], int] = {}
        self._n_sent = 0
        self._n_waiting = 0  # completions that may still be shown
        self._reserved = 0  # messages that compiled callers may have on their way
        #: messages get every so manieth number; those between are for compiled callers
        self.stride = 1
        self._next_instant = -np.inf  # before it, nothing happens by itself
        self._now = 0.0

    def will_change(
        self, links: Iterable[tuple[float, int, float]], pauses: Iterable[tuple[float, float, int]] = (),
        avoided: Iterable[tuple[float, float, frozenset[int]]] = (),
    ) -> None:  # fmt: skip
        """Let links and nodes change at known times, before anything has been started; in addition to those that were
        named before.

        links    (s, channel, share of its capacity that it has from then on; 0: it is down)
        pauses   (s, s until which it lasts, node that sends and receives nothing meanwhile; what flows already goes on)
        avoided  (s, s until which it lasts, links for which other ways are taken meanwhile, where there are any)
        """
        self._epochs.avoid(avoided)
        changes = changes_of(self._net, links, pauses, self._epochs.starts)
        before = self._net.changes[self._net.changes["kind"] != REROUTE]
        changes = np.sort(np.concatenate([before, changes]), order="time", kind="stable")
        self._net = self._net._replace(changes=changes)
        self._net.reals[st.NEXT_CHANGE] = changes["time"][0] if len(changes) else np.inf

    # ------------------------------------------------------------ starting things

    def collective(self, schedule: Schedule, nodes: Sequence[int] | Ints, nbytes: float | Sequence[Floats]) -> int:
        """Prepare one execution of `schedule`, rank r at ``nodes[r]``; return its id (>= 0).

        nbytes  bytes of the buffer per rank; or the size of every message, as one table of shape (repeat, m)
                per round (of all lanes, one after the other).
        Ids are used again after all ranks have ended. Raises ConfigError for sizes that do not fit.
        """
        sizes = None if isinstance(nbytes, (int, float)) else nbytes
        scale = 1.0 if sizes is not None else float(cast(float, nbytes))
        program = self._register(schedule, np.asarray(nodes, dtype=np.int64), sizes)
        shape = self._shapes[program]
        free = self._free_instances[program]
        instance = free.pop() if free else self._new_instance(program, shape)
        net = self._net
        row = net.instances[instance]
        threads = net.threads[row["threads"] : row["threads"] + shape.n_ranks * shape.n_lanes]
        threads[:] = np.array((-1, st.NOT_JOINED, 0, 0, 0), dtype=st.THREAD)
        net.counters[row["counters"] : row["ranks"]] = 0
        net.delivered[row["counters"] : row["ranks"]] = 0.0
        net.counters[row["ranks"] : row["ranks"] + shape.n_ranks] = shape.n_lanes
        row["ranks_left"] = shape.n_ranks
        row["nbytes"] = scale
        net.counts[st.N_LIVE] += 1
        net.counts[st.LIVE_THREADS] += shape.n_ranks * shape.n_lanes
        net.counts[st.LIVE_SENDS] += shape.sends_bound
        self._expect(shape.n_ranks)
        self._ensure_slots()
        return instance

    def join(self, ids: Sequence[int] | Ints, ranks: Sequence[int] | Ints, now: float) -> None:
        """Let rank ``ranks[i]`` enter collective ``ids[i]`` at time `now`, for all i in order."""
        self._next_instant = -np.inf
        instances, joining = np.asarray(ids, dtype=np.int64), np.asarray(ranks, dtype=np.int64)
        self._now = now
        kernel.join(self._table.of(self._net), instances, joining, float(now))

    def send(self, src: Sequence[int] | Ints, dst: Sequence[int] | Ints, nbytes: Floats, now: float) -> Ints:
        """Send messages between nodes at time `now`; return their ids (negative).

        src, dst, nbytes  (n,): nodes, and bytes of each message
        """
        n, handle = len(src), (self._n_sent + 1) * self.stride - 1
        self._n_sent += n
        self._next_instant = -np.inf
        self._now = now
        self._expect(n)
        self._ensure_slots(extra=n)
        if n == 1:
            source, target = int(src[0]), int(dst[0])
            route = self._route_of.get((source, target))
            if route is None:
                route = int(self._pair_routes([source], [target])[0])
            kernel.send_one(self._table.of(self._net), handle, source, target, route, float(nbytes[0]), float(now))
            return np.array([-1 - handle], dtype=np.int64)
        sources, targets = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        routes = self._pair_routes(sources.tolist(), targets.tolist())
        handles = handle + self.stride * np.arange(n, dtype=np.int64)
        sizes = np.array(nbytes, dtype=np.float64)
        kernel.send(self._table.of(self._net), handles, sources, targets, routes, sizes, float(now))
        return -1 - handles

    # ------------------------------------------------------------ letting time pass

    def advance(self, until: float = np.inf) -> Completions | None:
        """Let time pass up to `until`; return the first completions, or None if there are none by then."""
        if until < self._next_instant:
            self._now = max(self._now, until)
            return None
        while (status := kernel.advance(self._table.of(self._net), float(until))) == st.FULL:
            self.make_room()
        self._next_instant = float(self._net.reals[st.NEXT])
        reached = until if status == st.IDLE and until < np.inf else float(self._net.reals[st.NOW])
        self._now = max(self._now, reached)
        return self._take() if status == st.VISIBLE else None

    # ------------------------------------------------------------ for compiled callers (ddlsim.network.executor)

    @property
    def table(self) -> Ints:
        """The addresses of the kernel's arrays, valid until something is prepared, sent or made longer."""
        return self._table.of(self._net)

    def routes(self, src: Sequence[int], dst: Sequence[int]) -> Ints:
        """Return the numbers of the routes between nodes, for messages that others send."""
        return self._pair_routes(list(src), list(dst))

    def reserve(self, n: int) -> None:
        """Make room for `n` messages on their way at once, which others send."""
        self._reserved += n
        self._expect(0)
        self._ensure_slots()

    @property
    def n_sent(self) -> int:
        """How many single messages have been sent."""
        return self._n_sent

    def has_run(self, now: float, n_taken: int, freed: Sequence[int], n_sent: int | None = None) -> None:
        """Note that others have let the kernel run up to `now`, have taken completions and instances that ended, and
        have sent until so many messages have been sent altogether."""
        self._now, self._next_instant = max(self._now, now), -np.inf
        if n_sent is not None:
            self._n_waiting += n_sent - self._n_sent
            self._n_sent = n_sent
        self._n_waiting -= n_taken
        for instance in freed:
            self._free_instances[self._instance_program[instance]].append(instance)

    @property
    def n_instances(self) -> int:
        """How many instances of collectives there are."""
        return len(self._instance_program)

    def completed(self, n: int) -> tuple[Ints, Ints]:
        """Return the ids and ranks of the first `n` completions, which somebody has put there."""
        return self._net.out["id"][:n].copy(), self._net.out["rank"][:n].copy()

    def make_room(self) -> None:
        """Make the arrays longer that the kernel has said are full."""
        if self._net.counts[st.LOG_ON]:
            self._empty_log()
        self._ensure_slots()

    # ------------------------------------------------------------ reading

    @property
    def pending(self) -> bool:
        """Whether anything is still on its way."""
        counts = self._net.counts
        timers = counts[st.FIFO_TAIL] - counts[st.FIFO_HEAD] + counts[st.N_TIMER_HEAP]
        return bool(counts[st.N_ACTIVE] + timers + counts[st.N_OUT])

    @property
    def now(self) -> float:
        """The time (s) up to which the network has run, which is that of all that can be read."""
        return self._now

    @property
    def channel_nbytes(self) -> Floats:
        """Bytes that each channel has carried, those of messages under way included, (n_channels,)."""
        return accounts.channel_nbytes(self._net, self._now)

    @property
    def channel_busy(self) -> Floats:
        """Seconds during which each channel carried something, (n_channels,)."""
        return accounts.channel_busy(self._net, self._now)

    @property
    def nbytes_sent(self) -> float:
        """Bytes of the messages that senders have issued so far."""
        return float(self._net.reals[st.ISSUED])

    @property
    def n_channels(self) -> int:
        """Number of channels of links."""
        return int(self._net.counts[st.N_LINKED])

    @property
    def recording(self) -> bool:
        """Whether busy intervals are kept."""
        return bool(self._net.counts[st.LOG_ON])

    @property
    def n_live(self) -> int:
        """Collectives that have been prepared and have not ended."""
        return int(self._net.counts[st.N_LIVE])

    def accounts(self) -> Accounts:
        """Return what has been issued, delivered and carried, counted more than once so that it can be compared."""
        return accounts.accounts(self._net, self._now)

    @property
    def n_messages(self) -> int:
        """Messages delivered so far."""
        return int(self._net.counts[st.N_MESSAGES])

    @property
    def n_replayed(self) -> int:
        """Messages of `n_messages` that were replayed exactly without handling their events."""
        return int(self._net.counts[st.FAST_FORWARDED])

    def busy_intervals(self) -> BusyIntervals:
        """The recorded busy intervals (``record=True``); open ones end now."""
        self._empty_log()
        under_way = Logged(accounts.open_intervals(self._net, self._now), self._net.repeats[:0])
        return BusyIntervals([*self._logged, under_way], self.n_channels)

    def rates(self) -> tuple[list[list[int]], Floats]:
        """The flows now under way: (channels of each, rate of each in bytes/s)."""
        net = self._net
        n = int(net.counts[st.N_ACTIVE])
        shift = int(net.counts[st.HOP_SHIFT])
        blocks = net.flow_hops[: n << shift].reshape(n, 1 << shift).tolist()
        return [block[: block.index(st.LAST)] for block in blocks], net.flow_rate[:n].copy()

    # ------------------------------------------------------------ inside

    def _take(self) -> Completions:
        net = self._net
        n = int(net.counts[st.N_OUT])
        ids, ranks = net.out["id"][:n].copy(), net.out["rank"][:n].copy()
        if n > 1:
            order = np.lexsort((ranks, np.where(ids < 0, -1 - ids - _FIRST, ids)))
            ids, ranks = ids[order], ranks[order]
        net.counts[st.N_OUT] = 0
        self._n_waiting -= n
        if ids[-1] >= 0:  # collectives come last
            collectives = ids[ids >= 0]
            for instance in np.unique(collectives[net.instances["ranks_left"][collectives] == 0]).tolist():
                self._free_instances[self._instance_program[instance]].append(instance)
        return Completions(float(net.reals[st.NOW]), ids, ranks)

    def _expect(self, n: int) -> None:
        self._n_waiting += n
        if self._n_waiting + self._reserved > len(self._net.out):
            self._net = self._net._replace(out=grown(self._net.out, self._n_waiting + self._reserved))

    def _ensure_slots(self, extra: int = 0) -> None:
        counts = self._net.counts
        need = int(counts[st.N_DELIVERING]) + 2 * (int(counts[st.LIVE_SENDS]) + self._reserved + extra)
        if need > len(self._net.slots):
            self._net = grow_slots(self._net, need)

    def _empty_log(self) -> None:
        """Put aside what has been logged: a log that grew would be copied over and over."""
        net = self._net
        used, replays = net.counts[st.LOG_USED], net.counts[st.LOG_REPEATS]
        self._logged.append(Logged(net.log[:used], net.repeats[:replays]))
        net.counts[st.LOG_USED] = net.counts[st.LOG_REPEATS] = 0
        self._net = net._replace(log=np.empty_like(net.log), repeats=np.empty_like(net.repeats))

    def _extend(self, name: str, n: int) -> tuple[int, NDArray[Any]]:
        """Make one of the growing arrays longer by `n`; return where the new places start, and a view of them."""
        start = self._used.get(name, 0)
        array = grown(getattr(self._net, name), start + n)
        self._used[name] = start + n
        self._net = self._net._replace(**{name: array})
        return start, array[start : start + n]

    def _append(self, name: str, values: NDArray[Any] | tuple[float, ...]) -> int:
        """Append values, or one record; return where they start."""
        start, places = self._extend(name, 1 if isinstance(values, tuple) else len(values))
        places[:] = values
        return start

    def _add_routes(self, src: Ints, dst: Ints, latency: Floats | None = None) -> int:
        """Append the routes of the pairs; return the number of the first. `latency` (s), where given and not NaN, is
        theirs."""
        usual = self._interconnect.routes(src, dst)
        epoch = self._epochs.begun(self._net.changes[: self._net.counts[st.N_CHANGED]])
        routes = self._epochs.routes(epoch, src, dst, usual)
        first, rows = self._extend("routes", len(src))
        self._write_routes(rows, routes, latency)
        if self._details is not None:
            _, frames = self._extend("frames", len(src))
            write_frames(frames, routes.offsets, routes.links, self._details.frame_header, self._details.frame_payload)
        if self._ways is not None:
            self._add_ways(self._ways, np.stack([src, dst], axis=1).tolist(), routes)
        for number, others, changed in self._epochs.later(epoch, src, dst, usual):
            rows = np.zeros(len(src), dtype=st.ROUTE)
            self._write_routes(rows, changed, latency)
            _, detours = self._extend("detours", len(others))
            detours["route"], detours["epoch"] = first + others, number
            for name in ("first", "last", "latency"):
                detours[name] = rows[name][others]
        return first

    def _write_routes(self, rows: NDArray[Any], routes: Routes, latency: Floats | None) -> None:
        """Append the hops of routes, and say in `rows` where they are."""
        base, hops = self._extend("hops", len(routes.links))
        longest = write_routes(rows, hops, base, routes.offsets, routes.links, self._link_channel, self._link_latency)
        if longest:
            self._net = grow_hops(self._net, longest + int(self._ways is not None))
        if latency is not None:
            rows["latency"] = np.where(np.isnan(latency), rows["latency"], latency)

    def _add_ways(self, ways: Ways, pairs: list[list[int]], routes: Routes) -> None:
        """Say which connections carry the messages of these routes; add those that there are not yet."""
        _, rows = self._extend("ways", len(pairs))
        of = np.repeat(np.arange(len(pairs)), np.diff(routes.offsets))
        latency = np.bincount(of, self._link_latency[routes.links], len(pairs)).tolist()
        narrowest = np.full(len(pairs), np.inf)
        np.minimum.at(narrowest, of, self._net.buckets["free"][self._link_channel[routes.links]])
        rate, links, ends = narrowest.tolist(), routes.links.tolist(), routes.offsets.tolist()
        rows[:] = np.array(
            [ways.of(pair, links[ends[i] : ends[i + 1]], latency[i], rate[i]) for i, pair in enumerate(pairs)],
            dtype=st.WAY,
        )
        if ways.connections:
            self._append("connections", np.array(ways.connections, dtype=st.CONNECTION))
        if ways.limits:
            self._net = add_channels(self._net, np.array(ways.limits))
            if self.recording:
                self._net = self._net._replace(log=grown(self._net.log, 2 * len(self._net.channels) + _LOG_ROOM))
        ways.connections.clear()
        ways.limits.clear()

    def _pair_routes(self, src: list[int], dst: list[int]) -> Ints:
        pairs = list(zip(src, dst, strict=True))
        missing = list(dict.fromkeys(p for p in pairs if p not in self._route_of))
        if missing:
            array = np.array(missing, dtype=np.int64)
            first = self._add_routes(array[:, 0], array[:, 1])
            self._route_of.update({pair: first + i for i, pair in enumerate(missing)})
        return np.array([self._route_of[p] for p in pairs], dtype=np.int64)

    def _register(self, schedule: Schedule, nodes: Ints, sizes: Sequence[Floats] | None) -> int:
        key = (id(schedule), id(sizes), nodes.tobytes())
        if key in self._programs:
            return self._programs[key]
        shape = compile_schedule(schedule, sizes)
        # threads are numbered lane by lane, so "wrap" makes ranks of them
        src, dst = (nodes.take(side, mode="wrap") for side in (shape.src, shape.dst))
        route = self._add_routes(src, dst, shape.latency)
        weight = self._append("weights", shape.weights)
        self._append("headers", shape.headers)
        if shape.headers.any():
            self._net.counts[st.HEADERS] = 1
        table = self._append("tables", shape.recv_message + self._used.get("messages", 0))
        step, steps = self._extend("steps", len(shape.step_next))
        message, messages = self._extend("messages", shape.n_messages)
        write_steps(steps, step, message, table, shape.step_repeat, shape.step_next, shape.step_send, shape.step_recv)
        columns = (shape.src, shape.dst, shape.receiving, shape.weight, shape.stride, shape.reduce)
        write_messages(messages, step, route, weight, nodes, columns)
        thread = self._append("tables", np.where(shape.first_step < 0, -1, step + shape.first_step))
        program = self._append("programs", (thread, shape.n_ranks, shape.n_lanes, shape.sends_bound))
        self._programs[key] = program
        self._kept.append((schedule, sizes))
        self._shapes.append(shape)
        self._free_instances[program] = []
        return program

    def _new_instance(self, program: int, shape: Program) -> int:
        n_threads = shape.n_ranks * shape.n_lanes
        threads, _ = self._extend("threads", n_threads)
        counters, _ = self._extend("counters", shape.n_messages + shape.n_ranks)
        self._net = self._net._replace(ready=grown(self._net.ready, len(self._net.threads)))
        if (shape.stride * shape.reduce).any():  # a repetition can be reduced sooner than the one before
            self._net = self._net._replace(delivered=grown(self._net.delivered, counters + shape.n_messages))
        if self._ways is not None:
            self._net = self._net._replace(parked=grown(self._net.parked, len(self._net.counters)))
        self._instance_program.append(program)
        return self._append("instances", (0.0, program, threads, counters, counters + shape.n_messages, 0))
