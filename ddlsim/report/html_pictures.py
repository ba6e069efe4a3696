"""The pictures of a report: which ones say something about a study, as SVG inside the page."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from ddlsim.errors import ConfigError
from ddlsim.report.study_figures import N_CELLS, N_LINES, breakdown, heat_map, learning, one_change, tornado
from ddlsim.report.study_plots import pareto, scaling
from ddlsim.report.study_samples import scatter
from ddlsim.report.study_words import front_of, plain, varied
from ddlsim.run.metrics import METRICS

if TYPE_CHECKING:
    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.study.table import Table

#: bars of a breakdown; more make a picture that no screen shows whole
N_BARS = 12


@dataclass(frozen=True)
class Picture:
    """A picture: its title, what it shows in a sentence, its data URI, and its width in CSS pixels."""

    title: str
    caption: str
    uri: str
    width: int


def pictures(
    table: Table, metric: str, sensitivities: Sequence[Sensitivity], best: str, task: str = ""
) -> list[Picture]:
    """Return the pictures that this study has something to show in.

    metric         by which configurations are ranked
    sensitivities  of the best configuration, which is called `best`; may be empty
    task           what is trained, where a study compares several and this is the part of one of them
    """
    try:
        table.known(metric)
    except ConfigError:  # nothing of it has ended
        return []
    found = _all(table, metric, sensitivities, best)
    return [dataclasses.replace(each, title=f"{task}: {each.title}") for each in found] if task else found


def _all(table: Table, metric: str, sensitivities: Sequence[Sensitivity], best: str) -> list[Picture]:
    found = [*_scaling(table, metric), *_heat_maps(table, metric)]
    front = front_of(table)
    if front is not None and len(table.known(*front)) > 1:
        x, y = (METRICS[name].heading for name in front)
        caption = f"Every configuration by {x} and {y}; the dashed line joins those that no other one beats in both."
        found.append(_picture(f"{x.capitalize()} against {y}", caption, pareto(table, *front)))
    found += _samples(table, metric)
    which = "Every configuration" if len(table.known(metric)) <= N_BARS else f"The {N_BARS} best configurations"
    caption = f"{which} by {METRICS[metric].heading}, the best on top, and where the time of their workers went."
    found.append(_picture("Where the time goes", caption, breakdown(table, metric=metric, n=N_BARS)))
    found += _one_change(table, metric)
    if sensitivities:
        caption = f"The best configuration ({best}) simulated again with one part of it better by a tenth."
        found.append(_picture("What would help", caption, tornado(sensitivities)))
    if not table.history.empty:
        caption = f"Accuracy of the best configurations ({N_LINES} at most); bands are 95 % intervals over seeds."
        found.append(_picture("Learning curves", caption, learning(table)))
    return found


def _scaling(table: Table, metric: str) -> Iterator[Picture]:
    if table.summary["n_workers"].nunique() < 2:
        return
    few, fixed = _few_lines(table, metric)
    if few.summary["n_workers"].nunique() < 2:
        return
    where = f" Of the other fields the best values: {fixed}." if fixed else ""
    for name in ("throughput", "efficiency"):
        heading = METRICS[name].heading
        caption = f"{heading.capitalize()} over the number of workers; bars are 95 % intervals over seeds.{where}"
        yield _picture(f"Scaling: {heading}", caption, scaling(few, metric=name))


def _few_lines(table: Table, metric: str) -> tuple[Table, str]:
    """Return the part of a study that has few enough lines, and what is fixed in it: fields that matter least."""
    best, n_lines, fixed = table.best(metric).iloc[0], 1, {}
    for field in _by_spread(table, metric):
        n_values = len({plain(member.settings[field]) for member in table.members})
        if field == "workers":
            continue
        if n_lines * n_values <= N_LINES:
            n_lines *= n_values
        else:
            fixed[field] = best[field]
    members = [m for m in table.members if all(m.settings[field] == value for field, value in fixed.items())]
    words = ", ".join(f"{field} {plain(value)}" for field, value in fixed.items())
    return dataclasses.replace(table, members=members), words


def _by_spread(table: Table, metric: str) -> list[str]:
    """Return the varied fields, first the one between whose values the best of a metric differs most."""
    ranked = table.best(metric, n=len(table.members))  # the first row of each value is its best
    spread: dict[str, float] = {}
    for field in varied(table):
        tops = ranked.groupby(field, sort=False)[metric].first().to_numpy(np.float64)
        low, high = float(tops.min()), float(tops.max())
        spread[field] = math.log(high / low) if low > 0.0 else high - low
    return sorted(spread, key=lambda field: -spread[field])


def _heat_maps(table: Table, metric: str) -> Iterator[Picture]:
    """Yield heat maps over the two fields that matter most; those with many values (samples) have none."""
    for name in dict.fromkeys(("efficiency", metric)):
        fields = [
            field for field in _by_spread(table, name)
            if len({plain(member.settings[field]) for member in table.members}) <= N_CELLS
        ][:2]  # fmt: skip
        if len(fields) == 2:
            x, y = sorted(fields, key=lambda field: field != "workers")
            heading = METRICS[name].heading
            caption = f"The fields that make most of {heading}; where others vary too, the best of each cell."
            yield _picture(f"{heading.capitalize()} by {x} and {y}", caption, heat_map(table, x, y, metric=name))


def _samples(table: Table, metric: str) -> list[Picture]:
    """Return the scatter plots of a study whose values were drawn: fields with more values than a heat map shows."""
    summary = table.summary
    if not any(summary[field].map(plain).nunique() > N_CELLS for field in varied(table)):
        return []
    heading = METRICS[metric].heading
    caption = (
        f"Every configuration, {heading} over each field; rho is Spearman's rank correlation, the field that orders "
        "the configurations most comes first."
    )
    return [_picture(f"{heading.capitalize()} over each field", caption, scatter(table, metric=metric))]


def _one_change(table: Table, metric: str) -> list[Picture]:
    try:
        axes = one_change(table, metric=metric)
    except ConfigError:  # a sample: no two configurations differ in one field only
        return []
    caption = f"What {METRICS[metric].heading} becomes if only one field of the best configuration takes other values."
    return [_picture("One change to the best", caption, axes)]


def _picture(title: str, caption: str, axes: Axes) -> Picture:
    """Return what has been drawn, the same bytes for the same drawing."""
    made = axes.get_figure(root=True)
    assert made is not None
    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ddlsim"}):
        made.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = base64.b64encode(out.getvalue()).decode("ascii")
    return Picture(title, caption, f"data:image/svg+xml;base64,{text}", round(96.0 * made.get_figwidth()))
