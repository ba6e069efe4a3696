"""Local SGD: workers train independently, periodically average their models, and wait for the average.

Optimizer states (momentum) stay with the worker; only parameters are averaged. Averaging takes no compute time except
for the cluster's reduction time.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, NotNegative, checked, one_of, quantity
from ddlsim.compression import Compression, ErrorFeedback, TopK
from ddlsim.compression.choice import kept_vectors
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import State
from ddlsim.plan import StepProgram
from ddlsim.plan.local_steps import Average, local_steps
from ddlsim.plan.plan import Chosen, Every
from ddlsim.runtime import Replica, RunContext, communicator
from ddlsim.runtime.fabric import fabric_label
from ddlsim.runtime.own_models import Rule, run_local_steps
from ddlsim.runtime.replica import Periodic, need_values
from ddlsim.units import si
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class LocalSGD(Periodic):
    """Local SGD: workers average their parameters after every `period` local steps.

    See Stich 2019, arXiv:1805.09767, algorithm 1. Worker i has its own parameters x_i and gradients g_i; eta is the
    learning rate:

    x_i <- x_i - eta g_i(x_i);   every tau steps   x_i <- (1/N) sum_j x_j

    period       tau, the number of local steps between two averaging rounds
    start_epoch  epoch in which local steps begin. Before this epoch, workers average their gradients in every step
                 (post-local SGD, Lin et al. 2020, arXiv:1808.07217)
    algorithm, rank_order, cost
                 algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 8
    start_epoch: NotNegative = 0.0

    @property
    def label(self) -> str:
        """Label for tables and plots: period and algorithm, and the cost model unless collectives are simulated."""
        after = f" after epoch {self.start_epoch:g}" if self.start_epoch else ""
        return f"local SGD ({self.period} steps{after}, {fabric_label(self.algorithm, self.cost)})"

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads.

        Raises ConfigError if `start_epoch` is set, because a step program has no epochs.
        """
        if self.start_epoch:
            raise ConfigError(
                f"plan: LocalSGD has no static task graph with start_epoch = {self.start_epoch:g}, because epochs "
                "depend on the data; remove start_epoch to inspect the plan"
            )
        return local_steps(workloads, [Average(Every(self.period))], accumulation)

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError if `start_epoch` is set in a timing-only run, which has no epochs."""
        if self.start_epoch:
            need_values(context, f"LocalSGD: start_epoch = {self.start_epoch:g}", "epochs are passes over data")
        members = communicator(context, self)
        first = _steps_before(context, self.start_epoch)
        rules = [Rule(Average(Every(self.period, first, first + 1)), [members])]
        if first:  # gradients are averaged until then
            sums = Average(Every(1, end=first), gradients=True)
            rules.append(Rule(sums, [members], then=lambda mean: _updated(replicas[0], mean), models=False))
        replicas = run_local_steps(context, rules, owner="LocalSGD")


def _updated(replica: Replica, gradient: Value[Array]) -> tuple[Value[Array], State]:
    """Return the parameters and state of a replica after a step in which all replicas apply the same gradient."""
    return replica.after(replica.worker.params, gradient)


def _steps_before(context: RunContext, epoch: float) -> int:
    """Return the number of steps that start before an epoch."""
    worker, n_samples, steps = context.workers[0], 0, 0
    if worker.workload_at is None:
        of_step = worker.samples_per_step * len(context.workers)
        return bisect.bisect_left(range(1 << 62), epoch, key=lambda n: context.learner.epoch(n * of_step))
    while epoch and (at := context.learner.epoch(n_samples)) < epoch:
        n_samples += worker.workload_at(at).batch_size * worker.accumulation * len(context.workers)
        steps += 1
    return steps


@checked
@dataclass(frozen=True)
class QsparseLocalSGD(Periodic):
    """Qsparse-local-SGD: local SGD with compressed model updates and error feedback.

    See Basu et al. 2019, arXiv:1906.02367, algorithm 1. Starting from the common model x, each worker i takes H local
    steps. The workers then exchange compressed model changes q_i:

    x_i <- x_i - eta g_i(x_i)                                   H times, starting from x_i = x
    q_i = C(m_i + x - x_i);   m_i <- m_i + x - x_i - q_i;   x <- x - (1/N) sum_i q_i

    This is equivalent to a run of :class:`~ddlsim.LocalSGD` with ``compression=compressor``.

    period      H, the number of local steps between two exchanges
    compressor  C, the compressor of the model changes, with error feedback (the memory m_i). The paper combines Top_k
                or Rand_k with signs or quantisation
    algorithm, rank_order, cost
                algorithm, rank order and cost model of the exchange; see :class:`~ddlsim.Fabric`
    """

    period: Count = 8
    compressor: Annotated[AnyCompressor, "a compressor such as ErrorFeedback(TopK(0.01))"] = ErrorFeedback(TopK(0.01))

    @property
    def label(self) -> str:
        """Label for tables and plots: period, compressor and algorithm."""
        fabric = fabric_label(self.algorithm, self.cost)
        return f"Qsparse local SGD ({self.period} steps, {title(self.compressor)}, {fabric})"

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: the common model, and the memory m_i, unless
        that counts as the run's compressor's."""
        return 1.0 + (0 if compressed else kept_vectors(self.compressor) or 0)

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError if the run sets a different compression."""
        if context.compression not in (None, Compression(self.compressor)):
            raise ConfigError(
                f"compression: QsparseLocalSGD already compresses with {title(self.compressor)}; set the compressor "
                "only once, or use LocalSGD with compression"
            )
        context.compression = Compression(self.compressor)
        rule = Rule(Average(Every(self.period)), [communicator(context, self)])
        run_local_steps(context, [rule], owner="QsparseLocalSGD")


