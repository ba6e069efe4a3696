"""Rules that every strategy keeps. A new strategy or overlap needs one more line in STRATEGIES."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import simpy
from draws import few

from ddlsim import (
    FSDP,
    AllReduce,
    AsyncParameterServer,
    BackupWorkers,
    Cluster,
    DdpBuckets,
    DeadlockError,
    ElasticAveraging,
    Experiment,
    FedAvg,
    FedBuff,
    Gamma,
    HorovodFusion,
    Hybrid,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Measured,
    Parallel,
    ParameterServer,
    Priority,
    Result,
    ServerWork,
    ShardedUpdate,
    Slowdown,
    SoftSync,
    StaleSynchronous,
    WhileWaiting,
    algorithm_names,
    load_cluster,
)
from ddlsim.cluster import racks
from ddlsim.cluster.calibration_table import CalibrationTable, CurveTable
from ddlsim.collectives import build, reorder
from ddlsim.collectives.push_pull import push_pull
from ddlsim.network import lanes as network_lanes
from ddlsim.network import tasks
from ddlsim.run import run
from ddlsim.runtime import Averaging, Process, Worker, lanes
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.fabric import Fabric
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies import RunContext, Strategy, contract
from ddlsim.strategies.overlap import Overlap, overlap_named
from ddlsim.workload.compute import Workload

OVERLAPS: dict[str, Overlap | str] = {
    "none": "none",
    "layer": "layer",
    "ddp": DdpBuckets(1e5, 3e4),
    "horovod": HorovodFusion(1e5, "0.7 ms"),
    "priority": Priority(5e4, 2),
}
SYNCHRONOUS: dict[str, Strategy] = {
    **{
        f"{algorithm}-{name}": AllReduce(algorithm, overlap)
        for algorithm in (*algorithm_names(), "auto")
        for name, overlap in OVERLAPS.items()
    },
    **{
        f"{cost}-{name}": AllReduce("ring", overlap, cost=cost)
        for cost in ("nccl", "calibrated")
        for name, overlap in OVERLAPS.items()
    },
    "ring-while-waiting": AllReduce("ring", WhileWaiting(DdpBuckets(1e5, 3e4))),
    **{f"ring-{order}": AllReduce("ring", "none", order) for order in ("given", (3, 1, 0, 2))},
    **{
        f"server-{servers}-{placement}-{name}{'-local' if local else ''}": ParameterServer(
            servers, placement, overlap, local
        )
        for servers, placement in ((1, "own"), (3, "own"), (4, "colocated"))
        for name, overlap in OVERLAPS.items()
        for local in (False, True)
    },
    **{
        f"server-working-{name}": ParameterServer(3, overlap=overlap, work=ServerWork("0.5 GB/s"))
        for name, overlap in OVERLAPS.items()
    },
    **{f"sharded-{name}": ShardedUpdate(overlap=OVERLAPS[name]) for name in ("none", "layer", "ddp")},
    "server-working-colocated-local-priority": ParameterServer(
        4, "colocated", Priority(5e4, 2), True, ServerWork("0.5 GB/s", update=5)
    ),
}
ASYNCHRONOUS: dict[str, Strategy] = {
    "async-1": AsyncParameterServer(),
    "async-3-apply": AsyncParameterServer(3, apply_time="1 ms"),
    "async-colocated": AsyncParameterServer(2, "colocated"),
}
CENTRAL: dict[str, Strategy] = {
    "async-accumulating": AsyncParameterServer(2, accumulate=2),
    "softsync": SoftSync(2, servers=2, apply_time="1 ms"),
    "ssp": StaleSynchronous(1, servers=3),
    "ssp-0": StaleSynchronous(0, apply_time="1 ms"),
    "backup": BackupWorkers(1, servers=2, placement="colocated"),
    "backup-finishing": BackupWorkers(1, restart=False, apply_time="1 ms"),
    "2-sync": KSync(2, servers=2, apply_time="1 ms"),
    "2-batch-sync": KBatchSync(2),
    "2-batch-sync-apply": KBatchSync(2, servers=3, apply_time="1 ms"),
    "2-async": KAsync(2, servers=3, apply_time="1 ms"),
    "2-batch-async": KBatchAsync(2, placement="colocated"),
    "fedavg": FedAvg(0.5, local_steps=2, servers=2, apply_time="1 ms"),
    "fedbuff": FedBuff(2, 2, servers=2, apply_time="1 ms"),
    "elastic": ElasticAveraging(0.2, 2, servers=2, apply_time="1 ms"),
    "elastic-async": ElasticAveraging(0.2, 2, synchronous=False, apply_time="1 ms"),
}
SHARING: dict[str, Strategy] = {
    "fsdp-1": FSDP(stage=1, micro_batch=4, overlap=DdpBuckets(1e5, 3e4)),
    "fsdp-2": FSDP(stage=2, micro_batch=2, overlap="layer"),
    "fsdp-3": FSDP(micro_batch=4, prefetch=2),
    "fsdp-hybrid": FSDP(micro_batch=8, shard=2, reshard=False, no_sync=True),
    "pipeline": Parallel(pipeline=2, micro_batch=2),
    "pipeline-sharded": Parallel(pipeline=2, micro_batch=2, order="zb-v", sharded=True, overlap="layer"),
    "pipeline-fully-sharded": Parallel(pipeline=2, micro_batch=2, sharded="full"),
    "pipeline-recomputed": Parallel(pipeline=4, micro_batch=4, order="gpipe", recompute="stage"),
    "pipedream": Parallel(pipeline=2, order="pipedream"),
    "2bw": Parallel(pipeline=4, micro_batch=4, order="2bw", cost="nccl"),
    "hybrid": Hybrid({"dense1": 1, "dense2": 2}),
    "hybrid-micro": Hybrid({}, micro_batches=4, overlap=DdpBuckets(1e5, 3e4), cost="nccl"),
    "hybrid-while-waiting": Hybrid({"dense1": 2}, WhileWaiting(), micro_batches=2),
}
STRATEGIES = SYNCHRONOUS | ASYNCHRONOUS | CENTRAL | SHARING
N = 4


def cluster() -> Cluster:
    """Two racks of four machines, the trunk half as fast as the machines together; all-reduces have been measured."""
    found = load_cluster(racks(2, 4, bandwidth="1 Gbit/s", latency="20 us", oversubscription=2, trunk_bandwidth=None))
    curve = CurveTable(
        operation="all_reduce", algorithm="ring", per_message=2.0, sizes=[65536], per_byte=[1.5, 1.1],
        covariance=[[0.01, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]], spread=0.03, dof=5.0, nbytes=[64, 2**24],
        ranks=[2, 8],
    )  # fmt: skip
    return dataclasses.replace(found, calibration=CalibrationTable(curves=[curve]))


CLUSTER = cluster()


def experiment(strategy: Strategy, *, jitter: bool = True, n: int = N, seed: int = 5) -> Experiment:
    """Four workers of unequal speed with jitter and a slow-down, or without any of these."""
    batch_size = 8 * n if contract.of(strategy).shares_batch else 8  # of all workers together
    measured = Measured(0.004, contract.of(strategy).samples_at_once(batch_size, n))
    if not jitter:
        return Experiment(CLUSTER, "lenet5", strategy, batch_size, n, steps=3, warmup=1, compute=measured, seed=seed)
    return Experiment(
        CLUSTER, "lenet5", strategy, batch_size, n, steps=3, warmup=1, compute=measured, jitter=Gamma(0.3),
        slowdowns=(Slowdown(1, 0.01, 0.02, 2.0),), speed=(1.0, 0.8, 1.1, 0.9)[:n], seed=seed,
    )  # fmt: skip


def fingerprint(result: Result) -> str:
    """Everything that was simulated, to the last bit."""
    recorder = result.recorder
    parts = [recorder.updates, recorder.step_end, recorder.seconds, recorder.staleness, result.end_time]
    text = json.dumps([parts, result.channel_nbytes.tolist(), result.channel_busy.tolist()])
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def jittered(name: str) -> Result:
    """What several tests look at: a run with jitter, and its spans."""
    return run(experiment(STRATEGIES[name]), keep_spans=True)


@functools.cache
def even(name: str) -> Result:
    """The same without jitter."""
    return run(experiment(STRATEGIES[name], jitter=False))


def each(names: Iterable[str], start: int) -> pytest.MarkDecorator:
    """Test every name. `make test` has a third, another one for each `start`.

    These are all pairs of rule and algorithm, of rule and overlap, and of algorithm and overlap.
    """
    listed = list(names)
    return pytest.mark.parametrize("name", few(listed, len(listed) // 3, start=start))


@each(STRATEGIES, 0)
def test_the_seed_decides_everything(name: str) -> None:
    """And that spans are kept changes nothing."""
    first = fingerprint(jittered(name))
    assert fingerprint(run(experiment(STRATEGIES[name]))) == first
    assert fingerprint(run(experiment(STRATEGIES[name], seed=6))) != first


@pytest.mark.slow
def test_another_process_computes_the_same() -> None:
    names = ["ring-ddp", "double_binary_tree-priority", "server-3-own-horovod", "async-3-apply", "2-batch-sync"]
    code = (
        "import test_strategies_conformance as t\n"
        f"for name in {names!r}: print(t.fingerprint(t.run(t.experiment(t.STRATEGIES[name]))))"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    here = [fingerprint(jittered(name)) for name in names]
    assert done.stdout.split() == here


@each(STRATEGIES, 1)
def test_every_second_is_accounted_for(name: str) -> None:
    """compute + communication + waiting + idle = wall time for every worker; a worker is never idle, as these
    strategies leave it nothing else to do; its spans follow one another without gap or overlap."""
    result = jittered(name)
    for rank, seconds in enumerate(result.recorder.seconds):
        assert min(seconds.values()) >= 0.0
        assert sum(seconds.values()) == pytest.approx(result.end_time, rel=1e-9)
        spans = [s for s in result.recorder.spans if s.track == f"worker {rank}"]
        spans.sort(key=lambda s: (s.start, s.end))
        edges = [s.end for s in spans[:-1]]
        assert [s.start for s in spans[1:]] == pytest.approx(edges, rel=1e-12)
        assert (spans[0].start, spans[-1].end) == (0.0, pytest.approx(result.end_time, rel=1e-12))
    idle = result.workers["idle"]
    assert idle.max() <= 1e-9 * result.end_time
    assert sum(result.shares.values()) == pytest.approx(1.0, rel=1e-9)


@each(SYNCHRONOUS, 0)
def test_computing_takes_what_the_workload_says(name: str) -> None:
    """Without jitter: 4 steps of 4 ms each (the priority queue has begun the fifth forward pass, and so have workers
    whose shards arrive, or which a server with work has answered before others)."""
    result = even(name)
    for seconds in result.recorder.seconds:
        begun = seconds["compute"] - 4 * 0.004
        ahead = "-priority" in name or "-working" in name or name in ("sharded-layer", "sharded-ddp")
        forward = result.workloads[0].forward_time if ahead else 0.0
        assert -1e-12 <= begun <= forward + 1e-12


def bucket_sizes(workload: Workload, overlap: Overlap | str) -> list[float]:
    policy = overlap_named(overlap)
    return [bucket.nbytes for bucket in policy.buckets(workload)]


def bytes_of(result: Result, strategy: Strategy, sizes: list[float]) -> np.ndarray:
    """Bytes per channel of one exchange of every size: each message on each link of its route."""
    nodes = result.nodes.tolist()
    expected = np.zeros(CLUSTER.n_channels)
    for nbytes in sizes:
        if isinstance(strategy, AllReduce | ShardedUpdate):  # both halves of a sharded update are a ring's
            order = np.arange(N)
            if strategy.rank_order == "topology":
                order = CLUSTER.locality_order(nodes)
            elif not isinstance(strategy.rank_order, str):
                order = np.array(strategy.rank_order)
            hosts = CLUSTER.host_of[result.nodes][order].tolist()
            algorithm = strategy.algorithm if isinstance(strategy, AllReduce) else strategy.all_gather
            schedule, places = reorder(build(algorithm, N, nbytes, hosts), order), nodes
        else:
            assert isinstance(strategy, ParameterServer)
            servers = server_nodes(CLUSTER, nodes, strategy.servers, strategy.placement)
            hosts = CLUSTER.host_of[result.nodes].tolist() if strategy.local_reduction else None
            schedule, places = push_pull(N, strategy.servers, hosts), nodes + servers
        for lane in schedule.lanes:
            for round in lane:
                for repetition in range(round.repeat):
                    size = schedule.message_bytes(nbytes, round, repetition) + round.header
                    routes = CLUSTER.routes(np.array(places)[round.src], np.array(places)[round.dst])
                    for i in range(len(routes)):
                        expected[CLUSTER.link_channel[routes[i]]] += size[i]
    return expected


@each([n for n in SYNCHRONOUS if "horovod" not in n and not n.startswith("auto")], 1)
def test_every_byte_is_accounted_for(name: str) -> None:
    """Every channel has carried the messages of 4 steps' schedules over their routes, and nothing else."""
    strategy = SYNCHRONOUS[name]
    result = jittered(name)
    overlap = strategy.overlap  # type: ignore[attr-defined]
    expected = 4 * bytes_of(result, strategy, bucket_sizes(result.workloads[0], overlap))
    assert expected.max() > 0.0
    np.testing.assert_allclose(result.channel_nbytes, expected, rtol=1e-9, atol=1e-3)
    if isinstance(strategy, AllReduce) and strategy.algorithm == "ring":
        share = 2 * (N - 1) / N * 4 * result.workloads[0].gradient_nbytes
        assert result.channel_nbytes.max() == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("name", [n for n in SYNCHRONOUS if "horovod" in n and "ring" in n and "gloo" not in n])
