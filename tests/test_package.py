"""The package as a whole: cheap to import, complete, alone."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documentation import names_in, public_names

import ddlsim

ROOT = Path(__file__).parents[1]


def loaded_after(code: str) -> set[str]:
    script = f"import sys; {code}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_ddlsim_loads_nothing_heavy():
    heavy = {"numba", "networkx", "pandas", "matplotlib", "scipy", "pydantic", "simpy", "typer", "numpy"}
    assert not heavy & loaded_after("import ddlsim")


def test_help_loads_nothing_heavy():
    heavy = {"numba", "networkx", "pandas", "matplotlib", "scipy", "pydantic", "simpy"}
    assert not heavy & loaded_after("import ddlsim.cli")


def test_a_plain_run_loads_no_tables_and_no_pictures():
    """So that it is said within two seconds what limits a run; numba is needed where kernels are not machine code."""
    heavy = {"pandas", "pyarrow", "matplotlib", "jinja2", "ddlsim.validation", "ddlsim.planner", "ddlsim.study"}
    run = "r = ddlsim.simulate('office-1gbe', 'lenet5', workers=4, steps=2); r.sensitivities(); str(r)"
    assert not heavy & loaded_after(f"import ddlsim; {run}")


def test_the_first_run_loads_only_what_it_needs():
    heavy = {"networkx", "multiprocessing", "ddlsim.data.named", "ddlsim.compression.sparse", "ddlsim.plan.chakra"}
    assert not heavy & loaded_after("import ddlsim; ddlsim.simulate('office-1gbe', 'lenet5', workers=4, steps=2)")


def test_every_public_name_exists_and_is_documented():
    assert len(ddlsim.__all__) > 100
    assert set(ddlsim.__all__) == set(dir(ddlsim))
    for name in ddlsim.__all__:
        value = getattr(ddlsim, name)
        assert isinstance(value, str) or (value.__doc__ or "").strip(), name


STUBS = sorted((ROOT / "ddlsim").rglob("*.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_the_names_of_a_stub_are_those_of_its_package(stub):
    """What type checkers see is what there is; names that are not written "X as X" would be hidden from them."""
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    assert [alias.asname for node in imports for alias in node.names] == names
    assert len(names) == len(set(names))
    assert set(names) == set(package.__all__) - {"__version__"}
    for name in names:
        getattr(package, name)


def test_public_names_stand_once():
    """They are the imports "X as X" of a package, or of its stub; a list beside them would have to be kept in step."""
    packages = [path for path in (ROOT / "ddlsim").rglob("__init__.py") if path.with_suffix(".pyi") not in STUBS]
    assert len(packages) > 10
    assert not [path for path in packages if "__all__" in names_in(path)]


def test_a_misspelt_name_is_met_with_the_right_one():
    done = subprocess.run(
        [sys.executable, "-c", "import ddlsim; ddlsim.simulte"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'simulate'?" in done.stderr


def test_what_users_hold_cannot_be_changed_in_place():
    """A run prints its inputs as its manifest, and shares parts of them; so nothing may change behind its back."""
    packages = ("cluster", "collectives", "compression", "learning", "optim", "strategies", "study", "validation")
    names = {("ddlsim", name) for name in ddlsim.__all__}
    for package in packages:
        module = f"ddlsim.{package}"
        names |= {(module, name) for name in public_names(module)}
    values = [getattr(importlib.import_module(module), name) for module, name in sorted(names)]
    classes = [v for v in values if isinstance(v, type) and dataclasses.is_dataclass(v)]
    assert len(classes) > 100
    changing = [c.__name__ for c in classes if not c.__dataclass_params__.frozen]
    assert changing == ["RunContext"]  # what a strategy is given to start with, put together step by step


def test_version_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == ddlsim.__version__


def test_models_and_topologies_go_into_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {name: f"ddlsim/data_files/{name}" for name in ("models", "topologies", "deviations")}


def test_the_page_about_installing_names_every_library_and_extra():
    """A row of a table for each that a user installs, with its size."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| .*\d \|", line)]
    libraries = {name for row in rows for name in re.split(r", | \(.*?\)", row[1].strip())}
    for requirement in project["dependencies"]:
        assert re.split("[>=<;[ ]", requirement)[0] in libraries, requirement
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in libraries, extra


def test_no_document_links_to_a_missing_file():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "ddlsim", "--help"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert "recommend" in done.stdout
