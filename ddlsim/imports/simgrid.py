"""Reader for SimGrid platform files (XML).

Format: https://simgrid.org/doc/latest/XML_reference.html and simgrid.dtd, versions 3 to 4.1 (``AS`` or ``zone``,
``ASroute`` or ``zoneRoute``, ``power`` or ``speed``). A link without ``sharing_policy`` is SHARED, the default in the
DTD; a cluster's links are SPLITDUPLEX. The DTD itself is never loaded. In quantities, K and k are 1000, Ki is 1024; b
is a bit, B a byte. Numbers without a unit, from before version 4, are bytes/s, seconds and flop/s.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster, Host
from ddlsim.cluster.nodes import Graph, add_host, connect
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk
from ddlsim.units import LARGEST, in_range

FASTEST = 1e30
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}
_WORDS = {"kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18, "zetta": 1e21, "yotta": 1e24}
_RATES = {f"{prefix}Bps": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATES |= {f"{prefix}bps": 0.125 * factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_TIMES = {"ps": 1e-12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_TIMES |= {"h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPEEDS = {f"{prefix}f": factor for prefix, factor in _DECIMAL.items()}
_SPEEDS |= {f"{word}flops": factor for word, factor in (_WORDS | {"": 1.0}).items()}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def _parse(element: Element, name: str, text: str, units: dict[str, float], default: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise element.error(f"{name} = {text!r} is not a quantity; write it like {example!r}")
    unit = match[2] or default
    if unit not in units:
        raise element.error(f"{name} = {text!r} has the unknown unit {unit!r}; write it like {example!r}")
    value = float(match[1]) * units[unit]
    if not (in_range(value) and value >= 0):
        rule = f"must be from 0 to {LARGEST:g} in SI units"
        raise element.error(f"{name} = {text!r} {rule}; write it like {example!r}")
    return value


def _bandwidth(element: Element, name: str) -> float:
    """Return the attribute `name` in bytes/s; raise an error unless it is above 0."""
    value = _parse(element, name, element[name], _RATES, "Bps", "10Gbps")
    if value == 0:
        raise element.error(f"{name} = {element[name]!r} must be above 0; write it like '10Gbps'")
    return value


def _latency(element: Element, name: str) -> float:
    return _parse(element, name, element.get(name, "0s"), _TIMES, "s", "50us")


def _speed(element: Element) -> float:
    """Return the speed of a host in flop/s: the value of the current ``pstate``, times ``availability``."""
    old = "speed" not in element.attributes and "power" in element.attributes  # name before version 4
    name = "power" if old else "speed"
    states, state = element[name].split(","), element.integer("pstate", 0)
    if not 0 <= state < len(states):
        raise element.error(f"pstate = {state}: {name} = {element[name]!r} has the states 0 to {len(states) - 1}")
    value = _parse(element, name, states[state], _SPEEDS, "f", "1Gf")
    value *= _parse(element, "availability", element.get("availability", "1"), {"": 1.0}, "", "0.5")
    if not 1 <= value <= FASTEST:  # speeds are divided by each other
        what = f"{name} = {element[name]!r} (pstate {state}, times availability)"
        raise element.error(f"{what} must be from 1 to {FASTEST:g} flop/s; write it like '1Gf'")
    return value


MAX_HOSTS = 100_000  # more is a typing error in radical


def host_names(cluster: Element) -> list[str]:
    """Return the names described by ``prefix``, ``radical`` ("0-9", "0-3,7") and ``suffix``."""
    numbers: list[int] = []
    for part in re.split("[,;]", cluster["radical"]):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise cluster.error(f"radical = {cluster['radical']!r}: {part!r} is not a range; write it like '0-15'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first + len(numbers) >= MAX_HOSTS:
            raise cluster.error(f"radical = {cluster['radical']!r} gives more than {MAX_HOSTS} hosts; correct it")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise cluster.error(f"radical = {cluster['radical']!r} contains a host twice; correct it")
    return [f"{cluster.get('prefix', '')}{number}{cluster.get('suffix', '')}" for number in numbers]


def is_shared(element: Element, default: str, name: str = "sharing_policy") -> bool:
    """Return whether both directions share the link's bandwidth. FATPIPE (without contention) is an error."""
    policy = element.get(name, default).upper()
    if policy in ("SPLITDUPLEX", "FULLDUPLEX"):
        return False
    if policy == "SHARED":
        return True
    raise element.error(f"{name} = {policy!r} is not supported (no contention); use SPLITDUPLEX or SHARED")


