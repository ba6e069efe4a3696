"""`execute`: start and end of each task of a plan on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule
from ddlsim.errors import DeadlockError
from ddlsim.network import Network
from ddlsim.network.executor import Executor
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, BROADCAST, UPDATE, Floats, Ints, Plan
from ddlsim.plan.program import key_sizes, task_table
from ddlsim.plan.schedules import Schedules

if TYPE_CHECKING:
    import matplotlib.axes
    import networkx as nx


@dataclass(frozen=True, eq=False, repr=False)
class Execution:
    """Start and end times of all tasks of an executed plan.

    plan   the executed plan
    start  start of each task in seconds, shape (n,)
    end    end of each task in seconds, shape (n,)

    A collective starts on a rank when the rank enters it. A receive starts when the rank begins to wait for the
    message.
    """

    plan: Plan
    start: Floats
    end: Floats

    def __repr__(self) -> str:
        return f"<Execution of {self.plan!r}: {self.seconds:.6g} s>"

    @property
    def seconds(self) -> float:
        """Makespan: the end of the last task, in seconds."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def step_ends(self) -> Floats:
        """Times in seconds at which each rank has all updated weights of each step, shape (n_ranks, n_steps).

        A step that averages models ends when the rank has the averaged model. NaN for ranks without updated weights.
        """
        plan = self.plan
        gathers = np.isin(plan.kind, (ALL_GATHER, BROADCAST)) & (plan.part >= 0)
        updates = np.zeros((plan.n_ranks, plan.n_steps), dtype=bool)
        updates[plan.rank[plan.kind == UPDATE], plan.step[plan.kind == UPDATE]] = True
        averages = (plan.kind == ALL_REDUCE) & updates[plan.rank, plan.step]  # gradients' end before updates
        rows = np.flatnonzero((plan.kind == UPDATE) | gathers | averages)
        ends = np.full((plan.n_ranks, plan.n_steps), -np.inf)
        np.maximum.at(ends, (plan.rank[rows], plan.step[rows]), self.end[rows])
        return np.where(np.isfinite(ends), ends, np.nan)

    @property
    def step_times(self) -> Floats:
        """Times in seconds between the ends of successive steps on their last ranks, shape (n_steps,)."""
        return np.diff(np.fmax.reduce(self.step_ends, axis=0), prepend=0.0)

    @property
    def idle_shares(self) -> Floats:
        """Fraction of each step in which a rank is idle, shape (n_ranks, n_steps): bubbles, exposed communication.

        Only lanes named "compute" count. A step ends when the last rank has all updated weights.
        """
        plan = self.plan
        computes = plan.on_device
        busy = np.zeros((plan.n_ranks, plan.n_steps))
        np.add.at(busy, (plan.rank[computes], plan.step[computes]), (self.end - self.start)[computes])
        return np.asarray(1.0 - busy / self.step_times, dtype=np.float64)

    def plot(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw a Gantt chart of the lanes, and write it to `path` if given."""
        from ddlsim.report.gantt import gantt

        return gantt(self, path)


def execute(
    plan: Plan,
    cluster: str | Path | nx.Graph[str] | Cluster,
    algorithm: str | Collective | Mapping[str, str | Collective] = "default",
    *,
    nodes: Sequence[int] | None = None,
    rank_order: str | Sequence[int] = "topology",
) -> Execution:
    """Execute a plan on a simulated cluster, and return the start and end times of all tasks.

    plan        plan to execute
    cluster     cluster to run on: a bundled name, path, networkx graph or :class:`~ddlsim.cluster.Cluster`
    algorithm   all-reduce algorithm: a name, or a function ``n_ranks -> Schedule`` (:func:`ddlsim.collectives.build`).
                To set the algorithms for several kinds of collectives, pass a mapping such as
                ``{"all_reduce": "hierarchical", "all_gather": "direct"}``; the defaults for the other kinds are in
                :data:`ddlsim.plan.ALGORITHMS`. For "push_pull", "direct", "tree" and "star" are available; "tree" and
                "star" first sum gradients inside each machine (:func:`ddlsim.collectives.push_pull.push_pull`)
    nodes       (n_ranks,) index of each rank's node in the cluster; None: the cluster's first workers
    rank_order  order of a collective's members: "topology" (neighbours in the network are consecutive), "given" (as in
                the plan), or a permutation of the ranks 0..n_ranks-1

    Raises ConfigError if the plan has a dependency cycle or does not fit the cluster.
    """
    loaded = load_cluster(cluster)
    places = nodes_of(plan, loaded, nodes)
    check_exchanges(plan)
    if len(places) > 1:
        loaded.check_connected(places)
    schedules = Schedules(plan, algorithm, loaded, places, rank_order)
    return Execution(plan, *run_to_end(plan, Network(loaded), places, schedules))


def run_to_end(
    plan: Plan, network: Network, nodes: Ints, schedules: Callable[[int, int, float], Schedule]
) -> tuple[Floats, Floats]:
    """Execute all tasks; return the start and end of every row in s, (n,) each.

    schedules  (kind of collective, group, bytes) -> its schedule
    """
    sizes, group, kind = key_sizes(plan)

    def collective(keys: list[int]) -> int:
        nbytes = float(np.cumsum(sizes[keys])[-1])  # summed in order, as buffers are filled
        index = int(group[keys[0]])
        return network.collective(schedules(int(kind[keys[0]]), index, nbytes), nodes[list(plan.groups[index])], nbytes)

    def messages(rows: Ints) -> tuple[Ints, Ints, Floats]:
        return nodes[plan.rank[rows]], nodes[plan.peer[rows]], plan.nbytes[rows]

    executor = Executor(task_table(plan), network, collective, sizes, plan.queues, messages)
    while executor.run() is not None:
        pass
    start, end = executor.tasks["start"].copy(), executor.tasks["end"].copy()
    if np.isnan(end).any():
        _ = Order(plan).events  # raises, naming the cycle that contains the task
        task = plan.task(int(np.flatnonzero(np.isnan(end))[0]))
        raise DeadlockError(f"plan: {task} never finishes, because it waits for a task that never ends")
    return start, end
