"""Roofline times of layers, matrix products by size, and transformer layers kernel by kernel.

The roofline has one efficiency for all arithmetic. For devices with known kernel rates
(:class:`~ddlsim.workload.devices.Kernels`), times are more detailed. A product of m x k by k x n numbers is computed in
waves of tiles on all multiprocessors, and small products leave many of these idle (NVIDIA, Matrix Multiplication
Background User's Guide, tile and wave quantization: an A100 has 108 multiprocessors and tiles of 256 x 128). Products
whose operands take longer to read and write than to multiply are limited by memory. If a layer's kernels finish before
the framework launches the next one, the launches determine the time.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Positive, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device, DeviceLike, Kernels, device_names, load_device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import (
    ELEMENT_NBYTES,
    FP32_NBYTES,
    LOW_PRECISIONS,
    base_precision,
    has_products,
    product_type,
)
from ddlsim.workload.roles import ATTENTION, COLUMN, INNER, ROW, VOCABULARY, blocks, rank_tensors
from ddlsim.workload.stacks import Stack

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: multiplications saved by Winograd's F(2x2, 3x3) in fp32 (Lavin and Gray 2016, arXiv:1509.09308, section
#: 4.1); tensor cores and half precision use direct algorithms
WINOGRAD = 2.25


def roofline_times(
    model: Model, device: Device, batch_size: float, precision: str, efficiency: float, memory_efficiency: float
) -> tuple[Floats, Floats]:
    """Return forward and backward seconds, each (n_layers,), for a batch.

    A layer takes the larger of FLOPs / (peak * efficiency) and bytes / (bandwidth * memory_efficiency); the
    bytes are its input and output per sample and its parameters once. The backward pass repeats this once per
    gradient that the layer computes. In fp32 Winograd convolutions count the FLOPs of the fast algorithm.
    """
    scale = ELEMENT_NBYTES[precision] / FP32_NBYTES  # the model's sizes are those of fp32
    saved = np.array([WINOGRAD if layer.winograd and precision == "fp32" else 1.0 for layer in model.layers])
    flops = np.array([layer.flops for layer in model.layers]) / saved * batch_size
    # of embedding tables, the looked-up rows only, which are part of the layer's traffic
    read = [0.0 if layer.type in ("embedding", "embedding_bag") else layer.n_params for layer in model.layers]
    moved = np.array([layer.moved_nbytes for layer in model.layers]) * batch_size + FP32_NBYTES * np.array(read)
    n_gradients = np.array([int(layer.input_grad) + int(layer.n_params > 0) for layer in model.layers])
    arithmetic = flops / (device.peak_flops[precision] * efficiency)
    forward: Floats = np.maximum(arithmetic, moved * scale / (device.memory_bandwidth * memory_efficiency))
    return forward, forward * n_gradients


def launched(model: Model, timing: Timing, passes: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return forward and backward times of layers in s; each pass takes at least as long as the host's launches."""
    counts = np.array([_n_kernels(layer, timing) for layer in model.layers])
    return bounded_by_launches(model, counts, timing.stack, passes)


