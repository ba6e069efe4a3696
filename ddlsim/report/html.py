"""Reports of studies as self-contained HTML files: answer, figures, sortable tables, the manifest of every run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.plain import flattened
from ddlsim.printable import shown
from ddlsim.readable import count, percent, seconds
from ddlsim.report import study_labels as labels
from ddlsim.report.study_figures import pictures
from ddlsim.report.study_labels import Answer, Change, label_of, main_metric, plain, tasks, varied
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.study import Study
    from ddlsim.study.table import Table


#: columns of :data:`ddlsim.run.metrics.METRICS` that describe single runs and are omitted from means over seeds
_OF_RUNS = ("speedup", "loss", "updates", "epochs", "simulated_time", "energy", "n_messages")
#: columns that are omitted if they are 0 everywhere
_OFTEN_ZERO = ("mean_staleness", "idle_share", "waiting_share")
#: maximum number of configurations named per reason; the table of runs lists all
N_NAMED = 6


@dataclass(frozen=True)
class Heading:
    """A column: its label, and whether the largest value comes first when sorted."""

    text: str
    is_number: bool
    largest_first: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell's text, the number to sort by ("": none, sorted last; None: the text), and a remark."""

    text: str
    sort: str | None = None
    remark: str = ""
    is_number: bool = True


@dataclass(frozen=True)
class Row:
    """A row: its number from 1 on, its cells, whether it is on the Pareto front, and its manifest."""

    number: int
    cells: Sequence[Cell]
    in_front: bool = False
    manifest: Mapping[str, str] = field(default_factory=dict)


def configurations(table: Table, front: Sequence[int]) -> tuple[list[Heading], list[Row]]:
    """Return a row per simulated configuration, with means over seeds and their 95 % intervals.

    front  rows of the summary that are on the Pareto front
    """
    summary = table.summary
    about = varied(table)
    about += [] if "workers" in about else ["n_workers"]
    metrics = [name for name in METRICS if name not in _OF_RUNS and _is_worth(summary, name)]
    headings = [_about_heading(table, name) for name in about] + [_heading(name) for name in metrics]
    rows = []
    for i, (index, row) in enumerate(summary.iterrows()):
        cells = [_about(table, name, row[name]) for name in about] + [_mean(row, name) for name in metrics]
        rows.append(Row(i + 1, cells, in_front=index in front))
    return headings, rows


def runs(table: Table, manifests: Mapping[str, Mapping[str, str]]) -> tuple[list[Heading], list[Row]]:
    """Return a row for each point of the study, with its manifest, whose key is that of the point."""
    frame = table.frame
    metrics = [name for name in METRICS if _is_worth(frame, name) and not name.endswith("_share")]
    about = [*varied(table), "seed"]
    headings = [_about_heading(table, name) for name in about]
    headings += [Heading("status", False), *[_heading(name) for name in metrics], Heading("took", True)]
    rows = []
    for i, (member, (_, row)) in enumerate(zip(table.members, frame.iterrows(), strict=True)):
        outcome = table.outcomes.get(member.key)
        took = Cell("–", "") if outcome is None else Cell(seconds(outcome.seconds), repr(outcome.seconds))
        cells = [_about(table, name, row[name]) for name in about]
        cells += [Cell(str(row["status"]), is_number=False), *[_number(row[name], name) for name in metrics], took]
        rows.append(Row(i + 1, cells, manifest=manifests[member.key]))
    return headings, rows


def reasons(table: Table) -> list[tuple[str, int, str, list[str]]]:
    """Return status, number of points, reason and configurations of points that were skipped or have failed, failures
    first, the most frequent reason first."""
    frame, fields = table.frame, varied(table)
    groups = []
    for status in ("failed", "skipped", "missing"):
        rows = frame[frame["status"] == status]
        by_error = sorted(rows.groupby("error", sort=False), key=lambda item: -len(item[1]))
        for error, part in by_error:
            named = list(dict.fromkeys(label_of(row, fields) for _, row in part.iterrows()))
            groups.append((status, len(part), str(error), named))
    return groups


