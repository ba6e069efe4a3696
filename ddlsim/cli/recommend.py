"""The `recommend` command, which ranks configurations for a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import ddlsim
from ddlsim.cli import completion
from ddlsim.cli.application import app
from ddlsim.cli.options import AllowCode, Device, Flash, Json, Optimizer, Precision, Stack, Variation, arg, opt, passed
from ddlsim.cli.output import check_distinct, check_folder, write_file
from ddlsim.errors import ConfigError
from ddlsim.output_files import save_csv
from ddlsim.plain import whole_numbers


@app.command()
def fits(
    model: Annotated[str, arg("Bundled model or model file.", offers=completion.models)],
    device: Annotated[
        str, arg("Device of the catalogue (see: ddlsim devices) or device file.", offers=completion.devices)
    ],
    batch_size: Annotated[int, opt("Samples per rank and micro-batch.", "--batch-size", "-b")] = 1,
    precision: Precision = None,
    optimizer: Optimizer = None,
    gradients: Annotated[
        str | None, opt("dtype of gradients, such as fp32 (as in Megatron-LM).", "--gradient-dtype")
    ] = None,
    zero: Annotated[int, opt("ZeRO stage, 1 to 3; 3 is FSDP.")] = 0,
    shards: Annotated[int, opt("Number of ranks over which ZeRO shards.")] = 1,
    tensor: Annotated[int, opt("Number of ranks over which layers are split (tensor parallelism).")] = 1,
    sequence: Annotated[bool, opt("Use sequence parallelism.", "--sequence")] = False,
    pipeline: Annotated[int, opt("Number of pipeline stages.")] = 1,
    micro_batches: Annotated[int | None, opt("Micro-batches per step in the pipeline.")] = None,
    interleave: Annotated[int, opt("Number of model chunks per pipeline stage.")] = 1,
    recompute: Annotated[
        str,
        opt("Recomputation: none, selective, dots-saveable, operators, full, early-stop or segments."),
    ] = "none",
    stack: Stack = None,
    flash: Flash = None,
    offload: Annotated[bool, opt("Keep the optimizer state in host memory.", "--offload")] = False,
    workspace: Annotated[str | None, opt('Workspace of convolutions, such as "64 MiB".')] = None,
    as_json: Json = False,
) -> None:
    """Check whether a model can be trained on a device.

    If it does not fit, suggest changes.

    Example: ddlsim fits gpt2-xl a100-40g -b 8 --precision fp16 --optimizer adam
    """
    split: dict[str, Any] = {"zero": zero, "shards": shards, "tensor": tensor, "sequence": sequence}
    split |= {"pipeline": pipeline, "micro_batches": micro_batches, "interleave": interleave}
    memory: dict[str, Any] = {"recompute": recompute, "stack": stack, "flash": flash}
    memory |= {"offload": offload, "workspace": workspace}
    fit = ddlsim.fits(model, device, batch_size, precision, optimizer, gradient_dtype=gradients, **split, **memory)
    typer.echo(json.dumps(fit.to_dict(), indent=1) if as_json else str(fit))


@app.command()
def recommend(
    clusters: Annotated[
        list[str],
        arg(
            "Bundled clusters or topology files to choose from, or a question file (.toml).", offers=completion.clusters
        ),
    ],
    model: Annotated[
        str | None,
        opt(
            "Bundled model or model file (with +option or +key=value; default: resnet50).",
            "--model",
            "-m",
            offers=completion.models,
        ),
    ] = None,
    deadline: Annotated[str | None, opt('Longest time of the whole training, such as "36 h".')] = None,
    budget: Annotated[float | None, opt("Largest cost of the whole training, in USD.")] = None,
    efficiency: Annotated[float | None, opt("Smallest efficiency, such as 0.9.")] = None,
    throughput: Annotated[str | None, opt('Smallest throughput, such as "5000 images/s".')] = None,
    objective: Annotated[str | None, opt("Order of results: time (fastest first) or cost (cheapest first).")] = None,
    samples: Annotated[float | None, opt("Number of samples to process: epochs * dataset size.")] = None,
    workers: Annotated[str | None, opt('Numbers of workers to try, such as "8,16,32".', "--workers", "-n")] = None,
    batch_size: Annotated[str | None, opt('Batch sizes to try, such as "32,64".', "--batch-size", "-b")] = None,
    price: Annotated[
        list[str] | None,
        opt('Price of a machine, such as "24.48 USD/h", or a cloud, such as "aws"; set once for all, or per cluster.'),
    ] = None,
    device: Device = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    stack: Stack = None,
    flash: Flash = None,
    spread: Variation = None,
    split: Annotated[
        bool, opt("Split the model over workers; --batch-size is then the global batch size.", "--split")
    ] = False,
    tensor: Annotated[str | None, opt('Tensor-parallel sizes to try, such as "4,8".')] = None,
    pipeline: Annotated[str | None, opt('Numbers of pipeline stages to try, such as "8,16".')] = None,
    data: Annotated[str | None, opt('Numbers of replicas to try, such as "8,16".')] = None,
    micro_batch: Annotated[str | None, opt('Micro-batch sizes to try, such as "1,2".')] = None,
    interleave: Annotated[str | None, opt('Chunks per stage to try, such as "1,2".')] = None,
    recompute: Annotated[str | None, opt('Kinds of recomputation to try, such as "none,selective,full,stage".')] = None,
    stage: Annotated[str | None, opt('ZeRO stages to try, such as "1,3".')] = None,
    shard: Annotated[str | None, opt('Sharding group sizes of stage 3 to try, such as "8".')] = None,
    cut: Annotated[str | None, opt('Kinds of pipeline cuts to try: some of "balanced,layers".')] = None,
    p2p: Annotated[
        str | None, opt('Kinds of pipeline messages to try: some of "overlapped,exchange,in turns,in step".')
    ] = None,
    n_best: Annotated[int | None, opt("Number of configurations to show (default: 3).", "--best")] = None,
    stability: Annotated[
        bool, opt("Run each configuration three more times, to mark results that are too close to rank.", "--stability")
    ] = False,
    jobs: Annotated[int | None, opt("Number of processes (default: one per core).", "--jobs", "-j")] = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
    csv: Annotated[Path | None, opt("Write all configurations as a CSV table.")] = None,
) -> None:
    """Recommend a configuration for a target.

    A configuration consists of workers, strategy, compression and batch size.

    Example: ddlsim recommend cloud-25g-16x8-v100 --model resnet50 --deadline "3 h" --samples 115e6

    To split a model: ddlsim recommend selene -m gpt3-175b -n 512 -b 1536 --precision fp16 --split
    """
    check_folder(csv)
    check_distinct(*clusters, csv=csv)
    counted = {"tensor": tensor, "pipeline": pipeline, "data": data, "micro_batch": micro_batch}
    counted |= {"interleave": interleave, "shard": shard}
    sizes: dict[str, Any] = {name: _counts(f"--{name.replace('_', '-')}", text) for name, text in counted.items()}
    sizes |= {"stage": _counts("--stage", stage, least=0), "recompute": _names(recompute)}
    wanted = passed(**sizes, cut=_names(cut), p2p=_names(p2p))
    splits = [replace(ddlsim.Splits(), **wanted)] if split or wanted else None
    asked = _question(clusters, allow_code)
    asked["clusters"] = priced = _priced(asked["clusters"], price or [])
    limits = passed(deadline=deadline, budget=budget, efficiency=efficiency, throughput=throughput, objective=objective)
    target = replace(asked.get("target", ddlsim.Target()), **limits) if limits else None
    tried = {"workers": _counts("--workers", workers), "batch_sizes": _counts("--batch-size", batch_size)}
    asked |= passed(model=model, target=target, samples=samples, n_best=n_best, **tried)
    asked |= passed(stability=stability or None, strategies=splits)
    base = asked.get("base") or ddlsim.Experiment(priced[0], asked.get("model", "resnet50"))
    computing = passed(device=device, precision=precision, optimizer=optimizer, stack=stack, flash=flash)
    asked["base"] = base.with_(**computing, **passed(spread=spread))
    plan = ddlsim.recommend(**asked, jobs=jobs)
    typer.echo(json.dumps(plan.to_dict(), indent=2) if as_json else str(plan))
    write_file(csv, lambda path: save_csv(plan.table, path))
    if plan.interrupted:
        raise typer.Exit(130)


def _question(clusters: list[str], allow_code: bool) -> dict[str, Any]:
    """Return the arguments in a question file, or those for choosing among these clusters."""
    from ddlsim.plain import read_toml
    from ddlsim.planner import load_question

    path = Path(clusters[0])
    asks = len(clusters) == 1 and path.suffix == ".toml" and path.is_file()
    if asks and "clusters" in read_toml(path, clusters[0]):
        return load_question(path, allow_code=allow_code)
    return {"clusters": clusters}


def _priced(clusters: list[Any], prices: list[str]) -> list[ddlsim.Cluster]:
    from ddlsim.run.costs import priced

    loaded = [ddlsim.load_cluster(cluster) for cluster in clusters]
    if len(prices) not in (0, 1, len(loaded)):
        raise ConfigError(
            f"--price is set {len(prices)} times for {len(loaded)} "
            f"cluster{'' if len(loaded) == 1 else 's'}; set it once for all clusters, or once per cluster in the "
            "same order"
        )
    if not prices:
        return loaded
    if len(prices) == 1:
        prices = prices * len(loaded)
    return [priced(cluster, price) for cluster, price in zip(loaded, prices, strict=True)]


def _counts(option: str, text: str | None, least: int = 1) -> list[int] | None:
    return None if text is None else whole_numbers(text, option, least)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]
