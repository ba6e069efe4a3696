"""The step of a recommendation model as a plan: proved, its bytes those of the formulas, its time the longest path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from unrolled import embeddings

from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND
from ddlsim.workload.buckets import one_bucket, per_layer
from ddlsim.workload.compute import Roofline, Workload, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model
from ddlsim.workload.table_placement import Placement, Space, TableWork, place, tables_of, work_of

MODEL = """
title = "eight tables of 8 numbers"
sources = ["made for this test"]
trainable = false
input = [4]
layers = [
  { type = "concat", branches = [
    [{ type = "dense", units = 16 }, { type = "dense", units = 8 }],
    [{ type = "embedding_bag", dim = 8, pooling = 3, tables = [1000, 700, 600, 500, 400, 300, 200, 100] }],
  ] },
  { type = "interaction", dim = 8 },
  { type = "dense", units = 32 },
  { type = "dense", units = 1 },
]
"""
BATCH, RATE, BANDWIDTH = 1000, 5e9, 1e9


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    path = tmp_path / "recommender.toml"
    path.write_text(MODEL)
    return make_workload(load_model(path), load_device("v100"), BATCH, compute=Roofline(0.01))


def works(workload: Workload, n: int, sharding: str = "table-wise", without: frozenset[int] = frozenset()):
    placement = place(tables_of(workload.model), n, sharding, Space(1e12), without=without)
    assert isinstance(placement, Placement)
    return [work_of(placement, rank, BATCH, Space(1e12), RATE, True) for rank in range(n)]


def sent(plan: Plan, name: str) -> np.ndarray:
    """Return the bytes of each rank's messages of a name."""
    rows = plan.rows(SEND)
    rows = rows[plan.name[rows] == plan.names.index(name)]
    return np.bincount(plan.rank[rows], plan.nbytes[rows], minlength=plan.n_ranks)


CASES = {
    "exchanged": {}, "prefetched": {"indices": "prefetched"}, "local": {"indices": "local"},
    "by layer": {"buckets": per_layer}, "together": {"buckets": one_bucket}, "copies": {"replicated": 800.0},
    "row-wise": {"row_wise": 64}, "one rank": {"bottom_rank": 0},
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_plans_are_proved(workload: Workload, case: str, n: int):
    sharding = "row-wise" if case == "row-wise" else "table-wise"
    plan = embeddings([workload] * n, works(workload, n, sharding), steps=3, **CASES[case])
    plan.check()
    assert plan.n_steps == 3


def test_a_plan_that_forgets_a_sum_is_refused(workload: Workload):
    plan = embeddings([workload] * 3, works(workload, 3))
    needs = plan.needs.copy()
    needs[-1] = 0  # the last update no longer waits for its gradients
    with pytest.raises(ConfigError, match="may start before the end of"):
        dataclasses.replace(plan, needs=needs).check()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_bytes_are_those_of_the_formulas(workload: Workload, precision: str):
    """b T k 8 (N - 1) / N of indices, and b T D z (N - 1) / N of vectors each way, where all ranks hold as many."""
    n, z = 4, 4 if precision == "fp32" else 2
    workload = dataclasses.replace(workload, precision=precision)
    plan = embeddings([workload] * n, works(workload, n))
    np.testing.assert_allclose(sent(plan, "indices"), BATCH * 8 * 3 * 8 * (n - 1) / n)
    for name in ("vectors", "gradients"):
        np.testing.assert_allclose(sent(plan, name), BATCH * 8 * 8 * z * (n - 1) / n)


def test_uneven_holders_send_what_they_hold(workload: Workload):
    """Eight tables on three ranks, 3 + 3 + 2: a rank sends 8 numbers of each of its tables for 2 x 1000 samples."""
    held = works(workload, 3)
    plan = embeddings([workload] * 3, held)
    columns = np.array([work.columns for work in held])
    assert sorted(columns) == [16, 24, 24]
    np.testing.assert_allclose(sent(plan, "vectors"), 2 * BATCH * columns * 4)
    np.testing.assert_allclose(sent(plan, "gradients"), BATCH * (64 - columns) * 4)


def test_the_bottom_mlp_on_one_rank_sends_its_vectors(workload: Workload):
    plan = embeddings([workload] * 5, works(workload, 5, without=frozenset({0})), bottom_rank=0)
    np.testing.assert_allclose(sent(plan, "bottom"), [4 * BATCH * 8 * 4, 0, 0, 0, 0])
    np.testing.assert_allclose(sent(plan, "bottom gradients"), [0, *[BATCH * 8 * 4] * 4])
    top = workload.grad_nbytes[2:].sum()
    assert sum(plan.nbytes[row] for row in plan.rows(ALL_REDUCE)) == pytest.approx(5 * top)
    assert sent(plan, "vectors")[0] == 0


@pytest.mark.parametrize("n", [2, 4, 8])
def test_with_instant_compute_two_all_to_alls_and_an_all_reduce_are_left(workload: Workload, n: int):
    held = [TableWork(0.0, 0.0, 64 / n, 24 / n)] * n
    plan = embeddings([workload] * n, held, one_bucket, indices="local")
    instant = dataclasses.replace(plan, seconds=np.zeros(len(plan)))
    all_to_all = BATCH * 64 * 4 * (n - 1) / n / BANDWIDTH
    all_reduce = 2 * (n - 1) / n * workload.gradient_nbytes / BANDWIDTH
    run = instant.execute(star(n, bandwidth=BANDWIDTH, latency=0.0))
    assert run.seconds == pytest.approx(2 * all_to_all + all_reduce, rel=1e-9)


def longest_path(plan: Plan) -> float:
    """Return the longest path through the tasks, by networkx, where no two messages share a link."""
    event = np.where(plan.kind >= ALL_REDUCE, len(plan) + plan.key, np.arange(len(plan)))
    seconds = plan.seconds.copy()
    sends = plan.rows(SEND)
    seconds[sends] = plan.nbytes[sends] / BANDWIDTH
    sums = plan.rows(ALL_REDUCE)
    seconds[sums] = 2 * (plan.n_ranks - 1) / plan.n_ranks * plan.nbytes[sums] / BANDWIDTH
    graph = nx.DiGraph()
    for row in range(len(plan)):
        before = list(plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]])
        before += [plan.previous[row]] if plan.previous[row] >= 0 else []
        if plan.kind[row] == RECEIVE:
            before += [send for send in sends if plan.key[send] == plan.key[row]]
        graph.add_edge("begin", event[row], weight=0.0)
        for earlier in before:
            graph.add_edge(event[earlier], event[row], weight=seconds[earlier])
        graph.add_edge(event[row], "end", weight=seconds[row])
    length: float = nx.dag_longest_path_length(graph)
    return length


