"""Judge predictions of a file of published runs: out of the box, nothing calibrated.

    python -m accuracy.judge FILE [--json OUT]

FILE has the columns of one of the five files of published runs: Megatron-Bridge, torchtitan, fms-fsdp, MaxText
(``.csv``), or large runs (``.yaml``). Every row is simulated on the catalogue's device, the bundled cluster and the
named stack. Rows that cannot be run are listed with the reason. ``OUT`` is ``{"rows": [{"published", "predicted",
"unit", "reason"}, ...]}`` in the order of the file.

What a row leaves open is chosen by the same rules for all rows: the layout is data-parallel over the remaining ranks,
and where memory would not suffice, transformer layers are recomputed.
"""

from __future__ import annotations

import argparse
import csv
import json
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
    load_cluster,
    load_model,
    simulate,
)

__all__ = ["Judged", "judge", "main", "read", "summary"]

Row = Mapping[str, Any]
TOKENS = "tokens/s per GPU"


class Judged(NamedTuple):
    """A published figure, its prediction, and why there is none; the same of the peak memory, in GiB."""

    what: str
    published: float
    predicted: float | None
    unit: str
    reason: str = ""
    memory: float | None = None
    predicted_memory: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error."""
        return None if self.predicted is None else self.predicted / self.published - 1.0


class UnsupportedError(Exception):
    """A row needs something that is not simulated."""


def read(path: Path) -> tuple[str, list[Row]]:
    """Return the kind of a file, told by its columns, and its rows. Raises ConfigError for other columns."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file of published runs") from None
    if path.suffix in (".yaml", ".yml"):
        rows = (yaml.safe_load(text) or {}).get("rows", [])
        return "large", [dict(zip(LARGE, row, strict=True)) for row in rows]
    table = list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))
    for kind, family in FAMILIES.items():
        if table and set(family.columns) <= set(table[0]):
            return kind, [{key: _value(value) for key, value in row.items()} for row in table]
    raise ConfigError(f"{path}: has the columns of none of the known files; known: {', '.join(FAMILIES)}")


def _value(text: str | None) -> Any:
    try:
        number = float(text or "")
    except ValueError:
        return text or ""
    return int(number) if number.is_integer() else number


# ---------------------------------------------------------------- what rows have in common


def _size(row: Row, name: str) -> int:
    """Return the size of a kind of parallelism: 1 where the row has none."""
    return int(row.get(name) or 1)


def _check(row: Row) -> None:
    """Raise UnsupportedError for what no strategy simulates."""
    if row.get("routing") or _size(row, "expert") > 1:
        raise UnsupportedError("experts: these models are not simulated yet")
    if _size(row, "context") > 1:
        raise UnsupportedError("context parallelism is not simulated yet")


#: stacks and devices that replace those of the catalogue, by name: what :func:`accuracy.stacks.fitted` varies
REPLACED: dict[str, Stack | Device] = {}


def _run(cluster: str, model: str | Model, strategy: Any, batch: int, gpus: int, stack: str, **options: Any) -> Result:
    device = options.pop("device", None)
    if REPLACED and device is None:
        loaded = load_cluster(cluster)
        device = loaded.device_of[loaded.workers[0]]
    return simulate(
        cluster, model, strategy, batch_size=batch, workers=gpus, stack=REPLACED.get(stack, stack), optimizer="adam",
        device=REPLACED.get(str(device), device), steps=2, warmup=1, **options,
    )  # fmt: skip


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


def _tokens(result: Result, sequence: int) -> float:
    return result.throughput * sequence / result.n_workers


def _gib(result: Result) -> float | None:
    """Return the peak memory that the allocator reserves."""
    return None if result.memory is None else (result.memory.needed + result.memory.reserved) / 2**30


# ---------------------------------------------------------------- the files

#: precisions of the files -> those of ddlsim
PRECISIONS = {"fp8-cs": "fp8", "fp8-ds": "fp8"}


