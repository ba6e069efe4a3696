"""SPARTA and CHOCO-SGD: identities, the papers' loops in NumPy, seconds and bytes."""

import numpy as np
import pytest
from decentralised_reference import Workers, simulated, training
from learning_reference import learn, plain_sgd

import ddlsim
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.strategies.gossip import mixing_matrix
from ddlsim.streams import stream

CLOSE = {"rtol": 0, "atol": 2e-6}
NBYTES, BANDWIDTH, COMPUTE = 8.008e6, 1.001e9, 5e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "two-layers.toml"
    path.write_text(
        'title = "Two equal layers"\nsources = ["made up"]\ninput = [1000]\n'
        'layers = [{ type = "dense", units = 1000 }, { type = "dense", units = 1000 }]\n'
    )
    return path


def timed(model, strategy, n=4, **more):
    hosts = star(n, bandwidth=BANDWIDTH, latency=0.0)
    more = {"compute": ddlsim.Measured(COMPUTE, 1), "workers": n, "steps": 3, "warmup": 0} | more
    return ddlsim.simulate(hosts, model, strategy, 1, **more)


# ---------------------------------------------------------------- SPARTA


def test_all_parameters_are_local_sgd_bit_for_bit():
    for optimizer in (ddlsim.SGD(), ddlsim.Adam()):
        more = {"optimizer": optimizer, "rate": 0.01}
        sparse, local = (simulated(strategy, 3, 9, **more) for strategy in (ddlsim.SPARTA(1.0), ddlsim.LocalSGD(1)))
        assert sparse.tobytes() == local.tobytes()


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_sparta_as_written(p):
    workers = Workers(3)
    for step in range(1, 13):
        workers.local_steps()
        n = workers.x[0].size
        indices = stream(0, 0, f"SPARTA {step}").choice(n, round(p * n), replace=False)
        mean = workers.mean()[indices]
        for x in workers.x:
            x[indices] = mean
    np.testing.assert_allclose(simulated(ddlsim.SPARTA(p), 3, 12), workers.mean(), **CLOSE)


def test_a_share_of_the_bytes_takes_a_share_of_the_time(model):
    """t_c + p t_ar a step."""
    ring = 2 * 3 / 4 * NBYTES / BANDWIDTH
    for p in (0.005, 0.25, 1.0):
        result = timed(model, ddlsim.SPARTA(p))
        assert result.end_time == pytest.approx(3 * (COMPUTE + p * ring), rel=1e-9)
        assert result.nbytes_sent == pytest.approx(3 * 4 * 2 * 3 / 4 * p * NBYTES, rel=1e-9)


@pytest.mark.parametrize("fabric", [ddlsim.Fabric("halving_doubling"), ddlsim.Fabric("ring", cost="nccl")], ids=str)
def test_sparta_takes_fabrics_and_a_part_of_the_cluster(model, fabric):
    assert timed(model, ddlsim.SPARTA(0.1), fabric=fabric, workers=[0, 3]).nbytes_sent > 0.0


def test_sparta_is_not_compressed_again(model):
    with pytest.raises(ConfigError, match="compression: SPARTA does not support compression"):
        timed(model, ddlsim.SPARTA(), compression=ddlsim.FP16())


# ---------------------------------------------------------------- CHOCO-SGD


def choco(n, graph, gamma, steps, compressor=None):
    """Algorithm 2 with y_i from the initial model on."""
    workers, w = Workers(n), mixing_matrix("", graph, n)
    y = np.array(workers.x, np.float64)
    states = [] if compressor is None else [compressor.init(y.shape[1]) for _ in range(n)]
    for _ in range(steps):
        workers.local_steps()
        for i, x in enumerate(workers.x):
            q = (x - y[i]).astype(np.float32)
            if compressor is not None:
                payload, states[i] = compressor.encode(q, states[i], np.random.default_rng(0))
                q = compressor.decode(payload)
            y[i] = y[i] + q if compressor is not None else x
        workers.follow(np.array(workers.x, np.float64) + gamma * (w - np.eye(n)) @ y)
    return workers.mean()


