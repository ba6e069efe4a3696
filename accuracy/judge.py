"""Judge predictions of a file of published runs: out of the box, nothing calibrated.

    python -m accuracy.judge FILE [--json OUT]

FILE has the columns of one of the five files of published runs: Megatron-Bridge, torchtitan, fms-fsdp, MaxText
(``.csv``), or large runs (``.yaml``). Every row is simulated on the catalogue's device, the bundled cluster and the
named stack. Rows that cannot be run are listed with the reason, and what is simulated differently from what a row says
is printed behind its figures. ``OUT`` is ``{"rows": [{"published", "predicted",
"unit", "reason"}, ...]}`` in the order of the file.

What a row leaves open is chosen by the same rules for all rows: the layout is data-parallel over the remaining ranks,
and where memory would not suffice, transformer layers are recomputed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ddlsim import (
    FSDP,
    ConfigError,
    DdlsimError,
    Device,
    Model,
    Parallel,
    Result,
    Stack,
    device_names,
    load_cluster,
    load_device,
    load_model,
    load_stack,
    simulate,
)
from ddlsim.errors import listed, nearest, shown
from ddlsim.output_files import check_place, write_text
from ddlsim.plain import csv_rows, decoded, read_bytes
from ddlsim.workload.model_names import bundled_names

__all__ = ["Judged", "Row", "judge", "main", "read", "summary"]


class Row(dict[str, Any]):
    """Values of a row by column, and notes on what is simulated differently."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.notes: list[str] = []


TOKENS = "tokens/s per GPU"


