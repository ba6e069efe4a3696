"""Precompiled kernels are used where they fit, and compute what numba's do; elsewhere numba compiles."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddlsim import compiler, machine_code

ROOT = Path(__file__).parents[1]

#: prints which kernels are used, and results of a timing-only run, an asynchronous run and a training
RUNS = """
    import sys
    import ddlsim

    for strategy in (ddlsim.AllReduce("ring"), ddlsim.AsyncParameterServer()):
        print(repr(ddlsim.simulate("cloud-25g-16x8-v100", "resnet50", strategy, batch_size=32, workers=16).throughput))
    print(repr(ddlsim.collective_time("torus-2d", "ring", "1 MB")))
    training = ddlsim.Training("shapes", updates=4)
    result = ddlsim.simulate("office-1gbe", "shapes-cnn", batch_size=4, workers=4, training=training)
    print(result.history.to_csv())
    print("numba" in sys.modules, file=sys.stderr)
"""


UNWRITTEN = {"DDLSIM_QUIET": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with the package in a folder."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(folder), **UNWRITTEN, **environment},
    )  # fmt: skip


def test_the_stamp_changes_with_every_source_file(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "ddlsim", tmp_path / "ddlsim", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(machine_code, "PACKAGE", tmp_path / "ddlsim")
    patterns = (*machine_code.COMPILERS, *machine_code.SOURCES)

    def stamp() -> str:
        return machine_code.source_stamp.__wrapped__(*patterns)

    stamps = {stamp()}
    assert stamps == {machine_code.source_stamp(*patterns)}
    files = [*machine_code.COMPILERS, "cluster/walk.py", "network/flows.py", "nn/simd.py"]
    for name in files:
        with open(tmp_path / "ddlsim" / name, "a", encoding="utf-8") as file:
            file.write("\n")
        stamps.add(stamp())
    assert len(stamps) == len(files) + 1


def test_modules_with_kernels_are_among_the_sources():
    package = ROOT / "ddlsim"
    sources = {path for pattern in machine_code.SOURCES for path in package.glob(pattern)}
    kernels = {path for path in package.rglob("*.py") if "from ddlsim.compiler import" in path.read_text("utf-8")}
    assert kernels
    assert kernels <= sources


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the package and its precompiled kernels, as a wheel installs them."""
    if not compiler.LOADS:
        pytest.skip("needs Linux on x86-64")
    folder = tmp_path_factory.mktemp("site-packages")
    for name in ("ddlsim", "models", "topologies", "deviations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_compiled"))
    command = [sys.executable, "-m", "ddlsim.precompile", folder / "ddlsim"]
    environment = {**os.environ, "PYTHONPATH": str(folder), **UNWRITTEN}
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    assert Path(built.stdout.strip()) == folder / "ddlsim" / "_compiled"
    return folder


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_results_are_the_same_to_the_last_bit_without_numba_and_without_a_file_written(package, tmp_path):
    before = files(package)
    place = {"NUMBA_CACHE_DIR": str(tmp_path)}
    fast = python(RUNS, package, **place)
    assert fast.stderr == "False\n"
    assert files(package) == before
    assert list(tmp_path.iterdir()) == []
    slow = python(RUNS, package, **place, DDLSIM_PRECOMPILED="0")
    assert slow.stderr == "True\n"
    assert fast.stdout == slow.stdout


@pytest.mark.slow
def test_systems_without_machine_code_get_the_same_results_from_numba(package, tmp_path):
    """As on macOS and Windows; later processes find numba's cache."""
    other = "import ddlsim.machine_code; ddlsim.machine_code.is_supported = lambda: False\n" + textwrap.dedent(RUNS)
    place = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(other, ROOT, **place).stdout == python(RUNS, package, **place).stdout
    written = files(tmp_path)
    assert any(name.endswith(".nbi") for name in written)
    assert not any(name.endswith(".code") for name in written)
    python(other, ROOT, **place)
    assert files(tmp_path) == written


