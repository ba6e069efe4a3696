"""Steps that the kernel executes from their plan are those of the workers' processes, to the last bit."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from draws import few, seeds
from strategies_processes import processes
from strategy_plans import plan_of

import ddlsim
from ddlsim import (
    DGC,
    FP16,
    QSGD,
    AllReduce,
    CodecCost,
    Compression,
    ConfigError,
    DdpBuckets,
    ErrorFeedback,
    GTopK,
    HorovodFusion,
    Lognormal,
    NoJitter,
    ParameterServer,
    PerLayer,
    PowerSGD,
    Priority,
    ServerWork,
    ShardedUpdate,
    SignSGD,
    Slowdown,
    Threshold,
    TopK,
    Training,
)
from ddlsim.cluster import star
from ddlsim.errors import DdlsimError
from ddlsim.plan import KINDS, Draft, Part
from ddlsim.plan.program import LIVE, N_STEPS, StepProgram, key_sizes, task_table
from ddlsim.plan.transforms import with_evaluations
from ddlsim.run import run
from ddlsim.runtime.bookings import Shape
from ddlsim.strategies.overlap import overlap_named

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
        longest = Slowdown(rng.randrange(workers), "1 ms", "0.3 s", rng.choice([1.5, 3.0]))
        more["slowdowns"] = [longest, Slowdown(0, "50 ms", "0.1 s", 2.0)]
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


def told(span, end):
    """Return a span; what it is called at the very end depends on who is asked first what he is waiting for."""
    return (*span[:2], span.name if span.end < end else "", *span[3:])


def assert_same(experiment):
    result = run(experiment, keep_spans=True)
    with processes(experiment.strategy):
        expected = run(experiment, keep_spans=True)
    end = result.end_time
    for name in ("end_time", "nbytes_sent", "n_messages", "stop_reason"):
        assert getattr(result, name) == getattr(expected, name)
    for name in ("updates", "step_end", "seconds", "idle", "booked"):
        assert getattr(result.recorder, name) == getattr(expected.recorder, name)
    spans, wanted = (sorted(told(span, end) for span in each.recorder.spans) for each in (result, expected))
    assert spans == wanted
    assert [span.end for span in result.recorder.spans] == sorted(span.end for span in expected.recorder.spans)
    assert (result.channel_busy == expected.channel_busy).all()
    if result.monitor is not None:
        # whose losses a row knows depends on when values are looked at; as a process, a worker can be ahead
        rows, wanted = ([row._replace(train_loss=0.0) for row in each.monitor.history] for each in (result, expected))
        assert repr(rows) == repr(wanted)
        model = result.monitor.evaluated.read()
        assert (model == expected.monitor.evaluated.read()).all()
    return result


@pytest.mark.parametrize("seed", seeds(5, 24))
def test_whole_and_cut_short(seed):
    experiment = drawn(seed)
    result = assert_same(experiment)
    first = result.recorder.updates[0][0]
    cut = first + random.Random(seed).random() * (result.end_time - first)
    assert_same(dataclasses.replace(experiment, max_time=cut))


#: compressors that travel in every way: one collective or two, a vote, a tree, and sizes that depend on values
COMPRESSORS = [
    FP16(), ErrorFeedback(TopK(0.05)), QSGD(4), PowerSGD(2), SignSGD(), GTopK(0.05), DGC(steps_per_stage=2),
    Threshold(0.5),
]  # fmt: skip


def drawn_more(seed):
    """Return a small random experiment with compression, known times, working servers or sharded updates."""
    rng, base = random.Random(seed), drawn(seed)
    overlap = rng.choice(["none", "layer", "ddp", DdpBuckets("5 MB", "1 MB")])
    kind, workers = seed % 4, rng.choice([1, 2, 4, 8])
    servers = 1 if base.cluster == "cloud-25g-16x8-v100" else min(2, workers)
    if kind == 0:
        strategy = AllReduce(rng.choice(["ring", "hierarchical"]), rng.choice([overlap, *OVERLAPS]), cost="nccl")
    elif kind == 1:
        work = ServerWork(update=rng.choice([0.0, 3.0]), unsplit_below=rng.choice([0.0, "1 MB"]))
        strategy = ParameterServer(servers, "colocated", rng.choice(OVERLAPS), rng.choice([False, True]), work)
    elif kind == 2:
        strategy = ShardedUpdate(overlap=overlap, cost=rng.choice(["simulated", "nccl"]))
    else:
        strategy = rng.choice([AllReduce("hierarchical", overlap), ParameterServer(servers, "colocated", overlap)])
    training = base.training and dataclasses.replace(base.training, charge_evaluation=False)
    more = {"training": training, "cluster": "cloud-25g-16x8-v100" if kind == 0 else base.cluster}
    compressor = rng.choice(COMPRESSORS[: 8 if base.training else 7])
    if kind == 2 and compressor in (SignSGD(), GTopK(0.05)):
        strategy = dataclasses.replace(strategy, cost="simulated")  # no library has these
    if kind == 3 and rng.random() < 0.5:  # fused, or by priority
        strategy = dataclasses.replace(strategy, overlap=rng.choice(OVERLAPS))
    queued = isinstance(overlap_named(strategy.overlap), Priority | HorovodFusion)
    compressor = rng.choice(COMPRESSORS[:3]) if queued else compressor
    if isinstance(overlap_named(strategy.overlap), Priority) and base.accumulation > 1:
        base = base.with_(jitter=NoJitter())  # decoding before the first micro-step draws no factor of its own
    packs = kind > 1 or (kind == 0 and compressor in COMPRESSORS[:4])
    if packs and rng.random() < 0.8:
        more["compression"] = Compression(compressor, cost=rng.choice([None, CodecCost(encode=1e-10, decode=1e-10)]))
    return base.with_(strategy=strategy, workers=workers, speed=None, slowdowns=(), **more)


@pytest.mark.parametrize("seed", few(range(24), 1, start=1))
def test_what_is_known_compressed_sharded_or_served(seed):
    experiment = drawn_more(seed)
    result = assert_same(experiment)
    first = result.recorder.updates[0][0]
    cut = first + random.Random(seed).random() * (result.end_time - first)
    assert_same(dataclasses.replace(experiment, max_time=cut))


@pytest.mark.parametrize("batch_size", [4, 32])
def test_sharded_updates_that_overlap_are_no_slower_than_all_reduce(batch_size):
    """VGG-A on 128 nodes: the same bytes, and further passes of the model to hide the second half behind."""
    speed, nbytes = {}, {}
    for strategy in (AllReduce(), ShardedUpdate(), ShardedUpdate(overlap="ddp")):
        result = ddlsim.simulate("zenith", "vgg-a", strategy, workers=128, batch_size=batch_size, steps=3, warmup=1)
        speed[strategy], nbytes[strategy] = result.speedup, result.nbytes_sent
    assert len(set(nbytes.values())) == 1
    assert speed[ShardedUpdate(overlap="ddp")] > speed[AllReduce()] > speed[ShardedUpdate()]


def test_the_last_who_enters_says_when_a_collective_of_known_time_ends():
    """Two buckets one after the other: all ranks leave together, the second one when the first has ended."""
    strategy = AllReduce("ring", "layer", cost="nccl")
    result = ddlsim.simulate("cloud-25g-16x8-v100", "lenet5", strategy, workers=4, batch_size=8, steps=2, warmup=0)
    spans = [span for span in result.traced.recorder.spans if span.track.endswith("network")]
    ends = sorted({span.end for span in spans})
    assert len(spans) == 4 * len(ends)
    assert all(earlier < later for earlier, later in itertools.pairwise(ends))


@pytest.mark.parametrize("compressor", [None, FP16()])
def test_the_fusion_threshold_counts_encoded_bytes(compressor):
    """All five layers are ready in one cycle; in 16 bits they fill one buffer of half the gradient's bytes."""
    model = ddlsim.load_model("lenet5")
    strategy = AllReduce("ring", HorovodFusion(2 * model.n_params, "1 s"))
    common = {"workers": 4, "batch_size": 8, "steps": 1, "warmup": 0, "compression": compressor}
    result = ddlsim.simulate("cloud-25g-16x8-v100", model, strategy, **common)
    names = {span.name for span in result.traced.recorder.spans if span.track == "worker 0 network"}
    assert names == {"5 buckets of step 0"} if compressor else len(names) > 1
    assert result.nbytes_sent == pytest.approx(2 * 3 * (2 if compressor else 4) * model.n_params)


