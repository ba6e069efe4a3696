"""The execution of a plan as a plain loop, which the compiled one must repeat to the last bit."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import DeadlockError
from ddlsim.network import Network
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND, Floats, Ints, Plan

__all__ = ["reference_run"]


def reference_run(
    plan: Plan, network: Network, nodes: Ints, schedules: Callable[[int, int, float], Schedule]
) -> tuple[Floats, Floats]:
    """Execute all tasks; return the start and end of every row, s, (n,) each."""
    return ReferenceRun(plan, network, nodes, schedules).to_end()


class ReferenceRun:
    """An execution under way: rows become ready, start and end; the network does what travels."""

    def __init__(
        self, plan: Plan, network: Network, nodes: Ints, schedules: Callable[[int, int, float], Schedule]
    ) -> None:
        self.plan = plan
        self.network = network
        self.nodes = nodes
        self.schedules = schedules
        self.start = [np.nan] * len(plan)
        self.end = [np.nan] * len(plan)
        self._list_followers()
        self.queue = plan.queue.tolist()
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
        self._open_queues()

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

    def _open_queues(self) -> None:
        plan = self.plan
        rows = plan.collectives
        rows = rows[plan.queue[rows] >= 0]
        self.members: dict[int, list[int]] = {}  # key -> rows of a collective that a queue launches, by place in group
        for row in rows.tolist():
            places = self.place[self.peer[row]]
            self.members.setdefault(self.key[row], [-1] * len(places))[places[self.rank[row]]] = row
        self.not_ready = {key: len(members) for key, members in self.members.items()}
        self.now = 0.0
        self.buffers: dict[int, tuple[int, list[int], int]] = {}  # network's id -> queue, keys, ranks under way
        self.dispatchers = [
            queue.dispatcher(functools.partial(self._launch, i), functools.partial(self._wake, i))
            for i, queue in enumerate(plan.queues)
        ]

    def _launch(self, queue: int, keys: list[int]) -> None:
        """Let all members enter collectives of a queue as one buffer."""
        group = self.peer[self.members[keys[0]][0]]
        nbytes = 0.0
        for key in keys:
            nbytes += self.nbytes[self.members[key][0]]
        nodes = self.nodes[list(self.plan.groups[group])]
        kind = self.kind[self.members[keys[0]][0]]
        number = self.network.collective(self.schedules(kind, group, nbytes), nodes, nbytes)
        self.buffers[number] = queue, keys, len(nodes)
        for key in keys:
            for row in self.members[key]:
                self.start[row] = self.now
        self.joins += [(number, place) for place in range(len(nodes))]

    def _take(self, number: int, rank: int) -> tuple[list[int], int | None]:
        """Return the rows that the network has ended, and the queue whose buffer has now arrived everywhere."""
        if number not in self.buffers:
            return [self.under_way.pop((number, rank))], None
        queue, keys, left = self.buffers.pop(number)
        if left > 1:
            self.buffers[number] = queue, keys, left - 1
        return [self.members[key][rank] for key in keys], queue if left == 1 else None

    def _wake(self, queue: int, time: float) -> None:
        self.n_started += 1
        heapq.heappush(self.calendar, (time, self.n_started, -1 - queue))

    def to_end(self) -> tuple[Floats, Floats]:
        """Let everything run; return the start and end of every row, s, (n,) each."""
        for row in [row for row, n in enumerate(self.missing) if n == 0]:
            self._begin([row], 0.0)
        now, calendar = 0.0, self.calendar
        while True:
            after = calendar[0][0] if calendar else np.inf
            if after > now:
                self._start_queued(now)
            done = self.network.advance(after)
            if done is not None:
                self.now = now = done.time
                # all ends of the instant are told apart before anything new starts, which may get an id that is free
                ended = zip(done.ids.tolist(), done.ranks.tolist(), strict=True)
                for rows, queue in [self._take(number, rank) for number, rank in ended]:
                    for row in rows:
                        self._finish(row, now)
                    if queue is not None:
                        self.dispatchers[queue].ended(now)
            elif calendar:
                now, _, row = heapq.heappop(calendar)
                self.now = now
                if row < 0:
                    self.dispatchers[-1 - row].tick(now)
                else:
                    self._finish(row, now)
            else:
                break
        start, end = np.array(self.start), np.array(self.end)
        if np.isnan(end).any():
            stuck = int(np.flatnonzero(np.isnan(end))[0])
            _ = Order(self.plan).events  # raises, naming the circle that it is in
            raise DeadlockError(f"plan: {self.plan.task(stuck)} never ends")
        return start, end

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
            if kind >= ALL_REDUCE and self.queue[row] >= 0:
                key = self.key[row]
                self.not_ready[key] -= 1
                if not self.not_ready[key]:
                    self.dispatchers[self.queue[row]].ready(key, self.nbytes[row], now)
            elif kind >= ALL_REDUCE:
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
            schedule = self.schedules(self.kind[row], group, nbytes)
            self.collectives[key] = self.network.collective(schedule, nodes, nbytes)
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
