"""What actors do, one operation after the other, and how they ask servers: compiled (:mod:`ddlsim.network.lanes`)."""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network import lane_tables as lt
from ddlsim.network.calendar import push
from ddlsim.network.devices import slowed, stood_still
from ddlsim.network.pauses import earliest, paused

ON = -1  # an actor goes on to its next operation


@inlined
def come(t: lt.Tables, time, what, number):  # type: ignore[no-untyped-def]
    """Let something happen at `time`, behind all that is there."""
    push(t.counts, t.calendar, time, what + lt.N_EVENTS * number)


@inlined
def write(t: lt.Tables, what, actor, place, begin, where, now):  # type: ignore[no-untyped-def]
    """Write a row of the log; return its number."""
    i = t.counts[lt.N_LOGGED]
    t.counts[lt.N_LOGGED] = i + 1
    t.log[i].time = now
    t.log[i].begin = begin
    t.log[i].where = where
    t.log[i].what = what
    t.log[i].actor = actor
    t.log[i].place = place
    t.log[i].whole = 0
    return i


@inlined
def leave(t: lt.Tables, message):  # type: ignore[no-untyped-def]
    """Send a message when nothing is left of the instant, or of a pause."""
    start = earliest(t.pauses, t.reals[lt.NOW])
    if start > t.reals[lt.NOW]:
        come(t, start, lt.LEAVES, message)
        return
    t.sends[t.counts[lt.N_SENDS]] = message
    t.counts[lt.N_SENDS] += 1


@inlined
def updated(t: lt.Tables, row, now):  # type: ignore[no-untyped-def]
    """Count an update that a row of the log has made; return whether Python must be told."""
    if t.counts[lt.UPDATES_LEFT] == 0:
        return False
    t.log[row].whole = 1
    t.counts[lt.UPDATES_LEFT] -= 1
    if t.counts[lt.UPDATES_LEFT] > 0:
        return False
    if t.counts[lt.RETURNS] == 0:
        come(t, now, lt.END, 0)
    return t.counts[lt.RETURNS] == 1


