"""The execution of a plan: its rows as tasks that the network's kernel starts and ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import DeadlockError
from ddlsim.network import Network, tasks
from ddlsim.network.executor import Executor, TaskColumns
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND, Floats, Ints, Plan


class Run:
    """An execution under way: rows become ready, start and end; the network does what travels.

    ``schedules``  kind of collective, group, bytes -> its schedule
    """

    def __init__(
        self, plan: Plan, network: Network, nodes: Ints, schedules: Callable[[int, int, float], Schedule]
    ) -> None:
        self.plan, self.network, self.nodes, self.schedules = plan, network, nodes, schedules
        self.sizes, self.group, self.kind = key_sizes(plan)
        self.executor = Executor(columns(plan), network, self._collective, self.sizes, plan.queues, self._messages)

    def _collective(self, keys: list[int]) -> int:
        nbytes = float(np.cumsum(self.sizes[keys])[-1])  # one after the other, as buffers are filled
        group = int(self.group[keys[0]])
        schedule = self.schedules(int(self.kind[keys[0]]), group, nbytes)
        return self.network.collective(schedule, self.nodes[list(self.plan.groups[group])], nbytes)

    def _messages(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        plan = self.plan
        return self.nodes[plan.rank[rows]], self.nodes[plan.peer[rows]], plan.nbytes[rows]

    def to_end(self) -> tuple[Floats, Floats]:
        """Let everything run; return the start and end of every row, s, (n,) each."""
        while self.executor.run() is not None:
            pass
        start, end = self.executor.tasks["start"].copy(), self.executor.tasks["end"].copy()
        if np.isnan(end).any():
            stuck = int(np.flatnonzero(np.isnan(end))[0])
            _ = Order(self.plan).events  # raises, naming the circle that it is in
            raise DeadlockError(f"plan: {self.plan.task(stuck)} never ends")
        return start, end


def columns(plan: Plan) -> TaskColumns:
    """Return the tasks of a plan."""
    first, second = Order(plan).pairs
    own = plan.kind[first] != SEND
    own |= plan.kind[second] != RECEIVE
    own |= plan.key[first] != plan.key[second]  # a receive waits for its message, but not to begin to wait
    first, second = first[own], second[own]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(first, minlength=len(plan)))])
    missing = np.bincount(second, minlength=len(plan))
    kind = np.full(len(plan), tasks.WORK)
    kind[plan.kind == SEND], kind[plan.kind == RECEIVE] = tasks.SEND, tasks.RECEIVE
    grouped = plan.kind >= ALL_REDUCE
    kind[grouped] = np.where(plan.queue[grouped] >= 0, tasks.QUEUED, tasks.JOIN)
    place = np.zeros((len(plan.groups), plan.n_ranks), dtype=np.int64)
    for number, group in enumerate(plan.groups):
        place[number, list(group)] = np.arange(len(group))
    return TaskColumns(
        kind=kind, seconds=plan.seconds, key=plan.key, queue=plan.queue, step=plan.step, offsets=offsets,
        place=np.where(grouped, place[np.where(grouped, plan.peer, 0), plan.rank], 0) if len(plan.groups) else kind * 0,
        following=second[np.argsort(first, kind="stable")], missing=missing, waits=missing,
        slow=np.full(len(plan), -1),
    )  # fmt: skip


def key_sizes(plan: Plan) -> tuple[Floats, Ints, Ints]:
    """Return the bytes of the buffer, the group and the kind of each key's collective, (n_keys,) each."""
    rows = plan.collectives
    n_keys = int(plan.key.max(initial=-1)) + 1
    sizes, group, kind = np.zeros(n_keys), np.full(n_keys, -1, dtype=np.int64), np.full(n_keys, -1, dtype=np.int64)
    sizes[plan.key[rows]], group[plan.key[rows]], kind[plan.key[rows]] = (
        plan.nbytes[rows], plan.peer[rows], plan.kind[rows],
    )  # fmt: skip
    return sizes, group, kind
