"""`Search`: objective, sampler and length of a search that replaces the design of a study; and its trials.

Optuna (Akiba et al. 2019, KDD, https://optuna.org) proposes `batch` configurations at a time from the results of
earlier ones: by a tree-structured Parzen estimator (``tpe``: Bergstra et al. 2011, NeurIPS), by the genetic algorithm
NSGA-II (``nsga2``: Deb et al. 2002, IEEE Trans. Evol. Comput. 6(2)), or at ``random``.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ddlsim.arguments import Count, Seed, checked, integer, one_of
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.extras import needs
from ddlsim.run.metrics import METRICS
from ddlsim.strategies import contract
from ddlsim.study.designs import MAX_POINTS, Range, Vary, paths_of
from ddlsim.study.dispatch import Point
from ddlsim.study.worker import DONE, Outcome

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

SAMPLERS = ("tpe", "nsga2", "random")


@checked
@dataclass(frozen=True)
class Search:
    """Search for the best configurations of a study, with Optuna (``pip install 'ddlsim[optuna]'``).

    objective  one or more metrics from :data:`ddlsim.run.metrics.METRICS`, which also specifies whether higher values
               are better. With several metrics, the search looks for Pareto-optimal configurations (``study.pareto``)
    n_trials   maximum number of different configurations
    sampler    "tpe", "nsga2" (with a population of 20) or "random"; None: "tpe" for one metric, "nsga2" for several
    batch      number of configurations that are proposed together and can be simulated in parallel. The proposed
               configurations depend on this number, but not on the number of processes
    seed       seed of the sampler
    prune      whether to skip the remaining seeds of a configuration whose mean so far is worse than the median of
               earlier configurations; requires a single metric and several seeds
    """

    objective: str | Sequence[str]
    n_trials: Annotated[int, integer(1, MAX_POINTS)]
    sampler: Annotated[str, one_of(*SAMPLERS)] | None = None
    batch: Count = 8
    seed: Seed = 0
    prune: bool = False

    def __post_init__(self) -> None:
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ConfigError(
                f"Search: objective = {shown(self.objective)}: must be a metric, or a list of distinct metrics"
            )
        for name in self.metrics:
            if name not in METRICS:
                raise unknown_name("metric", name, METRICS, "Search: objective")
        if self.prune and len(self.metrics) > 1:
            raise ConfigError(
                f"Search: prune = True needs one metric, but objective has {len(self.metrics)}; remove prune"
            )

    def check(self, vary: Vary, n_seeds: int) -> None:
        """Raise ConfigError for a space that cannot be searched, and for pruning with a single seed."""
        if not vary:
            raise ConfigError("vary is empty, so there is nothing to search; add at least one field")
        for key, values in vary.items():
            listed = values.values() if isinstance(values, Mapping) else () if isinstance(values, Range) else values
            if not isinstance(values, Range) and not len(values):
                raise ConfigError(f"vary[{key!r}] is empty; add at least one value, or remove the field")
            single = (one for value in listed for one in (value if isinstance(value, tuple | list) else [value]))
            for family in (
                one for one in single if "strategy" in paths_of(key) and contract.of(one).defines("layouts")
            ):
                raise ConfigError(
                    f"vary[{key!r}]: {type(family).__name__} represents many configurations, which a search cannot "
                    "propose one by one; list strategies instead, or use design = 'grid' or ddlsim.recommend"
                )
        if self.prune and n_seeds == 1:
            raise ConfigError("Search: prune = True has no effect with one seed; set seeds=3, or remove prune")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics in `objective`."""
        return (self.objective,) if isinstance(self.objective, str) else tuple(self.objective)

    @property
    def sampler_used(self) -> str:
        """The sampler that the search uses, also if `sampler` is None."""
        return self.sampler or ("tpe" if len(self.metrics) == 1 else "nsga2")


#: population of NSGA-II; Optuna's 50 are for budgets of thousands of trials
POPULATION = 20
#: maximum number of known configurations that the sampler may propose in a row, before others are sampled at random
REPEATS = 20
#: number of random configurations to sample, before all are enumerated
DRAWS = 1000


