"""The pages of the site, made from files of the repository, which stay where they are and as they are.

A table says which file becomes which page; every relative link and picture follows it. So links work both where the
repository is read and in the site, and one that leads to a file that is no page (a script, a test) leads to a copy.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import posixpath
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)#\s]+)(#[^)\s]+)?(\))")
CODE = re.compile(r"(^ *```.*?^ *```[ ]*$|``.+?``|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
NAMES = re.compile(r"^```api ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A part of the table of contents: its caption, and its pages as files in the repository."""

    caption: str
    files: tuple[str, ...]


def contents() -> list[Section]:
    """Return the table of contents; examples and notebooks are one page each, which lists the rest."""
    text = (Path(__file__).parent / "contents.toml").read_text(encoding="utf-8")
    taken = {"docs/README.md"}
    sections = []
    entries = tomllib.loads(text)["section"]
    named = {page for entry in entries for page in entry["pages"]}
    for entry in entries:
        files = []
        for pattern in entry["pages"]:
            found = (
                [pattern]
                if "*" not in pattern
                else sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
            )
            files += [file for file in found if file not in taken and (file == pattern or file not in named)]
            taken.update(files)
        sections.append(Section(entry["caption"], tuple(files)))
    left = sorted({path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - taken)
    if left:
        raise SystemExit(f"docs/site/contents.toml: no section has {', '.join(left)}")
    return sections


def page_of(file: str) -> str:
    """Return the page, a path below the site's root, that a file or a folder of the repository becomes."""
    own = {
        "README.md": "overview.md",
        "docs": "index.md",
        "docs/README.md": "index.md",
        "examples": "examples/index.md",
        "examples/systems": "examples/index.md",
        "examples/notebooks": "notebooks/index.md",
        "notebooks": "notebooks/index.md",
    }
    if file in own:
        return own[file]
    if (ROOT / file).is_dir():
        return page_of(f"{file}/README.md")
    if file.startswith("examples/notebooks/"):
        return file.removeprefix("examples/")
    if file.startswith("examples/") and file.endswith((".py", ".toml")):
        return posixpath.splitext(file)[0] + ".md"
    if file.endswith("README.md"):
        return file.removeprefix("docs/").replace("README.md", "index.md")
    return file.removeprefix("docs/") if "/" in file else file.lower()


def follow(text: str, file: str, page: str, copied: dict[str, Path]) -> str:
    """Return a page's text with its links as seen from where the page stands in the site.

    `copied` is told the files that are no pages and are linked to: where they go, and where they are.
    """

    def moved(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups()
        source = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if not (ROOT / source).exists():
            raise SystemExit(f"{file}: the link to {target} leads nowhere")
        goal = page_of(source)
        if not (ROOT / source).is_dir() and not goal.endswith((".md", ".ipynb")):
            copied[goal] = ROOT / source
        return before + posixpath.relpath(goal, posixpath.dirname(page) or ".") + (anchor or "") + after

    parts = CODE.split(text)
    return "".join(part if n % 2 else LINK.sub(moved, part) for n, part in enumerate(parts))


def reference(text: str) -> str:
    """Return a page in which the lists of names of the API have become what their docstrings say."""

    def documented(found: re.Match[str]) -> str:
        module = importlib.import_module(found[1])
        lines = []
        for name in found[2].split():
            thing = getattr(module, name)
            if isinstance(thing, type):
                kind = "exception" if issubclass(thing, Exception) else "class"
            else:
                kind = "function" if inspect.isroutine(thing) else "data"
            lines += [f".. auto{kind}:: {found[1]}.{name}", *(["   :members:"] if kind == "class" else []), ""]
        return "\n".join(["```{eval-rst}", *lines, "```"])

    return NAMES.sub(documented, text)


def titled(script: Path) -> tuple[str, str]:
    """Return the first line of what a script says of itself, and the rest."""
    if script.suffix == ".toml":
        return script.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(";")[0], ""
    said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.stem
    title, _, rest = said.partition("\n")
    return title.rstrip("."), rest.strip()


def example(script: Path, folder: str) -> str:
    """Return the page of an example: what it asks, its pictures, what it prints, its code.

    Examples are not run here: what they print is held to the .txt files by tests/test_examples.py, and the pictures are
    made by docs/make_pictures.py.
    """
    title, rest = titled(script)
    file = script.relative_to(ROOT).as_posix()
    pictures = sorted((ROOT / "docs/pictures/examples").glob(f"{script.stem}-*.png"))
    up = posixpath.relpath("pictures/examples", folder)
    run = f"ddlsim run {file}" if script.suffix == ".toml" else f"python {file}"
    text = [f"# {title}", rest, *(f"![A picture of {script.stem}]({up}/{picture.name})" for picture in pictures)]
    printed = script.with_suffix(".txt")
    text += ["## Run it", f"```console\n$ {run}\n```"]
    if printed.exists():
        shown = printed.read_text(encoding="utf-8").rstrip()
        text += ["It prints (a test holds it to that):", f"```text\n{shown}\n```"]
    language = "python" if script.suffix == ".py" else "toml"
    text += [f"## {file}", f"```{language}\n{script.read_text(encoding='utf-8').rstrip()}\n```"]
    return "\n\n".join(part for part in text if part) + "\n"


def gallery(scripts: list[Path]) -> str:
    """Return the page that lists all examples, with their pictures where they draw some."""
    text = ["# Examples", "Each is a script to copy. What it prints is tested; the page of each shows it whole."]
    groups = {"Questions": "examples", "Systems and their published figures": "examples/systems"}
    for heading, folder in groups.items():
        cards = []
        for script in scripts:
            if script.parent != ROOT / folder:
                continue
            title = titled(script)[0].replace("_", r"\_")
            link = posixpath.relpath(page_of(script.relative_to(ROOT).as_posix()), "examples")
            pictures = sorted((ROOT / "docs/pictures/examples").glob(f"{script.stem}-*.png"))
            shown = f"[![{script.stem}](../pictures/examples/{pictures[0].name})]({link})\n\n" if pictures else ""
            if not pictures:
                printed = script.with_suffix(".txt") if script.suffix == ".py" else script
                beginning = printed.read_text(encoding="utf-8").splitlines()[:9]
                shown = "\n".join(["```text", *beginning, "```", "", ""])
            cards.append(f":::{{container}} card\n{shown}[{title}]({link})\n:::")
        text += [f"## {heading}", "::::{container} cards", *cards, "::::"]
    text += [
        _tree(
            "",
            [
                "dgx1_bert",
                *(
                    posixpath.relpath(page_of(s.relative_to(ROOT).as_posix()), "examples").removesuffix(".md")
                    for s in scripts
                    if s.suffix == ".py"
                ),
            ],
        )
    ]
    return "\n\n".join(text) + "\n"


def _tree(caption: str, pages: list[str]) -> str:
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *head, "", *pages, "```"])


