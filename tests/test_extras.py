"""Without matplotlib and scipy everything but plots and fits works, and errors name the extra to install."""

import subprocess
import sys

import pytest

from ddlsim.errors import ConfigError
from ddlsim.extras import check_installed, needs

PROGRAM = """
import sys
sys.modules["matplotlib"] = sys.modules["scipy"] = None  # as if they were not installed
import ddlsim
from ddlsim import *
from ddlsim.planner.convolutions import Algorithm, choose_algorithms
from ddlsim.study import Range
from ddlsim.validation import fit_compute

for name in ddlsim.__all__:
    getattr(ddlsim, name)
print(ddlsim.simulate("office-1gbe", "lenet5", steps=1, warmup=0))
training = ddlsim.Training("digits", rate=0.2, epochs=1)
seeds = ddlsim.simulate_seeds(ddlsim.Experiment("office-1gbe", "digits-cnn", training=training), seeds=2)
print(seeds, seeds.curve())
base = ddlsim.Experiment("office-1gbe", "lenet5", steps=1, warmup=0)
study = ddlsim.Study(base, {"batch_size": Range(8, 64, integer=True)}, design="latin-hypercube", n_points=3)
table = study.run()
table.save("points.csv")
print(table, open("points.csv").read())
print(ddlsim.recommend("office-1gbe", model="lenet5", samples=1e6))
options = {"conv": (Algorithm("fft", 1.0),)}
for attempt in (
    lambda: ddlsim.simulate("office-1gbe", "lenet5", steps=1, warmup=0).plot_timeline("timeline.png"),
    lambda: table.save_html("report.html"),
    lambda: ddlsim.plot_learning(seeds),
    lambda: choose_algorithms(options, "1 GB"),
    lambda: fit_compute("lenet5", [1, 2], [1.0, 2.0]),
):
    try:
        attempt()
    except ddlsim.ConfigError as error:
        print("ERROR", error)
"""


@pytest.mark.slow  # a fresh process that simulates, trains, studies and plans
def test_what_works_without_the_extras(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    plots = "cannot draw plots without matplotlib, which is not installed: pip install 'ddlsim[plots]'"
    fits = "cannot fit or optimise parameters without scipy, which is not installed: pip install 'ddlsim[fit]'"
    assert errors == [f"ERROR {text}" for text in (plots, plots, plots, fits, fits)]


def test_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"without scipy, .*: pip install 'ddlsim\[fit\]'"), needs("scipy"):
        import scipy.optimize  # noqa: F401
    with pytest.raises(ConfigError, match="without scipy"):
        check_installed("scipy")
    check_installed("matplotlib")


def test_other_missing_packages_are_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needs("scipy"):
        import no_such_package  # noqa: F401
