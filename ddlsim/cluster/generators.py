"""Topology generators: functions that return the networkx graph of a cluster.

All generators have these parameters: `host`, the machine to place at each position (see :mod:`ddlsim.cluster.nodes`),
and the properties of the link from a machine to the network: bandwidth (per direction, in bytes/s or a string such as
"25 Gbit/s"), latency (in seconds or a string) and efficiency (fraction of the bandwidth that is available to payload).
This link has the kind "nic". Links between switches have the kind "trunk", and links between machines without a switch
have the kind "link". A machine with several NICs has one link to the network per NIC.

Every generator raises :class:`ddlsim.errors.ConfigError` for an invalid number; the message names the parameter.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeAlias, TypeVar

from ddlsim.arguments import Bandwidth, Density, Positive, integer, settings, takes_fields_of
from ddlsim.cluster.nodes import Graph, Host, Interior, Latency, add_host, connect, size_of
from ddlsim.cluster.quantity import MAX_NODES, Places, Quantity, check_size
from ddlsim.errors import ConfigError, shown
from ddlsim.units import si

if TYPE_CHECKING:
    import networkx as nx

P = ParamSpec("P")
W = TypeVar("W")

#: nodes of a machine to which its NICs are attached
Ports: TypeAlias = list[str]

#: default machine at each position
PLAIN = Host()


@dataclass(frozen=True)
class Link:
    """A pair of links with checked values in SI units."""

    bandwidth: float
    latency: float
    efficiency: float = 1.0
    reverse_bandwidth: float | None = None
    shared: bool = False

    def join(self, graph: Graph, a: str, b: str, kind: str) -> None:
        """Add the pair of links between `a` and `b`."""
        connect(graph, a, b, kind, **vars(self))


@settings
class _Fabric:
    """Parameters of all generators (see the top of this module)."""

    bandwidth: Bandwidth
    latency: Latency
    efficiency: Density = 1.0
    host: Interior = PLAIN

    @property
    def link(self) -> Link:
        """Checked link from a machine to the network."""
        return Link(si(self.bandwidth, "bandwidth"), si(self.latency, "time"), self.efficiency)

    @property
    def n_nics(self) -> int:
        return 1 if isinstance(self.host, Host) else self.host.n_nics


@settings
class _Plain(_Fabric):
    """Machines whose links may differ by direction or be half-duplex."""

    n_hosts: Places = field(kw_only=False)
    reverse_bandwidth: Bandwidth | None = None
    shared: bool = False

    @property
    def link(self) -> Link:
        back = self.reverse_bandwidth
        if self.shared and back is not None:
            raise ConfigError(f"reverse_bandwidth = {back!r} cannot be combined with shared; remove one of them")
        reverse = None if back is None else si(back, "bandwidth")
        return replace(super().link, reverse_bandwidth=reverse, shared=self.shared)


@settings
class _Trunked(_Fabric):
    """Machines connected by several switches."""

    trunk_bandwidth: Bandwidth | None = None
    trunk_latency: Latency | None = None


@settings
class _Oversubscribed(_Trunked):
    oversubscription: Positive = 1.0

    def trunk(self, link: Link, n_down: int, n_up: int) -> Link:
        """Return the trunk of a switch with `n_down` links to machines and `n_up` trunks."""
        if self.trunk_bandwidth is not None and self.oversubscription != 1:
            raise ConfigError(
                f"oversubscription = {self.oversubscription!r} and trunk_bandwidth = {self.trunk_bandwidth!r} "
                f"both determine the trunk bandwidth; remove one of them"
            )
        trunk = trunk_of(link, self.trunk_bandwidth, self.trunk_latency)
        if self.trunk_bandwidth is not None:
            return trunk
        return replace(trunk, bandwidth=link.bandwidth * n_down / (n_up * self.oversubscription))


def trunk_of(link: Link, bandwidth: Quantity | None, latency: Quantity | None) -> Link:
    """Return the link between switches; missing values are those of the machines' links."""
    rate = link.bandwidth if bandwidth is None else si(bandwidth, "bandwidth")
    return Link(rate, link.latency if latency is None else si(latency, "time"), link.efficiency)


def start(
    kind: str, routing: str, n_hosts: int, host: Interior, *, n_switches: int = 0, n_links: int = 0
) -> tuple[Graph, list[Ports]]:
    """Return a graph with the machines h0, h1, ... and their ports.

    Raises ConfigError if these with `n_switches` and `n_links` more exceed the size limits.
    """
    nodes, links = size_of(host)
    check_size(n_hosts * nodes + n_switches, n_hosts * links + n_links, f"{kind} of {n_hosts} machines")
    graph = Graph(name=f"{kind}-{n_hosts}", routing=routing)
    return graph, [add_host(graph, f"h{i}", host) for i in range(n_hosts)]


