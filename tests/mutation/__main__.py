"""How many wrong programs do the tests notice? A sample of mutants, and the tests that reach each of them.

    pip install cosmic-ray coverage
    python -m tests.mutation                      # hours on two cores; goes on where it stopped
    python -m tests.mutation --packages collectives --seed 2 --each 20
    python -m tests.mutation --again              # what has survived, once more (after tests were added)
    python -m tests.mutation --sample -j 2        # the 40 mutants of sample.json, which stay the same

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from mutants import Mutant

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE))
#: tests that read the sources, which no line of the package knows
READING = (
    "tests/test_architecture.py::test_where_all_is_values_every_dataclass_is_frozen",
    "tests/test_package.py::test_what_users_hold_cannot_be_changed_in_place",
)
#: package -> (mutants in the sample, tests that guard it). A mutant of the kernel costs a minute of compiling.
PACKAGES = {
    "collectives": (45, ["tests/collectives", *READING]),
    "compression": (45, ["tests/compression", *READING, "tests/learning"]),
    "strategies": (50, ["tests/strategies", *READING, "tests/learning", "tests/golden"]),
    "nn": (35, ["tests/nn"]),
    "network": (25, ["tests/network", *READING]),
    "plan": (40, ["tests/plan", "tests/strategies"]),
    "runtime": (40, ["tests/strategies", "tests/learning", "tests/run"]),
    "run": (40, ["tests/run", "tests/jobs"]),
    "reliability": (25, ["tests/run", "tests/reliability"]),
}
#: what a process has loaded before it forks; nothing of the package itself
PRELOADED = ["numpy", "numba", "hypothesis.extra.numpy", "simpy", "networkx", "scipy.stats"]
#: seconds of tests that a mutant has to survive (as they were when reach was measured, which slows them down)
ENOUGH = 100.0
#: CPU seconds after which a mutant counts as one that hangs, beside what its tests take: to load, and to compile
PATIENCE, COMPILING = 40.0, 150.0


@dataclass(frozen=True)
class Reach:
    """Which tests reach which line (`lines[module][line]`, numbers of tests), and the seconds that they take."""

    tests: list[tuple[str, float]]
    lines: dict[str, dict[str, list[int]]]

    def of(self, source: str, module: str, line: int, folders: list[str]) -> list[str]:
        """Return the tests for a line, the package's own before others, quickest first.

        Where none is known it is all (compiled code), or those that reach the module and the package's own (imports).
        """
        reached = self.lines.get(module, {})
        tests_of = ({n for at in lines for n in reached.get(str(at), ())} for lines in _around(source, line))
        numbers = next(filter(None, tests_of), set())
        if _compiled(source) or not reached:
            numbers = set(range(len(self.tests)))
        elif not numbers:  # what happens at import may be seen by a test that runs nothing of the module
            numbers = {n for tests in reached.values() for n in tests}
            numbers |= {n for n, (test, _) in enumerate(self.tests) if test.startswith(folders[0])}
        numbers |= {n for n, (test, _) in enumerate(self.tests) if test.startswith(READING)}
        kept = [self.tests[n] for n in sorted(numbers) if self.tests[n][0].startswith(tuple(folders))]
        kept.sort(key=lambda item: (not item[0].startswith(folders[0]), item[1]))
        passed = itertools.accumulate((seconds for _, seconds in kept), initial=0.0)
        return [test for (test, _), before in zip(kept, passed, strict=False) if before < ENOUGH]


def _compiled(source: str) -> bool:
    """Whether a module's code is compiled, so that no tracer sees it."""
    return "numba" in source or "ddlsim.compiler import" in source


