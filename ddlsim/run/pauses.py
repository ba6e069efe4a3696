"""Where a training run may stop: before time goes on, where everything that a saved run needs is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.monitor import Monitor, Progress, Row


@dataclass
class Interrupt:
    """Whether somebody wants the run to stop before its clock goes on."""

    wanted: bool = False

    def __call__(self) -> None:
        """Stop the run before its clock goes on."""
        self.wanted = True

    def guarded(self, progress: Progress) -> Progress:
        """Return `progress` such that a KeyboardInterrupt in it stops the run where it can be saved."""

        def report(now: float, n_updates: int, epoch: float, row: Row) -> None:
            try:
                progress(now, n_updates, epoch, row)
            except KeyboardInterrupt:
                self()

        return report

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C stop the run like this; the second is a KeyboardInterrupt wherever it comes.

        Only in the main thread, the one that gets signals, and where nobody else handles them.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return

        def first(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self()
            if multiprocessing.parent_process() is None:
                with suppress(OSError):  # and not print, which may be what the signal came in the middle of
                    os.write(2, b"stopping before the clock goes on; Ctrl-C again stops at once\n")

        signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Pauses:
    """Asked before time goes on whether the run should stop; also saves it now and then.

    save   writes a saved run, every `every` s of real time; None: nothing is saved
    """

    monitor: Monitor
    interrupt: Interrupt
    save: Callable[[Checkpoint], None] | None = None
    every: float = 60.0
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self._next = time.monotonic() + self.every

    def __call__(self) -> bool:
        """Return whether the run should stop here."""
        ended = self.monitor.checkpoint is not None  # and is marked already
        if self.save is not None and not ended and time.monotonic() >= self._next:
            self.save(self.monitor.snapshot())
            self._next = time.monotonic() + self.every
        return self.interrupt.wanted
