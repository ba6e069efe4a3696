"""Elastic runs: survivors go on alone, machines come back; against a life by hand and gradients of our own."""

import dataclasses
import math

import numpy as np
import pytest
from draws import few, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim import AllReduce, Checkpoints, ConfigError, Elastic, Experiment, Failures, Measured, Momentum, Training
from ddlsim.cluster import racks, star
from ddlsim.nn.network import build_network
from ddlsim.reliability import Effect

CLUSTER = ddlsim.load_cluster(star(6, bandwidth="8 Gbit/s", latency=0.0))
DAYS = 30 * 86_400.0


def traced(tmp_path, *rows, **options):
    file = tmp_path / "failures.csv"
    file.write_text("time_s,unit,repair_s\n" + "".join(f"{t},{u},{r}\n" for t, u, r in rows), encoding="utf-8")
    return Failures(trace=file, per="host", restart=0.0, **options)


def timed(**changes):
    fields = {
        "cluster": CLUSTER, "model": "resnet50", "workers": 4, "compute": Measured("100 ms", 32),
        "failures": Failures("2 h", per="host", repair="5 min"), "elastic": Elastic(2, rejoin="10 s"),
    }  # fmt: skip
    return Experiment(**{**fields, **changes})


def learning(failures, elastic, **changes):
    fields = {
        "cluster": CLUSTER, "model": "digits-cnn", "workers": 4, "batch_size": 16, "compute": Measured("10 s", 16),
        "strategy": AllReduce("ring", "none"), "failures": failures, "elastic": elastic,
        "training": Training("digits", rate=0.2, optimizer=Momentum(0.9), updates=12, evaluate_every=4),
    }  # fmt: skip
    return Experiment(**{**fields, **changes})


def test_a_life_by_hand(tmp_path):
    """Host 3 fails at 100 s, is back at 400, and joins at the end of the step under way."""
    failures = traced(tmp_path, (100.0, 3, 300.0), detection="4 s")
    result = ddlsim.simulate(timed(failures=failures, max_time="1000 s"))
    step = {4: result.step_time, 3: ddlsim.simulate(timed(workers=3, failures=None, elastic=None)).step_time}
    timeline = result.failure_timeline
    lost = 100.0 - step[4] * math.floor(100.0 / step[4])
    began = 100.0 + 4.0 + 10.0
    joined = began + step[3] * math.ceil((400.0 - began) / step[3])
    copied = 4 * 25_557_032 * 2 / 1e9
    assert [workers for _, workers in timeline.groups] == [4, 3, 4]
    times = [time for time, _ in timeline.groups]
    assert times == pytest.approx([0.0, began, joined + 10.0 + copied], rel=1e-6)
    assert timeline.lost == pytest.approx(lost, abs=1e-4)
    assert (timeline.detecting, timeline.repairing) == (4.0, 0.0)
    assert timeline.restarting == pytest.approx(20.0 + copied, rel=1e-6)
    assert timeline.useful == pytest.approx(1000.0 - lost - 4.0 - timeline.restarting, abs=1e-4)
    steps = math.floor(100.0 / step[4]), round((joined - began) / step[3])
    last = math.floor((1000.0 - times[2]) / step[4])
    assert timeline.steps == sum(steps) + last
    assert result.goodput == pytest.approx(32 * (4 * steps[0] + 3 * steps[1] + 4 * last) / 1000.0)
    assert timeline.workers["workers"].tolist() == [4, 3, 4]


def test_spares_take_the_place_of_machines(tmp_path):
    failures = traced(tmp_path, (100.0, 3, 1e6), spares=1)
    timeline = ddlsim.simulate(timed(failures=failures, max_time="1000 s")).failure_timeline
    assert [workers for _, workers in timeline.groups] == [4, 4]
    assert timeline.groups[1][0] == pytest.approx(110.0 + 4 * 25_557_032 * 2 / 1e9)


