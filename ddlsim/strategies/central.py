"""Servers that update together from complete gradients: K-async SGD, softsync, stale synchronous parallel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ddlsim.arguments import Count, checked, integer, validated_by
from ddlsim.errors import ConfigError, shown
from ddlsim.learning import Array, Value
from ddlsim.network import lanes as ls
from ddlsim.runtime import Message, RunContext, Servers, Worker
from ddlsim.runtime.lanes import Op, gradient
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
        #: latest gradient of each worker
        self.gradients: dict[int, Value[Array]] = {}
        context.model = lambda: self.params

    def go(self, *held: Op) -> None:
        """Run all workers: compute a gradient, push it, wait as configured, pull the parameters, repeat."""
        self.serve(gradient(self.servers.context, self._drawn), [Op(ls.STEP)], held)

    def _drawn(self, worker: Worker) -> None:
        self.gradients[worker.rank] = worker.draw()

    def pack(self, worker: Worker) -> Message:
        return self.servers.messages.gradient(worker, self.gradients[worker.rank])

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
        return math.ceil(steps * n_workers / self._count(n_workers))

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
