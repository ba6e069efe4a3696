"""Texts of a study's report: labels of configurations, columns with units, and the answer in sentences."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim import printable
from ddlsim.errors import ConfigError, UnitError
from ddlsim.readable import count, in_words, percent
from ddlsim.run.metrics import METRICS, Metric
from ddlsim.run.seeds import half_width
from ddlsim.text_tables import aligned
from ddlsim.ties import FLOOR
from ddlsim.units import DIMENSIONS, parse

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.study.store import Member
    from ddlsim.study.table import Table


#: maximum number of rows shown; the frame has all
N_ROWS = 40
N_REASONS = 5
#: metrics shown
_COLUMNS: tuple[str, ...] = ("throughput", "throughput_spread", "goodput", "efficiency", "input_share", "step_time")
_COLUMNS += ("accuracy", "time_to_accuracy", "cost_to_accuracy", "cost_per_sample", "energy_per_sample", "cost")


def study_text(table: Table) -> str:
    """Return what ``print(table)`` shows: a line per configuration with means over the seeds."""
    return printable.shown("\n".join([*aligned(study_cells(table)), *study_notes(table)]))


def study_cells(table: Table) -> list[list[str]]:
    """Return a header and one row per configuration (the first 40) with means over the seeds; for a search, the best
    first."""
    shown, axes = _shown(table), _axes(table)
    lines = [[*(varied(table) or ["workers"]), *(metric.column[0] for metric in shown)]]
    for _, row in (_best_first(table) if _is_ranked(table) else table.summary).head(N_ROWS).iterrows():
        numbers = (_with_interval(row, metric.name, metric.column[1]) for metric in shown)
        lines.append([*(plain(row[axis]) for axis in axes), *numbers])
    return lines


def study_notes(table: Table) -> list[str]:
    """Return the lines below the rows of :func:`study_cells`."""
    summary, axes, text = table.summary, _axes(table), list[str]()
    seeds = summary["n"].max() if len(summary) else 0
    fixed = [f"{axis} {plain(table.members[0].settings[axis])}" for axis in table.axes if axis not in axes]
    if len(summary) > N_ROWS:
        text.append(f"... and {len(summary) - N_ROWS} more")
    if _is_ranked(table):
        order = "Pareto-optimal configurations first" if len(table.objectives) > 1 else "best first"
        text.append(f"searched for {' and '.join(table.objectives)}; {order}")
    if fixed:
        text.append(f"in all configurations: {', '.join(fixed)}")
    if seeds > 1:
        text.append(f"means over {seeds} seeds, +- 95 % intervals (Student's t)")
        text += _nothing_random(table)
    notes = [note for outcome in table.outcomes.values() for note in texts_of(outcome.record.get("notes"))]
    if (summary["efficiency"] > 1.0).any():
        text += dict.fromkeys(f"efficiency{note.partition(',')[2]}" for note in notes if note.startswith("efficiency "))
    if METRICS["energy_per_sample"] in _shown(table):
        text += dict.fromkeys(note for note in notes if note.startswith("energy: "))
    text += [*change_lines(table), *filter(None, [cost_line(table)])]
    return [*text, *_ends(table)]


def _axes(table: Table) -> list[str]:
    return varied(table) or ["n_workers"]


def _shown(table: Table) -> list[Metric]:
    summary = table.summary
    columns = dict.fromkeys([*_COLUMNS, *table.objectives])
    if "updates" not in summary:  # the cost of a few steps is meaningless
        columns.pop("cost", None)
    return [METRICS[name] for name in columns if name in summary and summary[name].notna().any()]


def _is_ranked(table: Table) -> bool:
    """Return whether a search has found a best configuration."""
    return any(np.isfinite(table.summary[name]).any() for name in table.objectives)


def _best_first(table: Table) -> pd.DataFrame:
    """Return the summary of a search; with several metrics, the Pareto front comes first."""
    summary, metrics = table.summary, list(table.objectives)
    order = table.best(metrics[0], len(summary)).index.tolist()
    front = table.pareto(*metrics).index.tolist() if len(metrics) > 1 else []
    return summary.loc[list(dict.fromkeys([*front, *order, *summary.index]))]


def _nothing_random(table: Table) -> list[str]:
    """Return a note if seeds made no difference anywhere, so that intervals of 0 % do not indicate certainty."""
    summary = table.summary
    several = summary[summary["n"] > 1]
    names = [name.removesuffix("_high") for name in summary.columns if str(name).endswith("_high")]
    half = several[[f"{name}_high" for name in names]].to_numpy() - several[names].to_numpy()
    if not len(several) or (abs(half) > 1e-12 * abs(several[names].to_numpy())).any():
        return []
    return ["all seeds gave the same results, because nothing in these runs is random; use one seed, or set jitter=..."]


def texts_of(recorded: object) -> list[str]:
    """Return the notes or warnings of an outcome's record."""
    return [str(text) for text in recorded] if isinstance(recorded, list | tuple) else []


