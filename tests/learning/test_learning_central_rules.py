"""The update rules of the centralised strategies, against the rules written out on arrays."""

import numpy as np
import pytest
from learning_reference import learn, plain_sgd

import ddlsim
from ddlsim.data import BatchStream, iid, load_digits, split
from ddlsim.errors import ConfigError
from ddlsim.learning.learner import Learner
from ddlsim.nn.network import build_network

N, BATCH, RATE = 4, 16, 0.1


class Plain:
    """The network and the workers' batches, without a simulator."""

    def __init__(self, n_workers):
        self.network = build_network("digits-cnn", 0)
        self.initial = self.network.initial_params
        self.train, _ = split(load_digits(), 0.2, 0)
        shards = iid(self.train.labels, n_workers, 0)
        self.batches = [BatchStream(shard, 0, rank) for rank, shard in enumerate(shards)]
        self.steps = [0] * n_workers

    def gradient(self, rank, params):
        """The gradient of the worker's next batch."""
        chosen = self.batches[rank].batch(self.steps[rank], BATCH)
        self.steps[rank] += 1
        return self.network.loss_and_gradient(params, self.train.x[chosen], self.train.labels[chosen])[1]


def iid_run(strategy, n_updates, n_workers=N, rate=RATE, **more):
    """Workers of equal speed, each with samples of its own."""
    more = {"training": ddlsim.Training(rate=rate, updates=n_updates, evaluate_every=1000)} | more
    return learn(strategy, n_workers, BATCH, **more)


def asynchronous(n_updates, rule, n_workers=N):
    """Workers of equal speed take turns: `rule(w, w_i, g_i, tau)` -> w, then the worker pulls."""
    plain = Plain(n_workers)
    params, held, versions = plain.initial, [plain.initial] * n_workers, [0] * n_workers
    for update in range(n_updates):
        rank = update % n_workers
        params = rule(params, held[rank], plain.gradient(rank, held[rank]), update - versions[rank])
        held[rank], versions[rank] = params, update + 1
    return params


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("strategy", [
    ddlsim.SoftSync(1), ddlsim.KSync(1), ddlsim.KAsync(1), ddlsim.KBatchAsync(1), ddlsim.BackupWorkers(0),
    ddlsim.BackupWorkers(0, restart=False), ddlsim.StaleSynchronous(0),
], ids=lambda s: s.label)  # fmt: skip
def test_one_worker_is_plain_sgd(strategy):
    assert learn(strategy, workers=1).params.tobytes() == plain_sgd(16, 30).tobytes()


@pytest.mark.parametrize("strategy", [
    ddlsim.KSync(N), ddlsim.KAsync(N), ddlsim.BackupWorkers(0), ddlsim.BackupWorkers(0, restart=False),
], ids=lambda s: s.label)  # fmt: skip
def test_waiting_for_everybody_is_one_worker_with_a_larger_batch(strategy):
    result = learn(strategy, N, 16, jitter=ddlsim.Lognormal(0.3))
    assert result.params.tobytes() == plain_sgd(64, 30).tobytes()


def test_no_slack_adds_up_what_a_synchronous_step_averages():
    """SSP(0) at rate eta/N is ParameterServer at eta, but for the rounding."""
    few = iid_run(ddlsim.StaleSynchronous(0), 20 * N, rate=RATE / N, jitter=ddlsim.Lognormal(0.3))
    whole = iid_run(ddlsim.ParameterServer(), 20)
    np.testing.assert_allclose(few.params, whole.params, atol=2e-6)


@pytest.mark.parametrize("strategy", [
    ddlsim.StaleSynchronous(float("inf")), ddlsim.KAsync(1), ddlsim.KBatchAsync(1), ddlsim.SoftSync(N, None),
], ids=lambda s: s.label)  # fmt: skip
def test_waiting_for_nobody_is_asynchronous(strategy):
    jitter = ddlsim.Lognormal(0.3)
    expected = iid_run(ddlsim.AsyncParameterServer(), 60, jitter=jitter).params
    assert iid_run(strategy, 60, jitter=jitter).params.tobytes() == expected.tobytes()


