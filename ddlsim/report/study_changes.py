"""What changing one field gives, read off the table of a study: "100 instead of 25 Gbit/s: +9.1 %".

Compared are configurations that differ in this field only, seed by seed, so that what the seeds have in common cancels.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.readable import count
from ddlsim.report.study_words import (
    label_of,
    main_metric,
    named,
    numbers_of,
    plain,
    task_fields,
    tasks,
    varied,
)
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import half_width
from ddlsim.ties import FLOOR

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.table import Table

#: settings as texts -> seed -> value of a metric
_Seen: TypeAlias = dict[tuple[str, ...], dict[int, float]]
#: values of a field that are compared one with the next; of more, the last with the first
N_VALUES = 5
#: lines of text under a table
N_LINES = 8


@dataclass(frozen=True)
class Change:
    """What one value of a field instead of another gives.

    field     that changes
    what      "nic bandwidth 100 instead of 25 Gbit/s"
    gain      relative change of the metric (of a share: difference), at the place where it is looked at
    effect    "throughput +9.1 % (95 % interval +9.0 to +9.2 %)"; and of the cost, where it is known
    where     what else is set there, "" at the best configuration
    range     of the effect over all pairs of configurations that differ so in this field only, "" if it is one number
    """

    field: str
    what: str
    gain: float
    effect: str
    where: str = ""
    range: str = ""

    def __str__(self) -> str:
        where = f" with {self.where}" if self.where else ""
        return f"{self.what}: {self.effect}{where}" + (f"; {self.range} over all pairs" if self.range else "")


def ranked_changes(table: Table, metric: str, question: str = "") -> tuple[str, list[Change]]:
    """Return :func:`changes` by `metric`, or by accuracy or throughput where no two configurations have it (a target
    that one of them reaches), and which of these it is."""
    for name in (metric, "accuracy", "throughput"):
        found = changes(table, name, question)
        if found:
            return name, found
    return metric, []


def changes(table: Table, metric: str, question: str = "") -> list[Change]:
    """Return what each field gives that is varied, of one task; first those that the question names, then the largest.

    Looked at is the best configuration by `metric` and its neighbour, or the best pair there is.
    """
    try:
        rows = table.known(metric)
    except ConfigError:  # nothing is known
        return []
    rows = rows.assign(_place=table.places(rows, metric))
    best = rows.iloc[int(rows["_place"].argmin())]
    seen = {name: _by_seed(table, name) for name in (metric, "cost_per_sample") if name in table.frame}
    found = [change for field in varied(table) for change in _of_field(table, rows, field, metric, best, seen)]
    return sorted(found, key=lambda change: (-_named_in(question, change), -abs(change.gain)))


def _by_seed(table: Table, metric: str) -> _Seen:
    """Return the values of a metric that are known: settings as texts -> seed -> value."""
    frame = table.frame
    seen: _Seen = {}
    for key, seed, value in zip(_keys(frame, table.axes), frame["seed"], frame[metric], strict=True):
        if math.isfinite(value):
            seen.setdefault(key, {})[int(seed)] = float(value)
    return seen


def _keys(rows: pd.DataFrame, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return some fields of each row, as texts."""
    return list(zip(*(rows[axis].map(plain) for axis in axes), strict=True)) if axes else [()] * len(rows)


def change_lines(table: Table) -> list[str]:
    """Return the changes as lines of text, by the metric that ranks the study, at most :data:`N_LINES` of each task."""
    lines = []
    for name, part in tasks(table):
        metric, found = ranked_changes(part, main_metric(table))
        if found:
            best = label_of(part.best(metric).iloc[0], [f for f in varied(part) if f not in task_fields(table)])
            of = f"{name}: " if name else ""
            lines.append(f"{of}what one change gives, at the best by {METRICS[metric].heading} ({best}):")
            lines += [f"  {change}" for change in found[:N_LINES]]
            if len(found) > N_LINES:
                lines.append(f"  ... and {len(found) - N_LINES} more changes")
    return lines


def cost_line(table: Table) -> str:
    """Return what all simulated runs of a study would cost, "" where that is not known or they are but a few steps."""
    frame = table.frame
    if "updates" not in frame or not frame["cost"].notna().any():
        return ""
    rows = frame[frame["updates"].notna() & frame["cost"].notna()]
    if not len(rows):
        return ""
    money = METRICS["cost"].write(float(rows["cost"].sum()))
    return f"{count(len(rows), 'run')}, each to its end, would cost {money} on these machines"


