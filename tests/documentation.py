"""What the documentation can name: modules, names in them, files and headings.

Names are found in the syntax trees, so that one counts whether or not what its module needs is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("accuracy", "benchmarks", "ddlsim", "docs", "examples", "models", "tests", "topologies")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
} | {path.name for path in ROOT.iterdir()}


@functools.lru_cache(maxsize=16)  # all trees together slow down every collection of garbage
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def module_file(dotted: str) -> Path | None:
    """Return the file of a module of this project."""
    base = ROOT.joinpath(*dotted.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


@functools.cache
def names_in(path: Path) -> dict[str, ast.AST]:
    """Return what stands at the top of a file, imports for type checking and of the stub beside it included."""
    names = dict(_bound(tree_of(path).body))
    stub = path.with_suffix(".pyi")
    return {**names, **_public(stub)} if stub.exists() else names


def public_names(module: str) -> list[str]:
    """Return what a module exports: what it says is public ("name as name", a stub), its functions and classes."""
    listed = getattr(importlib.import_module(module), "__all__", None)  # of a stub
    if listed is not None:
        return list(listed)
    nodes = _bound(tree_of(module_file(module)).body)
    return [name for name, node in nodes if not name.startswith("_") and _is_public(node)]


def _is_public(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.names[0].asname == node.names[0].name
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def _public(stub: Path) -> dict[str, ast.AST]:
    """Return the imports of a stub, which are relative to its package, as absolute ones."""
    package = ".".join(stub.parent.relative_to(ROOT).parts)
    imports = (node for node in tree_of(stub).body if isinstance(node, ast.ImportFrom))
    return {
        alias.name: ast.ImportFrom(f"{package}.{node.module}", [alias], 0) for node in imports for alias in node.names
    }


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                yield name.id, node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, ast.ImportFrom(getattr(node, "module", None), [alias], 0)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bound(node.body)
            yield from _bound(getattr(node, "orelse", []))


def exists(dotted: str) -> bool:
    """Whether ``package.module.name.attribute`` can be reached; of other libraries, by importing them."""
    parts = dotted.split(".")
    if not (ROOT / parts[0]).is_dir():
        return _exists_elsewhere(parts)
    for n in range(len(parts), 0, -1):
        path = module_file(".".join(parts[:n]))
        if path:
            return _has(path, parts[n:])
    return len(parts) == 1 or (ROOT.joinpath(*parts)).is_dir()


def _exists_elsewhere(parts: list[str]) -> bool:
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[n:])
    return False


def _has(path: Path, parts: list[str]) -> bool:
    """Whether a file has a name, and what it stands for has the attributes."""
    if not parts:
        return True
    node = names_in(path).get(parts[0])
    if isinstance(node, ast.ImportFrom):
        origin = node.names[0].name
        if not node.module or not (ROOT / node.module.split(".")[0]).is_dir():
            return True  # from another library
        return exists(".".join([node.module, origin, *parts[1:]]))
    if isinstance(node, ast.ClassDef) and parts[1:]:
        return has_member(path, node, parts[1])
    return node is not None


def has_member(path: Path, owner: ast.ClassDef, member: str) -> bool:
    """Whether a class has a field, property, method or an attribute set on ``self``, of its own or inherited."""
    if member in dict(_bound(owner.body)):
        return True
    stored = (n for n in ast.walk(owner) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    if any(n.attr == member and getattr(n.value, "id", "") == "self" for n in stored):
        return True
    for base in owner.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        node = names_in(path).get(name.split(".")[0])
        if isinstance(node, ast.ClassDef) and has_member(path, node, member):
            return True
        if isinstance(node, ast.ImportFrom) and exists(f"{node.module}.{node.names[0].name}.{member}"):
            return True
    return False


def prose(path: Path, is_relevant: Callable[[str], object] = len) -> Iterator[tuple[int, str, list[ast.ClassDef]]]:
    """Yield (line, text, classes around it) of every docstring and comment of a source file.

    A file without a relevant comment is not tokenized, which takes longer than all else.
    """

    def walk(node: ast.AST, around: list[ast.ClassDef]) -> Iterator[tuple[int, str, list[ast.ClassDef]]]:
        inside = [*around, node] if isinstance(node, ast.ClassDef) else around
        for child in ast.iter_child_nodes(node):
            value = getattr(child, "value", None) if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value, inside
            if not isinstance(child, ast.expr):
                yield from walk(child, inside)

    source = path.read_text(encoding="utf-8")
    yield from walk(tree_of(path), [])
    owners = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    has_comment = any(is_relevant(line.partition("#")[2]) for line in source.splitlines() if "#" in line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if has_comment else ():
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            yield line, token.string, [n for n in owners if n.lineno <= line <= (n.end_lineno or 0)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    slugs: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeated = next(n for n in range(1000) if f"{slug}-{n}" * (n > 0) not in slugs and (n or slug not in slugs))
        slugs.add(f"{slug}-{repeated}" if repeated else slug)
    return slugs
