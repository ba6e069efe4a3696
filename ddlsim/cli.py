"""The command line: a thin face over the Python API. Heavy imports happen inside the commands."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import ddlsim
from ddlsim.errors import ConfigError, DdlsimError, unknown_name

if TYPE_CHECKING:
    from ddlsim.run.experiment import Experiment
    from ddlsim.run.result import Result
    from ddlsim.strategies import Strategy

__all__ = ["app", "main"]

app = typer.Typer(
    help="Simulate distributed training on a cluster before renting it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
show = typer.Typer(help="Show a topology or a model in detail.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(show, name="show")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Source = Annotated[
    str, typer.Argument(help="A bundled cluster, a topology file, or an experiment file (.toml).", metavar="WHAT")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Bundled model or model file.")]
Strat = Annotated[
    str | None, typer.Option("--strategy", "-s", help="all-reduce, parameter-server or async-parameter-server.")
]
Algorithm = Annotated[str | None, typer.Option("--algorithm", "-a", help="All-reduce algorithm, or auto.")]
Overlap = Annotated[str | None, typer.Option("--overlap", help="none, layer, ddp, horovod or priority.")]
Servers = Annotated[int | None, typer.Option("--servers", help="Number of parameter servers.")]
Placement = Annotated[str | None, typer.Option("--placement", help="Parameter servers: own or colocated.")]
Batch = Annotated[int | None, typer.Option("--batch-size", "-b", help="Samples per worker and step.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps to measure.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, tf32, fp16 or bf16.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of all random streams.")]


# ---------------------------------------------------------------- running


@app.command()
def run(
    what: Source,
    model: Model = None,
    strategy: Strat = None,
    algorithm: Algorithm = None,
    overlap: Overlap = None,
    servers: Servers = None,
    placement: Placement = None,
    batch_size: Batch = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Number of workers (default: all).")] = None,
    steps: Steps = None,
    precision: Precision = None,
    seed: Seed = None,
    as_json: Json = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a trace for Perfetto.")] = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Draw a timeline (png, pdf, svg).")] = None,
    plot_cluster: Annotated[Path | None, typer.Option("--plot-cluster", help="Draw the use of the links.")] = None,
) -> None:
    """Simulate one run and say what limits it.

    Example: ddlsim run cloud-25g-16x8-v100 --model resnet50 --batch-size 64 --workers 128
    """
    experiment = _experiment(
        what, strategy=_strategy(strategy, algorithm, overlap, servers, placement), model=model, batch_size=batch_size,
        workers=workers, steps=steps, precision=precision, seed=seed,
    )  # fmt: skip
    for path in (trace, timeline, plot_cluster):
        _check_folder(path)
    result = _with_sensitivities(ddlsim.simulate(experiment))
    typer.echo(result.to_json() if as_json else str(result))
    outputs: list[tuple[Path | None, Callable[[Path], object]]] = [
        (trace, result.save_trace), (timeline, result.plot_timeline), (plot_cluster, result.plot_cluster),
    ]  # fmt: skip
    if result.interrupted:  # pictures would simulate it all again
        raise typer.Exit(130)
    for path, write in outputs:
        if path is not None:
            _write(path, write)


def _with_sensitivities(result: Result) -> Result:
    """Work out what the output shows besides the run itself; an interrupt meanwhile leaves the run's own numbers."""
    try:
        _ = result.sensitivities
    except KeyboardInterrupt:
        return dataclasses.replace(result, interrupted=True)
    return result


@app.command()
def scaling(
    what: Source,
    workers: Annotated[str, typer.Option("--workers", "-n", help='Numbers of workers, e.g. "1,8,16,32".')],
    model: Model = None,
    strategy: Strat = None,
    algorithm: Algorithm = None,
    overlap: Overlap = None,
    servers: Servers = None,
    placement: Placement = None,
    batch_size: Batch = None,
    steps: Steps = None,
    precision: Precision = None,
    seed: Seed = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw throughput and efficiency.")] = None,
) -> None:
    """Simulate with several numbers of workers and show how it scales.

    Example: ddlsim scaling cloud-25g-16x8-v100 --model resnet50 --workers 1,8,16,32,64,128 --plot scaling.png
    """
    from ddlsim.report.summary import scaling_rows, scaling_table

    counts = _counts(workers)
    _check_folder(plot)
    experiment = _experiment(
        what, strategy=_strategy(strategy, algorithm, overlap, servers, placement), model=model, batch_size=batch_size,
        steps=steps, precision=precision, seed=seed, workers=None,
    )  # fmt: skip
    results, interrupted = _each(experiment, counts)
    typer.echo(json.dumps(scaling_rows(results), indent=2) if as_json else scaling_table(results))
    if plot is not None and results:
        from ddlsim.report.plots import scaling as draw

        _write(plot, lambda path: draw(results, path))
    if interrupted:
        raise typer.Exit(130)


