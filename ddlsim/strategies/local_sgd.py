"""Local SGD: workers train independently, and use averages of their models by a rule: at once, late, with an outer
optimizer, or for some parameters.

A worker waits only for averages that are late. Optimizer states (momentum) stay with the worker; only parameters are
averaged. Averaging takes no compute time except for the cluster's reduction time.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Decay, Index, NotNegative, Positive, Share, checked, number, one_of, quantity
from ddlsim.compression import Compression, ErrorFeedback, TopK
from ddlsim.compression.choice import kept_vectors
from ddlsim.compression.contract import AnyCompressor, count
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import State
from ddlsim.optim import Momentum, Optimizer
from ddlsim.plan import StepProgram
from ddlsim.plan.local_steps import Average, local_steps
from ddlsim.plan.plan import Chosen, Every
from ddlsim.runtime import Outer, Replica, RunContext, communicator
from ddlsim.runtime.fabric import Collectives, fabric_label
from ddlsim.runtime.replica import Periodic, Rule, need_values, run_local_steps
from ddlsim.streams import stream
from ddlsim.units import si
from ddlsim.workload.compute import Workload

Indices = Value[npt.NDArray[np.int64]]


class LocalSteps(Periodic):
    """A strategy whose workers make local steps and use averages by rules."""

    def rules(self, context: RunContext) -> list[Rule]:
        """Return how workers use each average. Raises ConfigError for a run that the strategy does not support."""
        raise NotImplementedError

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        run_local_steps(context, self.rules(context), owner=type(self).__name__)


class OneAverage(LocalSteps):
    """A strategy with a single average."""

    @property
    def average(self) -> Average:
        """The steps in which an average starts and ends."""
        return Average(Every(self.period))

    def rule(self, context: RunContext) -> Rule:
        """Return how workers use the average."""
        return Rule(self.average, [communicator(context, self)])

    def rules(self, context: RunContext) -> list[Rule]:
        return [self.rule(context)]

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads."""
        return local_steps(workloads, [self.average], accumulation)


# ------------------------------------------------------------ averages that workers wait for


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
class QsparseLocalSGD(LocalSteps):
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

    def collectives(self) -> Collectives:
        """Return its fabric and its compressor."""
        return super().collectives()._replace(compressor=self.compressor)

    def rules(self, context: RunContext) -> list[Rule]:
        if context.compression not in (None, Compression(self.compressor)):
            raise ConfigError(
                f"compression: QsparseLocalSGD already compresses with {title(self.compressor)}; set the compressor "
                "only once, or use LocalSGD with compression"
            )
        context.compression = Compression(self.compressor)
        return [Rule(Average(Every(self.period)), [communicator(context, self)])]


@checked
@dataclass(frozen=True)
class HierarchicalLocalSGD(LocalSteps):
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

    def rules(self, context: RunContext) -> list[Rule]:
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
        return [inside, Rule(Average(Every(self.period * self.block_period)), [members], then=all_know)]


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
class AdaComm(LocalSteps):
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

    def rules(self, context: RunContext) -> list[Rule]:
        need_values(context, "AdaComm", "its period depends on the loss")
        first_loss = context.learner.evaluate(context.learner.initial)[0]
        # a growing loss, as in a diverging run, lengthens the period
        steps = Chosen([self.period], max(4 * self.period, 250), "the loss")
        period = _AdaptivePeriod(self, context, steps.steps, first_loss, self.period)
        return [Rule(Average(steps), [communicator(context, self)], then=period.adapt, decides=True)]


# ------------------------------------------------------------ averages that overlap local steps


def _continued(mean: Array, params: Array, begun: Array) -> Array:
    """Return mean + (params - begun), computed in float64 and rounded once."""
    return (mean + (params.astype(np.float64) - begun)).astype(params.dtype)


