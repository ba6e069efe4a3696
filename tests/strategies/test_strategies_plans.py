"""Every run has a plan: what it executes, undisturbed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from bundled_strategies import BUNDLED, N_WORKERS, VARIANTS
from draws import rows

import ddlsim
from ddlsim import ConfigError
from ddlsim import compression as cp
from ddlsim.cluster import load_cluster, star
from ddlsim.plan import read_chakra, read_goal
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.transforms import as_messages
from ddlsim.run.simulate import plan_of_run
from ddlsim.strategies import contract

NETWORK = load_cluster(star(8, bandwidth="100 Mbit/s", latency="20 us"))
COST = cp.CodecCost(encode=1e-9, decode=1e-9)
SPARSE, KEPT = cp.Compression(cp.ErrorFeedback(cp.TopK(0.05)), cost=COST), cp.Compression(cp.TopK(0.05), cost=COST)
RING = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring"}
STRATEGIES = {**BUNDLED, **VARIANTS}
#: runs that are refused with compression
DENSE = ("QsparseLocalSGD", "SPARTA", "EmbeddingParallel", "ExpertParallel", "ParameterServer working")
CASES = [(name, False) for name in STRATEGIES] + [(name, True) for name in STRATEGIES if name not in DENSE]
#: strategies of which `check` proves that gradients are summed
PROVED = (
    "AllReduce",
    "ShardedUpdate",
    "ParameterServer",
    "FSDP",
    "Parallel",
    "Hybrid",
    "EmbeddingParallel",
    "ExpertParallel",
)


def experiment(name: str, *, compressed: bool = False, **more: Any) -> ddlsim.Experiment:
    one = STRATEGIES[name]
    fields: dict[str, Any] = {"compute": ddlsim.Affine(1e-3, 2.5e-4)}
    if one.needs_data:
        fields["training"] = ddlsim.Training("digits", rate=0.02, updates=4)
    if compressed:
        fields["compression"] = KEPT if one.differences else SPARSE
    return ddlsim.Experiment(NETWORK, one.model, one.strategy, one.batch_size, N_WORKERS, **fields, **more)


def nodes_of(experiment: ddlsim.Experiment) -> list[int]:
    """Return the node of each rank: workers, then servers."""
    workers = NETWORK.workers[:N_WORKERS].tolist()
    return list(contract.of(experiment.strategy).plan_nodes(NETWORK, workers))


@pytest.mark.parametrize(("name", "compressed"), rows(CASES, 44))
def test_every_plan_prints_is_proved_and_is_read_back(name, compressed, tmp_path):
    made = experiment(name, compressed=compressed)
    plan = plan_of_run(made)
    assert all(note in str(plan) for note in plan.notes)
    check_exchanges(plan)
    plan.execute(NETWORK, nodes=nodes_of(made))  # everything can run
    if name.split()[0] in PROVED and not compressed:
        plan.check()
    plan.to_chakra(tmp_path / "step.et")
    assert read_chakra(tmp_path / "step.et") == as_messages(plan)
    if not plan.queues:
        plan.to_goal(tmp_path / "step.goal", RING)
        times = [
            each.execute(NETWORK, {**RING, "push_pull": "direct"}, nodes=nodes_of(made), rank_order="given").seconds
            for each in (plan, read_goal(tmp_path / "step.goal"))
        ]
        assert times[0] == pytest.approx(times[1], abs=1e-6)


#: strategies whose first cycle of steps ends with messages in flight, or whose algorithms are no rings
NOT_COMPARED = (
    "DaSGD",
    "OverlapLocalSGD",
    "FedAvg",
    "ElasticAveraging",
    "GossipSGD",
    "KSync",
    "KBatchSync",
    "FedBuff",
    "SoftSync",
    "KAsync",
    "BackupWorkers",
    "AsyncParameterServer accumulating",
    "AllReduce nccl",
    "ParameterServer working",
)
COMPARED = [
    (name, compressed)
    for name, compressed in CASES
    if STRATEGIES[name].batch_size == 8
    and not STRATEGIES[name].needs_data
    and not {name, name.split()[0]} & set(NOT_COMPARED)
]


@pytest.mark.parametrize(("name", "compressed"), rows(COMPARED, 16))
def test_a_plan_takes_as_long_as_the_run(name, compressed):
    """One cycle of steps, or of each worker, on an idle network."""
    made = experiment(name, compressed=compressed)
    steps = contract.of(made.strategy).cycle_length
    if contract.of(made.strategy).is_asynchronous:
        steps = 6
    result = ddlsim.simulate(made.with_(steps=steps, warmup=0))
    plan = result.plan
    seconds = plan.execute(NETWORK, {**RING, "push_pull": "direct"}, nodes=result.plan_nodes).seconds
    first = max(ends[0] for ends in result.recorder.step_end) if steps == 6 else result.end_time
    # 1e-3: the server's decoding, which takes its turns in the run
    assert seconds == pytest.approx(first, rel=1e-3 if steps == 6 else 1e-9)


def test_the_plan_is_that_of_the_undisturbed_run():
    plain = plan_of_run(experiment("AllReduce"))
    disturbed = experiment(
        "AllReduce",
        jitter=ddlsim.Lognormal(0.2),
        slowdowns=[ddlsim.Slowdown(1, 0.0, 1.0, 2.0)],
        faults=[ddlsim.Stop(1, "1 ms", "2 ms")],
        failures=ddlsim.Failures("1 s", per="host"),
        checkpoints=ddlsim.Checkpoints("100 ms", stall="4 ms"),
        elastic=ddlsim.Elastic(2),
        max_time="1 s",
    )
    assert plan_of_run(disturbed) == plain


def test_sums_of_hierarchies_are_dense_inside_machines():
    """HiTopKComm: reduce-scatter and all-gather inside each machine, all-gathers of shards between them."""
    cluster = star(2, bandwidth="1 Gbit/s", latency="20 us", host=ddlsim.cluster.MultiGpu(2))
    result = ddlsim.simulate(
        cluster,
        "digits-cnn",
        ddlsim.AllReduce("hierarchical", "none"),
        8,
        compression=cp.TopK(0.05),
        steps=1,
        warmup=0,
        compute=ddlsim.Affine(1e-3, 2.5e-4),
    )
    plan = result.plan
    of_rank = plan.collectives[plan.rank[plan.collectives] == 1]
    assert [plan.task(row).partition(": ")[2].partition(",")[0] for row in of_rank.tolist()] == [
        "reduce-scatter",
        "all-gather",
        "all-gather",
    ]
    assert [plan.groups[group] for group in plan.peer[of_rank]] == [(0, 1), (1, 3), (0, 1)]
    assert all(plan.rank[plan.needs[plan.need_offsets[row]]] == 1 for row in of_rank.tolist())


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("AllReduce", N_WORKERS),  # an all-gather
        ("LocalSGD", N_WORKERS),
        ("AdaComm", N_WORKERS),
        ("FSDP", 2.0),
        ("ParameterServer", 8 / 3),  # messages of 4 workers there and back, instead of a push-pull of 6 ranks
        ("AsyncParameterServer", 1.0),
        ("KSync", 1.0),
        ("DPSGD", 1.0),
        ("ADPSGD", 1.0),
    ],
)
def test_sizes_that_depend_on_values_are_dense(name, times):
    dense = experiment(name).with_(training=ddlsim.Training("digits", rate=0.02, updates=4))
    plan = plan_of_run(dense.with_(compression=cp.Threshold(0.1)))
    assert "the message sizes of Threshold depend on values; here they are those of dense messages" in plan.notes
    assert plan.nbytes.sum() == pytest.approx(times * plan_of_run(dense).nbytes.sum())


def test_processes_can_tell_their_plan():
    class Silent(ddlsim.AllReduce):
        def start(self, context):
            context.loop.env.process(self.work(context))

        def work(self, context):
            for worker in context.workers:
                yield from worker.gradient()
            context.stop.updated(8)

    @dataclasses.dataclass(frozen=True)
    class Telling(Silent):
        def start(self, context):
            super().start(context)
            program = ddlsim.AllReduce().program(context.workloads)
            context.plan = lambda steps: program.unroll(1 if steps is None else steps)

    run = {"batch_size": 8, "workers": 2, "steps": 1, "warmup": 0}
    with pytest.raises(
        ConfigError, match="has no step program, because its processes decide during the run what to do next; define"
    ):
        _ = ddlsim.simulate("office-1gbe", "lenet5", Silent(), **run).plan
    ddlsim.simulate("office-1gbe", "lenet5", Telling(), **run).plan.check()


def test_cycles_of_workers_with_unequal_devices():
    made = experiment("AsyncParameterServer", speed=(1.0, 0.5, 1.0, 2.0))
    plan = plan_of_run(made, 2)
    ends = plan.execute(NETWORK, nodes=nodes_of(made)).end
    last = [ends[(plan.rank == rank) & (plan.step == 1)].max() for rank in range(N_WORKERS)]
    assert np.argmax(last) == 1
    assert np.argmin(last) == 3