def cluster_graph(cluster: Element) -> Graph:
    """Return the graph of a platform that consists of one ``<cluster>``."""
    if cluster.get("limiter_link", ""):
        raise cluster.error("limiter_link (a common limit for both directions) is not supported; remove it")
    topology = cluster.get("topology", "FLAT").upper()
    builders = {"FLAT": _flat, "TORUS": _torus, "FAT_TREE": _fat_tree, "DRAGONFLY": _dragonfly}
    if topology not in builders:
        raise cluster.error(f"topology = {topology!r} is unknown; known: {', '.join(builders)}")
    _speed(cluster)
    title, file = f"SimGrid cluster {cluster.get('id', '')}", cluster.source.path
    notes = [f"every host computes {cluster.get('speed', cluster.get('power', ''))}"]
    graph: Graph = Graph(name=file.stem, title=title, sources=[file.name], notes=notes)
    hosts = [add_host(graph, host, Host())[0] for host in host_names(cluster)]
    builders[topology](graph, cluster, hosts)
    return graph


def _link(graph: Graph, cluster: Element, a: str, b: str, kind: str, n_cables: int = 1) -> None:
    """Connect two nodes by the cluster's link, with the bandwidth of `n_cables`."""
    bandwidth, latency = _bandwidth(cluster, "bw") * n_cables, _latency(cluster, "lat")
    connect(graph, a, b, kind, bandwidth, latency, shared=is_shared(cluster, "SPLITDUPLEX"))


def _switch(graph: Graph, name: str) -> str:
    graph.add_node(name, kind="switch")
    return name


