"""What the workers hold after an exchange, and the bytes that each of them sent for it: among all, or between machines
only (HiTopKComm)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked, having
from ddlsim.compression.contract import Collective, Compressor, Payload, Vector, check_gradient, defines, full
from ddlsim.compression.payloads import SparsePayload
from ddlsim.compression.payloads import mean as mean_of
from ddlsim.errors import ConfigError
from ddlsim.workload.precision import FP32_NBYTES

P = TypeVar("P", bound=Payload)
S = TypeVar("S")


@checked
def average(compressor: Compressor[S, P], payloads: Sequence[P]) -> P:
    """Return the payload that an all-reduce gives every worker: the mean of `payloads`.

    Raises ConfigError for a compressor whose payloads cannot be summed, saying why and what to use instead.
    """
    traits = compressor.traits
    if traits.collective != "all_reduce":
        raise ConfigError(
            f"{title(compressor)}: its payloads cannot be summed by an all-reduce: {traits.not_summable}; "
            f"use its own collective, {traits.collective!r}"
        )
    if len({payload.nbytes for payload in payloads}) != 1:
        raise ConfigError(f"{title(compressor)}: payloads of different sizes; workers must be at the same step")
    return full(compressor).combine(payloads)


@checked
def aggregate(compressor: Compressor[S, P], payloads: Sequence[P]) -> Vector:
    """Return the mean gradient, shape (n,), of all workers' payloads (of the last round) by its collective.

    For "majority_vote" it is the sign of the sum of signs, and for "gtopk_tree" the merged sum divided by the
    number of workers.
    """
    if not payloads:
        raise ConfigError(f"{title(compressor)}: no payloads to aggregate; give those of at least one worker")
    collective = compressor.traits.collective
    if collective == "all_reduce":
        return compressor.decode(average(compressor, payloads))
    if collective == "all_gather":
        return _gather(compressor, payloads)
    return compressor.decode(full(compressor).combine(payloads))


@checked
def settle(
    compressor: Compressor[S, P], payload: P, mean: Annotated[Vector, having("an array", "shape", "dtype")], state: S
) -> S:
    """Return a worker's state after the exchange of its `payload` gave `mean`, shape (n,).

    Call it once per exchange: PowerSGD takes its next Q from the mean, and error feedback around gTop-k takes
    back what the tree dropped. The state of other compressors passes unchanged.
    """
    return full(compressor).settle(payload, mean, state) if defines(compressor, "settle") else state


@dataclass(frozen=True)
class Exchanged(Generic[S]):
    """mean    (n,) the gradient that every worker ends with
    states  every worker's next state
    nbytes  (n_rounds, n_workers) size of each worker's message in each round
    sent    (n_workers,) bytes that each worker sends in all, by :func:`sent_nbytes`
    """

    mean: Vector
    states: list[S]
    nbytes: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]


@checked
def exchange(
    compressor: Compressor[S, P], gradients: Sequence[Vector], states: Sequence[S], rngs: Sequence[np.random.Generator]
) -> Exchanged[S]:
    """Exchange the gradients of all workers, given one gradient, state and random stream for each.

    With one worker this is what a parameter server (or a worker, of the server's answer) receives.
    """
    if not len(gradients) == len(states) == len(rngs):
        raise ConfigError(
            f"exchange: {len(gradients)} gradients, {len(states)} states and {len(rngs)} random streams: give one of "
            "each for every worker"
        )
    sizes = sorted({gradient.size for gradient in gradients})
    if len(sizes) != 1:
        raise ConfigError(f"{title(compressor)}: gradients of sizes {sizes}: must be one or more, of one size")
    return finish(compressor, [compressor.encode(*each) for each in zip(gradients, states, rngs, strict=True)])


def finish(compressor: Compressor[S, P], encoded: Sequence[tuple[P, S]]) -> Exchanged[S]:
    """Do the rest of an exchange, given every worker's encoded gradient: its first payload and next state."""
    rounds = [[payload for payload, _ in encoded]]
    if compressor.traits.n_rounds == 2:
        combined = average(compressor, rounds[0])
        encoded = [full(compressor).follow_up(combined, state) for _, state in encoded]
        rounds.append([payload for payload, _ in encoded])
    mean = aggregate(compressor, rounds[-1])
    after = [settle(compressor, payload, mean, state) for payload, state in encoded]
    nbytes = np.array([[float(payload.nbytes) for payload in payloads] for payloads in rounds])
    sent = [sent_nbytes(compressor.traits.collective, row) for row in nbytes]
    return Exchanged(mean, after, nbytes, np.sum(sent, axis=0))


@checked
def sent_nbytes(collective: Collective, nbytes: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the bytes that each worker sends, shape (n_workers,), when their messages have sizes `nbytes`.

    all_reduce     2 (N - 1)/N S: a ring or any bandwidth-optimal algorithm
    all_gather     ring: a worker passes on every payload except its successor's, (N - 1) S for equal sizes
    majority_vote  2 (N - 1)/N S: each worker counts the votes of one N-th of the coordinates
    gtopk_tree     S per edge of the binomial tree, once up and once down: rank 0 sends ceil(log2 N) S
    """
    if len(nbytes) == 0:
        raise ConfigError("sent_nbytes: nbytes = (): give the size of one worker's message or more")
    sizes = np.asarray(nbytes, np.float64)
    n_workers = sizes.size
    if collective == "all_gather":
        return sizes.sum() - np.roll(sizes, -1) if n_workers > 1 else np.zeros(1)
    if collective == "gtopk_tree":
        edges = [(rank, rank - (rank & -rank)) for rank in range(1, n_workers)]
        sends = np.bincount([end for edge in edges for end in edge], minlength=n_workers)
        return sends * sizes
    return 2.0 * (n_workers - 1) / n_workers * sizes


def title(compressor: Compressor[S, P]) -> str:
    """Return the name of a compressor for messages, e.g. "ErrorFeedback(TopK)"."""
    inner = getattr(compressor, "inner", None)
    name = type(compressor).__name__
    return name if inner is None else f"{name}({type(inner).__name__})"


def _gather(compressor: Compressor[S, P], payloads: Sequence[P]) -> Vector:
    total = np.zeros(0)
    for payload in payloads:
        if isinstance(payload, SparsePayload):  # adds k numbers, not n
            total = total if total.size else np.zeros(payload.n)
            total[payload.indices] += payload.values
        else:
            values = compressor.decode(payload)
            total = total + values if total.size else values.astype(np.float64)
    return (total / len(payloads)).astype(np.float32)


# ---------------------------------------------------------------- dense inside machines, compressed between them


@dataclass(frozen=True)
class HierarchicallyExchanged(Generic[S]):
    """mean   (n,) the gradient that every worker ends with
    states  every worker's next state
    intra   (n_workers,) bytes that each worker sends inside its machine
    inter   (n_workers,) bytes that each worker sends to other machines
    """

    mean: Vector
    states: list[S]
    intra: npt.NDArray[np.float64]
    inter: npt.NDArray[np.float64]


def shard_sizes(n: int, n_local: int) -> list[int]:
    """Return the lengths of the shards that the workers of one machine own: equal, the first ones 1 longer."""
    return [n // n_local + (rank < n % n_local) for rank in range(n_local)]


@checked
def hierarchical_exchange(
    compressor: Compressor[S, P],
    gradients: Sequence[Vector],
    states: Sequence[S],
    rngs: Sequence[np.random.Generator],
    n_local: Count,
) -> HierarchicallyExchanged[S]:
    """Exchange the gradients of machines with `n_local` workers each (Shi et al. 2021, HiTopKComm, algorithm 2).

    Reduce-scatter inside each machine, so that local rank l holds the machine's mean of shard l; compress the
    shard (ErrorFeedback(MSTopK(density)) in the paper); exchange it with the same local rank of the other
    machines by the compressor's own collective; all-gather the shards inside each machine. Between machines
    this moves n_local times fewer bytes per machine than an all-gather over all workers.

    gradients, states, rngs  one per worker, machine by machine; a state is ``compressor.init`` of the worker's
                             shard size (:func:`shard_sizes`)

    Raises ConfigError when the workers do not fill their machines.
    """
    n_workers, n = len(gradients), gradients[0].size if gradients else 0
    if not n_workers == len(states) == len(rngs):
        raise ConfigError(
            f"hierarchical_exchange: {n_workers} gradients, {len(states)} states and {len(rngs)} random streams: give "
            "one of each for every worker"
        )
    if n_workers == 0 or n_local < 1 or n_workers % n_local:
        raise ConfigError(
            f"n_local = {n_local}: must divide the number of workers, {n_workers}; every machine has as many"
        )
    for gradient in gradients:
        check_gradient(gradient, n)
    sizes = shard_sizes(n, n_local)
    ends = np.cumsum(sizes)
    starts = range(0, n_workers, n_local)
    machine = [mean_of(gradients[start : start + n_local]) for start in starts]
    groups: list[Exchanged[S]] = []
    for local, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        shards = [each[end - size : end] for each in machine]
        groups.append(exchange(compressor, shards, states[local::n_local], rngs[local::n_local]))
    total = np.concatenate([group.mean for group in groups])
    return HierarchicallyExchanged(
        mean=total,
        states=[groups[rank % n_local].states[rank // n_local] for rank in range(n_workers)],
        intra=np.tile(_intra_bytes(sizes), n_workers // n_local),
        inter=np.array([groups[rank % n_local].sent[rank // n_local] for rank in range(n_workers)]),
    )


def _intra_bytes(sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the bytes that each local rank sends in the ring reduce-scatter and the ring all-gather.

    In the first it sends every shard but its own, in the second every shard but its successor's.
    """
    nbytes = FP32_NBYTES * np.asarray(sizes, np.float64)
    scatter: npt.NDArray[np.float64] = nbytes.sum() - nbytes
    gather: npt.NDArray[np.float64] = nbytes.sum() - np.roll(nbytes, -1)
    return scatter + gather
