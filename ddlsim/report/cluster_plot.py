"""Drawings of clusters: machines below, switches above, and links coloured by utilisation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.extras import needs
from ddlsim.readable import count, si
from ddlsim.report.drawing import drawn, noted, saved, single
from ddlsim.run.result import Result

with needs("matplotlib"):
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.transforms import ScaledTranslation


#: maximum number of nodes for drawing the inside of machines
MANY_NODES = 160
#: maximum number of machines and switches before groups are drawn; more for grids, whose links do not cross
MANY_ITEMS, MANY_PLACES = 260, 1100
#: maximum number of groups
N_GROUPS = 6
#: heights within a machine: CPU, switches, GPUs
CPU, INSIDE, GPU = 0.0, -0.5, -1.0


@dataclass(frozen=True)
class Items:
    """The items to draw, and their positions.

    kind          "gpu", "host" (a CPU), "machine" (including its inside), "storage" or "switch", per item
    names         name of each item
    nodes         nodes that each item represents
    item_of       (n_nodes,) item of each node
    x, y          (n_items,) position
    frames        machines whose inside is drawn: name -> items
    grouped       whether items represent several machines or switches
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
    """Connections between items: one line for all links between two items, in both directions.

    ends      (n, 2) items, the smaller index first; equal for links within a group
    cables    (n,) number of links in one direction
    bandwidth (n,) bandwidth of the fastest link in bytes/s
    links     links of each line
    """

    ends: Ints
    cables: Ints
    bandwidth: Floats
    links: Sequence[Ints]


def arranged(cluster: Cluster) -> Items:
    """Return the items of a cluster, with positions."""
    fabric = cluster.host_of < 0
    n_hosts = len(cluster.host_names)
    inside = cluster.n_nodes <= MANY_NODES
    if inside:  # except for a storage, whose disks and port are one item
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
    x, y = _places(cluster, item_of, nodes, kind, heights, "groups" if grouped else "inside" if inside else "")
    frames = {}
    if inside:
        machines = ((name, np.unique(item_of[cluster.host_of == i])) for i, name in enumerate(cluster.host_names))
        frames = {name: members for name, members in machines if len(members) > 1}
    names = [_name(cluster, members, kind[i], grouped) for i, members in enumerate(nodes)]
    return Items(kind, names, nodes, item_of, x, y, frames, grouped)


def joints(cluster: Cluster, items: Items) -> Joints:
    """Return the connections between the items: all links except those within a machine drawn as one item."""
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
    """Return "machine" for a machine with several nodes that is not a storage, else the kind of the node."""
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
    """Return the group of each node, (n_nodes,), by colour refinement: equal items have equal neighbours."""
    n_items = int(item_of.max()) + 1
    first = np.unique(item_of, return_index=True)[1]
    width = np.bincount(item_of)
    sizes = zip(first.tolist(), width.tolist(), strict=True)
    colour = _numbered([(int(level[node]), cluster.node_kind[node] if n == 1 else "", n) for node, n in sizes])
    a, b = item_of[cluster.link_src], item_of[cluster.link_dst]
    sort = _numbered(cluster.link_bandwidth.tolist())
    outside = np.flatnonzero(a != b)
    while True:
        seen: list[list[tuple[int, int]]] = [[] for _ in range(n_items)]
        pairs = zip(sort[outside].tolist(), colour[b[outside]].tolist(), strict=True)
        for item, pair in zip(a[outside].tolist(), pairs, strict=True):
            seen[item].append(pair)
        finer = _numbered([(int(colour[i]), tuple(sorted(pairs))) for i, pairs in enumerate(seen)])
        if finer.max() in (colour.max(), *range(N_GROUPS, n_items)):  # unchanged, or too many groups
            return np.asarray(colour[item_of])
        colour = finer


def _numbered(values: Sequence[Hashable]) -> Ints:
    """Number the distinct values in order of first occurrence."""
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.int64)


