"""`FSDP`: ZeRO stages, FULL_SHARD and HYBRID_SHARD as runs: bytes, memory, times, values and what is refused."""

import re
from dataclasses import replace

import numpy as np
import pytest
from draws import few, slow
from strategy_plans import plan_of

import ddlsim
from ddlsim import (
    FSDP,
    SGD,
    Adam,
    AllReduce,
    ConfigError,
    DdpBuckets,
    Experiment,
    Measured,
    Momentum,
    PerKernel,
    ShardedUpdate,
    Training,
    simulate,
)
from ddlsim.cluster import star
from ddlsim.run.files import load_experiment
from ddlsim.run.prepare import prepare
from ddlsim.workload.roles import blocks

KINDS = {
    "stage 1": FSDP(stage=1, micro_batch=4), "stage 2": FSDP(stage=2, micro_batch=4, overlap="layer"),
    "stage 2, no_sync": FSDP(stage=2, micro_batch=4, no_sync=True, overlap="none"), "full": FSDP(micro_batch=4),
    "grad_op": FSDP(reshard=False, no_sync=True, micro_batch=8), "hybrid": FSDP(shard=2, prefetch=3, micro_batch=8),
    "nothing ahead": FSDP(prefetch=0, units=[0, 4]), "buckets": FSDP(stage=1, overlap=DdpBuckets(1e6, 1e5)),
}  # fmt: skip


def trained(strategy, workers, batch_size, optimizer, model="digits-cnn", data="digits"):
    training = Training(data, updates=20, optimizer=optimizer, rate=0.01, sharding="shared")
    return simulate("lab-heterogeneous", model, strategy, batch_size, workers, seed=3, training=training)


@pytest.mark.parametrize("optimizer", few([SGD(), Momentum(0.9), Adam()], 1, start=2))
def test_it_ends_with_the_weights_of_one_worker(optimizer):
    alone = trained(AllReduce(), 1, 64, optimizer)
    assert np.abs(alone.params - alone.monitor.learner.initial.read()).max() > 1e-3
    for strategy in KINDS.values():
        result = trained(strategy, 4, 64, optimizer)
        np.testing.assert_allclose(result.params, alone.params, rtol=0, atol=2e-6)
        assert result.history["updates"].max() == 20


