"""What every compressor must do in every strategy that takes one. A new one adds a line to COMPRESSORS."""

import numpy as np
import pytest
from compression_reference import COMPRESSORS, STRATEGIES, learn, timing
from draws import few, latin

import ddlsim
from ddlsim.compression import NoCompression
from ddlsim.errors import ConfigError

PAIRS = latin(STRATEGIES, COMPRESSORS)


@pytest.mark.parametrize(("strategy", "compressor"), PAIRS)
def test_compressed_runs(strategy, compressor):
    """Reproducible; every second accounted for; the clock knows sizes without values, where they do not depend on
    them; the parameters are finite and move."""
    chosen, jitter = STRATEGIES[strategy], ddlsim.Lognormal(0.3)
    first, again = (learn(COMPRESSORS[compressor], chosen, jitter=jitter) for _ in range(2))
    assert first.params.tobytes() == again.params.tobytes()
    assert first.history.equals(again.history)
    assert np.isfinite(first.params).all()
    parts = first.workers[["compute", "communication", "waiting", "idle"]]
    np.testing.assert_allclose(parts.sum(axis=1), first.end_time, rtol=1e-9)
    assert (parts["idle"] <= 1e-9 * first.end_time).all()
    if compressor == "threshold":
        with pytest.raises(ConfigError, match=r"Threshold.*depends on the input values.*training=ddlsim\.Training"):
            timing(COMPRESSORS[compressor], chosen)
        return
    without = timing(COMPRESSORS[compressor], chosen, 10, jitter=jitter)
    n = len(first.recorder.updates)
    assert [t for t, _ in without.recorder.updates[:n]] == [t for t, _ in first.recorder.updates]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_none_is_the_run_without(strategy):
    """Bit for bit, clock and bytes too."""
    chosen, jitter = STRATEGIES[strategy], ddlsim.Lognormal(0.3)
    with_, without = (learn(each, chosen, jitter=jitter) for each in (NoCompression(), None))
    assert with_.params.tobytes() == without.params.tobytes()
    assert [t for t, _ in with_.recorder.updates] == [t for t, _ in without.recorder.updates]
    assert with_.nbytes_sent == without.nbytes_sent


NOTHING_LEFT_OUT = {
    "top-k": (ddlsim.TopK(1.0), 0.0),
    "ms-top-k": (ddlsim.MSTopK(1.0), 0.0),
    "threshold": (ddlsim.Threshold(0.0), 0.0),
    "random-k": (ddlsim.RandomK(1.0), 0.0),
    "dgc": (ddlsim.DGC(1, momentum=0.0, sparsities=(0.0,)), 0.0),
    "g-top-k": (ddlsim.GTopK(1.0), 1e-6),
    "count-sketch": (ddlsim.CountSketch(1.0, 1, 8), 0.0),
    "qsgd": (ddlsim.QSGD(2**30), 1e-6),
    "power-sgd": (ddlsim.PowerSGD(100), 1e-5),
    "top-k, fed back": (ddlsim.ErrorFeedback(ddlsim.TopK(1.0)), 0.0),
}


@pytest.mark.parametrize(("name", "strategy"), latin(NOTHING_LEFT_OUT, ["all-reduce", "servers"]))
def test_nothing_left_out_is_no_compression(name, strategy):
    """k = d, s -> infinity, full rank, sparsity 0. Those with a tolerance round as they encode."""
    compressor, tolerance = NOTHING_LEFT_OUT[name]
    plain = learn(None, STRATEGIES[strategy]).params
    np.testing.assert_allclose(learn(compressor, STRATEGIES[strategy]).params, plain, rtol=0, atol=tolerance)


def test_nothing_left_out_in_both_directions():
    """On one worker the clock is no matter: what asynchronous servers answer is the parameters."""
    exact = ddlsim.Compression(ddlsim.TopK(1.0), down=ddlsim.TopK(1.0))
    for strategy in (ddlsim.ParameterServer(2), ddlsim.AsyncParameterServer(3)):
        plain = learn(None, strategy, workers=1).params
        np.testing.assert_allclose(learn(exact, strategy, workers=1).params, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("overlap", "k"), [
    ("none", 19),  # of 1898 elements
    ("layer", 6 + 12 + 1),  # of 650, 1168, 80
    (ddlsim.DdpBuckets("10 kB", "1 kB"), 6 + 12),  # of 650, 1248
], ids=["none", "layer", "ddp"])  # fmt: skip
def test_buckets_compress_by_themselves(overlap, k):
    """Every bucket keeps the largest of its own elements: at k = d all of them, in their places."""
    strategy = ddlsim.AllReduce(overlap=overlap)
    assert learn(ddlsim.TopK(1.0), strategy).params.tobytes() == learn(None, strategy).params.tobytes()
    assert learn(ddlsim.TopK(0.01), strategy).nbytes_sent == pytest.approx(10 * 4 * 3 * 8 * k, rel=1e-12)


@pytest.mark.slow
def test_accuracy_with_and_without_error_feedback():
    """1 % of the coordinates: with feedback the run learns, without it hardly, in as many updates."""

    def accuracy(compressor):
        training = ddlsim.Training(rate=0.1, updates=200, evaluate_every=100)
        return learn(compressor, training=training).accuracy

    with_, without = accuracy(ddlsim.ErrorFeedback(ddlsim.TopK(0.01))), accuracy(ddlsim.TopK(0.01))
    assert with_ > 0.8
    assert without < with_ - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "down", "n_updates"), [
    (ddlsim.ParameterServer(), ddlsim.ErrorFeedback(ddlsim.TopK(0.1)), 200),  # Tang et al. 2019, DoubleSqueeze
    (ddlsim.AsyncParameterServer(), ddlsim.TopK(0.1), 800),  # four times fewer samples each
], ids=["servers", "async"])  # fmt: skip
def test_ten_percent_in_both_directions_learns(strategy, down, n_updates):
    choice = ddlsim.Compression(ddlsim.ErrorFeedback(ddlsim.TopK(0.1)), down=down)
    training = ddlsim.Training(rate=0.1, updates=n_updates, evaluate_every=n_updates // 2)
    assert learn(choice, strategy, training=training).accuracy > 0.8


@pytest.mark.parametrize("strategy", few(STRATEGIES, 1))
def test_a_saved_run_goes_on_bit_for_bit(strategy, tmp_path):
    choice = ddlsim.Compression(ddlsim.ErrorFeedback(ddlsim.Threshold(0.01)), cost=ddlsim.CodecCost(encode=1e-9))
    if strategy != "all-reduce":
        choice = ddlsim.Compression(choice.compressor, down=ddlsim.Threshold(0.001))
    experiment = ddlsim.Experiment(
        "office-1gbe", "digits-cnn", STRATEGIES[strategy], 16, 4, compression=choice, jitter=ddlsim.Lognormal(0.3),
        training=ddlsim.Training(updates=25, evaluate_every=10),
    )  # fmt: skip
    whole = ddlsim.simulate(experiment)
    part = ddlsim.simulate(experiment.with_(training=ddlsim.Training(updates=11, evaluate_every=10)))
    part.save(tmp_path / "run")
    again = ddlsim.resume(tmp_path / "run", experiment)
    assert again.params.tobytes() == whole.params.tobytes()
    assert again.history.equals(whole.history)
