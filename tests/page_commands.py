"""The commands that documentation pages show: what stands in their blocks of shell, and in the help of `ddlsim`."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import typer.main
from documentation import PAGES, ROOT
from markdown_it import MarkdownIt
from typer.core import TyperCommand, TyperGroup

from ddlsim.cli import app

#: what a line of shell begins with
PROGRAMS = {
    "ddlsim", "python", "python3", "make", "pip", "mpirun", "torchrun", "sudo", "git", "cd", "source", "pytest", "ruff",
    "mypy", "pre-commit", "py", "pipx", "uv", "conda", "docker", "jupyter", "dask", "export", "mkdir", "sphinx-build",
}  # fmt: skip
#: languages of blocks that are no shell
OTHERS = {"python", "py", "toml", "csv", "json", "yaml", "html", "text", "pycon", "bibtex", "mermaid"}


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, in one line, without comment."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def of_pages() -> Iterator[Command]:
    """Yield the commands of all pages, in order."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
            if token.type == "fence" and token.info.split(" ")[0].strip("{}") not in OTHERS and token.map:
                yield from _of_block(name, token.map[0] + 2, token.content)


def _of_block(page: str, first: int, block: str) -> Iterator[Command]:
    lines = block.splitlines()
    at = 0
    while at < len(lines):
        start, text = at, lines[at]
        while text.endswith("\\") and at + 1 < len(lines):
            at += 1
            text = f"{text[:-1].rstrip()} {lines[at].strip()}"
        at += 1
        for part in _parts(text.removeprefix("$ ")):
            yield Command(page, first + start, part)


def _parts(line: str) -> list[str]:
    """Return the commands of a line, without its comment; none where it is something else (output, say)."""
    try:
        lexer = shlex.shlex(line, posix=False, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
    except ValueError:  # a quotation mark of prose
        return []
    parts: list[list[str]] = [[]]
    for word in words:
        if word in (";", "&&"):
            parts.append([])
        else:
            parts[-1].append(word)
    if not parts[0] or parts[0][0] not in PROGRAMS:
        return []
    return [" ".join(part) for part in parts if part]


def of_help() -> Iterator[Command]:
    """Yield the examples in the help of the commands of `ddlsim`."""
    for name, command in commands().items():
        for text in re.findall(r"Example: (.*)", command.help or ""):
            yield Command(f"ddlsim {name} --help", 1, text)


@functools.cache
def commands() -> dict[str, TyperCommand]:
    """Return the commands of `ddlsim` by what one types for them, "show topology" among them."""
    found: dict[str, TyperCommand] = {}

    def walk(command: TyperCommand | TyperGroup, name: str) -> None:
        if isinstance(command, TyperGroup):
            for part, below in command.commands.items():
                walk(below, f"{name} {part}".strip())
        else:
            found[name] = command

    walk(typer.main.get_command(app), "")
    return found


def of_prose() -> Iterator[Command]:
    """Yield what stands in the text as `ddlsim ...`."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
            for child in token.children or ():
                text = child.content.replace("\n", " ")
                if child.type == "code_inline" and text.startswith("ddlsim "):
                    yield Command(name, token.map[0] + 1 if token.map else 0, text)