def _around(source: str, line: int) -> list[range]:
    """Return the lines of what stands around a line, the smallest first: statements, functions, classes.

    Of what has a body, for a line inside it, only functions and classes count: what happens at import is seen by tests
    that reach the function or class.
    """
    found = [range(line, line + 1)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            body, last = getattr(node, "body", None), node.end_lineno or 0
            if isinstance(body, list) and body and not isinstance(node, ast.FunctionDef | ast.ClassDef):
                last = max(body[0].lineno - 1, first)
            if first <= line <= last:
                found.append(range(first, last + 1))
    return sorted(found, key=len)


def measure_reach(copy: Path, file: Path, folders: list[str]) -> Reach:
    """Run the tests once, unmutated, and note what reaches what; only files that are not known yet, as they are."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"stamps": {}, "tests": [], "lines": {}}
    found = [copy / folder.partition("::")[0] for folder in folders]
    found = [p for place in found for p in ([place] if place.is_file() else sorted(place.glob("test_*.py")))]
    paths = [str(p.relative_to(copy)) for p in found]
    stamps = {path: hashlib.sha256((copy / path).read_bytes()).hexdigest() for path in paths}
    new = [path for path in paths if known["stamps"].get(path) != stamps[path]]
    if new:
        part = file.with_suffix(".part.json")
        print(f"what {len(new)} test files reach", flush=True)
        done = _tests(copy, ["-p", "tests.mutation.reach", *new], 36000.0, {"MUTATION_REACH": str(part)})
        if done.state != "survived":
            raise SystemExit(f"without a mutant, {done.state} ({done.words}): mend that first\n{done.output}")
        _merge(known, json.loads(part.read_text(encoding="utf-8")), new)
        known["stamps"] |= {path: stamps[path] for path in new}
        file.write_text(json.dumps(known), encoding="utf-8")
    return Reach([(test, seconds) for test, seconds in known["tests"]], known["lines"])


def _merge(known: dict[str, Any], part: dict[str, Any], new: list[str]) -> None:
    """Put what was measured now beside what was known; tests of the same files are forgotten (no name)."""
    old = [["", 0.0] if test.partition("::")[0] in new else [test, seconds] for test, seconds in known["tests"]]
    known["tests"] = [*old, *part["tests"]]
    for module, lines in part["lines"].items():
        into = known["lines"].setdefault(module, {})
        for line, numbers in lines.items():
            into[line] = [*into.get(line, []), *(number + len(old) for number in numbers)]


@dataclass(frozen=True)
class Outcome:
    state: str  # "killed", "survived" or "hung", which counts as killed
    words: str
    output: str = ""


class Selection:
    """A pytest plugin that runs the tests of a list, in its order. (Some names cannot be given as arguments.)"""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda item: self.places[item.nodeid])


def _tests(
    copy: Path,
    arguments: list[str],
    cpu_seconds: float,
    variables: dict[str, str] | None = None,
    selection: Selection | None = None,
) -> Outcome:
    """Run pytest in a forked process, whose session is its own, on the copy."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            _become_pytest(copy, arguments, cpu_seconds, variables or {}, selection, output.fileno())
        deadline = time.monotonic() + 60.0 + 8.0 * cpu_seconds
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not pid:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome("hung", "waits")
        output.seek(0)
        text = output.read()
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome("hung" if name in ("SIGXCPU", "SIGKILL") else "killed", name)
    code = os.waitstatus_to_exitcode(status)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Outcome("survived", "", text)
    if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) and failed:
        return Outcome("killed", failed[0][:300], text)
    raise SystemExit(f"pytest ended with {code}, which says nothing about a mutant\n{text}")


