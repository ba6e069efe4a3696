"""Reader for PyTorch profiler traces (Kineto): training steps, collectives, times per layer.

Format: output of ``torch.profiler.profile(...).export_chrome_trace`` (PyTorch 1.8 to 2.x,
https://pytorch.org/docs/stable/profiler.html and ``torch/csrc/profiler/util.cpp`` for the collectives' arguments).
Sizes of GPU collectives are in the kernel's arguments or in those of the ``record_param_comms`` with the same
``External id``; on CPUs, in the ``Input Dims`` of spans such as ``gloo:all_reduce``.

A collective's kernel starts when its own rank reaches it, so its time includes waiting for the slowest rank.
:func:`fastest_over_ranks` takes the minimum over the ranks' traces.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError, listed, shown
from ddlsim.imports.chrome import Event, read_events
from ddlsim.imports.json_values import finite
from ddlsim.imports.text import EntryError, LeftOut, SourceText, read_text
from ddlsim.imports.timing import Timing
from ddlsim.workload.compute import Workload

_MODULE = re.compile(r"nn\.Module: (.+)")
_BACKWARD = "autograd::engine::evaluate_function:"


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward time of a leaf module in a trace.

    name        class and number as in PyTorch, such as "Conv2d_3"
    forward_s   forward time in seconds per step (median over all steps)
    backward_s  backward time in seconds per step (median over all steps)
    n_calls     average number of calls per step
    """

    name: str
    forward_s: float
    backward_s: float
    n_calls: float

    @property
    def kind(self) -> str:
        """Class of the module, such as "Conv2d"."""
        return self.name.rpartition("_")[0] or self.name


class _Spans:
    """Spans that do not overlap within a thread, for finding the one at a given time."""

    def __init__(self, spans: Iterable[tuple[Event, str]]) -> None:
        self._threads: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
        for event, name in spans:
            self._threads.setdefault((event.pid, event.tid), []).append((event.ts, event.end, name))
        for rows in self._threads.values():
            rows.sort()

    def at(self, event: Event) -> str | None:
        """Return the name of the span that is open on the event's thread when the event begins."""
        rows = self._threads.get((event.pid, event.tid), [])
        place = bisect.bisect_right(rows, (event.ts, float("inf"), "")) - 1
        return rows[place][2] if place >= 0 and event.ts <= rows[place][1] else None


def layer_times(spans: Sequence[Event], steps: Sequence[tuple[float, float]]) -> list[LayerTime]:
    """Return the leaf modules in order of their first call.

    spans   the complete events of a trace; steps   begin and end of each step in s (none: a single step)
    """
    leaves = sorted(_leaves(spans), key=lambda pair: pair[0].ts)
    if not leaves:
        return []
    forward = _Spans(leaves)
    backward = _backward_calls(spans, forward)
    windows = list(steps) or [(0.0, float("inf"))]
    costs = _kernel_costs(spans, forward, _Spans(backward))
    if costs is None:
        costs = [("f", name, event.ts, event.dur) for event, name in leaves]
        costs += [("b", name, event.ts, event.dur) for event, name in backward]
    costs += [("calls", name, event.ts, 1.0) for event, name in leaves]
    starts = [begin for begin, _ in windows]
    table: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(windows))
    for what, name, moment, amount in costs:
        step = bisect.bisect_right(starts, moment) - 1
        if step >= 0 and moment <= windows[step][1]:
            table[what, name][step] += amount
    times = []
    for name in dict.fromkeys(name for _, name in leaves):
        forward_s, backward_s = (statistics.median(table[way, name]) for way in "fb")
        if n_calls := sum(table["calls", name]):
            times.append(LayerTime(name, forward_s, backward_s, n_calls / len(windows)))
    return times