def manifests_of(table: Table) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the values that all runs of a study share, and the others by key of the point: dotted field -> JSON.

    For points without a stored experiment, the manifest has only the settings and the seed.
    """
    leaves: dict[str, dict[str, str]] = {}
    for member in table.members:
        settings = {**member.settings, "seed": member.seed}
        text = table.experiments.get(member.key)
        fields = json.loads(text) if text else None
        flat = flattened(fields if isinstance(fields, dict) else settings)
        leaves[member.key] = {path: json.dumps(value, ensure_ascii=False) for path, value in flat.items()}
    first = next(iter(leaves.values()), {})
    shared = {path: value for path, value in first.items() if all(run.get(path) == value for run in leaves.values())}
    differing = {
        key: {path: value for path, value in values.items() if path not in shared} | {"key": json.dumps(key)}
        for key, values in leaves.items()
    }
    return shared, differing


def _is_worth(rows: pd.DataFrame, name: str) -> bool:
    """Return whether a column exists and contains numbers."""
    if name not in rows:
        return False
    values = rows[name].to_numpy(np.float64)
    return not np.isnan(values).all() and not (name in _OFTEN_ZERO and (np.nan_to_num(values) == 0.0).all())


def _heading(metric: str) -> Heading:
    return Heading(METRICS[metric].heading, True, METRICS[metric].larger_is_better)


def _about_heading(table: Table, name: str) -> Heading:
    return Heading("workers" if name == "n_workers" else name, _is_numbers(table, name))


def _is_numbers(table: Table, name: str) -> bool:
    if name not in table.axes:  # n_workers, seed
        return True
    values = [member.settings[name] for member in table.members]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _about(table: Table, name: str, value: object) -> Cell:
    """Return the cell of a varied field; values that are not numbers ("25 Gbit/s") are sorted in design order."""
    text = plain(value)
    if _is_numbers(table, name):
        return Cell(text, str(value))
    return Cell(text, str(labels.values_of(table, name).index(text)), is_number=text[:1].isdigit())


def _number(value: float, metric: str) -> Cell:
    if math.isnan(value):
        return Cell("–", "")
    return Cell("never", "") if math.isinf(value) else Cell(METRICS[metric].write(value), repr(float(value)))


def _mean(row: pd.Series[float], metric: str) -> Cell:
    """Return a mean over seeds, and half the width of its interval as a share of it."""
    cell = _number(row[metric], metric)
    if math.isinf(row[metric]) and row["n"] > 1:
        return Cell("not by every seed", "")
    half = float(row[f"{metric}_high"]) - float(row[metric])
    if not math.isfinite(half) or half == 0.0 or not row[metric] or METRICS[metric].kind == "stability":
        return cell
    remark = f"± {percent(half / abs(float(row[metric])))}"
    if metric.endswith("_share") or metric in ("efficiency", "accuracy"):
        remark = f"± {100.0 * half:.1f} points"  # a share of a share would be misleading
    return Cell(cell.text, cell.sort, remark)


_TEMPLATES = Path(__file__).parent / "templates"
#: maximum numbers of values per field, members of the Pareto front, and changes in the summary
N_LISTED = 12
#: maximum number of tasks (models, data sets) with figures
N_TASKS = 4


@dataclass(frozen=True)
class Findings:
    """Findings for one task: best configuration, effects of changes, best by each metric, and the Pareto front.

    ranked_by, at  metric by which changes are ranked, and the configuration that they start from
    front_of  the two metrics of the Pareto front
    front     rows, the two values, and number of other equal ones, per position
    """

    name: str
    best: str
    ranked_by: str
    at: str
    changes: Sequence[Change]
    answers: Sequence[Answer]
    front_of: Sequence[str]
    front: Sequence[tuple[list[int], str, str]]


def sensitivities_of_best(study: Study, table: Table, metric: str = "") -> list[Sensitivity]:
    """Return the sensitivities of the best configuration in the `table` of a study, from some runs with its first seed.
    If a study compares models or data sets, the best configuration of the first is used.

    Empty if nothing was simulated. Raises ConfigError if the table belongs to another study, and for a metric that no
    configuration has.
    """
    from ddlsim.run.sensitivity import sensitivities

    points = {point.key: point for point in study.points}
    if any(member.key not in points for member in table.members):
        raise ConfigError(
            "the table belongs to another study, another version of ddlsim, or a cluster or model that has changed "
            "since; run the study again"
        )
    if not len(table.summary):
        return []
    _, first = tasks(table)[0]  # configurations of different tasks are not comparable
    best = first.best(metric or main_metric(table)).iloc[0]
    for point in points.values():
        if point.experiment is not None and all(best[axis] == value for axis, value in point.settings.items()):
            return sensitivities(point.experiment)
    return []


def html_report(
    table: Table,
    *,
    title: str = "",
    question: str = "",
    metric: str = "",
    sensitivities: Sequence[Sensitivity] = (),
) -> str:
    """Return the report of a study as HTML, the same text for the same study.

    title, question  heading; by default, the varied fields
    metric           metric that ranks configurations (default: the time to the target accuracy if there is one, the
                     accuracy of training runs, else throughput)
    sensitivities    of the best configuration (:meth:`ddlsim.Result.sensitivities`)

    Raises ConfigError for a metric that no configuration has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    blocks: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}

    def escaped(value: object) -> object:  # HTML is returned unchanged
        return shown(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, finalize=escaped, **blocks)
    summary, fields = table.summary, varied(table)
    if metric and len(summary):
        table.known(metric)  # raises for an unknown metric
    metric = metric or main_metric(table)
    names = [label_of(row, fields) for _, row in summary.iterrows()]
    parts = tasks(table)
    of_task = [labels.task_of(row, labels.task_fields(table)) for _, row in summary.iterrows()]
    rows = {name: [i for i, task in enumerate(of_task) if task == name] for name, _ in parts}
    findings = [_findings(name, part, rows[name], metric, question) for name, part in parts]
    in_front = [row for finding in findings for group, *_ in finding.front for row in group]
    drawn = [
        dataclasses.replace(picture, title=f"{name}: {picture.title}" if name else picture.title)
        for i, ((name, part), finding) in enumerate(zip(parts[:N_TASKS], findings, strict=False))
        for picture in pictures(part, metric, sensitivities if i == 0 else (), finding.best)
    ]
    common, differing = manifests_of(table)
    return environment.get_template("report.html").render(
        title=title or _title(common),
        question=question or _question(table, fields),
        version=ddlsim.__version__,
        findings=findings,
        names=names,
        n_tasks_undrawn=max(0, len(parts) - N_TASKS),
        cost=labels.cost_line(table),
        counts={status: n for status, n in table.counts.items() if n},
        n_points=count(len(table.members), "point"),
        n_seeds=len({member.seed for member in table.members}),
        interrupted=table.interrupted,
        varied={axis: labels.values_of(table, axis) for axis in table.axes},
        n_listed=N_LISTED,
        n_named=N_NAMED,
        pictures=drawn,
        configurations=configurations(table, in_front),
        runs=runs(table, differing),
        common=common,
        reasons=reasons(table),
        remarks=[(kind, _remarks(table, kind)) for kind in ("warnings", "notes")],
    )


