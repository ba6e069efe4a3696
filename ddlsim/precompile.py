"""Build the module ``_precompiled``: all kernels as machine code in an extension module that needs no numba.

    python -m ddlsim.precompile FOLDER

`hatch_build.py` runs it for wheels. It makes :func:`ddlsim.warm_up` compile everything for processors of level
x86-64-v3 (AVX2 and FMA; Intel since 2013, AMD since 2015), takes LLVM's optimised code of each kernel and signature,
adds a function with plain arguments, and links all of it with ``precompiled.c``. It requires Linux on x86-64, a C
compiler and Python's headers. The module uses the stable ABI: one file works with all Pythons from 3.11 on.

The machine code computes the same bits as code compiled by numba at run time. On any processor, LLVM neither reorders
sums nor contracts products and sums unless requested; fused operations are explicit calls of ``llvm.fma`` in the
sources.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU = "x86-64-v3"
SUFFIX = ".abi3.so"
#: numbers of argument kinds in `precompiled.c`, and sizes of its tables
INTEGER, REAL, BOOLEAN, ARRAY, TUPLE = range(5)
MAX_WORDS, MAX_RESULTS = 256, 8

_PACKAGE = Path(__file__).parent


class CannotPrecompileError(RuntimeError):
    """A requirement is missing on this machine."""


@dataclass(frozen=True)
class _Compiled:
    """A kernel compiled for one signature."""

    name: str
    addressed: bool
    without_gil: bool
    arguments: tuple[Any, ...]
    result: Any
    description: Any
    library: Any


def compiler_command() -> list[str]:
    """Return the command of the C compiler. Raises CannotPrecompileError if the module cannot be built."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        raise CannotPrecompileError(
            f"precompiling requires Linux on x86-64, not {sys.platform} on {platform.machine()}"
        )
    command = os.environ.get("CC", "cc").split()
    if shutil.which(command[0]) is None:
        compiler = command[0]
        raise CannotPrecompileError(f"precompiling requires a C compiler; {compiler} is not on the path (set CC)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise CannotPrecompileError("precompiling requires Python.h, a header of this Python; install its headers")
    return command


def build(folder: Path) -> Path:
    """Compile and link in a fresh process, and return the path of the module in `folder`."""
    compiler_command()
    with tempfile.TemporaryDirectory(prefix="ddlsim-precompile-") as work:
        environment = {
            **os.environ,
            "NUMBA_CPU_NAME": CPU,
            "NUMBA_CPU_FEATURES": "",
            "NUMBA_CACHE_DIR": work,
            "DDLSIM_PRECOMPILED": "0",
            "DDLSIM_QUIET": "1",
            "PYTHONPATH": str(_PACKAGE.parent),
        }
        command = [sys.executable, "-c", "import sys; from ddlsim import precompile; precompile.link(*sys.argv[1:])"]
        subprocess.run([*command, work, str(folder)], env=environment, check=True)
    return folder / f"_precompiled{SUFFIX}"


def link(work: str, folder: str) -> None:
    """Compile all kernels in this process, and link them; `work` is the folder of intermediate files."""
    import llvmlite.binding as llvm

    from ddlsim.compiler import SOURCES, source_stamp
    from ddlsim.run.warm_up import warm_up

    warm_up()
    place = Path(work)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=CPU, features="", opt=3, reloc="pic", codemodel="small"
    )
    names, rows, kinds = [], [], []
    dtypes: list[str] = []
    for number, kernel in enumerate(_kernels()):
        tokens = [token for argument in kernel.arguments for token in _kinds(argument, dtypes)]
        code = _machine_code(kernel, number, machine)
        (place / f"{number}.o").write_bytes(code)
        names.append(str(place / f"{number}.o"))
        kinds.append(f"static const int32_t kinds_{number}[] = {{{', '.join(map(str, [*tokens, 0]))}}};")
        address = f"(void *)ddlsim_address_{number}" if kernel.addressed else "NULL"
        rows.append(
            f'    {{"{kernel.name}", kinds_{number}, {len(kernel.arguments)}, "{_letters(kernel.result)}", '
            f"ddlsim_call_{number}, {address}, {int(kernel.without_gil)}}},"
        )
    declared = [
        f"int32_t ddlsim_call_{number}(int64_t *, int64_t *); void ddlsim_address_{number}(void);"
        for number in range(len(rows))
    ]
    texts = ", ".join('"' + text.replace('"', '\\"') + '"' for text in dtypes)
    table = [
        f'#define STAMP "{source_stamp(*SOURCES)}"',
        f"enum {{ N_DTYPES = {len(dtypes)}, N_SIGNATURES = {len(rows)} }};",
        f"static const char *const DTYPES[] = {{{texts}}};", *declared, *kinds,
        "static const Signature SIGNATURES[] = {", *rows, "};", "",
    ]  # fmt: skip
    (place / "precompiled_table.h").write_text("\n".join(table), encoding="utf-8")
    target = Path(folder) / f"_precompiled{SUFFIX}"
    subprocess.run(
        [
            *compiler_command(), "-shared", "-fPIC", "-O2", "-Wall", "-fvisibility=hidden", "-I", work,
            "-I", sysconfig.get_paths()["include"], str(_PACKAGE / "precompiled.c"), *names, "-lm",
            "-Wl,-z,now", "-Wl,--gc-sections", "-Wl,-s", "-o", str(target),
        ],
        check=True,
    )  # fmt: skip
    # With -z now, an undefined function is an error here, not when it is called.
    specification = importlib.util.spec_from_file_location("ddlsim._precompiled", target)
    assert specification is not None
    importlib.util.module_from_spec(specification)


