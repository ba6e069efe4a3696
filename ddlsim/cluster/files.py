"""Files in and out: TOML for people, node-link JSON and GraphML for programs.

Every error is one line that begins with the path. Nothing in a file can run code: TOML and JSON are plain
data, and XML passes defusedxml (no entities, no DTD) before networkx sees it.

Any cluster can be written as TOML: ``[[nodes]]`` have `names` and what they are, ``[[edges]]`` have `links`, pairs of
names in one direction, and the attributes of graphs (:mod:`ddlsim.cluster.graphs`). Equal attributes share a table, as
far as the order of the nodes, and of the links from each, allows. Read back, the cluster is the same, link by link:
bandwidths and times are rounded nowhere.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from ddlsim import plain
from ddlsim.cluster import schema
from ddlsim.cluster.calibration_table import CalibrationTable, apply
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.details import with_detail
from ddlsim.cluster.graphs import from_graph, to_graph
from ddlsim.cluster.nodes import Graph, Host, add_host, connect, size_of
from ddlsim.cluster.quantity import check_size
from ddlsim.cluster.storage import Storage, add_storage
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.output_files import replacing, write_text
from ddlsim.units import si

#: what is below this line is replaced when the file is calibrated
MARK = "# ---- below: written by ddlsim calibrate; calibrate again to change it ----"
#: attribute -> its dimension and the units to try, the first that says the number exactly is taken
_UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "bandwidth": ("bandwidth", {"Gbit/s": 1.25e8, "Mbit/s": 1.25e5, "GB/s": 1e9, "B/s": 1.0}),
    **dict.fromkeys(
        ("latency", "send_overhead", "recv_overhead", "c0", "c1", "base", "measured", "predicted", "absolute"),
        ("time", {"us": 1e-6, "ms": 1e-3, "ns": 1e-9, "s": 1.0}),
    ),
}


def to_toml(graph: Graph, name: str, calibration: CalibrationTable | None) -> str:
    """Return the text of the file for the graph of a cluster."""
    about: dict[str, Any] = {"name": name}
    about |= {key: graph.graph[key] for key in ("title", "sources", "notes", "routing", "grid") if key in graph.graph}
    lines = [f"{key} = {_value(key, value)}" for key, value in about.items()]
    for node_data, nodes in _runs((_told(node, data), node) for node, data in graph.nodes(data=True)):
        lines += ["", "[[nodes]]", f"names = {_value('names', nodes)}", *_lines(node_data)]
    for edge_data, links in _alike(graph):
        lines += ["", "[[edges]]", "links = ["]
        lines += [f"  {_value('link', [a, b])}," for a, b, _ in links]
        lines += ["]", *_lines(edge_data)]
        if edge_data.get("shared"):  # equal keys tie the two directions together
            lines.append(f"keys = {[key for _, _, key in links]}")
    for path in graph.graph.get("routes", ()):
        lines += ["", "[[routes]]", f"path = {_value('path', path)}"]
    if calibration is not None:
        lines += ["", MARK, *_tables("calibration", calibration.model_dump(exclude_none=True))]
    return "\n".join([*lines, ""])


def add_nodes(graph: Graph, tables: Iterable[Mapping[str, Any]]) -> None:
    """Add what ``[[nodes]]`` say; the graph's reader checks the attributes."""
    for i, table in enumerate(tables):
        names = _texts(table, "names", f"nodes.{i}")
        check_size(len(graph) + len(names), 0, f"nodes.{i}")
        for node in names:
            if node in graph:
                raise ConfigError(f"nodes.{i}.names: {shown(node)} is taken already; choose another name")
            graph.add_node(node, **{str(key): value for key, value in table.items() if key != "names"})


