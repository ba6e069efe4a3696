"""Where parameter servers stand, and what they can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, one_of, quantity
from ddlsim.cluster import Cluster
from ddlsim.cluster.machines import host_nodes
from ddlsim.errors import ConfigError
from ddlsim.learning import Learner
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import UNVARIED

Placement = Annotated[str, one_of("own", "colocated")]
ApplyTime = Annotated[float | str, quantity("time", "1 ms", zero=True)]


@checked
@dataclass(frozen=True, kw_only=True)
class WithServers:
    """The fields of strategies whose servers act together, for these to inherit: as for AsyncParameterServer."""

    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0


def check_layers(kind: str, learner: Learner, servers: int) -> None:
    """Raise ConfigError if servers with a part of the parameters each had to know the norms of whole layers."""
    optimizer = learner.task.optimizer if learner.task is not None else None
    if servers > 1 and hasattr(optimizer, "bounds"):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{kind}: servers = {servers} with the optimizer {name}: {name} needs the norms of whole layers, but each "
            "server holds a part of the parameters that ends inside a layer; use servers = 1, or SGD, Momentum or Adam"
        )


def note_lock_step(setting: Setting) -> None:
    """Note that workers which do not wait for each other meet at the servers all the same, if nothing tells their
    compute times apart: equal flows that start together share the links and end together."""
    workers = setting.workers
    times = {(w.workload.forward_time, w.workload.backward_time, w.workload.optimizer) for w in workers}
    varied = any(w.factors is not UNVARIED or w.slow_downs for w in workers)
    if len(workers) > 1 and len(times) == 1 and not varied:
        setting.notes.append(
            "equal compute times without jitter: workers that start together keep meeting at the server; real ones "
            "drift apart (give jitter=...)"
        )


def server_nodes(cluster: Cluster, workers: list[int], n_servers: int, placement: str) -> list[int]:
    """Return the host nodes of `n_servers` servers.

    "own": machines without a worker, the first ones after them. "colocated": spread evenly over the workers'
    machines. Raises ConfigError if there are not enough machines.
    """
    busy = sorted({int(cluster.host_of[node]) for node in workers})
    host_node = host_nodes(cluster)
    if placement == "colocated":
        places = [host_node[host] for host in busy if host in host_node]
        where = "machines with workers"
    else:
        places = [node for host, node in sorted(host_node.items()) if host not in busy]
        where = "machines without workers"
    if n_servers > len(places):
        raise ConfigError(
            f"ParameterServer: servers = {n_servers} with placement {placement!r}: cluster {cluster.name!r} has "
            f"{len(places)} {where}; use fewer servers{_remedy(placement)}"
        )
    spread = [places[i * len(places) // n_servers] for i in range(n_servers)]
    return spread if placement == "colocated" else places[:n_servers]


def _remedy(placement: str) -> str:
    return ", fewer workers, or placement 'colocated'" if placement == "own" else ""
