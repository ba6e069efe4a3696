"""The command line: a thin face over the Python API. Heavy imports happen inside the commands."""

from ddlsim.cli import calibrating, laboratory, looking, reporting, running, studying, validating  # noqa: F401  (they register)
from ddlsim.cli.application import app, main

__all__ = ["app", "main"]
