"""What is uploaded, and what a user then has: built, looked into, installed outside of the checkout, and used.

`make package` runs it. It is no part of the other tests, since it downloads what a user downloads and takes minutes.
Every Python from 3.11 to 3.14 that is found on this machine gets the wheel.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ddlsim
from ddlsim import compiler

ROOT = Path(__file__).parents[2]
SCRIPTS, SUFFIX = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
#: folders of the checkout that a source distribution has, and what it has beside them
FOLDERS = ("accuracy", "benchmarks", "ddlsim", "deviations", "docs", "examples", "models", "tests", "topologies")
FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "hatch_build.py",
    "pyproject.toml",
}
#: what mypy says of names that are loaded when they are first used, in a user's file
TYPES = {
    "ddlsim.simulate('office-1gbe')": "ddlsim.run.result.Result",
    "ddlsim.simulate('office-1gbe').throughput": "float",
    "ddlsim.simulate('office-1gbe').workers": "pandas.core.frame.DataFrame",
    "ddlsim.load_cluster('office-1gbe')": "ddlsim.cluster.cluster.Cluster",
    "ddlsim.cluster.load_cluster('office-1gbe').title": "str",
    "ddlsim.model_names()": "list[str]",
    "ddlsim.load_model('lenet5').n_params": "int",
    "ddlsim.fits('lenet5', 'v100-32g')": "ddlsim.workload.fits.Fit",
    "ddlsim.AllReduce('ring').label": "str",
    "ddlsim.Study(ddlsim.Experiment('office-1gbe'), {'workers': [2]}).run()": "ddlsim.study.table.Table",
    "ddlsim.study.load_study('study.toml')": "ddlsim.study.study.Study",
    "ddlsim.optim.Adam()": "ddlsim.optim.rules.Adam",
    "ddlsim.collective_time('office-1gbe', 'ring', '1 MB')": "float",
    "ddlsim.__version__": "str",
}
STUDY = """[base]
cluster = "office-1gbe"
model = "lenet5"
steps = 1
warmup = 0

