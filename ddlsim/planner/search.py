"""Best-first search: configurations are simulated in the order of their bounds, until no other can be among the best.

Candidates are simulated in waves, ordered by their bounds (:mod:`ddlsim.planner.bounds`). After each wave, those that
can no longer be among the best are pruned. The sizes of waves are fixed, so that the outcome does not depend on the
number of processes.

Two configurations are compared by these criteria, in this order: whether every limit is met; if not, the worst miss;
the objective, time or cost; then time, cost, energy, number of devices, complexity of the gradient exchange, and order
in the input. They tie in a criterion if they differ by less than :data:`SAME`, or by less than the instability of their
throughput if that is known and larger.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddlsim.errors import ConfigError
from ddlsim.garbage import postponed
from ddlsim.planner.bounds import Bound, Bounds, Fit
from ddlsim.planner.candidates import LEAST_SIMPLE, Candidate
from ddlsim.planner.evaluate import INTERRUPTED, Evaluator
from ddlsim.planner.target import Figures, Target
from ddlsim.strategies import contract
from ddlsim.study.worker import DONE, Outcome
from ddlsim.ties import in_order, tie

#: relative difference below which times or costs count as equal: a few simulated steps are not more precise
SAME = 0.0005
#: the criteria that break ties, in this order, and the text for the worse one
_REST = {
    "time": "slower",
    "cost": "more expensive",
    "energy": "using more energy",
    "devices": "with more devices",
    "simplicity": "more complex",
    "order": "later in the input",
}


def levels(
    target: Target, candidate: Candidate, figures: Figures, *, miss: float | None = None, accuracy_miss: float = 0.0
) -> tuple[float, ...]:
    """Return the sort key of a configuration; smaller is better.

    miss           worst relative miss of a limit; None: computed from the figures
    accuracy_miss  relative miss of the accuracy in training
    """
    worst, asked = target.rank(figures)
    worst = worst if miss is None else miss
    seconds = figures.seconds
    energy = math.inf if figures.power is None else seconds * figures.power
    of_target = (float(worst > 0.0), 1.0 + worst, asked, accuracy_miss)
    # all-reduce, servers, sharded updates, others; uncompressed before compressed
    simplicity = float(candidate.simple + (LEAST_SIMPLE + 1) * (candidate.compression != "none"))
    rest = (float(candidate.workers), simplicity, float(candidate.number))
    return (*of_target, seconds, seconds * figures.cost_rate, energy, *rest)


def spread_of(figures: Figures) -> float:
    """Return the relative difference below which a configuration ties with others."""
    return max(SAME, figures.spread)


def preferred(trials: Sequence[Trial], target: Target) -> list[Trial]:
    """Return simulated configurations in order of preference."""
    ordered = sorted(trials, key=lambda one: one.candidate.number)
    return in_order(
        ordered, lambda one: levels(target, one.candidate, _figures(one)), lambda one: spread_of(_figures(one))
    )


def _figures(trial: Trial) -> Figures:
    assert trial.figures is not None
    return trial.figures


def beats_bound(rank: tuple[float, float], bound: tuple[float, float], spread: float) -> bool:
    """Whether a simulated configuration of this rank (:meth:`Target.rank`) certainly beats every configuration whose
    rank is no better than `bound`: by more than `spread`, the largest difference that counts as a tie."""
    (missed, value), (misses, its) = rank, bound
    if missed > 0.0:
        return 1.0 + missed < (1.0 + misses) * (1.0 - spread)
    return misses > 0.0 or value < its * (1.0 - spread)


def tie_reason(best: Trial, trials: Sequence[Trial], target: Target) -> str:
    """Return why the best is preferred to those that tie with it in the target's criteria; "" if none does."""
    figures, mine = _figures(best), levels(target, best.candidate, _figures(best))
    why: Counter[str] = Counter()
    for other in trials:
        if other is best or other.figures is None:
            continue
        its, spread = levels(target, other.candidate, other.figures), max(spread_of(figures), spread_of(other.figures))
        differ = [not tie(a, b, spread) for a, b in zip(mine, its, strict=True)]
        if not any(differ[:4]):
            why[_REST[next((name for name, apart in zip(_REST, differ[4:], strict=True) if apart), "order")]] += 1
    if not why:
        return ""
    n = sum(why.values())
    verb = ("costs as much" if target.wants_cheapest else "takes as long") + f" as {n} other{'' if n == 1 else 's'}"
    return f"a tie: {verb} ({', '.join(f'{why[what]} {what}' for what in _REST.values() if what in why)})"