def test_below_the_minimum_all_wait(tmp_path):
    failures = traced(tmp_path, (100.0, 3, 500.0), (200.0, 2, 200.0))
    timeline = ddlsim.simulate(
        timed(failures=failures, elastic=Elastic(3, rejoin=0.0), max_time="1000 s")
    ).failure_timeline
    assert [workers for _, workers in timeline.groups] == [4, 3, 0, 3, 4]
    assert timeline.repairing == pytest.approx(200.0)


def test_when_the_last_one_fails_all_is_lost(tmp_path):
    failures = traced(tmp_path, *[(100.0 + i, i, 50.0) for i in range(4)])
    timeline = ddlsim.simulate(
        timed(failures=failures, elastic=Elastic(1, rejoin=0.0), max_time="1000 s")
    ).failure_timeline
    assert timeline.lost > 99.0
    assert timeline.useful + timeline.lost + timeline.down == pytest.approx(1000.0)
    assert [workers for _, workers in timeline.groups] == [4, 3, 2, 1, 0, 1, 2, 3, 4]


def by_hand(turns, n_start, rate_of):
    """SGD with momentum over (workers, updates): shares anew, from where the epoch was; return the parameters."""
    training = Training("digits", rate=0.2, optimizer=Momentum(0.9), updates=12)
    model = ddlsim.load_model("digits-cnn")
    network = build_network(model, 0)
    params, momentum, samples = network.initial_params, None, 0
    for n, updates in turns:
        task = training.task(model, n, 0)
        taken = samples // n
        for _ in range(updates):
            gradients = []
            for rank in range(n):
                indices = task.shards[rank].indices(taken, 16)
                x, labels = task.train.x[indices], task.train.labels[indices]
                gradients.append(network.loss_and_gradient(params, x, labels)[1].astype(np.float64))
            mean = (sum(gradients) / n).astype(np.float32)
            momentum = mean if momentum is None else np.float32(0.9) * momentum + mean
            params = params - np.float32(rate_of(n)) * momentum
            taken += 16
            samples += 16 * n
    return params


@pytest.mark.parametrize("rate", few(["same", "linear", "square-root"], 1))
def test_survivors_learn_what_they_would_alone(tmp_path, rate):
    failures = traced(tmp_path, (33.0, 3, 1e9), (77.0, 1, 1e9))
    result = ddlsim.simulate(learning(failures, Elastic(1, rejoin="5 s", rate=rate)))
    factor = {"same": lambda n: 1.0, "linear": lambda n: n / 4, "square-root": lambda n: math.sqrt(n / 4)}[rate]
    turns = [(4, 3), (3, 3), (2, 6)]
    assert [workers for _, workers in result.failure_timeline.groups] == [4, 3, 2]
    assert result.params == pytest.approx(by_hand(turns, 4, lambda n: 0.2 * factor(n)), abs=2e-5)
    rows = result.history
    assert rows["updates"].tolist() == [0, 4, 8, 12]
    assert rows["samples"].tolist() == [0, 64 * 3 + 48, 64 * 3 + 48 * 3 + 32 * 2, 64 * 3 + 48 * 3 + 32 * 6]
    assert rows["time"].is_monotonic_increasing
    assert rows["time"].iloc[-1] == pytest.approx(result.failure_timeline.end)
    assert rows["rate"].tolist() == pytest.approx([0.2, 0.2 * factor(3), 0.2 * factor(2), 0.2 * factor(2)])
    assert rows["nbytes"].is_monotonic_increasing
    assert result.failure_timeline.steps == 12
    assert not result.can_be_saved


def test_a_machine_that_comes_back_learns_with_the_others(tmp_path):
    failures = traced(tmp_path, (33.0, 3, 30.0))
    result = ddlsim.simulate(learning(failures, Elastic(1, rejoin="5 s")))
    assert [workers for _, workers in result.failure_timeline.groups] == [4, 3, 4]
    before = math.floor((result.failure_timeline.groups[2][0] - 38.0 - 5.0) / 10.0)
    assert result.params == pytest.approx(by_hand([(4, 3), (3, before), (4, 9 - before)], 4, lambda n: 0.2), abs=2e-5)


