"""Gossip: NumPy loops written out, how fast disagreement shrinks, and what stays as it is."""

from typing import ClassVar

import networkx
import numpy as np
import pytest
from decentralised_reference import RATE, ThenNothing, Workers, simulated, training
from learning_reference import STAR, learn

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.strategies.gossip import Gossip, contraction, mixing_matrix

#: doubly stochastic, not symmetric: everybody also takes a quarter of the one after the next
ONE_WAY = np.roll(np.eye(5), 1, axis=1) * 0.25 + np.roll(np.eye(5), 2, axis=1) * 0.25 + np.eye(5) * 0.5
GRAPHS = {
    "ring of 3": ("ring", np.full((3, 3), 1 / 3)),
    "ring of 2": ("ring", np.full((2, 2), 1 / 2)),
    "complete": ("complete", np.full((4, 4), 1 / 4)),
    "star": (networkx.star_graph(3), np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4),
    "one way": (ONE_WAY, ONE_WAY),
}
SLOW = ddlsim.Measured("0.5 ms", 16)  # against some 0.2 ms for a message


@pytest.mark.parametrize("name", GRAPHS)
def test_dpsgd_as_written(name):
    graph, w = GRAPHS[name]
    workers = Workers(len(w))
    for _ in range(12):
        before = np.array(workers.x, np.float64)
        workers.follow(w @ before - RATE * np.array(workers.gradients()))
    strategy = ddlsim.DPSGD(graph)
    np.testing.assert_allclose(simulated(strategy, len(w), 12), workers.mean(), rtol=0, atol=2e-6)


def test_dpsgd_keeps_a_worker_s_momentum_with_it():
    w, workers = np.full((3, 3), 1 / 3), Workers(3, ddlsim.Momentum(0.5))
    for _ in range(12):
        gradients, mixed = workers.gradients(), w @ np.array(workers.x, np.float64)
        for i, gradient in enumerate(gradients):
            workers.x[i], workers.states[i] = workers.optimizer.update(
                mixed[i].astype(np.float32), gradient, workers.states[i], RATE
            )
    result = simulated(ddlsim.DPSGD("ring"), 3, 12, optimizer=ddlsim.Momentum(0.5))
    np.testing.assert_allclose(result, workers.mean(), rtol=0, atol=2e-6)


def test_with_whole_averages_a_model_is_the_mean_and_its_own_last_step():
    """W = 11^T/N: x_i = mean(x) - eta g_i, so the first update is that of synchronous SGD."""
    first = simulated(ddlsim.DPSGD("complete"), 4, 1)
    np.testing.assert_allclose(first, simulated(ddlsim.AllReduce(), 4, 1), rtol=0, atol=1e-7)


# ---------------------------------------------------------------- agreement


def disagreement(strategy, n, updates, apart, **more):
    """The history of a run that learns until `apart` updates of N * 16 samples have been made, then with rate 0."""
    rate = ThenNothing((apart - 0.5) * n * 16 / 1438)
    return learn(strategy, n, training=training(updates, rate=rate, evaluate_every=1), **more).history


@pytest.mark.parametrize(("graph", "n", "settled"), [("ring", 8, 12), ("ring", 5, 6), (networkx.path_graph(4), 4, 12)])
def test_disagreement_contracts_by_the_second_eigenvalue(graph, n, settled):
    """Once the faster modes have died away."""
    rate = contraction(mixing_matrix("", graph, n))
    if graph == "ring":
        assert rate == pytest.approx(1 / 3 + 2 / 3 * np.cos(2 * np.pi / n))
    history = disagreement(ddlsim.DPSGD(graph), n, 5 + settled + 5, apart=5)
    spread = history["consensus"].to_numpy()
    assert spread[5] > 0.01
    np.testing.assert_allclose(spread[6 + settled :] / spread[5 + settled : -1], rate, rtol=2e-3)
    assert history["loss"].iloc[-1] == pytest.approx(history["loss"].iloc[6], abs=1e-6)  # the mean stays