#: status of a candidate
SIMULATED, PRUNED, OUT, UNTRIED = "simulated", "pruned", "skipped", "interrupted"
#: number of candidates in the first wave, whose results often exclude most others, and in the largest one; every wave
#: before it has half as many as the next
FIRST_WAVE, LARGEST_WAVE = 4, 16


@dataclass(frozen=True, eq=False)
class Trial:
    """Outcome of a candidate: its figures if it was simulated, otherwise the reason.

    shares  shares of the workers' time, by name, if it was simulated
    bound   upper bound on its figures, if it was pruned because of them
    held    memory of its fullest worker in bytes, if known
    """

    candidate: Candidate
    status: str
    reason: str = ""
    figures: Figures | None = None
    shares: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    bound: Figures | None = None
    held: float | None = None


def figures_of(candidate: Candidate, outcome: Outcome, *, priced: bool, samples: float | None) -> Figures:
    """Return the figures of a simulated candidate. The cost is inf if a machine has no price. With failures or
    checkpoints, the throughput is the goodput."""
    record: Mapping[str, Any] = outcome.record
    throughput = float(record["goodput" if "goodput" in record else "throughput"])
    rate = float(candidate.workers)
    if priced:
        per_sample = record["cost_per_sample"]
        rate = math.inf if per_sample is None else per_sample * throughput
    total = None if samples is None else samples / throughput
    joules = record.get("energy_per_sample")
    power = None if joules is None else joules * throughput
    return Figures(throughput, record["efficiency"], rate, total, power, record.get("throughput_spread", 0.0))


