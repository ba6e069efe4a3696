"""One clock for two calendars: simpy's events and the compiled network's.

simpy holds what people reason about (a gradient is ready, an update is applied); messages and rounds live in
the network kernel. :meth:`Loop.run` always lets the network run ahead to its first completion that somebody
waits for, or to simpy's next event, whichever is earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simpy
from simpy.events import NORMAL

from ddlsim.collectives import Schedule
from ddlsim.errors import DeadlockError
from ddlsim.network import Network

__all__ = ["Loop", "Traffic"]


class Traffic(NamedTuple):
    """What went over the channels: bytes and busy s, (n_channels,), and the number of messages."""

    nbytes: npt.NDArray[np.float64]
    busy: npt.NDArray[np.float64]
    n_messages: int


class _Environment(simpy.Environment):
    """A simpy environment that can also schedule at an absolute time.

    ``now + (time - now)`` may differ from ``time`` in the last bit; results must not depend on that.
    """

    def schedule_at(self, event: simpy.Event, time: float) -> None:
        heapq.heappush(self._queue, (time, NORMAL, next(self._eid), event))

    def pass_time(self, now: float) -> None:
        """Set the clock to `now`, before the next event."""
        self._now = now


class Loop:
    """The event loop of a run: a simpy environment and a network that share their clock."""

    def __init__(self, network: Network) -> None:
        self.env = _Environment()
        self.network = network
        self._events: dict[tuple[int, int], simpy.Event] = {}
        self._joins: list[tuple[int, int]] = []
        self._sends: list[tuple[int, int, float, simpy.Event]] = []
        #: bytes that messages and collectives have put on the wire, counted when they start
        self.nbytes_sent = 0.0
        self._volume: dict[int, tuple[Schedule, float]] = {}
        self._beside: Traffic | None = None
        #: who waits for what, for the report of a deadlock
        self.waiting: dict[str, str] = {}
        #: asked before time goes on whether the run should stop there
        self.pause: Callable[[], bool] | None = None

    @property
    def now(self) -> float:
        """The simulated time in seconds."""
        return float(self.env.now)

    # ------------------------------------------------------------ for processes

    def collective(self, schedule: Schedule, nodes: Sequence[int], nbytes: float) -> int:
        """Prepare a collective over `nbytes` with rank r at node ``nodes[r]``; return its id."""
        self._count(schedule, nbytes)
        return self.network.collective(schedule, nodes, nbytes)

    def _count(self, schedule: Schedule, nbytes: float) -> None:
        if id(schedule) not in self._volume:  # bytes sent per byte of the buffer
            self._volume[id(schedule)] = schedule, float(schedule.bytes_sent(1.0).sum())
        self.nbytes_sent += nbytes * self._volume[id(schedule)][1]

    def account(self, schedule: Schedule, nbytes: float, traffic: Traffic) -> None:
        """Count a collective over `nbytes` whose time is known, so that the network does not see it."""
        self._count(schedule, nbytes)
        before = self._beside
        self._beside = traffic if before is None else Traffic(
            before.nbytes + traffic.nbytes, before.busy + traffic.busy, before.n_messages + traffic.n_messages
        )  # fmt: skip

    @property
    def traffic(self) -> Traffic:
        """What has gone over the channels: simulated, and as part of collectives whose time is known."""
        network, beside = self.network, self._beside
        seen = Traffic(network.channel_nbytes, network.channel_busy, network.n_messages)
        if beside is None:
            return seen
        return Traffic(seen.nbytes + beside.nbytes, seen.busy + beside.busy, seen.n_messages + beside.n_messages)

    def join(self, collective: int, rank: int) -> simpy.Event:
        """Enter a collective now; the event returned is triggered when it has ended for this rank."""
        event = self.env.event()
        self._events[collective, rank] = event
        self._joins.append((collective, rank))
        return event

    def trigger_at(self, event: simpy.Event, time: float) -> None:
        """Trigger an `event` at an absolute time (s), not before now."""
        event._ok = True
        event._value = None
        self.env.schedule_at(event, time)

    def send(self, src: int, dst: int, nbytes: float) -> simpy.Event:
        """Send a message between nodes now; the event returned is triggered when it is delivered."""
        event = self.env.event()
        self.nbytes_sent += nbytes
        self._sends.append((src, dst, nbytes, event))
        return event

    # ------------------------------------------------------------ running

    def run(self, until: simpy.Event, max_time: float = np.inf) -> None:
        """Run until the event `until` has been processed or ``pause`` says so, but not beyond `max_time` (s).

        Raises :class:`~ddlsim.errors.DeadlockError` when nothing can happen any more although it has not.
        """
        env = self.env
        quiet_until = -np.inf  # the network is known to complete nothing before
        while not until.processed:
            next_event = env.peek()
            if next_event > env.now:  # nothing is left to happen, nor to fail, at this instant
                if self.pause is not None and self.pause():
                    return
                if self._start_queued():
                    quiet_until = -np.inf
            if next_event > quiet_until:
                done = self.network.advance(min(next_event, max_time))
                if done is not None:
                    for number, rank in zip(done.ids.tolist(), done.ranks.tolist(), strict=True):
                        self._complete(number, rank, done.time)
                    continue
                quiet_until = next_event
            if next_event == np.inf and (max_time == np.inf or not self.network.pending):
                raise DeadlockError(self._who_waits())
            if next_event > max_time:
                env.pass_time(max_time)
                return
            env.step()

    def _start_queued(self) -> bool:
        """Hand over what processes started at this instant, all at once; return whether there was anything."""
        now = self.now
        found = bool(self._joins or self._sends)
        if self._joins:
            joins, self._joins = self._joins, []
            self.network.join([c for c, _ in joins], [r for _, r in joins], now)
        if self._sends:
            sends, self._sends = self._sends, []
            src, dst, nbytes, events = zip(*sends, strict=True)
            ids = self.network.send(src, dst, np.array(nbytes), now)
            for number, event in zip(ids.tolist(), events, strict=True):
                self._events[number, 0] = event
        return found

    def _complete(self, number: int, rank: int, time: float) -> None:
        event = self._events.pop((number, rank), None)
        if event is not None:
            self.trigger_at(event, time)

    def _who_waits(self) -> str:
        who = "; ".join(f"{name} waits for {what}" for name, what in list(self.waiting.items())[:8])
        more = f" and {len(self.waiting) - 8} more" if len(self.waiting) > 8 else ""
        return f"deadlock at {self.now:.6g} s: nothing is left to happen, but {who or 'the run has not ended'}{more}"
