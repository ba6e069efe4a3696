"""The Python side of the task executor: it creates collectives and messages when they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ddlsim.errors import DdlsimError
from ddlsim.network import tasks as ts
from ddlsim.network.calendar import N_CALENDAR, first_time, wake
from ddlsim.network.devices import CONTENTION, DEVICE, N_STALE, SLOW
from ddlsim.network.extensions import address
from ddlsim.network.network import Network
from ddlsim.network.state import EVENT, Floats, Ints, Records, grown

if TYPE_CHECKING:
    from ddlsim.runtime.table_run import Calls


class Dispatcher(Protocol):
    """A running queue. Collectives are identified by the keys of their tasks."""

    def ready(self, key: int, nbytes: float, now: float) -> None:
        """All members have entered a collective."""

    def ended(self, now: float) -> None:
        """A launched buffer has completed on all ranks."""

    def tick(self, now: float) -> None:
        """The time of a requested tick has come."""


#: launches collectives as one buffer
Launch = Callable[[list[int]], None]
#: requests a tick at a time, s
Wake = Callable[[float], None]


class Queue(Protocol):
    """Decides which of the collectives that all members have entered is launched next."""

    def dispatcher(self, launch: Launch, wake: Wake) -> Dispatcher:
        """Return a new run of this queue."""


class TaskTable(NamedTuple):
    """Tasks that have not started.

    tasks      (n,) records :data:`ddlsim.network.tasks.TASK`; ``step`` is the step in which a task is counted, `slow`
               the first of its intervals in `slowdowns`
    following  successors of the tasks, between their ``first`` and ``last``
    queue_of   (n_keys,) index of the queue that launches the collective with each key, -1: none
    slowdowns  (end in s, factor) of successive intervals; the last one of each list never ends
    slower     per device: factor of the duration of work for each kind of communication in progress
    contention (n_keys,) kind of communication of each key
    """

    tasks: Records
    following: Ints
    queue_of: Ints
    slowdowns: Sequence[tuple[float, float]] = ()
    slower: Sequence[Sequence[float]] = ()
    contention: Ints | None = None


class Executor:
    """Execution of tasks on a network, with the network's clock.

    collective  keys -> id of a collective that carries them together, prepared by :meth:`Network.collective`
    nbytes      (n_keys,) buffer size of each key
    send        tasks -> source nodes, target nodes and bytes of their messages
    bystanders  number of ranks without tasks in every collective, numbered last, which enter it at once
    outside     other activities on the same clock and network as the tasks
    meets       whether `outside` executes what queues launch
    start       time at which the tasks begin, s
    """

    def __init__(
        self, table: TaskTable, network: Network, collective: Callable[[list[int]], int], nbytes: Floats,
        queues: Sequence[Queue] = (), send: Callable[[Ints], tuple[Ints, Ints, Floats]] | None = None, *,
        bystanders: int = 0, outside: Calls | None = None, meets: bool = False, start: float = 0.0,
    ) -> None:  # fmt: skip
        self.network, self.collective, self.nbytes = network, collective, nbytes
        self.bystanders, self.outside, self.meets = bystanders, outside, meets
        self._queue_of = table.queue_of
        self.tables = _tables(table, len(queues), bystanders, network.pauses)
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # s, number, and what is to be done then
        self._n_due = 0
        self.tables.now[0] = start
        self._prepare_messages(send)
        self._turn = np.arange(len(nbytes), dtype=np.int64)  # number by which a queue knows a key
        self._key_of: dict[int, int] = {}
        self.tables.counts[[ts.ADVANCE, ts.JOINING]] = address("advance"), address("join")
        self.tables.counts[ts.FIRST_HANDLE] = network.first_handle
        self.dispatchers = [queue.dispatcher(self._launch, self._waker(i)) for i, queue in enumerate(queues)]
        self._episodes = network.episodes(bystanders)
        self._entered: list[Ints] = []  # tasks of the collectives of the current episode, (keys, ranks)

    @property
    def tasks(self) -> Records:
        """All tasks, with their ``start`` and ``end`` in s."""
        return self.tables.tasks

    @property
    def now(self) -> float:
        """The time (s) of the last event."""
        return float(self.tables.now[0])

    @property
    def nbytes_sent(self) -> float:
        """Bytes of all messages sent by tasks."""
        return float(self.tables.now[1:].sum())

    @property
    def under_way(self) -> bool:
        """Whether any event is left."""
        counts = self.tables.counts
        return bool(counts[N_CALENDAR] > counts[N_STALE]) or self.network.pending

    def next(self) -> float:
        """Return the time of the next start or end of a task that does not depend on the network, s."""
        counts, outside = self.tables.counts, self.outside
        at_once = counts[ts.N_JOINS] or counts[ts.N_SENDS] or counts[ts.N_CHANGES]
        if at_once or counts[ts.FIRST_READY] < counts[ts.N_READY] or counts[ts.FIRST_ENDED] < counts[ts.N_ENDED]:
            return self.now
        soonest = first_time(counts, self.tables.calendar)
        return soonest if outside is None else min(soonest, outside.next())

    def run(self, limit: float = np.inf) -> int | None:
        """Execute tasks up to `limit` (s); return the next step whose tasks have all ended, or None if there is none by
        then or completions of other clients come first."""
        counts, outside = self.tables.counts, self.outside
        while True:
            until = limit if outside is None else min(limit, outside.next())
            self._lengthen(self.network.n_instances)
            counts[ts.N_SENT] = self.network.n_sent
            status = ts.execute(self.network.table, float(until), *self.tables)
            self._settle(max(until, self.now) if status == ts.LIMIT else self.now)
            argument = int(counts[ts.ARGUMENT])
            if status == ts.PREPARE:
                self._start([argument], -1)
            elif status == ts.STEP:
                return argument
            elif status in (ts.END, ts.LIMIT, ts.OTHERS):
                return None
            elif status == ts.FULL:
                self._make_room()
            elif status == ts.READY:
                self._ready(argument)
            elif status == ts.LAUNCHED:
                self.dispatchers[argument].ended(self.now)
            elif status == ts.TICK and argument == len(self.dispatchers):
                heapq.heappop(self._due)[-1]()
            elif status == ts.TICK:
                self.dispatchers[argument].tick(self.now)
            elif status == ts.ENTERED:
                self._enter()
            elif status == ts.INTERRUPTED:
                self._note()
                self._episodes.interrupt()
                counts[ts.EPISODE] = 0
            elif status == ts.ASKING:
                assert outside is not None
                self.tables.tasks["seconds"][argument] = outside.begins(argument)
            elif status == ts.ELSEWHERE:
                assert outside is not None
                n, counts[ts.N_ELSEWHERE] = int(counts[ts.N_ELSEWHERE]), 0
                outside.completed(*self.network.completed(n))
            else:
                raise DdlsimError(
                    f"task {argument} would restart before its previous step has finished, because some ranks are too "
                    "many steps ahead of others; synchronise ranks more often"
                )

    def end_instant(self) -> None:
        """Execute all remaining events of this instant."""
        while self.run(-np.inf) is not None:
            pass

    def arm(self, rows: slice, keys: slice, seconds: Floats, kind: Ints, later: int) -> None:
        """Prepare the tasks of a completed step (`rows`, with these `keys`) to be executed again, with new durations
        and kinds, (n_copies or 1, n) each for the n tasks of each copy.

        The numbers by which queues know the keys increase by `later`.
        """
        self._note()
        self._turn[keys] += later
        tasks, exchanges = self.tables.tasks[rows].reshape(-1, kind.shape[-1]), self.tables.exchanges[keys]
        tasks["start"] = tasks["end"] = np.nan
        tasks["seconds"], tasks["kind"] = seconds, kind
        exchanges["instance"] = exchanges["next"] = exchanges["waiting"] = -1
        exchanges["not_ready"] = exchanges["size"]
        exchanges["delivered"] = 0
        self.tables.left[:] += np.bincount(tasks["step"].ravel(), minlength=len(self.tables.left))

    # ------------------------------------------------------------ for other activities

    def reach(self, now: float) -> None:
        """Set the clock to `now`, before the next event."""
        self.tables.now[0] = max(self.now, now)

    def end(self, rows: Sequence[int] | Ints, time: float) -> None:
        """End tasks at `time`, not before now; all of them end before any task starts then."""
        self._at(time, lambda: self._ended(rows))

    def members(self, key: int) -> Ints:
        """Return the tasks of a collective, by rank."""
        first, size = self.tables.exchanges["first"][key], self.tables.exchanges["size"][key]
        return self.tables.members[first : first + size]

    # ------------------------------------------------------------ internals

    def _make_room(self) -> None:
        """Enlarge the arrays that the kernel has reported as full."""
        counts = self.tables.counts
        missing = int(counts[ts.N_FLYING] + counts[ts.N_SENDS] - counts[ts.RESERVED])
        if missing > 0:
            more = max(missing, int(counts[ts.RESERVED]))
            self.network.reserve(more)
            counts[ts.RESERVED] += more
        self.network.make_room()

    def _lengthen(self, n_instances: int) -> None:
        """Make room for launches of all instances."""
        n = len(self.tables.launches)
        if n_instances > n:
            longer = grown(self.tables.launches, n_instances)
            longer["key"][n:] = -1
            self.tables = self.tables._replace(launches=longer, freed=grown(self.tables.freed, len(longer) + 1))

    def _settle(self, now: float) -> None:
        """Report to the network which completions, instances and messages the kernel has handled."""
        counts = self.tables.counts
        n = int(counts[ts.N_FREED])
        self.network.has_run(now, int(counts[ts.N_TAKEN]), self.tables.freed[:n].tolist(), int(counts[ts.N_SENT]))
        counts[ts.N_FREED] = counts[ts.N_TAKEN] = 0

    def _start(self, keys: list[int], queue: int) -> int:
        """Prepare the collective that carries `keys`; return its id."""
        instance = self.collective(keys)
        exchanges = self.tables.exchanges
        self._lengthen(instance + 1)
        for key, following in zip(keys, [*keys[1:], -1], strict=True):
            row = exchanges[key]
            row["instance"], row["next"] = instance, following
        size = int(exchanges["size"][keys[0]])
        self.tables.launches[instance] = (keys[0], size, queue)
        if self.bystanders:
            self._join(instance, size, size + self.bystanders)
        self.tables.counts[ts.WHOLE] += size + self.bystanders
        self.tables.counts[ts.ANY_LARGE] |= self._episodes.is_large(instance)
        return instance

    def _join(self, instance: int, first: int, end: int) -> None:
        """Let the ranks `first` to `end` - 1 enter a collective now."""
        tables = self.tables
        n = int(tables.counts[ts.N_JOINS])
        tables.join_instances[n : n + end - first] = instance
        tables.join_ranks[n : n + end - first] = np.arange(first, end)
        tables.counts[ts.N_JOINS] = n + end - first

    # ------------------------------------------------------------ episodes (ddlsim.network.episodes)

    def _entering(self) -> list[int]:
        """Return the collectives that ranks enter now, in order."""
        counts, instances = self.tables.counts, self.tables.join_instances
        return list(dict.fromkeys(instances[: counts[ts.N_JOINS]].tolist()))

    def _note(self) -> None:
        """Record the current episode if it is over."""
        if self.tables.counts[ts.EPISODE] == ts.NOTED:
            ends = self.tables.tasks["end"]
            self._episodes.note(lambda i: ends[self._entered[i][0]], len(self._entering()))

    def _enter(self) -> None:
        """Let all ranks of the prepared collectives enter them."""
        self._note()
        counts, instances = self.tables.counts, self._entering()
        n = int(counts[ts.N_JOINS])
        joins = self.tables.join_instances[:n].copy(), self.tables.join_ranks[:n].copy()
        counts[ts.N_JOINS] = counts[ts.WHOLE] = counts[ts.ANY_LARGE] = 0
        self._entered = [np.array([self.members(key) for key in self._keys(instance)]) for instance in instances]
        if self._episodes.enter(instances, *joins, self.now):
            counts[ts.EPISODE] = ts.TOLD
            self._at(self._episodes.next, self._tell)
        else:
            counts[ts.EPISODE] = ts.NOTED

    def _keys(self, instance: int) -> list[int]:
        """Return the keys that a collective carries."""
        keys = [int(self.tables.launches["key"][instance])]
        while (key := int(self.tables.exchanges["next"][keys[-1]])) >= 0:
            keys.append(key)
        return keys

    def _tell(self) -> None:
        """End the tasks that end now in the replayed episode, in the order in which the kernel would."""
        if self._episodes.next > self.now:  # it has been simulated instead
            return
        ids, ends, over = self._episodes.take()
        counts, launches = self.tables.counts, self.tables.launches
        ended: list[int] = []
        for i in dict.fromkeys(ends.which.tolist()):
            ranks = ends.ranks[ends.which == i]
            ended += self._entered[i][:, ranks].T.ravel().tolist()
            launch = launches[ids[i]]
            launch["left"] -= len(ranks)
            if launch["left"] == 0 and launch["queue"] >= 0:
                ended.append(-1 - int(launch["queue"]))
        self._ended(ended)
        counts[ts.N_TAKEN] += len(ends.ranks)
        if over:
            counts[ts.N_TAKEN] += self.bystanders * len(ids)
            launches["key"][ids] = -1
            counts[ts.EPISODE] = 0
        else:
            self._at(self._episodes.next, self._tell)

    def _ready(self, key: int) -> None:
        if self._queue_of[key] < 0:
            assert self.outside is not None
            self.outside.meet([key], -1)
            return
        turn = int(self._turn[key])
        self._key_of[turn] = key
        self.dispatchers[self._queue_of[key]].ready(turn, float(self.nbytes[key]), self.now)

    def _launch(self, turns: list[int]) -> None:
        """Let all members enter collectives of a queue as one buffer, now or when a pause is over."""
        start = self.network.earliest(self.now)
        if start > self.now:
            self._at(start, lambda: self._launch(turns))
            return
        keys = [self._key_of.pop(turn) for turn in turns]
        queue = int(self._queue_of[keys[0]])
        rows = np.concatenate([self.members(key) for key in keys])
        self.tables.tasks["start"][rows] = self.now
        self._occupy(rows)
        if self.meets:
            assert self.outside is not None
            self.outside.meet(keys, queue)
            return
        instance = self._start(keys, queue)
        self._join(instance, 0, len(self.members(keys[0])))

    def _occupy(self, rows: Ints) -> None:
        """Slow down the devices of tasks whose communication begins now."""
        counts = self.tables.counts
        if len(self.tables.devices):
            n = int(counts[ts.N_CHANGES])
            self.tables.changes[n : n + len(rows)] = 1 + rows
            counts[ts.N_CHANGES] += len(rows)

    def _waker(self, queue: int) -> Wake:
        return lambda time: wake(self.tables.counts, self.tables.calendar, time, -1 - queue)

    def _ended(self, rows: Sequence[int] | Ints) -> None:
        self.tables.ended[: len(rows)] = rows
        self.tables.counts[ts.N_ENDED] = len(rows)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a time (s); actions for the same time are called in order of their requests."""
        heapq.heappush(self._due, (time, self._n_due, action))
        self._n_due += 1
        wake(self.tables.counts, self.tables.calendar, time, -1 - len(self.dispatchers))

    def _prepare_messages(self, send: Callable[[Ints], tuple[Ints, Ints, Floats]] | None) -> None:
        """Look up the routes of all messages that tasks send."""
        tasks, messages = self.tables.tasks, self.tables.messages
        rows = np.flatnonzero(tasks["kind"] == ts.SEND)
        if not len(rows):
            return
        assert send is not None
        source, target, nbytes = send(rows)
        nodes, ends = distinct(np.concatenate([source, target]), 1 + max(int(source.max()), int(target.max())))
        width = len(nodes)
        pairs, which = distinct(ends[: len(rows)] * width + ends[len(rows) :], width * width)
        routes = self.network.routes(nodes[pairs // width].tolist(), nodes[pairs % width].tolist())[which]
        tasks["place"][rows] = np.arange(len(rows))
        for name, column in (
            ("row", rows),
            ("source", source),
            ("target", target),
            ("route", routes),
            ("nbytes", nbytes),
        ):
            messages[name][:-1] = column
        self.network.stride = len(messages)
        self.tables.counts[ts.SENDER] = address("send_one")


def _tables(table: TaskTable, n_queues: int, bystanders: int, pauses: Floats) -> ts.Tables:
    tasks, n, n_keys = table.tasks, len(table.tasks), len(table.queue_of)
    kind = np.ascontiguousarray(tasks["kind"])
    rows = np.flatnonzero((kind == ts.JOIN) | (kind == ts.QUEUED) | (kind == ts.MEETING))
    key = tasks["key"][rows]
    exchanges = np.zeros(n_keys, dtype=ts.EXCHANGE)
    sizes = np.bincount(key, minlength=n_keys)
    exchanges["size"] = exchanges["not_ready"] = sizes
    exchanges["first"] = np.cumsum(sizes) - sizes
    members = np.empty_like(rows)
    members[exchanges["first"][key] + tasks["place"][rows]] = rows
    exchanges["instance"] = exchanges["next"] = exchanges["waiting"] = exchanges["target"] = -1
    devices = np.zeros(len(table.slower), dtype=DEVICE)
    factors = np.array(table.slower, dtype=float).ravel()
    contention = np.zeros(len(factors), dtype=CONTENTION)
    if table.slower:
        contention["factor"] = factors
        devices["row"] = -1
        exchanges["contention"] = table.contention
        received = np.flatnonzero(kind == ts.RECEIVE)
        exchanges["target"][tasks["key"][received]] = tasks["device"][received]
    ready = np.zeros(n + 1, dtype=np.int64)
    first = np.flatnonzero(tasks["missing"] == 0)
    ready[: len(first)] = first
    counts = np.zeros(ts.N_COUNTS, dtype=np.int64)
    counts[ts.N_READY] = len(first)
    launches = np.zeros(16, dtype=ts.LAUNCH)
    launches["key"] = -1
    n_sends, n_joins = int((kind == ts.SEND).sum()), n + bystanders * n_keys

    def places(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return ts.Tables(
        counts=counts, now=np.zeros(3), tasks=tasks, following=table.following,
        exchanges=exchanges, members=members, launches=launches,
        left=np.bincount(tasks["step"]).astype(np.int64),
        calendar=np.zeros(n + n_queues + 3 + 2 * len(devices), dtype=EVENT),
        ended=places(2 * n + n_queues + 16), ready=ready, join_instances=places(n_joins), join_ranks=places(n_joins),
        sends=places(n_sends + 1), messages=np.zeros(n_sends + 1, dtype=ts.MESSAGE), freed=places(17),
        slow=np.array(list(table.slowdowns), dtype=SLOW), devices=devices, contention=contention,
        changes=places(2 * n if len(devices) else 0), pauses=pauses,
    )  # fmt: skip


#: largest number for which a place of its own is kept; untouched pages of memory cost nothing
MOST_PLACES = 1 << 27


def distinct(numbers: Ints, below: int) -> tuple[Ints, Ints]:
    """Return the distinct values among numbers from 0 to `below` - 1, in ascending order, and the index of each number,
    as ``np.unique(numbers, return_inverse=True)`` does, but in linear time."""
    if below > MOST_PLACES:
        values, which = np.unique(numbers, return_inverse=True)
        return values, which.reshape(-1)
    seen = np.zeros(below, dtype=np.bool_)
    seen[numbers] = True
    values = np.flatnonzero(seen)
    place = np.empty(below, dtype=np.int64)
    place[values] = np.arange(len(values))
    return values, place[numbers]
