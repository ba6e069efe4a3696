"""Steps that the kernel executes from their plan are those of the workers' processes, to the last bit."""

import dataclasses
import random

import numpy as np
import pytest

import ddlsim
from ddlsim import (
    AllReduce,
    ConfigError,
    DdpBuckets,
    HorovodFusion,
    Lognormal,
    ParameterServer,
    PerLayer,
    Priority,
    SlowDown,
    Training,
)
from ddlsim.errors import DdlsimError
from ddlsim.plan import KINDS
from ddlsim.plan.live import N_STEPS, live_steps, with_evaluations
from ddlsim.plan.runner import columns
from ddlsim.run import run
from ddlsim.strategies import all_reduce
from ddlsim.strategies import overlap as overlaps

OVERLAPS = ["none", "layer", "ddp", "horovod", "priority", Priority("1 MB", 2), HorovodFusion("10 MB", "5 ms"),
            DdpBuckets("5 MB", "1 MB")]  # fmt: skip


def drawn(seed):
    """Return a small random experiment."""
    rng = random.Random(seed)
    workers = rng.choice([1, 2, 4, 7, 16])
    more = {}
    if rng.random() < 0.5:
        more["jitter"] = Lognormal(0.2)
    if rng.random() < 0.4:
        more["accumulation"] = rng.choice([2, 3])
    if rng.random() < 0.4:
        more["speed"] = [1.0 + 0.1 * (3 * rank % 5) for rank in range(workers)]
    if rng.random() < 0.4:
        longest = SlowDown(rng.randrange(workers), "1 ms", "0.3 s", rng.choice([1.5, 3.0]))
        more["slow_downs"] = [longest, SlowDown(0, "50 ms", "0.1 s", 2.0)]
    model = rng.choice(["alexnet", "resnet50", "lenet5"])
    if rng.random() < 0.35:
        model = "digits-cnn"
        more["training"] = Training(
            "digits", updates=6, evaluate_every=rng.choice([1, 2]), charge_evaluation=rng.random() < 0.5
        )
    else:
        more["steps"] = rng.choice([1, 2, 5, 9])
    cluster = rng.choice(["cloud-25g-16x8-v100", "two-racks-oversubscribed"])
    strategy = AllReduce(rng.choice(["ring", "hierarchical"]), OVERLAPS[seed % len(OVERLAPS)])
    if seed % 3 == 2:
        n_servers = 1 + (workers > 3 and cluster == "two-racks-oversubscribed")
        strategy = ParameterServer(n_servers, "colocated", strategy.overlap, rng.choice([False, True, "star"]))
    return ddlsim.Experiment(cluster, model, strategy, workers=workers, batch_size=8, seed=seed, warmup=0, **more)


