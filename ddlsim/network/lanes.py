"""Actors that go round in cycles of their own, and the servers and peers that they send to: compiled.

An *actor* does its operations one after the other, over and over: work that takes its seconds times a factor drawn for
the step, an exchange with all servers, letters to its peers. A *server* serves one request at a time, first come first
served. A *way* leads from an actor to a server, which answers on it, or to a peer; no message goes on it before the one
before has arrived.

What happens at one instant happens in the order of its events, each of which comes behind those that are there, and
what is sent at an instant is handed to the network when nothing is left of it, in order: as if actors, requests and
waits were processes of an event loop. :func:`go_round` returns to Python where that must do something (the values of
its status); what it has done is written into a log.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddlsim.compiler import entry, inlined
from ddlsim.network.compiled import source_stamp
from ddlsim.network.pointers import call_advance, call_send
from ddlsim.network.state import FULL as NETWORK_FULL
from ddlsim.network.state import IDLE, N_OUT, Floats, Ints, Records, record
from ddlsim.network.state import NOW as NETWORK_NOW
from ddlsim.network.tasks import N_CALENDAR, pop, push, slowed, sort
from ddlsim.network.view import attach

# Kinds of operations
WORK = 0  # takes its seconds times the factor
OWED = 1  # work that somebody has asked for, with the factor of the step before
DRAW = 2  # takes the next factor
EXCHANGE = 3  # sends to all servers and waits for their answers
POST = 4  # sends to all peers
AWAIT = 5  # waits until what it has posted has arrived, and the letters of this round have come from all peers
NOTE = 6  # is written down
ASK = 7  # is written down, and Python is asked before it goes on
STEP = 8  # is written down: a step of the actor has ended

# What `go_round` returns
OVER = 0  # the instant has come at which the run ends
LIMIT = 1  # nothing more happens up to the limit
STUCK = 2  # nothing is left to happen
FULL = 3  # arrays of the network must be made longer
LOGGED = 4  # the log must be read
REFILL = 5  # the actor PENDING needs factors
ASKED = 6  # an operation, or a server, asks
UPDATED = 7  # as many updates have been made as should be
GOING = 8  # (nothing)

# What a row of the log tells, besides the number of a NOTE, ASK or STEP
SERVED, WORKED, WAITED = -1, -2, -3

# Places in `counts` (int64), behind N_CALENDAR, N_WOKEN and SEQUENCE of :mod:`ddlsim.network.tasks`
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
N_COUNTS = 17

# Places in `reals` (float64)
NOW = 0
QUIET = 1  # the network is known to complete nothing before
NBYTES = 2  # sent
N_REALS = 3

BLOCK = 64  # factors of an actor that are drawn ahead

# What happens (EVENT.item & 15; the rest is the number of an actor, a way or a server)
START, WORK_ENDS, ARRIVES, GRANTED, SERVICE_ENDS, RELEASED, ANSWERED, RETURNED, READ, THROUGH, END = range(11)

OP = record(kind="n")
#: start: s, of what it does; factor: of its step; owed: s; queued: s, in the longest queue of its exchange; compute,
#: communication, waiting: s in all; op: what it does; left: what it waits for, -1 if it does not; cursor: of its
#: factors; posts: rounds of letters; steps: that have ended; slow: where `slow` begins for it, -1 if nowhere; its ways
#: are first:last, those that lead to it arrivals[first_in:last_in]
ACTOR = record(
    start="f", factor="f", owed="f", queued="f", compute="f", communication="f", waiting="f", op="n", left="n",
    cursor="n", posts="n", steps="n", slow="n", first="n", last="n", first_in="n", last_in="n",
)  # fmt: skip
#: nbytes, route, source, target: of the message there, and of the answer (back_); arrived, begin: s, of the request;
#: version: of the server when it answered last; read: letters that have come; under_way: 1 if the sender waits for one;
#: end: the server or peer that it leads to; next: the way behind it in the server's queue
WAY = record(
    nbytes="f", back_nbytes="f", arrived="f", begin="f", version="i", read="i", actor="n", end="n", next="n",
    under_way="n", route="n", back_route="n", source="n", target="n",
)  # fmt: skip
#: seconds: of a service; version: services so far; the queue goes from head to tail, -1 if it is empty; busy: 1 if it
#: serves somebody
SERVER = record(seconds="f", version="i", head="n", tail="n", busy="n")
#: time: s; begin: s, of work and services; where: waiting ended, between the two; what: above; place: the way or
#: operation; staleness: of what a server applies; whole: 1 if that makes an update, or a step does
ROW = record(time="f", begin="f", where="f", what="n", actor="n", place="n", whole="n", staleness="i")


class Tables(NamedTuple):
    """What :func:`go_round` works on; Python makes all of it."""

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
    slow: Records  # SLOW
    calendar: Records  # EVENT, a heap
    sends: Ints  # 2 * way, + 1 for its answer
    log: Records  # ROW


@inlined
def come(t: Tables, time, what, number):  # type: ignore[no-untyped-def]
    """Let something happen at `time`, behind all that is there."""
    push(t.counts, t.calendar, time, what + 16 * number)


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
    """Send a message when nothing is left of the instant."""
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
def next_op(t: Tables, actor):  # type: ignore[no-untyped-def]
    """Let an actor be through with what it does."""
    op = t.actors[actor].op + 1
    t.actors[actor].op = op if op < t.ops.size else 0


@inlined
def go_on(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor do what comes next, up to what takes time (GOING), or return what Python must do before."""
    n_ops = t.ops.size
    while True:
        op = t.actors[actor].op
        kind = t.ops[op].kind
        stops = False
        if kind in (WORK, OWED):
            seconds = t.seconds[actor * n_ops + op]
            if kind == OWED:
                seconds = t.actors[actor].owed
                t.actors[actor].owed = 0.0
            seconds *= t.actors[actor].factor
            if seconds > 0.0:
                t.actors[actor].start = now
                if t.actors[actor].slow >= 0:
                    seconds = slowed(t.slow, t.actors[actor].slow, now, seconds)
                come(t, now + seconds, WORK_ENDS, actor)
                return GOING
        elif kind == DRAW:
            cursor = t.actors[actor].cursor
            if cursor == BLOCK:
                t.counts[PENDING] = actor
                return REFILL
            t.actors[actor].factor = t.factors[actor * BLOCK + cursor]
            t.actors[actor].cursor = cursor + 1
        elif kind == EXCHANGE:
            t.actors[actor].start = now
            t.actors[actor].queued = 0.0
            t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
            for way in range(t.actors[actor].first, t.actors[actor].last):
                t.ways[way].under_way = 1
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
        else:
            row = write(t, op, actor, op, now, now, now)
            if kind == STEP:
                steps = t.actors[actor].steps
                t.actors[actor].steps = steps + 1
                if steps == t.counts[SLOWEST]:
                    t.counts[BEHIND] -= 1
                    if t.counts[BEHIND] == 0:
                        t.counts[SLOWEST] = steps + 1
                        for other in range(t.actors.size):
                            t.counts[BEHIND] += 1 if t.actors[other].steps == steps + 1 else 0
                        if t.servers.size == 0:
                            stops = updated(t, row, now)
        next_op(t, actor)
        if kind == ASK or stops:
            t.counts[PENDING] = actor
            return UPDATED if stops else ASKED


