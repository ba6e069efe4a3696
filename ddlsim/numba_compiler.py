"""How numba compiles ddlsim's kernels: to equally fast code, in less than half of the time.

Work that numba does for each function by default is omitted or done once:

* a function that is called only by compiled code (a part) is simplified, but neither optimised nor compiled to machine
  code; the function that Python calls is, once, together with all its parts;
* the argument and result types of an operator, and whether there is special code for a constant operand, are looked up
  once per set of types, not at every use of the operator;
* steps for language features that no kernel uses (closures, literal lists, context managers) are skipped, and so is the
  deletion of variables, because nothing is reference-counted;
* loops are not unrolled.

Garbage collections, which would traverse numba's many objects repeatedly, are postponed until a function is compiled;
these objects then belong to the oldest generation. All of this uses `pipeline_class`, numba's extension point for
custom compilers (https://numba.readthedocs.io/en/stable/developer/custom_pipeline.html).
"""

from __future__ import annotations

import functools
import glob
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import llvmlite.binding as llvm
import numba as nb
from numba.core import caching, compiler, config, event, lowering, typed_passes, types, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.cpu import CPUContext
from numba.core.errors import NumbaError
from numba.core.ir_utils import build_definitions
from numba.core.ssa import reconstruct_ssa

from ddlsim.code_images import NoImageError, is_supported, linked, target_machine
from ddlsim.compile_messages import teller
from ddlsim.errors import DdlsimError
from ddlsim.garbage import postponed, promote_objects
from ddlsim.machine_code import REMEDY, source_stamp, sources_of, temporary_folder

if getattr(config, "DISABLE_JIT", False):  # set from the environment when numba is imported
    raise DdlsimError("NUMBA_DISABLE_JIT is set, but ddlsim's kernels run as machine code only; unset it")

_full: list[OSError] = []  # errors that prevented writing compiled code


class Cache(caching.FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache of a function, with faster loading, and without errors if the disk is full."""

    @property
    def function(self) -> Any:
        """The function that is compiled."""
        return self._py_func

    @property
    def stem(self) -> str:
        """Prefix of its file names."""
        return str(self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key of compiled code. numba looks only at the function itself, not at those inlined into it."""
        stamp = source_stamp("numba_compiler.py", sources_of(self._py_func))
        return *super()._index_key(sig, codegen), stamp

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code, if it is in the cache.

        This skips numba's refresh, which imports everything that numba can compile, and scipy's linear algebra. For
        code that is already compiled, it would take half a second; the compiler refreshes by itself.
        """
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code; ignore errors with a warning, so that the code is not cached."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not _full:
                reason = f"{self.cache_path}: {error.strerror or error}"
                warnings.warn(f"compiled code cannot be cached: {reason}; free disk space, or {REMEDY}", stacklevel=2)
            _full.append(error)


def _no_place() -> bool:
    """Whether numba finds no writable folder."""
    try:
        caching.FunctionCache(_no_place)
    except RuntimeError:
        return True
    return False


def _prepare() -> bool:
    """Find a folder for compiled code; return whether there is one."""
    if not _no_place():
        return True
    teller.remark = f"no folder for compiled code is writable; {REMEDY}"
    folder = temporary_folder()
    if folder is None:
        return False
    vars(config)["CACHE_DIR"] = str(folder)
    return True


KEPT = _prepare()


def is_kept() -> bool:
    """Return whether numba can cache compiled code on disk."""
    return KEPT


_dispatchers: list[Any] = []


def keep(dispatcher: Any) -> Any:
    """Enable the disk cache of a compiled function, if there is one, and return the function."""
    if KEPT:
        dispatcher._cache = Cache(dispatcher.py_func)
        _dispatchers.append(dispatcher)
    return dispatcher


def kernels() -> list[Any]:
    """Return the cached functions of all imported modules."""
    return list(_dispatchers)


def files() -> list[Path]:
    """Return the cache files of all imported modules: one index per function, and its code."""
    caches = (dispatcher._cache for dispatcher in _dispatchers)
    matches = (Path(cache.cache_path).glob(f"{glob.escape(cache.stem)}.*") for cache in caches)
    return sorted({path for paths in matches for path in paths})


#: A compiled function takes arrays or numbers, whose types numba infers.
_Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Flags(compiler.Flags):
    """A function's options as a key with fast comparison, which numba uses to look up implementations."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0  # almost all are equal

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Flags) and self._values == other._values)


class _Operator(types.Function):
    """A function known to numba, such as an operator, with cached signatures."""

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
    """A typing context with cached results for operators and other functions known to numba."""

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
        resolve = functools.partial(self._context.resolve_function_type, function, args, kws)
        if kws or not (isinstance(function, types.Function) or getattr(function, "__module__", None) == "_operator"):
            return resolve()
        return self._remembered((function, args), resolve)

    def resolve_setitem(self, target: Any, index: Any, value: Any) -> Any:
        return self._remembered((target, index, value), lambda: self._context.resolve_setitem(target, index, value))


class _Code(JITCodeLibrary):
    """Code of a function that is only simplified here, and optimised after it is linked into other code."""

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
    """Return numba's original typing context."""
    return context._context if isinstance(context, _Operators) else context


class _OperatorsAtLowering(_Operators):
    """The same for code generation, which queries operators directly."""

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
    """A code generator for code that numba does not load, which has no place to store an environment in."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: such code does not call Python through numba."""


class _Unloaded(JITCodeLibrary):
    """Code that numba does not compile to machine code."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment(self._codegen)

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _PartCode(_Unloaded, _Code):
    """Code that is only linked into other code."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True


