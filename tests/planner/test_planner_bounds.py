"""No simulated throughput exceeds its bound, and some reach it."""

from __future__ import annotations

import dataclasses

import pytest
from draws import slow

from ddlsim import (
    ADPSGD,
    FP16,
    AllReduce,
    AsyncParameterServer,
    DaSGD,
    Experiment,
    LocalSGD,
    Measured,
    ParameterServer,
    ShardedUpdate,
    TopK,
    load_cluster,
    simulate,
)  # fmt: skip
from ddlsim.cluster import Host, MultiGpu, star, two_racks
from ddlsim.errors import ConfigError
from ddlsim.planner.bounds import Bound, Bounds
from ddlsim.planner.candidates import Candidate, candidates
from ddlsim.run.prepare import prepare

MACHINE = MultiGpu(n_gpus=4, inside="nvlink_mesh", nvlink_bandwidth="20 GB/s", device="v100")
CLUSTERS = {
    "switch": star(9, bandwidth="1 Gbit/s", latency="1 us"),
    "racks": two_racks(4, bandwidth="1 Gbit/s", latency="0 us", trunk_bandwidth="1 Gbit/s"),
    "machines": star(4, bandwidth="10 Gbit/s", latency="10 us", host=MACHINE),
}
STRATEGIES = [
    *(AllReduce(name, overlap) for name in ("ring", "halving_doubling", "double_binary_tree", "hierarchical")
      for overlap in ("none", "ddp", "priority")),
    AllReduce("naive_ring", "layer"), AllReduce("parameter_server", "layer"), ShardedUpdate(),
    ShardedUpdate(overlap="ddp"),
    ParameterServer(3, "colocated"), ParameterServer(1, "colocated", overlap="none"),
    ParameterServer(2, "colocated", local_reduction=True), LocalSGD(3), LocalSGD(8, algorithm="hierarchical"),
    AsyncParameterServer(2, "colocated"), DaSGD(4, 2), ADPSGD(),
]  # fmt: skip


def bound(candidate: Candidate, *, samples: float | None = None) -> Bound:
    return Bounds(samples=samples).of(candidate)


def options(name: str, step: float, compressions: list[object] | None = None) -> list[Candidate]:
    cluster = load_cluster(CLUSTERS[name])
    base = Experiment(cluster, "lenet5", compute=Measured(step, 16))
    packed = [None] if compressions is None else compressions
    workers = 16 if name == "machines" else 8
    return candidates(base, [cluster], [workers], STRATEGIES, packed, [16])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("step", [slow(1e-5), 1e-3, slow(1e-1)])
def test_no_simulation_beats_its_bound(name: str, step: float) -> None:
    packed = [None, TopK(0.01), FP16()] if (name, step) == ("switch", 1e-5) else [None]
    for candidate in options(name, step, packed):
        best = bound(candidate, samples=1e6)
        try:
            result = simulate(candidate.experiment)
        except ConfigError:
            assert candidate.compression != "none"  # some ways to travel do not take what is compressed
            continue
        assert result.throughput <= best.figures.throughput, candidate
        assert result.efficiency <= best.figures.efficiency * (1 + 1e-9), candidate
        assert best.figures.total_time is not None
        assert 1e6 / result.throughput >= best.figures.total_time


def test_bounds_are_reached() -> None:
    """A ring on a switch without latency, and nothing to compute: 2 (N-1)/N S/B a step, but for half of the first one,
    which some may have begun before it is measured. And computing alone."""
    cluster = load_cluster(star(8, bandwidth="1 Gbit/s", latency="0 us"))
    for step, limit, steps in ((1e-9, "bytes that must travel", 50), (1e4, "what computing cannot hide", 2)):
        base = Experiment(cluster, "lenet5", compute=Measured(step, 16))
        (candidate,), _ = candidates(base, [cluster], [8], [AllReduce("ring", "none")], [None], [16])
        candidate = dataclasses.replace(candidate, experiment=candidate.experiment.with_(steps=steps))
        best = bound(candidate)
        assert best.limit == limit
        share = 1.0 - 0.5 / steps if step < 1.0 else 1.0
        assert simulate(candidate.experiment).throughput == pytest.approx(best.figures.throughput * share, rel=1e-5)


def test_what_cannot_be_hidden_is_in_the_bound() -> None:
    """A ring of two after the backward pass takes S/B, then comes the update; nothing is faster."""
    cluster = load_cluster(star(2, bandwidth="1 Gbit/s", latency="0 us", host=Host(device="v100")))
    (candidate,), _ = candidates(
        Experiment(cluster, "lenet5"), [cluster], [2], [AllReduce("ring", "none")], [None], [16]
    )
    workload = prepare(candidate.experiment).workloads[0]
    best = bound(candidate)
    assert best.limit == "what computing cannot hide"
    assert workload.optimizer > 0.0
    assert best.figures.throughput == pytest.approx(32 / (workload.step_time + workload.gradient_nbytes / 125e6))
    assert simulate(candidate.experiment).throughput == pytest.approx(best.figures.throughput, rel=1e-6)


def test_compression_is_bounded_by_computing_and_packing_only() -> None:
    dense, packed = (bound(options("switch", 1e-5, [compression])[0]) for compression in (None, TopK(0.01)))
    assert dense.limit == "bytes that must travel"
    assert packed.limit == "what computing cannot hide"


@pytest.mark.parametrize("strategy", STRATEGIES[:4] + STRATEGIES[12:18], ids=lambda s: s.label)
def test_a_few_steps_measure_what_many_do(strategy) -> None:
    """Where nothing is left to chance, every step is like the one before: 20 of them bring nothing new."""
    cluster = load_cluster(CLUSTERS["machines"])
    base = Experiment(cluster, "lenet5", compute=Measured(1e-3, 16))
    (candidate,), _ = candidates(base, [cluster], [16], [strategy], [None], [16])
    period = getattr(strategy, "period", 1)
    short, long = (
        simulate(e) for e in (candidate.experiment, candidate.experiment.with_(warmup=6 * period, steps=20 * period))
    )
    assert short.throughput == pytest.approx(long.throughput, rel=1e-6)
