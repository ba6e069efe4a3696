"""Events of a run: spans of time per worker, updates, staleness. Kept as plain lists, read after the run."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddlsim.network.calendar import NO_PAUSES, earliest_start
from ddlsim.network.state import Bools, Floats, Ints

COMPUTE = "compute"
COMMUNICATION = "communication"  # a worker does nothing but wait for bytes
WAITING = "waiting"  # a worker waits for other workers or for a server's queue
INPUT = "input"  # a worker waits for its next batch of samples
TRANSFER = "transfer"  # a collective or message in the background; not part of the worker's time


class Span(NamedTuple):
    """An interval on a track; `start` and `end` in s."""

    track: str
    kind: str
    name: str
    start: float
    end: float


class Spans(NamedTuple):
    """Spans of the same kind and name on the tracks of workers; `start` and `end` in s, each (n,)."""

    kind: str
    name: str
    ranks: Ints
    start: Floats
    end: Floats

    def spans(self) -> list[Span]:
        """Return the spans of non-zero length, one by one."""
        track = "worker %d network" if self.kind == TRANSFER else "worker %d"
        columns = (self.ranks.tolist(), self.start.tolist(), self.end.tolist())
        return [
            Span(track % rank, self.kind, self.name, start, end)
            for rank, start, end in zip(*columns, strict=True)
            if end > start
        ]


@dataclass
class Recorder:
    """Collects the activities of a run for its result.

    ``seconds[rank][kind]`` is the total time of each worker's activities, and ``idle[rank]`` (s) is the sum of the gaps
    between them; if records overlap, the two add up to more than the duration of the run. Spans are kept only if
    ``keep_spans``; those in ``columns`` are expanded when ``spans`` is read. ``updates`` contains (time, number of
    samples); ``step_end[rank]`` the times at which a worker's steps ended.
    """

    n_workers: int
    keep_spans: bool = False
    #: start of the run, s; after :meth:`close`, all times count from it
    start: float = 0.0
    columns: list[Spans] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    step_end: list[list[float]] = field(default_factory=list)
    updates: list[tuple[float, int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    #: time up to which each worker's activities are recorded, s
    booked: list[float] = field(default_factory=list)
    #: for workers that do not stop for each other: work undone by crashes (s), and each worker's outages
    lost: list[float] = field(default_factory=list)
    down: Sequence[Sequence[tuple[float, float]]] | None = None
    #: worker -> (start, end) of its standstills in s, sorted; its device is idle then, even in the middle of a
    #: computation
    stops: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    #: (n_pauses, 2) s, during which no message starts and a worker without work waits
    pauses: Floats = field(default_factory=lambda: NO_PAUSES)
    #: ranks whose crashes stop a server, and with it all updates
    with_servers: list[int] = field(default_factory=list)
    #: number of workers that must be up: with fewer, the others stop after `lead` more steps; with a lead, those that
    #: never return are not awaited
    needed: int = 0
    lead: int = 0
    #: each worker's current operation: (kind, name, start)
    open: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)
    #: of workers with stops, the latest end (s) of each stop and those before it
    _latest: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = [{COMPUTE: 0.0, COMMUNICATION: 0.0, WAITING: 0.0, INPUT: 0.0} for _ in range(self.n_workers)]
        self.step_end = [[] for _ in range(self.n_workers)]
        self.idle = [0.0] * self.n_workers
        self.booked = [self.start] * self.n_workers
        self.lost = [0.0] * self.n_workers

    @property
    def spans(self) -> list[Span]:
        """All spans, in order."""
        if self.columns:
            added = (span for columns in self.columns for span in columns.spans())
            self._spans = sorted([*added, *self._spans], key=lambda span: span.end)
            self.columns = []
        return self._spans

    def stalled(self, end: float) -> float:
        """Return the seconds from the last update to the `end` of a run, or 0 if an earlier update took as long."""
        times = [0.0, *(time for time, _ in self.updates)]
        gap = end - times[-1]
        return gap if gap > max(np.diff(times), default=math.inf) else 0.0

    def begin(self, rank: int, kind: str, name: str, now: float) -> None:
        """Note that a worker starts an operation; if the run ends first, :meth:`close` books the elapsed part."""
        self.open[rank] = (kind, name, now)

    def close(self, now: float) -> None:
        """Book the workers' unfinished operations at the end of the run."""
        for rank, (kind, name, start) in list(self.open.items()):
            self.worker(rank, kind, name, start, now)
        for rank, booked in enumerate(self.booked):
            self.idle[rank] += max(now - booked, 0.0)
            self.booked[rank] = max(now, booked)
        if self.start:
            self._count_from_start()

    def _count_from_start(self) -> None:
        """Shift all times so that they count from the start of the run."""
        since, self.start = self.start, 0.0
        self.updates = [(time - since, n) for time, n in self.updates]
        self.step_end = [[end - since for end in ends] for ends in self.step_end]
        self.booked = [end - since for end in self.booked]
        self.columns = [spans._replace(start=spans.start - since, end=spans.end - since) for spans in self.columns]
        self._spans = [span._replace(start=span.start - since, end=span.end - since) for span in self._spans]
        if self.down is not None:
            self.down = [[(fall - since, back - since) for fall, back in outages] for outages in self.down]

    def worker(self, rank: int, kind: str, name: str, start: float, end: float) -> None:
        """Record part of a worker's time."""
        self.open.pop(rank, None)
        if not len(self.pauses) and rank not in self.stops:
            self._book(rank, kind, name, start, end)
            return
        cut = self.parts(kind, np.array([rank]), np.array([start]), np.array([end]))
        by_time = sorted((begin, over, of) for of, _, *ends in cut for begin, over in np.transpose(ends).tolist())
        for begin, over, of in by_time:
            self._book(rank, of, name, begin, over)

    def _book(self, rank: int, kind: str, name: str, start: float, end: float) -> None:
        if end == start:
            return
        self.seconds[rank][kind] += end - start
        booked = self.booked[rank]
        if start > booked:
            self.idle[rank] += start - booked
        if end > booked:
            self.booked[rank] = end
        if self.keep_spans:
            self._spans.append(Span(f"worker {rank}", kind, name, start, end))

    def keep(self, spans: Spans) -> None:
        """Keep spans of workers for timelines."""
        for kind, place, start, end in self.parts(spans.kind, spans.ranks, spans.start, spans.end):
            self.columns.append(Spans(kind, spans.name, spans.ranks[place], start, end))

    def parts(self, kind: str, ranks: Ints, start: Floats, end: Floats) -> list[tuple[str, Ints, Floats, Floats]]:
        """Split spans of workers, each (n,), at pauses and standstills: for some pieces, their kind, and the index of
        the span, the start and the end of each."""
        place = np.arange(len(ranks))
        if kind == COMMUNICATION and len(self.pauses):
            place, start, end, waits = pieces(self.pauses, start, end)
            return [(of, place[mask], start[mask], end[mask]) for of, mask in ((kind, ~waits), (WAITING, waits))]
        if kind != COMPUTE:
            return [(kind, place, start, end)]
        parts, left = list[tuple[str, Ints, Floats, Floats]](), start.copy()
        if len(self.pauses):
            left = np.minimum([earliest_start(self.pauses, begin) for begin in start.tolist()], end)
            parts.append((WAITING, place, start, left.copy()))
        for rank in np.unique(ranks).tolist() if self.stops else ():
            on_rank = ranks == rank
            for stop, endless in self._stops_between(rank, left[on_rank].min(), end[on_rank].max()):
                cut = place[on_rank & (left < endless) & (end > stop)]
                parts.append((kind, cut, left[cut], np.maximum(left[cut], stop)))
                left[cut] = np.minimum(endless, end[cut])
        return [*parts, (kind, place, left, end)]

    def _stops_between(self, rank: int, start: float, end: float) -> list[tuple[float, float]]:
        """Return at least the stops of a worker that overlap the time from `start` to `end`, by start."""
        stops = self.stops.get(rank, [])
        if rank not in self._latest:
            self._latest[rank] = list(itertools.accumulate((until for _, until in stops), max))
        return stops[bisect.bisect_right(self._latest[rank], start) : bisect.bisect_left(stops, (end,))]

    def background(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span of a background activity from `start` to `end`, on a track of its own."""
        start = earliest_start(self.pauses, start)
        if self.keep_spans and end > start:
            self._spans.append(Span(track, TRANSFER, name, start, end))


def pieces(pauses: Floats, start: Floats, end: Floats) -> tuple[Ints, Floats, Floats, Bools]:
    """Cut spans, each (n,) s, where pauses begin and end: (the span's number, start, end, whether it is in a pause) of
    each piece, by time."""
    edges = np.concatenate([[-np.inf], pauses.ravel(), [np.inf]])[:, None]
    first, last = np.maximum(start, edges[:-1]), np.minimum(end, edges[1:])
    window, span = np.nonzero(last > first)
    return span, first[window, span], last[window, span], window % 2 == 1
