"""Ctrl-C ends functions that run many simulations, and they return what has been simulated completely."""

from concurrent.futures import Future

import pytest
from draws import few

import ddlsim
from ddlsim import Job
from ddlsim.run import seeds
from ddlsim.runtime.context import StopRule

LEARNING = ddlsim.Experiment(
    "office-1gbe", "digits-cnn", batch_size=32, workers=2, training=ddlsim.Training("digits", updates=3)
)
SMALL = ddlsim.Experiment("office-1gbe", "lenet5", workers=2, steps=4)


def _seeds():
    found = ddlsim.simulate_seeds(LEARNING, 4, processes=1)
    return found, list(found.runs)


def _placements():
    found = ddlsim.place([Job(SMALL, "a"), Job(SMALL, "b")], tries=6)
    return found, list(found.tried)


def _configurations():
    found = ddlsim.recommend("office-1gbe", "lenet5", workers=[2, 4], batch_sizes=[8, 16], jobs=1)
    return found, [(str(one.candidate), one.figures) for one in found.found if one.figures is not None]


def _counts():
    found = ddlsim.scaling(SMALL, [1, 2, 4])
    return found, [(result.n_workers, result.throughput) for result in found]


#: functions that return a result and its parts, and the number of simulations that they need before the first part
MANY = {"seeds": (_seeds, 0), "placements": (_placements, 2), "configurations": (_configurations, 0)}
MANY |= {"counts": (_counts, 0)}


@pytest.fixture
def interrupted_in(monkeypatch):
    """Press Ctrl-C after the second update of the simulation with the given number."""

    def press(number):
        runs = []
        updated = StopRule.updated

        def interrupt(stop, n_samples):
            updated(stop, n_samples)
            if all(stop is not each for each in runs):
                runs.append(stop)
            if len(runs) > number and len(stop.recorder.updates) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(StopRule, "updated", interrupt)
        return runs

    return press


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("n_before", few([1, 2], 1))
def test_finished_simulations_are_returned(name, n_before, interrupted_in):
    simulate, n_first = MANY[name]
    _, parts = simulate()
    each = 2 if name == "placements" else 1  # runs per simulation
    runs = interrupted_in(n_first + each * n_before)
    found, kept = simulate()
    assert 0 < len(kept) < len(parts)
    assert len(runs) <= n_first + each * (n_before + 1)
    assert all(part in parts for part in kept)
    if name != "counts":  # a list, which is shorter
        assert found.interrupted
        assert "interrupted" in str(found)


@pytest.mark.parametrize("name", MANY)
def test_before_the_first_simulation_has_finished_the_interrupt_is_passed_on(name, interrupted_in):
    interrupted_in(0)
    with pytest.raises(KeyboardInterrupt):
        MANY[name][0]()


def test_an_interrupt_during_the_analysis_leaves_the_recommendation(interrupted_in):
    whole, parts = _configurations()
    runs = interrupted_in(len(parts))
    found, kept = _configurations()
    assert kept == parts
    assert str(found.best) == str(whole.best)
    assert not found.guidelines
    assert not found.sensitivities
    assert found.to_dict()["interrupted"]
    assert len(runs) == len(parts) + 1


class _Pool:
    """A pool whose first order never ends; Ctrl-C comes once all others have ended."""

    def __init__(self, n_workers, work, **options):
        self.work, self.closed = work, None

    def submit(self, experiment):
        future = Future()
        if experiment.seed:
            future.set_result(self.work(experiment))
        else:
            future.result = self.interrupt
        return future

    def interrupt(self):
        raise KeyboardInterrupt

    def close(self, *, at_once):
        assert at_once


def test_seeds_that_other_processes_have_finished_are_returned(monkeypatch):
    monkeypatch.setattr(seeds, "Processes", _Pool)
    found = ddlsim.simulate_seeds(LEARNING, 3, processes=2)
    assert found.interrupted
    assert [run.seed for run in found.runs] == [1, 2]


FAILURES = {"failures": ddlsim.Failures("100 h"), "checkpoints": ddlsim.Checkpoints("10 min", bandwidth="1 GB/s")}


@pytest.mark.parametrize("more", [{}, {"elastic": ddlsim.Elastic()}], ids=["waiting", "elastic"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupted_run_with_failures_shows_its_steps_and_simulates_no_more(more, number, interrupted_in):
    """Number 1 is a simulation for the failure timeline."""
    experiment = SMALL.with_(steps=8, slowdowns=[ddlsim.Slowdown(0, start=100.0, factor=2.0, duration=1000.0)])
    experiment = experiment.with_(**FAILURES, **more)
    runs = interrupted_in(number)
    result = ddlsim.simulate(experiment)
    assert result.interrupted
    assert "not computed, because the run was interrupted" in str(result)
    assert result.to_dict()["goodput"] is None
    assert len(runs) == number + 1
