"""Pipelines as plans: closed forms, longest paths, zero-bubble orders, memory, proofs and what they refuse."""

import itertools
import re

import numpy as np
import pytest
from draws import few
from plan_examples import changed, with_value, without, workload
from split_models import chain, longest_path
from unrolled import pipeline

from ddlsim import ConfigError
from ddlsim.cluster import star
from ddlsim.plan import KINDS, ORDERS, Mesh, balanced_chunks, chunks_at
from ddlsim.plan.pipeline_orders import gpipe, interleaved, one_f_one_b, pass_order
from ddlsim.plan.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    UPDATE,
)
from ddlsim.workload.buckets import ddp_buckets, one_bucket, per_layer

NAMES = [(name, per_rank) for name, (per_rank, _) in ORDERS.items()] + [("1f1b", 2), ("1f1b", 3)]


def equal(stages, chunks=1, f=1.0, g=2.0, **more):
    """Return chunks of equal time; a stage takes f forward and g backward."""
    n = stages * chunks
    return chunks_at(chain([f / chunks] * n, [g / chunks] * n, **more), range(1, n))


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (5, 3), (8, 32)])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_equal_stages_and_instant_links(order, p, m):
    """T = (m + p - 1)(f + g); GPipe keeps m micro-batches, 1F1B min(m, p - i)."""
    f, g = 0.3, 0.7
    plan = pipeline(equal(p, f=f, g=g), Mesh(pipeline=p), m, order)
    assert plan.critical_path() == pytest.approx((m + p - 1) * (f + g), rel=1e-9)
    live = np.full(p, m) if order == "gpipe" else np.minimum(m, p - np.arange(p))
    assert plan.peak_memory() == pytest.approx(200.0 * live, rel=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 24, 3), (3, 3, 4)])
