"""Events at known times in simulated lifetimes: each happens once; against runs simulated to their end."""

import dataclasses
import math
import random

import numpy as np
import pytest
from draws import few, seeds

import ddlsim
from ddlsim import (
    AllReduce,
    Background,
    Checkpoints,
    ConfigError,
    Experiment,
    Failures,
    Job,
    LinkFault,
    LocalSGD,
    Measured,
    Pause,
    RandomFaults,
    Slowdown,
    Stop,
    Training,
)
from ddlsim.cluster import leaf_spine, star, with_storage

GRAPH = star(4, bandwidth="1 GB/s", latency="0 s")
FREE = Checkpoints("100 s", stall="1 ms")
V100 = dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """4 MB of gradients: a step of 1 s is 994 ms of computing and 6 ms of all-reduce."""
    path = tmp_path_factory.mktemp("model") / "dense.toml"
    layers = '[{ type = "dense", name = "w", units = 1000, bias = false }]'
    path.write_text(f'title = "dense"\nsources = ["x"]\ninput = [1000]\nlayers = {layers}\n', encoding="utf-8")
    return str(path)


def lived(model, **changes):
    fields = {
        "compute": Measured("994 ms", 8), "device": V100, "steps": 100, "warmup": 1, "checkpoints": FREE,
        "max_time": "10000 s", **changes,
    }  # fmt: skip
    return ddlsim.simulate(Experiment(GRAPH, model, AllReduce("ring", overlap="none"), 8, **fields))


EVENTS = {
    "stop": ({"faults": [Stop(1, "10 s", "50 s")]}, 9950),
    "stop after the simulated steps": ({"faults": [Stop(1, "1000 s", "50 s")]}, 9950),
    "pause": ({"faults": [Pause("10 s", "50 s")]}, 9950),
    "pause after the simulated steps": ({"faults": [Pause("1000 s", "50 s")]}, 9950),
    "slow-down": ({"slowdowns": [Slowdown(1, "10 s", "50 s", 2.0)]}, 9975),
    "slow-down that begins later": ({"slowdowns": [Slowdown(1, "2000 s", "50 s", 2.0)]}, 9975),
    "slow-down that lasts": ({"slowdowns": [Slowdown(1, "0 s", "5000 s", 2.0)]}, 7508),
    "slow-down until after the end": ({"slowdowns": [Slowdown(1, "5000 s", "50000 s", 2.0)]}, 7508),
    "slow link": ({"faults": [LinkFault("h0", "switch", "0 s", "5000 s", 0.01)]}, 5000 + 5000 / 1.594),
    "link that is down": ({"faults": [LinkFault("h0", "switch", "300 s", "5000 s", 0.0)]}, 5000),
    "traffic that ends": ({"background": [Background("h0", "h1", end="5000 s")]}, 5000 + 5000 / 1.006),
    "traffic that begins": ({"background": [Background("h0", "h1", start="5000 s")]}, 5000 + 5000 / 1.006),
    "several": ({
        "faults": [Stop(1, "10 s", "50 s"), Stop([0, 2], "30 s", "50 s"), Stop(1, "7000 s", "30 s")],
        "slowdowns": [Slowdown(1, "1000 s", "1000 s", 2.0), Slowdown(1, "1500 s", "1000 s", 2.0)],
    }, 10_000 - 70 - 30 - 1500 + 500 / 1.994 * 2 + 500 / 3.982),
}  # fmt: skip


@pytest.mark.parametrize("name", few(EVENTS, 4))
def test_an_event_happens_once(model, name):
    changes, steps = EVENTS[name]
    result = lived(model, **changes)
    assert result.failure_timeline.steps == pytest.approx(steps, abs=2.0)
    assert result.goodput == pytest.approx(32 * steps / 10_000, rel=1e-3)
    assert not any("has no effect" in note for note in result.notes)
    computed = 0.994 * steps * 4 * 300.0  # J; one that is slowed computes for longer
    assert computed * 0.999 < result.energy < computed * (1.2 if "slow" in name or name == "several" else 1.001)
    failures = Failures(math.inf)
    assert lived(model, **changes, failures=failures, checkpoints=None).failure_timeline.steps == pytest.approx(
        steps, abs=2.0
    )


def test_an_event_is_not_repeated_with_the_work_that_is_lost(model, tmp_path):
    """All work of 65 s is lost, of which 50 were a stop: what is done again takes 15 s."""
    trace = tmp_path / "failures.csv"
    trace.write_text("time_s,unit,repair_s\n65.5,0,0\n", encoding="utf-8")
    failures = Failures(trace=trace, per="host", restart=0.0)
    timeline = lived(model, faults=[Stop(1, "10 s", "50 s")], failures=failures, checkpoints=None).failure_timeline
    assert timeline.lost == pytest.approx(65.5)
    assert timeline.steps == math.floor(10_000 - 65.5)
    waits = Failures(trace=trace, per="host", restart="100 s")
    during = lived(model, faults=[Stop(1, "100 s", "50 s")], failures=waits, checkpoints=None).failure_timeline
    assert during.steps == pytest.approx(10_000 - 65.5 - 100.0, abs=1)  # nobody trained in that time


