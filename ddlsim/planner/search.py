"""The search: the most promising configurations first, until no other one can be among the best.

Candidates are simulated in waves, ordered by what they could reach at best (:mod:`ddlsim.planner.bounds`). After each
wave those that cannot get among the best any more are left out. Waves have a fixed size, so that the outcome does not
depend on the number of processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ddlsim.errors import ConfigError
from ddlsim.planner.bounds import Bound, bound
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.target import Figures, Target
from ddlsim.study.work import DONE, Outcome

__all__ = ["OUT", "PRUNED", "SIMULATED", "Found", "Search", "figures_of"]

#: what became of a candidate
SIMULATED, PRUNED, OUT = "simulated", "pruned", "skipped"
#: candidates that are simulated before it is looked again who can still win
WAVE = 16


@dataclass(frozen=True, eq=False)
class Found:
    """What became of a candidate: its figures if it was simulated, else why not.

    shares  of the workers' time, by name, where it was simulated
    bound   the best figures that it can have, where it was left out because of them
    """

    candidate: Candidate
    status: str
    reason: str = ""
    figures: Figures | None = None
    shares: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    bound: Figures | None = None


def figures_of(candidate: Candidate, outcome: Outcome, *, priced: bool, samples: float | None) -> Figures:
    """Return the figures of a simulated candidate; its cost is inf where a machine on the way has no price."""
    throughput = _number(outcome, "throughput")
    rate = float(candidate.workers)
    if priced:
        per_sample = outcome.record["cost_per_sample"]
        rate = math.inf if per_sample is None else _number(outcome, "cost_per_sample") * throughput
    total = None if samples is None else samples / throughput
    return Figures(throughput, _number(outcome, "efficiency"), rate, total)


def _number(outcome: Outcome, name: str) -> float:
    value = outcome.record[name]
    assert isinstance(value, int | float)
    return float(value)


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the `n_best` configurations for a target, and for the best of those that learn exactly.

    priced   costs are in USD, not in devices
    samples  that the training has to process, where that is known
    group    which candidates compete with each other: the `n_best` of each group are found
    """

    target: Target
    evaluator: Evaluator
    n_best: int
    priced: bool
    samples: float | None
    group: Callable[[Candidate], Hashable] = lambda candidate: None

    def run(self, candidates: Sequence[Candidate]) -> list[Found]:
        """Return what became of each candidate, the simulated ones first, best first."""
        ready: list[tuple[tuple[float, float], Candidate, Bound]] = []
        done: list[Found] = []
        rest: list[Found] = []
        for candidate in candidates:
            try:
                best = bound(candidate, priced=self.priced, samples=self.samples)
            except ConfigError as error:
                rest.append(Found(candidate, OUT, str(error)))
                continue
            if best.warning:
                rest.append(Found(candidate, OUT, best.warning))
            else:
                ready.append((self.target.rank(best.figures), candidate, best))
        ready.sort(key=lambda item: (item[0], item[1].number))
        while ready:
            wave, ready = ready[:WAVE], ready[WAVE:]
            for found in self.simulate([candidate for _, candidate, _ in wave]):
                (done if found.status == SIMULATED else rest).append(found)
            left, pruned = self._pruned(ready, done)
            ready = left
            rest += pruned
        done.sort(key=self.key)
        return done + sorted(rest, key=lambda found: found.candidate.number)

    def simulate(self, candidates: Sequence[Candidate]) -> list[Found]:
        """Simulate candidates, whatever their bounds say."""
        outcomes = self.evaluator.outcomes([candidate.experiment for candidate in candidates])
        return [self._found(*pair) for pair in zip(candidates, outcomes, strict=True)]

    def _found(self, candidate: Candidate, outcome: Outcome) -> Found:
        if outcome.status != DONE:
            return Found(candidate, OUT, outcome.error)
        figures = figures_of(candidate, outcome, priced=self.priced, samples=self.samples)
        names = ("compute", "communication", "waiting", "idle")
        shares = {name: _number(outcome, f"{name}_share") for name in names}
        notes = outcome.record["notes"]
        assert isinstance(notes, list)
        return Found(candidate, SIMULATED, "", figures, shares, tuple(notes))

    def key(self, found: Found) -> tuple[float, float, int]:
        """Return what orders simulated candidates, the best first; of equal ones that which was named first."""
        assert found.figures is not None
        return (*self.target.rank(found.figures), found.candidate.number)

    def _pruned(
        self, ready: list[tuple[tuple[float, float], Candidate, Bound]], done: list[Found]
    ) -> tuple[list[tuple[tuple[float, float], Candidate, Bound]], list[Found]]:
        """Return the candidates that may still be among the best, and those that cannot."""
        ranks: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
        exact: dict[Hashable, tuple[float, float]] = {}
        for found in sorted(done, key=self.key):
            ranks[self.group(found.candidate)].append(self.key(found)[:2])
            if found.candidate.exact:
                exact.setdefault(self.group(found.candidate), self.key(found)[:2])
        left, pruned = [], []
        for item in ready:
            rank, candidate, best = item
            group = self.group(candidate)
            better = sum(other < rank for other in ranks[group])
            if better < self.n_best or (candidate.exact and not (group in exact and exact[group] < rank)):
                left.append(item)
            else:
                at_most = f"at most {best.figures.throughput:.4g} samples/s ({best.limit})"
                reason = f"{at_most}: {better} others are better"
                pruned.append(Found(candidate, PRUNED, reason, bound=best.figures))
        return left, pruned
