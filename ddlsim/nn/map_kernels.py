"""Compiled conversions, pooling and batch normalisation on activations of shape (n_blocks, channels, plane).

The layout is that of :mod:`ddlsim.nn.conv_kernels`. Pooling windows are tables, already limited to the input: output
row y covers input rows ``row_from[y] .. row_to[y] - 1``, and likewise for columns.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry
from ddlsim.nn.conv_kernels import LANES, plane_size
from ddlsim.nn.vectors import HALVES, ONE, simd

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]


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
            found = simd.zeros(a, ONE, HALVES)
            u, v, w = simd.splat(shift_a, c, ONE), simd.splat(scale_b, c, ONE), simd.splat(shift_b, c, ONE)
            for _ in range(space[0] * space[1]):
                second = simd.fma(simd.load(b, at, HALVES), v, w)
                found = simd.fma(simd.add(simd.load(a, at, HALVES), u), second, found)
                at += LANES
            simd.store(found, lanes, 0, 0, 1, HALVES)
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
