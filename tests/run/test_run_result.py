"""The result's numbers agree with each other; `collective_time`, `scaling` and speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from counting import counted

from ddlsim import (
    ADPSGD,
    AllReduce,
    AsyncParameterServer,
    ConfigError,
    DdpBuckets,
    Experiment,
    GossipSGD,
    Input,
    LinkFault,
    Lognormal,
    Measured,
    Pareto,
    Slowdown,
    Training,
    collective_time,
    load_cluster,
    scaling,
    simulate,
)
from ddlsim.cluster import MultiGpu, racks, star
from ddlsim.collectives import build, cost
from ddlsim.network import Interconnect, Network
from ddlsim.run import run

BANDWIDTH, LATENCY = 1.25e9, 20e-6
STAR = load_cluster(star(8, bandwidth=BANDWIDTH, latency=LATENCY))


def experiment(**changes: object) -> Experiment:
    base = Experiment(STAR, "alexnet", AllReduce("ring", "none"), 8, 4, steps=3, warmup=2, compute=Measured(0.1, 8))
    return base.with_(**changes)


def test_a_run_that_ends_at_its_first_instant_has_a_throughput() -> None:
    """Four asynchronous workers in lock step push at once, at t; two updates are enough: 2 x 8 samples in t s."""
    changes = {"strategy": AsyncParameterServer(), "model": "digits-cnn"}
    result = run(experiment(**changes, training=Training(updates=2, evaluate_every=1)))
    assert len({time for time, _ in result.recorder.updates}) == 1
    assert result.throughput == pytest.approx(16 / result.end_time)


def test_throughput_counts_samples_after_the_warm_up() -> None:
    result = run(experiment(jitter=Lognormal(0.3), seed=1))
    times = [t for t, _ in result.recorder.updates]
    assert len(times) == 5
    assert result.throughput == pytest.approx(3 * 4 * 8 / (times[4] - times[1]), rel=1e-12)
    assert result.step_times == pytest.approx(np.diff(times[1:]), rel=1e-12)
    assert result.step_time == pytest.approx(result.step_times.mean(), rel=1e-12)


def test_single_throughput_includes_the_mean_of_the_jitter() -> None:
    result = run(experiment(jitter=Pareto(3.0)))
    assert result.single_throughput == pytest.approx(8 / (0.1 * 1.5), rel=1e-12)


def test_efficiency_compares_with_every_workers_own_speed() -> None:
    result = run(experiment(speed=(1.0, 0.5, 2.0, 1.0)))
    alone = 8 / 0.1 * (1.0 + 0.5 + 2.0 + 1.0)
    assert result.efficiency == pytest.approx(result.throughput / alone, rel=1e-12)
    assert result.speedup == pytest.approx(result.throughput / (8 / 0.1), rel=1e-12)


def test_tables() -> None:
    """Every worker sends and receives 2 (N-1)/N S per step over its own link; the others' links are idle."""
    result = run(experiment())
    carried = 5 * 2 * 3 / 4 * 4.0 * result.workloads[0].model.n_params
    links = result.links
    assert len(links) == 16
    used = links[links["nbytes"] > 0]
    assert len(used) == 8
    assert used["nbytes"].to_numpy() == pytest.approx(carried, rel=1e-9)
    assert used["utilisation"].to_numpy() == pytest.approx(carried / BANDWIDTH / result.end_time, rel=1e-9)
    # an idle uniform ring: a link is busy exactly while its bytes flow
    assert used["busy"].to_numpy() == pytest.approx(used["utilisation"].to_numpy(), rel=1e-9)
    assert result.workers["node"].tolist() == ["h0", "h1", "h2", "h3"]
    assert result.workers["steps"].tolist() == [5] * 4
    assert result.steps["samples"].tolist() == [32] * 5
    assert result.steps["time"].is_monotonic_increasing


def test_json_holds_numbers_and_manifest(tmp_path: Path) -> None:
    result = run(experiment(jitter=Lognormal(0.1)))
    path = tmp_path / "result.json"
    text = result.to_json(path)
    assert path.read_text(encoding="utf-8") == text + "\n"
    data = json.loads(text)
    assert data["throughput"] == result.throughput
    assert data["workers"] == 4
    assert sum(data["shares"].values()) == pytest.approx(1.0)
    manifest = data["experiment"]
    assert (manifest["model"], manifest["workers"], manifest["max_time"]) == ("alexnet", 4, "inf")
    assert manifest["strategy"]["type"] == "all-reduce"
    assert manifest["jitter"] == {"type": "lognormal", "cv": 0.1}
    assert manifest["compute"] == {"type": "measured", "step_time": "0.1 s", "batch_size": 8}
    assert data["bottleneck"] is None  # which nobody has asked for
    best = result.bottleneck
    assert json.loads(result.to_json())["bottleneck"][0]["what"] == best.what