def by_processes(experiment, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(all_reduce, "planned", lambda *_: None)
        return run(experiment, keep_spans=True)


def assert_same(experiment, monkeypatch):
    result, expected = run(experiment, keep_spans=True), by_processes(experiment, monkeypatch)
    for name in ("end_time", "nbytes_sent", "n_messages", "stop_reason"):
        assert getattr(result, name) == getattr(expected, name)
    for name in ("updates", "step_end", "seconds", "idle", "booked"):
        assert getattr(result.recorder, name) == getattr(expected.recorder, name)
    assert sorted(result.recorder.spans) == sorted(expected.recorder.spans)
    assert [span.end for span in result.recorder.spans] == sorted(span.end for span in expected.recorder.spans)
    assert (result.channel_busy == expected.channel_busy).all()
    if result.monitor is not None:
        assert repr(result.monitor.history) == repr(expected.monitor.history)
        model = result.monitor.evaluated.read()
        assert (model == expected.monitor.evaluated.read()).all()
    return result


@pytest.mark.parametrize("seed", range(24))
def test_whole_and_cut_short(seed, monkeypatch):
    experiment = drawn(seed)
    result = assert_same(experiment, monkeypatch)
    first = result.recorder.updates[0][0]
    cut = first + random.Random(seed).random() * (result.end_time - first)
    assert_same(dataclasses.replace(experiment, max_time=cut), monkeypatch)


@pytest.mark.parametrize("overlap", ["ddp", "priority"])
def test_batches_that_grow(overlap, monkeypatch):
    """A batch of 8 becomes 16 after 0.1 epochs: that many samples count for the steps that had them."""
    training = Training("digits", updates=12, growing_batch=ddlsim.GrowingBatch(8, (0.1,)))
    experiment = ddlsim.Experiment(
        "two-racks-oversubscribed", "digits-cnn", AllReduce(overlap=overlap), workers=4, batch_size=8, training=training
    )
    result = assert_same(experiment, monkeypatch)
    samples = [n for _, n in result.recorder.updates]
    assert samples == [32] * samples.count(32) + [64] * samples.count(64)
    grown = 1 + int(0.1 * 1437 / 32)  # the first step that begins after 0.1 epochs
    assert samples.count(32) == grown


def test_evaluations_are_rows_of_their_own():
    result = ddlsim.simulate("minicluster", "alexnet", AllReduce(overlap="priority"), steps=1, warmup=0)
    plan = AllReduce(overlap="priority").plan(result.workloads, N_STEPS)
    for needing in (False, True):
        longer = with_evaluations(plan, "evaluation", needing)
        added = np.flatnonzero(longer.name == 0)
        assert longer.names == ("evaluation",)
        assert len(added) == N_STEPS
        assert len(longer) == len(plan) + N_STEPS
        assert (longer.lane[added] == longer.lane[added + 1]).all()
        assert (np.diff(longer.need_offsets)[added].max() > 0) is np.bool_(needing)
        longer.check()
        assert longer.execute(result.cluster).seconds == pytest.approx(plan.execute(result.cluster).seconds, rel=1e-12)


def test_steps_that_differ_are_not_repeated():
    result = ddlsim.simulate("minicluster", "alexnet", AllReduce(), steps=1, warmup=0)
    plan = AllReduce().plan(result.workloads, N_STEPS)
    steps = live_steps(plan)
    assert steps is not None
    assert len(steps.tasks.kind) == steps.rows[-1].stop < len(plan)
    seconds = np.where(plan.step == N_STEPS - 1, 2.0, 1.0) * plan.seconds
    assert live_steps(dataclasses.replace(plan, seconds=seconds)) is None
    assert live_steps(AllReduce().plan(result.workloads, N_STEPS - 1)) is None
    assert (steps.tasks.waits[steps.rows[2]] == columns(plan).missing[steps.rows[2]]).all()


class Growing(PerLayer):
    """Waits longer and longer, which its plan says and its work does not know."""

    def plan(self, workloads, steps=1, accumulation=1):
        plan = overlaps.plan(PerLayer(), workloads, steps, accumulation)
        return dataclasses.replace(plan, seconds=plan.seconds * (1.0 + plan.step))


class Circle(PerLayer):
    """The first task waits for the last of its step."""

    def plan(self, workloads, steps=1, accumulation=1):
        plan = overlaps.plan(PerLayer(), workloads, steps, accumulation)
        last = np.flatnonzero((plan.kind == 2) & (plan.rank == 0))
        first = np.array([np.flatnonzero((plan.step == step) & (plan.rank == 0))[0] for step in range(steps)])
        lists = [plan.needs[a:b].tolist() for a, b in zip(plan.need_offsets[:-1], plan.need_offsets[1:], strict=True)]
        for row, need in zip(first.tolist(), last.tolist(), strict=True):
            lists[row] = [*lists[row], need]
        offsets = np.cumsum([0, *map(len, lists)])
        needs = np.array([need for each in lists for need in each])
        return dataclasses.replace(plan, needs=needs, need_offsets=offsets)


class Alone(PerLayer):
    """Nobody waits for anybody: every rank reduces with itself."""

    def plan(self, workloads, steps=1, accumulation=1):
        plan = overlaps.plan(PerLayer(), workloads, steps, accumulation)
        seconds = plan.seconds * np.where(plan.rank == 0, 0.01, 1.0)
        kind = np.where(plan.kind == KINDS.index("all_reduce"), KINDS.index("compute"), plan.kind)
        return dataclasses.replace(plan, kind=kind, seconds=seconds)


def test_overlaps_of_ones_own():
    def end(overlap, **more):
        return ddlsim.simulate("minicluster", "alexnet", AllReduce(overlap=overlap), steps=8, warmup=0, **more).end_time

    assert end(Growing()) == end("layer")  # by its work, as its steps do not repeat
    for more in ({}, {"max_time": 1e4}):
        with pytest.raises(ConfigError, match="tasks wait for each other in a circle"):
            end(Circle(), **more)
    with pytest.raises(DdlsimError, match="would start anew before all of its step have ended"):
        end(Alone())
