"""`Target`: constraints and objective of a search, and the resulting order of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Positive, checked, number, one_of, quantity
from ddlsim.run.metrics import METRICS
from ddlsim.ties import FLOOR

AIMS = ("time", "cost")
_Least = Annotated[float, number(0.0, 1.0, above=True, hint=" (0.9 is 90 %)")]


@dataclass(frozen=True)
class Figures:
    """Figures of a configuration, or bounds on them.

    throughput   samples/s
    efficiency   throughput relative to that of the workers without communication
    cost_rate    USD/s, or number of devices if machines have no price
    total_time   time of the whole training, s; None: unknown; inf: the target is never reached
    power        W; None: unknown
    spread       relative change of the throughput under tiny changes of the inputs; 0: not measured
    """

    throughput: float
    efficiency: float
    cost_rate: float
    total_time: float | None = None
    power: float | None = None
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole training in s if known, else of one sample."""
        return 1.0 / self.throughput if self.total_time is None else self.total_time

    @property
    def total_cost(self) -> float | None:
        """Cost of the whole training in USD (or device-seconds); None if its time is unknown."""
        return None if self.total_time is None else self.total_time * self.cost_rate


@dataclass(frozen=True)
class Miss:
    """A limit, the corresponding value, and the relative amount by which the limit is missed (0: it is met)."""

    what: str
    limit: float
    value: float
    share: float


@checked
@dataclass(frozen=True)
class Target:
    """Constraints that a configuration must satisfy, and the objective by which feasible configurations are ranked.

    deadline    maximum duration of the complete training run, in s or as a string such as "36 h"
    budget      maximum cost of the complete training run, in USD
    efficiency  minimum efficiency, such as 0.9. The efficiency is the throughput divided by the throughput without
                communication
    throughput  minimum throughput, in samples/s or as a string such as "5000 images/s"
    accuracy    accuracy to reach on held-out samples; requires the argument `training` of :func:`~ddlsim.recommend`
    objective   "time" prefers the fastest configuration, and "cost" the cheapest. None: the cheapest if there is a
                deadline or a minimum throughput but no budget, otherwise the fastest

    Raises ConfigError for invalid constraints.
    """

    deadline: Annotated[float | str, quantity("time", "36 h", si=True)] | None = None
    budget: Positive | None = None
    efficiency: _Least | None = None
    throughput: Annotated[float | str, quantity("rate", si=True)] | None = None
    accuracy: _Least | None = None
    objective: Annotated[str, one_of(*AIMS)] | None = None

    @property
    def wants_cheapest(self) -> bool:
        """Whether valid configurations are ranked by cost (the cheapest is the best) instead of by time."""
        if self.objective is not None:
            return self.objective == "cost"
        return self.budget is None and (self.deadline is not None or self.throughput is not None)

    @property
    def needs_total(self) -> bool:
        """Whether a limit refers to the complete training run."""
        return self.deadline is not None or self.budget is not None

    def misses(self, figures: Figures) -> list[Miss]:
        """Return a comparison of `figures` with each limit. A relative miss below 1e-9 (rounding) counts as met."""
        limits: Mapping[str, tuple[object, float | None]] = {
            "deadline": (self.deadline, figures.total_time),
            "budget": (self.budget, figures.total_cost),
            "efficiency": (self.efficiency, figures.efficiency),
            "throughput": (self.throughput, figures.throughput),
        }
        misses = []
        for what, (limit, value) in limits.items():
            if isinstance(limit, int | float) and value is not None:
                at_least = what in METRICS and METRICS[what].larger_is_better
                share = (-1.0 if at_least else 1.0) * (value / limit - 1.0)
                misses.append(Miss(what, float(limit), value, share if share > FLOOR else 0.0))
        return misses

    def rank(self, figures: Figures) -> tuple[float, float]:
        """Return the rank of a configuration as a tuple, where smaller is better: the worst miss, then time or cost.

        Time and cost are those of the complete training run if its length is known, otherwise of one sample. Better
        figures never rank lower, so the rank of a bound is a bound on the rank.
        """
        worst = max((miss.share for miss in self.misses(figures)), default=0.0)
        return worst, figures.seconds * figures.cost_rate if self.wants_cheapest else figures.seconds
