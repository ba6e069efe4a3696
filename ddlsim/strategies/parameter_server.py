"""Synchronous SGD through parameter servers, as in CaffeOnSpark and MXNet's dist_sync."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, checked, one_of
from ddlsim.cluster.groups import innermost
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan, with_parameter_servers
from ddlsim.plan.plan import ALL_REDUCE
from ddlsim.runtime import Communicator, Exchange, Fabric, RunContext
from ddlsim.runtime.exchange import CollectiveExchange, InGroups, OfKinds, ThroughServers
from ddlsim.runtime.fabric import algorithm_name, cost_suffix
from ddlsim.runtime.server_work import ServerWork as ServerWork
from ddlsim.runtime.servers import Placement, PlacesServers, server_nodes
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies.all_reduce import AllReduce
from ddlsim.strategies.overlap import OverlapChoice, as_compressed, buckets_of, overlap_named
from ddlsim.workload.buckets import backwards
from ddlsim.workload.compute import Workload


@checked
@dataclass(frozen=True)
class ParameterServer(PlacesServers):
    """Synchronous SGD through parameter servers (Li et al. 2014, OSDI).

    The N workers push their gradients g_i. When all gradients have arrived, the servers update the parameters,
    ``w <- w - eta * (1/N) sum_i g_i``, and the workers pull w.

    servers          number of servers, each with a shard of the parameters
    placement        where servers run: on their "own" machines, or "colocated" with the workers
    overlap          when gradients are sent during the backward pass, as for :class:`~ddlsim.AllReduce`
    local_reduction  how gradients are summed inside each machine, so that only the sum is pushed. True or "tree": along
                     a binomial tree. "star": on one device to which all workers copy their gradients, as in MXNet's
                     dist_device_sync. If every machine has only one worker, gradients are summed inside each innermost
                     group of the network, such as a rack. False: every worker pushes
    work             a :class:`~ddlsim.ServerWork`, which models the memory traffic of a server; None: sums take the
                     ``reduce_time`` of the server's host, and all other work takes no time
    fabric           :class:`~ddlsim.Fabric` for collectives inside machines, instead of `local_reduction`: the workers
                     of a machine reduce-scatter their gradients, each pushes and pulls its shard, and they all-gather
                     the parameters (BytePS: Jiang et al. 2020, OSDI, section 4.2, with NCCL inside machines).
                     ``simulate(..., fabric=...)`` can also set it

    Raises ConfigError if both `local_reduction` and `fabric` are set.
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
                f"ParameterServer: local_reduction = {self.local_reduction!r} and fabric = {self.fabric} both sum "
                "gradients inside machines; set only one of them"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: number and placement of the servers, and the reduction inside machines."""
        inside = ""
        if self.fabric is not None:
            inside = f", {algorithm_name(self.fabric.algorithm)} inside{cost_suffix(self.fabric.cost)}"
        return f"parameter server ({self.servers} {self.placement}{inside})"

    def on_fabric(self, fabric: Fabric) -> ParameterServer:
        """Return the strategy with a fabric inside machines."""
        return dataclasses.replace(self, fabric=fabric)

    def start(self, context: RunContext) -> None:
        """Start all workers; the servers only react."""
        nodes = server_nodes(context.cluster, context.nodes, self.servers, self.placement)
        machines = innermost(context.cluster, context.nodes)
        hosts = machines if self.local_reduction else None
        star, overlap = self.local_reduction == "star", as_compressed(overlap_named(self.overlap), context)
        members = Communicator(context, Fabric(rank_order="given"), bystanders=nodes, owner="ParameterServer")
        if context.compression is not None:
            self._check_compression()
        parts = backwards(buckets_of(overlap, context.workers[0].workload))
        memory = context.cluster.memory_nodes[context.nodes].tolist()
        make = functools.partial(AllReduce(overlap=overlap).program, accumulation=context.workers[0].accumulation)
        program, model = make(context.workloads), CommonModel(context)

        def through(places: Sequence[int], like: Exchange | None) -> Exchange:
            """Return the exchange of some of the workers through the servers."""
            some = (
                members if len(places) == members.n_ranks else members.part(places, Fabric(rank_order="given"), nodes)
            )
            if context.compression is None and self.work is None:
                schedule = push_pull(len(places), self.servers, hosts, star=star)
                return CollectiveExchange(some, schedule=lambda nbytes: schedule)
            return ThroughServers(
                some,
                nodes,
                parts,
                model.gradient,
                work=self.work,
                memory=[memory[place] for place in places],
                hosts=hosts,
                star=star,
                like=like if isinstance(like, ThroughServers) else None,
            )

        if (self.fabric is not None or self.local_reduction) and len(set(machines)) == len(machines):
            name = "local_reduction" if self.local_reduction else "fabric"
            context.notes.append(f"{name} has no effect: every machine has one worker, so nothing is summed inside")
        if self.fabric is None:
            sums = through(range(members.n_ranks), None)
        else:
            groups = [np.flatnonzero(np.array(machines) == machine).tolist() for machine in dict.fromkeys(machines)]
            sums = InGroups(members, groups, self.fabric, through)
        TableRun(context, program, OfKinds({ALL_REDUCE: sums}), model, make, owner=members.owner)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return the plan of `steps` steps, with the servers as the ranks after the workers.

        ``local_reduction`` and ``fabric`` change only how its tasks are executed.
        """
        if self.work is not None:
            raise ConfigError(
                "plan: ParameterServer has no static task graph with work, because small tensors are assigned to "
                "servers during the run; remove work, or simulate the run and use result.plan"
            )
        program = AllReduce(overlap=self.overlap).program(workloads, accumulation)
        return with_parameter_servers(program.unroll(steps), self.servers)

    def _check_compression(self) -> None:
        if self.local_reduction or self.fabric is not None:
            name = "local_reduction" if self.local_reduction else "fabric"
            raise ConfigError(
                f"ParameterServer: {name} sums gradients inside machines, which is not possible with compression; "
                f"remove {name} or compression"
            )
        if self.work is not None:
            raise ConfigError(
                "ParameterServer: work is the cost of processing uncompressed gradients, but this run compresses "
                "them; remove work, and set ddlsim.Compression(cost=...) instead"
            )
