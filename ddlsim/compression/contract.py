"""What a compressor is: the protocol, what it says about itself, and the checks that all of them share.

A gradient is a flat float32 vector, shape (n,). A compressor is a frozen dataclass whose methods are pure:
memory (residuals, momentum, PowerSGD's Q) goes in and comes out as `state`, chance comes from the `rng` passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError

Vector = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

#: all_reduce: payloads are linear, so the network may sum them on the way.
#: all_gather: every worker gets every payload and decodes them all; traffic grows with the workers.
#: majority_vote: each worker sends signs up and gets the signs of the majority down.
#: gtopk_tree: sparse payloads are merged pairwise up a binomial tree, cut to k each time, then broadcast.
Collective = Literal["all_reduce", "all_gather", "majority_vote", "gtopk_tree"]


@dataclass(frozen=True)
class Traits:
    """What a compressor says about itself.

    collective    how the payloads of several workers come together
    n_rounds      messages per exchange; a second one depends on the combination of the first (follow_up)
    unbiased      the expectation of decode(encode(g)) is g
    not_summable  why payloads cannot be added on the way; empty when `collective` is "all_reduce"
    no_feedback   why ErrorFeedback must not wrap it; empty when it may

    For the estimate of its time (:func:`ddlsim.compression.cost.encode_traffic`), how often it reads or writes
    as many bytes as the gradient has:

    encode_passes  to encode, the payload not counted; 0: it sends the gradient as it lies there, at no cost
    decode_passes  to decode one payload, the payload and the writing of the result not counted

    encode_kernels  kernels that a GPU runs one after the other to encode, each of which takes time to launch
                    (decoding is one for each payload)
    selection       how the code of its paper's time finds the k largest of all elements, which is a radix selection in
                    these passes and kernels: "top_k" (``torch.topk``), "sort" (``torch.sort``), "" if not at all

    For runs that cut gradients into buckets:

    whole           it is of the whole gradient; by buckets it would be something else
    sparse_answer   a synchronous server answers with the coordinates of the last round, an index and a value each, and
                    not with a dense gradient
    """

    collective: Collective
    n_rounds: int = 1
    unbiased: bool = False
    not_summable: str = ""
    no_feedback: str = ""
    encode_passes: float = 2.0
    decode_passes: float = 0.0
    encode_kernels: int = 2
    selection: Literal["", "top_k", "sort"] = ""
    whole: bool = False
    sparse_answer: bool = False


class Payload(Protocol):
    """One message: a frozen dataclass of the arrays that travel, packed as they travel.

    Array lengths and `n` (or other plain ints) are known to every worker beforehand and cost nothing, and so do
    the arrays that a class documents as *agreed*: every worker has computed the same ones already.
    """

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: those of the buffers, without the agreed ones."""


P = TypeVar("P")
S = TypeVar("S")


@runtime_checkable
class Compressor(Protocol[S, P]):
    """The protocol; S is the type of its state, P of its payload (a :class:`Payload`)."""

    @property
    def traits(self) -> Traits:
        """The collective it needs and what may be done with it."""

    def init(self, n: int, seed: int = 0) -> S:
        """Return a worker's first state for gradients of n elements. Workers must pass the same `seed`."""

    def encode(self, gradient: Vector, state: S, rng: np.random.Generator) -> tuple[P, S]:
        """Return the (first) message for `gradient`, shape (n,), and the next state; changes no argument."""

    def decode(self, payload: P) -> Vector:
        """Return the gradient, shape (n,), that the payload of the last round stands for."""

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...] | None:
        """Return the bytes of each round's message at a worker's encode number `step` (from 0).

        Exact, so a run without values knows its traffic. None when the size depends on the values.
        """


#: a compressor with any types of state and payload
AnyCompressor: TypeAlias = Compressor[Any, Any]


class Stateless:
    """What compressors without memory share."""

    def init(self, n: int, seed: int = 0) -> None:
        """Return no state."""


class Full(Compressor[S, P], Protocol[S, P]):
    """A compressor with all methods that one may have: its traits say which of the first two are called."""

    def combine(self, payloads: Sequence[P]) -> P:
        """Return what every worker receives for all workers' `payloads` (one or more, in rank order).

        Of any collective but all_gather: what comes of several payloads is a payload again.
        """

    def follow_up(self, combined: P, state: S) -> tuple[P, S]:
        """Return the second message, given the mean of all workers' first ones, and the next state (n_rounds = 2)."""

    def settle(self, payload: P, mean: Vector, state: S) -> S:
        """Return the state after the exchange gave `mean`, shape (n,), for this worker's last `payload`."""

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> AnyCompressor:
        """Return it for a vector that consists of tensors of these shapes, by name."""


def defines(compressor: Compressor[S, P], method: str) -> bool:
    """Return whether the class of a compressor has a method that not all have."""
    return callable(getattr(type(compressor), method, None))


def full(compressor: Compressor[S, P]) -> Full[S, P]:
    """Return a compressor whose traits or class promise the method that is called (isinstance would take 30 us)."""
    return cast(Full[S, P], compressor)


def count(density: float, n: int) -> int:
    """Return k, how many of n elements a density keeps: the nearest whole number, at least 1 (0 for n = 0)."""
    return min(n, max(1, round(density * n)))


def check_gradient(gradient: Vector, n: int | None = None) -> None:
    """Raise ConfigError unless `gradient` is a finite float32 vector (of n elements)."""
    if gradient.ndim != 1 or gradient.dtype != np.float32:
        raise ConfigError(
            f"gradient: shape {gradient.shape}, {gradient.dtype}: must be a flat float32 vector; "
            "pass gradient.ravel().astype(np.float32)"
        )
    if n is not None and gradient.size != n:
        raise ConfigError(f"gradient: {gradient.size} elements, but the state is for {n}; call init({gradient.size})")
    # Sums of float32 numbers do not overflow a float64, so this one is finite unless an element is not.
    if not math.isfinite(float(gradient.sum(dtype=np.float64))):
        bad = np.flatnonzero(~np.isfinite(gradient))
        raise ConfigError(
            f"gradient: {bad.size} of {gradient.size} elements are NaN or infinite, the first at {bad[0]}: "
            "they cannot be compressed; lower the learning rate or clip the gradients"
        )
