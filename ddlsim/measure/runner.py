"""Order of the benchmarks (the most useful first, because time is limited), and the timing of each row.

A *task* is one operation on one set of ranks for several sizes (for a step, batch sizes). Sizes increase by a factor of
4, so that each decade contains about two.

Clocks of different machines are never compared: every time is a difference of one rank's monotonic clock.

one_way     half of a ping-pong, timed by its first rank; several pairs start together
both_ways   an exchange; the smaller time of the two ranks of a pair (the other includes waiting for it)
collective  after a barrier, each rank times its own call. No rank can leave an all-reduce, all-gather, all-to-all or
            reduce-scatter before the last has entered, so the smallest time over the ranks is that of the last to
            enter, which waited for no other. In a collective with a root, only some ranks know when it has ended. The
            largest time is then used, which is too long by the skew of the ranks after the barrier
memory, step   all ranks concurrently, as in training; the times of all ranks are used

The median and the quantiles are over repetitions (and pairs, or ranks for memory and step).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ddlsim
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.measure.steps import Trained
from ddlsim.measure.table import Measurement
from ddlsim.measure.transport import ITEM_NBYTES, Action, Transport

EXPERIMENTS = ("point_to_point", "collective", "memory", "step")
#: collectives that a rank may leave before others have entered
ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: operations, the most useful first
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter", *ROOTED[1:])
#: size below which latency dominates, so that concurrent messages make no measurable difference
LEAST_CONTENDED = 64 * 1024
#: size below which reducing takes less time than starting
LEAST_MEMORY = 4 * 1024

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Task:
    """`operation` on `n_ranks` ranks of `n_hosts` machines, for each of `sizes` (nbytes, or batch sizes).

    pairs  pairs of ranks that exchange concurrently (point_to_point)
    model  label of the trained model (step)
    """

    experiment: str
    operation: str
    n_ranks: int
    n_hosts: int
    sizes: tuple[int, ...]
    pairs: Pairs = ()
    model: str = ""

    def __str__(self) -> str:
        ranks = f"{len(self.pairs)} pair{'s' * (len(self.pairs) > 1)}" if self.pairs else f"{self.n_ranks} ranks"
        where = "one host" if self.n_hosts == 1 else f"{self.n_hosts} hosts"
        what = f"{self.operation} {self.model}".strip()
        return f"{self.experiment} {what}, {ranks} on {where}"


def sizes(least: int, most: int, multiple: int) -> tuple[int, ...]:
    """Return `least`, 4 `least`, ... up to `most` bytes, each rounded up to a `multiple`, without repeats."""
    ladder = itertools.takewhile(lambda nbytes: nbytes <= most, (least * 4**i for i in itertools.count()))
    return tuple(dict.fromkeys(-(-nbytes // multiple) * multiple for nbytes in ladder))


def pair_sets(hosts: Sequence[str]) -> list[tuple[int, Pairs]]:
    """Return sets of pairs that exchange concurrently, with the number of hosts they use; `hosts` is by rank.

    First one pair on a host and one pair between two hosts; then 2, 4, ... pairs: within the fullest host, between the
    two fullest hosts (sharing network cards), and with each pair on its own two hosts.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    full = sorted(by_host.values(), key=len, reverse=True)  # stable: ties in rank order
    firsts = [ranks[0] for ranks in by_host.values()]
    within = tuple(zip(full[0][::2], full[0][1::2], strict=False))
    between = tuple(zip(full[0], full[1], strict=False)) if len(full) > 1 else ()
    apart = tuple(zip(firsts[::2], firsts[1::2], strict=False))
    sets = [(1, within[:1]), (2, between[:1])]
    sets += [(1, within[:n]) for n in _counts(len(within))]
    sets += [(2, between[:n]) for n in _counts(len(between))]
    sets += [(2 * n, apart[:n]) for n in _counts(len(apart))]
    return [(n_hosts, pairs) for n_hosts, pairs in sets if pairs]


def _counts(most: int) -> list[int]:
    """Return 2, 4, 8, ... and `most`."""
    counts = [2**i for i in range(1, most.bit_length()) if 2**i < most]
    return [*counts, most] if most > 1 else []


