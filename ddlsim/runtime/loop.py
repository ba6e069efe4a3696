"""One clock for two calendars: simpy's events and the compiled network's.

simpy holds the events that people reason about (a gradient is ready, an update is applied); the network kernel holds
messages and rounds. :meth:`Loop.run` always lets the network run ahead to the first completion with a waiting
process, or to simpy's next event, whichever is earlier.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from ddlsim.collectives import Schedule
from ddlsim.errors import DeadlockError
from ddlsim.network import BusyIntervals, Network
from ddlsim.network.busy import busy_rows
from ddlsim.network.state import Floats, Ints, Records
from ddlsim.workload.jitter import Slow, slowed_duration

if TYPE_CHECKING:
    import simpy
    from simpy.events import EventPriority

    from ddlsim.cluster import Cluster
    from ddlsim.plan.folding import Copies
    from ddlsim.reliability.faults import Disturbances

#: simpy's priority of events that are not urgent
_NORMAL = cast("EventPriority", 1)
#: asked before time goes on: whether to stop here
Halt = Callable[[], bool]
Check = Callable[[], None]
#: called by loops that are created in this context
_CHECK: ContextVar[Check] = ContextVar("check", default=lambda: None)


@contextmanager
def watched(check: Check) -> Iterator[None]:
    """Make every simulation that starts in this context call `check` regularly; an exception from it ends the run
    without a result.

    Raise a BaseException to get past the handlers for failed runs. Work in other processes is not watched.
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


