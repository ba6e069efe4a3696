"""Strategies that do the same take the same time, send the same bytes and need the same memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draws import few, latin, rows

import ddlsim
from ddlsim import FSDP, AllReduce, ConfigError, ExpertParallel, Fabric, Hybrid, Parallel, Result, ShardedUpdate
from ddlsim.plan.plan import ALL_GATHER

#: one worker each; with and without weights that the output layer shares with the embedding
CASES = [
    ("dgx-h100-pod", "gpt2-medium", 16, 2, {"stack": "torchtitan-compile"}),
    ("dgx-h100-pod", "llama-3-8b", 8, 1, {"stack": "megatron", "precision": "fp8"}),
    ("gb200-nvl72", "gpt2", 8, 4, {"stack": "megatron", "precision": "fp8"}),
    ("tpu-v5p", "gpt2", 8, 1, {"stack": "maxtext"}),
    ("tpu-v5p", "qwen3-1.7b", 8, 1, {"stack": "maxtext"}),
    ("cloud-25g-16x8-v100", "gpt2-medium", 16, 1, {"precision": "fp32"}),
    ("office-1gbe", "gpt2", 8, 2, {}),
    ("two-racks-oversubscribed", "bert-base", 32, 1, {}),
]


def same(one: Result, other: Result, *, memory: bool = True) -> None:
    assert other.step_time == pytest.approx(one.step_time, rel=1e-12)
    assert other.nbytes_per_step == pytest.approx(one.nbytes_per_step, rel=1e-12)
    if memory:
        assert one.memory is not None
        assert other.memory is not None
        assert other.memory == pytest.approx(one.memory, rel=1e-12)


@pytest.mark.parametrize(("cluster", "model", "n", "batch", "more"), rows(CASES, 4))
def test_a_split_into_replicas_only_is_data_parallelism(
    cluster: str, model: str, n: int, batch: int, more: dict[str, str]
) -> None:
    def run(strategy: object, size: int) -> Result:
        return ddlsim.simulate(cluster, model, strategy, size, n, steps=1, warmup=1, **more)  # type: ignore[arg-type]

    for overlap in ("ddp", "none"):
        same(run(AllReduce(overlap=overlap), batch), run(Parallel(micro_batch=batch, overlap=overlap), batch * n))  # type: ignore[arg-type]
        same(
            run(FSDP(stage=1, overlap=overlap), batch * n),
            run(Parallel(micro_batch=batch, overlap=overlap, sharded=True), batch * n),  # type: ignore[arg-type]
        )
    same(run(FSDP(), batch * n), run(Parallel(micro_batch=batch, sharded="full"), batch * n))
    same(run(ShardedUpdate(), batch), run(Parallel(micro_batch=batch, overlap="none", sharded=True), batch * n))


@pytest.mark.parametrize(
    ("model", "strategy"), [("mixtral-8x7b", ExpertParallel(degree=1)), ("qwen3-1.7b", Hybrid(groups={}))]
)
@pytest.mark.parametrize(
    ("stack", "precision"), rows([(s, p) for s in ("megatron", "torchtitan") for p in ("bf16", "fp8")], 2, start=1)
)
def test_experts_and_layers_that_are_not_split_need_the_memory_of_data_parallelism(
    model: str, strategy: object, stack: str, precision: str
) -> None:
    """Fused attention, the stack's logits and the dtype of gradients count in every strategy."""

    def memory(strategy: object, size: int) -> object:
        options = {"stack": stack, "precision": precision}
        return ddlsim.simulate("dgx-h100-pod", model, strategy, size, 2, steps=1, warmup=1, **options).memory  # type: ignore[arg-type]

    assert memory(strategy, 2) == pytest.approx(memory(AllReduce(), 1), rel=1e-12)


@pytest.mark.parametrize(
    ("cluster", "algorithm"),
    latin(
        ["dgx-h100-pod", "cloud-25g-16x8-v100", "tpu-v5e"],
        ["hierarchical", "halving_doubling", "gloo_ring", "torus", "ring"],
    ),
)
def test_shards_are_scattered_and_gathered_by_the_halves_of_the_algorithm(cluster: str, algorithm: str) -> None:
    """`Parallel(sharded=True)` runs the halves that `FSDP` runs on the same fabric."""
    options = {"compute": ddlsim.Measured("100 ms", 1), "gradient_dtype": "fp32", "steps": 1, "warmup": 1}
    fabric = Fabric(algorithm)

    def run(strategy: object) -> Result:
        return ddlsim.simulate(cluster, "gpt2", strategy, 16, 16, fabric=fabric, **options)  # type: ignore[arg-type]

    for stage, sharded in ((1, True), (3, "full")):
        same(run(FSDP(stage=stage)), run(Parallel(micro_batch=1, sharded=sharded)), memory=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["double_binary_tree", "auto", "parameter_server", "nccl(ring)"])
