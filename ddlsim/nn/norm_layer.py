"""Batch and layer normalisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddlsim.nn import map_kernels, row_kernels
from ddlsim.nn.pass_state import Array, Buffers, Pass, Slot

_Doubles = npt.NDArray[np.float64]


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
    x: Array = field(init=False)

    def forward(self, x: Array, run: Pass) -> Array:
        mean, variance = self._batch_statistics(x, run) if run.training else self._running(run)
        inverse = 1.0 / np.sqrt(variance + self.eps)
        scale = self.weight.of(run.params) * inverse
        shift = self.bias.of(run.params) - mean * scale
        out, dtype = self.buffers.get("out", *x.shape), self.buffers.dtype
        map_kernels.scale_channels(
            x.reshape(-1), out.reshape(-1), scale.astype(dtype), shift.astype(dtype), run.n_blocks,
            self.channels, self.space,
        )  # fmt: skip
        self.x, self._mean, self._inverse = x, mean, inverse
        return out

    def backward(self, dy: Array, run: Pass) -> Array | None:
        """dx = scale * (dy - mean(dy) - xhat * mean(dy * xhat)), xhat being the normalised input."""
        count, dtype = run.n_samples * math.prod(self.space), self.buffers.dtype
        along = self._sums(dy, self.x, 0.0, 1.0, -self._mean, run) * self._inverse
        total = self._sums(dy, dy, 0.0, 0.0, 1.0, run)
        self.weight.of(run.into())[...] += along
        self.bias.of(run.into())[...] += total
        scale = self.weight.of(run.params) * self._inverse
        on_x = -scale * self._inverse * along / count
        shift = -scale * total / count - on_x * self._mean
        dx = self.buffers.get("dx", *dy.shape)
        map_kernels.scale_channels_gradient(
            dy.reshape(-1), self.x.reshape(-1), dx.reshape(-1), scale.astype(dtype), on_x.astype(dtype),
            shift.astype(dtype), run.n_samples, self.channels, self.space,
        )  # fmt: skip
        return dx

    def _batch_statistics(self, x: Array, run: Pass) -> tuple[_Doubles, _Doubles]:
        """Return mean and biased variance per channel (two passes), and update the running ones."""
        count = run.n_samples * math.prod(self.space)
        mean = self._sums(x, x, 0.0, 0.0, 1.0, run) / count
        variance = self._sums(x, x, -mean, 1.0, -mean, run) / count
        if run.state is not None:
            unbiased = variance * (count / max(count - 1, 1))
            for slot, new in ((self.mean, mean), (self.variance, unbiased)):
                slot.of(run.state)[...] += self.momentum * (new - slot.of(run.state))
        return mean, variance

    def _running(self, run: Pass) -> tuple[_Doubles, _Doubles]:
        assert run.state is not None
        mean, variance = self.mean.of(run.state), self.variance.of(run.state)
        return mean.astype(np.float64), variance.astype(np.float64)

    def _sums(
        self, a: Array, b: Array, shift_a: float | Array, scale_b: float, shift_b: float | Array, run: Pass
    ) -> _Doubles:
        """Return the channels' sums of (a + shift_a) * (b * scale_b + shift_b)."""
        sums = np.empty(self.channels)
        u, v, w = (np.full(self.channels, value, self.buffers.dtype) for value in (shift_a, scale_b, shift_b))
        map_kernels.channel_sums(a.reshape(-1), b.reshape(-1), u, v, w, sums, run.n_samples, self.channels, self.space)
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
        into = run.into()
        row_kernels.layer_norm_gradient(
            rows, self._scaled, self._inverse, self.weight.of(run.params), self.weight.of(into), self.bias.of(into), dx
        )
        return dx.reshape(dy.shape)
