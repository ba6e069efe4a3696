"""The plan of a run's step, and how long its tasks take in that run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.run.experiment import Experiment
from ddlsim.runtime.worker import factors
from ddlsim.strategies.plans import plan_of
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.stage import micro_batches

__all__ = ["least_seconds", "plan_of_run"]

Floats = npt.NDArray[np.float64]


def plan_of_run(experiment: Experiment, workloads: Sequence[Workload], steps: int = 1) -> Plan:
    """Return what the workers of a run do in its first `steps` steps, without jitter and slow-downs.

    Raises ConfigError where that is not a table yet.
    """
    if experiment.compression is not None:
        raise ConfigError("plan: the step with compression is not a table yet; leave compression out to see it")
    n_batches = micro_batches(experiment.strategy, experiment.batch_size, len(workloads), experiment.accumulation)
    return plan_of(experiment.strategy, workloads, steps, n_batches)


def least_seconds(plan: Plan, experiment: Experiment) -> Floats:
    """Return the s that the work of each task takes at least in a run, with the factors that its workers draw, (n,).

    Of slow-downs only those count that are none. A worker draws a factor for every micro-batch (`Worker.begin_step`);
    where the plan's micro-batches are not done one after the other, as many as the accumulation in a step, the least
    that it draws stands for all.
    """
    seconds = math.prod(min(slow.factor, 1.0) for slow in experiment.slow_downs) * plan.seconds
    if isinstance(experiment.jitter, NoJitter):
        return seconds
    by_rank = np.argsort(plan.rank, kind="stable")
    for rows in np.split(by_rank, np.flatnonzero(np.diff(plan.rank[by_rank])) + 1):
        rank, batch = int(plan.rank[rows[0]]), plan.batch[rows]
        steps = int(plan.step[rows].max(initial=-1)) + 1
        n = steps * experiment.accumulation
        drawn = np.array(list(itertools.islice(factors(experiment.jitter, experiment.seed, rank), n)))
        mark = np.where(batch >= 0, plan.step[rows] * (int(plan.batch.max(initial=0)) + 1) + batch, -1)
        current = mark[np.maximum.accumulate(np.where(mark >= 0, np.arange(len(rows)), 0))]
        begins = np.flatnonzero(np.diff(current, prepend=-1) != 0)
        several = len(np.unique(current[begins])) < len(begins) or len(begins) != n
        nth = np.searchsorted(begins, np.arange(len(rows)), side="right") - 1
        seconds[rows] *= min(1.0, float(drawn.min(initial=1.0))) if several else drawn[nth]
    return seconds
