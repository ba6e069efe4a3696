"""Designs of a study: every combination of values, a list of configurations, or a sample.

``grid`` takes every combination; ``list`` takes the first values of all fields, then the second ones, and so on;
``random`` samples each field independently; ``latin-hypercube`` covers the range of every field evenly (McKay, Beckman
and Conover 1979, Technometrics 21(2); :class:`scipy.stats.qmc.LatinHypercube`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, UnitError, shown
from ddlsim.units import dimension_of, parse

DESIGNS = ("grid", "list", "random", "latin-hypercube")
#: maximum number of points: each is simulated, which takes at least a millisecond, so more are a typing error
MAX_POINTS = 100_000


@checked
@dataclass(frozen=True)
class Range:
    """A range of numbers from which a study samples, as in ``Range("1 Gbit/s", "100 Gbit/s", log=True)``.

    Ranges can be used in a search and with the designs "random" and "latin-hypercube".

    low, high  ends of the range: numbers, or strings with a unit. Samples from a range with a unit are strings with
               four significant digits, such as "12.34 Gbit/s"
    log        whether to sample uniformly on a logarithmic scale
    integer    whether to sample only integers
    """

    low: float | str
    high: float | str
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        low, high = _si(self.low), _si(self.high)
        if isinstance(self.low, str) and isinstance(self.high, str):
            kinds = _dimension(self.low), _dimension(self.high)
            if kinds[0] != kinds[1]:
                raise ConfigError(
                    f"Range({shown(self.low)}, {shown(self.high)}): low is a quantity of {kinds[0]}, but high of "
                    f"{kinds[1]}; use units of the same kind"
                )
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"Range({shown(self.low)}, {shown(self.high)}): low must be below high, and both finite")
        if self.log and low <= 0.0:
            raise ConfigError(f"Range({shown(self.low)}, {shown(self.high)}, log=True): low must be above 0")
        if self.integer and math.ceil(low) > math.floor(high):
            raise ConfigError(f"Range({shown(self.low)}, {shown(self.high)}): must contain at least one integer")

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number, in SI units."""
        low, high = _si(self.low), _si(self.high)
        return (math.ceil(low), math.floor(high)) if self.integer else (low, high)

    def at(self, share: float) -> float | int | str:
        """Return the value at a given fraction of the range, from 0 (`low`) to 1 (`high`)."""
        return self.written(self.number(share))

    def written(self, number: float) -> float | int | str:
        """Return a number of the range as an experiment contains it: as a string with a unit if the bounds have one."""
        units = [_unit(bound) for bound in (self.high, self.low) if isinstance(bound, str)]
        if not units or self.integer:
            return int(number) if self.integer else float(number)
        unit, factor = next(((u, f) for u, f in units if abs(number) >= f), units[-1])
        return f"{number / factor:.4g} {unit}"

    def number(self, share: float) -> float | int:
        """Return the number at a given fraction of the range, from 0 to 1, in SI units."""
        low, high = self.bounds
        half = 0.5 if self.integer else 0.0  # gives every integer the same share of the range
        if self.log:
            start, end = math.log(low - half), math.log(high + half)
            number = math.exp(start + share * (end - start))
        else:
            number = (low - half) + share * ((high + half) - (low - half))
        return min(max(round(number) if self.integer else number, low), high)


#: dotted path, or several with commas -> values, or a mapping from names in the table to values
Vary: TypeAlias = Mapping[str, Sequence[object] | Mapping[str, object] | Range]


