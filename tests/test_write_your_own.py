"""The pages of docs/write_your_own do what they say: their files load, their code runs and prints what stands below it.

A block is told by what follows its fence: ``python``, ``toml`` or ``text`` with a name is a file of the reader's,
``python`` alone is run, ``console`` holds a command and what it prints, a block without a word is what the one above
prints (its beginning where it ends in "..."; spaces at ends of lines are ignored).
"""

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from draws import few

from ddlsim import cli

FOLDER = Path(__file__).parents[1] / "docs" / "write_your_own"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
BLOCK = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Return (language, name of the file, text) of each block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def lines(text):
    return [line.rstrip() for line in text.rstrip().splitlines()]


def assert_printed(printed, shown):
    printed, shown = lines(printed), lines(shown)
    if shown and shown[-1] == "...":
        shown.pop()
        printed = printed[: len(shown)]
    assert printed == shown


def command(line, monkeypatch, capsys):
    """Run a command as in a shell, and return what it prints, or else its error."""
    program, *arguments = shlex.split(line)
    assert program == "ddlsim"
    monkeypatch.setattr(sys, "argv", ["ddlsim", *arguments])
    with suppress(SystemExit):
        cli.main()
    captured = capsys.readouterr()
    return captured.out or captured.err  # beside output, stderr may say what is being compiled


def run_page(page, folder, monkeypatch, capsys):
    """Run a page in a folder; yield (what is printed, what the page shows), None where nothing has been run."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    namespace, printed = {"__name__": "__main__"}, None
    for language, file, text in blocks(page):
        if not language:
            yield printed, text
            printed = None
        elif file:
            Path(file).write_text(text, encoding="utf-8")
        elif language == "console":
            line, _, shown = text.partition("\n")
            yield command(line.removeprefix("$ "), monkeypatch, capsys), shown
        elif language == "python":
            exec(compile(text, page.name, "exec"), namespace)
            printed = capsys.readouterr().out


@pytest.fixture
def forgotten():
    """Forget the modules that a page has written."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not getattr(sys.modules[name], "__package__", None):
            del sys.modules[name]


@pytest.mark.parametrize("page", few(PAGES, 3))
def test_the_page_does_what_it_says(page, tmp_path, monkeypatch, capsys, forgotten):
    shown = 0
    for printed, text in run_page(FOLDER / f"{page}.md", tmp_path, monkeypatch, capsys):
        assert_printed(printed, text)
        shown += 1
    assert shown >= 3


def test_the_index_has_every_page():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\((\w+)\.md\)", index))) == PAGES
