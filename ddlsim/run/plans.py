"""Lower bounds on the times of a plan's tasks in a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.compression.choice import compression_of
from ddlsim.plan import Plan
from ddlsim.plan.plan import ALL_REDUCE, PUSH_PULL, REDUCE_SCATTER
from ddlsim.run.experiment import Experiment
from ddlsim.runtime.codec import Seconds, rounded
from ddlsim.runtime.communicator import hierarchical
from ddlsim.runtime.worker import factors
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import NoJitter

#: collectives that can be compressed
SUMS = (ALL_REDUCE, REDUCE_SCATTER, PUSH_PULL)


def encode_seconds(
    plan: Plan, experiment: Experiment, workloads: Sequence[Workload], hosts: Sequence[int] | Ints
) -> Floats:
    """Return a lower bound on the additional encoding time of each task in s, (n,), in a run with compression. A part
    that is reduced is encoded with the last of the device's tasks that the reduction depends on.

    hosts  (n_workers,) the machine of each worker, or its innermost group in the network: if gradients are compressed
           only between machines, every worker of a machine encodes its share
    """
    seconds = np.zeros(len(plan))
    choice = compression_of(experiment.compression)
    if choice is None:
        return seconds
    sums = np.flatnonzero(np.isin(plan.kind, SUMS) & (plan.part >= 0) & ~np.isin(plan.rank, plan.servers))
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    computing = np.array([lane.name == "compute" for lane in plan.lanes])[plan.lane]
    last = np.full(len(plan), -1)
    of_device = computing[plan.needs]
    np.maximum.at(last, row[of_device], plan.needs[of_device])
    sums = sums[last[sums] >= 0]
    share, strategy = 1, contract.of(experiment.strategy)
    fabric = strategy.collectives().fabric
    shared = not plan.servers if fabric is None else hierarchical(fabric.algorithm)
    if shared and choice.compressor.traits.collective == "all_gather":
        share = int(np.unique(hosts, return_counts=True)[1].max())
    pieces, encode = max(len(plan.servers), 1), Seconds(choice).encode
    different = list({id(workload): workload for workload in workloads}.values())
    least = np.array(
        [
            [pieces * encode(workload, rounded(part.nbytes) // (share * pieces), 0.0) for part in plan.parts]
            for workload in different
        ]
    )
    which = np.array([next(i for i, one in enumerate(different) if one is workload) for workload in workloads])
    np.add.at(seconds, last[sums], least[which[plan.rank[sums]], plan.part[sums]])
    return seconds


def least_seconds(plan: Plan, experiment: Experiment, besides: Floats, n_workers: int) -> Floats:
    """Return a lower bound on the time of each task in s, (n,): its work and `besides`, with the sampled jitter
    factors.

    Only slowdowns with factors below 1 count. A worker samples one factor per micro-batch. If micro-batches overlap, as
    in pipelines, a micro-batch's passes take its own factor, and all other tasks the smallest of the step.
    """
    seconds = math.prod(min(slow.factor, 1.0) for slow in experiment.slowdowns) * (plan.seconds + besides)
    if isinstance(experiment.jitter, NoJitter):
        return seconds
    width = int(plan.batch.max(initial=0)) + 1
    mark = np.where(plan.batch >= 0, plan.step * width + plan.batch, -1)
    by_rank = np.argsort(plan.rank, kind="stable")
    each = np.split(by_rank, np.flatnonzero(np.diff(plan.rank[by_rank])) + 1)
    steps = int(plan.step.max(initial=-1)) + 1
    per_step = max(len(np.unique(mark[rows][mark[rows] >= 0])) for rows in each) // max(steps, 1)
    for rows in each:
        rank = int(plan.rank[rows[0]])
        drawn = factors(experiment.jitter, experiment.seed, rank).take(steps * per_step)
        own = mark[rows]
        current = own[np.maximum.accumulate(np.where(own >= 0, np.arange(len(rows)), 0))]
        begins = np.flatnonzero(np.diff(current, prepend=-1) != 0)
        batches = np.unique(own[own >= 0])
        if len(batches) == len(begins) == steps * per_step:  # sequential micro-batches
            nth = np.searchsorted(begins, np.arange(len(rows)), side="right") - 1
            seconds[rows] *= drawn[nth]
        elif len(batches) == steps * per_step:
            least = drawn.reshape(steps, per_step).min(axis=1)[plan.step[rows]]
            seconds[rows] *= np.where(own >= 0, drawn[np.searchsorted(batches, own)], least)
        else:
            seconds[rows] *= min(1.0, float(drawn.min(initial=1.0)))
    return seconds
