"""How stable a run is: chaotic ones say so, stable ones are left alone, and nothing moves the run itself."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import (
    AllReduce,
    AsyncParameterServer,
    ConfigError,
    Experiment,
    Lognormal,
    Measured,
    Result,
    StaleSynchronous,
    Training,
    load_cluster,
    simulate,
)  # fmt: skip
from ddlsim.cli import app
from ddlsim.cluster import dragonfly, fat_tree, star, torus
from ddlsim.run import result as results
from ddlsim.run.sensitivity import Stability, moved

STAR = load_cluster(star(8, bandwidth="10 Gbit/s", latency="5 us"))
#: two paths of a leaf's uplinks for each message, by a hash; trunks carry half of what machines can send
FAT_TREE = load_cluster(fat_tree(4, bandwidth="10 Gbit/s", latency="1 us", routing="ecmp", trunk_bandwidth="5 Gbit/s"))
DRAGONFLY = load_cluster(dragonfly(3, [2, 2], 2, bandwidth="10 Gbit/s", latency="1 us", global_links=1))
TORUS = load_cluster(torus([3, 5], bandwidth="1 Gbit/s", latency="10 us"))


def run(cluster: ddlsim.Cluster = STAR, strategy: ddlsim.strategies.Strategy = AllReduce(), **fields: object) -> Result:  # noqa: B008
    given: dict[str, object] = {"compute": Measured("5 ms", 16), "steps": 8, "warmup": 1, **fields}
    return simulate(cluster, given.pop("model", "resnet18"), strategy, 16, **given)  # type: ignore[arg-type]


CHAOTIC = {
    "an all-reduce over several hops": (FAT_TREE, AllReduce("halving_doubling"), 20),
    "asynchronous servers": (STAR, AsyncParameterServer(3, "colocated"), 20),
    "stale synchronous workers on several hops": (DRAGONFLY, StaleSynchronous(2, placement="colocated"), 8),
}


@pytest.mark.parametrize("name", CHAOTIC)
def test_a_chaotic_run_says_so(name: str) -> None:
    cluster, strategy, steps = CHAOTIC[name]
    result = run(cluster, strategy, steps=steps)
    found = result.known_stability  # small enough that nobody has to ask
    assert found is not None
    assert found.throughput_spread > 1e-4  # 1.3e-3, 2.2e-2 and 6.6e-3 when this was written: inputs moved by 1e-12
    assert found.step_time_spread > 1e-4
    assert not found.is_stable
    assert f"\nstability     throughput is stable only to {100 * found.throughput_spread:.2g} %" in str(result)
    assert "the order in which messages contend depends on rounding" in str(result)


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [(STAR, AllReduce("ring")), (FAT_TREE, AllReduce("ring")), (TORUS, AllReduce("halving_doubling"))],
    ids=["star", "fat tree", "torus"],
)
def test_a_stable_run_moves_no_more_than_its_inputs(cluster: ddlsim.Cluster, strategy: AllReduce) -> None:
    result = run(cluster, strategy)
    found = result.known_stability
    assert found is not None
    assert 0.0 < found.throughput_spread <= 2e-12  # from 1 - 1e-12 to 1 + 1e-12, whatever limits it
    assert found.is_stable
    assert "stability" not in str(result)
    assert json.loads(result.to_json())["stability"]["throughput_spread"] == found.throughput_spread


def test_no_bottleneck_is_named_below_it() -> None:
    result = run(STAR, AsyncParameterServer(3, "colocated"), steps=20)
    result.sensitivities()
    assert "bottleneck    +10 % " in str(result)
    unsure = run(STAR, AsyncParameterServer(3, "colocated"), steps=20)
    unsure.sensitivities()
    vars(unsure)["known_stability"] = Stability(1e-12, (100.0, 120.0), (1.0, 1.0))
    assert "no single part that is 10 % better gains 20 %, the stability of the throughput" in str(unsure)


def test_asking_shows_it_where_it_is_stable_too() -> None:
    result = simulate(Experiment(STAR, "lenet5", compute=Measured("5 ms", 32)), stability=True)
    assert "stability     throughput is unchanged with inputs perturbed by 1e-12 (3 runs)" in str(result)


def test_all_inputs_are_moved_each_by_its_own_factor_and_routes_are_kept() -> None:
    """At a size at which one can see it; two equally long ways must not become a longer and a shorter one."""
    experiment = Experiment(FAT_TREE, "lenet5", workers=16, speed=[2.0] * 16)
    other = moved(experiment, 16, 1e-3, 0, 0)
    cluster = other.cluster
    assert isinstance(cluster, ddlsim.Cluster)
    for before, after in (
        (FAT_TREE.channel_capacity, cluster.channel_capacity), (FAT_TREE.link_latency, cluster.link_latency),
        (np.array(experiment.speed), np.array(other.speed)),
    ):  # fmt: skip
        ratio = after / before
        assert len(np.unique(ratio)) == len(ratio)
        assert 0.0 < np.abs(ratio - 1.0).max() <= 1e-3
    source, target = (nodes.ravel() for nodes in np.meshgrid(FAT_TREE.workers, FAT_TREE.workers))
    np.testing.assert_array_equal(cluster.routes(source, target).links, FAT_TREE.routes(source, target).links)
    shared = load_cluster(star(4, bandwidth="1 Gbit/s", latency="1 us"))
    halves = dataclasses.replace(shared, link_channel=shared.link_channel // 2)
    moved_halves = moved(Experiment(halves, "lenet5"), 4, 1e-3, 0, 0).cluster
    assert isinstance(moved_halves, ddlsim.Cluster)
    for channel in range(halves.n_channels):
        assert len(set(moved_halves.link_bandwidth[halves.link_channel == channel].tolist())) == 1


def test_moves_are_addressed_by_their_seed_and_leave_the_run_alone() -> None:
    fields: dict[str, object] = {"jitter": Lognormal(0.1), "steps": 20, "seed": 3}
    result, again = (run(STAR, AsyncParameterServer(3, "colocated"), **fields) for _ in range(2))
    first = result.stability(runs=2)
    assert first == result.stability(runs=2) == again.stability(runs=2)
    assert first.throughputs[0] == result.throughput == again.throughput
    assert result.stability(runs=3).throughputs[:3] == first.throughputs  # more runs only add to them
    assert result.stability(runs=2, seed=1).throughputs[1:] != first.throughputs[1:]


def test_what_is_large_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule counts messages, not seconds: it is the same on every machine."""
    result = run()
    monkeypatch.setattr(results, "STABILITY_MESSAGES", result.n_messages)
    assert run().known_stability is not None
    monkeypatch.setattr(results, "STABILITY_MESSAGES", result.n_messages - 1)
    large = run()
    assert large.known_stability is None
    assert large.to_dict()["stability"] is None  # nothing is claimed
    assert "stability" not in str(large)
    assert run(stability=True).known_stability is not None
    assert run(steps=200).known_stability is None  # 8 workers' 201 steps are more than 500


