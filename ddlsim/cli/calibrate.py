"""The `calibrate` command, which fits a cluster to measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ddlsim.cli import completion
from ddlsim.cli.application import app
from ddlsim.cli.options import (
    Algorithm,
    AllowCode,
    Cost,
    Device,
    Flash,
    Json,
    Model,
    Optimizer,
    Overlap,
    Placement,
    Precision,
    Seed,
    Servers,
    Stack,
    Strat,
    Variation,
    arg,
    opt,
    passed,
)
from ddlsim.cli.output import check_distinct, check_folder, check_page, check_picture, write_file, write_files
from ddlsim.cli.run import get_strategy
from ddlsim.errors import ConfigError, shown
from ddlsim.named_code import imported
from ddlsim.output_files import json_rows, save_csv
from ddlsim.readable import percent
from ddlsim.units import as_number

if TYPE_CHECKING:
    from ddlsim.validation import Calibration
    from ddlsim.validation.sources import Reader


@app.command()
def validate(
    runs: Annotated[Path, arg("CSV file of measured runs.")],
    cluster: Annotated[
        str,
        opt("Bundled cluster or, better, a calibrated cluster file.", "--cluster", "-c", offers=completion.clusters),
    ],
    model: Model = None,
    strategy: Strat = None,
    algorithm: Algorithm = None,
    cost: Cost = None,
    overlap: Overlap = None,
    servers: Servers = None,
    placement: Placement = None,
    device: Device = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    stack: Stack = None,
    flash: Flash = None,
    spread: Variation = None,
    seed: Seed = None,
    fit_on: Annotated[str | None, opt('Fit to the runs that satisfy this condition, such as "workers <= 4".')] = None,
    fit: Annotated[
        str | None, opt("Quantities to fit with --fit-on: compute, network, or both (default: compute,network).")
    ] = None,
    tolerance: Annotated[
        str | None, opt("Exit with code 1 if the mean error of held-out runs exceeds this share, such as 10%.")
    ] = None,
    plot: Annotated[Path | None, opt("Plot predicted against measured throughput.")] = None,
    table: Annotated[Path | None, opt("Write all runs as CSV.")] = None,
    html: Annotated[Path | None, opt("Write an HTML page with the summary, the plot and all runs.")] = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Compare measured training runs with their simulation.

    Strategy and precision apply to runs whose row leaves them empty.

    Example: ddlsim validate runs.csv --cluster calibrated.toml --model resnet50 --fit-on "workers <= 4" --tolerance 10%
    """
    check_folder(table)
    check_page(html)
    check_picture(plot)
    check_distinct(runs, cluster, table=table, html=html, plot=plot)
    limit = None if tolerance is None else _share(tolerance)
    from ddlsim import Experiment
    from ddlsim.validation import read_runs
    from ddlsim.validation import validate as compare

    if fit is not None and fit_on is None:
        raise ConfigError(f'--fit {fit} has no effect without --fit-on; add --fit-on "workers <= 4", for example')
    quantities = ("compute", "network") if fit is None else [name.strip() for name in fit.split(",")]
    chosen_strategy = get_strategy(
        strategy, algorithm=algorithm, cost=cost, overlap=overlap, servers=servers, placement=placement
    )
    chosen = passed(strategy=chosen_strategy, device=device, precision=precision, optimizer=optimizer, stack=stack)
    base = Experiment(cluster, **chosen, **passed(flash=flash, seed=seed, spread=spread))
    measured = read_runs(runs, allow_code=allow_code, strategy=base.strategy)
    outcome = compare(measured, cluster, model, fit_on=fit_on, fit=quantities, base=base)
    if as_json:
        sums = {
            used: None if s is None else vars(s)
            for used, s in (("fit", outcome.summary(fitted=True)), ("held_out", outcome.summary(fitted=False)))
        }
        about = {"summary": sums, "declined": len(outcome.declined), "error": outcome.error}
        typer.echo(json.dumps({"rows": json_rows(outcome.table), **about}, indent=2))
    else:
        typer.echo(str(outcome))
    write_files(
        (plot, outcome.plot),
        (html, lambda path: outcome.save_html(path, f"{runs.name} on {cluster}")),
        (table, lambda path: save_csv(outcome.table, path)),
    )
    if limit is not None and not outcome.within(limit):
        typer.echo(f"mean absolute error {percent(outcome.error)} exceeds the tolerance of {percent(limit)}", err=True)
        raise typer.Exit(1)


def _share(text: str) -> float:
    """Return "10%" or "0.1" as 0.1."""
    number, percent, rest = text.strip().partition("%")
    value = (as_number(number) or math.nan) / (100.0 if percent else 1.0)
    if rest or not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"--tolerance {text!r}: must be a positive fraction or percentage, such as 0.1 or 10%")
    if value > 1.0 and not percent:
        raise ConfigError(f"--tolerance {text!r}: a fraction must be at most 1; write {number}% for a percentage")
    return value


