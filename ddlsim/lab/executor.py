"""Run one rank's part of a schedule over TCP, on a real buffer.

There is one thread with one event loop for all connections, as in the libraries used for training, and one connection
per peer and lane, so that lanes cannot block each other. Messages that arrive before their round are stored until the
rank reaches it, so a sender never waits for a late receiver: messages are eager (docs/architecture.md). A send ends
when the kernel has accepted all of its bytes, which is all that a program can observe.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddlsim.errors import DdlsimError
from ddlsim.lab.program import ITEM_NBYTES, Part, Program, Step

Buffer = npt.NDArray[np.float32]

#: time in s without any transfer after which a rank gives up
PATIENCE = 30.0
_LOW_WATER = 64 * 1024


class LabError(DdlsimError, RuntimeError):
    """Raised when a process (rank) of a lab run fails or returns a wrong result."""


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
