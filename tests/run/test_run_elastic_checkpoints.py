"""Elastic runs with checkpoints: who has lost the state goes back, whoever is left; others do not."""

import math

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim import Affine, AllReduce, Checkpoints, ConfigError, Elastic, Experiment, Failures, Momentum, Training
from ddlsim.cluster import star

CLUSTER = ddlsim.load_cluster(star(6, bandwidth="8 Gbit/s", latency=0.0))
EVERY = Checkpoints("25 s", stall="2 s", load="7 s")


def traced(tmp_path, *rows, **options):
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "failures.csv"
    file.write_text("time_s,unit,repair_s\n" + "".join(f"{t},{u},{r}\n" for t, u, r in rows), encoding="utf-8")
    return Failures(trace=file, per="host", restart=0.0, **options)


def timed(failures, **changes):
    fields = {
        "workers": 4, "batch_size": 24, "compute": Affine("10 s", 0.0), "elastic": Elastic(2, rejoin="10 s"),
        "checkpoints": EVERY, "max_time": "1000 s", "strategy": AllReduce("ring", "none"), **changes,
    }  # fmt: skip
    return ddlsim.simulate(Experiment(CLUSTER, "lenet5", failures=failures, **fields))


def learning(failures, **changes):
    fields = {
        "workers": 4, "batch_size": 16, "compute": Affine("10 s", 0.0), "strategy": AllReduce("ring", "none"),
        "elastic": Elastic(1, rejoin="5 s"), "checkpoints": EVERY,
        "training": Training("digits", rate=0.2, optimizer=Momentum(0.9), updates=12, evaluate_every=4), **changes,
    }  # fmt: skip
    return ddlsim.simulate(Experiment(CLUSTER, "digits-cnn", failures=failures, **fields))


