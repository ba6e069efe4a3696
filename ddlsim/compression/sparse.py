"""Sparse compressors: top-k, MSTopK, threshold, random-k, gTop-k, and Deep Gradient Compression.

A coordinate costs 8 bytes (int32 index, float32 value), so density above 1/2 is larger than the dense vector.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlsim.arguments import Count, Decay, Density, NotNegative, checked
from ddlsim.compression.contract import Indices, Stateless, Traits, Vector, check_gradient, count
from ddlsim.compression.cost import COLLECT_KERNELS, SELECT_KERNELS, SELECT_PASSES
from ddlsim.compression.payloads import AlignedPayload, SparsePayload, mean, scatter
from ddlsim.errors import ConfigError


def top_k(values: Vector, k: int) -> Indices:
    """Return the coordinates, ascending, of the k largest magnitudes; among equal ones, the lowest coordinates.

    values  (n,)
    k       0 <= k <= n
    """
    n = values.size
    if k == 0:
        return np.empty(0, np.int32)
    if k == n:
        return np.arange(n, dtype=np.int32)
    magnitude = np.abs(values)
    smallest = np.partition(magnitude, n - k)[n - k]
    above = magnitude > smallest
    equal = np.flatnonzero(magnitude == smallest)  # at least one of these is included
    above[equal[: k - np.count_nonzero(above)]] = True
    return np.flatnonzero(above).astype(np.int32)


def ms_top_k(values: Vector, k: int, n_searches: int, rng: np.random.Generator) -> Indices:
    """Return k coordinates, ascending, found with `n_searches` counts and no sort.

    MSTopK (Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
    algorithm 1): a binary search between the mean and the largest magnitude for a threshold that k elements
    reach. The k1 <= k elements above the best threshold found are all taken; the other k - k1 are consecutive
    ones, from a random start, of those between it and the best threshold that more than k reach.
    """
    n = values.size
    if k == 0 or k == n:
        return np.arange(k, dtype=np.int32)
    magnitude = np.abs(values)
    low, high = 0.0, 1.0
    mean, largest = float(magnitude.mean(dtype=np.float64)), float(magnitude.max())
    k1, upper = 0, np.inf  # at most k elements reach `upper`; k1 do
    k2, lower = n, 0.0  # more than k reach `lower`
    for _ in range(n_searches):
        ratio = 0.5 * (low + high)
        threshold = float(np.float32(mean + ratio * (largest - mean)))
        reached = int(np.count_nonzero(magnitude >= np.float32(threshold)))
        if reached <= k:
            high = ratio
            if reached > k1:
                k1, upper = reached, threshold
        else:
            low = ratio
            if reached < k2:
                k2, lower = reached, threshold
        if k1 == k:
            break  # later thresholds cannot be better
    taken = magnitude >= np.float32(upper)
    between = np.flatnonzero((magnitude >= np.float32(lower)) & ~taken)
    start = int(rng.integers(between.size - (k - k1) + 1))
    taken[between[start : start + k - k1]] = True
    return np.flatnonzero(taken).astype(np.int32)


_DIFFERENT = "workers select different coordinates"
_SPARSE = Traits(
    "all_gather", not_summable=_DIFFERENT, encode_passes=SELECT_PASSES, encode_kernels=SELECT_KERNELS, selection="top_k"
)


def _take(gradient: Vector, indices: Indices) -> SparsePayload:
    return SparsePayload(gradient.size, indices, gradient[indices])


class _Sparse(Stateless):
    """Base class: sends indices and values, and has no state."""

    def decode(self, payload: SparsePayload) -> Vector:
        return scatter(payload.n, payload.indices, payload.values)


@dataclass(frozen=True)
class _Largest(_Sparse):
    """Base class: sends the ``density * n`` elements of largest magnitude."""

    density: Density

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[SparsePayload, None]:
        check_gradient(gradient)
        return _take(gradient, top_k(gradient, count(self.density, gradient.size))), None

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (8 * count(self.density, n),)


@checked
@dataclass(frozen=True)
class TopK(_Largest):
    """Send the ``density * n`` elements of largest magnitude (Aji and Heafield 2017; Lin et al. 2018).

    density  fraction of the elements to send, above 0 and at most 1. Each element takes 8 bytes: 4 for its index and 4
             for its value
    """

    traits = _SPARSE


@checked
@dataclass(frozen=True)
class MSTopK(_Largest):
    """MSTopK: send ``density * n`` elements, selected by an approximate top-k without sorting (Shi et al. 2021).

    density     fraction of the elements to send
    n_searches  maximum number of steps in the binary search for the threshold
    """

    n_searches: Count = 30

    @functools.cached_property
    def traits(self) -> Traits:
        passes, kernels = self.n_searches + 2.0, self.n_searches + 1 + COLLECT_KERNELS
        # mean and maximum, counts, collecting
        return replace(_SPARSE, encode_passes=passes, encode_kernels=kernels, selection="")

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[SparsePayload, None]:
        check_gradient(gradient)
        k = count(self.density, gradient.size)
        return _take(gradient, ms_top_k(gradient, k, self.n_searches, rng)), None


@checked
@dataclass(frozen=True)
class Threshold(_Sparse):
    """Send every element with a magnitude of at least `minimum` (Strom 2015).

    The number of elements sent depends on the gradient, so timing-only runs cannot use this compressor.
    """

    minimum: NotNegative
    traits = replace(_SPARSE, encode_passes=1.0, encode_kernels=COLLECT_KERNELS, selection="")

    def encode(self, gradient: Vector, state: None, rng: np.random.Generator) -> tuple[SparsePayload, None]:
        check_gradient(gradient)
        return _take(gradient, np.flatnonzero(np.abs(gradient) >= self.minimum).astype(np.int32)), None

    def expected_nbytes(self, n: int, step: int = 0) -> None:
        return None


@dataclass(frozen=True)
class RandomKState:
    """The shared seed, the number of elements of a gradient, and how often this worker has encoded."""

    n: int
    seed: int
    step: int = 0


@checked
@dataclass(frozen=True)
class RandomK:
    """Send ``k = density * n`` random elements, at the same coordinates on every worker.

    All workers derive the coordinates from the seed and the step number, so only values are sent, and an all-reduce can
    sum them (Vogels et al. 2019, appendix G).

    density  fraction of the elements to send
    rescale  whether to multiply the values by n / k, which makes the result unbiased (Wangni et al. 2018). Do not
             combine rescaling with ErrorFeedback
    """

    density: Density
    rescale: bool = False

    @property
    def traits(self) -> Traits:
        refusal = "rescale = True multiplies what is sent by n / k, so the residual grows; set rescale = False"
        return Traits(
            "all_reduce",
            unbiased=self.rescale,
            no_feedback=refusal if self.rescale else "",
            encode_passes=1.0,
            encode_kernels=1,
        )

    def init(self, n: int, seed: int = 0) -> RandomKState:
        return RandomKState(n, seed)

    def encode(
        self, gradient: Vector, state: RandomKState, rng: np.random.Generator
    ) -> tuple[AlignedPayload, RandomKState]:
        n = state.n
        check_gradient(gradient, n)
        k = count(self.density, n)
        shared = np.random.Generator(np.random.Philox(np.random.SeedSequence([state.seed, state.step])))
        indices = np.sort(shared.choice(n, k, replace=False, shuffle=False)).astype(np.int32)
        values = gradient[indices] * np.float32(n / k) if self.rescale else gradient[indices]
        return AlignedPayload(n, indices, values), RandomKState(n, state.seed, state.step + 1)

    def decode(self, payload: AlignedPayload) -> Vector:
        return scatter(payload.n, payload.indices, payload.values)

    def combine(self, payloads: Sequence[AlignedPayload]) -> AlignedPayload:
        first = payloads[0]
        return AlignedPayload(first.n, first.indices, mean([payload.values for payload in payloads]))

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (4 * count(self.density, n),)


@checked
@dataclass(frozen=True)
class GTopK(_Largest):
    """Global top-k: send the k largest elements of the sum, found by merging the workers' top k pairwise in a tree.

    See Shi et al. 2019, "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification", algorithms 2 and 4.
    With k = ``density * n`` and N workers, each worker sends at most ``2 * k * ceil(log2(N))`` numbers, compared with
    ``2 * k * (N - 1)`` in an all-gather. Inside ErrorFeedback, elements that the root of the tree drops are added to
    the residual. As in the paper, an element that another node drops is lost if the final result contains its
    coordinate.

    density  fraction of the elements to send
    """

    traits = replace(_SPARSE, collective="gtopk_tree")

    def combine(self, payloads: Sequence[SparsePayload]) -> SparsePayload:
        """Merge rank r + 2**j into rank r for j = 0, 1, ..., then divide by the number of workers."""
        merged = list(payloads)
        stride = 1
        while stride < len(merged):
            for rank in range(0, len(merged) - stride, 2 * stride):
                merged[rank] = merge_top_k(merged[rank], merged[rank + stride])
            stride *= 2
        root = merged[0]
        return SparsePayload(root.n, root.indices, root.values / np.float32(len(payloads)))


def merge_top_k(a: SparsePayload, b: SparsePayload) -> SparsePayload:
    """Return the k = len(a) largest elements of a + b, which a node of gTop-k's tree passes on."""
    indices, place = np.unique(np.concatenate([a.indices, b.indices]), return_inverse=True)
    values = np.concatenate([a.values, b.values])
    total = np.bincount(place.ravel(), weights=values, minlength=indices.size).astype(np.float32)
    kept = top_k(total, a.indices.size)
    return SparsePayload(a.n, indices[kept].astype(np.int32), total[kept])


