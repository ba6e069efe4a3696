"""Runs in which each worker repeats its own cycle of operations.

The kernel executes the cycles, and Python follows their log.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from ddlsim.collectives.nccl import MESSAGE_CHANNELS
from ddlsim.errors import DdlsimError, DeadlockError
from ddlsim.network import lanes as ls
from ddlsim.network import tasks as ts
from ddlsim.network.calendar import N_CALENDAR, SEQUENCE, first_time, wake
from ddlsim.network.devices import CONTENTION, DEVICE, SLOW
from ddlsim.network.extensions import address
from ddlsim.network.state import EVENT, Bools, Floats, Ints, Records
from ddlsim.plan import plan as pl
from ddlsim.plan.plan import Plan
from ddlsim.plan.program import N_STEPS, Row, Step, StepProgram, step_of, template_of
from ddlsim.runtime.codec import Message, Messages
from ddlsim.runtime.context import RunContext, Worker, slow_rows
from ddlsim.runtime.loop import after
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING, Spans
from ddlsim.workload.contention import IN_MACHINE, NO_SLOWDOWN
from ddlsim.workload.memory import kept_nbytes


class Lanes:
    """Workers that all repeat the same cycle of operations, with servers or peers.

    ops      the cycle; a STEP operation ends a worker's step
    servers  (node, seconds per request) of the servers, all of which every worker sends to; empty without servers
    peers    rank -> the ranks that it sends to, without servers
    depth    number of successive rounds in which messages to one worker can be under way
    nbytes   of every message
    samples  of an update, in a timing-only run
    messages encoder of the messages
    served   called after a service: (worker, server, staleness, whether it makes an update)
    choose   returns the rank that a worker sends to next, -1 for none
    batch    services per update of servers that update together; 0: do not record staleness
    first    the operation that all begin with; None: the first one
    back     called when a crashed worker is back and has taken the current model
    notes    on the decisions of the run, for the plan
    decides  what is called after operations decides on the course of the run

    `served`, and what operations call, is called only if values or sizes depend on it (``follows``): in training runs,
    and with compression. Otherwise, Python reads the log in blocks.
    """

    def __init__(
        self, context: RunContext, ops: Sequence[Op], nbytes: float, samples: int, messages: Messages, *,
        served: Callable[[Worker, int, int, bool], None] | None = None, servers: Sequence[tuple[int, float]] = (),
        peers: Sequence[Sequence[int]] = (), depth: int = 0, choose: Callable[[Worker], int] | None = None,
        batch: int = 1, first: Op | None = None, back: Callable[[Worker], None] | None = None,
        notes: Sequence[str] = (), decides: bool = False,
    ) -> None:  # fmt: skip
        self.context, self.samples, self.served, self.batch = context, samples, served, batch
        self.together = any(op.kind == ls.TURN for op in ops)
        self.choose, self.back = choose, back
        self.packs = messages.choice is not None
        self.follows = decides or self.packs or context.learner.task is not None
        self.ops = [op if self.follows else op.without_values() for op in ops]
        begin = 0 if first is None else list(ops).index(first)
        self._begun = self._over = False
        self._stale: list[int] = []  # staleness of services that has not been recorded yet
        self.tables = self._tables(peers or [range(max(len(servers), 1))] * len(context.workers), depth, servers)
        context.devices.append(self.tables.devices)
        connections, sent = self.tables.connections, self.tables.messages
        sources = np.array(context.nodes)[connections["actor"]]
        nodes = [node for node, _ in servers] if servers else context.nodes
        targets = np.array(nodes)[connections["end"]]
        network, requests, answers = context.loop.network, sent[:-1:2], sent[1::2]
        requests["source"] = answers["target"] = sources
        requests["target"] = answers["source"] = targets
        sent["nbytes"] = nbytes
        if len(connections) and choose is None:
            requests["route"] = network.routes(sources.tolist(), targets.tolist())
            answers["route"] = network.routes(targets.tolist(), sources.tolist()) if servers else 0
        network.reserve(len(connections))
        network.stride = len(sent)
        self.tables.actors["op"] = begin
        counts = self.tables.counts
        counts[ls.FIRST_OP] = begin
        counts[[ts.ADVANCE, ts.SENDER]] = address("advance"), address("send_one")
        counts[ts.FIRST_HANDLE] = network.first_handle
        counts[ls.RETURNS], counts[ls.SPANS] = self.follows, context.recorder.keep_spans
        context.plan = Cycles(
            context.workers, [*self.ops[begin:], *self.ops[:begin]], nbytes, messages,
            servers=[seconds for _, seconds in servers], peers=peers, choose=choose, notes=notes,
        ).plan  # fmt: skip
        receiver = ls.COORDINATED if self.together else ls.INDEPENDENT
        if choose is not None:
            receiver = ls.ANSWERING if any(op.kind == ls.DISPATCH and op.number for op in ops) else ls.ONE_WAY
        counts[ls.RECEIVER] = receiver
        counts[ls.ASKS] = self.packs and receiver in (ls.INDEPENDENT, ls.ANSWERING)  # the answer depends on `served`
        context.loop.driver = self

    def _tables(self, ends: Sequence[Sequence[int]], depth: int, servers: Sequence[tuple[int, float]]) -> ls.Tables:
        """Return the tables of workers that begin now, each with connections to its `ends`."""
        context, workers, ops, start = self.context, self.context.workers, self.ops, self.context.loop.now
        n, sizes = len(workers), [len(worker_ends) for worker_ends in ends]
        table = np.zeros(len(ops), dtype=ls.OP)
        table["kind"], table["number"] = [op.kind for op in ops], [op.number for op in ops]
        for number, op in enumerate(ops):  # the first operation of the gradient that it belongs to, or -1
            continues = number > 0 and ops[number - 1].redo
            table["redo"][number] = (table["redo"][number - 1] if continues else number) if op.redo else -1
        connections = np.zeros(sum(sizes), dtype=ls.CONNECTION)
        connections["actor"], connections["next"] = np.repeat(np.arange(n), sizes), -1
        connections["end"] = [end for worker_ends in ends for end in worker_ends]
        table_of_servers = np.zeros(len(servers), dtype=ls.SERVER)
        table_of_servers["seconds"], table_of_servers["head"] = [seconds for _, seconds in servers], -1
        actors = np.zeros(n, dtype=ls.ACTOR)
        actors["factor"], actors["left"], actors["ticket"], actors["crash"], actors["start"] = 1.0, -1, -1, -1, start
        actors["cursor"] = actors["drawn"] = ls.BLOCK
        actors["last"] = np.cumsum(sizes)
        actors["first"] = actors["last"] - sizes
        actors["messages"] = actors["last"] - actors["first"] + np.bincount(connections["end"], minlength=n)[:n]
        rounds = np.zeros(n * depth, dtype=ls.ROUND)
        rounds["left"] = np.tile(actors["messages"], depth)
        actors["slow"], slow = slow_rows([[worker] for worker in workers])
        actors["machine"] = context.hosts(context.nodes)
        down: list[tuple[float, float]] = []
        happen = [(start, ls.START + ls.N_EVENTS * rank) for rank in range(n)]
        for rank, crashes in enumerate(self._crashes(servers)):
            if crashes:
                actors["crash"][rank] = len(down)
                down += [*crashes, (np.inf, np.inf)]
                happen.append((crashes[0][0], ls.CRASHES + ls.N_EVENTS * rank))
                if crashes[-1][1] == np.inf:
                    happen.append((crashes[-1][0], ls.LOST_FOR_GOOD + ls.N_EVENTS * rank))
        calendar = np.zeros(2 * (3 * n + 3 * len(connections)) + 16 + len(happen), dtype=EVENT)
        happen[n:] = sorted(happen[n:])  # a sorted list is a heap
        calendar["time"][: len(happen)], calendar["item"][: len(happen)] = zip(*happen, strict=True)
        calendar["sequence"][: len(happen)] = np.arange(len(happen))
        counts = np.zeros(ls.N_COUNTS, dtype=np.int64)
        counts[ls.FAILING], counts[ls.BEHIND] = bool(down), n
        counts[[ls.PENDING, ls.RESUMED, ls.MEETING, ls.HELD, ls.ASKING]] = -1
        counts[N_CALENDAR] = counts[SEQUENCE] = len(happen)
        reals = np.zeros(ls.N_REALS)
        reals[ls.NOW], reals[ls.QUIET] = start, -np.inf
        factors = self._slower(with_servers=bool(servers), crash=bool(down))
        devices = np.zeros(len(factors) // 2, dtype=DEVICE)
        devices["row"] = -1
        contention = np.zeros(len(factors), dtype=CONTENTION)
        contention["factor"] = factors
        return ls.Tables(
            counts=counts, reals=reals, ops=table, seconds=seconds_of(workers, ops).reshape(-1), actors=actors,
            connections=connections, servers=table_of_servers, rounds=rounds,
            factors=np.zeros(n * ls.BLOCK), choices=np.zeros(n * ls.BLOCK, dtype=ls.CHOICE),
            slow=np.array(slow, dtype=SLOW), devices=devices, contention=contention,
            crashes=np.array(down, dtype=ls.CRASH), calendar=calendar,
            sends=np.zeros(len(connections) + 1, dtype=np.int64),
            messages=np.zeros(2 * len(connections) + 1, dtype=ts.MESSAGE),
            log=np.zeros(max(LOG_ROWS, 4 * len(ops)), dtype=ls.ROW), pauses=context.loop.network.pauses,
        )  # fmt: skip

    def _slower(self, *, with_servers: bool, crash: bool) -> list[float]:
        """Return the factors of each worker's compute times beside messages to or from peers on other machines and on
        its own; empty, with a note on the reason, if these slow no worker down."""
        context, workers = self.context, self.context.workers
        if all(worker.overlap_slowdown == NO_SLOWDOWN for worker in workers):
            return []
        context.slows, no_effect = True, ""
        if with_servers:
            no_effect = ": workers wait for servers without computing"
        elif crash:  # the time of work that a crash undoes must be known when it begins
            no_effect = " on workers that fail while their peers go on"
        if not no_effect:
            kinds = (MESSAGE_CHANNELS, IN_MACHINE)
            return [worker.overlap_slowdown.beside(channels) for worker in workers for channels in kinds]
        if any(worker.overlap_slowdown != worker.workload.slowdown for worker in workers):  # not the default
            context.notes.append(f"overlap_slowdown has no effect{no_effect}")
        return []

    def _crashes(self, servers: Sequence[tuple[int, float]]) -> Crashes:
        """Return the outages of each worker, and of servers on its machine; none if workers wait for all others in
        every step or round."""
        context, common = self.context, {(ls.STEP, ls.COMMON), (ls.MEET, 1)}
        if not context.crashes or any((op.kind, op.number) in common for op in self.ops):
            return ()
        context.recorder.down = context.crashes
        gathered = [op.number for op in self.ops if op.kind in (ls.CONTRIBUTE, ls.CONTRIBUTE_FRESH)]
        for op in self.ops:
            if op.kind == ls.MEET:
                context.recorder.needed = gathered[0]
            elif op.kind == ls.CLOCK and op.number < ls.MANY:
                context.recorder.needed, context.recorder.lead = len(context.nodes), op.number + 1
        machines, nodes = context.hosts(context.nodes).tolist(), [node for node, _ in servers]
        away = list(zip(context.nodes, context.crashes, strict=True))
        for node, machine in zip(nodes, context.hosts(nodes).tolist(), strict=True):
            if machine in machines and (context.machines_crash or node in context.nodes):
                rank = machines.index(machine)
                context.recorder.with_servers.append(rank)
                away.append((node, context.crashes[rank]))
        context.loop.network.will_change((), [(*window, node) for node, windows in away for window in windows])
        return context.crashes

    # ------------------------------------------------------------ later changes

    def set_seconds(self, worker: Worker, name: str, seconds: float) -> None:
        """Set the seconds of a worker's work of this name, "encode" or "decode", from now on, if the run compresses."""
        if self.packs:
            self._seconds[worker.rank, [op.kind == ls.WORK and op.name == name for op in self.ops]] = seconds

    def set_rounds(self, worker: Worker, times: int) -> None:
        """Set how many `times` a worker runs the repeated operations, from now on."""
        self._seconds[worker.rank, [op.kind == ls.AGAIN for op in self.ops]] = times

    def set_message(self, worker: Worker, seconds: float, sizes: Sequence[float]) -> None:
        """Set the encoding time and the sizes in bytes of a worker's next messages, if the run compresses."""
        self.set_seconds(worker, "encode", seconds)
        if self.packs:
            first, last = (int(self.tables.actors[name][worker.rank]) for name in ("first", "last"))
            self.tables.messages["nbytes"][2 * first : 2 * last : 2] = sizes

    def set_answers(self, worker: Worker, sizes: Sequence[float], server: int = 0) -> None:
        """Set the sizes in bytes of the next answers to a worker, from `server` on, if the run compresses."""
        if self.packs:
            first = int(self.tables.actors["first"][worker.rank]) + server
            self.tables.messages["nbytes"][2 * first + 1 : 2 * (first + len(sizes)) : 2] = sizes

    def set_service(self, worker: Worker, seconds: float) -> None:
        """Set the seconds after which the peer that has received a worker's message answers."""
        self.tables.connections["seconds"][worker.rank] = seconds

    def invite(self, ranks: Sequence[int], *, now: bool = False) -> None:
        """Let workers that wait for an invitation continue after the current update or, in order, `now`."""
        self.tables.actors["invited"][ranks] = 1
        self.tables.counts[ls.INVITED] = len(ranks)
        if now:
            self._wake(ls.UPDATES)

    def chosen(self, worker: Worker) -> int:
        """Return the rank that a worker has chosen."""
        place = worker.rank * ls.BLOCK + int(self.tables.actors["drawn"][worker.rank]) - 1
        return int(self.tables.choices["end"][place])

    @property
    def _seconds(self) -> Floats:
        return self.tables.seconds.reshape(-1, len(self.ops))

    # ------------------------------------------------------------ running

    @property
    def over(self) -> bool:
        return self._over

    def next(self) -> float:
        counts = self.tables.counts
        if counts[[ts.N_SENDS, ls.ENDING]].any() or (counts[[ls.PENDING, ls.RESUMED, ls.ASKING]] >= 0).any():
            return float(self.tables.reals[ls.NOW])
        return min(first_time(counts, self.tables.calendar), self.context.loop.next())

    def go(self, limit: float, halt: Callable[[], bool] | None) -> None:
        """Go on as :class:`~ddlsim.runtime.loop.Driver` says; `halt` is asked after updates."""
        loop, stop, counts = self.context.loop, self.context.stop, self.tables.counts
        if not self._begun:
            self._begun = True
            counts[ls.UPDATES_LEFT] = 1 if self.follows else int(min(stop.n_updates, ls.MANY))
        status = -1
        self._owe()
        if halt is not None and halt():
            return
        while status not in (ls.OVER, ls.LIMIT, ls.OTHERS):
            loop.check()
            until = min(limit, loop.next())
            counts[ts.N_SENT], self.tables.reals[ls.QUIET] = loop.network.n_sent, -np.inf
            status = ls.run_actors(loop.network.table, float(until), *self.tables)
            now = float(self.tables.reals[ls.NOW])
            taken, counts[ts.N_TAKEN] = int(counts[ts.N_TAKEN]), 0
            loop.network.has_run(until if status == ls.LIMIT else now, taken, (), int(counts[ts.N_SENT]))
            self._follow()
            if status == ls.LIMIT and loop.next() <= until < np.inf:
                loop.turn(until)
                status = ls.GOING
                continue
            loop.pass_time(limit if status == ls.LIMIT else now)
            if status == ls.FULL:
                loop.network.make_room()
            elif status == ls.REFILL:
                self._refill(int(counts[ls.PENDING]))
            elif status == ls.FETCHING:
                self._fetch(self.context.workers[int(counts[ls.PENDING])])
            elif status == ls.ELSEWHERE:
                self._complete()
            elif status == ls.CHOICES:
                self._choose(self.context.workers[int(counts[ls.PENDING])])
            elif status == ls.OVER:
                self._over = True
            elif status == ls.STUCK:
                raise self._stuck(now)
            elif status == ls.UPDATED:
                counts[ls.ENDING] = stop.over or (halt is not None and halt())
                counts[ls.UPDATES_LEFT] = not stop.over

    def _stuck(self, now: float) -> DdlsimError:
        crashes = self.context.recorder.down or ()
        gone = [rank for rank, down in enumerate(crashes) if down and down[-1][0] <= now and down[-1][1] == math.inf]
        if gone:
            return DdlsimError(
                f"at {now:.6g} s, no event is left: the workers {gone} have crashed and never return, and the "
                "others wait for them; set a repair time for failures, or choose a strategy that needs fewer "
                "workers"
            )
        return DeadlockError(f"deadlock at {now:.6g} s: no event is left, but the run has not ended")

    # ------------------------------------------------------------ processes, such as those that fetch samples

    def _complete(self) -> None:
        """Trigger the events of processes whose messages or collectives have ended."""
        loop, counts, when = self.context.loop, self.tables.counts, float(self.tables.reals[ls.WHEN])
        n, counts[ts.N_ELSEWHERE] = int(counts[ts.N_ELSEWHERE]), 0
        loop.complete(*loop.network.completed(n), when)

    def _fetch(self, worker: Worker) -> None:
        """Give a worker its next batch, when it is available."""
        assert worker.feed is not None
        batch = worker.feed.take(worker.rank, worker.workload.batch_size)
        if batch is None:
            self.tables.counts[ls.FETCHED] = 1
            return
        self.tables.counts[ls.PENDING] = -1
        after(batch, lambda _: self._wake(ls.BATCH_ARRIVES + ls.N_EVENTS * worker.rank))

    def _wake(self, item: int) -> None:
        """Schedule an event of the kernel for the present instant."""
        wake(self.tables.counts, self.tables.calendar, self.context.loop.now, item)

    def _refill(self, rank: int) -> None:
        block = self.context.workers[rank].factors.take(ls.BLOCK)
        self.tables.factors[rank * ls.BLOCK : (rank + 1) * ls.BLOCK] = block
        self.tables.actors["cursor"][rank] = 0

    def _choose(self, worker: Worker) -> None:
        """Sample a worker's next choices."""
        assert self.choose is not None
        network, nodes = self.context.loop.network, self.context.nodes
        choices = self.tables.choices[worker.rank * ls.BLOCK : (worker.rank + 1) * ls.BLOCK]
        choices["end"] = [self.choose(worker) for _ in range(ls.BLOCK)]
        some = np.flatnonzero(choices["end"] >= 0)
        if len(some):
            here, there = [worker.node] * len(some), [nodes[end] for end in choices["end"][some].tolist()]
            choices["target"][some] = there
            choices["route"][some] = network.routes(here, there)
            choices["back_route"][some] = network.routes(there, here)
        self.tables.actors["drawn"][worker.rank] = 0

    # ------------------------------------------------------------ the log

    def _follow(self) -> None:
        """Process the rows of the log."""
        rows = self.tables.log[: int(self.tables.counts[ls.N_LOGGED])]
        self.tables.counts[ls.N_LOGGED] = 0
        if self.context.recorder.keep_spans:
            self._keep_spans(rows)
        if self.follows:
            self._follow_rows(rows)
        else:
            self._count(rows)

    def _count(self, rows: Records) -> None:
        """Count steps, updates and staleness in a timing-only run."""
        recorder, kinds = self.context.recorder, self._kinds(rows)
        ended = kinds == ls.STEP
        for rank, time in zip(rows["actor"][ended].tolist(), rows["time"][ended].tolist(), strict=True):
            recorder.step_end[rank].append(time)
        self._stale += rows["staleness"][rows["what"] == ls.SERVED].tolist()
        if any(op.number == ls.AGED for op in self.ops if op.kind == ls.STEP):
            recorder.staleness += rows["staleness"][ended].tolist()
        self._tell(self.batch * int(np.count_nonzero(kinds == ls.UPDATE)) if self.together else len(self._stale))
        self.context.stop.counted(rows["time"][rows["updates"] == 1].tolist(), self.samples)

    def _kinds(self, rows: Records) -> Ints:
        """Return the kinds of the logged operations; -1 for other rows."""
        kinds: Ints = np.where(rows["what"] < 0, -1, self.tables.ops["kind"][rows["what"]])
        return kinds

    def _tell(self, n: int) -> None:
        """Record the staleness of the first `n` services that have not been recorded yet."""
        if self.batch:
            self.context.recorder.staleness += self._stale[:n]
            del self._stale[:n]

    def _follow_rows(self, rows: Records) -> None:
        context, pass_time = self.context, self.context.loop.pass_time
        for time, _, _, what, rank, place, updates, staleness in rows.tolist():
            worker = context.workers[rank]
            if what >= 0:
                pass_time(time)
                op = self.ops[what]
                if op.kind == ls.UPDATE:
                    self._tell(self.batch)
                if op.follow is not None:
                    op.follow(worker)
                if op.kind == ls.RESIZE and worker.adapt():
                    self._seconds[worker.rank] = seconds_of([worker], self.ops)[0]
                elif op.kind == ls.STEP:
                    if op.number == ls.AGED:
                        context.recorder.staleness.append(staleness)
                    worker.end_step()
                    if updates:
                        n_steps = len(context.workers) if op.number == ls.COMMON else 1
                        context.stop.updated(worker.samples_per_step * n_steps)
            elif what == ls.LOST:
                pass_time(time)
                worker.params = context.model()
                if self.back is not None:
                    self.back(worker)
            elif what == ls.SERVED:
                pass_time(time)
                assert self.served is not None
                if self.batch:
                    self._stale.append(staleness)
                if not self.together:
                    self._tell(1)
                self.served(worker, place, staleness, bool(updates))
            if updates:
                self._owe()  # evaluations, if they take the workers' time

    def _owe(self) -> None:
        """Add the first worker's pending evaluation, if any, to its next step."""
        worker = self.context.workers[0]
        if worker.owed:
            self.tables.actors["owed"][0] += worker.owed
            worker.owed = 0.0

    def _keep_spans(self, rows: Records) -> None:
        """Keep the spans in a block of the log."""
        recorder = self.context.recorder

        def keep(kind: str, what: int, start: str, end: str, which: Bools | bool = True) -> None:
            of_kind = rows[(rows["what"] == what) & which]
            for op in np.unique(of_kind["place"]).tolist():
                op_rows = of_kind[of_kind["place"] == op]
                ranks = op_rows["actor"].astype(np.int64)
                recorder.keep(Spans(kind, self.ops[op].name, ranks, op_rows[start], op_rows[end]))

        keep(COMPUTE, ls.WORKED, "begin", "time")
        exchanges = np.isin(rows["place"], [i for i, op in enumerate(self.ops) if op.kind in (ls.EXCHANGE, ls.TRAVEL)])
        for kind, of_kind in ((COMPUTE, ~exchanges), (COMMUNICATION, exchanges)):
            keep(kind, ls.LOST, "begin", "where", of_kind)
        keep(INPUT, ls.BROUGHT, "begin", "time")
        keep(WAITING, ls.WAITED, "begin", "where")
        keep(COMMUNICATION, ls.WAITED, "where", "time")
        for row in rows[rows["what"] == ls.SERVED]:
            what = f"update from worker {row['actor']}"
            recorder.background(f"server {row['place']}", what, *row[["begin", "time"]].item())
        for row in rows[rows["what"] == ls.DELIVERED]:
            track, (name,) = f"worker {row['actor']} network", [op.name for op in self.ops if op.kind == ls.DISPATCH]
            recorder.background(track, f"{name} worker {row['place']}", *row[["begin", "time"]].item())
        for row in rows[self._kinds(rows) == ls.UPDATE]:
            for server in range(len(self.tables.servers)):
                recorder.background(f"server {server}", "update", *row[["begin", "time"]].item())

    def close(self) -> None:
        """Book the workers' time, including unfinished operations."""
        recorder, actors = self.context.recorder, self.tables.actors
        self.context.loop.nbytes_asked += float(self.tables.reals[ls.NBYTES :][:2].sum())
        for rank in range(len(actors)):
            actor, op = actors[rank], self.ops[actors[rank]["op"]]
            for kind in (COMPUTE, COMMUNICATION, WAITING, INPUT):
                recorder.seconds[rank][kind] += float(actor[kind])
            recorder.idle[rank] += float(actor["idle"])
            recorder.lost[rank] = float(actor["lost"])
            if actor["down"]:
                now = self.context.loop.now
                recorder.booked[rank] = min(float(actor["fell"]), now)
                late = max(float(actor["fell"]) - now, 0.0)  # if the crash would come after the end
                recorder.seconds[rank][COMPUTE] -= late
                recorder.lost[rank] = 0.0 if late else recorder.lost[rank]
                if recorder.keep_spans:  # if the worker restarts before the end, the log contains the span
                    kind = COMMUNICATION if op.kind in (ls.EXCHANGE, ls.TRAVEL) else COMPUTE
                    times = np.array([actor["start"]]), np.array([recorder.booked[rank]])
                    recorder.keep(Spans(kind, op.name, np.array([rank]), *times))
                continue
            recorder.booked[rank] = float(actor["start"])
            kind, what = COMPUTE, op.name
            if op.kind == ls.FETCH:
                kind, what = INPUT, op.name
            elif op.kind not in (ls.WORK, ls.OWED):
                kind, what = COMMUNICATION, op.waits.format(begun=actor["posts"] - 1, ended=actor["posts"])
            recorder.open[rank] = (kind, what or op.name, float(actor["start"]))


