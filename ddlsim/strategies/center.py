"""Servers that act together: one model, updated from whole gradients.

Where an update waits for several gradients, or a worker for others, the shards must agree on what has arrived:
a gradient counts when all servers have their part of it, and an update happens at all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import simpy

from ddlsim.learning import ABSENT, Array, Value
from ddlsim.runtime.servers import Served, check_layers
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.shards import Shards, communicate, wait
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.staleness import Scaling, scaled

__all__ = ["Batch", "Center", "Gradient"]


class Gradient(NamedTuple):
    """A gradient of `n_samples` that has arrived, computed by `rank` with parameters `staleness` updates old."""

    rank: int
    value: Value[Array]
    staleness: int
    n_samples: int


@dataclass
class Batch:
    """Gradients of one update; when it is ``applied``, ``params`` are those after it, of ``version``."""

    applied: simpy.Event
    gradients: list[Gradient] = field(default_factory=list)
    params: Value[Array] = ABSENT
    version: int = 0


#: a worker's time until its gradient is part of a batch, or dropped
Pushing = Generator[simpy.Event, object, Batch | None]


@dataclass
class Center:
    """The model at the servers: w <- w - eta * (1/c) sum_l f(tau_l) g_l for every ``count`` = c gradients.

    ``scaling`` is f. With ``drop_late``, gradients that are older than the latest update are thrown away.
    ``move`` makes the next model of that mean, the run's optimizer where there is none. ``version`` counts the updates.
    """

    shards: Shards
    count: int = 1
    scaling: Scaling | None = None
    drop_late: bool = False
    move: Callable[[Value[Array]], Value[Array]] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        setting = self.shards.setting
        self.params = setting.learner.initial
        self._state = setting.learner.optimizer_state(self.params)
        self._batch = Batch(setting.loop.env.event())
        setting.model = lambda: self.params

    @classmethod
    def of(
        cls, strategy: Served, setting: Setting, count: int = 1, scaling: Scaling | None = None, *,
        drop_late: bool = False,
    ) -> Center:  # fmt: skip
        """Place the strategy's servers. Raises ConfigError if there are not enough machines for them, or if the
        optimizer cannot work on parts of the parameters."""
        check_layers(type(strategy).__name__, setting.learner, strategy.servers)
        return cls(Shards.of(strategy, setting), count, scaling, drop_late)

    def push(self, worker: Worker, gradient: Value[Array], version: int, n_samples: int | None = None) -> Pushing:
        """Send a gradient (of `n_samples`, a step's if nothing is said) computed with the parameters of `version`,
        queue, and make the update if it is the last one that is needed. Return the batch that it is part of, None if
        it was dropped."""
        parcel = self.shards.wires.gradient(worker, gradient)
        yield from self.shards.push(worker, parcel)
        with self.shards.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            if (seconds := self.shards.wires.server_seconds()) > 0.0:
                yield from communicate(worker, worker.loop.env.timeout(seconds), "decode")
            staleness = self.version - version
            if self.drop_late and staleness > 0:
                return None
            batch = self._batch
            counts = worker.samples_per_step if n_samples is None else n_samples
            batch.gradients.append(Gradient(worker.rank, parcel.value, staleness, counts))
            if len(batch.gradients) == self.count:
                yield from self._apply(worker, batch)
        return batch

    def pull(self, worker: Worker, params: Value[Array]) -> Process:
        """Send parameters to the worker, which are what it works with then."""
        parcel = self.shards.wires.answer(worker, params)
        worker.params = parcel.value
        yield from self.shards.pull(worker, parcel)

    def _apply(self, worker: Worker, batch: Batch) -> Process:
        """Make the update of a complete batch, for which the worker waits."""
        begin = worker.loop.now
        if self.shards.apply_time > 0.0:
            yield from communicate(worker, worker.loop.env.timeout(self.shards.apply_time), "update")
            self.shards.show_update(begin)
        self._batch = Batch(worker.loop.env.event())
        if not self.drop_late:
            worker.recorder.staleness.extend(gradient.staleness for gradient in batch.gradients)
        self.update(batch.gradients)
        batch.params, batch.version = self.params, self.version
        batch.applied.succeed()

    def update(self, gradients: Sequence[Gradient]) -> None:
        """Make an update now. The sum is in the order of the ranks, whoever came first."""
        setting = self.shards.setting
        learner, stop = setting.learner, setting.stop
        in_order = sorted(gradients, key=lambda g: g.rank)
        mean = learner.mean([scaled(g.value, self.scaling, g.staleness) for g in in_order])
        if self.move is not None:
            self.params = self.move(mean)
        else:
            self.params, self._state = learner.update(self.params, mean, self._state, learner.rate(stop.n_samples))
        self.version += 1
        stop.updated(sum(g.n_samples for g in gradients))