def _findings(name: str, table: Table, rows: Sequence[int], metric: str, question: str) -> Findings:
    """Return the findings for the part of a study that trains one task; `rows` are its rows in the whole summary."""
    ranked_by, changes = labels.ranked_changes(table, metric, question)
    try:
        best, at = (label_of(table.best(by).iloc[0], varied(table)) for by in (metric, ranked_by))
    except ConfigError:  # nothing was simulated
        best = at = ""
    best_of = [dataclasses.replace(answer, row=rows[answer.row]) for answer in labels.answers(table)]
    axes = labels.front_of(table)
    front = []
    for group in labels.equal_in_front(table, *axes) if axes is not None else ():
        values = ", ".join(METRICS[axis].write(float(group[axis].iloc[0])) for axis in axes or ())
        equal = f"and {count(len(group) - 1, 'other')} equal" if len(group) > 1 else ""
        front.append(([rows[int(i)] for i in group.index], values, equal))
    headings = [METRICS[axis].heading for axis in axes or ()]
    return Findings(name, best, METRICS[ranked_by].heading, at, changes, best_of, headings, front)


def _title(common: Mapping[str, str]) -> str:
    """Return the model and the cluster, if all runs share them."""
    model, cluster = (json.loads(common.get(f"{name}.name", '""')) for name in ("model", "cluster"))
    return " ".join(filter(None, ["Study of", model or "training", cluster and f"on {cluster}"]))


def _question(table: Table, fields: Sequence[str]) -> str:
    what = " and ".join(filter(None, [", ".join(fields[:-1]), *fields[-1:]]))
    learns = "accuracy" in table.summary
    effect = "training speed and accuracy" if learns else "training speed"
    return f"Effect of {what} on {effect}" if fields else effect.capitalize()


def _remarks(table: Table, kind: str) -> list[tuple[str, int]]:
    """Return the distinct notes or warnings of all runs, with the number of runs of each."""
    texts = [
        text
        for member in table.members
        if member.key in table.outcomes
        for text in labels.texts_of(table.outcomes[member.key].record.get(kind))
    ]
    return list(Counter(texts).items())
