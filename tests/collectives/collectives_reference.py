"""A slow, plain executor of schedules: the independent oracle for closed forms and for the compiled kernel.

Every rank has one full-duplex port of 1 / beta bytes/s in each direction; nothing else is contended. A
message takes alpha without using bandwidth, then a max-min fair share of the sender's and receiver's ports,
then gamma per byte at the receiver if it is reduced. Rounds follow the rule of docs/architecture.md.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from ddlsim.collectives import Schedule


def fair_rates(flows: dict, capacity: float) -> dict:
    """Progressive filling: flow key -> rate, for flows key -> (sender, receiver)."""
    users = defaultdict(set)
    for key, (src, dst) in flows.items():
        users["out", src].add(key)
        users["in", dst].add(key)
    left = dict.fromkeys(users, capacity)
    rates = {}
    while len(rates) < len(flows):
        port = min((p for p in users if users[p]), key=lambda p: left[p] / len(users[p]))
        share = left[port] / len(users[port])
        for key in list(users[port]):
            rates[key] = share
            src, dst = flows[key]
            for other in (("out", src), ("in", dst)):
                users[other].discard(key)
                left[other] -= share
    return rates


def execute(
    schedule: Schedule, nbytes: float, alpha: float, beta: float, gamma: float = 0.0, entry=None
) -> list[float]:
    """Return when each rank's collective ends; `entry[r]` is when rank r enters it (default: 0)."""
    # what each (lane, rank) does, in order: (round, repetition), its sends, the number of its messages
    agenda = defaultdict(list)
    messages = {}  # key -> (sender, receiver, bytes, reduced)
    for i, lane in enumerate(schedule.lanes):
        for k, round in enumerate(lane):
            for repetition in range(round.repeat):
                step = (i, k, repetition)
                sends, n_own = defaultdict(list), defaultdict(int)
                sizes = schedule.message_bytes(nbytes, round, repetition)
                for m, (src, dst) in enumerate(zip(round.src.tolist(), round.dst.tolist(), strict=True)):
                    messages[*step, m] = (src, dst, float(sizes[m]) + round.header, round.reduce)
                    sends[src].append((*step, m))
                    n_own[src] += 1
                    n_own[dst] += 1
                for rank, n in n_own.items():
                    agenda[i, rank].append((step, sends[rank], n))
    entry = entry or [0.0] * schedule.n_ranks
    end = list(entry)
    position = dict.fromkeys(agenda, -1)
    waiting = {}  # (lane, rank, step) -> messages of that step not done yet
    for (i, rank), steps in agenda.items():
        for step, _, n in steps:
            waiting[i, rank, step] = n
    events = []  # (time, order, what, lane and rank or message)
    moving, remaining = {}, {}
    order = iter(range(10**9))

    def advance(i: int, rank: int, now: float) -> None:
        """Enter the next round, and further ones while these are done already."""
        place = position[i, rank] = position[i, rank] + 1
        if place == len(agenda[i, rank]):
            end[rank] = max(end[rank], now)
            return
        step, sends, _ = agenda[i, rank][place]
        for key in sends:
            heapq.heappush(events, (now + alpha, next(order), "flow", key))
        if waiting[i, rank, step] == 0:
            advance(i, rank, now)

    def done(rank: int, key: tuple, now: float) -> None:
        i, step = key[0], key[:3]
        waiting[i, rank, step] -= 1
        place = position[i, rank]
        if waiting[i, rank, step] == 0 and place >= 0 and agenda[i, rank][place][0] == step:
            advance(i, rank, now)

    for i, rank in agenda:
        heapq.heappush(events, (entry[rank], next(order), "enter", (i, rank)))
    now = 0.0
    rates = {}
    while events or moving:
        ends = {key: now + remaining[key] / rates[key] for key in moving}
        time = min([*ends.values(), *(e[0] for e in events[:1])])
        instant = time * (1 + 1e-13)
        for key in moving:
            remaining[key] -= rates[key] * (time - now)
        now = time
        for key in [k for k in moving if ends[k] <= instant]:
            src, dst, size, reduced = messages[key]
            del moving[key], remaining[key]
            heapq.heappush(events, (now + gamma * size * reduced, next(order), "arrive", key))
            done(src, key, now)
        while events and events[0][0] <= instant:
            _, _, what, key = heapq.heappop(events)
            if what == "flow":
                moving[key], remaining[key] = messages[key][:2], messages[key][2]
            elif what == "arrive":
                done(messages[key][1], key, now)
            else:
                advance(*key, now)
        rates = fair_rates(moving, 1.0 / beta)
    assert all(n == 0 for n in waiting.values()), "some rank waits for ever"
    return end
