"""Kernels compiled by numba as position-independent machine code that Python calls (:mod:`ddlsim.machine_code`).

LLVM's optimised code of a kernel gets a function with the signature of Python's fast calls. It compares the arguments
with the types for which the kernel was compiled, and calls `self` with arguments of other types. LLVM then writes an
object file for Linux on x86-64, whose sections are placed in one image. Only addresses in Python and the C library are
set when the image is loaded.

The code computes the same bits as code that numba compiles for itself. On any processor, LLVM neither reorders sums nor
contracts products and sums unless requested; fused operations are explicit calls of ``llvm.fma`` in the sources.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.np import numpy_support
from numba.np.arrayobj import populate_array

_WORD, _INT, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_OBJECT = _BYTE.as_pointer()
_NULL = ir.Constant(_OBJECT, None)
#: offsets in PyObject and in PyArrayObject_fields (numpy/ndarraytypes.h), the same in NumPy 1 and 2
_TYPE, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = 8, 16, 24, 32, 56, 64
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x0001, 0x0100, 0x0400
_EQUAL = 2  # Py_EQ
_SCALARS = {
    types.int64: ("builtins:int", "numpy:int64"),
    types.float64: ("builtins:float", "numpy:float64"),
    types.boolean: ("builtins:bool", "numpy:bool_"),
}


class NoImageError(NotImplementedError):
    """Arguments, results or code of a kernel are not supported."""


def is_supported(kind: Any) -> bool:
    """Return whether arguments of a type can be passed."""
    if isinstance(kind, types.BaseTuple):
        return type(kind) in (types.Tuple, types.UniTuple) and all(map(is_supported, _items(kind)))
    return kind in _SCALARS or (isinstance(kind, types.Array) and kind.layout == "C" and kind.aligned)


def _items(kind: Any) -> list[Any]:
    """Return the types of a tuple's items."""
    return list(kind)


def linked(name: str, compiled: Any, machine: Any, context: Any, *, addressed: bool) -> bytes:
    """Return a header in JSON, a newline and the image of a function that numba has compiled to optimised LLVM code.

    Raises NoImageError if it is not supported.
    """
    module = compiled.library._final_module
    caller = _Caller(context, compiled)
    caller.write()
    if addressed:
        caller.write_addressed()
    module.link_in(llvm.parse_assembly(str(caller.module)))
    for defined in (*module.functions, *module.global_variables):
        if not defined.is_declaration and defined.name not in ("ddlsim_call", "ddlsim_address"):
            defined.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    placed = _Image(bytes(machine.emit_object(module)))
    header = {
        "name": name,
        "call": placed.symbols["ddlsim_call"],
        "address": placed.symbols.get("ddlsim_address"),
        "relative": placed.relative,
        "imports": placed.imports,
    }
    return json.dumps(header).encode() + b"\n" + bytes(placed.content)


def target_machine(processor: str, features: str) -> Any:
    """Return LLVM's generator of position-independent code for a processor."""
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=processor, features=features, opt=3, reloc="pic", codemodel="small")


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


