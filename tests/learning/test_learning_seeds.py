"""Several seeds: the same whatever the number of processes, intervals by the book, curves and comparisons."""

import dataclasses
import math

import numpy as np
import pytest
import scipy
from draws import few
from learning_reference import STAR

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.learning.monitor import Row
from ddlsim.run.seeds import SeedRun, Seeds, t_quantile


def experiment(strategy=None, **more):
    training = ddlsim.Training(rate=0.1, updates=30, evaluate_every=10, **more)
    strategy = strategy or ddlsim.AllReduce("ring")
    return ddlsim.Experiment(STAR, "digits-cnn", strategy, 16, 4, jitter=ddlsim.Lognormal(0.3), training=training)


def row(x, accuracy):
    return Row(float(x), 10 * x, 0, 0.1 * x, 0.1, math.nan, 1.0 - accuracy, accuracy, 1e6 * x, 2.0, math.nan)


def made_up(*accuracies, **more):
    """Runs that evaluated at 0, 1, 2, ... s and found these accuracies."""
    runs = [
        SeedRun(seed, tuple(row(x, a) for x, a in enumerate(values)), float(len(values)), 100.0 + seed, 1e9, 2.0, "x")
        for seed, values in enumerate(accuracies)
    ]
    return Seeds(experiment(**more), tuple(runs))


@pytest.mark.slow
def test_processes_change_nothing():
    """Here, and in two processes; seed 4 is the run that simulate makes."""
    wanted = experiment(ddlsim.AsyncParameterServer()).with_(seed=3)
    here, there = (ddlsim.simulate_seeds(wanted, 3, processes=n) for n in (1, 2))
    assert here.history.equals(there.history)
    assert [run.seed for run in there.runs] == [3, 4, 5]
    assert len({run.end_time for run in there.runs}) == 3
    alone = ddlsim.simulate(wanted.with_(seed=4))
    of_four = there.history[there.history["seed"] == 4].drop(columns="seed").reset_index(drop=True)
    assert of_four.equals(alone.history)
    assert there.runs[1].throughput == alone.throughput


def test_intervals_are_students():
    values = [0.2, 0.5, 0.9, 0.4]
    found = made_up(*[[0.1, value] for value in values]).accuracy(confidence=0.9)
    low, high = scipy.stats.t.interval(0.9, 3, np.mean(values), scipy.stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, low, high))
    assert (found.n, found.n_missed, found.median) == (4, 0, 0.45)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_quantiles_of_students_t_are_scipys(level):
    for dof in (1, 2, 2.5, 3, 9, 50.5, 199):
        assert t_quantile(dof, level) == pytest.approx(scipy.stats.t.ppf(0.5 + level / 2, dof), rel=1e-10)
    assert t_quantile(math.inf, level) == pytest.approx(scipy.stats.norm.ppf(0.5 + level / 2), rel=1e-12)


def test_intervals_do_not_go_beyond_what_there_is():
    """0.7 and 0.9 are 0.8 +- 12.7 * 0.1; an accuracy is at most 1, and no time is below 0."""
    found = made_up([0.1, 0.7], [0.1, 0.9])
    assert (found.accuracy().low, found.accuracy().high) == (0.0, 1.0)
    assert found.time_to_accuracy(0.1).low == 0.0
    assert made_up([0.1, 0.9], [0.1, 0.2, 0.9]).time_to_accuracy(0.9).low == 0.0


def test_they_show_themselves_in_a_line():
    text = repr(made_up([0.1, 0.9]))
    assert text.startswith("<Seeds: 1 of all-reduce (ring, ddp), accuracy 0.9 ")
    assert len(text) < 100


def test_texts_stand_below_each_other():
    """Longer labels ("time to 0.95") shifted their line."""
    _, *lines = str(made_up([0.1, 0.9], [0.1, 0.8])).splitlines()
    assert {line[:14].rstrip() for line in lines} == {"accuracy", "throughput"}
    assert all(line[13] == " " != line[14] for line in lines)


def test_a_clock_without_chance_says_so():
    remark = "the same for all seeds, because nothing random affects the clock"
    several = made_up([0.1, 0.9], [0.1, 0.8])
    assert remark not in str(several)
    equal = tuple(dataclasses.replace(run, throughput=100.0) for run in several.runs)
    assert remark in str(Seeds(several.experiment, equal))
    assert remark not in str(Seeds(several.experiment, equal[:1]))


