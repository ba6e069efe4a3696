"""Which tasks have to do with which part of the gradients, and weights that are gathered for every pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.order import Order
from ddlsim.plan.overlaps import joined, with_parts
from ddlsim.plan.plan import ALL_GATHER, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Bools, Ints, Plan
from ddlsim.plan.shards import Replay

PASSES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Touching:
    """Tasks that have to do with a part on their rank, in their step: `row`, `part`, and the place of both, and whether
    by the layer that is `tied` to it, (n,)."""

    row: Ints
    part: Ints
    place: Ints
    tied: Bools

    def of(self, mask: Bools) -> Touching:
        """Return some of them."""
        return Touching(self.row[mask], self.part[mask], self.place[mask], self.tied[mask])


def touching(plan: Plan, *kinds: int) -> Touching:
    """Return the tasks of these kinds that have to do with a part, for each part."""
    rows = plan.rows(*kinds)
    first, end, tied = (
        np.array([getattr(part, name) for part in plan.parts], dtype=np.int64) for name in ("first", "end", "tied")
    )
    i, part = with_parts(plan.first[rows], plan.end[rows], first, end)
    j, other = with_parts(plan.first[rows], plan.end[rows], tied, tied + 1)
    by_tie = np.repeat([False, True], [len(i), len(j)])
    i, part = np.concatenate([i, j]), np.concatenate([part, other])
    return Touching(rows[i], part, place_of(plan, rows[i], part), by_tie)


def place_of(plan: Plan, rows: Ints, part: Ints) -> Ints:
    """Return the place of each part in the step and on the rank of a row."""
    return (plan.step[rows] * plan.n_ranks + plan.rank[rows]) * len(plan.parts) + part


def on_rank(plan: Plan, tasks: Touching) -> Ints:
    """Return which part of which rank each task has to do with, whatever the step."""
    return np.asarray(tasks.place % (plan.n_ranks * len(plan.parts)), dtype=np.int64)


def fetches_of(plan: Plan) -> Touching:
    """Return the all-gathers that bring weights, of which ranks keep shares, for the pass of a micro-batch."""
    rows = plan.rows(ALL_GATHER)
    rows = rows[(plan.part[rows] >= 0) & (plan.batch[rows] >= 0)]
    return Touching(rows, plan.part[rows], place_of(plan, rows, plan.part[rows]), np.zeros(len(rows), dtype=np.bool_))


def check_fetches(
    plan: Plan, order: Order, replay: Replay, fetches: Touching, last: Touching, passes: tuple[Touching, Touching]
) -> None:
    """Check that what ranks keep shares of is gathered for every pass, and that shares have been updated before.

    Where a part is gathered twice for a micro-batch, the second time is for the backward pass.

    last    what is done last to each part in each step
    passes  forward and backward
    """
    shares, n_batches = np.unique(on_rank(plan, fetches)), int(plan.batch.max()) + 1
    visit = fetches.place * n_batches + plan.batch[fetches.row]
    by_visit = np.argsort(visit, kind="stable")
    visits, count = np.unique(visit, return_counts=True)
    ends = np.cumsum(count)
    for tasks, nth in zip(passes, (ends - count, ends - 1), strict=True):
        mine = tasks.of(np.isin(on_rank(plan, tasks), shares))
        wanted = mine.place * n_batches + plan.batch[mine.row]
        lacking = mine.of(~np.isin(wanted, visits))
        for row, part in zip(lacking.row.tolist(), lacking.part.tolist(), strict=True):
            raise ConfigError(
                f"plan: {plan.task(row)}: its rank has a share of part {part}, and nothing gathers the rest for this "
                "batch"
            )
        i, j = joined(visits, wanted)
        order.demand(fetches.row[by_visit[nth[i]]], mine.row[j], "which gathers the weights that it uses")
    later = fetches.of(plan.step[fetches.row] > 0)
    before = later.place - plan.n_ranks * len(plan.parts)
    i, j = joined(last.place, before)
    order.demand(last.row[i], later.row[j], "whose weights it gathers")
    _check_tiles(plan, replay, later, before)


def _check_tiles(plan: Plan, replay: Replay, fetches: Touching, before: Ints) -> None:
    """Check that the shares of a group's members, side by side, are the whole updated part."""
    first, end, updated = replay.held(before)
    position = np.array([plan.groups[group].index(rank) for group, rank in
                         zip(plan.peer[fetches.row].tolist(), plan.rank[fetches.row].tolist(), strict=True)],
                        dtype=np.int64)  # fmt: skip
    by_key = np.lexsort((position, plan.key[fetches.row]))
    key = plan.key[fetches.row][by_key]
    begins = np.diff(key, prepend=-1) != 0
    ends = np.append(begins[1:], True)
    first, end, updated = first[by_key], end[by_key], updated[by_key]
    wrong = ~updated | (begins & (first != 0)) | (ends & (end != replay.size))
    wrong[1:] |= ~begins[1:] & (first[1:] != end[:-1])
    for row in fetches.row[by_key][wrong][:1].tolist():
        raise ConfigError(
            f"plan: {plan.task(row)}: the shares of its group are not the whole of part {plan.part[row]}, updated in "
            "the step before; let the group that scattered the gradients gather"
        )
