"""Conversion between networkx graphs and clusters.

These attributes are read. Any other raises ConfigError, so that a misspelt attribute is not ignored silently:

graph   name, title, sources, notes; routing (see `routing.POLICIES`); grid: sizes of the dimensions in which the
        machines are numbered in row-major order, levels of hierarchical collectives (nodes of a torus, with routing
        "dimension-order"); routes: lists of node names, the paths to take from the first to the last
node    kind "gpu", "host" (also when missing), "storage" or "switch"; host: the machine it sits in (an endpoint's own
        name when missing; a switch without it belongs to the fabric); device; speed; send_overhead,
        recv_overhead (s per message), reduce_time (s per reduced byte); price of its machine (on one of its
        endpoints) and device_price of the endpoint (USD/s), power of a switch (W), and
        whether it reduces: adds up what passes through it (true or false); operations/s of a storage
edge    bandwidth (required), latency (0 when missing), efficiency (1 when missing), kind ("link" when
        missing), shared (half duplex with the edge of the same key the other way); frame_header,
        frame_payload, burst, reverse_load, transport, mtu, ... (see `details.LinkDetail`)

Bandwidths, latencies, overheads and sizes are SI floats or text with a unit. An undirected edge is a pair of links
that are equal: networkx forgets which end of it was named first, so what differs by direction needs a directed graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import networkx as nx
import numpy as np

from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.details import DETAIL_KEYS, LinkDetail, Told, collected
from ddlsim.cluster.quantity import fraction, nonnegative, positive
from ddlsim.cluster.routing import check_policy, widest_links
from ddlsim.errors import ConfigError, shown, unknown_name

NODE_KINDS = ("gpu", "host", "storage", "switch")
GRAPH_KEYS = {"name", "title", "sources", "notes", "routing", "grid", "routes"}
#: what networkx itself, or a drawing tool on the way, leaves in a graph
_FOREIGN_GRAPH_KEYS = {"node_default", "edge_default"}
NODE_KEYS = {"kind", "host", "device", "speed", "send_overhead", "recv_overhead", "reduce_time"}
NODE_KEYS |= {"price", "device_price", "power", "reduces", "operations"}
EDGE_KEYS = {"bandwidth", "latency", "efficiency", "kind", "shared", "mtu", *DETAIL_KEYS}

Attributes = dict[str, Any]  # networkx promises nothing about values; every one is checked below
#: source, destination, what identifies the other direction, attributes
_Link = tuple[Hashable, Hashable, Hashable, Attributes]
#: shared, kind, (bandwidth, efficiency, latency), details of a link
_Checked = tuple[bool, str, tuple[float, float, float], LinkDetail]


def _reject_unknown(attributes: Iterable[str], known: set[str], where: str) -> None:
    for key in attributes:
        if key not in known:
            raise unknown_name("attribute", str(key), known, where)


def _text(attributes: Attributes, key: str, default: str | None, where: str) -> str | None:
    value = attributes.get(key, default)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {key} = {shown(value)} must be a string")
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} = {shown(value)} must be a list of strings")
    return tuple(value)


def _directed_links(graph: nx.Graph[Any], where: str) -> Iterator[_Link]:
    """Yield the directed links; an undirected edge gives two."""
    if isinstance(graph, nx.MultiGraph):
        edges = list(graph.edges(keys=True, data=True))
    else:
        edges = [(u, v, 0, data) for u, v, data in graph.edges(data=True)]
    for u, v, key, data in edges:
        if u == v:
            raise ConfigError(f"{where}: edge {u!r} - {v!r} connects a node to itself; remove the edge")
        if "reverse_bandwidth" in data:
            remedy = f"set bandwidth on the edge {v!r} -> {u!r}"
            if not graph.is_directed():
                remedy = (
                    "an undirected graph does not store the direction of edges; use a directed graph with two edges"
                )
            raise ConfigError(
                f"{where}: edge {u!r} - {v!r}: reverse_bandwidth = {shown(data['reverse_bandwidth'])} is not "
                f"supported; {remedy}"
            )
        yield u, v, key, data
        if not graph.is_directed():
            yield v, u, key, data


def from_graph(graph: nx.Graph[Any], name: str | None = None) -> Cluster:
    """Return the :class:`Cluster` of a networkx (multi)(di)graph; see the module's text for the attributes.

    Links are numbered by source node, in the order of the graph. Raises :class:`ConfigError` naming the node
    or edge, the attribute and the remedy.
    """
    name = str(name or graph.graph.get("name") or "graph")
    where = f"cluster {name!r}"
    _reject_unknown((str(key) for key in graph.graph), GRAPH_KEYS | _FOREIGN_GRAPH_KEYS, where)
    if not graph.number_of_nodes():
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
    n_places = sum(kind != "switch" for kind in nodes["node_kind"])  # a switch may join several tori
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
    title = _text(graph.graph, "title", "", where) or ""
    texts = {key: _texts(graph.graph.get(key, ()), f"{where}: {key}") for key in ("sources", "notes")}
    about: dict[str, Any] = {"name": name, "title": title, "routing": routing, "grid": tuple(grid), **texts}
    cluster = Cluster(node_names=names, **about, **nodes, **links)
    if not cluster.is_endpoint.any():
        raise ConfigError(
            f"{where}: all {len(names)} nodes are switches; at least one must have kind = 'host' or 'gpu'"
        )
    return _with_fixed_routes(cluster, graph.graph.get("routes", ()), where)


def _node_columns(graph: nx.Graph[Any], where: str) -> dict[str, Any]:
    kinds: list[str] = []
    devices: list[str | None] = []
    host_of: list[int] = []
    hosts: dict[str, int] = {}
    numbers: list[tuple[float, float, float, float]] = []
    for node, data in graph.nodes(data=True):
        place = f"{where}: node {str(node)!r}"
        if not data.keys() <= NODE_KEYS:
            _reject_unknown(data, NODE_KEYS, place)
        kind = data.get("kind", "host")
        if kind not in NODE_KINDS:
            raise unknown_name("kind", str(kind), NODE_KINDS, place)
        kinds.append(kind)
        devices.append(_text(data, "device", None, place))
        host = _text(data, "host", None if kind == "switch" else str(node), place)
        host_of.append(-1 if host is None else hosts.setdefault(host, len(hosts)))
        numbers.append(
            (
                positive(data.get("speed", 1.0), None, f"{place}: speed"),
                nonnegative(data.get("send_overhead", 0.0), "time", f"{place}: send_overhead"),
                nonnegative(data.get("recv_overhead", 0.0), "time", f"{place}: recv_overhead"),
                nonnegative(data.get("reduce_time", 0.0), "time", f"{place}: reduce_time"),
            )
        )
    columns = np.array(numbers, dtype=np.float64).T.copy()
    return {
        **_cost_columns(graph, host_of, len(hosts), where),
        "node_kind": tuple(kinds),
        "device_of": tuple(devices),
        "host_of": np.array(host_of, dtype=np.int64),
        "host_names": tuple(hosts),
        "speed": columns[0].copy(),
        "send_overhead": columns[1].copy(),
        "recv_overhead": columns[2].copy(),
        "reduce_time": columns[3].copy(),
    }


def _cost_columns(graph: nx.Graph[Any], host_of: list[int], n_hosts: int, where: str) -> dict[str, Any]:
    """Return the prices and power draws that nodes state; a column that none states is left out."""
    n = len(host_of)
    columns = {key: np.full(size, np.nan) for key, size in (("price", n_hosts), ("device_price", n), ("power", n))}
    for node, (name, data) in enumerate(graph.nodes(data=True)):
        for key in columns.keys() & data.keys():
            place = f"{where}: node {str(name)!r}"
            if (data.get("kind", "host") == "switch") != (key == "power"):
                kinds = "switches" if key == "power" else "endpoints"
                raise ConfigError(f"{place}: {key} applies only to {kinds}; remove {key}")
            number = nonnegative(data[key], "power" if key == "power" else "price", f"{place}: {key}")
            at = host_of[node] if key == "price" else node
            if not np.isnan(columns[key][at]) and columns[key][at] != number:
                raise ConfigError(
                    f"{place}: price = {data[key]!r} differs from the price at another node of the same machine; "
                    "remove one of them"
                )
            columns[key][at] = number
    fields = {"price": "host_price", "device_price": "device_price", "power": "switch_power"}
    stated = {fields[key]: column for key, column in columns.items() if not np.isnan(column).all()}
    return stated | _reducing_switches(graph, where) | _operation_times(graph, where)


def _operation_times(graph: nx.Graph[Any], where: str) -> dict[str, Any]:
    """Return the s of an operation of storages that say how many they do in one; nothing where none does."""
    times = np.zeros(graph.number_of_nodes())
    for node, (name, data) in enumerate(graph.nodes(data=True)):
        if "operations" in data:
            place = f"{where}: node {str(name)!r}"
            if data.get("kind") != "storage":
                raise ConfigError(f"{place}: operations applies only to storage nodes; remove operations")
            times[node] = 1.0 / positive(data["operations"], None, f"{place}: operations")
    return {"operation_time": times} if times.any() else {}


def _reducing_switches(graph: nx.Graph[Any], where: str) -> dict[str, Any]:
    """Return which switches add up what passes through them; nothing where none does."""
    for name, data in graph.nodes(data=True):
        value = data.get("reduces", False)
        if not isinstance(value, bool) or (value and data.get("kind", "host") != "switch"):
            place = f"{where}: node {str(name)!r}"
            raise ConfigError(f"{place}: reduces = {shown(value)}: must be true or false, and true only for switches")
    reduces = np.array([data.get("reduces", False) for _, data in graph.nodes(data=True)], dtype=bool)
    return {"switch_reduces": reduces} if reduces.any() else {}


def _link_columns(graph: nx.Graph[Any], index: dict[Hashable, int], where: str) -> dict[str, Any]:
    ends: list[tuple[int, int, int]] = []
    kinds: list[str] = []
    numbers: list[tuple[float, float, float]] = []
    details: list[LinkDetail] = []
    channels: dict[Hashable, int] = {}
    checked: dict[Hashable, _Checked] = {}  # most links of a large cluster are alike
    listed = sorted(_directed_links(graph, where), key=lambda link: index[link[0]])
    for number, (u, v, key, data) in enumerate(listed):
        alike: Hashable = (*data.items(), *map(type, data.values()))
        try:
            row = checked.get(alike)
        except TypeError:  # a list or the like, which the check refuses
            row = None
        if row is None:
            row = checked[alike] = _checked_link(data, f"{where}: edge {u!r} -> {v!r}")
        shared, kind, speed, detail = row
        pair: Hashable = (frozenset((u, v)), key) if shared else number
        ends.append((index[u], index[v], channels.setdefault(pair, len(channels))))
        kinds.append(kind)
        numbers.append(speed)
        details.append(detail)
    which = np.array(ends, dtype=np.int64).reshape(-1, 3)
    columns = np.array(numbers, dtype=np.float64).reshape(-1, 3)
    _check_shared(which[:, 2], columns, kinds, listed, where)
    return {
        "link_src": which[:, 0].copy(),
        "link_dst": which[:, 1].copy(),
        "link_channel": which[:, 2].copy(),
        "link_kind": tuple(kinds),
        "link_bandwidth": columns[:, 0].copy(),
        "link_efficiency": columns[:, 1].copy(),
        "link_latency": columns[:, 2].copy(),
        "details": collected(details),
    }


def _checked_link(data: Attributes, place: str) -> _Checked:
    if not data.keys() <= EDGE_KEYS:
        _reject_unknown(data, EDGE_KEYS, place)
    if "bandwidth" not in data:
        raise ConfigError(
            f"{place}: bandwidth is missing; set it, for example bandwidth='25 Gbit/s' (plain numbers are in bytes/s)"
        )
    shared = data.get("shared", False)
    if not isinstance(shared, bool):
        raise ConfigError(f"{place}: shared = {shown(shared)} must be true or false")
    speed = (
        positive(data["bandwidth"], "bandwidth", f"{place}: bandwidth"),
        fraction(data.get("efficiency", 1.0), f"{place}: efficiency"),
        nonnegative(data.get("latency", 0.0), "time", f"{place}: latency"),
    )
    try:
        told = Told(**{key: data[key] for key in ("mtu", *DETAIL_KEYS) if key in data})
    except ConfigError as error:
        raise type(error)(f"{place}: {str(error).removeprefix('Told: ')}") from None
    return shared, _text(data, "kind", "link", place) or "link", speed, told.detail(f"{place}: ")


def _check_shared(channel: Any, columns: Any, kinds: list[str], listed: list[_Link], where: str) -> None:
    """Both directions of a half-duplex link must agree on what they share."""
    first: dict[int, int] = {}
    for link, number in enumerate(channel.tolist()):
        other = first.setdefault(number, link)
        if other != link and (tuple(columns[other, :2]), kinds[other]) != (tuple(columns[link, :2]), kinds[link]):
            u, v, _, _ = listed[link]
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


def to_graph(cluster: Cluster) -> nx.MultiDiGraph[str]:
    """Return the cluster as a MultiDiGraph with the attributes that :func:`from_graph` reads."""
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=cluster.name, routing=cluster.routing)
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
        if n_uses[channel] > 1:  # the key is what ties the two directions together
            data["shared"] = True
            graph.add_edge(u, v, keys.setdefault(channel, 1_000_000 + channel), **data)
        else:
            graph.add_edge(u, v, **data)
    return graph


def _node_attributes(cluster: Cluster, node: int) -> Attributes:
    data: Attributes = {"kind": cluster.node_kind[node]}
    if cluster.host_of[node] >= 0:
        data["host"] = cluster.host_names[cluster.host_of[node]]
    if cluster.device_of[node] is not None:
        data["device"] = cluster.device_of[node]
    columns = {
        "speed": (cluster.speed, 1.0),
        "send_overhead": (cluster.send_overhead, 0.0),
        "recv_overhead": (cluster.recv_overhead, 0.0),
        "reduce_time": (cluster.reduce_time, 0.0),
    }
    data.update({key: float(column[node]) for key, (column, usual) in columns.items() if column[node] != usual})
    return data | _costs(cluster, node)


def _costs(cluster: Cluster, node: int) -> Attributes:
    found = {}
    host = int(cluster.host_of[node])
    if cluster.host_price is not None and host >= 0:
        first = int(np.argmax((cluster.host_of == host) & cluster.is_endpoint))
        found = {"price": float(cluster.host_price[host])} if first == node else {}
    if cluster.device_price is not None:
        found["device_price"] = float(cluster.device_price[node])
    if cluster.switch_power is not None:
        found["power"] = float(cluster.switch_power[node])
    if cluster.operation_time is not None and cluster.operation_time[node] > 0.0:
        found["operations"] = 1.0 / float(cluster.operation_time[node])
    reduces = {"reduces": True} if cluster.switch_reduces is not None and cluster.switch_reduces[node] else {}
    return {key: value for key, value in found.items() if not np.isnan(value)} | reduces
