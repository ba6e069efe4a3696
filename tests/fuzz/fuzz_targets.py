"""Every reader of files, with documents for it and what must hold of that which it accepts."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
from fuzz_archives import saved_run as archive_of_a_run
from fuzz_archives import store as archive_of_a_study
from fuzz_attempt import sane, sane_number
from fuzz_documents import (
    _RATES,
    CALIBRATED,
    EXPERIMENT,
    EXPLICIT,
    GENERATED,
    GENERATORS,
    MEASUREMENTS,
    MEASUREMENTS_JSON,
    MODEL,
    RUNS,
    STEP_TIMES,
    STRATEGIES,
    STUDY,
    TOKENS,
    graph,
    graphml,
    importers,
)

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError
from ddlsim.imports import HorovodTimeline, KinetoTrace, MlperfRun, Timing, read_any
from ddlsim.learning import checkpoint as saved_runs
from ddlsim.measure import read_measurements
from ddlsim.plan import Plan
from ddlsim.report.html import _remarks, manifests_of
from ddlsim.run.files import load_experiment
from ddlsim.study import load_study, load_table
from ddlsim.study.store import Store
from ddlsim.study.table import OF_RUNS
from ddlsim.validation import load_calibration
from ddlsim.validation.run_table import read_runs
from ddlsim.validation.sources import read_sources
from ddlsim.workload.model import load_model


@dataclass(frozen=True)
class Target:
    """`read` takes the path of a file called `name`, and asserts that what it accepts makes sense."""

    title: str
    name: str
    language: str
    document: str | bytes
    read: Callable[[Path], None]


def cluster(path):
    made = load_cluster(path)
    sane_cluster(made)
    if made.calibration is not None:
        found = load_calibration(path)
        for parameter in found.parameters:
            sane_number(parameter.name, parameter.value)


def sane_cluster(made: Cluster):
    assert 1 <= len(made.node_names) <= 10**6
    for name in ("link_bandwidth", "channel_capacity", "speed", "link_efficiency"):
        sane(name, getattr(made, name), 1e-200)
        sane(f"1 / {name}", 1 / getattr(made, name))
    for name in ("link_latency", "send_overhead", "recv_overhead", "reduce_time"):
        sane(name, getattr(made, name))
    assert made.summary()
    made.to_graph()


def model(path):
    found = load_model(path)
    for name in ("n_params", "macs", "flops", "activation_nbytes"):
        sane_number(name, getattr(found, name))
    sane_number("gradient_nbytes", found.gradient_nbytes())
    assert found.n_params <= 1e14
    assert all(size >= 1 for layer in found.layers for size in (*layer.in_shape, *layer.out_shape))


def experiment(path):
    found = load_experiment(path)
    json.dumps(found.manifest(), allow_nan=True)


def study(path):
    found = load_study(path)
    try:
        assert 0 < len(found.points) <= 10**6
    except ConfigError as error:  # of a study, whose file it has forgotten
        raise ConfigError(f"{path}: {error}") from None


def measurements(path):
    for row in read_measurements(path):
        sane_number("median_s", row.median_s, 1e-200)
        sane_number("1 / median_s", 1 / row.median_s)
        sane_number("nbytes", row.nbytes)
        sane_number("n_ranks", row.n_ranks, 1)
    read_sources([path])


def runs(path):
    for row in read_runs(path):
        sane_number("throughput", row.throughput, 1e-200)
        sane_number("step_time", row.step_time, 1e-200)


def imported(kind):
    def read(path):
        found = read_any(path, kind=kind)
        if isinstance(found, Cluster):
            sane_cluster(found)
            return
        if isinstance(found, Plan):
            sane("plan", [*found.seconds, *found.nbytes])
            assert found.critical_path() >= 0.0
            assert str(found)
            return
        rows = found if isinstance(found, tuple) else ()
        if isinstance(found, KinetoTrace):
            rows = (*found.steps, *found.collectives)
            for layer in found.layers:
                sane("layer", [layer.forward_s, layer.backward_s, layer.n_calls])
            assert found.n_ranks >= 1
            assert found.batch_size >= 0
        elif isinstance(found, HorovodTimeline):
            rows = found.collectives
            for each in found.operations:
                sane("operation", [each.start_s, each.negotiation_s, each.seconds, each.transfer_s, each.nbytes])
        elif isinstance(found, MlperfRun):
            rows = found.timings
            known = [] if math.isnan(found.run_s) else [found.run_s]  # NaN: without beginning or end
            sane("run", [*known, found.global_batch_size, found.train_samples])
            sane("epochs", [seconds for _, seconds in found.epochs])
        for row in rows:
            assert isinstance(row, Timing)
            sane_number("seconds", row.seconds, 1e-200)
            for name in ("nbytes", "n_samples", "n_ranks", "bandwidth", "throughput"):
                sane_number(name, getattr(row, name))
            for name in ("min_s", "max_s", "n_reps"):
                if getattr(row, name) is not None:
                    sane_number(name, getattr(row, name))

    return read


def store(path):
    table = load_table(path)
    assert str(table)
    for frame in (table.frame, table.summary):
        for name in OF_RUNS:
            known = frame[name].dropna()
            sane(name, known, -1e-6)
    assert len(table.history) < 10**6
    assert manifests_of(table)
    for kind in ("warnings", "notes"):
        assert isinstance(_remarks(table, kind), list)
    with Store(path) as opened:
        opened.studies()
        opened.claim(["a", "b", "c"])


def saved_run(path):
    checkpoint, manifest = saved_runs.read(path)
    sane("losses", checkpoint.losses, -1e300)
    sane("times", checkpoint.times)
    assert isinstance(manifest, dict)
    assert checkpoint.replay.n_values >= 0


def targets() -> list[Target]:
    found = [
        Target("cluster: generated", "c.toml", "toml", GENERATED, cluster),
        Target("cluster: explicit", "c.toml", "toml", EXPLICIT, cluster),
        Target("cluster: calibrated", "c.toml", "toml", CALIBRATED, cluster),
        Target("cluster: GraphML", "c.graphml", "xml", graphml(), cluster),
        Target("model: images", "m.toml", "toml", MODEL, model),
        Target("model: tokens", "m.toml", "toml", TOKENS, model),
        Target("experiment: training", "e.toml", "toml", EXPERIMENT, experiment),
        Target("experiment: strategies", "e.toml", "toml", STRATEGIES, experiment),
        Target("saved run", "run.npz", "npz", archive_of_a_run(), saved_run),
        Target("store", "s.sqlite", "sqlite", archive_of_a_study(), store),
        Target("study", "s.toml", "toml", STUDY, study),
        Target("measurements: csv", "m.csv", "csv", MEASUREMENTS, measurements),
        Target("measurements: jsonl", "m.jsonl", "json", json.dumps(MEASUREMENTS_JSON), measurements),
        Target("runs: throughput", "r.csv", "csv", RUNS, runs),
        Target("runs: step time", "r.csv", "csv", STEP_TIMES, runs),
    ]
    for name, keys in GENERATORS.items():
        text = f'[generator]\ntype = "{name}"\n{_RATES}{keys}\n'
        found.append(Target(f"cluster: {name}", "c.toml", "toml", text, cluster))
    for kind in (nx.Graph, nx.DiGraph, nx.MultiGraph, nx.MultiDiGraph):
        text = json.dumps(nx.node_link_data(graph(kind), edges="edges"))
        found.append(Target(f"cluster: {kind.__name__}", "c.json", "json", text, cluster))
    for i, (kind, language, text) in enumerate(importers()):
        found.append(Target(f"import {i}: {kind}", "output.log", language, text, imported(kind)))
        found.append(Target(f"import {i}: {kind}?", "output.log", language, text, imported(None)))
    return found
