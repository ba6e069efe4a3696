"""Rounds of messages between hosts on a switch with a transport, event by event in plain Python: an oracle."""

import numpy as np
from network_reference import fair_rates


def rounds_on_a_star(n_hosts, rounds, rate, latency, *, rendezvous=0.0, ordered=False, limit=np.inf):
    """Return when the last of the rounds ends.

    rounds     lists of (source, target, bytes); a host enters a round when its sends and receipts of the last one it
               takes part in are done
    latency    s of a path; rendezvous: bytes above which a message asks first; limit: bytes/s of a pair's connection
    """
    mine = [[k for k, messages in enumerate(rounds) if any(h in m[:2] for m in messages)] for h in range(n_hosts)]
    place = [0] * n_hosts
    entered = [{mine[h][0]: 0.0} if mine[h] else {} for h in range(n_hosts)]
    begin, left, done, turn = {}, {}, {}, {}
    now, end = 0.0, 0.0
    queue = {}
    while True:
        # who has been asked, answered, and stands in line
        for k, messages in enumerate(rounds):
            for i, (source, target, nbytes) in enumerate(messages):
                if (k, i) in begin or k not in entered[source]:
                    continue
                asked = entered[source][k] + latency
                if not 0 < rendezvous < nbytes:
                    begin[k, i] = asked
                elif k in entered[target]:
                    begin[k, i] = max(asked, entered[target][k]) + 2 * latency
        moving = []
        for message in sorted((m for m in begin if begin[m] <= now and m not in done), key=lambda m: (begin[m], m)):
            source, target, nbytes = rounds[message[0]][message[1]]
            left.setdefault(message, float(nbytes))
            waiting = queue.setdefault((source, target), [])
            if message not in turn:
                turn[message] = True
                waiting.append(message)
            if not ordered or waiting[0] == message:
                moving.append(message)
        pairs = sorted({rounds[k][i][:2] for k, i in moving})
        capacity = [rate] * (2 * n_hosts) + [limit] * len(pairs)
        hops = []
        for k, i in moving:
            source, target, _ = rounds[k][i]
            own = [2 * n_hosts + pairs.index((source, target))] if limit < rate else []
            hops.append([source, n_hosts + target, *own])
        rates = fair_rates(np.array(capacity), hops) if moving else np.zeros(0)
        ends = [now + left[m] / r for m, r in zip(moving, rates, strict=True)]
        then = min([*ends, *(t for t in begin.values() if t > now)], default=np.inf)
        if then == np.inf:
            assert all(place[h] == len(mine[h]) for h in range(n_hosts)), "nobody can go on"
            return end
        for m, r, e in zip(moving, rates, ends, strict=True):
            left[m] -= r * (then - now)
            if e <= then * (1 + 1e-14):
                done[m] = end = then
                queue[rounds[m[0]][m[1]][:2]].remove(m)
        now = then
        for h in range(n_hosts):
            while place[h] < len(mine[h]):
                k = mine[h][place[h]]
                if any((k, i) not in done for i, m in enumerate(rounds[k]) if h in m[:2]):
                    break
                place[h] += 1
                if place[h] < len(mine[h]):
                    entered[h][mine[h][place[h]]] = now