@pytest.mark.parametrize("graph", ["ring", "complete"])
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_choco_as_written(graph, gamma):
    found = simulated(ddlsim.CHOCOSGD(gamma, graph), 5, 12)
    np.testing.assert_allclose(found, choco(5, graph, gamma, 12), **CLOSE)


def test_choco_as_written_with_a_compressor():
    """The largest tenth of the differences to the public copies."""
    sparse = ddlsim.TopK(0.1)
    found = learn(ddlsim.CHOCOSGD(0.3), 5, 16, training=training(12), compression=sparse).params
    np.testing.assert_allclose(found, choco(5, "ring", 0.3, 12, sparse), rtol=0, atol=1e-5)


def test_whole_consensus_steps_on_the_complete_graph_average_all():
    """gamma = 1, W = 11^T/N: x_i = mean_j(x_j - eta g_j), local SGD of period 1."""
    local = simulated(ddlsim.LocalSGD(1), 4, 12)
    np.testing.assert_allclose(simulated(ddlsim.CHOCOSGD(1.0, "complete"), 4, 12), local, **CLOSE)


def test_without_learning_whole_consensus_steps_are_dpsgd():
    """x <- W x in both once the rate is 0; before, D-PSGD adds its step after mixing and this mixes it, too."""
    w = mixing_matrix("", "ring", 5)
    workers = Workers(5)
    workers.local_steps()
    np.testing.assert_allclose((w @ np.array(workers.x, np.float64)).mean(axis=0), workers.mean(), **CLOSE)
    first, second = (simulated(strategy, 5, 1) for strategy in (ddlsim.CHOCOSGD(1.0), ddlsim.DPSGD()))
    np.testing.assert_allclose(first, second, **CLOSE)  # W leaves the mean alone
    consensus = [
        learn(strategy, 5, 16, training=training(1)).history["consensus"].iloc[-1]
        for strategy in (ddlsim.CHOCOSGD(1.0), ddlsim.DPSGD())
    ]
    assert 0.0 < consensus[0] < consensus[1]


def test_one_worker_alone_is_plain_sgd():
    assert learn(ddlsim.CHOCOSGD(0.5), 1).params.tobytes() == plain_sgd(16, 30).tobytes()


@pytest.mark.parametrize("compression", [None, ddlsim.TopK(0.01)], ids=str)
def test_nothing_hides_behind_the_computing(model, compression):
    """t_c + 2 q / B a step on a ring, q bytes to each of two neighbours."""
    free = ddlsim.CodecCost(encode=0.0, decode=0.0)
    choice = None if compression is None else ddlsim.Compression(compression, cost=free)
    result = timed(model, ddlsim.CHOCOSGD(0.5), 5, compression=choice)
    nbytes = NBYTES if compression is None else 8 * round(0.01 * NBYTES / 4)
    assert result.end_time == pytest.approx(3 * (COMPUTE + 2 * nbytes / BANDWIDTH), rel=1e-9)
    assert result.nbytes_sent == pytest.approx(3 * 5 * 2 * nbytes, rel=1e-9)


def test_how_fast_they_agree_is_said_where_nothing_is_compressed(model):
    """|lambda_2((1 - gamma) I + gamma W)| = 1 - gamma (1 - lambda_2)."""
    rate = 1 - 0.5 * (1 - (1 / 3 + 2 / 3 * np.cos(2 * np.pi / 5)))
    said = timed(model, ddlsim.CHOCOSGD(0.5), 5).notes
    assert any(note.startswith(f"CHOCO-SGD: |lambda_2(W)| = {rate:.6g}") for note in said)
    packed = timed(model, ddlsim.CHOCOSGD(0.5), 5, compression=ddlsim.TopK(0.1)).notes
    assert not any("lambda" in note for note in packed)


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: ddlsim.SPARTA(0.0), "SPARTA: p = 0.0"),
    (lambda: ddlsim.SPARTA(1.5), "SPARTA: p = 1.5"),
    (lambda: ddlsim.CHOCOSGD(0.0), "CHOCOSGD: gamma = 0.0"),
    (lambda: ddlsim.CHOCOSGD(0.5, "star"), "CHOCOSGD: unknown graph 'star'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
