"""`execute`: when each task of a plan starts and ends on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective
from ddlsim.network import Network
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, BROADCAST, UPDATE, Floats, Plan
from ddlsim.plan.runner import Run
from ddlsim.plan.schedules import Schedules

if TYPE_CHECKING:
    import matplotlib.axes
    import networkx as nx


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
        """When each rank has all updated weights of each step, averaged where the step averages models, (n_ranks,
        n_steps); NaN where it gets none."""
        plan = self.plan
        gathers = np.isin(plan.kind, (ALL_GATHER, BROADCAST)) & (plan.part >= 0)
        updates = np.zeros((plan.n_ranks, plan.n_steps), dtype=bool)
        updates[plan.rank[plan.kind == UPDATE], plan.step[plan.kind == UPDATE]] = True
        averages = (plan.kind == ALL_REDUCE) & updates[plan.rank, plan.step]  # those of gradients end before the update
        rows = np.flatnonzero((plan.kind == UPDATE) | gathers | averages)
        ends = np.full((plan.n_ranks, plan.n_steps), -np.inf)
        np.maximum.at(ends, (plan.rank[rows], plan.step[rows]), self.end[rows])
        return np.where(np.isfinite(ends), ends, np.nan)

    @property
    def step_times(self) -> Floats:
        """Seconds between the ends of successive steps on their last ranks, (n_steps,)."""
        return np.diff(np.fmax.reduce(self.step_ends, axis=0), prepend=0.0)

    @property
    def idle_shares(self) -> Floats:
        """Share of the time to the end of each step, from that of the step before, in which a rank does no work (the
        bubble of a pipeline and what is exposed of communication), (n_ranks, n_steps).

        Only lanes named "compute" count. Steps end where the last rank has all updated weights.
        """
        plan = self.plan
        computes = np.array([lane.name == "compute" for lane in plan.lanes])[plan.lane]
        busy = np.zeros((plan.n_ranks, plan.n_steps))
        np.add.at(busy, (plan.rank[computes], plan.step[computes]), (self.end - self.start)[computes])
        return np.asarray(1.0 - busy / self.step_times, dtype=np.float64)

    def plot(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw what each lane did (a Gantt chart), and write it to `path` if given."""
        from ddlsim.report.plan_plot import gantt

        return gantt(self, path)


def execute(
    plan: Plan,
    cluster: str | Path | nx.Graph[str] | Cluster,
    algorithm: str | Collective | Mapping[str, str | Collective] = "default",
    *,
    nodes: Sequence[int] | None = None,
    rank_order: str | Sequence[int] = "topology",
) -> Execution:
    """Execute a plan on a cluster and return when each task started and ended.

    algorithm   of all-reduces: name, or function ``n_ranks -> Schedule`` (:func:`ddlsim.collectives.build`); or of
                each kind, as in ``{"all_reduce": "hierarchical", "all_gather": "direct"}``. Kinds that are left out
                run as :data:`ddlsim.plan.ALGORITHMS` says. Of "push_pull": "direct", or "tree" or "star": gradients are
                first added up inside each machine (:func:`ddlsim.collectives.push_pull.push_pull`)
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
    schedules = Schedules(plan, algorithm, loaded, places, rank_order)
    return Execution(plan, *Run(plan, Network(loaded), places, schedules).to_end())
