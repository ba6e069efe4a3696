"""Gloo's ring all-reduce as a schedule: what makes it slower than NCCL's is in its protocol, not in a factor.

``gloo/allreduce.cc`` (facebookincubator/gloo) cuts the buffer in segments of at most 1 MiB, at least two per rank.
Every segment is a rendezvous: the receiver says that it is ready, which takes the latency of the network, then the
sender sends. Two segments are in flight. With a latency d on the way and t for a segment on the wire, a segment takes
max(t, d + t/2) instead of t, so that a link is idle most of the time when d is large.
"""

from __future__ import annotations

import math

import numpy as np

from ddlsim.collectives.schedule import Round, Schedule, messages

__all__ = ["SEGMENT_NBYTES", "ring_all_reduce"]

SEGMENT_NBYTES = 2**20  # kMaxSegmentSize
N_IN_FLIGHT = 2


def ring_all_reduce(n_ranks: int, nbytes: float) -> Schedule:
    """Return the all-reduce of `nbytes` by `n_ranks` ranks: rank r sends to r - 1, n_ranks - 1 times to reduce and as
    often to gather.

    Each lane is one of the two segments in flight. Its rounds alternate: "ready" (no bytes, but a latency) against
    the direction of the data, then the data. Both segments travel on one connection, the second behind the first:
    so the second lane starts one message later, and lanes do not share the wire in step.
    """
    n_segments = max(N_IN_FLIGHT, math.ceil(nbytes / n_ranks / SEGMENT_NBYTES))
    rank = np.arange(n_ranks)
    left, right = (rank - 1) % n_ranks, (rank + 1) % n_ranks
    ready = messages(rank, right, 0, 0, reduce=False)
    lanes = []
    for lane in range(N_IN_FLIGHT):
        rounds: list[Round] = [ready] * lane
        for step in range(2 * (n_ranks - 1)):
            chunk = (rank + 1 + step) % n_ranks  # after n_ranks - 1 steps the own chunk's left neighbour is complete
            for segment in range(lane, n_segments, N_IN_FLIGHT):
                data = messages(rank, left, chunk * n_segments + segment, reduce=step < n_ranks - 1)
                rounds += [ready, data]
        lanes.append(tuple(rounds))
    return Schedule(n_ranks, n_ranks * n_segments, tuple(lanes))