#: sparsity in each warm-up stage and after the warm-up (Lin et al. 2018, section 3.3: one epoch each)
WARM_UP = (0.75, 0.9375, 0.984375, 0.996, 0.999)


@dataclass(frozen=True)
class DGCState:
    """velocity  (n,) the worker's momentum u
    unsent    (n,) the part of the accumulated velocity v that has not been sent
    step      how often this worker has encoded"""

    velocity: Vector
    unsent: Vector
    step: int = 0


#: passes in PaddlePaddle (operators/dgc_op.h, k_select/k_select.cu): u, v, 2 for the threshold from a sample, count, 3
#: for the prefix sum, write, zero both
KERNELS = 11


@checked
@dataclass(frozen=True)
class DGC:
    """Deep gradient compression: top-k with momentum correction and warm-up (Lin et al. 2018, algorithm 4).

    In every step, ``u = m u + g`` and ``v = v + u``. A worker sends the largest elements of v, and sets u and v to 0 at
    the coordinates of these elements.

    steps_per_stage  number of steps in each warm-up stage; one epoch in the paper
    momentum         m, the momentum. It replaces the momentum of the run's optimizer, which must have no momentum of
                     its own
    sparsities       fraction of the elements that are not sent in each warm-up stage; the last value also applies to
                     the rest of the run
    """

    steps_per_stage: Count
    momentum: Decay = 0.9
    sparsities: tuple[Decay, ...] = WARM_UP
    traits = replace(
        _SPARSE,
        no_feedback="it already keeps what it has not sent; use it without ErrorFeedback",
        encode_passes=5.0 + SELECT_PASSES,  # read g, u, v; write u, v
        encode_kernels=KERNELS,
        selection="",
    )

    def __post_init__(self) -> None:
        if not self.sparsities:
            raise ConfigError("DGC: sparsities is empty; it must be a sequence of shares, each at least 0 and below 1")

    def density(self, step: int) -> float:
        """Return the share of the elements that is sent in step `step` (from 0)."""
        stage = min(step // self.steps_per_stage, len(self.sparsities) - 1)
        return 1.0 - self.sparsities[stage]

    def init(self, n: int, seed: int = 0) -> DGCState:
        return DGCState(np.zeros(n, np.float32), np.zeros(n, np.float32))

    def encode(self, gradient: Vector, state: DGCState, rng: np.random.Generator) -> tuple[SparsePayload, DGCState]:
        n = state.unsent.size
        check_gradient(gradient, n)
        velocity = np.float32(self.momentum) * state.velocity + gradient  # momentum correction
        unsent = state.unsent + velocity
        indices = top_k(unsent, count(self.density(state.step), n))
        payload = SparsePayload(n, indices, unsent[indices])
        velocity[indices] = 0.0  # momentum factor masking
        unsent[indices] = 0.0
        return payload, DGCState(velocity, unsent, state.step + 1)

    def decode(self, payload: SparsePayload) -> Vector:
        return scatter(payload.n, payload.indices, payload.values)

    def expected_nbytes(self, n: int, step: int = 0) -> tuple[int, ...]:
        return (8 * count(self.density(step), n),)
