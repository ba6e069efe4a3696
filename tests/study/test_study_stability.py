"""Studies record how stable their points are where that is asked for, and rank nothing below it."""

from __future__ import annotations

import dataclasses

import pytest

import ddlsim
from ddlsim import AllReduce, AsyncParameterServer, ConfigError, Measured, Study
from ddlsim.cluster import star
from ddlsim.report.study_labels import answers, study_cells
from ddlsim.study import load_study
from ddlsim.study.store import Member
from ddlsim.study.table import Table
from ddlsim.study.worker import DONE, Outcome, record_of

BASE = ddlsim.Experiment(
    ddlsim.Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="5 us"), "eight").with_costs(price="3.6 USD/h"),
    "resnet18", batch_size=16, steps=8, warmup=1, compute=Measured("5 ms", 16),
)  # fmt: skip
VARY = {"workers": [4, 8], "strategy": [AllReduce("ring"), AsyncParameterServer(3, "colocated")]}


@pytest.fixture(scope="module")
def plain() -> dict[str, object]:
    return record_of(ddlsim.simulate(BASE.with_(workers=2, steps=1)))


def table(plain: dict[str, object], **columns: list[float]) -> Table:
    """A study of as many configurations as columns have values, with one seed."""
    n = len(next(iter(columns.values())))
    members = [Member(f"{i}", {"batch_size": i}, 0) for i in range(n)]
    rows = [{name: values[i] for name, values in columns.items()} for i in range(n)]
    return Table(["batch_size"], members, {f"{i}": Outcome(DONE, "", {**plain, **row}) for i, row in enumerate(rows)})


def test_what_differs_by_rounding_ties_and_stays_in_the_order_of_the_design(plain: dict[str, object]) -> None:
    found = table(plain, throughput=[90.0, 100.0, 100.0 * (1.0 + 1e-12), 100.0 * (1.0 + 1e-7)])
    assert found.best(n=4)["batch_size"].tolist() == [3, 1, 2, 0]
    assert found.best("step_time", n=4)["batch_size"].tolist() == [0, 1, 2, 3]  # all have the same


def test_what_differs_by_less_than_it_is_stable_to_ties(plain: dict[str, object]) -> None:
    found = table(plain, throughput=[100.0, 100.5, 99.0], throughput_spread=[1e-13, 8e-3, 1e-13])
    assert found.best(n=3)["batch_size"].tolist() == [0, 1, 2]
    assert answers(found)[0].equal == "and 1 other tied: the differences are within the stability of the results"
    sure = table(plain, throughput=[100.0, 100.5, 99.0], throughput_spread=[1e-13, 1e-13, 1e-13])
    assert sure.best(n=3)["batch_size"].tolist() == [1, 0, 2]
    assert answers(sure)[0].equal == ""
    # accuracy is not what the clock's stability is about
    learned = table(plain, accuracy=[0.900, 0.905], throughput_spread=[0.1, 0.1])
    assert learned.best("accuracy")["batch_size"].tolist() == [1]


def test_a_stability_is_printed_in_words_and_without_an_interval(plain: dict[str, object]) -> None:
    """Spreads of rounding, such as 3e-13 +-200 %, differ from seed to seed."""
    cells = []
    for spreads in ([1e-13, 0.0, 8e-13], [8e-3, 1e-13, 4e-3]):
        members = [Member(f"{i}", {"batch_size": 8}, i) for i in range(3)]
        outcomes = {f"{i}": Outcome(DONE, "", {**plain, "throughput_spread": each}) for i, each in enumerate(spreads)}
        found = Table(["batch_size"], members, outcomes)
        head, row = study_cells(found)
        cells.append(row[head.index("stable to")])
    assert cells == ["rounding", "0.4 %"]


def test_a_front_has_all_that_are_not_told_apart(plain: dict[str, object]) -> None:
    """The second beats the first by 0.5 % in both metrics; that says nothing where it is stable to 0.8 %."""
    columns = {"throughput": [100.0, 100.5, 50.0], "cost_per_sample": [1.005, 1.0, 3.0]}
    unsure = table(plain, **columns, throughput_spread=[1e-13, 8e-3, 1e-13])
    assert unsure.pareto("throughput", "cost_per_sample")["batch_size"].tolist() == [0, 1]
    assert table(plain, **columns).pareto("throughput", "cost_per_sample")["batch_size"].tolist() == [1]
    rounded = table(plain, throughput=[100.0, 100.0 + 1e-9], cost_per_sample=[1.0 + 1e-12, 1.0])
    assert rounded.pareto("throughput", "cost_per_sample")["batch_size"].tolist() == [0, 1]


@pytest.mark.slow
def test_a_sweep_records_it_whatever_the_number_of_processes(tmp_path) -> None:
    study = Study(BASE, VARY, stability=True)
    one, two = study.run(jobs=1), study.run(jobs=2)
    assert one.frame.equals(two.frame)
    ring, servers = (one.frame.loc[one.frame["strategy"].str.contains(name), "throughput_spread"]
                     for name in ("all-reduce", "async"))  # fmt: skip
    assert (ring <= 2e-12).all()
    assert (servers > 1e-9).any()
    assert "stable to" in str(one)
    direct = ddlsim.simulate(BASE.with_(workers=8, strategy=VARY["strategy"][1])).stability().throughput_spread
    assert servers.iloc[1] == direct


def test_a_store_tells_points_with_it_from_those_without(tmp_path) -> None:
    vary = {"workers": [2, 4]}
    store = tmp_path / "study.sqlite"
    without = Study(BASE, vary).run(store, jobs=1)
    assert "throughput_spread" not in without.frame
    with pytest.raises(ConfigError, match=r"set stability=True in the study \(--stability\)"):
        without.best("throughput_spread")
    having = Study(BASE, vary, stability=True).run(store, jobs=1)
    assert having.frame["throughput_spread"].notna().all()
    assert having.frame["throughput"].equals(without.frame["throughput"])


def test_a_file_and_an_argument_ask_for_it(tmp_path) -> None:
    path = tmp_path / "study.toml"
    text = '[base]\ncluster = "office-1gbe"\nmodel = "lenet5"\n[vary]\nworkers = [2, 4]\n'
    path.write_text("stability = true\n" + text)
    assert load_study(path).stability
    path.write_text(text)
    assert not load_study(path).stability
    with pytest.raises(ConfigError, match="stability = 'on': must be True or False"):
        dataclasses.replace(Study(BASE, {"workers": [2]}), stability="on")  # type: ignore[arg-type]
