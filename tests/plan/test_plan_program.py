"""How a step program expresses what runs do: each capability with a strategy that needs it, and its tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from bundled_strategies import EXPERTS

import ddlsim
from ddlsim import compression as cp
from ddlsim.cluster import load_cluster, star, with_storage
from ddlsim.plan import KINDS, Plan
from ddlsim.plan.transforms import NORMS
from ddlsim.run.simulate import plan_of_run

N = 4
NETWORK = with_storage(
    load_cluster(star(8, bandwidth="1 Gbit/s", latency="20 us")),
    "storage",
    read="1 GB/s",
    operations=1e5,
    at="switch",
    bandwidth="10 Gbit/s",
)
COST = cp.CodecCost(encode=1e-9, decode=2e-9)
TOPK = cp.Compression(cp.TopK(0.05), cost=COST)
INPUT = ddlsim.Input(storage="storage", samples=2000, sample_bytes=300.0, prep_seconds="0.1 ms", prefetch=1)


def learning(**more: Any) -> ddlsim.Training:
    return ddlsim.Training("digits", rate=0.02, updates=4, **more)


def rows(plan: Plan, kind: str = "", name: str = "", rank: int = -1, step: int = -1) -> list[int]:
    """Return the rows of a kind, a name, a rank and a step."""
    which = np.ones(len(plan), dtype=np.bool_)
    for column, value, given in (
        (plan.kind, KINDS.index(kind) if kind else 0, kind),
        (plan.name, plan.names.index(name) if name in plan.names else len(plan.names), name),
        (plan.rank, rank, rank >= 0),
        (plan.step, step, step >= 0),
    ):
        which &= (column == value) if given else True
    return np.flatnonzero(which).tolist()


def needs(plan: Plan, row: int) -> list[int]:
    return plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]].tolist()


def steps_back(plan: Plan) -> set[int]:
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    return set((plan.step[row] - plan.step[plan.needs]).tolist())


def of_own_rank(plan: Plan) -> bool:
    row = np.repeat(np.arange(len(plan)), np.diff(plan.need_offsets))
    return bool((plan.rank[row] == plan.rank[plan.needs]).all())


class Capability(NamedTuple):
    """What a run does, the experiment that needs it, and what is true of `steps` steps of its plan."""

    strategy: Any
    holds: Callable[[Plan], bool]
    steps: int = 3
    more: dict[str, Any] = {}  # noqa: RUF012  # never changed
    batch_size: int = 8
    model: str = "digits-cnn"


def in_steps(plan: Plan, kind: str) -> list[int]:
    """Return the steps in which there is a task of a kind, from 1."""
    return sorted({int(plan.step[row]) + 1 for row in rows(plan, kind)})


def waits_for_all(plan: Plan) -> bool:
    """Whether a server answers the first worker after the updates of all of them."""
    answer = rows(plan, "send", rank=N)[0]
    return sorted(needs(plan, answer)) == rows(plan, name="update", rank=N, step=0)


def asynchronous(plan: Plan) -> bool:
    """Whether each worker's chain is push, receive, update, answer, receive, next forward pass."""
    for rank in range(N):
        push, answer = rows(plan, "send", rank=rank, step=0)[0], rows(plan, "receive", rank=rank, step=0)[0]
        again = rows(plan, "forward", rank=rank, step=1)[0]
        served = [row for row in rows(plan, rank=N, step=0) if plan.lanes[plan.lane[row]].name == f"worker {rank}"]
        assert [KINDS[plan.kind[row]] for row in served] == ["receive", "compute", "send"]
        assert plan.peer[push] == N
        assert needs(plan, push) == rows(plan, "backward", rank=rank, step=0)
        assert answer in needs(plan, again)
    return of_own_rank(plan)


