"""Several jobs on one network: what they are alone, where nothing is shared; closed forms, where a trunk is."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from bundled_strategies import some
from draws import latin

import ddlsim
from ddlsim import (
    Affine,
    AllReduce,
    Background,
    ConfigError,
    Experiment,
    Gamma,
    Job,
    LinkFault,
    LocalSGD,
    Measured,
    Pause,
    Training,
)
from ddlsim.cluster import Cluster, Host, fat_tree, racks, star, with_detail
from ddlsim.cluster.calibration_table import CalibrationTable, CurveTable
from ddlsim.run import run
from ddlsim.run.files import SCHEMA
from ddlsim.run.simulate import Together
from ddlsim.runtime.context import StopRule
from ddlsim.strategies import (
    GossipSGD,
    ShardedUpdate,
)

STAR = Cluster.from_graph(star(12, bandwidth="1 Gbit/s", latency="20 us"))
SMALL = Experiment(STAR, "lenet5", AllReduce("ring"), 16, compute=Affine("1 ms", "0.2 ms"), steps=6)
#: trunk of the rate of a host's link
TRUNK = Cluster.from_graph(
    racks(2, 4, bandwidth="1 Gbit/s", latency=0.0, trunk_bandwidth="1 Gbit/s", trunk_latency=0.0)
)  # fmt: skip
STRATEGIES = some(
    "ddp trees nccl sharded local server asynchronous soft stale k-async buffered elastic neighbours gossip ad-psgd "
    "fsdp pipeline"
)


def seen(result):
    """Return all that a run is, as plain numbers."""
    recorder = result.recorder
    rows = [] if result.monitor is None else [row[:8] for row in result.monitor.history]
    return (
        result.end_time, recorder.updates, recorder.seconds, recorder.idle, recorder.step_end, recorder.staleness,
        result.n_messages, rows,
    )  # fmt: skip


def same(one, other):
    """Whether two runs are the same, bit for bit, but for the rounding of their bytes, added up in another order."""
    return seen(one) == seen(other) and one.nbytes_sent == pytest.approx(other.nbytes_sent, rel=1e-12)


@pytest.mark.parametrize(("name", "learns"), latin(STRATEGIES, [False, True]))
def test_jobs_on_links_of_their_own_are_what_they_are_alone(name, learns):
    training = Training("digits", rate=0.05, updates=6, evaluate_every=2) if learns else None
    model = "digits-cnn" if learns else "lenet5"
    one = SMALL.with_(strategy=STRATEGIES[name], workers=[0, 1, 2, 3], jitter=Gamma(0.2), seed=4, training=training,
                      model=model)  # fmt: skip
    other = one.with_(workers=[4, 5, 6, 7], seed=5, strategy=STRATEGIES["asynchronous"])
    third = SMALL.with_(workers=[8, 9, 10], jitter=Gamma(0.1))
    together = ddlsim.simulate_jobs([Job(one, "one"), Job(other, "other"), Job(third, "third")])
    for name_, experiment in (("one", one), ("other", other), ("third", third)):
        assert same(together[name_], run(experiment))
    assert same(run(one.with_(background=[Job(other), Job(third)])), run(one))


def test_one_job_is_written_in_the_singular():
    assert str(ddlsim.simulate_jobs([Job(SMALL)])).startswith("1 job on ")


def test_a_job_that_starts_later_does_the_same_later():
    one, other = SMALL.with_(workers=[0, 1, 2], jitter=Gamma(0.3)), SMALL.with_(workers=[3, 4, 5], steps=40)
    jobs = ddlsim.simulate_jobs([Job(other), Job(one, "late", start="30 ms")])
    alone, late = run(one), jobs["late"]
    assert jobs.runs[1].start == 0.03
    assert jobs.runs[1].end == pytest.approx(0.03 + alone.end_time, rel=1e-12)
    assert late.end_time == pytest.approx(alone.end_time, rel=1e-12)
    np.testing.assert_allclose(late.step_times, alone.step_times, rtol=1e-9)
    assert late.shares == pytest.approx(alone.shares)
    np.testing.assert_allclose(late.channel_nbytes, alone.channel_nbytes, rtol=1e-12)
    assert jobs.slowdowns == pytest.approx({"job 1": 1.0, "late": 1.0})
    assert jobs.fairness == pytest.approx(1.0)


# ------------------------------------------------------------ a trunk

COMPUTE = 0.5


def on_trunk(hosts, seconds=COMPUTE, steps=12, **changes):
    strategy = AllReduce("ring", "none", "given")
    return Experiment(
        TRUNK, "resnet50", strategy, 32, hosts, compute=Measured(seconds, 32), steps=steps, warmup=0, **changes
    )


def phases(experiment):
    """Return the seconds of a step alone: all but the all-reduce, and the all-reduce."""
    result = run(experiment)
    exchange = result.shares["communication"] * result.step_time
    return result.step_time - exchange, exchange


@pytest.mark.parametrize("part", [0.0, 0.1, 0.25, 0.4])
def test_two_jobs_that_overlap_stay_as_they_are(part):
    """A step takes t_c + 2 t_a - delta, for ever: fair sharing keeps an offset of delta < t_a and t_c."""
    one, other = on_trunk([0, 4]), on_trunk([1, 5])
    computing, exchange = phases(one)
    delta = part * min(computing, exchange)
    jobs = ddlsim.simulate_jobs([Job(one, "a"), Job(other, "b", start=delta)])
    # the first to exchange has the trunk alone for delta, then both have half of it
    expected = computing + 2.0 * exchange - delta
    for name in ("a", "b"):
        np.testing.assert_allclose(jobs[name].step_times[:-1], expected, rtol=1e-6)
    assert jobs.concurrent_step_time("a") == pytest.approx(expected, rel=1e-6)


def test_two_jobs_that_take_turns_do_not_meet():
    """With delta >= t_a, and computing that takes as long, each step takes what it takes alone (CASSINI)."""
    one, other = on_trunk([0, 4], seconds=2.0), on_trunk([1, 5], seconds=2.0)
    computing, exchange = phases(one)
    assert computing > exchange
    jobs = ddlsim.simulate_jobs([Job(one, "a"), Job(other, "b", start=1.01 * exchange)])
    assert jobs.slowdowns == pytest.approx({"a": 1.0, "b": 1.0}, rel=1e-9)
    found = ddlsim.place([Job(one, "a"), Job(other, "b")], shift=True)
    assert found.tried[0].mean > 1.2
    assert found.best.how == "shifted"
    assert found.best.mean == pytest.approx(1.0, rel=1e-6)
    again = ddlsim.simulate_jobs(found.jobs)
    assert again.concurrent_step_time("b") == pytest.approx(run(one).step_time, rel=1e-6)


def test_background_traffic_takes_what_is_fair():
    """Of a link of rate 1 a greedy flow leaves a half, one limited to 0.3 leaves 0.7, and one that is off nothing."""
    one = on_trunk([0, 4])
    computing, exchange = phases(one)

    def step(*traffic):
        return run(one.with_(background=traffic)).step_time

    assert step(Background("h1", "h5")) == pytest.approx(computing + 2.0 * exchange, rel=1e-6)
    assert step(Background("h1", "h5", "300 Mbit/s")) == pytest.approx(computing + exchange / 0.7, rel=1e-6)
    assert step(Background("h1", "h5", "800 Mbit/s")) == pytest.approx(computing + 2.0 * exchange, rel=1e-6)
    assert step(Background("h1", "h2")) == pytest.approx(computing + exchange, rel=1e-9)
    assert step(Background("h1", "h5", start="1 h")) == pytest.approx(computing + exchange, rel=1e-9)


def test_goodput_and_times_of_background_traffic(tmp_path):
    one = on_trunk([2, 3], steps=40)  # does not meet it
    path = tmp_path / "trace.csv"
    path.write_text("time_s,rate\n0,100 Mbit/s\n2,25e6\n4,0\n6,12.5e6\n", encoding="utf-8")
    traffic = [
        Background("h0", "h4", "200 Mbit/s", name="limited"),
        Background("h1", "h5", "100 Mbit/s", on="250 ms", off="750 ms"),
        Background("h6", "h2", trace=path, start="1 s", end="9 s"),
    ]
    jobs = ddlsim.simulate_jobs([Job(one, endless=True), Job(one.with_(workers=[7], steps=20)), *traffic])
    limited, pulsed, traced = jobs.goodputs
    assert limited == pytest.approx(25e6, rel=1e-9)
    whole = int(jobs.end_time)
    on = 0.25 * whole + min(0.25, jobs.end_time - whole)
    assert pulsed == pytest.approx(12.5e6 * on / jobs.end_time, rel=1e-9)
    assert traced == pytest.approx((2 * 12.5e6 + 2 * 25e6 + 2 * 12.5e6) / 8.0, rel=1e-9)
    assert "background limited: 200 Mbit/s on average" in str(jobs)
    assert "slowdown  " not in str(jobs).splitlines()[1]  # which would simulate each alone
    assert jobs.slowdowns
    assert "slowdown  " in str(jobs).splitlines()[1]
    assert jobs.links["background"].sum() > 0.0


# ------------------------------------------------------------ known costs

NCCL = AllReduce("ring", "none", cost="nccl")


def test_jobs_of_known_cost_share_a_trunk():
    """Two jobs, each of which fills a trunk of 1 GB/s alone, slow each other down as simulated ones do."""
    one = on_trunk([0, 4], steps=30, seconds=0.05).with_(strategy=NCCL)
    jobs = ddlsim.simulate_jobs([Job(one, "a"), Job(one.with_(workers=[1, 5]), "b")])
    plain = one.with_(strategy=AllReduce("ring", "none"))
    simulated = ddlsim.simulate_jobs([Job(plain, "a"), Job(plain.with_(workers=[1, 5]), "b")])
    assert jobs.slowdowns == pytest.approx(simulated.slowdowns, rel=0.03)
    assert min(jobs.slowdowns.values()) > 1.5
    assert 0.9 < jobs.links["utilisation"].max() <= jobs.links["busy"].max() <= 1.0 + 1e-9
    assert jobs.links["b"].sum() == pytest.approx(jobs["b"].channel_nbytes.sum())
    assert jobs["a"].nbytes_sent == pytest.approx(run(one).nbytes_sent)
    assert not any("does not slow" in note for note in jobs["a"].notes)


def test_a_long_collective_of_known_cost_does_not_hold_up_a_short_one():
    """Links are shared, not taken in turns: the small model's steps take about twice as long, not as a whole large
    one's."""
    large = on_trunk([0, 4], steps=3, seconds=0.01).with_(strategy=NCCL)
    small = large.with_(workers=[1, 5], model="lenet5", steps=30, compute=Affine("1 ms", 0.0))
    jobs = ddlsim.simulate_jobs([Job(large, "large"), Job(small, "small")])
    assert 1.1 < jobs.slowdowns["small"] < 2.1
    assert run(large).step_time > 50 * run(small).step_time


