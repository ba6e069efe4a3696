"""Judge predictions of a file of published runs: out of the box, nothing calibrated.

    python -m accuracy.judge FILE [--json OUT]

FILE has the columns of one of the five files of published runs: Megatron-Bridge, torchtitan, fms-fsdp, MaxText
(``.csv``), or large runs (``.yaml``). Every row is simulated on the catalogue's device, the bundled cluster and the
named stack. Rows that cannot be run are listed with the reason. ``OUT`` is ``{"rows": [{"published", "predicted", "unit",
"reason"}, ...]}`` in the order of the file.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ddlsim import FSDP, ConfigError, DdlsimError, Parallel, simulate

__all__ = ["Judged", "judge", "main", "read"]

Row = Mapping[str, Any]


class Judged(NamedTuple):
    """A published figure, its prediction, and why there is none."""

    what: str
    published: float
    predicted: float | None
    unit: str
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error."""
        return None if self.predicted is None else self.predicted / self.published - 1.0


class UnsupportedError(Exception):
    """A row that needs something that is not simulated yet."""


def read(path: Path) -> tuple[str, list[Row]]:
    """Return the kind of a file, told by its columns, and its rows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        names = [
            "case",
            "model",
            "machine",
            "gpus",
            "tensor",
            "pipeline",
            "interleave",
            "micro",
            "batch",
            "framework",
            "recompute",
            "seconds",
        ]
        return "large", [dict(zip(names, row, strict=True)) for row in yaml.safe_load(text)["rows"]]
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    for kind, columns in COLUMNS.items():
        if rows and set(columns) <= set(rows[0]):
            return kind, [{key: _value(value) for key, value in row.items()} for row in rows]
    raise ConfigError(f"{path}: none of the known sets of columns: {', '.join(COLUMNS)}")


COLUMNS = {
    "bridge": ("release", "virtual", "expert", "routing"),
    "torchtitan": ("source", "async_tensor", "compile"),
    "fms": ("nic_gbit_per_s", "sharding"),
    "maxtext": ("slices", "chips_per_slice", "tflops_chip"),
}


def _value(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


# ---------------------------------------------------------------- families

#: precisions of the files -> those of ddlsim
PRECISIONS = {"fp8-cs": "fp8"}
BRIDGE = {
    "h100": ("dgx-h100-pod+n_leaves={}", "h100"), "b200": ("dgx-b200-pod+n_leaves={}", "b200"),
    "b300": ("dgx-b300-pod+n_leaves={}", "b300"), "gb200": ("gb200-nvl72+n_racks={}", "gb200"),
    "gb300": ("gb300-nvl72+n_racks={}", "gb300"),
}  # fmt: skip


def _refuse(row: Row) -> None:
    if int(row.get("expert") or 1) > 1 or "a3b" in row["model"] or row.get("routing"):
        raise UnsupportedError("experts are not simulated with these stacks yet")
    if int(row.get("context") or 1) > 1:
        raise UnsupportedError("context parallelism is not simulated yet")


def _bridge(row: Row) -> tuple[float, str, float]:
    _refuse(row)
    gpus, tensor, pipeline = row["gpus"], row["tensor"], row["pipeline"]
    data = gpus // (tensor * pipeline)
    if row["fsdp"]:
        strategy: Any = FSDP(micro_batch=row["micro_batch"], shard=None if row["fsdp"] == gpus else row["fsdp"])
    else:
        strategy = Parallel(
            tensor=tensor, pipeline=pipeline, data=data, micro_batch=row["micro_batch"],
            interleave=row["virtual"] or 1, sequence=tensor > 1, tp_comm_overlap=tensor > 1, cut="layers",
            sharded=True, overlap="megatron",
        )  # fmt: skip
    cluster = _cluster(row["system"], gpus)
    precision = PRECISIONS.get(row["precision"], row["precision"])
    model = f"{row['model']}+seq={row['sequence']}"
    result = _run(cluster, model, strategy, row["global_batch"], gpus, "megatron", precision=precision)
    return row["tokens_per_s_gpu"], "tokens/s per GPU", result.throughput * row["sequence"] / gpus


def _cluster(system: str, gpus: int) -> str:
    if system.startswith("gb"):
        return f"{system}-nvl72+n_racks={-(-gpus // 72)}"
    n_leaves = 8 * -(-gpus // 256)
    return f"dgx-{system}-pod" + (f"+n_leaves={n_leaves}" if gpus > 256 else "")


def _run(cluster: str, model: str, strategy: Any, batch: int, gpus: int, stack: str, **options: Any) -> Any:
    return simulate(
        cluster, model, strategy, batch_size=batch, workers=gpus, stack=stack, optimizer="adam", steps=2, warmup=1,
        **options,
    )  # fmt: skip


def _torchtitan(row: Row) -> tuple[float, str, float]:
    _refuse(row)
    gpus, tensor, pipeline = row["gpus"], row["tensor"] or 1, row["pipeline"] or 1
    batch, recompute = row["global_batch"], row["recompute"]
    if tensor * pipeline > 1:
        raise UnsupportedError("todo")
    strategy = FSDP(micro_batch=row["local_batch"], recompute=_again(recompute))
    cluster = {"h100-96g-500w": "hgx-h100-96g", "a100-80g": "roce-a100-80g", "h200": "dgx-h100-pod"}[row["system"]]
    stack = "torchtitan-compile" if row["compile"] else "torchtitan"
    device = {"h200": "h200"}.get(row["system"])
    result = _run(cluster, f"{row['model']}+seq={row['sequence']}", strategy, batch, gpus, stack,
                  precision=row["precision"], device=device)  # fmt: skip
    return row["tokens_per_s_gpu"], "tokens/s per GPU", result.throughput * row["sequence"] / gpus


def _again(recompute: str) -> str:
    return {"none": "none", "selective": "operators", "full": "early-stop"}[recompute]


def _fms(row: Row) -> tuple[float, str, float]:
    gpus, shard = row["gpus"], 8 if row["sharding"] == "hsdp" else None
    strategy = FSDP(
        micro_batch=row["local_batch"],
        shard=shard,
        recompute={"full": "early-stop"}.get(row["recompute"], row["recompute"]),
    )
    cluster = {"a100-80g": "roce-a100-80g", "h100": "roce-h100"}[row["system"]]
    nic = row["nic_gbit_per_s"] / 8
    result = _run(f"{cluster}+n_hosts={gpus // 8}+n_nics=8+bandwidth={nic} Gbit/s", f"{row['model']}+seq={row['sequence']}", strategy,
                  gpus * row["local_batch"], gpus, "fsdp-eager")  # fmt: skip
    return row["tokens_per_s_gpu"], "tokens/s per GPU", result.throughput * row["sequence"] / gpus


def _large(row: Row) -> tuple[float, str, float]:
    gpus, tensor, pipeline = row["gpus"], row["tensor"], row["pipeline"]
    modern = row["framework"] == "megatron"
    strategy = Parallel(
        tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), micro_batch=row["micro"],
        interleave=row["interleave"], cut="layers" , recompute=row["recompute"], sequence=modern and tensor > 1,
        tp_comm_overlap=modern and tensor > 1, sharded=modern, overlap="megatron" if modern else "none",
        p2p={"megatron": "overlapped", "deepspeed": "in turns"}.get(row["framework"], "exchange"),
    )  # fmt: skip
    model = row["model"].replace("nemotron4", "nemotron-4")
    cluster = {
        "h100": f"dgx-h100-pod+n_leaves={8 * -(-gpus // 256)}",
        "a100": f"selene+n_leaves={8 * -(-gpus // 160)}",
    }[row["machine"]]
    stack = "megatron" if modern else "megatron-2021"
    result = _run(cluster, model, strategy, row["batch"], gpus, stack, precision="bf16" if modern else "fp16")
    return row["seconds"], "s", result.step_time


def _maxtext(row: Row) -> tuple[float, str, float]:
    raise UnsupportedError("todo")


FAMILIES: Mapping[str, Callable[[Row], tuple[float, str, float]]] = {
    "bridge": _bridge, "torchtitan": _torchtitan, "fms": _fms, "maxtext": _maxtext, "large": _large,
}  # fmt: skip
PUBLISHED = {"bridge": "tokens_per_s_gpu", "torchtitan": "tokens_per_s_gpu", "fms": "tokens_per_s_gpu",
             "maxtext": "tflops_chip", "large": "seconds"}  # fmt: skip


def judge(path: Path) -> Iterator[Judged]:
    """Yield a result for each row of a file, in its order."""
    kind, rows = read(path)
    for row in rows:
        what = ", ".join(f"{value}" for value in row.values() if value not in ("", None))
        try:
            published, unit, predicted = FAMILIES[kind](row)
            yield Judged(what, published, predicted, unit)
        except (UnsupportedError, DdlsimError) as error:
            yield Judged(what, float(row[PUBLISHED[kind]]), None, "", str(error).splitlines()[0])


def main(arguments: list[str] | None = None) -> int:
    """Print a line per row and the errors' mean, median, signed mean and share within 10 %."""
    parser = argparse.ArgumentParser(prog="python -m accuracy.judge", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    for each in judge(given.file):
        rows.append(each)
        error = f"{each.predicted:10.4g} {each.error:+7.1%}" if each.predicted is not None else f"- {each.reason}"
        print(f"{each.published:10.4g} {error}  {each.unit}  [{each.what}]", flush=True)
    errors = np.array([each.error for each in rows if each.error is not None])
    if len(errors):
        off = np.abs(errors)
        print(
            f"{len(errors)} of {len(rows)} rows: mean {off.mean():.1%}, median {np.median(off):.1%}, "
            f"signed {errors.mean():+.1%}, within 10 %: {(off <= 0.1).mean():.0%}"
        )
    if given.json is not None:
        table = [{name: getattr(each, name) for name in ("published", "predicted", "unit", "reason")} for each in rows]
        given.json.write_text(json.dumps({"rows": table}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
