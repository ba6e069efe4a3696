"""Local SGD with an outer optimizer, which treats the workers' mean model update as a gradient.

With the mean x of the workers' models and their common starting point w, the outer gradient is w - x. All workers hold
the same outer state, in float64, so it is never sent. Running statistics of batch normalisation are averaged without
the outer optimizer, whose momentum could make a variance negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, Decay, Positive, checked, one_of
from ddlsim.learning import Array, Value
from ddlsim.optim import Momentum, Optimizer
from ddlsim.runtime import Outer, Replica, RunContext, communicator
from ddlsim.runtime.fabric import fabric_label
from ddlsim.runtime.own_models import Rule, run_local_steps
from ddlsim.strategies.local_sgd import OneAverage


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

    program = OneAverage.program

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        slow = Outer(context.learner, Momentum(self.momentum))

        def move(mean: Value[Array]) -> Value[Array]:
            gamma = replicas[0].rate  # all have made as many steps
            return slow.towards(mean, self.slow_rate * gamma, unit=gamma) if gamma else slow.follow(mean)

        def merge(replica: Replica, model: Value[Array]) -> None:
            replica.worker.params = model
            if self.buffers == "reset":
                replica.forget()

        rule = Rule(self.average, [communicator(context, self)], then=move, merge=merge)
        replicas = run_local_steps(context, [rule], owner="SlowMo")
