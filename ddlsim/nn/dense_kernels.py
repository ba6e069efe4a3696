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

from ddlsim.compiler import entry, inlined
from ddlsim.nn.vectors import WIDTH, fma, load, splat, store, total, zeros

# mypy: disable-error-code="misc,untyped-decorator"


_Floats = npt.NDArray[np.floating]


@inlined
def _put(out, at, last, values):  # type: ignore[no-untyped-def]
    """Write the lane sums of up to three vectors to out[at ...], omitting those after `last`."""
    out[at] = total(values[0])
    if last >= 1:
        out[at + 1] = total(values[1])
    if last >= 2:
        out[at + 2] = total(values[2])


@entry
def product_transposed(x: _Floats, w: _Floats, out: _Floats, n: int, n_in: int, n_out: int) -> None:
    """Write out (n, n_out) = x (n, n_in) w^T, w being (n_out, n_in); all flat. Tiles of 4 rows and 3 columns.

    If a tile exceeds the last row or column, it computes that one repeatedly but stores it once.
    """
    whole = n_in // WIDTH * WIDTH
    for u in range(0, n_out, 3):
        u_last = n_out - 1 - u
        w0 = u * n_in
        w1, w2 = w0 + min(1, u_last) * n_in, w0 + min(2, u_last) * n_in
        for r in range(0, n, 4):
            r_last = n - 1 - r
            x0 = r * n_in
            x1, x2, x3 = x0 + min(1, r_last) * n_in, x0 + min(2, r_last) * n_in, x0 + min(3, r_last) * n_in
            a0, a1, a2 = zeros(x), zeros(x), zeros(x)
            b0, b1, b2, c0, c1, c2, d0, d1, d2 = a0, a0, a0, a0, a0, a0, a0, a0, a0
            for k in range(0, whole, WIDTH):
                p, q, s = load(w, w0 + k), load(w, w1 + k), load(w, w2 + k)
                v = load(x, x0 + k)
                a0, a1, a2 = fma(v, p, a0), fma(v, q, a1), fma(v, s, a2)
                v = load(x, x1 + k)
                b0, b1, b2 = fma(v, p, b0), fma(v, q, b1), fma(v, s, b2)
                v = load(x, x2 + k)
                c0, c1, c2 = fma(v, p, c0), fma(v, q, c1), fma(v, s, c2)
                v = load(x, x3 + k)
                d0, d1, d2 = fma(v, p, d0), fma(v, q, d1), fma(v, s, d2)
            at = r * n_out + u
            _put(out, at, u_last, (a0, a1, a2))
            if r_last >= 1:
                _put(out, at + n_out, u_last, (b0, b1, b2))
            if r_last >= 2:
                _put(out, at + 2 * n_out, u_last, (c0, c1, c2))
            if r_last >= 3:
                _put(out, at + 3 * n_out, u_last, (d0, d1, d2))
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
            last = n - 1 - r
            r0 = r * row_step
            r1, r2 = r0 + min(1, last) * row_step, r0 + min(2, last) * row_step
            r3, r4, r5 = r0 + min(3, last) * row_step, r0 + min(4, last) * row_step, r0 + min(5, last) * row_step
            a0, a1, a2, a3, a4, a5 = zeros(a), zeros(a), zeros(a), zeros(a), zeros(a), zeros(a)
            b0, b1, b2, b3, b4, b5 = a0, a1, a2, a3, a4, a5
            at = j
            for k in range(0, n_k * k_step, k_step):
                low, high = load(b, at), load(b, at + WIDTH)
                s = splat(a, r0 + k)
                a0, b0 = fma(s, low, a0), fma(s, high, b0)
                s = splat(a, r1 + k)
                a1, b1 = fma(s, low, a1), fma(s, high, b1)
                s = splat(a, r2 + k)
                a2, b2 = fma(s, low, a2), fma(s, high, b2)
                s = splat(a, r3 + k)
                a3, b3 = fma(s, low, a3), fma(s, high, b3)
                s = splat(a, r4 + k)
                a4, b4 = fma(s, low, a4), fma(s, high, b4)
                s = splat(a, r5 + k)
                a5, b5 = fma(s, low, a5), fma(s, high, b5)
                at += n_out
            # rows beyond the last were computed from it, so they may overwrite it
            at = r * n_out + j
            store(out, at + min(5, last) * n_out, a5)
            store(out, at + min(5, last) * n_out + WIDTH, b5)
            store(out, at + min(4, last) * n_out, a4)
            store(out, at + min(4, last) * n_out + WIDTH, b4)
            store(out, at + min(3, last) * n_out, a3)
            store(out, at + min(3, last) * n_out + WIDTH, b3)
            store(out, at + min(2, last) * n_out, a2)
            store(out, at + min(2, last) * n_out + WIDTH, b2)
            store(out, at + min(1, last) * n_out, a1)
            store(out, at + min(1, last) * n_out + WIDTH, b1)
            store(out, at, a0)
            store(out, at + WIDTH, b0)


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
