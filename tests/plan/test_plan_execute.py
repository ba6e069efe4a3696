"""Executing a plan gives the times of the run whose step it is."""

import itertools

import numpy as np
import pytest
from draws import few, pairwise, rows, seeds
from plan_examples import changed, hand_made, random_plan, two_ranks, workload
from unrolled import data_parallel, sharded

import ddlsim
from ddlsim import AllReduce, ConfigError, DdpBuckets, HorovodFusion, NoOverlap, PerLayer, Priority, algorithm_names
from ddlsim.cluster import star
from ddlsim.collectives import build
from ddlsim.network import schedule_time
from ddlsim.plan import ALGORITHMS, KINDS, Draft, FusedQueue, Lane, PriorityQueue, with_parameter_servers
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND, Every
from ddlsim.run.simulate import plan_of_run
from ddlsim.runtime.context import factors
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies import contract
from ddlsim.workload.buckets import one_bucket, per_layer

CASES = [
    # cluster, workers, model, algorithm, overlap
    ("cloud-25g-16x8-v100", 16, "resnet50", "hierarchical", "ddp"),
    ("cloud-25g-16x8-v100", 12, "alexnet", "ring", "layer"),
    ("dgx1-v100", 8, "vgg16", "double_binary_tree", "ddp"),
    ("two-racks-oversubscribed", 6, "resnet50", "ring", "none"),
    ("lab-heterogeneous", 4, "resnet50", "halving_doubling", "layer"),
    ("minicluster", 4, "alexnet", "ring", DdpBuckets("5 MB", "1 MB")),
    ("torus-2d", 9, "alexnet", "parameter_server", NoOverlap()),
    ("three-regions-wan", 5, "alexnet", "ring", PerLayer()),
    ("cloud-25g-16x8-v100", 10, "resnet50", "hierarchical", "priority"),
    ("two-racks-oversubscribed", 6, "alexnet", "ring", Priority("1 MB", in_flight=1)),
    ("dgx1-v100", 8, "resnet50", "ring", "horovod"),
    ("minicluster", 4, "alexnet", "halving_doubling", HorovodFusion("10 MB", "5 ms")),
]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("name", "workers", "model", "algorithm", "overlap"), rows(CASES, 2))
def test_a_plan_takes_as_long_as_the_run(name, workers, model, algorithm, overlap, uneven, accumulation):
    cluster = ddlsim.load_cluster(name)
    workers = min(workers, len(cluster.workers))
    strategy = AllReduce(algorithm, overlap)
    speed = [1.0 + 0.1 * (3 * rank % 5) for rank in range(workers)] if uneven else None
    result = ddlsim.simulate(
        cluster, model, strategy, batch_size=8, workers=workers, steps=3, warmup=0, speed=speed,
        accumulation=accumulation,
    )  # fmt: skip
    plan = contract.of(strategy).plan(result.workloads, 3, accumulation)
    plan.check()
    run = plan.execute(cluster, algorithm)
    simulated = [time for time, _ in result.recorder.updates]
    assert run.step_ends.max(axis=0) == pytest.approx(simulated, rel=1e-12)
    assert run.step_times == pytest.approx(result.step_times, rel=1e-9)
    for rank, ends in enumerate(result.recorder.step_end):  # the run stops when the last has updated
        assert run.step_ends[rank, : len(ends)] == pytest.approx(ends, rel=1e-12)
    bound = max(plan.critical_path(), plan.cut(cluster).seconds)
    assert bound <= run.seconds * (1.0 + 1e-12)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("overlap", few(["none", "layer", "ddp", DdpBuckets("5 MB", "1 MB")], 2, start=1))
@pytest.mark.parametrize(
    ("name", "workers", "model"), [("cloud-25g-16x8-v100", 10, "resnet50"), ("lab-heterogeneous", 4, "alexnet")]
)
def test_a_sharded_plan_takes_as_long_as_the_run(name, workers, model, overlap, accumulation):
    """With jitter: the factors that workers have drawn are put on the seconds of the plan. It has a step more, as a run
    has, in which workers that are early go on beside the late ones."""
    cluster, jitter = ddlsim.load_cluster(name), ddlsim.Lognormal(0.2)
    strategy = ddlsim.ShardedUpdate("recursive_halving" if workers == 4 else "ring", overlap=overlap)
    result = ddlsim.simulate(
        cluster, model, strategy, batch_size=8, workers=workers, steps=3, warmup=0, accumulation=accumulation,
        jitter=jitter, seed=3,
    )  # fmt: skip
    plan = contract.of(strategy).plan(result.workloads, 4, accumulation)
    plan.check()
    drawn = [list(itertools.islice(factors(jitter, 3, rank), 4 * accumulation)) for rank in range(workers)]
    plan = with_factors(plan, np.array(drawn).reshape(workers, 4, accumulation))
    run = plan.execute(cluster, {"reduce_scatter": strategy.reduce_scatter})
    assert run.step_ends.max(axis=0)[:3] == pytest.approx([time for time, _ in result.recorder.updates], rel=1e-12)
    for rank, ends in enumerate(result.recorder.step_end):
        assert run.step_ends[rank, : len(ends)] == pytest.approx(ends, rel=1e-12)
    assert max(plan.critical_path(), plan.cut(cluster).seconds) <= run.seconds * (1.0 + 1e-12)


