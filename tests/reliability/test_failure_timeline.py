"""Lives of synchronous trainings: against closed forms, and against going from step to step."""

import heapq
import math

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim import ConfigError
from ddlsim.errors import DdlsimError
from ddlsim.reliability import (
    Checkpoints,
    FailureFreeTimeline,
    Failures,
    daly_interval,
    daly_time,
    simulate_failures,
    young_interval,
)
from ddlsim.reliability.checkpoints import Cost
from ddlsim.reliability.engine import STEADY, Outages, Pace, windows


def even(n_steps, step=1.0, *, every, stall=0.0, write=0.0, load=0.0):
    """A training of equal steps that ends."""
    ends = step * np.arange(1, n_steps + 1)
    return FailureFreeTimeline(ends, 0, every, Cost(stall, write, load), math.inf)


def trace(tmp_path, *rows, repair="repair_s"):
    file = tmp_path / "failures.csv"
    file.write_text(f"time_s,unit,{repair}\n" + "".join(f"{t},{unit},{r}\n" for t, unit, r in rows), encoding="utf-8")
    return file


def test_without_failures_only_checkpoints_take_time():
    outcome = simulate_failures(even(100, every=10.0, stall=0.5), Failures(math.inf), [[0]] * 4, math.inf)
    assert (outcome.end, outcome.useful, outcome.checkpointing, outcome.lost, outcome.down) == (
        105.0,
        100.0,
        5.0,
        0.0,
        0.0,
    )
    assert outcome.finished
    assert outcome.steps == 100
    assert outcome.availability == 1.0
    assert outcome.failures.empty


@pytest.mark.parametrize("x", [3.0, 10.25, 10.5, 26.75, 104.0])
def test_a_crash_at_x_loses_x_mod_work_and_checkpoint(tmp_path, x):
    failures = Failures(trace=trace(tmp_path, (x, 0, 0.0)), restart="2 s")
    outcome = simulate_failures(even(100, every=10.0, stall=0.5, load=0.25), failures, [[0]], math.inf)
    assert outcome.lost == x % 10.5
    assert outcome.restarting == 2.25
    assert outcome.end == 105.0 + x % 10.5 + 2.25


def test_without_checkpoints_a_failure_takes_all(tmp_path):
    failures = Failures(trace=trace(tmp_path, (60.0, 0, 0.0)), restart=0.0)
    outcome = simulate_failures(even(100, every=math.inf), failures, [[0]], math.inf)
    assert (outcome.lost, outcome.end) == (60.0, 160.0)


def test_a_checkpoint_counts_when_it_is_written(tmp_path):
    timeline = even(100, every=10.0, stall=0.5, write=4.0)
    for x, reached in ((14.0, 0.0), (14.5, 10.5), (24.9, 10.5), (25.0, 21.0)):
        outcome = simulate_failures(
            timeline, Failures(trace=trace(tmp_path, (x, 0, 0.0)), restart=0.0), [[0]], math.inf
        )
        assert outcome.lost == x - reached
        assert outcome.end == 105.0 + 4.0 + outcome.lost


def test_machines_that_crash_are_repaired_or_replaced(tmp_path):
    file = trace(tmp_path, (5.0, 0, 30.0), (6.0, 1, 50.0))
    waits = simulate_failures(
        even(100, every=10.0), Failures(trace=file, restart="1 s", per="host"), [[0]] * 2, math.inf
    )
    assert waits.repairing == 30.0 + 21.0  # both out from 6 s on: one is back at 35 s, the other at 56 s
    one = simulate_failures(
        even(100, every=10.0), Failures(trace=file, restart="2 s", per="host", spares=1), [[0]] * 2, math.inf
    )
    assert (one.repairing, one.restarting) == (29.0, 1.0 + 2.0)
    two = simulate_failures(
        even(100, every=10.0), Failures(trace=file, restart="2 s", per="host", spares=2), [[0]] * 2, math.inf
    )
    assert (two.repairing, two.restarting) == (0.0, 3.0)


def test_a_hang_is_noticed_after_the_time_out_and_takes_no_machine(tmp_path):
    file = trace(tmp_path, (5.0, 0, 1e9))
    outcome = simulate_failures(even(100, every=10.0), Failures(trace=file, kind="hang", restart=0.0), [[0]], math.inf)
    assert (outcome.detecting, outcome.repairing, outcome.end) == (600.0, 0.0, 705.0)


def test_a_failure_while_starting_makes_it_start_again(tmp_path):
    file = trace(tmp_path, (5.0, 0, 0.0), (8.0, 0, 0.0))
    outcome = simulate_failures(even(100, every=10.0), Failures(trace=file, restart="4 s"), [[0]], math.inf)
    assert (outcome.restarting, outcome.lost, outcome.end) == (7.0, 5.0, 112.0)


