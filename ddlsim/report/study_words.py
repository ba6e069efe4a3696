"""What a report of a study calls things: configurations, columns with their units, and the answer in sentences."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError, UnitError
from ddlsim.readable import count
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import half_width
from ddlsim.units import DIMENSIONS, parse

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.store import Member
    from ddlsim.study.table import Table

#: what may be the best about a configuration, and what the answer calls the one that has it
_BEST = {
    "time_to_accuracy": "First to the target accuracy",
    "cost_to_accuracy": "Cheapest to the target accuracy",
    "accuracy": "Most accurate",
    "goodput": "Best goodput",
    "throughput": "Best throughput",
    "cost_per_sample": "Cheapest per million samples",
    "energy_per_sample": "Least energy per million samples",
}
#: pairs of metrics to weigh against each other, the first pair that is known; they should pull apart
_FRONTS = (
    ("time_to_accuracy", "cost_to_accuracy"),
    ("simulated_time", "accuracy"),
    ("goodput", "cost_per_sample"),
    ("throughput", "cost_per_sample"),
    ("throughput", "efficiency"),
)


#: fields that say what is trained, from what, and until when
_TASKS = (
    "model", "time_model", "training.data", "training.held_out", "training.target_accuracy", "training.target_loss"
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What is best about the configuration in a row of the summary: the value, its interval, how many others are
    equally good, and what comes next."""

    what: str
    row: int
    value: str
    interval: str
    next: str
    equal: str = ""


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
    text, path = plain(value), field.split(".")
    # of a kind of links ("cluster.nic.bandwidth") the kind is told as well
    name = " ".join(path[1:] if path[0] == "cluster" and len(path) > 2 else path[-1:]).replace("_", " ")
    if name == "workers":
        return f"{text} workers"
    if text == "none":
        return f"no {name}"
    return text if isinstance(value, str) and not text[:1].isdigit() else f"{name} {text}"


def numbers_of(values: Sequence[object]) -> dict[object, float] | None:
    """Return the number that each value is or, with its unit, stands for, in rising order; None if not all do."""
    for dimension in DIMENSIONS:
        try:
            numbers = [parse(v, dimension) if isinstance(v, str) else float(v) for v in values]  # type: ignore[arg-type]
        except UnitError:
            continue
        return dict(sorted(zip(values, numbers, strict=True), key=lambda item: item[1]))
    return None


def task_fields(table: Table) -> list[str]:
    """Return the varied fields that say what is trained, and until when: between their values nothing competes."""
    datasets = set()
    for text in table.experiments.values() if "training" in table.axes else ():
        training = json.loads(text).get("training")
        datasets.add(json.dumps(training.get("data")) if isinstance(training, dict) else "")
    return [
        field
        for field in varied(table)
        if field in _TASKS or field.startswith("model.") or (field == "training" and len(datasets) > 1)
    ]


def tasks(table: Table) -> list[tuple[str, Table]]:
    """Return the parts of a study that train the same, each with its name; one without a name if all do."""
    fields = task_fields(table)
    if not fields:
        return [("", table)]
    parts: dict[str, list[Member]] = {}
    for member in table.members:
        name = task_of(member.settings, fields)
        parts.setdefault(name, []).append(member)
    return [(name, dataclasses.replace(table, members=members)) for name, members in parts.items()]


def task_of(settings: Mapping[str, object] | pd.Series[float], fields: Sequence[str]) -> str:
    """Return the name of what is trained."""
    return ", ".join(named(field, settings[field]) for field in fields)


def main_metric(table: Table) -> str:
    """Return the metric by which configurations are ranked where nobody has said."""
    for metric in ("time_to_accuracy", "accuracy"):
        try:
            table.known(metric)
        except ConfigError:
            continue
        return metric
    summary = table.summary
    everywhere = "goodput" in summary and bool(np.isfinite(summary["goodput"].to_numpy(np.float64)).all())
    return "goodput" if everywhere else "throughput"  # what nothing disturbs has no goodput


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
            ranked = table.best(metric, n=len(table.members))
        except ConfigError:  # the metric is not known
            continue
        first = ranked.iloc[0]
        write = METRICS[metric].write
        low, high = first[f"{metric}_low"], first[f"{metric}_high"]
        interval = f"95 % interval {write(low)} to {write(high)}" if math.isfinite(low) else ""
        n_equal = int((table.places(ranked, metric) == 0).sum()) - 1
        equal = f"and {count(n_equal, 'other')} equal: they differ by no more than they are stable to"
        rest = ranked.iloc[[0, *range(1 + n_equal, len(ranked))]]
        following = _runner_up(table, rest, metric)
        row, value = int(ranked.index[0]), write(first[metric])
        found.append(Answer(what, row, value, interval, following, equal if n_equal else ""))
    return found


def _runner_up(table: Table, ranked: pd.DataFrame, metric: str) -> str:
    """Return how far behind the second is, and whether the seeds tell the two apart."""
    if len(ranked) < 2:
        return ""
    first, second = ranked.iloc[0], ranked.iloc[1]
    best = float(first[metric])
    text = f"{label_of(second, varied(table))}, {METRICS[metric].write(second[metric])}"
    if best:
        text += f" ({100.0 * (float(second[metric]) - best) / abs(best):+,.1f} %)"
    # the seeds are common random numbers, so what counts is the difference that each of them makes
    gap = (_of_seeds(table, second, metric) - _of_seeds(table, first, metric)).dropna()
    if len(gap) > 1 and abs(float(gap.mean())) <= half_width(np.asarray(gap, dtype=np.float64), 0.95):
        text += f"; {len(gap)} seeds do not tell the two apart"
    return text


def _of_seeds(table: Table, settings: pd.Series[float], metric: str) -> pd.Series[float]:
    """Return a metric of a configuration by seed."""
    return rows_of(table, table.frame, settings).set_index("seed")[metric]


def equal_in_front(table: Table, x: str, y: str) -> list[pd.DataFrame]:
    """Return the Pareto front of two metrics, those that tie in both together, in the order of the first metric."""
    front = table.pareto(x, y)
    places = np.stack([table.places(front, name) for name in (x, y)], axis=1).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, place in enumerate(places):
        groups.setdefault(tuple(place), []).append(i)
    return [front.iloc[members] for members in groups.values()]


def front_of(table: Table) -> tuple[str, str] | None:
    """Return the two metrics whose Pareto front says most about this study, or None if no two are known."""
    for x, y in _FRONTS:
        try:
            table.known(x, y)
        except ConfigError:
            continue
        return x, y
    return None
