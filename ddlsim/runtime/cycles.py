"""Workers with independent cycles (:mod:`ddlsim.runtime.lanes`) as a step program, for printing and exports.

A step of the program is one cycle of each worker: its work, its messages to servers or peers, and their answers.
Dependencies stay inside a rank: a cycle waits for another worker's only where it receives from it. Anything that
depends on the order of arrival is decided in the run, and listed in the notes of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from ddlsim.network import lanes as ls
from ddlsim.plan.plan import BACKWARD, COMPUTE, FORWARD, RECEIVE, SEND, UPDATE, Plan
from ddlsim.plan.program import N_STEPS, Row, Step, StepProgram, step_of, template_of
from ddlsim.runtime.codec import Message, Messages
from ddlsim.runtime.worker import Worker
from ddlsim.workload.memory import kept_nbytes

if TYPE_CHECKING:
    from ddlsim.runtime.lanes import Op

#: a row: its step, and its index in the step
_Ref = tuple[int, int]
_KINDS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": UPDATE}


@dataclass
class Cycles:
    """The cycles of workers that repeat the operations `ops`.

    nbytes    of every message, if `messages` does not encode
    servers   seconds per request of each server; servers have the ranks after the workers
    peers     rank -> the ranks that it sends to, without servers
    choose    samples the peer that a worker sends to, -1 for none; the plan shows the first sample
    notes     decisions of the run
    """

    workers: Sequence[Worker]
    ops: Sequence[Op]
    nbytes: float
    messages: Messages
    _: KW_ONLY
    servers: Sequence[float] = ()
    peers: Sequence[Sequence[int]] = ()
    choose: Callable[[Worker], int] | None = None
    notes: Sequence[str] = ()

    def plan(self, n_cycles: int | None) -> Plan:
        """Return the plan of some cycles, by default one. Operations are repeated as often as by the first worker."""
        workers, servers, peers, ops = self.workers, self.servers, self.peers, self.ops
        for at, op in reversed(list(enumerate(ops))):
            if op.kind == ls.AGAIN and op.seconds is not None:
                before, own = list(ops[: at - op.number]), list(ops[at - op.number : at])
                ops = [*before, *(own * int(op.seconds(workers[0]))), *ops[at + 1 :]]
        self._ops = ops
        self._lanes: dict[tuple[int, str], int] = {}
        self._names: dict[str, int] = {}
        self._notes: list[str] = [] if self.messages.choice is None else self.messages.value_notes
        self._last: list[list[_Ref]] = [[] for _ in workers]  # latest row of each worker
        self._waits: list[list[_Ref]] = [[] for _ in workers]  # rows that it waits for before it continues
        self._sent: list[list[_Ref]] = [[] for _ in workers]  # messages that JOIN waits for
        self._senders = [[i for i, to in enumerate(peers) if rank in to] for rank in range(len(peers))]
        self._chosen = [-1] * len(workers)
        if self.choose is not None:
            self._chosen = [_first(self.choose, worker) for worker in workers]
            self._notes.append(
                "peers are chosen at random during the run; here, each rank sends to the peer that it would choose "
                "first"
            )
        #: gradients per update of the servers, if workers wait for it
        counts = [op.number for op in ops if op.kind in (ls.CONTRIBUTE, ls.CONTRIBUTE_FRESH)]
        self._awaited = counts[0] if any(op.kind == ls.MEET for op in ops) else 1
        if servers and self._awaited < max(len(workers), 2):
            self._notes.append(
                "the cycles of workers are independent here; the order in which servers process them is "
                "decided during the run"
            )
        steps = [self._step(number) for number in range(N_STEPS)]
        n, n_layers = len(workers), len(workers[0].workload.forward)
        template = template_of(
            steps, self._lanes, groups=(), parts=(), n_layers=n_layers, names=tuple(self._names),
            servers=range(n, n + len(servers)), notes=[*self._notes, *self.notes],
        )  # fmt: skip
        return StepProgram.of(template).unroll(1 if n_cycles is None else n_cycles)

    def _step(self, number: int) -> Step:
        """Return the rows of all workers' next cycle."""
        self._number, self._rows, self._n_messages = number, list[Row](), 0
        self._posted: list[list[_Ref]] = [[] for _ in self.workers]
        self._arrived: list[list[_Ref]] = [[] for _ in self.workers]
        self._gathered: list[list[_Ref]] = [[] for _ in self.servers]
        self._passes = [[0, 0] for _ in self.workers]
        left_out = [0] * len(self.workers)
        for op in self._ops:
            for worker in self.workers:
                if left_out[worker.rank]:
                    left_out[worker.rank] -= 1
                elif op.kind == ls.CHOOSE and self._chosen[worker.rank] < 0:
                    left_out[worker.rank] = op.number
                else:
                    self._do(op, worker)
        return step_of(self._rows, self._lanes)

    # ------------------------------------------------------------ rows

    def _add(self, place: int, lane: str, kind: int, refs: Sequence[_Ref], name: str = "", **more: object) -> _Ref:
        called = self._names.setdefault(name, len(self._names)) if name else -1
        row = Row(place, lane, kind, name=called, **more)  # type: ignore[arg-type]  # its fields
        of_step = sorted(refs, key=lambda ref: ref[0] < self._number)  # those of the same step first
        row.needs = [(at, self._number - step) for step, at in of_step]
        self._rows.append(row)
        return self._number, len(self._rows) - 1

    def _work(self, worker: Worker, kind: int, seconds: float, name: str = "", **more: object) -> None:
        refs, self._waits[worker.rank] = self._waits[worker.rank], []
        self._last[worker.rank] = [self._add(worker.rank, "compute", kind, refs, name, seconds=seconds, **more)]

    def _message(
        self, ends: tuple[int, int], lanes: tuple[str, str], nbytes: float, refs: Sequence[_Ref]
    ) -> tuple[_Ref, _Ref]:
        """Add a message between two ranks; return its two rows."""
        src, dst = ends
        number, self._n_messages = self._n_messages, self._n_messages + 1
        sent = self._add(src, lanes[0], SEND, refs, nbytes=nbytes, to=dst, number=number)
        return sent, self._add(dst, lanes[1], RECEIVE, (), nbytes=nbytes, to=src, number=number)

    def _ready(self, worker: Worker) -> list[_Ref]:
        return [*self._last[worker.rank], *self._waits[worker.rank]]

    # ------------------------------------------------------------ operations

    def _do(self, op: Op, worker: Worker) -> None:
        rank, n = worker.rank, len(self.workers)
        if op.kind == ls.WORK:
            self._pass(op, worker)
        elif op.kind in (ls.OWED, ls.FETCH):
            self._work(worker, COMPUTE, 0.0, op.name)
        elif op.kind == ls.EXCHANGE:
            self._push(worker)
            for i, seconds in enumerate(self.servers):
                self._serve(worker, i, "update", seconds)
            self._pull(worker)
        elif op.kind == ls.TRAVEL:
            (self._pull if op.number else self._push)(worker)
        elif op.kind == ls.DELAY and op.seconds is not None and op.seconds(worker):
            for i in range(len(self.servers)):
                self._serve(worker, i, op.name, op.seconds(worker))
        elif op.kind in (ls.CONTRIBUTE, ls.CONTRIBUTE_FRESH):
            for i, gathered in enumerate(self._gathered):
                gathered.append(self._serve(worker, i, op.name, 0.0 if op.seconds is None else op.seconds(worker)))
            if 1 < op.number < n:
                self._notes.append(f"an update uses {op.number} gradients and starts when the last of them arrives")
        elif op.kind == ls.MEET and 1 < self._awaited < n:
            self._notes.append(
                "a worker waits for the update that uses its gradient; which update that is depends on the run"
            )
        elif op.kind == ls.CLOCK and 0 < op.number < ls.MANY:
            self._notes.append(f"a worker waits if it is more than {op.number} updates ahead of the slowest one")
        elif op.kind == ls.POST:
            for to in self.peers[rank]:
                lanes = f"to {to}", f"from {rank}"
                sent, arrived = self._message((rank, to), lanes, self._size(worker)[0], self._ready(worker))
                self._posted[rank].append(sent)
                self._arrived[to].append(arrived)
        elif op.kind == ls.AWAIT:
            self._waits[rank] += self._posted[rank] + self._arrived[rank]
        elif op.kind == ls.DISPATCH:
            self._dispatch(worker, self._chosen[rank], answered=bool(op.number))
        elif op.kind == ls.JOIN:
            self._waits[rank], self._sent[rank] = self._waits[rank] + self._sent[rank], []

    def _pass(self, op: Op, worker: Worker) -> None:
        rank, n_layers = worker.rank, len(worker.workload.forward)
        seconds = 0.0 if op.seconds is None else op.seconds(worker)
        if op.name not in _KINDS:
            if op.name in ("encode", "decode"):
                seconds = self._coding(worker, op.name)
            if seconds or op.seconds is not None:
                self._work(worker, COMPUTE, seconds, op.name)
            return
        kind = _KINDS[op.name]
        if kind == UPDATE:
            self._work(worker, kind, seconds, end=n_layers)
            return
        passes = self._passes[rank]
        per_cycle = sum(each.kind == ls.WORK and each.name == "forward" for each in self._ops)
        micro = rank * per_cycle + passes[kind]
        passes[kind] += 1
        stored = kept_nbytes(worker.workload.model.layers, worker.workload.precision)[0] * worker.workload.batch_size
        holds = stored if kind == FORWARD else -stored
        self._work(worker, kind, seconds, micro=micro, end=n_layers, holds=holds)

    def _coding(self, worker: Worker, name: str) -> float:
        """Return the time to encode a worker's messages, or to decode those that it receives, s."""
        if self.messages.choice is None:
            return 0.0
        if self.servers:
            ends = range(len(self.servers))
            return sum(self._size(worker, i, down=name == "decode")[1] for i in ends)
        nbytes, seconds = self._size(worker)
        if name == "encode":
            return seconds
        n = len(self._senders[worker.rank]) if self.peers else 1
        return n * self.messages.decode_seconds(worker, Message(worker.params, [nbytes]))

    def _size(self, worker: Worker, part: int = 0, *, down: bool = False) -> tuple[float, float]:
        """Return the bytes of a message, and the seconds of encoding (for answers, decoding) it."""
        if self.messages.choice is None:
            return self.nbytes, 0.0
        return self.messages.first_message_cost(worker, part, down=down)

    # ------------------------------------------------------------ servers and chosen peers

    def _push(self, worker: Worker) -> None:
        ready, sent = self._ready(worker), list[_Ref]()
        for i in range(len(self.servers)):
            ends, lanes = (worker.rank, len(self.workers) + i), (f"server {i}", f"worker {worker.rank}")
            sent.append(self._message(ends, lanes, self._size(worker, i)[0], ready)[0])
        self._waits[worker.rank] += sent

    def _serve(self, worker: Worker, i: int, name: str, seconds: float) -> _Ref:
        return self._add(len(self.workers) + i, f"worker {worker.rank}", COMPUTE, (), name, seconds=seconds)

    def _pull(self, worker: Worker) -> None:
        for i in range(len(self.servers)):
            ends, lanes = (len(self.workers) + i, worker.rank), (f"worker {worker.rank}", f"server {i}")
            met = self._gathered[i] if 1 < self._awaited == len(self.workers) else []  # the pushes of all workers
            _, arrived = self._message(ends, lanes, self._size(worker, i, down=True)[0], met)
            self._waits[worker.rank].append(arrived)

    def _dispatch(self, worker: Worker, to: int, *, answered: bool) -> None:
        rank = worker.rank
        lanes = f"to {to}", f"from {rank}"
        sent, _ = self._message((rank, to), lanes, self._size(worker)[0], self._ready(worker))
        if answered:
            peer = self.workers[to]
            nbytes, seconds = self._size(peer)
            if seconds:
                self._add(to, lanes[1], COMPUTE, (), "encode", seconds=seconds)
            _, sent = self._message((to, rank), (lanes[1], lanes[0]), nbytes, ())
        self._sent[rank] = [sent]


def _first(choose: Callable[[Worker], int], worker: Worker) -> int:
    """Return the first peer among those sampled for a block of steps, -1 if there is none."""
    drawn = [choose(worker) for _ in range(ls.BLOCK)]
    return next((to for to in drawn if to >= 0), -1)
