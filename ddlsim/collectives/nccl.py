"""NCCL's own estimate of a collective, the one by which its tuner chooses algorithm and protocol.

The formulas and constants are those of ``src/graph/tuning.cc`` (https://github.com/NVIDIA/nccl, versions 2.19 and
later): for each algorithm (ring, tree) and protocol (LL, LL128, Simple)

    time = latency + nbytes / bandwidth

    ring   latency = base + (n_steps - n_inter) intra + n_inter inter, n_steps = 2 (n_ranks - 1) for all-reduce
           bandwidth = bus n_ranks / n_steps
    tree   latency = base + 2 ((n_ranks / n_nodes - 1) intra + log2(n_nodes) inter)
           bandwidth = 0.92 bus / 2

    nvls   latency = 25 us
           bandwidth = 0.85 bus / (1 + 1 / n_ranks)

and the least of them counts. LL sends a flag with every 4 bytes, LL128 with every 120. NVLS, all-reduces in one
machine whose NVSwitches add up and multicast (of Hopper's generation on), has every GPU send its buffer once to the
switches and its part of the sum once more, and the tuner's efficiency of 0.85; the tuner itself counts twice the bus
bandwidth.
The bus bandwidth, which NCCL finds by searching for rings, is the caller's, or read off the cluster: what the links of
a worker to its neighbours carry, of NVLinks at most what NCCL counts (``src/graph/topo.h``: 20 of 25 GB/s, say), and
between nodes what a node's network cards carry together, each at most what the connections of its transport carry
(``connections * flow_rate``, docs/models/transport.md); the least over all workers and nodes. (Links beyond, those
between switches, are not looked at here; a run does, see :mod:`ddlsim.runtime.charges`.)

What is left out: NVLS over several nodes and CollNet, channels and their limits, the correction of trees for medium
sizes, and whether LL128 is switched on. The estimate ranks algorithms for the tuner; as a prediction it is rough
(docs/calibration.md).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Bandwidth, Count, Index, checked, quantity
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import inside_hosts, payload_rate
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.units import si

PROTOCOLS = ("LL", "LL128", "Simple")
#: s, by algorithm: base latency, and latency of one hop by NVLink, PCIe and network; each for LL, LL128, Simple
BASE = {"ring": (6.6e-6, 14.0e-6, 8.4e-6), "tree": (6.8e-6, 14.0e-6, 8.4e-6), "nvls": (0.0, 0.0, 0.0)}
HOP = {
    ("ring", "nvlink"): (0.6e-6, 1.9e-6, 3.4e-6), ("tree", "nvlink"): (0.6e-6, 1.25e-6, 4.0e-6),
    ("ring", "pcie"): (1.0e-6, 2.5e-6, 5.7e-6), ("tree", "pcie"): (1.0e-6, 1.9e-6, 4.0e-6),
    ("ring", "network"): (2.7e-6, 4.0e-6, 14.0e-6), ("tree", "network"): (5.0e-6, 8.5e-6, 14.0e-6),
}  # fmt: skip
#: share of the bus bandwidth left to data
SHARE = {
    ("ring", "LL"): 0.5, ("ring", "LL128"): 0.92, ("ring", "Simple"): 1.0,
    ("tree", "LL"): 0.92 / 3.8, ("tree", "LL128"): 0.92 * 0.92, ("tree", "Simple"): 0.92,
}  # fmt: skip
#: s until an all-reduce in switches is on its way, and which share of the links it uses
NVLS_LATENCY, NVLS_SHARE = 25e-6, 0.85
#: GPUs whose NVSwitches add up, by how their names begin
NVLS = ("h100", "h200", "h800", "gh200", "b100", "b200", "gb200")
#: which share of an NVLink's nominal bandwidth NCCL counts, by how the names of GPUs begin (``src/graph/topo.h``)
NVLINK_SHARE = {"p100": 18 / 20, "v100": 20 / 25, "a100": 20 / 25, "a800": 20 / 25} | dict.fromkeys(NVLS[:4], 20.6 / 25)
#: rings of Simple over several nodes cannot hide the network's latency ("plateau effect") from this size per rank on
PLATEAU, PLATEAU_FACTOR = 4096.0, 1.4
#: kind of collective -> steps of a ring, for the ranks and again for the nodes
LAPS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


@dataclass(frozen=True)
class NcclTime:
    """NCCL's choice: `seconds` of `algorithm` ("ring", "tree", "nvls") by `protocol` ("LL", "LL128", "Simple")."""

    seconds: float
    algorithm: str
    protocol: str


