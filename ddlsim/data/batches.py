"""The order in which a worker sees its samples: an endless sequence of shuffled passes over its shard."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddlsim.arguments import Index, Seed, checked
from ddlsim.data.dataset import Ints
from ddlsim.errors import ConfigError
from ddlsim.streams import stream


@dataclass
class _Draws:
    """Permutations are drawn one pass after the other."""

    generator: np.random.Generator
    next_pass: int = 0


@checked
@dataclass(eq=False)
class BatchStream:
    """Sample indices by position: pass e over the shard is shuffled by draw e of the stream (seed, rank, "batches").

    A position always means the same sample, whoever asks for what before. Batches run over the end of a pass,
    so all have the same size. Workers that should together see what one worker would see use the same shard,
    seed and rank and take turns: worker r of n takes ``indices((step * n + r) * size, size)``.
    """

    shard: Ints
    seed: Seed
    rank: Index = 0
    _passes: dict[int, Ints] = field(default_factory=dict, init=False, repr=False)
    _drawn: _Draws | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.shard.ndim != 1 or not len(self.shard):
            raise ConfigError(f"rank {self.rank}: its shard of shape {self.shard.shape} is empty; use fewer workers")

    def batch(self, step: int, size: int) -> Ints:
        """Return the indices of batch `step` (from 0) when all batches have `size` samples, shape (size,)."""
        return self.indices(step * size, size)

    def indices(self, first: int, count: int) -> Ints:
        """Return the sample indices at positions first .. first + count - 1, shape (count,)."""
        if first < 0 or count < 1:
            raise ConfigError(f"first = {first}, count = {count}: must be at least 0 and 1")
        n, parts = len(self.shard), []
        while count:
            number, offset = divmod(first, n)
            part = self._shuffled(number)[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def epoch(self, position: int) -> float:
        """Return how many passes lie before `position`."""
        return position / len(self.shard)

    def _shuffled(self, number: int) -> Ints:
        kept = self._passes.get(number)
        if kept is None:
            drawn = self._drawn
            if drawn is None or number < drawn.next_pass:
                drawn = self._drawn = _Draws(stream(self.seed, self.rank, "batches"))
            for _ in range(drawn.next_pass, number + 1):
                kept = self.shard[drawn.generator.permutation(len(self.shard))]
            drawn.next_pass = number + 1
            assert kept is not None
            if len(self._passes) > 1:  # two are enough: batches move forward
                self._passes.pop(min(self._passes))
            self._passes[number] = kept
        return kept