def input_samples(spans: Sequence[Event]) -> int:
    """Return the number of samples in the input of the first leaf module: the first dimension of its first operation.

    0 if the trace has no shapes (``record_shapes=True`` writes them as ``Input Dims``) or no modules.
    """
    leaves = _Spans(_leaves(spans))
    for event in sorted((e for e in spans if e.category in ("cpu_op", "operator")), key=lambda e: e.ts):
        dims = event.args.get("Input Dims")
        place = 1 if event.name.startswith("aten::embedding") else 0  # the first input is its weight
        if leaves.at(event) is None or not isinstance(dims, list) or len(dims) <= place:
            continue
        shape = dims[place]
        if isinstance(shape, list) and shape and isinstance(shape[0], int) and shape[0] > 0:
            return shape[0]
    return 0


def _leaves(spans: Sequence[Event]) -> list[tuple[Event, str]]:
    """Return the modules that contain no other one of their thread, with their names."""
    threads: dict[tuple[str, str], list[tuple[Event, str]]] = {}
    for event in spans:
        if match := _MODULE.match(event.name):
            threads.setdefault((event.pid, event.tid), []).append((event, match[1]))
    leaves = []
    for rows in threads.values():
        rows.sort(key=lambda pair: (pair[0].ts, -pair[0].dur))
        # the next span lies inside if it also ends before this one (ends are rounded, so beginnings do not suffice)
        leaves += [row for row, after in itertools.pairwise(rows) if after[0].end > row[0].end]
        leaves.append(rows[-1])
    return leaves


def _backward_calls(spans: Sequence[Event], forward: _Spans) -> list[tuple[Event, str]]:
    """Return autograd's calls, each with its module."""
    owner: dict[int, tuple[float, str]] = {}  # sequence number -> start of its last operation, and its module
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
    """Return (pass, module, launch time, seconds) of every kernel; None if the trace has no kernels."""
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


#: layer type in model files -> torch.nn classes, without their dimension
_CLASSES = {
    "conv": "Conv", "dense": "Linear", "batch_norm": "BatchNorm SyncBatchNorm", "layer_norm": "LayerNorm",
    "embedding": "Embedding", "embedding_bag": "EmbeddingBag", "relu": "ReLU", "gelu": "GELU", "tanh": "Tanh",
    "sigmoid": "Sigmoid", "max_pool": "MaxPool", "avg_pool": "AvgPool", "adaptive_avg_pool": "AdaptiveAvgPool",
    "dropout": "Dropout", "flatten": "Flatten",
}  # fmt: skip
_TYPES = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
_LEARNED = ("conv", "dense", "batch_norm", "layer_norm", "embedding", "embedding_bag")


@checked
def profile_workload(workload: Workload, layers: Sequence[LayerTime]) -> Workload:
    """Return a copy of `workload` with the forward and backward times measured in a trace.

    layers   :attr:`~ddlsim.imports.KinetoTrace.layers` of a trace of the same model with the same batch size

    Modules in the trace are matched with layers of the model by class, in the order of their calls. For classes with
    parameters, the trace and the model must have the same number of layers. For other classes, the numbers can differ
    because a module can be called several times. The total time is then divided among the layers in proportion to their
    times in `workload`.

    Operations that are not modules in PyTorch (additions, concatenations, attention) keep their times.

    Raises :class:`ConfigError` if the model and the trace do not match. The message gives the class, and the number of
    its layers in the model and in the trace.
    """
    if not layers:
        raise ConfigError("the trace has no layers; record it with torch.profiler.profile(with_stack=True)")
    by_type: dict[str, list[LayerTime]] = {}
    for layer in layers:
        name = re.sub(r"[123]d$", "", layer.kind)
        if name == "Identity" or name.endswith("Loss"):
            continue  # without a layer in the model
        if name not in _TYPES:
            raise ConfigError(
                f"no layer type corresponds to the class of module {layer.name!r} in the trace; remove the module from "
                f"layers, or use a model with known layer types ({listed(sorted(_TYPES))})"
            )
        by_type.setdefault(_TYPES[name], []).append(layer)
    types = [layer.type for layer in workload.model.layers]
    for kind in _LEARNED:
        n_model, n_trace = types.count(kind), len(by_type.get(kind, []))
        if n_model != n_trace:
            raise ConfigError(
                f"the trace has {n_trace} modules of type {kind!r}, but the model {workload.model.name!r} has "
                f"{n_model}; use the model that was traced"
            )
    forward, backward = workload.forward.copy(), workload.backward.copy()
    for kind, modules in by_type.items():
        places = np.flatnonzero([name == kind for name in types])
        for times, measured in ((forward, [m.forward_s for m in modules]), (backward, [m.backward_s for m in modules])):
            if len(places) == len(modules):
                times[places] = measured
            elif len(places):
                old = times[places]
                share = old / old.sum() if old.sum() > 0 else np.full(len(places), 1 / len(places))
                times[places] = sum(measured) * share
    basis = f"profile of {sum(map(len, by_type.values()))} modules"
    return replace(workload, forward=forward, backward=backward, basis=basis)


