"""The part of the model that one worker computes and stores: all of it, or what its strategy assigns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddlsim.arguments import Count, Share, checked
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory


@checked
@dataclass(frozen=True)
class Stage:
    """What one worker does in a (micro-)step, as :meth:`ddlsim.workload.compute.Workload.cut` returns it.

    workload  what it computes of a (micro-)batch, with its times, gradients and layers
    batches   (micro-)batches whose activations it keeps at the same time: those that have gone forward and not yet
              back. With p stages, GPipe keeps all of a step (Huang et al. 2019), 1F1B p - i at most on stage i,
              counted from 0 (Narayanan et al. 2019, PipeDream). A strategy that tells its plan need not say it: what
              the plan's tasks hold counts
    state     share of the optimizer's state that it keeps: momentum, and in mixed precision fp32 weights. 1 / N in ZeRO
              stage 1 (Rajbhandari et al. 2020)
    memory    what it needs, where the strategy knows better than :func:`~ddlsim.workload.memory.memory_of` does of the
              workload
    """

    workload: Workload
    batches: Count = 1
    state: Share = 1.0
    memory: Memory | None = None


def n_copies(stages: Sequence[Stage], workloads: Sequence[Workload]) -> float:
    """Return how many copies of the model the workers are together, by the seconds of the passes that they compute."""
    return sum(
        1.0 if stage.workload is whole else _passes(stage.workload) / _passes(whole)
        for stage, whole in zip(stages, workloads, strict=True)
    )


def _passes(workload: Workload) -> float:
    return workload.forward_time + workload.backward_time
