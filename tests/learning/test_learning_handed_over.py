"""One model is handed over: parameters, their batch normalisation statistics, and the row that was evaluated with them.

Beyond what ``test_learning_conformance`` asks, with a network that normalises its batches:

1. ``result.params`` and ``result.statistics`` are the model of the history's last row, for every strategy; so are those
   of a saved run.
2. One worker alone has the statistics of plain SGD, wherever its parameters are those.
3. Which number a worker has changes nothing: not the slow worker 0's statistics are evaluated, but the model's.
4. Written out in NumPy: what synchronous SGD, local SGD, D-PSGD and K-sync do with statistics. A cancelled gradient
   leaves no trace in them.
"""

import dataclasses
from dataclasses import dataclass

import networkx
import numpy as np
import pytest
from decentralised_reference import ThenNothing
from learning_reference import STAR
from test_learning_conformance import CASES, each

import ddlsim
from ddlsim.data import BatchStream, iid, load_digits, split
from ddlsim.errors import DdlsimError
from ddlsim.learning.learner import DivergedError, evaluation
from ddlsim.learning.values import DataPlane
from ddlsim.nn.network import build_network

NORMALISED = """
title = "small, with batch normalisation"
sources = ["made for this test"]
input = [1, 8, 8]
trainable = true
layers = [
  { type = "conv", channels = 4, kernel = 3, padding = 1, bias = false },
  { type = "batch_norm" },
  { type = "relu" },
  { type = "max_pool", kernel = 2 },
  { type = "batch_norm", momentum = 0.3 },
  { type = "flatten" },
  { type = "dense", units = 10 },
]
"""
BATCH, RATE = 8, 0.05
#: no two workers meet by being equally fast, and number 0 is far behind
SPEEDS = (0.23, 1.0, 0.81, 0.62, 0.93)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "normalised.toml"
    path.write_text(NORMALISED)
    return path


@dataclass(frozen=True)
class Renumbered(ddlsim.Training):
    """Worker number r gets the samples of number ``order[r]``."""

    order: tuple[int, ...] = ()

    def _shards(self, train, n_workers, seed):
        shards = super()._shards(train, n_workers, seed)
        return [shards[i] for i in self.order if i < len(shards)]  # replicas may be fewer than workers


def run(model, strategy, order, *, n_samples=24 * 4 * BATCH, **more):
    batch = BATCH
    if isinstance(strategy, ddlsim.Parallel):  # whose batch is that of all workers together
        strategy = dataclasses.replace(strategy, micro_batch=BATCH)
        batch = BATCH * len(order) // strategy.pipeline
    elif isinstance(strategy, ddlsim.FSDP):
        strategy, batch = dataclasses.replace(strategy, micro_batch=BATCH), BATCH * len(order)
    elif isinstance(strategy, ddlsim.Hybrid):
        batch = BATCH * len(order) * strategy.micro_batches
    more = {"epochs": n_samples / 1437, "rate": RATE, "evaluate_every": 10} | more
    return ddlsim.simulate(
        STAR, model, strategy, batch, len(order), training=Renumbered("digits", order=order, **more),
        compute=ddlsim.Measured("2 ms", BATCH), speed=tuple(SPEEDS[i] for i in order),
    )  # fmt: skip


def evaluated(result):
    """Loss and accuracy of what the run handed over, worked out here."""
    task = result.monitor.learner.task
    x, labels = task.held_out.x, task.held_out.labels
    z = task.network.predict(result.params, x, result.statistics).astype(np.float64)
    log = z - z.max(axis=1, keepdims=True)
    log -= np.log(np.exp(log).sum(axis=1, keepdims=True))
    return -log[np.arange(len(labels)), labels].mean(), (z.argmax(axis=1) == labels).mean()


PAIRS = networkx.Graph([(0, 1), (2, 3)])  # one neighbour each: no draw of a partner depends on a worker's number
SYMMETRIC = {
    "AD-PSGD (ring)": ddlsim.ADPSGD(PAIRS), "gossip SGD (p = 0.5, complete)": ddlsim.GossipSGD(1.0, PAIRS),
    "FedAvg (0.5 of the clients, 4 steps)": ddlsim.FedAvg(1.0, local_steps=4),  # nor that of the clients
}  # fmt: skip