def make_plan(
    hosts: Sequence[str],
    max_nbytes: int,
    only: Sequence[str],
    models: Sequence[str],
    batch_sizes: Sequence[int],
    lacking: Collection[str] = (),
) -> list[Task]:
    """Return the tasks for ranks on `hosts` (a name per rank).

    only         experiments to run; empty: all
    models       labels of the trained models, each with all `batch_sizes` (samples per rank)
    lacking      collectives that the library does not support
    """
    if "kernels" in only:  # measured separately, not as a task
        raise ConfigError(f"--only {','.join(only)}: kernels are measured on one device; use them alone")
    for name in only:
        if name not in EXPERIMENTS:
            raise unknown_name("experiment", name, (*EXPERIMENTS, "kernels"), "--only")
    n_ranks = len(hosts)
    if max_nbytes < ITEM_NBYTES * n_ranks:
        raise ConfigError(f"--max-size {max_nbytes} B: must be at least {ITEM_NBYTES * n_ranks} B for {n_ranks} ranks")
    if models and only and "step" not in only:
        raise ConfigError(
            f"--only {','.join(only)}: steps of {models[0]} would not be timed; add step to --only, or leave the "
            "model out"
        )
    if models and not batch_sizes:
        raise ConfigError("--batch-sizes is empty; expected samples per rank, such as 1,8,32")
    n_hosts = len(set(hosts))
    ladder = sizes(LEAST_MEMORY, max(max_nbytes, LEAST_MEMORY), ITEM_NBYTES)
    tasks = _exchanges(hosts, max_nbytes, lacking)
    tasks += [Task("memory", operation, n_ranks, n_hosts, ladder) for operation in ("reduction", "copy")]
    ladder = tuple(sorted(set(batch_sizes)))
    tasks += [Task("step", "training", n_ranks, n_hosts, ladder, model=model) for model in models]
    chosen = [task for task in tasks if not only or task.experiment in only]
    if not chosen:
        what = f"{', '.join(only)} with {n_ranks} rank{'s' * (n_ranks > 1)}"
        hint = "start more ranks to measure messages, or set --model or --module to measure steps"
        raise ConfigError(f"nothing to measure: {what}; {hint}")
    return chosen


def _exchanges(hosts: Sequence[str], most: int, lacking: Collection[str]) -> list[Task]:
    """Return tasks of messages and collectives: single pairs and all-reduce first."""
    n_ranks, n_hosts = len(hosts), len(set(hosts))
    if n_ranks < 2:
        return []
    first, second, contended = [], [], []
    for hosts_used, pairs in pair_sets(hosts):
        least = LEAST_CONTENDED if len(pairs) > 1 else ITEM_NBYTES
        ladder = sizes(least, most, ITEM_NBYTES)
        one, both = (
            Task("point_to_point", operation, 2 * len(pairs), hosts_used, ladder, pairs)
            for operation in ("one_way", "both_ways")
        )
        if len(pairs) > 1:
            contended += [one, both]
        else:
            first.append(one)
            second.append(both)
    ladder = sizes(ITEM_NBYTES, most, ITEM_NBYTES * n_ranks)
    offered = [operation for operation in COLLECTIVES if operation not in lacking]
    collectives = [Task("collective", operation, n_ranks, n_hosts, ladder) for operation in offered]
    return [task for task in [*first, collectives[0], *second, *contended, *collectives[1:]] if task.sizes]


#: number of repetitions per row; fewer than the minimum only if time is up
LEAST, MOST = 5, 500
#: minimum time of a burst of small messages in s: far above the time of reading the clock
BURST = 100e-6
MOST_IN_BURST = 100

Times = list[float]


@dataclass(frozen=True)
class Timing:
    """Times in s that are used, and the `cost` of a repetition on this rank in s, with barrier and burst."""

    times: Times
    cost: float


@dataclass(frozen=True)
class Work:
    """The work of this rank in a repetition: `ready` untimed after the barrier, then `action`, timed."""

    action: Action
    ready: Action | None = None


def prepare(transport: Transport, task: Task, size: int, step: Callable[[str, int], Action]) -> Work | None:
    """Return this rank's part of `task` at `size`, or None for a rank that only waits.

    `step` creates the training step of a model and batch size.
    """
    n_elements = size // ITEM_NBYTES
    if task.experiment == "collective":
        return Work(transport.collective(task.operation, n_elements))
    if task.experiment == "memory":
        return Work(transport.memory(task.operation, n_elements))
    if task.experiment == "step":
        return Work(step(task.model, size))
    for left, right in task.pairs:
        if transport.rank in (left, right):
            first = transport.rank == left
            peer = right if first else left
            ready = transport.one_way(1, peer, first)  # both must have arrived before the exchange
            if task.operation == "one_way":
                return Work(transport.one_way(n_elements, peer, first), ready)
            return Work(transport.both_ways(n_elements, peer), ready)
    return None


def _sample(transport: Transport, work: Work | None, n_repetitions: int, n_burst: int) -> Times:
    """Return this rank's times per call in s, one per repetition; empty for a rank that only waits."""
    times = []
    for _ in range(n_repetitions):
        transport.barrier()
        if work is None:
            continue
        if work.ready is not None:
            work.ready()
        start = time.perf_counter()
        for _ in range(n_burst):
            work.action()
        times.append((time.perf_counter() - start) / n_burst)
    return times


