"""One figure that was measured and what ddlsim says about it: what every part of the accuracy report consists of.

Each script of this folder (``published.py``, ``aws.py``, ...) has a function ``rows() -> list[Row]``; ``report.py``
turns them into ``docs/accuracy.md``. A script also runs by itself and prints its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "mean_error", "show"]


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

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured


def mean_error(rows: list[Row]) -> float:
    """Return the mean of |error| over the rows that calibration has not read (nan without any)."""
    errors = [abs(row.error) for row in rows if not row.fitted_on]
    return sum(errors) / len(errors) if errors else float("nan")


def show(rows: list[Row]) -> None:
    """Print `rows` as a table, for a script run by itself."""
    for row in rows:
        mark = "fitted" if row.fitted_on else f"{row.error:+7.1%}"
        figures = f"{row.measured:12.5g} {row.predicted:12.5g} {row.unit:10}"
        print(f"{row.case:42} {row.what:24} {figures} {mark:8} {row.note}")
    print(f"mean absolute error of {sum(not r.fitted_on for r in rows)} predictions: {mean_error(rows):.1%}")
