"""Worker processes on this machine, each with its own pipe.

A killed process loses only its own work: it shares no pipe or lock with the others, and another process replaces it.
(With concurrent.futures or loky, one death fails all work of a pool, without an exit code.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from ddlsim.errors import ConfigError, DdlsimError

#: maximum number of consecutive attempts to start a process that is killed at its start
_STARTS = 5
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class ProcessDied(BrokenExecutor):
    """The process that executed an order died; another one replaces it."""


class Processes:
    """Worker processes on this machine, started by spawning, with one thread each.

    work    function that is called with each order; at the top level of a module
    warm    called in this process while they start, for example to compile code into the cache on disk
    option  the argument that sets their number, for errors

    They end when this process ends, in any way, and ignore Ctrl-C. Raises ConfigError if they cannot start because
    the script that they import has no main guard.
    """

    def __init__(
        self,
        n_workers: int,
        work: Callable[[Any], object],
        warm: Callable[[], None] | None = None,
        *,
        option: str = "jobs",
    ) -> None:
        self.n_workers, self._work, self._option = n_workers, work, option
        self._orders: SimpleQueue[tuple[Future[Any], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[SpawnProcess] = set()
        self._closing = False
        ready: list[Future[None]] = [Future() for _ in range(n_workers)]
        self._threads = [threading.Thread(target=self._serve, args=(first,), daemon=True) for first in ready]
        try:
            with _block_interrupts():
                for thread in self._threads:
                    thread.start()
            if warm is not None:
                warm()
            ready[0].result()
        except BaseException:
            self.close(at_once=True)
            raise

    def submit(self, order: object) -> Future[Any]:
        """Execute an order in a process; the future raises ProcessDied if the process dies."""
        future: Future[Any] = Future()
        self._orders.put((future, order))
        return future

    def close(self, *, at_once: bool) -> None:
        """End the processes; with `at_once`, without waiting for running work."""
        with self._lock:
            self._closing = True
            for process in self._running if at_once else ():
                process.terminate()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # ------------------------------------------------------------ one thread per process

    def _serve(self, ready: Future[None]) -> None:
        """Send orders to a process, one at a time, and receive its answers."""
        worker, problem = self._started()
        if problem is None:
            ready.set_result(None)
        else:
            ready.set_exception(problem)
        while (order := self._orders.get()) is not None:
            future, content = order
            if not future.set_running_or_notify_cancel():
                continue
            if worker is None:
                future.set_exception(problem)
                continue
            answer, error = worker.ask(content)
            if error is None:
                future.set_result(answer)
            elif isinstance(error, EOFError):
                future.set_exception(ProcessDied(_cause(self._ended(worker))))
                worker, problem = self._started()
            else:
                future.set_exception(error)
        if worker is not None:
            worker.pipe.close()  # ends the process
            self._ended(worker)

    def _started(self) -> tuple[_Worker | None, Exception | None]:
        """Return a process that is ready for work, or the reason why there is none."""
        for _ in range(_STARTS):
            with self._lock:
                if self._closing:
                    return None, ProcessDied("the pool is closed")
                try:
                    worker = _start(self._work)
                except RuntimeError:  # this process belongs to a pool that imports the script
                    return None, self._unguarded()
                except OSError as error:  # too many processes, no memory, or killed before it could read
                    return None, DdlsimError(
                        f"{self._option}: a process cannot be started: {error}; use fewer processes"
                    )
                self._running.add(worker.process)
            if worker.is_ready():
                return worker, None
            code = self._ended(worker)
            if code is None or code >= 0:
                return None, self._unguarded()
        why = "processes are killed during their start (not enough memory?); use fewer"
        return None, DdlsimError(f"{self._option}: {why}")

    def _unguarded(self) -> ConfigError:
        return ConfigError(
            f"{self._option}: a worker process died while starting; make sure that your script runs its code under "
            f"\"if __name__ == '__main__'\"; if it does, set {self._option}=1 to see the error"
        )

    def _ended(self, worker: _Worker) -> int | None:
        """Wait for the end of a process, and return its exit code: the negative signal if it was killed."""
        with self._lock:  # starting a process polls all others, which must not be joined meanwhile
            worker.process.join()
            self._running.discard(worker.process)
        worker.pipe.close()
        return worker.process.exitcode


class _Worker:
    """A process, and this process's end of the pipe to it."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def is_ready(self) -> bool:
        """Wait until it has started; False if it died before."""
        try:
            self.pipe.recv()
        except (EOFError, OSError):
            return False
        return True

    def ask(self, order: object) -> tuple[object, Exception | None]:
        """Return the answer to an order, or the exception that it raised: EOFError if the process died."""
        try:
            self.pipe.send(order)
            answer: tuple[object, Exception | None] = self.pipe.recv()
        except (EOFError, OSError):
            return None, EOFError("the process has died")
        except Exception as error:  # the answer cannot be unpickled here
            return None, error
        return answer


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _start(work: Callable[[Any], object]) -> _Worker:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_pipe, args=(theirs, work))
    try:
        with one_thread_each(), _block_interrupts():
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # only the process holds it now, so that its end closes the pipe
    return _Worker(process, ours)


# ---------------------------------------------------------------- in the process


def _serve_pipe(pipe: Connection, work: Callable[[Any], object]) -> None:
    """Execute the orders that arrive through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            order = pipe.recv()
            try:
                answer: tuple[object, Exception | None] = work(order), None
            except Exception as error:
                answer = None, _sendable(error)
            pipe.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C while processes start, until :func:`_serve_pipe` ignores it; this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Make processes started in this context use one thread each for linear algebra."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
