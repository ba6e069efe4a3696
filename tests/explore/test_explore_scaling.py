"""Throughput over numbers of workers: the same as without the page, with bands where something is uncertain."""

import math

import pytest

import ddlsim
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.explore.components import files_of
from ddlsim.explore.jobs import CancelledError, Progress
from ddlsim.explore.screens.scaling import described, run_study, series, study_of, worker_counts
from ddlsim.explore.setup import Setup
from ddlsim.measure import Measurement
from ddlsim.study import load_study


def progress():
    return Progress(lambda call: call(), lambda share, text: None)


def setup(**more):
    return Setup(cluster="office-1gbe", model="lenet5", batch_size=8, steps=2, **more)


def test_numbers_of_workers():
    assert worker_counts("4, 1,2, 2", "office-1gbe") == [1, 2, 4]
    assert worker_counts(" ", "star-1024-10g") == [1, 2, 4, 8, 16, 32, 64, 128]
    n = len(ddlsim.load_cluster("aws-10g-16").workers)
    assert worker_counts("", "aws-10g-16")[-1] == min(n, 128)
    for text in ("0", "2, x", "1.5", "-1", "9999999999"):
        with pytest.raises(ConfigError, match="must be integers of at least 1"):
            worker_counts(text, "office-1gbe")


def test_without_chance_numbers_are_those_of_scaling_and_there_are_no_bands():
    form = setup()
    scaled = run_study(study_of(form, "1, 2, 4", ["local-sgd"], 5), progress())
    assert scaled.bands == ""
    results = ddlsim.scaling(form.experiment(), [1, 2, 4])
    own = results[0].experiment.strategy.label
    shown = series(scaled, "throughput")
    assert len(shown) == 3
    first = next(iter(shown.values()))
    assert first["workers"] == [1, 2, 4]
    assert first["value"] == [result.throughput for result in results]
    assert all(map(math.isnan, first["low"]))
    assert shown["ideal"]["value"] == pytest.approx([n * results[0].throughput for n in (1, 2, 4)])
    efficiency = next(iter(series(scaled, "efficiency").values()))
    assert efficiency["value"] == [100.0 * result.efficiency for result in results]
    assert series(scaled, "cost_per_sample") == {}
    table = described(scaled)
    assert "USD" not in table
    assert own.split("(")[0] in table


def test_jitter_gives_bands_over_seeds():
    scaled = run_study(study_of(setup(jitter=0.2), "2", [], 3), progress())
    assert scaled.bands == "bands: 95 % interval of the mean over 3 seeds of the jitter"
    (points,) = (points for label, points in series(scaled, "throughput").items() if label != "ideal")
    assert points["low"][0] < points["value"][0] < points["high"][0]
    assert " to " in described(scaled)


def test_what_does_not_fit_is_said():
    scaled = run_study(study_of(setup(), "1, 60", [], 5), progress())
    assert [points["workers"] for points in series(scaled, "throughput").values()] == [[1], [1]]
    assert "workers = 60" in described(scaled)


def test_cancelling_ends_it_at_the_next_point(monkeypatch):
    monkeypatch.setattr("ddlsim.explore.jobs.DELAY", 0.0)
    monkeypatch.setattr("ddlsim.explore.jobs.INTERVAL", 0.0)
    said = []

    def show(share, text):
        said.append(text)
        own.cancelled = text == "1 of 3 points"

    own = Progress(lambda call: call(), show)
    with pytest.raises(CancelledError):
        run_study(study_of(setup(), "1, 2, 4", [], 5), own)
    assert said == ["0 of 3 points", "1 of 3 points"]


def test_the_file_is_the_study(tmp_path):
    study = study_of(setup(jitter=0.1), "1, 2", ["local-sgd"], 2)
    toml, program = files_of(study, "scaling")
    path = tmp_path / toml.name
    path.write_text(toml.text)
    assert [point.key for point in load_study(path).points] == [point.key for point in study.points]
    made = {}
    exec(program.text, made)
    assert [point.key for point in study.with_(base=made["base"], vary=made["vary"]).points] == [
        point.key for point in study.points
    ]


def test_calibrated_clusters_give_bands_of_what_the_calibration_is_unsure_about(tmp_path):
    sizes = (1, 10**4, 10**6, 10**7)
    rows = [
        Measurement("point_to_point", "one_way", 2, 2, median_s=(1 + 0.05 * (-1) ** i) * (1e-4 + 8e-9 * n), nbytes=n)
        for i, n in enumerate(sizes)
    ]
    cluster = star(4, bandwidth="1 Gbit/s", latency="50 us")
    path = tmp_path / "calibrated.toml"
    ddlsim.calibrate(rows, ddlsim.load_cluster(cluster)).cluster.save(path)
    form = Setup(cluster=str(path), model="lenet5", batch_size=8, steps=2)
    scaled = run_study(study_of(form, "2, 4", [], 5), progress())
    assert scaled.bands.startswith("bands: 95 % prediction interval from the cluster's calibration, 10 simulations")
    for metric in ("throughput", "efficiency"):
        (points,) = (points for label, points in series(scaled, metric).items() if label != "ideal")
        for low, value, high in zip(points["low"], points["value"], points["high"], strict=True):
            assert low < value < high
    experiment = form.experiment().with_(workers=4)
    sure = ddlsim.predict_interval(experiment, n_draws=10).throughput
    points = next(iter(series(scaled, "throughput").values()))
    assert (points["low"][-1], points["high"][-1]) == pytest.approx((sure.low, sure.high))
