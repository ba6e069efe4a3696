"""Memory of a GPU: GPT by Megatron-LM (parts that the paper computes), AmoebaNet-D and U-Net measured by torchgpipe.

Nothing is calibrated. GPT: the transformer layers of the first stage, as in the paper's figures. torchgpipe: weights,
gradients and optimizer of the whole model; of each stage the activations of one micro-batch, as all others are computed
again, and what enters it of the whole batch. The allocator's own memory and workspaces are not in the prediction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accuracy.rows import Row, show
from accuracy.torchgpipe import first_layers
from ddlsim import load_device, load_model
from ddlsim.plan.chunks import crossing_nbytes, stored_nbytes
from ddlsim.workload.compute import make_workload
from ddlsim.workload.memory import Holding, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.roles import blocks

__all__ = ["megatron", "rows", "torchgpipe"]

DATA = Path(__file__).with_name("data") / "memory.yaml"
GIB = 2.0**30
OPTIMIZERS = {"amoebanet": "momentum", "unet": "sgd"}  # RMSprop keeps a number for each parameter, as momentum does
LESS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence": True}, "selective": {"recompute": "selective"},
    "both": {"sequence": True, "recompute": "selective"}, "full": {"recompute": "full"},
}  # fmt: skip


def first_stage(name: str, pipeline: int) -> Model:
    """Return the transformer layers of a first stage, without the embedding."""
    model = load_model(name)
    ranges = blocks(model.layers)
    return dataclasses.replace(model, layers=model.layers[ranges[0][0] : ranges[len(ranges) // pipeline - 1][1]])


def megatron() -> list[Row]:
    """Return the figures of GPT: GiB, and percentages of the activations with tensor parallelism alone."""
    table, found = yaml.safe_load(DATA.read_text(encoding="utf-8"))["megatron"], []
    for name, tensor, pipeline, micro, chunks, state, activations, less in table["rows"]:
        stage, live = first_stage(name, pipeline), pipeline + (pipeline - 1) / chunks * (chunks > 1)
        holding = Holding("adam", gradient_dtype="fp32", tensor=tensor)
        plain = memory_of(stage, micro, "fp16", holding, batches=live)
        both = memory_of(stage, micro, "fp16", dataclasses.replace(holding, **LESS["both"]), batches=live)
        for what, measured, predicted in (
            ("parameters and optimizer", state, plain.weights + plain.gradients + plain.optimizer),
            ("activations", activations, plain.activations),
            ("activations, sequence parallel, selective recomputation", less, both.activations),
        ):
            found.append(Row(name, what, measured, predicted / GIB, "GiB", False))
    for name, shares in table["of_none"].items():
        layers = first_stage(name, 1)

        @functools.cache
        def kept(how: str, layers: Model = layers) -> float:
            return memory_of(layers, 1, "fp16", Holding(tensor=8, **LESS.get(how, {}))).activations

        for what, measured in zip(table["percentages"], shares, strict=True):
            found.append(Row(name, f"{what} of none", measured, 100.0 * kept(what) / kept("none"), "%", False))
    return found


def activations(name: str, batch: int, micro_batches: int, modules: Sequence[int]) -> float:
    """Return the bytes of activations on all GPUs together."""
    model = load_model(name)
    cuts, at = [0], 0
    for n in modules[:-1]:
        at += n
        cuts.append(at - 5 if name.startswith("unet") else first_layers(name)[at])  # five modules remember what skips
    workload = make_workload(model, load_device("p40"), batch // micro_batches)
    entering = crossing_nbytes(workload)[cuts].sum() * micro_batches
    return float(stored_nbytes(workload).sum() + entering)


def torchgpipe() -> list[Row]:
    """Return torchgpipe's figures."""
    table, found = yaml.safe_load(DATA.read_text(encoding="utf-8"))["torchgpipe"], []
    for name, batch, micro_batches, modules, what, measured in table["rows"]:
        state = memory_of(load_model(name), 0, holding=Holding(OPTIMIZERS[name.split("-")[0]])).total
        held = activations(name, batch, micro_batches, modules)
        predicted = {"state": state, "activations": held, "total": state + held}[what]
        gpus = f"{len(modules)} GPUs" if len(modules) > 1 else "1 GPU"
        how = "whole batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        found.append(Row(name, f"{what}, {gpus}, {how}", measured, predicted / GIB, "GiB", False))
    return found


def rows() -> list[Row]:
    """Return all figures beside their predictions."""
    return [*torchgpipe(), *megatron()]


if __name__ == "__main__":
    show(rows())
