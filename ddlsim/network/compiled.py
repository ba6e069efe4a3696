"""Detection of outdated kernels in numba's cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ddlsim import compiler


def source_stamp() -> int:
    """Return a hash of the package's source files, and of the compiler's.

    numba looks only at the file of the function that it has cached, not at those inlined into it; entry points
    refer to this number, so that it becomes part of the key under which they are cached.
    """
    digest = hashlib.sha256()
    for path in [Path(compiler.__file__), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")
