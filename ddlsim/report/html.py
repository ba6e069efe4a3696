"""A study as one HTML file that needs nothing else: answer, pictures, sortable tables, the manifest of every run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.output_files import write_text
from ddlsim.printable import shown
from ddlsim.readable import count
from ddlsim.report.html_pictures import pictures
from ddlsim.report.study_tables import configurations, manifests_of, reasons, runs
from ddlsim.report.study_words import answers, front_of, label_of, plain, varied
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.study import Study
    from ddlsim.study.table import Table

_TEMPLATES = Path(__file__).parent / "templates"
#: values of a field, and members of the Pareto front, that are named at the top
N_VALUES = 12
N_FRONT = 12


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
    """Return what would help the best configuration in the `table` of a study, by some runs of its first seed.

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
    best = table.best(metric or _main_metric(table)).iloc[0]
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
    metric = metric or _main_metric(table)
    names = [label_of(row, fields) for _, row in summary.iterrows()]
    axes = front_of(table)
    front = table.pareto(*axes).index.tolist() if axes is not None else []
    best = label_of(table.best(metric).iloc[0], fields) if len(summary) else ""
    manifests = manifests_of(table)
    return environment.get_template("report.html").render(
        title=title or _title(manifests.common),
        question=question or _question(table, fields),
        version=ddlsim.__version__,
        answers=answers(table),
        names=names,
        front=front[:N_FRONT],
        n_front_more=max(0, len(front) - N_FRONT),
        front_of=[METRICS[name].heading for name in axes or ()],
        front_values=[
            ", ".join(METRICS[name].write(float(summary[name].loc[i])) for name in axes or ()) for i in front[:N_FRONT]
        ],
        counts={status: n for status, n in table.counts.items() if n},
        n_points=count(len(table.members), "point"),
        n_seeds=len({member.seed for member in table.members}),
        interrupted=table.interrupted,
        varied=_varied_values(table, table.axes),
        pictures=pictures(table, metric, sensitivities, best),
        configurations=configurations(table, front),
        runs=runs(table, manifests),
        common=manifests.common,
        reasons=reasons(table),
        remarks=[(kind, _remarks(table, kind)) for kind in ("warnings", "notes")],
    )


def _shown(value: object) -> object:
    """Return a text with its control characters written out; what is HTML already is left as it is."""
    return shown(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _main_metric(table: Table) -> str:
    for metric in ("time_to_accuracy", "accuracy"):
        try:
            table.known(metric)
        except ConfigError:
            continue
        return metric
    return "throughput"


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
