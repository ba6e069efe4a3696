"""Plots of studies: what they draw is what the table says."""

import dataclasses
import math

import numpy as np
import pytest
from report_studies import BANDWIDTHS, STRATEGIES, WORKERS, efficiency, learners, study

from ddlsim.errors import ConfigError
from ddlsim.report.study_figures import breakdown, heat_map, learning, lines, one_change, pareto, tornado
from ddlsim.report.study_labels import answers, changes, front_of, named
from ddlsim.run.sensitivity import Sensitivity


def test_cells_of_a_heat_map_are_the_best_of_the_other_fields(tmp_path):
    """Efficiency is best with 100 Gbit/s; 64 workers with servers were skipped."""
    axes = heat_map(study(), "workers", "strategy", tmp_path / "heat.svg")
    cells = np.ma.filled(axes.collections[0].get_array().astype(float), np.nan)
    expected = [[efficiency(n, strategy, "100 Gbit/s") for n in WORKERS] for strategy in STRATEGIES]
    expected[1][3] = math.nan
    np.testing.assert_allclose(cells, expected)
    written = [text.get_text() for text in axes.texts]
    assert written == [f"{100.0 * value:.1f}" for row in expected for value in row if not math.isnan(value)]
    assert "efficiency (%), the best over NIC bandwidth" in axes.figure.get_suptitle().replace("\n", " ")
    assert (tmp_path / "heat.svg").stat().st_size > 1000


def test_a_heat_map_refuses_what_it_cannot_show():
    with pytest.raises(ConfigError, match=r"unknown varied field 'worker'.*did you mean 'workers'"):
        heat_map(study(), "worker", "strategy")
    with pytest.raises(ConfigError, match="heat map: workers has 17 values, above the limit of 16"):
        heat_map(study(workers=tuple(range(1, 18)), spoil=False), "workers", "strategy")