@checked
@dataclass(frozen=True)
class DaSGD(OneAverage):
    """Local SGD with delayed averaging (Zhou et al. 2020, arXiv:2006.00441).

    While an all-reduce averages the models x_i, the workers take d more local steps. Then they merge the average into
    their models:

    x_i <- x_i - eta g_i(x_i)                      in every step
    s_i = x_i, all-reduce s                        in steps k with k mod tau = 0
    x_i <- xi x_i + (1 - xi) (1/N) sum_j s_j       in steps k with (k - d) mod tau = 0, using s from d steps earlier

    With d = tau, an all-reduce is always in flight. With d = 0 and xi = 0, this is :class:`~ddlsim.LocalSGD`; with
    xi = 1, the workers are independent.

    period  tau, the number of local steps between the starts of two consecutive all-reduces
    delay   d, the number of local steps between the start of an all-reduce and the merge, from 0 to `period`
    merge   xi, the weight of a worker's own model in the merge, from 0 to 1
    algorithm, rank_order, cost
            algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 4
    delay: Index = 1
    merge: Share = 0.5

    def __post_init__(self) -> None:
        if self.delay > self.period:
            raise ConfigError(
                f"DaSGD: delay = {self.delay!r}: must be from 0 to {self.period}, the averaging period in steps"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: period, delay and algorithm."""
        return f"DaSGD ({self.period} steps, delay {self.delay}, {fabric_label(self.algorithm, self.cost)})"

    @property
    def average(self) -> Average:
        return Average(Every(self.period), self.delay)

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: what is being averaged."""
        return 1.0 + compressed

    def rule(self, context: RunContext) -> Rule:
        xi = self.merge

        def merge(replica: Replica, mean: Value[Array]) -> None:
            replica.worker.params = xi * replica.worker.params + (1.0 - xi) * mean

        return Rule(self.average, [communicator(context, self)], merge=merge)


@checked
@dataclass(frozen=True)
class OverlapLocalSGD(OneAverage):
    """Overlap-Local-SGD: local SGD that pulls each model towards an anchor model that is averaged in the background.

    See Wang, Liang and Joshi 2020, arXiv:2002.09539. Every `period` local steps, the workers move their models x_i
    towards the anchor z and start an all-reduce that computes the next anchor. The all-reduce overlaps the next
    `period` steps:

    x_i <- (1 - alpha) x_i + alpha z
    v <- beta v + (1/N) sum_i x_i - z;   z <- z + v

    The first anchor is the initial model. As in the authors' code, each worker keeps its own v_i = beta v_i + x_i - z,
    and the all-reduce averages z + v_i. The running statistics of batch normalisation are averaged without momentum,
    because momentum could make a variance negative.

    period    number of local steps between two moves towards the anchor
    alpha     strength of the pull towards the anchor, from 0 to 1
    momentum  beta, the momentum of the anchor
    algorithm, rank_order, cost
              algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 4
    alpha: Share = 0.6
    momentum: Decay = 0.7

    @property
    def label(self) -> str:
        """Label for tables and plots: period and algorithm."""
        return f"overlap local SGD ({self.period} steps, {fabric_label(self.algorithm, self.cost)})"

    @property
    def average(self) -> Average:
        return Average(Every(self.period), self.period, first=self.period)

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: anchor and velocity."""
        return 2.0

    def rule(self, context: RunContext) -> Rule:
        alpha, plane = self.alpha, context.learner.plane
        anchors: dict[int, Value[Array]] = {}
        velocities: dict[int, Value[Array]] = {}

        def merge(replica: Replica, anchor: Value[Array] | None) -> None:
            worker = replica.worker
            anchors[worker.rank] = anchors.get(worker.rank, context.learner.initial) if anchor is None else anchor
            worker.params = (1.0 - alpha) * worker.params + alpha * anchors[worker.rank]

        def bring(replica: Replica) -> Value[Array]:
            worker, rank = replica.worker, replica.worker.rank
            ahead = plane.apply(np.subtract, worker.params, anchors[rank])
            velocities[rank] = self.momentum * velocities[rank] + ahead if rank in velocities else ahead
            return (anchors[rank] + velocities[rank]).with_statistics_of(worker.params)

        return Rule(self.average, [communicator(context, self)], bring=bring, merge=merge)


@checked
@dataclass(frozen=True)
class CoCoDSGD(OneAverage):
    """CoCoD-SGD: computation and communication decoupled SGD (Shen et al. 2019, IJCAI, algorithm 1).

    While an all-reduce averages the models x_i of the N workers, each worker takes its next tau local steps. The change
    in its model over those steps is then added to the average:

    s_i = x_i, all-reduce s;   tau local steps;   x_i <- (1/N) sum_j s_j + (x_i - s_i)

    period  tau, the number of local steps during each all-reduce
    algorithm, rank_order, cost
            algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 4

    @property
    def label(self) -> str:
        """Label for tables and plots: period and algorithm."""
        return f"CoCoD-SGD ({self.period} steps, {fabric_label(self.algorithm, self.cost)})"

    @property
    def average(self) -> Average:
        return Average(Every(self.period, 1), self.period - 1, at_begin=True)

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: the one that it sent, and the average."""
        return 2.0 + compressed

    def rule(self, context: RunContext) -> Rule:
        begun: dict[int, Value[Array]] = {}

        def bring(replica: Replica) -> Value[Array]:
            begun[replica.worker.rank] = replica.worker.params
            return replica.worker.params

        def merge(replica: Replica, mean: Value[Array]) -> None:
            worker = replica.worker
            worker.params = worker.learner.plane.mix(_continued, mean, worker.params, begun[worker.rank])

        return Rule(self.average, [communicator(context, self)], bring=bring, merge=merge)


# ------------------------------------------------------------ outer optimizers (:class:`~ddlsim.runtime.Outer`)


@checked
@dataclass(frozen=True)
class BMUF(OneAverage):
    """BMUF (blockwise model-update filtering): local SGD with block momentum (Chen and Huo 2016, ICASSP).

    After every `period` local steps, the workers' models x_i are averaged to x, the global model W takes a momentum
    step towards x, and the workers continue from W (the paper's classical block momentum):

    G = x - W;   Delta <- eta Delta + zeta G;   W <- W + Delta;   x_i <- W

    period          number of local steps between two updates of the global model
    block_momentum  eta, the momentum of the global model; None: 1 - 1/N for N workers, which worked well in the paper
    block_rate      zeta, the learning rate of the global model
    algorithm, rank_order, cost
                    algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 8
    block_momentum: Decay | None = None
    block_rate: Positive = 1.0

    def momentum(self, n_workers: int) -> float:
        """Return the block momentum for `n_workers` workers."""
        return 1.0 - 1.0 / n_workers if self.block_momentum is None else self.block_momentum

    @property
    def label(self) -> str:
        """Label for tables and plots: period and algorithm."""
        return f"BMUF ({self.period} steps, {fabric_label(self.algorithm, self.cost)})"

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition.

        These are the global model, its momentum and the mean change, as in fairseq/optim/bmuf.py.
        """
        return 3.0

    def rule(self, context: RunContext) -> Rule:
        outer = Outer(context.learner, Momentum(self.momentum(len(context.workers))))
        return Rule(self.average, [communicator(context, self)], then=lambda mean: outer.towards(mean, self.block_rate))


@checked
@dataclass(frozen=True)
class DiLoCo(OneAverage):
    """DiLoCo: distributed low-communication training (Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

    Each worker takes H local steps from the common model theta. An outer optimizer then uses the mean change of the
    models as a gradient:

    theta_i <- InnerOpt(theta_i, g_i(theta_i))                     H times, starting from theta_i = theta
    Delta = (1/N) sum_i (theta - theta_i);   theta <- OuterOpt(theta, Delta)

    The inner optimizer is the one set in ``Training``, and its state persists across outer updates. The paper uses
    AdamW: ``Training(optimizer=Adam(weight_decay=0.1))``. With ``outer=SGD()`` and ``outer_rate=1``, this is
    :class:`~ddlsim.LocalSGD`; with ``outer=Adam()``, it is FedAdam over all workers.

    period      H, the number of local steps between two outer updates; 500 in the paper
    outer       outer optimizer; the paper uses Nesterov momentum with a coefficient of 0.9
    outer_rate  learning rate of the outer optimizer; 0.7 in the paper
    algorithm, rank_order, cost
                algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 500
    outer: Annotated[Optimizer, "an optimizer such as Momentum(0.9, nesterov=True)"] = Momentum(0.9, nesterov=True)
    outer_rate: Positive = 0.7

    @property
    def label(self) -> str:
        """Label for tables and plots: period, outer optimizer and algorithm."""
        outer = type(self.outer).__name__
        return f"DiLoCo ({self.period} steps, outer {outer}, {fabric_label(self.algorithm, self.cost)})"

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: none.

        The model theta and the state of the outer optimizer are in host memory, as in prime (zeroband/diloco.py).
        """
        return 0.0

    def rule(self, context: RunContext) -> Rule:
        outer = Outer(context.learner, self.outer)
        return Rule(self.average, [communicator(context, self)], then=lambda mean: outer.towards(mean, self.outer_rate))


@checked
@dataclass(frozen=True)
class SlowMo(OneAverage):
    """SlowMo: local SGD with slow momentum (Wang, Tantia, Ballas and Rabbat 2020, arXiv:1910.00643, algorithm 1).

    Starting from the common model x, each worker takes tau local steps d_i with the run's optimizer. Momentum is then
    applied to the mean change of the models:

    x_i <- x_i - gamma d_i                          tau times, starting from x_i = x
    u <- beta u + (x - (1/N) sum_i x_i) / gamma
    x <- x - alpha gamma u

    gamma is the learning rate of the latest local step; if it is 0, the models are simply averaged. With beta = 0,
    alpha = 1 and buffers = "maintain", this is :class:`~ddlsim.LocalSGD`. Tune `period`, `momentum` and `slow_rate` for
    each task.

    period     tau, the number of local steps between two averaging rounds
    momentum   beta, the slow momentum
    slow_rate  alpha, the slow learning rate
    buffers    whether workers "maintain" or "reset" the state of the run's optimizer after averaging (line 2 of the
               algorithm). The paper's third option, averaging the state, is not supported, because workers would have
               to send the state
    algorithm, rank_order, cost
               algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    period: Count = 48
    momentum: Decay = 0.5
    slow_rate: Positive = 1.0
    buffers: Annotated[str, one_of("maintain", "reset")] = "maintain"

    @property
    def label(self) -> str:
        """Label for tables and plots: period, slow momentum and algorithm."""
        return f"SlowMo ({self.period} steps, {self.momentum:g}, {fabric_label(self.algorithm, self.cost)})"

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition.

        The workers shard the common model and its momentum, as fairscale/experimental/nn/data_parallel/gossip does by
        default (``slowmo_memory_efficient``).
        """
        return 2.0 / n_workers

    def rule(self, context: RunContext) -> Rule:
        slow, gamma = Outer(context.learner, Momentum(self.momentum)), 0.0

        def bring(replica: Replica) -> Value[Array]:
            nonlocal gamma
            gamma = replica.rate  # the same for all, which have made the same number of steps
            return replica.worker.params

        def move(mean: Value[Array]) -> Value[Array]:
            return slow.towards(mean, self.slow_rate * gamma, unit=gamma) if gamma else slow.follow(mean)

        def merge(replica: Replica, model: Value[Array]) -> None:
            replica.worker.params = model
            if self.buffers == "reset":
                replica.forget()

        return Rule(self.average, [communicator(context, self)], bring=bring, then=move, merge=merge)


# ------------------------------------------------------------ subsets of the parameters


def _put(params: Array, indices: npt.NDArray[np.int64], values: Array) -> Array:
    mixed = params.copy()
    mixed[indices] = values
    return mixed


@checked
@dataclass(frozen=True)
class SPARTA(OneAverage):
    """SPARTA: sparse parameter averaging (Exo Labs 2025; ``SPARTAStrategy`` in exogym).

    In every step, each worker takes a local step; the workers then average a random subset S of the parameters:

    x_i <- x_i - eta g_i(x_i);   x_i[S] <- (1/N) sum_j x_j[S]

    All workers derive the same S from a common seed, so they send only the values of these parameters: a fraction p of
    the model's size. The running statistics of batch normalisation stay local. With p = 1, this is
    :class:`~ddlsim.LocalSGD` with a period of 1.

    p   fraction of the parameters in S; the default is the authors' value. Of n parameters, round(p n), but at least
        one, are sampled without replacement. (exogym instead samples each parameter independently.)
    algorithm, rank_order, cost
        algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`
    """

    p: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.005 is half a percent)")] = 0.005
    period = 1

    @property
    def label(self) -> str:
        """Label for tables and plots: share and algorithm."""
        return f"SPARTA ({100 * self.p:g} %, {fabric_label(self.algorithm, self.cost)})"

    @property
    def average(self) -> Average:
        """The average of the subset, in every step."""
        return Average(Every(1), share=self.p)

    def rule(self, context: RunContext) -> Rule:
        """Return how workers use the average. Raises ConfigError in a run that compresses."""
        if context.compression is not None:
            raise ConfigError(
                "compression: SPARTA does not support compression, because it sends a different subset of the "
                "parameters in every step; lower p instead, or use LocalSGD(1) with compression"
            )

        @lru_cache(maxsize=2)  # workers are at most one step apart
        def drawn(step: int) -> Indices:
            draws = stream(context.seed, 0, f"SPARTA {step}")
            return plane.apply(lambda x: np.sort(draws.choice(x.size, count(self.p, x.size), replace=False)), initial)

        plane, initial = context.learner.plane, context.learner.initial

        def bring(replica: Replica) -> Value[Array]:
            return plane.apply(np.take, replica.worker.params, drawn(replica.step))

        def merge(replica: Replica, mean: Value[Array]) -> None:
            params = replica.worker.params
            replica.worker.params = plane.apply(_put, params, drawn(replica.step), mean).with_statistics_of(params)

        return Rule(self.average, [communicator(context, self)], bring=bring, merge=merge, models=False)