def _become_pytest(
    copy: Path,
    arguments: list[str],
    cpu_seconds: float,
    variables: dict[str, str],
    selection: Selection | None,
    output: int,
) -> None:
    """Be the child: never returns."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds), int(cpu_seconds) + 5))
    os.chdir(copy)
    os.environ.update(variables, PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in (str(HERE), str(ROOT), ""))]
    code = 70
    try:
        # the same examples each time, and no failure because the machine is busy
        hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutation")
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--assert=plain"]
        code = int(pytest.main([*options, *arguments], [selection] if selection else []))
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


def try_mutant(copy: Path, mutant: Mutant, reach: Reach, folders: list[str]) -> Outcome:
    """Return what the tests that reach a mutant say of it."""
    source = (copy / mutant.module).read_text(encoding="utf-8")
    code = mutant.code(source)
    assert code is not None
    tests = reach.of(source, mutant.module, mutant.place[0], folders)
    seconds = dict(reach.tests)
    files = sorted({test.partition("::")[0] for test in tests})
    patience = (COMPILING if _compiled(source) else PATIENCE) + sum(seconds[test] for test in tests)
    return in_place(copy / mutant.module, code, lambda: _tests(copy, files, patience, selection=Selection(tests)))


def in_place(path: Path, code: str, tests: Callable[[], Outcome]) -> Outcome:
    """Run tests with other code in a file, and put everything back, times of change included."""
    source, times = path.read_text(encoding="utf-8"), path.stat()
    caches, aside = path.parent / "__pycache__", path.parent / "__pycache__.aside"
    caches.mkdir(exist_ok=True)
    caches.rename(aside)
    try:
        path.write_text(code, encoding="utf-8")
        shutil.copytree(aside, caches, ignore=shutil.ignore_patterns(*(f"{name}.*" for name in _users(path))))
        return tests()
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(caches, ignore_errors=True)
        aside.rename(caches)


def _users(path: Path) -> set[str]:
    """Return the modules of a file's package that import it, itself included.

    numba looks only at the file of a cached function, not at those that are inlined into it: these caches are too old.
    """
    users = {path.stem}
    texts = {other.stem: other.read_text(encoding="utf-8") for other in path.parent.glob("*.py")}
    for _ in texts:  # once for each step of a chain
        users |= {
            name
            for name, text in texts.items()
            if any(f"from ddlsim.{path.parent.name}.{user} import" in text for user in users)
        }
    return users


def _shown(source: str, code: str) -> list[str]:
    """Return the first line that differs, before and after."""
    before, after = source.splitlines(), code.splitlines()
    pairs = zip([*before, ""], [*after, ""], strict=False)
    return next([a.strip(), b.strip()] for a, b in pairs if a != b)


def _records(file: Path) -> dict[tuple[str, str, int], dict[str, object]]:
    """Return the last outcome of every mutant tried."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {(r["module"], r["operator"], r["occurrence"]): r for r in found}


def report(records: list[dict[str, object]], equivalent: dict[str, str]) -> str:
    """Return a table per package, and what survived."""
    lines = [f"{'package':<14}{'mutants':>8}{'equivalent':>12}{'killed':>8}{'hung':>6}{'survived':>10}{'score':>8}"]
    survivors = []
    total = [0, 0]
    for package in PACKAGES:
        own = [r for r in records if str(r["module"]).split("/")[1] == package]
        alive = [r for r in own if r["state"] == "survived"]
        same = [r for r in alive if key(r) in equivalent]
        hung = sum(r["state"] == "hung" for r in own)
        n, killed = len(own) - len(same), len(own) - len(alive)
        total[0] += killed
        total[1] += n
        score = f"{killed / n:.1%}" if n else "-"
        lines.append(f"{package:<14}{len(own):>8}{len(same):>12}{killed - hung:>8}{hung:>6}{n - killed:>10}{score:>8}")
        survivors += [f"  {key(r)}" for r in alive if key(r) not in equivalent]
    lines.append(f"killed {total[0]} of {total[1]}: {total[0] / max(total[1], 1):.1%}")
    return "\n".join([*lines, *(["survived:", *survivors] if survivors else [])])


def key(record: dict[str, object]) -> str:
    """Return how a mutant is named in equivalent.json: it survives changes elsewhere in the file."""
    return f"{record['module']}: {record['before']} -> {record['after']}"


# ------------------------------------------------------------ the sample that stays the same


def replaced(source: str, before: str, after: str) -> str | None:
    """Return the source with the only line that reads `before` changed, None if there is no such line, or several."""
    lines = source.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.strip() == before]
    if len(places) != 1:
        return None
    lines[places[0]] = lines[places[0]].replace(before, after)
    return "".join(lines)