def test_whoever_holds_the_state_reads_nothing(tmp_path):
    result = timed(traced(tmp_path, (100.0, 3, 1e9)))
    timeline, step = result.failure_timeline, result.step_time
    steps = math.floor((100.0 - 3 * 2.0) / step)  # a checkpoint after each third step
    assert timeline.lost == pytest.approx(100.0 - steps * step - 3 * 2.0)
    assert timeline.restarting == 10.0
    assert [n for _, n in timeline.groups] == [4, 3]
    three = result.experiment.with_(failures=None, elastic=None, checkpoints=None, workers=3)
    others = ddlsim.simulate(three).step_time
    rest = 1000.0 - 110.0
    saved = [2.0 * (n // 3) + n * others for n in range(100)]  # when each step of the others has ended
    later = max(n for n in range(100) if saved[n] <= rest)
    assert timeline.steps == steps + later
    assert timeline.checkpointing == pytest.approx(2.0 * (3 + later // 3))


def test_where_all_fail_at_once_the_latest_checkpoint_is_read(tmp_path):
    rows = [(100.0, machine, 50.0) for machine in range(4)]
    result = timed(traced(tmp_path, *rows))
    timeline, step = result.failure_timeline, result.step_time
    assert timeline.lost == pytest.approx(100.0 - 9 * step - 3 * 2.0)  # the third checkpoint is that of nine steps
    assert timeline.repairing == pytest.approx(50.0)
    assert timeline.restarting == pytest.approx(10.0 + 7.0)
    begun = timed(traced(tmp_path / "without", *rows), checkpoints=None).failure_timeline
    assert begun.lost > 99.0


def test_parts_of_a_model_are_read_by_those_who_are_left(tmp_path):
    result = timed(traced(tmp_path, (100.0, 3, 200.0)), strategy=ddlsim.FSDP())
    timeline, step = result.failure_timeline, result.step_time
    assert [n for _, n in timeline.groups] == [4, 3, 4]
    assert timeline.lost == pytest.approx(100.0 - 9 * step - 3 * 2.0)
    began = 100.0 + 10.0 + 7.0
    assert timeline.groups[1][0] == pytest.approx(began)
    assert timeline.restarting == pytest.approx(2 * (10.0 + 7.0))
    # 32 s for three steps and a checkpoint: five times, and the step under way at 300 s ends with the sixth at 309
    assert timeline.groups[2][0] == pytest.approx(309.0 + 17.0, abs=1e-3)
    assert timeline.checkpointing == pytest.approx(2.0 * (3 + 6 + (1000 - 326) // 32), abs=1e-3)
    between = timed(traced(tmp_path, (100.0, 3, 190.0)), strategy=ddlsim.FSDP()).failure_timeline
    assert between.groups[2][0] == pytest.approx(297.0 + 2.0 + 17.0, abs=1e-3)  # with a checkpoint of its own
    assert between.lost == timeline.lost
    assert len(timeline.events) == 1


def test_a_warned_machine_leaves_its_part(tmp_path):
    timeline = timed(traced(tmp_path, (100.0, 3, 1e9), warning="30 s"), strategy=ddlsim.FSDP()).failure_timeline
    assert timeline.lost == 0.0
    assert [n for _, n in timeline.groups] == [4, 3]
    assert timeline.groups[1][0] < 100.0 + 17.0


def test_what_is_learnt_again_is_what_was_lost(tmp_path):
    """All are out at once: the parameters are those of a run that nothing disturbs."""
    rows = [(77.0, machine, 20.0) for machine in range(4)]
    result = learning(traced(tmp_path, *rows))
    plain = learning(None, elastic=None, checkpoints=None)
    assert result.failure_timeline.lost > 3.0
    assert result.params == pytest.approx(plain.params, abs=2e-6)
    assert result.history["updates"].tolist() == plain.history["updates"].tolist()
    assert result.history["accuracy"].tolist() == pytest.approx(plain.history["accuracy"].tolist())
    assert result.history["time"].is_monotonic_increasing
    assert result.history["time"].iloc[-1] == pytest.approx(result.failure_timeline.end)
    assert result.failure_timeline.steps == 12


@pytest.mark.parametrize(
    ("strategy", "of_all"), [(ddlsim.FSDP(), 48), (ddlsim.ShardedUpdate(), 0)], ids=["fsdp", "zero1"]
)
def test_those_who_are_left_learn_from_the_checkpoint_on(tmp_path, strategy, of_all):
    """As if the machine had crashed right after the checkpoint, of replicas that hold all of it."""
    failures = traced(tmp_path, (90.0, 3, 1e9))
    result = learning(failures, strategy=strategy, batch_size=of_all or 16)  # FSDP's is that of all workers
    batch = {"batch_size": 12, "elastic": Elastic(1, rejoin="5 s", batch="global")} if of_all else {}
    timeline = result.failure_timeline
    assert [n for _, n in timeline.groups] == [4, 3]
    saved = 6  # of nine steps in 90 s, behind the second checkpoint
    assert timeline.lost == pytest.approx(90.0 - 2 * 2.0 - saved * 10.0, abs=0.3)
    step = learning(None, elastic=None, checkpoints=None).step_time
    crashed = traced(tmp_path / "replicas", (saved * step + 1.0, 3, 1e9))
    same = learning(crashed, checkpoints=None, **batch)
    assert [n for _, n in same.failure_timeline.groups] == [4, 3]
    assert result.params == pytest.approx(same.params, abs=2e-5)
    assert timeline.steps == same.failure_timeline.steps == 12


@pytest.mark.parametrize("share", seeds(1, 4))  # of 100 examples
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_times_add_up_whatever_fails(share, data, tmp_path_factory):
    rows = data.draw(st.lists(st.tuples(st.floats(1.0, 900.0), st.integers(0, 3), st.floats(0.0, 300.0)), max_size=12))
    failures = traced(
        tmp_path_factory.mktemp("world"), *sorted(rows), spares=data.draw(st.integers(0, 2)),
        detection=data.draw(st.sampled_from([0.0, 7.0])), warning=data.draw(st.sampled_from([None, "5 s", "40 s"])),
    )  # fmt: skip
    strategy = data.draw(st.sampled_from([AllReduce("ring"), ddlsim.FSDP()]))
    least = data.draw(st.integers(1, 4))
    checkpoints = Checkpoints("25 s", bandwidth="1 MB/s", asynchronous=data.draw(st.booleans()))
    options = {"elastic": Elastic(least, rejoin="12 s"), "checkpoints": checkpoints, "strategy": strategy, "steps": 3}
    timeline = timed(failures, **options).failure_timeline
    parts = (
        timeline.useful,
        timeline.lost,
        timeline.checkpointing,
        timeline.detecting,
        timeline.repairing,
        timeline.restarting,
    )
    assert sum(parts) == pytest.approx(1000.0, abs=1e-6)
    assert min(parts) >= -1e-9
    assert all(workers == 0 or least <= workers <= 4 for _, workers in timeline.groups)
    assert np.all(np.diff([time for time, _ in timeline.groups]) >= 0.0)


def test_it_says_what_is_missing(tmp_path):
    failures = traced(tmp_path, (100.0, 3, 1e9))
    with pytest.raises(ConfigError, match="shard the model or the optimizer state"):
        timed(failures, strategy=ddlsim.FSDP(), checkpoints=None)
    with pytest.raises(ConfigError, match="but a checkpoint takes 30 s"):
        timed(failures, checkpoints=Checkpoints("25 s", stall="30 s"))
