"""The gradient noise scale: the batch size beyond which larger batches bring little.

McCandlish, Kaplan, Amodei et al. 2018 (arXiv:1812.06162). Gradients of single samples scatter about the true gradient G
with covariance Sigma, so the squared norm of the mean gradient of B samples has the expectation |G|^2 + tr(Sigma) / B.
Up to B_simple = tr(Sigma) / |G|^2 (equation 2.9), doubling the batch nearly halves the number of updates; far beyond
it, the number of updates stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Seed, checked, integer
from ddlsim.data import load_data
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.learning.values import Array
from ddlsim.nn.network import build_network
from ddlsim.streams import stream
from ddlsim.workload.model import Model


@dataclass(frozen=True)
class NoiseScale:
    """Unbiased estimates of the terms of the gradient noise scale.

    gradient_square  estimate of |G|^2. Near a minimum it can be negative; then ``samples`` is infinite, and more
                     batches are needed
    variance         estimate of tr(Sigma)
    n_batches        number of gradients used
    """

    gradient_square: float
    variance: float
    n_batches: int

    @property
    def samples(self) -> float:
        """The noise scale B_simple, in samples per update of all workers together."""
        return self.variance / self.gradient_square if self.gradient_square > 0.0 else math.inf


def noise_scale(gradients: Iterable[Array], batch_size: Count) -> NoiseScale:
    """Estimate the gradient noise scale from mean gradients of `batch_size` independent samples each.

    Appendix A.1 of the paper with B_small = b = `batch_size` and B_big = n b, whose gradient is their mean:
    |G|^2 ~ (n |G_big|^2 - |G_small|^2) / (n - 1),  tr(Sigma) ~ b n (|G_small|^2 - |G_big|^2) / (n - 1), where
    |G_small|^2 is the mean over the gradients. Raises ConfigError for fewer than two.
    """
    total, squares, n = np.zeros(0), 0.0, 0
    for gradient in gradients:
        wide = gradient.astype(np.float64)
        total = wide if n == 0 else total + wide
        squares += float(wide @ wide)
        n += 1
    if n < 2:
        raise ConfigError(
            f"noise_scale: got {n} gradients of {batch_size} samples; pass at least 2 gradients of at least 1 sample"
        )
    small, big = squares / n, float(total @ total) / n**2
    return NoiseScale((n * big - small) / (n - 1), batch_size * n * (small - big) / (n - 1), n)


@checked
def gradient_noise_scale(
    model: str | Path | Model,
    data: str | Path | DataSet,
    params: Array | None = None,
    *,
    batch_size: Count = 16,
    n_batches: Annotated[int, integer(2)] = 100,
    seed: Seed = 0,
) -> NoiseScale:
    """Estimate the gradient noise scale of a model on a data set.

    params      parameters at which to estimate the scale, float32, shape (n_params,), such as ``result.params``; None:
                the initial parameters
    batch_size  number of samples per gradient, drawn with replacement
    n_batches   number of gradients to compute
    seed        seed of the initial parameters and the samples

    Dropout counts as noise. With batch normalisation, a gradient is not a mean over samples, so the estimate is valid
    only for batch sizes close to `batch_size`. Raises ConfigError if the model and the data do not match.
    """
    network = build_network(model, seed)
    samples = data if isinstance(data, DataSet) else load_data(data)
    at = network.initial_params if params is None else params
    draws = stream(seed, 0, "noise scale")
    batches = (draws.integers(samples.n_samples, size=batch_size) for _ in range(n_batches))
    gradients = (network.loss_and_gradient(at, samples.x[i], samples.labels[i], draws)[1] for i in batches)
    return noise_scale(gradients, batch_size)
