"""Compiled convolution, pooling and batch normalisation on activations whose innermost dimension is the sample.

Activations are flat arrays of shape (n_blocks, channels, plane): at each pixel, they store LANES samples next to each
other. Every convolution, whatever its sizes, is therefore a sum of vectors times scalar weights, without copying
windows into a matrix. A tile of output channels stays in registers while all taps of a window are added.

The input gradient is the same sum over other neighbours, so both use tables (:class:`ddlsim.nn.layers.Taps`): for
output row y, entries ``row_at[y] .. row_at[y + 1]`` of ``row_tap`` (kernel row) and ``row_in`` (input row); the same
for columns. Pooling windows are tables, already limited to the input: output row y covers input rows
``row_from[y] .. row_to[y] - 1``, and likewise for columns.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry
from ddlsim.nn.vectors import HALVES, ONE, WIDTH, simd

LANES = 2 * WIDTH
#: number of pixels over which a tile of the weight gradient is summed in registers
_PIXELS = 64

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]


@entry
def plane_size(space: tuple[int, int]) -> int:
    """Return the elements of one channel: height * width * LANES, plus LANES unused ones if height * width is even,
    because channels a power of two apart would compete for the same few cache lines."""
    return ((space[0] * space[1]) | 1) * LANES


@entry
def pack(
    weight: _Floats, packed: _Floats, groups: int, n_out: int, n_in: int, n_taps: int, tile: int, swap: bool
) -> None:
    """Write `weight` (groups * n_out, n_in, n_taps) to `packed` as (groups, tiles, n_taps, sources, tile), padding
    tiles with zeros. `swap` transposes it, so that each group maps its outputs to its inputs."""
    n_to, n_from = (n_in, n_out) if swap else (n_out, n_in)
    n_tiles = (n_to + tile - 1) // tile
    for g in range(groups):
        for j in range(n_tiles * tile):
            base = ((g * n_tiles + j // tile) * n_taps) * n_from * tile + j % tile
            for i in range(n_from):
                o, c = (i, j) if swap else (j, i)
                for t in range(n_taps):
                    at = base + (t * n_from + i) * tile
                    packed[at] = weight[((g * n_out + o) * n_in + c) * n_taps + t] if j < n_to else 0.0


@entry
def correlate(
    x: _Floats, packed: _Floats, bias: _Floats, out: _Floats, n_samples: int, groups: int, n_in: int,
    n_out: int, in_space: tuple[int, int], out_space: tuple[int, int], kernel_width: int,
    row_at: _Ints, row_tap: _Ints, row_in: _Ints, col_at: _Ints, col_tap: _Ints, col_in: _Ints, rows: tuple[int, ...],
) -> None:  # fmt: skip
    """Write to `out` bias + the sum over taps. n_in, n_out are per group; `rows` are the channels of a tile: 0, 1, ...

    If a block has so few samples that its second half of lanes is empty, two tiles are computed together instead.
    """
    plane, out_plane, size = plane_size(in_space), plane_size(out_space), len(rows)
    channels, none = simd.numbers(rows), simd.zeros(x, rows, ONE)
    n_tiles = (n_out + size - 1) // size
    tile_size = packed.size // (groups * n_tiles)
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            x_base = (b * groups + g) * n_in * plane
            for tile in range(0, n_tiles, 1 if wide else 2):
                w_base = (g * n_tiles + tile) * tile_size
                beside = not wide and tile + 1 < n_tiles
                first = g * n_out + size * tile
                first2, jump = (first + size, tile_size) if beside else (first, 0)
                n = n_out - size * tile  # further channels of this tile are not stored
                n2 = n - size if beside else n
                low_rows, high_rows = simd.limited(channels, n - 1, 1), simd.limited(channels, n2 - 1, 1)
                for y in range(out_space[0]):
                    for column in range(out_space[1]):
                        low, high = simd.splat(bias, first, low_rows), simd.splat(bias, first2, high_rows)
                        for j in range(row_at[y], row_at[y + 1]):
                            for i in range(col_at[column], col_at[column + 1]):
                                w = w_base + (row_tap[j] * kernel_width + col_tap[i]) * n_in * size
                                p = x_base + (row_in[j] * in_space[1] + col_in[i]) * LANES
                                for _ in range(n_in):
                                    factors, v = simd.splat(packed, w, channels), simd.load(x, p, ONE)
                                    low = simd.fma(factors, v, low)
                                    if wide:
                                        v = simd.load(x, p + WIDTH, ONE)
                                    else:
                                        factors = simd.splat(packed, w + jump, channels)
                                    high = simd.fma(factors, v, high)
                                    p += plane
                                    w += size
                        at = (b * groups * n_out + first) * out_plane + (y * out_space[1] + column) * LANES
                        simd.store(low, out, at, out_plane, n, ONE)
                        if wide:
                            simd.store(high, out, at + WIDTH, out_plane, n, ONE)
                        else:
                            simd.store(none, out, at + WIDTH, out_plane, n, ONE)
                        if beside:
                            at += size * out_plane
                            simd.store(high, out, at, out_plane, n2, ONE)
                            simd.store(none, out, at + WIDTH, out_plane, n2, ONE)


@entry
def _inside(n_out: int, n_in: int, stride: int, shift: int, low: int, high: int) -> tuple[int, int]:
    """Return the range (first, end) of outputs in low..high-1 whose input o * stride + shift exists."""
    first = max(low, 0 if shift >= 0 else (-shift + stride - 1) // stride)
    behind = (n_in - 1 - shift) // stride + 1 if n_in > shift else 0
    return first, max(first, min(high, n_out, behind))


@entry
def weight_gradient(
    x: _Floats, dy: _Floats, dw: _Floats, n_samples: int, groups: int, n_in: int, n_out: int,
    in_space: tuple[int, int], out_space: tuple[int, int], kernel: tuple[int, int],
    stride: tuple[int, int], padding: tuple[int, int], rows: tuple[int, ...], columns: tuple[int, ...],
) -> None:  # fmt: skip
    """Add to `dw` (groups * n_out, n_in, taps) the sums of dy * x; `rows` are the outputs of a tile, 0, 1, ..., and
    `columns` its inputs.

    If a tile exceeds the last channel, it computes that channel repeatedly but stores it once. Tiles of one column have
    separate sums of the halves of the lanes, because registers would be unused otherwise.
    """
    plane, out_plane = plane_size(in_space), plane_size(out_space)
    n_taps, step = kernel[0] * kernel[1], stride[1] * LANES
    n_rows = max(1, _PIXELS // out_space[1])
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            for top in range(0, out_space[0], n_rows):
                for o in range(0, n_out, len(rows)):
                    y0 = ((b * groups + g) * n_out + o) * out_plane
                    outputs = simd.limited(rows, n_out - 1 - o, out_plane)
                    for tap in range(n_taps):
                        sy, sx = tap // kernel[1] - padding[0], tap % kernel[1] - padding[1]
                        row0, row1 = _inside(out_space[0], in_space[0], stride[0], sy, top, top + n_rows)
                        col0, col1 = _inside(out_space[1], in_space[1], stride[1], sx, 0, out_space[1])
                        for c in range(0, n_in, len(columns)):
                            x0 = ((b * groups + g) * n_in + c) * plane
                            inputs = simd.limited(columns, n_in - 1 - c, plane)
                            sums = more = simd.zeros(x, rows, columns)
                            for row in range(row0, row1):
                                q = y0 + (row * out_space[1] + col0) * LANES
                                p = x0 + ((row * stride[0] + sy) * in_space[1] + col0 * stride[1] + sx) * LANES
                                for _ in range(col1 - col0):
                                    sums = simd.add_products(sums, dy, q, outputs, simd.load(x, p, inputs))
                                    if wide:
                                        high = simd.load(x, p + WIDTH, inputs)
                                        if len(columns) == 1:
                                            more = simd.add_products(more, dy, q + WIDTH, outputs, high)
                                        else:
                                            sums = simd.add_products(sums, dy, q + WIDTH, outputs, high)
                                    p += step
                                    q += LANES
                            at = ((g * n_out + o) * n_in + c) * n_taps + tap
                            sums = simd.add(sums, more)
                            simd.add_totals(sums, dw, at, n_in * n_taps, n_out - o, n_taps, n_in - c, columns)


@entry
def bias_gradient(dy: _Floats, db: _Floats, n_blocks: int, channels: int, space: tuple[int, int]) -> None:
    """Add to `db` (channels,) the sums of `dy` over samples and pixels."""
    for b in range(n_blocks):
        for c in range(channels):
            low = high = simd.zeros(dy, ONE, ONE)
            at = (b * channels + c) * plane_size(space)
            for _ in range(space[0] * space[1]):
                low, high = simd.add(low, simd.load(dy, at, ONE)), simd.add(high, simd.load(dy, at + WIDTH, ONE))
                at += LANES
            simd.add_totals(simd.add(low, high), db, c, 0, 1, 0, 1, ONE)


@entry
def to_maps(x: _Floats, out: _Floats, n: int, channels: int, space: tuple[int, int]) -> None:
    """Write samples (n, channels * height * width) to `out` (n_blocks, channels, plane), with zeros after sample n."""
    pixels, plane = space[0] * space[1], plane_size(space)
    for b in range((n + LANES - 1) // LANES):
        valid = min(LANES, n - b * LANES)
        for c in range(channels):
            for pixel in range(pixels):
                at = (b * channels + c) * plane + pixel * LANES
                source = (b * LANES * channels + c) * pixels + pixel
                for lane in range(valid):
                    out[at + lane] = x[source + lane * channels * pixels]
                for lane in range(valid, LANES):
                    out[at + lane] = 0.0


@entry
def from_maps(x: _Floats, out: _Floats, n: int, channels: int, space: tuple[int, int]) -> None:
    """Write maps (n_blocks, channels, plane) to samples `out` (n, channels * height * width)."""
    pixels, plane = space[0] * space[1], plane_size(space)
    for b in range((n + LANES - 1) // LANES):
        for c in range(channels):
            for pixel in range(pixels):
                source = (b * channels + c) * plane + pixel * LANES
                at = (b * LANES * channels + c) * pixels + pixel
                for lane in range(min(LANES, n - b * LANES)):
                    out[at + lane * channels * pixels] = x[source + lane]


@entry
def max_pool(
    x: _Floats, out: _Floats, n_maps: int, in_space: tuple[int, int], out_space: tuple[int, int],
    row_from: _Ints, row_to: _Ints, col_from: _Ints, col_to: _Ints,
) -> None:  # fmt: skip
    """Write the maximum of every window; n_maps = n_blocks * channels."""
    for m in range(n_maps):
        base, at = m * plane_size(in_space), m * plane_size(out_space)
        for y in range(out_space[0]):
            for column in range(out_space[1]):
                first = base + (row_from[y] * in_space[1] + col_from[column]) * LANES
                most = simd.load(x, first, HALVES)
                for row in range(row_from[y], row_to[y]):
                    for i in range(col_from[column], col_to[column]):
                        p = base + (row * in_space[1] + i) * LANES
                        most = simd.maximum(most, simd.load(x, p, HALVES))
                simd.store(most, out, at, 0, 1, HALVES)
                at += LANES


@entry
def max_pool_gradient(
    x: _Floats, out: _Floats, dy: _Floats, dx: _Floats, n_maps: int, in_space: tuple[int, int],
    out_space: tuple[int, int], row_from: _Ints, row_to: _Ints, col_from: _Ints, col_to: _Ints,
) -> None:  # fmt: skip
    """Write `dx`: each window's gradient goes to the first element that equals its maximum."""
    none = simd.zeros(x, ONE, HALVES)
    for m in range(n_maps):
        base, at = m * plane_size(in_space), m * plane_size(out_space)
        dx[base : base + plane_size(in_space)] = 0.0
        for y in range(out_space[0]):
            for column in range(out_space[1]):
                top, left = simd.load(out, at, HALVES), simd.load(dy, at, HALVES)
                for row in range(row_from[y], row_to[y]):
                    for i in range(col_from[column], col_to[column]):
                        p = base + (row * in_space[1] + i) * LANES
                        value = simd.load(x, p, HALVES)
                        slope = simd.add(simd.load(dx, p, HALVES), simd.blend_equal(value, top, left, none))
                        simd.store(slope, dx, p, 0, 1, HALVES)
                        left = simd.blend_equal(value, top, none, left)
                at += LANES


