"""Compute is slower beside communication: work is conserved, whatever overlaps."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from draws import few
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import star
from ddlsim.run import run

TWO_LAYERS = """
title = "Two dense layers"
input = [1000]
layers = [{ type = "dense", units = 1000 }, { type = "dense", units = 1000 }]
"""


def seconds_of_work(result, rank, factor):
    """Return the seconds of each task of a worker, done at 1 / `factor` of its speed beside any of its exchanges."""
    spans = result.recorder.spans
    busy = [
        (s.start, s.end) for s in spans if s.track == f"worker {rank} network"
        or (s.name == "message" and s.track == f"worker {(rank + 2) % 4} network")  # which the worker receives
        or s.name.endswith(f"with worker {rank}") or s.name.endswith(f"to worker {rank}")
    ]  # fmt: skip
    tasks = []
    for span in (s for s in spans if s.track == f"worker {rank}" and s.kind == "compute"):
        edges = {span.start, span.end, *(e for pair in busy for e in pair if span.start < e < span.end)}
        points, work = sorted(edges), 0.0
        for begin, end in itertools.pairwise(points):
            beside = any(start <= begin and end <= until for start, until in busy)
            work += (end - begin) / (factor if beside else 1.0)
        tasks.append(work)
    return tasks


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "two-layers.toml"
    path.write_text(TWO_LAYERS)
    return path


def test_the_part_of_the_backward_pass_beside_an_all_reduce_takes_longer(two_layers):
    """4 ms forward, 8 ms backward, both layers alike; 4.004 MB a layer, on a link that takes 2 ms for it, twice 1/2."""

    def step_time(factor):
        return ddlsim.simulate(
            star(2, bandwidth="2.002 GB/s", latency="0 s"), two_layers, ddlsim.AllReduce("ring", overlap="layer"),
            batch_size=1, compute=ddlsim.Measured("12 ms", batch_size=1), overlap_slowdown=factor,
        ).step_time  # fmt: skip

    assert step_time(1.0) == pytest.approx(14e-3, rel=1e-12)
    # Beside the 2 ms of the first all-reduce 2 / 1.6 ms of the 4 ms of the second layer's backward pass are done
    assert step_time(1.6) == pytest.approx(14e-3 + (2 - 2 / 1.6) * 1e-3, rel=1e-12)


@pytest.mark.parametrize(("strategy", "beside"), [
    (ddlsim.DPSGD("ring"), 4.0),  # two messages at the same time
    (ddlsim.ADPSGD("ring"), 8.0),  # a message and its answer
    (ddlsim.GossipSGD(1.0), 4.0),
])  # fmt: skip
@pytest.mark.parametrize("factor", [1.0, 1.6, 3.0])
def test_messages_between_peers_slow_both_ends_down(two_layers, strategy, beside, factor):
    """8.008 MB take 4 ms; a step computes for 12 ms, beside messages that last `background` ms."""
    result = ddlsim.simulate(
        star(2, bandwidth="2.002 GB/s", latency="0 s"), two_layers, strategy, batch_size=1, steps=4,
        compute=ddlsim.Measured("12 ms", batch_size=1), overlap_slowdown=factor,
    )  # fmt: skip
    ends = sorted({round(time, 9) for time, _ in result.measured_updates})
    assert ends[2] - ends[1] == pytest.approx((12.0 + beside - beside / factor) * 1e-3, rel=1e-6)


STRATEGIES = {
    "ddp": ddlsim.AllReduce("ring", overlap=ddlsim.DdpBuckets("1 MiB")),
    "priority": ddlsim.AllReduce("ring", overlap=ddlsim.Priority("1 MiB")),
    "horovod": ddlsim.AllReduce("ring", overlap="horovod"),
    "known": ddlsim.AllReduce("ring", cost="nccl"),
    "servers": ddlsim.ParameterServer(2, overlap="layer"),
    "servers that work": ddlsim.ParameterServer(2, "colocated", overlap="layer", work=ddlsim.ServerWork("5 GB/s")),
    "top-k": ddlsim.AllReduce("ring", overlap=ddlsim.DdpBuckets("1 MiB")),
    "zero-1": ddlsim.ShardedUpdate(overlap="layer"),
    "fsdp": ddlsim.FSDP(stage=3),
    "pipeline": ddlsim.Parallel(pipeline=2, data=2, micro_batch=4),
    "ad-psgd": ddlsim.ADPSGD("ring"),
    "gossip": ddlsim.GossipSGD(0.5),
}


@pytest.mark.parametrize("name", few(sorted(STRATEGIES), 3))
@settings(max_examples=3, deadline=None)
@given(factor=st.floats(1.05, 4.0), slow=st.booleans())
def test_work_is_conserved(name, factor, slow):
    strategy = STRATEGIES[name]
    shared = name in ("fsdp", "pipeline")  # batch_size is that of all workers
    experiment = ddlsim.Experiment(
        "dgx-a100-pod", "resnet18", strategy, batch_size=32 if shared else 8, workers=[0, 1, 8, 9],
        steps=2, warmup=0, device="v100", precision="fp16" if name == "fsdp" else "fp32",
        slowdowns=[ddlsim.Slowdown([0, 2], "5 ms", "3 ms", 2.0)] if slow else (),
        overlap_slowdown=factor, compression=ddlsim.TopK(0.1) if name == "top-k" else None,
    )  # fmt: skip
    plain = experiment.with_(overlap_slowdown=1.0, slowdowns=())
    slower, before = (run(each, keep_spans=True) for each in (experiment, plain))
    assert slower.recorder.seconds[0]["compute"] > before.recorder.seconds[0]["compute"] * (1 + 1e-9)
    for rank in range(4):
        with_it, without = seconds_of_work(slower, rank, factor), seconds_of_work(before, rank, 1.0)
        n = min(len(with_it), len(without)) - 1  # the run ends in the middle of the last one
        if slow and rank in (0, 2):
            assert sum(with_it[:n]) > sum(without[:n])
        else:
            assert n > 4
            assert with_it[:n] == pytest.approx(without[:n], rel=1e-9, abs=1e-12)


def test_the_larger_of_two_factors_counts_and_each_for_its_exchanges():
    def step_time(*factors, workers=(0, 1, 8, 9)):
        return ddlsim.simulate(
            "dgx-a100-pod", "resnet18", ddlsim.AllReduce("ring"), batch_size=8, workers=workers,
            overlap_slowdown=ddlsim.OverlapSlowdown(*factors),
        ).step_time  # fmt: skip

    assert step_time(2.0, 1.0) == step_time(1.0, 1.0)  # the ring of four leaves the machines
    assert step_time(1.5, 2.0) == step_time(1.0, 2.0) > step_time(1.0, 1.0)
    assert step_time(1.0, 2.0, workers=(0, 1)) == step_time(1.0, 1.0, workers=(0, 1))
    assert step_time(2.0, 1.0, workers=(0, 1)) > step_time(1.0, 1.0, workers=(0, 1))


@pytest.mark.parametrize(("strategy", "options"), [
    (ddlsim.AsyncParameterServer(), {}),
    (ddlsim.KSync(2), {}),
    (ddlsim.ADPSGD(), {"failures": ddlsim.Failures("20 s"), "max_time": "60 s"}),
])  # fmt: skip
def test_a_note_says_that_it_has_no_effect(strategy, options):
    result = ddlsim.simulate("office-1gbe", "resnet18", strategy, workers=4, overlap_slowdown=1.2, **options)
    assert any(note.startswith("overlap_slowdown has no effect") for note in result.notes)


@pytest.mark.parametrize(("cluster", "workers", "factors", "why"), [
    ("office-1gbe", 4, (1.3, 1.3), "no worker computed while it communicated"),
    ("office-1gbe", 4, (2.0, 1.0), "every machine has one worker; set between"),
    ("office-1gbe", 1, (2.0, 2.0), "a single worker does not communicate"),
    ("dgx1-v100-16", 16, (2.0, 1.0), "no worker computed during communication inside machines; set between"),
])  # fmt: skip
def test_a_note_says_that_nothing_overlaps(cluster, workers, factors, why):
    """The only bucket of lenet5 is sent after the backward pass; the ring of 16 leaves the machines."""
    slowdown = ddlsim.OverlapSlowdown(*factors)
    result = ddlsim.simulate(cluster, "lenet5", batch_size=8, workers=workers, overlap_slowdown=slowdown)
    assert result.step_time == ddlsim.simulate(cluster, "lenet5", batch_size=8, workers=workers).step_time
    assert f"overlap_slowdown has no effect: {why}" in result.notes


@pytest.mark.parametrize(("value", "text"), [
    (0.9, r"overlap_slowdown = 0\.9: must be .* 1"), (math.nan, "overlap_slowdown"), ("fast", "overlap_slowdown"),
])  # fmt: skip
def test_factors_below_one_are_refused(value, text):
    with pytest.raises(ddlsim.ConfigError, match=text):
        ddlsim.simulate("office-1gbe", "resnet18", overlap_slowdown=value)


def test_files_say_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('cluster = "office-1gbe"\nmodel = "resnet18"\noverlap_slowdown = 1.25\n')
    assert ddlsim.load_experiment(path).overlap_slowdown == ddlsim.OverlapSlowdown(1.25, 1.25)
    path.write_text('cluster = "office-1gbe"\n[overlap_slowdown]\ntype = "overlap-slowdown"\nbetween = 1.1\n')
    assert ddlsim.load_experiment(path).overlap_slowdown == ddlsim.OverlapSlowdown(between=1.1)


def test_a_slow_down_of_the_stack_is_not_reported_as_set():
    """Workers of servers never compute while they communicate; only a user who asks for a slow-down is told."""
    parts = "dgx-h100-pod", "gpt2", ddlsim.AsyncParameterServer()
    notes = [ddlsim.simulate(*parts, workers=4, steps=2, overlap_slowdown=by).notes for by in (None, 1.5)]
    assert ["overlap_slowdown" in " ".join(each) for each in notes] == [False, True]


LLAMA = "llama-3-8b+layers=2+seq=2048"


def llama(strategy, stack="torchtitan", cluster="dgx-h100-pod", workers=(0, 1, 8, 9), **options):
    """Seconds that rank 0 computes in two steps of two layers."""
    run = {"batch_size": 4 * len(workers) if isinstance(workers, tuple) else 8, "steps": 2, "warmup": 0} | options
    result = ddlsim.simulate(cluster, LLAMA, strategy, workers=workers, stack=stack, **run)
    return result.recorder.seconds[0]["compute"]


def with_channels(n, **options):
    return dataclasses.replace(ddlsim.load_stack("torchtitan"), network_channels=n, **options)


@pytest.mark.parametrize(("strategy", "workers", "channels"), [
    (ddlsim.FSDP(), (0, 1, 8, 9), 8),  # two interfaces in each machine
    (ddlsim.FSDP(), (0, 8, 16), 4),
    (ddlsim.FSDP(shard=2), (0, 1, 8, 9), 4),  # only replicas communicate between machines, one GPU in each
    (ddlsim.Parallel(tensor=2, data=2, overlap="layer"), (0, 1, 8, 9), 4),
    (ddlsim.Parallel(tensor=2, pipeline=2, micro_batch=2), (0, 1, 8, 9), 2),  # messages
])  # fmt: skip
def test_a_group_occupies_the_channels_of_its_interfaces(strategy, workers, channels):
    expected = llama(strategy, with_channels(channels), workers=workers)
    assert llama(strategy, workers=workers) == expected
    assert expected < llama(strategy, with_channels(16), workers=workers)


@pytest.mark.parametrize("strategy", [ddlsim.FSDP(), ddlsim.FSDP(shard=2), ddlsim.Parallel(tensor=2, data=2)])
def test_in_one_machine_the_stack_s_channels_count(strategy):
    once, other = (llama(strategy, with_channels(n), workers=4) for n in (None, 0))
    assert once == other < llama(strategy, with_channels(None, channels=32), workers=4)


def test_what_the_user_sets_counts():
    """An explicit factor hides the stack's, whatever the number of channels."""
    given = [llama(ddlsim.FSDP(), with_channels(n), overlap_slowdown=1.2) for n in (None, 0, 32)]
    assert given[0] == given[1] == given[2] != llama(ddlsim.FSDP())


def test_groups_of_several_kinds_count_at_the_same_time():
    """Replicas with one GPU per machine and shards inside a machine: at most as slow as if all used the most."""
    both = ddlsim.FSDP(shard=2)
    most, least = llama(both, with_channels(16)), llama(both, with_channels(0))
    assert least < llama(both) < most
