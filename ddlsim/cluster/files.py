"""Cluster files: TOML for people, node-link JSON and GraphML for programs.

Every error is one line that begins with the path. Files cannot run code: TOML and JSON are plain data, and defusedxml
parses XML (no entities, no DTD) before networkx reads it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ddlsim import plain
from ddlsim.arguments import Count, Density, Rule, checked, integer, one_of, quantity, settings
from ddlsim.bundled import relative_name
from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.details import IDEAL, TRANSPORT_KEYS, LinkDetailSettings, with_detail
from ddlsim.cluster.generators import GENERATORS
from ddlsim.cluster.graphs import from_graph, to_graph
from ddlsim.cluster.nodes import Graph, Host, Interior, MultiGpu, add_host, connect, size_of
from ddlsim.cluster.quantity import MAX_NODES, check_size
from ddlsim.cluster.routing import POLICIES, check_policy
from ddlsim.cluster.storage import Storage, add_storage
from ddlsim.errors import ConfigError, listed, shown, unknown_name
from ddlsim.output_files import replacing, write_text
from ddlsim.plain import parse_value
from ddlsim.schema import PLAIN, Source, to_toml
from ddlsim.units import quantity_text

if TYPE_CHECKING:
    from ddlsim.cluster.calibration_table import CalibrationTable

# ---------------------------------------------------------------- TOML tables

Table = dict[str, Any]  # as parsed; every value is checked below
_Names = Annotated[Sequence[str], Rule("a list of at least 2 names", lambda value: _is_names(value, 2))]
_Pair = Annotated[Sequence[str], Rule("a list of 2 names", lambda value: _is_names(value, 2, 2))]
_Machines = Annotated[int, integer(1, MAX_NODES)]
_Power = Annotated[float | str, quantity("power", zero=True)]


def _is_names(value: Any, least: int, most: float = math.inf) -> bool:
    is_list = isinstance(value, list | tuple) and least <= len(value) <= most
    return is_list and all(isinstance(name, str) for name in value)


@checked
@dataclass(frozen=True)
class Numbered:
    """The first keys of `[[hosts]]`: one machine, or `count` of them called name0, name1, ..."""

    name: str
    count: _Machines | None = None

    @property
    def names(self) -> list[str]:
        """All names of the machines or switches."""
        return [self.name] if self.count is None else [f"{self.name}{i}" for i in range(self.count)]


@checked
@dataclass(frozen=True)
class SwitchTable(Numbered):
    """`[[switches]]`: one switch, or `count` of them called name0, name1, ..."""

    power: Annotated[float, quantity("power", zero=True, si=True)] | None = None
    reduces: bool = False
    source: str | None = None


@settings
class AllLinksTable(LinkDetailSettings):
    """`[link]`: details of all links of the given `kinds` (default: all links between hosts)."""

    kinds: Sequence[str] | None = None
    source: str | None = None


@settings
class StorageTable(Storage):
    """`[[storage]]`: a storage for data sets and checkpoints, connected to `at` (default: the only switch)."""

    source: str | None = None


@settings
class LinkTable(LinkDetailSettings):
    """`[[links]]`: links between two names; `*` in a name makes one link per match."""

    between: _Pair
    bandwidth: Annotated[float, quantity("bandwidth", si=True)]
    latency: Annotated[float, quantity("time", zero=True, si=True)]
    reverse_bandwidth: Annotated[float, quantity("bandwidth", si=True)] | None = None
    efficiency: Density = 1.0
    shared: bool = False
    kind: str | None = None
    source: str | None = None


@checked
@dataclass(frozen=True)
class RouteTable:
    """`[[routes]]`: the path from its first to its last node, which overrides the routing policy."""

    path: _Names
    source: str | None = None


@checked
@dataclass(frozen=True)
class ClusterFile:
    """The whole file: `generator` and `host`, or `hosts`, `switches` and `links`, or `nodes` and `edges`."""

    name: str | None = None
    title: str = ""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    routing: Annotated[str, one_of(*POLICIES)] | None = None
    grid: Sequence[Count] = ()
    switch_power: _Power | None = None  # of every switch between the machines
    switch_reduces: bool | None = None  # whether each of them reduces messages
    generator: Mapping[str, object] | None = None
    link: AllLinksTable | None = None
    host: Mapping[str, object] | None = None
    hosts: Sequence[Mapping[str, object]] = ()
    switches: Sequence[SwitchTable] = ()
    links: Sequence[LinkTable] = ()
    storage: Sequence[StorageTable] = ()
    nodes: Sequence[Mapping[str, object]] = ()
    edges: Sequence[Mapping[str, object]] = ()
    routes: Sequence[RouteTable] = ()
    calibration: Mapping[str, object] | None = None  # see calibration_table.py


def _call(make: Callable[..., Any], table: Mapping[str, object], place: str, **more: object) -> tuple[Any, list[str]]:
    """Call a function or class with the arguments in a table; return the result, and the table's source."""
    arguments = dict(table)
    source = arguments.pop("source", None)
    if not isinstance(source, str | None):
        raise ConfigError(f"{place}.source = {shown(source)}: must be a string")
    for key in more.keys() & arguments.keys():
        raise unknown_name("key", key, PLAIN.arguments_of(make).keys() - more, place)
    checked_arguments = PLAIN.arguments(make, arguments, place)
    try:
        return make(**checked_arguments, **more), [source] if source else []
    except ConfigError as error:
        text = str(error)
        raise type(error)(text if text.startswith("host: ") else f"{place}: {text}") from None


