"""The commands that look things up: lists of what is bundled, and `show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import ddlsim
from ddlsim.cli.application import app, show
from ddlsim.cli.options import Json
from ddlsim.cli.output import print_table, write_file
from ddlsim.printable import shown

__all__ = ["algorithms", "devices", "models", "show_model", "show_topology", "topologies"]


@app.command()
def topologies(as_json: Json = False) -> None:
    """List the bundled clusters."""
    rows: list[dict[str, object]] = []
    for name in ddlsim.cluster_names():
        cluster = ddlsim.load_cluster(name)
        rows.append({"name": name, "workers": len(cluster.workers), "machines": len(cluster.host_names),
                     "title": cluster.title})  # fmt: skip
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
def devices(as_json: Json = False) -> None:
    """List the device catalogue."""
    from ddlsim.readable import si, size

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
    print_table(rows, as_json)


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the collective algorithms."""
    from ddlsim.collectives import KINDS

    rows: list[dict[str, object]] = []
    for kind in KINDS:
        names = ddlsim.algorithm_names(kind)
        rows.append({"kind": kind, "algorithms": names if as_json else ", ".join(names)})
    print_table(rows, as_json)


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

        write_file(plot, lambda path: cluster_plot(cluster, path))


@show.command("model")
def show_model(
    name: Annotated[str, typer.Argument(help="A bundled model or a file.")], as_json: Json = False
) -> None:
    """Show a model: layers, shapes, parameters, FLOPs, bytes.

    Example: ddlsim show model resnet50
    """
    from ddlsim.readable import si, size

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
    typer.echo(shown(f"{model.name}: {model.title}"))
    typer.echo(
        f"{model.n_params:,} parameters, {size(model.gradient_nbytes())} of fp32 gradients, "
        f"{si(model.flops, 'FLOP')} forward per sample, activations {size(model.activation_nbytes)} per sample\n"
    )
    print_table(rows, as_json)
