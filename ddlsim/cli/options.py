"""The options that several commands share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ddlsim.cli import completing
from ddlsim.errors import ConfigError, shown

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Source = Annotated[
    str,
    typer.Argument(
        help="A bundled cluster or a topology file (with +key=value), or an experiment file (.toml).",
        metavar="WHAT",
        autocompletion=completing.clusters,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Bundled model or model file, with +option or +key=value.",
        autocompletion=completing.models,
    ),
]
Strat = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help="all-reduce, parallel+pipeline=8+tensor=8, ..., or package.module:Name.",
        autocompletion=completing.strategies,
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        "-a",
        help="All-reduce algorithm, auto, or package.module:function.",
        autocompletion=completing.algorithms,
    ),
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Let files name code to import, as package.module:Name.")]
Cost = Annotated[
    str | None,
    typer.Option(
        "--cost",
        help="What all-reduces cost: simulated, calibrated (measured curve) or nccl.",
        autocompletion=completing.words(*completing.COSTS),
    ),
]
Overlap = Annotated[
    str | None,
    typer.Option(
        "--overlap",
        help="none, layer, ddp, horovod, priority, while-waiting or module:Name.",
        autocompletion=completing.words(*completing.OVERLAPS),
    ),
]
Servers = Annotated[int | None, typer.Option("--servers", help="Number of parameter servers.")]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement",
        help="Parameter servers: own or colocated.",
        autocompletion=completing.words(*completing.PLACEMENTS),
    ),
]
Batch = Annotated[int | None, typer.Option("--batch-size", "-b", help="Samples per worker and step.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps to measure.")]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", help="fp32, tf32, fp16 or bf16.", autocompletion=completing.words(*completing.PRECISIONS)
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="Optimizer whose time and memory count: sgd, momentum, adam, lars or lamb.",
        autocompletion=completing.words(*completing.OPTIMIZERS),
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of all random streams.")]


def counts(option: str, text: str, least: int = 1) -> list[int]:
    """Return "8,16" as numbers. Raises ConfigError, naming the option, for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch("[0-9]{1,9}", part) and int(part) >= least for part in parts):
        raise ConfigError(f"{option} = {shown(text)}: must be numbers such as 8,16,32")
    return [int(part) for part in parts]
