"""A study as one HTML file that needs nothing else: answer, pictures, sortable tables, the manifest of every run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.output_files import write_text
from ddlsim.printable import shown
from ddlsim.readable import count
from ddlsim.report.html_pictures import pictures
from ddlsim.report.study_changes import Change, cost_line, ranked_changes
from ddlsim.report.study_tables import configurations, manifests_of, reasons, runs
from ddlsim.report.study_words import (
    Answer,
    answers,
    equal_in_front,
    front_of,
    label_of,
    main_metric,
    plain,
    task_fields,
    task_of,
    tasks,
    varied,
)
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.study import Study
    from ddlsim.study.table import Table

_TEMPLATES = Path(__file__).parent / "templates"
#: values of a field, members of the Pareto front, and changes that are named at the top
N_VALUES = 12
N_FRONT = 12
N_CHANGES = 12
#: tasks (models, data sets) that have pictures
N_TASKS = 4


@dataclass(frozen=True)
class Found:
    """What a study says about one task: the best, what changes give, what is best in what, and the front.

    ranked_by, at  by which metric changes are looked at, at which configuration
    front     (row, the two values, how many others are equal) of each place
    in_front  rows of all that are on it
    """

    name: str
    best: str
    ranked_by: str
    at: str
    changes: Sequence[Change]
    n_changes_more: int
    answers: Sequence[Answer]
    front_of: Sequence[str]
    front: Sequence[tuple[int, str, str]]
    n_front_more: int
    in_front: Sequence[int]


def save_html(
    table: Table,
    path: str | Path,
    *,
    title: str = "",
    question: str = "",
    metric: str = "",
    sensitivities: Sequence[Sensitivity] = (),
) -> None:
    """Write the report of a study to an HTML file; see :func:`html_report`.

    Raises ConfigError if the file cannot be written.
    """
    text = html_report(table, title=title, question=question, metric=metric, sensitivities=sensitivities)
    write_text(path, text)


def sensitivities_of_best(study: Study, table: Table, metric: str = "") -> list[Sensitivity]:
    """Return what would help the best configuration in the `table` of a study, by some runs of its first seed; where
    models or data sets are compared, the best one of the first.

    Empty where nothing has been simulated. Raises ConfigError if the table is not one of this study, and for a metric
    that no configuration has.
    """
    from ddlsim.run.sensitivity import sensitivities

    points = {point.key: point for point in study.points}
    if any(member.key not in points for member in table.members):
        raise ConfigError(
            "the table is that of another study (or of another version of ddlsim, or of a cluster or model that has "
            "been edited since); run this one"
        )
    if not len(table.summary):
        return []
    _, first = tasks(table)[0]  # of one task: between others nothing is the best
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

    title, question  at the top; by default what is varied
    metric           by which configurations are ranked (default: the time to the target accuracy where there is one,
                     the accuracy of runs that learn, else throughput)
    sensitivities    of the best configuration (:meth:`ddlsim.Result.sensitivities`)

    Raises ConfigError for a metric that no configuration has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    summary, fields = table.summary, varied(table)
    if metric and len(summary):
        table.known(metric)  # refuses one that there is not
    metric = metric or main_metric(table)
    names = [label_of(row, fields) for _, row in summary.iterrows()]
    parts = tasks(table)
    of_task = [task_of(row, task_fields(table)) for _, row in summary.iterrows()]
    rows = {name: [i for i, task in enumerate(of_task) if task == name] for name, _ in parts}
    found = [_found(name, part, rows[name], metric, question) for name, part in parts]
    front = [row for each in found for row in each.in_front]
    drawn = [
        picture
        for i, ((name, part), each) in enumerate(zip(parts[:N_TASKS], found, strict=False))
        for picture in pictures(part, metric, sensitivities if i == 0 else (), each.best, name)
    ]
    manifests = manifests_of(table)
    return environment.get_template("report.html").render(
        title=title or _title(manifests.common),
        question=question or _question(table, fields),
        version=ddlsim.__version__,
        found=found,
        names=names,
        n_tasks_undrawn=max(0, len(parts) - N_TASKS),
        cost=cost_line(table),
        counts={status: n for status, n in table.counts.items() if n},
        n_points=count(len(table.members), "point"),
        n_seeds=len({member.seed for member in table.members}),
        interrupted=table.interrupted,
        varied=_varied_values(table, table.axes),
        pictures=drawn,
        configurations=configurations(table, front),
        runs=runs(table, manifests),
        common=manifests.common,
        reasons=reasons(table),
        remarks=[(kind, _remarks(table, kind)) for kind in ("warnings", "notes")],
    )


def _shown(value: object) -> object:
    """Return a text with its control characters written out; what is HTML already is left as it is."""
    return shown(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _found(name: str, table: Table, rows: Sequence[int], metric: str, question: str) -> Found:
    """Return what the part of a study that trains one task says; `rows` are its rows in the whole summary."""
    ranked_by, given = ranked_changes(table, metric, question)
    try:
        best, at = (label_of(table.best(by).iloc[0], varied(table)) for by in (metric, ranked_by))
    except ConfigError:  # nothing of it has been simulated
        best = at = ""
    best_of = [dataclasses.replace(answer, row=rows[answer.row]) for answer in answers(table)]
    axes = front_of(table)
    groups = equal_in_front(table, *axes) if axes is not None else []
    front = []
    for group in groups[:N_FRONT]:
        values = ", ".join(METRICS[axis].write(float(group[axis].iloc[0])) for axis in axes or ())
        equal = f"and {count(len(group) - 1, 'other')} equal" if len(group) > 1 else ""
        front.append((rows[int(group.index[0])], values, equal))
    in_front = [rows[int(i)] for group in groups for i in group.index]
    return Found(
        name, best, METRICS[ranked_by].heading, at, given[:N_CHANGES], max(0, len(given) - N_CHANGES), best_of,
        [METRICS[axis].heading for axis in axes or ()], front, max(0, len(groups) - N_FRONT), in_front,
    )  # fmt: skip


def _title(common: Mapping[str, str]) -> str:
    """Return the model and the cluster, as far as all runs have the same."""
    model, cluster = (json.loads(common.get(f"{name}.name", '""')) for name in ("model", "cluster"))
    return " ".join(filter(None, ["Study of", model or "training", cluster and f"on {cluster}"]))


def _question(table: Table, fields: Sequence[str]) -> str:
    what = " and ".join(filter(None, [", ".join(fields[:-1]), *fields[-1:]]))
    learns = "accuracy" in table.summary
    effect = "how fast the model trains and how well it learns" if learns else "how fast the model trains"
    return f"What do {what} make of {effect}?" if fields else f"{effect.capitalize()}?"


def _varied_values(table: Table, fields: Sequence[str]) -> list[tuple[str, list[str], int]]:
    """Return each varied field, its first values, and how many more there are."""
    found = []
    for field in fields:
        values = list(dict.fromkeys(plain(member.settings[field]) for member in table.members))
        found.append((field, values[:N_VALUES], max(0, len(values) - N_VALUES)))
    return found


def _remarks(table: Table, kind: str) -> list[tuple[str, int]]:
    """Return the different notes or warnings of all runs, and how many runs have each."""
    texts = [text for member in table.members if member.key in table.outcomes
             for text in _texts(table.outcomes[member.key].record.get(kind))]  # fmt: skip
    return [(text, texts.count(text)) for text in dict.fromkeys(texts)]


def _texts(found: object) -> list[str]:
    return [str(text) for text in found] if isinstance(found, list | tuple) else []
