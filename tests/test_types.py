"""What type checkers make of calls: the signatures that are carried over from dataclasses and methods are real ones."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[1]
#: calls, and what mypy says of them ("" for nothing)
CALLS = {
    'ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(), 32, 4, steps=2, max_time="8 h", speed=[1.0])': "",
    "ddlsim.simulate(experiment, stability=True, checkpoint_every='5 min')": "",
    'ddlsim.simulate("office-1gbe", btch_size=8)': 'Unexpected keyword argument "btch_size" for "simulate"',
    'ddlsim.simulate("office-1gbe", batch_size="8")': 'Argument "batch_size" to "simulate" has incompatible type "str"',
    'ddlsim.resume("saved.npz")': 'Missing positional argument "experiment" in call to "resume"',
    'ddlsim.simulte("office-1gbe")': 'Module has no attribute "simulte"; maybe "simulate"?',
    "study.best(metrc='cost')": 'Unexpected keyword argument "metrc"; did you mean "metric"?',
    "study.best('cost', 3).iloc[0]": "",
}


@pytest.mark.slow
def test_calls_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where mypy finds the package and its own cache
    head = ["import ddlsim", "", "", "def calls(experiment: ddlsim.Experiment, study: ddlsim.Study) -> None:"]
    file = tmp_path / "calls.py"
    file.write_text("\n".join([*head, *(f"    {call}" for call in CALLS)]) + "\n")
    said, problem, _ = api.run(["--strict", str(file)])
    assert not problem
    errors = {int(line): text for line, text in re.findall(r"calls\.py:(\d+): error: (.*)", said)}
    for number, (call, text) in enumerate(CALLS.items(), len(head) + 1):
        assert (number in errors) == bool(text), call
        assert text in errors.get(number, ""), call
