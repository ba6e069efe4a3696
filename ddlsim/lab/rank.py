"""One rank: what the process inside a host's network namespace does when the laboratory tells it.

It listens, says where, is told where the others listen, and then gets one :class:`Prepare` or :class:`Go` after
the other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from ddlsim.collectives.schedule import Schedule
from ddlsim.lab.executor import PATIENCE, Buffer, Executor, LabError
from ddlsim.lab.program import boundaries, program_of
from ddlsim.lab.values import Promise, initial, problem, promises

Address: TypeAlias = tuple[str, int]

_GREETING_NBYTES = 8
#: s before the common start at which ranks stop sleeping: a sleep may end late by a fraction of this
_AWAKE = 1e-3


@dataclass(frozen=True)
class Prepare:
    """Connect, and fill the buffer, for `schedule` at `nbytes`; the last `n_silent` ranks are servers.

    A rank gives up after `patience` s in which nothing moved.
    """

    schedule: Schedule
    nbytes: int
    n_silent: int = 0
    patience: float = PATIENCE


@dataclass(frozen=True)
class Ready:
    """Everything is there for the next :class:`Go`."""


@dataclass(frozen=True)
class Go:
    """Begin at `start`, s of CLOCK_MONOTONIC."""

    start: float


@dataclass(frozen=True)
class Done:
    """This rank entered and ended at these s of CLOCK_MONOTONIC; its result was right."""

    entered: float
    ended: float


@dataclass(frozen=True)
class Failed:
    """Why this rank cannot go on."""

    reason: str


class _Links:
    """The connections of a rank, made when a schedule first needs them."""

    def __init__(self, rank: int, host: str, congestion: str) -> None:
        self.rank, self.host, self.congestion = rank, host, congestion
        self.listener = socket.create_server((host, 0), backlog=4096)
        _choose_congestion(self.listener, congestion)
        self.listener.settimeout(PATIENCE)
        self.connections: dict[tuple[int, int], socket.socket] = {}

    def ensure(self, wanted: set[tuple[int, int]], addresses: Sequence[Address]) -> None:
        """Connect to (peer, lane) of higher rank, then accept those of lower rank, unless they are there."""
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
                    raise LabError("a peer closed its connection before it said who it is")
                greeting += got
            self.connections[int.from_bytes(greeting[:4]), int.from_bytes(greeting[4:])] = link
        for key in new:
            self.connections[key].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        for link in (self.listener, *self.connections.values()):
            link.close()


def _choose_congestion(link: socket.socket, name: str) -> None:
    """Use a congestion control where the kernel has it, whatever this computer's own default is."""
    with suppress(OSError):  # not in this kernel: its default it is
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def congestion_control(name: str) -> str:
    """Return the congestion control that connections have which ask for one of that name."""
    with socket.socket() as link:
        _choose_congestion(link, name)
        return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@dataclass(frozen=True)
class _Task:
    """What is repeated."""

    executor: Executor
    start: Buffer
    promised: tuple[Promise, ...]
    patience: float

    def fill(self) -> None:
        self.executor.buffer[:] = self.start

    def check(self) -> str:
        program = self.executor.program
        copies = self.executor.buffer.reshape(program.copies, program.n_elements)
        return problem(copies[0], self.promised)


def _prepared(order: Prepare, links: _Links, addresses: Sequence[Address]) -> _Task:
    program = program_of(order.schedule, links.rank, order.nbytes)
    links.ensure(program.peers(), addresses)
    start = initial(order.schedule, links.rank, program.n_elements, order.n_silent)
    bounds = boundaries(order.schedule, program.n_elements)
    promised = promises(order.schedule, links.rank, bounds, program.n_elements, order.n_silent)
    return _Task(Executor(program, links.connections, start.copy()), start, promised, order.patience)


def _run(order: Go, task: _Task) -> Done:
    """Run once, from the common start until this rank has its result; then check it."""
    program = task.executor.program
    copies = task.executor.buffer.reshape(program.copies, program.n_elements)
    time.sleep(max(order.start - _AWAKE - time.monotonic(), 0.0))
    while time.monotonic() < order.start:
        os.sched_yield()  # with more ranks than cores each must get its turn
    entered = time.monotonic()
    task.executor.run(task.patience)
    for copy in copies[1:]:  # contributions side by side are the algorithm's to add up
        copies[0] += copy
    ended = time.monotonic()
    wrong = task.check()
    if wrong:
        raise LabError(f"the result is wrong: {wrong}")
    task.fill()
    return Done(entered, ended)


def serve(pipe: Connection, rank: int, host: str, congestion: str) -> None:
    """Do what comes over `pipe` until it closes; report a failure there, and stop."""
    links = _Links(rank, host, congestion)
    try:
        pipe.send(links.listener.getsockname()[:2])
        addresses: list[Address] = pipe.recv()
        task: _Task | None = None
        while True:
            order = pipe.recv()
            if isinstance(order, Prepare):
                task = _prepared(order, links, addresses)
                task.fill()
                pipe.send(Ready())
            elif isinstance(order, Go) and task is not None:
                pipe.send(_run(order, task))
            else:
                raise LabError(f"cannot do {order!r} now")
    except EOFError:
        return  # the laboratory closes
    except Exception as error:  # whatever it is, the laboratory must hear of it, if it is still there
        with suppress(OSError):
            pipe.send(Failed(str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"))
    finally:
        links.close()