class Judged(NamedTuple):
    """A published figure (NaN: none), its prediction, and why there is none; the same of the peak memory, in GiB."""

    what: str
    published: float
    predicted: float | None
    unit: str
    reason: str = ""
    memory: float | None = None
    predicted_memory: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Relative error; None without a prediction or a published figure."""
        return None if self.predicted is None or math.isnan(self.published) else self.predicted / self.published - 1.0


class UnsupportedError(Exception):
    """A row needs something that is not simulated."""


def read(path: Path) -> tuple[str, list[Row]]:
    """Return the kind of a file, told by its columns, and its rows.

    Raises ConfigError for a file that cannot be read and for other columns.
    """
    missing = "no such file; give a file of published runs"
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        found = _large_rows(path, decoded(read_bytes(path, missing), str(path)))
        check_columns(path, "large", [name for row in found if "malformed" not in row for name in row])
        return "large", found
    lines = csv_rows(path, missing)
    columns = [name.lower().replace(" ", "_") for name in lines[0][1]] if lines else []
    if repeated := {name for name in columns if name and columns.count(name) > 1}:
        raise ConfigError(f"{path}: column {min(repeated)!r} occurs twice; remove one")
    # one that lacks a column is that of which it has most
    hits = {kind: len(set(columns) & set(each.columns)) for kind, each in FAMILIES.items() if each.figure in columns}
    kind = max(hits, key=lambda each: hits[each], default="")
    if not hits.get(kind):
        known = "; ".join(f"{name}: {', '.join(each.columns)} and {each.figure}" for name, each in FAMILIES.items())
        raise ConfigError(f"{path}: has the columns of none of the known files; known: {known}")
    check_columns(path, kind, columns)
    end = columns.index(FAMILIES[kind].figure)
    rows = [cells for _, cells in lines[1:]]
    for cells in rows:
        if end < len(cells) < len(columns):  # empty values after the figure may be left out
            cells += [""] * (len(columns) - len(cells))
    return kind, [_row(columns, cells) for cells in rows]


class _Loader(yaml.SafeLoader):
    """Rejects repeated keys, of which the last would otherwise replace the others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise yaml.MarkedYAMLError(problem=f"the key {min(repeated)!r} occurs twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _large_rows(path: Path, text: str) -> list[Row]:
    try:
        table = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    rows = table.get("rows") if isinstance(table, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: must be a table with a list of rows, each with {', '.join(LARGE)}")
    return [_large_row(row) for row in rows]


def _large_row(row: object) -> Row:
    """Return the values of a row by column; a malformed row says what is wrong instead."""
    if isinstance(row, dict):
        return _row([str(key) for key in row], list(row.values()))
    if not isinstance(row, list):
        return Row({"malformed": f"must be a list of {len(LARGE)} values, not {shown(row)}"})
    return _row(LARGE, row)


def _row(columns: Sequence[str], cells: Sequence[object]) -> Row:
    values = {name: _value(cell) for name, cell in zip(columns, cells, strict=False) if name}
    if len(cells) < len(columns) or any(_value(cell) != "" for cell in cells[len(columns) :]):
        values["malformed"] = f"has {len(cells)} values; the columns are {', '.join(columns)}"
    return Row(values)


def _value(cell: object) -> Any:
    """Return a cell as a number, if it is one ("1,024"); "" if the value is missing."""
    if cell is None or str(cell).lower() in ("-", "n/a", "na"):
        return ""
    if not isinstance(cell, str | float):
        return cell
    try:
        number = float(re.sub(r"(?<=\d),(?=\d{3}\b)", "", str(cell)))
    except ValueError:
        return str(cell).strip()
    return int(number) if number.is_integer() else number


# ---------------------------------------------------------------- what rows have in common


def _plain(text: object) -> str:
    """Return a name without case, spaces, hyphens, dots and parentheses."""
    return re.sub(r"[\s_.()-]", "", str(text)).lower()


def _text(row: Row, name: str) -> str:
    if row.get(name, "") == "":
        raise UnsupportedError(f"{name} is missing")
    return str(row[name])


def _size(row: Row, name: str) -> int:
    """Return the size of a kind of parallelism: 1 where the row has none."""
    return _count(row, name) if row.get(name) else 1


def _count(row: Row, name: str) -> int:
    value = row.get(name, "")
    if type(value) is not int or value < 1:
        problem = "is missing" if value == "" else f"= {shown(value)}: must be a positive integer"
        raise UnsupportedError(f"{name} {problem}")
    return value


def _is_set(row: Row, name: str) -> bool:
    """Return a column of flags: 0 or 1, or a word for it."""
    value = str(row.get(name, "")).lower()
    if value not in (*YES, *NO):
        raise UnsupportedError(f"{name} = {shown(row[name])}: must be 0 or 1")
    return value in YES


YES, NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off", "none", "-")


def _word(row: Row, name: str, known: Mapping[str, Any]) -> Any:
    """Return what a word stands for, spelled in any way; of a longer one ("fp8-rowwise"), what it begins with."""
    words = {_plain(each): value for each, value in known.items()}
    value = row.get(name, "")
    if _plain(value) not in words:
        begin = max((each for each in known if each and _plain(value).startswith(_plain(each))), key=len, default="")
        if begin:
            row.notes.append(f"{name} = {shown(value)}: simulated as {begin}")
            return known[begin]
        near = nearest(str(value), known)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(filter(None, known))}"
        raise UnsupportedError(f"{name} = {shown(value)}: not known; {hint}")
    return words[_plain(value)]


def _replicas(row: Row, per_replica: int) -> int:
    """Return the number of replicas of a layout."""
    gpus = _count(row, "gpus")
    if gpus % per_replica:
        raise UnsupportedError(f"gpus = {gpus}: must be a multiple of tensor x pipeline = {per_replica}")
    return gpus // per_replica


def _shard(row: Row, data: int, default: int) -> int:
    """Return the size of the sharding group."""
    shard = _count(row, "fsdp") if row.get("fsdp") else default
    if shard and data % shard:
        raise UnsupportedError(f"fsdp = {shard}: must divide gpus / (tensor x pipeline) = {data}")
    return shard


def _check(row: Row) -> None:
    """Raise UnsupportedError for what no strategy simulates."""
    if str(row.get("routing", "")).lower() not in NO or _size(row, "expert") > 1:
        raise UnsupportedError("experts: these models are not simulated yet")
    if _size(row, "context") > 1:
        raise UnsupportedError("context parallelism is not simulated yet")


#: columns with the precision of matrix products -> those of ddlsim; None: the stack's
PRECISIONS = {
    "": None, "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "tf32", "fp8": "fp8",
    "float8": "fp8", "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-current": "fp8", "fp8-delayed": "fp8", "mxfp8": "mxfp8",
    "fp8-mx": "mxfp8", "nvfp4": "nvfp4", "fp4": "nvfp4",
}  # fmt: skip
#: names of published models -> bundled ones that are spelled in another way
MODELS = {"mtnlg": "megatron-530b", "mtnlg530b": "megatron-530b", "bloom": "bloom-176b"}


def _model(row: Row) -> str:
    """Return the bundled model that a row names, whatever its spelling ("Llama 3.1 405B"), with the row's sequences."""
    name = _text(row, "model").rpartition("/")[2]
    plain = _plain(name).removeprefix("meta")
    model = MODELS.get(plain) or next((each for each in bundled_names() if _plain(each) == plain), name)
    _no_experts(load_model(model))
    return f"{model}+seq={_count(row, 'sequence')}" if "sequence" in row else model


def _no_experts(model: Model) -> None:
    if any(layer.type == "mixture_of_experts" for layer in model.layers):
        raise UnsupportedError("experts: these models are not simulated yet")


def _device(row: Row, name: str = "system") -> str:
    """Return the catalogue's device that a column names as public sources do ("NVIDIA H100 80GB HBM3", "DGX GB200").

    Raises UnsupportedError for others, and where the name says another size of memory.
    """
    given = _text(row, name)
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=\d) ?gi?b\b", "g", given.lower()).replace("lite", "e")))
    words |= {word.replace("pod", "") for word in words}
    known = {each: set(each.split("-")) - {"tpu", "rtx"} for each in device_names()}
    found = max((each for each in known if known[each] <= words), key=lambda each: len(known[each]), default=None)
    if found is None and "a100" in words:
        found = "a100-80g"  # of the files
    if found is None:
        near = nearest(given, known)
        raise UnsupportedError(
            f"{name} = {shown(given)}: no such device in the catalogue"
            + (f"; did you mean {near!r}?" if near else f"; known: {listed(known)}")
        )
    memory = next((int(word[:-1]) * 1e9 for word in words if re.fullmatch(r"\d{2,3}g", word)), 0.0)
    if memory and abs(memory / load_device(found).memory_nbytes - 1.0) > 0.1:
        raise UnsupportedError(f"{name} = {shown(given)}: the catalogue's {found} has another size of memory")
    return found


