"""A picture of a cluster: machines below, switches above, links coloured by how much they are used."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import ScaledTranslation

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.readable import count, si
from ddlsim.report.cluster_layout import CPU, GPU, Items, Joints, arranged, joints
from ddlsim.report.drawing import drawn, figure, save
from ddlsim.run.result import Result

Floats = npt.NDArray[np.float64]
#: use of a link in %, from light to dark, so that it is read in grey as well; white is no colour of it
USE = LinearSegmentedColormap.from_list("use", ["#bcd0e4", "#74a9cf", "#7b62b3", "#8c1f7c", "#2b0030"])
#: kinds of links in the legend
N_KINDS = 5
#: points that a letter of size 1 is wide, about, and those that the picture is
_LETTER, _WIDTH = 0.6, 690.0
_MARKS = {
    "gpu": ("s", "#88bb88", "GPU"), "host": ("o", "#99aadd", "host (CPU)"),
    "machine": ("p", "#ddcc99", "machine"), "storage": ("h", "#cc99bb", "storage"),
    "switch": ("D", "#bbbbbb", "switch"),
}  # fmt: skip


@checked
def cluster_plot(result: Result | Cluster, path: str | Path | None = None) -> Axes:
    """Draw a cluster, or a result's cluster with its links coloured by utilisation, on a scale from 0 to 100 %.

    Nodes are placed in layers by their distance from the machines: fabric switches above, machines below, their GPUs
    at the bottom; grids (tori) lie as they are wired. Machines of a larger cluster are drawn without their inside, and
    where there are hundreds, groups of machines and switches that are alike (:mod:`ddlsim.report.cluster_layout`). A
    line stands for all links between what it joins, in both directions; its colour is the use of the busiest of them.
    """
    cluster = result if isinstance(result, Cluster) else result.cluster
    use = None if isinstance(result, Cluster) else _utilisation(result)
    items = arranged(cluster)
    lines = joints(cluster, items)
    made = figure(10.0, 5.8)
    axes = made.subplots()
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
    if items.grouped:  # one column stands in the middle
        axes.set_xlim(-0.05, 1.05)
    handles = [*marks, *_kinds_of_links(cluster, items, lines)]
    made.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8)
    save(made, path)
    return axes


def _utilisation(result: Result) -> Floats:
    """Return the utilisation of each link's channel, (n_links,), in %."""
    channel = result.channel_nbytes / (result.cluster.channel_capacity * result.simulated_time)
    return np.asarray(100.0 * channel[result.cluster.link_channel])


def _draw_frames(items: Items, lines: Joints, axes: Axes) -> None:
    """Draw a box around each machine that shows its inside, with its name below."""
    for name, members in items.frames.items():
        slot = max(1.0 / max(len(items.frames), 1), 1e-9)
        left, right = items.x[members].min() - 0.14 * slot, items.x[members].max() + 0.14 * slot
        low = items.y[members].min() - (0.62 if _has_arcs(items, lines, members) else 0.3)
        axes.add_patch(FancyBboxPatch(
            (left, low), right - left, items.y[members].max() + 0.16 - low, zorder=0, linewidth=0.6,
            boxstyle="round,pad=0,rounding_size=0.004", mutation_aspect=5.0, facecolor="#f4f4f4", edgecolor="#cccccc",
        ))  # fmt: skip
        if len(items.frames) > 1:
            turned = _turned([name], len(items.frames))
            axes.annotate(drawn(name), ((left + right) / 2, low), xytext=(0, -2), textcoords="offset points",
                          fontsize=7, ha="center", va="top", rotation=turned)  # fmt: skip


def _has_arcs(items: Items, lines: Joints, members: npt.NDArray[np.int64]) -> bool:
    """Return whether GPUs of a machine are joined, so that arcs lie below them."""
    inside = np.isin(lines.ends, members).all(axis=1)
    return bool((items.y[lines.ends[inside]] == GPU).all(axis=1).any())


def _paths(cluster: Cluster, items: Items, lines: Joints) -> list[list[Floats]]:
    """Return the strokes of each line: straight, an arc within a layer, a loop within a group, two ends of a wrap."""
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
    """Return the stroke between neighbours, or what sticks out on either side of a link that goes around."""
    places = np.array(np.unravel_index([a, b], cluster.grid))
    first, last = (np.array([items.x[i], items.y[i]]) for i in (a, b))
    apart = np.abs(places[:, 0] - places[:, 1])
    if apart.max() <= 1:
        return [np.stack([first, last])]
    out = 0.3 * (last - first) / apart.max()
    return [np.stack([first, first - out]), np.stack([last, last + out])]


