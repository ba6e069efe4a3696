"""Numbers that users write: checked once, with errors that say where."""

from __future__ import annotations

import math
import numbers
from typing import TypeAlias

from ddlsim import units
from ddlsim.errors import ConfigError, UnitError

__all__ = ["Quantity", "count", "fraction", "nonnegative", "positive"]

#: What a Python caller may pass for a bandwidth or a time: SI float or text with a unit.
Quantity: TypeAlias = float | str


def _number(value: object, dimension: str | None, where: str, rule: str) -> float:
    example = units.DIMENSIONS[dimension][2] if dimension else "1.0"
    if isinstance(value, str) and dimension is not None:
        try:
            return units.parse(value, dimension)
        except UnitError as error:
            raise UnitError(f"{where}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{where} = {value!r} is not a number; write {rule} like {example!r}")
    return float(value)


def positive(value: object, dimension: str | None, where: str) -> float:
    """Return `value` as a finite SI float above 0, or raise :class:`ConfigError` naming `where`."""
    example = units.DIMENSIONS[dimension][2] if dimension else "1.0"
    number = _number(value, dimension, where, "a value")
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{where} = {value!r} must be finite and greater than 0; write it like {example!r}")
    return number


def nonnegative(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float of at least 0, or raise :class:`ConfigError` naming `where`."""
    number = _number(value, dimension, where, "a value")
    if not (math.isfinite(number) and number >= 0):
        example = units.DIMENSIONS[dimension][2]
        raise ConfigError(f"{where} = {value!r} must be finite and not negative; write it like {example!r}")
    return number


def fraction(value: object, where: str) -> float:
    """Return `value` as a float in (0, 1], or raise :class:`ConfigError` naming `where`."""
    number = _number(value, None, where, "a share")
    if not 0 < number <= 1:
        raise ConfigError(f"{where} = {value!r} must lie in (0, 1]; write the usable share like 0.94")
    return number


def count(value: object, where: str, *, least: int = 1) -> int:
    """Return `value` as an int of at least `least`, or raise :class:`ConfigError` naming `where`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{where} = {value!r} must be a whole number of at least {least}")
    return int(value)
