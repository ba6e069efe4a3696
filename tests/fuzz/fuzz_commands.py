"""Every option and argument of every command with malformed values: exit code 0, or 2 and one line."""

import contextlib
import io
import itertools
import os
import sys

import typer
from fuzz_attempt import Hang, _where, alarm
from fuzz_documents import EXPERIMENT, GENERATED, MEASUREMENTS, MODEL, RUNS, STUDY

from ddlsim import cli

CLUSTER = """
[generator]
type = "star"
n_hosts = 2
bandwidth = "10 Gbit/s"
latency = "10 us"
[host]
device = "v100"
price = "3 USD/h"
"""
#: words that a command works with, quickly; FOLDER is a folder with the files below
LINES = {
    "run": ["run", "FOLDER/c.toml", "-m", "lenet5", "-n", "2", "--steps", "1"],
    "scaling": ["scaling", "FOLDER/c.toml", "-m", "lenet5", "-n", "1,2", "--steps", "1"],
    "sweep": ["sweep", "FOLDER/s.toml", "-j", "1"],
    "recommend": ["recommend", "FOLDER/c.toml", "-m", "lenet5", "-n", "2", "-b", "8", "-j", "1"],
    "report": ["report", "FOLDER/s.sqlite"],
    "validate": ["validate", "FOLDER/r.csv", "-c", "FOLDER/c4.toml", "-m", "resnet50"],
    "calibrate": ["calibrate", "FOLDER/m.csv", "-c", "FOLDER/c.toml"],
    "import": ["import", "FOLDER/t.txt", "--bandwidth", "25 GB/s"],
    "fits": ["fits", "lenet5", "v100", "-b", "8"],
    "lab": ["lab", "FOLDER/c.toml", "--sizes", "1 B", "--operations", "nothing"],
    "show topology": ["show", "topology", "FOLDER/c.toml"],
    "show plan": ["show", "plan", "FOLDER/p.goal", "--on", "FOLDER/c.toml"],
    "show model": ["show", "model", "FOLDER/m.toml"],
    "topologies": ["topologies"],
    "models": ["models"],
    "devices": ["devices"],
    "stacks": ["stacks"],
    "algorithms": ["algorithms"],
    "warm-up": ["warm-up"],
}
#: serves until it is stopped; tests/explore give it what is malformed
SERVES = ("explore",)
FILES = {
    "c.toml": CLUSTER, "c4.toml": CLUSTER.replace("n_hosts = 2", "n_hosts = 4"), "g.toml": GENERATED,
    "e.toml": EXPERIMENT, "m.toml": MODEL, "m.csv": MEASUREMENTS, "r.csv": RUNS, "study.toml": STUDY, "empty.toml": "",
    "broken.toml": "[",
    "t.txt": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n",
    "p.goal": "num_ranks 2\nrank 0 {\ncalc 5\nsend 8b to 1\n}\nrank 1 {\nrecv 8b from 0\n}\n",
    "s.toml": '[base]\ncluster = "c.toml"\nmodel = "lenet5"\nsteps = 1\n[vary]\nworkers = [1, 2]\n',
}  # fmt: skip
VALUES = [
    "", " ", "x", "-1", "0", "1", "2", "3", "0.5", "-0.5", "nan", "inf", "1e400", "1e-320", "1000000000000", "9" * 5000,
    "\u00b2", "\u0661", "1,2", ",", "1,,x", "1;2", "x=y", "=", "all_reduce=ring", "auto", "none", "25 Gbit/s", "1 s",
    "-5 h", "1e300 h", "10%", "-10%", "5000 images/s", "3 USD/h", "os:nothing", "a" * 100_000, "\u202e", "\udcff", "\n",
    "--", "-", "..", "/", "/dev/null", "/nowhere/x", "FOLDER", "FOLDER/no.toml", "FOLDER/no.png", "FOLDER/x.svg",
    "FOLDER/c.toml", "FOLDER/e.toml", "FOLDER/g.toml", "FOLDER/m.toml", "FOLDER/m.csv", "FOLDER/r.csv", "FOLDER/s.toml",
    "FOLDER/study.toml", "FOLDER/s.sqlite", "FOLDER/binary.toml", "FOLDER/binary.json", "FOLDER/empty.toml",
    "FOLDER/broken.toml", "FOLDER/new.sqlite", "FOLDER/new.csv", "FOLDER/new.json", "FOLDER/new.npz", "FOLDER/new.html",
    "FOLDER/new.toml", "FOLDER/unreadable.toml", "FOLDER/dir.toml", "FOLDER/" + "n" * 300 + ".toml", "lenet5+x",
    "resnet5",
]  # fmt: skip


