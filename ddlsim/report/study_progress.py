"""A bar on the terminal that shows how far a study is. It appears when a study takes more than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ddlsim.report.progress import DELAY, LINES

if TYPE_CHECKING:
    from ddlsim.study.dispatch import Count


@contextmanager
def bar() -> Iterator[Callable[[Count], None]]:
    """Yield what a study calls as points finish. The bar is on stderr and is gone at the end; where stderr is no
    terminal, there is a line now and then."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points"), TimeRemainingColumn())
    bars = Bars(*columns, TextColumn("{task.description}"), console=console, transient=True)
    task = bars.add_task("")
    started, begun = False, time.monotonic()
    next_line = begun + LINES

    def report(count: Count) -> None:
        nonlocal started, next_line
        now = time.monotonic()
        if not console.is_terminal:
            if now >= next_line:
                console.print(status(count), markup=False)
                next_line = now + LINES
            return
        if not started and (now > begun + DELAY or not count.finished):
            bars.start()
            started = True
        bars.update(task, completed=count.finished, total=count.total, description=_misses(count))

    try:
        yield report
    finally:
        if started:
            bars.stop()


def status(count: Count) -> str:
    """Return how far a study is, in a line."""
    misses = _misses(count)
    return f"{count.finished} of {count.total} points{f' ({misses})' if misses else ''}"


def _misses(count: Count) -> str:
    parts = ((count.skipped, "skipped"), (count.failed, "failed"))
    return ", ".join(f"{n} {what}" for n, what in parts if n)
