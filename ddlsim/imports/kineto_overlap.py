"""How much slower a GPU computes beside NCCL's kernels, from a PyTorch trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ddlsim.imports.chrome import Event

#: kernels of either sort below which nothing is said
FEWEST = 20
#: share of a kernel that may be on the other side: seconds since 1970 are exact to 0.2 us
EDGE = 0.05


def overlap_slowdown(spans: Sequence[Event]) -> float:
    """Return how many times as long kernels take beside a collective's kernel as alone; NaN if the trace does not say.

    Kernels of the same name and launch (grid, block) are alike; those count that ran both wholly beside a kernel of
    NCCL's and wholly without one: the sum of their seconds beside it over what they would have taken alone, on average.
    With fewer than 20 of either sort there is no number.
    """
    kernels = [event for event in spans if event.category == "kernel" and event.dur > 0]
    beside: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    alone: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    by_device: dict[str, list[Event]] = defaultdict(list)
    for event in kernels:
        by_device[str(event.args.get("device", event.pid))].append(event)
    for own in by_device.values():
        busy = _union([event for event in own if event.name.startswith("nccl")])
        for event in own:
            if event.name.startswith("nccl"):
                continue
            share = _covered(busy, event)
            launch = event.name, str(event.args.get("grid")), str(event.args.get("block"))
            if share <= EDGE * event.dur:
                alone[launch].append(event.dur)
            elif share >= (1.0 - EDGE) * event.dur:
                beside[launch].append(event.dur)
    both = sorted(beside.keys() & alone.keys())
    if min((sum(len(sort[launch]) for launch in both) for sort in (beside, alone)), default=0) < FEWEST:
        return float("nan")
    expected = sum(len(beside[launch]) * float(np.mean(alone[launch])) for launch in both)
    return float(sum(sum(beside[launch]) for launch in both) / expected)


def _union(events: Sequence[Event]) -> npt.NDArray[np.float64]:
    """Return the intervals in which one of the events runs, (n, 2) s, in their order."""
    merged: list[list[float]] = []
    for begin, end in sorted((event.ts, event.end) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, dtype=float).reshape(-1, 2)


def _covered(intervals: npt.NDArray[np.float64], event: Event) -> float:
    """Return how long any of the intervals runs beside an event, s."""
    first, last = np.searchsorted(intervals[:, 1], event.ts, "right"), np.searchsorted(intervals[:, 0], event.end)
    near = intervals[first:last]
    return float((np.minimum(near[:, 1], event.end) - np.maximum(near[:, 0], event.ts)).sum())