def bounded_by_launches(
    model: Model, counts: Floats, stack: Stack, passes: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Return forward and backward times of layers in s, where each pass takes at least as long as the host's launches.

    counts  number of kernels of each layer in the forward pass

    The host runs ahead of the device until the end of a pass, so only the sum over all layers has a lower bound. The
    difference is divided among the layers after embedding tables, because a rank's share of the tables varies.
    """
    total, counts = counts.sum(), counts.copy()
    counts[: 1 + max((i for i, layer in enumerate(model.layers) if layer.model_parallel), default=-1)] = 0.0
    times = []
    for seconds, launch in zip(passes, (stack.forward_launch, stack.backward_launch), strict=True):
        missing = max(0.0, launch * total - seconds.sum())
        times.append(seconds + missing * counts / max(counts.sum(), 1.0))
    return times[0], times[1]


def scaled(forward: Floats, backward: Floats, total: float) -> tuple[Floats, Floats]:
    """Return both, multiplied by one factor so that their sum is `total` seconds (to rounding)."""
    factor = total / (float(forward.sum()) + float(backward.sum()))
    return forward * factor, backward * factor


#: number of kernels per layer in the forward pass, if not one. Attention: four products, transpositions before and
#: after them, softmax and dropout. Dense layers with bias: also the addition. Experts: one product each for all experts
#: together, activation, router, choice, copies and sum.
N_KERNELS = {
    "attention": 8,
    "cross_attention": 10,
    "swiglu": 3,
    "embedding": 2,
    "tied_embedding": 2,
    "mixture_of_experts": 8,
}
#: elements read and written per element of attention's matrices besides the products: mask, softmax, dropout
MATRIX_TRAFFIC, DROPPED_TRAFFIC = 4.0, 2.0
#: the same if scale, mask and softmax are not fused, forward and backward: conversion to fp32 (3 numbers of 16 bits),
#: scale and mask (4 each), softmax (4; 6 backward), conversion back (3); and the number of additional kernels
#: (Megatron-LM, megatron/model/fused_softmax.py: forward_torch_softmax)
UNFUSED_TRAFFIC, UNFUSED_KERNELS = (18.0, 20.0), 4
#: share of the loss's traffic in the forward pass: of 32 bytes per logit in fp32, 18 for conversion, maximum,
#: exponentials and their sum, and 14 in the backward pass
LOSS_FORWARD = 18.0 / 32.0
#: rate of FP8 products that add up in full precision (``use_fast_accum=False``) relative to others: 1,242 of 1,296
#: TFLOP/s on an H100 (accuracy/data/stack_h100.jsonl)
SLOW_ACCUMULATION = 0.959
#: elements that SwiGLU moves besides its products: gate, up and their product; backward, with both gradients
SWIGLU_TRAFFIC = (3.0, 5.0)
#: the same for an activation with one input
ACTIVATION_TRAFFIC = (2.0, 3.0)
#: additional tokens that halve the relative loss of fused attention on short sequences, forward and backward: measured
#: on H100 and H200, sequences of 2,048 to 32,768 tokens in heads of 128 (accuracy/data/gpu_h100.json)
ATTENTION_RAMPS = (300.0, 1100.0)


class Product(NamedTuple):
    """`copies` concurrent products of (m, k) by (k, n) numbers; `core`: inside attention, not kept in memory."""

    m: float
    n: float
    k: float
    copies: float = 1.0
    core: bool = False


def has_kernels(model: Model, device: Device, precision: str) -> bool:
    """Whether kernel times of this model's layers are known: for transformers, on calibrated devices."""
    return _has_products(device, precision) and any(layer.heads for layer in model.layers)


def default_precision(model: Model, *devices: Device) -> str:
    """Return the precision of runs that set none: bf16 for transformers on devices with known kernel times, TF32 for
    convolutional networks on devices that have it, else fp32."""
    if all(has_kernels(model, device, "bf16") for device in devices):
        return "bf16"
    kinds = {"attention" if layer.heads else layer.type for layer in model.layers}
    convolves = "conv" in kinds and "attention" not in kinds
    return "tf32" if convolves and all("tf32" in device.peak_flops for device in devices) else "fp32"


def _has_products(device: Device, precision: str) -> bool:
    """Whether the device's rate of matrix products is known."""
    has_rate = device.kernels is not None and device.kernels.fraction(precision) is not None
    return has_rate and has_products(precision, device.peak_flops)


def check_kernels(model: Model, device: Device, precision: str) -> None:
    """Raise ConfigError if kernel times of this model's layers are unknown on a device."""
    if not any(layer.heads for layer in model.layers):
        raise ConfigError(
            "PerKernel requires a transformer, or a convolutional network on a device with rates of convolutions (such "
            f"as h100) in {precision}; for {model.name} on {device.name}, use Roofline() instead"
        )
    if not has_kernels(model, device, precision):
        names = [name for name in device_names() if has_kernels(model, load_device(name), precision)]
        dtypes = [name for name in ELEMENT_NBYTES if has_kernels(model, device, name)]
        remedy = f"devices with rates: {', '.join(names)}" if names else f"use {' or '.join(dtypes) or 'Roofline()'}"
        raise ConfigError(f"PerKernel: {device.name} has no kernel rates for {precision}; {remedy}")


def product_time(
    product: Product, device: Device, precision: str, share: float = 1.0, units: int | None = None
) -> float:
    """Return the time of a matrix product in s on a device with known kernel rates.

    share  fraction of the device's rate of products that its software reaches
    units  number of multiprocessors available; None: all. Persistent kernels are launched for all of them, so if some
           are occupied, one more tile's time is added
    """
    kernels = device.kernels
    assert kernels is not None
    fraction = kernels.fraction(precision)
    assert fraction is not None
    m, n, k, copies, _ = product
    units = kernels.units if units is None else units
    rate = device.peak_flops[product_type(precision)] * fraction * share / kernels.units
    seconds = min(
        math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * copies / units)
        * (2.0 * (rows * columns) * k / rate + kernels.tile_time)
        for tile in (kernels.tile, *kernels.tiles)
        for rows, columns in (tile, tile[::-1])
    )
    if kernels.persistent_tile is not None and units < kernels.units:
        seconds += 2.0 * math.prod(kernels.persistent_tile) * k / rate
    low = LOW_PRECISIONS.get(precision)
    element = ELEMENT_NBYTES[precision]
    moved = copies * ((element if low is None else low.operand) * (m * k + k * n) + element * m * n)
    return max(seconds, moved / (device.memory_bandwidth * kernels.streaming))


