"""The `import` command, which reads the output of other tools."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ddlsim
from ddlsim.cli import completion
from ddlsim.cli.application import app
from ddlsim.cli.options import arg, opt, passed
from ddlsim.cli.output import check_distinct, check_folder, write_file
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import parse_value
from ddlsim.printable import shown

if TYPE_CHECKING:
    from ddlsim.imports import Timing
    from ddlsim.measure import Measurement


@app.command("import")
def import_file(
    file: Annotated[Path, arg("Topology, benchmark output, trace or log from another tool.")],
    out: Annotated[
        Path | None,
        opt("Output file: a cluster (.toml, .json, .graphml), measurements (.csv) or a plan (.et).", "--out", "-o"),
    ] = None,
    kind: Annotated[str | None, opt("Format of the file (default: detected from its content).")] = None,
    operation: Annotated[
        str | None, opt("Measured operation, if the file does not contain it: all_reduce, ...")
    ] = None,
    ranks: Annotated[int | None, opt("Number of ranks, if the file does not contain it.")] = None,
    hosts: Annotated[
        int | None,
        opt("Number of machines of a measurement, or of the cluster to build from a single-machine topology."),
    ] = None,
    bandwidth: Annotated[str | None, opt("Bandwidth of an NVLink or an edge, if the file does not contain it.")] = None,
    latency: Annotated[str | None, opt("Latency of the network, if the file does not contain it.")] = None,
    device: Annotated[
        str | None, opt("Device of the GPUs: a name (see: ddlsim devices) or a device file.", offers=completion.devices)
    ] = None,
    model: Annotated[
        str | None, opt("Trained model, if the file does not contain it.", "--model", "-m", offers=completion.models)
    ] = None,
    ignore_unknown: Annotated[
        bool, opt("Skip unknown content, and report how much was skipped.", "--ignore-unknown")
    ] = False,
    facts: Annotated[
        list[str] | None, opt("Additional argument of the reader: pcie_bandwidth='32 GB/s' (repeatable).", "--set")
    ] = None,
) -> None:
    """Import a file from another tool.

    Writes it as a cluster, as measurements or as a plan.

    Example: ddlsim import topo.xml --device a100-40g --out my-cluster.toml
    """
    check_folder(out)
    check_distinct(file, out=out)
    from ddlsim.cluster import Cluster
    from ddlsim.imports import HorovodTimeline, KinetoTrace, MlperfRun, Timing, detect_kind, read_any
    from ddlsim.imports.detect import KINDS, MACHINES, argument_of
    from ddlsim.plan import Plan

    if device is not None:
        ddlsim.load_device(device)  # otherwise the first run would report an unknown name
    all_ranks = file.suffix == ".et" and not os.path.exists(file)  # step.et: step.0.et, step.1.et, ...
    chosen = kind or ("chakra" if all_ranks else detect_kind(file))
    settings: dict[str, object] = {"operation": operation, "n_ranks": ranks, "bandwidth": bandwidth, "latency": latency}
    settings |= {"device": device, "n_hosts": hosts if chosen in MACHINES else None}
    settings |= {"ignore_unknown": ignore_unknown or None, **dict(_fact(text) for text in facts or [])}
    if chosen not in KINDS:
        raise unknown_name("kind", chosen, KINDS, "--kind")
    options = _options(chosen)
    for name in passed(**settings):
        if argument_of(name, chosen) not in options:
            option = _OPTIONS.get(name, f"--set {name}")
            valid = f"accepted: {', '.join(options.values()) or 'no such options'}"
            raise ConfigError(f"{option} has no effect, because {file} is read as {chosen} ({valid}); remove {option}")
    try:
        content = read_any(file, kind=chosen, facts=passed(**settings))
    except ConfigError as error:
        raise type(error)(_in_options(str(error), options)) from None
    if isinstance(content, Cluster):
        _refuse(file, chosen, {"--model": model, "--hosts": None if chosen in MACHINES else hosts})
        typer.echo(content.summary())
        write_file(out, content.save)
        for note in content.notes:
            typer.echo(shown(f"note: {_in_options(note, options)}"), err=True)
        return
    if isinstance(content, Plan):
        _refuse(file, chosen, {"--model": model, "--hosts": hosts})
        if out is not None and out.suffix != ".et":
            raise ConfigError(f"--out {out}: a plan is written as Chakra traces; choose a name that ends in .et")
        typer.echo(shown(str(content)))
        write_file(out, content.to_chakra)
        return
    timings: Sequence[Timing] = ()
    if isinstance(content, MlperfRun):
        time = "unknown time" if math.isnan(content.run_s) else f"{content.run_s:.6g} s"
        counts = f"{len(content.accuracies)} accuracies, {len(content.epochs)} epochs"
        typer.echo(shown(f"{content.benchmark}: {content.status or 'no status'}, {time}, {counts}"))
        for note in content.notes:
            typer.echo(shown(f"note: {note}"), err=True)
        timings = content.timings
    elif isinstance(content, KinetoTrace):
        typer.echo(f"{len(content.steps)} steps, {len(content.collectives)} collectives")
        timings = content.collectives
    elif isinstance(content, HorovodTimeline):
        typer.echo(f"{len(content.operations)} Horovod operations")
    else:
        assert all(isinstance(row, Timing) for row in content)
        timings = content
    _measurements(file, timings, hosts, model, out)


def _fact(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--set {text!r}: must be name=value, such as pcie_bandwidth='32 GB/s'")
    return name, parse_value(value)


#: arguments of :func:`ddlsim.imports.read_any` -> options of this command; others are set by ``--set``
_OPTIONS = {"n_ranks": "--ranks", "n_hosts": "--hosts", "ignore_unknown": "--ignore-unknown"}
_OPTIONS |= {name: f"--{name}" for name in ("operation", "device", "bandwidth", "latency")}


def _options(kind: str) -> dict[str, str]:
    """Return the option for each argument of the reader of a kind of file."""
    from ddlsim.imports.detect import argument_of, facts_of

    option_of = {argument_of(name, kind): option for name, option in _OPTIONS.items()}
    return {name: option_of.get(name, f"--set {name}=...") for name in sorted(facts_of(kind))}


def _in_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message of a reader with options in place of arguments: "--hosts" for "n_hosts (--hosts)"."""

    def option(match: re.Match[str]) -> str:
        written, value = options[match["name"]], (match["value"] or "").replace("True", "true")
        if not value or written == "--ignore-unknown":
            return written
        return written.replace("...", value) if "=" in written else f"{written} {value}"

    words = ("operation", "device", "bandwidth", "latency")
    names = [rf"(?<=\bset ){name}|(?<=\bremove ){name}" if name in words else name for name in options]
    argument = rf"(?<![\w-])(?P<name>{'|'.join(names)})\b(?: ?= ?(?P<value>'[^']*'|\w+))?(?: \(--[^)]*\))?"
    return re.sub(argument, option, message).replace("set --set ", "use --set ") if names else message


