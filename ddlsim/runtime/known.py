"""Collectives of known time on a network that others share, or that faults change.

A collective of known time takes no network time by itself (:meth:`ddlsim.runtime.loop.Loop.known`). Where something may
contend with it, its bytes are sent as messages along the same links, phase by phase. It ends later than its known time
by as much as these messages take longer than on an idle network. A library that gets less out of a link than its
bandwidth holds the link for the rest of its time, too: that is sent behind the bytes, and booked as overhead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simpy

from ddlsim.cluster import Cluster
from ddlsim.network import Network
from ddlsim.runtime.loop import Loop, Traffic

Process = Generator[simpy.Event, object, None]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages from `source` to `target` (nodes) of `nbytes`, each (n,), and the `overhead` that follows, a share of
    their bytes."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.float64]
    overhead: float

    def sent(self, loop: Loop) -> Process:
        """Send them, then the overhead."""
        for share, overhead in ((1.0, False), (self.overhead, True)):
            rows = zip(self.source.tolist(), self.target.tolist(), (share * self.nbytes).tolist(), strict=True)
            if sends := [loop.send(*row, overhead=overhead) for row in rows if row[2] > 0.0]:
                yield loop.env.all_of(sends)


@dataclass(frozen=True, eq=False)
class Known:
    """Collectives whose time is known: `seconds`, what they put on the channels, and the messages of each phase."""

    cluster: Cluster
    seconds: float
    traffic: Traffic
    phases: tuple[Messages, ...] = ()

    @classmethod
    def none(cls, cluster: Cluster) -> Known:
        """Return what takes no time."""
        return cls(cluster, 0.0, Traffic(np.zeros(cluster.n_channels), np.zeros(cluster.n_channels), 0.0, 0))

    def then(self, other: Known) -> Known:
        """Return this and another after it."""
        traffic, phases = self.traffic.plus(other.traffic, 1.0), (*self.phases, *other.phases)
        return Known(self.cluster, self.seconds + other.seconds, traffic, phases)

    @functools.cached_property
    def idle_seconds(self) -> float:
        """How long the messages take on an idle network, s: sent twice, the second time, when buckets are empty."""
        loop = Loop(Network(self.cluster).shared())
        loop.run(loop.env.process(self._sent(loop)))
        first = loop.now
        loop.run(loop.env.process(self._sent(loop)))
        return loop.now - first

    def _sent(self, loop: Loop) -> Process:
        for messages in self.phases:
            yield from messages.sent(loop)

    def run(self, loop: Loop, turns: Sequence[Hashable], ended: Callable[[float], None]) -> None:
        """Run now, or when those before it have left their `turns`; `ended` is called with its end (s)."""
        before = {id(event): event for turn in turns if (event := loop.turns.get(turn)) is not None}
        over = loop.env.event()
        loop.turns.update(dict.fromkeys(turns, over))
        loop.env.process(self._run(loop, list(before.values()), over, ended))

    def _run(
        self, loop: Loop, before: list[simpy.Event], over: simpy.Event, ended: Callable[[float], None]
    ) -> Process:
        if waiting := [event for event in before if not event.processed]:
            yield loop.env.all_of(waiting)
        start = loop.now
        yield from self._sent(loop)
        loop.n_more_messages += self.traffic.n_messages - sum(len(messages.nbytes) for messages in self.phases)
        late = loop.now - start - self.idle_seconds
        if late <= 1e-9 * self.seconds + 1e-14 * loop.now:  # rounding
            late = 0.0
        end = max(start + (self.seconds + late), loop.now)
        loop.trigger_at(over, end)
        ended(end)
