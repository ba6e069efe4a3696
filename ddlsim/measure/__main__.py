"""``python -m ddlsim.measure``: run the benchmarks under mpirun or torchrun. See docs/measuring.md."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.measure.runner import Event, Task
from ddlsim.measure.table import Measurement
from ddlsim.output_files import write_text
from ddlsim.plain import whole_numbers
from ddlsim.printable import shown
from ddlsim.units import parse

if TYPE_CHECKING:
    from ddlsim.measure.steps import Trained
    from ddlsim.measure.transport import Transport


def follow(events: Iterable[Event], tasks: Sequence[Task], budget: float) -> Iterator[Measurement]:
    """Yield the rows among `events` (of all `tasks`), showing on stderr the elapsed share of `budget` (s)."""
    start = time.perf_counter()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(len(task.sizes) for task in tasks))
        for task, of_task in itertools.groupby(events, key=lambda event: event.task):
            progress.update(bar, description=escape(shown(str(task))))
            rows, n_left = [], 0
            for event in of_task:
                progress.advance(bar, event.n_left or 1)
                n_left = event.n_left
                if event.row is not None:
                    rows.append(event.row)
                    yield event.row
            elapsed = time.perf_counter() - start
            line = f"[{elapsed:4.0f} of {budget:.0f} s] {summary(task, rows, n_left)}"
            progress.console.print(shown(line), markup=False, emoji=False)


def summary(task: Task, rows: Sequence[Measurement], n_left: int) -> str:
    """Return a line with the results of a task for its smallest and its largest size."""
    parts = []
    for row in [rows[0], rows[-1]] if len(rows) > 1 else rows:
        if task.experiment == "step":
            parts.append(f"batch {row.batch_size} {row.median_s * 1e3:.4g} ms")
        elif row.nbytes < 64 * 1024:
            parts.append(f"{row.nbytes} B {row.median_s * 1e6:.4g} us")
        else:
            rate = f"{row.median_s * 1e3:.4g} ms, {row.bandwidth / 1e9:.3g} GB/s"
            parts.append(f"{row.nbytes / 2**20:.4g} MiB {rate}")
    if n_left:
        parts.append(f"no time left for {n_left} larger size{'s' * (n_left > 1)}")
    return f"{task}: {'; '.join(parts)}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def measure(
    out: Annotated[
        str,
        typer.Option(
            help="Folder for measurements.csv, to which rows are added; with --only kernels, the device file."
        ),
    ],
    backend: Annotated[str, typer.Option(help="Communication backend: auto, mpi, gloo or nccl.")] = "auto",
    budget: Annotated[str, typer.Option(help="Approximate total time (default for kernels: 5 min).")] = "2 min",
    max_size: Annotated[str, typer.Option(help="Largest message or buffer size.")] = "256 MiB",
    only: Annotated[
        str, typer.Option(help="Comma-separated subset of point_to_point, collective, memory, step; or kernels.")
    ] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Measure step times of this model in NumPy (repeatable).")
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(help="Measure step times of a PyTorch module, package.module:callable (repeatable)."),
    ] = None,
    input_shape: Annotated[str, typer.Option(help="Shape of one sample of --module, such as 3,224,224.")] = "",
    batch_sizes: Annotated[
        str, typer.Option(help="Samples per rank for --model and --module, comma-separated.")
    ] = "1,8,32",
    profile: Annotated[str, typer.Option(help="With --only kernels: JSON file for all measured times.")] = "",
) -> None:
    """Measure messages, collectives, memory and training steps on the ranks that mpirun or torchrun started.

    mpirun -n 8 python -m ddlsim.measure --out measured/

    To measure the kernels of one GPU with PyTorch and write a device file for ddlsim:

    python -m ddlsim.measure --only kernels --out my-gpu.toml
    """
    if only == "kernels":
        others = {"backend": backend, "max_size": max_size, "model": model, "module": module}
        _measure_device(out, profile, budget, others | {"input_shape": input_shape, "batch_sizes": batch_sizes})
        return
    if profile:
        raise ConfigError(f"--profile {profile}: requires --only kernels; add --only kernels, or leave --profile out")
    from ddlsim.measure.transport import connect

    seconds, max_nbytes = parse(budget, "time", "--budget"), int(parse(max_size, "bytes", "--max-size"))
    shape = whole_numbers(input_shape, "--input-shape") if input_shape else []
    sizes = whole_numbers(batch_sizes, "--batch-sizes") if batch_sizes else []
    if seconds <= 0:
        raise ConfigError(f"--budget {budget}: must be above 0, for example '2 min'")
    if shape and not module:
        raise ConfigError(f"--input-shape {input_shape}: requires --module; add --module, or leave --input-shape out")
    transport = connect(backend)
    hosts = transport.gather(transport.host)
    lacking = transport.lacking() if transport.size > 1 else ()

    def set_up() -> _Setup:
        from ddlsim.measure.runner import make_plan
        from ddlsim.measure.steps import numpy_model, torch_module
        from ddlsim.measure.table import open_table

        trained = [numpy_model(name) for name in model or ()]
        gpu = hosts[: transport.rank].count(transport.host)  # index among the ranks of its host
        trained += [torch_module(name, shape, gpu) for name in module or ()]
        chosen = [name.strip() for name in only.split(",")] if only else []
        tasks = make_plan(hosts, max_nbytes, chosen, [one.label for one in trained], sizes, lacking)
        for one in trained:
            one.step(min(sizes))()  # compiles, and reports errors before anything is measured
        table, rows = open_table(out) if transport.rank == 0 else (None, [])
        return _Setup(tasks, trained, table, {row.key for row in rows})

    setup = _agreed(transport, set_up)
    try:
        _run(transport, setup, seconds)
    except BaseException as error:
        if transport.size > 1:  # the others wait for this rank, so they must be ended, too
            if transport.rank == 0 or not isinstance(error, KeyboardInterrupt):
                _show(error)
            transport.abort()
        raise
    transport.close()


def _measure_device(out: str, profile: str, budget: str, others: Mapping[str, object]) -> None:
    """Measure the kernels of this machine's GPU, or of its CPU if there is none, and write its device file."""
    defaults = {parameter.name: parameter.default for parameter in inspect.signature(measure).parameters.values()}
    for name, value in others.items():
        if value != defaults[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} has no effect with --only kernels, which measures one device; leave {option} out"
            )
    seconds = 300.0 if budget == defaults["budget"] else parse(budget, "time", "--budget")
    if seconds <= 0:
        raise ConfigError(f"--budget {budget}: must be above 0, for example '5 min'")
    if Path(out).suffix != ".toml":
        raise ConfigError(f"--out {out}: must be the name of a TOML file, such as my-gpu.toml")
    if find_spec("torch") is None:
        raise ConfigError("--only kernels needs PyTorch, which is not installed: pip install torch")
    if not _is_first():
        return
    from ddlsim.measure.fit import comparison, device_of, predictions
    from ddlsim.measure.kernels import measure_device

    start = time.perf_counter()

    def show(measured: Mapping[str, Any]) -> None:
        """Save the measurements so far, and report progress."""
        if profile:
            write_text(Path(profile), json.dumps(measured))
        section = list(measured["seconds"])[-1]
        elapsed = f"[{time.perf_counter() - start:4.0f} of {seconds:.0f} s]"
        print(f"{elapsed} {section}: {len(measured[section])} rows", file=sys.stderr, flush=True)

    measured = measure_device(seconds, show)
    device = replace(device_of(measured), name=Path(out).stem)
    device.save(out)
    print(*comparison(list(predictions(measured, device))), f"wrote {out}", sep="\n", file=sys.stderr)