def _on_cluster(cluster: str, device: str) -> dict[str, str]:
    """Return the option that replaces a cluster's device by another one."""
    loaded = load_cluster(cluster)
    return {} if str(loaded.device_of[loaded.workers[0]]) == device else {"device": device}


#: stacks and devices that replace those of the catalogue, by name: what :func:`accuracy.stacks.fitted` varies
REPLACED: dict[str, Stack | Device] = {}


def _run(
    row: Row, cluster: str, model: str | Model, strategy: Any, batch: int, gpus: int, stack: str, **options: Any
) -> Result:
    device = options.pop("device", None)
    if REPLACED and device is None:
        loaded = load_cluster(cluster)
        device = loaded.device_of[loaded.workers[0]]
    result = simulate(
        cluster, model, strategy, batch_size=batch, workers=gpus, stack=REPLACED.get(stack, stack), optimizer="adam",
        device=REPLACED.get(str(device), device), steps=2, warmup=1, **options,
    )  # fmt: skip
    row.notes[:] = [note for note in row.notes if not note.startswith(MEMORY)]
    if result.memory is not None and not result.memory.fits:
        needed, capacity = (nbytes / 1e9 for nbytes in (result.memory.needed, result.memory.capacity))
        row.notes.append(f"{MEMORY} {needed:.1f} of {capacity:.1f} GB")
    return result


#: beginning of the note that a run does not fit
MEMORY = "memory does not suffice:"


def _fitting(run: Callable[[str], Result]) -> float:
    """Return samples/s with as many recomputed transformer layers as memory needs (--recompute-num-layers): between the
    runs in which none and all of them recompute, by the share of the bytes that must go."""
    none = run("none")
    if none.memory is None or none.memory.fits:
        return none.throughput
    full = run("full")
    if full.memory is None or not full.memory.fits:
        return full.throughput
    excess = none.memory.needed - none.memory.capacity
    share = excess / (none.memory.needed - full.memory.needed)
    return 1.0 / ((1.0 - share) / none.throughput + share / full.throughput)


def _tokens(result: Result, row: Row) -> float:
    return result.throughput * _count(row, "sequence") / result.n_workers


def _gib(result: Result) -> float | None:
    """Return the peak memory that the allocator reserves."""
    return None if result.memory is None else (result.memory.needed + result.memory.reserved) / 2**30


# ---------------------------------------------------------------- the files


