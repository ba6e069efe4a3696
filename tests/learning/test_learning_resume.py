"""Saved runs: what continues is bit for bit what would have been, and files that do not fit are refused."""

import os
import signal
import time
from pathlib import Path

import pytest
from bundled_strategies import BUNDLED, N_WORKERS, VARIANTS, Bundled
from draws import few
from learning_reference import STAR

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.learning import Learner
from ddlsim.run.resume import SavePoints
from ddlsim.run.simulate import run

NORMALISED = """
title = "small, with batch normalisation and dropout"
sources = ["made for this test"]
input = [1, 8, 8]
trainable = true
layers = [
  { type = "conv", channels = 4, kernel = 3, padding = 1 },
  { type = "batch_norm" },
  { type = "relu" },
  { type = "max_pool", kernel = 2 },
  { type = "flatten" },
  { type = "dropout", rate = 0.3 },
  { type = "dense", units = 10 },
]
"""
STRATEGIES = [
    ddlsim.AllReduce("ring", overlap="ddp"), ddlsim.AllReduce("ring", overlap="priority"),
    ddlsim.ParameterServer(servers=2), ddlsim.AsyncParameterServer(),
    ddlsim.AsyncParameterServer(servers=3, apply_time="10 us"), ddlsim.GossipSGD(0.5),
]  # fmt: skip
#: every bundled strategy that learns, and rules with a state of their own
ALL = {
    **{name: one for name, one in (BUNDLED | VARIANTS).items() if one.data},
    "inverse": Bundled(ddlsim.AsyncParameterServer(accumulate=2, staleness_scaling="inverse")),
    "compensated": Bundled(
        ddlsim.AsyncParameterServer(servers=2, delay_compensation=ddlsim.DelayCompensation(2.0, adaptive=0.9))
    ),
}
N_UPDATES = 24


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "normalised.toml"
    path.write_text(NORMALISED)
    return path


def experiment(strategy=STRATEGIES[0], model="digits-cnn", *, updates=N_UPDATES, jitter=0.3, **more):
    fields = {"rate": 0.05, "evaluate_every": 5, "optimizer": ddlsim.Momentum(0.9)} | more
    training = ddlsim.Training("digits", updates=updates, **fields)
    spread = ddlsim.Lognormal(jitter) if jitter else ddlsim.NoJitter()
    return ddlsim.Experiment(STAR, model, strategy, 8, 4, jitter=spread, training=training)


def assert_same(result, whole):
    assert result.params.tobytes() == whole.params.tobytes()
    assert (result.statistics is None) == (whole.statistics is None)
    if whole.statistics is not None:
        assert result.statistics.tobytes() == whole.statistics.tobytes()
    assert result.history.equals(whole.history)
    assert result.recorder.updates == whole.recorder.updates
    assert result.recorder.staleness == whole.recorder.staleness
    assert (result.end_time, result.stop_reason) == (whole.end_time, whole.stop_reason)
    assert result.workers.equals(whole.workers)


@pytest.mark.parametrize("model", ["digits-cnn", "normalised"])
@pytest.mark.parametrize("strategy", few(STRATEGIES, 3, start=1), ids=lambda s: s.label)
def test_continuing_is_bit_for_bit_the_run_without_a_break(strategy, model, normalised, tmp_path):
    """After 7 updates (between evaluations), then after 10 (with one), then to the end."""
    path, model = tmp_path / "run.npz", normalised if model == "normalised" else model
    whole = run(experiment(strategy, model))
    run(experiment(strategy, model, updates=7)).save(path)
    ddlsim.resume(path, experiment(strategy, model, updates=10)).save(path)
    assert_same(ddlsim.resume(path, experiment(strategy, model)), whole)


def interrupted_after(monkeypatch, n_instants, wanted):
    """The run, stopped before the clock has gone on so often, as by Ctrl-C; and how often it has."""
    seen, asked = [], SavePoints.__call__

    def press(pauses):
        seen.append(pauses)
        if len(seen) == n_instants:
            pauses.interrupt()
        return asked(pauses)

    with monkeypatch.context() as patch:
        patch.setattr(SavePoints, "__call__", press)
        return run(wanted), len(seen)


@pytest.mark.parametrize("strategy", few(STRATEGIES, 1), ids=lambda s: s.label)
def test_a_run_may_be_interrupted_at_any_time(strategy, normalised, monkeypatch, tmp_path):
    """Here gradients wait to be averaged, parameters are on their way, and servers' queues are not empty."""
    path = tmp_path / "run.npz"
    for model, batching in (("digits-cnn", True), ("digits-cnn", False), (normalised, True)):
        wanted = experiment(strategy, model, batching=batching)
        whole, n_instants = interrupted_after(monkeypatch, -1, wanted)
        for share in (0.3, 0.41, 0.62, 0.87, 0.95):
            part, _ = interrupted_after(monkeypatch, round(share * n_instants), wanted)
            assert part.interrupted
            assert 0 < len(part.recorder.updates) < N_UPDATES
            part.save(path)
            assert_same(ddlsim.resume(path, wanted), whole)


