"""The Python side of the task executor: it creates collectives and messages when they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ddlsim.errors import DdlsimError
from ddlsim.network import tasks as ts
from ddlsim.network.addresses import addresses, send_address
from ddlsim.network.calendar import EVENT, N_CALENDAR
from ddlsim.network.devices import CONTENTION, DEVICE, N_STALE, SLOW
from ddlsim.network.network import Network
from ddlsim.network.state import Floats, Ints, Records, grown


class Dispatcher(Protocol):
    """A queue at work. Collectives have the numbers (keys) that the tasks give them."""

    def ready(self, key: int, nbytes: float, now: float) -> None:
        """All members are ready for a collective."""

    def ended(self, now: float) -> None:
        """A launched buffer has arrived everywhere."""

    def tick(self, now: float) -> None:
        """The time that was asked for has come."""


#: launches collectives as one buffer
Launch = Callable[[list[int]], None]
#: asks for a tick at a time, s
Wake = Callable[[float], None]


class Queue(Protocol):
    """What decides which collectives that all members are ready for go next."""

    def dispatcher(self, launch: Launch, wake: Wake) -> Dispatcher:
        """Return this queue at work."""


class Outside(Protocol):
    """What happens beside the tasks, on the same clock and the same network."""

    def next(self) -> float:
        """Return when something happens there next, s: no task goes beyond."""

    def begins(self, row: int) -> float:
        """A task that is asked for begins; return the s that it works, or infinity if :meth:`Executor.end` ends it."""

    def meet(self, keys: list[int], queue: int) -> None:
        """All members enter collectives as one, launched by a `queue` (-1: none); :meth:`Executor.end` ends them."""

    def completed(self, ids: Ints, ranks: Ints) -> None:
        """The network has ended what is no task's: messages, and collectives for a rank, (n,)."""


class TaskColumns(NamedTuple):
    """Tasks, one per row, (n,) if nothing else is said.

    kind       what it is (:mod:`ddlsim.network.tasks`)
    seconds    of work
    key        what the rows of a collective, or a message's two ends, have in common; -1 if nothing
    place      in the group of its collective
    queue      that launches its collective (place in the list of queues), -1 if none
    step       in which it is counted
    offsets    (n + 1,) row i is followed by following[offsets[i]:offsets[i + 1]], which start after it
    following  rows
    missing    how many rows it starts after
    waits      how many it starts after when it starts anew
    slow       where the slow-downs of its work begin in ``slowdowns``, -1 if it has none
    slowdowns (until s, factor) of intervals, one after the other, the last one without end
    device     that a row works on, or that it keeps busy while it exchanges; -1: none that exchanges slow down
    slower     of each device: how many times as long its work takes while exchanges of each kind are under way
    contention (n_keys,) which of these kinds the exchanges are
    """

    kind: Ints
    seconds: Floats
    key: Ints
    place: Ints
    queue: Ints
    step: Ints
    offsets: Ints
    following: Ints
    missing: Ints
    waits: Ints
    slow: Ints
    slowdowns: Sequence[tuple[float, float]] = ()
    device: Ints | None = None
    slower: Sequence[Sequence[float]] = ()
    contention: Ints | None = None