@dataclass(frozen=True)
class _Setup:
    """What a rank needs to start; only the first rank has the table."""

    tasks: list[Task]
    trained: list[Trained]
    table: Path | None
    done: set[tuple[object, ...]]


def _agreed(transport: Transport, prepare: Callable[[], _Setup]) -> _Setup:
    """Return what `prepare` returns on this rank; raise on all ranks if it fails on any."""
    setup, problem = None, ""
    try:
        setup = prepare()
    except DdlsimError as error:
        problem = str(error)
    problems = [text for text in transport.gather(problem) if text]
    if problems or setup is None:
        transport.close()
        raise ConfigError(problems[0])
    return setup


def _run(transport: Transport, setup: _Setup, budget: float) -> None:
    from ddlsim.measure.runner import crowding, run
    from ddlsim.measure.table import append

    done, crowded = transport.gather(setup.done)[0], crowding(transport)
    events = run(transport, setup.tasks, setup.trained, done, budget)
    if setup.table is None:
        deque(events, maxlen=0)  # the first rank has the rows
        return
    if crowded:
        print(f"warning: {crowded}: ranks wait for a core, which the times include; start fewer ranks", file=sys.stderr)
    n_rows = 0
    for row in follow(events, setup.tasks, budget):
        append(setup.table, row)
        n_rows += 1
    print(f"{n_rows} rows added to {setup.table}, which had {len(done)} rows", file=sys.stderr)


def _is_first() -> bool:
    """Return whether this is the first of the processes that a launcher started, before any of them connects."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def _show(error: BaseException) -> None:
    if isinstance(error, DdlsimError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, KeyboardInterrupt):
        print(
            "interrupted; finished measurements are kept, and the same command continues", file=sys.stderr, flush=True
        )
    else:
        traceback.print_exception(error)


def main() -> None:
    """Run the command line: errors are one line on stderr and exit code 2, an interrupt is 130."""
    try:
        app()
    except (DdlsimError, KeyboardInterrupt) as error:
        if _is_first():
            _show(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)


if __name__ == "__main__":
    main()