def test_an_interrupt_from_the_progress_callback_stops_where_the_run_can_be_saved(tmp_path):
    def progress(now, n_updates, epoch, row):
        if n_updates == 12:
            raise KeyboardInterrupt

    path = tmp_path / "run.npz"
    part = run(experiment(), progress=progress)
    assert (part.interrupted, part.stop_reason) == (True, "interrupted")
    assert len(part.recorder.updates) == 12
    part.save(path)
    assert_same(ddlsim.resume(path, experiment()), run(experiment()))


@pytest.mark.posix
def test_ctrl_c_stops_a_run_where_it_can_be_saved_and_leaves_the_handler_alone(capfd, tmp_path):
    def progress(now, n_updates, epoch, row):
        if n_updates == 9:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    part = run(experiment(), progress=progress)
    assert signal.getsignal(signal.SIGINT) is before
    assert part.interrupted
    assert capfd.readouterr().err.count("Ctrl-C") == 1
    part.save(tmp_path / "run.npz")
    assert_same(ddlsim.resume(tmp_path / "run.npz", experiment()), run(experiment()))


@pytest.mark.posix
def test_the_second_ctrl_c_stops_at_once_and_leaves_nothing_to_save(monkeypatch, tmp_path):
    computed, compute = [], Learner._compute

    def press(learner, batches, params):
        computed.append(batches)
        if len(computed) == 7:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.001)  # or the two would be one
        return compute(learner, batches, params)

    monkeypatch.setattr(Learner, "_compute", press)
    part = run(experiment())
    assert part.interrupted
    assert len(computed) == 7
    with pytest.raises(ConfigError, match=r"in the middle of a computation \(interrupted\)"):
        part.save(tmp_path / "run.npz")


def test_a_run_can_be_saved_as_it_goes_on(tmp_path):
    path, seen = tmp_path / "run.npz", []

    def progress(now, n_updates, epoch, row):
        seen.append(path.read_bytes() if path.exists() else b"")

    whole = ddlsim.simulate(experiment(), progress=progress, checkpoint=path, checkpoint_every=1e-6)
    assert len(set(seen)) > N_UPDATES // 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    last = path.read_bytes()
    for content in (seen[3], seen[14], last):
        path.write_bytes(content)
        assert_same(ddlsim.resume(path, experiment(), checkpoint=path), whole)
        assert path.read_bytes() == last


def test_runs_that_ended_by_their_target_or_time_go_on_to_another(tmp_path):
    path, whole = tmp_path / "run.npz", run(experiment(updates=60, evaluate_every=4))
    target = run(experiment(updates=60, evaluate_every=4, target_accuracy=0.4))
    timed = run(experiment(updates=60, evaluate_every=4).with_(max_time=whole.end_time / 2.7))
    assert (target.stop_reason, timed.stop_reason) == ("target accuracy", "max_time")
    for part in (target, timed):
        part.save(path)
        assert_same(ddlsim.resume(path, part.experiment), part)
        assert_same(ddlsim.resume(path, experiment(updates=60, evaluate_every=4)), whole)


@pytest.mark.parametrize("every", ["2 ms", 7])
def test_charged_evaluations_by_simulated_time_are_repeated(every, tmp_path):
    path, more = tmp_path / "run.npz", {"evaluate_every": every, "charge_evaluation": True}
    run(experiment(STRATEGIES[3], updates=11, **more)).save(path)
    assert_same(ddlsim.resume(path, experiment(STRATEGIES[3], **more)), run(experiment(STRATEGIES[3], **more)))


@pytest.mark.slow
def test_without_jitter_many_things_happen_at_once(tmp_path):
    path = tmp_path / "run.npz"
    for strategy in STRATEGIES:
        whole = run(experiment(strategy, jitter=0.0))
        run(experiment(strategy, jitter=0.0, updates=10)).save(path)
        assert_same(ddlsim.resume(path, experiment(strategy, jitter=0.0)), whole)


def test_an_end_that_the_saved_run_is_beyond_is_refused(tmp_path):
    path = tmp_path / "run.npz"
    run(experiment(updates=20)).save(path)
    with pytest.raises(
        ConfigError, match=r"has made 20 updates, but the current limit \(updates\) ends the resumed run after 12"
    ):
        ddlsim.resume(path, experiment(updates=12))
    with pytest.raises(
        ConfigError, match=r"has made 20 updates, but the current limit \(max_time = 0.005\) ends the resumed run after"
    ):
        ddlsim.resume(path, experiment().with_(max_time=0.005))
    with pytest.raises(ConfigError, match=r"the current limit \(target loss\) ends the resumed run after 5"):
        ddlsim.resume(path, experiment(target_loss=2.3))