@pytest.mark.slow
def test_transformers_learn_with_it():
    one, four = (
        trained(strategy, workers, 16, Adam(), "char-transformer", "sentences")
        for strategy, workers in ((AllReduce(), 1), (FSDP(), 4))
    )
    np.testing.assert_allclose(four.params, one.params, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", few(KINDS, 3))
def test_a_run_is_its_plan_again_and_again(kind):
    result = simulate("dgx1-v100", "resnet18", KINDS[kind], batch_size=64, workers=4, steps=3, warmup=1)
    result.plan.check()
    assert result.samples_per_update == 64
    longer = plan_of(KINDS[kind], result.workloads, 5, 16 // result.workloads[0].batch_size)
    longer.check()
    run = longer.execute(result.cluster, nodes=result.cluster.workers[:4].tolist())
    np.testing.assert_allclose(result.step_times, np.diff(run.step_ends.max(axis=0), prepend=0.0)[1:4], rtol=1e-9)


def nbytes_of_a_step(strategy, n, micro_batches, **more):
    """Return what each rank sends, in bytes of the model's fp32 gradients: the difference of runs of 6 and 3 steps."""
    cluster = star(n, bandwidth=1e9, latency=0.0)
    runs = [
        simulate(cluster, "resnet18", strategy, batch_size=2 * n * micro_batches, steps=steps,
                 compute=Measured("1 ms", 2), device="v100", **more)
        for steps in (6, 3)
    ]  # fmt: skip
    sent = np.diff([run.nbytes_sent for run in runs])[0] / -3 / n
    return sent / (4.0 * runs[0].workloads[0].model.gradient_nbytes(1))


@pytest.mark.parametrize(("n", "m"), [slow(2, 1), slow(4, 1), (2, 3), slow(4, 3)])
def test_bytes_by_stage(n, m):
    """(N - 1)/N (g + w) P of stages 1 and 2, (g + 2 w) P of stage 3; each micro-batch scatters its gradients from stage
    2 on, and gathers in stage 3."""
    share, micro = (n - 1) / n, {"micro_batch": 2}
    for strategy, expected in (
        (FSDP(stage=1, **micro), 2), (FSDP(stage=2, **micro), m + 1), (FSDP(stage=2, no_sync=True, **micro), 2),
        (FSDP(**micro), 3 * m), (FSDP(no_sync=True, **micro), 2 * m + 1), (FSDP(reshard=False, **micro), 2 * m),
    ):  # fmt: skip
        assert nbytes_of_a_step(strategy, n, m) == pytest.approx(share * expected, rel=1e-6)
    for strategy in (FSDP(stage=1, **micro), FSDP(stage=2, no_sync=True, **micro)):  # w = 2, whatever g is
        wide, narrow = (nbytes_of_a_step(strategy, n, m, precision="fp16", gradient_dtype=g) for g in ("fp32", "fp16"))
        assert (wide, narrow) == pytest.approx((share * 1.5, share), rel=1e-6)
        cast = nbytes_of_a_step(replace(strategy, param_dtype="fp32"), n, m, precision="fp16", gradient_dtype="fp16")
        assert cast == pytest.approx(share * 1.5, rel=1e-6)
    half = nbytes_of_a_step(FSDP(**micro), n, m, precision="fp16", gradient_dtype="fp16")
    assert half == pytest.approx(share * 1.5 * m, rel=1e-6)
    mixed = nbytes_of_a_step(FSDP(param_dtype="fp32", **micro), n, m, precision="fp16", gradient_dtype="fp16")
    assert mixed == pytest.approx(share * 2.5 * m, rel=1e-6)


@pytest.mark.parametrize("m", [1, 2])
def test_bytes_of_hybrid_sharding(m):
    """Inside groups of S as with S ranks, and an all-reduce of P / S over their R copies, once a step."""
    size, copies = 4, 2
    expected = 3 * m * (size - 1) / size + 2 * (copies - 1) / copies / size
    assert nbytes_of_a_step(FSDP(shard=size, micro_batch=2), size * copies, m) == pytest.approx(expected, rel=1e-6)


def test_memory_by_stage():
    """Adam in mixed precision: (2 + 2) P + 12 P/N, 2 P + 14 P/N, 16 P/N and gathered units."""
    n = 8

    def memory(strategy):
        experiment = Experiment("roce-a100-80g", "mpt-7b", strategy, n, workers=n, precision="bf16", optimizer="adam",
                                stack="maxtext", flash=False)  # fmt: skip
        stages = prepare(experiment).stages
        assert all(stage.memory == stages[0].memory for stage in stages)
        return stages[0].memory

    model = ddlsim.load_model("mpt-7b")
    p, layer = float(model.n_params), 12 * 4096**2 + 13 * 4096
    held = {kind: memory(strategy) for kind, strategy in (
        (1, FSDP(stage=1)), (2, FSDP(stage=2)), (3, FSDP()), ("no_sync", FSDP(stage=2, no_sync=True)),
        ("ahead", FSDP(prefetch=3)), ("kept", FSDP(reshard=False)), ("4", FSDP(shard=4)),
        ("full", FSDP(recompute="full")),
    )}  # fmt: skip
    states = {kind: each.weights + each.gradients + each.optimizer for kind, each in held.items()}
    assert states[1] == pytest.approx(4 * p + 12 * p / n)
    assert states[2] == pytest.approx(2 * p + 14 * p / n)
    assert states[3] == states["ahead"] == states["kept"] == pytest.approx(16 * p / n)
    assert states["4"] == pytest.approx(16 * p / 4)
    assert states["no_sync"] == states[1]
    assert held[1].buffers == held[2].buffers == 0.0
    root = p - 32 * layer  # embedding, positions and the last normalisation stay gathered
    assert root == 50368 * 4096 + 2048 * 4096 + 2 * 4096
    assert held[3].buffers == pytest.approx(2 * (root + 2 * layer))
    assert held["ahead"].buffers == pytest.approx(2 * (root + 4 * layer))
    assert held["kept"].buffers == pytest.approx(2 * p)
    assert held["full"].activations < 0.1 * held[3].activations


def test_a_layer_is_computed_again():
    """A third more work, in the same units."""
    kept, again = (
        simulate("roce-a100-80g", "mpt-1b", FSDP(recompute=recompute), 16, 8, steps=2, precision="bf16")
        for recompute in ("none", "full")
    )
    assert 1.2 < again.step_time / kept.step_time < 1.34
    assert again.nbytes_sent == pytest.approx(kept.nbytes_sent)
    assert again.plan.peak_memory().max() < 0.35 * kept.plan.peak_memory().max()


def test_the_last_product_of_a_layer_is_not_computed_again():
    """4 of 12 h^2 multiplications of a layer's products; attention and the rest are."""
    work = prepare(
        Experiment("roce-a100-80g", "mpt-1b", FSDP(), 8, workers=8, precision="bf16", compute=PerKernel())
    ).workloads[0]
    seconds = {
        recompute: plan_of(FSDP(recompute=recompute), [work]).seconds.sum()
        for recompute in ("none", "early-stop", "full")
    }
    (first, end), *_ = blocks(work.model.layers)
    last = max(i for i in range(first, end) if work.model.layers[i].type == "dense")
    assert last == end - 2  # then comes the sum
    spared = len(blocks(work.model.layers)) * work.forward[last:end].sum()
    assert seconds["full"] - seconds["early-stop"] == pytest.approx(spared)
    assert 0.2 < spared / (seconds["full"] - seconds["none"]) < 0.36
    memory = [FSDP(recompute=each).stages([work] * 8)[0].memory for each in ("full", "early-stop")]
    assert memory[0] == memory[1]


def test_rings_leave_machines_by_all_adapters():
    """Eight times the rate of one ring between machines whose GPUs have an adapter each."""
    slow, fast = (
        simulate("roce-h100+n_hosts=4", "mpt-1b", FSDP(all_gather=how, reduce_scatter=how), 32, steps=1,
                 precision="bf16").step_time for how in ("ring", "nccl_ring")
    )  # fmt: skip
    assert slow > 3.0 * fast


def test_hybrid_sharding_spares_the_network_between_machines():
    """Weights are gathered inside the machine only; that pays where machines are far apart."""
    near, far = (
        simulate("cloud-25g-16x8-v100", "bert-large", strategy, batch_size=128, workers=32, steps=2)
        for strategy in (FSDP(shard=8), FSDP())
    )
    assert near.step_time < 0.75 * far.step_time


@pytest.mark.parametrize("strategy", [FSDP(stage=2), FSDP(), FSDP(shard=2)])
def test_workers_of_different_speed(strategy):
    """The slowest says how long a step takes, the others wait for it."""
    cluster = star(4, bandwidth=1e15, latency=0.0)
    result = simulate(cluster, "resnet18", strategy, batch_size=32, speed=[1.0, 0.5, 1.0, 0.8], steps=3,
                      compute=Measured("80 ms", 8))  # fmt: skip
    assert result.step_time == pytest.approx(160e-3, rel=1e-3)
    computing = result.workers["compute"] / result.end_time
    assert computing.tolist() == pytest.approx([0.5, 1.0, 0.5, 0.625], rel=1e-2)


@pytest.mark.parametrize(
    ("strategy", "more", "text"),
    [
        (
            {"stage": 2, "prefetch": 2},
            {},
            "prefetch = 2 has no effect with stage = 2, which does not shard the weights",
        ),
        ({"stage": 1, "reshard": False}, {}, "reshard = False has no effect with stage = 1"),
        ({"stage": 2, "shard": 2}, {}, "shard = 2 has no effect with stage = 2"),
        ({"overlap": "ddp"}, {}, "overlap = 'ddp' has no effect with stage = 3"),
        (
            {"stage": 2, "overlap": "priority"},
            {},
            "overlap = 'priority': must be 'none', 'layer', 'ddp' or DdpBuckets",
        ),
        ({"stage": 1, "no_sync": True}, {}, "no_sync = True has no effect with stage = 1"),
        ({"stage": 4}, {}, "stage = 4: must be"),
        ({"all_reduce": "ring"}, {}, "all_reduce = 'ring' has no effect without shard"),
        ({"shard": 3}, {}, "shard = 3: must divide the number of workers, 4; use one of 1, 2, 4"),
        ({"units": [3, 500]}, {}, "must be an increasing list of layer numbers that starts at 0 and stays below"),
        ({"micro_batch": 3}, {}, "batch_size = 64: must be a multiple of 12 (4 workers x micro_batch 3); use 60 or 72"),
        ({}, {"batch_size": 3}, "batch_size = 3: must be a multiple of 4 (4 workers); use 4"),
        ({"recompute": "full"}, {}, "recompute = 'full' has no effect, because resnet18 has no"),
        ({"shard": 2}, {"compression": ddlsim.TopK(0.01)}, "shard = 2 sums gradients twice, within groups and between"),
        (
            {"micro_batch": 8},
            {"compression": ddlsim.TopK(0.01)},
            "reduce-scatters the gradients of each of 2 micro-batches",
        ),
        (
            {},
            {"compression": ddlsim.CountSketch(0.01, 3, 2000)},
            " needs the whole gradient, but FSDP reduce-scatters it in",
        ),
    ],
)
def test_what_does_not_fit(strategy, more, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate("dgx1-v100", "resnet18", FSDP(**strategy), workers=4, **{"batch_size": 64, **more})


def test_its_fabric():
    experiment = Experiment("dgx1-v100", "resnet18", FSDP(shard=4), 64, fabric=ddlsim.Fabric("ring", "given"))
    halves = {"reduce_scatter": "ring", "all_gather": "ring"}
    assert experiment.strategy == FSDP(shard=4, all_reduce="ring", rank_order="given", **halves)
    halves = Experiment("dgx1-v100", "resnet18", FSDP(), 64, fabric=ddlsim.Fabric("halving_doubling"))
    assert halves.strategy == FSDP(reduce_scatter="recursive_halving", all_gather="recursive_doubling")
    with pytest.raises(
        ConfigError,
        match=r"algorithm = 'torus_2d': FSDP .* requires an algorithm that consists of a reduce-scatter and",
    ):
        Experiment("dgx1-v100", "resnet18", FSDP(), 64, fabric=ddlsim.Fabric("torus_2d"))


@pytest.mark.parametrize(
    "fabric",
    few(
        [ddlsim.Fabric("hierarchical"), ddlsim.Fabric("hierarchical", cost="nccl"), ddlsim.Fabric("nccl", cost="nccl")],
        1,
    ),
    ids=str,
)
def test_on_levels_and_in_known_times(fabric):
    """Stage 1 is ShardedUpdate, on every fabric and compressed, too; stage 3 learns the same and takes other times."""
    common = {"cluster": "cloud-25g-16x8-v100", "workers": 16, "fabric": fabric}
    for compression in (None, ddlsim.FP16()):
        one, other = (
            simulate(model="resnet18", strategy=strategy, batch_size=batch_size, compression=compression, **common)
            for strategy, batch_size in ((FSDP(stage=1, overlap="layer"), 64), (ShardedUpdate(overlap="layer"), 4))
        )
        assert one.step_times.tolist() == other.step_times.tolist()
        assert one.channel_nbytes.tolist() == other.channel_nbytes.tolist()
    training = Training("digits", updates=3, sharding="shared")
    full, plain = (
        simulate(model="digits-cnn", strategy=FSDP(), batch_size=64, training=training, **(common | more))
        for more in ({}, {"fabric": None})
    )
    assert full.params.tolist() == plain.params.tolist()
    assert full.step_time != plain.step_time


def test_it_is_written_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    run = 'cluster = "dgx1-v100"\nmodel = "bert-large"\nbatch_size = 64\nsteps = 2\nwarmup = 0\n'
    path.write_text(run + '[strategy]\ntype = "fsdp"\nstage = 3\nmicro_batch = 4\nshard = 4\nrecompute = "full"\n')
    assert load_experiment(path).strategy == FSDP(micro_batch=4, shard=4, recompute="full")
    other = path.read_text().replace("stage = 3", 'stage = 2\noverlap = { type = "ddp", cap = "1 MB" }')
    path.write_text(other.replace("shard = 4\n", ""))
    assert load_experiment(path).strategy == FSDP(stage=2, micro_batch=4, overlap=DdpBuckets("1 MB"), recompute="full")


def test_memory_that_is_too_small_is_told():
    result = simulate("roce-a100-40g", "mpt-30b", FSDP(), batch_size=8, workers=8, steps=1, precision="bf16")
    assert any("mpt-30b with batch size 1 in bf16 needs about" in text for text in result.warnings)


def test_a_share_of_the_layers_recomputes():
    """Half of the layers: half of the additional work, and activations half-way."""
    work = prepare(Experiment("roce-a100-80g", "mpt-1b", FSDP(), 8, workers=8, precision="bf16")).workloads[0]
    strategies = [FSDP(), FSDP(recompute="full", recompute_share=0.5), FSDP(recompute="full")]
    none, half, full = (plan_of(strategy, [work]).seconds.sum() for strategy in strategies)
    assert half == pytest.approx((none + full) / 2)
    kept = [strategy.stages([work] * 8)[0].memory.activations for strategy in strategies]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)
    assert "full recomputation in 50 % of the layers" in strategies[1].label
    with pytest.raises(ConfigError, match=r"recompute_share = 0\.5 has no effect with recompute"):
        FSDP(recompute_share=0.5)
