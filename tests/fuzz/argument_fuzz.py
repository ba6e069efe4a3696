"""Give every public callable malformed arguments, one at a time, and see how it ends.

``python tests/fuzz/argument_fuzz.py [--only TEXT] [--share N]`` runs all of it (minutes) and prints what went wrong.
Each attempt must end in a DdlsimError of one line, or in something accepted that may be accepted.
"""

import argparse
import collections
import contextlib
import inspect
import os
import random
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).parents[:2])

import matplotlib
from argument_calls import READERS, public
from argument_values import NEVER, VALUES
from fuzz_attempt import Hang, alarm

from ddlsim.errors import ConfigError, DdlsimError

matplotlib.use("Agg")
LONGEST = 1500  # characters of a message
#: (callable, parameter) -> values that are right there, although they are wrong nearly everywhere else
WELCOME = {
    f"{name}.{parameter}": ("-1", "np.int64 -1", "[nan, -1]")
    for name in ("Round", "messages")  # `check` says which round of which lane has a chunk or a rank that is none
    for parameter in ("src", "dst", "start", "count", "slots", "shift")
} | {f"Range.{end}": ("-1", "-0.5", "np.int64 -1") for end in ("low", "high")}
WELCOME |= {f"{name}.{p}": ("-1", "-0.5", "np.int64 -1") for name, p in (
    ("uniform", "low"), ("uniform", "high"), ("normal", "mean"),
)}  # fmt: skip


#: what only the compressor that makes it can look at, the work of a process more for each core, and callbacks, whose
#: errors are their author's
LEFT_OUT = {
    "exchange.states": VALUES, "hierarchical_exchange.states": VALUES, "settle.payload": VALUES,
    "settle.state": VALUES, "settle.mean": VALUES,
    "aggregate.payloads": VALUES, "average.payloads": VALUES, "recommend.jobs": ("None",),
    "simulate_seeds.processes": ("None",), "run.jobs": ("None",),
    **dict.fromkeys(
        ("recommend.progress", "simulate.progress", "resume.progress", "run.progress"),
        ("a class", "a function without arguments"),
    ),
}  # fmt: skip


@dataclass
class Report:
    """What came of many attempts; `failures` are (call, value, what happened)."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    failures: list = field(default_factory=list)

    def __str__(self):
        lines = [f"{call} = {value}: {what}" for call, value, what in self.failures[:40]]
        kinds = dict(collections.Counter(what.partition(":")[0] for _, _, what in self.failures))
        calls = f"{sum(self.counts.values())} calls: {dict(self.counts)}"
        return "\n".join([*lines, calls, f"failures: {kinds}"])


@contextlib.contextmanager
def somewhere_else():
    """Work in an empty folder: what is accepted as a path may be written."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def call(target, arguments):
    """Call with keywords, but for a ``*several`` and a ``**more``."""
    parameters = inspect.signature(target).parameters
    several = [n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL and n in arguments]
    given = dict(arguments)
    return target(*[value for name in several for value in given.pop(name)], **given)


def attempt(report, name, target, arguments, parameter, value):
    """Call with one argument replaced; count how it ends."""
    where = f"{name.rpartition('.')[2]}.{parameter}"
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("error")
            before = arguments.get(parameter)
            several = inspect.signature(target).parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL
            wrong = VALUES[value]()
            call(target, {**arguments, parameter: (wrong, *(before or ())[1:]) if several else wrong})
    except DdlsimError as error:
        report.counts["refused"] += 1
        text = str(error)
        if "\n" in text or len(text) > LONGEST or not text.isprintable():
            report.failures.append((f"{name}.{parameter}", value, f"message: {text[:200]!r} ({len(text)})"))
    except Hang:
        report.counts["hang"] += 1
        report.failures.append((f"{name}.{parameter}", value, "hang: took too long"))
    except Exception as error:
        report.counts["traceback"] += 1
        what = f"{type(error).__name__}: {str(error)[:150]!r} {_at(error)}"
        report.failures.append((f"{name}.{parameter}", value, what))
    else:
        report.counts["accepted"] += 1
        welcome = value in WELCOME.get(where, ()) or _is_a_number(value, target, arguments, parameter)
        if value in NEVER and not welcome:
            report.failures.append((f"{name}.{parameter}", value, "accepted: although it is wrong"))
    finally:
        import matplotlib.pyplot as plt

        plt.close("all")


def _is_a_number(value, target, arguments, parameter):
    """Return whether an integer stands where 1.5 may stand as well: then it is not too large."""
    if value != "10**29":
        return False
    try:
        call(target, {**arguments, parameter: 1.5})
    except Exception:
        return False
    return True


def _at(error):
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{at.tb_frame.f_code.co_filename.rpartition('ddlsim/')[2]}:{at.tb_lineno}")
        at = at.tb_next
    return " < ".join(frames[::-1][:4])


def fuzz(only="", share=1.0, seed=0, *, show=False):
    """Return what came of all attempts, or of a random `share` of them."""
    report, draws = Report(), random.Random(seed)
    with somewhere_else():
        for name, target, make in public():
            if not re.search(only, name) or make is None:
                continue
            parameters = list(inspect.signature(target).parameters)
            for parameter in (each for each in parameters if each != "self"):  # which Python fills in
                left_out = LEFT_OUT.get(f"{name.rpartition('.')[2]}.{parameter}", ())
                for value in VALUES:
                    if value not in left_out and draws.random() < share:
                        n_failures = len(report.failures)
                        attempt(report, name, target, make(), parameter, value)
                        for failure in report.failures[n_failures:] if show else ():
                            print(*failure, sep=" | ", flush=True)
    return report


def valid_calls():
    """Yield (name, what went wrong or "") for the valid call of each public callable."""
    with somewhere_else():
        for name, target, make in public():
            if make is None:
                yield name, "has arguments without defaults: add a valid call of it to argument_calls.CALLS"
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    call(target, make())
            except ConfigError as error:
                yield name, "" if name.rpartition(".")[2] in READERS else str(error)
            except Exception as error:
                yield name, f"{type(error).__name__}: {error} {_at(error)}"
            else:
                yield name, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="callables with this (a regular expression) in their name")
    parser.add_argument("--share", type=float, default=1.0, help="of the attempts, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = fuzz(options.only, options.share, options.seed, show=True)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
