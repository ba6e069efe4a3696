"""Pipelines without a flush, as plans: steady state, versions of weights, proofs and what they refuse."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from draws import rows
from plan_examples import changed, with_value, without, workload
from split_models import chain
from unrolled import pipeline

from ddlsim import ConfigError
from ddlsim.cluster import star
from ddlsim.plan import Mesh, balanced_chunks, chunks_at, read_chakra
from ddlsim.plan import pipeline as pipeline_program
from ddlsim.plan.pipeline import stage_delays, steps_under_way
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, FORWARD, RECEIVE, SEND, UPDATE
from ddlsim.plan.program import task_table
from ddlsim.workload.buckets import ddp_buckets, one_bucket, per_layer

KINDS = [("pipedream", 4, 1), ("pipedream", 2, 1), ("pipedream", 1, 1), ("2bw", 3, 3), ("2bw", 3, 5), ("2bw", 2, 4)]


def stages(p, seed=None, **more):
    """Return chunks of one layer; of equal time without a seed."""
    rng = np.random.default_rng(seed)
    f, g = ([1.0] * p, [2.0] * p) if seed is None else rng.uniform(1.0, 2.0, (2, p))
    return chunks_at(chain(f, g, **more), range(1, p))


# ---------------------------------------------------------------- time and memory


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("order", "p", "m"), KINDS)
def test_in_the_steady_state_the_slowest_stage_works_all_the_time(order, p, m, seed):
    """On an instant network a step takes m (f + g) of the slowest stage, and its update."""
    update = 0.3
    chunks = stages(p, seed, optimizer=update)
    updates = [chunk.workload.optimizer for chunk in chunks]
    run = pipeline(chunks, Mesh(pipeline=p), m, order, steps=6 * p).execute(star(p, bandwidth=1e15, latency=0.0))
    each = [
        m * (chunk.workload.forward_time + chunk.workload.backward_time) + update
        for chunk, update in zip(chunks, updates, strict=True)
    ]
    assert run.step_times[-2:] == pytest.approx([max(each)] * 2, rel=1e-9)


@pytest.mark.parametrize("message", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(("p", "seed"), [(2, 0), (2, 1), (3, 0), (4, 2)])
def test_messages_slow_it_down_only_where_they_close_a_circle(p, seed, message):
    """From stage i forward to stage j and back goes a micro-batch for each of j - i + 1 that are between them: the step
    takes the longest mean, of the stages' seconds and 2 (j - i) messages of c each."""
    chunks = stages(p, seed)
    cluster = star(p, bandwidth=1e12, latency=message / 2)  # of each of two links
    run = pipeline(chunks, Mesh(pipeline=p), 1, "pipedream", steps=60).execute(cluster)
    each = [chunk.workload.forward_time + chunk.workload.backward_time for chunk in chunks]
    expected = max((sum(each[i : j + 1]) + 2 * (j - i) * message) / (j - i + 1) for i in range(p) for j in range(i, p))
    assert np.mean(run.step_times[-12:]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("order", "p", "m"), KINDS)
def test_micro_batches_that_are_kept(order, p, m):
    plan = pipeline(stages(p), Mesh(pipeline=p), m, order, steps=5)
    assert plan.peak_memory() == pytest.approx(200.0 * (p - np.arange(p)))


def test_the_ages_of_weights():
    assert stage_delays("pipedream", 4) == (3, 2, 1, 0)
    assert stage_delays("2bw", 4) == (1, 1, 1, 1)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(("order", "p", "m"), KINDS)
def test_steps_after_the_first_are_alike(order, p, m, data):
    live = steps_under_way(p, m)
    plan = pipeline(stages(p), Mesh(data=data, pipeline=p), m, order, steps=live + 2)
    steps = pipeline_program(stages(p), Mesh(data=data, pipeline=p), m, order).live_steps(live)
    table, longer, end = steps.table(), task_table(plan), steps.rows[-1].stop
    for name in ("kind", "seconds", "key", "place", "step", "missing", "first", "last"):
        assert np.array_equal(table.tasks[name], longer.tasks[name][:end]), name
    following = longer.following[: longer.tasks["last"][end - 1]]
    wrapped = np.where(following >= end, following - end + steps.rows[1].start, following)
    assert np.array_equal(table.following, wrapped)
    shorter = pipeline(stages(p), Mesh(data=data, pipeline=p), m, order, steps=2)
    first = plan.step < 2
    for name in ("lane", "kind", "seconds", "key", "batch", "step", "part", "peer"):
        assert np.array_equal(getattr(plan, name)[first], getattr(shorter, name)), name


