"""Workers that stand still and links that fail in runs, whatever the strategy."""

import dataclasses
import math

import pytest
from bundled_strategies import some
from draws import few

import ddlsim
from ddlsim import Affine, Background, ConfigError, LinkFault, Slowdown, Stop, Training
from ddlsim.cluster import leaf_spine, star, torus
from ddlsim.cluster.calibration_table import CalibrationTable, CurveTable
from ddlsim.reliability import Effect
from ddlsim.reliability.faults import links_between

GRAPH = star(6, bandwidth="100 Mbit/s", latency="70 us")
SWITCH = next(iter(GRAPH.neighbors("h0")))
STRATEGIES = some("all-reduce ddp server asynchronous stale local neighbours ad-psgd sharded")


def simulated(strategy, **options):
    return ddlsim.simulate(
        GRAPH, "lenet5", strategy, 8, 4, compute=Affine("100 ms", 0.0), steps=8, warmup=0, **options
    )  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_them(name):
    strategy = STRATEGIES[name]
    plain = simulated(strategy)
    assert simulated(strategy, faults=[Stop(1, "100 h", "1 s")]).step_times.tolist() == plain.step_times.tolist()
    stopped = simulated(strategy, faults=Stop(1, "50 ms", "20 s"))
    slow = simulated(strategy, faults=LinkFault("h1", SWITCH, "50 ms", "20 s", 0.001))
    down = simulated(strategy, faults=[LinkFault(SWITCH, "h1", "50 ms", "20 s")])
    if name in ("asynchronous", "ad-psgd"):  # the others make the updates
        assert plain.end_time * 0.9 < stopped.end_time < 20.0
        assert len(stopped.recorder.step_end[1]) < len(plain.recorder.step_end[1])
        assert down.end_time < 20.0
    else:
        slack = 0.5 if name == "stale" else 0.15  # the others may go ahead
        assert stopped.end_time == pytest.approx(plain.end_time + 20.0, abs=slack)
        assert down.end_time > 20.0
        assert plain.end_time < slow.end_time <= down.end_time * 1.05


def test_values_are_those_of_an_undisturbed_run():
    def learnt(**options):
        return ddlsim.simulate(
            GRAPH, "digits-cnn", ddlsim.AllReduce("ring"), 32, 4, compute=Affine("100 ms", 0.0),
            training=Training("digits", updates=10, evaluate_every=5), **options,
        )  # fmt: skip

    plain, stopped = learnt(), learnt(faults=Stop([0, 2], "250 ms", "3 s"))
    assert stopped.params.tobytes() == plain.params.tobytes()
    assert stopped.end_time == pytest.approx(plain.end_time + 3.0, abs=0.1)


def test_files_and_studies_have_them(tmp_path):
    (tmp_path / "run.toml").write_text(
        'cluster = "office-1gbe"\nworkers = 4\nsteps = 3\n'
        '[[faults]]\ntype = "stop"\nranks = [1]\nstart = "10 ms"\nduration = "2 s"\n'
        '[[faults]]\ntype = "link-fault"\nsource = "h0"\ntarget = "switch"\nstart = "1 s"\n'
        'duration = "1 s"\nfactor = 0.5\n',
        encoding="utf-8",
    )
    experiment = ddlsim.load_experiment(tmp_path / "run.toml")
    assert experiment.faults == (Stop(1, 0.01, 2.0), LinkFault("h0", "switch", 1.0, 1.0, 0.5))
    again = tmp_path / "again.toml"
    again.write_text(experiment.to_toml(), encoding="utf-8")
    assert ddlsim.load_experiment(again).faults == experiment.faults
    assert ddlsim.simulate(experiment).end_time > 2.0
    for fault in (LinkFault("h0", "switch", 1.0, 1.0), LinkFault("h0", "switch", 1.0, 1.0, reroute=math.inf)):
        again.write_text(experiment.with_(faults=fault).to_toml(), encoding="utf-8")
        assert ddlsim.load_experiment(again).faults == (fault,)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Stop(4, 0, 1), r"faults: Stop\(ranks=\(4,\), start=0\.0, duration=1\.0\) affects rank 4"),
        (LinkFault("h9", SWITCH, 0, 1), r"faults: cluster 'star-6': unknown node 'h9'; did you mean 'h5'"),
        (LinkFault("h0", "h1", 0, 1), "cluster 'star-6' has no link between h0 and h1; the neighbours"),
    ],
)
def test_faults_of_what_is_not_there(fault, message):
    with pytest.raises(ConfigError, match=message):
        simulated(ddlsim.AllReduce(), faults=fault)


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="Stop: ranks = "):
        Stop((), 0, 1)
    with pytest.raises(ConfigError, match="LinkFault: factor = 2"):
        LinkFault("a", "b", 0, 1, 2)
    with pytest.raises(ConfigError, match="faults"):
        simulated(ddlsim.AllReduce(), faults="h0")


