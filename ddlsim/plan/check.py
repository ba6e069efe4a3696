"""Check that a plan trains correctly: `check` raises for the first violated rule, and names the task.

As in :mod:`ddlsim.collectives.check` for schedules, gradients are replayed as numbers that represent micro-batches: a
part is complete if the numbers of all micro-batches have been added, each exactly once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan import plan as ps
from ddlsim.plan.order import Order
from ddlsim.plan.plan import KINDS, Bools, Ints, Plan
from ddlsim.plan.rows import joined, overlapping, refuse, repeats, with_parts

PASSES = (ps.FORWARD, ps.BACKWARD, ps.BACKWARD_INPUT, ps.BACKWARD_WEIGHT)
#: collectives on gradients and weights of a part: SUMS come before an update, SPREADS may come after it
SUMS = (ps.ALL_REDUCE, ps.REDUCE_SCATTER, ps.REDUCE, ps.PUSH_PULL)
SPREADS = (ps.ALL_GATHER, ps.BROADCAST)


def check_exchanges(plan: Plan) -> None:
    """Raise ConfigError for a message without a receiver or a sender, and a collective that not all members enter."""
    _messages(plan)
    _collectives(plan)


def _messages(plan: Plan) -> None:
    send, receive = plan.messages
    for rows, others, problem in ((send, receive, ": no task receives it"), (receive, send, ": no task sends it")):
        refuse(plan, rows[~np.isin(plan.key[rows], plan.key[others])], problem)
        refuse(plan, rows[repeats(plan.key[rows])], ": another row has the same key; every message needs its own")
    wrong = (plan.peer[send] != plan.rank[receive]) | (plan.peer[receive] != plan.rank[send])
    problem = " has no matching receive; the task with the same key is {other}"
    refuse(plan, send[wrong], problem, receive[wrong])
    wrong = plan.nbytes[send] != plan.nbytes[receive]
    sent, received = (plan.nbytes[rows[wrong]] for rows in (send, receive))
    problem = " sends {sent:.0f} bytes, but {other} receives {received:.0f} bytes"
    refuse(plan, send[wrong], problem, receive[wrong], sent=sent, received=received)


def _collectives(plan: Plan) -> None:
    rows = plan.collectives
    if not len(rows):
        return
    refuse(plan, rows[plan.peer[rows] < 0], ": it has no group")
    _, first, which = np.unique(plan.key[rows], return_index=True, return_inverse=True)
    leader = rows[first][which.reshape(-1)]  # first row of the same collective
    for name in ("kind", "peer", "nbytes", "part", "step", "queue"):
        label, column = {"peer": "group", "nbytes": "bytes"}.get(name, name), getattr(plan, name)
        wrong = column[rows] != column[leader]
        task, other = rows[wrong], leader[wrong]
        problem = f" and {{other}} belong to one collective (key {{key}}), but differ in {label}: {{a:g}} and {{b:g}}"
        refuse(plan, task, problem, other, key=plan.key[task], a=column[task], b=column[other])
    belongs = np.zeros((len(plan.groups), plan.n_ranks), dtype=np.bool_)
    for i, group in enumerate(plan.groups):
        belongs[i, list(group)] = True
    refuse(plan, rows[~belongs[plan.peer[rows], plan.rank[rows]]], ": its rank is not in the collective's group")
    again = repeats(plan.key[rows] * plan.n_ranks + plan.rank[rows])
    refuse(plan, rows[again], ": its rank enters the same collective twice")
    queued = rows[plan.queue[rows] >= 0]
    for name, column in (("group", plan.peer), ("kind", plan.kind)):
        served = np.full(len(plan.queues), -1, dtype=np.int64)
        served[plan.queue[queued]] = column[queued]
        wrong = column[queued] != served[plan.queue[queued]]
        refuse(plan, queued[wrong], f": its queue is also used by another {name}")
    is_server = np.isin(np.arange(plan.n_ranks), plan.servers)
    behind = np.array([_servers_behind(is_server[list(group)]) for group in plan.groups], dtype=np.bool_)
    wrong = (plan.kind[rows] == ps.PUSH_PULL) & ~behind[plan.peer[rows]]
    refuse(plan, rows[wrong], ": its group must consist of workers followed by servers (Plan.servers)")
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
        _check_gradients(of_part, order)


def _only(plan: Plan, part: int) -> Plan:
    """Return the plan in which only ranks with one part of each layer train; tasks of others become other work."""
    others = plan.rank % plan.tensor != part
    passes = others & (plan.kind < ps.COMPUTE) | others & np.isin(plan.kind, (ps.BACKWARD_INPUT, ps.BACKWARD_WEIGHT))
    return dataclasses.replace(
        plan,
        kind=np.where(passes, ps.COMPUTE, plan.kind),
        batch=np.where(others, -1, plan.batch),
        part=np.where(others, -1, plan.part),
    )


def _check_passes(plan: Plan, order: Order) -> None:
    if plan.delays:
        passage = plan.batch
        n_batches = n_passages = int(plan.batch[plan.rows(ps.BACKWARD, ps.BACKWARD_INPUT)].max(initial=-1)) + 1
    else:
        n_batches = int(plan.batch[plan.rows(ps.FORWARD)].max(initial=-1)) + 1
        passage, n_passages = plan.step * n_batches + plan.batch, plan.n_steps * n_batches
    forward, backward = (
        _each_once(plan, kinds, passage, n_passages) for kinds in ((ps.FORWARD,), (ps.BACKWARD, ps.BACKWARD_INPUT))
    )
    # in this order, a pass comes before the next: forward from the first layer, backward from the last
    for rows, after, cut in ((forward, "after", plan.end), (backward[::-1], "before", plan.first)):
        follows = passage[rows[1:]] == passage[rows[:-1]]
        first, second = rows[:-1][follows], rows[1:][follows]
        here = plan.rank[first] == plan.rank[second]
        order.demand(first[here], second[here], f"which comes {after} it in the model")
        _check_carried(plan, order, first[~here], second[~here], cut)
    rest = backward
    if len(plan.rows(ps.BACKWARD_WEIGHT)):
        rest = np.union1d(backward, _each_once(plan, (ps.BACKWARD, ps.BACKWARD_WEIGHT), passage, n_passages))
    if plan.delays:
        _check_one_update(plan, rest)
    sides = [passage[rows] for rows in (forward, rest)]
    first, second = overlapping(
        sides[0], plan.first[forward], plan.end[forward], sides[1], plan.first[rest], plan.end[rest]
    )
    elsewhere = plan.rank[forward[first]] != plan.rank[rest[second]]
    problem = " needs the activations of {other}, which are on another rank"
    refuse(plan, rest[second][elsewhere], problem, forward[first][elsewhere])
    order.demand(forward[first], rest[second], "whose activations it uses")
    apart, inputs = plan.rows(ps.BACKWARD_WEIGHT), plan.rows(ps.BACKWARD_INPUT)
    sides = [passage[rows] for rows in (inputs, apart)]
    first, second = overlapping(
        sides[0], plan.first[inputs], plan.end[inputs], sides[1], plan.first[apart], plan.end[apart]
    )
    order.demand(inputs[first], apart[second], "which computes the gradient that it uses")


def _check_carried(plan: Plan, order: Order, first: Ints, second: Ints, cut: Ints) -> None:
    """Check that the output of each pass in `first` is on the rank of its successor in `second` when that starts."""
    sends, receives = plan.messages
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
        before, task = first[[pair]], second[[pair]]
        problem = (
            " follows {other} on another rank, but no message carries batch {batch} across the cut before layer "
            "{layer} from rank {source} to rank {target} in step {step}"
        )
        ends = {"source": plan.rank[before], "target": plan.rank[task], "layer": cut[before]}
        refuse(plan, task, problem, before, batch=plan.batch[before], step=plan.step[before], **ends)


def _check_one_update(plan: Plan, backward: Ints) -> None:
    """Check that all gradients of a micro-batch belong to the update of one step."""
    leader = backward[np.unique(plan.batch[backward], return_index=True)[1]]
    leader = leader[np.searchsorted(plan.batch[leader], plan.batch[backward])]
    wrong = plan.step[backward] != plan.step[leader]
    problem = (
        " and {other} process the same micro-batch, but their gradients are used in different updates; all ranks must "
        "use a micro-batch in the same update"
    )
    refuse(plan, backward[wrong], problem, leader[wrong])


def _each_once(plan: Plan, kinds: tuple[int, ...], passage: Ints, n_passages: int) -> Ints:
    """Return the forward (or backward) rows by passage and layer, after checking that they cover each exactly once.

    passage  (n,) each row's passage of a micro-batch through the model; those from `n_passages` on may be incomplete
    """
    rows = plan.rows(*kinds)
    refuse(
        plan, rows[(plan.batch[rows] < 0) | (plan.end[rows] <= plan.first[rows])], " has no micro-batch or no layers"
    )
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
    layer = np.minimum(plan.first[rows], expected)[wrong]
    times = np.where(plan.first[rows] < expected, "a second", "no")[wrong]
    refuse(plan, rows[wrong], f": layer {{layer}} has {{times}} {name} pass for this batch", layer=layer, times=times)
    early = rows[np.append(begins[1:], True) & (passes < n_passages) & (plan.end[rows] < plan.n_layers)]
    refuse(plan, early, f": layer {{end}} has no {name} pass for this batch", end=plan.end[early])
    return rows


# ---------------------------------------------------------------- gradients and weights


@dataclass(frozen=True)
class Touching:
    """Tasks that use a part on their rank, in their step: `row`, `part`, the part's place (:func:`place_of`), and
    whether the task uses it through the layer that is `tied` to it, (n,)."""

    row: Ints
    part: Ints
    place: Ints
    tied: Bools

    def of(self, mask: Bools) -> Touching:
        """Return the tasks selected by a mask."""
        return Touching(self.row[mask], self.part[mask], self.place[mask], self.tied[mask])


def touching(plan: Plan, *kinds: int) -> Touching:
    """Return the tasks of these kinds that use a part, for each part."""
    rows = plan.rows(*kinds)
    first, end, tied = (
        np.array([getattr(part, name) for part in plan.parts], dtype=np.int64) for name in ("first", "end", "tied")
    )
    i, part = with_parts(plan.first[rows], plan.end[rows], first, end)
    j, other = with_parts(plan.first[rows], plan.end[rows], tied, tied + 1)
    by_tie = np.repeat([False, True], [len(i), len(j)])
    i, part = np.concatenate([i, j]), np.concatenate([part, other])
    return Touching(rows[i], part, place_of(plan, rows[i], part), by_tie)


def place_of(plan: Plan, rows: Ints, part: Ints) -> Ints:
    """Return the place of each part: its index over all steps, ranks and parts, for the step and rank of the row."""
    return (plan.step[rows] * plan.n_ranks + plan.rank[rows]) * len(plan.parts) + part


def on_rank(plan: Plan, tasks: Touching) -> Ints:
    """Return the index of each task's part over all ranks and parts, ignoring the step."""
    return np.asarray(tasks.place % (plan.n_ranks * len(plan.parts)), dtype=np.int64)