def test_on_the_complete_graph_one_step_is_enough():
    spread = disagreement(ddlsim.DPSGD("complete"), 4, 8, apart=5)["consensus"].to_numpy()
    assert spread[5] > 0.01
    np.testing.assert_allclose(spread[6:], 0.0, atol=1e-6)


def test_disconnected_workers_never_agree_and_the_notes_say_so():
    pairs = np.kron(np.eye(2), np.full((2, 2), 0.5))
    result = learn(ddlsim.DPSGD(pairs), 4, training=training(30, rate=ThenNothing(0.1), evaluate_every=30))
    assert (
        "D-PSGD: |lambda_2(W)| = 1, so some workers never reach consensus; connect the parts of the graph"
        in result.notes
    )
    assert result.history["consensus"].iloc[-1] > 0.01


@pytest.mark.parametrize("graph", ["ring", "bipartite"])
def test_pairs_that_average_keep_the_mean(graph):
    history = disagreement(ddlsim.ADPSGD(graph), 4, 160, apart=5, jitter=ddlsim.Lognormal(0.3), compute=SLOW)
    still = history[history["rate"] == 0.0].iloc[8:]  # whoever had begun before has ended
    assert still["consensus"].iloc[-1] < 0.01 * still["consensus"].iloc[0]
    np.testing.assert_allclose(still["loss"], still["loss"].iloc[0], rtol=1e-5)


class Watched(ddlsim.GossipSGD):
    """Keeps its workers where a test can see them."""

    here: ClassVar[list[Gossip]] = []

    def start(self, context):
        Watched.here = [Gossip(self, context)]


def test_sum_weight_gossip_preserves_the_weighted_sum():
    """With rate 0 after a while: sum_i w_i x_i over models, inboxes and the wire; the weights sum to 1."""
    sums, weights, under_way = [], [], []

    def look(time, updates, epoch, row):
        if row is not None and row.rate == 0.0 and updates > 40:
            (gossip,), flying = Watched.here, list(Watched.here[0].outgoing.values())
            held = list(zip(gossip.weights, [worker.params for worker in gossip.context.workers], strict=True))
            held += [(push.weight, push.message.value) for inbox in gossip.inbox for push in inbox]
            held += [(push.weight, push.message.value) for push in flying]
            sums.append(sum(weight * params.read().astype(np.float64) for weight, params in held))
            weights.append([weight for weight, _ in held])
            under_way.append(len(flying))

    rate = ThenNothing(30 * 16 / 1438)
    result = learn(
        Watched(0.5), 4, training=training(200, rate=rate, evaluate_every=1), jitter=ddlsim.Lognormal(0.3),
        compute=SLOW, progress=look,
    )  # fmt: skip
    assert len(sums) > 100
    assert sum(under_way) > 10
    assert max(abs(sum(w) - 1.0) for w in weights) < 1e-12
    assert min(min(w) for w in weights) < 0.1 < 0.4 < max(max(w) for w in weights)  # but wander
    assert max(np.abs(s - sums[0]).max() for s in sums) < 1e-6
    assert result.history["consensus"].iloc[-1] < 0.01 * result.history["consensus"].iloc[30]


