"""Actors that go round in cycles of their own, and the servers and peers that they send to: compiled.

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

from typing import Any

import numpy as np

from ddlsim.compiler import entry, inlined
from ddlsim.network import lane_tables as lt
from ddlsim.network.calendar import N_CALENDAR, pop, push
from ddlsim.network.compiled import source_stamp
from ddlsim.network.lane_actors import (
    back,
    come,
    communicated,
    falls,
    go_on,
    gone,
    grant,
    is_lost,
    leave,
    next_op,
    request,
    updated,
    worked,
    write,
)
from ddlsim.network.pauses import earliest
from ddlsim.network.pointers import call_advance, call_send
from ddlsim.network.state import FOREIGN, IDLE, LOCAL, N_OUT, Ints
from ddlsim.network.state import FULL as NETWORK_FULL
from ddlsim.network.state import NOW as NETWORK_NOW
from ddlsim.network.sums import two_sum
from ddlsim.network.tasks import N_WOKEN, sort
from ddlsim.network.view import attach


@inlined
def less(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Something that an actor waits for has come."""
    left = t.actors[actor].left - 1
    t.actors[actor].left = left
    if left == 0:
        come(t, now, lt.THROUGH, actor)


@inlined
def served(t: lt.Tables, way, now):  # type: ignore[no-untyped-def]
    """A server has served a request: it answers, and is free."""
    actor = t.ways[way].actor
    server = t.ways[way].end
    if t.ways[way].lost_service > 0:
        t.ways[way].lost_service = 0
        t.servers[server].busy = 0
        come(t, now, lt.RELEASED, server)
        return
    t.ways[way].stage = lt.ANSWERING_IT
    row = write(t, lt.SERVED, actor, server, t.ways[way].begin, now, now)
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
    come(t, now, lt.RELEASED, server)
    leave(t, 2 * way + 1)


