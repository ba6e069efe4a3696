"""Elastic averaging SGD: workers with parameters of their own, tied to a center by springs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import simpy

from ddlsim.arguments import Count, checked, number
from ddlsim.learning import ABSENT, Array, Value
from ddlsim.runtime.replica import Replica, start_replicas
from ddlsim.runtime.servers import ApplyTime, Placement, note_lock_step
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.shards import Shards, communicate, wait
from ddlsim.runtime.worker import Computation, Process, Worker

__all__ = ["ElasticAveraging"]


@dataclass
class _Meeting:
    """Workers whose parameters move the center together, when it ``moved``; ``center`` is what it was before."""

    moved: simpy.Event
    visitors: dict[int, Value[Array]] = field(default_factory=dict)
    center: Value[Array] = ABSENT


@dataclass
class _Spring:
    """The center z at the servers: z <- z + alpha sum_i (x_i - z), over ``n_visitors`` at a time."""

    shards: Shards
    alpha: float
    n_visitors: int
    n_moves: int = 0
    #: moves that the center had made when a worker saw it last
    _seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting = self.shards.setting
        self.center = setting.learner.initial
        self._meeting = _Meeting(setting.loop.env.event())

    def exchange(self, worker: Worker) -> Computation:
        """Send x_i, move the center, pull what it was before; return x_i - alpha (x_i - z)."""
        shards = self.shards
        model = shards.wires.model(worker, worker.params)
        yield from shards.push(worker, model)
        with shards.turn.request() as turn:
            yield from wait(worker, turn, "the servers' queue")
            if (seconds := shards.wires.server_seconds()) > 0.0:
                yield from communicate(worker, worker.loop.env.timeout(seconds), "decode")
            meeting = self._meeting
            meeting.visitors[worker.rank] = model.value
            if len(meeting.visitors) == self.n_visitors:
                yield from self._move(worker, meeting)
        yield from wait(worker, meeting.moved, "the other workers")
        center = shards.wires.answer(worker, meeting.center)
        yield from shards.pull(worker, center)
        return worker.params - self.alpha * (worker.params - center.value)

    def _move(self, worker: Worker, meeting: _Meeting) -> Process:
        """Move the center, for which the worker waits."""
        begin = worker.loop.now
        if self.shards.apply_time > 0.0:
            yield from communicate(worker, worker.loop.env.timeout(self.shards.apply_time), "update")
            self.shards.show_update(begin)
        mean = worker.learner.mean([meeting.visitors[rank] for rank in sorted(meeting.visitors)])
        meeting.center = self.center
        self.center = self.center + self.alpha * self.n_visitors * (mean - self.center)
        self._meeting = _Meeting(worker.loop.env.event())
        meeting.moved.succeed()
        self.n_moves += 1
        if self.n_visitors == 1:
            worker.recorder.staleness.append(self.n_moves - 1 - self._seen.get(worker.rank, 0))
            self._seen[worker.rank] = self.n_moves


@checked
@dataclass(frozen=True)
class ElasticAveraging:
    """Elastic averaging SGD (Zhang, Choromanska and LeCun 2015, NIPS, arXiv:1412.6651, equations 5 and 6):

        x_i <- x_i - eta g_i(x_i) - alpha (x_i - z),    z <- z + alpha sum_i (x_i - z)

    with the elastic terms in every `period`-th step. The model is the center z; the optimizer runs at the workers.
    A local step (of all workers, if they are synchronous) counts as an update; staleness is the number of times
    that others have moved the center since the worker's last exchange.

    alpha        moving rate; the paper's beta = N alpha is 0.9
    period       steps of a worker between two exchanges, the paper's tau
    synchronous  True: all workers exchange at once; False: each on its own, x_i with z (the paper's algorithm 1)

    An exchange is a push of x_i and a pull of z, S bytes each. The first, in which all are equal, is left out.
    """

    alpha: Annotated[float, number(0.0, 1.0, hint=", e.g. 0.9 / N")]
    period: Count = 1
    synchronous: bool = True
    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0

    @property
    def label(self) -> str:
        """Who exchanges when."""
        return f"elastic averaging ({'' if self.synchronous else 'a'}synchronous, every {self.period})"

    def updates(self, steps: int, n_workers: int) -> int:
        """A local step, of all workers or of each, is an update."""
        return steps if self.synchronous else steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        n_visitors = len(setting.workers) if self.synchronous else 1
        spring = _Spring(Shards.of(self, setting, models=True), self.alpha, n_visitors)
        if not self.synchronous:
            note_lock_step(setting)
        start_replicas(setting, lambda replica: self.work(replica, spring))
        setting.model, setting.mixture = lambda: spring.center, "the center, which has been moved by workers"

    def work(self, replica: Replica, spring: _Spring) -> Process:
        """Make local steps; in every `period`-th, pull the center and be pulled by it."""
        worker = replica.worker
        while True:
            moved = worker.params
            if replica.step > 0 and replica.step % self.period == 0:
                moved = yield from spring.exchange(worker)
            gradient = yield from worker.gradient()  # at x_i before it was moved
            yield from worker.optimizer_step()
            worker.params, replica.state = replica.after(moved, gradient)
            replica.count()
            if self.synchronous:
                replica.end_step()
            else:
                worker.end_step()
                worker.stop.updated(worker.samples_per_step)