def test_without_failures_it_is_the_run_bit_for_bit():
    plain = ddlsim.simulate(learning(None, None))
    result = ddlsim.simulate(learning(Failures(math.inf), Elastic(2)))
    assert result.params.tobytes() == plain.params.tobytes()
    assert result.history.equals(plain.history)
    assert result.accuracy == plain.accuracy


def test_the_batch_of_all_can_stay(tmp_path):
    failures = traced(tmp_path, (33.0, 3, 1e9))
    result = ddlsim.simulate(learning(failures, Elastic(1, batch="global"), compute=ddlsim.Affine("10 s", 0.0)))
    assert result.history["samples"].iloc[-1] == 3 * 64 + 9 * 63  # 21 samples each
    with pytest.raises(ConfigError, match="cannot continue with 3 workers: the step was measured with batch_size = 16"):
        _ = ddlsim.simulate(learning(failures, Elastic(1, batch="global"))).failure_timeline


@pytest.mark.parametrize(
    "strategy",
    few([
        AllReduce("ring"), ddlsim.ParameterServer(), ddlsim.LocalSGD(2), ddlsim.DPSGD(), ddlsim.SlowMo(),
        ddlsim.BackupWorkers(1),
    ], 3),
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_every_strategy_of_replicas_has_it(tmp_path, strategy):
    failures = traced(tmp_path, (33.0, 3, 60.0))
    experiment = learning(failures, Elastic(2, rejoin="5 s"), strategy=strategy)
    first, again = ddlsim.simulate(experiment), ddlsim.simulate(experiment)
    assert [workers for _, workers in first.failure_timeline.groups][:2] == [4, 3]
    assert first.params.tobytes() == again.params.tobytes()
    assert first.accuracy == first.history["accuracy"].iloc[-1]
    timeline = first.failure_timeline
    assert timeline.useful + timeline.lost + timeline.down == pytest.approx(timeline.end)


@pytest.mark.parametrize("share", seeds(1, 4))  # of 100 examples
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_times_add_up_whatever_fails(share, data, tmp_path_factory):
    """Random worlds: no dead end, all seconds accounted for, groups of the workers that are there."""
    rows = data.draw(st.lists(st.tuples(st.floats(1.0, 900.0), st.integers(0, 3), st.floats(0.0, 300.0)), max_size=12))
    failures = traced(
        tmp_path_factory.mktemp("world"), *sorted(rows), spares=data.draw(st.integers(0, 2)),
        detection=data.draw(st.sampled_from([0.0, 7.0])), kind=data.draw(st.sampled_from(["crash", "hang"])),
    )  # fmt: skip
    least = data.draw(st.integers(1, 4))
    elastic = Elastic(least, rejoin=data.draw(st.sampled_from([0.0, 12.0])))
    timeline = ddlsim.simulate(timed(failures=failures, elastic=elastic, max_time="1000 s", steps=3)).failure_timeline
    assert timeline.useful + timeline.lost + timeline.down == pytest.approx(1000.0, abs=1e-6)
    assert min(timeline.useful, timeline.lost, timeline.detecting, timeline.repairing, timeline.restarting) >= 0.0
    assert all(workers == 0 or least <= workers <= 4 for _, workers in timeline.groups)
    times = [time for time, _ in timeline.groups]
    assert times == sorted(times)
    if not rows:
        assert timeline.effective == 1.0


@pytest.mark.slow
def test_a_month_and_its_lives():
    result = ddlsim.simulate(timed())
    assert result.failure_timeline.end == DAYS
    timelines = result.timelines(3)
    assert len({timeline.lost for timeline in timelines}) == 3
    assert 0.97 < result.failure_timeline.effective < 1.0
    waiting = ddlsim.simulate(timed(elastic=None, checkpoints=Checkpoints("10 min", stall="5 s")))
    assert result.goodput > waiting.goodput  # who waits for repairs and loses minutes has less
    assert "elastic" in str(result)


def test_files_have_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'cluster = "office-1gbe"\nworkers = 4\n[failures]\nmtbf = "10 h"\nper = "host"\n'
        '[elastic]\nmin_workers = 2\nrejoin = "20 s"\nrate = "linear"\n',
        encoding="utf-8",
    )
    experiment = ddlsim.load_experiment(file)
    assert experiment.elastic == Elastic(2, rejoin="20 s", rate="linear")
    file.write_text(experiment.to_toml(), encoding="utf-8")
    assert ddlsim.load_experiment(file).elastic == experiment.elastic


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"failures": None}, "elastic has no effect without failures"),
        ({"failures": Failures("2 h", per="job")}, "elastic: failures with per = 'job'"),
        ({"strategy": ddlsim.FSDP(), "compute": None}, "elastic: workers of .* shard the model"),
        ({"strategy": ddlsim.AsyncParameterServer()}, "do not stop for each other"),
        ({"elastic": Elastic(5)}, "elastic: min_workers = 5: must be at most the number of workers, 4"),
    ],
)
def test_what_does_not_go_with_it(changes, message):
    with pytest.raises(ConfigError, match=message):
        _ = ddlsim.simulate(timed(**changes)).failure_timeline