def test_sum_weight_gossip_as_written():
    """Two workers that always push, in step; what a push brings is merged after the next one has left (it arrives while
    the receiver computes), so a push is the model as a step has left it."""
    workers, weights, coming = Workers(2), [0.5, 0.5], None
    for _ in range(12):
        workers.local_steps()
        stepped = list(workers.x)
        pushes = [(stepped[i].astype(np.float64), weights[i] / 2) for i in (1, 0)]
        weights = [weight / 2 for weight in weights]
        if coming is not None:
            merged = []
            for i, (x, w) in enumerate(coming):
                total = weights[i] + w
                merged.append(weights[i] / total * stepped[i].astype(np.float64) + w / total * x)
                weights[i] = total
            workers.follow(merged)
        coming = pushes
    result = learn(
        ddlsim.GossipSGD(1.0), 2, training=training(24), jitter=ddlsim.NoJitter(), compute=ddlsim.Measured("50 ms", 16)
    )
    # worker 0 has merged when worker 1 ends the last step, at the same instant
    handed_over = (workers.x[0].astype(np.float64) + stepped[1]) / 2
    np.testing.assert_allclose(result.params, handed_over, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- staleness


@pytest.mark.parametrize("n", [2, 6])
def test_staleness_is_what_the_others_have_done_meanwhile(n):
    """In a closed system of n workers n - 1 others update, in the mean, between a worker's updates."""
    result = ddlsim.simulate(
        STAR, "digits-cnn", ddlsim.ADPSGD(), 16, n, jitter=ddlsim.Exponential(), steps=400, speed=(1.0, 0.5) * (n // 2)
    )
    assert np.mean(result.recorder.staleness) == pytest.approx(n - 1, rel=0.02)


# ---------------------------------------------------------------- mistakes


def in_words(value):
    """Ids that are the same in every process: graphs have addresses."""
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(("strategy", "arguments", "message"), [
    (ddlsim.DPSGD, ("rign",), "DPSGD: unknown graph 'rign'; did you mean 'ring'"),
    (ddlsim.DPSGD, ([[0.5, 0.5], [0.5, 0.6]],), "graph: row 1 sums to 1.1; rows and columns must sum to 1"),
    (ddlsim.DPSGD, ([[0.5, 0.5], [1.0, 0.0]],), "graph: column 0 sums to 1.5"),
    (ddlsim.DPSGD, ([[1.5, -0.5], [-0.5, 1.5]],), "contains -0.5; weights must be finite and not negative"),
    (ddlsim.DPSGD, ([[0.5, 0.5]],), r"has shape \(1, 2\); a matrix of weights must"),
    (ddlsim.DPSGD, (networkx.DiGraph([(0, 1)]),), "is directed, .* graph.to_undirected"),
    (ddlsim.DPSGD, (object(),), "graph: expected one of bipartite, complete, ring"),
    (ddlsim.ADPSGD, ([[0.5, 0.5], [0.5, 0.5]],), "ADPSGD: graph: expected one of"),
    (ddlsim.GossipSGD, (0.0,), "probability = 0.0: must be above 0 and at most 1"),
    (ddlsim.GossipSGD, (0.1, "line"), "unknown graph 'line'"),
], ids=in_words)  # fmt: skip
def test_bad_graphs_are_refused(strategy, arguments, message):
    with pytest.raises(ConfigError, match=message):
        strategy(*arguments)


@pytest.mark.parametrize(("strategy", "n", "message"), [
    (ddlsim.DPSGD(np.full((3, 3), 1 / 3)), 4, "graph is a matrix for 3 workers, but the run has 4"),
    (ddlsim.DPSGD(networkx.path_graph(3)), 4, r"graph must have one node per worker, numbered from 0 to 3"),
    (ddlsim.DPSGD(networkx.Graph([("a", "b")])), 2, "convert_node_labels_to_integers"),
    (ddlsim.ADPSGD("ring"), 5, "'ring' with 5 workers is not bipartite.* a ring with an even number"),
    (ddlsim.ADPSGD("complete"), 4, "not bipartite"),
], ids=in_words)  # fmt: skip
def test_graphs_that_do_not_fit_are_refused(strategy, n, message):
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(STAR, "digits-cnn", strategy, 16, n)


def test_a_matrix_makes_strategies_that_can_be_compared():
    assert ddlsim.DPSGD(ONE_WAY) == ddlsim.DPSGD(ONE_WAY.tolist())
    assert hash(ddlsim.DPSGD(ONE_WAY)) == hash(ddlsim.DPSGD(ONE_WAY.copy()))
