"""What an exchange of compressed gradients gives, as pure functions of what the workers have encoded.

Workers encode one by one (the size of a message may have to be known before the others have theirs); the rest is
done once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from ddlsim.compression.contract import AnyCompressor, Payload, Vector
from ddlsim.compression.exchange import exchange, finish
from ddlsim.compression.hierarchy import hierarchical_exchange, shard_sizes
from ddlsim.compression.payloads import mean
from ddlsim.errors import ConfigError
from ddlsim.learning.learner import DivergedError
from ddlsim.workload.precision import FP32_NBYTES

#: a worker's (first) message, and its next state; or between machines, what it has before they meet
Encoded: TypeAlias = tuple[Payload | Vector, object]


@contextmanager
def diverging(what: str) -> Iterator[None]:
    """A vector that cannot be compressed (not finite, beyond half precision) means that the run has diverged."""
    try:
        yield
    except ConfigError as error:
        raise DivergedError(f"diverged: {what}: {error}") from None


@dataclass(frozen=True)
class Outcome:
    """mean    (n,) the gradient that every worker ends with
    states  every worker's state
    server  the parameter server's state
    answer  bytes of the server's message to each worker
    """

    mean: Vector
    states: Sequence[object]
    server: object = None
    answer: float = 0.0


class Averaging(Protocol):
    """How messages become a mean."""

    def start(self, n: int, n_workers: int, seed: int) -> Outcome:
        """Return the states before the first exchange of n elements."""

    def encode(self, gradient: Vector, state: object, rng: np.random.Generator) -> Encoded:
        """Return a worker's message."""

    def finish(self, encoded: Sequence[Encoded], before: Outcome, rngs: Sequence[np.random.Generator]) -> Outcome:
        """Return what comes of all workers' messages; one stream per worker, then the server's."""


@dataclass(frozen=True)
class Flat:
    """All workers by the compressor's own collective; `order` says who merges with whom in a tree."""

    compressor: AnyCompressor
    order: tuple[int, ...]

    def start(self, n: int, n_workers: int, seed: int) -> Outcome:
        return Outcome(np.zeros(n, np.float32), [self.compressor.init(n, seed) for _ in range(n_workers)])

    def encode(self, gradient: Vector, state: object, rng: np.random.Generator) -> Encoded:
        message: Encoded = self.compressor.encode(gradient, state, rng)
        return message

    def finish(self, encoded: Sequence[Encoded], before: Outcome, rngs: Sequence[np.random.Generator]) -> Outcome:
        if self.compressor.traits.collective != "gtopk_tree":
            done = finish(self.compressor, encoded)
            return Outcome(done.mean, done.states)
        done = finish(self.compressor, [encoded[rank] for rank in self.order])
        by_rank = dict(zip(self.order, done.states, strict=True))
        return Outcome(done.mean, [by_rank[rank] for rank in range(len(encoded))])


@dataclass(frozen=True)
class Served:
    """Every worker alone with the server, which averages what it decodes and answers with `down` (None: dense).

    With error feedback on both sides this is DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957, algorithm 1).
    """

    compressor: AnyCompressor
    down: AnyCompressor | None

    def start(self, n: int, n_workers: int, seed: int) -> Outcome:
        states = [self.compressor.init(n, seed) for _ in range(n_workers)]
        return Outcome(np.zeros(n, np.float32), states, None if self.down is None else self.down.init(n, seed))

    def encode(self, gradient: Vector, state: object, rng: np.random.Generator) -> Encoded:
        message: Encoded = self.compressor.encode(gradient, state, rng)
        return message

    def finish(self, encoded: Sequence[Encoded], before: Outcome, rngs: Sequence[np.random.Generator]) -> Outcome:
        alone = [finish(self.compressor, [each]) for each in encoded]
        average = mean([each.mean for each in alone])
        states = [each.states[0] for each in alone]
        if self.down is None:
            return Outcome(average, states, answer=FP32_NBYTES * average.size)
        done = exchange(self.down, [average], [before.server], rngs[-1:])
        return Outcome(done.mean, states, done.states[0], float(done.nbytes.sum()))


@dataclass(frozen=True)
class Machines:
    """Dense inside each machine, compressed between machines (HiTopKComm, Shi et al. 2021, algorithm 2).

    ``members`` are the ranks of the workers, machine by machine, `n_local` on each. A worker compresses the
    machine's mean of its own shard, so nothing is encoded before the machine's workers have met.
    """

    compressor: AnyCompressor
    members: tuple[int, ...]
    n_local: int

    def start(self, n: int, n_workers: int, seed: int) -> Outcome:
        sizes = shard_sizes(n, self.n_local)
        local = {rank: place % self.n_local for place, rank in enumerate(self.members)}
        states = [self.compressor.init(sizes[local[rank]], seed) for rank in range(n_workers)]
        return Outcome(np.zeros(n, np.float32), states)

    def encode(self, gradient: Vector, state: object, rng: np.random.Generator) -> Encoded:
        return gradient, state

    def finish(self, encoded: Sequence[Encoded], before: Outcome, rngs: Sequence[np.random.Generator]) -> Outcome:
        gradients = [np.asarray(encoded[rank][0], np.float32) for rank in self.members]
        states = [encoded[rank][1] for rank in self.members]
        streams = [rngs[rank] for rank in self.members]
        done = hierarchical_exchange(self.compressor, gradients, states, streams, self.n_local)
        by_rank = dict(zip(self.members, done.states, strict=True))
        return Outcome(done.mean, [by_rank[rank] for rank in range(len(encoded))])
