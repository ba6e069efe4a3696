"""Every example runs and prints what stands in the .txt beside it (the simulation is deterministic)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddlsim import load_experiment

EXAMPLES = Path(__file__).parents[1] / "examples"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_prints_what_stands_beside_it(script, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = script.with_suffix(".txt").read_text(encoding="utf-8")
    # the words to the letter, the numbers to half a percent: mathematical libraries differ in the last bits
    assert NUMBER.sub("#", done.stdout).split() == NUMBER.sub("#", expected).split()
    assert numbers(done.stdout) == pytest.approx(numbers(expected), rel=5e-3, abs=0.011)
    if script.stem == "scaling_demo":
        trace = json.loads((tmp_path / "out" / "trace.json").read_text(encoding="utf-8"))
        assert len(trace["traceEvents"]) > 1000
        for name in ("scaling.png", "timeline.png", "cluster.png"):
            assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_experiment_file_loads(path):
    assert load_experiment(path).batch_size > 0
