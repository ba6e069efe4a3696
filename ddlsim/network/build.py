"""Allocation and growth of the kernel's arrays, in one place."""

from __future__ import annotations

import numpy as np

from ddlsim.cluster.details import LinkDetails
from ddlsim.errors import DdlsimError
from ddlsim.network import state as st
from ddlsim.network.calendar import EVENT
from ddlsim.network.state import CHANGE, Array, Floats, Ints, Net, Places, Records, grown

_AHEAD = 8  # messages of a rank that fit into a socket's buffer


def empty_net(capacity: Floats, send_overhead: Floats, recv_overhead: Floats, reduce_time: Floats) -> Net:
    """Return a net with channels and nodes, but without slots, routes, programs or instances."""
    n = len(capacity)
    counts = np.zeros(st.N_COUNTS, dtype=np.int64)
    counts[st.HEAP_VALID] = 1
    counts[st.REPLAY] = 1
    counts[st.HOP_SHIFT] = 1
    counts[st.POOL_USED] = 2 * n
    counts[st.N_LINKED] = n
    reals = np.zeros(st.N_REALS)
    reals[st.THRESHOLD] = reals[st.NEXT_CHANGE] = np.inf
    reals[st.NARROWEST] = np.min(capacity, initial=np.inf)
    channels = channel_records(capacity, 0)
    nodes = np.zeros(len(send_overhead), dtype=st.NODE)
    nodes["send_overhead"] = send_overhead
    nodes["recv_overhead"] = recv_overhead
    nodes["reduce_time"] = reduce_time
    limits = np.zeros(st.MOST_LIMITS + 2, dtype=st.LIMIT)
    limits["rate"] = np.inf
    no_places = np.zeros(0, dtype=np.int32)
    no_entries = np.zeros(0, dtype=np.uint32)
    return Net(
        counts=counts,
        reals=reals,
        channels=channels,
        marks=np.zeros(n, dtype=np.int64),
        contended=np.zeros(_n_words(n), dtype=np.uint64),
        buckets=np.zeros(0, dtype=st.BUCKET),
        filling=np.zeros(n, dtype=st.FILLING),
        fill=np.zeros(n, dtype=st.FILL),
        loads=np.zeros(0),
        keys=np.zeros(n),
        limits=limits,
        dirty=no_places,
        pool=np.zeros(2 * n, dtype=np.uint32),
        pool_copy=np.zeros(2 * n, dtype=np.uint32),
        flows=np.zeros(0, dtype=st.FLOW),
        flow_rate=np.zeros(0),
        flow_next=np.zeros(0),
        flow_limit=no_places,
        flow_end=np.zeros(0),
        soonest=np.zeros(0),
        flow_hops=no_entries,
        flow_share=np.zeros(0),
        flow_place=no_entries,
        wire=np.zeros(0),
        heap=np.zeros(0, dtype=st.TIMED),
        slots=np.zeros(0, dtype=st.SLOT),
        fifo=np.zeros(1, dtype=st.TIMED),
        timers=np.zeros(0, dtype=EVENT),
        scratch=no_places,
        freezing=no_entries,
        nodes=nodes,
        routes=np.zeros(0, dtype=st.ROUTE),
        routed=np.zeros(0, dtype=st.ROUTED),
        frames=np.zeros(0, dtype=st.FRAME),
        transports=np.zeros(0, dtype=st.TRANSPORT),
        connections=np.zeros(0, dtype=st.CONNECTION),
        line=no_places,
        asked=np.zeros(0),
        tries=no_places,
        held=np.zeros(0),
        parked=no_places,
        hops=no_entries,
        shares=np.zeros(0),
        programs=np.zeros(0, dtype=st.PROGRAM),
        tables=no_places,
        steps=np.zeros(0, dtype=st.STEP),
        messages=np.zeros(0, dtype=st.MESSAGE),
        weights=np.zeros(0),
        headers=np.zeros(0),
        instances=np.zeros(0, dtype=st.INSTANCE),
        threads=np.zeros(0, dtype=st.THREAD),
        counters=no_places,
        arrivals=np.zeros(0, dtype=st.ARRIVAL),
        ready=np.zeros(0, dtype=st.READY),
        out=np.zeros(0, dtype=st.OUT),
        foreign=np.zeros(0, dtype=st.OUT),
        log=np.zeros(0, dtype=st.BUSY),
        repeats=np.zeros(0, dtype=st.REPEAT),
        spans=np.zeros(st.SPANS, dtype=st.SPAN),
        moments=np.zeros(st.SPANS),
        round_busy=np.zeros(n),
        queues=np.zeros(0, dtype=st.QUEUE),
        queue_heap=np.zeros(0, dtype=st.TIMED),
        touched=no_places,
        crossings=np.zeros(0, dtype=st.CROSSING),
        queue_marks=np.zeros(0, dtype=st.MARK),
        free_marks=no_places,
        trains=np.zeros(0, dtype=st.TRAIN),
        joining=no_places,
        ended=no_places,
        changes=np.zeros(0, dtype=CHANGE),
        detours=np.zeros(0, dtype=st.DETOUR),
    )


