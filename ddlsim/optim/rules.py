"""Optimizers: update rules for a flat parameter vector w, with gradient g and learning rate eta.

An optimizer is a frozen dataclass with two pure functions::

    state = rule.init(params)
    params, state = rule.update(params, gradient, state, rate)

Both arrays have shape (n_params,). Nothing is changed in place, so a snapshot of parameters or state is a
reference. lambda is the weight decay, added to the gradient as lambda * w (L2 regularisation) except in Adam and
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
    """State of an optimizer between two updates.

    moments    vectors of shape (n_params,), such as Momentum's velocity
    n_updates  number of updates applied so far
    """

    moments: tuple[Array, ...] = ()
    n_updates: int = 0


#: parameters and state after an update
Updated: TypeAlias = tuple[Array, OptimizerState]


class Optimizer(Protocol):
    """Protocol of optimizers: frozen dataclasses with the pure functions ``init`` and ``update``.

    ``state = rule.init(params)`` returns the initial state. ``params, state = rule.update(params, gradient, state,
    rate)`` returns the parameters and the state after an update with the learning rate `rate`. Parameters and gradients
    are flat vectors of shape (n_params,).
    """

    def init(self, params: Array) -> OptimizerState: ...

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated: ...


def decayed(params: Array, gradient: Array, weight_decay: float) -> Array:
    """Return gradient + weight_decay * params, without arithmetic where there is no decay."""
    return gradient + weight_decay * params if weight_decay else gradient


class _Slot(Protocol):
    @property
    def stop(self) -> int: ...


def bounds_of(slots: Iterable[_Slot]) -> tuple[int, ...]:
    """Return the bounds of the tensors in the flat vector: 0, and the end of each tensor."""
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
        """Return the optimizer for tensors with these bounds."""
        return replace(self, bounds=bounds)

    def _check_length(self, params: Array) -> None:
        bounds, owner = self.bounds, type(self).__name__
        if not bounds:
            raise ConfigError(f"{owner}: bounds are missing; set bounds=bounds_of(network.slots)")
        if params.shape != (bounds[-1],):
            raise ConfigError(
                f"{owner}: bounds end at {bounds[-1]}, but the parameters have shape {params.shape}; use "
                "bounds_of(network.slots)"
            )


def _norms(vector: Array, bounds: tuple[int, ...]) -> Array:
    """Return the Euclidean norm of each tensor, shape (len(bounds) - 1,), summed in float64."""
    squares = np.square(vector, dtype=np.float64)
    return np.sqrt(np.add.reduceat(squares, np.array(bounds[:-1])))


def _per_element(ratios: Array, bounds: tuple[int, ...], like: Array) -> Array:
    return np.repeat(ratios, np.diff(bounds)).astype(like.dtype)


@checked
@dataclass(frozen=True)
class LARS(_LayerWise):
    """LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1).

    For each tensor w, with the learning rate eta, the gradient g and
    r = trust |w| / (|g| + lambda |w|), or 1 if |w| or |g| is 0:

    v <- beta v + eta r (g + lambda w);  w <- w - v

    As in the paper, the velocity v includes the learning rate.

    bounds        offsets of the tensors in the flat parameter vector, from 0 to its size, shape (n_tensors + 1,). They
                  are set automatically at the start of a run
    beta          momentum
    weight_decay  lambda, the weight decay (L2 regularisation)
    trust         trust coefficient, which scales the learning rate of each tensor
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
    """LAMB: layer-wise Adam (You et al. 2020, arXiv:1904.00962, algorithm 2, with the identity for phi).

    For each tensor w, with the learning rate eta and the step direction u of :class:`Adam`, which includes the
    decoupled weight decay:

    w <- w - eta (|w| / |u|) u, where |w| / |u| is replaced by 1 if either norm is 0

    bounds        offsets of the tensors in the flat parameter vector, from 0 to its size, shape (n_tensors + 1,). They
                  are set automatically at the start of a run
    beta1, beta2  decay rates of Adam's moment estimates
    eps           small number that is added to the denominator of Adam's step
    weight_decay  weight decay, decoupled from the gradient as in Adam
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
    """Plain stochastic gradient descent.

    Each update is ``w <- w - eta (g + lambda w)``, with the learning rate eta and the gradient g.

    weight_decay  lambda, the weight decay (L2 regularisation)
    """

    weight_decay: NotNegative = 0.0

    def init(self, params: Array) -> OptimizerState:
        return OptimizerState()

    def update(self, params: Array, gradient: Array, state: OptimizerState, rate: float) -> Updated:
        step = decayed(params, gradient, self.weight_decay)
        return params - rate * step, OptimizerState((), state.n_updates + 1)


@checked
@dataclass(frozen=True)
class Momentum:
    """SGD with momentum (Polyak 1964), as in torch.optim.SGD.

    Each update computes, with the learning rate eta and the gradient g:

    v <- beta v + g + lambda w;  w <- w - eta v

    beta          momentum
    nesterov      whether to use Nesterov momentum: ``w <- w - eta (g + lambda w + beta v)`` with the new v (Sutskever
                  et al. 2013, section 2, in the formulation of Bengio et al. 2012, arXiv:1212.0901, equation 7)
    weight_decay  lambda, the weight decay (L2 regularisation)
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
    """Adam with decoupled weight decay (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

    In update t = 1, 2, ..., with the learning rate eta and the gradient g:

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
    w <- w - eta (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + lambda w)

    beta1, beta2  decay rates of the moment estimates m and v
    eps           small number that is added to the denominator
    weight_decay  lambda, the weight decay, which is decoupled from the gradient as in AdamW
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
        """Return the step that the learning rate multiplies, including weight decay, and the new state."""
        t = state.n_updates + 1
        first = self.beta1 * state.moments[0] + (1.0 - self.beta1) * gradient
        second = self.beta2 * state.moments[1] + (1.0 - self.beta2) * gradient * gradient
        root = np.sqrt(second / (1.0 - self.beta2**t)) + self.eps
        step = decayed(params, first / (1.0 - self.beta1**t) / root, self.weight_decay)
        return step, OptimizerState((first, second), t)