@inlined
def less(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Something that an actor waits for has come."""
    left = t.actors[actor].left - 1
    t.actors[actor].left = left
    if left == 0:
        come(t, now, THROUGH, actor)


@inlined
def grant(t: Tables, server, now):  # type: ignore[no-untyped-def]
    """Let a server that is free turn to the first in its queue."""
    way = t.servers[server].head
    if way >= 0 and t.servers[server].busy == 0:
        t.servers[server].head = t.ways[way].next
        t.servers[server].busy = 1
        come(t, now, GRANTED, way)


@inlined
def served(t: Tables, way, now):  # type: ignore[no-untyped-def]
    """A server has served a request: it answers, and is free."""
    actor = t.ways[way].actor
    server = t.ways[way].end
    row = write(t, SERVED, actor, way, t.ways[way].begin, now, now)
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
    start = t.actors[actor].start
    ready = start + t.actors[actor].queued
    if t.servers.size == 0:
        ready = start
        for i in range(t.actors[actor].first_in, t.actors[actor].last_in):
            letter = (t.actors[actor].posts - 1) % t.counts[DEPTH]
            ready = max(ready, t.posted[t.arrivals[i] * t.counts[DEPTH] + letter])
    ready = min(max(ready, start), now)
    t.actors[actor].left = -1
    t.actors[actor].waiting += ready - start
    t.actors[actor].communication += now - ready
    if t.counts[SPANS] == 1:
        write(t, WAITED, actor, t.actors[actor].op, start, ready, now)


@inlined
def happen(t: Tables, item, now):  # type: ignore[no-untyped-def]
    """Let an event happen; return the actor that goes on then, -1 if none does."""
    what = item & 15
    i = item >> 4
    if what == START:
        return i
    if what == WORK_ENDS:
        t.actors[i].compute += now - t.actors[i].start
        if t.counts[SPANS] == 1:
            write(t, WORKED, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what == ARRIVES:
        server = t.ways[i].end
        if t.servers.size == 0:  # the letter is read, and its sender hears of it
            come(t, now, READ, i)
            come(t, now, RETURNED, i)
            return -1
        t.ways[i].arrived = now
        t.ways[i].next = -1
        if t.servers[server].head < 0:
            t.servers[server].head = i
        else:
            t.ways[t.servers[server].tail].next = i
        t.servers[server].tail = i
        grant(t, server, now)
    elif what == GRANTED:
        actor = t.ways[i].actor
        t.ways[i].begin = now
        t.actors[actor].queued = max(t.actors[actor].queued, now - t.ways[i].arrived)
        seconds = t.servers[t.ways[i].end].seconds
        if seconds > 0.0:
            come(t, now + seconds, SERVICE_ENDS, i)
        else:
            served(t, i, now)
    elif what == SERVICE_ENDS:
        served(t, i, now)
    elif what == RELEASED:
        grant(t, i, now)
    elif what == ANSWERED:
        come(t, now, RETURNED, i)
    elif what == RETURNED:
        actor = t.ways[i].actor
        t.ways[i].under_way = 0
        if t.actors[actor].left > 0:
            less(t, actor, now)
    elif what == READ:
        t.ways[i].read += 1
        peer = t.ways[i].end
        if t.actors[peer].left > 0 and t.ways[i].read == t.actors[peer].posts:
            less(t, peer, now)
    else:  # THROUGH
        through(t, i, now)
        next_op(t, i)
        return i
    return -1


def _entry_point(stamp: int) -> Any:
    """Return what Python calls; `stamp` stands for the sources of all that is inlined here."""

    @entry
    def go_round(  # type: ignore[no-untyped-def]
        table: Ints, limit, counts, reals, ops, seconds, actors, ways, servers, arrivals, posted, factors, slow,
        calendar, sends, log,
    ):  # fmt: skip
        """Let actors go round up to and including `limit` (s), or until Python must do something; return what."""
        stamp  # noqa: B018
        t = Tables(
            counts, reals, ops, seconds, actors, ways, servers, arrivals, posted, factors, slow, calendar, sends, log,
        )  # fmt: skip
        net = attach(table)
        if counts[ENDING] == 1:
            counts[ENDING] = 0
            come(t, reals[NOW], END, 0)
        while True:
            now = reals[NOW]
            logged = counts[N_LOGGED]
            left = counts[UPDATES_LEFT]
            actor = counts[PENDING]
            if actor < 0:
                if log.size - logged < ops.size + 2:
                    return LOGGED
                after = calendar[0].time if counts[N_CALENDAR] > 0 else np.inf
                if after > now:
                    for i in range(counts[N_SENDS]):
                        way = sends[i] >> 1
                        back = sends[i] & 1
                        nbytes = ways[way].back_nbytes if back == 1 else ways[way].nbytes
                        source = ways[way].target if back == 1 else ways[way].source
                        target = ways[way].source if back == 1 else ways[way].target
                        route = ways[way].back_route if back == 1 else ways[way].route
                        handle = counts[N_SENT] * 2 * ways.size + sends[i]
                        counts[N_SENT] += 1
                        reals[NBYTES] += nbytes
                        call_send(counts[SEND], table, handle, source, target, route, nbytes, now)
                        reals[QUIET] = -np.inf
                    counts[N_SENDS] = 0
                if after > reals[QUIET]:
                    status = call_advance(counts[ADVANCE], table, min(after, limit))
                    if status == NETWORK_FULL:
                        return FULL
                    if status != IDLE:
                        n = net.counts[N_OUT]
                        net.counts[N_OUT] = 0
                        sort(net.out, n)
                        time = net.reals[NETWORK_NOW]
                        for i in range(n):
                            message = (-1 - net.out[i].id) % (2 * ways.size)
                            come(t, time, ANSWERED if message & 1 == 1 else ARRIVES, message >> 1)
                        continue
                    reals[QUIET] = after
                if after > limit:
                    return LIMIT
                if after == np.inf:
                    return STUCK
                reals[NOW] = after
                now = after
                item = pop(counts, calendar)
                if item & 15 == END:
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


go_round = _entry_point(source_stamp())
