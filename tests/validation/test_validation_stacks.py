"""A software stack fitted to runs: known numbers come back, files hold it, larger runs have intervals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from page_files import GPU_RUNS
from typer.testing import CliRunner

import ddlsim
from ddlsim import ConfigError, load_stack, simulate
from ddlsim.cli import app
from ddlsim.validation import MeasuredRun, calibrate_stack, read_runs
from ddlsim.validation.stack_fit import experiment_of

CLUSTER = "roce-h100+n_hosts=1"
TRUTH = replace(load_stack("fsdp-eager"), gemm=0.7, elementwise=2.0)


def run_of(model: str, micro: int, factor: float = 1.0, workers: int = 8) -> MeasuredRun:
    """Return a run as it would be measured under the true stack, `factor` times as fast."""
    run = MeasuredRun(
        workers=workers, batch_size=2 * workers * micro, throughput=1.0, shared_batch=True, model=f"{model}+layers=2",
        cluster=f"roce-h100+n_hosts={workers // 8}", strategy=f"fsdp+micro_batch={micro}",
    )  # fmt: skip
    return replace(run, throughput=factor * simulate(experiment_of(run, TRUTH)).throughput)


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
    assert "fitted to 4 runs" in fit.stack.title


def test_one_run_gives_one_number_and_a_wide_interval() -> None:
    fit = calibrate_stack([run_of("llama-3-8b", 2, factor=1.05)], "fsdp-eager")
    assert fit.fit.names == ("gemm",)
    assert fit.stack.elementwise == load_stack("fsdp-eager").elementwise
    assert fit.predicted[0] == pytest.approx(fit.runs[0].throughput, rel=0.01)
    assert fit.stack.spread[1] > 1.1
    assert "elementwise as in fsdp-eager" in str(fit)


def test_larger_runs_have_an_interval(tmp_path: Path) -> None:
    fit = calibrate_stack([run_of("llama-3-8b", micro, factor) for micro, factor in ((1, 1.02), (2, 0.98))], TRUTH)
    fit.stack.save(tmp_path / "my-stack.toml")
    assert load_stack(tmp_path / "my-stack.toml") == fit.stack
    larger = run_of("llama-3-8b", 2, workers=32)
    result = simulate(experiment_of(larger, load_stack(str(tmp_path / "my-stack.toml"))))
    assert result.fitted_stack
    interval = result.interval().throughput
    assert larger.throughput in interval
    assert any("extrapolated: 32 workers, measured 8" in note for note in interval.notes)
    high = fit.stack.spread[1]
    slowest = simulate(result.experiment.with_(speed=[1.0 / high] * 32)).throughput
    assert interval.low < slowest < result.throughput < interval.high
    assert "by the fit of the stack and errors of similar predictions" in str(result)
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
        ({"cluster": None}, "column cluster: is missing"),
        ({"model": None}, "column model: is missing"),
        ({"model": "resnet50"}, "this does not depend on a stack; leave the run out"),
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
        (["more.csv"], "reads one CSV file of runs, not 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    with pytest.raises(ConfigError, match="name the cluster that was measured, --cluster, or --stack"):
        CliRunner().invoke(app, words[:2], catch_exceptions=False)