def _of_field(
    table: Table, rows: pd.DataFrame, field: str, metric: str, best: pd.Series[Any], seen: Mapping[str, _Seen]
) -> list[Change]:
    at = list(table.axes).index(field)
    groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}  # what else is set -> value -> configuration
    keys = _keys(rows, table.axes)
    for key in keys:
        groups.setdefault((*key[:at], *key[at + 1 :]), {})[key[at]] = key
    place = dict(zip(keys, rows["_place"].tolist(), strict=True))
    index = {key: i for i, key in enumerate(keys)}
    of_best = tuple(plain(best[axis]) for axis in table.axes)
    found = []
    for old, new in _pairs(rows[field].drop_duplicates().tolist(), best[field]):
        texts = plain(old), plain(new)
        pairs = [(group[texts[0]], group[texts[1]]) for group in groups.values() if set(texts) <= group.keys()]
        gains = {pair: _gains(seen[metric], *pair, metric) for pair in pairs}
        pairs = [pair for pair in pairs if gains[pair]]
        if not pairs:
            continue
        here = min(pairs, key=lambda pair: min(place[pair[0]], place[pair[1]]))
        means = [gains[pair][0] for pair in pairs]
        ends = [_written(end, metric) for end in (min(means), max(means))]
        width = " to ".join(ends) if ends[0] != ends[1] else ""
        same = (*here[0][:at], *here[0][at + 1 :]) == (*of_best[:at], *of_best[at + 1 :])
        others = [axis for axis in varied(table) if axis != field]
        where = "" if same else label_of(rows.iloc[index[here[0]]], others)
        effect = _effect(gains[here], metric)
        cost = _gains(seen.get("cost_per_sample", {}), *here, "cost_per_sample")
        if cost and metric != "cost_per_sample":
            effect += f", {_changed('cost per sample', cost[0], 'cost_per_sample')}"
        found.append(Change(field, _what(field, old, new), gains[here][0], effect, where, width))
    return found


def _pairs(values: Sequence[object], best: object) -> list[tuple[object, object]]:
    """Return (old, new) values to compare: neighbours in rising order, or the best with each of the others."""
    numbers = numbers_of(values)
    if numbers is None or any(isinstance(value, bool) for value in values):
        return [(value, best) for value in values[: N_VALUES + 1] if plain(value) != plain(best)]
    rising = list(numbers)
    if len(rising) > N_VALUES:
        return [(rising[0], rising[-1])]
    return list(itertools.pairwise(rising))


def _gains(seen: _Seen, old: tuple[str, ...], new: tuple[str, ...], metric: str) -> list[float]:
    """Return the change of a metric (relative; of a share the difference): of the means over the seeds that both
    configurations have, and by each of these seeds. Empty where it is not known."""
    before, after = seen.get(old, {}), seen.get(new, {})
    seeds = [seed for seed in before if seed in after]
    if not seeds:
        return []
    a, b = (np.array([values[seed] for seed in seeds]) for values in (before, after))
    if METRICS[metric].drawn_in == "%":
        return [float((b - a).mean()), *(b - a).tolist()]
    return [] if (a == 0.0).any() else [float(b.mean() / a.mean() - 1.0), *(b / a - 1.0).tolist()]


def _written(gain: float, metric: str) -> str:
    unit = "points" if METRICS[metric].drawn_in == "%" else "%"
    return f"{100.0 * gain:+,.{1 if abs(gain) >= 0.0005 else 3}f} {unit}"


def _changed(heading: str, gain: float, metric: str) -> str:
    return f"the same {heading}" if abs(gain) <= FLOOR else f"{heading} {_written(gain, metric)}"


def _effect(gains: Sequence[float], metric: str) -> str:
    """Return the change of a metric with its interval over seeds."""
    text = _changed(METRICS[metric].heading, gains[0], metric)
    by_seed = np.array(gains[1:])
    half = float(half_width(by_seed, 0.95)) if len(by_seed) > 1 else 0.0
    if half <= FLOOR:
        return text
    mean = float(by_seed.mean())
    if abs(mean) <= half:
        return f"{text} ({len(by_seed)} seeds do not tell them apart)"
    return f"{text} (95 % interval {_written(mean - half, metric)} to {_written(mean + half, metric)})"


def _what(field: str, old: object, new: object) -> str:
    """Return "nic bandwidth 100 instead of 25 Gbit/s", "ring instead of servers", "64 instead of 32 workers"."""
    (number, _, unit), (other, _, its_unit) = (plain(value).partition(" ") for value in (new, old))
    if field == "workers":
        return f"{number} instead of {other} workers"
    if unit and unit == its_unit and number[:1].isdigit() and other[:1].isdigit():
        return named(field, new).removesuffix(f" {unit}") + f" instead of {other} {unit}"
    text, before = named(field, new), named(field, old)
    name = text.removesuffix(plain(new))
    return f"{text} instead of {before.removeprefix(name) if name else before}"


def _named_in(question: str, change: Change) -> int:
    """Return how many words of a change a question has: numbers with their unit count most."""
    asked = question.lower()
    values = re.findall(r"\d[\w.]*", change.what.lower())
    words = set(re.findall(r"[a-z]{3,}", f"{change.what} {change.field}".lower())) - {"instead", "cluster"}
    numbers = sum(bool(re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", asked)) for value in values)
    return 3 * numbers + sum(word in asked for word in words)
