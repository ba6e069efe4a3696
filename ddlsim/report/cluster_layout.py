"""What stands where in a picture of a cluster: nodes, machines, or groups of those that are alike, and what joins them.

A small cluster is drawn node by node. A larger one machine by machine, so that every link between machines and switches
is still there. One that no page holds is drawn as groups of nodes that are alike, found by colour refinement: nodes are
alike if they are of one kind at one distance from the machines, and have as many links of each sort to others that are
alike; refined as long as there are few enough groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: clusters with more nodes than this are drawn without the inside of their machines
MANY_NODES = 160
#: and with more machines and switches than this as groups; grids, whose links do not cross, later
MANY_ITEMS, MANY_PLACES = 260, 1100
#: groups, at most
N_GROUPS = 6
#: heights within a machine: its CPU, its switches, its GPUs
CPU, INSIDE, GPU = 0.0, -0.5, -1.0


@dataclass(frozen=True)
class Items:
    """What is drawn, and where.

    kind          "gpu", "host" (a CPU), "machine" (with what is in it), "storage" or "switch", per item
    names         what each item is called
    nodes         nodes that each item stands for
    item_of       (n_nodes,) item of each node
    x, y          (n_items,) place
    frames        machines that are drawn with their inside: name -> items of it
    grouped       whether items stand for several machines or switches
    """

    kind: Sequence[str]
    names: Sequence[str]
    nodes: Sequence[Ints]
    item_of: Ints
    x: Floats
    y: Floats
    frames: dict[str, Ints]
    grouped: bool = False


@dataclass(frozen=True)
class Joints:
    """What joins the items: one line for all links between two of them, in either direction.

    ends      (n, 2) items, the smaller first; the same twice for links within a group
    cables    (n,) number of links in one direction
    bandwidth (n,) bytes/s of the fastest link
    links     links of each line
    """

    ends: Ints
    cables: Ints
    bandwidth: Floats
    links: Sequence[Ints]


def arranged(cluster: Cluster) -> Items:
    """Return what to draw of a cluster, with places."""
    fabric = cluster.host_of < 0
    n_hosts = len(cluster.host_names)
    inside = cluster.n_nodes <= MANY_NODES
    if inside:  # but of a storage: its disks and its port are one thing
        item_of = np.arange(cluster.n_nodes)
        for host in {int(cluster.host_of[i]) for i, kind in enumerate(cluster.node_kind) if kind == "storage"}:
            item_of[cluster.host_of == host] = int(np.flatnonzero(cluster.host_of == host)[0])
        item_of = np.unique(item_of, return_inverse=True)[1].ravel()
    else:  # machines first, then the switches between them
        item_of = cluster.host_of.copy()
        item_of[fabric] = n_hosts + np.arange(int(fabric.sum()))
    level = np.where(fabric, _switch_levels(cluster), 0)
    n_items = int(item_of.max()) + 1
    grouped = n_items > (MANY_PLACES if prod(cluster.grid) == n_items else MANY_ITEMS)
    if grouped:
        item_of = _alike(cluster, item_of, level)
    order = np.argsort(item_of, kind="stable")
    nodes = np.split(order, np.flatnonzero(np.diff(item_of[order])) + 1)
    kind = [_kind(cluster, members) for members in nodes]
    heights = np.array([float(level[members[0]]) for members in nodes])
    inside &= not grouped
    x, y = _places(cluster, item_of, nodes, kind, heights, grouped, inside)
    frames = {}
    if inside:
        machines = ((name, np.unique(item_of[cluster.host_of == i])) for i, name in enumerate(cluster.host_names))
        frames = {name: members for name, members in machines if len(members) > 1}
    names = [_name(cluster, members, kind[i], grouped) for i, members in enumerate(nodes)]
    return Items(kind, names, nodes, item_of, x, y, frames, grouped)


def joints(cluster: Cluster, items: Items) -> Joints:
    """Return what joins the items: all links but those within a machine that is drawn as one."""
    source, target = items.item_of[cluster.link_src], items.item_of[cluster.link_dst]
    host = cluster.host_of
    within = (host[cluster.link_src] == host[cluster.link_dst]) & (host[cluster.link_src] >= 0)
    kept = np.flatnonzero((source != target) | (items.grouped & ~within))
    ends = np.sort(np.stack([source[kept], target[kept]], axis=1), axis=1)
    ends, where = np.unique(ends, axis=0, return_inverse=True)
    order = np.argsort(where.ravel(), kind="stable")
    links = [kept[part] for part in np.split(order, np.cumsum(np.bincount(where.ravel()))[:-1])] if len(kept) else []
    cables = []
    for part, (first, last) in zip(links, ends.tolist(), strict=True):
        onwards = int((source[part] == first).sum()) if first != last else len(part) // 2
        cables.append(max(onwards, len(part) - onwards))
    bandwidth = np.array([cluster.link_bandwidth[part].max() for part in links])
    return Joints(ends.reshape(-1, 2), np.array(cables, dtype=np.int64), bandwidth, links)


def _kind(cluster: Cluster, members: Ints) -> str:
    """Return "machine" for a machine with an inside that is no storage's disks, else the kind of the node."""
    of_one = members[cluster.host_of[members] == cluster.host_of[members[0]]]
    if any(cluster.node_kind[node] == "storage" for node in of_one.tolist()):
        return "storage"
    inside = cluster.host_of[members[0]] >= 0 and len(of_one) > 1
    return "machine" if inside else cluster.node_kind[members[0]]