@each(2)
def test_what_is_handed_over_is_the_last_row_and_numbers_do_not_matter(case, normalised, tmp_path):
    n = case.n_workers
    order = tuple(range(n))
    strategy = SYMMETRIC.get(case.strategy.label, case.strategy)
    result = run(normalised, strategy, order, rate=case.rate / 2)
    loss, accuracy = evaluated(result)
    last = result.evaluations[-1]
    assert loss == pytest.approx(last.loss, rel=1e-12)
    assert accuracy == last.accuracy
    assert not np.array_equal(result.statistics, build_network(normalised, 0).initial_state)

    result.save(tmp_path / "run.npz")
    again = ddlsim.resume(tmp_path / "run.npz", result.experiment)
    assert again.history.equals(result.history)
    assert again.params.tobytes() == result.params.tobytes()
    assert again.statistics.tobytes() == result.statistics.tobytes()

    other = run(normalised, strategy, order[n // 2 :] + order[: n // 2], rate=case.rate / 2)
    np.testing.assert_allclose(other.statistics, result.statistics, rtol=2e-4, atol=2e-6)
    assert other.evaluations[-1].loss == pytest.approx(last.loss, rel=2e-4)
    assert other.evaluations[-1].accuracy == pytest.approx(accuracy, abs=1 / 360)


def plain(model, n_updates, rate=RATE):
    """Parameters and statistics of one worker, written out."""
    network = build_network(model, 0)
    train, _ = split(load_digits(), 0.2, 0)
    batches = BatchStream(iid(train.labels, 1, 0)[0], 0, 0)
    params, state = network.initial_params, network.initial_state.copy()
    for step in range(n_updates):
        chosen = batches.batch(step, BATCH)
        gradient = network.loss_and_gradient(params, train.x[chosen], train.labels[chosen], None, state)[1]
        params = (params - np.float32(rate) * gradient).astype(np.float32)
    return params, state


COMPRESSED = [
    (ddlsim.AllReduce("ring"), ddlsim.TopK(0.5)),
    (ddlsim.ParameterServer(servers=2), ddlsim.Compression(ddlsim.FP16(), down=ddlsim.FP16())),
    (ddlsim.AsyncParameterServer(servers=2), ddlsim.Compression(ddlsim.TopK(0.5), down=ddlsim.TopK(0.5))),
]


@pytest.mark.slow
def test_one_worker_has_the_statistics_of_plain_sgd(normalised):
    params, state = plain(normalised, 12)
    training = ddlsim.Training("digits", rate=RATE, updates=12, sharding="shared", evaluate_every=5)
    for case in CASES:
        if case.alone:
            result = ddlsim.simulate(STAR, normalised, case.strategy, BATCH, 1, training=training)
            np.testing.assert_allclose(result.params, params, rtol=0, atol=1e-6, err_msg=str(case))
            np.testing.assert_allclose(result.statistics, state, rtol=0, atol=2e-6, err_msg=str(case))


@pytest.mark.parametrize(("strategy", "compression"), COMPRESSED, ids=lambda each: str(getattr(each, "label", "")))
def test_statistics_are_not_compressed(strategy, compression, normalised):
    """With a rate of 0 they depend on the batches only."""
    still = ThenNothing(-1.0)
    training = ddlsim.Training("digits", rate=still, updates=8, sharding="shared", evaluate_every=5)
    result = ddlsim.simulate(STAR, normalised, strategy, BATCH, 1, training=training, compression=compression)
    np.testing.assert_allclose(result.statistics, plain(normalised, 8, 0.0)[1], rtol=0, atol=2e-6)


# ---------------------------------------------------------------- written out


class Team:
    """N models with statistics of their own; ``step`` counts the batches that each has drawn."""

    def __init__(self, model, n):
        self.network, self.n = build_network(model, 0), n
        self.task = ddlsim.Training("digits", rate=RATE, updates=1).task(self.network.model, n, 0)
        self.w = [self.network.initial_params.astype(np.float64)] * n
        self.s = [self.network.initial_state.astype(np.float64)] * n
        self.momentum = 1.0 - self.network.state_keep.astype(np.float64)
        self.step = 0

    def draw(self, ranks):
        """Gradients and batch statistics of workers at their models."""
        found = []
        for rank in ranks:
            chosen = self.task.shards[rank].indices(self.step * BATCH, BATCH)
            state = np.zeros_like(self.network.initial_state)
            x, labels = self.task.train.x[chosen], self.task.train.labels[chosen]
            gradient = self.network.loss_and_gradient(self.w[rank].astype(np.float32), x, labels, None, state)[1]
            found.append((gradient.astype(np.float64), state / self.momentum))
        self.step += 1
        return [np.array(each) for each in zip(*found, strict=True)]

    def moved(self, w, s, gradient, batch):
        return w - RATE * gradient, s + self.momentum * (batch - s)

    def together(self, ranks):
        gradients, batches = self.draw(ranks)
        w, s = self.moved(self.w[0], self.s[0], gradients.mean(axis=0), batches.mean(axis=0))
        self.w, self.s = [w] * self.n, [s] * self.n

    def alone(self):
        for rank, (gradient, batch) in enumerate(zip(*self.draw(range(self.n)), strict=True)):
            self.w[rank], self.s[rank] = self.moved(self.w[rank], self.s[rank], gradient, batch)

    def mix(self, matrix):
        self.w, self.s = list(matrix @ np.array(self.w)), list(matrix @ np.array(self.s))


def check(result, team):
    np.testing.assert_allclose(result.params, np.mean(team.w, axis=0), rtol=0, atol=5e-6)
    np.testing.assert_allclose(result.statistics, np.mean(team.s, axis=0), rtol=0, atol=2e-5)


def equally_fast(model, strategy, n, updates, **more):
    training = ddlsim.Training("digits", rate=RATE, updates=updates, evaluate_every=5)
    return ddlsim.simulate(STAR, model, strategy, BATCH, n, training=training, **more)


SYNCHRONOUS = [ddlsim.AllReduce("ring"), ddlsim.ParameterServer(servers=2), ddlsim.ShardedUpdate()]


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=lambda s: s.label)
def test_synchronous_statistics_take_in_the_mean_of_the_batches(strategy, normalised):
    team = Team(normalised, 3)
    for _ in range(12):
        team.together(range(3))
    check(equally_fast(normalised, strategy, 3, 12), team)


def test_local_sgd_averages_statistics_with_parameters(normalised):
    team = Team(normalised, 3)
    for step in range(1, 11):
        team.alone()
        if step % 4 == 0:
            team.mix(np.full((3, 3), 1 / 3))
    check(equally_fast(normalised, ddlsim.LocalSGD(4), 3, 10), team)


def without_learning(model, strategy, n, updates):
    """With a rate of 0 the parameters stay as they are, and what becomes of the statistics is easily written out."""
    training = ddlsim.Training("digits", rate=ThenNothing(-1.0), updates=updates, evaluate_every=5)
    return ddlsim.simulate(STAR, model, strategy, BATCH, n, training=training).statistics


OUTER = [ddlsim.BMUF(4), ddlsim.DiLoCo(4), ddlsim.SlowMo(4), ddlsim.DiLoCo(4, outer=ddlsim.Adam(), outer_rate=0.1)]


@pytest.mark.parametrize("strategy", OUTER, ids=lambda s: s.label)
def test_outer_optimizers_do_not_move_statistics(strategy, normalised):
    local = without_learning(normalised, ddlsim.LocalSGD(4), 3, 16)
    np.testing.assert_allclose(without_learning(normalised, strategy, 3, 16), local, rtol=0, atol=2e-6)


@pytest.mark.parametrize("strategy", [ddlsim.SPARTA(0.3), ddlsim.CHOCOSGD(0.6)], ids=lambda s: s.label)
def test_what_mixes_no_statistics_and_what_keeps_their_mean(strategy, normalised):
    """Without learning both hand over the mean of what independent workers have."""
    team = Team(normalised, 3)
    for _ in range(10):
        for rank, batch in enumerate(team.draw(range(3))[1]):
            team.s[rank] = team.s[rank] + team.momentum * (batch - team.s[rank])
    found = without_learning(normalised, strategy, 3, 10)
    np.testing.assert_allclose(found, np.mean(team.s, axis=0), rtol=0, atol=5e-6)


def test_rounds_weigh_statistics_as_they_weigh_models(normalised):
    """1,438 samples for three clients are 480, 479 and 479."""
    team = Team(normalised, 3)
    for _ in range(4):
        for _ in range(2):
            for rank, batch in enumerate(team.draw(range(3))[1]):
                team.s[rank] = team.s[rank] + team.momentum * (batch - team.s[rank])
        team.mix(np.tile(np.array([480, 479, 479]) / 1438, (3, 1)))
    found = without_learning(normalised, ddlsim.FedAvg(1.0, local_steps=2), 3, 4)
    np.testing.assert_allclose(found, team.s[0], rtol=0, atol=5e-6)


def test_a_buffer_takes_in_the_mean_over_all_its_batches(normalised):
    """s <- (1 - m) s + m b at the server, b the mean over two pushes of three batches each."""
    team = Team(normalised, 1)
    state = team.s[0]
    for _ in range(4):
        batches = [team.draw([0])[1][0] for _ in range(6)]
        state = state + team.momentum * (np.mean(batches, axis=0) - state)
    found = without_learning(normalised, ddlsim.FedBuff(3, 2, None), 1, 4)
    np.testing.assert_allclose(found, state, rtol=0, atol=5e-6)


def test_an_anchor_has_the_statistics_of_the_average_of_a_period_before(normalised):
    team, coming = Team(normalised, 2), None
    anchor = team.s[0]
    for k in range(1, 18):
        for rank, batch in enumerate(team.draw(range(2))[1]):
            team.s[rank] = team.s[rank] + team.momentum * (batch - team.s[rank])
        if k % 4 == 0:
            anchor = anchor if coming is None else coming
            team.s = [0.4 * s + 0.6 * anchor for s in team.s]
            coming = np.mean(team.s, axis=0)
    found = without_learning(normalised, ddlsim.OverlapLocalSGD(4, alpha=0.6), 2, 17)
    np.testing.assert_allclose(found, np.mean(team.s, axis=0), rtol=0, atol=5e-6)


def test_cocod_adds_to_the_average_what_has_happened_meanwhile(normalised):
    team = Team(normalised, 2)
    begun = list(team.s)
    for k in range(1, 13):
        for rank, batch in enumerate(team.draw(range(2))[1]):
            team.s[rank] = team.s[rank] + team.momentum * (batch - team.s[rank])
        if k % 4 == 0:
            mean = np.mean(begun, axis=0)
            team.s = [mean + (s - before) for s, before in zip(team.s, begun, strict=True)]
            begun = list(team.s)
    found = without_learning(normalised, ddlsim.CoCoDSGD(4), 2, 12)
    np.testing.assert_allclose(found, np.mean(team.s, axis=0), rtol=0, atol=5e-6)


def test_dpsgd_mixes_statistics_with_parameters(normalised):
    weights = np.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]])
    team = Team(normalised, 3)
    for _ in range(10):
        gradients, batches = team.draw(range(3))
        team.mix(weights)
        for i in range(3):
            team.w[i], team.s[i] = team.moved(team.w[i], team.s[i], gradients[i], batches[i])
    check(equally_fast(normalised, ddlsim.DPSGD(weights), 3, 10), team)