def test_fused_buffers_carry_every_byte(name: str) -> None:
    """Fusion changes the messages but not the bytes of algorithms whose volume is linear in the buffer.

    That of gloo's is not: its messages have headers.
    """
    strategy = SYNCHRONOUS[name]
    result = jittered(name)
    expected = 4 * bytes_of(result, strategy, [result.workloads[0].gradient_nbytes])
    np.testing.assert_allclose(result.channel_nbytes, expected, rtol=1e-9, atol=1e-3)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_bytes(name: str) -> None:
    """Every update carried S to the servers and back; at the end each worker has at most one on its way."""
    strategy = ASYNCHRONOUS[name]
    assert isinstance(strategy, AsyncParameterServer)
    result = jittered(name)
    nbytes = result.workloads[0].gradient_nbytes
    nodes = server_nodes(CLUSTER, result.nodes.tolist(), strategy.servers, strategy.placement)
    for node in nodes:
        into = CLUSTER.link_channel[CLUSTER.link_dst == node]
        remote = N - 1 if node in result.nodes else N  # a worker on the server's machine pushes locally
        arrived = result.channel_nbytes[into].sum()
        most = (len(result.recorder.updates) + N) * nbytes / strategy.servers
        if strategy.placement == "own":
            assert arrived >= len(result.recorder.updates) * nbytes / strategy.servers * (1 - 1e-9)
        else:  # this machine's worker pulls the other servers' shards over the same link
            most += (len(result.recorder.step_end[0]) + 1) * nbytes
        assert remote * nbytes / strategy.servers <= arrived <= most * (1 + 1e-9)


