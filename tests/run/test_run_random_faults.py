"""Faults that come at random and slow a run: what is drawn, and that a run has them as if they had been put down."""

import math

import networkx as nx
import numpy as np
import pytest
from draws import few

import ddlsim
from ddlsim import Affine, ConfigError, Job, LinkFault, RandomFaults, Slowdown, Stop, Training
from ddlsim.cluster import MultiGpu, leaf_spine, star, torus
from ddlsim.reliability import faults as life_faults
from tests.run.test_run_faults import STRATEGIES

CLOS = leaf_spine(2, 2, 2, bandwidth="100 Mbit/s", latency="70 us")
KINDS = {
    "slow host": RandomFaults("1 s", "500 ms", factor=3.0),
    "slow device": RandomFaults("1 s", "500 ms", per="device", factor=1.5, shape=0.7),
    "stop": RandomFaults("1 s", "200 ms", kind="stop"),
    "link": RandomFaults("2 s", "300 ms", kind="link", per="link", factor=0.1),
    "machine's links": RandomFaults("1 s", "200 ms", kind="link"),
    "switch": RandomFaults("2 s", "200 ms", kind="link", per="switch", reroute="50 ms"),
}


def simulated(strategy=STRATEGIES["ddp"], steps=8, **options):
    return ddlsim.simulate(
        CLOS, "lenet5", strategy, 8, 3, compute=Affine("100 ms", 0.0), steps=steps, warmup=0, **options
    )  # fmt: skip


def by_hand(result):
    """Return the options of a run that has the same faults, written out."""
    slow = [each for each in result.sampled_faults if isinstance(each, Slowdown)]
    return {"slowdowns": slow, "faults": [each for each in result.sampled_faults if not isinstance(each, Slowdown)]}


def same(one, other):
    assert one.end_time == other.end_time
    assert one.recorder.updates == other.recorder.updates
    assert one.channel_nbytes.tobytes() == other.channel_nbytes.tobytes()
    assert one.channel_busy.tobytes() == other.channel_busy.tobytes()


# ------------------------------------------------------------ what is drawn


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_a_part_has_one_fault_in_mtbf_and_duration_on_average(shape):
    faults = RandomFaults("90 s", "10 s", factor=2.0, shape=shape)
    of_part = [[] for _ in range(200)]
    for time, part in faults.events(200, seed=1):
        if time > 20_000.0:
            break
        of_part[part].append(time)
    counts = np.array([len(own) for own in of_part])
    # a renewal process has a variance of cv^2 (mean / cycle)^2 T / cycle; it begins at an end, not in the middle
    varies = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    deviation = math.sqrt(varies * 0.9**2 * 200.0 / len(counts))
    begins = 0.5 * (varies * 0.9**2 + 1.0) - 0.9 - 0.1
    assert counts.mean() == pytest.approx(200.0 + begins, abs=4.0 * deviation)
    assert min(np.diff(own).min() for own in of_part) >= 10.0
    assert faults.rate == 0.01


@pytest.mark.slow
def test_slow_machines_compute_as_long_as_they_must():
    result = ddlsim.simulate(
        star(1, bandwidth="1 Gbit/s", latency=0.0), "lenet5", batch_size=8, workers=1, steps=5_000, warmup=0,
        compute=Affine("1 s", 0.0), faults=RandomFaults("80 s", "20 s", factor=4.0),
    )  # fmt: skip
    # in a cycle of 80 + 20 s are 80 + 20 / 4 s of work
    n = len(result.sampled_faults)
    assert result.end_time == pytest.approx(5_000.0 + 15.0 * n, abs=15.0)
    assert n == pytest.approx(5_000.0 / 85.0, abs=4.0 * math.sqrt(5_000.0 / 85.0))


