"""A pytest plugin that notes which lines of the package each test runs, and how long the test takes.

    MUTATION_REACH=reach.json python -m pytest -p tests.mutation.reach tests/collectives ...

writes ``{"tests": [[id, seconds], ...], "lines": {module: {line: [numbers of tests]}}}``. What is compiled is not seen.
"""

import json
import os
import warnings
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
MEASURED = coverage.Coverage(data_file=None, include=[str(ROOT / "ddlsim" / "*")], config_file=False)
SECONDS: dict[str, float] = {}


def pytest_configure(config):
    MEASURED.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    MEASURED.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        MEASURED.switch_context("")


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration


def pytest_unconfigure(config):
    MEASURED.stop()
    number = {nodeid: i for i, nodeid in enumerate(SECONDS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tests that read sources run nothing of the package
        data = MEASURED.get_data()
    lines = {
        str(Path(file).relative_to(ROOT)): {
            line: sorted(number[c] for c in contexts if c in number)
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    found = {"tests": list(SECONDS.items()), "lines": lines}
    Path(os.environ["MUTATION_REACH"]).write_text(json.dumps(found), encoding="utf-8")
