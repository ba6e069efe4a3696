"""Collectives over whole vectors, round after round: waited for at once, or in the background while workers compute.

**Compressed models.** What a compressor keeps of a model is little; what it keeps of the difference to a model that all
members know already loses nothing for ever. So of models the difference to the mean of the latest round that has ended
(or to what was made of it for all) is encoded, and what all have then is that plus the mean of the differences (Basu et
al. 2019, Qsparse-local-SGD, arXiv:1906.02367, algorithm 1). Gradients, and what else is small by itself, are encoded as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import simpy

from ddlsim.collectives import Collective
from ddlsim.learning import Array, Value
from ddlsim.runtime.carrier import Carrier, Dense
from ddlsim.runtime.coded import Coded
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.worker import Computation, Process, Worker
from ddlsim.workload.buckets import one_bucket

T = TypeVar("T")


@dataclass
class _Round(Generic[T]):
    """One exchange: its number among all, what members have brought, when the last did (s), what has come of it."""

    sequence: int
    common: Value[Array]
    brought: list[Value[Array] | None]
    arrived: dict[int, simpy.Event] = field(default_factory=dict)
    last_ready: float = 0.0
    n_done: int = 0
    results: list[T] = field(default_factory=list)

    def values(self) -> list[Value[Array]]:
        """Return what all have brought."""
        brought = [value for value in self.brought if value is not None]
        assert len(brought) == len(self.brought), "a collective ended before all ranks had entered it"
        return brought


class Exchange(Generic[T]):
    """A collective over vectors of the parameters' size that all members take part in, round after round.

    What they have brought, by place, becomes one vector by ``combine`` (the mean, if nothing is said), and that one
    result by ``then``, once for all of them. No member has a result before all have brought something.

    models     compressed as differences to `common`; otherwise as they are
    carrier    dense or compressed collectives
    share      of the bytes of all parameters that a vector has
    """

    def __init__(
        self, communicator: Communicator, carrier: Callable[[Callable[[int, int], Value[Array]]], Carrier],
        then: Callable[[Value[Array]], T], *, models: bool,
        combine: Callable[[Sequence[Value[Array]]], Value[Array]] | None = None, share: float = 1.0,
    ) -> None:  # fmt: skip
        setting = communicator.setting
        self.communicator = communicator
        self.learner = setting.learner
        self.then = then
        self.models = models
        self.combine = combine
        self.share = share
        self.carrier = carrier(self._vector)
        #: the model that all members know of each other: the initial one, then the latest mean
        self.common = self.learner.initial
        self._rounds: dict[object, _Round[T]] = {}
        self._by_sequence: dict[int, _Round[T]] = {}
        self._n_rounds = 0

    def start(self, worker: Worker, key: object, value: Value[Array]) -> Process:
        """Enter round `key` with `value`, which then travels in the background.

        Every member enters the rounds in the same order.
        """
        loop, place = worker.loop, self.communicator.place[worker.rank]
        if key not in self._rounds:
            opened: _Round[T] = _Round(self._n_rounds, self.common, [None] * self.communicator.n_ranks)
            self._rounds[key] = self._by_sequence[self._n_rounds] = opened
            self._n_rounds += 1
        current = self._rounds[key]
        current.brought[place] = value
        yield from worker.compute(self.carrier.encode_seconds(worker, current.sequence, 0), "encode")
        current.last_ready = loop.now
        current.arrived[place] = loop.env.process(self._travel(worker, current.sequence))

    def finish(self, worker: Worker, key: object) -> Generator[simpy.Event, object, T]:
        """Wait for the end of a round, if it has not ended yet for this worker, and return its result.

        The wait is booked as waiting until the last worker had entered, as communication from then on.
        """
        current, start = self._rounds[key], worker.loop.now
        arrived = current.arrived[self.communicator.place[worker.rank]]
        if not arrived.processed:
            yield from worker.block(arrived, f"the {self.carrier.what} of step {key}")
            worker.book(start, current.last_ready, self.carrier.what)
        yield from worker.compute(self.carrier.decode_seconds(worker, current.sequence, 0), "decode")
        if not current.results:
            current.results.append(self.then(self._combined(current)))
        current.n_done += 1
        if current.n_done == len(current.brought):
            del self._rounds[key], self._by_sequence[current.sequence]
        return current.results[0]

    def exchange(self, worker: Worker, key: object, value: Value[Array]) -> Generator[simpy.Event, object, T]:
        """Enter a round and wait for its end."""
        yield from self.start(worker, key, value)
        return (yield from self.finish(worker, key))

    # ------------------------------------------------------------ values

    def _vector(self, sequence: int, place: int) -> Value[Array]:
        """Return what a member's part of a round is compressed from."""
        current = self._by_sequence[sequence]
        value = current.brought[place]
        assert value is not None
        if not self.models:
            return value
        return self.learner.plane.apply(np.subtract, value, current.common)

    def _combined(self, current: _Round[T]) -> Value[Array]:
        values = current.values()
        if self.combine is not None:
            return self.combine(values)
        mean = self.carrier.mean(current.sequence, values)
        if self.models:
            if self.carrier.compresses:
                mean = self.learner.plane.apply(np.add, current.common, mean).carrying(self.learner.mean(values))
            self.common = mean
        return mean

    def _travel(self, worker: Worker, sequence: int) -> Process:
        start = worker.loop.now
        yield self.carrier.carry(worker, sequence, 0, self.share * worker.workload.gradient_nbytes)
        worker.recorder.background(f"{worker.name} network", self.carrier.what, start, worker.loop.now)


class Averaging(Exchange[Value[Array]]):
    """The all-reduce that gives every member the mean of what all have brought, compressed if the run compresses.

    With ``then`` (of models) all have what it makes of the mean instead, which is what the next round's models are
    differences to.
    """

    def __init__(
        self, communicator: Communicator, then: Callable[[Value[Array]], Value[Array]] | None = None, *,
        models: bool = True, kind: str = "all_reduce", algorithm: str | Collective | None = None, share: float = 1.0,
    ) -> None:  # fmt: skip
        def outcome(mean: Value[Array]) -> Value[Array]:
            if then is None:
                return mean
            self.common = then(mean)
            return self.common

        carrier = carrier_of(communicator, kind, algorithm)
        super().__init__(communicator, carrier, outcome, models=models, share=share)

    def mean(self, worker: Worker, key: object, value: Value[Array]) -> Computation:
        """Return the mean of what all members bring to the round `key`, and wait for it."""
        return (yield from self.exchange(worker, key, value))


def carrier_of(
    communicator: Communicator, kind: str = "all_reduce", algorithm: str | Collective | None = None
) -> Callable[[Callable[[int, int], Value[Array]]], Carrier]:
    """Return what makes the carrier of whole vectors: compressed ones if the run compresses."""

    def make(vector: Callable[[int, int], Value[Array]]) -> Carrier:
        if communicator.setting.compression is None:
            return Dense(communicator, kind, algorithm)
        whole = one_bucket(communicator.workers[0].workload)
        return Coded(communicator, whole, vector, kind)

    return make