def interior(table: Mapping[str, object], place: str) -> tuple[Interior, list[str]]:
    """Return the machine of a `[host]` table (with GPUs if it has `n_gpus`), and its source."""
    if "n_gpus" in table:
        return _call(MultiGpu, table, place)
    only_gpu = {field.name for field in fields(MultiGpu)} - {field.name for field in fields(Host)}
    for key in sorted(table.keys() & only_gpu):
        raise ConfigError(
            f"{place}.{key} = {shown(table[key])} applies only to machines with GPUs; add n_gpus or remove {key}"
        )
    return _call(Host, table, place)


def generate(table: Mapping[str, object], host: Interior) -> tuple[Graph, list[str]]:
    """Return the graph of a `[generator]` table, and the table's source."""
    parameters = dict(table)
    kind = parameters.pop("type", None)
    if kind is None:
        raise ConfigError(f"generator.type is missing; add one of {listed(sorted(GENERATORS))}")
    if not isinstance(kind, str) or kind not in GENERATORS:
        raise unknown_name("type", str(kind), GENERATORS, "generator")
    taken = PLAIN.arguments_of(GENERATORS[kind]).keys()
    for other, owner in (("link", AllLinksTable), ("host", MultiGpu)):
        for key in parameters.keys() & {field.name for field in fields(owner)} - taken - {"source"}:
            raise ConfigError(f"generator.{key}: {key!r} is a key of [{other}]; move it to that table")
    return _call(GENERATORS[kind], parameters, "generator", host=host)


def set_key(file: Table, context: str) -> None:
    """Set a key of a file's [generator], [host] or [link] from a text like ``n_hosts=64`` or ``transport=roce``."""
    key, is_setting, text = context.partition("=")
    if not is_setting:
        raise ConfigError(
            f"+{context}: expected +key=value with a key of [generator], [host] or [link], for example +n_hosts=64"
        )
    if key == "transport":
        _set_transport(file, parse_value(text))
    elif key == "storage":  # for files with a single switch between machines
        file["storage"] = [*file.get("storage", []), {"name": "storage", "read": text}]
    elif key in {field.name for field in fields(LinkDetailSettings)}:
        file["link"] = {**file.get("link", {}), key: parse_value(text)}
    elif key == "routing":
        file["routing"] = check_policy(text, f"+{context}")
    elif key == "switch_reduces":
        if text not in ("true", "false"):
            raise ConfigError(f"+{context}: must be true or false")
        file["switch_reduces"] = text == "true"
    else:
        _set_in_generator(file, key, parse_value(text), context)


