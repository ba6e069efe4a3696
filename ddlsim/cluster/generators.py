"""Topology generators: functions returning the networkx graph of a cluster.

All of them take the machine that stands at each place (`host`, see :mod:`ddlsim.cluster.nodes`), and
bandwidth (per direction, float bytes/s or text like "25 Gbit/s"), latency (float seconds or text) and
efficiency (share of the bandwidth left to payload) of the link from a machine to the network, of kind "nic".
Links between switches are of kind "trunk", links between machines without a switch of kind "link". A machine
with several NICs gets one such link per NIC.

Every generator raises :class:`ddlsim.errors.ConfigError` for a number that makes no sense, naming the
parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import networkx as nx

from ddlsim.arguments import Bandwidth, checked, whole
from ddlsim.cluster.nodes import Graph, Host, Interior, Latency, add_host, connect, size_of
from ddlsim.cluster.quantity import MAX_NODES, Places, Quantity, check_size, fraction, nonnegative, positive
from ddlsim.errors import ConfigError, shown

#: the nodes of a machine to which its NICs attach
Ports: TypeAlias = list[str]

#: the machine that stands at each place when nothing else is asked for
PLAIN = Host()


@dataclass(frozen=True)
class Link:
    """A checked pair of links: SI floats."""

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    reverse_bandwidth: float | None = None
    shared: bool = False

    def join(self, graph: Graph, a: str, b: str, kind: str) -> None:
        """Add the pair between `a` and `b`."""
        connect(
            graph, a, b, kind, self.bandwidth, self.latency,
            efficiency=self.efficiency, reverse_bandwidth=self.reverse_bandwidth, shared=self.shared,
        )  # fmt: skip


def checked_link(
    bandwidth: Quantity,
    latency: Quantity,
    efficiency: float = 1.0,
    reverse_bandwidth: Quantity | None = None,
    shared: bool = False,
    what: str = "",
) -> Link:
    if shared and reverse_bandwidth is not None:
        raise ConfigError(f"reverse_bandwidth = {reverse_bandwidth!r} has no effect on a shared link; remove one")
    return Link(
        positive(bandwidth, "bandwidth", f"{what}bandwidth"),
        nonnegative(latency, "time", f"{what}latency"),
        fraction(efficiency, "efficiency"),
        None if reverse_bandwidth is None else positive(reverse_bandwidth, "bandwidth", "reverse_bandwidth"),
        shared,
    )


def trunk_of(link: Link, bandwidth: Quantity | None, latency: Quantity | None, what: str = "trunk_") -> Link:
    """Return the link between switches: what is not given is as on the machines' links."""
    return Link(
        link.bandwidth if bandwidth is None else positive(bandwidth, "bandwidth", f"{what}bandwidth"),
        link.latency if latency is None else nonnegative(latency, "time", f"{what}latency"),
        link.efficiency,
    )


def oversubscribed(
    link: Link, n_down: int, n_up: int, oversubscription: float, bandwidth: Quantity | None, latency: Quantity | None
) -> Link:
    """Return the trunk of a switch with `n_down` links to machines and `n_up` trunks."""
    factor = positive(oversubscription, None, "oversubscription")
    if bandwidth is not None and factor != 1:
        raise ConfigError(
            f"oversubscription = {oversubscription!r} and trunk_bandwidth = {bandwidth!r} "
            f"say the same thing twice; remove one"
        )
    trunk = trunk_of(link, bandwidth, latency)
    return trunk if bandwidth is not None else replace(trunk, bandwidth=link.bandwidth * n_down / (n_up * factor))


def start(
    kind: str, routing: str, n_hosts: int, host: Interior, *, n_switches: int = 0, n_links: int = 0
) -> tuple[Graph, list[Ports]]:
    """Return a graph with the machines h0, h1, ... in it, and their ports.

    Raises ConfigError if these and `n_switches` and `n_links` more are too many to be built.
    """
    nodes, links = size_of(host)
    check_size(n_hosts * nodes + n_switches, n_hosts * links + n_links, f"{kind} of {n_hosts} machines")
    graph: Graph = nx.MultiDiGraph(name=f"{kind}-{n_hosts}", routing=routing)
    return graph, [add_host(graph, f"h{i}", host) for i in range(n_hosts)]


