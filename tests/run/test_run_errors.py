"""What does not fit is refused in one line that names field, value and remedy."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest

import ddlsim
from ddlsim import (
    AllReduce,
    AsyncParameterServer,
    BackupWorkers,
    ConfigError,
    DataSet,
    DdlsimError,
    DdpBuckets,
    Experiment,
    HorovodFusion,
    LocalSGD,
    Measured,
    ParameterServer,
    Priority,
    ShardedUpdate,
    Slowdown,
    Training,
    resume,
    simulate,
)
from ddlsim.cluster import MultiGpu, star

STAR = star(4, bandwidth="10 Gbit/s", latency="10 us")
LENET = ddlsim.load_model("lenet5")
WITHOUT_PARAMETERS = dataclasses.replace(LENET, name="flat", layers=[x for x in LENET.layers if not x.n_params])


def two_islands() -> nx.MultiDiGraph:
    """h0 and h1, and h2 and h3, without a link between the pairs."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([f"h{i}" for i in range(4)], kind="host")
    for a, b in (("h0", "h1"), ("h2", "h3")):
        graph.add_edge(a, b, bandwidth=1e9, latency=1e-6)
        graph.add_edge(b, a, bandwidth=1e9, latency=1e-6)
    return graph


def attempt(**changes: Any) -> object:
    return simulate(**{"cluster": STAR, "model": "lenet5", "batch_size": 8, "steps": 1, "warmup": 0, **changes})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workers": 5}, "workers = 5: cluster 'star-4' has only 4 devices; use at most 4"),
    ({"workers": 0}, "workers = 0: must be a positive integer"),
    ({"workers": True}, "workers = True: must be a positive integer"),
    ({"workers": 2.0}, "workers = 2.0: must be a positive integer"),
    ({"model": "lenet"}, "unknown model 'lenet'; did you mean 'lenet5'?"),
    ({"model": "no/such.toml"}, "no/such.toml: no such file"),
    ({"model": WITHOUT_PARAMETERS}, "model 'flat' has no parameters; add a layer to train, such as dense"),
    ({"cluster": "dgx1-v10"}, "unknown cluster 'dgx1-v10'; did you mean 'dgx1-v100'?"),
    ({"strategy": AllReduce("ring", rank_order=(0, 1))}, "must contain each rank from 0 to 3 once"),
    ({"strategy": "ring"}, "strategy = 'ring': must be a strategy such as ddlsim.AllReduce('ring') or FSDP()"),
    ({"strategy": AllReduce}, "(Splits are only for recommend and studies); create an instance: AllReduce(...)"),
    ({"device": "v10"}, "unknown device 'v10'; did you mean 'v100'?"),
    ({"device": 5}, "device = 5: must be a name such as 'v100', a device file, a Device object or None"),
    ({"device": "v100", "precision": "fp61"}, "precision = 'fp61': must be one of fp32, tf32, fp16, bf16, fp8, "),
    ({"device": "k80", "precision": "fp16"}, "precision: k80 does not support matrix products in fp16; supported: f"),
    ({"gradient_dtype": "fp8"}, "gradient_dtype = 'fp8': must be 'fp32', 'fp16' or 'bf16'; did you mean 'fp32'?"),
    ({"batch_size": 0}, "batch_size = 0: must be a positive integer"),
    ({"batch_size": 1.5}, "batch_size = 1.5: must be a positive integer"),
    ({"steps": 0}, "steps = 0: must be a positive integer"),
    ({"steps": "10"}, "steps = '10': must be a positive integer"),
    ({"warmup": -1}, "warmup = -1: must be a non-negative integer"),
    ({"accumulation": 0}, "accumulation = 0: must be a positive integer"),
    ({"seed": -1}, "seed = -1: must be a non-negative integer"),
    ({"max_time": 0.0}, "max_time = 0.0: must be above 0, e.g. '8 h'"),
    ({"max_time": float("nan")}, "max_time = nan: must be above 0, e.g. '8 h'"),
    ({"max_time": "3 GB"}, "'3 GB' is a size, not a time"),
    ({"max_time": 1e-9}, "max_time = 1e-09 s: the run ends before its first update"),
    ({"speed": [1.0, 2.0]}, "speed has 2 factors for 4 workers; pass one per worker"),
    ({"max_time": True}, "max_time = True: must be a number or a string like '8 h'"),
    ({"speed": [1.0, 1.0, 1.0, 0.0]}, "speed[3] = 0.0: must be finite and above 0"),
    ({"speed": ["fast"] * 4}, "speed[0] = 'fast': must be a finite number above 0"),
    ({"speed": 2.0}, "speed = 2.0: must be a list"),
    ({"speed": []}, "speed = (): must contain one factor above 0 per worker"),
    ({"modell": "lenet5"}, "simulate: unknown argument 'modell'; did you mean 'model'?"),
    ({"slowdowns": [3]}, "slowdowns[0] = 3: must be a Slowdown"),
    ({"slowdowns": Slowdown(9, 0.0, 1.0, 2.0)}, "but there are only 4 workers"),
    ({"jitter": "exponential"}, "jitter = 'exponential': must be a jitter model such as ddlsim.Lognormal(0.1)"),
    ({"jitter": 0.3}, "jitter = 0.3: must be a jitter model such as ddlsim.Lognormal(0.1)"),
    ({"compute": "97 ms"}, "compute = '97 ms': must be a Measured, Affine, PerKernel, Roofline or Traced object"),
    ({"compute": Measured("1 ms", 16)}, "the step was measured with batch_size = 16, not 8"),
    ({"cluster": two_islands()}, "no path from 'h0' to 'h2'; add a link, or use only one of the two nodes"),
    (
        {"cluster": two_islands(), "workers": 2, "strategy": ParameterServer()},
        "no path from 'h0' to 'h2'; add a link, or use only one of the two nodes",
    ),
    (
        {"strategy": ParameterServer(1)},
        "servers = 1, placement = 'own': cluster 'star-4' has no machines without workers; "
        "use fewer servers, fewer workers, or placement 'colocated'",
    ),
    (
        {"strategy": AsyncParameterServer(3), "workers": 2},
        "servers = 3, placement = 'own': cluster 'star-4' has 2 machines without workers",
    ),
    (
        {"strategy": AsyncParameterServer(3), "workers": 3},
        "servers = 3, placement = 'own': cluster 'star-4' has 1 machine without workers",
    ),
    (
        {"strategy": ParameterServer(5, "colocated")},
        "cluster 'star-4' has 4 machines with workers; use fewer servers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_simulate_refuses(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DdlsimError) as caught:
        attempt(**changes)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


PARTS: list[tuple[Callable[[], object], str]] = [
    (lambda: AllReduce("rings"), "AllReduce: unknown all_reduce algorithm 'rings'; did you mean 'ring'?"),
    (lambda: Training("digits", rate=0.1, updates=10**29), "must be at most 1000000000"),
    (lambda: DataSet("d", np.full((2, 1, 2, 2), np.nan, np.float32), np.array([0, 1]), ("a", "b")), "finite numbers"),
    (lambda: LocalSGD(4, algorithm="rign"), "LocalSGD: unknown all_reduce algorithm 'rign'; did you mean 'ring'?"),
    (lambda: ShardedUpdate(all_gather="auto"), "ShardedUpdate: unknown all_gather algorithm 'auto'"),
    (lambda: AllReduce("no_such_module:f"), "'no_such_module'; expected 'package.module:function'"),
    (lambda: AllReduce(algoritm="ring"), "AllReduce: unknown argument 'algoritm'; did you mean 'algorithm'?"),
    (lambda: BackupWorkers(1, restart="no"), "BackupWorkers: restart = 'no': must be True or False"),
    (lambda: AllReduce("ring", "dpp"), "unknown overlap 'dpp'; did you mean 'ddp'?"),
    (lambda: AllReduce("ring", 3), "overlap = 3: must be one of none, layer, ddp, horovod, priority, while-waiting"),
    (lambda: AllReduce("ring", DdpBuckets), "or a policy such as DdpBuckets('25 MiB')"),
    (lambda: AllReduce(3), "AllReduce: algorithm = 3: must be a name such as 'ring', or a function"),
    (lambda: AllReduce(rank_order="topologi"), "list of ranks, 'given' or 'topology'; did you mean 'topology'?"),
    (lambda: AllReduce(rank_order=["a"]), "rank_order[0] = 'a': must be a non-negative integer"),
    (lambda: DdpBuckets("25 s"), "'25 s' is a time, not a size"),
    (lambda: DdpBuckets(0), "DdpBuckets: cap = 0: must be finite and above 0, e.g. '25 MiB'"),
    (lambda: DdpBuckets(first=None), "DdpBuckets: first = None: must be a number or a string like '25 MiB'"),
    (lambda: HorovodFusion(cycle_time=0), "HorovodFusion: cycle_time = 0: must be finite and above 0, e.g. '1 ms'"),
    (lambda: HorovodFusion(cycle_time="inf s"), "HorovodFusion: cycle_time"),
    (lambda: HorovodFusion(threshold=-1.0), "HorovodFusion: threshold = -1.0: must be finite and above 0"),
    (lambda: Priority(in_flight=0), "Priority: in_flight = 0: must be a positive integer"),
    (lambda: Priority(partition=0.0), "Priority: partition = 0.0: must be finite and above 0"),
    (lambda: ParameterServer(0), "ParameterServer: servers = 0: must be a positive integer"),
    (lambda: ParameterServer(1.5), "ParameterServer: servers = 1.5: must be a positive integer"),
    (lambda: ParameterServer(1, "collocated"), "placement = 'collocated': must be 'own' or 'colocated'"),
    (lambda: AsyncParameterServer(apply_time=-1.0), "apply_time = -1.0: must be finite and not negative"),
]  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), PARTS, ids=[text[:60] for _, text in PARTS])
def test_parts_refuse(make: Callable[[], object], text: str) -> None:
    if text == "HorovodFusion: cycle_time":  # the reader of units refuses this one
        text = "'inf s' is not finite"
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"), [({"workers": 2}, "workers"), ({"batch_size": 16}, "batch_size"), ({"seed": 1}, "seed")]
)
def test_an_experiment_takes_no_second_set_of_arguments(changes: dict[str, Any], field: str) -> None:
    experiment = Experiment(STAR, "lenet5", steps=1, warmup=0)
    assert simulate(experiment).n_workers == 4
    with pytest.raises(ConfigError, match=f"{field} has no effect if an experiment is passed; use experiment.with_"):
        simulate(experiment, **changes)
    assert simulate(experiment.with_(**changes)).experiment.manifest()[field] == changes[field]