def test_jobs_of_known_cost_that_leave_each_other_room_take_what_they_take_alone():
    """Four jobs of one link each behind a trunk of four times the bandwidth."""
    wide = Cluster.from_graph(racks(2, 4, bandwidth="1 Gbit/s", latency=0.0, trunk_bandwidth="4 Gbit/s"))
    one = Experiment(wide, "resnet18", NCCL, 32, compute=Measured("1 ms", 32), steps=5)
    jobs = ddlsim.simulate_jobs([Job(one.with_(workers=[i, 4 + i]), f"{i}") for i in range(4)])
    assert set(jobs.slowdowns.values()) == {1.0}


def with_links(**detail):
    return with_detail(Cluster.from_graph(star(4, bandwidth="10 Gbit/s", latency="20 us")), **detail)


OVERHEADS = Host(send_overhead=2e-4, recv_overhead=3e-4)


@pytest.mark.parametrize("cost", ["nccl", "calibrated"])
@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.from_graph(star(4, bandwidth="10 Gbit/s", latency="20 us", host=OVERHEADS)),
        with_links(transport="tcp-cubic"),
        with_links(transport="tcp-cubic", flow_rate="1 Gbit/s", connections=2),
        with_links(transport="infiniband", rendezvous=1e3, flow_rate="2 Gbit/s"),
        with_links(frame_header="66 B", frame_payload="1448 B"),
        with_links(frame_header="66 B", frame_payload="1448 B", burst="4542 B", reverse_load=0.0218),
        with_links(sharing="fifo"),
    ],
    ids=["overheads of hosts", "slow start", "connections", "rendezvous", "frames", "acknowledgements", "queues"],
)
def test_known_costs_on_a_shared_network_are_those_on_an_idle_one(cluster, cost):
    """Messages of a collective whose time is known add no latency, overheads, windows or frames to that time."""
    quick = CurveTable(
        operation="all_reduce", algorithm="ring", per_message=0.01, per_byte=[0.01], dof=5.0, spread=0.03,
        covariance=[[0.0] * 2] * 2, nbytes=[1, 2**40], ranks=[2, 64],
    )  # fmt: skip
    cluster = dataclasses.replace(cluster, calibration=CalibrationTable(curves=[quick]))
    for model in ("lenet5", "resnet18"):
        strategy = AllReduce("ring", "layer", cost=cost)
        one = Experiment(cluster, model, strategy, 1, compute=Measured("1 ms", 1), steps=2, warmup=0)
        alone, paused = run(one), run(one.with_(faults=[Pause(1e6, 1.0)]))
        job = ddlsim.simulate_jobs([Job(one, "a")])["a"]
        assert seen(job) == seen(paused)
        assert [time for time, _ in paused.recorder.updates] == pytest.approx(
            [time for time, _ in alone.recorder.updates], rel=1e-12
        )
        assert paused.nbytes_sent == pytest.approx(alone.nbytes_sent, rel=1e-12)