def test_an_all_reduce_without_halves_is_refused_for_shards(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="Parallel with sharded = True requires an algorithm that consists of a red"):
        Parallel(sharded=True, algorithm=algorithm)
    with pytest.raises(ConfigError, match="use 'default', 'ring', "):
        ddlsim.simulate("dgx1-v100", "gpt2", Parallel(sharded="full"), 8, 8, fabric=Fabric(algorithm))


def test_tensor_groups_on_a_torus_use_all_links_of_their_chips() -> None:
    """As all-reduces of the same 8 chips do, not one ring over half the directions of one axis."""

    def communication(algorithm: str) -> float:
        strategy = Parallel(tensor=8, micro_batch=1, algorithm=algorithm)
        result = ddlsim.simulate("tpu-v5p", "qwen3-1.7b", strategy, 1, 8, steps=1, warmup=1)
        return result.shares["communication"] * result.step_time

    torus, ring = (
        ddlsim.collective_time("tpu-v5p", algorithm, 2 * 4096 * 2048, ranks=8) for algorithm in ("torus", "ring")
    )
    assert torus < 0.6 * ring
    assert communication("default") == communication("torus") == communication("ring")
    # four all-reduces in each of the 28 layers, and a few for embedding and loss
    assert communication("default") == pytest.approx(28 * 4 * torus, rel=0.03)


def test_the_first_stage_gathers_the_embedding_first() -> None:
    """Its first pass cannot begin without the word embedding, which the output layer of the last stage shares."""
    strategy = Parallel(pipeline=2, micro_batch=1, sharded=True, overlap="layer")
    options = {"compute": ddlsim.Measured("100 ms", 1), "steps": 1, "warmup": 1}
    plan = ddlsim.simulate("cloud-25g-16x8-v100", "gpt2", strategy, 8, 16, **options).plan  # type: ignore[arg-type]
    tied = next(i for i, part in enumerate(plan.parts) if part.tied >= 0)
    for rank, place in ((0, 0), (8, -1)):
        gathers = plan.rows(ALL_GATHER)
        mine = gathers[(plan.rank[gathers] == rank) & (plan.part[gathers] >= 0)]
        assert plan.part[mine].tolist().index(tied) == place % len(mine)


@pytest.mark.parametrize("order", few(["sampled", "reversed", "alternating"], 1))
def test_replicas_of_tensor_groups_follow_a_list_of_ranks(order: str) -> None:
    """The ring crosses machines as often as the list says, whether one rank per group is executed or every rank."""
    ranks = {
        "reversed": list(range(32))[::-1],
        "alternating": [rank for first in range(8) for rank in range(first, 32, 8)],
        "sampled": np.random.default_rng(1).permutation(32).tolist(),
    }[order]
    strategy = Parallel(tensor=2, micro_batch=1, algorithm="ring", rank_order=ranks)
    options = {"compute": ddlsim.Measured("5 ms", 1), "steps": 1, "warmup": 1}

    def run(strategy: Parallel, **more: object) -> Result:
        return ddlsim.simulate("cloud-25g-16x8-v100", "gpt2", strategy, 16, 32, **options, **more)  # type: ignore[arg-type]

    result, given = run(strategy), run(replace(strategy, rank_order="given"))
    assert result.step_time == pytest.approx(run(strategy, jitter=ddlsim.Lognormal(1e-9)).step_time, rel=1e-3)
    assert result.step_time / given.step_time > (0.99 if order == "reversed" else 2.0)


def test_a_rank_order_that_lacks_ranks_is_refused() -> None:
    strategy = Parallel(tensor=2, micro_batch=1, rank_order=list(range(4)))
    with pytest.raises(ConfigError, match=r"rank_order = \[0, 1, 2, 3\]: must contain each rank from 0 to 7 once"):
        ddlsim.simulate("dgx1-v100", "gpt2", strategy, 4, 8)


@pytest.mark.parametrize("strategy", [ExpertParallel(), ddlsim.EmbeddingParallel()])
def test_collectives_that_are_set_one_by_one_do_not_take_a_fabric(strategy: object) -> None:
    with pytest.raises(ConfigError, match="whose collectives are set one by one; remove fabric, and set algorithm="):
        ddlsim.simulate("dgx1-v100", "dlrm", strategy, 8, 8, fabric=Fabric("ring"))  # type: ignore[arg-type]
