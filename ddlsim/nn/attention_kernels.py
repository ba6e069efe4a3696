"""Compiled core of attention: softmax(q k^T / sqrt(d)) v for each sample and head, and its gradient.

All arrays are flat; q, k, v are columns of rows of `width` numbers, one row a token, in which those of a head lie side
by side from `at` on. Sums are in one order, on the caller's thread (see :mod:`ddlsim.nn.dense_kernels`).
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import kernel

_Floats = npt.NDArray[np.floating]


@kernel
def attend(
    rows: _Floats, weights: _Floats, mixed: _Floats, n: int, tokens: int, heads: int, d: int, causal: bool
) -> None:
    """Write weights (n, heads, tokens, tokens) and mixed (n, tokens, heads * d) for rows (n, tokens, 3 * heads * d) of
    queries, keys and values (Vaswani et al. 2017, equation 1). With `causal`, tokens see none that come later."""
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


@kernel
def attend_gradient(rows: _Floats, weights: _Floats, dmixed: _Floats, drows: _Floats, slopes: _Floats, n: int,
                    tokens: int, heads: int, d: int, causal: bool) -> None:  # fmt: skip
    """Write the gradient of the rows, given that of `mixed`; ``slopes`` (tokens,) is for what lies between.

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
