"""The cells of a store as values: each is checked when it is read, since anybody may have written the file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ddlsim.errors import ConfigError, shown
from ddlsim.learning.monitor import Row
from ddlsim.plain import is_unicode
from ddlsim.units import LARGEST

#: how a point can have ended, as in `work`
STATUSES = ("done", "skipped", "failed")
#: names in a record that are no numbers; all others are
TEXTS, LISTS = ("stop_reason",), ("notes", "warnings")
#: numbers that may be inf (a target that was never reached) or NaN (a model that does not learn any more)
REACHED, LOSSES = "_to_accuracy", ("loss",)
#: of a share that rounding may have made negative
ROUNDING = 1e-6


def _damaged(what: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"is damaged: {what} = {shown(value)} must be {rule}; restore a copy, or give another file")


def _value(text: object, what: str) -> Any:
    """Return what a cell of JSON holds."""
    if not isinstance(text, str):
        raise _damaged(what, text, "a text of JSON")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(what, text, "a text of JSON") from None
    if "\\ud" in text.lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise _damaged(what, text, "a text of whole characters")
    return value


def fields_of(text: object, what: str) -> dict[str, Any]:
    """Return the object in a cell. Raises ConfigError if there is none."""
    value = _value(text, what)
    if not isinstance(value, dict):
        raise _damaged(what, value, "an object")
    return value


def paths_in(text: object) -> list[str]:
    """Return the varied paths of a study. Raises ConfigError if they are none."""
    value = _value(text, "axes")
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value) or len(set(value)) < len(value):
        raise _damaged("axes", value, "a list of different texts")
    return value


def settings_of(text: object, axes: Sequence[str]) -> dict[str, object]:
    """Return what a point has for each of the `axes`. Raises ConfigError for anything else."""
    value = fields_of(text, "settings")
    if value.keys() != set(axes):
        raise _damaged("settings", value, f"an object with the keys {shown(list(axes))}")
    for path, setting in value.items():
        if not isinstance(setting, str | int | float) or (isinstance(setting, float) and math.isnan(setting)):
            raise _damaged(f"settings of {shown(path)}", setting, "a text or a number")
    return value


def status_of(text: object) -> str:
    """Return the status in a cell. Raises ConfigError if it is none."""
    if not isinstance(text, str) or text not in STATUSES:
        raise _damaged("status", text, f"one of {', '.join(STATUSES)}")
    return text


def number_of(value: object, what: str) -> Any:
    """Return a number of at least 0. Raises ConfigError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**63:
        raise _damaged(what, value, "a number of at least 0")
    return value


def checked_record(text: object) -> dict[str, object]:
    """Return the numbers of a result. Raises ConfigError, naming the one that is none."""
    record = fields_of(text, "record")
    for name, value in record.items():
        what = f"record: {shown(name)}"
        if name in TEXTS:
            if not isinstance(value, str):
                raise _damaged(what, value, "a text")
        elif name in LISTS:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise _damaged(what, value, "a list of texts")
        elif name == "history":
            _check_history(value)
        elif value is not None:
            _check_number(name, value, what)
    return record


def _check_number(name: str, value: object, what: str) -> None:
    if name == "n_workers":
        if type(value) is not int or not 1 <= value < 2**31:
            raise _damaged(what, value, "a whole number of at least 1")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _damaged(what, value, "a number")
    if name in LOSSES and isinstance(value, float) and not math.isfinite(value):
        return
    if not (-ROUNDING <= value <= LARGEST or (value == math.inf and name.endswith(REACHED))):
        raise _damaged(what, value, "finite and at least 0")


def _check_history(value: object) -> None:
    rows = value if isinstance(value, list) else [None]
    for row in rows:
        cells = row if isinstance(row, list) else []
        if len(cells) != len(Row._fields) or not all(type(cell) in (int, float) for cell in cells):
            raise _damaged("record: history", row, f"a list of {len(Row._fields)} numbers")
