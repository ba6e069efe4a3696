"""One rank of the laboratory: a process in the network namespace of a host.

It listens, reports its address, receives those of the others, and then executes orders: a :class:`Prepare`, or the time
at which to start, in s of CLOCK_MONOTONIC.

The rank's :class:`Program` contains the messages that it sends and receives in each step. The buffer is float32. Chunks
end at whole elements, equally on all ranks, so sizes differ from the schedule's exact shares by less than an element. A
message without data still carries one byte, so that its receiver can detect it.

An :class:`Executor` runs a program over TCP, in one thread with one event loop for all connections, as in the libraries
used for training. There is one connection per peer and lane, so that lanes cannot block each other. Messages that
arrive before their round are stored until the rank reaches it, so a sender never waits for a late receiver: messages
are eager (docs/architecture.md). A send ends when the kernel has accepted all of its bytes, which is all that a program
can observe.

Results are verified: contributions are integers below 1000, whose sums are exact in float32 for up to 16,000 ranks, in
any order.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ddlsim.collectives.check import groups_of, promise
from ddlsim.collectives.schedule import Ints, Round, Schedule
from ddlsim.errors import ConfigError, DdlsimError

Buffer = npt.NDArray[np.float32]
Address: TypeAlias = tuple[str, int]

ITEM_NBYTES = 4
#: time in s without any transfer after which a rank gives up
PATIENCE = 30.0
_LOW_WATER = 64 * 1024
_GREETING_NBYTES = 8
#: time in s before the common start at which ranks stop sleeping, because a sleep may end late by part of it
_AWAKE = 1e-3


class LabError(DdlsimError, RuntimeError):
    """Raised when a process (rank) of a lab run fails or returns a wrong result."""


@dataclass(frozen=True)
class Part:
    """One end of a message: parts of the buffer that go to, or come from, a `peer`.

    pieces    slices of the buffer, in elements, in message order
    padding   meaningless bytes before them
    reduce    a received message is added to the buffer instead of overwriting it
    snapshot  a sent message must be copied first, because the same step receives into its pieces
    ordinal   index among all messages of this lane from (or to) `peer`
    """

    peer: int
    pieces: tuple[slice, ...]
    padding: int
    reduce: bool
    snapshot: bool
    ordinal: int

    @property
    def nbytes(self) -> int:
        """Bytes on the connection."""
        n_elements: int = sum(piece.stop - piece.start for piece in self.pieces)
        return self.padding + ITEM_NBYTES * n_elements


@dataclass(frozen=True)
class Step:
    """A round in which this rank participates; it ends when all of these messages have ended on this rank."""

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]


@dataclass(frozen=True)
class Program:
    """The work of one rank: lanes of steps on a buffer of `n_elements` float32 (times `copies`)."""

    rank: int
    n_elements: int
    copies: int
    lanes: tuple[tuple[Step, ...], ...]

    def peers(self) -> set[tuple[int, int]]:
        """Return the connections needed, as (peer, lane)."""
        return {
            (part.peer, number)
            for number, lane in enumerate(self.lanes)
            for step in lane
            for part in (*step.sends, *step.receives)
        }


def boundaries(schedule: Schedule, n_elements: int) -> Ints:
    """Return the boundaries of the chunks in a buffer of `n_elements`, shape (n_chunks + 1,), in elements.

    With `copies`, the buffer is longer by this factor. Raises ConfigError unless all copies have equal chunks.
    """
    n_copied = schedule.n_chunks // schedule.copies
    weight = np.ones(schedule.n_chunks) if schedule.chunk_weight is None else schedule.chunk_weight
    copies = weight.reshape(schedule.copies, n_copied)
    if (copies != copies[0]).any():
        raise ConfigError("the copies of this schedule have different chunks; use the same chunk_weight for each copy")
    ends = np.rint(np.cumsum(copies[0]) * (n_elements / copies[0].sum())).astype(np.int64)
    starts = np.arange(schedule.copies)[:, None] * n_elements
    return np.concatenate([np.zeros(1, dtype=np.int64), (starts + ends).ravel()])


def program_of(schedule: Schedule, rank: int, nbytes: int) -> Program:
    """Return the program of `rank` for `schedule` with `nbytes` (a multiple of 4) per rank."""
    n_elements = nbytes // ITEM_NBYTES
    bounds = boundaries(schedule, n_elements)
    lanes = tuple(tuple(_steps(schedule, lane, rank, bounds)) for lane in schedule.lanes)
    return Program(rank, n_elements, schedule.copies, lanes)


def _steps(schedule: Schedule, lane: tuple[Round, ...], rank: int, bounds: Ints) -> list[Step]:
    n_sent, n_received = Counter[int](), Counter[int]()
    steps = []
    for round in lane:
        mine = np.flatnonzero((round.src == rank) | (round.dst == rank)).tolist()
        for repetition in range(round.repeat if mine else 0):
            owner, chunk = schedule.chunks(round, repetition)
            carried = {message: chunk[owner == message] for message in mine}
            incoming = [m for m in mine if round.dst[m] == rank]
            outgoing = [m for m in mine if round.src[m] == rank]
            written = np.concatenate([carried[m] for m in incoming]) if incoming else chunk[:0]
            sends = tuple(
                _part(round, int(round.dst[m]), carried[m], bounds, bool(np.isin(carried[m], written).any()), n_sent)
                for m in outgoing
            )
            receives = tuple(_part(round, int(round.src[m]), carried[m], bounds, False, n_received) for m in incoming)
            steps.append(Step(sends, receives))
    return steps


def slices(chunks: Ints, bounds: Ints) -> list[slice]:
    """Return the slices of chunks in a buffer, merging consecutive ones."""
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1) if len(chunks) else []
    return [slice(int(bounds[run[0]]), int(bounds[run[-1] + 1])) for run in runs]


def _part(round: Round, peer: int, chunks: Ints, bounds: Ints, snapshot: bool, counts: Counter[int]) -> Part:
    """Return one end of a message that carries `chunks`, and increment the message count of `peer`."""
    pieces = [piece for piece in slices(chunks, bounds) if piece.stop > piece.start]
    padding = math.ceil(round.header)
    counts[peer] += 1
    return Part(peer, tuple(pieces), padding if pieces else max(padding, 1), round.reduce, snapshot, counts[peer] - 1)


class _Channel:
    """A connection with its outgoing data, and memory for the incoming messages of this run in order."""

    def __init__(self, connection: socket.socket, peer: int, lane: int, inbox: list[memoryview]) -> None:
        connection.setblocking(False)
        self.connection, self.peer, self.lane, self.inbox = connection, peer, lane, inbox
        self.outbox: deque[memoryview] = deque()
        self.low_water = 0  # unknown: an earlier run may have set it
        self.restart()

    def restart(self) -> None:
        """Restart with the first message."""
        self.n_full = self.position = 0
        self._expect()

    @property
    def events(self) -> int:
        """Events to wait for."""
        waiting = selectors.EVENT_READ if self.n_full < len(self.inbox) else 0
        return waiting | (selectors.EVENT_WRITE if self.outbox else 0)

    def send(self) -> None:
        """Send as much as the kernel accepts."""
        while self.outbox:
            view = self.outbox[0]
            try:
                n = self.connection.send(view)
            except BlockingIOError:
                return
            if n < len(view):
                self.outbox[0] = view[n:]
            else:
                self.outbox.popleft()

    def receive(self) -> None:
        """Receive available data of the next message; call only when there are some."""
        message = self.inbox[self.n_full]
        try:
            n = self.connection.recv_into(message[self.position :])
        except BlockingIOError:
            return
        if n == 0:
            raise LabError(f"rank {self.peer} closed its connection before the operation ended")
        self.position += n
        if self.position == len(message):
            self.n_full, self.position = self.n_full + 1, 0
        self._expect()

    def _expect(self) -> None:
        """Set the socket to wake up for the rest of a message or a large part of it, not for each frame."""
        if self.n_full == len(self.inbox):
            return
        wanted = min(len(self.inbox[self.n_full]) - self.position, _LOW_WATER)
        if wanted != self.low_water:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self.low_water = wanted


@dataclass
class _Lane:
    """Progress of this rank in one lane."""

    steps: tuple[Step, ...]
    now: int = 0
    open: list[Part] = field(default_factory=list)  # undelivered messages of the current step


class Executor:
    """One rank's part of one schedule at one size; :meth:`run` may be called again and again.

    `connections` has a connected socket for every (peer, lane) of ``program.peers()``. `buffer` is the schedule's
    buffer, shape (copies * n_elements,).
    """

    def __init__(self, program: Program, connections: Mapping[tuple[int, int], socket.socket], buffer: Buffer) -> None:
        self.program, self.buffer = program, buffer
        self._bytes = buffer.data.cast("B")
        self._channels: dict[tuple[int, int], _Channel] = {}
        for peer, lane in sorted(program.peers()):
            parts = [part for step in program.lanes[lane] for part in step.receives if part.peer == peer]
            inbox = [memoryview(bytearray(part.nbytes)) for part in parts]  # in order of arrival
            self._channels[peer, lane] = _Channel(connections[peer, lane], peer, lane, inbox)

    def run(self, patience: float = PATIENCE) -> None:
        """Run the schedule until this rank has finished all its lanes.

        Raises :class:`LabError` if a peer is gone, or after `patience` s without any transfer.
        """
        self._lanes = [_Lane(steps) for steps in self.program.lanes]
        for channel in self._channels.values():
            channel.restart()
        with selectors.DefaultSelector() as selector:
            waits: dict[_Channel, int] = dict.fromkeys(self._channels.values(), 0)
            for number, lane in enumerate(self._lanes):
                self._enter(number, lane)
                self._advance(number)
            self._watch(selector, waits)
            while any(lane.now < len(lane.steps) for lane in self._lanes):
                ready = selector.select(patience)
                if not ready:
                    raise LabError(self._stuck(patience))
                for key, events in ready:
                    if events & selectors.EVENT_WRITE:
                        key.data.send()
                    if events & selectors.EVENT_READ:
                        key.data.receive()
                    self._advance(key.data.lane)
                self._watch(selector, waits)

    def _watch(self, selector: selectors.BaseSelector, waits: dict[_Channel, int]) -> None:
        """Update the selector with the events that channels wait for."""
        for channel, before in waits.items():
            events = channel.events
            if events == before:
                continue
            if not before:
                selector.register(channel.connection, events, channel)
            elif not events:
                selector.unregister(channel.connection)
            else:
                selector.modify(channel.connection, events, channel)
            waits[channel] = events

    def _enter(self, number: int, lane: _Lane) -> None:
        """Begin a lane's current step: send its messages with the present contents of the buffer."""
        if lane.now == len(lane.steps):
            return
        step = lane.steps[lane.now]
        lane.open = list(step.receives)
        for part in step.sends:
            channel = self._channels[part.peer, number]
            if part.padding:
                channel.outbox.append(memoryview(bytes(part.padding)))
            for piece in part.pieces:
                view = self._bytes[ITEM_NBYTES * piece.start : ITEM_NBYTES * piece.stop]
                channel.outbox.append(memoryview(bytes(view)) if part.snapshot else view)
            channel.send()

    def _advance(self, number: int) -> None:
        """Deliver the received messages of a lane's current step, and proceed through as many steps as possible."""
        lane = self._lanes[number]
        while lane.now < len(lane.steps):
            lane.open = [part for part in lane.open if not self._delivered(part, number)]
            sends = lane.steps[lane.now].sends
            if lane.open or any(self._channels[part.peer, number].outbox for part in sends):
                return
            lane.now += 1
            self._enter(number, lane)

    def _delivered(self, part: Part, number: int) -> bool:
        """Copy a message into the buffer if it has arrived completely."""
        channel = self._channels[part.peer, number]
        if channel.n_full <= part.ordinal:
            return False
        values = np.frombuffer(channel.inbox[part.ordinal], np.float32, offset=part.padding)
        begin = 0
        for piece in part.pieces:
            came = values[begin : begin + piece.stop - piece.start]
            if part.reduce:
                self.buffer[piece] += came
            else:
                self.buffer[piece] = came
            begin += len(came)
        return True

    def _stuck(self, patience: float) -> str:
        waiting = [
            f"lane {number}, step {lane.now} for rank {part.peer}"
            for number, lane in enumerate(self._lanes)
            for part in lane.open
        ]
        return (
            f"no byte was sent or received for {patience:g} s, while waiting in {waiting[0] if waiting else 'a send'}"
        )


