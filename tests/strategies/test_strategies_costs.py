"""Collectives whose time is known: by a measured curve, or as NCCL's tuner expects."""

import dataclasses
import itertools
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import yaml
from draws import few

import ddlsim
from ddlsim.cluster import generators
from ddlsim.collectives import build
from ddlsim.collectives.nccl import nccl_time
from ddlsim.collectives.nccl_choice import choose
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.network import Network
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.costs import Parts, columns, curve_seconds, parts_of, schedule_parts
from ddlsim.runtime.fabric import COSTS, Fabric
from ddlsim.runtime.loop import Loop, Traffic
from ddlsim.strategies.overlap import buckets_of, overlap_named
from ddlsim.validation import calibrate, load_calibration, predict_interval
from ddlsim.workload.buckets import per_layer

SWEEPS = Path(__file__).parents[2] / "accuracy" / "data" / "collectives.yaml"
CALIBRATED = ddlsim.AllReduce(cost="calibrated")


def sweep(case, n_ranks, n_hosts):
    """Return a published NCCL sweep (bytes -> us) as measurements."""
    (found,) = [c for c in yaml.safe_load(SWEEPS.read_text())["collectives"] if c["id"] == case]
    return [
        Measurement(
            experiment="collective", operation="all_reduce", n_ranks=n_ranks, n_hosts=n_hosts, nbytes=nbytes,
            median_s=1e-6 * us, backend="nccl",
        )
        for nbytes, us in found["data"].items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def a100():
    """Every third size of the sweep, 67 MB among them: fitting all of them takes eight times as long."""
    return calibrate(sweep("nccl_a100_8gpu_allreduce", 8, 1)[2::3], "dgx-a100-pod")


def experiment(cluster, strategy=CALIBRATED, **more):
    given = {"workers": 8, "steps": 3, "compute": ddlsim.Measured("60 ms", 32), **more}
    return ddlsim.Experiment(cluster, "resnet50", strategy, **given)


def network_spans(result, worker=0):
    """Return (name, start, end) of a worker's transfers."""
    return [s[2:] for s in result.traced.recorder.spans if s.track == f"worker {worker} network"]


@pytest.mark.parametrize("overlap", few(["none", "layer", "ddp"], 1, start=2))
def test_the_buckets_of_a_run_take_the_time_of_the_published_sweep(a100, overlap):
    strategy = ddlsim.AllReduce("nccl", overlap, cost="calibrated")
    result = ddlsim.simulate(experiment(a100.cluster, strategy))
    buckets = buckets_of(overlap_named(overlap), result.workloads[0])
    spans = network_spans(result)
    assert len(spans) == 5 * len(buckets)
    for i, bucket in enumerate(buckets):
        wanted = a100.time("all_reduce", bucket.nbytes, 8, 1)
        for name, start, end in spans:
            if name == f"bucket {i}":
                # the curve's time counts whole bytes; the file keeps six digits of its factors
                assert end - start == pytest.approx(wanted.value, rel=1e-4)


def test_a_measured_size_takes_what_was_measured(a100):
    """One bucket of 102.2 MB; the sweep has 684.6 us for 67 MB and 1327.6 us for 134 MB."""
    step = ddlsim.simulate(experiment(a100.cluster, ddlsim.AllReduce("nccl", "none", cost="calibrated"))).step_time
    assert 684.6e-6 < step - 60e-3 < 1327.6e-6


def test_without_stragglers_the_step_is_computing_and_the_curve(a100):
    strategy = ddlsim.AllReduce("nccl", "none", cost="calibrated")
    result = ddlsim.simulate(experiment(a100.cluster, strategy))
    wanted = a100.time("all_reduce", result.workloads[0].gradient_nbytes, 8, 1).value
    assert result.step_time == pytest.approx(60e-3 + wanted, rel=1e-6)
    assert result.shares["communication"] == pytest.approx(wanted / result.step_time, rel=1e-4)
    assert sum(result.shares.values()) == pytest.approx(1.0)


def test_a_straggler_holds_all_up(a100):
    """Half the speed: all-reduces start when the slow worker has joined; the others wait, which is booked so."""
    speed = (1.0,) * 7 + (0.5,)
    strategy = ddlsim.AllReduce("nccl", "none", cost="calibrated")
    result = ddlsim.simulate(experiment(a100.cluster, strategy, speed=speed))
    wanted = a100.time("all_reduce", result.workloads[0].gradient_nbytes, 8, 1).value
    assert result.step_time == pytest.approx(120e-3 + wanted, rel=1e-6)
    assert result.workers["waiting"][0] == pytest.approx(5 * 60e-3, rel=1e-6)
    assert result.workers["waiting"][7] == pytest.approx(0.0, abs=1e-12)


def test_the_collectives_of_one_group_run_one_after_the_other(a100):
    """Many tensors in flight at once, computing being nothing: the stream is busy all the time, never twice."""
    strategy = ddlsim.AllReduce("nccl", ddlsim.Priority("4 MB", 8), cost="calibrated")
    result = ddlsim.simulate(experiment(a100.cluster, strategy, compute=ddlsim.Measured("1 us", 32)))
    ends = sorted(end for _, _, end in network_spans(result))
    sizes = {b.nbytes for b in strategy.overlap.buckets(result.workloads[0])}
    times = [a100.time("all_reduce", n, 8, 1).value for n in sizes]
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    assert min(gaps) >= min(times) * 0.9999
    assert max(gaps) <= max(times) + 2e-6  # and the step's computing


def test_bytes_are_accounted_as_if_simulated(a100):
    simulated, known = (
        ddlsim.simulate(experiment(a100.cluster, ddlsim.AllReduce(cost=cost))) for cost in ("simulated", "calibrated")
    )
    assert known.nbytes_sent == pytest.approx(simulated.nbytes_sent)
    assert known.n_messages == simulated.n_messages
    assert known.channel_nbytes == pytest.approx(simulated.channel_nbytes)
    assert (known.links["busy"] <= 1.0).all()


def test_result_and_manifest_say_it(a100):
    result = ddlsim.simulate(experiment(a100.cluster))
    assert result.experiment.strategy.label == "all-reduce (nccl, ddp, calibrated cost)"
    assert any("measured curve of all_reduce by nccl; other traffic does not slow them down" in n for n in result.notes)
    assert not any("extrapolated" in note for note in result.notes)
    layers = ddlsim.simulate(experiment(a100.cluster, ddlsim.AllReduce("nccl", "layer", cost="calibrated")))
    (note,) = [note for note in layers.notes if "extrapolated" in note]
    assert note.startswith("the curve was measured from 131072 to 4294967296 bytes; ")


@pytest.mark.slow
def test_what_a_result_is_written_as_says_it(a100):
    """With the interval and the stability of the run: each of their runs looks for the rings of its cluster."""
    result = ddlsim.simulate(experiment(a100.cluster))
    assert result.to_dict()["experiment"]["strategy"]["cost"] == "calibrated"
    assert "calibrated cost" in str(result)


def test_a_file_gives_the_same_run(a100, tmp_path):
    path = tmp_path / "calibrated.toml"
    a100.save(path, "dgx-a100-pod")
    (tmp_path / "experiment.toml").write_text(
        'cluster = "calibrated.toml"\nmodel = "resnet50"\nworkers = 8\nsteps = 3\n'
        'compute = { type = "measured", step_time = "60 ms", batch_size = 32 }\n'
        'strategy = { type = "all-reduce", cost = "calibrated" }\n'
    )
    by_file = ddlsim.simulate(ddlsim.load_experiment(tmp_path / "experiment.toml"))
    assert by_file.throughput == pytest.approx(ddlsim.simulate(experiment(a100.cluster)).throughput, rel=1e-6)
    loaded = load_calibration(path)
    assert [c.per_byte for c in loaded.curves] == [pytest.approx(c.per_byte, rel=1e-5) for c in a100.curves]


@pytest.mark.parametrize("cost", COSTS)
def test_alone_every_cost_is_plain(a100, cost):
    strategy = ddlsim.AllReduce(cost=cost)
    alone = ddlsim.simulate(experiment(a100.cluster, strategy, workers=1))
    assert alone.step_time == pytest.approx(60e-3, rel=1e-9)


@pytest.mark.slow
def test_intervals_hold_the_curves_scatter():
    """Of one ring, whose curve does not go through all sizes."""
    a100 = calibrate(sweep("nccl_a100_8gpu_allreduce", 8, 1), "dgx-a100-pod", algorithms={"all_reduce": "ring"})
    strategy = ddlsim.AllReduce("ring", "none", cost="calibrated")
    base = experiment(a100.cluster, strategy, compute=ddlsim.Measured("1 us", 32))
    found = predict_interval(base, n_draws=20)
    wanted = a100.time("all_reduce", found.result.workloads[0].gradient_nbytes, 8, 1)
    low, high = np.quantile(found.throughputs, [0.025, 0.975])  # without what runs of this kind deviate besides
    width = high / low
    assert found.throughput.low < low < found.throughput.value < high < found.throughput.high
    assert (wanted.high / wanted.low) ** 0.4 < width < (wanted.high / wanted.low) ** 1.6
    (curve,) = a100.curves
    vaguer = dataclasses.replace(a100, curves=(dataclasses.replace(curve, spread=4 * curve.spread),))
    wider = predict_interval(base, vaguer, n_draws=20)
    assert wider.step_time.high / wider.step_time.low > width


# ------------------------------------------------------------ NCCL's tuner


@pytest.mark.parametrize(
    ("algorithm", "theirs"), [("ring", "ring"), ("double_binary_tree", "tree"), ("auto", None)], ids=lambda v: str(v)
)
def test_the_tuners_estimate_is_the_time_of_a_bucket(algorithm, theirs):
    cluster = ddlsim.load_cluster("cloud-25g-16x8-v100+n_hosts=2")
    strategy = ddlsim.AllReduce(algorithm, "layer", cost="nccl")
    result = ddlsim.simulate(experiment(cluster, strategy, workers=16, compute=ddlsim.Measured("1 s", 32), steps=1))
    spans = network_spans(result)
    for i, bucket in enumerate(per_layer(result.workloads[0])):
        wanted = nccl_time(cluster, bucket.nbytes, ranks=16, algorithm=theirs).seconds
        (first, *_) = [end - start for name, start, end in spans if name == f"bucket {i}"]
        assert first == pytest.approx(wanted)
    assert any(note.startswith("nccl: ") for note in result.notes)
    if algorithm == "double_binary_tree":
        assert {s.what for s in result.sensitivities()} >= {"compute speed", "bandwidth of nic"}


@pytest.mark.parametrize(("cluster", "n", "algorithm"), [
    ("dgx-h100-pod", 8, "nvls"), ("dgx-h100-pod", 16, "nvls_tree"),
    ("dgx-h100-pod+switch_reduces=true", 16, "nvls"), ("dgx-a100-pod+switch_reduces=true", 16, "collnet_direct"),
])  # fmt: skip
def test_switches_that_add_up_are_estimated_as_they_are_simulated(cluster, n, algorithm):
    """Within 30 %, besides the stages of NVLS that the tuner does not count; links carry what the schedule puts on."""
    name = f"nccl({algorithm})"
    runs = [
        ddlsim.simulate(
            cluster, "resnet50", ddlsim.AllReduce(name, "none", cost=cost), batch_size=32, workers=n, steps=1, warmup=0
        )
        for cost in ("nccl", "simulated")
    ]
    times = [max(end - start for _, start, end in network_spans(run)) for run in runs]
    at, nbytes = tuple(ddlsim.load_cluster(cluster).workers[:n].tolist()), runs[0].workloads[0].gradient_nbytes
    chosen = choose(ddlsim.load_cluster(cluster), at, nbytes, "all_reduce", algorithm)
    assert times[1] == pytest.approx(times[0] + 2.0 * chosen.fill, rel=0.3)
    assert runs[0].channel_nbytes == pytest.approx(runs[1].channel_nbytes)
    assert any(note.startswith(f"nccl: {algorithm} with Simple") for note in runs[0].notes)


def test_sharded_updates_and_local_sgd_know_their_collectives_too():
    """Between two updates lie a reduce-scatter and an all-gather; between two averages four steps."""
    cluster = ddlsim.load_cluster("dgx-a100-pod")
    sharded = ddlsim.simulate(experiment(cluster, ddlsim.ShardedUpdate(cost="nccl")))
    nbytes = sharded.workloads[0].gradient_nbytes
    scatter, gather = (nccl_time(cluster, nbytes, kind=k, ranks=8).seconds for k in ("reduce_scatter", "all_gather"))
    assert sharded.step_time == pytest.approx(60e-3 + scatter + gather, rel=1e-9)
    local = ddlsim.simulate(experiment(cluster, ddlsim.LocalSGD(4, cost="nccl"), steps=8, warmup=4))
    average = nccl_time(cluster, nbytes, ranks=8, algorithm="ring").seconds
    assert local.step_time == pytest.approx(60e-3 + average / 4, rel=1e-9)
    with pytest.raises(ConfigError, match=r"ShardedUpdate: cost = 'calibrated': .* measure reduce_scatter"):
        ddlsim.simulate(experiment(cluster, ddlsim.ShardedUpdate(cost="calibrated")))


# ------------------------------------------------------------ what cannot be


def refused(message, cluster, strategy=CALIBRATED, **more):
    with pytest.raises(ConfigError, match=message) as error:
        ddlsim.simulate(experiment(cluster, strategy, **more))
    assert "\n" not in str(error.value)


def test_what_has_no_curve_is_told_what_to_measure(a100):
    refused(
        r"AllReduce: cost = 'calibrated': cluster 'dgx-a100-pod' is not calibrated; measure all_reduce of at least 3 "
        r"sizes on 8 ranks inside a host \(python -m ddlsim.measure --only collective\), then ddlsim calibrate",
        "dgx-a100-pod",
    )
    refused("has no all_reduce curve between hosts; measure all_reduce .* on 16 ranks", a100.cluster, workers=16)
    refused("has all_reduce curves inside a host for 8 to 8 ranks, but not for 4; .* 4 ranks", a100.cluster, workers=4)
    cluster = ddlsim.load_cluster(a100.cluster)
    (curve,) = cluster.calibration.curves
    table = dataclasses.replace(cluster.calibration, curves=[dataclasses.replace(curve, ranks=[5, 8])])
    refused("for 5 to 8 ranks, but not for 4;", dataclasses.replace(cluster, calibration=table), workers=4)


def test_the_parts_of_a_time_by_hand():
    """Three latencies of 2 us and two overheads of 1 us are 8 us; 5 MB at 1 GB/s are 5 ms; 0.25 s are neither."""
    star = ddlsim.load_cluster(generators.star(2, bandwidth="8 Gbit/s", latency="2 us"))
    overhead = np.full_like(star.send_overhead, 1e-6)
    cluster = dataclasses.replace(star, send_overhead=overhead, recv_overhead=overhead)

    def seconds(c):
        messages = 3 * c.link_latency[0] + c.send_overhead[0] + c.recv_overhead[0]
        return messages + 5e6 / c.link_bandwidth[0] + 0.25

    parts = parts_of(seconds, cluster, 5e6)
    assert parts.nbytes == 5e6
    assert (parts.per_message, parts.per_byte, parts.reduction) == pytest.approx((8e-6, 5e-3, 0.25), rel=1e-9)


def test_the_parts_are_those_of_the_routes_that_are_taken():
    """Of two cables messages take that of 1 us and 8 Gbit/s; without any latency they would take the first one."""
    graph = nx.MultiGraph()
    graph.add_edge("a", "b", bandwidth="80 Mbit/s", latency="10 us")
    graph.add_edge("a", "b", bandwidth="8 Gbit/s", latency="1 us")
    cluster = ddlsim.load_cluster(graph)
    parts = parts_of(lambda c: ddlsim.collective_time(c, "binomial", 1e6, kind="broadcast"), cluster, 1e6)
    assert (parts.per_message, parts.per_byte, parts.reduction) == pytest.approx((1e-6, 1e-3, 0.0), abs=1e-12)


def test_the_latencies_of_nccls_schedules_are_per_message():
    """On eight A100, a ring with LL starts in 6.6 us and has 14 hops of 0.7 us; it sends 14/8 bytes at 87.7 GB/s."""
    cluster = ddlsim.load_cluster("dgx-a100-pod")
    nodes = cluster.workers[:8].tolist()
    schedule = build("nccl", 8, 1e5, cluster.host_of[nodes], "all_reduce", (cluster, nodes))
    parts = schedule_parts(cluster, schedule, nodes, 1e5)
    assert parts.per_message == pytest.approx(16.4e-6, rel=1e-9)
    assert parts.per_byte == pytest.approx(14 / 8 * 1e5 / 87.7e9, rel=1e-3)
    assert parts.reduction == pytest.approx(0.0, abs=1e-12)


def test_a_curve_by_hand():
    """Of 5 MB, 1 MB lies in the first piece and 4 MB in the second, at 1 ns a byte: 8 us x 2 + 1 ms x 3 + 4 ms x 0.5 +
    0.25 s. A million bytes end with the first piece."""
    parts = Parts(5e6, per_message=8e-6, per_byte=5e-3, reduction=0.25)
    assert columns([parts], [1_000_000])[0].tolist() == pytest.approx([8e-6, 1e-3, 4e-3])
    assert curve_seconds(parts, 2.0, [1_000_000], [3.0, 0.5]) == pytest.approx(16e-6 + 3e-3 + 2e-3 + 0.25)
    small = Parts(1e6, per_message=8e-6, per_byte=1e-3, reduction=0.0)
    assert curve_seconds(small, 1.0, [1_000_000], [3.0, 0.5]) == pytest.approx(8e-6 + 3e-3)


def test_what_the_curve_does_not_know_is_refused(a100):
    refused(
        "use algorithm = 'nccl', or calibrate with --algorithm all_reduce=double_binary_tree",
        a100.cluster, ddlsim.AllReduce("double_binary_tree", cost="calibrated"),
    )  # fmt: skip
    refused("has no all_gather curve inside a host; measure all_gather", a100.cluster, compression=ddlsim.TopK(0.01))
    refused(
        "NCCL has no algorithm 'halving_doubling'", "dgx-a100-pod", ddlsim.AllReduce("halving_doubling", cost="nccl")
    )
    with pytest.raises(ConfigError, match=r"AllReduce: cost = 'calibrate': must be .*; did you mean 'calibrated'"):
        ddlsim.AllReduce(cost="calibrate")


@pytest.mark.slow
def test_two_backends_cannot_both_be_meant():
    rows = sweep("nccl_a100_8gpu_allreduce", 8, 1)
    both = calibrate([*rows[::4], *[dataclasses.replace(r, backend="gloo") for r in rows[::4]]], "dgx-a100-pod")
    refused("was measured with several backends, 'gloo' and 'nccl'; calibrate with --backend", both.cluster)


def test_studies_vary_the_cost(a100):
    study = ddlsim.Study(experiment(a100.cluster), {"strategy.cost": ["simulated", "calibrated"]})
    rates = [ddlsim.simulate(point.experiment).throughput for point in study.points]
    assert rates[0] != rates[1]


def test_collectives_that_share_a_link_follow_each_other():
    """Replicas of two stages on the same machines: the interface carries one sum after the other."""
    loop = Loop(Network(ddlsim.load_cluster("office-1gbe")))
    busy = np.zeros((2, loop.network.n_channels))
    busy[0, :2], busy[1, 1:3] = 1.0, 1.0
    first, second = (Traffic(each, each, 1.0, 1) for each in busy)
    apart = np.zeros(loop.network.n_channels)
    apart[5] = 1.0
    assert loop.run_known(0.5, 1.0, first) == 1.5
    assert loop.run_known(0.5, 1.0, second) == 2.5
    assert loop.run_known(0.5, 1.0, Traffic(apart, apart, 1.0, 1)) == 1.5
    assert loop.run_known(3.0, 1.0, first) == 4.0


@pytest.mark.parametrize("prepared", [False, True])
def test_collectives_of_known_time_use_the_algorithm_with_which_they_are_entered(prepared):
    """A strategy enters all-reduces of two algorithms, one after the other; NCCL's estimates of them differ."""
    cluster, nbytes, times = ddlsim.load_cluster("cloud-25g-16x8-v100+n_hosts=2"), 1e6, {}

    @dataclasses.dataclass(frozen=True)
    class Enters(ddlsim.AllReduce):
        def start(self, context):
            super().start(context)
            group = Communicator(context, Fabric("ring", cost="nccl"))
            for name in ("ring", "double_binary_tree") if prepared else ():
                group.prepare("all_reduce", name)

            def member(worker):
                for name in (None, "double_binary_tree", "ring"):
                    begin = context.loop.env.now
                    yield group.enter(name, worker, nbytes, algorithm=name)
                    times[name] = context.loop.env.now - begin

            for worker in context.workers:
                context.loop.env.process(member(worker))

    ddlsim.simulate(experiment(cluster, Enters(), workers=16, compute=ddlsim.Measured("1 s", 32), steps=1))
    ring, tree = (nccl_time(cluster, nbytes, ranks=16, algorithm=name).seconds for name in ("ring", "tree"))
    assert times == pytest.approx({None: ring, "ring": ring, "double_binary_tree": tree})
    assert ring != pytest.approx(tree)
