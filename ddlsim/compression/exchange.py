"""Reference exchanges of compressed gradients: among all workers, or between machines only (HiTopKComm)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked, with_attributes
from ddlsim.compression.contract import Collective, Compressor, Payload, Vector, check_gradient, defines, full
from ddlsim.compression.payloads import SparsePayload
from ddlsim.compression.payloads import mean as mean_of
from ddlsim.errors import ConfigError
from ddlsim.workload.precision import FP32_NBYTES

P = TypeVar("P", bound=Payload)
S = TypeVar("S")


@checked
def average(compressor: Compressor[S, P], payloads: Sequence[P]) -> P:
    """Return the mean of several payloads as a payload, which is the result of an all-reduce.

    compressor  compressor of the payloads
    payloads    one payload per worker

    Raises ConfigError if payloads of this compressor cannot be summed, or if the sizes of the payloads differ.
    """
    traits = compressor.traits
    if traits.collective != "all_reduce":
        raise ConfigError(
            f"{title(compressor)}: an all-reduce cannot sum its payloads, because {traits.not_summable}; use its own "
            f"collective, {traits.collective!r}"
        )
    if len({payload.nbytes for payload in payloads}) != 1:
        raise ConfigError(f"{title(compressor)}: the payloads have different sizes; pass payloads of the same step")
    return full(compressor).combine(payloads)


@checked
def aggregate(compressor: Compressor[S, P], payloads: Sequence[P]) -> Vector:
    """Return the mean gradient that every worker receives in the last round of an exchange, shape (n,).

    compressor  compressor of the payloads. Its collective determines how they are combined
    payloads    each worker's payload of the last round

    With the collective "majority_vote", the result is the sign of the sum of the workers' signs. With "gtopk_tree", it
    is the merged sum divided by the number of workers. Raises ConfigError if there are no payloads.
    """
    if not payloads:
        raise ConfigError(f"{title(compressor)}: payloads is empty; pass the payload of at least one worker")
    collective = compressor.traits.collective
    if collective == "all_reduce":
        return compressor.decode(average(compressor, payloads))
    if collective == "all_gather":
        return _gather(compressor, payloads)
    return compressor.decode(full(compressor).combine(payloads))


@checked
def settle(
    compressor: Compressor[S, P],
    payload: P,
    mean: Annotated[Vector, with_attributes("an array", "shape", "dtype", plural="arrays")],
    state: S,
) -> S:
    """Return a worker's compressor state after an exchange.

    compressor  compressor used in the exchange
    payload     the worker's payload of the last round
    mean        result of the exchange, shape (n,)
    state       the worker's state after it encoded `payload`

    Call this function once per worker after each exchange. PowerSGD computes its next Q from the mean. Error feedback
    around gTop-k adds the elements that the tree dropped to the residual. Other compressors return the state unchanged.
    """
    return full(compressor).settle(payload, mean, state) if defines(compressor, "settle") else state


@dataclass(frozen=True)
class ExchangeResult(Generic[S]):
    """Result of :func:`exchange`: the mean gradient, and the number of bytes that each worker sent.

    mean    mean gradient that every worker receives, shape (n,)
    states  next compressor state of every worker
    nbytes  size in bytes of each worker's message in each round, shape (n_rounds, n_workers)
    sent    total number of bytes that each worker sends (:func:`sent_nbytes`), shape (n_workers,)
    """

    mean: Vector
    states: list[S]
    nbytes: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]


@checked
def exchange(
    compressor: Compressor[S, P], gradients: Sequence[Vector], states: Sequence[S], rngs: Sequence[np.random.Generator]
) -> ExchangeResult[S]:
    """Compress, exchange and average the gradients of all workers.

    compressor  compressor of the gradients
    gradients   gradient of each worker, all of shape (n,)
    states      compressor state of each worker
    rngs        random number generator of each worker

    With a single worker, this is an encode/decode round trip: the mean is what a parameter server decodes from the
    worker's message, or what a worker decodes from a server's message. Raises ConfigError if the numbers of gradients,
    states and generators differ, or if the gradients have different sizes.
    """
    if not len(gradients) == len(states) == len(rngs):
        raise ConfigError(
            f"exchange: got {len(gradients)} gradients, {len(states)} states and {len(rngs)} random generators; pass "
            "one of each per worker"
        )
    sizes = sorted({gradient.size for gradient in gradients})
    if len(sizes) != 1:
        raise ConfigError(f"{title(compressor)}: expected one or more gradients of the same size, got sizes {sizes}")
    return finish(compressor, [compressor.encode(*inputs) for inputs in zip(gradients, states, rngs, strict=True)])


def finish(compressor: Compressor[S, P], encoded: Sequence[tuple[P, S]]) -> ExchangeResult[S]:
    """Complete an exchange, given the first payload and the next state of every worker."""
    rounds = [[payload for payload, _ in encoded]]
    if compressor.traits.n_rounds == 2:
        combined = average(compressor, rounds[0])
        encoded = [full(compressor).follow_up(combined, state) for _, state in encoded]
        rounds.append([payload for payload, _ in encoded])
    mean = aggregate(compressor, rounds[-1])
    after = [settle(compressor, payload, mean, state) for payload, state in encoded]
    nbytes = np.array([[float(payload.nbytes) for payload in payloads] for payloads in rounds])
    sent = [sent_nbytes(compressor.traits.collective, row) for row in nbytes]
    return ExchangeResult(mean, after, nbytes, np.sum(sent, axis=0))


@checked
def sent_nbytes(collective: Collective, nbytes: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the number of bytes that each of N workers sends in a collective, shape (N,).

    collective  "all_reduce", "all_gather", "majority_vote" or "gtopk_tree"
    nbytes      size S of each worker's message, in bytes

    A worker sends

    - ``2 * (N - 1) / N * S`` in an all-reduce, assuming a ring or another bandwidth-optimal algorithm;
    - ``(N - 1) * S`` in a ring all-gather if all messages have the same size. If sizes differ, a worker sends all
      messages except that of its successor;
    - ``2 * (N - 1) / N * S`` in a majority vote, because each worker counts the votes for 1/N of the coordinates;
    - S to each of its neighbours in the binomial tree of gTop-k; rank 0 sends ``ceil(log2(N)) * S``.
    """
    if len(nbytes) == 0:
        raise ConfigError("sent_nbytes: nbytes is empty; pass the size of at least one worker's message")
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
class HierarchicalExchangeResult(Generic[S]):
    """Result of :func:`hierarchical_exchange`: the mean gradient, and the number of bytes that each worker sent.

    mean    mean gradient that every worker receives, shape (n,)
    states  next compressor state of every worker
    sent_inside   number of bytes that each worker sends inside its machine, shape (n_workers,)
    sent_between   number of bytes that each worker sends to other machines, shape (n_workers,)
    """

    mean: Vector
    states: list[S]
    sent_inside: npt.NDArray[np.float64]
    sent_between: npt.NDArray[np.float64]


