"""Decorators of kernels: machine code from files if there is any, compiled by numba otherwise.

On Linux with x86-64, kernels call machine code (:mod:`ddlsim.machine_code`), which a wheel can contain and which is
otherwise compiled once and stored. numba is imported only to compile it, and for arguments that such code cannot take.

Elsewhere, the decorators are those of :mod:`ddlsim.numba_compiler`, which uses numba's cache.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlsim.machine_code import REMEDY, Store, is_supported, load, sources_of, writable_folder

#: whether kernels are machine code from files
LOADS = is_supported()

if TYPE_CHECKING or not LOADS:
    from ddlsim.numba_compiler import addressed as addressed
    from ddlsim.numba_compiler import called as called
    from ddlsim.numba_compiler import entry as entry
    from ddlsim.numba_compiler import files as files
    from ddlsim.numba_compiler import inlined as inlined
    from ddlsim.numba_compiler import is_kept as is_kept
    from ddlsim.numba_compiler import kernels as kernels

    def deferred(module: str, name: str = "") -> Any:
        """Return a module that imports numba, or the object `name` in it; here, numba is imported in any case."""
        return getattr(importlib.import_module(module), name) if name else importlib.import_module(module)

else:
    _kernels: list[_Kernel] = []
    _lock = threading.RLock()  # while code is compiled or loaded; a process then waits before it forks
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

    def kernels() -> list[_Kernel]:
        """Return the kernels of all imported modules."""
        return list(_kernels)

    def is_kept() -> bool:
        """Return whether compiled code can be stored."""
        folder, lasting = writable_folder()
        if not lasting:
            from ddlsim.compile_messages import teller  # imports multiprocessing

            teller.remark = f"no folder for compiled code is writable; {REMEDY}"
        return folder is not None

    def files() -> list[Path]:
        """Return the files with machine code of all imported kernels, and numba's if it compiled others for itself."""
        by_numba = importlib.import_module("ddlsim.numba_compiler").files() if _Kernel.uses_numba else []
        return [*(path for kernel in _kernels for path in kernel.store.files()), *by_numba]

    class _Deferred:
        """A module that imports numba, or the object `name` in it."""

        def __init__(self, module: str, name: str = "") -> None:
            self._module, self._name = module, name

        @property
        def dispatcher(self) -> Any:
            """The module or object itself."""
            module = importlib.import_module(self._module)
            return getattr(module, self._name) if self._name else module

    class _Part:
        """A function that is called only by compiled code."""

        def __init__(self, py_func: Callable[..., Any], decorator: str) -> None:
            self.py_func, self._decorator = py_func, decorator

        @functools.cached_property
        def dispatcher(self) -> Any:
            """The function as compiled by numba."""
            return _numba(self._decorator)(_with_numba(self.py_func))

    class _Kernel(functools.partial):
        """A function that is called by Python: a partial object whose function is its machine code.

        store    its files
        address  address for other compiled code, if it has been loaded
        """

        uses_numba = False  # whether any kernel was called with arguments that only numba's own dispatcher takes

        def __new__(cls, py_func: Callable[..., Any], decorator: str) -> _Kernel:
            self = super().__new__(cls, py_func)
            self.py_func, self._decorator, self.address = py_func, decorator, None
            self.store = Store(f"{py_func.__module__}.{py_func.__name__}", sources_of(py_func))
            self._tried: set[Any] = set()  # argument types
            self._call(self._first)
            _kernels.append(self)
            return self

        def _call(self, function: Callable[..., Any]) -> None:
            """Let calls go to a function."""
            self.__setstate__((function, (), {}, self.__dict__))

        def _first(self, *arguments: Any) -> Any:
            self.load()
            return self(*arguments)

        def load(self) -> None:
            """Load the files, unless that has been done."""
            with _lock:
                if self.func == self._first:
                    function = self._other
                    for _, code in self.store.codes():
                        function = self._loaded(code, function)
                    self._call(function)

        def _loaded(self, code: bytes, otherwise: Callable[..., Any]) -> Callable[..., Any]:
            """Return the function of loaded code, or `otherwise` if the system does not allow loading it."""
            try:
                function, address = load(code, otherwise)
            except OSError:
                return otherwise
            self.address = self.address or address
            return function

        def _other(self, *arguments: Any) -> Any:
            """Called with arguments of types for which there is no code yet."""
            before, function = self.func, self
            with _lock:
                if self.func is before:  # otherwise, another thread has just compiled code
                    kinds = tuple(map(self._exporter.typeof_pyval, arguments))
                    if kinds in self._tried or not self.compile(kinds):
                        _Kernel.uses_numba = True
                        function = self.dispatcher
            return function(*arguments)

        def compile(self, kinds: tuple[Any, ...]) -> bool:
            """Compile, store and load code for argument types of numba; return whether that is possible."""
            with _lock:
                self.load()
                is_kept()
                try:
                    code = _numba("image")(self._exporter, kinds, addressed=self._decorator == "addressed")
                except BaseException:  # such as KeyboardInterrupt
                    vars(self).pop("_exporter", None)  # which may contain incomplete code
                    raise
                self._tried.add(kinds)
                function = self.func if code is None else self._loaded(code, self.func)
                if function is self.func:
                    return False
                self._call(function)
                folder, _ = writable_folder()
                if folder is not None:
                    self.store.add(hashlib.sha256(repr(kinds).encode()).hexdigest()[:16], code, folder)
                return True

        @functools.cached_property
        def _exporter(self) -> Any:
            return _numba("exported")(_with_numba(self.py_func))

        @functools.cached_property
        def dispatcher(self) -> Any:
            """The function as compiled by numba for its own dispatcher."""
            return _numba(self._decorator)(_with_numba(self.py_func))

    def _numba(name: str) -> Any:
        return getattr(importlib.import_module("ddlsim.numba_compiler"), name)

    def _with_numba(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with functions of this module in its globals replaced by numba's."""
        values = {name: function.__globals__.get(name) for name in _names(function.__code__)}
        jitted = {n: value.dispatcher for n, value in values.items() if isinstance(value, _Deferred | _Part | _Kernel)}
        copy = types.FunctionType(
            function.__code__,
            {**function.__globals__, **jitted},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        functools.update_wrapper(copy, function)
        del copy.__wrapped__
        return copy

    def _names(code: types.CodeType) -> set[str]:
        """Return the global names that code uses."""
        inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names = {operation.argval for operation in dis.get_instructions(code) if operation.opname == "LOAD_GLOBAL"}
        return names.union(*inner)

    #: a reference to a module that imports numba, or to the object `name` in it, resolved when numba compiles
    deferred = _Deferred
    # the decorators of ddlsim.numba_compiler
    entry, addressed = (functools.partial(_Kernel, decorator=name) for name in ("entry", "addressed"))
    inlined, called = (functools.partial(_Part, decorator=name) for name in ("inlined", "called"))