#: minimum number of kernels of either sort
FEWEST = 20
#: share of a kernel that may overlap the other sort: seconds since 1970 have a resolution of 0.2 us
EDGE = 0.05


def overlap_slowdown(spans: Sequence[Event]) -> float:
    """Return the factor by which kernels take longer while an NCCL kernel runs; NaN if the trace does not determine it.

    Kernels with the same name and launch configuration (grid, block) are compared if the trace contains some that ran
    entirely during an NCCL kernel and some that ran entirely without one. The factor is the sum of the durations during
    NCCL kernels, divided by the sum of the mean durations without. The result is NaN if there are fewer than 20 kernels
    of either sort.
    """
    kernels = [event for event in spans if event.category == "kernel" and event.dur > 0]
    beside: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    alone: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    by_device: dict[str, list[Event]] = defaultdict(list)
    for event in kernels:
        by_device[str(event.args.get("device", event.pid))].append(event)
    for device_kernels in by_device.values():
        busy = _union([event for event in device_kernels if event.name.startswith("nccl")])
        for event in device_kernels:
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
    """Return the intervals in which at least one of the events runs, in order, (n, 2) s."""
    merged: list[list[float]] = []
    for begin, end in sorted((event.ts, event.end) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, dtype=float).reshape(-1, 2)


def _covered(intervals: npt.NDArray[np.float64], event: Event) -> float:
    """Return the time in s for which any of the intervals overlaps an event."""
    first, last = np.searchsorted(intervals[:, 1], event.ts, "right"), np.searchsorted(intervals[:, 0], event.end)
    near = intervals[first:last]
    return float((np.minimum(near[:, 1], event.end) - np.maximum(near[:, 0], event.ts)).sum())


_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
_KERNEL = re.compile(r"(?:nccl|rccl|msccl)\w*?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AlltoAll)")
_CPU = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
#: operation -> its names, in lower case without underscores
_NAMES = {
    "all_reduce": "allreduce allreducecoalesced",
    "all_gather": "allgather allgatherbase allgatherintotensorcoalesced allgathersingle",
    "reduce_scatter": "reducescatter reducescatterbase reducescattertensorcoalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all": "alltoall alltoallv alltoallbase",
    "gather": "gather",
    "scatter": "scatter",
    "p2p": "send recv sendrecv",
}
_OPERATIONS = {name: operation for operation, names in _NAMES.items() for name in names.split()}
#: (NumPy's name of a type, bytes) -> torch's names
_TYPE_NAMES = {
    ("float32", 4): "float",
    ("float64", 8): "double",
    ("float16", 2): "half, c10::half",
    ("bfloat16", 2): "bfloat16, c10::bfloat16",
    ("int32", 4): "int",
    ("int64", 8): "long, long int",
    ("int16", 2): "short",
    ("uint8", 1): "byte, unsigned char",
    ("int8", 1): "char, signed char",
    ("bool", 1): "bool",
}
_DTYPES = {name: dtype for dtype, names in _TYPE_NAMES.items() for name in names.split(", ")}