class Executor:
    """Tasks under way on a network, whose clock they share.

    collective  keys -> what they carry together, prepared by :meth:`Network.collective`: its id
    nbytes      (n_keys,) of the buffer of each key
    send        tasks -> the source and target nodes and the bytes of these messages
    bystanders  ranks of every collective, behind those with tasks, that enter it by themselves
    outside     what else goes on
    meets       whether what queues launch goes by `outside`
    start       s at which they begin
    """

    def __init__(
        self, columns: TaskColumns, network: Network, collective: Callable[[list[int]], int], nbytes: Floats,
        queues: Sequence[Queue] = (), send: Callable[[Ints], tuple[Ints, Ints, Floats]] | None = None, *,
        bystanders: int = 0, outside: Outside | None = None, meets: bool = False, start: float = 0.0,
    ) -> None:  # fmt: skip
        self.network, self.collective, self.nbytes = network, collective, nbytes
        self.bystanders, self.outside, self.meets = bystanders, outside, meets
        self._queue_of = np.full(len(nbytes), -1, dtype=np.int64)
        self._queue_of[columns.key[columns.kind == ts.QUEUED]] = columns.queue[columns.kind == ts.QUEUED]
        self.tables = _tables(columns, len(nbytes), len(queues), bystanders, network.pauses)
        self._times = self.tables.calendar["time"]
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # s, number, and what is to be done then
        self._n_due = 0
        self.tables.now[0] = start
        self._prepare_messages(send)
        self._turn = np.arange(len(nbytes), dtype=np.int64)  # the number under which a queue knows a key
        self._key_of: dict[int, int] = {}
        self.tables.counts[ts.ADVANCE], self.tables.counts[ts.JOINING] = addresses()
        self.tables.counts[ts.FIRST_HANDLE] = network.first_handle
        self.dispatchers = [queue.dispatcher(self._launch, self._waker(i)) for i, queue in enumerate(queues)]
        self._episodes = network.episodes()
        self._entered: list[Ints] = []  # tasks of the collectives that the episode at hand consists of, (keys, ranks)

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
        """Bytes of the messages that tasks have sent."""
        return float(self.tables.now[1:].sum())

    @property
    def under_way(self) -> bool:
        """Whether anything is left to happen."""
        counts = self.tables.counts
        return bool(counts[N_CALENDAR] > counts[N_STALE]) or self.network.pending

    def next(self) -> float:
        """Return when tasks start or end next by themselves, s."""
        counts, outside = self.tables.counts, self.outside
        at_once = counts[ts.N_JOINS] or counts[ts.N_SENDS] or counts[ts.N_CHANGES]
        if at_once or counts[ts.FIRST_READY] < counts[ts.N_READY] or counts[ts.FIRST_ENDED] < counts[ts.N_ENDED]:
            return self.now
        n, woken = int(counts[N_CALENDAR]), int(counts[ts.N_WOKEN])
        soonest = float(self._times[0]) if n else np.inf
        if woken:
            soonest = min(soonest, *self._times[n : n + woken].tolist())
        return soonest if outside is None else min(soonest, outside.next())

    def run(self, limit: float = np.inf) -> int | None:
        """Go on up to `limit` (s); return the next step whose tasks have all ended by then, None if there is none, or
        if others who share the network come first."""
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
        """Let everything else end and start that does so now."""
        while self.run(-np.inf) is not None:
            pass

    def arm(self, rows: slice, keys: slice, seconds: Floats, kind: Ints, later: int) -> None:
        """Let the tasks of a step that has ended, `rows` with these `keys`, happen once more, with other `seconds`, as
        other kinds.

        For queues the keys then count as `later` ones by so many.
        """
        self._note()
        self._turn[keys] += later
        tasks, exchanges = self.tables.tasks[rows], self.tables.exchanges[keys]
        tasks["start"] = tasks["end"] = np.nan
        tasks["seconds"], tasks["kind"] = seconds, kind
        exchanges["instance"] = exchanges["next"] = exchanges["waiting"] = -1
        exchanges["not_ready"] = exchanges["size"]
        exchanges["delivered"] = 0
        np.add.at(self.tables.left, tasks["step"], 1)

    # ------------------------------------------------------------ for what is outside

    def reach(self, now: float) -> None:
        """Set the clock to `now`, before the next event."""
        self.tables.now[0] = max(self.now, now)

    def end(self, rows: Sequence[int] | Ints, time: float) -> None:
        """Let tasks that have begun end at `time`, not before now: all of them before any other one begins then."""
        self._at(time, lambda: self._ended(rows))

    def members(self, key: int) -> Ints:
        """Return the tasks of a collective, by place."""
        first, size = self.tables.exchanges["first"][key], self.tables.exchanges["size"][key]
        return self.tables.members[first : first + size]

    # ------------------------------------------------------------ inside

    def _make_room(self) -> None:
        """Make longer what the kernel has said is full."""
        counts = self.tables.counts
        missing = int(counts[ts.N_FLYING] + counts[ts.N_SENDS] - counts[ts.RESERVED])
        if missing > 0:
            more = max(missing, int(counts[ts.RESERVED]))
            self.network.reserve(more)
            counts[ts.RESERVED] += more
        self.network.make_room()

    def _lengthen(self, n_instances: int) -> None:
        """Have a place for each instance."""
        n = len(self.tables.launches)
        if n_instances > n:
            longer = grown(self.tables.launches, n_instances)
            longer["key"][n:] = -1
            self.tables = self.tables._replace(launches=longer, freed=grown(self.tables.freed, len(longer) + 1))

    def _settle(self, now: float) -> None:
        """Tell the network what has been taken from it."""
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
        if not self.bystanders and self._episodes.is_large(instance):
            self.tables.counts[ts.ANY_LARGE] = 1
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
        """Return the collectives that ranks enter now, in this order."""
        counts, instances = self.tables.counts, self.tables.join_instances
        return list(dict.fromkeys(instances[: counts[ts.N_JOINS]].tolist()))

    def _note(self) -> None:
        """Note the episode at hand if it is over."""
        if self.tables.counts[ts.EPISODE] == ts.NOTED:
            ends = self.tables.tasks["end"]
            self._episodes.note(lambda i: ends[self._entered[i][0]], len(self._entering()))

    def _enter(self) -> None:
        """Let ranks enter collectives, all of which do so now."""
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
        """End the tasks that end now in the episode that is told, in the order in which the kernel would."""
        if self._episodes.next > self.now:  # it is simulated meanwhile
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
        """Let the devices of tasks whose exchange begins now be slower."""
        counts = self.tables.counts
        if len(self.tables.devices):
            n = int(counts[ts.N_CHANGES])
            self.tables.changes[n : n + len(rows)] = 1 + rows
            counts[ts.N_CHANGES] += len(rows)

    def _waker(self, queue: int) -> Wake:
        return lambda time: self._wake(time, -1 - queue)

    def _ended(self, rows: Sequence[int] | Ints) -> None:
        self.tables.ended[: len(rows)] = rows
        self.tables.counts[ts.N_ENDED] = len(rows)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        """Let Python do something at a time (s): of what is due at the same time, what has been asked for first."""
        heapq.heappush(self._due, (time, self._n_due, action))
        self._n_due += 1
        self._wake(time, -1 - len(self.dispatchers))

    def _wake(self, time: float, item: int) -> None:
        counts = self.tables.counts
        self.tables.calendar[counts[N_CALENDAR] + counts[ts.N_WOKEN]] = (time, 0, item)
        counts[ts.N_WOKEN] += 1

    def _prepare_messages(self, send: Callable[[Ints], tuple[Ints, Ints, Floats]] | None) -> None:
        """Have routes for what tasks send."""
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
        self.tables.counts[ts.SENDER] = send_address()


