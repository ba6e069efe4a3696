"""SimGrid platforms of zones: hosts, links, routes as lists of links, gateways between zones.

A SimGrid link joins no two nodes: it is a capacity that routes name, in any order. Each direction of it becomes an
edge ``link.in -> link.out`` of its bandwidth and latency, joined to hosts, routers and each other by edges of latency 0
that carry nothing but what crosses the link beside them, so they never limit. Every pair of hosts takes its SimGrid
route, so that bandwidth sharing and latencies are exactly SimGrid's. A route is composed when a run first asks for it:
n hosts have n (n - 1) of them. Hosts without a route (routing "fixed") cannot communicate.

Zones: routing Full, Floyd, Dijkstra, DijkstraCache, Cluster (``host_link``, ``backbone``), and flat ``<cluster>``.
Documentation: https://simgrid.org/doc/latest/XML_reference.html and simgrid.dtd. Bandwidths and latencies are those
of the file; SimGrid's own default model scales them (LV08: 0.97 and 13.01), ddlsim does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlsim.cluster import Cluster, Host
from ddlsim.cluster.nodes import Graph, add_host
from ddlsim.imports import simgrid_units as units
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.simgrid_cluster import MAX_HOSTS, host_names, is_shared
from ddlsim.imports.text import warn
from ddlsim.imports.xml_tree import Element
from ddlsim.units import LARGEST

ZONES = ("zone", "AS")
_ROUTES = ("zoneRoute", "ASroute")
_SHORTEST = ("Floyd", "Dijkstra", "DijkstraCache")
_IGNORED = ("prop", "config", "storage", "storage_type", "mount", "disk", "trace", "trace_connect")


class _Half(NamedTuple):
    """One direction of a link; direction "" is both (SHARED)."""

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
    """A zone: its hosts and routers, zones inside, and what it says about routes."""

    element: Element
    routing: str
    points: dict[str, Element] = field(default_factory=dict)  # hosts and routers
    inner: dict[str, _Zone] = field(default_factory=dict)
    #: between points, or zones inside: where it leaves and enters them, and its links
    routes: dict[tuple[str, str], tuple[str, _Links, str]] = field(default_factory=dict)
    private: dict[str, tuple[_Links, _Links]] = field(default_factory=dict)  # host -> up, down; Cluster only
    backbone: _Links = ()
    router: str = ""
    paths: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # source -> points on the way; _SHORTEST only


@dataclass
class _Platform:
    links: dict[str, Element] = field(default_factory=dict)  # SHARED, SPLITDUPLEX or FATPIPE
    capacity: dict[str, tuple[float, float]] = field(default_factory=dict)  # bandwidth, latency
    hosts: dict[str, float] = field(default_factory=dict)  # name -> flop/s
    home: dict[str, list[_Zone]] = field(default_factory=dict)  # host or router -> zones, outermost first
    off: list[str] = field(default_factory=list)  # hosts and links with state="OFF"


def zones_cluster(outer: Element) -> Cluster:
    """Return the cluster of everything in the zone `outer`, with the routes between its hosts.

    Raises ConfigError with file, line and reason: elements and routings that are not supported, links, hosts and
    gateways that do not exist.
    """
    platform = _Platform()
    root = _read_zone(platform, outer, [])
    off = set(platform.off)
    hosts = [host for host in platform.hosts if host not in off]
    if not hosts:
        raise outer.error(f"holds no host{' that is ON' if off else ''}; is it the right file?")
    if len(hosts) > MAX_HOSTS:
        raise outer.error(f"has {len(hosts)} hosts; at most {MAX_HOSTS} are read")
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
        graph.graph["notes"].append(f"left out, state OFF: {', '.join(platform.off[:5])} ({len(platform.off)} in all)")
        warn(f"{path}: {graph.graph['notes'][-1]}")
    cluster = named_cluster(graph, path)
    return dataclasses.replace(cluster, routing="fixed", fixed_routes=ZoneRoutes(platform, root, cluster))


# ------------------------------------------------------------------------------------------------- reading zones


def _read_zone(platform: _Platform, element: Element, parents: list[_Zone]) -> _Zone:
    zone = _Zone(element, element["routing"])
    if zone.routing not in ("Full", "Cluster", *_SHORTEST):
        known = ", ".join(("Full", "Cluster", *_SHORTEST))
        raise element.error(f"routing = {zone.routing!r} is not supported; known: {known}")
    within = [*parents, zone]
    for child in element.children:
        if child.tag in ZONES:
            zone.inner[child["id"]] = _read_zone(platform, child, within)
        elif child.tag == "cabinet" and zone.routing == "Cluster":
            _add_members(platform, child, within)
        elif child.tag == "cluster":
            zone.inner[child["id"]] = _read_cluster(platform, child, within)
        elif child.tag in ("host", "router"):
            _add_point(platform, child, child["id"], within, units.speed(child) if child.tag == "host" else None)
            _note_state(platform, child)
        elif child.tag == "link":
            _add_link(platform, child, child["id"], "bandwidth", "latency")
            _note_state(platform, child)
        elif child.tag == "backbone":
            _add_link(platform, child, child["id"], "bandwidth", "latency")
            zone.backbone = (_Half(child["id"], ""),)
        elif child.tag not in (*_ROUTES, *_IGNORED, "route", "host_link"):
            raise child.error("is not supported; write the platform with zones, hosts, links and routes, or clusters")
    for child in element.find("host_link"):
        up, down = (_half(platform, child, child[side], "") for side in ("up", "down"))
        zone.private[child["id"]] = ((up,), (down,))
    for child in element.find("route"):
        _add_route(platform, zone, child)
    for child in element.find(*_ROUTES):
        _add_zone_route(platform, zone, child)
    return zone


def _add_point(platform: _Platform, element: Element, name: str, within: list[_Zone], speed: float | None) -> None:
    if name in platform.home:
        raise element.error(f"id = {name!r} is taken already; choose another name")
    platform.home[name] = within
    within[-1].points[name] = element
    if speed is None:
        within[-1].router = within[-1].router or name
    else:
        platform.hosts[name] = speed


def _note_state(platform: _Platform, element: Element) -> None:
    state = element.get("state", "ON").upper()  # platforms of version 3 have it
    if state not in ("ON", "OFF"):
        raise element.error(f"state = {state!r} must be ON or OFF")
    if state == "OFF":
        platform.off.append(element["id"])


def _add_link(platform: _Platform, element: Element, name: str, bandwidth: str, latency: str) -> None:
    if name in platform.links:
        raise element.error(f"id = {name!r} is taken already; choose another name")
    platform.links[name] = element
    platform.capacity[name] = (units.bandwidth(element, bandwidth), units.latency(element, latency))


def _read_cluster(platform: _Platform, element: Element, parents: list[_Zone]) -> _Zone:
    """Read a flat cluster beside others: private links, perhaps a backbone, and its router."""
    if element.get("topology", "FLAT").upper() != "FLAT" or element.get("limiter_link", ""):
        raise element.error("only FLAT clusters without limiter_link can stand beside other zones; simplify it")
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
    speed = units.speed(element)
    shared = is_shared(element, "SPLITDUPLEX")
    for host in host_names(element):
        _add_point(platform, element, host, within, speed)
        name = f"{element['id']}.{host}"
        _add_link(platform, element, name, "bw", "lat")
        up, down = (_Half(name, ""), _Half(name, "")) if shared else (_Half(name, "UP"), _Half(name, "DOWN"))
        within[-1].private[host] = ((up,), (down,))


def _half(platform: _Platform, element: Element, name: str, direction: str) -> _Half:
    """Return the direction of a link that a route names: by `direction`, or by a suffix _UP or _DOWN."""
    base, _, suffix = name.rpartition("_")
    if name not in platform.links and suffix in ("UP", "DOWN") and base in platform.links:
        name, direction = base, suffix
    if name not in platform.links:
        raise element.error(f"the link {name!r} does not exist (yet); declare it before")
    link = platform.links[name]
    if link.tag != "link":
        return _Half(name, "")
    if link.get("sharing_policy", "SHARED").upper() == "FATPIPE":
        return _Half(name, "")  # refused when a route between two hosts uses it
    return _Half(name, "") if is_shared(link, "SHARED") else _Half(name, "DOWN" if direction == "DOWN" else "UP")


def _listed(platform: _Platform, route: Element) -> _Links:
    for child in route.children:
        if child.tag != "link_ctn":
            raise child.error("has no place in a route; list link_ctn")
    return tuple(_half(platform, child, child["id"], child.get("direction", "")) for child in route.children)


def _symmetrical(route: Element) -> bool:
    text = route.get("symmetrical", route.get("symmetric", "YES")).upper()
    if text not in ("YES", "NO"):
        raise route.error(f"symmetrical = {text!r} must be YES or NO")
    return text == "YES"


def _add_route(platform: _Platform, zone: _Zone, route: Element) -> None:
    src, dst = route["src"], route["dst"]
    for end in (src, dst):
        if end not in zone.points:
            raise route.error(f"{end!r} is no host or router of this zone; declare it before")
    links = _listed(platform, route)
    zone.routes[src, dst] = src, links, dst
    if _symmetrical(route) and src != dst:
        zone.routes.setdefault((dst, src), (dst, tuple(half.reverse() for half in reversed(links)), src))


def _add_zone_route(platform: _Platform, zone: _Zone, route: Element) -> None:
    src, dst, links = route["src"], route["dst"], _listed(platform, route)
    for end, gateway in ((src, route["gw_src"]), (dst, route["gw_dst"])):
        if end not in zone.inner:
            raise route.error(f"{end!r} is no zone inside this one; declare it before")
        if zone.inner[end] not in platform.home.get(gateway, []):
            raise route.error(f"the gateway {gateway!r} is not in the zone {end!r}; name a host or router of it")
    zone.routes[src, dst] = route["gw_src"], links, route["gw_dst"]
    if _symmetrical(route):
        back = tuple(half.reverse() for half in reversed(links))
        zone.routes.setdefault((dst, src), (route["gw_dst"], back, route["gw_src"]))


# ------------------------------------------------------------------------------------------------- finding routes

#: a link's direction, or the host, router or crossbar between two pieces of a route
_Step = _Half | str


class ZoneRoutes(Mapping[tuple[int, int], tuple[int, ...]]):
    """The routes between the hosts of a platform, by their nodes in `cluster`: tuples of its links.

    Each is composed when it is first asked for: KeyError where there is none, ConfigError if it crosses a link twice.
    """

    def __init__(self, platform: _Platform, root: _Zone, cluster: Cluster) -> None:
        self._platform, self._root = platform, root
        names = cluster.node_names
        self._hosts = {node: names[node] for node in cluster.servers.tolist()}
        ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)
        self._links = {(names[a], names[b]): link for link, (a, b) in enumerate(ends)}
        self._made: dict[tuple[int, int], tuple[int, ...]] = {}

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, ...]:
        if pair not in self._made:
            src, dst = (self._hosts[node] for node in pair)
            path = _nodes((src, *_find(self._platform, self._root, 0, src, dst), dst))
            if len(set(path)) < len(path):
                raise self._root.element.error(f"the route from {src!r} to {dst!r} crosses a link twice; correct it")
            self._made[pair] = tuple(self._links[hop] for hop in itertools.pairwise(path))  # what is OFF has none
        return self._made[pair]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (pair for pair in itertools.permutations(self._hosts, 2) if pair in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _find(platform: _Platform, zone: _Zone, depth: int, src: str, dst: str) -> tuple[_Step, ...]:
    """Return the steps between `src` and `dst`, both somewhere inside `zone`, which has this depth; or KeyError."""
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
    """Return the hops from `src` to the others along the fewest links, as Floyd and Dijkstra zones go."""
    import networkx as nx

    if src not in zone.paths:
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from([*zone.points, *zone.inner])
        graph.add_weighted_edges_from((a, b, len(links)) for (a, b), (_, links, _) in zone.routes.items() if a != b)
        zone.paths[src] = nx.single_source_dijkstra_path(graph, src)
    return zone.paths[src]


def _middle(zone: _Zone) -> tuple[_Step, ...]:
    """Return what all messages of a Cluster zone cross: its backbone, or its router, or a crossbar without limit."""
    return zone.backbone or (zone.router or f"{zone.element['id']}.switch",)


# ------------------------------------------------------------------------------------------------- drawing links


def _pieces(platform: _Platform, zone: _Zone) -> Iterator[tuple[_Step, ...]]:
    """Yield what the routes through a zone, and those inside, consist of."""
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
    """Return the nodes of a piece: two for each direction of a link."""
    names: list[str] = []
    for step in steps:
        ends = (step,) if isinstance(step, str) else tuple(f"{step.name}.{end}" for end in ("in", "out"))
        names += ends if names[-1:] != [ends[0]] else ()
    return names


def _lay(graph: Graph, platform: _Platform, piece: Sequence[_Step]) -> None:
    """Add the nodes and edges of a piece."""
    for half in piece:
        if isinstance(half, _Half) and f"{half.name}.in" not in graph:
            link = platform.links[half.link]
            if link.get("sharing_policy", "").upper() == "FATPIPE":
                is_shared(link, "SHARED")  # raises: it says why
            bandwidth, latency = platform.capacity[half.link]
            graph.add_node(f"{half.name}.in", kind="switch")
            graph.add_node(f"{half.name}.out", kind="switch")
            graph.add_edge(f"{half.name}.in", f"{half.name}.out", bandwidth=bandwidth, latency=latency, kind="link")
        elif isinstance(half, str) and half not in graph:
            graph.add_node(half, kind="switch")
    for steps in itertools.pairwise(piece):
        near = [platform.capacity[step.link][0] for step in steps if isinstance(step, _Half)]
        a, b = _nodes(steps[:1])[-1], _nodes(steps[1:])[0]
        if a != b and not graph.has_edge(a, b):
            if not near:  # never limits
                near = [min(sum(bandwidth for bandwidth, _ in platform.capacity.values()) or 1.0, LARGEST)]
            graph.add_edge(a, b, bandwidth=min(near), latency=0.0, kind="link")
