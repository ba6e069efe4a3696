"""Validation of user-supplied numbers, with the location in error messages."""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

from ddlsim.arguments import integer, quantity
from ddlsim.errors import ConfigError, shown

#: size limit: clusters are built in memory (half a minute and 1.5 GB at this size); more is a typing error
MAX_NODES, MAX_LINKS = 500_000, 2_000_000

#: counts of nodes or links, which are built in memory
Places = Annotated[int, integer(1, MAX_NODES)]
#: A bandwidth or a time as an argument: SI float or text with a unit.
Quantity: TypeAlias = float | str


def positive(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float above 0, or raise :class:`ConfigError` naming `where`."""
    return cast(float, quantity(dimension, si=True)(value, where))


def nonnegative(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float of at least 0, or raise :class:`ConfigError` naming `where`."""
    return cast(float, quantity(dimension, zero=True, si=True)(value, where))


def limit_size(n_nodes: int, n_links: int) -> None:
    """Lower the size limits of clusters in this process, for the explorer, whose clusters come from web addresses."""
    global MAX_NODES, MAX_LINKS  # an argument would pass through every reader and generator
    MAX_NODES, MAX_LINKS = n_nodes, n_links


def check_size(n_nodes: int, n_links: int, where: str) -> None:
    """Raise :class:`ConfigError` if a cluster of `n_nodes` nodes and `n_links` directed links is too large to build."""
    for n, most, what in ((n_nodes, MAX_NODES, "nodes"), (n_links, MAX_LINKS, "links")):
        if n > most:
            raise ConfigError(
                f"{where}: {shown(n)} {what} exceed the limit of {most} for clusters in memory; "
                f"simulate a part of the cluster"
            )
