"""Dense compressors, which the network can sum: none, half precision, bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import checked
from ddlsim.compression.contract import Traits, Vector, check_gradient
from ddlsim.compression.payloads import DensePayload, mean
from ddlsim.errors import ConfigError


@checked
@dataclass(frozen=True)
class NoCompression:
    """Four bytes per element, exact."""

    traits = Traits("all_reduce", unbiased=True, encode_passes=0.0)

    def init(self, n: int, seed: int = 0) -> None:
        return None

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[DensePayload, None]:
        check_gradient(gradient)
        return DensePayload(gradient.copy()), None

    def decode(self, payload: DensePayload) -> Vector:
        return payload.values.astype(np.float32)

    def combine(self, payloads: Sequence[DensePayload]) -> DensePayload:
        return DensePayload(mean([self.decode(payload) for payload in payloads]))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (4 * n,)


@checked
@dataclass(frozen=True)
class FP16:
    """IEEE half precision, rounded to nearest: two bytes per element.

    Sums are taken in float32 and rounded once to half precision (a ring rounds at every hop).
    Raises ConfigError when an element exceeds 65504, half precision's largest number.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)

    def init(self, n: int, seed: int = 0) -> None:
        return None

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[DensePayload, None]:
        check_gradient(gradient)
        _check_range("FP16", gradient, 65504.0)
        return DensePayload(gradient.astype(np.float16)), None

    def decode(self, payload: DensePayload) -> Vector:
        return payload.values.astype(np.float32)

    def combine(self, payloads: Sequence[DensePayload]) -> DensePayload:
        return DensePayload(mean([self.decode(payload) for payload in payloads]).astype(np.float16))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (2 * n,)


@checked
@dataclass(frozen=True)
class BF16:
    """bfloat16, the upper half of a float32, rounded to nearest even: two bytes per element.

    Keeps float32's range with 8 bits of precision. Sums are taken in float32 and rounded once.
    Raises ConfigError when an element exceeds 3.3895e38, bfloat16's largest number.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)

    def init(self, n: int, seed: int = 0) -> None:
        return None

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[DensePayload, None]:
        check_gradient(gradient)
        _check_range("BF16", gradient, 3.3895313892515355e38)
        return _to_bf16(gradient), None

    def decode(self, payload: DensePayload) -> Vector:
        return (payload.values.astype(np.uint32) << 16).view(np.float32)

    def combine(self, payloads: Sequence[DensePayload]) -> DensePayload:
        return _to_bf16(mean([self.decode(payload) for payload in payloads]))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (2 * n,)


def _to_bf16(values: Vector) -> DensePayload:
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & 1  # of two equally near, the even one
    return DensePayload(((bits + 0x7FFF + odd) >> 16).astype(np.uint16))


def _check_range(kind: str, gradient: Vector, largest: float) -> None:
    peak = float(np.abs(gradient).max(initial=0.0))
    if peak > largest:
        raise ConfigError(
            f"{kind}: gradient has an element of magnitude {peak:.4g}, above the largest number {largest:.6g}; "
            "scale the loss down or use a wider format"
        )
