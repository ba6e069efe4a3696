"""DiLoCo, SlowMo, Qsparse-local-SGD and hierarchical local SGD: identities, and their papers' loops in NumPy."""

import numpy as np
import pytest
from decentralised_reference import RATE, Workers, simulated, training
from learning_reference import learn, plain_sgd

import ddlsim
from ddlsim.cluster import Host, MultiGpu, star
from ddlsim.compression.exchange import exchange
from ddlsim.errors import ConfigError

CLOSE = {"rtol": 0, "atol": 2e-6}
SOME = ddlsim.ErrorFeedback(ddlsim.TopK(0.1))


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize("strategy", [
    ddlsim.DiLoCo(4, outer=ddlsim.SGD(), outer_rate=1.0), ddlsim.SlowMo(4, momentum=0.0),
    ddlsim.BMUF(4, block_momentum=0.0), ddlsim.HierarchicalLocalSGD(4, 1, block=2),
    ddlsim.HierarchicalLocalSGD(4, 3, block=3),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("optimizer", [ddlsim.SGD(), ddlsim.Adam(weight_decay=0.1)], ids=lambda o: type(o).__name__)
def test_each_is_local_sgd_bit_for_bit_where_it_adds_nothing(strategy, optimizer):
    """An outer step of 1 goes all the way, momentum 0 forgets, one block is all."""
    more = {"optimizer": optimizer, "rate": 0.01}
    local = simulated(ddlsim.LocalSGD(4), 3, 14, **more)
    assert simulated(strategy, 3, 14, **more).tobytes() == local.tobytes()


def test_slow_momentum_is_the_outer_momentum_of_diloco():
    """With alpha gamma / gamma = 1 both are x <- x - u, u <- beta u + x - mean(x_i), up to the rounding of gamma."""
    slow, outer = ddlsim.SlowMo(4, momentum=0.6), ddlsim.DiLoCo(4, outer=ddlsim.Momentum(0.6), outer_rate=1.0)
    np.testing.assert_allclose(simulated(slow, 3, 20), simulated(outer, 3, 20), **CLOSE)


def test_buffers_that_are_reset_make_a_difference_only_if_there_are_any():
    kept, reset = (ddlsim.SlowMo(4, buffers=buffers) for buffers in ("maintain", "reset"))
    assert simulated(kept, 3, 12).tobytes() == simulated(reset, 3, 12).tobytes()
    more = {"optimizer": ddlsim.Momentum(0.9), "rate": 0.02}
    assert np.abs(simulated(kept, 3, 12, **more) - simulated(reset, 3, 12, **more)).max() > 1e-4


def test_without_a_learning_rate_slow_momentum_stands_still():
    """gamma = 0 does not divide anything."""
    assert simulated(ddlsim.SlowMo(2), 2, 6, rate=0.0).tobytes() == Workers(1).x[0].tobytes()


def test_an_outer_optimizer_by_layers_knows_the_layers():
    result = simulated(ddlsim.DiLoCo(2, outer=ddlsim.LAMB(), outer_rate=0.01), 2, 6)
    assert np.isfinite(result).all()


def test_qsparse_is_local_sgd_with_compression():
    sparse = simulated(ddlsim.QsparseLocalSGD(3, SOME), 3, 13)
    local = learn(ddlsim.LocalSGD(3), 3, 16, training=training(13), compression=SOME).params
    assert sparse.tobytes() == local.tobytes()


def test_compression_is_said_once():
    again = learn(ddlsim.QsparseLocalSGD(3, SOME), 2, 16, training=training(4), compression=SOME)
    assert again.params.tobytes() == simulated(ddlsim.QsparseLocalSGD(3, SOME), 2, 4).tobytes()
    with pytest.raises(ConfigError, match=r"QsparseLocalSGD already compresses with ErrorFeedback\(TopK\)"):
        learn(ddlsim.QsparseLocalSGD(3, SOME), 2, compression=ddlsim.FP16())


# ---------------------------------------------------------------- loops written out


@pytest.mark.parametrize("inner", [ddlsim.SGD(), ddlsim.Adam(weight_decay=0.1)], ids=lambda o: type(o).__name__)
def test_diloco_as_written(inner):
    """theta <- theta - 0.7 (Delta + 0.9 v), v <- 0.9 v + Delta."""
    workers = Workers(3, inner)
    theta, v = workers.mean(), 0.0
    for k in range(1, 15):
        workers.local_steps()
        if k % 4 == 0:
            delta = theta.astype(np.float64) - workers.mean()
            v = 0.9 * v + delta
            theta = (theta - 0.7 * (delta + 0.9 * v)).astype(np.float32)
            workers.follow([theta] * 3)
    found = simulated(ddlsim.DiLoCo(4), 3, 14, optimizer=inner)
    np.testing.assert_allclose(found, workers.mean(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("buffers", ["maintain", "reset"])
def test_slowmo_as_written(buffers):
    workers = Workers(3, ddlsim.Momentum(0.5))
    x, u, beta, alpha = workers.mean(), 0.0, 0.6, 0.8
    for k in range(1, 15):
        workers.local_steps()
        if k % 4 == 0:
            u = beta * u + (x.astype(np.float64) - workers.mean()) / RATE
            x = (x - alpha * RATE * u).astype(np.float32)
            workers.follow([x] * 3)
            if buffers == "reset":
                workers.states = [workers.optimizer.init(x) for x in workers.x]
    found = simulated(ddlsim.SlowMo(4, beta, alpha, buffers), 3, 14, optimizer=ddlsim.Momentum(0.5))
    np.testing.assert_allclose(found, workers.mean(), **CLOSE)


def test_qsparse_as_written():
    """Everybody remembers what it did not send."""
    workers, feedback = Workers(3), SOME
    x = workers.mean()
    states = [feedback.init(len(x)) for _ in range(3)]
    for k in range(1, 12):
        workers.local_steps()
        if k % 3 == 0:
            rngs = [np.random.default_rng(0) for _ in range(3)]
            done = exchange(feedback, [mine - x for mine in workers.x], states, rngs)
            states, x = done.states, x + done.mean
            workers.follow([x] * 3)
    np.testing.assert_allclose(simulated(ddlsim.QsparseLocalSGD(3, SOME), 3, 11), workers.mean(), rtol=0, atol=1e-5)


def test_hierarchical_local_sgd_as_written():
    """Blocks of ranks 0, 1 and 2, 3 and 4 alone: every 2 steps inside, every 6 among all."""
    workers = Workers(5)
    for k in range(1, 19):
        workers.local_steps()
        blocks = [[0, 1, 2, 3, 4]] if k % 6 == 0 else [[0, 1], [2, 3], [4]] if k % 2 == 0 else []
        for block in blocks:
            mean = np.mean([workers.x[i] for i in block], axis=0, dtype=np.float64)
            for i in block:
                workers.x[i] = mean.astype(np.float32)
    np.testing.assert_allclose(simulated(ddlsim.HierarchicalLocalSGD(2, 3, 2), 5, 18), workers.mean(), **CLOSE)


def test_a_compressed_block_goes_on_from_the_mean_of_all():
    """What was common to a block before is not sent again: without loss, compressing changes nothing but rounding."""
    whole = ddlsim.ErrorFeedback(ddlsim.TopK(1.0))
    strategy = ddlsim.HierarchicalLocalSGD(2, 2, 2)
    lossless = learn(strategy, 4, 16, training=training(14), compression=whole).params
    np.testing.assert_allclose(lossless, simulated(strategy, 4, 14), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", [ddlsim.DiLoCo(4), ddlsim.SlowMo(4), ddlsim.BMUF(4)], ids=lambda s: s.label)
def test_what_moves_all_is_not_compressed(strategy):
    """Differences are to the model that all have got, so that nothing but the local steps is compressed."""
    whole = ddlsim.ErrorFeedback(ddlsim.TopK(1.0))
    lossless = learn(strategy, 3, 16, training=training(14), compression=whole).params
    np.testing.assert_allclose(lossless, simulated(strategy, 3, 14), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", [ddlsim.HierarchicalLocalSGD(3, 2), ddlsim.SlowMo(3, 0.0)], ids=lambda s: s.label)
def test_one_worker_alone_is_plain_sgd(strategy):
    assert learn(strategy, 1).params.tobytes() == plain_sgd(16, 30).tobytes()


# ---------------------------------------------------------------- seconds and bytes


def boxes(n):
    inside = MultiGpu(2, "nvswitch", nvlink_bandwidth="25 GB/s")
    return star(n, bandwidth="10 Gbit/s", latency="5 us", host=inside)


def timed(strategy, workers=4, cluster=None, **more):
    more = {"compute": ddlsim.Measured("20 ms", 8), "steps": 12, "warmup": 0} | more
    hosts = star(4, bandwidth="1 Gbit/s", latency="0 s", host=Host()) if cluster is None else cluster
    return ddlsim.simulate(hosts, "lenet5", strategy, 8, workers, **more)


@pytest.mark.parametrize("strategy", [ddlsim.DiLoCo(4), ddlsim.SlowMo(4)], ids=lambda s: s.label)
def test_an_outer_optimizer_takes_neither_time_nor_bytes(strategy):
    """tau t_c + t_ar for tau steps, as local SGD."""
    found, local = timed(strategy), timed(ddlsim.LocalSGD(4))
    assert found.recorder.updates == local.recorder.updates
    assert found.nbytes_sent == local.nbytes_sent
    ring = 2 * 3 / 4 * found.workloads[0].gradient_nbytes / 1.25e8
    assert found.end_time == pytest.approx(12 * 0.02 + 3 * ring, rel=1e-9)


def test_blocks_average_over_their_links():
    """In 12 steps of 2 x 3: 4 averages inside machines of two, 2 among all."""
    strategy = ddlsim.HierarchicalLocalSGD(2, 3)
    inside, among = (timed(ddlsim.LocalSGD(12), n, boxes(2)) for n in (2, 4))
    found = timed(strategy, cluster=boxes(2))
    one, all_ = (result.end_time - 12 * 0.02 for result in (inside, among))
    assert one < 0.1 * all_
    assert found.end_time == pytest.approx(12 * 0.02 + 4 * one + 2 * all_, rel=1e-9)
    assert found.nbytes_sent == pytest.approx(4 * 2 * inside.nbytes_sent + 2 * among.nbytes_sent, rel=1e-9)


@pytest.mark.parametrize("workers", [2, [1, 3, 4]])
@pytest.mark.parametrize(
    "fabric", [ddlsim.Fabric("ring", cost="nccl"), ddlsim.Fabric("auto"), ddlsim.Fabric("binomial_tree")], ids=str
)
def test_blocks_take_fabrics_and_a_part_of_the_cluster(workers, fabric):
    result = timed(ddlsim.HierarchicalLocalSGD(1, 2), workers, boxes(3), fabric=fabric)
    assert len(result.recorder.updates) == 12
    assert len(result.notes) == len(set(result.notes))


@pytest.mark.parametrize(("block", "said"), [
    (1, "each block has one worker"), (4, "all workers are in one block"), ("machine", "each block has one worker"),
    (2, None),
])  # fmt: skip
def test_one_level_is_said_to_be_one(block, said):
    notes = timed(ddlsim.HierarchicalLocalSGD(2, 2, block)).notes
    found = [note for note in notes if "only one level" in note]
    assert len(found) == (0 if said is None else 1)
    assert said is None or said in found[0]


def test_a_run_that_is_over_before_the_first_exchange_says_so():
    """500 steps are the paper's period, a run makes 10 if nothing is said."""
    warnings = [timed(strategy, steps=10).warnings for strategy in (ddlsim.DiLoCo(), ddlsim.DiLoCo(10))]
    assert warnings[0][0].startswith("nothing was sent: the run ended before any of the 4 workers")
    assert warnings[1] == ()
    assert timed(ddlsim.DiLoCo(), 1, steps=10).warnings == ()


def test_qsparse_sends_a_hundredth_of_the_elements():
    """8 bytes for each of 1 % of the elements, to everybody by a ring all-gather."""
    found = timed(ddlsim.QsparseLocalSGD(4))
    n = round(found.workloads[0].gradient_nbytes / 4)
    assert found.nbytes_sent == pytest.approx(3 * 4 * 3 * 8 * round(0.01 * n), rel=0.02)


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: ddlsim.DiLoCo(0), "DiLoCo: period = 0"),
    (lambda: ddlsim.DiLoCo(outer="momentum"), "DiLoCo: outer = 'momentum'"),
    (lambda: ddlsim.DiLoCo(outer_rate=0.0), "DiLoCo: outer_rate = 0.0"),
    (lambda: ddlsim.SlowMo(momentum=1.0), "SlowMo: momentum = 1.0"),
    (lambda: ddlsim.SlowMo(buffers="average"), "SlowMo: buffers = 'average'"),
    (lambda: ddlsim.QsparseLocalSGD(compressor="top-k"), "QsparseLocalSGD: compressor = 'top-k'"),
    (lambda: ddlsim.HierarchicalLocalSGD(block="rack"), "HierarchicalLocalSGD: block = 'rack'"),
    (lambda: ddlsim.HierarchicalLocalSGD(block=0), "HierarchicalLocalSGD: block = 0"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