@pytest.mark.parametrize("strategy", [ddlsim.KSync(3), ddlsim.BackupWorkers(1)], ids=lambda s: s.label)
def test_a_cancelled_gradient_leaves_no_trace_in_the_statistics(strategy, normalised):
    """The fourth worker is so slow that it never contributes."""
    team = Team(normalised, 4)
    for _ in range(12):
        team.together(range(3))
    check(equally_fast(normalised, strategy, 4, 12, speed=(1.0, 1.0, 1.0, 0.01)), team)


# ---------------------------------------------------------------- the mechanism


def model_of(plane, params, statistics):
    return plane.constant(np.array(params, np.float32), plane.constant(np.array(statistics, np.float32)))


def gradient_of(plane, values, batch, momentum=0.1):
    fresh = np.array(batch, np.float32) * np.float32(momentum)
    batches = (plane.constant((fresh, np.full(len(batch), 1.0 - momentum, np.float32))),)
    return plane.apply(lambda: np.array(values, np.float32), batch_statistics=batches)


def test_statistics_follow_what_is_done_with_parameters():
    plane = DataPlane()
    a, b = model_of(plane, [1.0, 2.0], [4.0]), model_of(plane, [3.0, 4.0], [8.0])
    for mixed, params, statistics in [
        (0.5 * (a + b), [2.0, 3.0], 6.0),
        (a - 0.25 * (a - b), [1.5, 2.5], 5.0),
        ((a + b) / 4.0, [1.0, 1.5], 3.0),
        (a[:1], [1.0], 4.0),
    ]:
        np.testing.assert_allclose(mixed.read(), params)
        np.testing.assert_allclose(mixed.statistics.read(), [statistics])
    assert a[1:].statistics is None  # they stay with the first part


