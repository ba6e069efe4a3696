"""Results of a study: a row per point, a row per configuration, and the best configurations."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import ddlsim
from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.extras import needs
from ddlsim.output_files import json_rows, replacing, save_csv, write_text
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import half_width
from ddlsim.study.store import Member, Store
from ddlsim.study.worker import DONE, FAILED, SKIPPED, Outcome
from ddlsim.ties import places

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd
    import xarray


#: maximum number of grid points in a dataset; random samples, whose points share no values, soon exceed it
MAX_CELLS = 1_000_000


Ints = npt.NDArray[np.int64]

#: status of a point that has not been simulated
MISSING = "missing"
#: metrics that all tables contain; others are included if a result has them
OF_RUNS = tuple(name for name, metric in METRICS.items() if metric.kind == "run")
#: the metric that seeds may fail to reach
_TARGET = "time_to_accuracy"
#: confidence level of means over seeds
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Table:
    """The results of a study.

    axes         dotted paths of the varied fields
    members      the points, in the order of the design
    outcomes     mapping from the key of a point to its outcome; points that are not in the mapping have no outcome yet
    interrupted  whether the study was stopped before its end
    experiments  mapping from the key of a point to its experiment as JSON, for the manifests in reports
    objectives   metrics of a search; if there are any, the printed table starts with the best configurations
    """

    axes: Sequence[str]
    members: Sequence[Member]
    outcomes: Mapping[str, Outcome]
    interrupted: bool = False
    experiments: Mapping[str, str] = field(default_factory=dict)
    objectives: Sequence[str] = ()

    @cached_property
    def frame(self) -> pd.DataFrame:
        """DataFrame with one row per point.

        Columns are the varied fields, seed, status ("done", "skipped", "failed", "missing"), the number of workers, the
        metrics of the result (:data:`ddlsim.run.metrics.METRICS`), stop_reason, notes, warnings, and error (the reason
        why the point was skipped or has failed). An unknown number, such as a cost without prices, is NaN. The time to
        a target that was never reached is inf.
        """
        import pandas as pd

        rows = []
        for member in self.members:
            outcome = self.outcomes.get(member.key, Outcome(MISSING))
            record = {name: value for name, value in outcome.record.items() if name != "history"}
            lists = {name: "; ".join(map(str, record.pop(name, ()))) for name in ("notes", "warnings")}  # type: ignore[call-overload]
            about = {"seed": member.seed, "status": outcome.status, "stop_reason": ""}
            rows.append({**member.settings, **about, **record, **lists, "error": outcome.error})
        some = (name for name in METRICS if name not in OF_RUNS)
        numbers = [*OF_RUNS, *(name for name in some if any(name in row for row in rows))]
        texts = ["stop_reason", "notes", "warnings", "error"]
        frame = pd.DataFrame(rows, columns=[*self.axes, "seed", "status", "n_workers", *numbers, *texts])
        frame[numbers] = frame[numbers].astype(np.float64)
        frame["n_workers"] = frame["n_workers"].astype("Int64")
        return frame

    @cached_property
    def history(self) -> pd.DataFrame:
        """DataFrame with one row per evaluation of the training runs.

        Columns are the varied fields, seed, and the columns of :attr:`ddlsim.Result.history`.
        """
        import pandas as pd

        from ddlsim.learning.monitor import Row

        rows = []
        for member in self.members:
            record = self.outcomes[member.key].record if member.key in self.outcomes else {}
            evaluations: Any = record.get("history", ())
            rows += [[*member.settings.values(), member.seed, *row] for row in evaluations]
        return pd.DataFrame(rows, columns=[*self.axes, "seed", *Row._fields])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """DataFrame with one row per simulated configuration.

        Columns are the varied fields, the number of workers, and the number of seeds `n`. For each metric, the columns
        metric, metric_low and metric_high contain the mean over seeds with its 95 % interval by Student's t (NaN for a
        single seed). If some seeds missed a target, the metric is the median instead, in which these seeds count as
        later than all others, and ``n_reached`` is the number of seeds that reached the target.
        """
        import pandas as pd

        frame = self.frame
        metrics = [name for name in METRICS if name in frame]
        rows = []
        for start in range(0, len(frame), self._n_seeds):  # the seeds of a configuration are consecutive
            part = frame.iloc[start : start + self._n_seeds]
            part = part[part["status"] == DONE]
            if len(part):
                about = {axis: part[axis].iloc[0] for axis in (*self.axes, "n_workers")}
                reached = np.isfinite(part[_TARGET]).sum() if _TARGET in metrics else len(part)
                rows.append({**about, "n": len(part), "n_reached": reached, **_means(part[metrics])})
        columns = [f"{name}{end}" for name in metrics for end in ("", "_low", "_high")]
        counts = ["n", *(["n_reached"] if _TARGET in metrics else [])]
        return pd.DataFrame(rows, columns=[*self.axes, "n_workers", *counts, *columns])

    @property
    def _n_seeds(self) -> int:
        return max(1, len({member.seed for member in self.members}))

    @property
    def counts(self) -> dict[str, int]:
        """Number of points by status."""
        states = Counter(self.outcomes[m.key].status if m.key in self.outcomes else MISSING for m in self.members)
        return {status: states[status] for status in (DONE, SKIPPED, FAILED, MISSING)}

    @property
    def units(self) -> dict[str, str]:
        """Unit of each metric; "" for shares and counts."""
        return {name: metric.unit for name, metric in METRICS.items()}

    @checked
    def best(self, metric: str = "throughput", n: Count = 1) -> pd.DataFrame:
        """Return the `n` configurations with the best mean of a metric, best first, as rows of the summary.

        Higher values are better for throughput, speedup, efficiency, compute_share and accuracy. Lower values are
        better for all other metrics. Ties (see :meth:`places`) stay in the order of the design. Raises ConfigError for
        an unknown metric.
        """
        rows = self.known(metric)
        order = np.argsort(self.places(rows, metric), kind="stable")
        return rows.iloc[order[:n]]

    def places(self, rows: pd.DataFrame, metric: str) -> Ints:
        """Return the rank of each given row of the summary by a metric, shape (n_rows,), with 0 for the best.

        Rows tie and share a rank if their values differ by less than a tolerance. The tolerance is 1e-9 or, for metrics
        of simulated time in a study with ``stability=True``, the larger throughput_spread of the two rows
        (:mod:`ddlsim.ties`).
        """
        sign = -1.0 if METRICS[metric].larger_is_better else 1.0
        spreads = None
        if METRICS[metric].of_clock and "throughput_spread" in rows:
            spreads = np.nan_to_num(rows["throughput_spread"].to_numpy(np.float64)).tolist()
        return np.array(places((sign * rows[metric].to_numpy(np.float64)).tolist(), spreads), dtype=np.int64)

    @checked
    def pareto(self, *metrics: str) -> pd.DataFrame:
        """Return the Pareto-optimal configurations, in the order of the first metric.

        A configuration is Pareto-optimal if no other configuration is better in one of the metrics without being worse
        in another. Configurations are compared by their means over seeds; ties count as equal. Raises ConfigError for
        an unknown metric, or for one that no configuration has, such as a cost without prices.
        """
        if len(metrics) < 2:
            raise ConfigError(f"pareto{metrics!r}: needs at least two metrics, such as 'time_to_accuracy' and 'cost'")
        rows = self.known(*metrics)
        values = np.stack([self.places(rows, name) for name in metrics], axis=1)
        beaten = [bool(((values <= row).all(axis=1) & (values < row).any(axis=1)).any()) for row in values]
        front = rows[~np.array(beaten, dtype=bool)]
        return front.iloc[np.argsort(values[~np.array(beaten, dtype=bool), 0], kind="stable")]

    @checked
    def known(self, *metrics: str) -> pd.DataFrame:
        """Return the rows of the summary in which all these metrics are known and finite.

        Raises ConfigError for an unknown metric, or one that no configuration has.
        """
        summary = self.summary
        for metric in metrics:
            if metric not in METRICS:
                raise unknown_name("metric", metric, METRICS)
            if metric not in summary or not np.isfinite(summary[metric].to_numpy(np.float64)).any():
                remedy = METRICS[metric].remedy
                raise ConfigError(f"no configuration has a known {metric}{remedy}")
        finite = np.isfinite(summary[list(metrics)].to_numpy(np.float64)).all(axis=1)
        return summary.iloc[np.flatnonzero(finite)]

    @checked
    def save(self, path: str | Path) -> None:
        """Write the frame to a file: ``.csv``, ``.parquet`` (requires pyarrow) or ``.json`` (a list of rows).

        In CSV files, strings that a spreadsheet would execute as formulas start with an apostrophe
        (:mod:`ddlsim.output_files`). Raises ConfigError for other formats, and if the file cannot be written.
        """
        path = Path(path)
        if path.suffix == ".csv":
            save_csv(self.frame, path)
        elif path.suffix == ".parquet":
            try:
                with replacing(path) as file:
                    file.write(self.frame.to_parquet(None, index=False))
            except ImportError:
                remedy = "install it with: pip install 'ddlsim[parquet]', or use .csv"
                raise ConfigError(f"{path}: writing Parquet needs pyarrow; {remedy}") from None
        elif path.suffix == ".json":
            write_text(path, json.dumps(json_rows(self.frame), indent=1))
        else:
            raise ConfigError(f"{path}: unknown format {path.suffix!r}; use .csv, .parquet or .json")

    @checked
    def save_html(self, path: str | Path, *, title: str = "", question: str = "", metric: str = "") -> None:
        """Write a report as an HTML file, with the answer, figures, sortable tables and the manifest of every run.

        The arguments are described in :func:`ddlsim.report.html.html_report`. Raises ConfigError for a metric that no
        configuration has, and if the file cannot be written.
        """
        from ddlsim.report.html import html_report

        write_text(path, html_report(self, title=title, question=question, metric=metric))

    def to_xarray(self) -> xarray.Dataset:
        """Return the points as an ``xarray.Dataset`` (install with ``pip install 'ddlsim[xarray]'``).

        Dimensions are the varied fields and ``seed``, and their values are the coordinates. The metrics and
        ``n_workers`` are variables with the attributes ``units`` ("1" for shares and counts) and ``long_name``. Points
        that were not simulated are NaN; the variable ``status`` contains the reason ("skipped", "failed", "missing").
        Raises ConfigError if xarray is missing, and for large random designs, whose points do not form a grid.
        """
        import pandas as pd

        with needs("xarray"):
            import xarray
        frame = self.frame
        dims = [*self.axes, "seed"]
        places, values = zip(*(pd.factorize(frame[name]) for name in dims), strict=True)
        shape = tuple(map(len, values))
        if math.prod(shape) > MAX_CELLS:
            sizes = " x ".join(str(n) for n in shape)
            raise ConfigError(
                f"to_xarray: the array of {sizes} elements for {len(frame)} points exceeds the limit of {MAX_CELLS:,}, "
                "because the points are a sample and not a grid; use table.frame, or table.frame.to_xarray() for one "
                "dimension"
            )
        variables: dict[str, tuple[list[str], object, dict[str, str]]] = {}
        for name in ("n_workers", *(name for name in METRICS if name in frame)):
            array = np.full(shape, np.nan)
            array[places] = frame[name].to_numpy(np.float64, na_value=np.nan)
            metric = METRICS.get(name)
            heading, unit = ("workers", "") if metric is None else (metric.heading, metric.unit)
            variables[name] = dims, array, {"long_name": heading, "units": unit or "1"}
        status = np.full(shape, "missing", dtype="<U7")
        status[places] = frame["status"].to_numpy(str)
        variables["status"] = dims, status, {"long_name": "how a point has ended"}
        coordinates: dict[str, object] = {}
        for name, labels in zip(dims, values, strict=True):
            numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in labels.tolist())
            coordinates[name] = name, np.array(labels.tolist() if numbers else [str(value) for value in labels])
        return xarray.Dataset(variables, coordinates, {"source": f"ddlsim {ddlsim.__version__}"})

    @checked
    def plot_scaling(self, path: str | Path | None = None, *, metric: str = "throughput") -> matplotlib.axes.Axes:
        """Plot a metric over the number of workers; see :func:`ddlsim.report.study_figures.scaling`."""
        from ddlsim.report.study_figures import scaling

        return scaling(self, path, metric=metric)

    @checked
    def plot_lines(
        self, field: str, path: str | Path | None = None, *, metric: str = "throughput"
    ) -> matplotlib.axes.Axes:
        """Plot a metric over any varied field; see :func:`ddlsim.report.study_figures.lines`."""
        from ddlsim.report.study_figures import lines

        return lines(self, field, path, metric=metric)

    @checked
    def plot_pareto(self, x: str, y: str, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Plot two metrics of all configurations; see :func:`ddlsim.report.study_figures.pareto`."""
        from ddlsim.report.study_figures import pareto

        return pareto(self, x, y, path)

    def __repr__(self) -> str:
        ends = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        return f"<Table of {len(self.members)} points ({ends}) over {', '.join(self.axes)}>"

    def __str__(self) -> str:
        from ddlsim.report.study_labels import study_text

        return study_text(self)

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page
        from ddlsim.report.study_labels import study_cells, study_notes

        return page("Study", grid(study_cells(self)), lines(study_notes(self)))


