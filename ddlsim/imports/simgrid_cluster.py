"""A SimGrid ``<cluster>`` alone: flat, with or without backbone, torus, fat tree, dragonfly.

As https://simgrid.org/doc/latest/Platform_examples.html describes ``topo_parameters``, and the zones' sources
(``src/kernel/routing``) wire them. Nodes keep SimGrid's names, prefix + number + suffix. Loopbacks are left out (a rank
sends nothing to itself), and so are cores and speeds: all machines of a cluster are alike.
"""

from __future__ import annotations

import itertools
import math
import re

from ddlsim.cluster import Host
from ddlsim.cluster.nodes import Graph, add_host, connect
from ddlsim.imports import simgrid_units as units
from ddlsim.imports.xml_tree import Element

MAX_HOSTS = 100_000  # a runaway radical is a slip of the keyboard, not a cluster


def host_names(cluster: Element) -> list[str]:
    """Return the names that ``prefix``, ``radical`` ("0-9", "0-3,7") and ``suffix`` stand for."""
    numbers: list[int] = []
    for part in re.split("[,;]", cluster["radical"]):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise cluster.error(f"radical = {cluster['radical']!r}: {part!r} is no range; write it like '0-15'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first + len(numbers) >= MAX_HOSTS:
            raise cluster.error(f"radical = {cluster['radical']!r} gives more than {MAX_HOSTS} hosts; correct it")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise cluster.error(f"radical = {cluster['radical']!r} names a host twice; correct it")
    return [f"{cluster.get('prefix', '')}{number}{cluster.get('suffix', '')}" for number in numbers]


def is_shared(element: Element, default: str, name: str = "sharing_policy") -> bool:
    """Return whether both directions share the link's bandwidth; FATPIPE, without contention, is refused."""
    policy = element.get(name, default).upper()
    if policy in ("SPLITDUPLEX", "FULLDUPLEX"):
        return False
    if policy == "SHARED":
        return True
    raise element.error(f"{name} = {policy!r} is not supported (no contention); use SPLITDUPLEX or SHARED")


def cluster_graph(cluster: Element) -> Graph:
    """Return the graph of a platform that is one ``<cluster>``."""
    if cluster.get("limiter_link", ""):
        raise cluster.error("limiter_link is not supported (a limit on both directions together); remove it")
    topology = cluster.get("topology", "FLAT").upper()
    builders = {"FLAT": _flat, "TORUS": _torus, "FAT_TREE": _fat_tree, "DRAGONFLY": _dragonfly}
    if topology not in builders:
        raise cluster.error(f"topology = {topology!r} is unknown; known: {', '.join(builders)}")
    units.speed(cluster)
    graph: Graph = Graph(
        name=cluster.source.path.stem, title=f"SimGrid cluster {cluster.get('id', '')}",
        sources=[cluster.source.path.name],
        notes=[f"every host computes {cluster.get('speed', cluster.get('power', ''))}"],
    )  # fmt: skip
    hosts = [add_host(graph, host, Host())[0] for host in host_names(cluster)]
    builders[topology](graph, cluster, hosts)
    return graph


def _link(graph: Graph, cluster: Element, a: str, b: str, kind: str, n_cables: int = 1) -> None:
    """Join two nodes with the cluster's link, of the bandwidth of `n_cables`."""
    connect(
        graph, a, b, kind, units.bandwidth(cluster, "bw") * n_cables, units.latency(cluster, "lat"),
        shared=is_shared(cluster, "SPLITDUPLEX"),
    )  # fmt: skip


def _switch(graph: Graph, name: str) -> str:
    graph.add_node(name, kind="switch")
    return name


def _flat(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """Private links to a crossbar; or a backbone, one capacity that every message between two hosts crosses once."""
    name = cluster.get("id", "cluster")
    if not cluster.get("bb_bw", ""):
        switch = _switch(graph, f"{name}.switch")
        for host in hosts:
            _link(graph, cluster, host, switch, "nic")
        return
    is_shared(cluster, "SHARED", "bb_sharing_policy")
    if is_shared(cluster, "SPLITDUPLEX"):
        raise cluster.error("a SHARED link beside a backbone is not supported; use SPLITDUPLEX")
    # hosts -> in -> out -> hosts: the one edge between the two is the backbone
    enter, leave = (_switch(graph, f"{name}.backbone.{end}") for end in ("in", "out"))
    bandwidth, latency = units.bandwidth(cluster, "bb_bw"), units.latency(cluster, "bb_lat")
    graph.add_edge(enter, leave, bandwidth=bandwidth, latency=latency, kind="trunk")
    bandwidth, latency = units.bandwidth(cluster, "bw"), units.latency(cluster, "lat")
    for host in hosts:
        graph.add_edge(host, enter, bandwidth=bandwidth, latency=latency, kind="nic")
        graph.add_edge(leave, host, bandwidth=bandwidth, latency=latency, kind="nic")


def _counts(cluster: Element, text: str) -> list[int]:
    """Return a comma-separated list of whole numbers of at least 1."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,4}", word) and int(word) >= 1 for word in words):
        raise cluster.error(
            f"topo_parameters = {cluster['topo_parameters']!r}: {text!r} must be whole numbers from 1 to 9999"
        )
    return [int(word) for word in words]


def _check_size(cluster: Element, hosts: list[str], n_places: int) -> None:
    if len(hosts) != n_places:
        raise cluster.error(
            f"topo_parameters = {cluster['topo_parameters']!r} has {n_places} places, "
            f"radical = {cluster['radical']!r} {len(hosts)} hosts; make them equal"
        )


def _torus(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """ "3,2,2": nodes per dimension, the first varying fastest."""
    sizes = _counts(cluster, cluster["topo_parameters"])
    _check_size(cluster, hosts, math.prod(sizes))
    stride = 1
    for size in sizes:
        for i, host in enumerate(hosts):
            place = i // stride % size
            if place + 1 < size:
                _link(graph, cluster, host, hosts[i + stride], "link")
            elif size > 2:  # the way round; between two, it would be the same link again
                _link(graph, cluster, host, hosts[i - place * stride], "link")
        stride *= size
    if not is_shared(cluster, "SPLITDUPLEX"):
        graph.graph.update(routing="dimension-order", grid=sizes[::-1])  # row-major: the last varies fastest


def _fat_tree(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """Read "levels;down;up;cables": the generalised fat tree PGFT of Zahavi (2010), with D-mod-k routing.

    A node of level l (hosts 0) has digits: of `down` above l, of `up` up to l. It is joined to the nodes of level
    l + 1 that agree in all digits but the one of that level.
    """
    parts = cluster["topo_parameters"].split(";")
    lists = [_counts(cluster, part) for part in parts]
    if len(lists) != 4 or len(lists[0]) != 1 or any(len(row) != lists[0][0] for row in lists[1:]):
        raise cluster.error(
            f"topo_parameters = {cluster['topo_parameters']!r} must be levels;down;up;cables with one number per "
            f"level in the last three, like '2;4,4;1,2;1,2'"
        )
    down, up, cables = lists[1:]
    _check_size(cluster, hosts, math.prod(down))
    below = dict(zip(_digits(down), hosts, strict=True))
    for level, n_cables in enumerate(cables):
        sizes = up[: level + 1] + down[level + 1 :]
        if math.prod(sizes) * n_cables > MAX_HOSTS:
            raise cluster.error(f"topo_parameters = {cluster['topo_parameters']!r}: level {level + 1} is too large")
        above = {
            digits: _switch(graph, f"{cluster.get('id', 'cluster')}.level{level + 1}.{i}")
            for i, digits in enumerate(_digits(sizes))
        }
        for digits, node in below.items():
            for digit in range(up[level]):
                parent = above[(*digits[:level], digit, *digits[level + 1 :])]
                for _ in range(n_cables):
                    _link(graph, cluster, node, parent, "trunk" if level else "nic")
        below = above
    graph.graph["routing"] = "d-mod-k"


def _digits(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return all combinations of digits, the first varying fastest."""
    return [digits[::-1] for digits in itertools.product(*(range(size) for size in sizes[::-1]))]


def _dragonfly(graph: Graph, cluster: Element, hosts: list[str]) -> None:
    """Read "groups,links;chassis,links;routers,links;nodes": the Cray XC's; links in parallel count as one.

    Routers of a chassis are all joined (green), those of the same place in the chassis of a group (black), and group i
    to group j through router j of i and router i of j (blue).
    """
    lists = [_counts(cluster, part) for part in cluster["topo_parameters"].split(";")]
    if [len(row) for row in lists] != [2, 2, 2, 1]:
        raise cluster.error(
            f"topo_parameters = {cluster['topo_parameters']!r} must be groups,links;chassis,links;routers,links;nodes "
            f"like '3,4;3,2;3,1;2'"
        )
    (n_groups, blue), (n_chassis, black), (n_blades, green), (n_nodes,) = lists
    per_group = n_chassis * n_blades
    if n_groups > per_group:
        raise cluster.error(f"{n_groups} groups need as many routers in a group, which has {per_group}; add routers")
    _check_size(cluster, hosts, n_groups * per_group * n_nodes)
    routers = [
        [_switch(graph, f"{cluster.get('id', 'cluster')}.group{g}.router{i}") for i in range(per_group)]
        for g in range(n_groups)
    ]
    for i, host in enumerate(hosts):
        _link(graph, cluster, host, routers[i // (per_group * n_nodes)][i // n_nodes % per_group], "nic")
    for group in routers:
        for a, b in itertools.combinations(range(per_group), 2):
            if a // n_blades == b // n_blades:
                _link(graph, cluster, group[a], group[b], "trunk", green)
            elif a % n_blades == b % n_blades:
                _link(graph, cluster, group[a], group[b], "trunk", black)
    for i, j in itertools.combinations(range(n_groups), 2):
        _link(graph, cluster, routers[i][j], routers[j][i], "global", blue)
