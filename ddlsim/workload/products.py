"""Roofline times of layers, matrix products by their size, and transformer layers kernel by kernel.

The roofline has one efficiency for all arithmetic. Of a device whose kernels are known more can be said
(:class:`~ddlsim.workload.devices.Kernels`): a product of m x k by k x n numbers is made tile by tile, a wave of them at
a time on all multiprocessors, and small ones leave many of these idle (NVIDIA, Matrix Multiplication Background User's
Guide, sections on tile and wave quantization: 108 multiprocessors and tiles of 256 x 128 of an A100); one whose numbers
take longer to read and write than to multiply is limited by memory; and where a layer's kernels are over sooner than
the framework launches the next, the framework decides.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Positive, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device, DeviceLike, device_names, load_device
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES
from ddlsim.workload.roles import ATTENTION, COLUMN, INNER, ROW, VOCABULARY, blocks, rank_tensors, roles

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


#: kernels that a layer of the forward pass launches, where they are not one: attention its four products, the
#: transpositions before and behind them, softmax and dropout; a dense layer with bias also its addition
N_KERNELS = {"attention": 8, "cross_attention": 10, "swiglu": 3, "embedding": 2, "tied_embedding": 2}
#: numbers read and written for each element of attention's matrices beside the products: mask, softmax, dropout
MATRIX_TRAFFIC, DROPPED_TRAFFIC = 4.0, 2.0
#: bytes for each logit of a loss over tokens, kept in fp32: conversion, maximum, exponentials and their sum; and back
LOSS_TRAFFIC = (18.0, 14.0)


class Product(NamedTuple):
    """`copies` products of (m, k) by (k, n) numbers at a time; the `core` of attention is made and used at once."""

    m: float
    n: float
    k: float
    copies: float = 1.0
    core: bool = False


def has_kernels(model: Model, device: Device, precision: str) -> bool:
    """Return whether the kernels of this model's layers are known: of transformers, on calibrated devices."""
    kernels = device.kernels
    return kernels is not None and precision in kernels.precisions and any(layer.heads for layer in model.layers)


def check_kernels(model: Model, device: Device, precision: str) -> None:
    """Raise ConfigError if the kernels of this model's layers are not known on a device."""
    if not any(layer.heads for layer in model.layers):
        raise ConfigError(f"PerKernel: {model.name} has no attention; it is for transformers, give Roofline() instead")
    if not has_kernels(model, device, precision):
        names = [name for name in device_names() if has_kernels(model, load_device(name), precision)]
        which = f"they are of {', '.join(names)}" if names else "they are in fp16 and bf16"
        raise ConfigError(f"PerKernel: the kernels of {device.name} in {precision} are not known; {which}")


def product_time(
    product: Product, device: Device, precision: str, memory_efficiency: float = 0.8, *, resident: bool = False
) -> float:
    """Return the seconds of a matrix product on a device whose kernels are known.

    resident  what it makes is not written to the device's memory (flash attention)
    """
    kernels = device.kernels
    assert kernels is not None
    m, n, k, copies, _ = product
    if resident and kernels.flash is not None:  # its tiles are its own
        return 2.0 * m * n * k * copies / (device.peak_flops[precision] * kernels.flash)
    rows, columns = kernels.tile
    made = min(_elements(product, kernels.units, rows, columns), _elements(product, kernels.units, columns, rows))
    seconds = 2.0 * made * k / (device.peak_flops[precision] * kernels.fraction)
    moved = 0.0 if resident else ELEMENT_NBYTES[precision] * copies * (m * k + k * n + m * n)
    return max(seconds, moved / (device.memory_bandwidth * memory_efficiency))


Half = Annotated[str, one_of("fp16", "bf16")]


@checked
def gemm_efficiency(device: DeviceLike, m: Positive, n: Positive, k: Positive, precision: Half = "fp16") -> float:
    """Return the share of the peak FLOP/s that a product of (m, k) by (k, n) numbers reaches on a device.

    Raises ConfigError for a device whose kernels are not known.
    """
    machine = load_device(device)
    if machine.kernels is None:
        names = [name for name in device_names() if load_device(name).kernels]
        which = ", ".join(names)
        raise ConfigError(f"gemm_efficiency: the kernels of {machine.name} are not known; they are of {which}")
    return 2.0 * m * n * k / (product_time(Product(m, n, k), machine, precision) * machine.peak_flops[precision])


def _elements(product: Product, units: int, rows: int, columns: int) -> float:
    """Return the elements that multiprocessors make, idle ones and edges included: whole waves of whole tiles."""
    tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.copies
    return float(math.ceil(tiles / units) * units * rows * columns)


def layer_products(layer: Layer, role: str, batch_size: float, tensor: int = 1) -> tuple[Product, ...]:
    """Return the matrix products of a layer's forward pass on one of `tensor` ranks; none of other layers."""
    if layer.heads:
        return _attention_products(layer, batch_size, tensor)
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
    width = layer.heads * layer.head_size  # of all queries, which may be more or less than h
    projected = sum(n for name, n in tensors if name.endswith("weight") and not name.startswith("out")) / h
    first = [Product(batch_size * entering, projected, h)]
    if entering != tokens:  # queries are of the layer's own tokens, keys and values of those that it attends to
        others = Product(batch_size * context, projected - width / tensor, h)
        first = [Product(batch_size * tokens, width / tensor, h), others]
    heads, size = batch_size * layer.heads / tensor, layer.head_size
    scores = [Product(tokens, context, size, heads, True), Product(tokens, size, context, heads, True)]
    return (*first, *scores, Product(batch_size * tokens, h, width / tensor))


