"""Training from the command line: the result, pictures, saving and continuing, and the bar."""

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.learning.monitor import Row
from ddlsim.report import progress

TRAINING = """
cluster = "office-1gbe"
model = "digits-cnn"
workers = 2
batch_size = 16

[training]
rate = 0.1
updates = 20
evaluate_every = 5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(TRAINING)
    return path


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["run", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_a_training_run_prints_what_it_learned_and_draws_it(file, tmp_path):
    text = run(file, "--plot-learning", tmp_path / "l.png").stdout
    assert re.search(r"learned +accuracy [\d.]+ %, loss [\d.]+ on held-out samples after 20 updates", text)
    assert (tmp_path / "l.png").read_bytes()[:4] == b"\x89PNG"


def test_json_includes_the_history(file):
    def no_constant(text):
        raise AssertionError(f"{text} is not JSON")

    data = json.loads(run(file, "--json").stdout, parse_constant=no_constant)
    assert [row["updates"] for row in data["history"]] == [0, 5, 10, 15, 20]
    assert data["history"][0]["train_loss"] is None
    assert data["experiment"]["training"]["updates"] == 20


def test_a_run_is_saved_and_continued(file, tmp_path):
    whole = json.loads(run(file, "--json").stdout)
    saved = tmp_path / "run.npz"
    file.write_text(TRAINING.replace("updates = 20", "updates = 12"))
    assert f"saved {saved}" in run(file, "--save", saved).stderr
    file.write_text(TRAINING)
    again = json.loads(run(file, "--resume", saved, "--save", saved, "--json").stdout)
    assert again["history"] == whole["history"]
    assert again["simulated_time"] == whole["simulated_time"]
    assert run(file, "--resume", saved).stdout == run(file).stdout
    error = run(file, "--resume", saved, "--seed", "1", code=1).exception
    assert "seed: the run was saved with 0, but the resumed run has 1" in str(error)


@pytest.mark.parametrize("option", ["--plot-learning", "--save", "--resume"])
def test_options_of_training_need_training(option):
    error = run("office-1gbe", "-m", "lenet5", option, "x.npz", code=1).exception
    assert f"{option} has no effect without training" in str(error)


def test_the_number_of_steps_has_no_effect_on_training(file):
    error = run(file, "--steps", "3", code=1).exception
    assert "--steps has no effect on a training run; set epochs or updates" in str(error)


def test_a_job_without_an_experiment_is_no_background_traffic(tmp_path):
    path = tmp_path / "jobs.toml"
    for table, message in (
        ('jobs = [{ model = "lenet5" }]', "jobs[0]: unknown key 'model'; known: endless, experiment, name"),
        ('background = [{ rate = "1 Gbit/s" }]', "background[0]: key 'source' is missing"),
    ):
        path.write_text(f'cluster = "office-1gbe"\narrivals = "a.csv"\n{table}\n')
        assert message in str(run(path, code=1).exception)


def test_options_that_jobs_do_not_take(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text('cluster = "office-1gbe"\njobs = [{ experiment = { model = "lenet5", workers = 2, steps = 1 } }]\n')
    for option, remedy in (
        (["--trace-whole"], "leave --trace-whole out"),
        (["--steps", "3"], "set it in the experiment"),
    ):
        error = run(path, *option, code=1).exception
        assert f"{option[0]} has no effect on {path}, which describes several jobs; {remedy}" in str(error)


@pytest.mark.parametrize(("options", "words"), [
    (["-s", "softsync"], "--strategy softsync requires n; write --strategy softsync+n=..., or in an experiment file"),
    (["-s", "gossip-sgd", "--servers", "2"], "--servers has no effect with --strategy gossip-sgd; valid options: none"),
    (["-s", "local-sdg"], "did you mean 'local-sgd'?"),
])  # fmt: skip
def test_strategies_are_those_of_files(options, words):
    assert words in str(run("office-1gbe", "-m", "lenet5", *options, code=1).exception)


def test_a_strategy_with_defaults_runs():
    assert "local" in run("office-1gbe", "-m", "lenet5", "-n", "2", "--steps", "4", "-s", "local-sgd").stdout


# ---------------------------------------------------------------- the bar

ROW = Row(1.0, 10, 100, 0.5, 0.1, 0.4, 0.7, 0.912, 1e6, float("nan"), float("nan"))


@pytest.mark.parametrize(("ends", "max_time", "share"), [
    ({"updates": 40}, float("inf"), 0.25), ({"epochs": 1.0}, float("inf"), 0.5),
    ({"epochs": 1.0, "updates": 40}, float("inf"), 0.5), ({"target_accuracy": 0.9}, 5.0, 0.2),
    ({"target_accuracy": 0.9}, float("inf"), None), ({"updates": 5}, float("inf"), 1.0),
])  # fmt: skip
def test_the_bar_knows_how_much_is_done(ends, max_time, share):
    assert progress.share_done(ddlsim.Training(**ends), max_time, 1.0, 10, 0.5) == share


def shown(monkeypatch, *, terminal):
    """What the bar writes about a run of 40 updates that takes longer than the bar waits."""
    written = io.StringIO()

    def console(**options):
        return Console(file=written, force_terminal=terminal, width=120, **options | {"stderr": False})

    for name in ("DELAY", "INTERVAL", "LINES"):
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(progress, "Console", console)
    with progress.bar(ddlsim.Training(updates=40), float("inf")) as report:
        report(0.25, 10, 0.5, ROW)
    return written.getvalue()


def test_the_bar_shows_time_updates_epoch_and_accuracy(monkeypatch):
    text = shown(monkeypatch, terminal=True)
    assert "25%" in text
    assert "250 ms, 10 updates, epoch 0.50, accuracy 91.2 %, loss 0.7" in text


def test_without_a_terminal_there_are_lines(monkeypatch):
    assert shown(monkeypatch, terminal=False) == ("25.0 %: 250 ms, 10 updates, epoch 0.50, accuracy 91.2 %, loss 0.7\n")


def test_short_runs_and_runs_about_time_show_nothing(capsys):
    training = ddlsim.Training(updates=3)
    ddlsim.simulate("office-1gbe", "digits-cnn", workers=2, training=training, progress=True)
    ddlsim.simulate("office-1gbe", "lenet5", workers=2, steps=2, progress=True)
    assert capsys.readouterr().err == ""


def test_progress_may_be_a_function():
    seen = []
    training = ddlsim.Training(updates=6, evaluate_every=3)
    ddlsim.simulate("office-1gbe", "digits-cnn", workers=2, training=training, progress=lambda *all: seen.append(all))
    assert [n_updates for _, n_updates, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert [row.updates for *_, row in seen] == [0, 0, 3, 3, 3, 6]