_Products = Annotated[str, one_of("fp16", "bf16", *LOW_PRECISIONS)]


@checked
def gemm_efficiency(device: DeviceLike, m: Positive, n: Positive, k: Positive, precision: _Products = "fp16") -> float:
    """Return the share of the peak FLOP/s that a product of (m, k) by (k, n) numbers reaches on a device.

    Raises ConfigError if the device's rate in that precision is unknown.
    """
    machine = load_device(device)
    if not _has_products(machine, precision):
        names = [name for name in device_names() if _has_products(load_device(name), precision)]
        listed = ", ".join(names)
        raise ConfigError(
            f"gemm_efficiency: {machine.name} has no kernel rates for {precision}; devices with rates: {listed}"
        )
    peak = machine.peak_flops[product_type(precision)]
    return 2.0 * m * n * k / (product_time(Product(m, n, k), machine, precision) * peak)


def layer_products(layer: Layer, role: str, batch_size: float, tensor: int = 1) -> tuple[Product, ...]:
    """Return the matrix products of a layer's forward pass on one of `tensor` ranks; none for other layers."""
    if layer.heads:
        return _attention_products(layer, batch_size, tensor)
    if layer.type == "mixture_of_experts":
        experts, (length, features) = _experts(layer), layer.in_shape
        rows = batch_size * experts.rows / experts.number
        return (
            Product(batch_size * length, experts.number, features),
            Product(rows, (2.0 if experts.gated else 1.0) * experts.units, features, experts.number),
            Product(rows, features, experts.units, experts.number),
        )
    if layer.type not in ("dense", "swiglu", "tied_dense") or len(layer.out_shape) != 2:
        return ()
    tokens, width = batch_size * layer.out_shape[0], float(layer.out_shape[1])
    columns = width * (2.0 if layer.type == "swiglu" else 1.0)
    n = columns / tensor if role in (COLUMN, VOCABULARY) else columns
    k = layer.in_shape[1] / tensor if role == ROW else float(layer.in_shape[1])
    return (Product(tokens, n, k),)


