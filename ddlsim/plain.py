"""TOML and JSON files of plain values that are safe to check and print.

Some content of such files is valid, but harms the reader: values nested so deeply that Python's recursion ends,
integers so large that they are no floats (or cannot even be printed), numbers whose inverse is infinite, and
dates, which no field here takes.
"""

from __future__ import annotations

import datetime
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlsim.errors import ConfigError, shown
from ddlsim.units import LARGEST, SMALLEST, in_range

#: larger files are refused: a mistake, or an attempt to fill the memory
MAX_NBYTES = 2**30
#: tables and lists inside each other
MAX_DEPTH = 100
#: integers have 64 bits, as TOML says (https://toml.io/en/v1.0.0#integer)
_FEWER = "use an integer of at most 64 bits"
_LEAST, _MOST = -(2**63), 2**63 - 1


def read_bytes(path: Path, missing: str = "no such file") -> bytes:
    """Return the bytes of a file. Raises ConfigError, ending in `missing` where there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: {missing}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{path}: is larger than {MAX_NBYTES >> 20} MiB; is it the right file?")
    return data


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def decoded(data: bytes, where: str = "") -> str:
    """Return UTF-8 as text, a byte order mark left out. Raises ConfigError with the line and the byte that is none."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data[:3] == b"\xef\xbb\xbf" else 0)  # the decoder does not count the mark
        line = data.count(b"\n", 0, start) + 1
        raise ConfigError(
            f"{_at(where)}line {line}: invalid UTF-8 (byte {start}, 0x{data[start]:02x}); save the file as UTF-8"
        ) from None


def flattened(table: Mapping[str, object], where: str = "") -> dict[str, object]:
    """Return the values in nested tables by their dotted paths."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= flattened(value, f"{where}{name}.") if isinstance(value, dict) else {f"{where}{name}": value}
    return found


def check_separator(head: Sequence[str], where: str) -> None:
    """Raise ConfigError if the first row of a CSV file is a single cell, because other characters separate columns.

    Spreadsheet programs write semicolons, and decimals with a comma, where a comma is usual in numbers.
    """
    for character, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(head) == 1 and character in head[0]:
            raise ConfigError(
                f"{_at(where)}columns are separated by {name}; separate them by commas, and write decimals with a point"
            )


def parse_value(text: str) -> object:
    """Return the value that TOML writes as `text`; what it does not take, such as ``25 Gbit/s``, is the text itself."""
    try:
        return parse_toml(f"value = {text}")["value"] if "\n" not in text else text
    except ConfigError:
        return text


def parse_toml(text: str, where: str = "") -> dict[str, object]:
    """Return the table. Raises ConfigError in one line after `where`."""
    try:
        table: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        remedy = "correct that line (is the file complete?)"
        raise ConfigError(f"{_at(where)}not valid TOML: {error}; {remedy}") from None
    except RecursionError:
        raise ConfigError(f"{_at(where)}nested too deeply; is it the right file?") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise ConfigError(f"{_at(where)}contains an integer with thousands of digits; {_FEWER}") from None
    checked(table, where)
    return table


def read_toml(path: Path, where: str = "") -> dict[str, object]:
    """Return the table in a file, which errors call `where`. Raises ConfigError if it is unreadable or not TOML."""
    where = where or str(path)
    return parse_toml(decoded(read_bytes(path), where), where)


def parse_json(text: str, where: str = "") -> object:
    """Return the value. Raises ConfigError in one line after `where`."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_at(where)}not valid JSON: {error}; correct it (is the file complete?)") from None
    except RecursionError:
        raise ConfigError(f"{_at(where)}nested too deeply; is it the right file?") from None
    except ValueError:
        raise ConfigError(f"{_at(where)}contains an integer with thousands of digits; {_FEWER}") from None
    checked(value, where)
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text can be written: JSON can name halves of characters ("\\ud800"), which nothing can print."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def checked(value: object, where: str = "") -> None:
    """Raise ConfigError, naming the place in the file, for what cannot be used in any field (see above)."""
    todo: list[tuple[object, str, int]] = [(value, "", 0)]
    while todo:
        part, place, depth = todo.pop()
        if isinstance(part, dict | list):
            if depth > MAX_DEPTH:
                raise ConfigError(f"{_at(where)}nested more than {MAX_DEPTH} levels deep; is it the right file?")
            items = list(part.items() if isinstance(part, dict) else enumerate(part))
            if isinstance(part, dict):
                todo += [(key, f"{place[:60]}.{key}", depth) for key in part]
            todo += [(item, f"{place[:60]}.{key}", depth + 1) for key, item in items]
        elif isinstance(part, str):
            if not part.isascii() and not is_unicode(part):
                rule = "contains half of a surrogate pair; correct it"
                raise ConfigError(f"{_at(where)}{shown(place[1:60])}: {shown(part)} {rule}")
        elif isinstance(part, float) and not (in_range(part) or math.isinf(part)):
            rule = "is no number" if math.isnan(part) else f"must be 0, or from {SMALLEST:g} to {LARGEST:g} in size"
            raise ConfigError(f"{_at(where)}{place[1:60]} = {part}: {rule}; correct it")
        elif isinstance(part, int) and not _LEAST <= part <= _MOST:
            raise ConfigError(f"{_at(where)}{place[1:60]}: an integer of more than 64 bits; {_FEWER}")
        elif isinstance(part, datetime.date | datetime.time):
            rule = "no field takes a date or a time; write a string in quotes"
            raise ConfigError(f"{_at(where)}{place[1:60]} = {part}: {rule}")
