"""Files with kernels as machine code: where they are stored, and how Python calls them without numba.

A file contains one kernel for one set of argument types, as position-independent code (:mod:`ddlsim.code_images`). Its
name ends in a hash of everything that determines the code: the sources of the kernel and of the compiler, the versions
of numba, LLVM and NumPy, and the processor. Its first bytes are a hash of its content, so that incomplete and damaged
files are ignored. Files are found in the folder ``_compiled`` of the package, which wheels may contain (``SHIPPED``),
and in the cache: ``NUMBA_CACHE_DIR``, the package folder or the user's cache folder.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import mmap
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "_compiled"
#: files that determine the machine code of all kernels, beside those in the kernel's own folder
COMPILERS = ("code_images.py", "compiler.py", "machine_code.py", "numba_compiler.py")
#: files with kernels, in groups: a change of one file invalidates the compiled kernels of its group
SOURCES = ("cluster/walk.py", "network/*.py", "nn/*.py")
#: the level of x86-64 for which wheels contain code, and the features in Linux's ``/proc/cpuinfo`` that it requires
LEVEL = "x86-64-v3"
_FEATURES = frozenset({"avx", "avx2", "abm", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "xsave"})
REMEDY = "set NUMBA_CACHE_DIR to a writable folder"
_KEPT_SECONDS = 30 * 86400.0  # for which files of other sources, compilers or processors are kept
_DIGEST = hashlib.sha256().digest_size


@functools.cache
def source_stamp(*patterns: str) -> str:
    """Return a hash of the files of the package that match `patterns`, in hexadecimal digits."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def sources_of(function: Any) -> str:
    """Return the pattern of the files that determine the code of a kernel, empty if there is none."""
    path = PurePosixPath(function.__module__.replace(".", "/") + ".py")
    return next((pattern for pattern in SOURCES if path.match(pattern)), "")


@functools.cache
def _processor() -> str:
    """Return the lines of the first processor that name its model and features; empty if Linux does not tell."""
    lines = []
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags")):
                lines.append(line)
            if not line.strip():
                break
    return "".join(lines)


@functools.cache
def is_supported() -> bool:
    """Return whether machine code can be loaded: CPython with a GIL on Linux and x86-64, and NumPy's known layout."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.implementation.name != "cpython":
        return False
    if "t" in sys.abiflags or int(np.__version__.partition(".")[0]) > 2 or not os.path.exists("/proc/cpuinfo"):
        return False
    array = np.zeros((2, 3))
    fields = [ctypes.c_void_p.from_address(id(array) + offset).value for offset in (8, 16, 56)]
    numbers = [ctypes.c_int.from_address(id(array) + offset).value for offset in (24, 64)]
    shape = (ctypes.c_int64 * 2).from_address(ctypes.c_void_p.from_address(id(array) + 32).value or 0)
    return (*fields, *numbers, *shape) == (
        id(np.ndarray), array.ctypes.data, id(array.dtype), array.ndim, array.flags.num, *array.shape,
    )  # fmt: skip


@functools.cache
def _compiler_version() -> bytes:
    """Return the contents of the files in which numba and llvmlite name their versions, without importing them."""
    specifications = [importlib.util.find_spec(name) for name in ("numba", "llvmlite")]
    folders = [Path(one.origin).parent for one in specifications if one is not None and one.origin]
    return b"".join((folder / "_version.py").read_bytes() for folder in folders)


@functools.cache
def _key(sources: str, *, shipped: bool) -> str:
    """Return a hash of what determines the code of the kernels in `sources`, except their argument types."""
    stamp = source_stamp(*COMPILERS, sources)
    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in _IRRELEVANT)
    facts = [LEVEL] if shipped else [_processor(), _compiler_version(), np.__version__, sys.version, options]
    return hashlib.sha256(repr([stamp, facts]).encode()).hexdigest()[:32]


_VARIABLE = "NUMBA_CACHE_DIR"
_IRRELEVANT = (_VARIABLE, "NUMBA_NUM_THREADS")  # to the code


def cache_folders() -> list[Path]:
    """Return the folders in which code may be cached, in order of preference."""
    folder = os.environ.get(_VARIABLE)
    if folder:
        return [Path(folder)]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [PACKAGE / "__pycache__", Path(user) / "ddlsim"]


@functools.cache
def writable_folder() -> tuple[Path | None, bool]:
    """Return the folder for compiled code, or None, and whether it remains after the process ends."""
    for folder in cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError:
            continue
        return folder.absolute(), True
    return temporary_folder(), False


def temporary_folder() -> Path | None:
    """Create a cache that is removed when the process ends; return None if there is no place for it."""
    import tempfile  # slow to import, and seldom needed

    try:
        folder = Path(tempfile.mkdtemp(prefix="ddlsim-"))
    except OSError:
        return None
    atexit.register(_remove, folder, os.getpid())
    os.environ[_VARIABLE] = str(folder)
    return folder


def _remove(folder: Path, owner: int) -> None:
    import shutil

    if os.getpid() == owner:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _uses_shipped() -> bool:
    """Return whether the wheel's code can be used; with ``DDLSIM_PRECOMPILED=0``, it is not."""
    if os.environ.get("DDLSIM_PRECOMPILED", "1") == "0" or not SHIPPED.is_dir():
        return False
    return _FEATURES.issubset(_processor().partition("flags")[2].split())


