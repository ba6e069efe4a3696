"""The trials of a search: rounds of points to simulate, proposed from the outcomes of earlier ones."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.run.metrics import METRICS
from ddlsim.study.designs import MAX_POINTS, Range, Vary
from ddlsim.study.dispatch import Point
from ddlsim.study.search import Search
from ddlsim.study.worker import DONE, Outcome

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial


#: population of NSGA-II; Optuna's default of 50 is for thousands of trials
POPULATION = 20
#: number of repeated proposals by the sampler before a new configuration is sampled at random
REPEATS = 20
#: number of random samples before all configurations are enumerated
DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Proposal:
    """A configuration: its value for each key of the study, by name if the value has one."""

    trial: Trial
    row: Mapping[str, object]


class Proposals:
    """The trials of a search. Raises ConfigError if Optuna is not installed."""

    def __init__(self, search: Search, vary: Vary) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("a search needs Optuna; install it with: pip install 'ddlsim[optuna]'") from None
        self._search = search
        self._values = {key: list(values) if isinstance(values, Mapping) else values for key, values in vary.items()}
        self._space: dict[str, BaseDistribution] = {key: _space(values) for key, values in self._values.items()}
        #: number of possible configurations; inf if a range contains real numbers
        self._n = math.prod(_n_values(values) for values in self._values.values())
        self._generator = np.random.default_rng(search.seed)
        self._seen: set[tuple[object, ...]] = set()
        with _quiet():
            self._study = optuna.create_study(
                directions=["maximize" if METRICS[name].larger_is_better else "minimize" for name in search.metrics],
                sampler=_sampler(search),
                pruner=optuna.pruners.MedianPruner(),
            )

    def ask(self) -> list[Proposal]:
        """Return the next `search.batch` configurations, or the remaining ones; none at the end."""
        n = int(min(self._search.batch, self._search.n_trials - len(self._seen), self._n - len(self._seen)))
        with _quiet():
            return list(itertools.islice(self._new(), n))

    def tell(self, proposal: Proposal, values: Sequence[float] | None) -> None:
        """Report the result of a configuration: a value per metric, or None if it has none (it is invalid, or was
        pruned)."""
        from optuna.trial import TrialState

        with _quiet():
            if values is None:  # samplers treat trials without a value as the worst
                self._study.tell(proposal.trial, state=TrialState.PRUNED)
            else:
                self._study.tell(proposal.trial, list(values))

    def gives_up(self, proposal: Proposal, value: float, step: int) -> bool:
        """Return whether the mean of a configuration after seed number `step` is worse than the median."""
        with _quiet():
            proposal.trial.report(value, step)
            return proposal.trial.should_prune()

    def _new(self) -> Iterator[Proposal]:
        """Yield configurations that have not been proposed yet, until there are none."""
        from optuna.trial import TrialState

        while True:
            for _ in range(REPEATS):
                trial = self._study.ask(self._space)
                if self._is_new(trial.params):
                    break
                self._study.tell(trial, state=TrialState.FAIL)  # ignored by samplers
            else:
                parameters = next(filter(self._is_new, self._others()), None)
                if parameters is None:
                    return
                self._study.enqueue_trial(parameters)
                trial = self._study.ask(self._space)
            self._seen.add(self._place(trial.params))
            yield Proposal(trial, dict(zip(self._values, self._row(trial.params), strict=True)))

    def _others(self) -> Iterator[dict[str, float]]:
        """Yield random parameters, and then, unless there are too many, all combinations in order."""
        for _ in range(DRAWS):
            shares = self._generator.random(len(self._values)).tolist()
            yield {
                key: values.number(share) if isinstance(values, Range) else int(share * len(values))
                for (key, values), share in zip(self._values.items(), shares, strict=True)
            }
        if self._n <= MAX_POINTS:
            all_of_each = [_all_of(values) for values in self._values.values()]
            for combination in itertools.product(*all_of_each):
                yield dict(zip(self._values, combination, strict=True))

    def _row(self, parameters: Mapping[str, float]) -> list[object]:
        return [
            values.written(parameters[key]) if isinstance(values, Range) else values[int(parameters[key])]
            for key, values in self._values.items()
        ]

    def _place(self, parameters: Mapping[str, float]) -> tuple[object, ...]:
        """Return a key of a configuration; numbers with the same text have the same key."""
        return tuple(
            value if isinstance(values, Range) else parameters[key]
            for value, (key, values) in zip(self._row(parameters), self._values.items(), strict=True)
        )

    def _is_new(self, parameters: Mapping[str, float]) -> bool:
        return self._place(parameters) not in self._seen


def _all_of(values: Sequence[object] | Range) -> range:
    """Return all parameters of a list, or of a range of integers."""
    if not isinstance(values, Range):
        return range(len(values))
    low, high = values.bounds
    return range(int(low), int(high) + 1)


def _n_values(values: Sequence[object] | Range) -> float:
    if not isinstance(values, Range):
        return len(values)
    low, high = values.bounds
    return high - low + 1 if values.integer else math.inf


def _space(values: Sequence[object] | Range) -> BaseDistribution:
    """Return Optuna's distribution: unordered indices of a list, or numbers in a range."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))
    low, high = values.bounds
    if values.integer:
        return IntDistribution(int(low), int(high), values.log)
    return FloatDistribution(low, high, values.log)