def _flat(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """Private links to a crossbar, or to a backbone, whose capacity every message between two hosts uses once."""
    name = cluster.get("id", "cluster")
    if not cluster.get("bb_bw", ""):
        switch = _switch(graph, f"{name}.switch")
        for host in hosts:
            _link(graph, cluster, host, switch, "nic")
        return
    is_shared(cluster, "SHARED", "bb_sharing_policy")
    if is_shared(cluster, "SPLITDUPLEX"):
        raise cluster.error("SHARED links cannot be combined with a backbone; use SPLITDUPLEX")
    # hosts -> in -> out -> hosts: the one edge between the two is the backbone
    enter, leave = (_switch(graph, f"{name}.backbone.{end}") for end in ("in", "out"))
    bandwidth, latency = _bandwidth(cluster, "bb_bw"), _latency(cluster, "bb_lat")
    graph.add_edge(enter, leave, bandwidth=bandwidth, latency=latency, kind="trunk")
    bandwidth, latency = _bandwidth(cluster, "bw"), _latency(cluster, "lat")
    for host in hosts:
        graph.add_edge(host, enter, bandwidth=bandwidth, latency=latency, kind="nic")
        graph.add_edge(leave, host, bandwidth=bandwidth, latency=latency, kind="nic")


def _counts(cluster: Element, text: str) -> list[int]:
    """Return a comma-separated list of positive integers."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,4}", word) and int(word) >= 1 for word in words):
        place = f"topo_parameters = {cluster['topo_parameters']!r}"
        raise cluster.error(f"{place}: {text!r} must be integers from 1 to 9999")
    return [int(word) for word in words]


def _check_size(cluster: Element, hosts: list[str], n_places: int) -> None:
    if len(hosts) != n_places:
        hosts_given = f"radical = {cluster['radical']!r} {len(hosts)} hosts"
        places = f"topo_parameters = {cluster['topo_parameters']!r} has {n_places} places"
        raise cluster.error(f"{places}, {hosts_given}; make them equal")


def _torus(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """ "3,2,2": nodes per dimension, the first varying fastest."""
    sizes = _counts(cluster, cluster["topo_parameters"])
    _check_size(cluster, hosts, math.prod(sizes))
    stride = 1
    for size in sizes:
        for i, host in enumerate(hosts):
            place = i // stride % size
            if place + 1 < size:
                _link(graph, cluster, host, hosts[i + stride], "link")
            elif size > 2:  # the wrap-around link; with two nodes, it would be the same link again
                _link(graph, cluster, host, hosts[i - place * stride], "link")
        stride *= size
    if not is_shared(cluster, "SPLITDUPLEX"):
        graph.graph.update(routing="dimension-order", grid=sizes[::-1])  # row-major: the last varies fastest


def _fat_tree(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """ "levels;down;up;cables": the generalised fat tree PGFT of Zahavi (2010), with D-mod-k routing.

    A node of level l (hosts: 0) has one digit per level, in base `down` above l and in base `up` up to l. It is
    connected to the nodes of level l + 1 whose digits are equal except for that level.
    """
    parts = cluster["topo_parameters"].split(";")
    lists = [_counts(cluster, part) for part in parts]
    if len(lists) != 4 or len(lists[0]) != 1 or any(len(row) != lists[0][0] for row in lists[1:]):
        rule = "must be levels;down;up;cables with one number per level in the last three, like '2;4,4;1,2;1,2'"
        raise cluster.error(f"topo_parameters = {cluster['topo_parameters']!r} {rule}")
    down, up, cables = lists[1:]
    _check_size(cluster, hosts, math.prod(down))
    below = dict(zip(_digits(down), hosts, strict=True))
    for level, n_cables in enumerate(cables):
        sizes = up[: level + 1] + down[level + 1 :]
        if math.prod(sizes) * n_cables > MAX_HOSTS:
            raise cluster.error(f"topo_parameters = {cluster['topo_parameters']!r}: level {level + 1} is too large")
        place = f"{cluster.get('id', 'cluster')}.level{level + 1}"
        above = {digits: _switch(graph, f"{place}.{i}") for i, digits in enumerate(_digits(sizes))}
        for digits, node in below.items():
            for digit in range(up[level]):
                parent = above[(*digits[:level], digit, *digits[level + 1 :])]
                for _ in range(n_cables):
                    _link(graph, cluster, node, parent, "trunk" if level else "nic")
        below = above
    graph.graph["routing"] = "d-mod-k"


def _digits(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return all combinations of digits, the first varying fastest."""
    return [digits[::-1] for digits in itertools.product(*(range(size) for size in sizes[::-1]))]


def _dragonfly(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """ "groups,links;chassis,links;routers,links;nodes": Cray XC's topology; parallel links are merged.

    All routers of a chassis are connected (green), and so are corresponding routers of a group's chassis (black).
    Groups i and j are connected through router j of i and router i of j (blue).
    """
    lists = [_counts(cluster, part) for part in cluster["topo_parameters"].split(";")]
    if [len(row) for row in lists] != [2, 2, 2, 1]:
        rule = "must be groups,links;chassis,links;routers,links;nodes like '3,4;3,2;3,1;2'"
        raise cluster.error(f"topo_parameters = {cluster['topo_parameters']!r} {rule}")
    (n_groups, blue), (n_chassis, black), (n_blades, green), (n_nodes,) = lists
    per_group = n_chassis * n_blades
    if n_groups > per_group:
        raise cluster.error(
            f"{n_groups} groups require at least as many routers per group, but there are {per_group}; add routers"
        )
    _check_size(cluster, hosts, n_groups * per_group * n_nodes)
    routers = [
        [_switch(graph, f"{cluster.get('id', 'cluster')}.group{g}.router{i}") for i in range(per_group)]
        for g in range(n_groups)
    ]
    for i, host in enumerate(hosts):
        _link(graph, cluster, host, routers[i // (per_group * n_nodes)][i // n_nodes % per_group], "nic")
    for group in routers:
        for a, b in itertools.combinations(range(per_group), 2):
            if a // n_blades == b // n_blades:
                _link(graph, cluster, group[a], group[b], "trunk", green)
            elif a % n_blades == b % n_blades:
                _link(graph, cluster, group[a], group[b], "trunk", black)
    for i, j in itertools.combinations(range(n_groups), 2):
        _link(graph, cluster, routers[i][j], routers[j][i], "global", blue)


ZONES = ("zone", "AS")
_ROUTES = ("zoneRoute", "ASroute")
_SHORTEST = ("Floyd", "Dijkstra", "DijkstraCache")
_IGNORED = ("prop", "config", "storage", "storage_type", "mount", "disk", "trace", "trace_connect")


class _Half(NamedTuple):
    """One direction of a link; "" means both (SHARED)."""

    link: str
    direction: str

    @property
    def name(self) -> str:
        return f"{self.link}_{self.direction}" if self.direction else self.link

    def reverse(self) -> _Half:
        return _Half(self.link, {"UP": "DOWN", "DOWN": "UP", "": ""}[self.direction])


_Links = tuple[_Half, ...]


@dataclass(eq=False)
class _Zone:
    """A zone with its hosts, routers, inner zones and routes."""

    element: Element
    routing: str
    points: dict[str, Element] = field(default_factory=dict)  # hosts and routers
    inner: dict[str, _Zone] = field(default_factory=dict)
    #: between points or inner zones: exit node, links, entry node
    routes: dict[tuple[str, str], tuple[str, _Links, str]] = field(default_factory=dict)
    private: dict[str, tuple[_Links, _Links]] = field(default_factory=dict)  # host -> up, down; Cluster only
    backbone: _Links = ()
    router: str = ""
    paths: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # source -> points per path; _SHORTEST only


@dataclass
class _Platform:
    links: dict[str, Element] = field(default_factory=dict)  # SHARED, SPLITDUPLEX or FATPIPE
    capacity: dict[str, tuple[float, float]] = field(default_factory=dict)  # bandwidth, latency
    hosts: dict[str, float] = field(default_factory=dict)  # name -> flop/s
    home: dict[str, list[_Zone]] = field(default_factory=dict)  # host or router -> zones, outermost first
    off: list[str] = field(default_factory=list)  # hosts and links with state="OFF"


def zones_cluster(outer: Element) -> Cluster:
    """Return the cluster of everything in the zone `outer`, with the routes between its hosts."""
    platform = _Platform()
    root = _read_zone(platform, outer, [])
    off = set(platform.off)
    hosts = [host for host in platform.hosts if host not in off]
    if not hosts:
        raise outer.error(f"contains no host{' that is ON' if off else ''}; is it the right file?")
    if len(hosts) > MAX_HOSTS:
        raise outer.error(f"has {len(hosts)} hosts; the limit is {MAX_HOSTS}")
    path = outer.source.path
    graph: Graph = Graph(name=path.stem, title=f"SimGrid platform {outer.get('id', '')}", sources=[path.name])
    fastest = max(platform.hosts[host] for host in hosts)
    for host in hosts:
        add_host(graph, host, Host(speed=platform.hosts[host] / fastest))
    for point in platform.home:
        if point not in platform.hosts:
            graph.add_node(point, kind="switch")
    for piece in _pieces(platform, root):
        if not any((step if isinstance(step, str) else step.link) in off for step in piece):
            _lay(graph, platform, piece)
    graph.graph["notes"] = [f"host speed 1 is {fastest:g} flop/s"]
    if platform.off:
        graph.graph["notes"].append(
            f"skipped parts in state OFF: {', '.join(platform.off[:5])} ({len(platform.off)} in total)"
        )
        warn(f"{path}: {graph.graph['notes'][-1]}")
    cluster = named_cluster(graph, path)
    return dataclasses.replace(cluster, routing="fixed", fixed_routes=ZoneRoutes(platform, root, cluster))


def _read_zone(platform: _Platform, element: Element, parents: list[_Zone]) -> _Zone:
    zone, supported = _Zone(element, element["routing"]), ("Full", "Cluster", *_SHORTEST)
    if zone.routing not in supported:
        raise element.error(f"routing = {zone.routing!r} is not supported; known: {', '.join(supported)}")
    within = [*parents, zone]
    for child in element.children:
        if child.tag in ZONES:
            zone.inner[child["id"]] = _read_zone(platform, child, within)
        elif child.tag == "cabinet" and zone.routing == "Cluster":
            _add_members(platform, child, within)
        elif child.tag == "cluster":
            zone.inner[child["id"]] = _read_cluster(platform, child, within)
        elif child.tag in ("host", "router"):
            _add_point(platform, child, child["id"], within, _speed(child) if child.tag == "host" else None)
        elif child.tag in ("link", "backbone"):
            _add_link(platform, child, child["id"], "bandwidth", "latency")
            zone.backbone = (_Half(child["id"], ""),) if child.tag == "backbone" else zone.backbone
        elif child.tag not in (*_ROUTES, *_IGNORED, "route", "host_link"):
            raise child.error(
                "is not supported; describe the platform with zones, hosts, links and routes, or clusters"
            )
        if child.tag in ("host", "router", "link"):
            state = child.get("state", "ON").upper()  # in platforms of version 3
            if state not in ("ON", "OFF"):
                raise child.error(f"state = {state!r} must be ON or OFF")
            platform.off += [child["id"]] if state == "OFF" else []
    for child in element.find("host_link"):
        up, down = (_half(platform, child, child[side], "") for side in ("up", "down"))
        zone.private[child["id"]] = ((up,), (down,))
    for child in (*element.find("route"), *element.find(*_ROUTES)):
        _add_route(platform, zone, child)
    return zone


def _add_point(platform: _Platform, element: Element, name: str, within: list[_Zone], speed: float | None) -> None:
    if name in platform.home:
        raise element.error(f"id = {name!r} is already taken; choose another name")
    platform.home[name] = within
    within[-1].points[name] = element
    if speed is None:
        within[-1].router = within[-1].router or name
    else:
        platform.hosts[name] = speed


def _add_link(platform: _Platform, element: Element, name: str, bandwidth: str, latency: str) -> None:
    if name in platform.links:
        raise element.error(f"id = {name!r} is already taken; choose another name")
    platform.links[name] = element
    platform.capacity[name] = (_bandwidth(element, bandwidth), _latency(element, latency))


def _read_cluster(platform: _Platform, element: Element, parents: list[_Zone]) -> _Zone:
    """Read a flat cluster that is one of several zones: private links, an optional backbone, and its router."""
    if element.get("topology", "FLAT").upper() != "FLAT" or element.get("limiter_link", ""):
        raise element.error("only FLAT clusters without limiter_link can be combined with other zones; simplify it")
    zone = _Zone(element, "Cluster")
    within = [*parents, zone]
    _add_members(platform, element, within)
    router = f"{element.get('prefix', '')}{element['id']}_router{element.get('suffix', '')}"
    _add_point(platform, element, element.get("router_id", "") or router, within, None)
    if element.get("bb_bw", ""):
        is_shared(element, "SHARED", "bb_sharing_policy")
        _add_link(platform, element, f"{element['id']}.backbone", "bb_bw", "bb_lat")
        zone.backbone = (_Half(f"{element['id']}.backbone", ""),)
    return zone


def _add_members(platform: _Platform, element: Element, within: list[_Zone]) -> None:
    """Add the hosts of a cluster or cabinet, each with its private link."""
    speed = _speed(element)
    shared = is_shared(element, "SPLITDUPLEX")
    for host in host_names(element):
        _add_point(platform, element, host, within, speed)
        name = f"{element['id']}.{host}"
        _add_link(platform, element, name, "bw", "lat")
        up, down = (_Half(name, ""), _Half(name, "")) if shared else (_Half(name, "UP"), _Half(name, "DOWN"))
        within[-1].private[host] = ((up,), (down,))


def _half(platform: _Platform, element: Element, name: str, direction: str) -> _Half:
    """Return the direction of a link in a route, given by `direction` or by a suffix _UP or _DOWN."""
    base, _, suffix = name.rpartition("_")
    if name not in platform.links and suffix in ("UP", "DOWN") and base in platform.links:
        name, direction = base, suffix
    if name not in platform.links:
        raise element.error(f"the link {name!r} is not declared; declare it before it is used")
    link = platform.links[name]
    fatpipe = link.get("sharing_policy", "SHARED").upper() == "FATPIPE"  # an error if a route between two hosts uses it
    if link.tag != "link" or fatpipe or is_shared(link, "SHARED"):
        return _Half(name, "")
    return _Half(name, "DOWN" if direction == "DOWN" else "UP")


def _add_route(platform: _Platform, zone: _Zone, route: Element) -> None:
    """Add a route between hosts and routers of a zone, or between zones inside it."""
    src, dst = ends = route["src"], route["dst"]
    inside = route.tag == "route"
    leave, enter = gateways = ends if inside else (route["gw_src"], route["gw_dst"])
    for end, gateway in zip(ends, gateways, strict=True):
        if end not in (zone.points if inside else zone.inner):
            what = "a host or router of this zone" if inside else "a zone inside this one"
            raise route.error(f"{end!r} is not {what}; declare it before it is used")
        if not inside and zone.inner[end] not in platform.home.get(gateway, []):
            raise route.error(f"the gateway {gateway!r} is not in the zone {end!r}; use a host or router of that zone")
    for child in route.children:
        if child.tag != "link_ctn":
            raise child.error("is not allowed in a route; list link_ctn")
    links = tuple(_half(platform, child, child["id"], child.get("direction", "")) for child in route.children)
    zone.routes[ends] = leave, links, enter
    symmetrical = route.get("symmetrical", route.get("symmetric", "YES")).upper()
    if symmetrical not in ("YES", "NO"):
        raise route.error(f"symmetrical = {symmetrical!r} must be YES or NO")
    if symmetrical == "YES":
        zone.routes.setdefault((dst, src), (enter, tuple(half.reverse() for half in reversed(links)), leave))


#: a link's direction, or the host, router or crossbar between two parts of a route
_Step = _Half | str


class ZoneRoutes(Mapping[tuple[int, int], tuple[int, ...]]):
    """The routes between the hosts of a platform, by their nodes in `cluster`, as tuples of link indices.

    Each route is composed on first use. Raises KeyError if there is none, and ConfigError if it contains a link twice.
    """

    def __init__(self, platform: _Platform, root: _Zone, cluster: Cluster) -> None:
        self._platform, self._root = platform, root
        names = cluster.node_names
        self._hosts = {node: names[node] for node in cluster.servers.tolist()}
        ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)
        self._links = {(names[a], names[b]): link for link, (a, b) in enumerate(ends)}
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, ...]:
        if pair not in self._routes:
            src, dst = (self._hosts[node] for node in pair)
            path = _nodes((src, *_find(self._platform, self._root, 0, src, dst), dst))
            if len(set(path)) < len(path):
                raise self._root.element.error(f"the route from {src!r} to {dst!r} contains a link twice; correct it")
            self._routes[pair] = tuple(self._links[hop] for hop in itertools.pairwise(path))  # KeyError if OFF
        return self._routes[pair]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (pair for pair in itertools.permutations(self._hosts, 2) if pair in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _find(platform: _Platform, zone: _Zone, depth: int, src: str, dst: str) -> tuple[_Step, ...]:
    """Return the steps between `src` and `dst`, both inside `zone` at this depth. Raises KeyError without a route."""
    homes = [platform.home[end][depth + 1 :] for end in (src, dst)]
    a, b = (home[0].element["id"] if home else end for home, end in zip(homes, (src, dst), strict=True))
    if a == b:
        return () if src == dst else _find(platform, homes[0][0], depth + 1, src, dst)
    if zone.routing == "Cluster":
        if a not in zone.private and b not in zone.private:
            raise KeyError(a, b)
        up, down = zone.private.get(a, ((), ()))[0], zone.private.get(b, ((), ()))[1]
        return tuple(step for step in (*up, *_middle(zone), *down) if step not in (src, dst))
    steps, at = list[_Step](), src
    for hop in itertools.pairwise(_shortest(zone, a)[b] if zone.routing in _SHORTEST else (a, b)):
        leave, links, enter = zone.routes[hop]
        steps += [at, *_find(platform, zone, depth, at, leave), *([leave] if leave != at else []), *links]
        at = enter
    return (*steps[1:], *([at] if at != dst else []), *_find(platform, zone, depth, at, dst))


def _shortest(zone: _Zone, src: str) -> dict[str, list[str]]:
    """Return the paths from `src` to the others with the fewest links, as in Floyd and Dijkstra zones."""
    import networkx as nx

    if src not in zone.paths:
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from([*zone.points, *zone.inner])
        graph.add_weighted_edges_from((a, b, len(links)) for (a, b), (_, links, _) in zone.routes.items() if a != b)
        zone.paths[src] = nx.single_source_dijkstra_path(graph, src)
    return zone.paths[src]


def _middle(zone: _Zone) -> tuple[_Step, ...]:
    """Return the centre of a Cluster zone, which all messages cross: its backbone, router, or an unlimited crossbar."""
    return zone.backbone or (zone.router or f"{zone.element['id']}.switch",)


def _pieces(platform: _Platform, zone: _Zone) -> Iterator[tuple[_Step, ...]]:
    """Yield the parts of all routes through a zone and inside it."""
    for ends, (leave, links, enter) in zone.routes.items():
        if not links and ends == (leave, enter) and leave != enter and {leave, enter} <= platform.hosts.keys():
            raise zone.element.error(f"the route from {leave!r} to {enter!r} has no link; add one")
        if leave != enter:
            yield (leave, *links, enter)
    if zone.routing == "Cluster":
        for point in zone.points:
            up, down = zone.private.get(point, ((), ()))
            yield (point, *up, *_middle(zone))
            yield (*_middle(zone), *down, point)
    for inner in zone.inner.values():
        yield from _pieces(platform, inner)


def _nodes(steps: Sequence[_Step]) -> list[str]:
    """Return the nodes of a part; each direction of a link has two."""
    names: list[str] = []
    for step in steps:
        ends = (step,) if isinstance(step, str) else tuple(f"{step.name}.{end}" for end in ("in", "out"))
        names += ends if names[-1:] != [ends[0]] else ()
    return names


def _lay(graph: Graph, platform: _Platform, piece: Sequence[_Step]) -> None:
    """Add the nodes and edges of a part to the graph."""
    for half in piece:
        if isinstance(half, _Half) and f"{half.name}.in" not in graph:
            link = platform.links[half.link]
            if link.get("sharing_policy", "").upper() == "FATPIPE":
                is_shared(link, "SHARED")  # raises, with the reason
            bandwidth, latency = platform.capacity[half.link]
            graph.add_node(f"{half.name}.in", kind="switch")
            graph.add_node(f"{half.name}.out", kind="switch")
            graph.add_edge(f"{half.name}.in", f"{half.name}.out", bandwidth=bandwidth, latency=latency, kind="link")
        elif isinstance(half, str) and half not in graph:
            graph.add_node(half, kind="switch")
    for steps in itertools.pairwise(piece):
        near = [platform.capacity[step.link][0] for step in steps if isinstance(step, _Half)]
        a, b = _nodes(steps[:1])[-1], _nodes(steps[1:])[0]
        if a != b and b not in graph.adj[a]:
            if not near:  # unlimited
                near = [min(sum(bandwidth for bandwidth, _ in platform.capacity.values()) or 1.0, LARGEST)]
            graph.add_edge(a, b, bandwidth=min(near), latency=0.0, kind="link")


_QUIET = ("config", "prop", "random", "process", "actor", "trace", "trace_connect")  # not part of the network


@checked
def read_simgrid(path: str | Path) -> Cluster:
    """Read a cluster from a SimGrid platform file.

    A platform that consists of a single ``<cluster>`` (FLAT with or without a backbone, TORUS, FAT_TREE, DRAGONFLY),
    possibly inside zones, is converted to that topology. Any other platform is converted to a graph with SimGrid's
    routes; hosts without a route between them cannot communicate. The speed of a host (``pstate`` times
    ``availability``) is stored relative to that of the fastest host.

    Hosts and links with ``state="OFF"`` are skipped with a warning, and so are profiles attached with
    ``<trace_connect>``. Profiles in attributes (such as ``speed_file``) raise ConfigError, as do invalid files and
    unsupported elements (FATPIPE, limiter_link, peers, Vivaldi). The message gives the file, line and reason.
    """
    source = read_text(path)
    root = parse_xml(source)
    if root.tag != "platform":
        raise root.error("not a SimGrid platform; the first element must be <platform>")
    for element in walk(root):
        for name in ("bandwidth_file", "latency_file", "state_file", "availability_file", "speed_file"):
            if element.get(name, ""):
                raise element.error(f"{name} (a profile over time) is not supported; remove it")
    parts = [child for child in root.children if child.tag not in _QUIET]
    if len(parts) != 1 or parts[0].tag not in ("cluster", *ZONES):
        raise root.error("must contain one <zone> or one <cluster>; wrap the parts in a <zone>")
    alone = _only_cluster(parts[0])
    cluster = named_cluster(cluster_graph(alone), source.path) if alone is not None else zones_cluster(parts[0])
    traces = sum(element.tag == "trace_connect" for element in walk(root))
    if traces:
        note = f"{traces} <trace_connect> skipped; speeds and rates are constant"
        warn(f"{source.path}: {note}")
        cluster = dataclasses.replace(cluster, notes=(*cluster.notes, note))
    return cluster


def _only_cluster(element: Element) -> Element | None:
    """Return the cluster that is the only content of `element`, or None."""
    if element.tag == "cluster":
        return element
    parts = [child for child in element.children if child.tag not in _QUIET]
    return _only_cluster(parts[0]) if len(parts) == 1 and parts[0].tag in ("cluster", *ZONES) else None
