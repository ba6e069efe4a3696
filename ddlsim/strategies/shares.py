"""Batches that are dealt out over all workers."""

from __future__ import annotations

from ddlsim.errors import ConfigError


def share_of(batch_size: int, n_workers: int, name: str) -> int:
    """Return the samples of a worker. Raises ConfigError, for the strategy `name`, where it is not a whole number."""
    if batch_size % n_workers:
        near = sorted({max(batch_size // n_workers, 1) * n_workers, -(-batch_size // n_workers) * n_workers})
        raise ConfigError(
            f"batch_size = {batch_size}: {name} deals it out over {n_workers} workers; use "
            f"{' or '.join(map(str, near))}"
        )
    return batch_size // n_workers


def whole_batch(accumulation: int, name: str) -> None:
    """Raise ConfigError for a batch that workers of the strategy `name` should take in several parts."""
    if accumulation > 1:
        raise ConfigError(f"accumulation = {accumulation}: {name} takes the whole batch at once; use 1")
