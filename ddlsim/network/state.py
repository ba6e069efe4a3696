"""The arrays that the compiled event kernel works on.

One :class:`Net` holds everything as flat NumPy arrays; compiled functions see it through :mod:`ddlsim.network.view`.
Python makes the arrays longer when the kernel asks for it (:mod:`ddlsim.network.build`); the kernel never allocates.

Words: a *channel* has capacity (bytes/s); a *slot* is one message on its way; a *flow* is one that now uses
bandwidth; a *program* is a compiled
schedule; an *instance* is one execution of a program; a *thread* is one rank in one lane of a program.
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
N_FREE = 0  # free slots on the free stack
N_ACTIVE = 1  # flows that now use bandwidth; they have the numbers 0 .. N_ACTIVE - 1
N_NEW = 2  # how many of them (the last ones) have been added at this instant and have no rate yet
N_HEAP = 3  # entries in the heap of planned ends
HEAP_VALID = 4  # 1: the heap holds every active flow; 0: ends are found by scanning
FIFO_HEAD = 5  # timers whose times came in order
FIFO_TAIL = 6
N_TIMER_HEAP = 7  # timers that did not
EPOCH = 8  # mark of the current solve (or sweep over routes)
N_DIRTY = 9  # channels whose load changed at this instant
N_READY = 10  # threads that go on at this instant
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
REPLAY = 23  # 1: take the shortcuts of ddlsim.network.replay (0 only to prove that they change nothing)
STEPPED = 24  # threads that entered a step at this instant
STEPS_LEFT = 25  # least number of repetitions left to any of them; -1 if one is in its first
ROUND_INSTANTS = 26  # instants since the last barrier; negative: there was none
ROUND_THREADS = 27  # LIVE_THREADS at the last barrier
FAST_FORWARDED = 28  # messages replayed without events
USUALLY_FOUND = 29  # 16 times the flows that a search has found to be filled again, averaged over the last few
SHAPED = 30  # 1: some link has frames, a token bucket or acknowledgements (ddlsim.network.shaping)
HEADERS = 31  # 1: some program's messages have headers
LOG_REPEATS = 32  # replays logged
TIMER_SEQUENCE = 33  # timers that did not come in order, ever
TRANSPORTED = 34  # 1: some link names its transport (ddlsim.network.transport); SHAPED is 1 then, too
N_LINKED = 35  # channels of links; those behind are the limits of connections
N_MOMENTS = 36  # instants of the round that is put down (ddlsim.network.rounds), 0: none is
N_SPANS = 37  # spans that it consists of
ROUND_SIZE = 38  # messages of it
ROUND_DELIVERED = 39  # N_MESSAGES when it began
ROUND_TAIL = 40  # FIFO_TAIL and TIMER_SEQUENCE as of the last instant put down
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
N_TOUCHED = 56  # queues whose outflows are to be worked out again, and how many of them have been
N_REFRESHED = 57
AHEAD = 58  # sends that a thread need not wait for: under FIFO the sender's queue has taken them
# Addresses of extensions of the kernel (ddlsim.network.extensions), 0 until a network needs them
QUEUES_CODE = 59
SHAPING_CODE = 60
CHANGES_CODE = 61
ISSUE_SEQUENCE = 62  # messages issued, but for those of replayed rounds
SWEEPING = 63  # 1: rates of all flows are worked out anew, instead of searching for those that can change
N_COUNTS = 64

# Places in Net.reals (float64)
NOW = 0
THRESHOLD = 1  # rates below this cannot change at this instant
ROUND_TRANSFER_MIN = 2  # s from start to planned end, over the flows since the last barrier
ROUND_TRANSFER_MAX = 3
ROUND_DELIVERY_MIN = 4  # s from arrival to delivery, over the messages since then for which these differ
ROUND_DELIVERY_MAX = 5
ROUND_BEGIN = 7  # when the round began that is put down
NEXT_CHANGE = 8  # when something changes next, whatever messages do; inf: never
# Compensated sums (ddlsim.network.sums): the low word is at the next place
ISSUED = 9  # bytes of all messages issued so far, and
ISSUED_HOPS = 11  # the sum of each one's bytes times the channels of its route
DELIVERED = 13  # bytes of those that have been delivered
NARROWEST = 15  # the least capacity of a channel, bytes/s, where capacities do not change
QUEUE_TIME = 16  # s, of the event of a queue that is being handled
N_REALS = 17

MANY = 1 << 62
LAST = (1 << 32) - 1  # ends the list of a flow's channels
UNITS = 32  # that a window consists of (ddlsim.network.queues)
MOST_LIMITS = 8  # different limits of flows that are being filled (ddlsim.network.filling)
BLOCK = 64  # flows that are searched together for those that end
SAME_INSTANT = 1e-15  # relative; times this close are one instant (rounding of equal sums)

# Values of SLOT.state
FREE, WAITING, FLOWING, DELIVERING = 0, 1, 2, 3
CLEARED = 4  # its turn on its connection has come

# Values of THREAD.step besides the steps
NOT_JOINED, ENDED = -1, -2

# What `advance` returns
IDLE, VISIBLE, FULL, FOREIGN = 0, 1, 2, 3

# A single message has a handle: its sender's client, and in the lower bits what that client has numbered it
CLIENT_SHIFT = 46
LOCAL = (1 << CLIENT_SHIFT) - 1


def record(**fields: str) -> np.dtype[np.void]:
    """Return an aligned record type; ``f`` is float64, ``n`` int32 (counts and places) and ``i`` int64."""
    kinds = {"f": np.float64, "n": np.int32, "i": np.int64}
    return np.dtype([(name, kinds[kind]) for name, kind in fields.items()], align=True)


#: capacity bytes/s; its flows are pool[first:first+used] of `room` places; level: share at which it last filled
#: up, inf if it did not; nbytes carried, with the low word of the sum; busy s; since: start of the present busy
#: interval. 64 bytes: the events of a flow touch all of it, so a record is one cache line (build.channel_records)
CHANNEL = record(
    capacity="f", level="f", nbytes="f", nbytes_low="f", busy="f", since="f", first="n", room="n", used="n"
)
#: what the filling has left of a channel, bytes/s and flows; place: in the list of channels to be filled
FILLING = record(residual="f", unfrozen="n", place="n")
#: a heap of channels by key; and, apart from it, the list of channels to be filled
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
#: how messages travel on a route. eager: bytes, larger ones ask their receiver first (0: none does); round_trip: s;
#: full: bytes that are under way at full rate, initial: at first; timeout: s of idling that halves the window, or waits
#: for what was lost, besides that of a full port; least, single: bytes under way at least, and after a time-out
#: (least 0: nothing is lost); burst: most bytes at once for transports that keep their rate despite losses; 0: none;
#: window: bytes under way at most, of all its connections;
#: connection: that which carries them, -1: they go by themselves; channel: its limit, -1: it has none
WAY = record(
    eager="f",
    round_trip="f",
    full="f",
    initial="f",
    timeout="f",
    least="f",
    single="f",
    burst="f",
    window="f",
    connection="n",
    channel="n",
)
#: window: bytes under way at most, as of `since`, when its last message ended; first, last: slots of the messages that
#: wait for their turn, -1: none; busy: 1 while one has it; ordered: 0 if its messages do not wait for each other;
#: under_way: messages that have had their turn and not arrived; pending: those of them that have not started, the last
#: of which starts at `released` (s)
CONNECTION = record(
    window="f", since="f", released="f", first="n", last="n", busy="n", ordered="n", under_way="n", pending="n"
)
#: hops[first:last] are the channels of the route, each message crosses `n_hops`, one after the other; handled: bytes
#: for whose time a message uses them, per byte of it; occupies: factor on the overheads of its sender and receiver, 0.0
#: for messages of collectives whose known time includes them
ROUTE = record(latency="f", handled="f", occupies="f", first="n", last="n", n_hops="n")
#: of a route: bytes, as a compensated sum, and messages, issued so far; passed: bytes that have crossed the channels
#: that it had before it was another one
ROUTED = record(issued="f", issued_low="f", passed="f", n_issued="i")
#: from the re-routing of number `epoch` on (0: none), a route is another one; then passed: bytes that have crossed the
#: channels that it had until then, hops[was_first:was_last]
DETOUR = record(
    latency="f", passed="f", route="n", first="n", last="n", n_hops="n", was_first="n", was_last="n", epoch="n"
)
#: a message on its way. instance: -1 - handle for a single message; message: its number, or the target node of
#: a single message; repetition: of the step that it is sent in; sequence: larger than that of all messages that were
#: issued before
SLOT = record(nbytes="f", instance="i", sequence="i", message="n", route="n", state="n", repetition="n")
#: slot: the message; heap_place: in the heap of ends
FLOW = record(slot="n", heap_place="n")
#: an entry of a heap or of the ring buffer; the item is a flow or a slot
TIMED = record(time="f", item="i")
#: messages send:send_end are sent in the step; the messages tables[recv:recv_end] are received; next: the
#: thread's step after all repetitions, -1 if it has ended then
STEP = record(repeat="n", next="n", send="n", send_end="n", recv="n", recv_end="n")
#: src, dst: threads within the program; step: the receiver's; weight: first place in `weights`, stride: places
#: per repetition; source, target: nodes; counter: number within the program
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
#: tables[thread + i] is the first step of its thread i, -1 if it has none
PROGRAM = record(thread="i", n_ranks="i", n_lanes="i", sends_bound="i")
#: threads: where its part of `threads` starts; counters, ranks: where, in `counters`, the arrivals per message
#: and the lanes left per rank start; client: whose it is
INSTANCE = record(nbytes="f", program="i", threads="i", counters="i", ranks="i", ranks_left="i", client="i")
#: entered: the instant (N_EVENTS) at which it entered its step
THREAD = record(entered="i", step="n", repetition="n", sends_left="n", recvs_missing="n")
#: the queue of a channel, in bytes counted from when it last began to fill: those that had `arrived` and been `served`
#: at `time` (s). inflow, rate, capacity: bytes/s at which they arrive, leave, and may leave; head: at which those now
#: leaving arrived; through: integral of rate / head, so a message whose bytes arrived at a rate h leaves h times its
#: growth; marks first to last (-1: none) are changes of what arrives; burst: the message (an entry) that has the head
#: for itself, -1: none; arriving, leaving: messages with an inflow at the tail and at the head; expected: messages that
#: are here, were, or will be, until they have left; onward: the first of those here that have another link before them
QUEUE = record(
    time="f", arrived="f", served="f", inflow="f", head="f", rate="f", capacity="f", through="f", first="n", last="n",
    burst="n", arriving="n", leaving="n", expected="n", onward="n", backlogged="n", touched="n", dirty="n",
    heap_place="n",
)  # fmt: skip
#: a message on a link of its route. inflow, head: bytes/s at which its bytes arrive, and at which those now leaving
#: arrived; entered: bytes of the present unit that had arrived at `since` (s); passed: bytes that had left when the
#: integral of its queue was `through`; previous, next: in the list of the queue; stage: 0 before its first byte is
#: here, 1 while it is here, 2 when its last one has left
CROSSING = record(
    inflow="f", head="f", entered="f", since="f", passed="f", through="f", channel="n", previous="n", next="n",
    stage="n",
)  # fmt: skip
#: from the byte at `position` on, bytes of a message (an entry) arrived at `rate`; or a kind below
MARK = record(position="f", rate="f", entry="n", kind="n", next="n")
#: of the message in a slot: when its first byte entered, s; bytes in all, and that wait for the window; `unit`: bytes
#: handed to the first link at once (the last time `last`), `flying` of these are on their way, `allowed` at most; done:
#: when it is received and reduced, if it has overtaken an earlier repetition, s; next: 1 + slot of the next such one
TRAIN = record(start="f", wire="f", left="f", unit="f", last="f", done="f", hops="n", flying="n", allowed="n", next="n")
#: of a message: when the last repetition counts as delivered, s; under FIFO, the number of repetitions of which that is
#: known; held: 1 + slot of the first of those that have overtaken an earlier one, 0: none
ARRIVAL = record(last="f", known="n", held="n")
READY = record(instance="n", thread="n")
#: client: whose it is
OUT = record(id="i", rank="i", client="i")
#: a busy interval of a channel, and of another one (-1: of none)
BUSY = record(start="f", end="f", channel="n", other="n")
#: rows first:last of the log are one round, repeated `times` times from `now` on. Each time senders are busy, then come
#: the latency and the transfer (which is logged), then receivers are busy and reduce; s each
REPEAT = record(
    now="f", sending="f", latency="f", transfer="f", receiving="f", reducing="f", times="i", first="i", last="i"
)
#: at `time` (s) a channel has the capacities `free` and, while something flows the other way, `loaded` (bytes/s); or a
#: node sends and receives nothing until the time `free`, or goes on; or routes become those of the epoch `place`
#: (kinds: ddlsim.network.changes)
CHANGE = record(time="f", free="f", loaded="f", kind="n", place="n")
#: what was planned at the instant number `cause` of a round came `length` s later, at `time`, the instant `effect` (-1:
#: not yet)
SPAN = record(length="f", time="f", cause="n", effect="n")


class Net(NamedTuple):
    """Everything the kernel knows; the record types are above."""

    counts: Ints
    reals: Floats
    channels: Records  # CHANNEL
    marks: Ints  # (n_channels,) an EPOCH
    contended: Words  # a bit per channel: whether several flows are on it
    buckets: Records  # BUCKET, one per channel; empty unless SHAPED
    filling: Records  # FILLING, one per channel
    fill: Records  # FILL, one per channel
    loads: Floats  # (n_channels,) sum of the shares of flows that are not frozen; empty unless SPLIT
    keys: Floats  # shares of the channels to be filled
    dirty: Places  # channels whose load changed
    limits: Records  # LIMIT, (MOST_LIMITS + 2,); the last two stand for flows without a place, their rate is inf
    pool: Entries  # lists of (flow << HOP_SHIFT) + hop
    pool_copy: Entries  # scratch of the same size
    flows: Records  # FLOW
    flow_rate: Floats
    flow_next: Floats  # the rate that the filling gives it; negative: not yet. Else any number >= 0
    flow_end: Floats  # planned end
    flow_limit: Places  # (n_slots,) which of `limits` it has while it is being filled
    soonest: Floats  # the least of them among each BLOCK flows, as of the last search for the next end (without heap)
    flow_hops: Entries  # (n_slots << HOP_SHIFT,) channels, then LAST
    flow_share: Floats  # as flow_hops: the share of its bytes that takes the channel; empty unless SPLIT
    flow_place: Entries  # (n_slots << HOP_SHIFT,) place in each channel's list
    wire: Floats  # (n_slots,) bytes that a message puts on the wire; empty unless SHAPED
    heap: Records  # TIMED, planned ends of flows
    slots: Records  # SLOT
    free_slots: Places
    fifo: Records  # TIMED, timers of slots that came in order (ring buffer)
    timers: Records  # EVENT of ddlsim.network.calendar, heap of the others
    scratch: Places  # slots or flows found
    freezing: Entries  # flows being frozen
    nodes: Records  # NODE
    routes: Records  # ROUTE
    routed: Records  # ROUTED, one per route; empty unless SHARED
    frames: Records  # FRAME, one per route; empty unless SHAPED
    ways: Records  # WAY, one per route; this and the next six are empty unless TRANSPORTED
    connections: Records  # CONNECTION
    line: Places  # (n_slots,) the message that comes next on its connection, -1: none
    asked: Floats  # (n_slots,) when the request of a message reaches its receiver
    tries: Places  # (n_slots,) how often a message has been lost
    held: Floats  # (n_slots,) its part of what BUCKET.held counts
    parked: Places  # as `counters`: 1 + slot of the message whose receiver is not there yet, 0: none
    hops: Entries
    shares: Floats  # as `hops`: the share of a message's bytes; empty unless SPLIT
    programs: Records  # PROGRAM
    tables: Places
    steps: Records  # STEP
    messages: Records  # MESSAGE
    weights: Floats  # sizes of messages in units of the instance's nbytes
    headers: Floats  # bytes to be added to them; as long as `weights`
    instances: Records  # INSTANCE
    threads: Records  # THREAD
    counters: Places
    arrivals: Records  # ARRIVAL, as `counters`; only as far as repetitions can overtake each other
    ready: Records  # READY
    out: Records  # OUT, completions waiting to be read
    foreign: Records  # OUT, those of others; as long
    log: Records  # BUSY
    repeats: Records  # REPEAT
    spans: Records  # SPAN
    moments: Floats  # the instants of a round, s
    round_busy: Floats  # (n_channels,) busy s of channels when the round began
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
    """Return `array` made at least `size` long, new places holding zero."""
    if len(array) >= size:
        return array
    longer = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


class Table:
    """Addresses and lengths of the arrays of a `Net`, through which compiled code reaches them.

    :func:`~ddlsim.network.view.attach` reads it. Only those of arrays that have been replaced are written again.
    The last item is the address of the table itself.
    """

    def __init__(self) -> None:
        self.values: Ints = np.zeros(2 * len(Net._fields) + 1, dtype=np.int64)
        self.values[-1] = self.values.ctypes.data
        self._net: tuple[Any, ...] = (None,) * len(Net._fields)

    def of(self, net: Net) -> Ints:
        """Return the table of `net`, shape (2 * fields + 1,); valid as long as `net` lives and is not replaced."""
        if net is not self._net:
            arrays: Sequence[Any] = net
            for place, (array, before) in enumerate(zip(arrays, self._net, strict=True)):
                if array is not before:
                    self.values[2 * place] = array.ctypes.data
                    self.values[2 * place + 1] = len(array)
            self._net = net
        return self.values
