"""Compiled code's view of a :class:`~ddlsim.network.state.Net`: one pointer to a table of addresses and lengths.

If compiled functions took the arrays of a `Net` as arguments, each would have hundreds of them, and every function
would take much longer to compile. Instead, Python passes one :class:`~ddlsim.network.state.Table`, an entry point
copies it to its own stack (:func:`attach`), and the functions inlined into it receive a pointer. After inlining, LLVM
keeps the addresses in registers, because no other code can access that copy.

Each array is a :class:`Column`, an address and a length. An array of numba has seven fields, and each access checks
whether the index is negative. In a column, items are contiguous and indices count from 0, so there is less code to
compile and less to execute at each access. Entry points convert their other arrays to columns (:func:`column`). The
numbers in ``Net.counts`` and ``Net.reals`` are attributes of the view itself.

Separately compiled entry points call each other by address (:func:`call_advance`): inlining the kernel a second time
would compile it a second time.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr,
    lower_getattr_generic,
    lower_setattr_generic,
    register_model,
    type_callable,
)
from numba.np import numpy_support

from ddlsim.network.build import empty_net
from ddlsim.network.state import Floats, Net, arrays_of


class Column(types.Type):  # type: ignore[misc,unused-ignore]
    """Numba type of a column of items of a numba type."""

    def __init__(self, item: Any) -> None:
        self.item = item
        super().__init__(name=f"ddlsim.network.Column({item})")


@register_model(Column)
class _ColumnModel(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("data", types.CPointer(kind.item)), ("size", types.intp)])


@infer_getattr
class _ColumnAttributes(AttributeTemplate):
    key = Column

    def resolve_size(self, kind: Any) -> Any:
        return types.intp


@lower_getattr(Column, "size")
def _size(context: Any, builder: Any, kind: Any, column: Any) -> Any:
    return builder.extract_value(column, 1)


@type_callable(operator.getitem)
def _type_getitem(context: Any) -> Any:
    def typer(column: Any, index: Any) -> Any:
        if isinstance(column, Column) and isinstance(index, types.Integer):
            return column.item
        return None

    return typer


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        column, index, _ = args
        if isinstance(column, Column) and isinstance(index, types.Integer):
            return signature(types.none, column, types.unliteral(index), column.item)
        return None


def _item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    index = context.cast(builder, args[1], sig.args[1], types.intp)
    return builder.gep(builder.extract_value(args[0], 0), [index], inbounds=True)


def _column_of(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    empty = ir.Constant(context.get_value_type(kind), ir.Undefined)
    return builder.insert_value(builder.insert_value(empty, data, 0), size, 1)


@lower_builtin(operator.getitem, Column, types.Integer)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return context.unpack_value(builder, sig.args[0].item, _item(context, builder, sig, args))


@lower_builtin(operator.setitem, Column, types.Integer, types.Any)
def _setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    context.pack_value(builder, sig.args[0].item, args[2], _item(context, builder, sig, args))
    return context.get_dummy_value()


@intrinsic
def column(typing: Any, array: Any) -> Any:
    """Return compiled code's view of a one-dimensional array."""
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        return None
    kind = Column(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = context.make_array(array)(context, builder, arguments[0])
        return _column_of(context, builder, kind, source.data, source.nitems)

    return kind(array), generate


_NOTHING: Floats = np.zeros(0)
_NET = empty_net(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
_ITEMS = dict(zip(Net._fields, (numpy_support.from_dtype(array.dtype) for array in arrays_of(_NET)), strict=True))
_PLACE = {name: place for place, name in enumerate(_ITEMS)}
#: number -> the column that contains it, and its place there
_NUMBERS = {
    number: (name, place)
    for name, numbers in (("counts", _NET.counts), ("reals", _NET.reals))
    for number, place in numbers.places.items()
}


class _ViewType(types.Type):
    """Numba type of the pointer to a table."""

    def __init__(self) -> None:
        super().__init__(name="ddlsim.network.View")


_VIEW = _ViewType()
_WORD = ir.IntType(64)
_ENTRY = ir.LiteralStructType([ir.IntType(8).as_pointer(), _WORD])  # address, length
_TABLE = ir.LiteralStructType([ir.ArrayType(_ENTRY, len(_ITEMS)), _WORD])  # columns, address of the table
_FIRST, _SECOND = ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), 1)


@register_model(_ViewType)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _TABLE.as_pointer())


_COLUMNS = {name: Column(item) for name, item in _ITEMS.items()}


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = _ViewType

    def generic_resolve(self, kind: Any, name: str) -> Any:  # type: ignore[override,unused-ignore]
        return _ITEMS[_NUMBERS[name][0]] if name in _NUMBERS else _COLUMNS.get(name)


