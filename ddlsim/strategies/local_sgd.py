"""Local SGD: workers go on alone and average their models now and then, and wait for it.

Optimizer states (momentum) stay with the worker; only parameters are averaged. Forming averages costs no
compute time beyond what the cluster charges for reductions.
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
from ddlsim.compression.contract import AnyCompressor
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import State
from ddlsim.plan import StepProgram
from ddlsim.plan.local_steps import Average, local_steps
from ddlsim.plan.plan import Chosen, Every
from ddlsim.runtime.communicator import communicator
from ddlsim.runtime.fabric import cost_said, name_of
from ddlsim.runtime.own_models import Rule, run_local_steps
from ddlsim.runtime.replica import Periodic, Replica, need_values
from ddlsim.runtime.setting import Setting
from ddlsim.units import si
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class LocalSGD(Periodic):
    """Average the parameters after every `period` local steps (Stich 2019, arXiv:1805.09767, algorithm 1):

    x_i <- x_i - eta g_i(x_i);   every tau steps   x_i <- (1/N) sum_j x_j

    With ``start_epoch`` above 0 workers average gradients in every step until then (post-local SGD, Lin et al.
    2020, arXiv:1808.07217). ``algorithm``, ``rank_order`` and ``cost`` are those of :class:`~ddlsim.AllReduce`.
    """

    period: Count = 8
    start_epoch: NotNegative = 0.0

    @property
    def label(self) -> str:
        """Period and algorithm, and what it costs unless that is simulated."""
        after = f" after epoch {self.start_epoch:g}" if self.start_epoch else ""
        return f"local SGD ({self.period} steps{after}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the steps of workers with these workloads.

        Raises ConfigError for a `start_epoch`: without data nobody knows when that is.
        """
        if self.start_epoch:
            raise ConfigError(
                f"plan: LocalSGD: start_epoch = {self.start_epoch:g} depends on data; leave it out to see it"
            )
        return local_steps(workloads, [Average(Every(self.period))], accumulation)

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for a `start_epoch` where there is no data to count epochs of."""
        if self.start_epoch:
            need_values(setting, f"LocalSGD: start_epoch = {self.start_epoch:g}", "epochs are passes over data")
        members = communicator(setting, self)
        first = _steps_before(setting, self.start_epoch)
        rules = [Rule(Average(Every(self.period, first, first + 1)), [members])]
        if first:  # until then gradients are averaged
            sums = Average(Every(1, end=first), gradients=True)
            rules.append(Rule(sums, [members], then=lambda mean: _updated(replicas[0], mean), models=False))
        replicas = run_local_steps(setting, rules, owner="LocalSGD")


def _updated(replica: Replica, gradient: Value[Array]) -> tuple[Value[Array], State]:
    """Return what all replicas are after a step with the same gradient."""
    return replica.after(replica.worker.params, gradient)


def _steps_before(setting: Setting, epoch: float) -> int:
    """Return how many steps begin before an epoch."""
    worker, n_samples, steps = setting.workers[0], 0, 0
    if worker.workload_at is None:
        of_step = worker.samples_per_step * len(setting.workers)
        return bisect.bisect_left(range(1 << 62), epoch, key=lambda n: setting.learner.epoch(n * of_step))
    while epoch and (at := setting.learner.epoch(n_samples)) < epoch:
        n_samples += worker.workload_at(at).batch_size * worker.accumulation * len(setting.workers)
        steps += 1
    return steps


@checked
@dataclass(frozen=True)
class QsparseLocalSGD(Periodic):
    """Local SGD whose steps travel compressed, with error feedback (Basu et al. 2019, arXiv:1906.02367, algorithm 1):

    x_i <- x_i - eta g_i(x_i)                                   `period` H times, from x_i = x
    q_i = C(m_i + x - x_i);   m_i <- m_i + x - x_i - q_i;   x <- x - (1/N) sum_i q_i

    It is :class:`~ddlsim.LocalSGD` with a compressor of its own, and the same with ``compression=compressor``.

    compressor  C with its memory m_i: the paper's are Top_k or Rand_k, and signs or a quantisation of what is left
    """

    period: Count = 8
    compressor: Annotated[AnyCompressor, "a compressor such as ErrorFeedback(TopK(0.01))"] = ErrorFeedback(TopK(0.01))

    @property
    def label(self) -> str:
        """Period, compressor and algorithm."""
        fabric = f"{name_of(self.algorithm)}{cost_said(self.cost)}"
        return f"Qsparse local SGD ({self.period} steps, {title(self.compressor)}, {fabric})"

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError in a run that says another compression."""
        if setting.compression not in (None, Compression(self.compressor)):
            raise ConfigError(
                f"compression: QsparseLocalSGD says compressor = {title(self.compressor)} already; say it once, or use "
                "LocalSGD with compression"
            )
        setting.compression = Compression(self.compressor)
        rule = Rule(Average(Every(self.period)), [communicator(setting, self)])
        run_local_steps(setting, [rule], owner="QsparseLocalSGD")


