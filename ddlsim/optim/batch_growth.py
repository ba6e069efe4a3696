"""Larger batches instead of smaller learning rates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ddlsim.arguments import Count, Positive, checked
from ddlsim.errors import ConfigError


@checked
@dataclass(frozen=True)
class GrowingBatch:
    """A batch of `base` samples that grows by `factor` at each milestone (epochs), to `largest` at most.

    With SGD's noise scale eta n_samples / batch, this anneals like dividing the rate by `factor` does (Smith,
    Kindermans, Ying and Le 2018, arXiv:1711.00489, section 3), in fewer updates.
    """

    base: Count
    milestones: tuple[Positive, ...]
    factor: Count = 2
    largest: Count | None = None

    def __post_init__(self) -> None:
        if self.largest is not None and self.largest < self.base:
            raise ConfigError(f"GrowingBatch: largest = {self.largest}: must be at least base = {self.base}")
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"GrowingBatch: milestones = {self.milestones}: must be epochs above 0 that increase")

    def batch_size(self, epoch: float) -> int:
        """Return the samples of a batch at `epoch`."""
        size: int = self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)
        return size if self.largest is None else min(size, self.largest)