def fetches_of(plan: Plan) -> Touching:
    """Return the all-gathers that provide sharded weights for the pass of a micro-batch."""
    rows = plan.rows(ps.ALL_GATHER)
    rows = rows[(plan.part[rows] >= 0) & (plan.batch[rows] >= 0)]
    return Touching(rows, plan.part[rows], place_of(plan, rows, plan.part[rows]), np.zeros(len(rows), dtype=np.bool_))


def _check_fetches(
    plan: Plan, order: Order, replay: Replay, fetches: Touching, last: Touching, passes: tuple[Touching, Touching]
) -> None:
    """Check that sharded weights are gathered for every pass, after their shards have been updated.

    If a part is gathered twice for a micro-batch, the second time is for the backward pass.

    last    the last task on each part in each step
    passes  forward and backward passes
    """
    shares, n_batches = np.unique(on_rank(plan, fetches)), int(plan.batch.max()) + 1
    visit = fetches.place * n_batches + plan.batch[fetches.row]
    by_visit = np.argsort(visit, kind="stable")
    visits, count = np.unique(visit, return_counts=True)
    ends = np.cumsum(count)
    for tasks, nth in zip(passes, (ends - count, ends - 1), strict=True):
        mine = tasks.of(np.isin(on_rank(plan, tasks), shares))
        wanted = mine.place * n_batches + plan.batch[mine.row]
        lacking = mine.of(~np.isin(wanted, visits))
        problem = ": its rank has only a shard of part {part}, but no all_gather provides the rest for this batch"
        refuse(plan, lacking.row, problem, part=lacking.part)
        i, j = joined(visits, wanted)
        order.demand(fetches.row[by_visit[nth[i]]], mine.row[j], "which gathers the weights that it uses")
    later = fetches.of(plan.step[fetches.row] > 0)
    before = later.place - plan.n_ranks * len(plan.parts)
    i, j = joined(last.place, before)
    order.demand(last.row[i], later.row[j], "whose weights it gathers")
    _check_tiles(plan, replay, later, before)


