"""Crossovers: numbers of workers from which one strategy is faster than another, found by bisection."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.planner.candidates import Candidate
from ddlsim.planner.evaluate import Evaluator, number_of
from ddlsim.planner.search import Trial
from ddlsim.printable import shown

#: maximum number of gradient exchanges that are compared
MAX_EXCHANGES = 4
#: relative difference below which throughputs are equal
EQUAL = 1e-6


@dataclass(frozen=True)
class Crossover:
    """`faster` has the higher throughput from `workers` on, but not at `before`, the previous simulated number.

    Applies to `cluster` and `batch_size`. Not `exact` if a number in between could not be simulated.
    """

    cluster: str
    batch_size: int
    faster: str
    slower: str
    before: int
    workers: int
    exact: bool

    def __str__(self) -> str:
        since = f"from {self.workers} workers on" if self.exact else f"from between {self.before} and {self.workers} on"
        return shown(f"{self.faster} beats {self.slower} {since} ({self.cluster}, batch {self.batch_size})")


def crossovers(
    trials: Sequence[Trial], best: Candidate, counts: Sequence[int], evaluator: Evaluator
) -> tuple[list[Crossover], list[str]]:
    """Return the numbers of workers from which one of the fastest gradient exchanges remains faster than another one,
    on the cluster and with the batch of the `best` configuration, and remarks on pairs without a single crossover.

    found   simulated configurations of the search, best first
    counts  numbers of workers at which exchanges are compared

    If the order changes between two counts, a bisection finds one crossover, among whole machines if both counts fill
    their machines.
    """
    exchanges = _exchanges(trials, best)
    grid = sorted(n for n in set(counts) if 1 < n <= len(best.cluster.workers))
    if len(exchanges) < 2 or len(grid) < 2:
        return [], []
    evaluator.outcomes([exchange.at(n) for exchange in exchanges for n in grid])  # all at once, on all cores
    crossings, remarks = [], []
    for a, b in itertools.combinations(exchanges, 2):
        orders = [(n, order) for n in grid if (order := _order(a, b, n, evaluator))]  # ties are omitted
        flips = [i for i in range(1, len(orders)) if orders[i][1] != orders[i - 1][1]]
        if len(flips) == 1:
            crossings.append(_bisect(a, b, orders[flips[0] - 1], orders[flips[0]][0], evaluator))
        elif flips:
            first, second = (", ".join(str(n) for n, order in orders if order == sign) for sign in (1, -1))
            remarks.append(f"{_name(a)} is ahead with {first} workers, {_name(b)} with {second}")
    return crossings, remarks


def _exchanges(trials: Sequence[Trial], best: Candidate) -> list[Candidate]:
    """Return the best configuration's gradient exchange, and the fastest exact ones, with any number of workers."""
    exchanges = {(best.strategy, best.compression): best}
    same = [
        (one.figures.throughput, one.candidate)
        for one in trials
        if one.figures is not None
        and one.candidate.exact
        and one.candidate.cluster is best.cluster
        and one.candidate.batch_size == best.batch_size
    ]
    for _, candidate in sorted(same, key=lambda pair: (-pair[0], pair[1].number)):
        exchanges.setdefault((candidate.strategy, candidate.compression), candidate)
    return list(exchanges.values())[:MAX_EXCHANGES]


def _bisect(a: Candidate, b: Candidate, before: tuple[int, int], high: int, evaluator: Evaluator) -> Crossover:
    low, order = before
    n_devices = _per_machine(a)
    step = n_devices if low % n_devices == 0 and high % n_devices == 0 else 1
    exact = True
    while exact and high - low > step:
        middle = low + (high - low) // (2 * step) * step
        middle_order = _order(a, b, middle, evaluator)
        exact = middle_order is not None  # otherwise it does not fit in memory, so only the interval is known
        if exact:
            low, high = (low, middle) if middle_order == -order else (middle, high)
    slower, faster = (a, b) if order > 0 else (b, a)
    return Crossover(a.place, a.batch_size, _name(faster), _name(slower), low, high, exact)


def _order(a: Candidate, b: Candidate, workers: int, evaluator: Evaluator) -> int | None:
    """Return 1 if the first one has the higher throughput, -1 if the second, 0 if they are equal, None if one fails."""
    one, other = (number_of(o, "throughput") for o in evaluator.outcomes([a.at(workers), b.at(workers)]))
    if one is None or other is None:
        return None
    return 0 if abs(one - other) <= EQUAL * max(one, other) else 1 if one > other else -1


def _per_machine(candidate: Candidate) -> int:
    """Return the number of devices per machine, or 1 if it varies."""
    host = candidate.cluster.host_of[candidate.cluster.workers]
    counts = np.unique(np.unique(host, return_counts=True)[1])
    return int(counts[0]) if len(counts) == 1 and host.min() >= 0 else 1


def _name(candidate: Candidate) -> str:
    return candidate.strategy if candidate.compression == "none" else f"{candidate.strategy} + {candidate.compression}"