def _each(experiment: Experiment, counts: list[int]) -> tuple[list[Result], bool]:
    """Simulate one count after the other behind a progress bar; keep what is done when interrupted."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    results: list[Result] = []
    try:
        for n in track(counts, "simulating", console=console, disable=not console.is_terminal, transient=True):
            results += ddlsim.scaling(experiment, [n])
            if results[-1].interrupted:
                return results[:-1], True
    except KeyboardInterrupt:
        return results, True
    return results, False


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--workers = {text!r}: must be numbers of workers such as 1,8,16,32")
    return [int(part) for part in parts]


def _experiment(
    what: str,
    *,
    strategy: Strategy | None,
    model: str | None,
    batch_size: int | None,
    workers: int | None,
    steps: int | None,
    precision: str | None,
    seed: int | None,
) -> Experiment:
    """Return the experiment of a file, or one on a cluster, with the given options put in."""
    given = {
        "strategy": strategy, "model": model, "batch_size": batch_size, "workers": workers, "steps": steps,
        "precision": precision, "seed": seed,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if _is_experiment(what):
        return ddlsim.load_experiment(what).with_(**options)
    return ddlsim.Experiment(cluster=what, model=model or "resnet50").with_(**options)


def _is_experiment(what: str) -> bool:
    """Tell an experiment file from a topology, which has a generator or lists of hosts and links."""
    import tomllib

    path = Path(what)
    if path.suffix != ".toml":
        return False
    if not path.is_file():
        raise ConfigError(f"{what}: no such file; give a path or a bundled cluster (see: ddlsim topologies)")
    try:
        return not {"generator", "hosts", "links"} & tomllib.loads(path.read_text(encoding="utf-8")).keys()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return False  # the reader of topologies says what is wrong


def _strategy(
    name: str | None, algorithm: str | None, overlap: str | None, servers: int | None, placement: str | None
) -> Strategy | None:
    """Return the strategy that the options describe; an option that it does not have is an error."""
    given = {"algorithm": algorithm, "overlap": overlap, "servers": servers, "placement": placement}
    options = {option: value for option, value in given.items() if value is not None}
    if name is None and not options:
        return None
    takes: dict[str, tuple[Callable[..., Strategy], tuple[str, ...]]] = {
        "all-reduce": (ddlsim.AllReduce, ("algorithm", "overlap")),
        "parameter-server": (ddlsim.ParameterServer, ("servers", "placement", "overlap")),
        "async-parameter-server": (ddlsim.AsyncParameterServer, ("servers", "placement")),
    }
    chosen = name or ("parameter-server" if servers or placement else "all-reduce")
    if chosen not in takes:
        raise unknown_name("strategy", chosen, takes)
    make, fields = takes[chosen]
    for option in options:
        if option not in fields:
            raise ConfigError(
                f"--{option} has no effect with --strategy {chosen}; it takes {', '.join('--' + f for f in fields)}"
            )
    return make(**options)


def _check_folder(path: Path | None) -> None:
    """Find out before a long simulation that its output has nowhere to go."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {str(path.parent)!r}; create it first")


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    typer.echo(f"wrote {path}", err=True)


# ---------------------------------------------------------------- looking things up


@app.command()
def topologies(as_json: Json = False) -> None:
    """List the bundled clusters."""
    rows: list[dict[str, object]] = []
    for name in ddlsim.cluster_names():
        cluster = ddlsim.load_cluster(name)
        rows.append({"name": name, "workers": len(cluster.workers), "machines": len(cluster.host_names),
                     "title": cluster.title})  # fmt: skip
    _table(rows, as_json)


