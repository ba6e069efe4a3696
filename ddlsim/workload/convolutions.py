"""Times of convolutional networks, kernel by kernel, on devices with known convolution rates.

A convolution is an implicit matrix product in waves of tiles (:class:`~ddlsim.workload.products.Product`; Chetlur et
al. 2014, cuDNN, arXiv:1410.0759, section 3). Tensor cores need channels in the innermost dimension, so tensors in
PyTorch's default memory format (NCHW) are converted before and after. Batch normalisation, pooling and conversions take
the larger of their memory access time and the time that multiprocessors need for their elements.
"""

from __future__ import annotations

import math

import numpy as np

from ddlsim.workload.devices import Device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES, base_precision
from ddlsim.workload.products import (
    ACTIVATION_TRAFFIC,
    N_KERNELS,
    Floats,
    Product,
    Timing,
    bounded_by_launches,
    roofline_times,
)

#: bytes of the smallest slice of channels that tensor cores read, and channels of grouped convolutions that they
#: compute together (their matrices are block-diagonal)
SLICE_NBYTES, GROUPED_CHANNELS = 64, 64
#: alignment in bytes with which 1x1 convolutions read NCHW tensors without conversion
ALIGNMENT = 16
#: tensors that a normalisation moves in training: forward (statistics, result) and backward (sums, gradient)
NORM_TRAFFIC = (3.0, 5.0)
#: thread blocks per multiprocessor with which a normalisation reaches its rate, forward and backward
NORM_BLOCKS = (1.0, 2.0)
#: bytes per parameter that autocast moves, in each pass, to convert a weight or its gradient
CAST_NBYTES = FP32_NBYTES + 2.0
_NORMS = ("batch_norm", "instance_norm")
_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool")
_ACTIVATIONS = ("relu", "leaky_relu", "gelu", "tanh", "sigmoid", "squared_relu")


def has_convolutions(model: Model, device: Device, precision: str) -> bool:
    """Whether the model is a convolutional network, and the device has rates for it in this precision."""
    if device.kernels is None or device.kernels.convolution is None or any(layer.heads for layer in model.layers):
        return False
    convolutions = [layer for layer in model.layers if layer.type == "conv"]
    precision = base_precision(precision)
    has_rates = _kind(precision) in device.kernels.convolution.forward and precision in device.peak_flops
    return has_rates and bool(convolutions) and all(layer.window for layer in convolutions)


def convolution_products(
    layer: Layer, batch_size: float, precision: str = "fp32", *, merged: float | None = None
) -> tuple[Product, Product, Product]:
    """Return the matrix products of a convolution or a dense layer: output, gradient of the input, of the weight.

    `m` of the first is batch x output pixels, `n` output channels, `k` input channels x kernel. Tensor cores (all
    precisions but fp32) read whole slices of :data:`SLICE_NBYTES` of channels and compute several groups at once.
    `merged` sets their number.
    """
    window, inputs, outputs = max(layer.window, 1), layer.in_shape[0], layer.out_shape[0]
    channels = _weights(layer) / (outputs * window)  # input channels of a group
    groups = float(max(round(inputs / channels), 1))
    n = outputs / groups
    slice_ = 1.0 if precision == "fp32" else SLICE_NBYTES / ELEMENT_NBYTES[precision]
    if merged is None:
        merged = 1.0 if precision == "fp32" else max(1, math.ceil(GROUPED_CHANNELS / max(channels, n)))
    merged = min(groups, merged)
    groups, channels, n = groups / merged, merged * channels, merged * n
    k, k_back = (slice_ * math.ceil(width / slice_) for width in (channels, n))
    before, after = math.prod(layer.in_shape[1:]), math.prod(layer.out_shape[1:])
    return (
        Product(batch_size * after, n, k * window, groups),
        Product(batch_size * before, channels, k_back * window * after / before, groups),
        Product(k * window, n, batch_size * after, groups),
    )


