"""Every example runs and prints what stands in the .txt beside it (the simulation is deterministic)."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ddlsim import load_experiment

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "scaling_demo.py"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


def check(script: Path, printed: str) -> None:
    """The words to the letter, the numbers to half a percent: mathematical libraries differ in the last bits."""
    expected = script.with_suffix(".txt").read_text(encoding="utf-8")
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split()
    assert numbers(printed) == pytest.approx(numbers(expected), rel=5e-3, abs=0.011)


@pytest.mark.parametrize("script", sorted(set(EXAMPLES.rglob("*.py")) - {DEMO}), ids=lambda path: path.stem)
def test_example_prints_what_stands_beside_it(script, tmp_path, monkeypatch, capsys):
    """In this process, which has loaded the libraries and kernels; warnings are errors here as everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    check(script, capsys.readouterr().out)


def test_the_demo_runs_as_a_program_of_its_own(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(DEMO)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    check(DEMO, done.stdout)
    trace = json.loads((tmp_path / "out" / "trace.json").read_text(encoding="utf-8"))
    assert len(trace["traceEvents"]) > 1000
    for name in ("scaling.png", "timeline.png", "cluster.png"):
        assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_experiment_file_loads(path):
    assert load_experiment(path).batch_size > 0
