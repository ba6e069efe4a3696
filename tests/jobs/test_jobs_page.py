"""What docs/jobs.md shows runs, and a job whose collectives have a known time says what that leaves out."""

import re
from pathlib import Path

import ddlsim
from ddlsim import AllReduce, Job

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"


def test_what_the_page_shows_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "jobs.md", "exec"), namespace)
    assert Path("jobs.png").exists()
    assert min(namespace["jobs"].slowdowns.values()) > 0.99
    (file,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    Path("jobs.toml").write_text(file, encoding="utf-8")
    assert len(ddlsim.load_jobs("jobs.toml").simulate()) == 2


def test_known_costs_say_what_they_leave_out():
    made = ddlsim.Experiment("office-1gbe", "lenet5", AllReduce("ring", cost="nccl"), workers=2, steps=2)
    jobs = ddlsim.simulate_jobs([Job(made, "known"), Job(made.with_(strategy=AllReduce("ring")), "simulated")])
    assert [any("whatever others do" in note for note in jobs[name].notes) for name in jobs.names] == [True, False]
