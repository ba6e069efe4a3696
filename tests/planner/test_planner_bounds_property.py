"""No simulation beats its bound: random clusters, workers and strategies, those that users write among them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_plans import plan_of

from ddlsim import (
    ADPSGD,
    DPSGD,
    FP16,
    FSDP,
    AllReduce,
    AsyncParameterServer,
    CodecCost,
    Compression,
    DdpBuckets,
    Experiment,
    Gamma,
    Hybrid,
    KSync,
    LocalSGD,
    Lognormal,
    Measured,
    NoJitter,
    Parallel,
    ParameterServer,
    Priority,
    ShardedUpdate,
    Slowdown,
    StaleSynchronous,
    TopK,
    load_cluster,
    simulate,
)  # fmt: skip
from ddlsim.cluster import Host, MultiGpu, star, two_racks
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.plan.plan import BACKWARD, FORWARD
from ddlsim.planner.bounds import Bounds, least_seconds
from ddlsim.planner.candidates import Candidate, nature_of
from ddlsim.run.prepare import prepare
from ddlsim.runtime import RunContext, Strategy
from ddlsim.runtime.context import Process, Worker, factors
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload

SORTED = Compression(TopK(0.1), cost=CodecCost(encode=1e-9, encode_sort=1e-8, overhead=1e-4))
FAST = MultiGpu(n_gpus=2, inside="nvlink_mesh", nvlink_bandwidth="20 GB/s", device="v100")
SLOW = Host(device="desktop-cpu")


@dataclass(frozen=True)
class Thrifty(AllReduce):
    """An all-reduce that sends a thousandth of the bytes, and tells no plan of its own."""

    def start(self, context: RunContext) -> None:
        for worker in context.workers:
            work = worker.workload
            fewer = {name: getattr(work, name) / 1000 for name in ("grad_nbytes", "tensor_nbytes")}
            worker.workload = dataclasses.replace(work, **fewer)
        AllReduce.start(self, context)


@dataclass(frozen=True)
class Named(AllReduce):
    """An all-reduce by another name; its plan is still true."""

    @property
    def label(self) -> str:
        return "mine"


@dataclass(frozen=True)
class Seldom(LocalSGD):
    """Averages less often than its parent's plan says."""

    def start(self, context: RunContext) -> None:
        LocalSGD(4 * self.period).start(context)


@dataclass(frozen=True)
class OwnPlan(AllReduce):
    """Runs in another way, and says so."""

    def start(self, context: RunContext) -> None:
        LocalSGD(2).start(context)

    def plan(self, workloads: list[Workload], steps: int, accumulation: int) -> Plan:
        return LocalSGD(2).program(workloads, accumulation).unroll(steps)


@dataclass(frozen=True)
class Alone:
    """Workers that never talk; each of their steps is an update."""

    label = "alone"

    def updates(self, steps: int, n_workers: int) -> int:
        return steps * n_workers

    def start(self, context: RunContext) -> None:
        for worker in context.workers:
            context.loop.env.process(self.work(worker))

    def work(self, worker: Worker) -> Process:
        while True:
            yield from worker.gradient()
            worker.end_step()
            worker.stop.updated(worker.samples_per_step)


@dataclass(frozen=True)
class Bursts(Alone):
    """Workers that compute `n` gradients before all of them count, one by one."""

    n: int = 4
    label = "bursts"

    def work(self, worker: Worker) -> Process:
        while True:
            for _ in range(self.n):
                yield from worker.gradient()
                worker.end_step()
            for _ in range(self.n):
                worker.stop.updated(worker.samples_per_step)


