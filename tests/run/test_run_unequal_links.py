"""Links of one kind that are not equally fast: the slowest decides, every mechanism sees it, and bounds stay bounds."""

import random
from unittest import mock

import numpy as np
import pytest
from bundled_strategies import BUNDLED, N_WORKERS, VARIANTS
from draws import few
from worlds_folding import TINY, folding_world, is_folded

import ddlsim
from ddlsim import Affine, AllReduce, ConfigError, Experiment, Spread, Training, collective_time, load_cluster
from ddlsim.cluster import Cluster, racks, star, with_detail
from ddlsim.cluster.details import with_spread
from ddlsim.measure import Measurement
from ddlsim.planner.bounds import Bounds
from ddlsim.planner.candidates import candidates
from ddlsim.run import run
from ddlsim.spread import WHISKERS
from ddlsim.strategies import parallel
from ddlsim.validation import calibrate
from ddlsim.workload import order_statistics

EVERY = BUNDLED | VARIANTS
SPREAD = 0.42
NBYTES = 1e8


def hosts(n, spread=SPREAD, **details):
    plain = load_cluster(star(n, bandwidth="1 Gbit/s", latency="10 us"))
    return with_detail(plain, spread=spread, **details) if spread or details else plain


def written_out(cluster, seed):
    """Return the cluster with the sampled rates as those of its links, and none of its own."""
    shares = cluster.sampled(seed).channel_capacity / cluster.nominal_capacity
    plain = with_spread(cluster, 0.0)
    rates = cluster.sampled(seed).channel_capacity[cluster.link_channel]
    assert (shares != 1.0).any()
    return plain.with_links(rates, plain.link_latency)


# ---------------------------------------------------------------- the closed form


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_a_ring_takes_as_long_as_the_slowest_of_so_many_normal_links(n):
    ratio = collective_time(hosts(n), "ring", "1 GB") / collective_time(hosts(n, 0.0), "ring", "1 GB")
    sd = SPREAD / WHISKERS
    assert ratio - 1.0 == pytest.approx(order_statistics.normal(n, sd=sd), rel=0.06)
    assert ratio == pytest.approx(Spread(SPREAD).relative_times(n)[-1], rel=2e-3)  # but for latency


def test_only_what_leaves_a_machine_is_slower():
    """Clouds limit senders: what a switch sends into a machine has its rate, what switches send each other has not."""
    cluster = hosts(8).sampled(1)
    times = (cluster.nominal_capacity / cluster.channel_capacity)[cluster.link_channel]
    assert (times[cluster.is_switch_port] == 1.0).all()
    assert sorted(times[~cluster.is_switch_port]) == pytest.approx(Spread(SPREAD).relative_times(8))
    graph = racks(2, 2, bandwidth="1 Gbit/s", latency="10 us", trunk_bandwidth="1 Gbit/s", trunk_latency="10 us")
    trunks = with_detail(load_cluster(graph), kinds=["trunk"], spread=SPREAD).sampled(0)
    n_unequal = np.count_nonzero(trunks.channel_capacity != trunks.nominal_capacity)
    assert n_unequal == trunks.link_kind.count("trunk") == 2


def test_which_link_is_slow_depends_on_the_seed_alone():
    rates = {seed: hosts(8).sampled(seed).channel_capacity.tolist() for seed in (0, 1)}
    assert hosts(8).sampled(1).channel_capacity.tolist() == rates[1] != rates[0]
    assert sorted(rates[0]) == pytest.approx(sorted(rates[1]), rel=1e-15)
    assert hosts(8).channel_capacity.tolist() == rates[0]  # without a run, that of seed 0
    again = hosts(8).sampled(1)
    assert again.sampled(2) is again


