"""The simpy environment of an event loop. Only loops with processes import it, because simpy is slow to import."""

from __future__ import annotations

import heapq

import simpy
from simpy.events import NORMAL


class Environment(simpy.Environment):
    """A simpy environment that can also schedule at an absolute time.

    ``now + (time - now)`` may differ from ``time`` in the last bit; results must not depend on that.
    """

    def schedule_at(self, event: simpy.Event, time: float) -> None:
        heapq.heappush(self._queue, (time, NORMAL, next(self._eid), event))

    def pass_time(self, now: float) -> None:
        """Set the clock to `now`, before the next event."""
        self._now = now
