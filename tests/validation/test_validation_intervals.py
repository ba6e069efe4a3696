"""Intervals of runs come from the calibration and from the seeds."""

import dataclasses

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster.calibrated import learned
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
    large = dataclasses.replace(EXPERIMENT, model="resnet18", compute=ddlsim.Measured("100 ms", 32))
    narrow, wide = (predict_interval(large, calibration) for calibration in (quiet, noisy))
    for prediction in (narrow, wide):
        assert prediction.throughput.value == prediction.result.throughput
        assert prediction.throughput.value in prediction.throughput
        assert prediction.step_time.value in prediction.step_time
    assert width(wide.throughput) > 1.5 * width(narrow.throughput) > 0
    assert np.ptp(np.log(wide.throughputs)) > 3 * np.ptp(np.log(narrow.throughputs)) > 0  # without the family's part
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
    with pytest.raises(ConfigError, match="no uncertainty to propagate"):
        predict_interval(dataclasses.replace(EXPERIMENT, workers=1))
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


# ------------------------------------------------------------ of results


def with_steps(**more):
    """Links and steps of digits-cnn: 1 ms + 0.1 ms per sample."""
    steps = [
        Measurement(
            experiment="step", operation="training", n_ranks=1, n_hosts=1, batch_size=b, model="digits-cnn",
            median_s=1e-3 + 1e-4 * b,
        )
        for b in more.pop("batches", (8, 32, 64))
    ]  # fmt: skip
    return calibrate([*measurements(0.0), *steps], "office-1gbe", **more)


def test_a_result_knows_how_sure_it_is(quiet, tmp_path):
    path = tmp_path / "calibrated.toml"
    quiet.save(path, "office-1gbe")
    by_file = dataclasses.replace(EXPERIMENT, cluster=path)
    result = ddlsim.simulate(by_file)
    found = result.interval()
    assert found.throughput.value == result.throughput
    assert found.throughput.low < result.throughput < found.throughput.high
    assert found.throughputs.tolist() == predict_interval(by_file).throughputs.tolist()
    (line,) = [line for line in str(result).splitlines() if line.startswith("interval")]
    assert "(95 %), from the calibration" in line
    assert result.to_dict()["interval"] == found.to_dict()
    assert found.to_dict()["n_draws"] == 20


def test_jitter_alone_makes_a_result_uncertain():
    result = ddlsim.simulate(dataclasses.replace(EXPERIMENT, jitter=Lognormal(0.5)))
    assert "(95 %), from jitter" in str(result)
    assert result.interval(n_draws=3).throughputs[0] == result.throughput


def test_a_certain_result_has_no_line_and_says_why():
    result = ddlsim.simulate(dataclasses.replace(EXPERIMENT, workers=1))
    assert "interval" not in str(result)
    assert result.to_dict()["interval"] is None
    with pytest.raises(ConfigError, match="no uncertainty to propagate"):
        result.interval()


@pytest.mark.parametrize(("strategy", "kind"), [
    (ddlsim.AllReduce(overlap="none"), "run/all-reduce"), (ddlsim.ParameterServer(servers=1), "run/parameter-server"),
])  # fmt: skip
def test_runs_without_a_calibration_deviate_as_measured_ones_did(strategy, kind):
    """A given compute time, links as the file says: by how much runs with this strategy were faster and slower."""
    result = ddlsim.simulate(dataclasses.replace(EXPERIMENT, strategy=strategy))
    assert "interval" not in str(result)
    found, (faster, slower) = result.interval(), learned()[kind]
    assert slower != faster
    assert found.throughput.low == pytest.approx(result.throughput * np.exp(-slower))
    assert found.throughput.high == pytest.approx(result.throughput * np.exp(faster))
    assert found.step_time.high == pytest.approx(result.step_time * np.exp(slower))
    assert found.throughput.notes == ()
    narrower = result.interval(level=0.5).throughput
    assert found.throughput.low < narrower.low < narrower.high < found.throughput.high


def test_a_run_that_no_family_resembles_says_so_and_is_unsure():
    guessed = ddlsim.simulate(dataclasses.replace(EXPERIMENT, compute=None)).interval()
    (note,) = guessed.throughput.notes
    assert note.startswith("no measured family resembles run/unmeasured compute time; ")
    assert note in str(guessed)
    assert guessed.to_dict()["notes"] == [note]
    pushing = ddlsim.simulate(dataclasses.replace(EXPERIMENT, strategy=ddlsim.GossipSGD())).interval()
    assert pushing.step_time.notes[0].startswith("no measured family resembles run/gossip-sgd; ")
    assert pushing.step_time.high > 1.2 * pushing.step_time.value


def test_large_runs_print_how_to_get_it():
    result = ddlsim.simulate(dataclasses.replace(EXPERIMENT, jitter=Lognormal(0.5), steps=200))
    (line,) = [line for line in str(result).splitlines() if line.startswith("interval")]
    assert line.endswith("from jitter: call result.interval() to simulate it")
    assert result.interval(n_draws=2).throughput.low <= result.throughput


def test_runs_take_the_steps_that_were_measured_on_the_cluster():
    calibrated = with_steps().cluster
    alone = ddlsim.simulate(calibrated, "digits-cnn", workers=1, batch_size=16)
    assert alone.step_time == pytest.approx(2.6e-3, rel=1e-5)
    assert "compute time of digits-cnn: measured on this cluster, for batch sizes 8 to 64" in alone.notes
    assert alone.experiment.compute.c1 == pytest.approx(1e-4, rel=1e-5)
    assert alone.given.compute is None
    found = alone.interval()
    assert found.throughput.low < alone.throughput < found.throughput.high  # the steps' own uncertainty is drawn
    own = ddlsim.simulate(calibrated, "digits-cnn", workers=1, batch_size=16, compute=ddlsim.Measured("2 ms", 16))
    assert own.step_time == pytest.approx(2e-3)
    other = ddlsim.simulate(calibrated, "lenet5", workers=1, batch_size=16)
    assert other.workloads[0].basis.startswith("roofline")
    device = ddlsim.simulate(calibrated, "digits-cnn", workers=1, batch_size=16, device="v100")
    assert device.workloads[0].basis.startswith("roofline")


def test_steps_that_do_not_fit_are_left_out_and_said():
    calibrated = with_steps(batches=(8,)).cluster
    fits = ddlsim.simulate(calibrated, "digits-cnn", workers=1, batch_size=8)
    assert fits.step_time == pytest.approx(1.8e-3, rel=1e-5)
    other = ddlsim.simulate(calibrated, "digits-cnn", workers=1, batch_size=16)
    assert "the measured step times of digits-cnn are not used: they are for batch size 8 only" in other.notes
    assert other.interval(n_draws=2).throughput.value == other.throughput


def test_jitter_of_the_calibration_is_named_but_not_put_in():
    times = np.random.default_rng(0).gamma(50.0, 4e-5, 40)
    calibrated = with_steps(step_times=times).cluster
    plain = ddlsim.simulate(calibrated, "digits-cnn", workers=2, batch_size=32)
    assert plain.step_times == pytest.approx(plain.step_time)
    assert any("the calibration contains step-time jitter" in note for note in plain.notes)
    assert plain.interval(n_draws=3).throughput.value == plain.throughput
    assert predict_interval(plain.given, n_draws=3).throughput.value < plain.throughput
