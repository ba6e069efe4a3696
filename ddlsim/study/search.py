"""`Search`: objective, sampler and length of a search that replaces the design of a study.

Optuna (Akiba et al. 2019, KDD, https://optuna.org) proposes `batch` configurations at a time from the results of
earlier ones: by a tree-structured Parzen estimator (``tpe``: Bergstra et al. 2011, NeurIPS), by the genetic algorithm
NSGA-II (``nsga2``: Deb et al. 2002, IEEE Trans. Evol. Comput. 6(2)), or at ``random``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, Seed, checked, integer, one_of
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.run.metrics import METRICS
from ddlsim.strategies import contract
from ddlsim.study.designs import MAX_POINTS, Range, Vary, paths_of

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
