"""Validation of user-supplied numbers, with the location in error messages."""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

from ddlsim.arguments import integer, quantity
from ddlsim.errors import ConfigError, shown

#: a cluster is built in memory, node by node and link by link (half a minute and 1.5 GB at these sizes); more is a slip
MAX_NODES, MAX_LINKS = 500_000, 2_000_000

#: how many of something there are: every node is built in memory
Places = Annotated[int, integer(1, MAX_NODES)]
#: What a Python caller may pass for a bandwidth or a time: SI float or text with a unit.
Quantity: TypeAlias = float | str


def positive(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float above 0, or raise :class:`ConfigError` naming `where`."""
    return cast(float, quantity(dimension, si=True)(value, where))


def nonnegative(value: object, dimension: str, where: str) -> float:
    """Return `value` as a finite SI float of at least 0, or raise :class:`ConfigError` naming `where`."""
    return cast(float, quantity(dimension, zero=True, si=True)(value, where))


def limit_size(n_nodes: int, n_links: int) -> None:
    """Let this process build no larger clusters from now on: the explorer's, which web addresses ask for."""
    global MAX_NODES, MAX_LINKS  # not an argument: every reader and generator would have to hand it on
    MAX_NODES, MAX_LINKS = n_nodes, n_links


def check_size(n_nodes: int, n_links: int, where: str) -> None:
    """Raise :class:`ConfigError` if a cluster of `n_nodes` nodes and `n_links` directed links is too large to build."""
    for n, most, what in ((n_nodes, MAX_NODES, "nodes"), (n_links, MAX_LINKS, "links")):
        if n > most:
            raise ConfigError(
                f"{where}: {shown(n)} {what} exceed the limit of {most} for clusters in memory; "
                f"simulate a part of the cluster"
            )
