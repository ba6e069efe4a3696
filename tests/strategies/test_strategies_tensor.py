"""Tensor groups in runs: every worker is a rank, exchanges are traffic, and groups that are executed once are exact."""

from dataclasses import replace

import numpy as np
import pytest
from worlds_folding import FOLDED, TINY, check_folding, is_folded

import ddlsim
from ddlsim import ConfigError, Experiment, LinkFault, Lognormal, Parallel, Slowdown, simulate
from ddlsim.cluster import star
from ddlsim.plan import read_chakra
from ddlsim.strategies import parallel
from ddlsim.workload.stacks import load_stack

BASE = {"batch_size": 4, "workers": 4, "device": "v100", "steps": 2, "warmup": 1}
SPLIT = Parallel(tensor=4, micro_batch=4)


def office(**more):
    return simulate("office-1gbe", "bert-base", SPLIT, **BASE, **more)


def test_exchanges_are_traffic():
    """98 % of the step is traffic: it is communication, on the links, and more bandwidth makes it faster."""
    result = office()
    assert result.step_time == pytest.approx(3.992859, rel=1e-6)
    assert result.shares["communication"] > 0.98
    assert result.links["utilisation"].max() > 0.98
    sums = result.plan.kind == 8
    ring = 2.0 * 3 / 4 * result.plan.nbytes[sums].sum()  # of each rank
    assert result.nbytes_sent == pytest.approx(3 * ring, rel=1e-9)
    best = max(result.sensitivities(), key=lambda each: each.gain)
    assert best.what == "bandwidth of nic"
    assert result.step_time / (1.0 + best.gain) == pytest.approx(3.636, abs=5e-4)
    assert is_folded(result)


def test_faults_jobs_and_slow_ranks_matter():
    slow = office(faults=[LinkFault("h0", "switch", "0 s", "1000 s", factor=0.1)])
    assert slow.step_time > 9.0 * office().step_time
    job = ddlsim.Job(Experiment("office-1gbe", "bert-base", SPLIT, **BASE))
    (run,) = ddlsim.simulate_jobs([job, ddlsim.Background("h0", "h1", "0.9 Gbit/s")]).runs
    assert run.result.step_time > 1.5 * office().step_time
    # exchanges do not take longer because computing does
    computing = office().step_time * office().shares["compute"]
    assert office(slowdowns=[Slowdown([0], "0 s", "1 h", 2.0)]).step_time < office().step_time + 2.0 * computing
    assert office(jitter=Lognormal(0.1)).step_time < 1.002 * office().step_time
    assert not is_folded(slow)


def test_no_link_carries_more_than_it_can():
    """Two groups and their replicas on the same four links: 6.51 and 5.36 s of traffic."""
    layout = Parallel(tensor=2, data=2, micro_batch=4, overlap="layer", algorithm="ring")
    result = simulate(star(4, bandwidth="1 Gbit/s", latency="5 us"), "bert-large", layout, 8, device="v100")
    assert result.step_time > 6.51 + 5.36
    assert result.links["utilisation"].max() < 1.0
    assert not is_folded(result)


def test_inside_machines():
    """Traffic over NVLink is communication, and a faster NVLink makes it faster."""
    step = {}
    for nvlink in ("300 GB/s", "330 GB/s"):
        layout = Parallel(tensor=8, data=2)
        result = simulate(
            f"dgx-a100-pod+nvlink_bandwidth={nvlink}",
            "gpt3-13b",
            layout,
            batch_size=4,
            workers=16,
            precision="fp16",
            gradient_dtype="fp32",
            overlap_slowdown=1.0,
            steps=1,
            warmup=0,
        )
        step[nvlink] = result.step_time
        assert is_folded(result)
        links = result.links
        assert (links[links["kind"] == "nvlink"]["busy"] > 0.05).sum() == 2 * 16
        assert result.shares["communication"] > 0.3
    assert step["300 GB/s"] > 1.005 * step["330 GB/s"]