CLOS = leaf_spine(2, 2, 2, bandwidth="100 Mbit/s", latency="70 us")
TRUNKS = [(f"leaf{leaf}", f"spine{spine}") for leaf in range(2) for spine in range(2)]


@pytest.mark.parametrize("name", few(STRATEGIES, 3))
def test_every_strategy_goes_round_a_link_that_is_down(name):
    def took(*faults):
        return ddlsim.simulate(
            CLOS, "lenet5", STRATEGIES[name], 8, 4 if name not in ("server", "asynchronous", "stale") else 3,
            compute=Affine("100 ms", 0.0), steps=8, warmup=0, faults=faults,
        ).end_time  # fmt: skip

    # of four trunks three carry what all four did: two of them would wait for ever
    for trunk in TRUNKS:
        waits = took(LinkFault(*trunk, "50 ms", "20 s", reroute=math.inf))
        endless = took(LinkFault(*trunk, "50 ms", "20 s", reroute="100 ms"))
        assert endless <= waits
        assert endless < took() * 1.6 + 0.5
    assert max(took(LinkFault(*trunk, "50 ms", "20 s", reroute=math.inf)) for trunk in TRUNKS) > took()


def test_until_the_fabric_knows_traffic_waits():
    def took(**options):
        fault = LinkFault("h0", "h1", "1 s", "50 s", **options)
        return ddlsim.simulate(
            torus([4], bandwidth="100 Mbit/s", latency="70 us"), "lenet5", ddlsim.AllReduce("ring"), 8, 4,
            compute=Affine("100 ms", 0.0), steps=50, warmup=0, faults=fault,
        ).end_time  # fmt: skip

    plain, at_once = took(reroute=60.0) - 50.0, took(reroute=0.0)
    assert took(reroute=math.inf) == took(reroute=60.0) > 50.0
    assert at_once > plain
    assert took(reroute="2 s") == pytest.approx(at_once + 2.0, abs=0.15)  # less what computes meanwhile
    assert took() == took(reroute="1 s")


def test_link_faults_say_what_makes_no_sense():
    with pytest.raises(ConfigError, match="reroute = '2 s' has no effect with factor"):
        LinkFault("h0", "h1", 0, 1, 0.5, reroute="2 s")


# ------------------------------------------------------------ what is counted


