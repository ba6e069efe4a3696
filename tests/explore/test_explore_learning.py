"""Runs that learn, shown while they go on: what is shown, that it changes nothing, and that cancelling ends it."""

import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.explore.compared import chosen_strategies
from ddlsim.explore.jobs import CancelledError, Progress
from ddlsim.explore.learning_runs import COLUMNS, Lesson, columns, learn, lessons
from ddlsim.explore.screens.learning import files, outcome
from ddlsim.explore.setup import Setup
from ddlsim.runtime.loop import watched
from ddlsim.study import load_study

SMALL = Lesson("shapes", workers=2, batch_size=32, epochs=0.3, evaluate_every=1, clock=False)


def progress():
    return Progress(lambda call: call(), lambda share, text: None)


@pytest.fixture
def setup():
    return Setup(cluster="office-1gbe", model="lenet5")


def test_strategies_are_the_forms_and_others_once_each(setup):
    setup.choose_strategy("local-sgd")
    found = chosen_strategies(setup, ["all-reduce", "local-sgd", "k-sync"])
    assert [type(each) for each in found.values()] == [ddlsim.LocalSGD, ddlsim.AllReduce, ddlsim.KSync]
    assert list(found) == [each.label for each in found.values()]


def test_a_small_model_learns_and_the_forms_keeps_the_clock(setup):
    (experiment,) = lessons(setup, Lesson("digits"), []).values()
    assert (experiment.model, experiment.time_model, experiment.workers) == ("digits-cnn", "lenet5", 8)
    (experiment,) = lessons(setup, SMALL, []).values()
    assert (experiment.model, experiment.time_model, experiment.batch_size) == ("shapes-cnn", None, 32)
    with pytest.raises(ConfigError, match="data = 'letters': must be one of digits, shapes"):
        lessons(setup, Lesson("letters"), [])


def test_points_come_while_it_learns_and_are_those_of_the_result(setup, monkeypatch):
    monkeypatch.setattr("ddlsim.explore.learning_runs.LOOK", 0.0)
    experiments = lessons(setup, SMALL, ["local-sgd"])
    shown = {label: [] for label in experiments}
    results = learn(experiments, progress(), lambda label, rows: shown[label].append(rows))
    for label, experiment in experiments.items():
        assert results[label].history.equals(ddlsim.simulate(experiment).history)
        *live, last = shown[label]
        assert len(live) > 1
        assert [len(rows) for rows in live] == sorted({len(rows) for rows in live})
        assert all(set(rows) <= set(last) for rows in live)
        assert last == tuple(results[label].evaluations)
    made = columns(last)
    assert set(made) == set(COLUMNS)
    assert made["accuracy"] == [100.0 * row.accuracy for row in last]
    assert made["nbytes"] == [1e-9 * row.nbytes for row in last]
    table = outcome(results, 1.0)
    assert all(label in table for label in experiments)
    assert table.count("never") == 2


def test_cancelling_ends_a_run_at_its_next_update(setup):
    (experiment,) = lessons(setup, Lesson("shapes", 2, 8, epochs=1000.0, evaluate_every=1, clock=False), []).values()
    said, own = [], progress()

    def show(label, rows):
        said.append(rows)
        own.cancelled = True

    with pytest.raises(CancelledError), watched(own.check):  # as Jobs does
        learn({"one": experiment, "other": experiment}, own, show)
    assert len(said) == 1


def test_the_file_says_what_is_run(setup, tmp_path):
    experiments = lessons(setup, SMALL, ["local-sgd"])
    toml, program = files(setup, SMALL, ["local-sgd"])
    path = tmp_path / toml.name
    path.write_text(toml.text)
    points = load_study(path).points
    assert [point.settings["strategy"] for point in points] == list(experiments)
    for point, experiment in zip(points, experiments.values(), strict=True):
        assert point.experiment.strategy == experiment.strategy
        assert point.experiment.training.epochs == experiment.training.epochs
        assert point.experiment.workers == 2
    made = {}
    exec(program.text, made)
    assert list(made["vary"]["strategy"]) == list(experiments)
    (alone, _) = files(setup, SMALL, [])
    path.write_text(alone.text)
    assert ddlsim.load_experiment(path) == next(iter(experiments.values()))