def _check_tiles(plan: Plan, replay: Replay, fetches: Touching, before: Ints) -> None:
    """Check that the shards of a group's members together form the whole updated part."""
    shards: dict[int, list[tuple[int, Held, int]]] = {}
    for row, place in zip(fetches.row.tolist(), before.tolist(), strict=True):
        position = plan.groups[plan.peer[row]].index(int(plan.rank[row]))
        shards.setdefault(int(plan.key[row]), []).append((position, replay.held[place], row))
    problem = (
        ": the shards of its group do not add up to part {part}, which was updated in the previous step; use the group "
        "that scattered the gradients"
    )
    for _, members in sorted(shards.items()):
        until = 0
        for position, (_, held, row) in enumerate(sorted(members, key=lambda member: member[0]), 1):
            last = position == len(members)
            if not held.updated or held.first != until or (last and held.end != replay.size):
                refuse(plan, np.array([row]), problem, part=plan.part[[row]])
            until = held.end


def _check_gradients(plan: Plan, order: Order) -> None:
    """Raise ConfigError for a gradient that is not summed exactly once, and for weights that are used too early.

    The tasks of a rank on a part in a step, its *deeds* (sums, update, distribution of the updated weights), form a
    sequence that starts after the backward passes and ends before the next forward passes.
    """
    backward, update, forward = (
        touching(plan, *kinds) for kinds in ((ps.BACKWARD, ps.BACKWARD_WEIGHT), (ps.UPDATE,), (ps.FORWARD,))
    )
    # if both layers of tied weights are on a rank, it updates the weights together with the first
    update = update.of(~update.tied | ~np.isin(update.place, update.place[~update.tied]))
    deeds = _deeds(plan, order, update)
    _updated_once(plan, backward, update, deeds)
    _check_early_sums(plan, order, backward, deeds)
    first = np.diff(deeds.place, prepend=-1) != 0
    i, j = joined(backward.place, deeds.place[first])
    before = np.concatenate([backward.row[i], deeds.row[:-1][~first[1:]]])
    after = np.concatenate([deeds.row[first][j], deeds.row[1:][~first[1:]]])
    updates, updated = plan.kind[after] == ps.UPDATE, plan.kind[before] == ps.UPDATE
    passed = np.isin(plan.kind[before], (ps.BACKWARD, ps.BACKWARD_WEIGHT))
    for pairs, why in (
        (passed & ~updates, "which it sums"),
        (updates, "whose gradients it uses"),
        (updated, "whose weights it distributes"),
        (~passed & ~updates & ~updated, "which comes before it for this part"),
    ):
        order.demand(before[pairs], after[pairs], why)
    forward, version = _versions(plan, forward)
    later = version > 0
    uses, earlier = forward.row[later], forward.place[later] - plan.n_ranks * len(plan.parts)
    last = deeds.of(np.append(first[1:], True)) if len(first) else deeds
    if plan.delays:
        i, j = joined(last.place, backward.place - plan.n_ranks * len(plan.parts))
        order.demand(last.row[i], backward.row[j], "whose gradients it would add to")
    fetches = fetches_of(plan)
    if plan.delays:
        problem = ": stale weights (delays) cannot be gathered for a pass; keep the complete weights on every rank"
        refuse(plan, fetches.row, problem)
    shared = np.isin(on_rank(plan, forward), on_rank(plan, fetches))
    never = uses[~np.isin(earlier, last.place)]
    refuse(plan, never, ": its weights were not updated on its rank in the previous step")
    kept = ~np.isin(on_rank(plan, backward), on_rank(plan, fetches))
    replay = _replay(plan, deeds, backward, update, np.union1d(backward.place[kept], earlier[~shared[later]]))
    i, j = joined(last.place, earlier)
    order.demand(last.row[i], uses[j], "whose weights it uses")
    if len(fetches.row):
        _check_fetches(plan, order, replay, fetches, last, (forward, touching(plan, *PASSES[1:])))