LOG_ROWS = 4096
#: called after an operation
Follow = Callable[[Worker], None]
#: (start, end) of the outages of each worker in s, sorted; the last end may be inf
Crashes = Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, eq=False)
class Op:
    """An operation in the cycle of workers.

    kind     (:mod:`ddlsim.network.lanes`)
    name     of work and of waiting, in timelines
    seconds  of a worker's work, or of a delay; the number of rounds of AGAIN
    follow   called when the operation is logged
    waits    description of what a worker waits for, in which {begun} and {ended} are the numbers of its step from 0
             and 1; by default its name
    number   its meaning depends on the kind
    redo     whether it is part of a gradient, which a crash undoes
    """

    kind: int
    name: str = ""
    seconds: Callable[[Worker], float] | None = None
    follow: Follow | None = None
    waits: str = ""
    number: int = 0
    redo: bool = False

    def without_values(self) -> Op:
        """Return the operation for a run in which nothing is called after it."""
        if self.kind in (ls.NOTE, ls.ASK):
            return Op(ls.WORK, redo=self.redo)
        return self if self.follow is None else dataclasses.replace(self, follow=None)


def repeated(ops: Sequence[Op], times: Callable[[Worker], int]) -> list[Op]:
    """Return operations that a worker repeats `times` times."""
    return [*ops, Op(ls.AGAIN, seconds=times, number=len(ops))]