@inlined
def through(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """What an actor has waited for has come: for others first, then for bytes."""
    kind = t.ops[t.actors[actor].op].kind
    start = t.actors[actor].start
    ready = start
    if kind in (lt.TURN, lt.MEET, lt.CLOCK):
        ready = now
    elif kind == lt.EXCHANGE:
        ready = start + t.actors[actor].queued
    elif kind == lt.AWAIT:
        for i in range(t.actors[actor].first_in, t.actors[actor].last_in):
            letter = (t.actors[actor].posts - 1) % t.counts[lt.DEPTH]
            ready = max(ready, t.posted[t.arrivals[i] * t.counts[lt.DEPTH] + letter])
    ready = min(max(ready, start), now)
    t.actors[actor].left = -1
    t.actors[actor].waiting += ready - start
    communicated(t, actor, ready, now)
    if t.counts[lt.SPANS] == 1:
        write(t, lt.WAITED, actor, t.actors[actor].op, start, ready, now)


@inlined
def proceed(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor be through with waiting, and return it."""
    through(t, actor, now)
    next_op(t, actor)
    return actor


@inlined
def one_arrives(t: lt.Tables, way, what, now):  # type: ignore[no-untyped-def]
    """What an actor has sent to a peer has arrived there, or its answer here."""
    actor = t.ways[way].actor
    if what == lt.ARRIVES:
        if t.counts[lt.RETURNS] == 1:
            write(t, lt.SERVED, actor, t.ways[way].end, now, now, now)
        if t.counts[lt.MANNER] == lt.ANSWERING:
            t.counts[lt.ASKING] = way
            return
    if t.counts[lt.SPANS] == 1:
        write(t, lt.DELIVERED, actor, t.ways[way].end, t.ways[way].begin, now, now)
    come(t, now, lt.RETURNED, way)


@inlined
def answer(t: lt.Tables, now):  # type: ignore[no-untyped-def]
    """Let a peer answer what has just arrived, which Python has been told of."""
    way = t.counts[lt.ASKING]
    t.counts[lt.ASKING] = -1
    begin = earliest(t.pauses, now)
    if t.ways[way].seconds > 0.0 or begin > now:
        come(t, begin + t.ways[way].seconds, lt.SERVICE_ENDS, way)
    else:
        leave(t, 2 * way + 1)


@inlined
def happen(t: lt.Tables, item, now):  # type: ignore[no-untyped-def]
    """Let an event happen; return the actor that goes on then, -1 if none does."""
    what = item % lt.N_EVENTS
    i = item // lt.N_EVENTS
    manner = t.counts[lt.MANNER]
    if what == lt.START:
        return i
    if what == lt.WORK_ENDS:
        worked(t, i, t.actors[i].start, now)
        if t.counts[lt.SPANS] == 1:
            write(t, lt.WORKED, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what == lt.FED:
        t.actors[i].input += now - t.actors[i].start
        if t.counts[lt.SPANS] == 1:
            write(t, lt.BROUGHT, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what in (lt.ARRIVES, lt.ANSWERED) and is_lost(t, i, what):
        return -1
    if what in (lt.ARRIVES, lt.ANSWERED) and manner == lt.TOGETHER:
        t.ways[i].stage = lt.NOWHERE
        less(t, t.ways[i].actor, now)
    elif what in (lt.ARRIVES, lt.ANSWERED) and manner >= lt.ANSWERING:
        one_arrives(t, i, what, now)
    elif what == lt.ARRIVES and t.servers.size > 0:
        request(t, i, now)
    elif what == lt.ARRIVES:  # the letter is read, and its sender hears of it
        come(t, now, lt.READ, i)
        come(t, now, lt.RETURNED, i)
    elif what == lt.GRANTED:
        actor = t.ways[i].actor
        if manner == lt.TOGETHER:
            return proceed(t, actor, now)
        begin = earliest(t.pauses, now)
        t.ways[i].begin = now
        t.actors[actor].queued = max(t.actors[actor].queued, begin - t.ways[i].arrived)
        seconds = t.servers[t.ways[i].end].seconds
        if seconds > 0.0 or begin > now:
            come(t, begin + seconds, lt.SERVICE_ENDS, i)
        else:
            served(t, i, now)
    elif what == lt.SERVICE_ENDS and manner == lt.ANSWERING:
        leave(t, 2 * i + 1)
    elif what == lt.SERVICE_ENDS:
        served(t, i, now)
    elif what == lt.RELEASED:
        grant(t, i, now)
    elif what == lt.ANSWERED:
        t.ways[i].stage = lt.NOWHERE
        come(t, now, lt.RETURNED, i)
    elif what == lt.RETURNED:
        actor = t.ways[i].actor
        t.ways[i].under_way = 0
        if t.actors[actor].left > 0 and manner >= lt.ANSWERING:
            return proceed(t, actor, now)
        if t.actors[actor].left > 0:
            less(t, actor, now)
    elif what == lt.READ:
        t.ways[i].read += 1
        peer = t.ways[i].end
        if t.actors[peer].left > 0 and t.ways[i].read == t.actors[peer].posts:
            less(t, peer, now)
    elif what == lt.BACK:
        back(t, i, now)
        return i
    elif what == lt.GONE:
        gone(t, i, now)
    elif what == lt.FALLS:
        falls(t, i, now)
    elif what == lt.LEAVES:
        leave(t, i)
    elif what == lt.UPDATES:
        t.counts[lt.RESUMED] = t.counts[lt.MEETING]
        t.counts[lt.MEETING] = -1
    else:  # THROUGH
        return proceed(t, i, now)
    return -1


def _entry_point(stamp: int) -> Any:
    """Return what Python calls; `stamp` stands for the sources of all that is inlined here."""

    @entry
    def go_round(  # type: ignore[no-untyped-def]
        table: Ints, limit, counts, reals, ops, seconds, actors, ways, servers, arrivals, posted, factors, choices,
        slow, crashes, calendar, sends, log, pauses,
    ):  # fmt: skip
        """Let actors go round up to and including `limit` (s), or until Python must do something; return what."""
        stamp  # noqa: B018
        t = lt.Tables(
            counts, reals, ops, seconds, actors, ways, servers, arrivals, posted, factors, choices, slow, crashes,
            calendar, sends, log, pauses,
        )  # fmt: skip
        net = attach(table)
        while counts[N_WOKEN] > 0:
            counts[N_WOKEN] -= 1
            push(counts, calendar, calendar[counts[N_CALENDAR]].time, calendar[counts[N_CALENDAR]].item)
        if counts[lt.ENDING] == 1:
            counts[lt.ENDING] = 0
            come(t, reals[lt.NOW], lt.END, 0)
        while True:
            now = reals[lt.NOW]
            logged = counts[lt.N_LOGGED]
            left = counts[lt.UPDATES_LEFT]
            actor = counts[lt.PENDING]
            if counts[lt.ASKING] >= 0:
                answer(t, now)
            if actor < 0 and log.size - logged < ops.size + 2:
                return lt.LOGGED
            if actor < 0 and counts[lt.RESUMED] >= 0:
                actor = counts[lt.RESUMED]
                counts[lt.RESUMED] = actors[actor].next
                proceed(t, actor, now)
            elif actor < 0:
                after = calendar[0].time if counts[N_CALENDAR] > 0 else np.inf
                if after > now:
                    for i in range(counts[lt.N_SENDS]):
                        way = sends[i] >> 1
                        back = sends[i] & 1
                        nbytes = ways[way].back_nbytes if back == 1 else ways[way].nbytes
                        source = ways[way].target if back == 1 else ways[way].source
                        target = ways[way].source if back == 1 else ways[way].target
                        route = ways[way].back_route if back == 1 else ways[way].route
                        handle = counts[lt.FIRST_HANDLE] + counts[lt.N_SENT] * (2 * ways.size + 1) + sends[i]
                        counts[lt.N_SENT] += 1
                        reals[lt.NBYTES], reals[lt.NBYTES + 1] = two_sum(reals[lt.NBYTES], reals[lt.NBYTES + 1], nbytes)
                        call_send(counts[lt.SEND], table, handle, source, target, route, nbytes, now)
                        reals[lt.QUIET] = -np.inf
                    counts[lt.N_SENDS] = 0
                if after > reals[lt.QUIET]:
                    status = call_advance(counts[lt.ADVANCE], table, min(after, limit))
                    if status == NETWORK_FULL:
                        return lt.FULL
                    if status == FOREIGN:
                        return lt.OTHERS
                    if status != IDLE:
                        n = net.counts[N_OUT]
                        net.counts[N_OUT] = 0
                        sort(net.out, n)
                        time = net.reals[NETWORK_NOW]
                        counts[lt.N_TAKEN] += n
                        for i in range(n):
                            message = ((-1 - net.out[i].id) & LOCAL) % (2 * ways.size + 1)
                            if message == 2 * ways.size:
                                net.out[counts[lt.N_ELSEWHERE]].id = net.out[i].id
                                net.out[counts[lt.N_ELSEWHERE]].rank = net.out[i].rank
                                counts[lt.N_ELSEWHERE] += 1
                            else:
                                come(t, time, lt.ANSWERED if message & 1 == 1 else lt.ARRIVES, message >> 1)
                        if counts[lt.N_ELSEWHERE] > 0:
                            reals[lt.WHEN] = time
                            return lt.ELSEWHERE
                        continue
                    reals[lt.QUIET] = after
                if after > limit:
                    return lt.LIMIT
                if after == np.inf:
                    return lt.STUCK
                reals[lt.NOW] = after
                now = after
                item = pop(counts, calendar)
                if item % lt.N_EVENTS == lt.END:
                    return lt.OVER
                actor = happen(t, item, now)
            counts[lt.PENDING] = -1
            if actor >= 0:
                status = go_on(t, actor, now)
                if status != lt.GOING:
                    return status
            if left > 0 and counts[lt.UPDATES_LEFT] == 0 and counts[lt.RETURNS] == 1:
                return lt.UPDATED
            if counts[lt.ASKS] == 1 and counts[lt.N_LOGGED] > logged and log[counts[lt.N_LOGGED] - 1].what == lt.SERVED:
                return lt.ASKED

    return go_round


go_round = _entry_point(source_stamp())
