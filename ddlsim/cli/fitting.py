"""The command that looks at memory: `fits`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import ddlsim
from ddlsim.cli import completing
from ddlsim.cli.application import app
from ddlsim.cli.options import Json


@app.command()
def fits(
    model: Annotated[str, typer.Argument(help="A bundled model or a file.", autocompletion=completing.models)],
    device: Annotated[
        str, typer.Argument(help="A device of the catalogue (ddlsim devices).", autocompletion=completing.devices)
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Samples of a micro-batch of a rank.")] = 1,
    precision: Annotated[
        str,
        typer.Option(
            "--precision", help="fp32, tf32, fp16 or bf16.", autocompletion=completing.words(*completing.PRECISIONS)
        ),
    ] = "fp32",
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="sgd, momentum, adam, lars or lamb.",
            autocompletion=completing.words(*completing.OPTIMIZERS),
        ),
    ] = "momentum",
    gradients: Annotated[str | None, typer.Option("--gradient-dtype", help="fp32, as Megatron-LM keeps them.")] = None,
    zero: Annotated[int, typer.Option("--zero", help="ZeRO stage, 1 to 3; 3 is FSDP.")] = 0,
    shards: Annotated[int, typer.Option("--shards", help="Ranks that ZeRO shares over.")] = 1,
    tensor: Annotated[int, typer.Option("--tensor", help="Ranks that layers are split over.")] = 1,
    sequence: Annotated[bool, typer.Option("--sequence", help="Sequence parallelism.")] = False,
    pipeline: Annotated[int, typer.Option("--pipeline", help="Stages.")] = 1,
    micro_batches: Annotated[int | None, typer.Option("--micro-batches", help="Of a step, in the pipeline.")] = None,
    interleave: Annotated[int, typer.Option("--interleave", help="Chunks of a stage.")] = 1,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective, full or segments.")] = "none",
    flash: Annotated[bool, typer.Option("--flash", help="Flash attention.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="The optimizer's state is in the host's memory.")] = False,
    workspace: Annotated[str | None, typer.Option("--workspace", help='Of convolutions, e.g. "64 MiB".')] = None,
    as_json: Json = False,
) -> None:
    """Say whether a model can be trained on a device, and what would make it fit.

    Example: ddlsim fits gpt2-xl a100-40g -b 8 --precision fp16 --optimizer adam
    """
    fit = ddlsim.fits(
        model, device, batch_size, precision, optimizer, gradient_dtype=gradients, zero=zero, shards=shards,
        tensor=tensor, sequence=sequence, pipeline=pipeline, micro_batches=micro_batches, interleave=interleave,
        recompute=recompute, flash=flash, offload=offload, workspace=workspace,
    )  # fmt: skip
    typer.echo(json.dumps(fit.to_dict(), indent=1) if as_json else str(fit))