class _Ready(NamedTuple):
    """A candidate with its bound, and the rank and number that determine its turn."""

    rank: tuple[float, float]
    number: int
    candidate: Candidate
    bound: Bound


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the `n_best` configurations for a target, and for the best exact one.

    priced   costs are in USD instead of numbers of devices
    samples  number of samples in the complete training run; None: unknown
    group    key of a candidate; the `n_best` of each group are found
    stability  whether to measure the stability of each throughput; smaller differences are ties
    """

    target: Target
    evaluator: Evaluator
    n_best: int
    priced: bool
    samples: float | None
    group: Callable[[Candidate], Hashable] = lambda candidate: None
    stability: bool = False
    _held: dict[int, float] = field(default_factory=dict)
    _later: dict[int, Callable[[], Fit]] = field(default_factory=dict)

    def run(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Return the outcome of each candidate, the simulated ones first, best first."""
        bounds = Bounds(self.priced, self.samples)
        self._held.clear()
        self._later.clear()
        done: list[Trial] = []
        rest: list[Trial] = []
        in_turn = sorted(candidates, key=_layout)
        with postponed():
            ready = sorted(item for candidate in in_turn if (item := _bounded(candidate, self.target, bounds, rest)))
        self._later.update((item.number, item.bound.fit) for item in ready if item.bound.fit is not None)
        pruned: list[Trial] = []
        open_, size = ready, FIRST_WAVE
        while open_ and not self.evaluator.interrupted:
            wave: list[_Ready] = []
            asked: set[int] = set()
            for item in open_:
                asked.add(item.number)
                if warning := self.misfit(item.candidate):
                    rest.append(Trial(item.candidate, OUT, warning, held=self._held[item.number]))
                else:
                    wave.append(item)
                if len(wave) == size:
                    break
            size = min(2 * size, LARGEST_WAVE)
            for trial in self.simulate([item.candidate for item in wave]):
                (done if trial.status == SIMULATED else rest).append(trial)
            ready = [item for item in ready if item.number not in asked]
            open_, pruned = self._pruned(ready, done)  # all, as an unstable result can readmit some
        rest += [Trial(item.candidate, UNTRIED, INTERRUPTED.error) for item in open_]
        return preferred(done, self.target) + sorted(rest + pruned, key=lambda one: one.candidate.number)

    def misfit(self, candidate: Candidate) -> str:
        """Return why a candidate exceeds its devices' memory; empty if it fits."""
        later = self._later.get(candidate.number)
        if later is None:
            return ""
        warning, self._held[candidate.number] = later()
        return warning

    def simulate(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Simulate candidates regardless of their bounds."""
        experiments = [candidate.experiment for candidate in candidates]
        outcomes = self.evaluator.outcomes(experiments, stability=self.stability)
        return [self._trial(*pair) for pair in zip(candidates, outcomes, strict=True)]

    def _trial(self, candidate: Candidate, outcome: Outcome) -> Trial:
        if outcome.status != DONE:
            return Trial(candidate, UNTRIED if outcome is INTERRUPTED else OUT, outcome.error)
        figures = figures_of(candidate, outcome, priced=self.priced, samples=self.samples)
        record: Mapping[str, Any] = outcome.record
        shares = {name: record[f"{name}_share"] for name in ("compute", "communication", "waiting", "idle")}
        held = self._held.get(candidate.number)
        return Trial(candidate, SIMULATED, "", figures, shares, tuple(record["notes"]), held=held)

    def _pruned(self, ready: Sequence[_Ready], done: list[Trial]) -> tuple[list[_Ready], list[Trial]]:
        """Return the candidates that may still be among the best, including possible ties, and the pruned ones."""
        groups: dict[Hashable, list[tuple[tuple[float, float], bool]]] = defaultdict(list)
        spread = 0.0
        for trial in done:
            if trial.figures is not None:
                rank = self.target.rank(trial.figures)
                groups[self.group(trial.candidate)].append((rank, trial.candidate.exact))
                spread = max(spread, spread_of(trial.figures))
        left, pruned = [], []
        for item in ready:
            better = [
                exact for rank, exact in groups[self.group(item.candidate)] if beats_bound(rank, item.rank, spread)
            ]
            if len(better) < self.n_best or (item.candidate.exact and not any(better)):
                left.append(item)
            else:
                best, n = item.bound.figures, len(better)
                reason = f"at most {best.throughput:.4g} samples/s ({item.bound.limit}): {n} others are better"
                pruned.append(Trial(item.candidate, PRUNED, reason, bound=best))
        return left, pruned


def _layout(candidate: Candidate) -> tuple[str, int]:
    """Return a key that is equal for splits whose programs differ only in times and bytes. Sorting by it lets them
    share a program."""
    sizes, strategy = candidate.sizes, contract.of(candidate.experiment.strategy)
    if not sizes:
        return "", 0
    names = ("pipeline", "interleave", "order", "p2p", "stage")
    batches = strategy.micro_batches(candidate.batch_size, candidate.workers, 1)
    return str([candidate.workers, *(sizes[name] for name in names)]), batches


def _bounded(candidate: Candidate, target: Target, bounds: Bounds, rest: list[Trial]) -> _Ready | None:
    """Return a candidate with its bound; if it is invalid, add its outcome to `rest` and return None."""
    try:
        best = bounds.of(candidate)
        if not best.warning:
            return _Ready(target.rank(best.figures), candidate.number, candidate, best)
        rest.append(Trial(candidate, OUT, best.warning))
    except ConfigError as error:
        rest.append(Trial(candidate, OUT, str(error)))
    return None