def test_what_comes_after_the_lifetime_is_said(model):
    notes = lived(model, faults=[Stop(1, "9000 s", "1 s"), Stop(1, "10001 s", "1 s")]).notes
    assert [note.split(",)")[0] for note in notes if "after the end of the run" in note] == ["Stop(ranks=(1"]


@pytest.mark.slow
def test_parts_of_the_lifetime_add_up_and_many_failures_end(model):
    result = lived(
        model, faults=[Stop(1, "100 s", "500 s"), LinkFault("h0", "switch", "1000 s", "500 s")],
        slowdowns=[Slowdown(2, "2000 s", "3000 s", 3.0)], failures=Failures("600 s", per="host", repair="30 s"),
    )  # fmt: skip
    for timeline in result.timelines(20):
        assert timeline.useful + timeline.lost + timeline.checkpointing + timeline.down == pytest.approx(10_000)
        assert (
            min(
                timeline.useful,
                timeline.lost,
                timeline.checkpointing,
                timeline.detecting,
                timeline.repairing,
                timeline.restarting,
            )
            >= 0.0
        )
        ends = timeline.running_intervals[:, 0]
        assert (np.diff(ends) > 0.0).all()


@pytest.mark.slow
def test_the_first_epoch_is_not_repeated(model):
    """1 s for an epoch from storage, then 5 ms for a step, of which half is read from there: 199,900 in 1,000 s."""
    cluster = with_storage(star(1, bandwidth="100 GB/s", latency="0 s"), "nfs0", read="1 GB/s")
    fed = ddlsim.Input(
        storage="nfs0", samples=1000, sample_bytes="1 MB", prefetch=4, cache=ddlsim.minio_cache("500 MB"), epoch=1
    )
    result = ddlsim.simulate(Experiment(
        cluster, model, LocalSGD(1000), 10, workers=1, compute=Measured("4 ms", 10), steps=10, warmup=0,
        checkpoints=Checkpoints("10 s", stall="1 ms"), max_time="1000 s", input=fed,
    ))  # fmt: skip
    assert result.failure_timeline.steps == pytest.approx(199_900, rel=1e-3)
    later = ddlsim.simulate(result.experiment.with_(input=dataclasses.replace(fed, epoch=None), warmup=6))
    assert later.failure_timeline.steps == pytest.approx(200_000, rel=1e-3)


def test_what_is_learnt_comes_when_it_came(model):
    """Without failures, a lifetime is the run; with them, the time after an event is as without it."""

    def learnt(**options):
        return ddlsim.simulate(
            GRAPH, "digits-cnn", AllReduce("ring"), 32, 4, compute=Measured("10 s", 32),
            training=Training("digits", updates=30, evaluate_every=3), checkpoints=Checkpoints("50 s", stall=0.0),
            **options,
        )  # fmt: skip

    faults = {"faults": [Stop(1, "55 s", "100 s")], "slowdowns": [Slowdown(0, "200 s", "100 s", 2.0)]}
    result, plain = learnt(**faults), learnt()
    assert result.failure_timeline.end == pytest.approx(result.end_time)
    assert result.evaluations[-1].time == pytest.approx(result.end_time)
    assert result.params.tobytes() == plain.params.tobytes()
    assert result.history["time"].tolist() == pytest.approx([row.time for row in result.monitor.history])
    disturbed = learnt(**faults, failures=Failures("150 s", per="host", repair=0.0, restart="5 s"), seed=3)
    timeline = disturbed.failure_timeline
    assert len(timeline.events) > 3
    assert timeline.finished
    assert (np.diff(disturbed.history["time"]) >= 0.0).all()
    assert timeline.useful == pytest.approx(timeline.end - timeline.lost - timeline.down)


@pytest.mark.slow
def test_random_faults_come_all_the_time(model):
    """A machine of four is slow for half of the time: the slowest counts, but in a sixteenth of it."""
    result = lived(model, faults=[RandomFaults("500 s", "500 s", factor=2.0)], max_time="200000 s")
    expected = 200_000 * (1 / 16 + 15 / 16 / 1.994)
    assert result.failure_timeline.steps == pytest.approx(expected, rel=0.04)
    timelines = [timeline.steps for timeline in result.timelines(3)]
    assert len(set(timelines)) == 3
    assert timelines == pytest.approx([expected] * 3, rel=0.04)


