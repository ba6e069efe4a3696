"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "Algorithm", "Batch", "Cost", "Json", "Model", "Overlap", "Placement", "Precision", "Seed", "Servers", "Source",
    "Steps", "Strat",
]  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Source = Annotated[
    str, typer.Argument(help="A bundled cluster, a topology file, or an experiment file (.toml).", metavar="WHAT")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Bundled model or model file.")]
Strat = Annotated[
    str | None, typer.Option("--strategy", "-s", help="all-reduce, parameter-server, local-sgd, ...")
]
Algorithm = Annotated[str | None, typer.Option("--algorithm", "-a", help="All-reduce algorithm, or auto.")]
Cost = Annotated[
    str | None, typer.Option("--cost", help="What all-reduces cost: simulated, calibrated (measured curve) or nccl.")
]
Overlap = Annotated[str | None, typer.Option("--overlap", help="none, layer, ddp, horovod or priority.")]
Servers = Annotated[int | None, typer.Option("--servers", help="Number of parameter servers.")]
Placement = Annotated[str | None, typer.Option("--placement", help="Parameter servers: own or colocated.")]
Batch = Annotated[int | None, typer.Option("--batch-size", "-b", help="Samples per worker and step.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps to measure.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of all random streams.")]