def _attention_products(layer: Layer, batch_size: float, tensor: int) -> tuple[Product, ...]:
    (tokens, h), (entering, _) = (layer.out_shape[0], layer.out_shape[1]), layer.in_shape
    context = layer.scores / (layer.heads * tokens)
    tensors = rank_tensors(layer, ATTENTION, tensor)
    width = layer.heads * layer.head_size  # of all queries; may differ from h
    projected = sum(n for name, n in tensors if name.endswith("weight") and not name.startswith("out")) / h
    first = [Product(batch_size * entering, projected, h)]
    if entering != tokens:  # queries come from the layer's own tokens, keys and values from the context
        others = Product(batch_size * context, projected - width / tensor, h)
        first = [Product(batch_size * tokens, width / tensor, h), others]
    heads, size = batch_size * layer.heads / tensor, layer.head_size
    scores = [Product(tokens, context, size, heads, True), Product(tokens, size, context, heads, True)]
    return (*first, *scores, Product(batch_size * tokens, h, width / tensor))


class _Experts(NamedTuple):
    """A layer's experts, and the `rows` of tokens that they compute together per sample."""

    number: float
    units: float
    rows: float
    gated: bool


def _experts(layer: Layer) -> _Experts:
    tensors, (tokens, width) = dict(layer.tensors), layer.in_shape
    number = tensors["router.weight"] / width
    units = tensors["up.weight"] / (number * width)
    rows = (layer.macs - tokens * width * number) / ((len(tensors) - 1) * width * units)
    return _Experts(number, units, rows, "gate.weight" in tensors)


class Timing(NamedTuple):
    """Parameters besides the model that determine the layer times of a transformer on each of `tensor` ranks.

    `occupied`: number of the device's multiprocessors that run kernels of collectives.
    """

    device: Device
    stack: Stack
    batch_size: float
    precision: str
    flash: bool
    tensor: int = 1
    sequence: bool = False
    occupied: int = 0

    @property
    def kernels(self) -> Kernels:
        """Rates of the device's kernels."""
        assert self.device.kernels is not None
        return self.device.kernels

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth of element-wise kernels in bytes/s."""
        return self.device.memory_bandwidth * self.kernels.streaming * self.free

    @property
    def free(self) -> float:
        """Share of the multiprocessors that collectives leave free."""
        return 1.0 - self.occupied / self.kernels.units

    @property
    def base(self) -> str:
        """Precision outside the products of transformer layers."""
        return base_precision(self.precision)

    def product(self, product: Product, precision: str) -> float:
        """Return the time of a product in s, a share of which may stay in bf16."""
        seconds = product_time(product, self.device, precision, self.stack.gemm, self.kernels.units - self.occupied)
        high = LOW_PRECISIONS[precision].high if precision in LOW_PRECISIONS else 0.0
        return seconds + high * (self.product(product, self.base) - seconds) if high else seconds

    def fuses_softmax(self, layer: Layer) -> bool:
        """Whether scale, mask and softmax of attention's matrices are one kernel."""
        matrices = self.batch_size * layer.heads / self.tensor
        return not self.stack.fused_softmax or matrices % self.stack.fused_softmax == 0

    def streamed(self, nbytes: float) -> float:
        """Return the time of element-wise kernels in s; unfused ones move more than `nbytes`."""
        return nbytes * self.stack.elementwise / self.bandwidth


def kernel_times(model: Model, timing: Timing) -> tuple[Floats, Floats]:
    """Return forward and backward times of each layer in s, each (n_layers,).

    A layer's time is that of its products and its other memory traffic; the backward pass has two products per forward
    product. A transformer layer, or a layer outside of them, takes at least as long as launching its kernels.
    """
    stack = timing.stack
    fraction = timing.kernels.fraction(timing.base)
    assert fraction is not None
    streamed = roofline_times(
        model,
        timing.device,
        timing.batch_size,
        timing.base,
        fraction * stack.gemm * timing.free,
        timing.kernels.streaming * timing.free / stack.elementwise,
    )
    ranges = blocks(model.layers)
    rows = []
    computed: dict[tuple[object, ...], tuple[float, float]] = {}  # most layers occur once per transformer layer
    for layer, role, *passes in zip(model.layers, model.roles, *streamed, strict=True):
        key = (role, layer.block > 0, *passes, *_costs(layer))
        if key not in computed:
            precision = timing.precision if layer.block > 0 else timing.base
            computed[key] = _layer_times(layer, role, timing, precision, (passes[0], passes[1]))
        rows.append(computed[key])
    times = np.array(rows)
    launched = np.array([_n_kernels(layer, timing) for layer in model.layers])
    alone = ((i, i + 1) for i, layer in enumerate(model.layers) if layer.block <= 0)
    for column, launch in enumerate((stack.forward_launch, stack.backward_launch)):
        for first, end in (*ranges, *alone):
            busy, least = times[first:end, column].sum(), launch * launched[first:end].sum()
            if busy < least:
                times[first:end, column] += (least - busy) * launched[first:end] / launched[first:end].sum()
    for i, layer in enumerate(model.layers):
        if _is_loss(layer):
            times[i] += stack.micro_batch_time * np.array([1.0, 2.0]) / 3.0
    return times[:, 0], times[:, 1]


