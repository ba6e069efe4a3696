"""Ranges of recommended configurations where published runs on a device disagree; whether the ranking is certain."""

from __future__ import annotations

import dataclasses

import pytest
from draws import rows

import ddlsim
from ddlsim import FSDP, Experiment, Target
from ddlsim.planner import Recommendation, recommend
from ddlsim.workload.devices import Device, load_device


def disputed(name: str, low: float, high: float) -> Device:
    device = load_device(name)
    assert device.kernels is not None
    return dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, spread=(low, high)))


def plan(device: Device | None, **more: object) -> Recommendation:
    base = Experiment("selene", "llama-3-8b", device=device)
    arguments: dict[str, object] = {
        "workers": [8], "strategies": [FSDP(), FSDP(recompute="full")], "batch_sizes": [8], "base": base, "jobs": 1,
    }  # fmt: skip
    return recommend("selene", "llama-3-8b", Target(), **{**arguments, **more})  # type: ignore[arg-type]


def at(device: Device, factor: float, strategy: FSDP) -> float:
    """The throughput if all matrix products run at another rate."""
    assert device.kernels is not None
    gemm = {kind: factor * share for kind, share in device.kernels.gemm.items()}
    other = dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, gemm=gemm))
    sizes = {"batch_size": 8, "workers": 8, "warmup": 1, "steps": 2}
    return ddlsim.simulate("selene", "llama-3-8b", strategy, device=other, **sizes).throughput  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_range_is_that_of_runs_at_both_ends() -> None:
    device = disputed("a100-80g", 0.9, 1.1)
    answer = plan(device)
    assert answer.certain
    assert answer.rivals == ()
    for choice in answer.choices:
        assert choice.range is not None
        low, high = choice.range.low.throughput, choice.range.high.throughput
        assert (low, high) == pytest.approx([at(device, end, choice.experiment.strategy) for end in (0.9, 1.1)])
        assert low < choice.throughput < high
    best = answer.to_dict()["choices"][0]  # type: ignore[index]
    low, high = best["throughput_range"]
    assert best["cost_range"] == pytest.approx([8 / 3600 * 1e6 / end for end in (low, high)])
    text = str(answer)
    assert f"{low:.4g} to {high:.4g} samples/s" in text
    assert "published runs on a100-80g disagree" in text
    assert "ranking       certain: the best stays the best" in text


def test_where_nothing_is_disputed_there_is_no_range() -> None:
    answer = plan(disputed("a100-80g", 1.0, 1.0))
    assert answer.certain is None
    assert answer.choices[0].range is None
    assert "disagree" not in str(answer)
    assert answer.to_dict()["certain"] is None
    assert "assumed software stack: torchtitan; set another with --stack" in str(answer)


@pytest.mark.parametrize(("factor", "certain"), rows([(0.7, True), (1.05, False), (2.0, True)], 1, start=1))
def test_a_machine_whose_rate_is_disputed_beside_another(factor: float, certain: bool) -> None:
    """The best of the other cluster is a rival, also where a bound has excluded it.

    factor  cost of a sample on the other cluster, relative to one with undisputed rates
    """
    clusters = [ddlsim.load_cluster(name) for name in ("selene", "dgx-h100-pod")]
    sizes = {"batch_size": 8, "workers": 8, "warmup": 1, "steps": 2}
    speeds = [ddlsim.simulate(each, "llama-3-8b", FSDP(), **sizes).throughput for each in clusters]  # type: ignore[arg-type]
    prices = [30.0, 30.0 * factor * speeds[1] / speeds[0]]
    priced = [each.with_costs(price=f"{price} USD/h") for each, price in zip(clusters, prices, strict=True)]
    spreads = [kernels.spread for name in ("a100-80g", "h100") if (kernels := load_device(name).kernels) is not None]
    assert spreads[0][0] < 0.9
    assert spreads[1] == (1.0, 1.0)
    answer = recommend(
        priced,
        "llama-3-8b",
        Target(objective="cost"),
        workers=[8],
        strategies=[FSDP()],
        batch_sizes=[8],
        jobs=1,
        n_best=1,
    )
    assert answer.certain is certain
    assert ("uncertain, because published runs" in str(answer)) is not certain
    if not certain:
        assert answer.rivals is not None
        assert answer.best.candidate.place not in answer.rivals[0]
