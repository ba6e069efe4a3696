"""Searches: what Optuna proposes, whoever simulates it and however often it is interrupted."""

import json
import sys

import pandas as pd
import pytest
from study_parts import BASE, VARY, Notes

import ddlsim
from ddlsim.study import Range, Search, Study, load_study, load_table

#: a space of which a search sees a small part: bandwidth is a number, the batch a whole one
SPACE = {
    "strategy": VARY["strategy"],
    "batch_size": Range(8, 256, log=True, integer=True),
    "cluster.nic.bandwidth": Range("1 Gbit/s", "100 Gbit/s", log=True),
}
FOUR = BASE.with_(workers=4)


def same(table, other):
    pd.testing.assert_frame_equal(table.frame, other.frame, check_exact=True)


@pytest.fixture(scope="module")
def searched():
    return Study(FOUR, SPACE, search=Search("throughput", 32)).run(jobs=1)


def test_a_search_learns_where_the_best_are(searched):
    """The first two batches are drawn at random; those after them are from where these were good."""
    assert searched.counts["done"] == 32
    assert len(searched.summary) == 32
    throughput = searched.summary["throughput"]
    assert throughput[16:].median() > 3.0 * throughput[:16].median()
    best = searched.best("throughput").iloc[0]
    assert best["batch_size"] > 180  # where it must be: in large batches
    assert f" {best['throughput']:,.1f} " in str(searched).splitlines()[1]
    assert "searched for throughput; best first" in str(searched)


def test_lists_are_categories_and_ranges_numbers_as_they_are_written(searched):
    frame = searched.frame
    assert set(frame["strategy"]) == {strategy.label for strategy in SPACE["strategy"]}
    assert frame["batch_size"].between(8, 256).all()
    assert all(type(value) is int for value in frame["batch_size"].tolist())
    numbers = [float(text.removesuffix(" Gbit/s")) for text in frame["cluster.nic.bandwidth"]]
    assert all(1.0 <= number <= 100.0 for number in numbers)
    assert len(set(numbers)) > 25


def test_names_and_fields_that_change_together_are_categories_too():
    vary = {
        "strategy": {"slow": ddlsim.AllReduce("ring", "none"), "fast": ddlsim.AllReduce("ring")},
        "workers, batch_size": [(2, 64), (4, 32)],
    }
    table = Study(BASE, vary, search=Search("throughput", 3, batch=2)).run(jobs=1)
    assert set(table.frame["strategy"]) <= {"slow", "fast"}
    assert len(table.members) == 3


def test_a_small_space_is_gone_through_once():
    """Whatever the sampler comes back to: each configuration is a trial once, and the search ends with the last."""
    table = Study(BASE, VARY, search=Search("step_time", 500)).run(jobs=1)
    grid = Study(BASE, VARY).run(jobs=1)
    assert sorted(member.key for member in table.members) == sorted(member.key for member in grid.members)
    assert table.best("step_time").iloc[0]["step_time"] == grid.best("step_time").iloc[0]["step_time"]


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_the_same_seed_gives_the_same_trials_and_another_one_others(sampler):
    searches = [Search("throughput", 14, sampler, seed=seed) for seed in (3, 3, 4)]
    a, b, c = (Study(FOUR, SPACE, search=search).run(jobs=1) for search in searches)
    same(a, b)
    assert [member.key for member in a.members] != [member.key for member in c.members]


@pytest.mark.slow
def test_the_trials_do_not_depend_on_the_number_of_processes(searched):
    same(Study(FOUR, SPACE, search=Search("throughput", 32)).run(jobs=2), searched)


