"""Stop, save and resume a training run. A resumed run is the same experiment, perhaps with a later end."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import ddlsim
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.learning import checkpoint as files
from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.learner import Task
from ddlsim.learning.monitor import Monitor, Progress, Row
from ddlsim.plain import flattened
from ddlsim.run.experiment import Experiment
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: fields of an experiment that may differ in the resumed run: they determine its end
_ENDS = ("epochs", "updates", "target_accuracy", "target_loss", "moving_average")
ENDS = frozenset({"max_time", *(f"training.{name}" for name in _ENDS)})


@dataclass(frozen=True)
class Saved:
    """A saved run and its file."""

    path: str
    checkpoint: Checkpoint
    manifest: dict[str, object]

    def check(self, other: dict[str, object]) -> None:
        """Raise ConfigError if `other`, the manifest of the resumed run, differs in more than its end."""
        before, now = flattened(self.manifest), flattened(other)
        for name in dict.fromkeys([*before, *now]):
            if name not in ENDS and before.get(name) != now.get(name):
                remedy = "only the end of the run may change" if name != "ddlsim" else "continue it with that version"
                saved, current = before.get(name), now.get(name)
                raise ConfigError(
                    f"{self.path}: {name}: the run was saved with {saved!r}, but the resumed run has {current!r}; "
                    f"{remedy}"
                )


def manifest(experiment: Experiment, task: Task) -> dict[str, object]:
    """Return the values that a saved run and its continuation must share.

    Models and data are compared by their names and contents, independent of their location. The models of `experiment`
    have been loaded.
    """
    fields = experiment.manifest() | {"model": _digest(experiment.model)}
    if experiment.time_model is not None:
        fields["time_model"] = _digest(experiment.time_model)
    training = fields["training"]
    assert isinstance(training, dict)
    training["data"], training["held_out"] = _digest(task.train), _digest(task.held_out)
    return {"ddlsim": ddlsim.__version__, **fields}


def _digest(part: object) -> str:
    content = hashlib.sha256()
    if isinstance(part, DataSet):
        content.update(part.x.tobytes() + part.labels.tobytes())
    else:
        assert isinstance(part, Model)
        content.update(repr(dataclasses.astuple(part)).encode())
    return f"{getattr(part, 'name', '')} ({content.hexdigest()[:12]})"


def saving(path: str | Path, experiment: Experiment, task: Task) -> Callable[[Checkpoint], None]:
    """Return a function that saves runs of `experiment` at `path`. Raises ConfigError if the folder does not exist."""
    folder = Path(path).parent
    if not os.path.isdir(folder):
        raise ConfigError(f"checkpoint = {str(path)!r}: folder {str(folder)!r} does not exist; create it first")
    about = manifest(experiment, task)
    return lambda checkpoint: files.write(path, checkpoint, about)


def save(result: Result, path: str | Path) -> None:
    """Write the file for :func:`ddlsim.resume`; see :meth:`ddlsim.Result.save`."""
    monitor = result.monitor
    if monitor is None or monitor.learner.task is None:
        raise ConfigError("a timing-only run cannot be saved; for a training run, set training=ddlsim.Training(...)")
    if monitor.checkpoint is None:
        raise ConfigError(
            f"{path}: cannot be saved: the run was stopped in the middle of a computation ({result.stop_reason}). "
            "Press Ctrl-C once to stop a run where it can be saved; a second Ctrl-C stops it at once"
        )
    files.write(path, monitor.checkpoint, manifest(result.experiment, monitor.learner.task))


def load(path: str | Path) -> Saved:
    """Return a saved run. Raises ConfigError if the file is damaged, too new, or not a saved run."""
    return Saved(str(path), *files.read(path))


# ------------------------------------------------------------ stopping and saving a run in progress


@dataclass
class Interrupt:
    """Request to stop the run before its clock advances."""

    wanted: bool = False

    def __call__(self) -> None:
        """Request a stop before the clock advances."""
        self.wanted = True

    def guarded(self, progress: Progress) -> Progress:
        """Return `progress` wrapped such that a KeyboardInterrupt in it stops the run at a point where it can be
        saved."""

        def report(now: float, n_updates: int, epoch: float, row: Row) -> None:
            try:
                progress(now, n_updates, epoch, row)
            except KeyboardInterrupt:
                self()

        return report

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C request a stop; the second raises KeyboardInterrupt anywhere.

        Applies only in the main thread, which receives signals, and if no other handler is installed.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return

        import multiprocessing  # slow to import, and only training runs stop here

        def first(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self()
            if multiprocessing.parent_process() is None:
                with suppress(OSError):  # not print, which the signal may have interrupted
                    os.write(2, b"stopping before the clock goes on; Ctrl-C again stops at once\n")

        signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class SavePoints:
    """Decides, before the clock advances, whether the run stops; also saves it periodically.

    save   function that saves the run, every `every` s of real time; None: nothing is saved
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
        ended = self.monitor.checkpoint is not None  # and is already marked
        if self.save is not None and not ended and time.monotonic() >= self._next:
            self.save(self.monitor.snapshot())
            self._next = time.monotonic() + self.every
        return self.interrupt.wanted