@entry
def average_pool(
    x: _Floats, out: _Floats, n_maps: int, in_space: tuple[int, int], out_space: tuple[int, int],
    row_from: _Ints, row_to: _Ints, col_from: _Ints, col_to: _Ints, row_share: _Floats, col_share: _Floats,
) -> None:  # fmt: skip
    """Write the sum of every window times row_share[y] * col_share[x]."""
    for m in range(n_maps):
        base, at = m * plane_size(in_space), m * plane_size(out_space)
        for y in range(out_space[0]):
            for column in range(out_space[1]):
                out[at] = row_share[y] * col_share[column]
                share = simd.splat(out, at, ONE)
                sums = simd.zeros(x, ONE, HALVES)
                for row in range(row_from[y], row_to[y]):
                    for i in range(col_from[column], col_to[column]):
                        p = base + (row * in_space[1] + i) * LANES
                        sums = simd.add(sums, simd.load(x, p, HALVES))
                mean = simd.fma(sums, share, simd.zeros(x, ONE, ONE))
                simd.store(mean, out, at, 0, 1, HALVES)
                at += LANES


@entry
def average_pool_gradient(
    dy: _Floats, dx: _Floats, n_maps: int, in_space: tuple[int, int], out_space: tuple[int, int],
    row_from: _Ints, row_to: _Ints, col_from: _Ints, col_to: _Ints, row_share: _Floats, col_share: _Floats,
) -> None:  # fmt: skip
    """Write `dx`: each window's gradient, times its share, goes to all of its elements."""
    for m in range(n_maps):
        base, at = m * plane_size(in_space), m * plane_size(out_space)
        dx[base : base + plane_size(in_space)] = 0.0
        for y in range(out_space[0]):
            for column in range(out_space[1]):
                first = dx[base]
                dx[base] = row_share[y] * col_share[column]
                factor, slope = simd.splat(dx, base, ONE), simd.load(dy, at, HALVES)
                dx[base] = first
                for row in range(row_from[y], row_to[y]):
                    for i in range(col_from[column], col_to[column]):
                        p = base + (row * in_space[1] + i) * LANES
                        simd.store(simd.fma(slope, factor, simd.load(dx, p, HALVES)), dx, p, 0, 1, HALVES)
                at += LANES


