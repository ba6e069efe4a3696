"""Decorators of kernels: loaded as machine code if the wheel has it, compiled by numba otherwise.

A wheel can contain the kernels as machine code (the module ``_precompiled``, built by :mod:`ddlsim.precompile`). It is
used if it was built from exactly these sources (``STAMP``) and this processor supports it. In this case, kernels call
their machine code without importing numba, except for arguments of types that were not precompiled.

Without precompiled kernels, in a checkout for example, the decorators are those of :mod:`ddlsim.numba_compiler`, which
caches compiled code on disk.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

_PACKAGE = Path(__file__).parent

#: files that determine the machine code of kernels
SOURCES = (
    "compiler.py", "numba_compiler.py", "precompile.py", "precompiled.c", "cluster/walk.py", "network/*.py", "nn/*.py",
)  # fmt: skip


@functools.cache
def source_stamp(*patterns: str) -> str:
    """Return a hash of the files of the package that match `patterns`, in hexadecimal digits."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def network_stamp() -> int:
    """Return a hash of the sources of the network's kernels, and of the compiler.

    numba looks only at the file of the function that it has cached, not at those inlined into it; entry points
    refer to this number, so that it becomes part of the key under which they are cached.
    """
    return int(source_stamp("numba_compiler.py", "network/*.py")[:14], 16)


def _precompiled() -> Any:
    """Return the module with precompiled kernels; None if there is none that can be used here.

    ``DDLSIM_PRECOMPILED=0`` in the environment disables it, so that numba compiles for this processor.
    """
    if os.environ.get("DDLSIM_PRECOMPILED", "1") == "0":
        return None
    try:
        module = importlib.import_module("ddlsim._precompiled")
    except ImportError:  # missing, or built for another Python or system
        return None
    if not module.SUPPORTED or source_stamp(*SOURCES) != module.STAMP or not _reads_arrays(module):
        return None
    dtypes = [np.dtype(ast.literal_eval(text)) for text in module.DTYPES]
    module.start(np.ndarray, np.int64, np.float64, np.bool_, dtypes)
    return module


def _reads_arrays(module: Any) -> bool:
    """Return whether arrays of this NumPy have the layout that the module assumes."""
    if int(np.__version__.partition(".")[0]) > 2:
        return False
    array = np.zeros((2, 3))
    return bool(module.fields(array) == (array.ctypes.data, array.shape, array.dtype, array.flags.num))


#: the module with precompiled kernels, or None
PRECOMPILED = _precompiled()


def n_precompiled() -> int:
    """Return the number of precompiled functions, counting each set of argument types."""
    return 0 if PRECOMPILED is None else int(PRECOMPILED.N_SIGNATURES)


if TYPE_CHECKING or PRECOMPILED is None:
    from ddlsim.numba_compiler import KEPT as KEPT
    from ddlsim.numba_compiler import addressed as addressed
    from ddlsim.numba_compiler import called as called
    from ddlsim.numba_compiler import entry as entry
    from ddlsim.numba_compiler import files as files
    from ddlsim.numba_compiler import inlined as inlined
    from ddlsim.numba_compiler import kernel as kernel
    from ddlsim.numba_compiler import pasted as pasted

    def deferred(module: str, name: str) -> Any:
        """Return the object `name` of a module that imports numba; here, numba is imported in any case."""
        return getattr(importlib.import_module(module), name)

else:
    KEPT = True

    def files() -> list[Path]:
        """Return the file with precompiled kernels, and cache files if numba compiled further functions."""
        compiled = importlib.import_module("ddlsim.numba_compiler").files() if _Kernel.compiled else []
        return [Path(PRECOMPILED.__file__), *compiled]

    class _Deferred:
        """An object in a module that imports numba."""

        def __init__(self, module: str, name: str) -> None:
            self._module, self._name = module, name

        @property
        def dispatcher(self) -> Any:
            """The object itself."""
            return getattr(importlib.import_module(self._module), self._name)

    class _Part:
        """A function that is called only by compiled code."""

        def __init__(self, py_func: Callable[..., Any], decorator: str) -> None:
            self.py_func, self._decorator = py_func, decorator

        @functools.cached_property
        def dispatcher(self) -> Any:
            """The function as compiled by numba."""
            return _by_numba(self.py_func, self._decorator)

    class _Kernel(PRECOMPILED.Kernel):
        """A function that is called by Python."""

        compiled = False  # whether numba has compiled any

        def __init__(self, py_func: Callable[..., Any], decorator: str) -> None:
            super().__init__(f"{py_func.__module__}.{py_func.__qualname__}")
            self.py_func, self._decorator = py_func, decorator

        @functools.cached_property
        def dispatcher(self) -> Any:
            """The function as compiled by numba, for argument types that are not precompiled."""
            _Kernel.compiled = True
            return _by_numba(self.py_func, self._decorator)

    def _by_numba(function: Callable[..., Any], decorator: str) -> Any:
        """Return a function decorated by numba, with functions of this module in its globals replaced by numba's."""
        own = {
            name: value.dispatcher
            for name, value in function.__globals__.items()
            if isinstance(value, _Deferred | _Part | _Kernel) and name in _names(function.__code__)
        }
        copy = types.FunctionType(
            function.__code__,
            {**function.__globals__, **own},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        functools.update_wrapper(copy, function)
        del copy.__wrapped__
        return getattr(importlib.import_module("ddlsim.numba_compiler"), decorator)(copy)

    def _names(code: types.CodeType) -> set[str]:
        """Return the global names that code uses."""
        inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
        return set(code.co_names).union(*inner)

    #: a reference to the object `name` of a module that imports numba, resolved when numba compiles
    deferred = _Deferred
    # the decorators of ddlsim.numba_compiler
    entry, addressed, kernel = (functools.partial(_Kernel, decorator=name) for name in ("entry", "addressed", "kernel"))
    inlined, called, pasted = (functools.partial(_Part, decorator=name) for name in ("inlined", "called", "pasted"))