class _WholeCode(_Code):
    """Code with all its parts."""

    def finalize(self) -> None:
        self._linking_libraries = list(_with_parts(self._linking_libraries, {}))
        super().finalize()

    def _optimize_final_module(self) -> None:
        """Optimise once: numba's first pass would inline deeply nested functions without simplifying them.

        Loops are vectorised but not unrolled. Unrolling would take a quarter of the time without gain, because most
        loops run over the few links of a route.
        """
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = True
        options.loop_unrolling = False
        builder = llvm.create_pass_builder(self._codegen._tm, options)
        builder.getModulePassManager().run(self._final_module, builder)


def _with_parts(libraries: Iterable[Any], seen: dict[Any, None]) -> dict[Any, None]:
    """Return the libraries and those that parts among them need, each once, in order, as keys of a dictionary."""
    for library in libraries:
        if library not in seen:
            seen[library] = None
            if isinstance(library, _PartCode):
                _with_parts(library._linking_libraries, seen)
    return seen


_OPERATORS: dict[int, _Operators] = {}
_AT_LOWERING: dict[int, _OperatorsAtLowering] = {}


class _Target(CPUContext):  # type: ignore[misc,unused-ignore]
    """A target that caches failed lookups: at each operator, numba looks for special code for constants."""

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
        """Compile one of numba's own functions, whose types numba infers itself."""
        typing, self.typing_context = self.typing_context, _by_itself(self.typing_context)
        try:
            return super().compile_subroutine(*args, **kws)
        finally:
            self.typing_context = typing


class _Lower(lowering.Lower):  # type: ignore[misc,unused-ignore]
    """Generates a function's code, with cached knowledge of operators."""

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


#: Variables need not be deleted (numba's IRLegalization), because nothing is reference-counted.
@register_pass(mutates_CFG=True, analysis_only=False)
class _ReconstructSSA(untyped_passes.ReconstructSSA):  # type: ignore[misc,unused-ignore]
    """The same without live ranges of variables, which matter only for deleting them."""

    _name = "ddlsim_reconstruct_ssa"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _StripPhis(typed_passes.PreLowerStripPhis):  # type: ignore[misc,unused-ignore]
    """The same without deletions."""

    _name = "ddlsim_strip_phis"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


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
    """Compiles functions called by Python."""

    code: type[JITCodeLibrary] = _WholeCode

    def __init__(self, typing: Any, target: Any, library: Any, args: Any, result: Any, flags: Any, types: Any) -> None:
        super().__init__(typing, target, library, args, result, _Flags(flags), types)
        self.state.typingctx = _OPERATORS.setdefault(id(typing), _Operators(typing))

    def define_pipelines(self) -> list[Any]:
        """Return the single pipeline."""
        manager = PassManager("ddlsim")
        for step in _STEPS:
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]

    def compile_extra(self, function: Any) -> Any:
        """Compile a Python function."""
        self.state.library = self.code(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        with postponed():
            compiled = super().compile_extra(function)
            promote_objects()
        return compiled


class _Part(_Whole):
    """Compiles functions called only by compiled code."""

    code = _PartCode


class _ExportedWholeCode(_Unloaded, _WholeCode):
    pass


class _ExportedWhole(_Whole):
    """Compiles functions to images (:func:`image`)."""

    code = _ExportedWholeCode


#: Kernels never allocate, so they need no reference counting (nrt).
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
_ADDRESSED: dict[str, Any] = {**_OPTIONS, "pipeline_class": _Whole}
_ENTRY: dict[str, Any] = {**_ADDRESSED, "no_cfunc_wrapper": True}
_BARE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_PART: dict[str, Any] = {**_OPTIONS, **_BARE, "pipeline_class": _Part}


def _kept(**options: Any) -> _Decorator:
    """Return a decorator of functions that are cached on disk."""
    return lambda function: cast("Callable[..., Any]", keep(nb.njit(**options)(function)))


#: For functions called by Python.
entry: _Decorator = _kept(**_ENTRY)
#: For functions called by Python, and by other compiled code through their address.
addressed: _Decorator = _kept(**_ADDRESSED)


def exported(function: Callable[..., Any]) -> Any:
    """Return numba's compiler of a function whose code Python calls as an image."""
    return nb.njit(**_OPTIONS, **_BARE, pipeline_class=_ExportedWhole)(function)


@global_compiler_lock
def image(compiler: Any, arguments: tuple[Any, ...], *, addressed: bool) -> bytes | None:
    """Compile a function for argument types, and return a header and position-independent machine code.

    Returns None if only numba's own dispatcher can call the function with these types, or explain why it cannot.
    """
    if not all(map(is_supported, arguments)):
        return None
    function, codegen = compiler.py_func, compiler.targetctx.codegen()
    try:
        compiler.compile(arguments)
        return linked(
            f"{function.__module__}.{function.__qualname__}",
            compiler.overloads[arguments],
            target_machine(codegen._get_host_cpu_name(), codegen._get_host_cpu_features()),
            compiler.targetctx,
            addressed=addressed,
        )
    except (NumbaError, NoImageError):
        return None


def _part(**options: Any) -> _Decorator:
    """Return a decorator of parts, which are compiled once for all integers that fit int64, including constants.

    By default, numba compiles a function separately for int32, int64 and each constant.
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


#: For parts that are inlined into their callers.
inlined: _Decorator = _part(forceinline=True)

#: For parts that LLVM may inline or not: hot loops over a few arrays that then have all registers for themselves.
#: (Without the option, the caller's setting would apply.)
called: _Decorator = _part(forceinline=False)


class _Listener(event.Listener):  # type: ignore[misc,unused-ignore]
    """Forwards the start and end of numba's compilations."""

    on_start, on_end = staticmethod(teller.on_start), staticmethod(teller.on_end)


event.register("numba:compile", _Listener())
