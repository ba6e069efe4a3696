"""FedAvg and FedBuff: identities, the papers' loops in NumPy, and what their rounds cost on the links."""

import numpy as np
import pytest
from decentralised_reference import BATCH, RATE, simulated, training
from learning_reference import STAR, learn

import ddlsim
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.streams import stream
from ddlsim.workload.model import load_model

CLOSE = {"rtol": 0, "atol": 2e-6}
COMPUTE, ON_LINK = 5e-3, 8e-3


class Clients:
    """Clients' local training as the papers write it: each goes on where it was in its own shard."""

    def __init__(self, n, **more):
        self.task = training(1, **more).task(load_model("digits-cnn"), n, seed=0)
        self.w = self.task.network.initial_params
        self.taken = [0] * n

    def update(self, k, n_steps, w, optimizer=None):
        optimizer, task = optimizer or ddlsim.SGD(), self.task
        state = optimizer.init(w)
        for _ in range(n_steps):
            part = task.shards[k].indices(self.taken[k], BATCH)
            self.taken[k] += BATCH
            _, gradient = task.network.loss_and_gradient(w, task.train.x[part], task.train.labels[part])
            w, state = optimizer.update(w, gradient, state, RATE)
        return w

    def sizes(self):
        return np.array([len(shard.shard) for shard in self.task.shards], float)


# ---------------------------------------------------------------- FedAvg


def test_all_clients_with_one_step_are_synchronous_sgd():
    """Two shards of 719 samples: the weights are 1/2."""
    together = simulated(ddlsim.AllReduce(), 2, 12)
    np.testing.assert_allclose(simulated(ddlsim.FedAvg(1.0, local_steps=1), 2, 12), together, **CLOSE)


def test_all_clients_of_equal_size_are_local_sgd():
    rounds, local = simulated(ddlsim.FedAvg(1.0, local_steps=4), 2, 5), simulated(ddlsim.LocalSGD(4), 2, 20)
    np.testing.assert_allclose(rounds, local, **CLOSE)


@pytest.mark.parametrize("optimizer", [ddlsim.SGD(), ddlsim.Momentum(0.5)], ids=lambda o: type(o).__name__)
def test_fedavg_as_written(optimizer):
    """2 of 5 clients a round, whose shards differ in size; momentum starts anew in every round."""
    more = {"sharding": ddlsim.Dirichlet(1.0), "optimizer": optimizer}
    clients, draws = Clients(5, **more), stream(0, 0, "rounds")
    sizes = clients.sizes()
    assert len(set(sizes)) > 1
    for _ in range(7):
        drawn = sorted(draws.choice(5, 2, replace=False).tolist())
        models = [clients.update(k, 3, clients.w, optimizer) for k in drawn]
        clients.w = np.average(models, axis=0, weights=sizes[drawn]).astype(np.float32)
    found = simulated(ddlsim.FedAvg(0.4, local_steps=3), 5, 7, **more)
    np.testing.assert_allclose(found, clients.w, **CLOSE)


def test_an_epoch_is_a_pass_over_the_shard():
    """Shards of 360, 359, 359 and 359 samples are 23 batches of 16."""
    epochs, steps = ddlsim.FedAvg(0.5, epochs=1), ddlsim.FedAvg(0.5, local_steps=23)
    assert simulated(epochs, 4, 3).tobytes() == simulated(steps, 4, 3).tobytes()
    assert learn(epochs, 4, training=training(2)).recorder.updates[0][1] == 2 * 23 * 16
    with pytest.raises(ConfigError, match="FedAvg: epochs = 1: epochs are passes over data"):
        ddlsim.simulate(STAR, "digits-cnn", epochs, 16, 4, steps=1)


def test_who_is_drawn_follows_from_the_seed_only():
    """Every client is drawn sooner or later, and no clock changes the order."""
    experiment = ddlsim.Experiment(STAR, "lenet5", ddlsim.FedAvg(0.5, local_steps=2), 8, 6, steps=18, warmup=0)
    steps = [
        [len(ends) for ends in ddlsim.simulate(experiment.with_(jitter=jitter)).recorder.step_end]
        for jitter in (ddlsim.NoJitter(), ddlsim.Lognormal(0.5))
    ]
    assert steps[0] == steps[1]
    assert min(steps[0]) > 0
    assert sum(steps[0]) == 6 * 18  # 18 rounds of 3 clients with 2 steps


