"""Roofline time of every layer, forward and backward, and its scaling to a known step time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddlsim.workload.devices import Device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: multiplications saved by Winograd's F(2x2, 3x3) in fp32 (Lavin and Gray 2016, arXiv:1509.09308, section
#: 4.1); tensor cores and half precision use direct algorithms
WINOGRAD = 2.25


def roofline_times(
    model: Model, device: Device, batch_size: int, precision: str, efficiency: float, memory_efficiency: float
) -> tuple[Floats, Floats]:
    """Return forward and backward seconds, each (n_layers,), for a batch.

    A layer takes the larger of FLOPs / (peak * efficiency) and bytes / (bandwidth * memory_efficiency); the
    bytes are its input and output per sample and its parameters once. The backward pass repeats this once per
    gradient that the layer computes. In fp32 Winograd convolutions count the FLOPs of the fast algorithm.
    """
    scale = ELEMENT_NBYTES[precision] / FP32_NBYTES  # the model counts fp32 bytes
    saved = np.array([WINOGRAD if layer.winograd and precision == "fp32" else 1.0 for layer in model.layers])
    flops = np.array([layer.flops for layer in model.layers]) / saved * batch_size
    moved = np.array([layer.moved_nbytes * batch_size + _weight_nbytes(layer) for layer in model.layers])
    n_gradients = np.array([int(layer.input_grad) + int(layer.n_params > 0) for layer in model.layers])
    arithmetic = flops / (device.peak_flops[precision] * efficiency)
    forward: Floats = np.maximum(arithmetic, moved * scale / (device.memory_bandwidth * memory_efficiency))
    return forward, forward * n_gradients


def _weight_nbytes(layer: Layer) -> float:
    """Return the fp32 bytes of parameters read in a pass; of embedding tables only the looked-up rows are."""
    return 0.0 if layer.type in ("embedding", "embedding_bag") else FP32_NBYTES * layer.n_params


def scaled(forward: Floats, backward: Floats, total: float) -> tuple[Floats, Floats]:
    """Return both, multiplied by one factor so that their sum is `total` seconds (to rounding)."""
    factor = total / (float(forward.sum()) + float(backward.sum()))
    return forward * factor, backward * factor
