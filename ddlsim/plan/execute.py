"""`execute`: when each task of a plan starts and ends on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.collectives.find import n_segments_for
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.network import Network
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.exchanges import check_exchanges
from ddlsim.plan.plan import ALL_GATHER, BROADCAST, KINDS, PUSH_PULL, ROOTED, UPDATE, Floats, Ints, Plan
from ddlsim.plan.runner import Run

if TYPE_CHECKING:
    import matplotlib.axes
    import networkx as nx

__all__ = ["ALGORITHMS", "Execution", "execute"]

#: how collectives run if nothing else is said: in rings and pipelined chains as NCCL, all-to-alls at once
ALGORITHMS: dict[str, str | Collective] = {
    "all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring", "broadcast": "chain", "reduce": "chain",
    "gather": "direct", "scatter": "direct", "all_to_all": "direct", "push_pull": "direct",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Execution:
    """When the tasks of a plan ran: ``start`` and ``end`` in s, (n,) each.

    A collective starts on a rank when the rank enters it, and a receive when the rank begins to wait.
    """

    plan: Plan
    start: Floats
    end: Floats

    def __repr__(self) -> str:
        return f"<Execution of {self.plan!r}: {self.seconds:.6g} s>"

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def step_ends(self) -> Floats:
        """When each rank has all updated weights of each step, (n_ranks, n_steps); NaN where it gets none."""
        plan = self.plan
        gathers = np.isin(plan.kind, (ALL_GATHER, BROADCAST)) & (plan.part >= 0)
        rows = np.flatnonzero((plan.kind == UPDATE) | gathers)
        ends = np.full((plan.n_ranks, plan.n_steps), -np.inf)
        np.maximum.at(ends, (plan.rank[rows], plan.step[rows]), self.end[rows])
        return np.where(np.isfinite(ends), ends, np.nan)

    @property
    def step_times(self) -> Floats:
        """Seconds between the ends of successive steps on their last ranks, (n_steps,)."""
        return np.diff(self.step_ends.max(axis=0), prepend=0.0)

    def plot(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw what each lane did (a Gantt chart), and write it to `path` if given."""
        from ddlsim.report.plan_plot import gantt

        return gantt(self, path)


def execute(
    plan: Plan,
    cluster: str | Path | nx.Graph[str] | Cluster,
    algorithm: str | Collective | Mapping[str, str | Collective] = "ring",
    *,
    nodes: Sequence[int] | None = None,
    rank_order: str | Sequence[int] = "topology",
) -> Execution:
    """Execute a plan on a cluster and return when each task started and ended.

    algorithm   of all-reduces: name, or function ``n_ranks -> Schedule`` (:func:`ddlsim.collectives.build`); or of
                each kind, as in ``{"all_reduce": "hierarchical", "all_gather": "direct"}``. Kinds that are left out
                run as :data:`ALGORITHMS` says. Of "push_pull": "direct", or "tree" or "star": gradients are first
                added up inside each machine (:func:`ddlsim.collectives.push_pull.push_pull`)
    nodes       (n_ranks,) where the ranks are; by default the cluster's first workers
    rank_order  the order of a collective's members: "topology" (neighbours in the network follow each other), "given",
                or the ranks 0..n_ranks-1 in the order wanted

    Raises ConfigError for a plan that can never end or does not fit the cluster.
    """
    loaded = load_cluster(cluster)
    places = nodes_of(plan, loaded, nodes)
    check_exchanges(plan)
    if len(places) > 1:
        loaded.check_connected(places)
    schedules = _Schedules(plan, loaded, places, _algorithms(algorithm), rank_order)
    return Execution(plan, *Run(plan, Network(loaded), places, schedules).to_end())


def _algorithms(algorithm: str | Collective | Mapping[str, str | Collective]) -> dict[str, str | Collective]:
    """Return the algorithm of every kind of collective."""
    chosen = dict(algorithm) if isinstance(algorithm, Mapping) else {"all_reduce": algorithm}
    for kind in chosen:
        if kind not in ALGORITHMS:
            raise unknown_name("kind of collective", str(kind), ALGORITHMS, "algorithm")
    push = chosen.get("push_pull", "direct")
    if push not in ("direct", "tree", "star"):
        raise ConfigError(f"algorithm['push_pull'] = {shown(push)}: must be 'direct', 'tree' or 'star'")
    return ALGORITHMS | chosen


class _Schedules:
    """The schedule of a kind of collective for a group and a number of bytes, one for sizes with as many segments."""

    def __init__(
        self, plan: Plan, cluster: Cluster, nodes: Ints, algorithms: Mapping[str, str | Collective],
        rank_order: str | Sequence[int],
    ) -> None:  # fmt: skip
        self.plan, self.cluster, self.nodes, self.algorithms = plan, cluster, nodes, algorithms
        self.orders = [_wanted(rank_order, plan, group) for group in plan.groups]
        self.machines = np.where(cluster.host_of[nodes] >= 0, cluster.host_of[nodes], len(cluster.host_names) + nodes)
        self.cache: dict[tuple[int, int, int], Schedule] = {}

    def __call__(self, kind: int, group: int, nbytes: float) -> Schedule:
        key = kind, group, n_segments_for(nbytes)
        if key not in self.cache:
            self.cache[key] = self._new(kind, group, nbytes)
        return self.cache[key]

    def _new(self, kind: int, group: int, nbytes: float) -> Schedule:
        members, algorithm = np.array(self.plan.groups[group]), self.algorithms[KINDS[kind]]
        hosts = self.machines[members]
        if kind == PUSH_PULL:
            n_servers = int(np.isin(members, self.plan.servers).sum())
            inside = None if algorithm == "direct" else hosts[: len(hosts) - n_servers].tolist()
            return push_pull(len(members) - n_servers, n_servers, inside, star=algorithm == "star")
        order = self.orders[group]
        places = self.cluster.locality_order(self.nodes[members]) if isinstance(order, str) else order
        if kind in ROOTED:  # from or to the first member, whatever the order
            places = np.roll(places, -int(np.flatnonzero(places == 0)[0]))
        return reorder(build(algorithm, len(places), nbytes, hosts[places].tolist(), KINDS[kind]), places)


def _wanted(rank_order: str | Sequence[int], plan: Plan, group: tuple[int, ...]) -> str | Ints:
    """Return the order of a group's members: "topology", or their places in the group in the order wanted."""
    if isinstance(rank_order, str):
        if rank_order not in ("topology", "given"):
            raise ConfigError(f"rank_order = {rank_order!r}: must be 'given', 'topology' or a list of ranks")
        return "topology" if rank_order == "topology" else np.arange(len(group))
    if sorted(rank_order) != list(range(plan.n_ranks)):
        raise ConfigError(f"rank_order = {list(rank_order)}: must list each of the ranks 0..{plan.n_ranks - 1} once")
    return np.array([group.index(rank) for rank in rank_order if rank in group], dtype=np.int64)
