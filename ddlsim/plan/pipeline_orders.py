"""The order of each rank's passes in a pipeline: tables with one list of passes per rank.

A pass is ("F", "B" or "W", chunk, micro-batch). Chunks are pieces of the model in forward order; a rank computes those
in its list. "W" is the gradient of the weights alone. If a micro-batch has a "W", its "B" is the gradient of the
chunk's input alone; otherwise "B" is the whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, unknown_name

Kind = Literal["F", "B", "W"]


_BOTH: tuple[Kind, ...] = ("F", "B")


class Pass(NamedTuple):
    """A pass of a micro-batch through a chunk."""

    kind: Kind
    chunk: int
    micro: int


#: of every rank, what it does
PassOrder = list[list[Pass]]


@checked
def gpipe(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""
    return [
        [Pass("F", rank, micro) for micro in range(micro_batches)]
        + [Pass("B", rank, micro) for micro in reversed(range(micro_batches))]
        for rank in range(ranks)
    ]


@checked
def one_f_one_b(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return 1F1B: after a warm-up, forward and backward passes alternate, so rank i keeps at most ranks - i
    micro-batches (Narayanan et al. 2019, PipeDream; with a flush at the end of a step: Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2)."""
    order: PassOrder = []
    for rank in range(ranks):
        warmup = min(ranks - rank - 1, micro_batches)
        order.append(_one_by_one(warmup, [Pass("F", rank, n) for n in range(micro_batches)],
                                 [Pass("B", rank, n) for n in range(micro_batches)]))  # fmt: skip
    return order


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
        near = " or ".join(str(each) for each in (below, below + ranks) if each)
        raise ConfigError(
            f"interleaved: micro_batches = {micro_batches}: must be a multiple of the {ranks} ranks of the pipeline; "
            f"use {near}, or 1f1b with one chunk per rank"
        )
    turns = range(0, micro_batches, ranks)

    def passes(kind: Kind, rank: int) -> list[Pass]:
        places = range(chunks) if kind == "F" else reversed(range(chunks))
        mine = [place * ranks + rank for place in places]
        return [Pass(kind, chunk, micro) for turn in turns for chunk in mine for micro in range(turn, turn + ranks)]

    return [
        _one_by_one(2 * (ranks - rank - 1) + (chunks - 1) * ranks, passes("F", rank), passes("B", rank))
        for rank in range(ranks)
    ]


def _one_by_one(warmup: int, forward: list[Pass], backward: list[Pass]) -> list[Pass]:
    """Return `warmup` forward passes, then one forward and one backward in turns, then the backward passes left."""
    warmup = min(warmup, len(forward))
    turns = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
    return forward[:warmup] + turns + backward[len(forward) - warmup :]


def _zero_bubble(name: str) -> Callable[[int, int], PassOrder]:
    def order(ranks: int, micro_batches: int) -> PassOrder:
        from ddlsim.plan import zero_bubble

        return getattr(zero_bubble, name)(ranks, micro_batches)  # type: ignore[no-any-return]

    return order


#: names of orders with one way to place chunks -> (chunks per rank, function of ranks and micro-batches)
ORDERS: Mapping[str, tuple[int, Callable[[int, int], PassOrder]]] = MappingProxyType({
    "gpipe": (1, gpipe), "1f1b": (1, one_f_one_b), "zb-1p": (1, _zero_bubble("zb_1p")),
    "zb-2p": (1, _zero_bubble("zb_2p")), "zb-v": (2, _zero_bubble("zb_v")), "v-half": (2, _zero_bubble("v_half")),
    "v-min": (2, _zero_bubble("v_min")),
})  # fmt: skip


#: orders of pipelines that are never flushed (:mod:`ddlsim.plan.asynchronous_pipeline`), whose passes are those of 1F1B
ASYNCHRONOUS = ("pipedream", "2bw")


def pass_order(
    order: str | Sequence[Sequence[tuple[str, int, int]]], ranks: int, micro_batches: int, n_chunks: int
) -> PassOrder:
    """Return the order of a name, or a table after checking it.

    "1f1b" is interleaved where there are several chunks per rank. Raises ConfigError for an unknown name, and for an
    order that does not allow this number of ranks, micro-batches or chunks.
    """
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
        multiple = "a multiple of" if order == "1f1b" else f"{per_rank} x" if per_rank > 1 else "one for each of"
        raise ConfigError(f"pipeline: {n_chunks} chunks: order {order!r} needs {multiple} the {ranks} ranks")
    return function(ranks, micro_batches)


def check_order(
    order: Sequence[Sequence[tuple[str, int, int]]], ranks: int, micro_batches: int, n_chunks: int
) -> PassOrder:
    """Return a table of passes; raises ConfigError, naming rank and pass, unless every chunk is on one rank and has
    every micro-batch forward once and backward once. The check of the plan finds deadlocks."""
    if len(order) != ranks:
        raise ConfigError(f"pipeline: order has {len(order)} lists, the pipeline {ranks} ranks; give one for each")
    table: PassOrder = []
    where: dict[int, int] = {}
    done: set[Pass] = set()
    for rank, passes in enumerate(order):
        table.append([])
        for nth, entry in enumerate(passes):
            text = f"pipeline: order[{rank}][{nth}] = {entry!r}"
            try:
                kind, chunk, micro = entry
                good = kind in ("F", "B", "W") and 0 <= chunk < n_chunks and 0 <= micro < micro_batches
            except (TypeError, ValueError):
                good = False
            if not good:
                raise ConfigError(
                    f"{text}: must be 'F', 'B' or 'W', a chunk below {n_chunks} and a micro-batch below {micro_batches}"
                )
            each = Pass(kind, int(chunk), int(micro))  # type: ignore[arg-type]  # one of the three
            if where.setdefault(each.chunk, rank) != rank:
                raise ConfigError(f"{text}: chunk {chunk} is on rank {where[each.chunk]}; a chunk has one rank")
            if each in done:
                raise ConfigError(f"{text}: stands in the table twice")
            before = [] if each.kind == "F" else [Pass("F" if each.kind == "B" else "B", each.chunk, each.micro)]
            if each.kind != "W":
                neighbour = each.chunk + (-1 if each.kind == "F" else 1)
                before += [Pass(each.kind, neighbour, each.micro)] if where.get(neighbour) == rank else []
            for one in before:
                if one not in done:
                    raise ConfigError(f"{text}: comes before {tuple(one)}, which it needs")
            done.add(each)
            table[-1].append(each)
    for chunk in range(n_chunks):
        for micro in range(micro_batches):
            for kind in _BOTH:
                if (each := Pass(kind, chunk, micro)) not in done:
                    raise ConfigError(
                        f"pipeline: order: {tuple(each)} is missing; every chunk needs every micro-batch, F and B"
                    )
    return table