class _Caller:
    """Writes LLVM functions that call a kernel."""

    def __init__(self, context: Any, compiled: Any) -> None:
        self.context = context
        self.arguments = tuple(compiled.signature.args)
        self.result = types.unliteral(compiled.signature.return_type)
        self.module = ir.Module("ddlsim_call")
        self.module.triple = str(compiled.library._final_module.triple)
        self.kernel = context.declare_function(self.module, compiled.fndesc)

    def _python(self, result: Any, name: str, *arguments: Any) -> Any:
        """Call a function of Python's C API."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(self.module, kind, name)
        return self.builder.call(function, arguments)

    def _constant(self, name: str) -> Any:
        """Return the address of a Python object."""
        variable = self.module.globals.get(name)
        return ir.GlobalVariable(self.module, _BYTE, name) if variable is None else variable

    def _field(self, thing: Any, offset: int, kind: Any) -> Any:
        place = self.builder.gep(thing, [ir.Constant(_WORD, offset)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()))

    def _require(self, condition: Any) -> None:
        """Continue only if the condition holds; otherwise call `self`."""
        following = self.builder.append_basic_block()
        self.builder.cbranch(condition, following, self.mismatch)
        self.builder.position_at_end(following)

    def _require_type(self, thing: Any, *names: str) -> None:
        kind = self._field(thing, _TYPE, _OBJECT)
        first, *others = (self.builder.icmp_unsigned("==", kind, self._constant(name)) for name in names)
        for other in others:
            first = self.builder.or_(first, other)
        self._require(first)

    def _require_number(self, number: Any, wanted: int) -> None:
        self._require(self.builder.icmp_signed("==", number, ir.Constant(number.type, wanted)))

    def _unpacked(self, thing: Any, kind: Any) -> Any:
        """Return numba's value of a Python object."""
        if isinstance(kind, types.Array):
            return self._array(thing, kind)
        if isinstance(kind, types.BaseTuple):
            self._require_type(thing, "builtins:tuple")
            self._require_number(self._python(_WORD, "PyTuple_Size", thing), len(kind))
            items = [self._python(_OBJECT, "PyTuple_GetItem", thing, ir.Constant(_WORD, i)) for i in range(len(kind))]
            return self.context.make_tuple(self.builder, kind, list(map(self._unpacked, items, _items(kind))))
        self._require_type(thing, *_SCALARS[kind])
        if kind == types.float64:
            return self._python(ir.DoubleType(), "PyFloat_AsDouble", thing)
        if kind == types.boolean:
            return self.builder.trunc(self._python(_INT, "PyObject_IsTrue", thing), self.context.get_value_type(kind))
        number = self._python(_WORD, "PyLong_AsLongLong", thing)
        with self.builder.if_then(self.builder.icmp_signed("==", number, ir.Constant(_WORD, -1)), likely=False):
            error = self._python(_OBJECT, "PyErr_Occurred")
            self._python(ir.VoidType(), "PyErr_Clear")
            self._require(self.builder.icmp_unsigned("==", error, _NULL))
        return number

    def _array(self, thing: Any, kind: Any) -> Any:
        self._require_type(thing, "numpy:ndarray")
        self._require_number(self._field(thing, _NDIM, _INT), kind.ndim)
        flags = _C_CONTIGUOUS | _ALIGNED | (_WRITEABLE if kind.mutable else 0)
        self._require_number(self.builder.and_(self._field(thing, _FLAGS, _INT), ir.Constant(_INT, flags)), flags)
        dtype = self._constant(f"dtype:{_dtype_text(numpy_support.as_dtype(kind.dtype))}")
        array_dtype = self._field(thing, _DTYPE, _OBJECT)
        with self.builder.if_then(self.builder.icmp_unsigned("!=", array_dtype, dtype), likely=False):
            equal = self._python(_INT, "PyObject_RichCompareBool", array_dtype, dtype, ir.Constant(_INT, _EQUAL))
            self._python(ir.VoidType(), "PyErr_Clear")
            self._require_number(equal, 1)
        array = self.context.make_array(kind)(self.context, self.builder)
        data = self.builder.bitcast(self._field(thing, _DATA, _OBJECT), array.data.type)
        sizes = self._field(thing, _SHAPE, _WORD.as_pointer())
        shape = [self.builder.load(self.builder.gep(sizes, [ir.Constant(_INT, i)])) for i in range(kind.ndim)]
        itemsize = ir.Constant(_WORD, self.context.get_abi_sizeof(self.context.get_data_type(kind.dtype)))
        strides: list[Any] = []
        step = itemsize
        for size in reversed(shape):
            strides.insert(0, step)
            step = self.builder.mul(step, size)
        populate_array(array, data, shape, strides, itemsize, None)
        return array._getvalue()

    def _packed(self, value: Any, kind: Any) -> Any:
        """Return a new Python object with a numba value."""
        if isinstance(kind, types.BaseTuple):
            sequence = self._python(_OBJECT, "PyTuple_New", ir.Constant(_WORD, len(kind)))
            for i, item in enumerate(_items(kind)):
                packed = self._packed(self.builder.extract_value(value, i), item)
                self._python(_INT, "PyTuple_SetItem", sequence, ir.Constant(_WORD, i), packed)
            return sequence
        if kind == types.none:
            nothing = self._constant("_Py_NoneStruct")
            self._python(ir.VoidType(), "Py_IncRef", nothing)
            return nothing
        if kind == types.float64:
            return self._python(_OBJECT, "PyFloat_FromDouble", value)
        if kind == types.boolean:
            return self._python(_OBJECT, "PyBool_FromLong", self.builder.zext(value, _WORD))
        if kind != types.int64:
            raise NoImageError(f"a result that is {kind}")
        return self._python(_OBJECT, "PyLong_FromLongLong", value)

    def _call(self, values: Sequence[Any]) -> tuple[Any, Any]:
        convention = self.context.call_conv
        called: tuple[Any, Any] = convention.call_function(
            self.builder, self.kernel, self.result, self.arguments, values
        )
        return called

    def write(self) -> None:
        """Write ``ddlsim_call(self, args, n)``, a function as Python's METH_FASTCALL requires."""
        function = ir.Function(
            self.module, ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), _WORD]), "ddlsim_call"
        )
        python_function, args, n = function.args
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.mismatch = function.append_basic_block("mismatch")
        self._require_number(n, len(self.arguments))
        values = []
        for i, kind in enumerate(self.arguments):
            thing = self.builder.load(self.builder.gep(args, [ir.Constant(_INT, i)]))
            values.append(self._unpacked(thing, kind))
        state = self._python(_OBJECT, "PyEval_SaveThread")
        status, returned = self._call(values)
        self._python(ir.VoidType(), "PyEval_RestoreThread", state)
        with self.builder.if_then(status.is_error, likely=False):
            text = self._constant("builtins:RuntimeError")
            self._python(ir.VoidType(), "PyErr_SetNone", text)
            self.builder.ret(_NULL)
        self.builder.ret(self._packed(returned, self.result))
        self.builder.position_at_end(self.mismatch)
        self.builder.ret(self._python(_OBJECT, "PyObject_Vectorcall", python_function, args, n, _NULL))

    def write_addressed(self) -> None:
        """Write ``ddlsim_address``, called by :mod:`ddlsim.network.view`: numba's values, and no status."""
        kinds = [self.context.get_value_type(argument) for argument in self.arguments]
        returns = ir.VoidType() if self.result == types.none else self.context.get_value_type(self.result)
        function = ir.Function(self.module, ir.FunctionType(returns, kinds), "ddlsim_address")
        self.builder = ir.IRBuilder(function.append_basic_block())
        _, returned = self._call(function.args)
        if self.result == types.none:
            self.builder.ret_void()
        else:
            self.builder.ret(returned)