def channel_records(capacity: Floats, start: int) -> Records:
    """Return records of idle channels, each on its own cache line, with lists that begin at `start` in the pool."""
    n, size = len(capacity), st.CHANNEL.itemsize
    room = np.zeros((n + 1) * size, dtype=np.uint8)
    first = -room.ctypes.data % size
    channels = room[first : first + n * size].view(st.CHANNEL)
    channels["capacity"] = capacity
    channels["first"] = start + 2 * np.arange(n)
    channels["room"] = 2
    channels["level"] = np.inf
    return channels


def _n_words(n: int) -> int:
    """Return the number of 64-bit words that hold a bit per channel."""
    return (n + 63) // 64


def with_shaping(net: Net, link_channel: Ints, reverse_link: Ints, details: LinkDetails) -> Net:
    """Return an empty `net` with the given link details."""
    buckets = np.zeros(len(net.channels), dtype=st.BUCKET)
    free = net.channels["capacity"].copy()
    load = np.zeros(len(free))
    load[link_channel] = details.reverse_load
    buckets["reverse"] = -1
    loaded = np.flatnonzero(reverse_link >= 0)
    buckets["reverse"][link_channel[loaded]] = link_channel[reverse_link[loaded]]
    shared = buckets["reverse"] == np.arange(len(free))  # acknowledgements use the channel itself, all the time
    free[shared] /= 1.0 + load[shared]
    buckets["reverse"][shared] = -1
    net.channels["capacity"] = buckets["free"] = free
    buckets["loaded"] = free / (1.0 + load)
    buckets["burst"][link_channel] = details.burst
    buckets["tokens"] = buckets["burst"]
    buckets["room"] = np.inf
    net.counts[st.SHAPED] = 1
    net.counts[st.TRANSPORTED] = int((details.transport != "").any())
    return net._replace(buckets=buckets)


def with_queues(net: Net) -> Net:
    """Return an empty `net` in which links serve bytes in order of arrival."""
    net.counts[st.FIFO], net.counts[st.AHEAD] = 1, _AHEAD
    return grow_marks(_with_queues(net))


def _with_queues(net: Net) -> Net:
    old, n = len(net.queues), len(net.channels)
    queues = np.zeros(n, dtype=st.QUEUE)
    queues[:old] = net.queues
    for name in ("first", "last", "burst", "onward", "heap_place"):
        queues[name][old:] = -1
    heap, touched = grown(net.queue_heap, n), np.zeros(n, dtype=np.int32)
    return net._replace(queues=queues, queue_heap=heap, touched=touched)


def grow_marks(net: Net) -> Net:
    """Return `net` with twice the marks in its queues."""
    old = len(net.queue_marks)
    n, free = max(2 * old, 256), int(net.counts[st.N_FREE_MARKS])
    free_marks = np.concatenate([np.arange(n - 1, old - 1, -1), net.free_marks[:free]]).astype(np.int32)
    net.counts[st.N_FREE_MARKS] = len(free_marks)
    return net._replace(queue_marks=grown(net.queue_marks, n), free_marks=grown(free_marks, n))


def with_split(net: Net) -> Net:
    """Return an empty `net` in which messages can be split over several paths."""
    net.counts[st.SPLIT] = 1
    return net._replace(loads=np.zeros(len(net.channels)))


def with_buffers(net: Net, channels: Ints, nbytes: Floats) -> Net:
    """Return `net` with buffers of `nbytes`, in addition to their token buckets, on the given channels."""
    net.buckets["room"][channels] = np.where(nbytes > 0, nbytes + net.buckets["burst"][channels], np.inf)
    return net


def add_channels(net: Net, capacity: Floats) -> Net:
    """Append channels that belong to no link, with capacities in bytes/s."""
    n, more = len(net.channels), len(capacity)
    start = int(net.counts[st.POOL_USED])
    net.counts[st.POOL_USED] = start + 2 * more
    channels, buckets = channel_records(np.zeros(n + more), start - 2 * n), np.zeros(more, dtype=st.BUCKET)
    channels[:n] = net.channels
    channels["capacity"][n:] = buckets["free"] = buckets["loaded"] = capacity
    buckets["room"] = np.inf
    buckets["reverse"] = -1
    net = net._replace(
        channels=channels,
        marks=grown(net.marks, n + more),
        contended=grown(net.contended, _n_words(n + more)),
        buckets=np.concatenate([net.buckets, buckets]),
        filling=np.zeros(n + more, dtype=st.FILLING),
        fill=np.zeros(n + more, dtype=st.FILL),
        loads=np.zeros(n + more if net.counts[st.SPLIT] else 0),
        keys=np.zeros(n + more),
        round_busy=np.zeros(n + more),
        pool=grown(net.pool, start + 2 * more),
        pool_copy=grown(net.pool_copy, start + 2 * more),
    )
    if net.counts[st.FIFO]:
        net = _with_queues(net)
    return _sized_by_hops(net)


