"""Numbers that users write: checked once, with errors that say where."""

from __future__ import annotations

import math
import numbers
from typing import Annotated, TypeAlias

from ddlsim import units
from ddlsim.arguments import whole
from ddlsim.errors import ConfigError, UnitError, shown

#: a cluster is built in memory, node by node and link by link (half a minute and 1.5 GB at these sizes); more is a slip
MAX_NODES, MAX_LINKS = 500_000, 2_000_000

#: how many of something there are: every node is built in memory
Places = Annotated[int, whole(1, MAX_NODES)]
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
        raise ConfigError(f"{where} = {shown(value)} is not a number; write {rule} like {example!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isfinite(number) and not units.in_range(number):
        raise ConfigError(
            f"{where} = {shown(value)} is out of range ({units.SMALLEST:g} to {units.LARGEST:g}); "
            f"write {rule} like {example!r}"
        )
    return number


def positive(value: object, dimension: str | None, where: str) -> float:
    """Return `value` as a finite SI float above 0, or raise :class:`ConfigError` naming `where`."""
    example = units.DIMENSIONS[dimension][2] if dimension else "1.0"
    number = _number(value, dimension, where, "a value")
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{where} = {shown(value)} must be finite and greater than 0; write it like {example!r}")
    return number


def nonnegative(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float of at least 0, or raise :class:`ConfigError` naming `where`."""
    number = _number(value, dimension, where, "a value")
    if not (math.isfinite(number) and number >= 0):
        example = units.DIMENSIONS[dimension][2]
        raise ConfigError(f"{where} = {shown(value)} must be finite and not negative; write it like {example!r}")
    return number


def fraction(value: object, where: str) -> float:
    """Return `value` as a float in (0, 1], or raise :class:`ConfigError` naming `where`."""
    number = _number(value, None, where, "a share")
    if not 0 < number <= 1:
        raise ConfigError(f"{where} = {shown(value)} must lie in (0, 1]; write the usable share like 0.94")
    return number


def limit_size(n_nodes: int, n_links: int) -> None:
    """Let this process build no larger clusters from now on: the explorer's, which web addresses ask for."""
    global MAX_NODES, MAX_LINKS  # not an argument: every reader and generator would have to hand it on
    MAX_NODES, MAX_LINKS = n_nodes, n_links


def check_size(n_nodes: int, n_links: int, where: str) -> None:
    """Raise :class:`ConfigError` if a cluster of so many nodes and (directed) links is larger than can be built."""
    for n, most, what in ((n_nodes, MAX_NODES, "nodes"), (n_links, MAX_LINKS, "links")):
        if n > most:
            raise ConfigError(
                f"{where}: {shown(n)} {what} are more than {most}, the most that are built in memory; "
                f"simulate a part of the cluster"
            )
