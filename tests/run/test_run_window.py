"""Throughput is measured over whole cycles of a strategy that does not exchange in every step."""

import pytest

import ddlsim
from ddlsim import Affine, Experiment, FedBuff, Lognormal, Measured, simulate
from ddlsim.cluster import star
from ddlsim.strategies import contract

CASE = {"batch_size": 32, "workers": 4, "compute": Measured("0.4 s", 32)}
PERIODIC = [
    ddlsim.LocalSGD(7), ddlsim.QsparseLocalSGD(7), ddlsim.HierarchicalLocalSGD(2, 4, block=2), ddlsim.BMUF(7),
    ddlsim.DiLoCo(13), ddlsim.SlowMo(7), ddlsim.DaSGD(7, 1), ddlsim.OverlapLocalSGD(7), ddlsim.CoCoDSGD(7),
    ddlsim.ElasticAveraging(0.2, period=7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "step_time"),
    [(ddlsim.LocalSGD(7), 1.408), (ddlsim.LocalSGD(11), 1.041), (ddlsim.OverlapLocalSGD(7), 1.008)],
    ids=lambda value: getattr(value, "label", ""),
)
def test_step_times_over_whole_periods(strategy, step_time):
    """The all-reduce of VGG-16 over 1 Gbit/s takes 7 s: 0.4 s + 7 s / period, or one period's computing less."""
    assert simulate("office-1gbe", "vgg16", strategy, **CASE).step_time == pytest.approx(step_time, abs=1e-3)


@pytest.mark.parametrize("strategy", PERIODIC, ids=lambda strategy: type(strategy).__name__)
def test_more_cycles_do_not_change_the_default(strategy):
    """The default window gives the long-run step time: that of twenty times as many cycles."""
    cycle = contract.of(strategy).cycle_length
    by_default = simulate("office-1gbe", "resnet18", strategy, **CASE)
    assert not [note for note in by_default.notes if note.startswith("steps:")]
    warmup, steps = by_default.experiment.window
    assert (warmup % cycle, steps % cycle) == (0, 0)
    long = simulate("office-1gbe", "resnet18", strategy, steps=20 * steps, warmup=2 * warmup, **CASE)
    assert by_default.step_time == pytest.approx(long.step_time, rel=1e-9)


def test_part_of_a_cycle_is_noted():
    (note,) = [n for n in simulate("office-1gbe", "vgg16", ddlsim.LocalSGD(7), steps=10, **CASE).notes if "steps:" in n]
    assert "7-step cycle" in note
    assert "steps=14 and warmup=7" in note
    whole = simulate("office-1gbe", "vgg16", ddlsim.LocalSGD(5), steps=10, **CASE)
    assert not [note for note in whole.notes if "steps:" in note]


def test_a_field_of_another_meaning_is_no_cycle():
    class Own(ddlsim.AllReduce):
        period = "10 s"

    assert contract.of(Own()).cycle_length == 1


def test_scaling_and_studies_take_whole_cycles():
    """A base experiment says nothing about steps, so each strategy gets its own window."""
    base = Experiment("office-1gbe", "vgg16", **CASE)
    windows = [base.with_(strategy=s).window for s in (ddlsim.LocalSGD(7), ddlsim.AllReduce(), ddlsim.LocalSGD(4))]
    assert windows == [(7, 14), (2, 10), (4, 12)]
    (result,) = ddlsim.scaling(base.with_(strategy=ddlsim.LocalSGD(7)), [4])
    assert result.step_time == pytest.approx(1.408, abs=1e-3)


@pytest.mark.slow
def test_workers_that_never_average_need_no_memory_for_all_steps_between():
    """As many steps are in flight as the memory allows, not the billion that workers could be apart."""
    case = {"steps": 20, "warmup": 0, **CASE}
    ends = [simulate("office-1gbe", "digits-cnn", ddlsim.LocalSGD(n), **case).end_time for n in (10**9, 1000, 50)]
    assert ends == [pytest.approx(20 * 0.4)] * 3
    blocks = ddlsim.HierarchicalLocalSGD(2, 10**8, block=2)
    assert simulate("office-1gbe", "digits-cnn", blocks, **case).end_time > 20 * 0.4
    with pytest.raises(ddlsim.ConfigError, match="delay = 1,000,000: must be at most 100,000 steps"):
        simulate("office-1gbe", "digits-cnn", ddlsim.OverlapLocalSGD(10**6), **case)


@pytest.mark.parametrize(("n", "local_steps", "buffer"), [(64, 20, 10), (32, 8, 10), (16, 4, 3), (32, 1, 10)])
def test_updates_in_bursts_are_measured_over_whole_cycles(n, local_steps, buffer):
    """All clients push after the same number of local steps, so several updates follow each other within jitter."""
    options = {"workers": n, "compute": Affine(0.1, 0.0), "jitter": Lognormal(0.05)}
    cluster, strategy = star(n + 1, bandwidth="10 GB/s", latency="20 us"), FedBuff(local_steps, buffer)
    result = ddlsim.simulate(cluster, "lenet5", strategy, 8, **options)
    assert all(steps % local_steps == 0 for steps in result.experiment.window)
    long = ddlsim.simulate(cluster, "lenet5", strategy, 8, **options, steps=200)
    assert long.efficiency == pytest.approx(1.0, rel=0.02)
    # a burst of fewer than n pushes may be counted at one end of the measured cycles, and not at the other
    cycles = result.experiment.window[1] / local_steps
    assert abs(result.efficiency - long.efficiency) < 1.0 / cycles
    short = ddlsim.simulate(cluster, "lenet5", strategy, 8, **options, steps=local_steps, warmup=0)
    assert short.efficiency < 1.02


def test_the_first_step_can_exceed_what_later_ones_reach():
    """A run that ends within the warm-up measures its first step, in which no task waits for an earlier exchange."""
    strategy = ddlsim.AllReduce(overlap=ddlsim.Priority())
    case = {"model": "gpt2", "strategy": strategy, "workers": 8, "batch_size": 16, "seed": 3}
    result = ddlsim.simulate("dgx-a100-pod", max_time="0.15 s", **case)
    assert result.efficiency > 1.0
    assert any("waits for no earlier step; increase max_time" in note for note in result.notes)
    assert ddlsim.simulate("dgx-a100-pod", max_time="0.6 s", **case).efficiency < 1.0


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"workers": 1, "speed": ddlsim.Spread()}, "speed: Spread has no effect on a single worker"),
        (
            {"workers": 2, "steps": 3, "training": ddlsim.Training("digits", rate=0.1, epochs=0.1)},
            "steps = 3 has no effect",
        ),
    ],
)
def test_settings_without_effect_are_noted(settings, note):
    result = ddlsim.simulate("office-1gbe", "digits-cnn", ddlsim.AllReduce(), 8, **settings)
    assert sum(each.startswith(note) for each in result.notes) == 1
    rest = {name: value for name, value in settings.items() if name not in ("speed", "steps")}
    assert not any(
        "no effect" in each
        for each in ddlsim.simulate("office-1gbe", "digits-cnn", ddlsim.AllReduce(), 8, **rest).notes
    )
