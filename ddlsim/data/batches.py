"""Which samples each worker has, and the order in which it sees them: endless shuffled passes over its shard.

Shards are a list of index arrays, one a worker, that together hold every sample once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddlsim.arguments import Count, Index, Positive, Seed, checked
from ddlsim.data.dataset import Ints
from ddlsim.errors import ConfigError
from ddlsim.streams import stream


@checked
@dataclass(eq=False)
class BatchStream:
    """Sample indices by position: pass e over the shard is shuffled by draw e of the stream (seed, rank, "batches").

    A position always means the same sample, whatever was read before. Batches run over the end of a pass,
    so all have the same size. Workers that should together see the samples of a single worker use the same shard,
    seed and rank and take turns: worker r of n takes ``indices((step * n + r) * size, size)``.
    """

    shard: Ints
    seed: Seed
    rank: Index = 0
    _passes: dict[int, Ints] = field(default_factory=dict, init=False, repr=False)
    _drawn: tuple[np.random.Generator, int] | None = field(default=None, init=False, repr=False)  # and the next pass

    def __post_init__(self) -> None:
        if self.shard.ndim != 1 or not len(self.shard):
            raise ConfigError(f"rank {self.rank}: its shard of shape {self.shard.shape} is empty; use fewer workers")

    def batch(self, step: int, size: int) -> Ints:
        """Return the indices of batch `step` (from 0) when all batches have `size` samples, shape (size,)."""
        return self.indices(step * size, size)

    def indices(self, first: int, count: int) -> Ints:
        """Return the sample indices at positions first .. first + count - 1, shape (count,)."""
        if first < 0 or count < 1:
            raise ConfigError(f"first = {first}, count = {count}: must be at least 0 and 1")
        n, parts = len(self.shard), []
        while count:
            number, offset = divmod(first, n)
            part = self._shuffled(number)[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def epoch(self, position: int) -> float:
        """Return how many passes lie before `position`."""
        return position / len(self.shard)

    def _shuffled(self, number: int) -> Ints:
        if number not in self._passes:
            if self._drawn is None or number < self._drawn[1]:
                self._drawn = stream(self.seed, self.rank, "batches"), 0
            draws, next_pass = self._drawn
            for _ in range(next_pass, number + 1):
                kept = self.shard[draws.permutation(len(self.shard))]
            self._drawn = draws, number + 1
            if len(self._passes) > 1:  # two are enough: batches move forward
                self._passes.pop(min(self._passes))
            self._passes[number] = kept
        return self._passes[number]


_TRIES = 1000


def _check(n_samples: int, n_workers: int) -> None:
    if n_workers > n_samples:
        raise ConfigError(f"n_workers = {n_workers}: must be from 1 to the {n_samples} samples")


@checked
def iid(labels: Ints, n_workers: Count, seed: Seed) -> list[Ints]:
    """Return a random partition of the samples into equal parts, sizes differing by one at most."""
    _check(len(labels), n_workers)
    order = stream(seed, 0, "iid shards").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, n_workers)]


@checked
def by_class(labels: Ints, n_workers: Count) -> list[Ints]:
    """Return the samples sorted by class and cut into equal parts: each worker sees as few classes as possible
    (McMahan et al. 2017, arXiv:1602.05629, section 3, with one shard a client)."""
    _check(len(labels), n_workers)
    return np.array_split(np.argsort(labels, kind="stable"), n_workers)


@checked
def dirichlet(labels: Ints, n_workers: Count, alpha: Positive, seed: Seed, least: Count = 1) -> list[Ints]:
    """Return shards in which each class is divided among the workers by shares drawn from Dirichlet(alpha).

    Small alpha: few classes a worker; large alpha: like :func:`iid` (Hsu, Qi and Brown 2019, arXiv:1909.06335,
    as drawn per class by Li et al. 2022, arXiv:2102.02079, section 3.2). Shares are drawn again until every
    worker has `least` samples. Raises ConfigError when that does not happen.
    """
    _check(len(labels), n_workers)
    if least * n_workers > len(labels):
        what = f"must be at least 1 and leave {n_workers} workers that many of {len(labels)}"
        raise ConfigError(f"least = {least}: {what}")
    draws = stream(seed, 0, "dirichlet shards")
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_TRIES):
        shards: list[list[Ints]] = [[] for _ in range(n_workers)]
        for mine in members:
            shares = draws.dirichlet(np.full(n_workers, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(mine)).astype(np.int64)
            for shard, part in zip(shards, np.split(draws.permutation(mine), cuts), strict=True):
                shard.append(part)
        whole = [np.sort(np.concatenate(shard)) for shard in shards]
        if min(len(shard) for shard in whole) >= least:
            return whole
    what = f"{_TRIES} draws left a worker of {n_workers} without {least} samples"
    raise ConfigError(f"alpha = {alpha}: {what}; raise alpha")
