"""What people are told while something is compiled, and that compiled code always has a place."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numba as nb
import pytest

from ddlsim import compile_messages
from ddlsim.compile_messages import Part, teller
from ddlsim.numba_compiler import inlined

ROOT = Path(__file__).parents[1]


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture
def slow(monkeypatch):
    """A function that takes a while to compile, of a part of which people know that."""
    monkeypatch.setenv("DDLSIM_QUIET", "0")
    monkeypatch.setattr(compile_messages, "PARTS", (Part(f"{__name__}.work", "the test", 7.0),))
    monkeypatch.setattr(teller, "_told", set())
    monkeypatch.setattr(teller, "_spent", {})

    @inlined
    def doubled(x):
        return 2.0 * x

    def work(x):
        return doubled(x) + 1.0

    return nb.njit(work)  # not cached: compiled in every run of the tests


def test_it_is_said_once_and_not_when_it_is_there(slow, capsys):
    assert slow(1.5) == 4.0
    assert capsys.readouterr().err == "ddlsim: compiling the test (once, about 7 s of CPU time)\n"
    assert slow(2.5) == 6.0
    assert slow(2) == 5.0  # compiled for integers, too
    assert capsys.readouterr().err == ""


def test_nothing_is_said_to_who_wants_quiet(slow, capsys, monkeypatch):
    monkeypatch.setenv("DDLSIM_QUIET", "1")
    assert slow(1.5) == 4.0
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_a_line_now_and_then(slow, capsys, monkeypatch):
    monkeypatch.setattr(compile_messages, "LOOK", 0.001)
    monkeypatch.setattr(compile_messages, "LINES", 0.0)
    slow(1.5)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "ddlsim: compiling the test (once, about 7 s of CPU time)"
    assert others
    assert all(re.match(r"ddlsim: compiling the test: \d+ s", line) for line in others)


def test_a_terminal_gets_one_line_that_goes_away(slow, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(compile_messages, "INTERVAL", 0.001)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    slow(1.5)
    first, rest = terminal.text.split("\n")
    assert first == "ddlsim: compiling the test (once, about 7 s of CPU time)"
    lines = rest.split("\r")
    assert re.match(r"ddlsim: compiling the test: \d+ s", lines[1])
    assert lines[-1] == ""
    assert set(lines[-2]) == {" "}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DDLSIM_QUIET": "", **environment},
    )  # fmt: skip


WITHOUT_FOLDERS = """
    import pathlib
    from ddlsim import compiler, machine_code
    machine_code.PACKAGE = pathlib.Path("/dev/null")
    {more}
    from ddlsim.compile_messages import teller
    from ddlsim.nn.row_kernels import relu
    import numpy as np
    relu(np.ones(2), np.ones(2))
    print(compiler.is_kept(), teller.remark, len(compiler.files()), *compiler.files()[:1])
"""


@pytest.mark.slow
def test_without_a_folder_that_can_be_written_it_is_kept_until_the_process_ends():
    done = python(WITHOUT_FOLDERS.format(more=""), NUMBA_CACHE_DIR="", XDG_CACHE_HOME="/dev/null")
    kept, *remark, n, file = done.stdout.split()
    assert (kept, n) == ("True", "1")
    assert "set NUMBA_CACHE_DIR" in " ".join(remark)
    assert not Path(file).exists()
    assert not any(folder.exists() for folder in Path(file).parents if folder.name.startswith("ddlsim-"))


@pytest.mark.slow
def test_without_any_folder_it_is_kept_in_memory():
    more = "import tempfile; tempfile.mkdtemp = lambda **_: (_ for _ in ()).throw(OSError('read-only'))"
    assert python(WITHOUT_FOLDERS.format(more=more), NUMBA_CACHE_DIR="", XDG_CACHE_HOME="/dev/null").stdout.startswith(
        "False no folder"
    )


@pytest.mark.slow
def test_a_full_disk_is_a_warning(tmp_path):
    done = python("""
        import pathlib
        def full(*_):
            raise OSError(28, "No space left on device")
        pathlib.Path.write_bytes = full
        from ddlsim.nn.row_kernels import relu
        import numpy as np
        relu(-np.ones(2), out := np.ones(2))
        print(out)
    """, NUMBA_CACHE_DIR=str(tmp_path))  # fmt: skip
    assert done.stdout == "[0. 0.]\n"
    assert done.stderr.count("compiled code cannot be cached") == 1
    assert "No space left on device" in done.stderr
