"""The arrays that the compiled event kernel works on.

One :class:`Net` holds everything as flat NumPy arrays; compiled functions access it through :mod:`ddlsim.network.view`.
The kernel never allocates: Python enlarges the arrays when the kernel asks for it (:mod:`ddlsim.network.build`).

Terms: a *channel* has a capacity (bytes/s); a *slot* holds one message in flight; a *flow* is a message that uses
bandwidth; a *program* is a compiled schedule; an *instance* is one execution of a program; a *thread* is one rank in
one lane of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Entries = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int32]
Records = npt.NDArray[Any]  # structured; compiled code reads fields as attributes, which mypy cannot know

# Places in Net.counts (int64)
NEXT_SLOT = 0  # slot from which a free one is searched; messages issued together are then together in memory
N_ACTIVE = 1  # flows that use bandwidth; their numbers are 0 .. N_ACTIVE - 1
N_NEW = 2  # those added at this instant, which have no rate yet (the last ones)
N_HEAP = 3  # entries in the heap of planned ends
HEAP_VALID = 4  # 1: the heap holds every active flow; 0: ends are found by scanning
FIFO_HEAD = 5  # ring buffer of timers that were set in order of time
FIFO_TAIL = 6
N_TIMER_HEAP = 7  # timers that were not
EPOCH = 8  # mark of the current solve (or sweep over routes)
N_DIRTY = 9  # channels whose load changed at this instant
N_READY = 10  # threads that continue at this instant
HOP_SHIFT = 11  # log2 of the places reserved per flow for its hops and LAST
POOL_USED = 12  # used part of the pool of channel lists
N_OUT = 13  # visible completions waiting to be read
LIVE_SENDS = 14  # bound on messages that live threads can have in flight
N_MESSAGES = 15  # messages delivered so far
N_EVENTS = 16  # instants handled
N_LIVE = 17  # instances in progress
LIVE_THREADS = 18  # threads of live instances that have not ended (joined or not)
LIVE_SINGLE = 19  # single messages in flight
N_DELIVERING = 20  # messages that have arrived but are not received and reduced yet
LOG_USED = 21  # busy intervals logged
LOG_ON = 22  # 1: log busy intervals
REPLAY = 23  # 1: replay rounds (0 only in tests, which show that they change nothing)
STEPPED = 24  # threads that entered a step at this instant
STEPS_LEFT = 25  # least number of repetitions left to any of these threads; -1 if one is in its first
ROUND_LOG = 26  # LOG_USED when the recorded round began
ROUND_THREADS = 27  # LIVE_THREADS then
FAST_FORWARDED = 28  # messages replayed without events
USUALLY_FOUND = 29  # 16 times the flows that a search has found to be filled again, averaged over the last few
SHAPED = 30  # 1: some link has frames, a token bucket or acknowledgements (ddlsim.network.shaping)
HEADERS = 31  # 1: some program's messages have headers
LOG_REPEATS = 32  # spans of replayed rounds logged
TIMER_SEQUENCE = 33  # number of timers that were not set in order of time
TRANSPORTED = 34  # 1: some link names its transport (ddlsim.network.transport); SHAPED is 1 then, too
N_LINKED = 35  # number of channels of links; the channels behind them limit connections
N_MOMENTS = 36  # instants recorded of the current round (ddlsim.network.rounds); 0: not recording
N_SPANS = 37  # spans recorded
ROUND_SIZE = 38  # messages of the round
ROUND_DELIVERED = 39  # N_MESSAGES at its beginning
ROUND_TAIL = 40  # FIFO_TAIL and TIMER_SEQUENCE at the last instant recorded
ROUND_SEQUENCE = 41
ROUND_NEW = 42  # flows that the last instant has added
RERATED = 43  # flows that have changed their rates since the round began
N_CHANGED = 44  # changes that have happened (ddlsim.network.changes)
N_STOPPED = 45  # nodes that stand still
CLIENT = 46  # who lets time pass now, of those who share the network
N_FOREIGN = 47  # completions of others than that one, which wait for them
SHARED = 48  # 1: there are several of them, and what each has issued is counted
SPLIT = 49  # 1: messages can take several links side by side, a share of their bytes each
FIFO = 50  # 1: links serve bytes in the order of their arrival (ddlsim.network.queues); 0: max-min fair shares
N_QUEUED = 51  # messages in queues; those that meet no other one on their routes are flows
N_JOINING = 52  # messages that enter queues at this instant
N_ENDED = 53  # messages that have left their last queue and are not reported yet
N_QUEUE_HEAP = 54  # entries in the heap of queues' next events
N_FREE_MARKS = 55
N_TOUCHED = 56  # queues whose outflows have to be recomputed, and number of recomputations
N_REFRESHED = 57
AHEAD = 58  # sends that a thread need not wait for; under FIFO, the sender's queue holds them
# Addresses of extensions of the kernel (ddlsim.network.extensions), 0 until a network needs them
QUEUES_CODE = 59
SHAPING_CODE = 60
CHANGES_CODE = 61
ISSUE_SEQUENCE = 62  # messages issued, but for those of replayed rounds
SWEEPING = 63  # 1: rates of all flows are worked out anew, instead of searching for those that can change
ROUNDS_CODE = 64  # address of the extension that replays rounds (ddlsim.network.extensions), 0 until a network needs it
LINK_SEED = 65  # of windows that vary between messages
N_COUNTS = 66

# Places in Net.reals (float64)
NOW = 0
THRESHOLD = 1  # rates below this cannot change at this instant
ROUND_BEGIN = 2  # when the recorded round began, or its last repetition, s
NEXT_CHANGE = 3  # time of the next scheduled change, s; inf: none
# Compensated sums (ddlsim.network.sums): the low word is at the next place
ISSUED = 4  # bytes of all messages issued so far
ISSUED_HOPS = 6  # sum of the bytes of each message times the channels of its route
DELIVERED = 8  # bytes of all messages delivered so far
NARROWEST = 10  # least capacity of all channels, bytes/s; used only if capacities do not change
QUEUE_TIME = 11  # time of the queue event that is being handled, s
N_REALS = 12

MANY = 1 << 62
LAST = (1 << 32) - 1  # ends the list of a flow's channels
UNITS = 32  # that a window consists of (ddlsim.network.queues)
SPANS = 64  # rounds with more instants, or more distinct spans between them, are not replayed
MOST_LIMITS = 8  # different limits of flows that are being filled (ddlsim.network.filling)
BLOCK = 64  # flows that are searched together for those that end
SAME_INSTANT = 1e-15  # relative; times this close are one instant (rounding of equal sums)

# Values of SLOT.state
FREE, WAITING, FLOWING, DELIVERING = 0, 1, 2, 3
CLEARED = 4  # it has its turn on its connection

# Values of THREAD.step that are not steps
NOT_JOINED, ENDED = -1, -2

# Status returned by `advance`
IDLE, VISIBLE, FULL, FOREIGN = 0, 1, 2, 3

# The handle of a single message: the number of the client that sends it, and in the lower bits the client's own number
CLIENT_SHIFT = 46
LOCAL = (1 << CLIENT_SHIFT) - 1


def record(**fields: str) -> np.dtype[np.void]:
    """Return an aligned record type; ``f`` is float64, ``n`` int32 (counts and places) and ``i`` int64."""
    kinds = {"f": np.float64, "n": np.int32, "i": np.int64}
    return np.dtype([(name, kinds[kind]) for name, kind in fields.items()], align=True)


#: capacity: bytes/s; its flows are pool[first:first+used], with space for `room`; level: share per flow at which it
#: last filled up, inf if it did not; nbytes: carried, a compensated sum; busy: s; since: start of the current busy
#: interval. The events of a flow access all fields, so a record has 64 bytes, one cache line (build.channel_records)
CHANNEL = record(
    capacity="f", level="f", nbytes="f", nbytes_low="f", busy="f", since="f", first="n", room="n", used="n"
)
#: state of the filling: remaining capacity, bytes/s, and number of flows; place: in the list of channels to be filled
FILLING = record(residual="f", unfrozen="n", place="n")
#: a heap of channels, ordered by key; component: independent of it, the list of channels to be filled
FILL = record(key="f", channel="n", component="n")
#: the limit of some flows that are being filled, bytes/s, and how many of these are left
LIMIT = record(rate="f", left="n")
#: overheads in s per message, reduce_time in s per byte; *_free: when that side of the node is free again;
#: stopped_until: s until which it stands still
NODE = record(send_overhead="f", recv_overhead="f", reduce_time="f", send_free="f", recv_free="f", stopped_until="f")
#: what shaping knows of a channel. burst, tokens: of its bucket, bytes; since: when `tokens` were counted, the channel
#: being idle; free, loaded: its capacity, bytes/s, while nothing and while something flows the other way, on `reverse`
#: (-1: there is no such channel, or it does not matter); passed: bytes on the wire that have passed at once;
#: room: bytes that may wait (inf: no end of them), held: those that windows keep there at least; n_slow: messages that
#: come too slowly to keep any waiting
BUCKET = record(
    burst="f", tokens="f", since="f", free="f", loaded="f", passed="f", room="f", held="f", reverse="n", n_slow="n"
)
#: bytes of a frame's headers and of its payload on a route; header 0: no frames
FRAME = record(header="f", payload="f")
#: transport on a route. eager: bytes; larger messages wait for their receiver (0: none); round_trip: s; full, initial:
#: bytes in flight at full rate and at first; timeout: s of idling that halve the window, or until a retransmission,
#: besides the time to drain a full port; least, single: bytes in flight at least, and after a time-out (least 0: no
#: losses); burst: largest burst, bytes, if the sender keeps its rate despite losses, else 0; window: bytes in flight at
#: most, over all connections; window_spread: standard deviation of its logarithm; connection: -1 if messages are
#: independent; channel: the one that limits its rate, or -1; queued_acks: 1 if acknowledgements wait in queues
TRANSPORT = record(
    eager="f",
    round_trip="f",
    full="f",
    initial="f",
    timeout="f",
    least="f",
    single="f",
    burst="f",
    window="f",
    window_spread="f",
    connection="n",
    channel="n",
    queued_acks="n",
)
#: window: bytes in flight at most, as of `since`, when its last message ended; first, last: slots of the messages that
#: wait for it, or -1; busy: 1 while a message has its turn; ordered: 0 if messages do not wait for each other;
#: under_way: messages that have had their turn and not arrived; pending: those that have not started, the last of which
#: starts at `released` (s); seq: number of sampled windows
CONNECTION = record(
    window="f", since="f", released="f", first="n", last="n", busy="n", ordered="n", under_way="n", pending="n", seq="n"
)
#: hops[first:last]: the channels of the route, `n_hops` of them per message; handled: bytes that determine how long a
#: message uses the channels, per byte; occupies: factor of the sender's and receiver's overheads, 0.0 for messages of
#: collectives whose known time includes them
ROUTE = record(latency="f", handled="f", occupies="f", first="n", last="n", n_hops="n")
#: traffic of a route: bytes issued (a compensated sum) and messages issued; passed: bytes that crossed its earlier
#: channels, before it was rerouted
ROUTED = record(issued="f", issued_low="f", passed="f", n_issued="i")
#: new channels of a route from epoch `epoch` on (0: none); passed: bytes that crossed its previous channels, which are
#: hops[was_first:was_last]
DETOUR = record(
    latency="f", passed="f", route="n", first="n", last="n", n_hops="n", was_first="n", was_last="n", epoch="n"
)
#: a message in flight. instance: -1 - handle for a single message; message: its number, or the target node of a single
#: message; repetition: of its step; sequence: larger than that of all messages issued earlier
SLOT = record(nbytes="f", instance="i", sequence="i", message="n", route="n", state="n", repetition="n")
#: slot: of the message; heap_place: in the heap of ends
FLOW = record(slot="n", heap_place="n")
#: an entry of a heap or of the ring buffer; item: a flow or a slot
TIMED = record(time="f", item="i")
#: messages send:send_end are sent in the step, messages tables[recv:recv_end] received; next: the thread's step after
#: all repetitions, -1 if that is the end
STEP = record(repeat="n", next="n", send="n", send_end="n", recv="n", recv_end="n")
#: src, dst: threads within the program; step: of the receiver; weight: first place in `weights`; stride: places per
#: repetition; source, target: nodes; counter: number within the program
MESSAGE = record(
    src="n",
    dst="n",
    step="n",
    route="n",
    weight="n",
    stride="n",
    reduce="n",
    source="n",
    target="n",
    counter="n",
)
#: tables[thread + i] is the first step of thread i, -1 if it has none
PROGRAM = record(thread="i", n_ranks="i", n_lanes="i", sends_bound="i")
#: threads: place of its first thread; counters, ranks: places in `counters` of the arrivals per message and the
#: unfinished lanes per rank; client: owner
INSTANCE = record(nbytes="f", program="i", threads="i", counters="i", ranks="i", ranks_left="i", client="i")
#: entered: instant (value of N_EVENTS) at which the thread entered its step
THREAD = record(entered="i", step="n", repetition="n", sends_left="n", recvs_missing="n")
#: the queue of a channel. Bytes are counted from the beginning of its backlog: `arrived` and `served` by `time` (s).
#: inflow, rate, capacity: bytes/s arriving, leaving, and at most; head: arrival rate of the bytes that now leave;
#: through: integral of rate / head, so a message that arrived at a rate h leaves h times its growth; first, last: marks
#: of changes in the inflow, or -1; burst: message (an entry) that has the head for itself, or -1; arriving, leaving:
#: number of messages with an inflow at the tail and at the head; expected: messages that have not left, including those
#: that have not arrived yet; onward: list of its messages that continue to another link
QUEUE = record(
    time="f", arrived="f", served="f", inflow="f", head="f", rate="f", capacity="f", through="f", first="n", last="n",
    burst="n", arriving="n", leaving="n", expected="n", onward="n", backlogged="n", touched="n", dirty="n",
    heap_place="n",
)  # fmt: skip
#: a message on a link of its route. inflow, head: arrival rate, bytes/s, of its bytes at the tail and at the head;
#: entered: bytes of its unit that had arrived by `since` (s); passed: bytes that had left when the queue's integral was
#: `through`; previous, next: in the queue's list; stage: 0 before its first byte arrives, 1 while it is here, 2 after
#: it has left
CROSSING = record(
    inflow="f", head="f", entered="f", since="f", passed="f", through="f", channel="n", previous="n", next="n",
    stage="n",
)  # fmt: skip
#: from byte `position` on, bytes of a message (an entry) arrived at `rate`; or an event of another kind (see queues.py)
MARK = record(position="f", rate="f", entry="n", kind="n", next="n")
#: a message under FIFO. start: of its first byte, s; wire, left: bytes in all, and not yet sent; unit: bytes that enter
#: the first link at once (last: most recently); flying, allowed: units in flight, and at most; done: when it is
#: received and reduced, s, if it has overtaken an earlier repetition; next: 1 + slot of the next such message
TRAIN = record(start="f", wire="f", left="f", unit="f", last="f", done="f", hops="n", flying="n", allowed="n", next="n")
#: deliveries of a message's repetitions. last: time of the last one, s; known: number of deliveries (under FIFO); held:
#: 1 + slot of the first repetition that has overtaken an earlier one, 0: none
ARRIVAL = record(last="f", known="n", held="n")
READY = record(instance="n", thread="n")
#: client: whose it is
OUT = record(id="i", rank="i", client="i")
#: a busy interval of a channel, and of another one (-1: of none)
BUSY = record(start="f", end="f", channel="n", other="n")
#: a span (see SPAN) of a round, which began at `begin` (s), is logged in the rows first:last, and was repeated `times`
#: times
REPEAT = record(begin="f", before="f", length="f", times="i", first="i", last="i", cause="n", effect="n")
#: at `time` (s), a channel gets the capacities `free` and, with traffic on its reverse, `loaded` (bytes/s); or a node
#: is paused until `free`, or resumes; or routes become those of epoch `place` (kinds: ddlsim.network.changes)
CHANGE = record(time="f", free="f", loaded="f", kind="n", place="n")
#: an event scheduled at the instant number `cause` of a round, `before` plus `length` s ahead: it takes place at `time`
#: (s), at the instant number `effect` (-1: not yet)
SPAN = record(before="f", length="f", time="f", cause="n", effect="n")


class Net(NamedTuple):
    """Complete state of the kernel; the record types are above."""

    counts: Ints
    reals: Floats
    channels: Records  # CHANNEL
    marks: Ints  # (n_channels,) an EPOCH
    contended: Words  # a bit per channel: whether several flows are on it
    buckets: Records  # BUCKET, one per channel; empty unless SHAPED
    filling: Records  # FILLING, one per channel
    fill: Records  # FILL, one per channel
    loads: Floats  # (n_channels,) sum of the shares of flows that are not frozen; empty unless SPLIT
    keys: Floats  # (n_channels,) sum of the shares of unfrozen flows; empty unless SPLIT
    dirty: Places  # channels whose load changed
    limits: Records  # LIMIT, (MOST_LIMITS + 2,); the last two stand for flows without a place, their rate is inf
    pool: Entries  # lists of (flow << HOP_SHIFT) + hop
    pool_copy: Entries  # scratch of the same size
    flows: Records  # FLOW
    flow_rate: Floats
    flow_next: Floats  # rate assigned by the filling; negative: not yet. Otherwise any number >= 0
    flow_end: Floats  # planned end
    flow_limit: Places  # (n_slots,) which of `limits` it has while it is being filled
    soonest: Floats  # the least of them among each BLOCK flows, as of the last search for the next end (without heap)
    flow_hops: Entries  # (n_slots << HOP_SHIFT,) channels, then LAST
    flow_share: Floats  # as flow_hops: the share of the message's bytes on the channel; empty unless SPLIT
    flow_place: Entries  # (n_slots << HOP_SHIFT,) place in each channel's list
    wire: Floats  # (n_slots,) bytes of a message on the wire; empty unless SHAPED
    heap: Records  # TIMED, planned ends of flows
    slots: Records  # SLOT
    fifo: Records  # TIMED, timers of slots that were set in order of time (ring buffer)
    timers: Records  # EVENT of ddlsim.network.calendar, heap of the others
    scratch: Places  # slots or flows, as temporary lists
    freezing: Entries  # flows being frozen
    nodes: Records  # NODE
    routes: Records  # ROUTE
    routed: Records  # ROUTED, one per route; empty unless SHARED
    frames: Records  # FRAME, one per route; empty unless SHAPED
    transports: Records  # TRANSPORT, one per route; this and the next six are empty unless TRANSPORTED
    connections: Records  # CONNECTION
    line: Places  # (n_slots,) next message on the same connection, -1: none
    asked: Floats  # (n_slots,) when the rendezvous request of a message reaches its receiver, s
    tries: Places  # (n_slots,) how often a message has been lost
    held: Floats  # as `flow_hops`, by slot: the part of BUCKET.held on each hop; on the first, the bytes of the window
    parked: Places  # as `counters`: 1 + slot of the message whose receiver is not ready yet, 0: none
    hops: Entries
    shares: Floats  # as `hops`: the share of a message's bytes; empty unless SPLIT
    programs: Records  # PROGRAM
    tables: Places
    steps: Records  # STEP
    messages: Records  # MESSAGE
    weights: Floats  # sizes of messages, in units of the instance's nbytes
    headers: Floats  # header bytes of messages; as long as `weights`
    instances: Records  # INSTANCE
    threads: Records  # THREAD
    counters: Places
    arrivals: Records  # ARRIVAL, as `counters`; only as long as needed for repetitions that can overtake each other
    ready: Records  # READY
    out: Records  # OUT, uncollected completions
    foreign: Records  # OUT, those of other clients; as long as `out`
    log: Records  # BUSY
    repeats: Records  # REPEAT, the spans of replayed rounds, one round after the other
    spans: Records  # SPAN
    moments: Floats  # instants of the recorded round, s
    round_busy: Floats  # (n_channels,) busy s of channels at the beginning of the round
    queues: Records  # QUEUE, one per channel; this and the next eight are empty unless FIFO
    queue_heap: Records  # TIMED, next events of queues
    touched: Places  # channels
    crossings: Records  # CROSSING, as flow_hops
    queue_marks: Records  # MARK
    free_marks: Places
    trains: Records  # TRAIN, one per slot
    joining: Places  # slots
    ended: Places  # slots
    changes: Records  # CHANGE, by time
    detours: Records  # DETOUR


Array = TypeVar("Array", Ints, Floats, Entries, Words, Places, Records)


def grown(array: Array, size: int) -> Array:
    """Return `array` extended to at least `size` items with zeros."""
    if len(array) >= size:
        return array
    longer = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


class Table:
    """Addresses and lengths of the arrays of a `Net`, through which compiled code accesses them.

    :func:`~ddlsim.network.view.attach` reads it. Only the entries of replaced arrays are rewritten. The last item is
    the address of the table itself.
    """

    def __init__(self) -> None:
        self.values: Ints = np.zeros(2 * len(Net._fields) + 1, dtype=np.int64)
        self.values[-1] = self.values.ctypes.data
        self._net: tuple[Any, ...] = (None,) * len(Net._fields)

    def of(self, net: Net) -> Ints:
        """Return the table of `net`, shape (2 * fields + 1,); valid as long as `net` exists and is not replaced."""
        if net is not self._net:
            arrays: Sequence[Any] = net
            for place, (array, before) in enumerate(zip(arrays, self._net, strict=True)):
                if array is not before:
                    self.values[2 * place] = array.ctypes.data
                    self.values[2 * place + 1] = len(array)
            self._net = net
        return self.values
