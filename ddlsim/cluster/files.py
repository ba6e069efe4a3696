"""Files in and out: TOML for people, node-link JSON and GraphML for programs.

Every error is one line that begins with the path. Nothing in a file can run code: TOML and JSON are plain
data, and XML passes defusedxml (no entities, no DTD) before networkx sees it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from ddlsim import plain
from ddlsim.cluster import calibration_table, schema, toml_file
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.details import with_detail
from ddlsim.cluster.graphs import from_graph, to_graph
from ddlsim.cluster.nodes import Graph, Host, add_host, connect, size_of
from ddlsim.cluster.quantity import check_size
from ddlsim.cluster.storage import Storage, add_storage
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.output_files import replacing, write_text

#: graph attributes that GraphML, which knows no lists, carries as JSON text
_LISTS = ("sources", "notes", "grid", "routes")


def read_cluster(path: Path, text: str, settings: Sequence[str] = ()) -> Cluster:
    """Return the cluster that the file's `text` describes, in the format of the suffix.

    settings  "key=value" for keys of [generator] and [host], in place of the file's

    Raises :class:`ConfigError` in one line: path, field, value, rule and remedy.
    """
    readers = {".json": _read_json, ".graphml": _read_graphml}
    try:
        if path.suffix == ".toml":
            return _read_toml(path.stem, text, settings)
        if settings:
            raise ConfigError(f"+{settings[0]}: only keys of a .toml file with [generator] can be set")
        return readers[path.suffix](path.stem, text)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply for a cluster; is it the right file?") from None


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster as TOML, node-link JSON (``.json``) or GraphML (``.graphml``), by the suffix of `path`."""
    graph = to_graph(cluster)
    if path.suffix == ".toml":
        write_text(path, toml_file.to_toml(graph, cluster.name, cluster.calibration))
    elif path.suffix == ".json":
        data = nx.node_link_data(graph, edges="edges")
        write_text(path, json.dumps(data, indent=1))
    elif path.suffix == ".graphml":
        graph.graph.update({key: json.dumps(graph.graph[key]) for key in _LISTS if key in graph.graph})
        with replacing(path) as file:
            nx.write_graphml(graph, file)
    else:
        raise ConfigError(f"{path}: cannot write the format {path.suffix!r}; use .toml, .json or .graphml")


def _read_toml(stem: str, text: str, settings: Sequence[str]) -> Cluster:
    file = schema.parse_file(plain.parse_toml(text))
    for setting in sorted(settings, key=lambda setting: not setting.startswith("transport=")):
        schema.set_key(file, setting)
    sources: list[str] = list(file.sources)
    if file.generator is not None:
        host, host_sources = schema.interior(file.host, "host") if file.host is not None else (Host(), [])
        graph, generator_sources = schema.generate(file.generator, host)
        sources += generator_sources + host_sources
    else:
        graph = nx.MultiDiGraph()
        toml_file.add_nodes(graph, file.nodes)
        sources += _add_explicit(graph, file)
        toml_file.add_edges(graph, file.edges)
    for i, row in enumerate(file.storage):
        table = schema.check_table(schema.StorageTable, row, f"storage.{i}")
        sources += [table.source] if table.source else []
        add_storage(graph, Storage(**table.model_dump(exclude={"source"})), f"storage.{i}")
    routes = [schema.check_table(schema.RouteTable, row, f"routes.{i}") for i, row in enumerate(file.routes)]
    sources += [route.source for route in routes if route.source]
    graph.graph.update(
        title=", but ".join((file.title, *settings)), sources=sources, notes=file.notes,
        routes=[route.path for route in routes],
    )  # fmt: skip
    if file.grid:
        graph.graph["grid"] = file.grid
    if file.routing is not None:
        graph.graph["routing"] = file.routing
    cluster = from_graph(graph, "+".join((file.name or stem, *settings))).with_costs(switch_power=file.switch_power)
    if file.switch_reduces is not None:
        cluster = dataclasses.replace(cluster, switch_reduces=cluster.is_fabric_switch & file.switch_reduces)
    if file.link is not None:
        cluster = _with_link_table(cluster, file.link)
    return cluster if file.calibration is None else calibration_table.apply(cluster, file.calibration)


def _with_link_table(cluster: Cluster, table: dict[str, Any]) -> Cluster:
    """Return the cluster with the details of a `[link]` table."""
    link = schema.check_table(schema.AllLinksTable, table, "link")
    source = (link.source,) if link.source else ()
    detail = dataclasses.asdict(link.detail("link"))
    return dataclasses.replace(with_detail(cluster, **detail, kinds=link.kinds), sources=(*cluster.sources, *source))


def _numbered(name: str, count: int | None) -> list[str]:
    return [name] if count is None else [f"{name}{i}" for i in range(count)]


def _add_explicit(graph: Graph, file: schema.ClusterFile) -> list[str]:
    """Add `[[hosts]]`, `[[switches]]` and `[[links]]` to the graph; return their sources."""
    sources: list[str] = []
    ports: dict[str, list[str]] = {}
    for i, row in enumerate(file.hosts):
        place = f"hosts.{i}"
        head = schema.check_table(schema.HostTable, {key: row[key] for key in ("name", "count") if key in row}, place)
        rest = {key: value for key, value in row.items() if key not in ("name", "count")}
        interior, found = schema.interior(rest, place)
        sources += found
        n_hosts, (nodes, links) = head.count or 1, size_of(interior)
        check_size(len(graph) + n_hosts * nodes, graph.number_of_edges() + n_hosts * links, place)
        for name in _numbered(head.name, head.count):
            _check_new(name, ports, place)
            try:
                ports[name] = add_host(graph, name, interior)
            except ConfigError as error:
                raise type(error)(f"{place}: {str(error).removeprefix('host: ')}") from None
    for i, row in enumerate(file.switches):
        switch = schema.check_table(schema.SwitchTable, row, f"switches.{i}")
        sources += [switch.source] if switch.source else []
        check_size(len(graph) + (switch.count or 1), 0, f"switches.{i}")
        for name in _numbered(switch.name, switch.count):
            _check_new(name, ports, f"switches.{i}")
            said = {} if switch.power is None else {"power": switch.power}
            graph.add_node(name, kind="switch", **said, **({"reduces": True} if switch.reduces else {}))
            ports[name] = [name]
    for i, row in enumerate(file.links):
        link = schema.check_table(schema.LinkTable, row, f"links.{i}")
        sources += [link.source] if link.source else []
        _add_links(graph, ports, link, f"links.{i}")
    return sources