def shard_sizes(n: int, n_local: int) -> list[int]:
    """Return the lengths of the shards of a machine's workers: equal, except that the first ones can be 1 longer."""
    return [n // n_local + (rank < n % n_local) for rank in range(n_local)]


@checked
def hierarchical_exchange(
    compressor: Compressor[S, P],
    gradients: Sequence[Vector],
    states: Sequence[S],
    rngs: Sequence[np.random.Generator],
    n_local: Count,
) -> HierarchicalExchangeResult[S]:
    """Exchange gradients uncompressed inside machines and compressed between them (HiTopKComm, Shi et al. 2021).

    Workers reduce-scatter inside each machine, so that local rank l holds the machine's mean of shard l. Each worker
    compresses its shard and exchanges it with the workers of the same local rank on other machines, using the
    compressor's collective. Finally, workers all-gather the shards inside each machine. In the paper (algorithm 2), the
    compressor is ErrorFeedback(MSTopK(density)). Each machine sends only 1 / n_local of the bytes that it would send to
    other machines in an all-gather over all workers.

    compressor  compressor of the shards that are sent between machines
    gradients   gradient of each worker, ordered by machine, all of shape (n,)
    states      compressor state of each worker, for a gradient as large as its shard (:func:`shard_sizes`)
    rngs        random number generator of each worker
    n_local     number of workers per machine

    Raises ConfigError if `n_local` does not divide the number of workers.
    """
    n_workers, n = len(gradients), gradients[0].size if gradients else 0
    if not n_workers == len(states) == len(rngs):
        raise ConfigError(
            f"hierarchical_exchange: got {n_workers} gradients, {len(states)} states and {len(rngs)} random "
            "generators; pass one of each per worker"
        )
    if n_workers == 0 or n_workers % n_local:
        raise ConfigError(
            f"n_local = {n_local}: must divide the number of workers, {n_workers}, because all machines have the same "
            "number of workers"
        )
    for gradient in gradients:
        check_gradient(gradient, n)
    sizes = shard_sizes(n, n_local)
    ends = np.cumsum(sizes)
    starts = range(0, n_workers, n_local)
    machine = [mean_of(gradients[start : start + n_local]) for start in starts]
    groups: list[ExchangeResult[S]] = []
    for local, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        shards = [vector[end - size : end] for vector in machine]
        groups.append(exchange(compressor, shards, states[local::n_local], rngs[local::n_local]))
    total = np.concatenate([group.mean for group in groups])
    return HierarchicalExchangeResult(
        mean=total,
        states=[groups[rank % n_local].states[rank // n_local] for rank in range(n_workers)],
        sent_inside=np.tile(_intra_bytes(sizes), n_workers // n_local),
        sent_between=np.array([groups[rank % n_local].sent[rank // n_local] for rank in range(n_workers)]),
    )


def _intra_bytes(sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the bytes that each local rank sends in the ring reduce-scatter and the ring all-gather.

    In the former it sends every shard but its own, in the latter every shard but its successor's.
    """
    nbytes = FP32_NBYTES * np.asarray(sizes, np.float64)
    scatter: npt.NDArray[np.float64] = nbytes.sum() - nbytes
    gather: npt.NDArray[np.float64] = nbytes.sum() - np.roll(nbytes, -1)
    return scatter + gather
