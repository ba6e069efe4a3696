"""All-gathers of updated weights that overlap the forward passes of the next step."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddlsim.plan.plan import ALL_GATHER, COLUMNS, FORWARD, Floats, Ints, Plan
from ddlsim.plan.rows import csr
from ddlsim.workload.compute import Workload


def gathered_as(plan: Plan, workload: Workload, param_dtype: str | None = None) -> Plan:
    """Return a plan whose weights are gathered in this dtype, by default that of the computation, whatever the dtype of
    the gradient sums."""
    element = workload.gradient_nbytes / max(1.0, workload.model.gradient_nbytes(1))
    if not element:
        return plan
    each = [workload.gathered_nbytes(part.first, part.end, param_dtype) for part in plan.parts]
    share = np.where(plan.kind == ALL_GATHER, np.take([*each, element], plan.part) / element, 1.0)
    return dataclasses.replace(plan, nbytes=share * plan.nbytes)


def gathers_beside_forward(plan: Plan, forward: Floats) -> Plan:
    """Return a pipeline's plan in which a forward pass waits only for the weights of its layers.

    forward  seconds of each layer, (n_layers,)

    The first forward pass of a step through each chunk is split where parts begin, and each piece waits only for the
    parts that begin there, as with Megatron-LM's ``overlap_param_gather``
    (megatron/core/distributed/distributed_data_parallel.py: a module's pre-forward hook waits for its bucket).
    """
    gathers = plan.rows(ALL_GATHER)
    gathers = gathers[plan.part[gathers] >= 0]
    if not len(gathers):
        return plan
    passes = plan.rows(FORWARD)
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
    kept = ~(np.isin(needed, gathers) & (plan.kind[by] == FORWARD))
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
