"""Faults shorter than a few steps in simulated lifetimes: as in a run that simulates all of its steps."""

import dataclasses
import math
import random
from itertools import product

import pytest
from draws import few, latin, seeds, slow

import ddlsim
from ddlsim import (
    Affine,
    AllReduce,
    Checkpoints,
    Experiment,
    LinkFault,
    LocalSGD,
    RandomFaults,
    Slowdown,
    Stop,
    TopK,
)
from ddlsim.cluster import star
from ddlsim.strategies import CHOCOSGD, DPSGD, SlowMo

NEVER = Checkpoints(math.inf, stall="1 ms")
STRATEGIES = {
    "LocalSGD(4)": {"strategy": LocalSGD(4)},
    "DPSGD": {"strategy": DPSGD()},
    "CHOCOSGD": {"strategy": CHOCOSGD(0.3), "compression": TopK(0.01)},
    "AllReduce": {"strategy": AllReduce("ring")},
    "AllReduce without overlap": {"strategy": AllReduce("ring", "none")},
    "LocalSGD(16)": {"strategy": LocalSGD(16)},
    "SlowMo": {"strategy": SlowMo(4)},
}
FAULTS = {
    "stop": [RandomFaults("4 s", "150 ms", kind="stop")],
    "slow": [RandomFaults("2 s", "200 ms", factor=3.0)],
    "link": [RandomFaults("1 s", "30 ms", kind="link", factor=0.1)],
    "rare": [RandomFaults("40 s", "300 ms", kind="stop")],
    "short and long": [RandomFaults("10 s", "100 ms", kind="stop"), RandomFaults("100 s", "10 s", factor=2.0)],
}


def experiment(strategy: str, **options: object) -> Experiment:
    cluster = star(8, bandwidth="1 GB/s", latency="20 us")
    fields = {"batch_size": 8, "workers": 8, "compute": Affine(0.1, 0.0), **STRATEGIES[strategy], **options}
    return Experiment(cluster, "resnet18-cifar", **fields)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    latin(list(STRATEGIES)[:5], FAULTS) + [slow(*each) for each in product(list(STRATEGIES)[5:], FAULTS)],
)
def test_a_lifetime_has_the_goodput_of_a_run_with_the_same_faults(strategy: str, fault: str) -> None:
    one = experiment(strategy, faults=FAULTS[fault])
    run = ddlsim.simulate(one.with_(steps=1000, warmup=0))
    lived = ddlsim.simulate(one.with_(checkpoints=NEVER, max_time=run.simulated_time))
    assert lived.goodput == pytest.approx(run.throughput, rel=0.02)
    assert lived.undisturbed.throughput > run.throughput


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_faults_go_on_as_the_first(strategy: str) -> None:
    """Of a lifetime of 30 days, a few thousand steps are simulated."""
    one = experiment(strategy, faults=FAULTS["stop"])
    run = ddlsim.simulate(one.with_(steps=2000, warmup=0))
    assert ddlsim.simulate(one.with_(checkpoints=NEVER)).goodput == pytest.approx(run.throughput, rel=0.02)


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_the_time_between_faults_does_not_matter(seed: int) -> None:
    """A run without jitter repeats its cycles: what is left out of the time between faults at known times is exact."""
    draw = random.Random(f"short faults {seed}")
    times = sorted(draw.uniform(5.0, 200.0) for _ in range(draw.randint(1, 6)))
    when = [(time, draw.uniform(0.01, 0.5)) for time in times]
    stops = [Stop(draw.randrange(8), time, seconds) for time, seconds in when]
    links = [LinkFault(f"h{draw.randrange(8)}", "switch", time + 1.0, seconds, 0.1) for time, seconds in when]
    slowed = [Slowdown(draw.randrange(8), time + 2.0, seconds, 3.0) for time, seconds in when]
    one = experiment(draw.choice(["LocalSGD(4)", "DPSGD", "AllReduce"]), faults=[*stops, *links], slowdowns=slowed)
    run = ddlsim.simulate(one.with_(steps=10_000, max_time="220 s"))
    lived = ddlsim.simulate(one.with_(checkpoints=NEVER, max_time="220 s"))
    assert lived.failure_timeline.steps == pytest.approx(len(run.recorder.updates), abs=1)


