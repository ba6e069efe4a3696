"""Megatron-LM on A100 and H100: step times of GPT with 22 to 1,008 billion parameters, out of the box.

The stack of the A100 is "megatron-2021", whose times are fitted to Megatron-DeepSpeed on one machine of another cluster
(:mod:`accuracy.kernels`); that of the H100 is "megatron-2024". Nothing is fitted to these rows.

Selene: stages have as many layers each; without interleaving they wait while they exchange activations (megatron/
p2p_communication.py of 2021: isend and irecv in one batch, then wait). H100: gradients, weights, exchanges of tensor
groups and of stages travel beside the passes (README.md: --overlap-grad-reduce, --overlap-param-gather,
--tp-comm-overlap); the step between two updates counts, as weights are gathered beside the next one's passes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from accuracy.rows import Omitted, Row, show
from ddlsim import Model, Parallel, load_model, simulate
from ddlsim.workload.roles import blocks

__all__ = ["a100_rows", "h100_rows", "left_out", "read", "table_5_rows"]

DATA = Path(__file__).with_name("data") / "megatron.yaml"
#: GPUs of the largest row on H100 that is simulated
MOST = 2304


@functools.cache
def read(series: str) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a series, each a value for every column."""
    table = yaml.safe_load(DATA.read_text(encoding="utf-8"))[series]
    return tuple(dict(zip(table["columns"], row, strict=True)) for row in table["rows"])


def _a100(row: Mapping[str, Any], stack: str = "megatron-2021") -> float:
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
        stack=stack, optimizer="adam", steps=1, warmup=0,
    ).step_time  # fmt: skip


def _h100(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step on an H100 SuperPOD."""
    model = load_model(row["model"])
    layers = sum(1 for layer in model.layers if layer.heads)
    data = row["gpus"] // (row["tensor"] * row["pipeline"])
    strategy = Parallel(
        tensor=row["tensor"], pipeline=row["pipeline"], data=data,
        micro_batch=1 if row["pipeline"] > 1 else row["batch"] // data,
        interleave=layers // row["pipeline"] if row["pipeline"] > 1 else 1, sequence=row["tensor"] > 1,
        tp_comm_overlap=row["tensor"] > 1, cut="layers", sharded=True, overlap="megatron",
    )  # fmt: skip
    cluster = f"dgx-h100-pod+n_leaves={8 * -(-row['gpus'] // 256)}"
    return simulate(
        cluster, model, strategy, batch_size=row["batch"], workers=row["gpus"], stack="megatron-2024",
        steps=2, warmup=1,
    ).step_time  # fmt: skip


SERIES = {"a100": (_a100, True), "h100": (_h100, False)}


def step_flops(model: Model, batch_size: int, *, again: bool) -> float:
    """Return the FLOPs of a step: 3 times the forward pass, with a fourth of transformer layers that are recomputed.

    For L layers, h features, s tokens and V words: 72 B s L h^2 (1 + s/(6 h) + V/(12 L h)), or, recomputed, 96 B s L
    h^2 (1 + s/(6 h) + V/(16 L h)) (Narayanan et al. 2021, arXiv:2104.04473, equation 3).
    """
    recomputed = [layer.flops for first, end in blocks(model.layers) for layer in model.layers[first:end]]
    return batch_size * (3.0 * model.flops + again * sum(recomputed))


def measured(series: str, row: Mapping[str, Any]) -> float:
    """Return the seconds of a step: the FLOPs of the paper's formula, with or without those computed again."""
    flops = step_flops(load_model(row["model"]), row["batch"], again=SERIES[series][1])
    return float(flops / (row["gpus"] * row["tflops"] * 1e12))


def table_5_rows(most: int = 512) -> list[Row]:
    """Return the rows of table 5 of up to `most` GPUs."""
    return [
        Row(
            row["model"],
            f"{row['gpus']} GPUs, {row['recompute']}",
            row["seconds"],
            _a100(row, "megatron-2021@2022-05"),
            "s",
            False,
            kind="run/parallel/gpus",
        )
        for row in read("table5")
        if row["gpus"] <= most
    ]


def _weak(series: str, most: int) -> list[Row]:
    seconds = SERIES[series][0]
    return [
        Row(
            row["model"],
            f"{row['gpus']} GPUs",
            measured(series, row),
            seconds(row),
            "s",
            False,
            kind="run/parallel/gpus",
        )
        for row in read(series)
        if row["gpus"] <= most
    ]


def a100_rows(most: int = 3072) -> list[Row]:
    """Return the weak scaling on A100 of up to `most` GPUs."""
    return _weak("a100", most)


def h100_rows(most: int = MOST) -> list[Row]:
    """Return the weak scaling on H100 of up to `most` GPUs."""
    return _weak("h100", most)


def left_out() -> list[Omitted]:
    """Return the rows on H100 that are not predicted."""
    return [
        Omitted(row["model"], f"{row['gpus']} GPUs", "simulating two steps takes minutes")
        for row in read("h100")
        if row["gpus"] > MOST
    ]


if __name__ == "__main__":
    show(table_5_rows())
    for rows in (a100_rows(), h100_rows()):
        show(rows)
