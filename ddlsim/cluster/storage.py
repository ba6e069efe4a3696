"""Additions to a cluster: storages (`with_storage`), and cores that drive communication (`Endpoints`).

Storages are nodes from which data sets are read and to which checkpoints are written.

Their disks are a link of kind "disk" between the storage and its network port, which reads in one direction and writes
in the other. All users of a storage therefore share its rates by the rules of the network.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ddlsim.arguments import Bandwidth, Count, Positive, checked, quantity, settings
from ddlsim.cluster.catalogue import load_cluster
from ddlsim.cluster.cluster import Cluster, ClusterLike
from ddlsim.cluster.details import DETAIL_KEYS, LinkDetail
from ddlsim.cluster.graphs import from_graph, to_graph
from ddlsim.cluster.nodes import PLAIN_LINK, Graph, connect
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.readable import size
from ddlsim.units import si

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


_Latency = Annotated[float | str, quantity("time", "10 us", zero=True)]


@settings
class Storage:
    """A storage to be added to a cluster: the arguments of :func:`with_storage`."""

    name: str
    at: str | None = None
    read: Bandwidth
    write: Bandwidth | None = None
    operations: Positive | None = None
    bandwidth: Bandwidth | None = None
    latency: _Latency | None = None


def add_storage(graph: Graph, storage: Storage, where: str) -> None:
    """Add a storage to the graph of a cluster. Raises ConfigError, with `where`, if `at` does not exist."""
    if graph.graph.get("routing") == "dimension-order":
        raise ConfigError(
            f"{where}: a storage node cannot be added to a grid with routing = 'dimension-order'; use the name of one "
            "of its hosts as storage, or set routing = 'shortest'"
        )
    at = _place(graph, storage.at, where)
    port = f"{storage.name}.port"
    for name in (storage.name, port):
        if name in graph:
            raise ConfigError(f"{where}: name = {name!r} is already taken; choose another name")
    told, detail = _usual_link(graph, at)
    bandwidth, latency = storage.bandwidth, storage.latency
    if bandwidth is None and told is None:
        raise ConfigError(
            f"{where}: bandwidth is missing and has no default, because no machine is connected to {at!r}; set "
            "bandwidth"
        )
    usual: Mapping[str, Any] = told or {}
    operations = {} if storage.operations is None else {"operations": storage.operations}
    graph.add_node(storage.name, kind="storage", host=storage.name, **operations)
    graph.add_node(port, kind="switch", host=storage.name)
    read = si(storage.read, "bandwidth")
    write = read if storage.write is None else si(storage.write, "bandwidth")
    connect(graph, storage.name, port, "disk", read, 0.0, reverse_bandwidth=write)
    rate = usual["bandwidth"] if bandwidth is None else si(bandwidth, "bandwidth")
    delay = usual.get("latency", 0.0) if latency is None else si(latency, "time")
    connect(graph, port, at, "nic", rate, delay, efficiency=usual.get("efficiency", 1.0), detail=detail)


def _place(graph: Graph, at: str | None, where: str) -> str:
    if at is not None:
        if at not in graph:
            raise unknown_name("node", at, map(str, graph.nodes), f"{where}: at")
        return at
    switches = [name for name, data in graph.nodes.items() if data.get("kind") == "switch" and "host" not in data]
    if len(switches) != 1:
        some = ", ".join(switches[:4]) or "none"
        raise ConfigError(
            f"{where}: 'at' is missing and has no default, because the cluster has {len(switches)} switches between "
            f"machines ({some}) rather than exactly one; set 'at' to the node to which the storage is connected"
        )
    return switches[0]


def _usual_link(graph: Graph, at: str) -> tuple[Mapping[str, Any] | None, LinkDetail]:
    """Return the attributes and details of the first link from a machine to a node; None if there is none."""
    for port, links in graph.pred[at].items():
        if graph.nodes[port].get("kind") != "switch" or "host" in graph.nodes[port]:
            data = next(iter(links.values()))
            told = {name: data[name] for name in DETAIL_KEYS if name in data}
            return data, LinkDetail(**told) if told else PLAIN_LINK
    return None, PLAIN_LINK


@checked
def with_storage(
    cluster: ClusterLike, name: str, *, read: Bandwidth, write: Bandwidth | None = None,
    operations: Positive | None = None, at: str | None = None, bandwidth: Bandwidth | None = None,
    latency: _Latency | None = None,
) -> Cluster:  # fmt: skip
    """Return a copy of a cluster with an additional storage node for data sets and checkpoints.

    cluster     cluster to copy: a bundled name, path, networkx graph or :class:`~ddlsim.cluster.Cluster`
    name        name of the storage node, to be used in ``Input(storage=...)`` and ``Checkpoints(to=...)``
    read        total read bandwidth in bytes/s, shared by all readers
    write       total write bandwidth in bytes/s; None: equal to `read`
    operations  maximum number of read and write operations per second, regardless of their size; None: no limit
    at          node to which the storage is connected, such as a switch; None: the switch between the machines, if
                there is only one
    bandwidth   bandwidth of the link to `at` in bytes/s; None: the bandwidth of the machines' links to `at`
    latency     latency of the link to `at` in seconds; None: the latency of the machines' links to `at`

    Raises ConfigError if `at` is not a node of the cluster, or if the name is already taken.
    """
    loaded = load_cluster(cluster)
    storage = Storage(
        name=name, at=at, read=read, write=write, operations=operations, bandwidth=bandwidth, latency=latency
    )
    graph = to_graph(loaded)
    add_storage(graph, storage, "with_storage")
    return dataclasses.replace(from_graph(graph), calibration=loaded.calibration)


@checked
@dataclass(frozen=True)
class Endpoints:
    """CPU cores that each machine reserves for communication, such as oneCCL's worker threads.

    Each reserved core is an endpoint that sends and receives messages while the other cores compute (Sridharan et al.
    2018, arXiv:1801.08030).

    cores         number of reserved cores per machine
    total_cores   total number of cores per machine
    bandwidth     maximum rate of one endpoint in each direction, in bytes/s; None: no limit. The bandwidth of a machine
                  is the smaller of its link bandwidth and the total bandwidth of its endpoints
    message_rate  maximum number of messages per second of one endpoint; None: no limit. Every message is divided among
                  all endpoints of a machine, and each endpoint processes its parts one at a time

    ``Endpoints(2, 32).on("cori-haswell")`` returns a cluster that can be used with any strategy. Without endpoints,
    machines compute with all cores; use ``overlap=WhileWaiting("layer")`` if messages make progress only while the
    cores are idle.
    """

    cores: Count
    total_cores: Count
    bandwidth: Bandwidth | None = None
    message_rate: Annotated[float | str, quantity("rate")] | None = None

    def __post_init__(self) -> None:
        if self.cores >= self.total_cores:
            if self.total_cores == 1:
                raise ConfigError("Endpoints: total_cores = 1: leaves no core for computation; use at least 2")
            raise ConfigError(
                f"Endpoints: cores = {self.cores}: must leave some of the {self.total_cores} cores for computation; "
                f"use at most {self.total_cores - 1}"
            )

    @checked
    def on(self, cluster: ClusterLike) -> Cluster:
        """Return a copy of the cluster whose workers have endpoints.

        Workers compute at (of - cores) / of of their speed, their links carry at most as much as the endpoints can
        drive, and each message adds send overhead. Raises ConfigError if workers are GPUs, which have no cores to
        reserve.
        """
        loaded = load_cluster(cluster)
        workers = loaded.workers
        if any(loaded.node_kind[node] == "gpu" for node in workers):
            raise ConfigError(
                f"Endpoints: the workers of {loaded.name!r} are GPUs, whose cores do not drive communication; use a "
                "cluster whose workers are CPUs"
            )
        speed, overhead = loaded.speed.copy(), loaded.send_overhead.copy()
        speed[workers] *= (self.total_cores - self.cores) / self.total_cores
        if self.message_rate is not None:
            overhead[workers] += 1.0 / si(self.message_rate, "rate")
        limited = loaded.link_bandwidth
        if self.bandwidth is not None:
            theirs = np.isin(loaded.link_src, workers) | np.isin(loaded.link_dst, workers)
            most = self.cores * si(self.bandwidth, "bandwidth") / loaded.link_efficiency
            limited = np.where(theirs, np.minimum(limited, most), limited)
        note = f"{self.cores} of {self.total_cores} cores are endpoints" + (
            "" if self.bandwidth is None else f", {size(si(self.bandwidth, 'bandwidth'))}/s each"
        )
        changed = dataclasses.replace(loaded, speed=speed, send_overhead=overhead, notes=(*loaded.notes, note))
        return changed.with_links(limited, loaded.link_latency)
