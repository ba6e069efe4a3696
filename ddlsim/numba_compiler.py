"""How numba compiles ddlsim's kernels: to code as fast as by itself, in less than half of the time.

What numba does for each function by itself is left out or done once:

* a function that only compiled code calls (a part) is simplified, but neither optimised nor turned into machine code;
  the function that Python calls is, once, together with all its parts;
* the types that an operator takes and returns, and whether there is special code for a constant operand, are looked up
  once per set of types, not at every place where the operator stands;
* steps for language features that no kernel uses (closures, literal lists, context managers) are skipped, and so is the
  deletion of variables where nothing is counted;
* loops are not unrolled.

Garbage collections, which would look at all of numba's many objects again and again, wait until a function is
compiled, and then count these objects as old ones. All of it rests on `pipeline_class`, numba's extension point for
custom compilers (https://numba.readthedocs.io/en/stable/developer/custom_pipeline.html).
"""

from __future__ import annotations

import atexit
import gc
import glob
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import llvmlite.binding as llvm
import numba as nb
from numba.core import caching, compiler, config, event, lowering, typed_passes, types, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.cpu import CPUContext
from numba.core.ir_utils import build_definitions
from numba.core.runtime.nrt import rtsys
from numba.core.ssa import reconstruct_ssa

from ddlsim.compile_messages import teller

_REMEDY = "set NUMBA_CACHE_DIR to a writable folder"
_full: list[OSError] = []  # what has kept compiled code from being written


class Cache(caching.FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache of a function: quicker to load from, and a full disk is no reason to fail."""

    @property
    def function(self) -> Any:
        """What is compiled."""
        return self._py_func

    @property
    def stem(self) -> str:
        """With what the names of its files begin."""
        return str(self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code, if it is there.

        Without numba's refresh before it, which imports everything that numba knows to compile, and scipy's linear
        algebra: half a second for what is compiled already. Whatever does compile refreshes by itself. Of the refresh,
        code that is compiled already needs only numba's runtime, if it counts references.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code; where that fails, it is not kept."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not _full:
                reason = f"{self.cache_path}: {error.strerror or error}"
                warnings.warn(f"compiled code cannot be cached: {reason}; free disk space, or {_REMEDY}", stacklevel=2)
            _full.append(error)


def _no_place() -> bool:
    """Whether numba finds no folder that it may write to."""
    try:
        caching.FunctionCache(_no_place)
    except RuntimeError:
        return True
    return False


def _prepare() -> bool:
    """Find a place for compiled code; whether there is one."""
    if not _no_place():
        return True
    teller.remark = f"no folder for compiled code is writable; {_REMEDY}"
    try:
        folder = tempfile.mkdtemp(prefix="ddlsim-")
    except OSError:
        return False
    atexit.register(_remove, folder, os.getpid())
    vars(config)["CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"] = folder
    return True


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


#: whether compiled code can be kept on disk
KEPT = _prepare()


_caches: list[Cache] = []
_dispatchers: list[Any] = []


def keep(dispatcher: Any) -> Any:
    """Let a compiled function be kept in the cache, if there is one; returns it."""
    if KEPT:
        dispatcher._cache = Cache(dispatcher.py_func)
        _caches.append(dispatcher._cache)
        _dispatchers.append(dispatcher)
    return dispatcher


def dispatchers() -> list[Any]:
    """Return the functions that are kept in the cache, of what has been imported."""
    return list(_dispatchers)


def files() -> list[Path]:
    """Return the files of the cache that belong to what has been imported: one index per function, and its code."""
    found = (Path(cache.cache_path).glob(f"{glob.escape(cache.stem)}.*") for cache in _caches)
    return sorted({path for paths in found for path in paths})


#: A compiled function takes arrays or numbers; numba infers the types.
_Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Flags(compiler.Flags):
    """A function's options, as a key that is quick to compare: numba looks implementations up by it."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0  # there are hardly two that differ

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Flags) and self._values == other._values)


class _Operator(types.Function):
    """An operator or another function of numba that remembers its signatures."""

    def __init__(self, function: Any) -> None:
        vars(self).update(vars(function))
        self._signatures: dict[Any, Any] = {}

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        context = _by_itself(context)
        if kws:
            return super().get_call_type(context, args, kws)
        if args not in self._signatures:
            self._signatures[args] = super().get_call_type(context, args, kws)
        return self._signatures[args]


