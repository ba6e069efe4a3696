"""Background work of a page, one job per name at a time; a newer job replaces an older one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import panel as pn

from ddlsim.errors import DdlsimError
from ddlsim.runtime.loop import watched

T = TypeVar("T")
#: executes a call where the page may be modified
Deliver = Callable[[Callable[[], None]], None]

#: interval in s between progress updates, and delay before the first
INTERVAL, DELAY = 0.1, 0.3
_LOG = logging.getLogger(__name__)


class CancelledError(BaseException):
    """The user has cancelled the work. Not an Exception, which a study would record as a failed run and continue."""


class Progress:
    """Interface for running work to report progress and check for cancellation; created by :class:`Jobs`."""

    def __init__(self, deliver: Deliver, show: Callable[[float, str], None]) -> None:
        self.cancelled = False
        self._deliver = deliver
        self._show = show
        self._next = time.monotonic() + DELAY
        self._spoke = False

    def check(self) -> None:
        """Raise CancelledError if the work has been cancelled; call this regularly."""
        if self.cancelled:
            raise CancelledError

    def update(self, share: float, text: str) -> None:
        """Report the share done (0 to 1; below 0: unknown) and the current activity, shown ten times a second."""
        if time.monotonic() >= self._next:
            self._next, self._spoke = time.monotonic() + INTERVAL, True
            self.tell(lambda: self._show(share, text))

    def begin(self) -> None:
        """Show a progress bar soon, unless the work reports progress before."""

        def show() -> None:
            if not self._spoke:
                self.tell(lambda: self._show(-1.0, ""))

        timer = threading.Timer(2.0 * DELAY, show)
        timer.daemon = True
        timer.start()

    def tell(self, call: Callable[[], None]) -> None:
        """Execute `call` where the page may be modified, unless the work is cancelled by then."""
        self._deliver(lambda: None if self.cancelled else call())


class Jobs:
    """The background work of one page.

    `deliver` executes a call where the page may be modified: by default, in the thread of the document that is current
    on creation. Work must be started and cancelled in the same thread.
    """

    def __init__(self, deliver: Deliver | None = None) -> None:
        self._deliver = deliver or _document_thread()
        self._lock = threading.Lock()
        #: work by name
        self._running: dict[str, Callable[[], None]] = {}
        self._waiting: dict[str, Callable[[], None]] = {}
        #: work whose end the page has not handled yet; it may have ended
        self._wanted: dict[str, Progress] = {}
        self._bars: dict[str, list[_Bar]] = {}
        document = pn.state.curdoc
        if document is not None and document.session_context is not None:
            document.on_session_destroyed(lambda _: self.close())

    def start(
        self, name: str, work: Callable[[Progress], T], done: Callable[[T], None], failed: Callable[[str], None]
    ) -> None:
        """Run ``work(progress)`` in the background, then call `done` with its result, or `failed` with the error.

        Older work of the same name is cancelled, and its functions are not called any more. New work starts when the
        older work has noticed, so that only one of a name computes: at its next simulated step or update, or when it
        checks.
        """
        progress = Progress(self._deliver, lambda share, text: self._show(name, share, text))

        def do() -> None:
            try:
                with watched(progress.check):
                    end: Callable[[], None] = partial(done, work(progress))
            except CancelledError:
                return
            except DdlsimError as error:
                end = partial(failed, str(error))
            except Exception as error:  # a bug: shown on the page, with the traceback on the terminal
                _LOG.exception("%s failed", name)
                text = f"{name} failed: {type(error).__name__}; see the terminal (a bug in ddlsim: please report it)"
                end = partial(failed, text)
            progress.tell(lambda: self._ended(name, end))

        self._give_up(name)
        self._wanted[name] = progress
        with self._lock:
            waits = name in self._running
            (self._waiting if waits else self._running)[name] = do
        progress.begin()
        if not waits:
            threading.Thread(target=self._work, args=(name, do), name=f"ddlsim {name}", daemon=True).start()

    def ask(
        self,
        name: str,
        prepared: Callable[[], Callable[[Progress], T]],
        done: Callable[[T], None],
        failed: Callable[[str], None],
    ) -> None:
        """Start the work that `prepared` returns, or call `failed` with the DdlsimError that it raises."""
        try:
            work = prepared()
        except DdlsimError as error:
            self.cancel(name)
            failed(str(error))
        else:
            self.start(name, work, done, failed)

    def cancel(self, name: str) -> None:
        """Cancel the work of this name, if any: neither `done` nor `failed` will be called."""
        with self._lock:
            self._waiting.pop(name, None)
        self._ended(name, lambda: None)

    def computes(self, name: str) -> bool:
        """Return whether work of this name is running; cancelled work is until it notices."""
        with self._lock:
            return name in self._running

    def close(self) -> None:
        """Cancel all work."""
        for name in list(self._wanted):
            self.cancel(name)

    def bar(self, name: str, cancelled: Callable[[], None] | None = None) -> pn.Row:
        """Return a progress bar with a cancel button, visible while work of this name runs for more than a moment.

        `cancelled` is called after the button has been pressed.
        """

        def cancel(_: object) -> None:
            self.cancel(name)
            if cancelled is not None:
                cancelled()

        bar = _Bar(cancel)
        self._bars.setdefault(name, []).append(bar)
        return bar.row

    def _work(self, name: str, do: Callable[[], None]) -> None:
        while True:
            do()
            with self._lock:
                if name not in self._waiting:
                    del self._running[name]
                    return
                do = self._running[name] = self._waiting.pop(name)

    def _show(self, name: str, share: float, text: str) -> None:
        for bar in self._bars.get(name, ()):
            bar.show(share, text)

    def _ended(self, name: str, call: Callable[[], None]) -> None:
        self._give_up(name)
        for bar in self._bars.get(name, ()):
            bar.row.visible = False
        call()

    def _give_up(self, name: str) -> None:
        """Cancel the work of this name and ignore its result."""
        if older := self._wanted.pop(name, None):
            older.cancelled = True


class _Bar:
    def __init__(self, cancel: Callable[[object], None]) -> None:
        self._text = pn.widgets.StaticText(value="", sizing_mode="stretch_width", margin=(4, 8))
        self._bar = pn.indicators.Progress(value=-1, max=100, sizing_mode="stretch_width", height=8, margin=(4, 8))
        button = pn.widgets.Button(label="Cancel", width=90, margin=(8, 8))
        button.on_click(cancel)
        column = pn.Column(self._text, self._bar, sizing_mode="stretch_width", margin=0)
        self.row = pn.Row(column, button, visible=False, sizing_mode="stretch_width")

    def show(self, share: float, text: str) -> None:
        """Show the share done (0 to 1, below 0: unknown) and the current activity."""
        self._bar.value = -1 if share < 0.0 else round(100.0 * min(share, 1.0))
        self._text.value = text or "computing ..."
        self.row.visible = True


def _document_thread() -> Deliver:
    """Return a function that executes a call in the current document's thread; immediately if there is no server."""
    document = pn.state.curdoc
    if document is None or document.session_context is None:
        return lambda call: call()

    calls: deque[Callable[[], None]] = deque()

    def all_of_them() -> None:
        while calls:
            calls.popleft()()

    def deliver(call: Callable[[], None]) -> None:
        calls.append(call)  # the server does not guarantee the order of callbacks, so each executes all pending calls
        if document.session_context is not None and not document.session_context.destroyed:
            # changes to a page that is still loading would sometimes be lost
            document.add_next_tick_callback(lambda: pn.state.onload(all_of_them))

    return deliver
