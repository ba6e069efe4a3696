"""Runs that somebody outside of them ends, in every way that runs go: tables, lanes, processes; learning or not."""

import pytest
from bundled_strategies import some

import ddlsim
from ddlsim.runtime.loop import watched

#: steps that take hours
ENDLESS = 10_000_000
STRATEGIES = some("ddp local asynchronous ad-psgd k-sync stale")


class EnoughError(BaseException):
    """Somebody has seen enough."""


def after(n_calls):
    calls = []

    def check():
        calls.append(None)
        if len(calls) == n_calls:
            raise EnoughError

    return check


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_watched_run_ends_where_the_watcher_says_so(strategy):
    with pytest.raises(EnoughError), watched(after(3)):
        ddlsim.simulate(
            "office-1gbe", "lenet5", strategy, 8, 4, steps=ENDLESS, max_time=1e9, jitter=ddlsim.Lognormal(0.1)
        )


def test_who_only_watches_changes_nothing():
    calls = []
    with watched(lambda: calls.append(None)):
        watched_run = ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce("ring"), 8, 4)
    n_calls = len(calls)
    assert n_calls
    assert watched_run.step_time == ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce("ring"), 8, 4).step_time
    assert len(calls) == n_calls, "what runs outside is not watched"


def test_studies_and_sensitivities_are_watched_and_do_not_take_it_for_a_mistake_of_a_point():
    base = ddlsim.Experiment("office-1gbe", "lenet5", workers=4)
    with pytest.raises(EnoughError), watched(after(40)):
        ddlsim.Study(base, {"batch_size": [2**i for i in range(12)]}).run(jobs=1)
    result = ddlsim.simulate(base)
    with pytest.raises(EnoughError), watched(after(10)):
        result.sensitivities()


def test_a_training_ends_too():
    training = ddlsim.Training("digits", rate=0.1, epochs=1e6)
    with pytest.raises(EnoughError), watched(after(5)):
        ddlsim.simulate("office-1gbe", "digits-cnn", workers=2, training=training)