def _with_interval(row: pd.Series[Any], name: str, write: Callable[[float], str]) -> str:
    mean, high = row[name], row[f"{name}_high"]
    if math.isnan(mean):
        return "-"
    missed = int(row["n"] - row["n_reached"]) if METRICS[name].kind == "target" else 0
    reached = f" ({int(row['n'] - missed)} of {int(row['n'])} seeds)" if missed and row["n"] > 1 else ""
    if math.isinf(mean):
        return f"never{reached}"
    if reached:
        return f"median {write(mean)}{reached}"
    if math.isnan(high) or not mean or METRICS[name].kind == "stability":  # a spread is uncertain by nature
        return write(mean)
    return f"{write(mean)} +-{percent((high - mean) / abs(mean))}"


def _ends(table: Table) -> list[str]:
    """Return lines with the number of points per status, reasons of skipped and failed ones, and warnings."""
    counts = {status: n for status, n in table.counts.items() if n}
    lines = [", ".join(f"{n} {status}" for status, n in counts.items()) + " of " + count(len(table.members), "point")]
    if table.interrupted:
        lines[0] += "; interrupted: run the study again to continue"
    for status, column, word in (
        ("skipped", "error", "skipped"),
        ("failed", "error", "failed"),
        ("done", "warnings", "warning of"),
    ):
        reasons = Counter(filter(None, table.frame.loc[table.frame["status"] == status, column]))
        lines += [f"{word} {n}: {reason}" for reason, n in reasons.most_common(N_REASONS)]
        if len(reasons) > N_REASONS:
            lines.append(f"... and {len(reasons) - N_REASONS} more reasons; see the column {column} of table.frame")
    return lines


#: maximum number of values of a field that are compared pairwise; with more, only the first and the last
N_VALUES = 5
#: maximum number of lines below a table
N_LINES = 8