def test_parameters_take_in_the_batches_of_a_gradient_however_it_is_scaled():
    """s + m (b - s), of several batches their mean."""
    plane = DataPlane()
    a = model_of(plane, [1.0], [4.0])
    g, h = gradient_of(plane, [2.0], [14.0]), gradient_of(plane, [4.0], [34.0])
    np.testing.assert_allclose((a - 0.1 * g).statistics.read(), [5.0], rtol=1e-6)
    np.testing.assert_allclose((a - 7.0 * (g + h)).statistics.read(), [6.0], rtol=1e-6)
    np.testing.assert_allclose((a - (g + g)).statistics.read(), [5.0], rtol=1e-6)  # one batch, counted once
    assert (a - plane.constant(np.ones(1, np.float32))).statistics is a.statistics  # no batch, nothing to take in


def test_statistics_that_are_lost_are_an_error(normalised):
    class Careless(ddlsim.AllReduce):
        """Hands over a copy that it has made by itself."""

        def start(self, context):
            super().start(context)
            inner = context.model
            context.model = lambda: context.learner.plane.apply(np.copy, inner())

    with pytest.raises(
        DdlsimError, match="the parameters have lost the running statistics that batch normalisation needs"
    ):
        equally_fast(normalised, Careless(), 2, 3)
    plane = DataPlane()
    a, b = model_of(plane, [1.0], [4.0]), model_of(plane, [1.0], [4.0])
    with pytest.raises(DdlsimError, match="2 models cannot be mixed together with 1 other values"):
        plane.mix(lambda x, y, z: x + y + z, a, b, plane.constant(np.ones(1)))


