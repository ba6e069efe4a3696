"""Data parallelism with sharded weights, gradients and optimizer state: ZeRO stage 3, FSDP and hybrid sharding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from ddlsim.arguments import Count, Index, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.data_parallel import each_rank
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.program import N_STEPS, Row, StepProgram, step_of, template_of
from ddlsim.plan.transforms import Together, with_partial_norms
from ddlsim.workload.compute import Workload
from ddlsim.workload.precision import GRADIENT_TYPES

_LANES = _COMPUTE, _GATHER, _STREAM = "compute", "gather", "stream"
_FREE = "reshard"


@checked
def fully_sharded(
    workloads: Workload | Sequence[Workload], n_ranks: Count | None = None, units: Sequence[Index] | None = None, *,
    accumulation: Count = 1, prefetch: Index = 1, reshard: bool = True, shard: Count | None = None,
    no_sync: bool = True, param_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] | None = None,
) -> StepProgram:  # fmt: skip
    """Return the step program for fully sharded training (ZeRO stage 3, PyTorch FSDP).

    Weights, gradients and optimizer state are sharded over the ranks (Rajbhandari et al. 2020, arXiv:1910.02054; Zhao
    et al. 2023, arXiv:2304.11277).

    workloads     workload of each rank, or a single workload for all `n_ranks` ranks
    n_ranks       number of ranks; required if `workloads` is a single workload
    units         index of the first layer of each unit. The weights of a unit, such as a transformer block, are
                  gathered together. None: every layer with parameters begins a unit
    accumulation  number of micro-batches per rank and step; weights are gathered for each micro-batch
    prefetch      number of units that may be gathered ahead of the computation; 0: a unit is gathered when the previous
                  unit has been computed
    reshard       whether weights are freed after the forward pass and gathered again for the backward pass
                  ("FULL_SHARD"). False: they are kept ("SHARD_GRAD_OP")
    shard         size of a sharding group of consecutive ranks; None: all ranks. Several groups ("HYBRID_SHARD") are
                  replicas, which sum their shards of the gradients
    no_sync       whether gradients are accumulated locally and reduce-scattered only after the last micro-batch. False:
                  they are reduce-scattered after every micro-batch
    param_dtype   data type of the gathered weights; None: that of the computation

    A rank has the lanes "compute", "gather" (all-gathers) and "stream" (sums). The all-gather of unit l starts when the
    previous all-gather and the computation of unit l - 1 - prefetch have ended. Units hold their gathered weights from
    the earliest time at which they may be gathered until they have been computed. With LARS and LAMB, the ranks of a
    sharding group combine the norms before they update.

    Raises ConfigError for units that are not layers, and if `shard` does not divide the number of ranks.
    """
    by_rank = each_rank(workloads, n_ranks)
    workload, n_ranks = by_rank[0], len(by_rank)
    size = n_ranks if shard is None else shard
    if n_ranks % size:
        divisors = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
        near = [max(n for n in divisors if n < size), *(n for n in divisors if n > size)][:2]
        raise ConfigError(
            f"fully_sharded: shard = {size}: must divide the number of ranks, {n_ranks}; use "
            f"{' or '.join(map(str, near))}"
        )
    parts = _units(workload, units)
    elements = [workload.gathered_nbytes(part.first, part.end, param_dtype) for part in parts]
    rows_of = functools.partial(
        _rows, parts=parts, n_ranks=n_ranks, shard=size, accumulation=accumulation, prefetch=prefetch, reshard=reshard,
        no_sync=no_sync, elements=elements, replicas_last=workload.stack.replicas_last and workload.by_kernel,
    )  # fmt: skip
    ranks = np.arange(n_ranks)
    families = [ranks.reshape(-1, size).tolist(), ranks.reshape(-1, size).T.tolist()]

    def make(work: Workload) -> Plan:
        lanes = {(0, name): i for i, name in enumerate(_LANES)}
        step = step_of(rows_of(work), lanes)
        plan = template_of(
            [step] * N_STEPS, lanes, groups=[(0,), (0,)], parts=parts, n_layers=len(work.forward), names=(_FREE,)
        )
        return with_partial_norms(plan, [work], [Together((0,), len(work.tensor_layer), size)])

    return StepProgram.replicated(by_rank, make, accumulation, families)


def _units(workload: Workload, units: Sequence[Index] | None) -> tuple[Part, ...]:
    n_layers = len(workload.forward)
    begins = [0, *np.flatnonzero(workload.grad_nbytes > 0.0).tolist()[1:]] if units is None else list(units)
    if not begins or begins[0] != 0 or any(b <= a for a, b in zip(begins, [*begins[1:], n_layers], strict=True)):
        raise ConfigError(
            f"fully_sharded: units = {begins}: must be an increasing list of layer numbers that starts at 0 and stays "
            f"below {n_layers}, the number of layers in {workload.model.name}"
        )
    ends = [*begins[1:], n_layers]
    nbytes = [float(workload.grad_nbytes[a:b].sum()) for a, b in zip(begins, ends, strict=True)]
    for size, begin, end in zip(nbytes, begins, ends, strict=True):
        if not size and any(nbytes):
            raise ConfigError(
                f"fully_sharded: units = {begins}: layers {begin} to {end - 1} of {workload.model.name} have "
                f"no weights to gather; remove {begin or end} from the list"
            )
    return tuple(Part(size, a, b) for size, a, b in zip(nbytes, begins, ends, strict=True))


def _rows(
    workload: Workload, *, parts: Sequence[Part], n_ranks: int, shard: int, accumulation: int, prefetch: int,
    reshard: bool, no_sync: bool, elements: Sequence[float], replicas_last: bool,
) -> list[Row]:  # fmt: skip
    """Return the rows of a rank in a step: units forward, then backward, for every micro-batch.

    elements       average bytes of a gathered weight of each unit
    replicas_last  whether replicas sum shards after the backward pass
    """
    rows: list[Row] = []
    stored, n, last = stored_nbytes(workload), len(parts), accumulation - 1
    gradient = workload.gradient_nbytes / max(workload.model.gradient_nbytes(1), 1.0)
    weights = [part.nbytes / gradient * element for part, element in zip(parts, elements, strict=True)]
    copy_out, copy_in = workload.sharding_copies
    uses = [
        (micro, kind, unit)
        for micro in range(accumulation)
        for kind, order in ((ps.FORWARD, range(n)), (ps.BACKWARD, reversed(range(n))))
        for unit in order
    ]
    pending = [
        i for i, (_, kind, unit) in enumerate(uses) if weights[unit] and shard > 1 and (kind == ps.FORWARD or reshard)
    ]
    gather_of: dict[int, int] = {}
    sums: list[int] = []
    deferred: list[tuple[int, int]] = []  # units whose shards are summed over replicas after the backward pass

    def add(lane: str, kind: int, **more: Any) -> int:
        rows.append(Row(0, lane, kind, **more))
        return len(rows) - 1

    def gather(limit: int, after: int | None) -> float:
        """Gather the units that may be gathered after use `limit` - 1 - prefetch; return their bytes."""
        taken = 0.0
        while pending and pending[0] <= limit:
            use = pending.pop(0)
            micro, _, unit = uses[use]
            needs, of_unit = [] if after is None else [after], {"micro": micro, "part": unit, "group": 0}
            gather_of[use] = add(_GATHER, ps.ALL_GATHER, nbytes=weights[unit], needs=needs, **of_unit)
            taken += weights[unit]
        return taken

    def over_replicas(unit: int, needs: list[int]) -> int:
        """Add the all-reduce of a shard over sharding groups, if any; return the row with the result."""
        if shard == n_ranks:
            return needs[0]
        return add(_STREAM, ps.ALL_REDUCE, nbytes=parts[unit].nbytes / shard, part=unit, group=1, needs=needs)

    taken = gather(prefetch, None)
    for i, (micro, kind, unit) in enumerate(uses):
        part = parts[unit]
        layers = slice(part.first, part.end)
        times = workload.forward if kind == ps.FORWARD else workload.backward
        if taken:
            add(_COMPUTE, ps.COMPUTE, holds=taken)
        seconds, keeps = float(times[layers].sum()), float(stored[layers].sum())
        reduces = kind == ps.BACKWARD and part.nbytes and (micro == last or (shard > 1 and not no_sync))
        if shard > 1:
            seconds += part.nbytes * (copy_out * elements[unit] * (i in gather_of) + copy_in * bool(reduces))
        now = add(
            _COMPUTE, kind, seconds=seconds, micro=micro, first=part.first, end=part.end,
            holds=keeps if kind == ps.FORWARD else -keeps, needs=[gather_of[i]] if i in gather_of else [],
        )  # fmt: skip
        if reduces:
            of = -1 if micro == last else micro
            shard_of = now
            if shard > 1:
                shard_of = add(
                    _STREAM, ps.REDUCE_SCATTER, nbytes=part.nbytes, micro=of, part=unit, group=0, needs=[now]
                )
            if micro == last and replicas_last:
                deferred.append((unit, shard_of))
            elif micro == last:
                sums.append(over_replicas(unit, [shard_of]))
        taken = gather(i + 1 + prefetch, now)
        if shard > 1 and weights[unit] and (reshard or kind == ps.BACKWARD):
            taken -= weights[unit]
            if taken <= 0.0:
                add(_COMPUTE, ps.COMPUTE, holds=taken)
                taken = 0.0
    sums += [over_replicas(unit, [shard_of, now]) for unit, shard_of in deferred]
    add(_COMPUTE, ps.UPDATE, seconds=workload.optimizer / shard, end=len(workload.forward), needs=sums)
    for number, row in enumerate([row for row in rows if row.group >= 0]):
        row.number = number
    for row in rows:
        row.name = 0 if row.kind == ps.COMPUTE else -1
    for first in list(gather_of.values())[:1]:  # comes after the update of the previous step
        rows[first].needs.append((len(rows) - 1, 1))
    return rows