@dataclass(frozen=True)
class KinetoTrace:
    """Contents of one rank's PyTorch profiler trace.

    steps        training steps in order; their ``n_samples`` is set only if a batch size was passed to the reader
    collectives  collectives in chronological order; their ``nbytes`` is 0 if the trace does not contain sizes
    layers       leaf modules in order of their first call; empty unless the trace was recorded with ``with_stack=True``
    rank         rank that recorded the trace; 0 if the training was not distributed
    n_ranks      number of ranks; 1 if the training was not distributed
    batch_size   first dimension of the first module's input; 0 unless the trace was recorded with
                 ``record_shapes=True``
    overlap_slowdown   factor by which kernels take longer while a collective runs
                       (:func:`~ddlsim.imports.kineto.overlap_slowdown`); NaN if it cannot be determined from the trace
    """

    steps: tuple[Timing, ...]
    collectives: tuple[Timing, ...]
    layers: tuple[LayerTime, ...]
    rank: int
    n_ranks: int
    batch_size: int = 0
    overlap_slowdown: float = math.nan


@checked
def read_kineto(path: str | Path, *, batch_size: Count | None = None) -> KinetoTrace:
    """Read the training steps, collectives and layer times from a PyTorch profiler trace.

    batch_size   number of samples per rank per step, from which ``n_samples`` of each step is computed

    Events with impossible values, such as a negative duration or size, are skipped, and a warning says how many.

    Raises :class:`ConfigError`, giving the location and the reason, if the trace is invalid, or if it contains neither
    steps nor collectives nor layers.
    """
    source, left_out = read_text(path), LeftOut()
    top, events = read_events(source, left_out)
    rank, n_ranks = _distributed(source, top)
    spans = [event for event in events if event.phase == "X"]
    marks = [event for event in spans if _STEP.match(event.name) and not event.category.startswith("gpu")]
    marks.sort(key=lambda event: event.ts)
    steps: list[Timing] = []
    for event in marks:
        with left_out:
            n, at = float((batch_size or 0) * n_ranks), f"{source.path}: traceEvents[{event.index}]"
            timing = Timing("kineto", "step", n_ranks, 0.0, event.dur, "single", n_reps=1, n_samples=n, place=at)
            steps.append(replace(timing, variant=event.name))
    collectives = tuple(_collectives(source, spans, n_ranks, left_out))
    layers = tuple(layer_times(spans, [(event.ts, event.end) for event in marks]))
    trace = KinetoTrace(tuple(steps), collectives, layers, rank, n_ranks, input_samples(spans), overlap_slowdown(spans))
    nothing = "no ProfilerStep, collective or nn.Module found; is it a trace of a training run?"
    left_out.tell(trace.steps or trace.collectives or trace.layers, source, nothing)
    return trace


def _distributed(source: SourceText, top: dict[str, object]) -> tuple[int, int]:
    info = top.get("distributedInfo")
    if not isinstance(info, dict):
        return 0, 1
    rank, n_ranks = info.get("rank", 0), info.get("world_size", 1)
    if not (isinstance(rank, int) and isinstance(n_ranks, int) and 0 <= rank < n_ranks):
        what = f"rank = {shown(rank)} is not valid for world_size = {shown(n_ranks)}"
        raise source.error(None, f"distributedInfo: {what}")
    return rank, n_ranks


def _collectives(source: SourceText, spans: list[Event], n_ranks: int, left_out: LeftOut) -> list[Timing]:
    described: dict[int, Event] = {}  # External id -> the call with the sizes
    for event in spans:
        external = event.integer("External id")
        if external is not None and "Collective name" in event.args and event.category != "kernel":
            described[external] = event
    timings: list[tuple[float, Timing]] = []
    for event in spans:
        operation, said = _what(event, described)
        if operation is not None and event.dur > 0:
            with left_out:
                timings.append((event.ts, _collective(source, event, operation, said, n_ranks)))
    return [timing for _, timing in sorted(timings, key=lambda pair: pair[0])]