class ChannelSlowdown:
    """Slowdown of all layers while the channels of an exchange occupy multiprocessors.

    All kernels have fewer multiprocessors; see also :func:`product_time`. Compared with measurements of transformers on
    one H100 (accuracy/data/channels_h100.jsonl).

    times  returns the forward and backward times of layers in s, each (n_layers,)
    """

    def __init__(
        self,
        model: Model,
        timing: Timing,
        times: Callable[[Model, Timing], tuple[Floats, Floats]] = kernel_times,
    ) -> None:
        self._model, self._timing, self._times = model, timing, times
        self._seconds: dict[int, float] = {}  # of all layers, by number of occupied multiprocessors

    def beside(self, channels: int) -> float:
        """Return the factor during an exchange (:class:`~ddlsim.workload.contention.Contention`)."""
        occupied = self._timing.stack.occupied(channels)
        if not occupied or self._timing.kernels.units <= occupied:
            return 1.0
        for n in (0, occupied):
            if n not in self._seconds:
                self._seconds[n] = float(np.sum(self._times(self._model, self._timing._replace(occupied=n))))
        alone = self._seconds[0]
        return self._seconds[occupied] / alone if alone > 0.0 else 1.0


def score_times(model: Model, timing: Timing) -> Floats:
    """Return the forward time of each layer's attention matrices in s: their products, softmax and dropout."""
    return np.array([_attention(layer, timing)[0] if layer.heads else 0.0 for layer in model.layers])


def _attention(layer: Layer, timing: Timing) -> tuple[float, float]:
    """Return the forward and backward times of attention itself in s: fused, or its two products and softmax."""
    stack, device = timing.stack, timing.device
    core = [product for product in _attention_products(layer, timing.batch_size, timing.tensor) if product.core]
    kernel = stack.attention_kernel(device)
    if timing.flash and kernel is not None:
        rates = timing.kernels.attention[kernel]
        flops = sum(2.0 * m * n * k * copies for m, n, k, copies, _ in core) * (0.5 if layer.causal else 1.0)
        ramps = [1.0 + ramp / layer.out_shape[0] for ramp in ATTENTION_RAMPS]
        peak = device.peak_flops[product_type(timing.base)] * min(1.0, layer.head_size / 128.0) ** rates.narrow
        peak *= timing.free
        # the matrix is recomputed (Dao et al. 2022, section 3.1): five products instead of four
        return flops / (peak * rates.forward) * ramps[0], 2.5 * flops / (peak * rates.backward) * ramps[1]
    forward = sum(timing.product(product, timing.base) for product in core)
    backward = sum(
        timing.product(Product(*sizes, copies), timing.base)
        for m, n, k, copies, _ in core
        for sizes in (((m, k, n), (k, n, m)) if layer.input_grad else ((k, n, m),))
    )
    if timing.flash:
        return forward, backward + forward / 2.0
    traffic = (MATRIX_TRAFFIC,) * 2 if timing.fuses_softmax(layer) else UNFUSED_TRAFFIC
    per_number = ELEMENT_NBYTES[timing.base] * layer.scores * timing.batch_size / timing.tensor / timing.bandwidth
    dropped = DROPPED_TRAFFIC if layer.fixed_nbytes else 0.0
    return forward + per_number * (traffic[0] + dropped), backward + per_number * (traffic[1] + dropped)


