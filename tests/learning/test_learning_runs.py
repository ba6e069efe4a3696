"""Runs that learn: identities with plain SGD, stopping rules, errors."""

import math
from itertools import pairwise

import numpy as np
import pytest
from learning_reference import STAR, learn, plain_sgd

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network

OVERLAPS = ["none", "layer", "ddp", "horovod", "priority"]


@pytest.mark.parametrize("strategy", [
    *[ddlsim.AllReduce("ring", overlap=overlap) for overlap in OVERLAPS],
    ddlsim.ParameterServer(), ddlsim.AsyncParameterServer(), ddlsim.AsyncParameterServer(servers=3),
], ids=lambda s: f"{s.label}")  # fmt: skip
def test_one_worker_is_plain_sgd_bit_for_bit(strategy):
    assert learn(strategy, workers=1).params.tobytes() == plain_sgd(16, 30).tobytes()


@pytest.mark.parametrize("optimizer", [
    ddlsim.Momentum(0.9, nesterov=True), ddlsim.Adam(weight_decay=0.01), ddlsim.LARS(trust=0.1), ddlsim.LAMB(),
], ids=lambda o: type(o).__name__)  # fmt: skip
def test_optimizers_run_as_written(optimizer):
    training = ddlsim.Training("digits", rate=0.01, updates=10, sharding="shared", optimizer=optimizer)
    from ddlsim.optim.rules import bounds_of

    if hasattr(optimizer, "bounds"):
        optimizer = optimizer.with_bounds(bounds_of(build_network("digits-cnn", 0).slots))
    result = learn(ddlsim.AllReduce("ring"), workers=1, training=training)
    assert result.params.tobytes() == plain_sgd(16, 10, optimizer, 0.01).tobytes()


@pytest.mark.parametrize("strategy", [
    *[ddlsim.AllReduce("ring", overlap=overlap) for overlap in OVERLAPS],
    ddlsim.AllReduce("halving_doubling"), ddlsim.ParameterServer(servers=2, placement="colocated"),
], ids=lambda s: f"{s.label}")  # fmt: skip
def test_synchronous_workers_are_one_with_a_larger_batch(strategy):
    """N workers with batch b see what one with batch N b sees; float32 sums are ordered alike by batching."""
    jitter = ddlsim.Lognormal(0.3)
    assert learn(strategy, 4, 16, jitter=jitter).params.tobytes() == plain_sgd(64, 30).tobytes()


def test_batching_changes_nothing_but_the_rounding():
    def params(batching):
        training = ddlsim.Training("digits", rate=0.1, updates=30, sharding="iid", batching=batching)
        return learn(ddlsim.AllReduce("ring"), training=training).params

    difference = np.abs(params(True) - params(False)).max()
    assert 0.0 < difference < 1e-6


@pytest.mark.parametrize("strategy", [ddlsim.AllReduce("ring"), ddlsim.AsyncParameterServer(2)], ids=lambda s: s.label)
def test_the_same_seed_gives_the_same_run(strategy):
    first, again, other = (
        learn(strategy, jitter=ddlsim.Lognormal(0.3), seed=seed, training=ddlsim.Training(updates=40, rate=0.05))
        for seed in (1, 1, 2)
    )
    assert first.history.equals(again.history)
    assert first.params.tobytes() == again.params.tobytes() != other.params.tobytes()


def test_history_counts_what_happened():
    result = learn(ddlsim.AllReduce("ring"))
    history = result.history
    assert history["updates"].tolist() == [0, 10, 20, 30]
    assert history["samples"].tolist() == [0, 640, 1280, 1920]
    n_train = round(1797 * 0.8)
    assert history["epoch"].iloc[-1] == pytest.approx(1920 / n_train, rel=1e-3)
    nbytes = 4 * build_network("digits-cnn", 0).n_params
    assert history["nbytes"].iloc[-1] == pytest.approx(30 * 4 * 2 * 3 / 4 * nbytes)  # a ring sends 2 (N-1)/N S
    assert history["loss"].iloc[-1] < history["loss"].iloc[0]
    assert history["time"].iloc[-1] == result.end_time
    assert result.accuracy == history["accuracy"].iloc[-1]


@pytest.mark.parametrize(("rule", "reason"), [
    ({"epochs": 1.0}, "epochs"), ({"target_accuracy": 0.5, "updates": 500}, "target accuracy"),
    ({"target_loss": 1.0, "updates": 500}, "target loss"), ({"updates": 7}, "updates"),
])  # fmt: skip
def test_runs_end_by_their_rule(rule, reason):
    result = learn(ddlsim.AllReduce("ring"), training=ddlsim.Training(rate=0.2, evaluate_every=5, **rule))
    last = result.history.iloc[-1]
    assert result.stop_reason == reason
    if reason == "epochs":
        assert 1.0 <= last["epoch"] < 1.0 + 64 / 1437
    if reason == "target accuracy":
        assert result.history["accuracy"].iloc[-2] < 0.5 <= last["accuracy"]
        assert result.time_to_accuracy(0.5) == result.end_time
    assert result.time_to_accuracy(1.0) == math.inf