EVERYTHING: list[Strategy] = [
    *(AllReduce(name, overlap) for name in ("ring", "halving_doubling", "hierarchical", "double_binary_tree")
      for overlap in ("none", "layer", "ddp", "horovod", Priority(1e4, 2))),
    AllReduce("parameter_server", DdpBuckets(5e4, 1e4)), AllReduce("naive_ring"), ShardedUpdate(),
    ShardedUpdate(overlap="layer"), ShardedUpdate("direct", "direct", overlap="ddp"),
    ParameterServer(1, "colocated"), ParameterServer(2, "colocated", "none"), ParameterServer(1, overlap="ddp"),
    ParameterServer(2, "colocated", local_reduction=True), LocalSGD(1), LocalSGD(3),
    AsyncParameterServer(1, "colocated"), StaleSynchronous(1), KSync(2), DPSGD(), ADPSGD(),
    Thrifty(), Thrifty("ring", "none"), Named("hierarchical"), Seldom(2), OwnPlan(), Alone(), Bursts(), Bursts(64),
]  # fmt: skip


def candidate_of(experiment: Experiment) -> Candidate:
    """The candidate of an experiment as it is."""
    cluster = load_cluster(experiment.cluster)  # type: ignore[arg-type]
    assert isinstance(experiment.workers, int)
    return Candidate(
        0, experiment.with_(cluster=cluster), cluster, "here", experiment.workers, experiment.strategy.label, "none",
        experiment.batch_size, True, 0, False,
    )  # fmt: skip


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    bandwidth = draw(st.sampled_from(["50 Mbit/s", "1 Gbit/s", "100 Gbit/s"]))
    latency = draw(st.sampled_from(["0 us", "20 us", "2 ms"]))
    kind = draw(st.sampled_from(["star", "machines", "racks"]))
    if kind == "machines":
        cluster = star(4, bandwidth=bandwidth, latency=latency, host=FAST)
    elif kind == "racks":
        cluster = two_racks(3, bandwidth=bandwidth, latency=latency, trunk_bandwidth="1 Gbit/s")
    else:
        cluster = star(6, bandwidth=bandwidth, latency=latency, host=SLOW)
    workers = draw(st.integers(3, 5))
    strategy = draw(st.sampled_from(EVERYTHING))
    period = getattr(strategy, "period", 1)
    return Experiment(
        cluster, "lenet5", strategy, 16, workers, compute=Measured(draw(st.sampled_from([1e-5, 1e-3, 0.1])), 16),
        warmup=period * draw(st.integers(0, 2)), steps=period * draw(st.integers(2, 5)),
        accumulation=draw(st.sampled_from([1, 1, 3])),
        speed=draw(st.sampled_from([None, tuple(1.0 / (1 + i) for i in range(workers))])),
        jitter=draw(st.sampled_from([NoJitter(), NoJitter(), Lognormal(0.3)])), seed=draw(st.integers(0, 3)),
        compression=draw(st.sampled_from([None, None, None, TopK(0.01), FP16(), SORTED])),
        slowdowns=draw(st.sampled_from([(), (), Slowdown(0, "1 ms", "50 ms", 3.0), Slowdown(1, 0.0, "1 s", 0.5)])),
    )  # fmt: skip


@pytest.mark.parametrize("share", seeds(1, 3))  # of 150 examples
@settings(max_examples=50, deadline=None)
@given(experiments())
def test_no_simulation_beats_its_bound(share, experiment: Experiment) -> None:
    candidate = candidate_of(experiment)
    bounds = Bounds(samples=1e6)
    try:
        result = simulate(experiment)
    except ConfigError:
        assert experiment.compression is not None  # some ways to travel do not take what is compressed
        return
    best = bounds.of(candidate)
    assert result.throughput <= best.figures.throughput
    assert result.efficiency <= best.figures.efficiency


