"""An order of nodes in which neighbours are near: for rings matched to the topology.

Machines are visited as by a depth-first tour of a spanning tree of the fabric. In a tree, such a tour goes
down and up every edge once, so a ring in this order crosses each uplink once per direction; in multi-rooted
trees (leaf-spine, fat tree) a breadth-first spanning tree keeps leaves and pods together. Inside a machine
the GPUs follow a Hamiltonian cycle of its fastest direct links, where there is one. On tori the order is a
reflected Gray code, in which successive places differ by one step in one dimension.
"""

from __future__ import annotations

import numpy as np

from ddlsim.cluster.cluster import Cluster, Ints
from ddlsim.errors import ConfigError

#: the search for a cycle inside a machine gives up beyond this size, and keeps the rank order
_MAX_CYCLE = 16


def locality_order(cluster: Cluster, nodes: Ints) -> Ints:
    """Return a permutation of ``range(len(nodes))``; see the module's text. Equal nodes stay in order.

    Of the tour and the plain order of machine numbers, the one with fewer link crossings in total is taken.
    """
    if len(nodes) < 2:
        return np.arange(len(nodes))
    if cluster.grid and cluster.routing == "dimension-order":
        place = np.empty(cluster.n_nodes, dtype=np.int64)
        place[_gray_tour(cluster.grid)] = np.arange(cluster.n_nodes)
        return np.argsort(place[nodes], kind="stable")
    touring, plain = (
        _by_machine(cluster, nodes, order) for order in (cluster.machine_tour, np.arange(len(cluster.host_names)))
    )
    return touring if _n_hops(cluster, nodes[touring]) < _n_hops(cluster, nodes[plain]) else plain


def _n_hops(cluster: Cluster, ring: Ints) -> int:
    try:
        return len(cluster.routes(ring, np.roll(ring, -1)).links)
    except ConfigError:
        return int(np.iinfo(np.int64).max)  # some never communicate: no ring is run


def _gray_tour(sizes: tuple[int, ...]) -> Ints:
    """Return the nodes of a grid in reflected order, shape (n_nodes,)."""
    tour = np.zeros(1, dtype=np.int64)
    for size in sizes:  # row-major: the later dimension varies faster
        rows = [tour[i] * size + np.arange(size)[:: -1 if i % 2 else 1] for i in range(len(tour))]
        tour = np.concatenate(rows)
    return tour


def machine_tour(cluster: Cluster) -> Ints:
    """Return the machines in the order of a depth-first tour of a breadth-first spanning forest."""
    n_hosts, host_of = len(cluster.host_names), cluster.host_of
    # one vertex per machine, whatever is inside, and one per fabric switch
    vertex = np.where(host_of >= 0, host_of, n_hosts + np.arange(cluster.n_nodes))
    beside: dict[int, set[int]] = {}
    for a, b in zip(vertex[cluster.link_src].tolist(), vertex[cluster.link_dst].tolist(), strict=True):
        if a != b:
            beside.setdefault(a, set()).add(b)
            beside.setdefault(b, set()).add(a)
    children: dict[int, list[int]] = {}
    seen: set[int] = set()
    tour: list[int] = []
    for root in range(n_hosts):
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for at in queue:
            children[at] = sorted(beside.get(at, set()) - seen)
            seen.update(children[at])
            queue += children[at]
        stack = [root]
        while stack:
            at = stack.pop()
            if at < n_hosts:
                tour.append(at)
            stack.extend(reversed(children[at]))
    return np.array(tour, dtype=np.int64)


def _by_machine(cluster: Cluster, nodes: Ints, machines: Ints) -> Ints:
    """Return the permutation that visits `machines` in order, each one's nodes along fast links."""
    rank = np.empty(len(machines), dtype=np.int64)
    rank[machines] = np.arange(len(machines))
    host = cluster.host_of[nodes]
    outer = np.where(host >= 0, rank[host], len(rank))
    order = np.lexsort((nodes, outer))
    starts = np.flatnonzero(np.diff(outer[order], prepend=-1))
    direct = cluster.direct_links
    known: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    pieces = []
    for piece in np.split(order, starts[1:]):
        members = nodes[piece].tolist()
        speeds = tuple(tuple(direct.get((a, b), 0.0) for b in members) for a in members)
        if speeds not in known:
            known[speeds] = _fast_cycle(speeds)
        pieces.append(piece[known[speeds]])
    return np.concatenate(pieces)


def direct_links(cluster: Cluster) -> dict[tuple[int, int], float]:
    """Return the bandwidth of the links that join two endpoints of one machine."""
    src, dst = cluster.link_src, cluster.link_dst
    within = np.flatnonzero(
        cluster.is_endpoint[src] & cluster.is_endpoint[dst] & (cluster.host_of[src] == cluster.host_of[dst])
    )
    found: dict[tuple[int, int], float] = {}
    for link in within.tolist():
        pair = int(src[link]), int(dst[link])
        found[pair] = found.get(pair, 0.0) + float(cluster.link_bandwidth[link])
    return found


def _fast_cycle(speeds: tuple[tuple[float, ...], ...]) -> list[int]:
    """Return a Hamiltonian cycle from 0 whose slowest link is as fast as possible, or the plain order."""
    n = len(speeds)
    if 2 < n <= _MAX_CYCLE:
        for slowest in sorted({speed for row in speeds for speed in row if speed > 0}, reverse=True):
            cycle = _cycle(speeds, slowest, [0])
            if cycle:
                return cycle
    return list(range(n))


def _cycle(speeds: tuple[tuple[float, ...], ...], slowest: float, path: list[int]) -> list[int]:
    """Return `path` completed to a cycle over links of at least `slowest`; [] if there is none."""
    if len(path) == len(speeds):
        return path if speeds[path[-1]][path[0]] >= slowest else []
    for after in range(len(speeds)):
        if after not in path and speeds[path[-1]][after] >= slowest:
            cycle = _cycle(speeds, slowest, [*path, after])
            if cycle:
                return cycle
    return []