def _switch_levels(cluster: Cluster) -> Ints:
    """Return the distance of each fabric switch from the machines, in hops."""
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(machines := np.flatnonzero(cluster.host_of >= 0).tolist())
    graph.add_edges_from(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    hops = nx.multi_source_dijkstra_path_length(graph, machines)
    return np.array([hops.get(node, cluster.n_nodes) for node in range(cluster.n_nodes)])


def _places(
    cluster: Cluster, item_of: Ints, nodes: Sequence[Ints], kind: Sequence[str], level: Floats, detail: str
) -> tuple[Floats, Floats]:
    """Return the position of each item: in a grid, in a row below its switches, or on a circle."""
    host = np.array([int(cluster.host_of[members[0]]) for members in nodes])
    if len(cluster.grid) > 1 and prod(cluster.grid) == len(nodes):
        return _grid(cluster.grid)
    x, y = np.zeros(len(nodes)), level.copy()
    grouped = detail == "groups"
    if detail == "inside":
        y[(host >= 0) & (np.array(kind) == "switch")] = INSIDE
        y[np.array(kind) == "gpu"] = GPU
    if (host >= 0).all() and len(cluster.host_names) > 1 and not grouped:
        return _circle(host)
    below = np.flatnonzero(host >= 0)
    machines, place = np.unique(below if grouped else host[below], return_inverse=True)
    heights = np.unique(y[below])
    layers = [[below[(place == i) & (y[below] == height)] for height in heights] for i in range(len(machines))]
    widths = np.array([max(map(len, rows)) + 0.6 * (len(below) > len(machines)) for rows in layers])
    ends = np.cumsum(widths) / widths.sum()
    for rows, end, width in zip(layers, ends.tolist(), (widths / widths.sum()).tolist(), strict=True):
        for members in rows:
            spread = (np.arange(len(members)) + 0.5) / max(len(members), 1) - 0.5
            x[members] = end - width / 2 + 0.85 * width * spread
    a, b = item_of[cluster.link_src], item_of[cluster.link_dst]
    for height in np.unique(level[host < 0]):
        members = np.flatnonzero((host < 0) & (level == height))
        x[members] = 0.5
        lower = np.isin(a, members) & (y[b] < height)  # neighbours closer to the machines, which reduces crossings
        total, n = np.bincount(a[lower], x[b[lower]], len(nodes)), np.bincount(a[lower], minlength=len(nodes))
        middle = total[members] / np.maximum(n[members], 1)
        members = members[np.argsort(np.round(middle, 6), kind="stable")]
        x[members] = (np.arange(len(members)) + 0.5) / len(members)
    return x, y


def _grid(sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """Place a torus as a grid, with the third dimension drawn diagonally."""
    places = np.array(np.unravel_index(np.arange(prod(sizes)), sizes), dtype=np.float64)
    x, y = places[-1].copy(), -places[-2]
    for depth in places[:-2]:
        x += 0.43 * depth
        y += 0.31 * depth
    return x, y


def _circle(host: Ints) -> tuple[Floats, Floats]:
    """Place machines without switches on a circle, with the nodes of each machine close together."""
    angle = 2.0 * np.pi * host / (host.max() + 1)
    place = np.array([int((host[:i] == number).sum()) for i, number in enumerate(host.tolist())])
    radius = 1.0 + 0.09 * place
    return radius * np.sin(angle), radius * np.cos(angle)


#: colours of utilisation, from light to dark so that they are readable in grey; white is not used
USE = LinearSegmentedColormap.from_list("use", ["#bcd0e4", "#74a9cf", "#7b62b3", "#8c1f7c", "#2b0030"])
#: maximum number of kinds of links in the legend
N_KINDS = 5
#: approximate width of a character of size 1, and width of the picture, in points
_LETTER, _WIDTH = 0.6, 690.0
_MARKS = {
    "gpu": ("s", "#88bb88", "GPU"),
    "host": ("o", "#99aadd", "host (CPU)"),
    "machine": ("p", "#ddcc99", "machine"),
    "storage": ("h", "#cc99bb", "storage"),
    "switch": ("D", "#bbbbbb", "switch"),
}


@checked
def cluster_plot(result: Result | Cluster, path: str | Path | None = None) -> Axes:
    """Draw a cluster, or a result's cluster with its links coloured by utilisation, on a scale from 0 to 100 %.

    Nodes are placed in layers by their distance from the machines: fabric switches above, machines below, their GPUs
    at the bottom; grids (tori) keep their layout. In larger clusters, machines are drawn without their inside; if there
    are hundreds, equal machines and switches are grouped. A line represents all links between two items, in both
    directions, and its colour shows the utilisation of the busiest one.
    """
    cluster = result if isinstance(result, Cluster) else result.cluster
    use = None  # utilisation of each link's channel, (n_links,), in %
    if not isinstance(result, Cluster):
        use = 100.0 * result.channel_nbytes / (cluster.channel_capacity * result.simulated_time)
        use = np.asarray(use[cluster.link_channel])
    items = arranged(cluster)
    lines = joints(cluster, items)
    fig, axes = single(10.0, 5.8)
    _draw_frames(items, lines, axes)
    _draw_lines(cluster, items, lines, use, axes)
    marks = _draw_items(cluster, items, use, axes)
    title = f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name
    if use is not None:
        title = f"Use of the links of {cluster.name}"
        if len(use) and use.max() > 0.0:
            top = int(use.argmax())
            speed = si(8.0 * cluster.link_bandwidth[top], "bit/s", 3)
            title += f"; the busiest: {cluster.link_kind[top]}, {use[top]:.0f} % of {speed}"
    axes.set_title(drawn(title), fontsize=10)
    axes.set_axis_off()
    axes.margins(0.04, 0.07)
    if items.grouped:  # a single column is centred
        axes.set_xlim(-0.05, 1.05)
    handles = [*marks, *_kinds_of_links(cluster, items, lines)]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8)
    return saved(axes, path)


def _draw_frames(items: Items, lines: Joints, axes: Axes) -> None:
    """Draw a box around each machine whose inside is drawn, with its name below."""
    for name, members in items.frames.items():
        slot = max(1.0 / max(len(items.frames), 1), 1e-9)
        left, right = items.x[members].min() - 0.14 * slot, items.x[members].max() + 0.14 * slot
        joined = lines.ends[np.isin(lines.ends, members).all(axis=1)]
        has_arcs = (items.y[joined] == GPU).all(axis=1).any()  # below its GPUs
        low = items.y[members].min() - (0.62 if has_arcs else 0.3)
        height = items.y[members].max() + 0.16 - low
        box = "round,pad=0,rounding_size=0.004"
        look: Any = {"facecolor": "#f4f4f4", "edgecolor": "#cccccc", "linewidth": 0.6, "zorder": 0}
        axes.add_patch(FancyBboxPatch((left, low), right - left, height, box, mutation_aspect=5.0, **look))
        if len(items.frames) > 1:
            turned = _turned([name], len(items.frames))
            middle = (left + right) / 2, low
            noted(axes, drawn(name), middle, (0, -2), fontsize=7, ha="center", va="top", rotation=turned)


def _paths(cluster: Cluster, items: Items, lines: Joints) -> list[list[Floats]]:
    """Return the strokes of each line: straight, an arc within a layer, a loop within a group, or two wrapping ends."""
    if _is_grid(cluster, items):
        return [_in_grid(cluster, items, *pair) for pair in lines.ends.tolist()]
    order = np.lexsort((items.x, items.y))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    wide = max(float(np.ptp(items.x)), 1e-9)
    t = np.linspace(0.0, 1.0, 21)
    strokes = []
    for a, b in lines.ends.tolist():
        (xa, ya), (xb, yb) = (items.x[a], items.y[a]), (items.x[b], items.y[b])
        if a == b:
            angle = np.linspace(0.0, 2.0 * np.pi, 41)
            strokes.append([np.stack([xa + 0.04 - 0.04 * np.cos(angle), ya + 0.16 * np.sin(angle)], axis=1)])
        elif ya == yb and abs(rank[a] - rank[b]) > 1 and np.ptp(items.y) > 0.0:
            up = -1.0 if ya in (GPU, CPU) else 1.0
            height = up * 0.9 * (abs(xa - xb) / wide) ** 0.7
            strokes.append([np.stack([xa + t * (xb - xa), ya + 2.0 * height * t * (1.0 - t)], axis=1)])
        else:
            strokes.append([np.array([(xa, ya), (xb, yb)])])
    return strokes


def _in_grid(cluster: Cluster, items: Items, a: int, b: int) -> list[Floats]:
    """Return the stroke between neighbours, or the two ends of a wrap-around link."""
    places = np.array(np.unravel_index([a, b], cluster.grid))
    first, last = (np.array([items.x[i], items.y[i]]) for i in (a, b))
    apart = np.abs(places[:, 0] - places[:, 1])
    if apart.max() <= 1:
        return [np.stack([first, last])]
    out = 0.3 * (last - first) / apart.max()
    return [np.stack([first, first - out]), np.stack([last, last + out])]


def _draw_lines(cluster: Cluster, items: Items, lines: Joints, use: Floats | None, axes: Axes) -> None:
    """Draw the connections; unused links are dashed, and the busiest are on top."""
    n = len(lines.links)
    paths = _paths(cluster, items, lines)
    widest = float(np.clip(14.0 / np.sqrt(max(n, 1)), 0.6, 2.5))
    width = widest * (0.25 + 0.75 * np.sqrt(lines.bandwidth / lines.bandwidth.max())) if n else np.empty(0)
    labelled = _labels_of_groups(cluster, items, lines) if items.grouped else {}
    for i, text in labelled.items():
        stroke = paths[i][0]
        x, y = (stroke[0] + stroke[1]) / 2 if len(stroke) == 2 else stroke[len(stroke) // 2]
        loop = lines.ends[i, 0] == lines.ends[i, 1]
        box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": "none", "alpha": 0.9}
        side, away = ("left", 5) if loop else ("center", 0)
        noted(axes, text, (float(x), float(y)), (away, 0), ha=side, va="center", zorder=3, bbox=box)
    if use is None or not n:
        flat = [stroke for strokes in paths for stroke in strokes]
        stroke_widths = np.repeat(width, [len(strokes) for strokes in paths]) if n else width
        axes.add_collection(LineCollection(flat, colors="#888888", linewidths=stroke_widths, zorder=1))
        return
    used = np.array([use[part].max() for part in lines.links])
    order = np.argsort(used, kind="stable")
    first = int(np.searchsorted(used[order], 0.0, side="right"))
    still = [stroke for i in order[:first].tolist() for stroke in paths[i]]
    axes.add_collection(LineCollection(still, colors="#aaaaaa", linewidths=0.5, linestyles="dashed", zorder=1))
    busy = order[first:].tolist()
    if not busy:
        return
    strokes = [stroke for i in busy for stroke in paths[i]]
    n_strokes = [len(paths[i]) for i in busy]
    values, widths = (np.repeat(part, n_strokes) for part in (used[busy], np.maximum(width[busy], 0.9)))
    coloured = LineCollection(strokes, array=values, cmap=USE, zorder=1, linewidths=widths)
    coloured.set_clim(0.0, 100.0)
    axes.add_collection(coloured)
    assert axes.figure is not None
    bar = axes.figure.colorbar(coloured, ax=axes, shrink=0.75, pad=0.01)
    bar.set_label("use of the busier direction (%); dashed: unused", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _labels_of_groups(cluster: Cluster, items: Items, lines: Joints) -> dict[int, str]:
    """Return the labels of lines between groups, with the number of links that each represents."""
    labels = {}
    for i, (a, b) in enumerate(lines.ends.tolist()):
        speeds = Counter(cluster.link_bandwidth[lines.links[i]].tolist())
        text = "\n".join(f"{max(n // 2, 1):,} x {si(8.0 * speed, 'bit/s', 3)}" for speed, n in speeds.most_common())
        sizes = {end: _n_of(cluster, items, end) for end in (a, b)}
        for end, n in sorted(sizes.items(), key=lambda item: -item[1]):
            per_end, rest = divmod(int(lines.cables[i]), n)
            if a != b and n > 1 and per_end > 1 and not rest:
                noun = "machine" if cluster.host_of[items.nodes[end][0]] >= 0 else "switch"
                text += f"\n{per_end} of each {noun}"
                break
        labels[i] = text
    return labels


def _n_of(cluster: Cluster, items: Items, item: int) -> int:
    """Return the number of machines or switches that an item represents."""
    hosts = cluster.host_of[items.nodes[item]]
    return len(np.unique(hosts)) if hosts[0] >= 0 else len(hosts)


def _kinds_of_links(cluster: Cluster, items: Items, lines: Joints) -> list[Line2D]:
    """Return legend entries with the number of drawn links of each kind and bandwidth."""
    fastest = float(lines.bandwidth.max()) if len(lines.bandwidth) else 1.0
    counts = Counter[tuple[str, float]]()
    in_line: dict[tuple[str, float], set[int]] = {}
    for part, n in zip(lines.links, lines.cables.tolist(), strict=True):
        sorts = Counter((cluster.link_kind[link], float(cluster.link_bandwidth[link])) for link in part.tolist())
        counts += sorts
        for sort in sorts:
            in_line.setdefault(sort, set()).add(n)
    entries = []
    for (kind, bandwidth), n in counts.most_common(N_KINDS):
        sizes = in_line[kind, bandwidth]
        per_line = f", {sizes.pop()} in each line" if len(sizes) == 1 and sizes != {1} and not items.grouped else ""
        label = f"{kind}, {si(8.0 * bandwidth, 'bit/s', 3)} ({max(n // 2, 1):,}{per_line})"
        width = 3.0 * (0.25 + 0.75 * (bandwidth / fastest) ** 0.5)
        entries.append(Line2D([], [], color="#888888", linewidth=width, label=drawn(label)))
    if len(counts) > N_KINDS:
        entries.append(Line2D([], [], linestyle="", label=f"and {len(counts) - N_KINDS} more kinds of links"))
    if _is_grid(cluster, items) and max(cluster.grid) > 2:
        entries.append(Line2D([], [], linestyle="", label="ends that stick out: links that go around"))
    return entries


def _is_grid(cluster: Cluster, items: Items) -> bool:
    return len(cluster.grid) > 1 and prod(cluster.grid) == len(items.x)


def _draw_items(cluster: Cluster, items: Items, use: Floats | None, axes: Axes) -> list[Line2D]:
    """Draw nodes, machines, switches and groups, and return their legend entries.

    Machines of a result have the colour of their busiest link inside, storages that of their disks.
    """
    marks = []
    kind = np.array(items.kind)
    size = float(np.clip(6000.0 / max(len(kind), 1), 8.0, 120.0 if not items.grouped else 220.0))
    inside = None if use is None else _inside(cluster, items, use)
    fig = axes.figure
    assert fig is not None
    for name, (marker, colour, label) in _MARKS.items():
        at = np.flatnonzero(kind == name)
        if not len(at):
            continue
        n = sum(_n_of(cluster, items, i) if items.grouped else 1 for i in at.tolist())
        label = f"{label} ({n:,})"
        fill: Any = colour
        if name == "machine":
            n_gpus = cluster.node_kind.count("gpu")
            label += f": {count(n_gpus, 'GPU')} inside" if n_gpus else ""
            if inside is not None:
                label += ", in the colour of the busiest link there"
        if name in ("machine", "storage") and inside is not None:
            fill = USE(Normalize(0.0, 100.0)(inside[at]))
            label += ", in the colour of its disks" if name == "storage" else ""
        look: Any = {"s": size, "marker": marker, "edgecolors": "#333333", "linewidths": 0.5, "zorder": 2}
        several = [i for i in at.tolist() if items.grouped and _n_of(cluster, items, i) > 1]
        for away in (6.0, 3.0):  # drawn as a stack
            behind = axes.transData + ScaledTranslation(away / 72.0, away / 72.0, fig.dpi_scale_trans)
            axes.scatter(items.x[several], items.y[several], c=colour, transform=behind, **look)
        axes.scatter(items.x[at], items.y[at], c=fill, **look)
        edge: Any = {"markeredgecolor": "#333333", "markeredgewidth": 0.5, "markersize": 7, "linestyle": ""}
        marks.append(Line2D([], [], marker=marker, markerfacecolor=colour, label=label, **edge))
    for height in np.unique(items.y):
        row = np.flatnonzero(items.y == height)
        _write_names(items, row, size, axes)
    return marks


def _inside(cluster: Cluster, items: Items, use: Floats) -> Floats:
    """Return the utilisation of the busiest link within each item, (n_items,), in %."""
    most = np.zeros(len(items.x))
    source = cluster.host_of[cluster.link_src]
    within = (source == cluster.host_of[cluster.link_dst]) & (source >= 0)
    np.maximum.at(most, items.item_of[cluster.link_src[within]], use[within])
    return most


def _turned(names: list[str], n_places: int) -> float:
    """Return the angle in degrees at which names do not overlap."""
    return 90.0 if max(map(len, names)) * _LETTER * 7.0 > 0.95 * _WIDTH / max(n_places, 1) else 0.0


def _write_names(items: Items, row: Ints, size: float, axes: Axes) -> None:
    """Write the names of a row below or above it, rotated if space is tight, and not at all if it is too tight."""
    if len(row) * 7.0 * 1.1 > _WIDTH or len(np.unique(items.y)) > 12:  # a grid has too many rows for names
        return
    inner = bool(items.frames)
    names = [items.names[i].rpartition(".")[2] if inner else items.names[i] for i in row.tolist()]
    gaps = np.diff(np.sort(items.x[row]))
    places = max(len(row), float(np.ptp(items.x)) / float(gaps.min()) if len(gaps) and gaps.min() > 0.0 else 1)
    turned = _turned(names, int(places))
    if turned and all(items.kind[i] == "switch" for i in row.tolist()):  # rotated names would hide the links below
        return
    away = 0.55 * size**0.5 + 1.0
    alone = items.grouped and len(row) == 1  # in a column, with links up, down and right
    for i, name in zip(row.tolist(), names, strict=True):
        above = items.kind[i] == "switch"  # links leave a switch downwards
        offset = (-away - 3.0, 0.0) if alone else (0.0, away if above else -away)
        sides = {"ha": "right" if alone else "center", "va": "center" if alone else "bottom" if above else "top"}
        box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75}
        text: Any = {"fontsize": 9 if items.grouped else 7, "rotation": turned, "zorder": 3, "bbox": box, **sides}
        noted(axes, drawn(name), (items.x[i], items.y[i]), offset, **text)
