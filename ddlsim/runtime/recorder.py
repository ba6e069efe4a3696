"""What happened when: spans of time per worker, updates, staleness. Kept as plain lists, read after the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["COMMUNICATION", "COMPUTE", "TRANSFER", "WAITING", "Recorder", "Span"]

COMPUTE = "compute"
COMMUNICATION = "communication"  # a worker does nothing but wait for bytes
WAITING = "waiting"  # a worker waits for other workers or for a server's queue
TRANSFER = "transfer"  # a collective or message in the background; not part of the worker's time


class Span(NamedTuple):
    """An interval on a track; `start` and `end` in s."""

    track: str
    kind: str
    name: str
    start: float
    end: float


@dataclass
class Recorder:
    """Collects what the result is made of.

    ``seconds[rank][kind]`` adds up each worker's time and ``idle[rank]`` (s) the gaps between what is booked, each
    seen for itself, so that with bookings that overlap the two add up to more than the time of the run; spans are
    kept only if ``keep_spans``. ``updates`` holds (time, samples that went into it); ``step_end[rank]`` the times at
    which a worker's steps ended.
    """

    n_workers: int
    keep_spans: bool = False
    spans: list[Span] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    step_end: list[list[float]] = field(default_factory=list)
    updates: list[tuple[float, int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    #: s up to which each worker's time is booked
    booked: list[float] = field(default_factory=list)
    #: what each worker is in the middle of: (kind, name, start)
    open: dict[int, tuple[str, str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = [{COMPUTE: 0.0, COMMUNICATION: 0.0, WAITING: 0.0} for _ in range(self.n_workers)]
        self.step_end = [[] for _ in range(self.n_workers)]
        self.idle = [0.0] * self.n_workers
        self.booked = [0.0] * self.n_workers

    def begin(self, rank: int, kind: str, name: str, now: float) -> None:
        """A worker starts something; should the run end before it does, :meth:`close` books what was done."""
        self.open[rank] = (kind, name, now)

    def close(self, now: float) -> None:
        """Book what workers are in the middle of when the run ends."""
        for rank, (kind, name, start) in list(self.open.items()):
            self.worker(rank, kind, name, start, now)
        for rank, booked in enumerate(self.booked):
            self.idle[rank] += max(now - booked, 0.0)
            self.booked[rank] = max(now, booked)

    def worker(self, rank: int, kind: str, name: str, start: float, end: float) -> None:
        """Book part of a worker's time."""
        self.open.pop(rank, None)
        if end == start:
            return
        self.seconds[rank][kind] += end - start
        booked = self.booked[rank]
        if start > booked:
            self.idle[rank] += start - booked
        if end > booked:
            self.booked[rank] = end
        if self.keep_spans:
            self.spans.append(Span(f"worker {rank}", kind, name, start, end))

    def background(self, track: str, name: str, start: float, end: float) -> None:
        """Show something that goes on beside a worker's own time."""
        if self.keep_spans and end > start:
            self.spans.append(Span(track, TRANSFER, name, start, end))
