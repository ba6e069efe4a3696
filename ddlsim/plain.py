"""TOML and JSON files of plain values that are safe to check and print.

Some valid content of such files causes problems: values nested beyond Python's recursion limit, integers that are too
large for floats (or for printing), numbers with an infinite inverse, and dates, which no field accepts.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from ddlsim.errors import ConfigError, shown
from ddlsim.units import LARGEST, SMALLEST, in_range

#: size limit; larger files are a mistake, or an attempt to fill the memory
MAX_NBYTES = 2**30
#: maximum nesting of tables and lists
MAX_DEPTH = 100
#: integers have 64 bits, as in TOML (https://toml.io/en/v1.0.0#integer)
_FEWER = "use an integer of at most 64 bits"
_LEAST, _MOST = -(2**63), 2**63 - 1


def read_bytes(path: Path, missing: str = "no such file") -> bytes:
    """Return the bytes of a file. Raises ConfigError, ending in `missing` if there is no file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: {missing}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}; give a file") from None
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{path}: is larger than {MAX_NBYTES >> 20} MiB; is it the right file?")
    return data


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def decoded(data: bytes, where: str = "") -> str:
    """Decode UTF-8 without a byte order mark. Raises ConfigError with the line and the first invalid byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data[:3] == b"\xef\xbb\xbf" else 0)  # the decoder skips the mark
        line = data.count(b"\n", 0, start) + 1
        raise ConfigError(
            f"{_at(where)}line {line}: invalid UTF-8 (byte {start}, 0x{data[start]:02x}); save the file as UTF-8"
        ) from None


def flattened(table: Mapping[str, object], where: str = "") -> dict[str, object]:
    """Return the values in nested tables, by dotted path."""
    leaves: dict[str, object] = {}
    for name, value in table.items():
        leaves |= flattened(value, f"{where}{name}.") if isinstance(value, dict) else {f"{where}{name}": value}
    return leaves


def check_separator(head: Sequence[str], where: str) -> None:
    """Raise ConfigError if the first row of a CSV file is a single cell, because other characters separate columns.

    Spreadsheet programs write semicolons, and decimal commas, in locales that use a decimal comma.
    """
    for character, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(head) == 1 and character in head[0]:
            raise ConfigError(
                f"{_at(where)}columns are separated by {name}; separate them by commas, and write decimals with a point"
            )


def csv_rows(path: Path, missing: str) -> list[tuple[int, list[str]]]:
    """Return the line number and the cells of each row of a CSV file, without empty rows and comments (#).

    Raises ConfigError as :func:`read_bytes`, and for texts that are not CSV.
    """
    reader = csv.reader(io.StringIO(decoded(read_bytes(path, missing), str(path)), newline=""), strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}: cannot be read as CSV ({error}); is it the right file?") from None
    return [(number, cells) for number, cells in rows if any(cells) and not cells[0].startswith("#")]


def whole_numbers(text: str, where: str, least: int = 1) -> list[int]:
    """Parse "8,16" to integers of at least `least`. Raises ConfigError, naming `where`, for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) >= least for part in parts):
        rule = f"must be integers of at least {least}, separated by commas, such as 8,16,32"
        raise ConfigError(f"{where} = {shown(text)}: {rule}")
    return [int(part) for part in parts]


def parse_value(text: str) -> object:
    """Parse `text` as a TOML value; text that is not valid TOML, such as ``25 Gbit/s``, is returned unchanged."""
    try:
        return parse_toml(f"value = {text}")["value"] if "\n" not in text else text
    except ConfigError:
        return text


def parse_toml(text: str, where: str = "") -> dict[str, object]:
    """Return the table. Raises a one-line ConfigError that begins with `where`."""
    return cast("dict[str, object]", _parsed(tomllib.loads, "TOML", text, where))


def _parsed(loads: Callable[[str], object], kind: str, text: str, where: str) -> object:
    try:
        value = loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{_at(where)}not valid {kind}: {error}; correct that line (is the file complete?)") from None
    except RecursionError:
        raise ConfigError(f"{_at(where)}nested too deeply; is it the right file?") from None
    except ValueError:  # Python rejects integers of thousands of digits
        raise ConfigError(f"{_at(where)}contains an integer with thousands of digits; {_FEWER}") from None
    checked(value, where)
    return value


def read_toml(path: Path, where: str = "") -> dict[str, object]:
    """Return the table in a file, called `where` in errors. Raises ConfigError if it is unreadable or not TOML."""
    where = where or str(path)
    return parse_toml(decoded(read_bytes(path), where), where)


def parse_json(text: str, where: str = "") -> object:
    """Return the value. Raises a one-line ConfigError that begins with `where`."""
    return _parsed(json.loads, "JSON", text, where)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON can contain lone surrogates ("\\ud800"), which cannot be printed."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def checked(value: object, where: str = "") -> None:
    """Raise ConfigError, naming the place in the file, for values that no field can use (see above)."""
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