def add_switch(graph: Graph, name: str) -> str:
    graph.add_node(name, kind="switch")
    return name


# ---------------------------------------------------------------- direct networks

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
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    reverse_bandwidth: Bandwidth | None = None,
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
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    reverse_bandwidth: Bandwidth | None = None,
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
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    reverse_bandwidth: Bandwidth | None = None,
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
    sizes: Sequence[Places], *, bandwidth: Bandwidth, latency: Latency, efficiency: float = 1.0, host: Interior = PLAIN
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
    n_dims: Places, *, bandwidth: Bandwidth, latency: Latency, efficiency: float = 1.0, host: Interior = PLAIN
) -> Graph:
    """Return 2 ** n_dims machines, joined where their numbers differ in one bit (highest routed first)."""
    if n_dims > MAX_NODES.bit_length():
        raise ConfigError(f"n_dims = {n_dims} makes 2 ** {n_dims} machines, more than {MAX_NODES}; lower it")
    sizes = [2] * n_dims
    link = checked_link(bandwidth, latency, efficiency)
    return _direct("hypercube", sizes, _grid_pairs(sizes), _n_pairs(sizes), link, host, grid=True)


# ---------------------------------------------------------------- switched networks


def _n_nics(host: Interior) -> int:
    return 1 if isinstance(host, Host) else host.n_nics


@checked
def star(
    n_hosts: Places,
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    reverse_bandwidth: Bandwidth | None = None,
    shared: bool = False,
    host: Interior = PLAIN,
) -> Graph:
    """Return `n_hosts` machines on one switch (non-blocking inside).

    `reverse_bandwidth` is that from the switch to the machine, if it differs; `shared` makes the links half
    duplex.
    """
    link = checked_link(bandwidth, latency, efficiency, reverse_bandwidth, shared)
    n_nics = _n_nics(host)
    graph, hosts = start("star", "shortest", n_hosts, host, n_switches=1, n_links=2 * n_hosts * n_nics)
    switch = add_switch(graph, "switch")
    for port in itertools.chain(*hosts):
        link.join(graph, port, switch, "nic")
    return graph


