"""Local steps and now and then an average as a plan: every rank updates its own model, and ranks average them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.draft import Draft
from ddlsim.plan.plan import COLUMNS, Part, Plan
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import activation_nbytes


@checked
def local_steps(workloads: Sequence[Workload], period: Count, steps: Count = 1, accumulation: Count = 1) -> Plan:
    """Return the plan of ranks that make `steps` steps by themselves, and all-reduce their parameters after every
    `period` of them (Stich 2019, arXiv:1805.09767, algorithm 1).

    workloads     of each rank
    accumulation  micro-batches of each rank in a step

    No gradients are summed over ranks, so :meth:`Plan.check`, which proves that they are, refuses it. Raises
    ConfigError for no workloads.
    """
    if not workloads:
        raise ConfigError("local_steps: workloads is empty; give one for each rank")
    different = {id(each): each for each in workloads}
    drafts = {key: _alone(each, period, steps, accumulation) for key, each in different.items()}
    plans = [drafts[id(each)] for each in workloads]
    n, rows, n_lanes = len(plans), len(plans[0]), len(plans[0].lanes)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in plans]) for name in (*COLUMNS, "needs")
    }
    rank = np.repeat(np.arange(n), rows)
    columns["lane"] += n_lanes * rank
    columns["batch"] += np.where(columns["batch"] >= 0, accumulation * rank, 0)
    columns["needs"] += rows * np.repeat(np.arange(n), len(plans[0].needs))
    counts = np.tile(np.diff(plans[0].need_offsets), n)
    return Plan(
        lanes=tuple(lane._replace(rank=r) for r in range(n) for lane in plans[0].lanes), groups=(tuple(range(n)),),
        parts=plans[0].parts, names=(), n_layers=plans[0].n_layers, need_offsets=np.cumsum([0, *counts.tolist()]),
        **columns,
    )  # fmt: skip


def _alone(workload: Workload, period: int, steps: int, accumulation: int) -> Plan:
    """Return the rows of one rank, as if it were alone."""
    layers = (0, len(workload.forward))
    stored = activation_nbytes(workload.model, workload.precision) * workload.batch_size
    draft = Draft(layers[1], [Part(workload.gradient_nbytes, *layers)])
    needs: list[int] = []
    for step in range(steps):
        for batch in range(accumulation):
            draft.work(
                0, workload.forward_time, kind="forward", step=step, batch=batch, layers=layers, needs=needs,
                holds=stored,
            )  # fmt: skip
            needs = []
            draft.work(0, workload.backward_time, kind="backward", step=step, batch=batch, layers=layers, holds=-stored)
        needs = [draft.work(0, workload.optimizer, kind="update", layers=layers, step=step)]
        if (step + 1) % period == 0:
            needs = draft.all_reduce([0], workload.gradient_nbytes, [needs], step=step)
    return draft.plan()
