"""Progress messages on stderr while numba compiles, which happens once.

In a terminal, a line shows the elapsed seconds and is removed at the end; elsewhere (a pipe, a notebook, with a
progress bar), a line is printed every 20 s. Nothing is printed for cached code, if the environment variable
``DDLSIM_QUIET`` is set, and by all but the first of several child processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: interval in s between updates in a terminal, and between checks elsewhere; interval between lines elsewhere
INTERVAL, LOOK, LINES = 0.2, 1.0, 20.0

#: Compilations that take longer than this, in s of CPU time, are announced immediately.
_LONG = 2.5


@dataclass(frozen=True)
class Part:
    """A group of functions shown under one name: those whose qualified names begin with ``prefix``.

    seconds  approximate CPU time in s for compiling all of them on one core
    """

    prefix: str
    words: str
    seconds: float


#: the first one with a matching prefix applies
PARTS = (
    Part("ddlsim.network.kernel.advance", "the event kernel", 5.0),
    Part("ddlsim.network.tasks", "the executor of steps", 1.5),
    Part("ddlsim.network.lanes", "the executor of asynchronous workers", 3.5),
    Part("ddlsim.network.extensions.replay_rounds", "replays of rounds", 1.2),
    Part("ddlsim.network.extensions", "queues, transports and changes of links", 3.0),
    Part("ddlsim.network.", "schedules, messages and timelines", 1.5),
    Part("ddlsim.cluster.", "routing", 1.0),
    Part("ddlsim.nn.attention", "the gradients of transformers", 1.2),
    Part("ddlsim.nn.", "the gradients of networks", 6.0),
)

#: called with (name of the function, part) when the compilation of a function begins
Listener = Callable[[str, Part], None]


def is_quiet() -> bool:
    """Whether messages are suppressed: ``DDLSIM_QUIET`` is set, and not to 0."""
    return os.environ.get("DDLSIM_QUIET", "0") not in ("", "0")


def _speaks() -> bool:
    """Whether this process prints messages: of several child processes, only the first does."""
    return multiprocessing.parent_process() is None or multiprocessing.current_process().name.endswith("-1")


class _Teller:
    """Tracks compilations by numba; functions compiled within others count as parts of these."""

    def __init__(self) -> None:
        self.depth = 0
        self.listeners: list[Listener] = []
        self.muted = False  # another part of the program reports instead
        self.remark = ""  # why compiled code is not cached
        self._told: set[Part] = set()
        self._spent: dict[Part, tuple[float, float]] = {}  # elapsed and CPU time in s so far
        self._next_line = 0.0
        self._began = (0.0, 0.0)
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        name = f"{function.__module__}.{function.__name__}"
        part = next((part for part in PARTS if name.startswith(part.prefix)), None)
        if self.depth or part is not None:
            self.depth += 1
        if self.depth != 1 or part is None:
            return
        for listener in self.listeners:
            listener(function.__name__, part)
        if self.muted or is_quiet() or not _speaks():
            return
        if part not in self._told and part.seconds > _LONG:
            how_often = "in every run" if self.remark else "once"
            _say(f"ddlsim: compiling {part.words} ({how_often}, about {part.seconds:.0f} s of CPU time)\n")
            if self.remark and not self._told:
                _say(f"ddlsim: {self.remark}\n")
            self._told.add(part)
        if part not in self._spent:
            self._next_line = time.monotonic() + LINES
        self._began = (time.monotonic(), time.process_time())
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, args=(part, self._over), daemon=True)
        self._ticker.start()

    def on_end(self, event: Any) -> None:
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0 and self._ticker is not None:
            self._over.set()
            self._ticker.join()
            self._ticker = None

    def _tick(self, part: Part, over: threading.Event) -> None:
        # not with a progress bar, which has its own line: in this process, or in its parent
        terminal, alone = sys.__stderr__, multiprocessing.parent_process() is None
        live = alone and terminal is not None and sys.stderr is terminal and terminal.isatty()
        shown = 0
        while not over.wait(INTERVAL if live else LOOK):
            line = f"ddlsim: compiling {part.words}: {self._seconds(part)}"
            if live:
                _say(f"\r{line:<{shown}}")
                shown = len(line)
            elif time.monotonic() >= self._next_line:
                _say(f"{line}\n")
                self._next_line = time.monotonic() + LINES
        if shown:
            _say(f"\r{'':<{shown}}\r")
        self._spent[part] = self._times(part)

    def _times(self, part: Part) -> tuple[float, float]:
        before, before_cpu = self._spent.get(part, (0.0, 0.0))
        return before + time.monotonic() - self._began[0], before_cpu + time.process_time() - self._began[1]

    def _seconds(self, part: Part) -> str:
        passed, computed = self._times(part)
        busy = f" ({computed:.0f} s of CPU time)" if computed < 0.7 * passed - 1.0 else ""
        return f"{passed:.0f} s{busy}"


def _say(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(text)
        sys.stderr.flush()


teller = _Teller()
