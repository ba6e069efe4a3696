"""Workers that do not stop for each other, and crash: what is lost, who waits, and that nothing is ever stuck."""

import dataclasses
import math

import numpy as np
import pytest
from draws import few, seeds

import ddlsim
from ddlsim import Affine, Checkpoints, ConfigError, Elastic, Failures, Lognormal, Training
from ddlsim.cluster import star
from ddlsim.errors import DdlsimError
from ddlsim.run.simulate import run

CLUSTER = ddlsim.load_cluster(star(8, bandwidth="1 Gbit/s", latency="50 us"))
FREE = {
    "downpour": ddlsim.AsyncParameterServer(),
    "two shards": ddlsim.AsyncParameterServer(servers=2, accumulate=2),
    "stale": ddlsim.StaleSynchronous(3),
    "k-async": ddlsim.KAsync(2),
    "soft": ddlsim.SoftSync(1),
    "softer": ddlsim.SoftSync(3),
    "elastic": ddlsim.ElasticAveraging(0.1, 4, False),
    "buffered": ddlsim.FedBuff(2, 3),
    "pairs": ddlsim.ADPSGD(),
    "gossip": ddlsim.GossipSGD(0.5),
}


def traced(tmp_path, *rows, **options):
    file = tmp_path / "failures.csv"
    file.write_text("time_s,unit,repair_s\n" + "".join(f"{t},{u},{r}\n" for t, u, r in rows), encoding="utf-8")
    return Failures(trace=file, per="host", restart=options.pop("restart", 0.0), **options)


def simulated(strategy, failures=None, workers=6, **options):
    fields = {"compute": Affine("1 s", 0.0), "steps": 20, "warmup": 0, "max_time": "1000 h", **options}
    return ddlsim.simulate(CLUSTER, "digits-cnn", strategy, 16, workers, failures=failures, **fields)


def test_one_worker_by_hand(tmp_path):
    """Steps of 1 s; down from 2.5 to 5.5 s (repair 2 s, restart 1 s): half a second of work is lost."""
    failures = traced(tmp_path, (2.5, 0, 2.0), restart="1 s")
    plain = simulated(ddlsim.AsyncParameterServer(), workers=1, steps=6)
    result = simulated(ddlsim.AsyncParameterServer(), failures, workers=1, steps=6)
    step = plain.recorder.updates[0][0]
    times = [time for time, _ in result.recorder.updates]
    undisturbed = [time for time, _ in plain.recorder.updates]
    pull = undisturbed[1] - undisturbed[0] - step  # the answer that comes before the next gradient
    again = [5.5 + step + i * (step + pull) for i in range(4)]
    assert times == pytest.approx([*undisturbed[:2], *again], abs=1e-9)
    timeline = result.failure_timeline
    begun = undisturbed[1] + pull
    assert timeline.lost == pytest.approx(2.5 - begun, abs=1e-9)
    assert (timeline.detecting, timeline.repairing, timeline.restarting) == pytest.approx((0.0, 2.0, 1.0))
    assert timeline.useful == pytest.approx(result.end_time - timeline.lost - 3.0)
    assert result.goodput == pytest.approx(6 * 16 / result.end_time)
    assert timeline.failures["time"].tolist() == [2.5]
    assert result.device_seconds["idle"][0] == pytest.approx(3.0)


def test_a_gradient_of_a_dead_worker_never_arrives(tmp_path):
    """It has crashed before its first push: the parameters are those that the others make alone."""
    training = Training("digits", rate=0.1, updates=15, evaluate_every=5, sharding="shared")
    three = simulated(ddlsim.AsyncParameterServer(), traced(tmp_path, (0.5, 2, 1e6)), 3, training=training)
    assert [len(ends) for ends in three.recorder.step_end] == pytest.approx([7, 7, 0], abs=1)
    assert three.recorder.lost[2] == pytest.approx(0.5)
    assert max(three.recorder.staleness) == 1  # only the other one comes between
    assert math.isinf(three.recorder.down[2][-1][1]) is False


@pytest.mark.parametrize("name", FREE)
def test_every_strategy_goes_on_without_them(name, tmp_path):
    strategy = FREE[name]
    failures = Failures("40 s", per="host", repair="8 s", restart="2 s", spares=1)
    plain = simulated(strategy, max_time="60 s", steps=10**6)
    first = simulated(strategy, failures, max_time="60 s", steps=10**6, jitter=Lognormal(0.1))
    assert first.traced.recorder.updates == first.recorder.updates
    assert 0 < len(first.recorder.updates) < len(plain.recorder.updates)
    timeline = first.failure_timeline
    assert len(timeline.events) > 3
    assert timeline.useful + timeline.lost + timeline.down == pytest.approx(timeline.end)
    assert first.goodput < plain.throughput
    assert "goodput" in str(first)
    never = simulated(strategy, Failures(math.inf), max_time="60 s", steps=10**6)
    assert never.recorder.updates == plain.recorder.updates
    assert never.failure_timeline.effective == 1.0


