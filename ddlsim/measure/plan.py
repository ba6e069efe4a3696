"""What is measured, in which order: the most useful first, since the time is limited.

A *task* is one operation on one set of ranks over a ladder of sizes (of batches for a step). Sizes rise by a
factor of 4, so that every tenfold is seen about twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.measure.transport import ITEM_NBYTES

EXPERIMENTS = ("point_to_point", "collective", "memory", "step")
#: the most useful first
COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "reduce", "gather", "scatter",
)  # fmt: skip
#: smaller messages are all latency: whether others are on the way makes no difference to measure
LEAST_CONTENDED = 64 * 1024
#: smaller buffers are added in less time than it takes to start
LEAST_MEMORY = 4 * 1024

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Task:
    """`operation` on `n_ranks` ranks of `n_hosts` machines, for each of `sizes` (nbytes, or batch sizes).

    pairs  the pairs of ranks that exchange at once (point_to_point)
    model  what is trained (step)
    """

    experiment: str
    operation: str
    n_ranks: int
    n_hosts: int
    sizes: tuple[int, ...]
    pairs: Pairs = ()
    model: str = ""

    def __str__(self) -> str:
        ranks = f"{len(self.pairs)} pair{'s' * (len(self.pairs) > 1)}" if self.pairs else f"{self.n_ranks} ranks"
        where = "one host" if self.n_hosts == 1 else f"{self.n_hosts} hosts"
        what = f"{self.operation} {self.model}".strip()
        return f"{self.experiment} {what}, {ranks} on {where}"


def sizes(least: int, most: int, multiple: int) -> tuple[int, ...]:
    """Return `least`, 4 `least`, ... up to `most` bytes, each rounded up to a `multiple`, without repeats."""
    ladder = []
    nbytes = least
    while nbytes <= most:
        ladder.append(-(-nbytes // multiple) * multiple)
        nbytes *= 4
    return tuple(dict.fromkeys(ladder))


def pair_sets(hosts: Sequence[str]) -> list[tuple[int, Pairs]]:
    """Return sets of pairs that exchange at once, with the number of hosts they are on; `hosts` is by rank.

    First one pair on a host and one pair between two hosts; then 2, 4, ... pairs: within the fullest host,
    between the two fullest hosts (they share network cards), and each pair on two hosts of its own.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    full = sorted(by_host.values(), key=len, reverse=True)  # stable: ties in the order of the ranks
    firsts = [ranks[0] for ranks in by_host.values()]
    within = tuple(zip(full[0][::2], full[0][1::2], strict=False))
    between = tuple(zip(full[0], full[1], strict=False)) if len(full) > 1 else ()
    apart = tuple(zip(firsts[::2], firsts[1::2], strict=False))
    sets = [(1, within[:1]), (2, between[:1])]
    sets += [(1, within[:n]) for n in _counts(len(within))]
    sets += [(2, between[:n]) for n in _counts(len(between))]
    sets += [(2 * n, apart[:n]) for n in _counts(len(apart))]
    return [(n_hosts, pairs) for n_hosts, pairs in sets if pairs]


def _counts(most: int) -> list[int]:
    """Return 2, 4, 8, ... and `most`."""
    counts = [2**i for i in range(1, most.bit_length()) if 2**i < most]
    return [*counts, most] if most > 1 else []


def make_plan(
    hosts: Sequence[str],
    max_nbytes: int,
    only: Sequence[str],
    models: Sequence[str],
    batch_sizes: Sequence[int],
    lacking: Collection[str] = (),
) -> list[Task]:
    """Return the tasks for ranks on `hosts` (a name per rank).

    only         experiments to do; none given: all
    models       labels of what is trained, each in `batch_sizes` (samples per rank)
    lacking      collectives that the library does not have

    Raises ConfigError for an unknown experiment, sizes below one element, models that would not be timed, and
    for a plan without any task.
    """
    for name in only:
        if name not in EXPERIMENTS:
            raise unknown_name("experiment", name, EXPERIMENTS, "--only")
    if max_nbytes < ITEM_NBYTES * len(hosts):
        raise ConfigError(f"--max-size {max_nbytes} B: {len(hosts)} ranks need at least {ITEM_NBYTES * len(hosts)} B")
    if models and only and "step" not in only:
        raise ConfigError(f"--only {','.join(only)}: {models[0]} would not be timed; add step, or leave the model out")
    if models and not batch_sizes:
        raise ConfigError("--batch-sizes is empty; write samples per rank like 1,8,32")
    tasks = [*_exchanges(hosts, max_nbytes, lacking), *_local(hosts, max_nbytes)]
    n_ranks, n_hosts = len(hosts), len(set(hosts))
    ladder = tuple(sorted(set(batch_sizes)))
    tasks += [Task("step", "training", n_ranks, n_hosts, ladder, model=model) for model in models]
    chosen = [task for task in tasks if not only or task.experiment in only]
    if not chosen:
        raise ConfigError(
            f"nothing to measure: {', '.join(only)} with {n_ranks} rank{'s' * (n_ranks > 1)}; "
            "start more ranks for messages, give --model or --module for steps"
        )
    return chosen


def _exchanges(hosts: Sequence[str], most: int, lacking: Collection[str]) -> list[Task]:
    """Return messages and collectives: single pairs and all-reduce before the rest."""
    n_ranks, n_hosts = len(hosts), len(set(hosts))
    if n_ranks < 2:
        return []
    first, second, contended = [], [], []
    for hosts_used, pairs in pair_sets(hosts):
        least = LEAST_CONTENDED if len(pairs) > 1 else ITEM_NBYTES
        ladder = sizes(least, most, ITEM_NBYTES)
        one, both = (
            Task("point_to_point", operation, 2 * len(pairs), hosts_used, ladder, pairs)
            for operation in ("one_way", "both_ways")
        )
        if len(pairs) > 1:
            contended += [one, both]
        else:
            first.append(one)
            second.append(both)
    ladder = sizes(ITEM_NBYTES, most, ITEM_NBYTES * n_ranks)
    offered = [operation for operation in COLLECTIVES if operation not in lacking]
    collectives = [Task("collective", operation, n_ranks, n_hosts, ladder) for operation in offered]
    return [task for task in [*first, collectives[0], *second, *contended, *collectives[1:]] if task.sizes]


def _local(hosts: Sequence[str], most: int) -> list[Task]:
    ladder = sizes(LEAST_MEMORY, max(most, LEAST_MEMORY), ITEM_NBYTES)
    return [Task("memory", operation, len(hosts), len(set(hosts)), ladder) for operation in ("reduction", "copy")]
