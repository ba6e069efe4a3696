"""Transformations of plans.

They insert tasks (evaluations before steps, encoding and decoding of gradients, waits for the samples of a micro-batch,
fixed costs of steps and of collectives, norms of layers), let gathers of weights overlap forward passes, and turn
all-reduces into exchanges with parameter servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan import plan as ps
from ddlsim.plan.plan import COLUMNS, Bools, Floats, Ints, Lane, Plan
from ddlsim.plan.rows import csr, key_ends, pairs
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import FP32_NBYTES

ENCODE, DECODE = "encode", "decode"
#: collectives that sum encoded gradients
SUMMING = (ps.ALL_REDUCE, ps.REDUCE_SCATTER, ps.PUSH_PULL)
_WORK = {"kind": ps.COMPUTE, "seconds": 0.0, "nbytes": 0.0, "peer": -1, "key": -1, "batch": -1, "first": 0, "end": 0,
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
    rows = np.flatnonzero((plan.kind == ps.FORWARD) & (plan.first == 0))
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
        candidates = [rows[at] for rows, at in ((first, need), (of_lane, lane)) if at in rows]
        if candidates:
            first[need] = of_lane[lane] = min(candidates)
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
    counts[list(tasks)] = [len(row_tasks) for row_tasks in tasks.values()]
    begin = np.cumsum(counts) - counts
    source = np.repeat(np.arange(len(plan)), counts)
    column: dict[str, Any] = {name: getattr(plan, name)[source] for name in COLUMNS}
    firsts, ends, pairs = dict[int, list[int]](), dict[int, list[int]](), list[tuple[int, int]]()
    for old, row_tasks in tasks.items():
        at = int(begin[old])
        for place, task in enumerate(row_tasks, at):
            for name, value in task.columns.items():
                column[name][place] = value
            pairs += [(place, at + need) for need in task.after]
        firsts[old] = [place for place, task in enumerate(row_tasks, at) if not task.after]
        needed = {need for task in row_tasks for need in task.after}
        ends[old] = [at + place for place in range(len(row_tasks)) if place not in needed]
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


# ---------------------------------------------------------------- norms of layers
#
# For LARS and LAMB, each rank computes the norms of some layers or parts of tensors.


NORMS = "layer norms"
_TASK = {"lane": 0, "kind": ps.COMPUTE, "seconds": 0.0, "nbytes": 0.0, "peer": -1, "key": -1, "step": 0}


class Together(NamedTuple):
    """A group of a plan whose members each hold a part of some tensors; `size`: its number of ranks, several of which a
    place of a template can represent."""

    ranks: Sequence[int]
    n_tensors: int
    size: int


def with_shared_norms(plan: Plan, workloads: Sequence[Workload], n_ranks: int) -> Plan:
    """Return the plan in which each of N ranks computes 1/N of the layers' norms before its update, and an all-gather
    distributes one fp32 number per tensor (Shi et al. 2021, arXiv:2010.10458, "parallel tensor operator").

    workloads  of each place of the template; an update takes their time without the norms
    n_ranks    number of ranks that divide the norms evenly

    Raises ConfigError for a rule without norms, and for a plan that updates layers one by one.
    """
    if any(workload.norms <= 0.0 for workload in workloads):
        rule = workloads[0].rule
        why = "no optimizer is set" if rule is None else f"{rule} has no norms of layers"
        raise ConfigError(f"shared_norms: {why}; train with LARS or LAMB, or remove shared_norms")
    everybody = (0,), FP32_NBYTES * len(workloads[0].tensor_layer)
    return _with_norms(plan, workloads, 1.0 / n_ranks, ps.ALL_GATHER, [[everybody]])


def with_partial_norms(plan: Plan, workloads: Sequence[Workload], *rounds: Sequence[Together]) -> Plan:
    """Return the plan of ranks with parts of tensors: each computes the squared norms of its parts before its update,
    and all-reduces of two fp32 numbers per tensor, for the weights and for the step, add them up (as in NVIDIA Apex's
    DistributedFusedLAMB). A plan without norms is unchanged.

    workloads  of each rank
    rounds     consecutive all-reduces, by group; a rank takes part at most once per round

    Raises ConfigError for a plan that updates layers one by one.
    """
    sums = [
        [(ranks, 2.0 * FP32_NBYTES * n) for ranks, n, size in groups if n and size > 1]
        for groups in rounds
        if any(workload.norms > 0.0 for workload in workloads)
    ]
    sums = [groups for groups in sums if groups]
    return _with_norms(plan, workloads, 1.0, ps.ALL_REDUCE, sums) if sums else plan


def with_stage_norms(plan: Plan, workloads: Sequence[Workload], replicas: int) -> Plan:
    """:func:`with_partial_norms` for the template of a pipeline with sharded updates of each stage.

    workloads  of each stage, of the whole model
    """
    layer, together = workloads[0].tensor_layer[:, None], []
    for stage in range(plan.n_ranks) if any(workload.norms > 0.0 for workload in workloads) else ():
        rows = np.flatnonzero((plan.kind == ps.UPDATE) & (plan.rank == stage) & (plan.step == 0))
        updated = ((layer >= plan.first[rows]) & (layer < plan.end[rows])).any(axis=1)
        together.append(Together((stage,), int(updated.sum()), replicas))
    return with_partial_norms(plan, workloads, together)


def _with_norms(
    plan: Plan,
    workloads: Sequence[Workload],
    share: float,
    kind: int,
    rounds: Sequence[Sequence[tuple[Sequence[int], float]]],
) -> Plan:
    """Return the plan in which ranks compute norms and exchange them, before the first update of each step.

    workloads  of each rank: the share of an update that is norms
    share      of these norms that the rank computes itself
    rounds     consecutive collectives of a `kind`: groups and their bytes
    """
    updates = plan.rows(ps.UPDATE)
    if not plan.on_device[updates].all():
        raise ConfigError(
            "norms: layers are updated one by one as their gradients arrive, so their norms are never "
            "available together; use an overlap other than 'priority', such as 'ddp'"
        )
    of_update = np.array([w.norms / w.optimizer if w.optimizer > 0.0 else 0.0 for w in workloads])[plan.rank]
    of_ranks: dict[tuple[int, int], list[int]] = {}
    for row in updates.tolist():
        of_ranks.setdefault((int(plan.step[row]), int(plan.rank[row])), []).append(row)
    groups, ends = list(plan.groups), key_ends(plan).tolist()
    sums = [(i, tuple(ranks), size) for i, collectives in enumerate(rounds) for ranks, size in collectives]
    tasks: list[dict[str, float]] = []
    before, needing, needed, chain = list[int](), *(list[tuple[int, int]]() for _ in range(3))
    for (step, rank), rows in of_ranks.items():
        begin, seconds = len(tasks), share * sum((plan.seconds[rows] * of_update[rows]).tolist())
        tasks.append(_TASK | {"lane": int(plan.lane[rows[0]]), "seconds": seconds, "step": step})
        needing += [(begin, need) for row in rows for need in plan.needs_of(row)]
        for number, (_, ranks, size) in enumerate(sums):
            if rank in ranks:
                if ranks not in groups:
                    groups.append(ranks)
                key = ends[step + 1] + step * len(sums) + number  # after those of its step
                ends_of = {"kind": kind, "nbytes": size, "peer": groups.index(ranks), "key": key}
                chain.append((len(tasks), len(tasks) - 1))
                tasks.append(_TASK | {"lane": len(plan.lanes) + rank, "step": step} | ends_of)
        before += [rows[0]] * (len(tasks) - begin)
        needed.append((rows[0], len(tasks) - 1))
    changed = plan.seconds.copy()
    changed[updates] *= 1.0 - of_update[updates]
    extended = dataclasses.replace(
        plan,
        lanes=(*plan.lanes, *(Lane(r, "norms") for r in range(plan.n_ranks))),
        groups=tuple(groups),
        seconds=changed,
        key=np.where(plan.key >= 0, plan.key + plan.step * len(sums), -1),
    )
    columns: dict[str, Any] = {name: np.array([task[name] for task in tasks]) for name in _TASK}
    columns["name"] = len(plan.names)
    return inserted(extended, (NORMS,), np.array(before), columns, pairs(needing), pairs(needed), pairs(chain))


# ---------------------------------------------------------------- gathers of updated weights


def gathered_as(plan: Plan, workload: Workload, param_dtype: str | None = None) -> Plan:
    """Return a plan whose weights are gathered in this dtype, by default that of the computation, whatever the dtype of
    the gradient sums."""
    element = workload.gradient_nbytes / max(1.0, workload.model.gradient_nbytes(1))
    if not element:
        return plan
    gathered_nbytes = [workload.gathered_nbytes(part.first, part.end, param_dtype) for part in plan.parts]
    share = np.where(plan.kind == ps.ALL_GATHER, np.take([*gathered_nbytes, element], plan.part) / element, 1.0)
    return dataclasses.replace(plan, nbytes=share * plan.nbytes)


def gathers_beside_forward(plan: Plan, forward: Floats) -> Plan:
    """Return a pipeline's plan in which a forward pass waits only for the weights of its layers.

    forward  seconds of each layer, (n_layers,)

    The first forward pass of a step through each chunk is split where parts begin, and each piece waits only for the
    parts that begin there, as with Megatron-LM's ``overlap_param_gather``
    (megatron/core/distributed/distributed_data_parallel.py: a module's pre-forward hook waits for its bucket).
    """
    gathers = plan.rows(ps.ALL_GATHER)
    gathers = gathers[plan.part[gathers] >= 0]
    if not len(gathers):
        return plan
    passes = plan.rows(ps.FORWARD)
    _, at = np.unique(_place(plan, plan.step[passes], plan.rank[passes], plan.first[passes]), return_index=True)
    split = passes[at]
    starts = np.unique([part.first for part in plan.parts])
    begin = np.searchsorted(starts, plan.first[split], side="right")
    pieces = np.ones(len(plan), dtype=np.int64)
    pieces[split] += np.searchsorted(starts, plan.end[split], side="left") - begin
    row_of = np.cumsum([0, *pieces])
    source = np.repeat(np.arange(len(plan)), pieces)
    nth = np.arange(len(source)) - row_of[source]
    columns = {name: getattr(plan, name)[source] for name in COLUMNS}
    inner = np.zeros(len(plan), dtype=np.int64)
    inner[split] = begin
    later, earlier = np.flatnonzero(nth > 0), np.flatnonzero(nth < pieces[source] - 1)
    columns["first"][later] = starts[inner[source[later]] + nth[later] - 1]
    columns["end"][earlier] = starts[inner[source[earlier]] + nth[earlier]]
    columns["holds"][later] = 0.0
    until = np.cumsum([0.0, *forward])
    cut = np.flatnonzero(pieces[source] > 1)
    columns["seconds"][cut] = until[columns["end"][cut]] - until[columns["first"][cut]]

    needed, by = plan.needs, plan.needing
    kept = ~(np.isin(needed, gathers) & (plan.kind[by] == ps.FORWARD))
    of_split = np.flatnonzero(np.isin(source, split))
    waits, arrived = _waits(plan, gathers, columns, of_split)
    rows = np.concatenate([row_of[by[kept]], waits])
    needs = np.concatenate([row_of[needed[kept] + 1] - 1, row_of[arrived]])
    offsets, needs = csr(rows, needs, len(source))
    return dataclasses.replace(plan, **columns, needs=needs, need_offsets=offsets)


def _place(plan: Plan, step: Ints, rank: Ints, layer: Ints) -> Ints:
    """Return numbers in the order of step, rank and layer."""
    return np.asarray((step * plan.n_ranks + rank) * plan.n_layers + layer, dtype=np.int64)


def _waits(plan: Plan, gathers: Ints, columns: dict[str, Ints], of_split: Ints) -> tuple[Ints, Ints]:
    """Return the pieces of passes that wait for a gather of the previous step, and the row of that gather: pieces that
    begin with its part, or with a layer that shares these weights."""
    rank_of = np.array([lane.rank for lane in plan.lanes])[columns["lane"]]
    place = _place(plan, columns["step"][of_split], rank_of[of_split], columns["first"][of_split])
    order = np.argsort(place)
    waits, arrived = [], []
    for attribute in ("first", "tied"):
        layer = np.array([getattr(part, attribute) for part in plan.parts])[plan.part[gathers]]
        step, rank = plan.step[gathers] + 1, plan.rank[gathers]
        at = np.searchsorted(place[order], _place(plan, step, rank, layer), side="right") - 1
        row = of_split[order[np.maximum(at, 0)]]
        inside = (columns["step"][row] == step) & (rank_of[row] == rank)
        inside &= (columns["first"][row] <= layer) & (layer < columns["end"][row])
        waits.append(row[inside])
        arrived.append(gathers[inside])
    return np.concatenate(waits), np.concatenate(arrived)


# ---------------------------------------------------------------- parameter servers


@checked
def with_parameter_servers(plan: Plan, n_servers: Count = 1) -> Plan:
    """Return a plan that uses parameter servers instead of all-reduces.

    plan       plan with all-reduces over all ranks, and no other collectives
    n_servers  number of parameter servers, which become additional ranks after the workers

    Ranks push gradients to the servers and pull the sums (Li et al. 2014, OSDI, section 3). Each server stores an equal
    part of every buffer. On each server, all push-pulls run on the lane "server", in the order in which they first
    appear in the workers' tasks.

    Raises ConfigError if the plan already has servers, or collectives other than all-reduces over all ranks.
    """
    rows, n = plan.collectives, plan.n_ranks
    if plan.servers or (plan.kind[rows] != ps.ALL_REDUCE).any() or any(len(group) != n for group in plan.groups):
        raise ConfigError(
            "with_parameter_servers: the plan must have no servers, and no collectives other than all-reduces over all "
            "ranks"
        )
    _, first = np.unique(plan.key[rows], return_index=True)
    copied = rows[np.sort(first)]
    servers = tuple(range(n, n + n_servers))
    queue = int(plan.queue[copied[0]]) if len(copied) else -1
    lanes = (*plan.lanes, *(Lane(server, "server", queue) for server in servers))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(plan, name), *[getattr(plan, name)[copied]] * n_servers]) for name in COLUMNS
    }
    columns["lane"][len(plan) :] = np.repeat(len(plan.lanes) + np.arange(n_servers), len(copied))
    columns["kind"][columns["kind"] == ps.ALL_REDUCE] = ps.PUSH_PULL
    offsets = np.append(plan.need_offsets, np.full(n_servers * len(copied), plan.need_offsets[-1]))
    groups = tuple((*group, *servers) for group in plan.groups)
    return dataclasses.replace(plan, lanes=lanes, groups=groups, servers=servers, need_offsets=offsets, **columns)


class Service(NamedTuple):
    """Total bytes that a worker pushes to all servers and pulls from them; seconds of each server in between."""

    pushed: float
    pulled: float
    seconds: Sequence[float]


def as_messages(plan: Plan, services: Mapping[int, Service] = MappingProxyType({})) -> Plan:
    """Return a plan whose push-pulls are messages: each worker sends a part to every server, which answers all workers
    when it has received all parts.

    services  key of a push-pull -> service; by default its bytes, in no time
    """
    lanes = {lane: number for number, lane in enumerate(plan.lanes)}
    servers, n = set(plan.servers), len(plan.servers)
    tasks: dict[int, list[Task]] = {}

    def message(row: int, to: int, nbytes: float, kind: int, name: str) -> dict[str, float]:
        """Return the columns of one end of a message; both ends have the same key."""
        rank = int(plan.rank[row])
        ends = (rank, to) if kind == ps.SEND else (to, rank)
        key = (int(plan.key[row]) * plan.n_ranks + ends[0]) * plan.n_ranks + ends[1]
        lane = lanes.setdefault(Lane(rank, name), len(lanes))
        return {"kind": kind, "peer": to, "nbytes": nbytes / n, "key": len(plan) + key, "lane": lane, "part": -1}

    for row in plan.rows(ps.PUSH_PULL).tolist():
        nbytes = float(plan.nbytes[row])
        pushed, pulled, seconds = services.get(int(plan.key[row]), Service(nbytes, nbytes, (0.0,) * n))
        lane = plan.lanes[plan.lane[row]].name
        others = [rank for rank in plan.groups[plan.peer[row]] if (rank in servers) != (int(plan.rank[row]) in servers)]
        if int(plan.rank[row]) in servers:
            tasks[row] = [Task(message(row, to, pushed, ps.RECEIVE, f"{lane} {to}")) for to in others]
            arrived: Sequence[int] = range(len(others))
            if (needed := seconds[plan.servers.index(int(plan.rank[row]))]) > 0.0:
                work = {"kind": ps.COMPUTE, "seconds": needed, "nbytes": 0.0, "peer": -1, "key": -1, "part": -1}
                tasks[row].append(Task(work, arrived))
                arrived = [len(others)]
            tasks[row] += [Task(message(row, to, pulled, ps.SEND, f"{lane} {to}"), arrived) for to in others]
            continue
        tasks[row] = []
        for place, to in enumerate(others):
            tasks[row] += [
                Task(message(row, to, pushed, ps.SEND, f"{lane} {to}")),
                Task(message(row, to, pulled, ps.RECEIVE, f"{lane} {to}"), [2 * place]),
            ]
    return expanded(plan, tasks, lanes=tuple(lanes)) if tasks else plan
