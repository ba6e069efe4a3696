"""Reading whole files with errors for people."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from ddlsim.errors import ConfigError


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, unpacked if its name ends in ``.gz``; ConfigError if it cannot be read."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