def _kernels() -> list[_Compiled]:
    """Return the compiled kernels that Python calls, with equal names next to each other."""
    from numba import types

    from ddlsim import numba_compiler

    found = []
    for dispatcher in numba_compiler.dispatchers():
        function, options = dispatcher.py_func, dispatcher.targetoptions
        for result in dispatcher.overloads.values() if function.__module__.startswith("ddlsim.") else ():
            if not any(isinstance(argument, types.Literal) for argument in result.signature.args):
                found.append(
                    _Compiled(
                        f"{function.__module__}.{function.__qualname__}",
                        addressed=options.get("nogil", False) and not options.get("no_cfunc_wrapper", False),
                        without_gil=options.get("nogil", False),
                        arguments=tuple(result.signature.args),
                        result=types.unliteral(result.signature.return_type),
                        description=result.fndesc,
                        library=result.library,
                    )
                )
    return sorted(found, key=lambda kernel: kernel.name)


def _is_tuple(kind: Any) -> bool:
    from numba import types

    return isinstance(kind, types.BaseTuple)


def _kinds(kind: Any, dtypes: list[str]) -> list[int]:
    """Return an argument's kinds in `precompiled.c`; the dtypes of arrays are added to `dtypes`."""
    from numba import types
    from numba.np import numpy_support

    if isinstance(kind, types.Array):
        if kind.layout != "C" or not kind.aligned:
            raise NotImplementedError(f"an argument that is {kind}")
        text = _dtype_text(numpy_support.as_dtype(kind.dtype))
        if text not in dtypes:
            dtypes.append(text)
        return [ARRAY, dtypes.index(text), kind.ndim, int(kind.mutable)]
    if _is_tuple(kind):
        return [TUPLE, len(kind), *(token for item in kind for token in _kinds(item, dtypes))]
    plain = {types.int64: INTEGER, types.float64: REAL, types.boolean: BOOLEAN}
    if kind not in plain:
        raise NotImplementedError(f"an argument that is {kind}")
    return [plain[kind]]


def _dtype_text(dtype: Any) -> str:
    """Return a Python literal of which NumPy makes the dtype."""
    if dtype.fields is None:
        return repr(dtype.str)
    fields = {
        "names": list(dtype.names),
        "formats": [dtype[name].str for name in dtype.names],
        "offsets": [dtype.fields[name][1] for name in dtype.names],
        "itemsize": dtype.itemsize,
    }
    return repr(fields | {"aligned": True} if dtype.isalignedstruct else fields)


