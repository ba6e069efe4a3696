"""Execution of task graphs: tasks with dependencies that compute or take part in collectives. Compiled.

A *task* starts when the tasks that it depends on have ended. Work then takes its duration. A member of a collective
joins the network's *instance* of the collective, or reports to the *queue* that launches it. Tasks that end at the same
instant are handled before any of their successors joins. A task graph can be executed repeatedly: a task that has
started waits for its dependencies again.

:func:`execute` runs until it needs Python to act (the values of ``status`` below).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddlsim.compiler import entry, inlined
from ddlsim.network.calendar import earliest, insert_woken, pop, push
from ddlsim.network.devices import begin_work, change, next_event
from ddlsim.network.flows import two_sum
from ddlsim.network.intrinsics import attach, call_advance, call_join, call_send, column
from ddlsim.network.state import FOREIGN, IDLE, LOCAL, Floats, Ints, Records, record
from ddlsim.network.state import FULL as NETWORK_FULL

# Kinds of tasks
WORK, SEND, RECEIVE, JOIN, QUEUED = range(5)
OPTIONAL = 5  # work that is skipped if it takes no time; it has exactly one successor
MEETING = 6  # a member of a collective that ends when Python says so, after all members have entered
EXCHANGED = (SEND, JOIN, QUEUED, MEETING)  # communication, which occupies devices; so do tasks of kind ASKED with a key
SKIPPED = 8  # a task that is left out this time: it ends when it starts
HELD = -1 << 40  # HELD - task: the calendar item of a task that is ready but waits for the end of a pause
ASKED = 7  # work of NaN seconds: Python sets its duration when it starts; if infinite, Python ends it

# Status returned by `execute`; ARGUMENT is in `counts`
END = 0  # no event is left
FULL = 1  # arrays of the network are too small, possibly for the messages to be sent now
PREPARE = 2  # the collective ARGUMENT is entered and has no instance yet
READY = 3  # all members of the collective ARGUMENT, which a queue or Python launches, have entered it
LAUNCHED = 4  # what the queue ARGUMENT launched has completed everywhere
TICK = 5  # the time that the queue ARGUMENT asked for has come
STEP = 6  # all tasks of the step ARGUMENT have ended
LIMIT = 7  # no event is left up to the limit
OVERRUN = 8  # the task ARGUMENT would start again before its last execution has been read
ASKING = 9  # the task ARGUMENT starts and Python has to set its duration
ELSEWHERE = 10  # the network has completed something that is not a task: the first N_ELSEWHERE completions
OTHERS = 11  # the network has completed something for other users, which they have to read first
ENTERED = 12  # all ranks of the prepared collectives enter them now, and one of these is large
INTERRUPTED = 13  # other traffic enters the network while an episode is recorded or replayed

# Places in `counts` (int64); 0 to 2 and N_STALE are those of the calendar
FIRST_ENDED, N_ENDED = 3, 4  # part of the list of ended tasks that is still to be handled
FIRST_READY, N_READY = 5, 6
N_JOINS, N_SENDS = 7, 8  # joins and messages to be sent at this instant
N_TAKEN, N_FREED = 9, 10  # completions and freed instances that the network has not been told of
ARGUMENT = 11
ADVANCE, JOINING, SENDER = 12, 13, 14  # addresses of kernel functions
N_ELSEWHERE = 15  # completions that belong to no task
N_SENT = 16  # messages sent in all
N_FLYING, RESERVED = 17, 18  # messages of tasks in flight, and how many the network has room for
N_CHANGES = 20  # communication that began or ended at this instant, if that slows devices down
FIRST_HANDLE = 21  # lowest handle of a message
# For ddlsim.network.episodes: ranks of the collectives prepared since ranks last entered, whether one of these is
# large, and the state of the current episode (0: none)
WHOLE, ANY_LARGE, EPISODE = 22, 23, 24
NOTED, TOLD = 1, 2
N_COUNTS = 25

#: start, end: s, NaN if not reached yet; following[first:last]: its successors; missing: unfinished dependencies, of
#: `waits` in all; place: rank in its collective, or number of its message; slow: first row in `slow`, or -1; device:
#: that it works on, or occupies while it communicates, -1 if none is slowed down; ticket: sequence number of its event,
#: if that can be rescheduled
TASK = record("f seconds start end", "n first last missing waits kind key place step slow device", "i ticket")
#: common data of the tasks with one key. instance: of the network, -1 if none; members[first:first + size]: the tasks;
#: not_ready: members that have not started; next: another key that completes with it, -1 if none; waiting: the receive
#: that has started, -1 if none; delivered: 1 if the message has arrived; target: the receiving device that a message
#: occupies, or -1; contention: its kind for the devices that it slows down
EXCHANGE = record("n instance first size not_ready next waiting delivered target contention")
#: what runs as an instance of the network: its first key (-1: it has no tasks), ranks that have not completed, the
#: queue that launched it (-1: none)
LAUNCH = record("n key left queue")
#: the message of the task `row`, over a `route` of the network
MESSAGE = record("n row source target route", "f nbytes")


class Tables(NamedTuple):
    """Arguments of :func:`execute`."""

    counts: Ints
    now: Floats  # (3,) present, s; bytes of all messages sent, a compensated sum
    tasks: Records  # TASK
    following: Ints
    exchanges: Records  # EXCHANGE
    members: Ints
    launches: Records  # LAUNCH, by instance
    left: Ints  # tasks of each step that have not ended
    calendar: Records  # EVENT, a heap; item: a task, or -1 - queue for a tick
    ended: Ints  # tasks that ended now; -1 - queue: a launch of the queue has completed
    ready: Ints  # tasks that may start now
    join_instances: Ints
    join_ranks: Ints
    sends: Ints  # messages to be sent at this instant
    messages: Records  # MESSAGE; the last row is unused
    freed: Ints  # instances that have ended
    slow: Records  # SLOW
    devices: Records  # DEVICE, those that communication slows down
    contention: Records  # CONTENTION of each device with each kind of communication
    changes: Ints  # 1 + task whose communication has begun, -1 - task whose communication has ended
    pauses: Floats  # (n_pauses, 2) s, during which no task starts


# ---------------------------------------------------------------- tasks


@inlined
def occupy(t: Tables, now):  # type: ignore[no-untyped-def]
    """Update the speed of devices whose communication began or ended at this instant."""
    for i in range(t.counts[N_CHANGES]):
        more = 1 if t.changes[i] > 0 else -1
        row = abs(t.changes[i]) - 1
        exchange = t.tasks[row].key
        kind = t.exchanges[exchange].contention
        device = t.tasks[row].device
        other = t.exchanges[exchange].target if t.tasks[row].kind == SEND else -1
        while device >= 0 or other >= 0:
            if device < 0:
                device = other
                other = -1
            change(t, t.tasks, device, kind, more, now, 0, 1)
            device = -1
    t.counts[N_CHANGES] = 0


@inlined
def send(t, table, clock, message, now):  # type: ignore[no-untyped-def]
    """Send a message: one of an executor's ``messages``."""
    clock[1], clock[2] = two_sum(clock[1], clock[2], t.messages[message].nbytes)
    handle = t.counts[FIRST_HANDLE] + t.counts[N_SENT] * t.messages.size + message
    t.counts[N_SENT] += 1
    call_send(
        t.counts[SENDER], table, handle, t.messages[message].source, t.messages[message].target,
        t.messages[message].route, t.messages[message].nbytes, now,
    )  # fmt: skip