@pytest.mark.parametrize("duration", few([0.4, 1.0, 1.1, 1.4, 2.0], 1, start=2))
@pytest.mark.parametrize("strategy", few(["LocalSGD(16)", "AllReduce", "DPSGD"], 2))
def test_a_link_without_other_routes_is_used_as_soon_as_it_has_recovered(strategy: str, duration: float) -> None:
    """Although the fabric avoids it for another second."""
    one = experiment(strategy, faults=[LinkFault("h0", "switch", 71.6, duration)])
    run = ddlsim.simulate(one.with_(steps=10_000, max_time="100 s"))
    lived = ddlsim.simulate(one.with_(checkpoints=NEVER, max_time="100 s"))
    assert lived.failure_timeline.steps == pytest.approx(len(run.recorder.updates), abs=1)


def test_the_last_of_a_few_faults_counts_as_much_as_it_costs() -> None:
    """Only the last of eight stops costs more than a step, and it is not among the first 256 simulated steps."""
    stops = [Stop(rank, 25.0 * (rank + 1), 0.01 if rank < 7 else 1.5) for rank in range(8)]
    one = experiment("LocalSGD(16)", faults=stops, steps=32, warmup=4)
    run = ddlsim.simulate(one.with_(steps=10_000, warmup=0, max_time="220 s"))
    lived = ddlsim.simulate(one.with_(checkpoints=NEVER, max_time="220 s"))
    assert lived.failure_timeline.steps == pytest.approx(len(run.recorder.updates), abs=1)


@pytest.mark.slow
def test_workers_compute_as_much_in_a_lifetime_as_in_the_run() -> None:
    one = experiment("LocalSGD(4)", faults=FAULTS["slow"])
    one = one.with_(device=dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=0.0))
    run = ddlsim.simulate(one.with_(steps=2000, warmup=0))
    lived = ddlsim.simulate(one.with_(checkpoints=NEVER, max_time=run.simulated_time))
    assert lived.energy == pytest.approx(run.energy, rel=0.01)


@pytest.mark.parametrize("strategy", few(STRATEGIES, 2))
def test_a_pace_is_the_same_however_much_of_it_is_simulated(strategy: str) -> None:
    faults = [RandomFaults("4 s", "150 ms", kind="stop"), *FAULTS["short and long"]]
    lived = ddlsim.simulate(experiment(strategy, faults=faults, checkpoints=NEVER, max_time="10 s"))
    pace = lived.paces.of(None, lived.undisturbed, 120.0)
    asked = [float(pace.when(work)) for work in (0.3, 11.7, 11.8, 25.0)] + [
        float(pace.until(time)) for time in (30.0, 55.5)
    ]
    simulated = float(pace.clock[-1])
    assert 55.5 < simulated < 119.0
    pace.computed(0.0, 1.0)
    assert pace.clock[-1] == 120.0
    again = [float(pace.when(work)) for work in (0.3, 11.7, 11.8, 25.0)] + [
        float(pace.until(time)) for time in (30.0, 55.5)
    ]
    assert asked == again


def test_what_comes_after_the_end_of_a_training_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of each message depends on the gradients, so even its faults are simulated with the training."""
    simulated, training = [], ddlsim.Training("digits", updates=12, evaluate_every=6)

    def complete(*args: object, **options: object) -> ddlsim.Result:
        simulated.append(original(*args, **options))
        return simulated[-1]

    original = ddlsim.run.simulate.complete
    monkeypatch.setattr("ddlsim.run.simulate.complete", complete)
    result = ddlsim.simulate(
        star(4, bandwidth="1 GB/s", latency="20 us"), "digits-cnn", batch_size=8, workers=4,
        compute=Affine(0.1, 0.0), compression=ddlsim.ErrorFeedback(ddlsim.Threshold(0.01)), training=training,
        faults=[Stop(0, time, 0.001) for time in range(1, 1001)], checkpoints=Checkpoints("1 s", stall="10 ms"),
    )  # fmt: skip
    assert result.failure_timeline.finished
    assert 12 < sum(len(each.recorder.updates) for each in simulated) < 150  # of 4,096


def test_timelines_differ_in_their_faults() -> None:
    lived = ddlsim.simulate(experiment("LocalSGD(4)", faults=FAULTS["stop"], checkpoints=NEVER, max_time="60 s"))
    steps = [timeline.steps for timeline in lived.timelines(4)]
    assert len(set(steps)) > 1
    assert steps == pytest.approx([steps[0]] * 4, rel=0.15)