def _check_new(name: str, ports: dict[str, list[str]], place: str) -> None:
    if name in ports:
        raise ConfigError(f"{place}.name = {name!r} is taken already; choose another name")


def _add_links(graph: Graph, ports: dict[str, list[str]], link: schema.LinkTable, place: str) -> None:
    ends = [_matching(pattern, ports, f"{place}.between") for pattern in link.between]
    if link.shared and link.reverse_bandwidth is not None:
        raise ConfigError(
            f"{place}.reverse_bandwidth = {link.reverse_bandwidth!r} has no effect on a shared link; remove one"
        )
    n_ports = [sum(len(ports[name]) for name in names) for names in ends]
    n_cables = max(n_ports[0] * len(ends[1]), n_ports[1] * len(ends[0]))  # at most: each pair has one for each NIC
    check_size(0, graph.number_of_edges() + 2 * n_cables, f"{place}.between = {link.between!r}")
    for a, b in itertools.product(*ends):
        if a == b:
            raise ConfigError(f"{place}.between = {link.between!r} joins {a!r} to itself; name two nodes")
        n_switches = sum(graph.nodes[ports[end][0]]["kind"] == "switch" and ports[end] == [end] for end in (a, b))
        kind = link.kind or ("link", "nic", "trunk")[n_switches]
        n_cables = max(len(ports[a]), len(ports[b]))  # one for each NIC
        for i in range(n_cables):
            connect(
                graph, ports[a][i % len(ports[a])], ports[b][i % len(ports[b])], kind, link.bandwidth,
                link.latency, efficiency=link.efficiency, reverse_bandwidth=link.reverse_bandwidth,
                shared=link.shared, detail=link.detail(place),
            )  # fmt: skip


def _matching(pattern: str, names: Iterable[str], place: str) -> list[str]:
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise unknown_name("host or switch", pattern, names, place)
    return found


def _read_json(stem: str, text: str) -> Cluster:
    data: Any = plain.parse_json(text)
    edges = next((key for key in ("edges", "links") if isinstance(data, dict) and key in data), None)
    if edges is None or not isinstance(data.get("nodes"), list) or not isinstance(data[edges], list):
        raise ConfigError("has no lists 'nodes' and 'edges' (or 'links'); write it with networkx.node_link_data")
    for key in ("directed", "multigraph"):
        if not isinstance(data.get(key, True), bool):
            raise ConfigError(f"{key} = {shown(data[key])} must be true or false")
    if not isinstance(data.get("graph", {}), dict):
        raise ConfigError(f"graph = {shown(data['graph'])} must be an object: the attributes of the whole")
    try:
        ids = [node["id"] for node in data["nodes"]]
        _check_references(ids, [end for edge in data[edges] for end in (edge["source"], edge["target"])])
        graph = nx.node_link_graph(data, edges=edges)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, nx.NetworkXException) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"is no node-link graph ({what}); nodes need 'id', {edges} 'source' and 'target'") from None
    return from_graph(graph, None if "name" in graph.graph else stem)


def _check_references(nodes: list[Any], ends: list[Any]) -> None:
    known = set(nodes)
    if len(known) < len(nodes):
        repeated = next(node for node in known if nodes.count(node) > 1)
        raise ConfigError(f"the node id {shown(repeated)} appears twice; rename one")
    for end in ends:
        if end not in known:
            raise ConfigError(
                f"an edge ends at {shown(end)}, which is not among the nodes; add the node or correct the edge"
            )


def _read_graphml(stem: str, text: str) -> Cluster:
    from xml.etree.ElementTree import ParseError

    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        root = fromstring(text, forbid_dtd=True)
    except DefusedXmlException as error:
        raise ConfigError(
            f"declares a DTD or an entity, which is refused ({type(error).__name__}); remove it"
        ) from None
    except (ParseError, ValueError) as error:  # ValueError: characters that XML does not have
        raise ConfigError(f"is not valid XML: {error}; correct it (is the file complete?)") from None
    elements = [(element.tag.rpartition("}")[2], element.attrib) for element in root.iter()]
    try:
        _check_references(
            [attributes["id"] for tag, attributes in elements if tag == "node"],
            [attributes[end] for tag, attributes in elements if tag == "edge" for end in ("source", "target")],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # networkx warns of keys without a type, and guesses
            graph: nx.Graph[Any] = nx.parse_graphml(text, force_multigraph=True)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, nx.NetworkXException, Warning) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"is no GraphML graph ({what}); write it with networkx") from None
    for *_, edge in graph.edges(data=True):
        edge.pop("id", None)
    for key in _LISTS:
        if isinstance(graph.graph.get(key), str):
            try:
                graph.graph[key] = plain.parse_json(graph.graph[key])
            except ConfigError:
                raise ConfigError(
                    f"{key} = {shown(graph.graph[key])} must be a list as JSON text, like '[8, 8]'"
                ) from None
    return from_graph(graph, None if "name" in graph.graph else stem)