def _draw_lines(cluster: Cluster, items: Items, lines: Joints, use: Floats | None, axes: Axes) -> None:
    """Draw what joins the items; unused links are dashed, and the busiest lie on top."""
    n = len(lines.links)
    paths = _paths(cluster, items, lines)
    widest = float(np.clip(14.0 / np.sqrt(max(n, 1)), 0.6, 2.5))
    width = widest * (0.25 + 0.75 * np.sqrt(lines.bandwidth / lines.bandwidth.max())) if n else np.empty(0)
    labelled = _labels_of_groups(cluster, items, lines) if items.grouped else {}
    for i, text in labelled.items():
        stroke = paths[i][0]
        x, y = (stroke[0] + stroke[1]) / 2 if len(stroke) == 2 else stroke[len(stroke) // 2]
        loop = lines.ends[i, 0] == lines.ends[i, 1]
        axes.annotate(text, (float(x), float(y)), fontsize=8, ha="left" if loop else "center", va="center", zorder=3,
                      xytext=(5 if loop else 0, 0), textcoords="offset points",
                      bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": "none", "alpha": 0.9})  # fmt: skip
    if use is None or not n:
        flat = [stroke for strokes in paths for stroke in strokes]
        each = np.repeat(width, [len(strokes) for strokes in paths]) if n else width
        axes.add_collection(LineCollection(flat, colors="#888888", linewidths=each, zorder=1))
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
    coloured = LineCollection(strokes, array=np.repeat(used[busy], n_strokes), cmap=USE, zorder=1,
                              linewidths=np.repeat(np.maximum(width[busy], 0.9), n_strokes))  # fmt: skip
    coloured.set_clim(0.0, 100.0)
    axes.add_collection(coloured)
    assert axes.figure is not None
    bar = axes.figure.colorbar(coloured, ax=axes, shrink=0.75, pad=0.01)
    bar.set_label("use of the busier direction (%); dashed: unused", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _labels_of_groups(cluster: Cluster, items: Items, lines: Joints) -> dict[int, str]:
    """Return what to write on the lines between groups: how many links each stands for."""
    labels = {}
    for i, (a, b) in enumerate(lines.ends.tolist()):
        speeds = Counter(cluster.link_bandwidth[lines.links[i]].tolist())
        text = "\n".join(f"{max(n // 2, 1):,} x {si(8.0 * speed, 'bit/s', 3)}" for speed, n in speeds.most_common())
        sizes = {end: _n_of(cluster, items, end) for end in (a, b)}
        for end, n in sorted(sizes.items(), key=lambda item: -item[1]):
            each, rest = divmod(int(lines.cables[i]), n)
            if a != b and n > 1 and each > 1 and not rest:
                text += f"\n{each} of each {_noun(cluster, items, end)}"
                break
        labels[i] = text
    return labels


def _n_of(cluster: Cluster, items: Items, item: int) -> int:
    """Return how many machines or switches an item stands for."""
    hosts = cluster.host_of[items.nodes[item]]
    return len(np.unique(hosts)) if hosts[0] >= 0 else len(hosts)


def _noun(cluster: Cluster, items: Items, item: int) -> str:
    return "machine" if cluster.host_of[items.nodes[item][0]] >= 0 else "switch"


def _kinds_of_links(cluster: Cluster, items: Items, lines: Joints) -> list[Line2D]:
    """Return entries of a legend: how many links of each kind and bandwidth are drawn."""
    fastest = float(lines.bandwidth.max()) if len(lines.bandwidth) else 1.0
    found = Counter[tuple[str, float]]()
    in_line: dict[tuple[str, float], set[int]] = {}
    for part, n in zip(lines.links, lines.cables.tolist(), strict=True):
        sorts = Counter((cluster.link_kind[link], float(cluster.link_bandwidth[link])) for link in part.tolist())
        found += sorts
        for sort in sorts:
            in_line.setdefault(sort, set()).add(n)
    entries = []
    for (kind, bandwidth), n in found.most_common(N_KINDS):
        in_each = in_line[kind, bandwidth]
        each = f", {in_each.pop()} in each line" if len(in_each) == 1 and in_each != {1} and not items.grouped else ""
        label = f"{kind}, {si(8.0 * bandwidth, 'bit/s', 3)} ({max(n // 2, 1):,}{each})"
        width = 3.0 * (0.25 + 0.75 * (bandwidth / fastest) ** 0.5)
        entries.append(Line2D([], [], color="#888888", linewidth=width, label=drawn(label)))
    if len(found) > N_KINDS:
        entries.append(Line2D([], [], linestyle="", label=f"and {len(found) - N_KINDS} more kinds of links"))
    if _is_grid(cluster, items) and max(cluster.grid) > 2:
        entries.append(Line2D([], [], linestyle="", label="ends that stick out: links that go around"))
    return entries


def _is_grid(cluster: Cluster, items: Items) -> bool:
    return len(cluster.grid) > 1 and prod(cluster.grid) == len(items.x)


def _draw_items(cluster: Cluster, items: Items, use: Floats | None, axes: Axes) -> list[Line2D]:
    """Draw nodes, machines, switches and groups, and return their entries of a legend.

    Machines of a result have the colour of their busiest link inside, storages that of their disks.
    """
    marks = []
    kind = np.array(items.kind)
    size = float(np.clip(6000.0 / max(len(kind), 1), 8.0, 120.0 if not items.grouped else 220.0))
    inside = None if use is None else _inside(cluster, items, use)
    made = axes.figure
    assert made is not None
    for name, (marker, colour, label) in _MARKS.items():
        at = np.flatnonzero(kind == name)
        if not len(at):
            continue
        n = sum(_n_of(cluster, items, i) if items.grouped else 1 for i in at.tolist())
        label = f"{label} ({n:,})"
        fill: object = colour
        if name == "machine":
            n_gpus = cluster.node_kind.count("gpu")
            label += f": {count(n_gpus, 'GPU')} inside" if n_gpus else ""
            if inside is not None:
                label += ", in the colour of the busiest link there"
        if name in ("machine", "storage") and inside is not None:
            fill = USE(Normalize(0.0, 100.0)(inside[at]))
            label += ", in the colour of its disks" if name == "storage" else ""
        several = [i for i in at.tolist() if items.grouped and _n_of(cluster, items, i) > 1]
        for away in (6.0, 3.0):  # a stack
            behind = axes.transData + ScaledTranslation(away / 72.0, away / 72.0, made.dpi_scale_trans)
            axes.scatter(items.x[several], items.y[several], s=size, marker=marker, c=colour, edgecolors="#333333",
                         linewidths=0.5, zorder=2, transform=behind)  # fmt: skip
        axes.scatter(items.x[at], items.y[at], s=size, marker=marker, c=fill, edgecolors="#333333",  # type: ignore[arg-type]
                     linewidths=0.5, zorder=2)  # fmt: skip
        marks.append(Line2D([], [], linestyle="", marker=marker, markersize=7, markerfacecolor=colour, label=label,
                            markeredgecolor="#333333", markeredgewidth=0.5))  # fmt: skip
    for height in np.unique(items.y):
        row = np.flatnonzero(items.y == height)
        _write_names(items, row, size, axes)
    return marks


def _inside(cluster: Cluster, items: Items, use: Floats) -> Floats:
    """Return the use of the busiest link within each item, (n_items,), in %."""
    most = np.zeros(len(items.x))
    source = cluster.host_of[cluster.link_src]
    within = (source == cluster.host_of[cluster.link_dst]) & (source >= 0)
    np.maximum.at(most, items.item_of[cluster.link_src[within]], use[within])
    return most


def _turned(names: list[str], n_places: int) -> float:
    """Return by how many degrees names must be turned to stand beside each other."""
    return 90.0 if max(map(len, names)) * _LETTER * 7.0 > 0.95 * _WIDTH / max(n_places, 1) else 0.0


def _write_names(items: Items, row: npt.NDArray[np.int64], size: float, axes: Axes) -> None:
    """Write the names of a row below or above it, upright if they are tight, and not at all if they are too tight."""
    if len(row) * 7.0 * 1.1 > _WIDTH or len(np.unique(items.y)) > 12:  # a grid has more rows than names have room for
        return
    inner = bool(items.frames)
    names = [items.names[i].rpartition(".")[2] if inner else items.names[i] for i in row.tolist()]
    gaps = np.diff(np.sort(items.x[row]))
    places = max(len(row), float(np.ptp(items.x)) / float(gaps.min()) if len(gaps) and gaps.min() > 0.0 else 1)
    turned = _turned(names, int(places))
    if turned and all(items.kind[i] == "switch" for i in row.tolist()):  # upright they would hide the links below
        return
    away = 0.55 * size**0.5 + 1.0
    alone = items.grouped and len(row) == 1  # in a column: links leave it upwards, downwards and to the right
    for i, name in zip(row.tolist(), names, strict=True):
        above = items.kind[i] == "switch"  # links leave a switch downwards
        offset = (-away - 3.0, 0.0) if alone else (0.0, away if above else -away)
        axes.annotate(drawn(name), (items.x[i], items.y[i]), fontsize=9 if items.grouped else 7, rotation=turned,
                      ha="right" if alone else "center", va="center" if alone else "bottom" if above else "top",
                      textcoords="offset points", zorder=3, xytext=offset,
                      bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75})  # fmt: skip
