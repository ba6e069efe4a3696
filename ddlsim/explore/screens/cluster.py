"""*Cluster*: machines, links, prices and a picture, compared with other presets."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import panel as pn

from ddlsim.bundled import bundled_files, split_options
from ddlsim.cluster import Cluster, cluster_names, load_cluster
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.explore.components import ComputedCard, Exports, File, html, lines, message, picture, plain, table, tiles
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.setup import Setup
from ddlsim.plain import decoded, read_bytes
from ddlsim.readable import si, size
from ddlsim.report.cluster_plot import cluster_plot
from ddlsim.run.costs import host_price
from ddlsim.workload.devices import load_device

NAME = "cluster"
TITLE = "Cluster"


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    head, body = html(), html()
    exports = Exports(lambda: _files(setup.cluster.strip()))
    shown: list[Cluster] = []

    def wanted() -> Callable[[Progress], Any] | None:
        cluster = next(iter(shown), None)
        if cluster is None:
            return None
        return lambda _: picture(lambda: cluster_plot(cluster).figure, f"Picture of {cluster.name}")

    def fail(text: str) -> None:
        shown.clear()
        head.object, body.object = message(text).object, ""
        card.stale()

    card = ComputedCard("Picture", jobs, wanted, "cluster-picture")
    card.card.collapsed = False
    presets = ComputedCard("All presets side by side", jobs, lambda: _comparison)

    def done(cluster: Cluster) -> None:
        shown[:] = [cluster]
        head.object = f"<h2>{plain(cluster.name)}</h2>{plain(cluster.title)}"
        body.object = described(cluster)
        card.stale()
        exports.stale()

    def refresh() -> None:
        name = setup.cluster
        jobs.start("cluster", lambda progress: load_cluster(name.strip() or "?"), done, fail)

    setup.when_shown(NAME, refresh, simulates=False)
    return pn.Column(head, body, card.card, presets.card, exports.card, sizing_mode="stretch_width")


def described(cluster: Cluster) -> str:
    """Return machines, devices, prices and links of a cluster as HTML."""
    numbers = [
        ("workers", str(len(cluster.workers))),
        ("machines", str(len(cluster.host_names))),
        ("switches between them", str(int(cluster.is_fabric_switch.sum()))),
        ("routing", cluster.routing),
        ("price", _price(cluster)),
    ]
    devices = Counter(cluster.device_of[node] or "no device named" for node in cluster.workers.tolist())
    rows = [[f"{n} x {name}", *_of_device(name)] for name, n in sorted(devices.items())]
    parts = [
        tiles(numbers),
        f"<h3>Devices</h3>{table(('devices', 'fp32 peak', 'memory', 'price'), rows)}",
        f"<h3>Links</h3>{table(('kind', 'links', 'bandwidth', 'latency', 'efficiency'), _links(cluster))}",
    ]
    parts += [lines(cluster.notes, "note"), *(f"<div>Source: {plain(source)}</div>" for source in cluster.sources)]
    return "".join(parts)


def _price(cluster: Cluster) -> str:
    total = 0.0
    try:
        for host in range(len(cluster.host_names)):
            total += host_price(cluster, host, cluster.workers[cluster.host_of[cluster.workers] == host])
    except ConfigError:
        return "not known"
    return f"{3600.0 * total:,.4g} USD/h"


def _of_device(name: str) -> tuple[str, str, str]:
    try:
        device = load_device(name)
    except DdlsimError:
        return "", "", ""
    peak = dict(device.peak_flops).get("fp32")
    price = "" if device.price is None else f"{3600.0 * device.price:.4g} USD/h"
    return ("" if peak is None else si(peak, "FLOP/s", 3)), size(device.memory_nbytes), price


def _links(cluster: Cluster) -> list[list[str]]:
    kinds = np.array(cluster.link_kind)
    rows = []
    for kind in dict.fromkeys(cluster.link_kind):
        of = kinds == kind
        numbers = (
            (cluster.link_bandwidth, 8e-9, " Gbit/s"),
            (cluster.link_latency, 1e6, " us"),
            (cluster.link_efficiency, 100.0, " %"),
        )
        ends = [(*(factor * np.quantile(values[of], [0.0, 1.0])).tolist(), unit) for values, factor, unit in numbers]
        texts = [f"{low:.4g}{unit}" if low == high else f"{low:.4g} to {high:.4g}{unit}" for low, high, unit in ends]
        rows.append([kind, str(int(of.sum())), *texts])
    return rows


def _comparison(_: Progress) -> pn.viewable.Viewable:
    rows = [_row(load_cluster(name)) for name in cluster_names()]
    return html(table(("cluster", "workers", "machines", "device", "network per machine", "price"), rows))


def _row(cluster: Cluster) -> list[str]:
    devices = sorted({cluster.device_of[node] or "" for node in cluster.workers.tolist()})
    here, there = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    outside = (here >= 0) & (there != here)
    total = float(cluster.link_bandwidth[outside].sum()) * 8e-9 / max(len(cluster.host_names), 1)
    speed = f"{total:.4g} Gbit/s" if total else "one machine"
    counts = [str(len(cluster.workers)), str(len(cluster.host_names))]
    return [cluster.name, *counts, ", ".join(devices), speed, _price(cluster)]


def _files(name: str) -> list[File]:
    """Return the cluster as a file, and the program that shows it."""
    program = f"import ddlsim\n\ncluster = ddlsim.load_cluster({name!r})\nprint(cluster.summary())\n"
    return [File("cluster.toml", _toml(name)), File("cluster.py", program)]


def _toml(name: str) -> str:
    """Return the TOML file itself if it is unchanged, else a new file that describes the cluster."""
    stem, settings = split_options(name)
    path = bundled_files("topologies").get(stem, Path(stem))
    cluster = load_cluster(name)  # raises the error of an invalid file
    if path.suffix == ".toml" and not settings:
        return decoded(read_bytes(path), str(path))
    with tempfile.TemporaryDirectory() as folder:
        cluster.save(written := Path(folder) / "cluster.toml")
        return decoded(read_bytes(written))
