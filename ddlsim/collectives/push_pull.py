"""The schedule of a synchronous push to parameter servers, and pull from them."""

from __future__ import annotations

import numpy as np

from ddlsim.cluster.groups import groups_of
from ddlsim.collectives.schedule import Ints, Round, Schedule, messages


def push_pull(n_workers: int, n_servers: int, hosts: list[int] | None = None, *, star: bool = False) -> Schedule:
    """Return the schedule in which workers push gradients to parameter servers and pull the sums.

    Ranks 0 to n_workers-1 are workers, the others servers; shard i of n_servers is on server i (Li et al. 2014, OSDI,
    section 3).

    hosts  machine of each worker. If given, gradients are first reduced inside each machine, in a binomial tree whose
           root is the machine's first worker, which pushes, pulls and broadcasts the result.
    star   whether the other workers of a machine send to and receive from its first worker directly (MXNet's
           CommDevice, src/kvstore/comm.h)
    """
    n = n_workers + n_servers
    shards = np.arange(n_servers)
    leaders, before, after = inside(hosts, n_workers, n_servers, star=star)
    worker, shard = (a.ravel() for a in np.meshgrid(leaders, shards, indexing="ij"))
    push = messages(worker, n_workers + shard, shard, reduce=True)
    pull = messages(n_workers + shard, worker, shard, reduce=False)
    return Schedule(n, n_servers, ((*before, push, pull, *after),))


def inside(
    hosts: list[int] | None, n_workers: int, n_chunks: int, *, star: bool
) -> tuple[Ints, tuple[Round, ...], tuple[Round, ...]]:
    """Return each machine's first worker, and the rounds that reduce to it and broadcast from it, in binomial trees or
    (`star`) directly. Without `hosts`, every worker is its own machine."""
    if hosts is None:
        return np.arange(n_workers), (), ()
    leaders = np.unique(hosts, return_index=True)[1].astype(np.int64)
    machines = [ranks.tolist() for ranks in groups_of(np.asarray(hosts))]
    largest = max(map(len, machines))
    reduce: list[Round] = []
    for distance in [] if star else [1 << k for k in range((largest - 1).bit_length())]:
        pairs = [
            (ranks[i + distance], ranks[i]) for ranks in machines for i in range(0, len(ranks) - distance, 2 * distance)
        ]
        reduce.append(_to_leaders(pairs, n_chunks))
    if star and largest > 1:
        pairs = [(rank, ranks[0]) for ranks in machines for rank in ranks[1:]]
        reduce.append(_to_leaders(pairs, n_chunks))
    broadcast = [messages(r.dst, r.src, 0, n_chunks, reduce=False) for r in reversed(reduce)]
    return leaders, tuple(reduce), tuple(broadcast)


def _to_leaders(pairs: list[tuple[int, int]], n_chunks: int) -> Round:
    src, dst = np.array(pairs, dtype=np.int64).T
    return messages(src, dst, 0, n_chunks, reduce=True)