def test_compressed_models_lose_nothing_for_ever():
    plain = simulated(ddlsim.FedAvg(0.5, local_steps=2), 4, 8)
    lossless = learn(ddlsim.FedAvg(0.5, local_steps=2), 4, training=training(8), compression=ddlsim.TopK(1.0)).params
    np.testing.assert_allclose(lossless, plain, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- FedBuff


def test_a_buffer_of_one_with_one_step_is_asynchronous_sgd():
    """Where the update takes no time: here clients make it, there the server does."""
    more = {"jitter": ddlsim.Lognormal(0.3), "training": training(40), "compute": ddlsim.Measured("1 ms", BATCH)}
    buffered = learn(ddlsim.FedBuff(1, 1, None), 4, BATCH, **more)
    alone = learn(ddlsim.AsyncParameterServer(), 4, BATCH, **more)
    assert buffered.recorder.updates == alone.recorder.updates
    assert buffered.recorder.staleness == alone.recorder.staleness
    np.testing.assert_allclose(buffered.params, alone.params, rtol=0, atol=1e-5)


def test_fedbuff_as_written():
    """In the order in which the clients have come: three of nearly equal speed, a buffer of two."""
    clients, n, v = Clients(3), 3, 0.0
    pulled, version, buffer = [(clients.w, 0)] * n, 0, []
    result = learn(
        ddlsim.FedBuff(2, 2, outer=ddlsim.Momentum(0.3), outer_rate=0.8), n, BATCH, training=training(12),
        speed=(1.0, 0.99, 0.98), compute=ddlsim.Measured("50 ms", 16),
    )  # fmt: skip
    stale = iter(result.recorder.staleness)
    order = sorted(
        (time, k) for k, ends in enumerate(result.recorder.step_end) for time in ends[1::2]
    )  # every second step is followed by a push
    for _, k in order:
        w, seen = pulled[k]
        delta = (w - clients.update(k, 2, w)).astype(np.float64)
        buffer.append((k, delta, version - seen))
        if len(buffer) == 2:
            assert [tau for _, _, tau in buffer] == [next(stale), next(stale)]
            v = 0.3 * v + np.mean([delta / np.sqrt(1 + tau) for _, delta, tau in buffer], axis=0)
            clients.w, buffer, version = (clients.w - 0.8 * v).astype(np.float32), [], version + 1
        pulled[k] = clients.w, version
        if version == 12:
            break
    assert max(result.recorder.staleness) > 0
    np.testing.assert_allclose(result.params, clients.w, rtol=0, atol=1e-5)


def test_staleness_is_counted_in_updates_of_the_buffer():
    """Between a client's pull and its push come N - 1 others in the mean, and with every K-th an update."""
    for n, buffer in ((6, 3), (5, 2)):
        experiment = ddlsim.Experiment(
            STAR, "lenet5", ddlsim.FedBuff(1, buffer), 8, n, steps=200, warmup=0, jitter=ddlsim.Exponential()
        )
        staleness = ddlsim.simulate(experiment).recorder.staleness
        assert np.mean(staleness) == pytest.approx((n - 1) / buffer, rel=0.02)


# ---------------------------------------------------------------- seconds and bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "two-layers.toml"
    path.write_text(
        'title = "Two equal layers"\nsources = ["made up"]\ninput = [1000]\n'
        'layers = [{ type = "dense", units = 1000 }, { type = "dense", units = 1000 }]\n'
    )
    return path


def timed(model, strategy, n, steps):
    """Links of S / B = 8 ms, a step of 5 ms; one more machine is the server."""
    hosts = star(n + 1, bandwidth=1.001e9, latency=0.0)
    compute = ddlsim.Measured(COMPUTE, 1)
    return ddlsim.simulate(hosts, model, strategy, 1, n, compute=compute, steps=steps, warmup=0)


@pytest.mark.parametrize(("n", "fraction", "m"), [(1, 1.0, 1), (4, 0.5, 2), (4, 1.0, 4), (5, 0.01, 1)])
def test_a_round_pulls_computes_and_pushes(model, n, fraction, m):
    """m models share the server's link down, and up: 2 m S / B + H t_c; 2 m S bytes."""
    result = timed(model, ddlsim.FedAvg(fraction, local_steps=3), n, 6)
    times = np.array([time for time, _ in result.recorder.updates])
    assert len(times) == int(np.ceil(6 * n / (3 * m)))
    np.testing.assert_allclose(np.diff(times, prepend=0.0), 2 * m * ON_LINK + 3 * COMPUTE, rtol=1e-9)
    # the next round is invited when the run ends, and has not sent anything
    assert result.nbytes_sent == pytest.approx(2 * m * len(times) * 8.008e6, rel=1e-9)


def test_servers_apply_what_they_are_given_time_for(model):
    quick, slow = (timed(model, ddlsim.FedAvg(0.5, local_steps=3, apply_time=t), 4, 6) for t in (0.0, "2 ms"))
    n_rounds = len(quick.recorder.updates)
    assert slow.end_time - quick.end_time == pytest.approx(n_rounds * 2e-3, rel=1e-9)


def test_a_buffered_client_computes_pushes_and_pulls(model):
    """Alone: H t_c + 2 S / B, the first update before its pull."""
    result = timed(model, ddlsim.FedBuff(3, 1), 1, 9)
    times = np.array([time for time, _ in result.recorder.updates])
    np.testing.assert_allclose(times, np.arange(1, 4) * (3 * COMPUTE + 2 * ON_LINK) - ON_LINK, rtol=1e-9)
    assert [samples for _, samples in result.recorder.updates] == [3, 3, 3]


@pytest.mark.parametrize(("wrong", "message"), [
    (ddlsim.FedAvg, "FedAvg: local_steps = None, epochs = None: set exactly one of them"),
    (lambda: ddlsim.FedAvg(0.1, 2, 1.0), "FedAvg: local_steps = 2, epochs = 1.0: set exactly one of them"),
    (lambda: ddlsim.FedAvg(0.0, 2), "FedAvg: fraction = 0.0"),
    (lambda: ddlsim.FedBuff(0), "FedBuff: local_steps = 0"),
    (lambda: ddlsim.FedBuff(2, staleness_scaling="sqrt"), "FedBuff: staleness_scaling = 'sqrt'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
