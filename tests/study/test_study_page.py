"""docs/studies.md: its two examples say the same, and its case worked by hand is what comes out."""

import dataclasses
import re
from pathlib import Path

import pytest

import ddlsim
from ddlsim.cluster import Host, star
from ddlsim.study import Study, load_study

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")


def test_the_file_is_the_study_in_python(tmp_path):
    (tmp_path / "study.toml").write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1].partition("    table =")[0]
    names = {"__name__": "__main__"}
    exec(code, names)
    read, written = load_study(tmp_path / "study.toml"), names["study"]
    assert isinstance(written, Study)
    assert [point.key for point in read.points] == [point.key for point in written.points]
    assert len(read.points) == 3 * 3 * 2 * 2 * 3


def test_the_search_in_a_file_is_the_search_in_python(tmp_path):
    search = PAGE.partition("## Searching instead")[2]
    code = re.search(r"```python\n(.*?)```", search, re.DOTALL)[1].partition("    print(")[0]
    names = {"__name__": "__main__"}
    exec(code, names)
    table = re.search(r"```toml\n(.*?)```", search, re.DOTALL)[1]
    base = '[base]\ncluster = "office-1gbe"\nmodel = "lenet5"\n[vary]\nworkers = [2, 4]\n'
    (tmp_path / "search.toml").write_text(base + table)
    read, written = load_study(tmp_path / "search.toml").search, names["study"].search
    assert (read.metrics, read.sampler_used) == (written.metrics, written.sampler_used)
    assert dataclasses.replace(read, sampler=None) == written


def test_every_path_in_the_table_leads_somewhere():
    table = PAGE.partition("| path | changes |")[2].partition("\n\n")[0]
    paths = [path for path in re.findall(r"`([a-z_.0-9]+)`", table) if path not in ("Experiment",)]
    base = ddlsim.Experiment(
        "fat-tree-k8-10g", "lenet5", strategy=ddlsim.LocalSGD(2), jitter=ddlsim.Lognormal(0.1), device="v100",
        compute=ddlsim.Measured("1 ms", 32), training=ddlsim.Training(epochs=1, optimizer=ddlsim.Momentum()),
        faults=[ddlsim.RandomFaults("1 min", "5 s", factor=2.0)], slowdowns=[ddlsim.Slowdown(0, "1 s", "1 s", 2.0)],
    )  # fmt: skip
    kinds = set(ddlsim.load_cluster(base.cluster).link_kind)
    parts = {path: path.split(".") for path in paths}
    known = [path for path, part in parts.items() if part[0] != "cluster" or len(part) < 3 or part[1] in kinds]
    assert len(known) >= 18
    for path in known:
        Study(base, {path: ["a value"]})  # whether it fits is another question


def test_the_case_worked_by_hand():
    """A model whose step takes 0.4 s, on links that add 0.1 s for each step: found by their bandwidth."""
    model = ddlsim.load_model("lenet5")
    seconds = 0.1
    # a ring of two ranks sends half of the gradients in each of two rounds
    bandwidth = model.gradient_nbytes() / seconds
    cluster = ddlsim.Cluster.from_graph(star(2, bandwidth=bandwidth, latency=0.0, host=Host(device="v100")))
    device = dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=40.0)
    result = ddlsim.simulate(
        cluster.with_costs(price="3.60 USD/h", switch_power="100 W"), model, ddlsim.AllReduce("ring", overlap="none"),
        batch_size=32, steps=10, warmup=0, device=device, compute=ddlsim.Measured("400 ms", 32),
    )  # fmt: skip
    assert result.end_time == pytest.approx(5.0, rel=1e-6)
    assert result.cost == pytest.approx(0.01, rel=1e-6)
    assert result.energy == pytest.approx(2980.0, rel=1e-6)