OPTIMIZER = Op(ls.WORK, "optimizer", lambda worker: worker.workload.optimizer)


def seconds_of(workers: Sequence[Worker], ops: Sequence[Op]) -> Floats:
    """Return the seconds of each worker's operations without delays, (n_workers, n_ops)."""
    return np.array([[op.seconds(worker) if op.seconds is not None else 0.0 for op in ops] for worker in workers])


def _draw(worker: Worker) -> None:
    worker.drawn = worker.draw()


def gradient(context: RunContext, drawn: Follow = _draw) -> list[Op]:
    """Return the operations of :meth:`Worker.gradient`; `drawn` is called when its parameters are read, and by default
    stores the gradient in ``Worker.drawn``."""
    first = context.workers[0]
    forward = Op(ls.WORK, "forward", lambda worker: worker.workload.forward_time, redo=True)
    early = Op(ls.WORK, "backward", lambda worker: worker.workload.backward_time, redo=True)
    late = Op(ls.WORK, "backward", lambda worker: float(worker.workload.backward_until[0]), redo=True)
    ops = [Op(ls.OWED, "evaluation", redo=True)] if context.learner.task is not None else []
    if first.workload_at is not None:
        ops.append(Op(ls.RESIZE, redo=True))
    batch = [Op(ls.DRAW, redo=True)]
    if first.feed is not None:
        batch.insert(0, Op(ls.FETCH, "input", waits="its next batch", redo=True))
    passes = [*batch, forward, early] * (first.accumulation - 1) + batch
    if any(worker.workload.host_time for worker in context.workers):
        passes.insert(len(batch), Op(ls.WORK, "host", lambda worker: worker.workload.host_time, redo=True))
    return [*ops, *passes, Op(ls.NOTE, follow=drawn, redo=True), forward, late]


