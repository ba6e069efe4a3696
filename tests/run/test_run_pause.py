"""A maintenance window: what runs goes on to its end, and nothing starts until it is over, whatever the strategy."""

from dataclasses import dataclass

import numpy as np
import pytest
from bundled_strategies import BUNDLED, N_WORKERS, VARIANTS

import ddlsim
from ddlsim import Affine, Background, Experiment, Job, Lognormal, Pause, Slowdown, Stop, Training
from ddlsim.cluster import star
from ddlsim.network.calendar import earliest_start, merged
from ddlsim.reliability import Effect
from ddlsim.run import run
from ddlsim.runtime.recorder import pieces
from ddlsim.strategies import contract

GRAPH = star(8, bandwidth="1 Gbit/s", latency="20 us")
EVERY = BUNDLED | VARIANTS
SYNCHRONOUS = [name for name, case in BUNDLED.items() if case.data and not contract.of(case.strategy).is_asynchronous]


def experiment(name, *, learns=False, **options):
    case = EVERY[name]
    if learns or case.needs_data:
        options["training"] = Training(case.data, updates=12, evaluate_every=6)
    else:
        options |= {"steps": 8, "warmup": 0}
    return Experiment(
        GRAPH, case.model, case.strategy, case.batch_size, N_WORKERS, compute=Affine("10 ms", 0.0), **options
    )


def check_windows(result, faults):
    """Nothing starts in a pause, and who has nothing to compute waits."""
    windows = merged([(fault.start, fault.start + fault.duration) for fault in faults if isinstance(fault, Pause)])
    for start, end in windows.tolist():
        for span in result.recorder.spans:
            assert span.kind == "waiting" or not start < span.start < end, span
            assert span.kind != "communication" or not max(start, span.start) < min(end, span.end), span


@pytest.mark.parametrize("name", EVERY)
def test_every_strategy_has_them(name):
    plain = run(experiment(name))
    start, duration = 0.4 * plain.end_time, 2.0 * plain.end_time
    pause = Pause(start, duration)
    paused = run(experiment(name, faults=pause), keep_spans=True)
    assert paused.end_time == pytest.approx(plain.end_time + duration, rel=0.02)
    assert paused.nbytes_sent == pytest.approx(plain.nbytes_sent, rel=1e-12)
    check_windows(paused, [pause])
    began = paused.busy.start  # of messages: those of collectives that were under way are over soon
    assert not ((began > start + 0.5 * duration) & (began < start + duration)).any()
    assert sum(paused.shares.values()) == pytest.approx(1.0)
    seconds = [result.shares["compute"] * result.end_time for result in (plain, paused)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)
    again = run(experiment(name, faults=pause))
    assert again.recorder.updates == paused.recorder.updates
    assert again.recorder.seconds == paused.recorder.seconds


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_synchronous_strategies_learn_stays(name):
    plain = run(experiment(name, learns=True))
    paused = run(experiment(name, learns=True, faults=[Pause(0.3 * plain.end_time, "1 s")]))
    assert paused.params.tobytes() == plain.params.tobytes()
    assert paused.end_time == pytest.approx(plain.end_time + 1.0, rel=0.05)


@pytest.mark.parametrize("name", ["AllReduce", "AllReduce priority", "FSDP", "FedAvg", "AsyncParameterServer", "KSync"])
def test_they_go_with_everything_else(name):
    pauses = [Pause(0.0, "10 ms"), Pause("25 ms", "40 ms"), Pause("50 ms", "100 ms"), Pause("200 ms", "30 ms")]
    others = [Slowdown(1, "0 s", "70 ms", 3.0), Stop(2, "30 ms", "50 ms")]
    options = {"jitter": Lognormal(0.3), "overlap_slowdown": 1.3, "seed": 3}
    result = run(experiment(name, faults=[*pauses, *others], **options), keep_spans=True)
    windows = [Pause(0.0, "10 ms"), Pause("25 ms", "125 ms"), Pause("200 ms", "30 ms")]
    apart = run(experiment(name, faults=[*windows, *others], **options))
    np.testing.assert_allclose(result.recorder.updates, apart.recorder.updates, rtol=1e-12)
    check_windows(result, [window for window in windows if window.start > 0.08])  # a Stop cuts spans before
    for rank, seconds in enumerate(result.recorder.seconds):
        assert sum(seconds.values()) + result.recorder.idle[rank] == pytest.approx(result.end_time)


