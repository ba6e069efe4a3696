"""What can fail of a run, and which machines it takes out of service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.life import Failures
from ddlsim.runtime.servers import memory_nodes

Floats = npt.NDArray[np.float64]


def machines_of(cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the number of the machine that each worker is on, in the order of the workers."""
    number: dict[int, int] = {}
    return [number.setdefault(memory, len(number)) for memory in memory_nodes(cluster, list(nodes))]


def units(failures: Failures, cluster: Cluster, nodes: Sequence[int], nbytes: Floats | None = None) -> int:
    """Return how many parts of a run can fail. Switches are those that the run's messages went through: `nbytes` are
    what each channel carried."""
    if failures.per == "job":
        return 1
    if failures.per != "switch":
        return len(machines_taken(failures, cluster, nodes))
    assert nbytes is not None
    sources = np.unique(cluster.link_src[nbytes[cluster.link_channel] > 0.0])
    n_switches = int(np.count_nonzero(cluster.is_fabric_switch[sources]))
    if not n_switches:
        raise ConfigError(f"failures: per = 'switch', but no message of the run goes through one in {cluster.name!r}")
    return n_switches


def machines_taken(failures: Failures, cluster: Cluster, nodes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the machines of a run that each device, host or rack takes out of service.

    Raises ConfigError for machines of which nobody can say in which rack they are.
    """
    machine = machines_of(cluster, nodes)
    if failures.per == "device":
        return [[each] for each in machine]
    if failures.per == "host":
        return [[each] for each in range(max(machine) + 1)]
    host = dict(zip(machine, cluster.host_of[list(nodes)].tolist(), strict=True))
    rack_of = racks(cluster, failures.machines_per_rack)
    for each in host.values():
        if each not in rack_of:
            raise ConfigError(
                f"failures: per = 'rack', but machine {cluster.host_names[each]!r} of cluster {cluster.name!r} is on "
                "no switch; say how many machines a rack has, machines_per_rack = 16"
            )
    members: dict[int, list[int]] = {}
    for number, each in sorted(host.items()):
        members.setdefault(rack_of[each], []).append(number)
    return list(members.values())


def racks(cluster: Cluster, machines_per_rack: int | None = None) -> dict[int, int]:
    """Return what the hosts of a rack have in common: the switch to which their first link leads (that of the first
    rail, where each machine has several), or their place among all hosts, by so many `machines_per_rack`."""
    if machines_per_rack is not None:
        hosts = np.setdiff1d(np.arange(len(cluster.host_names)), cluster.host_of[cluster.storages]).tolist()
        return {host: place // machines_per_rack for place, host in enumerate(hosts)}
    up = np.flatnonzero((cluster.host_of[cluster.link_src] >= 0) & cluster.is_fabric_switch[cluster.link_dst])
    first: dict[int, int] = {}
    for host, switch in zip(cluster.host_of[cluster.link_src[up]].tolist(), cluster.link_dst[up].tolist(), strict=True):
        first.setdefault(host, switch)
    return first


def n_replaced(failures: Failures, cluster: Cluster, nodes: Sequence[int]) -> list[int] | None:
    """Return how many machines each part takes with it, None where that is one."""
    return [len(own) for own in machines_taken(failures, cluster, nodes)] if failures.per == "rack" else None
