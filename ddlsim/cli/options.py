"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import ddlsim
from ddlsim.cli import completion


def opt(text: str, *names: str, offers: Callable[[str], list[str]] | Sequence[str] = ()) -> Any:
    """Return an option with its help; `offers` completes its value. By default, its name is that of the parameter."""

    def words(incomplete: str) -> list[str]:
        return list(offers) if not callable(offers) else offers(incomplete)

    return typer.Option(*names, help=text, autocompletion=words if offers else None)


def arg(text: str, offers: Callable[[str], list[str]] | None = None) -> Any:
    """Return a positional argument with its help; `offers` completes it."""
    return typer.Argument(help=text, autocompletion=offers)


Json = Annotated[bool, opt("Print JSON.", "--json")]
Source = Annotated[
    str,
    arg("Bundled cluster, topology file (with +key=value), or experiment file (.toml).", offers=completion.clusters),
]
Model = Annotated[
    str | None,
    opt("Bundled model or model file (with +option or +key=value).", "--model", "-m", offers=completion.models),
]
Strat = Annotated[
    str | None,
    opt(
        "Strategy: all-reduce, parallel+pipeline=8+tensor=8, ..., or package.module:Name.",
        "--strategy",
        "-s",
        offers=completion.strategies,
    ),
]
Algorithm = Annotated[
    str | None,
    opt(
        "All-reduce algorithm, or auto, or package.module:function.", "--algorithm", "-a", offers=completion.algorithms
    ),
]
AllowCode = Annotated[bool, opt("Allow files to import code (package.module:Name).", "--allow-code")]
Cost = Annotated[
    str | None,
    opt("Source of all-reduce times: simulated, calibrated (measured curve) or nccl.", offers=completion.COSTS),
]
Overlap = Annotated[
    str | None,
    opt(
        "Overlap of communication and computation: none, layer, ddp, horovod, priority, while-waiting, or module:Name.",
        offers=completion.OVERLAPS,
    ),
]
Servers = Annotated[int | None, opt("Number of parameter servers.")]
Placement = Annotated[
    str | None,
    opt(
        "Placement of parameter servers: own machines (own) or those of workers (colocated).",
        offers=completion.PLACEMENTS,
    ),
]
Batch = Annotated[
    int | None,
    opt("Samples per worker and step, or the global batch size for fsdp, parallel, ...", "--batch-size", "-b"),
]
Steps = Annotated[int | None, opt("Number of measured steps.")]
Device = Annotated[
    str | None, opt("Device of all workers: a name (see: ddlsim devices) or a device file.", offers=completion.devices)
]
Precision = Annotated[
    str | None, opt("Arithmetic precision: bf16, fp16, fp8, mxfp8, nvfp4, tf32 or fp32.", offers=completion.PRECISIONS)
]
Stack = Annotated[
    str | None, opt("Training software: megatron, torchtitan, ... (see: ddlsim stacks).", offers=completion.stacks)
]
Variation = Annotated[
    float | None,
    opt("Width of the distribution of devices' compute times; 0: equal (default: as in the stack).", "--spread"),
]
Flash = Annotated[bool | None, opt("Use fused attention (default: as in the stack).", "--flash/--no-flash")]
Optimizer = Annotated[
    str | None,
    opt("Optimizer, for time and memory: sgd, momentum, adam, lars or lamb.", offers=completion.OPTIMIZERS),
]
Seed = Annotated[int | None, opt("Seed of all random streams.")]


def passed(**options: Any) -> dict[str, Any]:
    """Return the options that are not None; a width of the distribution of compute times as the `speed` with it."""
    values = {name: value for name, value in options.items() if value is not None}
    return values | ({"speed": ddlsim.Spread(values.pop("spread"))} if "spread" in values else {})