def add_switch(graph: Graph, name: str) -> str:
    graph.add_node(name, kind="switch")
    return name


#: `type` of `[generator]` in cluster files -> function that builds the graph
GENERATORS: dict[str, Callable[..., Graph]] = {}


def _generator(kind: Callable[P, W]) -> Callable[[Callable[[W], Graph]], Callable[P, nx.MultiDiGraph[str]]]:
    """Decorate a function of an instance of the dataclass `kind`: it takes the fields as arguments, and returns a
    networkx graph. In `GENERATORS`, it returns the :class:`Graph`."""

    def decorate(build: Callable[[W], Graph]) -> Callable[P, nx.MultiDiGraph[str]]:
        built = takes_fields_of(kind)(build)
        GENERATORS[build.__name__.replace("_", "-")] = built

        @functools.wraps(built)
        def generate(*args: P.args, **kwargs: P.kwargs) -> nx.MultiDiGraph[str]:
            return built(*args, **kwargs).to_networkx()

        signature = inspect.signature(built).replace(return_annotation="networkx.MultiDiGraph")
        generate.__signature__ = signature  # type: ignore[attr-defined]
        return generate

    return decorate


# ---------------------------------------------------------------- direct networks

MAX_DIMS = 20  # of a torus: with more, almost all would have size 1


def _direct(
    kind: str,
    sizes: Sequence[Places],
    wanted: _Fabric,
    pairs: Iterable[tuple[int, int]] | None = None,
    n_pairs: int = 0,
) -> Graph:
    """Connect machines without switches, as a torus of these sizes or by `n_pairs` pairs.

    Machines with several NICs use them in turn.
    """
    n_hosts = math.prod(sizes)
    link, grid = wanted.link, pairs is None
    if pairs is None:
        pairs, n_pairs = _grid_pairs(sizes), _n_grid_pairs(sizes)
    graph, hosts = start(kind, "shortest", n_hosts, wanted.host, n_links=2 * n_pairs)
    if grid:  # routes by formula require one node per position
        by_formula = {"routing": "dimension-order"} if isinstance(wanted.host, Host) else {}
        graph.graph |= {"grid": list(sizes), **by_formula}
    used = [0] * n_hosts
    for a, b in pairs:
        ends = [hosts[i][used[i] % len(hosts[i])] for i in (a, b)]
        link.join(graph, ends[0], ends[1], "link")
        used[a] += 1
        used[b] += 1
    return graph