@pytest.mark.parametrize("overlap", ["ddp", "priority"])
def test_batches_that_grow(overlap):
    """A batch of 8 becomes 16 after 0.1 epochs: that many samples count for the steps that had them."""
    training = Training("digits", updates=12, growing_batch=ddlsim.GrowingBatch(8, (0.1,)))
    experiment = ddlsim.Experiment(
        "two-racks-oversubscribed", "digits-cnn", AllReduce(overlap=overlap), workers=4, batch_size=8, training=training
    )
    result = assert_same(experiment)
    samples = [n for _, n in result.recorder.updates]
    assert samples == [32] * samples.count(32) + [64] * samples.count(64)
    grown = 1 + int(0.1 * 1437 / 32)  # the first step that begins after 0.1 epochs
    assert samples.count(32) == grown


def test_evaluations_are_rows_of_their_own():
    result = ddlsim.simulate("minicluster", "alexnet", AllReduce(overlap="priority"), steps=1, warmup=0)
    plan = plan_of(AllReduce(overlap="priority"), result.workloads, N_STEPS)
    waiting = plan_of(ddlsim.ShardedUpdate(), result.workloads, N_STEPS)  # for everything at once
    for told, needing in ((plan, False), (waiting, True)):
        longer = with_evaluations(told, "evaluation")
        added = np.flatnonzero(longer.name == 0)
        assert longer.names == ("evaluation",)
        assert len(added) == N_STEPS
        assert len(longer) == len(told) + N_STEPS
        assert (longer.lane[added] == longer.lane[added + 1]).all()
        assert (np.diff(longer.need_offsets)[added].max() > 0) is np.bool_(needing)
        longer.check()
        assert longer.execute(result.cluster).seconds == pytest.approx(told.execute(result.cluster).seconds, rel=1e-12)