def _bridge(row: Row) -> tuple[float, float | None]:
    """Megatron-Bridge: Megatron Core on DGX machines and NVL72 racks."""
    _check(row)
    gpus, tensor, pipeline = row["gpus"], _size(row, "tensor"), _size(row, "pipeline")

    precision, model = PRECISIONS.get(row["precision"], row["precision"]), f"{row['model']}+seq={row['sequence']}"

    def simulated(strategy: Any) -> Result:
        cluster = _nvidia(row["system"], gpus)
        return _run(cluster, model, strategy, row["global_batch"], gpus, "megatron", precision=precision)

    def run(recompute: str) -> Result:
        if row["fsdp"] and tensor * pipeline == 1:
            shard = row["fsdp"] if row["fsdp"] < gpus else None
            return simulated(FSDP(micro_batch=row["micro_batch"], shard=shard, recompute=recompute))
        chunks = _size(row, "virtual")
        return _split(simulated, _megatron(row["micro_batch"], gpus, tensor, pipeline, chunks, recompute))

    return _fitting(run) * row["sequence"] / gpus, None


def _megatron(micro_batch: int, gpus: int, tensor: int, pipeline: int, chunks: int, recompute: str) -> Parallel:
    """Return a layout as Megatron Core runs it: distributed optimizer, everything overlapped."""
    return Parallel(
        tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), micro_batch=micro_batch,
        interleave=chunks if pipeline > 1 else 1, sequence=tensor > 1, tp_comm_overlap=tensor > 1,
        cut="layers" if pipeline > 1 else "balanced", sharded=True, overlap="megatron", recompute=recompute,  # type: ignore[arg-type]
    )  # fmt: skip


def _split(run: Callable[[Parallel], Result], strategy: Parallel) -> Result:
    """Return a run of a layout; stages with unequal numbers of layers, or without chunks, where others do not work."""
    for changes in ({}, {"cut": "balanced"}, {"cut": "balanced", "interleave": 1}):
        try:
            return run(replace(strategy, **changes))  # type: ignore[arg-type]
        except ConfigError as error:
            refused = error
    raise refused


