"""Error feedback: what a compressor leaves out is added to the next gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from ddlsim.arguments import checked
from ddlsim.compression.contract import Compressor, Traits, Vector, check_gradient, defines, full
from ddlsim.errors import ConfigError

P = TypeVar("P")
S = TypeVar("S")


@dataclass(frozen=True)
class FeedbackState(Generic[S]):
    """State of :class:`ErrorFeedback`.

    residual  (n,) what has not been sent yet; between two rounds, what the exchange is to send
    inner     the state of the wrapped compressor
    """

    residual: Vector
    inner: S


@checked
@dataclass(frozen=True)
class ErrorFeedback(Generic[S, P]):
    """Error feedback around another compressor: the compression error is added to the next gradient.

    With the compressor C and the residual e, a worker sends ``C(g + e)``; the next residual is
    ``g + e - decode(C(g + e))`` (Seide et al. 2014; Karimireddy et al. 2019). Nothing is lost: the sum of everything
    that a worker has sent, plus its residual, equals the sum of its gradients.

    inner  the compressor C

    Raises ConfigError if the compressor does not allow error feedback (``traits.no_feedback`` gives the reason).
    """

    inner: Compressor[S, P]

    def __post_init__(self) -> None:
        if self.inner.traits.no_feedback:
            name = type(self.inner).__name__
            raise ConfigError(f"ErrorFeedback({name}): {self.inner.traits.no_feedback}")

    @functools.cached_property
    def traits(self) -> Traits:
        inner = self.inner.traits
        return replace(
            inner,
            unbiased=False,
            no_feedback="it has error feedback already; wrap it once",
            encode_kernels=inner.encode_kernels + 3,  # add; decode, subtract
            encode_passes=inner.encode_passes + 5.0,  # read g, e; write g + e; read that again; write the new e
        )

    def init(self, n: int, seed: int = 0) -> FeedbackState[S]:
        return FeedbackState(np.zeros(n, np.float32), self.inner.init(n, seed))

    def encode(self, gradient: Vector, state: FeedbackState[S], rng: np.random.Generator) -> tuple[P, FeedbackState[S]]:
        check_gradient(gradient, state.residual.size)
        corrected = gradient + state.residual
        payload, inner = self.inner.encode(corrected, state.inner, rng)
        if self.inner.traits.n_rounds == 1:
            corrected -= self.inner.decode(payload)
        return payload, FeedbackState(corrected, inner)

    def follow_up(self, combined: P, state: FeedbackState[S]) -> tuple[P, FeedbackState[S]]:
        payload, inner = full(self.inner).follow_up(combined, state.inner)
        return payload, FeedbackState(state.residual - self.inner.decode(payload), inner)

    def settle(self, payload: P, mean: Vector, state: FeedbackState[S]) -> FeedbackState[S]:
        residual, inner = state.residual, state.inner
        if self.inner.traits.collective == "gtopk_tree":  # the elements dropped by the tree have not been sent
            residual = residual + np.where(mean == 0.0, self.inner.decode(payload), np.float32(0.0))
        if defines(self.inner, "settle"):
            inner = full(self.inner).settle(payload, mean, inner)
        return FeedbackState(residual, inner)

    def decode(self, payload: P) -> Vector:
        return self.inner.decode(payload)

    def combine(self, payloads: Sequence[P]) -> P:
        return full(self.inner).combine(payloads)

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...] | None:
        return self.inner.expected_nbytes(n, step)