def stopped(strategy, **options):
    return ddlsim.simulate(
        "office-1gbe", "lenet5", strategy, 32, 3, compute=Affine("1 s", 0.0), steps=10, warmup=0,
        device=dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=0.0), **options,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", [
    ddlsim.AllReduce(), ddlsim.AllReduce("ring", "none"), ddlsim.LocalSGD(2), ddlsim.ParameterServer(), ddlsim.DPSGD(),
    ddlsim.StaleSynchronous(1), ddlsim.AsyncParameterServer(), ddlsim.ADPSGD(), ddlsim.KAsync(2),
    ddlsim.BackupWorkers(1),
], ids=lambda each: type(each).__name__)  # fmt: skip
def test_a_worker_that_stands_still_does_not_compute(strategy):
    """50 s in the middle of computing: the device is idle, and so is its power."""
    result = stopped(strategy, faults=[Stop(0, "5 s", "50 s"), Stop(0, "6 s", "2 s")])
    compute, idle = result.workers["compute"], result.workers["idle"]
    still = min(50.0, result.end_time - 5.0)
    # less than the step under way is undone or unfinished at the end
    assert compute[0] == pytest.approx(min(10.0, result.end_time - still), abs=1.1)
    assert idle[0] == pytest.approx(still, abs=0.11)
    assert result.energy == pytest.approx(300.0 * compute.sum())
    shown = [s for s in result.traced.recorder.spans if s.track == "worker 0" and s.kind == "compute"]
    assert sum(span.end - span.start for span in shown) == pytest.approx(compute[0], abs=1e-9)
    assert not any(span.start < 54.999 and span.end > 5.001 for span in shown)


def test_a_stop_is_not_computing():
    """Ten steps of 1 s, one of three workers stopped for 50 s: ten seconds of computing each, not 60."""
    result = stopped(ddlsim.AllReduce(), faults=[Stop(0, "5 s", "50 s")])
    assert result.workers["compute"].tolist() == pytest.approx([10.0, 10.0, 10.0])
    assert result.energy == pytest.approx(3 * 10 * 300.0)
    random = stopped(ddlsim.AllReduce(), faults=ddlsim.RandomFaults("20 s", "30 s", kind="stop", per="device"), seed=1)
    assert random.sampled_faults
    assert random.workers["compute"].tolist() == pytest.approx([10.0, 10.0, 10.0])


def test_a_run_that_stalls_says_so_and_counts_the_time():
    """Four steps, then a link is down until max_time: at most 8 samples/s in 60 s, not the 95.7 of the first steps."""
    fault = LinkFault("h0", "switch", "5 s", "1000 s", 0.0)
    result = stopped(ddlsim.AllReduce(), max_time="60 s", faults=fault)
    assert result.throughput == pytest.approx(4 * 96 / 60.0)
    assert result.step_time == pytest.approx(15.0)
    assert result.efficiency < 0.1
    assert any("no update in the last 56" in note or "no update in the last 55.9" in note for note in result.notes)
    cut = stopped(ddlsim.AllReduce(), max_time="8.5 s")  # in the middle of a step
    assert cut.throughput == pytest.approx(stopped(ddlsim.AllReduce()).throughput)
    assert not any("no update" in note for note in cut.notes)


def test_what_comes_after_the_end_is_said():
    late = [Stop(0, "100 s", "1 s"), LinkFault("h0", "switch", "500 s", "10 s")]
    background = [Background("h3", "h4", start="100 s"), Background("h3", "h4", start="1 s")]
    result = stopped(
        ddlsim.AllReduce(), faults=[*late, Stop(1, "1 s", "1 s")], slowdowns=[Slowdown(1, "50 s", "5 s", 2.0)],
        background=background,
    )  # fmt: skip
    told = [note for note in result.notes if "begins after the end of the run at 11" in note]
    assert [note.split("(")[0] for note in told] == ["Stop", "LinkFault", "Slowdown", "Background"]
    jobs = ddlsim.simulate_jobs(
        [ddlsim.Job(result.experiment.with_(background=[]), "a"), background[0]], faults=late[1:]
    )
    told = [note.split("(")[0] for note in jobs["a"].notes if "begins after the end" in note]
    assert sorted(told) == ["Background", "LinkFault", "LinkFault", "Slowdown", "Stop"]


