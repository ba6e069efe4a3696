"""Choice of an algorithm for each convolution, with workspaces that fit in the remaining memory.

Zou et al. 2017 (arXiv:1709.06622) formulate it as an integer program: minimise the total time, with one algorithm per
layer, subject to a bound on the total workspace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, NotNegative, checked, quantity
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.readable import size
from ddlsim.units import si
from ddlsim.workload.compute import Roofline
from ddlsim.workload.devices import Device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import FP32_NBYTES
from ddlsim.workload.products import WINOGRAD


@checked
@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a convolution: `seconds` of its forward and backward passes, and `nbytes` of workspace."""

    name: str
    seconds: NotNegative
    nbytes: NotNegative = 0.0


#: layer -> candidate algorithms
Options = Annotated[Mapping[str, tuple[Algorithm, ...]], "a mapping from layer names to lists of Algorithm objects"]
Memory = Annotated[float | str, quantity("bytes", zero=True)]


@checked
def choose_algorithms(options: Options, memory: Memory) -> dict[str, Algorithm]:
    """Return the algorithm of each layer that minimises the total time.

    memory  maximum total size of all workspaces in bytes

    Measured options, such as those of ``cudnnFindConvolutionForwardAlgorithm``, are more accurate than
    :func:`convolution_options`. Raises ConfigError for a layer without algorithms, and if no choice fits.
    """
    bound = si(memory, "bytes")
    for layer, algorithms in options.items():
        if not algorithms:
            raise ConfigError(
                f"choose_algorithms: options[{layer!r}] is empty; each layer needs at least one algorithm"
            )
    least = sum(min(algorithm.nbytes for algorithm in algorithms) for algorithms in options.values())
    if least > bound:
        raise ConfigError(
            f"choose_algorithms: memory = {memory!r}: the smallest workspaces need {size(least)} in total; use more "
            "memory, or add options without a workspace"
        )
    if not options:
        return {}
    with needs("scipy"):
        from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(layer, algorithm) for layer, algorithms in options.items() for algorithm in algorithms]
    seconds = np.array([algorithm.seconds for _, algorithm in flat])
    nbytes = np.array([algorithm.nbytes for _, algorithm in flat])
    layers = list(options)
    one_each = np.array([[float(layer == other) for other, _ in flat] for layer in layers])
    unit = max(float(nbytes.max()), 1.0)  # for solvers, numbers should be near 1
    solved = milp(
        seconds / max(float(seconds.max()), 1e-30),
        constraints=[
            LinearConstraint(one_each, 1.0, 1.0),
            LinearConstraint(nbytes[None, :] / unit, -np.inf, min(bound, float(nbytes.sum())) / unit),
        ],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        reason = solved.message
        raise ConfigError(f"choose_algorithms: the solver found no solution: {reason}")
    return {layer: algorithm for (layer, algorithm), taken in zip(flat, solved.x, strict=True) if taken > 0.5}


@checked
def convolution_options(model: Model, device: Device, batch_size: Count) -> dict[str, tuple[Algorithm, ...]]:
    """Return the algorithms for a model's fp32 convolutions, with times from the device's roofline.

    "implicit_gemm"  a matrix product whose windows are not stored: no workspace
    "winograd"       F(2x2, 3x3) with transformed tiles in memory (Lavin and Gray 2016, arXiv:1509.09308, section 4.1):
                     16 numbers for every 2 x 2 outputs and channel in and out, 16/9 of the weights; 2.25 times fewer
                     multiplications. Only for 3 x 3 kernels with stride 1
    "fft"            by transforms of whole images (Mathieu, Henaff and LeCun 2013, arXiv:1312.5851, section 2): for S
                     images, f channels in and f' out, padded to n pixels, 2.5 n log2 n (S f + f f' + S f') + 4 n S f f'
                     operations, and n (S f + f f' + S f') numbers. Only for stride 1

    Workspaces are written and read once. The backward pass repeats the forward pass for each gradient.
    """
    return {layer.name: _algorithms(layer, device, batch_size) for layer in model.layers if layer.type == "conv"}


def _algorithms(layer: Layer, device: Device, batch_size: int) -> tuple[Algorithm, ...]:
    rate = device.peak_flops["fp32"] * device.efficiency["fp32"]
    bandwidth = device.memory_bandwidth * Roofline().memory_efficiency
    passes = 1 + int(layer.input_grad) + int(layer.n_params > 0)
    moved = layer.moved_nbytes * batch_size + FP32_NBYTES * layer.n_params

    def algorithm(name: str, flops: float, numbers: float) -> Algorithm:
        nbytes = FP32_NBYTES * numbers
        return Algorithm(name, passes * max(flops / rate, (moved + 2.0 * nbytes) / bandwidth), nbytes)

    flops = layer.flops * batch_size
    algorithms = [algorithm("implicit_gemm", flops, 0.0)]
    n_weights = dict(layer.tensors)["weight"]
    c_in, c_out, out_pixels = layer.in_shape[0], layer.out_shape[0], math.prod(layer.out_shape[1:])
    if layer.winograd:
        numbers = 4.0 * batch_size * out_pixels * (c_in + c_out) + 16.0 / 9.0 * n_weights
        algorithms.append(algorithm("winograd", flops / WINOGRAD, numbers))
    kernel = math.isqrt(n_weights // (c_in * c_out))
    by_one = all(out > n - kernel for n, out in zip(layer.in_shape[1:], layer.out_shape[1:], strict=True))
    if kernel > 1 and by_one and len(layer.in_shape) == 3 and n_weights == c_in * c_out * kernel**2:
        pixels = float(math.prod(out + kernel - 1 for out in layer.out_shape[1:]))
        images = batch_size * c_in + c_in * c_out + batch_size * c_out
        products = 4.0 * pixels * batch_size * c_in * c_out
        algorithms.append(algorithm("fft", 2.5 * pixels * math.log2(pixels) * images + products, pixels * images))
    return tuple(algorithms)
