"""Local SGD that overlaps averaging with computation: DaSGD, Overlap-Local-SGD, CoCoD-SGD.

A worker waits only when an average is late. Optimizer states (momentum) stay with the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import Count, Decay, Index, Share, checked
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.plan.local_steps import Average
from ddlsim.plan.plan import Every
from ddlsim.runtime import Replica, RunContext, communicator
from ddlsim.runtime.fabric import fabric_label
from ddlsim.runtime.own_models import Rule
from ddlsim.strategies.local_sgd import OneAverage


def _continued(mean: Array, params: Array, begun: Array) -> Array:
    """Return mean + (params - begun), rounded once."""
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
        return f"DaSGD ({self.period} steps, {self.delay} late, {fabric_label(self.algorithm, self.cost)})"

    @property
    def average(self) -> Average:
        return Average(Every(self.period), self.delay)

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

    def rule(self, context: RunContext) -> Rule:
        begun: dict[int, Value[Array]] = {}

        def bring(replica: Replica) -> Value[Array]:
            begun[replica.worker.rank] = replica.worker.params
            return replica.worker.params

        def merge(replica: Replica, mean: Value[Array]) -> None:
            worker = replica.worker
            worker.params = worker.learner.plane.mix(_continued, mean, worker.params, begun[worker.rank])

        return Rule(self.average, [communicator(context, self)], bring=bring, merge=merge)
