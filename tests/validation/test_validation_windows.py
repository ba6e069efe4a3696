"""Windows of TCP as what limits measured messages, told apart from frames and from a low rate."""

import functools
import itertools

import numpy as np
import pytest
from draws import few, rows

from accuracy import aws
from ddlsim import collective_time, load_cluster
from ddlsim.cluster import star, with_detail
from ddlsim.cluster.calibrated import current_parameters, with_parameters
from ddlsim.measure import Measurement
from ddlsim.validation import calibrate, load_calibration

SIZES = (64, 1024, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
FRAMES = {"frame_header": 66.0, "frame_payload": 1448.0}


def pair(rate, latency):
    return load_cluster(star(2, bandwidth=rate, latency=latency / 2.0))


def measured(nbytes, seconds):
    return Measurement(
        experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=nbytes, median_s=seconds
    )


@functools.cache
def calibrated(rate, latency, seed, **truth):
    """Return what messages with a scatter of 1 % over links of these details tell a file without any."""
    true = with_detail(pair(rate, latency), **dict(truth))
    noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal(len(SIZES))).tolist()
    found = [
        measured(nbytes, collective_time(true, "binomial", nbytes, kind="broadcast") * factor)
        for nbytes, factor in zip(SIZES, noise, strict=True)
    ]
    return calibrate(found, pair(rate, latency))


def values(calibration):
    return {p.name.removeprefix("between."): p.value for p in calibration.parameters}


def test_the_rate_of_a_window_is_window_over_round_trip():
    """And frames of TCP are those of its transport, so with_parameters sets both."""
    windowed = with_parameters(pair(1.25e9, 5e-3), {"between.window": 2.0**20, "between.warm": 1.0})
    assert current_parameters(windowed)["between.window"] == 2.0**20
    assert set(windowed.details.transport) == {"tcp-cubic"}
    took = [collective_time(windowed, "binomial", n, kind="broadcast") for n in (1e7, 2e7)]
    assert 1e7 / (took[1] - took[0]) == pytest.approx(2.0**20 / 10e-3)


@pytest.mark.parametrize(("rate", "latency"), rows([(1.25e9, 5e-3), (2.5e8, 5e-3), (1.25e9, 20e-3)], 1))
@pytest.mark.parametrize("seed", few(range(3), 1))
@pytest.mark.parametrize("window", few([3.0 * 2**20, 256.0 * 1024], 1))
def test_windows_are_found_where_they_are_the_cause(rate, latency, seed, window):
    found = calibrated(rate, latency, seed, transport="tcp-cubic", window=window)
    limit = min(rate, window / (2 * latency))
    assert any("TCP, a window of" in note and "slow start" in note for note in found.notes)
    assert "frame_header" not in values(found)
    assert values(found)["latency"] == pytest.approx(latency, rel=0.02)
    took = [collective_time(found.cluster, "binomial", nbytes, kind="broadcast") for nbytes in (1e9, 2e9)]
    assert 1e9 / (took[1] - took[0]) == pytest.approx(limit, rel=0.03)
    if limit < rate:
        assert values(found)["window"] == pytest.approx(window, rel=0.05)
        assert values(found)["bandwidth"] == pytest.approx(rate, rel=0.3)


@pytest.mark.parametrize("seed", few(range(3), 0))
def test_a_window_of_the_usual_size_is_found_without_slow_start_too(seed):
    found = calibrated(1.25e9, 5e-3, seed, transport="tcp-cubic", warm=True)
    assert values(found)["window"] == pytest.approx(3.0 * 2**20, rel=0.03)
    assert values(found)["warm"] == 1.0


@pytest.mark.parametrize(("rate", "latency"), rows([(1.25e9, 5e-3), (2.5e8, 5e-3), (1.25e9, 20e-3)], 0))
@pytest.mark.parametrize("seed", range(3))
def test_frames_are_found_where_they_are_the_cause(rate, latency, seed):
    found = calibrated(rate, latency, seed, **FRAMES)
    assert (values(found)["frame_header"], values(found)["frame_payload"]) == (66.0, 1448.0)
    assert "window" not in values(found)


def test_a_rate_that_no_usual_window_explains_is_a_bandwidth():
    slow = pair(0.3 * 1.25e9, 20e-3)
    messages = [measured(n, collective_time(slow, "binomial", n, kind="broadcast")) for n in SIZES[::2]]
    found = values(calibrate(messages, pair(1.25e9, 20e-3)))
    assert "window" not in found
    assert found["bandwidth"] == pytest.approx(0.3 * 1.25e9, rel=0.01)


def test_short_round_trips_are_left_alone():
    """Rate x round trip below 1 MiB: nothing is fitted besides what was."""
    found = calibrated(1.25e8, 50e-6, 0)
    assert "window" not in values(found)
    assert not any("window" in note for note in found.notes)


def test_what_was_found_goes_into_the_file_and_comes_back(tmp_path):
    found = calibrated(1.25e9, 5e-3, 0, transport="tcp-cubic", window=3.0 * 2**20)
    pair(1.25e9, 5e-3).save(tmp_path / "pair.toml")
    found.save(tmp_path / "calibrated.toml", tmp_path / "pair.toml")
    loaded = load_cluster(tmp_path / "calibrated.toml")
    assert loaded.details.window == pytest.approx(found.cluster.details.window, rel=1e-5)
    assert set(loaded.details.transport) == {"tcp-cubic"}
    assert load_calibration(tmp_path / "calibrated.toml").time("one_way", 1 << 26).value == pytest.approx(
        found.time("one_way", 1 << 26).value, rel=1e-4
    )


@pytest.mark.slow  # a calibration for each of the measured delays and rates
def test_gloo_behind_long_delays_is_limited_by_its_window():
    """Two sizes for each delay and rate, over one connection; NCCL has 16, and no window of one explains it."""
    messages = [row for row in aws.read() if row.operation == "p2p"]
    blamed = set()
    for (library, delay, rate), own in itertools.groupby(
        sorted(messages, key=lambda row: (row.backend, row.delay, row.rate)),
        key=lambda row: (row.backend, row.delay, row.rate),
    ):
        file = pair(min(rate, aws.NOMINAL), delay + aws.BASE_DELAY)
        found = calibrate([measured(int(row.nbytes), row.seconds) for row in own], file)
        if "window" in values(found):
            blamed.add((library, round(delay * 1e3), round(min(rate, aws.NOMINAL) * 8e-9)))
    assert blamed == {("gloo", 5, 2), ("gloo", 5, 10), ("gloo", 10, 1), ("gloo", 10, 10)}
