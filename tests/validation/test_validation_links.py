"""What one-way messages say about links: frames, bursts, scatter; and what is beyond the measurements."""

import csv
import dataclasses
import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from draws import few

from ddlsim import simulate
from ddlsim.cluster import load_cluster, star, with_detail
from ddlsim.cluster.calibrated import (
    PER_DOUBLING,
    PER_MESSAGE,
    Beyond,
    beyond,
    current_parameters,
    deviation,
    learned,
    operation_kind,
    unmeasured,
    with_parameters,
)
from ddlsim.cluster.calibration_table import value_of
from ddlsim.collectives import build
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.network import schedule_time
from ddlsim.validation import calibrate, load_calibration
from ddlsim.validation.links import find_shape
from ddlsim.validation.log_fit import fit_noise, scatter

DATA = Path(__file__).parents[1] / "accuracy" / "data" / "minicluster"
SIZES = np.array([1.0, 64, 256, 1024, 1448, 2896, 4096, 8192, 16384, 65536, 262144, 1048576, 4194304])
RATE = 12.5e6


def framed(nbytes, burst=0.0, header=66.0, payload=1448.0, latency=80e-6):
    return latency + np.maximum(0.0, nbytes + header * np.ceil(nbytes / payload) - burst) / RATE


def noisy(seconds, relative, absolute, seed=0):
    errors = np.random.default_rng(seed).standard_normal(len(seconds))
    return seconds * np.exp(scatter(seconds, relative, absolute) * errors)


def row(nbytes, seconds, operation="one_way", n_ranks=2):
    experiment = "point_to_point" if operation == "one_way" else "collective"
    return Measurement(
        experiment=experiment, operation=operation, n_ranks=n_ranks, n_hosts=n_ranks, nbytes=int(nbytes),
        median_s=float(seconds),
    )  # fmt: skip


def parameter(calibration, name):
    return next(p for p in calibration.parameters if p.name == name)


@pytest.mark.parametrize(("header", "payload"), [(66.0, 1448.0), (90.0, 1448.0), (66.0, 8948.0)])
@pytest.mark.parametrize("burst", few([0.0, 4542.0, 60000.0], 1, start=1))
def test_frames_and_bursts_are_found_together(header, payload, burst):
    seconds = noisy(framed(SIZES, burst, header, payload), 0.001, 5e-6)
    found, plain = find_shape(SIZES, seconds, RATE)
    assert found.criterion < plain.criterion
    assert (found.header, found.payload) == (header, payload)
    assert found.burst == pytest.approx(burst, rel=0.05)
    assert found.latency == pytest.approx(80e-6, rel=0.1)


def test_links_that_do_nothing_besides_carrying_bytes_are_left_alone():
    """At 80 % of the file's rate, which no frames explain."""
    for seed in range(3):
        seconds = noisy(60e-6 + SIZES / (0.8 * RATE), 0.01, 2e-6, seed)
        found, plain = find_shape(SIZES, seconds, RATE)
        assert found is plain
        assert found.rate == pytest.approx(0.8 * RATE, rel=0.02)


def test_short_times_scatter_by_a_time_of_their_own():
    random = np.random.default_rng(0)
    seconds = np.geomspace(50e-6, 1.0, 300)
    errors = scatter(seconds, 0.005, 10e-6) * random.standard_normal(300)
    relative, absolute = fit_noise(errors, seconds)
    assert relative == pytest.approx(0.005, rel=0.25)
    assert absolute == pytest.approx(10e-6, rel=0.4)
    assert fit_noise(errors[:3], seconds[:3])[1] == 0.0  # too few to tell


def sweep(algorithm="oneway", mbps="100"):
    with (DATA / "p2p.csv").open(encoding="utf-8", newline="") as file:
        return [row(r["bytes"], r["median_s"]) for r in csv.DictReader(file)
                if (r["algorithm"], r["link_mbps"]) == (algorithm, mbps)]  # fmt: skip


@pytest.fixture(scope="module")
def calibration():
    """Measured one-way messages of real TCP on links of 100 Mbit/s, burst 4,542 B, frames of 1,448 B in 1,514."""
    return calibrate(sweep(), star(8, bandwidth="100 Mbit/s", latency="35 us"))


