"""The arrays that the compiled event kernel works on.

One :class:`Net` holds everything as flat NumPy arrays; compiled functions access it through :mod:`ddlsim.network.view`.
The kernel never allocates: Python enlarges the arrays when the kernel asks for it (:mod:`ddlsim.network.build`).

Terms: a *channel* has a capacity (bytes/s); a *slot* holds one message in flight; a *flow* is a message that uses
bandwidth; a *program* is a compiled schedule; an *instance* is one execution of a program; a *thread* is one rank in
one lane of a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ints = Annotated[npt.NDArray[np.int64], np.int64]
Floats = Annotated[npt.NDArray[np.float64], np.float64]
Bools = Annotated[npt.NDArray[np.bool_], np.bool_]
Entries = Annotated[npt.NDArray[np.uint32], np.uint32]
Words = Annotated[npt.NDArray[np.uint64], np.uint64]
Places = Annotated[npt.NDArray[np.int32], np.int32]
Records = npt.NDArray[Any]  # structured; compiled code reads fields as attributes, which mypy cannot know


class Numbers:
    """Named numbers in an array, which are attributes of the net in compiled code (:mod:`ddlsim.network.view`)."""

    array: npt.NDArray[Any]
    places: ClassVar[dict[str, int]]

    def __init_subclass__(cls) -> None:
        cls.places = {name: place for place, name in enumerate(cls.__annotations__)}

    def __init__(self, dtype: type[np.int64 | np.float64]) -> None:
        vars(self)["array"] = np.zeros(len(self.places), dtype=dtype)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> float:
            return self.array.item(self.places[name])

        def __setattr__(self, name: str, value: float) -> None:
            self.array[self.places[name]] = value


class Counts(Numbers):
    """Numbers of a net, int64."""

    next_slot: int  # slot from which a free one is searched; messages issued together are then together in memory
    n_active: int  # flows that use bandwidth; their numbers are 0 .. n_active - 1
    n_new: int  # those added at this instant, which have no rate yet (the last ones)
    n_heap: int  # entries in the heap of planned ends
    heap_valid: int  # 1: the heap holds every active flow; 0: ends are found by scanning
    fifo_head: int  # ring buffer of timers that were set in order of time
    fifo_tail: int
    n_timer_heap: int  # timers that were not
    epoch: int  # mark of the current solve (or sweep over routes)
    n_dirty: int  # channels whose load changed at this instant
    n_ready: int  # threads that continue at this instant
    hop_shift: int  # log2 of the places reserved per flow for its hops and LAST
    pool_used: int  # used part of the pool of channel lists
    n_out: int  # visible completions waiting to be read
    live_sends: int  # bound on messages that live threads can have in flight
    n_messages: int  # messages delivered so far
    n_events: int  # instants handled
    n_live: int  # instances in progress
    live_threads: int  # threads of live instances that have not ended (joined or not)
    live_single: int  # single messages in flight
    n_delivering: int  # messages that have arrived but are not received and reduced yet
    log_used: int  # busy intervals logged
    log_on: int  # 1: log busy intervals
    replay: int  # 1: replay rounds (0 only in tests, which show that they change nothing)
    stepped: int  # threads that entered a step at this instant
    steps_left: int  # least number of repetitions left to any of these threads; -1 if one is in its first
    round_log: int  # log_used when the recorded round began
    round_threads: int  # live_threads then
    fast_forwarded: int  # messages replayed without events
    usually_found: int  # 16 times the flows that a search has found to be filled again, averaged over the last few
    shaped: int  # 1: some link has frames, a token bucket or acknowledgements (ddlsim.network.transport)
    has_headers: int  # 1: some program's messages have headers
    log_repeats: int  # spans of replayed rounds logged
    timer_sequence: int  # number of timers that were not set in order of time
    transported: int  # 1: some link names its transport (ddlsim.network.transport); shaped is 1 then, too
    n_linked: int  # number of channels of links; the channels behind them limit connections
    n_moments: int  # instants recorded of the current round (ddlsim.network.rounds); 0: not recording
    n_spans: int  # spans recorded
    round_size: int  # messages of the round
    round_delivered: int  # n_messages at its beginning
    round_tail: int  # fifo_tail and timer_sequence at the last instant recorded
    round_sequence: int
    round_new: int  # flows that the last instant has added
    rerated: int  # flows that have changed their rates since the round began
    n_changed: int  # changes that have happened (ddlsim.network.changes)
    n_stopped: int  # nodes that stand still
    client: int  # who lets time pass now, of those who share the network
    n_foreign: int  # completions of others than that one, which wait for them
    shared: int  # 1: there are several of them, and what each has issued is counted
    split: int  # 1: messages can take several links side by side, a share of their bytes each
    is_fifo: int  # 1: links serve bytes in the order of their arrival (ddlsim.network.queues); 0: max-min fair shares
    n_queued: int  # messages in queues; those that meet no other one on their routes are flows
    n_joining: int  # messages that enter queues at this instant
    n_ended: int  # messages that have left their last queue and are not reported yet
    n_queue_heap: int  # entries in the heap of queues' next events
    n_free_marks: int
    n_touched: int  # queues whose outflows have to be recomputed, and number of recomputations
    n_refreshed: int
    ahead: int  # sends that a thread need not wait for; under FIFO, the sender's queue holds them
    # Addresses of extensions of the kernel (ddlsim.network.extensions), 0 until a network needs them
    work_queues_code: int
    shape_code: int
    change_code: int
    replay_rounds_code: int
    issue_sequence: int  # messages issued, but for those of replayed rounds
    sweeping: int  # 1: rates of all flows are worked out anew, instead of searching for those that can change
    link_seed: int  # of windows that vary between messages


class Reals(Numbers):
    """Numbers of a net, float64; a name with _low is the low word of a compensated sum (ddlsim.network.flows)."""

    now: float
    threshold: float  # rates below this cannot change at this instant
    round_begin: float  # when the recorded round began, or its last repetition, s
    next_change: float  # time of the next scheduled change, s; inf: none
    issued: float  # bytes of all messages issued so far
    issued_low: float
    issued_hops: float  # sum of the bytes of each message times the channels of its route
    issued_hops_low: float
    delivered: float  # bytes of all messages delivered so far
    delivered_low: float
    narrowest: float  # least capacity of all channels, bytes/s; used only if capacities do not change
    queue_time: float  # time of the queue event that is being handled, s


MANY = 1 << 62
LAST = (1 << 32) - 1  # ends the list of a flow's channels
UNITS = 32  # that a window consists of (ddlsim.network.queues)
SPANS = 64  # rounds with more instants, or more distinct spans between them, are not replayed
MOST_LIMITS = 8  # different limits of flows that are being filled (ddlsim.network.maxmin)
BLOCK = 64  # flows that are searched together for those that end
SAME_INSTANT = 1e-15  # relative; times this close are one instant (rounding of equal sums)

# Values of SLOT.state
FREE, WAITING, FLOWING, DELIVERING = 0, 1, 2, 3
CLEARED = 4  # it has its turn on its connection

# Values of THREAD.step that are not steps
NOT_JOINED, ENDED = -1, -2

# Status returned by `advance`
IDLE, VISIBLE, FULL, FOREIGN = 0, 1, 2, 3

# What an extension of the kernel does (ddlsim.network.extensions)
SERVE, SETTLE, ENTER = 0, 1, 2  # work_queues
START, NEXT_IN_LINE = 0, 1  # shape
REPLAY, WATCH, OBSERVE = 0, 1, 2  # replay_rounds

# The handle of a single message: the number of the client that sends it, and in the lower bits the client's own number
CLIENT_SHIFT = 46
LOCAL = (1 << CLIENT_SHIFT) - 1


def record(*groups: str) -> np.dtype[np.void]:
    """Return an aligned record type, given groups of fields of one kind: the kind, then the names. ``f`` is float64,
    ``n`` int32 (counts and places) and ``i`` int64."""
    kinds = {"f": np.float64, "n": np.int32, "i": np.int64}
    words = [group.split() for group in groups]
    return np.dtype([(name, kinds[kind]) for kind, *names in words for name in names], align=True)


#: capacity: bytes/s; its flows are pool[first:first+used], with space for `room`; level: share per flow at which it
#: last filled up, inf if it did not; nbytes: carried, a compensated sum; busy: s; since: start of the current busy
#: interval. The events of a flow access all fields, so a record has 64 bytes, one cache line (build.channel_records)
CHANNEL = record("f capacity level nbytes nbytes_low busy since", "n first room used")
#: state of the filling: remaining capacity, bytes/s, and number of flows; place: in the list of channels to be filled
FILLING = record("f residual", "n unfrozen place")
#: a heap of channels, ordered by key; component: independent of it, the list of channels to be filled
FILL = record("f key", "n channel component")
#: the limit of some flows that are being filled, bytes/s, and how many of these are left
LIMIT = record("f rate", "n left")
#: overheads in s per message, reduce_time in s per byte; *_free: when that side of the node is free again;
#: stopped_until: s until which it stands still
NODE = record("f send_overhead recv_overhead reduce_time send_free recv_free stopped_until")
#: what shaping knows of a channel. burst, tokens: of its bucket, bytes; since: when `tokens` were counted, the channel
#: being idle; free, loaded: its capacity, bytes/s, while nothing and while something flows the other way, on `reverse`
#: (-1: there is no such channel, or it does not matter); passed: bytes on the wire that have passed at once;
#: room: bytes that may wait (inf: no end of them), held: those that windows keep there at least; n_slow: messages that
#: come too slowly to keep any waiting
BUCKET = record("f burst tokens since free loaded passed room held", "n reverse n_slow")
#: bytes of a frame's headers and of its payload on a route; header 0: no frames
FRAME = record("f header payload")
#: transport on a route. eager: bytes; larger messages wait for their receiver (0: none); round_trip: s; full, initial:
#: bytes in flight at full rate and at first; timeout: s of idling that halve the window, or until a retransmission,
#: besides the time to drain a full port; least, single: bytes in flight at least, and after a time-out (least 0: no
#: losses); burst: largest burst, bytes, if the sender keeps its rate despite losses, else 0; window: bytes in flight at
#: most, over all connections; window_spread: standard deviation of its logarithm; connection: -1 if messages are
#: independent; channel: the one that limits its rate, or -1; queued_acks: 1 if acknowledgements wait in queues
TRANSPORT = record(
    "f eager round_trip full initial timeout least single burst window window_spread",
    "n connection channel queued_acks",
)
#: window: bytes in flight at most, as of `since`, when its last message ended; first, last: slots of the messages that
#: wait for it, or -1; busy: 1 while a message has its turn; ordered: 0 if messages do not wait for each other;
#: under_way: messages that have had their turn and not arrived; pending: those that have not started, the last of which
#: starts at `released` (s); seq: number of sampled windows
CONNECTION = record("f window since released", "n first last busy ordered under_way pending seq")
#: hops[first:last]: the channels of the route, `n_hops` of them per message; handled: bytes that determine how long a
#: message uses the channels, per byte; occupies: factor of the sender's and receiver's overheads, 0.0 for messages of
#: collectives whose known time includes them
ROUTE = record("f latency handled occupies", "n first last n_hops")
#: traffic of a route: bytes issued (a compensated sum) and messages issued; passed: bytes that crossed its earlier
#: channels, before it was rerouted
ROUTED = record("f issued issued_low passed", "i n_issued")
#: new channels of a route from epoch `epoch` on (0: none); passed: bytes that crossed its previous channels, which are
#: hops[was_first:was_last]
DETOUR = record("f latency passed", "n route first last n_hops was_first was_last epoch")
#: a message in flight. instance: -1 - handle for a single message; message: its number, or the target node of a single
#: message; repetition: of its step; sequence: larger than that of all messages issued earlier
SLOT = record("f nbytes", "i instance sequence", "n message route state repetition")
#: slot: of the message; heap_place: in the heap of ends
FLOW = record("n slot heap_place")
#: an entry of a heap or of the ring buffer; item: a flow or a slot
TIMED = record("f time", "i item")
#: sequence: larger than that of all events inserted earlier
EVENT = record("f time", "i sequence item")
#: messages send:send_end are sent in the step, messages tables[recv:recv_end] received; next: the thread's step after
#: all repetitions, -1 if that is the end
STEP = record("n repeat next send send_end recv recv_end")
#: src, dst: threads within the program; step: of the receiver; weight: first place in `weights`; stride: places per
#: repetition; source, target: nodes; counter: number within the program
MESSAGE = record("n src dst step route weight stride reduce source target counter")
#: tables[thread + i] is the first step of thread i, -1 if it has none
PROGRAM = record("i thread n_ranks n_lanes sends_bound")
#: threads: place of its first thread; counters, ranks: places in `counters` of the arrivals per message and the
#: unfinished lanes per rank; client: owner
INSTANCE = record("f nbytes", "i program threads counters ranks ranks_left client")
#: entered: instant (value of N_EVENTS) at which the thread entered its step
THREAD = record("i entered", "n step repetition sends_left recvs_missing")
#: the queue of a channel. Bytes are counted from the beginning of its backlog: `arrived` and `served` by `time` (s).
#: inflow, rate, capacity: bytes/s arriving, leaving, and at most; head: arrival rate of the bytes that now leave;
#: through: integral of rate / head, so a message that arrived at a rate h leaves h times its growth; first, last: marks
#: of changes in the inflow, or -1; burst: message (an entry) that has the head for itself, or -1; arriving, leaving:
#: number of messages with an inflow at the tail and at the head; expected: messages that have not left, including those
#: that have not arrived yet; onward: list of its messages that continue to another link
QUEUE = record(
    "f time arrived served inflow head rate capacity through",
    "n first last burst arriving leaving expected onward backlogged touched dirty heap_place",
)
#: a message on a link of its route. inflow, head: arrival rate, bytes/s, of its bytes at the tail and at the head;
#: entered: bytes of its unit that had arrived by `since` (s); passed: bytes that had left when the queue's integral was
#: `through`; previous, next: in the queue's list; stage: 0 before its first byte arrives, 1 while it is here, 2 after
#: it has left
CROSSING = record("f inflow head entered since passed through", "n channel previous next stage")
#: from byte `position` on, bytes of a message (an entry) arrived at `rate`; or an event of another kind (see queues.py)
MARK = record("f position rate", "n entry kind next")
#: a message under FIFO. start: of its first byte, s; wire, left: bytes in all, and not yet sent; unit: bytes that enter
#: the first link at once (last: most recently); flying, allowed: units in flight, and at most; done: when it is
#: received and reduced, s, if it has overtaken an earlier repetition; next: 1 + slot of the next such message
TRAIN = record("f start wire left unit last done", "n hops flying allowed next")
#: deliveries of a message's repetitions. last: time of the last one, s; delivered: their number (under FIFO); held:
#: 1 + slot of the first repetition that has overtaken an earlier one, 0: none
ARRIVAL = record("f last", "n delivered held")
READY = record("n instance thread")
#: client: whose it is
OUT = record("i id rank client")
#: a busy interval of a channel, and of another one (-1: of none)
BUSY = record("f start end", "n channel other")
#: a span (see SPAN) of a round, which began at `begin` (s), is logged in the rows first:last, and was repeated `times`
#: times
REPEAT = record("f begin before length", "i times first last", "n cause effect")
#: at `time` (s), a channel gets the capacities `free` and, with traffic on its reverse, `loaded` (bytes/s); or a node
#: is paused until `free`, or resumes; or routes become those of epoch `place` (kinds: ddlsim.network.changes)
CHANGE = record("f time free loaded", "n kind place")
#: an event scheduled at the instant number `cause` of a round, `before` plus `length` s ahead: it takes place at `time`
#: (s), at the instant number `effect` (-1: not yet)
SPAN = record("f before length time", "n cause effect")


class Net(NamedTuple):
    """Complete state of the kernel. Arrays are annotated with their data types."""

    counts: Counts
    reals: Reals
    channels: Annotated[Records, CHANNEL]
    marks: Ints  # (n_channels,) an `epoch`
    contended: Words  # a bit per channel: whether several flows are on it
    buckets: Annotated[Records, BUCKET]  # one per channel; empty unless `shaped`
    filling: Annotated[Records, FILLING]  # one per channel
    fill: Annotated[Records, FILL]  # one per channel
    loads: Floats  # (n_channels,) sum of the shares of flows that are not frozen; empty unless `split`
    keys: Floats  # (n_channels,) sum of the shares of unfrozen flows; empty unless `split`
    dirty: Places  # channels whose load changed
    limits: Annotated[Records, LIMIT]  # (MOST_LIMITS + 2,); the last two, of rate inf, are for flows without a place
    pool: Entries  # lists of (flow << hop_shift) + hop
    pool_copy: Entries  # scratch of the same size
    flows: Annotated[Records, FLOW]
    flow_rate: Floats
    flow_next: Floats  # rate assigned by the filling; negative: not yet. Otherwise any number >= 0
    flow_end: Floats  # planned end
    flow_limit: Places  # (n_slots,) which of `limits` it has while it is being filled
    soonest: Floats  # the least of them among each BLOCK flows, as of the last search for the next end (without heap)
    flow_hops: Entries  # (n_slots << hop_shift,) channels, then LAST
    flow_share: Floats  # as flow_hops: the share of the message's bytes on the channel; empty unless `split`
    flow_place: Entries  # (n_slots << hop_shift,) place in each channel's list
    wire: Floats  # (n_slots,) bytes of a message on the wire; empty unless `shaped`
    heap: Annotated[Records, TIMED]  # planned ends of flows
    slots: Annotated[Records, SLOT]
    fifo: Annotated[Records, TIMED]  # timers of slots that were set in order of time (ring buffer)
    timers: Annotated[Records, EVENT]  # heap of the others
    scratch: Places  # slots or flows, as temporary lists
    freezing: Entries  # flows being frozen
    nodes: Annotated[Records, NODE]
    routes: Annotated[Records, ROUTE]
    routed: Annotated[Records, ROUTED]  # one per route; empty unless `shared`
    frames: Annotated[Records, FRAME]  # one per route; empty unless `shaped`
    transports: Annotated[Records, TRANSPORT]  # one per route; this and the next six are empty unless `transported`
    connections: Annotated[Records, CONNECTION]
    line: Places  # (n_slots,) next message on the same connection, -1: none
    asked: Floats  # (n_slots,) when the rendezvous request of a message reaches its receiver, s
    tries: Places  # (n_slots,) how often a message has been lost
    held: Floats  # as `flow_hops`, by slot: the part of BUCKET.held on each hop; on the first, the bytes of the window
    parked: Places  # as `counters`: 1 + slot of the message whose receiver is not ready yet, 0: none
    hops: Entries
    shares: Floats  # as `hops`: the share of a message's bytes; empty unless `split`
    programs: Annotated[Records, PROGRAM]
    tables: Places
    steps: Annotated[Records, STEP]
    messages: Annotated[Records, MESSAGE]
    weights: Floats  # sizes of messages, in units of the instance's nbytes
    headers: Floats  # header bytes of messages; as long as `weights`
    instances: Annotated[Records, INSTANCE]
    threads: Annotated[Records, THREAD]
    counters: Places
    arrivals: Annotated[Records, ARRIVAL]  # as `counters`, if repetitions can overtake each other
    ready: Annotated[Records, READY]
    out: Annotated[Records, OUT]  # uncollected completions
    foreign: Annotated[Records, OUT]  # those of other clients; as long as `out`
    log: Annotated[Records, BUSY]
    repeats: Annotated[Records, REPEAT]  # the spans of replayed rounds, one round after the other
    spans: Annotated[Records, SPAN]
    moments: Floats  # instants of the recorded round, s
    round_busy: Floats  # (n_channels,) busy s of channels at the beginning of the round
    queues: Annotated[Records, QUEUE]  # one per channel; this and the next eight are empty unless FIFO
    queue_heap: Annotated[Records, TIMED]  # next events of queues
    touched: Places  # channels
    crossings: Annotated[Records, CROSSING]  # as flow_hops
    queue_marks: Annotated[Records, MARK]
    free_marks: Places
    trains: Annotated[Records, TRAIN]  # one per slot
    joining: Places  # slots
    ended: Places  # slots
    changes: Annotated[Records, CHANGE]  # by time
    detours: Annotated[Records, DETOUR]


#: compiled code's view of a net: its arrays and, as attributes, the numbers in `counts` and `reals`
View: TypeAlias = Any
Array = TypeVar("Array", Ints, Floats, Entries, Words, Places, Records)


def grown(array: Array, size: int) -> Array:
    """Return `array` extended to at least `size` items with zeros."""
    if len(array) >= size:
        return array
    longer = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def arrays_of(net: Net) -> list[Any]:
    """Return all arrays of a net, in the order of its fields."""
    return [item.array if isinstance(item, Numbers) else item for item in net]


class Table:
    """Addresses and lengths of the arrays of a `Net`, through which compiled code accesses them.

    :func:`~ddlsim.network.view.attach` reads it. Only the entries of replaced arrays are rewritten. The last item is
    the address of the table itself.
    """

    def __init__(self) -> None:
        self.values: Ints = np.zeros(2 * len(Net._fields) + 1, dtype=np.int64)
        self.values[-1] = self.values.ctypes.data
        self._arrays: list[Any] = [None] * len(Net._fields)
        self._net: Net | None = None

    def of(self, net: Net) -> Ints:
        """Return the table of `net`, shape (2 * fields + 1,); valid as long as `net` exists and is not replaced."""
        if net is not self._net:
            arrays = arrays_of(net)
            for place, (array, before) in enumerate(zip(arrays, self._arrays, strict=True)):
                if array is not before:
                    self.values[2 * place] = array.ctypes.data
                    self.values[2 * place + 1] = len(array)
            self._net, self._arrays = net, arrays
        return self.values