def test_interleaved(p, m, v):
    """T = m (f + g) + (p - 1)(f + g) / v, v times the messages; the first stage holds p + (p - 1) / v micro-batches."""
    f, g = 0.3, 0.7
    plan = pipeline(equal(p, v, f=f, g=g), Mesh(pipeline=p), m)
    assert plan.critical_path() == pytest.approx(m * (f + g) + (p - 1) * (f + g) / v, rel=1e-9)
    assert len(plan.rows(SEND)) == 2 * m * (p * v - 1)
    stage = 200.0 * v
    # with m = p the warm-up is all there is
    expected = min(p * (1 + (p - 1) / (p * v)), m)
    assert plan.peak_memory()[0] == pytest.approx(stage * expected, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_recomputation_as_torchgpipe_does_it(p, m):
    """T = (m + p - 1)(2 f + g); a rank holds what enters its chunk of each micro-batch, and all of one."""
    f, g = 0.3, 0.7
    plan = pipeline(equal(p, f=f, g=g, stored=[1000.0] * p), Mesh(pipeline=p), m, "gpipe", recompute=True)
    assert plan.critical_path() == pytest.approx((m + p - 1) * (2 * f + g), rel=1e-9)
    assert plan.peak_memory() == pytest.approx(np.full(p, 200.0 * m + 1000.0))
    plan.check()


@pytest.mark.parametrize("p", few([2, 4, 8, 16], 3))
@pytest.mark.parametrize(
    ("order", "idle", "memory"), [("1f1b", 1, 1), ("zb-1p", 1 / 3, 1), ("zb-2p", 0, 2), ("zb-v", 0, 1)]
)
def test_zero_bubble_orders(order, idle, memory, p):
    """F = B = W = 1: idle time between steps in parts of 1F1B's, 3 (p - 1); activations in parts of its p."""
    m, chunks = 4 * p, ORDERS[order][0]
    plan = pipeline(equal(p, chunks, f=1.0, g=2.0), Mesh(pipeline=p), m, order, steps=3)
    run = plan.execute(star(p, bandwidth=1e15, latency=0.0))
    assert run.step_times[2] - 3 * m == pytest.approx(idle * 3 * (p - 1), abs=1e-6)
    at_most = memory * p - (order == "zb-2p")
    assert plan.peak_memory().max() / (200.0 * chunks) == pytest.approx(at_most)


@pytest.mark.parametrize(("order", "idle", "memory"), [("v-half", 1 / 2, 1 / 2), ("v-min", 2 / 3, 1 / 3)])
def test_v_shaped_orders_in_the_limit(order, idle, memory):
    """What is constant beside p vanishes: with 32 ranks it is one and a half micro-batches."""
    p, m = 32, 64
    plan = pipeline(equal(p, 2, f=1.0, g=2.0), Mesh(pipeline=p), m, order)
    assert abs((plan.critical_path() - 3 * m) / (3 * (p - 1)) - idle) < 0.02
    held = plan.peak_memory().max() / 400.0
    assert memory * p <= held <= memory * p + 1.5


@pytest.mark.parametrize("order", [name for name, _ in NAMES])
@pytest.mark.parametrize("seed", range(3))
def test_unequal_stages_take_the_longest_path(order, seed):
    rng = np.random.default_rng(seed)
    p, m, per_rank = 4, 8, dict(NAMES)[order]
    f, g = rng.exponential(size=p * per_rank), rng.exponential(size=p * per_rank)
    chunks = chunks_at(chain(f, g), range(1, p * per_rank))
    plan = pipeline(chunks, Mesh(pipeline=p), m, order)
    table = pass_order(order, p, m, p * per_rank)
    weight = [chunk.weight_seconds.sum() for chunk in chunks]
    assert plan.critical_path() == pytest.approx(longest_path(table, f, g, weight), rel=1e-9)
    run = plan.execute(star(p, bandwidth=1e15, latency=0.0))
    assert run.seconds == pytest.approx(plan.critical_path(), rel=1e-9)


def test_messages_of_equal_seconds_take_the_longest_path():
    """On a switch, each message takes its latency and its bytes, if those of a lane do not wait for each other."""
    rng = np.random.default_rng(5)
    f, g = rng.uniform(1.0, 2.0, 4), rng.uniform(1.0, 2.0, 4)
    cluster = star(4, bandwidth=1e3, latency=0.025)  # of each of two links
    plan = pipeline(chunks_at(chain(f, g), [1, 2, 3]), Mesh(pipeline=4), 6)
    one = 0.05 + 200.0 / 1e3
    expected = longest_path(one_f_one_b(4, 6), f, g, g * 0.0, one)
    assert plan.execute(cluster).seconds == pytest.approx(expected, rel=1e-9)
    assert plan.critical_path(np.where(plan.kind == RECEIVE, one, 0.0)) == pytest.approx(expected, rel=1e-9)


def blocking(table, f, g, one, p2p):
    """Return when a pipeline ends whose stages wait for their messages of `one` second each, instruction by instruction
    as DeepSpeed's engine and Megatron-LM's loop have them."""
    p = len(table)
    programs = []
    for stage, passes in enumerate(table):
        program, pending = [], []
        for each in passes:
            forward, key = each.kind == "F", (each.kind, each.micro)
            comes = [("receive", key, stage)] if (stage > 0 if forward else stage < p - 1) else []
            if p2p == "exchange":
                program.append(("batch", pending, comes))
            else:  # DeepSpeed: a forward step receives activations, then sends the gradient of the step before
                program += comes + pending if forward and pending and pending[0][1][0] == "B" else pending + comes
            program.append(("work", (f if forward else g)[stage]))
            goes = stage < p - 1 if forward else stage > 0
            pending = [("send", key, stage + (1 if forward else -1))] if goes else []
        programs.append([*program, *pending])
    now, at, arrived = [0.0] * p, [0] * p, {}

    def step(stage, instruction):
        what, *rest = instruction
        if what == "work":
            now[stage] += rest[0]
        elif what == "send":
            arrived[rest[0], rest[1]] = now[stage] = now[stage] + one
        elif what == "receive":
            if (rest[0], rest[1]) not in arrived:
                return False
            now[stage] = max(now[stage], arrived[rest[0], rest[1]])
        else:
            begin = now[stage]
            for _, key, to in rest[0]:
                arrived[key, to] = begin + one
            if any((key, here) not in arrived for _, key, here in rest[1]):
                return False
            now[stage] = max([begin + one] * len(rest[0]) + [arrived[key, here] for _, key, here in rest[1]] + [begin])
        return True

    while any(at[i] < len(programs[i]) for i in range(p)):
        for i in range(p):
            while at[i] < len(programs[i]) and step(i, programs[i][at[i]]):
                at[i] += 1
    return max(now)


@pytest.mark.parametrize("p2p", ["exchange", "in turns"])
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 3), (4, 9)])
def test_stages_that_wait_for_their_messages(p, m, p2p):
    rng = np.random.default_rng(p * m)
    f, g = rng.uniform(1.0, 2.0, p), rng.uniform(1.0, 3.0, p)
    cluster = star(p, bandwidth=1e3, latency=0.025)
    one = 0.05 + 200.0 / 1e3
    plans = {each: pipeline(chunks_at(chain(f, g), range(1, p)), Mesh(pipeline=p), m, p2p=each)
             for each in ("overlapped", "exchange", "in turns")}  # fmt: skip
    plans[p2p].check()
    seconds = plans[p2p].execute(cluster).end[plans[p2p].kind < SEND].max()  # the last gradient's message aside
    assert seconds == pytest.approx(blocking(one_f_one_b(p, m), f, g, one, p2p), rel=1e-9)
    assert plans["overlapped"].execute(cluster).seconds <= plans["exchange"].execute(cluster).seconds
    assert plans["exchange"].execute(cluster).seconds < plans["in turns"].execute(cluster).seconds


