"""What models decentralised strategies arrive at: identities, and NumPy loops written out."""

import numpy as np
import pytest
from decentralised_reference import Workers, simulated, training
from draws import few
from learning_reference import STAR, learn

import ddlsim
from ddlsim.data.dataset import from_arrays
from ddlsim.errors import ConfigError
from ddlsim.nn.network import build_network

CLOSE = {"rtol": 0, "atol": 2e-6}


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize(
    "optimizer", [ddlsim.SGD(), ddlsim.Momentum(0.9), ddlsim.Momentum(0.9, nesterov=True)], ids=str
)
def test_averaging_after_every_step_is_synchronous(optimizer):
    """mean_i(x - eta v_i) = x - eta mean_i(v_i), and momentum is linear in the gradients."""
    local, together = (
        simulated(strategy, 4, 20, optimizer=optimizer, rate=0.02)
        for strategy in (ddlsim.LocalSGD(1), ddlsim.AllReduce())
    )
    np.testing.assert_allclose(local, together, **CLOSE)


def test_adam_is_not_linear_so_local_states_make_a_difference():
    local, together = (
        simulated(strategy, 4, 20, optimizer=ddlsim.Adam(), rate=0.001)
        for strategy in (ddlsim.LocalSGD(1), ddlsim.AllReduce())
    )
    assert np.abs(local - together).max() > 1e-4


def test_before_its_start_epoch_local_sgd_is_all_reduce():
    more = {"optimizer": ddlsim.Momentum(0.9), "rate": 0.02}
    late = simulated(ddlsim.LocalSGD(4, start_epoch=10), 4, 20, **more)
    assert late.tobytes() == simulated(ddlsim.AllReduce(), 4, 20, **more).tobytes()


def test_post_local_sgd_switches_where_it_says():
    """Half an epoch of 1,438 samples is 11.2 steps of 64: 12 synchronous steps, then local ones."""
    assert learn(ddlsim.LocalSGD(4), 4, training=training(1)).history.epoch.iloc[-1] == pytest.approx(64 / 1438)
    workers = Workers(4)
    for _ in range(12):
        gradient = np.mean(workers.gradients(), axis=0, dtype=np.float64).astype(np.float32)
        workers.follow([x - 0.1 * gradient for x in workers.x])
    for step in range(1, 11):
        workers.local_steps()
        if step % 4 == 0:
            workers.follow([workers.mean()] * 4)
    np.testing.assert_allclose(simulated(ddlsim.LocalSGD(4, start_epoch=0.5), 4, 22), workers.mean(), **CLOSE)


@pytest.mark.parametrize("n", few([1, 3, 4], 1, start=1))
@pytest.mark.parametrize(
    "optimizer", [ddlsim.SGD(), ddlsim.Momentum(0.9, nesterov=True), ddlsim.Adam(weight_decay=0.01)], ids=str
)
@pytest.mark.parametrize("overlap", ["none", "layer"])
def test_a_sharded_update_is_the_whole_update(optimizer, n, overlap):
    """1,898 parameters in 3 shards are 632, 633 and 633; every element sees the same arithmetic."""
    strategies = ddlsim.ShardedUpdate(overlap=overlap), ddlsim.AllReduce("ring", overlap="none")
    rate = 0.001 if isinstance(optimizer, ddlsim.Adam) else 0.05
    sharded, whole = (simulated(s, n, 12, optimizer=optimizer, rate=rate) for s in strategies)
    assert sharded.tobytes() == whole.tobytes()


@pytest.mark.parametrize("period", [1, 3])
def test_an_average_without_delay_and_merge_weight_is_local_sgd(period):
    late, local = ddlsim.DaSGD(period, delay=0, merge=0.0), ddlsim.LocalSGD(period)
    assert simulated(late, 4, 20).tobytes() == simulated(local, 4, 20).tobytes()


def test_workers_that_keep_everything_of_their_own_are_independent():
    workers = Workers(4)
    for _ in range(15):
        workers.local_steps()
    np.testing.assert_allclose(simulated(ddlsim.DaSGD(2, 1, merge=1.0), 4, 15), workers.mean(), **CLOSE)
    np.testing.assert_allclose(simulated(ddlsim.LocalSGD(100), 4, 15), workers.mean(), **CLOSE)
    np.testing.assert_allclose(simulated(ddlsim.OverlapLocalSGD(2, alpha=0.0), 4, 15), workers.mean(), **CLOSE)


def test_block_momentum_zero_is_local_sgd():
    block, local = ddlsim.BMUF(4, block_momentum=0.0), ddlsim.LocalSGD(4)
    np.testing.assert_allclose(simulated(block, 4, 20), simulated(local, 4, 20), **CLOSE)


# ---------------------------------------------------------------- loops written out


