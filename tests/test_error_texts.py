"""Names in the messages of errors exist: those in the package, functions that are called, and their options."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import ddlsim
from ddlsim import errors

FOLDER = Path(ddlsim.__file__).parent
ERRORS = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, Exception)}
#: "ddlsim.run.Result", and "Parallel(tensor=2" without the dot of a method
DOTTED = re.compile(r"\bddlsim((?:\.[A-Za-z_]\w*)+)")
CALLED = re.compile(r"(?<![\w.)\]<])([A-Za-z_]\w*)\(([^()]*)")
#: words before a parenthesis: a placeholder for the reader's own function, "machine(s)", and Python's dataclasses
WORDS = {"function", "machine", "dataclass"}


def text_of(node: ast.AST) -> str:
    """Return the text of an expression; replaced parts are {}, and alternatives follow each other."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) if isinstance(node.value, ast.IfExp) else "{}"
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)} {text_of(node.orelse)}"
    return f"{text_of(node.left)}{text_of(node.right)}" if isinstance(node, ast.BinOp) else "{}"


@cache
def read() -> tuple[list[tuple[str, str]], set[str]]:
    """Return place and text of the messages that are passed to the classes of errors, and the names that may be called.

    Syntax trees are not kept: they would slow down every collection of garbage.
    """
    messages, names = [], WORDS | set(dir(builtins))
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
                messages.append((f"{path.relative_to(FOLDER)}:{node.lineno}", text_of(node.args[0])))
    return messages, names


def problems(text: str) -> Iterator[str]:
    for match in DOTTED.finditer(text):
        found: object = ddlsim
        name = "ddlsim"
        for part in match[1].split(".")[1:]:
            name = f"{name}.{part}"
            try:
                found = getattr(found, part, None) or importlib.import_module(name)
            except ImportError:
                yield name
                break
    for match in CALLED.finditer(text):
        if match[1] not in read()[1]:
            yield f"{match[1]}()"
        called = getattr(ddlsim, match[1], None)
        if called is not None:
            known = inspect.signature(called).parameters
            takes_any = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in known.values())
            options = re.findall(r"(?:^|, )([a-z_]+)=", match[2])
            yield from (f"{match[1]}({option}=)" for option in options if option not in known and not takes_any)


def test_names_in_messages_exist() -> None:
    """Among them ``Parallel(tensor=...)``, which replaced a function without such a name."""
    wrong = [f"{place}: {problem}" for place, text in read()[0] for problem in problems(text)]
    assert wrong == []


def test_wrong_names_are_found() -> None:
    text = "set ddlsim.NoSuch(1) or ddlsim.run.no_such, call mesh_pipeline(2), or Parallel(tensors=2, pipeline=2)"
    assert list(problems(text)) == ["ddlsim.NoSuch", "ddlsim.run.no_such", "mesh_pipeline()", "Parallel(tensors=)"]
    assert list(problems("set ddlsim.Training(...), Parallel(tensor={}, pipeline=2) or chunks_at()")) == []
    assert len(read()[0]) > 1000