def try_sample(copy: Path, rows: list[dict[str, Any]], file: Path) -> None:
    """Try rows of sample.json on a copy of the tree, and write down what becomes of them."""
    for row in rows:
        path, begin = copy / row["module"], time.monotonic()
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        code = replaced(source, row["before"], row["after"])
        outcome = Outcome("gone", "no such line")
        if code is not None:
            known = [test for test in row["tests"] if (copy / test.partition("::")[0]).exists()]
            patience = ENOUGH + (COMPILING if _compiled(source) else PATIENCE)
            run = functools.partial(_tests, copy, ["-m", "not slow", *known], patience)
            outcome = in_place(path, code, run)
        seconds = round(time.monotonic() - begin, 1)
        found = {**row, "state": outcome.state, "words": outcome.words, "seconds": seconds, "occurrence": 0}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"operator": row["after"], **found}) + "\n")
        print(f"{outcome.state:9}{seconds:6.0f} s  {key(found)}", flush=True)


def fixed_sample(work: Path, jobs: int, again: bool) -> None:
    """Try the mutants of sample.json that have not been tried in this folder, on a copy of the tree for each job."""
    rows: list[dict[str, Any]] = json.loads((HERE / "sample.json").read_text(encoding="utf-8"))
    file = work / "outcomes-sample.jsonl"
    done = {key(r) for r in _records(file).values() if not (again and r["state"] == "survived")}
    left = [row for row in rows if key(row) not in done]
    own = []
    for number in range(jobs):
        copy = _copied(work / f"copy-{number}", again)
        own.append(
            multiprocessing.get_context("fork").Process(target=try_sample, args=(copy, left[number::jobs], file))
        )
        own[-1].start()
    for process in own:
        process.join()
    names = {key(row) for row in rows}
    found = [record for record in _records(file).values() if key(record) in names and record["state"] != "gone"]
    print(report(found, json.loads((HERE / "equivalent.json").read_text(encoding="utf-8"))))


def _copied(copy: Path, again: bool) -> Path:
    """Return a copy of the tree: the one that is there, `again` with the tests as they are now."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".mutation", ".hypothesis", "out")
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=ignored)
    elif again:  # the same mutants, of the same sources
        shutil.rmtree(copy / "tests")
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--each", type=int, help="mutants per package (default: 345 in all)")
    parser.add_argument("--sample", action="store_true", help="the mutants of sample.json instead")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="of --sample: processes (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="try once more what has survived")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutation", help="where the copy and the outcomes are")
    arguments = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    if arguments.sample:
        fixed_sample(arguments.work, arguments.jobs, arguments.again)
        return
    from mutants import sample  # needs cosmic-ray

    copy, file = _copied(arguments.work / "copy", arguments.again), arguments.work / f"outcomes-{arguments.seed}.jsonl"
    folders = sorted({folder for package in arguments.packages for folder in PACKAGES[package][1]})
    reach = measure_reach(copy, arguments.work / "reach.json", folders)
    before = _records(file)
    places = set()
    for package in arguments.packages:
        n, own = PACKAGES[package]
        chosen, n_places = sample(copy, package, arguments.each or n, arguments.seed)
        print(f"{package}: {len(chosen)} of {n_places} places", flush=True)
        for mutant in chosen:
            place = (mutant.module, mutant.operator, mutant.occurrence)
            places.add(place)
            known = before.get(place)
            if known and not (arguments.again and known["state"] == "survived"):
                continue
            source = (copy / mutant.module).read_text(encoding="utf-8")
            first, then = _shown(source, mutant.code(source) or source)
            begin = time.monotonic()
            outcome = try_mutant(copy, mutant, reach, own)
            seconds = round(time.monotonic() - begin, 1)
            record = asdict(mutant) | {"before": first, "after": then, "state": outcome.state}
            record |= {"words": outcome.words, "seconds": seconds}
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
            print(f"{outcome.state:9}{seconds:6.0f} s  {key(record)}", flush=True)
    equivalent = json.loads((HERE / "equivalent.json").read_text(encoding="utf-8"))
    print(report([record for place, record in _records(file).items() if place in places], equivalent))


if __name__ == "__main__":
    main()
