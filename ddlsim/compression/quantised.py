"""Compressors with fewer bits per element: FP16, BF16, QSGD, TernGrad, natural compression, signSGD and 1-bit SGD."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from ddlsim.arguments import Count, Positive, checked, integer
from ddlsim.compression.contract import Bytes, Stateless, Traits, Vector, check_gradient
from ddlsim.compression.payloads import Buffers, DensePayload, mean, pack, unpack
from ddlsim.errors import ConfigError

_CODES = "codes are multiples of a scale, and each worker's gradient has its own scale"


class _Dense(Stateless):
    """Sends every element in another format. Sums are computed in float32 and rounded once."""

    #: bytes of an element, and the largest number that is not rounded to infinity
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
                f"{type(self).__name__}: the gradient has an element of magnitude {peak:.4g}, above the largest number "
                f"of the format, {self.largest:.6g}; scale the loss down or use a wider format"
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
    """No compression: gradients are sent unchanged, as float32, with four bytes per element."""

    traits = Traits("all_reduce", unbiased=True, encode_passes=0.0)
    width = 4

    def stored(self, values: Vector) -> DensePayload:
        return DensePayload(values.copy())


@checked
@dataclass(frozen=True)
class FP16(_Dense):
    """Compression to IEEE half precision, rounded to nearest: two bytes per element.

    Sums are computed in float32 and rounded once to half precision, whereas a real ring all-reduce rounds at every hop.
    Raises ConfigError if an element exceeds 65504, the largest half-precision value.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)
    width, largest = 2, 65504.0

    def stored(self, values: Vector) -> DensePayload:
        return DensePayload(values.astype(np.float16))


