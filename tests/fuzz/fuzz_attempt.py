"""Give something malformed to a reader and see how it ends: as an error in one line, or as something sane."""

import math
import signal
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ddlsim.errors import DdlsimError
from ddlsim.imports.text import ReadingWarning

#: s after which a reader counts as hanging; a hundred times what the slowest takes
PATIENCE = 20


class Hang(BaseException):
    """It took too long. No Exception, so that nobody catches it."""


@dataclass
class Report:
    """What came of many attempts; `failures` are (target, mutation, what happened)."""

    counts: Counter = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    def __str__(self):
        shown = [f"{target}: {mutation}\n    {what}" for target, mutation, what in self.failures[:40]]
        return "\n".join([f"{dict(self.counts)}", *shown])


@contextmanager
def alarm(seconds=PATIENCE):
    """Raise Hang in the block if it takes more processor time, which a busy machine does not stretch."""

    def ring(signum, frame):
        raise Hang

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(report, target, mutation, read, path):
    """Call ``read(path)``, which returns what was accepted after it has checked that; count how it ends."""
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ReadingWarning)  # entries that cannot be used are left out, and counted
            read(path)
    except DdlsimError as error:
        text = str(error)
        report.counts["refused"] += 1
        if "\n" in text or len(text) > 1500:
            report.failures.append((target, mutation, f"not one line: {text[:300]!r} ({len(text)} characters)"))
        elif path.name not in text:
            report.failures.append((target, mutation, f"does not name the file: {text[:300]!r}"))
    except Hang:
        report.failures.append((target, mutation, "hangs"))
    except Exception as error:
        report.failures.append((target, mutation, _where(error)))
    else:
        report.counts["accepted"] += 1


def _where(error):
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{at.tb_frame.f_code.co_filename.rpartition('ddlsim/')[2]}:{at.tb_lineno}")
        at = at.tb_next
    return f"{type(error).__name__}: {str(error)[:200]!r} at {' < '.join(frames[::-1][:5])}"


def sane(what, value, least=0.0):
    """Assert that all numbers in an array are finite and at least `least`."""
    array = np.asarray(value, dtype=float)
    assert np.isfinite(array).all(), f"{what} is not finite: {array.ravel()[:5]}"
    assert (array >= least).all(), f"{what} is below {least}: {array.min()}"


def sane_number(what, value, above=0.0):
    assert isinstance(value, int | float), f"{what} = {value!r}"
    assert not isinstance(value, bool), f"{what} = {value!r}"
    assert math.isfinite(value), f"{what} = {value!r}"
    assert value >= above, f"{what} = {value!r}"
