"""Plans that several tests need."""

import dataclasses

import numpy as np
from unrolled import data_parallel

from ddlsim.plan import Draft, Part
from ddlsim.plan.plan import COLUMNS
from ddlsim.workload.buckets import ddp_buckets
from ddlsim.workload.compute import make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model


def workload(model="resnet50", batch_size=8, **more):
    return make_workload(load_model(model), load_device("v100"), batch_size, **more)


def two_ranks(n_ranks=2, **more):
    """Return a plan of data parallelism with a few buckets and two steps."""
    return data_parallel(workload(), n_ranks, ddp_buckets, **{"steps": 2, **more})


def changed(plan, **columns):
    return dataclasses.replace(plan, **columns)


def with_value(plan, column, rows, value):
    """Return a plan with a column changed in some rows."""
    values = getattr(plan, column).copy()
    values[rows] = value
    return changed(plan, **{column: values})


def without(plan, rows):
    """Return a plan without some rows, whose needs are passed on to those that needed them."""
    keep = np.ones(len(plan), dtype=bool)
    keep[rows] = False
    number = np.cumsum(keep) - 1
    offsets, needs = plan.need_offsets.tolist(), plan.needs.tolist()

    def needed(row):
        for need in needs[offsets[row] : offsets[row + 1]]:
            if keep[need]:
                yield int(number[need])
            else:
                yield from needed(need)

    lists = [list(needed(row)) for row in np.flatnonzero(keep).tolist()]
    columns = {name: getattr(plan, name)[keep] for name in COLUMNS}
    needs = np.array([need for each in lists for need in each], dtype=np.int64)
    return changed(plan, **columns, need_offsets=np.cumsum([0, *map(len, lists)]), needs=needs)


def reordered(plan, order):
    """Return a plan whose rows stand in another order."""
    order = np.asarray(order)
    number = np.empty(len(plan), dtype=np.int64)
    number[order] = np.arange(len(plan))
    lists = [number[plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]]] for row in order.tolist()]
    columns = {name: getattr(plan, name)[order] for name in COLUMNS}
    return changed(plan, **columns, need_offsets=np.cumsum([0, *map(len, lists)]), needs=np.concatenate(lists))


def swapped(plan, a, b):
    """Return a plan in which two rows have changed places."""
    order = np.arange(len(plan))
    order[[a, b]] = order[[b, a]]
    return reordered(plan, order)


def hand_made():
    """Return one step of two ranks with one layer, written row by row: rows 0 and 3 forward, 1 and 4 backward,
    6 and 7 all-reduce, 8 and 9 update; 2 and 5 other work."""
    draft = Draft(1, [Part(1e6, 0, 1)])
    backward = []
    for rank in (0, 1):
        draft.work(rank, 1.0, kind="forward", batch=rank, layers=(0, 1), holds=100.0)
        backward.append(draft.work(rank, 2.0, kind="backward", batch=rank, layers=(0, 1), holds=-100.0))
        draft.work(rank, 0.5, "log")
    rows = draft.all_reduce([0, 1], 1e6, [[backward[0]], [backward[1]]], part=0)
    for rank in (0, 1):
        draft.work(rank, 0.25, kind="update", layers=(0, 1), needs=[rows[rank]])
    return draft.plan()


#: of which no member ends before all have started, whatever the algorithm
TOGETHER = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "push_pull")


def random_plan(rng, n_ranks=4, n_tasks=40, *, seconds=True, kinds=("all_reduce",)):
    """Return a plan of work, messages and collectives that need what was written before them.

    The last two ranks are servers, where one of the collectives is a push_pull.
    """
    n_servers = 2 if "push_pull" in kinds else 0
    draft = Draft(servers=range(n_ranks - n_servers, n_ranks))
    written = {rank: [] for rank in range(n_ranks)}

    def needs(rank):
        return rng.choice(written[rank], min(len(written[rank]), 2), replace=False).tolist() if written[rank] else []

    for _ in range(n_tasks):
        rank, other = rng.choice(n_ranks, 2, replace=False).tolist()
        what = rng.integers(4)
        if what < 2:
            lane = f"lane {rng.integers(2)}"
            time = float(rng.exponential()) if seconds else 0.0
            written[rank].append(draft.work(rank, time, lane=lane, needs=needs(rank), holds=float(rng.normal())))
        elif what == 2:
            lanes = ("lane 0", "inbox")
            send, receive = draft.message(rank, other, float(rng.integers(1, 10**6)), needs=needs(rank), lanes=lanes)
            written[rank].append(send)
            written[other].append(receive)
        else:
            kind = str(rng.choice(kinds))
            group = rng.choice(n_ranks - n_servers, rng.integers(2, n_ranks - n_servers + 1), replace=False).tolist()
            if kind == "push_pull":
                group += range(n_ranks - n_servers, n_ranks)
            rows = draft.collective(kind, group, float(rng.integers(1, 10**6)), [needs(rank) for rank in group])
            for rank, row in zip(group, rows, strict=True):
                written[rank].append(row)
    return draft.plan()
