"""A software stack fitted to runs: known numbers come back, files hold it, larger runs have intervals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draws import few
from page_files import GPU_RUNS
from typer.testing import CliRunner

import ddlsim
from ddlsim import Affine, ConfigError, Stack, collective_time, load_stack, simulate
from ddlsim.cli import app
from ddlsim.measure import Measurement
from ddlsim.run.simulate import plan_of_run
from ddlsim.validation import MeasuredRun, calibrate_stack, read_runs
from ddlsim.validation.calibration import BAD_FIT
from ddlsim.validation.log_fit import LogFit, robust_cost, spread_of
from ddlsim.validation.stack_fit import _half_width, experiment_of

CLUSTER = "roce-h100+n_hosts=1"
TRUTH = replace(load_stack("fsdp-eager"), gemm=0.7, elementwise=2.0)


def run_of(model: str, micro: int, factor: float = 1.0, workers: int = 8, truth: Stack = TRUTH) -> MeasuredRun:
    """Return a run as it would be measured under the `truth`, `factor` times as fast."""
    run = MeasuredRun(
        workers=workers, batch_size=2 * workers * micro, throughput=1.0, shared_batch=True, model=f"{model}+layers=2",
        cluster=f"roce-h100+n_hosts={workers // 8}", strategy=f"fsdp+micro_batch={micro}",
    )  # fmt: skip
    return replace(run, throughput=factor * simulate(experiment_of(run, truth)).throughput)


@pytest.mark.slow
def test_known_numbers_come_back() -> None:
    """Wide and narrow models, and those with large and small batches, tell products from element-wise kernels."""
    runs = [run_of("llama-3-70b", 1), run_of("llama-3-8b", 1), run_of("gpt2", 16), run_of("gpt2-medium", 4)]
    fit = calibrate_stack(runs, "fsdp-eager")
    assert set(fit.fit.names) == {"gemm", "elementwise"}
    assert fit.stack.gemm == pytest.approx(0.7, rel=0.02)  # priors pull a little
    low, high = fit.fit.interval("elementwise")
    assert low < 2.0 < fit.stack.elementwise < 2.6 < high
    assert fit.error < 0.01
    low, high = fit.stack.spread
    assert 0.9 < low < 1.0 < high < 1.1
    assert fit.stack.workers == (8, 8)
    assert fit.stack.fitted_devices == ("h100",)
    assert "fitted to 4 runs" in fit.stack.title


def test_one_run_gives_one_number_and_a_wide_interval() -> None:
    fit = calibrate_stack([run_of("llama-3-8b", 2, factor=1.05)], "fsdp-eager")
    assert fit.fit.names == ("gemm",)
    assert fit.stack.elementwise == load_stack("fsdp-eager").elementwise
    assert fit.predicted[0] == pytest.approx(fit.runs[0].throughput, rel=0.01)
    assert fit.stack.spread[1] > 1.1
    assert "elementwise as in fsdp-eager" in str(fit)


def test_the_throughput_of_one_of_the_workers_is_noticed() -> None:
    fit = calibrate_stack([run_of("llama-3-8b", 2, factor=1 / 8)], "fsdp-eager")
    assert str(fit).startswith("warning: gemm is 0.")
    assert "is the throughput that of all workers together" in str(fit)


def test_runs_that_do_not_fit_in_memory_are_named() -> None:
    fits, large = run_of("llama-3-8b", 1), run_of("llama-3-8b", 128)
    fit = calibrate_stack([fits, replace(large, place="runs.csv:3")], "fsdp-eager")
    (warning,) = fit.warnings
    assert re.match(r"runs.csv:3: llama-3-8b.* needs about .* GB, but h100", warning)
    assert f"warning: {warning}" in str(fit).splitlines()
    assert fit.to_dict()["warnings"] == [warning]
    assert calibrate_stack([fits], "fsdp-eager").warnings == ()


@pytest.mark.slow
def test_larger_runs_have_an_interval(tmp_path: Path) -> None:
    fit = calibrate_stack([run_of("llama-3-8b", micro, factor) for micro, factor in ((1, 1.02), (2, 0.98))], TRUTH)
    fit.stack.save(tmp_path / "my-stack.toml")
    assert load_stack(tmp_path / "my-stack.toml") == fit.stack
    larger = run_of("llama-3-8b", 2, workers=32)
    result = simulate(experiment_of(larger, load_stack(str(tmp_path / "my-stack.toml"))))
    assert result.fitted_stack
    interval = result.interval().throughput
    assert larger.throughput in interval
    assert any("extrapolated: 32 workers (measured: 8)" in note for note in interval.notes)
    high = fit.stack.spread[1]
    slowest = simulate(result.experiment.with_(speed=[1.0 / high] * 32)).throughput
    assert interval.low < slowest < result.throughput < interval.high
    assert "from the fit of the stack and errors of similar predictions" in str(result)
    bundled = simulate(experiment_of(larger, TRUTH))
    assert not bundled.fitted_stack
    assert bundled.quick_interval is None
    (tmp_path / "wrong.toml").write_text('title = "x"\nrelease = "1"\nsources = []\ngem = 0.5\n')
    with pytest.raises(ConfigError, match="unknown key 'gem'"):
        load_stack(tmp_path / "wrong.toml")


def test_experiment_files_name_a_stack_beside_them(tmp_path: Path) -> None:
    replace(TRUTH, spread=(0.9, 1.1), workers=(8, 8)).save(tmp_path / "my-stack.toml")
    text = (
        'cluster = "dgx-h100-pod"\nmodel = "gpt2"\nworkers = 8\nstrategy = { type = "fsdp" }\nstack = "my-stack.toml"\n'
    )
    (tmp_path / "run.toml").write_text(text)
    experiment = ddlsim.load_experiment(tmp_path / "run.toml")
    assert load_stack(experiment.stack).gemm == 0.7  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": None}, "runs: column cluster is missing"),
        ({"model": None}, "column model is missing; add it"),
        ({"model": "resnet50"}, "this time does not depend on the stack; leave the run out"),
        ({"strategy": "fsdp+micro=2"}, "unknown key 'micro'"),
    ],
)
def test_runs_that_tell_nothing_are_refused(change: dict[str, str | None], message: str) -> None:
    run = MeasuredRun(workers=8, batch_size=8, throughput=8.0, model="gpt2", cluster=CLUSTER, shared_batch=True)
    with pytest.raises(ConfigError, match=message):
        calibrate_stack([replace(run, **change)], "fsdp-eager")  # type: ignore[arg-type]


def test_tokens_of_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(GPU_RUNS)
    runs = read_runs(path)
    assert [run.shared_batch for run in runs] == [True] * 3
    assert runs[0].throughput == pytest.approx(38337 / 2048)
    assert runs[0].step_time == pytest.approx(16 * 2048 / 38337)
    path.write_text("workers,batch_size,tokens_per_s\n8,8,100\n")
    with pytest.raises(ConfigError, match="column 'model' is missing"):
        read_runs(path)


@pytest.mark.slow  # a whole program, which fits a stack
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(GPU_RUNS)
    words = ["calibrate", str(tmp_path / "runs.csv"), "--stack", "fsdp-eager"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "my.toml"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output[: done.output.rindex("}") + 1])
    assert len(found["runs"]) == 3
    assert load_stack(tmp_path / "my.toml").gemm == pytest.approx(found["gemm"]["value"], abs=1e-4)
    for more, message in (
        (["--backend", "nccl"], "--backend has no effect with --stack"),
        (["more.csv"], "more.csv: no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    with pytest.raises(ConfigError, match="set --cluster to the measured cluster, or --stack"):
        CliRunner().invoke(app, words[:2], catch_exceptions=False)


@pytest.mark.slow
def test_a_fixed_time_per_update_comes_back() -> None:
    """Two batch sizes tell it from the device's rate; with one, the fit says what would."""
    truth = replace(TRUTH, elementwise=load_stack("fsdp-eager").elementwise, step_time=0.05)
    runs = [run_of("llama-3-8b", micro, truth=truth) for micro in (1, 4)]
    fit = calibrate_stack(runs, "fsdp-eager")
    assert fit.fit.names == ("gemm", "step_time")
    assert fit.stack.gemm == pytest.approx(0.7, rel=0.02)
    assert fit.stack.step_time == pytest.approx(0.05, rel=0.05)
    assert "step_time 5" in str(fit)
    one = calibrate_stack(runs[:1], "fsdp-eager")
    assert "step_time as in fsdp-eager: a run with another batch size" in str(one)


