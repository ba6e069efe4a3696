"""Update rules on one flat parameter vector w, given the gradient g and the learning rate eta.

An optimizer is a frozen dataclass with two pure functions::

    state = rule.init(params)
    params, state = rule.update(params, gradient, state, rate)

Both arrays have shape (n_params,). Nothing is changed in place, so a snapshot of parameters or state is a
reference. Weight decay is lambda, added to the gradient as lambda * w (L2 regularisation) except in Adam and
LAMB, where it is decoupled (Loshchilov and Hutter 2019, arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Decay, Index, NotNegative, checked
from ddlsim.errors import ConfigError

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What a rule remembers: moment vectors of shape (n_params,) and the number of updates made."""

    moments: tuple[Array, ...] = ()
    n_updates: int = 0


#: parameters and state after an update
Updated: TypeAlias = tuple[Array, OptimizerState]


class Optimizer(Protocol):
    """An update rule; see the module's documentation."""

    def init(self, params: Array) -> OptimizerState: ...

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated: ...


def decayed(params: Array, gradient: Array, weight_decay: float) -> Array:
    """Return gradient + weight_decay * params, without arithmetic where there is no decay."""
    return gradient + weight_decay * params if weight_decay else gradient


class _Slot(Protocol):
    @property
    def stop(self) -> int: ...


def bounds_of(slots: Iterable[_Slot]) -> tuple[int, ...]:
    """Return the bounds of tensors that follow one another in the flat vector."""
    return (0, *(slot.stop for slot in slots))


def with_layers(optimizer: Optimizer, slots: Iterable[_Slot]) -> Optimizer:
    """Return an optimizer that knows the network's tensors, if it wants to and does not know any yet."""
    if getattr(optimizer, "bounds", None) != ():
        return optimizer
    bound: Optimizer = optimizer.with_bounds(bounds_of(slots))  # type: ignore[attr-defined]
    return bound


@checked
@dataclass(frozen=True)
class _LayerWise:
    """A rule that knows the layers, or is told them by ``with_bounds``."""

    bounds: tuple[Index, ...] = ()

    def __post_init__(self) -> None:
        bounds, owner = self.bounds, type(self).__name__
        if bounds and (len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds))):
            raise ConfigError(f"{owner}: bounds = {bounds}: must start at 0 and increase; use bounds_of(network.slots)")

    def with_bounds(self, bounds: tuple[int, ...]) -> Self:
        """Return the rule for these layers."""
        return replace(self, bounds=bounds)

    def _check_length(self, params: Array) -> None:
        bounds, owner = self.bounds, type(self).__name__
        if not bounds:
            raise ConfigError(f"{owner}: bounds are missing; use bounds_of(network.slots)")
        if params.shape != (bounds[-1],):
            raise ConfigError(f"{owner}: bounds end at {bounds[-1]} but the parameters have shape {params.shape}")


def _norms(vector: Array, bounds: tuple[int, ...]) -> Array:
    """Return the Euclidean norm of each tensor, shape (len(bounds) - 1,), summed in float64."""
    squares = np.square(vector, dtype=np.float64)
    return np.sqrt(np.add.reduceat(squares, np.array(bounds[:-1])))


def _per_element(ratios: Array, bounds: tuple[int, ...], like: Array) -> Array:
    return np.repeat(ratios, np.diff(bounds)).astype(like.dtype)


@checked
@dataclass(frozen=True)
class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1).

    For each tensor: r = trust |w| / (|g| + lambda |w|) (1 where |w| or |g| is 0);
    v <- beta v + eta r (g + lambda w);  w <- w - v. The rate is inside the momentum, as in the paper.
    """

    beta: Decay = 0.9
    weight_decay: NotNegative = 0.0
    trust: NotNegative = 0.001

    def init(self, params: Array) -> OptimizerState:
        self._check_length(params)
        return OptimizerState((np.zeros_like(params),))

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
        sizes, slopes = _norms(params, self.bounds), _norms(gradient, self.bounds)
        scaled = (sizes > 0.0) & (slopes > 0.0)
        below = np.where(scaled, slopes + self.weight_decay * sizes, 1.0)
        ratios = np.where(scaled, self.trust * sizes / below, 1.0)
        local = _per_element(ratios, self.bounds, params)
        velocity = self.beta * state.moments[0] + rate * local * decayed(params, gradient, self.weight_decay)
        return params - velocity, OptimizerState((velocity,), state.n_updates + 1)


@checked
@dataclass(frozen=True)
class LAMB(_LayerWise):
    """Layer-wise Adam (You et al. 2020, arXiv:1904.00962, algorithm 2, with the identity for phi).

    u is Adam's step, decoupled decay included; for each tensor w <- w - eta |w| / |u| u (ratio 1 where a norm is 0).
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: NotNegative = 1e-6
    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        self._check_length(params)
        return self._adam().init(params)

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
        step, new = self._adam().direction(params, gradient, state)
        sizes, lengths = _norms(params, self.bounds), _norms(step, self.bounds)
        scaled = (sizes > 0.0) & (lengths > 0.0)
        ratios = np.where(scaled, sizes / np.where(scaled, lengths, 1.0), 1.0)
        return params - rate * _per_element(ratios, self.bounds, params) * step, new

    def _adam(self) -> Adam:
        return Adam(self.beta1, self.beta2, self.eps, self.weight_decay)


@checked
@dataclass(frozen=True)
class SGD:
    """w <- w - eta (g + lambda w)."""

    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        return OptimizerState()

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
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

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
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

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
        step, new = self.direction(params, gradient, state)
        return params - rate * step, new

    def direction(self, params: Array, gradient: Array, state: OptimizerState) -> Updated:
        """Return what the rate multiplies (decay included), and the new state."""
        t = state.n_updates + 1
        first = self.beta1 * state.moments[0] + (1.0 - self.beta1) * gradient
        second = self.beta2 * state.moments[1] + (1.0 - self.beta2) * gradient * gradient
        root = np.sqrt(second / (1.0 - self.beta2**t)) + self.eps
        step = decayed(params, first / (1.0 - self.beta1**t) / root, self.weight_decay)
        return step, OptimizerState((first, second), t)
