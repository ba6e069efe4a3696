"""Queues: which ready collective starts next, decided during a run.

A queue orders the collectives of lanes without an order. It launches a collective for all members at once, after the
dependencies of all members have ended.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from ddlsim.arguments import Bytes, Count, Duration, checked
from ddlsim.network.executor import Dispatcher, Launch, Wake
from ddlsim.network.executor import Queue as Queue
from ddlsim.units import si


@checked
@dataclass(frozen=True)
class PriorityQueue:
    """Queue that starts the ready collective with the lowest ``Plan.key`` first, as ByteScheduler does.

    See Peng et al. 2019, section 4. With ``overlap="priority"``, the layers nearest to the input have the lowest keys.

    in_flight  maximum number of collectives in progress
    """

    in_flight: Count = 4

    def dispatcher(self, launch: Launch, wake: Wake) -> Dispatcher:
        return _MostUrgent(self.in_flight, launch)


@checked
@dataclass(frozen=True)
class FusedQueue:
    """Queue that fuses ready collectives into buffers, as Horovod does (Sergeev and Del Balso 2018, arXiv:1802.05799).

    In every cycle, collectives are fused in the order in which they became ready (section 4 of the paper). The buffers
    are sent one at a time.

    threshold   maximum size of a buffer, in bytes or as a string such as "128 MiB"
    cycle_time  time between two cycles, in seconds or as a string such as "1 ms"
    """

    threshold: Bytes = 128 * 2**20
    cycle_time: Duration = 1e-3

    def dispatcher(self, launch: Launch, wake: Wake) -> Dispatcher:
        return _InCycles(si(self.threshold, "bytes"), si(self.cycle_time, "time"), launch, wake)


class _MostUrgent:
    def __init__(self, credit: int, launch: Launch) -> None:
        self.credit, self.launch = credit, launch
        self.waiting: list[int] = []

    def ready(self, key: int, nbytes: float, now: float) -> None:
        heapq.heappush(self.waiting, key)
        self._go_on()

    def ended(self, now: float) -> None:
        self.credit += 1
        self._go_on()

    def tick(self, now: float) -> None:
        raise AssertionError("unexpected tick")

    def _go_on(self) -> None:
        while self.credit and self.waiting:
            self.credit -= 1
            self.launch([heapq.heappop(self.waiting)])


class _InCycles:
    def __init__(self, threshold: float, cycle_time: float, launch: Launch, wake: Wake) -> None:
        self.threshold, self.cycle_time, self.launch, self.wake = threshold, cycle_time, launch, wake
        self.waiting: list[tuple[int, float]] = []
        self.batch: list[tuple[int, float]] = []  # collectives of this cycle
        self.running = False

    def ready(self, key: int, nbytes: float, now: float) -> None:
        self.waiting.append((key, nbytes))
        if not self.running:
            self.running = True
            self._next_cycle(now)

    def tick(self, now: float) -> None:
        self.batch, self.waiting = self.waiting, []
        self._launch_next()

    def ended(self, now: float) -> None:
        if self.batch:
            self._launch_next()
        elif self.waiting:
            self._next_cycle(now)
        else:
            self.running = False

    def _next_cycle(self, now: float) -> None:
        cycles = now / self.cycle_time
        tick = math.ceil(cycles - 1e-9 * max(cycles, 1.0)) * self.cycle_time  # on a tick, up to rounding
        self.wake(now + max(tick - now, 0.0))

    def _launch_next(self) -> None:
        keys: list[int] = []
        nbytes = 0.0
        while self.batch and (not keys or nbytes + self.batch[0][1] <= self.threshold):
            key, size = self.batch.pop(0)
            keys.append(key)
            nbytes += size
        self.launch(keys)