[vary]
workers = [2, 4]
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command without what this process has on its path, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    texts = [str(part) for part in command]
    done = subprocess.run(texts, cwd=cwd, env=clean, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{' '.join(texts)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(place: Path, python: str, *packages: object) -> Path:
    """Make a virtual environment with packages in it, and return its folder of programs."""
    place.mkdir()
    run(python, "-m", "venv", place / "venv", cwd=place)
    programs = place / "venv" / SCRIPTS
    run(programs / f"python{SUFFIX}", "-m", "pip", "install", "--quiet", "--no-compile", *packages, cwd=place)
    return programs


def interpreter(version: str) -> str | None:
    """Return a Python of this version, of those on the path and those that pyenv keeps."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return sys.executable
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (*kept, shutil.which(f"python{version}")):
        code = "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')"
        if candidate is None:
            continue
        done = subprocess.run([str(candidate), "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return str(candidate)
    return None


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The programs that build and check, in an environment of their own."""
    return new_environment(tmp_path_factory.mktemp("tools") / "tools", sys.executable, "build", "twine>=6.1")


@pytest.fixture(scope="module")
def built(tools, tmp_path_factory):
    """The folder with the source distribution, and the wheel that was built from it and not from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(tools / "python", "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"ddlsim-{ddlsim.__version__}-py3-none-any.whl",
        f"ddlsim-{ddlsim.__version__}.tar.gz",
    ]
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def in_wheel(folder: Path) -> set[str]:
    with zipfile.ZipFile(only(folder, "*.whl")) as wheel:
        return set(wheel.namelist())


def tracked() -> set[str]:
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


def test_the_wheel_has_the_package_with_models_and_topologies_and_nothing_else(built):
    folders = ("models/", "topologies/", "deviations/")
    data = {f"ddlsim/data_files/{name}" for name in tracked() if name.startswith(folders)}
    package = {name for name in tracked() if name.startswith("ddlsim/")}
    notes = {"METADATA", "WHEEL", "entry_points.txt", "RECORD", "licenses/LICENSE"}
    assert in_wheel(built) == package | data | {f"ddlsim-{ddlsim.__version__}.dist-info/{name}" for name in notes}
    assert "ddlsim/py.typed" in package


def test_the_source_distribution_has_what_is_in_the_repository(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {"PKG-INFO"} == FILES | {name for name in tracked() if name.partition("/")[0] in FOLDERS}


def test_the_checkout_gives_the_wheel_that_the_source_distribution_gives(built, tools, tmp_path):
    run(tools / "python", "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    assert in_wheel(tmp_path) == in_wheel(built)
    with zipfile.ZipFile(only(tmp_path, "*.whl")) as one, zipfile.ZipFile(only(built, "*.whl")) as other:
        assert not [name for name in one.namelist() if one.read(name) != other.read(name)]


def test_an_index_would_take_both(built, tools):
    run(tools / "python", "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_metadata_say_which_pythons_are_meant(built):
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"ddlsim-{ddlsim.__version__}.dist-info/METADATA"))
    classifiers = metadata.get_all("Classifier", [])
    named = [text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)]
    assert tuple(named) == VERSIONS
    assert "Typing :: Typed" in classifiers
    assert metadata["Requires-Python"] == f">={VERSIONS[0]}"


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request, built, tmp_path_factory):
    """The programs of an environment into which somebody has installed the wheel, and nothing else."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    return new_environment(tmp_path_factory.mktemp("user") / request.param, python, only(built, "*.whl"))


def test_the_command_runs(installed, tmp_path):
    assert run(installed / "ddlsim", "--version", cwd=tmp_path).strip() == ddlsim.__version__
    shown = run(installed / "ddlsim", "run", "office-1gbe", "--model", "lenet5", "--workers", "4", cwd=tmp_path)
    assert re.search(r"^throughput +[\d,.]+ samples/s per device, [\d,.]+ samples/s in total", shown, re.MULTILINE), (
        shown
    )


def test_what_is_bundled_is_found(installed, tmp_path):
    code = """
import sys, warnings
warnings.simplefilter("error")
import ddlsim
assert not ddlsim.__file__.startswith(sys.argv[1]), ddlsim.__file__
for name in ddlsim.cluster_names():
    ddlsim.load_cluster(name)
for name in ddlsim.model_names():
    ddlsim.load_model(name)
ddlsim.load_digits()
print(*ddlsim.cluster_names(), *ddlsim.model_names(), *ddlsim.device_names())
"""
    found = run(installed / "python", "-c", code, ROOT, cwd=tmp_path).split()
    assert found == [*ddlsim.cluster_names(), *ddlsim.model_names(), *ddlsim.device_names()]
    run(installed / "python", "-m", "pip", "check", cwd=tmp_path)


def test_installing_takes_at_most_350_mb(installed, tmp_path):
    """Without extras, without the environment's own pip and setuptools, and without compiled modules."""
    code = """
from importlib.metadata import distributions
files = {file.locate() for d in distributions() if d.name not in ("pip", "setuptools") for file in d.files}
print(sum(file.stat().st_size for file in files if file.suffix != ".pyc" and file.exists()))
"""
    assert 250e6 < float(run(installed / "python", "-c", code, cwd=tmp_path)) < 350e6


def test_a_study_becomes_a_table(installed, tmp_path):
    """Processes are started, and a store is written. A report has pictures, and the error names what they need."""
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    run(installed / "ddlsim", "sweep", "study.toml", "--out", "study.sqlite", "--jobs", "2", cwd=tmp_path)
    assert "2 done of 2 points" in run(installed / "ddlsim", "report", "study.sqlite", cwd=tmp_path)
    report = [str(installed / "ddlsim"), "report", "study.sqlite", "--html", "report.html"]
    done = subprocess.run(report, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'ddlsim[plots]'" in done.stderr) == (2, True), done.stderr


@pytest.fixture(scope="module")
def precompiled(tools, tmp_path_factory):
    """The folder with a wheel that has the kernels as machine code."""
    if not compiler.LOADS:
        pytest.skip("needs Linux on x86-64")
    folder = tmp_path_factory.mktemp("precompiled")
    run(tools / "python", "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder, DDLSIM_PRECOMPILE="1")
    return folder


def test_a_precompiled_wheel_is_for_all_pythons_and_has_one_more_folder(built, precompiled):
    name = only(precompiled, "*.whl").name
    assert name == f"ddlsim-{ddlsim.__version__}-py3-none-manylinux_2_17_x86_64.whl"
    more = in_wheel(precompiled) - in_wheel(built)
    assert len(more) > 45
    assert all(re.fullmatch(r"ddlsim/_compiled/ddlsim\..*\.code", name) for name in more)
    assert in_wheel(built) <= in_wheel(precompiled)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_precompiled_wheel_compiles_nothing_and_writes_nothing(precompiled, version, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    programs = new_environment(tmp_path / "user", python, only(precompiled, "*.whl"))
    package = only(tmp_path / "user", "venv/lib/python*/site-packages/ddlsim")
    before = sorted(package.rglob("*"))
    for path in [package, *before]:
        path.chmod(path.stat().st_mode & ~0o222)
    code = """
import sys, ddlsim
ddlsim.simulate("office-1gbe", "resnet50", workers=4)
ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AsyncParameterServer(), batch_size=8, workers=4)
ddlsim.simulate("office-1gbe", "shapes-cnn", batch_size=4, workers=4, training=ddlsim.Training("shapes", updates=2))
print("numba" in sys.modules)
"""
    nowhere = tmp_path / "cache"
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(nowhere)}
    assert run(programs / "python", "-W", "error", "-c", code, cwd=tmp_path, **environment) == "False\n"
    assert sorted(package.rglob("*")) == before
    assert not nowhere.exists()


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """One more, for what need not be tried with every Python: with plots and fits, and the stubs of pandas for mypy."""
    wheel = f"{only(built, '*.whl')}[fit,plots,typing]"
    return new_environment(tmp_path_factory.mktemp("user") / "user", sys.executable, wheel, "mypy")


def test_what_the_readme_shows_runs(environment, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 3
    for n, code in enumerate(blocks):
        (tmp_path / f"block{n}.py").write_text(code, encoding="utf-8")
        assert run(environment / "python", "-W", "error", f"block{n}.py", cwd=tmp_path, MPLBACKEND="agg").strip(), code


def test_a_study_becomes_a_page(environment, tmp_path):
    """The templates of the page are there."""
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    run(environment / "ddlsim", "sweep", "study.toml", "--out", "study.sqlite", cwd=tmp_path)
    run(environment / "ddlsim", "report", "study.sqlite", "--html", "report.html", cwd=tmp_path)
    assert "office-1gbe" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_type_checker_knows_the_types(environment, tmp_path):
    """What is loaded when it is first used has its types, too: the stubs are in the wheel."""
    modules = ["import ddlsim", "import ddlsim.cluster", "import ddlsim.optim", "import ddlsim.study"]
    lines = [*modules, *(f"reveal_type({call})" for call in TYPES), "ddlsim.simulate('office-1gbe', btch_size=8)"]
    (tmp_path / "program.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [str(environment / "mypy"), "--strict", "--show-error-codes", "program.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    revealed = re.findall(r'note: Revealed type is "(.*)"$', said, re.MULTILINE)
    assert dict(zip(TYPES, revealed, strict=True)) == TYPES
    assert re.findall(r"error: .* \[([\w-]+)\]", said) == ["call-arg"], said


def test_the_source_distribution_installs_the_same_files(environment, built, tmp_path):
    """Last, since it takes the place of what the wheel has installed."""
    listing = "from importlib.metadata import files; print(*sorted(str(f) for f in files('ddlsim')), sep='\\n')"

    def listed() -> set[str]:
        names = run(environment / "python", "-c", listing, cwd=tmp_path).split("\n")
        return {name for name in names if "__pycache__" not in name and "direct_url" not in name}

    from_wheel = listed()
    source = only(built, "*.tar.gz")
    again = ("--quiet", "--no-compile", "--no-deps", "--force-reinstall")
    run(environment / "python", "-m", "pip", "install", *again, source, cwd=tmp_path)
    assert listed() == from_wheel
    assert run(environment / "ddlsim", "--version", cwd=tmp_path).strip() == ddlsim.__version__