@dataclass(frozen=True)
class Change:
    """The effect of changing one field.

    field     the field
    what      "NIC bandwidth 100 instead of 25 Gbit/s"
    gain      relative change of the metric (for a share: difference) for the pair of configurations shown
    effect    "throughput +9.1 % (95 % interval +9.0 to +9.2 %)", and the effect on cost, if known
    where     the other settings of this pair; "" for the best configuration
    range     range of the effect over all pairs of configurations that differ only in this way; "" for a single number
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
    """Return :func:`changes` by `metric` or, if no two configurations have it (such as a target that only one reaches),
    by accuracy or throughput, and the metric used."""
    for name in (metric, "accuracy", "throughput"):
        ranked = changes(table, name, question)
        if ranked:
            return name, ranked
    return metric, []


def changes(table: Table, metric: str, question: str = "") -> list[Change]:
    """Return the effect of each varied field, for one task, sorted by relevance to the question, then by size.

    Compared are the best configuration by `metric` and its neighbour, or else the best pair of configurations.
    """
    if not is_known(table, metric):
        return []
    rows = table.known(metric)
    rows = rows.assign(_place=table.places(rows, metric)).reset_index(drop=True)
    best = rows.iloc[int(rows["_place"].argmin())]
    seen = {name: _by_seed(table, rows, name) for name in (metric, "cost_per_sample") if name in table.frame}
    effects = [change for field in varied(table) for change in _of_field(table, rows, field, metric, best, seen)]
    return sorted(effects, key=lambda change: (-_named_in(question, change), -abs(change.gain)))


def _by_seed(table: Table, rows: pd.DataFrame, metric: str) -> list[dict[int, float]]:
    """Return the known values of a metric for each row of the summary: seed -> value."""
    frame, axes = table.frame, table.axes
    seen: dict[tuple[object, ...], dict[int, float]] = {}
    for seed, value, *key in zip(frame["seed"], frame[metric], *(frame[axis] for axis in axes), strict=True):
        seen.setdefault(tuple(key), {}).update({int(seed): float(value)} if math.isfinite(value) else {})
    return [seen[key] for key in zip(*(rows[axis] for axis in axes), strict=True)]


def change_lines(table: Table) -> list[str]:
    """Return the changes as lines of text, by the metric that ranks the study, at most :data:`N_LINES` per task."""
    lines = []
    for name, part in tasks(table):
        metric, ranked = ranked_changes(part, main_metric(table))
        if ranked:
            best = label_of(part.best(metric).iloc[0], [f for f in varied(part) if f not in task_fields(table)])
            of, heading = f"{name}: " if name else "", METRICS[metric].heading
            lines.append(f"{of}effects of single changes, at the best configuration by {heading} ({best}):")
            lines += [f"  {change}" for change in ranked[:N_LINES]]
            if len(ranked) > N_LINES:
                lines.append(f"  ... and {len(ranked) - N_LINES} more changes")
    return lines


def cost_line(table: Table) -> str:
    """Return a line with the cost of all simulated runs, or "" if unknown or if they are only a few steps."""
    frame = table.frame
    rows = frame[frame["updates"].notna() & frame["cost"].notna()] if "updates" in frame else frame[:0]
    if not len(rows):
        return ""
    money = METRICS["cost"].write(float(rows["cost"].sum()))
    return f"all {count(len(rows), 'run')} to the end would cost {money} on these machines"


def _of_field(
    table: Table,
    rows: pd.DataFrame,
    field: str,
    metric: str,
    best: pd.Series[Any],
    seen: Mapping[str, Sequence[Mapping[int, float]]],
) -> list[Change]:
    """Return the effects of changes of a field, between the configurations in `rows`."""
    others = [axis for axis in table.axes if axis != field]
    texts = rows.assign(**{axis: rows[axis].map(plain) for axis in table.axes})
    # configurations that differ in this field only: value of the field -> row
    groups = [
        dict(zip(part[field], map(int, part.index), strict=True))
        for _, part in texts.groupby(others or (lambda _: 0), sort=False)
    ]
    place, differences = rows["_place"].tolist(), []
    for old, new in _pairs(rows[field].drop_duplicates().tolist(), best[field]):
        pairs = [(group[plain(old)], group[plain(new)]) for group in groups if {plain(old), plain(new)} <= group.keys()]
        pairs.sort(key=lambda pair: min(place[pair[0]], place[pair[1]]))
        effects = [(i, j, gains) for i, j in pairs if (gains := _gains(seen[metric][i], seen[metric][j], metric))]
        if not effects:
            continue
        (i, j, gains), means = effects[0], [gains[0] for *_, gains in effects]
        ends = [_written(end, metric) for end in (min(means), max(means))]
        width = " to ".join(ends) if ends[0] != ends[1] else ""
        start: pd.Series[Any] = rows.iloc[int(i)]
        where = label_of(start, [axis for axis in varied(table) if axis != field])
        where = "" if all(plain(start[axis]) == plain(best[axis]) for axis in others) else where
        effect, costs = _effect(gains, metric), seen.get("cost_per_sample")
        if costs and metric != "cost_per_sample" and (cost := _gains(costs[i], costs[j], "cost_per_sample")):
            effect += f", {_changed('cost per sample', cost[0], 'cost_per_sample')}"
        differences.append(Change(field, _what(field, old, new), gains[0], effect, where, width))
    return differences


def _pairs(values: Sequence[object], best: object) -> list[tuple[object, object]]:
    """Return (old, new) values to compare: ascending neighbours, or each of the others with the best."""
    numbers = numbers_of(values)
    if numbers is None or any(isinstance(value, bool) for value in values):
        return [(value, best) for value in values[: N_VALUES + 1] if plain(value) != plain(best)]
    rising = list(numbers)
    if len(rising) > N_VALUES:
        return [(rising[0], rising[-1])]
    return list(itertools.pairwise(rising))


def _gains(before: Mapping[int, float], after: Mapping[int, float], metric: str) -> list[float]:
    """Return the changes of a metric (relative; for a share the difference): of the means over common seeds, and for
    each of these seeds. Empty if unknown."""
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
        return f"{text} (not significant with {len(by_seed)} seeds)"
    return f"{text} (95 % interval {_written(mean - half, metric)} to {_written(mean + half, metric)})"


def _what(field: str, old: object, new: object) -> str:
    """Return "NIC bandwidth 100 instead of 25 Gbit/s", "ring instead of servers", "64 instead of 32 workers"."""
    (number, _, unit), (other, _, its_unit) = (plain(value).partition(" ") for value in (new, old))
    text, before = named(field, new), named(field, old)
    if field == "workers":
        return f"{number} instead of {other} workers"
    if unit and unit == its_unit and number[:1].isdigit() and other[:1].isdigit():
        return f"{text.removesuffix(f' {unit}')} instead of {other} {unit}"
    return f"{text} instead of {before.removeprefix(text.removesuffix(plain(new)))}"


def _named_in(question: str, change: Change) -> int:
    """Return how well a question matches a change: the number of common words, numbers counting three times."""
    asked = question.lower()
    values = re.findall(r"\d[\w.]*", change.what.lower())
    words = set(re.findall(r"[a-z]{3,}", f"{change.what} {change.field}".lower())) - {"instead", "cluster"}
    numbers = sum(bool(re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", asked)) for value in values)
    return 3 * numbers + sum(word in asked for word in words)


#: metrics with a best configuration, and their labels in the answer
_BEST = {
    "time_to_accuracy": "First to the target accuracy",
    "cost_to_accuracy": "Cheapest to the target accuracy",
    "accuracy": "Most accurate",
    "goodput": "Best goodput",
    "throughput": "Best throughput",
    "cost_per_sample": "Cheapest per million samples",
    "energy_per_sample": "Least energy per million samples",
}
#: conflicting metrics for a Pareto front; the first known pair is used
_FRONTS = (
    ("time_to_accuracy", "cost_to_accuracy"),
    ("simulated_time", "accuracy"),
    ("goodput", "cost_per_sample"),
    ("throughput", "cost_per_sample"),
    ("throughput", "efficiency"),
)


#: fields that define the task: model, data, and end of the training
_TASKS = {"model", "time_model", "training.data", "training.held_out"}
_TASKS |= {"training.target_accuracy", "training.target_loss"}


@dataclass(frozen=True)
class Answer:
    """The best configuration by a metric, as a row of the summary: value, interval, number of equal ones, and
    runner-up."""

    what: str
    row: int
    value: str
    interval: str
    next: str
    equal: str = ""


#: fields for which None means that the run chooses
LEFT_OPEN = ("stack", "flash", "precision", "gradient dtype", "optimizer", "device")


def plain(value: object) -> str:
    """Return the value of a varied field in readable form."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def varied(table: Table) -> list[str]:
    """Return the fields that have more than one value among all points of the study."""
    return [axis for axis in table.axes if len(values_of(table, axis)) > 1]