def test_sharded_updates_overlap():
    """What travels is longer than the passes: without overlap they add up, with it most of the passes is hidden."""
    cluster = ddlsim.load_cluster(star(8, bandwidth=1e9, latency=0.0))
    step = {}
    for overlap, buckets in (("none", one_bucket), ("layer", per_layer)):
        plan = sharded(workload("vgg16", 32), 8, buckets, steps=4, overlap=overlap == "layer")
        plan.check()
        step[overlap] = plan.execute(cluster).step_times[-1]
    one = workload("vgg16", 32)
    wire = 2 * 7 / 8 * one.gradient_nbytes / 1e9
    assert step["none"] == pytest.approx(wire + one.forward_time + one.backward_time + one.optimizer / 8, rel=1e-9)
    assert wire < step["layer"] < step["none"] - 0.8 * (one.forward_time + one.backward_time)


def test_the_order_of_ranks_is_that_of_the_strategy():
    cluster = ddlsim.load_cluster("two-racks-oversubscribed")
    n = len(cluster.workers)
    order = [rank for pair in zip(range(n // 2), range(n // 2, n), strict=True) for rank in pair]
    seconds = {}
    for name, rank_order in (("given", "given"), ("other", order), ("topology", "topology")):
        result = ddlsim.simulate(cluster, "alexnet", AllReduce("ring", "none", rank_order), steps=1, warmup=0)
        seconds[name] = result.plan.execute(cluster, rank_order=rank_order).seconds
        assert seconds[name] == pytest.approx(result.end_time, rel=1e-12)
    assert seconds["other"] > 1.1 * seconds["topology"]
    with pytest.raises(ConfigError, match=r"must contain each rank from 0 to 31 once"):
        result.plan.execute(cluster, rank_order=[0, 0])
    with pytest.raises(ConfigError, match="rank_order = 'x': must be 'given', 'topology' or a list"):
        result.plan.execute(cluster, rank_order="x")


@pytest.mark.parametrize("seed", seeds(6, 15))
def test_columns_keep_the_rules_of_the_table(seed):
    """What was asked: needs and lanes are over when a task starts, work takes its time, a collective waits for all."""
    plan = random_plan(np.random.default_rng(seed), n_ranks=5, n_tasks=60)
    run = plan.execute("star-1024-10g")
    start, end = run.start, run.end
    for row in range(len(plan)):
        before = [*plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]].tolist()]
        before += [int(plan.previous[row])] if plan.previous[row] >= 0 else []
        assert start[row] == max((end[need] for need in before), default=0.0)
    work = plan.rows(*range(SEND))
    assert (end[work] == start[work] + plan.seconds[work]).all()
    for key in np.unique(plan.key[plan.rows(ALL_REDUCE)]):
        members = np.flatnonzero((plan.key == key) & (plan.kind == ALL_REDUCE))
        assert end[members].min() > start[members].max()
    for key in np.unique(plan.key[plan.rows(SEND)]):
        (send,), (receive,) = (np.flatnonzero((plan.key == key) & (plan.kind == kind)) for kind in (SEND, RECEIVE))
        assert end[receive] == max(end[send], start[receive])


def test_by_hand():
    """1 MB at 1 GB/s: an all-reduce of two takes 1 ms without latency, in its step of 3 s + 0.25 s."""
    cluster = star(2, bandwidth=1e9, latency=0.0)
    run = hand_made().execute(cluster)
    assert run.end.tolist() == pytest.approx([1.0, 3.0, 3.5, 1.0, 3.0, 3.5, 3.001, 3.001, 3.75, 3.75])
    assert run.start.tolist() == pytest.approx([0.0, 1.0, 3.0, 0.0, 1.0, 3.0, 3.0, 3.0, 3.5, 3.5])
    assert run.seconds == 3.75
    assert run.step_ends.tolist() == [[3.75], [3.75]]
    assert repr(run) == "<Execution of <Plan: 10 tasks on 4 lanes of 2 ranks, 1 steps>: 3.75 s>"


def test_the_most_urgent_goes_first_and_fused_ones_together():
    """Three all-reduces of 1, 2 and 3 s, ready at 0, 0.5 and 0.5 s: by urgency, in cycles of 2 s, and fused."""
    cluster = ddlsim.load_cluster(star(2, bandwidth=1e9, latency=0.0))
    draft = Draft()
    for rank in (0, 1):
        draft.work(rank, 0.5)
    for nbytes, needs in ((1e9, ()), (2e9, ([0], [1])), (3e9, ([0], [1]))):
        draft.all_reduce([0, 1], nbytes, needs)
    plan = draft.plan()
    lanes = tuple(Lane(lane.rank, lane.name, 0 if lane.name == "stream" else -1) for lane in plan.lanes)

    def ends(queue, keys=(0, 1, 2)):
        key = np.where(plan.key >= 0, np.array(keys)[plan.key], -1)
        run = changed(plan, lanes=lanes, queues=(queue,), key=key).execute(cluster)
        assert (run.end[2::2] == run.end[3::2]).all()
        return run.end[2::2].tolist()

    assert ends(PriorityQueue(1)) == pytest.approx([1.0, 3.0, 6.0])
    assert ends(PriorityQueue(1), keys=(2, 1, 0)) == pytest.approx([1.0, 6.0, 4.0])
    assert ends(PriorityQueue(2)) == pytest.approx([1.5, 4.5, 6.0])  # two share the links
    assert ends(FusedQueue("1 GB", "2 s")) == pytest.approx([1.0, 4.0, 7.0])
    assert ends(FusedQueue("5 GB", "2 s")) == pytest.approx([1.0, 7.0, 7.0])


def test_groups_of_their_own_run_beside_each_other():
    """Two pairs on four machines do not disturb each other; each pair is done when alone."""
    cluster = ddlsim.load_cluster(star(4, bandwidth=1e9, latency=0.0))
    draft = Draft()
    draft.all_reduce([0, 2], 1e9)
    draft.all_reduce([3, 1], 2e9)
    run = draft.plan().execute(cluster)
    assert run.end.tolist() == pytest.approx([1.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS[8:] if kind != "push_pull"])
def test_collectives_take_what_they_take_alone(kind):
    """Of every kind, by the default algorithm and others, from a root that is not the first on the wire."""
    cluster = ddlsim.load_cluster("two-racks-oversubscribed")
    group = [3, 4, 1, 0, 2, 5]
    for algorithm in (None, *algorithm_names(kind)[:3]):
        name = ALGORITHMS[kind] if algorithm is None else algorithm
        if name in ("recursive_doubling", "recursive_halving", "nccl"):  # not for six, or not for a schedule alone
            continue
        draft = Draft()
        draft.collective(kind, group, 3e6)
        run = draft.plan().execute(cluster, {} if algorithm is None else {kind: algorithm}, rank_order="given")
        schedule = build(name, 6, 3e6, cluster.host_of[cluster.workers[group]].tolist(), kind)
        assert run.seconds == pytest.approx(schedule_time(cluster, schedule, cluster.workers[group].tolist(), 3e6))


def test_the_root_of_a_broadcast_is_the_first_of_its_group():
    """Whatever the order of the ring: the root may go on first, and only after it others can end."""
    cluster = ddlsim.load_cluster("two-racks-oversubscribed")
    for root in range(4):
        draft = Draft()
        ready = draft.work(root, 1.0)
        group = [root, *(rank for rank in range(4) if rank != root)]
        draft.collective("broadcast", group, 1e6, [[ready], [], [], []])
        draft.collective("reduce", group, 1e6, [[ready], [], [], []], lane="other")
        run = draft.plan().execute(cluster)
        assert run.end[1:5].min() > 1.0
        assert run.end[5] == 1.0 > run.end[6:].max()  # others have given their share before the root enters


def test_algorithms_by_kind():
    plan = two_ranks()
    assert plan.execute("minicluster", {}).seconds == plan.execute("minicluster", "ring").seconds
    with pytest.raises(ConfigError, match="did you mean 'all_gather'"):
        plan.execute("minicluster", {"al_gather": "ring"})
    with pytest.raises(ConfigError, match=r"algorithm\['push_pull'\] = 'ring': must be 'direct', 'tree' or 'star'"):
        plan.execute("minicluster", {"push_pull": "ring"})


@pytest.mark.parametrize(
    ("overlap", "where", "how"),
    pairwise(
        ["none", "layer", "ddp", "horovod", "priority"],
        [("minicluster", 3, 1), ("cloud-25g-16x8-v100", 8, 3)],
        [(False, "direct"), (True, "tree"), ("star", "star")],
    ),
)
def test_parameter_servers_as_a_plan(overlap, where, how):
    (name, workers, servers), (reduction, algorithm) = where, how
    cluster = ddlsim.load_cluster(name)
    strategy = ddlsim.ParameterServer(servers, "own", overlap, reduction)
    result = ddlsim.simulate(cluster, "alexnet", strategy, workers=workers, steps=3, warmup=0, batch_size=8)
    plan = contract.of(strategy).plan(result.workloads, 3, 1)
    plan.check()
    nodes = cluster.workers[:workers].tolist()
    run = plan.execute(cluster, {"push_pull": algorithm}, nodes=nodes + server_nodes(cluster, nodes, servers, "own"))
    simulated = [time for time, _ in result.recorder.updates]
    assert np.nanmax(run.step_ends, axis=0) == pytest.approx(simulated, rel=1e-12)


def test_servers_have_places_of_their_own():
    plan = with_parameter_servers(two_ranks())
    with pytest.raises(ConfigError, match="the plan has servers, so nodes must list the node of every rank"):
        plan.execute("minicluster")
    with pytest.raises(ConfigError, match="and no collectives other than all-reduces over all ranks"):
        with_parameter_servers(plan)


def test_ranks_can_be_anywhere():
    cluster = ddlsim.load_cluster("two-racks-oversubscribed")
    near, far = cluster.workers[:2].tolist(), cluster.workers[[0, -1]].tolist()
    draft = Draft()
    draft.message(0, 1, 1e9)
    times = [draft.plan().execute(cluster, nodes=nodes).seconds for nodes in (near, far)]
    assert times[0] == pytest.approx(draft.plan().execute(cluster).seconds)
    assert times[1] > times[0]


def test_a_plan_that_does_not_fit():
    with pytest.raises(ConfigError, match="the plan has 2000 ranks, but cluster 'star-1024-10g' has 1024 devices"):
        data_parallel(workload(), 2000, per_layer).execute("star-1024-10g")
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        two_ranks().execute("minicluster", "rng")


def test_a_circle_is_named():
    draft = Draft()
    draft.work(0, 1.0, "first", lane="x", needs=[1])
    draft.work(0, 1.0, "second", lane="y", needs=[0])
    with pytest.raises(ConfigError, match=r"row 0 .*first.* waits for row 1"):
        draft.plan().execute("minicluster")


def test_workloads_must_fit_each_other():
    with pytest.raises(ConfigError, match="the gradients of rank 1"):
        data_parallel([workload(), workload("alexnet")])
    with pytest.raises(ConfigError, match="n_ranks = None"):
        data_parallel(workload())
    with pytest.raises(ConfigError, match="steps = 0"):
        data_parallel(workload(), 2, steps=0)
    with pytest.raises(ConfigError, match=r"the buckets contain \d+ of \d+ bytes"):
        data_parallel(workload(), 2, lambda w: per_layer(w)[1:])
    with pytest.raises(
        ConfigError, match=r"layer_by_layer: bucket \d+ covers the layers \d+ to \d+; use single-layer buckets"
    ):
        data_parallel(workload(), 2, queue=PriorityQueue(), layer_by_layer=True)
    with pytest.raises(ConfigError, match="layer_by_layer needs a queue"):
        data_parallel(workload(), 2, per_layer, layer_by_layer=True)
    with pytest.raises(ConfigError, match="list buckets in the order in which they become"):
        data_parallel(workload(), 2, lambda w: per_layer(w)[::-1])


# ---------------------------------------------------------------- the plan of a result


def test_a_result_shows_its_step():
    result = ddlsim.simulate("minicluster", "alexnet", AllReduce(overlap="layer"), steps=1, warmup=0)
    plan = result.plan
    plan.check()
    assert plan.n_steps == 1
    assert plan.n_ranks == result.n_workers
    assert plan.execute(result.cluster).seconds == pytest.approx(result.end_time, rel=1e-12)
    assert plan.critical_path() == pytest.approx(max(w.step_time for w in result.workloads), rel=1e-12)


def test_jitter_is_a_factor_of_each_micro_batch():
    """With the factors that the workers have drawn, the plan is the run with jitter."""
    cluster, jitter = ddlsim.load_cluster("minicluster"), ddlsim.Lognormal(0.3)
    for overlap in ("ddp", "priority"):
        strategy = AllReduce(overlap=overlap)
        result = ddlsim.simulate(
            cluster, "alexnet", strategy, workers=4, steps=3, warmup=0, accumulation=2, jitter=jitter, seed=7
        )
        drawn = [list(itertools.islice(factors(jitter, 7, rank), 6)) for rank in range(4)]
        plan = contract.of(strategy).plan(result.workloads, 3, 2)
        times = with_factors(plan, np.array(drawn).reshape(4, 3, 2)).execute(cluster).step_ends.max(axis=0)
        assert times == pytest.approx([time for time, _ in result.recorder.updates], rel=1e-12)
        assert plan.execute(cluster).seconds != pytest.approx(times[-1], rel=1e-3)


def with_factors(plan, drawn):
    """Return the plan with factors (n_ranks, n_steps, micro-batches of a rank in a step) on its seconds."""
    micro = np.where(plan.batch >= 0, plan.batch % drawn.shape[2], drawn.shape[2] - 1)
    return changed(plan, seconds=plan.seconds * drawn[plan.rank, plan.step, micro])


class Later(AllReduce):
    """Starts in a way of its own, so that its parent's plan is not its."""

    def start(self, context):
        super().start(context)


class Renamed(AllReduce):
    label = "mine"


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ddlsim.ParameterServer(placement="colocated", work=ddlsim.ServerWork()), "has no static task graph with work"),
        (ddlsim.AsyncParameterServer(placement="colocated"), "asynchronous parameter server .* has no step program"),
        (Later(), "has no step program, because its processes decide during the run what to do next; define program"),
    ],
)
def test_strategies_without_a_step_program(strategy, text):
    """Bounds and the planner need one; results have a plan all the same, of what was executed."""
    result = ddlsim.simulate("minicluster", "alexnet", strategy, steps=1, warmup=0)
    with pytest.raises(ConfigError, match=text):
        contract.of(strategy).plan(result.workloads, 1, 1)
    assert len(result.plan) > 0