def commands():
    """Yield (name, command) of every command that there is."""

    def walk(command, names):
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield from walk(inner, [*names, name])
        else:
            yield " ".join(names), command

    yield from walk(typer.main.get_command(cli.app), [])


def prepare(folder, store):
    """Write the files that the lines name; have the kernels compiled."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("binary.toml", "binary.json"):
        (folder / name).write_bytes(bytes(range(256)))
    (folder / "unreadable.toml").write_text(CLUSTER)
    (folder / "unreadable.toml").chmod(0)
    (folder / "dir.toml").mkdir()
    (folder / "s.sqlite").write_bytes(store)
    for name in ("run", "validate"):  # compile what they need while no alarm is set
        code, _, err = call([word.replace("FOLDER", str(folder)) for word in LINES[name]], folder)
        assert code == 0, err


def lines(folder):
    """Yield (command, words): one option or argument malformed, the others as in LINES."""
    for name, command in commands():
        if name in SERVES:
            continue
        line = [word.replace("FOLDER", str(folder)) for word in LINES[name]]
        values = [value.replace("FOLDER", str(folder)) for value in VALUES]
        yield name, line
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in ("help", "version"):
                option = parameter.opts[0]
                if parameter.is_flag:
                    yield name, [*line, option]
                    yield name, [*line, option, "x"]
                else:
                    yield from ((name, [*line, option, value]) for value in values)
                    yield name, [*line, option]
        n_words = len(name.split())
        for i, value in itertools.product(range(n_words, len(line)), values):
            if not line[i].startswith("-"):
                yield name, [*line[:i], value, *line[i + 1 :]]
        yield name, [*line, "more"]
        yield name, [*line, "--surprise", "1"]
        yield name, line[:n_words]


def call(words, folder):
    """Return (exit code, output, errors) of a command in a folder, where it may write whatever an option names."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["ddlsim", *words]
    here = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
    finally:
        sys.argv = before
        os.chdir(here)
    return code, out.getvalue(), err.getvalue()


def attempt(report, name, words, folder):
    """Run a command in a folder; count how it ends."""
    what = " ".join(word if len(word) < 60 else f"{word[:57]}..." for word in words)
    try:
        with alarm(60):
            code, out, err = call(words, folder)
    except Hang:
        report.failures.append((name, what, "hangs"))
        return
    except Exception as error:
        report.failures.append((name, what, _where(error)))
        return
    report.counts[f"exit {code}"] += 1
    bad = None
    if code not in ((0, 1, 2) if "--tolerance" in words else (0, 2)):  # 1: the error is larger than that
        bad = f"exit code {code}: {err[-300:]!r}"
    elif "Traceback" in err + out:
        bad = f"a traceback: {err[-300:]!r}"
    elif code == 2 and not err.startswith("Usage: "):  # of ddlsim alone, or the help
        if not err.startswith("error: ") or err.count("\n") != 1 or len(err) > 2000:
            bad = f"not one line of error: {err[:300]!r} ({len(err)} characters)"
    elif code == 0 and any(word in out for word in ("nan ", "NaN", " nan")):
        bad = f"nan in the output: {out[:300]!r}"
    if code == 2 and len(err) > 4000:
        bad = f"a long message: {err[:200]!r} ({len(err)} characters)"
    if bad:
        report.failures.append((name, what, bad))
