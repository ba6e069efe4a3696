"""Collectives among all workers, round after round: waited for at once, or in the background while they compute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import simpy

from ddlsim.collectives import Collective, Schedule
from ddlsim.learning import Array, Value
from ddlsim.runtime.algorithms import schedules
from ddlsim.runtime.costs import Stream
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process, Worker

__all__ = ["Exchange", "averaging"]

T = TypeVar("T")


@dataclass
class _Round(Generic[T]):
    """One collective, None where its time is known: what each rank has brought, when the last did (s), the results."""

    collective: int | None
    brought: list[Value[Array] | None]
    arrived: dict[int, simpy.Event] = field(default_factory=dict)
    last_ready: float = 0.0
    n_done: int = 0
    results: list[T] = field(default_factory=list)


@dataclass
class Exchange(Generic[T]):
    """A collective over a vector of the parameters' size that all workers take part in, round after round.

    Everything that the workers have brought to a round, in rank order, becomes one result by ``combine``, once for
    all of them. No worker has a result before all have brought something: the schedules see to that. ``what``
    is the name under which time is booked. On a ``stream`` the time of the collectives is known.
    """

    setting: Setting
    schedule: Callable[[float], Schedule]
    combine: Callable[[Sequence[Value[Array]]], T]
    what: str = "all-reduce"
    stream: Stream | None = None
    _rounds: dict[int, _Round[T]] = field(default_factory=dict)

    def start(self, worker: Worker, number: int, value: Value[Array]) -> None:
        """Enter round `number` with `value` in the background; every worker enters the rounds in the same order."""
        loop, nbytes = worker.loop, worker.workload.gradient_nbytes
        if number not in self._rounds:
            nodes = self.setting.nodes
            collective = None if self.stream is not None else loop.collective(self.schedule(nbytes), nodes, nbytes)
            self._rounds[number] = _Round(collective, [None] * len(nodes))
        current = self._rounds[number]
        current.brought[worker.rank] = value
        current.last_ready = loop.now
        current.arrived[worker.rank] = loop.env.process(self._travel(worker, number, current.collective))

    def finish(self, worker: Worker, number: int) -> Generator[simpy.Event, object, T]:
        """Wait for the end of a round, if it has not ended yet for this worker, and return its result.

        The wait is booked as waiting until the last worker had entered, as communication from then on.
        """
        current, start = self._rounds[number], worker.loop.now
        if not current.arrived[worker.rank].processed:
            yield from worker.block(current.arrived[worker.rank], f"the {self.what} of step {number}")
            worker.book(start, current.last_ready, self.what)
        if not current.results:
            brought = [value for value in current.brought if value is not None]
            assert len(brought) == len(current.brought), "a collective ended before all ranks had entered it"
            current.results.append(self.combine(brought))
        current.n_done += 1
        if current.n_done == len(current.brought):
            del self._rounds[number]
        return current.results[0]

    def exchange(self, worker: Worker, number: int, value: Value[Array]) -> Generator[simpy.Event, object, T]:
        """Enter a round and wait for its end."""
        self.start(worker, number, value)
        return (yield from self.finish(worker, number))

    def _travel(self, worker: Worker, number: int, collective: int | None) -> Process:
        start = worker.loop.now
        if collective is not None:
            yield worker.loop.join(collective, worker.rank)
        elif self.stream is not None:
            yield self.stream.join((number, 0), 0, worker.workload.gradient_nbytes, worker.rank)
        worker.recorder.background(f"{worker.name} network", self.what, start, worker.loop.now)


def averaging(
    setting: Setting, algorithm: str | Collective, rank_order: str | Sequence[int]
) -> Exchange[Value[Array]]:
    """Return the all-reduce that gives every worker the mean of what all have brought."""
    return Exchange(setting, schedules(setting, algorithm, rank_order), setting.learner.mean)
