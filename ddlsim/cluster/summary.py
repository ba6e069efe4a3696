"""A cluster in a few lines of text."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ddlsim.cluster.cluster import Cluster, Floats

__all__ = ["summary"]


def summary(cluster: Cluster) -> str:
    """Return machines, devices, links by kind, routing and sources of the cluster."""
    kinds = Counter(cluster.node_kind)
    inside = sum(
        k == "switch" and h >= 0 for k, h in zip(cluster.node_kind, cluster.host_of.tolist(), strict=True)
    )
    lines = [f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name]
    lines.append(
        f"  {len(cluster.host_names)} hosts, {len(cluster.workers)} workers ({kinds['gpu']} GPUs), "
        f"{kinds['switch'] - inside} fabric switches; routing: {cluster.routing}"
    )
    devices = Counter(cluster.device_of[node] or "no device named" for node in cluster.workers.tolist())
    lines.append("  workers: " + ", ".join(f"{n} x {device}" for device, n in sorted(devices.items())))
    link_kind = np.array(cluster.link_kind)
    for kind in dict.fromkeys(cluster.link_kind):
        of_kind = link_kind == kind
        rate = _range(cluster.link_bandwidth[of_kind] * 8e-9, "Gbit/s")
        delay = _range(cluster.link_latency[of_kind] * 1e6, "us")
        share = _range(cluster.link_efficiency[of_kind], "")
        lines.append(f"  {kind}: {of_kind.sum()} links of {rate}, {delay}, efficiency {share}".rstrip())
    lines += [f"  note: {note}" for note in cluster.notes]
    lines += [f"  source: {source}" for source in cluster.sources]
    return "\n".join(lines)


def _range(values: Floats, unit: str) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g} {unit}".strip() if low == high else f"{low:.4g} to {high:.4g} {unit}".strip()