def tile_waves(product: Product, tile: tuple[int, int], units: int) -> float:
    """Return the number of waves of full tiles that a product takes; a tile with half of the rows or columns takes 3/4
    of a full one, because it reads 3/4 of the operands."""
    rows, columns = tile
    options = ((rows, columns, 1.0), (rows, columns / 2, 0.75), (rows / 2, columns, 0.75))
    return min(
        share * math.ceil(math.ceil(product.m / r) * math.ceil(product.n / c) * product.copies / units)
        for r, c, share in options
    )


def converts(layer: Layer, precision: str, memory_format: str) -> bool:
    """Whether a convolution's tensors are converted from and to NCHW; not 1x1 ones of aligned image planes."""
    if memory_format != "nchw" or precision == "fp32" or layer.type != "conv":
        return False
    aligned = math.prod(layer.out_shape[1:]) * ELEMENT_NBYTES[precision] % ALIGNMENT == 0
    return layer.window > 1 or layer.in_shape[1:] != layer.out_shape[1:] or not aligned


def convolution_times(model: Model, timing: Timing) -> tuple[Floats, Floats]:
    """Return forward and backward times of each layer in s, each (n_layers,).

    Layers without a rule in :class:`LayerKernels` move the bytes of the roofline. A pass takes at least as long as the
    host's launches.
    """
    streaming = timing.kernels.streaming * timing.free
    passes = roofline_times(model, timing.device, timing.batch_size, timing.base, 1.0, streaming)
    kernels, times = LayerKernels(timing), np.stack(passes, axis=1)
    computed: dict[tuple[object, ...], tuple[float, float]] = {}
    for i, layer in enumerate(model.layers):
        key = (layer.type, layer.in_shape, layer.out_shape, layer.tensors, layer.window, layer.input_grad)
        if key not in computed:
            computed[key] = kernels.seconds(layer, (times[i, 0], times[i, 1]))
        times[i] = computed[key]
    counts = np.array([kernels.number(layer) for layer in model.layers])
    return bounded_by_launches(model, counts, timing.stack, (times[:, 0], times[:, 1]))