@checked
@dataclass(frozen=True)
class HierarchicalLocalSGD(Periodic):
    """Local SGD with a period for each level (Lin et al. 2020, arXiv:1808.07217, "hierarchical local SGD"):

    x_i <- x_i - eta g_i(x_i)                                    always
    x_i <- the mean of the models in its block                   after every H local steps, `period`
    x_i <- the mean of all models                                after every H^b such block steps, `block_period`

    Blocks average in the place of all, over the links inside them. H^b = 1 is :class:`~ddlsim.LocalSGD`.

    block  "machine": the workers of a machine, or where machines hold one worker each, of an innermost group of the
           network, such as a rack; or the number of workers with neighbouring ranks in a block
    """

    period: Count = 2
    block_period: Count = 4
    block: Annotated[str, one_of("machine", also="a number of workers, ")] | Count = "machine"

    @property
    def label(self) -> str:
        """Both periods and the algorithm."""
        periods = f"{self.period} x {self.block_period} steps"
        return f"hierarchical local SGD ({periods}, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def cycle(self) -> int:
        """Steps between two averages over all workers."""
        return self.period * self.block_period

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        members = communicator(setting, self)
        blocks = [members.part(places) for places in members.blocks(self.block)]
        if len(setting.workers) > 1 and len(blocks) in (1, len(setting.workers)):
            setting.notes.append(
                f"{self.label}: {'all workers are in one block' if len(blocks) == 1 else 'every block is one worker'}, "
                "so there is one level only; give block=a number of workers, or use LocalSGD"
            )
        nested = Every(self.period, unless=self.period * self.block_period)
        groups = [[worker.rank for worker in part.workers] for part in blocks]

        def all_know(mean: Value[Array]) -> Value[Array]:
            for rounds in inside.rounds:
                rounds.common = mean
            return mean

        inside = Rule(Average(nested, groups=groups), blocks)
        among = Rule(Average(Every(self.period * self.block_period)), [members], then=all_know)
        run_local_steps(setting, [inside, among], owner="HierarchicalLocalSGD")


@dataclass
class _AdaptivePeriod:
    """The rule of :class:`AdaComm`, applied whenever an average is there: it chooses the step of the next one."""

    strategy: AdaComm
    setting: Setting
    steps: list[int]
    first_loss: float
    period: int
    n_intervals: int = 1

    def adapt(self, mean: Value[Array]) -> Value[Array]:
        """Set how many local steps to make from the mean, and return it."""
        passed = self.setting.loop.now if isinstance(self.strategy.interval, str) else len(self.steps)
        if passed >= self.n_intervals * self.strategy.between():
            self.n_intervals = math.floor(passed / self.strategy.between()) + 1
            ratio = self.setting.learner.evaluate(mean)[0] / max(self.first_loss, sys.float_info.min)
            if math.isfinite(ratio):
                self.period = max(1, math.ceil(math.sqrt(ratio) * self.strategy.period))
        self.steps.append(self.steps[-1] + self.period)
        return mean


@checked
@dataclass(frozen=True)
class AdaComm(Periodic):
    """Local SGD that averages more often as the loss falls (Wang and Joshi 2019, arXiv:1810.08313, section 4):

    tau_l = ceil( sqrt(F_l / F_0) tau_0 )

    F_0 is the loss of the initial model, F_l that of the average at the start of interval l. An interval is a
    number of averaging rounds, or simulated time such as "60 s" (it ends with the first average after it). The
    losses are those of the held-out samples, whose evaluation takes no time here.
    """

    period: Count = 16
    interval: Count | Annotated[str, quantity("time", "60 s")] = 10

    def between(self) -> float:
        """Return the interval: rounds, or s."""
        return si(self.interval, "time")

    @property
    def label(self) -> str:
        """First period and algorithm."""
        return f"AdaComm (from {self.period} steps, {name_of(self.algorithm)}{cost_said(self.cost)})"

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError without data: the loss decides when workers talk."""
        need_values(setting, "AdaComm", "it averages as often as the loss says")
        first_loss = setting.learner.evaluate(setting.learner.initial)[0]
        # a loss that grows, as where training diverges, lengthens the period
        steps = Chosen([self.period], max(4 * self.period, 250), "the loss")
        period = _AdaptivePeriod(self, setting, steps.steps, first_loss, self.period)
        rule = Rule(Average(steps), [communicator(setting, self)], then=period.adapt, decides=True)
        run_local_steps(setting, [rule], owner="AdaComm")
