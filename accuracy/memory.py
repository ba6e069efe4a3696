"""Memory of a GPU: GPT by Megatron-LM (parts that the paper computes), AmoebaNet-D and U-Net measured by torchgpipe.

Nothing is calibrated. GPT: the transformer layers of the first stage, as in the paper's figures. torchgpipe: what
PyTorch's allocator reserves for two steps, tensor by tensor (:mod:`accuracy.allocator`), as its benchmarks read it:
weights, gradients and optimizer, activations of one micro-batch at a time, as all others are computed again, what
enters a stage of the whole batch, and blocks that nothing else can use. Workspaces of cuDNN are not in the prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accuracy.allocator import Training
from accuracy.rows import Row, show
from accuracy.torchgpipe import first_layers
from ddlsim import load_model
from ddlsim.workload.memory import Holding, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.roles import blocks

__all__ = ["megatron", "rows", "torchgpipe"]

DATA = Path(__file__).with_name("data") / "memory.yaml"
GIB = 2.0**30
P40_NBYTES = 22919 * 2**20  # with ECC, as nvidia-smi shows it
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


def reserved(name: str, batch: int, micro_batches: int, modules: Sequence[int]) -> float:
    """Return the bytes that the allocators of all GPUs have reserved at most in two steps, together."""
    model, cuts, at = load_model(name), [0], 0
    for n in modules[:-1]:
        at += n
        cuts.append(at - 5 if name.startswith("unet") else first_layers(name)[at])  # five modules remember what skips
    states = {"momentum": 1, "sgd": 0}[OPTIMIZERS[name.split("-")[0]]]
    return sum(
        Training(
            model, *span, batch // micro_batches, micro_batches, again=bool(modules), states=states, capacity=P40_NBYTES
        ).reserved_nbytes()
        for span in itertools.pairwise([*cuts, len(model.layers)])
    )


def torchgpipe() -> list[Row]:
    """Return torchgpipe's figures: "activations" are what is reserved beside weights, gradients and optimizer."""
    table, found = yaml.safe_load(DATA.read_text(encoding="utf-8"))["torchgpipe"], []
    for name, batch, micro_batches, modules, what, measured in table["rows"]:
        predicted = state = memory_of(load_model(name), 0, holding=Holding(OPTIMIZERS[name.split("-")[0]])).total
        if what != "state":
            predicted = reserved(name, batch, micro_batches, modules) - (state if what == "activations" else 0.0)
        gpus = f"{len(modules)} GPUs" if len(modules) > 1 else "1 GPU"
        how = "whole batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        found.append(Row(name, f"{what}, {gpus}, {how}", measured, predicted / GIB, "GiB", False))
    return found


def rows() -> list[Row]:
    """Return all figures beside their predictions."""
    return [*torchgpipe(), *megatron()]


if __name__ == "__main__":
    show(rows())
