"""Servers that update together, from complete gradients (K-async SGD, softsync, stale synchronous parallel) or from
models that an elastic force pulls towards a center (elastic averaging)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ddlsim.arguments import Count, checked, integer, number, validated_by
from ddlsim.errors import ConfigError, shown
from ddlsim.learning import Array, Value
from ddlsim.network import lanes as ls
from ddlsim.runtime import Message, RunContext, Servers, Worker
from ddlsim.runtime.lanes import OPTIMIZER, Op, gradient, repeated
from ddlsim.runtime.replica import replicas_of
from ddlsim.runtime.servers import UpdateRule, Visit, WithServers, check_layers, note_lock_step
from ddlsim.strategies.staleness import Scaling, ScalingChoice, scaled, scaling_named

#: whether a worker waits for the update that its gradient is part of
UNTIL_APPLIED = Op(ls.MEET, "the gradients of others")


class CentralModel(UpdateRule):
    """The model at a strategy's servers: w <- w - eta * (1/c) sum_l f(tau_l) g_l for every `count` = c gradients.

    scaling    f
    drop_late  whether gradients older than the latest update are dropped
    move       computes the next model from this mean; None: the run's optimizer
    version    number of updates so far

    Raises ConfigError if there are not enough machines for the servers, or if the run's optimizer cannot work on parts
    of the parameters.
    """

    def __init__(
        self,
        strategy: WithServers,
        context: RunContext,
        count: int = 1,
        scaling: Scaling | None = None,
        *,
        drop_late: bool = False,
        move: Callable[[Value[Array]], Value[Array]] | None = None,
    ) -> None:
        if move is None:
            check_layers(type(strategy).__name__, context.learner, strategy.servers)
        super().__init__(Servers(strategy, context))
        self.count, self.scaling, self.move, self.version = count, scaling, move, 0
        self.late = self.told = not drop_late
        self.params = context.learner.initial
        self._state = context.learner.optimizer_state(self.params)
        context.model = lambda: self.params

    def go(self, *held: Op) -> None:
        """Run all workers: compute a gradient, push it, wait as configured, pull the parameters, repeat."""
        self.serve(gradient(self.servers.context), [Op(ls.STEP)], held)

    def pack(self, worker: Worker) -> Message:
        return self.servers.messages.gradient(worker, worker.drawn)

    def answer(self, worker: Worker) -> Message:
        message = self.servers.messages.answer(worker, self.params)
        worker.params = message.value
        return message

    def update(self, visits: Sequence[Visit]) -> None:
        """Update the model now. Gradients are summed in rank order, regardless of their order of arrival."""
        context = self.servers.context
        learner, stop = context.learner, context.stop
        in_order = sorted(visits, key=lambda g: g.rank)
        mean = learner.mean([scaled(g.value, self.scaling, g.staleness) for g in in_order])
        if self.move is not None:
            self.params = self.move(mean)
        else:
            self.params, self._state = learner.update(self.params, mean, self._state, learner.rate(stop.n_samples))
        self.version += 1
        stop.updated(sum(g.n_samples for g in visits))


@checked
@dataclass(frozen=True)
class OfK(WithServers):
    """A server that updates, w <- w - eta (1/k) sum g, from the first k gradients or from those of k learners."""

    k: Count
    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """Label for tables and plots: k and the name of the method."""
        return f"{self.k}-{self.kind}"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per k gradients."""
        return math.ceil(steps * n_workers / self.k)

    def waits_for_all(self) -> bool:
        """Return whether an update ends the steps of all workers."""
        return "async" not in self.kind

    def check_k(self, context: RunContext) -> None:
        """Raise ConfigError if `k` exceeds the number of learners."""
        n_workers = len(context.workers)
        if self.k > n_workers:
            name = type(self).__name__
            raise ConfigError(f"{name}: k = {self.k} exceeds the number of workers; use at most {n_workers}")


@checked
@dataclass(frozen=True)
class KAsync(OfK):
    """K-async SGD: each update averages the first k gradients to arrive from different workers.

    See Dutta et al. 2018, arXiv:1803.01113, section 2. The server waits for gradients from k different workers, applies
    the update ``w <- w - eta (1/k) sum g``, and sends the new parameters to those k workers. The other workers continue
    with their old parameters. With k = 1, this is asynchronous SGD; with k equal to the number of workers, it is
    synchronous SGD.

    k   number of gradients per update, each from a different worker
    servers, placement, apply_time
        number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
        apply an update at the same time
    """

    kind = "async"

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        self.check_k(context)
        center = CentralModel(self, context, self.k)
        if self.k < len(context.workers):  # with all of them, updates are a barrier
            note_lock_step(context)
        center.go(UNTIL_APPLIED)


@checked
@dataclass(frozen=True)
class KBatchAsync(OfK):
    """K-batch-async SGD: each update averages the next k gradients to arrive (Dutta et al. 2018, arXiv:1803.01113).

    The server waits for k gradients, several of which may come from the same worker, and applies the update
    ``w <- w - eta (1/k) sum g`` (section 2 of the paper). After a push, a worker pulls the current parameters and
    continues immediately. No worker waits for other workers, and no work is cancelled.

    k   number of gradients per update
    servers, placement, apply_time
        number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
        apply an update at the same time
    """

    kind = "batch-async"

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        center = CentralModel(self, context, self.k)
        note_lock_step(context)
        center.go()


