"""One figure that was measured and what ddlsim says about it: what every part of the accuracy report consists of.

Each script of this folder (``published.py``, ``aws.py``, ...) has a function ``rows() -> list[Row]``, and where its
data has rows that are not predicted ``left_out() -> list[Omitted]``, with the reason of each; ``report.py`` turns them
into ``docs/accuracy.md`` and a page per family. A script also runs by itself and prints its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddlsim.cluster.calibrated import deviation
from ddlsim.errors import ConfigError

__all__ = [
    "TIMES",
    "Omitted",
    "Row",
    "Table",
    "UnpredictableError",
    "bias",
    "covered",
    "mean_error",
    "number",
    "show",
    "skill",
]

TIMES = ("s", "ms", "us")  #: units of which more is slower; of all others less is


@dataclass(frozen=True)
class Row:
    """A measured figure beside its prediction.

    `fitted_on` marks rows from which something was calibrated: they are shown, and left out of every average.
    """

    case: str  #: the published run or sweep, as in the data file
    what: str  #: which of its points: "16 GPUs", "64 MiB"
    measured: float  #: in `unit`
    predicted: float  #: in `unit`
    unit: str  #: "s", "images/s", "gain"
    fitted_on: bool  #: whether calibration read `measured`
    note: str = ""  #: what explains the difference, or how the row was calibrated
    unchanged: float = math.nan  #: in `unit`: what "everything stays as calibrated" says, nan where that says nothing
    interval: tuple[float, float] | None = None  #: in `unit`: where a measurement is with 95 % probability
    kind: str = ""  #: of prediction, as :mod:`ddlsim.cluster.calibrated` has them; gives the interval where none is
    inside: bool = False  #: whether the run stays in one machine, which says nothing about scaling out
    #: of a ratio: (measured, predicted) without the technique and with it, in s
    arms: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind and self.interval is None and not self.fitted_on:
            given = deviation(self.kind)
            ends = given.around(1.0)
            low, high = ends if self.unit in TIMES else (1.0 / ends[1], 1.0 / ends[0])
            object.__setattr__(self, "interval", (low * self.predicted, high * self.predicted))

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured

    @property
    def arm_errors(self) -> list[float]:
        """(predicted - measured) / measured of each arm."""
        return [predicted / measured - 1.0 for measured, predicted in self.arms]


@dataclass(frozen=True)
class Omitted:
    """A measured figure that is not predicted, and why."""

    case: str
    what: str
    reason: str


class UnpredictableError(Exception):
    """Why a figure of a data file is not predicted."""


@dataclass
class Table:
    """What became of the figures of a data file: none is dropped without a reason."""

    rows: list[Row] = field(default_factory=list)
    omitted: list[Omitted] = field(default_factory=list)

    def add(self, case: str, what: str, make: Callable[[], Row]) -> None:
        """Add the row that `make` returns, or why there is none."""
        try:
            self.rows.append(make())
        except (UnpredictableError, ConfigError) as error:
            self.omit(case, what, str(error))

    def omit(self, case: str, what: str, reason: str) -> None:
        """Add a figure that is not predicted."""
        self.omitted.append(Omitted(case, what, reason))


def number(row: object, key: object, zero: bool = False) -> float:
    """Return a number of a row of a data file, above 0 (or `zero`), or raise :class:`UnpredictableError`."""
    value = row.get(key) if isinstance(row, Mapping) else None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not (0.0 < value < math.inf or (zero and value == 0.0)):
        raise UnpredictableError(f"{key} is not stated")
    return float(value)


def mean_error(rows: Sequence[Row]) -> float:
    """Return the mean of |error| over the rows that calibration has not read (nan without any)."""
    errors = [abs(row.error) for row in rows if not row.fitted_on]
    return sum(errors) / len(errors) if errors else math.nan


def bias(rows: Sequence[Row]) -> float:
    """Return the mean of the signed errors over the rows that calibration has not read: of times above 0 too slow, of
    rates above 0 too fast (nan without any)."""
    errors = [row.error for row in rows if not row.fitted_on]
    return sum(errors) / len(errors) if errors else math.nan


def skill(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean |error| of "everything stays as calibrated", and the error of what is added to that: the sum of
    |predicted - measured| in shares of the sum of |measured - unchanged|; nan without rows for which that says much.

    The second is the error of the added time t - t_1, 1 for whoever says that nothing is added.
    """
    judged = [row for row in rows if not row.fitted_on and math.isfinite(row.unchanged)]
    if not judged:
        return math.nan, math.nan
    naive = sum(abs(row.unchanged / row.measured - 1.0) for row in judged) / len(judged)
    added = sum(abs(row.measured - row.unchanged) / row.measured for row in judged)
    return naive, sum(abs(row.error) for row in judged) / added if added else math.nan


def covered(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Return which share of the predictions has the measured figure in its 95 % interval, and the median of half the
    intervals' width in shares of the prediction; None without intervals."""
    judged = [(row, row.interval) for row in rows if not row.fitted_on and row.interval is not None]
    if not judged:
        return None
    inside = sum(low <= row.measured <= high for row, (low, high) in judged)
    widths = sorted((high - low) / 2 / row.predicted for row, (low, high) in judged)
    return inside / len(judged), widths[len(widths) // 2]


def show(rows: Sequence[Row], omitted: Sequence[Omitted] = ()) -> None:
    """Print `rows` as a table, for a script run by itself, and below it what is not predicted."""
    for row in rows:
        mark = "fitted" if row.fitted_on else f"{row.error:+7.1%}"
        mark += "".join(f"{error:+7.1%}" for error in row.arm_errors)
        figures = f"{row.measured:12.5g} {row.predicted:12.5g} {row.unit:10}"
        print(f"{row.case:42} {row.what:24} {figures} {mark:8} {row.note}")
    for each in omitted:
        print(f"{each.case:42} {each.what:24} not predicted: {each.reason}")
    print(f"mean absolute error of {sum(not r.fitted_on for r in rows)} predictions: {mean_error(rows):.1%}")
    naive, added = skill(rows)
    if math.isfinite(naive):
        print(f"if nothing changed: {naive:.1%}; error of what is added: {added:.0%}")
    found = covered(rows)
    if found is not None:
        print(f"95 % intervals cover {found[0]:.0%}; median of half their width {found[1]:.1%}")