@inlined
def release(t: Tables, row):  # type: ignore[no-untyped-def]
    """Let the tasks be ready that have only waited for one that has ended; return whether it was the last of its
    step."""
    n = t.counts[N_READY]
    for i in range(t.tasks[row].first, t.tasks[row].last):
        after = t.following[i]
        missing = t.tasks[after].missing - 1
        t.tasks[after].missing = missing
        if missing == 0:
            t.ready[n] = after
            n += 1
    t.counts[N_READY] = n
    step = t.tasks[row].step
    t.left[step] -= 1
    if t.left[step] == 0:
        t.counts[ARGUMENT] = step
        return True
    return False


@inlined
def finish(t: Tables, row, now):  # type: ignore[no-untyped-def]
    """End a task; return whether it was the last of its step."""
    t.tasks[row].end = now
    kind = t.tasks[row].kind
    if t.devices.size > 0 and (kind in EXCHANGED or (kind == ASKED and t.tasks[row].key >= 0)):
        t.changes[t.counts[N_CHANGES]] = -1 - row
        t.counts[N_CHANGES] += 1
    elif t.tasks[row].device >= 0 and t.devices[t.tasks[row].device].row == row:
        t.devices[t.tasks[row].device].row = -1
    if kind == SEND:
        exchange = t.tasks[row].key
        t.exchanges[exchange].delivered = 1
        receive = t.exchanges[exchange].waiting
        if receive >= 0:
            t.exchanges[exchange].waiting = -1
            t.counts[FIRST_ENDED] -= 1  # it ends next, before others
            t.ended[t.counts[FIRST_ENDED]] = receive
    return release(t, row)


