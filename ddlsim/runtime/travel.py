"""What goes on beside the tasks of planned steps: carriers that know the time of a collective, or are processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import simpy

from ddlsim.errors import ConfigError
from ddlsim.network import tasks
from ddlsim.network.executor import Executor
from ddlsim.plan.inserted import DECODE, ENCODE, SUMMING
from ddlsim.plan.plan import ALL_REDUCE, FORWARD, KINDS, Bools, Floats, Ints
from ddlsim.plan.program import LiveSteps
from ddlsim.runtime.exchange import Exchange, Exchanges, Way, after, way_of
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Worker

#: what a rank waits for before it passes a micro-batch through the first layer
SAMPLES = "input"


class Travel:
    """What goes on outside the tasks of steps (:class:`~ddlsim.network.executor.Outside`): collectives of known time,
    those that go by processes, the seconds of encoding and decoding, which can depend on values, and samples.

    workers   of the ranks of the plan
    owner     whose run it is, for messages
    step_in   the step that is executed in a slot, and the factor of a rank's compute times there

    Raises ConfigError for a collective that nothing carries.
    """

    def __init__(
        self, setting: Setting, workers: Sequence[Worker], exchanges: Exchanges, steps: LiveSteps, owner: str,
        step_in: Callable[[int], int], factor: Callable[[int, int], float],
    ) -> None:  # fmt: skip
        self.setting, self.workers, self.steps = setting, workers, steps
        self.loop, self.step_in, self.factor = setting.loop, step_in, factor
        self.nodes = np.array([worker.node for worker in workers], dtype=np.int64)
        self.launched: dict[int, list[list[int]]] = {}  # keys of each buffer, by slot
        plan = steps.plan
        rows = plan.collectives
        #: by kind of collective, group, and whether it is of parts of the gradients
        self.exchanges: dict[Way, Exchange] = {}
        ways = np.stack([plan.kind[rows], plan.peer[rows], plan.part[rows] >= 0])
        _, first = np.unique(ways, axis=1, return_index=True)
        for row in rows[np.sort(first)].tolist():
            kind, group, parts = way_of(plan, row)
            exchange = exchanges.exchange(kind, group, parts=parts)
            if exchange is None:
                those = [
                    name for other, name in enumerate(KINDS)
                    if exchanges.exchange(other, group, parts=parts) is not None
                ]  # fmt: skip
                raise ConfigError(
                    f"plan: {plan.task(row)}: a run of {owner} has no such exchange; it has {' and '.join(those)}"
                )
            self.exchanges[kind, group, parts] = exchange
        self._task = np.zeros(len(steps.key_sizes), dtype=np.int64)  # one of each key
        collectives = np.flatnonzero(plan.kind[steps.row] >= ALL_REDUCE)
        self._task[steps.tasks.key[collectives]] = collectives
        self.decoding = plan.names.index(DECODE) if DECODE in plan.names else -1
        self._brought: dict[tuple[int, int], tuple[int, simpy.Event | None]] = {}

    def _by(self, route: str) -> Bools:
        """Return which rows of the plan are collectives that take a `route`."""
        plan, which = self.steps.plan, np.zeros(len(self.steps.plan), dtype=np.bool_)
        for (kind, group, parts), exchange in self.exchanges.items():
            if exchange.route == route:
                which |= (plan.kind == kind) & (plan.peer == group) & ((plan.part >= 0) == parts)
        return which

    @functools.cached_property
    def kinds(self) -> Ints:
        """What the tasks are for the executor."""
        kind = self.steps.tasks.kind.copy()
        kind[self._by("known")[self.steps.row] & (kind == tasks.JOIN)] = tasks.MEETING
        kind[self.asked[self.steps.row]] = tasks.ASKED
        return kind

    @functools.cached_property
    def asked(self) -> Bools:
        """Which rows of the plan take as long as somebody says when they begin."""
        return self.coding | self.sampling | (self._by("process") & (self.steps.plan.queue < 0))

    @functools.cached_property
    def sampling(self) -> Bools:
        """Which rows of the plan wait for samples."""
        plan = self.steps.plan
        return np.asarray(plan.name == (plan.names.index(SAMPLES) if SAMPLES in plan.names else len(plan.names)))

    @functools.cached_property
    def coding(self) -> Bools:
        """Which rows of the plan encode or decode."""
        plan = self.steps.plan
        names = np.array([name in (ENCODE, DECODE) for name in plan.names] + [False])  # the last for those without
        return names[plan.name]

    @functools.cached_property
    def _summing(self) -> dict[tuple[int, int], Exchange]:
        """What sums a part, by rank and part."""
        plan = self.steps.plan
        rows = np.flatnonzero(np.isin(plan.kind, SUMMING) & (plan.part >= 0))[::-1]
        columns = (plan.rank[rows], plan.part[rows], plan.kind[rows], plan.peer[rows])
        every = zip(*(column.tolist() for column in columns), strict=True)
        return {(rank, part): self.exchanges[kind, group, True] for rank, part, kind, group in every}

    @functools.cached_property
    def meets(self) -> bool:
        """Whether what queues launch does not go by schedules."""
        return any(exchange.route != "schedule" for exchange in self.exchanges.values())

    @property
    def n_bystanders(self) -> int:
        """Ranks that enter every collective by themselves."""
        return max((exchange.communicator.n_bystanders for exchange in self.exchanges.values()), default=0)

    def executes(self, executor: Executor) -> None:
        """Remember who executes the tasks."""
        self.executor = executor

    @functools.cached_property
    def buffer_nbytes(self) -> Floats:
        """Bytes of the buffer of each key, (n_keys,), as queues see it: encoded, if the run compresses."""
        sizes, plan = self.steps.key_sizes, self.steps.plan
        if self.setting.compression is None or not plan.queues:
            return sizes
        sizes, rows = sizes.copy(), self.steps.row[self._task]
        for key in np.flatnonzero(np.isin(plan.kind[rows], SUMMING) & (plan.part[rows] >= 0)).tolist():
            exchange = self.exchanges[way_of(plan, int(rows[key]))]
            sizes[key] = exchange.buffer_nbytes(int(plan.part[rows[key]]), float(sizes[key]))
        return sizes

    # ------------------------------------------------------------ collectives and messages

    def collective(self, keys: list[int]) -> int:
        """Prepare a collective, simulated by a schedule, that carries `keys`; return its id."""
        exchange, step, parts, nbytes = self._carried(keys)
        schedule, size = exchange.schedule(step, parts, nbytes)
        return self.loop.collective(schedule, exchange.communicator.all_nodes, size)

    def messages(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        """Return the nodes that messages leave and reach, and their bytes."""
        plan, rows = self.steps.plan, self.steps.row[rows]
        return self.nodes[plan.rank[rows]], self.nodes[plan.peer[rows]], plan.nbytes[rows]

    def meet(self, keys: list[int], queue: int) -> None:
        self.loop.env.pass_time(self.executor.now)
        exchange, step, parts, nbytes = self._carried(keys)
        members = [self.executor.members(key) for key in keys]
        if exchange.route == "known":
            finished = self.loop.env.event()

            def ended(end: float) -> None:
                self.executor.end(np.concatenate(members), end)
                if queue >= 0:
                    self.loop.trigger_at(finished, end)

            exchange.communicator.run(exchange.phases(step, parts, nbytes), ended)
        else:
            ends = [exchange.carry(worker, step, parts, nbytes) for worker in exchange.communicator.workers]
            for place, arrival in enumerate(ends):
                after(arrival, functools.partial(self._end, [int(rows[place]) for rows in members]))
            finished = self.loop.env.all_of(ends)
        if queue >= 0:
            after(finished, lambda _: self.executor.dispatchers[queue].ended(self.executor.now))

    def begins(self, row: int) -> float:
        plan, task, row = self.steps.plan, row, int(self.steps.row[row])
        step, part, rank = self.step_in(self.steps.slot_of(task)), int(plan.part[row]), int(plan.rank[row])
        worker = self.workers[rank]
        self.loop.env.pass_time(self.executor.now)
        if self.coding[row]:
            exchange, factor = self._summing[rank, part], self.factor(step, rank)
            if plan.name[row] != self.decoding:
                return exchange.encode_seconds(worker, step, part) * factor
            if plan.queues:  # perhaps of the step before
                step += int(plan.step[plan.needs[plan.need_offsets[row]]]) - int(plan.step[row])
            return exchange.decode_seconds(worker, step, part) * factor
        if self.sampling[row]:
            batch = self._samples(step, row)
            if batch is None or batch.triggered:
                return 0.0
            after(batch, functools.partial(self._end, [task]))
            return float("inf")
        exchange = self.exchanges[way_of(plan, row)]
        arrival = exchange.carry(worker, step, [part], float(plan.nbytes[row]))
        after(arrival, functools.partial(self._end, [task]))
        return float("inf")

    def _samples(self, step: int, row: int) -> simpy.Event | None:
        """Return what a rank waits for that needs samples, None if they are there: the first of the ranks that share a
        micro-batch reads it."""
        batch, (reader, n_ranks) = int(self._passes[row]), self._sharing[row]
        left, event = self._brought.pop((step, batch), (n_ranks, None))
        if left == n_ranks:
            worker = self.workers[reader]
            assert worker.feed is not None
            event = worker.feed.take(worker.rank, worker.workload.batch_size)
        if left > 1:
            self._brought[step, batch] = left - 1, event
        return event

    @functools.cached_property
    def _passes(self) -> Ints:
        """The micro-batch that each row that waits for samples, and is followed by its pass, waits for."""
        plan = self.steps.plan
        rows = np.flatnonzero((plan.kind == FORWARD) & (plan.first == 0))
        batch = np.full(len(plan), -1)
        batch[plan.previous[rows][plan.previous[rows] >= 0]] = plan.batch[rows][plan.previous[rows] >= 0]
        return batch

    @functools.cached_property
    def _sharing(self) -> dict[int, tuple[int, int]]:
        """Of each row that waits for samples: the rank that reads them, and how many ranks share them."""
        plan = self.steps.plan
        groups: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(self.sampling).tolist():
            groups.setdefault((int(plan.step[row]), int(self._passes[row])), []).append(row)
        ranks = {each: int(min(plan.rank[rows])) for rows in groups.values() for each in rows}
        return {row: (ranks[row], len(rows)) for rows in groups.values() for row in rows}

    def _end(self, rows: list[int], _: simpy.Event) -> None:
        self.executor.end(rows, self.executor.now)

    def _carried(self, keys: list[int]) -> tuple[Exchange, int, list[int], float]:
        """Return what exchanges `keys` as one, in which step, their parts, and their bytes."""
        plan, tasks = self.steps.plan, self._task[keys]
        row, slot = int(self.steps.row[tasks[0]]), self.steps.slot_of(int(tasks[0]))
        if self.setting.recorder.keep_spans and plan.queues:
            self.launched.setdefault(slot, []).append(keys)
        nbytes = float(np.cumsum(self.steps.key_sizes[keys])[-1])  # one after the other, as buffers are filled
        exchange = self.exchanges[way_of(plan, row)]
        return exchange, self.step_in(slot), plan.part[self.steps.row[tasks]].tolist(), nbytes

    # ------------------------------------------------------------ processes

    def next(self) -> float:
        return self.executor.now if self.loop.asks else self.loop.env.peek()

    def completed(self, ids: Ints, ranks: Ints) -> None:
        self.loop.env.pass_time(self.executor.now)
        for number, rank in zip(ids.tolist(), ranks.tolist(), strict=True):
            self.loop.complete(number, rank, self.executor.now)

    @property
    def under_way(self) -> bool:
        """Whether anything is left to happen."""
        return self.executor.under_way or self.next() < np.inf

    def turn(self, limit: float) -> bool:
        """Let processes do all that comes next at one instant, up to `limit` (s); return whether there was anything."""
        env, now = self.loop.env, self.next()
        if now > limit or now == np.inf:
            return False
        self.executor.reach(now)
        while env.peek() == now:
            env.step()
        self.loop.start_queued()
        return True
