"""`execute`: when each task of a plan starts and ends on a cluster."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.collectives import Collective, Schedule, build, reorder
from ddlsim.collectives.find import n_segments_for
from ddlsim.errors import ConfigError, DeadlockError
from ddlsim.network import Network
from ddlsim.plan.bounds import nodes_of
from ddlsim.plan.exchanges import check_exchanges
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND, UPDATE, Floats, Ints, Plan

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
    return _Run(plan, Network(loaded), places, schedules).result()


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


class _Run:
    """An execution under way: rows become ready, start and end; the network does what travels."""

    def __init__(
        self, plan: Plan, network: Network, nodes: Ints, schedules: Sequence[Callable[[float], Schedule]]
    ) -> None:
        self.plan = plan
        self.network = network
        self.nodes = nodes
        self.schedules = schedules
        self.start = [np.nan] * len(plan)
        self.end = [np.nan] * len(plan)
        self._list_followers()
        self.kind, self.seconds, self.key = plan.kind.tolist(), plan.seconds.tolist(), plan.key.tolist()
        self.rank, self.peer, self.nbytes = plan.rank.tolist(), plan.peer.tolist(), plan.nbytes.tolist()
        self.place = [{rank: i for i, rank in enumerate(group)} for group in plan.groups]
        self.calendar: list[tuple[float, int, int]] = []  # (s, number, row): when work ends
        self.n_started = 0
        self.collectives: dict[int, int] = {}  # key -> the network's id
        self.under_way: dict[tuple[int, int], int] = {}  # the network's id and rank -> row
        self.delivered: set[int] = set()  # keys
        self.receiving: dict[int, int] = {}  # key -> row that waits for it
        self.joins: list[tuple[int, int]] = []
        self.sends: list[int] = []

    def _list_followers(self) -> None:
        """Note which rows may start after each, and for how many others a row waits (its lane's and its needs)."""
        plan = self.plan
        first, second = Order(plan).pairs
        own = plan.kind[first] != SEND
        own |= plan.kind[second] != RECEIVE
        own |= plan.key[first] != plan.key[second]  # a receive waits for its message, but not to begin to wait
        first, second = first[own], second[own]
        order = np.argsort(first, kind="stable")
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(first, minlength=len(plan)))]).tolist()
        self.following = second[order].tolist()
        self.missing = np.bincount(second, minlength=len(plan)).tolist()

    def result(self) -> Execution:
        for row in [row for row, n in enumerate(self.missing) if n == 0]:
            self._begin([row], 0.0)
        now, calendar = 0.0, self.calendar
        while True:
            after = calendar[0][0] if calendar else np.inf
            if after > now:
                self._start_queued(now)
            done = self.network.advance(after)
            if done is not None:
                now = done.time
                for number, rank in zip(done.ids.tolist(), done.ranks.tolist(), strict=True):
                    self._finish(self.under_way.pop((number, rank)), now)
            elif calendar:
                now, _, row = heapq.heappop(calendar)
                self._finish(row, now)
            else:
                break
        start, end = np.array(self.start), np.array(self.end)
        if np.isnan(end).any():
            stuck = int(np.flatnonzero(np.isnan(end))[0])
            _ = Order(self.plan).events  # raises, naming the circle that it is in
            raise DeadlockError(f"plan: {self.plan.task(stuck)} never ends")
        return Execution(self.plan, start, end)

    def _finish(self, row: int, now: float) -> None:
        """End a row, and begin those that waited only for it."""
        if self.kind[row] == SEND:
            self.delivered.add(self.key[row])
        ended = [row]
        if self.kind[row] == SEND and self.key[row] in self.receiving:
            ended.append(self.receiving.pop(self.key[row]))
        for each in ended:
            self.end[each] = now
            ready = []
            for after in self.following[self.offsets[each] : self.offsets[each + 1]]:
                self.missing[after] -= 1
                if not self.missing[after]:
                    ready.append(after)
            self._begin(ready, now)

    def _begin(self, rows: list[int], now: float) -> None:
        for row in rows:
            self.start[row] = now
            kind = self.kind[row]
            if kind >= ALL_REDUCE:
                self._join(row)
            elif kind == SEND:
                self.sends.append(row)
            elif kind == RECEIVE and self.key[row] not in self.delivered:
                self.receiving[self.key[row]] = row
            else:  # a receive of what is here already takes no time
                seconds = self.seconds[row] if kind < SEND else 0.0
                self.n_started += 1
                heapq.heappush(self.calendar, (now + seconds, self.n_started, row))

    def _join(self, row: int) -> None:
        key, group = self.key[row], self.peer[row]
        if key not in self.collectives:
            nbytes = self.nbytes[row]
            nodes = self.nodes[list(self.plan.groups[group])]
            self.collectives[key] = self.network.collective(self.schedules[group](nbytes), nodes, nbytes)
        number, rank = self.collectives[key], self.place[group][self.rank[row]]
        self.under_way[number, rank] = row
        self.joins.append((number, rank))

    def _start_queued(self, now: float) -> None:
        """Hand over what has begun at this instant, all at once."""
        if self.joins:
            joins, self.joins = self.joins, []
            self.network.join([number for number, _ in joins], [rank for _, rank in joins], now)
        if self.sends:
            rows, self.sends = self.sends, []
            src, dst = (self.nodes[[column[row] for row in rows]] for column in (self.rank, self.peer))
            ids = self.network.send(src, dst, np.array([self.nbytes[row] for row in rows]), now)
            for number, row in zip(ids.tolist(), rows, strict=True):
                self.under_way[number, 0] = row