@inlined
def begin(t: Tables, row, now):  # type: ignore[no-untyped-def]
    """Start a task that is ready; return END, or what Python must do: before it starts (PREPARE, OVERRUN), or after."""
    start = earliest(t.pauses, now)
    if start > now:
        t.counts[FIRST_READY] += 1
        push(t.counts, t.calendar, start, HELD - row)
        return END
    kind = t.tasks[row].kind
    exchange = t.tasks[row].key
    t.counts[ARGUMENT] = exchange
    if not np.isnan(t.tasks[row].end):
        t.counts[ARGUMENT] = row
        return OVERRUN
    if kind == JOIN and t.exchanges[exchange].instance < 0:
        return PREPARE
    seconds = t.tasks[row].seconds
    if kind == ASKED and np.isnan(seconds):
        t.counts[ARGUMENT] = row
        return ASKING
    t.counts[FIRST_READY] += 1
    t.tasks[row].start = now
    t.tasks[row].missing = t.tasks[row].waits
    if t.devices.size > 0 and (kind in (JOIN, MEETING, SEND) or (kind == ASKED and exchange >= 0)):
        t.changes[t.counts[N_CHANGES]] = 1 + row
        t.counts[N_CHANGES] += 1
    if kind == WORK or (kind == OPTIONAL and seconds > 0.0) or (kind == ASKED and seconds < np.inf):
        begin_work(t, t.tasks, t.tasks[row].device, row, seconds, now, 0, 1)
    elif kind == JOIN:
        n = t.counts[N_JOINS]
        t.join_instances[n] = t.exchanges[exchange].instance
        t.join_ranks[n] = t.tasks[row].place
        t.counts[N_JOINS] = n + 1
    elif kind in (QUEUED, MEETING):
        t.exchanges[exchange].not_ready -= 1
        if t.exchanges[exchange].not_ready == 0:
            return READY
    elif kind == OPTIONAL:
        t.tasks[row].end = now
        t.left[t.tasks[row].step] -= 1
        after = t.following[t.tasks[row].first]
        t.tasks[after].missing -= 1
        if t.tasks[after].missing == 0:  # it starts at once, in place of this task
            t.counts[FIRST_READY] -= 1
            t.ready[t.counts[FIRST_READY]] = after
    elif kind == SEND:
        t.sends[t.counts[N_SENDS]] = t.tasks[row].place
        t.counts[N_SENDS] += 1
    elif kind == ASKED:
        t.tasks[row].ticket = -1
        return END
    elif kind == SKIPPED:
        t.tasks[row].end = now
        if release(t, row):
            return STEP
    elif t.exchanges[exchange].delivered == 1:
        push(t.counts, t.calendar, now, row)
    else:
        t.exchanges[exchange].waiting = row
    return END


# ---------------------------------------------------------------- completions of the network


@inlined
def _after(out, i, turn, rank):  # type: ignore[no-untyped-def]
    other = -1 - out[i].id - (1 << 62) if out[i].id < 0 else out[i].id
    return other > turn or (other == turn and out[i].rank > rank)


@inlined
def sort(out, n):  # type: ignore[no-untyped-def]
    """Sort completions as in :class:`~ddlsim.network.network.Completions`: messages first, in the order of sending."""
    gap = n >> 1
    while gap > 0:
        for k in range(gap, n):
            identity = out[k].id
            rank = out[k].rank
            turn = -1 - identity - (1 << 62) if identity < 0 else identity
            i = k
            while i >= gap and _after(out, i - gap, turn, rank):
                out[i].id = out[i - gap].id
                out[i].rank = out[i - gap].rank
                i -= gap
            out[i].id = identity
            out[i].rank = rank
        gap >>= 1


