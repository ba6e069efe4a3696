"""What the documentation site is made of: every public name has its place, links follow pages, docstrings become lists.

Building the site and looking at it is ``make docs``; nothing here needs what that installs.
"""

import ast
import re
import sys

import pytest
from documentation import ROOT, public_names

import ddlsim
from ddlsim.imports.detect import KINDS

sys.path.insert(0, str(ROOT / "docs" / "site"))
import docstrings
import pages

API = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
LISTED = [
    (module, name) for text in API.values() for module, names in pages.NAMES.findall(text) for name in names.split()
]
STUBS = sorted((ROOT / "ddlsim").rglob("__init__.pyi"))


def thing(module, name):
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_every_public_name_stands_under_a_task(stub):
    module = ".".join(stub.parent.relative_to(ROOT).parts)
    there = {id(thing(*entry)) for entry in LISTED}
    assert [name for name in public_names(module) if id(thing(module, name)) not in there] == []


def test_names_stand_once_where_a_user_imports_them_from():
    assert len(LISTED) == len(set(LISTED))
    classes = [thing(*entry) for entry in LISTED if isinstance(thing(*entry), type)]
    assert len(classes) == len(set(classes))
    assert [name for module, name in LISTED if module != "ddlsim" and hasattr(ddlsim, name) and
            thing(module, name) is getattr(ddlsim, name)] == []  # fmt: skip


def test_the_matrix_of_formats_has_every_reader():
    matrix = (ROOT / "docs" / "formats" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([\w-]+)` \| `([\w.]+)` \| ([^|]+) \|", matrix, re.MULTILINE)
    assert sorted(kind for kind, _, _ in rows) == sorted(KINDS)
    for kind, reader, becomes in rows:
        module, _, name = reader.rpartition(".")
        read = thing(module or "ddlsim.imports", name)
        returned = {"timings": "Timing"}.get(becomes, becomes.strip("`"))
        assert returned in str(read.__annotations__["return"]), kind
    assert {f"read_{kind.replace('-', '_')}" for kind in KINDS} == {reader.split(".")[-1] for _, reader, _ in rows}


def test_every_page_has_a_place():
    placed = [file for section in pages.contents() for file in section.files]
    assert len(placed) == len(set(placed))
    there = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"docs/README.md"}
    assert there <= set(placed)
    assert all((ROOT / file).exists() for file in placed if file != "notebooks")


def test_links_follow_pages():
    copied = {}
    text = "[a](../../examples/plan.py) [b](overlap.md#policies) [c](../../README.md) `[d](x)` [e](../../LICENSE)"
    followed = pages.follow(text, "docs/models/memory.md", "models/memory.md", copied)
    assert followed == (
        "[a](../examples/plan.md) [b](overlap.md#policies) [c](../overview.md) `[d](x)` [e](../license)"
    )
    assert copied == {"license": ROOT / "LICENSE"}
    with pytest.raises(SystemExit, match=r"the link to overlaps.md leads nowhere"):
        pages.follow("[a](overlaps.md)", "docs/models/memory.md", "models/memory.md", copied)


def test_the_gallery_has_every_example():
    scripts = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "systems").glob("*.py")]
    listed = pages.gallery(scripts)
    for script in scripts:
        link = pages.page_of(script.relative_to(ROOT).as_posix()).removeprefix("examples/")
        assert f"]({link})" in listed
        page = pages.example(script, "examples")
        assert script.with_suffix(".txt").read_text(encoding="utf-8").rstrip() in page
        said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        assert page.startswith(f"# {said.splitlines()[0].rstrip('.')}\n")


@pytest.mark.parametrize(
    ("docstring", "rst"),
    [
        ("Says it.\n\nname    what it is\n        and more\nother   that", [
            "Says it.", "", "``name``", "    what it is", "    and more", "``other``", "    that", ""]),
        ("a, b\n            both of them", ["``a``, ``b``", "    both of them", ""]),
        ("slow  rate\nslower rate of it", ["``slow``", "    rate", "", r"slower rate of it", ""]),
        ("Not *b* |c| or e_ but ``d*e`` and :class:`F`", [r"Not \*b\* \|c\| or e\_ but ``d*e`` and :class:`F`", ""]),
        ("Choose:\n- one\n- two", ["Choose:", "", "- one", "- two", ""]),
        ("So:\n\n    x = y * z", ["So:", "", "::", "", "    " + "    x = y * z", ""]),
        ("x <- x - g\ny <- x", ["::", "", "    x <- x - g", "    y <- x", ""]),
    ],
)  # fmt: skip
def test_docstrings_become_lists(docstring, rst):
    assert docstrings.as_rst(docstring.split("\n")) == rst
