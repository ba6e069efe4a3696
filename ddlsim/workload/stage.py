"""The part of the model that one worker computes and stores: all of it, or what its strategy assigns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddlsim.arguments import Count, Share, checked
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory

T = TypeVar("T")


@checked
@dataclass(frozen=True)
class Stage:
    """The part of a (micro-)step of one worker, as :meth:`ddlsim.workload.compute.Workload.cut` returns it.

    workload  its computation per (micro-)batch: times, gradients and layers
    batches   (micro-)batches whose activations it keeps at the same time, between forward and backward pass. With p
              stages, GPipe keeps all of a step (Huang et al. 2019), and 1F1B at most p - i on stage i, counted from 0
              (Narayanan et al. 2019, PipeDream). If the strategy has a plan, the plan's tasks determine the activations
              instead
    state     share of the optimizer state that it keeps: momentum, and in mixed precision fp32 weights. 1 / N in ZeRO
              stage 1 (Rajbhandari et al. 2020)
    memory    its memory, if the strategy computes it better than :func:`~ddlsim.workload.memory.memory_of`
    """

    workload: Workload
    batches: Count = 1
    state: Share = 1.0
    memory: Memory | None = None


def for_each(workloads: Sequence[Workload], value_of: Callable[[Workload], T]) -> list[T]:
    """Return a value for each worker's workload; it is computed once for all workers with the same object."""
    values = {key: value_of(workload) for key, workload in {id(workload): workload for workload in workloads}.items()}
    return [values[id(workload)] for workload in workloads]


def n_copies(stages: Sequence[Stage], workloads: Sequence[Workload]) -> float:
    """Return the number of model copies that the workers represent together, by compute time of their passes."""
    return sum(
        1.0 if stage.workload is workload else _passes(stage.workload) / _passes(workload)
        for stage, workload in zip(stages, workloads, strict=True)
    )


def _passes(workload: Workload) -> float:
    return workload.forward_time + workload.backward_time
