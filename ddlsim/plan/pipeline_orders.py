"""The order of each rank's passes in a pipeline: tables with one list of passes per rank.

A pass is ("F", "B" or "W", chunk, micro-batch). Chunks are pieces of the model in forward order; a rank computes those
in its list. "W" is the gradient of the weights alone. If a micro-batch has a "W", its "B" is the gradient of the
chunk's input alone; otherwise "B" is the whole backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plan.plan import Ints

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")


class Pass(NamedTuple):
    """A pass of a micro-batch through a chunk."""

    kind: Kind
    chunk: int
    micro: int


@dataclass(frozen=True, eq=False)
class PassOrder:
    """The list of passes of each rank; iterating yields these lists.

    They are stored as arrays, because a search over splits creates millions of passes.

    offsets             (n_ranks + 1,) offsets of the ranks' passes
    kind, chunk, micro  (n_passes,) of all passes, rank by rank; `kind` is an index in KINDS
    """

    offsets: Ints
    kind: Ints
    chunk: Ints
    micro: Ints

    @classmethod
    def of(cls, table: Sequence[Sequence[Pass]]) -> PassOrder:
        """Return the order of a table."""
        offsets = np.cumsum([0, *map(len, table)])
        rows = [(KINDS.index(pass_.kind), pass_.chunk, pass_.micro) for passes in table for pass_ in passes]
        return cls(offsets, *np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    @property
    def rank(self) -> Ints:
        """The rank of each pass, (n_passes,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def at(self, i: int) -> Pass:
        """Return pass number `i`, counted over all ranks."""
        return Pass(KINDS[self.kind[i]], int(self.chunk[i]), int(self.micro[i]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[Pass]]:
        for first, end in itertools.pairwise(self.offsets.tolist()):
            yield [self.at(i) for i in range(first, end)]


@checked
def gpipe(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""
    chunk, micro = np.arange(ranks)[:, None], np.arange(micro_batches)
    return _one_by_one(np.full(ranks, micro_batches), (chunk, micro), (chunk, micro[::-1]))


@checked
def one_f_one_b(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return 1F1B: after a warm-up, forward and backward passes alternate, so rank i keeps at most ranks - i
    micro-batches (Narayanan et al. 2019, PipeDream; with a flush at the end of a step: Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2)."""
    passes = np.arange(ranks)[:, None], np.arange(micro_batches)
    return _one_by_one(np.arange(ranks)[::-1], passes, passes)


@checked
def interleaved(ranks: Count, micro_batches: Count, chunks: Count) -> PassOrder:
    """Return interleaved 1F1B with `chunks` chunks per rank, chunk c on rank c modulo `ranks` (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2; the order of Megatron-LM).

    With several chunks, raises ConfigError unless `micro_batches` is a multiple of `ranks`.
    """
    if chunks == 1:
        return one_f_one_b(ranks, micro_batches)
    if micro_batches % ranks:
        below = micro_batches - micro_batches % ranks
        near = " or ".join(str(count) for count in (below, below + ranks) if count)
        raise ConfigError(
            f"interleaved: micro_batches = {micro_batches}: must be a multiple of the number of pipeline "
            f"ranks, {ranks}; use {near}, or 1f1b with one chunk per rank"
        )
    # in each round, every chunk processes as many micro-batches as there are ranks
    turn, place, micro = np.unravel_index(np.arange(micro_batches * chunks), (micro_batches // ranks, chunks, ranks))
    rank = np.arange(ranks)
    forward, backward = (chunk * ranks + rank[:, None] for chunk in (place, chunks - 1 - place))
    micro = turn * ranks + micro
    return _one_by_one(2 * (ranks - rank - 1) + (chunks - 1) * ranks, (forward, micro), (backward, micro))


def _one_by_one(warmup: Ints, forward: tuple[Ints, Ints], backward: tuple[Ints, Ints]) -> PassOrder:
    """Return for each rank the forward passes of the warm-up, then alternating forward and backward passes, then the
    remaining backward passes.

    warmup             (n_ranks,) number of forward passes
    forward, backward  chunks and micro-batches of the passes, (n_ranks, n) or broadcastable to that
    """
    n, ranks = forward[1].shape[-1], len(warmup)
    nth, warmup = np.arange(n), np.minimum(warmup, n)[:, None]
    place = np.where(nth < warmup, nth, 2 * nth - warmup), np.where(nth < n - warmup, warmup + 2 * nth + 1, n + nth)
    columns = np.empty((3, ranks, 2 * n), dtype=np.int64)
    for kind, (places, passes) in enumerate(zip(place, (forward, backward), strict=True)):
        for column, values in zip(columns, (np.array(kind), *passes), strict=True):
            np.put_along_axis(column, places, np.broadcast_to(values, places.shape), axis=1)
    return PassOrder(np.arange(ranks + 1) * 2 * n, *columns.reshape(3, -1))


# ---------------------------------------------------------------- zero bubble
#
# The computation of weight gradients fills bubbles: Qi et al. 2023, arXiv:2401.10241 (ZB-1P, ZB-2P), and 2024,
# arXiv:2405.15362 (V-shaped placement: ZB-V, V-Half, V-Min). The tables are made for passes F, B and W of equal time;
# others can be executed, with more gaps. With V-shaped placement rank i has the chunks i and 2 ranks - 1 - i, so the
# first and the last chunk are on rank 0.


@checked
def zb_1p(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return ZB-1P: the activations of 1F1B (`ranks` micro-batches), a third of its idle time."""
    return _filled([*one_f_one_b(ranks, micro_batches)], [ranks] * ranks)


@checked
def zb_2p(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return ZB-2P: twice the activations of 1F1B at most, and no idle time from 2 `ranks` micro-batches on."""
    passes = np.arange(ranks)[:, None], np.arange(micro_batches)
    return _filled([*_one_by_one(2 * np.arange(ranks)[::-1], passes, passes)], [2 * ranks - 1] * ranks)


@checked
def zb_v(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return ZB-V: the activations of 1F1B, and no idle time from 2 `ranks` micro-batches on. The order is that of
    PyTorch's ``ScheduleZBVZeroBubble``."""
    n = max(2 * ranks - 1, micro_batches)
    order: list[list[Pass]] = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        ahead = 2 * (ranks - rank) - 1 + rank  # forward passes of the first chunk before the steady state
        both: list[tuple[Kind, int]] = [("B", down), ("W", down), ("F", up), ("B", up), ("W", up)]
        blocks: list[tuple[int, list[tuple[Kind, int]]]] = [
            (ahead - rank, [("F", down)]),
            (rank, [("F", up), ("F", down)]),
            (ranks - rank, [("F", up), ("B", up), ("W", up)]),
            (n - ahead, [("F", down), *both]),
            (ahead - ranks, both),
            (rank, [("B", down), ("B", up)]),
            (ranks - rank, [("B", down), ("W", down)]),
            (rank, [("W", up)]),
            (rank, [("W", down)]),
        ]
        micro: dict[tuple[Kind, int], int] = {}  # next micro-batch
        passes = []
        for times, what in blocks:
            for kind, chunk in what * times:
                passes.append(Pass(kind, chunk, micro.setdefault((kind, chunk), 0)))
                micro[kind, chunk] += 1
        order.append([pass_ for pass_ in passes if pass_.micro < micro_batches])
    return PassOrder.of(order)


@checked
def v_half(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return V-Half: about half of the activations and half of the idle time of 1F1B."""
    return _v_shaped(ranks, micro_batches, (1, 2, 1, 2))


@checked
def v_min(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return V-Min: about a third of the activations and two thirds of the idle time of 1F1B."""
    return _v_shaped(ranks, micro_batches, (1, 1, 1, 1))


def _v_shaped(ranks: int, micro_batches: int, hops: tuple[int, int, int, int]) -> PassOrder:
    """Return an order that repeats one micro-batch's passes every 6 times the time of a pass.

    hops  delays from rank to rank, in passes: forward down and up, backward of the last chunk and of the first. Lower
          values free activations sooner
    """
    turns = min((turn for turn in itertools.product(range(6), repeat=3) if _fits(ranks, hops, turn)), key=sum)
    order: list[list[Pass]] = []
    most = []
    for rank in range(ranks):
        chunks = (rank, 2 * ranks - 1 - rank)
        starts = _starts(ranks, rank, hops, turns)
        free = set(range(6)) - {start % 6 for start in starts}
        passes = list(zip(starts, "FFBB", (*chunks, *chunks[::-1]), strict=True))
        for start, chunk in ((starts[2], chunks[1]), (starts[3], chunks[0])):
            at = next(t for t in itertools.count(start + 1) if t % 6 in free)
            free.discard(at % 6)
            passes.append((at, "W", chunk))
        timed = sorted((start + 6 * n, kind, chunk, n) for start, kind, chunk in passes for n in range(micro_batches))
        level = itertools.accumulate({"F": 1, "B": 0, "W": -1}[kind] for _, kind, _, _ in timed)
        most.append(max(level))
        order.append([Pass(kind, chunk, n) for _, kind, chunk, n in timed if kind != "W"])  # type: ignore[arg-type]
    return _filled(order, most)


def _starts(ranks: int, rank: int, hops: tuple[int, ...], turns: tuple[int, ...]) -> list[int]:
    """Return when a rank starts the F of its two chunks, then their B, if reversals are delayed by `turns`."""
    above, below = rank, ranks - 1 - rank
    up = hops[0] * (ranks - 1) + 1 + turns[0]
    back = up + hops[1] * (ranks - 1) + 1 + turns[1]
    last = back + hops[2] * (ranks - 1) + 1 + turns[2]
    return [hops[0] * above, up + hops[1] * below, back + hops[2] * above, last + hops[3] * below]


def _fits(ranks: int, hops: tuple[int, ...], turns: tuple[int, ...]) -> bool:
    """Return whether no rank ever has to execute two passes at once."""
    return all(len({start % 6 for start in _starts(ranks, rank, hops, turns)}) == 4 for rank in range(ranks))


def _filled(order: list[list[Pass]], most: list[int]) -> PassOrder:
    """Return an order of F and B with W inserted where a rank would be idle, or holds the maximum of activations.

    most  number of chunk activations that each rank may hold
    """
    n_chunks = max(pass_.chunk for passes in order for pass_ in passes) + 1
    at, live = [0] * len(order), [0] * len(order)
    waiting: list[list[Pass]] = [[] for _ in order]
    out: list[list[Pass]] = [[] for _ in order]
    done: set[tuple[str, int, int]] = set()

    def ready(rank: int, candidate: Pass) -> bool:
        before = (candidate.kind, candidate.chunk + (1 if candidate.kind == "B" else -1), candidate.micro)
        if candidate.kind == "F":
            return live[rank] < most[rank] and (candidate.chunk == 0 or before in done)
        return ("F", *candidate[1:]) in done and (candidate.chunk == n_chunks - 1 or before in done)

    while any(i < len(passes) for i, passes in zip(at, order, strict=True)) or any(waiting):
        now: list[Pass] = []
        for rank, passes in enumerate(order):
            if at[rank] < len(passes) and ready(rank, passes[at[rank]]):
                pass_ = passes[at[rank]]
                at[rank] += 1
                live[rank] += pass_.kind == "F"
                if pass_.kind == "B":
                    waiting[rank].append(Pass("W", pass_.chunk, pass_.micro))
            elif waiting[rank]:
                pass_ = waiting[rank].pop(0)
                live[rank] -= 1
            else:
                continue
            out[rank].append(pass_)
            now.append(pass_)
        assert now, "there is no valid order of forward and backward passes with so few activations"
        done.update(now)
    return PassOrder.of(out)


# ---------------------------------------------------------------- orders by name

#: names of orders with one way to place chunks -> (chunks per rank, function of ranks and micro-batches)
ORDERS: Mapping[str, tuple[int, Callable[[int, int], PassOrder]]] = MappingProxyType({
    "gpipe": (1, gpipe), "1f1b": (1, one_f_one_b), "zb-1p": (1, zb_1p), "zb-2p": (1, zb_2p), "zb-v": (2, zb_v),
    "v-half": (2, v_half), "v-min": (2, v_min),
})  # fmt: skip


#: orders of asynchronous pipelines (:mod:`ddlsim.plan.pipeline`), whose passes are those of 1F1B
ASYNCHRONOUS = ("pipedream", "2bw")


def pass_order(
    order: str | Sequence[Sequence[tuple[str, int, int]]] | PassOrder, ranks: int, micro_batches: int, n_chunks: int
) -> PassOrder:
    """Return the order with a given name, or a table after checking it.

    "1f1b" is interleaved if there are several chunks per rank. Raises ConfigError for an unknown name, and for an order
    that does not allow this number of ranks, micro-batches or chunks.
    """
    if isinstance(order, PassOrder):
        return order
    if not isinstance(order, str):
        return check_order(order, ranks, micro_batches, n_chunks)
    if order in ASYNCHRONOUS:
        order = "1f1b"
    if order not in ORDERS:
        raise unknown_name("pipeline order", order, [*ORDERS, *ASYNCHRONOUS])
    per_rank, function = ORDERS[order]
    if order == "1f1b" and n_chunks % ranks == 0:
        return interleaved(ranks, micro_batches, n_chunks // ranks)
    if n_chunks != per_rank * ranks:
        rule = f"a multiple of {ranks}, the number of ranks" if order == "1f1b" else f"{per_rank * ranks}"
        raise ConfigError(
            f"pipeline: order {order!r} does not support {n_chunks} chunks on {ranks} ranks; the number of chunks must "
            f"be {rule}"
        )
    return function(ranks, micro_batches)


def check_order(
    order: Sequence[Sequence[tuple[str, int, int]]], ranks: int, micro_batches: int, n_chunks: int
) -> PassOrder:
    """Return a table of passes. Raises ConfigError, naming rank and pass, unless every chunk is on one rank and has one
    forward and one backward pass per micro-batch. Deadlocks are found when the plan is checked."""
    if len(order) != ranks:
        raise ConfigError(f"pipeline: order has {len(order)} lists for {ranks} ranks; provide one list per rank")
    table: list[list[Pass]] = []
    where: dict[int, int] = {}
    done: set[Pass] = set()
    for rank, passes in enumerate(order):
        table.append([])
        for nth, entry in enumerate(passes):
            which = f"pipeline: order[{rank}][{nth}] = {entry!r}"
            try:
                kind, chunk, micro = entry
                good = kind in ("F", "B", "W") and 0 <= chunk < n_chunks and 0 <= micro < micro_batches
            except (TypeError, ValueError):
                good = False
            if not good:
                raise ConfigError(
                    f"{which}: must be ('F', 'B' or 'W', chunk, micro-batch), with chunks below {n_chunks} and "
                    f"micro-batches below {micro_batches}"
                )
            pass_ = Pass(kind, int(chunk), int(micro))  # type: ignore[arg-type]  # one of the three
            if where.setdefault(pass_.chunk, rank) != rank:
                raise ConfigError(
                    f"{which}: chunk {chunk} belongs to rank {where[pass_.chunk]}; all passes of a chunk must be on "
                    "one rank"
                )
            if pass_ in done:
                raise ConfigError(f"{which}: occurs twice")
            before = [] if pass_.kind == "F" else [Pass("F" if pass_.kind == "B" else "B", pass_.chunk, pass_.micro)]
            if pass_.kind != "W":
                neighbour = pass_.chunk + (-1 if pass_.kind == "F" else 1)
                before += [Pass(pass_.kind, neighbour, pass_.micro)] if where.get(neighbour) == rank else []
            for one in before:
                if one not in done:
                    raise ConfigError(f"{which}: comes before {tuple(one)}, on which this pass depends")
            done.add(pass_)
            table[-1].append(pass_)
    for chunk, micro, kind in itertools.product(range(n_chunks), range(micro_batches), KINDS[:2]):
        if (required := Pass(kind, chunk, micro)) not in done:
            raise ConfigError(
                f"pipeline: order: {tuple(required)} is missing; every chunk needs F and B for every micro-batch"
            )
    return PassOrder.of(table)