def test_a_trace_is_the_same_run_recorded() -> None:
    result = run(experiment(jitter=Lognormal(0.2)))
    traced = result.traced
    assert result.recorder.spans == []
    assert traced.recorder.spans
    assert traced.traced is traced
    assert traced.recorder.updates == result.recorder.updates
    assert traced.busy is not None
    seconds = np.bincount(traced.busy.channel, traced.busy.end - traced.busy.start, STAR.n_channels)
    assert seconds == pytest.approx(result.channel_busy, rel=1e-9, abs=1e-12)


def test_staleness_of_synchronous_runs_is_none() -> None:
    result = run(experiment())
    assert (result.mean_staleness, result.staleness_histogram) == (0.0, {})
    asynchronous = run(experiment(strategy=AsyncParameterServer()))
    assert asynchronous.mean_staleness > 0.0
    assert sum(s * n for s, n in asynchronous.staleness_histogram.items()) == pytest.approx(
        asynchronous.mean_staleness * len(asynchronous.recorder.staleness)
    )


def test_asynchronous_workers_are_measured_for_a_cycle_with_or_without_staleness() -> None:
    """Updates of GossipSGD have none, but come in bursts all the same; uneven workers are noted, too."""
    for strategy in (GossipSGD(), ADPSGD()):
        result = run(experiment(strategy=strategy, model="lenet5", speed=[1.0, 0.2, 0.2, 0.2], steps=6))
        begin, end = (result.measured_updates[at][0] for at in (0, -1))
        assert end - begin >= min(np.diff([0.0, *ends])[-1] for ends in result.recorder.step_end if ends) * (1 - 1e-9)
        assert result.has_own_steps
        assert any("mostly reflect the fast workers" in note for note in result.notes)
    assert not run(experiment()).has_own_steps


def test_a_plan_names_what_it_leaves_out_of_the_run() -> None:
    left_out: dict[str, object] = {"jitter": Lognormal(0.1), "slowdowns": [Slowdown([0], 0.0, "1 s", 2.0)]}
    left_out |= {"waiting for input": Input(prep_seconds="50 ms"), "faults": [LinkFault("h0", "switch", 0.0, "1 s")]}
    for name, value in left_out.items():
        field = "input" if "input" in name else name
        result = run(experiment(**{field: value}))
        assert result.plan.notes[-1] == f"the plan leaves out of the run: {name}"
        assert f"note: the plan leaves out of the run: {name}" in str(result.plan)
    assert not any("leaves out" in note for note in run(experiment()).plan.notes)


def test_scaling_is_one_run_per_number() -> None:
    results = scaling(experiment(workers=None), [1, 2, 8])
    nbytes = 4.0 * results[0].workloads[0].model.n_params
    for n, result in zip([1, 2, 8], results, strict=True):
        expected = 0.1 + cost.ring(n, nbytes, 2 * LATENCY, 1 / BANDWIDTH)
        assert result.step_time == pytest.approx(expected, rel=1e-9)
    assert all(result.cluster is STAR for result in results)


# ---------------------------------------------------------------- one collective


@pytest.mark.parametrize("n", [2, 3, 8])
def test_collective_time_is_the_closed_form(n: int) -> None:
    assert collective_time(STAR, "ring", "10 MB", ranks=n) == pytest.approx(
        cost.ring(n, 1e7, 2 * LATENCY, 1 / BANDWIDTH), rel=1e-9
    )
    schedule = build("ring", n)
    assert collective_time(STAR, schedule, 1e7, ranks=n) == collective_time(STAR, "ring", 1e7, ranks=n)


