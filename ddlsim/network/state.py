"""The arrays that the compiled event kernel works on.

One :class:`Net` holds everything as flat NumPy arrays, so that compiled functions take it as it is. Python
makes the arrays longer when the kernel asks for it (:func:`grow`); the kernel never allocates.

Words: a *channel* has capacity (bytes/s); a *slot* is one message in flight; a *program* is a compiled
schedule; an *instance* is one execution of a program; a *thread* is one rank in one lane of a program.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]

# Places in Net.counts (int64)
N_FREE = 0  # free slots on the free stack
N_SLOTS = 1  # highest slot ever used + 1 (bound of scans)
N_ACTIVE = 2  # flows that now use bandwidth
N_HEAP = 3  # entries in the heap of planned ends
HEAP_VALID = 4  # 1: the heap holds every active flow; 0: ends are found by scanning
FIFO_HEAD = 5  # timers whose times came in order
FIFO_TAIL = 6
N_TIMER_HEAP = 7  # timers that did not
EPOCH = 8  # mark of the current solve
N_NEW = 9  # flows activated at this instant, not yet given a rate
N_DIRTY = 10  # channels whose load changed at this instant
HOP_SHIFT = 11  # log2 of the hops reserved per slot
POOL_USED = 12  # used part of the pool of channel lists
N_OUT = 13  # visible completions waiting to be read
LIVE_SENDS = 14  # bound on messages that live threads can have in flight
N_MESSAGES = 15  # messages delivered so far
N_EVENTS = 16  # instants handled
N_LIVE = 17  # instances in progress
LIVE_THREADS = 18  # threads of live instances that have not ended (joined or not)
LIVE_SINGLE = 19  # single messages in flight
N_DELIVERING = 20
LOG_USED = 21  # busy intervals logged
LOG_ON = 22  # 1: log busy intervals
STEPPED = 23  # threads that entered a step at this instant
STEPS_LEFT = 24  # least number of repetitions left to any of them; -1 if one is in its first
ROUND_INSTANTS = 25  # instants since the last barrier; negative: there was none
FAST_FORWARDED = 26  # messages replayed without events
ROUND_THREADS = 27  # LIVE_THREADS at the last barrier
REPLAY = 28  # 1: fast-forward what repeats exactly (0 only to prove that it changes nothing)
N_COUNTS = 29

# Places in Net.reals (float64)
NOW = 0
THRESHOLD = 1  # rates below this cannot change at this instant
ROUND_TRANSFER_MIN = 2  # s from activation to planned end, over the flows since the last barrier
ROUND_TRANSFER_MAX = 3
N_REALS = 4

# Values of Net.slot_state
FREE, WAITING, FLOWING, DELIVERING = 0, 1, 2, 3

# What `advance` returns
IDLE, VISIBLE, FULL = 0, 1, 2


def record(**fields: str) -> np.dtype[np.void]:
    """Return an aligned record type; ``i`` is int64 and ``f`` float64."""
    return np.dtype([(name, {"i": np.int64, "f": np.float64}[kind]) for name, kind in fields.items()], align=True)


#: capacity bytes/s; its flows are pool[first:first+used] of `room` places; level: share at which it last filled
#: up, inf if it did not; residual, unfrozen, member, members: scratch of the solve; nbytes carried, busy s, since: busy since
CHANNEL = record(
    capacity="f", level="f", residual="f", unfrozen="i", member="i", members="i", mark="i", first="i", room="i", used="i", nbytes="f", busy="f", since="f"
)  # fmt: skip
#: overheads in s per message, reduce_time in s per byte; *_free: when that side of the node is free again
NODE = record(send_overhead="f", recv_overhead="f", reduce_time="f", send_free="f", recv_free="f")
#: hops[first:last] are the channels of the route
ROUTE = record(first="i", last="i", latency="f")
#: instance: -1 - handle for a single message; message: its number, or the target node of a single message
SLOT = record(state="i", instance="i", message="i", route="i", heap_place="i", nbytes="f")
TIMED = record(time="f", slot="i")
#: messages send:send_end are sent in the step; recv_message[recv:recv_end] are received
STEP = record(repeat="i", send="i", send_end="i", recv="i", recv_end="i")
#: src, dst: threads within the program; step: the receiver's; weight: first place in `weights`, stride: places
#: per repetition; source, target: nodes
MESSAGE = record(src="i", dst="i", step="i", route="i", weight="i", stride="i", reduce="i", source="i", target="i")
PROGRAM = record(thread="i", message="i", n_ranks="i", n_lanes="i", sends_bound="i")
#: threads, counters, ranks: where the instance's parts of `threads`, `arrivals` and `lanes_left` start
INSTANCE = record(program="i", threads="i", counters="i", ranks="i", ranks_left="i", nbytes="f")
#: step: -1 before the rank has joined, -2 after it has ended; entered: the instant (N_EVENTS) at which it did
THREAD = record(step="i", repetition="i", sends_left="i", recvs_missing="i", entered="i")
FILL = record(key="f", channel="i")
OUT = record(id="i", rank="i")
BUSY = record(channel="i", start="f", end="f")


class Net(NamedTuple):
    """Everything the kernel knows; the record types are above."""

    counts: Ints
    reals: Floats
    channels: Records  # CHANNEL
    pool: Ints  # entries (slot << HOP_SHIFT) + hop
    pool_copy: Ints  # scratch of the same size
    nodes: Records  # NODE
    routes: Records  # ROUTE
    hops: Ints
    slots: Records  # SLOT
    slot_end: Floats  # planned end while flowing, else inf; what the solve reads lies in arrays of its own
    slot_rate: Floats
    slot_mark: Ints
    slot_hop_end: Ints  # the flow's channels are slot_hops[slot << HOP_SHIFT : slot_hop_end[slot]]
    slot_hops: Ints  # (n_slots << HOP_SHIFT,)
    slot_place: Ints  # (n_slots << HOP_SHIFT,) place in each channel's list
    free_slots: Ints
    heap: Records  # TIMED, planned ends
    fifo: Records  # TIMED, timers that came in order (ring buffer)
    timers: Records  # TIMED, heap of the others
    thread_step: Ints  # steps of a program's thread i are thread_step[thread + i]:thread_step[thread + i + 1]
    steps: Records  # STEP
    recv_message: Ints
    messages: Records  # MESSAGE
    weights: Floats  # shares of the collective's nbytes
    programs: Records  # PROGRAM
    instances: Records  # INSTANCE
    threads: Records  # THREAD
    arrivals: Ints  # per message of an instance
    lanes_left: Ints  # per rank of an instance
    new_slots: Ints
    dirty: Ints
    component: Ints
    members: Ints  # unfrozen flows of the channels of a component
    freezing: Ints
    fill: Records  # FILL
    out: Records  # OUT, completions waiting to be read
    log: Records  # BUSY


Array = TypeVar("Array", Ints, Floats, Records)


def grown(array: Array, size: int) -> Array:
    """Return `array` made at least `size` long, new places holding zero."""
    if len(array) >= size:
        return array
    longer = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