@pytest.mark.parametrize("strategy", [NCCL, ShardedUpdate(cost="nccl"), LocalSGD(2, cost="nccl")], ids=str)
def test_known_costs_share_links_with_background_traffic(strategy):
    """The busy share of a link was 1.997 beside a greedy flow."""
    one = Experiment("office-1gbe", "resnet18", strategy, 32, [0, 1], compute=Measured("1 ms", 32), steps=4, warmup=0)
    plain, background = run(one), run(one.with_(background=[Background("h0", "h1")]))
    assert background.links["busy"].max() <= 1.0 + 1e-9
    assert (background.links["utilisation"] <= background.links["busy"] + 1e-9).all()
    assert background.end_time == pytest.approx(2.0 * plain.end_time, rel=0.02)
    assert background.nbytes_sent == pytest.approx(plain.nbytes_sent)
    job = run(one.with_(background=[Job(one.with_(workers=[2, 3]))]))
    assert seen(job) == seen(plain)


# ------------------------------------------------------------ devices


def test_placements():
    cluster = Cluster.from_graph(racks(2, 4, bandwidth="1 Gbit/s", latency="10 us"))
    base = Experiment(cluster, "lenet5", workers=4, steps=2)
    packed = ddlsim.simulate_jobs([Job(base, "a"), Job(base, "b")])
    assert packed.table["machines"].tolist() == ["h0, h1, h2, h3", "h4, h5, h6, h7"]
    spread = ddlsim.simulate_jobs([Job(base, "a", placement="spread"), Job(base, "b", placement="spread")])
    assert sorted(spread.runs[0].places) == [0, 1, 4, 5]
    given = ddlsim.simulate_jobs([Job(base, "a", placement=[7, 0, 1, 2])])
    assert given.runs[0].places == (7, 0, 1, 2)
    drawn = [ddlsim.simulate_jobs([Job(base.with_(seed=s), placement="random")]).runs[0].places for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_placement_is_found():
    """Two jobs whose places would cross the trunk are brought apart."""
    one = on_trunk(4, steps=3)
    found = ddlsim.place([Job(one), Job(one)], tries=6)
    assert found.best.how == "packed"
    assert found.best.mean == pytest.approx(1.0)
    assert max(each.mean for each in found.tried) > 1.3
    assert found.table["mean"].is_monotonic_increasing
    assert "job 1: on h0, h1, h2, h3" in str(found)
    # where one has a place of its own, the other goes elsewhere
    fixed = ddlsim.place([Job(on_trunk([0, 1, 2, 4], steps=3)), Job(on_trunk(2, steps=3))], tries=9)
    chosen = [job.placement for job in fixed.jobs]
    assert chosen[0] == (0, 1, 2, 4)
    assert not set(chosen[0]) & set(chosen[1])


def test_jobs_wait_for_devices():
    one = SMALL.with_(workers=8, steps=5)
    jobs = ddlsim.simulate_jobs([Job(one), Job(one, start="1 ms"), Job(one.with_(workers=2), start="2 ms")], queue=True)
    first, second, third = jobs.runs
    assert second.start == first.end
    assert third.start == first.end  # first come, first served, though its devices were free
    assert jobs.table["waited"].tolist() == [0.0, second.start - 0.001, third.start - 0.002]
    assert "waited" in str(jobs)


def test_a_job_that_goes_on_ends_with_the_others():
    jobs = ddlsim.simulate_jobs([
        Job(SMALL.with_(workers=3), "endless", endless=True), Job(SMALL.with_(workers=3, steps=60), "other"),
    ])  # fmt: skip
    assert jobs.runs[0].end == jobs.runs[1].end == jobs.end_time
    assert len(jobs["endless"].recorder.updates) > 40
    assert jobs["endless"].stop_reason == "others have ended"


class Forever:
    """A strategy whose workers wait for what never happens."""

    label = "forever"

    def start(self, context):
        for worker in context.workers:
            context.loop.env.process(self.wait(context, worker))

    def wait(self, context, worker):
        yield from worker.block(context.loop.env.event(), "Godot")

    def updates(self, steps, n_workers):
        return steps


ENDLESS = {"traffic": Background("h0", "h1"), "job": Job(SMALL.with_(workers=2), endless=True)}


@pytest.mark.parametrize("other", ENDLESS.values(), ids=ENDLESS)
def test_who_waits_in_vain_is_named_though_others_go_on(other):
    stuck = Job(SMALL.with_(workers=[8, 9], strategy=Forever()), "stuck")
    with pytest.raises(ddlsim.DeadlockError, match=r"stuck.*: deadlock at .* worker 0 waits for Godot"):
        ddlsim.simulate_jobs([stuck, other])


def test_an_interrupt_keeps_what_has_been_simulated(monkeypatch):
    updated = StopRule.updated

    def interrupted(self, n_samples):
        updated(self, n_samples)
        if len(self.recorder.updates) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(StopRule, "updated", interrupted)
    jobs = ddlsim.simulate_jobs([
        Job(SMALL.with_(workers=2, steps=50), "a"), Job(SMALL.with_(workers=2), "late", start="1 h"),
        Job(SMALL.with_(workers=2, steps=50, batch_size=64), "slow"),
    ])  # fmt: skip
    assert jobs.interrupted
    assert "interrupted" in str(jobs)
    assert jobs.names[0] == "a"
    assert len(jobs["a"].recorder.updates) == 3
    assert "late" not in jobs.names
    monkeypatch.undo()
    late = Job(SMALL.with_(workers=2, compute=Affine("1 h", 0.0)), endless=True)
    with pytest.raises(ddlsim.DdlsimError, match="all other jobs ended before its first update"):
        ddlsim.simulate_jobs([Job(SMALL.with_(workers=2, steps=1, warmup=0)), late])


def test_faults_of_different_jobs_on_one_link_multiply(tmp_path):
    """Half of half is a quarter, whichever jobs bring the faults: ten steps of 1 s end at 14.5 s."""
    file = tmp_path / "wide.toml"  # 100 MB of gradients
    file.write_text(
        'title = "wide"\nsources = ["x"]\ninput = [1000]\n'
        'layers = [{ type = "dense", name = "w", units = 25000, bias = false }]\n',
        encoding="utf-8",
    )
    net = Cluster.from_graph(star(4, bandwidth="100 MB/s", latency="0 s"))
    long, short = LinkFault("h0", "switch", 1, 8, 0.5), LinkFault("h0", "switch", 2, 2, 0.5)

    def run(places, faults):
        return Experiment(
            net, str(file), AllReduce("ring", "none"), 1, workers=places, compute=Measured("1 us", 1), steps=10,
            warmup=0, faults=faults,
        )  # fmt: skip

    def jobs(one, other, *of_all, start=0.0):
        two = [Job(run([0, 1], one), "a"), Job(run([2, 3], other), "b", start=start)]
        return ddlsim.simulate_jobs(two, faults=of_all)["a"].end_time

    right = ddlsim.simulate(run([0, 1], [long, short])).end_time
    assert right == pytest.approx(14.5, abs=1e-4)
    for end in (
        jobs([long], [short]),
        jobs([short], [long]),
        jobs([long], [], short),
        jobs([], [], long, short),
        jobs([long], [LinkFault("h0", "switch", 0.5, 2, 0.5)], start=1.5),
        ddlsim.simulate(run([0, 1], [long]).with_(background=[Job(run([2, 3], [short]), "b")])).end_time,
    ):
        assert end == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize("name", ["asynchronous", "stale", "soft", "k-async", "gossip", "ad-psgd"])
def test_asynchronous_workers_crash_beside_others_as_they_do_alone(name):
    failures = ddlsim.Failures("40 ms", per="host", repair="8 ms", restart="2 ms")
    one = SMALL.with_(strategy=STRATEGIES[name], workers=[0, 1, 2, 3], failures=failures, max_time="0.5 s", steps=40)
    jobs = ddlsim.simulate_jobs([Job(one, "one"), Job(SMALL.with_(workers=[4, 5, 6]), "other")])
    alone = run(one)
    assert len(alone.failure_timeline.events) > 3
    assert same(jobs["one"], alone)
    assert jobs["one"].availability == alone.availability < 1.0
    late = ddlsim.simulate_jobs([Job(SMALL.with_(workers=[4, 5, 6]), "other"), Job(one, "late", start="1 s")])["late"]
    assert late.end_time == pytest.approx(alone.end_time, rel=1e-9)


@pytest.mark.parametrize("strategy", [GossipSGD(), AllReduce()], ids=str)
def test_jobs_that_send_nothing(strategy):
    """One worker each: the first job ends before anything has been sent, or asked for a route."""
    one = Experiment("office-1gbe", "lenet5", strategy, 8, workers=1, steps=2)
    jobs = ddlsim.simulate_jobs([Job(one, "a"), Job(one, "b", start=0.003), Job(one, "c", start="1 h")])
    assert [jobs[name].nbytes_sent for name in "abc"] == [0.0] * 3
    assert jobs["b"].step_time == pytest.approx(run(one).step_time)
    assert run(one.with_(background=[Job(one)])).step_time == run(one).step_time


def test_all_jobs_go_around_a_link_that_is_down():
    """What went over which link adds up over the jobs (checked), before and after routes have changed."""
    tree = Cluster.from_graph(fat_tree(4, bandwidth="1 Gbit/s", latency="5 us"))
    one = Experiment(tree, "resnet50", AllReduce("ring", "none"), 32, 4, compute=Measured("50 ms", 32), steps=6)
    jobs = [Job(one.with_(seed=i), placement="random") for i in range(3)]
    traffic = Background("h0", "h9", "400 Mbit/s")
    plain = ddlsim.simulate_jobs([*jobs, traffic])
    used = plain.links[plain.links["utilisation"] > 0].itertuples()
    link = next(row for row in used if not (row.source.startswith("h") or row.target.startswith("h")))
    down = ddlsim.LinkFault(link.source, link.target, "200 ms", "10 min", reroute="100 ms")
    around = ddlsim.simulate_jobs([*jobs, traffic], faults=[down])
    assert around.end_time >= plain.end_time + 0.01
    stays = ddlsim.LinkFault(link.source, link.target, "200 ms", "10 min", reroute=float("inf"))
    waits = ddlsim.simulate_jobs([*jobs, traffic], faults=[stays])
    assert waits.end_time > 600.0 > around.end_time
    own = one.with_(workers=[0, 5, 10], faults=[down])
    assert run(own.with_(background=[Job(one.with_(workers=[1, 6]))])).end_time < 600.0
    with pytest.raises(ConfigError, match=r"pass the LinkFault to simulate_jobs\("):
        ddlsim.simulate_jobs([Job(one.with_(workers=[1, 6])), Job(own, start="100 ms")])


# ------------------------------------------------------------ what does not fit

ERRORS = {
    "no jobs": (lambda: ddlsim.simulate_jobs([]), "must contain at least one ddlsim.Job with endless=False"),
    "occupied": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=[0, 1])), Job(SMALL.with_(workers=[1, 2]))]),
        "job 'job 2': at 0 s devices [1] are occupied by job 'job 1'; start it later",
    ),
    "occupied by the run": (
        lambda: ddlsim.simulate(SMALL.with_(workers=[0, 1], background=[Job(SMALL.with_(workers=[1, 2]))])),
        "at 0 s devices [1] are occupied by the run itself; start it later, place it elsewhere",
    ),
    "full": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=8)), Job(SMALL.with_(workers=8))]),
        "job 'job 2': at 0 s it needs 8 devices, but only 4 of 12 are free",
    ),
    "too large": (lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=13))]), "needs 13 devices, but"),
    "two clusters": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=2)), Job(on_trunk([0, 1]))]),
        "job 'job 2': its cluster is 'racks-8', but other jobs run on 'star-12'",
    ),
    "one name": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=2), "a"), Job(SMALL.with_(workers=2), "a")]),
        "two jobs have the name 'a'",
    ),
    "no such node": (
        lambda: run(SMALL.with_(background=Background("h0", "h99"))),
        "h0 -> h99: cluster 'star-12': unknown node 'h99'; did you mean",
    ),
    "a switch": (lambda: run(SMALL.with_(background=Background("h0", "switch"))), "switch is a switch of 'star-12'"),
    "itself": (lambda: Background("h0", "h0"), "source = target = 'h0'"),
    "on without off": (lambda: Background("h0", "h1", on="1 s"), "off is missing"),
    "backwards": (lambda: Background("h0", "h1", start="2 s", end="1 s"), "end = '1 s': start must be before end"),
    "two placements": (
        lambda: Job(SMALL.with_(workers=[0, 1]), placement="spread"), "has no effect with workers = [0, 1]"
    ),
    "nested": (
        lambda: Job(SMALL.with_(background=Background("h0", "h1"))),
        "Job: background of an experiment is its other jobs and traffic",
    ),
    "a life": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=2, failures=ddlsim.Failures("1 h")))]),
        "job 'job 1': failures and checkpoints",
    ),
    "anything": (lambda: SMALL.with_(background=["h0"]), "must be a ddlsim.Background or ddlsim.Job object"),
    "of company": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=2)), Job(SMALL.with_(workers=2))])["job 1"].stability(),
        "stability: not available for a run of simulate_jobs",
    ),
    "no timeline": (
        lambda: ddlsim.simulate_jobs([Job(SMALL.with_(workers=2))]).plot_timeline(), "simulate_jobs(..., timeline=True)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_one_line(name):
    call, text = ERRORS[name]
    with pytest.raises(ConfigError) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,rate\n0,1\n", "column 'time_s' is missing"),
        ("time_s,rate\n0,fast\n", ":2: rate: 'fast' is not a bandwidth"),
        ("time_s,rate\n1,5\n1,6\n", ":3: time_s = 1.0: must be later"),
        ("time_s,rate\n0,0\n", "all rates are 0, so no traffic flows"),
    ],
)
def test_traces_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        Background("h0", "h1", trace=path)
    assert message in str(error.value)