#: relocations of ELF on x86-64
_ABSOLUTE, _PC_RELATIVE, _CALL, _GOT = 1, 2, 4, (9, 41, 42)
_ALLOCATED, _NO_BITS, _RELOCATIONS, _SYMBOLS = 2, 8, 4, 2
_JUMP = b"\xff\x25"  # jmp *[rip + offset]


class _Image:
    """An object file whose sections follow each other, with a word for each address that is used indirectly.

    symbols   name -> offset in the image
    relative  [offset of a word, offset in the image whose address it must contain], ...
    imports   [offset of a word, name of the symbol whose address it must contain], ...
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.content = bytearray()
        self.symbols: dict[str, int] = {}
        self.relative: list[tuple[int, int]] = []
        self.imports: list[tuple[int, str]] = []
        self._words: dict[int | str, int] = {}
        self._stubs: dict[str, int] = {}
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        texts = sections[names][4]
        starts = {}
        for i, (name, kind, flags, _, offset, nbytes, _, _, align, _) in enumerate(sections):
            if flags & _ALLOCATED and self._text(texts + name) != ".eh_frame":
                starts[i] = self._append(bytes(nbytes) if kind == _NO_BITS else data[offset : offset + nbytes], align)
        for _, kind, _, _, offset, nbytes, link, _, _, _ in sections:
            if kind == _SYMBOLS:
                self._places = self._read_symbols(offset, nbytes, sections[link][4], starts)
        for _, kind, _, _, offset, nbytes, _, section, _, _ in sections:
            if kind == _RELOCATIONS and section in starts:
                for at in range(offset, offset + nbytes, 24):
                    place, info, addend = struct.unpack_from("<QQq", data, at)
                    self._relocate(starts[section] + place, info & 0xFFFFFFFF, self._places[info >> 32], addend)

    def _text(self, start: int) -> str:
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _append(self, data: bytes, align: int) -> int:
        self.content.extend(bytes(-len(self.content) % max(align, 1)))
        self.content.extend(data)
        return len(self.content) - len(data)

    def _read_symbols(self, offset: int, nbytes: int, texts: int, starts: dict[int, int]) -> list[int | str]:
        """Return the offset of each symbol in the image, or its name if it is elsewhere."""
        places: list[int | str] = []
        for at in range(offset, offset + nbytes, 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self._data, at)
            text = self._text(texts + name)
            places.append(starts[section] + value if section in starts else text)
            if section in starts:
                self.symbols[text] = starts[section] + value
        return places

    def _word(self, target: int | str) -> int:
        """Return the offset of a word with an address."""
        if target not in self._words:
            self._words[target] = self._append(bytes(8), 8)
            self._set(self._words[target], target)
        return self._words[target]

    def _set(self, word: int, target: int | str) -> None:
        if isinstance(target, str):
            self.imports.append((word, target))
        else:
            self.relative.append((word, target))

    def _stub(self, name: str) -> int:
        """Return the offset of a jump to a function elsewhere."""
        if name not in self._stubs:
            word = self._word(name)
            place = self._append(bytes(8), 8)
            self.content[place : place + 6] = _JUMP + struct.pack("<i", word - place - 6)
            self._stubs[name] = place
        return self._stubs[name]

    def _relocate(self, place: int, kind: int, target: int | str, addend: int) -> None:
        if kind == _ABSOLUTE and isinstance(target, int):
            self._set(place, target + addend)
            return
        if kind == _ABSOLUTE and not addend:
            self._set(place, target)
            return
        if kind in _GOT:
            target = self._word(target)
        elif kind == _CALL and isinstance(target, str):
            target = self._stub(target)
        if kind not in (_PC_RELATIVE, _CALL, *_GOT) or isinstance(target, str):
            raise NoImageError(f"relocation {kind} of {target}")
        struct.pack_into("<i", self.content, place, target + addend - place)
