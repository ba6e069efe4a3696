"""With ``DDLSIM_PRECOMPILE=1`` in the environment, wheels contain the kernels as machine code; else they are pure.

See :mod:`ddlsim.precompile` for what that needs. The wheel is for Linux on x86-64 and for all Pythons from 3.11 on.
Its code needs functions that glibc has had since 2.17, the version in its tag (PEP 600).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrecompileHook(BuildHookInterface):
    """Adds ``ddlsim/_compiled`` to wheels."""

    @property
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("DDLSIM_PRECOMPILE", "0") not in ("", "0")

    def dependencies(self) -> list[str]:
        """Return what must be importable: the kernels are compiled by the package itself."""
        return list(self.metadata.core.dependencies) if self._is_wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels and add them to the wheel."""
        if not self._is_wanted or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ddlsim-wheel-")
        environment = {**os.environ, "PYTHONPATH": self.root}
        command = [sys.executable, "-m", "ddlsim.precompile", self._folder.name]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        build_data["force_include"][str(Path(self._folder.name) / "_compiled")] = "ddlsim/_compiled"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_2_17_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder with the code."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
