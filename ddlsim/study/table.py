"""What a study has found: a row per point, a row per configuration, and the best of these."""

from __future__ import annotations

import math
import os
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
from ddlsim.output_files import replacing, write_text
from ddlsim.report.csv_table import save_csv
from ddlsim.run.metrics import METRICS
from ddlsim.run.seeds import half_width
from ddlsim.study.store import Member, Store
from ddlsim.study.work import DONE, FAILED, SKIPPED, Outcome
from ddlsim.ties import places

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd
    import xarray

# ---------------------------------------------------------------- labelled arrays

#: points that the fields' values may have together; a sample, where no two points share a value, soon has more
MAX_CELLS = 1_000_000


def dataset_of(table: Table) -> xarray.Dataset:
    """Return the points of a table as a dataset; see :meth:`ddlsim.study.Table.to_xarray`."""
    try:
        import xarray
    except ImportError:
        raise ConfigError("to_xarray needs xarray: pip install 'ddlsim[xarray]'") from None
    frame = table.frame
    dims = [*table.axes, "seed"]
    values = {name: list(dict.fromkeys(frame[name].tolist())) for name in dims}
    shape = tuple(len(found) for found in values.values())
    if math.prod(shape) > MAX_CELLS:
        sizes = " x ".join(str(n) for n in shape)
        raise ConfigError(
            f"to_xarray: {len(frame)} points in an array of {sizes}, more than {MAX_CELLS:,}: they are a sample, no "
            "grid; use table.frame, or table.frame.to_xarray() for one dimension"
        )
    places = {name: {value: i for i, value in enumerate(found)} for name, found in values.items()}
    at = tuple(np.array([places[name][value] for value in frame[name].tolist()]) for name in dims)
    variables: dict[str, tuple[list[str], object, dict[str, str]]] = {}
    for name in ("n_workers", *(name for name in METRICS if name in frame)):
        array = np.full(shape, np.nan)
        array[at] = frame[name].to_numpy(np.float64, na_value=np.nan)
        metric = METRICS.get(name)
        heading, unit = ("workers", "") if metric is None else (metric.heading, metric.unit)
        variables[name] = dims, array, {"long_name": heading, "units": unit or "1"}
    status = np.full(shape, "missing", dtype="<U7")
    status[at] = frame["status"].to_numpy(str)
    variables["status"] = dims, status, {"long_name": "how a point has ended"}
    coordinates = {name: (name, _coordinate(found)) for name, found in values.items()}
    return xarray.Dataset(variables, coordinates, {"source": f"ddlsim {ddlsim.__version__}"})


