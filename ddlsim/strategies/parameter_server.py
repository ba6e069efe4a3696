"""Parameter servers, synchronous (CaffeOnSpark, MXNet dist_sync)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, checked, one_of
from ddlsim.cluster.levels import innermost
from ddlsim.cluster.machines import memory_nodes
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan, through_servers
from ddlsim.runtime.codec import backwards
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.exchange import CollectiveExchange, Exchange, InGroups, ThroughServers, Vectors
from ddlsim.runtime.fabric import Fabric, algorithm_name, cost_suffix
from ddlsim.runtime.server_work import ServerWork
from ddlsim.runtime.servers import Placement, PlacesServers, server_nodes
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.all_reduce import AllReduce, start_group
from ddlsim.strategies.overlap import OverlapChoice, as_compressed, buckets_of, overlap_named
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class ParameterServer(PlacesServers):
    """Synchronous SGD through servers: push g_i; server: w <- w - eta * (1/N) sum_i g_i; pull w.

    servers          number of servers, one shard each (Li et al. 2014, OSDI)
    placement        "own" machines, or "colocated" with the workers
    overlap          as for :class:`~ddlsim.AllReduce`
    local_reduction  sum inside each machine first and push once per machine (with one worker per machine: per innermost
                     group of the network, such as a rack): True or "tree" (a binomial tree), or "star" (all copy to one
                     device, as in MXNet's dist_device_sync)
    work             memory traffic of a server (ServerWork); None: sums take the ``reduce_time`` of its host, all other
                     work takes no time
    fabric           instead of `local_reduction`: the workers of each machine reduce-scatter their gradients on it,
                     each pushes and pulls its shard, and they all-gather (BytePS: Jiang et al. 2020, OSDI, section
                     4.2, with NCCL inside machines); ``simulate(..., fabric=...)`` sets it, too
    """

    servers: Count = 1
    placement: Placement = "own"
    overlap: OverlapChoice = "layer"
    local_reduction: bool | Annotated[str, one_of("tree", "star", also="False, True, ")] = False
    work: ServerWork | None = None
    fabric: Fabric | None = None

    def __post_init__(self) -> None:
        if self.fabric is not None and self.local_reduction:
            raise ConfigError(
                f"ParameterServer: local_reduction = {self.local_reduction!r} with fabric = {self.fabric}: both add up "
                "inside machines; use one of them"
            )

    @property
    def label(self) -> str:
        """Number and place of the servers, and the reduction inside machines."""
        inside = (
            ""
            if self.fabric is None
            else f", {algorithm_name(self.fabric.algorithm)} inside{cost_suffix(self.fabric.cost)}"
        )
        return f"parameter server ({self.servers} {self.placement}{inside})"

    def on_fabric(self, fabric: Fabric) -> ParameterServer:
        """Return the strategy with a fabric for the workers of each machine."""
        return dataclasses.replace(self, fabric=fabric)

    def start(self, setting: Setting) -> None:
        """Start all workers; the servers only react."""
        nodes = server_nodes(setting.cluster, setting.nodes, self.servers, self.placement)
        machines = innermost(setting.cluster, setting.nodes)
        hosts = machines if self.local_reduction else None
        star, overlap = self.local_reduction == "star", as_compressed(overlap_named(self.overlap), setting)
        members = Communicator(setting, Fabric(rank_order="given"), bystanders=nodes, owner="ParameterServer")
        if setting.compression is not None:
            self._check_compression()

        parts = backwards(buckets_of(overlap, setting.workers[0].workload))
        memory = memory_nodes(setting.cluster, setting.nodes)

        def through(places: Sequence[int], gradients: Vectors, like: Exchange | None) -> Exchange:
            """Return what some of the workers exchange through the servers."""
            some = (
                members if len(places) == members.n_ranks else members.part(places, Fabric(rank_order="given"), nodes)
            )
            if setting.compression is None and self.work is None:
                schedule = push_pull(len(places), self.servers, hosts, star=star)
                return CollectiveExchange(some, schedule=lambda nbytes: schedule)
            return ThroughServers(
                some,
                nodes,
                parts,
                gradients,
                work=self.work,
                memory=[memory[place] for place in places],
                hosts=hosts,
                star=star,
                like=like if isinstance(like, ThroughServers) else None,
            )

        def sums(gradients: Vectors) -> Exchange:
            if self.fabric is None:
                return through(range(members.n_ranks), gradients, None)
            groups = [np.flatnonzero(np.array(machines) == machine).tolist() for machine in dict.fromkeys(machines)]
            return InGroups(members, groups, self.fabric, lambda places, like: through(places, gradients, like))

        start_group(setting, overlap, members, sums)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return the tasks of workers with these workloads, and of the servers, which have the next ranks, in `steps`
        steps. ``local_reduction`` and ``fabric`` change only how the tasks are executed."""
        if self.work is not None:
            raise ConfigError(
                "plan: servers with work decide in the run which of them gets a small tensor; leave work out, or "
                "simulate it and use result.plan"
            )
        program = AllReduce(overlap=self.overlap).program(workloads, accumulation)
        return through_servers(program.unroll(steps), self.servers)

    def _check_compression(self) -> None:
        if self.local_reduction or self.fabric is not None:
            name = "local_reduction" if self.local_reduction else "fabric"
            raise ConfigError(
                f"ParameterServer: {name} adds up gradients inside machines, which compressed ones do not allow; leave "
                "it out"
            )
        if self.work is not None:
            raise ConfigError(
                "ParameterServer: work is that of dense gradients; what compressed ones cost servers is the cost of "
                "ddlsim.Compression: leave work out"
            )