@checked
@functools.lru_cache(maxsize=256)
def bus_bandwidth(cluster: Cluster, n_ranks: Count, places: tuple[int, ...] | None = None) -> tuple[float, str]:
    """Return the bytes/s at which rings over the first workers can run, and what joins workers of a node ("nvlink" or
    "pcie", the slower one if there are both). With `places` the ranks are at these nodes.

    Inside nodes, what the links of a worker carry outwards (its NVLinks if it has any); over several nodes at most what
    a node's links to the outside carry: the least of all, as a ring passes through every worker and every node.
    """
    nodes = cluster.workers[:n_ranks] if places is None else np.array(places, dtype=np.int64)
    hosts = cluster.host_of[nodes]
    inside = inside_hosts(cluster)
    nvlink = np.array([kind == "nvlink" for kind in cluster.link_kind], dtype=bool)
    members = dict(zip(*(a.tolist() for a in np.unique(hosts, return_counts=True)), strict=True))
    own = _grouped(cluster.link_src, np.flatnonzero(inside))
    outwards = _grouped(cluster.host_of[cluster.link_src], np.flatnonzero(~inside))
    limits, hardware = [], set()
    for node, host in zip(nodes.tolist(), hosts.tolist(), strict=True):
        links = own.get(node, np.zeros(0, dtype=np.int64))
        if len(links) and members[host] > 1:
            joined = links[nvlink[links]] if nvlink[links].any() else links
            hardware.add("nvlink" if nvlink[joined].any() else "pcie")
            limits.append(float(np.minimum(payload_rate(cluster, joined), _counted(cluster, node, joined)).sum()))
    if len(members) > 1:
        limits += [float(_outwards(cluster, outwards[h]).sum()) if h in outwards else 0.0 for h in members]
    if not limits or min(limits) <= 0.0:
        raise ConfigError(f"cluster {cluster.name!r}: the first {n_ranks} workers have no links; give bandwidth")
    return min(limits), "nvlink" if hardware == {"nvlink"} else "pcie"


