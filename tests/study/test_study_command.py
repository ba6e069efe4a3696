"""`ddlsim sweep`: what it prints, writes and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.report.progress import study_bar, study_status
from ddlsim.study import Count, load_table

STUDY = """
seeds = 2
[base]
cluster = "office-1gbe"
model = "lenet5"
steps = 2
[base.jitter]
type = "lognormal"
cv = 0.1
[vary]
workers = [2, 4, 400]
strategy = [{ type = "all-reduce" }, { type = "parameter-server", servers = 2 }]
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    return path


def sweep(*arguments):
    return CliRunner().invoke(cli.app, ["sweep", *map(str, arguments)], catch_exceptions=False)


def test_a_sweep_prints_a_table_and_writes_all_points(tmp_path, study):
    store, table, plot = (tmp_path / name for name in ("study.sqlite", "points.csv", "scaling.png"))
    result = sweep(study, "--out", store, "--jobs", "1", "--table", table, "--plot", plot)
    assert result.exit_code == 0
    assert "8 done, 4 skipped of 12 points" in result.stdout
    assert "skipped 4: workers = 400: cluster 'office-1gbe' has" in result.stdout
    read = pd.read_csv(table)
    assert read["status"].tolist() == ["done"] * 8 + ["skipped"] * 4
    assert read["throughput"][:8].tolist() == pytest.approx(load_table(store).frame["throughput"][:8].tolist())
    assert plot.stat().st_size > 5000
    rows = json.loads(sweep(study, "--out", store, "--json").stdout)
    assert rows[0]["workers"] == 2
    frame = load_table(store).frame  # all digits, of small numbers too
    assert [row["energy_per_sample"] for row in rows[:8]] == frame["energy_per_sample"].tolist()[:8]
    assert rows[-1]["throughput"] is None


def test_a_sweep_without_any_result_fails(study):
    study.write_text(STUDY.replace("2, 4, 400", "400, 500"))
    with pytest.raises(ddlsim.ConfigError, match="no configuration could be simulated"):
        sweep(study, "--jobs", "1")


def test_a_report_tells_that_the_file_contains_other_studies(tmp_path, study):
    store = tmp_path / "study.sqlite"
    for workers in ("[2]", "[4]"):
        study.write_text(STUDY.replace("[2, 4, 400]", workers).replace("cv = 0.1", f"cv = 0.{workers[1]}"))
        sweep(study, "--out", store, "--jobs", "1", "--add")
        result = CliRunner().invoke(cli.app, ["report", str(store)], catch_exceptions=False)
        assert ("contains 2 studies; the report shows the one that ran last" in result.stderr) == (workers == "[4]")


def test_efficiencies_above_100_percent_are_explained(study):
    study.write_text(STUDY.replace("2, 4, 400", "1").replace(', { type = "parameter-server", servers = 2 }', ""))
    text = sweep(study, "--jobs", "1").stdout
    assert text.startswith("workers ")
    note = (
        "efficiency above 100 %: step times are a random sample, and the baseline is their mean; simulate more steps\n"
    )
    assert (note in text) == (float(text.splitlines()[1].split()[4]) > 100.0)
    assert note in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "points.xlsx"], "cannot write '.xlsx' files"),
        (["--add"], "--add has no effect without --out"),
        (["--jobs", "0"], "jobs = 0: must be a positive integer"),
        (["--out", "nowhere/study.sqlite"], "the folder 'nowhere' does not exist"),
        (["--dask", "tcp://127.0.0.1:9", "--jobs", "2"], "--jobs has no effect with --dask"),
    ],
    ids=["format", "add", "jobs", "folder", "both"],
)
def test_options_that_cannot_be_used(study, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ddlsim.ConfigError) as error:
        sweep(study, *arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.posix
def test_ctrl_c_ends_a_sweep_that_goes_on_later(tmp_path, study):
    """The workers leave the signal to the command, which prints what it has and ends with 130."""
    study.write_text(STUDY.replace("seeds = 2", "seeds = 400").replace("steps = 2", "steps = 400"))
    store = tmp_path / "study.sqlite"
    start = [sys.executable, "-c", "from ddlsim.cli import main; main()"]
    command = [*start, "sweep", str(study), "--out", str(store), "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **options) as process:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not (store.exists() and n_done(store)):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: run the study again to continue" in out
    assert "Traceback" not in err
    assert 0 < load_table(store).counts["done"] < 1600


def n_done(store):
    try:
        return load_table(store).counts["done"]
    except ddlsim.ConfigError:  # it is just being made
        return 0


def test_lines_tell_how_far_a_study_is(capsys, monkeypatch):
    """Where there is no terminal, a line now and then."""
    monkeypatch.setattr("ddlsim.report.progress.LINES", 0.0)
    with study_bar() as report:
        report(Count(12, 5, 1, 2))
    assert capsys.readouterr().err == "8 of 12 points (1 skipped, 2 failed)\n"
    assert study_status(Count(12, 5, 0, 0)) == "5 of 12 points"