def _name(cluster: Cluster, members: Ints, kind: str, grouped: bool) -> str:
    host = int(cluster.host_of[members[0]])
    n = len(np.unique(cluster.host_of[members])) if host >= 0 else len(members)
    if not grouped or n == 1:
        return cluster.host_names[host] if kind in ("machine", "storage") else cluster.node_names[members[0]]
    return f"{n:,} {'switches' if host < 0 else 'machines'} like this"


def _alike(cluster: Cluster, item_of: Ints, level: Ints) -> Ints:
    """Return the group of each node, (n_nodes,)."""
    n_items = int(item_of.max()) + 1
    first = np.unique(item_of, return_index=True)[1]
    width = np.bincount(item_of)
    colour = _numbered([(int(level[node]), cluster.node_kind[node] if width[i] == 1 else "", int(width[i]))
                        for i, node in enumerate(first.tolist())])  # fmt: skip
    a, b = item_of[cluster.link_src], item_of[cluster.link_dst]
    sort = _numbered(cluster.link_bandwidth.tolist())
    outside = np.flatnonzero(a != b)
    while True:
        seen: list[list[tuple[int, int]]] = [[] for _ in range(n_items)]
        pairs = zip(sort[outside].tolist(), colour[b[outside]].tolist(), strict=True)
        for item, pair in zip(a[outside].tolist(), pairs, strict=True):
            seen[item].append(pair)
        finer = _numbered([(int(colour[i]), tuple(sorted(pairs))) for i, pairs in enumerate(seen)])
        if finer.max() in (colour.max(), *range(N_GROUPS, n_items)):  # no finer, or too fine to draw
            return np.asarray(colour[item_of])
        colour = finer


def _numbered(values: Sequence[Hashable]) -> Ints:
    """Return a number for each value, the same for the same, in the order in which they first come."""
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.int64)


def _switch_levels(cluster: Cluster) -> Ints:
    """Return each fabric switch's distance from the machines, in hops."""
    level = np.where(cluster.host_of >= 0, 0, cluster.n_nodes)
    for _ in range(cluster.n_nodes):
        before = level.copy()
        np.minimum.at(level, cluster.link_dst, level[cluster.link_src] + 1)
        level[cluster.host_of >= 0] = 0
        if np.array_equal(before, level):
            break
    return level


def _places(
    cluster: Cluster, item_of: Ints, nodes: Sequence[Ints], kind: Sequence[str], level: Floats, grouped: bool,
    inside: bool,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the place of each item: grids as they are, machines in a row below their switches, or on a circle."""
    host = np.array([int(cluster.host_of[members[0]]) for members in nodes])
    if len(cluster.grid) > 1 and prod(cluster.grid) == len(nodes):
        return _grid(cluster.grid)
    x, y = np.zeros(len(nodes)), level.copy()
    if inside:
        y[(host >= 0) & (np.array(kind) == "switch")] = INSIDE
        y[np.array(kind) == "gpu"] = GPU
    if (host >= 0).all() and len(cluster.host_names) > 1 and not grouped:
        return _circle(host)
    below = np.flatnonzero(host >= 0)
    machines, place = np.unique(below if grouped else host[below], return_inverse=True)
    layers = [[below[(place == i) & (y[below] == height)] for height in np.unique(y[below])]
              for i in range(len(machines))]  # fmt: skip
    widths = np.array([max(map(len, found)) + 0.6 * (len(below) > len(machines)) for found in layers])
    ends = np.cumsum(widths) / widths.sum()
    for found, end, width in zip(layers, ends.tolist(), (widths / widths.sum()).tolist(), strict=True):
        for members in found:
            spread = (np.arange(len(members)) + 0.5) / max(len(members), 1) - 0.5
            x[members] = end - width / 2 + 0.85 * width * spread
    a, b = item_of[cluster.link_src], item_of[cluster.link_dst]
    for height in np.unique(level[host < 0]):
        members = np.flatnonzero((host < 0) & (level == height))
        x[members] = 0.5
        lower = np.isin(a, members) & (y[b] < height)  # those above what they lead to: fewer lines cross
        total, n = np.bincount(a[lower], x[b[lower]], len(nodes)), np.bincount(a[lower], minlength=len(nodes))
        middle = total[members] / np.maximum(n[members], 1)
        members = members[np.argsort(np.round(middle, 6), kind="stable")]
        x[members] = (np.arange(len(members)) + 0.5) / len(members)
    return x, y


def _grid(sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """Place a torus as a grid, the third dimension aslant."""
    places = np.array(np.unravel_index(np.arange(prod(sizes)), sizes), dtype=np.float64)
    x, y = places[-1].copy(), -places[-2]
    for depth in places[:-2]:
        x += 0.43 * depth
        y += 0.31 * depth
    return x, y


def _circle(host: Ints) -> tuple[Floats, Floats]:
    """Machines without switches between them stand on a circle, the nodes of each close together."""
    angle = 2.0 * np.pi * host / (host.max() + 1)
    place = np.array([int((host[:i] == number).sum()) for i, number in enumerate(host.tolist())])
    radius = 1.0 + 0.09 * place
    return radius * np.sin(angle), radius * np.cos(angle)
