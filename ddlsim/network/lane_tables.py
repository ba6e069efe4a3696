"""What actors and servers do, and the tables in which compiled code keeps it (:mod:`ddlsim.network.lanes`)."""

from __future__ import annotations

from typing import NamedTuple

from ddlsim.network.state import Floats, Ints, Records, record

# Kinds of operations
WORK = 0  # takes its seconds times the factor
OWED = 1  # work that somebody has asked for, with the factor of the step before
DRAW = 2  # takes the next factor
EXCHANGE = 3  # sends to all servers and waits for their answers
POST = 4  # sends to all peers
AWAIT = 5  # waits until what it has posted has arrived, and the letters of this round have come from all peers
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
MEET = 16  # waits for the update to which it has added
CLOCK = 17  # waits until it has added no more than `number` times more often than anybody else
TAKE = 18  # takes the version that there is; is written down, and Python is asked if `number` is 1

# ... with one message at a time, on the only way, to whom Python has chosen
CHOOSE = 20  # takes the next choice; if it is nobody, `number` operations are left out
DISPATCH = 21  # sends to who has been chosen, whose answer comes back if `number` is 1
JOIN = 22  # waits until what was sent last has arrived, or been answered

FETCH = 23  # waits until Python says that its next batch of samples is there

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
MANNER = 17
GATHERED = 18  # by these
MEETING, LAST_MEETING = 19, 20  # actors that wait for the next update, a list, -1 if there are none
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
N_COUNTS = 32

# Places in `reals` (float64)
NOW = 0
QUIET = 1  # the network is known to complete nothing before
WHEN = 2  # something ended that no actor has sent
NBYTES = 3  # sent: a compensated sum (ddlsim.network.sums), with its low word at the next place
N_REALS = 5

MANY = 1 << 62  # no bound
BLOCK = 64  # factors of an actor that are drawn ahead

#: end: -1 for nobody
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
#: behind it in a list; drawn: choices; begun: s, the gradient that it works on; idle, lost: s that it was not there,
#: and of work that crashes have undone; fell: when one did last, s; crash: its next one in `crashes`, -1 if there is
#: none ever; down: 1 from a crash that has undone work until it is back
ACTOR = record(
    start="f", factor="f", owed="f", queued="f", compute="f", communication="f", waiting="f", input="f",
    version="i", clock="i", op="n", left="n", cursor="n", posts="n", steps="n", slow="n", first="n", last="n",
    first_in="n", last_in="n", part="n", next="n", drawn="n", begun="f", idle="f", lost="f", fell="f", crash="n",
    down="n",
)  # fmt: skip
#: nbytes, route, source, target: of the message there, and of the answer (back_); arrived, begin: s, of the request;
#: seconds: until a peer answers; version: of the server when it answered last; read: letters that have come; under_way:
#: 1 if the sender waits for one; end: the server or peer that it leads to; next: behind it in the server's queue;
#: stage: of the message whose sender waits, below; lost: messages, services and answers to come of an actor that has
#: crashed since, which nobody waits for
WAY = record(
    nbytes="f", back_nbytes="f", arrived="f", begin="f", seconds="f", version="i", read="i", actor="n", end="n",
    next="n", under_way="n", route="n", back_route="n", source="n", target="n", stage="n", lost_message="n",
    lost_service="n", lost_answer="n",
)  # fmt: skip
#: stages of a message: its actor waits for none, it goes there, is in the queue, is served, is answered
NOWHERE, GOING_THERE, QUEUED, IN_SERVICE, ANSWERING_IT = range(5)
#: seconds: of a service; version: services so far; the queue goes from head to tail, -1 if it is empty; busy: 1 if it
#: serves somebody
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
    crashes: Records  # CRASH
    calendar: Records  # EVENT, a heap
    sends: Ints  # 2 * way, + 1 for its answer
    log: Records  # ROW
    pauses: Floats  # (n_pauses, 2) s, in which nothing starts