def _nvidia(system: str, gpus: int) -> str:
    """Return the cluster of NVIDIA's systems: racks of 72 GPUs, or machines of 8 in units of 256."""
    if system.startswith("gb"):
        racks = -(-gpus // 72)
        return f"{system}-nvl72+n_hosts={racks}" + (f"+n_gpus={gpus // racks}" if gpus % racks == 0 else "")
    return f"dgx-{system}-pod" + (f"+n_leaves={8 * -(-gpus // 256)}" if gpus > 256 else "")


#: systems of torchtitan's file -> cluster and device
TORCHTITAN = {
    "h100-96g-500w": ("hgx-h100-96g", "h100-96g-500w"), "a100-80g": ("roce-a100-80g", "a100-80g"),
    "h100": ("roce-h100", "h100"), "h200": ("roce-h100", "h200"), "b200": ("roce-h100", "b200"),
}  # fmt: skip
#: recomputation: of FSDP, and of layouts with tensor or pipeline parallelism
RECOMPUTE = {
    "none": ("none", "none"), "selective": ("operators", "operators"), "full": ("early-stop", "early-stop"),
    "": ("none", "none"), "selective layer": ("early-stop", "operators"),
}  # fmt: skip
PIPELINES = {"interleaved-1f1b": 2, "interleaved1f1b": 2}


def _torchtitan(row: Row) -> tuple[float, float | None]:
    """torchtitan: FSDP2, with tensor and pipeline parallelism on the larger models."""
    _check(row)
    gpus, tensor, pipeline = row["gpus"], _size(row, "tensor"), _size(row, "pipeline")
    cluster, device = TORCHTITAN[row["system"]]
    alone, split = RECOMPUTE[row["recompute"]]
    if tensor * pipeline == 1:
        shard = row["fsdp"] if row["fsdp"] and row["fsdp"] < gpus else None
        share = 0.5 if row["recompute"] == "selective layer" else 1.0
        strategy: Any = FSDP(micro_batch=row["local_batch"], recompute=alone, recompute_share=share, shard=shard)
    else:
        strategy = Parallel(
            tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), sequence=tensor > 1, recompute=split,  # type: ignore[arg-type]
            # by default as many micro-batches as stages (torchtitan/config_manager.py, pipeline_parallel_microbatches)
            micro_batch=-(-row["local_batch"] // pipeline), tp_comm_overlap=bool(row["async_tensor"]),
            interleave=PIPELINES.get(str(row["schedule"]).lower(), 1), sharded="full",
            # stages send and receive in one batch and wait for it (torch/distributed/pipelining/schedules.py)
            p2p="exchange" if pipeline > 1 else "overlapped",
        )  # fmt: skip
    result = _run(f"{cluster}+n_hosts={-(-gpus // 8)}", f"{row['model']}+seq={row['sequence']}", strategy,
                  row["global_batch"], gpus, "torchtitan-compile" if row["compile"] else "torchtitan",
                  precision=PRECISIONS.get(row["precision"], row["precision"]), device=device)  # fmt: skip
    return _tokens(result, row["sequence"]), _gib(result)


def _fms(row: Row) -> tuple[float, float | None]:
    """fms-fsdp: PyTorch's FSDP, sharded over all GPUs or over those of a machine."""
    gpus = row["gpus"]
    strategy = FSDP(
        micro_batch=row["local_batch"], recompute=RECOMPUTE[row["recompute"]][0],
        shard=8 if row["sharding"] == "hsdp" and gpus > 8 else None,
    )  # fmt: skip
    cluster = {"a100-80g": "roce-a100-80g", "h100": "roce-h100"}[row["system"]]
    nics = f"+n_nics=8+bandwidth={row['nic_gbit_per_s'] / 8} Gbit/s"
    result = _run(f"{cluster}+n_hosts={-(-gpus // 8)}{nics}", f"{row['model']}+seq={row['sequence']}", strategy,
                  gpus * row["local_batch"], gpus, "fms-fsdp")  # fmt: skip
    return _tokens(result, row["sequence"]), None


#: slices that are simulated: rings between S of them move 2 (S - 1)/S of a shard, so more take at most 7 % longer, and
#: what they take hides behind the backward pass
MOST_SLICES = 16


def _maxtext(row: Row) -> tuple[float, float | None]:
    """MaxText: FSDP inside a slice of TPUs, data parallelism between slices over the data-centre network."""
    chips, slices, tensor = row["chips_per_slice"], min(row["slices"], MOST_SLICES), _size(row, "tensor")
    n = chips * slices
    cluster = f"{row['system']}+slices={slices}+sizes={_torus(row['system'], chips)}"
    sizes = "+".join(
        f"{key}={row[name]}"
        for key, name in (("layers", "layers"), ("dim", "width"), ("hidden", "mlp"), ("heads", "heads"),
                          ("head_size", "head_size"), ("seq", "sequence"))
    )  # fmt: skip
    # the 22B and 52B models of v4 have no gate
    model = load_model(f"maxtext+{sizes}" + ("+mlp=ungated" if row["system"] == "tpu-v4" else ""))
    # "all but products": what attention computes between its products with weights is recomputed
    again = {"full": "full", "none": "none"}.get(row["recompute"], "selective")
    if tensor == 1:
        strategy: Any = FSDP(shard=chips if slices > 1 else None, recompute=again)
    else:
        # XLA hides collectives of tensor groups behind the products that need them, in chunks (Wang et al. 2023,
        # Overlap communication with dependent computation via decomposition, ASPLOS)
        strategy = Parallel(
            tensor=tensor, data=n // tensor, micro_batch=row["local_batch"] * tensor, sharded=True, overlap="layer",
            sequence=True, tp_comm_overlap=True, recompute=again,  # type: ignore[arg-type]
        )  # fmt: skip
    result = _run(cluster, model, strategy, row["local_batch"] * n, n, "maxtext")
    # MaxText counts attention in full (MaxText/maxtext_utils.py, calculate_tflops_training_per_device)
    return 3.0 * model.flops * result.throughput / n / 1e12, None


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


def _large(row: Row) -> tuple[float, float | None]:
    """Large runs of Megatron and DeepSpeed: on Selene's A100, and on DGX with Hopper and newer GPUs."""
    gpus, tensor, pipeline, machine = row["gpus"], row["tensor"], row["pipeline"], row["machine"]
    ampere, options = machine.startswith("a100"), {}
    if ampere:
        cluster, stack, options = f"selene+n_leaves={8 * -(-gpus // 160)}", "megatron-2021", {"precision": "fp16"}
        in_turns = row["framework"] == "deepspeed" and row["interleave"] == 1
        strategy = Parallel(
            tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), micro_batch=row["micro"],
            interleave=row["interleave"], cut="layers", recompute=row["recompute"], overlap="none",
            p2p="in turns" if in_turns else "exchange",
        )  # fmt: skip
    else:
        cluster, stack = _nvidia("h100" if machine in ("h800", "h200") else machine, gpus), "megatron"
        options = {"device": machine}
        strategy = _megatron(row["micro"], gpus, tensor, pipeline, row["interleave"], row["recompute"])
    result = _split(
        lambda each: _run(cluster, _model(row["model"]), each, row["batch"], gpus, stack, **options), strategy
    )
    return result.step_time, None


