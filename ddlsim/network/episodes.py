"""Episodes: collectives that enter an idle network together are simulated once and then replayed.

An *episode* begins when all ranks of some collectives enter at one instant while nothing is in flight. What follows
depends on nothing else, as long as nothing else enters. The first time, the kernel simulates it; when the network is
idle again, the time that each rank took and the traffic of each channel are recorded. When the same collectives enter
together again, their ranks end after the same times, and the bytes and busy seconds are booked at the end of the
episode. If anything enters before that, or the traffic of channels is read, the kernel simulates the episode from its
start to the present instant, and continues from there. An episode that was interrupted once is not replayed again.

The kernel replays rounds *within* a collective (:mod:`ddlsim.network.rounds`). That does not help between collectives,
nor if two concurrent ones have rounds that never end together, as when FSDP scatters gradients while it gathers
weights. Replayed ends are equal up to the rounding of the clock, not to the last bit: they add an offset to the
beginning instead of the durations of all rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.network import kernel
from ddlsim.network import state as st
from ddlsim.network.busy import Logged
from ddlsim.network.engine import Engine
from ddlsim.network.state import Floats, Ints
from ddlsim.network.symmetry import Books, course

#: messages of a collective from which recording pays: smaller ones are simulated faster than Python can replay them
LARGE = 1 << 14
#: places of compensated sums in ``Net.reals``
_SUMS = [st.Reals.places[name] for name in ("issued", "issued_hops", "delivered")]
_KEPT = 64  # maximum number of recorded episodes
#: messages of an episode from which looking for ranks that are alike pays, and number of messages per row of a program
FOLDED, REPEATED = 1 << 20, 16

#: (program, bytes) of each collective, in order of entry
_Key = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Episode:
    """Course of collectives that enter an idle network, until it is idle again.

    ends        per collective: when each rank with tasks ended, s, (n_ranks,)
    nbytes      (n_channels,) bytes carried by each channel; busy: busy s of each channel
    sums        increases of the kernel's sums, in bytes
    n_messages  messages delivered
    start       when it was simulated, s
    log         parts of the busy log recorded then
    """

    ends: tuple[Floats, ...]
    nbytes: Floats
    busy: Floats
    sums: Floats
    n_messages: int
    start: float
    log: list[Logged]


class Ends(NamedTuple):
    """Ranks that end at one instant, `time` (s): rank ``ranks[i]`` of collective number ``which[i]`` of an episode."""

    time: float
    which: Ints
    ranks: Ints


class _Entry(NamedTuple):
    """Collectives that entered at `start` (s): their ids, and the arguments of :func:`kernel.join`."""

    start: float
    key: _Key
    ids: list[int]
    instances: Ints
    ranks: Ints


class Episodes:
    """The episodes of a network with a single client; one of them can be recorded or replayed at a time. The last
    `bystanders` ranks of each collective have no tasks, so nothing waits for their ends."""

    def __init__(self, engine: Engine, bystanders: int) -> None:
        self._engine, self._bystanders = engine, bystanders
        self._episodes: dict[_Key, Episode | None] = {}  # None: it was interrupted
        self._noted: tuple[_Entry, Books, int] | None = None  # being recorded, with books and entries before
        self._told: _Entry | None = None
        self._n_told = 0  # ends of it that have been replayed
        self._after: Books | None = None  # the books at its end, if it has been simulated in part
        self._ends: list[Ends] = []  # those that remain, the next one last

    def is_large(self, instance: int) -> bool:
        """Return whether recording a collective pays."""
        return self._engine.shape(instance).n_deliveries >= LARGE

    # ------------------------------------------------------------ recording

    def note(self, ends: Callable[[int], Floats], n_entering: int) -> None:
        """Record the simulated episode if it is over; ``ends(i)`` are the ends (s) of the ranks of its collective
        number i, and `n_entering` collectives are prepared and enter next."""
        if self._noted is None or not self._is_idle(n_entering):
            return
        entry, before, n_entries = self._noted
        self._noted = None
        times, net = [ends(i) for i in range(len(entry.ids))], self._engine.net
        alone = self._engine.n_entries == n_entries and not len(net.changes)
        # NaN: not ended; a bystander may end after all ranks with tasks
        if not alone or np.concatenate(times).max() != net.reals.now:
            return
        self._record(entry, times, before, self._books())

    def _record(self, entry: _Entry, times: list[Floats], before: Books, after: Books) -> Episode:
        sums, nbytes = after.sums - before.sums, after.nbytes - before.nbytes
        episode = self._episodes[entry.key] = Episode(
            tuple(times),
            nbytes.sum(axis=0),
            after.busy - before.busy,
            sums.sum(axis=1),
            after.n_messages - before.n_messages,
            entry.start,
            self._engine.logged[before.n_parts :],
        )
        return episode

    def enter(self, ids: list[int], instances: Ints, ranks: Ints, now: float) -> bool:
        """Let all ranks enter collectives now (arguments as for `kernel.join`); return whether :meth:`take` replays the
        episode instead of the kernel simulating it."""
        self.interrupt()
        rows = self._engine.net.instances[ids]
        key = tuple(zip(rows["program"].tolist(), rows["nbytes"].tolist(), strict=True))
        entry = _Entry(now, key, ids, instances, ranks)
        alone = self._is_idle(len(ids)) and self._is_plain()
        episode = self._episodes.get(key)
        if alone and episode is not None:
            self._tell(entry, episode)
            return True
        if alone and key not in self._episodes and len(self._episodes) < _KEPT:
            before = self._books()
            shapes = [self._engine.shape(number) for number in ids]
            n_messages, n_rows = sum(shape.n_deliveries for shape in shapes), sum(shape.n_messages for shape in shapes)
            pays = n_messages >= max(FOLDED, REPEATED * n_rows) and not self._bystanders
            folded = course(self._engine, ids, before, now) if pays else None
            if folded is not None:
                self._tell(entry, self._record(entry, folded[0], before, folded[1]))
                self._after = folded[1]
                return True
            self._noted = entry, before, self._engine.n_entries
        self._join(entry)
        return False

    def _is_idle(self, n_entering: int) -> bool:
        """Return whether nothing is in progress besides collectives that no rank has entered."""
        counts = self._engine.net.counts
        timers = counts.fifo_tail - counts.fifo_head + counts.n_timer_heap
        busy = counts.n_active + counts.n_queued + timers + counts.n_out + counts.live_single
        return bool(busy == 0 and counts.n_live == n_entering)

    def _is_plain(self) -> bool:
        """Return whether the course of collectives is independent of earlier traffic."""
        net = self._engine.net
        memory = net.counts.shared or net.counts.transported or net.counts.n_stopped or len(net.changes)
        return bool(net.counts.replay) and not memory and not net.buckets["burst"].any()

    def _books(self) -> Books:
        engine = self._engine
        if engine.net.counts.log_used:
            engine.empty_log()
        net = engine.net
        return Books(
            np.array([net.channels["nbytes"], net.channels["nbytes_low"]]),
            net.channels["busy"].copy(),
            np.array([net.reals.array[place : place + 2] for place in _SUMS]),
            net.counts.n_messages,
            len(engine.logged),
        )

    # ------------------------------------------------------------ replaying

    @property
    def next(self) -> float:
        """Time of the next end in the replayed episode, s; infinity if there is none."""
        return self._ends[-1].time if self._ends else np.inf

    def _tell(self, entry: _Entry, episode: Episode) -> None:
        self._told, self._n_told, self._after = entry, 0, None
        times = np.concatenate(episode.ends)
        if entry.start != episode.start:
            times = entry.start + (times - episode.start)
        which = np.repeat(np.arange(len(entry.ids)), [len(rank_ends) for rank_ends in episode.ends])
        ranks = np.concatenate([np.arange(len(rank_ends)) for rank_ends in episode.ends])
        order = np.lexsort((ranks, np.array(entry.ids)[which], times))  # in the order of the kernel's completions
        first = np.flatnonzero(np.diff(times[order], prepend=-np.inf))
        parts = np.split(order, first[1:])
        self._ends = [Ends(float(times[part[0]]), which[part], ranks[part]) for part in reversed(parts)]
        self._engine.untold = self.simulate

    def take(self) -> tuple[list[int], Ends, bool]:
        """Return the ids of the collectives, the ranks that end next, and whether the episode is then over."""
        assert self._told is not None
        entry, ends = self._told, self._ends.pop()
        self._n_told += len(ends.ranks)
        if not self._ends:
            self._close()
        return entry.ids, ends, not self._ends

    def _close(self) -> None:
        """Book the replayed episode, and end its collectives."""
        assert self._told is not None
        entry, engine = self._told, self._engine
        net, episode = engine.net, self._episodes[entry.key]
        assert episode is not None
        self._told = engine.untold = None
        channels, reals, after = net.channels, net.reals.array, self._after
        if after is not None:
            channels["nbytes"], channels["nbytes_low"], channels["busy"] = *after.nbytes, after.busy
            for place, words in zip(_SUMS, after.sums, strict=True):
                reals[place : place + 2] = words
        else:
            _add(channels["nbytes"], channels["nbytes_low"], episode.nbytes)
            channels["busy"] += episode.busy
            for place, nbytes in zip(_SUMS, episode.sums, strict=True):
                _add(reals[place : place + 1], reals[place + 1 : place + 2], nbytes)
        net.counts.n_messages += episode.n_messages
        net.counts.fast_forwarded += episode.n_messages
        if episode.log:
            engine.empty_log()
            engine.logged += [_later(part, entry.start - episode.start) for part in episode.log]
        engine.end(entry.ids)

    # ------------------------------------------------------------ simulating instead of replaying

    def interrupt(self) -> None:
        """React to something that enters: simulate the replayed episode, and neither replay it again nor record the
        current one."""
        self._noted = None
        if self._told is not None:
            self._episodes[self._told.key] = None
            self.simulate()

    def simulate(self) -> None:
        """Simulate the replayed episode up to the present."""
        assert self._told is not None
        entry, engine = self._told, self._engine
        self._told = engine.untold = None
        self._ends = []
        self._join(entry)
        while self._n_told > 0:
            self._advance(np.inf)
            n, engine.net.counts.n_out = engine.net.counts.n_out, 0
            out = engine.net.out[:n]
            n_ranks = engine.net.programs["n_ranks"][engine.net.instances["program"][out["id"]]]
            n_told = int((out["rank"] < n_ranks - self._bystanders).sum())
            self._n_told -= n_told
            engine.n_waiting -= n - n_told  # bystanders
        engine.free(number for number in entry.ids if engine.net.instances["ranks_left"][number] == 0)
        self._advance(engine.now)

    def _join(self, entry: _Entry) -> None:
        kernel.join(self._engine.table, entry.instances, entry.ranks, float(entry.start))

    def _advance(self, until: float) -> None:
        while kernel.advance(self._engine.table, float(until)) == st.FULL:
            self._engine.make_room()


def _add(high: Floats, low: Floats, term: Floats) -> None:
    """Add to compensated sums (:mod:`ddlsim.network.flows`), in place."""
    total = high + term
    part = total - high
    low += (high - (total - part)) + (term - part)
    high[...] = total


def _later(log: Logged, seconds: float) -> Logged:
    rows, repeats = log.rows.copy(), log.repeats.copy()
    rows["start"] += seconds
    rows["end"] += seconds
    repeats["begin"] += seconds
    return Logged(rows, repeats)