def test_an_interrupted_search_goes_on_where_it_was(tmp_path, searched):
    """Trials are gone through again with the values of the store, and nothing is simulated twice."""
    notes, store = tmp_path / "notes", tmp_path / "store.sqlite"
    space = {**SPACE, "strategy": [Notes("ring", notes=str(notes)), Notes("ring", "none", notes=str(notes))]}

    def stop(count):
        if count.finished > 8:  # in the second batch
            raise KeyboardInterrupt

    study = Study(FOUR, space, search=Search("throughput", 20))
    first = study.run(store, jobs=1, progress=stop)
    assert first.interrupted
    assert 8 < first.counts["done"] < 16
    assert load_table(store).counts == first.counts
    assert sum(first.counts.values()) == 16
    whole = study.run(store, jobs=1)
    assert not whole.interrupted
    assert len(notes.read_text().splitlines()) == 20
    same(Study(FOUR, space, search=Search("throughput", 20)).run(jobs=1), whole)
    longer = Study(FOUR, space, search=Search("throughput", 30)).run(store, jobs=1, add=True)
    pd.testing.assert_frame_equal(longer.frame.head(20), whole.frame, check_exact=True)
    assert len(notes.read_text().splitlines()) == 20 + 20 + 10
    same(load_table(store), longer)


def test_two_metrics_give_a_front():
    space = {"workers": [1, 2, 3, 4, 6, 8], "batch_size": Range(8, 512, log=True, integer=True)}
    base = BASE.with_(cluster=BASE.cluster.with_costs(price="3.06 USD/h"))
    table = Study(base, space, search=Search(["throughput", "cost_per_sample"], 40)).run(jobs=1)
    front = table.pareto("throughput", "cost_per_sample")
    assert 1 <= len(front) < 40
    assert str(table).splitlines()[1].split()[0] == str(int(front.iloc[0]["workers"]))
    assert "searched for throughput and cost_per_sample; Pareto-optimal configurations first" in str(table)


def test_seeds_of_a_configuration_that_is_worse_than_the_median_are_given_up():
    """What was simulated for it stays; the other seeds are no misfits of a grid in the same store."""
    whole = Study(FOUR, SPACE, seeds=3, search=Search("throughput", 16)).run(jobs=1)
    pruned = Study(FOUR, SPACE, seeds=3, search=Search("throughput", 16, prune=True)).run(jobs=1)
    given_up = pruned.frame[pruned.frame["error"].str.startswith("given up after")]
    assert len(given_up) >= 4
    assert (given_up["status"] == "skipped").all()
    assert pruned.counts["done"] == 48 - len(given_up)
    assert len(pruned.summary) == 16
    assert not {pruned.members[i].key for i in given_up.index} & {member.key for member in whole.members}
    median = whole.summary["throughput"].median()
    assert (pruned.summary.loc[pruned.summary["n"] < 3, "throughput"] < 2 * median).all()
    assert pruned.best("throughput").iloc[0]["n"] == 3


def test_what_does_not_fit_together_is_a_trial_without_a_value():
    vary = {"workers": [2, 4, 400], "batch_size": Range(8, 64, integer=True)}
    table = Study(BASE, vary, search=Search("throughput", 30)).run(jobs=1)
    assert table.counts["skipped"] >= 1
    assert table.counts["done"] + table.counts["skipped"] == 30
    assert table.counts["done"] > 15  # TPE learns to leave 400 workers alone


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"objective": "speed", "n_trials": 3}, "Search: objective: unknown metric 'speed'; did you mean 'speedup'?"),
        ({"objective": [], "n_trials": 3}, "objective = (): must be a metric"),
        ({"objective": ["cost", "cost"], "n_trials": 3}, "must be a metric, or a list of distinct metrics"),
        ({"objective": "cost", "n_trials": 0}, "n_trials = 0: must be an integer from 1 to 100000"),
        ({"objective": "cost", "n_trials": 3, "sampler": "tpa"}, "did you mean 'tpe'?"),
        ({"objective": ["cost", "loss"], "n_trials": 3, "prune": True}, "prune = True needs one metric"),
        ({"objective": "throughput", "n_trials": 3, "prune": True}, "prune = True has no effect with one seed"),
        ({"objective": "cost", "n_trials": 3}, "no configuration has a known cost: set prices"),
    ],
    ids=["metric", "none", "twice", "trials", "sampler", "two", "seed", "price"],
)  # fmt: skip
def test_searches_that_cannot_be(search, message):
    with pytest.raises(ddlsim.ConfigError) as error:
        Study(BASE, {"workers": [2, 4]}, search=Search(**search)).run(jobs=1)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"vary": {}}, "there is nothing to search"),
        ({"vary": {"workers": []}}, "vary['workers'] is empty"),
        ({"vary": {"workers": [2]}, "design": "list"}, "design, n_points and design_seed have no effect"),
        ({"vary": {"strategy": [ddlsim.Splits()]}}, "Splits represents many configurations"),
        ({"vary": {"workers, strategy": [(2, ddlsim.Splits())]}}, "Splits represents many configurations"),
        ({"vary": {"workerz": Range(1, 8, integer=True)}}, "did you mean 'workers'"),
        ({"vary": {"strategy": [ddlsim.AllReduce()], "strategy.period": [2, 4]}}, "unknown field 'period'"),
    ],
    ids=["nothing", "empty", "design", "splits", "splits together", "path", "inner path"],
)
def test_spaces_that_cannot_be_searched(study, message):
    with pytest.raises(ddlsim.ConfigError) as error:
        Study(BASE, search=Search("throughput", 4), **study)
    assert message in str(error.value).replace('"', "'")


