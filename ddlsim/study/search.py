"""Searching the space of a study instead of simulating all of it: what to look for, with which sampler, how long.

Optuna (Akiba et al. 2019, KDD, https://optuna.org) proposes configurations, `batch` at a time, from what came of those
before: by a tree-structured Parzen estimator (``tpe``: Bergstra et al. 2011, NeurIPS), by the genetic algorithm NSGA-II
(``nsga2``: Deb et al. 2002, IEEE Trans. Evol. Comput. 6(2)), or at ``random``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, Seed, checked, one_of, whole
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.run.metrics import METRICS
from ddlsim.strategies import contract
from ddlsim.study.designs import MAX_POINTS, Range, Vary, paths_of

SAMPLERS = ("tpe", "nsga2", "random")


@checked
@dataclass(frozen=True)
class Search:
    """How a study looks for the best configurations (extra: ``pip install 'ddlsim[optuna]'``).

    objective  metric, or several: those of :data:`ddlsim.run.metrics.METRICS`, which says whether more is better. Of
               several the configurations are looked for that no other one beats (``study.pareto``)
    n_trials   different configurations, at most; fewer if there are no more
    sampler    "tpe", "nsga2" (with a population of 20) or "random" (default: "tpe" for one metric, "nsga2" for several)
    batch      configurations that are proposed before anything is known of any of them: as many can be simulated at
               once. The trials depend on it, but not on how many processes simulate
    seed       of the sampler
    prune      give up the other seeds of a configuration whose mean over the seeds so far is worse than the median of
               those before it (one metric, several seeds)
    """

    objective: str | Sequence[str]
    n_trials: Annotated[int, whole(1, MAX_POINTS)]
    sampler: Annotated[str, one_of(*SAMPLERS)] | None = None
    batch: Count = 8
    seed: Seed = 0
    prune: bool = False

    def __post_init__(self) -> None:
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ConfigError(f"Search: objective = {shown(self.objective)}: must be a metric, or different ones")
        for name in self.metrics:
            if name not in METRICS:
                raise unknown_name("metric", name, METRICS, "Search: objective")
        if self.prune and len(self.metrics) > 1:
            raise ConfigError(f"Search: prune = True needs one metric, and objective has {len(self.metrics)}; leave it")

    def check(self, vary: Vary, n_seeds: int) -> None:
        """Refuse a space that cannot be searched, and pruning where there is nothing to prune. Raises ConfigError."""
        if not vary:
            raise ConfigError("vary is empty: there is nothing to search; give at least one field")
        for key, values in vary.items():
            listed = values.values() if isinstance(values, Mapping) else () if isinstance(values, Range) else values
            if not isinstance(values, Range) and not len(values):
                raise ConfigError(f"vary[{key!r}] is empty; give at least one value, or leave the field out")
            single = (one for value in listed for one in (value if isinstance(value, tuple | list) else [value]))
            for family in (one for one in single if "strategy" in paths_of(key) and contract.of(one).defines("ways")):
                raise ConfigError(
                    f"vary[{key!r}]: {type(family).__name__} stands for many configurations, which a search cannot "
                    "propose one by one; name single ones, or take design = 'grid' or ddlsim.recommend"
                )
        if self.prune and n_seeds == 1:
            raise ConfigError("Search: prune = True has no effect with one seed; give seeds=3, or leave it")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names in `objective`."""
        return (self.objective,) if isinstance(self.objective, str) else tuple(self.objective)

    @property
    def sampler_used(self) -> str:
        """The sampler, also where none is named."""
        return self.sampler or ("tpe" if len(self.metrics) == 1 else "nsga2")