@pytest.mark.parametrize("strategy", [ddlsim.AllReduce("ring", "none", cost="nccl"), ddlsim.AllReduce("ring", "none")])
def test_collectives_of_known_cost_take_longer_over_a_slow_link(strategy):
    """A link at a tenth of its bandwidth: 3.98 instead of 0.398 s; one that is down for 7 s costs these 7 s."""

    def step_times(*faults):
        return ddlsim.simulate(
            "office-1gbe", "resnet18", strategy, 32, [0, 1], compute=ddlsim.Measured("1 ms", 32), steps=4, warmup=0,
            faults=faults,
        ).step_times  # fmt: skip

    plain = step_times()
    assert plain.mean() == pytest.approx(0.398, rel=0.01)
    assert step_times(LinkFault("h0", "switch", "0 s", "1000 s", 0.1)).mean() == pytest.approx(3.98, rel=0.01)
    assert step_times(LinkFault("h2", "switch", "0 s", "1000 s", 0.1)).tolist() == plain.tolist()
    down = step_times(LinkFault("h0", "switch", "0.5 s", "7 s"))
    assert down.tolist() == pytest.approx([plain[0], plain[1] + 7.0, plain[2], plain[3]], rel=1e-6)
    late = step_times(LinkFault("h0", "switch", "1 s", "0.05 s", 0.5))
    assert late.sum() == pytest.approx(plain.sum() + 0.025, rel=1e-3)


def test_a_measured_curve_takes_longer_over_a_slow_link():
    """Twice the rate takes half of what bandwidth makes last: what a message takes, whatever its size, stays."""
    curve = CurveTable(
        operation="all_reduce", algorithm="ring", per_message=2.0, sizes=[65536], dof=5.0, per_byte=[1.5, 1.5],
        covariance=[[0.0] * 3] * 3, spread=0.03, nbytes=[64, 2**24], ranks=[2, 64], inside=False,
    )  # fmt: skip
    cluster = dataclasses.replace(ddlsim.load_cluster(GRAPH), calibration=CalibrationTable(curves=[curve]))
    strategy = ddlsim.AllReduce("ring", "none", cost="calibrated")
    one = ddlsim.Experiment(cluster, "lenet5", strategy, 8, [0, 1], compute=Affine("1 ms", 0.0), steps=3, warmup=0)
    plain, slow = (
        ddlsim.simulate(one.with_(faults=faults)).step_times.mean() - 1e-3
        for faults in ((), [LinkFault("h0", SWITCH, "0 s", "1000 s", 0.1)])
    )
    nbytes = 1.5 * 4 * ddlsim.load_model("lenet5").n_params / 12.5e6
    assert slow - plain == pytest.approx(9.0 * nbytes, rel=0.01)


def test_collectives_of_known_cost_go_around_a_link_that_is_down():
    tree = leaf_spine(2, 2, 2, bandwidth="1 Gbit/s", latency="5 us")
    one = ddlsim.Experiment(tree, "resnet18", ddlsim.AllReduce("ring", "none", cost="nccl"), 32, [0, 2], steps=3,
                            compute=Affine("1 ms", 0.0), warmup=0)  # fmt: skip
    plain = ddlsim.simulate(one)
    faults = [LinkFault("leaf0", "spine0", "0.1 s", "100 s", reroute="1 s")]
    around = ddlsim.simulate(one.with_(faults=faults))
    assert plain.end_time + 0.9 < around.end_time < plain.end_time + 1.1


def test_what_a_library_loses_is_lost_on_a_slow_link_too():
    """NCCL does not reach 25 Gbit/s; at a tenth of the bandwidth, all of its time is ten times as long."""
    one = ddlsim.Experiment("cloud-25g-16x8-v100", "resnet18", ddlsim.AllReduce("ring", "none", cost="nccl"), 32,
                            workers=16, compute=Affine("1 ms", 0.0), steps=2, warmup=0)  # fmt: skip
    plain, slow, stopped = (
        ddlsim.simulate(one.with_(faults=faults))
        for faults in ((), [LinkFault("h0.cpu", "switch", "0 s", "1000 s", 0.1)], [Stop(1, "1 us", "20 s")])
    )
    assert slow.step_time == pytest.approx(10.0 * (plain.step_time - 1e-3), rel=0.02)
    assert stopped.end_time == pytest.approx(plain.end_time + 20.0, rel=1e-3)