class Driver(Protocol):
    """The execution of a run: by simpy's processes, or by the network kernel instead of them."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""

    def next(self) -> float:
        """Return the time of the next event outside the network, s; infinity if there is none."""

    def go(self, limit: float, halt: Halt | None) -> None:
        """Run to the end, but not beyond `limit` (s), not past a point where `halt` returns true, and not while other
        users of the network have completions to collect.

        Raises :class:`~ddlsim.errors.DeadlockError` if no further event is possible before the end.
        """

    def close(self) -> None:
        """Book unfinished operations at the end of the run."""


class Traffic(NamedTuple):
    """Traffic of the channels: bytes and busy s, (n_channels,), bytes sent, and the number of messages."""

    nbytes: Floats
    busy: Floats
    sent: float
    n_messages: int

    def plus(self, other: Traffic, share: float) -> Traffic:
        """Return the sum of this and a `share` of other traffic."""
        return Traffic(
            self.nbytes + share * other.nbytes,
            self.busy + share * other.busy,
            self.sent + share * other.sent,
            self.n_messages + int(share * other.n_messages),
        )


class _KnownCollective(NamedTuple):
    """A collective of known time: its interval (s), and its traffic, spread evenly over it."""

    start: float
    end: float
    traffic: Traffic

    def share(self, now: float) -> float:
        """Return the share of the collective that has passed."""
        return 1.0 if now >= self.end else max(now - self.start, 0.0) / (self.end - self.start)


class Loop:
    """The event loop of a run that begins at `start` (s): a simpy environment and a network that share their clock."""

    def __init__(self, network: Network, start: float = 0.0) -> None:
        self._now = start
        self.network = network
        #: time on the network's clock at which the run begins, s
        self.start = start
        self._busy_before = network.channel_busy if start else 0.0
        self._events: dict[tuple[int, int], simpy.Event] = {}
        self._joins: list[tuple[int, int]] = []
        self._sends: list[tuple[int, int, float, simpy.Event, bool | None]] = []
        #: channel, or stream -> event when collectives of known time that are sent as messages have left it
        self.turns: dict[Hashable, simpy.Event] = {}
        #: on a network without other users, what changes it; None: others may use it at any time
        self.disturbances: Disturbances | None = None
        #: by how many messages their schedules have more
        self.n_more_messages = 0
        #: bytes of all messages and collectives requested by processes
        self.nbytes_asked = 0.0
        self._volume: dict[int, tuple[Schedule, float, float]] = {}
        #: collectives of known time: those in progress, the number of runs of each, and all of them if recorded
        self._in_progress: list[tuple[float, int, _KnownCollective]] = []
        self._n_known = itertools.count()
        self._free = np.zeros(network.n_channels)  # when the latest of them leaves each channel, s
        self._ended: dict[int, tuple[Traffic, int]] = {}
        self._recorded: list[_KnownCollective] = []
        #: for ranks that represent several workers: channels with the traffic of others, and traffic that is not
        #: executed
        self._copies: Copies | None = None
        self._booked: tuple[Traffic, Records] | None = None
        #: process -> what it waits for, for reports of deadlocks
        self.waiting: dict[str, str] = {}
        #: executes the run: processes, or code in their place
        self.driver: Driver = self
        #: called regularly while time advances, also by drivers
        self.check = _CHECK.get()

    @functools.cached_property
    def env(self) -> simpy.Environment:
        """The simpy environment, made for the first event of a process, because simpy is slow to import."""
        import simpy

        return simpy.Environment(initial_time=self._now)

    @functools.cached_property
    def until(self) -> simpy.Event:
        """The event that ends the run."""
        return self.env.event()

    @property
    def has_processes(self) -> bool:
        """Whether there are processes, or events for them."""
        return "env" in vars(self)

    @property
    def now(self) -> float:
        """The simulated time in seconds."""
        return float(self.env.now) if self.has_processes else self._now

    def pass_time(self, now: float) -> None:
        """Set the clock to `now` (s), before the next event."""
        self._now = now
        if self.has_processes:
            self.env._now = now

    def peek(self) -> float:
        """Return the time of the next event of processes, s; infinity if there is none."""
        return float(self.env.peek()) if self.has_processes else np.inf

    @property
    def opens(self) -> float:
        """The time in seconds at which what is ready now starts: now, or when the pause ends."""
        return self.network.earliest(self.now)

    # ------------------------------------------------------------ for processes

    def work(self, seconds: float, slow: Sequence[Slow] = ()) -> simpy.Event:
        """Return an event for the end of work that is ready now and takes `seconds` at full speed; `slow` (s, s,
        factor) are the intervals in which it takes longer."""
        start = self.opens
        if slow:
            seconds = slowed_duration(seconds, start, slow)
        if start == self.now:
            return self.env.timeout(seconds)
        return self.at(start + seconds)

    def at(self, time: float) -> simpy.Event:
        """Return an event at an absolute time (s), not before now."""
        event = self.env.event()
        self.trigger_at(event, time)
        return event

    def collective(self, schedule: Schedule, nodes: Sequence[int] | Ints, nbytes: float) -> int:
        """Prepare a collective over `nbytes` with rank r at node ``nodes[r]``; return its id."""
        if id(schedule) not in self._volume:  # bytes sent per byte of the buffer, and header bytes
            headers = sum(r.header * r.repeat * len(r.src) for lane in schedule.lanes for r in lane)
            self._volume[id(schedule)] = schedule, float(schedule.bytes_sent(1.0).sum()), headers
        _, volume, headers = self._volume[id(schedule)]
        self.nbytes_asked += nbytes * volume + headers
        return self.network.collective(schedule, nodes, nbytes)

    def run_known(self, start: float, seconds: float, traffic: Traffic) -> float:
        """Run a collective of known `seconds` and `traffic` from `start` (s, not before now), or once earlier ones have
        left its channels; return its end (s).

        It does not take bandwidth from simulated messages.
        """
        self._settle()
        channels = np.flatnonzero(traffic.busy)
        start = self.start_of_known(start, traffic)
        self._free[channels] = start + seconds
        collective = _KnownCollective(start, start + seconds, traffic)
        heapq.heappush(self._in_progress, (collective.end, next(self._n_known), collective))
        if self.network.recording:
            self._recorded.append(collective)
        return collective.end

    def start_of_known(self, start: float, traffic: Traffic) -> float:
        """Return when a collective of known traffic that could run from `start` (s) on starts."""
        free = float(self._free[np.flatnonzero(traffic.busy)].max(initial=0.0))
        return self.network.earliest(max(start, free))

    def _settle(self) -> None:
        while self._in_progress and self._in_progress[0][0] <= self.now:
            traffic = heapq.heappop(self._in_progress)[2].traffic
            self._ended[id(traffic)] = traffic, self._ended.get(id(traffic), (traffic, 0))[1] + 1

    @property
    def beside(self) -> Traffic:
        """The traffic of collectives of known time so far."""
        self._settle()
        none = np.zeros(self.network.n_channels)
        total = Traffic(none, none, 0.0, 0)
        for traffic, times in self._ended.values():
            total = total.plus(traffic, times)
        for _, _, collective in sorted(self._in_progress):
            total = total.plus(collective.traffic, collective.share(self.now))
        return total

    def traffic(self) -> Traffic:
        """Return the traffic of the channels, simulated and by collectives of known time. On a shared network, bytes
        and messages are those of this run, busy seconds those of all runs since it began."""
        nbytes, sent, n_messages = self.network.own_traffic()
        if self.disturbances is not None and not self.turns:  # all is its own, added up in another order
            nbytes = self.network.channel_nbytes
        busy = self.network.channel_busy - self._busy_before
        seen = Traffic(nbytes, busy, sent, n_messages + self.n_more_messages)
        seen = seen.plus(self.beside, 1.0) if self._in_progress or self._ended else seen
        if self._copies is not None:
            copies, n = self._copies, self._copies.members
            seen = Traffic(copies.nbytes(seen.nbytes), copies.busy(seen.busy), n * seen.sent, n * seen.n_messages)
        if self._booked is not None:
            seen = seen.plus(self._booked[0], 1.0)
            # exchanges that compete with other traffic, if one rank represents others that differ from it
            seen = seen._replace(busy=np.minimum(seen.busy, max(self.now - self.start, 0.0)))
        return seen

    @property
    def nbytes_sent(self) -> float:
        """Bytes of the messages issued so far, and of the collectives of known time as far as they have passed."""
        nbytes = self.beside.sent if self._in_progress or self._ended else 0.0
        members = 1 if self._copies is None else self._copies.members
        return members * (self.network.nbytes_sent + nbytes) + (0.0 if self._booked is None else self._booked[0].sent)

    def busy_intervals(self) -> BusyIntervals:
        """Return when channels carried something, simulated and by known collectives, in order of channel and time."""
        logged = self.network.busy_intervals()
        parts = []
        for collective in self._recorded:
            channel, end = np.flatnonzero(collective.traffic.busy), min(collective.end, self.now)
            if end > collective.start:
                parts.append(busy_rows(channel, collective.start, end))
        logged = logged.beside(np.concatenate(parts)) if parts else logged
        if self._copies is None or self._booked is None:
            return logged
        return logged.copied(self._copies.source, self._booked[1])

    @property
    def stands_for(self) -> bool:
        """Whether each message represents those of several workers."""
        return self._copies is not None

    def stand_for(self, copies: Copies, shared: tuple[Ints, Floats]) -> None:
        """Let each message represent those of several workers; `shared` gives their number on shared channels."""
        self._copies = copies
        self.network.divide_capacity(*shared)

    def book(self, traffic: Traffic, intervals: Records) -> None:
        """Book traffic that the network did not simulate, and when it kept channels busy (BUSY)."""
        self._booked = traffic, intervals

    def catch_up(self) -> None:
        """Set the clock to that of the network, if a run was stopped between the two."""
        self.pass_time(max(self.now, self.network.now))

    def join(self, collective: int, rank: int) -> simpy.Event:
        """Enter a collective now; the event returned is triggered when it has ended for this rank."""
        event = self.env.event()
        self._events[collective, rank] = event
        self._joins.append((collective, rank))
        self._wake_after_pause()
        return event

    def _wake_after_pause(self) -> None:
        """Schedule an event at the end of the current pause, so that queued operations are handed over."""
        if self.opens > self.now:
            self.at(self.opens)

    def trigger_at(self, event: simpy.Event, time: float) -> None:
        """Trigger an `event` at an absolute time (s), not before now."""
        event._ok = True
        event._value = None
        # not by a delay: now + (time - now) may differ from `time` in the last bit, on which results must not depend
        heapq.heappush(self.env._queue, (time, _NORMAL, next(self.env._eid), event))

    def send(self, src: int, dst: int, nbytes: float, *, overhead: bool | None = None) -> simpy.Event:
        """Send a message of `nbytes` from node `src` to node `dst`; return an event that is triggered on delivery.

        overhead  whether the bytes are overhead of a collective of known time instead of payload
        """
        event = self.env.event()
        self._sends.append((src, dst, nbytes, event, overhead))
        self._wake_after_pause()
        return event

    # ------------------------------------------------------------ running

    def run(self, until: simpy.Event | None = None, max_time: float = np.inf, halt: Halt | None = None) -> None:
        """Run until an event has been processed (None: to the end), but not beyond `max_time` (s), and not past a point
        where `halt` returns true. Raises :class:`~ddlsim.errors.DeadlockError` if no further event is possible before
        it."""
        if until is not None:
            vars(self)["until"] = until
        try:
            self.driver.go(max_time, halt)
        finally:
            self.driver.close()

    @property
    def over(self) -> bool:
        return self.until.processed

    def next(self) -> float:
        return self.now if self.asks else self.peek()

    def go(self, limit: float, halt: Halt | None) -> None:
        """Let processes go on as :class:`Driver` says."""
        env = self.env
        quiet_until = -np.inf  # the network completes nothing before this time
        while not self.until.processed:
            next_event = env.peek()
            if next_event > env.now:  # no event is left at this instant
                self.check()
                if halt is not None and halt():
                    self.catch_up()  # the network may have reached a completion that has not been reported yet
                    return
                if self.start_queued():
                    quiet_until = -np.inf
            if next_event > quiet_until:
                done = self.network.advance(min(next_event, limit))
                if done is not None:
                    self.complete(done.ids, done.ranks, done.time)
                    continue
                if self.network.others_wait:
                    return
                quiet_until = next_event
            if next_event == np.inf and (limit == np.inf or not self.network.pending):
                more = f" and {len(self.waiting) - 8} more" if len(self.waiting) > 8 else ""
                who = self.who_waits or "the run has not ended"
                raise DeadlockError(f"deadlock at {self.now:.6g} s: no event is left, but {who}{more}")
            if next_event > limit:
                self.pass_time(limit)
                return
            env.step()

    def close(self) -> None:
        """Do nothing: processes record their operations themselves."""

    @property
    def asks(self) -> bool:
        """Whether processes have started operations at this instant that have not been handed over."""
        return bool(self._joins or self._sends) and self.opens == self.now

    def start_queued(self) -> bool:
        """Hand over all operations that processes started at this instant, or in the pause before it; return whether
        there were any."""
        now = self.now
        if not self.asks:
            return False
        if self._joins:
            joins, self._joins = self._joins, []
            self.network.join([c for c, _ in joins], [r for _, r in joins], now)
        if self._sends:
            sends, self._sends = self._sends, []
            for overhead, rows in itertools.groupby(sends, key=operator.itemgetter(4)):
                src, dst, nbytes, events, _ = zip(*rows, strict=True)
                self.nbytes_asked += sum(nbytes)
                ids = self.network.send(src, dst, np.array(nbytes), now, overhead=overhead)
                for number, event in zip(ids.tolist(), events, strict=True):
                    self._events[number, 0] = event
        return True

    def complete(self, ids: Ints, ranks: Ints, time: float) -> None:
        """Trigger the events for the ends of messages, or of collectives on ranks, (n,)."""
        for key in zip(ids.tolist(), ranks.tolist(), strict=True):
            event = self._events.pop(key, None)
            if event is not None:
                self.trigger_at(event, time)

    def turn(self, now: float) -> None:
        """Process all events of one instant."""
        while self.peek() == now:
            self.env.step()
        self.start_queued()

    @property
    def who_waits(self) -> str:
        """Return who waits for what, the first eight; empty if no worker waits."""
        return "; ".join(f"{name} waits for {what}" for name, what in itertools.islice(self.waiting.items(), 8))


def after(event: simpy.Event, callback: Callable[[simpy.Event], None]) -> None:
    """Let `callback` be called when an event happens."""
    assert event.callbacks is not None
    event.callbacks.append(callback)


def arrivals(cluster: Cluster, messages: Sequence[tuple[int, int, float]]) -> list[float]:
    """Return when each of some messages (source, target, bytes) arrives, in s: all begin at 0, and nothing else uses
    the links."""
    loop, times = Loop(Network(cluster)), [0.0] * len(messages)

    def send(number: int) -> Generator[simpy.Event, object, None]:
        yield loop.send(*messages[number])
        times[number] = loop.now

    remote = [number for number, (source, target, _) in enumerate(messages) if source != target]
    if remote:
        loop.run(loop.env.all_of([loop.env.process(send(number)) for number in remote]))
    return times
