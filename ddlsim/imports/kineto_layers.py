"""Times per layer from a PyTorch profiler trace that was taken with ``with_stack=True``.

Forward: the spans ``nn.Module: Conv2d_0`` that contain no other module. Backward: autograd numbers its nodes as the
forward pass creates them; the call ``autograd::engine::evaluate_function: ConvolutionBackward0`` with sequence number n
belongs to the module in which the last forward operation with that number ran.

With GPU kernels in the trace the times are those of the kernels launched inside these spans (``correlation`` joins
launch and kernel); without, those of the spans on the CPU. Kernels of collectives and the accumulation of gradients
belong to no layer. Work between modules (functions called in a container's forward) belongs to none either.
"""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddlsim.imports.chrome import Event

_MODULE = re.compile(r"nn\.Module: (.+)")
_BACKWARD = "autograd::engine::evaluate_function:"


@dataclass(frozen=True)
class LayerTime:
    """A leaf module: seconds per step (median over the steps) of its forward and backward pass.

    name      class and number as torch prints them, "Conv2d_3"
    n_calls   calls in a step, on average
    """

    name: str
    forward_s: float
    backward_s: float
    n_calls: float

    @property
    def kind(self) -> str:
        """The module's class, "Conv2d"."""
        return self.name.rpartition("_")[0] or self.name


class _Spans:
    """Spans that do not overlap within a thread: which one contains a moment?"""

    def __init__(self, spans: Iterable[tuple[Event, str]]) -> None:
        self._threads: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
        for event, name in spans:
            self._threads.setdefault((event.pid, event.tid), []).append((event.ts, event.end, name))
        for rows in self._threads.values():
            rows.sort()

    def at(self, event: Event) -> str | None:
        """Return the name of the span of the event's thread that is open when the event begins."""
        rows = self._threads.get((event.pid, event.tid), [])
        place = bisect.bisect_right(rows, (event.ts, float("inf"), "")) - 1
        return rows[place][2] if place >= 0 and event.ts <= rows[place][1] else None


def layer_times(spans: Sequence[Event], steps: Sequence[tuple[float, float]]) -> list[LayerTime]:
    """Return the leaf modules in order of their first call.

    spans   the complete events of a trace; steps   begin and end of each step, s (none: all is one step)
    """
    modules = [(event, match[1]) for event in spans if (match := _MODULE.match(event.name))]
    leaves = sorted(_leaves(modules), key=lambda pair: pair[0].ts)
    if not leaves:
        return []
    forward = _Spans(leaves)
    backward = _backward_calls(spans, forward)
    windows = list(steps) or [(0.0, float("inf"))]
    costs = _kernel_costs(spans, forward, _Spans(backward))
    if costs is None:
        costs = [("f", name, event.ts, event.dur) for event, name in leaves]
        costs += [("b", name, event.ts, event.dur) for event, name in backward]
    names = list(dict.fromkeys(name for _, name in leaves))
    starts = [begin for begin, _ in windows]
    table: dict[tuple[str, str], list[float]] = {(way, name): [0.0] * len(windows) for way in "fb" for name in names}
    calls = dict.fromkeys(names, 0)
    for way, name, moment, seconds in costs:
        step = bisect.bisect_right(starts, moment) - 1
        if step >= 0 and moment <= windows[step][1]:
            table[way, name][step] += seconds
    for event, name in leaves:
        step = bisect.bisect_right(starts, event.ts) - 1
        calls[name] += step >= 0 and event.ts <= windows[step][1]
    middle = {key: statistics.median(seconds) for key, seconds in table.items()}
    return [
        LayerTime(name, middle["f", name], middle["b", name], calls[name] / len(windows))
        for name in names
        if calls[name]
    ]


def input_samples(spans: Sequence[Event]) -> int:
    """Return how many samples the first leaf module gets, the first dimension of its first operation's input.

    0 where the trace has no shapes (``record_shapes=True`` writes them as ``Input Dims``), or no modules.
    """
    modules = [(event, match[1]) for event in spans if (match := _MODULE.match(event.name))]
    leaves = _Spans(_leaves(modules))
    for event in sorted((e for e in spans if e.category in ("cpu_op", "operator")), key=lambda e: e.ts):
        dims = event.args.get("Input Dims")
        place = 1 if event.name.startswith("aten::embedding") else 0  # its weight comes first
        if leaves.at(event) is None or not isinstance(dims, list) or len(dims) <= place:
            continue
        shape = dims[place]
        if isinstance(shape, list) and shape and isinstance(shape[0], int) and shape[0] > 0:
            return shape[0]
    return 0


def _leaves(modules: list[tuple[Event, str]]) -> list[tuple[Event, str]]:
    """Return the spans that contain no other one of their thread."""
    threads: dict[tuple[str, str], list[tuple[Event, str]]] = {}
    for event, name in modules:
        threads.setdefault((event.pid, event.tid), []).append((event, name))
    found = []
    for rows in threads.values():
        rows.sort(key=lambda pair: (pair[0].ts, -pair[0].dur))
        # the next one to begin lies inside if it also ends before (their ends are rounded: beginning alone says little)
        found += [row for row, after in itertools.pairwise(rows) if after[0].end > row[0].end]
        found.append(rows[-1])
    return found


def _backward_calls(spans: Sequence[Event], forward: _Spans) -> list[tuple[Event, str]]:
    """Return autograd's calls with the module that each belongs to."""
    owner: dict[int, tuple[float, str]] = {}  # sequence number -> the last operation with it, and its module
    calls = []
    for event in spans:
        number = event.integer("Sequence number")
        if number is None or event.category not in ("cpu_op", "operator"):
            continue
        if event.name.startswith(_BACKWARD):
            calls.append((event, number))
        elif not event.integer("Fwd thread id") and (name := forward.at(event)) is not None:
            owner[number] = max(owner.get(number, (0.0, "")), (event.ts, name))
    return [(event, owner[number][1]) for event, number in calls if number in owner]


def _kernel_costs(
    spans: Sequence[Event], forward: _Spans, backward: _Spans
) -> list[tuple[str, str, float, float]] | None:
    """Return (pass, module, moment of the launch, seconds) of every kernel; None where the trace has no kernels."""
    kernels = [event for event in spans if event.category in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not any(event.category == "kernel" for event in kernels):
        return None
    launches: dict[int, Event] = {}
    for event in spans:
        if event.category in ("cuda_runtime", "cuda_driver", "runtime") and (key := event.integer("correlation")):
            launches[key] = event
    costs = []
    for kernel in kernels:
        launch = launches.get(kernel.integer("correlation") or 0)
        if launch is None or kernel.name.startswith("nccl"):
            continue
        for way, calls in (("b", backward), ("f", forward)):
            name = calls.at(launch)
            if name is not None:
                costs.append((way, name, launch.ts, kernel.dur))
                break
    return costs