@checked
@dataclass(frozen=True)
class BF16(_Dense):
    """Compression to bfloat16, the upper half of a float32: two bytes per element.

    Elements are rounded to the nearest bfloat16 value, with ties to even. The format has the range of float32, but only
    8 bits of precision. Sums are computed in float32 and rounded once. Raises ConfigError if an element exceeds
    3.3895e38, the largest bfloat16 value.
    """

    traits = Traits("all_reduce", encode_passes=1.0, encode_kernels=1)
    width, largest = 2, 3.3895313892515355e38

    def stored(self, values: Vector) -> DensePayload:
        bits = np.ascontiguousarray(values).view(np.uint32)
        odd = (bits >> 16) & 1  # ties are rounded to even
        return DensePayload(((bits + 0x7FFF + odd) >> 16).astype(np.uint16))

    def decode(self, payload: DensePayload) -> Vector:
        return (payload.values.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class CodePayload(Buffers):
    """n codes of a fixed width packed in `codes`, and `scales` (n_buckets,) float32."""

    n: int
    codes: Bytes
    scales: Vector


@checked
@dataclass(frozen=True)
class QSGD(Stateless):
    """QSGD: unbiased random quantisation to `n_levels` levels per sign (Alistarh et al. 2017).

    The gradient is divided into buckets, each with its own L2 norm. With s = `n_levels`, an element becomes
    ``q_i = norm * sign(g_i) * l / s``, where l is ``s |g_i| / norm`` rounded up or down at random. The variance is at
    most ``min(d / s**2, sqrt(d) / s) * norm**2`` for a bucket of d elements (lemma 3.1). Each element takes
    ``ceil(log2(2 * s + 1))`` bits; the paper's Elias code is shorter if most levels are 0.

    n_levels     s, the number of levels per sign, not counting 0
    bucket_size  d, the number of elements per bucket
    """

    n_levels: Annotated[int, integer(1, 2**31 - 1)]
    bucket_size: Count = 512

    @functools.cached_property
    def traits(self) -> Traits:
        d, s = self.bucket_size, self.n_levels
        variance = min(d / s**2, math.sqrt(d) / s)
        refusal = (
            f"its error can be {variance:.3g} times the squared norm of the gradient, so the residual would grow "
            f"without limit; raise n_levels above sqrt(bucket_size) = {math.sqrt(d):.3g}, or remove ErrorFeedback, "
            "because QSGD is unbiased"
        )
        no_feedback = refusal if variance >= 1.0 else ""
        return Traits("all_gather", unbiased=True, not_summable=_CODES, no_feedback=no_feedback, decode_passes=2.0)

    @property
    def width(self) -> int:
        """Number of bits per element."""
        return (2 * self.n_levels).bit_length()

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[CodePayload, None]:
        check_gradient(gradient)
        n = gradient.size
        starts = np.arange(0, n, self.bucket_size)
        exact = gradient.astype(np.float64)
        norms = np.sqrt(np.add.reduceat(exact**2, starts)) if n else np.zeros(0)
        # Rounded up, so that no |g| / norm exceeds 1.
        scales = np.nextafter(
            norms.astype(np.float32), np.float32(np.inf), where=norms > 0.0, out=np.zeros(norms.size, np.float32)
        )
        scale = np.repeat(scales, self.bucket_size)[:n].astype(np.float64)
        level = np.abs(exact) * self.n_levels / np.where(scale > 0.0, scale, 1.0)
        low = np.floor(level)
        level = low + (rng.random(n) < level - low)
        codes = self.n_levels + np.where(exact < 0.0, -level, level)
        return CodePayload(n, pack(codes.astype(np.uint32), self.width), scales), None

    def decode(self, payload: CodePayload) -> Vector:
        n = payload.n
        level = unpack(payload.codes, self.width, n).astype(np.float64) - self.n_levels
        scale = np.repeat(payload.scales, self.bucket_size)[:n].astype(np.float64)
        return (level * scale / self.n_levels).astype(np.float32)

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return ((n * self.width + 7) // 8 + 4 * -(-n // self.bucket_size),)


@checked
@dataclass(frozen=True)
class TernGrad(Stateless):
    """TernGrad: unbiased random quantisation to three levels, two bits per element (Wen et al. 2017).

    With ``scale = max |g_i|``, each element g_i becomes ``scale * sign(g_i)`` with probability ``|g_i| / scale``, and 0
    otherwise.

    clip_sigmas  the gradient is first clipped to this number of standard deviations (2.5 in the paper). Clipping lowers
                 the variance but adds a bias. None: no clipping
    """

    clip_sigmas: Positive | None = None

    @functools.cached_property
    def traits(self) -> Traits:
        unbiased = self.clip_sigmas is None
        n, usual = 2 if unbiased else 3, Traits("all_gather", not_summable=_CODES, decode_passes=2.0)
        return replace(usual, unbiased=unbiased, encode_passes=float(n), encode_kernels=n)

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[CodePayload, None]:
        check_gradient(gradient)
        if self.clip_sigmas is not None:
            bound = np.float32(self.clip_sigmas * gradient.std(dtype=np.float64))
            gradient = np.clip(gradient, -bound, bound)
        magnitude = np.abs(gradient)
        scale = magnitude.max(initial=np.float32(0.0))
        kept = rng.random(gradient.size) * scale < magnitude  # float64, so |g| = scale is always kept
        codes = 1 + kept * np.sign(gradient).astype(np.int32)
        return CodePayload(gradient.size, pack(codes.astype(np.uint32), 2), np.array([scale], np.float32)), None

    def decode(self, payload: CodePayload) -> Vector:
        signs = unpack(payload.codes, 2, payload.n).astype(np.float32) - np.float32(1.0)
        return signs * payload.scales

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return ((2 * n + 7) // 8 + 4,)


@dataclass(frozen=True)
class NaturalPayload(Buffers):
    """`signs` packed to bits and `exponents` (n,): 0 for zero, otherwise 127 + log2 of the magnitude."""

    n: int
    signs: Bytes
    exponents: Bytes


@checked
@dataclass(frozen=True)
class Natural(Stateless):
    """Natural compression: random rounding to one of the two nearest powers of two, nine bits per element.

    See Horvath et al. 2019. The result is unbiased, with a variance of at most ``|g|**2 / 8``. Magnitudes below 2**-126
    are rounded to 0 or 2**-126, still without bias. Magnitudes above 2**127 are always rounded down.
    """

    traits = Traits(
        "all_gather",
        unbiased=True,
        not_summable="a sum of powers of two is not always a power of two",
        encode_passes=1.0,
        decode_passes=2.0,
        encode_kernels=1,
    )

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[NaturalPayload, None]:
        check_gradient(gradient)
        magnitude = np.abs(gradient).astype(np.float64)  # double holds float32's subnormals exactly
        mantissa, exponent = np.frexp(magnitude)  # magnitude = mantissa * 2**exponent, mantissa in [1/2, 1)
        chance = rng.random(gradient.size)
        code = 126 + exponent + (chance < 2.0 * mantissa - 1.0)
        tiny = (chance < np.ldexp(magnitude, 126)).astype(code.dtype)
        code = np.where(magnitude < 2.0**-126, tiny, np.minimum(code, 254))
        return NaturalPayload(gradient.size, np.packbits(gradient < 0.0), code.astype(np.uint8)), None

    def decode(self, payload: NaturalPayload) -> Vector:
        down = np.unpackbits(payload.signs, count=payload.n).astype(np.uint32)
        # A float32 is sign, exponent + 127, mantissa: this is its definition, and code 0 is the number 0.
        return ((down << 31) | (payload.exponents.astype(np.uint32) << 23)).view(np.float32)

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return ((n + 7) // 8 + n,)


@dataclass(frozen=True)
class SignPayload(Buffers):
    """The signs of n elements: `bits` (ceil(n / 8),), 1 for zero and above, first element in the high bit."""

    n: int
    bits: Bytes


@dataclass(frozen=True)
class LevelPayload(Buffers):
    """`bits` as in SignPayload, and `levels` (2,) float32: the values of 0 and 1."""

    n: int
    bits: Bytes
    levels: Vector


@checked
@dataclass(frozen=True)
class SignSGD(Stateless):
    """signSGD: send the sign of each element; workers decide by majority vote (Bernstein et al. 2018, algorithm 1).

    Elements are decoded to +1 or -1, regardless of their magnitude, so the learning rate must be tuned for signSGD. The
    sign of 0 is +1, and so is the result of a tied vote, because a single bit cannot represent 0.
    """

    traits = Traits(
        "majority_vote",
        not_summable="a sum of signs does not fit in one bit, and its sign is not the mean",
        no_feedback="signs have no magnitude, so the residual would be meaningless; use OneBit",
        encode_passes=1.0,
        encode_kernels=1,
    )

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[SignPayload, None]:
        check_gradient(gradient)
        return SignPayload(gradient.size, np.packbits(gradient >= 0.0)), None

    def decode(self, payload: SignPayload) -> Vector:
        up = np.unpackbits(payload.bits, count=payload.n)
        return up * np.float32(2.0) - np.float32(1.0)

    def combine(self, payloads: Sequence[SignPayload]) -> SignPayload:
        n = payloads[0].n
        votes = np.zeros(n, np.int32)
        for payload in payloads:
            votes += np.unpackbits(payload.bits, count=n)
        return SignPayload(n, np.packbits(2 * votes >= len(payloads)))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return ((n + 7) // 8,)


@checked
@dataclass(frozen=True)
class OneBit(Stateless):
    """1-bit SGD: send the sign of each element, and two reconstruction values per gradient (Seide et al. 2014).

    Negative elements are decoded to the mean of all negative elements, and all other elements to the mean of the
    others. This minimises the squared error. The compressor is biased, so wrap it in ErrorFeedback.
    """

    traits = Traits("all_gather", not_summable="each worker's bits stand for different levels", decode_passes=2.0)

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[LevelPayload, None]:
        check_gradient(gradient)
        up = gradient >= 0.0
        levels = np.array([_mean_where(gradient, ~up), _mean_where(gradient, up)], np.float32)
        return LevelPayload(gradient.size, np.packbits(up), levels), None

    def decode(self, payload: LevelPayload) -> Vector:
        return payload.levels[np.unpackbits(payload.bits, count=payload.n)]

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return ((n + 7) // 8 + 8,)


def _mean_where(values: Vector, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    n_chosen = np.count_nonzero(chosen)
    return float(values.sum(where=chosen, dtype=np.float64)) / n_chosen if n_chosen else 0.0
