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

#: collectives of what is compressed
SUMS = (ALL_REDUCE, REDUCE_SCATTER, PUSH_PULL)


def encode_seconds(
    plan: Plan, experiment: Experiment, workloads: Sequence[Workload], hosts: Sequence[int] | Ints
) -> Floats:
    """Return the s of encoding that each task takes besides in a run that compresses, at least, (n,): a part that is
    summed is encoded with the last task that its sum needs of the device.

    hosts  (n_workers,) the machine of each worker, or its innermost group in the network: where gradients are
           compressed between machines only, every worker of a machine encodes its share
    """
    seconds = np.zeros(len(plan))
    choice = compression_of(experiment.compression)
    if choice is None:
        return seconds
    sums = np.flatnonzero(np.isin(plan.kind, SUMS) & (plan.part >= 0) & ~np.isin(plan.rank, plan.servers))
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    computing = plan.on_device
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
    """Return a lower bound on the seconds of each task, its work and `besides`, in a run of `n_workers`, with the
    factors that they draw, (n,).

    Of slow-downs only those count that are none. A worker draws a factor for every micro-batch; where one begins before
    another has ended, as in pipelines, that of the micro-batch counts for its passes, and for all else the least of the
    step.
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
        if len(batches) == len(begins) == steps * per_step:  # one after the other
            nth = np.searchsorted(begins, np.arange(len(rows)), side="right") - 1
            seconds[rows] *= drawn[nth]
        elif len(batches) == steps * per_step:
            least = drawn.reshape(steps, per_step).min(axis=1)[plan.step[rows]]
            seconds[rows] *= np.where(own >= 0, drawn[np.searchsorted(batches, own)], least)
        else:
            seconds[rows] *= min(1.0, float(drawn.min(initial=1.0)))
    return seconds
