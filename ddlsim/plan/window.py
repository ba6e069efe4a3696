"""How long some steps of a plan take at least, counted from the end of the step before them.

A run is measured from the end of one step, at t0, to the end of another, at t1. Some row u, which no other one of its
step comes after, ends the step before the window at t0 or later. What comes after u starts after t0.

**Chains.** So t1 - t0 is at least the longest chain from the end of u to an update of the window, whichever u it is:
the least over all that it may be. A chain goes on from a member of a collective to all members that need its bytes. Of
an all-reduce of m bytes every member needs all of everyone: they have to leave the device (and the machine) of the one,
and to enter that of the other, which takes m over the rate of these interfaces, whatever the algorithm.

**Bytes.** Let a collective come after every such u, through one member or another. When it ends anywhere all have
entered it, so all that comes after it starts after t0, and after the longest chain from u to it. What of that the
window's updates wait for has then to cross the interfaces as :func:`ddlsim.plan.bounds.cut` says; and of the collective
itself, which others may have entered before t0, what the last one brings has to be told to all.

Both hold for any order of the queues, any algorithm of the collectives and any other traffic: they are bounds for what
is sent as the plan says. Where nobody knows what is sent, chains of work alone are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.plan.bounds import narrowest
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.interfaces import Interfaces, known_rate
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, PUSH_PULL, RECEIVE, SEND, UPDATE, Floats, Ints, Plan


@dataclass(frozen=True, eq=False)
class Alike:
    """A plan, and the table of one of its ranks where all do the same.

    template  the rows of the first rank, by itself, or the whole plan where ranks differ
    rows      (n_rows of the template, n_ranks that are alike) the row of the plan that each stands for
    """

    plan: Plan
    template: Plan
    rows: Ints

    @property
    def several(self) -> bool:
        """Whether the template stands for several ranks, all of which are in all its collectives."""
        return self.template is not self.plan


def alike(plan: Plan) -> Alike:
    """Return what is alike in a plan. Servers, whose rows say nothing of their own, are left out of a template."""
    same = Alike(plan, plan, np.arange(len(plan))[:, None])
    workers = np.setdiff1d(np.arange(plan.n_ranks), plan.servers)
    rows = np.flatnonzero(~np.isin(plan.rank, plan.servers))
    n = len(workers)
    if n < 2 or len(rows) % n or len(plan.rows(SEND, RECEIVE)):
        return same
    if any(set(group) - set(plan.servers) != set(workers.tolist()) for group in plan.groups):
        return same
    block = rows[np.argsort(plan.rank[rows], kind="stable")].reshape(n, -1)
    if (plan.rank[block] != workers[:, None]).any():
        return same
    place = np.full(len(plan), -1, dtype=np.int64)
    place[block] = np.arange(block.shape[1])
    names: dict[str, int] = {}
    lane = np.array([names.setdefault(each.name, len(names)) for each in plan.lanes])[plan.lane]
    counts = np.diff(plan.need_offsets)
    columns = [lane, plan.queue, counts, *(getattr(plan, name) for name in ("kind", "nbytes", "peer", "key", "step"))]
    if any((column[block] != column[block[0]]).any() for column in columns):
        return same
    n_needs = int(counts[block[0]].sum())
    first = np.cumsum(counts[block[0]]) - counts[block[0]]
    which = np.repeat(np.arange(block.shape[1]), counts[block[0]])
    needs = plan.needs[plan.need_offsets[block][:, which] + np.arange(n_needs) - first[which]]
    if (plan.rank[needs] != workers[:, None]).any() or (place[needs] != place[needs[0]]).any():
        return same
    return Alike(plan, _table_of(plan, block[0], place[needs[0]], counts[block[0]]), block.T)


def _table_of(plan: Plan, rows: Ints, needs: Ints, counts: Ints) -> Plan:
    """Return the rows of one rank as a plan by itself."""
    lanes = np.unique(plan.lane[rows])
    columns = {name: getattr(plan, name)[rows] for name in COLUMNS}
    columns["lane"] = np.searchsorted(lanes, columns["lane"])
    columns["batch"] = np.unique(columns["batch"], return_inverse=True)[1].reshape(-1)
    columns["key"] = np.unique(columns["key"], return_inverse=True)[1].reshape(-1)
    return dataclasses.replace(
        plan, lanes=tuple(plan.lanes[i]._replace(rank=0) for i in lanes.tolist()), groups=((0,),) * len(plan.groups),
        servers=(), need_offsets=np.concatenate([[0], np.cumsum(counts)]), needs=needs, **columns,
    )  # fmt: skip


NEVER = -np.inf


@dataclass(frozen=True, eq=False)
class Carriers:
    """What carries messages and collectives as a plan says: interfaces, and the node of every rank, (n_ranks,)."""

    levels: Sequence[Interfaces]
    nodes: Ints


def window(
    plan: Plan, begin: int, end: int, carriers: Carriers | None = None, seconds: Floats | None = None
) -> tuple[float, float]:
    """Return the s that the steps `begin` to `end` - 1 take at least, by chains and by bytes; 0 where nothing is known.

    carriers  None: messages and collectives may take no time
    seconds   (n,) of each task's work, where that is not what the plan says (jitter)

    Raises ConfigError for a plan that can never end.
    """
    check_exchanges(plan)
    work = plan.seconds if seconds is None else seconds
    if carriers is not None and len(plan.rows(SEND)):
        work = np.maximum(work, _message_seconds(plan, carriers))
    ranks = alike(plan)
    chains = _Chains(ranks, work, max(begin - 1, 0), carriers)
    table = ranks.template
    start, after = chains.to(np.flatnonzero((table.kind == UPDATE) & (table.step < end)))
    if begin == 0:
        return max(float(start.max(initial=0.0)), 0.0), 0.0
    last = _last_rows(table, chains.order, begin - 1)
    if not len(last):
        return 0.0, 0.0
    longest = max(float(after[last].min()), 0.0)
    if carriers is None:
        return longest, 0.0
    needed = np.flatnonzero((after > NEVER).all(axis=1))
    return longest, _bytes(plan, chains, last, needed, carriers)


def _message_seconds(plan: Plan, carriers: Carriers) -> Floats:
    """Return the s that each message needs at least to leave its place and to enter another, (n,); 0 for other rows."""
    sends, least = plan.rows(SEND), np.zeros(len(plan))
    for level in carriers.levels:
        place = level.place[carriers.nodes]
        src, dst = place[plan.rank[sends]], place[plan.peer[sends]]
        slower = np.minimum(known_rate(level.out, src), known_rate(level.into, dst))
        least[sends] = np.maximum(least[sends], np.where(src != dst, plan.nbytes[sends] / slower, 0.0))
    return least


def _last_rows(plan: Plan, order: Order, step: int) -> Ints:
    """Return the rows of a step of which one ends last: those of workers that no other one comes after."""
    inside = (plan.step == step) & ~np.isin(plan.rank, plan.servers)
    before, later = order.ends_after
    followed = np.zeros(len(plan), dtype=np.bool_)
    followed[before[inside[before] & inside[later]]] = True
    return np.flatnonzero(inside & ~followed)


def _bytes(plan: Plan, chains: _Chains, last: Ints, needed: Ints, carriers: Carriers) -> float:
    """Return the s for a chain to a collective that comes after all `last` rows, and the bytes that come after it."""
    joint = chains.joint
    if joint is None:
        return 0.0
    until = float(chains.to(joint)[1][last].min())
    if until == NEVER:
        return 0.0
    rows = chains.ranks.rows[np.intersect1d(chains.later_than(joint), needed)].ravel()
    workers = rows[(plan.kind[rows] >= ALL_REDUCE) & ~np.isin(plan.rank[rows], plan.servers)]
    entering = np.bincount(plan.key[workers], minlength=len(plan))
    members = np.array([len(set(group) - set(plan.servers)) for group in plan.groups])
    whole = workers[entering[plan.key[workers]] == members[plan.peer[workers]]]  # nobody has entered them before
    crossing = np.concatenate([whole, rows[plan.kind[rows] == SEND]])
    begun = chains.ranks.rows[joint].ravel()
    return max(until, 0.0) + narrowest(plan, carriers.levels, carriers.nodes, crossing, begun).seconds


class _Chains:
    """Chains of the rows of a template, each of which stands for a row of several ranks, from step `first` on.

    Values have the shape (n_rows of the template, n_ranks that are alike).
    """

    def __init__(self, ranks: Alike, work: Floats, first: int, carriers: Carriers | None) -> None:
        self.ranks, self.first, self.carriers = ranks, first, carriers
        self.work = work[ranks.rows]
        self.order = Order(ranks.template)
        before, later = self.order.ends_after
        by = np.argsort(before, kind="stable")
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=len(ranks.template)))]).tolist()
        self.later = later[by].tolist()
        rows = np.argsort(self.order.event, kind="stable")
        ends = np.concatenate([[0], np.cumsum(np.bincount(self.order.event, minlength=self.order.n_events))])
        self.members = [part.tolist() for part in np.split(rows, ends[1:-1])]
        self.collective = (ranks.template.kind >= ALL_REDUCE).tolist()
        self._groups: dict[tuple[int, int], list[tuple[Ints, Floats, Floats]]] = {}

    @property
    def joint(self) -> Ints | None:
        """The rows of the first collective of several ranks in the window."""
        table = self.ranks.template
        for event in self.order.events:
            rows = self.members[event]
            several = len(rows) > 1 or (self.ranks.several and self.collective[rows[0]])
            if several and table.step[rows[0]] > self.first:
                return np.array(rows, dtype=np.int64)
        return None

    def to(self, targets: Ints) -> tuple[Floats, Floats]:
        """Return the s of the longest chain that ends with a target, from the start and from the end of each row; -inf
        where there is none."""
        table, later, offsets = self.ranks.template, self.later, self.offsets
        step, ends = table.step.tolist(), set(targets.tolist())
        start = np.full(self.work.shape, NEVER)
        after = np.full(self.work.shape, NEVER)
        for event in reversed(self.order.events):
            rows = self.members[event]
            if step[rows[0]] < self.first:
                continue
            for row in rows:
                for each in later[offsets[row] : offsets[row + 1]]:
                    np.maximum(after[row], start[each], out=after[row])
                longest = np.maximum(after[row], 0.0) if row in ends else after[row]
                start[row] = self.work[row] + longest
            if rows[0] in ends:
                continue
            if len(rows) > 1:
                start[rows] = start[rows].max(axis=0)
            elif self.ranks.several and self.collective[rows[0]]:
                start[rows[0]] = self._through(rows[0], start[rows[0]])
        return start, after

    def later_than(self, rows: Ints) -> Ints:
        """Return the rows that come after some."""
        reached: set[int] = set()
        left = rows.tolist()
        while left:
            row = left.pop()
            new = [each for each in self.later[self.offsets[row] : self.offsets[row + 1]] if each not in reached]
            reached.update(new)
            left += new
        return np.array(sorted(reached), dtype=np.int64)

    def _through(self, row: int, ends: Floats) -> Floats:
        """Let the chains go on from every member of a collective, (n_ranks,), to those that need its bytes."""
        best = np.full(len(ends), ends.max())
        if self.carriers is not None and best[0] > NEVER:
            nbytes = self.ranks.template.nbytes[row]
            for label, out, into in self._crossing(row, self.carriers):
                best = np.maximum(best, nbytes * out + _others(ends, label))
                best = np.maximum(best, _others(ends + nbytes * into, label))
        return best

    def _crossing(self, row: int, carriers: Carriers) -> list[tuple[Ints, Floats, Floats]]:
        """Return, for devices and for machines, the place of each member, and the s per byte of the buffer for what it
        gives to leave its place, and for what it gets to enter."""
        plan = self.ranks.plan
        kind, group = int(self.ranks.template.kind[row]), int(plan.peer[self.ranks.rows[row, 0]])
        if (kind, group) in self._groups:
            return self._groups[kind, group]
        share = 1.0 if kind in (ALL_REDUCE, PUSH_PULL) else 1.0 / len(plan.groups[group])
        crossing = []
        for level in carriers.levels:
            place = level.place[carriers.nodes]
            mine = place[plan.rank[self.ranks.rows[row]]]
            label = np.unique(mine, return_inverse=True)[1].reshape(-1).astype(np.int64)
            part: float | Floats = share
            if kind == PUSH_PULL:  # through servers, also to oneself
                servers = place[list(plan.servers)]
                part = 1.0 - (servers[None, :] == mine[:, None]).mean(axis=1)
                label = np.full(len(mine), -1, dtype=np.int64)
            crossing.append((label, part / known_rate(level.out, mine), part / known_rate(level.into, mine)))
        self._groups[kind, group] = crossing
        return crossing


def _others(values: Floats, label: Ints) -> Floats:
    """Return for each member the largest value of those with another label, -inf where there is none; of all if the
    labels are -1."""
    if label[0] < 0:
        return np.full(len(values), values.max())
    best = np.full(int(label.max()) + 1, NEVER)
    np.maximum.at(best, label, values)
    first = int(np.argmax(best))
    others = float(np.delete(best, first).max(initial=NEVER))
    return np.where(label == first, others, best[first])
