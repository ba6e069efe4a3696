"""Allocation and growth of the kernel's arrays, in one place."""

from __future__ import annotations

import functools
from typing import Any, get_type_hints

import numpy as np

from ddlsim.cluster.details import LinkDetails
from ddlsim.errors import DdlsimError
from ddlsim.network import state as st
from ddlsim.network.state import Array, Floats, Ints, Net, Places, Records, grown

_AHEAD = 8  # messages of a rank that fit into a socket's buffer


def empty_net(capacity: Floats, send_overhead: Floats, recv_overhead: Floats, reduce_time: Floats) -> Net:
    """Return a net with channels and nodes, but without slots, routes, programs or instances."""
    n = len(capacity)
    counts, reals = st.Counts(np.int64), st.Reals(np.float64)
    counts.heap_valid = counts.replay = counts.hop_shift = 1
    counts.pool_used = 2 * n
    counts.n_linked = n
    reals.threshold = reals.next_change = np.inf
    reals.narrowest = np.min(capacity, initial=np.inf)
    nodes = np.zeros(len(send_overhead), dtype=st.NODE)
    nodes["send_overhead"] = send_overhead
    nodes["recv_overhead"] = recv_overhead
    nodes["reduce_time"] = reduce_time
    limits = np.zeros(st.MOST_LIMITS + 2, dtype=st.LIMIT)
    limits["rate"] = np.inf
    arrays: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in _dtypes().items()}
    arrays |= {"channels": channel_records(capacity, 0), "nodes": nodes, "limits": limits}
    net = Net(counts=counts, reals=reals, **arrays)
    net = _grown(net, n, "marks", "filling", "fill", "keys", "round_busy")
    net = _grown(net, 2 * n, "pool", "pool_copy")
    net = _grown(_grown(net, _n_words(n), "contended"), 1, "fifo")
    return _grown(net, st.SPANS, "spans", "moments")


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Return the data type of each array, from the annotations of `Net`."""
    hints = get_type_hints(Net, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if name not in ("counts", "reals")}


def _grown(net: Net, n: int, *names: str) -> Net:
    """Return `net` with at least `n` items in the named arrays."""
    longer: dict[str, Any] = {name: grown(getattr(net, name), n) for name in names}
    return net._replace(**longer)


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
    net.counts.shaped = 1
    net.counts.transported = int((details.transport != "").any())
    return net._replace(buckets=buckets)


def with_queues(net: Net) -> Net:
    """Return an empty `net` in which links serve bytes in order of arrival."""
    net.counts.is_fifo, net.counts.ahead = 1, _AHEAD
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
    n, free = max(2 * old, 256), net.counts.n_free_marks
    free_marks = np.concatenate([np.arange(n - 1, old - 1, -1), net.free_marks[:free]]).astype(np.int32)
    net.counts.n_free_marks = len(free_marks)
    return net._replace(queue_marks=grown(net.queue_marks, n), free_marks=grown(free_marks, n))


def with_split(net: Net) -> Net:
    """Return an empty `net` in which messages can be split over several paths."""
    net.counts.split = 1
    return net._replace(loads=np.zeros(len(net.channels)))


def with_buffers(net: Net, channels: Ints, nbytes: Floats) -> Net:
    """Return `net` with buffers of `nbytes`, in addition to their token buckets, on the given channels."""
    net.buckets["room"][channels] = np.where(nbytes > 0, nbytes + net.buckets["burst"][channels], np.inf)
    return net


def add_channels(net: Net, capacity: Floats) -> Net:
    """Append channels that belong to no link, with capacities in bytes/s."""
    n, more = len(net.channels), len(capacity)
    start = net.counts.pool_used
    net.counts.pool_used = start + 2 * more
    channels, buckets = channel_records(np.zeros(n + more), start - 2 * n), np.zeros(more, dtype=st.BUCKET)
    channels[:n] = net.channels
    channels["capacity"][n:] = buckets["free"] = buckets["loaded"] = capacity
    buckets["room"] = np.inf
    buckets["reverse"] = -1
    net = _grown(net, n + more, "marks", "filling", "fill", "keys", "round_busy")
    net = _grown(net, start + 2 * more, "pool", "pool_copy")._replace(
        channels=channels,
        contended=grown(net.contended, _n_words(n + more)),
        buckets=np.concatenate([net.buckets, buckets]),
        loads=np.zeros(n + more if net.counts.split else 0),
    )
    if net.counts.is_fifo:
        net = _with_queues(net)
    return _sized_by_hops(net)


def grow_slots(net: Net, n_slots: int) -> Net:
    """Return `net` with room for at least `n_slots` messages in flight."""
    net = _grown(net, n_slots, "slots")
    n = len(net.slots)
    net = _grown(
        net, n, "flows", "flow_rate", "flow_next", "flow_limit", "flow_end", "heap", "timers", "scratch"
    )._replace(fifo=_longer_ring(net, n))
    net = _grown(net, -(-n // st.BLOCK), "soonest")
    net = _grown(net, n + 1, "freezing")  # the filling writes the flow after the last one as well
    if net.counts.shaped:
        net = _grown(net, n, "wire")
    if net.counts.transported:
        net = _grown(net, n, "line", "asked", "tries")
    if net.counts.is_fifo:
        net = _grown(_grown(net, n, "trains", "ended"), 2 * n, "joining")
    return _sized_by_hops(net)


def grow_hops(net: Net, n_hops: int) -> Net:
    """Return `net` with room for routes of `n_hops` links."""
    old = net.counts.hop_shift
    shift = max(old, int(n_hops).bit_length())
    if shift == old:
        return net
    flow, hop = net.pool >> old, net.pool & ((1 << old) - 1)
    net.counts.hop_shift = shift
    net = net._replace(
        pool=(flow << shift) + hop,
        flow_place=_wider(net.flow_place, len(net.flows), old, shift),
        flow_hops=_wider(net.flow_hops, len(net.flows), old, shift),
        flow_share=_wider(net.flow_share, len(net.flows) * net.counts.split, old, shift),
        held=_wider(net.held, len(net.slots) * net.counts.transported, old, shift),
    )
    if net.counts.is_fifo:
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
    entries = len(net.slots) << net.counts.hop_shift
    room = 8 * entries + 8 * len(net.channels)
    if room >= 1 << 31:
        raise DdlsimError(
            f"{len(net.slots)} messages in flight at the same time exceed the limit of the network engine; use "
            "fewer ranks"
        )
    net = _grown(net, entries, "flow_place", "flow_hops")
    net = _grown(net, entries * net.counts.split, "flow_share")
    net = _grown(net, entries * net.counts.is_fifo, "crossings")
    net = _grown(net, entries * net.counts.transported, "held")
    # a channel is listed for each flow that starts or ends on it and, if shaped, on its reverse
    net = _grown(net, max((4 if net.counts.shaped else 2) * entries + 8, len(net.queues)), "dirty")
    return _grown(net, room, "pool", "pool_copy")


def _longer_ring(net: Net, n_slots: int) -> Records:
    """Return the ring buffer of timers, moved to place 0 and enlarged to a power of two of at least n_slots places."""
    ring = np.zeros(1 << max(int(n_slots), 1).bit_length(), dtype=st.TIMED)
    head, tail = net.counts.fifo_head, net.counts.fifo_tail
    ring[: tail - head] = net.fifo[np.arange(head, tail) & (len(net.fifo) - 1)]
    net.counts.fifo_head, net.counts.fifo_tail = 0, tail - head
    return ring