def test_one_seed_has_no_interval():
    found = made_up([0.1, 0.5]).accuracy()
    assert (found.mean, found.n) == (0.5, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_seeds_that_never_reach_the_target_are_censored():
    """Reached at 1 s, at 2 s, never in a run of 2 s: the third counts with at least 2 s, in the median as later."""
    several = made_up([0.1, 0.9, 0.9], [0.1, 0.2, 0.9], [0.1, 0.2, 0.3])
    found = several.time_to_accuracy(0.8)
    assert several.times_to_accuracy(0.8) == [1.0, 2.0, math.inf]
    ends = [run.end_time for run in several.runs]
    assert found.mean == pytest.approx((1.0 + 2.0 + ends[2]) / 3)
    assert (found.median, found.typical, found.high, found.n, found.n_missed) == (2.0, 2.0, math.inf, 2, 1)
    assert found.low < found.mean
    assert str(found).startswith(f"median 2, mean at least {found.mean:.4g} (95 %: at least ")
    assert str(found).endswith("; 2 of 3 seeds)")
    never = several.time_to_accuracy(0.95)
    assert (never.mean, never.n, never.n_missed) == (math.inf, 0, 3)
    assert str(never) == "never, in 3 seeds"
    assert made_up([0.1, 0.9], [0.1, 0.2]).time_to_accuracy(0.8).median == math.inf


def test_missing_the_target_never_helps():
    """One lucky seed of four is not faster than four that reach the target a little later."""
    lucky = made_up([0.1, 0.9, 0.9, 0.9], *[[0.1, 0.2, 0.2, 0.2]] * 3)
    sure = made_up(*[[0.1, 0.2, 0.9, 0.9]] * 4)
    assert lucky.time_to_accuracy(0.8).typical > sure.time_to_accuracy(0.8).typical
    table = ddlsim.compare({"lucky": lucky, "sure": sure}, 0.8).table
    assert table["time"]["lucky"] == math.inf > table["time"]["sure"] == 2.0
    assert table["n_reached"].tolist() == [1, 4]
    text = str(ddlsim.compare({"lucky": lucky, "sure": sure}, 0.8))
    assert "mean at least" in text
    assert "1 of 4 seeds" in text


def test_curves_extend_to_the_last_seed():
    """The first has ended after 1 s with 0.9, which it keeps."""
    curve = made_up([0.1, 0.9], [0.1, 0.3, 0.5, 0.7]).curve("accuracy")
    assert curve.index.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert curve["mean"].tolist() == pytest.approx([0.1, 0.6, 0.7, 0.8])
    assert curve["n"].tolist() == [2, 2, 1, 1]


def test_times_to_targets_are_by_the_moving_average():
    assert made_up([0.0, 0.9, 0.5, 0.9, 0.9], moving_average=2).times_to_accuracy(0.85) == [4.0]


def test_a_curve_joins_evaluations_and_goes_as_far_as_the_last_seed():
    several = made_up([0.0, 0.4, 0.8, 0.9], [0.2, 0.2, 0.4])
    curve = several.curve("accuracy", "time")
    assert curve.index.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert curve["mean"].tolist() == pytest.approx([0.1, 0.3, 0.6, 0.65])
    half = scipy.stats.t.ppf(0.975, 1) * scipy.stats.sem([0.9, 0.4])
    assert (curve["high"] - curve["mean"]).iloc[-1] == pytest.approx(half)
    runs = several.runs
    shifted = dataclasses.replace(runs[1], history=tuple(r._replace(time=r.time + 0.5) for r in runs[1].history))
    between = Seeds(several.experiment, (runs[0], shifted)).curve()
    assert between.index.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    means = [(0.2 + 0.2) / 2, 0.3, 0.4, (0.8 + 0.3) / 2, (0.85 + 0.4) / 2, (0.9 + 0.4) / 2]
    assert between["mean"].tolist() == pytest.approx(means)


@pytest.mark.parametrize("x", few(["time", "updates", "epoch", "nbytes"], 1))
def test_learning_curves_are_drawn_over(x, tmp_path):
    several = made_up([0.0, 0.4, 0.8, 0.9], [0.2, 0.3, 0.4, 0.9])
    left, right = ddlsim.plot_learning({"several": several, "other": made_up([0.1, 0.2])}, tmp_path / "l.png", x=x)
    assert [len(axes.lines) for axes in (left, right)] == [2, 2]
    assert len(left.collections) == 1  # the band
    np.testing.assert_allclose(left.lines[0].get_ydata(), [10.0, 35.0, 60.0, 90.0])
    last = {"time": (3.0, "(s)"), "updates": (30.0, "updates"), "epoch": (0.3, "epochs"), "nbytes": (3.0, "(MB)")}[x]
    assert left.lines[0].get_xdata()[-1] == pytest.approx(last[0])
    assert left.get_xlabel().endswith(last[1])
    assert left.lines[0].get_linestyle() != left.lines[1].get_linestyle()
    assert left.lines[0].get_marker() != left.lines[1].get_marker()
    assert (tmp_path / "l.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_one_run_is_drawn_with_its_training_loss_and_target(tmp_path):
    result = ddlsim.simulate(experiment(target_accuracy=0.9))
    left, right = result.plot_learning(tmp_path / "l.pdf")
    assert [line.get_label() for line in right.lines] == ["held-out samples", "training batches"]
    np.testing.assert_allclose(right.lines[1].get_ydata(), result.history["train_loss"].iloc[1:])
    assert left.lines[-1].get_ydata()[0] == 90.0
    assert "(ms)" in left.get_xlabel()


def test_a_comparison_has_the_numbers_of_each_run():
    result = ddlsim.simulate(experiment(ddlsim.AsyncParameterServer()))
    several = made_up([0.1, 0.5, 0.9], [0.1, 0.2, 0.3])
    target = result.history["accuracy"].iloc[1]
    compared = ddlsim.compare({"one": result, "several": several}, target)
    one, both = compared.table.loc["one"], compared.table.loc["several"]
    at = result.history.iloc[1]
    assert (one["time"], one["updates"], one["nbytes"]) == (at["time"], at["updates"], at["nbytes"])
    assert one["accuracy"] == result.accuracy
    assert one["staleness"] == result.mean_staleness > 0.0
    assert (both["n_seeds"], both["throughput"]) == (2, 100.5)
    text = str(ddlsim.compare({"one": result, "several": several}, 0.8)).splitlines()
    assert text[0].split()[:4] == ["run", "time", "to", "80.0"]
    assert "never" in text[1]
    assert "mean at least 2.5 s, 1 of 2 seeds" in text[2]
    assert len({len(line) for line in text}) == 1


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ddlsim.simulate_seeds(ddlsim.Experiment(STAR, "lenet5")), "the experiment has no training"),
    (lambda: ddlsim.simulate_seeds(experiment(), 0), "from 1 to"),
    (lambda: ddlsim.simulate_seeds(experiment(), [1, 1]), "must contain at least one seed, without duplicates"),
    (lambda: ddlsim.simulate_seeds(experiment(), 2, processes=0), "processes = 0"),
    (lambda: ddlsim.simulate_seeds(experiment(ddlsim.AllReduce(lambda n: None)), 2, processes=2), "use processes=1"),
    (lambda: made_up([0.1]).curve("acuracy"), "did you mean 'accuracy'"),
    (lambda: made_up([0.1]).curve(x="times"), "did you mean 'time'"),
    (lambda: made_up([0.1], [0.2]).accuracy(95), "confidence = 95"),
    (lambda: ddlsim.plot_learning({}), "results is empty"), (lambda: ddlsim.compare({}, 0.9), "results is empty"),
    (lambda: ddlsim.plot_learning(made_up([0.1]), x="step"), "unknown x 'step'"),
    (lambda: ddlsim.compare({"a": made_up([0.1])}, 95), "target = 95"),
    (lambda: ddlsim.compare({"a": ddlsim.simulate(STAR, "lenet5", workers=2, steps=2)}, 0.9), "is timing-only"),
], ids=range(13))  # fmt: skip
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.slow
def test_a_seed_that_fails_says_so():
    wrong = dataclasses.replace(experiment(), model="lenet5")
    with pytest.raises(ConfigError, match="samples of shape"):
        ddlsim.simulate_seeds(wrong, 2, processes=2)
