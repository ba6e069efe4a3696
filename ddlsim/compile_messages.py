"""Progress messages on stderr while numba compiles, which happens once.

In a terminal a line counts the seconds and is gone at the end; elsewhere (a pipe, a notebook, under a progress bar)
there is a line every 20 s. Nothing is said of what comes from the cache, by all but the first of the processes that one
has started, and where the environment variable ``DDLSIM_QUIET`` is set.
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

#: s between two looks at the clock in a terminal, and elsewhere; between two lines there
INTERVAL, LOOK, LINES = 0.2, 1.0, 20.0

#: What is announced as soon as it begins takes longer than this, in s of CPU time.
_LONG = 2.5


@dataclass(frozen=True)
class Part:
    """Functions that people know as one thing: those whose names, with the module's, begin with ``prefix``.

    seconds  CPU time that compiling all of them takes on one core, about
    """

    prefix: str
    words: str
    seconds: float


#: the first whose prefix fits
PARTS = (
    Part("ddlsim.network.kernel.advance", "the event kernel", 7.0),
    Part("ddlsim.network.tasks", "the executor of steps", 1.5),
    Part("ddlsim.network.lanes", "the executor of asynchronous workers", 3.5),
    Part("ddlsim.network.extensions", "queues, transports and changes of links", 3.0),
    Part("ddlsim.network.", "schedules, messages and timelines", 1.5),
    Part("ddlsim.cluster.", "routing", 1.0),
    Part("ddlsim.nn.attention", "the gradients of transformers", 1.2),
    Part("ddlsim.nn.", "the gradients of networks", 6.0),
)

#: are told (name of the function, part) of everything that is compiled, when it begins
Listener = Callable[[str, Part], None]


def is_quiet() -> bool:
    """Whether messages are suppressed: ``DDLSIM_QUIET`` is set, and not to 0."""
    return os.environ.get("DDLSIM_QUIET", "0") not in ("", "0")


def _speaks() -> bool:
    """Whether this process says what it compiles: of several that one has started, the first speaks for all."""
    return multiprocessing.parent_process() is None or multiprocessing.current_process().name.endswith("-1")


class _Teller:
    """Follows what numba compiles; functions that are compiled inside others belong to these."""

    def __init__(self) -> None:
        self.depth = 0
        self.listeners: list[Listener] = []
        self.muted = False  # another part of the program reports instead
        self.remark = ""  # why what is compiled is not kept
        self._told: set[Part] = set()
        self._spent: dict[Part, tuple[float, float]] = {}  # elapsed and CPU s so far
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
        # not under a progress bar, which has a line of its own: here, or in the process that has started this one
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
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
        sys.stderr.write(text)
        sys.stderr.flush()


teller = _Teller()