@pytest.mark.parametrize("name", few(FREE, 3))
def test_values_follow(name):
    training = Training("digits", rate=0.05, evaluate_every=20, updates=60 if name != "buffered" else 10)
    failures = Failures("30 s", per="device", repair="5 s", restart="1 s")
    results = [simulated(FREE[name], failures, training=training, max_time="200 s") for _ in range(2)]
    assert results[0].params.tobytes() == results[1].params.tobytes()
    assert np.isfinite(results[0].params).all()
    assert results[0].failure_timeline.lost > 0.0
    assert results[0].history["time"].is_monotonic_increasing


@pytest.mark.parametrize("name", sorted({*FREE} - {"k-async", "buffered", "soft"}))
def test_nobody_waits_for_those_who_never_come_back(name, tmp_path):
    rows = [(3.3, 1, 1e9), (7.7, 4, 1e9), (7.8, 2, 1e9)]
    gone = [(time, rank, "inf") for time, rank, _ in rows]
    result = simulated(FREE[name], traced(tmp_path, *gone), steps=10)
    assert result.end_time < 100.0
    assert [rank for rank, own in enumerate(result.recorder.down) if own] == [1, 2, 4]
    late = [ends[-1] for rank, ends in enumerate(result.recorder.step_end) if rank in (0, 3, 5)]
    assert min(late) > 10.0


def test_where_too_few_are_left_it_is_said(tmp_path):
    failures = traced(tmp_path, *[(2.5, rank, "inf") for rank in range(5)])
    with pytest.raises(DdlsimError, match=r"the workers \[0, 1, 2, 3, 4\] have crashed and never return"):
        simulated(ddlsim.KAsync(2), failures, max_time=math.inf, training=Training("digits", updates=1000))
    cut = simulated(ddlsim.KAsync(2), failures, max_time="50 s")
    assert cut.stop_reason == "max_time"


def random_world(seed, tmp_path):
    """A random strategy among random failures: it ends, and its times add up (the run checks bytes and seconds)."""
    draw = np.random.default_rng(seed)
    name = sorted(FREE)[int(draw.integers(len(FREE)))]
    rows = sorted(
        (round(float(draw.uniform(0.0, 12.0)), 3), int(draw.integers(6)), round(float(draw.exponential(3.0)), 3))
        for _ in range(int(draw.integers(1, 25)))
    )
    failures = traced(
        tmp_path, *rows, spares=int(draw.integers(3)), kind=str(draw.choice(["crash", "hang"])),
        detection=float(draw.choice([0.0, 1.5])), restart=float(draw.choice([0.0, 0.7])),
    )  # fmt: skip
    jitter = Lognormal(0.3) if draw.random() < 0.7 else ddlsim.NoJitter()
    learns = {"training": Training("digits", rate=0.01, updates=12, evaluate_every=6)} if draw.random() < 0.3 else {}
    result = simulated(FREE[name], failures, steps=8, jitter=jitter, seed=seed, **learns)
    timeline = result.failure_timeline
    assert timeline.useful + timeline.lost + timeline.down == pytest.approx(timeline.end), (name, rows)
    assert min(timeline.useful, timeline.lost, timeline.detecting, timeline.repairing, timeline.restarting) >= -1e-9, (
        name,
        rows,
    )
    assert result.end_time < 200.0


@pytest.mark.parametrize("third", seeds(1, 3))
def test_random_failures_never_stop_a_run(third, tmp_path):
    for seed in range(20 * third, 20 * third + 20):
        random_world(seed, tmp_path)


@pytest.mark.slow
def test_a_thousand_random_failure_worlds(tmp_path):
    for seed in range(60, 1060):
        random_world(seed, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"checkpoints": Checkpoints("10 min", stall="5 s")},
            "checkpoints: not supported with .*, whose workers do not stop",
        ),
        ({"elastic": Elastic()}, "elastic: not supported with .*, whose workers do not stop"),
        (
            {"failures": Failures("1 h", per="job")},
            "failures: per = 'job': not supported with .*, whose workers do not stop",
        ),
        (
            {"strategy": ddlsim.AllReduce(), "failures": Failures("1 h", repair=math.inf)},
            "training would wait forever once",
        ),
    ],
)
def test_what_makes_no_sense(fields, message):
    given = {"strategy": ddlsim.AsyncParameterServer(), "failures": Failures("1 h"), **fields}
    with pytest.raises(ConfigError, match=message):
        simulated(given.pop("strategy"), given.pop("failures"), **given)