def in_step(p, m, v, seconds):
    """Return when PyTorch's ranks have executed their table of interleaved 1F1B: in each row, a rank that sends waits
    for the rank that receives, and the other way round."""
    table, stages = [], p * v
    for rank, passes in enumerate(interleaved(p, m, v)):
        warmup = min((v - 1) * p + 2 * (p - 1 - rank), m * v)
        forward, rest = [None] * rank + passes[:warmup], passes[warmup:]
        alternating = rest[: 2 * (m * v - warmup)]
        cooldown = [each for last in rest[len(alternating) :] for each in (None, last)]
        table.append(forward + [None] * (stages + 2 * (p - 1 - rank) - len(forward)) + alternating + cooldown)
    now = [0.0] * p
    for row in itertools.zip_longest(*table):
        now = [now[rank] + (seconds[each.kind, each.chunk] if each else 0.0) for rank, each in enumerate(row)]
        met = list(now)
        for rank, each in enumerate(row):
            to = -1 if each is None else each.chunk + (1 if each.kind == "F" else -1)
            if 0 <= to < stages:
                for one in (rank, to % p):
                    met[one] = max(met[one], now[rank], now[to % p])
        now = met
    return max(now)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 4, 2), (4, 8, 3)])
def test_stages_in_step(p, m, v):
    """The last stages of a real model are unequal: then ranks also wait for tensors that they do not need yet."""
    rng = np.random.default_rng(p + m)
    f, g = rng.uniform(1.0, 2.0, p * v), rng.uniform(2.0, 4.0, p * v)
    chunks, cluster = chunks_at(chain(f, g), range(1, p * v)), star(p, bandwidth=1e15, latency=0.0)
    plans = {each: pipeline(chunks, Mesh(pipeline=p), m, p2p=each) for each in ("exchange", "in step")}
    plans["in step"].check()
    seconds = {("F", i): f[i] for i in range(p * v)} | {("B", i): g[i] for i in range(p * v)}
    took = plans["in step"].execute(cluster).seconds
    assert took == pytest.approx(in_step(p, m, v, seconds), rel=1e-9)
    assert took > plans["exchange"].execute(cluster).seconds


def test_steps_are_for_several_chunks_per_stage():
    with pytest.raises(ConfigError, match="p2p = 'in step': needs order '1f1b' and several chunks per stage"):
        pipeline(equal(2), Mesh(pipeline=2), 4, p2p="in step")


def test_turns_are_for_one_chunk_per_stage():
    with pytest.raises(ConfigError, match="p2p = 'in turns': needs order '1f1b' and one chunk per stage"):
        pipeline(equal(2), Mesh(pipeline=2), 4, "gpipe", p2p="in turns")


@pytest.mark.parametrize("p", [1, 2, 5])
def test_layers_on_ranks_without_pipelining(p):
    """T = sum (f + g) + 2 sum over cuts of alpha + A / bw."""
    rng = np.random.default_rng(p)
    f, g = rng.exponential(size=7), rng.exponential(size=7)
    chunks = balanced_chunks(chain(f, g, batch_size=3), p)
    run = pipeline(chunks, Mesh(pipeline=p), 1, "gpipe").execute(star(max(p, 2), bandwidth=1e3, latency=0.05))
    crossing = sum(0.1 + chunk.enters / 1e3 for chunk in chunks[1:])
    assert [chunk.enters for chunk in chunks[1:]] == [3 * 200.0] * (p - 1)
    assert run.seconds == pytest.approx(f.sum() + g.sum() + 2 * crossing, rel=1e-9)


