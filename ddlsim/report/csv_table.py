"""Tables as CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlsim.csv_cells import guarded
from ddlsim.output_files import write_text

if TYPE_CHECKING:
    import pandas as pd


def csv_text(frame: pd.DataFrame) -> str:
    """Return the rows of a frame as CSV, without its index; texts that look like formulas are guarded
    (:mod:`ddlsim.csv_cells`)."""
    safe = frame.astype(object).map(lambda cell: guarded(cell) if isinstance(cell, str) else cell)
    safe.columns = [guarded(str(name)) for name in frame.columns]
    return str(safe.to_csv(index=False, lineterminator="\n"))


def save_csv(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the rows of a frame, as :func:`csv_text` has them. Raises ConfigError if the file cannot be written."""
    write_text(path, csv_text(frame))