def _coordinate(values: Sequence[object]) -> object:
    """Return the values along a dimension as numbers, or as texts where not all of them are."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return np.array(values) if numbers else np.array([str(value) for value in values])


# ---------------------------------------------------------------- table

Ints = npt.NDArray[np.int64]

#: status of a point that has not been simulated (yet)
MISSING = "missing"
#: metrics of every result; all others are in a table if some result has them
OF_RUNS = tuple(name for name, metric in METRICS.items() if metric.kind == "run")
#: the metric that a seed may miss
_TARGET = "time_to_accuracy"
#: of the intervals of means over seeds
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Table:
    """The outcome of a study.

    axes         dotted paths that are varied
    members      the points, in the order of the design
    outcomes     key of a point -> how it ended; a point that is not there is missing
    interrupted  whether the study was stopped before its end
    experiments  key of a point -> its experiment as JSON, for the manifests in reports
    objectives   metrics that were searched for; the text has the best first then
    """

    axes: Sequence[str]
    members: Sequence[Member]
    outcomes: Mapping[str, Outcome]
    interrupted: bool = False
    experiments: Mapping[str, str] = field(default_factory=dict)
    objectives: Sequence[str] = ()

    # ------------------------------------------------------------ tables

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per point: the varied fields, seed, status ("done", "skipped", "failed", "missing"), the workers,
        numbers of the result (:data:`ddlsim.run.metrics.METRICS`), stop_reason, notes and warnings, and error: why it
        was skipped or has failed.

        A number that is not known (a cost without prices) is NaN; a target that was never reached is inf.
        """
        import pandas as pd

        rows = []
        for member in self.members:
            outcome = self.outcomes.get(member.key, Outcome(MISSING))
            record = {name: value for name, value in outcome.record.items() if name != "history"}
            lists = {name: "; ".join(map(str, record.pop(name, ()))) for name in ("notes", "warnings")}  # type: ignore[call-overload]
            row = {**member.settings, "seed": member.seed, "status": outcome.status, "stop_reason": ""}
            rows.append({**row, **record, **lists, "error": outcome.error})
        some = (name for name in METRICS if name not in OF_RUNS)
        numbers = [*OF_RUNS, *(name for name in some if any(name in row for row in rows))]
        texts = ["stop_reason", "notes", "warnings", "error"]
        frame = pd.DataFrame(rows, columns=[*self.axes, "seed", "status", "n_workers", *numbers, *texts])
        frame[numbers] = frame[numbers].astype(np.float64)
        frame["n_workers"] = frame["n_workers"].astype("Int64")
        return frame

    @cached_property
    def history(self) -> pd.DataFrame:
        """All evaluations of runs that learn: the varied fields, seed, and the columns of
        :attr:`ddlsim.Result.history`."""
        import pandas as pd

        from ddlsim.learning.monitor import Row

        rows = []
        for member in self.members:
            record = self.outcomes[member.key].record if member.key in self.outcomes else {}
            found: Any = record.get("history", ())
            rows += [[*member.settings.values(), member.seed, *row] for row in found]
        return pd.DataFrame(rows, columns=[*self.axes, "seed", *Row._fields])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per configuration that has been simulated: the varied fields, the workers, the number of seeds
        `n`, and for each metric the mean over seeds with its 95 % interval by Student's t, as metric, metric_low and
        metric_high (NaN for a single seed). If seeds missed a target, metric is the median, in which they are later
        than all others; ``n_reached`` is the number of seeds that reached it."""
        import pandas as pd

        frame = self.frame
        metrics = [name for name in METRICS if name in frame]
        rows = []
        for start in range(0, len(frame), self._n_seeds):  # the seeds of a configuration are together
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
        """Status -> number of points."""
        states = [self.outcomes[m.key].status if m.key in self.outcomes else MISSING for m in self.members]
        return {status: states.count(status) for status in (DONE, SKIPPED, FAILED, MISSING)}

    @property
    def units(self) -> dict[str, str]:
        """Metric -> unit ("" for shares and counts)."""
        return {name: metric.unit for name, metric in METRICS.items()}

    # ------------------------------------------------------------ answers

    @checked
    def best(self, metric: str = "throughput", n: Count = 1) -> pd.DataFrame:
        """Return the `n` configurations with the best mean of a metric, the best first, as rows of the summary.

        Higher is better for throughput, speedup, efficiency, compute_share and accuracy, lower for all others. Those
        that tie (see :meth:`places`) stay in the order of the design.
        """
        known = self.known(metric)
        order = np.argsort(self.places(known, metric), kind="stable")
        return known.iloc[order[:n]]

    def places(self, rows: pd.DataFrame, metric: str) -> Ints:
        """Return the place of each of some rows of the summary by a metric, 0 for the best, shape (n_rows,).

        Rows tie, and share a place, where they differ by less than the larger of their throughput_spread (for what
        the clock says; of studies with ``stability=True``), and by less than 1e-9 in any case: :mod:`ddlsim.ties`.
        """
        sign = -1.0 if METRICS[metric].larger_is_better else 1.0
        spreads = None
        if METRICS[metric].of_clock and "throughput_spread" in rows:
            spreads = np.nan_to_num(rows["throughput_spread"].to_numpy(np.float64)).tolist()
        return np.array(places((sign * rows[metric].to_numpy(np.float64)).tolist(), spreads), dtype=np.int64)

    @checked
    def pareto(self, *metrics: str) -> pd.DataFrame:
        """Return the configurations that no other one beats in one of the metrics without being worse in another,
        by means over seeds, in the order of the first metric. Those that tie in a metric do not beat each other in it.

        Raises ConfigError for a metric that there is not, or that no configuration has (a cost without prices).
        """
        if len(metrics) < 2:
            raise ConfigError(f"pareto{metrics!r}: give at least two metrics, e.g. 'time_to_accuracy', 'cost'")
        known = self.known(*metrics)
        values = np.stack([self.places(known, name) for name in metrics], axis=1)
        beaten = [bool(((values <= row).all(axis=1) & (values < row).any(axis=1)).any()) for row in values]
        front = known[~np.array(beaten, dtype=bool)]
        return front.iloc[np.argsort(values[~np.array(beaten, dtype=bool), 0], kind="stable")]

    @checked
    def known(self, *metrics: str) -> pd.DataFrame:
        """Return the rows of the summary in which all these metrics are known and finite.

        Raises ConfigError for a metric that there is not, or that no configuration has.
        """
        summary = self.summary
        for metric in metrics:
            if metric not in METRICS:
                raise unknown_name("metric", metric, METRICS)
            if metric not in summary or not np.isfinite(summary[metric].to_numpy(np.float64)).any():
                raise ConfigError(f"{metric} is not known for any configuration{METRICS[metric].remedy}")
        finite = np.isfinite(summary[list(metrics)].to_numpy(np.float64)).all(axis=1)
        return summary.iloc[np.flatnonzero(finite)]

    # ------------------------------------------------------------ output

    @checked
    def save(self, path: str | Path) -> None:
        """Write the frame as ``.csv``, ``.parquet`` (needs pyarrow) or ``.json`` (a list of rows), by the suffix.

        In CSV, texts that a spreadsheet would run as formulas begin with an apostrophe (:mod:`ddlsim.csv_cells`).
        Raises ConfigError for other formats, and if the file cannot be written.
        """
        path = Path(path)
        if path.suffix == ".csv":
            save_csv(self.frame, path)
        elif path.suffix == ".parquet":
            with replacing(path) as file:
                try:
                    file.write(self.frame.to_parquet(None, index=False))
                except ImportError:
                    raise ConfigError(
                        f"{path}: writing Parquet needs pyarrow: pip install 'ddlsim[parquet]'; or use .csv"
                    ) from None
        elif path.suffix == ".json":
            write_text(path, self.frame.to_json(orient="records", indent=1))
        else:
            raise ConfigError(f"{path}: cannot write the format {path.suffix!r}; use .csv, .parquet or .json")

    @checked
    def save_html(self, path: str | Path, *, title: str = "", question: str = "", metric: str = "") -> None:
        """Write the report as one HTML file: answer, pictures, sortable tables, the manifest of every run; see
        :func:`ddlsim.report.html.html_report`.

        Raises ConfigError for a metric that no configuration has, and if the file cannot be written.
        """
        from ddlsim.report.html import save_html

        save_html(self, path, title=title, question=question, metric=metric)

    def to_xarray(self) -> xarray.Dataset:
        """Return the points as an ``xarray.Dataset`` (extra: ``pip install 'ddlsim[xarray]'``).

        Dimensions are the varied fields and ``seed``, with the values as in the frame for coordinates. The metrics and
        ``n_workers`` are variables with attributes ``units`` ("1" of shares and counts) and ``long_name``: NaN where
        nothing has been simulated, which the variable ``status`` explains ("done", "skipped", "failed", "missing").
        Raises ConfigError without xarray, and for samples, whose points are in no grid.
        """
        return dataset_of(self)

    @checked
    def plot_scaling(self, path: str | Path | None = None, *, metric: str = "throughput") -> matplotlib.axes.Axes:
        """Draw a metric over the number of workers; see :func:`ddlsim.report.study_plots.scaling`."""
        from ddlsim.report.study_plots import scaling

        return scaling(self, path, metric=metric)

    @checked
    def plot_lines(
        self, field: str, path: str | Path | None = None, *, metric: str = "throughput"
    ) -> matplotlib.axes.Axes:
        """Draw a metric over any varied field; see :func:`ddlsim.report.study_plots.lines`."""
        from ddlsim.report.study_plots import lines

        return lines(self, field, path, metric=metric)

    @checked
    def plot_pareto(self, x: str, y: str, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw two metrics of all configurations; see :func:`ddlsim.report.study_plots.pareto`."""
        from ddlsim.report.study_plots import pareto

        return pareto(self, x, y, path)

    def __repr__(self) -> str:
        ends = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        return f"<Table of {len(self.members)} points ({ends}) over {', '.join(self.axes)}>"

    def __str__(self) -> str:
        from ddlsim.report.study_text import study_text

        return study_text(self)

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page
        from ddlsim.report.study_text import study_cells, study_notes

        return page("Study", grid(study_cells(self)), lines(study_notes(self)))


def _means(values: pd.DataFrame) -> dict[str, float]:
    """Return mean, low and high of each column. With an inf in it (a seed that missed a target) the median, without an
    interval; inf if half of the seeds or more missed it."""
    found: dict[str, float] = {}
    for name, column in values.items():
        array = column.to_numpy()
        mean = float(np.median(array) if np.isinf(array).any() else array.mean())
        half = float(half_width(array, CONFIDENCE)) if np.isfinite(array).all() else math.nan
        found |= {f"{name}": mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
    return found


@checked
def load_table(store: str | Path) -> Table:
    """Return the table of the study that was run last with a store, as far as it has got.

    Raises ConfigError if there is no such store, or no study in it.
    """
    if not os.path.isfile(store):
        raise ConfigError(f"{store}: no such file; a study writes it: study.run(store={str(store)!r})")
    with Store(store, only_read=True) as opened:
        studies = opened.studies()
        if not studies:
            raise ConfigError(f"{store}: has no study in it yet; run one: study.run(store={str(store)!r})")
        study, _, axes = studies[-1]
        members = opened.members(study, axes)
        keys = {member.key for member in members}
        return Table(axes, members, opened.outcomes(keys), experiments=opened.experiments(keys))
