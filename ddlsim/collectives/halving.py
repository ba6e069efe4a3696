"""What the recursive algorithms share: folding to a power of two, and the halving exchange."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ddlsim.collectives.schedule import Ints, Round, messages


def fold_pairs(n_ranks: int) -> tuple[Ints, Ints]:
    """Return `(pairs, active)`: ranks `pairs` sit out, folded into `pairs + 1`; 2^q ranks remain active.

    With 2^q the largest power of two up to n_ranks, there are n_ranks - 2^q pairs (0, 1), (2, 3), ...
    (Thakur, Rabenseifner and Gropp 2005, sec. 4.5).
    """
    n_active = 1 << (n_ranks.bit_length() - 1)
    pairs = np.arange(0, 2 * (n_ranks - n_active), 2)
    return pairs, np.setdiff1d(np.arange(n_ranks), pairs)


def halving(ranks: Ints, boundary: Ints, distances: Iterable[int]) -> list[Round]:
    """Reduce-scatter among 2^q `ranks` by halving: each step, partners keep one half of what they hold.

    ranks      (2^q,)    the ranks that take part; place i works with place i ^ distance
    boundary   (2^q+1,)  window w consists of the chunks boundary[w] .. boundary[w+1]-1
    distances            a permutation of 1, 2, 4, ..; falling: place i ends with window i

    The place with the distance's bit set keeps the upper half.
    """
    place = np.arange(len(ranks))
    low = np.zeros(len(ranks), dtype=np.int64)
    half = len(ranks)
    rounds = []
    for distance in distances:
        half //= 2
        upper = (place & distance) > 0
        first = np.where(upper, low, low + half)  # the half that the partner keeps
        start, end = boundary[first], boundary[first + half]
        rounds.append(messages(ranks, ranks[place ^ distance], start, end - start, reduce=True))
        low = np.where(upper, low + half, low)
    return rounds
