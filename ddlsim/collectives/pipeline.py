"""Pipelining: a buffer cut in segments that follow each other along the edges of a chain or tree."""

from __future__ import annotations

import itertools

import numpy as np

from ddlsim.collectives.schedule import Ints, Round, messages


def pipeline(
    src: Ints, dst: Ints, stage: Ints, n_segments: int, *, reduce: bool, first: Ints | int = 0
) -> tuple[Round, ...]:
    """Send `n_segments` segments along edges; edge i sends its j-th segment in round `stage[i] + j`.

    src, dst, stage  (m,)  an edge must have a later stage than those that it waits for
    first            (m,)  chunk number of each edge's first segment

    Consecutive rounds with the same edges are stored once, with a repeat count.
    """
    first = np.broadcast_to(np.asarray(first, dtype=np.int64), stage.shape)
    rounds = []
    for begin, end in itertools.pairwise(np.unique([stage, stage + n_segments]).tolist()):
        on = (stage <= begin) & (begin < stage + n_segments)
        if on.any():
            chunk = first[on] + begin - stage[on]
            rounds.append(messages(src[on], dst[on], chunk, reduce=reduce, repeat=end - begin, shift=1))
    return tuple(rounds)
