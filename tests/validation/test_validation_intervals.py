"""Intervals of runs come from the calibration and from the seeds."""

import dataclasses

import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.validation import calibrate, predict_interval
from ddlsim.workload.jitter import Lognormal

EXPERIMENT = ddlsim.Experiment(
    "office-1gbe", "digits-cnn", ddlsim.AllReduce(overlap="none"), batch_size=32, workers=4, steps=4,
    compute=ddlsim.Measured("2 ms", 32),
)  # fmt: skip


def measurements(noise):
    """One-way messages of 100 us + nbytes / 1 Gbit/s, every other one `noise` too slow or too fast."""
    sizes = (8, 1024, 16_384, 262_144, 4_194_304, 33_554_432)
    return [
        Measurement(
            experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=s,
            median_s=(1e-4 + s / 1.17e8) * (1 + noise * (-1) ** i),
        )
        for i, s in enumerate(sizes)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def quiet():
    return calibrate(measurements(0.0), "office-1gbe")


def width(interval):
    return (interval.high - interval.low) / interval.value


def test_the_interval_holds_the_prediction_and_widens_with_the_noise(quiet):
    noisy = calibrate(measurements(0.2), "office-1gbe")
    narrow, wide = (predict_interval(EXPERIMENT, calibration) for calibration in (quiet, noisy))
    for prediction in (narrow, wide):
        assert prediction.throughput.value == prediction.result.throughput
        assert prediction.throughput.value in prediction.throughput
        assert prediction.step_time.value in prediction.step_time
    assert width(wide.throughput) > 3 * width(narrow.throughput) > 0
    assert len(wide.throughputs) == 20


def test_the_same_seed_gives_the_same_interval(quiet):
    one, same, other = (predict_interval(EXPERIMENT, quiet, n_draws=5, seed=seed) for seed in (1, 1, 2))
    assert one.throughputs.tolist() == same.throughputs.tolist()
    assert one.throughputs.tolist() != other.throughputs.tolist()


def test_jitter_alone_gives_an_interval_by_seeds():
    jittery = dataclasses.replace(EXPERIMENT, jitter=Lognormal(0.5))
    runs = [ddlsim.simulate(dataclasses.replace(jittery, seed=seed)).throughput for seed in range(6)]
    assert predict_interval(jittery, n_draws=6).throughputs.tolist() == runs


def test_a_calibrated_file_is_enough(quiet, tmp_path):
    path = tmp_path / "calibrated.toml"
    quiet.save(path, "office-1gbe")
    own = predict_interval(dataclasses.replace(EXPERIMENT, cluster=path), n_draws=4)
    given = predict_interval(EXPERIMENT, quiet, n_draws=4)
    assert own.throughputs == pytest.approx(given.throughputs, rel=1e-4)


def test_measured_steps_replace_the_guess(quiet):
    steps = [
        Measurement(
            experiment="step", operation="training", n_ranks=1, n_hosts=1, batch_size=b, model="digits-cnn",
            median_s=1e-3 + 1e-4 * b,
        )
        for b in (8, 32, 64)
    ]  # fmt: skip
    calibration = calibrate([*measurements(0.0), *steps], "office-1gbe")
    alone = dataclasses.replace(EXPERIMENT, compute=None, workers=1)
    assert predict_interval(alone, calibration, n_draws=2).step_time.value == pytest.approx(1e-3 + 32e-4)
    kept = dataclasses.replace(EXPERIMENT, workers=1)
    assert predict_interval(kept, calibration, n_draws=2).step_time.value == pytest.approx(2e-3)


def test_nothing_uncertain_is_refused(quiet):
    with pytest.raises(ConfigError, match="nothing is uncertain"):
        predict_interval(EXPERIMENT)
    with pytest.raises(ConfigError, match="n_draws"):
        predict_interval(EXPERIMENT, quiet, n_draws=1)
    with pytest.raises(ConfigError, match="level"):
        predict_interval(EXPERIMENT, quiet, level=95)


def test_operations_have_intervals_too(quiet):
    interval = quiet.time("all_reduce", 1e6, n_ranks=4)
    assert interval.value == pytest.approx(ddlsim.collective_time(quiet.cluster, "ring", 1e6, ranks=4))
    assert interval.low < interval.value < interval.high
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        quiet.time("all_reduced", 1e6)
    with pytest.raises(ConfigError, match="nbytes"):
        quiet.time("one_way", 0)