def test_first_reached_is_before_what_is_lost(tmp_path):
    outcome = simulate_failures(
        even(100, every=10.0), Failures(trace=trace(tmp_path, (15.0, 0, 0.0)), restart="1 s"), [[0]], math.inf
    )
    assert outcome.first_reached([9.0, 15.0, 16.0, 100.0, 101.0]).tolist() == [9.0, 15.0, 22.0, 106.0, math.inf]


def test_steps_repeat_for_as_long_as_it_takes():
    ends = np.array([2.0, 3.0, 5.0])  # then 1 and 2 s for ever
    timeline = FailureFreeTimeline(ends, 2, math.inf, Cost(0.0, 0.0, 0.0), 20.0)
    expected = [2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20]
    assert timeline.end_of(np.arange(1, 14)).tolist() == expected
    assert [timeline.count(t + 0.5) for t in range(20)] == [sum(end <= t for end in expected) for t in range(20)]
    outcome = simulate_failures(timeline, Failures(math.inf), [[0]], 20.0)
    assert (outcome.end, outcome.steps, outcome.finished) == (20.0, 13, False)


def naive(steps, every, cost, restart, repair, spares, failures):
    """One event after the other: a state is restored with the time at which it was left."""
    now, lost, step, since = 0.0, 0.0, 0, 0.0
    saved, left_at = 0, 0.0  # the state to go back to, and when this stretch was there
    writing = []
    pool, failures = [0.0] * spares, list(failures)
    while step < len(steps) or writing:
        due = step < len(steps) and (since + steps[step] >= every * (1.0 - 1e-12) or step == len(steps) - 1)
        then = now + steps[step] + (cost.stall if due else 0.0) if step < len(steps) else writing[-1][0]
        if failures and failures[0] < then:
            failed = failures[0]
            for safe, number, when in writing:
                if safe <= failed:
                    saved, left_at = number, when
            lost += failed - left_at
            now = failed
            while True:
                heapq.heappush(pool, failures.pop(0) + repair)
                now = max(heapq.heappop(pool), now)
                if not failures or failures[0] >= now + restart + cost.load:
                    break
                now = max(now, failures[0])
            now += restart + cost.load
            step, since, writing, left_at = saved, 0.0, [], now
            continue
        now = then
        if step == len(steps):
            break
        since += steps[step]
        step += 1
        if due:
            writing.append((now + cost.write, step, now))
            since = 0.0
    return now, lost


@pytest.mark.parametrize("share", seeds(1, 3))  # of 300 examples
@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=40),
    every=st.integers(1, 30),
    stall=st.integers(0, 3),
    write=st.integers(0, 4),
    restart=st.integers(0, 6),
    repair=st.integers(0, 40),
    spares=st.integers(0, 3),
    failures=st.lists(st.integers(1, 400), max_size=12, unique=True).map(sorted),
)
def test_it_is_the_same_as_going_from_step_to_step(
    share, tmp_path_factory, steps, every, stall, write, restart, repair, spares, failures
):
    cost = Cost(float(stall), float(write), 2.0)
    file = trace(tmp_path_factory.mktemp("trace"), *((time + 0.5, 0, repair) for time in failures))
    parts = Failures(trace=file, restart=float(restart), spares=spares, per="host")
    timeline = FailureFreeTimeline(np.cumsum(steps, dtype=np.float64), 0, float(every), cost, math.inf)
    outcome = simulate_failures(timeline, parts, [[0]], math.inf)
    found = naive(steps, every, cost, restart, repair, spares, [time + 0.5 for time in failures])
    assert (outcome.end, outcome.lost) == found
    assert outcome.steps == len(steps)
    assert outcome.useful == pytest.approx(sum(steps))
    parts = (
        outcome.useful,
        outcome.lost,
        outcome.checkpointing,
        outcome.detecting,
        outcome.repairing,
        outcome.restarting,
    )
    assert sum(parts) == pytest.approx(outcome.end)


