"""Typed access to JSON, with every value checked on access."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.text import EntryError, SourceText
from ddlsim.units import as_number, in_range

MAX_COUNT = 2**53  # integers up to here are exact in JSON


def finite(value: object) -> float | None:
    """Return a JSON number as a float; None for anything else, and for numbers that are not :func:`in_range`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if in_range(number) else None


@dataclass(frozen=True)
class Node:
    """A JSON value and its location for errors: ``file: results[3].out_of_place``."""

    value: object
    place: str

    def error(self, reason: str) -> ConfigError:
        """Return the error for `reason` at this location."""
        return ConfigError(f"{self.place.rstrip(': ')}: {reason}")

    def entry_error(self, reason: str) -> EntryError:
        """Return the error for `reason` in the entry at this location."""
        return EntryError(str(self.error(reason)))

    def has(self, key: str) -> bool:
        """Return whether this is an object with a value other than null for `key`."""
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def __getitem__(self, key: str) -> Node:
        if not isinstance(self.value, dict):
            raise self.error(f"must be an object with the key {key!r}, not {shown(self.value)}")
        if key not in self.value:
            raise self.error(f"the key {key!r} is missing; is the file complete?")
        return Node(self.value[key], f"{self.place}{'.' if self.place[-1:] not in ' :' else ''}{key}")

    def items(self) -> list[Node]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            raise self.error(f"must be a list, not {shown(self.value)}")
        return [Node(value, f"{self.place}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.error(f"must be a string, not {shown(self.value)}")
        return self.value

    def number(self) -> float:
        """Return a finite number; strings with numbers are accepted, because some tools write them."""
        number = finite(as_number(self.value) if isinstance(self.value, str) else self.value)
        if number is None:
            raise self.entry_error(f"must be a finite number, not {shown(self.value)}")
        return number

    def nonnegative(self) -> float:
        """Return a number of at least 0."""
        number = self.number()
        if number < 0:
            raise self.entry_error(f"{shown(self.value)} must not be negative; remove this entry")
        return number

    def positive(self) -> float:
        """Return a number above 0."""
        number = self.nonnegative()
        if number == 0:
            raise self.entry_error(f"{shown(self.value)} must be above 0; remove this entry")
        return number

    def count(self) -> int:
        """Return a positive integer."""
        number = self.number()
        if not 1 <= number <= MAX_COUNT or number != int(number):
            raise self.entry_error(f"{shown(self.value)} must be an integer from 1 to {MAX_COUNT}")
        return int(number)


#: a string, or non-numbers as printed by C's printf: inf, -nan, nan(ind)
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?<![\w.])-?(?:nan(?:\(\w*\))?|inf(?:inity)?)(?![\w.])', re.IGNORECASE | re.DOTALL
)
_DOCUMENT = re.compile(r"\{|\[\s*\{")
_DECODER = json.JSONDecoder(strict=False)  # names in traces can contain raw tabs and newlines


def _readable(text: str) -> str:
    """Replace C's names of non-numbers by those of Python's decoder."""

    def python_name(match: re.Match[str]) -> str:
        word = match[0].lower()
        if word[0] == '"':
            return match[0]
        return "NaN" if "nan" in word else "-Infinity" if word[0] == "-" else "Infinity"

    return _TOKEN.sub(python_name, text)


def loads(text: str) -> object:
    """Parse JSON as C programs write it, with bare ``inf`` and ``-nan``; raises the exceptions of ``json.loads``."""
    try:
        value: object = _DECODER.decode(text)
    except json.JSONDecodeError:
        value = _DECODER.decode(_readable(text))
    return value


def beginning(text: str) -> object:
    """Parse the value at the beginning of a text like :func:`loads`; anything may follow."""
    return _DECODER.raw_decode(_readable(text))[0]


def documents(source: SourceText) -> Iterator[Node]:
    """Yield the consecutive JSON objects, and lists of objects, of a file; other output between them is skipped.

    Raises :class:`ConfigError` with the line for a truncated one, or :class:`EntryError` if there are others before it.
    """
    text, at, error = _readable(source.text), 0, ConfigError
    while match := _DOCUMENT.search(text, at):
        try:
            value, at = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            lines = "\n" * text.count("\n", 0, match.start())
            try:
                value, at = parse_json(source, lines + text[match.start() :]).value, len(text)  # raises, with the line
            except ConfigError as wrong:
                raise error(str(wrong)) from None
        yield Node(value, f"{source.path}: ")
        error = EntryError


def parse_json(source: SourceText, text: str | None = None) -> Node:
    """Return the JSON value in `text` (None: the whole file); raises :class:`ConfigError` with the line."""
    try:
        value = loads(source.text if text is None else text)
    except json.JSONDecodeError as error:
        what = f"{error.msg} (column {error.colno})"
        raise source.error(error.lineno, f"not valid JSON: {what}; is the file complete?") from None
    except RecursionError:
        raise source.error(None, "nested too deeply; is it the right file?") from None
    except ValueError as error:  # an integer of thousands of digits
        raise source.error(None, f"invalid value in JSON: {error}; correct it") from None
    return Node(value, f"{source.path}: ")