def _outwards(cluster: Cluster, links: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the bytes/s of a ring over each of a machine's `links`: what the connections of its transport carry."""
    if cluster.details is None:
        return payload_rate(cluster, links)
    return np.minimum(payload_rate(cluster, links), cluster.details.connection_limit[links])


def _counted(cluster: Cluster, node: int, links: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the bytes/s that NCCL counts for links of a GPU, inf for those that it takes as they are."""
    device = cluster.device_of[node] or ""
    share = next((share for name, share in NVLINK_SHARE.items() if device.startswith(name)), np.inf)
    nvlink = np.array([cluster.link_kind[link] == "nvlink" for link in links.tolist()], dtype=bool)
    return np.where(nvlink, share * cluster.link_bandwidth[links], np.inf)


def nvlink_excess(cluster: Cluster, nodes: npt.NDArray[np.int64]) -> float:
    """Return how many times as much the ways between GPUs of a machine carry as NCCL makes use of, at least 1."""
    links = np.unique(cluster.routes(nodes, np.roll(nodes, -1)).links)
    links = links[np.isin(cluster.link_src[links], nodes)]
    counted = np.array([_counted(cluster, int(cluster.link_src[link]), np.array([link]))[0] for link in links])
    return float(np.max(payload_rate(cluster, links) / counted, initial=1.0))


def adds_up_in_switches(cluster: Cluster, nodes: tuple[int, ...]) -> bool:
    """Return whether the nodes are GPUs of one machine behind NVSwitches that add up."""
    at = np.array(nodes, dtype=np.int64)
    if len(at) < 2 or len(np.unique(cluster.host_of[at])) > 1 or cluster.host_of[at[0]] < 0:
        return False
    if not all((cluster.device_of[node] or "").startswith(NVLS) for node in nodes):
        return False
    ways = cluster.routes(at, np.roll(at, -1))
    nvlink = all(cluster.link_kind[link] == "nvlink" for link in ways.links.tolist())
    return nvlink and bool((np.diff(ways.offsets) == 2).all())


def _grouped(key: npt.NDArray[np.int64], links: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
    """Return the `links` by ``key[link]``."""
    if not len(links):
        return {}
    order = links[np.argsort(key[links], kind="stable")]
    labels, first = np.unique(key[order], return_index=True)
    return dict(zip(labels.tolist(), np.split(order, first[1:]), strict=True))


@checked
def nccl_time(
    cluster: ClusterLike,
    nbytes: Annotated[float | str, quantity("bytes", zero=True)],
    *,
    kind: str = "all_reduce",
    ranks: Count | None = None,
    nodes: tuple[Index, ...] | None = None,
    bandwidth: Bandwidth | None = None,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> NcclTime:
    """Return what NCCL's tuner expects a collective on the cluster's first workers to take.

    nbytes     buffer per rank, bytes or text such as "100 MB"
    kind       "all_reduce", "reduce_scatter" or "all_gather" (a tree only for all-reduce)
    ranks      number of workers; None: all
    nodes      numbers of the nodes that the ranks are at, instead of the first workers
    bandwidth  of the bus, bytes/s or text such as "230 GB/s"; None: :func:`bus_bandwidth`
    algorithm, protocol   only this one ("ring", "tree", "nvls"; "LL", "LL128", "Simple")

    Raises ConfigError for unknown names, fewer than 2 ranks or more than there are, and sizes that make no sense.
    """
    loaded = load_cluster(cluster)
    size = si(nbytes, "bytes")
    if nodes is not None and ranks is not None:
        raise ConfigError(f"nccl_time: ranks = {ranks} beside nodes: the nodes say how many ranks there are")
    if nodes is not None and not (len(set(nodes)) == len(nodes) and np.isin(nodes, loaded.workers).all()):
        raise ConfigError(f"nccl_time: nodes = {nodes}: must be different workers of {loaded.name!r}")
    n_ranks = len(nodes) if nodes is not None else len(loaded.workers) if ranks is None else ranks
    if not 2 <= n_ranks <= len(loaded.workers):
        raise ConfigError(f"ranks = {n_ranks}: must be 2 to {len(loaded.workers)}, the workers of {loaded.name!r}")
    _check(kind, algorithm, protocol)
    bus, hardware = bus_bandwidth(loaded, n_ranks, nodes) if bandwidth is None else (0.0, _hardware(loaded))
    if bandwidth is not None:
        bus = si(bandwidth, "bandwidth")
    at = loaded.workers[:n_ranks] if nodes is None else np.array(nodes, dtype=np.int64)
    n_nodes = len(np.unique(loaded.host_of[at]))
    found = [
        NcclTime(_estimate(kind, name, p, size, n_ranks, n_nodes, bus, hardware), name, p)
        for name in ("ring", "tree")
        for p in PROTOCOLS
        if algorithm in (None, name) and protocol in (None, p) and (name == "ring" or kind == "all_reduce")
    ]
    if (
        algorithm in (None, "nvls") and protocol in (None, "Simple") and kind == "all_reduce"
        and adds_up_in_switches(loaded, tuple(at.tolist()))
    ):  # fmt: skip
        seconds = NVLS_LATENCY + size * (1.0 + 1.0 / n_ranks) / (NVLS_SHARE * bus)
        found.append(NcclTime(seconds, "nvls", "Simple"))
    if not found:
        raise ConfigError(
            f"algorithm = 'nvls': needs protocol 'Simple', and ranks in one machine of {loaded.name!r} whose "
            f"NVSwitches add up (GPUs {', '.join(NVLS)}); use 'ring' or 'tree'"
        )
    return min(found, key=lambda time: time.seconds)


def _hardware(cluster: Cluster) -> str:
    return "nvlink" if "nvlink" in cluster.link_kind else "pcie"


def _check(kind: str, algorithm: str | None, protocol: str | None) -> None:
    if kind not in LAPS:
        raise unknown_name("kind", kind, LAPS)
    if algorithm is not None and algorithm not in BASE:
        raise unknown_name("algorithm", algorithm, BASE)
    if algorithm in ("tree", "nvls") and kind != "all_reduce":
        what = "trees" if algorithm == "tree" else "NVLS here"
        raise ConfigError(f"algorithm = {algorithm!r}: NCCL has {what} for all_reduce only, not for {kind}; use 'ring'")
    if protocol is not None and protocol not in PROTOCOLS:
        raise unknown_name("protocol", protocol, PROTOCOLS)


def _estimate(
    kind: str, algorithm: str, protocol: str, size: float, n_ranks: int, n_nodes: int, bus: float, hardware: str
) -> float:
    p = PROTOCOLS.index(protocol)
    intra, inter = HOP[algorithm, hardware][p], HOP[algorithm, "network"][p]
    bus *= SHARE[algorithm, protocol]
    if algorithm == "tree":
        latency = BASE["tree"][p] + 2.0 * ((n_ranks / n_nodes - 1.0) * intra + math.log2(n_nodes) * inter)
        return latency + size / (0.5 * bus)
    laps = LAPS[kind]
    n_steps, n_inter = laps * (n_ranks - 1), laps * (n_nodes - 1)
    latency = BASE["ring"][p] + (n_steps - n_inter) * intra + n_inter * inter
    if protocol == "Simple" and n_nodes > 1 and kind == "all_reduce" and size >= PLATEAU * n_ranks:
        latency *= PLATEAU_FACTOR
    return latency + size / (bus * n_ranks / n_steps)
