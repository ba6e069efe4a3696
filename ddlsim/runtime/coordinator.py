"""Who decides which bucket travels next when all workers must agree: Horovod's coordinator, a priority queue.

Workers announce buckets; one that all workers have announced may travel. A launched exchange is entered by
all ranks at once.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import Protocol

import simpy

from ddlsim.runtime.group import Group
from ddlsim.runtime.worker import Process
from ddlsim.workload.buckets import Bucket

__all__ = ["Coordinator", "Fused", "MostUrgent"]


class Coordinator(Protocol):
    """What workers need of a coordinator."""

    latest_ready: float

    def announce(self, step: int, index: int, bucket: Bucket, rank: int) -> simpy.Event:
        """A worker's bucket is ready; return the event of its arrival, averaged, at that worker."""

    def last_ready(self, step: int) -> float:
        """Return when the last bucket of a step was ready on all workers."""


def _after(event: simpy.Event, callback: Callable[[simpy.Event], None]) -> None:
    assert event.callbacks is not None
    event.callbacks.append(callback)


class _Base:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.env = group.loop.env
        self.latest_ready = 0.0
        self._arrival: dict[tuple[int, int], list[simpy.Event | None]] = {}
        self._ready_at: dict[int, float] = {}
        self._n_launched = 0

    def last_ready(self, step: int) -> float:
        return self._ready_at.get(step, 0.0)

    def _announced(self, step: int, index: int, rank: int) -> tuple[simpy.Event, bool]:
        key = (step, index)
        arrivals = self._arrival.setdefault(key, [None] * self.group.n_workers)
        event = self.env.event()
        arrivals[self.group.communicator.place[rank]] = event
        everywhere = self.group.ready(step, index)
        if everywhere:
            self.latest_ready = self._ready_at[step] = self.group.loop.now
            self._ready_at.pop(step - 2, None)
        return event, everywhere

    def _launch(self, parts: list[tuple[int, int]], nbytes: float) -> simpy.Event:
        """Exchange buckets as one buffer; workers get their parts when it ends for them."""
        number = self._n_launched
        self._n_launched += 1
        tensor = parts[0][1]
        ends = [self.group.carrier.carry(worker, -1, number, nbytes, tensor) for worker in self.group.workers]
        start = self.env.now
        for place, end in enumerate(ends):
            _after(end, functools.partial(self._arrived, parts, place, start))
        finished = self.env.all_of(ends)
        _after(finished, functools.partial(self._forget, parts))
        return finished

    def _arrived(self, parts: list[tuple[int, int]], place: int, start: float, _: simpy.Event) -> None:
        for key in parts:
            event = self._arrival[key][place]
            assert event is not None
            event.succeed()
        name = f"{len(parts)} buckets of step {parts[0][0]}"
        self.group.recorder.background(f"{self.group.workers[place].name} network", name, start, self.env.now)

    def _forget(self, parts: list[tuple[int, int]], _: simpy.Event) -> None:
        for key in parts:
            del self._arrival[key]


class Fused(_Base):
    """Horovod's tensor fusion: once a cycle take what is ready everywhere, in this order, in fused buffers."""

    def __init__(self, group: Group, threshold: float, cycle_time: float) -> None:
        super().__init__(group)
        self.threshold = threshold
        self.cycle_time = cycle_time
        self._queue: list[tuple[int, int, float]] = []
        self._running = False

    def announce(self, step: int, index: int, bucket: Bucket, rank: int) -> simpy.Event:
        event, everywhere = self._announced(step, index, rank)
        if everywhere:
            self._queue.append((step, index, bucket.nbytes))
            if not self._running:
                self._running = True
                self.env.process(self._cycles())
        return event

    def _cycles(self) -> Process:
        while self._queue:
            cycles = self.env.now / self.cycle_time
            tick = math.ceil(cycles - 1e-9 * max(cycles, 1.0)) * self.cycle_time  # on a tick, up to rounding
            yield self.env.timeout(max(tick - self.env.now, 0.0))
            batch, self._queue = self._queue, []
            while batch:
                parts: list[tuple[int, int]] = []
                nbytes = 0.0
                while batch and (not parts or nbytes + batch[0][2] <= self.threshold):
                    step, index, size = batch.pop(0)
                    parts.append((step, index))
                    nbytes += size
                yield self._launch(parts, nbytes)
        self._running = False


class MostUrgent(_Base):
    """The ready bucket of lowest priority number goes next; at most `in_flight` travel at a time."""

    def __init__(self, group: Group, in_flight: int) -> None:
        super().__init__(group)
        self.credit = in_flight
        self._heap: list[tuple[int, int, int, float]] = []  # step, priority, index, nbytes

    def announce(self, step: int, index: int, bucket: Bucket, rank: int) -> simpy.Event:
        event, everywhere = self._announced(step, index, rank)
        if everywhere:
            heapq.heappush(self._heap, (step, bucket.priority, index, bucket.nbytes))
            self._start()
        return event

    def _start(self) -> None:
        while self.credit > 0 and self._heap:
            step, _, index, nbytes = heapq.heappop(self._heap)
            self.credit -= 1
            _after(self._launch([(step, index)], nbytes), self._returned)

    def _returned(self, _: simpy.Event) -> None:
        self.credit += 1
        self._start()
