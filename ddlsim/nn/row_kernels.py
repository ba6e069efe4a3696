"""Compiled element-wise functions, layer normalisation and losses on plain arrays (one sample a row)."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddlsim.compiler import entry

_Floats = npt.NDArray[np.floating]
_Ints = npt.NDArray[np.int64]
_ROOT_HALF = math.sqrt(0.5)
_NORMAL = 1.0 / math.sqrt(2.0 * math.pi)


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