# ---------------------------------------------------------------- cycles as a step program


#: a row: its step, and its index in the step
_Ref = tuple[int, int]
_KINDS = {"forward": pl.FORWARD, "backward": pl.BACKWARD, "optimizer": pl.UPDATE}


@dataclass
class Cycles:
    """The cycles of workers that repeat the operations `ops`, as a step program, for printing and exports.

    A step of the program is one cycle of each worker: its work, its messages to servers or peers, and their answers.
    Dependencies stay inside a rank: a cycle waits for another worker's only where it receives from it. Anything that
    depends on the order of arrival is decided in the run, and listed in the notes of the plan.

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
                before, repeated = list(ops[: at - op.number]), list(ops[at - op.number : at])
                ops = [*before, *(repeated * int(op.seconds(workers[0]))), *ops[at + 1 :]]
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
        sent = self._add(src, lanes[0], pl.SEND, refs, nbytes=nbytes, to=dst, number=number)
        return sent, self._add(dst, lanes[1], pl.RECEIVE, (), nbytes=nbytes, to=src, number=number)

    def _ready(self, worker: Worker) -> list[_Ref]:
        return [*self._last[worker.rank], *self._waits[worker.rank]]

    # ------------------------------------------------------------ operations

    def _do(self, op: Op, worker: Worker) -> None:
        rank, n = worker.rank, len(self.workers)
        if op.kind == ls.WORK:
            self._pass(op, worker)
        elif op.kind in (ls.OWED, ls.FETCH):
            self._work(worker, pl.COMPUTE, 0.0, op.name)
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
                self._work(worker, pl.COMPUTE, seconds, op.name)
            return
        kind = _KINDS[op.name]
        if kind == pl.UPDATE:
            self._work(worker, kind, seconds, end=n_layers)
            return
        passes = self._passes[rank]
        per_cycle = sum(other.kind == ls.WORK and other.name == "forward" for other in self._ops)
        micro = rank * per_cycle + passes[kind]
        passes[kind] += 1
        stored = kept_nbytes(worker.workload.model.layers, worker.workload.precision)[0] * worker.workload.batch_size
        holds = stored if kind == pl.FORWARD else -stored
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
        return self._add(len(self.workers) + i, f"worker {worker.rank}", pl.COMPUTE, (), name, seconds=seconds)

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
                self._add(to, lanes[1], pl.COMPUTE, (), "encode", seconds=seconds)
            _, sent = self._message((to, rank), (lanes[1], lanes[0]), nbytes, ())
        self._sent[rank] = [sent]


def _first(choose: Callable[[Worker], int], worker: Worker) -> int:
    """Return the first peer among those sampled for a block of steps, -1 if there is none."""
    drawn = [choose(worker) for _ in range(ls.BLOCK)]
    return next((to for to in drawn if to >= 0), -1)