@pytest.mark.parametrize("optimizer", [ddlsim.SGD(), ddlsim.Momentum(0.5)], ids=str)
def test_local_sgd_as_written(optimizer):
    workers = Workers(3, optimizer)
    for k in range(1, 18):
        workers.local_steps()
        if k % 5 == 0:
            workers.follow([workers.mean()] * 3)
    np.testing.assert_allclose(simulated(ddlsim.LocalSGD(5), 3, 17, optimizer=optimizer), workers.mean(), **CLOSE)


@pytest.mark.parametrize(("period", "delay", "xi"), [(4, 1, 0.25), (3, 3, 0.5), (1, 1, 0.0), (5, 2, 0.9)])
def test_delayed_averaging_as_written(period, delay, xi):
    workers, snapshots = Workers(3), {}
    for k in range(1, 20):
        workers.local_steps()
        if k - delay in snapshots:
            workers.follow([xi * x + (1 - xi) * snapshots[k - delay] for x in workers.x])
        if k % period == 0:
            snapshots[k] = workers.mean()
    np.testing.assert_allclose(simulated(ddlsim.DaSGD(period, delay, xi), 3, 19), workers.mean(), **CLOSE)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_overlap_local_sgd_as_written(momentum):
    """The paper's form, in which z and v are the same everywhere."""
    workers, alpha = Workers(4), 0.6
    z, v = workers.mean(), np.zeros_like(workers.mean())
    for k in range(1, 18):
        workers.local_steps()
        if k % 4 == 0:
            workers.follow([(1 - alpha) * x + alpha * z for x in workers.x])
            v = momentum * v + workers.mean() - z
            z = z + v
    np.testing.assert_allclose(
        simulated(ddlsim.OverlapLocalSGD(4, alpha, momentum), 4, 17), workers.mean(), rtol=0, atol=1e-5
    )


def test_cocod_sgd_as_written():
    workers = Workers(4)
    z, begun = workers.mean(), list(workers.x)
    for k in range(1, 18):
        workers.local_steps()
        if k % 4 == 0:
            workers.follow([z + (x - s) for x, s in zip(workers.x, begun, strict=True)])
            z, begun = workers.mean(), list(workers.x)
    np.testing.assert_allclose(simulated(ddlsim.CoCoDSGD(4), 4, 17), workers.mean(), **CLOSE)


@pytest.mark.parametrize(("momentum", "rate"), [(None, 1.0), (0.5, 0.8)])
def test_bmuf_as_written(momentum, rate):
    workers = Workers(4)
    w, delta = workers.mean(), 0.0
    for k in range(1, 18):
        workers.local_steps()
        if k % 4 == 0:
            move = workers.mean().astype(np.float64) - w
            delta = (0.75 if momentum is None else momentum) * delta + rate * move
            w = (w + delta).astype(np.float32)
            workers.follow([w] * 4)
    np.testing.assert_allclose(simulated(ddlsim.BMUF(4, momentum, rate), 4, 17), workers.mean(), **CLOSE)


def test_adacomm_averages_as_often_as_the_loss_says():
    """Evaluated after every step, the history shows each average's loss, and the bytes when it was made."""
    strategy = ddlsim.AdaComm(9, interval=2)
    history = learn(strategy, 4, training=training(120, evaluate_every=1)).history
    losses, nbytes = history["loss"].to_numpy(), history["nbytes"].to_numpy()
    averaged = np.flatnonzero(np.diff(nbytes)) + 1
    expected, period, last = [], 9, 0
    while (last := last + period) <= 120:
        expected.append(last)
        if len(expected) % 2 == 0:
            period = int(np.ceil(np.sqrt(losses[last] / losses[0]) * 9))
    assert averaged.tolist() == expected
    assert period < 5  # the rule has done something


def test_adacomm_counts_intervals_in_simulated_time_too():
    def rounds(interval):
        nbytes = learn(ddlsim.AdaComm(9, interval), 4, training=training(120)).nbytes_sent
        return round(nbytes / (2 * 3 * 4 * 1898))

    assert rounds("1 h") == 120 // 9  # the period is never looked at again
    assert rounds("1 ms") > 120 // 9


# ---------------------------------------------------------------- a quadratic, where everything is known


def quadratic(folder):
    """Two workers with a class each, full batches and the squared error of a linear model.

    Returns the model file, the data, each worker's Hessian and optimum, and the initial parameters.
    """
    path = folder / "line.toml"
    path.write_text(
        'title = "A line"\nsources = ["made up"]\ntrainable = true\ninput = [3]\n'
        'layers = [{ type = "dense", units = 2 }]\n'
    )
    draws = np.random.default_rng(5)
    data = from_arrays(draws.normal(size=(40, 3)) + np.repeat([[0.5], [-0.5]], 20, axis=0), np.repeat([0, 1], 20))
    network = build_network(path, 0, np.float64, "mean_squared_error")

    def gradient(part, w):
        return network.loss_and_gradient(w, data.x[part], np.eye(2)[data.labels[part]])[1]

    known = []
    for part in (slice(0, 20), slice(20, 40)):
        at_zero = gradient(part, np.zeros(8))
        hessian = np.array([gradient(part, unit) - at_zero for unit in np.eye(8)]).T
        known.append((hessian, np.linalg.solve(hessian, -at_zero)))
    return path, data, known, build_network(path, 0).initial_params.astype(np.float64)


