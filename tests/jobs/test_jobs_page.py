"""What docs/jobs.md shows runs, and is so."""

import re
from pathlib import Path

import pytest

import ddlsim
from ddlsim import AllReduce, Job
from ddlsim.cluster import racks

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"


@pytest.mark.slow
def test_what_the_page_shows_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "jobs.md", "exec"), namespace)
    assert Path("jobs.png").exists()
    assert min(namespace["jobs"].slowdowns.values()) > 0.99
    file, arrivals = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    Path("jobs.toml").write_text(file, encoding="utf-8")
    assert len(ddlsim.load_jobs("jobs.toml").simulate()) == 2
    Path("jobs.toml").write_text(arrivals, encoding="utf-8")
    rows = ["name,start_s,workers,steps,placement", "a,0,20,2,", "b,0.5,20,2,spread", "c,0.6,4,1,packed"]
    Path("arrivals.csv").write_text("\n".join(rows), encoding="utf-8")
    queued = ddlsim.load_jobs("jobs.toml").simulate()
    assert [ran.start >= came for ran, came in zip(queued.runs, (0.0, 0.5, 0.6), strict=True)] == [True] * 3
    assert queued.runs[1].start == queued.runs[0].end  # 40 of 32 devices


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("start_s\n0\n", "a.csv: column 'workers' is missing"),
        ("start_s,workers,color\n0,1,red\n", "unknown column 'color'"),
        ("start_s,workers\nsoon,1\n", ":2: start_s = 'soon'"),
        ("start_s,workers\n0,many\n", ":2: workers = 'many'"),
        ("start_s,workers,placement\n0,2,left\n", "placement = 'left'"),
    ],
)
def test_lists_of_arrivals_that_cannot_be_read(tmp_path, rows, message):
    (tmp_path / "a.csv").write_text(rows, encoding="utf-8")
    path = tmp_path / "jobs.toml"
    path.write_text('cluster = "office-1gbe"\narrivals = "a.csv"\n', encoding="utf-8")
    with pytest.raises(ddlsim.ConfigError) as error:
        ddlsim.load_jobs(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_known_and_simulated_jobs_share_a_link():
    """As docs/jobs.md says: a job of known cost slows a simulated one, and is slowed by it."""
    cluster = ddlsim.load_cluster(racks(2, 4, bandwidth="1 Gbit/s", latency=0.0, trunk_bandwidth="1 Gbit/s"))
    one = ddlsim.Experiment(cluster, "resnet18", AllReduce("ring", "none", cost="nccl"), 32, steps=20,
                            compute=ddlsim.Measured("1 ms", 32))  # fmt: skip
    other = one.with_(strategy=AllReduce("ring", "none"), workers=[1, 5])
    jobs = ddlsim.simulate_jobs([Job(one.with_(workers=[0, 4]), "known"), Job(other, "simulated")])
    alone = {name: result.step_time for name, result in jobs.alone.items()}
    shared = {name: jobs.concurrent_step_time(name) / seconds for name, seconds in alone.items()}
    assert max(jobs.links["busy"]) <= 1.0 + 1e-9
    assert min(shared.values()) > 1.3
    assert not any("does not slow" in note for note in jobs["known"].notes)
