"""The commands that list and show bundled definitions, such as `topologies`, `models` and `show`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

import ddlsim
from ddlsim.cli import completion
from ddlsim.cli.application import app, show
from ddlsim.cli.options import Algorithm, Json, Model, arg, opt
from ddlsim.cli.output import check_picture, print_table, write_file
from ddlsim.printable import shown
from ddlsim.readable import percent


@app.command("warm-up")
def warm_up(as_json: Json = False) -> None:
    """Compile everything that simulations and training need.

    Takes about 25 s of CPU time the first time, and 2 s when everything is compiled. Example: ddlsim warm-up
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn("compiling {task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)

            def show(what: str, done: float, total: float) -> None:
                bar.update(task, description=what, completed=done, total=total)

            warmth = ddlsim.warm_up(show)
    else:  # progress goes to stderr
        warmth = ddlsim.warm_up()
    typer.echo(json.dumps(warmth.to_dict(), indent=2) if as_json else str(warmth))


@app.command()
def explore(
    cluster: Annotated[str | None, arg("Bundled cluster or topology file (with +key=value).")] = None,
    model: Model = None,
    port: Annotated[int, opt("Port on this machine; 0: any free port.")] = 0,
    browser: Annotated[bool, opt("Open a browser.", "--browser/--no-browser")] = True,
    host: Annotated[
        list[str] | None, opt("Additional host name that requests may use, besides localhost (repeatable).")
    ] = None,
) -> None:
    """Explore clusters, runs and comparisons in a browser.

    Requires pip install 'ddlsim[explore]'.

    Example: ddlsim explore cloud-25g-16x8-v100 --model resnet50
    """
    from ddlsim.explore import explore as serve

    serve(cluster, model, port=port, browser=browser, hosts=host or ())


@app.command()
def topologies(as_json: Json = False) -> None:
    """List the bundled clusters."""
    clusters = {name: ddlsim.load_cluster(name) for name in ddlsim.cluster_names()}
    rows: list[dict[str, object]] = [
        {"name": name, "workers": len(cluster.workers), "machines": len(cluster.host_names), "title": cluster.title}
        for name, cluster in clusters.items()
    ]
    print_table(rows, as_json)


@app.command()
def models(as_json: Json = False) -> None:
    """List the bundled models."""
    from ddlsim.readable import si, size

    rows: list[dict[str, object]] = []
    for name in ddlsim.model_names():
        model = ddlsim.load_model(name)
        numbers: dict[str, object] = {
            "parameters": model.n_params if as_json else f"{model.n_params:,}",
            "flops": model.flops if as_json else si(model.flops, "FLOP"),
            "gradient_nbytes": model.gradient_nbytes() if as_json else size(model.gradient_nbytes()),
        }
        rows.append({"name": name, **numbers, "title": model.title})
    print_table(rows, as_json)


@app.command()
def devices(
    name: Annotated[str | None, arg("Show only this device, with its prices.", offers=completion.devices)] = None,
    as_json: Json = False,
) -> None:
    """List the device catalogue, or the cloud prices of one device.

    Example: ddlsim devices h100
    """
    from ddlsim.readable import size

    rows: list[dict[str, object]] = []
    if name is not None:
        device = ddlsim.load_device(name)
        if not as_json:
            sources = (f"  source  {source}" for source in device.sources)
            typer.echo("\n".join([device.title, *sources, *_rates(device)]))
        for price in device.prices:
            hourly = {"USD/h": 3600.0 * price.price, "per device": 3600.0 * price.price / price.n_devices}
            rows.append(
                {"cloud": price.cloud, "instance": price.instance, "devices": price.n_devices}
                | {key: value if as_json else f"{value:.2f}" for key, value in hourly.items()}
                | {"month": price.date, "source": price.source}
            )
        if rows or as_json:
            print_table(rows, as_json)
        return
    for name in ddlsim.device_names():
        device = ddlsim.load_device(name)
        line = ", ".join(f"{precision} {flops / 1e12:.5g}" for precision, flops in device.peak_flops.items())
        peak: dict[str, object] = {"peak": dict(device.peak_flops)} if as_json else {"TFLOP/s": line}
        memory = device.memory_nbytes if as_json else size(device.memory_nbytes)
        rows.append({"name": name, **peak, "memory": memory, "title": device.title})
    print_table(rows, as_json)


def _rates(device: ddlsim.Device) -> list[str]:
    """Return lines with a device's memory, its peak rates and the fractions that products and fused attention reach."""
    from ddlsim.readable import size

    power = f"{device.power_w:.0f} W" if device.power_w else "power unknown"
    memory = f"{size(device.memory_nbytes)}, {size(device.memory_bandwidth)}/s, {power}"
    kernels = device.kernels
    peaks = []
    for kind, flops in device.peak_flops.items():
        shares = {} if kernels is None else kernels.gemm
        share = shares.get(kind, shares.get("bf16") if kind == "fp16" else None)
        reached = "" if share is None else f" (matrix products reach {percent(share, 0)})"
        peaks.append(f"{kind} {flops / 1e12:.5g}{reached}")
    lines = [f"  memory  {memory}", f"  TFLOP/s {', '.join(peaks)}"]
    if kernels is None:
        return [*lines, f"  rates   convolutional networks: {device.efficiency_basis}"]
    attention = ", ".join(
        f"{name} {percent(rates.forward, 0)} forward, {percent(rates.backward, 0)} backward"
        for name, rates in kernels.attention.items()
    )
    return [*lines, f"  fused attention (share of the 16-bit peak): {attention}", f"  rates   {kernels.source}"]


@app.command()
def stacks(
    name: Annotated[str | None, arg("Show only this stack, with its sources.", offers=completion.stacks)] = None,
    as_json: Json = False,
) -> None:
    """List the software stacks, or the settings and sources of one.

    Example: ddlsim stacks megatron
    """
    from ddlsim.schema import PLAIN

    rows: list[dict[str, Any]] = []
    for stack in ddlsim.stack_names() if name is None else [name]:
        table = PLAIN.table(ddlsim.load_stack(stack))
        rows.append({key: table.pop(key) for key in ("name", "title", "release", "sources")} | {"sets": table})
    if as_json:
        typer.echo(json.dumps(rows if name is None else rows[0], indent=2))
    elif name is None:
        sets = (", ".join(f"{key} {_value(value)}" for key, value in row["sets"].items()) for row in rows)
        heads = ({key: row[key] for key in ("name", "title", "release")} for row in rows)
        print_table([{**head, "sets": text} for head, text in zip(heads, sets, strict=True)], as_json)
    else:
        (row,) = rows
        typer.echo(f"{row['title']}, {row['release']}\n" + "\n".join(f"  source  {entry}" for entry in row["sources"]))
        typer.echo("\n".join(f"  {key:<17} {_value(value)}" for key, value in row["sets"].items()))


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value).lower()


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the collective algorithms."""
    from ddlsim.collectives import KINDS

    names = {kind: ddlsim.algorithm_names(kind) for kind in KINDS}
    print_table([{"kind": k, "algorithms": n if as_json else ", ".join(n)} for k, n in names.items()], as_json)


@show.command("topology")
def show_topology(
    name: Annotated[str, arg("Bundled cluster or topology file.", offers=completion.clusters)],
    as_json: Json = False,
    plot: Annotated[Path | None, opt("Plot the cluster (png, pdf, svg).")] = None,
) -> None:
    """Show a cluster: machines, devices, links, sources.

    Example: ddlsim show topology dgx1-v100 --plot dgx1.png
    """
    check_picture(plot)
    cluster = ddlsim.load_cluster(name)
    if as_json:
        from networkx import node_link_data

        typer.echo(json.dumps(node_link_data(cluster.to_graph(), edges="edges"), indent=1))
    else:
        typer.echo(cluster.summary())
    if plot is not None:
        from ddlsim.report.cluster_plot import cluster_plot

        write_file(plot, lambda path: cluster_plot(cluster, path))


@show.command("plan")
def show_plan(
    path: Annotated[Path, arg("Chakra trace (file of rank 0, or step.et for all ranks) or GOAL file.")],
    on: Annotated[
        str | None, opt("Execute the plan on this bundled cluster or topology file.", offers=completion.clusters)
    ] = None,
    algorithm: Algorithm = None,
    plot: Annotated[Path | None, opt("Plot the task graph; with --on, a Gantt chart (png, pdf, svg).")] = None,
    as_json: Json = False,
) -> None:
    """Show a training step as a table of tasks.

    With --on, also execute it on a cluster.

    Example: ddlsim show plan step.0.et --on dgx1-v100 --plot step.png
    """
    from ddlsim.imports import read_any
    from ddlsim.plan import Plan

    check_picture(plot)
    plan = read_any(path, kind=None if os.path.isfile(path) else "chakra")
    if not isinstance(plan, Plan):
        raise ddlsim.ConfigError(
            f"{path}: is a {type(plan).__name__}, not a plan; expected a Chakra trace or GOAL text"
        )
    if algorithm is not None and on is None:
        raise ddlsim.ConfigError(
            f"--algorithm {algorithm}: has no effect unless the plan is executed; add --on CLUSTER"
        )
    run = None if on is None else plan.execute(on, algorithm or "default")
    cut = None if run is None or on is None else plan.cut(ddlsim.load_cluster(on))
    if as_json:
        numbers: dict[str, object] = {"tasks": len(plan), "ranks": plan.n_ranks}
        numbers["critical_path_s"] = plan.critical_path()
        numbers |= {} if run is None or cut is None else {"seconds": run.seconds, "cut_s": cut.seconds}
        typer.echo(json.dumps(numbers))
    else:
        typer.echo(shown(str(plan)))
        typer.echo(f"\ncritical path {plan.critical_path():.6g} s without communication")
        if run is not None and cut is not None:
            typer.echo(shown(f"on {on}: {run.seconds:.6g} s; {cut.interface} takes at least {cut.seconds:.6g} s"))
    write_file(plot, lambda picture: (run or plan).plot(picture))


@show.command("model")
def show_model(
    name: Annotated[str, arg("Bundled model or model file.", offers=completion.models)], as_json: Json = False
) -> None:
    """Show a model: layers, shapes, parameters, FLOPs, bytes.

    Example: ddlsim show model resnet50
    """
    from ddlsim.workload.model import cells, summary, title

    model = ddlsim.load_model(name)
    if as_json:
        columns = {"layer": "name", "type": "type", "output": "out_shape", "parameters": "n_params", "flops": "flops"}
        columns |= {"activation_nbytes": "activation_nbytes"}
        rows = [{column: getattr(layer, name) for column, name in columns.items()} for layer in model.layers]
        totals = {"parameters": model.n_params, "flops": model.flops, "gradient_nbytes": model.gradient_nbytes()}
        typer.echo(json.dumps({"name": model.name, "title": model.title, **totals, "layers": rows}, indent=2))
        return
    typer.echo(shown("\n".join([title(model), summary(model), *model.notes, ""])))
    head, *layers = cells(model)
    print_table([dict(zip(head, layer, strict=True)) for layer in layers], as_json)