def test_steps_that_differ_are_not_repeated():
    result = ddlsim.simulate("minicluster", "alexnet", AllReduce(), steps=1, warmup=0)
    plan = plan_of(AllReduce(), result.workloads, N_STEPS)
    assert StepProgram.of(plan).live_steps().live == LIVE
    seconds = np.where(plan.step == N_STEPS - 1, 2.0, 1.0) * plan.seconds
    shorter = plan_of(AllReduce(), result.workloads, N_STEPS - 1)
    for wrong in (dataclasses.replace(plan, seconds=seconds), shorter):
        with pytest.raises(ddlsim.ConfigError, match="the steps after the first one differ"):
            StepProgram.of(wrong).live_steps()


def fields(values):
    """Return a table's values as an array without the NaNs of tasks that have not started."""
    array = np.array([] if values is None else values)
    return array[[name for name in array.dtype.names if name not in ("start", "end")]] if array.dtype.names else array


COPIED = [AllReduce(), ShardedUpdate(overlap="layer"), ddlsim.LocalSGD(2), ddlsim.Parallel(pipeline=2)]


@pytest.mark.parametrize("strategy", COPIED, ids=lambda strategy: type(strategy).__name__)
def test_a_plan_of_all_ranks_is_unrolled_like_the_copies_that_it_was_unrolled_from(strategy):
    result = ddlsim.simulate("dgx1-v100", "bert-large", strategy, batch_size=64, workers=4, steps=2, warmup=0)
    copies = strategy.program(result.workloads, 4)
    assert len(copies.ranks) > 1
    for n_steps in (2, N_STEPS):
        written_out = StepProgram.of(copies.unroll_all(n_steps))
        for steps in range(1, n_steps + 1):
            assert written_out.unroll_all(steps) == copies.unroll_all(steps)
        steps = written_out.live_steps(n_steps - 1, repeat=False)
        same = copies.live_steps(n_steps - 1, repeat=False)
        assert steps.plan == same.plan
        assert (steps.rows, steps.keys, steps.live) == (same.rows, same.keys, same.live)
        assert np.array_equal(steps.key_sizes, same.key_sizes)
        for table, other in zip(steps.table(), same.table(), strict=True):
            assert np.array_equal(fields(table), fields(other))
    assert written_out.unroll_all(N_STEPS + 2) == copies.unroll_all(N_STEPS + 2)


def test_unrolling_numbers_keys_step_by_step():
    """Also those of a plan of all ranks that numbers them otherwise."""
    result = ddlsim.simulate("dgx1-v100", "bert-large", AllReduce(), batch_size=64, workers=4, steps=1, warmup=0)
    plan = plan_of(AllReduce(), result.workloads, N_STEPS)
    reverse = plan.with_columns(key=np.where(plan.key >= 0, plan.key.max() - plan.key, -1))
    unrolled = StepProgram.of(reverse).unroll_all(N_STEPS)
    per_step = (plan.key.max() + 1) // N_STEPS
    mirrored = plan.step * per_step + per_step - 1 - plan.key % per_step
    assert per_step > 1
    assert np.array_equal(unrolled.key, np.where(plan.key >= 0, mirrored, -1))
    assert StepProgram.of(plan).unroll_all(N_STEPS) == plan


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), AllReduce(overlap="priority"), ShardedUpdate(overlap="ddp"), ddlsim.Parallel(pipeline=2),
     ddlsim.Parallel(pipeline=2, order="zb-v", sharded=True)],
)  # fmt: skip
def test_steps_that_repeat_are_those_of_a_longer_plan(strategy):
    """Tasks of four slots, made from three steps; what follows the last slot is in the second one."""
    result = ddlsim.simulate("dgx1-v100", "bert-large", strategy, batch_size=64, workers=4, steps=1, warmup=0)
    steps = strategy.program(result.workloads, 4).live_steps()
    table, longer = steps.table(), task_table(plan_of(strategy, result.workloads, LIVE + 2, 4))
    tasks, begin, end = table.tasks, steps.rows[1].start, steps.rows[-1].stop
    for name in ("kind", "seconds", "key", "place", "step", "missing", "slow", "first", "last"):
        assert (tasks[name] == longer.tasks[name][:end]).all(), name
    assert (table.queue_of == longer.queue_of[: len(table.queue_of)]).all()
    following = longer.following[: longer.tasks["last"][end - 1]]
    assert (table.following == np.where(following >= end, following - end + begin, following)).all()
    assert (tasks["waits"] == tasks["missing"]).all()
    sizes = key_sizes(plan_of(strategy, result.workloads, LIVE + 1, 4))[0]
    assert (steps.key_sizes == sizes).all()
    assert [steps.keys[0].start, steps.keys[-1].stop] == [0, len(sizes)]


