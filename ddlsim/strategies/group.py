"""The workers of a synchronous strategy as one group: shared collectives, and who was ready when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import simpy

from ddlsim.collectives import Schedule
from ddlsim.strategies.loop import Loop
from ddlsim.strategies.recorder import Recorder

if TYPE_CHECKING:
    from ddlsim.strategies.coordinator import Coordinator

__all__ = ["Group", "Operation"]


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
    """

    loop: Loop
    recorder: Recorder
    nodes: list[int]
    n_workers: int
    schedule: Callable[[float], Schedule]
    coordinator: Coordinator | None = None
    operations: dict[tuple[int, int], Operation] = field(default_factory=dict)
    steps_done: dict[int, int] = field(default_factory=dict)

    def operation(self, step: int, bucket: int) -> Operation:
        """Return the exchange of a bucket in a step, made when first asked for."""
        return self.operations.setdefault((step, bucket), Operation())

    def ready(self, step: int, bucket: int) -> bool:
        """A worker's gradients of a bucket are ready; return whether all workers' are now."""
        operation = self.operation(step, bucket)
        operation.n_ready += 1
        operation.last_ready = self.loop.now
        return operation.n_ready == self.n_workers

    def join(self, step: int, bucket: int, nbytes: float, rank: int) -> simpy.Event:
        """Enter the exchange of a bucket; the servers, if any, are always there."""
        operation = self.operation(step, bucket)
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
