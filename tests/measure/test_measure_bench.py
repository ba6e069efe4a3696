"""The timing loops, with ranks that are threads and operations of known length, on clocks that only these move."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddlsim.measure.runner import Task, combine, crowding, measure, prepare, run
from ddlsim.measure.steps import Trained

PAIR = Task("point_to_point", "one_way", 2, 1, (4,), ((0, 1),))
REDUCE = Task("collective", "all_reduce", 2, 1, (8,))


class Clock(threading.local):
    """The time of a thread, s; it stands in for the module `time`. Reading it takes a nanosecond."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-9
        return self.now

    def sleep(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("ddlsim.measure.runner.time", CLOCK)


@dataclasses.dataclass(frozen=True)
class Shared:
    size: int
    barrier: threading.Barrier
    values: list

    def all(self, rank, value):
        """Return the values of all ranks."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def meet(self, rank):
        """Let a rank go on when the last one is there."""
        CLOCK.now = max(self.all(rank, CLOCK.now))


@dataclasses.dataclass(frozen=True)
class ThreadRank:
    """A rank in a thread. A collective waits for all and takes `seconds`; rank 1 leaves barriers `late`."""

    shared: Shared
    rank: int
    seconds: float = 0.0
    late: float = 0.0
    host: str = "a"
    backend: str = "threads"
    compute: str = "none"
    version: str = "1"

    @property
    def size(self):
        return self.shared.size

    def barrier(self):
        self.shared.meet(self.rank)
        if self.rank == 1:
            CLOCK.sleep(self.late)

    def gather(self, value):
        self.shared.meet(self.rank)
        return self.shared.all(self.rank, value)

    def one_way(self, n_elements, peer, first):
        return lambda: CLOCK.sleep(2 * self.seconds)

    def both_ways(self, n_elements, peer):
        return lambda: CLOCK.sleep(self.seconds)

    def collective(self, operation, n_elements):
        def together():
            self.shared.meet(self.rank)
            CLOCK.sleep(self.seconds)

        return together

    def memory(self, operation, n_elements):
        return lambda: CLOCK.sleep(self.seconds)


def on_ranks(n_ranks, function, **settings):
    """Return what `function` returns on each of `n_ranks` threads."""
    shared = Shared(n_ranks, threading.Barrier(n_ranks, timeout=30), [None] * n_ranks)
    ranks = [ThreadRank(shared, rank, **settings) for rank in range(n_ranks)]
    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(function, ranks))


def timed(task, seconds=0.05, most=10.0):
    def on_rank(transport):
        return measure(transport, task, prepare(transport, task, task.sizes[0], lambda *_: None), seconds, most).times

    return on_rank


def test_waiting_for_a_late_rank_is_not_counted():
    """Rank 1 enters 60 ms late, the operation takes 5 ms: rank 0 sees 65 ms, rank 1 the 5 that count."""
    times, same = on_ranks(2, timed(REDUCE), seconds=0.005, late=0.06)
    assert times == same
    assert len(times) == 5
    assert times == pytest.approx([0.005] * 5, rel=1e-5)


def test_a_message_is_half_a_ping_pong():
    times, _, _ = on_ranks(3, timed(PAIR), seconds=0.02)  # rank 2 only waits
    assert times == pytest.approx([0.02] * len(times), rel=1e-5)


def test_more_time_gives_more_repetitions_and_no_time_gives_one():
    few, _ = on_ranks(2, timed(REDUCE, seconds=0.0, most=0.0), seconds=0.002)
    more, _ = on_ranks(2, timed(REDUCE, seconds=0.5), seconds=0.002)
    assert len(few) == 1
    assert len(more) > 5


def test_which_times_count():
    """Two repetitions on four ranks, in ms."""
    times = [[10.0, 20.0], [12.0, 18.0], [30.0, 40.0], [5.0, 50.0]]
    pairs = ((0, 1), (2, 3))
    assert combine(Task("point_to_point", "one_way", 4, 1, (), pairs), times) == [5.0, 10.0, 15.0, 20.0]
    assert combine(Task("point_to_point", "both_ways", 4, 1, (), pairs), times) == [10.0, 18.0, 5.0, 40.0]
    assert combine(Task("collective", "all_gather", 4, 1, ()), times) == [5.0, 18.0]
    assert combine(Task("collective", "reduce_scatter", 4, 1, ()), times) == [5.0, 18.0]
    for rooted in ("broadcast", "reduce", "gather", "scatter"):
        assert combine(Task("collective", rooted, 4, 1, ()), times) == [30.0, 50.0]
    assert len(combine(Task("memory", "copy", 4, 1, ()), times)) == 8


def events_of(tasks, budget, done=(), models=(), **settings):
    first, *others = on_ranks(2, lambda rank: list(run(rank, tasks, models, done, budget)), **settings)
    for other in others:
        assert [event.row for event in other] == [event.row for event in first], "the ranks disagree"
    return first


def test_a_run_measures_what_is_not_there_yet():
    tasks = [REDUCE, PAIR, Task("memory", "copy", 2, 1, (4096, 16384))]
    rows = [event.row for event in events_of(tasks, 1.0, seconds=0.001)]
    assert [(row.operation, row.nbytes, row.backend) for row in rows] == [
        ("all_reduce", 8, "threads"), ("one_way", 4, "threads"), ("copy", 4096, "none"), ("copy", 16384, "none"),
    ]  # fmt: skip
    assert all(row.min_s <= row.p25_s <= row.median_s <= row.p75_s <= row.max_s for row in rows)
    again = events_of(tasks, 1.0, done={row.key for row in rows[1:]})
    assert [event.row.operation for event in again] == ["all_reduce"]


def test_a_run_keeps_to_its_time():
    """20 ms for each repetition leave no time for a size 1,000 times as large."""
    events = events_of([Task("collective", "all_reduce", 2, 1, (8, 8000, 16000))], 1.0, seconds=0.02)
    assert [event.n_left for event in events] == [0, 2]
    assert 5 <= events[0].row.n_repetitions <= 1.0 / 0.02 - 2  # two more go before, to find out
    assert events[1].row is None


def test_steps_of_a_model():
    model = Trained("mine", "python", lambda batch_size: lambda: CLOCK.sleep(0.001 * batch_size))
    one, four = events_of([Task("step", "training", 2, 1, (1, 4), model="mine")], 0.5, models=[model])
    assert (four.row.model, four.row.batch_size, four.row.nbytes, four.row.backend) == ("mine", 4, 0, "python")
    assert one.row.min_s == pytest.approx(0.001, rel=1e-5)
    assert four.row.min_s >= 0.004


@pytest.mark.parametrize(("n_cores", "note"), [(2, ""), (1, "2 ranks on 1 cores")])
def test_too_many_ranks_for_the_cores_are_noted(monkeypatch, n_cores, note):
    monkeypatch.setattr("os.cpu_count", lambda: n_cores)
    assert on_ranks(2, crowding) == [note, note]