def test_who_is_warned_leaves_at_the_end_of_a_step(tmp_path):
    failures = traced(tmp_path, (100.05, 3, 300.0), detection="4 s", warning="30 s")
    result = ddlsim.simulate(timed(failures=failures, max_time="1000 s"))
    timeline, step = result.failure_timeline, result.step_time
    left = step * math.ceil(70.05 / step)
    assert (timeline.lost, timeline.detecting) == (0.0, 0.0)
    assert timeline.groups[1] == (pytest.approx(left + 10.0), 3)
    short = ddlsim.simulate(
        timed(failures=dataclasses.replace(failures, warning="10 ms"), max_time="1000 s")
    ).failure_timeline
    assert short.lost > 0.0
    assert short.detecting == 4.0


def test_the_last_step_before_leaving_counts_in_what_is_learnt(tmp_path):
    """Warned at 25 s: the third step of 10 s is the last of four workers; then it is as if one had crashed after it."""
    warned = traced(tmp_path, (45.0, 3, 1e6), warning="20 s")
    timeline = ddlsim.simulate(learning(warned, Elastic(2, rejoin=0.0)))
    (tmp_path / "other").mkdir()
    crashed = traced(tmp_path / "other", (timeline.failure_timeline.groups[1][0] + 1e-3, 3, 1e6))
    same = ddlsim.simulate(learning(crashed, Elastic(2, rejoin=0.0)))
    assert timeline.failure_timeline.lost == 0.0
    assert [n for _, n in timeline.failure_timeline.groups] == [4, 3]
    assert timeline.params.tobytes() == same.params.tobytes()


# ------------------------------------------------------------ who is left


def slow_first(tmp_path, *rows, **changes):
    fields = {
        "speed": [0.5, 1.0, 1.0, 1.0], "batch_size": 8, "compute": Measured("1 s", 8), "max_time": "1000 s",
        "failures": traced(tmp_path, *rows), "elastic": Elastic(2, rejoin="3 s"), "strategy": AllReduce("ring", "none"),
        "model": "lenet5", **changes,
    }  # fmt: skip
    return ddlsim.simulate(timed(**fields))


