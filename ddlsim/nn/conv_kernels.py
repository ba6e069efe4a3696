"""Compiled convolution on activations whose innermost dimension is the sample.

Activations are flat arrays of shape (n_blocks, channels, plane): at each pixel, they store LANES samples next to each
other. Every convolution, whatever its sizes, is therefore a sum of vectors times scalar weights, without copying
windows into a matrix. A tile of output channels stays in registers while all taps of a window are added.

The input gradient is the same sum over other neighbours, so both use tables (:class:`ddlsim.nn.layers.Taps`): for
output row y, entries ``row_at[y] .. row_at[y + 1]`` of ``row_tap`` (kernel row) and ``row_in`` (input row); the same
for columns.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry, inlined
from ddlsim.nn.vectors import WIDTH, add, fma, load, splat, store, total, zeros

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


@inlined
def _store2(out, at, step, last, a, b):  # type: ignore[no-untyped-def]
    """Store two vectors `step` elements apart, omitting those after the `last`."""
    if last >= 0:
        store(out, at, a)
    if last >= 1:
        store(out, at + step, b)


@entry
def correlate4(
    x: _Floats, packed: _Floats, bias: _Floats, out: _Floats, n_samples: int, groups: int, n_in: int,
    n_out: int, in_space: tuple[int, int], out_space: tuple[int, int], kernel_width: int,
    row_at: _Ints, row_tap: _Ints, row_in: _Ints, col_at: _Ints, col_tap: _Ints, col_in: _Ints,
) -> None:  # fmt: skip
    """Write to `out` bias + the sum over taps; tiles of 4 output channels. n_in, n_out are per group.

    If a block has so few samples that its second half of lanes is empty, two tiles are computed together instead.
    """
    plane, out_plane, z = plane_size(in_space), plane_size(out_space), zeros(x)
    n_tiles = (n_out + 3) // 4
    tile_size = packed.size // (groups * n_tiles)
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            x_base = (b * groups + g) * n_in * plane
            for tile in range(0, n_tiles, 1 if wide else 2):
                w_base = (g * n_tiles + tile) * tile_size
                beside = not wide and tile + 1 < n_tiles
                first = g * n_out + 4 * tile
                first2, jump = (first + 4, tile_size) if beside else (first, 0)
                last = n_out - 1 - 4 * tile  # further channels of this tile are not stored
                last2 = last - 4 if beside else last
                for y in range(out_space[0]):
                    for column in range(out_space[1]):
                        a0, a1 = splat(bias, first), splat(bias, first + min(1, last))
                        a2, a3 = splat(bias, first + min(2, last)), splat(bias, first + min(3, last))
                        b0, b1 = splat(bias, first2), splat(bias, first2 + min(1, last2))
                        b2, b3 = splat(bias, first2 + min(2, last2)), splat(bias, first2 + min(3, last2))
                        for j in range(row_at[y], row_at[y + 1]):
                            for i in range(col_at[column], col_at[column + 1]):
                                w = w_base + (row_tap[j] * kernel_width + col_tap[i]) * n_in * 4
                                p = x_base + (row_in[j] * in_space[1] + col_in[i]) * LANES
                                for _ in range(n_in):
                                    s0, s1 = splat(packed, w), splat(packed, w + 1)
                                    s2, s3 = splat(packed, w + 2), splat(packed, w + 3)
                                    v = load(x, p)
                                    a0, a1 = fma(s0, v, a0), fma(s1, v, a1)
                                    a2, a3 = fma(s2, v, a2), fma(s3, v, a3)
                                    if wide:
                                        v = load(x, p + WIDTH)
                                    else:
                                        u = w + jump
                                        s0, s1 = splat(packed, u), splat(packed, u + 1)
                                        s2, s3 = splat(packed, u + 2), splat(packed, u + 3)
                                    b0, b1 = fma(s0, v, b0), fma(s1, v, b1)
                                    b2, b3 = fma(s2, v, b2), fma(s3, v, b3)
                                    p += plane
                                    w += 4
                        at = (b * groups * n_out + first) * out_plane + (y * out_space[1] + column) * LANES
                        _store2(out, at, out_plane, last, a0, a1)
                        _store2(out, at + 2 * out_plane, out_plane, last - 2, a2, a3)
                        if wide:
                            _store2(out, at + WIDTH, out_plane, last, b0, b1)
                            _store2(out, at + WIDTH + 2 * out_plane, out_plane, last - 2, b2, b3)
                        else:
                            _store2(out, at + WIDTH, out_plane, last, z, z)
                            _store2(out, at + WIDTH + 2 * out_plane, out_plane, last - 2, z, z)
                        if beside:
                            _store2(out, at + 4 * out_plane, out_plane, last2, b0, b1)
                            _store2(out, at + 4 * out_plane + 2 * out_plane, out_plane, last2 - 2, b2, b3)
                            _store2(out, at + 4 * out_plane + WIDTH, out_plane, last2, z, z)
                            _store2(out, at + 4 * out_plane + WIDTH + 2 * out_plane, out_plane, last2 - 2, z, z)


@entry
def correlate6(
    x: _Floats, packed: _Floats, bias: _Floats, out: _Floats, n_samples: int, groups: int, n_in: int,
    n_out: int, in_space: tuple[int, int], out_space: tuple[int, int], kernel_width: int,
    row_at: _Ints, row_tap: _Ints, row_in: _Ints, col_at: _Ints, col_tap: _Ints, col_in: _Ints,
) -> None:  # fmt: skip
    """The same as :func:`correlate4` with tiles of 6 output channels; n_out must be a multiple of 6."""
    plane, out_plane, z = plane_size(in_space), plane_size(out_space), zeros(x)
    n_tiles = n_out // 6
    tile_size = packed.size // (groups * n_tiles)
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            x_base = (b * groups + g) * n_in * plane
            for tile in range(0, n_tiles, 1 if wide else 2):
                w_base = (g * n_tiles + tile) * tile_size
                beside = not wide and tile + 1 < n_tiles
                first = g * n_out + 6 * tile
                first2, jump = (first + 6, tile_size) if beside else (first, 0)
                for y in range(out_space[0]):
                    for column in range(out_space[1]):
                        a0, a1, a2 = splat(bias, first), splat(bias, first + 1), splat(bias, first + 2)
                        a3, a4, a5 = splat(bias, first + 3), splat(bias, first + 4), splat(bias, first + 5)
                        b0, b1, b2 = splat(bias, first2), splat(bias, first2 + 1), splat(bias, first2 + 2)
                        b3, b4, b5 = splat(bias, first2 + 3), splat(bias, first2 + 4), splat(bias, first2 + 5)
                        for j in range(row_at[y], row_at[y + 1]):
                            for i in range(col_at[column], col_at[column + 1]):
                                w = w_base + (row_tap[j] * kernel_width + col_tap[i]) * n_in * 6
                                p = x_base + (row_in[j] * in_space[1] + col_in[i]) * LANES
                                for _ in range(n_in):
                                    s0, s1, s2 = splat(packed, w), splat(packed, w + 1), splat(packed, w + 2)
                                    s3, s4, s5 = splat(packed, w + 3), splat(packed, w + 4), splat(packed, w + 5)
                                    v = load(x, p)
                                    a0, a1, a2 = fma(s0, v, a0), fma(s1, v, a1), fma(s2, v, a2)
                                    a3, a4, a5 = fma(s3, v, a3), fma(s4, v, a4), fma(s5, v, a5)
                                    if wide:
                                        v = load(x, p + WIDTH)
                                    else:
                                        u = w + jump
                                        s0, s1, s2 = splat(packed, u), splat(packed, u + 1), splat(packed, u + 2)
                                        s3, s4, s5 = splat(packed, u + 3), splat(packed, u + 4), splat(packed, u + 5)
                                    b0, b1, b2 = fma(s0, v, b0), fma(s1, v, b1), fma(s2, v, b2)
                                    b3, b4, b5 = fma(s3, v, b3), fma(s4, v, b4), fma(s5, v, b5)
                                    p += plane
                                    w += 6
                        at = (b * groups * n_out + first) * out_plane + (y * out_space[1] + column) * LANES
                        _store2(out, at, out_plane, 1, a0, a1)
                        _store2(out, at + 2 * out_plane, out_plane, 1, a2, a3)
                        _store2(out, at + 4 * out_plane, out_plane, 1, a4, a5)
                        if wide:
                            _store2(out, at + WIDTH, out_plane, 1, b0, b1)
                            _store2(out, at + WIDTH + 2 * out_plane, out_plane, 1, b2, b3)
                            _store2(out, at + WIDTH + 4 * out_plane, out_plane, 1, b4, b5)
                        else:
                            _store2(out, at + WIDTH, out_plane, 1, z, z)
                            _store2(out, at + WIDTH + 2 * out_plane, out_plane, 1, z, z)
                            _store2(out, at + WIDTH + 4 * out_plane, out_plane, 1, z, z)
                        if beside:
                            _store2(out, at + 6 * out_plane, out_plane, 1, b0, b1)
                            _store2(out, at + 6 * out_plane + 2 * out_plane, out_plane, 1, b2, b3)
                            _store2(out, at + 6 * out_plane + 4 * out_plane, out_plane, 1, b4, b5)
                            _store2(out, at + 6 * out_plane + WIDTH, out_plane, 1, z, z)
                            _store2(out, at + 6 * out_plane + WIDTH + 2 * out_plane, out_plane, 1, z, z)
                            _store2(out, at + 6 * out_plane + WIDTH + 4 * out_plane, out_plane, 1, z, z)


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
    stride: tuple[int, int], padding: tuple[int, int],
) -> None:  # fmt: skip
    """Add to `dw` (groups * n_out, n_in, taps) the sums of dy * x; tiles of 4 outputs and 3 inputs.

    If a tile exceeds the last channel, it computes that channel repeatedly but stores it once.
    """
    plane, out_plane = plane_size(in_space), plane_size(out_space)
    n_taps, step = kernel[0] * kernel[1], stride[1] * LANES
    n_rows = max(1, _PIXELS // out_space[1])
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            for top in range(0, out_space[0], n_rows):
                for o in range(0, n_out, 4):
                    o_last = n_out - 1 - o
                    y0 = ((b * groups + g) * n_out + o) * out_plane
                    y1, y2 = y0 + min(1, o_last) * out_plane, y0 + min(2, o_last) * out_plane
                    y3 = y0 + min(3, o_last) * out_plane
                    for tap in range(n_taps):
                        sy, sx = tap // kernel[1] - padding[0], tap % kernel[1] - padding[1]
                        row0, row1 = _inside(out_space[0], in_space[0], stride[0], sy, top, top + n_rows)
                        col0, col1 = _inside(out_space[1], in_space[1], stride[1], sx, 0, out_space[1])
                        for c in range(0, n_in, 3):
                            c_last = n_in - 1 - c
                            x0 = ((b * groups + g) * n_in + c) * plane
                            x1, x2 = min(1, c_last) * plane, min(2, c_last) * plane
                            a00, a01, a02 = zeros(x), zeros(x), zeros(x)
                            a10, a11, a12, a20, a21, a22 = a00, a00, a00, a00, a00, a00
                            a30, a31, a32 = a00, a00, a00
                            for row in range(row0, row1):
                                q = (row * out_space[1] + col0) * LANES
                                p = x0 + ((row * stride[0] + sy) * in_space[1] + col0 * stride[1] + sx) * LANES
                                for _ in range(col1 - col0):
                                    for half in range(0, LANES if wide else WIDTH, WIDTH):
                                        u, v, w = (load(x, p + half), load(x, p + x1 + half), load(x, p + x2 + half))
                                        d = load(dy, y0 + q + half)
                                        a00, a01, a02 = fma(d, u, a00), fma(d, v, a01), fma(d, w, a02)
                                        d = load(dy, y1 + q + half)
                                        a10, a11, a12 = fma(d, u, a10), fma(d, v, a11), fma(d, w, a12)
                                        d = load(dy, y2 + q + half)
                                        a20, a21, a22 = fma(d, u, a20), fma(d, v, a21), fma(d, w, a22)
                                        d = load(dy, y3 + q + half)
                                        a30, a31, a32 = fma(d, u, a30), fma(d, v, a31), fma(d, w, a32)
                                    p += step
                                    q += LANES
                            at = ((g * n_out + o) * n_in + c) * n_taps + tap
                            _add3(dw, at, n_taps, c_last, a00, a01, a02)
                            at += n_in * n_taps
                            if o_last >= 1:
                                _add3(dw, at, n_taps, c_last, a10, a11, a12)
                            at += n_in * n_taps
                            if o_last >= 2:
                                _add3(dw, at, n_taps, c_last, a20, a21, a22)
                            at += n_in * n_taps
                            if o_last >= 3:
                                _add3(dw, at, n_taps, c_last, a30, a31, a32)


@inlined
def _add3(dw, at, step, last, a, b, c):  # type: ignore[no-untyped-def]
    """Add the lane sums of three vectors to elements `step` apart, omitting those after the `last`."""
    dw[at] += total(a)
    if last >= 1:
        dw[at + step] += total(b)
    if last >= 2:
        dw[at + 2 * step] += total(c)


@entry
def weight_gradient1(
    x: _Floats, dy: _Floats, dw: _Floats, n_samples: int, groups: int, n_in: int, n_out: int,
    in_space: tuple[int, int], out_space: tuple[int, int], kernel: tuple[int, int],
    stride: tuple[int, int], padding: tuple[int, int],
) -> None:  # fmt: skip
    """The same as :func:`weight_gradient` for one or two inputs: tiles of 6 outputs and 1 input."""
    plane, out_plane = plane_size(in_space), plane_size(out_space)
    n_taps, step = kernel[0] * kernel[1], stride[1] * LANES
    n_rows = max(1, _PIXELS // out_space[1])
    for b in range((n_samples + LANES - 1) // LANES):
        wide = n_samples - b * LANES > WIDTH  # else the second half of the lanes is empty
        for g in range(groups):
            for top in range(0, out_space[0], n_rows):
                for o in range(0, n_out, 6):
                    last = n_out - 1 - o
                    y0 = ((b * groups + g) * n_out + o) * out_plane
                    y1, y2 = y0 + min(1, last) * out_plane, y0 + min(2, last) * out_plane
                    y3, y4 = y0 + min(3, last) * out_plane, y0 + min(4, last) * out_plane
                    y5 = y0 + min(5, last) * out_plane
                    for tap in range(n_taps):
                        sy, sx = tap // kernel[1] - padding[0], tap % kernel[1] - padding[1]
                        row0, row1 = _inside(out_space[0], in_space[0], stride[0], sy, top, top + n_rows)
                        col0, col1 = _inside(out_space[1], in_space[1], stride[1], sx, 0, out_space[1])
                        for c in range(n_in):
                            x0 = ((b * groups + g) * n_in + c) * plane
                            a0, a1, a2, a3, a4, a5 = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
                            b0, b1, b2, b3, b4, b5 = a0, a1, a2, a3, a4, a5
                            for row in range(row0, row1):
                                q = (row * out_space[1] + col0) * LANES
                                p = x0 + ((row * stride[0] + sy) * in_space[1] + col0 * stride[1] + sx) * LANES
                                for _ in range(col1 - col0):
                                    u = load(x, p)
                                    a0, a1 = fma(load(dy, y0 + q), u, a0), fma(load(dy, y1 + q), u, a1)
                                    a2, a3 = fma(load(dy, y2 + q), u, a2), fma(load(dy, y3 + q), u, a3)
                                    a4, a5 = fma(load(dy, y4 + q), u, a4), fma(load(dy, y5 + q), u, a5)
                                    if wide:
                                        u, r = load(x, p + WIDTH), q + WIDTH
                                        b0, b1 = fma(load(dy, y0 + r), u, b0), fma(load(dy, y1 + r), u, b1)
                                        b2, b3 = fma(load(dy, y2 + r), u, b2), fma(load(dy, y3 + r), u, b3)
                                        b4, b5 = fma(load(dy, y4 + r), u, b4), fma(load(dy, y5 + r), u, b5)
                                    p += step
                                    q += LANES
                            at = ((g * n_out + o) * n_in + c) * n_taps + tap
                            jump = n_in * n_taps
                            _add3(dw, at, jump, last, add(a0, b0), add(a1, b1), add(a2, b2))
                            if last >= 3:
                                _add3(dw, at + 3 * jump, jump, last - 3, add(a3, b3), add(a4, b4), add(a5, b5))


@entry
def bias_gradient(dy: _Floats, db: _Floats, n_blocks: int, channels: int, space: tuple[int, int]) -> None:
    """Add to `db` (channels,) the sums of `dy` over samples and pixels."""
    for b in range(n_blocks):
        for c in range(channels):
            low, high = zeros(dy), zeros(dy)
            at = (b * channels + c) * plane_size(space)
            for _ in range(space[0] * space[1]):
                low, high = add(low, load(dy, at)), add(high, load(dy, at + WIDTH))
                at += LANES
            db[c] += total(add(low, high))
