"""SimGrid's units: ``10Gbps``, ``1.5GiBps``, ``50us``, ``98.095Mf``.

As https://simgrid.org/doc/latest/XML_reference.html and simgrid.dtd list them. K and k are 1000, Ki is 1024; b is a
bit, B a byte. Numbers without a unit, from before version 4, are bytes/s, seconds and flop/s.
"""

from __future__ import annotations

import re

from ddlsim.imports.xml_tree import Element
from ddlsim.units import LARGEST, in_range

FASTEST = 1e30
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}
_WORDS = {"kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18, "zetta": 1e21, "yotta": 1e24}
_RATES = {
    f"{prefix}{unit}": factor * size
    for unit, size in (("Bps", 1.0), ("bps", 0.125))
    for prefix, factor in (_DECIMAL | _BINARY).items()
}
_TIMES = {
    "ps": 1e-12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
}  # fmt: skip
_SPEEDS = {f"{prefix}f": factor for prefix, factor in _DECIMAL.items()} | {
    f"{word}flops": factor for word, factor in (_WORDS | {"": 1.0}).items()
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def _quantity(element: Element, name: str, text: str, units: dict[str, float], default: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise element.error(f"{name} = {text!r} is not a quantity; write it like {example!r}")
    unit = match[2] or default
    if unit not in units:
        raise element.error(f"{name} = {text!r} has the unknown unit {unit!r}; write it like {example!r}")
    value = float(match[1]) * units[unit]
    if not (in_range(value) and value >= 0):
        rule = f"must not be negative, nor beyond {LARGEST:g} in SI units"
        raise element.error(f"{name} = {text!r} {rule}; write it like {example!r}")
    return value


def bandwidth(element: Element, name: str) -> float:
    """Return the attribute `name` in bytes/s; it must be above 0."""
    value = _quantity(element, name, element[name], _RATES, "Bps", "10Gbps")
    if value == 0:
        raise element.error(f"{name} = {element[name]!r} must be above 0; write it like '10Gbps'")
    return value


def latency(element: Element, name: str, default: str = "0s") -> float:
    """Return the attribute `name` in seconds."""
    return _quantity(element, name, element.get(name, default), _TIMES, "s", "50us")


def speed(element: Element, name: str = "speed") -> float:
    """Return the attribute in flop/s: of several, one per ``pstate``, the one in use, times ``availability``."""
    if name not in element.attributes and "power" in element.attributes:  # its name before version 4
        name = "power"
    states, state = element[name].split(","), element.integer("pstate", 0)
    if not 0 <= state < len(states):
        raise element.error(f"pstate = {state}: {name} = {element[name]!r} has the states 0 to {len(states) - 1}")
    value = _quantity(element, name, states[state], _SPEEDS, "f", "1Gf")
    value *= _quantity(element, "availability", element.get("availability", "1"), {"": 1.0}, "", "0.5")
    if not 1 <= value <= FASTEST:  # speeds are divided by each other
        what = f"{name} = {element[name]!r} (pstate {state}, times availability)"
        raise element.error(f"{what} must be from 1 to {FASTEST:g} flop/s; write it like '1Gf'")
    return value