def test_lines_stand_where_their_numbers_belong(tmp_path):
    """Bandwidths in bytes/s, a logarithmic axis only where the values lie far apart, names beside each other."""
    table = study(n_seeds=1, spoil=False)
    axes = lines(table, "cluster.nic.bandwidth", tmp_path / "lines.svg", metric="efficiency")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["25", "100"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("NIC bandwidth (Gbit/s)", "efficiency (%)")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    first = axes.get_lines()[0]
    np.testing.assert_allclose(first.get_xdata(), [3.125e9, 12.5e9])
    np.testing.assert_allclose(first.get_ydata(), [efficiency(8, "ring", speed) for speed in BANDWIDTHS])
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == [f"{n} workers, {strategy}" for n in WORKERS for strategy in STRATEGIES]
    wide = lines(study(workers=(8, 256), spoil=False), "workers")
    assert (wide.get_xscale(), wide.get_yscale()) == ("log", "log")
    names = lines(table, "strategy").get_lines()[0]
    assert (names.get_xdata().tolist(), names.get_linestyle()) == ([0.0, 1.0], "None")
    with pytest.raises(ConfigError, match=r"unknown varied field 'worker'.*did you mean 'workers'"):
        lines(table, "worker")
    with pytest.raises(ConfigError, match="plot_lines: all configurations have workers = 8; vary 'workers'"):
        lines(study(workers=(8,), spoil=False), "workers")


def test_axes_have_numbers_that_people_read():
    """2e-4 USD a sample are 200 USD per million, a share of 0.5 is 50 %."""
    axes = pareto(study(spoil=False), "efficiency", "cost_per_sample")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("efficiency (%)", "cost per million samples (USD)")
    assert axes.xaxis.get_major_formatter()(0.5) == "50"
    assert axes.yaxis.get_major_formatter()(2e-4) == "200"


def test_bars_of_a_breakdown_are_the_shares_of_the_best():
    table = study(spoil=False)
    axes = breakdown(table, n=3)
    best = table.best(n=3)
    bars = np.array([[bar.get_width() for bar in kind] for kind in axes.containers])
    np.testing.assert_allclose(bars.sum(axis=0), 100.0)
    np.testing.assert_allclose(bars[0], 100.0 * best["compute_share"])
    labels = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert labels[0] == "64 workers, ring, NIC bandwidth 100 Gbit/s"
    assert [text.get_text() for text in axes.texts] == [f"{value:,.0f} samples/s" for value in best["throughput"]]


def test_one_change_shows_the_neighbours_of_the_best():
    """The best is 64 workers, ring, 100 Gbit/s: another count, strategy and bandwidth each, and no more."""
    table = study(spoil=False)
    axes = one_change(table)
    top = 64 * efficiency(64, "ring", "100 Gbit/s")
    expected = {
        "workers": [100.0 * (n * efficiency(n, "ring", "100 Gbit/s") / top - 1.0) for n in WORKERS],
        "strategy": [100.0 * (efficiency(64, "servers", "100 Gbit/s") * 64 / top - 1.0), 0.0],
        "NIC bandwidth": [100.0 * (efficiency(64, "ring", "25 Gbit/s") * 64 / top - 1.0), 0.0],
    }
    labels = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {label: line.get_xdata() for label, line in zip(labels, axes.lines, strict=False)}
    assert drawn.keys() == expected.keys()
    assert labels[0] == "workers"  # the widest range on top
    for label, values in expected.items():
        np.testing.assert_allclose(drawn[label], values, atol=1e-9)


def test_one_change_needs_neighbours():
    table = study(spoil=False)
    alone = dataclasses.replace(table, members=[table.members[0], table.members[-1]])  # nothing in common
    with pytest.raises(ConfigError, match="differs from the best one in a single field"):
        one_change(alone)


def test_bars_of_a_tornado_are_gains():
    found = [
        Sensitivity("compute speed", 0.1, 0.07),
        Sensitivity("latency of nic", 0.1, -0.001),
        Sensitivity("bandwidth of nvlink", 0.1, 0.00004),
    ]
    axes = tornado(found, title="the best")
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([7.0, -0.1])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["+10 % compute speed", "-10 % NIC latency"]
    assert axes.get_xlabel() == "change in throughput (%)\nno effect: NVLink bandwidth"
    assert not tornado(found[2:]).patches
    with pytest.raises(ConfigError, match="sensitivities is empty"):
        tornado([])


def test_learning_curves_are_means_over_seeds():
    """Of the fast one, seeds rise by 20 and 40 % a second until 2 s (the second one until 3 s): at 3 s, where the first
    one keeps its 40 %, the mean is 80 % and half the interval t(0.975; 1) * s / sqrt(2) =
    12.706 * 56.57 / 1.4142 = 508 %.
    """
    axes = learning(learners())
    first = axes.lines[0]
    assert first.get_label() == "fast"
    np.testing.assert_allclose(first.get_xdata(), [0.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(first.get_ydata(), [0.0, 30.0, 60.0, 80.0])
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(80.0 + 12.7062 * 40.0, rel=1e-4)
    assert axes.get_ylim()[1] <= 102.0  # there is no accuracy beyond
    with pytest.raises(ConfigError, match="timing-only"):
        learning(study())


def test_the_answer_names_the_best_and_what_comes_next():
    """64 workers with ring and 100 Gbit/s bring 100 * 64 / 1.1 samples/s, with seeds 0 and 1 % more: 5,847 on average;
    25 Gbit/s instead 100 * 64 / 1.2 * 1.005 = 5,360, by both seeds less.
    """
    found = {answer.what: answer for answer in answers(study())}
    best = found["Best throughput"]
    assert best.value == "5,847 samples/s"
    assert best.next == "64 workers, ring, NIC bandwidth 25 Gbit/s, 5,360 samples/s (-8.3 %)"
    assert study().summary.loc[best.row, "cluster.nic.bandwidth"] == "100 Gbit/s"
    assert "Least energy per million samples" not in found  # no powers are known
    assert front_of(study()) == ("throughput", "cost_per_sample")


def test_changes_are_read_off_the_table():
    """From 25 to 100 Gbit/s with 64 workers and ring: 1.2 / 1.1 = +9.1 %; with fewer workers, or servers, less: with 8
    and ring 1.025 / 1.0125 = +1.2 %, by the seed that both have."""
    found = {change.what: change for change in changes(study(), "throughput", "Is 100 Gbit/s worth it?")}
    assert next(iter(found)) == "NIC bandwidth 100 instead of 25 Gbit/s"  # what was asked for
    bandwidth = found["NIC bandwidth 100 instead of 25 Gbit/s"]
    assert bandwidth.effect == "throughput +9.1 %, cost per sample -8.3 %"
    assert bandwidth.gain == pytest.approx(1.2 / 1.1 - 1.0)
    assert (bandwidth.where, bandwidth.range) == ("", "+1.2 % to +9.1 %")
    strategy = found["ring instead of servers"]  # servers with 64 workers were skipped: the best pair has 32
    assert strategy.where == "32 workers, NIC bandwidth 100 Gbit/s"
    assert strategy.gain == pytest.approx(1.1 / 1.05 - 1.0)
    assert {"16 instead of 8 workers", "32 instead of 16 workers", "64 instead of 32 workers"} <= found.keys()
    assert len(found) == 5
    text = str(study())
    assert "effects of single changes, at the best configuration by throughput (64 workers, ring, NIC" in text
    assert str(bandwidth) in text


def test_changes_have_intervals_over_seeds():
    """+10 and +30 % by the two seeds: 20 % +- 12.706 * 14.14 / 1.414 = 127 %, so the two are not told apart; with +20
    and +20.2 % the interval is 20.1 +- 1.27 %."""
    table = study(workers=(8,), spoil=False)
    for factors, words in (
        ((1.1, 1.3), "throughput +20.0 % (not significant with 2 seeds)"),
        ((1.2, 1.202), "throughput +20.1 % (95 % interval +18.8 % to +21.4 %)"),
    ):
        outcomes = dict(table.outcomes)
        for seed, factor in enumerate(factors):
            fast, slow = (f"8-ring-{bandwidth}-{seed}" for bandwidth in ("100 Gbit/s", "25 Gbit/s"))
            made = outcomes[slow].record | {"throughput": factor * outcomes[slow].record["throughput"]}
            outcomes[fast] = dataclasses.replace(outcomes[fast], record=made)
        found = changes(dataclasses.replace(table, outcomes=outcomes), "throughput")
        effect = next(change.effect for change in found if change.field == "cluster.nic.bandwidth")
        assert effect == f"{words}, the same cost per sample"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("cluster.nic.bandwidth", "400 Gbit/s", "NIC bandwidth 400 Gbit/s"),
        ("cluster.price", "3 USD/h", "price 3 USD/h"),
        ("compression", "none", "no compression"),
        ("stack", "none", "default stack"),
        ("workers", 8, "8 workers"),
        ("strategy", "ring", "ring"),
        ("training.rate", 0.1, "rate 0.1"),
    ],
)
def test_labels_say_what_a_value_is_of(field, value, text):
    assert named(field, value) == text


def test_seeds_that_contradict_each_other_tell_nothing_apart():
    """The best has 1,561 and 1,577 samples/s; the next here 2,100 with one seed and 1,000 with the other."""
    table = study(workers=(8, 16), spoil=False)
    other = {"16-ring-25 Gbit/s-0": 2100.0, "16-ring-25 Gbit/s-1": 1000.0}
    changed = {
        key: dataclasses.replace(table.outcomes[key], record=table.outcomes[key].record | {"throughput": value})
        for key, value in other.items()
    }
    best = answers(dataclasses.replace(table, outcomes={**table.outcomes, **changed}))[0]
    assert best.next.endswith("; the difference is not significant with 2 seeds")


def test_bandwidths_of_the_grid_are_labelled_with_their_field():
    axes = breakdown(study(spoil=False), n=16)
    labels = {label.get_text().replace("\n", " ") for label in axes.get_yticklabels()}
    assert labels == {f"{n} workers, {s}, NIC bandwidth {b}" for n in WORKERS for s in STRATEGIES for b in BANDWIDTHS}