@app.command()
def models(as_json: Json = False) -> None:
    """List the bundled models."""
    from ddlsim.report.numbers import si, size

    rows: list[dict[str, object]] = []
    for name in ddlsim.model_names():
        model = ddlsim.load_model(name)
        numbers: dict[str, object] = {
            "parameters": model.n_params if as_json else f"{model.n_params:,}",
            "flops": model.flops if as_json else si(model.flops, "FLOP"),
            "gradient_nbytes": model.gradient_nbytes() if as_json else size(model.gradient_nbytes()),
        }
        rows.append({"name": name, **numbers, "title": model.title})
    _table(rows, as_json)


@app.command()
def devices(as_json: Json = False) -> None:
    """List the device catalogue."""
    from ddlsim.report.numbers import si, size

    rows: list[dict[str, object]] = []
    for name in ddlsim.device_names():
        device = ddlsim.load_device(name)
        peak = dict(device.peak_flops)
        rows.append(
            {
                "name": name,
                "peak": peak if as_json else ", ".join(f"{p} {si(v, 'FLOP/s', 3)}" for p, v in peak.items()),
                "memory": device.memory_nbytes if as_json else size(device.memory_nbytes),
                "title": device.title,
            }
        )
    _table(rows, as_json)


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the collective algorithms."""
    from ddlsim.collectives import KINDS

    rows: list[dict[str, object]] = []
    for kind in KINDS:
        names = ddlsim.algorithm_names(kind)
        rows.append({"kind": kind, "algorithms": names if as_json else ", ".join(names)})
    _table(rows, as_json)


@show.command("topology")
def show_topology(
    name: Annotated[str, typer.Argument(help="A bundled cluster or a file.")],
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it (png, pdf, svg).")] = None,
) -> None:
    """Show a cluster: machines, devices, links, sources.

    Example: ddlsim show topology dgx1-v100 --plot dgx1.png
    """
    cluster = ddlsim.load_cluster(name)
    if as_json:
        from networkx import node_link_data

        typer.echo(json.dumps(node_link_data(cluster.to_graph(), edges="edges"), indent=1))
    else:
        typer.echo(cluster.summary())
    if plot is not None:
        from ddlsim.report.cluster_plot import cluster_plot

        _write(plot, lambda path: cluster_plot(cluster, path))


@show.command("model")
def show_model(
    name: Annotated[str, typer.Argument(help="A bundled model or a file.")], as_json: Json = False
) -> None:
    """Show a model: layers, shapes, parameters, FLOPs, bytes.

    Example: ddlsim show model resnet50
    """
    from ddlsim.report.numbers import si, size

    model = ddlsim.load_model(name)
    rows: list[dict[str, object]] = []
    for layer in model.layers:
        shape: object = list(layer.out_shape) if as_json else " x ".join(str(n) for n in layer.out_shape)
        rows.append(
            {
                "layer": layer.name,
                "type": layer.type,
                "output": shape,
                "parameters": layer.n_params if as_json else f"{layer.n_params:,}",
                "flops": layer.flops if as_json else si(layer.flops, "FLOP"),
                "activation_nbytes": layer.activation_nbytes if as_json else size(layer.activation_nbytes),
            }
        )
    if as_json:
        totals = {"parameters": model.n_params, "flops": model.flops, "gradient_nbytes": model.gradient_nbytes()}
        typer.echo(json.dumps({"name": model.name, "title": model.title, **totals, "layers": rows}, indent=2))
        return
    typer.echo(f"{model.name}: {model.title}")
    typer.echo(
        f"{model.n_params:,} parameters, {size(model.gradient_nbytes())} of fp32 gradients, "
        f"{si(model.flops, 'FLOP')} forward per sample, activations {size(model.activation_nbytes)} per sample\n"
    )
    _table(rows, as_json)


def _table(rows: Sequence[dict[str, object]], as_json: bool) -> None:
    """Print rows as JSON, or as a table of left-aligned text and right-aligned numbers."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for column in rows[0]:
        is_text = column in ("output", "name", "title", "algorithms")
        right = not is_text and all(str(row[column])[:1].isdigit() for row in rows)
        wraps = column in ("title", "algorithms")
        table.add_column(column, justify="right" if right else "left", no_wrap=not wraps, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)


# ---------------------------------------------------------------- entry


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(ddlsim.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate distributed training on a cluster before renting it."""


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """Run the command line: errors are one line on stderr and exit code 2, an interrupt is 130."""
    try:
        app()
    except DdlsimError as error:
        _fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)