class Growing(PerLayer):
    """Works longer and longer."""

    def program(self, workloads, accumulation=1):
        program = AllReduce(overlap="layer").program(workloads, accumulation)
        return program.map(lambda plan: dataclasses.replace(plan, seconds=plan.seconds * (1.0 + plan.step)))


class Circle(PerLayer):
    """The first task waits for the last of its step."""

    def program(self, workloads, accumulation=1):
        return AllReduce(overlap="layer").program(workloads, accumulation).map(self.waiting)

    def waiting(self, plan):
        last = np.flatnonzero(plan.kind == 2)
        first = np.array([np.flatnonzero(plan.step == step)[0] for step in range(N_STEPS)])
        lists = [plan.needs[a:b].tolist() for a, b in zip(plan.need_offsets[:-1], plan.need_offsets[1:], strict=True)]
        for row, need in zip(first.tolist(), last.tolist(), strict=True):
            lists[row] = [*lists[row], need]
        offsets = np.cumsum([0, *map(len, lists)])
        needs = np.array([need for each in lists for need in each])
        return dataclasses.replace(plan, needs=needs, need_offsets=offsets)


class Sending(PerLayer):
    """Broadcasts what should be summed."""

    def program(self, workloads, accumulation=1):
        program = AllReduce(overlap="layer").program(workloads, accumulation)
        sums, broadcast = KINDS.index("all_reduce"), KINDS.index("broadcast")
        return program.map(
            lambda plan: dataclasses.replace(plan, kind=np.where(plan.kind == sums, broadcast, plan.kind))
        )


class Alone(PerLayer):
    """Nobody waits for anybody: every rank reduces with itself."""

    def program(self, workloads, accumulation=1):
        plan = AllReduce(overlap="layer").program(workloads, accumulation).unroll(N_STEPS)
        seconds = plan.seconds * np.where(plan.rank == 0, 0.01, 1.0)
        kind = np.where(plan.kind == KINDS.index("all_reduce"), KINDS.index("compute"), plan.kind)
        return StepProgram.of(dataclasses.replace(plan, kind=kind, seconds=seconds))


def test_overlaps_of_ones_own():
    def end(overlap, **more):
        return ddlsim.simulate("minicluster", "alexnet", AllReduce(overlap=overlap), steps=8, warmup=0, **more).end_time

    with pytest.raises(ConfigError, match="plan: the steps after the first one differ"):
        end(Growing())
    for more in ({}, {"max_time": 1e4}):
        with pytest.raises(ConfigError, match="plan: dependency cycle"):
            end(Circle(), **more)
    with pytest.raises(DdlsimError, match="would restart before its previous step has finished"):
        end(Alone())
    with pytest.raises(ConfigError, match="AllReduce does not support this collective in a run; supported: all_reduce"):
        end(Sending())


def test_a_step_ends_with_the_weights_whatever_follows():
    """Gathers of weights end a step, those of anything else (which belong to no part) do not."""
    draft = Draft(n_layers=1, parts=[Part(1e6, 0, 1)])
    passes = [[draft.work(rank, 1e-3, kind="backward", batch=rank, layers=(0, 1))] for rank in (0, 1)]
    summed = draft.collective("reduce_scatter", [0, 1], 1e6, passes, part=0)
    updates = [[draft.work(rank, 1e-3, kind="update", layers=(0, 1), needs=[summed[rank]])] for rank in (0, 1)]
    weights = draft.collective("all_gather", [0, 1], 1e6, updates, part=0)
    draft.collective("all_gather", [0, 1], 5e6, [[row] for row in weights])
    plan = draft.plan()
    execution = plan.execute(star(2, bandwidth="1 GB/s", latency="1 us"))
    lasts = Shape(StepProgram.of(plan), 0, {}).lasts
    ends = [execution.end[lasts][plan.rank[lasts] == rank].max() for rank in (0, 1)]
    assert ends == execution.step_ends[:, 0].tolist()
    assert execution.seconds > max(ends) + 1e-3