def _bridge(row: Row) -> tuple[float, float | None]:
    """Megatron-Bridge: Megatron Core on DGX machines and NVL72 racks."""
    _check(row)
    gpus, tensor, pipeline = _count(row, "gpus"), _size(row, "tensor"), _size(row, "pipeline")
    micro_batch, batch = _count(row, "micro_batch"), _count(row, "global_batch")
    data, precision, model = _replicas(row, tensor * pipeline), _word(row, "precision", PRECISIONS), _model(row)
    cluster, options = _nvidia(row, "system", gpus)
    shard = _shard(row, data, 0)
    if shard and tensor * pipeline > 1 and (pipeline > 1 or shard != data):
        raise UnsupportedError(f"fsdp = {shard}: in layouts, FSDP is only simulated if tensor x fsdp = gpus")

    chunks, release = _chunks(row, "virtual", pipeline), row.get("release", "")
    if release != "" and not (isinstance(release, float) and RELEASES[0] <= release <= RELEASES[1]):
        row.notes.append(f"release = {shown(release)}: simulated as {load_stack('megatron').release}")

    def simulated(strategy: Any) -> Result:
        return _run(row, cluster, model, strategy, batch, gpus, "megatron", precision=precision, **options)

    def run(recompute: str) -> Result:
        if shard and tensor == 1:
            return simulated(FSDP(micro_batch=micro_batch, shard=shard if shard < gpus else None, recompute=recompute))
        layout = _megatron(micro_batch, gpus, tensor, pipeline, chunks, recompute)
        if shard:
            layout = replace(layout, sharded="full", overlap="ddp")
        return _split(row, simulated, layout)

    return _fitting(run) * _count(row, "sequence") / gpus, None


#: first and last release that stack megatron describes; they differ only in launches, which large models hide
RELEASES = (25.03, 26.02)


def _chunks(row: Row, name: str, pipeline: int) -> int:
    """Return the number of chunks per stage: 1 without a pipeline."""
    chunks = _size(row, name)
    if pipeline > 1:
        return chunks
    if chunks > 1:
        row.notes.append(f"{name} = {chunks}: has no effect without a pipeline")
    return 1


def _megatron(micro_batch: int, gpus: int, tensor: int, pipeline: int, chunks: int, recompute: str) -> Parallel:
    """Return a layout as Megatron Core runs it: distributed optimizer, everything overlapped."""
    return Parallel(
        tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), micro_batch=micro_batch,
        interleave=chunks, sequence=tensor > 1, tp_comm_overlap=tensor > 1,
        cut="layers" if pipeline > 1 else "balanced", sharded=True, overlap="megatron", recompute=recompute,  # type: ignore[arg-type]
    )  # fmt: skip


def _split(row: Row, run: Callable[[Parallel], Result], strategy: Parallel) -> Result:
    """Return a run of a layout; stages with unequal numbers of layers, or without chunks, where others do not work."""
    changes: tuple[dict[str, Any], ...] = ({}, {"cut": "balanced"}, {"cut": "balanced", "interleave": 1})
    for change in changes[: 3 if strategy.interleave > 1 else 2]:
        try:
            result = run(replace(strategy, **change))
        except ConfigError as error:
            refused = error
        else:
            if "interleave" in change:
                note = f"simulated with one chunk per stage: the model cannot be cut into {strategy.interleave}"
                row.notes += [] if note in row.notes else [note]
            return result
    raise refused