@app.command()
def calibrate(
    measurements: Annotated[list[str], arg("Output folders of ddlsim.measure, tables, benchmark output or traces.")],
    cluster: Annotated[
        str | None,
        opt("Measured cluster: a bundled cluster or a topology file.", "--cluster", "-c", offers=completion.clusters),
    ] = None,
    stack: Annotated[
        str | None,
        opt("Fit this software stack to training runs (CSV), traces and collectives.", offers=completion.stacks),
    ] = None,
    strategy: Annotated[
        str | None, opt("Strategy of traced runs (with --stack).", "--strategy", "-s", offers=completion.strategies)
    ] = None,
    batch: Annotated[
        int | None, opt("Batch size of traced runs, as defined by the strategy (with --stack).", "--batch", "-b")
    ] = None,
    out: Annotated[Path | None, opt("Write the calibrated cluster or stack file.", "--out", "-o")] = None,
    algorithm: Annotated[
        list[str] | None, opt("Algorithm of a collective: all_reduce=ring (repeatable).", "--algorithm", "-a")
    ] = None,
    backend: Annotated[str | None, opt("Use only rows of this backend: mpi, gloo, nccl, ...")] = None,
    hosts: Annotated[int | None, opt("Number of machines, if a log does not contain it.")] = None,
    operation: Annotated[str | None, opt("Measured operation, if a log does not contain it: all_reduce, ...")] = None,
    ranks: Annotated[int | None, opt("Number of ranks, if a log does not contain it.")] = None,
    model: Annotated[
        str | None, opt("Trained model, if a log does not contain it.", "--model", "-m", offers=completion.models)
    ] = None,
    software: Annotated[str | None, opt('Software version, if a log does not contain it: "NCCL 2.18.3".')] = None,
    reader: Annotated[str | None, opt("Function that reads other file formats: package.module:function.")] = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Fit a cluster or a software stack to measurements.

    Fits latency, bandwidth, overhead and compute time of a cluster, and reports their uncertainties.

    Example: ddlsim calibrate measured/ iperf.json --cluster my-cluster.toml --out calibrated.toml

    With --stack: ddlsim calibrate runs.csv --stack torchtitan --out my-stack.toml
    """
    check_folder(out)
    if out is not None and out.suffix != ".toml":
        raise ConfigError(
            f"--out {out}: calibrated clusters and stacks are TOML files; choose a name that ends in .toml"
        )
    check_distinct(*measurements, *([] if cluster is None else [cluster]), out=out)
    cluster_options: dict[str, object] = {"algorithm": algorithm, "backend": backend, "hosts": hosts, "ranks": ranks}
    cluster_options |= {"operation": operation, "software": software, "reader": reader}
    stack_options = {"strategy": strategy, "batch": batch, "allow-code": allow_code or None}
    for name, value in (stack_options if stack is None else cluster_options).items():
        if value is not None:
            why = "without" if stack is None else "with"
            raise ConfigError(f"--{name} has no effect {why} --stack; leave --{name} out")
    if stack is not None:
        from ddlsim.validation import calibrate_stack, read_runs

        sources = (read_runs(file, allow_code=True) if file.endswith(".csv") else [file] for file in measurements)
        files = [item for source in sources for item in source] if allow_code else measurements
        fitted = calibrate_stack(files, stack, cluster, model, strategy=strategy, batch_size=batch)
        typer.echo(json.dumps(fitted.to_dict(), indent=2) if as_json else str(fitted))
        write_file(out, fitted.stack.save)
        return
    if cluster is None:
        raise ConfigError(
            "calibrate: set --cluster to the measured cluster, or --stack to fit a software stack to measured runs"
        )
    from ddlsim.validation import calibrate as fit
    from ddlsim.validation.calibration import warnings_of

    facts: dict[str, Any] = {"backend": backend, "operation": operation, "model": model, "version": software}
    facts |= {"n_hosts": hosts, "n_ranks": ranks}
    function = None if reader is None else _reader(reader)
    named = _algorithms(algorithm or [])
    calibration = fit(list(measurements), cluster, algorithms=named, reader=function, **facts)
    typer.echo(json.dumps(_plain(calibration), indent=2) if as_json else str(calibration))
    if as_json:  # the text starts with them
        for warning in warnings_of(calibration):
            typer.echo(warning, err=True)
    write_file(out, lambda path: calibration.save(path, cluster))


def _reader(name: str) -> Reader:
    function = imported(name, "--reader", "function")
    if not callable(function):
        raise ConfigError(f"--reader {name!r}: must be a function that takes a path, not {shown(function)}")
    return cast("Reader", function)


def _algorithms(texts: list[str]) -> dict[str, str]:
    algorithms: dict[str, str] = {}
    for text in texts:
        kind, equals, name = text.partition("=")
        if not (kind and equals and name):
            raise ConfigError(f"--algorithm {text!r}: must be kind=algorithm, such as all_reduce=ring")
        algorithms[kind] = name
    return algorithms


_OF_CURVES = ("operation", "backend", "inside", "per_message", "sizes", "per_byte", "spread", "nbytes", "ranks")
_OF_COMPUTE = ("model", "c0", "c1", "batch_sizes")


def _plain(calibration: Calibration) -> dict[str, object]:
    return {
        "cluster": calibration.cluster.name,
        "parameters": [vars(p) | {"file": p.file if p.file < float("inf") else None} for p in calibration.parameters],
        "spread": calibration.spread,
        "curves": [{name: getattr(curve, name) for name in _OF_CURVES} for curve in calibration.curves],
        "compute": [{name: getattr(line, name) for name in _OF_COMPUTE} for line in calibration.compute],
        "jitter": None if calibration.jitter is None else str(calibration.jitter),
        "residuals": [vars(r) | {"error": r.error} for r in calibration.residuals],
        "notes": calibration.notes,
    }
