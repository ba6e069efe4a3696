"""Actors that repeat cycles of operations, and the servers and peers they send to. Compiled.

An *actor* does its operations one after the other, over and over: work that takes its seconds times a factor drawn for
the step, an exchange with all servers, letters to its peers. A *server* serves one request at a time, first come first
served. A *way* leads from an actor to a server, which answers on it, or to a peer; no message goes on it before the one
before has arrived. Servers that act *together* have one model: they serve one actor at a time, and make an update when
so many have come.

What happens at one instant happens in the order of its events, each of which comes behind those that are there, and
what is sent at an instant is handed to the network when nothing is left of it, in order: as if actors, requests and
waits were processes of an event loop. :func:`go_round` returns to Python where that must do something (the values of
its status); what it has done is written into a log.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddlsim.compiler import entry, inlined, network_stamp
from ddlsim.network.calendar import N_CALENDAR, pop, push
from ddlsim.network.devices import N_STALE, change, schedule, slowed, stale, stood_still
from ddlsim.network.intrinsics import attach, call_advance, call_send, column
from ddlsim.network.pauses import earliest, paused
from ddlsim.network.state import FOREIGN, IDLE, LOCAL, N_OUT, Floats, Ints, Records, record
from ddlsim.network.state import FULL as NETWORK_FULL
from ddlsim.network.state import NOW as NETWORK_NOW
from ddlsim.network.sums import two_sum
from ddlsim.network.tasks import N_WOKEN, sort

# Kinds of operations
WORK = 0  # takes its seconds times the factor
OWED = 1  # extra work, such as an evaluation, with the factor of the step before
DRAW = 2  # takes the next factor
EXCHANGE = 3  # sends to all servers and waits for their answers
POST = 4  # sends to all peers
AWAIT = 5  # waits until its posted messages have arrived, and those of this round have come from all peers
NOTE = 6  # is written down
ASK = 7  # is written down, and Python is asked before it goes on
RESIZE = 19  # as well; what the actor computes may change
STEP = 8  # is written down: a step of the actor has ended, which is an update as `number` says
# ... at servers that act together, who serve one actor at a time and have one version
TRAVEL = 9  # waits until all ways have carried a message, there (`number` 0) or back (1)
REST = 10  # takes its seconds, whatever the factor
TURN = 11  # waits until it has the servers for itself
GATHER, GATHER_NEW = 12, 13  # adds to what servers have gathered, unless that is too old; takes its seconds if complete
UPDATE = 14  # makes an update of what has been gathered, if that is complete: `number` in all; counted if 1
RELEASE = 15  # ends its turn
MEET = 16  # waits for the update to which it has added or, if `number` is 1, for one after which it is invited
CLOCK = 17  # waits until it is at most `number` additions ahead of the slowest actor
TAKE = 18  # takes the version that there is; is written down, and Python is asked if `number` is 1

# ... with one message at a time, on the only way, to whom Python has chosen
CHOOSE = 20  # takes the next choice; if it is -1 (none), `number` operations are left out
DISPATCH = 21  # sends to the chosen peer, whose answer comes back if `number` is 1
JOIN = 22  # waits until what was sent last has arrived, or been answered

FETCH = 23  # waits until Python says that its next batch of samples is there
AGAIN = 24  # goes back `number` operations, until it has been here as often as its seconds say

# What a STEP can be: an update when all actors have ended theirs; or each is one; or each, whose staleness is told
NO_UPDATE, COMMON, EACH, AGED = range(4)
# Who gets messages (MANNER): servers, each for itself, or all peers; servers together; a peer that answers; a peer
APART, TOGETHER, ANSWERING, PUSHING = range(4)

# What `go_round` returns
OVER = 0  # the instant has come at which the run ends
LIMIT = 1  # nothing more happens up to the limit
STUCK = 2  # nothing is left to happen
FULL = 3  # arrays of the network must be made longer
LOGGED = 4  # the log must be read
REFILL = 5  # the actor PENDING needs factors
CHOICES = 9  # it needs choices
ASKED = 6  # an operation, or a server, asks
UPDATED = 7  # as many updates have been made as should be
GOING = 8  # (nothing)
FETCHING = 10  # the actor PENDING takes its next batch
ELSEWHERE = 11  # the network has ended what no actor has sent: the first N_ELSEWHERE completions, at the time WHEN
OTHERS = 12  # the network has ended what is of others who share it, and waits for them

# What a row of the log tells, besides the number of a NOTE, ASK or STEP
# (LOST: work until `where` of a gradient that was begun at `begin`, by an actor that is back now)
SERVED, WORKED, WAITED, DELIVERED, LOST, BROUGHT = -1, -2, -3, -4, -5, -6

# Places in `counts` (int64), besides N_CALENDAR, N_WOKEN, SEQUENCE and N_STALE of :mod:`ddlsim.network.tasks`
ADVANCE, SEND = 3, 4  # addresses in the kernel
N_SENDS, N_SENT = 5, 6  # at this instant, and ever
N_LOGGED = 7
PENDING = 8  # the actor that goes on first, -1 if none
UPDATES_LEFT = 9
RETURNS = 10  # 1: Python is told of the last update, 0: the run ends with it
ASKS = 11  # 1: servers ask Python
ENDING = 12  # 1: the run ends when all is over that has been scheduled
SPANS = 13  # 1: work, waiting and services are logged
DEPTH = 14  # letters of a way that can have been posted before the first has been read
SLOWEST, BEHIND = 15, 16  # steps that all actors have ended, and how many have ended no more
MANNER = 17
GATHERED = 18  # by these
MEETING, LAST_MEETING = 20, 33  # actors that wait for the next update, a list, -1 if there are none
RESUMED = 21  # actors that go on because of an update, a list
HELD, LAST_HELD = 22, 23  # actors that wait for others' clocks
ASKING = 24  # the way on which a peer is about to answer, -1 if there is none
N_UPDATES = 25  # so far, of AGED steps
FAILING = 26  # 1: some actor crashes at some time
FETCHED = 27  # 1: the batch that the actor PENDING takes is there
N_ELSEWHERE = 28  # completions of what no actor has sent
N_TAKEN = 29  # completions, altogether
FIRST_HANDLE = 30  # what the handles of messages begin with
FIRST_OP = 31  # with which an actor begins that is back after a crash which has undone no gradient
INVITED = 32  # actors that go on after the next update
N_COUNTS = 34

# Places in `reals` (float64)
NOW = 0
QUIET = 1  # the network is known to complete nothing before
WHEN = 2  # something ended that no actor has sent
NBYTES = 3  # sent: a compensated sum (ddlsim.network.sums), with its low word at the next place
OPENS = 5  # when what is ready now starts: now, or when the pause ends
N_REALS = 6

MANY = 1 << 62  # no bound
BLOCK = 64  # factors of an actor that are drawn ahead

#: end: -1 for none
CHOICE = record(end="n", target="n", route="n", back_route="n")

# What happens (EVENT.item % N_EVENTS; the rest is the number of an actor, a way, a server or a message)
START, WORK_ENDS, ARRIVES, GRANTED, SERVICE_ENDS, RELEASED, ANSWERED, RETURNED, READ, THROUGH = range(10)
UPDATES, END, BACK, GONE, FED, FALLS, LEAVES = range(10, 17)
N_EVENTS = 32

# What a gradient has become (ACTOR.part)
DROPPED, ADDED, COMPLETING = range(3)

#: number: as the kind says; redo: of work that a crash undoes the operation with which that begins, else -1
OP = record(kind="n", number="i", redo="n")
#: start: s, of what it does; factor: of its step; owed: s; queued: s, in the longest queue of its exchange; compute,
#: communication, waiting, input: s in all; op: what it does; left: what it waits for, -1 if it does not; cursor: of its
#: factors; posts: rounds of letters; steps: that have ended; slow: where `slow` begins for it, -1 if nowhere; its ways
#: are first:last, those that lead to it arrivals[first_in:last_in]; version: of the servers that act together, when it
#: took it, or updates when its step began; clock: times that it has added to them; part: of an update, above; next:
#: behind it in a list; invited: 1 if it goes on after the next update; turns: that an AGAIN has counted; drawn:
#: choices; begun: s, the gradient that it works on; idle, lost: s that it was not there,
#: and of work that crashes have undone; fell: when one did last, s; crash: its next one in `crashes`, -1 if there is
#: none ever; down: 1 from a crash that has undone work until it is back; machine: that it is on; ticket: number of the
#: event that ends its work, -1 if that cannot be planned anew
ACTOR = record(
    start="f", factor="f", owed="f", queued="f", compute="f", communication="f", waiting="f", input="f",
    version="i", clock="i", op="n", left="n", cursor="n", posts="n", steps="n", slow="n", first="n", last="n",
    first_in="n", last_in="n", part="n", next="n", invited="n", turns="n", drawn="n", begun="f", idle="f", lost="f",
    fell="f", crash="n", down="n", machine="n", ticket="n",
)  # fmt: skip
#: nbytes, route, source, target: of the message there, and of the answer (back_); arrived, begin: s, of the request;
#: seconds: until a peer answers; version: of the server when it answered last; read: messages received; under_way:
#: 1 if the sender waits for one; end: the server or peer that it leads to; next: behind it in the server's queue;
#: stage: of the message whose sender waits, below; lost: messages, services and answers to come of an actor that has
#: crashed since, to be ignored
WAY = record(
    nbytes="f", back_nbytes="f", arrived="f", begin="f", seconds="f", version="i", read="i", actor="n", end="n",
    next="n", under_way="n", route="n", back_route="n", source="n", target="n", stage="n", lost_message="n",
    lost_service="n", lost_answer="n",
)  # fmt: skip
#: stages of a message: its actor waits for none, it goes there, is in the queue, is served, is answered
NOWHERE, GOING_THERE, QUEUED, IN_SERVICE, ANSWERING_IT = range(5)
#: seconds: of a service; version: services so far; the queue goes from head to tail, -1 if it is empty; busy: 1 if it
#: is serving
SERVER = record(seconds="f", version="i", head="n", tail="n", busy="n")
#: time: s; begin: s, of work and services; where: waiting ended, between the two; what: above; place: the server or
#: peer, or operation; staleness: of what a server applies; whole: 1 if that makes an update, or a step does
ROW = record(time="f", begin="f", where="f", what="n", actor="n", place="n", whole="n", staleness="i")


#: from `start` to `end` (s) a process is not there; the last one of each actor begins never
CRASH = record(start="f", end="f")


class Tables(NamedTuple):
    """What :func:`~ddlsim.network.lanes.go_round` works on; Python makes all of it."""

    counts: Ints
    reals: Floats
    ops: Records  # OP
    seconds: Floats  # of each actor's operations
    actors: Records  # ACTOR
    ways: Records  # WAY
    servers: Records  # SERVER
    arrivals: Ints
    posted: Floats  # s, of the last DEPTH letters of each way
    factors: Floats  # BLOCK of each actor
    choices: Records  # CHOICE, as many
    slow: Records  # SLOW
    devices: Records  # DEVICE of each actor, where messages to and from peers slow its work down, else none
    contention: Records  # CONTENTION of each device, with messages between machines and inside a machine
    crashes: Records  # CRASH
    calendar: Records  # EVENT, a heap
    sends: Ints  # 2 * way, + 1 for its answer
    log: Records  # ROW
    pauses: Floats  # (n_pauses, 2) s, in which nothing starts


# ---------------------------------------------------------------- what actors do


ON = -1  # an actor goes on to its next operation


@inlined
def come(t: Tables, time, what, number):  # type: ignore[no-untyped-def]
    """Let something happen at `time`, behind all that is there."""
    push(t.counts, t.calendar, time, what + N_EVENTS * number)


@inlined
def write(t: Tables, what, actor, place, begin, where, now):  # type: ignore[no-untyped-def]
    """Write a row of the log; return its number."""
    i = t.counts[N_LOGGED]
    t.counts[N_LOGGED] = i + 1
    t.log[i].time = now
    t.log[i].begin = begin
    t.log[i].where = where
    t.log[i].what = what
    t.log[i].actor = actor
    t.log[i].place = place
    t.log[i].whole = 0
    return i


@inlined
def leave(t: Tables, message):  # type: ignore[no-untyped-def]
    """Send a message when nothing is left of the instant, or of a pause."""
    if t.reals[OPENS] > t.reals[NOW]:
        come(t, t.reals[OPENS], LEAVES, message)
        return
    t.sends[t.counts[N_SENDS]] = message
    t.counts[N_SENDS] += 1


@inlined
def updated(t: Tables, row, now):  # type: ignore[no-untyped-def]
    """Count an update that a row of the log has made; return whether Python must be told."""
    if t.counts[UPDATES_LEFT] == 0:
        return False
    t.log[row].whole = 1
    t.counts[UPDATES_LEFT] -= 1
    if t.counts[UPDATES_LEFT] > 0:
        return False
    if t.counts[RETURNS] == 0:
        come(t, now, END, 0)
    return t.counts[RETURNS] == 1


@inlined
def next_crash(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Return the place of the crash that an actor is in, or comes to next."""
    i: int = t.actors[actor].crash
    while t.crashes[i].end <= now:
        i += 1
    t.actors[actor].crash = i
    return i


