"""The workers of a synchronous strategy as one group: shared collectives, and who was ready when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import simpy

from ddlsim.collectives import Schedule
from ddlsim.learning import Array, Learner, Value
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import Recorder

if TYPE_CHECKING:
    from ddlsim.runtime.coordinator import Coordinator
    from ddlsim.runtime.worker import Worker

__all__ = ["Carrier", "Group", "Operation", "Servers"]


class Carrier(Protocol):
    """How the buckets of a step become their mean."""

    #: what a worker is said to do while it waits for them
    what: str
    #: whether workers decode buckets as they arrive; otherwise they wait for the last one only
    decodes: bool

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a bucket is ready, before it leaves."""

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        """Let a worker's bucket of `nbytes` leave now; return the event of the mean's arrival."""

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        """Return the seconds that a worker computes when a bucket's mean has arrived."""

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return what every worker ends with, given all their gradients."""


class Servers(Protocol):
    """What a bucket goes through where that is no simulated collective: servers, or a stream of known times."""

    def join(self, operation: tuple[int, int], tensor: int, nbytes: float, rank: int) -> simpy.Event:
        """Enter the exchange of the bucket number `tensor`; return the event of the mean's arrival at `rank`."""


@dataclass
class Operation:
    """One exchange of a bucket: its collective (None until the first rank joins) and readiness."""

    number: int | None = None
    n_ready: int = 0
    n_done: int = 0
    last_ready: float = 0.0


@dataclass
class Group:
    """Workers 0..n_workers-1, perhaps with servers behind them, that execute collectives together.

    ``nodes``     node of every rank: the workers, then the servers
    ``schedule``  bytes -> the schedule that exchanges them
    ``carrier``   dense gradients by collectives of that schedule, unless something else is set
    ``servers``   take the place of those collectives, if set
    """

    loop: Loop
    recorder: Recorder
    nodes: list[int]
    n_workers: int
    schedule: Callable[[float], Schedule]
    learner: Learner
    coordinator: Coordinator | None = None
    servers: Servers | None = None
    operations: dict[tuple[int, int], Operation] = field(default_factory=dict)
    steps_done: dict[int, int] = field(default_factory=dict)
    #: samples that the updates made so far have learned from
    n_samples: int = 0

    def __post_init__(self) -> None:
        self.carrier: Carrier = _Dense(self)
        #: the parameters of all replicas, after the latest step that has been averaged
        self.params: Value[Array] = self.learner.initial
        self._state = self.learner.optimizer_state(self.params)
        self._contributed: dict[int, dict[int, Value[Array]]] = {}
        self._after: dict[int, Value[Array]] = {}

    def contribute(self, step: int, rank: int, gradient: Value[Array]) -> None:
        """A worker's gradient of a step will be part of its mean."""
        self._contributed.setdefault(step, {})[rank] = gradient

    def gradient(self, step: int, rank: int) -> Value[Array]:
        """Return a worker's gradient of a step that has not been averaged yet."""
        return self._contributed[step][rank]

    def parameters(self, step: int, samples: int) -> Value[Array]:
        """Return what every worker holds after a step: w <- w - eta * (1/N) sum_i g_i, updated once for all.

        `samples` is what each worker has contributed. All workers have contributed to the step when a part of
        its mean has arrived anywhere.
        """
        if step not in self._after:
            mean = self.carrier.mean(step, [self.gradient(step, rank) for rank in range(self.n_workers)])
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

    def join(self, step: int, bucket: int, nbytes: float, rank: int, tensor: int | None = None) -> simpy.Event:
        """Enter the exchange of a bucket; the servers, if any, are always there.

        `tensor` is its number in every step, where `bucket` is not.
        """
        operation = self.operation(step, bucket)
        if self.servers is not None:
            return self.servers.join((step, bucket), bucket if tensor is None else tensor, nbytes, rank)
        if operation.number is None:
            operation.number = self.loop.collective(self.schedule(nbytes), self.nodes, nbytes)
            for server in range(self.n_workers, len(self.nodes)):
                self.loop.join(operation.number, server)
        return self.loop.join(operation.number, rank)

    def finish_step(self, step: int) -> bool:
        """A worker has all averaged gradients of a step; return whether it was the last one."""
        self.steps_done[step] = self.steps_done.get(step, 0) + 1
        if self.steps_done[step] < self.n_workers:
            return False
        del self.steps_done[step]
        for key in [key for key in self.operations if key[0] == step]:
            del self.operations[key]
        return True


@dataclass
class _Dense:
    """Gradients travel as they are."""

    group: Group
    what: str = "all-reduce"
    decodes: bool = False

    def encode_seconds(self, worker: Worker, step: int, index: int) -> float:
        return 0.0

    def carry(self, worker: Worker, step: int, index: int, nbytes: float) -> simpy.Event:
        return self.group.join(step, index, nbytes, worker.rank)

    def decode_seconds(self, worker: Worker, step: int, index: int) -> float:
        return 0.0

    def mean(self, step: int, gradients: Sequence[Value[Array]]) -> Value[Array]:
        return self.group.learner.mean(gradients)