@checked
def leaf_spine(
    n_leaves: Places,
    hosts_per_leaf: Places,
    n_spines: Places,
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    oversubscription: float = 1.0,
    trunk_bandwidth: Bandwidth | None = None,
    trunk_latency: Latency | None = None,
    rail_optimised: bool = False,
    routing: str = "d-mod-k",
    host: Interior = PLAIN,
) -> Graph:
    """Return a two-level Clos network: every leaf switch has a trunk to every spine switch.

    A trunk has `trunk_bandwidth`, or what lets the leaf's machines use 1/oversubscription of their bandwidth
    through all spines together. With `rail_optimised`, NIC j of each machine of a group of `hosts_per_leaf`
    goes to the group's leaf j (so `n_leaves` must be a multiple of the number of NICs).
    """
    link = checked_link(bandwidth, latency, efficiency)
    n_nics = _n_nics(host)
    rails = n_nics if rail_optimised else 1
    if n_leaves % rails:
        raise ConfigError(f"n_leaves = {n_leaves} must be a multiple of the {rails} NICs of a machine on rails")
    n_down = hosts_per_leaf * n_nics // rails
    trunk = oversubscribed(link, n_down, n_spines, oversubscription, trunk_bandwidth, trunk_latency)
    n_hosts = n_leaves // rails * hosts_per_leaf
    n_links = 2 * (n_hosts * n_nics + n_leaves * n_spines)
    graph, hosts = start("leaf-spine", routing, n_hosts, host, n_switches=n_leaves + n_spines, n_links=n_links)
    leaves = [add_switch(graph, f"leaf{i}") for i in range(n_leaves)]
    spines = [add_switch(graph, f"spine{i}") for i in range(n_spines)]
    for i, ports in enumerate(hosts):
        for j, port in enumerate(ports):
            link.join(graph, port, leaves[i // hosts_per_leaf * rails + j % rails], "nic")
    for leaf, spine in itertools.product(leaves, spines):
        trunk.join(graph, leaf, spine, "trunk")
    return graph


@checked
def fat_tree(
    k: Annotated[int, whole(2, MAX_NODES)],
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    trunk_bandwidth: Bandwidth | None = None,
    trunk_latency: Latency | None = None,
    routing: str = "d-mod-k",
    host: Interior = PLAIN,
) -> Graph:
    """Return the k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008): k**3 / 4 machines.

    k pods of k/2 edge and k/2 aggregation switches; aggregation switch j of every pod reaches the core
    switches j*k/2 ... j*k/2 + k/2 - 1.
    """
    if k % 2:
        raise ConfigError(f"k = {k} must be even: half of a switch's ports go up")
    half = k // 2
    link = checked_link(bandwidth, latency, efficiency)
    trunk = trunk_of(link, trunk_bandwidth, trunk_latency)
    n_nics = _n_nics(host)
    n_hosts, n_links = k * half * half, 2 * k * half * half * (n_nics + 2)
    graph, hosts = start("fat-tree", routing, n_hosts, host, n_switches=2 * k * half + half * half, n_links=n_links)
    edges = [add_switch(graph, f"edge{pod}_{i}") for pod in range(k) for i in range(half)]
    middles = [add_switch(graph, f"agg{pod}_{i}") for pod in range(k) for i in range(half)]
    cores = [add_switch(graph, f"core{i}_{j}") for i in range(half) for j in range(half)]
    for i, ports in enumerate(hosts):
        for port in ports:
            link.join(graph, port, edges[i // half], "nic")
    for pod, i, j in itertools.product(range(k), range(half), range(half)):
        trunk.join(graph, edges[pod * half + i], middles[pod * half + j], "trunk")
    for pod, i, j in itertools.product(range(k), range(half), range(half)):
        trunk.join(graph, middles[pod * half + i], cores[i * half + j], "trunk")
    return graph


@checked
def racks(
    n_racks: Places,
    hosts_per_rack: Places,
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    oversubscription: float = 1.0,
    trunk_bandwidth: Bandwidth | None = None,
    trunk_latency: Latency | None = None,
    host: Interior = PLAIN,
) -> Graph:
    """Return racks with a switch each and one trunk to a core switch; two racks have a trunk between them
    instead.

    The trunk has `trunk_bandwidth`, or 1/oversubscription of what the rack's machines have together.
    """
    link = checked_link(bandwidth, latency, efficiency)
    n_nics = _n_nics(host)
    trunk = oversubscribed(link, hosts_per_rack * n_nics, 1, oversubscription, trunk_bandwidth, trunk_latency)
    n_hosts = n_racks * hosts_per_rack
    n_links = 2 * (n_hosts * n_nics + n_racks)
    graph, hosts = start("racks", "shortest", n_hosts, host, n_switches=n_racks + 1, n_links=n_links)
    tops = [add_switch(graph, f"rack{i}") for i in range(n_racks)]
    for i, ports in enumerate(hosts):
        for port in ports:
            link.join(graph, port, tops[i // hosts_per_rack], "nic")
    if n_racks == 2:
        trunk.join(graph, tops[0], tops[1], "trunk")
    elif n_racks > 2:
        core = add_switch(graph, "core")
        for top in tops:
            trunk.join(graph, top, core, "trunk")
    return graph


@checked
def two_racks(
    hosts_per_rack: Places,
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    efficiency: float = 1.0,
    oversubscription: float = 1.0,
    trunk_bandwidth: Bandwidth | None = None,
    trunk_latency: Latency | None = None,
    host: Interior = PLAIN,
) -> Graph:
    """Return :func:`racks` with two racks: one trunk joins their switches."""
    return racks(
        2, hosts_per_rack, bandwidth=bandwidth, latency=latency, efficiency=efficiency,
        oversubscription=oversubscription, trunk_bandwidth=trunk_bandwidth, trunk_latency=trunk_latency,
        host=host,
    )  # fmt: skip


@checked
def dragonfly(
    n_groups: Places,
    group_shape: Sequence[Places],
    hosts_per_router: Places,
    *,
    bandwidth: Bandwidth,
    latency: Latency,
    global_links: Places,
    efficiency: float = 1.0,
    local_bandwidth: Bandwidth | None = None,
    local_latency: Latency | None = None,
    local_cables: Sequence[Places] | None = None,
    global_bandwidth: Bandwidth | None = None,
    global_latency: Latency | None = None,
    n_hosts: Places | None = None,
    routing: str = "ecmp",
    host: Interior = PLAIN,
) -> Graph:
    """Return a dragonfly (Kim, Dally, Scott and Abts, ISCA 2008) with minimal routing.

    group_shape   routers of a group: (a,) all joined to each other; (rows, columns), as in Cray's Aries
                  (Faanes et al., SC 2012), joined to those of the same row and to those of the same column
    local_cables  cables in parallel per dimension of the group, counted as one link of their total bandwidth
    global_links  links between each pair of groups, given to the groups' routers in turn
    n_hosts       fill only the first so many places (the others are service nodes, or empty)

    Links inside a group are of kind "trunk", those between groups of kind "global".
    """
    shape = list(group_shape)
    cables = [1] * len(shape) if local_cables is None else list(local_cables)
    if not shape or len(cables) != len(shape):
        raise ConfigError(f"local_cables = {cables} must have one number per dimension of group_shape = {shape}")
    per_group = math.prod(shape)
    places = n_groups * per_group * hosts_per_router
    n_hosts = places if n_hosts is None else n_hosts
    if n_hosts > places:
        raise ConfigError(f"n_hosts = {n_hosts} exceeds the {places} places of this dragonfly; lower it")
    link = checked_link(bandwidth, latency, efficiency)
    local = trunk_of(link, local_bandwidth, local_latency, "local_")
    between = trunk_of(link, global_bandwidth, global_latency, "global_")
    n_nics = _n_nics(host)
    n_routers, n_between = n_groups * per_group, n_groups * (n_groups - 1) // 2 * global_links
    n_local = n_routers * sum(size - 1 for size in shape) // 2
    n_links = 2 * (n_hosts * n_nics + n_local + n_between)
    graph, hosts = start("dragonfly", routing, n_hosts, host, n_switches=n_routers, n_links=n_links)
    routers = [add_switch(graph, f"group{g}.router{i}") for g in range(n_groups) for i in range(per_group)]
    for i, ports in enumerate(hosts):
        for port in ports:
            link.join(graph, port, routers[i // hosts_per_router], "nic")
    for group in range(n_groups):
        _join_group(graph, routers[group * per_group : (group + 1) * per_group], shape, cables, local)
    used = [0] * n_groups
    for a, b in itertools.combinations(range(n_groups), 2):
        for _ in range(global_links):
            ends = [routers[g * per_group + used[g] % per_group] for g in (a, b)]
            between.join(graph, ends[0], ends[1], "global")
            used[a] += 1
            used[b] += 1
    return graph


def _join_group(graph: Graph, routers: list[str], shape: list[int], cables: list[int], local: Link) -> None:
    """Join the routers of a group that differ in one coordinate only."""
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :])
        wide = replace(local, bandwidth=local.bandwidth * cables[dim])
        for i in range(len(routers)):
            for j in range(i + stride, i + (size - i // stride % size) * stride, stride):
                wide.join(graph, routers[i], routers[j], "trunk")