def conv_run(workers: int, batch: int, stack: Stack) -> MeasuredRun:
    """Return a run of ResNet-50, whose compute time no stack says."""
    result = simulate(
        "dgx1-v100", "resnet50", batch_size=batch, workers=workers, compute=Affine("10 ms", "1.1 ms"), stack=stack,
        precision="fp16",
    )  # fmt: skip
    return MeasuredRun(
        workers=workers, batch_size=batch, throughput=result.throughput, precision="fp16", model="resnet50",
        cluster="dgx1-v100",
    )  # fmt: skip


def test_runs_of_one_worker_give_the_compute_time_of_other_models() -> None:
    truth = replace(load_stack("pytorch"), step_time=0.01)
    runs = [conv_run(workers, batch, truth) for workers in (1, 8) for batch in (32, 128)]
    fit = calibrate_stack(runs, "pytorch")
    assert fit.fit.names == ("step_time",)
    assert fit.stack.step_time == pytest.approx(0.01, rel=0.05)
    assert [run.workers for run in fit.runs] == [8, 8]
    assert "gemm as in pytorch" in str(fit)
    with pytest.raises(ConfigError, match="add single-worker runs"):
        calibrate_stack(runs[2:], "pytorch")
    assert "compute time without communication from 2 single-worker runs" in str(fit)
    assert len(fit.to_dict()["single_worker_runs"]) == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add runs with several workers"):
        calibrate_stack(runs[:2], "pytorch")
    slow = replace(runs[2], throughput=0.1 * runs[2].throughput)
    poor = calibrate_stack([*runs[:2], slow, runs[3]], "pytorch")
    assert str(poor).startswith("warning: poor fit: mean error ")
    assert "these runs hardly limit the time of a further run" in str(poor)
    assert "warning" not in str(fit)