# ---------------------------------------------------------------- rules


class MeanSquare:
    """DC-ASGD-a, written out."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, w, old, g, tau):
        self.mean = 0.9 * self.mean + 0.1 * g * g
        return w - RATE * (g + 2.0 / np.sqrt(self.mean + 1e-7) * g * g * (w - old))


ASYNCHRONOUS_RULES = [
    pytest.param({}, lambda w, old, g, tau: w - RATE * g, id="plain"),
    pytest.param({"staleness_scaling": "inverse"}, lambda w, old, g, tau: w - RATE / max(tau, 1) * g, id="inverse"),
    pytest.param(
        {"staleness_scaling": ddlsim.ExponentialPenalty(0.7)}, lambda w, old, g, tau: w - RATE * 0.7**tau * g,
        id="exponential",
    ),
    pytest.param(
        {"delay_compensation": ddlsim.DelayCompensation(5.0)},
        lambda w, old, g, tau: w - RATE * (g + 5.0 * g * g * (w - old)), id="delay-compensation",
    ),
    pytest.param(
        {"delay_compensation": ddlsim.DelayCompensation(2.0, adaptive=0.9)}, MeanSquare(), id="adaptive-compensation"
    ),
]  # fmt: skip


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("options", "rule"), ASYNCHRONOUS_RULES)
def test_asynchronous_rules(options, rule, servers):
    if isinstance(rule, MeanSquare):
        rule.mean = 0.0
    result = iid_run(ddlsim.AsyncParameterServer(servers=servers, **options), 10 * N)
    np.testing.assert_allclose(result.params, asynchronous(10 * N, rule), atol=1e-6)
    if options:  # and it makes a difference
        assert np.abs(result.params - asynchronous(10 * N, ASYNCHRONOUS_RULES[0].values[1])).max() > 1e-5


def test_downpour_pushes_the_sum_of_its_own_steps():
    """Dean et al. 2012, algorithm 7.1, with n_fetch = n_push = 3 and two workers that take turns."""
    plain = Plain(2)
    params, held = plain.initial, [plain.initial] * 2
    for update in range(12):
        rank = update % 2
        local, accrued = held[rank], 0.0
        for _ in range(3):
            gradient = plain.gradient(rank, local)
            local, accrued = local - np.float32(RATE) * gradient, accrued + gradient
        params = held[rank] = params - np.float32(RATE) * accrued
    result = iid_run(ddlsim.AsyncParameterServer(accumulate=3), 12, 2)
    np.testing.assert_allclose(result.params, params, atol=2e-6)


@pytest.mark.parametrize("scaling", ["inverse", None])
@pytest.mark.parametrize("n", [1, 2])
def test_softsync_averages_gradients_with_a_rate_each(n, scaling):
    """w <- w - (1/c) sum_l alpha(tau_l) g_l, four workers in turn."""
    plain = Plain(N)
    c, version, gathered = N // n, 0, []
    params, held = plain.initial, [(plain.initial, 0)] * N
    for push in range(8 * N):
        rank = push % N
        tau = version - held[rank][1]
        gathered.append((1.0 / max(tau, 1) if scaling else 1.0) * plain.gradient(rank, held[rank][0]))
        if len(gathered) == c:
            params, version, gathered = params - np.float32(RATE) * np.mean(gathered, axis=0), version + 1, []
        held[rank] = params, version
    result = iid_run(ddlsim.SoftSync(n, scaling), 8 * n)
    np.testing.assert_allclose(result.params, params, atol=1e-6)


def test_k_batch_sync_takes_all_batches_at_the_same_parameters():
    """Two equal workers, k = 4: each gives two batches of its own per update."""
    plain = Plain(2)
    params = plain.initial
    for _ in range(10):
        gradients = [plain.gradient(rank, params) for _ in range(2) for rank in range(2)]
        params = params - np.float32(RATE) * np.mean(gradients, axis=0)
        plain.steps = [step + 1 for step in plain.steps]  # the third batch was cancelled
    result = iid_run(ddlsim.KBatchSync(4), 10, 2)
    np.testing.assert_allclose(result.params, params, atol=1e-6)


# ---------------------------------------------------------------- elastic averaging


@pytest.mark.parametrize("period", [1, 3])
def test_elastic_averaging_follows_its_equations(period):
    """x_i <- x_i - eta g_i - alpha (x_i - z); z <- z + alpha sum_i (x_i - z), all with the old x_i and z."""
    alpha, plain = 0.2, Plain(3)
    z, x = plain.initial, [plain.initial] * 3
    for step in range(12):
        pulls = [np.float32(alpha) * (each - z) if step % period == 0 else 0.0 for each in x]
        x = [each - RATE * plain.gradient(rank, each) - pulls[rank] for rank, each in enumerate(x)]
        z = z + sum(pulls)
    result = iid_run(ddlsim.ElasticAveraging(alpha, period), 12, 3)
    np.testing.assert_allclose(result.params, z, atol=1e-6)
    for replica, expected in zip(result.monitor.replicas(), x, strict=True):
        np.testing.assert_allclose(replica.read(), expected, atol=1e-6)
    assert result.history["consensus"].iloc[-1] > 0.0


@pytest.mark.parametrize("synchronous", [True, False])
def test_without_springs_workers_are_independent(synchronous):
    n_updates = 20 if synchronous else 20 * N
    result = iid_run(ddlsim.ElasticAveraging(0.0, 2, synchronous), n_updates)
    plain = Plain(N)
    for rank, replica in enumerate(result.monitor.replicas()):
        params = plain.initial
        for _ in range(20):
            params = params - RATE * plain.gradient(rank, params)
        assert replica.read().tobytes() == params.astype(np.float32).tobytes()
    assert result.params.tobytes() == plain.initial.tobytes()


def test_asynchronous_elastic_averaging_takes_turns():
    """Algorithm 1 of the paper, two workers of which one exchanges first."""
    alpha, plain = 0.25, Plain(2)
    z, x = plain.initial, [plain.initial] * 2
    for step in range(12):
        for rank in range(2):
            pull = np.float32(alpha) * (x[rank] - z) if step % 2 == 0 else 0.0
            x[rank] = x[rank] - pull - RATE * plain.gradient(rank, x[rank])
            z = z + pull
    result = iid_run(ddlsim.ElasticAveraging(alpha, 2, synchronous=False), 24, 2)
    np.testing.assert_allclose(result.params, z, atol=1e-6)


# ---------------------------------------------------------------- what is computed, and what cannot be


def test_cancelled_gradients_are_never_computed(monkeypatch):
    """Of four gradients a step, three are cancelled: one is computed."""
    computed = []
    original = Learner._compute
    monkeypatch.setattr(Learner, "_compute", lambda *arguments: computed.append(1) or original(*arguments))
    result = iid_run(ddlsim.KSync(1), 40, jitter=ddlsim.Exponential())
    assert len(result.recorder.updates) == 40
    assert len(computed) == 40


@pytest.mark.parametrize("optimizer", [ddlsim.LARS(), ddlsim.LAMB()], ids=["LARS", "LAMB"])
@pytest.mark.parametrize("strategy", [
    ddlsim.AsyncParameterServer(2), ddlsim.SoftSync(2, servers=2), ddlsim.KSync(2, servers=2),
    ddlsim.StaleSynchronous(1, servers=2),
], ids=lambda s: s.label)  # fmt: skip
def test_rules_for_whole_layers_need_one_server(strategy, optimizer):
    training = ddlsim.Training(updates=3, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"needs the norms of complete layers.*use servers = 1"):
        learn(strategy, training=training)


def test_elastic_workers_have_whole_layers():
    training = ddlsim.Training(updates=8, optimizer=ddlsim.LARS(trust=0.1))
    assert np.isfinite(learn(ddlsim.ElasticAveraging(0.2, servers=2), training=training).params).all()


def test_compensating_sums_is_refused():
    with pytest.raises(ConfigError, match="delay_compensation cannot be combined with accumulate = 2"):
        ddlsim.AsyncParameterServer(accumulate=2, delay_compensation=ddlsim.DelayCompensation())
