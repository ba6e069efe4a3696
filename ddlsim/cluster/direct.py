"""Networks without switches: the machines themselves forward traffic. Parameters as in `generators`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from ddlsim.arguments import checked
from ddlsim.cluster.nodes import Graph, Host, Interior
from ddlsim.cluster.parts import PLAIN, Link, checked_link, start
from ddlsim.cluster.quantity import MAX_NODES, Places, Quantity
from ddlsim.errors import ConfigError, shown

MAX_DIMS = 20  # of a torus: with more, all but a few have size 1


def _direct(
    kind: str, sizes: Sequence[Places], pairs: Iterable[tuple[int, int]], n_pairs: int, link: Link, host: Interior,
    *, grid: bool,
) -> Graph:  # fmt: skip
    """Return machines joined without switches; machines with several NICs use them in turn."""
    n_hosts = math.prod(sizes)
    graph, hosts = start(kind, "shortest", n_hosts, host, n_links=2 * n_pairs)
    if grid:  # with one node per place routes follow by formula
        graph.graph |= {"grid": list(sizes)} | ({"routing": "dimension-order"} if isinstance(host, Host) else {})
    used = [0] * n_hosts
    for a, b in pairs:
        ends = [hosts[i][used[i] % len(hosts[i])] for i in (a, b)]
        link.join(graph, ends[0], ends[1], "link")
        used[a] += 1
        used[b] += 1
    return graph


def _grid_pairs(sizes: Sequence[Places]) -> Iterator[tuple[int, int]]:
    """Yield the neighbours on a torus, one dimension after the other; nodes in row-major order."""
    for dim, size in enumerate(sizes):
        stride = math.prod(sizes[dim + 1 :])
        for node in range(math.prod(sizes)):
            place = node // stride % size
            if place + 1 < size:
                yield node, node + stride
            elif size > 2:  # the way round; with two, it would be the same link again
                yield node, node - place * stride


def _n_pairs(sizes: Sequence[Places]) -> int:
    """Return how many neighbours `_grid_pairs` yields."""
    n = math.prod(sizes)
    return sum(0 if size == 1 else n // 2 if size == 2 else n for size in sizes)


@checked
def ring(
    n_hosts: Places,
    *,
    bandwidth: Quantity,
    latency: Quantity,
    efficiency: float = 1.0,
    reverse_bandwidth: Quantity | None = None,
    shared: bool = False,
    host: Interior = PLAIN,
) -> Graph:
    """Return machines joined in a circle, forwarding. `reverse_bandwidth` is that from i + 1 to i."""
    link = checked_link(bandwidth, latency, efficiency, reverse_bandwidth, shared)
    sizes = [n_hosts]
    return _direct("ring", sizes, _grid_pairs(sizes), _n_pairs(sizes), link, host, grid=True)


@checked
def line(
    n_hosts: Places,
    *,
    bandwidth: Quantity,
    latency: Quantity,
    efficiency: float = 1.0,
    reverse_bandwidth: Quantity | None = None,
    shared: bool = False,
    host: Interior = PLAIN,
) -> Graph:
    """Return machines joined in a row, forwarding. `reverse_bandwidth` is that from i + 1 to i."""
    link = checked_link(bandwidth, latency, efficiency, reverse_bandwidth, shared)
    n = n_hosts
    return _direct("line", [n], itertools.pairwise(range(n)), n - 1, link, host, grid=False)


@checked
def fully_connected(
    n_hosts: Places,
    *,
    bandwidth: Quantity,
    latency: Quantity,
    efficiency: float = 1.0,
    reverse_bandwidth: Quantity | None = None,
    shared: bool = False,
    host: Interior = PLAIN,
) -> Graph:
    """Return machines with a link between any two. `reverse_bandwidth` is that towards the lower number."""
    link = checked_link(bandwidth, latency, efficiency, reverse_bandwidth, shared)
    n = n_hosts
    pairs = itertools.combinations(range(n), 2)
    return _direct("fully-connected", [n], pairs, n * (n - 1) // 2, link, host, grid=False)


@checked
def torus(
    sizes: Sequence[Places], *, bandwidth: Quantity, latency: Quantity, efficiency: float = 1.0, host: Interior = PLAIN
) -> Graph:
    """Return a torus of machines, e.g. sizes (8, 8) or (4, 4, 4), numbered in row-major order.

    Routes go one dimension after the other, the first one first. A dimension of size 2 has one link, not two.
    """
    link = checked_link(bandwidth, latency, efficiency)
    if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= MAX_DIMS:
        raise ConfigError(f"sizes = {shown(sizes)} must be a list of 1 to {MAX_DIMS} sizes like [8, 8]")
    checked = list(sizes)
    return _direct("torus", checked, _grid_pairs(checked), _n_pairs(checked), link, host, grid=True)


@checked
def hypercube(
    n_dims: Places, *, bandwidth: Quantity, latency: Quantity, efficiency: float = 1.0, host: Interior = PLAIN
) -> Graph:
    """Return 2 ** n_dims machines, joined where their numbers differ in one bit (highest routed first)."""
    if n_dims > MAX_NODES.bit_length():
        raise ConfigError(f"n_dims = {n_dims} makes 2 ** {n_dims} machines, more than {MAX_NODES}; lower it")
    sizes = [2] * n_dims
    link = checked_link(bandwidth, latency, efficiency)
    return _direct("hypercube", sizes, _grid_pairs(sizes), _n_pairs(sizes), link, host, grid=True)