def test_a_worker_that_stops_holds_up_collectives_of_known_cost():
    plain, stopped = (
        simulated(ddlsim.AllReduce("ring", "none", cost="nccl"), faults=faults).end_time
        for faults in ((), [Stop(1, "150 ms", "20 s")])
    )
    assert stopped == pytest.approx(plain + 20.0, abs=0.1)


# ------------------------------------------------------------ faults of a user


@dataclasses.dataclass(frozen=True)
class Brownout:
    """A machine computes more slowly, its link is slow, and another one stands still, in one fault."""

    start: float
    duration: float

    def effects(self, cluster, nodes):
        end, half = self.start + self.duration, self.start + self.duration / 2
        channels = {int(cluster.link_channel[link]) for link in links_between(cluster, "h1", SWITCH)}
        yield Effect(self.start, end, slowed=[(1, 3.0)], links=[(each, 0.01) for each in sorted(channels)])
        yield Effect(self.start, half, stopped=[0])


def bundled(start, duration):
    slow, link = Slowdown(1, start, duration, 3.0), LinkFault("h1", SWITCH, start, duration, 0.01)
    return {"slowdowns": [slow], "faults": [link, Stop(0, start, duration / 2)]}


@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {"all-reduce", "stale"}))
def test_a_fault_of_a_user_does_what_its_effects_say(name):
    strategy = STRATEGIES[name]
    own, known = simulated(strategy, faults=Brownout(0.25, 2.0)), simulated(strategy, **bundled(0.25, 2.0))
    assert own.recorder.updates == known.recorder.updates
    assert own.recorder.seconds == known.recorder.seconds
    assert own.channel_nbytes.tolist() == known.channel_nbytes.tolist()
    assert own.end_time > simulated(strategy).end_time


@pytest.mark.parametrize("elastic", [None, ddlsim.Elastic(2)])
def test_it_happens_once_in_a_lifetime(elastic):
    often = ddlsim.Failures("1 h", per="host", repair="5 min", restart="10 s")
    life = {"failures": often, "elastic": elastic, "max_time": "5 h"}
    if elastic is None:
        life["checkpoints"] = ddlsim.Checkpoints("10 min", stall="1 s")
    timelines = [
        simulated(ddlsim.AllReduce("ring"), faults=f, **life).failure_timeline for f in ((), Brownout(3600.0, 1800.0))
    ]
    assert timelines[0].steps > timelines[1].steps > 0.75 * timelines[0].steps
    assert [time for time, *_ in timelines[0].events] == [time for time, *_ in timelines[1].events]


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        ({"slowed": [(4, 2.0)]}, r"faults: Given\(\) affects rank 4, but there are only 4 workers"),
        ({"stopped": [-1]}, r"faults: Given\(\) affects rank -1"),
        ({"links": [(10**6, 0.5)]}, r"faults: Given\(\) affects channel 1000000, but there are only 12 channels"),
        ({"avoided": frozenset([10**6])}, r"faults: Given\(\) affects link 1000000"),
        ({"slowed": [(0, 0.5)]}, "faults: Given.* has the factor 0.5: must be at least 1 .* faster, use slowdowns="),
        ({"start": "1 s"}, r"faults: Given\(\) has start = '1 s' and end = 3\.0"),
        (
            {"start": 3.0},
            r"faults: Given\(\) has start = 3\.0 and end = 3\.0: must be increasing, non-negative times in s",
        ),
    ],
)
def test_effects_that_cannot_be_are_refused(effect, message):
    class Given:
        start, duration = 1.0, 2.0

        def effects(self, cluster, nodes):
            yield Effect(**{"start": 1.0, "end": 3.0, **effect})

        def __repr__(self):
            return "Given()"

    with pytest.raises(ConfigError, match=message):
        simulated(ddlsim.AllReduce(), faults=Given())
