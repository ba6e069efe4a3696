"""The protocol of compressors, their traits, and common checks.

A gradient is a flat float32 vector, shape (n,). A compressor is a frozen dataclass whose methods are pure: its memory
(residuals, momentum, PowerSGD's Q) is passed in and returned as `state`, and randomness comes from the argument `rng`.
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
    """Properties of a compressor that determine how runs use it.

    collective    collective that combines the payloads of the workers: "all_reduce", "all_gather", "majority_vote" or
                  "gtopk_tree"
    n_rounds      number of messages that a worker sends per exchange, 1 or 2. The method ``follow_up`` computes the
                  second message from the combined first messages
    unbiased      whether the expected value of decode(encode(g)) is g
    not_summable  why payloads cannot be summed in transit; empty if `collective` is "all_reduce"
    no_feedback   why ErrorFeedback must not wrap the compressor; empty if wrapping is allowed

    The next fields determine the estimated cost (:func:`ddlsim.compression.cost.encode_traffic`). A pass reads or
    writes as many bytes as the gradient has.

    encode_passes   number of passes to encode the gradient, not counting the write of the payload; 0 if the gradient is
                    sent unchanged, so that encoding costs nothing
    decode_passes   number of passes to decode one payload, not counting the read of the payload and the write of the
                    result
    encode_kernels  number of GPU kernels to encode. They run one at a time, and each has a launch time. Decoding takes
                    one kernel per payload
    selection       how the authors' code finds the k largest elements: "top_k" (``torch.topk``), "sort"
                    (``torch.sort``), or "" for compressors that do not select. `encode_passes` and `encode_kernels`
                    assume a radix selection

    The last fields are for runs that split gradients into buckets or use parameter servers.

    whole           whether the compressor needs the whole gradient, because compressing each bucket separately would
                    give a different result
    sparse_answer   whether a synchronous server replies with an index and a value for each coordinate of the last
                    round, instead of a dense gradient
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
    """Protocol of compressed messages: frozen dataclasses whose arrays have the packed format that is sent.

    The size of a message is the total size of its arrays, except for those that its class lists as *agreed*. Agreed
    arrays are not sent, because every worker can compute them. Array lengths, `n` and other plain integers are not sent
    either, because they are the same on every worker.
    """

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: those of all arrays except the agreed ones."""


P = TypeVar("P")
S = TypeVar("S")


@runtime_checkable
class Compressor(Protocol[S, P]):
    """Protocol of gradient compressors: methods that a custom compressor must have.

    A compressor is a frozen dataclass. Its methods do not change their arguments. They receive a worker's state, such
    as residuals, and return the next state (type S). Messages are of type P, a :class:`Payload`.
    """

    @property
    def traits(self) -> Traits:
        """Properties that decide how runs use the compressor."""

    def init(self, n: int, seed: int = 0) -> S:
        """Return a worker's initial state for gradients of n elements. All workers must pass the same `seed`."""

    def encode(self, gradient: Vector, state: S, rng: np.random.Generator) -> tuple[P, S]:
        """Return the first message for `gradient`, shape (n,), and the next state, without changing any argument."""

    def decode(self, payload: P) -> Vector:
        """Return the gradient, shape (n,), that a payload of the last round encodes."""

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...] | None:
        """Return the size of each round's message in step `step` (from 0), in bytes; None if it depends on values.

        The sizes are exact, so that timing-only runs have the right traffic.
        """


#: a compressor with states and payloads of any types
AnyCompressor: TypeAlias = Compressor[Any, Any]


class Stateless:
    """Base class of compressors without memory."""

    def init(self, n: int, seed: int = 0) -> None:
        """Return no state."""


class Full(Compressor[S, P], Protocol[S, P]):
    """A compressor with all optional methods; its traits determine which of the first two are called."""

    def combine(self, payloads: Sequence[P]) -> P:
        """Return what every worker receives for all workers' `payloads` (one or more, in rank order).

        Not used by all_gather. The result is a payload again.
        """

    def follow_up(self, combined: P, state: S) -> tuple[P, S]:
        """Return the second message, given the mean of all workers' first ones, and the next state (n_rounds = 2)."""

    def settle(self, payload: P, mean: Vector, state: S) -> S:
        """Return the state after the exchange gave `mean`, shape (n,), for this worker's last `payload`."""

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> AnyCompressor:
        """Return the compressor for a vector that consists of tensors of these shapes, by name."""


def defines(compressor: Compressor[S, P], method: str) -> bool:
    """Return whether the class of a compressor has an optional method."""
    return callable(getattr(type(compressor), method, None))


def full(compressor: Compressor[S, P]) -> Full[S, P]:
    """Cast a compressor whose traits or class promise the method that is called (isinstance would take 30 us)."""
    return cast(Full[S, P], compressor)


def count(density: float, n: int) -> int:
    """Return k, the number of n elements that a density keeps: the nearest integer, at least 1 (0 for n = 0)."""
    return min(n, max(1, round(density * n)))


def check_gradient(gradient: Vector, n: int | None = None) -> None:
    """Raise ConfigError unless a gradient is a flat float32 vector of finite numbers.

    gradient  vector of shape (n,)
    n         expected number of elements; None: any number
    """
    if gradient.ndim != 1 or gradient.dtype != np.float32:
        raise ConfigError(
            f"gradient: expected a flat float32 vector, got shape {gradient.shape} and type {gradient.dtype}; pass "
            "gradient.ravel().astype(np.float32)"
        )
    if n is not None and gradient.size != n:
        size = gradient.size
        raise ConfigError(
            f"gradient has {size} elements, but the state is for {n}; pass the state that init({size}) returns"
        )
    # Sums of float32 numbers do not overflow a float64, so this one is finite unless an element is not.
    if not math.isfinite(float(gradient.sum(dtype=np.float64))):
        bad = np.flatnonzero(~np.isfinite(gradient))
        raise ConfigError(
            f"gradient: {bad.size} of {gradient.size} elements are NaN or infinite (the first is element {bad[0]}) and "
            "cannot be compressed; lower the learning rate or clip the gradients"
        )
