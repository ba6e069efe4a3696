"""Kernels that ddlsim's compilers make do what the Python functions do."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numba as nb
import numpy as np
import pytest
from numba.core.errors import TypingError

from ddlsim.numba_compiler import called, inlined
from ddlsim.numba_compiler import entry as cached


def uncached(compiled):
    """Compile a function anew in every run of the tests."""
    compiled._cache = nb.core.caching.NullCache()
    return compiled


def entry(function):
    return uncached(cached(function))


@called
def square(x):
    return x * x


@inlined
def left(x):
    return square(x) + 1


@inlined
def right(x):
    return min(square(x), 10)


@called
def both(x):
    return left(x) - right(x)


def test_parts_of_parts_are_linked_whichever_way_they_are_reached():
    @entry
    def work(values, out):
        for i in range(values.size):
            out[i] += both(values[i]) + square(values[i])

    for dtype in (np.int64, np.float64, np.int32):
        values = np.array([1, 2, 5], dtype=dtype)
        out = np.ones(3, dtype=dtype)
        work(values, out)
        assert out.tolist() == [1 + 2 - 1 + 1, 1 + 5 - 4 + 4, 1 + 26 - 10 + 25]


def test_a_whole_can_be_called_from_another_one():
    @entry
    def inner(x):
        return both(x) * 2

    @entry
    def outer(x):
        return inner(x) + both(x)

    assert inner(5) == 2 * 16
    assert outer(5) == 3 * 16


def test_operators_are_told_apart_by_what_they_work_on():
    @entry
    def divided(a, b):
        return a // b, a / b, -a, a > b

    assert divided(7, 2) == (3, 3.5, -7, True)
    assert divided(np.uint64(7), np.uint64(2))[:2] == (3, 3.5)
    assert divided(7.0, 2.0) == (3.0, 3.5, -7.0, True)
    assert divided(-7, 2)[0] == -4


def test_operators_that_numba_compiles_from_python():
    def work(a, n, x):
        return a**n, x**n, n in (2, 3), x % 2.0, a // n, min(a, n), max(x, 1.0)

    compiled = entry(work)
    assert compiled(3, 2, 1.5) == (9, 2.25, True, 1.5, 1, 2, 1.5)
    assert compiled(-3, 4, 0.5) == (81, 0.0625, False, 0.5, -1, -3, 1.0)


def test_records_and_tuples():
    @entry
    def add(rows, pair):
        for row in range(rows.size):
            rows[row].total += pair[0] * rows[row].n + pair[1]

    rows = np.array([(1.5, 2), (2.5, 3)], dtype=np.dtype([("total", np.float64), ("n", np.int32)], align=True))
    add(rows, (10, 1))
    assert rows["total"].tolist() == [22.5, 33.5]


def test_what_cannot_be_compiled_is_said_and_garbage_is_collected_again():
    @entry
    def nonsense(x):
        return x.there_is_no_such_thing

    assert gc.isenabled()
    with pytest.raises(TypingError, match="there_is_no_such_thing"):
        nonsense(1.0)
    assert gc.isenabled()
    assert entry(lambda x: square(x))(3) == 9
    assert gc.isenabled()


def test_whoever_has_switched_the_collector_off_finds_it_off():
    gc.disable()
    try:
        assert entry(lambda x: square(x))(4) == 16
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_numba_without_compilation_is_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, "-c", "import ddlsim.numba_compiler"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.stderr.splitlines()[-1].startswith("ddlsim.errors.DdlsimError: NUMBA_DISABLE_JIT is set")
