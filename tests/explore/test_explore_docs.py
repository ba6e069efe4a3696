"""What the page about the explorer shows works: its commands, its programs."""

import contextlib
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("panel")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explorer.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.startswith("ddlsim explore")
]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]


def test_there_are_commands_and_programs():
    assert (len(COMMANDS), len(PROGRAMS)) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_serves_the_page(command):
    words = [word for word in shlex.split(command)[1:] if word != "--no-browser"]
    if "--port" not in words:
        words += ["--port", "8766"]
    port = words[words.index("--port") + 1]
    started = [sys.executable, "-m", "ddlsim", *words, "--no-browser"]
    with subprocess.Popen(started, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        text = ""
        for _ in range(600):
            assert server.poll() is None, server.stdout.read().decode()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                text = answer.read().decode()
                break
            time.sleep(0.2)
        server.terminate()
    assert "<title>ddlsim explorer</title>" in text
    assert not re.search(r"""(src|href)=["'](https?:)?//(?!127\.0\.0\.1)""", text)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=["script", "notebook"])
def test_a_program_runs(program, capsys):
    exec(compile(program, "explorer.md", "exec"), {"__name__": "__main__"})
    assert "page(" in program or "throughput" in capsys.readouterr().out
