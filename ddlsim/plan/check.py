"""The proof that a plan trains: `check` raises for the first rule that is broken, and names the task.

As :mod:`ddlsim.collectives.check` does for a schedule, gradients are replayed as numbers that stand for
micro-batches: a part is whole where the numbers of all micro-batches have been added up, each once.
"""

from __future__ import annotations

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.exchanges import check_exchanges
from ddlsim.plan.gradients import check_gradients
from ddlsim.plan.order import Order
from ddlsim.plan.overlaps import overlapping
from ddlsim.plan.plan import BACKWARD, FORWARD, KINDS, Ints, Plan

__all__ = ["check"]


def check(plan: Plan) -> None:
    """Prove a plan. Raises ConfigError, naming the task, unless

    - every message has one sender and one receiver, and every collective all members of its group, once each;
    - everything can run: no circle of needs, of lanes, or of collectives that are entered in conflicting orders;
    - every micro-batch of every step passes every layer forward once and backward once, in that order on the rank;
    - before an update, every micro-batch's gradient of its layers has been added up exactly once, and each bucket left
      after the backward passes that fill it;
    - weights are updated once a step where they are used, and before the next step uses them.

    The order of two tasks of a rank must follow from the lanes and needs of that rank. Plans without layers (whose
    tasks are only work and messages) have only the first two to fulfil.
    """
    check_exchanges(plan)
    order = Order(plan)
    if len(order.events) and plan.n_layers:
        _check_passes(plan, order)
        check_gradients(plan, order)


def _check_passes(plan: Plan, order: Order) -> None:
    n_batches = int(plan.batch.max(initial=-1)) + 1
    forward, backward = (_each_once(plan, kind, n_batches) for kind in (FORWARD, BACKWARD))
    # in this order, a pass comes before the next: forward from the first layer, backward from the last
    for rows, after in ((forward, "after"), (backward[::-1], "before")):
        follows = (plan.step[rows[1:]] == plan.step[rows[:-1]]) & (plan.batch[rows[1:]] == plan.batch[rows[:-1]])
        follows &= plan.rank[rows[1:]] == plan.rank[rows[:-1]]
        first, second = rows[:-1][follows], rows[1:][follows]
        order.demand(first, second, f"which comes {after} it in the model")
    sides = [plan.step[rows] * n_batches + plan.batch[rows] for rows in (forward, backward)]
    first, second = overlapping(sides[0], plan.first[forward], plan.end[forward],
                                sides[1], plan.first[backward], plan.end[backward])  # fmt: skip
    elsewhere = plan.rank[forward[first]] != plan.rank[backward[second]]
    for a, b in zip(forward[first][elsewhere].tolist(), backward[second][elsewhere].tolist(), strict=True):
        raise ConfigError(f"plan: {plan.task(b)}: its activations are on another rank, where {plan.task(a)} ran")
    order.demand(forward[first], backward[second], "whose activations it uses")


def _each_once(plan: Plan, kind: int, n_batches: int) -> Ints:
    """Return the forward (or backward) rows by step, batch and layer, after checking that they cover each once."""
    rows = plan.rows(kind)
    for row in rows[(plan.batch[rows] < 0) | (plan.end[rows] <= plan.first[rows])].tolist():
        raise ConfigError(f"plan: {plan.task(row)}: it has no micro-batch or no layers")
    rows = rows[np.lexsort((plan.first[rows], plan.batch[rows], plan.step[rows]))]
    name = KINDS[kind]
    passes = plan.step[rows] * n_batches + plan.batch[rows]
    missing = np.setdiff1d(np.arange(plan.n_steps * n_batches), passes)
    if len(missing) or not n_batches:
        step, batch = divmod(int(missing[0]), n_batches) if n_batches else (0, 0)
        raise ConfigError(f"plan: batch {batch} of step {step} never goes {name}; every micro-batch must once")
    begins = np.diff(passes, prepend=-1) != 0
    expected = np.where(begins, 0, np.concatenate([[0], plan.end[rows][:-1]]))
    wrong = plan.first[rows] != expected
    for row, layer in zip(rows[wrong].tolist(), expected[wrong].tolist(), strict=True):
        first = int(plan.first[row])
        if first < layer:
            raise ConfigError(f"plan: {plan.task(row)}: layer {first} goes {name} a second time for this batch")
        raise ConfigError(f"plan: {plan.task(row)}: layer {layer} never goes {name} for this batch")
    last = np.append(begins[1:], True)
    for row in rows[last & (plan.end[rows] < plan.n_layers)].tolist():
        raise ConfigError(f"plan: {plan.task(row)}: layer {plan.end[row]} never goes {name} for this batch")
    return rows