@pytest.mark.parametrize(("tau", "rounds"), [(1, 3), (7, 1), (7, 4)])
def test_local_sgd_on_a_quadratic(tau, rounds, tmp_path):
    """A round takes w to w* + mean_i((I - eta A_i)^tau (w - w_i*) + w_i* - w*), whatever w* is."""
    path, data, known, w = quadratic(tmp_path)
    for _ in range(rounds):
        w = np.mean([
            np.linalg.matrix_power(np.eye(8) - 0.2 * hessian, tau) @ (w - best) + best for hessian, best in known
        ], axis=0)  # fmt: skip
    task = ddlsim.Training(
        data, held_out=data, rate=0.2, sharding="by_class", loss="mean_squared_error", updates=tau * rounds
    )
    result = ddlsim.simulate(STAR, path, ddlsim.LocalSGD(tau), 20, 2, training=task)
    np.testing.assert_allclose(result.params, w, rtol=0, atol=1e-6)
    assert np.abs(known[0][1] - known[1][1]).max() > 0.1  # they do not want the same


def test_local_steps_leave_local_sgd_short_of_the_common_optimum(tmp_path):
    """With different optima the fixed point for tau > 1 is not w* (Koloskova et al. 2020); for tau = 1 it is."""
    path, data, known, _ = quadratic(tmp_path)
    best = np.linalg.solve(sum(a for a, _ in known), sum(a @ b for a, b in known))

    def distance(tau):
        task = ddlsim.Training(
            data, held_out=data, rate=0.2, sharding="by_class", loss="mean_squared_error", updates=420,
            evaluate_every=420,
        )  # fmt: skip
        return np.abs(ddlsim.simulate(STAR, path, ddlsim.LocalSGD(tau), 20, 2, training=task).params - best).max()

    assert distance(1) < 1e-3 < 0.01 < distance(20)


# ---------------------------------------------------------------- mistakes


def in_words(value):
    """Ids that are the same in every process: functions have addresses."""
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ddlsim.LocalSGD(0), "LocalSGD: period = 0: must be a positive integer"),
    (lambda: ddlsim.LocalSGD(4, start_epoch=-1), "start_epoch = -1: must be finite"),
    (lambda: ddlsim.LocalSGD(4, rank_order="topologie"), "rank_order = 'topologie': .* did you mean 'topology'"),
    (lambda: ddlsim.AdaComm(interval=0), "AdaComm: interval = 0"),
    (lambda: ddlsim.AdaComm(interval="10 MB"), "size, not a time"),
    (lambda: ddlsim.BMUF(block_momentum=1.0), "at least 0 and below 1"),
    (lambda: ddlsim.BMUF(block_rate=0.0), "block_rate = 0.0: must be finite and above 0"),
    (lambda: ddlsim.DaSGD(4, delay=5), "DaSGD: delay = 5: must be from 0 to 4, the averaging period"),
    (lambda: ddlsim.DaSGD(merge=50), "DaSGD: merge = 50: must be between 0 and 1"),
    (lambda: ddlsim.OverlapLocalSGD(alpha=2), "OverlapLocalSGD: alpha = 2"),
    (lambda: ddlsim.OverlapLocalSGD(momentum=1), "OverlapLocalSGD: momentum = 1"),
    (lambda: ddlsim.ShardedUpdate(overlap="horovod"), "overlap = 'horovod': buckets that are fused or split"),
    (lambda: ddlsim.ShardedUpdate(overlap="lyer"), "unknown overlap 'lyer'; did you mean 'layer'"),
    (lambda: ddlsim.ShardedUpdate(reduce_scatter=3), "ShardedUpdate: reduce_scatter = 3: must be a name"),
    (lambda: ddlsim.LocalSGD(algorithm="rign"), "did you mean 'ring'"),
    (lambda: ddlsim.ShardedUpdate(all_gather="rign"), "unknown all_gather algorithm 'rign'; did you mean 'ring'"),
], ids=in_words)  # fmt: skip
def test_bad_fields_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("strategy", "more", "message"), [
    (ddlsim.LocalSGD(4, start_epoch=2), {}, "start_epoch = 2: epochs are passes over data; set training="),
    (ddlsim.AdaComm(), {}, "AdaComm: its period depends on the loss; set training="),
    (ddlsim.LocalSGD(rank_order=(0, 0)), {}, r"must contain each rank from 0 to 1 once"),
], ids=in_words)  # fmt: skip
def test_what_does_not_fit_the_run_is_refused(strategy, more, message):
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(STAR, "digits-cnn", strategy, 16, 2, **more)