def values_of(table: Table, axis: str) -> list[str]:
    """Return the values of a field among all points of the study, in readable form, in design order."""
    return list(dict.fromkeys(plain(member.settings[axis]) for member in table.members))


def label_of(settings: pd.Series[float], fields: Sequence[str]) -> str:
    """Return a short label of a configuration from the given `fields`: "64 workers, bandwidth 1 Gbit/s"."""
    return task_of(settings, fields) or "the base experiment"


def field_words(field: str) -> str:
    """Return the name of a varied field in words: "NIC bandwidth" for "cluster.nic.bandwidth"."""
    path = field.split(".")
    return in_words(" ".join(path[1:] if path[0] == "cluster" and len(path) > 2 else path[-1:]))


def label_of_axis(field: str, fields: Sequence[str], unit: str = "") -> str:
    """Return the label of a field's axis, with its unit; with its path if other `fields` end alike."""
    same = sum(field_words(other) == field_words(field) for other in fields) > 1
    name = in_words(field.replace(".", " ")) if same else field_words(field)
    return f"{name} ({unit})" if unit else name


def named(field: str, value: object) -> str:
    """Return a value, with the name of its field if it would be unclear without."""
    text, name = plain(value), field_words(field)
    if name == "workers":
        return f"{text} workers"
    if text == "none":
        return f"default {name}" if name in LEFT_OPEN else f"no {name}"
    return text if isinstance(value, str) and not text[:1].isdigit() else f"{name} {text}"


def numbers_of(values: Sequence[object]) -> dict[object, float] | None:
    """Return the number that each value is or, with its unit, represents, in ascending order; None unless all do."""
    for dimension in DIMENSIONS:
        try:
            numbers = [parse(v, dimension) if isinstance(v, str) else float(v) for v in values]  # type: ignore[arg-type]
        except UnitError:
            continue
        return dict(sorted(zip(values, numbers, strict=True), key=lambda item: item[1]))
    return None


