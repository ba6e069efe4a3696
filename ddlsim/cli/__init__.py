"""The command line, a thin layer over the Python API. Heavy imports happen inside the commands."""

from ddlsim.cli import (  # noqa: F401  (they register the commands)
    calibrate,
    import_files,
    lab,
    listing,
    recommend,
    run,
    sweep,
)
from ddlsim.cli.application import app as app, main as main
