"""Build the folder ``_compiled``: all kernels as machine code, for a wheel.

    python -m ddlsim.precompile FOLDER

`hatch_build.py` runs it for wheels. It makes :func:`ddlsim.warm_up` compile everything for processors of level
x86-64-v3 (AVX2 and FMA; Intel since 2013, AMD since 2015), and stores the code under names that depend only on the
sources (:mod:`ddlsim.machine_code`). It requires Linux on x86-64. The files work with all Pythons from 3.11 on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ddlsim import compiler
from ddlsim.machine_code import LEVEL, PACKAGE


class CannotPrecompileError(RuntimeError):
    """A requirement is missing on this machine."""


def build(folder: Path) -> Path:
    """Compile in a fresh process, and return the path of ``_compiled`` in `folder`."""
    if not compiler.LOADS:
        raise CannotPrecompileError(f"precompiling requires CPython on Linux and x86-64, not {sys.platform}")
    with tempfile.TemporaryDirectory(prefix="ddlsim-precompile-") as work:
        environment = {
            **os.environ,
            "NUMBA_CPU_NAME": LEVEL,
            "NUMBA_CPU_FEATURES": "",
            "NUMBA_CACHE_DIR": work,
            "DDLSIM_PRECOMPILED": "0",
            "DDLSIM_QUIET": "1",
            "PYTHONPATH": str(PACKAGE.parent),
        }
        command = [sys.executable, "-c", "import sys; from ddlsim import precompile; precompile.store(sys.argv[1])"]
        target = folder / "_compiled"
        subprocess.run([*command, str(target)], env=environment, check=True)
    return target


def store(folder: str) -> None:
    """Compile all kernels, and write their code to a folder."""
    from ddlsim.run.warm_up import warm_up

    warm_up()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.code"):
        old.unlink()
    for kernel in compiler.kernels():
        for types, code in kernel.store.codes():
            kernel.store.add(types, code, place, shipped=True)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