class _Operators:
    """A typing context that remembers what it has said of operators and other functions of numba."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._signatures: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def _remembered(self, key: Any, resolve: Callable[[], Any]) -> Any:
        if key not in self._signatures:
            self._signatures[key] = resolve()
        return self._signatures[key]

    def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
        def resolve() -> Any:
            return self._context.resolve_function_type(function, args, kws)

        if kws or not (isinstance(function, types.Function) or getattr(function, "__module__", None) == "_operator"):
            return resolve()
        return self._remembered((function, args), resolve)

    def resolve_setitem(self, target: Any, index: Any, value: Any) -> Any:
        return self._remembered((target, index, value), lambda: self._context.resolve_setitem(target, index, value))


class _Code(JITCodeLibrary):
    """Code of a function, which is only made smaller before it is linked into other code and optimised there."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        passes, builder = llvm.create_new_function_pass_manager(), self._codegen._pass_builder()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        for function in ll_module.functions:
            if not function.is_declaration:
                passes.run(function, builder)


def _by_itself(context: Any) -> Any:
    """Return a typing context as numba has made it."""
    return context._context if isinstance(context, _Operators) else context


class _OperatorsAtLowering(_Operators):
    """The same for the generation of code, which asks operators themselves."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._operators: dict[Any, Any] = {}

    def resolve_value_type(self, value: Any) -> Any:
        kind = self._context.resolve_value_type(value)
        if not isinstance(kind, types.Function):
            return kind
        if kind not in self._operators:
            self._operators[kind] = _Operator(kind)
        return self._operators[kind]


class _NoEnvironment:
    """The code generator of a part, which has no machine code in which an environment could be noted."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: parts neither raise nor call Python."""


class _PartCode(_Code):
    """Code that is only linked into other code."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment(self._codegen)

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _OwnCode(JITCodeLibrary):
    """Code of a function that is optimised as numba does it, with one pass manager for all functions."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        passes, builder = self._codegen._function_pass_manager()
        for function in ll_module.functions:
            if not function.is_declaration:
                passes.run(function, builder)


class _WholeCode(_Code):
    """Code with all its parts."""

    def finalize(self) -> None:
        self._linking_libraries = list(_with_parts(self._linking_libraries, {}))
        super().finalize()

    def _optimize_final_module(self) -> None:
        """Optimise once: numba's first pass inlines, without simplifying, what are functions many calls deep here.

        Loops are vectorised but not unrolled, which would take a quarter of the time and gain nothing: most of them are
        over the few links of a route.
        """
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = True
        options.loop_unrolling = False
        builder = llvm.create_pass_builder(self._codegen._tm, options)
        builder.getModulePassManager().run(self._final_module, builder)


def _with_parts(libraries: Iterable[Any], seen: dict[Any, None]) -> dict[Any, None]:
    """Return the libraries and those that parts among them need, each once, in order, as keys."""
    for library in libraries:
        if library not in seen:
            seen[library] = None
            if isinstance(library, _PartCode):
                _with_parts(library._linking_libraries, seen)
    return seen


_OPERATORS: dict[int, _Operators] = {}
_AT_LOWERING: dict[int, _OperatorsAtLowering] = {}


class _Target(CPUContext):  # type: ignore[misc,unused-ignore]
    """A target that remembers for what it has no code: numba looks for code for constants at each operator."""

    missing: ClassVar[set[Any]] = set()

    def get_function(self, fn: Any, sig: Any, _firstcall: bool = True) -> Any:
        if (fn, sig) in self.missing:
            raise NotImplementedError
        try:
            return super().get_function(fn, sig, _firstcall)
        except NotImplementedError:
            self.missing.add((fn, sig))
            raise

    def compile_subroutine(self, *args: Any, **kws: Any) -> Any:
        """Compile a function of numba's, whose types numba infers by itself."""
        typing, self.typing_context = self.typing_context, _by_itself(self.typing_context)
        try:
            return super().compile_subroutine(*args, **kws)
        finally:
            self.typing_context = typing


class _Lower(lowering.Lower):  # type: ignore[misc,unused-ignore]
    """Generates a function's code; what numba knows of operators is remembered."""

    def __init__(self, context: Any, *args: Any, **kws: Any) -> None:
        super().__init__(context, *args, **kws)
        if type(self.context) is CPUContext:
            self.context.__class__ = _Target
        typing = context.typing_context
        self.context.typing_context = _AT_LOWERING.setdefault(id(typing), _OperatorsAtLowering(typing))


@register_pass(mutates_CFG=True, analysis_only=False)
class _NativeLowering(typed_passes.NativeLowering):  # type: ignore[misc,unused-ignore]
    _name = "ddlsim_native_lowering"
    lowering_class = _Lower


