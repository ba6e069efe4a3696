"""From all-reduces to parameter servers: a transformation of plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_REDUCE, COLUMNS, PUSH_PULL, Lane, Plan


@checked
def through_servers(plan: Plan, n_servers: Count = 1) -> Plan:
    """Return a plan whose ranks push gradients to `n_servers` parameter servers and pull the sums (Li et al. 2014,
    OSDI, section 3), instead of all-reducing them.

    The servers are ranks behind the others, each with an equal part of every buffer and a lane "server" on which it
    takes part in everything, in the order of the workers' first rows. Raises ConfigError for a plan with servers, and
    for one that has other collectives than all-reduces, of all ranks.
    """
    rows, n = plan.collectives, plan.n_ranks
    if plan.servers or (plan.kind[rows] != ALL_REDUCE).any() or any(len(group) != n for group in plan.groups):
        raise ConfigError("through_servers: the plan must have no collectives but all-reduces of all ranks, no servers")
    _, first = np.unique(plan.key[rows], return_index=True)
    copied = rows[np.sort(first)]
    servers = tuple(range(n, n + n_servers))
    queue = int(plan.queue[copied[0]]) if len(copied) else -1
    lanes = (*plan.lanes, *(Lane(server, "server", queue) for server in servers))
    columns: dict[str, Any] = {name: np.concatenate([getattr(plan, name), *[getattr(plan, name)[copied]] * n_servers])
               for name in COLUMNS}  # fmt: skip
    columns["lane"][len(plan) :] = np.repeat(len(plan.lanes) + np.arange(n_servers), len(copied))
    columns["kind"][columns["kind"] == ALL_REDUCE] = PUSH_PULL
    offsets = np.append(plan.need_offsets, np.full(n_servers * len(copied), plan.need_offsets[-1]))
    groups = tuple((*group, *servers) for group in plan.groups)
    return dataclasses.replace(plan, lanes=lanes, groups=groups, servers=servers, need_offsets=offsets, **columns)