def test_parts_are_those_of_the_cluster():
    graph = leaf_spine(2, 2, 2, bandwidth="25 Gbit/s", latency=0.0, host=MultiGpu(4))
    cluster = ddlsim.load_cluster(graph)
    nodes = cluster.workers.tolist()

    def parts(**how):
        made = RandomFaults("1 h", "1 s", **how)
        return made.parts(cluster, nodes)

    assert [own[0].ranks for own in parts(factor=2.0)] == [tuple(range(i, i + 4)) for i in (0, 4, 8, 12)]
    assert [own[0].ranks for own in parts(kind="stop", per="device")] == [(i,) for i in range(16)]
    cables = parts(kind="link", per="link")
    assert all(len(own) == 1 for own in cables)
    assert len(cables) == 4 + 4  # of hosts, and between two leaves and two spines
    assert [len(own) for own in parts(kind="link")] == [1, 1, 1, 1]
    assert sorted(len(own) for own in parts(kind="link", per="switch")) == [2, 2, 4, 4]


def test_seeds_have_faults_of_their_own_and_longer_runs_the_same_ones():
    faults = [KINDS["slow host"], KINDS["slow host"]]
    one, again, other = (simulated(steps=30, faults=faults, seed=seed) for seed in (1, 1, 2))
    assert one.sampled_faults == again.sampled_faults != other.sampled_faults
    assert one.end_time == again.end_time
    longer = simulated(steps=60, faults=faults, seed=1)
    assert longer.sampled_faults[: len(one.sampled_faults)] == one.sampled_faults
    assert len(longer.sampled_faults) > len(one.sampled_faults)
    starts = [each.start for each in one.sampled_faults]
    assert starts == sorted(starts)
    assert len(set(starts)) == len(starts)  # the two are not the same
    alone = simulated(steps=30, faults=faults[0], seed=1)
    assert {each.start for each in alone.sampled_faults} < set(starts)


# ------------------------------------------------------------ what a run has


@pytest.mark.parametrize("name", few(STRATEGIES, 2))
def test_every_strategy_has_them_as_if_they_were_put_down(name):
    strategy = STRATEGIES[name]
    plain = simulated(strategy)
    for faults in KINDS.values():
        result = simulated(strategy, faults=faults, seed=3)
        assert result.sampled_faults
        same(result, simulated(strategy, seed=3, **by_hand(result)))
        assert any("occurred at random" in note for note in result.notes)
    everything = simulated(strategy, faults=list(KINDS.values()), seed=3)
    assert {type(each) for each in everything.sampled_faults} == {Slowdown, Stop, LinkFault}
    same(everything, simulated(strategy, seed=3, **by_hand(everything)))
    assert everything.end_time > plain.end_time


def test_none_is_a_run_without():
    plain = simulated()
    never = simulated(faults=RandomFaults(math.inf, "1 s", factor=2.0))
    seldom = simulated(faults=RandomFaults("1000000 h", "1 s", kind="stop"))
    for other in (never, seldom):
        same(plain, other)
        assert other.sampled_faults == ()
        assert any("no random fault occurred in the" in note for note in other.notes)


@pytest.mark.parametrize("max_time", [math.inf, 2.0])
def test_how_far_they_are_drawn_at_first_does_not_matter(monkeypatch, max_time):
    options = {"faults": list(KINDS.values()), "max_time": max_time}
    result = simulated(steps=20, **options)
    assert (result.end_time == 2.0) is (max_time == 2.0)
    for many in (0.01, 1, 20):
        monkeypatch.setattr(life_faults, "FIRST_FAULTS", many)
        other = simulated(steps=20, **options)
        same(result, other)
        assert other.sampled_faults == result.sampled_faults
        assert other.notes == result.notes


def learnt(**options):
    return ddlsim.simulate(
        CLOS, "digits-cnn", ddlsim.AllReduce("ring"), 32, 4, compute=Affine("100 ms", 0.0), **options
    )  # fmt: skip