class Promise(NamedTuple):
    """Elements of the result, and their required values."""

    where: slice
    values: Buffer


def contribution(rank: int, n_elements: int, n_silent: int = 0, n_ranks: int = 0) -> Buffer:
    """Return the contribution of `rank`, zeros for the last `n_silent` of `n_ranks` (servers), shape (n_elements,)."""
    if n_silent and rank >= n_ranks - n_silent:
        return np.zeros(n_elements, np.float32)
    return np.random.default_rng(rank).integers(0, 1000, n_elements).astype(np.float32)


def _group(schedule: Schedule, rank: int) -> Ints | None:
    return next((group for group in groups_of(schedule) if rank in group), None)


def initial(schedule: Schedule, rank: int, n_elements: int, n_silent: int = 0) -> Buffer:
    """Return the initial buffer of `rank`, shape (copies * n_elements,): its contribution in its copy, else zeros."""
    group = _group(schedule, rank)
    place = 0 if group is None else int(np.flatnonzero(group == rank)[0])
    buffer = np.zeros((schedule.copies, n_elements), np.float32)
    buffer[place % schedule.copies] = contribution(rank, n_elements, n_silent, schedule.n_ranks)
    return buffer.ravel()


def promises(schedule: Schedule, rank: int, bounds: Ints, n_elements: int, n_silent: int = 0) -> tuple[Promise, ...]:
    """Return the result that `rank` must have, as specified by :mod:`ddlsim.collectives.check`.

    `bounds` are the boundaries of the chunks. The last `n_silent` ranks need no result.
    """
    group = _group(schedule, rank)
    if group is None or rank >= schedule.n_ranks - n_silent:
        return ()
    n_chunks = schedule.n_chunks // schedule.copies
    counts, must = promise(schedule, group, n_chunks, np.eye(schedule.n_ranks, dtype=np.uint64))
    place = int(np.flatnonzero(group == rank)[0])
    values, sizes = np.zeros(n_elements, np.float32), np.diff(bounds[: n_chunks + 1])
    for member in group.tolist():
        share = np.repeat(counts[place, :, member], sizes).astype(np.float32)
        values += share * contribution(member, n_elements, n_silent, schedule.n_ranks)
    return tuple(Promise(part, values[part]) for part in slices(np.flatnonzero(must[place]), bounds))