def rows_of(
    vary: Mapping[str, Sequence[object] | Range], design: str, n_points: int | None, seed: int
) -> list[dict[str, object]]:
    """Return the settings of each configuration, in the order of the design; values are those in `vary`.

    n_points  number of points to sample ("random" and "latin-hypercube")
    seed      seed of the sample

    Raises ConfigError for an empty design, and for incompatible arguments.
    """
    sampled = design in ("random", "latin-hypercube")
    if sampled and n_points is None:
        raise ConfigError(f"n_points = None: must be a positive integer with design = {design!r}")
    if not sampled and n_points is not None:
        raise ConfigError(f"n_points = {shown(n_points)} has no effect with design = {design!r}; remove n_points")
    for path, values in vary.items():
        if isinstance(values, Range) and not sampled:
            raise ConfigError(
                f"vary[{path!r}] = {shown(values)}: design = {design!r} needs a list of values, not a range; use "
                "design='random' to sample the range"
            )
        if not isinstance(values, Range) and len(values) == 0:
            raise ConfigError(f"vary[{path!r}] is empty; add at least one value, or remove the field")
    if n_points is not None:
        return [
            {
                path: values.at(share) if isinstance(values, Range) else values[int(share * len(values))]
                for (path, values), share in zip(vary.items(), row, strict=True)
            }
            for row in _shares(design, n_points, len(vary), seed).tolist()
        ]
    listed = {path: list(values) for path, values in vary.items() if not isinstance(values, Range)}
    if design == "grid" and math.prod(len(values) for values in listed.values()) > MAX_POINTS:
        n = " x ".join(str(len(values)) for values in listed.values())
        raise ConfigError(
            f"design = 'grid' has {n} points, above the limit of {MAX_POINTS}; use design = 'random' to sample them"
        )
    if design == "list" and len({len(values) for values in listed.values()}) > 1:
        lengths = ", ".join(f"{path}: {len(values)}" for path, values in listed.items())
        raise ConfigError(f"design = 'list' needs the same number of values for every field, got {lengths}")
    rows = itertools.product(*listed.values()) if design == "grid" else zip(*listed.values(), strict=True)
    return [dict(zip(listed, row, strict=True)) for row in rows] or [{}]


def paths_of(key: str) -> list[str]:
    """Return the paths in a key: "model, batch_size" contains two, which change together."""
    return [path.strip() for path in key.split(",")]


def spread(row: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a configuration by single path, since a key may contain several.

    Raises ConfigError if the number of values differs from the number of paths.
    """
    settings: dict[str, object] = {}
    for key, value in row.items():
        paths = paths_of(key)
        values = [value] if len(paths) == 1 else value
        if not isinstance(values, tuple | list) or len(values) != len(paths):
            n_fields = len(paths)
            raise ConfigError(f"vary[{shown(key)}]: {shown(value)} must be a list of {n_fields} values, one per field")
        settings |= zip(paths, values, strict=True)
    return settings


def _shares(design: str, n_points: int, n_fields: int, seed: int) -> npt.NDArray[np.float64]:
    """Return the position of each point in each field's range, shape (n_points, n_fields), in [0, 1)."""
    generator = np.random.default_rng(seed)
    if design == "random" or n_fields == 0:
        return generator.random((n_points, n_fields))
    # the points of scipy.stats.qmc.LatinHypercube: one in each of n_points equal parts of every field's range
    generator = generator.spawn(1)[0]
    within = generator.uniform(size=(n_points, n_fields))
    parts = np.tile(np.arange(1, n_points + 1), (n_fields, 1))
    for row in parts:
        generator.shuffle(row)
    return np.asarray((parts.T - within) / n_points)


def _unit(text: str) -> tuple[str, float]:
    """Return the unit of a text such as "25 Gbit/s", and the SI value of 1 unit."""
    unit = re.sub(r"^\s*[-+]?[\d.]+([eE][-+]?\d+)?", "", text).strip()
    return unit, _si(f"1 {unit}")


def _dimension(text: str) -> str:
    if dimension := dimension_of(text):
        return dimension
    raise UnitError(
        f"Range: {shown(text)} is not a number with a known unit; use a value such as '25 Gbit/s' or '10 us'"
    )


def _si(value: float | str) -> float:
    """Return a number, or the SI value of a text with any unit."""
    return parse(value, _dimension(value)) if isinstance(value, str) else float(value)