@pytest.mark.parametrize("name", FREE)
def test_what_makes_sense_only_if_all_stop_together(name):
    """Whether workers stop for each other does not depend on how many gradients make an update, or on the failures."""
    unused = {"checkpoints": Checkpoints("10 min", stall="5 s")}
    for fields in (unused, {"elastic": Elastic()}, {"failures": Failures("1 h", per="job")}):
        given = {"failures": None if fields is unused else Failures("1 h"), **fields}
        with pytest.raises(ConfigError, match=r"not supported with .*, whose workers do not stop"):
            simulated(FREE[name], given.pop("failures"), **given)


def test_a_run_of_some_steps_stands_for_a_month():
    failures = Failures("10 h", per="host", repair="1 h", restart="5 min")
    for strategy in (ddlsim.AsyncParameterServer(), ddlsim.ADPSGD()):
        result = simulated(strategy, failures, max_time=math.inf)
        plain = simulated(strategy, max_time=math.inf)
        assert result.throughput == plain.throughput
        timeline = result.failure_timeline
        assert timeline.end == 30 * 86_400.0
        assert timeline.availability == pytest.approx(10 / (10 + 1 + 5 / 60), abs=0.015)
        assert result.goodput == pytest.approx(plain.throughput * timeline.effective)
        timelines = result.timelines(20)
        assert len({one.down for one in timelines}) == 20
        assert any("30 days" in note for note in result.notes)


@pytest.mark.slow
def test_the_short_cut_is_what_is_simulated():
    """Half a gradient for each crash, and a worker less meanwhile: against a run of 50,000 s."""
    failures, jitter = Failures("500 s", per="host", repair="40 s", restart="10 s"), Lognormal(0.2)
    long = simulated(ddlsim.AsyncParameterServer(), failures, max_time="50000 s", steps=10**6, jitter=jitter)
    short = simulated(ddlsim.AsyncParameterServer(), failures, max_time=math.inf, steps=500, jitter=jitter)
    assert short.failure_timeline.effective == pytest.approx(long.failure_timeline.effective, abs=0.01)
    assert short.failure_timeline.lost / short.failure_timeline.end == pytest.approx(
        long.failure_timeline.lost / long.failure_timeline.end, rel=0.15
    )
    assert short.goodput == pytest.approx(long.goodput, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        (ddlsim.AsyncParameterServer(), 900.0 + 800.0),
        (ddlsim.StaleSynchronous(math.inf), 900.0 + 800.0),
        (ddlsim.KBatchAsync(6), 900.0 + 800.0),
        (ddlsim.KAsync(6), 6 * 1300.0),
        (ddlsim.StaleSynchronous(0), 6 * 1300.0),
        (ddlsim.StaleSynchronous(7), 6 * 1300.0 - 5 * 8.0),
    ],
    ids=["downpour", "no limit", "k-batch-async", "all of k-async", "no slack", "slack"],
)
def test_the_short_cut_counts_who_waits_for_missing_workers(strategy, lost, tmp_path):
    """Steps of 1 s. Worker 0 is missing from 500 to 1,400 s, and worker 1 from 1,000 to 1,800 s: all wait from 500 to
    1,800 s, or nobody. A run that stands for a month loses the samples that a simulated one loses, but for some
    steps."""
    failures = traced(tmp_path, (500.0, 0, 880.0), (1000.0, 1, 780.0), restart="20 s")
    long = simulated(strategy, failures, max_time="3000 s", steps=10**6)
    short = simulated(strategy, failures, max_time=math.inf, steps=200)
    assert short.failure_timeline.end == 30 * 86_400.0
    each = short.throughput / 6
    missed = [(short.throughput - one.goodput) * one.failure_timeline.end / each for one in (long, short)]
    assert missed == pytest.approx([lost, lost], abs=6 * 6.0)


def test_the_short_cut_does_not_wait_for_workers_that_never_return(tmp_path):
    """Worker 0 crashes at 500 s for ever: K-async with k = 6 stands still, with stale workers the others go on."""
    failures = traced(tmp_path, (500.0, 0, math.inf), (1000.0, 1, 780.0), restart="20 s")
    month = 30 * 86_400.0
    for strategy, worked in (
        (ddlsim.KAsync(6), 6 * 500.0),
        (ddlsim.KAsync(4), 6 * month - (month - 500.0) - 800.0),
        (ddlsim.StaleSynchronous(0), 6 * month - (month - 500.0) - 5 * 800.0),
    ):
        result = simulated(strategy, failures, max_time=math.inf, steps=200)
        assert result.goodput * month / (result.throughput / 6) == pytest.approx(worked, rel=1e-4, abs=6.0)


