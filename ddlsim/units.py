"""Conversion of texts with units to SI floats.

``parse("25 Gbit/s", "bandwidth")`` returns bytes per second, ``parse("10 us", "time")`` seconds. Decimal prefixes are
added to the exponent of the number, so ``10 us`` is exactly ``1e-05``; the table below defines the base units. GB is
1e9 bytes and GiB is 2**30 bytes, everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re

from ddlsim.errors import UnitError, shown

#: bounds on the magnitude of nonzero numbers, far beyond any real one: products and quotients of two stay finite
SMALLEST, LARGEST = 1e-100, 1e100

_NUMBER = re.compile(r"([-+]?[\d.,_]*)(?:[eE]([-+]?\d+))?\s*")
_NOT_FINITE = re.compile(r"[-+]?(inf|nan)", re.IGNORECASE)
#: prefix -> exponent of ten
_DECIMAL = {"": 0, "c": -2, "K": 3, "\N{MICRO SIGN}": -6, "\N{GREEK SMALL LETTER MU}": -6}
_DECIMAL |= {prefix: 3 * i for i, prefix in enumerate("kMGTPEZYRQ", 1)}
_DECIMAL |= {prefix: -3 * i for i, prefix in enumerate("munpfazyrq", 1)}
#: prefix -> factor
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPEZYRQ", 1)}
#: dimensions without quantities below one base unit: in "100 mbit/s", m is a typing error for M
_NO_FRACTIONS = ("bandwidth", "bytes", "flops")
#: prefixes in suggestions for misspelt units
_PREFIXES = ("", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti")
_LONGEST = 100  # characters
_NOUN = {"bytes": "size", "flops": "compute rate"}

#: dimension -> (SI unit, {base unit: factor to the SI unit}, an example for error messages)
DIMENSIONS: dict[str, tuple[str, dict[str, float], str]] = {
    "bandwidth": (
        "byte/s",
        {"bit/s": 0.125, "b/s": 0.125, "bps": 0.125, "byte/s": 1.0, "B/s": 1.0, "Bps": 1.0},
        "25 Gbit/s",
    ),
    "time": (
        "s",
        {
            **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
            **dict.fromkeys(("min", "minute", "minutes"), 60.0),
            **dict.fromkeys(("h", "hour", "hours"), 3600.0),
            **dict.fromkeys(("d", "day", "days"), 86400.0),
            **dict.fromkeys(("week", "weeks"), 7 * 86400.0),
            **dict.fromkeys(("y", "year", "years"), 365 * 86400.0),
        },
        "10 us",
    ),
    "bytes": ("byte", {"B": 1.0, "byte": 1.0, "bytes": 1.0, "bit": 0.125}, "100 MB"),
    "flops": ("FLOP/s", {"FLOP/s": 1.0, "FLOPS": 1.0, "flop/s": 1.0}, "15.7 TFLOP/s"),
    "rate": ("1/s", {"/s": 1.0, "1/s": 1.0, "images/s": 1.0, "samples/s": 1.0, "sequences/s": 1.0}, "300 images/s"),
    "power": ("W", {"W": 1.0}, "300 W"),
    "price": ("USD/s", {"USD/h": 1.0 / 3600.0, "USD/s": 1.0}, "3.06 USD/h"),
}


#: dimension -> output units, besides the base units; the shortest exact text is used
_WRITTEN: dict[str, tuple[str, ...]] = {
    "time": ("us", "ms", "s", "h"),
    "bytes": ("GiB", "MiB", "KiB", "GB", "MB", "kB", "B"),
    "bandwidth": ("Gbit/s", "Mbit/s", "GB/s", "MB/s", "B/s"),
    "price": ("USD/h", "USD/s"),
    "flops": ("TFLOP/s", "GFLOP/s", "FLOP/s"),
}


def in_range(number: float) -> bool:
    """Return whether `number` is 0, or has a magnitude from :data:`SMALLEST` to :data:`LARGEST` (so it is finite)."""
    return number == 0.0 or SMALLEST <= abs(number) <= LARGEST


def as_number(text: str) -> float | None:
    """Return the number that a text consists of; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _prefix_and_unit(written: str) -> tuple[str, str]:
    """Return a prefix and a base unit of any dimension ("": none); "" and `written` if the text is neither."""
    units = {"", *(unit for _, factors, _ in DIMENSIONS.values() for unit in factors)}
    for n in range(3):
        prefix, unit = written[:n], written[n:]
        if unit in units and (prefix in _DECIMAL or prefix in _BINARY):
            return prefix, unit
    return "", written


