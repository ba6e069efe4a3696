"""The one list of metrics: what it reads off a result, and which runs have which."""

import pytest

import ddlsim
from ddlsim.cluster import star
from ddlsim.run.metrics import METRICS, record

STAR = ddlsim.load_cluster(star(4, bandwidth="1 Gbit/s", latency="10 us"))


def kinds(*names):
    return {name for name, metric in METRICS.items() if metric.kind in names}


def test_a_run_about_time_has_what_its_attributes_say():
    result = ddlsim.simulate(STAR.with_costs(price="2 USD/h"), "lenet5", steps=2, compute=ddlsim.Measured("5 ms", 32))
    numbers = record(result)
    assert numbers.keys() == kinds("run")
    for name in ("throughput", "step_time", "speedup", "efficiency", "mean_staleness", "nbytes_per_step", "cost"):
        assert numbers[name] == getattr(result, name)
    for name, share in result.shares.items():
        assert numbers[f"{name}_share"] == share
    assert numbers["cost_per_sample"] == pytest.approx(4 * 2.0 / 3600.0 / result.throughput, rel=1e-12)
    assert numbers["energy"] is None  # nobody has said which devices these are
    assert numbers["energy_per_sample"] is None


@pytest.mark.parametrize("strategy", [ddlsim.GossipSGD(0.5), ddlsim.ADPSGD()])
def test_steps_of_asynchronous_workers_are_their_own(strategy):
    result = ddlsim.simulate(STAR, "digits-cnn", strategy, 8, steps=6, warmup=0, compute=ddlsim.Affine("50 ms", "0 s"))
    assert result.step_time == pytest.approx(0.05, rel=1e-9)
    assert result.step_times == pytest.approx([0.05] * 24, rel=1e-9)
    assert result.nbytes_per_step == pytest.approx(result.nbytes_sent / 24, rel=1e-9)


def test_runs_that_learn_or_were_looked_at_have_more():
    training = ddlsim.Training("digits", updates=3)
    learned = ddlsim.simulate(STAR, "digits-cnn", batch_size=8, training=training)
    numbers = record(learned)
    assert numbers.keys() == kinds("run", "learning")
    assert (numbers["updates"], numbers["accuracy"]) == (3, learned.accuracy)
    training = ddlsim.Training("digits", updates=3, target_accuracy=1.0)
    targeted = ddlsim.simulate(
        STAR.with_costs(price="2 USD/h"), "digits-cnn", batch_size=8, training=training, stability=True
    )
    numbers = record(targeted)
    assert numbers.keys() == kinds("run", "learning", "target", "stability")
    assert numbers["time_to_accuracy"] == numbers["cost_to_accuracy"] == float("inf")  # three updates are too few


@pytest.mark.parametrize(("name", "value", "text", "narrow", "axis"), [
    ("throughput", 1234.5, "1,234 samples/s", "1,234.5", "throughput (samples/s)"),
    ("efficiency", 0.931, "93.1 %", "93.1 %", "efficiency (%)"),
    ("speedup", 3.14159, "3.142", "3.14", "speedup"),
    ("cost_per_sample", 2e-6, "2 USD", "2", "cost per million samples (USD)"),
    ("energy_per_sample", 0.036, "0.01 kWh", "0.01", "energy per million samples (kWh)"),
    ("energy_to_accuracy", 7.2e6, "2 kWh", "2 kWh", "energy to accuracy (J)"),
    ("compute_share", 0.5, "50.0 %", "50.0 %", "compute share (%)"),
])  # fmt: skip
def test_a_value_as_people_write_it(name, value, text, narrow, axis):
    metric = METRICS[name]
    assert (metric.write(value), metric.column[1](value), metric.axis) == (text, narrow, axis)
