"""The workloads of benchmarks/workloads.py work, with few workers and steps; how fast they are is not tested."""

import functools
import importlib
import json
import math
from pathlib import Path

import pytest
from draws import slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def workloads():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        module = importlib.import_module("workloads")
        patch.setattr(module, "yardstick", functools.cache(module.yardstick))  # takes longer than a tiny workload
        yield module


#: what is measured besides seconds and yardsticks
QUANTITY = {"co-simulation": "relative", "timeline": "relative", "plan-memory": "mebibytes"}
SLOW = {"first-result", "gpt3-1024-fresh", "gpt3-1024-jitter", "megatron-1t-jitter", "fsdp-512-jitter", "splits"}
NAMES = {
    "ddp-ring-1024",
    "hierarchical-1024",
    "servers-256",
    "async-1024",
    "gossip-256",
    "long-128",
    "kernel-call",
    "gpt3-1024",
    "megatron-1t",
    "fsdp-256",
    "fsdp-512",
    "jobs",
    "rings",
    *QUANTITY,
    *SLOW,
}


def test_all_workloads_are_run_here(workloads):
    assert set(workloads.NAMES) == NAMES


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in sorted(NAMES)])
def test_a_workload_runs(workloads, name):
    measured = workloads.once(name, tiny=True)
    assert set(measured) == {"seconds", "yardsticks", *([QUANTITY[name]] if name in QUANTITY else [])}
    assert all(math.isfinite(value) and value > 0.0 for value in measured.values())


@pytest.mark.slow
def test_the_report_compares_with_another_checkout(workloads, tmp_path, capsys):
    path = tmp_path / "report.json"
    argv = ["--tiny", "--workload", "kernel-call", "--repeat", "1", "--against", str(ROOT), "--json", str(path)]
    status = workloads.main(argv)
    report = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == report
    (row,) = report["workloads"]
    assert row["workload"] == "kernel-call"
    assert len(row["runs"]) == 1
    assert row["ratio"] == row["seconds"] / row["target"]
    assert status == int(row["ratio"] > 1.0)
    assert min(row["before"], row["speed_up"], row["yardsticks"]) > 0.0
    assert report["machine"]["cores"] >= 1


def test_what_is_no_checkout_is_refused(workloads, tmp_path, capsys):
    with pytest.raises(SystemExit):
        workloads.main(["--tiny", "--against", str(tmp_path)])
    assert "no checkout of ddlsim is there" in capsys.readouterr().err


@pytest.mark.slow
def test_four_people_have_their_first_answer_with_two_commands(tmp_path, monkeypatch, capsys):
    """With what has been compiled already; how long it takes is not tested."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    first_answer = importlib.import_module("first_answer")
    assert first_answer.main(["--here", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(capsys.readouterr().out) == report
    assert len(report["users"]) == 4
    for row in report["users"]:
        assert row["commands"] <= report["target"]["commands"]
        assert row["warm"]["processor_seconds"] > 0.0


@pytest.mark.slow
def test_the_start_up_is_measured_in_processes_of_their_own(tmp_path, monkeypatch):
    """With nothing compiled; how long it takes is not tested."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    start_up = importlib.import_module("start_up")
    monkeypatch.setattr(start_up, "RUNS", {"nothing": ["-c", "import ddlsim; print(ddlsim.__version__)"]})
    path = tmp_path / "report.json"
    assert start_up.main(["--no-wheel", "--repeat", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["process"] for row in rows] == ["first", "again", "unwritten"]
    assert all(0.0 < row["ratio"] < math.inf for row in rows)