def test_a_group_is_of_the_machines_that_are_left(tmp_path):
    """The slow one of four machines is gone: three go on at full speed, 23.9 samples/s and not 11.98."""
    assert slow_first(tmp_path, (0.5, 0, 1e9)).goodput == pytest.approx(24.0 * 0.996, rel=2e-3)
    assert slow_first(tmp_path, (0.5, 3, 1e9)).goodput == pytest.approx(12.0 * 0.996, rel=2e-3)


@pytest.mark.parametrize("gone", range(4))
def test_whoever_is_left_runs_as_in_a_run_of_its_own(tmp_path, gone):
    """Machines with another speed, another link, and on another switch: a group is what these machines are alone."""
    graph = racks(2, 2, bandwidth="1 Gbit/s", latency="10 us", oversubscription=4.0)
    for a, b, data in graph.edges(data=True):
        data["bandwidth"] *= 0.2 if "h1" in (a, b) else 1.0
    fields = {"cluster": graph, "model": "resnet50", "compute": Measured("100 ms", 32), "batch_size": 32}
    speed = [1.0, 1.0, 1.0, 0.3]
    left = [rank for rank in range(4) if rank != gone]
    result = slow_first(tmp_path, (0.01, gone, 1e9), speed=speed, **fields)
    own = ddlsim.simulate(timed(
        workers=left, speed=[speed[rank] for rank in left], failures=None, elastic=None, **fields,
        strategy=AllReduce("ring", "none"),
    ))  # fmt: skip
    assert result.goodput == pytest.approx(own.throughput * (1000.0 - 3.01) / 1000.0, rel=5e-3)


def test_machines_that_are_gone_take_no_energy(tmp_path):
    """Two of four machines are gone: energy of two that compute, and none of idle ones that are not there."""
    for idle in (0.0, 100.0):
        device = dataclasses.replace(ddlsim.load_device("v100"), idle_power_w=idle)
        result = slow_first(tmp_path, (0.5, 0, 1e9), (0.6, 1, 1e9), device=device, speed=None)
        computed = 2 * 1.0 * result.failure_timeline.steps
        expected = 300.0 * computed + idle * (2 * 1000.0 - computed)
        assert result.energy == pytest.approx(expected, rel=0.01)
        back = slow_first(tmp_path, (0.5, 0, 500.0), (0.6, 1, 500.0), device=device, speed=None)
        assert back.failure_timeline.out_of_service == pytest.approx([500.0, 500.0, 0.0, 0.0], abs=3.0)


def test_a_group_never_has_more_than_the_batch_of_all(tmp_path):
    """Three workers share a batch of 32 in tens; a strategy whose batch is that of all keeps it as it is."""
    elastic = Elastic(1, rejoin="3 s", batch="global")
    fields = {"speed": None, "compute": ddlsim.Affine("1 s", 0.0), "elastic": elastic}
    result = slow_first(tmp_path, (0.5, 0, 1e9), **fields)
    assert result.goodput * 1000.0 == pytest.approx(30 * result.failure_timeline.steps)
    assert any("every worker takes the same whole number of samples" in note for note in result.notes)
    checkpoints = Checkpoints("10 s", stall=0.0)
    parts = slow_first(
        tmp_path, (0.5, 0, 1e9), **{**fields, "strategy": ddlsim.FSDP(), "batch_size": 48, "checkpoints": checkpoints}
    )
    assert parts.goodput * 1000.0 == pytest.approx(48 * parts.failure_timeline.steps)
    for n_workers in range(1, 9):
        for batch_size in range(1, 20):
            most = max(batch_size * 8, n_workers)
            assert most - n_workers < n_workers * elastic.batch_size(batch_size, n_workers, 8) <= most


