"""Linear fit of the compute time of a training step, c0 + c1 * batch size, to measured steps of one worker."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import Count, Positive, checked
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.readable import seconds
from ddlsim.run.seeds import t_quantile
from ddlsim.validation.log_fit import Floats, sampled, spread_of, wider
from ddlsim.workload.compute import Affine, Measured


@dataclass(frozen=True, eq=False)
class ComputeFit:
    """Linear fit of the step time of `model`: ``c0 + c1 * batch_size``, in s.

    covariance   covariance of (c0, c1), shape (2, 2)
    spread, dof  standard deviation of ln(predicted / measured), and its degrees of freedom
    batch_sizes  measured batch sizes. If there is only one, the line passes through the origin, and :attr:`compute`
                 rejects other sizes
    """

    model: str
    c0: float
    c1: float
    covariance: Floats
    spread: float
    dof: float
    batch_sizes: tuple[int, ...]

    @property
    def compute(self) -> Affine | Measured:
        """The fit as a value for the ``compute`` field of an experiment."""
        return self.times(1.0)

    @checked
    def times(self, factor: Positive) -> Affine | Measured:
        """Return the fit multiplied by `factor`, as a value for the ``compute`` field of an experiment."""
        if len(self.batch_sizes) == 1:
            batch = self.batch_sizes[0]
            return Measured(factor * (self.c0 + self.c1 * batch), batch)
        return Affine(factor * self.c0, factor * self.c1)

    def sampled(self, random: np.random.Generator) -> ComputeFit:
        """Return the fit with randomly sampled coefficients, multiplied by a factor sampled from the scatter."""
        factor = wider(self.dof)
        moved = factor * sampled(random, self.covariance)
        c0, c1 = np.maximum(np.array([self.c0, self.c1]) + moved, (0.0, 1e-3 * self.c1)).tolist()
        error = math.exp(factor * self.spread * random.standard_normal())
        return dataclasses.replace(self, c0=c0 * error, c1=c1 * error)

    @checked
    def interval(self, batch_size: Count) -> tuple[float, float, float]:
        """Return the 95 % prediction interval (low, value, high) of a step time, in s."""
        row = np.array([1.0, batch_size])
        value = self.c0 + self.c1 * batch_size
        sd = math.sqrt(float(row @ self.covariance @ row) / value**2 + self.spread**2)
        factor = math.exp(t_quantile(self.dof) * sd)
        return value / factor, value, value * factor


def step_text(c0: float, c1: float) -> str:
    """Return a fitted step time as text, with a remark if it does not depend on the batch size."""
    remark = "" if c1 else " (at its limit, because times do not grow with the batch size; check the batch sizes)"
    return f"{seconds(c0)} + {seconds(c1)} x batch size{remark}"


@checked
def fit_compute(model: str, batch_sizes: Sequence[Count], seconds: Sequence[Positive]) -> ComputeFit:
    """Fit a line with non-negative coefficients to step times, by least squares on the relative errors.

    model        name of the model
    batch_sizes  (n,) batch size of each measured step
    seconds      (n,) duration of each measured step, in s
    """
    if not batch_sizes or len(batch_sizes) != len(seconds):
        raise ConfigError(
            f"fit_compute: got {len(batch_sizes)} batch sizes and {len(seconds)} step times; pass one step time per "
            "batch size, and at least one of each"
        )
    with needs("scipy"):
        from scipy.optimize import nnls

    batch, times = np.asarray(batch_sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    sizes = tuple(sorted(set(np.asarray(batch_sizes).tolist())))
    columns = np.column_stack([np.ones_like(batch), batch]) / times[:, None]
    if len(sizes) == 1:
        columns[:, 0] = 0.0
    coefficients, _ = nnls(columns, np.ones(len(times)))
    spread, dof = spread_of(float(np.sum((columns @ coefficients - 1.0) ** 2)), len(times), min(len(sizes), 2))
    covariance = np.asarray(spread**2 * np.linalg.pinv(columns.T @ columns, hermitian=True))
    c0, c1 = coefficients.tolist()
    return ComputeFit(model, c0, c1, covariance, spread, dof, sizes)
