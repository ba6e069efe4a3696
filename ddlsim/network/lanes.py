"""Workers that repeat a cycle of operations, and the servers and peers that they send to. Compiled.

An *actor* (a worker) executes its operations one after the other, over and over: work, whose duration is multiplied by
a factor that is drawn per step, exchanges with all servers, messages to its peers. A *server* serves one request at a
time, in order of arrival. A *connection* leads from an actor to a server, which sends its answer back on it, or to a
peer; it carries one message at a time. *Coordinated* servers hold one model: they serve one actor at a time, and
update the model once they have gathered a given number of contributions.

Events of one instant are handled in the order in which they were scheduled. Messages sent at an instant are handed to
the network in order, after its last event. The order is that of a discrete-event simulation in which actors, requests
and waits are processes. :func:`run_actors` returns to Python when Python has to act (the values of its status) and
records in a log what has happened.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddlsim.compiler import entry, inlined
from ddlsim.network.calendar import earliest, insert_woken, paused, pop, push
from ddlsim.network.devices import begin_work, change, next_event, slowed, stood_still
from ddlsim.network.intrinsics import attach, call_advance, column
from ddlsim.network.state import FOREIGN, IDLE, LOCAL, Floats, Ints, Records, record
from ddlsim.network.state import FULL as NETWORK_FULL
from ddlsim.network.tasks import ADVANCE, N_ELSEWHERE, N_SENDS, N_TAKEN, send, sort

# Kinds of operations. "Logged" operations write a row of the log.
WORK = 0  # takes its duration times the factor
OWED = 1  # extra work, such as an evaluation, with the factor of the previous step
DRAW = 2  # draws the next factor
POST = 4  # sends to all peers
AWAIT = 5  # waits until its own messages have arrived, and those that its peers sent in this round
NOTE = 6  # logged
ASK = 7  # logged; Python is called before the actor continues
RESIZE = 19  # as ASK; the actor's work may change
STEP = 8  # logged: ends a step of the actor; `number` says whether that is an update (below)
EXCHANGE = 3  # sends to all servers and waits for their answers
# Operations at coordinated servers
TRAVEL = 9  # waits until all connections have carried a message, to the servers (`number` 0) or back (1)
DELAY = 10  # takes its duration, without a factor
TURN = 11  # waits for exclusive use of the servers
CONTRIBUTE, CONTRIBUTE_FRESH = 12, 13  # contributes a gradient (NEW: unless stale); takes its duration if the last one
UPDATE = 14  # updates the model if `number` contributions are complete; the update counts if 1
RELEASE = 15  # ends the exclusive use
MEET = 16  # waits for the update with its contribution (`number` 0), or for the first one after its invitation (1)
CLOCK = 17  # waits until it is at most `number` contributions ahead of the slowest actor
TAKE = 18  # takes the current model version; logged; Python is called if `number` is 1

# Operations with one message at a time, on the actor's only connection, to a receiver that Python has chosen
CHOOSE = 20  # takes the next choice; if it is -1 (none), skips `number` operations
DISPATCH = 21  # sends to the chosen peer, which answers if `number` is 1
JOIN = 22  # waits until the last message has arrived, or its answer has

FETCH = 23  # waits for the actor's next batch of samples, which Python provides
AGAIN = 24  # jumps back `number` operations, until it has been reached as often as its entry in `seconds` says

# Which STEPs are updates: none; the last one of a round of all actors; each; each, with its staleness logged
NO_UPDATE, COMMON, EACH, AGED = range(4)
# Receivers of messages (RECEIVER): independent servers, or all peers; coordinated servers; a peer that answers; a peer
# that does not
INDEPENDENT, COORDINATED, ANSWERING, ONE_WAY = range(4)

# Status returned by `run_actors`
OVER = 0  # the run has ended
LIMIT = 1  # no event is left up to the limit
STUCK = 2  # no event is left at all
FULL = 3  # arrays of the network are too small
LOGGED = 4  # the log is full
REFILL = 5  # the actor PENDING needs factors
CHOICES = 9  # the actor PENDING needs choices
ASKED = 6  # Python has to act on the last row of the log
UPDATED = 7  # the requested number of updates is reached
GOING = 8  # internal: the actor waits for an event
FETCHING = 10  # the actor PENDING needs its next batch of samples
ELSEWHERE = 11  # messages that no actor sent have arrived: the first N_ELSEWHERE completions, at the time WHEN
OTHERS = 12  # the network has completed something for other users, which they have to read first

# ROW.what, if it is not the number of an operation. LOST: a crash at `where` undid or interrupted what began at
# `begin`; the actor is back at `time`
SERVED, WORKED, WAITED, DELIVERED, LOST, BROUGHT = -1, -2, -3, -4, -5, -6

# Places in `counts` (int64), behind those of :mod:`ddlsim.network.tasks`, of which some are used here, too
N_LOGGED = 25
PENDING = 26  # the actor that continues first, -1 if none
UPDATES_LEFT = 27
RETURNS = 28  # 1: return UPDATED after the last update; 0: end the run
ASKS = 29  # 1: return ASKED after each service
ENDING = 30  # 1: end the run after the events scheduled for this instant
SPANS = 31  # 1: log work, waiting and services
SLOWEST, BEHIND = 32, 33  # steps completed by all actors; number of actors with no more
RECEIVER = 34
GATHERED = 35  # contributions to the next update
MEETING, LAST_MEETING = 36, 37  # list of actors that wait for the next update, -1 if empty
RESUMED = 38  # list of actors that continue because of an update
HELD, LAST_HELD = 39, 40  # list of actors that wait for slower ones
ASKING = 41  # the connection on which a peer is about to answer, -1 if none
N_UPDATES = 42  # number of AGED steps so far
FAILING = 43  # 1: some actor crashes
FETCHED = 44  # 1: the batch for the actor PENDING is available
FIRST_OP = 45  # operation with which an actor restarts after a crash, if the interrupted one has no `redo`
INVITED = 46  # actors that continue after the next update
N_COUNTS = 47

# Places in `reals` (float64)
NOW = 0
NBYTES = 1  # sent: a compensated sum (ddlsim.network.flows), with its low word at the next place
QUIET = 3  # the network is known to complete nothing before
WHEN = 4  # something ended that no actor has sent
OPENS = 5  # when what is ready now starts: now, or when the pause ends
N_REALS = 6

MANY = 1 << 62  # no limit
BLOCK = 64  # factors and choices drawn ahead per actor

#: end: the chosen peer, -1 if none; target: its node
CHOICE = record("n end target route back_route")

# Kinds of events (EVENT.item % N_EVENTS); EVENT.item // N_EVENTS numbers an actor, connection, server or message
START, WORK_ENDS, ARRIVES, GRANTED, SERVICE_ENDS, RELEASED, ANSWERED, RETURNED, READ, WAIT_ENDS = range(10)
UPDATES, END, RESTARTS, LOST_FOR_GOOD, BATCH_ARRIVES, CRASHES, LEAVES = range(10, 17)
N_EVENTS = 32

# Status of a contribution (ACTOR.part)
DROPPED, ADDED, COMPLETING = range(3)

#: number: depends on the kind; redo: of work that a crash undoes, the operation from which it restarts, else -1
OP = record("n kind", "i number", "n redo")
#: start: when the current operation began, s; factor: of this step; owed: extra work, s; queued: longest time in a
#: queue of this exchange, s; compute, communication, waiting, input, idle (down), lost (work undone by crashes): total
#: s; op: current operation; left: messages still awaited, -1 if none; cursor: next factor; posts: rounds of messages
#: sent; steps: completed; slow: first row in `slow`, -1 if none; first:last: its connections; messages: to and from it
#: in a round; version: of the model it holds or, for AGED steps, updates when its step began; clock: contributions so
#: far; part: see above; next: successor in a list; invited: 1 if it continues after the next update; turns: counter of
#: an AGAIN; drawn: choices taken; begun: when its current gradient began, s; fell: time of its last crash, s; crash:
#: the current or next one in `crashes`, -1 if it never crashes; down: 1 from a crash until it restarts; machine: its
#: host; ticket: sequence number of the event that ends its work, -1 if that event is never rescheduled
ACTOR = record(
    "f start factor owed queued compute communication waiting input",
    "i version clock",
    "n op left cursor posts steps slow first last messages part next invited turns drawn",
    "f begun idle lost fell",
    "n crash down machine ticket",
)
#: arrived, begin: when the request arrived, and its service began (or the message to the peer was sent), s; seconds:
#: service time of a peer before it answers; version: of the server's model in its last answer; under_way: 1 while the
#: sender waits for a message; end: the server or peer; next: successor in the server's queue; stage: of the message in
#: flight, below; lost_: messages, services and answers that belong to an actor that has crashed since, and are ignored
#: when they complete
CONNECTION = record(
    "f arrived begin seconds", "i version", "n actor end next under_way stage lost_message lost_service lost_answer"
)
#: stages of a message: none that an actor waits for, on its way there, in the queue, in service, answer on its way
NOWHERE, GOING_THERE, QUEUED, IN_SERVICE, ANSWERING_IT = range(5)
#: a round of an actor. ready: when the last message to it was sent, s; left: messages to and from it still to arrive
ROUND = record("f ready", "n left")
#: seconds: per service; version: services so far; head, tail: of the queue, -1 if empty; busy: 1 during a service
SERVER = record("f seconds", "i version", "n head tail busy")
#: time: s; begin: of work or a service, s; where: end of waiting for others, between the two, s; what: see above;
#: place: server, peer or operation; staleness: in updates; updates: 1 if the row completes an update
ROW = record("f time begin where", "n what actor place updates", "i staleness")


#: an actor is down from `start` to `end` (s); the last crash of each actor never begins
CRASH = record("f start end")


class Tables(NamedTuple):
    """Arguments of :func:`~ddlsim.network.lanes.run_actors`."""

    counts: Ints
    reals: Floats
    ops: Records  # OP
    seconds: Floats  # durations of each actor's operations, s
    actors: Records  # ACTOR
    connections: Records  # CONNECTION
    servers: Records  # SERVER
    rounds: Records  # ROUND of all actors, for each of some successive rounds
    factors: Floats  # BLOCK per actor
    choices: Records  # CHOICE, BLOCK per actor
    slow: Records  # SLOW
    devices: Records  # DEVICE per actor, if messages to and from peers slow its work down, else empty
    contention: Records  # CONTENTION per device: of messages between machines, and within one
    crashes: Records  # CRASH
    calendar: Records  # EVENT, a heap
    sends: Ints  # messages to be sent
    messages: Records  # MESSAGE: 2 * connection to the receiver, + 1 for an answer; the last row is unused
    log: Records  # ROW
    pauses: Floats  # (n_pauses, 2) s, during which nothing starts


# ---------------------------------------------------------------- operations


CONTINUES = -1  # the actor continues with its next operation


@inlined
def schedule_event(t: Tables, time, what, number):  # type: ignore[no-untyped-def]
    """Schedule an event for `time` (s), after those already scheduled for that time."""
    push(t.counts, t.calendar, time, what + N_EVENTS * number)


@inlined
def log_row(t: Tables, what, actor, place, begin, where, now):  # type: ignore[no-untyped-def]
    """Append a row to the log; return its number."""
    i = t.counts[N_LOGGED]
    t.counts[N_LOGGED] = i + 1
    t.log[i].time = now
    t.log[i].begin = begin
    t.log[i].where = where
    t.log[i].what = what
    t.log[i].actor = actor
    t.log[i].place = place
    t.log[i].updates = 0
    return i


@inlined
def queue_message(t: Tables, message):  # type: ignore[no-untyped-def]
    """Send a message when nothing is left of the instant, or of a pause."""
    if t.reals[OPENS] > t.reals[NOW]:
        schedule_event(t, t.reals[OPENS], LEAVES, message)
        return
    t.sends[t.counts[N_SENDS]] = message
    t.counts[N_SENDS] += 1


@inlined
def count_update(t: Tables, row, now):  # type: ignore[no-untyped-def]
    """Mark a row of the log as an update; return whether to return to Python because it was the last one."""
    if t.counts[UPDATES_LEFT] == 0:
        return False
    t.log[row].updates = 1
    t.counts[UPDATES_LEFT] -= 1
    if t.counts[UPDATES_LEFT] > 0:
        return False
    if t.counts[RETURNS] == 0:
        schedule_event(t, now, END, 0)
    return t.counts[RETURNS] == 1


@inlined
def next_crash(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Return the crash that an actor is in, or else its next one."""
    i: int = t.actors[actor].crash
    while t.crashes[i].end <= now:
        i += 1
    t.actors[actor].crash = i
    return i


