"""`execute`: when each task of a plan starts and ends on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.collectives.find import n_segments_for
from ddlsim.errors import ConfigError
from ddlsim.network import Network
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.exchanges import check_exchanges
from ddlsim.plan.plan import UPDATE, Floats, Ints, Plan
from ddlsim.plan.runner import Run

if TYPE_CHECKING:
    import matplotlib.axes
    import networkx as nx

__all__ = ["Execution", "execute"]


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
        """When each rank has made its last update of each step, (n_ranks, n_steps); NaN where it makes none."""
        plan, rows = self.plan, self.plan.rows(UPDATE)
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
    algorithm: str | Collective = "ring",
    *,
    nodes: Sequence[int] | None = None,
    rank_order: str | Sequence[int] = "topology",
) -> Execution:
    """Execute a plan on a cluster and return when each task started and ended.

    algorithm   of collectives: name, or function ``n_ranks -> Schedule`` (:func:`ddlsim.collectives.build`)
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
    schedules = [
        _schedules(loaded, places[list(group)], algorithm, _wanted(rank_order, plan, group)) for group in plan.groups
    ]
    return Execution(plan, *Run(plan, Network(loaded), places, schedules).to_end())


def _wanted(rank_order: str | Sequence[int], plan: Plan, group: tuple[int, ...]) -> str | Ints:
    """Return the order of a group's members: "topology", or their places in the group in the order wanted."""
    if isinstance(rank_order, str):
        if rank_order not in ("topology", "given"):
            raise ConfigError(f"rank_order = {rank_order!r}: must be 'given', 'topology' or a list of ranks")
        return "topology" if rank_order == "topology" else np.arange(len(group))
    if sorted(rank_order) != list(range(plan.n_ranks)):
        raise ConfigError(f"rank_order = {list(rank_order)}: must list each of the ranks 0..{plan.n_ranks - 1} once")
    return np.array([group.index(rank) for rank in rank_order if rank in group], dtype=np.int64)


def _schedules(
    cluster: Cluster, nodes: Ints, algorithm: str | Collective, order: str | Ints
) -> Callable[[float], Schedule]:
    """Return what makes a group's schedule for a number of bytes, one for sizes with as many segments."""
    places = cluster.locality_order(nodes) if isinstance(order, str) else order
    machines = np.where(cluster.host_of[nodes] >= 0, cluster.host_of[nodes], len(cluster.host_names) + nodes)
    hosts = machines[places].tolist()
    made: dict[int, Schedule] = {}

    def schedule(nbytes: float) -> Schedule:
        key = n_segments_for(nbytes)
        if key not in made:
            made[key] = reorder(build(algorithm, len(places), nbytes, hosts), places)
        return made[key]

    return schedule
