"""Machines that are taken away with a warning: saved in time, nothing is lost; against going from step to step."""

import heapq
import math

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim import ConfigError
from ddlsim.reliability import FailureFreeTimeline, Failures, simulate_failures
from ddlsim.reliability.checkpoints import Cost


def even(n_steps, step=1.0, *, every, stall=0.0, write=0.0, load=0.0):
    ends = step * np.arange(1, n_steps + 1)
    return FailureFreeTimeline(ends, 0, every, Cost(stall, write, load), math.inf)


def traced(tmp_path, *rows, **options):
    file = tmp_path / "failures.csv"
    file.write_text("time_s,unit,repair_s\n" + "".join(f"{t},{u},{r}\n" for t, u, r in rows), encoding="utf-8")
    return Failures(trace=file, per="host", **options)


def test_a_warning_in_time_saves_all(tmp_path):
    """Warned at 33.3 s, behind three checkpoints: the step ends at 33.5, is saved at 34, and the job starts again."""
    timeline = even(100, every=10.0, stall=0.5, load=0.25)
    failures = traced(tmp_path, (43.3, 0, 60.0), restart="2 s", spares=1, warning="10 s", detection="7 s")
    outcome = simulate_failures(timeline, failures, [[0]], math.inf)
    assert (outcome.lost, outcome.detecting, outcome.repairing, outcome.restarting) == (0.0, 0.0, 0.0, 2.25)
    assert outcome.checkpointing == 10 * 0.5 + 0.5
    assert outcome.end == 105.0 + 0.5 + 2.25
    assert outcome.events == ((43.3, 0, 0.0),)
    assert outcome.running_intervals.tolist() == [[0.0, 0.0, 33.5], [36.25, 33.5, 105.0]]


def test_without_a_spare_it_waits_for_the_machine(tmp_path):
    outcome = simulate_failures(
        even(100, every=10.0), traced(tmp_path, (15.5, 0, 60.0), restart=0.0, warning="3 s"), [[0]], math.inf
    )
    assert (outcome.lost, outcome.repairing) == (0.0, 15.5 + 60.0 - 13.0)
    assert outcome.end == 100.0 + outcome.repairing


@pytest.mark.parametrize(("warning", "lost"), [("1.9 s", 4.0), ("2 s", 4.0), ("2.5 s", 0.0), ("3 s", 0.0), (0.0, 4.0)])
def test_a_warning_that_is_too_short_does_nothing(tmp_path, warning, lost):
    """Taken away at 14: the step under way 2 s before ends at 13, and a checkpoint of 1.5 s would end at 14.5."""
    timeline = even(100, every=10.0, stall=0.0, write=0.0)
    timeline = FailureFreeTimeline(timeline.ends, 0, 10.0, Cost(0.0, 1.5, 0.0), math.inf)
    failures = traced(tmp_path, (14.0, 0, 0.0), restart=0.0, warning=warning)
    assert simulate_failures(timeline, failures, [[0]], math.inf).lost == lost


def test_a_checkpoint_that_is_due_then_is_not_made_twice(tmp_path):
    outcome = simulate_failures(
        even(100, every=10.0, stall=0.5),
        traced(tmp_path, (11.0, 0, 0.0), restart=0.0, warning="1.5 s"),
        [[0]],
        math.inf,
    )
    assert (outcome.lost, outcome.checkpointing, outcome.end) == (
        0.0,
        5.0,
        105.0 + 0.5,
    )  # waits for its machine from 10.5 to 11 s