def _sampler(search: Search) -> BaseSampler:
    from optuna import samplers

    seed = search.seed % 2**32  # range of Optuna's seeds
    if search.sampler_used == "tpe":
        return samplers.TPESampler(seed=seed)
    if search.sampler_used == "nsga2":
        return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    return samplers.RandomSampler(seed=seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's log messages, and restore its level."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, eq=False)
class _Trial:
    """A proposal, its points, one per seed, and the values of the metrics for the seeds that are done."""

    proposal: Proposal
    points: list[Point]
    values: list[list[float]] = field(default_factory=list)

    @property
    def means(self) -> list[float]:
        """The means over the seeds, one per metric."""
        return [float(np.mean(column)) for column in zip(*self.values, strict=True)]


class Trials:
    """A search, round by round.

    points_of  function that returns the points of a proposed configuration, one per seed
    points     points of all trials so far, in order
    """

    def __init__(
        self, search: Search, vary: Vary, n_seeds: int, points_of: Callable[[Mapping[str, object]], list[Point]]
    ) -> None:
        self._search, self._n_seeds, self._points_of = search, n_seeds, points_of
        self._proposals = Proposals(search, vary)
        self._trials: list[_Trial] = []
        self._outcomes: Mapping[str, Outcome] = {}

    @property
    def points(self) -> list[Point]:
        return [point for trial in self._trials for point in trial.points]

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Receive the outcomes of the last round's points."""
        self._outcomes = outcomes

    def rounds(self) -> Iterator[list[Point]]:
        """Yield points to simulate; pass their outcomes to :meth:`take` before the next round.

        Raises ConfigError for a metric that no simulated point has.
        """
        while proposals := self._proposals.ask():
            batch = [_Trial(proposal, self._points_of(proposal.row)) for proposal in proposals]
            self._trials += batch
            # with pruning, one seed after the other, else all at once
            steps = [[i] for i in range(self._n_seeds)] if self._search.prune else [list(range(self._n_seeds))]
            going = batch
            for step in steps:
                yield [trial.points[i] for trial in batch for i in step]
                going = [trial for trial in going if self._goes_on(trial, step)]
            known = [trial for trial in batch if len(trial.values) == self._n_seeds]
            self._refuse_unknown()
            for trial in batch:
                # invalid, failed and pruned trials are reported without a value
                self._proposals.tell(trial.proposal, trial.means if trial in known else None)

    def _goes_on(self, trial: _Trial, step: Sequence[int]) -> bool:
        """Record the outcomes of some seeds of a trial; return whether to simulate further seeds."""
        for i in step:
            outcome = self._outcomes[trial.points[i].key]
            values = [outcome.record.get(name) for name in self._search.metrics]
            if outcome.status != DONE or not all(isinstance(v, int | float) and not math.isnan(v) for v in values):
                return False
            trial.values.append([float(v) for v in values])  # type: ignore[arg-type]  # they are numbers
        n = len(trial.values)
        if not self._search.prune:
            return True
        gives_up = self._proposals.gives_up(trial.proposal, trial.means[0], n)  # also recorded for later trials
        if not gives_up or n == self._n_seeds:
            return True
        name = self._search.metrics[0]
        reason = f"given up after {n} of {self._n_seeds} seeds: its {name} is worse than the median so far"
        trial.points[n:] = [point.left_out(reason) for point in trial.points[n:]]
        return False

    def _refuse_unknown(self) -> None:
        done = [outcome for outcome in self._outcomes.values() if outcome.status == DONE]
        for name in self._search.metrics:
            if done and all(outcome.record.get(name) is None for outcome in done):
                remedy = METRICS[name].remedy
                raise ConfigError(f"Search: objective: no configuration has a known {name}{remedy}")