def test_simulate_takes_the_fields_of_an_experiment_and_four_options() -> None:
    arguments, fields = (inspect.signature(each).parameters for each in (simulate, Experiment))
    assert [name for name in arguments if name not in fields] == [
        "stability", "progress", "checkpoint", "checkpoint_every"
    ]  # fmt: skip
    for name, field in fields.items():
        assert (arguments[name].default, arguments[name].kind) == (field.default, field.kind)
    for name in ("stability", "checkpoint_every"):
        assert arguments[name] == inspect.signature(resume).parameters[name]
        assert arguments[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_batch_that_does_not_fit_is_a_warning() -> None:
    """VGG-16 stores some 15 million activations a sample: 4 bytes each x 4,096 samples do not go into 16 GB.
    The prediction stands; the warning says what is needed, what is there and what would fit."""
    cluster = star(2, bandwidth="10 Gbit/s", latency="10 us", host=MultiGpu(n_gpus=1, device="v100"))
    result = simulate(cluster, "vgg16", batch_size=4096, steps=1, warmup=0)
    (warning,) = result.warnings
    need = 12 * 138357544 + 4 * result.workloads[0].model.activation_nbytes / 4 * 4096
    assert f"vgg16 with batch size 4096 in fp32 needs about {need / 1e9:.1f} GB, but v100 has 17.2 GB" in warning
    largest = int(warning.rsplit(" ", 1)[1])
    assert simulate(cluster, "vgg16", batch_size=largest, steps=1, warmup=0).warnings == ()
    assert simulate(cluster, "vgg16", batch_size=largest + 1, steps=1, warmup=0).warnings


def test_max_time_ends_the_run() -> None:
    """Updates at t, 2t, ...: after 2.5 t there are two, and everything is measured over these."""
    whole = simulate(STAR, "lenet5", batch_size=8, steps=4, warmup=0)
    step = float(whole.step_times[0])
    result = simulate(STAR, "lenet5", batch_size=8, steps=4, warmup=0, max_time=2.5 * step)
    assert len(result.recorder.updates) == 2
    assert result.end_time == pytest.approx(2.5 * step, rel=1e-12)
    assert result.throughput == pytest.approx(whole.throughput, rel=1e-9)
    text = simulate(STAR, "lenet5", batch_size=8, steps=4, warmup=0, max_time=f"{2.5 * step * 1e6:.6f} us")
    assert len(text.recorder.updates) == 2


def test_a_field_is_no_method():
    """A user's field may have the name of an optional method of strategies."""

    @dataclasses.dataclass(frozen=True)
    class Own(ddlsim.AllReduce):
        micro_batch_size: int = 4

    own, plain = (ddlsim.simulate("office-1gbe", "lenet5", each, 16, 4, steps=2) for each in (Own(), AllReduce()))
    assert own.throughput == plain.throughput


def tables(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(
        'title = "tables"\ninput = [4]\n'
        'layers = [{type = "embedding_bag", tables = [9, 9, 9, 9], dim = 4, pooling = 1},\n'
        '{type = "dense", units = 1}]\n',
        encoding="utf-8",
    )  # fmt: skip
    return str(path)


@pytest.mark.parametrize("function", [len, "os:system", lambda: None, "json:dumps"])
def test_functions_that_are_no_algorithm(tmp_path, function):
    """Errors name the algorithm and what it should take, not the callee's TypeError."""
    embedding = ddlsim.EmbeddingParallel(algorithm=function)
    for run in (
        lambda: ddlsim.collective_time("office-1gbe", function, "1 MB"),
        lambda: ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(function), 16, 4),
        lambda: ddlsim.simulate("office-1gbe", "lenet5", ddlsim.LocalSGD(2, algorithm=function), 16, 4),
        lambda: ddlsim.simulate("office-1gbe", tables(tmp_path), embedding, 16, 4),
    ):
        with pytest.raises(ConfigError, match=r"^collective .*Schedule"):
            run()


def test_days_are_a_unit_of_time():
    assert ddlsim.Experiment("office-1gbe", max_time="5 d").max_time == 5 * 86400.0


@pytest.mark.slow
def test_packages_are_reachable_as_documented():
    program = "import ddlsim; print(ddlsim.planner.guidelines.__name__, ddlsim.plan.Plan.__name__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ddlsim.planner.guidelines", "Plan"]
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = ddlsim.nothing_of_the_kind
