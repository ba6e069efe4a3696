"""Checks of what users give to strategies; every message names the field, the value and the rule."""

from __future__ import annotations

import math

from ddlsim.errors import ConfigError
from ddlsim.units import parse

__all__ = ["quantity", "whole"]


def whole(value: object, where: str) -> int:
    """Return `value` if it is a whole number of at least 1, else raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} = {value!r}: must be a whole number of at least 1")
    return value


def quantity(value: object, dimension: str, where: str, example: str, *, zero: bool = False) -> float:
    """Return a number, or a text with unit, as SI float that is finite and above 0 (or 0, with `zero`)."""
    if isinstance(value, str):
        number = parse(value, dimension, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ConfigError(f"{where} = {value!r}: must be a number or a text like {example!r}")
    if not math.isfinite(number) or number < 0.0 or (number == 0.0 and not zero):
        rule = "not negative" if zero else "above 0"
        raise ConfigError(f"{where} = {value!r}: must be finite and {rule}, e.g. {example!r}")
    return number
