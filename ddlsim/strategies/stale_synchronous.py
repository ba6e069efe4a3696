"""Stale synchronous parallel: asynchronous SGD in which nobody runs too far ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import simpy

from ddlsim.arguments import Count, by, checked, whole
from ddlsim.errors import ConfigError
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.servers import ApplyTime, Placement, note_lock_step
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.shards import wait
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.center import Center

__all__ = ["StaleSynchronous"]


@dataclass
class _Clocks:
    """How many gradients of each worker have been applied, and who waits for the slowest."""

    loop: Loop
    slack: Annotated[float, by(_slack)]
    clock: list[int]
    waiting: list[tuple[int, simpy.Event]] = field(default_factory=list)

    def tick(self, rank: int) -> simpy.Event:
        """Advance a worker's clock; the event returned is when it may go on."""
        self.clock[rank] += 1
        may_go = self.loop.env.event()
        self.waiting.append((rank, may_go))
        slowest = min(self.clock)
        held = []
        for other, event in self.waiting:
            if self.clock[other] - slowest > self.slack:
                held.append((other, event))
            else:
                event.succeed()
        self.waiting = held
        return may_go


def _slack(value: object, where: str) -> object:
    if isinstance(value, float) and value == math.inf:
        return value
    try:
        return whole(0)(value, where)
    except ConfigError as error:
        raise ConfigError(f"{error}, or math.inf") from None


@checked
@dataclass(frozen=True)
class StaleSynchronous:
    """Stale synchronous parallel (Ho et al. 2013, NIPS, section 2): every gradient is applied when it arrives,
    w <- w - eta g_i, but no worker may run ahead of the slowest by more than `slack` clocks.

    The convention here: worker i's clock is the number of its gradients that have been applied; after each it is
    held, before it pulls, as long as clock_i - min_j clock_j > slack. slack = 0 is a barrier after every step
    (BSP; the N gradients of a step are added, not averaged), slack = math.inf asynchronous SGD.
    """

    slack: Annotated[float, by(_slack)]
    servers: Count = 1
    placement: Placement = "own"
    apply_time: ApplyTime = 0.0

    @property
    def label(self) -> str:
        """Its name with the slack."""
        return f"stale synchronous (slack {self.slack})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Every gradient is an update."""
        return steps * n_workers

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        center = Center.of(self, setting)
        clocks = _Clocks(setting.loop, self.slack, [0] * len(setting.workers))
        if self.slack > 0:  # with 0 they wait for each other
            note_lock_step(setting)
        for worker in setting.workers:
            setting.loop.env.process(self.work(worker, center, clocks))

    def work(self, worker: Worker, center: Center, clocks: _Clocks) -> Process:
        """Compute, push, wait for the slowest if too far ahead, pull, for ever."""
        version = 0
        while True:
            gradient = yield from worker.gradient()
            yield from center.push(worker, gradient, version)
            if not (may_go := clocks.tick(worker.rank)).triggered:
                yield from wait(worker, may_go, "the slowest worker")
            version = center.version
            yield from center.pull(worker, center.params)
            worker.end_step()