def _members(result: Any) -> list[Any]:
    from numba import types

    return list(result) if _is_tuple(result) else [] if result == types.none else [result]


def _letters(result: Any) -> str:
    from numba import types

    return "".join({types.int64: "i", types.float64: "r", types.boolean: "b"}[member] for member in _members(result))


def _machine_code(kernel: _Compiled, number: int, machine: Any) -> bytes:
    """Return the object code of a kernel, with the functions through which `precompiled.c` and other code call it."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(str(kernel.library._final_module))
    module.link_in(llvm.parse_assembly(_callers(kernel, number)))
    for function in module.functions:
        if not (function.is_declaration or function.name.startswith("ddlsim_")):
            function.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()  # removes numba's own wrappers
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return bytes(machine.emit_object(module))


def _callers(kernel: _Compiled, number: int) -> str:
    """Return the LLVM code of ``ddlsim_call_<number>(words, results)``, and of ``ddlsim_address_<number>``."""
    from llvmlite import ir
    from numba import types
    from numba.core.registry import cpu_target
    from numba.np.arrayobj import populate_array

    context = cpu_target.target_context
    context.refresh()
    module = ir.Module(f"ddlsim_call_{number}")
    module.triple = str(kernel.library._final_module.triple)
    function = context.declare_function(module, kernel.description)
    word = ir.IntType(64)

    def call(builder: Any, values: list[Any]) -> tuple[Any, Any]:
        return context.call_conv.call_function(builder, function, kernel.result, kernel.arguments, values)  # type: ignore[no-any-return]

    wrapper = ir.Function(module, ir.FunctionType(ir.IntType(32), [word.as_pointer()] * 2), f"ddlsim_call_{number}")
    builder = ir.IRBuilder(wrapper.append_basic_block())
    words, results = wrapper.args
    at = 0

    def take() -> Any:
        nonlocal at
        at += 1
        return builder.load(builder.gep(words, [ir.Constant(ir.IntType(32), at - 1)]))

    def value(kind: Any) -> Any:
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder)
            pointer = builder.inttoptr(take(), array.data.type)
            shape = [take() for _ in range(kind.ndim)]
            itemsize = ir.Constant(word, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
            strides: list[Any] = []
            step = itemsize
            for size in reversed(shape):
                strides.insert(0, step)
                step = builder.mul(step, size)
            populate_array(array, pointer, shape, strides, itemsize, None)
            return array._getvalue()
        if _is_tuple(kind):
            return context.make_tuple(builder, kind, [value(item) for item in kind])
        if kind == types.float64:
            return builder.bitcast(take(), ir.DoubleType())
        if kind == types.boolean:
            return builder.trunc(take(), context.get_value_type(kind))
        return take()

    status, returned = call(builder, [value(kind) for kind in kernel.arguments])
    assert at <= MAX_WORDS
    members = _members(kernel.result)
    assert len(members) <= MAX_RESULTS
    for place, kind in enumerate(members):
        item = builder.extract_value(returned, place) if _is_tuple(kernel.result) else returned
        if kind == types.float64:
            item = builder.bitcast(item, word)
        elif kind == types.boolean:
            item = builder.zext(context.cast(builder, item, types.boolean, types.boolean), word)
        builder.store(item, builder.gep(results, [ir.Constant(ir.IntType(32), place)]))
    builder.ret(builder.zext(status.is_error, ir.IntType(32)))

    # as called by ddlsim.network.pointers: numba's values as arguments, and the result without a status
    kinds = [context.get_value_type(argument) for argument in kernel.arguments]
    returns = ir.VoidType() if kernel.result == types.none else context.get_value_type(kernel.result)
    if kernel.addressed:
        addressed = ir.Function(module, ir.FunctionType(returns, kinds), f"ddlsim_address_{number}")
        builder = ir.IRBuilder(addressed.append_basic_block())
        _, returned = call(builder, list(addressed.args))
        if kernel.result == types.none:
            builder.ret_void()
        else:
            builder.ret(returned)
    return str(module)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
