"""`Endpoints`: cores of each machine that do nothing but drive messages, as Intel's MLSL reserves them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Bandwidth, Count, checked, quantity
from ddlsim.cluster.catalogue import load_cluster
from ddlsim.cluster.cluster import Cluster, ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.readable import size
from ddlsim.units import si


@checked
@dataclass(frozen=True)
class Endpoints:
    """Of the `of` cores of each machine `cores` are taken from computing to drive messages (Sridharan et al. 2018,
    arXiv:1801.08030; oneCCL's workers): each is an endpoint, which sends and receives while the others compute.

    cores         endpoints of a machine
    of            cores of a machine
    bandwidth     that one endpoint drives each way: a machine has the smaller one of its network's and all endpoints'
    message_rate  messages/s that one endpoint sends. Every message is shared out over all endpoints of its machine, so
                  each of them does its piece of one message after the other

    ``Endpoints(2, 32).on("cori-haswell")`` is a cluster for any strategy. Machines without endpoints have all their
    cores to compute with, and messages that go on only while these wait: ``overlap=WhileWaiting("layer")``.
    """

    cores: Count
    of: Count
    bandwidth: Bandwidth | None = None
    message_rate: Annotated[float | str, quantity("rate")] | None = None

    def __post_init__(self) -> None:
        if self.cores >= self.of:
            raise ConfigError(
                f"Endpoints: cores = {self.cores}: must leave some of the {self.of} cores to compute with; use at most "
                f"{max(self.of - 1, 0)}"
            )

    @checked
    def on(self, cluster: ClusterLike) -> Cluster:
        """Return a cluster whose workers have endpoints.

        They compute (of - cores) / of as fast, no link of theirs carries more than the endpoints drive, and sending a
        message occupies them. Raises ConfigError for workers that are GPUs, which have no cores to give away.
        """
        loaded = load_cluster(cluster)
        workers = loaded.workers
        if any(loaded.node_kind[node] == "gpu" for node in workers):
            raise ConfigError(
                f"Endpoints: the workers of {loaded.name!r} are GPUs, whose cores drive no messages; use a cluster of "
                "hosts that compute"
            )
        speed, overhead = loaded.speed.copy(), loaded.send_overhead.copy()
        speed[workers] *= (self.of - self.cores) / self.of
        if self.message_rate is not None:
            overhead[workers] += 1.0 / si(self.message_rate, "rate")
        limited = loaded.link_bandwidth
        if self.bandwidth is not None:
            theirs = np.isin(loaded.link_src, workers) | np.isin(loaded.link_dst, workers)
            most = self.cores * si(self.bandwidth, "bandwidth") / loaded.link_efficiency
            limited = np.where(theirs, np.minimum(limited, most), limited)
        note = f"{self.cores} of {self.of} cores are endpoints" + (
            "" if self.bandwidth is None else f", {size(si(self.bandwidth, 'bandwidth'))}/s each"
        )
        changed = dataclasses.replace(loaded, speed=speed, send_overhead=overhead, notes=(*loaded.notes, note))
        return changed.with_links(limited, loaded.link_latency)
