"""Learning curves: accuracy and loss of one or more runs, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.run.result import Result
from ddlsim.run.seeds import AXES, Seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

#: (minimum value for this unit, its size, its name)
_UNITS: dict[str, Sequence[tuple[float, float, str]]] = {
    "time": ((2.0 * 86400.0, 86400.0, "days"), (2.0 * 3600.0, 3600.0, "h"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms")),
    "nbytes": ((1e12, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0.0, 1e3, "kB")),
    "updates": ((0.0, 1.0, ""),),
    "epoch": ((0.0, 1.0, ""),),
}
_NAMES = {"time": "simulated time", "updates": "updates", "epoch": "epochs", "nbytes": "bytes sent"}


@checked
def plot_learning(
    results: Mapping[str, Result | Seeds] | Result | Seeds, path: str | Path | None = None, *, x: str = "time"
) -> tuple[Axes, Axes]:
    """Plot the held-out accuracy and the loss of training runs, and return the two axes.

    results  a run, or a mapping from labels to runs, with one seed (:class:`ddlsim.Result`) or several
             (:class:`ddlsim.Seeds`, plotted as the mean with a band for its 95 % interval). The plot of a single run
             also shows the training loss
    path     file to which the figure is written; None: no file
    x        quantity on the horizontal axis: "time", "updates", "epoch" or "nbytes" (total bytes sent)

    Raises ConfigError for an unknown `x`, for empty `results`, and if the file cannot be written.
    """
    from ddlsim.report.drawing import DOTTED, figure, saved, titled, within_percent

    if x not in AXES:
        raise unknown_name("x", x, AXES)
    series = results if isinstance(results, Mapping) else {results.experiment.strategy.label: results}
    if not series:
        raise ConfigError("plot_learning: results is empty; pass at least one run")
    curves = {label: _curves(result, x) for label, result in series.items()}
    largest = max(float(curve.index.max()) for history in curves.values() for curve in history.values() if len(curve))
    scale, unit = next((size, name) for least, size, name in _UNITS[x] if largest >= least)
    fig = figure(9.0, 3.8)
    left, right = fig.subplots(1, 2)
    for i, (label, history) in enumerate(curves.items()):
        _line(left, 100.0 * history["accuracy"], scale, i, label)
        _line(right, history["loss"], scale, i, "held-out samples" if len(curves) == 1 else label)
        if len(curves) == 1:
            _line(right, history["train_loss"], scale, i + 1, "training batches")
    targets = {r.experiment.training.target_accuracy for r in series.values() if r.experiment.training is not None}
    for target in targets - {None}:
        left.axhline(100.0 * float(target or 0.0), **DOTTED)
    for axes in (left, right):
        axes.set_xlabel(f"{_NAMES[x]} ({unit})" if unit else _NAMES[x])
        axes.set_xlim(left=0.0)
        axes.grid(alpha=0.3)
    left.set_ylabel("held-out accuracy (%)")
    within_percent(left)
    right.set_ylabel("loss on held-out samples" if len(curves) > 1 else "loss")
    right.set_ylim(bottom=0.0)
    right.legend(fontsize=8)
    titled(fig, _title(series))
    return saved(left, path), right


def _curves(result: Result | Seeds, x: str) -> dict[str, pd.DataFrame]:
    """Return mean and upper end of accuracy and losses over `x`; only the mean for one seed."""
    columns = ("accuracy", "loss", "train_loss")
    if isinstance(result, Seeds):
        return {column: result.curve(column, x) for column in columns}
    history = result.history.set_index(x)
    return {column: history[[column]].dropna().rename(columns={column: "mean"}) for column in columns}


def _line(axes: Axes, curve: pd.DataFrame, scale: float, number: int, label: str) -> None:
    from ddlsim.report.drawing import learning_curve, wrapped

    at, mean = curve.index.to_numpy(dtype=float) / scale, curve["mean"].to_numpy()
    half = curve["high"].to_numpy() - mean if "high" in curve else np.full(len(mean), math.nan)
    learning_curve(axes, number, wrapped(label, 34), at, mean, half, linewidth=1.4)


def _title(series: Mapping[str, Result | Seeds]) -> str:
    """Return the common model and cluster of all runs, and the number of seeds."""
    titles = []
    for result in series.values():
        fields = result.experiment.manifest()
        title = f"{fields['model']}, batch {fields['batch_size']} per worker, on {fields['cluster']}"
        if fields["time_model"] is not None:
            title += f" (clock of {fields['time_model']})"
        titles.append(title)
    counts = {len(result.runs) for result in series.values() if isinstance(result, Seeds)}
    seeds = f"; mean of {counts.pop()} seeds, 95 % interval" if len(counts) == 1 else ""
    prefix = f"{next(iter(series))}: " if len(series) == 1 else ""
    return prefix + (titles[0] if len(set(titles)) == 1 else "") + seeds
