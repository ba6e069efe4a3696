"""Any cluster as TOML: its graph, node by node and link by link, in tables that :mod:`ddlsim.cluster.files` reads.

``[[nodes]]`` has `names` and what they are, ``[[edges]]`` has `links`, pairs of names in one direction, and what they
do: the attributes are those of graphs (:mod:`ddlsim.cluster.graphs`). What is alike shares a table, as far as the order
of the nodes, and of the links from each, allows. Read back, the cluster is the same, link by link: bandwidths and times
are rounded nowhere.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddlsim.cluster.nodes import Graph
from ddlsim.cluster.quantity import check_size
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.units import si

if TYPE_CHECKING:
    from ddlsim.cluster.calibration_table import CalibrationTable

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
        links = ((data, (a, b, key if data.get("shared") else None))
                 for a, b, key, data in graph.out_edges(node, keys=True, data=True))  # fmt: skip
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