def kernel_times(
    model: Model, device: Device, batch_size: int, precision: str, memory_efficiency: float = 0.8, *, tensor: int = 1,
    sequence: bool = False, flash: bool = False,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return forward and backward seconds of each layer on one of `tensor` ranks, each (n_layers,).

    A layer takes its products and what it moves beside them; the backward pass two products for each one of the forward
    pass. A transformer layer, or another layer by itself, takes at least as long as its kernels take to launch.
    """
    kernels = device.kernels
    assert kernels is not None
    streamed = roofline_times(model, device, batch_size, precision, 1.0, memory_efficiency)
    rows = []
    known: dict[tuple[object, ...], tuple[float, float]] = {}  # most layers come once per transformer layer
    for layer, role, forward, backward in zip(model.layers, roles(model.layers), *streamed, strict=True):
        key = (role, forward, backward, *_costs(layer))
        if key not in known:
            known[key] = _layer_times(
                layer, role, device, batch_size, precision, memory_efficiency, tensor, (forward, backward),
                sequence=sequence, flash=flash,
            )  # fmt: skip
        rows.append(known[key])
    times = np.array(rows)
    launched = np.array([_n_kernels(layer) for layer in model.layers])
    for column, launch in enumerate((kernels.forward_launch, kernels.backward_launch)):
        for first, end in _stretches(model.layers):
            busy, least = times[first:end, column].sum(), launch * launched[first:end].sum()
            if busy < least:
                times[first:end, column] += (least - busy) * launched[first:end] / launched[first:end].sum()
    for i, layer in enumerate(model.layers):
        if _is_loss(layer):
            times[i] += kernels.loss_time * np.array([1.0, 2.0]) / 3.0
    return times[:, 0], times[:, 1]


def score_times(model: Model, device: Device, batch_size: float, precision: str, tensor: int = 1) -> Floats:
    """Return the seconds of each layer's attention matrices in a forward pass: their products, softmax and dropout."""
    return np.array([
        0.0 if not layer.heads else sum(
            product_time(product, device, precision)
            for product in _attention_products(layer, batch_size, tensor) if product.core
        ) + _matrix_time(layer, device, batch_size, precision, 0.8, tensor)
        for layer in model.layers
    ])  # fmt: skip


def _matrix_time(
    layer: Layer, device: Device, batch_size: float, precision: str, memory_efficiency: float, tensor: int
) -> float:
    """Return the seconds in which mask, softmax and dropout read and write attention's matrices."""
    traffic = MATRIX_TRAFFIC + (DROPPED_TRAFFIC if layer.fixed_nbytes else 0.0)
    nbytes = ELEMENT_NBYTES[precision] * traffic * layer.scores * batch_size / tensor
    return nbytes / (device.memory_bandwidth * memory_efficiency)


def _stretches(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return the transformer layers, and the layers outside them one by one."""
    ranges = blocks(layers)
    inside = {i for first, end in ranges for i in range(first, end)}
    return sorted([*ranges, *((i, i + 1) for i in range(len(layers)) if i not in inside)])


def _n_kernels(layer: Layer) -> float:
    if layer.type == "dense":
        return float(len(layer.tensors))
    return float(N_KERNELS.get(layer.type, 1 if layer.moved_nbytes else 0))


def _is_loss(layer: Layer) -> bool:
    return layer.type in ("dense", "tied_dense") and layer.fixed_nbytes > 0.0


#: a layer's fields that its seconds can depend on
_costs = operator.attrgetter(*(field.name for field in dataclasses.fields(Layer) if field.name not in ("name", "unit")))


def _layer_times(
    layer: Layer, role: str, device: Device, batch_size: float, precision: str, memory_efficiency: float, tensor: int,
    streamed: tuple[float, float], *, sequence: bool, flash: bool,
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds that a layer keeps the device busy, forward and backward, before the framework's."""
    kernels, bandwidth = device.kernels, device.memory_bandwidth * memory_efficiency
    assert kernels is not None
    products = layer_products(layer, role, batch_size, tensor)
    late = kernels.wait * (tensor - 1) if role in (ATTENTION, ROW) else 0.0
    if not products:
        share = tensor if role == INNER or (sequence and len(layer.out_shape) == 2) else 1
        return streamed[0] / share, streamed[1] / share

    def seconds(product: Product) -> float:
        return product_time(product, device, precision, memory_efficiency, resident=flash and product.core)

    forward = sum(seconds(product) for product in products)
    # flash attention makes its matrix again (Dao et al. 2022, section 3.1): five products instead of four
    backward = sum(seconds(product) for product in products if flash and product.core) / 2.0
    for m, n, k, copies, core in products:
        if layer.input_grad:
            backward += seconds(Product(m, k, n, copies, core))
        backward += seconds(Product(k, n, m, copies, core))
    beside = [0.0, 0.0]
    if layer.heads and not flash:
        beside = [_matrix_time(layer, device, batch_size, precision, memory_efficiency, tensor)] * 2
    elif layer.type == "swiglu":
        beside = [ELEMENT_NBYTES[precision] * 3.0 * math.prod(layer.out_shape) * batch_size / tensor / bandwidth] * 2
    elif _is_loss(layer):
        beside = [traffic * math.prod(layer.out_shape) * batch_size / tensor / bandwidth for traffic in LOSS_TRAFFIC]
    return forward + beside[0] + late, backward + beside[1] + late
