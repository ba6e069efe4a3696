"""Tests assert what is computed, not how long a busy machine takes for it: no clocks, but to give up on what hangs.

How fast things are is measured in benchmarks/.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
CLOCKS = {
    "clock_gettime", "getrusage", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "timeit", "times",
}  # fmt: skip
#: files without any of it are not parsed
SUSPECT = re.compile(rf"\b(?:{'|'.join(sorted(CLOCKS))}|time|time_ns|now)\s*\(|\btimeout\s*=")
#: seconds after which a test may give up, at least
GENEROUS = 30.0
#: folders of programs, and the name of those beside tests, which no test runs
TOOLS, PROGRAM = ("mutation",), "__main__.py"


def is_clock(node: ast.AST) -> bool:
    """Whether a node reads a clock: ``time.monotonic()``, ``perf_counter()``, ``time.time()``."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    owner = getattr(getattr(node.func, "value", None), "id", "")
    return name in CLOCKS or (owner, name) in {("time", "time"), ("time", "time_ns"), ("datetime", "now")}


def number(node: ast.AST) -> float:
    """Return a literal number, infinity for anything else."""
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else float("inf")


def clocks(source: str) -> list[int]:
    """Return the lines that read a clock for anything but a generous deadline, or that give up too early.

    Allowed are ``deadline = time.monotonic() + 60.0`` and ``time.monotonic() < deadline``.
    """
    if not SUSPECT.search(source):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    allowed = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "deadline":
            value = node.value
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and number(value.right) >= GENEROUS:
                allowed.add(id(value.left))
        elif isinstance(node, ast.Compare) and getattr(node.comparators[0], "id", "") == "deadline":
            allowed |= {id(node.left)} if isinstance(node.ops[0], ast.Lt) else set()
    found = [node.lineno for node in nodes if is_clock(node) and id(node) not in allowed]
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "timeout" and number(node.value) < GENEROUS:
            found.append(node.value.lineno)
    return sorted(found)


def test_no_test_reads_a_clock():
    paths = [p for p in sorted(TESTS.rglob("*.py")) if p.name != PROGRAM and p.relative_to(TESTS).parts[0] not in TOOLS]
    found = {str(p.relative_to(TESTS)): clocks(p.read_text(encoding="utf-8")) for p in paths}
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_scan_sees_clocks_and_lets_deadlines_pass():
    assert clocks("start = time.perf_counter()\nf()\nassert time.perf_counter() - start < 1.0") == [1, 3]
    assert clocks("run(timeout=5)\nassert monotonic() < 3") == [1, 2]
    assert clocks("deadline = time.monotonic() + 10.0") == [1]
    good = "deadline = time.monotonic() + 60.0\nwhile time.monotonic() < deadline:\n    run(timeout=60)"
    assert not clocks(good)
