"""Parameter servers, synchronous (CaffeOnSpark, MXNet dist_sync)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, one_of
from ddlsim.cluster import Cluster
from ddlsim.cluster.levels import innermost
from ddlsim.cluster.machines import memory_nodes
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan, through_servers
from ddlsim.runtime.carrier import Carrier, Dense
from ddlsim.runtime.coded_servers import CodedServers
from ddlsim.runtime.common_model import Gradients
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.fabric import Fabric
from ddlsim.runtime.server_work import ServerWork, WorkingServers
from ddlsim.runtime.servers import Placement, server_nodes
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.all_reduce import AllReduce, start_group
from ddlsim.strategies.overlap import OverlapChoice, as_compressed, buckets_of, overlap_named
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class ParameterServer:
    """Synchronous SGD through servers: push g_i; server: w <- w - eta * (1/N) sum_i g_i; pull w.

    servers          number of shards, each on a server of its own (Li et al. 2014, OSDI)
    placement        "own" machines, or "colocated" with the workers
    overlap          as for :class:`~ddlsim.AllReduce`
    local_reduction  add up inside each machine first (in the innermost groups of a network whose machines hold one
                     worker each, such as racks), one push per machine: True or "tree" (a binomial tree), or "star"
                     (all copy to one device, as in MXNet's dist_device_sync)
    work             what a server's thread does with what arrives; None: adding up takes the ``reduce_time`` of
                     its host, and everything else no time
    """

    servers: Count = 1
    placement: Placement = "own"
    overlap: OverlapChoice = "layer"
    local_reduction: bool | Annotated[str, one_of("tree", "star", also="False, True, ")] = False
    work: ServerWork | None = None

    @property
    def label(self) -> str:
        """Number and place of the servers."""
        return f"parameter server ({self.servers} {self.placement})"

    def plan_nodes(self, cluster: Cluster, nodes: list[int]) -> list[int]:
        """Return where the ranks of the plan are: the workers, on these `nodes`, and the servers."""
        return nodes + server_nodes(cluster, nodes, self.servers, self.placement)

    def start(self, setting: Setting) -> None:
        """Start all workers; the servers only react."""
        nodes = server_nodes(setting.cluster, setting.nodes, self.servers, self.placement)
        hosts = innermost(setting.cluster, setting.nodes) if self.local_reduction else None
        star, overlap = self.local_reduction == "star", as_compressed(overlap_named(self.overlap), setting)
        members = Communicator(setting, Fabric(rank_order="given"), bystanders=nodes, owner="ParameterServer")
        if setting.compression is not None:
            self._check_compression()

        schedule = push_pull(len(setting.workers), self.servers, hosts, star=star)

        def carrier(gradients: Gradients) -> Carrier:
            if setting.compression is not None:
                return CodedServers(members, nodes, buckets_of(overlap, setting.workers[0].workload), gradients)
            if self.work is not None:
                memory = memory_nodes(setting.cluster, setting.nodes)
                return WorkingServers(members, nodes, self.work, memory, hosts, star=star)
            return Dense(members, schedules=lambda nbytes: schedule)

        start_group(setting, overlap, members, carrier)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads, and the servers, which are the ranks behind them, do in `steps`
        steps. ``local_reduction`` is a matter of execution."""
        if self.work is not None:
            raise ConfigError("plan: the step of servers with work is not a table yet; leave work out to see it")
        program = AllReduce(overlap=self.overlap).program(workloads, accumulation)
        return through_servers(program.unroll(steps), self.servers)

    def _check_compression(self) -> None:
        if self.local_reduction:
            raise ConfigError(
                "ParameterServer: local_reduction adds up gradients inside machines, which compressed ones do not "
                "allow; leave it out"
            )
        if self.work is not None:
            raise ConfigError(
                "ParameterServer: work is that of dense gradients; what compressed ones cost servers is the cost of "
                "ddlsim.Compression: leave work out"
            )
