"""Sparse parameter averaging: workers average a random part of their parameters in every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked, number
from ddlsim.compression.contract import count
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.plan.local_steps import Average
from ddlsim.plan.plan import Every
from ddlsim.runtime import Replica, RunContext, communicator
from ddlsim.runtime.fabric import fabric_label
from ddlsim.runtime.own_models import Rule
from ddlsim.strategies.local_sgd import OneAverage
from ddlsim.streams import stream

Indices = Value[npt.NDArray[np.int64]]


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