def collective(nbytes: int, call: float = 22e-6) -> Measurement:
    seconds = call + collective_time(CLUSTER, "default", nbytes)
    return Measurement(
        experiment="collective", operation="all_reduce", n_ranks=8, n_hosts=1, nbytes=nbytes, median_s=seconds,
        backend="nccl",
    )  # fmt: skip


def test_sizes_of_a_collective_give_the_time_of_a_call() -> None:
    fit = calibrate_stack([collective(size) for size in (2**15, 2**18, 2**20, 2**28)], "torchtitan", CLUSTER)
    assert fit.stack.call_time == pytest.approx(22e-6, rel=0.02)
    assert fit.stack.spread == (1.0, 1.0)
    assert "call_time 22" in str(fit)
    one = calibrate_stack([collective(2**15)], "torchtitan", CLUSTER)
    assert str(one).endswith(
        "call_time as in torchtitan: a run with other buckets determines it, or collectives of two sizes"
    )
    with pytest.raises(ConfigError, match="the cluster on which the collectives were measured"):
        calibrate_stack([collective(2**15), collective(2**20)], "torchtitan")


def write_traces(folder: Path, run: MeasuredRun, sizes: tuple[int, ...], n_ranks: int = 8) -> list[str]:
    """Write what PyTorch's profiler would of a run, a file per rank: steps, and all-reduces that rank 0 joins last."""
    paths = []
    for rank in range(n_ranks):
        late, at, events = 50e-6 * rank, 0.0, []
        for number in range(3):
            events.append(
                {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 1, "tid": 1,
                 "ts": 1e6 * at, "dur": 1e6 * run.step_time}
            )  # fmt: skip
            at += run.step_time
        for number, nbytes in enumerate(sizes):
            events.append(
                {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "pid": 0, "tid": 20,
                 "ts": 1e4 * number, "dur": 1e6 * (late + collective(nbytes).median_s),
                 "args": {"Collective name": "allreduce", "In msg nelems": nbytes // 4, "Out msg nelems": nbytes // 4,
                          "Group size": n_ranks, "dtype": "Float"}}
            )  # fmt: skip
        info = {"backend": "nccl", "rank": rank, "world_size": n_ranks}
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
        paths.append(str(path))
    return paths


