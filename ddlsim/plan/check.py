"""Check that a plan trains correctly: `check` raises for the first violated rule, and names the task.

As in :mod:`ddlsim.collectives.check` for schedules, gradients are replayed as numbers that represent micro-batches: a
part is complete if the numbers of all micro-batches have been added, each exactly once.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.gradients import check_gradients
from ddlsim.plan.order import Order
from ddlsim.plan.plan import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    KINDS,
    PUSH_PULL,
    RECEIVE,
    SEND,
    Bools,
    Ints,
    Plan,
)
from ddlsim.plan.rows import joined, overlapping, refuse, repeats


def check_exchanges(plan: Plan) -> None:
    """Raise ConfigError for a message without a receiver or a sender, and a collective that not all members enter."""
    _messages(plan)
    _collectives(plan)


def _messages(plan: Plan) -> None:
    send, receive = plan.rows(SEND), plan.rows(RECEIVE)
    for rows, others, problem in ((send, receive, "no task receives it"), (receive, send, "no task sends it")):
        refuse(plan, rows[~np.isin(plan.key[rows], plan.key[others])], problem)
        refuse(plan, rows[repeats(plan.key[rows])], "another row has the same key; every message needs its own")
    send, receive = send[np.argsort(plan.key[send])], receive[np.argsort(plan.key[receive])]
    wrong = (plan.peer[send] != plan.rank[receive]) | (plan.peer[receive] != plan.rank[send])
    for sender, receiver in zip(send[wrong].tolist(), receive[wrong].tolist(), strict=True):
        raise ConfigError(
            f"plan: {plan.task(sender)} has no matching receive; the task with the same key is {plan.task(receiver)}"
        )
    unequal = plan.nbytes[send] != plan.nbytes[receive]
    for sender, receiver in zip(send[unequal].tolist(), receive[unequal].tolist(), strict=True):
        sent, received = plan.nbytes[sender], plan.nbytes[receiver]
        raise ConfigError(
            f"plan: {plan.task(sender)} sends {sent:.0f} bytes, but {plan.task(receiver)} receives {received:.0f} bytes"
        )


def _collectives(plan: Plan) -> None:
    rows = plan.collectives
    if not len(rows):
        return
    refuse(plan, rows[plan.peer[rows] < 0], "it has no group")
    _, first, which = np.unique(plan.key[rows], return_index=True, return_inverse=True)
    leader = rows[first][which.reshape(-1)]  # first row of the same collective
    for name, label in (("kind", "kind"), ("peer", "group"), ("nbytes", "bytes"), ("part", "part"), ("step", "step"),
                       ("queue", "queue")):  # fmt: skip
        column = getattr(plan, name)
        wrong = column[rows] != column[leader]
        for task, other in zip(rows[wrong].tolist(), leader[wrong].tolist(), strict=True):
            key, value, expected = plan.key[task], column[task], column[other]
            raise ConfigError(
                f"plan: {plan.task(task)} and {plan.task(other)} belong to one collective (key "
                f"{key}), but differ in {label}: {value:g} and {expected:g}"
            )
    belongs = np.zeros((len(plan.groups), plan.n_ranks), dtype=np.bool_)
    for i, group in enumerate(plan.groups):
        belongs[i, list(group)] = True
    refuse(plan, rows[~belongs[plan.peer[rows], plan.rank[rows]]], "its rank is not in the collective's group")
    again = repeats(plan.key[rows] * plan.n_ranks + plan.rank[rows])
    refuse(plan, rows[again], "its rank enters the same collective twice")
    queued = rows[plan.queue[rows] >= 0]
    for name, column in (("group", plan.peer), ("kind", plan.kind)):
        served = np.full(len(plan.queues), -1, dtype=np.int64)
        served[plan.queue[queued]] = column[queued]
        wrong = column[queued] != served[plan.queue[queued]]
        refuse(plan, queued[wrong], f"its queue is also used by another {name}")
    is_server = np.isin(np.arange(plan.n_ranks), plan.servers)
    behind = np.array([_servers_behind(is_server[list(group)]) for group in plan.groups], dtype=np.bool_)
    wrong = (plan.kind[rows] == PUSH_PULL) & ~behind[plan.peer[rows]]
    refuse(plan, rows[wrong], "its group must consist of workers followed by servers (Plan.servers)")
    sizes = belongs.sum(axis=1)
    lacking = np.bincount(which.reshape(-1)) < sizes[plan.peer[rows[first]]]
    for task in rows[first][lacking].tolist():
        present = plan.rank[rows[plan.key[rows] == plan.key[task]]]
        absent = sorted(set(plan.groups[plan.peer[task]]) - set(present.tolist()))
        raise ConfigError(f"plan: {plan.task(task)}: rank {absent[0]} of its group never enters this collective")


def _servers_behind(is_server: Bools) -> bool:
    """Return whether a group's members are workers, then servers."""
    return len(is_server) > 1 and not is_server[0] and bool(is_server[-1]) and bool((np.diff(is_server * 1) >= 0).all())


