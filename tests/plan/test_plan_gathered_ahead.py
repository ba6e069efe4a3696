"""Weights that replicas gather beside forward passes: what waits for what, and how many bytes they are."""

import dataclasses

import numpy as np
import pytest
from plan_examples import workload
from unrolled import pipeline

import ddlsim
from ddlsim import Parallel
from ddlsim.errors import ConfigError
from ddlsim.plan import Mesh, balanced_chunks, chunks_at
from ddlsim.plan.plan import ALL_GATHER, FORWARD
from ddlsim.plan.transforms import gathers_beside_forward
from ddlsim.workload.buckets import ddp_buckets, per_layer


@pytest.mark.parametrize("overlap", ["ddp", "layer"])
@pytest.mark.parametrize(("cluster", "model"), [("dgx1-v100", "resnet50"), ("office-1gbe", "bert-base")])
def test_one_stage_is_a_sharded_update(cluster, model, overlap):
    """The same schedule, written by two builders."""
    split = ddlsim.simulate(
        cluster, model, Parallel(sharded=True, micro_batch=8, overlap=overlap), batch_size=32, workers=4, steps=3,
        warmup=1,
    )  # fmt: skip
    whole = ddlsim.simulate(
        cluster, model, ddlsim.ShardedUpdate(overlap=overlap), batch_size=8, workers=4, steps=3, warmup=1
    )
    assert split.step_time == pytest.approx(whole.step_time, rel=1e-12)


@pytest.mark.parametrize("buckets", [ddp_buckets, per_layer])
@pytest.mark.parametrize(("order", "per_stage", "model"), [
    ("1f1b", 1, "bert-base"), ("1f1b", 2, "resnet50"), ("gpipe", 1, "gpt2"), ("zb-v", 2, "gpt2"),
])  # fmt: skip
def test_passes_wait_for_the_weights_of_their_layers(order, per_stage, model, buckets):
    work = workload(model, 2)
    chunks = balanced_chunks(work, 2, per_stage)
    before = pipeline(chunks, Mesh(data=2, pipeline=2), 4, order, steps=3, buckets=buckets, sharded=True)
    plan = gathers_beside_forward(before, np.concatenate([chunk.workload.forward for chunk in chunks]))
    plan.check()
    assert plan.seconds.sum() == pytest.approx(before.seconds.sum(), rel=1e-12)
    assert plan.peak_memory() == pytest.approx(before.peak_memory(), rel=1e-12)
    assert plan.critical_path() <= before.critical_path() * (1.0 + 1e-12)
    forward = plan.rows(FORWARD)
    n_waits = np.array([np.isin(plan.kind[plan.needs[slice(*plan.need_offsets[[i, i + 1]])]], ALL_GATHER).sum()
                        for i in forward])  # fmt: skip
    first = plan.step[forward] == 0
    assert not n_waits[first].any()
    assert (n_waits[~first] <= len(plan.parts)).all()
    assert n_waits[~first].sum() >= 2 * len(plan.rows(ALL_GATHER)) / 3  # those of the last step have nobody behind
    lost = np.isin(plan.kind[plan.needs], ALL_GATHER)
    offsets = np.searchsorted(np.flatnonzero(~lost), plan.need_offsets)
    early = dataclasses.replace(plan, needs=plan.needs[~lost], need_offsets=offsets)
    with pytest.raises(ConfigError, match="whose weights it uses"):
        early.check()


def test_a_plan_that_gathers_nothing_stays_as_it_is():
    plan = pipeline(chunks_at(workload("resnet50", 2), [40]), Mesh(data=2, pipeline=2), 2, steps=2)
    assert gathers_beside_forward(plan, np.zeros(plan.n_layers)) is plan


@pytest.mark.parametrize(("precision", "dtype", "share"), [
    ("fp32", "fp32", 1.0), ("fp16", "fp32", 0.5), ("fp16", "fp16", 1.0), ("fp32", "fp16", 2.0),
])  # fmt: skip
def test_weights_are_gathered_as_they_are_computed_with(precision, dtype, share):
    """(N - 1)/N (g + w) P: in fp16 w is 2 bytes, also where gradients are summed in fp32."""
    strategy = Parallel(pipeline=2, sharded=True, micro_batch=4)
    result = ddlsim.simulate("dgx1-v100", "bert-base", strategy, batch_size=16, workers=4, precision=precision,
                             gradient_dtype=dtype, steps=1)  # fmt: skip
    plan = result.plan
    gathered = plan.nbytes[plan.rows(ALL_GATHER)]
    scattered = np.array([plan.parts[part].nbytes for part in plan.part[plan.rows(ALL_GATHER)]])
    assert gathered == pytest.approx(share * scattered, rel=1e-12)
