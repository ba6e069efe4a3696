"""Update rules on one flat parameter vector w, given the gradient g and the learning rate eta.

An optimizer is a frozen dataclass with two pure functions::

    state = rule.init(params)
    params, state = rule.update(params, gradient, state, rate)

Both arrays have shape (n_params,). Nothing is changed in place, so a snapshot of parameters or state is a
reference. Weight decay is lambda, added to the gradient as lambda * w (L2 regularisation) except in Adam and
LAMB, where it is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Decay, NotNegative, checked

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What a rule remembers: moment vectors of shape (n_params,) and the number of updates made."""

    moments: tuple[Array, ...] = ()
    n_updates: int = 0


class Optimizer(Protocol):
    """An update rule; see the module's documentation."""

    def init(self, params: Array) -> OptimizerState: ...

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]: ...


def decayed(params: Array, gradient: Array, weight_decay: float) -> Array:
    """Return gradient + weight_decay * params, without arithmetic where there is no decay."""
    return gradient + weight_decay * params if weight_decay else gradient


@checked
@dataclass(frozen=True)
class SGD:
    """w <- w - eta (g + lambda w)."""

    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        return OptimizerState()

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]:
        step = decayed(params, gradient, self.weight_decay)
        return params - rate * step, OptimizerState((), state.n_updates + 1)


@checked
@dataclass(frozen=True)
class Momentum:
    """v <- beta v + g + lambda w;  w <- w - eta v (Polyak 1964, as in torch.optim.SGD).

    With ``nesterov``, w <- w - eta (g + lambda w + beta v), v being the new one (Sutskever et al. 2013,
    section 2, in the variables of Bengio et al. 2012, arXiv:1212.0901, equation 7).
    """

    beta: Decay = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        return OptimizerState((np.zeros_like(params),))

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]:
        slope = decayed(params, gradient, self.weight_decay)
        velocity = self.beta * state.moments[0] + slope
        step = slope + self.beta * velocity if self.nesterov else velocity
        return params - rate * step, OptimizerState((velocity,), state.n_updates + 1)


@checked
@dataclass(frozen=True)
class Adam:
    """Adaptive moments (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1), at update t = 1, 2, ...:

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;
    w <- w - eta (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + lambda w).
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        return OptimizerState((np.zeros_like(params), np.zeros_like(params)))

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]:
        step, new = self.direction(params, gradient, state)
        return params - rate * step, new

    def direction(self, params: Array, gradient: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
        """Return what the rate multiplies (decay included), and the new state."""
        t = state.n_updates + 1
        first = self.beta1 * state.moments[0] + (1.0 - self.beta1) * gradient
        second = self.beta2 * state.moments[1] + (1.0 - self.beta2) * gradient * gradient
        root = np.sqrt(second / (1.0 - self.beta2**t)) + self.eps
        step = decayed(params, first / (1.0 - self.beta1**t) / root, self.weight_decay)
        return step, OptimizerState((first, second), t)
