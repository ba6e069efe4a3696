"""One bit per element: signSGD with majority vote, and 1-bit SGD's two levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import checked
from ddlsim.compression.contract import Bytes, Stateless, Traits, Vector, check_gradient
from ddlsim.compression.payloads import Buffers


@dataclass(frozen=True)
class SignPayload(Buffers):
    """The signs of n elements: `bits` (ceil(n / 8),), 1 for zero and above, first element in the high bit."""

    n: int
    bits: Bytes


@dataclass(frozen=True)
class LevelPayload(Buffers):
    """`bits` as in SignPayload and `levels` (2,) float32: what a 0 and what a 1 stands for."""

    n: int
    bits: Bytes
    levels: Vector


@checked
@dataclass(frozen=True)
class SignSGD(Stateless):
    """Signs only; the workers' majority decides (Bernstein et al. 2018, "signSGD"; algorithm 1 with vote).

    Decodes to +1 and -1 whatever the magnitude, so it needs its own learning rate. The sign of 0 and a tied
    vote are +1: one bit has no third value.
    """

    traits = Traits(
        "majority_vote",
        not_summable="a sum of signs no longer fits one bit, and its sign is not the mean",
        no_feedback="bare signs carry no magnitude, so the residual would be meaningless; use OneBit",
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
    """Signs with two levels, the mean of the elements below zero and that of the others (Seide et al. 2014).

    The levels minimise the squared error for these signs. Meant for ErrorFeedback, without which it is biased.
    """

    traits = Traits("all_gather", not_summable="every worker's bits stand for levels of its own", decode_passes=2.0)

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
