"""A bar on the terminal that shows how far a training run is. It appears when a run takes more than a second."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn, track
from rich.progress import Progress as Bars

from ddlsim.learning import Training
from ddlsim.learning.monitor import Progress, Row
from ddlsim.readable import percent, seconds

T = TypeVar("T")

#: s after which the bar appears, and between two looks at it; between two lines where there is no terminal
DELAY, INTERVAL, LINES = 1.0, 0.1, 10.0


@contextmanager
def bar(training: Training, max_time: float) -> Iterator[Progress]:
    """Yield what a run calls after every update. The bar is on stderr and is gone at the end; where stderr is no
    terminal, there is a line now and then."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bars = Bars(*columns, console=console, transient=True)
    task = bars.add_task("", total=1.0)
    started, next_look = False, time.monotonic() + (DELAY if console.is_terminal else LINES)

    def report(now: float, n_updates: int, epoch: float, row: Row) -> None:
        nonlocal next_look, started
        if time.monotonic() < next_look:
            return
        done, line = share_done(training, max_time, now, n_updates, epoch), status(now, n_updates, epoch, row)
        if console.is_terminal:
            if not started:
                bars.start()
                started = True
            bars.update(task, completed=done or 0.0, total=None if done is None else 1.0, description=line)
        else:
            console.print(line if done is None else f"{percent(done)}: {line}", markup=False)
        next_look = time.monotonic() + (INTERVAL if console.is_terminal else LINES)

    try:
        yield report
    finally:
        if started:
            bars.stop()


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
