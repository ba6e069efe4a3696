"""Timelines as files in the Chrome Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format" (Google, 2016): complete events ("ph": "X") in microseconds, one process per group
of tracks, one thread per track, named by metadata events.

By default, only the first few steps of some workers are written, which suffice to show a step's structure. Written
times are exact, except that the shortest gaps between transfers on links are merged.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster.cluster import Floats
from ddlsim.output_files import replacing
from ddlsim.printable import shown
from ddlsim.readable import count
from ddlsim.run.result import Result
from ddlsim.runtime.recorder import TRANSFER, Span

#: default limits: first steps, evenly spread workers, and links with the longest busy time
N_STEPS, N_WORKERS, N_LINKS = 4, 32, 16
#: maximum number of busy intervals per link, and of all links if all are written; shortest gaps are merged
N_INTERVALS, N_INTERVALS_IN_ALL = 250, 400_000
WORKERS, NETWORK, LINKS, LEFT_OUT = 1, 2, 3, 4
_GROUPS = {WORKERS: "workers", NETWORK: "transfers and servers", LINKS: "links, the busiest first"}

Event = dict[str, object]


@checked
def save_trace(result: Result, path: str | Path, *, whole: bool = False) -> str:
    """Write the timeline of a result that was recorded with its busy intervals (``result.traced``), compressed if the
    name ends in .gz. Return a description of the omitted parts, or "".

    Without `whole`, the file contains the first 4 steps of at most 32 evenly spread workers, and the 16 busiest links,
    with a note under "otherData" and as a slice in the omitted time. With it, only the shortest gaps of links with many
    thousands of transfers are omitted.
    """
    part = _Part(result, whole)
    left_out = "; ".join(part.left_out)
    other = {"made by": "ddlsim"} | ({"left out": left_out} if left_out else {})
    document = {"traceEvents": part.events(), "displayTimeUnit": "ms", "otherData": other}
    text = json.dumps(document, separators=(",", ":")).encode("utf-8", "backslashreplace")
    with replacing(path) as file:
        file.write(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)
    return left_out


class _Part:
    """The part of a run to write: spans that begin before `end` (s), on some workers and links (`channels`)."""

    def __init__(self, result: Result, whole: bool) -> None:
        self.result, self.whole, busy = result, whole, result.busy
        seconds = np.empty(0) if busy is None else np.asarray(busy.seconds())
        used = [c for c in np.argsort(-seconds, kind="stable").tolist() if seconds[c] > 0.0]
        n_workers = result.n_workers if whole else min(N_WORKERS, result.n_workers)
        self.workers = np.unique(np.linspace(0, result.n_workers - 1, n_workers).astype(np.int64)).tolist()
        self.channels = used if whole else used[:N_LINKS]
        self.busy = busy = None if busy is None else busy.only(self.channels)
        self.n_intervals = n = max(N_INTERVALS, N_INTERVALS_IN_ALL // max(len(used), 1)) if whole else N_INTERVALS
        ends = [] if whole else [steps[N_STEPS - 1] for steps in result.recorder.step_end if len(steps) >= N_STEPS]
        self.end = end = max(ends, default=math.inf)
        n_steps = max(map(len, result.recorder.step_end), default=0)
        self.left_out = []
        if end < result.simulated_time:
            steps = f"steps after the first {N_STEPS}, of {n_steps:,}"
            self.left_out.append(f"anything that begins after {end:.4g} s ({steps})")
        if len(self.workers) < result.n_workers:
            self.left_out.append(count(result.n_workers - len(self.workers), "worker") + f" of {result.n_workers:,}")
        if len(used) > len(self.channels):
            self.left_out.append(count(len(used) - len(self.channels), "link") + f" of {len(used):,}")
        if busy is not None and any((busy.of(channel)[0] < end).sum() > n for channel in self.channels):
            self.left_out.append(f"the shortest gaps between more than {n:,} transfers on a link")

    def events(self) -> list[Event]:
        """Return the events: metadata first, then spans track by track."""
        result, recorder = self.result, self.result.recorder
        others = {f"worker {rank}" for rank in set(range(result.n_workers)).difference(self.workers)}
        spans = [s for s in recorder.spans if s.start < self.end and s.track.removesuffix(" network") not in others]
        worker_tracks = _tracks(span for span in spans if span.kind != TRANSFER)
        background = _lanes(_tracks(span for span in spans if span.kind == TRANSFER))
        groups = [(WORKERS, worker_tracks), (NETWORK, background), (LINKS, self._links())]
        names = dict(_GROUPS)
        if self.left_out:
            names[LEFT_OUT] = "left out" if self.whole else "left out (--trace-whole, whole=True)"
            begin = self.end if self.end < result.simulated_time else 0.0
            note = Span("", "left out", "; ".join(self.left_out), begin, result.simulated_time)
            groups.append((LEFT_OUT, {"": [note]}))
        events: list[Event] = [
            {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": n}} for pid, n in names.items()
        ]
        for pid, tracks in groups:
            for tid, (name, track) in enumerate(tracks.items()):
                place = {"pid": pid, "tid": tid}
                events.append({"ph": "M", "name": "thread_name", "args": {"name": shown(name)}, **place})
                events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": tid}, **place})
                for span in track:
                    name = span.kind if span.kind == span.name else f"{span.kind}: {span.name}"
                    times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
                    events.append({"ph": "X", "name": shown(name), "cat": span.kind, **times, **place})
        return events

    def _links(self) -> dict[str, list[Span]]:
        """Return the busy intervals of the links with the longest busy time."""
        tracks: dict[str, list[Span]] = {}
        if self.busy is None:
            return tracks
        cluster = self.result.cluster
        first = np.unique(cluster.link_channel, return_index=True)[1]
        for channel in self.channels:
            link = first[channel]
            source, target = (cluster.node_names[n] for n in (cluster.link_src[link], cluster.link_dst[link]))
            name = f"{source} -> {target} ({cluster.link_kind[link]})"
            if name in tracks:  # parallel links
                name += f" #{channel}"
            start, end = self.busy.of(channel)
            kept = start < self.end
            begins, ends = _merged(start[kept], end[kept], self.n_intervals) if kept.any() else ([], [])
            tracks[name] = [Span(name, "busy", "busy", s, e) for s, e in zip(begins, ends, strict=True)]
        return tracks


def _tracks(spans: Iterable[Span]) -> dict[str, list[Span]]:
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    order = sorted(tracks, key=lambda name: [int(w) if w.isdigit() else -1 for w in name.split()])
    return {name: sorted(tracks[name], key=lambda s: (s.start, s.end)) for name in order}


def _lanes(tracks: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """Distribute overlapping spans over several tracks, because events of one track must not overlap."""
    spread: dict[str, list[Span]] = {}
    for name, spans in tracks.items():
        lanes: list[list[Span]] = []
        for span in spans:
            lane = next((lane for lane in lanes if lane[-1].end <= span.start), [])
            if not lane:
                lanes.append(lane)
            lane.append(span)
        spread |= {name if i == 0 else f"{name} ({i + 1})": lane for i, lane in enumerate(lanes)}
    return spread


def _merged(start: Floats, end: Floats, n: int) -> tuple[list[float], list[float]]:
    """Merge overlapping intervals (of collectives of known cost, which do not wait for each other), and then others
    across their shortest gaps until at most `n` are left."""
    latest = np.maximum.accumulate(end)
    gaps = start[1:] - latest[:-1]
    cut = np.flatnonzero(gaps >= 0.0)
    if len(cut) >= n:
        cut = np.sort(cut[np.argsort(-gaps[cut], kind="stable")[: n - 1]])
    return start[np.concatenate([[0], cut + 1])].tolist(), latest[np.concatenate([cut, [len(end) - 1]])].tolist()
