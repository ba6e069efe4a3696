"""The batch size of a run that sets none: 32 per worker, or a micro-batch of one sample per data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import ddlsim
from ddlsim import FSDP, AllReduce, Experiment, Hybrid, Parallel
from ddlsim.strategies import contract


@pytest.mark.parametrize(
    ("strategy", "n_workers", "batch_size"),
    [
        (AllReduce(), 64, 32), (ddlsim.ParameterServer(2), 64, 32), (FSDP(), 64, 64), (FSDP(micro_batch=2), 64, 128),
        (FSDP(stage=1), 8, 8), (Hybrid(), 16, 16), (ddlsim.ExpertParallel(), 8, 8), (Parallel(tensor=8), 64, 8),
        (Parallel(tensor=8, pipeline=4, micro_batch=2), 64, 16), (Parallel(pipeline=4, data=2), 8, 8),
        (Parallel(pipeline=4, order="pipedream"), 8, 2), (Parallel(pipeline=4, interleave=2), 8, 8),
    ],
    ids=str,
)  # fmt: skip
def test_default_batches(strategy, n_workers, batch_size):
    assert contract.of(strategy).default_batch_size(n_workers) == batch_size
    assert Experiment("office-1gbe", strategy=strategy).batch(n_workers) == batch_size
    assert Experiment("office-1gbe", strategy=strategy, batch_size=24).batch(n_workers) == 24
    n_batches = contract.of(strategy).micro_batches(batch_size, n_workers, 1)
    assert n_batches == (strategy.pipeline if getattr(strategy, "order", "") == "1f1b" else 1)


@pytest.mark.parametrize("strategy", [FSDP(), Parallel(pipeline=2), Hybrid(), AllReduce()], ids=str)
@pytest.mark.parametrize("n_workers", [2, 4, 6])
def test_a_run_without_a_batch_size_is_one_with_the_default(strategy, n_workers):
    experiment = Experiment("office-1gbe", "lenet5", strategy, workers=n_workers, steps=2)
    result = ddlsim.simulate(experiment)
    batch_size = experiment.batch(n_workers)
    assert result.experiment.batch_size == batch_size
    assert result.throughput == ddlsim.simulate(experiment.with_(batch_size=batch_size)).throughput
    assert result.given.batch_size is None


def test_a_strategy_that_shares_the_batch_has_a_sample_for_each_worker():
    @dataclass(frozen=True)
    class Shared(AllReduce):
        def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
            return batch_size // n_workers

    assert contract.of(Shared()).default_batch_size(6) == 6


def test_studies_vary_the_software():
    base = Experiment("dgx-h100-pod", "llama-3-8b", FSDP(), workers=8, steps=1, warmup=0)
    stacks = ["torchtitan", "megatron"]
    frame = ddlsim.Study(base=base, vary={"stack": stacks, "precision": ["bf16", "fp8"]}).run(jobs=1).frame
    assert frame["stack"].tolist() == ["torchtitan", "torchtitan", "megatron", "megatron"]
    assert frame["throughput"].is_monotonic_increasing
