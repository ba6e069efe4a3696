"""The `lab` command, which compares predictions with real TCP on this computer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ddlsim
from ddlsim.cli import completion
from ddlsim.cli.application import app
from ddlsim.cli.options import Json, arg, opt
from ddlsim.cli.output import check_folder, print_table
from ddlsim.errors import ConfigError
from ddlsim.printable import shown
from ddlsim.readable import percent
from ddlsim.units import parse

if TYPE_CHECKING:
    from ddlsim.lab import Comparison

OPERATIONS = "point_to_point:one_way,all_reduce:ring,all_reduce:binomial_tree,parameter_server"


@app.command()
def lab(
    cluster: Annotated[str | None, arg("Bundled cluster or topology file.", offers=completion.clusters)] = None,
    operations: Annotated[
        str, opt("Operations: kind:algorithm, point_to_point:one_way, parameter_server:2, ...")
    ] = OPERATIONS,
    sizes: Annotated[str, opt("Buffer sizes per rank.")] = "64 KiB,1 MiB,4 MiB",
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 5,
    queue: Annotated[str, opt("Queue size of a port, beyond which frames are dropped.")] = "512 KiB",
    out: Annotated[Path | None, opt("Write the measurements as a CSV table.")] = None,
    clean: Annotated[bool, opt("Only remove leftovers of killed runs.", "--clean")] = False,
    as_json: Json = False,
) -> None:
    """Compare predictions with real TCP (Linux, root).

    Builds a small cluster of network namespaces on this computer and measures it.

    Example: sudo ddlsim lab my-cluster.toml --operations all_reduce:ring,parameter_server --sizes "64 KiB,4 MiB"
    """
    from ddlsim.lab import check_computer, plan
    from ddlsim.lab import clean as remove

    if clean:
        if cluster is not None:
            raise ConfigError(
                f"--clean only removes leftovers of earlier experiments; leave the cluster {cluster!r} out"
            )
        check_computer()
        typer.echo(f"removed {len(remove())} network namespaces")
        return
    if cluster is None:
        raise ConfigError("lab: set the cluster, as in: ddlsim lab my-cluster.toml (see: ddlsim topologies)")
    loaded = ddlsim.load_cluster(cluster)
    fabric = plan(loaded)
    check_folder(out)
    check_computer()
    if left := remove():
        typer.echo(f"note: removed {len(left)} network namespaces left by killed runs", err=True)
    from ddlsim.lab import compare, parse_operations

    wanted, buffers, waiting = parse_operations(operations), _sizes(sizes), round(parse(queue, "bytes", "--queue"))
    comparisons, interrupted = _watched(
        compare(loaded, wanted, buffers, repetitions, waiting), len(wanted) * len(buffers), out
    )
    if comparisons:
        print_table([_cells(c, as_json) for c in comparisons], as_json)
    from ddlsim.lab.laboratory import BUSY

    n_busy = sum(c.row.note.endswith(BUSY) for c in comparisons)
    for note in (*fabric.notes, *([f"{n_busy} rows{BUSY}"] if n_busy else [])):
        typer.echo(shown(f"note: {note}"), err=True)
    if interrupted:
        raise typer.Exit(130)


def _watched(comparisons: Generator[Comparison, None, None], n: int, out: Path | None) -> tuple[list[Comparison], bool]:
    """Collect comparisons with a progress bar, and write each to `out`; after an interrupt, return those so far."""
    from ddlsim.measure.table import append, save_measurements
    from ddlsim.report.progress import counted

    done: list[Comparison] = []
    try:
        with closing(comparisons):
            for comparison in counted(comparisons, n, "measuring"):
                if out is not None:
                    if not done:
                        save_measurements([], out)
                    append(out, comparison.row)
                done.append(comparison)
    except KeyboardInterrupt:
        return done, True
    if out is not None:
        typer.echo(f"wrote {out}", err=True)
    return done, False


def _cells(comparison: Comparison, as_json: bool) -> dict[str, object]:
    from ddlsim.readable import seconds, size

    row = comparison.row
    if as_json:
        return {
            "operation": comparison.label,
            "nbytes": row.nbytes,
            "measured_s": row.median_s,
            "min_s": row.min_s,
            "max_s": row.max_s,
            "n_repetitions": row.n_repetitions,
            "predicted_s": comparison.predicted,
            "error": comparison.error,
        }
    assert row.min_s is not None
    assert row.max_s is not None
    return {
        "operation": comparison.label,
        "bytes": size(row.nbytes),
        "measured": seconds(row.median_s),
        "spread": f"{seconds(row.min_s)} - {seconds(row.max_s)}",
        "predicted": seconds(comparison.predicted),
        "error": percent(comparison.error, sign="+"),
    }


def _sizes(text: str) -> list[int]:
    return [round(parse(word, "bytes", "--sizes")) for word in text.split(",")]