@pytest.mark.parametrize("n_timelines", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_dalys_formula_holds(n_timelines):
    timeline = even(1000, 10.0, every=500.0, stall=20.0, load=30.0)
    failures = Failures("2000 h", restart="20 s", repair=0.0)
    ends = np.array(
        [
            simulate_failures(timeline, failures, [[0]] * 1000, math.inf, index=outcome).end
            for outcome in range(n_timelines)
        ]
    )
    expected = daly_time(10_000.0, 500.0, 20.0, 50.0, 7200.0)
    assert abs(ends.mean() - expected) < 4.0 * ends.std() / math.sqrt(len(ends))
    assert ends.std() > 0.0


def test_best_intervals():
    assert young_interval(7200.0, 25.0) == 600.0
    assert daly_interval(7200.0, 25.0) == pytest.approx(583.4, abs=0.1)
    assert daly_interval(10.0, 25.0) == 10.0
    around = [daly_time(1e6, w, 25.0, 60.0, 7200.0) for w in (500.0, daly_interval(7200.0, 25.0), 680.0)]
    assert min(around) == around[1]


def test_weibull_failures_have_the_mean_and_are_as_seeded():
    for shape in (0.7, 1.0, 2.0):
        events = Failures(1000.0, shape=shape).events(5000, seed=3)
        times = [next(events).time for _ in range(5000)]
        assert times == sorted(times)
        alone = Failures(1000.0, shape=shape).events(1, seed=5)
        times = np.array([next(alone).time for _ in range(4000)])
        assert np.diff(times).mean() == pytest.approx(1000.0, rel=0.1)
    one, same = Failures(1000.0).events(8, 1), Failures(1000.0).events(8, 1)
    assert [next(one) for _ in range(30)] == [next(same) for _ in range(30)]
    assert next(Failures(1000.0).events(8, 2)) != next(Failures(1000.0).events(8, 1))


def test_no_checkpoint_is_ever_reached(monkeypatch):
    monkeypatch.setattr("ddlsim.reliability.engine.HOPELESS", 1000)
    with pytest.raises(DdlsimError, match="they never leave time for the 5000 s of training until a checkpoint"):
        simulate_failures(even(1000, 10.0, every=5000.0), Failures(1.0, restart=0.0, repair=0.0), [[0]], math.inf)


def test_a_thousand_worlds_end():
    draw = np.random.default_rng(0)
    for world in range(1000):
        timeline = even(int(draw.integers(1, 60)), every=float(draw.integers(1, 20)), stall=0.1, write=0.3)
        failures = Failures(
            float(draw.uniform(200, 2000)), kind=str(draw.choice(["crash", "hang"])), shape=float(draw.uniform(0.5, 2)),
            per="host", spares=int(draw.integers(0, 3)), repair=float(draw.uniform(0, 100)),
            restart="5 s", detection="7 s",
        )  # fmt: skip
        length = float(draw.choice([100.0, math.inf]))
        outcome = simulate_failures(timeline, failures, [[0]] * int(draw.integers(1, 9)), length, seed=world)
        assert outcome.finished or outcome.end == length
        total = outcome.useful + outcome.lost + outcome.checkpointing + outcome.down
        assert total == pytest.approx(outcome.end)
        assert (
            min(
                outcome.useful,
                outcome.lost,
                outcome.checkpointing,
                outcome.detecting,
                outcome.repairing,
                outcome.restarting,
            )
            >= -1e-9
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Failures(), "Failures: set either mtbf"),
        (lambda: Failures("50 GB"), "mtbf"),
        (lambda: Failures("5 h", per="devise"), "did you mean 'device'"),
        (lambda: Failures("5 h", per="job", spares=1), "no machine fails"),
        (lambda: Failures("5 h", per="switch", spares=1), "spare machines cannot replace a switch"),
        (lambda: Checkpoints("10 min"), "the cost of a checkpoint is unknown"),
        (lambda: Checkpoints("10 min", to="peers", bandwidth="2 GB/s"), "set only one of them"),
        (lambda: Checkpoints("10 min", stall="3 s", bandwidth="2 GB/s"), "set only one of them"),
        (lambda: Checkpoints("10 min", stall="3 s", asynchronous=True), "the write time is unknown"),
        (lambda: Checkpoints("10 min", stall="3 s", nbytes="1 GB"), "nbytes = .1 GB. has no effect with .stall."),
        (lambda: Cost(5.0, 10.0, 0.0).check(14.0), "but a checkpoint takes 15 s"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when,unit\n1,0\n", "column 'time_s' is missing"),
        ("time_s,unit\nsoon,0\n", ":2: time_s = 'soon'"),
        ("time_s,unit\n1,0\n2,-1\n", ":3: unit = -1: must be a non-negative integer"),
        ("time_s,unit\n1,7\n", "unit = 7: must be 0 to 3, because the run has 4 parts"),
        ("time_s,unit\n5\n", ":2: unit"),
    ],
)
def test_traces_are_read_strictly(tmp_path, text, says):
    file = tmp_path / "failures.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        Failures(trace=file).events(4)
    with pytest.raises(ConfigError, match="missing"):
        Failures(trace=tmp_path / "missing.csv").events(4)