LAYOUTS: list[Strategy] = [
    FSDP(stage=1, micro_batch=2), FSDP(micro_batch=2), FSDP(shard=2, prefetch=0), FSDP(stage=2, overlap="layer"),
    Parallel(tensor=2, micro_batch=2), Parallel(tensor=2, pipeline=2),
    Parallel(pipeline=2, micro_batch=2, sharded=True), Parallel(tensor=2, micro_batch=2, sharded="full"),
    Parallel(pipeline=2, micro_batch=2, sharded="full"), Parallel(micro_batch=2, sharded="full"),
    Parallel(pipeline=4, order="gpipe", micro_batch=4), Parallel(pipeline=2, order="zb-1p"),
    Parallel(pipeline=2, order="pipedream"), Parallel(pipeline=4, order="pipedream"),
    Parallel(pipeline=2, order="2bw", micro_batch=2), Hybrid({}, micro_batches=4), Hybrid(),
    Hybrid({"dense1": 2}, "none"),
]  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> Experiment:
    bandwidth, inside = draw(st.sampled_from(["50 Mbit/s", "100 Gbit/s"])), draw(st.sampled_from([FAST, SLOW]))
    strategy, compression = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([None, None, FP16()]))
    model = "char-transformer" if getattr(strategy, "tensor", 1) > 1 else "lenet5"
    return Experiment(
        star(4, bandwidth=bandwidth, latency="20 us", host=inside), model, strategy, 32, 4,
        compute=Measured(draw(st.sampled_from([1e-5, 1e-2])), contract.of(strategy).samples_at_once(32, 4)),
        warmup=draw(st.integers(0, 2)), steps=draw(st.integers(2, 4)), seed=draw(st.integers(0, 3)),
        speed=draw(st.sampled_from([None, (1.0, 0.5, 2.0, 1.0)])), compression=compression,
        jitter=draw(st.sampled_from([NoJitter(), Lognormal(0.5), Gamma(0.3)])),
        slowdowns=draw(st.sampled_from([(), (), Slowdown(1, 0.0, "1 s", 0.5)])),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_no_layout_beats_its_bound(experiment: Experiment) -> None:
    """The factors of jitter are those of the workers that ranks stand for, of every micro-batch."""
    best = Bounds().of(candidate_of(experiment))
    try:
        result = simulate(experiment)
    except ConfigError:
        assert experiment.compression is not None
        return
    assert result.throughput <= best.figures.throughput
    assert result.efficiency <= best.figures.efficiency


def test_each_rank_draws_the_factors_of_its_worker() -> None:
    experiment = Experiment(
        star(4, bandwidth=1e9, latency=0.0, host=SLOW), "char-transformer", Parallel(tensor=2, micro_batch=8), 32, 4,
        compute=Measured(1e-2, 8), jitter=Lognormal(0.5), seed=1,
    )  # fmt: skip
    plan = plan_of(experiment.strategy, prepare(experiment).workloads, 1, 2)
    seconds = least_seconds(plan, experiment, np.zeros(len(plan)), 4)
    for rank in range(4):
        passes = plan.rows(FORWARD, BACKWARD)
        passes = passes[plan.rank[passes] == rank]
        drawn = list(itertools.islice(factors(experiment.jitter, 1, rank), 2))
        expected = np.repeat(drawn, len(passes) // 2)
        np.testing.assert_allclose(seconds[passes] / plan.seconds[passes], expected, rtol=1e-12)


def test_bounds_of_layouts_know_the_jitter() -> None:
    """On a network that takes no time, the bounds of a pipeline and of shares are near what happens."""
    experiment = Experiment(
        star(4, bandwidth=1e15, latency=0.0, host=SLOW), "lenet5", Parallel(pipeline=4, micro_batch=8), 32, 4,
        compute=Measured(1e-2, 8), warmup=1, steps=3, jitter=Lognormal(0.5), seed=1,
    )  # fmt: skip
    for strategy, close in ((experiment.strategy, 1.1), (FSDP(micro_batch=2), 1.01)):
        one = experiment.with_(strategy=strategy, compute=Measured(1e-2, contract.of(strategy).samples_at_once(32, 4)))
        bound = Bounds().of(candidate_of(one)).figures.throughput
        assert 1.0 <= bound / simulate(one).throughput < close


def test_a_subclass_that_sends_fewer_bytes_is_not_left_out() -> None:
    """On 1 Mbit/s the plan of its parent allows 4 samples/s, of which the subclass knows nothing."""
    base = Experiment(
        star(4, bandwidth="1 Mbit/s", latency="1 us"), "lenet5", AllReduce(overlap="none"), 4, 4,
        compute=Measured("10 ms", 4), steps=3,
    )  # fmt: skip
    parent, thrifty = (base.with_(strategy=strategy) for strategy in (base.strategy, Thrifty(overlap="none")))
    at_most = Bounds().of(candidate_of(parent)).figures.throughput
    assert simulate(parent).throughput <= at_most
    result = simulate(thrifty)
    assert result.throughput > 10 * at_most
    best = Bounds().of(candidate_of(thrifty))
    assert best.limit == "computing alone"
    assert result.throughput <= best.figures.throughput


def test_a_strategy_that_updates_in_bursts_is_not_left_out() -> None:
    """All of 64 gradients of every worker count at once: between the bursts of two there is little to compute."""
    base = Experiment(
        star(4, bandwidth="1 Gbit/s", latency="1 us"), "lenet5", Bursts(n=64), 4, 4, compute=Measured("10 ms", 4),
        warmup=16, steps=48, speed=(1.0, 0.99, 0.98, 0.97),
    )  # fmt: skip
    alone = (1.0 + 0.99 + 0.98 + 0.97) * 4 / 10e-3
    assert simulate(base).throughput > 10 * alone
    assert Bounds().of(candidate_of(base)).figures.throughput == np.inf
    first = Bounds().of(candidate_of(base.with_(warmup=0)))
    assert (first.limit, first.figures.throughput) == ("computing alone", pytest.approx(alone))
    assert simulate(base.with_(warmup=0)).throughput <= first.figures.throughput


def test_encoding_is_in_the_bound() -> None:
    """Nothing to send, 1 s to compute and 2 s to encode a gradient: 3 s a step, and as long on one worker more; on one
    server of two, or on a machine of two, each encodes a half twice or once."""
    two = star(2, bandwidth="100 Gbit/s", latency="0 us")
    machines = star(2, bandwidth="100 Gbit/s", latency="0 us", host=FAST)
    n = 61_706  # parameters of LeNet-5
    cost = CodecCost(encode=2.0 / n)
    cases = [
        (two, 2, AllReduce(overlap="none"), 3.0), (machines, 4, AllReduce("hierarchical", "none"), 2.0),
        (two, 2, ParameterServer(2, "colocated", overlap="none"), 3.0),
    ]  # fmt: skip
    for cluster, workers, strategy, seconds in cases:
        experiment = Experiment(
            cluster, "lenet5", strategy, 4, workers, compute=Measured(1.0, 4), steps=3,
            compression=Compression(TopK(0.01), cost=cost),
        )  # fmt: skip
        best = Bounds().of(candidate_of(experiment))
        assert best.figures.throughput == pytest.approx(4 * workers / seconds, rel=1e-3)
        assert simulate(experiment).throughput <= best.figures.throughput


def test_what_follows_from_a_plan() -> None:
    assert nature_of(AllReduce("ring", "priority")).exact
    assert [nature_of(one).simple for one in (AllReduce(), ParameterServer(), ShardedUpdate(), LocalSGD())] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    local, own, thrifty, alone = (nature_of(one) for one in (LocalSGD(4), OwnPlan(), Thrifty(), Alone()))
    assert (local.synchronous, local.exact) == (own.synchronous, own.exact) == (True, False)
    assert (thrifty.synchronous, thrifty.exact) == (alone.synchronous, alone.exact) == (False, False)


def test_jitter_is_in_the_bound() -> None:
    """Nothing to send: a step takes as long as the slowest of 5 workers, whose factors the bound knows; of the first
    one that is measured it only knows that it begins when some worker does."""
    experiment = Experiment(
        star(5, bandwidth="100 Gbit/s", latency="0 us"), "lenet5", AllReduce(overlap="none"), 16, 5,
        compute=Measured(10.0, 16), warmup=1, steps=6, jitter=Lognormal(0.5), seed=3,
    )  # fmt: skip
    drawn = np.array([list(itertools.islice(factors(experiment.jitter, 3, rank), 7)) for rank in range(5)])
    seconds = 10.0 * (drawn[:, 1].min() + drawn[:, 2:].max(axis=0).sum())
    best = Bounds().of(candidate_of(experiment))
    assert best.limit == "what computing cannot hide"
    assert best.figures.throughput == pytest.approx(5 * 16 * 6 / seconds, rel=1e-3)
    assert simulate(experiment).throughput <= best.figures.throughput
