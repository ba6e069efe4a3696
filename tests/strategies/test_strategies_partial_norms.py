"""LARS and LAMB where ranks have parts of tensors: an all-reduce, which takes time, puts norms of parts together."""

import dataclasses

import numpy as np
import pytest

import ddlsim
from ddlsim import FSDP, LAMB, LARS, AllReduce, ConfigError, Hybrid, Parallel, ShardedUpdate, Training, simulate
from ddlsim.plan.plan import ALL_REDUCE
from ddlsim.plan.transforms import NORMS

SPLIT = {
    "stage 1": FSDP(stage=1), "stage 2": FSDP(stage=2, micro_batch=4, overlap="layer"), "full": FSDP(micro_batch=8),
    "hybrid shards": FSDP(shard=2), "sharded": ShardedUpdate(overlap="layer"), "das": Hybrid({"conv2": 2, "dense1": 1}),
    "pipeline": Parallel(pipeline=2, sharded=True, micro_batch=8),
    "chunks": Parallel(pipeline=2, sharded=True, micro_batch=4, order="1f1b", interleave=2),
}  # fmt: skip


def trained(strategy, workers, optimizer):
    together = not isinstance(strategy, AllReduce | ShardedUpdate)
    training = Training("digits", updates=6, optimizer=optimizer, rate=0.01, sharding="shared", evaluate_every=6)
    return simulate("lab-heterogeneous", "digits-cnn", strategy, 32 if together or workers == 1 else 8, workers, seed=3,
                    training=training)  # fmt: skip


@pytest.mark.parametrize("optimizer", [LARS(trust=0.01), LAMB()], ids=["LARS", "LAMB"])
def test_it_ends_with_the_weights_of_one_worker(optimizer):
    alone = trained(AllReduce(), 1, optimizer)
    assert np.abs(alone.params - alone.monitor.learner.initial.read()).max() > 1e-3
    for strategy in SPLIT.values():
        result = trained(strategy, 4, optimizer)
        np.testing.assert_allclose(result.params, alone.params, rtol=0, atol=2e-6)
        assert (result.plan.name == result.plan.names.index(NORMS)).any()


@pytest.mark.parametrize("name", SPLIT)
def test_what_norms_take(name):
    """The norms of a share, and all-reduces of 8 bytes for each tensor that others have parts of, before the update."""
    runs = [
        simulate("office-1gbe", "digits-cnn", SPLIT[name], 32 if name != "sharded" else 8, 4, optimizer=each, steps=2,
                 device="v100", stack="pytorch", compute=ddlsim.Roofline())
        for each in (("lars", "momentum") if name in ("full", "pipeline") else ("lamb", "adam"))
    ]  # fmt: skip
    plan, bare = (run.plan for run in runs)
    plan.check()
    norms = plan.name == plan.names.index(NORMS)
    sums = norms & (plan.kind == ALL_REDUCE)
    assert (norms & ~sums).sum() == 4
    np.testing.assert_allclose(np.delete(plan.seconds, np.flatnonzero(norms)), bare.seconds, rtol=1e-9, atol=1e-15)
    tensors = {"hybrid shards": 2, "das": 0, "pipeline": 0, "chunks": 0}
    n_tensors = len(runs[0].workloads[0].tensor_layer)
    if name not in tensors:  # all ranks, all tensors
        assert plan.nbytes[sums].tolist() == [8.0 * n_tensors] * 4
        assert plan.seconds[norms].max() == pytest.approx(runs[0].workloads[0].norms / 4)
        ring = ddlsim.collective_time("office-1gbe", "ring", 8.0 * n_tensors, ranks=4)
        longer = plan.seconds[norms].max() + ring
        assert runs[0].step_time - runs[1].step_time == pytest.approx(longer, rel=1e-6)
    elif name == "hybrid shards":
        assert plan.nbytes[sums].tolist() == [8.0 * n_tensors] * 4
        assert {len(plan.groups[peer]) for peer in plan.peer[sums].tolist()} == {2}
    elif name == "das":  # one layer over pairs, one over all, two tensors each
        assert sorted(plan.nbytes[sums].tolist()) == [16.0] * 8
        assert sorted(len(plan.groups[peer]) for peer in plan.peer[sums].tolist()) == [2] * 4 + [4] * 4
    else:  # of each stage its tensors, over two replicas
        assert sum(plan.nbytes[sums].tolist()) == 8.0 * n_tensors * 2


def test_one_worker_has_all_norms():
    for strategy in (FSDP(), FSDP(shard=1)):
        result = simulate("office-1gbe", "digits-cnn", strategy, 8, 1 if strategy.shard is None else 4,
                          optimizer="lamb")  # fmt: skip
        assert NORMS not in result.plan.names


@dataclasses.dataclass(frozen=True)
class Own(LAMB):
    """Layer by layer, with unknown communication."""


def test_a_rule_of_ones_own_is_not_guessed():
    for strategy in (FSDP(), ShardedUpdate(), Hybrid()):
        with pytest.raises(ConfigError, match="the optimizer Own needs whole layers, but each rank holds only parts"):
            trained(strategy, 4, Own())