def test_collective_time_with_late_ranks() -> None:
    """Nothing passes rank 3 before it enters a second later: then a whole reduction and gathering is left for
    it, and no more than the undisturbed time."""
    on_time = collective_time(STAR, "ring", 1e7, ranks=4)
    late = collective_time(STAR, "ring", 1e7, ranks=4, entry_times=[0.0, 0.0, 0.0, 1.0])
    assert 1.0 + 0.5 * on_time <= late <= 1.0 + on_time * (1 + 1e-9)
    all_late = collective_time(STAR, "ring", 1e7, ranks=4, entry_times=[1.0] * 4)
    assert all_late == pytest.approx(1.0 + on_time, rel=1e-12)


def test_collective_time_places_ranks_as_told() -> None:
    """Two racks with a trunk as fast as one machine: in the order given, four of the ring's steps cross it each
    way; ordered by topology, or if the order given is a good one, one does."""
    trunk = load_cluster(racks(2, 4, bandwidth=BANDWIDTH, latency=0.0, trunk_bandwidth=BANDWIDTH))
    lap = 2 * 7 * 1e7 / 8 / BANDWIDTH
    mixed = [0, 4, 1, 5, 2, 6, 3, 7]
    assert collective_time(trunk, "ring", 1e7, ranks=mixed) == pytest.approx(4 * lap, rel=1e-9)
    assert collective_time(trunk, "ring", 1e7, ranks=mixed, rank_order="topology") == pytest.approx(lap, rel=1e-9)
    assert collective_time(trunk, "ring", 1e7) == pytest.approx(lap, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nbytes": -1.0}, "nbytes = -1.0: must be finite and not negative, e.g. '100 MB'"),
        ({"nbytes": "3 s"}, "'3 s' is a time, not a size"),
        ({"ranks": 9}, "ranks = 9: must be a number of workers up to 8, or a list of distinct integers"),
        ({"ranks": [0, 0]}, "ranks = (0, 0): must be a number of workers up to 8"),
        ({"rank_order": "best"}, "rank_order = 'best': must be 'given' or 'topology'"),
        ({"entry_times": [float("nan"), *[0.0] * 7]}, "entry_times[0] = nan: must be finite and not negative"),
        ({"entry_times": [-1.0, *[0.0] * 7]}, "entry_times[0] = -1.0: must be finite and not negative"),
        ({"entry_times": [0.0]}, "entry_times has 1 entries for 8 ranks; pass one per rank"),
        ({"algorithm": build("ring", 3)}, "the schedule is for 3 ranks, not for 8; set ranks"),
        ({"algorithm": "rings"}, "did you mean 'ring'?"),
        ({"kind": "all_reduces"}, "did you mean 'all_reduce'?"),
    ],
)
def test_collective_time_refuses(changes: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {"algorithm": "ring", "nbytes": 1e6, **changes}
    with pytest.raises(ConfigError) as caught:
        collective_time(STAR, **arguments)  # type: ignore[arg-type]
    assert text in str(caught.value)


# ---------------------------------------------------------------- speed


def test_a_step_of_a_thousand_gpus_is_a_few_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50 on 128 machines of 8 V100. Rounds that repeat are replayed, so that 1.4 million messages are as many
    instants of the engine as the ramps and ends of a few rings, and Python does a fixed amount of work for each GPU."""
    networks: list[Network] = []

    class Watched(Network):
        def __init__(self, cluster: Interconnect, *, record: bool = False) -> None:
            super().__init__(cluster, record=record)
            networks.append(self)

    monkeypatch.setattr("ddlsim.run.simulate.Network", Watched)
    monkeypatch.setattr("ddlsim.network.engine.REPLAYED_FROM", 0)
    host = MultiGpu(n_gpus=8, inside="hybrid_cube_mesh", device="v100", nvlink_bandwidth="25 GB/s", n_pcie_switches=4)
    strategy = AllReduce("hierarchical", DdpBuckets())
    large, small = (load_cluster(star(n, bandwidth="100 Gbit/s", latency="5 us", host=host)) for n in (128, 8))
    simulate(small, "resnet50", strategy, 64, steps=1, warmup=0)  # compiles the engine
    result, n_calls = counted(lambda: simulate(large, "resnet50", strategy, 64, steps=1, warmup=0))
    assert result.n_workers == 1024
    assert result.n_messages == 5 * 1024 * (2 * 7 + 2 * 127)  # five buckets, rings of 8 and of 128
    of_small, of_large = (network.engine.net.counts.n_events for network in networks)
    assert of_large < 2 * of_small < 200
    assert n_calls < 1000 * 1024
