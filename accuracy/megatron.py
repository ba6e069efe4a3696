"""Megatron-LM on A100: step times of GPT with 22 to 1,008 billion parameters.

The kernels of the A100 (:mod:`accuracy.kernels`) are those of Megatron-DeepSpeed on one machine of another cluster.
Table 5 is predicted with them as they are. Weak scaling, another release of the software: its smallest model gives
how fast the devices are (``speed``), and the others are predicted with it.

Stages have as many layers each; without interleaving they wait while they exchange activations (megatron/
p2p_communication.py of 2021: isend and irecv in one batch, then wait).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from scipy.optimize import brentq

from accuracy.rows import Row, show
from ddlsim import Parallel, load_model, simulate
from ddlsim.workload.tensor_parallel import step_flops

__all__ = ["a100_rows", "measured", "read", "speed", "table_5_rows"]

DATA = Path(__file__).with_name("data") / "megatron.yaml"


@functools.cache
def read(series: str) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a series, each a value for every column."""
    table = yaml.safe_load(DATA.read_text(encoding="utf-8"))[series]
    return tuple(dict(zip(table["columns"], row, strict=True)) for row in table["rows"])


def _seconds(row: Mapping[str, Any], speed: float = 1.0) -> float:
    """Return the seconds of a step on Selene."""
    tensor = row.get("tensor", 8)
    strategy = Parallel(
        tensor=tensor, pipeline=row["pipeline"], data=row["gpus"] // (tensor * row["pipeline"]),
        micro_batch=row["micro_batch"], interleave=row["interleave"], sequence=row.get("sequence", False),
        recompute=row.get("recompute", "full"), cut="layers", p2p="exchange",
        overlap="ddp" if row.get("ddp") == "torch" else "none",
    )  # fmt: skip
    cluster = f"selene+n_leaves={8 * -(-row['gpus'] // 160)}"
    return simulate(
        cluster, row["model"], strategy, batch_size=row["batch"], workers=row["gpus"], precision="fp16",
        gradient_dtype="fp16", optimizer="adam", speed=[speed] * row["gpus"], steps=1, warmup=0,
    ).step_time  # fmt: skip


def measured(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step: the FLOPs of the paper's formula, full recomputation included, over the rate."""
    flops = step_flops(load_model(row["model"]), row["batch"], "full")
    return float(flops / (row["gpus"] * row["tflops"] * 1e12))


@functools.cache
def speed() -> float:
    """Return how fast devices must be for the step of the smallest model to be what was measured."""
    row = read("a100")[0]
    found: float = brentq(lambda speed: _seconds(row, speed) / measured(row) - 1.0, 0.3, 3.0, xtol=1e-5)
    return found


def table_5_rows(most: int = 512) -> list[Row]:
    """Return table 5's rows of up to so many GPUs; none is fitted."""
    return [
        Row(row["model"], f"{row['gpus']} GPUs, {row['recompute']}", row["seconds"], _seconds(row), "s", False)
        for row in read("table5")
        if row["gpus"] <= most
    ]


def a100_rows(most: int = 3072) -> list[Row]:
    """Return the weak scaling on A100, up to so many GPUs: the first row calibrates."""
    return [
        Row(row["model"], f"{row['gpus']} GPUs", measured(row), _seconds(row, speed()), "s", i == 0)
        for i, row in enumerate(read("a100"))
        if row["gpus"] <= most
    ]


if __name__ == "__main__":
    show(table_5_rows())
    show(a100_rows())
