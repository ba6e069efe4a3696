"""Random machines and layouts of tensor groups: where one rank stands for a group, the result is that of all ranks."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest

from ddlsim import (
    Background,
    Experiment,
    Job,
    LinkFault,
    Lognormal,
    Parallel,
    Result,
    Slowdown,
    simulate,
    simulate_jobs,
)
from ddlsim.cluster import MultiGpu, leaf_spine, star
from ddlsim.strategies import parallel

TINY = "megatron+dim=256+layers=8+heads=8"
FOLDED = "tensor groups: "


def is_folded(result: Result) -> bool:
    """Return whether one rank stands for each group, exactly."""
    return any(note.startswith(FOLDED) and "although" not in note for note in result.notes)


def folding_world(rng):
    """Draw machines with a switch inside, a layout of tensor groups in them, and a run."""
    gpus, hosts = rng.choice([2, 4, 4]), rng.choice([1, 2, 2, 4])
    nics = rng.choice([n for n in (1, 2, 4) if n <= gpus])
    host = MultiGpu(
        n_gpus=gpus,
        inside="nvswitch",
        device="v100",
        nvlink_bandwidth="150 GB/s",
        nvlink_latency=1e-6,
        pcie_bandwidth=rng.choice(["1000 GB/s", "12 GB/s"]),
        pcie_latency=1e-6,
        n_nics=nics,
        n_pcie_switches=rng.choice([nics, gpus]),
    )
    graph = star(hosts, bandwidth=rng.choice(["10 Gbit/s", "100 Gbit/s"]), latency="2 us", host=host)
    if hosts == 4 and rng.random() < 0.5:
        graph = leaf_spine(2, 2, 2, bandwidth="25 Gbit/s", latency="2 us", host=host)
    rest = hosts
    pipeline = rng.choice([n for n in (1, 2, 4) if rest % n == 0])
    order = rng.choice(["1f1b", "gpipe", "1f1b", "2bw"])
    more = {} if order == "2bw" else {"sharded": rng.random() < 0.4, "p2p": rng.choice(["overlapped", "exchange"])}
    sequence = rng.random() < 0.5
    layout = Parallel(
        tensor=gpus,
        pipeline=pipeline,
        data=rest // pipeline,
        sequence=sequence,
        order=order,
        tp_comm_overlap=sequence and rng.random() < 0.5,
        micro_batch=rng.choice([1, 2]),
        recompute=rng.choice(["none", "selective", "full", "stage"]),
        overlap=rng.choice(["none", "layer", "ddp"]),
        interleave=2 if order == "1f1b" and pipeline > 1 and rng.random() < 0.3 else 1,
        algorithm=rng.choice(["default", "ring"]),
        **more,
    )
    batches = layout.data * layout.micro_batch * pipeline * rng.choice([1, 2])
    return (
        graph,
        layout,
        {
            "batch_size": batches,
            "workers": gpus * hosts,
            "steps": rng.choice([1, 2, 4]),
            "warmup": rng.choice([0, 1]),
            "precision": rng.choice(["fp16", "fp32"]),
            "optimizer": rng.choice(["sgd", "lamb"]),
        },
    )


def disturbed(rng, hosts):
    """Draw what keeps members from doing the same at the same times, in four of ten worlds: options, other traffic."""
    other = "h1.cpu" if hosts > 1 else "h0.gpu0"
    return rng.choice([
        *[({}, [])] * 6,
        ({"jitter": Lognormal(0.1)}, []),
        ({"faults": [Slowdown([0], "0 s", "1 s", 2.0)]}, []),
        ({"faults": [LinkFault("h0.gpu0", "h0.nvswitch", "0 s", "1000 s", factor=0.5)]}, []),
        ({}, [Background("h0.cpu", other, "1 Gbit/s")]),
    ])  # fmt: skip


def check_folding(seed: int, *, spans: bool = False) -> bool:
    """Make a run with one rank for each group where ddlsim finds that this is exact, and with all ranks; return whether
    it has found so. Raises AssertionError where they differ."""
    rng = random.Random(seed)
    graph, layout, options = folding_world(rng)
    more, others = disturbed(rng, options["workers"] // layout.tensor)
    experiment = Experiment(graph, TINY, layout, **options, **more)

    def run() -> Result:
        return simulate_jobs([Job(experiment), *others]).runs[0].result if others else simulate(experiment)

    once = run()
    if not is_folded(once):
        return False
    assert not more
    assert not others
    with mock.patch.object(parallel, "disturbed", return_value="a test"):
        every = run()
        traced = every.traced if spans else None
    assert not is_folded(every)
    assert once.step_time == pytest.approx(every.step_time, rel=1e-9)
    assert once.end_time == pytest.approx(every.end_time, rel=1e-9)
    assert once.shares == pytest.approx(every.shares, abs=1e-9)
    # ranks are in the middle of an exchange when the run ends: of these bytes and messages count as shares
    for name in ("channel_nbytes", "channel_busy"):
        a, b = getattr(once, name), getattr(every, name)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * b.max())
    assert once.nbytes_sent == pytest.approx(every.nbytes_sent, rel=2e-3)
    assert once.n_messages == pytest.approx(every.n_messages, rel=2e-3)
    if traced is not None:
        for kind in ("compute", "communication", "transfer"):
            totals = []
            for recorder in (once.traced.recorder, traced.recorder):
                seconds = dict.fromkeys([span.track for span in recorder.spans], 0.0)
                for span in recorder.spans:
                    seconds[span.track] += (span.end - span.start) * (span.kind == kind)
                totals.append(seconds)
            assert totals[0] == pytest.approx(totals[1], rel=2e-3, abs=1e-3 * every.end_time)
    return True