def stage(folder: Path) -> None:
    """Write the site's source into a folder; what has not changed is left alone, so that a second build is quick."""
    pages: dict[str, str | Path] = {}
    notebooks = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
    scripts = sorted(
        [
            *(ROOT / "examples").glob("*.py"),
            *(ROOT / "examples" / "systems").glob("*.py"),
            *(ROOT / "examples").glob("*.toml"),
        ]
    )
    copied: dict[str, Path] = {}
    trees = []
    for section in contents():
        files = [file for file in section.files if file != "notebooks" or notebooks]
        for file in files:
            if file.endswith(".md"):
                text = (ROOT / file).read_text(encoding="utf-8")
                pages[page_of(file)] = reference(follow(text, file, page_of(file), copied))
        places = [page_of(file).removesuffix(".md") for file in files]
        trees.append(_tree(section.caption, ["Overview <overview>" if p == "overview" else p for p in places]))
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages["index.md"] = "\n\n".join([follow(text, "docs/README.md", "index.md", copied), *trees]) + "\n"
    pages["examples/index.md"] = gallery(scripts)
    for script in scripts:
        page = page_of(script.relative_to(ROOT).as_posix())
        pages[page] = example(script, posixpath.dirname(page))
    if notebooks:
        names = [path.stem for path in notebooks]
        pages["notebooks/index.md"] = "# Notebooks\n\n" + _tree("", names).replace(":hidden:\n", "") + "\n"
    for path in notebooks:
        pages[page_of(path.relative_to(ROOT).as_posix())] = _notebook(path, copied)
    for path in (ROOT / "examples" / "notebooks").rglob("*"):  # what notebooks read
        if path.is_file() and path.suffix != ".ipynb" and ".ipynb_checkpoints" not in path.parts:
            copied[page_of(path.relative_to(ROOT).as_posix())] = path
    for picture in (ROOT / "docs" / "pictures").rglob("*.png"):
        copied[picture.relative_to(ROOT / "docs").as_posix()] = picture
    _write(folder, pages | copied)


def _notebook(path: Path, copied: dict[str, Path]) -> str:
    """Return a notebook whose links follow the table, too."""
    file = path.relative_to(ROOT).as_posix()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = follow("".join(cell["source"]), file, page_of(file), copied)
            cell["source"] = text.splitlines(keepends=True)
    return json.dumps(notebook, indent=1)


def _write(folder: Path, pages: dict[str, str | Path]) -> None:
    for name in (path for path in folder.rglob("*") if path.is_file()):
        if name.relative_to(folder).as_posix() not in pages:
            name.unlink()
    for page, content in pages.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            if not path.exists() or os.stat(path).st_mtime != os.stat(content).st_mtime:
                shutil.copy2(content, path)
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