@checked
@dataclass(frozen=True)
class SoftSync(WithServers):
    """n-softsync SGD: each update uses the next floor(N/n) gradients from any of the N workers.

    See Zhang, Gupta, Lian and Liu 2016, arXiv:1511.05950, section 3. The server waits for c = floor(N/n) gradients and
    applies the update

        w <- w - (1/c) sum_l alpha(tau_l) g_l,    alpha(tau) = alpha_0 / tau for tau > 0, else alpha_0,

    where alpha_0 is the learning rate of the run. After a push, a worker pulls the current parameters and continues
    immediately. The staleness tau of a gradient is the number of updates between the worker's pull and its push. It
    averages about n. With n = N, this is asynchronous SGD. The paper's hardsync, which waits for all workers, is
    :class:`~ddlsim.ParameterServer`.

    n                   sets c: the larger n is, the fewer gradients each update uses; from 1 to N
    staleness_scaling   how the learning rate depends on staleness: "inverse" is the paper's alpha(tau), None is the
                        constant alpha_0, and :class:`~ddlsim.AsyncParameterServer` lists other choices
    servers, placement, apply_time
                        number, placement and update time of the servers, as for AsyncParameterServer. All servers
                        apply an update at the same time
    """

    n: Count
    staleness_scaling: ScalingChoice = "inverse"

    @property
    def label(self) -> str:
        """Label for tables and plots: n and the staleness scaling."""
        scaling = self.staleness_scaling
        name = scaling if isinstance(scaling, str) else "constant rate" if scaling is None else type(scaling).__name__
        return f"{self.n}-softsync ({name})"

    def _count(self, n_workers: int) -> int:
        if self.n > n_workers:
            raise ConfigError(f"SoftSync: n = {self.n} exceeds the number of workers; use at most {n_workers}")
        return n_workers // self.n

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per c gradients."""
        return math.ceil(steps * n_workers / max(n_workers // self.n, 1))

    def waits_for_all(self) -> bool:
        """Return False."""
        return False

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        scaling = scaling_named(self.staleness_scaling)
        center = CentralModel(self, context, self._count(len(context.workers)), scaling)
        note_lock_step(context)
        center.go()


def _slack(value: object, where: str) -> object:
    if isinstance(value, float) and value == math.inf:
        return value
    try:
        return integer(0)(value, where)
    except ConfigError:
        problem = f"{where} = {shown(value)}"
        raise ConfigError(f"{problem}: must be a non-negative integer, or math.inf for no limit") from None


@checked
@dataclass(frozen=True)
class StaleSynchronous(WithServers):
    """Stale synchronous parallel: workers drift apart by at most `slack` steps (Ho et al. 2013, NIPS, section 2).

    The server applies every gradient as soon as it arrives, ``w <- w - eta g_i``. For each worker i, clock_i is the
    number of its gradients that have been applied. Before each pull, worker i waits while
    ``clock_i - min_j clock_j > slack``.

    slack  maximum number of steps by which a worker may be ahead of the slowest one. 0: workers wait for each other
           after every step, as in synchronous SGD, except that the N gradients of a step are added, not averaged.
           math.inf: asynchronous SGD
    servers, placement, apply_time
           number, placement and update time of the servers, as for :class:`~ddlsim.AsyncParameterServer`. All servers
           apply an update at the same time
    """

    slack: Annotated[float, validated_by(_slack)]

    @property
    def label(self) -> str:
        """Label for tables and plots: the slack."""
        return f"stale synchronous (slack {self.slack})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per gradient."""
        return steps * n_workers

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        center = CentralModel(self, context)
        if self.slack > 0:  # with 0, updates are a barrier
            note_lock_step(context)
        center.go(Op(ls.CLOCK, "the slowest worker", number=ls.MANY if math.isinf(self.slack) else int(self.slack)))


# ---------------------------------------------------------------- models of workers that a center attracts


class _Springs(UpdateRule):
    """Workers and the center z at the servers: z <- z + alpha sum_i (x_i - z), over ``n_visitors`` at a time."""

    def __init__(self, servers: Servers, alpha: float, n_visitors: int) -> None:
        super().__init__(servers)
        context = servers.context
        self.alpha, self.count, self.counted, self.told = alpha, n_visitors, False, n_visitors == 1
        self.center = self.before = context.learner.initial
        self.replicas = replicas_of(context)
        self.pulled: dict[int, Value[Array]] = {}
        context.model, context.mixture = lambda: self.center, "the center, which has been moved by workers"

    def go(self, period: int) -> None:
        """Run all workers: local steps, with an elastic exchange with the center in every `period`-th one."""
        end = Op(ls.STEP, follow=self._step, number=ls.COMMON if self.count > 1 else ls.EACH)
        step = [*gradient(self.servers.context), OPTIMIZER, end]
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

    def _step(self, worker: Worker) -> None:
        replica, moved = self.replicas[worker.rank], self.pulled.pop(worker.rank, worker.params)
        worker.params, replica.state = replica.after(moved, worker.drawn)  # at x_i before it was moved
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
