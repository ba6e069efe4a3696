"""Recorded failures as a CSV file."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from ddlsim.errors import ConfigError, shown

_COLUMNS = ("time_s", "unit", "repair_s")


def read_failures(path: Path, repair: float) -> list[tuple[float, int, float]]:
    """Return the (time in s, number of the part, s until it is repaired) of a file's rows; `repair` where it has no
    such column. Raises ConfigError, with the line, for what cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS[:2] if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path}: has no column {missing[0]!r}; give it time_s, unit and, if they differ, repair_s"
                )
            return [
                (
                    _number(path, line, row, "time_s"),
                    _whole(path, line, row, "unit"),
                    _number(path, line, row, "repair_s") if row.get("repair_s") else repair,
                )
                for line, row in enumerate(reader, 2)
            ]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; trace is a CSV file of failures") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file: {error}") from None


def _number(path: Path, line: int, row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    never = column == "repair_s"  # is it repaired: inf
    if not (value >= 0.0 and (never or math.isfinite(value))):
        raise ConfigError(f"{path}:{line}: {column} = {shown(row[column])}: must be a number of seconds of at least 0")
    return value


def _whole(path: Path, line: int, row: dict[str, str], column: str) -> int:
    text = row[column]
    if text is None or not text.strip().isdecimal():
        raise ConfigError(f"{path}:{line}: {column} = {shown(text)}: must be a whole number from 0 on")
    return int(text)
