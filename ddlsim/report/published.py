"""The published training run nearest to a simulated run, from ``published.toml`` in the same folder."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddlsim.plain import read_toml
from ddlsim.readable import percent, rate
from ddlsim.strategies import contract

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: maximum ratio of the numbers of parameters of comparable models
MOST_RATIO = 2.0
#: formatters of the values that differ
_WORDS = {"device": "on {}", "GPUs": "{:,} GPUs", "precision": "{}", "tokens": "{:,} tokens", "stack": "under {}"}
#: values of "recomputation"
_WITH, _WITHOUT = "with full recomputation", "without full recomputation"
#: unit of figures that are shares of the peak, and unit of the others
MFU, TOKENS = "MFU", "tokens/s per GPU"


class Row(NamedTuple):
    """A published run; `parameters` in 10^9, `sequence` in tokens per sample, `stack` a name of a software stack."""

    model: str
    parameters: float
    device: str
    gpus: int
    precision: str
    sequence: int
    layout: str
    figure: float
    unit: str
    stack: str
    source: str


class Comparison(NamedTuple):
    """A published run, the simulated value of its figure, and the values of the simulated run that differ from it."""

    row: Row
    simulated: float
    differences: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {**self.row._asdict(), "simulated": self.simulated, "differences": self.differences}

    def __str__(self) -> str:
        row = self.row
        figure = percent(row.figure) + " MFU" if row.unit == MFU else rate(row.figure, row.unit)
        here = percent(self.simulated) if row.unit == MFU else rate(self.simulated, "").rstrip()
        differs = ", ".join(_WORDS.get(name, "{}").format(value) for name, value in self.differences.items())
        differs = differs.replace("GPUs", "chips") if row.device.startswith("tpu") else differs
        if differs:
            first = next(iter(self.differences))
            differs = f" {differs}" if first in ("device", "stack", "recomputation") else f" with {differs}"
        return (
            f"{figure}: {row.model} on {row.gpus:,} {row.device}, {row.precision}, {row.sequence:,} tokens, "
            f"{row.layout} ({row.source}); simulated: {here}{differs}"
        )


def nearest(result: Result) -> Comparison | None:
    """Return the nearest published run of a transformer of at most twice or half the size on the same kind of device.

    None if there is none, and for experts. The distance is a weighted sum of log ratios; that of GPUs counts a quarter.
    """
    workload, tokens = result.workloads[0], result.workloads[0].model.tokens
    device = workload.device
    kinds = {"heads" if layer.heads else layer.type for layer in workload.model.layers}
    if device is None or tokens is None or "heads" not in kinds or "mixture_of_experts" in kinds:
        return None
    here: dict[str, Any] = {"device": device.name, "GPUs": result.n_workers, "precision": workload.precision}
    here |= {"tokens": tokens} | ({} if workload.known else {"stack": workload.stack.name})
    if not workload.known:
        recomputed = contract.of(result.experiment.strategy).recomputes_layers()
        here["recomputation"] = _WITH if recomputed else _WITHOUT
    candidates: list[tuple[float, Comparison]] = []
    for row in _rows():
        ratio = abs(math.log2(workload.model.n_params / 1e9 / row.parameters))
        speed = result.mfu if row.unit == MFU else tokens * result.throughput / result.n_workers
        if _kind(row.device) != _kind(device.name) or ratio > math.log2(MOST_RATIO) or speed is None:
            continue
        there = {"device": row.device, "GPUs": row.gpus, "precision": row.precision, "tokens": row.sequence}
        there |= {"stack": row.stack, "recomputation": _WITH if ", recomputed" in row.layout else _WITHOUT}
        differs = {name: value for name, value in here.items() if value != there[name]}
        apart = ratio + 0.5 * len(differs.keys() & {"device", "precision", "stack"})
        apart += 0.25 * (abs(math.log2(tokens / row.sequence)) + abs(math.log2(result.n_workers / row.gpus)))
        candidates.append((apart, Comparison(row, speed, differs)))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _kind(device: str) -> str:
    """Return the name of a device without its memory: "a100" of "a100-80g"."""
    return re.sub(r"-\d+g(-.*)?$", "", device)


@cache
def _rows() -> tuple[Row, ...]:
    tables: dict[str, Any] = read_toml(Path(__file__).with_suffix(".toml"))
    return tuple(
        Row._make([*row, table.get("unit", TOKENS), table["stack"], table["source"]])
        for table in tables.values()
        for row in table["rows"]
    )