def test_a_result_is_repeated_with_another_seed():
    """The experiment of a result does not keep the links that its seed has sampled, but those that its user has."""
    asked = Experiment(hosts(16), "gpt2", AllReduce("ring"), workers=4, steps=2)
    first = run(asked)
    again = run(first.experiment.with_(seed=5))
    assert again.step_time == run(asked.with_(seed=5)).step_time
    assert again.step_time != first.step_time == run(first.experiment).step_time
    kept = run(asked.with_(cluster=hosts(16).sampled(0), seed=5))
    assert kept.step_time == run(kept.experiment.with_(seed=6)).step_time == first.step_time


def test_a_part_of_the_machines_has_the_slowest_of_that_part():
    """Over many seeds four of sixteen links take on average what the slowest of four normal ones takes."""
    slowest = []
    for seed in range(200):
        cluster = hosts(16).sampled(seed)
        times = (cluster.nominal_capacity / cluster.channel_capacity)[cluster.link_channel]
        slowest.append(max(times[cluster.link_src == node][0] for node in cluster.workers[:4]))
    sd = SPREAD / WHISKERS
    assert np.mean(slowest) == pytest.approx(1.0 + order_statistics.normal(4, sd=sd), abs=0.15 * sd)


def test_a_measured_pair_is_taken_for_an_average_one():
    rows = [
        Measurement(
            experiment="point_to_point",
            operation="one_way",
            n_ranks=2,
            n_hosts=2,
            nbytes=nbytes,
            median_s=20e-6 + nbytes / 1e8,
            backend="mpi",
        )
        for nbytes in (8, 1_000_000, 64_000_000)
    ]
    plain, unequal = (calibrate(rows, hosts(8, spread)) for spread in (0.0, SPREAD))
    assert [p.value for p in plain.parameters] == [p.value for p in unequal.parameters]
    assert (unequal.cluster.details.spread == SPREAD).all()
    assert unequal.cluster.nominal_capacity.tolist() == plain.cluster.nominal_capacity.tolist()
    slower = collective_time(unequal.cluster, "ring", "1 GB") / collective_time(plain.cluster, "ring", "1 GB")
    assert slower == pytest.approx(Spread(SPREAD).relative_times(8)[-1], rel=2e-3)


# ---------------------------------------------------------------- every mechanism


def case(name, cluster, **options):
    one = EVERY[name]
    if one.needs_data:
        options["training"] = Training(one.data, updates=6, evaluate_every=3)
    else:
        options |= {"steps": 8, "warmup": 1}
    compute = Affine("50 us", 0.0)
    return Experiment(cluster, one.model, one.strategy, one.batch_size, N_WORKERS, compute=compute, seed=5, **options)


def outcome(result):
    return result.recorder.updates, result.simulated_time, result.channel_nbytes.tolist()


@pytest.mark.parametrize("name", few(EVERY, 12))
def test_every_strategy_runs_on_the_sampled_rates(name):
    """It is bit for bit the run whose links have these rates in their file, and one whose spread is 0 that without."""
    cluster = hosts(N_WORKERS + 3)
    unequal = run(case(name, cluster))
    explicit = run(case(name, written_out(cluster, 5)))
    if name == "AllReduce nccl":  # NCCL chooses by the rates that it knows, which are the slow ones in the other file
        assert unequal.step_time == pytest.approx(explicit.step_time, rel=1e-9)
    else:
        assert outcome(unequal) == outcome(explicit)
    equal = run(case(name, hosts(N_WORKERS + 3, 0.0)))
    assert outcome(equal) == outcome(run(case(name, with_spread(cluster, 0.0))))
    assert outcome(unequal) != outcome(equal)
    assert any(note.startswith("unequal links: rates are 0.9") for note in unequal.notes)


@pytest.mark.parametrize("transport", ["tcp-cubic", "roce"])
def test_transports_and_faults_have_the_sampled_rates(transport):
    fault = ddlsim.LinkFault("h0", "switch", "5 ms", "20 ms", factor=0.5)
    one = case("AllReduce", hosts(8, transport=transport, rendezvous="64 KiB"), faults=[fault])
    assert outcome(run(one)) == outcome(run(one.with_(cluster=written_out(load_cluster(one.cluster), 5))))