def problem(result: Buffer, promised: tuple[Promise, ...]) -> str:
    """Describe where `result`, shape (n_elements,), is wrong; return "" if it is correct."""
    for where, values in promised:
        wrong = np.flatnonzero(result[where] != values)
        if len(wrong):
            i = int(wrong[0])
            return (
                f"{len(wrong)} of {len(values)} elements are wrong; element {where.start + i} is "
                f"{result[where][i]:g} instead of {values[i]:g}"
            )
    return ""


@dataclass(frozen=True)
class Prepare:
    """Connect, and fill the buffer, for `schedule` at `nbytes`; the last `n_silent` ranks are servers.

    A rank gives up after `patience` s without any transfer.
    """

    schedule: Schedule
    nbytes: int
    n_silent: int = 0
    patience: float = PATIENCE


@dataclass(frozen=True)
class Failed:
    """The reason why this rank failed."""

    reason: str


class _Links:
    """The connections of a rank, created on first use by a schedule."""

    def __init__(self, rank: int, host: str, congestion: str) -> None:
        self.rank, self.host, self.congestion = rank, host, congestion
        self.listener = socket.create_server((host, 0), backlog=4096)
        _choose_congestion(self.listener, congestion)
        self.listener.settimeout(PATIENCE)
        self.connections: dict[tuple[int, int], socket.socket] = {}

    def ensure(self, wanted: set[tuple[int, int]], addresses: Sequence[Address]) -> None:
        """Create missing connections: connect to (peer, lane) of higher rank, then accept those of lower rank."""
        new = sorted(wanted - self.connections.keys())
        for peer, lane in new:
            if peer > self.rank:
                link = socket.socket()
                _choose_congestion(link, self.congestion)
                link.settimeout(PATIENCE)
                link.connect(addresses[peer])
                link.sendall(self.rank.to_bytes(4) + lane.to_bytes(4))
                self.connections[peer, lane] = link
        for _ in [peer for peer, _ in new if peer < self.rank]:
            link, _ = self.listener.accept()
            link.settimeout(PATIENCE)
            greeting = b""
            while len(greeting) < _GREETING_NBYTES:
                got = link.recv(_GREETING_NBYTES - len(greeting))
                if not got:
                    raise LabError("a peer closed its connection before it sent its rank")
                greeting += got
            self.connections[int.from_bytes(greeting[:4]), int.from_bytes(greeting[4:])] = link
        for key in new:
            self.connections[key].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        for link in (self.listener, *self.connections.values()):
            link.close()