def check(plan: Plan) -> None:
    """Check that a plan can run and trains a model correctly.

    Raises ConfigError for the first task that violates one of these rules:

    - Every message has one sender and one receiver. Every collective is entered once by each member of its group.
    - All tasks can run: there are no cyclic dependencies (including those implied by the task order on lanes), and
      ranks do not enter collectives in conflicting orders.
    - In every step, every micro-batch passes through every layer once forward and then once backward, on the rank that
      holds its activations. If adjacent layers are on different ranks, a message carries the micro-batch between them:
      it is sent after the pass of the first layer and received before the pass of the second. If weight gradients are
      computed separately, each is computed once, after the gradient of the input.
    - Before an update, the gradients of all micro-batches have been summed, each exactly once. A bucket is sent after
      the backward passes that fill it.
    - Weights are updated once per step where they are used, and before the next step uses them.

    If ranks split layers (``plan.tensor``), these rules apply to each part.

    If ``plan.delays`` sets the age of weights, each micro-batch passes through the model once over all steps, except
    that the last ones may lack a backward pass. All gradients of a micro-batch belong to the same update. The weights
    that it uses on a layer have the age set for this layer. Gradients of an update are summed after those of the
    previous update have been used.

    The order of two tasks of a rank must follow from the lanes and dependencies of that rank. For plans without layers
    (only work and messages), only the first two rules apply.
    """
    check_exchanges(plan)
    order = Order(plan)
    if not len(order.events) or not plan.n_layers:
        return
    for part in range(plan.tensor):
        of_part = plan if plan.tensor == 1 else _only(plan, part)
        _check_passes(of_part, order)
        check_gradients(of_part, order)


def _only(plan: Plan, part: int) -> Plan:
    """Return the plan in which only ranks with one part of each layer train; tasks of others become other work."""
    others = plan.rank % plan.tensor != part
    passes = others & (plan.kind < COMPUTE) | others & np.isin(plan.kind, (BACKWARD_INPUT, BACKWARD_WEIGHT))
    return dataclasses.replace(
        plan,
        kind=np.where(passes, COMPUTE, plan.kind),
        batch=np.where(others, -1, plan.batch),
        part=np.where(others, -1, plan.part),
    )


def _check_passes(plan: Plan, order: Order) -> None:
    if plan.delays:
        passage = plan.batch
        n_batches = n_passages = int(plan.batch[plan.rows(BACKWARD, BACKWARD_INPUT)].max(initial=-1)) + 1
    else:
        n_batches = int(plan.batch[plan.rows(FORWARD)].max(initial=-1)) + 1
        passage, n_passages = plan.step * n_batches + plan.batch, plan.n_steps * n_batches
    forward, backward = (
        _each_once(plan, kinds, passage, n_passages) for kinds in ((FORWARD,), (BACKWARD, BACKWARD_INPUT))
    )
    # in this order, a pass comes before the next: forward from the first layer, backward from the last
    for rows, after, cut in ((forward, "after", plan.end), (backward[::-1], "before", plan.first)):
        follows = passage[rows[1:]] == passage[rows[:-1]]
        first, second = rows[:-1][follows], rows[1:][follows]
        here = plan.rank[first] == plan.rank[second]
        order.demand(first[here], second[here], f"which comes {after} it in the model")
        _check_carried(plan, order, first[~here], second[~here], cut)
    rest = backward
    if len(plan.rows(BACKWARD_WEIGHT)):
        rest = np.union1d(backward, _each_once(plan, (BACKWARD, BACKWARD_WEIGHT), passage, n_passages))
    if plan.delays:
        _check_one_update(plan, rest)
    sides = [passage[rows] for rows in (forward, rest)]
    first, second = overlapping(
        sides[0], plan.first[forward], plan.end[forward], sides[1], plan.first[rest], plan.end[rest]
    )
    elsewhere = plan.rank[forward[first]] != plan.rank[rest[second]]
    for source, task in zip(forward[first][elsewhere].tolist(), rest[second][elsewhere].tolist(), strict=True):
        raise ConfigError(
            f"plan: {plan.task(task)} needs the activations of {plan.task(source)}, which are on another rank"
        )
    order.demand(forward[first], rest[second], "whose activations it uses")
    apart, inputs = plan.rows(BACKWARD_WEIGHT), plan.rows(BACKWARD_INPUT)
    sides = [passage[rows] for rows in (inputs, apart)]
    first, second = overlapping(
        sides[0], plan.first[inputs], plan.end[inputs], sides[1], plan.first[apart], plan.end[apart]
    )
    order.demand(inputs[first], apart[second], "which computes the gradient that it uses")


