"""Distributed norms of layers for LARS and LAMB: each rank computes those of some layers or parts of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.inserted import inserted
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, COMPUTE, UPDATE, Lane, Plan
from ddlsim.plan.rows import key_ends, pairs
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import FP32_NBYTES

NORMS = "layer norms"
_TASK = {"lane": 0, "kind": COMPUTE, "seconds": 0.0, "nbytes": 0.0, "peer": -1, "key": -1, "step": 0}


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
    return _with_norms(plan, workloads, 1.0 / n_ranks, ALL_GATHER, [[everybody]])


def with_partial_norms(plan: Plan, workloads: Sequence[Workload], *rounds: Sequence[Together]) -> Plan:
    """Return the plan of ranks with parts of tensors: each computes the squared norms of its parts before its update,
    and all-reduces of two fp32 numbers per tensor, for the weights and for the step, add them up (as in NVIDIA Apex's
    DistributedFusedLAMB). A plan without norms is unchanged.

    workloads  of each rank
    rounds     consecutive all-reduces, by group; a rank takes part at most once per round

    Raises ConfigError for a plan that updates layers one by one.
    """
    sums = [
        [(ranks, 2.0 * FP32_NBYTES * n) for ranks, n, size in each if n and size > 1]
        for each in rounds
        if any(workload.norms > 0.0 for workload in workloads)
    ]
    sums = [each for each in sums if each]
    return _with_norms(plan, workloads, 1.0, ALL_REDUCE, sums) if sums else plan


def with_stage_norms(plan: Plan, workloads: Sequence[Workload], replicas: int) -> Plan:
    """:func:`with_partial_norms` for the template of a pipeline with sharded updates of each stage.

    workloads  of each stage, of the whole model
    """
    layer, together = workloads[0].tensor_layer[:, None], []
    for stage in range(plan.n_ranks) if any(workload.norms > 0.0 for workload in workloads) else ():
        rows = np.flatnonzero((plan.kind == UPDATE) & (plan.rank == stage) & (plan.step == 0))
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
    updates = plan.rows(UPDATE)
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
    sums = [(i, tuple(ranks), size) for i, each in enumerate(rounds) for ranks, size in each]
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
    whole = dataclasses.replace(
        plan,
        lanes=(*plan.lanes, *(Lane(r, "norms") for r in range(plan.n_ranks))),
        groups=tuple(groups),
        seconds=changed,
        key=np.where(plan.key >= 0, plan.key + plan.step * len(sums), -1),
    )
    columns: dict[str, Any] = {name: np.array([task[name] for task in tasks]) for name in _TASK}
    columns["name"] = len(plan.names)
    return inserted(whole, (NORMS,), np.array(before), columns, pairs(needing), pairs(needed), pairs(chain))