class Store:
    """The files of one kernel; ``sources`` is the pattern of the files that determine its code."""

    def __init__(self, name: str, sources: str) -> None:
        self._name, self._sources = name, sources

    def _stem(self, *, shipped: bool) -> str:
        return f"{self._name}-{_key(self._sources, shipped=shipped)}"

    def files(self) -> list[Path]:
        """Return the files that exist, for different argument types: those of the wheel if they can be used, and those
        of the cache."""
        shipped = _matching(SHIPPED, self._stem(shipped=True)) if _uses_shipped() else []
        stem = self._stem(shipped=False)
        return [*shipped, *(path for folder in cache_folders() for path in _matching(folder, stem))]

    def codes(self) -> Iterator[tuple[str, bytes]]:
        """Read the files, except those that are damaged: digests of the argument types, and code."""
        for path in self.files():
            try:
                content = path.read_bytes()
            except OSError:
                continue
            code = content[_DIGEST:]
            if hashlib.sha256(path.name.encode() + code).digest() == content[:_DIGEST]:
                yield path.stem.rpartition("-")[2], code

    def add(self, types: str, code: bytes, folder: Path, *, shipped: bool = False) -> None:
        """Write the file for argument types with this digest; ignore errors with a warning. Remove old files of other
        sources, compilers or processors."""
        stem = self._stem(shipped=shipped)
        path = folder / f"{stem}-{types}.code"
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            temporary.write_bytes(hashlib.sha256(path.name.encode() + code).digest() + code)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            _warn_once(f"compiled code cannot be cached: {folder}: {error.strerror}; free disk space, or {REMEDY}")
        for other in _matching(folder, f"{self._name}-"):
            with contextlib.suppress(OSError):  # another process may have removed it
                if not other.name.startswith(stem) and other.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    other.unlink()


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _matching(folder: Path, stem: str) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(one.path) for one in entries if one.name.startswith(stem) and one.name.endswith(".code"))
    except OSError:
        return []


class _Method(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_FASTCALL = 0x0080
_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = (ctypes.POINTER(_Method), ctypes.py_object, ctypes.c_void_p)
_permanent: list[Any] = []  # what machine code refers to


def load(code: bytes, otherwise: Callable[..., Any]) -> tuple[Callable[..., Any], int | None]:
    """Load machine code; return its function, and its address for other compiled code if it has one.

    The function calls `otherwise` with arguments of other types. Raises OSError if the system refuses.
    """
    head, _, image = code.partition(b"\n")
    header = json.loads(head)
    memory = mmap.mmap(-1, len(image), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(image)
    words = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(words)
    for offset, target in header["relative"]:
        ctypes.c_uint64.from_address(start + offset).value = start + target
    for offset, name in header["imports"]:
        ctypes.c_uint64.from_address(start + offset).value = _address(name)
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(image)), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "machine code cannot be executed")
    method = _Method(header["name"].encode(), start + header["call"], _FASTCALL, None)
    kept = (memory, words, method)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # functions may be called while Python exits
    address = None if header["address"] is None else start + header["address"]
    return _new_function(ctypes.byref(method), otherwise, None), address


@functools.cache
def _address(name: str) -> int:
    """Return the address of what code refers to: a Python object, or a symbol of Python or of the C library.

    An object is ``builtins:int``, ``numpy:ndarray``, or ``dtype:`` and a literal of which NumPy makes the dtype.
    """
    module, colon, text = name.partition(":")
    if colon:
        target = np.dtype(ast.literal_eval(text)) if module == "dtype" else getattr(_MODULES[module], text)
        _permanent.append(target)
        return id(target)
    for library in (ctypes.pythonapi, _mathematics()):
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(library, name))
        except ValueError:
            continue
    raise OSError(f"symbol {name} is missing")


_MODULES = {"builtins": builtins, "numpy": np}


@functools.cache
def _mathematics() -> Any:
    return ctypes.CDLL("libm.so.6")