# ---------------------------------------------------------------- proofs


@pytest.mark.parametrize(
    "more", few([{}, {"sharded": True}, {"recompute": True}, {"buckets": per_layer}, {"p2p": "exchange"}], 2)
)
@pytest.mark.parametrize("data", [1, 3])
@pytest.mark.parametrize(("order", "per_rank"), NAMES)
def test_all_orders_are_proved(order, per_rank, data, more):
    chunks = balanced_chunks(workload("resnet18"), 3, per_rank)
    pipeline(chunks, Mesh(data=data, pipeline=3), 6, order, steps=2, **more).check()


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-v"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("data", "p"), [(1, 2), (2, 3), (2, 1)])
def test_tied_embeddings_are_summed_at_both_ends(order, sharded, data, p):
    chunks = balanced_chunks(workload("gpt2", 1), p, ORDERS[order][0])
    plan = pipeline(chunks, Mesh(data=data, pipeline=p), 2, order, steps=2, sharded=sharded, buckets=ddp_buckets)
    plan.check()
    tied = [part for part in plan.parts if part.tied >= 0]
    if len(chunks) == 1:  # an ordinary tensor in the bucket of its layer
        assert not tied
        assert sum(part.nbytes for part in plan.parts) == workload("gpt2", 1).gradient_nbytes
        return
    assert [part.nbytes for part in tied] == [4.0 * 50257 * 768]
    if data > 1:  # all gradients are summed, each of them once
        assert sum(part.nbytes for part in plan.parts) == sum(chunk.workload.grad_nbytes.sum() for chunk in chunks)
    pairs = [row for row in plan.rows(ALL_REDUCE) if len(set(plan.groups[plan.peer[row]])) == 2
             and plan.part[row] == plan.parts.index(tied[0])]  # fmt: skip
    first_and_last_apart = p > 1 and order != "zb-v"
    assert bool(pairs) == (first_and_last_apart or (data == 2 and not sharded))
    if first_and_last_apart:
        now = [(row, plan.groups[plan.peer[row]]) for row in pairs if plan.step[row] == 0]
        gone = [row for row, (a, b) in now if a // data != b // data]
        refuses(without(plan, gone), "of layer", "which is tied to it, is never summed in part")


def refuses(plan, *texts):
    with pytest.raises(ConfigError) as error:
        plan.check()
    for text in texts:
        assert text in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def small(order="1f1b", per_rank=1, data=2, **more):
    return pipeline(equal(3, per_rank), Mesh(data=data, pipeline=3), 3, order, steps=2, **more)


def test_a_message_that_is_missing():
    plan = small()
    send = plan.rows(SEND)[4]
    both = np.flatnonzero(plan.key == plan.key[send])
    refuses(without(plan, both), "on another rank, but no message carries batch", "across the cut before layer")


def test_a_message_that_leaves_before_what_it_brings_is_there():
    plan = small()
    send = next(row for row in plan.rows(SEND) if plan.batch[row] == 1 and KINDS[plan.kind[row - 1]] == "forward")
    need = plan.need_offsets[send]
    lane = np.flatnonzero(plan.lane == plan.lane[plan.needs[need]])
    earlier = lane[np.searchsorted(lane, plan.needs[need]) - 1]
    refuses(with_value(plan, "needs", need, earlier), f"row {send} ", "may start before", "whose results it carries")


def test_a_pass_that_does_not_wait_for_its_message():
    plan = small()
    forward = next(row for row in plan.rows(FORWARD) if plan.first[row] == 1)
    first, end = plan.need_offsets[forward], plan.need_offsets[forward + 1]
    assert end == first + 1
    offsets = plan.need_offsets - (np.arange(len(plan) + 1) > forward)
    early = changed(plan, needs=np.delete(plan.needs, first), need_offsets=offsets)
    refuses(early, f"row {forward} ", "may start before", "which carries its input")


def test_a_message_of_another_micro_batch():
    plan = small()
    send = plan.rows(SEND)[2]
    both = np.flatnonzero(plan.key == plan.key[send])
    refuses(with_value(plan, "batch", both, (plan.batch[send] + 1) % 3), "but no message carries batch 2")


def test_a_gradient_of_weights_before_that_of_the_input():
    plan = pipeline(equal(3), Mesh(pipeline=3), 3, "zb-1p")
    apart = plan.rows(BACKWARD_WEIGHT)[0]
    inputs = next(row for row in plan.rows(BACKWARD_INPUT)
                  if (plan.batch[row], plan.first[row]) == (plan.batch[apart], plan.first[apart]))  # fmt: skip
    order = np.arange(len(plan))
    order[[inputs, apart]] = order[[apart, inputs]]
    kind = plan.kind.copy()
    kind[[inputs, apart]] = kind[[apart, inputs]]
    refuses(changed(plan, kind=kind), "which computes the gradient that it uses")
    kind = plan.kind.copy()
    kind[apart] = KINDS.index("compute")
    with pytest.raises(ConfigError, match="has no backward-weight pass"):
        changed(plan, kind=kind).check()


def mutants(plan, rng, n):
    """Yield (what, plan) with one thing changed that makes it wrong."""
    offsets = plan.need_offsets
    for _ in range(n):
        what = rng.integers(6)
        if what == 0:  # a pass less
            row = rng.choice(plan.rows(FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
            yield "pass", without(plan, [row])
        elif what == 1:  # a message less, both ends of it
            yield "message", without(plan, np.flatnonzero(plan.key == plan.key[rng.choice(plan.rows(SEND))]))
        elif what == 2:  # one end of a message less
            yield "end", without(plan, [rng.choice(plan.rows(SEND, RECEIVE))])
        elif what == 3:  # a collective less
            rows = plan.rows(ALL_REDUCE, REDUCE_SCATTER)
            key = plan.key[rng.choice(rows)]
            yield "sum", without(plan, rows[plan.key[rows] == key])
        elif what == 4:  # an update less
            yield "update", without(plan, [rng.choice(plan.rows(UPDATE))])
        else:  # a need less: each is there for something
            row = rng.choice(np.flatnonzero(np.diff(offsets) == 1))
            cut = changed(plan, needs=np.delete(plan.needs, offsets[row]),
                          need_offsets=offsets - (np.arange(len(plan) + 1) > row))  # fmt: skip
            yield f"need of row {row}: {plan.task(int(row))}", cut


def refusal(plan):
    """Return why a plan is refused; nothing if it is not."""
    try:
        plan.check()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("order", "per_rank", "more"), [
    ("gpipe", 1, {}), ("1f1b", 1, {"sharded": True}), ("1f1b", 2, {"buckets": per_layer}), ("zb-1p", 1, {}),
    ("zb-v", 2, {}),
])  # fmt: skip
def test_mutated_plans_are_refused(order, per_rank, more):
    plan = small(order, per_rank, **more)
    plan.check()
    rng = np.random.default_rng(0)
    for what, mutant in mutants(plan, rng, 40):
        assert re.search("row [0-9]|batch [0-9]", refusal(mutant)), what


def test_shares_of_replicas_are_gathered_before_the_next_step():
    plan = small(sharded=True)
    assert set(plan.kind[plan.collectives]) == {REDUCE_SCATTER, ALL_GATHER}
    rows = plan.rows(ALL_GATHER)
    refuses(without(plan, rows[plan.key[rows] == plan.key[rows[0]]]), "of the updated weights of part 0")


# ---------------------------------------------------------------- data parallelism, custom orders, errors


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-2p"])
def test_replicas_sum_while_the_last_backward_pass_goes_on(order):
    """Between ranks without latency an all-reduce of two takes its bytes once in each direction."""
    p, m, weights = 2, 4, 10**12
    chunks = equal(p, 1, f=1.0, g=2.0, weights=weights, width=1)
    plan = pipeline(chunks, Mesh(data=2, pipeline=p), m, order)
    alone = pipeline(chunks, Mesh(pipeline=p), m, order)
    cluster = star(4, bandwidth=4.0 * weights / 0.5, latency=0.0)
    run, without_replicas = plan.execute(cluster), alone.execute(cluster)
    sums = plan.rows(ALL_REDUCE)
    assert (run.end - run.start)[sums] == pytest.approx(np.full(len(sums), 0.5), rel=1e-9)
    ends = without_replicas.step_ends[:, 0] + 0.5
    assert run.step_ends[:, 0].reshape(p, 2) == pytest.approx(np.repeat(ends[:, None], 2, axis=1), rel=1e-9)


def test_bubble_shares():
    p, m = 4, 8
    run = pipeline(equal(p), Mesh(pipeline=p), m, steps=2).execute(star(p, bandwidth=1e15, latency=0.0))
    assert run.idle_shares == pytest.approx(np.full((p, 2), (p - 1) / (m + p - 1)), rel=1e-6)


def test_an_order_as_a_table():
    table = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)], [("F", 1, 0), ("F", 1, 1), ("B", 1, 1), ("B", 1, 0)]]
    plan = pipeline(equal(2), Mesh(pipeline=2), 2, table)
    plan.check()
    assert plan == pipeline(equal(2), Mesh(pipeline=2), 2, "gpipe")
    assert list(gpipe(2, 2)) == [[tuple(each) for each in passes] for passes in table]


