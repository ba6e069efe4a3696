"""The compiled execution of plans is a plain loop's, to the last bit."""

import dataclasses
import gc
import importlib
import weakref

import numpy as np
import pytest
from draws import seeds
from plan_examples import random_plan, workload
from reference_runner import reference_run
from unrolled import data_parallel

import ddlsim
from ddlsim.cluster import star
from ddlsim.collectives import build
from ddlsim.network import Network
from ddlsim.plan import KINDS, Draft, FusedQueue, Lane, PriorityQueue, read_goal
from ddlsim.plan.execute import run_to_end
from ddlsim.plan.schedules import MemberSchedules
from ddlsim.workload.buckets import ddp_buckets, per_layer

SWITCH = ddlsim.load_cluster(star(6, bandwidth="10 Gbit/s", latency="5 us"))
execution = importlib.import_module("ddlsim.plan.execute")


def same(plan, monkeypatch, cluster=SWITCH, algorithm="ring", **more):
    compiled = plan.execute(cluster, algorithm, **more)
    monkeypatch.setattr(execution, "run_to_end", reference_run)
    expected = plan.execute(cluster, algorithm, **more)
    assert expected.seconds > 0.0
    assert compiled.start.tolist() == expected.start.tolist()
    assert compiled.end.tolist() == expected.end.tolist()


def jittered(plan, seed):
    """Return a plan whose seconds vary, many of them by one of four factors, so that some tasks end together."""
    rng = np.random.default_rng(seed)
    factor = np.where(rng.random(len(plan)) < 0.5, rng.choice([0.5, 1.0, 1.5, 2.0], len(plan)), rng.random(len(plan)))
    return dataclasses.replace(plan, seconds=plan.seconds * factor)


@pytest.mark.parametrize("seed", seeds(3, 20))
@pytest.mark.parametrize("seconds", [True, False])
def test_any_tasks_messages_and_collectives(seed, seconds, monkeypatch):
    plan = random_plan(np.random.default_rng(seed), n_ranks=6, n_tasks=120, seconds=seconds)
    same(jittered(plan, seed), monkeypatch)
    plan = random_plan(np.random.default_rng(seed), n_ranks=6, n_tasks=120, seconds=seconds, kinds=KINDS[8:])
    monkeypatch.undo()
    same(jittered(plan, seed), monkeypatch, nodes=SWITCH.workers.tolist())


@pytest.mark.parametrize("cluster", ["cloud-25g-16x8-v100", "lab-heterogeneous", "three-regions-wan"])
@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "halving_doubling"])
def test_buckets_in_order(cluster, algorithm, monkeypatch):
    plan = data_parallel(workload(), 4, ddp_buckets, steps=4, accumulation=2)
    same(plan, monkeypatch, cluster, algorithm)
    monkeypatch.undo()
    same(jittered(plan, 1), monkeypatch, cluster, algorithm)


@pytest.mark.parametrize(
    ("queue", "more"),
    [(PriorityQueue(1), {}), (PriorityQueue(3), {"layer_by_layer": True}), (FusedQueue("2 MB", "3 ms"), {}),
     (FusedQueue(), {})],
)  # fmt: skip
@pytest.mark.parametrize("model", ["resnet50", "alexnet"])
def test_buckets_of_queues(queue, more, model, monkeypatch):
    plan = jittered(data_parallel(workload(model), 5, per_layer, steps=3, queue=queue, **more), 2)
    same(plan, monkeypatch, "two-racks-oversubscribed")


@pytest.mark.parametrize("seed", range(8))
def test_queues_of_groups_beside_each_other(seed, monkeypatch):
    """Two halves with a queue each, whose collectives become ready in any order, share the links with a third group."""
    rng, draft = np.random.default_rng(seed), Draft()
    work = {rank: [] for rank in range(6)}
    for _ in range(40):
        rank = int(rng.integers(6))
        work[rank].append(draft.work(rank, float(rng.exponential())))
        group = [[0, 1, 2], [3, 4, 5], [0, 3, 5]][rng.integers(3)]
        lane = "stream" if len({rank < 3 for rank in group}) == 1 else "other"
        needs = [work[rank][-1:] for rank in group]
        draft.all_reduce(group, float(rng.integers(1, 10**9)), needs, lane=lane)
    plan = draft.plan()
    place = {("stream", True): 0, ("stream", False): 1}
    lanes = tuple(Lane(rank, name, place.get((name, rank < 3), -1)) for rank, name, _ in plan.lanes)
    queues = (PriorityQueue(2), FusedQueue("1 GB", "0.1 s"))
    same(dataclasses.replace(plan, lanes=lanes, queues=queues), monkeypatch)


def test_the_network_has_carried_the_same():
    """Busy intervals are logged, for which the kernel asks for longer arrays; channels and messages are the same."""
    cluster = ddlsim.load_cluster("cloud-25g-16x8-v100")
    plan = jittered(data_parallel(workload(), 24, per_layer, steps=2), 3)
    nodes = cluster.workers[:24]
    schedule = build("hierarchical", 24, 1e6, cluster.host_of[nodes].tolist())
    networks = []
    for run in (run_to_end, reference_run):
        networks.append(Network(cluster, record=True))
        run(plan, networks[-1], nodes, lambda kind, group, nbytes: schedule)
    compiled, expected = networks
    assert compiled.n_messages == expected.n_messages > 0
    assert compiled.now == expected.now
    assert compiled.n_live == expected.n_live == 0
    assert compiled.channel_busy.tolist() == expected.channel_busy.tolist()
    mine, its = compiled.busy_intervals(), expected.busy_intervals()
    assert len(mine.start) > 4096 + 2 * compiled.n_channels
    for column in ("channel", "start", "end"):
        assert getattr(mine, column).tolist() == getattr(its, column).tolist()


def test_many_messages_at_once(tmp_path):
    """300 streams of a rank send at the same time: the network makes room for all that are under way."""
    n = 300
    text = "num_ranks 2\nrank 0 {\n" + "".join(f"s{i}: send 1000b to 1 tag {i} cpu {i}\n" for i in range(n)) + "}\n"
    text += "rank 1 {\n" + "".join(f"recv 1000b from 0 tag {i} cpu {i}\n" for i in range(n)) + "}"
    path = tmp_path / "many.goal"
    path.write_text(text)
    run = read_goal(path).execute(ddlsim.load_cluster(star(2, bandwidth=1e9, latency=1e-6)))
    assert run.seconds == pytest.approx(n * 1000 / 1e9 + 2e-6, rel=1e-9)


def test_few_large_schedules_outlive_their_runs() -> None:
    """Every cluster has schedules of its own: 50 runs of 512 workers with NCCL kept 200 MB."""
    kept = []
    for _ in range(20):
        cluster = ddlsim.Cluster.from_graph(star(65, bandwidth="10 Gbit/s", latency="1 us"))
        members = MemberSchedules(np.arange(65), cluster, cluster.workers.tolist(), [])
        kept.append(weakref.ref(members.of("all_reduce", "ring", 1e6)))
        again = MemberSchedules(np.arange(65), cluster, cluster.workers.tolist(), [])
        assert again.of("all_reduce", "ring", 1e6) is kept[-1]()
        del members, again
    gc.collect()
    assert sum(each() is not None for each in kept) <= 16
