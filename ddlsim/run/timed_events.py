"""Events at known times in training runs that are longer than the simulated steps; each event happens once.

A run of some steps represents a long training, which is assumed to repeat its undisturbed steps. docs/failures.md,
Faults at known times, explains how long events and those that are over within a few steps are simulated. The latter are
compared with a run without them, in which the time between two faults is shortened by a whole number of cycles of
steps. This leaves the phases of the steps unchanged; the steps left out count as undisturbed.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats
from ddlsim.errors import ConfigError, NoUpdateError
from ddlsim.reliability.engine import STEADY, GrowingPace, Pace
from ddlsim.reliability.faults import at_known_times, horizon_of, phases, sampled
from ddlsim.run.experiment import Experiment
from ddlsim.runtime.feed import Mix
from ddlsim.strategies import contract
from ddlsim.workload.input import Input

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: time limit of steps during events, relative to undisturbed steps
STANDS_STILL = 300.0
#: number of simulated environments beyond which events of the same kind are treated as equal, wherever they occur
MAX_DISTINCT = 64
#: maximum number of sampled random faults; after them, the mean pace so far continues
MOST_FAULTS = 10_000
#: steps with faults that are simulated at first if not all of these fit, and at most
FIRST_STEPS, MOST_STEPS = 256, 4096
#: standard error of the mean pace with which the simulation of further faults ends
PRECISION = 0.002
#: parts of such a simulation, from whose differences its standard error is estimated
N_PARTS = 16
#: number of epochs after which caches are treated as being in the steady state
MOST_EPOCHS = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """A change from `start` to `end` (s): `what`, in the `field` of an experiment, from 0 s on and without an end."""

    start: float
    end: float
    field: str
    what: Any

    @functools.cached_property
    def name(self) -> str:
        """Complete description, used as a key."""
        return repr(self.what)

    @property
    def alike(self) -> tuple[str, float, float]:
        """Properties shared with equal events elsewhere."""
        what = self.what
        return type(what).__name__, getattr(what, "factor", 0.0), getattr(what, "reroute", 0.0)

    def is_shorter(self, seconds: float) -> bool:
        """Whether it is a fault or slow-down that is over sooner."""
        is_fault = self.field != "background" and dataclasses.is_dataclass(self.what)
        return is_fault and self.end - self.start < seconds

    def at(self, start: float) -> Event:
        """Return the event with another start in s; its `what` then contains the start and the duration."""
        length = self.end - self.start
        what = dataclasses.replace(self.what, start=start, duration=length)
        return Event(start, start + length, self.field, what)


class Span(NamedTuple):
    """The time from `begin` to `end` (s), in which the same long events are `active`.

    offset  s that environments alike have lasted before
    """

    begin: float
    end: float
    active: tuple[Event, ...]
    offset: float = 0.0

    @property
    def alike(self) -> tuple[object, ...]:
        """What it has in common with environments that are alike."""
        return tuple(sorted(event.alike for event in self.active))


def events_of(experiment: Experiment, faults: Iterable[Any]) -> list[Event]:
    """Return the events that slow down an experiment with these faults for a limited time, each at full strength."""
    fields = {"slowdowns": experiment.slowdowns, "faults": at_known_times(faults), "background": experiment.background}
    return [
        Event(start, end, field, what)
        for field in fields
        for event in fields[field]
        for start, end, what in phases(event)
    ]


#: clock, work and seconds of computing; short faults, and progress with them, in environments that are alike
Points = tuple[list[float], list[float], list[Floats]]
Short = dict[object, list[Event]]
Known = dict[object, "Progress"]


class Paces:
    """The progress of an experiment's training on the clock."""

    def __init__(self, experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
        self._experiment, self._cluster, self._nodes = experiment, cluster, nodes
        always = [job for job in experiment.background if not phases(job)]
        #: the experiment without failures and temporary events, in complete cycles of steps, which a lifetime repeats
        self.steady = experiment.with_(
            failures=None, elastic=None, checkpoints=None, slowdowns=(), faults=(), background=always
        )
        window = contract.of(experiment.strategy).whole_cycles(*experiment.window)
        self.is_whole = experiment.training is not None or window[1] == experiment.window[1]
        if not self.is_whole:
            self.steady = self.steady.with_(warmup=window[0], steps=window[1])
        self._longest = math.inf
        self._simulated: dict[object, tuple[float, Floats]] = {}

    @property
    def is_steady(self) -> bool:
        """Whether there are no events at known times."""
        experiment = self._experiment
        return not (experiment.slowdowns or experiment.faults or any(map(phases, experiment.background)))

    def of(self, result: Result | None, undisturbed: Result, length: float, index: int = 0) -> Pace:
        """Return the pace until the end of a lifetime of `length` s, with the random faults of a `failure_timeline`.

        result, undisturbed  the simulated steps with events, if any, and without
        """
        if self.is_steady:
            return STEADY
        experiment = self._experiment
        until = min(length, horizon_of(experiment.faults, self._cluster, MOST_FAULTS))
        random = sampled(experiment.faults, self._cluster, self._nodes, experiment.seed, until, index=index)
        events = events_of(experiment, [*experiment.faults, *random])
        clock, work, busy = [0.0], [0.0], [np.zeros(undisturbed.n_workers)]
        if result is not None:
            ends = zip(result.recorder.updates, undisturbed.recorder.updates, strict=False)
            clock, work = [list(times) for times in zip((0.0, 0.0), *((a, b) for (a, _), (b, _) in ends), strict=True)]
            busy = [time * _computing(result) for time in clock]
        spans, short = self._spans(events, clock[-1], until)
        return GrowingPace(functools.partial(self._pace_up_to, (clock, work, busy), spans, short, until < length, {}))

    def _pace_up_to(
        self, beginning: Points, spans: list[Span], short: Short, goes_on: bool, simulated: Known, limit: float
    ) -> tuple[Pace, bool]:
        """Return the pace at least until `limit` (s), and whether that is all of it.

        beginning  clock, work and computing (s) in the simulated steps
        goes_on    whether the mean pace of the spans continues after them
        simulated  progress with short faults in environments that are alike, as far as it has been simulated
        """
        clock, work, busy = beginning[0].copy(), beginning[1].copy(), beginning[2].copy()
        rate, computing, is_all = 0.0, busy[0], False
        needed = {span.alike: span.offset + min(span.end, limit) - span.begin for span in spans if span.begin <= limit}
        for span in spans:
            if clock[-1] > limit:
                break
            rate, computing = self._rates(span.active)
            end = span.offset + span.end - span.begin
            if rate and span.alike in short:
                if span.alike not in simulated or simulated[span.alike].reach < needed[span.alike]:
                    simulated[span.alike] = self._progress(span.active, short[span.alike], needed[span.alike])
                progress = simulated[span.alike]
                times, done, disturbed = progress.between(span.offset, end)
                clock += (span.begin + (times - span.offset)).tolist()
                work += (work[-1] + rate * done).tolist()
                calm = times - span.offset - disturbed
                busy += list(busy[-1] + np.outer(disturbed, progress.computing) + np.outer(calm, computing))
                if progress.reach < end:
                    break
            elif span is not spans[-1]:
                work.append(work[-1] + rate * (span.end - span.begin))
                busy.append(busy[-1] + computing * (span.end - span.begin))
                clock.append(span.end)
        else:
            is_all = True
            if goes_on:
                rate, computing = work[-1] / clock[-1], busy[-1] / clock[-1]
        points = [np.array(column[:1] + column) for column in (clock, work, busy)]
        return Pace(points[0], points[1], rate, points[2], computing), is_all

    def _spans(self, events: Sequence[Event], since: float, until: float) -> tuple[list[Span], Short]:
        """Return the times between `since` and `until` (s) in which the same long events last, and the short faults in
        environments that are alike, by the time that these have lasted."""
        few_steps = self._environment(())[0] * sum(self.steady.window)
        lasting = [event for event in events if not event.is_shorter(few_steps)]
        to_come, active = sorted(lasting, key=lambda event: event.start, reverse=True), list[Event]()
        spans, lasted, begin = list[Span](), defaultdict[object, float](float), since
        for edge in [*sorted({edge for event in lasting for edge in (event.start, event.end) if edge < until}), until]:
            if edge > begin or edge == until:
                span = Span(begin, max(edge, begin), tuple(active))
                spans.append(span._replace(offset=lasted[span.alike]))
                lasted[span.alike] += span.end - begin
                begin = span.end
            while to_come and to_come[-1].start <= edge:
                active.append(to_come.pop())
            active = [event for event in active if event.end > edge]
        begins, short = [span.begin for span in spans], defaultdict[object, list[Event]](list)
        for event in sorted(events, key=lambda event: event.start) if len(lasting) < len(events) else ():
            for span in spans[max(bisect.bisect_right(begins, event.start) - 1, 0) :]:
                start, end = max(event.start, span.begin), min(event.end, span.end)
                if span.begin >= event.end:
                    break
                if start < end and event.is_shorter(few_steps):
                    first = span.offset + (start - span.begin)
                    short[span.alike].append(Event(first, first + (end - start), event.field, event.what))
        return spans, dict(short)

    def _progress(self, active: Sequence[Event], faults: Sequence[Event], limit: float) -> Progress:
        """Return the progress of the training with short faults at least until `limit` (s), while other events last."""
        from ddlsim.run.simulate import clock_of, complete

        experiment, strategy = self.steady, contract.of(self.steady.strategy)

        def simulate(faults: Sequence[Event], steps: int, until: float) -> Result:
            changes = {**self._with([*active, *faults]), "max_time": until}
            try:
                return complete(clock_of(experiment).with_(**changes, steps=steps, warmup=0))
            except ConfigError:
                if experiment.training is None:
                    raise
            # when workers communicate depends on the training
            return complete(self._up_to(strategy.updates(steps, len(self._nodes))).with_(**changes))

        step_time, n_steps = self._environment(active)[0], sum(experiment.window)
        n_updates = strategy.updates(n_steps, len(self._nodes))
        return progress(faults, simulate, step_time, n_steps, strategy.cycle_length, n_updates, limit)

    def _with(self, events: Iterable[Event]) -> dict[str, Any]:
        """Return the fields of the experiment with these events in addition to what is always there."""
        fields = ("slowdowns", "faults", "background")
        return {
            field: (*getattr(self.steady, field), *(event.what for event in events if event.field == field))
            for field in fields
        }

    def _up_to(self, updates: int) -> Experiment:
        """Return the undisturbed experiment; if it trains, only with its first updates."""
        if self.steady.training is None:
            return self.steady
        ends: dict[str, Any] = {"epochs": None, "target_accuracy": None, "target_loss": None}
        return self.steady.with_(training=dataclasses.replace(self.steady.training, updates=updates, **ends))

    def _rates(self, active: Sequence[Event]) -> tuple[float, Floats]:
        """Return the progress (s of undisturbed work) and each worker's compute time per second with these events."""
        (steady, _), (step_time, computing) = self._environment(()), self._environment(active)
        return steady / step_time, computing

    def _environment(self, active: Sequence[Event]) -> tuple[float, Floats]:
        from ddlsim.run.simulate import complete  # circular: it imports results, and these failure timelines

        exact = tuple(sorted(event.name for event in active))
        alike = tuple(sorted(event.alike for event in active))
        simulated = self._simulated
        if exact in simulated or (len(simulated) > MAX_DISTINCT and alike in simulated):
            return simulated.get(exact) or simulated[alike]
        experiment = self._up_to(sum(self.steady.window))
        try:
            result = complete(experiment.with_(**self._with(active), max_time=self._longest))
            if not active:
                self._longest = STANDS_STILL * result.simulated_time
            times = result.step_time, _computing(result)
        except NoUpdateError:
            times = math.inf, np.zeros(len(self._nodes))
        simulated.setdefault(alike, times)
        simulated[exact] = times
        return times


def _computing(result: Result) -> Floats:
    """Return the share of the run's time for which each worker computed."""
    return result.device_seconds["compute"] / result.simulated_time


def with_epochs(result: Result, ends: Floats) -> tuple[Floats, int]:
    """Return the ends (s) of steps, including epochs in which caches fill, and how many of the last steps repeat."""
    from ddlsim.run.simulate import complete

    experiment, cycle = result.experiment, len(result.measured_updates) - 1
    source = experiment.input
    if not isinstance(source, Input) or source.epoch is None or source.n_samples is None:
        return ends, cycle
    n_machines = len(set(result.cluster.memory_nodes[result.nodes].tolist()))
    decoded = source.decoded_nbytes(result.workloads[0].model.input_shape)
    n_steps, epoch = source.n_samples / result.samples_per_update, source.epoch
    late = vars(Mix(source, decoded, n_machines, 0))
    while True:
        mix = vars(Mix(source, decoded, n_machines, epoch))
        fills = epoch < MOST_EPOCHS and any(abs(mix[name] - late[name]) > 1e-3 for name in ("remote", "peers", "ssd"))
        steps = math.ceil(n_steps * (epoch - source.epoch + 1)) - len(ends) if fills else cycle
        if steps > 0:
            mixed = dataclasses.replace(source, epoch=epoch if fills else None)
            warmup, _ = contract.of(experiment.strategy).whole_cycles(max(experiment.window[0], source.prefetch + 2), 1)
            other = experiment.with_(input=mixed, warmup=warmup)
            times = np.diff([time for time, _ in complete(other).measured_updates])
            ends = np.concatenate([ends, ends[-1] + np.cumsum(np.resize(times, steps))])
        if not fills:
            return ends, cycle
        epoch += 1


# ---------------------------------------------------------------- faults that are over within a few steps


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a training with short faults, piecewise linear.

    time       s, ascending from 0, shape (n,)
    done       s that a training without these faults needs for the same steps, shape (n,)
    last       s at which the last of these faults ends
    computing  share of the time up to then that each worker computes, shape (n_workers,); NaN if `reach` is finite
    reach      s up to which all of this is known
    """

    time: Floats
    done: Floats
    last: float
    computing: Floats
    reach: float = math.inf

    def until(self, time: Floats | float) -> Floats:
        """Return how far a training without these faults is when this one is at `time`; both in s."""
        late = np.maximum(np.asarray(time) - self.time[-1], 0.0)
        return np.asarray(np.interp(time, self.time, self.done) + late)

    def between(self, start: float, end: float) -> tuple[Floats, Floats, Floats]:
        """Return times from after `start` up to the `end` or `reach`, if that is finite, between which progress is
        linear; how far a training without these faults goes from `start` on; and the s up to the last fault. Shape (n,)
        each."""
        end = min(end, self.reach)
        points = self.time[(self.time > start) & (self.time < end)]
        times = np.append(points, end) if math.isfinite(end) else points
        disturbed = np.minimum(times, self.last) - min(start, self.last)
        return times, self.until(times) - self.until(start), disturbed


#: returns the run with some faults for a number of steps, or for a number of s
Simulate = Callable[[Sequence[Event], int, float], "Result"]


def progress(
    faults: Sequence[Event],
    simulate: Simulate,
    step_time: float,
    n_steps: int,
    n_repeated: int,
    n_updates: int,
    limit: float,
) -> Progress:
    """Return the progress of a training with short faults from the end of its first `n_steps` steps on.

    faults      by start
    step_time   s that a step takes without these faults
    n_steps     steps that are simulated between two faults, if there are as many
    n_repeated  steps after which the training without these faults repeats
    n_updates   number of updates in the first steps
    limit       s up to which the progress is needed at least
    """
    few, cycle, last = n_steps * step_time, n_repeated * step_time, max(fault.end for fault in faults)
    shortened = _Shortened(faults, few, cycle)
    n_needed = math.ceil((shortened.end + 2.0 * few) / step_time) + 1
    total = n_needed if n_needed <= MOST_STEPS else FIRST_STEPS
    cut = limit - float(shortened.left_out(limit)) + 2.0 * few if limit < last else math.inf
    while True:
        try:
            steady = simulate((), total, cut)
            ends = np.array([0.0, *(time for time, _ in steady.recorder.updates)])
            begin = float(ends[min(n_updates, len(ends) - 1)])
            shortened = _Shortened(faults, few, cycle, begin)
            until = min(2.0 * ends[-1], cut)
            disturbed = simulate(shortened.before(until), total, until)
        except NoUpdateError:
            if cut == math.inf:
                return Progress(np.array([0.0, last]), np.zeros(2), last, np.zeros(len(steady.workloads)))
            cut *= 2.0
            continue
        times = np.array([0.0, *(time for time, _ in disturbed.recorder.updates)])
        is_cut = "max_time" in (steady.stop_reason, until == cut and disturbed.stop_reason)
        n_common = min(len(times), len(ends)) - is_cut
        is_all, times, ends = times[-1] >= shortened.end, times[:n_common], ends[:n_common]
        time, done = shortened.unshortened(times), ends + shortened.left_out(shortened.unshortened(times))
        if is_cut:
            if n_common > n_updates + 2 and time[-2] - begin >= limit:
                break
            cut *= 2.0
        elif is_all or total >= MOST_STEPS or (n_needed > MOST_STEPS and _standard_error(time, done) <= PRECISION):
            break
        else:
            total = min(4 * total, MOST_STEPS)
    knots = shortened.knots[shortened.knots < time[-1]]
    points = np.unique(np.concatenate([[begin], time[time > begin], knots[knots > begin]]))
    left_out = shortened.left_out(points)
    through = np.interp(points - left_out, times, ends) + left_out
    points, through = points - begin, through - begin
    if is_cut:
        # rounding may take the last point beyond what is known
        return Progress(points[:-1], through[:-1], last, np.full(len(steady.workloads), np.nan), float(points[-2]))
    calmly = steady.device_seconds["compute"] / steady.simulated_time
    calm = left_out[-1] - begin - max(disturbed.simulated_time - shortened.end, 0.0)
    computing = (disturbed.device_seconds["compute"] + calmly * calm) / (disturbed.simulated_time + calm)
    if not is_all:  # as until then
        rest = max(last - points[-1], 0.0)
        through = np.append(through, through[-1] * (1.0 + rest / points[-1]))
        points = np.append(points, points[-1] + rest)
    return Progress(points, through, last, computing)


def _standard_error(time: Floats, done: Floats) -> float:
    """Return the standard error of the mean pace of steps that have ended at a `time`, from the paces of its parts."""
    if len(time) <= N_PARTS:
        return math.inf
    ends = np.linspace(0, len(time) - 1, N_PARTS + 1).astype(np.int64)
    seconds, gone = np.diff(time[ends]), np.diff(done[ends])
    errors = gone - done[-1] / time[-1] * seconds
    return float(np.sqrt(N_PARTS / (N_PARTS - 1) * np.sum(errors**2)) / time[-1])


class _Shortened:
    """Faults, of a training that has begun `begin` s before, between which it is undisturbed for a shorter time.

    end    s, in shortened time, at which the last fault ends
    knots  ascending s, in unshortened time, from and until which cycles are left out
    """

    def __init__(self, faults: Sequence[Event], few: float, cycle: float, begin: float = 0.0) -> None:
        self._faults, self._starts = faults, list[float]()
        at, omitted, self.end = [0.0], [0.0], begin
        for fault in faults:
            gap = begin + fault.start - omitted[-1] - self.end
            if (cycles := math.floor((gap - few) / cycle)) > 0:
                at.append(self.end + few)
                omitted.append(omitted[-1] + cycles * cycle)
            self._starts.append(begin + fault.start - omitted[-1])
            self.end = max(self.end, begin + fault.end - omitted[-1])
        self._at, self._omitted = np.array(at), np.array(omitted)
        #: s that have been left out until each knot
        self._until = np.repeat(self._omitted, 2)[:-1]
        self.knots = np.repeat(self._at, 2)[1:] + self._until

    def before(self, time: float) -> list[Event]:
        """Return the faults that start before a shortened `time`, with shortened times."""
        return [fault.at(start) for fault, start in zip(self._faults, self._starts, strict=True) if start < time]

    def unshortened(self, times: Floats) -> Floats:
        """Return the unshortened times of shortened ones, s."""
        return np.asarray(times + self._omitted[np.searchsorted(self._at, times, "left").clip(1) - 1])

    def left_out(self, time: Floats | float) -> Floats:
        """Return how many s have been left out until an unshortened `time`."""
        return np.asarray(np.interp(time, self.knots, self._until))