@pytest.mark.slow
def test_it_works_from_another_place(package, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(package, moved)
    assert python(RUNS, moved, NUMBA_CACHE_DIR=str(tmp_path / "nothing")).stderr == "False\n"


@pytest.mark.slow
def test_warm_up_has_nothing_to_compile(package):
    code = "import ddlsim; w = ddlsim.warm_up(); print(w.compiled, w.functions > 45, w.nbytes < 2e6)"
    assert python(code, package).stdout == "() True True\n"


@pytest.mark.slow
def test_numba_compiles_for_types_of_arguments_that_are_not_precompiled(package, tmp_path):
    code = """
    import sys
    import numpy as np
    from ddlsim.nn import map_kernels, row_kernels
    from ddlsim import compiler

    single, double = (np.array([-1.0, 2.0], dtype) for dtype in (np.float32, np.float64))
    row_kernels.relu(single, single)
    print(single.tolist(), "numba" in sys.modules)
    row_kernels.relu(double, double)
    print(double.tolist(), "numba" in sys.modules)
    x, w, out, bias = np.ones(64), np.ones(8), np.zeros(64), np.zeros(8)
    map_kernels.bias_gradient(np.ones((2, 32)).ravel(), bias, 1, 1, (1, 1))
    print(len(compiler.files()) > 2)
    try:
        row_kernels.relu("text", double)
    except Exception as error:
        print(type(error).__name__)
    """
    done = python(code, package, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "[0.0, 2.0] False\n[0.0, 2.0] True\nTrue\nTypingError\n"
    again = """
    import sys
    import numpy as np
    from ddlsim.nn import row_kernels

    row_kernels.relu(np.ones(2), np.ones(2))
    print("numba" in sys.modules)
    """
    assert python(again, package, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "False\n"


@pytest.mark.slow
def test_changed_sources_are_compiled(package, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(package, changed)
    with open(changed / "ddlsim" / "network" / "maxmin.py", "a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    code = """
    from ddlsim.network import kernel
    from ddlsim.nn import row_kernels
    print(*(len(function.store.files()) for function in (kernel.advance, row_kernels.relu)))
    """
    place = {"NUMBA_CACHE_DIR": str(tmp_path / "nothing")}
    assert python(code, changed, **place).stdout == "0 1\n"
    assert python(code, package, **place).stdout == "1 1\n"


@pytest.mark.skipif(not compiler.LOADS, reason="needs Linux on x86-64")
def test_threads_compile_and_load_a_kernel_once(tmp_path):
    code = """
    import sys
    import threading
    import numpy as np
    from ddlsim import compiler
    from ddlsim.nn import row_kernels

    failed, together = [], threading.Barrier(4)

    def work():
        together.wait()
        try:
            for dtype in (np.float32, np.float64):
                row_kernels.relu(np.ones(2, dtype), np.ones(2, dtype))
                row_kernels.relu_gradient(np.ones(2, dtype), np.ones(2, dtype))
        except Exception as error:
            failed.append(error)

    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print(failed, len(row_kernels.relu.store.files()), compiler._Kernel.uses_numba, "numba" in sys.modules)
    """
    place = {"NUMBA_CACHE_DIR": str(tmp_path), "DDLSIM_PRECOMPILED": "0"}
    assert [python(code, ROOT, **place).stdout for _ in range(2)] == ["[] 2 False True\n", "[] 2 False False\n"]


@pytest.mark.skipif(not compiler.LOADS, reason="needs Linux on x86-64")
def test_an_interrupted_compilation_is_repeated(tmp_path):
    code = """
    import numpy as np
    from ddlsim import code_images, compiler
    from ddlsim.nn import row_kernels

    class Interrupted(code_images._Image):
        def __init__(self, data):
            code_images._Image = Interrupted.__base__
            raise KeyboardInterrupt

    code_images._Image = Interrupted
    values = np.array([-1.0, 2.0])
    try:
        row_kernels.relu(values, values)
    except KeyboardInterrupt:
        print("interrupted")
    row_kernels.relu(values, values)
    print(values.tolist(), compiler._Kernel.uses_numba, len(row_kernels.relu.store.files()))
    """
    place = {"NUMBA_CACHE_DIR": str(tmp_path), "DDLSIM_PRECOMPILED": "0"}
    assert python(code, ROOT, **place).stdout == "interrupted\n[0.0, 2.0] False 1\n"


def test_files_are_found_in_all_folders(tmp_path, monkeypatch):
    """The code for some argument types may be in a wheel or in a folder that has become read-only."""
    folders = [tmp_path / name for name in ("wheel", "package", "user")]
    monkeypatch.setattr(machine_code, "SHIPPED", folders[0])
    monkeypatch.setattr(machine_code, "cache_folders", lambda: folders[1:])
    monkeypatch.setattr(machine_code, "_uses_shipped", lambda: True)
    store = machine_code.Store("a.kernel", "nn/*.py")
    for folder in folders:
        folder.mkdir()
        store.add("0", folder.name.encode(), folder, shipped=folder is folders[0])
    assert list(store.codes()) == [("0", b"wheel"), ("0", b"package"), ("0", b"user")]


def test_processes_that_compile_the_same_code_write_one_file(tmp_path, monkeypatch):
    """Their machine code may use registers and the stack differently."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DDLSIM_PRECOMPILED", "0")
    store = machine_code.Store("a.kernel", "nn/*.py")
    for types, code in (("0", b"its code"), ("0", b"the same"), ("1", b"other types")):
        store.add(types, code, tmp_path)
    assert sorted(store.codes()) == [("0", b"the same"), ("1", b"other types")]


def test_nothing_remains_of_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine_code.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device; free disk space"):
        machine_code.Store("a.kernel", "nn/*.py").add("0", b"its code", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_and_files_of_other_code_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DDLSIM_PRECOMPILED", "0")
    store = machine_code.Store("a.kernel", "nn/*.py")
    store.add("0", b"its code", tmp_path)
    (path,) = store.files()
    assert list(store.codes()) == [("0", b"its code")]
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + b"x", b"x" + whole[1:]):
        path.write_bytes(damaged)
        assert list(store.codes()) == []
    path.write_bytes(whole)
    path.rename(path.with_name(path.name.replace("a.kernel", "a.kernel2")))  # the code of another kernel
    assert list(machine_code.Store("a.kernel2", "nn/*.py").codes()) == []
    assert store.files() == []


def test_code_of_another_processor_or_compiler_has_another_name(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    store = machine_code.Store("a.kernel", "nn/*.py")
    store.add("0", b"its code", tmp_path)
    assert len(store.files()) == 1
    for name, other in (("_processor", lambda: "flags: none"), ("_compiler_version", lambda: b"0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(machine_code, "_key", machine_code._key.__wrapped__)
            patch.setattr(machine_code, name, other)
            assert store.files() == []


def test_code_does_not_depend_on_the_number_of_threads(tmp_path, monkeypatch):
    """Which pools of processes set."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    store = machine_code.Store("a.kernel", "nn/*.py")
    store.add("0", b"its code", tmp_path)
    monkeypatch.setattr(machine_code, "_key", machine_code._key.__wrapped__)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert len(store.files()) == 1
    monkeypatch.setenv("NUMBA_OPT", "0")
    assert store.files() == []


def test_files_of_other_sources_are_removed_after_a_month(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for name in ("a.kernel-old-1.code", "a.kernel-new-1.code", "a.kernel2-old-1.code"):
        (tmp_path / name).write_bytes(b"")
        if "old" in name:
            os.utime(tmp_path / name, (0, 0))
    machine_code.Store("a.kernel", "nn/*.py").add("0", b"its code", tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"a.kernel-new-1.code", "a.kernel2-old-1.code"}
    assert "a.kernel-old-1.code" not in left
    assert len(left) == 3
