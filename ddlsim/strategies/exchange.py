"""Collectives among all workers, round after round: waited for at once, or in the background while they compute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import simpy

from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.collectives.find import n_segments_for
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.strategies.all_reduce import fastest
from ddlsim.strategies.setting import Setting
from ddlsim.strategies.worker import Process, Worker

__all__ = ["Exchange", "averaging", "check_exchange", "name_of", "schedules"]

T = TypeVar("T")


def check_exchange(owner: str, algorithm: str | Collective, rank_order: str | Sequence[int]) -> None:
    """Raise ConfigError unless these are an algorithm and an order as :class:`~ddlsim.AllReduce` takes them."""
    if not (isinstance(algorithm, str) or callable(algorithm)):
        raise ConfigError(f"{owner}: algorithm = {algorithm!r}: must be a name such as 'ring', or a function")
    named = isinstance(rank_order, str) and rank_order in ("given", "topology")
    if not named and (isinstance(rank_order, str) or not all(isinstance(r, int | np.integer) for r in rank_order)):
        raise ConfigError(f"{owner}: rank_order = {rank_order!r}: must be 'given', 'topology' or a list of ranks")


def name_of(algorithm: str | Collective) -> str:
    """Return an algorithm's name, for labels."""
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")


def schedules(
    setting: Setting, algorithm: str | Collective, rank_order: str | Sequence[int], kind: str = "all_reduce"
) -> Callable[[float], Schedule]:
    """Return what makes the schedule among all workers for a number of bytes; "auto" is for all-reduces only."""
    order = _order(setting, rank_order)
    hosts = setting.hosts(setting.nodes)[order].tolist()
    known: dict[float, Schedule] = {}

    def schedule(nbytes: float) -> Schedule:
        automatic = algorithm == "auto" and kind == "all_reduce"
        key = nbytes if automatic else float(n_segments_for(nbytes))
        if key not in known:
            chosen = fastest(setting, order, nbytes) if automatic else algorithm
            known[key] = reorder(build(chosen, len(order), nbytes, hosts, kind), order)
        return known[key]

    return schedule


def _order(setting: Setting, rank_order: str | Sequence[int]) -> npt.NDArray[np.int64]:
    n = len(setting.workers)
    if rank_order == "given":
        return np.arange(n)
    if rank_order == "topology":
        return setting.cluster.locality_order(setting.nodes)
    order = np.array(rank_order, dtype=np.int64)
    if not np.array_equal(np.sort(order), np.arange(n)):
        raise ConfigError(f"rank_order = {list(rank_order)}: must list each of the ranks 0..{n - 1} once")
    return order


@dataclass
class _Round(Generic[T]):
    """One collective: what each rank has brought, when the last did (s), and what they get."""

    collective: int
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
    is the name under which time is booked.
    """

    setting: Setting
    schedule: Callable[[float], Schedule]
    combine: Callable[[Sequence[Value[Array]]], T]
    what: str = "all-reduce"
    _rounds: dict[int, _Round[T]] = field(default_factory=dict)

    def start(self, worker: Worker, number: int, value: Value[Array]) -> None:
        """Enter round `number` with `value` in the background; every worker enters the rounds in the same order."""
        loop, nbytes = worker.loop, worker.workload.gradient_nbytes
        if number not in self._rounds:
            nodes = self.setting.nodes
            collective = loop.collective(self.schedule(nbytes), nodes, nbytes)
            self._rounds[number] = _Round(collective, [None] * len(nodes))
        current = self._rounds[number]
        current.brought[worker.rank] = value
        current.last_ready = loop.now
        current.arrived[worker.rank] = loop.env.process(self._travel(worker, current.collective))

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

    def _travel(self, worker: Worker, collective: int) -> Process:
        start = worker.loop.now
        yield worker.loop.join(collective, worker.rank)
        worker.recorder.background(f"{worker.name} network", self.what, start, worker.loop.now)


def averaging(
    setting: Setting, algorithm: str | Collective, rank_order: str | Sequence[int]
) -> Exchange[Value[Array]]:
    """Return the all-reduce that gives every worker the mean of what all have brought."""
    return Exchange(setting, schedules(setting, algorithm, rank_order), setting.learner.mean)
