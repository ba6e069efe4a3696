"""Reader for Horovod timelines (``HOROVOD_TIMELINE=file``).

Format: https://horovod.readthedocs.io/en/stable/timeline_include.html and ``horovod/common/timeline.cc``: a Chrome
trace in which every tensor is a process. Fused tensors share one transfer, with equal begin and end, and become one
:class:`Timing` with all bytes. The truncated list of a killed job is also read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.imports.chrome import Event, read_events
from ddlsim.imports.text import EntryError, LeftOut, SourceText, read_text
from ddlsim.imports.timing import Timing

_OPERATIONS = {"ALLREDUCE": "all_reduce", "ADASUM": "all_reduce", "ALLGATHER": "all_gather", "BROADCAST": "broadcast"}
_OPERATIONS |= {"ALLTOALL": "all_to_all", "REDUCESCATTER": "reduce_scatter"}
_TRANSFER = re.compile(r"(?:NCCL|MPI|GLOO|CCL|DDL|MLSL)_(\w+)")
_WIDTHS = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "uint16": 2}
_WIDTHS |= {"int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True)
class HorovodOperation:
    """One collective on one tensor.

    start_s        start of the processing, in s since the timeline's start
    negotiation_s  time in s from the first rank that was ready to the last
    seconds        total processing time in s: waiting, fusion buffer, transfer
    transfer_s     time of the transfer alone in s (NCCL_ALLREDUCE and the like); 0: not in the timeline
    nbytes, dtype  0 and "" if the end of the operation is missing or has no shape
    """

    tensor: str
    operation: str
    start_s: float
    negotiation_s: float
    seconds: float
    transfer_s: float
    transfer_start_s: float
    nbytes: float
    dtype: str
    place: str


@dataclass(frozen=True)
class HorovodTimeline:
    """Contents of a Horovod timeline.

    operations   all operations, in chronological order
    collectives  durations of the collectives; a collective over fused tensors is counted once
    n_ranks      number of ranks
    """

    operations: tuple[HorovodOperation, ...]
    collectives: tuple[Timing, ...]
    n_ranks: int


@dataclass
class _Open:
    """Unfinished activities of a tensor."""

    stack: list[Event] = field(default_factory=list)
    negotiation_s: float = 0.0
    transfer: tuple[float, float] = (0.0, 0.0)  # begin, seconds


@checked
def read_horovod(path: str | Path) -> HorovodTimeline:
    """Read a Horovod timeline.

    Unfinished operations are skipped. Invalid events (an end without a start, an end before its start, or a time that
    is not a number) are also skipped, and a warning says how many.

    Raises ConfigError, giving the file, event and reason, if no valid operation remains.
    """
    source, left_out = read_text(path), LeftOut()
    _, events = read_events(source, left_out)
    names: dict[str, str] = {}
    open_: dict[str, _Open] = defaultdict(_Open)
    ranks: set[str] = set()
    operations: list[HorovodOperation] = []
    for event in events:
        state = open_[event.pid]
        if event.phase == "M" and event.name == "process_name":
            names[event.pid] = str(event.args.get("name", ""))
        elif event.phase == "B":
            state.stack.append(event)
        elif event.phase == "X" and state.stack and state.stack[-1].name.startswith("NEGOTIATE_"):
            ranks.add(event.name)
        elif event.phase == "E":
            with left_out:
                operation = _end(source, names.get(event.pid, ""), state, event)
                operations += [operation] if operation is not None else []
    left_out.tell(operations, source, "no finished ALLREDUCE, ALLGATHER or BROADCAST found; is it a Horovod timeline?")
    operations.sort(key=lambda operation: operation.start_s)
    return HorovodTimeline(tuple(operations), tuple(_transfers(operations, len(ranks))), len(ranks))


def _end(source: SourceText, tensor: str, state: _Open, event: Event) -> HorovodOperation | None:
    place = f"{source.path}: traceEvents[{event.index}]"
    if not state.stack:
        what = f"an operation on tensor {tensor!r} ends without having begun"
        raise EntryError(f"{place}: {what}; is the file truncated?")
    begin = state.stack.pop()
    seconds = event.ts - begin.ts
    if not seconds >= 0:
        raise EntryError(f"{place}: {begin.name} has an end time that is missing or earlier than its start; correct ts")
    if begin.name.startswith("NEGOTIATE_"):
        state.negotiation_s = seconds
    elif _TRANSFER.fullmatch(begin.name):
        state.transfer = (begin.ts, seconds)
    elif begin.name in _OPERATIONS and not state.stack:
        dtype, nbytes = _size(event)
        times = begin.ts, state.negotiation_s, seconds, state.transfer[1], state.transfer[0]
        state.negotiation_s, state.transfer = 0.0, (0.0, 0.0)
        place = f"{source.path}: traceEvents[{begin.index}]"
        return HorovodOperation(tensor, _OPERATIONS[begin.name], *times, nbytes, dtype, place)
    return None


def _size(event: Event) -> tuple[str, float]:
    dtype, shape = str(event.args.get("dtype", "")), str(event.args.get("shape", ""))
    sizes = [word.strip() for word in shape.strip("[] ").split(",")] if shape.strip("[] ") else []
    if dtype not in _WIDTHS or shape[:1] != "[" or not all(re.fullmatch("[0-9]{1,12}", size) for size in sizes):
        return dtype, 0.0
    return dtype, float(math.prod(int(size) for size in sizes[:8])) * _WIDTHS[dtype]


def _transfers(operations: list[HorovodOperation], n_ranks: int) -> list[Timing]:
    """Return one timing per transfer; bytes are 0 if the size of one of its tensors is unknown."""
    fused: dict[tuple[str, float, float], list[HorovodOperation]] = defaultdict(list)
    for operation in operations:
        if operation.transfer_s > 0:
            fused[operation.operation, operation.transfer_start_s, operation.transfer_s].append(operation)
    timings = []
    for (kind, _, seconds), parts in sorted(fused.items(), key=lambda item: item[0][1]):
        nbytes = sum(part.nbytes for part in parts) if all(part.nbytes for part in parts) else 0.0
        variant = f"{len(parts)} tensors fused" if len(parts) > 1 else parts[0].tensor
        timing = Timing("horovod", kind, n_ranks, nbytes, seconds, "single", n_reps=1, place=parts[0].place)
        timings.append(replace(timing, dtype=parts[0].dtype, variant=variant))
    return timings
