"""Which samples each worker has: a list of index arrays, one a worker, that together hold every sample once."""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import Count, Positive, Seed, checked
from ddlsim.data.dataset import Ints
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

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
        raise ConfigError(
            f"least = {least}: must be at least 1 and leave {n_workers} workers that many of {len(labels)}"
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
        whole = [np.sort(np.concatenate(shard)) for shard in shards]
        if min(len(shard) for shard in whole) >= least:
            return whole
    raise ConfigError(
        f"alpha = {alpha}: {_TRIES} draws left a worker of {n_workers} without {least} samples; raise alpha"
    )