def _nvidia(row: Row, column: str, gpus: int) -> tuple[str, dict[str, str]]:
    """Return the cluster of NVIDIA's systems: racks of 72 GPUs, or machines of 8 in units; with options of the run."""
    device = _device(row, column)
    if device in ("gb200", "gb300"):
        racks = -(-gpus // 72)
        return f"{device}-nvl72+n_hosts={racks}" + (f"+n_gpus={gpus // racks}" if gpus % racks == 0 else ""), {}
    own = {"h100": "h100", "b200": "b200", "b300": "b300", "a100-40g": "a100", "a100-80g": "a100"}
    alike = {"h800": "h100", "h200": "h100", "h20": "h100", "h100-96g-500w": "h100"}
    if device not in own and device not in alike:
        raise UnsupportedError(f"{column} = {shown(row[column])}: no bundled DGX or NVL72 cluster with {device}")
    if device == "h800":
        row.notes.append("simulated with the links of dgx-h100-pod")
    cluster = f"dgx-{(own | alike)[device]}-pod"
    # Megatron's groups of ranks are in the same places in each unit
    unit = 160 if cluster == "dgx-a100-pod" else 256
    options = _on_cluster(cluster, device)
    return cluster + (f"+n_leaves={8 * -(-gpus // unit)}" if gpus > unit else ""), options


#: devices -> clusters of cloud machines with 8 of them; others with an all-to-all NVLink run on roce-h100
TORCHTITAN = {"h100-96g-500w": "hgx-h100-96g", "a100-80g": "roce-a100-80g", "a100-40g": "roce-a100-40g"}
OTHER_LINKS = ("h800", "b200", "b300", "mi300x", "mi355x")
EIGHT = ("h100", "h200", "h20", *OTHER_LINKS, *TORCHTITAN)


def _cloud(row: Row, gpus: int) -> tuple[str, str]:
    """Return the cluster and the device of cloud machines with 8 GPUs, or of NVL72 racks."""
    device = _device(row)
    if device in ("gb200", "gb300"):
        return _nvidia(row, "system", gpus)[0], device
    if device not in EIGHT:
        raise UnsupportedError(f"system = {shown(row['system'])}: no bundled cluster of cloud machines with 8 {device}")
    if device in OTHER_LINKS:
        row.notes.append("simulated with the links of roce-h100")
    return f"{TORCHTITAN.get(device, 'roce-h100')}+n_hosts={-(-gpus // 8)}", device


#: recomputation: of FSDP, and of layouts with tensor or pipeline parallelism
RECOMPUTE = {
    "none": ("none", "none"), "selective": ("operators", "operators"), "full": ("early-stop", "early-stop"),
    "": ("none", "none"), "selective layer": ("early-stop", "operators"), "op": ("operators", "operators"),
}  # fmt: skip
#: schedules of pipelines -> order and number of chunks per stage
PIPELINES = {
    "": ("1f1b", 1), "1f1b": ("1f1b", 1), "interleaved-1f1b": ("1f1b", 2), "gpipe": ("gpipe", 1), "zbv": ("zb-v", 1),
    "zbv-zero-bubble": ("zb-v", 1),
}  # fmt: skip


def _torchtitan(row: Row) -> tuple[float, float | None]:
    """torchtitan: FSDP2, with tensor and pipeline parallelism on the larger models."""
    _check(row)
    gpus, tensor, pipeline = _count(row, "gpus"), _size(row, "tensor"), _size(row, "pipeline")
    local_batch, data = _count(row, "local_batch"), _replicas(row, tensor * pipeline)
    cluster, device = _cloud(row, gpus)
    alone, split = _word(row, "recompute", RECOMPUTE)
    shard = _shard(row, data, data)
    if tensor * pipeline == 1:
        share = 0.5 if _plain(row.get("recompute", "")) == "selectivelayer" else 1.0
        strategy: Any = FSDP(
            micro_batch=local_batch, recompute=alone, recompute_share=share, shard=shard if shard < gpus else None
        )
    else:
        if shard < data:
            row.notes.append(f"simulated with weights sharded over {data} ranks, not {shard}")
        order, chunks = _word(row, "schedule", PIPELINES) if pipeline > 1 else ("1f1b", 1)
        strategy = Parallel(
            tensor=tensor, pipeline=pipeline, data=data, sequence=tensor > 1, recompute=split, order=order,
            # by default as many micro-batches as stages (torchtitan/config_manager.py, pipeline_parallel_microbatches)
            micro_batch=-(-local_batch // pipeline), tp_comm_overlap=_is_set(row, "async_tensor"),
            interleave=chunks, sharded="full",
            # stages send and receive in one batch and wait for it (torch/distributed/pipelining/schedules.py)
            p2p="overlapped" if pipeline == 1 else "exchange" if chunks == 1 or order != "1f1b" else "in step",
        )  # fmt: skip
    stack = "torchtitan-compile" if _is_set(row, "compile") else "torchtitan"
    result = _run(row, cluster, _model(row), strategy, _count(row, "global_batch"), gpus, stack,
                  precision=_word(row, "precision", PRECISIONS), device=device)  # fmt: skip
    return _tokens(result, row), _gib(result)


#: sharding of fms-fsdp, in its words and in PyTorch's -> stage of ZeRO, and whether only within machines
SHARDING = {
    "fsdp": (3, False), "hsdp": (3, True), "full_shard": (3, False), "hybrid_shard": (3, True),
    "shard_grad_op": (2, False), "zero-2": (2, False), "zero-3": (3, False),
}  # fmt: skip
#: recomputation of fms-fsdp and share of the blocks, as their checkpoints are of whole blocks: "selective" is every
#: k-th one (fms_fsdp/policies/ac_handler.py of February 2024), here every second one, as no row says k
BLOCKS = {"": ("none", 1.0), "none": ("none", 1.0), "selective": ("early-stop", 0.5), "full": ("early-stop", 1.0)}


def _fms(row: Row) -> tuple[float, float | None]:
    """fms-fsdp: PyTorch's FSDP, sharded over all GPUs or over those of a machine."""
    _check(row)
    gpus, local_batch = _count(row, "gpus"), _count(row, "local_batch")
    stage, inside = _word(row, "sharding", SHARDING)
    if inside and gpus > 8 and gpus % 8:
        raise UnsupportedError(f"gpus = {gpus}: must be a multiple of 8 with sharding = {row['sharding']}")
    recompute, share = _word(row, "recompute", BLOCKS)
    strategy = FSDP(
        stage=stage, micro_batch=local_batch, recompute=recompute, recompute_share=share,
        shard=8 if inside and gpus > 8 else None,
    )  # fmt: skip
    cluster, device = _cloud(row, gpus)
    if (speed := row.get("nic_gbit_per_s", "")) != "":
        if not isinstance(speed, int | float) or not 0 < speed < 1e6:
            raise UnsupportedError(f"nic_gbit_per_s = {shown(speed)}: must be a positive number")
        cluster += f"+n_nics=8+bandwidth={speed / 8} Gbit/s"
    options = _on_cluster(cluster.partition("+")[0], device)
    result = _run(row, cluster, _model(row), strategy, gpus * local_batch, gpus, "fms-fsdp", **options)
    return _tokens(result, row), None


#: slices that are simulated: rings between S of them move 2 (S - 1)/S of a shard, so more take at most 7 % longer, and
#: what they take hides behind the backward pass
MOST_SLICES = 16
#: sizes of MaxText's models -> columns
SIZES = {
    "layers": "layers", "dim": "width", "hidden": "mlp", "heads": "heads", "head_size": "head_size", "seq": "sequence",
}  # fmt: skip
#: MaxText's remat_policy -> recompute; "minimal" keeps the outputs of all products with weights
POLICIES = {
    "full": "full", "none": "none", "": "full", "all but products": "dots-saveable", "selective": "selective",
    "minimal": "dots-saveable", "minimal_flash": "selective", "save_dot_with_context_except_mlp": "selective",
}  # fmt: skip


def _maxtext(row: Row) -> tuple[float, float | None]:
    """MaxText: FSDP inside a slice of TPUs, data parallelism between slices over the data-centre network."""
    _check(row)
    chips, tensor = _count(row, "chips_per_slice"), _size(row, "tensor")
    given = 1 if row.get("slices", "") == "" else _count(row, "slices")
    device, local_batch, slices = _device(row), _count(row, "local_batch"), min(given, MOST_SLICES)
    if not device.startswith("tpu"):
        raise UnsupportedError(f"system = {shown(row['system'])}: no slices of {device}; must be a TPU")
    _count(row, "sequence")
    if chips % tensor:
        raise UnsupportedError(f"tensor = {tensor}: must divide chips_per_slice = {chips}")
    if given > slices:
        row.notes.append(f"simulated with {slices} slices")
    n, inside = chips * slices, chips // tensor
    cluster = f"{device}+slices={slices}+sizes={_torus(device, chips)}"
    model = _maxtext_model(row, device)
    _no_experts(model)
    again = _word(row, "recompute", POLICIES)
    fsdp = _count(row, "fsdp") if row.get("fsdp") else inside
    if inside * given % fsdp:
        raise UnsupportedError(f"fsdp = {fsdp}: must divide slices x chips_per_slice / tensor = {inside * given}")
    if tensor == 1:
        strategy: Any = FSDP(shard=None if fsdp in (n, inside * given) else fsdp, recompute=again)
    else:
        if fsdp != n // tensor:
            row.notes.append(f"simulated with the model sharded over {n // tensor} ranks")
        # XLA hides collectives of tensor groups behind the products that need them, in chunks (Wang et al. 2023,
        # Overlap communication with dependent computation via decomposition, ASPLOS)
        strategy = Parallel(
            tensor=tensor, data=n // tensor, micro_batch=local_batch * tensor, sharded="full", sequence=True,
            tp_comm_overlap=True, recompute=again,
        )  # fmt: skip
    result = _run(row, cluster, model, strategy, local_batch * n, n, "maxtext")
    # MaxText counts attention in full (MaxText/maxtext_utils.py, calculate_tflops_training_per_device)
    return 3.0 * model.flops * result.throughput / n / 1e12, None


def _maxtext_model(row: Row, device: str) -> Model:
    """Return the model of a row's sizes, with a gate or without one, whichever has the parameters that its name says;
    a bundled model where the row names one of another family, or has no sizes."""
    name, size = _plain(row.get("model", "")), re.search(r"(\d+(?:\.\d+)?)b$", str(row.get("model", "")).lower())
    has_sizes = all(row.get(column) for column in SIZES.values())
    if not has_sizes or (not name.startswith("maxtext") and name in map(_plain, bundled_names())):
        return load_model(_model(row))
    text = "maxtext+" + "+".join(f"{key}={_count(row, column)}" for key, column in SIZES.items())
    gated, ungated = load_model(text), load_model(f"{text}+mlp=ungated")
    if size is None:  # the models of v4 have no gate
        return ungated if device == "tpu-v4" else gated
    return min((gated, ungated), key=lambda each: abs(each.n_params / 1e9 - float(size[1])))


def _torus(system: str, chips: int) -> str:
    """Return the sizes of a slice, as even as the number's prime factors allow: two axes on v5e and v6e, else three."""
    sizes, rest, factor = [1] * (2 if system in ("tpu-v5e", "tpu-v6e") else 3), chips, 2
    factors = []
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    for each in reversed(factors):
        sizes[sizes.index(min(sizes))] *= each
    return str(sorted(sizes))


LARGE = ("case", "model", "machine", "gpus", "tensor", "pipeline", "interleave", "micro", "batch", "framework",
         "recompute", "seconds")  # fmt: skip
LAYOUT_RECOMPUTE = {"": "none", "none": "none", "selective": "selective", "full": "full", "stage": "stage"}
#: beginnings of frameworks whose layouts are those of Megatron; DeepSpeed runs Megatron-DeepSpeed's pipelines on A100
FRAMEWORKS = ("megatron", "nemo", "deepspeed")


def _large(row: Row) -> tuple[float, float | None]:
    """Large runs of Megatron and DeepSpeed: on Selene's A100, and on DGX with Hopper and newer GPUs."""
    _check(row)
    gpus, tensor, pipeline = _count(row, "gpus"), _size(row, "tensor"), _size(row, "pipeline")
    micro_batch, batch, data = _count(row, "micro"), _count(row, "batch"), _replicas(row, tensor * pipeline)
    framework = _plain(row.get("framework", ""))
    device, recompute, options = _device(row, "machine"), _word(row, "recompute", LAYOUT_RECOMPUTE), {}
    deepspeed, is_a100 = "deepspeed" in framework, device.startswith("a100")
    if not framework.startswith(FRAMEWORKS) or (deepspeed and not is_a100):
        row.notes.append(f"framework = {shown(row.get('framework', ''))}: simulated as Megatron")
    if is_a100:
        # its runs of this size, MT-NLG and BLOOM, are in bf16 (arXiv:2201.11990, section 2.3; arXiv:2211.05100, 3.4.3)
        interleave = _size(row, "interleave")
        cluster, stack = f"selene+n_leaves={8 * -(-gpus // 160)}", "megatron-2021" + "@deepspeed-bf16" * deepspeed
        options = {"precision": "bf16" if deepspeed else "fp16"} | _on_cluster("selene", device)
        strategy = Parallel(
            tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch,
            interleave=interleave, cut="layers", recompute=recompute, overlap="none",
            p2p="in turns" if deepspeed and interleave == 1 else "exchange",
        )  # fmt: skip
    else:
        interleave = _chunks(row, "interleave", pipeline)
        stack, (cluster, options) = "megatron", _nvidia(row, "machine", gpus)
        strategy = _megatron(micro_batch, gpus, tensor, pipeline, interleave, recompute)
    model = _model(row)
    result = _split(row, lambda each: _run(row, cluster, model, each, batch, gpus, stack, **options), strategy)
    return result.step_time, None


class Family(NamedTuple):
    """A kind of file: columns that tell it, the published figure's column and unit, how a row is predicted, and further
    columns of its files."""

    columns: tuple[str, ...]
    figure: str
    unit: str
    predict: Callable[[Row], tuple[float, float | None]]
    further: tuple[str, ...] = ()

    @property
    def known(self) -> set[str]:
        """All columns of such files."""
        return {*self.columns, *self.further, self.figure}


#: columns of the four tables
COMMON = ("model", "system", "recompute", "sequence", "fsdp", "tensor")
OF_GPUS = (*COMMON, "gpus", "precision", "global_batch", "pipeline", "context")


FAMILIES = {
    "bridge": Family(("release", "virtual", "expert", "routing"), "tokens_per_s_gpu", TOKENS, _bridge,
                     (*OF_GPUS, "micro_batch", "tflops_gpu")),
    "torchtitan": Family(("source", "async_tensor", "compile"), "tokens_per_s_gpu", TOKENS, _torchtitan,
                         (*OF_GPUS, "local_batch", "schedule", "memory_gib")),
    "fms": Family(("nic_gbit_per_s", "sharding"), "tokens_per_s_gpu", TOKENS, _fms,
                  (*COMMON, "gpus", "local_batch", "table")),
    "maxtext": Family(("slices", "chips_per_slice"), "tflops_chip", "TFLOP/s per chip", _maxtext,
                      (*COMMON, "layers", "width", "mlp", "heads", "head_size", "local_batch", "mfu_percent")),
    "large": Family(LARGE[:-1], "seconds", "s", _large),
}  # fmt: skip


def check_columns(path: Path, kind: str, columns: Sequence[str]) -> None:
    """Raise ConfigError for a misspelt column of a file; print the columns that are not used on stderr."""
    known = FAMILIES[kind].known
    unknown = [name for name in dict.fromkeys(columns) if name and name not in known]
    for name in unknown:
        absent = sorted(known.difference(columns))
        near = [each for each in absent if set(each.split("_")) <= set(name.split("_"))]
        if near := near or difflib.get_close_matches(name, absent, 1, 0.75):
            raise ConfigError(f"{path}: unknown column {shown(name)}; did you mean {near[0]!r}?")
    if unknown:
        print(f"note: {path}: unknown columns are not used: {listed(unknown)}", file=sys.stderr)


def judge(path: Path) -> Iterator[Judged]:
    """Yield a result for each row of a file, in its order."""
    kind, rows = read(path)
    family = FAMILIES[kind]
    for row in rows:
        what = ", ".join(f"{key} {value}" for key, value in row.items() if value not in ("", None))
        row.notes.clear()
        published, memory = _published(row, family.figure), _published(row, "memory_gib")
        try:
            if "malformed" in row:
                raise UnsupportedError(row["malformed"])
            predicted, needed = family.predict(row)
        except (UnsupportedError, DdlsimError) as error:
            yield Judged(what, published or math.nan, None, family.unit, str(error), memory)
        else:
            notes, needed = tuple(row.notes), needed if memory else None
            yield Judged(what, published or math.nan, predicted, family.unit, "", memory, needed, notes)


def _published(row: Row, name: str) -> float | None:
    """Return a published figure; None, with a note unless the cell is empty, if it is not a positive number."""
    value = row.get(name, "")
    if isinstance(value, int | float) and 0.0 < value < math.inf:
        return float(value)
    if value != "":
        row.notes.append(f"{name} = {shown(value)}: not compared, must be a positive number")
    return None


def summary(errors: Sequence[float], name: str, n_rows: int) -> str:
    """Return mean, median, signed mean and share within 10 % of relative errors."""
    if not errors:
        return f"{name}: 0 of {n_rows} rows predicted"
    off = np.abs(errors)
    return (
        f"{name}: {len(errors)} of {n_rows} rows: mean {off.mean():.1%}, median {np.median(off):.1%}, signed "
        f"{np.mean(errors):+.1%}, within 10 %: {(off <= 0.1).mean():.0%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per row, and the errors of all rows."""
    parser = argparse.ArgumentParser(prog="python -m accuracy.judge", description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.json is not None:
            check_place(given.json)
        rows = [_printed(each) for each in judge(given.file)]
        print(summary([each.error for each in rows if each.error is not None], "figures", len(rows)))
        memory = [(each.memory, each.predicted_memory) for each in rows if each.memory]
        if memory:
            print(summary([needed / measured - 1.0 for measured, needed in memory if needed], "memory", len(memory)))
        if given.json is not None:
            table = [
                {"published": None if math.isnan(each.published) else each.published}
                | {name: getattr(each, name) for name in ("predicted", "unit", "reason")}
                for each in rows
            ]
            write_text(given.json, json.dumps({"rows": table}, indent=1))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _printed(row: Judged) -> Judged:
    text = row.reason if row.predicted is None else f"{row.predicted:10.5g} "
    text += "" if row.error is None else f"{row.error:+7.1%}"
    if row.memory and row.predicted_memory:
        text += f"  {row.memory:.4g} {row.predicted_memory:.4g} GiB"
    text += "".join(f"  ({note})" for note in row.notes)
    figure = "-" if math.isnan(row.published) else f"{row.published:.5g}"
    print(f"{figure:>10} {text}  {row.unit}  [{row.what}]", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