@dataclass(frozen=True, eq=False)
class _Trial:
    """A proposed configuration, its points, one per seed, and the values of the metrics for the seeds that are done."""

    proposal: Trial
    points: list[Point]
    values: list[list[float]] = field(default_factory=list)

    @property
    def means(self) -> list[float]:
        """The means over the seeds, one per metric."""
        return [float(np.mean(column)) for column in zip(*self.values, strict=True)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's messages off the terminal, and restore its level of logging."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class Trials:
    """A search, round after round. Raises ConfigError if Optuna is not installed.

    points_of  function that returns the points of a proposed configuration, one per seed
    """

    @_quiet()
    def __init__(
        self, search: Search, vary: Vary, n_seeds: int, points_of: Callable[[Mapping[str, object]], list[Point]]
    ) -> None:
        with needs("optuna"):
            import optuna
        self._search, self._n_seeds, self._points_of = search, n_seeds, points_of
        self._values = {key: list(values) if isinstance(values, Mapping) else values for key, values in vary.items()}
        self._space = {key: _space(values) for key, values in self._values.items()}
        #: Optuna's values of each key; None: any number in a range
        self._choices = [_choices(values) for values in self._values.values()]
        self._n = math.prod(math.inf if choices is None else len(choices) for choices in self._choices)
        self._generator = np.random.default_rng(search.seed)
        self._seen: set[tuple[object, ...]] = set()
        self._trials: list[_Trial] = []
        self._outcomes: Mapping[str, Outcome] = {}
        self._study = optuna.create_study(
            directions=["maximize" if METRICS[name].larger_is_better else "minimize" for name in search.metrics],
            sampler=_sampler(search),
            pruner=optuna.pruners.MedianPruner(),
        )

    @property
    def points(self) -> list[Point]:
        """The points of all trials so far."""
        return [point for trial in self._trials for point in trial.points]

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Set the outcomes of the points of the latest round."""
        self._outcomes = outcomes

    def rounds(self) -> Iterator[list[Point]]:
        """Yield points to be simulated; :meth:`take` expects their outcomes before the next round.

        Raises ConfigError for a metric that no simulated configuration has.
        """
        while batch := self._proposed():
            self._trials += batch
            # with pruning one seed after another, else all at once
            steps = [[i] for i in range(self._n_seeds)] if self._search.prune else [list(range(self._n_seeds))]
            going = batch
            for step in steps:
                yield [trial.points[i] for trial in batch for i in step]
                going = [trial for trial in going if self._goes_on(trial, step)]
            self._refuse_unknown()
            self._tell(batch)

    @_quiet()
    def _proposed(self) -> list[_Trial]:
        """Return the next configurations, at most `search.batch`; none at the end."""
        n = int(min(self._search.batch, self._search.n_trials - len(self._seen), self._n - len(self._seen)))
        return list(itertools.islice(self._new(), n))

    def _new(self) -> Iterator[_Trial]:
        """Yield configurations that have not been proposed yet, while there are any."""
        from optuna.trial import TrialState

        while True:
            for _ in range(REPEATS):
                trial = self._study.ask(self._space)
                if self._is_new(trial.params):
                    break
                self._study.tell(trial, state=TrialState.FAIL)  # ignored by samplers
            else:
                parameters = next(filter(self._is_new, self._further()), None)
                if parameters is None:
                    return
                self._study.enqueue_trial(parameters)
                trial = self._study.ask(self._space)
            self._seen.add(self._place(trial.params))
            yield _Trial(trial, self._points_of(self._row(trial.params)))

    def _further(self) -> Iterator[dict[str, float]]:
        """Yield random parameters; then, if there are few enough, all combinations in turn."""
        for _ in range(DRAWS):
            shares = self._generator.random(len(self._values)).tolist()
            yield {
                key: values.number(share) if isinstance(values, Range) else int(share * len(values))
                for (key, values), share in zip(self._values.items(), shares, strict=True)
            }
        if self._n <= MAX_POINTS:
            for combination in itertools.product(*(choices or () for choices in self._choices)):
                yield dict(zip(self._values, combination, strict=True))

    def _row(self, parameters: Mapping[str, float]) -> dict[str, object]:
        return {
            key: values.written(parameters[key]) if isinstance(values, Range) else values[int(parameters[key])]
            for key, values in self._values.items()
        }

    def _place(self, parameters: Mapping[str, float]) -> tuple[object, ...]:
        """Return what distinguishes a configuration from others; numbers with the same text are equal."""
        row = self._row(parameters)
        return tuple(row[key] if isinstance(values, Range) else parameters[key] for key, values in self._values.items())

    def _is_new(self, parameters: Mapping[str, float]) -> bool:
        return self._place(parameters) not in self._seen

    @_quiet()
    def _goes_on(self, trial: _Trial, step: Sequence[int]) -> bool:
        """Record the outcomes of some seeds of a trial; return whether to simulate others."""
        for i in step:
            outcome = self._outcomes[trial.points[i].key]
            values = [outcome.record.get(name) for name in self._search.metrics]
            if outcome.status != DONE or not all(isinstance(v, int | float) and not math.isnan(v) for v in values):
                return False
            trial.values.append([float(v) for v in values])  # type: ignore[arg-type]  # they are numbers
        n = len(trial.values)
        if not self._search.prune:
            return True
        trial.proposal.report(trial.means[0], n)  # also for comparison with later trials
        if not trial.proposal.should_prune() or n == self._n_seeds:
            return True
        name = self._search.metrics[0]
        reason = f"given up after {n} of {self._n_seeds} seeds: its {name} is worse than the median so far"
        trial.points[n:] = [point.left_out(reason) for point in trial.points[n:]]
        return False

    def _refuse_unknown(self) -> None:
        done = [outcome for outcome in self._outcomes.values() if outcome.status == DONE]
        for name in self._search.metrics:
            if done and all(outcome.record.get(name) is None for outcome in done):
                raise ConfigError(f"Search: objective: no configuration has a known {name}{METRICS[name].remedy}")

    @_quiet()
    def _tell(self, batch: Sequence[_Trial]) -> None:
        from optuna.trial import TrialState

        for trial in batch:
            if len(trial.values) == self._n_seeds:
                self._study.tell(trial.proposal, trial.means)
            else:  # invalid, failed or given up; samplers count it as the worst
                self._study.tell(trial.proposal, state=TrialState.PRUNED)


def _choices(values: Sequence[object] | Range) -> range | None:
    """Return the indices of a list, or the numbers in a range of integers; None: any number in a range."""
    if not isinstance(values, Range):
        return range(len(values))
    low, high = values.bounds
    return range(int(low), int(high) + 1) if values.integer else None


def _space(values: Sequence[object] | Range) -> BaseDistribution:
    """Return Optuna's space: the indices of a list, without an order, or the numbers in a range."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(range(len(values)))
    low, high = values.bounds
    if values.integer:
        return IntDistribution(int(low), int(high), values.log)
    return FloatDistribution(low, high, values.log)


def _sampler(search: Search) -> BaseSampler:
    from optuna import samplers

    seed = search.seed % 2**32  # Optuna's limit
    if search.sampler_used == "tpe":
        return samplers.TPESampler(seed=seed)
    if search.sampler_used == "nsga2":
        return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    return samplers.RandomSampler(seed=seed)