@checked
@dataclass(frozen=True)
class HierarchicalLocalSGD(Periodic):
    """Hierarchical local SGD: models are averaged often within blocks of workers, and less often over all workers.

    See Lin et al. 2020, arXiv:1808.07217. Worker i has its own model x_i and gradients g_i; eta is the learning rate:

    x_i <- x_i - eta g_i(x_i)                      in every step
    x_i <- the mean of the models in its block     after every H local steps
    x_i <- the mean of all models                  after every H^b averaging rounds of the block

    Averaging within a block uses only the links inside the block. With H^b = 1, this is :class:`~ddlsim.LocalSGD`.

    period        H, the number of local steps between two averaging rounds within a block
    block_period  H^b, the number of averaging rounds within a block per averaging round over all workers
    block         number of workers (with consecutive ranks) per block, or "machine": each machine is a block. If every
                  machine holds only one worker, "machine" means each innermost group of the network, such as a rack
    algorithm, rank_order, cost
                  algorithm, rank order and cost model of the all-reduces; see :class:`~ddlsim.Fabric`
    """

    period: Count = 2
    block_period: Count = 4
    block: Annotated[str, one_of("machine", also="a number of workers or ")] | Count = "machine"

    @property
    def label(self) -> str:
        """Label for tables and plots: both periods and the algorithm."""
        periods = f"{self.period} x {self.block_period} steps"
        return f"hierarchical local SGD ({periods}, {fabric_label(self.algorithm, self.cost)})"

    def cycle(self) -> int:
        """Return the number of steps between two averages over all workers."""
        return self.period * self.block_period

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        members = communicator(context, self)
        blocks = [members.part(places) for places in members.blocks(self.block)]
        if len(context.workers) > 1 and len(blocks) in (1, len(context.workers)):
            context.notes.append(
                f"{self.label}: {'all workers are in one block' if len(blocks) == 1 else 'each block has one worker'}, "
                "so there is only one level; set block to a number of workers, or use LocalSGD"
            )
        nested = Every(self.period, unless=self.period * self.block_period)
        groups = [[worker.rank for worker in part.workers] for part in blocks]

        def all_know(mean: Value[Array]) -> Value[Array]:
            for rounds in inside.rounds:
                rounds.common = mean
            return mean

        inside = Rule(Average(nested, groups=groups), blocks)
        among = Rule(Average(Every(self.period * self.block_period)), [members], then=all_know)
        run_local_steps(context, [inside, among], owner="HierarchicalLocalSGD")


@dataclass
class _AdaptivePeriod:
    """The rule of :class:`AdaComm`: after each average, it chooses the number of local steps until the next one."""

    strategy: AdaComm
    context: RunContext
    steps: list[int]
    first_loss: float
    period: int
    n_intervals: int = 1

    def adapt(self, mean: Value[Array]) -> Value[Array]:
        """Set and return the number of local steps until the next average."""
        passed = self.context.loop.now if isinstance(self.strategy.interval, str) else len(self.steps)
        if passed >= self.n_intervals * self.strategy.between():
            self.n_intervals = math.floor(passed / self.strategy.between()) + 1
            ratio = self.context.learner.evaluate(mean)[0] / max(self.first_loss, sys.float_info.min)
            if math.isfinite(ratio):
                self.period = max(1, math.ceil(math.sqrt(ratio) * self.strategy.period))
        self.steps.append(self.steps[-1] + self.period)
        return mean


@checked
@dataclass(frozen=True)
class AdaComm(Periodic):
    """AdaComm: local SGD that averages more often as the loss falls (Wang and Joshi 2019, arXiv:1810.08313, section 4).

    In interval l, the workers average their models after every tau_l local steps:

        tau_l = ceil( sqrt(F_l / F_0) tau_0 )

    F_0 is the loss of the initial model, and F_l is the loss of the averaged model at the start of interval l. Losses
    are evaluated on the held-out samples; the evaluation takes no simulated time.

    period    tau_0, the number of local steps per averaging round in the first interval
    interval  length of an interval, as a number of averaging rounds or a simulated time such as "60 s". If it is a
              time, the interval ends with the first averaging round after that time
    algorithm, rank_order, cost
              algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 16
    interval: Count | Annotated[str, quantity("time", "60 s")] = 10

    def between(self) -> float:
        """Return the length of an interval: a number of averages, or time in s."""
        return si(self.interval, "time")

    @property
    def label(self) -> str:
        """Label for tables and plots: initial period and algorithm."""
        return f"AdaComm (from {self.period} steps, {fabric_label(self.algorithm, self.cost)})"

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError in a timing-only run, because the period depends on the loss."""
        need_values(context, "AdaComm", "its period depends on the loss")
        first_loss = context.learner.evaluate(context.learner.initial)[0]
        # a growing loss, as in a diverging run, lengthens the period
        steps = Chosen([self.period], max(4 * self.period, 250), "the loss")
        period = _AdaptivePeriod(self, context, steps.steps, first_loss, self.period)
        rule = Rule(Average(steps), [communicator(context, self)], then=period.adapt, decides=True)
        run_local_steps(context, [rule], owner="AdaComm")
