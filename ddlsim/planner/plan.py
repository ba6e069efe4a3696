"""`Plan`: what :func:`ddlsim.recommend` answers, with the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ddlsim.errors import ConfigError
from ddlsim.planner.advice import Guideline
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.crossovers import Crossover
from ddlsim.planner.search import Found
from ddlsim.planner.target import Figures, Miss, Target
from ddlsim.run.experiment import Experiment
from ddlsim.run.sensitivity import Sensitivity

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Choice:
    """A configuration that is recommended.

    experiment  what was simulated: ``ddlsim.simulate(choice.experiment)`` does it again
    figures     throughput, efficiency, and cost rate (USD/s, or devices where machines have no price)
    misses      each limit of the target with what stands against it; all ``share`` are 0 where it is met
    reasons     why it, and not another one
    accuracy    that was reached, where it was trained
    """

    candidate: Candidate
    experiment: Experiment
    figures: Figures
    misses: tuple[Miss, ...]
    reasons: tuple[str, ...] = ()
    accuracy: float | None = None

    @property
    def meets_target(self) -> bool:
        """Whether every limit is kept."""
        return all(miss.share == 0.0 for miss in self.misses)

    @property
    def exact(self) -> bool:
        """Whether the workers learn what one would learn with their batches as one."""
        return self.candidate.exact

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.candidate.workers

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.figures.throughput

    @property
    def efficiency(self) -> float:
        """Share of what the workers would do without communication."""
        return self.figures.efficiency

    @property
    def spread(self) -> float:
        """Share by which the throughput moves with its inputs, where that was looked at; else 0."""
        return self.figures.spread

    def __str__(self) -> str:
        return str(self.candidate)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What to rent and how to use it.

    target         what was asked for
    choices        the best few, best first; the best of those that learn exactly is always among them
    found          what became of every configuration
    crossovers     from how many workers on one way to exchange gradients beats another
    sensitivities  what 10 % better parts would bring to the best choice
    guidelines     rules of thumb for the best choice
    notes          what the reader should know
    priced         costs are in USD; otherwise in device-hours
    """

    target: Target
    choices: tuple[Choice, ...]
    found: tuple[Found, ...]
    crossovers: tuple[Crossover, ...]
    sensitivities: tuple[Sensitivity, ...]
    guidelines: tuple[Guideline, ...]
    notes: tuple[str, ...]
    priced: bool

    @property
    def best(self) -> Choice:
        """The best choice."""
        return self.choices[0]

    @property
    def best_exact(self) -> Choice:
        """The best of those that learn what plain SGD learns. Raises ConfigError if there is none."""
        for choice in self.choices:
            if choice.exact:
                return choice
        raise ConfigError("no configuration without compression or local steps was simulated; give such strategies")

    @property
    def meets_target(self) -> bool:
        """Whether the best choice keeps every limit of the target."""
        return self.best.meets_target

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per configuration, the simulated ones first: what is varied, exact, status, throughput (samples/s),
        efficiency, time (s of the whole training), cost (USD or device-hours: of it, or of a million samples), miss
        (worst share by which a limit is missed), step_time (s of an update of the global batch), mfu (share of the
        devices' peak), memory (bytes of the fullest worker, where a split of the model was looked at), shares of the
        time, reason."""
        import pandas as pd

        return pd.DataFrame([self._row(found) for found in self.found])

    def _row(self, found: Found) -> dict[str, object]:
        figures = found.figures
        candidate = found.candidate
        numbers = dict.fromkeys(("throughput", "efficiency", "time", "cost", "miss", "step_time", "mfu"), math.nan)
        if figures is not None:
            time = math.nan if figures.total_time is None else figures.total_time
            numbers = {
                "throughput": figures.throughput, "efficiency": figures.efficiency, "time": time,
                "cost": self.cost(figures), "miss": self.target.rank(figures)[0],
                "step_time": candidate.global_batch / figures.throughput,
                "mfu": math.nan if (mfu := candidate.mfu(figures.throughput)) is None else mfu,
            }  # fmt: skip
        numbers["memory"] = math.nan if found.held is None else found.held
        shares = found.shares or dict.fromkeys(("compute", "communication", "waiting", "idle"), math.nan)
        row: dict[str, object] = {**candidate.settings, "exact": candidate.exact, "status": found.status}
        return {**row, **numbers, **shares, "reason": found.reason}

    def cost(self, figures: Figures) -> float:
        """Return USD, or device-hours where machines have no price: of the whole training, or of a million samples
        where it is not known how long that is."""
        seconds = 1e6 / figures.throughput if figures.total_time is None else figures.total_time
        return seconds * figures.cost_rate / (1.0 if self.priced else 3600.0)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain values."""
        return {
            "meets_target": self.meets_target,
            "cost_unit": "USD" if self.priced else "device-hours",
            "choices": [self._choice(choice) for choice in self.choices],
            "crossovers": [vars(crossing) for crossing in self.crossovers],
            "sensitivities": [sensitivity.to_dict() for sensitivity in self.sensitivities],
            "guidelines": [vars(guideline) for guideline in self.guidelines],
            "notes": list(self.notes),
            "configurations": [
                {name: None if value != value or value == math.inf else value for name, value in self._row(f).items()}
                for f in self.found
            ],
        }

    def _choice(self, choice: Choice) -> dict[str, object]:
        figures = choice.figures
        finite = figures.total_time is not None and math.isfinite(figures.total_time)
        cost = self.cost(figures)
        return {
            **choice.candidate.settings, "exact": choice.exact, "throughput": figures.throughput,
            "throughput_spread": figures.spread, "efficiency": figures.efficiency,
            "time": figures.total_time if finite else None,
            "cost": cost if math.isfinite(cost) else None, "accuracy": choice.accuracy,
            "missed": {miss.what: miss.share for miss in choice.misses if 0.0 < miss.share < math.inf},
            "reasons": list(choice.reasons),
        }  # fmt: skip

    def __str__(self) -> str:
        from ddlsim.planner.text import text

        return text(self)

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, labelled, lines, page
        from ddlsim.planner.text import advice_rows, choice_rows, layout_cells

        layouts = layout_cells(self)
        between = [lines(["splits"]), grid(layouts)] if layouts else []
        return page("Recommended", labelled(choice_rows(self)), *between, labelled(advice_rows(self)))

    def __repr__(self) -> str:
        return f"<Plan: {self.best}, {self.best.throughput:.4g} samples/s>"


def choices_of(found: Sequence[Found], target: Target, n_best: int) -> list[Choice]:
    """Return the first `n_best` of what was simulated, best first, and the best exact one if it is not among them."""
    done = [one for one in found if one.figures is not None]
    chosen = done[:n_best]
    exact = next((one for one in done if one.candidate.exact), None)
    if exact is not None and not any(one.candidate.exact for one in chosen):
        chosen.append(exact)
    return [
        Choice(one.candidate, one.candidate.experiment, one.figures, tuple(target.misses(one.figures)))
        for one in chosen
        if one.figures is not None
    ]
