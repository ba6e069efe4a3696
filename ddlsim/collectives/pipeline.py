"""Pipelining: a buffer cut in segments that follow each other along the edges of a chain or tree."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ddlsim.collectives.schedule import Floats, Ints, Round, messages


def pipeline(
    src: Ints, dst: Ints, stage: Ints, n_segments: int, *, reduce: bool, first: Ints | int = 0,
    latency: Floats | None = None, count: Ints | int = 1, width: int = 1, wire: Floats | None = None,
    handled: Floats | None = None,
) -> tuple[Round, ...]:
    """Send `n_segments` segments along edges; edge i sends its j-th segment in round `stage[i] + j`.

    src, dst, stage  (m,)  an edge must have a later stage than those that it waits for
    first            (m,)  chunk number of each edge's first segment
    latency          (m,)  s that the first segment on an edge takes to flow; those behind it follow at once then. None:
                     each has the latency of its route
    count, width     chunks that an edge sends of each segment, and how many a segment has
    wire, handled    (m,)  see :class:`ddlsim.collectives.schedule.Round`

    Consecutive rounds with the same edges are stored once, with a repeat count.
    """
    first, count = (np.broadcast_to(np.asarray(each, dtype=np.int64), stage.shape) for each in (first, count))
    rounds = []
    turns = [stage, stage + n_segments] if latency is None else [stage, stage + 1, stage + n_segments]
    for begin, end in itertools.pairwise(np.unique(turns).tolist()):
        on = (stage <= begin) & (begin < stage + n_segments)
        if on.any():
            chunk = first[on] + (begin - stage[on]) * width
            one = messages(src[on], dst[on], chunk, count[on], reduce=reduce, repeat=end - begin, shift=width)
            late = None if latency is None else np.where(stage[on] == begin, latency[on], 0.0)
            sent, work = (None if each is None else each[on] for each in (wire, handled))
            rounds.append(dataclasses.replace(one, latency=late, wire=sent, handled=work))
    return tuple(rounds)