def test_a_measured_sweep_gives_the_facts_of_its_links(calibration):
    values = {p.name: p.value for p in calibration.parameters}
    assert values["between.frame_header"] == 66.0
    assert values["between.frame_payload"] == 1448.0
    assert values["between.reverse_load"] == pytest.approx(66 / 3028)
    assert values["between.burst"] == pytest.approx(4542.0, rel=0.05)
    assert values["between.bandwidth"] == pytest.approx(12.5e6 * 1448 / 1514, rel=0.003)
    assert values["between.bandwidth"] <= 12.5e6 * 1448 / 1514  # no faster than the wire
    assert 50e-6 < values["between.latency"] < 110e-6
    assert any("TCP in Ethernet frames and a burst" in note for note in calibration.notes)
    assert not any("bad fit" in note for note in calibration.notes)


def test_collectives_that_were_not_fitted_lie_in_their_intervals(calibration):
    """One-way trees and the series under reno, whose flows share fairly: what was measured of them at 100 Mbit/s."""
    names = {"own_ring_allreduce": "ring", "own_binomial_tree_allreduce": "binomial_tree(1)"}
    with (DATA / "collectives.csv").open(encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["algorithm"] in names and r["link_mbps"] == "100"]
    fair = [r for r in rows if "cc=reno" in r["extra"] or "tree" in r["algorithm"]]
    predicted = [
        calibration.time("all_reduce", float(r["bytes"]), int(r["n"]), algorithm=names[r["algorithm"]]) for r in fair
    ]
    intervals = [(each, float(r["median_s"])) for each, r in zip(predicted, fair, strict=True)]
    errors = [abs(interval.value / measured - 1.0) for interval, measured in intervals]
    assert len(errors) > 10
    assert statistics.median(errors) < 0.01
    assert statistics.mean(errors) < 0.025
    assert sum(measured in interval for interval, measured in intervals) >= 0.9 * len(intervals)
    # links without a transport: rings under whatever control of congestion was measured
    assert statistics.median((i.high - i.low) / 2 / i.value for i, _ in intervals) < 0.1


@pytest.mark.slow
def test_intervals_are_as_wide_as_unseen_sizes_need(calibration):
    """Every size of the sweep left out in turn: at most one in ten outside, and large ones are sure within 3 %."""
    rows = sweep()
    cluster = star(2, bandwidth="100 Mbit/s", latency="35 us")
    inside = []
    for i in (3, 9, 12, 15):
        found = calibrate(rows[:i] + rows[i + 1 :], cluster)
        interval = found.time("one_way", rows[i].nbytes)
        inside.append(rows[i].median_s in interval)
        if rows[i].nbytes >= 65536:
            assert interval.high / interval.low < 1.06
    assert sum(inside) >= len(inside) - 1


def test_what_was_not_measured_is_told_and_less_sure(calibration):
    measured, other = calibration.time("one_way", 10**6), calibration.time("all_reduce", 10**6, 2)
    assert measured.notes == ()
    assert other.notes == ("extrapolated: all_reduce was not measured",)
    eight, larger = calibration.time("all_reduce", 10**6, 8), calibration.time("all_reduce", 2**26, 8)
    assert eight.notes[1:] == ("extrapolated: 8 ranks (measured: 2)",)
    assert larger.notes[1] == "extrapolated: 6.71089e+07 bytes (measured: 1 to 8.38861e+06)"
    widths = [math.log(i.high / i.low) for i in (measured, other, eight, larger)]
    assert all(a < b for a, b in itertools.pairwise(widths))


def test_another_generation_of_software_is_told_and_less_sure():
    cluster = star(2, bandwidth="1 Gbit/s", latency="35 us")
    rows = [dataclasses.replace(row(s, 80e-6 + s / 1.2e8), version="NCCL 2.18") for s in (8, 10**5, 10**7)]
    found = load_calibration(calibrate(rows, cluster).cluster)
    measured, other = (found.time("one_way", 10**6, version=version) for version in ("NCCL 2.18", "NCCL 2.27"))
    assert measured.notes == ()
    assert other.notes == ("extrapolated: NCCL 2.27, measured NCCL 2.18",)
    assert other.high / other.low > measured.high / measured.low
    both = calibrate([*rows, dataclasses.replace(rows[0], version="NCCL 2.27")], cluster)
    assert any(note.startswith("warning: 2 software versions fitted together") for note in both.notes)


def test_how_far_beyond():
    """By hand: 8 and 32 ranks are one and three doublings beyond 2 to 4; 1 is one below."""
    assert beyond(3, (2, 4), "ranks").variance == 0.0
    assert beyond(8, (2, 4), "ranks").variance == pytest.approx(PER_DOUBLING**2)
    assert beyond(32, (2, 4), "ranks").variance == pytest.approx(3 * PER_DOUBLING**2)
    assert beyond(1, (2, 4), "ranks") == dataclasses.replace(
        beyond(8, (2, 4), "ranks"), notes=("extrapolated: 1 ranks (measured: 2 to 4)",)
    )