CAPABILITIES = {
    "needs within the step": Capability(ddlsim.AllReduce(), lambda plan: steps_back(plan) == {0}),
    "needs of the step before": Capability(
        ddlsim.ShardedUpdate(overlap="layer"), lambda plan: steps_back(plan) == {0, 1}
    ),
    "needs of two steps before": Capability(ddlsim.DaSGD(2, 2), lambda plan: steps_back(plan) == {0, 2}, 6),
    "weights two updates old (PipeDream-2BW)": Capability(
        ddlsim.Parallel(pipeline=2, order="2bw"), lambda plan: set(plan.delays) == {1}, batch_size=24
    ),
    "every k-th step": Capability(ddlsim.LocalSGD(2), lambda plan: in_steps(plan, "all_reduce") == [2, 4], 5),
    "every k-th step, but for every l-th": Capability(
        ddlsim.HierarchicalLocalSGD(1, 2, 2),
        lambda plan: (
            [len({int(plan.peer[row]) for row in rows(plan, "all_reduce", step=step)}) for step in (0, 1)] == [2, 1]
        ),
        2,
    ),
    "what needs a skipped task needs what that needs": Capability(
        ddlsim.LocalSGD(2),
        lambda plan: not rows(plan, name="merge", step=0) and bool(rows(plan, name="merge", step=1)),
    ),
    "seconds per rank": Capability(
        ddlsim.AllReduce(),
        lambda plan: (
            2 * plan.seconds[rows(plan, "forward", rank=0)]
            == pytest.approx(plan.seconds[rows(plan, "forward", rank=1)])
        ),
        more={"speed": (1.0, 0.5, 1.0, 1.0)},
    ),
    "groups": Capability(
        ddlsim.Parallel(pipeline=2, micro_batch=3), lambda plan: {(0, 1), (2, 3)} <= set(plan.groups), batch_size=24
    ),
    "peers": Capability(
        ddlsim.Parallel(pipeline=2, micro_batch=3),
        lambda plan: (
            {(int(plan.rank[row]), int(plan.peer[row])) for row in rows(plan, "send")}
            == {(0, 2), (2, 0), (1, 3), (3, 1)}
        ),
        batch_size=24,
    ),
    "a prologue: pipelines that fill": Capability(
        ddlsim.Parallel(pipeline=2, order="pipedream"),
        lambda plan: len(rows(plan, step=0)) > len(rows(plan, step=1)) == len(rows(plan, step=2)),
        batch_size=24,
    ),
    "memory held": Capability(
        ddlsim.FSDP(), lambda plan: bool((plan.peak_memory() > 0).all()) and abs(plan.holds.sum()) < 1, batch_size=24
    ),
    "micro-batches": Capability(
        ddlsim.AllReduce(),
        lambda plan: len({(plan.step[row], plan.batch[row]) for row in rows(plan, "forward")}) == 3 * N * 2,
        more={"accumulation": 2},
    ),
    "members of a tensor group are ranks": Capability(
        ddlsim.Parallel(tensor=2, micro_batch=4),
        lambda plan: (plan.n_ranks, plan.tensor) == (N, 2) and {(0, 1), (2, 3)} <= set(plan.groups),
        1,
        batch_size=8,
        model="char-transformer",
    ),
    "gathers ahead": Capability(
        ddlsim.FSDP(prefetch=1),
        lambda plan: bool(rows(plan, "all_gather", rank=0)) and steps_back(plan) == {0, 1},
        batch_size=24,
    ),
    "rows of embedding tables": Capability(
        ddlsim.EmbeddingParallel(), lambda plan: bool(rows(plan, "send", "vectors")), batch_size=24, model="clicks-dlrm"
    ),
    "tokens to experts": Capability(
        ddlsim.ExpertParallel(), lambda plan: bool(rows(plan, "all_to_all")), batch_size=24, model=EXPERTS
    ),
    "norms over ranks": Capability(
        ddlsim.ShardedUpdate(),
        lambda plan: bool(rows(plan, name=NORMS)),
        more={"training": learning(optimizer=ddlsim.LARS(trust=0.01))},
    ),
    "evaluation": Capability(
        ddlsim.AllReduce(),
        lambda plan: len(rows(plan, name="evaluation", rank=0)) == 3,
        more={"training": learning()},
    ),
    "waiting for samples": Capability(
        ddlsim.AllReduce(), lambda plan: len(rows(plan, name="input")) == 3 * N, more={"input": INPUT}
    ),
    "waiting for samples, asynchronously": Capability(
        ddlsim.AsyncParameterServer(), lambda plan: len(rows(plan, name="input")) == 3 * N, more={"input": INPUT}
    ),
    "encoding and decoding": Capability(
        ddlsim.AllReduce(),
        lambda plan: (
            plan.seconds[rows(plan, name="encode")].sum() * N * 2
            == pytest.approx(plan.seconds[rows(plan, name="decode")].sum())
        ),
        more={"compression": TOPK},
    ),
    "bytes that the codec states": Capability(
        ddlsim.AllReduce(),
        lambda plan: (
            plan.nbytes[rows(plan, "all_gather", rank=0)].sum()
            == 3 * N * cp.TopK(0.05).expected_nbytes(round(plan.parts[0].nbytes / 4))[0]
        ),
        more={"compression": cp.TopK(0.05)},
    ),
    "bytes that depend on values": Capability(
        ddlsim.AllReduce(),
        lambda plan: (
            "depend on values" in " ".join(plan.notes)
            and plan.nbytes[rows(plan, "all_gather")[0]] == N * plan.parts[0].nbytes
        ),
        more={"compression": cp.Threshold(0.01), "training": learning()},
    ),
    "a sum of several phases": Capability(
        ddlsim.AllReduce(),
        lambda plan: len(rows(plan, "all_reduce", rank=0)) == 2 * 3 * len(plan.parts),
        more={"compression": cp.PowerSGD(2)},
    ),
    "a queue decides": Capability(
        ddlsim.AllReduce("ring", ddlsim.Priority(1e4, 2)), lambda plan: len(plan.queues) == 1
    ),
    "synchronous servers": Capability(
        ddlsim.ParameterServer(2), lambda plan: plan.servers == (N, N + 1) and bool(rows(plan, "push_pull", rank=N))
    ),
    "servers with codes": Capability(
        ddlsim.ParameterServer(2),
        lambda plan: plan.nbytes[rows(plan, "send", rank=0)].sum() < plan.nbytes[rows(plan, "receive", rank=0)].sum(),
        more={"compression": TOPK},
    ),
    "asynchronous cycles": Capability(ddlsim.AsyncParameterServer(), asynchronous),
    "several batches in a cycle": Capability(
        ddlsim.AsyncParameterServer(accumulate=2),
        lambda plan: len(rows(plan, "forward", rank=0, step=0)) == 2 and len(rows(plan, "send", rank=0, step=0)) == 1,
    ),
    "a server's turn and its update": Capability(
        ddlsim.SoftSync(2, apply_time="0.2 ms"),
        lambda plan: (
            set(plan.seconds[rows(plan, name="update")].tolist()) == {2e-4}
            and "an update uses 2 gradients" in " ".join(plan.notes)
        ),
    ),
    "an update that waits for all": Capability(ddlsim.ElasticAveraging(0.2, 2), waits_for_all),
    "a bound on the lead": Capability(
        ddlsim.StaleSynchronous(1), lambda plan: "more than 1 updates ahead" in " ".join(plan.notes)
    ),
    "messages to all neighbours": Capability(
        ddlsim.DPSGD(),
        lambda plan: {int(plan.peer[row]) for row in rows(plan, "send", rank=0)} == {1, N - 1} and of_own_rank(plan),
    ),
    "peers drawn by chance": Capability(
        ddlsim.ADPSGD(), lambda plan: "peers are chosen at random" in " ".join(plan.notes) and of_own_rank(plan)
    ),
    # what stays Python: periods chosen at run time, sampled clients, restarts
    "a period that the loss decides": Capability(
        ddlsim.AdaComm(2, 2),
        lambda plan: in_steps(plan, "all_reduce") == [2, 4] and "by the loss" in " ".join(plan.notes),
        4,
        {"training": learning()},
    ),
    "sampled clients": Capability(
        ddlsim.FedAvg(0.5, local_steps=2), lambda plan: "each round samples 2 clients" in " ".join(plan.notes)
    ),
    "restarts": Capability(ddlsim.KSync(2), lambda plan: "start again" in " ".join(plan.notes)),
}


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
def test_a_program_expresses(capability):
    experiment = ddlsim.Experiment(
        NETWORK,
        capability.model,
        capability.strategy,
        capability.batch_size,
        N,
        compute=ddlsim.Affine(1e-3, 1e-4),
        **capability.more,
    )
    plan = plan_of_run(experiment, capability.steps)
    assert plan.n_steps == capability.steps
    assert capability.holds(plan)
