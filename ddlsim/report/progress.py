"""Progress bars of runs and studies on the terminal, shown after more than a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
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

#: s after which the bar appears, and between two looks at it; between two lines where there is no terminal
DELAY, INTERVAL, LINES = 1.0, 0.1, 10.0


#: what a bar shows: the line that stands for it where there is no terminal; beside the bar; how much is done, of what
Look = tuple[str, str, float, float | None]


@contextmanager
def _shown(*columns: ProgressColumn) -> Iterator[Callable[[Callable[[], Look], bool], None]]:
    """Yield what is to be called as things go on, with a function that looks at them, which is asked now and then, and
    whether a bar is to be there at once.

    The bar is on stderr and is gone at the end; where stderr is no terminal, there is a line now and then.
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
            bars.start()  # unless it has
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
    """Yield what a run calls after every update."""
    with _shown(BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")) as show:

        def report(now: float, n_updates: int, epoch: float, row: Row) -> None:
            def look() -> Look:
                done, line = share_done(training, max_time, now, n_updates, epoch), status(now, n_updates, epoch, row)
                return (line, line, 0.0, None) if done is None else (f"{percent(done)}: {line}", line, done, 1.0)

            show(look, False)

        yield report


@contextmanager
def study_bar() -> Iterator[Callable[[Count], None]]:
    """Yield what a study calls as points finish."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points"), TimeRemainingColumn())
    with _shown(*columns, TextColumn("{task.description}")) as show:

        def report(count: Count) -> None:  # the first point may take long
            show(lambda: (study_status(count), _misses(count), count.finished, count.total), not count.finished)

        yield report


def study_status(count: Count) -> str:
    """Return how far a study is, in a line."""
    misses = _misses(count)
    return f"{count.finished} of {count.total} points{f' ({misses})' if misses else ''}"


def _misses(count: Count) -> str:
    parts = ((count.skipped, "skipped"), (count.failed, "failed"))
    return ", ".join(f"{n} {what}" for n, what in parts if n)


def share_done(training: Training, max_time: float, now: float, n_updates: int, epoch: float) -> float | None:
    """Return how much of the run is done at least (0 to 1), or None if nothing but a target ends it."""
    shares = []
    if training.updates is not None:
        shares.append(n_updates / training.updates)
    if training.last_epoch is not None:
        shares.append(epoch / training.last_epoch)
    if math.isfinite(max_time):
        shares.append(now / max_time)
    return min(1.0, max(shares)) if shares else None


def status(now: float, n_updates: int, epoch: float, row: Row) -> str:
    """Return where a run is, by the simulated clock and with the last evaluation, in a line."""
    return (
        f"{seconds(now)}, {n_updates:,} updates, epoch {epoch:.2f}, accuracy {percent(row.accuracy)}, "
        f"loss {row.loss:.4g}"
    )


def counted(items: Iterator[T], total: int, what: str) -> Iterator[T]:
    """Yield the items behind a bar that counts them."""
    return iter(track(items, what, total, console=Console(stderr=True), transient=True))