def _n_kernels(layer: Layer, timing: Timing) -> float:
    if layer.type == "dense":
        return float(len(layer.tensors))
    unfused = layer.heads and not timing.flash and not timing.fuses_softmax(layer)
    return float(N_KERNELS.get(layer.type, 1 if layer.moved_nbytes else 0) + (UNFUSED_KERNELS if unfused else 0))


def _is_loss(layer: Layer) -> bool:
    return layer.type in ("dense", "tied_dense") and layer.fixed_nbytes > 0.0


#: fields of a layer that its times can depend on
_costs = operator.attrgetter(
    *(field.name for field in dataclasses.fields(Layer) if field.name not in ("name", "unit", "block"))
)


def _layer_times(
    layer: Layer, role: str, timing: Timing, precision: str, streamed: tuple[float, float]
) -> tuple[float, float]:
    """Return the forward and backward times of a layer on the device in s, ignoring launches."""
    batch_size, tensor = timing.batch_size, timing.tensor
    products = [product for product in layer_products(layer, role, batch_size, tensor) if not product.core]
    if not products:
        share = tensor if role == INNER or (timing.sequence and len(layer.out_shape) == 2) else 1
        return streamed[0] / share, streamed[1] / share
    forward = sum(timing.product(product, precision) for product in products)
    backward = 0.0
    for m, n, k, copies, _ in products:
        if layer.input_grad:
            backward += timing.product(Product(m, k, n, copies), precision)
        backward += timing.product(Product(k, n, m, copies), precision)
    if timing.stack.slow_accumulation and precision == "fp8":
        backward /= SLOW_ACCUMULATION
    element = ELEMENT_NBYTES[timing.base]
    moved = (0.0, 0.0)
    if layer.heads:
        forward, backward = (a + b for a, b in zip((forward, backward), _attention(layer, timing), strict=True))
        multiple = 1.0 if timing.stack.rotation is None else timing.stack.rotation / timing.stack.elementwise
        moved = (multiple * element * layer.rotated * batch_size / tensor,) * 2
    elif layer.type == "swiglu":
        hidden = math.prod(layer.out_shape) * batch_size / tensor
        moved = SWIGLU_TRAFFIC[0] * element * hidden, SWIGLU_TRAFFIC[1] * element * hidden
    elif layer.type == "mixture_of_experts":
        experts, (tokens, width) = _experts(layer), layer.in_shape
        # tokens are copied to their experts, and the results are read and summed; the router's choice
        around = 3.0 * experts.rows * width + tokens * width + 2.0 * tokens * experts.number
        first, back = SWIGLU_TRAFFIC if experts.gated else ACTIVATION_TRAFFIC
        hidden, element = experts.rows * experts.units, element * batch_size
        moved = element * (first * hidden + around), element * (back * hidden + around)
    elif _is_loss(layer):
        nbytes = timing.stack.loss_traffic / timing.stack.elementwise * math.prod(layer.out_shape) * batch_size / tensor
        moved = LOSS_FORWARD * nbytes, (1.0 - LOSS_FORWARD) * nbytes
    late = timing.stack.rank_delay * (tensor - 1) if role in (ATTENTION, ROW) else 0.0
    quantised = _quantised(products, precision, timing)
    return (
        forward + timing.streamed(moved[0] + quantised[0]) + late,
        backward + timing.streamed(moved[1] + quantised[1]) + late,
    )


def _quantised(products: Sequence[Product], precision: str, timing: Timing) -> tuple[float, float]:
    """Return the bytes moved to quantise the operands of products, forward and backward."""
    if precision not in LOW_PRECISIONS:
        return 0.0, 0.0
    low = LOW_PRECISIONS[precision]
    nbytes = low.quantise + (0.0 if "fp4" in timing.device.peak_flops else low.transpose)
    each_batch = timing.stack.quantised_weights == "micro-batch"
    operands = sum((m * k + each_batch * k * n) * copies for m, n, k, copies, _ in products)
    return nbytes * operands, nbytes * sum(m * n * copies for m, n, _, copies, _ in products)
