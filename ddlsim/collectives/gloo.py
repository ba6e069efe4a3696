"""The collectives of Gloo (github.com/facebookincubator/gloo), message by message, as PyTorch runs them over TCP.

Every transfer is a rendezvous: sender and receiver notify each other that they are ready (48 bytes in each direction),
and a preamble of 48 bytes precedes the data (``gloo/transport/tcp/buffer.cc`` and ``unbound_buffer.cc``). A transfer
therefore takes two latencies. The rings keep two segments in flight, which are modelled as two lanes on one connection.
Lanes in lockstep would share the link and then wait together. The second lane therefore starts two latencies later and
stays behind, so that each lane hides the handshakes of the other.

On links with a configured transport, the messages of a connection are sent in order, and a lane's notification waits
for the other lane's data (docs/models/transport.md has the formula). In Gloo, data wait for the receiver's
notification, which waits in the queue of the machine that it is sent to, behind data from that machine's other
neighbour. In a ring, both waits are equally long.

Handshakes and data alternate, so rounds are stored one by one: a ring has at least 12 p (p-1) messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Index, checked
from ddlsim.collectives.combine import with_root
from ddlsim.collectives.schedule import Ints, Ranks, Round, Schedule, Segments, messages

#: bytes of ``transport::tcp::Op``'s preamble; notifications consist of one, and data start with one
PREAMBLE = 48
IN_FLIGHT = 2


def _ready(src: Ints, dst: Ints) -> Round:
    """Both ends of each transfer notify each other that they are ready."""
    ends = np.concatenate([src, dst]), np.concatenate([dst, src])
    return messages(*ends, 0, 0, reduce=False, header=PREAMBLE)


def _transfer(
    src: npt.ArrayLike, dst: npt.ArrayLike, start: npt.ArrayLike, slots: Ints, *, reduce: bool = False
) -> tuple[Round, Round]:
    """Return the handshake and the data of transfers; each carries the chunks start + slots."""
    source, target = np.broadcast_arrays(np.atleast_1d(np.asarray(src)), np.asarray(dst))
    carried = None if len(slots) == 1 else slots
    first = np.asarray(start) + (slots[0] if carried is None else 0)
    data = messages(source, target.copy(), first, 1, reduce=reduce, slots=carried, header=PREAMBLE)
    return _ready(source, target), data


def _lane_slots(lane: int, n_segments: Segments) -> Ints:
    """Return the segments of a chunk that belong to a lane: every other one."""
    return np.arange(lane, n_segments, IN_FLIGHT)


def _late(n_ranks: Ranks, n_transfers: int) -> tuple[Round, ...]:
    """Return handshakes without data, which delay a lane by the time of `n_transfers` empty transfers."""
    rank = np.arange(n_ranks)
    return (_ready(rank, (rank - 1) % n_ranks),) * (2 * n_transfers)


def _lap(n_ranks: Ranks, n_segments: Segments, lane: int, first: int, *, reduce: bool) -> Iterable[Round]:
    """One lap of the ring r -> r-1, segment by segment; rank r starts with chunk r + `first`."""
    rank = np.arange(n_ranks)
    for step in range(n_ranks - 1):
        chunk = (rank + first + step) % n_ranks * n_segments
        for slot in _lane_slots(lane, n_segments):
            yield from _transfer(rank, (rank - 1) % n_ranks, chunk, np.array([slot]), reduce=reduce)


def _segments_per_chunk(n_ranks: Ranks, n_segments: Segments) -> int:
    """Return the number of segments (at most 1 MiB) per chunk, at least two, given the number of 512 KiB pieces."""
    pairs = -(-n_segments // 2)  # segments of 1 MiB in the buffer
    return IN_FLIGHT * -(-pairs // (IN_FLIGHT * n_ranks))


def _lanes(n_ranks: Ranks, n_segments: Segments, rounds: Iterable[Iterable[Round]], kind: str) -> Schedule:
    lanes = tuple(tuple(lane) for lane in rounds) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks * n_segments, lanes, kind=kind)


@checked
def gloo_ring(n_ranks: Ranks, n_segments: Segments = 1) -> Schedule:
    """Ring in segments, two in flight (``gloo/allreduce.cc``, ``ring``).

    n_segments  512 KiB pieces of the buffer; a segment has at most two of them, and a chunk at least two segments

    One lap reduces and, when it has finished, one lap gathers: 4 alpha + 2 (p-1)/p S beta, as long as a segment takes
    longer than 2 alpha.
    """
    n_per_chunk = _segments_per_chunk(n_ranks, n_segments)
    lanes = (
        (
            *_late(n_ranks, lane),
            *_lap(n_ranks, n_per_chunk, lane, 1, reduce=True),
            *_late(n_ranks, 1),
            *_lap(n_ranks, n_per_chunk, lane, 0, reduce=False),
        )
        for lane in range(IN_FLIGHT)
    )
    return _lanes(n_ranks, n_per_chunk, lanes, "all_reduce")


@checked
def gloo_reduce_scatter(n_ranks: Ranks, n_segments: Segments = 1) -> Schedule:
    """A full all-reduce, from which every rank keeps its block (PyTorch's ``ProcessGroupGloo``)."""
    return dataclasses.replace(gloo_ring(n_ranks, n_segments), kind="reduce_scatter")


@checked
def gloo_all_gather(n_ranks: Ranks) -> Schedule:
    """One lap of a ring, blocks in two halves (``gloo/allgather.cc``): 2 alpha + (p-1)/p S beta."""
    lanes = ((*_late(n_ranks, lane), *_lap(n_ranks, IN_FLIGHT, lane, 0, reduce=False)) for lane in range(IN_FLIGHT))
    return _lanes(n_ranks, IN_FLIGHT, lanes, "all_gather")


@checked
def gloo_reduce(n_ranks: Ranks, root: Index = 0, *, n_segments: Segments = 1) -> Schedule:
    """Ring reduce-scatter, after which all ranks send their chunks to the root (``gloo/reduce.cc``).

    4 alpha + 2 (p-1)/p S beta, as long as a segment takes longer than 2 alpha.
    """
    n_per_chunk = _segments_per_chunk(n_ranks, n_segments)
    others = np.arange(1, n_ranks)
    lanes = (
        (
            *_late(n_ranks, lane),
            *_lap(n_ranks, n_per_chunk, lane, 1, reduce=True),
            *_transfer(others, 0, others * n_per_chunk, _lane_slots(lane, n_per_chunk)),
        )
        for lane in range(IN_FLIGHT)
    )
    return with_root(_lanes(n_ranks, n_per_chunk, lanes, "reduce"), root)


@checked
def gloo_broadcast(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """Binomial tree in which a parent sends to all its children at once (``gloo/broadcast.cc``).

    Counted from the root, a rank's parent has its number in binary without the highest bit. With p = 2^q, the
    root's q sends share its link, then its first child's q-1, ...: q (q+1) / 2 S beta.
    """
    child = np.arange(1, n_ranks)
    parent = np.array([c ^ (1 << (c.bit_length() - 1)) for c in child.tolist()], dtype=np.int64)
    depth = np.array([c.bit_count() for c in child.tolist()], dtype=np.int64)
    rounds = [_ready(parent, child)] if n_ranks > 1 else []  # all receivers are ready at once
    for level in range(1, int(depth.max(initial=0)) + 1):
        mine = depth == level
        rounds.append(messages(parent[mine], child[mine], reduce=False, header=PREAMBLE))
    return with_root(Schedule(n_ranks, 1, (tuple(rounds),) if rounds else (), kind="broadcast"), root)


@checked
def gloo_gather(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """All ranks send their blocks to the root at once (``gloo/gather.cc``): 2 alpha + (p-1)/p S beta."""
    others = np.arange(1, n_ranks)
    return with_root(_single_lane(n_ranks, others, np.zeros_like(others), others, "gather"), root)


@checked
def gloo_scatter(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """The root sends all blocks at once (``gloo/scatter.cc``): 2 alpha + (p-1)/p S beta."""
    others = np.arange(1, n_ranks)
    return with_root(_single_lane(n_ranks, np.zeros_like(others), others, others, "scatter"), root)


@checked
def gloo_all_to_all(n_ranks: Ranks) -> Schedule:
    """All messages at once (``gloo/alltoall.cc``): 2 alpha + (p-1)/p S beta."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    return _single_lane(n_ranks, rank, (rank + 1 + step) % n_ranks, 1 + step, "all_to_all")


def _single_lane(n_ranks: Ranks, src: Ints, dst: Ints, start: Ints, kind: str) -> Schedule:
    lanes = (_transfer(src, dst, start, np.array([0])),) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks, lanes, kind=kind)
