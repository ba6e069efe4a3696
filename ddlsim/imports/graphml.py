"""Reader for GraphML topologies: the Internet Topology Zoo, yEd, networkx.

Format: http://graphml.graphdrawing.org/primer/graphml-primer.html; the Zoo's attributes:
http://www.topology-zoo.org/dataset.html. Every node is a host, which also forwards messages; ``hyperedge`` and ``kind =
"switch"`` define switches. In a directed graph, an edge with a reverse edge is one direction of a cable; every other
edge is a cable in both directions. Graphs drawn by yEd are always directed; most of their edges must have one.
docs/formats/topologies.md lists the attributes with speeds. :func:`ddlsim.load_cluster` reads graphs that ddlsim or
networkx wrote with all its attributes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.graphs import EDGE_KEYS, NODE_KEYS
from ddlsim.cluster.nodes import Graph, connect
from ddlsim.cluster.quantity import Quantity, check_size, nonnegative, positive
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk

#: descriptive attributes, which are ignored
_DESCRIBE = {"url", "description", "label", "id", "name", "Latitude", "Longitude", "Country", "Note", "color", "shape"}
_NODE = _DESCRIBE | {"Internal", "type", "hyperedge", "kind", "geocode_name", "geocode_country", "geocode_id"}
_NODE |= {"geocode_append", "GeoLocation", "asn", "doubted", "Place", "City", "Service", "x", "y", "size"}
_EDGE = _DESCRIBE | {"key", "LinkType", "LinkNote", "LinkLabel", "LinkStatus", "LinkTypeRaw", "Ring"}
_EDGE |= {"LinkSpeed", "LinkSpeedRaw", "LinkSpeedUnits", "bandwidth", "latency"}
#: attributes used for the cluster
_MEANING = {"kind", "hyperedge", "label", "LinkLabel", "LinkSpeed", "LinkSpeedRaw", "LinkSpeedUnits"}
_MEANING |= {"bandwidth", "latency"}
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "": 1.0}
_RATE = re.compile(
    r"(?<![\w./<>~-])(?:([0-9]{1,3})\s*[xX*]\s*)?([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*"
    r"(?:([KMGTkmgt])b(?:ps|it/s|its/s|/s|it/sec|its/sec|it|its|s)|([MG])(?:E|igE)?)(?![\w/])"
)
#: bit/s of carriers' line types, per unit (ANSI T1.105, ITU-T G.707, G.702)
_LINE = re.compile(r"(?<![\w/-])(?:([0-9]{1,3})\s*[xX*]\s*)?(OC|STM|DS|T|E)-?([0-9]{1,3})c?(?![\w/-])")
_LINES = {"DS1": 1.544e6, "T1": 1.544e6, "DS3": 44.736e6, "T3": 44.736e6, "E1": 2.048e6, "E3": 34.368e6}
_SONET = {"OC": 51.84e6, "STM": 155.52e6}


@checked
def read_graphml(
    path: str | Path, *, bandwidth: Quantity | None = None, latency: Quantity = 0.0, ignore_unknown: bool = False
) -> Cluster:
    """Read a cluster from a GraphML file.

    bandwidth        bandwidth of edges whose speed is not in the file; required if the file contains such edges
    latency          latency of edges without a `latency` attribute
    ignore_unknown   whether to skip unknown attributes, unknown elements and self-loops. A warning says how many items
                     were skipped.

    Raises :class:`ConfigError`, giving the file, line and reason, if the file is invalid.
    """
    source = read_text(path)
    root = parse_xml(source)
    if _name(root) != "graphml":
        raise root.error("not a GraphML file; the first element must be <graphml>")
    usual = None if bandwidth is None else positive(bandwidth, "bandwidth", "bandwidth")
    graphs = [child for child in root.children if _name(child) == "graph"]
    if len(graphs) != 1:
        raise root.error(f"contains {len(graphs)} graphs; must contain exactly one")
    reader = _Reader(graphs[0], _keys(root), ignore_unknown)
    graph: Graph = Graph(name=source.path.stem, title=reader.title(), sources=[source.path.name])
    for node, attributes in reader.nodes():
        switch = attributes.get("kind") == "switch" or attributes.get("hyperedge", "").lower() in ("true", "1")
        graph.add_node(reader.names[node], kind="switch" if switch else "host")
    edges = reader.edges()
    silent, usual_latency = 0, nonnegative(latency, "time", "latency")
    lone = _lone(edges, graphs[0].get("edgedefault", "directed") == "undirected", reader.drawn)
    check_size(len(graph), len(edges) + len(lone), f"{source.path}: the graph")
    for number, (a, b, attributes, element) in enumerate(edges):
        rate = _rate(attributes, element)
        silent += rate is None
        if rate is None and usual is None:
            raise element.error("the edge has no speed; set bandwidth (--bandwidth) for such edges")
        rate = rate or usual or 0.0
        delay = _quantity(attributes, "latency", element, "time", nonnegative)
        delay = usual_latency if delay is None else delay
        if number in lone:
            connect(graph, a, b, "link", rate, delay)
        else:
            graph.add_edge(a, b, bandwidth=rate, latency=delay, kind="link")
    notes = graph.graph["notes"] = []
    if reader.ignored:
        notes.append("skipped: " + ", ".join(f"{n} {what}" for what, n in sorted(reader.ignored.items())))
        warn(f"{source.path}: {notes[0]}")
    n_edges = len(edges)
    if 0 < len(lone) < n_edges:
        notes.append(f"{len(lone)} of {n_edges} directed edges have no reverse edge and are treated as bidirectional")
    if silent:
        notes.append(f"the file gives no speed for {silent} of {n_edges} edges; assuming {bandwidth} for them")
    return named_cluster(graph, source.path)


def is_own(path: str | Path) -> bool:
    """Return whether the edges of a GraphML file have ddlsim's attribute `bandwidth`, and no attribute is specific to
    :func:`read_graphml`."""
    keys = [(kind, name) for kind, name, _ in _keys(parse_xml(read_text(path))).values()]
    others = {"node": _NODE - NODE_KEYS, "edge": _EDGE - EDGE_KEYS}
    others["all"] = others["node"] & others["edge"]
    has_bandwidth = ("edge", "bandwidth") in keys or ("all", "bandwidth") in keys
    return has_bandwidth and not any(name in others.get(kind, ()) for kind, name in keys)


def _name(element: Element) -> str:
    return element.tag.rpartition(":")[2]


def _inside(graph: Element) -> Iterator[Element]:
    """Yield the children of a <graph>, including those of graphs nested in its nodes (yEd's groups)."""
    for child in graph.children:
        yield child
        for nested in child.children:
            if _name(nested) == "graph" and _name(child) == "node":
                yield from _inside(nested)


def _keys(root: Element) -> dict[str, tuple[str, str, str]]:
    """Return key id -> (element type, attribute name or "" for graphics, default or "")."""
    keys = [child for child in root.children if _name(child) == "key"]
    defaults = {key["id"]: part.text.strip() for key in keys for part in key.children if _name(part) == "default"}
    return {key["id"]: (key.get("for", "all"), key.get("attr.name", ""), defaults.get(key["id"], "")) for key in keys}


def _lone(edges: list[tuple[str, str, dict[str, str], Element]], undirected: bool, drawn: bool) -> set[int]:
    """Return the indices of the edges without a reverse edge, which are cables by themselves."""
    waiting: dict[tuple[str, str], list[int]] = {}
    lone = set(range(len(edges)))
    for i, (a, b, _, _) in enumerate(edges if not undirected else []):
        if waiting.get((b, a)):
            lone -= {i, waiting[b, a].pop()}
        else:
            waiting.setdefault((a, b), []).append(i)
    return set(range(len(edges))) if drawn and 2 * len(lone) >= len(edges) else lone


class _Reader:
    """Reads the nodes and edges of a <graph>, and counts what it skips."""

    def __init__(self, graph: Element, keys: dict[str, tuple[str, str, str]], ignore_unknown: bool) -> None:
        self.graph, self.keys, self.ignore_unknown = graph, keys, ignore_unknown
        self.drawn = any(not name for _, name, _ in keys.values())  # graphics, by yEd
        self.ignored: Counter[str] = Counter()
        self.names: dict[str, str] = {}

    def title(self) -> str:
        """Return the name of the network, or ""."""
        data = [child for child in self.graph.children if _name(child) == "data"]
        about = {self.keys.get(child["key"], ("", "", ""))[1]: child.text for child in data}
        return " ".join(filter(None, (about.get("Network", ""), about.get("NetworkDate", about.get("DateYear", "")))))

    def nodes(self) -> list[tuple[str, dict[str, str]]]:
        """Return (id, attributes) of every node, and record its name: its label, if unique."""
        rows: dict[str, dict[str, str]] = {}
        labels: dict[str, str] = {}
        edges = [child for child in _inside(self.graph) if _name(child) == "edge"]
        ends = {edge.get(end, "") for edge in edges for end in ("source", "target")}
        for child in _inside(self.graph):
            group = any(_name(part) == "graph" for part in child.children)
            if _name(child) == "node" and not (group and child["id"] not in ends):
                node, attributes = child["id"], self._attributes(child, _NODE)
                if node in rows:
                    raise child.error(f"id = {node!r} appears twice; rename one")
                about = (data for data in child.children if _name(data) == "data")
                drawn = (part.text.strip() for data in about for part in walk(data) if _name(part) == "NodeLabel")
                rows[node], labels[node] = attributes, attributes.get("label", "") or next(drawn, "")
            elif _name(child) not in ("node", "edge", "data", "desc"):
                self._unknown(child, f"<{_name(child)}>")
        count = Counter(labels.values())
        for node, label in labels.items():
            unique = label and count[label] == 1 and label not in rows
            self.names[node] = label if unique else f"{label} ({node})" if label else node
        return list(rows.items())

    def edges(self) -> list[tuple[str, str, dict[str, str], Element]]:
        """Return (name, name, attributes, element) of every edge."""
        rows = []
        for child in _inside(self.graph):
            if _name(child) != "edge":
                continue
            for end in (child["source"], child["target"]):
                if end not in self.names:
                    raise child.error(f"ends at {end!r}, which is not a node; add the node or correct the edge")
            attributes = self._attributes(child, _EDGE)
            if child["source"] == child["target"]:
                self._unknown(child, "edges from a node to itself")
                continue
            rows.append((self.names[child["source"]], self.names[child["target"]], attributes, child))
        return rows

    def _attributes(self, element: Element, names: set[str]) -> dict[str, str]:
        kinds = (_name(element), "all")
        told = [(element, name, text) for kind, name, text in self.keys.values() if text and kind in kinds]
        for child in element.children:
            if _name(child) != "data":
                if _name(child) not in ("port", "desc", "graph"):
                    self._unknown(child, f"<{_name(child)}>")
                continue
            if child["key"] not in self.keys:
                raise child.error(f"key = {child['key']!r} has no declaration; add a <key>")
            told.append((child, self.keys[child["key"]][1], child.text.strip()))
        attributes: dict[str, str] = {}
        for child, name, text in told:
            if name and name not in names:
                if not self.ignore_unknown:
                    where = f"{child.source.path}:{child.line}"
                    error = unknown_name("attribute", name, names & _MEANING, where)
                    raise ConfigError(f"{error}; set ignore_unknown=True (--ignore-unknown) to skip such attributes")
                self.ignored[f"attributes {name!r}"] += 1
            attributes[name] = text
        return attributes

    def _unknown(self, element: Element, what: str) -> None:
        if not self.ignore_unknown:
            hint = "set ignore_unknown=True (--ignore-unknown) to skip them"
            raise element.error(f"{what}: have no meaning for a cluster; {hint}")
        self.ignored[what] += 1


def _rate(attributes: dict[str, str], element: Element) -> float | None:
    """Return the bandwidth of an edge in bytes/s, or None if it is not in the file."""
    if (rate := _quantity(attributes, "bandwidth", element, "bandwidth", positive)) is not None:
        return rate
    raw = attributes.get("LinkSpeedRaw", "")
    if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?([eE]\+?[0-9]{1,2})?", raw) and float(raw) > 0:
        return float(raw) / 8
    speed, unit = attributes.get("LinkSpeed", ""), attributes.get("LinkSpeedUnits", "").upper()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", speed) and unit in _UNITS and float(speed) > 0:
        return float(speed) * _UNITS[unit] / 8
    for label in (attributes.get("LinkLabel", ""), attributes.get("label", "")):
        rate = None if re.search(r"[<>~]", label) else _labelled(label)
        if rate:
            return rate / 8
    return None


def _quantity(
    attributes: dict[str, str], name: str, element: Element, dimension: str, check: Callable[..., float]
) -> float | None:
    """Return an attribute that is a number (SI) or has a unit; None if missing."""
    text = attributes.get(name, "")
    try:
        number = re.fullmatch(r"[0-9.eE+-]{1,30}", text)
        return check(float(text) if number else text, dimension, name) if text else None
    except (ConfigError, ValueError) as error:
        raise element.error(f"{error}") from None


def _labelled(label: str) -> float | None:
    """Return the bit/s of a label that consists of a single number with unit, or of a single line type."""
    rates = list(_RATE.finditer(label))
    if len(rates) == 1:
        times, number, bits, short = rates[0].groups()
        return int(times or 1) * float(number) * _UNITS[(bits or short).upper()]
    lines = list(_LINE.finditer(label))
    if rates or len(lines) != 1:
        return None
    times, name, level = lines[0].groups()
    one = int(level) * _SONET[name] if name in _SONET else _LINES.get(name + level)
    return None if one is None else int(times or 1) * one