def test_an_operation_that_was_not_measured_deviates():
    """As far as rings were measured to; short messages, which are all latency, by the latency of each besides."""
    known = unmeasured("", "collective/ring")
    assert (known.faster, known.slower) == learned()["collective/ring"]
    assert operation_kind("all_reduce", "ring(2)", "", 2**16) == "collective/ring"
    assert operation_kind("one_way", "", "tcp-reno", 2**16 - 1) == "short message/one_way/tcp-reno"
    cluster = star(4, bandwidth="1 Gbit/s", latency="35 us")
    found = calibrate([row(s, 80e-6 + s / 1.2e8) for s in np.geomspace(8, 1e7, 12)], cluster)
    for nbytes, least, most in ((8, 0.9 * PER_MESSAGE, 1.1 * PER_MESSAGE), (10**8, 0.0, 0.03)):
        short, known = found.time("all_reduce", nbytes, 2), deviation(operation_kind("", "ring", "", nbytes))
        for half, side in ((math.log(short.value / short.low), known.faster), (math.log(short.high / short.value),
                                                                               known.slower)):  # fmt: skip
            assert math.hypot(1.96 * least, side) < half < math.hypot(1.96 * most, side)


@pytest.mark.slow
def test_the_slow_side_is_larger_and_each_algorithm_has_its_own():
    """One-sided quantiles, learned from measured families: what is not modelled makes rings under TCP slower."""
    cluster = with_detail(load_cluster(star(4, bandwidth="1 Gbit/s", latency="35 us")), transport="tcp-reno")
    found = calibrate([row(s, 80e-6 + s / 1.2e8) for s in np.geomspace(8, 1e7, 12)], cluster)
    widths = {}
    for algorithm in ("ring", "halving_doubling", "gloo_ring"):
        time = found.time("all_reduce", 10**8, 4, algorithm=algorithm)
        assert time.high / time.value > time.value / time.low
        assert all(note.startswith("extrapolated: ") for note in time.notes)
        widths[algorithm] = time.high / time.low
    assert len(set(widths.values())) == 3


def test_where_no_family_resembles_the_interval_is_wide_and_says_so():
    assert deviation("collective/ring/tcp-reno").notes == ()
    assert deviation("collective/ring/quantum").notes == ()  # rings by other transports
    for kind in ("teleport/now", "collective/my_own/tcp-reno", "run/my-strategy"):
        unlike = deviation(kind)
        assert unlike.notes[0].startswith(f"no measured family resembles {kind}; ")
        assert unlike.slower > 0.2


def test_a_curve_is_extrapolated_too():
    truth = load_cluster(star(8, bandwidth="1 Gbit/s", latency="50 us"))
    rows = [row(s, 1.3 * schedule_time(truth, build("ring", 4, s, kind="all_reduce"), truth.workers[:4].tolist(), s),
                "all_reduce", 4) for s in (1e4, 1e5, 1e6, 1e7)]  # fmt: skip
    found = calibrate([*[row(s, 1e-4 + s / 1.25e8) for s in (8, 1e4, 1e6)], *rows], truth)
    near, far = found.time("all_reduce", 1e6, 4), found.time("all_reduce", 1e6, 8)
    assert near.notes == ()
    assert far.notes == ("extrapolated: 8 ranks (measured: 4)",)
    assert far.high / far.low > near.high / near.low


def test_a_bad_fit_is_a_warning_that_says_which_sizes():
    """Twice the time in the middle of the sizes, as of a protocol that is not there on either side."""
    seconds = framed(SIZES)
    seconds[4:8] *= 4.0
    cluster = star(2, bandwidth="300 Mbit/s", latency="35 us")
    found = calibrate([row(s, t) for s, t in zip(SIZES, seconds, strict=True)], cluster)
    (warning,) = [note for note in found.notes if note.startswith("warning")]
    assert "poor fit" in warning
    assert "1.448 kB" in warning
    assert warning in str(found)