@pytest.mark.slow
def test_faults_are_on_the_clock_of_the_training(tmp_path):
    """They are not restarted with each group, and follow the workers whose ranks change."""
    rows = (100.0, 0, 200.0), (500.0, 1, 100.0)
    plain = slow_first(tmp_path, *rows, speed=None)
    stop = ddlsim.Stop(3, "10 s", "50 s")
    once = slow_first(tmp_path, *rows, speed=None, faults=[stop])
    assert plain.failure_timeline.steps - once.failure_timeline.steps == pytest.approx(50, abs=2)
    later = slow_first(tmp_path, *rows, speed=None, faults=[ddlsim.Stop(3, "150 s", "50 s")])  # of three workers
    assert plain.failure_timeline.steps - later.failure_timeline.steps == pytest.approx(50, abs=2)
    gone = slow_first(tmp_path, *rows, speed=None, faults=[ddlsim.Stop(0, "150 s", "50 s")])  # who is not there
    assert plain.failure_timeline.steps - gone.failure_timeline.steps == pytest.approx(0, abs=2)
    slow = slow_first(tmp_path, *rows, speed=None, slowdowns=[ddlsim.Slowdown(3, "150 s", "700 s", 2.0)])
    assert plain.failure_timeline.steps - slow.failure_timeline.steps == pytest.approx((700 - 2 * 3) / 2, abs=4)


@dataclasses.dataclass(frozen=True)
class Hot:
    """A custom fault: some workers are slow or stand still, and links of the first one are slow, perhaps."""

    slow: tuple[int, ...]
    start: float
    duration: float
    stopped: tuple[int, ...] = ()
    links: tuple[tuple[int, float], ...] = ()

    def effects(self, cluster, nodes):
        slowed = [(rank, 2.0) for rank in self.slow]
        yield Effect(self.start, self.start + self.duration, slowed, self.stopped, self.links)


@pytest.mark.parametrize("hit", few([(0,), (1,), (3,), (0, 2)], 1, start=3))
@pytest.mark.parametrize("learns", [False, True], ids=["timed", "learning"])
def test_custom_faults_hit_the_same_workers_in_every_group(tmp_path, hit, learns):
    """Machine 1 fails at 100 s and returns at 700 s. Workers are slow, and others stand still, before and after."""
    failures = traced(tmp_path, (100.0, 1, 600.0), detection="4 s")
    made = learning(failures, Elastic(1, rejoin="5 s")) if learns else timed(failures=failures, max_time="1000 s")
    for start, duration in ((20.0, 30.0), (250.0, 60.0), (50.0, 300.0), (650.0, 200.0)):
        stop = ddlsim.Stop(3, start, duration / 2.0)
        slow = ddlsim.Slowdown(hit, start, duration, 2.0)
        known = ddlsim.run.run(made.with_(slowdowns=[slow], faults=[stop]))
        custom = ddlsim.run.run(made.with_(faults=[Hot((), start, duration / 2.0, (3,)), Hot(hit, start, duration)]))
        one, other = known.failure_timeline, custom.failure_timeline
        assert other.to_dict() == one.to_dict()
        assert other.groups == one.groups
        assert custom.goodput == known.goodput
        assert [row.time for row in other.history] == [row.time for row in one.history]


def test_custom_faults_keep_their_effect_on_links_when_their_worker_is_gone(tmp_path):
    """A worker computes slowly, and the link of another one is slow. The first one's machine fails."""
    failures = traced(tmp_path, (100.0, 1, 1e6))
    link = int(CLUSTER.link_channel[np.flatnonzero(CLUSTER.link_src == CLUSTER.node("h0"))[0]])
    plain, gone = (
        ddlsim.simulate(
            timed(failures=failures, max_time="1000 s", faults=[Hot(slow, 300.0, 200.0, (), ((link, 0.1),))])
        )
        for slow in ((), (1,))
    )
    none = ddlsim.simulate(timed(failures=failures, max_time="1000 s"))
    assert gone.failure_timeline.steps == plain.failure_timeline.steps < none.failure_timeline.steps