def test_traces_of_all_ranks(tmp_path):
    """Tensor 2 x pipeline 2 x data 2: eight files with their collectives, which are the plan."""
    result = simulate("dgx1-v100", "bert-large", Parallel(tensor=2, pipeline=2, data=2), batch_size=8, steps=1)
    plan = result.plan
    files = [path for path in plan.to_chakra(tmp_path / "step") if path.suffix == ".et"]
    assert len(files) == plan.n_ranks == 8
    assert read_chakra(tmp_path / "step") == plan
    inside = (plan.kind == 8) & (plan.part < 0)
    assert {plan.groups[group] for group in plan.peer[inside]} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert set(plan.rank[inside]) == set(range(8))


#: pairs of what can be said of layouts and of runs
PAIRS = [
    ({"overlap": "none"}, {"overlap_slowdown": 1.3}),
    ({"recompute": "stage"}, {"jitter": Lognormal(0.1)}),
    ({"recompute": "full", "sequence": True}, {"slowdowns": [Slowdown([3], "0 s", "1 h", 2.0)]}),
    ({"sharded": True}, {"optimizer": "lamb", "faults": [LinkFault("h0.gpu0", "h0.gpu1", "0 s", "9 s", factor=0.5)]}),
    ({"interleave": 2, "p2p": "exchange"}, {"jitter": Lognormal(0.2)}),
    ({"p2p": "in turns", "micro_batch": 2}, {"input": ddlsim.Input(sample_bytes="1 MB", prep_seconds="50 ms")}),
    ({"order": "pipedream", "micro_batch": None, "model": "bert-base"}, {"overlap_slowdown": 1.3}),
    ({"order": "2bw", "overlap": "layer"}, {"slowdowns": [Slowdown([0], "0 s", "1 h", 1.5)]}),
    ({"sequence": True, "tp_comm_overlap": True, "recompute": "selective"}, {"jitter": Lognormal(0.1)}),
    ({"cost": "nccl", "sharded": True}, {}),
]
SIZES = {"tensor": 2, "pipeline": 2, "data": 2, "micro_batch": 1}


@pytest.mark.parametrize(("layout", "run"), PAIRS, ids=[repr([*a, *b]) for a, b in PAIRS])
def test_with_everything_else(layout, run):
    """What a run adds makes it slower than the run without, which is exact; plans are proved."""
    layout = SIZES | layout
    model = layout.pop("model", TINY)
    strategy = Parallel(**layout)
    base = {"batch_size": 8, "workers": 8, "steps": 2, "warmup": 1, "optimizer": "adam"}
    plain = simulate("dgx1-v100", model, strategy, **base)
    result = simulate("dgx1-v100", model, strategy, **(base | run))
    assert not run or not is_folded(result)
    assert result.end_time >= (1.0 - 1e-9) * plain.end_time
    result.plan.check()
    assert len(result.workers) == result.plan.n_ranks == 8
    bound = 2 * min(plain.plan.critical_path(), result.plan.critical_path())
    assert plain.end_time > bound


def test_learning_is_that_of_one_model():
    """Members of groups share gradients: parameters are those of as many replicas with one worker each."""
    models = []
    for tensor in (1, 2):
        training = ddlsim.Training("sentences", updates=2)
        layout = Parallel(tensor=tensor, pipeline=2, data=2, micro_batch=4)
        result = simulate("dgx1-v100", "char-transformer", layout, batch_size=16, workers=4 * tensor, training=training)
        assert not is_folded(result)
        models.append(result.params)
    np.testing.assert_array_equal(*models)


# ---------------------------------------------------------------- groups that are executed once


def test_groups_executed_once_are_exact():
    assert sum(check_folding(seed, spans=seed == 1) for seed in range(5)) >= 2


@pytest.mark.slow
def test_many_groups_executed_once_are_exact():
    assert sum(check_folding(seed, spans=seed % 10 == 0) for seed in range(5, 205)) >= 80


