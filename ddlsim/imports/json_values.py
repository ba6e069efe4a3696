"""Typed access to JSON that somebody else wrote: every value is checked when it is taken out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from ddlsim.errors import ConfigError
from ddlsim.imports.text import SourceText

__all__ = ["Node", "finite", "parse_json"]


def finite(value: object) -> float | None:
    """Return a JSON number as a finite float; None for anything else (also for integers beyond a float)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Node:
    """A JSON value and its place, for errors: ``file: results[3].out_of_place``."""

    value: object
    place: str

    def error(self, reason: str) -> ConfigError:
        """Return the error for `reason` at this place."""
        return ConfigError(f"{self.place.rstrip(': ')}: {reason}")

    def has(self, key: str) -> bool:
        """Return whether this is an object with a value other than null for `key`."""
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def __getitem__(self, key: str) -> Node:
        if not isinstance(self.value, dict):
            raise self.error(f"must be an object with the key {key!r}, not {_short(self.value)}")
        if key not in self.value:
            raise self.error(f"the key {key!r} is missing; is the file complete?")
        return Node(self.value[key], f"{self.place}{'.' if self.place[-1:] not in ' :' else ''}{key}")

    def items(self) -> list[Node]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            raise self.error(f"must be a list, not {_short(self.value)}")
        return [Node(value, f"{self.place}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.error(f"must be a text, not {_short(self.value)}")
        return self.value

    def number(self) -> float:
        """Return a finite number; tools also write them as texts."""
        value = self.value
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.error(f"{_short(value)} is not a number") from None
        number = finite(value)
        if number is None:
            raise self.error(f"must be a finite number, not {_short(value)}")
        return number

    def positive(self) -> float:
        """Return a number above 0."""
        number = self.number()
        if number <= 0:
            raise self.error(f"{_short(self.value)} must be above 0; leave this entry out")
        return number

    def count(self) -> int:
        """Return a whole number of at least 1."""
        number = self.number()
        if number < 1 or number != int(number):
            raise self.error(f"{_short(self.value)} must be a whole number of at least 1")
        return int(number)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_json(source: SourceText, text: str | None = None) -> Node:
    """Return the JSON value in `text` (None: the whole file); raises :class:`ConfigError` with the line."""
    try:
        value: object = json.loads(source.text if text is None else text)
    except json.JSONDecodeError as error:
        raise source.error(
            error.lineno, f"is not valid JSON: {error.msg} (column {error.colno}); is the file complete?"
        ) from None
    except RecursionError:
        raise source.error(None, "is nested too deeply; is it the right file?") from None
    except ValueError as error:  # an integer of thousands of digits
        raise source.error(None, f"is not usable JSON: {error}; correct it") from None
    return Node(value, f"{source.path}: ")