def test_learning_groups_have_faults_on_the_clock(tmp_path):
    failures = traced(tmp_path, (33.0, 3, 1e9))
    faults = {"faults": [ddlsim.Stop(0, "12 s", "9 s"), ddlsim.Stop(1, "62 s", "30 s")]}
    plain, result = (ddlsim.simulate(learning(failures, Elastic(1, rejoin="5 s"), **each)) for each in ({}, faults))
    assert [n for _, n in result.failure_timeline.groups] == [4, 3]
    # one step of four workers less is done before the failure at 33 s, and the second stop takes 30 s
    assert result.failure_timeline.end - plain.failure_timeline.end == pytest.approx(30.0 + 10.0, abs=0.1)


@pytest.mark.parametrize(("changes", "message"), [
    ({"elastic": Elastic(1, batch="global"), "compute": Measured("1 s", 12), "batch_size": 12},
     "elastic: cannot continue with 3 workers: the step was measured with batch_size = 12"),
    ({"elastic": Elastic(5)}, "elastic: min_workers = 5: must be at most the number of workers, 4"),
])  # fmt: skip
def test_what_is_wrong_is_raised_at_the_call(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        ddlsim.simulate(timed(failures=traced(tmp_path, (5.0, 0, 1e9)), max_time="100 s", model="lenet5", **changes))


@pytest.mark.parametrize(("strategy", "n_saved"), [(AllReduce("ring"), 0), (ddlsim.ShardedUpdate(), 1)])
def test_an_announced_failure_costs_a_checkpoint_only_of_shards(tmp_path, strategy, n_saved):
    """Each replica has all of the state; shards are saved before one of them is gone."""
    failures = traced(tmp_path, (100.05, 3, 1e6), warning="30 s")
    saving = Checkpoints("2000 s", stall="2 s", load="1 s")
    experiment = timed(strategy=strategy, failures=failures, checkpoints=saving, max_time="1000 s")
    timeline = ddlsim.simulate(experiment).failure_timeline
    assert [workers for _, workers in timeline.groups] == [4, 3]
    assert (timeline.lost, timeline.checkpointing) == (0.0, pytest.approx(2.0 * n_saved))
    assert timeline.restarting == pytest.approx(10.0 + n_saved)  # shards are read


def test_devices_do_not_compute_while_the_state_is_saved():
    saving = Checkpoints("50 s", stall="5 s")
    result = ddlsim.simulate(timed(failures=Failures(math.inf), checkpoints=saving, max_time="1000 s"))
    timeline = result.failure_timeline
    assert timeline.checkpointing == pytest.approx(90.0, abs=5.0)
    computing = result.device_seconds["compute"] / result.simulated_time
    assert timeline.computed == pytest.approx(computing * (1000.0 - timeline.checkpointing), rel=1e-9)


@pytest.mark.parametrize(
    "strategy", [ddlsim.AdaComm(4), ddlsim.LocalSGD(4, start_epoch=1)], ids=["AdaComm", "LocalSGD"]
)
@pytest.mark.parametrize("short", few([False, True], 1))
def test_groups_whose_exchanges_depend_on_the_training(strategy, short):
    """Their pace is that of the training itself; without a failure, the run is that of a group that is not elastic."""
    training = ddlsim.Training("digits", updates=12)
    more = {"faults": [ddlsim.RandomFaults("0.02 s", "0.2 ms", factor=3.0)], "max_time": "0.1 s"} if short else {}
    runs = [
        ddlsim.simulate(
            "office-1gbe", "digits-cnn", strategy, 16, 3, training=training, elastic=elastic,
            failures=ddlsim.Failures("1 year"), checkpoints=ddlsim.Checkpoints("1 h", stall="1 ms"), **more
        )
        for elastic in (None, ddlsim.Elastic())
    ]  # fmt: skip
    plain, elastic = (run.history for run in runs)
    assert elastic["accuracy"].tolist() == plain["accuracy"].tolist()
    assert elastic["time"].tolist() == pytest.approx(plain["time"].tolist(), rel=1e-9)
