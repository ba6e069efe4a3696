"""A cluster in a few lines of text."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ddlsim.cluster.cluster import Bools, Cluster, Floats
from ddlsim.cluster.details import LinkDetail
from ddlsim.printable import shown
from ddlsim.readable import size


def summary(cluster: Cluster) -> str:
    """Return machines, devices, links by kind, routing and sources of the cluster as text."""
    texts = (": ".join(filter(None, row)) for row in summary_rows(cluster))
    return shown("\n".join([title(cluster), *(f"  {text}" for text in texts)]))


def title(cluster: Cluster) -> str:
    """Return the cluster's name, with its title if it has one."""
    return f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name


def summary_rows(cluster: Cluster) -> list[tuple[str, str]]:
    """Return what :func:`summary` says below the title: labels ("" for the machines) and texts."""
    kinds = Counter(cluster.node_kind)
    inside = sum(k == "switch" and h >= 0 for k, h in zip(cluster.node_kind, cluster.host_of.tolist(), strict=True))
    machines = (
        f"{len(cluster.host_names) - kinds['storage']} hosts, {len(cluster.workers)} workers ({kinds['gpu']} GPUs), "
        f"{_storages(kinds['storage'])}"
        f"{kinds['switch'] - inside} fabric switches; routing: {cluster.routing}"
    )
    devices = Counter(cluster.device_of[node] or "no device named" for node in cluster.workers.tolist())
    rows = [("", machines), ("workers", ", ".join(f"{n} x {device}" for device, n in sorted(devices.items())))]
    link_kind = np.array(cluster.link_kind)
    for kind in dict.fromkeys(cluster.link_kind):
        of_kind = link_kind == kind
        rate = _range(cluster.link_bandwidth[of_kind] * 8e-9, "Gbit/s")
        delay = _range(cluster.link_latency[of_kind] * 1e6, "us")
        share = _range(cluster.link_efficiency[of_kind], "")
        more = _details(cluster, of_kind)
        rows.append((kind, f"{of_kind.sum()} links of {rate}, {delay}, efficiency {share}".rstrip() + more))
    return [*rows, *(("note", note) for note in cluster.notes), *(("source", text) for text in cluster.sources)]


def _storages(n: int) -> str:
    return f"{n} storages, " if n > 1 else "1 storage, " * n


def _details(cluster: Cluster, of_kind: Bools) -> str:
    """Return what links of a kind do besides, or nothing."""
    if cluster.details is None:
        return ""
    found = [cluster.details.of(link) for link in np.flatnonzero(of_kind).tolist()]
    parts = []
    if any(detail.frame_header for detail in found):
        header = _range(np.array([detail.frame_header for detail in found]), "B")
        payload = _range(np.array([detail.frame_payload for detail in found]), "B")
        parts.append(f"headers of {header} per {payload}")
    if any(detail.burst for detail in found):
        parts.append(f"bursts of {_range(np.array([detail.burst for detail in found]), 'B')}")
    if any(detail.reverse_load for detail in found):
        parts.append(f"acknowledgements {_range(np.array([detail.reverse_load for detail in found]), '')}")
    parts += sorted({_transport(detail) for detail in found if detail.transport})
    return "".join(f", {part}" for part in parts)


def _transport(detail: LinkDetail) -> str:
    """Return a transport in words: its name, and what it has been told."""
    words = [f"{detail.connections} connections"] if detail.connections > 1 else []
    words += [f"{detail.flow_rate * 8e-9:.4g} Gbit/s each"] if detail.flow_rate else []
    words += [f"window {size(detail.window)}"] if detail.window else []
    words += [f"rendezvous above {size(detail.rendezvous)}"] if detail.rendezvous else []
    words += [f"loss {detail.loss:.4g}"] if detail.loss else []
    words += [f"buffers of {size(detail.buffer)}"] if detail.buffer else []
    words += [key for key in ("unordered", "warm") if getattr(detail, key)]
    return f"transport {detail.transport}" + (f" ({', '.join(words)})" if words else "")


def _range(values: Floats, unit: str) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g} {unit}".strip() if low == high else f"{low:.4g} to {high:.4g} {unit}".strip()
