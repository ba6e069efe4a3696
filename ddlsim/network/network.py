"""The face of the network engine: start messages and collectives, let time pass, collect completions."""

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
from ddlsim.network.changes import Fault
from ddlsim.network.engine import Engine, Interconnect
from ddlsim.network.episodes import Episodes
from ddlsim.network.pauses import NO_PAUSES, merged
from ddlsim.network.state import Floats, Ints

_FIRST = 1 << 62  # puts messages before collectives


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
    are kept for timelines. The last ``n_sources`` channels are those of sources (:mod:`ddlsim.network.sources`), which
    are no links of the cluster.
    """

    def __init__(self, interconnect: Interconnect, *, record: bool = False, n_sources: int = 0) -> None:
        self._engine = Engine(interconnect, record=record)
        self.n_sources = n_sources
        #: (n_pauses, 2) s, in which users of this object start no messages
        self.pauses = NO_PAUSES
        self._join(0)

    def _join(self, party: int) -> None:
        self.party = party
        self._engine.routes_of.append([])
        self._engine.pairs_of.append([])
        self._n_sent = 0
        #: messages get every so manieth number; those between are for compiled callers
        self.stride = 1

    @property
    def engine(self) -> Engine:
        """The arrays, in which all that has happened by now is simulated."""
        if self._engine.untold is not None:
            self._engine.untold()
        return self._engine

    def shared(self) -> Network:
        """Return another view of the same network, for a party with messages and collectives of its own. Call it for
        the first time before anything has been started.

        The party that advances time gets its own completions. While completions of others wait, time stands still until
        they have collected them: :meth:`waiting_parties`, :meth:`collect`.
        """
        self.engine.share()
        other = object.__new__(Network)
        other._engine, other.n_sources, other.pauses = self.engine, self.n_sources, self.pauses
        other._join(len(self.engine.routes_of))
        return other

    def will_change(
        self,
        links: Iterable[Fault],
        pauses: Iterable[tuple[float, float, int]] = (),
        avoided: Iterable[tuple[float, float, frozenset[int]]] = (),
    ) -> None:
        """Let links and nodes change at known times, not before now; in addition to what was said before.

        links    (s, s until which it lasts, channel, factor of its capacity meanwhile; 0: it is down); of several at
                 once on a channel, by any party, the factors multiply
        pauses   (s, s until which it lasts, node that sends and receives nothing meanwhile; what flows already goes on)
        avoided  (s, s until which it lasts, links for which other ways are taken meanwhile, where there are any); these
                 must be known before anything is started
        """
        self.engine.change(links, pauses, avoided)

    def will_pause(self, windows: Iterable[tuple[float, float]]) -> None:
        """Start no messages of this party in `windows` (s, s), in addition to the windows of earlier calls."""
        self.pauses = merged([*map(tuple, self.pauses.tolist()), *windows])

    def narrow(self, channels: Ints, times: Floats) -> None:
        """Let channels have 1 / `times` of their capacity, (n,) each: each message stands for so many."""
        net = self.engine.net
        net.channels["capacity"][channels] /= times
        net.reals[st.NARROWEST] = np.min(net.channels["capacity"], initial=np.inf)
        for name in ("free", "loaded", "burst", "tokens") if net.counts[st.SHAPED] else ():
            net.buckets[name][channels] /= times

    @property
    def changes(self) -> bool:
        """Whether links or nodes change at known times."""
        return len(self._engine.net.changes) > 0

    # ------------------------------------------------------------ starting things

    def collective(self, schedule: Schedule, nodes: Sequence[int] | Ints, nbytes: float | Sequence[Floats]) -> int:
        """Prepare one execution of `schedule`, rank r at ``nodes[r]``; return its id (>= 0).

        nbytes  bytes of the buffer per rank; or the size of every message, as one table of shape (repeat, m)
                per round (of all lanes, one after the other).
        Ids are used again after all ranks have ended. Raises ConfigError for sizes that do not fit.
        """
        return self._engine.prepare(schedule, np.asarray(nodes, dtype=np.int64), nbytes, self.party)

    def join(self, ids: Sequence[int] | Ints, ranks: Sequence[int] | Ints, now: float) -> None:
        """Let rank ``ranks[i]`` enter collective ``ids[i]`` at time `now`, for all i in order."""
        self.engine.n_entries += 1
        instances, joining = np.asarray(ids, dtype=np.int64), np.asarray(ranks, dtype=np.int64)
        self.engine.now = now
        kernel.join(self.engine.table, instances, joining, float(now))

    def send(
        self, src: Sequence[int] | Ints, dst: Sequence[int] | Ints, nbytes: Floats, now: float, *,
        overhead: bool | None = None,
    ) -> Ints:  # fmt: skip
        """Send messages between nodes at time `now`; return their ids (negative).

        src, dst, nbytes  (n,): nodes, and bytes of each message
        overhead          for a collective of known time, which includes their latencies: whether the bytes are booked
                          as overhead instead of as this party's
        """
        party, latency = self.engine.overhead if overhead else self.party, overhead is None
        n, handle = len(src), self.first_handle + (self._n_sent + 1) * self.stride - 1
        self._n_sent += n
        self.engine.n_entries += 1
        self.engine.now = now
        self.engine.expect(n)
        self.engine.ensure_slots(extra=n)
        handles = [handle + i * self.stride for i in range(n)]
        sources, targets = [int(node) for node in src], [int(node) for node in dst]
        routes = self.engine.pair_routes(sources, targets, party, latency)
        table, sizes = self.engine.table, nbytes.tolist()
        for message in zip(handles, sources, targets, routes, sizes, strict=True):
            kernel.send_one(table, *message, float(now))
        return -1 - np.array(handles, dtype=np.int64)

    # ------------------------------------------------------------ letting time pass

    def advance(self, until: float = np.inf) -> Completions | None:
        """Let time pass up to `until`; return the first completions, or None if there are none by then, or those of
        others come first."""
        self.engine.net.counts[st.PARTY] = self.party
        while (status := kernel.advance(self.engine.table, float(until))) == st.FULL:
            self.engine.make_room()
        reached = until if status == st.IDLE and until < np.inf else float(self.engine.net.reals[st.NOW])
        self.engine.now = max(self.engine.now, reached)
        return self._take() if status == st.VISIBLE else None

    # ------------------------------------------------------------ for compiled callers (ddlsim.network.executor)

    @property
    def table(self) -> Ints:
        """The addresses of the kernel's arrays, valid until something is prepared, sent or made longer, or others
        let time pass."""
        self._engine.net.counts[st.PARTY] = self.party
        return self._engine.table

    @property
    def first_handle(self) -> int:
        """What the handles of this party's messages begin with."""
        return self.party << st.PARTY_SHIFT

    def routes(self, src: Sequence[int], dst: Sequence[int]) -> Ints:
        """Return the numbers of the routes between nodes, for messages that others send."""
        return np.array(self._engine.pair_routes(list(src), list(dst), self.party), dtype=np.int64)

    @property
    def pairs(self) -> Ints:
        """The pairs of nodes between which this party has routes, each once, (n, 2)."""
        return np.unique(np.concatenate([np.zeros((0, 2), dtype=np.int64), *self._engine.pairs_of[self.party]]), axis=0)

    def reserve(self, n: int) -> None:
        """Make room for `n` messages on their way at once, which others send."""
        self._engine.reserved += n
        self._engine.expect(0)
        self._engine.ensure_slots()

    @property
    def n_sent(self) -> int:
        """How many single messages have been sent."""
        return self._n_sent

    def has_run(self, now: float, n_taken: int, freed: Sequence[int], n_sent: int | None = None) -> None:
        """Note that others have let the kernel run up to `now`, have taken completions and ended instances, and have
        sent messages, `n_sent` in all."""
        self._engine.now = max(self._engine.now, now)
        if n_sent is not None:
            self._engine.n_waiting += n_sent - self._n_sent
            self._n_sent = n_sent
        self._engine.n_waiting -= n_taken
        self._engine.free(freed)

    def episodes(self) -> Episodes:
        """Return what notes and tells episodes, for one who uses the network alone."""
        return Episodes(self.engine)

    @property
    def n_instances(self) -> int:
        """How many instances of collectives there are."""
        return len(self._engine.instance_program)

    def completed(self, n: int) -> tuple[Ints, Ints]:
        """Return the ids and ranks of the first `n` completions in the output buffer."""
        return self._engine.net.out["id"][:n].copy(), self._engine.net.out["rank"][:n].copy()

    def make_room(self) -> None:
        """Make the arrays longer that the kernel has said are full."""
        self._engine.make_room()

    # ------------------------------------------------------------ for those who share it

    @property
    def waiting_parties(self) -> list[int]:
        """The parties, in order, whose completions wait, at the instant that the network has got to."""
        n = int(self._engine.net.counts[st.N_FOREIGN])
        return sorted(set(self._parties(self.engine.net.foreign["id"][:n]).tolist())) if n else []

    @property
    def others_wait(self) -> bool:
        """Whether completions of other parties wait."""
        return bool(self._engine.net.counts[st.N_FOREIGN])

    def is_under_way(self, party: int) -> bool:
        """Whether a party has messages on their way."""
        net = self.engine.net
        live = net.slots["state"] != st.FREE
        own = self.engine.own_routes(party) | self.engine.own_routes(self.engine.overhead)
        return bool(own[net.slots["route"][live]].any())

    def collect(self) -> None:
        """Take the completions that wait for this party: :meth:`advance` returns them."""
        net = self.engine.net
        n = int(net.counts[st.N_FOREIGN])
        waiting = net.foreign[:n].copy()
        own = self._parties(waiting["id"]) == self.party
        n_own = int(np.count_nonzero(own))
        net.out[:n_own], net.foreign[: n - n_own] = waiting[own], waiting[~own]
        net.counts[st.N_OUT], net.counts[st.N_FOREIGN] = n_own, n - n_own

    def drop(self) -> None:
        """Discard the completions that wait for this party."""
        self.collect()
        self._take()

    def _parties(self, ids: Ints) -> Ints:
        """Return whose messages and collectives these are, (n,)."""
        parties: Ints = (-1 - ids) >> st.PARTY_SHIFT
        collectives = ids >= 0
        parties[collectives] = self.engine.net.instances["party"][ids[collectives]]
        return parties

    # ------------------------------------------------------------ reading

    @property
    def pending(self) -> bool:
        """Whether anything is still on its way."""
        counts = self._engine.net.counts
        timers = counts[st.FIFO_TAIL] - counts[st.FIFO_HEAD] + counts[st.N_TIMER_HEAP]
        return bool(counts[st.N_ACTIVE] + counts[st.N_QUEUED] + timers + counts[st.N_OUT] + counts[st.N_FOREIGN])

    @property
    def now(self) -> float:
        """The time (s) up to which the network has run, which is that of all that can be read."""
        return self._engine.now

    @property
    def channel_nbytes(self) -> Floats:
        """Bytes that each channel has carried, those of messages under way included, (n_channels,)."""
        return accounts.channel_nbytes(self.engine.net, self.engine.now)[: self.n_channels]

    @property
    def channel_overhead(self) -> Floats:
        """Bytes of `channel_nbytes` that are overhead, (n_channels,)."""
        return self.traffic_of(self.engine.overhead)[0][: self.n_channels]

    @property
    def channel_busy(self) -> Floats:
        """Seconds during which each channel carried something, (n_channels,)."""
        return accounts.channel_busy(self.engine.net, self.engine.now)[: self.n_channels]

    @property
    def nbytes_sent(self) -> float:
        """Bytes of the messages that this party's senders have issued so far."""
        if not self.is_shared:
            return accounts.issued(self.engine.net)
        return accounts.issued(self.engine.net, self.engine.own_routes(self.party))

    @property
    def n_channels(self) -> int:
        """Number of channels of the cluster's links."""
        return int(self._engine.net.counts[st.N_LINKED]) - self.n_sources

    @property
    def recording(self) -> bool:
        """Whether busy intervals are kept."""
        return bool(self._engine.net.counts[st.LOG_ON])

    @property
    def n_live(self) -> int:
        """Collectives of this party that have been prepared and have not ended."""
        if not self.is_shared:
            return int(self.engine.net.counts[st.N_LIVE])
        instances = self.engine.net.instances[: self.n_instances]
        return int(((instances["party"] == self.party) & (instances["ranks_left"] > 0)).sum())

    def accounts(self) -> Accounts:
        """Return what has been issued, delivered and carried, counted more than once so that it can be compared."""
        return accounts.accounts(self.engine.net, self.engine.now, self.engine.capacity[0])

    @property
    def is_shared(self) -> bool:
        """Whether there are other parties."""
        return len(self._engine.routes_of) > 1

    @property
    def parties(self) -> range:
        """The numbers of those who share it."""
        return range(len(self.engine.routes_of))

    def traffic_of(self, party: int) -> tuple[Floats, float, int]:
        """Return what a party has put on the network, as :meth:`own_traffic`, and behind that on sources."""
        return accounts.traffic_of(self.engine.net, self.engine.now, self.engine.own_routes(party))

    def own_traffic(self) -> tuple[Floats, float, int]:
        """Return what this party has put on the network: bytes that each channel has carried, (n_channels,), bytes
        issued, and the number of messages delivered."""
        if not self.is_shared:
            return self.channel_nbytes, self.nbytes_sent, self.n_messages
        nbytes, sent, n_messages = self.traffic_of(self.party)
        return nbytes[: self.n_channels], sent, n_messages

    @property
    def n_messages(self) -> int:
        """Messages delivered so far, of all parties."""
        return int(self.engine.net.counts[st.N_MESSAGES])

    @property
    def n_replayed(self) -> int:
        """Messages of `n_messages` that were replayed exactly without handling their events."""
        return int(self.engine.net.counts[st.FAST_FORWARDED])

    def busy_intervals(self) -> BusyIntervals:
        """The recorded busy intervals (``record=True``); open ones end now."""
        self.engine.empty_log()
        under_way = Logged(accounts.open_intervals(self.engine.net, self.engine.now), self.engine.net.repeats[:0])
        return BusyIntervals([*self.engine.logged, under_way], self.n_channels + self.n_sources)

    def rates(self) -> tuple[list[list[int]], Floats]:
        """The flows now under way: (channels of each, rate of each in bytes/s)."""
        net = self.engine.net
        n = int(net.counts[st.N_ACTIVE])
        shift = int(net.counts[st.HOP_SHIFT])
        blocks = net.flow_hops[: n << shift].reshape(n, 1 << shift).tolist()
        return [block[: block.index(st.LAST)] for block in blocks], net.flow_rate[:n].copy()

    # ------------------------------------------------------------ inside

    def _take(self) -> Completions:
        net = self.engine.net
        n = int(net.counts[st.N_OUT])
        ids, ranks = net.out["id"][:n].copy(), net.out["rank"][:n].copy()
        if n > 1:
            order = np.lexsort((ranks, np.where(ids < 0, -1 - ids - _FIRST, ids)))
            ids, ranks = ids[order], ranks[order]
        net.counts[st.N_OUT] = 0
        self.engine.n_waiting -= n
        if ids[-1] >= 0:  # collectives come last
            collectives = ids[ids >= 0]
            self.engine.free(np.unique(collectives[net.instances["ranks_left"][collectives] == 0]).tolist())
        return Completions(float(net.reals[st.NOW]), ids, ranks)


def schedule_time(
    cluster: Cluster,
    schedule: Schedule,
    nodes: Sequence[int],
    nbytes: float,
    entry_times: Sequence[float] | None = None,
) -> float:
    """Return when the last rank has ended a collective over `nbytes` on the otherwise idle cluster, in s.

    ``nodes`` (n_ranks,) is where the ranks are; all enter at 0, or at ``entry_times`` (n_ranks,) s.
    """
    network = Network(cluster)
    number = network.collective(schedule, nodes, nbytes)
    entries = np.zeros(len(nodes)) if entry_times is None else np.asarray(entry_times, dtype=np.float64)
    end = 0.0
    for time in np.unique(entries):
        while (done := network.advance(time)) is not None:
            end = done.time
        ranks = np.flatnonzero(entries == time)
        network.join(np.full(len(ranks), number), ranks, float(time))
    while (done := network.advance()) is not None:
        end = done.time
    return end
