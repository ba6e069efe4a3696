"""Timelines as Chrome Trace Event files, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016): complete events ("ph": "X") in microseconds, one process per group
of tracks, one thread per track, named by metadata events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.output_files import write_text
from ddlsim.printable import shown
from ddlsim.run.result import Result
from ddlsim.runtime.recorder import TRANSFER, Span

#: links shown: the busiest ones, with so many intervals each (the shortest gaps are drawn as busy)
N_LINKS = 64
N_INTERVALS = 2000
WORKERS, NETWORK, LINKS = 1, 2, 3
_GROUPS = {WORKERS: "workers", NETWORK: "transfers and servers", LINKS: f"busiest links (at most {N_LINKS})"}

Event = dict[str, object]
Floats = npt.NDArray[np.float64]


@checked
def save_trace(result: Result, path: str | Path) -> None:
    """Write the timeline of a result that was recorded with its busy intervals (``result.traced``)."""
    document = {"traceEvents": trace_events(result), "displayTimeUnit": "ms", "otherData": {"made by": "ddlsim"}}
    write_text(path, json.dumps(document))


@checked
def trace_events(result: Result) -> list[Event]:
    """Return the events: metadata first, then spans track by track."""
    spans = result.recorder.spans
    own = _tracks(span for span in spans if span.kind != TRANSFER)
    background = _lanes(_tracks(span for span in spans if span.kind == TRANSFER))
    events: list[Event] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        for pid, name in _GROUPS.items()
    ]
    for pid, tracks in ((WORKERS, own), (NETWORK, background), (LINKS, _links(result))):
        for tid, (name, track) in enumerate(tracks.items()):
            place = {"pid": pid, "tid": tid}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": shown(name)}, **place})
            events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": tid}, **place})
            events += [_event(span, place) for span in track]
    return events


def _event(span: Span, place: dict[str, int]) -> Event:
    name = span.kind if span.kind == span.name else f"{span.kind}: {span.name}"
    begin = span.start * 1e6
    duration = (span.end - span.start) * 1e6
    return {"ph": "X", "name": shown(name), "cat": span.kind, "ts": begin, "dur": duration, **place}


def _tracks(spans: Iterable[Span]) -> dict[str, list[Span]]:
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    order = sorted(tracks, key=lambda name: [int(w) if w.isdigit() else -1 for w in name.split()])
    return {name: sorted(tracks[name], key=lambda s: (s.start, s.end)) for name in order}


def _lanes(tracks: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """Spread spans that overlap over several tracks, since events of one track must not."""
    spread: dict[str, list[Span]] = {}
    for name, spans in tracks.items():
        lanes: list[list[Span]] = []
        for span in spans:
            lane = next((lane for lane in lanes if lane[-1].end <= span.start), None)
            if lane is None:
                lane = []
                lanes.append(lane)
            lane.append(span)
        spread |= {name if i == 0 else f"{name} ({i + 1})": lane for i, lane in enumerate(lanes)}
    return spread


def _links(result: Result) -> dict[str, list[Span]]:
    """Return busy intervals of the links that carried something for longest."""
    busy, cluster = result.busy, result.cluster
    if busy is None:
        return {}
    total = busy.seconds()
    chosen = [c for c in np.argsort(-total, kind="stable")[:N_LINKS].tolist() if total[c] > 0.0]
    first = np.unique(cluster.link_channel, return_index=True)[1]
    tracks: dict[str, list[Span]] = {}
    for channel in chosen:
        link = first[channel]
        source, target = (cluster.node_names[n] for n in (cluster.link_src[link], cluster.link_dst[link]))
        name = f"{source} -> {target} ({cluster.link_kind[link]})"
        if name in tracks:  # parallel links
            name += f" #{channel}"
        start, end = _merged(*busy.of(channel))
        tracks[name] = [Span(name, "busy", "busy", s, e) for s, e in zip(start, end, strict=True)]
    return tracks


def _merged(start: Floats, end: Floats) -> tuple[list[float], list[float]]:
    """Join intervals that overlap (of collectives of known cost, which do not wait for each other), and others across
    their shortest gaps until at most N_INTERVALS are left."""
    latest = np.maximum.accumulate(end)
    gaps = start[1:] - latest[:-1]
    cut = np.flatnonzero(gaps >= 0.0)
    if len(cut) >= N_INTERVALS:
        cut = np.sort(cut[np.argsort(-gaps[cut], kind="stable")[: N_INTERVALS - 1]])
    return start[np.concatenate([[0], cut + 1])].tolist(), latest[np.concatenate([cut, [len(end) - 1]])].tolist()
