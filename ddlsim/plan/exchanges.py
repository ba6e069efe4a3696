"""Messages have two ends, and collectives all their members."""

from __future__ import annotations

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import PUSH_PULL, RECEIVE, SEND, Bools, Ints, Plan


def check_exchanges(plan: Plan) -> None:
    """Raise ConfigError for a message that nobody receives or sends, and a collective that not all members enter."""
    _messages(plan)
    _collectives(plan)


def _messages(plan: Plan) -> None:
    send, receive = plan.rows(SEND), plan.rows(RECEIVE)
    for rows, others, problem in ((send, receive, "nobody receives it"), (receive, send, "nobody sends it")):
        _refuse(plan, rows, ~np.isin(plan.key[rows], plan.key[others]), problem)
        keys = plan.key[rows]
        again = np.ones(len(keys), dtype=np.bool_)
        again[np.unique(keys, return_index=True)[1]] = False
        _refuse(plan, rows, again, "another row has the same key; give every message its own")
    send, receive = send[np.argsort(plan.key[send])], receive[np.argsort(plan.key[receive])]
    wrong = (plan.peer[send] != plan.rank[receive]) | (plan.peer[receive] != plan.rank[send])
    for a, b in zip(send[wrong].tolist(), receive[wrong].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(a)}: nobody receives it: the other end is {plan.task(b)}")
    unequal = plan.nbytes[send] != plan.nbytes[receive]
    for a, b in zip(send[unequal].tolist(), receive[unequal].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(a)} has {plan.nbytes[a]:.0f} bytes, {plan.task(b)} {plan.nbytes[b]:.0f}")


def _collectives(plan: Plan) -> None:
    rows = plan.collectives
    if not len(rows):
        return
    _refuse(plan, rows, plan.peer[rows] < 0, "it has no group")
    _, first, which = np.unique(plan.key[rows], return_index=True, return_inverse=True)
    leader = rows[first][which.reshape(-1)]  # the first row of the same collective
    for name, text in (("kind", "kind"), ("peer", "group"), ("nbytes", "bytes"), ("part", "part"), ("step", "step"),
                       ("queue", "queue")):  # fmt: skip
        column = getattr(plan, name)
        wrong = column[rows] != column[leader]
        for row, other in zip(rows[wrong].tolist(), leader[wrong].tolist(), strict=True):
            raise ConfigError(
                f"plan: {plan.task(row)} and {plan.task(other)} are one collective (key {plan.key[row]}) but differ in "
                f"{text}: {column[row]:g}, {column[other]:g}"
            )
    belongs = np.zeros((len(plan.groups), plan.n_ranks), dtype=np.bool_)
    for i, group in enumerate(plan.groups):
        belongs[i, list(group)] = True
    _refuse(plan, rows, ~belongs[plan.peer[rows], plan.rank[rows]], "its rank is not in the collective's group")
    member = plan.key[rows] * plan.n_ranks + plan.rank[rows]
    again = np.ones(len(rows), dtype=np.bool_)
    again[np.unique(member, return_index=True)[1]] = False
    _refuse(plan, rows, again, "its rank enters the same collective twice")
    queued = rows[plan.queue[rows] >= 0]
    for name, column in (("group", plan.peer), ("kind", plan.kind)):
        served = np.full(len(plan.queues), -1, dtype=np.int64)
        served[plan.queue[queued]] = column[queued]
        _refuse(plan, queued, column[queued] != served[plan.queue[queued]], f"its queue serves another {name} too")
    is_server = np.isin(np.arange(plan.n_ranks), plan.servers)
    behind = np.array([_servers_behind(is_server[list(group)]) for group in plan.groups], dtype=np.bool_)
    wrong = (plan.kind[rows] == PUSH_PULL) & ~behind[plan.peer[rows]]
    _refuse(plan, rows, wrong, "its group must be workers and, behind them, servers (Plan.servers)")
    sizes = belongs.sum(axis=1)
    lacking = np.bincount(which.reshape(-1)) < sizes[plan.peer[rows[first]]]
    for row in rows[first][lacking].tolist():
        present = plan.rank[rows[plan.key[rows] == plan.key[row]]]
        absent = sorted(set(plan.groups[plan.peer[row]]) - set(present.tolist()))
        raise ConfigError(f"plan: {plan.task(row)}: rank {absent[0]} of its group never enters this collective")


def _servers_behind(is_server: Bools) -> bool:
    """Return whether a group's members are workers, then servers."""
    return len(is_server) > 1 and not is_server[0] and bool(is_server[-1]) and bool((np.diff(is_server * 1) >= 0).all())


def _refuse(plan: Plan, rows: Ints, wrong: Bools, problem: str) -> None:
    if wrong.any():
        raise ConfigError(f"plan: {plan.task(int(rows[wrong][0]))}: {problem}")
