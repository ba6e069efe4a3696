"""One rank of the laboratory: a process in the network namespace of a host.

It listens, reports its address, receives those of the others, and then executes orders: a :class:`Prepare`, or the time
at which to start, in s of CLOCK_MONOTONIC.

Results are verified: contributions are integers below 1000, whose sums are exact in float32 for up to 16,000 ranks, in
any order.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias

import numpy as np

from ddlsim.collectives.check import groups_of, promise
from ddlsim.collectives.schedule import Ints, Schedule
from ddlsim.lab.executor import PATIENCE, Buffer, Executor, LabError
from ddlsim.lab.program import boundaries, program_of, slices


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
    return tuple(Promise(each, values[each]) for each in slices(np.flatnonzero(must[place]), bounds))


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


Address: TypeAlias = tuple[str, int]

_GREETING_NBYTES = 8
#: time in s before the common start at which ranks stop sleeping, because a sleep may end late by part of it
_AWAKE = 1e-3


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
