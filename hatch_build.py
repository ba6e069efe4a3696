"""With ``DDLSIM_PRECOMPILE=1`` in the environment, wheels contain the kernels as machine code; else they are pure.

See :mod:`ddlsim.precompile` for what that needs. The wheel is for Linux on x86-64 and for all Pythons from 3.11 on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrecompileHook(BuildHookInterface):
    """Adds ``ddlsim/_precompiled.abi3.so`` to wheels."""

    @property
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("DDLSIM_PRECOMPILE", "0") not in ("", "0")

    def dependencies(self) -> list[str]:
        """Return what must be importable: the kernels are compiled by the package itself."""
        return list(self.metadata.core.dependencies) if self._is_wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the module and add it to the wheel."""
        if not self._is_wanted or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ddlsim-wheel-")
        environment = {**os.environ, "PYTHONPATH": self.root}
        command = [sys.executable, "-m", "ddlsim.precompile", self._folder.name]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        (module,) = Path(self._folder.name).iterdir()
        build_data["force_include"][str(module)] = f"ddlsim/{module.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{_platform(module)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder with the module."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _platform(module: Path) -> str:
    """Return the tag of the oldest glibc that has all functions which the module calls (PEP 600)."""
    needed = [tuple(map(int, pair)) for pair in re.findall(rb"GLIBC_(\d+)\.(\d+)", module.read_bytes())]
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_x86_64"
