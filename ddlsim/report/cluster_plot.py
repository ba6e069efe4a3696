"""A picture of a cluster: machines below, switches above, links coloured by how much they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.readable import si
from ddlsim.report.drawing import drawn, figure, save
from ddlsim.run.result import Result

Floats = npt.NDArray[np.float64]
#: clusters with more nodes than this are drawn without the inside of their machines
MANY_NODES = 160
#: and with more machines than this without the names of the nodes
MANY_HOSTS = 40
_MARKS = {"gpu": ("s", "#88bb88", "GPU"), "host": ("o", "#99aadd", "host (CPU)"), "switch": ("D", "#bbbbbb", "switch")}


@checked
def cluster_plot(result: Result | Cluster, path: str | Path | None = None) -> Axes:
    """Draw a cluster, or a result's cluster with its links coloured by utilisation (%).

    Nodes are placed in layers by their distance from the machines: fabric switches above, machines below,
    their GPUs at the bottom; grids (rings, tori) keep the order of their machines on a circle.
    """
    cluster = result if isinstance(result, Cluster) else result.cluster
    utilisation = None if isinstance(result, Cluster) else _utilisation(result)
    inside = cluster.n_nodes <= MANY_NODES
    x, y, shown = _layout(cluster, inside)
    made = figure(10.0, 5.5)
    axes = made.subplots()
    _draw_links(cluster, utilisation, x, y, shown, axes)
    _draw_nodes(cluster, x, y, shown, axes)
    if utilisation is None:
        axes.set_title(drawn(f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name), fontsize=10)
    else:
        axes.set_title(drawn(f"Use of the links of {cluster.name}"), fontsize=10)
    axes.set_axis_off()
    axes.margins(0.04)
    made.legend(loc="outside lower center", ncols=4, fontsize=8)
    save(made, path)
    return axes


def _utilisation(result: Result) -> Floats:
    """Return the utilisation of each link's channel, (n_links,), in %."""
    channel = result.channel_nbytes / (result.cluster.channel_capacity * result.end_time)
    return np.asarray(100.0 * channel[result.cluster.link_channel])


def _layout(cluster: Cluster, inside: bool) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Return coordinates of the nodes and which of them are drawn."""
    kind = np.array(cluster.node_kind)
    fabric = cluster.host_of < 0
    shown = np.ones(cluster.n_nodes, dtype=bool)
    level = np.where(fabric, _switch_levels(cluster), 0).astype(float)
    if not inside:
        gateway = np.zeros(cluster.n_nodes, dtype=bool)
        gateway[cluster.servers] = True
        shown = fabric | gateway
        if not gateway.any():
            shown = np.ones(cluster.n_nodes, dtype=bool)
    level[~fabric & (kind == "switch")] = -0.45
    level[kind == "gpu"] = -1.0
    if not fabric.any():
        return *(_grid(cluster) if len(cluster.grid) > 1 else _circle(cluster)), shown
    n_hosts = max(len(cluster.host_names), 1)
    x = np.zeros(cluster.n_nodes)
    for host in range(n_hosts):
        for layer in (0.0, -0.45, -1.0):  # CPU, PCIe and NVLink switches, GPUs
            members = np.flatnonzero((cluster.host_of == host) & (level == layer))
            spread = (np.arange(len(members)) + 0.5) / max(len(members), 1) - 0.5
            x[members] = (host + 0.5 + 0.85 * spread) / n_hosts
    gpus = np.flatnonzero(kind == "gpu")
    if inside and len(cluster.host_names) <= 2:  # on an arc, so that links between GPUs do not hide each other
        place = np.arange(len(gpus)) % max(len(gpus) // n_hosts, 1) / max(len(gpus) // n_hosts - 1, 1)
        level[gpus] -= 1.2 * (0.25 - (place - 0.5) ** 2)
    for layer in np.unique(level[fabric]):
        members = np.flatnonzero(fabric & (level == layer))
        x[members] = (np.arange(len(members)) + 0.5) / len(members)
    return x, level, shown


def _grid(cluster: Cluster) -> tuple[Floats, Floats]:
    """Place a torus as a grid, the third dimension aslant; links that wrap around lie behind the others."""
    places = np.array(np.unravel_index(np.arange(cluster.n_nodes), cluster.grid), dtype=np.float64)
    x, y = places[-1].copy(), -places[-2]
    for depth in places[:-2]:
        x += 0.43 * depth
        y += 0.31 * depth
    return x, y


def _circle(cluster: Cluster) -> tuple[Floats, Floats]:
    """Machines without fabric switches stand on a circle, the nodes of each close together."""
    n_hosts = max(len(cluster.host_names), 1)
    if n_hosts == 1:  # one machine: its nodes by kind
        kind = np.array(cluster.node_kind)
        x, y = np.zeros(cluster.n_nodes), np.zeros(cluster.n_nodes)
        for level, name in enumerate(("gpu", "switch", "host")):
            members = np.flatnonzero(kind == name)
            x[members] = (np.arange(len(members)) + 0.5) / max(len(members), 1)
            # neighbours one above the other, so that links between them do not hide each other
            y[members] = level + (0.25 * (np.arange(len(members)) % 2) if name == "gpu" else 0.0)
        return x, y
    angle = 2.0 * np.pi * cluster.host_of / n_hosts
    place = np.arange(cluster.n_nodes) % 8
    radius = 1.0 + 0.05 * place * (np.bincount(cluster.host_of).max() > 1)
    return radius * np.sin(angle), radius * np.cos(angle)


def _switch_levels(cluster: Cluster) -> npt.NDArray[np.int64]:
    """Return each fabric switch's distance from the machines, in hops."""
    level = np.where(cluster.host_of >= 0, 0, cluster.n_nodes)
    for _ in range(cluster.n_nodes):
        before = level.copy()
        np.minimum.at(level, cluster.link_dst, level[cluster.link_src] + 1)
        level[cluster.host_of >= 0] = 0
        if np.array_equal(before, level):
            break
    return level