def _set_in_generator(file: Table, key: str, value: object, context: str) -> None:
    if not isinstance(file.get("generator"), dict):
        raise ConfigError(
            f"+{context}: only keys of files with [generator] can be overridden; edit a copy of the file instead"
        )
    make = GENERATORS.get(str(file["generator"].get("type")))
    of_network = set() if make is None else PLAIN.arguments_of(make).keys() - {"host"}
    of_host = {field.name for field in fields(MultiGpu)}
    if key not in of_network | of_host:
        raise unknown_name("key", key, of_network | of_host, f"+{context}")
    table = "generator" if key in of_network else "host"
    file[table] = {**file.get(table, {}), key: value}


def _set_transport(file: Table, name: object) -> None:
    """Set the transport of links between hosts; settings of a different transport in the file are removed."""
    tables = (file.get("link", {}), *file.get("links", ()), *file.get("edges", ()))
    for table in tables:
        if table.get("transport", name) != name:
            for key in ("transport", "mtu", *TRANSPORT_KEYS):
                table.pop(key, None)
    if name != IDEAL and not any(table.get("transport") == name for table in tables):
        file["link"] = {**file.get("link", {}), "transport": name}


def parse_file(table: Table, settings: Sequence[str] = ()) -> ClusterFile:
    """Return the checked structure of a file after setting some keys; tables are checked when they are used."""
    outline = Source(allow_code=True)  # nothing is imported here
    for key in ("hosts", "switches", "links", "nodes", "edges", "grid"):
        if table.get("generator") and table.get(key):
            raise ConfigError(f"{key} cannot be combined with [generator]; remove one of them")
    PLAIN.build(ClusterFile, table, "", outline, "")
    for context in sorted(settings, key=lambda context: not context.startswith("transport=")):
        set_key(table, context)
    file = PLAIN.build(ClusterFile, table, "", outline, "")
    if file.generator is None and not (file.hosts or file.nodes):
        raise ConfigError(
            "the file describes no machines; add [generator], for example with type = 'star', or [[hosts]]"
        )
    if file.generator is None and file.host is not None:
        raise ConfigError("[host] requires [generator]; move the keys of [host] to [[hosts]]")
    return file


# ---------------------------------------------------------------- files

#: calibration replaces everything below this line
MARK = "# ---- below: written by ddlsim calibrate; calibrate again to change it ----"
#: attribute of nodes and edges -> dimension of its unit in files
_DIMENSIONS = {"bandwidth": "bandwidth", **dict.fromkeys(("latency", "send_overhead", "recv_overhead"), "time")}
#: graph attributes stored as JSON text in GraphML, which has no lists
_LISTS = ("sources", "notes", "grid", "routes")


def read_cluster(path: Path, text: str, settings: Sequence[str] = ()) -> Cluster:
    """Return the cluster described by the file's `text`, in the format of the suffix.

    settings  "key=value" for keys of [generator] and [host], which override the file
    """
    readers = {".json": _read_json, ".graphml": _read_graphml}
    try:
        if path.suffix == ".toml":
            cluster = _read_toml(path.stem, text, settings)
        elif settings:
            raise ConfigError(f"+{settings[0]}: only keys of .toml files with [generator] can be overridden")
        else:
            cluster = readers[path.suffix](path.stem, text)
        return _renamed(cluster, lambda name: str(path.parent / name) if (path.parent / name).is_file() else name)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a cluster file; is it the right file?") from None


