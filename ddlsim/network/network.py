"""Interface of the network engine: start messages and collectives, advance time, collect completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.collectives import Schedule
from ddlsim.network import accounts, kernel
from ddlsim.network import state as st
from ddlsim.network.accounts import Accounts
from ddlsim.network.busy import BusyIntervals, Logged
from ddlsim.network.calendar import NO_PAUSES, earliest_start, merged
from ddlsim.network.changes import Fault
from ddlsim.network.engine import Engine, Interconnect
from ddlsim.network.episodes import Episodes
from ddlsim.network.state import Floats, Ints
from ddlsim.ties import distinct

_FIRST = 1 << 62  # sorts messages before collectives


class Completions(NamedTuple):
    """Messages and collectives that finished at the same time.

    time   simulated time in seconds
    ids    (n,) collective ids, which are non-negative, and message ids, which are negative (as returned by
           :meth:`Network.send`)
    ranks  (n,) for collectives, a rank that has finished its part; 0 for messages

    Messages come first, in the order in which they were sent. They are followed by collectives, with one entry for each
    rank that has finished its part, sorted by id and rank.
    """

    time: float
    ids: Ints
    ranks: Ints


class Network:
    """A simulated network in which messages and collectives share bandwidth according to max-min fairness.

    Simulated time advances only in calls to :meth:`advance`.

    interconnect  the network to simulate, usually a :class:`~ddlsim.cluster.Cluster`
    record        whether to record the busy intervals of all channels for timelines
    n_sources     number of traffic sources (:mod:`ddlsim.network.engine`). Each source adds one channel after the
                  channels of the cluster's links
    """

    def __init__(self, interconnect: Interconnect, *, record: bool = False, n_sources: int = 0) -> None:
        self._engine = Engine(interconnect, record=record)
        self.n_sources = n_sources
        #: (n_pauses, 2) s, in which users of this object start no messages
        self.pauses = NO_PAUSES
        self._join(0)

    def _join(self, client: int) -> None:
        self.client = client
        self._engine.routes_of.append([])
        self._engine.pairs_of.append([])
        self._n_sent = 0
        #: distance between the handles of successive messages; those in between are for compiled callers
        self.stride = 1

    @property
    def engine(self) -> Engine:
        """The engine's arrays, simulated up to the present time."""
        if self._engine.untold is not None:
            self._engine.untold()
        return self._engine

    def shared(self) -> Network:
        """Return another view of this network, for a client with its own messages and collectives.

        The first call must precede all messages and collectives.

        The client that advances time receives its own completions. If another client has completions, time stops until
        that client (:meth:`waiting_clients`) advances it.
        """
        self.engine.share()
        other = object.__new__(Network)
        other._engine, other.n_sources, other.pauses = self.engine, self.n_sources, self.pauses
        other._join(len(self.engine.routes_of))
        return other

    def will_change(
        self,
        links: Iterable[Fault],
        stops: Iterable[tuple[float, float, int]] = (),
        avoided: Iterable[tuple[float, float, frozenset[int]]] = (),
        pauses: Iterable[tuple[float, float]] = (),
    ) -> None:
        """Schedule changes of links and nodes, in addition to those of earlier calls. None may start in the past.

        links    tuples (start in s, end in s, channel, factor applied to the capacity); factor 0: the link is down. If
                 several factors apply to a channel at the same time, from any client, they are multiplied.
        stops    tuples (start in s, end in s, node): the node sends and receives nothing, except messages that already
                 flow
        avoided  tuples (start in s, end in s, links): messages are rerouted around the links if possible. These must be
                 set before anything is started
        pauses   tuples (start in s, end in s): this client starts nothing
        """
        self.engine.change(links, stops, avoided)
        self.pauses = merged([*map(tuple, self.pauses.tolist()), *pauses])

    def earliest(self, ready: float) -> float:
        """Return when what a client has ready at a time starts (s): in a pause, at its end."""
        return earliest_start(self.pauses, ready)

    def divide_capacity(self, channels: Ints, factors: Floats) -> None:
        """Divide the capacity of some channels, on which each simulated message represents several messages.

        channels  (n,) the channels
        factors   (n,) number of messages that a message on each channel represents, by which its capacity is divided
        """
        net = self.engine.net
        net.channels["capacity"][channels] /= factors
        net.reals.narrowest = np.min(net.channels["capacity"], initial=np.inf)
        for name in ("free", "loaded", "burst", "tokens") if net.counts.shaped else ():
            net.buckets[name][channels] /= factors

    @property
    def changes(self) -> bool:
        """Whether changes of links or nodes are scheduled."""
        return len(self._engine.net.changes) > 0

    # ------------------------------------------------------------ starting things

    def collective(self, schedule: Schedule, nodes: Sequence[int] | Ints, nbytes: float | Sequence[Floats]) -> int:
        """Prepare one execution of `schedule`, and return its id (at least 0).

        nodes   the node of each rank
        nbytes  size of the buffer on each rank, in bytes; or the size of every message, as one array of shape (repeat,
                m) per round, lane by lane

        Ids are reused after all ranks have finished. Raises ConfigError if the arrays do not match the schedule.
        """
        return self._engine.prepare(schedule, np.asarray(nodes, dtype=np.int64), nbytes, self.client)

    def join(self, ids: Sequence[int] | Ints, ranks: Sequence[int] | Ints, now: float) -> None:
        """Let rank ``ranks[i]`` enter collective ``ids[i]`` at time `now` (s), for all i in order."""
        self.engine.n_entries += 1
        instances, joining = np.asarray(ids, dtype=np.int64), np.asarray(ranks, dtype=np.int64)
        self.engine.now = now
        kernel.join(self.engine.table, instances, joining, float(now))

    def send(
        self,
        src: Sequence[int] | Ints,
        dst: Sequence[int] | Ints,
        nbytes: Floats,
        now: float,
        *,
        overhead: bool | None = None,
    ) -> Ints:
        """Send messages between nodes at time `now` (s), and return their ids, which are negative.

        src, dst  (n,) sending and receiving nodes
        nbytes    (n,) size of each message in bytes
        overhead  None for ordinary messages. True or False for messages of a collective whose known time already
                  includes latency; their bytes count as overhead (True) or as traffic of this client (False)
        """
        client, latency = self.engine.overhead if overhead else self.client, overhead is None
        n, handle = len(src), self.first_handle + (self._n_sent + 1) * self.stride - 1
        self._n_sent += n
        self.engine.n_entries += 1
        self.engine.now = now
        self.engine.expect(n)
        self.engine.ensure_slots(extra=n)
        handles = [handle + i * self.stride for i in range(n)]
        sources, targets = [int(node) for node in src], [int(node) for node in dst]
        routes = self.engine.pair_routes(sources, targets, client, latency)
        table, sizes = self.engine.table, np.asarray(nbytes, dtype=np.float64).tolist()
        for message in zip(handles, sources, targets, routes, sizes, strict=True):
            kernel.send_one(table, *message, float(now))
        return -1 - np.array(handles, dtype=np.int64)

    # ------------------------------------------------------------ advancing time

    def advance(self, until: float = np.inf) -> Completions | None:
        """Advance time until something finishes, at most to `until` (s), and return the first completions.

        Returns None if nothing finishes by then, or if completions of another client come first.
        """
        self.engine.net.counts.client = self.client
        while (status := kernel.advance(self.engine.table, float(until))) == st.FULL:
            self.engine.make_room()
        reached = until if status == st.IDLE and until < np.inf else self.engine.net.reals.now
        self.engine.now = max(self.engine.now, reached)
        return self._take() if status == st.VISIBLE else None

    # ------------------------------------------------------------ for compiled callers (ddlsim.network.executor)

    @property
    def table(self) -> Ints:
        """Addresses of the kernel's arrays.

        The addresses are valid until something is prepared or sent, an array grows, or another client advances time.
        """
        self._engine.net.counts.client = self.client
        return self._engine.table

    @property
    def first_handle(self) -> int:
        """Smallest handle of this client's messages."""
        return self.client << st.CLIENT_SHIFT

    def routes(self, src: Sequence[int], dst: Sequence[int]) -> Ints:
        """Return the number of the route from each ``src[i]`` to ``dst[i]``.

        Compiled code that sends messages uses these numbers.
        """
        return np.array(self._engine.pair_routes(list(src), list(dst), self.client), dtype=np.int64)

    @property
    def pairs(self) -> Ints:
        """Distinct pairs of nodes between which this client has looked up routes, shape (n, 2)."""
        pairs = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self._engine.pairs_of[self.client]])
        return np.stack(np.divmod(distinct(pairs[:, 0] << 32 | pairs[:, 1]), 1 << 32), axis=1)

    def reserve(self, n: int) -> None:
        """Reserve space for `n` messages in flight at the same time, for compiled code that sends messages itself."""
        self._engine.reserved += n
        self._engine.expect(0)
        self._engine.ensure_slots()

    @property
    def n_sent(self) -> int:
        """Number of individual messages sent so far."""
        return self._n_sent

    def has_run(self, now: float, n_taken: int, freed: Sequence[int], n_sent: int | None = None) -> None:
        """Record that compiled code has advanced the kernel.

        now      time in s that the kernel has reached
        n_taken  number of completions that were taken
        freed    ids of collectives that have finished
        n_sent   total number of messages sent; None: unchanged
        """
        self._engine.now = max(self._engine.now, now)
        if n_sent is not None:
            self._engine.n_waiting += n_sent - self._n_sent
            self._n_sent = n_sent
        self._engine.n_waiting -= n_taken
        self._engine.free(freed)

    def episodes(self, bystanders: int) -> Episodes:
        """Return the episodes of collectives whose last `bystanders` ranks have no tasks. There is a single client."""
        return Episodes(self.engine, bystanders)

    @property
    def n_instances(self) -> int:
        """Number of collective ids in use or free to be reused."""
        return len(self._engine.instance_program)

    def completed(self, n: int) -> tuple[Ints, Ints]:
        """Return the ids and ranks of the first `n` completions in the output buffer."""
        return self._engine.net.out["id"][:n].copy(), self._engine.net.out["rank"][:n].copy()

    def make_room(self) -> None:
        """Grow the arrays that the kernel has reported as full."""
        self._engine.make_room()

    # ------------------------------------------------------------ for clients that share the network

    @property
    def waiting_clients(self) -> list[int]:
        """Sorted numbers of the clients that have completions to collect at the present time."""
        net = self._engine.net
        n = net.counts.n_foreign
        return sorted(set(net.foreign["client"][:n].tolist())) if n else []

    @property
    def others_wait(self) -> bool:
        """Whether another client has completions to collect."""
        return bool(self._engine.net.counts.n_foreign)

    def is_under_way(self, client: int) -> bool:
        """Whether a client has messages in flight."""
        net = self.engine.net
        live = net.slots["state"] != st.FREE
        selected = self.engine.own_routes(client) | self.engine.own_routes(self.engine.overhead)
        return bool(selected[net.slots["route"][live]].any())

    # ------------------------------------------------------------ reading

    @property
    def pending(self) -> bool:
        """Whether messages are in flight or completions have not been collected."""
        counts = self._engine.net.counts
        timers = counts.fifo_tail - counts.fifo_head + counts.n_timer_heap
        return bool(counts.n_active + counts.n_queued + timers + counts.n_out + counts.n_foreign)

    @property
    def now(self) -> float:
        """Time in s up to which the network has been simulated. All totals refer to this time."""
        return self._engine.now

    @property
    def channel_nbytes(self) -> Floats:
        """Bytes carried by each channel, including parts of messages in flight, shape (n_channels,)."""
        return self.accounts().nbytes[: self.n_channels]

    @property
    def channel_overhead(self) -> Floats:
        """The part of `channel_nbytes` that counts as overhead, in bytes, shape (n_channels,)."""
        return self.traffic_of(self.engine.overhead)[0][: self.n_channels]

    @property
    def channel_busy(self) -> Floats:
        """Busy time of each channel in s, shape (n_channels,)."""
        return self.accounts().busy[: self.n_channels]

    @property
    def nbytes_sent(self) -> float:
        """Number of bytes in all messages issued by this client so far."""
        if not self.is_shared:
            return accounts.issued(self.engine.net)
        return accounts.issued(self.engine.net, self.engine.own_routes(self.client))

    @property
    def n_channels(self) -> int:
        """Number of channels of the cluster, without those of traffic sources."""
        return self._engine.net.counts.n_linked - self.n_sources

    @property
    def recording(self) -> bool:
        """Whether busy intervals are recorded."""
        return bool(self._engine.net.counts.log_on)

    @property
    def n_live(self) -> int:
        """Number of this client's collectives that are prepared and not yet finished."""
        if not self.is_shared:
            return self.engine.net.counts.n_live
        instances = self.engine.net.instances[: self.n_instances]
        return int(((instances["client"] == self.client) & (instances["ranks_left"] > 0)).sum())

    def accounts(self) -> Accounts:
        """Return totals of the bytes issued, delivered and carried.

        They are counted independently, so they can be compared.
        """
        return accounts.accounts(self.engine.net, self.engine.now, self.engine.capacity[0])

    @property
    def is_shared(self) -> bool:
        """Whether the network has several clients."""
        return len(self._engine.routes_of) > 1

    @property
    def clients(self) -> range:
        """Numbers of all clients that share the network."""
        return range(len(self.engine.routes_of))

    def traffic_of(self, client: int) -> tuple[Floats, float, int]:
        """Return the traffic of a client, like :meth:`own_traffic`, with the channels of traffic sources at the end."""
        return accounts.traffic_of(self.engine.net, self.engine.now, self.engine.own_routes(client))

    def own_traffic(self) -> tuple[Floats, float, int]:
        """Return (bytes on each channel, bytes issued, messages delivered) of this client.

        The bytes on each channel have the shape (n_channels,).
        """
        if not self.is_shared:
            return self.channel_nbytes, self.nbytes_sent, self.n_messages
        nbytes, sent, n_messages = self.traffic_of(self.client)
        return nbytes[: self.n_channels], sent, n_messages

    @property
    def n_messages(self) -> int:
        """Number of messages delivered so far, over all clients."""
        return self.engine.net.counts.n_messages

    @property
    def n_replayed(self) -> int:
        """Number of messages in `n_messages` that were replayed exactly without processing their events."""
        return self.engine.net.counts.fast_forwarded

    def busy_intervals(self) -> BusyIntervals:
        """Return the recorded busy intervals (requires ``record=True``). Open intervals end at the present time."""
        self.engine.empty_log()
        under_way = Logged(accounts.open_intervals(self.engine.net, self.engine.now), self.engine.net.repeats[:0])
        logged = BusyIntervals([*self.engine.logged, under_way], self.n_channels + self.n_sources)
        return logged.only(range(self.n_channels))  # without the links of background traffic

    def rates(self) -> tuple[list[list[int]], Floats]:
        """Return the channels of each active flow, and the rate of each active flow in bytes/s."""
        net = self.engine.net
        n = net.counts.n_active
        shift = net.counts.hop_shift
        blocks = net.flow_hops[: n << shift].reshape(n, 1 << shift).tolist()
        return [block[: block.index(st.LAST)] for block in blocks], net.flow_rate[:n].copy()

    # ------------------------------------------------------------ internals

    def _take(self) -> Completions:
        net = self.engine.net
        n = net.counts.n_out
        ids, ranks = net.out["id"][:n].copy(), net.out["rank"][:n].copy()
        if n > 1:
            order = np.lexsort((ranks, np.where(ids < 0, -1 - ids - _FIRST, ids)))
            ids, ranks = ids[order], ranks[order]
        net.counts.n_out = 0
        self.engine.n_waiting -= n
        if ids[-1] >= 0:  # collectives come last
            collectives = ids[ids >= 0]
            self.engine.free(distinct(collectives[net.instances["ranks_left"][collectives] == 0]).tolist())
        return Completions(net.reals.now, ids, ranks)


def schedule_time(
    cluster: Cluster,
    schedule: Schedule,
    nodes: Sequence[int],
    nbytes: float,
    entry_times: Sequence[float] | None = None,
) -> float:
    """Simulate one collective on an otherwise idle cluster, and return the time in s at which the last rank finishes.

    schedule     messages of the collective
    nodes        (n_ranks,) the node of each rank
    nbytes       size of the buffer on each rank, in bytes
    entry_times  (n_ranks,) time in s at which each rank enters the collective; None: all ranks enter at 0
    """
    network = Network(cluster)
    number = network.collective(schedule, nodes, nbytes)
    entries = np.zeros(len(nodes)) if entry_times is None else np.asarray(entry_times, dtype=np.float64)
    end = 0.0
    for time in distinct(entries):
        while (done := network.advance(time)) is not None:
            end = done.time
        ranks = np.flatnonzero(entries == time)
        network.join(np.full(len(ranks), number), ranks, float(time))
    while (done := network.advance()) is not None:
        end = done.time
    return end