def test_an_order_that_can_never_end():
    """Rank 0 wants a gradient that needs a forward pass which it does later; on one rank the table tells, between ranks
    the plan does."""
    table = [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)], [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)]]
    plan = pipeline(equal(2), Mesh(pipeline=2), 2, table)
    refuses(plan, "dependency cycle")
    with pytest.raises(ConfigError, match="dependency cycle"):
        plan.execute(star(2, bandwidth=1e9, latency=0.0))


def forward(chunk, micro):
    return ("F", chunk, micro)


def back(chunk, micro):
    return ("B", chunk, micro)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([[forward(0, 0), back(0, 0)]], "pipeline: order has 1 lists for 2 ranks; provide one list per rank"),
        ([[forward(0, 0), back(0, 0)], [forward(1, 0)]], r"order: \('B', 1, 0\) is missing"),
        ([[forward(0, 0), back(0, 0), forward(1, 0)], [back(1, 0)]], r"= \('B', 1, 0\): chunk 1 belongs to rank 0"),
        ([[forward(0, 0), forward(0, 0)], []], r"order\[0\]\[1\] = \('F', 0, 0\): occurs twice"),
        (
            [[back(0, 0), forward(0, 0)], []],
            r"order\[0\]\[0\] = \('B', 0, 0\): comes before \('F', 0, 0\), on which this pass depends",
        ),
        (
            [[forward(0, 0), forward(2, 0)], []],
            r"must be \('F', 'B' or 'W', chunk, micro-batch\), with chunks below 2 and micro-batches below 1",
        ),
        ([["forward"], []], "order\\[0\\]\\[0\\] = 'forward': must be"),
        ("gpip", "unknown pipeline order 'gpip'"),
        ("zb-v", "order 'zb-v' does not support 2 chunks on 2 ranks; the number of chunks must be 4"),
    ],
)
def test_orders_that_do_not_fit(table, text):
    with pytest.raises(ConfigError, match=text):
        pipeline(equal(2), Mesh(pipeline=2), 1, table)


