"""`Outer`: a model that workers hold together, moved by an optimizer of its own when they have made local steps."""

from __future__ import annotations

import numpy as np

from ddlsim.learning import Array, Learner, Value
from ddlsim.learning.learner import State
from ddlsim.optim import Optimizer, OptimizerState
from ddlsim.optim.layerwise import with_layers


class Outer:
    """The model w, which an outer ``optimizer`` moves while the run's own one makes the workers' local steps.

    How far the workers have gone is its gradient: w - mean_i(x_i), or what they say of it (Reddi et al. 2021, "Adaptive
    Federated Optimization", arXiv:2003.00295, algorithm 1). It computes in float64 and rounds w once, to what the
    parameters are. Running statistics of batch normalisation have no outer optimizer (momentum could carry a variance
    below 0).

    params  w, shape (n_params,); the initial model at first
    """

    def __init__(self, learner: Learner, optimizer: Optimizer) -> None:
        slots = () if learner.task is None else learner.task.network.slots
        self.plane = learner.plane
        self.optimizer = with_layers(optimizer, slots)
        self.params = learner.initial
        self._state: State = self.plane.apply(lambda w: self.optimizer.init(w.astype(np.float64)), self.params)

    def towards(self, mean: Value[Array], rate: float, unit: float = 1.0) -> Value[Array]:
        """Return w after a step of `rate` with the gradient (w - mean) / unit; its statistics are those of `mean`."""

        def away(params: Array, mean: Array) -> Array:
            return (params.astype(np.float64) - mean) / unit

        self.params = self.step(self.plane.apply(away, self.params, mean), rate).carrying(mean)
        return self.params

    def follow(self, mean: Value[Array]) -> Value[Array]:
        """Return `mean`, which is w now."""
        self.params = mean
        return mean

    def step(self, gradient: Value[Array], rate: float) -> Value[Array]:
        """Return w after a step of `rate`; its statistics take in those of the batches that the gradient is made of."""

        def moved(params: Array, gradient: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
            wide = params.astype(np.float64), gradient.astype(np.float64)
            after, state = self.optimizer.update(*wide, state, rate)
            return after.astype(params.dtype), state

        statistics = self.params.statistics
        if statistics is not None:
            statistics = self.plane.absorb(statistics, gradient.batch_statistics)
        done = self.plane.apply(moved, self.params, gradient, self._state)
        self.params = self.plane.apply(lambda pair: pair[0], done, statistics=statistics)
        self._state = self.plane.apply(lambda pair: pair[1], done)
        return self.params