def _n_grid_pairs(sizes: Sequence[Places]) -> int:
    return sum(math.prod(sizes) // (1 + (size == 2)) for size in sizes if size > 1)


def _grid_pairs(sizes: Sequence[Places]) -> Iterator[tuple[int, int]]:
    """Yield pairs of neighbours on a torus, dimension by dimension; nodes are in row-major order."""
    for dim, size in enumerate(sizes):
        stride = math.prod(sizes[dim + 1 :])
        for node in range(math.prod(sizes)):
            place = node // stride % size
            if place + 1 < size:
                yield node, node + stride
            elif size > 2:  # the wrap-around link; with two nodes, it would be the same link again
                yield node, node - place * stride


@_generator(_Plain)
def ring(wanted: _Plain) -> Graph:
    """Build a ring of machines: each is linked to two neighbours and forwards messages for other machines.

    n_hosts             number of machines
    bandwidth, latency  bandwidth and latency of every link, such as "10 Gbit/s" and "1 us"
    efficiency          fraction of the bandwidth available for payload
    host                type of every machine, a :class:`~ddlsim.cluster.Host` or :class:`~ddlsim.cluster.MultiGpu`
    reverse_bandwidth   bandwidth from machine i + 1 to machine i; None: the same in both directions
    shared              whether the links are half-duplex
    """
    return _direct("ring", [wanted.n_hosts], wanted)


@_generator(_Plain)
def line(wanted: _Plain) -> Graph:
    """Build a line of machines: each is linked to its neighbours and forwards messages for other machines.

    The arguments are described in :func:`ring`.
    """
    n = wanted.n_hosts
    return _direct("line", [n], wanted, itertools.pairwise(range(n)), n - 1)


@_generator(_Plain)
def fully_connected(wanted: _Plain) -> Graph:
    """Build a network with a direct link between every pair of machines.

    reverse_bandwidth  bandwidth towards the machine with the lower number; None: the same in both directions

    The other arguments are described in :func:`ring`.
    """
    n = wanted.n_hosts
    return _direct("fully-connected", [n], wanted, itertools.combinations(range(n), 2), n * (n - 1) // 2)


@settings
class _Torus(_Fabric):
    sizes: Sequence[Places] = field(kw_only=False)
    slices: Places = 1
    nic_bandwidth: Bandwidth | None = None
    nic_latency: Latency | None = None


@_generator(_Torus)
def torus(wanted: _Torus) -> Graph:
    """Build a torus of machines, numbered in row-major order.

    sizes               numbers of machines along the dimensions, such as (8, 8) or (4, 4, 4). Along a dimension of size
                        2, the two machines are connected by one link, not two
    bandwidth, latency  bandwidth and latency of the links of the torus, such as "10 Gbit/s" and "1 us"
    slices              number of tori (slices) of this size. If there are several, every machine also has a link to a
                        switch that connects the slices
    nic_bandwidth       bandwidth of the links to that switch; None: `bandwidth`
    nic_latency         latency of the links to that switch; None: `latency`

    The other arguments are described in :func:`ring`. Messages are routed in dimension order, starting with the first
    dimension.
    """
    sizes, n_slices = wanted.sizes, wanted.slices
    if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= MAX_DIMS:
        raise ConfigError(f"sizes = {shown(sizes)} must be a list of 1 to {MAX_DIMS} sizes, such as [8, 8]")
    if n_slices == 1:
        return _direct("torus", sizes, wanted)
    if not isinstance(wanted.host, Host):
        raise ConfigError(f"slices = {n_slices} requires machines with a single device; remove n_gpus")
    places, n_pairs = math.prod(sizes), n_slices * _n_grid_pairs(sizes)
    check_size(n_slices * places + 1, 2 * (n_slices * places + n_pairs), f"torus of {n_slices} slices")
    pairs = ((a + i * places, b + i * places) for i in range(n_slices) for a, b in _grid_pairs(sizes))
    graph = _direct("torus", [n_slices, *sizes], wanted, pairs, n_pairs)
    graph.graph |= {"grid": [n_slices, *sizes], "routing": "dimension-order"}
    machines = list(graph.nodes)
    switch, nic = add_switch(graph, "switch"), trunk_of(wanted.link, wanted.nic_bandwidth, wanted.nic_latency)
    for machine in machines:
        nic.join(graph, machine, switch, "nic")
    return graph


@settings
class _Cube(_Fabric):
    n_dims: Places = field(kw_only=False)


@_generator(_Cube)
def hypercube(wanted: _Cube) -> Graph:
    """Build a hypercube of 2 ** n_dims machines, with links between machines whose numbers differ in exactly one bit.

    n_dims  number of dimensions, which is also the number of links per machine

    The other arguments are described in :func:`ring`. Routes correct the differing bits of the machine numbers one at a
    time, starting with the highest bit.
    """
    n_dims = wanted.n_dims
    if n_dims > MAX_NODES.bit_length():
        raise ConfigError(
            f"n_dims = {n_dims} gives 2 ** {n_dims} machines, above the limit of {MAX_NODES}; lower n_dims"
        )
    return _direct("hypercube", [2] * n_dims, wanted)


# ---------------------------------------------------------------- switched networks


@_generator(_Plain)
def star(wanted: _Plain) -> Graph:
    """Build a star network: all machines are connected to one non-blocking switch.

    n_hosts             number of machines
    bandwidth, latency  bandwidth and latency of every link, such as "10 Gbit/s" and "1 us"
    efficiency          fraction of the bandwidth available for payload
    host                type of every machine, a :class:`~ddlsim.cluster.Host` or :class:`~ddlsim.cluster.MultiGpu`
    reverse_bandwidth   bandwidth from the switch to a machine; None: the same in both directions
    shared              whether the links are half-duplex
    """
    link, n_hosts = wanted.link, wanted.n_hosts
    graph, hosts = start("star", "shortest", n_hosts, wanted.host, n_switches=1, n_links=2 * n_hosts * wanted.n_nics)
    switch = add_switch(graph, "switch")
    for port in itertools.chain(*hosts):
        link.join(graph, port, switch, "nic")
    return graph


@settings
class _LeafSpine(_Oversubscribed):
    n_leaves: Places = field(kw_only=False)
    hosts_per_leaf: Places = field(kw_only=False)
    n_spines: Places = field(kw_only=False)
    rail_optimised: bool = False
    routing: str = "d-mod-k"


@_generator(_LeafSpine)
def leaf_spine(wanted: _LeafSpine) -> Graph:
    """Build a two-level Clos network: every leaf switch has a trunk to every spine switch.

    n_leaves, n_spines  numbers of leaf and spine switches
    hosts_per_leaf      number of machines per leaf switch
    bandwidth, latency  bandwidth and latency of the machines' links, such as "10 Gbit/s" and "1 us"
    efficiency          fraction of the bandwidth available for payload
    host                type of every machine, a :class:`~ddlsim.cluster.Host` or :class:`~ddlsim.cluster.MultiGpu`
    trunk_bandwidth     bandwidth of each trunk; None: derived from `oversubscription`
    trunk_latency       latency of each trunk; None: `latency`
    oversubscription    total bandwidth of a leaf's machines, divided by the total bandwidth of its trunks
    rail_optimised      whether NIC j of each machine in a group of `hosts_per_leaf` machines is connected to the
                        group's j-th leaf. If so, `n_leaves` must be a multiple of the number of NICs
    routing             policy that chooses among the shortest paths, such as "d-mod-k", "ecmp" or "spray"
    """
    link, n_nics, n_leaves, n_spines = wanted.link, wanted.n_nics, wanted.n_leaves, wanted.n_spines
    hosts_per_leaf, rails = wanted.hosts_per_leaf, n_nics if wanted.rail_optimised else 1
    if n_leaves % rails:
        raise ConfigError(
            f"n_leaves = {n_leaves} must be a multiple of the number of NICs per machine ({rails}) if "
            "rail_optimised is set"
        )
    n_down = hosts_per_leaf * n_nics // rails
    trunk = wanted.trunk(link, n_down, n_spines)
    n_hosts = n_leaves // rails * hosts_per_leaf
    n_links = 2 * (n_hosts * n_nics + n_leaves * n_spines)
    n_switches = n_leaves + n_spines
    graph, hosts = start("leaf-spine", wanted.routing, n_hosts, wanted.host, n_switches=n_switches, n_links=n_links)
    leaves = [add_switch(graph, f"leaf{i}") for i in range(n_leaves)]
    spines = [add_switch(graph, f"spine{i}") for i in range(n_spines)]
    for i, ports in enumerate(hosts):
        for j, port in enumerate(ports):
            link.join(graph, port, leaves[i // hosts_per_leaf * rails + j % rails], "nic")
    for leaf, spine in itertools.product(leaves, spines):
        trunk.join(graph, leaf, spine, "trunk")
    return graph


@settings
class _FatTree(_Trunked):
    k: Annotated[int, integer(2, MAX_NODES)] = field(kw_only=False)
    routing: str = "d-mod-k"


@_generator(_FatTree)
def fat_tree(wanted: _FatTree) -> Graph:
    """Build the k-ary fat tree of Al-Fares, Loukissas and Vahdat (SIGCOMM 2008) with k**3 / 4 machines.

    k                number of ports per switch; must be even
    trunk_bandwidth  bandwidth of the links between switches; None: `bandwidth`

    The other arguments are described in :func:`leaf_spine`.

    Each of the k pods has k/2 edge switches and k/2 aggregation switches. Aggregation switch j of every pod is
    connected to the core switches j*k/2 to j*k/2 + k/2 - 1.
    """
    k, link, n_nics = wanted.k, wanted.link, wanted.n_nics
    if k % 2:
        raise ConfigError(f"k = {k} must be even, because half of a switch's ports are uplinks")
    half = k // 2
    trunk = trunk_of(link, wanted.trunk_bandwidth, wanted.trunk_latency)
    n_hosts, n_links = k * half * half, 2 * k * half * half * (n_nics + 2)
    n_switches = 2 * k * half + half * half
    graph, hosts = start("fat-tree", wanted.routing, n_hosts, wanted.host, n_switches=n_switches, n_links=n_links)
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


@settings
class _Racks(_Oversubscribed):
    n_racks: Places = field(kw_only=False)
    hosts_per_rack: Places = field(kw_only=False)


@_generator(_Racks)
def racks(wanted: _Racks) -> Graph:
    """Build a network of racks, each with one switch and a trunk that connects this switch to a core switch.

    If there are only two racks, a single trunk connects their switches directly.

    n_racks           number of racks
    hosts_per_rack    number of machines per rack
    oversubscription  total bandwidth of a rack's machines, divided by the bandwidth of its trunk

    The other arguments are described in :func:`leaf_spine`.
    """
    link, n_nics, n_racks, hosts_per_rack = wanted.link, wanted.n_nics, wanted.n_racks, wanted.hosts_per_rack
    trunk = wanted.trunk(link, hosts_per_rack * n_nics, 1)
    n_hosts = n_racks * hosts_per_rack
    n_links = 2 * (n_hosts * n_nics + n_racks)
    graph, hosts = start("racks", "shortest", n_hosts, wanted.host, n_switches=n_racks + 1, n_links=n_links)
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


@settings
class _TwoRacks(_Oversubscribed):
    hosts_per_rack: Places = field(kw_only=False)


@_generator(_TwoRacks)
def two_racks(wanted: _TwoRacks) -> Graph:
    """Build two racks, each with one switch, and a trunk that connects the two switches.

    hosts_per_rack  number of machines per rack

    The other arguments are described in :func:`racks`.
    """
    return GENERATORS["racks"](2, **vars(wanted))


@settings
class _Dragonfly(_Fabric):
    n_groups: Places = field(kw_only=False)
    group_shape: Sequence[Places] = field(kw_only=False)
    hosts_per_router: Places = field(kw_only=False)
    global_links: Places
    local_bandwidth: Bandwidth | None = None
    local_latency: Latency | None = None
    local_cables: Sequence[Places] | None = None
    global_bandwidth: Bandwidth | None = None
    global_latency: Latency | None = None
    n_hosts: Places | None = None
    routing: str = "ecmp"


@_generator(_Dragonfly)
def dragonfly(wanted: _Dragonfly) -> Graph:
    """Build a dragonfly with minimal routing (Kim, Dally, Scott and Abts, ISCA 2008).

    n_groups      number of groups of routers
    group_shape   routers per group: ``(n,)`` for n routers that are all linked to each other, or ``(rows, columns)`` as
                  in Cray's Aries (Faanes et al., SC 2012), where each router is linked to all others in its row and in
                  its column
    hosts_per_router
                  number of machines connected to each router
    bandwidth, latency
                  bandwidth and latency of the machines' links, such as "10 Gbit/s" and "1 us". They also apply to the
                  links inside groups unless `local_bandwidth` and `local_latency` are set, and to the links between
                  groups unless `global_bandwidth` and `global_latency` are set
    efficiency    fraction of the bandwidth available for payload
    host          type of every machine, a :class:`~ddlsim.cluster.Host` or :class:`~ddlsim.cluster.MultiGpu`
    global_links  number of links between each pair of groups, distributed round-robin over the routers of a group
    local_cables  for each dimension of the group, the number of parallel cables between two routers, which are modelled
                  as one link with their total bandwidth
    n_hosts       number of machines, which fill the positions in order; None: one machine at every position
    routing       policy that chooses among the shortest paths, such as "ecmp" or "spray"

    Links inside a group have the kind "trunk", and links between groups have the kind "global".
    """
    n_groups, hosts_per_router, global_links = wanted.n_groups, wanted.hosts_per_router, wanted.global_links
    shape = list(wanted.group_shape)
    cables = [1] * len(shape) if wanted.local_cables is None else list(wanted.local_cables)
    if not shape or len(cables) != len(shape):
        raise ConfigError(f"local_cables = {cables} must have one number per dimension of group_shape = {shape}")
    per_group = math.prod(shape)
    places = n_groups * per_group * hosts_per_router
    n_hosts = places if wanted.n_hosts is None else wanted.n_hosts
    if n_hosts > places:
        raise ConfigError(
            f"n_hosts = {n_hosts} exceeds the {places} machines that this dragonfly can connect; lower n_hosts"
        )
    link = wanted.link
    local = trunk_of(link, wanted.local_bandwidth, wanted.local_latency)
    between = trunk_of(link, wanted.global_bandwidth, wanted.global_latency)
    n_routers, n_between = n_groups * per_group, n_groups * (n_groups - 1) // 2 * global_links
    n_local = n_routers * sum(size - 1 for size in shape) // 2
    n_links = 2 * (n_hosts * wanted.n_nics + n_local + n_between)
    graph, hosts = start("dragonfly", wanted.routing, n_hosts, wanted.host, n_switches=n_routers, n_links=n_links)
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
    """Connect the routers of a group that differ in exactly one coordinate."""
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :])
        wide = replace(local, bandwidth=local.bandwidth * cables[dim])
        for i in range(len(routers)):
            for j in range(i + stride, i + (size - i // stride % size) * stride, stride):
                wide.join(graph, routers[i], routers[j], "trunk")
