"""Losses: the mean over the samples, and its gradient with respect to the network's output."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.nn import row_kernels
from ddlsim.nn.pass_state import Array, Buffers

__all__ = ["LOSSES", "Loss", "check_labels", "loss_of"]

Labels = npt.NDArray[np.int64] | Array
Loss = Literal["cross_entropy", "mean_squared_error"]
LOSSES: tuple[Loss, ...] = ("cross_entropy", "mean_squared_error")


def check_labels(
    kind: Loss, labels: npt.ArrayLike, n_samples: int, n_outputs: int, dtype: np.dtype[np.floating]
) -> Labels:
    """Return `labels` as classes (n,) int64, or as targets (n, n_outputs) for the squared error.

    Raises ConfigError when number, type or range do not fit.
    """
    array = np.asarray(labels)
    if array.shape[:1] != (n_samples,):
        raise ConfigError(f"labels of shape {array.shape} do not fit {n_samples} samples; give one each")
    if kind == "mean_squared_error":
        if array.size != n_samples * n_outputs:
            raise ConfigError(
                f"targets of shape {array.shape} do not fit {n_outputs} outputs; give ({n_samples}, {n_outputs})"
            )
        return np.ascontiguousarray(array, dtype).reshape(n_samples, n_outputs)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"labels of shape {array.shape} and type {array.dtype}: cross-entropy needs ({n_samples},) whole numbers"
        )
    if array.min() < 0 or array.max() >= n_outputs:
        bad = int(array.min() if array.min() < 0 else array.max())
        raise ConfigError(f"label {bad} is not one of the network's {n_outputs} classes 0..{n_outputs - 1}")
    return array.astype(np.int64, copy=False)


def loss_of(kind: Loss, outputs: Array, labels: Labels, n_total: int, buffers: Buffers) -> tuple[float, Array]:
    """Return the samples' part of the mean loss over `n_total` samples, and its gradient, shape of `outputs`.

    Cross-entropy: -log softmax(outputs)[label]. Squared error: the mean over the outputs of (output - target)^2.
    """
    gradient = buffers.get("gradient", *outputs.shape)
    if kind == "cross_entropy":
        total = row_kernels.cross_entropy(outputs, labels, gradient, n_total)  # type: ignore[arg-type]
    else:
        total = row_kernels.squared_error(outputs, labels, gradient, n_total)  # type: ignore[arg-type]
    return total / n_total, gradient
