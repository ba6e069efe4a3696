"""Compiled matrix products, attention, element-wise functions, layer normalisation and losses on plain arrays (one
sample a row).

BLAS is not used, because its threads wait by spinning, which is slow if several simulations share a computer, and
because its sums depend on the number of threads. These kernels run on the caller's thread and add in a fixed order.

Attention: softmax(q k^T / sqrt(d)) v for each sample and head, and its gradient. All arrays are flat; q, k and v are
columns of rows of `width` numbers, one row per token, in which the numbers of a head are contiguous from `at` on.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry
from ddlsim.nn.vectors import HALVES, WIDTH, simd

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]
_ROOT_HALF = math.sqrt(0.5)
_NORMAL = 1.0 / math.sqrt(2.0 * math.pi)
#: rows and columns of the tiles of products
_ROWS, _COLUMNS = (0, 1, 2, 3), (0, 1, 2)
_MORE_ROWS = (0, 1, 2, 3, 4, 5)


@entry
def product_transposed(x: _Floats, w: _Floats, out: _Floats, n: int, n_in: int, n_out: int) -> None:
    """Write out (n, n_out) = x (n, n_in) w^T, w being (n_out, n_in); all flat. Tiles of 4 rows and 3 columns.

    If a tile exceeds the last row or column, it computes that one repeatedly but stores it once.
    """
    aligned = n_in // WIDTH * WIDTH
    out[:] = 0.0
    for u in range(0, n_out, 3):
        columns = simd.limited(_COLUMNS, n_out - 1 - u, n_in)
        for r in range(0, n, 4):
            rows = simd.limited(_ROWS, n - 1 - r, n_in)
            sums = simd.zeros(x, _ROWS, _COLUMNS)
            for k in range(0, aligned, WIDTH):
                sums = simd.add_products(sums, x, r * n_in + k, rows, simd.load(w, u * n_in + k, columns))
            simd.add_totals(sums, out, r * n_out + u, n_out, n - r, 1, n_out - u, _COLUMNS)
    for r in range(n if aligned < n_in else 0):
        for u in range(n_out):
            for k in range(aligned, n_in):
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


@entry
def relu(x: _Floats, out: _Floats) -> None:
    """out = max(x, 0); NaN stays NaN."""
    for i in range(x.size):
        out[i] = x.dtype.type(0.0) if x[i] < 0.0 else x[i]


@entry
def relu_gradient(out: _Floats, dy: _Floats) -> None:
    """dy *= [out > 0]."""
    for i in range(dy.size):
        dy[i] = dy[i] if out[i] > 0.0 else dy.dtype.type(0.0)


@entry
def tanh_gradient(out: _Floats, dy: _Floats) -> None:
    """dy *= 1 - out^2."""
    one = dy.dtype.type(1.0)
    for i in range(dy.size):
        dy[i] *= one - out[i] * out[i]


@entry
def sigmoid(x: _Floats, out: _Floats) -> None:
    """out = 1 / (1 + exp(-x)), without overflow."""
    one = x.dtype.type(1.0)
    for i in range(x.size):
        e = math.exp(-abs(x[i]))
        out[i] = one / (one + e) if x[i] >= 0.0 else e / (one + e)


@entry
def sigmoid_gradient(out: _Floats, dy: _Floats) -> None:
    """dy *= out * (1 - out)."""
    one = dy.dtype.type(1.0)
    for i in range(dy.size):
        dy[i] *= out[i] * (one - out[i])


@entry
def gelu(x: _Floats, out: _Floats) -> None:
    """out = x * Phi(x), the exact form of Hendrycks and Gimpel 2016 (arXiv:1606.08415)."""
    for i in range(x.size):
        out[i] = 0.5 * x[i] * (1.0 + math.erf(x[i] * _ROOT_HALF))


@entry
def gelu_gradient(x: _Floats, dy: _Floats) -> None:
    """dy *= Phi(x) + x * phi(x)."""
    for i in range(dy.size):
        normal = 0.5 * (1.0 + math.erf(x[i] * _ROOT_HALF))
        dy[i] *= normal + x[i] * _NORMAL * math.exp(-0.5 * x[i] * x[i])


@entry
def layer_norm(
    x: _Floats, weight: _Floats, bias: _Floats, out: _Floats, scaled: _Floats, inverse: _Floats, eps: float
) -> None:
    """Normalise each row of `x` (rows, d), and store the normalised rows and 1 / deviation for the gradient."""
    n_rows, d = x.shape
    for r in range(n_rows):
        mean, variance = 0.0, 0.0
        for i in range(d):
            mean += x[r, i]
        mean /= d
        for i in range(d):
            variance += (x[r, i] - mean) ** 2
        inverse[r] = 1.0 / math.sqrt(variance / d + eps)
        for i in range(d):
            scaled[r, i] = (x[r, i] - mean) * inverse[r]
            out[r, i] = scaled[r, i] * weight[i] + bias[i]


@entry
def layer_norm_gradient(
    dy: _Floats, scaled: _Floats, inverse: _Floats, weight: _Floats, dweight: _Floats, dbias: _Floats, dx: _Floats
) -> None:
    """Add to dweight and dbias (d,), write dx (rows, d) (Ba, Kiros and Hinton 2016, arXiv:1607.06450)."""
    n_rows, d = dy.shape
    for r in range(n_rows):
        total, along = 0.0, 0.0
        for i in range(d):
            dweight[i] += dy[r, i] * scaled[r, i]
            dbias[i] += dy[r, i]
            total += dy[r, i] * weight[i]
            along += dy[r, i] * weight[i] * scaled[r, i]
        for i in range(d):
            dx[r, i] = inverse[r] * (dy[r, i] * weight[i] - total / d - scaled[r, i] * along / d)


@entry
def cross_entropy(logits: _Floats, labels: _Ints, gradient: _Floats, n_total: int) -> float:
    """Return the sum over rows of -log softmax(logits)[label]; gradient = (softmax - onehot) / n_total."""
    loss = 0.0
    for r in range(logits.shape[0]):
        top = logits[r, 0]
        for i in range(1, logits.shape[1]):
            top = max(top, logits[r, i])
        total = 0.0
        for i in range(logits.shape[1]):
            value = math.exp(logits[r, i] - top)
            gradient[r, i] = value
            total += value
        for i in range(logits.shape[1]):
            gradient[r, i] /= total * n_total
        gradient[r, labels[r]] -= 1.0 / n_total
        loss += math.log(total) + top - logits[r, labels[r]]
    return loss


@entry
def squared_error(outputs: _Floats, targets: _Floats, gradient: _Floats, n_total: int) -> float:
    """Return the sum over rows of the mean squared error of a row; gradient = 2 (y - t) / (d n_total)."""
    loss, d = 0.0, outputs.shape[1]
    for r in range(outputs.shape[0]):
        for i in range(d):
            difference = outputs[r, i] - targets[r, i]
            loss += difference * difference / d
            gradient[r, i] = 2.0 * difference / (d * n_total)
    return loss