def test_jobs_share_one_sample():
    """Links belong to the cluster, so all jobs have those of the first one's seed."""
    cluster = hosts(8)
    jobs = [
        ddlsim.Job(case("AllReduce", cluster).with_(seed=seed, workers=4), placement=places)
        for seed, places in ((5, (0, 1, 2, 3)), (6, (4, 5, 6, 7)))
    ]
    made = ddlsim.simulate_jobs(jobs)
    first, second = (each.result for each in made.runs)
    assert first.cluster.link_seed == second.cluster.link_seed == made.cluster.link_seed == 5
    alone = run(jobs[1].experiment.with_(cluster=cluster.sampled(5), workers=(4, 5, 6, 7)))
    assert second.recorder.updates == alone.recorder.updates


@pytest.mark.parametrize("seed", [0, 3])
def test_no_simulation_beats_its_bound(seed):
    """Also with fast links, and for a seed other than that of a cluster without a run."""
    cluster = hosts(9, 0.9)
    for step in (1e-5, 1e-3):
        base = Experiment(cluster, "lenet5", compute=Affine(step, 0.0), seed=seed)
        strategies = [
            AllReduce("ring", "none"), AllReduce("halving_doubling"), ddlsim.ParameterServer(2, "colocated"),
            ddlsim.ShardedUpdate(), ddlsim.Parallel(pipeline=2, micro_batch=2), ddlsim.FSDP(micro_batch=1),
        ]  # fmt: skip
        for candidate in candidates(base, [cluster], [8], strategies, [None], [16])[0]:
            best = Bounds().of(candidate)
            assert run(candidate.experiment).throughput <= best.figures.throughput, candidate


@pytest.mark.parametrize("seed", few(range(40), 4))
def test_groups_with_unequal_links_are_not_folded_into_one(seed):
    """One rank stands for a group only where the result is that of all ranks."""
    graph, layout, options = folding_world(random.Random(seed))
    cluster = load_cluster(graph)
    for kinds in (None, ["nvlink"]):  # between machines, and inside them
        one = Experiment(with_detail(cluster, spread=SPREAD, kinds=kinds), TINY, layout, **options)
        folded = run(one)
        with mock.patch.object(parallel, "disturbed", return_value="a test"):
            whole = run(one)
        assert not is_folded(whole)
        assert folded.step_time == pytest.approx(whole.step_time, rel=1e-9)


# ---------------------------------------------------------------- files, options, graphs

FILE = """
[generator]
type = "star"
n_hosts = 4
bandwidth = "1 Gbit/s"
latency = "10 us"
[link]
spread = 0.42
source = "LaCurts et al. 2013"
"""


def test_in_files_options_and_graphs(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    cluster = load_cluster(path)
    assert (cluster.details.spread == 0.42).all()
    assert cluster.sources == ("LaCurts et al. 2013",)
    assert "rates vary by 0.42" in cluster.summary()
    assert (Cluster.from_graph(cluster.to_graph()).details.spread == 0.42).all()
    for name in ("office-1gbe+spread=0.42", "aws-p3-2xlarge+transport=ideal+spread=0.42"):
        assert load_cluster(name).details.spread.max() == 0.42
    assert (with_detail(cluster, spread=Spread(0.42)).details.spread == 0.42).all()
    ideal = with_detail(with_detail(cluster, transport="tcp-cubic", spread=0.42), transport="ideal")
    assert (ideal.details.spread == 0.42).all()
    cluster.save(tmp_path / "saved.json")
    assert load_cluster(tmp_path / "saved.json").channel_capacity.tolist() == cluster.channel_capacity.tolist()


@pytest.mark.parametrize("value", [-0.1, 1.5, "wide", float("nan")])
def test_values_that_make_no_sense(value):
    with pytest.raises(ConfigError, match="spread"):
        hosts(4, value or 1)