@pytest.mark.slow
def test_details_go_into_the_file_and_come_back(tmp_path, calibration):
    path = tmp_path / "cluster.toml"
    lines = ["[generator]", 'type = "star"', "n_hosts = 8", 'bandwidth = "100 Mbit/s"', 'latency = "35 us"', ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "calibrated.toml"
    found = calibrate(sweep(), path)
    found.save(out, path)
    again = load_calibration(out)
    assert (again.absolute, again.ranks) == (pytest.approx(found.absolute, rel=1e-4), (2, 2))
    assert current_parameters(again.cluster) == pytest.approx(current_parameters(found.cluster), rel=1e-4)
    ours, theirs = again.time("all_reduce", 10**6, 4), found.time("all_reduce", 10**6, 4)
    assert (ours.low, ours.value, ours.high) == pytest.approx((theirs.low, theirs.value, theirs.high), rel=1e-3)
    drawn = found.sampled(np.random.default_rng(1))
    assert current_parameters(drawn)["between.frame_payload"] == 1448.0
    assert current_parameters(drawn)["between.burst"] != current_parameters(found.cluster)["between.burst"]


@pytest.mark.slow
def test_details_of_the_file_are_kept():
    """Where a file says what the frames are, the measurements are not asked."""
    found = calibrate(sweep(), load_cluster("minicluster"))
    assert {p.name for p in found.parameters} == {"between.latency", "between.bandwidth"}
    assert current_parameters(found.cluster)["between.burst"] == 4542.0


def test_a_measured_rate_refutes_a_limit_of_connections():
    """What two workers have been seen at is what the connections carry; a slower link leaves the limit as it is."""
    cluster = load_cluster(star(2, bandwidth="100 Mbit/s", latency="35 us"))
    told = with_detail(cluster, transport="tcp-cubic", connections=2, flow_rate="20 Mbit/s")
    for rate, left in ((6e6, 0.0), (4e6, 2.5e6)):
        changed = with_parameters(told, {"between.bandwidth": rate})
        assert set(changed.details.flow_rate) == {left}
        assert current_parameters(changed)["between.bandwidth"] == pytest.approx(rate)


@pytest.mark.slow
def test_frames_are_found_where_the_file_names_a_transport_only():
    told = with_detail(load_cluster(star(2, bandwidth="100 Mbit/s", latency="35 us")), transport="roce", unordered=True)
    found = calibrate(sweep(), told)
    plain = calibrate(sweep(), with_detail(told, transport="ideal"))
    assert current_parameters(found.cluster) == current_parameters(plain.cluster)
    assert current_parameters(found.cluster)["between.frame_payload"] == 1448.0


def test_details_as_parameters():
    cluster = load_cluster(star(2, bandwidth="100 Mbit/s", latency="35 us"))
    changed = with_parameters(cluster, {"between.burst": 1e3, "between.bandwidth": 1e7})
    assert current_parameters(changed)["between.burst"] == 1e3
    changed = with_parameters(changed, {"between.frame_header": 66.0, "between.frame_payload": 1448.0})
    assert current_parameters(changed)["between.burst"] == 1e3  # the others stay
    assert value_of("between.reverse_load", "0.02", "x") == 0.02
    for text in ("2", "much", "-0.1"):
        with pytest.raises(ConfigError, match=r"x: between.reverse_load = .* must be between 0 and 1"):
            value_of("between.reverse_load", text, "x")


def test_runs_beyond_the_calibration_say_so():
    """Steps of batch 8 to 16, messages between two hosts: four workers with 64 samples are beyond both."""
    steps = [
        Measurement(experiment="step", operation="training", n_ranks=1, n_hosts=1, batch_size=b, model="resnet50",
                    median_s=0.02 + 0.004 * b)
        for b in (8, 16)
    ]  # fmt: skip
    cluster = star(4, bandwidth="1 Gbit/s", latency="35 us")
    found = calibrate([*[row(s, 80e-6 + s / 1.2e8) for s in (8, 10**5, 10**7)], *steps], cluster)

    def beyond_of(workers, batch):
        result = simulate(found.cluster, "resnet50", workers=workers, batch_size=batch, steps=2, warmup=0)
        return [note for note in result.notes if note.startswith("extrapolated")]

    assert beyond_of(1, 8) == []
    assert beyond_of(4, 64) == [
        "extrapolated: 4 workers (measured: 2)", "extrapolated: only messages were measured, no collectives",
        "extrapolated: 64 samples of resnet50 (measured: 8 to 16)",
    ]  # fmt: skip


@pytest.mark.slow
def test_intervals_of_runs_widen_beyond_the_calibration():
    """The variance of 200 draws grows by what is given."""
    cluster = star(2, bandwidth="1 Gbit/s", latency="35 us")
    found = calibrate([row(s, 80e-6 + s / 1.2e8) for s in (8, 10**5, 10**7)], cluster)
    spreads = []
    for variance in (0.0, 0.25):
        random = np.random.default_rng(3)
        drawn = (found.sampled(random, outside=Beyond(variance)) for _ in range(200))
        spreads.append(float(np.std(np.log([current_parameters(each)["between.bandwidth"] for each in drawn]))))
    assert spreads[1] ** 2 - spreads[0] ** 2 == pytest.approx(0.25, rel=0.25)