def _choose_congestion(link: socket.socket, name: str) -> None:
    """Set a connection's congestion control if the kernel supports it, whatever the default is."""
    with suppress(OSError):  # not in this kernel: name is its default
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def congestion_control(name: str) -> str:
    """Return the actual congestion control of connections that request `name`."""
    with socket.socket() as link:
        _choose_congestion(link, name)
        return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


class _Task:
    """The prepared operation, which is repeated."""

    def __init__(self, order: Prepare, links: _Links, addresses: Sequence[Address]) -> None:
        schedule, rank, self.patience = order.schedule, links.rank, order.patience
        program = program_of(schedule, rank, order.nbytes)
        links.ensure(program.peers(), addresses)
        self.start = initial(schedule, rank, program.n_elements, order.n_silent)
        bounds = boundaries(schedule, program.n_elements)
        self.promised = promises(schedule, rank, bounds, program.n_elements, order.n_silent)
        self.executor = Executor(program, links.connections, self.start.copy())

    def run(self, start: float) -> tuple[float, float]:
        """Run once, from the common start until this rank has its result, and verify the result; return when the rank
        started and finished, in s of CLOCK_MONOTONIC."""
        copies = self.executor.buffer.reshape(self.executor.program.copies, -1)
        time.sleep(max(start - _AWAKE - time.monotonic(), 0.0))
        while time.monotonic() < start:
            os.sched_yield()  # with more ranks than cores, each must get its turn
        entered = time.monotonic()
        self.executor.run(self.patience)
        for copy in copies[1:]:  # the algorithm adds contributions stored separately
            copies[0] += copy
        ended = time.monotonic()
        if wrong := problem(copies[0], self.promised):
            raise LabError(f"the result of the collective is wrong: {wrong}")
        self.executor.buffer[:] = self.start
        return entered, ended


def serve(pipe: Connection, rank: int, host: str, congestion: str) -> None:
    """Execute the orders from `pipe` until it is closed; after an error, report it and stop."""
    links = _Links(rank, host, congestion)
    try:
        pipe.send(links.listener.getsockname()[:2])
        addresses: list[Address] = pipe.recv()
        task: _Task | None = None
        while True:
            order = pipe.recv()
            if isinstance(order, Prepare):
                task = _Task(order, links, addresses)
                pipe.send(None)
            elif isinstance(order, float) and task is not None:
                pipe.send(task.run(order))
            else:
                raise LabError(f"received the order {order!r} before the Prepare order")
    except EOFError:
        return  # the laboratory has closed
    except Exception as error:  # any error must be reported to the laboratory, if possible
        with suppress(OSError):
            pipe.send(Failed(str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"))
    finally:
        links.close()
