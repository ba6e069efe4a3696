"""Conversion between networkx graphs and clusters.

These attributes are read. Any other raises ConfigError, so that a misspelt attribute is not ignored silently:

graph   name, title, sources, notes; routing (see `routing.POLICIES`); grid: sizes of the dimensions in which the
        machines are numbered in row-major order, levels of hierarchical collectives (nodes of a torus, with routing
        "dimension-order"); routes: lists of node names, the paths to take from the first to the last
node    kind "gpu", "host" (default), "storage" or "switch"; host: its machine (default: an endpoint's own name; a
        switch without it belongs to the fabric); device; speed; send_overhead, recv_overhead (s per message),
        reduce_time (s per reduced byte); price of its machine (on one of its endpoints) and device_price of the
        endpoint (USD/s), power of a switch (W), and reduces: whether it reduces messages (true or false); operations/s
        of a storage
edge    bandwidth (required), latency (default: 0), efficiency (default: 1), kind (default: "link"), shared (half-duplex
        with the edge of the same key in the other direction); frame_header, frame_payload, burst, reverse_load,
        transport, mtu, ... (see `details.LinkDetail`)

Bandwidths, latencies, overheads and sizes are SI floats or text with a unit. An undirected edge is a pair of equal
links. Values that differ by direction require a directed graph, because networkx does not keep the order of the ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import numpy as np

from ddlsim.arguments import Density, Positive, Rule, one_of, quantity, settings
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.details import LinkDetail, LinkDetailSettings, collected
from ddlsim.cluster.nodes import Graph
from ddlsim.cluster.routing import check_policy, widest_links
from ddlsim.errors import ConfigError, shown, unknown_name

if TYPE_CHECKING:
    import networkx as nx

T = TypeVar("T")
GRAPH_KEYS = {"name", "title", "sources", "notes", "routing", "grid", "routes"}
#: attributes added by networkx and drawing tools, which are ignored
_FOREIGN_GRAPH_KEYS = {"node_default", "edge_default"}

#: a string as in a graph
_Text = Annotated[str, Rule("a string", lambda value: isinstance(value, str))]
_Time = Annotated[float, quantity("time", zero=True, si=True)]
_Price = Annotated[float, quantity("price", zero=True, si=True)]


@settings
class NodeAttributes:
    """The attributes of a node, in SI units."""

    kind: Annotated[str, one_of("gpu", "host", "storage", "switch")] = "host"
    host: _Text | None = None
    device: _Text | None = None
    speed: Positive = 1.0
    send_overhead: _Time = 0.0
    recv_overhead: _Time = 0.0
    reduce_time: _Time = 0.0
    price: _Price | None = None
    device_price: _Price | None = None
    power: Annotated[float, quantity("power", zero=True, si=True)] | None = None
    operations: Positive | None = None
    reduces: bool = False


@settings
class EdgeAttributes(LinkDetailSettings):
    """The attributes of an edge."""

    bandwidth: Annotated[float, quantity("bandwidth", si=True)]
    latency: _Time = 0.0
    efficiency: Density = 1.0
    kind: _Text | None = None
    shared: bool = False


NODE_KEYS, EDGE_KEYS = ({field.name for field in dataclasses.fields(kind)} for kind in (NodeAttributes, EdgeAttributes))
#: attribute -> kinds of nodes that can have it
_ONLY_OF = {
    **dict.fromkeys(("price", "device_price"), ("endpoints", ("gpu", "host", "storage"))),
    **dict.fromkeys(("power", "reduces"), ("switches", ("switch",))),
    "operations": ("storage nodes", ("storage",)),
}

Attributes = dict[str, Any]  # networkx does not restrict values; every one is checked below
#: source, destination, key shared by both directions, attributes
_Link = tuple[Hashable, Hashable, Hashable, Attributes]


def _reject_unknown(attributes: Mapping[Any, object], names: set[str], where: str) -> None:
    for key in attributes:
        if key not in names:
            raise unknown_name("attribute", str(key), names, where)


def _checked(kind: type[T], attributes: Attributes, place: str) -> T:
    """Return the checked attributes of a node or an edge."""
    try:
        return kind(**attributes)
    except ConfigError as error:
        raise type(error)(f"{place}: {str(error).removeprefix(f'{kind.__name__}: ')}") from None


def _texts(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} = {shown(value)} must be a list of strings")
    return tuple(value)


def _directed_links(graph: nx.Graph[Any] | Graph, where: str) -> Iterator[_Link]:
    """Yield the directed links; an undirected edge makes two."""
    directed = isinstance(graph, Graph) or graph.is_directed()
    if isinstance(graph, Graph):
        edges: list[_Link] = list(graph.edges())
    elif graph.is_multigraph():
        edges = list(cast("nx.MultiGraph[Any]", graph).edges(keys=True, data=True))
    else:
        edges = [(u, v, 0, data) for u, v, data in graph.edges(data=True)]
    for u, v, key, data in edges:
        if u == v:
            raise ConfigError(f"{where}: edge {u!r} - {v!r} connects a node to itself; remove the edge")
        if "reverse_bandwidth" in data:
            remedy = f"set bandwidth on the edge {v!r} -> {u!r}"
            if not directed:
                remedy = (
                    "an undirected graph does not store the direction of edges; use a directed graph with two edges"
                )
            raise ConfigError(
                f"{where}: edge {u!r} - {v!r}: reverse_bandwidth = {shown(data['reverse_bandwidth'])} is not "
                f"supported; {remedy}"
            )
        yield u, v, key, data
        if not directed:
            yield v, u, key, data


def from_graph(graph: nx.Graph[Any] | Graph, name: str | None = None) -> Cluster:
    """Return the :class:`Cluster` of a (multi)(di)graph; the module's docstring lists the attributes.

    Links are numbered by source node, in graph order. Raises :class:`ConfigError` naming the node or edge, the
    attribute and the remedy.
    """
    name = str(name or graph.graph.get("name") or "graph")
    where = f"cluster {name!r}"
    _reject_unknown(graph.graph, GRAPH_KEYS | _FOREIGN_GRAPH_KEYS, where)
    if not len(graph):
        raise ConfigError(f"{where}: the graph has no nodes; add at least one host")
    index: dict[Hashable, int] = {node: i for i, node in enumerate(graph.nodes)}
    names = tuple(str(node) for node in index)
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two nodes have the same name when converted to strings; rename one of them")
    grid = graph.graph.get("grid", ())
    if not isinstance(grid, list | tuple) or not all(type(size) is int and size > 0 for size in grid):
        raise ConfigError(f"{where}: grid = {shown(grid)} must be a list of sizes, such as [8, 8]")
    routing = check_policy(str(graph.graph.get("routing", "shortest")), where)
    nodes = _node_columns(graph, where)
    n_places = sum(kind != "switch" for kind in nodes["node_kind"])  # a switch may connect several tori
    if routing == "dimension-order" and math.prod(grid) != n_places:
        raise ConfigError(
            f"{where}: routing = 'dimension-order' requires a grid whose dimensions multiply to {n_places}, the "
            "number of nodes"
        )
    links = _link_columns(graph, index, where)
    hosts = zip(nodes["host_of"].tolist(), nodes["node_kind"], strict=True)
    n_machines = len({host for host, kind in hosts if host >= 0 and kind != "storage"})
    if grid and routing != "dimension-order" and math.prod(grid) != n_machines:
        raise ConfigError(
            f"{where}: grid = {list(grid)} does not match the number of machines, {n_machines}; correct the sizes of "
            "the grid"
        )
    title = graph.graph.get("title", "")
    if not isinstance(title, str):
        raise ConfigError(f"{where}: title = {shown(title)} must be a string")
    texts = {key: _texts(graph.graph.get(key, ()), f"{where}: {key}") for key in ("sources", "notes")}
    about: dict[str, Any] = {"name": name, "title": title, "routing": routing, "grid": tuple(grid), **texts}
    cluster = Cluster(node_names=names, **about, **nodes, **links)
    if not cluster.is_endpoint.any():
        raise ConfigError(
            f"{where}: all {len(names)} nodes are switches; at least one must have kind = 'host' or 'gpu'"
        )
    return _with_fixed_routes(cluster, graph.graph.get("routes", ()), where)


def _node_columns(graph: nx.Graph[Any] | Graph, where: str) -> dict[str, Any]:
    """Return the arrays of nodes and machines; those that no node sets are omitted."""
    nodes: list[NodeAttributes] = []
    host_of: list[int] = []
    hosts: dict[str, int] = {}
    prices: dict[int, float] = {}
    checked: dict[Hashable, NodeAttributes] = {}
    for name, data in graph.nodes.items():
        place = f"{where}: node {str(name)!r}"
        host = data.get("host")
        node = _once(checked, {**data, "host": ""} if isinstance(host, str) else data, _checked_node, place)
        host = str(name) if host is None and node.kind != "switch" else host
        host_of.append(-1 if host is None else hosts.setdefault(host, len(hosts)))
        nodes.append(node)
        if node.price is not None and prices.setdefault(host_of[-1], node.price) != node.price:
            raise ConfigError(
                f"{place}: price = {data['price']!r} differs from the price at another node of the same machine; "
                "remove one of them"
            )
    stated = {
        "host_price": [prices.get(host) for host in range(len(hosts))],
        "device_price": [node.device_price for node in nodes],
        "switch_power": [node.power for node in nodes],
    }
    columns: dict[str, Any] = {
        key: np.array(column, dtype=np.float64)  # NaN for None
        for key, column in stated.items()
        if any(value is not None for value in column)
    }
    if any(node.operations for node in nodes):
        columns["operation_time"] = np.array([1.0 / node.operations if node.operations else 0.0 for node in nodes])
    if any(node.reduces for node in nodes):
        columns["switch_reduces"] = np.array([node.reduces for node in nodes])
    for key in ("speed", "send_overhead", "recv_overhead", "reduce_time"):
        columns[key] = np.array([getattr(node, key) for node in nodes], dtype=np.float64)
    return {
        **columns,
        "node_kind": tuple(node.kind for node in nodes),
        "device_of": tuple(node.device for node in nodes),
        "host_of": np.array(host_of, dtype=np.int64),
        "host_names": tuple(hosts),
    }


def _link_columns(graph: nx.Graph[Any] | Graph, index: dict[Hashable, int], where: str) -> dict[str, Any]:
    channels: dict[Hashable, int] = {}
    checked: dict[Hashable, tuple[EdgeAttributes, LinkDetail]] = {}
    same: dict[int, tuple[EdgeAttributes, LinkDetail]] = {}  # links that share a dict of attributes, by its id
    listed = sorted(_directed_links(graph, where), key=lambda link: index[link[0]])
    rows: list[tuple[EdgeAttributes, LinkDetail]] = []
    channel: list[int] = []
    for number, (u, v, key, data) in enumerate(listed):
        row = same.get(id(data))
        if row is None:
            row = same[id(data)] = _once(checked, data, _checked_link, f"{where}: edge {u!r} -> {v!r}")
        pair: Hashable = (frozenset((u, v)), key) if row[0].shared else number
        channel.append(channels.setdefault(pair, len(channels)))
        rows.append(row)
    if any(edge.shared for edge, _ in checked.values()):
        _check_shared(channel, [edge for edge, _ in rows], listed, where)
    place = {id(row): i for i, row in enumerate(checked.values())}
    numbers = [(edge.bandwidth, edge.efficiency, edge.latency) for edge, _ in checked.values()]
    columns = np.array(numbers, dtype=np.float64).reshape(-1, 3).T[:, [place[id(row)] for row in rows]]
    return {
        "link_src": np.array([index[u] for u, *_ in listed], dtype=np.int64),
        "link_dst": np.array([index[v] for _, v, *_ in listed], dtype=np.int64),
        "link_channel": np.array(channel, dtype=np.int64),
        "link_kind": tuple(edge.kind or "link" for edge, _ in rows),
        **dict(zip(("link_bandwidth", "link_efficiency", "link_latency"), map(np.copy, columns), strict=True)),
        "details": collected([detail for _, detail in rows]),
    }


def _once(checked: dict[Hashable, T], data: Attributes, check: Callable[[Attributes, str], T], place: str) -> T:
    """Return the checked attributes; those equal to earlier ones, as of most nodes and links, are not checked again."""
    alike: Hashable = (*data.items(), *map(type, data.values()))
    try:
        value = checked.get(alike)
    except TypeError:  # unhashable, such as a list; an error in the check
        value = None
    if value is None:
        value = checked[alike] = check(data, place)
    return value


def _checked_node(data: Attributes, place: str) -> NodeAttributes:
    _reject_unknown(data, NODE_KEYS, place)
    node = _checked(NodeAttributes, data, place)
    for key, (what, kinds) in _ONLY_OF.items():
        if node.kind not in kinds and getattr(node, key) is not None and getattr(node, key) is not False:
            raise ConfigError(f"{place}: {key} applies only to {what}; remove {key}")
    return node


def _checked_link(data: Attributes, place: str) -> tuple[EdgeAttributes, LinkDetail]:
    _reject_unknown(data, EDGE_KEYS, place)
    if "bandwidth" not in data:
        raise ConfigError(
            f"{place}: bandwidth is missing; set it, for example bandwidth='25 Gbit/s' (plain numbers are in bytes/s)"
        )
    edge = _checked(EdgeAttributes, data, place)
    return edge, edge.detail(f"{place}: ")


def _check_shared(channels: list[int], edges: list[EdgeAttributes], listed: list[_Link], where: str) -> None:
    """Raise ConfigError if the two directions of a half-duplex link differ in shared attributes."""
    first: dict[int, EdgeAttributes] = {}
    for number, edge, (u, v, _, _) in zip(channels, edges, listed, strict=True):
        if not edge.shared:
            continue
        other = first.setdefault(number, edge)
        forward, reverse = ((link.bandwidth, link.efficiency, link.kind or "link") for link in (edge, other))
        if forward != reverse:
            raise ConfigError(
                f"{where}: shared edge {u!r} -> {v!r}: bandwidth, efficiency and kind must equal those of "
                f"{v!r} -> {u!r}, because the two directions share one capacity; use equal values or remove shared"
            )


def _with_fixed_routes(cluster: Cluster, routes: object, where: str) -> Cluster:
    if not isinstance(routes, list | tuple):
        raise ConfigError(f"{where}: routes = {shown(routes)} must be a list of paths (lists of node names)")
    if not routes:
        return cluster
    link_of = widest_links(cluster)
    fixed: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, path in enumerate(routes):
        place = f"{where}: routes[{number}]"
        nodes = [cluster.node(str(name)) for name in _texts(path, place)]
        if len(nodes) < 2 or nodes[0] == nodes[-1]:
            raise ConfigError(f"{place} = {shown(path)} must be a path between two different nodes")
        for hop in itertools.pairwise(nodes):
            if hop not in link_of:
                u, v = (cluster.node_names[node] for node in hop)
                raise ConfigError(
                    f"{place} = {shown(path)}: there is no link from {u!r} to {v!r}; add the link or correct the path"
                )
        if (nodes[0], nodes[-1]) in fixed:
            raise ConfigError(
                f"{place} = {shown(path)} is a second route between its end nodes; remove one of the two routes"
            )
        fixed[nodes[0], nodes[-1]] = tuple(link_of[hop] for hop in itertools.pairwise(nodes))
    return dataclasses.replace(cluster, fixed_routes=fixed)


def to_graph(cluster: Cluster) -> Graph:
    """Return the cluster as a graph with the attributes that :func:`from_graph` reads."""
    graph = Graph(name=cluster.name, routing=cluster.routing)
    names, ends, fixed = cluster.node_names, cluster.link_dst, cluster.fixed_routes
    extras: Attributes = {
        "title": cluster.title,
        "sources": list(cluster.sources),
        "notes": list(cluster.notes),
        "grid": list(cluster.grid),
        "routes": [[names[src], *(names[ends[link]] for link in links)] for (src, _), links in fixed.items()],
    }
    graph.graph.update({key: value for key, value in extras.items() if value})
    for node, name in enumerate(cluster.node_names):
        graph.add_node(name, **_node_attributes(cluster, node))
    keys: dict[Hashable, int] = {}
    n_uses = np.bincount(cluster.link_channel, minlength=1)
    for link in range(cluster.n_links):
        u, v = (cluster.node_names[end] for end in (cluster.link_src[link], cluster.link_dst[link]))
        channel = int(cluster.link_channel[link])
        data: Attributes = {
            "bandwidth": float(cluster.link_bandwidth[link]),
            "latency": float(cluster.link_latency[link]),
            "kind": cluster.link_kind[link],
        }
        if cluster.link_efficiency[link] != 1:
            data["efficiency"] = float(cluster.link_efficiency[link])
        if cluster.details is not None:
            data.update(cluster.details.of(link).written())
        if n_uses[channel] > 1:  # the key connects the two directions
            data["shared"] = True
            graph.add_edge(u, v, keys.setdefault(channel, 1_000_000 + channel), **data)
        else:
            graph.add_edge(u, v, **data)
    return graph


def _node_attributes(cluster: Cluster, node: int) -> Attributes:
    host = int(cluster.host_of[node])
    data: Attributes = {"kind": cluster.node_kind[node]}
    if host >= 0:
        data["host"] = cluster.host_names[host]
    if cluster.device_of[node] is not None:
        data["device"] = cluster.device_of[node]
    usual = {"speed": 1.0, "send_overhead": 0.0, "recv_overhead": 0.0, "reduce_time": 0.0}
    numbers = {key: getattr(cluster, key)[node] for key in usual}
    if cluster.host_price is not None and node == np.argmax((cluster.host_of == host) & cluster.is_endpoint):
        numbers["price"] = cluster.host_price[host]
    if cluster.device_price is not None:
        numbers["device_price"] = cluster.device_price[node]
    if cluster.switch_power is not None:
        numbers["power"] = cluster.switch_power[node]
    if cluster.operation_time is not None and cluster.operation_time[node] > 0.0:
        numbers["operations"] = 1.0 / cluster.operation_time[node]
    data |= {key: float(x) for key, x in numbers.items() if x != usual.get(key) and not np.isnan(x)}
    if cluster.switch_reduces is not None and cluster.switch_reduces[node]:
        data["reduces"] = True
    return data