def test_a_path_that_some_strategies_have_can_be_searched():
    vary = {"strategy": [ddlsim.AllReduce(), ddlsim.LocalSGD(2)], "strategy.period": Range(2, 8, integer=True)}
    table = Study(FOUR, vary, search=Search("throughput", 8)).run(jobs=1)
    assert table.counts["done"] >= 1
    assert table.counts["done"] + table.counts["skipped"] == 8


def test_the_points_of_a_search_are_known_afterwards(searched):
    study = Study(FOUR, SPACE, search=Search("throughput", 4))
    with pytest.raises(ddlsim.ConfigError, match="has not been run"):
        study.points  # noqa: B018
    table = study.run(jobs=1)
    assert [point.key for point in study.points] == [member.key for member in table.members]
    assert [m.key for m in table.members] == [m.key for m in searched.members][:4]


def test_without_optuna_a_search_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ddlsim.ConfigError, match=r"pip install 'ddlsim\[optuna\]'"):
        Study(BASE, {"workers": [2, 4]}, search=Search("throughput", 2)).run(jobs=1)


FILE = """
[base]
cluster = "office-1gbe"
model = "lenet5"
steps = 2
[vary]
workers = [2, 4]
batch_size = { low = 8, high = 64, integer = true }
[search]
objective = "throughput"
n_trials = 6
sampler = "random"
seed = 5
"""


def test_a_file_with_a_table_search(tmp_path):
    from typer.testing import CliRunner

    from ddlsim import cli

    path, store = tmp_path / "study.toml", tmp_path / "study.sqlite"
    path.write_text(FILE)
    study = load_study(path)
    assert study.search == Search("throughput", 6, "random", seed=5)
    result = CliRunner().invoke(cli.app, ["sweep", str(path), "-o", str(store), "-j", "1"], catch_exceptions=False)
    assert "6 done of 6 points" in result.stdout
    again = CliRunner().invoke(cli.app, ["sweep", str(path), "-o", str(store), "-j", "1", "--json"])
    rows = json.loads(again.stdout)
    assert [row["workers"] for row in rows] == study.run(jobs=1).frame["workers"].tolist()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_trials = 6", "trials = 6", "search: unknown key 'trials'; did you mean 'n_trials'?"),
        ("n_trials = 6", "", "search: key 'n_trials' is missing"),
        ('"throughput"', '"thruput"', "did you mean 'throughput'?"),
        ("[search]", 'design = "list"\n[search]', "vary"),
    ],
    ids=["key", "missing", "metric", "design"],
)
def test_files_that_are_wrong(tmp_path, old, new, message):
    path = tmp_path / "study.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ddlsim.ConfigError) as error:
        load_study(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
