"""How long four people wait for their first answer, from a fresh clone with nothing compiled, and again, as JSON.

    python benchmarks/first_answer.py [--install] [--here] [--user NAME] [--json FILE]

`commands` is how many each types until the answer is there (it is looked for in what they print), `seconds` real time
and `processor_seconds` that of all processes. The clone is of the last commit. By default it is used with this
interpreter and what is installed for it; `--install` makes an environment of its own, and says what that takes, apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS, SECONDS = 2, 60.0

LEARNING = """
import ddlsim

training = ddlsim.Training("digits", rate=0.2, epochs=20, target_accuracy=0.95, evaluate_every=8)
for strategy in (ddlsim.AllReduce("ring"), ddlsim.LocalSGD(period=4)):
    result = ddlsim.simulate(
        "office-1gbe", "digits-cnn", strategy, batch_size=32, training=training,
        time_model="resnet18", compute=ddlsim.Measured("400 ms", 32),
    )
    print(f"{strategy.label}: 95 % after {result.time_to_accuracy(0.95):.1f} s")
"""
LECTURE = """
import ddlsim
from ddlsim.collectives import all_reduce

for algorithm in ("ring", "binomial_tree"):
    print(algorithm, ddlsim.collective_time("office-1gbe", algorithm, "100 MB", ranks=8), "s")
all_reduce.ring(4).animate("ring.gif")
print("drawn: ring.gif")
"""


@dataclass(frozen=True)
class User:
    """Somebody with a question.

    question  what they want to know
    files     what they have: name -> content
    commands  what they type
    answer    what must be in all that is printed
    """

    question: str
    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    answer: str


def users(samples: Callable[[str], object]) -> dict[str, User]:
    """Return the four; `samples` gives what stands for the files of a real cluster (tests/page_files.py)."""
    pod = "dgx-a100-pod+bandwidth={} Gbit/s"
    model = ("--model", "bert-large", "--batch-size", "16", "--workers", "32")
    return {
        "infrastructure engineer": User(
            "What limits 32 GPUs, and what do 400 instead of 200 Gbit/s bring?",
            {},
            (("ddlsim", "run", pod.format(200), *model), ("ddlsim", "run", pod.format(400), *model)),
            r"(?s)throughput .*bottleneck .*throughput .*bottleneck ",
        ),
        "PhD student": User(
            "How much sooner does local SGD reach 95 %?",
            {"learn.py": LEARNING},
            (("python", "learn.py"),),
            r"(?s)ring.*95 % after [\d.]+ s.*local SGD.*95 % after [\d.]+ s",
        ),
        "administrator": User(
            "Does it predict the runs of our machine?",
            {
                "topo.txt": str(samples("nvidia_smi")(8)),  # type: ignore[operator]
                "nccl.log": str(samples("nccl_tests")(8, named=True)),  # type: ignore[operator]
                "runs.csv": str(samples("RUNS")),
            },
            (
                (
                    "ddlsim", "calibrate", "nccl.log", "--cluster", "topo.txt+bandwidth=25 GB/s+device=v100",
                    "--out", "calibrated.toml",
                ),
                ("ddlsim", "validate", "runs.csv", "--cluster", "calibrated.toml", "--model", "resnet50"),
            ),
            r"mean absolute",
        ),
        "lecturer": User(
            "What does a ring do, and is a tree faster?",
            {"lecture.py": LECTURE},
            (("python", "lecture.py"),),
            r"(?s)ring [\d.]+ s.*binomial_tree [\d.]+ s.*drawn: ring.gif",
        ),
    }  # fmt: skip


def spent() -> float:
    """Return the processor time of all processes that this one has started and that have ended, in s."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def play(user: User, program: Program, folder: Path, cache: Path | None) -> dict[str, object]:
    """Let a user type their commands in a folder of their own; return what it took."""
    folder.mkdir()
    for name, content in user.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    started, before, printed = time.perf_counter(), spent(), ""
    for command in user.commands:
        done = subprocess.run(
            program.words(command), cwd=folder, env=program.environment(cache), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        printed += done.stdout
    if not re.search(user.answer, printed):
        sys.exit(f"{user.question} is not answered by\n{printed}")
    return {"seconds": time.perf_counter() - started, "processor_seconds": spent() - before}


@dataclass(frozen=True)
class Program:
    """An interpreter, and the checkout that it is used with; None if that is installed."""

    python: str
    checkout: Path | None

    def words(self, command: tuple[str, ...]) -> list[str]:
        """Return what is started for a command."""
        first = {"python": [self.python], "ddlsim": [self.python, "-m", "ddlsim"]}[command[0]]
        return [*first, *command[1:]]

    def environment(self, cache: Path | None) -> dict[str, str]:
        """Return the environment, with a folder for what is compiled (None: the usual one)."""
        kept = {} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
        path = {} if self.checkout is None else {"PYTHONPATH": str(self.checkout)}
        others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**others, **path, **kept}


def installed(folder: Path, checkout: Path) -> tuple[Program, float]:
    """Install a checkout into an environment of its own; also return how many s that took."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", checkout], check=True)
    return Program(str(python), None), time.perf_counter() - started


def measure(folder: Path, names: list[str], *, install: bool, here: bool) -> dict[str, object]:
    """Clone, and let the users of these names (all, if there are none) ask, twice each.

    `here` asks once, without a clone, with what is compiled already.
    """
    checkout = ROOT if here else folder / "ddlsim"
    if not here:
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout], check=True)
    program, seconds = Program(sys.executable, checkout), None
    if install:
        program, seconds = installed(folder / "venv", checkout)
    sys.path.insert(0, str(ROOT / "tests"))
    import page_files

    rows = []
    for name, user in users(lambda sample: getattr(page_files, sample)).items():
        if names and name not in names:
            continue
        row: dict[str, object] = {"user": name, "question": user.question, "commands": len(user.commands)}
        cache = None if here else folder / f"cache of {name}"
        if not here:
            row["cold"] = play(user, program, folder / name, cache)
        row["warm"] = play(user, program, folder / f"{name} again", cache)
        rows.append(row)
    return {
        "cores": os.cpu_count(), "install_seconds": seconds, "users": rows,
        "target": {"commands": COMMANDS, "seconds": SECONDS, "of": "cold, with two cores and nothing else to do"},
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure, print JSON, and return 1 if a user types more commands than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the clone into an environment of its own")
    parser.add_argument("--here", action="store_true", help="this checkout, with what it has compiled, and no clone")
    parser.add_argument("--user", action="append", default=[], help="only this one (repeatable)")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    wanted = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="ddlsim-first-answer-"))
    try:
        report = measure(folder, wanted.user, install=wanted.install, here=wanted.here)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(report, indent=2)
    print(text)
    if wanted.json:
        wanted.json.write_text(text + "\n", encoding="utf-8")
    rows = report["users"]
    return int(any(row["commands"] > COMMANDS for row in rows))  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