def measure(transport: Transport, task: Task, work: Work | None, seconds: float, most_seconds: float) -> Timing:
    """Return the times to use, on every rank, for as many repetitions as fit in `seconds`.

    At least five, unless these would take more than `most_seconds`.
    """
    _sample(transport, work, 1, 1)  # connections, memory, compilation
    start = time.perf_counter()
    single = max(_sample(transport, work, 1, 1), default=0.0)
    n_burst = 1
    if task.experiment == "point_to_point":
        once = max(transport.gather(single))
        n_burst = min(max(int(BURST / max(once, 1e-9)), 1), MOST_IN_BURST)
    # cost of a repetition, including the barrier; all ranks must use the same numbers
    cost = max(transport.gather(time.perf_counter() - start + (n_burst - 1) * single))
    wanted = min(max(int(seconds / cost), LEAST), MOST)
    affordable = max(int(most_seconds / cost), 1)
    n_repetitions = transport.gather(min(wanted, affordable))[0]
    start = time.perf_counter()
    times = transport.gather(_sample(transport, work, n_repetitions, n_burst))
    return Timing(combine(task, times), (time.perf_counter() - start) / n_repetitions)


def combine(task: Task, times: Sequence[Times]) -> Times:
    """Return the times to use, given those of every rank, shape (n_ranks, n_repetitions)."""
    if task.operation == "one_way":
        return [half / 2 for left, _ in task.pairs for half in times[left]]
    if task.operation == "both_ways":
        return [min(pair) for left, right in task.pairs for pair in zip(times[left], times[right], strict=True)]
    if task.experiment == "collective":
        counted = np.max if task.operation in ROOTED else np.min
        seconds: Times = counted(np.array(times), axis=0).tolist()
        return seconds
    return [seconds for of_rank in times for seconds in of_rank]


#: number of warm-up repetitions
WARM_UP = 2


@dataclass(frozen=True)
class Event:
    """A measured row, or (row None) the end of a task's time with `n_left` sizes remaining."""

    task: Task
    row: Measurement | None
    n_left: int = 0


def run(
    transport: Transport,
    tasks: Sequence[Task],
    models: Sequence[Trained],
    done: Collection[tuple[object, ...]],
    budget: float,
) -> Iterator[Event]:
    """Measure `tasks` in about `budget` seconds; every rank must iterate to the end.

    models  trained models of "step" tasks, by label
    done    keys (:attr:`Measurement.key`) of rows that were already measured

    The remaining time is divided evenly among the remaining tasks and, within a task, among its sizes, after reserving
    the minimum for larger sizes. A size other than a task's first is skipped, with all larger ones, if it would not
    fit. Its time is estimated from the previous size, in proportion.
    """
    by_label, note = {model.label: model for model in models}, crowding(transport)

    def step(label: str, batch_size: int) -> Action:
        return by_label[label].step(batch_size)

    def row(task: Task, size: int, times: Sequence[float]) -> Measurement:
        trained = by_label.get(task.model)
        backend = transport.compute if task.experiment == "memory" else transport.backend
        backend = trained.backend if trained is not None else backend
        least, low, median, high, most = np.quantile(times, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist()
        batch, nbytes = (size, 0) if task.experiment == "step" else (0, size)
        what = task.experiment, task.operation, task.n_ranks, task.n_hosts
        spread, about = (least, most, low, high, len(times)), (backend, "float32", batch, task.model)
        version = f"ddlsim {ddlsim.__version__}; {transport.version}"
        return Measurement(*what, median, nbytes, *spread, *about, version, note)

    pending = []
    for task in tasks:
        sizes = [size for size in task.sizes if row(task, size, [1.0]).key not in done]
        if sizes:
            pending.append((task, sizes))
    end = time.perf_counter() + budget
    for i, (task, sizes) in enumerate(pending):
        share = (end - time.perf_counter()) / (len(pending) - i)
        yield from _ladder(transport, task, sizes, share, step, row)


def _ladder(
    transport: Transport,
    task: Task,
    sizes: Sequence[int],
    seconds: float,
    step: Callable[[str, int], Action],
    row: Callable[[Task, int, Sequence[float]], Measurement],
) -> Iterator[Event]:
    end, cost, before = time.perf_counter() + seconds, 0.0, sizes[0]
    for i, size in enumerate(sizes):
        left, cost = transport.gather((end - time.perf_counter(), cost))[0]  # one clock decides for all
        if i > 0 and left <= cost * (size / before) * (WARM_UP + LEAST):
            yield Event(task, None, len(sizes) - i)
            return
        least_later = sum(cost * (later / before) * (WARM_UP + LEAST) for later in sizes[i + 1 :])
        share = (left - least_later if least_later < left else left) / (len(sizes) - i)
        try:
            work = prepare(transport, task, size, step)
        except MemoryError:
            hint = "use a smaller --max-size or batch size"
            raise ConfigError(f"out of memory for {task}, size {size}; {hint}") from None
        timing = measure(transport, task, work, share, left)
        cost, before = timing.cost, size
        yield Event(task, row(task, size, timing.times))


def crowding(transport: Transport) -> str:
    """Return a warning if ranks share cores, as their times then include waiting for a core; otherwise ""."""
    places = transport.gather((transport.host, os.cpu_count() or 1))
    for host, n_cores in places:
        n_ranks = sum(other == host for other, _ in places)
        if n_ranks > n_cores:
            return f"{n_ranks} ranks on {n_cores} cores"
    return ""