@dataclass(frozen=True)
class Maintenance:
    """A window in every period of 50 ms, in which a worker computes more slowly at first."""

    start: float
    duration: float

    def effects(self, cluster, nodes):
        for number in range(4):
            begin = self.start + 0.05 * number
            yield Effect(begin, begin + self.duration, pauses=True)
            yield Effect(begin, begin + 0.5 * self.duration, slowed=[(0, 2.0)])


@pytest.mark.parametrize("name", ["AllReduce", "AsyncParameterServer", "KSync"])
def test_faults_of_other_kinds_cause_them_too(name):
    listed = [
        each
        for number in range(4)
        for each in (Pause(0.02 + 0.05 * number, 0.01), Slowdown(0, 0.02 + 0.05 * number, 0.005, 2.0))
    ]
    one, other = (run(experiment(name, faults=faults)) for faults in ([Maintenance(0.02, 0.01)], listed))
    assert one.recorder.updates == other.recorder.updates
    assert one.recorder.seconds == other.recorder.seconds
    assert one.end_time > run(experiment(name)).end_time + 0.015


def test_jobs_have_them_for_one_or_for_all():
    one = experiment("AllReduce").with_(workers=[0, 1, 2, 3])
    other = experiment("AsyncParameterServer").with_(workers=[4, 5])
    both = [Job(one, "one"), Job(other, "other")]
    plain = ddlsim.simulate_jobs(both)
    ends = [ran.end for ran in plain.runs]
    first = ddlsim.simulate_jobs([Job(one.with_(faults=Pause("30 ms", "1 s")), "one"), Job(other, "other")])
    assert [ran.end for ran in first.runs] == pytest.approx([ends[0] + 1.0, ends[1]], rel=0.02)
    everybody = ddlsim.simulate_jobs([*both, Background("h6", "h7", "0.1 Gbit/s")], faults=[Pause("30 ms", "1 s")])
    assert [ran.end for ran in everybody.runs] == pytest.approx([end + 1.0 for end in ends], rel=0.02)


def test_files_have_them(tmp_path):
    fault = '{type = "pause", start = "1 ms", duration = "2 s"}'
    text = f'cluster = "office-1gbe"\nworkers = 2\nsteps = 3\nfaults = [{fault}]\n'
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    read = ddlsim.load_experiment(tmp_path / "run.toml")
    assert read.faults == (Pause(0.001, 2.0),)
    (tmp_path / "again.toml").write_text(read.to_toml(), encoding="utf-8")
    assert ddlsim.load_experiment(tmp_path / "again.toml").faults == read.faults
    assert ddlsim.simulate(read).end_time > 2.0


def test_windows_are_merged_and_spans_cut():
    pauses = merged([(5.0, 6.0), (1.0, 2.0), (1.5, 3.0), (3.0, 4.0)])
    assert pauses.tolist() == [[1.0, 4.0], [5.0, 6.0]]
    assert [earliest_start(pauses, now) for now in (0.5, 1.0, 3.9, 4.0, 5.5, 9.0)] == [0.5, 4.0, 4.0, 4.0, 6.0, 9.0]
    span, start, end, waits = pieces(pauses, np.array([0.0, 2.0, 7.0]), np.array([5.5, 3.0, 8.0]))
    assert [*zip(span.tolist(), start.tolist(), end.tolist(), waits.tolist(), strict=True)] == [
        (0, 0.0, 1.0, False), (0, 1.0, 4.0, True), (1, 2.0, 3.0, True), (0, 4.0, 5.0, False), (0, 5.0, 5.5, True),
        (2, 7.0, 8.0, False),
    ]  # fmt: skip
