"""Tables dealt out over workers: times, memory, values, and what is said where something does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from draws import rows
from strategy_plans import plan_of

import ddlsim
from ddlsim import AllReduce, ConfigError, EmbeddingParallel, Experiment, HostMemory, Training
from ddlsim.cluster import star
from ddlsim.optim import Adam, Momentum
from ddlsim.run.files import load_experiment
from ddlsim.workload.stage import Stage

BIG = """
title = "four tables, the first of 51 GB"
sources = ["made for this test"]
trainable = false
input = [13]
layers = [
  { type = "concat", branches = [
    [{ type = "dense", units = 128 }],
    [{ type = "embedding_bag", dim = 128, tables = [100000000, 1000000, 100000, 1000] }],
  ] },
  { type = "interaction", dim = 128 },
  { type = "dense", units = 1 },
]
"""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.toml"
    path.write_text(BIG)
    return path


def learned(strategy: object, workers: int, **training: object) -> ddlsim.Result:
    more = {"optimizer": Momentum(0.9), "rate": 0.05, "updates": 20, "evaluate_every": 10, "sharding": "shared"}
    more |= training
    return ddlsim.simulate("office-1gbe", "clicks-dlrm", strategy, workers=workers, batch_size=96,
                           training=Training("clicks", **more))  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "workers"),
    rows([
        (EmbeddingParallel(), 4), (EmbeddingParallel("row-wise"), 3), (EmbeddingParallel("column-wise"), 2),
        (EmbeddingParallel(bottom_mlp="one rank", indices="local"), 6), (EmbeddingParallel(data_parallel="1 kB"), 4),
    ], 2),
)  # fmt: skip
def test_the_weights_are_those_of_one_worker_with_the_whole_batch(strategy: EmbeddingParallel, workers: int):
    alone = learned(AllReduce(), 1)
    result = learned(strategy, workers)
    np.testing.assert_allclose(result.params, alone.params, rtol=0, atol=2e-6)
    assert np.abs(alone.params - result.monitor.learner.initial.read()).max() > 0.05


@pytest.mark.slow
def test_it_learns_what_is_clicked():
    result = learned(EmbeddingParallel(), 4, optimizer=Adam(), rate=0.01, updates=250)
    assert result.accuracy > 0.76  # half are clicks


@pytest.mark.parametrize("sharding", ["table-wise", "row-wise", "column-wise"])
def test_a_run_and_its_plan_tell_the_same(sharding: str):
    result = ddlsim.simulate("dgx1-v100", "dlrm", EmbeddingParallel(sharding), batch_size=8192, steps=3, warmup=0)
    result.plan.check()
    execution = plan_of(result.experiment.strategy, result.workloads, 5).execute(result.cluster)
    np.testing.assert_allclose(result.step_times, np.diff(execution.step_ends.max(axis=0), prepend=0.0)[:3], rtol=1e-12)
    assert result.warnings == ()


def test_bytes_on_the_network_are_those_of_the_formulas():
    """4 workers with 24 of 26 tables on three of them, 7 + 7 + 6 + 6: all together send (N - 1) b T (k 8 + 2 D z), and
    the ring 2 (N - 1) times the gradients."""
    n, batch = 4, 4096
    run = ddlsim.simulate("office-1gbe", "dlrm", EmbeddingParallel(), workers=n, batch_size=batch, steps=4, warmup=0)
    each = (n - 1) * batch / n * 26 * (8 + 2 * 16 * 4) + 2 * (n - 1) * run.workloads[0].gradient_nbytes
    # what is sent of the next step when the last one ends is little
    assert run.nbytes_sent == pytest.approx(4 * each, rel=0.05)
    later = ddlsim.simulate("office-1gbe", "dlrm", EmbeddingParallel(), workers=n, batch_size=batch, steps=8, warmup=0)
    assert later.nbytes_sent - run.nbytes_sent == pytest.approx(4 * each, rel=1e-9)


def test_the_exchange_is_left_out_elsewhere_only():
    assert "is not simulated" in ddlsim.simulate("dgx1-v100", "dlrm", AllReduce(), steps=1).warnings[0]
    together = ddlsim.simulate("dgx1-v100", "dlrm", EmbeddingParallel(), batch_size=1024, steps=1)
    assert together.warnings == ()
    assert together.samples_per_update == 1024


def test_memory_counts_tables_where_they_live():
    strategy = EmbeddingParallel(table_optimizer="sgd")
    result = ddlsim.simulate("dgx1-v100", "dlrm", strategy, batch_size=8, steps=1, warmup=0)
    stages = [strategy.stage(result.workloads[0], rank, 8) for rank in range(8)]
    assert all(isinstance(stage, Stage) for stage in stages)
    weights = np.array([stage.memory.weights for stage in stages])
    model = result.workloads[0].model
    tables = sum(layer.n_params for layer in model.layers if layer.model_parallel)
    assert weights.sum() == 4 * tables + 8 * 4 * (model.n_params - tables)
    assert weights.max() == pytest.approx(4 * 16 * (10131227 + 14992 + 583), rel=0.01)
    assert "memory: " in result.notes[0]
    adagrad = EmbeddingParallel().stage(result.workloads[0], 0, 8).memory
    rows = sum(shard.rows for shard in EmbeddingParallel().placement(result.workloads[0], 8).of(0))
    assert adagrad.optimizer - stages[0].memory.optimizer == pytest.approx(4 * rows)


def test_what_does_not_fit_is_said_with_what_does(big: Path):
    with pytest.raises(ConfigError) as error:
        ddlsim.simulate("dgx1-v100", big, EmbeddingParallel(), batch_size=8192)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("EmbeddingParallel('table-wise'): the tables of big do not fit on 8 workers: ")
    assert "no room for 51.6 GB of table 0 (100," in text
    assert "each worker has 17.1" in text
    for fits in ("'row-wise' fits", "'column-wise' fits", "host=HostMemory('64 GB') fits"):
        assert fits in text
    for strategy in (
        EmbeddingParallel("row-wise"), EmbeddingParallel("column-wise"), EmbeddingParallel(host=HostMemory("64 GB")),
    ):  # fmt: skip
        assert ddlsim.simulate("dgx1-v100", big, strategy, batch_size=8192, steps=2).throughput > 0


def test_what_lies_on_the_host_is_slow(big: Path):
    fast, slow = (
        ddlsim.simulate(
            "dgx1-v100", big, EmbeddingParallel(host=HostMemory("64 GB", hit_rate=rate)), batch_size=8192, steps=2
        )
        for rate in (1.0, 0.5)
    )
    assert fast.throughput > slow.throughput
    assert "1 table shards are in host memory" in fast.notes[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"batch_size": 1001},
            "batch_size = 1001: must be a multiple of 8 .8 workers. with EmbeddingParallel; use 1000 or 1008",
        ),
        ({"batch_size": 1}, "use 8"),
        (
            {"accumulation": 2},
            "accumulation = 2: has no effect with EmbeddingParallel, whose batch_size is already the global",
        ),
        ({"model": "resnet50"}, "model 'resnet50' has no embedding_bag layers; use AllReduce"),
        ({"compression": ddlsim.FP16()}, "compression has no effect"),
    ],
)
def test_what_it_cannot_do_is_said(arguments: dict[str, object], text: str):
    fields = {"cluster": "dgx1-v100", "model": "dlrm", "strategy": EmbeddingParallel(), "batch_size": 1024} | arguments
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        ddlsim.simulate(**fields)


def test_what_a_table_knows_nothing_of_is_said():
    with pytest.raises(ConfigError, match="overlap = 'horovod': must be 'none'"):
        EmbeddingParallel(overlap="horovod")


def test_files_say_it_too(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        'cluster = "dgx1-v100"\nmodel = "dlrm"\nbatch_size = 1024\n[strategy]\ntype = "embedding-parallel"\n'
        'sharding = "column-wise"\n[strategy.host]\ncapacity = "64 GB"\n'
    )
    experiment = load_experiment(path)
    assert experiment.strategy == EmbeddingParallel("column-wise", host=HostMemory("64 GB"))


def test_slow_workers_and_jitter_hold_up_all():
    def seconds(**more: object) -> float:
        experiment = Experiment("dgx1-v100", "dlrm", EmbeddingParallel(), batch_size=8192, steps=6, **more)
        return float(ddlsim.run.run(experiment).step_time)

    assert seconds(speed=[1.0] * 7 + [0.25]) > seconds()
    assert seconds(jitter=ddlsim.Lognormal(0.3)) > seconds()


def test_indices_are_prefetched_while_others_are_two_steps_behind() -> None:
    """A rank awaits indices three steps after one that another rank is still in: four steps are in flight."""
    strategy = ddlsim.EmbeddingParallel(
        data_parallel="10 kB", indices="prefetched", bottom_mlp="one rank", overlap="layer", algorithm="ring"
    )
    times = [
        ddlsim.simulate(
            star(2, bandwidth="10 Gbit/s", latency="5 us"), "dlrm", dataclasses.replace(strategy, indices=indices), 48,
            steps=4, warmup=0, compute=ddlsim.Affine(0.02, 0.02 / 6),
        ).step_time
        for indices in ("prefetched", "exchanged")
    ]  # fmt: skip
    assert times[0] <= times[1]
