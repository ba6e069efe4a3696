"""The house rules: who may import whom, and which libraries stay in their room."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ddlsim"
#: low to high; a module imports only from its own package and those above it in this list
ORDER = [
    ("printable",),
    ("errors",),
    ("extras", "garbage"),
    ("units", "readable", "notebook", "bundled", "ties", "named_code", "text_tables"),
    ("output_files", "plain"),
    ("arguments",),
    ("schema",),
    ("streams",),
    ("spread",),
    ("compile_messages",),
    ("machine_code",),
    ("code_images",),
    ("numba_compiler",),
    ("compiler",),
    ("cluster",),
    ("collectives",),
    ("network",),
    ("workload",),
    ("reliability",),
    ("nn",),
    ("data", "optim", "compression"),
    ("learning",),
    ("measure",),
    ("imports",),
    ("plan",),
    ("runtime",),
    ("strategies",),
    ("run",),
    ("precompile",),
    ("report",),
    ("testing",),
    ("jobs",),
    ("study",),
    ("planner",),
    ("lab",),
    ("validation",),
    ("explore",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
#: third-party library -> the packages that may import it
ROOMS = {
    "simpy": {"runtime", "strategies", "run"},
    "networkx": {"cluster", "imports", "report", "lab"},
    "defusedxml": {"cluster", "imports"},
    "yaml": {"imports"},
    "numba": {"code_images", "numba_compiler", "network", "nn"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "pandas": {"reliability", "run", "report", "jobs", "study", "planner", "validation"},
    "typer": {"measure", "cli"},
    "rich": {"text_tables", "measure", "report", "cli"},
    "mpi4py": {"measure"},
    "torch": {"measure"},
    "distributed": set(),
    "optuna": {"study"},
    "xarray": {"study"},
    "panel": {"explore"},
    "param": {"explore"},
    "bokeh": {"explore"},
    "tornado": {"explore"},  # bokeh's own server
}
#: imports upwards, inside functions: file -> packages. A result knows how to show itself, and how sure it is.
LAZY = {
    "collectives/schedule.py": {"report"},
    "cluster/catalogue.py": {"imports"},
    "imports/detect.py": {"plan"},
    "plan/execute.py": {"report"},
    "plan/plan.py": {"report"},
    "run/result.py": {"report", "validation"},
    "workload/model.py": {"imports"},
    "run/simulate.py": {"report"},
    "run/seeds.py": {"report"},
}
#: what is installed under one name and imported under another
INSTALLED = {"PIL": "pillow", "llvmlite": "numba", "yaml": "pyyaml"}
#: used everywhere
COMMON = {"ddlsim", "numpy", "lazy_loader"}
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
#: packages without objects that change, but for these
VALUES: dict[str, set[str]] = {
    "cluster": set(),
    "collectives": {"_Touched"},
    "compression": set(),
    "measure": set(),
    "network": set(),
    "optim": set(),
    "planner": set(),
    "report": set(),
    "study": set(),
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (module, whether at the top of the file) of every import that is not for type checking only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[str, bool]] = []
    top = {id(node) for node in tree.body}
    unseen: list[ast.AST] = [tree]
    while unseen:
        node = unseen.pop()
        if isinstance(node, ast.Import):
            found += ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            unseen += node.orelse
        elif not isinstance(node, ast.expr):  # expressions have no imports
            unseen += ast.iter_child_nodes(node)
    return found


def violations(path: Path):
    """Yield what a module imports although it must not."""
    here = room(path)
    if here == "__init__":
        return  # the package itself loads names lazily
    if here not in LEVEL:
        yield f"{here} has no place in the order of packages"
        return
    file = path.relative_to(PACKAGE).as_posix()
    for module, at_top in imports(path):
        parts = module.split(".")
        if parts[0] == "ddlsim" and len(parts) > 1 and parts[1] != here:
            lazy = not at_top and parts[1] in LAZY.get(file, ())
            if not (LEVEL[parts[1]] < LEVEL[here] or lazy):
                yield f"{file} imports {module}, which is above it"
        elif parts[0] in ROOMS and here not in ROOMS[parts[0]] and (here, at_top) != ("cli", False):
            # a command may use a library for one thing, but only when it runs
            yield f"{file} imports {parts[0]}"


def test_modules_import_only_from_below():
    assert not [violation for path in MODULES for violation in violations(path)]


def rows():
    """Return the rows of the page's table: (packages, third-party libraries)."""
    table = PAGE[PAGE.index("| package |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    without_remarks = [(first, re.sub(r"\([^)]*\)", "", last)) for first, _, last in cells]
    return [
        (re.findall(r"`(\w+)/?`", first), set(re.findall(r"\w+", last.replace("inside one command:", ""))))
        for first, last in without_remarks
    ]


def test_the_page_has_the_packages_in_this_order():
    listed = [name for packages, _ in rows() for name in packages]
    assert sorted(listed, key=lambda name: LEVEL[name]) == listed
    assert set(listed) == {name for name in LEVEL if name != "__main__"}


def test_the_page_names_the_libraries_that_a_package_imports():
    used: dict[str, set[str]] = {}
    for path in MODULES:
        libraries = {module.split(".")[0] for module, _ in imports(path)} - COMMON - sys.stdlib_module_names
        used.setdefault(room(path), set()).update(INSTALLED.get(name, name) for name in libraries)
    for packages, libraries in rows():
        assert set().union(*(used.get(name, ()) for name in packages)) == libraries, packages


def test_the_page_names_the_files_that_import_upwards():
    """Those of LAZY do, as the page says, and no others are named."""
    paragraph = next(
        text for text in PAGE.split("\n\n") if text.startswith("Some modules import from a higher package")
    )
    assert set(re.findall(r"`(\w+/\w+\.py)`", paragraph)) == LAZY.keys()
    for file, packages in LAZY.items():
        path = PACKAGE / file
        upwards = {module.split(".")[1] for module, _ in imports(path) if module.startswith("ddlsim.")}
        assert {name for name in upwards if LEVEL[name] > LEVEL[room(path)]} == packages


@pytest.mark.parametrize("package", sorted(VALUES))
def test_where_all_is_values_every_dataclass_is_frozen(package):
    changing = set()
    for path in (PACKAGE / package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        suspect = re.search(r"@dataclass(?!.*frozen=True)", text)
        for node in ast.walk(ast.parse(text)) if suspect else ():
            for decorator in getattr(node, "decorator_list", []):
                text = ast.unparse(decorator)
                if text.startswith("dataclass") and "frozen=True" not in text:
                    changing.add(node.name)
    assert changing == VALUES[package]


def test_percentages_have_one_format():
    """``percent`` writes them with a space; the format type % would not."""
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    assert [str(path) for path, text in texts.items() if re.search(r":[+,]?[\d.]*%\}", text)] == []


#: names that do not say what they hold
SAY_NOTHING = "each|found|given|known|made|own|travel|ways|whole"
#: where they are names that users know, or say enough: file -> names
SAY_ENOUGH = {
    "collectives/states.py": {"whole"},
    "compression/contract.py": {"whole"},
    "jobs/placement.py": {"given"},
    "planner/recommendation.py": {"found"},
    "report/trace.py": {"whole"},
    "run/result.py": {"given", "known", "whole"},
    "runtime/context.py": {"whole"},
    "study/table.py": {"known"},
    "validation/comparison.py": {"known"},
    "workload/compute.py": {"known"},
}


def bound(path: Path):
    """Yield the variables, arguments, attributes and functions that a module names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def test_names_say_what_they_hold():
    """A loop over layers has a `layer`, not an `each`."""
    binding = re.compile(
        rf"(?:for|as|lambda|def|\(|,|^|self\.)[ ]*_?(?:{SAY_NOTHING})(?:,[\w ]+)*(?: in |:| ?:?=|\(|,|\))", re.MULTILINE
    )
    suspect = {path for path in MODULES if binding.search(path.read_text(encoding="utf-8"))}
    bad = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in suspect
        if (names := {name for name in bound(path) if re.fullmatch(f"_?(?:{SAY_NOTHING})", name)})
    }
    assert bad == SAY_ENOUGH
