"""Batches that come from storage: closed forms of buffers, shared bandwidth, operations, caches, every strategy."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from bundled_strategies import some
from draws import few

import ddlsim
from ddlsim import Cache, Input, Measured
from ddlsim.cluster import Cluster, MultiGpu, star, with_storage
from ddlsim.errors import ConfigError

EXACT = {"rel": 1e-6, "abs": 0.0}
BATCH = 32
#: links that take no time, beside which disks and computing can be told
FAST = "1 PB/s"


def cluster(n=1, *, read="1 GB/s", bandwidth=FAST, **storage) -> Cluster:
    return with_storage(star(n, bandwidth=bandwidth, latency="0 s"), "nfs0", read=read, write=FAST, **storage)


def run(input=None, strategy=None, on=None, *, compute=0.05, steps=20, warmup=10, **fields):
    source = None if input is None else Input(**{"storage": "nfs0", "sample_bytes": 1e6, **input})
    return ddlsim.simulate(
        on or cluster(), "lenet5", strategy or ddlsim.LocalSGD(1000), BATCH, device="v100", input=source,
        compute=Measured(compute, BATCH), steps=steps, warmup=warmup, **fields,
    )  # fmt: skip


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize("prefetch", few([0, 1, 2, 4], 2, start=1))
@pytest.mark.parametrize(
    ("fetch", "prep", "compute"),
    [
        (0.05, 0.03, 0.04), (0.03, 0.05, 0.04), (0.03, 0.04, 0.05), (0.02, 0.02, 0.07), (0.06, 0.06, 0.06),
        (0.05, 0.0, 0.01),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", [ddlsim.LocalSGD(1000), ddlsim.AllReduce("ring"), ddlsim.ADPSGD()])
def test_buffer_of_q_batches(fetch, prep, compute, prefetch, strategy):
    """D/D/1/q: max(compute, fetch, prep, (fetch + prep) / q), and all one after the other for the first batch: in
    processes, in planned steps and in lanes alike."""
    result = run(
        {"sample_bytes": fetch * 1e9 / BATCH, "prep_seconds": prep * 4 / BATCH, "cpu_workers": 4, "prefetch": prefetch},
        strategy, compute=compute,
    )  # fmt: skip
    steady = fetch + prep + compute
    if prefetch:
        steady = max(compute, fetch, prep, (fetch + prep) / prefetch)
    assert result.step_time == pytest.approx(steady, **EXACT)
    assert result.recorder.step_end[0][0] == pytest.approx(fetch + prep + compute, **EXACT)
    waited = result.shares["input"] * result.end_time
    assert result.end_time == pytest.approx(waited + compute * len(result.recorder.updates), **EXACT)


def test_without_input_there_is_no_such_part():
    assert "input" not in run().shares
    assert run().shares["compute"] == pytest.approx(1.0)


def test_a_buffer_hides_what_varies():
    """With jitter of computing, more batches ahead never make a run slower."""
    times = [
        run({"prefetch": q, "sample_bytes": 0.04 * 1e9 / BATCH}, jitter=ddlsim.Lognormal(0.5), steps=200).step_time
        for q in (0, 1, 2, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.3 * times[-1]


# ---------------------------------------------------------------- what is shared

STRATEGIES = some("ddp local server asynchronous k-sync stale ad-psgd gossip neighbours")


@pytest.mark.parametrize("name", STRATEGIES)
def test_workers_of_every_strategy_share_the_storage(name):
    """Four workers that read 32 MB a step from disks of 1 GB/s take 128 ms for it, whatever they do besides."""
    result = run({"prefetch": 4}, STRATEGIES[name], cluster(4), compute=0.01, steps=40)
    rate = BATCH / 0.032
    cancelled = 4 / 3 if name == "k-sync" else 1.0  # one of four gradients is not used
    assert result.throughput * cancelled == pytest.approx(rate, rel=0.03)
    assert result.shares["input"] > 0.85
    assert math.fsum(result.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_step_takes_as_long_as_the_reads_of_all(n):
    result = run({}, on=cluster(n), compute=0.001)
    assert result.step_time == pytest.approx(n * 0.032, **EXACT)
    (busy,) = result.links.query("source == 'nfs0'")["busy"]
    assert busy > 0.99


def test_operations_limit_small_reads():
    """32 samples at 1,000 operations a second take 32 ms for each of two workers, packed in fours 8 ms."""
    slow = cluster(2, operations=1000)
    assert run({"sample_bytes": 10.0}, on=slow, compute=0.001).step_time == pytest.approx(0.064, rel=1e-4)
    packed = run({"sample_bytes": 10.0, "read_samples": 4}, on=slow, compute=0.001)
    assert packed.step_time == pytest.approx(0.016, rel=1e-4)


def test_reads_and_gradients_share_the_links():
    """The same bytes come in beside an all-reduce as without one, and both are slower together."""
    plain = star(4, bandwidth="100 MB/s", latency="0 s")
    on = with_storage(plain, "nfs0", read=FAST, bandwidth=FAST)
    ring = ddlsim.AllReduce("ring", "none")
    alone = run(strategy=ring, on=on, compute=1e-6).step_time
    reads = run({"sample_bytes": 1e4, "prefetch": 4}, on=on, compute=1e-6).step_time
    both = run({"sample_bytes": 1e4, "prefetch": 4}, ring, on, compute=1e-6)
    assert alone == pytest.approx(0.0037, rel=0.01)
    assert reads == pytest.approx(0.0032, rel=0.01)
    assert 0.999 < both.step_time / (alone + reads) < 1.05  # all bytes go into the machines, whose links wait little
    (carried,) = both.links.query("source == 'nfs0'")["nbytes"]
    assert carried / (4 * BATCH * 1e4) == pytest.approx(both.end_time / both.step_time, abs=5)


def test_devices_of_a_machine_share_its_processors_and_its_way():
    """Four devices, 8 ms to prepare a batch by all cores, 4 ms to copy one over the link that they share."""
    host = MultiGpu(n_gpus=4, pcie_bandwidth="8 GB/s", pcie_latency="0 s", n_pcie_switches=1, device="v100")
    machine = star(1, bandwidth="1 GB/s", latency="0 s", host=host)
    prepared = Input(sample_bytes=1.0, decoded_bytes=10.0, prep_seconds=0.001, cpu_workers=4)
    copied = Input(sample_bytes=1.0, decoded_bytes=1e6)

    def step(input):
        compute = Measured(0.001, BATCH)
        return ddlsim.simulate(
            machine, "lenet5", ddlsim.LocalSGD(1000), BATCH, compute=compute, input=input, steps=100, warmup=10
        ).step_time

    assert step(prepared) == pytest.approx(4 * 0.008, rel=1e-4)
    assert step(copied) == pytest.approx(4 * 0.004, rel=1e-4)


def test_accumulated_micro_batches_are_read_one_by_one():
    for strategy in (ddlsim.AllReduce("ring"), ddlsim.LocalSGD(1000), ddlsim.ADPSGD()):
        result = run({}, strategy, cluster(2), compute=0.001, accumulation=3)
        assert result.step_time == pytest.approx(3 * 2 * 0.032, rel=1e-3)


# ---------------------------------------------------------------- models that are split


def test_only_the_first_stage_of_a_pipeline_reads():
    result = ddlsim.simulate(
        cluster(4), "lenet5", ddlsim.Parallel(pipeline=4), 64, device="v100", steps=5, warmup=5,
        input=Input(storage="nfs0", sample_bytes=1e6),
    )  # fmt: skip
    assert result.step_time == pytest.approx(0.064, rel=1e-3)
    into = result.links.query("target in ['h0', 'h1', 'h2', 'h3']").set_index("target")["nbytes"]
    assert into["h0"] > 100 * into["h1"]


def test_ranks_that_share_a_batch_read_it_once():
    on = with_storage(
        star(1, bandwidth=FAST, latency="0 s", host=MultiGpu(n_gpus=4, inside="nvswitch", nvlink_bandwidth="300 GB/s")),
        "nfs0", read="1 GB/s",
    )  # fmt: skip
    result = ddlsim.simulate(
        on, "bert-base", ddlsim.Parallel(tensor=4), 8,
        device="v100", input=Input(storage="nfs0", sample_bytes=1e8), steps=3, warmup=3,
    )  # fmt: skip
    (carried,) = result.links.query("source == 'nfs0'")["nbytes"]
    assert result.step_time == pytest.approx(0.8, rel=0.01)  # eight samples of 100 MB
    assert carried == pytest.approx(1e9 * result.end_time, rel=0.01)


# ---------------------------------------------------------------- caches


def test_what_never_leaves_the_cache_is_not_read_again():
    """Half of the data stay: the first epoch reads all, later ones half; a late one is so from its first batch on."""
    cached = {"samples": 320, "cache": Cache("minio", 160e6), "prefetch": 1}
    first = run({**cached, "epoch": 1}, compute=0.001, steps=30, warmup=0)
    ends = [time for time, _ in first.recorder.updates]
    assert ends[9] - ends[8] == pytest.approx(0.032, **EXACT)
    assert ends[19] - ends[18] == pytest.approx(0.016, **EXACT)
    late = run(cached, compute=0.001)
    assert late.step_time == pytest.approx(0.016, **EXACT)
    assert any("caches are in their steady state" in note for note in late.notes)


def test_lru_is_worth_less():
    cached = {"samples": 320, "cache": Cache("lru", 160e6), "epoch": 2}
    assert run(cached, compute=0.001, steps=5, warmup=2).step_time == pytest.approx(
        0.032 * (1.0 - 0.5 + 0.5 * math.log(2.0)), **EXACT
    )


def test_partitioned_caches_get_the_rest_from_each_other():
    """Four machines with room for a quarter each read nothing from the storage, and 3/4 of 32 MB from each other."""
    on = cluster(4, read="1 MB/s", bandwidth="1 GB/s")
    parts = {"samples": 1280, "cache": ddlsim.partitioned_cache(320e6)}
    result = run(parts, on=on, compute=0.001)
    assert result.step_time == pytest.approx(0.75 * 0.032, rel=1e-4)
    (read,) = result.links.query("source == 'nfs0'")["nbytes"]
    assert read == 0.0


def test_levels_of_shi_et_al():
    """A quarter lies decoded in memory, the rest on an SSD of 2 GB/s, 1 ms to prepare a sample on one core."""
    decoded = 4.0 * 28 * 28
    levels = ddlsim.multi_level_cache(320 * decoded, 1280e6, "2 GB/s")
    on = cluster(1, read="1 MB/s")
    common = {"samples": 1280, "cache": levels, "cpu_workers": 1, "decoded_bytes": decoded}
    assert run({**common, "prep_seconds": 1e-6}, on=on, compute=1e-6).step_time == pytest.approx(0.75 * 0.016, rel=1e-3)
    assert run({**common, "prep_seconds": 1e-3}, on=on, compute=1e-6).step_time == pytest.approx(0.75 * 0.032, rel=1e-3)


# ---------------------------------------------------------------- what is learned


def test_input_changes_when_and_not_what_is_learned():
    training = ddlsim.Training("digits", rate=0.1, epochs=2)

    def learn(input):
        return ddlsim.simulate(
            cluster(2), "digits-cnn", ddlsim.AllReduce("ring"), 32, device="v100", input=input, training=training
        )

    plain, fed = (
        learn(None),
        learn(Input(storage="nfs0", samples=1438, sample_bytes="1 MB", cache=Cache("minio", "1 GB"))),
    )
    assert [row.loss for row in fed.evaluations] == [row.loss for row in plain.evaluations]
    assert fed.end_time > plain.end_time


def test_workers_that_are_ahead_read_the_batches_of_their_own_steps():
    """The batch grows with the samples of all steps before, which are the same for everybody."""
    growing = ddlsim.GrowingBatch(8, (0.05, 0.1, 0.2))
    result = ddlsim.simulate(
        cluster(2), "digits-cnn", ddlsim.LocalSGD(20), 8, device="v100", speed=[1.0, 0.5],
        input=Input(storage="nfs0", sample_bytes="1 MB", prefetch=0),
        training=ddlsim.Training("digits", updates=20, growing_batch=growing),
    )  # fmt: skip
    read = result.links[result.links.kind == "disk"].nbytes.max()
    assert read == sum(result.steps["samples"]) * 1e6


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("n", "write", "stall"), [(2, "1 GB/s", 4.0), (4, "1 GB/s", 4.0), (4, "10 GB/s", 1.0)])
def test_checkpoints_go_to_the_same_storage(n, write, stall):
    """4 GB: by disks that write 1 GB/s of all machines together, or over each machine's link of 1 GB/s; 2 GB/s to read,
    or as much as links carry."""
    plain = star(n, bandwidth="1 GB/s", latency="0 s")
    on = with_storage(plain, "nfs0", read="2 GB/s", write=write, bandwidth=FAST)
    checkpoints = ddlsim.Checkpoints("1 h", to="nfs0", nbytes="4 GB")
    cost = run(on=on, checkpoints=checkpoints).failure_timeline.timeline.cost
    assert (cost.stall, cost.load) == (pytest.approx(stall, **EXACT), pytest.approx(2.0, **EXACT))
    with pytest.raises(ConfigError, match="did you mean 'nfs0'"):
        run(on=on, checkpoints=ddlsim.Checkpoints("1 h", to="nfs", nbytes="4 GB"))


# ---------------------------------------------------------------- files and errors


def test_in_files(tmp_path):
    path = tmp_path / "run.toml"
    (tmp_path / "mine.toml").write_text(
        '[generator]\ntype = "star"\nn_hosts = 2\nbandwidth = "10 Gbit/s"\nlatency = "10 us"\n\n'
        '[[storage]]\nname = "nfs0"\nread = "2 GB/s"\nwrite = "1 GB/s"\noperations = 5000\n'
    )
    path.write_text(
        'cluster = "mine.toml"\nmodel = "resnet18"\n\n[input]\ndataset = "imagenet"\nstorage = "nfs0"\n'
        'cpu_workers = 8\nprefetch = 4\nprep_seconds = "8 ms"\ncache = { policy = "lru", size = "64 GB" }\n'
    )
    loaded = ddlsim.load_experiment(path)
    cache = Cache("lru", "64 GB")
    assert loaded.input == Input(
        "imagenet", storage="nfs0", cpu_workers=8, prefetch=4, prep_seconds="8 ms", cache=cache
    )
    again = tmp_path / "again.toml"
    loaded.save(again)
    assert ddlsim.load_experiment(again).input == loaded.input
    several = loaded.with_(input=Input("imagenet", storage="nfs0", cache=ddlsim.multi_level_cache("10 GB", "200 GB")))
    several.save(again)
    assert ddlsim.load_experiment(again).input == several.input
    assert "ddlsim.Cache(policy='lru', size='64 GB')" in loaded.to_python()
    result = ddlsim.simulate(loaded.with_(steps=2, warmup=1))
    assert result.shares["input"] >= 0.0


@pytest.mark.slow
def test_what_the_page_shows_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "storage.md", "exec"), namespace)
    storage, run_file = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    star = '[generator]\ntype = "star"\nn_hosts = 2\nbandwidth = "10 Gbit/s"\nlatency = "10 us"\n'
    (tmp_path / "mine.toml").write_text(star + storage)
    (tmp_path / "run.toml").write_text(run_file)
    loaded = ddlsim.load_experiment(tmp_path / "run.toml")
    assert ddlsim.simulate(loaded.with_(steps=2)).shares["input"] > 0.0


def test_a_bundled_cluster_with_storage():
    named = ddlsim.load_cluster("office-1gbe+storage=100 MB/s")
    assert named.node_kind[named.node("storage")] == "storage"
    assert len(named.workers) == len(ddlsim.load_cluster("office-1gbe").workers)
    with pytest.raises(ConfigError, match="the cluster has 80 switches between machines"):
        ddlsim.load_cluster("fat-tree-k8-10g+storage=1 GB/s")
    with pytest.raises(ConfigError, match="name = 'h0' is already taken"):
        with_storage("office-1gbe", "h0", read="1 GB/s")
    with pytest.raises(ConfigError, match="unknown node 'swich'; did you mean 'switch'"):
        with_storage("office-1gbe", "nfs0", read="1 GB/s", at="swich")


@pytest.mark.parametrize("name", ["office-1gbe", "two-racks-oversubscribed", "dgx1-v100-16"])
def test_a_storage_that_nobody_reads_changes_nothing(name):
    plain = ddlsim.load_cluster(name)
    switch = next(plain.node_names[node] for node in range(plain.n_nodes) if plain.is_fabric_switch[node])
    background = with_storage(plain, "nfs0", read="1 GB/s", at=switch, bandwidth="10 Gbit/s", latency="1 us")
    times = [
        ddlsim.simulate(on, "resnet18", batch_size=32, device="v100", steps=2).step_times.tolist()
        for on in (plain, background)
    ]
    assert times[0] == times[1]
    with pytest.raises(
        ConfigError, match=r"a storage node cannot be added to a grid .*; use the name of one of its hosts"
    ):
        with_storage("torus-2d", "nfs0", read="1 GB/s", at="h0", bandwidth="1 GB/s")


@pytest.mark.parametrize("strategy", [ddlsim.AllReduce("ring"), ddlsim.ADPSGD()])
def test_a_saved_run_goes_on_as_if_there_had_been_no_break(strategy, tmp_path):
    experiment = ddlsim.Experiment(
        cluster(2), "digits-cnn", strategy, 32, device="v100", jitter=ddlsim.Lognormal(0.3),
        input=Input(storage="nfs0", samples=1438, sample_bytes="1 MB", cache=Cache("minio", "1 GB")),
        training=ddlsim.Training("digits", rate=0.1, epochs=1),
    )  # fmt: skip
    whole = ddlsim.simulate(experiment.with_(training=ddlsim.Training("digits", rate=0.1, epochs=2)))
    ddlsim.simulate(experiment, checkpoint=tmp_path / "half")
    rest = ddlsim.resume(tmp_path / "half", experiment.with_(training=ddlsim.Training("digits", rate=0.1, epochs=2)))
    assert rest.recorder.updates == whole.recorder.updates
    assert [row.loss for row in rest.evaluations] == [row.loss for row in whole.evaluations]


def test_a_storage_is_no_machine_to_rent():
    priced = cluster(2).with_costs(price="3 USD/h")
    assert run({}, on=priced).cost_rate == pytest.approx(6.0 / 3600.0)
    assert repr(priced) == "<Cluster 'star-2': 2 workers, 2 hosts, 1 storage, 2 switches, 8 links>"
    assert "2 hosts, 2 workers (0 GPUs), 1 storage, 1 fabric switch;" in priced.summary()


def test_a_storage_in_files_of_clusters(tmp_path):
    """Saved and read back it is the same, operations included."""
    made = cluster(2, operations=5000)
    for name in ("c.toml", "c.json", "c.graphml"):
        made.save(tmp_path / name)
        again = ddlsim.load_cluster(tmp_path / name)
        assert again.operation_seconds(again.node("nfs0")) == pytest.approx(1 / 5000, rel=1e-12)
        assert again.link_bandwidth.tolist() == made.link_bandwidth.tolist()
        assert again.node_kind == made.node_kind


# ---------------------------------------------------------------- several jobs

#: what limits the jobs, 64 ms for each batch of a machine: operations of the storage, processors, a machine's SSD
SHARED = {
    "operations": {"read_samples": 1, "sample_bytes": 1.0},
    "processors": {"sample_bytes": 1.0, "prep_seconds": "4 ms", "cpu_workers": 4, "read_samples": 10**6},
    "ssd": {
        "samples": 1000,
        "sample_bytes": 1e6,
        "read_samples": 10**6,
        "cache": Cache("minio", "1 GB", on="ssd", read="1 GB/s"),
    },
}


@pytest.mark.parametrize("name", few(SHARED, 1))
@pytest.mark.parametrize("strategy", [ddlsim.AllReduce("ring", "none"), ddlsim.AsyncParameterServer()], ids=str)
def test_jobs_share_what_serves_samples(name, strategy):
    """Two jobs of two workers each take what one of four workers takes: 0.128 instead of 0.064 s a step."""
    host = MultiGpu(4, "nvswitch", nvlink_bandwidth=FAST, pcie_bandwidth=FAST, pcie_latency="0 s")
    graph = star(2, bandwidth=FAST, latency="0 s", host=host)
    on = with_storage(graph, "nfs0", read=FAST, write=FAST, operations=1000)
    input = Input(**{"storage": "nfs0", **SHARED[name]})

    def job(places, **fields):
        return ddlsim.Experiment(
            on, "lenet5", strategy, BATCH, places, device="v100", compute=Measured(1e-6, BATCH), steps=20, warmup=5,
            input=input, **fields,
        )  # fmt: skip

    alone, four = (ddlsim.simulate(job(places)).step_time for places in ([0, 1], [0, 1, 2, 3]))
    assert (alone, four) == pytest.approx((0.064, 0.128), rel=1e-3)
    jobs = ddlsim.simulate_jobs([ddlsim.Job(job([0, 1]), "a"), ddlsim.Job(job([2, 3]), "b")])
    assert [jobs.concurrent_step_time(each) for each in "ab"] == pytest.approx([0.128] * 2, rel=0.03)
    assert sum(jobs[each].throughput for each in "ab") == pytest.approx(4 * BATCH / 0.128, rel=0.06)
    late = ddlsim.simulate_jobs([ddlsim.Job(job([0, 1]), "a"), ddlsim.Job(job([2, 3]), "b", start="0.5 s")])
    assert [late.concurrent_step_time(each) for each in "ab"] == pytest.approx([0.128] * 2, rel=0.06)
    background = ddlsim.simulate(job([0, 1], background=[ddlsim.Job(job([2, 3]))]))
    assert background.step_time == pytest.approx(0.128, rel=0.03)
    apart = ddlsim.simulate_jobs([ddlsim.Job(job([0, 1]), "a"), ddlsim.Job(job([4, 5]), "b")])
    if name != "operations":  # of another machine
        assert apart["a"].step_time == pytest.approx(0.064, rel=1e-3)


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ({"storage": "nfs"}, r"input: storage: cluster '.*': unknown storage 'nfs'; did you mean 'nfs0'\?"),
        ({"storage": "switch"}, "input: storage = 'switch': must be a storage node or a host"),
    ],
)
def test_places_that_are_no_storage(input, message):
    with pytest.raises(ConfigError, match=message):
        run(input)


def test_a_cluster_without_storage():
    with pytest.raises(ConfigError, match=r"cluster 'star-1' has no storage; add \[\[storage\]\] to its file"):
        run({}, on=star(1, bandwidth=FAST, latency="0 s"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch": -1}, "prefetch = -1: must be a non-negative integer"),
        ({"cpu_workers": 0}, "cpu_workers = 0"),
        ({"dataset": "imagnet"}, "must be 'imagenet', 'cifar10' or 'coco2017'; did you mean 'imagenet'"),
        ({"storage": "nfs0"}, "requires the size of a sample; set dataset='imagenet'"),
        (
            {"dataset": "imagenet", "cache": Cache("lru", "1 GB")},
            "cache has no effect if every machine has the data in memory",
        ),
        ({"storage": "a", "sample_bytes": 1.0, "cache": Cache("lru", "1 GB")}, "cache requires the number of samples"),
        ({"dataset": "imagenet", "epoch": 2}, "epoch = 2 has no effect without a cache"),
        ({"dataset": "imagenet", "storage": "a", "cache": "lru"}, "cache = 'lru'"),
        (
            {"dataset": "imagenet", "storage": "a", "cache": [Cache("minio", "2 GB"), Cache("minio", "1 GB")]},
            "the cache of 1 GB has no effect, because the preceding cache of 2 GB",
        ),
        (
            {"dataset": "imagenet", "storage": "a", "cache": [Cache("lru", "1 GB"), Cache("minio", "2 GB")]},
            "'lru' cannot be combined with other caches",
        ),
    ],
)
def test_inputs_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        Input(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "fifo"}, "policy = 'fifo'"),
        ({"size": "-1 GB"}, "size"),
        ({"on": "ssd"}, "on = 'ssd' requires the read bandwidth of the SSD; set it, for example read='2 GB/s'"),
        ({"read": "1 GB/s"}, "applies to SSDs only; set on='ssd'"),
        ({"policy": "lru", "partitioned": True}, "partitioned requires policy = 'minio'"),
    ],
)
def test_caches_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        Cache(**{"policy": "minio", "size": "1 GB", **fields})
