"""Transformation of plans: all-reduces become pushes to and pulls from parameter servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.inserted import Task, expanded
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, COMPUTE, PUSH_PULL, RECEIVE, SEND, Lane, Plan


@checked
def with_parameter_servers(plan: Plan, n_servers: Count = 1) -> Plan:
    """Return a plan that uses parameter servers instead of all-reduces.

    plan       plan with all-reduces over all ranks, and no other collectives
    n_servers  number of parameter servers, which become additional ranks after the workers

    Ranks push gradients to the servers and pull the sums (Li et al. 2014, OSDI, section 3). Each server stores an equal
    part of every buffer. On each server, all push-pulls run on the lane "server", in the order in which they first
    appear in the workers' tasks.

    Raises ConfigError if the plan already has servers, or collectives other than all-reduces over all ranks.
    """
    rows, n = plan.collectives, plan.n_ranks
    if plan.servers or (plan.kind[rows] != ALL_REDUCE).any() or any(len(group) != n for group in plan.groups):
        raise ConfigError(
            "with_parameter_servers: the plan must have no servers, and no collectives other than all-reduces over all "
            "ranks"
        )
    _, first = np.unique(plan.key[rows], return_index=True)
    copied = rows[np.sort(first)]
    servers = tuple(range(n, n + n_servers))
    queue = int(plan.queue[copied[0]]) if len(copied) else -1
    lanes = (*plan.lanes, *(Lane(server, "server", queue) for server in servers))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(plan, name), *[getattr(plan, name)[copied]] * n_servers]) for name in COLUMNS
    }
    columns["lane"][len(plan) :] = np.repeat(len(plan.lanes) + np.arange(n_servers), len(copied))
    columns["kind"][columns["kind"] == ALL_REDUCE] = PUSH_PULL
    offsets = np.append(plan.need_offsets, np.full(n_servers * len(copied), plan.need_offsets[-1]))
    groups = tuple((*group, *servers) for group in plan.groups)
    return dataclasses.replace(plan, lanes=lanes, groups=groups, servers=servers, need_offsets=offsets, **columns)


class Service(NamedTuple):
    """Total bytes that a worker pushes to all servers and pulls from them; seconds of each server in between."""

    pushed: float
    pulled: float
    seconds: Sequence[float]


def as_messages(plan: Plan, services: Mapping[int, Service] = MappingProxyType({})) -> Plan:
    """Return a plan whose push-pulls are messages: each worker sends a part to every server, which answers all workers
    when it has received all parts.

    services  key of a push-pull -> service; by default its bytes, in no time
    """
    lanes = {lane: number for number, lane in enumerate(plan.lanes)}
    servers, n = set(plan.servers), len(plan.servers)
    tasks: dict[int, list[Task]] = {}

    def message(row: int, to: int, nbytes: float, kind: int, name: str) -> dict[str, float]:
        """Return the columns of one end of a message; both ends have the same key."""
        rank = int(plan.rank[row])
        ends = (rank, to) if kind == SEND else (to, rank)
        key = (int(plan.key[row]) * plan.n_ranks + ends[0]) * plan.n_ranks + ends[1]
        lane = lanes.setdefault(Lane(rank, name), len(lanes))
        return {"kind": kind, "peer": to, "nbytes": nbytes / n, "key": len(plan) + key, "lane": lane, "part": -1}

    for row in plan.rows(PUSH_PULL).tolist():
        nbytes = float(plan.nbytes[row])
        pushed, pulled, seconds = services.get(int(plan.key[row]), Service(nbytes, nbytes, (0.0,) * n))
        own = plan.lanes[plan.lane[row]].name
        others = [rank for rank in plan.groups[plan.peer[row]] if (rank in servers) != (int(plan.rank[row]) in servers)]
        if int(plan.rank[row]) in servers:
            tasks[row] = [Task(message(row, to, pushed, RECEIVE, f"{own} {to}")) for to in others]
            arrived: Sequence[int] = range(len(others))
            if (needed := seconds[plan.servers.index(int(plan.rank[row]))]) > 0.0:
                work = {"kind": COMPUTE, "seconds": needed, "nbytes": 0.0, "peer": -1, "key": -1, "part": -1}
                tasks[row].append(Task(work, arrived))
                arrived = [len(others)]
            tasks[row] += [Task(message(row, to, pulled, SEND, f"{own} {to}"), arrived) for to in others]
            continue
        tasks[row] = []
        for place, to in enumerate(others):
            tasks[row] += [
                Task(message(row, to, pushed, SEND, f"{own} {to}")),
                Task(message(row, to, pulled, RECEIVE, f"{own} {to}"), [2 * place]),
            ]
    return expanded(plan, tasks, lanes=tuple(lanes)) if tasks else plan