def _loaded(context: Any, builder: Any, view: Any, name: str) -> Any:
    """Return a column of a view."""
    place = ir.Constant(ir.IntType(32), _PLACE[name])
    entry = builder.gep(view, [_FIRST, _FIRST, place], inbounds=True)
    return builder.load(builder.bitcast(entry, context.get_value_type(_COLUMNS[name]).as_pointer()))


def _number(context: Any, builder: Any, view: Any, name: str) -> Any:
    """Return the type of a number, and a pointer to it."""
    column, place = _NUMBERS[name]
    data = builder.extract_value(_loaded(context, builder, view, column), 0)
    return _ITEMS[column], builder.gep(data, [ir.Constant(_WORD, place)], inbounds=True)


@lower_getattr_generic(_ViewType)
def _get(context: Any, builder: Any, kind: Any, view: Any, name: str) -> Any:
    if name in _NUMBERS:
        return context.unpack_value(builder, *_number(context, builder, view, name))
    return _loaded(context, builder, view, name)


@lower_setattr_generic(_ViewType)
def _set(context: Any, builder: Any, sig: Any, args: Any, name: str) -> None:
    kind, pointer = _number(context, builder, args[0], name)
    context.pack_value(builder, kind, args[1], pointer)


@intrinsic
def attach(typing: Any, table: Any) -> Any:
    """Return compiled code's view of the net with this table: a pointer to a copy of the table on the stack."""
    if not (isinstance(table, types.Array) and table.dtype == types.int64 and table.ndim == 1):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(table)(context, builder, arguments[0])
        return _copied(builder, builder.bitcast(array.data, _TABLE.as_pointer()))

    return _VIEW(table), generate


def _copied(builder: Any, source: Any) -> Any:
    view = cgutils.alloca_once(builder, _TABLE)
    builder.store(builder.load(source), view)
    return view


@intrinsic
def attach_at(typing: Any, address: Any) -> Any:
    """As :func:`attach`, for a table given by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _copied(builder, builder.inttoptr(arguments[0], _TABLE.as_pointer()))

    return _VIEW(types.int64), generate


@intrinsic
def view_at(typing: Any, address: Any) -> Any:
    """As :func:`attach_at` without the copy, for code that is not inlined and cannot keep addresses in registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _TABLE.as_pointer())

    return _VIEW(types.int64), generate


@intrinsic
def call_extension(typing: Any, code: Any, net: Any, what: Any, argument: Any, limit: Any) -> Any:
    """Call the kernel extension at the address `code` (:mod:`ddlsim.network.extensions`)."""
    kind = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD, ir.DoubleType()])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, view, *others = arguments
        table = builder.load(builder.gep(view, [_FIRST, _SECOND], inbounds=True))
        return builder.call(builder.inttoptr(code, kind.as_pointer()), [table, *others])

    return types.int64(types.int64, _VIEW, types.int64, types.int64, types.float64), generate


_INTS = types.Array(types.int64, 1, "C")
_EXTENSION = (types.int64, types.int64, types.int64, types.float64)
#: arguments of the kernel's functions that are called by address
ARGUMENTS = {
    "advance": (_INTS, types.float64),
    "join": (_INTS, _INTS, _INTS, types.float64),
    "send_one": (_INTS, types.int64, types.int64, types.int64, types.int64, types.float64, types.float64),
    **dict.fromkeys(("work_queues", "shape", "change", "replay_rounds"), _EXTENSION),
}


def _calling(name: str, returned: types.Type) -> Any:
    """Return the signature of a call of an entry point by its address, and the generator of its code."""
    arguments = ARGUMENTS[name]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(argument) for argument in arguments]
        kind = ir.FunctionType(context.get_value_type(returned), kinds)
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value() if returned is types.none else result

    return returned(types.int64, *arguments), generate


@intrinsic
def call_advance(typing: Any, address: Any, table: Any, until: Any) -> Any:
    """Call :func:`ddlsim.network.kernel.advance` at its address."""
    return _calling("advance", types.int64)


@intrinsic
def call_join(typing: Any, address: Any, table: Any, instances: Any, ranks: Any, now: Any) -> Any:
    """Call :func:`ddlsim.network.kernel.join` at its address."""
    return _calling("join", types.none)


@intrinsic
def call_send(
    typing: Any, address: Any, table: Any, handle: Any, source: Any, target: Any, route: Any, nbytes: Any, now: Any
) -> Any:
    """Call :func:`ddlsim.network.kernel.send_one` at its address."""
    return _calling("send_one", types.none)