def grow_slots(net: Net, n_slots: int) -> Net:
    """Return `net` with room for at least `n_slots` messages in flight."""
    slots = grown(net.slots, n_slots)
    n = len(slots)
    net = net._replace(
        slots=slots,
        flows=grown(net.flows, n),
        flow_rate=grown(net.flow_rate, n),
        flow_next=grown(net.flow_next, n),
        flow_limit=grown(net.flow_limit, n),
        flow_end=grown(net.flow_end, n),
        soonest=grown(net.soonest, -(-n // st.BLOCK)),
        heap=grown(net.heap, n),
        timers=grown(net.timers, n),
        fifo=_longer_ring(net, n),
        scratch=grown(net.scratch, n),
        freezing=grown(net.freezing, n + 1),  # the filling writes the flow after the last one as well
    )
    if net.counts[st.SHAPED]:
        net = net._replace(wire=grown(net.wire, n))
    if net.counts[st.TRANSPORTED]:
        net = net._replace(line=grown(net.line, n), asked=grown(net.asked, n), tries=grown(net.tries, n))
    if net.counts[st.FIFO]:
        places = {"joining": grown(net.joining, 2 * n), "ended": grown(net.ended, n)}
        net = net._replace(trains=grown(net.trains, n), **places)
    return _sized_by_hops(net)


def grow_hops(net: Net, n_hops: int) -> Net:
    """Return `net` with room for routes of `n_hops` links."""
    old = int(net.counts[st.HOP_SHIFT])
    shift = max(old, int(n_hops).bit_length())
    if shift == old:
        return net
    flow, hop = net.pool >> old, net.pool & ((1 << old) - 1)
    net.counts[st.HOP_SHIFT] = shift
    net = net._replace(
        pool=(flow << shift) + hop,
        flow_place=_wider(net.flow_place, len(net.flows), old, shift),
        flow_hops=_wider(net.flow_hops, len(net.flows), old, shift),
        flow_share=_wider(net.flow_share, len(net.flows) * int(net.counts[st.SPLIT]), old, shift),
        held=_wider(net.held, len(net.slots) * int(net.counts[st.TRANSPORTED]), old, shift),
    )
    if net.counts[st.FIFO]:
        for array, names in ((net.queues, ("burst", "onward")), (net.queue_marks, ("entry",))):
            for name in names:
                array[name] = _moved(array[name], old, shift)
        for name in ("previous", "next"):
            net.crossings[name] = _moved(net.crossings[name], old, shift)
        net = net._replace(crossings=_wider(net.crossings, len(net.flows), old, shift))
    return _sized_by_hops(net)


def _moved(entry: Places, old: int, shift: int) -> Places:
    """Convert indices from blocks of 2**old places to blocks of 2**shift; -1 is kept."""
    moved: Places = np.where(entry < 0, -1, (entry >> old << shift) + (entry & ((1 << old) - 1)))
    return moved


def _wider(array: Array, n_slots: int, old: int, shift: int) -> Array:
    """Convert an array with a block of 2**old places per slot to blocks of 2**shift."""
    wide = np.zeros((n_slots, 1 << shift), dtype=array.dtype)
    wide[:, : 1 << old] = array[: n_slots << old].reshape(n_slots, 1 << old)
    return wide.reshape(-1)


def _sized_by_hops(net: Net) -> Net:
    entries = len(net.slots) << int(net.counts[st.HOP_SHIFT])
    room = 8 * entries + 8 * len(net.channels)
    if room >= 1 << 31:
        raise DdlsimError(
            f"{len(net.slots)} messages in flight at the same time exceed the limit of the network engine; use "
            "fewer ranks"
        )
    return net._replace(
        flow_place=grown(net.flow_place, entries),
        flow_hops=grown(net.flow_hops, entries),
        flow_share=grown(net.flow_share, entries * int(net.counts[st.SPLIT])),
        crossings=grown(net.crossings, entries * int(net.counts[st.FIFO])),
        held=grown(net.held, entries * int(net.counts[st.TRANSPORTED])),
        # a channel is listed for each flow that starts or ends on it and, if shaped, on its reverse
        dirty=grown(net.dirty, max((4 if net.counts[st.SHAPED] else 2) * entries + 8, len(net.queues))),
        pool=grown(net.pool, room),
        pool_copy=grown(net.pool_copy, room),
    )


def _longer_ring(net: Net, n_slots: int) -> Records:
    """Return the ring buffer of timers, moved to place 0 and enlarged to a power of two of at least n_slots places."""
    ring = np.zeros(1 << max(int(n_slots), 1).bit_length(), dtype=st.TIMED)
    head, tail = int(net.counts[st.FIFO_HEAD]), int(net.counts[st.FIFO_TAIL])
    ring[: tail - head] = net.fifo[np.arange(head, tail) & (len(net.fifo) - 1)]
    net.counts[st.FIFO_HEAD], net.counts[st.FIFO_TAIL] = 0, tail - head
    return ring
