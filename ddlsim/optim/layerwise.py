"""Rules for large batches that scale each layer's step by the size of its weights: LARS and LAMB.

Layers are given as ``bounds``: tensor i of the flat vector is elements bounds[i] .. bounds[i + 1] - 1, so
``bounds`` starts at 0 and ends at n_params. :func:`bounds_of` makes it from a network's slots; a run fills it in
where it is empty (``with_bounds``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from ddlsim.arguments import Decay, Index, NotNegative, checked
from ddlsim.errors import ConfigError
from ddlsim.optim.rules import Adam, Array, Optimizer, OptimizerState, decayed


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

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]:
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

    def update(
        self, params: Array, gradient: Array, state: OptimizerState, rate: float
    ) -> tuple[Array, OptimizerState]:
        step, new = self._adam().direction(params, gradient, state)
        sizes, lengths = _norms(params, self.bounds), _norms(step, self.bounds)
        scaled = (sizes > 0.0) & (lengths > 0.0)
        ratios = np.where(scaled, sizes / np.where(scaled, lengths, 1.0), 1.0)
        return params - rate * _per_element(ratios, self.bounds, params) * step, new

    def _adam(self) -> Adam:
        return Adam(self.beta1, self.beta2, self.eps, self.weight_decay)