@inlined
def next_crash(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Return the place of the crash that an actor is in, or comes to next."""
    i: int = t.actors[actor].crash
    while t.crashes[i].end <= now:
        i += 1
    t.actors[actor].crash = i
    return i


@inlined
def is_down(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Whether an actor has crashed and is not back."""
    if t.actors[actor].crash < 0:
        return False
    i: int = next_crash(t, actor, now)
    return t.crashes[i].start <= now


@inlined
def is_gone(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Whether an actor has crashed and never comes back."""
    return is_down(t, actor, now) and t.crashes[t.actors[actor].crash].end == np.inf


@inlined
def worked(t: lt.Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Count what an actor has computed, who was ready at `begin`; while its process stands still, its device is
    idle."""
    ready = begin
    begin = min(earliest(t.pauses, ready), end)
    t.actors[actor].waiting += begin - ready
    still = stood_still(t.slow, t.actors[actor].slow, begin, end) if t.actors[actor].slow >= 0 else 0.0
    t.actors[actor].compute += end - begin - still
    t.actors[actor].idle += still


@inlined
def communicated(t: lt.Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Count the time in which an actor has waited for bytes: in a pause, it waits for its end."""
    waited = paused(t.pauses, begin, end)
    t.actors[actor].waiting += waited
    t.actors[actor].communication += end - begin - waited


@inlined
def work(t: lt.Tables, actor, op, seconds, now):  # type: ignore[no-untyped-def]
    """Let an actor work, as long as it does not crash: that undoes a gradient, which it begins anew when it is back, or
    lets it stand still."""
    t.actors[actor].start = now
    now = earliest(t.pauses, now)
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
                come(t, t.crashes[i].end, lt.BACK, actor)
            return
        begin = now
        while t.crashes[i].start < now + seconds:
            seconds += t.crashes[i].end - max(t.crashes[i].start, begin)
            begin = t.crashes[i].end
            i += 1
    if seconds < np.inf:
        come(t, now + seconds, lt.WORK_ENDS, actor)


@inlined
def back(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor is back after a crash that has undone its work: it takes the model that there is, and begins anew."""
    op = t.actors[actor].op
    write(t, lt.LOST, actor, op, t.actors[actor].start, t.actors[actor].fell, now)
    t.actors[actor].idle += now - t.actors[actor].fell
    t.actors[actor].down = 0
    t.actors[actor].start = now
    t.actors[actor].op = t.ops[op].redo if t.ops[op].redo >= 0 else t.counts[lt.FIRST_OP]
    if t.servers.size > 0:
        t.actors[actor].version = t.servers[0].version
        for way in range(t.actors[actor].first, t.actors[actor].last):
            t.ways[way].version = t.servers[t.ways[way].end].version


@inlined
def wait_until_back(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor that has crashed begin anew when it is back."""
    t.actors[actor].down = 1
    t.actors[actor].fell = now
    t.actors[actor].left = -1
    i: int = next_crash(t, actor, now)
    if t.crashes[i].end < np.inf:
        come(t, t.crashes[i].end, lt.BACK, actor)


@inlined
def falls(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor crashes: what it has sent to servers, and what they answer, is lost with it."""
    i: int = next_crash(t, actor, now)
    after: int = i + 1 if t.crashes[i].start <= now else i
    if t.crashes[after].start < np.inf:
        come(t, t.crashes[after].start, lt.FALLS, actor)
    kind = t.ops[t.actors[actor].op].kind
    if after == i or t.actors[actor].left <= 0 or kind not in (lt.EXCHANGE, lt.TRAVEL):
        return
    for way in range(t.actors[actor].first, t.actors[actor].last):
        stage = t.ways[way].stage
        if stage in (lt.GOING_THERE, lt.QUEUED, lt.IN_SERVICE):
            t.actors[actor].lost += t.actors[actor].start - t.actors[actor].begun
            t.actors[actor].begun = t.actors[actor].start  # once, though several are lost
        t.ways[way].lost_message += stage == lt.GOING_THERE
        t.ways[way].lost_service += stage == lt.IN_SERVICE
        t.ways[way].lost_answer += stage == lt.ANSWERING_IT
        if stage == lt.QUEUED:
            leave_queue(t, way)
        t.ways[way].stage = lt.NOWHERE
        t.ways[way].under_way = 0
    communicated(t, actor, t.actors[actor].start, now)
    wait_until_back(t, actor, now)


@inlined
def leave_queue(t: lt.Tables, way):  # type: ignore[no-untyped-def]
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
def is_lost(t: lt.Tables, way, what):  # type: ignore[no-untyped-def]
    """Whether a message that arrives, or its answer, is of an actor that has crashed since."""
    lost: bool = t.ways[way].lost_message > 0 if what == lt.ARRIVES else t.ways[way].lost_answer > 0
    if lost and what == lt.ARRIVES:
        t.ways[way].lost_message -= 1
    elif lost:
        t.ways[way].lost_answer -= 1
    return lost


@inlined
def grant(t: lt.Tables, server, now):  # type: ignore[no-untyped-def]
    """Let a server that is free turn to the first in its queue."""
    way = t.servers[server].head
    if way >= 0 and t.servers[server].busy == 0:
        t.servers[server].head = t.ways[way].next
        t.servers[server].busy = 1
        t.ways[way].stage = lt.IN_SERVICE
        come(t, now, lt.GRANTED, way)


@inlined
def request(t: lt.Tables, way, now):  # type: ignore[no-untyped-def]
    """Let a request queue at the server to which a way leads."""
    server = t.ways[way].end
    t.ways[way].arrived = now
    t.ways[way].stage = lt.QUEUED
    t.ways[way].next = -1
    if t.servers[server].head < 0:
        t.servers[server].head = way
    else:
        t.ways[t.servers[server].tail].next = way
    t.servers[server].tail = way
    grant(t, server, now)


@inlined
def append(t: lt.Tables, first, last, actor):  # type: ignore[no-untyped-def]
    """Put an actor at the end of a list, whose ends are in the places `first` and `last` of the counts."""
    t.actors[actor].next = -1
    if t.counts[first] < 0:
        t.counts[first] = actor
    else:
        t.actors[t.counts[last]].next = actor
    t.counts[last] = actor


@inlined
def rest(t: lt.Tables, actor, seconds, now):  # type: ignore[no-untyped-def]
    """Let an actor wait for some seconds, if there are any."""
    if seconds <= 0.0:
        return ON
    t.actors[actor].start = now
    come(t, earliest(t.pauses, now) + seconds, lt.THROUGH, actor)
    return lt.GOING


@inlined
def gather(t: lt.Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let servers that act together add what an actor has sent; the last one of an update waits for it."""
    staleness = t.servers[0].version - t.actors[actor].version
    t.actors[actor].part = lt.DROPPED
    if t.ops[op].kind == lt.GATHER_NEW and staleness > 0:
        return ON
    row = write(t, lt.SERVED, actor, 0, now, now, now)
    t.log[row].staleness = staleness  # type: ignore[attr-defined]  # mypy knows no fields
    t.actors[actor].part = lt.ADDED
    t.counts[lt.GATHERED] += 1
    if t.counts[lt.GATHERED] < t.ops[op].number:
        return ON
    t.counts[lt.GATHERED] = 0
    t.actors[actor].part = lt.COMPLETING
    t.actors[actor].start = now
    return rest(t, actor, t.seconds[actor * t.ops.size + op], now)


@inlined
def slowest_clock(t: lt.Tables, now):  # type: ignore[no-untyped-def]
    """Return the clock of the actor that has added least, of those who have not gone for ever."""
    slowest = lt.MANY
    for other in range(t.actors.size):
        if t.counts[lt.FAILING] == 0 or not is_gone(t, other, now):
            slowest = min(slowest, t.actors[other].clock)
    return slowest


@inlined
def held_on(t: lt.Tables, now):  # type: ignore[no-untyped-def]
    """Let those go on who wait for others' clocks and are not too far ahead any more; return the slowest clock."""
    slowest = slowest_clock(t, now)
    before = -1
    other = t.counts[lt.HELD]
    while other >= 0:
        after = t.actors[other].next
        if t.actors[other].clock - slowest > t.ops[t.actors[other].op].number:
            before = other
        else:
            if before < 0:
                t.counts[lt.HELD] = after
            else:
                t.actors[before].next = after
            if after < 0:
                t.counts[lt.LAST_HELD] = before
            come(t, now, lt.THROUGH, other)
        other = after
    return slowest


@inlined
def tick(t: lt.Tables, actor, slack, now):  # type: ignore[no-untyped-def]
    """Advance an actor's clock, which may let others go on; return whether it may itself."""
    t.actors[actor].clock += 1
    return t.actors[actor].clock - held_on(t, now) <= slack


@inlined
def gone(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """An actor never comes back: nobody waits for its clock or for its answer."""
    if t.counts[lt.MANNER] >= lt.ANSWERING:
        for way in range(t.ways.size):
            if t.ways[way].end == actor and t.ways[way].under_way == 1:
                come(t, now, lt.RETURNED, way)
    elif t.counts[lt.HELD] >= 0:
        held_on(t, now)


@inlined
def at_servers(t: lt.Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let an actor do something at servers that act together; return GOING if it waits, ON if it goes on, or what
    Python must do before."""
    kind = t.ops[op].kind
    number = t.ops[op].number
    if kind == lt.REST:
        return rest(t, actor, t.seconds[actor * t.ops.size + op], now)
    if kind in (lt.GATHER, lt.GATHER_NEW):
        return gather(t, actor, op, now)
    if kind == lt.UPDATE:
        if t.actors[actor].part == lt.COMPLETING:
            t.servers[0].version += 1
            row = write(t, op, actor, op, t.actors[actor].start, now, now)
            if number == 1 and updated(t, row, now):
                return lt.UPDATED
        return ON
    if kind == lt.RELEASE:
        if t.actors[actor].part == lt.COMPLETING:
            come(t, now, lt.UPDATES, 0)
        t.servers[0].busy = 0
        come(t, now, lt.RELEASED, 0)
        return ON
    if kind == lt.TAKE:
        t.actors[actor].version = t.servers[0].version
        if t.counts[lt.RETURNS] == 1:
            write(t, op, actor, op, now, now, now)
        return lt.ASKED if number == 1 else ON
    if kind == lt.CLOCK and tick(t, actor, number, now):
        return ON
    if kind == lt.MEET and t.actors[actor].part == lt.DROPPED:
        return ON
    t.actors[actor].start = now
    if kind == lt.TRAVEL and number == 1 and t.counts[lt.FAILING] == 1 and is_down(t, actor, now):
        wait_until_back(t, actor, now)
    elif kind == lt.TRAVEL:
        t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
        for way in range(t.actors[actor].first, t.actors[actor].last):
            t.ways[way].stage = lt.ANSWERING_IT if number == 1 else lt.GOING_THERE
            leave(t, 2 * way + number)
    elif kind == lt.TURN:
        request(t, t.actors[actor].first, now)
    elif kind == lt.MEET:
        append(t, lt.MEETING, lt.LAST_MEETING, actor)
    else:  # CLOCK
        append(t, lt.HELD, lt.LAST_HELD, actor)
    return lt.GOING


@inlined
def next_op(t: lt.Tables, actor):  # type: ignore[no-untyped-def]
    """Let an actor be through with what it does."""
    op = t.actors[actor].op + 1
    t.actors[actor].op = op if op < t.ops.size else 0


@inlined
def to_one(t: lt.Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Let an actor choose whom it sends to, send, or wait; return as :func:`at_servers` does."""
    kind = t.ops[op].kind
    way = t.actors[actor].first
    if kind == lt.JOIN:
        if t.ways[way].under_way == 0:
            return ON
        t.actors[actor].start = now
        t.actors[actor].left = 1
        return lt.GOING
    if kind == lt.CHOOSE:
        if t.actors[actor].drawn == lt.BLOCK:
            t.counts[lt.PENDING] = actor
            return lt.CHOICES
        t.actors[actor].drawn += 1
    choice = t.choices[actor * lt.BLOCK + t.actors[actor].drawn - 1]
    if kind == lt.DISPATCH:
        t.ways[way].end = choice.end
        t.ways[way].target = choice.target
        t.ways[way].route = choice.route
        t.ways[way].back_route = choice.back_route
        t.ways[way].begin = now
        t.ways[way].under_way = 1
        leave(t, 2 * way)
    elif choice.end < 0 or (t.counts[lt.FAILING] == 1 and is_down(t, choice.end, now)):
        t.actors[actor].op += t.ops[op].number
    return ON


@inlined
def step_ends(t: lt.Tables, actor, op, row, now):  # type: ignore[no-untyped-def]
    """Count a step; return whether Python must be told of an update that it makes."""
    number = t.ops[op].number
    if number in (lt.EACH, lt.AGED):
        told = updated(t, row, now)
        if number == lt.AGED:
            t.log[row].staleness = t.counts[lt.N_UPDATES] - t.actors[actor].version
            t.counts[lt.N_UPDATES] += t.log[row].whole
            t.actors[actor].version = t.counts[lt.N_UPDATES]
        return told
    if number == lt.NO_UPDATE:
        return False
    steps = t.actors[actor].steps
    t.actors[actor].steps = steps + 1
    if steps > t.counts[lt.SLOWEST]:
        return False
    t.counts[lt.BEHIND] -= 1
    if t.counts[lt.BEHIND] > 0:
        return False
    t.counts[lt.SLOWEST] = steps + 1
    for other in range(t.actors.size):
        t.counts[lt.BEHIND] += 1 if t.actors[other].steps == steps + 1 else 0
    return updated(t, row, now)


@inlined
def go_on(t: lt.Tables, actor, now):  # type: ignore[no-untyped-def]
    """Let an actor do what comes next, up to what takes time (GOING), or return what Python must do before."""
    n_ops = t.ops.size
    while True:
        op = t.actors[actor].op
        kind = t.ops[op].kind
        then = ON
        if t.ops[op].redo == op:
            t.actors[actor].begun = now
        if kind in (lt.WORK, lt.OWED):
            seconds = t.seconds[actor * n_ops + op]
            if kind == lt.OWED:
                seconds = t.actors[actor].owed
                t.actors[actor].owed = 0.0
            seconds *= t.actors[actor].factor
            if seconds > 0.0:
                work(t, actor, op, seconds, now)
                return lt.GOING
        elif kind == lt.DRAW:
            cursor = t.actors[actor].cursor
            if cursor == lt.BLOCK:
                t.counts[lt.PENDING] = actor
                return lt.REFILL
            t.actors[actor].factor = t.factors[actor * lt.BLOCK + cursor]
            t.actors[actor].cursor = cursor + 1
        elif kind == lt.FETCH:
            if t.counts[lt.FETCHED] == 0:
                t.actors[actor].start = now
                t.counts[lt.PENDING] = actor
                return lt.FETCHING
            t.counts[lt.FETCHED] = 0
        elif kind == lt.EXCHANGE:
            t.actors[actor].start = now
            t.actors[actor].queued = 0.0
            t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
            for way in range(t.actors[actor].first, t.actors[actor].last):
                t.ways[way].under_way = 1
                t.ways[way].stage = lt.GOING_THERE
                leave(t, 2 * way)
            return lt.GOING
        elif kind == lt.POST:
            posts = t.actors[actor].posts
            t.actors[actor].posts = posts + 1
            for way in range(t.actors[actor].first, t.actors[actor].last):
                t.ways[way].under_way = 1
                t.posted[way * t.counts[lt.DEPTH] + posts % t.counts[lt.DEPTH]] = now
                leave(t, 2 * way)
        elif kind == lt.AWAIT:
            t.actors[actor].start = now
            left = 0
            for way in range(t.actors[actor].first, t.actors[actor].last):
                left += t.ways[way].under_way
            for i in range(t.actors[actor].first_in, t.actors[actor].last_in):
                if t.ways[t.arrivals[i]].read < t.actors[actor].posts:
                    left += 1
            t.actors[actor].left = left
            if left == 0:
                come(t, now, lt.THROUGH, actor)
            return lt.GOING
        elif lt.TRAVEL <= kind <= lt.TAKE or kind >= lt.CHOOSE:
            then = at_servers(t, actor, op, now) if kind < lt.CHOOSE else to_one(t, actor, op, now)
            if then in (lt.GOING, lt.CHOICES):
                return then
        else:
            row = write(t, op, actor, op, now, now, now)
            if kind in (lt.ASK, lt.RESIZE):
                then = lt.ASKED
            elif kind == lt.STEP and step_ends(t, actor, op, row, now):
                then = lt.UPDATED
        next_op(t, actor)
        if then != ON:
            t.counts[lt.PENDING] = actor
            return then
