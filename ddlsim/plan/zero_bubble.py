"""Pipeline orders that fill bubbles with the computation of weight gradients.

Qi et al. 2023, arXiv:2401.10241 (ZB-1P, ZB-2P), and 2024, arXiv:2405.15362 (V-shaped placement: ZB-V, V-Half, V-Min).
The tables are made for passes F, B and W of equal time; others can be executed, with more gaps. With V-shaped placement
rank i has the chunks i and 2 ranks - 1 - i, so the first and the last chunk are on rank 0.
"""

from __future__ import annotations

import itertools

from ddlsim.arguments import Count, checked
from ddlsim.plan.pipeline_orders import Kind, Pass, PassOrder, one_f_one_b


@checked
def zb_1p(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return ZB-1P: the activations of 1F1B (`ranks` micro-batches), a third of its idle time."""
    return _filled([*one_f_one_b(ranks, micro_batches)], [ranks] * ranks)


@checked
def zb_2p(ranks: Count, micro_batches: Count) -> PassOrder:
    """Return ZB-2P: twice the activations of 1F1B at most, and no idle time from 2 `ranks` micro-batches on."""
    order: list[list[Pass]] = []
    for rank in range(ranks):
        warmup = min(2 * (ranks - rank) - 1, micro_batches)
        passes = [Pass("F", rank, n) for n in range(warmup)]
        for n in range(micro_batches):
            passes.append(Pass("B", rank, n))
            if warmup + n < micro_batches:
                passes.append(Pass("F", rank, warmup + n))
        order.append(passes)
    return _filled(order, [2 * ranks - 1] * ranks)


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
        micro: dict[tuple[Kind, int], int] = {}  # the next one
        passes = []
        for times, what in blocks:
            for kind, chunk in what * times:
                passes.append(Pass(kind, chunk, micro.setdefault((kind, chunk), 0)))
                micro[kind, chunk] += 1
        order.append([each for each in passes if each.micro < micro_batches])
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

    hops  from rank to rank, in passes: forward down and up, backward of the last chunk and of the first. The lower,
          the sooner activations are given back
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
    """Return when a rank starts F and F of its two chunks, then B and B, if each turn waits so long."""
    above, below = rank, ranks - 1 - rank
    up = hops[0] * (ranks - 1) + 1 + turns[0]
    back = up + hops[1] * (ranks - 1) + 1 + turns[1]
    last = back + hops[2] * (ranks - 1) + 1 + turns[2]
    return [hops[0] * above, up + hops[1] * below, back + hops[2] * above, last + hops[3] * below]


def _fits(ranks: int, hops: tuple[int, ...], turns: tuple[int, ...]) -> bool:
    """Return whether no rank ever has to do two passes at once."""
    return all(len({start % 6 for start in _starts(ranks, rank, hops, turns)}) == 4 for rank in range(ranks))


def _filled(order: list[list[Pass]], most: list[int]) -> PassOrder:
    """Return an order of F and B with the W put where a rank would be idle, or has as many activations as it may.

    most  activations of chunks that each rank may have
    """
    n_chunks = max(each.chunk for passes in order for each in passes) + 1
    at, live = [0] * len(order), [0] * len(order)
    waiting: list[list[Pass]] = [[] for _ in order]
    out: list[list[Pass]] = [[] for _ in order]
    done: set[tuple[str, int, int]] = set()

    def ready(rank: int, each: Pass) -> bool:
        before = (each.kind, each.chunk + (1 if each.kind == "B" else -1), each.micro)
        if each.kind == "F":
            return live[rank] < most[rank] and (each.chunk == 0 or before in done)
        return ("F", *each[1:]) in done and (each.chunk == n_chunks - 1 or before in done)

    while any(i < len(passes) for i, passes in zip(at, order, strict=True)) or any(waiting):
        now: list[Pass] = []
        for rank, passes in enumerate(order):
            if at[rank] < len(passes) and ready(rank, passes[at[rank]]):
                each = passes[at[rank]]
                at[rank] += 1
                live[rank] += each.kind == "F"
                if each.kind == "B":
                    waiting[rank].append(Pass("W", each.chunk, each.micro))
            elif waiting[rank]:
                each = waiting[rank].pop(0)
                live[rank] -= 1
            else:
                continue
            out[rank].append(each)
            now.append(each)
        assert now, "there is no valid order of forward and backward passes with so few activations"
        done.update(now)
    return PassOrder.of(out)