@pytest.mark.slow
def test_traces_of_a_run_predict_a_larger_one(tmp_path: Path) -> None:
    """A stack's numbers come back from traces that a simulated run wrote; 64 workers lie in the interval."""
    truth = replace(TRUTH, elementwise=load_stack("fsdp-eager").elementwise, call_time=22e-6)
    run = run_of("llama-3-8b", 2, truth=truth)
    paths = write_traces(tmp_path, run, (2**15, 2**18, 2**20))
    words = ["calibrate", *paths, "--stack", "fsdp-eager", "-c", CLUSTER, "-m", "llama-3-8b+layers=2"]
    words += ["-s", "fsdp+micro_batch=2", "--batch", "32", "-o", str(tmp_path / "my.toml")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    stack = load_stack(tmp_path / "my.toml")
    assert stack.gemm == pytest.approx(0.7, rel=0.03)
    assert stack.call_time == pytest.approx(22e-6, rel=0.1)
    larger = run_of("llama-3-8b", 2, workers=64, truth=truth)
    assert larger.throughput in simulate(experiment_of(larger, stack)).interval().throughput
    one = calibrate_stack(
        paths[:1], "fsdp-eager", CLUSTER, "llama-3-8b+layers=2", strategy="fsdp+micro_batch=2", batch_size=32
    )
    assert one.calls is None  # waiting for other ranks
    assert one.stack.gemm == pytest.approx(stack.gemm, rel=0.03)
    with pytest.raises(ConfigError, match="but no trace was given"):
        calibrate_stack([run], "fsdp-eager", batch_size=32)
    with pytest.raises(ConfigError, match=r"rank0\.json: contains no batch size"):
        calibrate_stack(paths, "fsdp-eager", CLUSTER, "llama-3-8b+layers=2")


def test_a_chakra_trace_gives_the_seconds_of_its_work(tmp_path: Path) -> None:
    """The work of the trace counts, and its exchanges as the cluster carries them."""
    run = run_of("llama-3-8b", 2)
    plan = plan_of_run(experiment_of(run, TRUTH), 1)
    plan.to_chakra(tmp_path / "step.et")
    found = calibrate_stack(
        tmp_path / "step.0.et", "fsdp-eager", CLUSTER, "llama-3-8b+layers=2", strategy="fsdp+micro_batch=2",
        batch_size=32,
    )  # fmt: skip
    assert found.runs[0].workers == 8
    assert found.runs[0].throughput == pytest.approx(run.throughput, rel=0.1)
    assert found.stack.gemm == pytest.approx(0.7, rel=0.1)


def test_options_of_traces_need_a_stack(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", "x.json", "-c", CLUSTER, "--batch", "8"])
    assert done.exit_code == 1
    assert "--batch has no effect without --stack; leave --batch out" in str(done.exception)


@pytest.mark.parametrize("n", few([3, 4, 6, 10], 1))
def test_intervals_of_poor_fits_contain_a_further_run(n: int) -> None:
    """The scatter is 30 %, ten times the prior's; 95 % of further runs are within the interval of Student's t."""
    random, inside = np.random.default_rng(n), []
    for *runs, further in 0.3 * random.standard_normal((1000, n + 1)):
        errors = np.array(runs) - np.mean(runs)
        spread, dof = spread_of(2.0 * robust_cost(errors), n, 1)
        none = np.zeros(1)
        fit = LogFit(("gemm",), none, np.zeros((1, 1)), spread, dof, errors, none, (), ())
        if np.abs(errors).mean() > BAD_FIT:
            inside.append(abs(further - np.mean(runs)) <= _half_width(fit))
    assert np.mean(inside) > 0.94