def naive(steps, every, cost, restart, repair, spares, warning, failures):
    """One step after the other; regular checkpoints stay where they are in the training."""
    due, since = set(), 0.0
    for number, seconds in enumerate(steps, 1):
        since += seconds
        if since >= every or number == len(steps):
            due.add(number)
            since = 0.0
    now, lost, step = 0.0, 0.0, 0
    saved, left_at, writing = 0, 0.0, []
    pool, failures = [0.0] * spares, list(failures)

    def recover(now):
        while True:
            heapq.heappush(pool, failures.pop(0) + repair)
            now = max(heapq.heappop(pool), now)
            if not failures or failures[0] >= now + restart + cost.load:
                return now + restart + cost.load
            now = max(now, failures[0])

    while step < len(steps) or writing:
        regular = step < len(steps) and step + 1 in due
        end = now + steps[step] if step < len(steps) else math.inf
        safe = end + cost.stall + cost.write
        last = step == len(steps) - 1
        if failures and end > failures[0] - warning >= 0 and safe <= failures[0] and not last and warning:
            step += 1  # the one under way when the warning came, or the first after a start
            saved, writing = step, []
            now = left_at = recover(safe)
            continue
        then = end + (cost.stall if regular else 0.0) if step < len(steps) else writing[-1][0]
        if failures and failures[0] < then:
            failed = failures[0]
            for ready, number, when in writing:
                if ready <= failed:
                    saved, left_at = number, when
            lost += failed - left_at
            now = left_at = recover(failed)
            step, writing = saved, []
            continue
        now = then
        if step == len(steps):
            break
        step += 1
        if regular:
            writing.append((now + cost.write, step, now))
    return now, lost


@pytest.mark.parametrize("share", seeds(1, 4))  # of 400 examples
@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=40), every=st.integers(1, 30), stall=st.integers(0, 3),
    write=st.integers(0, 4), restart=st.integers(0, 6), repair=st.integers(0, 40), spares=st.integers(0, 3),
    warning=st.integers(0, 20), failures=st.lists(st.integers(21, 400), max_size=12, unique=True).map(sorted),
)  # fmt: skip
def test_it_is_the_same_as_going_from_step_to_step(
    share, tmp_path_factory, steps, every, stall, write, restart, repair, spares, warning, failures
):
    cost = Cost(float(stall), float(write), 2.0)
    times = [time + 0.5 for time in failures]
    parts = traced(
        tmp_path_factory.mktemp("trace"), *((time, 0, repair) for time in times), restart=float(restart),
        spares=spares, warning=float(warning),
    )  # fmt: skip
    timeline = FailureFreeTimeline(np.cumsum(steps, dtype=np.float64), 0, float(every), cost, math.inf)
    outcome = simulate_failures(timeline, parts, [[0]], math.inf)
    assert (outcome.end, outcome.lost) == naive(steps, every, cost, restart, repair, spares, warning, times)
    assert outcome.steps == len(steps)
    assert outcome.useful == pytest.approx(sum(steps))
    kinds = (
        outcome.useful,
        outcome.lost,
        outcome.checkpointing,
        outcome.detecting,
        outcome.repairing,
        outcome.restarting,
    )
    assert sum(kinds) == pytest.approx(outcome.end)


def test_a_month_of_spot_machines_loses_next_to_nothing():
    timeline = FailureFreeTimeline(np.array([2.0, 4.0]), 1, 1800.0, Cost(20.0, 0.0, 20.0), 30 * 86_400.0)
    plain = Failures("10 h", per="host", repair=0.0, restart="2 min")
    warned = Failures("10 h", per="host", repair=0.0, restart="2 min", warning="30 s")
    before, after = (simulate_failures(timeline, one, [[0]] * 8, timeline.length) for one in (plain, warned))
    assert len(before.events) == len(after.events) > 400
    mtbf, period, restart = 4500.0, 1820.0, 140.0
    each = mtbf - period / math.expm1(period / mtbf)  # mean of x mod period, x exponential; none while it starts
    assert before.lost / len(before.events) == pytest.approx(each * math.exp(-restart / mtbf), rel=0.1)
    assert after.lost < 0.02 * before.lost
    assert after.effective > before.effective


@pytest.mark.parametrize(
    "options",
    [{"warning": "2 min", "kind": "hang"}, {"warning": "2 min", "per": "job"}, {"discount": 0.7, "per": "switch"}],
)
def test_only_machines_that_are_taken_away_have_warnings_and_discounts(options):
    with pytest.raises(ConfigError, match="applies only to failures that put machines out of service"):
        Failures("10 h", **options)