STRATEGIES = AllReduce("ring", "none"), AllReduce("ring"), ddlsim.ParameterServer(placement="colocated")


def drawn(draw, graph, seconds):
    """Return random events, and which links there are."""
    cluster = ddlsim.load_cluster(graph)
    hosts = [cluster.node_names[node] for node in cluster.workers.tolist()]
    names, ends = cluster.node_names, zip(cluster.link_src, cluster.link_dst, strict=True)
    pairs = sorted({tuple(sorted((names[a], names[b]))) for a, b in ends})

    def when():
        return draw.uniform(0.0, seconds), draw.choice((0.3, 5.0, 60.0, seconds))

    return {
        "faults": [
            *(Stop(draw.randrange(4), *when()) for _ in range(draw.randrange(3))),
            *(LinkFault(*draw.choice(pairs), *when(), draw.choice((0.0, 0.01, 0.3))) for _ in range(draw.randrange(3))),
        ],
        "slowdowns": [Slowdown(draw.randrange(4), *when(), draw.choice((1.5, 4.0))) for _ in range(draw.randrange(3))],
        "background": [
            Background(*draw.sample(hosts, 2), start=start, end=start + lasts)
            for start, lasts in (when() for _ in range(draw.randrange(2)))
        ],
    }  # fmt: skip


@pytest.mark.parametrize("seed", seeds(3, 40))
def test_a_lifetime_is_what_a_run_to_its_end_is(model, seed):
    """Whatever happens: as many steps as if all of it had been simulated, but for those in which something begins."""
    draw = random.Random(f"events {seed}")
    graph = draw.choice((GRAPH, leaf_spine(2, 2, 2, bandwidth="1 GB/s", latency="0 s")))
    happening = drawn(draw, graph, 300.0)
    experiment = Experiment(
        graph, model, draw.choice(STRATEGIES), 8, 4,
        compute=Measured("500 ms", 8), steps=8, warmup=2, max_time="400 s", **happening,
    )  # fmt: skip
    plain = ddlsim.simulate(experiment.with_(steps=10_000))
    timeline = ddlsim.simulate(experiment.with_(checkpoints=Checkpoints(math.inf, stall="1 s"))).failure_timeline
    edges = sum(len(each) for each in happening.values())
    longest = max(np.diff([0.0, *(time for time, _ in plain.recorder.updates)]))
    assert timeline.steps == pytest.approx(len(plain.recorder.updates), abs=3 + 3 * edges), (seed, happening, longest)


def test_too_many_random_faults_are_one_line(model, monkeypatch):
    monkeypatch.setattr("ddlsim.reliability.faults.MAX_FAULTS", 1000)
    monkeypatch.setattr("ddlsim.run.timed_events.MOST_FAULTS", 500)
    started = [RandomFaults("1 s", "1 ms", factor=2.0, per="device")]
    never = {"checkpoints": None, "failures": Failures(math.inf)}
    result = lived(model, faults=started, max_time="1000000000 s", **never)  # goes on as for a while
    assert result.failure_timeline.steps == pytest.approx(1e9, rel=0.01)
    short = {"steps": 2, "warmup": 0, "checkpoints": None, "max_time": math.inf}
    stopped = Stop(1, "1 s", "1000000000 s")
    with pytest.raises(ConfigError, match=r"faults: RandomFaults\(.* has more than 1,000 faults in .* increase mtbf"):
        lived(model, faults=[*started, stopped], **short)
    fields = {"compute": Measured("1 s", 8), "steps": 2, "warmup": 0}
    job = Experiment(GRAPH, model, AllReduce("ring"), 8, faults=[stopped], **fields)
    flaps = RandomFaults("1 s", "1 ms", kind="link", factor=0.5)
    with pytest.raises(ConfigError, match=r"faults: RandomFaults\(.* has more than 1,000 faults"):
        ddlsim.simulate_jobs([Job(job)], faults=[flaps])


def test_links_that_are_gone_round_are_not_alike_to_those_that_are_waited_for(model, monkeypatch):
    """With few environments simulated, what is known of one pair of links stands for the next one, phase by phase."""
    graph = leaf_spine(2, 2, 2, bandwidth="1 GB/s", latency="0 s")
    faults = [LinkFault(leaf, "spine0", start, "2000 s") for leaf, start in (("leaf0", "500 s"), ("leaf1", "4000 s"))]
    options = {"compute": Measured("994 ms", 8), "checkpoints": FREE, "max_time": "10000 s", "faults": faults}

    def steps():
        return ddlsim.simulate(Experiment(graph, model, AllReduce("ring"), 8, **options)).failure_timeline.steps

    every_one = steps()
    monkeypatch.setattr("ddlsim.run.timed_events.MAX_DISTINCT", 0)
    assert steps() == pytest.approx(every_one, rel=1e-3)
    assert every_one > 9900
