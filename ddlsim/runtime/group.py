"""The workers of a synchronous strategy as one group: buckets of gradients, and who was ready when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import simpy

from ddlsim.collectives import Collective, Schedule
from ddlsim.learning import Array, Value
from ddlsim.runtime.communicator import Communicator

if TYPE_CHECKING:
    from ddlsim.runtime.coordinator import Coordinator
    from ddlsim.runtime.worker import Worker

__all__ = ["Carrier", "Dense", "Group", "Operation"]


class Carrier(Protocol):
    """How vectors of all members, in parts, become their mean."""

    #: what a worker is said to do while it waits for them
    what: str
    #: whether workers decode parts as they arrive; otherwise they wait for the last one only
    decodes: bool

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a part is ready, before it leaves."""

    def carry(self, worker: Worker, step: int, index: int, nbytes: float, tensor: int | None = None) -> simpy.Event:
        """Let a worker's part of `nbytes` leave now; return the event of the mean's arrival.

        `tensor` is its number in every step, where `index` is not.
        """

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a part's mean has arrived."""

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        """Return what every worker ends with, given what all have brought, by place."""


@dataclass(eq=False)
class Dense:
    """Vectors travel as they are: by collectives of a `kind`, by the fabric's algorithm or another one, or by a
    `schedule`."""

    communicator: Communicator
    kind: str = "all_reduce"
    algorithm: str | Collective | None = None
    schedule: Schedule | None = None
    decodes: bool = False

    def __post_init__(self) -> None:
        self.what = self.kind.replace("_", "-")
        if self.schedule is None:
            self.communicator.prepare(self.kind, self.algorithm)

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        return 0.0

    def carry(self, worker: Worker, step: int, index: int, nbytes: float, tensor: int | None = None) -> simpy.Event:
        communicator, key, own = self.communicator, (self, step, index), self.schedule
        if own is not None:
            return communicator.follow(key, worker, nbytes, lambda: own)
        return communicator.enter(key, worker, nbytes, self.kind, self.algorithm)

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        return 0.0

    def mean(self, step: int, vectors: Sequence[Value[Array]]) -> Value[Array]:
        return self.communicator.setting.learner.mean(vectors)


@dataclass
class Operation:
    """One exchange of a bucket: how many are ready, and when the last of them was (s)."""

    n_ready: int = 0
    last_ready: float = 0.0


@dataclass
class Group:
    """Members of a communicator that hold the same parameters and average their gradients in every step.

    ``new_carrier``      makes what carries the buckets: dense collectives, compressed ones, servers
    ``new_coordinator``  makes what decides which bucket travels next, where they do not go in order
    """

    communicator: Communicator
    new_carrier: Callable[[Group], Carrier] = field(default=lambda group: Dense(group.communicator))
    new_coordinator: Callable[[Group], Coordinator] | None = None
    operations: dict[tuple[int, int], Operation] = field(default_factory=dict)
    steps_done: dict[int, int] = field(default_factory=dict)
    #: samples that the updates made so far have learned from
    n_samples: int = 0

    def __post_init__(self) -> None:
        setting = self.communicator.setting
        self.loop, self.recorder, self.learner = setting.loop, setting.recorder, setting.learner
        self.workers = self.communicator.workers
        self.n_workers = len(self.workers)
        #: the parameters of all replicas, after the latest step that has been averaged
        self.params: Value[Array] = self.learner.initial
        self._state = self.learner.optimizer_state(self.params)
        self._contributed: dict[int, dict[int, Value[Array]]] = {}
        self._after: dict[int, Value[Array]] = {}
        self.carrier = self.new_carrier(self)
        self.coordinator = None if self.new_coordinator is None else self.new_coordinator(self)

    def contribute(self, step: int, rank: int, gradient: Value[Array]) -> None:
        """A worker's gradient of a step will be part of its mean."""
        self._contributed.setdefault(step, {})[self.communicator.place[rank]] = gradient

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return a member's gradient of a step that has not been averaged yet."""
        return self._contributed[step][place]

    def parameters(self, step: int, samples: int) -> Value[Array]:
        """Return what every worker holds after a step: w <- w - eta * (1/N) sum_i g_i, updated once for all.

        `samples` is what each worker has contributed. All workers have contributed to the step when a part of
        its mean has arrived anywhere.
        """
        if step not in self._after:
            mean = self.carrier.mean(step, [self.gradient(step, place) for place in range(self.n_workers)])
            del self._contributed[step]
            rate = self.learner.rate(self.n_samples)
            self.params, self._state = self.learner.update(self.params, mean, self._state, rate)
            self._after[step] = self.params
            self._after.pop(step - 3, None)  # nobody lags so far behind
            self.n_samples += samples * self.n_workers
        return self._after[step]

    def operation(self, step: int, bucket: int) -> Operation:
        """Return the exchange of a bucket in a step, made when first asked for."""
        return self.operations.setdefault((step, bucket), Operation())

    def ready(self, step: int, bucket: int) -> bool:
        """A worker's gradients of a bucket are ready; return whether all workers' are now."""
        operation = self.operation(step, bucket)
        operation.n_ready += 1
        operation.last_ready = self.loop.now
        return operation.n_ready == self.n_workers

    def finish_step(self, step: int) -> bool:
        """A worker has all averaged gradients of a step; return whether it was the last one."""
        self.steps_done[step] = self.steps_done.get(step, 0) + 1
        if self.steps_done[step] < self.n_workers:
            return False
        del self.steps_done[step]
        for key in [key for key in self.operations if key[0] == step]:
            del self.operations[key]
        return True