class LayerKernels:
    """Times of the kernels of single layers, on a device with known convolution rates."""

    def __init__(self, timing: Timing) -> None:
        rates = timing.kernels.convolution
        assert rates is not None
        self.timing, self.rates, self.precision = timing, rates, timing.base
        self.element, self.batch = ELEMENT_NBYTES[timing.base], timing.batch_size
        self.format = timing.stack.memory_format
        self.casts = self.element < FP32_NBYTES

    def number(self, layer: Layer) -> float:
        """Return the number of kernels that the host launches in the forward pass of a layer."""
        casts = self.casts * len(layer.tensors)
        if layer.type in ("conv", "dense"):
            return len(layer.tensors) + casts + 3 * converts(layer, self.precision, self.format)
        if layer.type in _NORMS:
            return 1 + self.casts
        return N_KERNELS.get(layer.type, 1 if layer.moved_nbytes else 0)

    def seconds(self, layer: Layer, streamed: tuple[float, float]) -> tuple[float, float]:
        """Return the forward and backward times of a layer in s; `streamed`: the times of its memory traffic."""
        n_in, n_out = (self.batch * math.prod(shape) for shape in (layer.in_shape, layer.out_shape))
        gradient = float(layer.input_grad)
        if layer.type in ("conv", "dense"):
            return self._product_layer(layer, n_out)
        if layer.type in _NORMS:
            return self._norm(layer, n_out, 0), self._norm(layer, n_out, 1)
        if layer.type in _POOLS:
            visited = n_in + (n_out * layer.window if layer.window else n_in)
            forward, backward = (self._elements(visited, rate, n_in + n_out) for rate in self.rates.pooled)
            return forward, gradient * backward
        if layer.type in _ACTIVATIONS:
            forward, backward = (self._elements(0.0, 1.0, traffic * n_out) for traffic in ACTIVATION_TRAFFIC)
            return forward, gradient * backward
        launch = self.timing.device.launch_time
        forward, backward = (seconds + launch if seconds else 0.0 for seconds in streamed)
        return forward, backward

    def _elements(self, n: float, rate: float, moved: float) -> float:
        """Return the time of a kernel that processes `n` elements, at a rate per multiprocessor, and moves `moved`."""
        units = self.timing.kernels.units - self.timing.occupied
        return max(n / (rate * units), moved * self.element / self.timing.bandwidth) + self.timing.device.launch_time

    def _norm(self, layer: Layer, n: float, backward: int) -> float:
        """Return the time of normalising `n` elements; in NCHW, each channel is one thread block."""
        nchw = self.format == "nchw"
        rate = self.rates.normalised[f"nchw-{8 * self.element:.0f}" if nchw else self.format][backward]
        blocks = layer.in_shape[0] * (self.batch if layer.type == "instance_norm" else 1)
        idle = max(1.0, NORM_BLOCKS[backward] * self.timing.kernels.units / blocks) if nchw else 1.0
        return self._elements(n * idle, rate, NORM_TRAFFIC[backward] * n)

    def products(self, layer: Layer) -> tuple[float, float, float]:
        """Return the times in s of a convolution or a dense layer, the gradient of its input, and that of its weight,
        with the conversions of their tensors."""
        tf32 = layer.type == "conv" or self.timing.stack.tf32_dense
        precision = self.precision if tf32 or self.precision != "tf32" else "fp32"
        numbers = self.batch * (math.prod(layer.in_shape) + math.prod(layer.out_shape)) + _weights(layer)
        shares = [part[_kind(precision)] for part in (self.rates.forward, self.rates.input, self.rates.weight)]
        if precision == "fp32" and layer.winograd:
            shares = [share * faster for share, faster in zip(shares, self.rates.winograd, strict=True)]
        grouped, ungrouped = (
            [
                self._product(product, precision, share, numbers, split=i == 2, dense=layer.type == "dense")
                for i, (product, share) in enumerate(zip(products, shares, strict=True))
            ]
            for products in (
                convolution_products(layer, self.batch, precision),
                convolution_products(layer, self.batch, precision, merged=math.inf),
            )
        )
        forward, of_input, of_weight = map(min, grouped, ungrouped)  # groups can be computed as zeros in the kernel
        if not converts(layer, self.precision, self.format):
            return forward, of_input, of_weight
        converted = self._elements(numbers, self.rates.converted, 2.0 * numbers)
        return forward + converted, of_input + converted, of_weight + converted

    def _product_layer(self, layer: Layer, n_out: float) -> tuple[float, float]:
        """Return the times of a convolution or a dense layer, with its bias and casts."""
        forward, of_input, of_weight = self.products(layer)
        cast = CAST_NBYTES * _weights(layer) / self.timing.bandwidth if self.casts else 0.0
        bias = layer.type == "conv" and len(layer.tensors) > 1  # added, and its gradient summed, by separate kernels
        added = bias * n_out * self.element / self.timing.bandwidth
        return forward + cast + 2.0 * added, of_weight + layer.input_grad * of_input + cast + added

    def _product(
        self, product: Product, precision: str, share: float, moved: float, *, split: bool, dense: bool
    ) -> float:
        """Return the time of a product in s. If it is `split`, units without a tile share the tiles of others.

        Kernels of `dense` layers, whose batches are often smaller than a tile, have no partly filled tiles.
        """
        kernels = self.timing.kernels
        units = kernels.units - self.timing.occupied
        rate = self.timing.device.peak_flops[precision] * share / kernels.units
        if dense:
            waves = product.m * product.n / (math.prod(kernels.tile) * units)
        else:
            waves = tile_waves(product, kernels.tile, 1 if split else units) / (units if split else 1)
        seconds = 2.0 * math.prod(kernels.tile) * product.k / rate * waves + kernels.tile_time * max(waves, 1.0)
        bandwidth = self.timing.device.memory_bandwidth * kernels.streaming * self.timing.free * self.rates.streaming
        return max(seconds, moved * ELEMENT_NBYTES[precision] / bandwidth) + self.timing.device.launch_time


def _kind(precision: str) -> str:
    """Return the precision whose rates apply: fp16 has those of bf16."""
    return "bf16" if precision == "fp16" else precision


def _weights(layer: Layer) -> float:
    return float(next((n for name, n in layer.tensors if name == "weight"), 0))
