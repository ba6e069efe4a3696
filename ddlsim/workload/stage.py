"""What a worker computes and holds of the model: all of it, or the part that its strategy gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ddlsim.arguments import Count, Share, checked
from ddlsim.errors import ConfigError
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


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a strategy that splits the model says of its steps without their plan.

    seconds  that the steps asked for take at least after the end of the step before them
    holds    tells what workers do that differ, and the bytes of activations that each holds at most
    limit    what sets this bound
    """

    seconds: float
    holds: Callable[[], Iterable[tuple[Stage, float]]]
    limit: str = "the pipeline's longest chain"


def stages_of(strategy: object, workloads: Sequence[Workload]) -> list[Stage]:
    """Return what each worker does under a strategy.

    workloads  of each worker, were it to compute the whole model

    A strategy says so with a method ``stage(workload, rank, n_workers) -> Stage`` (``stage_of`` where that name is
    another's); without one every worker is a full replica. Raises ConfigError for a method that returns something else.
    """
    n_workers = len(workloads)
    if callable(every := getattr(type(strategy), "stages", None)):  # at once, where a stage depends on other workers'
        return list(every(strategy, workloads))
    stage = getattr(strategy, "stage_of", None) or getattr(strategy, "stage", None)
    if stage is None:
        whole = {id(workload): Stage(workload) for workload in workloads}
        return [whole[id(workload)] for workload in workloads]
    stages = [stage(workload, rank, n_workers) for rank, workload in enumerate(workloads)]
    for rank, each in enumerate(stages):
        if not isinstance(each, Stage):
            raise ConfigError(
                f"{type(strategy).__name__}.stage: returned {each!r} for rank {rank}; must return a Stage, such as "
                "Stage(workload.cut(first, end))"
            )
    return stages


def shares_batch(strategy: object) -> bool:
    """Return whether the batch size is that of all workers together: the strategy's class has a method
    ``micro_batch_size``. A field of that name is none."""
    return callable(getattr(type(strategy), "micro_batch_size", None))


def at_once(strategy: object, batch_size: int, n_workers: int) -> int:
    """Return the samples that a worker computes at once.

    Those are the run's batch size, unless the strategy has a method ``micro_batch_size(batch_size, n_workers)``: then
    the batch size is that of all workers together. Raises ConfigError for a method that returns no such number.
    """
    if not shares_batch(strategy):
        return batch_size
    size = strategy.micro_batch_size(batch_size, n_workers)  # type: ignore[attr-defined]  # it has one
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{type(strategy).__name__}.micro_batch_size: returned {size!r} for batch_size = {batch_size}; must be a "
            "whole number of at least 1"
        )
    return size


def n_replicas(strategy: object, n_workers: int) -> int:
    """Return how many groups of workers learn from samples of their own: as many as workers, unless the strategy has a
    method ``n_replicas(n_workers)``."""
    replicas = getattr(strategy, "n_replicas", None)
    return n_workers if replicas is None else int(replicas(n_workers))


def micro_batches(strategy: object, batch_size: int, n_workers: int, accumulation: int) -> int:
    """Return how many (micro-)batches a worker computes for an update: those of the run's `accumulation`, and where the
    batch size is that of all workers together, what its replica needs of them for its share. Raises ConfigError for an
    `accumulation` there: the batch size is that of an update already."""
    if not shares_batch(strategy):
        return accumulation
    if accumulation > 1:
        raise ConfigError(
            f"accumulation = {accumulation}: the batch size of {type(strategy).__name__} is that of an update, of all "
            f"workers together; leave it out, or use batch_size={accumulation * batch_size}"
        )
    return batch_size // (at_once(strategy, batch_size, n_workers) * n_replicas(strategy, n_workers))


def n_copies(stages: Sequence[Stage], workloads: Sequence[Workload]) -> float:
    """Return how many copies of the model the workers are together, by the seconds of the passes that they compute."""
    return sum(
        1.0 if stage.workload is whole else _passes(stage.workload) / _passes(whole)
        for stage, whole in zip(stages, workloads, strict=True)
    )


def _passes(workload: Workload) -> float:
    return workload.forward_time + workload.backward_time
