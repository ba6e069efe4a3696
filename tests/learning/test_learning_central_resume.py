"""Runs of the centralised strategies continue bit for bit: what waits, is late or was cancelled included."""

import pytest
from draws import few
from learning_reference import STAR

import ddlsim

STRATEGIES = [
    ddlsim.AsyncParameterServer(accumulate=2, staleness_scaling="inverse"),
    ddlsim.AsyncParameterServer(servers=2, delay_compensation=ddlsim.DelayCompensation(2.0, adaptive=0.9)),
    ddlsim.SoftSync(2, apply_time="20 us"),
    ddlsim.StaleSynchronous(1),
    ddlsim.BackupWorkers(1, restart=False),
    ddlsim.KSync(2, servers=2),
    ddlsim.KBatchSync(3),
    ddlsim.KAsync(2),
    ddlsim.ElasticAveraging(0.2, 2),
    ddlsim.ElasticAveraging(0.2, 2, synchronous=False),
]


def experiment(strategy, updates):
    training = ddlsim.Training(rate=0.05, evaluate_every=5, optimizer=ddlsim.Momentum(0.9), updates=updates)
    return ddlsim.Experiment(STAR, "digits-cnn", strategy, 8, 4, jitter=ddlsim.Lognormal(0.5), training=training)


@pytest.mark.parametrize("strategy", few(STRATEGIES, 4), ids=lambda s: s.label)
def test_continuing_is_the_run_without_a_break(strategy, tmp_path):
    """Saved after 7 updates (between evaluations), then after 10 (with one)."""
    path = tmp_path / "run.npz"
    whole = ddlsim.simulate(experiment(strategy, 24))
    ddlsim.simulate(experiment(strategy, 7)).save(path)
    ddlsim.resume(path, experiment(strategy, 10)).save(path)
    result = ddlsim.resume(path, experiment(strategy, 24))
    assert result.params.tobytes() == whole.params.tobytes()
    assert result.history.equals(whole.history)
    assert result.recorder.updates == whole.recorder.updates
    assert result.recorder.staleness == whole.recorder.staleness