def test_other_things_that_do_not_fit():
    with pytest.raises(
        ConfigError, match="micro_batches = 6: must be a multiple of the number of pipeline ranks, 4; use 4 or 8"
    ):
        pipeline(equal(4, 2), Mesh(pipeline=4), 6)
    with pytest.raises(
        ConfigError,
        match="order '1f1b' does not support 5 chunks on 2 ranks; the number of chunks must be a multiple of 2",
    ):
        pipeline(equal(5), Mesh(pipeline=2), 4)
    with pytest.raises(ConfigError, match="chunks: must contain all layers in order"):
        pipeline(equal(2)[::-1], Mesh(pipeline=2), 4)
    with pytest.raises(ConfigError, match="interleaved: chunks = 0"):
        interleaved(2, 2, 0)


def test_what_replicas_bring_is_not_in_one_bucket_only():
    chunks = balanced_chunks(workload("resnet18"), 2)
    for buckets in (one_bucket, ddp_buckets, per_layer):
        plan = pipeline(chunks, Mesh(data=2, pipeline=2), 2, buckets=buckets)
        plan.check()
        sums = plan.rows(ALL_REDUCE)
        total = sum(chunk.workload.gradient_nbytes for chunk in chunks)
        assert plan.nbytes[sums].sum() == pytest.approx(2 * total)
        assert len(plan.rows(BACKWARD)) > len(chunks) * 4 or buckets is one_bucket