# ------------------------------------------------------------ files, output


def test_files_of_jobs(tmp_path):
    (tmp_path / "one.toml").write_text('cluster = "office-1gbe"\nmodel = "lenet5"\nworkers = 2\nsteps = 2\n')
    path = tmp_path / "jobs.toml"
    path.write_text(
        'cluster = "office-1gbe"\n[[jobs]]\nname = "a"\nexperiment = "one.toml"\n'
        '[[jobs]]\nstart = "5 ms"\nplacement = [4, 5]\nexperiment = { model = "lenet5", steps = 3 }\n'
        '[[background]]\nsource = "h0"\ntarget = "h1"\nrate = "10 Mbit/s"\n'
    )
    jobs = ddlsim.load_jobs(path).simulate(timeline=True)
    assert jobs.names == ["a", "job 2"]
    assert jobs.runs[1].places == (4, 5)
    assert jobs.goodputs[0] == pytest.approx(1.25e6, rel=0.01)
    told = json.loads(jobs.to_json(tmp_path / "jobs.json"))
    assert [each["name"] for each in told["jobs"]] == ["a", "job 2"]
    assert "slowdown" not in told["jobs"][0]
    jobs.plot_timeline(tmp_path / "jobs.png")
    assert "<table" in jobs._repr_html_()
    assert repr(jobs) == f"<Jobs: a, job 2 on office-1gbe, {jobs.end_time:.6g} s>"
    path.write_text('cluster = "office-1gbe"\n[[jobs]]\nnme = "a"\nexperiment = "one.toml"\n')
    with pytest.raises(ConfigError, match=r"jobs\[0\].*nme"):
        ddlsim.load_jobs(path)


