"""SimGrid platforms of zones: hosts, links, routes as lists of links, gateways between zones.

A SimGrid link joins no two nodes: it is a capacity that routes name, in any order. Each direction of it becomes an
edge ``link.in -> link.out`` of its bandwidth and latency, joined by edges of latency 0 that carry nothing but what
crosses the link behind them, so they never limit. Every pair of hosts gets its SimGrid route as a fixed route, so that
bandwidth sharing and latencies are exactly SimGrid's.

Zones: routing Full, Floyd, Dijkstra, DijkstraCache, Cluster (``host_link``, ``backbone``), and flat ``<cluster>``.
Documentation: https://simgrid.org/doc/latest/XML_reference.html and simgrid.dtd. Bandwidths and latencies are those
of the file; SimGrid's own default model scales them (LV08: 0.97 and 13.01), ddlsim does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlsim.cluster import Host
from ddlsim.cluster.nodes import Graph, add_host
from ddlsim.imports import simgrid_units as units
from ddlsim.imports.simgrid_cluster import host_names, is_shared
from ddlsim.imports.xml_tree import Element

ZONES = ("zone", "AS")
_ROUTES = ("zoneRoute", "ASroute")
_SHORTEST = ("Floyd", "Dijkstra", "DijkstraCache")
_IGNORED = ("prop", "config", "storage", "storage_type", "mount", "disk", "trace", "trace_connect")
#: every pair of hosts gets a route
MAX_HOSTS = 300


class _Half(NamedTuple):
    """One direction of a link; direction "" is both (SHARED)."""

    link: str
    direction: str

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
    routes: dict[tuple[str, str], _Links] = field(default_factory=dict)
    between: dict[tuple[str, str], tuple[str, str, _Links]] = field(default_factory=dict)
    private: dict[str, tuple[_Links, _Links]] = field(default_factory=dict)  # host -> up, down; Cluster only
    backbone: _Links = ()


@dataclass
class _Platform:
    links: dict[str, Element] = field(default_factory=dict)  # SHARED, SPLITDUPLEX or FATPIPE
    capacity: dict[str, tuple[float, float]] = field(default_factory=dict)  # bandwidth, latency
    hosts: dict[str, float] = field(default_factory=dict)  # name -> flop/s
    home: dict[str, list[_Zone]] = field(default_factory=dict)  # host or router -> zones, outermost first


def zones_graph(outer: Element, name: str) -> Graph:
    """Return the graph of everything in the zone `outer`, with every route fixed.

    Raises ConfigError with file, line and reason: elements and routings that are not supported, links,
    hosts and gateways that do not exist, a pair of hosts without a route.
    """
    platform = _Platform()
    root = _read_zone(platform, outer, [])
    if not platform.hosts:
        raise outer.error("holds no host; is it the right file?")
    if len(platform.hosts) > MAX_HOSTS:
        raise outer.error(
            f"has {len(platform.hosts)} hosts; platforms of zones are read up to {MAX_HOSTS} hosts "
            f"(a single <cluster> of any size)"
        )
    graph: Graph = Graph(name=name, title=f"SimGrid platform {outer.get('id', '')}", sources=[outer.source.path.name])
    fastest = max(platform.hosts.values())
    for host, speed in platform.hosts.items():
        add_host(graph, host, Host(speed=speed / fastest))
    graph.graph["notes"] = [f"host speed 1 is {fastest:g} flop/s"]
    graph.graph["routes"] = list(_routes(graph, platform, root))
    return graph


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
        elif child.tag == "link":
            _add_link(platform, child, child["id"], "bandwidth", "latency")
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


def _add_point(
    platform: _Platform, element: Element, name: str, within: list[_Zone], speed: float | None
) -> None:
    if name in platform.home:
        raise element.error(f"id = {name!r} is taken already; choose another name")
    platform.home[name] = within
    within[-1].points[name] = element
    if speed is not None:
        platform.hosts[name] = speed


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
    zone.routes[src, dst] = links
    if _symmetrical(route) and src != dst:
        zone.routes.setdefault((dst, src), tuple(half.reverse() for half in reversed(links)))


def _add_zone_route(platform: _Platform, zone: _Zone, route: Element) -> None:
    src, dst, links = route["src"], route["dst"], _listed(platform, route)
    for end, gateway in ((src, route["gw_src"]), (dst, route["gw_dst"])):
        if end not in zone.inner:
            raise route.error(f"{end!r} is no zone inside this one; declare it before")
        if zone.inner[end] not in platform.home.get(gateway, []):
            raise route.error(f"the gateway {gateway!r} is not in the zone {end!r}; name a host or router of it")
    zone.between[src, dst] = (route["gw_src"], route["gw_dst"], links)
    if _symmetrical(route):
        back = tuple(half.reverse() for half in reversed(links))
        zone.between.setdefault((dst, src), (route["gw_dst"], route["gw_src"], back))


# ------------------------------------------------------------------------------------------------- finding routes


def _find(platform: _Platform, zone: _Zone, depth: int, src: str, dst: str) -> _Links:
    """Return the links from `src` to `dst`, both somewhere inside `zone`, which has this depth."""
    if src == dst:
        return ()
    inside = [platform.home[end][depth + 1] if len(platform.home[end]) > depth + 1 else None for end in (src, dst)]
    if inside[0] is None and inside[1] is None:
        return _local(zone, src, dst)
    if inside[0] is inside[1] and inside[0] is not None:
        return _find(platform, inside[0], depth + 1, src, dst)
    names = [next((name for name, inner in zone.inner.items() if inner is place), "") for place in inside]
    if inside[0] is None or inside[1] is None or (names[0], names[1]) not in zone.between:
        raise zone.element.error(f"no zoneRoute leads from the zone of {src!r} to that of {dst!r}; add it")
    leave, enter, links = zone.between[names[0], names[1]]
    return (
        *_find(platform, inside[0], depth + 1, src, leave),
        *links,
        *_find(platform, inside[1], depth + 1, enter, dst),
    )


def _local(zone: _Zone, src: str, dst: str) -> _Links:
    if zone.routing == "Cluster":
        up = zone.private[src][0] if src in zone.private else ()
        down = zone.private[dst][1] if dst in zone.private else ()
        if (src in zone.private or dst in zone.private) and (up or down):
            return (*up, *zone.backbone, *down)
    elif zone.routing in _SHORTEST:
        return _shortest(zone, src, dst)
    elif (src, dst) in zone.routes:
        return zone.routes[src, dst]
    raise zone.element.error(f"no route leads from {src!r} to {dst!r}; add it")


def _shortest(zone: _Zone, src: str, dst: str) -> _Links:
    """Return the routes joined to the fewest links, as Floyd and Dijkstra zones do."""
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(zone.points)
    graph.add_weighted_edges_from((a, b, len(links)) for (a, b), links in zone.routes.items() if a != b)
    try:
        path = nx.dijkstra_path(graph, src, dst)
    except nx.NetworkXNoPath:
        raise zone.element.error(f"no route leads from {src!r} to {dst!r}; add it") from None
    return tuple(half for hop in itertools.pairwise(path) for half in zone.routes[hop])


def _routes(graph: Graph, platform: _Platform, root: _Zone) -> Iterator[list[str]]:
    """Add the edges that the routes need, and yield every route as a path of nodes."""
    for src in platform.hosts:
        for dst in platform.hosts:
            if src == dst:
                continue
            links = _find(platform, root, 0, src, dst)
            if not links:
                raise root.element.error(f"the route from {src!r} to {dst!r} has no link; add one")
            path = [src]
            for half in links:
                enter, leave = _edge(graph, platform, half)
                _joint(graph, path[-1], enter, platform.capacity[half.link][0])
                path += [enter, leave]
            _joint(graph, path[-1], dst, platform.capacity[links[-1].link][0])
            path.append(dst)
            if len(set(path)) < len(path):
                raise root.element.error(f"the route from {src!r} to {dst!r} crosses a link twice; correct it")
            yield path


def _edge(graph: Graph, platform: _Platform, half: _Half) -> tuple[str, str]:
    name = f"{half.link}_{half.direction}" if half.direction else half.link
    enter, leave = f"{name}.in", f"{name}.out"
    if enter not in graph:
        link = platform.links[half.link]
        if link.get("sharing_policy", "").upper() == "FATPIPE":
            is_shared(link, "SHARED")  # raises: it says why
        graph.add_node(enter, kind="switch")
        graph.add_node(leave, kind="switch")
        bandwidth, latency = platform.capacity[half.link]
        graph.add_edge(enter, leave, bandwidth=bandwidth, latency=latency, kind="link")
    return enter, leave


def _joint(graph: Graph, a: str, b: str, bandwidth: float) -> None:
    if not graph.has_edge(a, b):
        graph.add_edge(a, b, bandwidth=bandwidth, latency=0.0, kind="link")
