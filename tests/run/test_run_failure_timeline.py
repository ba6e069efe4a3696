"""Failures and checkpoints of simulated runs: what they cost, what is learned among them, where they are said."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from draws import rows

import ddlsim
from ddlsim import AllReduce, Checkpoints, ConfigError, Experiment, Failures, LocalSGD, Measured, Training
from ddlsim.cluster import star

CLUSTER = ddlsim.load_cluster(star(5, bandwidth="8 Gbit/s", latency=0.0))
COMPUTE = Measured("100 ms", 32)
OFTEN = Failures("2 h", per="host", repair="5 min", spares=1)


def experiment(**changes):
    fields = {
        "cluster": CLUSTER, "model": "resnet50", "workers": 4, "compute": COMPUTE, "failures": OFTEN,
        "checkpoints": Checkpoints("10 min", bandwidth="100 MB/s"),
    }  # fmt: skip
    return Experiment(**{**fields, **changes})


def learning(**changes):
    fields = {
        "model": "digits-cnn", "batch_size": 32, "compute": Measured("10 s", 32),
        "training": Training("digits", rate=0.2, epochs=3, evaluate_every=5),
        "checkpoints": Checkpoints("50 s", stall="2 s"),
        "failures": Failures("4 min", per="host", repair=0.0, restart="20 s"),
    }  # fmt: skip
    return experiment(**{**fields, **changes})


def test_a_life_is_thirty_days_of_the_runs_steps():
    result = ddlsim.simulate(experiment())
    timeline = result.failure_timeline
    assert timeline.end == 30 * 86_400.0
    assert timeline.useful + timeline.lost + timeline.checkpointing + timeline.down == pytest.approx(timeline.end)
    assert result.goodput == pytest.approx(result.throughput * timeline.useful / timeline.end, rel=1e-4)
    assert result.availability == timeline.availability < 1.0
    assert result.lost_work == timeline.lost > 0.0
    assert len(timeline.failures) == len(timeline.events) > 1000
    assert [one.end for one in result.timelines(3)] == [timeline.end] * 3
    assert result.timelines(3)[0] is timeline
    assert len({one.lost for one in result.timelines(3)}) == 3


def test_a_life_without_failures_is_the_run():
    plain = ddlsim.simulate(experiment(failures=None, checkpoints=None))
    result = ddlsim.simulate(experiment(failures=Failures(math.inf), checkpoints=None))
    assert result.step_times.tolist() == plain.step_times.tolist()
    assert (result.failure_timeline.effective, result.goodput) == (1.0, pytest.approx(plain.throughput, rel=1e-6))
    learned, undisturbed = ddlsim.simulate(learning(failures=Failures(math.inf), checkpoints=None)), None
    undisturbed = ddlsim.simulate(learning(failures=None, checkpoints=None))
    assert learned.history.equals(undisturbed.history)
    assert learned.goodput == pytest.approx(learned.throughput, rel=0.05)  # which leaves the warm-up out


def test_after_a_restart_the_weights_are_those_of_an_undisturbed_run_only_later():
    result, plain = ddlsim.simulate(learning()), ddlsim.simulate(learning(failures=None, checkpoints=None))
    assert len(result.failure_timeline.events) > 5
    assert result.failure_timeline.finished
    assert result.params.tobytes() == plain.params.tobytes()
    assert result.accuracy == plain.accuracy
    assert result.history["accuracy"].tolist() == plain.history["accuracy"].tolist()
    late = (result.history["time"] - plain.history["time"]).to_numpy()
    assert late[0] == 0.0
    assert (np.diff(late) >= 0.0).all()
    assert late[-1] > 100.0
    assert result.history["time"].iloc[-1] <= result.failure_timeline.end == result.end_time
    assert result.simulated_time == plain.end_time  # without what disturbs it


@pytest.mark.slow
def test_bytes_of_a_checkpoint_go_over_the_network():
    nbytes = 4 * 25_557_032 * 2  # weights and momentum in fp32
    result = ddlsim.simulate(experiment(checkpoints=Checkpoints("10 min", to="h4")))
    cost = result.failure_timeline.timeline.cost
    assert cost.nbytes == nbytes
    assert cost.stall == pytest.approx(nbytes / 1e9)  # all into one link
    peers = ddlsim.simulate(experiment(checkpoints=Checkpoints("10 min", to="peers"))).failure_timeline.timeline.cost
    assert peers.stall == pytest.approx(nbytes / 4 / 1e9)  # each over its own
    background = ddlsim.simulate(experiment(checkpoints=Checkpoints("10 min", to="peers", asynchronous=True)))
    assert (background.failure_timeline.timeline.cost.stall, background.failure_timeline.timeline.cost.write) == (
        0.0,
        peers.stall,
    )
    assert any("assumed not to slow down" in note for note in background.notes)
    fewer = Checkpoints("10 min", bandwidth="1 GB/s", nbytes="500 MB", load="7 s")
    cost = ddlsim.simulate(experiment(checkpoints=fewer)).failure_timeline.timeline.cost
    assert (cost.stall, cost.load) == (0.5, 7.0)


def test_costs_and_energy_are_of_the_whole_life():
    cluster = CLUSTER.with_costs(price="3.6 USD/h")
    result = ddlsim.simulate(experiment(cluster=cluster, device="v100"))
    assert result.cost == pytest.approx(result.cost_rate * 30 * 86_400.0)
    plain = ddlsim.simulate(experiment(cluster=cluster, device="v100", failures=None, checkpoints=None))
    assert 0.0 < result.power <= plain.power


def test_a_lifetime_in_which_nothing_counts_has_a_price_too():
    """Each failure takes all the work, and the last one is at the end."""
    often = Failures("1 min", per="job", restart="1 h")
    given = {"cluster": CLUSTER.with_costs(price="3.6 USD/h"), "failures": often, "checkpoints": None}
    result = ddlsim.simulate(experiment(max_time="2 h", **given))
    assert result.goodput == 0.0
    assert "inf USD per million samples" in str(result)
    table = ddlsim.Study(result.given, {"steps": [3]}).run().frame
    assert table["goodput"].tolist() == [0.0]


def test_it_is_said_everywhere():
    result = ddlsim.simulate(experiment())
    assert "goodput" in str(result)
    assert "time split" in str(result)
    plain = json.loads(result.to_json())
    assert plain["failure_timeline"]["end"] == 30 * 86_400.0
    assert plain["goodput"] == result.goodput
    parameters = {"failures.spares": [0, 1], "checkpoints.every": ["5 min", "20 min"]}
    table = ddlsim.Study(experiment(), parameters).run(jobs=1)
    assert table.frame["goodput"].nunique() == 4
    assert (table.frame["throughput"] == result.throughput).all()


def test_files_say_all_of_it(tmp_path):
    (tmp_path / "failures.csv").write_text("time_s,unit\n600,1\n", encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        'cluster = "office-1gbe"\nworkers = 4\nmax_time = "2 h"\n'
        '[failures]\ntrace = "failures.csv"\nper = "host"\nspares = 1\nrestart = "30 s"\n'
        '[checkpoints]\nevery = "10 min"\nto = "peers"\nasynchronous = true\n',
        encoding="utf-8",
    )
    loaded = ddlsim.load_experiment(tmp_path / "run.toml")
    assert loaded.checkpoints == Checkpoints("10 min", to="peers", asynchronous=True)
    result = ddlsim.simulate(loaded)
    assert result.failure_timeline.end == 7200.0
    assert [time for time, _, _ in result.failure_timeline.events] == [600.0]
    loaded.save(tmp_path / "again.toml")
    assert ddlsim.load_experiment(tmp_path / "again.toml").to_toml() == loaded.to_toml()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": ddlsim.AsyncParameterServer()}, "do not stop for each other"),
        ({"checkpoints": Checkpoints("10 s", bandwidth="1 MB/s")}, r"but a checkpoint takes 204\.456 s"),
        ({"checkpoints": Checkpoints("10 min", to="peer")}, "must be 'peers' or a node of cluster 'star-5'"),
        ({"checkpoints": Checkpoints("10 min", to="peers"), "workers": 1}, "the run uses a single machine"),
        (
            {"failures": Failures("5 h", per="switch"), "cluster": "dgx1-v100", "workers": 2},
            "the run uses a single machine",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(changes, says):
    with pytest.raises(ConfigError, match=says):
        ddlsim.simulate(experiment(**changes))


@pytest.mark.slow
def test_strategies_that_synchronise_have_lives():
    for strategy in (AllReduce("ring"), LocalSGD(period=4), ddlsim.ParameterServer(), ddlsim.DPSGD()):
        timeline = ddlsim.simulate(experiment(strategy=strategy, steps=8)).failure_timeline
        assert 0.5 < timeline.effective < 1.0


@pytest.mark.slow
def test_the_best_interval_is_dalys():
    found = ddlsim.best_checkpoint_interval(
        experiment(
            failures=Failures("100 h", repair=0.0, restart="10 s"), checkpoints=Checkpoints("1 h", stall="15 s")
        ),
        n_timelines=40,
    )  # fmt: skip
    assert found.mtbf == 25 * 3600.0
    assert found.daly == pytest.approx(ddlsim.daly_interval(found.mtbf, 15.0))
    best = max(one.effective for one in found.tried)
    at_daly = next(one for one in found.tried if math.isclose(one.interval, found.daly))
    assert at_daly.effective > best - 3.0 * at_daly.error - 1e-3
    assert found.tried[0].effective < at_daly.effective > found.tried[-1].effective
    assert "Young" in str(found)
    assert len(found.table) == 13
    with pytest.raises(ConfigError, match="needs random failures"):
        ddlsim.best_checkpoint_interval(experiment(failures=None))


@pytest.mark.slow
def test_what_the_page_shows_runs(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text(encoding="utf-8")
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(code, "failures.md", "exec"), namespace)
    assert "Young" in capsys.readouterr().out
    (tmp_path / "run.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.S)[1], encoding="utf-8")
    assert ddlsim.load_experiment(tmp_path / "run.toml").failures.spares == 2


@pytest.mark.slow
def test_spot_machines_are_cheaper_and_warn():
    cluster = CLUSTER.with_costs(price="3 USD/h")
    spot = {"failures": Failures("2 h", per="host", repair="5 min", warning="2 min", discount=0.6)}
    result, plain = (ddlsim.simulate(experiment(cluster=cluster, **changes)) for changes in (spot, {}))
    assert plain.cost_rate == pytest.approx((4 + plain.experiment.failures.spares) * 3.0 / 3600.0)
    assert result.cost_rate == pytest.approx(0.4 * 4 * 3.0 / 3600.0)
    assert result.cost == pytest.approx(0.4 * 4 * 3.0 * 30 * 24)
    assert result.lost_work < 0.05 * plain.lost_work
    with pytest.raises(ConfigError, match="warning = '2 min' has no effect without checkpoints or elastic"):
        ddlsim.simulate(experiment(cluster=cluster, checkpoints=None, **spot))
    free = {"strategy": ddlsim.AsyncParameterServer(), "checkpoints": None}
    with pytest.raises(ConfigError, match="warning = '2 min' has no effect with "):
        ddlsim.simulate(experiment(cluster=cluster, **free, **spot))
    free["failures"] = Failures("2 h", per="host", discount=0.6)
    assert ddlsim.simulate(experiment(cluster=cluster, **free)).cost_rate == pytest.approx(
        (4 * 0.4 + 1) * 3.0 / 3600.0  # the server is none that may be taken away
    )


def test_what_was_learnt_before_a_warned_interruption_is_as_undisturbed():
    failures = Failures("4 min", per="host", repair=0.0, restart="20 s", warning="30 s")
    result = ddlsim.simulate(learning(failures=failures))
    plain = ddlsim.simulate(learning(failures=None, checkpoints=None))
    assert len(result.failure_timeline.events) > 5
    assert result.params.tobytes() == plain.params.tobytes()
    late = (result.history["time"] - plain.history["time"]).to_numpy()
    assert (np.diff(late) >= -1e-9).all()
    assert result.failure_timeline.lost < ddlsim.simulate(learning()).failure_timeline.lost


@pytest.mark.parametrize(
    "more", [{}, {"elastic": ddlsim.Elastic()}, {"faults": [ddlsim.RandomFaults("1 h", "30 s", factor=2.0)]}], ids=str
)
@pytest.mark.parametrize(("warmup", "steps"), rows([(0, 3), (1, 5), (4, 2), (0, 6)], 1, start=2))
def test_a_lifetime_repeats_complete_cycles_whatever_is_measured(warmup, steps, more):
    """Three steps of a period of four have one average or none, and a lifetime has one in four steps."""
    runs = [
        ddlsim.simulate(
            "office-1gbe", "resnet50", ddlsim.LocalSGD(4), 8, 4, warmup=first, steps=measured, max_time="30 days",
            failures=ddlsim.Failures("10 days", repair="1 h", restart="60 s"),
            checkpoints=ddlsim.Checkpoints("10 min", stall="5 s"), **more,
        )
        for first, measured in ((warmup, steps), (4, 8))
    ]  # fmt: skip
    assert runs[0].throughput != pytest.approx(runs[1].throughput, rel=0.01) or steps % 4 == 2
    assert runs[0].goodput == pytest.approx(runs[1].goodput, rel=1e-6)
