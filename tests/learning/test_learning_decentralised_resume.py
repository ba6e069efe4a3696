"""Decentralised runs that were saved and continued: models, averages under way and drawn partners come out the same."""

import pytest
from draws import few
from learning_reference import STAR

import ddlsim
from ddlsim.run.simulate import run


def experiment(strategy, updates):
    training = ddlsim.Training("digits", rate=0.05, updates=updates, evaluate_every=5, optimizer=ddlsim.Momentum(0.9))
    return ddlsim.Experiment(STAR, "digits-cnn", strategy, 8, 4, jitter=ddlsim.Lognormal(0.3), training=training)


@pytest.mark.parametrize("strategy", few([
    ddlsim.AdaComm(4, 2), ddlsim.BMUF(3), ddlsim.DaSGD(3, 2), ddlsim.OverlapLocalSGD(3), ddlsim.DPSGD(),
    ddlsim.ADPSGD(), ddlsim.GossipSGD(0.5), ddlsim.DiLoCo(3), ddlsim.SlowMo(3), ddlsim.SPARTA(0.1),
    ddlsim.CHOCOSGD(0.5), ddlsim.HierarchicalLocalSGD(2, 2, 2), ddlsim.FedAvg(0.5, local_steps=2), ddlsim.FedBuff(2, 2),
], 5), ids=lambda s: s.label)  # fmt: skip
def test_continuing_is_bit_for_bit_the_run_without_a_break(strategy, tmp_path):
    whole = run(experiment(strategy, 24))
    run(experiment(strategy, 11)).save(tmp_path / "run.npz")
    continued = ddlsim.resume(tmp_path / "run.npz", experiment(strategy, 24))
    assert continued.params.tobytes() == whole.params.tobytes()
    assert continued.history.equals(whole.history)
    assert continued.recorder.updates == whole.recorder.updates
    assert continued.recorder.staleness == whole.recorder.staleness