@pytest.mark.parametrize("slow", [1e-3, 5e-4, 1e-5])
def test_a_step_takes_the_longest_path(workload: Workload, slow: float):
    """Two ranks, one of which holds three times as much; indices, vectors, gradients and the all-reduce are long over
    before the next of them starts, so that nobody shares a link."""
    held = [TableWork(2e-4, 4e-4, 48, 18), TableWork(1e-4, slow, 16, 6)]
    long = dataclasses.replace(workload, forward=workload.forward + slow, backward=workload.backward + 1e-3)
    plan = embeddings([long, workload], held, one_bucket, steps=2)
    run = plan.execute(star(2, bandwidth=BANDWIDTH, latency=0.0))
    assert run.seconds == pytest.approx(longest_path(plan), rel=1e-9)
    assert run.seconds > plan.critical_path()


def test_the_bottom_mlp_hides_the_all_to_alls(workload: Workload):
    """With a bottom MLP that takes longer than the vectors do, infinitely fast links change nothing but the sums."""
    held = [TableWork(0.0, 0.0, 16, 6)] * 4
    slow = dataclasses.replace(workload, forward=workload.forward + 0.1, backward=workload.backward + 0.1)
    plan = embeddings([slow] * 4, held, one_bucket, indices="local")
    run = plan.execute(star(4, bandwidth=BANDWIDTH, latency=0.0))
    all_reduce = 2 * 3 / 4 * workload.gradient_nbytes / BANDWIDTH
    assert run.seconds == pytest.approx(plan.critical_path() + all_reduce, rel=1e-9)


def test_models_without_tables_are_refused(workload: Workload):
    resnet = make_workload(load_model("lenet5"), load_device("v100"), 8)
    with pytest.raises(ConfigError, match="has no embedding_bag"):
        embeddings([resnet], [TableWork(0.0, 0.0, 0.0, 0.0)])
    with pytest.raises(ConfigError, match="bottom_rank = 3: must be a rank from 0 to 1"):
        embeddings([workload] * 2, works(workload, 2), bottom_rank=3)