def _what(event: Event, described: dict[int, Event]) -> tuple[str | None, dict[str, object]]:
    """Return the operation of this span (None: not a collective), and the arguments that describe it."""
    args, name = event.args, ""
    if event.category == "kernel" and event.name.startswith(("nccl", "rccl", "msccl")):
        external = event.integer("External id" if "External id" in args else "external id")
        if "Collective name" not in args and external in described:
            args = described[external].args
        match = _KERNEL.match(event.name)
        name = str(args.get("Collective name", match[1] if match else ""))
    elif event.category != "kernel" and not event.category.startswith("gpu"):
        match = _CPU.fullmatch(event.name)
        name = match[1] if match else ""
    return _OPERATIONS.get(name.lower().replace("_", "")), args


def _collective(source: SourceText, event: Event, operation: str, args: dict[str, object], n_ranks: int) -> Timing:
    group, place = args.get("Group size"), f"{source.path}: traceEvents[{event.index}]"
    ranks = group if isinstance(group, int) and group > 0 else n_ranks
    dtype, nbytes = _size(operation, args, ranks, place)
    timing = Timing("kineto", operation, ranks, nbytes, event.dur, "single", n_reps=1, dtype=dtype, place=place)
    return replace(timing, variant=event.name.split("(")[0])


def _size(operation: str, args: dict[str, object], n_ranks: int, place: str) -> tuple[str, float]:
    """Return dtype and bytes of the full buffer; ("", 0) if the trace does not contain them."""
    if "In msg nelems" in args:
        dtype, width = _DTYPES.get(str(args.get("dtype", "")).lower(), ("", 0))
        key = "Out msg nelems" if operation in ("all_gather", "gather") else "In msg nelems"
        return dtype, _elements(args.get(key, 0), f"{place}: {key}") * width
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return "", 0.0
    dtype, nbytes = "", 0.0
    for shape, kind in zip(dims, types, strict=False):
        name, width = _DTYPES.get(str(kind).lower(), ("", 0))
        if isinstance(shape, list) and width and all(isinstance(size, int) for size in shape):
            sizes = [_elements(size, f"{place}: Input Dims") for size in shape]
            dtype, nbytes = dtype or name, nbytes + math.prod(sizes) * width
    return dtype, nbytes * (n_ranks if operation in ("all_gather", "gather") else 1)


def _elements(value: object, place: str) -> float:
    number = finite(value)
    if number is None or number < 0 or number != int(number):
        raise EntryError(f"{place} = {shown(value)} must be a non-negative integer; is the trace damaged?")
    return number


@checked
def fastest_over_ranks(traces: Sequence[KinetoTrace]) -> tuple[Timing, ...]:
    """Merge the traces of several ranks into one that contains the shortest duration of each collective over all ranks.

    The i-th collectives of all traces are treated as the same collective. Raises :class:`ConfigError` if the traces
    differ in the number, operation or size of their collectives.
    """
    if not traces:
        raise ConfigError("fastest_over_ranks: traces is empty; pass one trace per rank")
    rows = [trace.collectives for trace in traces]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        raise ConfigError(
            f"the traces have different numbers of collectives, {counts}; trace the same steps on every rank"
        )
    fastest = []
    for same in zip(*rows, strict=True):
        if len({(timing.operation, timing.nbytes) for timing in same}) > 1:
            raise ConfigError(
                f"{same[0].place} and {same[-1].place} are different collectives; trace the same steps on every rank"
            )
        fastest.append(replace(same[0], seconds=min(timing.seconds for timing in same)))
    return tuple(fastest)