@each([n for n, s in SYNCHRONOUS.items() if isinstance(s, AllReduce) and "(3" not in n], 2)
def test_one_worker_does_not_communicate(name: str) -> None:
    result = run(experiment(SYNCHRONOUS[name], jitter=False, n=1))
    assert result.n_messages == 0
    assert result.channel_nbytes.sum() == 0.0
    cycle_time = 0.7e-3 if "horovod" in name else 0.0  # the coordinator's tick is waited for even alone
    assert result.step_time == pytest.approx(0.004, abs=cycle_time, rel=1e-9)
    if not cycle_time:
        assert result.efficiency == pytest.approx(1.0, rel=1e-9)
        assert result.throughput == pytest.approx(8 / 0.004, rel=1e-9)


@each(STRATEGIES, 2)
def test_workers_together_are_at_most_their_sum(name: str) -> None:
    result = even(name)
    assert 0.0 < result.throughput <= N * result.single_throughput * (1 + 1e-9)
    assert 0.0 < result.efficiency <= 1.0 + 1e-9
    assert result.speedup == pytest.approx(N * result.efficiency, rel=1e-9)
    assert not result.interrupted
    assert len(result.recorder.updates) == contract.of(STRATEGIES[name]).updates(4, N)


# ---------------------------------------------------------------- ends that are not the planned one


