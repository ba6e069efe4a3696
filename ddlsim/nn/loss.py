"""Losses: the mean over the samples, and its gradient with respect to the network's output."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.nn import row_kernels
from ddlsim.nn.pass_state import Array, Buffers

Labels = npt.NDArray[np.int64] | Array
Loss = Literal["cross_entropy", "mean_squared_error"]
LOSSES: tuple[Loss, ...] = ("cross_entropy", "mean_squared_error")


def each_label(out_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a sample's classes: one, or one for each token where the output is (tokens, classes)."""
    return out_shape[:1] if len(out_shape) == 2 else ()


def classes(out_shape: tuple[int, ...]) -> int:
    """Return among how many classes a network with such outputs chooses."""
    return out_shape[-1] if len(out_shape) == 2 else math.prod(out_shape)


def check_labels(
    kind: Loss, labels: npt.ArrayLike, n_samples: int, out_shape: tuple[int, ...], dtype: np.dtype[np.floating]
) -> Labels:
    """Return `labels` as classes, int64, or as targets (n, n_outputs) for the squared error.

    Classes are (n,), or (n, tokens) where a network answers (tokens, classes) for each sample. Raises ConfigError when
    number, type or range do not fit.
    """
    array, n_outputs = np.asarray(labels), math.prod(out_shape)
    if array.shape[:1] != (n_samples,):
        raise ConfigError(f"labels of shape {array.shape} do not fit {n_samples} samples; give one each")
    if kind == "mean_squared_error":
        if array.size != n_samples * n_outputs:
            raise ConfigError(
                f"targets of shape {array.shape} do not fit {n_outputs} outputs; give ({n_samples}, {n_outputs})"
            )
        return np.ascontiguousarray(array, dtype).reshape(n_samples, n_outputs)
    shape = (n_samples, *each_label(out_shape))
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ConfigError(
            f"labels of shape {array.shape} and type {array.dtype}: cross-entropy needs {shape} whole numbers"
        )
    n_classes = classes(out_shape)
    if array.min() < 0 or array.max() >= n_classes:
        bad = int(array.min() if array.min() < 0 else array.max())
        raise ConfigError(f"label {bad} is not one of the network's {n_classes} classes 0..{n_classes - 1}")
    return array.astype(np.int64, copy=False)


def loss_of(kind: Loss, outputs: Array, labels: Labels, n_total: int, buffers: Buffers) -> tuple[float, Array]:
    """Return the samples' part of the mean loss over `n_total` samples, and its gradient, shape of `outputs`.

    Cross-entropy: -log softmax(outputs)[label], the mean over the tokens where each has a label. Squared error: the
    mean over the outputs of (output - target)^2.
    """
    gradient = buffers.get("gradient", *outputs.shape)
    if kind == "cross_entropy":
        flat = labels.reshape(-1)
        n_total *= len(flat) // len(outputs)
        rows, slopes = (array.reshape(len(flat), -1) for array in (outputs, gradient))
        total = row_kernels.cross_entropy(rows, flat, slopes, n_total)  # type: ignore[arg-type,unused-ignore]
    else:
        total = row_kernels.squared_error(outputs, labels, gradient, n_total)  # type: ignore[arg-type,unused-ignore]
    return total / n_total, gradient
