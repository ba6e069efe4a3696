"""SimGrid platform files (XML) into a cluster.

Shape: https://simgrid.org/doc/latest/XML_reference.html and simgrid.dtd, versions 3 to 4.1 (``AS`` or ``zone``,
``ASroute`` or ``zoneRoute``, ``power`` or ``speed``). A link without ``sharing_policy`` is SHARED, as the DTD has it;
a cluster's links are SPLITDUPLEX. The DTD itself is never loaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.simgrid_cluster import cluster_graph
from ddlsim.imports.simgrid_zones import ZONES, zones_cluster
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk

_QUIET = ("config", "prop", "random", "process", "actor", "trace", "trace_connect")  # no part of the network


@checked
def read_simgrid(path: str | Path) -> Cluster:
    """Return the cluster of the platform file `path`.

    A platform that is one ``<cluster>`` (FLAT with or without backbone, TORUS, FAT_TREE, DRAGONFLY), also inside
    zones, becomes that topology; anything else a graph with SimGrid's own routes, in which hosts without a route
    cannot communicate. Host speeds are those of ``pstate``, times ``availability``, relative to the fastest host. Hosts
    and links with ``state="OFF"`` and profiles joined by ``<trace_connect>`` are left out, with a warning.

    Raises ConfigError with file, line and reason for what is not supported (FATPIPE, limiter_link, peers,
    Vivaldi, profiles) and for what is wrong.
    """
    source = read_text(path)
    root = parse_xml(source)
    if root.tag != "platform":
        raise root.error("is no SimGrid platform; the first element must be <platform>")
    for element in walk(root):
        for name in ("bandwidth_file", "latency_file", "state_file", "availability_file", "speed_file"):
            if element.get(name, ""):
                raise element.error(f"{name} (a profile over time) is not supported; remove it")
    parts = [child for child in root.children if child.tag not in _QUIET]
    if len(parts) != 1 or parts[0].tag not in ("cluster", *ZONES):
        raise root.error("must hold one <zone> or one <cluster>; wrap the parts in a <zone>")
    alone = _only_cluster(parts[0])
    cluster = named_cluster(cluster_graph(alone), source.path) if alone is not None else zones_cluster(parts[0])
    traces = sum(element.tag == "trace_connect" for element in walk(root))
    if traces:
        note = f"{traces} <trace_connect> left out: speeds and rates are constant"
        warn(f"{source.path}: {note}")
        cluster = dataclasses.replace(cluster, notes=(*cluster.notes, note))
    return cluster


def _only_cluster(element: Element) -> Element | None:
    """Return the cluster that is all there is in `element`, or None."""
    if element.tag == "cluster":
        return element
    parts = [child for child in element.children if child.tag not in _QUIET]
    return _only_cluster(parts[0]) if len(parts) == 1 and parts[0].tag in ("cluster", *ZONES) else None
