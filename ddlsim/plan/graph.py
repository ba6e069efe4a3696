"""Conversion of a graph of operations, as read from files, to a plan: lanes, pairs of messages, collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, COMPUTE, KINDS, RECEIVE, SEND, Ints, Lane, Plan
from ddlsim.plan.queues import PriorityQueue

#: the lane of operations that wait only for their dependencies
WAITING = "waiting"


@dataclass
class Operation:
    """An operation of a rank, which starts after the operations that it `needs` (indices in the list).

    rank   that executes it; ``where`` names the file and its line or node
    kind   index in :data:`ddlsim.plan.KINDS`
    lane   the lane that executes it in order; None: it starts as soon as its dependencies have ended
    peer   of a message: the other rank
    group  of a collective: its members
    tag    messages between two ranks, and collectives of a group, with the same tag are matched in order
    """

    rank: int
    where: str
    kind: int = COMPUTE
    seconds: float = 0.0
    nbytes: float = 0.0
    lane: str | None = None
    name: str = ""
    peer: int = -1
    group: tuple[int, ...] = ()
    tag: object = 0
    needs: list[int] = field(default_factory=list)


def plan_of_operations(operations: Sequence[Operation], n_ranks: int) -> Plan:
    """Return the plan of these operations.

    Lanes execute them in the order in which they could start if messages and collectives took no time. Raises
    ConfigError, naming the position in the file, for unmatched messages, collectives whose members differ, and
    dependency cycles.
    """
    key = _messages(operations)
    n_messages = sum(number >= 0 for number in key) // 2
    _collectives(operations, key, n_messages)
    first = _plan(operations, key, np.arange(len(operations)), [None] * len(operations), n_ranks)
    order = Order(first)
    try:
        events = order.events
    except ConfigError as error:
        raise ConfigError(_in_the_file(str(error), operations)) from None
    seconds = np.zeros(order.n_events)
    np.maximum.at(seconds, order.event, first.seconds)
    end, start = np.array(order.ends(seconds.tolist())), np.zeros(order.n_events)
    before, after = (order.event[rows] for rows in order.ends_after)
    np.maximum.at(start, after, end[before])
    turn = np.empty(order.n_events)
    turn[events] = np.arange(order.n_events)
    ranks = np.array([operation.rank for operation in operations], dtype=np.int64)
    rows = np.lexsort((turn[order.event], start[order.event], ranks))
    return _plan(operations, key, rows, [operation.lane for operation in operations], n_ranks)


def _in_the_file(message: str, operations: Sequence[Operation]) -> str:
    """Replace the first row that an error message names by its position in the file."""
    words = message.split("row ", 1)[-1].split(" ", 1)[0]
    place = operations[int(words)].where if words.isdecimal() and int(words) < len(operations) else "the file"
    return f"{place}: {message.removeprefix('plan: ')}"


def _messages(operations: Sequence[Operation]) -> list[int]:
    """Return the key of each send and receive, -1 for others: the nth send matches the nth receive of its kind."""
    key = [-1] * len(operations)
    sides: dict[int, dict[tuple[int, int, object], list[int]]] = {SEND: {}, RECEIVE: {}}
    for i, operation in enumerate(operations):
        if operation.kind in sides:
            ends = (operation.rank, operation.peer) if operation.kind == SEND else (operation.peer, operation.rank)
            sides[operation.kind].setdefault((*ends, operation.tag), []).append(i)
    n = 0
    for place in {**sides[SEND], **sides[RECEIVE]}:
        sends, receives = sides[SEND].get(place, []), sides[RECEIVE].get(place, [])
        if len(sends) != len(receives):
            rows, missing = (sends, "receive") if len(sends) > len(receives) else (receives, "send")
            lonely, (src, dst, tag) = operations[rows[min(len(sends), len(receives))]], place
            raise ConfigError(
                f"{lonely.where}: the matching {missing} is missing; messages with tag {tag} from rank {src} to rank "
                f"{dst}: {len(sends)} sent, {len(receives)} received"
            )
        for send, receive in zip(sends, receives, strict=True):
            if operations[send].nbytes != operations[receive].nbytes:
                raise ConfigError(
                    f"{operations[receive].where}: receives {operations[receive].nbytes:.0f} bytes, but the message "
                    f"has {operations[send].nbytes:.0f} bytes ({operations[send].where}); the sizes must agree"
                )
            key[send] = key[receive] = n
            n += 1
    return key


def _collectives(operations: Sequence[Operation], key: list[int], n: int) -> None:
    """Assign a key to the members of each collective: the nth of a group on one rank matches the nth on the others."""
    calls: dict[tuple[tuple[int, ...], object], dict[int, list[int]]] = {}
    for i, operation in enumerate(operations):
        if operation.kind >= ALL_REDUCE:
            calls.setdefault((operation.group, operation.tag), {}).setdefault(operation.rank, []).append(i)
    for (group, _), by_rank in calls.items():
        most = max(by_rank.values(), key=len)
        for rank in group:
            mine = by_rank.get(rank, [])
            if len(mine) < len(most):
                other, n_entered, n_most = operations[most[0]].rank, len(mine), len(most)
                raise ConfigError(
                    f"{operations[most[len(mine)]].where}: rank {rank} of its group never enters this collective; "
                    f"collectives of this group: rank {rank} enters {n_entered}, and rank {other} enters {n_most}"
                )
        for together in zip(*(by_rank[rank] for rank in group), strict=True):
            leader = operations[together[0]]
            for i in together:
                if (operations[i].kind, operations[i].nbytes) != (leader.kind, leader.nbytes):
                    kind, nbytes, where = KINDS[operations[i].kind], operations[i].nbytes, operations[i].where
                    raise ConfigError(
                        f"{where}: all members of a group must enter the same collective, but this rank enters {kind} "
                        f"with {nbytes:.0f} bytes, whereas {leader.where} is {KINDS[leader.kind]} with "
                        f"{leader.nbytes:.0f} bytes"
                    )
                key[i] = n
            n += 1


def _plan(
    operations: Sequence[Operation], key: Sequence[int], rows: Ints, lane_names: Sequence[str | None], n_ranks: int
) -> Plan:
    """Return the plan whose rows are the operations in this order."""
    lanes: dict[Lane, int] = {}
    groups: dict[tuple[int, ...], int] = {}
    names: dict[str, int] = {}
    place = np.empty(len(rows), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    by_row = [operations[i] for i in rows.tolist()]
    lane_of = [lane_names[i] for i in rows.tolist()]
    ordered = [
        Lane(one.rank, name) if name is not None else Lane(one.rank, WAITING, 0)
        for one, name in zip(by_row, lane_of, strict=True)
    ]
    if len(by_row) == 0 or max(one.rank for one in by_row) < n_ranks - 1:
        lanes[Lane(n_ranks - 1, WAITING, 0)] = 0  # ranks without operations count as well
    column = [lanes.setdefault(lane, len(lanes)) for lane in ordered]
    peer = [groups.setdefault(one.group, len(groups)) if one.kind >= ALL_REDUCE else one.peer for one in by_row]
    name = [names.setdefault(one.name, len(names)) if one.name else -1 for one in by_row]
    where = place.tolist()
    needs = [sorted({where[need] for need in one.needs}) for one in by_row]
    none = np.full(len(rows), -1)
    return Plan(
        lanes=tuple(lanes), queues=(PriorityQueue(1),), groups=tuple(groups), parts=(), names=tuple(names), n_layers=0,
        lane=np.array(column, dtype=np.int64), kind=np.array([one.kind for one in by_row], dtype=np.int64),
        name=np.array(name, dtype=np.int64), seconds=np.array([one.seconds for one in by_row], dtype=np.float64),
        nbytes=np.array([one.nbytes for one in by_row], dtype=np.float64), peer=np.array(peer, dtype=np.int64),
        key=np.array(key, dtype=np.int64)[rows], step=0 * none, batch=none, first=0 * none, end=0 * none, part=none,
        holds=np.zeros(len(rows)), need_offsets=np.cumsum([0, *map(len, needs)]),
        needs=np.array([need for one in needs for need in one], dtype=np.int64),
    )  # fmt: skip
