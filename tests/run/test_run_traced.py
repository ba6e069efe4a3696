"""Traced layer times reach whole runs: from Python, from files, and with errors for people."""

import json

import numpy as np
import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.study import load_study

#: class, forward and backward us of every module of digits-cnn
MODULES = [
    ("Conv2d_0", 40, 50), ("ReLU_0", 3, 4), ("MaxPool2d_0", 10, 12), ("Conv2d_1", 60, 130), ("ReLU_1", 2, 3),
    ("MaxPool2d_1", 5, 6), ("Flatten_0", 1, 1), ("Linear_0", 7, 14),
]  # fmt: skip


def span(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 7, "ts": ts, "dur": dur, "args": args}


def write(path, modules=MODULES, shape=(32, 1, 8, 8)):
    """Write the trace of one step: the modules one after the other, then backwards."""
    events, now, backward = [], 10.0, []
    for number, (name, forward_us, backward_us) in enumerate(modules):
        shapes = {} if shape is None else {"Input Dims": [list(shape), [8, 1, 3, 3]]}
        events.append(span(f"nn.Module: {name}", now, forward_us, "python_function"))
        events.append(span("aten::op", now + 0.1, 0.5, **{"Sequence number": number}, **shapes))
        backward.append((number, backward_us))
        now += forward_us + 1
    for number, us in reversed(backward):
        name = "autograd::engine::evaluate_function: OpBackward0"
        events.append(span(name, now, us, **{"Sequence number": number, "Fwd thread id": 1}))
        now += us + 1
    events.append(span("ProfilerStep#1", 0.0, now + 5, "user_annotation"))
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.json")


def experiment(compute, **more):
    return ddlsim.Experiment("office-1gbe", "digits-cnn", workers=2, steps=3, compute=compute, **more)


def test_a_run_takes_the_traced_time_of_every_layer(trace):
    traced = ddlsim.Traced(trace)
    assert traced.batch_size == 32
    result = ddlsim.simulate(experiment(traced))
    (workload,) = {id(w): w for w in result.workloads}.values()
    assert workload.forward * 1e6 == pytest.approx([m[1] for m in MODULES])
    assert workload.backward * 1e6 == pytest.approx([m[2] for m in MODULES])
    assert workload.basis.startswith("profile of 8 modules in trace.json at batch 32; rest: roofline of desktop-cpu")
    alone = ddlsim.simulate(experiment(traced).with_(workers=1))
    assert alone.step_time == pytest.approx(348e-6 + workload.optimizer)
    manifest = result.to_dict()["experiment"]
    assert manifest["compute"] == {"type": "traced", "path": str(trace), "batch_size": 32}


def test_slower_workers_take_longer(trace):
    run = ddlsim.simulate(experiment(ddlsim.Traced(trace), speed=(1.0, 0.5)))
    assert run.workloads[1].step_time == pytest.approx(2 * run.workloads[0].step_time)


def test_experiment_files_name_a_trace_beside_them(trace, tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(
        'cluster = "office-1gbe"\nmodel = "digits-cnn"\nworkers = 2\nsteps = 3\n'
        'compute = { type = "traced", path = "trace.json" }\n'
    )
    by_file, by_hand = ddlsim.simulate(ddlsim.load_experiment(path)), ddlsim.simulate(experiment(ddlsim.Traced(trace)))
    assert by_file.throughput == by_hand.throughput
    path.write_text(path.read_text().replace("trace.json", "missing.json"))
    with pytest.raises(ConfigError, match=r"experiment.toml: compute: .*missing.json"):
        ddlsim.load_experiment(path)


def test_studies_vary_traces_beside_their_file(trace, tmp_path):
    write(tmp_path / "slow.json", [(name, 3 * forward, 3 * backward) for name, forward, backward in MODULES])
    path = tmp_path / "study.toml"
    path.write_text(
        '[base]\ncluster = "office-1gbe"\nmodel = "digits-cnn"\nworkers = 2\nsteps = 3\n[vary]\n'
        'compute = [{ type = "traced", path = "trace.json" }, { type = "traced", path = "slow.json" }]\n'
    )
    fast, slow = (ddlsim.simulate(point.experiment) for point in load_study(path).points)
    assert slow.workloads[0].forward_time == pytest.approx(3 * fast.workloads[0].forward_time)


def test_the_times_are_a_part_of_the_experiment(trace):
    """Written over, the file no longer counts: what was read does, and two contents are two experiments."""
    before = ddlsim.Traced(trace)
    write(trace, [(name, 2 * forward, backward) for name, forward, backward in MODULES])
    after = ddlsim.Traced(trace)
    assert before != after
    times = [ddlsim.simulate(experiment(t)).workloads[0].forward_time for t in (before, after)]
    assert times == pytest.approx([128e-6, 256e-6])


def test_what_does_not_fit_is_said(trace, tmp_path):
    traced = ddlsim.Traced(trace)
    with pytest.raises(ConfigError, match=r"trace\.json: the trace has batch_size = 32, not 64"):
        ddlsim.simulate(experiment(traced, batch_size=64))
    with pytest.raises(ConfigError, match=r"the trace has 1 modules of type 'dense', but the model 'lenet5'"):
        ddlsim.simulate(experiment(traced).with_(model="lenet5"))
    unknown = write(tmp_path / "unknown.json", [*MODULES, ("MyAttention_0", 1, 1)])
    with pytest.raises(
        ConfigError,
        match=r"unknown.json: no layer type corresponds to the class of module 'MyAttention_0' in the trace",
    ):
        ddlsim.simulate(experiment(ddlsim.Traced(unknown)))
    bare = write(tmp_path / "bare.json", [])
    with pytest.raises(
        ConfigError, match=r"bare\.json: the trace contains no layers; record it with .*with_stack=True"
    ):
        ddlsim.Traced(bare)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        ddlsim.Traced(trace, batch_size=0)


def test_a_trace_without_shapes_needs_its_batch_size(tmp_path):
    path = write(tmp_path / "trace.json", shape=None)
    with pytest.raises(
        ConfigError, match=r"trace\.json: the trace contains no batch size; use Traced\(path, batch_size=32\)"
    ):
        ddlsim.Traced(path)
    assert ddlsim.Traced(path, batch_size=32).batch_size == 32


def test_overlap_follows_the_traced_layers(tmp_path):
    """All backward time in the first layer: the last layer's bucket leaves at once; all in the last: nothing hides."""
    ends = []
    for slow in (0, 7):
        modules = [(name, 1, 5000 if i == slow else 1) for i, (name, _, _) in enumerate(MODULES)]
        compute = ddlsim.Traced(write(tmp_path / f"{slow}.json", modules))
        run = ddlsim.simulate(experiment(compute).with_(strategy=ddlsim.AllReduce(overlap="layer")))
        ends.append(np.mean(run.step_times))
    assert ends[0] < ends[1]
