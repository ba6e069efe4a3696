"""Models that strategies keep beside the trained one take memory on each device."""

from __future__ import annotations

from typing import Any

import pytest

import ddlsim
from ddlsim import ErrorFeedback, TopK


def needed(strategy: Any, **options: Any) -> float:
    run = ddlsim.simulate("dgx1-v100", "bert-base", strategy, 1, 4, optimizer="sgd", steps=4, warmup=4, **options)
    assert run.memory is not None
    return run.memory.needed


@pytest.mark.parametrize(
    ("strategy", "compressor", "models"),
    [
        (ddlsim.LocalSGD(4), None, 0.0),
        (ddlsim.LocalSGD(4), ErrorFeedback(TopK(0.01)), 2.0),  # the average before, and the residual
        (ddlsim.QsparseLocalSGD(4), None, 2.0),  # is the same
        (ddlsim.HierarchicalLocalSGD(2, 2), None, 0.0),
        (ddlsim.DiLoCo(4), None, 0.0),  # in host memory
        (ddlsim.SlowMo(4), None, 2 / 4),  # sharded by four workers
        (ddlsim.BMUF(4), None, 3.0),
        (ddlsim.DaSGD(4), None, 1.0),
        (ddlsim.OverlapLocalSGD(4), None, 2.0),
        (ddlsim.CoCoDSGD(4), None, 2.0),
        (ddlsim.DPSGD("ring"), None, 0.0),
        (ddlsim.DPSGD("complete"), TopK(0.01), 4.0),
        (ddlsim.CHOCOSGD(0.1), TopK(0.01), 3.0),  # its own and two neighbours'
        (ddlsim.ADPSGD("ring"), None, 0.0),
        (ddlsim.ADPSGD("ring"), TopK(0.01), 4.0),  # of two neighbours, each in both directions
        (ddlsim.GossipSGD(), TopK(0.01), 6.0),
        (ddlsim.ElasticAveraging(0.2, placement="colocated"), None, 0.0),  # the centre is on the servers
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_take_four_bytes_per_parameter(strategy: Any, compressor: Any, models: float) -> None:
    expected = needed(ddlsim.AllReduce()) + 4.0 * models * ddlsim.load_model("bert-base").n_params
    assert needed(strategy, compression=compressor) == pytest.approx(expected, rel=1e-12)


def test_a_custom_strategy_states_what_it_keeps() -> None:
    class Anchored(ddlsim.AllReduce):
        def kept_models(self, n_workers: int, compressed: bool) -> float:
            return n_workers + 3.0 * compressed

    for compressor, models in ((None, 4.0), (TopK(0.01), 7.0)):
        more = needed(Anchored(), compression=compressor) - needed(ddlsim.AllReduce())
        assert more == pytest.approx(4.0 * models * ddlsim.load_model("bert-base").n_params, rel=1e-12)