@pytest.mark.slow
def test_other_lives_are_other_seeds():
    result = simulated(ddlsim.AsyncParameterServer(), Failures("40 s", repair="8 s"))
    with pytest.raises(ConfigError, match="simulate_seeds"):
        result.timelines(3)


# ---------------------------------------------------------------- servers on machines that crash

SERVED = {
    "downpour": ddlsim.AsyncParameterServer(placement="colocated"),
    "two shards": ddlsim.AsyncParameterServer(servers=2, placement="colocated", apply_time="1 ms"),
    "stale": ddlsim.StaleSynchronous(3, placement="colocated"),
    "soft": ddlsim.SoftSync(1, placement="colocated"),
    "elastic": ddlsim.ElasticAveraging(0.1, 4, False, placement="colocated"),
}


def on_machines(name, cluster, failures):
    return ddlsim.simulate(
        cluster, "digits-cnn" if cluster == "office-1gbe" else "resnet50", SERVED[name], 32,
        3 if cluster == "office-1gbe" else 16, compute=Affine("1 s", 0.0), failures=failures, max_time="40 s",
        steps=10**6,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", ["office-1gbe", "cloud-25g-16x8-v100"])
@pytest.mark.parametrize("name", SERVED)
def test_a_server_is_away_with_its_machine(name, cluster, tmp_path):
    """The machine of the (first) server is away from 5.5 to 26.5 s: nobody makes an update, nor is anybody available;
    104 updates were made on machines with GPUs."""
    result = on_machines(name, cluster, traced(tmp_path, (5.5, 0, 20.0), restart="1 s"))
    times = np.array([time for time, _ in result.recorder.updates])
    assert not ((times > (10.0 if name == "elastic" else 7.0)) & (times < 26.4)).any()  # it has 4 steps of its own
    assert (times > 26.5).sum() > 5
    assert result.availability == pytest.approx((40.0 - 21.0) / 40.0, abs=0.01)


@pytest.mark.parametrize("cluster", ["office-1gbe", "cloud-25g-16x8-v100"])
def test_a_run_whose_server_never_comes_back_is_not_available(cluster, tmp_path):
    """Lost after 5.5 of 40 s: an availability of 0.14, not 0.69."""
    result = on_machines("downpour", cluster, traced(tmp_path, (5.5, 0, "inf"), restart="1 s"))
    assert result.availability == pytest.approx(5.5 / 40.0, abs=0.01)
    assert result.stop_reason == "max_time"


def test_a_device_that_crashes_leaves_the_server_of_its_machine(tmp_path):
    failures = dataclasses.replace(traced(tmp_path, (5.5, 0, 20.0), restart="1 s"), per="device")
    result = on_machines("downpour", "cloud-25g-16x8-v100", failures)
    assert sum(7.0 < time < 26.4 for time, _ in result.recorder.updates) > 100
    assert result.availability == pytest.approx(1.0 - 21.0 / 40.0 / 16, abs=0.01)


def test_a_run_that_too_few_workers_are_left_for_is_not_available(tmp_path):
    """Two workers must come together (K-async): from the fifth loss at 9.5 s on the sixth waits for ever."""
    rows = [(5.5 + rank, rank, "inf") for rank in range(5)]
    result = simulated(ddlsim.KAsync(2), traced(tmp_path, *rows), max_time="40 s", steps=10**6)
    assert result.availability < 9.5 / 40.0
    assert (
        result.failure_timeline.useful + result.failure_timeline.lost + result.failure_timeline.down
        == pytest.approx(40.0)
    )


# ---------------------------------------------------------------- what a worker was waiting for

MODEL = 'title = "m"\ninput = [1000]\nlayers = [{ type = "dense", units = 2000, bias = false }]\n'


@pytest.mark.parametrize(
    ("fall", "lost"),
    [(4.8, 1.0), (5.27, 0.0)], ids=["its gradient on the way", "the answer on the way"],
)  # fmt: skip
@pytest.mark.parametrize("strategy", [ddlsim.AsyncParameterServer(), ddlsim.StaleSynchronous(3)], ids=str)
def test_a_worker_that_is_back_waits_for_nothing_from_before(strategy, fall, lost, tmp_path):
    """8 MB at 20 MB/s: a gradient is computed from 3.6 to 4.6 s, sent until 5.0, answered until 5.4. A worker that is
    away until 5.998 s begins its next step then, not at 6.12; what it had sent by half is lost."""
    (tmp_path / "m.toml").write_text(MODEL, encoding="utf-8")
    failures = traced(tmp_path, (fall, 0, 5.998 - fall))
    result = ddlsim.simulate(
        star(2, bandwidth="20 MB/s", latency="0 s"), tmp_path / "m.toml", strategy, 8, 1, steps=6, warmup=0,
        compute=ddlsim.Measured("1 s", 8), device="v100", max_time="1 h", failures=failures,
    )  # fmt: skip
    before = [1.4, 3.2] if lost else [1.4, 3.2, 5.0]
    after = [7.398 + 1.8 * step for step in range(6 - len(before))]
    assert [time for time, _ in result.recorder.updates] == pytest.approx([*before, *after])
    assert result.failure_timeline.lost == pytest.approx(lost)
    begun = [span.start for span in result.traced.recorder.spans if span.track == "worker 0" and span.name == "forward"]
    assert min(time for time in begun if time > fall) == pytest.approx(5.998)


def test_answers_of_before_do_not_count_for_what_comes_after(tmp_path):
    """A worker crashes again and again while others fill the server's link, so that old messages arrive late."""
    (tmp_path / "m.toml").write_text(MODEL, encoding="utf-8")
    rows = [(2.0 + 1.3 * i, i % 2, 0.05) for i in range(20)]
    strategy = ddlsim.AsyncParameterServer(apply_time="0.3 s")
    result = ddlsim.simulate(
        star(7, bandwidth="20 MB/s", latency="1 ms"), tmp_path / "m.toml", strategy, 8, 6, steps=40, warmup=0,
        compute=ddlsim.Measured("0.1 s", 8), device="v100", max_time="1 h", failures=traced(tmp_path, *rows),
    )  # fmt: skip
    assert len(result.recorder.updates) == 240
    made = [len(ends) for ends in result.recorder.step_end]
    assert 240 - 20 - 6 <= sum(made) <= 240  # an update whose answer is lost ends no step
    assert min(made) > 10


@pytest.mark.parametrize("name", few(FREE, 1))
def test_notes_ask_for_nothing_that_is_refused_or_given(name):
    failures = Failures("40 s", per="host", repair="8 s", restart="2 s")
    notes = [*simulated(FREE[name], failures, max_time="60 s", steps=10**6).notes]
    assert not any("set checkpoints" in note or "set max_time" in note for note in notes)
    notes = simulated(FREE[name], failures, max_time=math.inf).notes
    assert any("set max_time" in note for note in notes)
    with pytest.raises(ConfigError, match="leave checkpoints out"):
        simulated(FREE[name], failures, checkpoints=Checkpoints("1 min", stall="1 s"))


def test_timelines_show_what_a_worker_that_is_away_at_the_end_was_doing(tmp_path):
    """Crashes in the middle of a computation, and of a push: what is booked of them is shown."""
    strategy = ddlsim.AsyncParameterServer()
    pushes = simulated(strategy, workers=2, steps=3).recorder.updates[0][0]
    for fall in (0.4, (1.0 + pushes) / 2):
        one = simulated(strategy, traced(tmp_path, (fall, 0, 1e6)), workers=2, steps=3).experiment
        result = run(one, keep_spans=True)
        spans = [span for span in result.recorder.spans if span.track == "worker 0"]
        for kind in ("compute", "communication"):
            shown = sum(span.end - span.start for span in spans if span.kind == kind)
            assert shown == pytest.approx(result.recorder.seconds[0][kind], abs=1e-12)
        assert max(span.end for span in spans) == pytest.approx(fall)


@pytest.mark.parametrize("mtbf", ["1 s", "0.05 s"])
def test_short_trainings_sample_only_failures_that_they_reach(mtbf):
    """Without max_time, those of 30 days are not sampled beforehand: there would be more than a million."""
    fields = {"batch_size": 32, "workers": 4, "training": Training("digits", updates=1000)}
    failures = Failures(mtbf, repair="0.1 s", restart="10 ms", detection="1 ms")
    runs = [
        ddlsim.simulate("office-1gbe", "digits-cnn", FREE["downpour"], failures=failures, **fields, **more)
        for more in ({}, {"max_time": "600 s"})
    ]
    assert runs[0].simulated_time == runs[1].simulated_time < 4.0
    assert runs[0].goodput == runs[1].goodput