# ---------------------------------------------------------------- proofs


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"buckets": per_layer}, {"buckets": ddp_buckets}])
@pytest.mark.parametrize("data", [1, 3])
@pytest.mark.parametrize(("order", "p", "m"), rows(KINDS, 2))
def test_they_are_proved(order, p, m, data, more):
    chunks = balanced_chunks(workload("resnet18"), p)
    pipeline(chunks, Mesh(data=data, pipeline=p), m, order, steps=4, **more).check()


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_two_versions_of_tied_embeddings(p, data):
    chunks = balanced_chunks(workload("gpt2", 1), p)
    plan = pipeline(chunks, Mesh(data=data, pipeline=p), 3, "2bw", steps=3, buckets=ddp_buckets)
    plan.check()
    tied = [i for i, part in enumerate(plan.parts) if part.tied >= 0]
    assert len(tied) == (p > 1)  # a single stage has one tensor
    sums = plan.rows(ALL_REDUCE)
    sums = sums[np.isin(plan.part[sums], tied)]
    across = [row for row in sums if len({rank // data for rank in plan.groups[plan.peer[row]]}) == 2]
    assert len(across) == (2 * data * 3 if p > 1 else 0)
    if p > 1:
        refuses(without(plan, across), "which is tied to it, is never summed in part")


def refuses(plan, *texts):
    with pytest.raises(ConfigError) as error:
        plan.check()
    for text in texts:
        assert text in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("order", "p", "m"), [kind for kind in KINDS if kind[1] > 1])
def test_younger_weights_than_there_are(order, p, m):
    """Of the first stage, weights one update younger are not there when its forward passes begin."""
    plan = pipeline(stages(p), Mesh(data=2, pipeline=p), m, order, steps=p + 2)
    for stage in range(p - 1):
        younger = [age - (layer == stage) for layer, age in enumerate(plan.delays)]
        refuses(dataclasses.replace(plan, delays=tuple(younger)), f"forward of layer {stage}", "may start before")


def test_a_gradient_that_goes_into_another_update():
    """All of one rank's passes of a micro-batch in the next step, beside those of another there."""
    plan = pipeline(stages(2), Mesh(pipeline=2), 2, "2bw", steps=4)
    row = next(row for row in plan.rows(BACKWARD) if plan.batch[row] == 3 and plan.first[row] == 0)
    refuses(with_value(plan, "step", row, 2), "but their gradients are used in different updates")


def test_gradients_before_those_of_the_last_update_are_used():
    """The first backward pass of a step changes places with the update before it."""
    plan = pipeline(stages(2), Mesh(pipeline=2), 2, "2bw", steps=3)
    rows = np.flatnonzero((plan.rank == 1) & np.isin(plan.kind, (FORWARD, BACKWARD, UPDATE)))
    update = int(np.flatnonzero((plan.kind == UPDATE) & (plan.rank == 1))[0])
    later = [int(row) for row in rows if row > update][:2]
    assert [plan.kind[row] for row in later] == [FORWARD, BACKWARD]
    lanes = plan.lane.copy()
    lanes[update] = len(plan.lanes)
    apart = dataclasses.replace(plan, lanes=(*plan.lanes, plan.lanes[0]._replace(rank=1, name="update")), lane=lanes)
    refuses(apart, f"row {later[1]} ", "whose gradients it would add to")


def test_delays_that_are_none():
    plan = pipeline(stages(2), Mesh(pipeline=2), 1, "pipedream", steps=2)
    for delays in ((1,), (1, -1)):
        with pytest.raises(ConfigError, match="must have one non-negative number per layer"):
            dataclasses.replace(plan, delays=delays)


def mutants(plan, rng, n):
    """Yield (what, plan) with one thing changed that makes it wrong, of micro-batches that come back."""
    back = int(plan.batch[plan.rows(BACKWARD)].max()) + 1
    whole = (plan.batch >= 0) & (plan.batch < back)
    offsets = plan.need_offsets

    def some(*kinds):
        rows = plan.rows(*kinds)
        return rows[whole[rows]]

    for _ in range(n):
        what = rng.integers(7)
        if what == 0:
            yield "pass", without(plan, [rng.choice(some(FORWARD, BACKWARD))])
        elif what == 1:
            yield "message", without(plan, np.flatnonzero(plan.key == plan.key[rng.choice(some(SEND))]))
        elif what == 2:
            yield "end", without(plan, [rng.choice(some(SEND, RECEIVE))])
        elif what == 3:
            rows = plan.rows(ALL_REDUCE)
            yield "sum", without(plan, rows[plan.key[rows] == plan.key[rng.choice(rows)]])
        elif what == 4:
            yield "update", without(plan, [rng.choice(plan.rows(UPDATE))])
        elif what == 5:
            row = rng.choice(some(FORWARD, BACKWARD))
            yield "another micro-batch", with_value(plan, "batch", row, (plan.batch[row] + 1) % back)
        else:
            rows = np.flatnonzero((np.diff(offsets) == 1) & (whole | (plan.batch < 0)))
            row = rng.choice(rows)
            cut = changed(plan, needs=np.delete(plan.needs, offsets[row]),
                          need_offsets=offsets - (np.arange(len(plan) + 1) > row))  # fmt: skip
            yield f"need of row {row}: {plan.task(int(row))}", cut


@pytest.mark.parametrize(("order", "p", "m"), [("pipedream", 3, 1), ("2bw", 3, 4)])
def test_mutated_plans_are_refused(order, p, m):
    plan = pipeline(stages(p), Mesh(data=2, pipeline=p), m, order, steps=4)
    plan.check()
    for what, mutant in mutants(plan, np.random.default_rng(0), 60):
        assert re.search("row [0-9]|batch [0-9]", refusal(mutant)), what


def refusal(plan):
    """Return why a plan is refused; nothing if it is not."""
    try:
        plan.check()
    except ConfigError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- what does not go together, files


@pytest.mark.parametrize(("more", "text"), [
    ({"order": "pipedream", "micro_batches": 2}, "'pipedream' updates the weights after every micro-batch"),
    ({"order": "2bw", "micro_batches": 2}, "'2bw' needs at least one micro-batch per stage (3)"),
    ({"order": "2bw", "micro_batches": 3, "p2p": "exchange"}, "use an order whose steps do not overlap"),
    ({"order": "2bw", "micro_batches": 3, "sharded": True}, "use an order whose steps do not overlap"),
])  # fmt: skip
def test_what_does_not_go_together(more, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        pipeline(stages(3), Mesh(pipeline=3), **more)


def test_chunks_and_shared_weights():
    with pytest.raises(ConfigError, match="order 'pipedream' needs one chunk per stage, but there are 6 chunks for 3"):
        pipeline(stages(6), Mesh(pipeline=3), 1, "pipedream")
    with pytest.raises(
        ConfigError,
        match=r"'pipedream' does not support models whose first and last stages share weights \(tied_dense\)",
    ):
        pipeline(balanced_chunks(workload("gpt2", 1), 2), Mesh(pipeline=2), 1, "pipedream")


def test_a_trace_keeps_the_ages(tmp_path):
    plan = pipeline(stages(3), Mesh(pipeline=3), 1, "pipedream", steps=3, buckets=one_bucket)
    plan.to_chakra(tmp_path / "stream.et")
    again = read_chakra(tmp_path / "stream.et")
    assert again == plan
    assert again.delays == (2, 1, 0)


def test_no_pass_waits_for_a_later_step():
    """A plan of more steps begins as one of fewer."""
    plan = pipeline(stages(4), Mesh(pipeline=4), 1, "pipedream", steps=6)
    needing = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    assert (plan.step[plan.needs] <= plan.step[needing]).all()
    assert all(a <= b for a, b in itertools.pairwise(plan.step.tolist()))