@pytest.mark.parametrize(
    ("cluster", "layout", "run"),
    [
        ("dgx-a100-pod", {"tensor": 4, "data": 2}, {"workers": 8}),  # replicas' traffic passes the same switch
        ("dgx-a100-pod", {"tensor": 8, "data": 2, "cost": "nccl"}, {"workers": 16}),  # their time is known
        ("dgx1-v100", {"tensor": 4, "data": 1}, {"workers": 4, "jitter": Lognormal(0.1)}),
    ],
)
def test_all_ranks_are_executed_where_one_is_not_enough(cluster, layout, run):
    result = simulate(cluster, TINY, Parallel(micro_batch=1, **layout), batch_size=4, steps=1, **run)
    assert not any(note.startswith(FOLDED) for note in result.notes)


def test_fixed_costs_beside_groups(monkeypatch):
    """The host's work of a step comes before its passes on every rank; calls take time inside passes, for which all
    ranks are executed."""
    run = {"batch_size": 8, "workers": 16, "steps": 2, "warmup": 1, "overlap_slowdown": 1.0}
    layout, stack = Parallel(tensor=8, data=2), load_stack("pytorch")
    plain = simulate("dgx-a100-pod", TINY, layout, stack=stack, **run)
    once = simulate("dgx-a100-pod", TINY, layout, stack=replace(stack, step_time=1e-3), **run)
    assert is_folded(once)
    assert once.step_time == pytest.approx(plain.step_time + 1e-3, rel=1e-9)
    called = simulate("dgx-a100-pod", TINY, layout, stack=replace(stack, call_time=1e-3), **run)
    assert not is_folded(called)
    assert called.step_time > plain.step_time + 1e-3
    monkeypatch.setattr(parallel, "disturbed", lambda context: "a test")
    every = simulate("dgx-a100-pod", TINY, layout, stack=replace(stack, step_time=1e-3), **run)
    assert not is_folded(every)
    assert once.step_time == pytest.approx(every.step_time, rel=1e-9)
    assert once.shares == pytest.approx(every.shares, abs=1e-9)


def test_too_many_ranks(monkeypatch):
    """Where all ranks would be too many, one stands for a group although members differ, and the result says so."""
    run = {"batch_size": 8, "workers": 16, "steps": 2, "warmup": 0, "overlap_slowdown": 1.0}
    layout, jitter = Parallel(tensor=8, data=2), Lognormal(0.1)
    plain = simulate("dgx-a100-pod", TINY, layout, **run)
    exact = simulate("dgx-a100-pod", TINY, layout, jitter=jitter, **run)
    monkeypatch.setattr(parallel, "MOST_TASKS", 1000)
    near = simulate("dgx-a100-pod", TINY, layout, jitter=jitter, **run)
    assert any("This is an approximation, because compute times vary" in note for note in near.notes)
    assert plain.step_time < near.step_time
    assert near.step_time == pytest.approx(exact.step_time, rel=0.1)
    known = simulate("dgx-a100-pod", TINY, replace(layout, cost="nccl"), **run)
    assert any("because the time of the replicas' collectives is not simulated" in note for note in known.notes)
    halves = replace(layout, tensor=4, data=4)
    whole = simulate("dgx-a100-pod", TINY, halves, **run)
    assert any("collectives of tensor groups share links" in note for note in whole.notes)
    assert whole.links["utilisation"].max() < 1.0
    one_nic = "cloud-25g-16x8-v100"  # with details of TCP
    near = simulate(one_nic, TINY, layout, **run)
    assert any("because links have details" in note for note in near.notes)
    with pytest.raises(
        ConfigError, match="because faults change links and the ranks of a group share links; use fewer"
    ):
        simulate(one_nic, TINY, layout, faults=[LinkFault("h0.cpu", "switch", "0 s", "1 s", factor=0.5)], **run)
    monkeypatch.setattr(parallel, "MOST_WRITTEN", 1000)
    with pytest.raises(ConfigError, match="limit of 1,000"):
        _ = plain.plan
