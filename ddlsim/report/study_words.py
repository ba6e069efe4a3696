"""What a report of a study calls things: configurations, columns with their units, and the answer in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import half_width

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: what may be the best about a configuration, and what the answer calls the one that has it
_BEST = {
    "time_to_accuracy": "First to the target accuracy",
    "cost_to_accuracy": "Cheapest to the target accuracy",
    "accuracy": "Most accurate",
    "throughput": "Best throughput",
    "cost_per_sample": "Cheapest per million samples",
    "energy_per_sample": "Least energy per million samples",
}
#: pairs of metrics to weigh against each other, the first pair that is known; they should pull apart
_FRONTS = (
    ("time_to_accuracy", "cost_to_accuracy"),
    ("simulated_time", "accuracy"),
    ("throughput", "cost_per_sample"),
    ("throughput", "efficiency"),
)


@dataclass(frozen=True)
class Answer:
    """What is best about the configuration in a row of the summary: the value, its interval, and what comes next."""

    what: str
    row: int
    value: str
    interval: str
    next: str


def plain(value: object) -> str:
    """Return the value of a varied field as people write it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def varied(table: Table) -> list[str]:
    """Return the fields that have more than one value among all points of the study."""
    values = {axis: {plain(member.settings[axis]) for member in table.members} for axis in table.axes}
    return [axis for axis in table.axes if len(values[axis]) > 1]


def label_of(settings: pd.Series[float], fields: Sequence[str]) -> str:
    """Return a configuration in a few words, by those `fields` that are given: "64 workers, bandwidth 1 Gbit/s"."""
    return ", ".join(named(field, settings[field]) for field in fields) or "the base experiment"


def named(field: str, value: object) -> str:
    """Return a value, with the name of its field where it would say nothing without."""
    text, name = plain(value), field.rpartition(".")[2].replace("_", " ")
    if name == "workers":
        return f"{text} workers"
    if text == "none":
        return f"no {name}"
    return text if isinstance(value, str) and not text[:1].isdigit() else f"{name} {text}"


def rows_of(table: Table, rows: pd.DataFrame, settings: pd.Series[float], besides: str = "") -> pd.DataFrame:
    """Return those of some rows that have the varied fields, but for one, as in `settings`."""
    for axis in table.axes:
        if axis != besides:
            rows = rows[rows[axis] == settings[axis]]
    return rows


def answers(table: Table) -> list[Answer]:
    """Return what is best about which configuration, for all metrics that are known; "row" counts in the summary."""
    found = []
    for metric, what in _BEST.items():
        try:
            ranked = table.best(metric, n=2)
        except ConfigError:  # the metric is not known
            continue
        first = ranked.iloc[0]
        write = METRICS[metric].write
        low, high = first[f"{metric}_low"], first[f"{metric}_high"]
        interval = f"95 % interval {write(low)} to {write(high)}" if math.isfinite(low) else ""
        row = int(ranked.index[0])
        found.append(Answer(what, row, write(first[metric]), interval, _runner_up(table, ranked, metric)))
    return found


def _runner_up(table: Table, ranked: pd.DataFrame, metric: str) -> str:
    """Return how far behind the second is, and whether the seeds tell the two apart."""
    if len(ranked) < 2:
        return ""
    first, second = ranked.iloc[0], ranked.iloc[1]
    best = float(first[metric])
    tied = table.places(ranked, metric)[1] == 0
    text = f"{label_of(second, varied(table))}, {METRICS[metric].write(second[metric])}"
    if best:
        text += f" ({100.0 * (float(second[metric]) - best) / abs(best):+,.1f} %)"
    if tied:
        return f"{text}; a tie: they differ by no more than they are stable to"
    # the seeds are common random numbers, so what counts is the difference that each of them makes
    gap = (_of_seeds(table, second, metric) - _of_seeds(table, first, metric)).dropna()
    if len(gap) > 1 and abs(float(gap.mean())) <= half_width(np.asarray(gap, dtype=np.float64), 0.95):
        text += f"; {len(gap)} seeds do not tell the two apart"
    return text


def _of_seeds(table: Table, settings: pd.Series[float], metric: str) -> pd.Series[float]:
    """Return a metric of a configuration by seed."""
    return rows_of(table, table.frame, settings).set_index("seed")[metric]


def front_of(table: Table) -> tuple[str, str] | None:
    """Return the two metrics whose Pareto front says most about this study, or None if no two are known."""
    for x, y in _FRONTS:
        try:
            table.known(x, y)
        except ConfigError:
            continue
        return x, y
    return None
