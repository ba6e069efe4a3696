"""The command that fits a cluster to measurements: `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ddlsim.cli import completing
from ddlsim.cli.application import app
from ddlsim.cli.options import Json
from ddlsim.cli.output import check_folder, write_file
from ddlsim.errors import ConfigError, shown
from ddlsim.named_code import imported

if TYPE_CHECKING:
    from ddlsim.validation import Calibration
    from ddlsim.validation.sources import Reader


@app.command()
def calibrate(
    measurements: Annotated[
        list[str], typer.Argument(help="Folders of ddlsim.measure, tables, benchmark output, traces.", metavar="FILES")
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            "-c",
            help="The cluster that was measured: a file or bundled.",
            autocompletion=completing.clusters,
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the calibrated cluster file.")] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option("--algorithm", "-a", help="Of a collective: all_reduce=ring (repeatable).")
    ] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="Use only rows of mpi, gloo, nccl, ...")] = None,
    hosts: Annotated[int | None, typer.Option("--hosts", help="Machines, where a log does not say it.")] = None,
    operation: Annotated[str | None, typer.Option("--operation", help="Of a log without it: all_reduce, ...")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="That took part, where a log does not say it.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="What was trained, where a log has none.", autocompletion=completing.models),
    ] = None,
    software: Annotated[
        str | None, typer.Option("--software", help='What was measured, where a log has none: "NCCL 2.18.3".')
    ] = None,
    reader: Annotated[
        str | None, typer.Option("--reader", help="What reads files of other kinds: package.module:function.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit latency, bandwidth, overhead and compute time to measurements, and say how sure they are.

    Example: ddlsim calibrate measured/ iperf.json --cluster my-cluster.toml --out calibrated.toml
    """
    check_folder(out)
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: calibrated clusters are TOML files; name one that ends in .toml")
    from ddlsim.validation import calibrate as fit
    from ddlsim.validation.calibration_text import warnings

    found = fit(
        list(measurements), cluster, algorithms=_algorithms(algorithm or []), backend=backend, n_hosts=hosts,
        model=model, reader=None if reader is None else _reader(reader), operation=operation, n_ranks=ranks,
        version=software,
    )  # fmt: skip
    typer.echo(json.dumps(_plain(found), indent=2) if as_json else str(found))
    if as_json:  # text begins with them
        for warning in warnings(found):
            typer.echo(warning, err=True)
    if out is not None:
        write_file(out, lambda path: found.save(path, cluster))


def _reader(name: str) -> Reader:
    function = imported(name, "--reader", "function")
    if not callable(function):
        raise ConfigError(f"--reader {name!r}: is {shown(function)}; name a function of the path")
    return cast("Reader", function)


def _algorithms(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        kind, equals, name = text.partition("=")
        if not (kind and equals and name):
            raise ConfigError(f"--algorithm {text!r}: write kind=algorithm, such as all_reduce=ring")
        found[kind] = name
    return found


def _plain(found: Calibration) -> dict[str, object]:
    return {
        "cluster": found.cluster.name,
        "parameters": [vars(p) | {"file": p.file if p.file < float("inf") else None} for p in found.parameters],
        "spread": found.spread,
        "curves": [
            {"operation": c.operation, "backend": c.backend, "inside": c.inside, "per_message": c.per_message,
             "sizes": c.sizes, "per_byte": c.per_byte, "spread": c.spread, "nbytes": c.nbytes, "ranks": c.ranks}
            for c in found.curves
        ],
        "compute": [{"model": c.model, "c0": c.c0, "c1": c.c1, "batch_sizes": c.batch_sizes} for c in found.compute],
        "jitter": None if found.jitter is None else str(found.jitter),
        "residuals": [vars(r) | {"error": r.error} for r in found.residuals],
        "notes": found.notes,
    }  # fmt: skip
