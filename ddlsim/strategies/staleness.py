"""Treatment of stale gradients at a server: scaling and correction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from ddlsim.arguments import Decay, NotNegative, checked, number, one_of
from ddlsim.learning import Array, Value


class Scaling(Protocol):
    """The factor of a gradient of staleness tau; 1 for tau = 0."""

    def factor(self, staleness: int) -> float: ...


@dataclass(frozen=True)
class InverseStaleness:
    """Divide the learning rate by the staleness tau of a gradient.

    For tau = 0, the rate is not changed. See Zhang, Gupta, Lian and Liu 2016, arXiv:1511.05950, section 3.
    """

    def factor(self, staleness: int) -> float:
        """Return 1 / tau, and 1 for tau = 0."""
        return 1.0 / max(staleness, 1)


@checked
@dataclass(frozen=True)
class ExponentialPenalty:
    """Multiply the learning rate by rho^tau for a gradient of staleness tau.

    See Chan and Lane 2014, Interspeech, "Distributed asynchronous optimization of convolutional neural networks".

    rho  factor applied to the learning rate for each update that the gradient missed; above 0 and at most 1
    """

    rho: Annotated[float, number(0.0, 1.0, above=True)]

    def factor(self, staleness: int) -> float:
        """Return rho^tau."""
        return self.rho**staleness


@dataclass(frozen=True)
class SquareRootStaleness:
    """Divide the learning rate by sqrt(1 + tau) for a gradient of staleness tau.

    See Xie, Koyejo and Gupta 2019, arXiv:1903.03934 (polynomial with a = 1/2), and Nguyen et al. 2022,
    arXiv:2106.06639.
    """

    def factor(self, staleness: int) -> float:
        """Return 1 / sqrt(1 + tau)."""
        return 1.0 / math.sqrt(1 + staleness)


NAMED: dict[str, Scaling] = {"inverse": InverseStaleness(), "square-root": SquareRootStaleness()}
ScalingChoice = Annotated[str, one_of(*NAMED)] | Scaling | None


def scaling_named(scaling: ScalingChoice) -> Scaling | None:
    """Return the scaling of a name, the scaling itself, or None."""
    return NAMED[scaling] if isinstance(scaling, str) else scaling


def scaled(gradient: Value[Array], scaling: Scaling | None, staleness: int) -> Value[Array]:
    """Return the gradient times its factor; the gradient itself if that is 1."""
    factor = scaling.factor(staleness) if scaling is not None else 1.0
    return gradient if factor == 1.0 else factor * gradient


@checked
@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD: delay compensation for stale gradients (Zheng et al. 2017, ICML, arXiv:1609.08326, algorithm 2).

    Instead of a gradient g, the server applies

        g + lambda * g * g * (w_t - w_bak),

    where w_t are the current parameters, w_bak are the parameters that the worker pulled, and g * g approximates the
    diagonal of the Hessian.

    variance_control  lambda, the strength of the correction; with `adaptive`, the paper's lambda_0
    adaptive          m, the decay rate of a running mean square of the gradients. Each element's lambda is computed
                      from this mean (DC-ASGD-a): MeanSquare_t = m MeanSquare_(t-1) + (1 - m) g * g, and
                      lambda_t = lambda_0 / sqrt(MeanSquare_t + 1e-7). None: constant lambda (DC-ASGD-c)
    """

    variance_control: NotNegative = 0.04
    adaptive: Decay | None = None

    def compensated(
        self, gradient: Value[Array], params: Value[Array], backup: Value[Array], mean_square: Value[Array] | None
    ) -> tuple[Value[Array], Value[Array] | None]:
        """Return an estimate of the gradient, shape (n,), at `params`, and the updated mean square.

        The estimate keeps the gradient's batch statistics.

        gradient     stale gradient
        params       current parameters
        backup       parameters at which the gradient was computed
        mean_square  running mean square of the earlier gradients; None before the first gradient
        """
        plane = gradient.plane
        if self.adaptive is None:
            return plane.apply(self._constant, gradient, params, backup).with_statistics_of(gradient), None
        decay = self.adaptive
        square = plane.apply(lambda g: (1.0 - decay) * g * g, gradient)
        mean = square if mean_square is None else decay * mean_square + square
        return plane.apply(self._adaptive, gradient, params, backup, mean).with_statistics_of(gradient), mean

    def _constant(self, gradient: Array, params: Array, backup: Array) -> Array:
        return gradient + self.variance_control * gradient * gradient * (params - backup)

    def _adaptive(self, gradient: Array, params: Array, backup: Array, mean_square: Array) -> Array:
        lambdas = self.variance_control / np.sqrt(mean_square + 1e-7)
        corrected: Array = gradient + lambdas * gradient * gradient * (params - backup)
        return corrected
