"""The `run` and `scaling` commands."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ddlsim
from ddlsim.bundled import split_options
from ddlsim.cli.application import app
from ddlsim.cli.options import (
    Algorithm,
    AllowCode,
    Batch,
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
    Source,
    Stack,
    Steps,
    Strat,
    Variation,
    opt,
    passed,
)
from ddlsim.cli.output import check_distinct, check_folder, check_picture, write_file, write_files
from ddlsim.errors import ConfigError
from ddlsim.plain import read_toml, whole_numbers
from ddlsim.printable import shown

if TYPE_CHECKING:
    from ddlsim.run.experiment import Experiment
    from ddlsim.run.result import Result
    from ddlsim.strategies import Strategy


@app.command()
def run(
    cluster_or_file: Source,
    model: Model = None,
    strategy: Strat = None,
    algorithm: Algorithm = None,
    cost: Cost = None,
    overlap: Overlap = None,
    servers: Servers = None,
    placement: Placement = None,
    batch_size: Batch = None,
    workers: Annotated[int | None, opt("Number of workers (default: all).", "--workers", "-n")] = None,
    steps: Steps = None,
    device: Device = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    stack: Stack = None,
    flash: Flash = None,
    spread: Variation = None,
    seed: Seed = None,
    allow_code: AllowCode = False,
    stability: Annotated[
        bool, opt("Report how much the throughput changes if inputs change by 1e-12.", "--stability")
    ] = False,
    bottleneck: Annotated[
        bool, opt("Also simulate a 10 % improvement of each part; for jobs, simulate each job alone.")
    ] = True,
    as_json: Json = False,
    trace: Annotated[Path | None, opt("Write a trace of the first steps for Perfetto (.json, .json.gz).")] = None,
    trace_whole: Annotated[
        bool, opt("Include all steps, workers and links in the trace (large file).", "--trace-whole")
    ] = False,
    timeline: Annotated[Path | None, opt("Plot a timeline (png, pdf, svg).")] = None,
    plot_cluster: Annotated[Path | None, opt("Plot the cluster with the utilisation of its links.")] = None,
    plot_learning: Annotated[Path | None, opt("Plot accuracy and losses.")] = None,
    write_to: Annotated[
        Path | None, opt("Write the experiment as a file for ddlsim run (.toml) or a Python script (.py).", "--write")
    ] = None,
    save: Annotated[Path | None, opt("Save the training run to this file, periodically and at its end.")] = None,
    resume: Annotated[Path | None, opt("Resume a saved training run.")] = None,
) -> None:
    """Simulate a run and report its bottleneck.

    With [training] in the experiment file, train the model; with [[jobs]], simulate several jobs.

    Example: ddlsim run cloud-25g-16x8-v100 --model resnet50 --batch-size 64 --workers 128
    """
    chosen = passed(model=model, batch_size=batch_size, workers=workers, steps=steps, spread=spread)
    chosen_strategy = get_strategy(
        strategy, algorithm=algorithm, cost=cost, overlap=overlap, servers=servers, placement=placement
    )
    chosen |= passed(device=device, strategy=chosen_strategy, optimizer=optimizer, stack=stack, flash=flash)
    chosen |= passed(precision=precision, seed=seed)
    if _has(cluster_or_file, {"jobs", "arrivals"}):
        others = passed(trace=trace, plot_cluster=plot_cluster, plot_learning=plot_learning, write=write_to)
        others |= passed(save=save, resume=resume, stability=stability or None, trace_whole=trace_whole or None)
        _run_jobs(cluster_or_file, allow_code, as_json, bottleneck, timeline, chosen | others)
        return
    experiment = _experiment(cluster_or_file, allow_code, chosen)
    for option, path in {"--plot-learning": plot_learning, "--save": save, "--resume": resume}.items():
        if path is not None and experiment.training is None:
            raise ConfigError(f"{option} has no effect without training; use a file with a [training] table")
    if steps is not None and experiment.training is not None:
        raise ConfigError("--steps has no effect on a training run; set epochs or updates in its [training] table")
    check_folder(trace)
    if trace_whole and trace is None:
        raise ConfigError("--trace-whole has no effect without --trace; add --trace trace.json.gz")
    for path in (timeline, plot_cluster, plot_learning):
        check_picture(path)
    pictures = {"timeline": timeline, "plot_cluster": plot_cluster, "plot_learning": plot_learning}
    check_distinct(write=write_to, save=save, trace=trace, **pictures)
    write_file(write_to, experiment.save)  # before the run, so that settings that cannot be saved are reported at once
    if resume is None:
        result = ddlsim.simulate(experiment, stability=stability, checkpoint=save)
    else:
        result = ddlsim.resume(resume, experiment, stability=stability, checkpoint=save)
    if bottleneck:
        result = _with_sensitivities(result)
    typer.echo(result.to_json() if as_json else str(result))
    outputs: list[tuple[Path | None, Callable[[Path], object]]] = [
        (trace, lambda path: _trace(result, path, trace_whole)),
        (timeline, result.plot_timeline),
        (plot_cluster, result.plot_cluster),
        (plot_learning, result.plot_learning),
    ]
    if save is not None and result.can_be_saved:
        typer.echo(f"saved {save}; continue with --resume {save}", err=True)
    if result.interrupted:  # figures would simulate the whole run again
        raise typer.Exit(130)
    write_files(*outputs)


def _run_jobs(
    file: str, allow_code: bool, as_json: bool, bottleneck: bool, timeline: Path | None, others: dict[str, object]
) -> None:
    """Simulate a file of jobs and, if slow-downs are requested, each job separately."""
    for option in others:
        name = "spread" if option == "speed" else option.replace("_", "-")
        is_field = any(field.name == option for field in dataclasses.fields(ddlsim.Experiment))
        remedy = "set it in the experiment of each job" if is_field else f"leave --{name} out"
        raise ConfigError(f"--{name} has no effect on {file}, which describes several jobs; {remedy}")
    check_picture(timeline)
    jobs = ddlsim.load_jobs(file, allow_code=allow_code).simulate(timeline=timeline is not None)
    if bottleneck and not jobs.interrupted:
        try:
            _ = jobs.slowdowns
        except KeyboardInterrupt:
            jobs = dataclasses.replace(jobs, interrupted=True)
    typer.echo(jobs.to_json() if as_json else str(jobs))
    write_file(timeline, jobs.plot_timeline)
    if jobs.interrupted:
        raise typer.Exit(130)


def _trace(result: Result, path: Path, full: bool) -> None:
    """Write a trace, and report omitted parts on stderr."""
    left_out = result.save_trace(path, whole=full)
    if left_out:
        more = "" if full else "; use --trace-whole to include all"
        typer.echo(shown(f"{path} does not contain {left_out}{more}"), err=True)


def _with_sensitivities(result: Result) -> Result:
    """Compute the sensitivities for the output; after an interrupt, return the result without them."""
    from rich.console import Console

    console = Console(stderr=True)
    what = "simulating 10 % improvements of each part (Ctrl-C skips them)"
    try:
        with console.status(what) if console.is_terminal else nullcontext():
            result.sensitivities()
            _ = result.known_stability
    except KeyboardInterrupt:
        return dataclasses.replace(result, interrupted=True)
    return result


@app.command()
def scaling(
    cluster_or_file: Source,
    workers: Annotated[str, opt('Numbers of workers, such as "1,8,16,32".', "--workers", "-n")],
    model: Model = None,
    strategy: Strat = None,
    algorithm: Algorithm = None,
    cost: Cost = None,
    overlap: Overlap = None,
    servers: Servers = None,
    placement: Placement = None,
    batch_size: Batch = None,
    steps: Steps = None,
    device: Device = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    stack: Stack = None,
    flash: Flash = None,
    spread: Variation = None,
    seed: Seed = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
    plot: Annotated[Path | None, opt("Plot throughput and efficiency (png, pdf, svg).")] = None,
) -> None:
    """Simulate a run with different numbers of workers.

    Reports throughput and efficiency.

    Example: ddlsim scaling cloud-25g-16x8-v100 --model resnet50 --workers 1,8,16,32,64,128 --plot scaling.png
    """
    from ddlsim.report.progress import counted
    from ddlsim.report.summary import scaling_rows, scaling_table
    from ddlsim.run.simulate import until_interrupt

    numbers = whole_numbers(workers, "--workers")
    check_picture(plot)
    chosen_strategy = get_strategy(
        strategy, algorithm=algorithm, cost=cost, overlap=overlap, servers=servers, placement=placement
    )
    chosen = passed(strategy=chosen_strategy, model=model, batch_size=batch_size, steps=steps, precision=precision)
    chosen |= passed(spread=spread, device=device, optimizer=optimizer, stack=stack, flash=flash, seed=seed)
    experiment = _experiment(cluster_or_file, allow_code, chosen)
    counts = counted(numbers, len(numbers), "simulating")
    results, interrupted = until_interrupt(ddlsim.scaling(experiment, [n])[0] for n in counts)
    typer.echo(json.dumps(scaling_rows(results), indent=2) if as_json else scaling_table(results))
    if plot is not None:
        from ddlsim.report.plots import scaling as draw

        write_file(plot, lambda path: draw(results, path))
    if interrupted:
        raise typer.Exit(130)


def _experiment(file: str, allow_code: bool, options: dict[str, object]) -> Experiment:
    """Return the experiment in a file, or one on a cluster, with the given options set."""
    is_cluster = Path(file).suffix != ".toml" or _has(file, {"generator", "hosts", "links", "nodes", "edges"})
    if not is_cluster:
        experiment = ddlsim.load_experiment(file, allow_code=allow_code)
    else:
        experiment = ddlsim.Experiment(cluster=file)
    if allow_code and isinstance(model := options.get("model"), str):
        options["model"] = ddlsim.load_model(model, allow_code=True)
    return experiment.with_(**options)


def _has(file: str, keys: set[str]) -> bool:
    """Return whether a file, if it is TOML, has one of the keys."""
    path = Path(file)
    if path.suffix != ".toml":
        return False
    if not os.path.isfile(path):
        raise ConfigError(f"{file}: no such file or bundled cluster (see: ddlsim topologies)")
    return bool(keys & read_toml(path, file).keys())


def get_strategy(name: str | None, **options: object) -> Strategy | None:
    """Return the strategy described by the options. Raises ConfigError for options that it does not have."""
    options = passed(**options)
    if name is None and not options:
        return None
    from ddlsim.run.files import strategy_of

    text = name or ("parameter-server" if options.keys() & {"servers", "placement"} else "all-reduce")
    return strategy_of(text, f"--strategy {split_options(text)[0]}", options, allow_code=True)