@functools.lru_cache(maxsize=4096)
def parse(text: str, dimension: str, where: str = "") -> float:
    """Convert `text` to an SI float of the given `dimension` (a key of :data:`DIMENSIONS`).

    Raises :class:`UnitError` if the unit is missing, unknown or of another dimension, or if the number is not
    :func:`in_range`. The message begins with `where`, the name of the field.
    """
    si_unit, factors, example = DIMENSIONS[dimension]
    noun = _NOUN.get(dimension, dimension)
    at = f"{where}: {shown(text)}" if where else shown(text)
    if len(text) > _LONGEST:
        raise UnitError(f"{at} is too long for a {noun}; write it like {example!r}")
    match = _NUMBER.match(text.strip())
    assert match is not None  # even if the text begins with no number
    number, exponent, written = match[1], int(match[2] or 0), text.strip()[match.end() :]
    if "," in number:
        raise UnitError(f"{at} contains a comma; write decimals with a point and thousands without a separator")
    prefix, unit = _prefix_and_unit(written)
    try:
        value = float(f"{number}e{exponent + _DECIMAL.get(prefix, 0)}") * _BINARY.get(prefix, 1.0)
    except ValueError:
        if not _NOT_FINITE.match(text.strip()):
            raise UnitError(f"{at} is not a {noun}; write it like {example!r}") from None
        value = math.inf
    if not math.isfinite(value):
        raise UnitError(f"{at} is not finite; use a {noun} such as {example!r}")
    if unit in factors:
        if dimension in _NO_FRACTIONS and _DECIMAL.get(prefix, 0) < 0:
            raise UnitError(
                f"{at}: {prefix!r} before {unit!r} is a prefix below 1 ('m' is 1e-3, 'M' is 1e6); "
                f"write a {noun} such as {example!r}"
            )
        if not in_range(value * factors[unit]):
            raise UnitError(
                f"{at} is out of range ({SMALLEST:g} to {LARGEST:g} {si_unit}); use a {noun} such as {example!r}"
            )
        return value * factors[unit]
    if not written:
        raise UnitError(f"{at} has no unit; write a {noun} such as {example!r} (SI unit: {si_unit})")
    for other, (_, other_factors, _) in DIMENSIONS.items():
        if unit in other_factors:
            raise UnitError(f"{at} is a {_NOUN.get(other, other)}, not a {noun}; write it like {example!r}")
    hint = _hint(written, dimension)
    raise UnitError(f"{at} has the unknown unit {written!r}{hint}; write a {noun} such as {example!r}")


def _hint(written: str, dimension: str) -> str:
    """Return " (did you mean ...?)" for a unit with other letters, a plural or another abbreviation, else ""."""
    spellings = [(prefix + unit, prefix + unit) for unit in DIMENSIONS[dimension][1] for prefix in _PREFIXES]
    if dimension == "bytes":  # "1 Gb" may be either
        spellings += [(f"{prefix}b", f"{prefix}bit") for prefix in _PREFIXES]
    spellings += [("m", "ms"), ("m", "min")] if dimension == "time" else []
    near: dict[float, str] = {}  # one unit per size
    for spelling, unit in spellings:
        if _plain(spelling) == _plain(written):
            near.setdefault(parse(f"1 {unit}", dimension), unit)
    return f" (did you mean {' or '.join(map(repr, near.values()))}?)" if near else ""


def _plain(unit: str) -> str:
    """Return a unit in lower case and singular, with one abbreviation for seconds and one for hours."""
    words = re.sub(r"(?<=[a-z]{2})s\b", "", unit.lower())
    return re.sub(r"\bhr\b|\bhour\b", "h", re.sub(r"\bsec\b|\bsecond\b", "s", words))


def dimension_of(text: str) -> str:
    """Return the dimension of a text with a unit, such as "bandwidth" for "25 Gbit/s"; "" if no unit is known."""
    for dimension in DIMENSIONS:
        with contextlib.suppress(UnitError):
            parse(text, dimension)
            return dimension
    return ""


def si(value: float | str, dimension: str) -> float:
    """Convert a text with a unit with :func:`parse`; return a number unchanged."""
    return parse(value, dimension) if isinstance(value, str) else float(value)


def quantity_text(value: float | str, dimension: str) -> str:
    """Return the shortest text with a unit that represents a number in SI units exactly."""
    number = si(value, dimension)
    units = dict.fromkeys((*_WRITTEN.get(dimension, ()), *DIMENSIONS[dimension][1]))
    numbers = ((number / parse(f"1 {unit}", dimension), unit) for unit in units)
    texts = [(f"{n:.{digits}g} {unit}", not 1.0 <= n < 1000.0) for n, unit in numbers for digits in (12, 17)]
    exact = [(text, far) for text, far in texts if "e" not in text and parse(text, dimension) == number]
    shortest = min(exact, key=lambda choice: (len(choice[0]), choice[1]), default=None)
    return f"{number!r} {DIMENSIONS[dimension][0]}" if shortest is None else shortest[0]