def test_of_a_run_that_learns_the_clock_is_moved() -> None:
    training = Training("digits", rate=0.1, updates=12, evaluate_every=6)
    result = simulate(
        STAR, "digits-cnn", AsyncParameterServer(3, "colocated"), 16, 4, training=training, stability=True,
        time_model="resnet18", compute=Measured("5 ms", 16), steps=20,
    )  # fmt: skip
    found = result.known_stability
    assert found is not None
    assert found.clock_only
    assert "this covers its clock, not the trained model" in str(result)
    timed = run(STAR, AsyncParameterServer(3, "colocated"), workers=4, steps=20, warmup=2)
    assert found.throughputs == timed.stability().throughputs
    assert simulate(
        STAR, "digits-cnn", AllReduce(), 16, 2, training=training, compute=Measured("5 ms", 16)
    ).known_stability is None  # fmt: skip


def test_the_interval_stands_beside_it() -> None:
    result = run(STAR, AsyncParameterServer(3, "colocated"), steps=20, jitter=Lognormal(0.1))
    assert "\nstability " in str(result)
    assert "\ninterval " in str(result)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"runs": 0}, "stability: runs = 0: must be an integer from 1 to 1000"),
        ({"runs": True}, "stability: runs = True"),
        ({"size": 0.0}, "stability: size = 0.0: must be between 1e-15 and 0.01"),
        ({"size": float("nan")}, "stability: size = nan"),
        ({"size": "1e-12"}, "stability: size = '1e-12'"),
        ({"seed": -1}, "stability: seed = -1: must be a non-negative integer"),
    ],
)
def test_arguments_that_make_no_sense(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(steps=1).stability(**fields)  # type: ignore[arg-type]


def test_a_stability_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="stability = 'yes': must be True or False"):
        run(stability="yes")


def test_its_sentence_and_its_numbers() -> None:
    """By hand: from 99 to 101 around 100 is 2 %; step times from 0.98 to 1.02 around 1 are 4 %."""
    found = Stability(1e-12, (100.0, 99.0, 101.0), (1.0, 1.02, 0.98))
    assert found.throughput_spread == pytest.approx(0.02)
    assert found.step_time_spread == pytest.approx(0.04)
    assert str(found).startswith("throughput is stable only to 2 % with inputs perturbed by 1e-12 (2 runs): ")
    assert found.to_dict()["throughputs"] == [100.0, 99.0, 101.0]
    assert Stability(1e-4, (100.0, 100.05), (1.0, 1.0)).is_stable  # five times the inputs' own moves are no chaos
    assert not Stability(1e-4, (100.0, 100.5), (1.0, 1.0)).is_stable


def test_the_command_says_it() -> None:
    arguments = ["run", "office-1gbe", "-m", "lenet5", "-n", "2", "--steps", "2"]
    printed = CliRunner().invoke(app, [*arguments, "--stability"], catch_exceptions=False).output
    assert "throughput is unchanged with inputs perturbed by 1e-12 (3 runs)" in printed
    assert "stability" not in CliRunner().invoke(app, arguments, catch_exceptions=False).output