def _model(name: str) -> str:
    """Return the bundled model's name."""
    return name.replace("nemotron4", "nemotron-4")


class Family(NamedTuple):
    """A kind of file: columns that tell it, the published figure's column and unit, and how a row is predicted."""

    columns: tuple[str, ...]
    figure: str
    unit: str
    predict: Callable[[Row], tuple[float, float | None]]


FAMILIES = {
    "bridge": Family(("release", "virtual", "expert", "routing"), "tokens_per_s_gpu", TOKENS, _bridge),
    "torchtitan": Family(("source", "async_tensor", "compile"), "tokens_per_s_gpu", TOKENS, _torchtitan),
    "fms": Family(("nic_gbit_per_s", "sharding"), "tokens_per_s_gpu", TOKENS, _fms),
    "maxtext": Family(("slices", "chips_per_slice"), "tflops_chip", "TFLOP/s per chip", _maxtext),
    "large": Family(LARGE, "seconds", "s", _large),
}


def judge(path: Path) -> Iterator[Judged]:
    """Yield a result for each row of a file, in its order."""
    kind, rows = read(path)
    family = FAMILIES[kind]
    for row in rows:
        what = ", ".join(f"{key} {value}" for key, value in row.items() if value not in ("", None))
        published, memory = float(row[family.figure]), row.get("memory_gib") or None
        try:
            predicted, needed = family.predict(row)
            yield Judged(what, published, predicted, family.unit, "", memory, needed if memory else None)
        except (UnsupportedError, DdlsimError, KeyError) as error:
            reason = f"unknown {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            yield Judged(what, published, None, family.unit, reason, memory)


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
    rows: list[Judged] = []
    try:
        for each in judge(given.file):
            rows.append(each)
            text = f"{each.reason}" if each.predicted is None else f"{each.predicted:10.5g} {each.error:+7.1%}"
            if each.memory and each.predicted_memory:
                text += f"  {each.memory:.4g} {each.predicted_memory:.4g} GiB"
            print(f"{each.published:10.5g} {text}  {each.unit}  [{each.what}]", flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary([each.error for each in rows if each.error is not None], "figures", len(rows)))
    memory = [(each.memory, each.predicted_memory) for each in rows if each.memory]
    if memory:
        print(summary([needed / measured - 1.0 for measured, needed in memory if needed], "memory", len(memory)))
    if given.json is not None:
        table = [{name: getattr(each, name) for name in ("published", "predicted", "unit", "reason")} for each in rows]
        given.json.write_text(json.dumps({"rows": table}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