def test_values_are_those_of_an_undisturbed_run_and_saved_ones_go_on(monkeypatch, tmp_path):
    faults = [KINDS["slow host"], KINDS["stop"]]
    short, long = (Training("digits", updates=n, evaluate_every=5) for n in (10, 20))
    plain, whole = learnt(training=long), learnt(training=long, faults=faults)
    assert whole.params.tobytes() == plain.params.tobytes()
    assert whole.end_time > plain.end_time
    learnt(training=short, faults=faults, checkpoint=tmp_path / "run.npz")
    monkeypatch.setattr(life_faults, "FIRST_FAULTS", 1)
    again = ddlsim.resume(tmp_path / "run.npz", whole.given)
    same(whole, again)
    assert again.params.tobytes() == whole.params.tobytes()


def test_jobs_have_them(monkeypatch):
    one = ddlsim.Experiment(
        CLOS, "lenet5", batch_size=8, compute=Affine("100 ms", 0.0), steps=12, warmup=0, workers=2,
        faults=[KINDS["slow host"], KINDS["stop"], KINDS["link"]],
    )  # fmt: skip
    jobs = [Job(one.with_(seed=1), "a"), Job(one.with_(seed=2, workers=1), "b", start="1 s")]
    of_all = RandomFaults("500 ms", "300 ms", kind="link", per="switch", factor=0.02)
    result = ddlsim.simulate_jobs(jobs, faults=[of_all])
    assert all(result[name].sampled_faults for name in "ab")
    assert result["a"].end_time > ddlsim.simulate_jobs(jobs)["a"].end_time
    plain = ddlsim.simulate_jobs(jobs)
    again = ddlsim.simulate_jobs([
        Job(each.experiment.with_(**by_hand(plain[each.name])), each.name, start=each.start) for each in jobs
    ])  # fmt: skip
    for name in "ab":
        same(plain[name], again[name])
    background = one.with_(background=[Job(one.with_(workers=[2, 3]))], workers=[0, 1])
    reference = ddlsim.simulate(background)
    assert reference.sampled_faults
    monkeypatch.setattr(life_faults, "FIRST_FAULTS", 1)
    shorter = ddlsim.simulate_jobs(jobs, faults=[of_all])
    for name in "ab":
        same(result[name], shorter[name])
    same(reference, ddlsim.simulate(background))


@pytest.mark.slow
def test_elastic_groups_have_them():
    result = ddlsim.simulate(
        CLOS, "digits-cnn", ddlsim.AllReduce(), 32, 4, compute=Affine("1 s", 0.0), max_time="2 h",
        faults=RandomFaults("1 min", "10 s", factor=2.0), seed=1, elastic=ddlsim.Elastic(min_workers=2),
        failures=ddlsim.Failures("5 min", per="host", repair="5 min"),
        training=Training("digits", epochs=20, evaluate_every=40),
    )  # fmt: skip
    assert min(result.failure_timeline.workers["workers"]) < 4
    assert result.sampled_faults


# ------------------------------------------------------------ files, and what makes no sense


def test_files_have_them(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'cluster = "office-1gbe"\nworkers = 4\nsteps = 3\n'
        '[[faults]]\ntype = "random-faults"\nmtbf = "10 s"\nduration = "0.5 s"\nfactor = 2.0\n'
        '[[faults]]\ntype = "random-faults"\nmtbf = "1 h"\nduration = "1 s"\nkind = "link"\nper = "link"\n'
        'reroute = "0.1 s"\n'
        '[[faults]]\ntype = "stop"\nranks = [1]\nstart = "10 ms"\nduration = "2 s"\n',
        encoding="utf-8",
    )
    experiment = ddlsim.load_experiment(path)
    assert experiment.faults == (
        RandomFaults("10 s", "0.5 s", factor=2.0),
        RandomFaults("1 h", "1 s", kind="link", per="link", reroute="0.1 s"), Stop(1, 0.01, 2.0),
    )  # fmt: skip
    path.write_text(experiment.to_toml(), encoding="utf-8")
    assert ddlsim.load_experiment(path).faults == experiment.faults
    text = "ddlsim.RandomFaults(mtbf='1 h', duration='1 s', kind='link', per='link', reroute='0.1 s')"
    assert text in experiment.to_python()
    alone = experiment.with_(faults=experiment.faults[0])
    path.write_text(alone.to_toml(), encoding="utf-8")
    assert ddlsim.load_experiment(path).faults == alone.faults