@entry
def channel_sums(
    a: _Floats, b: _Floats, shift_a: _Floats, scale_b: _Floats, shift_b: _Floats, lanes: _Floats,
    sums: npt.NDArray[np.float64], n: int, channels: int, space: tuple[int, int],
) -> None:  # fmt: skip
    """Write to `sums` (channels,) the sums over samples and pixels of (a + shift_a) * (b * scale_b + shift_b).

    Shifts and scales are per channel. Lanes after sample n are ignored; planes are added in float64. `lanes` (LANES,)
    is scratch space.
    """
    sums[:] = 0.0
    for block in range((n + LANES - 1) // LANES):
        for c in range(channels):
            at = (block * channels + c) * plane_size(space)
            total = simd.zeros(a, ONE, HALVES)
            u, v, w = simd.splat(shift_a, c, ONE), simd.splat(scale_b, c, ONE), simd.splat(shift_b, c, ONE)
            for _ in range(space[0] * space[1]):
                second = simd.fma(simd.load(b, at, HALVES), v, w)
                total = simd.fma(simd.add(simd.load(a, at, HALVES), u), second, total)
                at += LANES
            simd.store(total, lanes, 0, 0, 1, HALVES)
            for lane in range(min(LANES, n - block * LANES)):
                sums[c] += lanes[lane]


@entry
def scale_channels(
    dy: _Floats, x: _Floats, dx: _Floats, on_dy: _Floats, on_x: _Floats, shift: _Floats, n: int,
    channels: int, space: tuple[int, int],
) -> None:  # fmt: skip
    """Write dx = dy * on_dy + x * on_x + shift, all per channel, and zeros in the lanes after sample n."""
    for m in range((n + LANES - 1) // LANES * channels):
        c, at = m % channels, m * plane_size(space)
        p, q, r = simd.splat(on_dy, c, ONE), simd.splat(on_x, c, ONE), simd.splat(shift, c, ONE)
        for _ in range(space[0] * space[1]):
            slope = simd.fma(simd.load(dy, at, HALVES), p, simd.fma(simd.load(x, at, HALVES), q, r))
            simd.store(slope, dx, at, 0, 1, HALVES)
            at += LANES
        valid = n - m // channels * LANES
        if valid < LANES:
            for pixel in range(space[0] * space[1]):
                start = m * plane_size(space) + pixel * LANES
                dx[start + valid : start + LANES] = 0.0