@inlined
def is_down(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Whether an actor has crashed and is not back."""
    if t.actors[actor].crash < 0:
        return False
    i: int = next_crash(t, actor, now)
    return t.crashes[i].start <= now


@inlined
def is_gone(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Whether an actor has crashed and never comes back."""
    return is_down(t, actor, now) and t.crashes[t.actors[actor].crash].end == np.inf


@inlined
def worked(t: Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Count what an actor has computed, who was ready at `begin`; while its process stands still, its device is
    idle."""
    ready = begin
    begin = min(earliest(t.pauses, ready), end)
    t.actors[actor].waiting += begin - ready
    still = stood_still(t.slow, t.actors[actor].slow, begin, end) if t.actors[actor].slow >= 0 else 0.0
    t.actors[actor].compute += end - begin - still
    t.actors[actor].idle += still


@inlined
def communicated(t: Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Count the time in which an actor has waited for bytes: in a pause, it waits for its end."""
    waited = paused(t.pauses, begin, end)
    t.actors[actor].waiting += waited
    t.actors[actor].communication += end - begin - waited


@inlined
def work(t: Tables, actor, op, seconds, now):  # type: ignore[no-untyped-def]
    """Let an actor work, as long as it does not crash: that undoes a gradient, which it begins anew when it is back, or
    lets it stand still."""
    t.actors[actor].start = now
    now = t.reals[OPENS]
    if t.devices.size > 0:
        t.devices[actor].row = actor
        t.devices[actor].work = seconds
        t.devices[actor].since = now
        schedule(t.counts, t.calendar, t.actors, t.slow, t.devices, t.contention, actor, now, WORK_ENDS, N_EVENTS)
        return
    if t.actors[actor].slow >= 0:
        seconds = slowed(t.slow, t.actors[actor].slow, now, seconds)
    if t.actors[actor].crash >= 0:
        i: int = next_crash(t, actor, now)
        redo = t.ops[op].redo
        if redo >= 0 and t.crashes[i].start < now + seconds:
            t.actors[actor].down = 1
            fell = max(t.crashes[i].start, now)
            t.actors[actor].fell = fell
            worked(t, actor, t.actors[actor].start, fell)
            t.actors[actor].lost += fell - t.actors[actor].begun
            if t.crashes[i].end < np.inf:
                come(t, t.crashes[i].end, BACK, actor)
            return
        begin = now
        while t.crashes[i].start < now + seconds:
            seconds += t.crashes[i].end - max(t.crashes[i].start, begin)
            begin = t.crashes[i].end
            i += 1
    if seconds < np.inf:
        come(t, now + seconds, WORK_ENDS, actor)


@inlined
def carry(t: Tables, way, more, now):  # type: ignore[no-untyped-def]
    """Let one message `more` (1) or less (-1) be under way between an actor and its peer."""
    actor = t.ways[way].actor
    peer = t.ways[way].end
    kind = 1 if t.actors[actor].machine == t.actors[peer].machine else 0
    for end in (actor, peer):
        change(
            t.counts, t.calendar, t.actors, t.slow, t.devices, t.contention, end, kind, more, now, WORK_ENDS, N_EVENTS
        )


@inlined
def back(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor is back after a crash that has undone its work: it takes the model that there is, and begins anew."""
    op = t.actors[actor].op
    write(t, LOST, actor, op, t.actors[actor].start, t.actors[actor].fell, now)
    t.actors[actor].idle += now - t.actors[actor].fell
    t.actors[actor].down = 0
    t.actors[actor].start = now
    t.actors[actor].op = t.ops[op].redo if t.ops[op].redo >= 0 else t.counts[FIRST_OP]
    if t.servers.size > 0:
        t.actors[actor].version = t.servers[0].version
        for way in range(t.actors[actor].first, t.actors[actor].last):
            t.ways[way].version = t.servers[t.ways[way].end].version


@inlined
def wait_until_back(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor that has crashed begin anew when it is back."""
    t.actors[actor].down = 1
    t.actors[actor].fell = now
    t.actors[actor].left = -1
    i: int = next_crash(t, actor, now)
    if t.crashes[i].end < np.inf:
        come(t, t.crashes[i].end, BACK, actor)


@inlined
def falls(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor crashes: what it has sent to servers, and what they answer, is lost with it."""
    i: int = next_crash(t, actor, now)
    after: int = i + 1 if t.crashes[i].start <= now else i
    if t.crashes[after].start < np.inf:
        come(t, t.crashes[after].start, FALLS, actor)
    kind = t.ops[t.actors[actor].op].kind
    if after == i or t.actors[actor].left <= 0 or kind not in (EXCHANGE, TRAVEL):
        return
    for way in range(t.actors[actor].first, t.actors[actor].last):
        stage = t.ways[way].stage
        if stage in (GOING_THERE, QUEUED, IN_SERVICE):
            t.actors[actor].lost += t.actors[actor].start - t.actors[actor].begun
            t.actors[actor].begun = t.actors[actor].start  # once, though several are lost
        t.ways[way].lost_message += stage == GOING_THERE
        t.ways[way].lost_service += stage == IN_SERVICE
        t.ways[way].lost_answer += stage == ANSWERING_IT
        if stage == QUEUED:
            leave_queue(t, way)
        t.ways[way].stage = NOWHERE
        t.ways[way].under_way = 0
    communicated(t, actor, t.actors[actor].start, now)
    wait_until_back(t, actor, now)


@inlined
def leave_queue(t: Tables, way):  # type: ignore[no-untyped-def]
    """Take a request out of the queue of its server."""
    server = t.ways[way].end
    before = -1
    other = t.servers[server].head
    while other != way:
        before = other
        other = t.ways[other].next
    if before < 0:
        t.servers[server].head = t.ways[way].next
    else:
        t.ways[before].next = t.ways[way].next
    if t.servers[server].tail == way:
        t.servers[server].tail = before


@inlined
def is_lost(t: Tables, way, what):  # type: ignore[no-untyped-def]
    """Whether a message that arrives, or its answer, is of an actor that has crashed since."""
    lost: bool = t.ways[way].lost_message > 0 if what == ARRIVES else t.ways[way].lost_answer > 0
    if lost and what == ARRIVES:
        t.ways[way].lost_message -= 1
    elif lost:
        t.ways[way].lost_answer -= 1
    return lost


@inlined
def grant(t: Tables, server, now):  # type: ignore[no-untyped-def]
    """Let a server that is free turn to the first in its queue."""
    way = t.servers[server].head
    if way >= 0 and t.servers[server].busy == 0:
        t.servers[server].head = t.ways[way].next
        t.servers[server].busy = 1
        t.ways[way].stage = IN_SERVICE
        come(t, now, GRANTED, way)


@inlined
def request(t: Tables, way, now):  # type: ignore[no-untyped-def]
    """Let a request queue at the server to which a way leads."""
    server = t.ways[way].end
    t.ways[way].arrived = now
    t.ways[way].stage = QUEUED
    t.ways[way].next = -1
    if t.servers[server].head < 0:
        t.servers[server].head = way
    else:
        t.ways[t.servers[server].tail].next = way
    t.servers[server].tail = way
    grant(t, server, now)


@inlined
def append(t: Tables, first, last, actor):  # type: ignore[no-untyped-def]
    """Put an actor at the end of a list, whose ends are in the places `first` and `last` of the counts."""
    t.actors[actor].next = -1
    if t.counts[first] < 0:
        t.counts[first] = actor
    else:
        t.actors[t.counts[last]].next = actor
    t.counts[last] = actor


@inlined
def rest(t: Tables, actor, seconds, now):  # type: ignore[no-untyped-def]
    """Let an actor wait for some seconds, if there are any."""
    if seconds <= 0.0:
        return ON
    t.actors[actor].start = now
    come(t, t.reals[OPENS] + seconds, THROUGH, actor)
    return GOING


@inlined
def gather(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let servers that act together add what an actor has sent; the last one of an update waits for it."""
    staleness = t.servers[0].version - t.actors[actor].version
    t.actors[actor].part = DROPPED
    if t.ops[op].kind == GATHER_NEW and staleness > 0:
        return ON
    row = write(t, SERVED, actor, 0, now, now, now)
    t.log[row].staleness = staleness  # type: ignore[attr-defined]  # mypy knows no fields
    t.actors[actor].part = ADDED
    t.counts[GATHERED] += 1
    if t.counts[GATHERED] < t.ops[op].number:
        return ON
    t.counts[GATHERED] = 0
    t.actors[actor].part = COMPLETING
    t.actors[actor].start = now
    return rest(t, actor, t.seconds[actor * t.ops.size + op], now)


@inlined
def slowest_clock(t: Tables, now):  # type: ignore[no-untyped-def]
    """Return the clock of the actor that has added least, of those who have not gone for ever."""
    slowest = MANY
    for other in range(t.actors.size):
        if t.counts[FAILING] == 0 or not is_gone(t, other, now):
            slowest = min(slowest, t.actors[other].clock)
    return slowest


@inlined
def held_on(t: Tables, now):  # type: ignore[no-untyped-def]
    """Let those go on who wait for others' clocks and are not too far ahead any more; return the slowest clock."""
    slowest = slowest_clock(t, now)
    before = -1
    other = t.counts[HELD]
    while other >= 0:
        after = t.actors[other].next
        if t.actors[other].clock - slowest > t.ops[t.actors[other].op].number:
            before = other
        else:
            if before < 0:
                t.counts[HELD] = after
            else:
                t.actors[before].next = after
            if after < 0:
                t.counts[LAST_HELD] = before
            come(t, now, THROUGH, other)
        other = after
    return slowest


@inlined
def tick(t: Tables, actor, slack, now):  # type: ignore[no-untyped-def]
    """Advance an actor's clock, which may let others go on; return whether it may itself."""
    t.actors[actor].clock += 1
    return t.actors[actor].clock - held_on(t, now) <= slack


@inlined
def gone(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor never comes back: free the actors that wait for its clock or for its answer."""
    if t.counts[MANNER] >= ANSWERING:
        for way in range(t.ways.size):
            if t.ways[way].end == actor and t.ways[way].under_way == 1:
                come(t, now, RETURNED, way)
    elif t.counts[HELD] >= 0:
        held_on(t, now)


@inlined
def at_servers(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let an actor do something at servers that act together; return GOING if it waits, ON if it goes on, or what
    Python must do before."""
    kind = t.ops[op].kind
    number = t.ops[op].number
    if kind == REST:
        return rest(t, actor, t.seconds[actor * t.ops.size + op], now)
    if kind in (GATHER, GATHER_NEW):
        return gather(t, actor, op, now)
    if kind == UPDATE:
        if t.actors[actor].part == COMPLETING:
            t.servers[0].version += 1
            row = write(t, op, actor, op, t.actors[actor].start, now, now)
            if number == 1 and updated(t, row, now):
                return UPDATED
        return ON
    if kind == RELEASE:
        if t.actors[actor].part == COMPLETING:
            come(t, now, UPDATES, 0)
        t.servers[0].busy = 0
        come(t, now, RELEASED, 0)
        return ON
    if kind == TAKE:
        t.actors[actor].version = t.servers[0].version
        if t.counts[RETURNS] == 1:
            write(t, op, actor, op, now, now, now)
        return ASKED if number == 1 else ON
    if kind == CLOCK and tick(t, actor, number, now):
        return ON
    if kind == MEET and number == 0 and t.actors[actor].part == DROPPED:
        return ON
    t.actors[actor].start = now
    if kind == TRAVEL and number == 1 and t.counts[FAILING] == 1 and is_down(t, actor, now):
        wait_until_back(t, actor, now)
    elif kind == TRAVEL:
        t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
        for way in range(t.actors[actor].first, t.actors[actor].last):
            t.ways[way].stage = ANSWERING_IT if number == 1 else GOING_THERE
            leave(t, 2 * way + number)
    elif kind == TURN:
        request(t, t.actors[actor].first, now)
    elif kind == MEET and number == 0:
        append(t, MEETING, LAST_MEETING, actor)
    elif kind == CLOCK:
        append(t, HELD, LAST_HELD, actor)
    return GOING


@inlined
def next_op(t: Tables, actor):  # type: ignore[no-untyped-def]
    """Let an actor be through with what it does."""
    op = t.actors[actor].op + 1
    t.actors[actor].op = op if op < t.ops.size else 0


@inlined
def to_one(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let an actor choose whom it sends to, send, or wait; return as :func:`at_servers` does."""
    kind = t.ops[op].kind
    way = t.actors[actor].first
    if kind == JOIN:
        if t.ways[way].under_way == 0:
            return ON
        t.actors[actor].start = now
        t.actors[actor].left = 1
        return GOING
    if kind == CHOOSE:
        if t.actors[actor].drawn == BLOCK:
            t.counts[PENDING] = actor
            return CHOICES
        t.actors[actor].drawn += 1
    choice = t.choices[actor * BLOCK + t.actors[actor].drawn - 1]
    if kind == DISPATCH:
        t.ways[way].end = choice.end
        t.ways[way].target = choice.target
        t.ways[way].route = choice.route
        t.ways[way].back_route = choice.back_route
        t.ways[way].begin = now
        t.ways[way].under_way = 1
        leave(t, 2 * way)
    elif choice.end < 0 or (t.counts[FAILING] == 1 and is_down(t, choice.end, now)):
        t.actors[actor].op += t.ops[op].number
    return ON


@inlined
def step_ends(t: Tables, actor, op, row, now):  # type: ignore[no-untyped-def]
    """Count a step; return whether Python must be told of an update that it makes."""
    number = t.ops[op].number
    if number in (EACH, AGED):
        told = updated(t, row, now)
        if number == AGED:
            t.log[row].staleness = t.counts[N_UPDATES] - t.actors[actor].version
            t.counts[N_UPDATES] += t.log[row].whole
            t.actors[actor].version = t.counts[N_UPDATES]
        return told
    if number == NO_UPDATE:
        return False
    steps = t.actors[actor].steps
    t.actors[actor].steps = steps + 1
    if steps > t.counts[SLOWEST]:
        return False
    t.counts[BEHIND] -= 1
    if t.counts[BEHIND] > 0:
        return False
    t.counts[SLOWEST] = steps + 1
    for other in range(t.actors.size):
        t.counts[BEHIND] += 1 if t.actors[other].steps == steps + 1 else 0
    return updated(t, row, now)


@inlined
def go_on(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor do what comes next, up to what takes time (GOING), or return what Python must do before."""
    n_ops = t.ops.size
    while True:
        op = t.actors[actor].op
        kind = t.ops[op].kind
        then = ON
        if t.ops[op].redo == op:
            t.actors[actor].begun = now
        if kind in (WORK, OWED):
            seconds = t.seconds[actor * n_ops + op]
            if kind == OWED:
                seconds = t.actors[actor].owed
                t.actors[actor].owed = 0.0
            seconds *= t.actors[actor].factor
            if seconds > 0.0:
                work(t, actor, op, seconds, now)
                return GOING
        elif kind == DRAW:
            cursor = t.actors[actor].cursor
            if cursor == BLOCK:
                t.counts[PENDING] = actor
                return REFILL
            t.actors[actor].factor = t.factors[actor * BLOCK + cursor]
            t.actors[actor].cursor = cursor + 1
        elif kind == FETCH:
            if t.counts[FETCHED] == 0:
                t.actors[actor].start = now
                t.counts[PENDING] = actor
                return FETCHING
            t.counts[FETCHED] = 0
        elif kind == EXCHANGE:
            t.actors[actor].start = now
            t.actors[actor].queued = 0.0
            t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
            for way in range(t.actors[actor].first, t.actors[actor].last):
                t.ways[way].under_way = 1
                t.ways[way].stage = GOING_THERE
                leave(t, 2 * way)
            return GOING
        elif kind == POST:
            posts = t.actors[actor].posts
            t.actors[actor].posts = posts + 1
            for way in range(t.actors[actor].first, t.actors[actor].last):
                t.ways[way].under_way = 1
                t.posted[way * t.counts[DEPTH] + posts % t.counts[DEPTH]] = now
                leave(t, 2 * way)
        elif kind == AWAIT:
            t.actors[actor].start = now
            left = 0
            for way in range(t.actors[actor].first, t.actors[actor].last):
                left += t.ways[way].under_way
            for i in range(t.actors[actor].first_in, t.actors[actor].last_in):
                if t.ways[t.arrivals[i]].read < t.actors[actor].posts:
                    left += 1
            t.actors[actor].left = left
            if left == 0:
                come(t, now, THROUGH, actor)
            return GOING
        elif kind == AGAIN:
            if t.log.size - t.counts[N_LOGGED] < n_ops + 2:
                t.counts[PENDING] = actor
                return LOGGED
            t.actors[actor].turns += 1
            if t.actors[actor].turns < t.seconds[actor * n_ops + op]:
                t.actors[actor].op = op - t.ops[op].number
                continue
            t.actors[actor].turns = 0
        elif TRAVEL <= kind <= TAKE or kind >= CHOOSE:
            then = at_servers(t, actor, op, now) if kind < CHOOSE else to_one(t, actor, op, now)
            if then in (GOING, CHOICES):
                return then
        else:
            row = write(t, op, actor, op, now, now, now)
            if kind in (ASK, RESIZE):
                then = ASKED
            elif kind == STEP and step_ends(t, actor, op, row, now):
                then = UPDATED
        next_op(t, actor)
        if then != ON:
            t.counts[PENDING] = actor
            return then


# ---------------------------------------------------------------- what happens


@inlined
def less(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Something that an actor waits for has come."""
    left = t.actors[actor].left - 1
    t.actors[actor].left = left
    if left == 0:
        come(t, now, THROUGH, actor)


@inlined
def served(t: Tables, way, now):  # type: ignore[no-untyped-def]
    """A server has served a request: it answers, and is free."""
    actor = t.ways[way].actor
    server = t.ways[way].end
    if t.ways[way].lost_service > 0:
        t.ways[way].lost_service = 0
        t.servers[server].busy = 0
        come(t, now, RELEASED, server)
        return
    t.ways[way].stage = ANSWERING_IT
    row = write(t, SERVED, actor, server, t.ways[way].begin, now, now)
    version = t.servers[server].version
    t.log[row].staleness = version - t.ways[way].version  # type: ignore[attr-defined]  # mypy knows no fields
    t.servers[server].version = version + 1
    t.ways[way].version = version + 1
    t.ways[way].under_way = 0
    whole = True
    for other in range(t.actors[actor].first, t.actors[actor].last):
        whole = whole and t.ways[other].under_way == 0
    if whole:
        updated(t, row, now)
    t.servers[server].busy = 0
    come(t, now, RELEASED, server)
    leave(t, 2 * way + 1)


@inlined
def through(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """What an actor has waited for has come: for others first, then for bytes."""
    kind = t.ops[t.actors[actor].op].kind
    start = t.actors[actor].start
    ready = start
    if kind in (TURN, MEET, CLOCK):
        ready = now
    elif kind == EXCHANGE:
        ready = start + t.actors[actor].queued
    elif kind == AWAIT:
        for i in range(t.actors[actor].first_in, t.actors[actor].last_in):
            letter = (t.actors[actor].posts - 1) % t.counts[DEPTH]
            ready = max(ready, t.posted[t.arrivals[i] * t.counts[DEPTH] + letter])
    ready = min(max(ready, start), now)
    t.actors[actor].left = -1
    t.actors[actor].waiting += ready - start
    communicated(t, actor, ready, now)
    if t.counts[SPANS] == 1:
        write(t, WAITED, actor, t.actors[actor].op, start, ready, now)


@inlined
def proceed(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor be through with waiting, and return it."""
    through(t, actor, now)
    next_op(t, actor)
    return actor


@inlined
def one_arrives(t: Tables, way, what, now):  # type: ignore[no-untyped-def]
    """What an actor has sent to a peer has arrived there, or its answer here."""
    actor = t.ways[way].actor
    if what == ARRIVES:
        if t.counts[RETURNS] == 1:
            write(t, SERVED, actor, t.ways[way].end, now, now, now)
        if t.counts[MANNER] == ANSWERING:
            t.counts[ASKING] = way
            return
    if t.counts[SPANS] == 1:
        write(t, DELIVERED, actor, t.ways[way].end, t.ways[way].begin, now, now)
    come(t, now, RETURNED, way)


@inlined
def answer(t: Tables):  # type: ignore[no-untyped-def]
    """Let a peer answer what has just arrived, which Python has been told of."""
    way = t.counts[ASKING]
    t.counts[ASKING] = -1
    if t.ways[way].seconds > 0.0:
        come(t, t.reals[OPENS] + t.ways[way].seconds, SERVICE_ENDS, way)
    else:
        leave(t, 2 * way + 1)


@inlined
def happen(t: Tables, item, now):  # type: ignore[no-untyped-def]
    """Let an event happen; return the actor that goes on then, -1 if none does."""
    what = item % N_EVENTS
    i = item // N_EVENTS
    manner = t.counts[MANNER]
    if what == START:
        return i
    if t.devices.size > 0 and what in (ARRIVES, ANSWERED):
        carry(t, i, -1, now)
    if what == WORK_ENDS:
        if t.devices.size > 0:
            t.devices[i].row = -1
        worked(t, i, t.actors[i].start, now)
        if t.counts[SPANS] == 1:
            write(t, WORKED, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what == FED:
        t.actors[i].input += now - t.actors[i].start
        if t.counts[SPANS] == 1:
            write(t, BROUGHT, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what in (ARRIVES, ANSWERED) and is_lost(t, i, what):
        return -1
    if what in (ARRIVES, ANSWERED) and manner == TOGETHER:
        t.ways[i].stage = NOWHERE
        less(t, t.ways[i].actor, now)
    elif what in (ARRIVES, ANSWERED) and manner >= ANSWERING:
        one_arrives(t, i, what, now)
    elif what == ARRIVES and t.servers.size > 0:
        request(t, i, now)
    elif what == ARRIVES:  # the letter is read, and its sender hears of it
        come(t, now, READ, i)
        come(t, now, RETURNED, i)
    elif what == GRANTED:
        actor = t.ways[i].actor
        if manner == TOGETHER:
            return proceed(t, actor, now)
        begin = t.reals[OPENS]
        t.ways[i].begin = now
        t.actors[actor].queued = max(t.actors[actor].queued, begin - t.ways[i].arrived)
        seconds = t.servers[t.ways[i].end].seconds
        if seconds > 0.0 or begin > now:
            come(t, begin + seconds, SERVICE_ENDS, i)
        else:
            served(t, i, now)
    elif what == SERVICE_ENDS and manner == ANSWERING:
        leave(t, 2 * i + 1)
    elif what == SERVICE_ENDS:
        served(t, i, now)
    elif what == RELEASED:
        grant(t, i, now)
    elif what == ANSWERED:
        t.ways[i].stage = NOWHERE
        come(t, now, RETURNED, i)
    elif what == RETURNED:
        actor = t.ways[i].actor
        t.ways[i].under_way = 0
        if t.actors[actor].left > 0 and manner >= ANSWERING:
            return proceed(t, actor, now)
        if t.actors[actor].left > 0:
            less(t, actor, now)
    elif what == READ:
        t.ways[i].read += 1
        peer = t.ways[i].end
        if t.actors[peer].left > 0 and t.ways[i].read == t.actors[peer].posts:
            less(t, peer, now)
    elif what == BACK:
        back(t, i, now)
        return i
    elif what == GONE:
        gone(t, i, now)
    elif what == FALLS:
        falls(t, i, now)
    elif what == LEAVES:
        leave(t, i)
    elif what == UPDATES:
        t.counts[RESUMED] = t.counts[MEETING]
        t.counts[MEETING] = -1
        for other in range(t.actors.size - 1 if t.counts[INVITED] > 0 else -1, -1, -1):
            if t.actors[other].invited == 1:
                t.actors[other].invited = 0
                t.actors[other].next = t.counts[RESUMED]
                t.counts[RESUMED] = other
        t.counts[INVITED] = 0
    else:  # THROUGH
        return proceed(t, i, now)
    return -1


def _entry_point(stamp: int) -> Any:
    """Return what Python calls; `stamp` stands for the sources of all that is inlined here."""

    @entry
    def go_round(  # type: ignore[no-untyped-def]
        table: Ints, limit, counts, reals, ops, seconds, actors, ways, servers, arrivals, posted, factors, choices,
        slow, devices, contention, crashes, calendar, sends, log, pauses,
    ):  # fmt: skip
        """Let actors go round up to and including `limit` (s), or until Python must do something; return what."""
        stamp  # noqa: B018
        t = Tables(
            column(counts), column(reals), column(ops), column(seconds), column(actors), column(ways), column(servers),
            column(arrivals), column(posted), column(factors), column(choices), column(slow), column(devices),
            column(contention), column(crashes), column(calendar), column(sends), column(log), pauses,
        )  # fmt: skip
        counts, reals, ops, actors, ways = t.counts, t.reals, t.ops, t.actors, t.ways
        devices, calendar, sends, log = t.devices, t.calendar, t.sends, t.log
        net = attach(table)
        while counts[N_WOKEN] > 0:
            counts[N_WOKEN] -= 1
            push(counts, calendar, calendar[counts[N_CALENDAR]].time, calendar[counts[N_CALENDAR]].item)
        if counts[ENDING] == 1:
            counts[ENDING] = 0
            come(t, reals[NOW], END, 0)
        while True:
            now = reals[NOW]
            reals[OPENS] = earliest(pauses, now)
            logged = counts[N_LOGGED]
            left = counts[UPDATES_LEFT]
            actor = counts[PENDING]
            if counts[ASKING] >= 0:
                answer(t)
            if actor < 0 and log.size - logged < ops.size + 2:
                return LOGGED
            if actor < 0 and counts[RESUMED] >= 0:
                actor = counts[RESUMED]
                counts[RESUMED] = actors[actor].next
                proceed(t, actor, now)
            elif actor < 0:
                while counts[N_STALE] > 0 and stale(
                    actors, calendar[0].item, calendar[0].sequence, WORK_ENDS, N_EVENTS
                ):
                    pop(counts, calendar)
                    counts[N_STALE] -= 1
                after = calendar[0].time if counts[N_CALENDAR] > 0 else np.inf
                if after > now:
                    for i in range(counts[N_SENDS]):
                        way = sends[i] >> 1
                        back = sends[i] & 1
                        nbytes = ways[way].back_nbytes if back == 1 else ways[way].nbytes
                        source = ways[way].target if back == 1 else ways[way].source
                        target = ways[way].source if back == 1 else ways[way].target
                        route = ways[way].back_route if back == 1 else ways[way].route
                        handle = counts[FIRST_HANDLE] + counts[N_SENT] * (2 * ways.size + 1) + sends[i]
                        counts[N_SENT] += 1
                        reals[NBYTES], reals[NBYTES + 1] = two_sum(reals[NBYTES], reals[NBYTES + 1], nbytes)
                        call_send(counts[SEND], table, handle, source, target, route, nbytes, now)
                        reals[QUIET] = -np.inf
                        if devices.size > 0:
                            carry(t, way, 1, now)
                    n = counts[N_SENDS]
                    counts[N_SENDS] = 0
                    if devices.size > 0 and n > 0:
                        continue  # what comes next may come later
                if after > reals[QUIET]:
                    status = call_advance(counts[ADVANCE], table, min(after, limit))
                    if status == NETWORK_FULL:
                        return FULL
                    if status == FOREIGN:
                        return OTHERS
                    if status != IDLE:
                        n = net.counts[N_OUT]
                        net.counts[N_OUT] = 0
                        sort(net.out, n)
                        time = net.reals[NETWORK_NOW]
                        counts[N_TAKEN] += n
                        for i in range(n):
                            message = ((-1 - net.out[i].id) & LOCAL) % (2 * ways.size + 1)
                            if message == 2 * ways.size:
                                net.out[counts[N_ELSEWHERE]].id = net.out[i].id
                                net.out[counts[N_ELSEWHERE]].rank = net.out[i].rank
                                counts[N_ELSEWHERE] += 1
                            else:
                                come(t, time, ANSWERED if message & 1 == 1 else ARRIVES, message >> 1)
                        if counts[N_ELSEWHERE] > 0:
                            reals[WHEN] = time
                            return ELSEWHERE
                        continue
                    reals[QUIET] = after
                if after > limit:
                    return LIMIT
                if after == np.inf:
                    return STUCK
                reals[NOW] = after
                reals[OPENS] = earliest(pauses, after)
                now = after
                item = pop(counts, calendar)
                if item % N_EVENTS == END:
                    return OVER
                actor = happen(t, item, now)
            counts[PENDING] = -1
            if actor >= 0:
                status = go_on(t, actor, now)
                if status != GOING:
                    return status
            if left > 0 and counts[UPDATES_LEFT] == 0 and counts[RETURNS] == 1:
                return UPDATED
            if counts[ASKS] == 1 and counts[N_LOGGED] > logged and log[counts[N_LOGGED] - 1].what == SERVED:
                return ASKED

    return go_round


go_round = _entry_point(network_stamp())