def test_an_interrupt_while_the_clock_catches_up_loses_nothing(tmp_path):
    def progress(now, n_updates, epoch, row):
        if n_updates == 4:
            raise KeyboardInterrupt

    path = tmp_path / "run.npz"
    run(experiment(updates=20)).save(path)
    part = ddlsim.resume(path, experiment(), progress=progress)
    with pytest.raises(ddlsim.DdlsimError, match="interrupted before it reached the state"):
        _ = part.params
    part.save(path)
    assert_same(ddlsim.resume(path, experiment()), run(experiment()))


@pytest.mark.parametrize(("change", "words"), [
    ({"batch_size": 16}, ["batch_size", "saved with 8", "has 16", "only the end of the run"]),
    ({"seed": 3}, ["seed", "saved with 0", "has 3"]),
    ({"cluster": "dgx1-v100"}, ["cluster", "'office-1gbe'", "'dgx1-v100'"]),
    ({"strategy": ddlsim.AllReduce("ring", overlap="layer")}, ["strategy.overlap", "'ddp'", "'layer'"]),
    ({"strategy": ddlsim.ParameterServer()}, ["strategy.type", "'all-reduce'", "'parameter-server'"]),
    ({"time_model": "lenet5"}, ["time_model", "None", "lenet5"]),
    ({"training": None, "max_time": 1.0}, ["training = None"]),
    ({"training": ddlsim.Training("shapes", updates=24)}, ["samples of shape"]),
    ({"training": ddlsim.Training(rate=0.05, updates=24, evaluate_every=5)}, ["training.optimizer.type", "'sgd'"]),
])  # fmt: skip
def test_another_experiment_is_refused(change, words, tmp_path):
    path = tmp_path / "run.npz"
    run(experiment(updates=5)).save(path)
    with pytest.raises(ConfigError) as error:
        ddlsim.resume(path, experiment().with_(**change))
    assert all(word in str(error.value) for word in words), error.value


def test_changed_data_are_noticed(tmp_path):
    path, data = tmp_path / "run.npz", ddlsim.load_digits()

    def learning_from(data):
        training = ddlsim.Training(data, updates=5)
        return ddlsim.Experiment(STAR, "digits-cnn", workers=2, batch_size=8, training=training)

    run(learning_from(data)).save(path)
    assert ddlsim.resume(path, learning_from("digits").with_()).stop_reason == "updates"
    other = ddlsim.DataSet(data.name, 0.5 * data.x, data.labels, data.class_names)
    with pytest.raises(ConfigError, match=r"training.data: the run was saved with 'digits"):
        ddlsim.resume(path, learning_from(other))


def test_what_cannot_be_saved_says_why(tmp_path):
    with pytest.raises(ConfigError, match="a timing-only run cannot be saved"):
        ddlsim.simulate(STAR, "lenet5", workers=2, steps=2).save(tmp_path / "run.npz")
    diverged = run(experiment(rate=1e30, updates=100))
    with pytest.raises(ConfigError, match=r"cannot be saved: .*diverged"):
        diverged.save(tmp_path / "run.npz")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(experiment(updates=5)).save(tmp_path / "none" / "run.npz")
    with pytest.raises(ConfigError, match="does not exist"):
        ddlsim.simulate(experiment(), checkpoint=tmp_path / "none" / "run.npz")
    with pytest.raises(ConfigError, match="no effect without training"):
        ddlsim.simulate(STAR, "lenet5", workers=2, steps=2, checkpoint=tmp_path / "run.npz")
    with pytest.raises(ConfigError, match=r"no such file; result.save"):
        ddlsim.resume(tmp_path / "run.npz", experiment())
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize("name", few(ALL, 15))
def test_every_strategy_continues_as_the_run_without_a_break(name, tmp_path):
    """Saved after 7 updates (between evaluations), then after 10 (with one): what waits or is under way comes back."""
    one, path = ALL[name], tmp_path / "run.npz"

    def experiment(updates):
        training = ddlsim.Training(
            one.data, rate=0.05, evaluate_every=5, optimizer=ddlsim.Momentum(0.9), updates=updates
        )
        return ddlsim.Experiment(
            STAR, one.model, one.strategy, one.batch_size, N_WORKERS, jitter=ddlsim.Lognormal(0.5), training=training
        )

    whole = run(experiment(N_UPDATES))
    run(experiment(7)).save(path)
    ddlsim.resume(path, experiment(10)).save(path)
    continued = ddlsim.resume(path, experiment(N_UPDATES))
    assert continued.params.tobytes() == whole.params.tobytes()
    assert continued.history.equals(whole.history)
    assert continued.recorder.updates == whole.recorder.updates
    assert continued.recorder.staleness == whole.recorder.staleness