def _draw_links(
    cluster: Cluster, utilisation: Floats | None, x: Floats, y: Floats, shown: npt.NDArray[np.bool_], axes: Axes
) -> None:
    """One line per pair of nodes: the two directions and parallel links share it, the most used one counts."""
    a, b = np.minimum(cluster.link_src, cluster.link_dst), np.maximum(cluster.link_src, cluster.link_dst)
    keep = shown[a] & shown[b]
    pair, where = np.unique(np.stack([a[keep], b[keep]], axis=1), axis=0, return_inverse=True)
    lines = [[(x[i], y[i]), (x[j], y[j])] for i, j in pair]
    bandwidth = np.zeros(len(pair))
    np.maximum.at(bandwidth, where.ravel(), cluster.link_bandwidth[keep])
    widest = float(np.clip(60.0 / np.sqrt(max(len(pair), 1)), 1.0, 4.0))
    width = widest * (0.2 + 0.8 * np.sqrt(bandwidth / bandwidth.max())) if len(pair) else np.empty(0)
    if utilisation is None or not lines:
        axes.add_collection(LineCollection(lines, colors="#888888", linewidths=width, zorder=1))
        return
    used = np.zeros(len(pair))
    np.maximum.at(used, where.ravel(), utilisation[keep])
    order = np.argsort(used, kind="stable")  # the busiest lie on top
    lines, bandwidth, used = [lines[i] for i in order], bandwidth[order], used[order]
    first = int(np.searchsorted(used, 0.0, side="right"))
    axes.add_collection(LineCollection(lines[:first], colors="#aaaaaa", linewidths=0.4, zorder=1))
    lines, bandwidth, used = lines[first:], bandwidth[first:], used[first:]
    if not lines:
        return
    drawn = LineCollection(lines, array=used, cmap="viridis_r", linewidths=width[order][first:], zorder=1)
    drawn.set_clim(0.0, max(float(used[-1]), 1.0))
    axes.add_collection(drawn)
    assert axes.figure is not None
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.7, pad=0.01)
    bar.set_label("utilisation of the busier direction (%); width: bandwidth, grey: unused", fontsize=8)
    (x0, y0), (x1, y1) = lines[-1]
    axes.annotate(
        f"busiest: {used[-1]:.0f} % of {si(8.0 * bandwidth[-1], 'bit/s', 3)}",
        ((x0 + x1) / 2, (y0 + y1) / 2),
        fontsize=7,
        ha="center",
        bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "#666666", "lw": 0.5},
    )


def _draw_nodes(cluster: Cluster, x: Floats, y: Floats, shown: npt.NDArray[np.bool_], axes: Axes) -> None:
    kind = np.array(cluster.node_kind)
    n_shown = int(shown.sum())
    size = float(np.clip(6000.0 / max(n_shown, 1), 8.0, 120.0))
    for name, (marker, colour, label) in _MARKS.items():
        at = np.flatnonzero(shown & (kind == name))
        if len(at):
            axes.scatter(x[at], y[at], s=size, marker=marker, c=colour, edgecolors="#333333", linewidths=0.5, zorder=2,
                         label=f"{label} ({len(at)})")  # fmt: skip
    hidden = np.flatnonzero(~shown & (kind == "gpu"))
    if len(hidden):
        axes.scatter([], [], marker="s", c="white", edgecolors="#333333", label=f"{len(hidden)} GPUs inside")
    if n_shown <= MANY_HOSTS:
        for node in np.flatnonzero(shown):
            name = cluster.node_names[node]
            label = drawn(name.rpartition(".")[2] if kind[node] == "gpu" else name)
            above = -1.0 if kind[node] != "switch" else 1.0  # links leave a switch downwards
            axes.annotate(label, (x[node], y[node]), fontsize=6, ha="center", va="top" if above < 0.0 else "bottom",
                          xytext=(0, above * (0.55 * size**0.5 + 1)), textcoords="offset points")  # fmt: skip
