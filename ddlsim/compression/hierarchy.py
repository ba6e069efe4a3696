"""HiTopKComm: dense inside a machine, compressed between machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked
from ddlsim.compression.contract import Compressor, Payload, Vector, check_gradient
from ddlsim.compression.exchange import Exchanged, exchange
from ddlsim.compression.payloads import mean
from ddlsim.errors import ConfigError
from ddlsim.workload.precision import FP32_NBYTES

P = TypeVar("P", bound=Payload)
S = TypeVar("S")


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
    machine = [mean(gradients[start : start + n_local]) for start in starts]
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
