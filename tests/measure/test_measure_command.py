"""What a user types, with real processes: MPI here, PyTorch where it is installed."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ddlsim
from ddlsim.measure import read_measurements

ROOT = Path(__file__).parents[2]
LIMIT = 120  # s for a command; they take a few


def launcher(name):
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or launcher("mpirun") is None, reason="mpi4py or mpirun is missing"
)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
MPI = (launcher("mpirun"), "-n", "2", sys.executable, "-m", "ddlsim.measure")
TORCH = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ddlsim.measure")
ALONE = (sys.executable, "-m", "ddlsim.measure")
#: little enough for a test, enough for every kind of task
LITTLE = ("--budget", "4 s", "--max-size", "64 KiB", "--batch-sizes", "1,2")


def call(launch, *arguments, **environment):
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [*launch, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def operations(rows):
    return {(row.experiment, row.operation) for row in rows}


ALL = {
    ("point_to_point", "one_way"), ("point_to_point", "both_ways"), ("collective", "all_reduce"),
    ("collective", "broadcast"), ("collective", "all_gather"), ("collective", "all_to_all"),
    ("collective", "reduce_scatter"), ("collective", "reduce"), ("collective", "gather"), ("collective", "scatter"),
    ("memory", "reduction"), ("memory", "copy"), ("step", "training"),
}  # fmt: skip


@needs_mpi
def test_two_mpi_ranks_measure_everything_once(tmp_path):
    first = call(MPI, "--out", tmp_path, *LITTLE, "--model", "digits-cnn")
    assert first.returncode == 0, first.stderr
    rows = read_measurements(tmp_path)
    assert operations(rows) == ALL
    assert {row.nbytes for row in rows} <= {0, 4, *(4**i for i in range(2, 9)), 8}
    assert all(row.n_ranks == 2 and row.n_hosts == 1 and row.backend in ("mpi", "numpy") for row in rows)
    assert f"{len(rows)} rows added" in first.stderr
    again = call(MPI, "--out", tmp_path, *LITTLE, "--model", "digits-cnn")
    assert again.returncode == 0, again.stderr
    assert f"added to {tmp_path / 'measurements.csv'}, which had {len(rows)} rows" in again.stderr
    all_rows = read_measurements(tmp_path)  # there are more if there was no time for all the first time
    assert all_rows[: len(rows)] == rows
    assert len({row.key for row in all_rows}) == len(all_rows)


@needs_mpi
def test_an_error_ends_all_ranks_with_one_line(tmp_path):
    done = call(MPI, "--out", tmp_path, "--model", "lenet")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "error: unknown model 'lenet'; did you mean 'lenet5'?"
    ]


@needs_mpi
def test_one_process_without_a_launcher(tmp_path):
    done = call(ALONE, "--out", tmp_path, *LITTLE, "--only", "memory", "--backend", "mpi")
    assert done.returncode == 0, done.stderr
    assert {row.n_ranks for row in read_measurements(tmp_path)} == {1}


@needs_torch
def test_two_torch_ranks_measure_everything(tmp_path):
    done = call(TORCH, "--out", tmp_path, *LITTLE, "--module", "torch_example:linear", "--input-shape", "4")
    assert done.returncode == 0, done.stderr
    rows = read_measurements(tmp_path)
    assert operations(rows) == ALL
    assert {row.backend for row in rows} == {"gloo", "torch cpu"}
    assert {row.model for row in rows if row.experiment == "step"} == {"torch_example:linear"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "2"], "error: --budget: '2' has no unit; write a time such as '10 us' (SI unit: s)"),
        (["--budget", "0 s"], "error: --budget 0 s: must be above 0, for example '2 min'"),
        (
            ["--batch-sizes", "8,x"],
            "error: --batch-sizes = '8,x': must be integers of at least 1, separated by commas, such as 8,16,32",
        ),
        (["--input-shape", "3"], "error: --input-shape 3: requires --module; add --module, or leave --input-shape out"),
        (["--backend", "ncll"], "error: unknown backend 'ncll'; did you mean 'nccl'?"),
        (
            ["--profile", "p.json"],
            "error: --profile p.json: requires --only kernels; add --only kernels, or leave --profile out",
        ),
        (
            ["--only", "kernels", "--max-size", "1 MiB"],
            "error: --max-size has no effect with --only kernels, which measures one device; leave --max-size out",
        ),
    ],
    ids=["unit", "budget", "batch", "shape", "backend", "profile", "kernels"],
)
def test_a_bad_command_line_is_one_line(tmp_path, arguments, message):
    done = call(ALONE, "--out", tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (2, message + "\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "measured/"], "error: --out measured/: must be the name of a TOML file, such as my-gpu.toml"),
        (["--out", "gpu.toml", "--budget", "0 s"], "error: --budget 0 s: must be above 0, for example '5 min'"),
    ],
)
def test_the_kernels_need_a_file_and_time(arguments, message):
    done = call(ALONE, "--only", "kernels", *arguments)
    assert (done.returncode, done.stderr) == (2, message + "\n")


@needs_torch
def test_the_kernels_of_this_machine(tmp_path):
    """A device file that ddlsim takes, with fractions that are fractions, and all that was measured beside it."""
    out, profile = tmp_path / "mine.toml", tmp_path / "profile.json"
    done = call(ALONE, "--only", "kernels", "--out", out, "--profile", profile, "--budget", "10 s")
    assert done.returncode == 0, done.stderr
    device = ddlsim.load_device(out)
    assert (device.name, device.kernels.units) == ("mine", 1)
    assert {"bf16", "fp32"} <= device.kernels.gemm.keys()
    assert ddlsim.fits("lenet5", out, 1)
    measured = json.loads(profile.read_text(encoding="utf-8"))
    assert list(measured["seconds"]) == ["launch", "gemm", "attention", "memory", "optimizers", "steps"]
    assert all(row["seconds"] > 0 for name in measured["seconds"] for row in measured[name])
    assert "products: mean error" in done.stderr
    assert "predicted" in done.stderr


def test_without_mpi_and_torch_there_is_help(tmp_path):
    """Modules that are None in sys.modules cannot be imported, as if they were not installed."""
    script = "import sys; sys.modules['mpi4py'] = sys.modules['torch'] = None; sys.argv = ['measure', *sys.argv[1:]]; "
    script += "import ddlsim.measure.__main__ as command; command.main()"
    launch = (sys.executable, "-c", script)
    shown = call(launch, "--help")
    assert shown.returncode == 0
    assert "--max-size" in shown.stdout
    refused = call(launch, "--out", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: mpi4py is not installed; pip install 'ddlsim[measure]'")
    asked = call(launch, "--out", tmp_path, "--backend", "gloo")
    assert asked.stderr.startswith("error: backend 'gloo' needs PyTorch, which is not installed: pip install torch")