def _check_carried(plan: Plan, order: Order, first: Ints, second: Ints, cut: Ints) -> None:
    """Check that the output of each pass in `first` is on the rank of its successor in `second` when that starts."""
    sends, receives = plan.rows(SEND), plan.rows(RECEIVE)
    sends, receives = sends[np.argsort(plan.key[sends])], receives[np.argsort(plan.key[receives])]
    marked = plan.batch[sends] >= 0
    sends, receives = sends[marked], receives[marked]
    labels = [
        np.stack([0 * rows if plan.delays else plan.step[rows], plan.batch[rows], at, plan.rank[rows], to])
        for rows, at, to in ((first, cut[first], plan.rank[second]), (sends, plan.first[sends], plan.peer[sends]))
    ]
    which = np.unique(np.concatenate(labels, axis=1), axis=1, return_inverse=True)[1].reshape(-1)
    i, j = joined(which[: len(first)], which[len(first) :])
    good = order.proved(first[i], sends[j]) & order.proved(receives[j], second[i])
    wrong = np.setdiff1d(np.arange(len(first)), i[good])
    for pair in wrong[:1].tolist():
        messages = j[i == pair]
        order.demand(np.repeat(first[pair], len(messages)), sends[messages], "whose results it carries")
        order.demand(receives[messages], np.repeat(second[pair], len(messages)), "which carries its input")
        before, task = int(first[pair]), int(second[pair])
        layer, batch, step = cut[before], plan.batch[before], plan.step[before]
        source, target = plan.rank[before], plan.rank[task]
        raise ConfigError(
            f"plan: {plan.task(task)} follows {plan.task(before)} on another rank, but no message carries batch "
            f"{batch} across the cut before layer {layer} from rank {source} to rank {target} in step {step}"
        )


def _check_one_update(plan: Plan, backward: Ints) -> None:
    """Check that all gradients of a micro-batch belong to the update of one step."""
    leader = backward[np.unique(plan.batch[backward], return_index=True)[1]]
    leader = leader[np.searchsorted(plan.batch[leader], plan.batch[backward])]
    wrong = plan.step[backward] != plan.step[leader]
    for task, other in zip(backward[wrong][:1].tolist(), leader[wrong][:1].tolist(), strict=True):
        raise ConfigError(
            f"plan: {plan.task(task)} and {plan.task(other)} process the same micro-batch, but their gradients are "
            "used in different updates; all ranks must use a micro-batch in the same update"
        )


def _each_once(plan: Plan, kinds: tuple[int, ...], passage: Ints, n_passages: int) -> Ints:
    """Return the forward (or backward) rows by passage and layer, after checking that they cover each exactly once.

    passage  (n,) each row's passage of a micro-batch through the model; those from `n_passages` on may be incomplete
    """
    rows = plan.rows(*kinds)
    for task in rows[(plan.batch[rows] < 0) | (plan.end[rows] <= plan.first[rows])].tolist():
        raise ConfigError(f"plan: {plan.task(task)} has no micro-batch or no layers")
    rows = rows[np.lexsort((plan.first[rows], passage[rows]))]
    name = KINDS[kinds[-1] if (plan.kind[rows] == kinds[-1]).any() else kinds[0]].replace("_", "-")
    passes = passage[rows]
    missing = np.setdiff1d(np.arange(n_passages), passes)
    if len(missing) or not n_passages:
        one = int(missing[0]) if n_passages else 0
        step, batch = divmod(one, n_passages // plan.n_steps) if n_passages and not plan.delays else (-1, one)
        where = f" of step {step}" if step >= 0 else ""
        raise ConfigError(f"plan: batch {batch}{where} has no {name} pass; every micro-batch needs one")
    begins = np.diff(passes, prepend=-1) != 0
    expected = np.where(begins, 0, np.concatenate([[0], plan.end[rows][:-1]]))
    wrong = plan.first[rows] != expected
    for task, layer in zip(rows[wrong].tolist(), expected[wrong].tolist(), strict=True):
        first = int(plan.first[task])
        if first < layer:
            raise ConfigError(f"plan: {plan.task(task)}: layer {first} has a second {name} pass for this batch")
        raise ConfigError(f"plan: {plan.task(task)}: layer {layer} has no {name} pass for this batch")
    early = rows[np.append(begins[1:], True) & (passes < n_passages) & (plan.end[rows] < plan.n_layers)]
    refuse(plan, early, f"layer {{end}} has no {name} pass for this batch", end=plan.end[early])
    return rows
