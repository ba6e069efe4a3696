"""Ranks that do the same, but for how long it takes them: a table of one stands for all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ddlsim.plan.plan import COLUMNS, RECEIVE, SEND, Ints, Plan


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