def test_a_subclass_that_runs_like_its_parent_has_its_plan():
    result = ddlsim.simulate("minicluster", "alexnet", Renamed(), steps=1, warmup=0)
    assert len(result.plan) > 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_local_steps_take_as_long_as_simulated(accumulation):
    """Five steps, averages after the second and the fourth, of unequal workers."""
    strategy = ddlsim.LocalSGD(2)
    result = ddlsim.simulate(
        "minicluster", "alexnet", strategy, steps=5, warmup=0, workers=4, speed=[1.0, 0.5, 2.0, 1.0],
        accumulation=accumulation,
    )  # fmt: skip
    run = contract.of(strategy).plan(result.workloads, 5, accumulation).execute(result.cluster)
    assert run.step_ends.max(axis=0)[4] == pytest.approx(result.recorder.updates[4][0], rel=1e-12)
    assert run.seconds == pytest.approx(result.end_time, rel=1e-12)


@pytest.mark.parametrize("strategy", [
    ddlsim.LocalSGD(1, algorithm="ring"), ddlsim.LocalSGD(3, algorithm="ring"), ddlsim.ParameterServer(2, "colocated"),
    ddlsim.ShardedUpdate(), ddlsim.FSDP(stage=2),
])  # fmt: skip
def test_step_times_of_an_execution_are_those_of_the_run(strategy):
    """Steps of local SGD end with their averages; that servers have no weights to wait for is no matter."""
    batch = 64 if isinstance(strategy, ddlsim.FSDP) else 16
    result = ddlsim.simulate("minicluster", "alexnet", strategy, batch, workers=4, steps=6, warmup=0)
    nodes = contract.of(strategy).plan_nodes(result.cluster, result.nodes.tolist())
    run = plan_of_run(result.experiment, 7).execute("minicluster", "ring", nodes=nodes)
    assert run.step_times[:6] == pytest.approx(result.step_times, rel=1e-9)


@pytest.mark.parametrize("every", [
    Every(1), Every(3), Every(4, 1), Every(2, unless=6), Every(3, 5, 4, 22), Every(6, 2, unless=4), Every(2, unless=2),
])  # fmt: skip
def test_steps_of_a_cycle_are_counted(every):
    steps = [step for step in range(1, 100) if every.includes(step)]
    assert [every.count(n) for n in range(100)] == [sum(step <= n for step in steps) for n in range(100)]
    assert [every.nth(1 + i) for i in range(len(steps))] == steps
