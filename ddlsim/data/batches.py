"""Shards of a data set, one per worker, and the order of their samples: endless shuffled passes.

Shards are a list of index arrays, one per worker, which together contain every sample once.
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
    """An endless sequence of sample indices, made up of shuffled passes over a shard.

    shard  (n,) indices of the samples in the shard
    seed   seed of the shuffling
    rank   index of the random stream, usually the worker's rank; each stream shuffles differently

    The index at a position depends only on these arguments, not on the positions read earlier. Batches can extend past
    the end of a pass into the next one, so all batches have the same size.

    To process the same samples as a single worker, n workers use the same shard, seed and rank, and take turns: worker
    r reads ``indices((step * n + r) * size, size)``.

    The order of pass e is draw e of the random stream (seed, rank, "batches").
    """

    shard: Ints
    seed: Seed
    rank: Index = 0
    _passes: dict[int, Ints] = field(default_factory=dict, init=False, repr=False)
    _drawn: tuple[np.random.Generator, int] | None = field(default=None, init=False, repr=False)  # and the next pass

    def __post_init__(self) -> None:
        if self.shard.ndim != 1 or not len(self.shard):
            raise ConfigError(f"rank {self.rank}: the shard of shape {self.shard.shape} is empty; use fewer workers")

    def batch(self, step: int, size: int) -> Ints:
        """Return the indices of batch `step` (from 0), shape (size,), if all batches have `size` samples."""
        return self.indices(step * size, size)

    def indices(self, first: int, count: int) -> Ints:
        """Return the sample indices at positions `first` to `first` + `count` - 1, shape (count,)."""
        if first < 0 or count < 1:
            raise ConfigError(f"first = {first}, count = {count}: first must be at least 0, and count at least 1")
        n, parts = len(self.shard), []
        while count:
            number, offset = divmod(first, n)
            part = self._shuffled(number)[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def epoch(self, position: int) -> float:
        """Return the number of passes before `position`, as a float."""
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
        raise ConfigError(f"n_workers = {n_workers}: must be at most the number of samples, {n_samples}")


@checked
def iid(labels: Ints, n_workers: Count, seed: Seed) -> list[Ints]:
    """Partition the samples randomly into shards whose sizes differ by at most one.

    labels     (n_samples,) label of each sample; only the number of labels matters
    n_workers  number of shards
    seed       seed of the random numbers

    Raises ConfigError if there are fewer samples than workers.
    """
    _check(len(labels), n_workers)
    order = stream(seed, 0, "iid shards").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, n_workers)]


@checked
def by_class(labels: Ints, n_workers: Count) -> list[Ints]:
    """Partition the samples into shards with as few classes as possible.

    The samples are sorted by class and cut into equal parts.

    labels     (n_samples,) class of each sample
    n_workers  number of shards

    Raises ConfigError if there are fewer samples than workers. See McMahan et al. 2017, arXiv:1602.05629, section 3,
    with one shard per client.
    """
    _check(len(labels), n_workers)
    return np.array_split(np.argsort(labels, kind="stable"), n_workers)


@checked
def dirichlet(labels: Ints, n_workers: Count, alpha: Positive, seed: Seed, least: Count = 1) -> list[Ints]:
    """Partition the samples into shards with different mixtures of classes, as in experiments on federated learning.

    For each class, a Dirichlet distribution determines the fraction of its samples that each worker receives. The
    fractions are redrawn until every worker has at least `least` samples.

    labels     (n_samples,) class of each sample
    n_workers  number of shards
    alpha      concentration of the Dirichlet distribution: with a small value, most of a worker's samples belong to a
               few classes; with a large value, all workers have nearly the same mixture, as with :func:`iid`
    seed       seed of the random numbers
    least      minimum number of samples per worker

    Raises ConfigError if 1,000 draws do not give every worker `least` samples. See Hsu, Qi and Brown 2019,
    arXiv:1909.06335; fractions are drawn for each class as in Li et al. 2022, arXiv:2102.02079, section 3.2.
    """
    _check(len(labels), n_workers)
    if least * n_workers > len(labels):
        raise ConfigError(
            f"least = {least}: {len(labels)} samples are not enough to give each of {n_workers} workers at least "
            f"{least}; use a smaller least"
        )
    draws = stream(seed, 0, "dirichlet shards")
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_TRIES):
        shards: list[list[Ints]] = [[] for _ in range(n_workers)]
        for mine in members:
            shares = draws.dirichlet(np.full(n_workers, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(mine)).astype(np.int64)
            for shard, part in zip(shards, np.split(draws.permutation(mine), cuts), strict=True):
                shard.append(part)
        joined = [np.sort(np.concatenate(shard)) for shard in shards]
        if min(len(shard) for shard in joined) >= least:
            return joined
    raise ConfigError(
        f"alpha = {alpha}: in each of {_TRIES} draws, one of the {n_workers} workers had fewer than {least} samples; "
        "raise alpha"
    )
