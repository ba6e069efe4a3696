"""Centralised strategies between synchronous and asynchronous: their clocks against closed forms.

The formulas are for compute times X, i.i.d., and a network that takes no time (Dutta et al. 2018,
arXiv:1803.01113, section 3); H_n is the n-th harmonic number, X_(k:n) the k-th smallest of n.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from draws import rows
from strategies_reference import uniform_star

from ddlsim import (
    AsyncParameterServer,
    BackupWorkers,
    Cluster,
    ConfigError,
    ElasticAveraging,
    Exponential,
    Gamma,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Lognormal,
    Measured,
    NoJitter,
    ParameterServer,
    Result,
    Slowdown,
    SoftSync,
    StaleSynchronous,
    Uniform,
    load_model,
    simulate,
)
from ddlsim.strategies import Strategy, contract
from ddlsim.workload import order_statistics
from ddlsim.workload.jitter import Jitter

P, K = 8, 3
EXPONENTIAL = Exponential()
FREE = {"bandwidth": 1e18, "latency": 0.0}


def run(
    strategy: Strategy, n: int = P, jitter: Jitter = EXPONENTIAL, *, updates: int = 400, compute: float = 1.0,
    cluster: Cluster | None = None, speed: list[float] | None = None, model: str = "digits-cnn",
) -> Result:  # fmt: skip
    """One-second steps; by default nothing but computing takes time."""
    steps = math.ceil(updates / contract.of(strategy).updates(1000, n) * 1000)
    return simulate(
        cluster or uniform_star(n + 1, **FREE), model, strategy, 8, n, steps=steps, warmup=0,
        compute=Measured(compute, 8), jitter=jitter, speed=speed,
    )  # fmt: skip


def intervals(result: Result) -> np.ndarray:
    """Times between updates, without the start, in which all workers begin together."""
    return np.diff([t for t, _ in result.recorder.updates])[20:]


def agree(times: np.ndarray, expected: float) -> None:
    """The mean is within 4 standard errors, which are small. (Neighbouring intervals are not independent in
    asynchronous schemes, so the error is that of the means of blocks.)"""
    blocks = times[: len(times) // 10 * 10].reshape(-1, 10).mean(axis=1)
    error = blocks.std(ddof=1) / math.sqrt(len(blocks))
    assert error < 0.05 * expected
    assert abs(times.mean() - expected) < 4 * error


# ---------------------------------------------------------------- how long an update takes


SYNCHRONOUS_FORMS = [
    pytest.param(KSync(P), order_statistics.exponential(P), id="all"),
    pytest.param(KSync(K), order_statistics.exponential(P, K), id="k-sync"),
    pytest.param(BackupWorkers(2), order_statistics.exponential(P, P - 2), id="backup-2"),
    pytest.param(BackupWorkers(0), order_statistics.exponential(P), id="backup-0"),
    pytest.param(KBatchSync(K), K / P, id="k-batch-sync"),
    pytest.param(KBatchSync(2 * P), 2.0, id="more-batches-than-learners"),
    pytest.param(KAsync(K), order_statistics.exponential(P, K), id="k-async"),
    pytest.param(KAsync(P), order_statistics.exponential(P), id="all-async"),
    pytest.param(KBatchAsync(K), K / P, id="k-batch-async"),
    pytest.param(KAsync(1), 1 / P, id="1-async"),
    pytest.param(AsyncParameterServer(), 1 / P, id="async"),
    pytest.param(SoftSync(2), 4 / P, id="2-softsync"),
]


@pytest.mark.parametrize(("strategy", "expected"), rows(SYNCHRONOUS_FORMS, 3))
def test_exponential_times(strategy: Strategy, expected: float) -> None:
    """(H_P - H_(P-K))/mu, or K/(P mu) where nobody stops: what is left of an exponential time is as long as new.
    Backup workers: the first N of N + b, (H_(N+b) - H_b)/mu."""
    agree(intervals(run(strategy, updates=2000 if expected < 0.2 else 500)), expected)


@pytest.mark.parametrize("jitter", [Uniform(0.5, 1.5), Gamma(1.5), Lognormal(0.4)], ids=lambda j: type(j).__name__)
@pytest.mark.parametrize("k", [1, 2 * P])
def test_k_batch_async_takes_k_over_p_for_any_times(jitter: Jitter, k: int) -> None:
    """K E[X]/P: P renewal processes side by side, within 4 standard errors of the times' mean."""
    result = run(KBatchAsync(k), jitter=jitter, updates=2400 // k)
    cv = {"Uniform": 1 / math.sqrt(12), "Gamma": 1.5, "Lognormal": 0.4}[type(jitter).__name__]
    times = [t for t, _ in result.recorder.updates]
    assert times[-1] / len(times) == pytest.approx(k / P, rel=4 * cv / math.sqrt(2400))


@pytest.mark.parametrize("k", [1, K, P])
def test_uniform_times(k: int) -> None:
    """K-sync takes E[X_(K:P)] for any X; K-async at most that if X is new-longer-than-used, which uniform times
    are, and much less for K well below P; never less than its share K E[X]/P."""
    expected = order_statistics.uniform(P, k, low=0.5, high=1.5)
    agree(intervals(run(KSync(k), jitter=Uniform(0.5, 1.5), updates=300)), expected)
    took = intervals(run(KAsync(k), jitter=Uniform(0.5, 1.5), updates=300)).mean()
    assert k / P * 0.97 < took < expected * 1.02
    if k < P:
        assert took < 0.8 * expected


def test_late_workers_that_finish_keep_the_others_waiting() -> None:
    """The paper's own backup workers do not stop: with exponential times, b of them are busy with what is late, so
    a step takes longer than with a restart, but less than without backups."""
    times = {restart: intervals(run(BackupWorkers(2, restart))).mean() for restart in (True, False)}
    assert times[True] < times[False] < order_statistics.exponential(P)


def test_a_slow_backup_worker_never_takes_part() -> None:
    """One of four is 2.5 times as slow: the steps are the others', and what it pushes is too late. It finishes at
    2.5 s, when two steps are over, starts again with their parameters, and so on."""
    strategy = BackupWorkers(1, restart=False)
    result = run(strategy, 4, NoJitter(), updates=20, speed=[1.0, 1.0, 1.0, 0.4])
    assert [t for t, _ in result.recorder.updates] == pytest.approx(np.arange(1.0, 21.0), rel=1e-9)
    assert {n for _, n in result.recorder.updates} == {24}
    assert result.recorder.step_end[3][:7] == pytest.approx(np.arange(2.5, 20.0, 2.5).tolist(), rel=1e-9)
    assert result.workers["compute"][3] == pytest.approx(20.0, rel=1e-9)  # it never waits


def test_cancelled_work_is_booked_until_it_is_cancelled() -> None:
    """The slow one computes for the second that the others need, again and again, and never finishes."""
    result = run(KSync(3), 4, NoJitter(), updates=20, speed=[1.0, 1.0, 1.0, 0.4])
    assert [t for t, _ in result.recorder.updates] == pytest.approx(np.arange(1.0, 21.0), rel=1e-9)
    assert result.workers["compute"].tolist() == pytest.approx([20.0] * 4, rel=1e-9)
    assert result.n_messages == 20 * 3 + 19 * 4  # it pushes nothing; nobody is told of the last update


def test_k_batch_sync_lets_the_fast_do_more() -> None:
    """One learner of 3 speed units, one of 1: four mini-batches take a second, three of them the fast one's."""
    result = run(KBatchSync(4), 2, NoJitter(), updates=10, speed=[3.0, 1.0])
    assert [t for t, _ in result.recorder.updates] == pytest.approx(np.arange(1.0, 11.0), rel=1e-9)


def test_steps_include_messages_and_updates() -> None:
    """On a network that takes time: t + push + apply + pull, for two servers with half of the bytes each."""
    cluster = uniform_star(4 + 2)
    result = run(KSync(4, servers=2, apply_time="7 ms"), 4, NoJitter(), updates=5, cluster=cluster, compute=0.1)
    nbytes = 4.0 * result.workloads[0].model.n_params
    direction = 40e-6 + 4 * nbytes / 2 / 1.25e9
    step = 0.1 + 2 * direction + 7e-3
    assert intervals_all(result) == pytest.approx([step] * 4, rel=1e-9)


def intervals_all(result: Result) -> list[float]:
    return np.diff([t for t, _ in result.recorder.updates]).tolist()


# ---------------------------------------------------------------- the same clock in the limits


def clock(strategy: Strategy, n: int = 5, **more) -> list[float]:
    """Times of the updates on a network that takes time, with jitter."""
    more = {"jitter": Gamma(0.5), "cluster": uniform_star(n + 1), "compute": 0.01, "updates": 40} | more
    return [t for t, _ in run(strategy, n, **more).recorder.updates]


@pytest.mark.parametrize("model", ["digits-cnn", "cifar-cnn"])
@pytest.mark.parametrize(
    "strategy", [KSync(5), KAsync(5), BackupWorkers(0), BackupWorkers(0, restart=False)], ids=lambda s: s.label
)
def test_waiting_for_everybody_is_synchronous(strategy: Strategy, model: str) -> None:
    """The same steps as ParameterServer's, up to when the update is counted: at the server, or when the last
    worker has the parameters, one pull later. The first push is that of a step without its pull."""
    times = np.array(clock(strategy, model=model))
    expected = np.array(clock(ParameterServer(overlap="none"), model=model))
    pull = (expected - times)[0]
    assert pull > 0.0
    assert times + pull == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", ["digits-cnn", "cifar-cnn"])
def test_no_slack_is_a_barrier(model: str) -> None:
    """The last gradient of every step arrives when the synchronous server has all."""
    n = 5
    last = np.array(clock(StaleSynchronous(0), n, model=model, updates=40 * n))[n - 1 :: n]
    assert last == pytest.approx(np.array(clock(KSync(n), n, model=model)), rel=1e-9)


@pytest.mark.parametrize("jitter", [Gamma(0.5), NoJitter()], ids=["jitter", "equal"])
@pytest.mark.parametrize("apply_time", [0.0, 0.002])
@pytest.mark.parametrize("name", ["infinite-slack", "1-async", "1-batch-async", "n-softsync"])
def test_waiting_for_nobody_is_asynchronous(name: str, apply_time: float, jitter: Jitter) -> None:
    """The same updates at the same times, of the same staleness."""
    n = 5
    strategy = {
        "infinite-slack": StaleSynchronous(math.inf, apply_time=apply_time),
        "1-async": KAsync(1, apply_time=apply_time),
        "1-batch-async": KBatchAsync(1, apply_time=apply_time),
        "n-softsync": SoftSync(n, apply_time=apply_time),
    }[name]
    results = [
        run(s, n, jitter, cluster=uniform_star(n + 1), compute=0.01, updates=100)
        for s in (strategy, AsyncParameterServer(apply_time=apply_time))
    ]
    updates, expected = ([t for t, _ in result.recorder.updates] for result in results)
    assert updates == pytest.approx(expected, rel=1e-12)
    assert results[0].recorder.staleness == results[1].recorder.staleness


def test_ssp_keeps_everybody_within_its_slack() -> None:
    """Nobody starts a step more than `slack` steps ahead of the slowest, somebody does start one so far ahead, and
    slack makes the run faster."""
    rates = []
    for slack in (0, 1, 3, math.inf):
        result = run(StaleSynchronous(slack), 6, Exponential(), updates=900)
        clocks, widest = [0] * 6, 0
        events = sorted((t, rank) for rank, ends in enumerate(result.recorder.step_end) for t in ends)
        for i, (t, rank) in enumerate(events):
            clocks[rank] += 1
            if i + 1 == len(events) or events[i + 1][0] > t:  # all that happens at an instant has happened
                widest = max(widest, max(clocks) - min(clocks))
        rates.append(result.throughput)
        if slack < math.inf:
            assert widest == slack  # a step ends when the worker is let go
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(8 * 6 / order_statistics.exponential(6), rel=0.1)
    assert rates[-1] == pytest.approx(8 * 6, rel=0.1)


@pytest.mark.parametrize("apply_time", [0.0, 7e-3])
@pytest.mark.parametrize("period", [1, 4])
def test_elastic_averaging_is_synchronous_every_period(period: int, apply_time: float) -> None:
    """t + (push + move + pull)/period, the pushes of all together."""
    n, cluster = 4, uniform_star(5)
    strategy = ElasticAveraging(0.2, period, apply_time=apply_time)
    result = run(strategy, n, NoJitter(), updates=8 * period + 1, cluster=cluster, compute=0.1)
    direction = 40e-6 + n * 4.0 * result.workloads[0].model.n_params / 1.25e9
    assert result.end_time == pytest.approx((8 * period + 1) * 0.1 + 8 * (2 * direction + apply_time), rel=1e-9)


def test_asynchronous_elastic_averaging_waits_for_nobody() -> None:
    result = run(ElasticAveraging(0.2, 3, synchronous=False), 4, Exponential(), updates=2000)
    assert result.throughput == pytest.approx(4 * 8, rel=0.05)
    assert result.mean_staleness == pytest.approx(3, rel=0.05)
    assert result.workers["waiting"].sum() == 0.0


# ---------------------------------------------------------------- staleness


@pytest.mark.parametrize("n", [1, 15, 30])
def test_softsync_staleness(n: int) -> None:
    """30 learners of nearly equal speed: (N-1)/c in the mean, n nearly; 1-softsync has 0, 1 and 2 only, and more
    than 2n is rarer than 1e-4 (Zhang et al. 2016, section 5, figure 3)."""
    learners, c = 30, 30 // n
    result = run(SoftSync(n), learners, Lognormal(0.05), updates=1500 // c)
    staleness = np.array(result.recorder.staleness[5 * learners :])
    assert staleness.mean() == pytest.approx((learners - 1) / c, rel=0.03)
    assert (staleness > 2 * n).mean() < 1e-4
    if n == 1:
        assert set(staleness.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("strategy", [KBatchAsync(1), SoftSync(6), StaleSynchronous(math.inf)], ids=lambda s: s.label)
def test_asynchronous_staleness_of_exponential_times_is_geometric(strategy: Strategy) -> None:
    """P(tau = s) = 1/N (1 - 1/N)^s: each update is anybody's with the same probability."""
    n = 6
    result = run(strategy, n, updates=1500)
    counts, total = result.staleness_histogram, len(result.recorder.staleness)
    assert result.mean_staleness == pytest.approx(n - 1, rel=0.03)
    for s in range(8):
        p = (1 - 1 / n) ** s / n
        assert abs(counts[s] - total * p) < 4 * math.sqrt(total * p * (1 - p))


@pytest.mark.parametrize("k", [2, 3, 6])
def test_k_async_staleness(k: int) -> None:
    """A gradient that waits for its update misses fewer of the others': in the long run N/k - 1 updates lie
    between two of a worker's."""
    result = run(KAsync(k), 6, Exponential(), updates=2000 // k)
    assert result.mean_staleness == pytest.approx(6 / k - 1, rel=0.05, abs=1e-3 if k == 6 else 0.0)


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize("strategy", [KSync(2), KAsync(3), BackupWorkers(1), SoftSync(2)], ids=lambda s: s.label)
def test_updates_count_the_gradients_that_they_are_made_of(strategy: Strategy) -> None:
    samples = {n for _, n in run(strategy, 4, updates=50).recorder.updates}
    assert samples == {8 * {"2-sync": 2, "3-async": 3, "1 backup worker": 3}.get(strategy.label, 2)}


def test_accumulating_pushes_once_for_several_batches() -> None:
    """Downpour with m = 4: a quarter of the messages; an update has 4 batches."""
    result = run(AsyncParameterServer(accumulate=4), 3, NoJitter(), updates=30, cluster=uniform_star(4), compute=0.1)
    nbytes = 4.0 * result.workloads[0].model.n_params
    assert {n for _, n in result.recorder.updates} == {32}
    direction = 40e-6 + 3 * nbytes / 1.25e9
    ends = np.array(result.recorder.step_end[0])
    assert np.diff(ends[3::4]) == pytest.approx(0.4 + 2 * direction, rel=1e-9)
    assert np.diff(ends)[::4] == pytest.approx(0.1, rel=1e-9)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: KSync(0), "KSync: k = 0: must be a positive integer"),
    (lambda: run(KSync(9)), "KSync: k = 9 exceeds the number of workers; use at most 8"),
    (lambda: run(KAsync(9)), "KAsync: k = 9 exceeds the number of workers"),
    (lambda: run(SoftSync(9)), "SoftSync: n = 9 exceeds the number of workers"),
    (lambda: run(BackupWorkers(8)), "backups = 8: at least one of the 8 workers must not be a backup; use at most 7"),
    (lambda: run(BackupWorkers(1), 1), "backups = 1: the only worker must not be a backup; use at least 2 workers"),
    (lambda: BackupWorkers(-1), "backups = -1: must be a non-negative integer"),
    (lambda: StaleSynchronous(-1), "slack = -1: must be a non-negative integer, or math.inf"),
    (lambda: StaleSynchronous(1.5), "slack = 1.5"),
    (lambda: ElasticAveraging(1.5), "alpha = 1.5: must be between 0 and 1"),
    (lambda: ElasticAveraging(0.1, 0), "period = 0"),
    (lambda: SoftSync(2, staleness_scaling="inverce"), "did you mean 'inverse'"),
    (lambda: AsyncParameterServer(staleness_scaling=0.5), "staleness_scaling = 0.5: must be 'inverse'"),
    (lambda: AsyncParameterServer(delay_compensation=0.04), "delay_compensation = 0.04: must be a DelayCompensation"),
    (lambda: KBatchSync(2, placement="near"), "placement = 'near': must be 'own' or 'colocated'"),
    (lambda: KBatchSync(2, apply_time="1 MB"), "is a size, not a time"),
    (lambda: KAsync(2, servers=0), "KAsync: servers = 0"),
])  # fmt: skip
def test_what_does_not_fit_is_said(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---------------------------------------------------------------- workers that keep meeting

MEETING = "equal compute times without jitter: workers that start together keep arriving at the server together"


@pytest.mark.parametrize(
    ("strategy", "n", "jitter", "speed", "noted"),
    [
        pytest.param(AsyncParameterServer(), 2, NoJitter(), None, True, id="asynchronous"),
        pytest.param(StaleSynchronous(1), 2, NoJitter(), None, True, id="stale synchronous"),
        pytest.param(SoftSync(2), 2, NoJitter(), None, True, id="softsync"),
        pytest.param(KAsync(1), 2, NoJitter(), None, True, id="K-async"),
        pytest.param(KBatchAsync(2), 2, NoJitter(), None, True, id="K-batch-async"),
        pytest.param(ElasticAveraging(0.4, synchronous=False), 2, NoJitter(), None, True, id="elastic"),
        pytest.param(AsyncParameterServer(), 1, NoJitter(), None, False, id="alone"),
        pytest.param(AsyncParameterServer(), 2, Lognormal(0.1), None, False, id="with jitter"),
        pytest.param(AsyncParameterServer(), 2, NoJitter(), [1.0, 0.9], False, id="unequal"),
        pytest.param(StaleSynchronous(0), 2, NoJitter(), None, False, id="slack 0 is a barrier"),
        pytest.param(KAsync(2), 2, NoJitter(), None, False, id="all of them are a barrier"),
        pytest.param(ElasticAveraging(0.4), 2, NoJitter(), None, False, id="synchronous elastic"),
    ],
)
def test_a_note_says_that_equal_workers_keep_meeting(
    strategy: Strategy, n: int, jitter: Jitter, speed: list[float] | None, noted: bool
) -> None:
    result = run(strategy, n, jitter, updates=4, speed=speed)
    assert any(note.startswith(MEETING) for note in result.notes) == noted


def test_a_slow_down_parts_workers_that_would_keep_meeting() -> None:
    """Push and pull take as long as computing when alone, twice as long when shared: 2/5 or 2/3 updates a second."""
    cluster = uniform_star(3, bandwidth=load_model("digits-cnn").n_params * 4.0, latency=0.0)
    rates = {}
    for later in (0.0, 1.5):
        slow = [Slowdown(1, 0.0, later, 1e9)] if later else []
        result = simulate(
            cluster, "digits-cnn", AsyncParameterServer(), 8, 2, compute=Measured(1.0, 8), steps=60, slowdowns=slow
        )
        rates[later] = result.throughput / 8
        assert any(note.startswith(MEETING) for note in result.notes) == (not slow)
    assert rates[0.0] == pytest.approx(2 / 5)
    assert rates[1.5] == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "between", "k"),
    [  # as docs/models/asynchronous.md works out: two workers of 1 s, one of 2.5 s
        (KSync(2), 1.0, 2), (BackupWorkers(1), 1.0, 2), (BackupWorkers(1, restart=False), 1.0, 2),
        (KBatchSync(3), 2.0, 3), (KBatchSync(6), 3.0, 6),
    ],
    ids=lambda each: getattr(each, "label", ""),
)  # fmt: skip
def test_where_work_is_dropped_the_result_says_whose_samples_count(strategy: Strategy, between: float, k: int) -> None:
    """k * 8 samples between two updates, whose distance is the step time."""
    result = run(strategy, 3, NoJitter(), updates=12, speed=[1.0, 1.0, 0.4])
    assert result.step_times[5:] == pytest.approx(between)
    assert result.throughput == pytest.approx(8 * k / between)
    assert result.step_time == pytest.approx(between)
    assert result.samples_per_update == 8 * k
    (note,) = [note for note in result.notes if "throughput counts" in note]
    assert note == (
        f"{strategy.label}: throughput counts only the samples of the {k} gradients in each update, not those of "
        "abandoned work"
    )


@pytest.mark.parametrize("strategy", [KSync(3), BackupWorkers(0), KAsync(2), KBatchAsync(2)], ids=lambda s: s.label)
def test_nothing_is_said_where_all_samples_count(strategy: Strategy) -> None:
    assert not [note for note in run(strategy, 3, NoJitter(), updates=6).notes if "throughput counts" in note]