@inlined
def is_down(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Whether an actor has crashed and has not restarted."""
    if t.actors[actor].crash < 0:
        return False
    i: int = next_crash(t, actor, now)
    return t.crashes[i].start <= now


@inlined
def book_work(t: Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Add work from `begin` (when the actor was ready) to `end` (s) to the actor's totals; standstills count as
    idle."""
    ready = begin
    begin = min(earliest(t.pauses, ready), end)
    t.actors[actor].waiting += begin - ready
    still = stood_still(t.slow, t.actors[actor].slow, begin, end) if t.actors[actor].slow >= 0 else 0.0
    t.actors[actor].compute += end - begin - still
    t.actors[actor].idle += still


@inlined
def book_communication(t: Tables, actor, begin, end):  # type: ignore[no-untyped-def]
    """Add a wait for messages from `begin` to `end` (s) to the actor's totals; its part in pauses counts as waiting."""
    waited = paused(t.pauses, begin, end)
    t.actors[actor].waiting += waited
    t.actors[actor].communication += end - begin - waited


@inlined
def work(t: Tables, actor, op, seconds, now):  # type: ignore[no-untyped-def]
    """Start an operation of `seconds` of work. A crash undoes work that has a `redo`, and suspends other work."""
    t.actors[actor].start = now
    now = t.reals[OPENS]
    if t.devices.size > 0:
        begin_work(t, t.actors, actor, actor, seconds, now, WORK_ENDS, N_EVENTS)
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
            book_work(t, actor, t.actors[actor].start, fell)
            t.actors[actor].lost += fell - t.actors[actor].begun
            if t.crashes[i].end < np.inf:
                schedule_event(t, t.crashes[i].end, RESTARTS, actor)
            return
        begin = now
        while t.crashes[i].start < now + seconds:
            seconds += t.crashes[i].end - max(t.crashes[i].start, begin)
            begin = t.crashes[i].end
            i += 1
    if seconds < np.inf:
        schedule_event(t, now + seconds, WORK_ENDS, actor)


@inlined
def change_in_flight(t: Tables, connection, more, now):  # type: ignore[no-untyped-def]
    """Change the number of messages in flight between an actor and its peer by `more`, which affects their speeds."""
    actor = t.connections[connection].actor
    peer = t.connections[connection].end
    kind = 1 if t.actors[actor].machine == t.actors[peer].machine else 0
    for end in (actor, peer):
        change(t, t.actors, end, kind, more, now, WORK_ENDS, N_EVENTS)


@inlined
def restart(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Restart an actor after a crash that undid its work: it takes the current model."""
    op = t.actors[actor].op
    log_row(t, LOST, actor, op, t.actors[actor].start, t.actors[actor].fell, now)
    t.actors[actor].idle += now - t.actors[actor].fell
    t.actors[actor].down = 0
    t.actors[actor].start = now
    t.actors[actor].op = t.ops[op].redo if t.ops[op].redo >= 0 else t.counts[FIRST_OP]
    if t.servers.size > 0:
        t.actors[actor].version = t.servers[0].version
        for connection in range(t.actors[actor].first, t.actors[actor].last):
            t.connections[connection].version = t.servers[t.connections[connection].end].version


@inlined
def wait_until_back(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Stop an actor that is down, until it restarts."""
    t.actors[actor].down = 1
    t.actors[actor].fell = now
    t.actors[actor].left = -1
    i: int = next_crash(t, actor, now)
    if t.crashes[i].end < np.inf:
        schedule_event(t, t.crashes[i].end, RESTARTS, actor)


@inlined
def crash(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Crash an actor; its requests to servers, and their answers, are lost."""
    i: int = next_crash(t, actor, now)
    after: int = i + 1 if t.crashes[i].start <= now else i
    if t.crashes[after].start < np.inf:
        schedule_event(t, t.crashes[after].start, CRASHES, actor)
    kind = t.ops[t.actors[actor].op].kind
    if after == i or t.actors[actor].left <= 0 or kind not in (EXCHANGE, TRAVEL):
        return
    for connection in range(t.actors[actor].first, t.actors[actor].last):
        stage = t.connections[connection].stage
        if stage in (GOING_THERE, QUEUED, IN_SERVICE):
            t.actors[actor].lost += t.actors[actor].start - t.actors[actor].begun
            t.actors[actor].begun = t.actors[actor].start  # once, even if several are lost
        t.connections[connection].lost_message += stage == GOING_THERE
        t.connections[connection].lost_service += stage == IN_SERVICE
        t.connections[connection].lost_answer += stage == ANSWERING_IT
        if stage == QUEUED:
            leave_queue(t, connection)
        t.connections[connection].stage = NOWHERE
        t.connections[connection].under_way = 0
    book_communication(t, actor, t.actors[actor].start, now)
    wait_until_back(t, actor, now)


@inlined
def leave_queue(t: Tables, connection):  # type: ignore[no-untyped-def]
    """Remove a request from its server's queue."""
    server = t.connections[connection].end
    before = -1
    other = t.servers[server].head
    while other != connection:
        before = other
        other = t.connections[other].next
    if before < 0:
        t.servers[server].head = t.connections[connection].next
    else:
        t.connections[before].next = t.connections[connection].next
    if t.servers[server].tail == connection:
        t.servers[server].tail = before


@inlined
def is_lost(t: Tables, connection, what):  # type: ignore[no-untyped-def]
    """Count off an arriving message (or answer) of an actor that has crashed since; return whether it was one."""
    if what == ARRIVES:
        lost: bool = t.connections[connection].lost_message > 0
        t.connections[connection].lost_message -= lost
    else:
        lost = t.connections[connection].lost_answer > 0
        t.connections[connection].lost_answer -= lost
    return lost


@inlined
def grant(t: Tables, server, now):  # type: ignore[no-untyped-def]
    """Let a free server take the first request of its queue."""
    connection = t.servers[server].head
    if connection >= 0 and t.servers[server].busy == 0:
        t.servers[server].head = t.connections[connection].next
        t.servers[server].busy = 1
        t.connections[connection].stage = IN_SERVICE
        schedule_event(t, now, GRANTED, connection)


@inlined
def request(t: Tables, connection, now):  # type: ignore[no-untyped-def]
    """Append a request to the queue of its server."""
    server = t.connections[connection].end
    t.connections[connection].arrived = now
    t.connections[connection].stage = QUEUED
    t.connections[connection].next = -1
    if t.servers[server].head < 0:
        t.servers[server].head = connection
    else:
        t.connections[t.servers[server].tail].next = connection
    t.servers[server].tail = connection
    grant(t, server, now)


@inlined
def append(t: Tables, first, last, actor):  # type: ignore[no-untyped-def]
    t.actors[actor].next = -1
    if t.counts[first] < 0:
        t.counts[first] = actor
    else:
        t.actors[t.counts[last]].next = actor
    t.counts[last] = actor


@inlined
def delay(t: Tables, actor, seconds, now):  # type: ignore[no-untyped-def]
    if seconds <= 0.0:
        return CONTINUES
    t.actors[actor].start = now
    schedule_event(t, t.reals[OPENS] + seconds, WAIT_ENDS, actor)
    return GOING


@inlined
def contribute(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Contribute an actor's gradient to the next update; the last contributor waits for the update's duration."""
    staleness = t.servers[0].version - t.actors[actor].version
    t.actors[actor].part = DROPPED
    if t.ops[op].kind == CONTRIBUTE_FRESH and staleness > 0:
        return CONTINUES
    row = log_row(t, SERVED, actor, 0, now, now, now)
    t.log[row].staleness = staleness  # type: ignore[attr-defined]  # mypy knows no fields
    t.actors[actor].part = ADDED
    t.counts[GATHERED] += 1
    if t.counts[GATHERED] < t.ops[op].number:
        return CONTINUES
    t.counts[GATHERED] = 0
    t.actors[actor].part = COMPLETING
    t.actors[actor].start = now
    return delay(t, actor, t.seconds[actor * t.ops.size + op], now)


@inlined
def resume_held(t: Tables, now):  # type: ignore[no-untyped-def]
    """Resume the actors that are no longer too far ahead of the slowest one; return the least number of contributions
    of all actors that are not down for ever."""
    slowest = MANY
    for actor in range(t.actors.size):
        down = t.counts[FAILING] == 1 and is_down(t, actor, now)
        if not (down and t.crashes[t.actors[actor].crash].end == np.inf):
            slowest = min(slowest, t.actors[actor].clock)
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
            schedule_event(t, now, WAIT_ENDS, other)
        other = after
    return slowest


@inlined
def resume_dependents(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Resume the actors that wait for the clock or the answer of an actor that is down for ever."""
    if t.counts[RECEIVER] >= ANSWERING:
        for connection in range(t.connections.size):
            if t.connections[connection].end == actor and t.connections[connection].under_way == 1:
                schedule_event(t, now, RETURNED, connection)
    elif t.counts[HELD] >= 0:
        resume_held(t, now)


@inlined
def run_at_servers(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Execute an operation at servers; return GOING if it takes time, else CONTINUES or a status for Python."""
    kind = t.ops[op].kind
    number = t.ops[op].number
    if kind == DELAY:
        return delay(t, actor, t.seconds[actor * t.ops.size + op], now)
    if kind in (CONTRIBUTE, CONTRIBUTE_FRESH):
        return contribute(t, actor, op, now)
    if kind == UPDATE:
        if t.actors[actor].part == COMPLETING:
            t.servers[0].version += 1
            row = log_row(t, op, actor, op, t.actors[actor].start, now, now)
            if number == 1 and count_update(t, row, now):
                return UPDATED
        return CONTINUES
    if kind == RELEASE:
        if t.actors[actor].part == COMPLETING:
            schedule_event(t, now, UPDATES, 0)
        t.servers[0].busy = 0
        schedule_event(t, now, RELEASED, 0)
        return CONTINUES
    if kind == TAKE:
        t.actors[actor].version = t.servers[0].version
        if t.counts[RETURNS] == 1:
            log_row(t, op, actor, op, now, now, now)
        return ASKED if number == 1 else CONTINUES
    if kind == CLOCK:
        t.actors[actor].clock += 1
        if t.actors[actor].clock - resume_held(t, now) <= number:
            return CONTINUES
    if kind == MEET and number == 0 and t.actors[actor].part == DROPPED:
        return CONTINUES
    t.actors[actor].start = now
    if kind == TRAVEL and number == 1 and t.counts[FAILING] == 1 and is_down(t, actor, now):
        wait_until_back(t, actor, now)
    elif kind in (TRAVEL, EXCHANGE):
        t.actors[actor].queued = 0.0
        t.actors[actor].left = t.actors[actor].last - t.actors[actor].first
        for connection in range(t.actors[actor].first, t.actors[actor].last):
            t.connections[connection].under_way = 1
            t.connections[connection].stage = ANSWERING_IT if number == 1 else GOING_THERE
            queue_message(t, 2 * connection + number)
    elif kind == TURN:
        request(t, t.actors[actor].first, now)
    elif kind == MEET and number == 0:
        append(t, MEETING, LAST_MEETING, actor)
    elif kind == CLOCK:
        append(t, HELD, LAST_HELD, actor)
    return GOING


@inlined
def next_op(t: Tables, actor):  # type: ignore[no-untyped-def]
    op = t.actors[actor].op + 1
    t.actors[actor].op = op if op < t.ops.size else 0


@inlined
def run_message(t: Tables, actor, op, now):  # type: ignore[no-untyped-def]
    """Execute CHOOSE, DISPATCH or JOIN; return as :func:`run_at_servers` does."""
    kind = t.ops[op].kind
    connection = t.actors[actor].first
    if kind == JOIN:
        if t.connections[connection].under_way == 0:
            return CONTINUES
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
        t.connections[connection].end = choice.end
        t.messages[2 * connection].target = choice.target
        t.messages[2 * connection].route = choice.route
        t.messages[2 * connection + 1].source = choice.target
        t.messages[2 * connection + 1].route = choice.back_route
        t.connections[connection].begin = now
        t.connections[connection].under_way = 1
        queue_message(t, 2 * connection)
    elif choice.end < 0 or (t.counts[FAILING] == 1 and is_down(t, choice.end, now)):
        t.actors[actor].op += t.ops[op].number
    return CONTINUES


@inlined
def step_ends(t: Tables, actor, op, row, now):  # type: ignore[no-untyped-def]
    """Count a completed step; return whether to return to Python because of the update it makes."""
    number = t.ops[op].number
    if number in (EACH, AGED):
        told = count_update(t, row, now)
        if number == AGED:
            t.log[row].staleness = t.counts[N_UPDATES] - t.actors[actor].version
            t.counts[N_UPDATES] += t.log[row].updates
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
    return count_update(t, row, now)


@inlined
def run_operations(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Execute an actor's operations up to the first that takes time; return GOING, or a status for Python."""
    n_ops = t.ops.size
    while True:
        op = t.actors[actor].op
        kind = t.ops[op].kind
        then = CONTINUES
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
        elif kind == POST:
            t.actors[actor].posts += 1
            for connection in range(t.actors[actor].first, t.actors[actor].last):
                t.connections[connection].begin = now
                queue_message(t, 2 * connection)
        elif kind == AWAIT:
            t.actors[actor].start = now
            place: int = round_of(t, actor, t.actors[actor].posts)
            t.actors[actor].left = t.rounds[place].left
            if t.actors[actor].left == 0:
                schedule_event(t, now, WAIT_ENDS, actor)
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
        elif kind == EXCHANGE or TRAVEL <= kind <= TAKE or kind >= CHOOSE:
            then = run_at_servers(t, actor, op, now) if kind < CHOOSE else run_message(t, actor, op, now)
            if then in (GOING, CHOICES):
                return then
        else:
            row = log_row(t, op, actor, op, now, now, now)
            if kind in (ASK, RESIZE):
                then = ASKED
            elif kind == STEP and step_ends(t, actor, op, row, now):
                then = UPDATED
        next_op(t, actor)
        if then != CONTINUES:
            t.counts[PENDING] = actor
            return then


# ---------------------------------------------------------------- events


@inlined
def count_arrival(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """Count one of the messages that an actor waits for as arrived."""
    left = t.actors[actor].left - 1
    t.actors[actor].left = left
    if left == 0:
        schedule_event(t, now, WAIT_ENDS, actor)


@inlined
def round_of(t: Tables, actor, number):  # type: ignore[no-untyped-def]
    """Return the place of an actor's round in `rounds`, in which later rounds replace earlier ones."""
    return number * t.actors.size % t.rounds.size + actor


@inlined
def delivered(t: Tables, connection, actor, now):  # type: ignore[no-untyped-def]
    """Count the message that a connection has delivered for the actor that has sent or received it."""
    number = t.actors[t.connections[connection].actor].posts
    place: int = round_of(t, actor, number)
    t.rounds[place].left -= 1
    t.rounds[place].ready = max(t.rounds[place].ready, t.connections[connection].begin)
    if t.actors[actor].left > 0 and number == t.actors[actor].posts:
        count_arrival(t, actor, now)


@inlined
def served(t: Tables, connection, now):  # type: ignore[no-untyped-def]
    """End a service: send the answer, and free the server."""
    actor = t.connections[connection].actor
    server = t.connections[connection].end
    if t.connections[connection].lost_service > 0:
        t.connections[connection].lost_service = 0
        t.servers[server].busy = 0
        schedule_event(t, now, RELEASED, server)
        return
    t.connections[connection].stage = ANSWERING_IT
    row = log_row(t, SERVED, actor, server, t.connections[connection].begin, now, now)
    version = t.servers[server].version
    t.log[row].staleness = version - t.connections[connection].version  # type: ignore[attr-defined]  # mypy knows no fields
    t.servers[server].version = version + 1
    t.connections[connection].version = version + 1
    t.connections[connection].under_way = 0
    is_complete = True
    for other in range(t.actors[actor].first, t.actors[actor].last):
        is_complete = is_complete and t.connections[other].under_way == 0
    if is_complete:
        count_update(t, row, now)
    t.servers[server].busy = 0
    schedule_event(t, now, RELEASED, server)
    queue_message(t, 2 * connection + 1)


@inlined
def end_wait(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """End an actor's wait: the first part was for others, the rest for messages."""
    kind = t.ops[t.actors[actor].op].kind
    start = t.actors[actor].start
    ready = start
    if kind in (TURN, MEET, CLOCK):
        ready = now
    elif kind == EXCHANGE:
        ready = start + t.actors[actor].queued
    elif kind == AWAIT:
        place: int = round_of(t, actor, t.actors[actor].posts)
        ready = t.rounds[place].ready
        t.rounds[place].ready = 0.0
        t.rounds[place].left = t.actors[actor].messages
    ready = min(max(ready, start), now)
    t.actors[actor].left = -1
    t.actors[actor].waiting += ready - start
    book_communication(t, actor, ready, now)
    if t.counts[SPANS] == 1:
        log_row(t, WAITED, actor, t.actors[actor].op, start, ready, now)


@inlined
def resume(t: Tables, actor, now):  # type: ignore[no-untyped-def]
    """End an actor's wait and its operation; return the actor."""
    end_wait(t, actor, now)
    next_op(t, actor)
    return actor


@inlined
def handle_arrival(t: Tables, connection, what, now):  # type: ignore[no-untyped-def]
    """Handle the arrival of a message at a peer, or of its answer."""
    actor = t.connections[connection].actor
    if what == ARRIVES:
        if t.counts[RETURNS] == 1:
            log_row(t, SERVED, actor, t.connections[connection].end, now, now, now)
        if t.counts[RECEIVER] == ANSWERING:
            t.counts[ASKING] = connection
            return
    if t.counts[SPANS] == 1:
        log_row(t, DELIVERED, actor, t.connections[connection].end, t.connections[connection].begin, now, now)
    schedule_event(t, now, RETURNED, connection)


@inlined
def answer(t: Tables):  # type: ignore[no-untyped-def]
    """Let a peer answer what has just arrived, which Python has been told of."""
    connection = t.counts[ASKING]
    t.counts[ASKING] = -1
    if t.connections[connection].seconds > 0.0:
        schedule_event(t, t.reals[OPENS] + t.connections[connection].seconds, SERVICE_ENDS, connection)
    else:
        queue_message(t, 2 * connection + 1)


@inlined
def handle_event(t: Tables, item, now):  # type: ignore[no-untyped-def]
    """Handle an event; return the actor that continues because of it, -1 if none."""
    what = item % N_EVENTS
    i = item // N_EVENTS
    receiver = t.counts[RECEIVER]
    if what == START:
        return i
    if t.devices.size > 0 and what in (ARRIVES, ANSWERED):
        change_in_flight(t, i, -1, now)
    if what in (WORK_ENDS, BATCH_ARRIVES):
        if what == BATCH_ARRIVES:
            t.actors[i].input += now - t.actors[i].start
        else:
            book_work(t, i, t.actors[i].start, now)
            if t.devices.size > 0:
                t.devices[i].row = -1
        if t.counts[SPANS] == 1:
            log_row(t, BROUGHT if what == BATCH_ARRIVES else WORKED, i, t.actors[i].op, t.actors[i].start, now, now)
        next_op(t, i)
        return i
    if what in (ARRIVES, ANSWERED) and is_lost(t, i, what):
        return -1
    if what in (ARRIVES, ANSWERED) and receiver == COORDINATED:
        t.connections[i].stage = NOWHERE
        count_arrival(t, t.connections[i].actor, now)
    elif what in (ARRIVES, ANSWERED) and receiver >= ANSWERING:
        handle_arrival(t, i, what, now)
    elif what == ARRIVES and t.servers.size > 0:
        request(t, i, now)
    elif what == ARRIVES:
        schedule_event(t, now, READ, i)
    elif what == GRANTED:
        actor = t.connections[i].actor
        if receiver == COORDINATED:
            return resume(t, actor, now)
        begin = t.reals[OPENS]
        t.connections[i].begin = now
        t.actors[actor].queued = max(t.actors[actor].queued, begin - t.connections[i].arrived)
        seconds = t.servers[t.connections[i].end].seconds
        if seconds > 0.0 or begin > now:
            schedule_event(t, begin + seconds, SERVICE_ENDS, i)
        else:
            served(t, i, now)
    elif what == SERVICE_ENDS and receiver == ANSWERING:
        queue_message(t, 2 * i + 1)
    elif what == SERVICE_ENDS:
        served(t, i, now)
    elif what == RELEASED:
        grant(t, i, now)
    elif what == ANSWERED:
        t.connections[i].stage = NOWHERE
        schedule_event(t, now, RETURNED, i)
    elif what == RETURNED:
        actor = t.connections[i].actor
        t.connections[i].under_way = 0
        if t.actors[actor].left > 0 and receiver >= ANSWERING:
            return resume(t, actor, now)
        if t.actors[actor].left > 0:
            count_arrival(t, actor, now)
    elif what == READ:
        delivered(t, i, t.connections[i].end, now)
        delivered(t, i, t.connections[i].actor, now)
    elif what == RESTARTS:
        restart(t, i, now)
        return i
    elif what == LOST_FOR_GOOD:
        resume_dependents(t, i, now)
    elif what == CRASHES:
        crash(t, i, now)
    elif what == LEAVES:
        queue_message(t, i)
    elif what == UPDATES:
        t.counts[RESUMED] = t.counts[MEETING]
        t.counts[MEETING] = -1
        for other in range(t.actors.size - 1 if t.counts[INVITED] > 0 else -1, -1, -1):
            if t.actors[other].invited == 1:
                t.actors[other].invited = 0
                t.actors[other].next = t.counts[RESUMED]
                t.counts[RESUMED] = other
        t.counts[INVITED] = 0
    else:  # WAIT_ENDS
        return resume(t, i, now)
    return -1


@entry
def run_actors(  # type: ignore[no-untyped-def]
    table: Ints, limit, counts, reals, ops, seconds, actors, connections, servers, rounds, factors, choices,
    slow, devices, contention, crashes, calendar, sends, messages, log, pauses,
):  # fmt: skip
    """Simulate the actors up to and including `limit` (s), or until Python has to act; return the status."""
    t = Tables(
        column(counts), column(reals), column(ops), column(seconds), column(actors), column(connections),
        column(servers), column(rounds), column(factors), column(choices), column(slow), column(devices),
        column(contention), column(crashes), column(calendar), column(sends), column(messages), column(log), pauses,
    )  # fmt: skip
    counts, reals, ops, actors = t.counts, t.reals, t.ops, t.actors
    devices, calendar, sends, log = t.devices, t.calendar, t.sends, t.log
    net = attach(table)
    insert_woken(counts, calendar)
    if counts[ENDING] == 1:
        counts[ENDING] = 0
        schedule_event(t, reals[NOW], END, 0)
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
            resume(t, actor, now)
        elif actor < 0:
            after = next_event(t, actors, WORK_ENDS, N_EVENTS)
            if after > now:
                for i in range(counts[N_SENDS]):
                    send(t, table, reals, sends[i], now)
                    reals[QUIET] = -np.inf
                    if devices.size > 0:
                        change_in_flight(t, sends[i] >> 1, 1, now)
                n = counts[N_SENDS]
                counts[N_SENDS] = 0
                if devices.size > 0 and n > 0:
                    continue  # sending may have rescheduled the next event
            if after > reals[QUIET]:
                status = call_advance(counts[ADVANCE], table, min(after, limit))
                if status == NETWORK_FULL:
                    return FULL
                if status == FOREIGN:
                    return OTHERS
                if status != IDLE:
                    n = net.n_out
                    net.n_out = 0
                    sort(net.out, n)
                    time = net.now
                    counts[N_TAKEN] += n
                    for i in range(n):
                        message = ((-1 - net.out[i].id) & LOCAL) % t.messages.size
                        if message == t.messages.size - 1:
                            net.out[counts[N_ELSEWHERE]].id = net.out[i].id
                            net.out[counts[N_ELSEWHERE]].rank = net.out[i].rank
                            counts[N_ELSEWHERE] += 1
                        else:
                            schedule_event(t, time, ANSWERED if message & 1 == 1 else ARRIVES, message >> 1)
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
            actor = handle_event(t, item, now)
        counts[PENDING] = -1
        if actor >= 0:
            status = run_operations(t, actor, now)
            if status != GOING:
                return status
        if left > 0 and counts[UPDATES_LEFT] == 0 and counts[RETURNS] == 1:
            return UPDATED
        if counts[ASKS] == 1 and counts[N_LOGGED] > logged and log[counts[N_LOGGED] - 1].what == SERVED:
            return ASKED
