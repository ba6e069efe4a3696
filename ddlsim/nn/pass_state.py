"""State of a forward and backward pass, and the working buffers of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddlsim.nn.conv_kernels import LANES

Array = npt.NDArray[np.floating]
_ALIGNMENT = 64  # bytes of a cache line, which is also LANES numbers of 4 bytes


@dataclass(frozen=True)
class Slot:
    """Location of a named tensor in the flat vector: elements ``start`` to ``stop - 1``, in C order of `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, flat: Array) -> Array:
        """Return the tensor as a view of the flat vector."""
        return flat[self.start : self.stop].reshape(self.shape)

    def flat(self, flat: Array) -> Array:
        """Return the tensor's elements as a flat view."""
        return flat[self.start : self.stop]


@dataclass
class Pass:
    """A pass over some samples, which adds to ``gradient`` (empty in predictions) and updates ``state``, the running
    statistics.

    ``training`` selects batch statistics and dropout; ``streams`` are the random streams of custom layers.
    ``n_samples`` may be less than the lanes hold.
    """

    params: Array
    n_samples: int
    training: bool
    gradient: Array
    state: Array | None = None
    rng: np.random.Generator | None = None
    streams: Sequence[np.random.Generator] = ()

    @property
    def n_blocks(self) -> int:
        return -(-self.n_samples // LANES)


@dataclass
class Buffers:
    """Arrays that a layer reuses between passes: allocating them takes longer than small layers do."""

    dtype: np.dtype[np.floating]
    _kept: dict[str, Array] = field(default_factory=dict)

    def get(self, name: str, rows: int, columns: int) -> Array:
        """Return an array of shape (rows, columns); its contents are from the last use, or 0."""
        size = rows * columns
        kept = self._kept.get(name)
        if kept is None or kept.size < size:
            raw = np.zeros(size + _ALIGNMENT // self.dtype.itemsize, self.dtype)
            offset = -raw.ctypes.data % _ALIGNMENT // self.dtype.itemsize
            kept = self._kept[name] = raw[offset : offset + size]
        return kept[:size].reshape(rows, columns)


class Layer(Protocol):
    """A layer or group of layers. Activations have shape (samples or blocks of them, elements)."""

    def forward(self, x: Array, run: Pass) -> Array:
        """Return the output for the input `x`, which is not changed before the backward pass."""
        ...

    def backward(self, dy: Array, run: Pass) -> Array | None:
        """Add to the gradient of the parameters, and return that of the input, or None if no earlier layer is trained.

        `dy` may be overwritten.
        """
        ...


class PureLayer(Protocol):
    """A custom layer: pure functions of arrays, samples first (docs/write_your_own/layer.md).

    `forward` may have further parameters: `train`, a flag; `rng`, the layer's random stream, None except in training;
    and `buffers`, running statistics, None in training. A layer with buffers has a method ``buffers(in_shape)`` that
    returns their initial values. In training, it returns the batch's statistics as a third value; they replace the
    share `momentum` (0.1 unless the layer has a field of this name) of the running ones.
    """

    def forward(self, x: Array, params: Mapping[str, Array]) -> tuple[Array, object]:
        """Return the outputs for `x`, shape (n, *in_shape), and data for the backward pass; changes no argument."""

    def backward(self, dy: Array, kept: object, params: Mapping[str, Array]) -> tuple[Array, Mapping[str, Array]]:
        """Return the gradients of `x` and of every tensor (summed over samples), given that of the outputs."""
