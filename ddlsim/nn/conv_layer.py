"""Convolution and pooling layers on maps (see :mod:`ddlsim.nn.conv_kernels` for the layout)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ddlsim.nn import conv_kernels, map_kernels
from ddlsim.nn.conv_kernels import plane_size
from ddlsim.nn.pass_state import Array, Buffers, Pass, Slot

Pair = tuple[int, int]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Taps:
    """For each output o of one dimension, which input meets which tap of the kernel: entries
    ``at[o] .. at[o + 1] - 1`` of ``tap`` and ``source``; pairs that fall on padding are not there."""

    at: Ints
    tap: Ints
    source: Ints


def taps(n_in: int, n_out: int, kernel: int, stride: int, padding: int, *, back: bool) -> Taps:
    """Return the taps of a convolution, or with `back` those of its input gradient (sizes as forward)."""
    pairs = [(o, t, o * stride - padding + t) for o in range(n_out) for t in range(kernel)]
    pairs = [(o, t, i) for o, t, i in pairs if 0 <= i < n_in]
    if back:
        pairs = sorted((i, t, o) for o, t, i in pairs)
    counts = np.bincount([pair[0] for pair in pairs], minlength=n_in if back else n_out)
    at = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    table = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    return Taps(at, table[:, 1].copy(), table[:, 2].copy())


def _tile(n_channels: int) -> int:
    return 6 if n_channels % 6 == 0 else 4


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
    x: Array = field(init=False)

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
        add_weights = conv_kernels.weight_gradient if per_group[0] > 2 else conv_kernels.weight_gradient1
        add_weights(
            self.x.reshape(-1), dy.reshape(-1), self.weight.flat(run.into()), run.n_samples, self.groups,
            *per_group, self.in_space, self.out_space, self.kernel, self.stride, self.padding,
        )  # fmt: skip
        if self.bias is not None:
            into = self.bias.flat(run.into())
            conv_kernels.bias_gradient(dy.reshape(-1), into, run.n_blocks, self.channels, self.out_space)
        if not self.input_grad:
            return None
        dx = self.buffers.get("dx", run.n_blocks, self.in_channels * plane_size(self.in_space))
        self._correlate(dy, dx, run, back=True)
        return dx

    def _correlate(self, source: Array, out: Array, run: Pass, *, back: bool) -> None:
        """The convolution, or `back` from outputs to inputs with the transposed weights."""
        n_in, n_out = self.in_channels // self.groups, self.channels // self.groups
        n_from, n_to = (n_out, n_in) if back else (n_in, n_out)
        spaces = (self.out_space, self.in_space) if back else (self.in_space, self.out_space)
        tile, n_taps = _tile(n_to), self.kernel[0] * self.kernel[1]
        packed = self.buffers.get("back" if back else "packed", self.groups, -(-n_to // tile) * tile * n_taps * n_from)
        packed = packed.reshape(-1)
        conv_kernels.pack(self.weight.flat(run.params), packed, self.groups, n_out, n_in, n_taps, tile, back)
        if back or self.bias is None:
            bias = self.buffers.get("zeros", 1, max(self.channels, self.in_channels)).reshape(-1)
        else:
            bias = self.bias.flat(run.params)
        rows, columns = self._back_tables if back else self._tables
        correlate = conv_kernels.correlate6 if tile == 6 else conv_kernels.correlate4
        correlate(
            source.reshape(-1), packed, bias, out.reshape(-1), run.n_samples, self.groups, n_from, n_to,
            *spaces, self.kernel[1], rows.at, rows.tap, rows.source, columns.at, columns.tap, columns.source,
        )  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Of one dimension: output o covers inputs ``first[o] .. last[o] - 1``, each with weight ``share[o]``."""

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
    x: Array = field(init=False)
    out: Array = field(init=False)

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
