"""Insertion of tasks into plans.

These are evaluations before steps, encoding and decoding of gradients, waits for the samples of a micro-batch, and
fixed costs of steps and of collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, COMPUTE, FORWARD, PUSH_PULL, REDUCE_SCATTER, Bools, Ints, Plan
from ddlsim.plan.rows import csr

ENCODE, DECODE = "encode", "decode"
#: collectives that sum encoded gradients
SUMMING = (ALL_REDUCE, REDUCE_SCATTER, PUSH_PULL)
_WORK = {"kind": COMPUTE, "seconds": 0.0, "nbytes": 0.0, "peer": -1, "key": -1, "batch": -1, "first": 0, "end": 0,
         "part": -1, "holds": 0.0, "every": 0}  # fmt: skip
_NONE: Ints = np.empty(0, dtype=np.int64)


def with_evaluations(plan: Plan, name: str) -> Plan:
    """Return a plan in which the first rank (of each copy of a template) begins every step with an evaluation of zero
    seconds.

    It depends on the same rows as the first task of the step, unless the rank has other dependencies on the previous
    step. If the layers of the model arrive one by one, it waits for nothing.
    """
    device = next(i for i, lane in enumerate(plan.lanes) if lane.rank == 0 and lane.name == "compute")
    rows = np.flatnonzero(plan.lane == device)
    firsts = rows[np.diff(plan.step[rows], prepend=-1) > 0]
    row, need = plan.needing, plan.needs
    later = (plan.lane[row] == device) & (plan.step[row] == 1) & (plan.step[need] == 0)
    at_once = np.isin(need[later], need[later & np.isin(row, firsts)]).all()
    same = np.isin(row, firsts) & at_once
    place = np.searchsorted(firsts, row[same])
    columns = {"lane": np.full(len(firsts), device), "step": plan.step[firsts], "name": len(plan.names)}
    return inserted(plan, (name,), firsts, columns, (place, need[same]), (row[:0], row[:0]))


def with_codes(plan: Plan, *, decodes: bool, together: bool) -> Plan:
    """Return a plan with "encode" tasks before gradients are summed and "decode" tasks for the sums, of zero seconds.

    Each of these tasks has the `part` of its sum. Encoding comes directly after the tasks of its rank's device that the
    sum needs; decoding before the first task there that waits for the sum, or, if sums run in order, for a later one.
    That task can be in the next step, so a plan may lack the decoding of its last step's sums.

    decodes   whether anything is decoded
    together  whether decoding begins only when all sums that the task waits for have arrived, not bucket by bucket

    Raises ConfigError if a sum needs no task of its rank's device, or no task there needs the sum.
    """
    computing = plan.on_device
    sums = np.flatnonzero(np.isin(plan.kind, SUMMING) & (plan.part >= 0))
    row, need = plan.needing, plan.needs
    last = np.full(len(plan), -1)
    filling = np.isin(row, sums) & computing[need]
    np.maximum.at(last, row[filling], need[filling])
    if (last[sums] < 0).any():
        raise ConfigError(
            f"plan: {plan.task(int(sums[last[sums] < 0][0]))} has no dependency whose output could be encoded"
        )
    encoded, (waiting, came) = last[sums], _waiting(plan, sums, computing)
    missing = (waiting < 0) & ~((plan.queue[sums] >= 0) & (plan.step[sums] == plan.n_steps - 1))
    if decodes and missing.any():
        raise ConfigError(f"plan: {plan.task(int(sums[missing][0]))}: no task on the device of its rank depends on it")
    waited = np.flatnonzero(waiting >= 0) if decodes else sums[:0]
    before = np.concatenate([encoded + 1, waiting[waited]])
    summed = np.concatenate([sums, sums[waited]])
    n = len(sums)
    columns: dict[str, Ints | int] = {
        "lane": plan.lane[np.concatenate([encoded, waiting[waited]])],
        "step": np.concatenate([plan.step[encoded], plan.step[waiting[waited]]]),
        "name": len(plan.names) + np.repeat([0, 1], [n, len(waited)]),
        "part": plan.part[summed],
        "every": plan.every[summed],
    }
    order = np.lexsort((summed, before))
    columns = {name: value[order] if isinstance(value, np.ndarray) else value for name, value in columns.items()}
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    arrived = came[waited] if together else sums[waited]
    return inserted(plan, (ENCODE, DECODE), before[order], columns, (place[n:], arrived), (sums, place[:n]))


def with_samples(plan: Plan, name: str) -> Plan:
    """Return a plan in which ranks wait for the samples of a micro-batch, in a task of zero seconds, before its pass
    through the first layer. Recomputed passes do not wait."""
    rows = np.flatnonzero((plan.kind == FORWARD) & (plan.first == 0))
    width = int(plan.batch.max(initial=0)) + 2
    pairs = (plan.step[rows] * plan.n_ranks + plan.rank[rows]) * width + plan.batch[rows] + 1
    rows = rows[np.sort(np.unique(pairs, return_index=True)[1])]
    columns = {"lane": plan.lane[rows], "step": plan.step[rows], "name": len(plan.names)}
    return inserted(plan, (name,), rows, columns, (_NONE, _NONE), (rows[:0], rows[:0]))


def with_fixed_costs(plan: Plan, step: float, call: float) -> Plan:
    """Return a plan in which every rank begins a step with `step` s of work of its host, and collectives that no queue
    launches take `call` s before their first message.

    The host's work waits for the dependencies of the rank's first task on earlier steps. Collectives that need nothing
    else of the step, such as the first gathers, wait for the host.
    """
    if step:
        rows = np.flatnonzero(plan.on_device)
        firsts = np.sort(rows[np.unique(plan.lane[rows] * plan.n_steps + plan.step[rows], return_index=True)[1]])
        row, need = plan.needing, plan.needs
        at_once = np.setdiff1d(plan.collectives, row[plan.step[need] == plan.step[row]])
        of_step = plan.rank * plan.n_steps + plan.step
        place, first = np.nonzero(of_step[at_once, None] == of_step[firsts])
        host = {"seconds": step}  # in every step, even if its first task is not
        plan = _before(plan, "host", firsts, host, plan.step[need] < plan.step[row], (at_once[place], first))
    rows = plan.collectives[plan.queue[plan.collectives] < 0]
    columns = {"seconds": call, "every": plan.every[rows]}
    return _before(plan, "call", rows, columns, True, (_NONE, _NONE)) if call else plan


def _before(
    plan: Plan, name: str, rows: Ints, columns: dict[str, Any], which: Bools | bool, needed: tuple[Ints, Ints]
) -> Plan:
    """Return a plan with work directly before some rows, on their lanes, with the dependencies chosen by `which`."""
    row, need = plan.needing, plan.needs
    same = np.isin(row, rows) & which
    columns = {"lane": plan.lane[rows], "step": plan.step[rows], "name": len(plan.names), **columns}
    return inserted(plan, (name,), rows, columns, (np.searchsorted(rows, row[same]), need[same]), needed)


def _waiting(plan: Plan, sums: Ints, computing: Bools) -> tuple[Ints, Ints]:
    """Return the first task of its rank's device that waits for each sum, or for a later one of its lane if that has an
    order (-1: none), and the last sum that this waits for, (n_sums,) each."""
    is_sum, first, latest = set(sums.tolist()), dict[int, int](), dict[int, int]()
    for row in np.unique(plan.needing[computing[plan.needing]]).tolist():
        needs = plan.needs_of(row)
        if plan.queues:  # also through an update on the stream
            needs += [need for other in needs if not computing[other] for need in plan.needs_of(other)]
        waited = [need for need in needs if need in is_sum]
        latest[row] = max(waited, default=-1)
        for need in waited:
            first.setdefault(need, row)
    of_lane: dict[int, int] = {}
    for need in sorted(is_sum, reverse=True) if not plan.queues else ():
        lane = int(plan.lane[need])
        own = [rows[at] for rows, at in ((first, need), (of_lane, lane)) if at in rows]
        if own:
            first[need] = of_lane[lane] = min(own)
    tasks = [first.get(need, -1) for need in sums.tolist()]
    return np.array(tasks, dtype=np.int64), np.array([latest.get(task, -1) for task in tasks], dtype=np.int64)


def inserted(
    plan: Plan,
    names: tuple[str, ...],
    before: Ints,
    columns: dict[str, Any],
    needing: tuple[Ints, Ints],
    needed: tuple[Ints, Ints],
    chain: tuple[Ints, Ints] = (_NONE, _NONE),
) -> Plan:
    """Return a plan with new rows, each before one of the old rows (in order); they are work, except for the given
    `columns`.

    needing  (new rows, old rows that they need)
    needed   (old rows, new rows that they need)
    chain    (new rows, new rows that they need)
    """
    n, added = len(plan), before + np.arange(len(before))
    number = np.arange(n) + np.searchsorted(before, np.arange(n), side="right")  # new numbers of the old rows
    changed: dict[str, Any] = {}
    for name in COLUMNS:
        old = getattr(plan, name)
        changed[name] = np.empty(n + len(before), dtype=old.dtype)
        changed[name][number], changed[name][added] = old, columns.get(name, _WORK.get(name))
    row, need = plan.needing, plan.needs
    after = np.concatenate([number[row], added[needing[0]], number[needed[0]], added[chain[0]]])
    first = np.concatenate([number[need], number[needing[1]], added[needed[1]], added[chain[1]]])
    offsets, needs = csr(after, first, len(changed["lane"]))
    return dataclasses.replace(plan, names=(*plan.names, *names), need_offsets=offsets, needs=needs, **changed)


class Task(NamedTuple):
    """A task that replaces another one: the columns that differ, and the indices of the replacements that it needs; if
    there are none, it inherits the dependencies of the replaced task."""

    columns: Mapping[str, float]
    after: Sequence[int] = ()


def expanded(plan: Plan, tasks: Mapping[int, Sequence[Task]], **fields: Any) -> Plan:
    """Return a plan in which several tasks replace each of some rows, with other `fields` (lanes, groups, ...).

    Successors of a replaced row depend on those replacements that no other replacement needs. Keys can be any numbers.
    """
    counts = np.ones(len(plan), dtype=np.int64)
    counts[list(tasks)] = [len(each) for each in tasks.values()]
    begin = np.cumsum(counts) - counts
    source = np.repeat(np.arange(len(plan)), counts)
    column: dict[str, Any] = {name: getattr(plan, name)[source] for name in COLUMNS}
    firsts, ends, pairs = dict[int, list[int]](), dict[int, list[int]](), list[tuple[int, int]]()
    for old, each in tasks.items():
        at = int(begin[old])
        for place, task in enumerate(each, at):
            for name, value in task.columns.items():
                column[name][place] = value
            pairs += [(place, at + need) for need in task.after]
        firsts[old] = [place for place, task in enumerate(each, at) if not task.after]
        needed = {need for task in each for need in task.after}
        ends[old] = [at + place for place in range(len(each)) if place not in needed]
    row, need = plan.needing, plan.needs
    plain = ~np.isin(row, list(tasks)) & ~np.isin(need, list(tasks))
    for a, b in zip(row[~plain].tolist(), need[~plain].tolist(), strict=True):
        pairs += [(i, j) for i in firsts.get(a, [int(begin[a])]) for j in ends.get(b, [int(begin[b])])]
    more = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    after = np.concatenate([begin[row[plain]], more[0]])
    before = np.concatenate([begin[need[plain]], more[1]])
    keys = np.unique(column["key"][column["key"] >= 0])
    column["key"] = np.where(column["key"] >= 0, np.searchsorted(keys, column["key"]), -1)
    offsets, needs = csr(after, before, len(source))
    return dataclasses.replace(plan, need_offsets=offsets, needs=needs, **column, **fields)
