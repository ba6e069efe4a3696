"""CPU time of a process from its start to its first result, as JSON.

    python benchmarks/start_up.py [--against CHECKOUT] [--no-wheel] [--repeat N] [--json FILE]

Each row is a kind of run in a tree of files. The trees are `clone`, this checkout with nothing compiled; `wheel`, the
same with the kernels as machine code, as a wheel installs them (ddlsim/precompile.py); and `against`, another checkout.
Three processes are measured: `first`, the very first one, which compiles and writes bytecode and caches; `again`, the
median of later ones; and `unwritten`, the median of later ones with PYTHONDONTWRITEBYTECODE=1 and without bytecode.
Runs follow each other in one tree, so `first` of the second and third run is what these need in addition. `ratio` is
relative to the yardstick, `import numba`, in processes before and after those of the row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("ddlsim", "models", "topologies", "deviations")
TRAINING = 'ddlsim.simulate("office-1gbe", "shapes-cnn", batch_size=4, workers=4, training=ddlsim.Training("shapes"{}))'
RUNS = {
    "timing only": ["-m", "ddlsim", "run", "office-1gbe", "-m", "resnet50", "-n", "4"],
    "training": ["-c", f"import ddlsim; print({TRAINING.format(', updates=2')})"],
    "asynchronous": ["-m", "ddlsim", "run", "office-1gbe", "-m", "resnet50", "-n", "4", "-s", "async-parameter-server"],
}
YARDSTICK = ["-c", "import numba"]


def processor_seconds(arguments: list[str], tree: Path, *, written: bool = True) -> float:
    """Run Python with the package in `tree`, and return the CPU time of the process."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA", "DDLSIM"))}
    environment = {**others, "PYTHONPATH": str(tree), "DDLSIM_QUIET": "1"}
    if not written:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{arguments}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def copied(checkout: Path, tree: Path) -> Path:
    """Copy what a process needs, without anything compiled."""
    for name in PARTS:
        shutil.copytree(checkout / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "_compiled"))
    return tree


def without_bytecode(tree: Path) -> None:
    """Remove Python's compiled modules, and keep numba's cache."""
    for path in tree.rglob("__pycache__/*.pyc"):
        path.unlink()


def measure(tree: Path, name: str, repeat: int) -> list[dict[str, object]]:
    """Return the rows of a tree, in which nothing has run yet."""

    def median(arguments: list[str], *, written: bool = True) -> float:
        return statistics.median(processor_seconds(arguments, tree, written=written) for _ in range(repeat))

    def row(run: str, process: str, seconds: float, yardstick: float) -> dict[str, object]:
        yardstick = (yardstick + median(YARDSTICK)) / 2
        return {"tree": name, "run": run, "process": process, "seconds": seconds, "ratio": seconds / yardstick}

    rows = []
    for run, arguments in RUNS.items():
        before = median(YARDSTICK)
        rows.append(row(run, "first", processor_seconds(arguments, tree), before))
        before = median(YARDSTICK)
        rows.append(row(run, "again", median(arguments), before))
    without_bytecode(tree)
    for run, arguments in RUNS.items():
        before = median(YARDSTICK)
        rows.append(row(run, "unwritten", median(arguments, written=False), before))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout to measure, too")
    parser.add_argument("--no-wheel", action="store_true", help="do not build precompiled kernels")
    parser.add_argument("--repeat", type=int, default=3, help="processes per median")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ddlsim-start-up-") as folder:
        trees = {"clone": copied(ROOT, Path(folder) / "clone")}
        if wanted.against:
            trees["against"] = copied(wanted.against, Path(folder) / "against")
        if not wanted.no_wheel:
            trees["wheel"] = copied(ROOT, Path(folder) / "wheel")
            target = str(trees["wheel"] / "ddlsim")
            processor_seconds(["-m", "ddlsim.precompile", target], trees["wheel"], written=False)
        rows = [row for name, tree in trees.items() for row in measure(tree, name, wanted.repeat)]
    text = json.dumps({"cores": os.cpu_count(), "yardstick": "import numba", "rows": rows}, indent=2)
    print(text)
    if wanted.json:
        wanted.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
