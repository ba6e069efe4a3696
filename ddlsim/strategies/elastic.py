"""Elastic averaging SGD: an elastic force pulls the workers' models towards a center, and the center towards them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, number
from ddlsim.learning import Array, Value
from ddlsim.network import lanes as ls
from ddlsim.runtime import Message, RunContext, Servers, Worker
from ddlsim.runtime.lanes import OPTIMIZER, Op, gradient, repeated
from ddlsim.runtime.replica import replicas_of
from ddlsim.runtime.servers import UpdateRule, Visit, WithServers, note_lock_step


class _Springs(UpdateRule):
    """Workers and the center z at the servers: z <- z + alpha sum_i (x_i - z), over ``n_visitors`` at a time."""

    def __init__(self, servers: Servers, alpha: float, n_visitors: int) -> None:
        super().__init__(servers)
        context = servers.context
        self.alpha, self.count, self.counted, self.told = alpha, n_visitors, False, n_visitors == 1
        self.center = self.before = context.learner.initial
        self.replicas = replicas_of(context)
        self.gradients: dict[int, Value[Array]] = {}
        self.pulled: dict[int, Value[Array]] = {}
        context.model, context.mixture = lambda: self.center, "the center, which has been moved by workers"

    def go(self, period: int) -> None:
        """Run all workers: local steps, with an elastic exchange with the center in every `period`-th one."""
        end = Op(ls.STEP, follow=self._step, number=ls.COMMON if self.count > 1 else ls.EACH)
        step = [*gradient(self.servers.context, self._drawn), OPTIMIZER, end]
        steps = repeated(step, lambda _: period)
        self.serve([], [Op(ls.NOTE, follow=self._pull), *steps], [Op(ls.MEET, "the other workers")], first=step[0])

    def pack(self, worker: Worker) -> Message:
        return self.servers.messages.model(worker, worker.params)

    def update(self, visits: Sequence[Visit]) -> None:
        mean = self.servers.context.learner.mean([visit.value for visit in sorted(visits, key=lambda v: v.rank)])
        self.before = self.center
        self.center = self.center + self.alpha * self.count * (mean - self.center)

    def answer(self, worker: Worker) -> Message:
        message = self.servers.messages.answer(worker, self.before)
        self.pulled[worker.rank] = message.value
        return message

    def _pull(self, worker: Worker) -> None:
        """x_i - alpha (x_i - z)"""
        self.pulled[worker.rank] = worker.params - self.alpha * (worker.params - self.pulled[worker.rank])

    def _drawn(self, worker: Worker) -> None:
        self.gradients[worker.rank] = worker.draw()  # at x_i before it was moved

    def _step(self, worker: Worker) -> None:
        replica, moved = self.replicas[worker.rank], self.pulled.pop(worker.rank, worker.params)
        worker.params, replica.state = replica.after(moved, self.gradients[worker.rank])
        replica.count()


@checked
@dataclass(frozen=True)
class ElasticAveraging(WithServers):
    """Elastic averaging SGD (Zhang, Choromanska and LeCun 2015, NIPS, arXiv:1412.6651, equations 5 and 6).

    Each worker trains its own model x_i. An elastic force pulls this model and the center z, which is stored on the
    servers, towards each other:

        x_i <- x_i - eta g_i(x_i) - alpha (x_i - z),    z <- z + alpha sum_i (x_i - z)

    The elastic terms apply only every `period` steps. The center z is the model that is evaluated; the optimizer runs
    on the workers. In an exchange, a worker pushes x_i and pulls z. There is no exchange before the first step, because
    all models are identical at that point.

    alpha        strength of the elastic force (the paper's moving rate); the paper uses 0.9 / N for N workers
    period       number of steps between two exchanges of a worker, the paper's tau
    synchronous  whether all workers exchange with the center at the same time. False: each worker exchanges
                 independently (the paper's algorithm 1)
    servers, placement, apply_time
                 number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All
                 servers apply an update at the same time

    Each local step counts as an update (with `synchronous`, one step of all workers together). Staleness is the number
    of times that other workers have moved the center since a worker's last exchange.
    """

    alpha: Annotated[float, number(0.0, 1.0, hint=", e.g. 0.9 / N")]
    period: Count = 1
    synchronous: bool = True

    @property
    def label(self) -> str:
        """Label for tables and plots: whether exchanges are synchronous, and the period."""
        return f"elastic averaging ({'' if self.synchronous else 'a'}synchronous, every {self.period})"

    def cycle(self) -> int:
        """Return the steps between two exchanges with the servers."""
        return self.period

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker.

        Each local step is an update; if exchanges are synchronous, one step of all workers together.
        """
        return steps if self.synchronous else steps * n_workers

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        n_visitors = len(context.workers) if self.synchronous else 1
        if not self.synchronous:
            note_lock_step(context)
        _Springs(Servers(self, context, models=True), self.alpha, n_visitors).go(self.period)
