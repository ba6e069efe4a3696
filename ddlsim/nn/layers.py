"""Trainable layers: dense, convolution, pooling, normalisation, attention, embeddings, and their connections; and what
they share, the state of a forward and backward pass and their working buffers.

Maps have the layout of :mod:`ddlsim.nn.map_kernels`; samples of language models are rows of tokens, each with
`features` numbers, or one number: its id.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.nn import map_kernels, row_kernels
from ddlsim.nn.map_kernels import LANES, plane_size

Array = npt.NDArray[np.floating]
_ALIGNMENT = 64  # bytes of a cache line, which is also LANES numbers of 4 bytes


@dataclass(frozen=True)
class Slot:
    """Location of a named tensor in the flat vector: elements ``start`` to ``stop - 1``, in C order of `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, flat: Array) -> Array:
        """Return the tensor as a view of the flat vector."""
        return flat[self.start : self.stop].reshape(self.shape)

    def flat(self, flat: Array) -> Array:
        """Return the tensor's elements as a flat view."""
        return flat[self.start : self.stop]


@dataclass
class Pass:
    """A pass over some samples, which adds to ``gradient`` (empty in predictions) and updates ``state``, the running
    statistics.

    ``training`` selects batch statistics and dropout; ``streams`` are the random streams of custom layers.
    ``n_samples`` may be less than the lanes hold.
    """

    params: Array
    n_samples: int
    training: bool
    gradient: Array
    state: Array | None = None
    rng: np.random.Generator | None = None
    streams: Sequence[np.random.Generator] = ()

    @property
    def n_blocks(self) -> int:
        return -(-self.n_samples // LANES)


@dataclass
class Buffers:
    """Arrays that a layer reuses between passes: allocating them takes longer than small layers do."""

    dtype: np.dtype[np.floating]
    _kept: dict[str, Array] = field(default_factory=dict)

    def get(self, name: str, rows: int, columns: int) -> Array:
        """Return an array of shape (rows, columns); its contents are from the last use, or 0."""
        size = rows * columns
        kept = self._kept.get(name)
        if kept is None or kept.size < size:
            raw = np.zeros(size + _ALIGNMENT // self.dtype.itemsize, self.dtype)
            offset = -raw.ctypes.data % _ALIGNMENT // self.dtype.itemsize
            kept = self._kept[name] = raw[offset : offset + size]
        return kept[:size].reshape(rows, columns)


class Layer(Protocol):
    """A layer or group of layers. Activations have shape (samples or blocks of them, elements)."""

    def forward(self, x: Array, run: Pass) -> Array:
        """Return the output for the input `x`, which is not changed before the backward pass."""
        ...

    def backward(self, dy: Array, run: Pass) -> Array | None:
        """Add to the gradient of the parameters, and return that of the input, or None if no earlier layer is trained.

        `dy` may be overwritten.
        """
        ...


class PureLayer(Protocol):
    """A custom layer: pure functions of arrays, samples first (docs/write_your_own/layer.md).

    `forward` may have further parameters: `train`, a flag; `rng`, the layer's random stream, None except in training;
    and `buffers`, running statistics, None in training. A layer with buffers has a method ``buffers(in_shape)`` that
    returns their initial values. In training, it returns the batch's statistics as a third value; they replace the
    share `momentum` (0.1 unless the layer has a field of this name) of the running ones.
    """

    def forward(self, x: Array, params: Mapping[str, Array]) -> tuple[Array, object]:
        """Return the outputs for `x`, shape (n, *in_shape), and data for the backward pass; changes no argument."""

    def backward(self, dy: Array, kept: object, params: Mapping[str, Array]) -> tuple[Array, Mapping[str, Array]]:
        """Return the gradients of `x` and of every tensor (summed over samples), given that of the outputs."""


Pair = tuple[int, int]
Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

#: channels of a tile
_FOUR, _SIX = (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Taps:
    """Taps of the kernel for each output o of one dimension, with their inputs: entries ``at[o] .. at[o + 1] - 1`` of
    ``tap`` and ``source``. Taps on padding are omitted."""

    at: Ints
    tap: Ints
    source: Ints


def taps(n_in: int, n_out: int, kernel: int, stride: int, padding: int, *, back: bool) -> Taps:
    """Return the taps of a convolution, or with `back` those of its input gradient (with the forward sizes)."""
    pairs = [(o, t, o * stride - padding + t) for o in range(n_out) for t in range(kernel)]
    pairs = [(o, t, i) for o, t, i in pairs if 0 <= i < n_in]
    if back:
        pairs = sorted((i, t, o) for o, t, i in pairs)
    counts = np.bincount([pair[0] for pair in pairs], minlength=n_in if back else n_out)
    at = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    table = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    return Taps(at, table[:, 1].copy(), table[:, 2].copy())


@dataclass
class Conv2d:
    """Cross-correlation with stride, zero padding and groups: y[o] = b[o] + sum w[o, c, i, j] x[c, ...].

    The weight has shape (channels, inputs per group, kernel height, kernel width).
    """

    channels: int
    in_channels: int
    in_space: Pair
    out_space: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    groups: int
    weight: Slot
    bias: Slot | None
    input_grad: bool
    buffers: Buffers

    def __post_init__(self) -> None:
        sizes = list(zip(self.in_space, self.out_space, self.kernel, self.stride, self.padding, strict=True))
        self._tables = [taps(*size, back=False) for size in sizes]
        self._back_tables = [taps(*size, back=True) for size in sizes]

    def forward(self, x: Array, run: Pass) -> Array:
        self.x = x
        out = self.buffers.get("out", run.n_blocks, self.channels * plane_size(self.out_space))
        self._correlate(x, out, run, back=False)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        per_group = self.in_channels // self.groups, self.channels // self.groups
        tile = (_FOUR, (0, 1, 2)) if per_group[0] > 2 else (_SIX, (0,))
        arrays = self.x.reshape(-1), dy.reshape(-1), self.weight.flat(run.gradient)
        spaces = self.in_space, self.out_space, self.kernel, self.stride, self.padding
        map_kernels.weight_gradient(*arrays, run.n_samples, self.groups, *per_group, *spaces, *tile)
        if self.bias is not None:
            into = self.bias.flat(run.gradient)
            map_kernels.bias_gradient(dy.reshape(-1), into, run.n_blocks, self.channels, self.out_space)
        if not self.input_grad:
            return None
        dx = self.buffers.get("dx", run.n_blocks, self.in_channels * plane_size(self.in_space))
        self._correlate(dy, dx, run, back=True)
        return dx

    def _correlate(self, source: Array, out: Array, run: Pass, *, back: bool) -> None:
        """Run the convolution, or with `back` the transposed one from outputs to inputs."""
        n_in, n_out = self.in_channels // self.groups, self.channels // self.groups
        n_from, n_to = (n_out, n_in) if back else (n_in, n_out)
        spaces = (self.out_space, self.in_space) if back else (self.in_space, self.out_space)
        tile, n_taps = _SIX if n_to % 6 == 0 else _FOUR, self.kernel[0] * self.kernel[1]
        padded = -(-n_to // len(tile)) * len(tile)
        packed = self.buffers.get("back" if back else "packed", self.groups, padded * n_taps * n_from)
        packed = packed.reshape(-1)
        map_kernels.pack(self.weight.flat(run.params), packed, self.groups, n_out, n_in, n_taps, len(tile), back)
        if back or self.bias is None:
            bias = self.buffers.get("zeros", 1, max(self.channels, self.in_channels)).reshape(-1)
        else:
            bias = self.bias.flat(run.params)
        rows, columns = self._back_tables if back else self._tables
        arrays = source.reshape(-1), packed, bias, out.reshape(-1)
        taps = rows.at, rows.tap, rows.source, columns.at, columns.tap, columns.source
        sizes = run.n_samples, self.groups, n_from, n_to, *spaces, self.kernel[1]
        map_kernels.correlate(*arrays, *sizes, *taps, tile)


@dataclass(frozen=True)
class Windows:
    """One dimension's windows: output o covers inputs ``first[o] .. last[o] - 1``, each with weight ``share[o]``."""

    first: Ints
    last: Ints
    share: npt.NDArray[np.float64]


def pool_windows(n_in: int, n_out: int, kernel: int, stride: int, padding: int, *, count_padding: bool) -> Windows:
    """Return the windows of ordinary pooling (torch.nn.AvgPool2d, ``count_include_pad``)."""
    start = np.arange(n_out) * stride - padding
    stop = np.minimum(start + kernel, n_in + padding)
    first, last = np.maximum(start, 0), np.minimum(stop, n_in)
    return Windows(first, last, 1.0 / (stop - start if count_padding else last - first))


def adaptive_windows(n_in: int, n_out: int) -> Windows:
    """Return windows from floor(o n_in / n_out) to ceil((o + 1) n_in / n_out) (AdaptiveAvgPool2d)."""
    o = np.arange(n_out)
    first, last = o * n_in // n_out, -(-(o + 1) * n_in // n_out)
    return Windows(first, last, 1.0 / (last - first))


@dataclass
class Pool2d:
    """Maximum or average of every window, per channel."""

    kind: Literal["max", "average"]
    channels: int
    in_space: Pair
    out_space: Pair
    windows: tuple[Windows, Windows]  # rows, columns
    input_grad: bool
    buffers: Buffers

    def __post_init__(self) -> None:
        rows, columns = self.windows
        self._bounds = (rows.first, rows.last, columns.first, columns.last)
        self._shares = [windows.share.astype(self.buffers.dtype) for windows in self.windows]

    def forward(self, x: Array, run: Pass) -> Array:
        n_maps = run.n_blocks * self.channels
        out = self.buffers.get("out", run.n_blocks, self.channels * plane_size(self.out_space))
        arrays = (x.reshape(-1), out.reshape(-1), n_maps, self.in_space, self.out_space)
        if self.kind == "max":
            map_kernels.max_pool(*arrays, *self._bounds)
        else:
            map_kernels.average_pool(*arrays, *self._bounds, *self._shares)
        self.x, self.out = x, out
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        if not self.input_grad:
            return None
        n_maps, spaces = run.n_blocks * self.channels, (self.in_space, self.out_space)
        dx = self.buffers.get("dx", run.n_blocks, self.channels * plane_size(self.in_space))
        grads = (dy.reshape(-1), dx.reshape(-1), n_maps, *spaces)
        if self.kind == "max":
            map_kernels.max_pool_gradient(self.x.reshape(-1), self.out.reshape(-1), *grads, *self._bounds)
        else:
            map_kernels.average_pool_gradient(*grads, *self._bounds, *self._shares)
        return dx


@dataclass
class BatchNorm2d:
    """y = weight * (x - mean) / sqrt(variance + eps) + bias, per channel (Ioffe and Szegedy 2015, algorithm 1).

    Training uses the statistics of the batch's samples; running mean and (unbiased) variance, in ``Pass.state``
    at ``mean`` and ``variance``, become (1 - momentum) * old + momentum * new. Prediction uses the running ones.
    """

    channels: int
    space: tuple[int, int]
    eps: float
    momentum: float
    weight: Slot
    bias: Slot
    mean: Slot
    variance: Slot
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        if run.training:
            mean, variance = self._batch_statistics(x, run)
        else:
            assert run.state is not None
            mean, variance = (slot.of(run.state).astype(np.float64) for slot in (self.mean, self.variance))
        inverse = 1.0 / np.sqrt(variance + self.eps)
        scale = self.weight.of(run.params) * inverse
        shift = self.bias.of(run.params) - mean * scale
        out, dtype = self.buffers.get("out", *x.shape), self.buffers.dtype
        factors = scale.astype(dtype), np.zeros(self.channels, dtype), shift.astype(dtype)
        arrays = x.reshape(-1), x.reshape(-1), out.reshape(-1)
        map_kernels.scale_channels(*arrays, *factors, run.n_samples, self.channels, self.space)
        self.x, self._mean, self._inverse = x, mean, inverse
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        """dx = scale * (dy - mean(dy) - xhat * mean(dy * xhat)), xhat being the normalised input."""
        count, dtype = run.n_samples * math.prod(self.space), self.buffers.dtype
        along = self._sums(dy, self.x, 0.0, 1.0, -self._mean, run) * self._inverse
        total = self._sums(dy, dy, 0.0, 0.0, 1.0, run)
        self.weight.of(run.gradient)[...] += along
        self.bias.of(run.gradient)[...] += total
        scale = self.weight.of(run.params) * self._inverse
        on_x = -scale * self._inverse * along / count
        shift = -scale * total / count - on_x * self._mean
        dx = self.buffers.get("dx", *dy.shape)
        arrays = dy.reshape(-1), self.x.reshape(-1), dx.reshape(-1)
        factors = scale.astype(dtype), on_x.astype(dtype), shift.astype(dtype)
        map_kernels.scale_channels(*arrays, *factors, run.n_samples, self.channels, self.space)
        return dx

    def _batch_statistics(self, x: Array, run: Pass) -> tuple[Doubles, Doubles]:
        """Return mean and biased variance per channel (two passes), and update the running ones."""
        count = run.n_samples * math.prod(self.space)
        mean = self._sums(x, x, 0.0, 0.0, 1.0, run) / count
        variance = self._sums(x, x, -mean, 1.0, -mean, run) / count
        if run.state is not None:
            unbiased = variance * (count / max(count - 1, 1))
            for slot, new in ((self.mean, mean), (self.variance, unbiased)):
                slot.of(run.state)[...] += self.momentum * (new - slot.of(run.state))
        return mean, variance

    def _sums(
        self, a: Array, b: Array, shift_a: float | Array, scale_b: float, shift_b: float | Array, run: Pass
    ) -> Doubles:
        """Return the channels' sums of (a + shift_a) * (b * scale_b + shift_b)."""
        sums, lanes = np.empty(self.channels), np.empty(LANES, self.buffers.dtype)
        u, v, w = (np.full(self.channels, value, self.buffers.dtype) for value in (shift_a, scale_b, shift_b))
        arrays = (a.reshape(-1), b.reshape(-1), u, v, w, lanes, sums)
        map_kernels.channel_sums(*arrays, run.n_samples, self.channels, self.space)
        return sums


@dataclass
class LayerNorm:
    """The same formula over the last dimension of each sample (Ba, Kiros and Hinton 2016, section 3)."""

    features: int
    eps: float
    weight: Slot
    bias: Slot
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        rows = x.reshape(-1, self.features)
        out, self._scaled = (self.buffers.get(name, *rows.shape) for name in ("out", "scaled"))
        self._inverse = self.buffers.get("inverse", 1, len(rows)).reshape(-1)
        weight, bias = self.weight.of(run.params), self.bias.of(run.params)
        row_kernels.layer_norm(rows, weight, bias, out, self._scaled, self._inverse, self.eps)
        return out.reshape(x.shape)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        rows = dy.reshape(-1, self.features)
        dx = self.buffers.get("dx", *rows.shape)
        into = run.gradient
        weight = self.weight.of(run.params)
        slopes = self.weight.of(into), self.bias.of(into)
        row_kernels.layer_norm_gradient(rows, self._scaled, self._inverse, weight, *slopes, dx)
        return dx.reshape(dy.shape)


@dataclass
class EmbeddingBag:
    """y_t = sum of `pooling` rows of table t, concatenated; tables have shape (rows, features). The row numbers are the
    last numbers of a sample, table by table."""

    name: str
    tables: Sequence[Slot]
    pooling: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        d, k = self.tables[0].shape[1], self.pooling
        out = self.buffers.get("out", len(x), len(self.tables) * d)
        first = x.shape[1] - len(self.tables) * k
        self._ids = []
        for t, table in enumerate(self.tables):
            ids = whole_ids(x[:, first + t * k : first + (t + 1) * k], table.shape[0], self.name)
            out[:, t * d : (t + 1) * d] = table.of(run.params)[ids].sum(axis=1)
            self._ids.append(ids)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        d = self.tables[0].shape[1]
        for t, (table, ids) in enumerate(zip(self.tables, self._ids, strict=True)):
            np.add.at(table.of(run.gradient), ids, dy[:, None, t * d : (t + 1) * d])
        return None


@dataclass
class Interaction:
    """(x_0, all x_i . x_j with j < i) of a sample's vectors x_i of `features` numbers (Naumov et al.
    2019, arXiv:1906.00091, section 2.1.3)."""

    features: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        self._vectors = x.reshape(len(x), -1, self.features)
        self._pairs = np.tril_indices(self._vectors.shape[1], -1)
        products = np.einsum("nid,njd->nij", self._vectors, self._vectors)
        out = self.buffers.get("out", len(x), self.features + len(self._pairs[0]))
        out[:, : self.features] = self._vectors[:, 0]
        out[:, self.features :] = products[:, *self._pairs]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        n, count, d = self._vectors.shape
        slopes = np.zeros((n, count, count), dy.dtype)
        slopes[:, *self._pairs] = dy[:, d:]
        dx = self.buffers.get("dx", n, count * d)
        vectors = dx.reshape(n, count, d)
        vectors[...] = np.einsum("nij,njd->nid", slopes + slopes.swapaxes(1, 2), self._vectors)
        vectors[:, 0] += dy[:, :d]
        return dx


def _project(x: Array, weight: Slot, bias: Slot | None, out: Array, params: Array) -> None:
    """Write y = x W^T (+ b)."""
    n, units = out.shape
    row_kernels.product_transposed(x.reshape(-1), weight.flat(params), out.reshape(-1), n, x.shape[1], units)
    if bias is not None:
        out += bias.of(params)


def _project_back(
    dy: Array, x: Array, weight: Slot, bias: Slot | None, dx: Array | None, run: Pass, buffers: Buffers
) -> None:
    """Add to the gradients of a projection, and write that of its input unless `dx` is None."""
    n, units = dy.shape
    product = buffers.get("dw", units, x.shape[1])
    flat = dy.reshape(-1)
    row_kernels.product(flat, 1, units, x.reshape(-1), product.reshape(-1), units, n, x.shape[1])
    weight.of(run.gradient)[...] += product
    if bias is not None:
        bias.of(run.gradient)[...] += dy.sum(axis=0)
    if dx is not None:
        row_kernels.product(flat, units, 1, weight.flat(run.params), dx.reshape(-1), n, units, x.shape[1])


@dataclass
class Dense:
    """y = x W^T + b on the last dimension; W has shape (units, features).

    W may be the table of the token embedding, (vocabulary, features) (Press and Wolf 2017).
    """

    features: int
    units: int
    weight: Slot
    bias: Slot | None
    input_grad: bool
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        self.x = x.reshape(-1, self.features)
        out = self.buffers.get("out", len(self.x), self.units)
        _project(self.x, self.weight, self.bias, out, run.params)
        return out.reshape(len(x), -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        rows = dy.reshape(-1, self.units)
        dx = self.buffers.get("dx", len(rows), self.features) if self.input_grad else None
        _project_back(rows, self.x, self.weight, self.bias, dx, run, self.buffers)
        return None if dx is None else dx.reshape(len(dy), -1)


@dataclass
class Elementwise:
    """ReLU, tanh, sigmoid or GELU. ``in_place`` overwrites the input, which no other layer may read."""

    kind: Literal["relu", "gelu", "tanh", "sigmoid"]
    in_place: bool
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        out = x if self.in_place else self.buffers.get("out", *x.shape)
        source, target = x.reshape(-1), out.reshape(-1)
        if self.kind == "tanh":
            np.tanh(source, out=target)
        else:
            getattr(row_kernels, self.kind)(source, target)
        self.kept = x if self.kind == "gelu" else out  # for the derivative
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        multiply = getattr(row_kernels, f"{self.kind}_gradient")
        multiply(self.kept.reshape(-1), dy.reshape(-1))
        return dy


def asked_for(rule: PureLayer) -> frozenset[str]:
    """Return which of `train`, `buffers` and `rng` are parameters of the layer's forward method."""
    return frozenset({"train", "buffers", "rng"} & inspect.signature(rule.forward).parameters.keys())


@dataclass
class Pure:
    """A layer written as pure functions of arrays.

    buffers  slots of its running statistics in the state, of which a batch replaces the share `momentum`
    stream   index of its random stream in a pass
    """

    name: str
    rule: PureLayer
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    slots: Mapping[str, Slot]
    buffers: Mapping[str, Slot]
    momentum: float
    stream: int

    def forward(self, x: Array, run: Pass) -> Array:
        available: dict[str, object] = {"train": run.training, "buffers": None, "rng": None}
        if run.training and "rng" in asked_for(self.rule):
            if not run.streams:
                raise ConfigError(
                    f"rng = None, but the layer {self.name!r} needs random numbers; pass a numpy Generator"
                )
            available["rng"] = run.streams[self.stream]
        if not run.training and run.state is not None:
            available["buffers"] = {name: slot.of(run.state).copy() for name, slot in self.buffers.items()}
        options: dict[str, Any] = {name: available[name] for name in asked_for(self.rule)}
        args = x.reshape(len(x), *self.in_shape), self._tensors(run.params)
        out, self.kept, *rest = cast("tuple[Any, ...]", self.rule.forward(*args, **options))
        self._fits("forward", "outputs", out, (len(x), *self.out_shape))
        if run.training and self.buffers:
            statistics: Mapping[str, Array] = rest[0] if rest else {}
            if statistics.keys() != self.buffers.keys():
                raise ConfigError(
                    f"layer {self.name!r}: while training, forward must return the batch's {sorted(self.buffers)} as a "
                    f"third value; it returned {sorted(statistics)}"
                )
            for name, slot in self.buffers.items():
                self._fits("forward", name, statistics[name], slot.shape)
                if run.state is not None:
                    slot.of(run.state)[...] += self.momentum * (statistics[name] - slot.of(run.state))
        return np.ascontiguousarray(out, x.dtype).reshape(len(x), -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        dx, gradients = self.rule.backward(dy.reshape(len(dy), *self.out_shape), self.kept, self._tensors(run.params))
        self._fits("backward", "the gradient of x", dx, (len(dy), *self.in_shape))
        if gradients.keys() != self.slots.keys():
            raise ConfigError(
                f"layer {self.name!r}: backward returned gradients for {sorted(gradients)}, but the layer's tensors "
                f"are {sorted(self.slots)}"
            )
        for name, slot in self.slots.items():
            self._fits("backward", f"the gradient of {name!r}", gradients[name], slot.shape)
            slot.of(run.gradient)[...] += gradients[name]
        return np.ascontiguousarray(dx, dy.dtype).reshape(len(dy), -1)

    def _tensors(self, params: Array) -> dict[str, Array]:
        return {name: slot.of(params) for name, slot in self.slots.items()}

    def _fits(self, method: str, value: str, array: Array, shape: tuple[int, ...]) -> None:
        if (actual := np.shape(array)) != shape:
            raise ConfigError(f"layer {self.name!r}: {method} returned {value} with shape {actual}; expected {shape}")


@dataclass
class Dropout:
    """While training, x * mask / (1 - rate) with mask 0 at `rate` of the elements (Srivastava et al. 2014)."""

    rate: float
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        if not run.training or self.rate == 0.0:
            return x
        if run.rng is None:
            raise ConfigError("rng = None, but the network has dropout; pass a numpy Generator for the masks")
        self._mask = self.buffers.get("mask", *x.shape)
        draws = run.rng.random(x.shape, dtype=np.float32)
        np.multiply(draws >= self.rate, 1.0 / (1.0 - self.rate), out=self._mask)
        out = self.buffers.get("out", *x.shape)
        np.multiply(x, self._mask, out=out)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        if self.rate > 0.0:
            dy *= self._mask
        return dy


@dataclass
class Relayout:
    """Convert samples, rows of (channels, height, width) in C order, to maps (n_blocks, channels * plane), or back."""

    to_maps: bool
    channels: int
    space: tuple[int, int]
    input_grad: bool
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        return self._converted(x, run, "out", self.to_maps)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        return self._converted(dy, run, "dx", not self.to_maps) if self.input_grad else None

    def _converted(self, source: Array, run: Pass, name: str, to_maps: bool) -> Array:
        rows, size = (run.n_blocks, plane_size(self.space)) if to_maps else (run.n_samples, math.prod(self.space))
        out = self.buffers.get(name, rows, self.channels * size)
        convert = map_kernels.to_maps if to_maps else map_kernels.from_maps
        convert(source.reshape(-1), out.reshape(-1), run.n_samples, self.channels, self.space)
        return out


@dataclass
class Chain:
    """Layers in sequence; an empty chain is the identity."""

    layers: Sequence[Layer]

    def all(self) -> Iterator[Layer]:
        """Yield its layers, including those in branches."""
        for layer in self.layers:
            yield layer
            for branch in (layer.body, layer.shortcut) if isinstance(layer, Sum) else getattr(layer, "branches", ()):
                yield from branch.all()

    def forward(self, x: Array, run: Pass) -> Array:
        for layer in self.layers:
            x = layer.forward(x, run)
        return x

    def backward(self, dy: Array, run: Pass) -> Array | None:
        gradient: Array | None = dy
        for layer in reversed(self.layers):
            if gradient is None:
                return None
            gradient = layer.backward(gradient, run)
        return gradient


@dataclass
class Sum:
    """body(x) + shortcut(x) (He et al. 2016, section 3.2)."""

    body: Chain
    shortcut: Chain
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        first, second = self.body.forward(x, run), self.shortcut.forward(x, run)
        out = self.buffers.get("out", *first.shape)
        np.add(first, second, out=out)
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        copy = self.buffers.get("dy", *dy.shape)
        copy[...] = dy  # layers may overwrite their argument
        first, second = self.body.backward(dy, run), self.shortcut.backward(copy, run)
        if first is None or second is None:
            return None
        dx = self.buffers.get("dx", *first.shape)
        np.add(first, second, out=dx)
        return dx


@dataclass
class Join:
    """Concatenate the outputs of several chains on the same input."""

    branches: Sequence[Chain]
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        outs = [branch.forward(x, run) for branch in self.branches]
        self._cuts = np.cumsum([0, *(out.shape[1] for out in outs)])
        joined = self.buffers.get("out", len(outs[0]), int(self._cuts[-1]))
        np.concatenate(outs, axis=1, out=joined)
        return joined

    def backward(self, dy: Array, run: Pass) -> Array | None:
        total: Array | None = None
        for i, branch in enumerate(self.branches):
            part = self.buffers.get(f"dy{i}", len(dy), int(self._cuts[i + 1] - self._cuts[i]))
            part[...] = dy[:, self._cuts[i] : self._cuts[i + 1]]
            dx = branch.backward(part, run)
            if dx is None:
                continue
            if total is None:
                total = self.buffers.get("dx", *dx.shape)
                total[...] = dx
            else:
                total += dx
        return total


@dataclass
class Embedding:
    """y = E[token] + P[place] + T[0]; E has shape (vocabulary, features).

    ``places`` and ``kind`` are optional, with the shapes (positions, features) and (types, features); all tokens have
    the first type.
    """

    name: str
    tokens: Slot
    places: Slot | None
    kind: Slot | None
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        table = self.tokens.of(run.params)
        self._ids = whole_ids(x, len(table), self.name)
        n, length = x.shape
        out = self.buffers.get("out", n, length * table.shape[1])
        rows = out.reshape(n, length, -1)
        np.take(table, self._ids, axis=0, out=rows)
        if self.places is not None:
            rows += self.places.of(run.params)[:length]
        if self.kind is not None:
            rows += self.kind.of(run.params)[0]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        rows, into = dy.reshape(*self._ids.shape, -1), run.gradient
        np.add.at(self.tokens.of(into), self._ids, rows)
        over_samples = rows.sum(axis=0)
        if self.places is not None:
            self.places.of(into)[: len(over_samples)] += over_samples
        if self.kind is not None:
            self.kind.of(into)[0] += over_samples.sum(axis=0)
        return None


def whole_ids(x: Array, vocabulary: int, name: str) -> npt.NDArray[np.int64]:
    """Return `x` as ids below `vocabulary`. Raises ConfigError, with the layer's `name`, for other numbers."""
    ids = x.astype(np.int64)
    wrong = (ids != x) | (ids < 0) | (ids >= vocabulary)
    if wrong.any():
        number, last = float(x[wrong][0]), vocabulary - 1
        raise ConfigError(f"layer {name!r}: {number:g} is not an id; samples must be integers from 0 to {last}")
    return ids


@dataclass
class Attention:
    """Multi-head self-attention with its projections (Vaswani et al. 2017, section 3.2.2): out(attend(qkv(x))).

    weights  for queries, keys and values: three of shape (features, features), or one of (3 * features, features)
    biases   the corresponding biases
    """

    features: int
    heads: int
    causal: bool
    weights: Sequence[Slot]
    biases: Sequence[Slot]
    out_weight: Slot
    out_bias: Slot
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        d, n = self.features, len(x)
        self._x = x.reshape(-1, d)
        n_rows = len(self._x)
        rows, part = self.buffers.get("rows", n_rows, 3 * d), 3 * d // len(self.weights)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            projected = self.buffers.get("projected", n_rows, part)
            _project(self._x, weight, bias, projected, run.params)
            rows[:, i * part : (i + 1) * part] = projected
        tokens = n_rows // n
        self._softmax = self.buffers.get("softmax", n * self.heads, tokens * tokens)
        mixed, out = self.buffers.get("mixed", n_rows, d), self.buffers.get("out", n_rows, d)
        arrays = rows.reshape(-1), self._softmax.reshape(-1), mixed.reshape(-1)
        row_kernels.attend(*arrays, n, tokens, self.heads, d // self.heads, self.causal)
        self._rows, self._mixed = rows, mixed
        _project(mixed, self.out_weight, self.out_bias, out, run.params)
        return out.reshape(n, -1)

    def backward(self, dy: Array, run: Pass) -> Array | None:
        d, n, part = self.features, len(dy), 3 * self.features // len(self.weights)
        grads = dy.reshape(-1, d)
        n_rows = len(grads)
        dmixed, drows = self.buffers.get("dmixed", n_rows, d), self.buffers.get("drows", n_rows, 3 * d)
        _project_back(grads, self._mixed, self.out_weight, self.out_bias, dmixed, run, self.buffers)
        slopes = self.buffers.get("slopes", 1, n_rows // n)
        arrays = (array.reshape(-1) for array in (self._rows, self._softmax, dmixed, drows, slopes))
        row_kernels.attend_gradient(*arrays, n, n_rows // n, self.heads, d // self.heads, self.causal)
        dx, share = self.buffers.get("dx", n_rows, d), self.buffers.get("share", n_rows, d)
        dx[...] = 0.0
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            of_part = self.buffers.get("of_part", n_rows, part)
            of_part[...] = drows[:, i * part : (i + 1) * part]
            _project_back(of_part, self._x, weight, bias, share, run, self.buffers)
            dx += share
        return dx.reshape(n, -1)


@dataclass
class Take:
    """The first ``kept`` numbers of each sample, which are those of its first tokens."""

    kept: int
    buffers: Buffers

    def forward(self, x: Array, run: Pass) -> Array:
        self._size = x.shape[1]
        out = self.buffers.get("out", len(x), self.kept)
        out[...] = x[:, : self.kept]
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        dx = self.buffers.get("dx", len(dy), self._size)
        dx[:, : self.kept] = dy
        dx[:, self.kept :] = 0.0
        return dx