def _refuse(file: Path, kind: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option} has no effect, because {file} is {kind}; leave {option} out")


def _measurements(
    file: Path, timings: Sequence[Timing], hosts: int | None, model: str | None, out: Path | None
) -> None:
    """Print the rows, and write those that the measurement table supports."""
    if model is not None and not any(row.operation == "step" for row in timings):
        raise ConfigError(f"--model has no effect, because {file} contains no training steps; leave --model out")
    if hosts is not None and timings and all(row.n_hosts for row in timings):
        raise ConfigError(f"--hosts has no effect, because {file} contains the number of machines; leave --hosts out")
    for (operation, n_ranks), n in Counter((row.operation, row.n_ranks) for row in timings).items():
        typer.echo(shown(f"{n} rows of {operation}" + (f" among {n_ranks} ranks" if n_ranks else "")))
    if out is None:
        return
    if out.suffix != ".csv":
        raise ConfigError(f"--out {out}: measurements are written as a CSV table; choose a name that ends in .csv")
    from ddlsim.imports import to_measurements
    from ddlsim.imports.text import LeftOut
    from ddlsim.measure import save_measurements

    rows: list[Measurement] = []
    left_out = LeftOut(ConfigError)
    for timing in timings:
        with left_out:
            rows += to_measurements([timing], n_hosts=hosts, model=model)
    refused = left_out.errors
    if not rows:
        raise refused[0] if refused else ConfigError(f"{file}: contains no measured times to write; remove --out")
    if refused:
        typer.echo(shown(f"warning: {len(refused)} rows ignored, the first because: {refused[0]}"), err=True)
    write_file(out, lambda path: save_measurements(rows, path))