def _tables(columns: TaskColumns, n_keys: int, n_queues: int, bystanders: int, pauses: Floats) -> ts.Tables:
    n = len(columns.kind)
    tasks = np.empty(n, dtype=ts.TASK)
    fields = {name: getattr(columns, name) for name in ts.TASK.names or () if name in TaskColumns._fields}
    fields |= {"first": columns.offsets[:-1], "last": columns.offsets[1:]}
    device = fields.pop("device")
    for begin in range(0, n, _BLOCK):  # the fields of a task are next to each other: write them while they are at hand
        block = slice(begin, begin + _BLOCK)
        tasks["start"][block] = tasks["end"][block] = np.nan
        tasks["ticket"][block] = -1
        tasks["device"][block] = -1 if device is None else device[block]
        for name, column in fields.items():
            tasks[name][block] = column[block]
    rows = np.flatnonzero(np.isin(columns.kind, (ts.JOIN, ts.QUEUED, ts.MEETING)))
    exchanges = np.zeros(n_keys, dtype=ts.EXCHANGE)
    sizes = np.bincount(columns.key[rows], minlength=n_keys)
    exchanges["size"] = exchanges["not_ready"] = sizes
    exchanges["first"] = np.cumsum(sizes) - sizes
    members = np.empty_like(rows)
    members[exchanges["first"][columns.key[rows]] + columns.place[rows]] = rows
    exchanges["instance"] = exchanges["next"] = exchanges["waiting"] = exchanges["target"] = -1
    devices = np.zeros(len(columns.slower), dtype=DEVICE)
    factors = np.array(columns.slower, dtype=float).ravel()
    contention = np.zeros(len(factors), dtype=CONTENTION)
    if columns.slower:
        contention["factor"] = factors
        devices["row"] = -1
        exchanges["contention"] = columns.contention
        received = np.flatnonzero(columns.kind == ts.RECEIVE)
        exchanges["target"][columns.key[received]] = tasks["device"][received]
    ready = np.zeros(n + 1, dtype=np.int64)
    first = np.flatnonzero(columns.missing == 0)
    ready[: len(first)] = first
    counts = np.zeros(ts.N_COUNTS, dtype=np.int64)
    counts[ts.N_READY] = len(first)
    launches = np.zeros(16, dtype=ts.LAUNCH)
    launches["key"] = -1
    n_sends, n_joins = int((columns.kind == ts.SEND).sum()), n + bystanders * n_keys

    def places(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return ts.Tables(
        counts=counts, now=np.zeros(3), tasks=tasks, following=np.ascontiguousarray(columns.following),
        exchanges=exchanges, members=members, launches=launches,
        left=np.bincount(columns.step).astype(np.int64),
        calendar=np.zeros(n + n_queues + 3 + 2 * len(devices), dtype=EVENT),
        ended=places(2 * n + n_queues + 16), ready=ready, join_instances=places(n_joins), join_ranks=places(n_joins),
        sends=places(n_sends + 1), messages=np.zeros(n_sends + 1, dtype=ts.MESSAGE), freed=places(17),
        slow=np.array(list(columns.slowdowns), dtype=SLOW), devices=devices, contention=contention,
        changes=places(2 * n if len(devices) else 0), pauses=pauses,
    )  # fmt: skip


#: tasks whose records are written at a time
_BLOCK = 1 << 12
#: largest number for which a place of its own is kept; untouched pages of memory cost nothing
MOST_PLACES = 1 << 27


def distinct(numbers: Ints, below: int) -> tuple[Ints, Ints]:
    """Return the different ones of some numbers from 0 to `below` - 1 in ascending order, and which of them each is:
    what ``np.unique(numbers, return_inverse=True)`` returns, in time linear in their number."""
    if below > MOST_PLACES:
        values, which = np.unique(numbers, return_inverse=True)
        return values, which.reshape(-1)
    seen = np.zeros(below, dtype=np.bool_)
    seen[numbers] = True
    values = np.flatnonzero(seen)
    place = np.empty(below, dtype=np.int64)
    place[values] = np.arange(len(values))
    return values, place[numbers]