def _versions(plan: Plan, forward: Touching) -> tuple[Touching, Ints]:
    """Return forward passes with the places of the weights that they use, and the version (number of updates) of these.

    In a plan with delays, forward passes without a backward pass are left out, because they have no update yet.
    """
    if not plan.delays:
        return forward, plan.step[forward.row]
    backward = plan.rows(ps.BACKWARD, ps.BACKWARD_WEIGHT)
    update = np.full(int(plan.batch.max(initial=-1)) + 1, -1)
    update[plan.batch[backward]] = plan.step[backward]
    forward = forward.of(update[plan.batch[forward.row]] >= 0)
    age = np.array(plan.delays)[plan.first[forward.row]]
    version = np.maximum(update[plan.batch[forward.row]] - age, 0)
    where = forward.place % (plan.n_ranks * len(plan.parts))
    return dataclasses.replace(forward, place=version * plan.n_ranks * len(plan.parts) + where), version


def _deeds(plan: Plan, order: Order, update: Touching) -> Touching:
    """Return sums, updates and distributions by place, in order: sums, the update, the distribution of its result. (A
    distribution that provably comes before the update belongs to the sums.)"""
    rows = plan.collectives[(plan.part[plan.collectives] >= 0) & (plan.batch[plan.collectives] < 0)]
    problem = (
        ": this kind of collective cannot sum or gather a part; use all_reduce, reduce_scatter, all_gather, reduce, "
        "broadcast or push_pull, or leave part out"
    )
    refuse(plan, rows[~np.isin(plan.kind[rows], (*SUMS, *SPREADS))], problem)
    place = place_of(plan, rows, plan.part[rows])
    phase = np.where(np.isin(plan.kind[rows], SUMS), 0, 2)
    i, j = joined(place, update.place)
    sums_first = (phase[i] == 2) & order.proved(rows[i], update.row[j])
    phase[i[sums_first]] = 0
    turn = np.empty(len(plan), dtype=np.int64)
    turn[order.rows] = np.arange(len(plan))
    row = np.concatenate([rows, update.row])
    part = np.concatenate([plan.part[rows], update.part])
    places = np.concatenate([place, update.place])
    by_place = np.lexsort((turn[row], np.concatenate([phase, np.ones(len(update.row), dtype=np.int64)]), places))
    tied = np.concatenate([np.zeros(len(rows), dtype=np.bool_), update.tied])
    return Touching(row[by_place], part[by_place], places[by_place], tied[by_place])


