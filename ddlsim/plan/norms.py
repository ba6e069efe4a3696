"""Norms of layers, for rules such as LARS and LAMB, that ranks with the same parameters share out among themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_GATHER, COLUMNS, COMPUTE, UPDATE, Floats, Ints, Lane, Plan
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import FP32_NBYTES

NORMS = "layer norms"


def with_shared_norms(plan: Plan, workloads: Sequence[Workload]) -> Plan:
    """Return the plan in which each of N ranks computes an N-th of the layers' norms before it updates, and an
    all-gather brings everybody one fp32 number for each tensor (Shi et al. 2021, arXiv:2010.10458, "parallel tensor
    operator").

    workloads  of each rank; an update takes their time without the norms, which are shared out evenly

    Raises ConfigError for a rule without norms, and for a plan that updates layers one by one.
    """
    computing = np.array([lane.name == "compute" for lane in plan.lanes])
    updates = plan.rows(UPDATE)
    n_ranks = len(workloads)
    if any(workload.norms <= 0.0 for workload in workloads):
        rule = workloads[0].rule
        why = "no optimizer is given" if rule is None else f"{rule} has no norms of layers"
        raise ConfigError(f"shared_norms: {why}; train with LARS or LAMB, or leave it out")
    if not computing[plan.lane[updates]].all() or len(updates) != n_ranks * plan.n_steps:
        raise ConfigError(
            "shared_norms: layers are updated one by one, as their gradients arrive, so that there is no time at which "
            "their norms could be gathered together; use another overlap than 'priority', such as 'ddp'"
        )
    rank, step = plan.rank[updates], plan.step[updates]
    n, added = len(plan), 2 * len(updates)
    number = np.arange(n) + 2 * np.searchsorted(updates, np.arange(n), side="right")  # of the old rows
    work = number[updates] - 2
    norms = np.array([workload.norms for workload in workloads])
    nbytes = FP32_NBYTES * len(workloads[0].tensor_layer)
    fields: dict[str, tuple[Ints | Floats | float, Ints | Floats | float]] = {  # of the work, of the all-gather
        "lane": (plan.lane[updates], len(plan.lanes) + rank), "kind": (COMPUTE, ALL_GATHER),
        "name": (len(plan.names), len(plan.names)), "seconds": (norms[rank] / n_ranks, 0.0), "nbytes": (0.0, nbytes),
        "peer": (-1, _everybody(plan, n_ranks)), "key": (-1, _keys_before(plan, step + 1) + step), "step": (step, step),
        "batch": (-1, -1), "first": (0, 0), "end": (0, 0), "part": (-1, -1), "holds": (0.0, 0.0),
    }  # fmt: skip
    columns = {}
    for name in COLUMNS:
        old = getattr(plan, name)
        column = columns[name] = np.empty(n + added, dtype=old.dtype)
        column[number], column[work], column[work + 1] = old, *fields[name]
    columns["seconds"][number[updates]] -= norms[rank]
    columns["key"][number] = np.where(plan.key >= 0, plan.key + plan.step, -1)  # one more in each step before
    row = np.repeat(np.arange(n), np.diff(plan.need_offsets))
    waits = np.isin(row, updates)
    place = np.searchsorted(updates, row[waits])
    after = np.concatenate([number[row], work[place], work + 1, number[updates]])
    before = np.concatenate([number[plan.needs], number[plan.needs[waits]], work, work + 1])
    order = np.argsort(after, kind="stable")
    return dataclasses.replace(
        plan, lanes=(*plan.lanes, *(Lane(r, "norms") for r in range(n_ranks))), names=(*plan.names, NORMS),
        need_offsets=np.concatenate([[0], np.cumsum(np.bincount(after, minlength=n + added))]), needs=before[order],
        **columns,  # type: ignore[arg-type]  # columns only
    )  # fmt: skip


def _everybody(plan: Plan, n_ranks: int) -> int:
    """Return the group of all ranks."""
    return next(i for i, group in enumerate(plan.groups) if sorted(group) == list(range(n_ranks)))


def _keys_before(plan: Plan, step: Ints) -> Ints:
    """Return how many keys the steps before each have, (n,): a step's keys come before those of the next."""
    ends = np.zeros(plan.n_steps + 1, dtype=np.int64)
    np.maximum.at(ends, plan.step + 1, plan.key + 1)
    counts: Ints = np.maximum.accumulate(ends)[step]
    return counts
