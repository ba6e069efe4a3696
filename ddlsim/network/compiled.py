"""Detection of outdated kernels in numba's cache."""

from __future__ import annotations

from ddlsim import compiler


def source_stamp() -> int:
    """Return a hash of the package's source files, and of the compiler's.

    numba looks only at the file of the function that it has cached, not at those inlined into it; entry points
    refer to this number, so that it becomes part of the key under which they are cached.
    """
    return int(compiler.source_stamp("numba_compiler.py", "network/*.py")[:14], 16)