@inlined
def take(t: Tables, out, n, state):  # type: ignore[no-untyped-def]
    """List the tasks that the network has completed and the instances that are free again, before any new task starts.

    Completions without tasks move to the front of `out`.
    """
    sort(out, n)
    at = t.counts[N_ENDED]
    for i in range(n):
        instance = out[i].id
        message = ((-1 - instance) & LOCAL) % t.messages.size
        if instance < 0 and message < t.messages.size - 1:
            t.ended[at] = t.messages[message].row
            at += 1
            t.counts[N_FLYING] -= 1
            continue
        key = t.launches[instance].key if instance >= 0 else -1
        if key < 0:
            out[t.counts[N_ELSEWHERE]].id = instance
            out[t.counts[N_ELSEWHERE]].rank = out[i].rank
            t.counts[N_ELSEWHERE] += 1
            if instance < 0:
                continue
        elif out[i].rank < t.exchanges[key].size:  # other ranks have no tasks
            while key >= 0:
                t.ended[at] = t.members[t.exchanges[key].first + out[i].rank]
                at += 1
                key = t.exchanges[key].next
            t.launches[instance].left -= 1
            if t.launches[instance].left == 0 and t.launches[instance].queue >= 0:
                t.ended[at] = -1 - t.launches[instance].queue
                at += 1
        if state[instance].ranks_left == 0 and (i + 1 == n or out[i + 1].id != instance):
            t.freed[t.counts[N_FREED]] = instance
            t.counts[N_FREED] += 1
            t.launches[instance].key = -1
    t.counts[N_ENDED] = at
    t.counts[N_TAKEN] += n


@entry
def execute(  # type: ignore[no-untyped-def]
    table: Ints, limit, counts, clock, tasks, following, exchanges, members, launches, left, calendar, ended, ready,
    join_instances, join_ranks, sends, messages, freed, slow, devices, contention, changes, pauses,
):  # fmt: skip
    """Execute tasks up to and including `limit` (s), or until Python has to act; return the status.

    If the limit is in the past, finish only the present instant, without joining or sending anything.
    """
    t = Tables(
        column(counts), column(clock), column(tasks), column(following), column(exchanges), column(members),
        column(launches), column(left), column(calendar), column(ended), column(ready), column(join_instances),
        column(join_ranks), column(sends), column(messages), column(freed), column(slow), column(devices),
        column(contention), column(changes), pauses,
    )  # fmt: skip
    counts, clock, ended, calendar = t.counts, t.now, t.ended, t.calendar
    net = attach(table)
    insert_woken(counts, calendar)
    while True:
        while True:
            now = clock[0]
            if counts[FIRST_READY] < counts[N_READY]:
                status = begin(t, t.ready[counts[FIRST_READY]], now)
                if status != END:
                    return status
            elif counts[FIRST_ENDED] < counts[N_ENDED]:
                row = ended[counts[FIRST_ENDED]]
                counts[FIRST_ENDED] += 1
                counts[FIRST_READY] = 0
                counts[N_READY] = 0
                if row < 0:
                    counts[ARGUMENT] = -1 - row
                    return LAUNCHED
                if finish(t, row, now):
                    return STEP
            else:
                break
        counts[FIRST_READY] = 0
        counts[N_READY] = 0
        counts[FIRST_ENDED] = 0
        counts[N_ENDED] = 0
        if counts[N_CHANGES] > 0:
            occupy(t, now)
        after = next_event(t, t.tasks, 0, 1)
        if after > now:
            if limit < now:
                return LIMIT
            n = counts[N_JOINS]
            if n > 0 and n == counts[WHOLE] and counts[ANY_LARGE] == 1:
                return ENTERED
            if n + counts[N_SENDS] > 0 and counts[EPISODE] != 0:
                return INTERRUPTED
            if n > 0:
                counts[WHOLE] = 0
                counts[ANY_LARGE] = 0
                counts[N_JOINS] = 0
                call_join(counts[JOINING], table, join_instances[:n], join_ranks[:n], now)
            n = counts[N_SENDS]
            if counts[N_FLYING] + n > counts[RESERVED]:
                return FULL
            counts[N_SENDS] = 0
            counts[N_FLYING] += n
            for i in range(n):
                send(t, table, clock, t.sends[i], now)
        status = call_advance(counts[ADVANCE], table, min(after, limit))
        if status == NETWORK_FULL:
            return FULL
        if status == FOREIGN:
            return OTHERS
        if status != IDLE:
            clock[0] = net.now
            n = net.n_out
            net.n_out = 0
            take(t, net.out, n, net.instances)
            if counts[N_ELSEWHERE] > 0:
                return ELSEWHERE
        elif after <= max(limit, now) and after < np.inf:
            clock[0] = after
            item = pop(counts, calendar)
            if item <= HELD:
                t.ready[0] = HELD - item
                counts[N_READY] = 1
                continue
            if item < 0:
                counts[ARGUMENT] = -1 - item
                return TICK
            ended[0] = item
            counts[N_ENDED] = 1
        else:
            return LIMIT if limit < np.inf else END
