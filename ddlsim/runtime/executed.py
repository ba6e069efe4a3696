"""Plans of steps as executed in a run, with encoding and decoding times and the collectives of encoded vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ddlsim.plan.inserted import DECODE, ENCODE, SUMMING, Task, expanded
from ddlsim.plan.plan import KINDS, Plan
from ddlsim.plan.servers import as_messages, with_parameter_servers
from ddlsim.runtime.exchange import Exchange, way_of
from ddlsim.runtime.worker import Worker


def as_executed(plan: Plan, exchange_of: Callable[[int, int, bool], Exchange], workers: Sequence[Worker]) -> Plan:
    """Return the plan of steps with the tasks that their exchanges add.

    exchange_of  kind of collective, group, whether it is of parts of the gradients -> its exchange
    workers      of the ranks

    An encoded collective becomes the collectives that its codec needs, one task each. A sum through servers becomes a
    push-pull, or messages if the encoded answer has another size.
    """
    exchanges = {row: exchange_of(*way_of(plan, row)) for row in plan.collectives.tolist()}
    different = list(dict.fromkeys(exchanges.values()))
    plan = _with_seconds(plan, exchanges, workers)
    notes = dict.fromkeys([*plan.notes, *(note for exchange in different for note in exchange.plan_notes)])
    plan = dataclasses.replace(plan, notes=tuple(notes))
    coded = {row: exchange for row, exchange in exchanges.items() if exchange.codec is not None}
    n_servers = max((exchange.communicator.n_bystanders for exchange in different), default=0)
    if not n_servers:
        return _in_calls(plan, coded, workers)
    services = {
        int(plan.key[row]): exchange.service(int(plan.step[row]), int(plan.part[row]))
        for row, exchange in coded.items()
    }
    plan = with_parameter_servers(plan, n_servers)
    return as_messages(plan, services) if services else plan


def _with_seconds(plan: Plan, exchanges: Mapping[int, Exchange], workers: Sequence[Worker]) -> Plan:
    """Return the plan with the seconds of encoding and decoding."""
    coding = np.array([name in (ENCODE, DECODE) for name in plan.names] + [False])[plan.name]
    if not coding.any():
        return plan
    summing = {
        (int(plan.rank[row]), int(plan.part[row])): exchange
        for row, exchange in exchanges.items()
        if plan.kind[row] in SUMMING and plan.part[row] >= 0
    }
    seconds = plan.seconds.copy()
    for row in np.flatnonzero(coding).tolist():
        rank, part = int(plan.rank[row]), int(plan.part[row])
        exchange = summing[rank, part]
        of = exchange.encode_seconds if plan.names[plan.name[row]] == ENCODE else exchange.decode_seconds
        seconds[row] = of(workers[rank], int(plan.step[row]), part)
    return dataclasses.replace(plan, seconds=seconds)


def _in_calls(plan: Plan, coded: Mapping[int, Exchange], workers: Sequence[Worker]) -> Plan:
    """Return the plan with each encoded collective replaced by those that its codec needs."""
    groups = {group: number for number, group in enumerate(plan.groups)}
    keys: dict[tuple[int, int, int], int] = {}
    tasks: dict[int, list[Task]] = {}
    for row, exchange in coded.items():
        place = exchange.place[workers[plan.rank[row]].rank]
        calls = exchange.calls(int(plan.step[row]), [int(plan.part[row])], float(plan.nbytes[row]), place)
        tasks[row] = []
        for number, call in enumerate(calls):
            kind, members = KINDS.index(call.kind), plan.groups[plan.peer[row]]
            if len(call.communicator.workers) < len(members):
                members = tuple(members[exchange.place[worker.rank]] for worker in call.communicator.workers)
            group = groups.setdefault(members, len(groups))
            key = keys.setdefault((int(plan.key[row]), number, group), len(plan) + len(keys))
            is_sum = kind in SUMMING and number == len(calls) - 1
            columns = {"kind": kind, "nbytes": call.nbytes, "peer": group, "key": key}
            columns["part"] = int(plan.part[row]) if is_sum else -1
            tasks[row].append(Task(columns, [number - 1] if number else ()))
    return expanded(plan, tasks, groups=tuple(groups)) if tasks else plan
