"""Cores that drive messages, and messages that nobody drives while workers compute."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ddlsim import (
    AllReduce,
    ConfigError,
    Distribution,
    Endpoints,
    Hybrid,
    Measured,
    ParameterServer,
    ShardedUpdate,
    WhileWaiting,
    load_cluster,
    load_model,
    simulate,
)
from ddlsim.cluster import star
from ddlsim.run.files import load_experiment

N, BANDWIDTH = 4, 1e9
TWO = """
title = "a layer that computes, and one with many weights"
sources = ["made for this test"]
trainable = false
input = [1000]
layers = [
  { type = "dense", name = "small", units = 10, bias = false },
  { type = "dense", name = "large", units = 100000, bias = false },
]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "two.toml"
    path.write_text(TWO)
    return path


def step(model, cluster, overlap="layer", compute=5e-3):
    return simulate(cluster, model, AllReduce(overlap=overlap), batch_size=8, steps=4, warmup=1,
                    compute=Measured(compute, 8), device="xeon-6148")  # fmt: skip


def parts(result, factor=1.0):
    """Return seconds: before the large layer's gradients leave, the backward pass beside them, and both all-reduces."""
    workload = result.workloads[0]
    forward = factor * float(workload.forward.sum() + workload.backward[1])
    reduce = [2 * (N - 1) / N * nbytes for nbytes in workload.grad_nbytes.tolist()]
    return forward, factor * float(workload.backward[0]), reduce


@pytest.mark.parametrize("cores", [1, 2, 7])
@pytest.mark.parametrize("compute", [1e-3, 5e-3, 50.0])
def test_with_endpoints_the_longer_one_counts(model, cores, compute):
    """max(t_c C / (C - c), t_a), t_a by min(B_nic, c b_ep), and 1/r for each message that is sent."""
    plain = load_cluster(star(N, bandwidth=BANDWIDTH, latency=0.0))
    result = step(model, Endpoints(cores, 8, "0.4 GB/s", 1e5).on(plain), compute=compute)
    before, beside, reduce = parts(step(model, plain, compute=compute), 8 / (8 - cores))
    large, small = (2 * (N - 1) * 1e-5 + nbytes / min(BANDWIDTH, cores * 0.4e9) for nbytes in reversed(reduce))
    assert result.step_time == pytest.approx(before + max(beside, large) + small, rel=1e-9)


def test_without_endpoints_messages_wait_for_the_end_of_computing(model):
    """t_c + t_a."""
    cluster = star(N, bandwidth=BANDWIDTH, latency=0.0)
    result = step(model, cluster, WhileWaiting())
    before, beside, reduce = parts(result)
    assert result.step_time == pytest.approx(before + beside + sum(reduce) / BANDWIDTH, rel=1e-9)
    assert step(model, cluster, "while-waiting").step_time == result.step_time


@pytest.mark.parametrize(
    "strategy", [AllReduce, ShardedUpdate, partial(ParameterServer, servers=16, placement="colocated")]
)
def test_any_strategy_with_an_overlap_can_wait(strategy):
    waits, beside = (
        simulate("aws-10g-16", "vgg-a", strategy(overlap=overlap), batch_size=16, steps=3)
        for overlap in (WhileWaiting(), "layer")
    )
    assert waits.step_time > 1.05 * beside.step_time
    assert waits.nbytes_per_step == pytest.approx(beside.nbytes_per_step, rel=1e-9)


def test_a_hybrid_that_waits_sends_nothing_while_it_computes():
    result = simulate("aws-10g-16", "vgg-a", Hybrid(overlap=WhileWaiting()), batch_size=256, steps=2)
    plan = result.plan
    plan.check()
    run = plan.execute(result.cluster)
    work = plan.rows(*range(4))
    start, end = run.start[plan.collectives], run.end[plan.collectives]
    for row in work[(plan.rank[work] == 0) & (plan.seconds[work] > 0.0)].tolist():
        assert not ((start < run.end[row] - 1e-12) & (end > run.start[row] + 1e-12)).any()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Endpoints(8, 8), "cores = 8: must leave some of the 8 cores for computation; use at most 7"),
        (lambda: Endpoints(1, 1), "total_cores = 1: leaves no core for computation; use at least 2"),
        (lambda: Endpoints(0, 8), "cores = 0: must be a positive integer"),
        (lambda: Endpoints(2, 32).on("dgx1-v100"), "workers of .* are GPUs, whose cores do not drive communication"),
        (lambda: WhileWaiting("horovod"), "overlap = 'horovod': must be"),
        (lambda: Hybrid(overlap="priority"), "'priority': must be 'none', .* WhileWaiting"),
        (lambda: simulate("aws-10g-16", "vgg-a", Hybrid(Distribution(4, 8)), batch_size=256),
         r"data 4 x model 8 = 32: must equal the number of workers, 16; use data=\d+, model=\d+ or data=\d+, model="),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_distribution_is_the_same_groups_for_all_layers():
    said = Hybrid(Distribution(data=4, model=4))
    result = simulate("aws-10g-16", "vgg-a", said, batch_size=256, steps=2)
    names = [layer.name for layer in load_model("vgg-a").layers if layer.n_params]
    same = simulate("aws-10g-16", "vgg-a", Hybrid(dict.fromkeys(names, 4)), batch_size=256, steps=2)
    np.testing.assert_array_equal(result.step_times, same.step_times)
    assert set(said.layout(result.workloads[0], 16).groups) == {4}


def test_files_say_it(tmp_path):
    path = tmp_path / "mlsl.toml"
    path.write_text("""
cluster = "aws-10g-16"
model = "vgg-a"
batch_size = 256
steps = 3
[strategy]
type = "hybrid"
groups = { type = "distribution", data = 4, model = 4 }
overlap = { type = "while-waiting", overlap = "ddp" }
""")
    loaded = load_experiment(path)
    assert loaded.strategy == Hybrid(Distribution(4, 4), overlap=WhileWaiting("ddp"))
    loaded.save(tmp_path / "again.toml")
    assert load_experiment(tmp_path / "again.toml") == loaded