#: Variables need not be deleted (numba's IRLegalization), as nothing is counted.
@register_pass(mutates_CFG=True, analysis_only=False)
class _ReconstructSSA(untyped_passes.ReconstructSSA):  # type: ignore[misc,unused-ignore]
    """The same without how long variables live, which matters where they are deleted."""

    _name = "ddlsim_reconstruct_ssa"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _StripPhis(typed_passes.PreLowerStripPhis):  # type: ignore[misc,unused-ignore]
    """The same without that."""

    _name = "ddlsim_strip_phis"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


_STEPS_ALONE = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.InlineInlinables,
    untyped_passes.GenericRewrites,
    untyped_passes.ReconstructSSA,
    typed_passes.NopythonTypeInference,
    typed_passes.PreLowerStripPhis,
    typed_passes.IRLegalization,
    typed_passes.AnnotateTypes,
    _NativeLowering,
    typed_passes.NoPythonBackend,
)

_STEPS = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    _ReconstructSSA,
    typed_passes.NopythonTypeInference,
    _StripPhis,
    typed_passes.AnnotateTypes,
    _NativeLowering,
    typed_passes.NoPythonBackend,
)


class _Whole(compiler.CompilerBase):  # type: ignore[misc,unused-ignore]
    """Compiles what Python calls."""

    code: type[JITCodeLibrary] = _WholeCode
    steps: tuple[Any, ...] = _STEPS

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, result: Any, flags: Any, types: Any) -> None:
        super().__init__(typing, target, library, args, result, _Flags(flags), types)
        self.state.typingctx = _OPERATORS.setdefault(id(typing), _Operators(typing))

    def define_pipelines(self) -> list[Any]:
        """Return the only pipeline."""
        manager = PassManager("ddlsim")
        for step in self.steps:
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]

    def compile_extra(self, function: Any) -> Any:
        """Compile a Python function."""
        self.state.library = self.code(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(function)
        finally:
            if collecting:
                _let_age()
                gc.enable()


def _let_age() -> None:
    """Make all objects old ones, so that the next garbage collection of young ones does not look at them."""
    if gc.get_freeze_count() == 0:  # else the application has frozen objects, which would be thawed
        gc.freeze()
        gc.unfreeze()


class _Part(_Whole):
    """Compiles what only compiled code calls."""

    code = _PartCode


class _Alone(_Whole):
    """Compiles what stands for itself."""

    code = _OwnCode
    steps = _STEPS_ALONE


#: Kernels never allocate, so they need no reference counting (nrt).
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
_ADDRESSED: dict[str, Any] = {**_OPTIONS, "pipeline_class": _Whole}
_ENTRY: dict[str, Any] = {**_ADDRESSED, "no_cfunc_wrapper": True}
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _Part}


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what Python calls, and keep it in the cache on disk."""
    return cast("Callable[..., Any]", keep(nb.njit(**_ENTRY)(function)))


def addressed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what Python calls, and other compiled code by its address; keep it in the cache on disk."""
    return cast("Callable[..., Any]", keep(nb.njit(**_ADDRESSED)(function)))


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what stands for itself, to the code that numba makes of it, and keep it in the cache on disk."""
    return cast("Callable[..., Any]", keep(nb.njit(pipeline_class=_Alone)(function)))


#: For parts of what :func:`kernel` compiles, which numba pastes into their callers before it infers types.
pasted: _Decorator = nb.njit(inline="always")


def _part(**options: Any) -> _Decorator:
    """Return a decorator of parts, which are compiled once for all integers that int64 can hold, constants included.

    By itself, numba compiles a function anew for int32, int64 and each constant that it gets.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = nb.njit(**options, **_PART)(function)
        compile_exactly = dispatcher.compile

        def compile_widened(arguments: Any) -> Any:
            arguments = tuple(map(_widened, arguments))
            compiled = dispatcher.overloads.get(arguments)
            return compile_exactly(arguments) if compiled is None else compiled.entry_point

        dispatcher.compile = compile_widened
        return cast("Callable[..., Any]", dispatcher)

    return decorate


def _widened(kind: Any) -> Any:
    kind = types.unliteral(kind)
    return types.int64 if kind == types.int32 else kind


#: For parts that become part of their callers.
inlined: _Decorator = _part(forceinline=True)

#: For parts of which LLVM decides that: hot loops over a few arrays have the processor's registers for themselves.
#: (Without the option, it would be taken over from the caller.)
called: _Decorator = _part(forceinline=False)


class _Listener(event.Listener):  # type: ignore[misc,unused-ignore]
    """Passes on when numba begins and ends to compile a function."""

    def on_start(self, event: Any) -> None:
        teller.on_start(event)

    def on_end(self, event: Any) -> None:
        teller.on_end(event)


event.register("numba:compile", _Listener())
