"""Simulated operations that correspond to measured rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import workers_by_machine
from ddlsim.collectives import KINDS, Schedule, build, reorder
from ddlsim.collectives.build import default_algorithm
from ddlsim.collectives.lookup import find
from ddlsim.collectives.nccl_tuner import LAPS
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.measure import Measurement
from ddlsim.network import Network, schedule_time
from ddlsim.runtime.costs import Parts, parts_of, schedule_parts

#: default algorithms of collectives: those that MPI, Gloo and NCCL use for large buffers. Small buffers often use
#: others, which a curve over the sizes can represent.
ALGORITHMS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), "ring"),
    **dict.fromkeys(("broadcast", "reduce"), "binomial"),
    "all_to_all": "pairwise",
    **dict.fromkeys(("gather", "scatter"), "direct"),
}

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """One operation: point-to-point messages of concurrent `pairs` of nodes, or a `schedule` on `nodes`, by an
    `algorithm`. NCCL's choice depends on the cluster, so the schedule is a function of it."""

    nbytes: float
    nodes: tuple[int, ...]
    pairs: Pairs = ()
    schedule: Schedule | Callable[[Cluster], Schedule] | None = None
    algorithm: str = ""

    def seconds(self, cluster: Cluster) -> float:
        """Return the time on the otherwise idle `cluster` in s."""
        if self.schedule is not None:
            return schedule_time(cluster, self.on(cluster), self.nodes, self.nbytes)
        network = Network(cluster)
        sources, targets = zip(*self.pairs, strict=True)
        network.send(sources, targets, np.full(len(self.pairs), self.nbytes), 0.0)
        end = 0.0
        while (done := network.advance()) is not None:
            end = done.time
        return end

    def parts(self, cluster: Cluster) -> Parts:
        """Return the parts of the time on the otherwise idle `cluster`, for the schedule chosen there."""
        if self.schedule is None:
            return parts_of(self.seconds, cluster, self.nbytes)
        return schedule_parts(cluster, self.on(cluster), self.nodes, self.nbytes)

    def on(self, cluster: Cluster) -> Schedule:
        """Return the schedule on `cluster`."""
        assert self.schedule is not None  # collectives only
        return self.schedule if isinstance(self.schedule, Schedule) else self.schedule(cluster)


def fewest_hosts(cluster: Cluster, n_ranks: int) -> int:
    """Return the number of hosts: one per rank or, if there are too few, as few as can hold the ranks evenly."""
    n_hosts, widest = len(cluster.host_names), int(np.bincount(cluster.host_of[cluster.workers]).max())
    return n_ranks if n_ranks <= n_hosts else min(-(-n_ranks // widest), n_hosts)


def chosen_algorithms(algorithms: Mapping[str, str] | None) -> dict[str, str]:
    """Return the algorithm of each kind of collective. Raises ConfigError for an unknown kind or algorithm."""
    for kind, name in (algorithms or {}).items():
        if kind not in KINDS:
            raise unknown_name("kind of collective", kind, KINDS, "algorithms")
        if name != "default":
            find(name, kind)
    return {**ALGORITHMS, **(algorithms or {})}


def candidates(row: Measurement, algorithms: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the algorithms that a collective may have used if `algorithms` sets none, the default of runs first."""
    if row.operation in (algorithms or {}):
        return ((algorithms or {})[row.operation],)
    if row.operation in LAPS and row.backend in ("", "nccl"):
        return ("default", "nccl_ring", ALGORITHMS[row.operation])
    return (ALGORITHMS.get(row.operation, ""),)


def make_case(row: Measurement, cluster: Cluster, algorithms: Mapping[str, str]) -> Case:
    """Return the operation that `row` measured, on the first hosts of `cluster` that can hold its ranks.

    Raises ConfigError for more hosts, or more ranks per host, than the cluster has.
    """
    if row.n_hosts > len(cluster.host_names) or row.n_ranks > len(cluster.workers):
        raise ConfigError(
            f"{row.n_ranks} ranks were measured on {row.n_hosts} hosts, but cluster {cluster.name!r} has "
            f"{len(cluster.workers)} workers on {len(cluster.host_names)} hosts; set n_hosts, the number "
            "of machines, or use a cluster file that matches the measurements (n_gpus is the number of GPUs per host)"
        )
    if row.experiment == "collective":
        algorithm = algorithms[row.operation]
        return collective_case(cluster, row.operation, row.nbytes, row.n_ranks, row.n_hosts, algorithm, row.backend)
    nodes, pairs = _pairs(row, cluster)
    both_ways = row.operation == "both_ways"
    return Case(float(row.nbytes), nodes, pairs + (tuple((b, a) for a, b in pairs) if both_ways else ()))


def collective_case(
    cluster: Cluster, kind: str, nbytes: float, n_ranks: int, n_hosts: int, algorithm: str, backend: str = ""
) -> Case:
    """Return a collective of `n_ranks` ranks, spread evenly over `n_hosts` hosts, as a case.

    NCCL orders its rings by topology; other backends keep the order of the ranks.
    """
    per_host = [n_ranks // n_hosts + (i < n_ranks % n_hosts) for i in range(n_hosts)]
    nodes = [node for nodes, n in zip(_hosts(cluster, per_host), per_host, strict=True) for node in nodes[:n]]
    order = cluster.locality_order(nodes) if backend == "nccl" else np.arange(n_ranks)
    hosts = cluster.host_of[nodes][order].tolist()
    ordered = [nodes[place] for place in order.tolist()]
    name = default_algorithm(cluster, ordered) if algorithm == "default" else algorithm

    def schedule(now: Cluster) -> Schedule:
        return reorder(build(name, n_ranks, nbytes, hosts, kind, (now, ordered)), order)

    built = schedule(cluster)  # raises for an unsuitable algorithm
    chosen = name.partition("(")[0] == "nccl"
    return Case(float(nbytes), tuple(nodes), schedule=schedule if chosen else built, algorithm=name)


def _pairs(row: Measurement, cluster: Cluster) -> tuple[tuple[int, ...], Pairs]:
    """Return the pairs as :func:`ddlsim.measure.runner.pair_sets` forms them."""
    n = row.n_pairs
    if row.n_hosts == 1:
        nodes = tuple(_hosts(cluster, [2 * n])[0][: 2 * n])
        return nodes, tuple(zip(nodes[::2], nodes[1::2], strict=True))
    if row.n_hosts == 2:
        left, right = (host[:n] for host in _hosts(cluster, [n, n]))
        return (*left, *right), tuple(zip(left, right, strict=True))
    if row.n_hosts == 2 * n:
        nodes = tuple(host[0] for host in _hosts(cluster, [1] * row.n_hosts))
        return nodes, tuple(zip(nodes[::2], nodes[1::2], strict=True))
    n_ranks = 2 * n
    raise ConfigError(f"n_hosts = {row.n_hosts}: must be 1, 2 or {n_ranks} for {n} concurrent pairs of ranks")


def _hosts(cluster: Cluster, per_host: Sequence[int]) -> list[list[int]]:
    """Return the workers of the first hosts with enough workers, host by host."""
    wide = [nodes for nodes in workers_by_machine(cluster) if len(nodes) >= max(per_host)]
    if len(wide) < len(per_host):
        n_ranks, n_hosts, n_wide = sum(per_host), len(per_host), len(wide)
        raise ConfigError(
            f"{n_ranks} ranks on {n_hosts} machine(s) were measured, but cluster {cluster.name!r} has {n_wide} "
            f"with at least {max(per_host)} workers; use a cluster file that matches the "
            "measurements (n_gpus is the number of GPUs per host)"
        )
    return wide[: len(per_host)]
