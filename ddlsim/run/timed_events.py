"""Events at known times in training runs that are longer than the simulated steps; each event happens once.

A run of some steps represents a long training, which is assumed to repeat its undisturbed steps. For every set of
concurrent events, a few steps are simulated during which they all last. An event that begins or ends in the middle of a
step outside the simulated ones counts proportionally. Faults and slow-downs that are over in fewer steps are simulated
as they happen (:mod:`ddlsim.run.short_faults`), because workers may absorb a part of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats
from ddlsim.cluster.machines import memory_nodes
from ddlsim.errors import ConfigError, NoUpdateError
from ddlsim.reliability.faults import at_known_times, horizon_of, phases, sampled
from ddlsim.reliability.timeline import STEADY, Pace
from ddlsim.run.experiment import Experiment
from ddlsim.run.short_faults import Progress, ShortFault, progress
from ddlsim.runtime.feed import Mix
from ddlsim.strategies import contract
from ddlsim.workload.input import Input

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome

#: time limit of steps during events, relative to undisturbed steps
STANDS_STILL = 300.0
#: number of simulated environments beyond which events of the same kind are treated as equal, wherever they occur
MANY = 64
#: maximum number of sampled random faults; after them, the mean pace so far continues
MOST_FAULTS = 10_000
#: number of epochs after which caches are treated as being in the steady state
MOST_EPOCHS = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """A change from `start` to `end` (s): `what`, in the `field` of an experiment, without its start and end."""

    start: float
    end: float
    field: str
    what: object

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
        return tuple(sorted(each.alike for each in self.active))


def events_of(experiment: Experiment, faults: Iterable[Any]) -> list[Event]:
    """Return the events that slow down an experiment with these faults for a limited time, each at full strength."""
    fields = {"slowdowns": experiment.slowdowns, "faults": at_known_times(faults), "background": experiment.background}
    return [
        Event(start, end, field, what)
        for field in fields
        for each in fields[field]
        for start, end, what in phases(each)
    ]


class Paces:
    """The progress of an experiment's training on the clock."""

    def __init__(self, experiment: Experiment, cluster: Cluster, nodes: Sequence[int]) -> None:
        self._experiment, self._cluster, self._nodes = experiment, cluster, nodes
        always = [each for each in experiment.background if not phases(each)]
        #: the experiment without failures and temporary events, in complete cycles of steps, which a lifetime repeats
        self.steady = experiment.with_(
            failures=None, elastic=None, checkpoints=None, slowdowns=(), faults=(), background=always
        )
        whole = contract.of(experiment.strategy).whole_cycles(*experiment.window)
        self.is_whole = experiment.training is not None or whole[1] == experiment.window[1]
        if not self.is_whole:
            self.steady = self.steady.with_(warmup=whole[0], steps=whole[1])
        self._longest = math.inf
        self._simulated: dict[object, tuple[float, Floats]] = {}

    @property
    def is_steady(self) -> bool:
        """Whether there are no events at known times."""
        experiment = self._experiment
        return not (experiment.slowdowns or experiment.faults or any(map(phases, experiment.background)))

    def of(self, result: Outcome | None, undisturbed: Outcome, length: float, index: int = 0) -> Pace:
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
        known: dict[object, Progress] = {}
        for span in spans:
            rate, computing = self._rates(span.active)
            if rate and span.alike in short:
                if span.alike not in known:
                    known[span.alike] = self._progress(span.active, short[span.alike])
                times, done, disturbed = known[span.alike].between(span.offset, span.offset + span.end - span.begin)
                clock += (span.begin + (times - span.offset)).tolist()
                work += (work[-1] + rate * done).tolist()
                calm = times - span.offset - disturbed
                busy += list(busy[-1] + np.outer(disturbed, known[span.alike].computing) + np.outer(calm, computing))
            elif span is not spans[-1]:
                work.append(work[-1] + rate * (span.end - span.begin))
                busy.append(busy[-1] + computing * (span.end - span.begin))
                clock.append(span.end)
        if until < length:  # as until then
            rate, computing = work[-1] / clock[-1], busy[-1] / clock[-1]
        beginning = [np.array(each[:1] + each) for each in (clock, work, busy)]
        return Pace(beginning[0], beginning[1], rate, beginning[2], computing)

    def _spans(
        self, events: Sequence[Event], since: float, until: float
    ) -> tuple[list[Span], dict[object, list[ShortFault]]]:
        """Return the times between `since` and `until` (s) in which the same long events last, and the short faults in
        environments that are alike, by the time that these have lasted."""
        few_steps = self._environment(())[0] * sum(self.steady.window)
        lasting = [each for each in events if not each.is_shorter(few_steps)]
        to_come, active = sorted(lasting, key=lambda each: each.start, reverse=True), list[Event]()
        spans, lasted, begin = list[Span](), defaultdict[object, float](float), since
        for edge in [*sorted({edge for each in lasting for edge in (each.start, each.end) if edge < until}), until]:
            if edge > begin or edge == until:
                span = Span(begin, max(edge, begin), tuple(active))
                spans.append(span._replace(offset=lasted[span.alike]))
                lasted[span.alike] += span.end - begin
                begin = span.end
            while to_come and to_come[-1].start <= edge:
                active.append(to_come.pop())
            active = [each for each in active if each.end > edge]
        begins, short = [span.begin for span in spans], defaultdict[object, list[ShortFault]](list)
        for each in sorted(events, key=lambda each: each.start) if len(lasting) < len(events) else ():
            for span in spans[max(bisect.bisect_right(begins, each.start) - 1, 0) :]:
                start, end = max(each.start, span.begin), min(each.end, span.end)
                if span.begin >= each.end:
                    break
                if start < end and each.is_shorter(few_steps):
                    first = span.offset + (start - span.begin)
                    short[span.alike].append(ShortFault(first, first + (end - start), each.field, each.what))
        return spans, dict(short)

    def _progress(self, active: Sequence[Event], faults: Sequence[ShortFault]) -> Progress:
        """Return the progress of the training with short faults while other events last."""
        from ddlsim.run.simulate import clock_of, run

        experiment, strategy = self.steady, contract.of(self.steady.strategy)

        def simulate(faults: Sequence[ShortFault], steps: int, until: float) -> Outcome:
            happens: list[Event | ShortFault] = [*active, *faults]
            changes = {**self._with(happens), "max_time": until}
            try:
                return run(clock_of(experiment).with_(**changes, steps=steps, warmup=0))
            except ConfigError:
                if experiment.training is None:
                    raise
            # when workers communicate depends on the training
            return run(self._up_to(strategy.updates(steps, len(self._nodes))).with_(**changes))

        step_time, n_steps = self._environment(active)[0], sum(experiment.window)
        n_updates = strategy.updates(n_steps, len(self._nodes))
        return progress(faults, simulate, step_time, n_steps, strategy.cycle_length, n_updates)

    def _with(self, events: Iterable[Event | ShortFault]) -> dict[str, Any]:
        """Return the fields of the experiment with these events in addition to what is always there."""
        fields = ("slowdowns", "faults", "background")
        return {
            field: (*getattr(self.steady, field), *(each.what for each in events if each.field == field))
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
        from ddlsim.run.simulate import run  # circular: it imports results, and these failure timelines

        exact = tuple(sorted(each.name for each in active))
        alike = tuple(sorted(each.alike for each in active))
        known = self._simulated
        if exact in known or (len(known) > MANY and alike in known):
            return known.get(exact) or known[alike]
        experiment = self._up_to(sum(self.steady.window))
        try:
            result = run(experiment.with_(**self._with(active), max_time=self._longest))
            if not active:
                self._longest = STANDS_STILL * result.simulated_time
            times = result.step_time, _computing(result)
        except NoUpdateError:
            times = math.inf, np.zeros(len(self._nodes))
        known.setdefault(alike, times)
        known[exact] = times
        return times


def _computing(result: Outcome) -> Floats:
    """Return the share of the run's time for which each worker computed."""
    return result.device_seconds["compute"] / result.simulated_time


def with_epochs(result: Outcome, ends: Floats) -> tuple[Floats, int]:
    """Return the ends (s) of steps, including epochs in which caches fill, and how many of the last steps repeat."""
    from ddlsim.run.simulate import run

    experiment, cycle = result.experiment, len(result.measured_updates) - 1
    source = experiment.input
    if not isinstance(source, Input) or source.epoch is None or source.n_samples is None:
        return ends, cycle
    n_machines = len(set(memory_nodes(result.cluster, result.nodes.tolist())))
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
            times = np.diff([time for time, _ in run(other).measured_updates])
            ends = np.concatenate([ends, ends[-1] + np.cumsum(np.resize(times, steps))])
        if not fills:
            return ends, cycle
        epoch += 1
