"""Compiled matrix products of dense layers, and the core of attention.

BLAS is not used, because its threads wait by spinning, which is slow if several simulations share a computer, and
because its sums depend on the number of threads. These kernels run on the caller's thread and add in a fixed order.

Attention: softmax(q k^T / sqrt(d)) v for each sample and head, and its gradient. All arrays are flat; q, k and v are
columns of rows of `width` numbers, one row per token, in which the numbers of a head are contiguous from `at` on.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry
from ddlsim.nn.vectors import HALVES, WIDTH, simd

# mypy: disable-error-code="misc,untyped-decorator"


_Floats = npt.NDArray[np.floating]


#: rows and columns of the tiles of products
_ROWS, _COLUMNS = (0, 1, 2, 3), (0, 1, 2)
_MORE_ROWS = (0, 1, 2, 3, 4, 5)


@entry
def product_transposed(x: _Floats, w: _Floats, out: _Floats, n: int, n_in: int, n_out: int) -> None:
    """Write out (n, n_out) = x (n, n_in) w^T, w being (n_out, n_in); all flat. Tiles of 4 rows and 3 columns.

    If a tile exceeds the last row or column, it computes that one repeatedly but stores it once.
    """
    whole = n_in // WIDTH * WIDTH
    out[:] = 0.0
    for u in range(0, n_out, 3):
        columns = simd.limited(_COLUMNS, n_out - 1 - u, n_in)
        for r in range(0, n, 4):
            rows = simd.limited(_ROWS, n - 1 - r, n_in)
            sums = simd.zeros(x, _ROWS, _COLUMNS)
            for k in range(0, whole, WIDTH):
                sums = simd.add_products(sums, x, r * n_in + k, rows, simd.load(w, u * n_in + k, columns))
            simd.add_totals(sums, out, r * n_out + u, n_out, n - r, 1, n_out - u, _COLUMNS)
    for r in range(n if whole < n_in else 0):
        for u in range(n_out):
            for k in range(whole, n_in):
                out[r * n_out + u] += x[r * n_in + k] * w[u * n_in + k]


@entry
def product(a: _Floats, row_step: int, k_step: int, b: _Floats, out: _Floats, n: int, n_k: int, n_out: int) -> None:
    """Write out (n, n_out) = A (n, n_k) b (n_k, n_out), where A[r, k] = a[r * row_step + k * k_step].

    Tiles of 6 rows and 16 columns; the last ones overlap the previous ones, or are narrow if there are fewer columns.
    """
    if n_out < 2 * WIDTH:
        _narrow_product(a, row_step, k_step, b, out, n, n_k, n_out)
        return
    for tile in range(0, n_out, 2 * WIDTH):
        j = min(tile, n_out - 2 * WIDTH)
        for r in range(0, n, 6):
            rows = simd.limited(_MORE_ROWS, n - 1 - r, row_step)
            sums = simd.zeros(a, _MORE_ROWS, HALVES)
            at = j
            for k in range(0, n_k * k_step, k_step):
                sums = simd.add_multiples(sums, a, r * row_step + k, rows, simd.load(b, at, HALVES))
                at += n_out
            simd.store(sums, out, r * n_out + j, n_out, n - r, HALVES)


@entry
def _narrow_product(
    a: _Floats, row_step: int, k_step: int, b: _Floats, out: _Floats, n: int, n_k: int, n_out: int
) -> None:
    """The same for fewer columns than a tile."""
    for r in range(n):
        out[r * n_out : (r + 1) * n_out] = 0.0
        for k in range(n_k):
            for j in range(n_out):
                out[r * n_out + j] += a[r * row_step + k * k_step] * b[k * n_out + j]


@entry
def attend(
    rows: _Floats, weights: _Floats, mixed: _Floats, n: int, tokens: int, heads: int, d: int, causal: bool
) -> None:
    """Write weights (n, heads, tokens, tokens) and mixed (n, tokens, heads * d) for rows (n, tokens, 3 * heads * d) of
    queries, keys and values (Vaswani et al. 2017, equation 1). With `causal`, tokens do not attend to later ones."""
    width, scale = 3 * heads * d, 1.0 / math.sqrt(d)
    for sample in range(n):
        for head in range(heads):
            for i in range(tokens):
                query = (sample * tokens + i) * width + head * d
                first = ((sample * heads + head) * tokens + i) * tokens
                last = i + 1 if causal else tokens
                top = -np.inf
                for j in range(last):
                    key = (sample * tokens + j) * width + (heads + head) * d
                    score = rows[query] * rows[key]
                    for c in range(1, d):
                        score += rows[query + c] * rows[key + c]
                    score *= scale
                    weights[first + j] = score
                    top = max(top, score)
                total = 0.0
                for j in range(last):
                    weights[first + j] = math.exp(weights[first + j] - top)
                    total += weights[first + j]
                out = (sample * tokens + i) * heads * d + head * d
                for c in range(d):
                    mixed[out + c] = 0.0
                for j in range(tokens):
                    weights[first + j] = weights[first + j] / total if j < last else 0.0
                for j in range(last):
                    value = (sample * tokens + j) * width + (2 * heads + head) * d
                    for c in range(d):
                        mixed[out + c] += weights[first + j] * rows[value + c]


@entry
def attend_gradient(rows: _Floats, weights: _Floats, dmixed: _Floats, drows: _Floats, slopes: _Floats, n: int,
                    tokens: int, heads: int, d: int, causal: bool) -> None:  # fmt: skip
    """Write the gradient of the rows, given that of `mixed`; ``slopes`` (tokens,) is scratch space.

    With p = softmax(s): ds = p * (dp - sum(p * dp)).
    """
    width, scale = 3 * heads * d, 1.0 / math.sqrt(d)
    drows[:] = 0.0
    for sample in range(n):
        for head in range(heads):
            for i in range(tokens):
                query = (sample * tokens + i) * width + head * d
                first = ((sample * heads + head) * tokens + i) * tokens
                out = (sample * tokens + i) * heads * d + head * d
                last = i + 1 if causal else tokens
                along = 0.0
                for j in range(last):
                    value = (sample * tokens + j) * width + (2 * heads + head) * d
                    slope = dmixed[out] * rows[value]
                    drows[value] += weights[first + j] * dmixed[out]
                    for c in range(1, d):
                        slope += dmixed[out + c] * rows[value + c]
                        drows[value + c] += weights[first + j] * dmixed[out + c]
                    slopes[j] = slope
                    along += weights[first + j] * slope
                for j in range(last):
                    key = (sample * tokens + j) * width + (heads + head) * d
                    ds = weights[first + j] * (slopes[j] - along) * scale
                    for c in range(d):
                        drows[query + c] += ds * rows[key + c]
                        drows[key + c] += ds * rows[query + c]