def test_what_is_beside_is_written_and_read(tmp_path):
    other = Experiment("office-1gbe", "lenet5", workers=2)
    experiment = Experiment(
        "office-1gbe", "lenet5", workers=2,
        background=[Job(other, "b", placement="spread"), Background("h0", "h1", "5 Mbit/s", on="1 ms", off="2 ms")],
    )  # fmt: skip
    path = tmp_path / "e.toml"
    experiment.save(path)
    assert ddlsim.load_experiment(path) == experiment
    made = {}
    exec(f"import ddlsim\nx = {SCHEMA.expression(experiment, '')}", made)
    assert made["x"] == experiment
    assert run(experiment).step_time > run(experiment.with_(background=())).step_time


def test_studies_vary_what_is_beside():
    base = on_trunk([0, 4], steps=2)
    rates = {"none": (), "some": (Background("h1", "h5", "300 Mbit/s"),), "greedy": (Background("h1", "h5"),)}
    table = ddlsim.Study(base=base, vary={"background": rates}).run(jobs=1)
    times = table.frame["step_time"].tolist()
    assert times == sorted(times)
    assert times[0] < times[2]


# ------------------------------------------------------------ random worlds


def test_the_network_says_who_has_put_what_on_it():
    """The check of the whole network finds bytes that nobody has sent."""
    together = Together(STAR, [])
    for place in (0, 4):
        together.expect(Job(SMALL.with_(workers=[place, place + 1])), f"job {place}")
    together.until_all_have_ended()
    together.check()
    together.network.engine.net.channels["nbytes"][0] += 1e6
    with pytest.raises(ddlsim.ConservationError, match="carried"):
        together.check()


