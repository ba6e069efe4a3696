"""Checks of strategies with a global batch, and of optimizers that update shards of tensors."""

from __future__ import annotations

from ddlsim.errors import ConfigError
from ddlsim.runtime.context import RunContext
from ddlsim.workload.optimizer_rules import NORMS, rule_of


class DealtOut:
    """Strategies with a global batch, divided evenly among the workers; a step is an update."""

    micro_batches: int = 1

    def default_batch_size(self, n_workers: int) -> int:
        """Return the batch size with one sample per worker."""
        return n_workers * self.micro_batches

    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Return the samples that a worker computes at once. Raises ConfigError for a batch that cannot be divided
        evenly."""
        n = n_workers * self.micro_batches
        if batch_size % n:
            near = sorted({max(batch_size // n, 1) * n, -(-batch_size // n) * n})
            several = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            raise ConfigError(
                f"batch_size = {batch_size}: must be a multiple of {n} ({n_workers} workers{several}) with "
                f"{type(self).__name__}; use {' or '.join(map(str, near))}"
            )
        return batch_size // n


def whole_batch(accumulation: int, name: str) -> None:
    """Raise ConfigError for an `accumulation`, which the strategy `name` does not support."""
    if accumulation > 1:
        raise ConfigError(f"accumulation = {accumulation}: {name} does not accumulate gradients; use accumulation=1")


def check_shares(name: str, context: RunContext) -> None:
    """Raise ConfigError if the task's optimizer works layer by layer and is not one whose communication is modelled."""
    task = context.learner.task
    if task is not None and hasattr(task.optimizer, "with_bounds") and rule_of(task.optimizer) not in NORMS:
        raise ConfigError(
            f"{name}: the optimizer {type(task.optimizer).__name__} needs whole layers, but each rank holds only parts "
            "of them, and gathering them is not modelled; use AllReduce, or a bundled optimizer such as LAMB()"
        )
