"""Dense compressors, which the network can sum: none, half precision, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddlsim.arguments import checked
from ddlsim.compression.contract import Stateless, Traits, Vector, check_gradient
from ddlsim.compression.payloads import DensePayload, mean
from ddlsim.errors import ConfigError


class _Dense(Stateless):
    """Every element in another format. Sums are taken in float32 and rounded once."""

    #: bytes of an element, and the largest number that has no infinity for its neighbour
    width: ClassVar[int]
    largest: ClassVar[float] = np.inf

    def stored(self, values: Vector) -> DensePayload:
        """Return the payload of `values`, rounded."""
        raise NotImplementedError

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[DensePayload, None]:
        check_gradient(gradient)
        peak = float(np.abs(gradient).max(initial=0.0)) if self.largest < np.inf else 0.0
        if peak > self.largest:
            raise ConfigError(
                f"{type(self).__name__}: gradient has an element of magnitude {peak:.4g}, above the largest number "
                f"{self.largest:.6g}; scale the loss down or use a wider format"
            )
        return self.stored(gradient), None

    def decode(self, payload: DensePayload) -> Vector:
        return payload.values.astype(np.float32)

    def combine(self, payloads: Sequence[DensePayload]) -> DensePayload:
        return self.stored(mean([self.decode(payload) for payload in payloads]))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (self.width * n,)


@checked
@dataclass(frozen=True)
class NoCompression(_Dense):
    """Four bytes per element, exact."""

    traits = Traits("all_reduce", unbiased=True, encode_passes=0.0)
    width = 4

    def stored(self, values: Vector) -> DensePayload:
        return DensePayload(values.copy())


@checked
@dataclass(frozen=True)
class FP16(_Dense):
    """IEEE half precision, rounded to nearest: two bytes per element.

    Sums are taken in float32 and rounded once to half precision (a ring rounds at every hop).
    Raises ConfigError when an element exceeds 65504, half precision's largest number.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)
    width, largest = 2, 65504.0

    def stored(self, values: Vector) -> DensePayload:
        return DensePayload(values.astype(np.float16))


@checked
@dataclass(frozen=True)
class BF16(_Dense):
    """bfloat16, the upper half of a float32, rounded to nearest even: two bytes per element.

    Keeps float32's range with 8 bits of precision. Sums are taken in float32 and rounded once.
    Raises ConfigError when an element exceeds 3.3895e38, bfloat16's largest number.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)
    width, largest = 2, 3.3895313892515355e38

    def stored(self, values: Vector) -> DensePayload:
        bits = np.ascontiguousarray(values).view(np.uint32)
        odd = (bits >> 16) & 1  # of two equally near, the even one
        return DensePayload(((bits + 0x7FFF + odd) >> 16).astype(np.uint16))

    def decode(self, payload: DensePayload) -> Vector:
        return (payload.values.astype(np.uint32) << 16).view(np.float32)
