"""What a worker would do alone with the whole model, without any communication: what speed-ups are measured by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlsim.run.experiment import Experiment
from ddlsim.workload.compute import Workload
from ddlsim.workload.stage import Stage, n_copies, n_replicas, shares_batch

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome


def alone(experiment: Experiment, workload: Workload, batches: float) -> float:
    """Return the samples/s of a worker that makes an update from so many `batches` (were its memory large enough)."""
    passes = workload.forward_time + workload.backward_time - workload.stall
    seconds = batches * passes + workload.optimizer
    return batches * workload.batch_size / (seconds * experiment.jitter.mean)


def batches_alone(result: Outcome, stages: Sequence[Stage]) -> float:
    """Return from how many batches a worker alone would make an update: a replica from its own of a step; where a model
    is shared out over workers, from those of one copy of the model."""
    strategy, batch_size = result.experiment.strategy, result.workloads[0].batch_size
    together = shares_batch(strategy)
    if not together and is_replicated(stages, result.workloads):
        return result.experiment.accumulation
    samples = result.updates_per_step * result.samples_per_update
    copies = n_replicas(strategy, result.n_workers) if together else n_copies(stages, result.workloads)
    return samples / copies / batch_size


def is_replicated(stages: Sequence[Stage], workloads: Sequence[Workload]) -> bool:
    """Return whether every worker computes the whole model."""
    return math.isclose(n_copies(stages, workloads), len(workloads), rel_tol=1e-9)
