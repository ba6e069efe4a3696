"""What the first rank shows: a line for each task, and on a terminal a bar below them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ddlsim.measure.plan import Task
from ddlsim.measure.runner import Event
from ddlsim.measure.table import Measurement
from ddlsim.printable import shown


def follow(events: Iterable[Event], tasks: Sequence[Task], budget: float) -> Iterator[Measurement]:
    """Yield the rows among the events of :func:`ddlsim.measure.runner.run`, showing on stderr how far it is.

    tasks   all that may come
    budget  s that the run may take
    """
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
    """Return in one line how a task went: its smallest and its largest size."""
    ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
    parts = [_step(row) if task.experiment == "step" else _transfer(row) for row in ends]
    if n_left:
        parts.append(f"no time left for {n_left} larger size{'s' * (n_left > 1)}")
    return f"{task}: {'; '.join(parts)}"


def _step(row: Measurement) -> str:
    return f"batch {row.batch_size} {row.median_s * 1e3:.4g} ms"


def _transfer(row: Measurement) -> str:
    if row.nbytes < 64 * 1024:
        return f"{row.nbytes} B {row.median_s * 1e6:.4g} us"
    return f"{row.nbytes / 2**20:.4g} MiB {row.median_s * 1e3:.4g} ms, {row.bandwidth / 1e9:.3g} GB/s"