def _updated_once(plan: Plan, backward: Touching, update: Touching, deeds: Touching) -> None:
    again = update.of(repeats(update.place))
    refuse(plan, again.row, ": part {part} is updated twice in this step", part=again.part)
    summed = deeds.place[np.isin(plan.kind[deeds.row], (*SUMS, *SPREADS))]
    brought = deeds.place[np.isin(plan.kind[deeds.row], SPREADS)]
    never = backward.of(~np.isin(backward.place, np.concatenate([update.place, brought])))
    problem = ": its gradient of part {part} is never used, because no update follows"
    refuse(plan, never.row, problem, part=never.part)
    never = update.of(~np.isin(update.place, np.concatenate([backward.place, summed])))
    refuse(plan, never.row, ": the gradient of part {part} is never summed on this rank", part=never.part)


def _check_early_sums(plan: Plan, order: Order, backward: Touching, deeds: Touching) -> None:
    """Check the sums of single micro-batches, to which the last sum of the step, of the same kind and group, adds the
    rest. Each must come after its backward pass and before that sum, exactly once."""
    rows = plan.collectives[(plan.part[plan.collectives] >= 0) & (plan.batch[plan.collectives] >= 0)]
    rows = rows[plan.kind[rows] != ps.ALL_GATHER]
    if not len(rows):
        return
    problem = ": only all_reduce and reduce_scatter can sum the gradients of a single micro-batch"
    refuse(plan, rows[~np.isin(plan.kind[rows], (ps.REDUCE_SCATTER, ps.ALL_REDUCE))], problem)
    n_batches = int(plan.batch.max()) + 1
    place = place_of(plan, rows, plan.part[rows])
    visit = place * n_batches + plan.batch[rows]
    again = rows[repeats(visit)]
    refuse(plan, again, ": the gradient of batch {batch} is summed twice", batch=plan.batch[again])
    passes = backward.place * n_batches + plan.batch[backward.row]
    i, j = joined(passes, visit)
    order.demand(backward.row[i], rows[j], "which it sums")
    last = deeds.of(np.isin(plan.kind[deeds.row], (ps.REDUCE_SCATTER, ps.ALL_REDUCE)))
    i, j = joined(place, last.place)
    alike = plan.kind[rows[i]] == plan.kind[last.row[j]]
    i, j = i[alike], j[alike]
    order.demand(rows[i], last.row[j], "to which it adds the rest")
    inside = plan.peer[rows[i]] == plan.peer[last.row[j]]
    apart = rows[np.setdiff1d(np.arange(len(rows)), i[inside])]
    problem = ": its group has no sum of part {part} at the end of the step, to which this gradient could be added"
    refuse(plan, apart, problem, part=plan.part[apart])


