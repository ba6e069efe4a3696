"""Progress bars of runs and studies on the terminal, shown after more than a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    track,
)
from rich.progress import Progress as Bars

from ddlsim.learning import Training
from ddlsim.learning.monitor import Progress, Row
from ddlsim.readable import percent, seconds

if TYPE_CHECKING:
    from ddlsim.study.dispatch import Count

T = TypeVar("T")

#: delay in s before the bar appears, interval between updates, and interval between lines without a terminal
DELAY, INTERVAL, LINES = 1.0, 0.1, 10.0


#: contents of a bar: line to print without a terminal, description, amount done, total
Look = tuple[str, str, float, float | None]


@contextmanager
def _shown(*columns: ProgressColumn) -> Iterator[Callable[[Callable[[], Look], bool], None]]:
    """Yield a function to call on progress, with a function that returns the current :data:`Look` and is called only
    now and then, and whether to show the bar at once.

    The bar is on stderr and is removed at the end; if stderr is not a terminal, lines are printed occasionally.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bars = Bars(*columns, console=console, transient=True)
    task = bars.add_task("")
    next_look = time.monotonic() + (DELAY if console.is_terminal else LINES)

    def show(look: Callable[[], Look], at_once: bool) -> None:
        nonlocal next_look
        if time.monotonic() < next_look and not (at_once and console.is_terminal):
            return
        line, beside, done, total = look()
        if console.is_terminal:
            bars.start()  # if it has not started
            bars.update(task, completed=done, total=total, description=beside)
        else:
            console.print(line, markup=False)
        next_look = time.monotonic() + (INTERVAL if console.is_terminal else LINES)

    try:
        yield show
    finally:
        if bars.live.is_started:
            bars.stop()


@contextmanager
def bar(training: Training, max_time: float) -> Iterator[Progress]:
    """Yield a function for a run to call after every update."""
    with _shown(BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")) as show:

        def report(now: float, n_updates: int, epoch: float, row: Row) -> None:
            def look() -> Look:
                done, line = share_done(training, max_time, now, n_updates, epoch), status(now, n_updates, epoch, row)
                return (line, line, 0.0, None) if done is None else (f"{percent(done)}: {line}", line, done, 1.0)

            show(look, False)

        yield report


@contextmanager
def study_bar() -> Iterator[Callable[[Count], None]]:
    """Yield a function for a study to call as points finish."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points"), TimeRemainingColumn())
    with _shown(*columns, TextColumn("{task.description}")) as show:

        def report(count: Count) -> None:  # shown at once, as the first point may take long
            show(lambda: (study_status(count), _misses(count), count.finished, count.total), not count.finished)

        yield report


def study_status(count: Count) -> str:
    """Return the status of a study as a line."""
    misses = _misses(count)
    return f"{count.finished} of {count.total} points{f' ({misses})' if misses else ''}"


def _misses(count: Count) -> str:
    parts = ((count.skipped, "skipped"), (count.failed, "failed"))
    return ", ".join(f"{n} {what}" for n, what in parts if n)


def share_done(training: Training, max_time: float, now: float, n_updates: int, epoch: float) -> float | None:
    """Return a lower bound on the finished share of the run (0 to 1), or None if only a target ends it."""
    shares = []
    if training.updates is not None:
        shares.append(n_updates / training.updates)
    if training.last_epoch is not None:
        shares.append(epoch / training.last_epoch)
    if math.isfinite(max_time):
        shares.append(now / max_time)
    return min(1.0, max(shares)) if shares else None


def status(now: float, n_updates: int, epoch: float, row: Row) -> str:
    """Return the status of a run as a line, with the simulated clock and the last evaluation."""
    return (
        f"{seconds(now)}, {n_updates:,} updates, epoch {epoch:.2f}, accuracy {percent(row.accuracy)}, "
        f"loss {row.loss:.4g}"
    )


def counted(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items while a bar counts them, if stderr is a terminal."""
    console = Console(stderr=True)
    return iter(track(items, what, total, console=console, disable=not console.is_terminal, transient=True))