def test_files_of_jobs_have_them(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(
        'cluster = "office-1gbe"\n[[jobs]]\nname = "a"\nexperiment = { workers = 2, steps = 30, model = "lenet5" }\n'
        '[[faults]]\ntype = "random-faults"\nmtbf = "10 ms"\nduration = "3 ms"\nkind = "link"\n'
        '[[faults]]\ntype = "link-fault"\nsource = "h0"\ntarget = "switch"\nstart = "0 s"\n'
        'duration = "1 s"\nfactor = 0.5\n',
        encoding="utf-8",
    )
    jobs = ddlsim.load_jobs(path)
    assert jobs.faults == (RandomFaults("10 ms", "3 ms", kind="link"), LinkFault("h0", "switch", 0.0, 1.0, 0.5))
    assert jobs.simulate()["a"].end_time == ddlsim.simulate_jobs(jobs.jobs, faults=jobs.faults)["a"].end_time
    assert jobs.simulate()["a"].end_time > ddlsim.simulate_jobs(jobs.jobs)["a"].end_time


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "RandomFaults: factor = None with kind='slow': must be above 1"),
        ({"factor": 0.5}, "RandomFaults: factor = 0.5 with kind='slow': must be above 1"),
        ({"kind": "stop", "factor": 2.0}, "factor = 2.0 with kind='stop': must be left out"),
        ({"kind": "link", "factor": 1.0}, "factor = 1.0 with kind='link': must be below 1"),
        ({"per": "link", "factor": 2.0}, "per = 'link' with kind='slow': must be one of host, device"),
        ({"kind": "link", "per": "device"}, "per = 'device' with kind='link': must be one of host, link, switch"),
        ({"kind": "link", "factor": 0.5, "reroute": 1.0}, r"reroute = 1\.0 applies only to links that are down"),
        ({"kind": "stop", "reroute": 1.0}, r"reroute = 1\.0 applies only to links that are down"),
    ],
)
def test_arguments_are_checked(how, message):
    with pytest.raises(ConfigError, match=message):
        RandomFaults("1 h", "1 s", **how)


def test_parts_that_are_not_there():
    ring = torus([4], bandwidth="1 Gbit/s", latency=0.0)
    machine = nx.Graph()
    machine.add_nodes_from(["a", "b"], kind="gpu", host="machine")
    machine.add_edge("a", "b", bandwidth="10 GB/s", latency=0.0)
    with pytest.raises(ConfigError, match=r"per = 'switch': cluster .* has no switches between its machines"):
        ddlsim.simulate(ring, "lenet5", faults=RandomFaults("1 h", "1 s", kind="link", per="switch"), steps=1)
    with pytest.raises(ConfigError, match=r"per = 'host': cluster .* has no links between its machines"):
        ddlsim.simulate(machine, "lenet5", faults=RandomFaults("1 h", "1 s", kind="link"), steps=1)
    with pytest.raises(ConfigError, match=r"Stop.*affects rank 0, not the shared network; set it in the experiment of"):
        ddlsim.simulate_jobs([Job(ddlsim.Experiment(CLOS, "lenet5", steps=1))], faults=[Stop(0, 0.0, 1.0)])
    with pytest.raises(ConfigError, match="simulate_jobs: faults: kind = 'slow' affects workers"):
        ddlsim.simulate_jobs([Job(ddlsim.Experiment(CLOS, "lenet5", steps=1))], faults=[KINDS["slow host"]])