def test_a_variance_that_overshoots_below_zero_has_diverged(normalised):
    network = build_network(normalised, 0)
    state = network.initial_state.copy()
    state[network.state_slots[1].start] = -1e-3
    assert network.state_slots[1].name.endswith("running_var")
    with pytest.raises(
        DivergedError, match="running_var of the model is negative, because its moving average overshoots"
    ):
        evaluation(network, load_digits(), network.initial_params, state)


def test_networks_without_batch_normalisation_have_none():
    training = ddlsim.Training("digits", updates=2)
    result = ddlsim.simulate(STAR, "digits-cnn", ddlsim.LocalSGD(2), BATCH, 2, training=training)
    assert result.statistics is None


# ---------------------------------------------------------------- what the result says


MEAN = "the mean of the models of workers"


def noted(strategy, n, **more):
    training = ddlsim.Training("digits", rate=RATE, updates=30, evaluate_every=10)
    return ddlsim.simulate(STAR, "digits-cnn", strategy, BATCH, n, training=training, **more)


@pytest.mark.parametrize(
    ("strategy", "speed", "note"),
    [
        # 30 updates at speeds of 1, 1/2 and 1/4: 18 + 8 + 4, or (who exchanges waits) 17 + 9 + 4
        (ddlsim.GossipSGD(0.5), (1.0, 0.5, 0.25), f"{MEAN}; the workers have completed 4 to 18 local steps"),
        # nobody waits within a period of 4: when the slow one ends its 30th step, the others have ended their 32nd
        (ddlsim.LocalSGD(4), (1.0, 0.9, 0.25), f"{MEAN}; the workers have completed 30 to 32 local steps"),
        (
            ddlsim.ElasticAveraging(0.2, 4, synchronous=False), (1.0, 0.5, 0.25),
            "the center, which has been moved by workers; the workers have completed 4 to 17 local steps",
        ),
    ],
    ids=lambda each: getattr(each, "label", ""),
)  # fmt: skip
def test_a_mean_of_workers_at_different_steps_is_said_to_be_one(strategy, speed, note):
    result = noted(strategy, 3, speed=speed, compute=ddlsim.Measured("50 ms", BATCH))
    assert f"the final model is {note}" in result.notes


IN_STEP = [
    ddlsim.LocalSGD(4), ddlsim.DPSGD("ring"), ddlsim.AllReduce(), ddlsim.DiLoCo(2), ddlsim.SPARTA(0.1),
    ddlsim.FedAvg(1.0, local_steps=3), ddlsim.FedBuff(2, 2),
]  # fmt: skip


@pytest.mark.parametrize("strategy", IN_STEP, ids=lambda s: s.label)
def test_nothing_is_said_of_workers_at_the_same_step(strategy):
    assert not [note for note in noted(strategy, 3).notes if "handed over" in note]


def test_the_bytes_of_statistics_are_said_not_to_count(normalised):
    """8 means and 8 variances of 4 bytes each, beside 36 + 8 + 8 + 650 parameters."""
    result = equally_fast(normalised, ddlsim.AllReduce("ring"), 2, 3)
    note = (
        "running statistics of batch normalisation are sent along with the parameters, but their 0.064 kB "
        "(2.28 % of the parameters) are not counted as bytes sent"
    )
    assert note in result.notes
    assert not [note for note in noted(ddlsim.AllReduce("ring"), 2).notes if "statistics" in note]