def test_many_jobs_on_a_fat_tree():
    """Eight jobs, spread over a fat tree, slow each other down, but none of them for ever."""
    tree = Cluster.from_graph(fat_tree(4, bandwidth="1 Gbit/s", latency="5 us"))
    one = Experiment(tree, "resnet50", AllReduce("ring", "none"), 32, 4, compute=Measured("50 ms", 32), steps=3)
    jobs = ddlsim.simulate_jobs([Job(dataclasses.replace(one, seed=i), placement="random") for i in range(4)])
    assert all(slowdown >= 1.0 - 1e-9 for slowdown in jobs.slowdowns.values())
    assert max(jobs.slowdowns.values()) > 1.01
    assert 0.25 < jobs.fairness <= 1.0


@pytest.mark.parametrize(
    "text",
    [
        '[[faults]]\ntype = "evil_of_jobs:Fault"\n',
        '[[jobs]]\nexperiment = { model = "lenet5", strategy = { type = "evil_of_jobs:Way" } }\n',
        '[[jobs]]\nexperiment = { model = "lenet5", fabric = { algorithm = "evil_of_jobs:ring" } }\n',
        '[[background]]\ntype = "evil_of_jobs:Load"\n',
    ],
)
def test_no_file_of_jobs_imports_code(tmp_path, monkeypatch, text):
    (tmp_path / "evil_of_jobs.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "jobs.toml").write_text(f'cluster = "office-1gbe"\n{text}')
    with pytest.raises(ConfigError, match=r"would import code|unknown type"):
        ddlsim.load_jobs(tmp_path / "jobs.toml")
    assert "evil_of_jobs" not in sys.modules