def _replay(plan: Plan, deeds: Touching, backward: Touching, update: Touching, used: Ints) -> Replay:
    """Check that each update uses the gradient of every micro-batch of its step exactly once, and that all updated
    weights are finally complete at the places `used`."""
    n_batches, n_parts = int(plan.batch.max(initial=-1)) + 1, len(plan.parts)
    marks = np.random.default_rng(0).integers(1, 2**63, 2 * n_batches).tolist()
    replay = Replay(plan, deeds, backward, n_batches, marks)
    of_parts: dict[int, set[int]] = {}  # (step, part) -> batches
    for place, batch in replay.contributions:
        of_parts.setdefault(place // (plan.n_ranks * n_parts) * n_parts + place % n_parts, set()).add(batch)
    for row, place in zip(update.row.tolist(), update.place.tolist(), strict=True):
        step, part = place // (plan.n_ranks * n_parts), place % n_parts
        needed = of_parts.get(step * n_parts + part, set())
        if replay.held[place].used != sum(marks[batch] for batch in needed):
            few, passes = (rows.of((rows.part == part) & (plan.step[rows.row] == step)) for rows in (deeds, backward))
            in_digits = [1 << (_DIGIT * i) for i in range(2 * n_batches)]
            digits = Replay(plan, few, passes, n_batches, in_digits).held[place].used
            counts = [digits >> (_DIGIT * i) & ((1 << _DIGIT) - 1) for i in range(2 * n_batches)]
            which = next(i for i, n in enumerate(counts) if n != (i in needed))
            tied, batch = divmod(which, n_batches)
            times = {0: "never summed", 2: "summed twice"}.get(counts[which], f"summed {counts[which]} times")
            where = f" of layer {plan.parts[part].tied}, which is tied to it," if tied else ""
            raise ConfigError(
                f"plan: {plan.task(row)}: the gradient of batch {batch}{where} is {times} in part {part}; it must be "
                "summed once"
            )
    for place in used.tolist():
        held, part = replay.held[place], place % n_parts
        if held.updated and held.end - held.first == replay.size:
            continue
        last, share = int(deeds.row[deeds.place == place][-1]), (held.end - held.first) / replay.size
        if not held.updated:
            raise ConfigError(f"plan: {plan.task(last)}: part {part} is not updated on its rank after this task")
        raise ConfigError(
            f"plan: {plan.task(last)}: after this task, its rank has only {share:.3g} of the updated weights "
            f"of part {part}; add an all_gather over the group that scattered its gradients"
        )
    return replay


# ---------------------------------------------------------------- replay

#: bits of the number of times that a micro-batch has been summed
_DIGIT = 32


@dataclass
class Held:
    """A range of a part, in units of 1 / ``Replay.size``, with the sum of the marks of some micro-batches; whether it
    is updated, and from which sum."""

    first: int
    end: int
    sum: int = 0
    updated: bool = False
    used: int = 0


class Replay:
    """Deeds (sums, updates, distribution) executed in order at each *place*: a rank's copy of a part in a step.

    A place holds a range of the part with the gradient sum of some micro-batches. A reduce-scatter leaves member i with
    the i-th of equal pieces; an all-gather concatenates adjacent ranges in the order of the group; a broadcast copies
    the first member's range.

    deeds     sorted by place and, within a place, by order
    backward  passes that contribute gradients; those of a tied layer count as those of additional micro-batches
    marks     (2 n_batches,) numbers of the micro-batches

    size           of a part, divisible by the sizes of any two groups that scatter it
    contributions  distinct pairs of places and micro-batches that have a gradient there
    held           by place
    """

    def __init__(self, plan: Plan, deeds: Touching, backward: Touching, n_batches: int, marks: Sequence[int]) -> None:
        self.plan, rows, places = plan, deeds.row.tolist(), deeds.place.tolist()
        batches = (plan.batch[backward.row] + n_batches * backward.tied).tolist()
        self.contributions = set(zip(backward.place.tolist(), batches, strict=True))
        scattering = deeds.row[plan.kind[deeds.row] == ps.REDUCE_SCATTER]
        self.size = math.lcm(1, *(len(plan.groups[i]) for i in np.unique(plan.peer[scattering]).tolist())) ** 2
        self.held = {place: Held(0, self.size) for place in {*places, *backward.place.tolist()}}
        for place, batch in self.contributions:
            self.held[place].sum += marks[batch]
        # each update is separate, even if one row updates several parts
        keys = [-1 - i if plan.kind[row] == ps.UPDATE else int(plan.key[row]) for i, row in enumerate(rows)]
        n_members, arrived, left = Counter(keys), dict[int, list[int]](), set(range(len(rows)))
        position = [{rank: i for i, rank in enumerate(group)} for group in plan.groups]
        ready = deque(i for i, place in enumerate(places) if i == 0 or places[i - 1] != place)
        while ready:
            deed = ready.popleft()
            there = arrived.setdefault(keys[deed], [])
            there.append(deed)
            if len(there) == n_members[keys[deed]]:  # all members have reached it
                if len(there) > 1:
                    there.sort(key=lambda i: position[plan.peer[rows[i]]][int(plan.rank[rows[i]])])
                self._do(int(plan.kind[rows[deed]]), [rows[i] for i in there], [self.held[places[i]] for i in there])
                left.difference_update(there)
                ready.extend(i + 1 for i in there if i + 1 < len(rows) and places[i + 1] == places[i])
        if left:
            self._refuse(rows[min(left)], "other ranks sum, update or distribute this part in a different order")

    def _do(self, kind: int, rows: list[int], members: list[Held]) -> None:
        """Execute an update, or a collective of all members of a group in order."""
        leader = members[0]
        if kind == ps.UPDATE:
            leader.used, leader.updated = leader.sum, True
        elif kind == ps.BROADCAST:
            for held in members:
                held.first, held.end, held.sum, held.updated = leader.first, leader.end, leader.sum, leader.updated
        elif kind == ps.ALL_GATHER:
            for row, before, held in zip(rows[1:], members, members[1:], strict=False):
                if before.end != held.first:
                    self._refuse(row, "its range of the part does not begin at the end of the previous member's range")
            for row, held in zip(rows, members, strict=True):
                if held.updated != leader.updated or (held.sum != leader.sum and not held.updated):
                    self._refuse(row, "its sum differs from that of the first member of its group")
            for held in members:
                held.first, held.end = leader.first, members[-1].end
        else:
            self._sum(kind, rows, members)

    def _sum(self, kind: int, rows: list[int], members: list[Held]) -> None:
        leader, total, n = dataclasses.replace(members[0]), sum(held.sum for held in members), len(members)
        for row, held in zip(rows, members, strict=True):
            if held.updated:
                self._refuse(row, "it sums gradients after their update")
            serves = kind == ps.PUSH_PULL and self.plan.rank[row] in self.plan.servers  # contributes nothing
            if (held.first, held.end) != (leader.first, leader.end) and not serves:
                self._refuse(row, "its range of the part differs from that of the first member of its group")
        for i, (row, held) in enumerate(zip(rows, members, strict=True)):
            if kind == ps.REDUCE and i:
                held.end = held.first
                continue
            held.sum = total
            if kind == ps.REDUCE_SCATTER:
                piece, rest = divmod(held.end - held.first, n)
                if rest:
                    self._refuse(row, "it scatters a part for the third time; at most two are supported")
                held.first += i * piece
                held.end = held.first + piece

    def _refuse(self, row: int, problem: str) -> None:
        refuse(self.plan, np.array([row]), f": {problem}")
