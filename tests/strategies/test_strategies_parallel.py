"""`Parallel`: a model split over workers, as a run: its times, samples, memory, values and what it refuses."""

import dataclasses
import re

import numpy as np
import pytest
from draws import few, rows
from strategy_plans import plan_of

import ddlsim
from ddlsim import (
    FSDP,
    AllReduce,
    ConfigError,
    Experiment,
    Measured,
    Parallel,
    Training,
    load_device,
    load_model,
    simulate,
)
from ddlsim import compression as cp
from ddlsim.cluster import star
from ddlsim.collectives import build
from ddlsim.network import schedule_time
from ddlsim.plan.chunks import chunks_at
from ddlsim.plan.pipeline_orders import ORDERS
from ddlsim.run.prepare import prepare
from ddlsim.run.simulate import run
from ddlsim.runtime import table_run
from ddlsim.strategies.parallel import joined
from ddlsim.workload.compute import make_workload
from ddlsim.workload.memory import Holding, memory_of
from ddlsim.workload.tensor_parallel import tensor_parallel

INSTANT = star(8, bandwidth=1e15, latency=0.0)


@pytest.mark.parametrize(
    "strategy",
    few([
        *(Parallel(pipeline=2, order=order, micro_batch=2) for order in ORDERS),
        Parallel(pipeline=2, interleave=2, micro_batch=2, recompute="stage"),
        Parallel(pipeline=2, sharded=True, overlap="layer"), Parallel(pipeline=4, data=1), Parallel(overlap="none"),
    ], 4),
)  # fmt: skip
def test_a_run_is_its_plan_again_and_again(strategy):
    result = simulate("dgx1-v100", "resnet18", strategy, batch_size=32, workers=4, steps=3, warmup=1)
    plan = result.plan
    plan.check()
    assert plan.n_ranks == 4
    longer = plan_of(strategy, result.workloads, 4, 32 // (strategy.mesh(4).data * (strategy.micro_batch or 1)))
    execution = longer.execute(result.cluster, nodes=result.cluster.workers[:4].tolist())
    assert result.step_times == pytest.approx(execution.step_times[1:], rel=1e-9)
    assert result.samples_per_update == 32


@pytest.mark.parametrize(
    "strategy",
    [
        Parallel(pipeline=4, micro_batch=2), Parallel(pipeline=2, micro_batch=8, sharded=True, order="gpipe"),
        Parallel(pipeline=2, interleave=2, micro_batch=2, p2p="exchange"), Parallel(pipeline=2, order="zb-v"),
        Parallel(pipeline=4, micro_batch=4, p2p="in turns", recompute="stage"),
    ],
)  # fmt: skip
def test_a_run_of_one_update_needs_no_third_step(strategy, monkeypatch):
    """What goes on when the first step ends is in the second one: all of the rest waits."""
    parts = {"cluster": "two-racks-oversubscribed", "model": "resnet18", "strategy": strategy, "batch_size": 64}
    experiment = Experiment(**parts, workers=8, steps=1, warmup=0, jitter=ddlsim.Lognormal(0.3))
    short = run(experiment, keep_spans=True)
    monkeypatch.setattr(table_run, "LIVE", 0)  # no run is taken for one that ends with its first step
    long = run(experiment, keep_spans=True)
    for name in ("end_time", "nbytes_sent", "n_messages"):
        assert getattr(short, name) == getattr(long, name)
    for name in ("updates", "step_end", "seconds", "booked", "spans"):
        assert getattr(short.recorder, name) == getattr(long.recorder, name)


@pytest.mark.parametrize("order", [*ORDERS, "2bw"])
def test_memory_is_told_without_the_plan(order):
    strategy = Parallel(pipeline=4, order=order, recompute="stage")
    (workload,) = {id(each): each for each in prepare(Experiment("office-1gbe", "resnet18", strategy, batch_size=24,
                                                                 workers=8)).workloads}.values()  # fmt: skip
    told = strategy.peak_memory([workload] * 8, 12)
    assert told == pytest.approx(plan_of(strategy, [workload] * 8, 1, 12).peak_memory(), rel=1e-12)


@pytest.mark.parametrize("m", [1, 2, 8])
def test_the_step_without_a_network(m):
    """(m + p - 1)(f + g) of equal stages, in which a worker alone needs m p (f + g)."""
    p = 4
    compute = Measured("80 ms", 4)
    result = simulate(INSTANT, "resnet18", Parallel(pipeline=p, micro_batch=4), batch_size=4 * m, workers=p, steps=3,
                      compute=compute)  # fmt: skip
    stages = [stage.workload for stage in prepare(result.experiment).stages]
    assert sum(stage.forward_time + stage.backward_time for stage in stages) == pytest.approx(80e-3)
    slowest = max(stage.forward_time + stage.backward_time for stage in stages)
    assert 80e-3 + (m - 1) * slowest * 0.999 <= result.step_time <= (m + p - 1) * slowest * 1.001
    assert result.single_throughput == pytest.approx(4 / 80e-3)
    assert result.efficiency == pytest.approx(m * 80e-3 / (p * result.step_time))


def test_throughput_per_device_of_any_layout_without_bubbles():
    """On an instant network, with one micro-batch after the other on every worker, layouts differ in nothing."""
    each = {}
    for pipeline, order in ((1, "1f1b"), (1, "gpipe"), (1, "zb-1p")):
        result = simulate(INSTANT, "resnet18", Parallel(pipeline=pipeline, order=order, micro_batch=4), batch_size=64,
                          compute=Measured("80 ms", 4), workers=4, steps=3)  # fmt: skip
        each[pipeline, order] = result.throughput / 4
    assert list(each.values()) == pytest.approx([4 / 80e-3] * 3, rel=1e-6)


def history(strategy, workers, batch_size):
    result = simulate("lab-heterogeneous", "digits-cnn", strategy, workers=workers, batch_size=batch_size, seed=3,
                      training=Training("digits", epochs=2))  # fmt: skip
    return result, [row["accuracy"] for row in result.history.to_dict("records")]


@pytest.mark.parametrize(("strategy", "workers", "replicas"), [
    (Parallel(pipeline=2, micro_batch=8), 2, 1),
    (Parallel(pipeline=4, micro_batch=16, order="gpipe", recompute="stage"), 4, 1),
    (Parallel(pipeline=2, micro_batch=8, order="zb-v", sharded=True), 4, 2),
    (Parallel(pipeline=2, micro_batch=8, sharded="full"), 4, 2), (Parallel(micro_batch=8, sharded="full"), 4, 4),
])  # fmt: skip
def test_it_learns_what_replicas_learn(strategy, workers, replicas):
    """With the whole batch in as many parts, bit for bit."""
    split, learned = history(strategy, workers, 64)
    whole, expected = history(AllReduce(), replicas, 64 // replicas)
    np.testing.assert_array_equal(split.params, whole.params)
    assert learned == expected


def test_memory_is_that_of_the_part():
    """1F1B keeps more on the first worker than on the last; GPipe as many micro-batches as there are."""
    told = {}
    for order in ("1f1b", "gpipe"):
        strategy = Parallel(pipeline=8, micro_batch=8, order=order)
        result = simulate("dgx1-v100", "bert-large", strategy, batch_size=256, steps=2)
        told[order] = result.warnings
    assert not told["1f1b"]
    assert any("layers 0 to" in text and "v100 has 17.2 GB" in text for text in told["gpipe"])


def test_stages_of_different_workers():
    """A worker of half the speed takes twice as long for its stage, in any run."""
    slow = simulate(INSTANT, "resnet18", Parallel(pipeline=2, micro_batch=4), batch_size=64, workers=2, steps=3,
                    speed=[1.0, 0.5], compute=Measured("80 ms", 4))  # fmt: skip
    even = simulate(INSTANT, "resnet18", Parallel(pipeline=2, micro_batch=4), batch_size=64, workers=2, steps=3,
                    compute=Measured("80 ms", 4))  # fmt: skip
    assert 1.5 < slow.step_time / even.step_time < 2.0
    assert slow.plan.seconds[slow.plan.rank == 1] == pytest.approx(2 * even.plan.seconds[even.plan.rank == 1])
    assert slow.plan.seconds[slow.plan.rank == 0] == pytest.approx(even.plan.seconds[even.plan.rank == 0])


@pytest.mark.parametrize("devices", [("v100", "v100", "p100", "p100"), ("p100", "v100", "p100", "v100")])
def test_balanced_stages_take_devices_into_account(devices):
    """A P100 takes 2.2 times as long as a V100, so it gets fewer layers; stages hold what the plan computes."""
    graph = star(4, bandwidth="100 GB/s", latency="1 us")
    for rank, device in enumerate(devices):
        graph.nodes[f"h{rank}"]["device"] = device
    result = simulate(graph, "resnet152", Parallel(pipeline=4, micro_batch=4), batch_size=64, steps=1, warmup=0)
    seconds = result.workers.compute
    assert seconds.max() < 1.15 * seconds.mean()
    layers = [stage.workload.model.layers for stage in result.experiment.strategy.stages(result.workloads)]
    assert sum(layers, ()) == result.workloads[0].model.layers


@pytest.mark.parametrize(
    ("strategy", "more", "text"),
    [
        ({"pipeline": 3}, {}, "Parallel: pipeline 3 x tensor 1 = 3: must divide the number of workers, 4; the nearest"),
        ({"pipeline": 2, "data": 3}, {}, "data 3 x pipeline 2 x tensor 1 = 6: must equal the number of workers, 4"),
        (
            {"pipeline": 2, "micro_batch": 3},
            {},
            "64: must be a multiple of 6 (data 2 x micro_batch 3); the nearest valid sizes are batch_size=66; "
            "batch_size=60",
        ),
        ({"pipeline": 2, "interleave": 2, "order": "gpipe"}, {}, "interleave = 2 has no effect with order = 'gpipe'"),
        (
            {"pipeline": 4, "interleave": 2, "micro_batch": 32},
            {},
            "= 64: must be a multiple of 128 (data 1 x micro_batch 32 x pipeline 4",
        ),
        ({"pipeline": 4, "interleave": 30}, {}, "pipeline 4 x 30 chunks = 120: resnet18 has only "),
        ({"pipeline": 2, "order": "gpipe", "p2p": "in turns"}, {}, "needs order = '1f1b' and interleave = 1"),
        ({"order": "1b1f"}, {}, "unknown pipeline order '1b1f'; did you mean"),
        ({"pipeline": 4}, {"compression": ddlsim.TopK(0.01)}, "compression has no effect with parallel"),
    ],
)
def test_what_does_not_fit(strategy, more, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate("dgx1-v100", "resnet18", Parallel(**strategy), batch_size=64, workers=4, **more)


def test_its_fabric():
    strategy = Parallel(pipeline=2)
    experiment = Experiment("dgx1-v100", "resnet18", strategy, fabric=ddlsim.Fabric("halving_doubling", "given"))
    assert experiment.strategy == Parallel(pipeline=2, algorithm="halving_doubling", rank_order="given")
    known = Experiment("dgx1-v100", "resnet18", strategy, fabric=ddlsim.Fabric(cost="nccl")).strategy
    assert known == Parallel(pipeline=2, cost="nccl")
    assert known.label == "parallel (pipeline 2, 1f1b, default, nccl cost)"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("order", few(["1f1b", "zb-v", "pipedream"], 1))
def test_sums_of_known_cost(order, sharded):
    """Of one stage they take what those of data parallelism do; stages sum beside each other."""
    if order == "pipedream" and sharded:
        return
    times = {}
    for cost in ("simulated", "nccl"):
        strategy = Parallel(pipeline=2, order=order, sharded=sharded, cost=cost, overlap="none")
        times[cost] = simulate("dgx1-v100", "vgg16", strategy, batch_size=32, steps=3).step_time
    assert times["nccl"] == pytest.approx(times["simulated"], rel=0.1)  # both have the NVLinks inside each group alone
    one = {}
    for strategy in (Parallel(micro_batch=4, cost="nccl", overlap="none"), AllReduce("ring", "none", cost="nccl")):
        batch_size = 32 if isinstance(strategy, Parallel) else 4
        one[type(strategy)] = simulate("dgx1-v100", "vgg16", strategy, batch_size=batch_size, steps=3).step_times
    assert one[Parallel] == pytest.approx(one[AllReduce], rel=1e-12)


COMPRESSORS = (
    cp.ErrorFeedback(cp.TopK(0.05)), cp.FP16(), cp.OneBit(), cp.PowerSGD(2), cp.SignSGD(), cp.GTopK(0.1),
)  # fmt: skip


@pytest.mark.parametrize("compressor", few(COMPRESSORS, 3), ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("strategy", [
    Parallel(pipeline=2, micro_batch=8, overlap="layer"),
    Parallel(pipeline=2, order="zb-v", overlap="layer", sharded=True),
    Parallel(pipeline=3, data=2, micro_batch=4, overlap="layer"),
], ids=["1f1b", "sharded", "3 stages"])  # fmt: skip
def test_replicas_compress_what_they_sum(strategy, compressor):
    """Layer by layer, as replicas that nobody split would: the same values bit for bit, in fewer bytes."""
    workers = 2 * strategy.pipeline
    more = {"seed": 3, "training": Training("digits", updates=8, rate=0.02)}
    more["batch_size"] = 32
    split = simulate("office-1gbe", "digits-cnn", strategy, workers=workers, compression=compressor, **more)
    dense = simulate("office-1gbe", "digits-cnn", strategy, workers=workers, **more)
    more["batch_size"] = 16
    whole = simulate("office-1gbe", "digits-cnn", AllReduce(overlap="layer"), workers=2,
                     compression=compressor, **more)  # fmt: skip
    np.testing.assert_array_equal(split.params, whole.params)
    if compressor in (cp.FP16(), cp.PowerSGD(2)):
        assert np.abs(split.params - dense.params).max() > 0.0
    assert split.nbytes_sent != dense.nbytes_sent
    told = [sum(note.startswith("compression") for note in result.notes) for result in (split, whole)]
    assert told[0] == told[1] + (strategy.sharded and compressor == cp.PowerSGD(2))  # which is not scattered


def test_stale_gradients_compress_too():
    strategy = Parallel(pipeline=2, order="pipedream", overlap="layer")
    sent = {}
    for compressor in (None, cp.FP16()):
        result = simulate("office-1gbe", "digits-cnn", strategy, workers=4, batch_size=32, compression=compressor,
                          seed=3, training=Training("digits", updates=12, rate=0.02))  # fmt: skip
        sent[compressor] = result.nbytes_sent
        assert result.staleness_histogram == {0: 26, 1: 22}
    assert sent[cp.FP16()] < sent[None]


@pytest.mark.parametrize(("strategy", "compressor", "model", "text"), [
    (Parallel(tensor=2), cp.TopK(0.1), "bert-large", "does not support compression with tensor = 2"),
    (Parallel(pipeline=2), cp.TopK(0.1), "gpt2", "does not support compression for models whose stages share weights"),
])  # fmt: skip
def test_what_is_not_compressed(strategy, compressor, model, text):
    with pytest.raises(ConfigError, match=text):
        simulate("dgx1-v100", model, strategy, batch_size=8, compression=compressor)
    with pytest.raises(ConfigError, match="the size of Threshold messages depends on"):
        simulate("office-1gbe", "digits-cnn", Parallel(pipeline=2), batch_size=8, compression=cp.Threshold(0.1),
                 workers=4, training=Training("digits", updates=2))  # fmt: skip


def test_it_is_written_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('cluster = "dgx1-v100"\nmodel = "resnet18"\nbatch_size = 64\nsteps = 2\nwarmup = 0\n'
                    '[strategy]\ntype = "parallel"\npipeline = 4\nmicro_batch = 4\norder = "zb-2p"\n')  # fmt: skip
    from ddlsim.run.files import load_experiment

    assert load_experiment(path).strategy == Parallel(pipeline=4, micro_batch=4, order="zb-2p")
    assert isinstance(load_experiment(path), Experiment)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"sequence": True, "recompute": "selective"}, {"recompute": "full", "sharded": True},
        {"recompute": "early-stop", "sharded": "full"},
    ],
)  # fmt: skip
def test_tensor_groups(more):
    """Every worker is a rank of the plan, and has a part of the memory."""
    strategy = Parallel(tensor=2, pipeline=2, micro_batch=4, **more)
    result = simulate("dgx1-v100", "bert-large", strategy, batch_size=32, steps=3)
    result.plan.check()
    assert result.plan.n_ranks == len(result.workers) == 8
    assert result.samples_per_update == 32
    plan = plan_of(strategy, result.workloads, 3, 4)
    alone = plan.execute(result.cluster, nodes=result.nodes.tolist())
    assert result.step_time == pytest.approx(alone.step_times[-1], rel=0.01)  # NCCL spreads its rings otherwise
    whole, part = (
        each.stages(result.workloads[:1] * 8)[0].memory for each in (Parallel(pipeline=2, micro_batch=4), strategy)
    )
    assert part.weights < 0.6 * whole.weights
    assert part.optimizer < (0.3 if "sharded" in more else 0.6) * whole.optimizer
    held = strategy.peak_memory(result.workloads, 4)
    assert held.shape == (8,)
    assert held == pytest.approx(plan_of(strategy, result.workloads, 1, 4).peak_memory(), rel=1e-9)


#: Llama 3 8B: parameters of a transformer layer's products and norms, of the embedding and of the output layer
H, KV, F, WORDS = 4096, 1024, 14336, 128256
PRODUCTS, NORMS, TABLE = 2 * H * H + 2 * H * KV + 3 * H * F, 2 * H, WORDS * H


def test_fully_sharded_replicas_are_fsdp():
    """Without tensor groups and stages it is the same program."""
    runs = [
        simulate("dgx-h100-pod", "llama-3-8b", strategy, 32, 16, steps=2, stack="torchtitan")
        for strategy in (FSDP(micro_batch=1, recompute="full"), Parallel(sharded="full", recompute="full"))
    ]
    assert runs[0].step_time == runs[1].step_time
    assert runs[0].nbytes_sent == runs[1].nbytes_sent
    assert runs[0].memory == runs[1].memory


@pytest.mark.parametrize(("tensor", "data"), [(2, 8), (4, 4)])
def test_fully_sharded_tensor_groups_by_hand(tensor, data):
    """Of P parameters on a rank of a group, 16 P/d bytes stay, and two layers and what is around them are gathered.
    Each micro-batch gathers all weights in bf16 for both passes, and scatters gradients in fp32."""
    strategy = Parallel(tensor=tensor, sharded="full", micro_batch=1, recompute="early-stop", algorithm="ring")
    fully, plain = (
        simulate("dgx-h100-pod", "llama-3-8b", each, 2 * data, 16, steps=2, warmup=0, stack="torchtitan")
        for each in (strategy, dataclasses.replace(strategy, sharded=False))
    )
    layer, root = PRODUCTS / tensor + NORMS, 2 * TABLE / tensor + H
    rank = 32 * layer + root
    gathered = 2 * (root + 2 * layer)
    memory, whole = (each.stages[0].memory for each in (prepare(fully.experiment), prepare(plain.experiment)))
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(16 * rank / data, rel=1e-12)
    assert memory.buffers - whole.buffers == pytest.approx(gathered, rel=1e-12)
    assert memory.reserved - whole.reserved == pytest.approx(gathered, rel=1e-12)  # buffers that they are copied from
    # of 16 ranks in 2 steps with 2 micro-batches each; plain replicas all-reduce gradients once a step
    exchanged = 2 * 16 * 2 * (data - 1) / data * (2 * 2 + 4) * rank
    within = plain.nbytes_sent - 2 * 16 * 2 * (data - 1) / data * 4 * rank
    assert fully.nbytes_sent == pytest.approx(exchanged + within, rel=1e-3)


def test_fully_sharded_stages_by_hand():
    """Of P parameters of a stage, 16 P/d bytes stay in shards; beside them all weights in bf16 and all gradients in
    fp32 until the last micro-batch has gone back."""
    strategy = Parallel(pipeline=2, data=8, sharded="full", recompute="full", cut="layers")
    made = prepare(Experiment("dgx-h100-pod", "llama-3-8b", strategy, 32, workers=16, stack="torchtitan"))
    rank = 16 * (PRODUCTS + NORMS) + TABLE
    memory = made.stages[0].memory
    assert memory.weights + memory.optimizer == pytest.approx(14 * rank / 8, rel=1e-12)
    assert memory.gradients == pytest.approx(2 * rank / 8 + 4 * rank, rel=1e-12)
    layer = PRODUCTS + NORMS
    assert memory.reserved == pytest.approx(2 * (TABLE + 2 * layer), rel=1e-12)
    kept = memory_of(made.stages[0].workload.model, 1, "bf16", Holding("adam", recompute="full", flash=True)).buffers
    assert memory.buffers == pytest.approx(2 * rank + kept, rel=1e-12)
    assert kept < 2 * layer * 8


def test_what_does_not_go_with_full_shards():
    for more, message in (
        ({"overlap": "layer"}, "overlap = 'layer' has no effect with sharded = 'full'"),
        ({"order": "gpipe"}, "order = 'gpipe' has no effect with sharded = 'full'"),
        ({"recompute": "stage"}, "recompute = 'stage' cannot be combined with sharded = 'full'"),
        ({"order": "pipedream", "pipeline": 2}, "sharded = 'full' needs a synchronous order"),
    ):
        with pytest.raises(ConfigError, match=message):
            Parallel(sharded="full", **more)
    with pytest.raises(ConfigError, match="reduce-scatters the gradients of each micro-batch"):
        simulate(INSTANT, "resnet18", Parallel(sharded="full"), batch_size=32, workers=4, compression=cp.TopK(0.01))


def test_what_does_not_fit_of_tensor_groups():
    with pytest.raises(ConfigError, match=r"tensor = 3: does not divide the 16 heads of layer\.0\.attention1 of"):
        simulate("dgx1-v100", "bert-large", Parallel(tensor=3), batch_size=8, workers=6)
    with pytest.raises(ConfigError, match=r"tensor = 2: resnet18 has no attention layers"):
        simulate("dgx1-v100", "resnet18", Parallel(tensor=2), batch_size=8)
    with pytest.raises(ConfigError, match="tensor = 16: tensor groups would cross machine boundaries unevenly"):
        simulate("ib-800g-a100+n_hosts=6", "bert-large", Parallel(tensor=16), batch_size=8, workers=[*range(4, 36)])
    with pytest.raises(ConfigError, match="recompute = 'full' has no effect, because resnet18 has no"):
        simulate("dgx1-v100", "resnet18", Parallel(recompute="full"), batch_size=8)
    with pytest.raises(ConfigError, match="orders with separate weight gradients"):
        Parallel(tensor=2, order="zb-v")


def test_stages_of_equal_layers():
    """Megatron-LM's: embedding and output layer come on top, where balanced stages take them into account."""
    model = "megatron+dim=1024+layers=12+heads=16"
    step = {}
    for cut in ("balanced", "layers"):
        strategy = Parallel(pipeline=4, micro_batch=2, cut=cut)
        result = simulate("ib-800g-a100+n_hosts=1", model, strategy, batch_size=16, workers=4, steps=2,
                          precision="fp16")  # fmt: skip
        parts = [stage.workload.model.layers for stage in strategy.stages(result.workloads[:1] * 4)]
        heads = [sum(1 for layer in part if layer.heads) for part in parts]
        assert sum(heads) == 12
        assert (heads == [3, 3, 3, 3]) == (cut == "layers")
        result.plan.check()
        step[cut] = result.step_time
    assert step["balanced"] < step["layers"]
    text = (
        "cut = 'layers' with pipeline = 5: the number of chunks must divide the 12 transformer layers of .*; the near"
    )
    with pytest.raises(ConfigError, match=text):
        simulate("ib-800g-a100+n_hosts=1", model, Parallel(pipeline=5, cut="layers"), batch_size=16, workers=5)
    with pytest.raises(ConfigError, match="resnet18 has no transformer layers; use cut='balanced'"):
        simulate("dgx1-v100", "resnet18", Parallel(pipeline=2, cut="layers"), batch_size=16, workers=4)


@pytest.mark.parametrize(("name", "algorithm", "candidates"), rows([
    ("ib-800g-a100", "default", ["nccl"]), ("ib-800g-a100", "ring", ["nccl"]),
    ("cloud-25g-16x8-v100+transport=ideal", "default", ["ring", "hierarchical"]),
], 2))  # fmt: skip
def test_tensor_groups_across_machines(name, algorithm, candidates):
    """Their all-reduces leave through all interfaces of a machine; a ring leaves through one. What NCCL runs is the
    default where GPUs have several paths, whatever the replicas use; elsewhere, the faster one is."""
    strategy = Parallel(tensor=16, micro_batch=64, algorithm=algorithm)
    result = simulate(f"{name}+n_hosts=2", "bert-large", strategy, batch_size=64, steps=2, precision="fp16")
    cluster, shard = result.cluster, tensor_parallel(result.workloads[0], 16)

    def seconds(algorithm, nbytes):
        nodes = cluster.workers[cluster.locality_order(cluster.workers)].tolist()
        schedule = build(algorithm, 16, nbytes, [0] * 8 + [1] * 8, where=(cluster, nodes))
        return schedule_time(cluster, schedule, nodes, nbytes)

    sums = [each.nbytes for each in shard.collectives]
    assert {each.kind for each in shard.collectives} == {"all_reduce"}
    assert seconds("ring", sums[0]) > (2.0 if candidates == ["nccl"] else 1.5) * seconds("hierarchical", sums[0])
    expected = shard.workload.step_time + sum(min(seconds(each, n) for each in candidates) for n in sums)
    assert result.step_time == pytest.approx(expected, rel=1e-9)


def test_tensor_exchanges_beside_products():
    """Between computing alone and waiting for every exchange; groups are inside machines."""
    step = {}
    for overlap in (False, True):
        strategy = Parallel(tensor=8, sequence=True, micro_batch=8, tp_comm_overlap=overlap)
        result = simulate("ib-800g-a100+n_hosts=1", "bert-large", strategy, batch_size=8, precision="fp16", steps=2)
        step[overlap] = result.step_time
    computes = tensor_parallel(result.workloads[0], 8, sequence=True).workload.step_time
    assert computes < step[True] < step[False]
    for changes, text in (
        ({"tensor": 4}, "tp_comm_overlap = True: requires sequence parallelism"),
        ({"tensor": 16, "sequence": True}, "tensor groups must be inside one machine, but groups of 16 cross machines"),
    ):
        with pytest.raises(ConfigError, match=text):
            simulate("ib-800g-a100+n_hosts=2", "bert-large", Parallel(tp_comm_overlap=True, **changes), batch_size=64)


@pytest.mark.parametrize("strategy", [ddlsim.Parallel(pipeline=2), ddlsim.Parallel(pipeline=4, order="gpipe")])
def test_evaluations_take_the_time_of_the_first_stage(strategy: Parallel):
    """359 held-out samples go through the first worker's stage before steps that it has not begun."""
    runs = {}
    for charged in (False, True):
        training = ddlsim.Training("digits", updates=4, evaluate_every=2, charge_evaluation=charged)
        runs[charged] = ddlsim.simulate(
            "office-1gbe", "digits-cnn", strategy, batch_size=16, workers=4, training=training
        )
    stage = strategy.stages(runs[True].workloads[:1] * 4)[0].workload
    seconds = stage.forward_time * 359 / stage.batch_size
    spans = [span for span in runs[True].traced.recorder.spans if span.name == "evaluation"]
    assert {span.track for span in spans} == {"worker 0"}
    assert [span.end - span.start for span in spans] == pytest.approx([seconds, seconds], rel=1e-9)
    assert runs[True].end_time == pytest.approx(runs[False].end_time + 2 * seconds, rel=1e-3)
    assert [row.loss for row in runs[True].monitor.history] == [row.loss for row in runs[False].monitor.history]


def test_a_tensor_group_is_as_slow_as_its_slowest_member():
    def end(*ranks: int) -> float:
        slow = [ddlsim.Slowdown([rank], "0 s", "1 h", 2.0) for rank in ranks]
        strategy = Parallel(tensor=2, pipeline=2)
        return ddlsim.simulate(
            "dgx1-v100", "bert-large", strategy, batch_size=4, workers=4, steps=1, warmup=0, slowdowns=slow
        ).end_time

    assert end() < end(0) == end(1) == end(0, 1)
    assert end(0) < end(1, 2)


def test_all_chunks_together_are_the_whole_model():
    whole = make_workload(load_model("resnet18"), load_device("v100"), 8, optimizer="lamb")
    work = joined(chunks_at(whole, (7, 20, 41)))
    assert work.model.layers == whole.model.layers
    assert work.norms > 0.0
    for name in ("forward_time", "backward_time", "gradient_nbytes", "optimizer", "norms"):
        assert getattr(work, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert work.tensor_layer.tolist() == whole.tensor_layer.tolist()