def add_edges(graph: Graph, tables: Iterable[Mapping[str, Any]]) -> None:
    """Add what ``[[edges]]`` say; the graph's reader checks the attributes."""
    n_links = graph.number_of_edges()
    for i, table in enumerate(tables):
        links = table.get("links")
        if not isinstance(links, list) or not all(
            isinstance(link, list) and len(link) == 2 and all(isinstance(end, str) for end in link) for link in links
        ):
            raise ConfigError(f'edges.{i}.links = {shown(links)} must be a list of pairs of nodes like [["a", "b"]]')
        keys = table.get("keys", [None] * len(links))
        if not isinstance(keys, list) or len(keys) != len(links) or not all(k is None or type(k) is int for k in keys):
            raise ConfigError(f"edges.{i}.keys = {shown(keys)} must be {len(links)} whole numbers, one for each link")
        n_links += len(links)
        check_size(0, n_links, f"edges.{i}")
        data = {str(key): value for key, value in table.items() if key not in ("links", "keys")}
        for (a, b), key in zip(links, keys, strict=True):
            for end in (a, b):
                if end not in graph:
                    raise unknown_name("node", end, graph.nodes, f"edges.{i}.links")
            graph.add_edge(a, b, key, **data)


def _texts(table: Mapping[str, Any], key: str, place: str) -> list[str]:
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{place}.{key} = {shown(value)} must be a list of names")
    return value


def _runs(pairs: Iterable[tuple[dict[str, Any], Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield (attributes, what has them one after the other)."""
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        run = list(group)
        yield run[0][0], [what for _, what in run]


def _told(node: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a node, without what goes without saying: an endpoint is a machine of its own."""
    return {key: value for key, value in data.items() if (key, value) != ("host", node) or data["kind"] == "switch"}


def _alike(graph: Graph) -> list[tuple[dict[str, Any], list[tuple[str, str, int | None]]]]:
    """Return (attributes, links that have them), in an order that keeps that of the links from each node."""
    tables: dict[tuple[int, str], tuple[dict[str, Any], list[tuple[str, str, int | None]]]] = {}
    for node in graph:
        edges = graph.out_edges(node, keys=True, data=True)
        links = ((data, (a, b, key if data.get("shared") else None)) for a, b, key, data in edges)
        for turn, (data, run) in enumerate(_runs(links)):
            tables.setdefault((turn, repr(data)), (data, []))[1].extend(run)
    return [tables[key] for key in sorted(tables, key=lambda key: key[0])]


def _lines(attributes: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(key, value)}" for key, value in attributes.items()]


def _tables(name: str, table: Mapping[str, Any]) -> list[str]:
    """Return a table, and those in it below it."""
    lines = [f"[{name}]"]
    deeper: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            deeper += ["", *_tables(f"{name}.{key}", value)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            deeper += [line for row in value for line in ("", f"[[{name}.{key}]]", *_lines(row))]
        else:
            lines.append(f"{key} = {_value(key, value)}")
    return lines + deeper


def _value(key: str, value: Any) -> str:
    if key in _UNITS and isinstance(value, float):
        dimension, units = _UNITS[key]
        texts = (f"{value / scale:.12g} {unit}" for unit, scale in units.items())
        exact = (text for text in texts if len(text) < 16 and si(text, dimension) == value)
        return json.dumps(next(exact, f"{value!r} {next(reversed(units))}"))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON allows, TOML does not


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
        write_text(path, to_toml(graph, cluster.name, cluster.calibration))
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
        add_nodes(graph, file.nodes)
        sources += _add_explicit(graph, file)
        add_edges(graph, file.edges)
    for i, row in enumerate(file.storage):
        table = schema.check_table(schema.StorageTable, row, f"storage.{i}")
        sources += [table.source] if table.source else []
        add_storage(graph, Storage(**table.model_dump(exclude={"source"})), f"storage.{i}")
    routes = [schema.check_table(schema.RouteTable, row, f"routes.{i}") for i, row in enumerate(file.routes)]
    sources += [route.source for route in routes if route.source]
    title, paths = ", but ".join((file.title, *settings)), [route.path for route in routes]
    graph.graph.update(title=title, sources=sources, notes=file.notes, routes=paths)
    if file.grid:
        graph.graph["grid"] = file.grid
    if file.routing is not None:
        graph.graph["routing"] = file.routing
    cluster = from_graph(graph, "+".join((file.name or stem, *settings))).with_costs(switch_power=file.switch_power)
    if file.switch_reduces is not None:
        cluster = dataclasses.replace(cluster, switch_reduces=cluster.is_fabric_switch & file.switch_reduces)
    if file.link is not None:
        cluster = _with_link_table(cluster, file.link)
    return cluster if file.calibration is None else apply(cluster, file.calibration)


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