def task_fields(table: Table) -> list[str]:
    """Return the varied fields that define the task; configurations of different tasks do not compete."""
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
    """Return the parts of a study with the same task, each with its name; if there is only one, its name is ""."""
    fields = task_fields(table)
    if not fields:
        return [("", table)]
    parts: dict[str, list[Member]] = {}
    for member in table.members:
        name = task_of(member.settings, fields)
        parts.setdefault(name, []).append(member)
    return [(name, dataclasses.replace(table, members=members)) for name, members in parts.items()]


def is_known(table: Table, *metrics: str) -> bool:
    """Return whether some configuration has all these metrics."""
    try:
        table.known(*metrics)
    except ConfigError:
        return False
    return True


def task_of(settings: Mapping[str, object] | pd.Series[float], fields: Sequence[str]) -> str:
    """Return the values of the fields in words."""
    return ", ".join(named(field, settings[field]) for field in fields)


def main_metric(table: Table) -> str:
    """Return the metric by which configurations are ranked by default."""
    for metric in ("time_to_accuracy", "accuracy"):
        if is_known(table, metric):
            return metric
    summary = table.summary
    everywhere = "goodput" in summary and bool(np.isfinite(summary["goodput"].to_numpy(np.float64)).all())
    return "goodput" if everywhere else "throughput"  # undisturbed runs have no goodput


def rows_of(table: Table, rows: pd.DataFrame, settings: pd.Series[float], besides: str = "") -> pd.DataFrame:
    """Return the rows whose varied fields, except `besides`, have the values in `settings`."""
    for axis in table.axes:
        if axis != besides:
            rows = rows[rows[axis] == settings[axis]]
    return rows


def answers(table: Table) -> list[Answer]:
    """Return the best configuration for each known metric; "row" is an index in the summary."""
    entries = []
    for metric, what in _BEST.items():
        if not is_known(table, metric):
            continue
        ranked = table.best(metric, n=len(table.members))
        first = ranked.iloc[0]
        write = METRICS[metric].write
        low, high = first[f"{metric}_low"], first[f"{metric}_high"]
        interval = f"95 % interval {write(low)} to {write(high)}" if math.isfinite(low) else ""
        n_equal = int((table.places(ranked, metric) == 0).sum()) - 1
        equal = f"and {count(n_equal, 'other')} tied: the differences are within the stability of the results"
        rest = ranked.iloc[[0, *range(1 + n_equal, len(ranked))]]
        following = _runner_up(table, rest, metric)
        row, value = int(ranked.index[0]), write(first[metric])
        entries.append(Answer(what, row, value, interval, following, equal if n_equal else ""))
    return entries


def _runner_up(table: Table, ranked: pd.DataFrame, metric: str) -> str:
    """Return text on the runner-up and its distance, and whether the seeds distinguish the two."""
    if len(ranked) < 2:
        return ""
    first, second = ranked.iloc[0], ranked.iloc[1]
    best = float(first[metric])
    text = f"{label_of(second, varied(table))}, {METRICS[metric].write(second[metric])}"
    if best:
        text += f" ({100.0 * (float(second[metric]) - best) / abs(best):+,.1f} %)"
    # seeds are common random numbers, so the difference per seed is what counts
    gap = (_of_seeds(table, second, metric) - _of_seeds(table, first, metric)).dropna()
    if len(gap) > 1 and abs(float(gap.mean())) <= half_width(np.asarray(gap, dtype=np.float64), 0.95):
        text += f"; the difference is not significant with {len(gap)} seeds"
    return text


def _of_seeds(table: Table, settings: pd.Series[float], metric: str) -> pd.Series[float]:
    return rows_of(table, table.frame, settings).set_index("seed")[metric]


def equal_in_front(table: Table, x: str, y: str) -> list[pd.DataFrame]:
    """Return the Pareto front of two metrics, grouping ties in both, in the order of the first metric."""
    front = table.pareto(x, y)
    places = [table.places(front, name) for name in (x, y)]
    return [part for _, part in front.groupby(places, sort=False)]


def front_of(table: Table) -> tuple[str, str] | None:
    """Return the two metrics for the most informative Pareto front of this study, or None if no two are known."""
    return next((pair for pair in _FRONTS if is_known(table, *pair)), None)