@pytest.mark.parametrize("share", seeds(1, 4))  # of 200 examples
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_pace_and_its_reverse(share, data):
    parts = data.draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0])), max_size=6))
    rate = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    clock, work = [0.0, 0.0], [0.0, 0.0]
    for seconds, share in parts:
        clock.append(clock[-1] + seconds)
        work.append(work[-1] + share * seconds)
    pace = Pace(np.array(clock), np.array(work), rate)
    for done in np.arange(0.0, work[-1] + 3.0, 0.125).tolist():
        then = float(pace.when(done))
        if rate == 0.0 and done > work[-1]:
            assert then == math.inf
        else:
            assert float(pace.until(then)) == done
            assert then == 0.0 or float(pace.until(then - 1e-3)) < done  # of a standstill, its beginning
    assert STEADY.until(7.3) == STEADY.when(7.3) == 7.3


@pytest.mark.slow
def test_failures_are_not_drawn_without_limit(monkeypatch):
    monkeypatch.setattr("ddlsim.reliability.failures.MOST", 1000)
    with pytest.raises(ConfigError, match=r"more than 1,000 failures of 3 parts in .*; reduce max_time"):
        simulate_failures(even(10**6, 10.0, every=100.0), Failures("1000 s", restart=0.0, repair=0.0), [[0]] * 3, 1e12)


def test_too_many_failures_are_an_error_before_they_are_sampled(monkeypatch):
    """Of a timeline that does not end earlier, and of workers that do not wait for each other."""
    monkeypatch.setattr("ddlsim.reliability.failures.recurring", lambda *_: iter([(1.0, 0)]))
    timeline = FailureFreeTimeline(np.array([1.0]), 1, math.inf, Cost(0.0, 0.0, 0.0), 1e6)
    with pytest.raises(ConfigError, match="more than 1,000,000 failures of 4 parts in 500 s; reduce max_time"):
        simulate_failures(timeline, Failures("2 ms"), [[0]] * 4, 1e6)
    with pytest.raises(ConfigError, match="more than 1,000,000 failures of 4 parts in 500 s; reduce max_time"):
        windows(Outages(Failures("2 ms"), [[0]] * 4), 1, 1e6)
    assert simulate_failures(timeline, Failures("5 s"), [[0]] * 4, 1e6).events
    assert simulate_failures(even(10, every=1.0), Failures("2 ms"), [[0]], 1e6).finished


def test_a_restart_that_never_ends_is_an_error(monkeypatch):
    monkeypatch.setattr("ddlsim.reliability.engine.HOPELESS", 1000)
    with pytest.raises(DdlsimError, match="they never leave time for the 300 s of a restart"):
        simulate_failures(even(100, every=1.0), Failures(1.0, restart="5 min"), [[0]], math.inf)
    endless = simulate_failures(even(10_000, every=1.0), Failures(1.0, restart="5 min"), [[0]], 5000.0)
    assert endless.end == 5000.0
    assert endless.useful < 20.0


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_a_checkpoint_is_due_after_the_one_before(seed):
    """However long the steps are, and however many repeat."""
    draw = np.random.default_rng(seed)
    ends = np.cumsum(draw.choice([0.1, 1.0, float(draw.uniform(0.05, 2.0))], draw.integers(1, 30)))
    cycle, every = int(draw.integers(0, len(ends) + 1)), float(draw.choice([0.001, 1.0, 2.0, draw.uniform(0.01, 8.0)]))
    timeline = FailureFreeTimeline(ends, cycle, every, Cost(0.0, 0.0, 0.0), float(draw.uniform(1.0, 3000.0)))
    steps, done = [], 0.0
    for step in range(1, timeline.n_steps + 1):
        end = float(timeline.end_of(np.array(step)))
        if end >= done + every * (1.0 - 1e-12):
            steps.append(step)
            done = end
    if not cycle and steps[-1:] != [timeline.n_steps]:
        steps.append(timeline.n_steps)
    assert timeline.saved_steps.tolist() == steps


def test_too_many_checkpoints_are_an_error(monkeypatch):
    monkeypatch.setattr("ddlsim.reliability.engine.MOST_CHECKPOINTS", 1000)
    timeline = FailureFreeTimeline(np.array([0.1]), 1, 0.1, Cost(0.0, 0.0, 0.0), 1e9)
    with pytest.raises(ConfigError, match=r"checkpoints: more than 1,000 checkpoints in \S+ s; reduce max_time"):
        _ = timeline.saved_steps
