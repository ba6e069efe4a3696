"""Reading TOML with strict keys and one-line errors (imports pydantic: only import this to read a file)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import decoded, parse_toml, read_bytes

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, object]:
    """Return the table in the file `path`. Raises ConfigError if it is missing, unreadable or not TOML."""
    return parse_toml(decoded(read_bytes(path), str(path)), str(path))


def validate(adapter: TypeAdapter[T], table: dict[str, object], where: str, keys: Iterable[str]) -> T:
    """Return `table` as the adapter's type; raise ConfigError, in one line after `where`, if it is not.

    `keys` are the known ones, for "did you mean". The table goes through JSON because pydantic's strict mode
    accepts arrays for tuples only there.
    """
    try:
        return adapter.validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise _first_error(error.errors(), where, keys) from None


#: rules of pydantic that a writer of TOML would not understand
_RULES = {"string_type": "a text in quotes", "dict_type": "a table like { type = ... }"}


def _first_error(errors: list[ErrorDetails], where: str, keys: Iterable[str]) -> ConfigError:
    """Return the most telling of the errors: an unknown key explains a missing one, not the reverse."""
    error = min(errors, key=lambda e: e["type"] not in ("extra_forbidden", "unexpected_keyword_argument"))
    field = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_name("key", field, [key for key in keys if key != "name"], where)
    if error["type"] in ("missing", "missing_argument"):
        return ConfigError(f"{where}: key {field!r} is missing; add {field} = ...")
    if error["type"] == "value_error":  # raised by our own checks, which name the field themselves
        return ConfigError(f"{where}: {error['ctx']['error']}")
    same_field = [e for e in errors if e["loc"][:1] == error["loc"][:1]]
    rules = [_RULES.get(e["type"], e["msg"].removeprefix("Input should be ")) for e in same_field]
    rule = " or ".join(dict.fromkeys(rules))
    value = json.dumps(error["input"])
    return ConfigError(f"{where}: {field} = {value if len(value) <= 80 else f'{value[:77]}...'}: must be {rule}")
