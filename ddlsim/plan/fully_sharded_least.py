"""What steps of ZeRO stage 3 (:mod:`ddlsim.plan.fully_sharded`) take at least, in closed form, without their plan.

Let rank s end a step last, at t0, with its update. It enters the first all-gather of the next step after that, which
ends for nobody of its group without its share. So all passes of s, the rest of what its group gathers and all that it
scatters come after t0, and the next step ends after them, whichever rank s is:

- s computes for all micro-batches, then what it brings to the last sum has to leave it, and somebody updates;
- the bytes cross the interfaces of the group's devices and machines (:mod:`ddlsim.plan.least`); of the sums over copies
  of the group those that leave.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.plan.interfaces import Interfaces, interfaces, known_rate
from ddlsim.plan.least import least_crossing
from ddlsim.plan.plan import Floats, Ints
from ddlsim.workload.compute import Workload


class Sharded(NamedTuple):
    """What a rank does in a step: s of all passes, s of its update, bytes of what is gathered but for the first unit,
    of what is scattered, and of the last of these; and of the gradients that copies sum."""

    passes: float
    update: float
    gathered: float
    scattered: float
    last: float
    summed: float


def costs_of(
    workload: Workload, units: Sequence[int], micro_batches: int, shard: int, *, reshard: bool, no_sync: bool,
    element: float,
) -> Sharded:  # fmt: skip
    """Return the costs of the steps that :func:`~ddlsim.plan.fully_sharded` writes with these arguments.

    units    layers with which units begin
    element  bytes of a weight that is gathered
    """
    part = np.add.reduceat(workload.grad_nbytes, np.array(units, dtype=np.int64))
    gradient = float(part.sum())
    weights = part / (workload.gradient_nbytes / max(workload.model.gradient_nbytes(1), 1.0)) * element
    first = float(weights[weights > 0.0][:1].sum())
    times = micro_batches * (1 + reshard)
    several = shard > 1
    return Sharded(
        micro_batches * (workload.forward_time + workload.backward_time), workload.optimizer / shard,
        several * (times * float(weights.sum()) - first), several * (1 if no_sync else micro_batches) * gradient,
        several * float(part[part > 0.0][:1].sum()), gradient,
    )  # fmt: skip


def least_step(costs: Sharded, shard: int, cluster: Cluster | None, nodes: Ints) -> float:
    """Return the s of a step, at least.

    shard    neighbours among `nodes` that share
    cluster  None: what travels may take no time
    """
    if cluster is None:
        return costs.passes + costs.update
    groups = nodes.reshape(-1, shard)
    ending, travel = np.zeros(len(groups)), np.zeros(len(groups))
    for level in _levels(cluster):
        for i, group in enumerate(groups):
            last, bytes_ = _crossing(costs, level, nodes, group)
            ending[i], travel[i] = max(ending[i], last), max(travel[i], bytes_)
    return float(np.maximum(costs.passes + ending + costs.update, travel).min())


def _crossing(costs: Sharded, level: Interfaces, nodes: Ints, group: Ints) -> tuple[float, float]:
    """Return the s in which the least of a group's places lets its share of the last sum out, and those in which the
    slowest one lets out and in what must cross its border."""
    alone = np.zeros(len(group), dtype=np.bool_)
    gather = least_crossing("all_gather", level.place[group], alone)
    scatter = least_crossing("reduce_scatter", level.place[group], alone)
    place, members = np.unique(level.place[group], return_counts=True)
    outside = np.array([bool((level.place[nodes] != each).any()) for each in place])
    leaves: Floats = members * outside * (costs.summed / len(group) if len(nodes) > len(group) else 0.0)
    out = 1.0 / known_rate(level.out, place)
    into = 1.0 / known_rate(level.into, place)
    goes = (costs.gathered * gather.out + costs.scattered * scatter.out + leaves) * out
    comes = (costs.gathered * gather.into + costs.scattered * scatter.into) * into
    return float((costs.last * scatter.out * out).min()), float(np.maximum(goes, comes).max())


@functools.lru_cache(maxsize=8)
def _levels(cluster: Cluster) -> tuple[Interfaces, Interfaces]:
    return interfaces(cluster)
