"""Comparison of training runs: time, updates and bytes to a target accuracy, and final accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ddlsim.arguments import Share, checked
from ddlsim.errors import ConfigError
from ddlsim.learning.monitor import Row, first_reaching
from ddlsim.readable import percent, seconds, size
from ddlsim.run.metrics import METRICS
from ddlsim.run.result import Result
from ddlsim.run.seeds import SeedRun, Seeds, interval_of
from ddlsim.text_tables import aligned

if TYPE_CHECKING:
    from ddlsim.run.seeds import Interval


@dataclass(frozen=True, eq=False)
class Comparison:
    """Result of :func:`ddlsim.compare`; print it, or use the numbers in ``table``.

    table      data frame with a row per run: n_seeds, n_reached (seeds that reached the target), time (s), updates and
               nbytes to the target, final accuracy and loss, throughput (samples/s), staleness. The values to the
               target are means. If some seeds missed it, they are medians, with those seeds last (inf if half of the
               seeds or more missed it)
    target     target accuracy
    intervals  interval of the time by label, for runs with several seeds
    """

    table: pd.DataFrame
    target: float
    intervals: Mapping[str, Interval]

    def __str__(self) -> str:
        return "\n".join(aligned(self._cells(), left=(0,)))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, page

        return page(f"Time to {percent(self.target)} accuracy", grid(self._cells(), left=(0,)))

    def _cells(self) -> list[tuple[str, ...]]:
        until = f"time to {percent(self.target)}"
        rows: list[tuple[str, ...]] = [("run", until, "updates", "bytes sent", "accuracy", "throughput", "staleness")]
        for name, row in self.table.iterrows():
            accuracy, throughput = (METRICS[metric].write(row[metric]) for metric in ("accuracy", "throughput"))
            until_then = self._reached(str(name), row)
            rows.append((str(name), *until_then, accuracy, throughput, f"{row['staleness']:.3g}"))
        return rows

    def _reached(self, name: str, row: pd.Series[float]) -> tuple[str, str, str]:
        if not row["n_reached"]:
            return "never", "-", "-"
        interval = self.intervals.get(name)
        if interval is not None and interval.n_missed:
            seeds = f"{interval.n} of {interval.n + interval.n_missed} seeds"
            if math.isinf(row["time"]):
                return f"mean at least {seconds(interval.mean)}, {seeds}", "-", "-"
            time = f"median {seconds(row['time'])}, {seeds}"
        else:
            time = seconds(row["time"])
            if interval is not None and not math.isnan(interval.low):
                time += f" ({seconds(interval.low)} to {seconds(interval.high)})"
        return time, f"{row['updates']:,.0f}", size(row["nbytes"])


@checked
def compare(results: Mapping[str, Result | Seeds], target: Share) -> Comparison:
    """Compare the times that training runs take to reach a target accuracy.

    results  mapping from labels to runs, with one seed (:class:`ddlsim.Result`) or several (:class:`ddlsim.Seeds`)
    target   held-out accuracy to reach, such as 0.95

    For runs with several seeds, means and their 95 % intervals are compared. If some of the seeds missed the target,
    the time is the median over all seeds (:class:`ddlsim.run.seeds.Interval`). Raises ConfigError for timing-only runs.
    """
    if not 0.0 < target <= 1.0:
        raise ConfigError(f"target = {target!r}: must be above 0 and at most 1 (0.95 is 95 %)")
    if not results:
        raise ConfigError("compare: results is empty; pass at least one run")
    rows = {name: _row(result, target) for name, result in results.items()}
    intervals = {name: r.time_to_accuracy(target) for name, r in results.items() if isinstance(r, Seeds)}
    return Comparison(pd.DataFrame.from_dict(rows, orient="index"), target, intervals)


def _row(result: Result | Seeds, target: float) -> dict[str, float]:
    training = result.experiment.training
    if training is None:
        raise ConfigError("compare: a run is timing-only; set training=ddlsim.Training(...) for every run")
    runs: Sequence[Result | SeedRun] = result.runs if isinstance(result, Seeds) else [result]
    histories: list[Sequence[Row]] = [run.evaluations if isinstance(run, Result) else run.history for run in runs]
    reached = [first_reaching(history, target, training.moving_average) for history in histories]
    return {
        "n_seeds": len(histories),
        "n_reached": sum(row is not None for row in reached),
        **{
            name: interval_of([math.inf if row is None else getattr(row, name) for row in reached], 0.95).typical
            for name in ("time", "updates", "nbytes")
        },
        "accuracy": result.accuracy().mean if isinstance(result, Seeds) else result.accuracy,
        "loss": float(np.mean([history[-1].loss for history in histories])),
        "throughput": float(np.mean([run.throughput for run in runs])),
        "staleness": float(np.mean([run.mean_staleness for run in runs])),
    }