def in_folder(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with device-file paths relative to `folder`, as a file in it names them."""
    return _renamed(cluster, lambda name: relative_name(name, folder))


def _renamed(cluster: Cluster, rename: Callable[[str], str]) -> Cluster:
    """Rename the device files of a cluster; if no name changes, return the cluster itself."""
    names = {name: rename(name) for name in set(cluster.device_of) if name and name.endswith(".toml")}
    if all(name == renamed for name, renamed in names.items()):
        return cluster
    return dataclasses.replace(cluster, device_of=tuple(names.get(name or "", name) for name in cluster.device_of))


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster as TOML, node-link JSON (``.json``) or GraphML (``.graphml``), by the suffix of `path`.

    The file names device files relative to its own folder.
    """
    if path.suffix == ".toml":
        write_text(path, cluster_toml(cluster, path.parent, cluster.calibration))
        return
    import networkx as nx

    graph = in_folder(cluster, path.parent).to_graph()
    if path.suffix == ".json":
        data = nx.node_link_data(graph, edges="edges")
        write_text(path, json.dumps(data, indent=1))
    elif path.suffix == ".graphml":
        graph.graph.update({key: json.dumps(graph.graph[key]) for key in _LISTS if key in graph.graph})
        with replacing(path) as file:
            nx.write_graphml(graph, file)
    else:
        raise ConfigError(f"{path}: cannot write {path.suffix!r} files; use .toml, .json or .graphml")


def cluster_toml(cluster: Cluster, folder: Path, calibration: CalibrationTable | None = None) -> str:
    """Return a cluster as TOML of a file in `folder`, which :func:`read_cluster` reads as the same cluster.

    Nodes and edges with equal attributes share a table if this preserves the order of nodes and of each node's links.
    """
    graph = to_graph(in_folder(cluster, folder))
    about = {key: graph.graph[key] for key in ("title", "sources", "notes", "routing", "grid") if key in graph.graph}
    table: dict[str, Any] = {"name": cluster.name, "nodes": [], "edges": [], "routes": []} | about
    for node, data in graph.nodes.items():
        if data["kind"] != "switch" and data["host"] == node:  # the default
            del data["host"]
    for data, nodes in _runs((data, node) for node, data in graph.nodes.items()):
        table["nodes"].append({"names": nodes, **_in_units(data)})
    for data, links in _alike(graph):
        keys = {"keys": [key for _, _, key in links]} if data.get("shared") else {}  # identifies the opposite direction
        table["edges"].append({"links": [[a, b] for a, b, _ in links], **_in_units(data), **keys})
    table["routes"] = [{"path": list(path)} for path in graph.graph.get("routes", ())]
    text = to_toml({key: value for key, value in table.items() if value != [] or key in about})
    if calibration is None:
        return text
    return f"{text}\n{MARK}\n{to_toml({'calibration': PLAIN.table(calibration)}).lstrip()}"


def _in_units(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with bandwidths and times as text with units."""
    return {key: quantity_text(value, _DIMENSIONS[key]) if key in _DIMENSIONS else value for key, value in data.items()}


def _runs(pairs: Iterable[tuple[dict[str, Any], Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Group consecutive neighbours with equal attributes: yield (attributes, neighbours)."""
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        run = list(group)
        yield run[0][0], [neighbour for _, neighbour in run]


def _alike(graph: Graph) -> list[tuple[dict[str, Any], list[tuple[str, str, int | None]]]]:
    """Return (attributes, links that have them), in an order that preserves the order of each node's links."""
    tables: dict[tuple[int, str], tuple[dict[str, Any], list[tuple[str, str, int | None]]]] = {}
    for a, ends in graph.adj.items():
        links = (
            (data, (a, b, key if data.get("shared") else None))
            for b, keyed in ends.items()
            for key, data in keyed.items()
        )
        for turn, (data, run) in enumerate(_runs(links)):
            tables.setdefault((turn, repr(data)), (data, []))[1].extend(run)
    return [tables[key] for key in sorted(tables, key=lambda key: key[0])]


def _read_toml(stem: str, text: str, settings: Sequence[str]) -> Cluster:
    file = parse_file(plain.parse_toml(text), settings)
    sources: list[str | None] = []
    if file.generator is not None:
        host, host_sources = interior(file.host, "host") if file.host is not None else (Host(), [])
        graph, generator_sources = generate(file.generator, host)
        sources += generator_sources + host_sources
    else:
        graph = Graph()
        _add_nodes(graph, file.nodes)
        sources += _add_explicit(graph, file)
        _add_edges(graph, file.edges)
    for i, storage in enumerate(file.storage):
        add_storage(graph, storage, f"storage[{i}]")
    sources += [storage.source for storage in file.storage] + [route.source for route in file.routes]
    graph.graph.update(
        title=", but ".join((file.title, *settings)),
        sources=[*file.sources, *filter(None, sources)],
        notes=file.notes,
        routes=[list(route.path) for route in file.routes],
    )
    if file.grid:
        graph.graph["grid"] = file.grid
    if file.routing is not None:
        graph.graph["routing"] = file.routing
    cluster = from_graph(graph, "+".join((file.name or stem, *settings))).with_costs(switch_power=file.switch_power)
    if file.switch_reduces is not None:
        cluster = dataclasses.replace(cluster, switch_reduces=cluster.is_fabric_switch & file.switch_reduces)
    if file.link is not None:
        detail = dataclasses.asdict(file.link.detail("link: "))
        cluster = with_detail(cluster, **detail, kinds=file.link.kinds)
        cluster = dataclasses.replace(cluster, sources=(*cluster.sources, *filter(None, [file.link.source])))
    if file.calibration is None:
        return cluster
    from ddlsim.cluster import calibration_table

    return calibration_table.apply(cluster, file.calibration)


def _add_explicit(graph: Graph, file: ClusterFile) -> list[str | None]:
    """Add `[[hosts]]`, `[[switches]]` and `[[links]]` to the graph; return their sources."""
    sources: list[str | None] = []
    ports: dict[str, list[str]] = {}
    for i, row in enumerate(file.hosts):
        place = f"hosts[{i}]"
        head = PLAIN.build(Numbered, {key: row[key] for key in ("name", "count") if key in row}, place)
        rest = {key: value for key, value in row.items() if key not in ("name", "count")}
        machine, machine_sources = interior(rest, place)
        sources += machine_sources
        n_hosts, (nodes, links) = head.count or 1, size_of(machine)
        check_size(len(graph) + n_hosts * nodes, graph.number_of_edges() + n_hosts * links, place)
        for name in head.names:
            _check_new(name, ports, place)
            try:
                ports[name] = add_host(graph, name, machine)
            except ConfigError as error:
                raise type(error)(f"{place}: {str(error).removeprefix('host: ')}") from None
    for i, switch in enumerate(file.switches):
        check_size(len(graph) + (switch.count or 1), 0, f"switches[{i}]")
        told: dict[str, Any] = {} if switch.power is None else {"power": switch.power}
        for name in switch.names:
            _check_new(name, ports, f"switches[{i}]")
            graph.add_node(name, kind="switch", **told, **({"reduces": True} if switch.reduces else {}))
            ports[name] = [name]
    for i, link in enumerate(file.links):
        _add_links(graph, ports, link, f"links[{i}]")
    return sources + [switch.source for switch in file.switches] + [link.source for link in file.links]


def _add_nodes(graph: Graph, tables: Iterable[Mapping[str, Any]]) -> None:
    """Add `[[nodes]]`: `names`, and attributes, which :func:`from_graph` checks."""
    for i, table in enumerate(tables):
        names: Any = table.get("names")
        if not _is_names(names, 1):
            raise ConfigError(f"nodes[{i}].names = {shown(names)} must be a list of names")
        check_size(len(graph) + len(names), 0, f"nodes[{i}]")
        for node in names:
            if node in graph:
                raise ConfigError(f"nodes[{i}].names: {shown(node)} is already taken; choose another name")
            graph.add_node(node, **{str(key): value for key, value in table.items() if key != "names"})


def _add_edges(graph: Graph, tables: Iterable[Mapping[str, Any]]) -> None:
    """Add `[[edges]]`: `links`, pairs of nodes in one direction, and attributes, which :func:`from_graph` checks."""
    n_links = graph.number_of_edges()
    for i, table in enumerate(tables):
        links: Any = table.get("links")
        if not isinstance(links, list | tuple) or not all(_is_names(link, 2, 2) for link in links):
            raise ConfigError(f'edges[{i}].links = {shown(links)} must be a list of node pairs, such as [["a", "b"]]')
        keys: Any = table.get("keys", [None] * len(links))
        is_list = isinstance(keys, list | tuple) and len(keys) == len(links)
        if not is_list or not all(key is None or type(key) is int for key in keys):
            raise ConfigError(f"edges[{i}].keys = {shown(keys)} must be {len(links)} integers, one per link")
        n_links += len(links)
        check_size(0, n_links, f"edges[{i}]")
        data = {str(key): value for key, value in table.items() if key not in ("links", "keys")}
        for (a, b), key in zip(links, keys, strict=True):
            for end in (a, b):
                if end not in graph:
                    raise unknown_name("node", end, graph.nodes, f"edges[{i}].links")
            graph.add_edge(a, b, key, **data)


def _check_new(name: str, ports: dict[str, list[str]], place: str) -> None:
    if name in ports:
        raise ConfigError(f"{place}.name = {name!r} is already taken; choose another name")


def _add_links(graph: Graph, ports: dict[str, list[str]], link: LinkTable, place: str) -> None:
    ends = [[name for name in ports if fnmatch.fnmatchcase(name, pattern)] for pattern in link.between]
    for pattern, matches in zip(link.between, ends, strict=True):
        if not matches:
            raise unknown_name("host or switch", pattern, ports, f"{place}.between")
    if link.shared and link.reverse_bandwidth is not None:
        raise ConfigError(
            f"{place}.reverse_bandwidth = {link.reverse_bandwidth!r} cannot be combined with shared; remove one of them"
        )
    n_ports = [sum(len(ports[name]) for name in names) for names in ends]
    n_cables = max(n_ports[0] * len(ends[1]), n_ports[1] * len(ends[0]))  # upper limit: one per NIC of each pair
    check_size(0, graph.number_of_edges() + 2 * n_cables, f"{place}.between = {link.between!r}")
    for a, b in itertools.product(*ends):
        if a == b:
            raise ConfigError(
                f"{place}.between = {link.between!r} connects {a!r} to itself; specify two different nodes"
            )
        n_switches = sum(graph.nodes[ports[end][0]]["kind"] == "switch" and ports[end] == [end] for end in (a, b))
        kind = link.kind or ("link", "nic", "trunk")[n_switches]
        rest: Any = {key: getattr(link, key) for key in ("efficiency", "reverse_bandwidth", "shared")}
        rest["detail"] = link.detail(f"{place}: ")
        for i in range(max(len(ports[a]), len(ports[b]))):  # one per NIC
            left, right = (ports[end][i % len(ports[end])] for end in (a, b))
            connect(graph, left, right, kind, link.bandwidth, link.latency, **rest)


def _read_json(stem: str, text: str) -> Cluster:
    import networkx as nx

    data: Any = plain.parse_json(text)
    edges = next((key for key in ("edges", "links") if isinstance(data, dict) and key in data), None)
    if edges is None or not isinstance(data.get("nodes"), list) or not isinstance(data[edges], list):
        raise ConfigError(
            "the lists 'nodes' and 'edges' (or 'links') are missing; write the file with networkx.node_link_data"
        )
    for key in ("directed", "multigraph"):
        if not isinstance(data.get(key, True), bool):
            raise ConfigError(f"{key} = {shown(data[key])} must be true or false")
    if not isinstance(data.get("graph", {}), dict):
        raise ConfigError(f"graph = {shown(data['graph'])} must be an object with the attributes of the graph")
    with _graph_errors("node-link graph", f"nodes must have 'id', and {edges} 'source' and 'target'"):
        ids = [node["id"] for node in data["nodes"]]
        _check_references(ids, [end for edge in data[edges] for end in (edge["source"], edge["target"])])
        several = data.get("multigraph", True)
        links = [(edge["source"], edge["target"], edge.get("key")) for edge in data[edges]]
        _check_repeated([link for link in links if not (several and link[2] is None)], data.get("directed", False))
        graph = nx.node_link_graph(data, edges=edges)
    return from_graph(graph, None if "name" in graph.graph else stem)


@contextmanager
def _graph_errors(kind: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError for the errors, and warnings, of networkx on malformed graphs."""
    import networkx as nx

    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, nx.NetworkXException, Warning) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"not a {kind} ({what}); {remedy}") from None


def _check_references(nodes: list[Any], ends: list[Any]) -> None:
    node_ids = set(nodes)
    if len(node_ids) < len(nodes):
        repeated = next(node for node in node_ids if nodes.count(node) > 1)
        raise ConfigError(f"the node id {shown(repeated)} appears twice; rename one")
    for end in ends:
        if end not in node_ids:
            raise ConfigError(
                f"an edge ends at {shown(end)}, which is not a node of the graph; add the node or correct the edge"
            )


def _check_repeated(links: list[tuple[Any, Any, Any]], directed: bool) -> None:
    """Raise ConfigError for a link (source, target, key) that networkx would merge with an earlier one."""
    seen = set()
    for source, target, key in links:
        link = (source, target, key) if directed else (frozenset((source, target)), key)
        if link in seen:
            what = "" if key is None else f" with key {shown(key)}"
            raise ConfigError(
                f"the edge {shown(source)} - {shown(target)}{what} appears twice; remove one or, for parallel links, "
                "use different keys (with multigraph = true)"
            )
        seen.add(link)


def _read_graphml(stem: str, text: str) -> Cluster:
    from xml.etree.ElementTree import ParseError

    import networkx as nx
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        root = fromstring(text, forbid_dtd=True)
    except DefusedXmlException as error:
        raise ConfigError(
            f"DTDs and entity declarations are not allowed ({type(error).__name__}); remove them"
        ) from None
    except (ParseError, ValueError) as error:  # ValueError: invalid XML characters
        raise ConfigError(f"not valid XML: {error}; correct it (is the file complete?)") from None
    elements = [(element.tag.rpartition("}")[2], element.attrib) for element in root.iter()]
    with _graph_errors("GraphML graph", "write it with networkx"), warnings.catch_warnings():
        warnings.simplefilter("error")  # networkx only warns if keys have no type
        edges = [attributes for tag, attributes in elements if tag == "edge"]
        ids = [attributes["id"] for tag, attributes in elements if tag == "node"]
        _check_references(ids, [edge[end] for edge in edges for end in ("source", "target")])
        _check_repeated([(edge["source"], edge["target"], edge["id"]) for edge in edges if "id" in edge], directed=True)
        graph: nx.Graph[Any] = nx.parse_graphml(text, force_multigraph=True)
    for *_, edge in graph.edges(data=True):
        edge.pop("id", None)
    for key in _LISTS:
        if isinstance(graph.graph.get(key), str):
            try:
                graph.graph[key] = plain.parse_json(graph.graph[key])
            except ConfigError:
                raise ConfigError(f"{key} = {shown(graph.graph[key])} must be a JSON list, such as '[8, 8]'") from None
    return from_graph(graph, None if "name" in graph.graph else stem)