def test_a_moving_average_waits_for_several_evaluations():
    training = ddlsim.Training(rate=0.2, evaluate_every=5, updates=500, target_accuracy=0.5, moving_average=4)
    history = learn(ddlsim.AllReduce("ring"), training=training).history
    assert history["accuracy"].iloc[-4:].mean() >= 0.5 > history["accuracy"].iloc[-5:-1].mean()


def test_max_time_ends_a_run_and_missed_targets_are_said():
    training = ddlsim.Training(rate=0.1, target_accuracy=0.999)
    result = learn(ddlsim.AllReduce("ring"), training=training, max_time="20 ms")
    assert result.stop_reason == "max_time"
    assert result.end_time == 0.02
    assert any("target_accuracy = 0.999 was not reached; the best value was" in note for note in result.notes)


def test_a_batch_larger_than_the_training_set_is_noted():
    training = ddlsim.Training("digits", updates=1)
    notes = [
        ddlsim.simulate("office-1gbe", "digits-cnn", ddlsim.AllReduce(), size, 1, training=training).notes
        for size in (1438, 1439)
    ]
    assert notes == [(), ("batch_size = 1439 exceeds the training set of 1,438 samples, which repeat",)]


def test_evaluation_by_simulated_time():
    training = ddlsim.Training(rate=0.1, updates=100, evaluate_every="5 ms")
    history = learn(ddlsim.AllReduce("ring"), training=training).history
    ticks = (history["time"] // 0.005).tolist()
    assert len(ticks) > 5
    assert all(b > a for a, b in pairwise(ticks[:-1]))


def test_evaluation_costs_time_only_if_asked():
    def end(charge):
        training = ddlsim.Training(rate=0.1, updates=30, evaluate_every=10, charge_evaluation=charge)
        return learn(ddlsim.AllReduce("ring"), training=training)

    free, charged = end(False), end(True)
    each = free.workloads[0].forward_time * 359 / 16
    assert charged.end_time - free.end_time == pytest.approx(3 * each, rel=1e-6)  # the last is after the end
    assert charged.params.tobytes() == free.params.tobytes()


def test_a_diverging_run_says_when_and_who():
    result = learn(ddlsim.AllReduce("ring"), training=ddlsim.Training(rate=1e30, updates=100))
    assert result.stop_reason.startswith("diverged: the loss of worker ")
    assert "in its step" in result.stop_reason
    assert "lower the learning rate" in str(result)


def test_a_batch_that_grows_beside_the_end_of_a_step_counts_in_its_own_step():
    """With overlap a worker begins the next step, whose batch is larger, before the all-gathers of this one end.
    A twentieth of its 359 samples are 18, which three batches of 8 cover."""
    growing = ddlsim.GrowingBatch(8, (0.05,), factor=2)
    training = ddlsim.Training(updates=6, growing_batch=growing, evaluate_every=6)
    overlaps = [ddlsim.AllReduce(overlap=overlap) for overlap in ("none", "ddp", "horovod", "priority")]
    for strategy in (*overlaps, ddlsim.ShardedUpdate(overlap="none"), ddlsim.ShardedUpdate(overlap="layer")):
        result = ddlsim.simulate(
            "office-1gbe", "digits-cnn", strategy, 8, 4, training=training, compute=ddlsim.Affine("1 ms", "10 us")
        )
        assert [n for _, n in result.recorder.updates] == [32, 32, 32, 64, 64, 64]


def test_growing_batches_take_longer_and_fewer():
    growing = ddlsim.GrowingBatch(16, (1.0,), factor=4)
    training = ddlsim.Training(rate=0.1, epochs=2.5, growing_batch=growing)
    result = learn(ddlsim.AllReduce("ring"), training=training)
    samples = [n for _, n in result.recorder.updates]
    assert samples[:22] == [64] * 22
    assert set(samples[24:]) == {256}


def test_the_clock_may_be_that_of_another_model():
    training = ddlsim.Training(rate=0.1, updates=20, sharding="shared")
    small = learn(ddlsim.AllReduce("ring"), training=training)
    large = learn(ddlsim.AllReduce("ring"), training=training, time_model="resnet18")
    assert large.params.tobytes() == small.params.tobytes()
    timing = ddlsim.simulate(STAR, "resnet18", ddlsim.AllReduce("ring"), 16, 4, steps=18, optimizer="sgd")
    assert large.throughput == pytest.approx(timing.throughput, rel=1e-9)
    assert any("digits-cnn is trained, and resnet18 determines the simulated times" in note for note in large.notes)


@pytest.mark.parametrize(("change", "message"), [
    ({"model": "lenet5"}, "data set 'digits' has samples of shape"),
    ({"training": ddlsim.Training()}, "training has no end"),
    ({"training": "digits"}, "must be a ddlsim.Training"),
    ({"training": None, "time_model": "resnet50"}, "time_model has no effect without training"),
])  # fmt: skip
def test_what_does_not_fit_is_said(change, message):
    given = {"model": "digits-cnn", "training": ddlsim.Training(updates=3), "workers": 2} | change
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(STAR, **given)


@pytest.mark.parametrize(("fields", "message"), [
    ({"data": "digit"}, "did you mean 'digits'"), ({"sharding": "idd"}, "did you mean 'iid'"),
    ({"target_accuracy": 95}, "at most 1"), ({"evaluate_every": "5 MB"}, "MB"),
    ({"evaluate_every": 0}, "positive integer"),
    ({"optimizer": ddlsim.SGD}, "must be an optimizer"), ({"epochs": -1}, "above 0"),
    ({"moving_average": 0}, "positive integer"),
])  # fmt: skip
def test_bad_training_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        learn(ddlsim.AllReduce("ring"), training=ddlsim.Training(**({"updates": 3} | fields)))


# ---------------------------------------------------------------- numbers to predict


LINE = """
title = "A line"
trainable = true
input = [4]
layers = [{ type = "dense", units = 2 }]
"""


def plane(n=400, seed=0, shape=2):
    """Return y = x W + b with W, b of integers, as data; and W, b."""
    rng = np.random.default_rng(seed)
    x, shift = rng.normal(size=(n, 4)), [4.0, -5.0]
    weight = np.array([[1.0, -2.0], [0.0, 3.0], [2.0, 1.0], [-1.0, 0.0]])
    return ddlsim.data.from_arrays(x, (x @ weight + shift)[:, :shape]), weight, shift


@pytest.fixture
def line(tmp_path):
    (tmp_path / "line.toml").write_text(LINE)
    return tmp_path / "line.toml"


@pytest.mark.parametrize("strategy", [ddlsim.AllReduce(), ddlsim.LocalSGD(4), ddlsim.AsyncParameterServer()],
                         ids=lambda s: s.label)  # fmt: skip
def test_a_regression_finds_the_plane_that_the_numbers_lie_on(strategy, line):
    data, weight, shift = plane()
    training = ddlsim.Training(data, loss="mean_squared_error", rate=0.1, epochs=30, target_loss=1e-6)
    result = ddlsim.simulate("office-1gbe", line, strategy, 8, 4, training=training)
    assert result.evaluations[-1].loss <= 1e-6
    assert math.isnan(result.accuracy)
    assert np.allclose(result.params[:8].reshape(2, 4), weight.T, atol=0.01)
    assert np.allclose(result.params[8:], shift, atol=0.01)
    assert "learned       loss " in str(result)
    assert "accuracy nan" not in str(result)


def test_the_loss_of_a_regression_is_the_mean_over_targets(line):
    data, *_ = plane()
    training = ddlsim.Training(data, held_out=data, loss="mean_squared_error", updates=1, rate=0.0)
    result = ddlsim.simulate("office-1gbe", line, batch_size=8, workers=2, training=training)
    outputs = build_network(line, 0).predict(result.params, data.x)
    assert result.evaluations[-1].loss == pytest.approx(float(np.mean((outputs - data.labels) ** 2)), rel=1e-5)


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        (plane()[0], {}, "loss = 'cross_entropy' does not support regression targets (data set 'arrays')"),
        (plane(shape=1)[0], {"loss": "mean_squared_error"}, "has labels of shape (1,) and type float32 per sample"),
        (plane()[0], {"loss": "mean_squared_error", "sharding": "by_class"}, "use 'iid' or 'shared'"),
        (plane()[0], {"loss": "mean_squared_error", "sharding": ddlsim.Dirichlet(0.5)}, "use 'iid' or 'shared'"),
        (plane()[0], {"loss": "mean_squared_error", "target_accuracy": 0.9}, "use target_loss"),
    ],
)
def test_a_regression_that_makes_no_sense_is_refused(data, more, said, line):
    training = ddlsim.Training(data, updates=1, **more)
    with pytest.raises(ConfigError) as error:
        ddlsim.simulate("office-1gbe", line, batch_size=8, workers=2, training=training)
    assert said in str(error.value)