def _means(values: pd.DataFrame) -> dict[str, float]:
    """Return mean, low and high of each column. If it contains inf (a seed that missed a target), the median without an
    interval, which is inf if at least half of the seeds missed it."""
    means: dict[str, float] = {}
    for name, column in values.items():
        array = column.to_numpy()
        mean = float(np.median(array) if np.isinf(array).any() else array.mean())
        half = float(half_width(array, CONFIDENCE)) if np.isfinite(array).all() else math.nan
        means |= {f"{name}": mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return means


@checked
def load_table(store: str | Path) -> Table:
    """Return the table of the latest study in a store. The study may still be running.

    store  path of the store, as passed to :meth:`ddlsim.study.Study.run`

    Raises ConfigError if the store does not exist or contains no study.
    """
    if not os.path.isfile(store):
        raise ConfigError(f"{store}: no such file; study.run(store={str(store)!r}) creates it")
    with Store(store, only_read=True) as opened:
        studies = opened.studies()
        if not studies:
            raise ConfigError(f"{store}: contains no study yet; run one with study.run(store={str(store)!r})")
        study, _, axes = studies[-1]
        members = opened.members(study, axes)
        keys = {member.key for member in members}
        return Table(axes, members, opened.outcomes(keys), experiments=opened.experiments(keys))
