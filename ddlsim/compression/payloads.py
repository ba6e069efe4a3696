"""Payloads that several compressors use: dense vectors, sparse vectors, and values at agreed coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.compression.contract import Bytes, Indices, Vector
from ddlsim.errors import ConfigError

F = TypeVar("F", bound=np.floating)


class Buffers:
    """Base class of messages, whose size is that of all array fields except the `agreed` ones."""

    agreed: ClassVar[tuple[str, ...]] = ()

    @property
    def nbytes(self) -> int:
        travelling = (array for name, array in vars(self).items() if name not in self.agreed)
        return sum(array.nbytes for array in travelling if isinstance(array, np.ndarray))


@dataclass(frozen=True)
class DensePayload(Buffers):
    """All elements, as float32, as float16, or as the upper half of a float32 (bfloat16) in a uint16."""

    values: Vector | npt.NDArray[np.float16] | npt.NDArray[np.uint16]


@dataclass(frozen=True)
class SparsePayload(Buffers):
    """`values` (k,) at the distinct, ascending coordinates `indices` (k,) of a vector of n elements."""

    n: int
    indices: Indices
    values: Vector


@dataclass(frozen=True)
class AlignedPayload(Buffers):
    """`values` (k,) at coordinates that every worker knows: `indices` (k,) are agreed and not sent."""

    agreed = ("indices",)
    n: int
    indices: Indices
    values: Vector


def scatter(n: int, indices: Indices, values: Vector) -> Vector:
    """Return the vector, shape (n,), with `values` at `indices` and 0 elsewhere."""
    out = np.zeros(n, np.float32)
    out[indices] = values
    return out


def mean(vectors: Sequence[npt.NDArray[F]]) -> npt.NDArray[F]:
    """Return the mean of arrays of one shape: summed in float64 in the order given, rounded once."""
    total = vectors[0].astype(np.float64)
    for vector in vectors[1:]:
        total += vector
    return (total / len(vectors)).astype(vectors[0].dtype)


def pack(codes: npt.NDArray[np.unsignedinteger], width: int) -> Bytes:
    """Return `codes` (n,), each below 2**width, as ceil(n * width / 8) bytes, first code first, high bit first.

    Raises ConfigError when a code needs more than `width` bits or `width` is not in 1..32.
    """
    if not 1 <= width <= 32:
        raise ConfigError(f"pack: width = {width}: must be from 1 to 32 bits")
    largest = int(codes.max()) if codes.size else 0
    if largest >> width:
        raise ConfigError(f"pack: the code {largest} needs more than width = {width} bits; use a larger width")
    n_bytes = (width + 7) // 8  # bytes of each code that can be non-zero
    wide = codes.astype(">u4").view(np.uint8).reshape(codes.size, 4)[:, 4 - n_bytes :]
    bits = np.unpackbits(wide.ravel()).reshape(codes.size, 8 * n_bytes)  # flat is faster than axis=1
    return np.packbits(bits[:, 8 * n_bytes - width :])


def unpack(packed: Bytes, width: int, n: int) -> npt.NDArray[np.uint32]:
    """Return the n codes that :func:`pack` wrote, as uint32."""
    n_bytes = (width + 7) // 8
    bits = np.zeros((n, 8 * n_bytes), np.uint8)
    bits[:, 8 * n_bytes - width :] = np.unpackbits(packed, count=n * width).reshape(n, width)
    wide = np.zeros((n, 4), np.uint8)
    wide[:, 4 - n_bytes :] = np.packbits(bits.ravel()).reshape(n, n_bytes)
    return wide.reshape(-1).view(">u4").astype(np.uint32)