class OneStaysAway:
    """A user's strategy with a mistake: the last worker never enters the collectives."""

    label = "one stays away"

    def updates(self, steps: int, n_workers: int) -> int:
        return steps

    def start(self, context: RunContext) -> None:
        together = Averaging(Communicator(context, Fabric()), models=False)
        for worker in context.workers[:-1]:
            context.loop.env.process(self.work(worker, together))

    def work(self, worker: Worker, together: Averaging) -> Process:
        gradient = yield from worker.gradient()
        yield from together.mean(worker, 0, gradient)


@pytest.mark.parametrize("max_time", [float("inf"), 60.0])
def test_a_deadlock_names_who_waits_for_what(max_time: float) -> None:
    """Also if the run has a limit of time: it is over when nothing can happen, not when the limit comes."""
    with pytest.raises(DeadlockError) as caught:
        run(experiment(OneStaysAway(), jitter=False).with_(max_time=max_time))
    text = str(caught.value)
    assert "\n" not in text
    for rank in range(N - 1):
        assert f"worker {rank} waits for the all-reduce of step 0" in text
    assert f"worker {N - 1}" not in text
    assert "deadlock at 0.00" in text


class Interrupted:
    """Ctrl-C comes when `after` events of simpy and calls of what executes plans are over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.after = 0, 10**9
        self.step, self.execute = simpy.Environment.step, tasks.execute
        self.run_actors = network_lanes.run_actors
        monkeypatch.setattr(simpy.Environment, "step", lambda env: self.counted(self.step, env))
        monkeypatch.setattr(tasks, "execute", lambda *arguments: self.counted(self.execute, *arguments))
        monkeypatch.setattr(network_lanes, "run_actors", lambda *arguments: self.counted(self.run_actors, *arguments))
        monkeypatch.setattr(lanes, "LOG_ROWS", 1)  # Python hears of all that happens

    def counted(self, call: Callable[..., object], *arguments: object) -> object:
        self.count += 1
        if self.count > self.after:
            raise KeyboardInterrupt
        return call(*arguments)


@pytest.mark.parametrize("name", ["ring-ddp", "ring-priority", "server-3-own-horovod", "async-1", "2-sync", "ssp"])
def test_an_interrupt_keeps_what_was_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment(STRATEGIES[name]).with_(steps=6)
    whole = run(chosen)
    interrupted = Interrupted(monkeypatch)
    run(chosen)
    calls = interrupted.count  # of lanes, the first of which only ask for factors
    interrupted.after, interrupted.count = calls - 1 if name in ("async-1", "ssp") else calls * 2 // 3, 0
    result = run(chosen)
    assert result.interrupted
    done = len(result.recorder.updates)
    assert 1 <= done < len(whole.recorder.updates)
    assert result.recorder.updates == whole.recorder.updates[:done]
    assert result.throughput > 0.0
    for seconds in result.recorder.seconds:
        assert sum(seconds.values()) == pytest.approx(result.end_time, rel=1e-9)


@pytest.mark.parametrize("name", few(["ring-ddp", "ring-none", "server-3-own-layer", "async-3-apply", *CENTRAL], 6))
def test_max_time_cuts_the_same_run_short(name: str) -> None:
    """Wherever the limit falls, into computing or into a transfer, what came before is the same run."""
    whole = jittered(name)
    first, last = whole.recorder.updates[0][0], whole.end_time
    for max_time in np.linspace(first, last, 12):
        result = run(experiment(STRATEGIES[name]).with_(max_time=float(max_time)))
        expected = [update for update in whole.recorder.updates if update[0] <= max_time]
        assert result.recorder.updates == expected
        assert result.end_time == max_time
        for seconds in result.recorder.seconds:
            assert sum(seconds.values()) == pytest.approx(max_time, rel=1e-9)


def test_an_interrupt_before_the_first_update_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Interrupted(monkeypatch).after = 0
    for strategy in (AllReduce(), AsyncParameterServer()):
        with pytest.raises(KeyboardInterrupt):
            run(experiment(strategy))
