"""Compiled code's view of a :class:`~ddlsim.network.state.Net`: one pointer to a table of addresses and lengths.

If compiled functions took the arrays of a `Net` as arguments, each would have hundreds of them, and every function
would take much longer to compile. Instead, Python passes one :class:`~ddlsim.network.state.Table`, an entry point
copies it to its own stack (:func:`attach`), and the functions inlined into it receive a pointer. After inlining, LLVM
keeps the addresses in registers, because no other code can access that copy.

Each array is a :class:`Column`, an address and a length. An array of numba has seven fields, and each access checks
whether the index is negative. In a column, items are contiguous and indices count from 0, so there is less code to
compile and less to execute at each access. Entry points convert their other arrays to columns (:func:`column`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

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
    register_model,
    type_callable,
)
from numba.np import numpy_support

from ddlsim.network.build import empty_net
from ddlsim.network.state import Array, Floats, Ints, Net


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


def _made(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    empty = ir.Constant(context.get_value_type(kind), ir.Undefined)
    return builder.insert_value(builder.insert_value(empty, data, 0), size, 1)


@lower_builtin(operator.getitem, Column, types.Integer)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return context.unpack_value(builder, sig.args[0].item, _item(context, builder, sig, args))


@lower_builtin(operator.setitem, Column, types.Integer, types.Any)
def _setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    context.pack_value(builder, sig.args[0].item, args[2], _item(context, builder, sig, args))
    return context.get_dummy_value()


def _column(typing: Any, array: Any) -> Any:
    """Type and code of :func:`column`."""
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        return None
    kind = Column(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = context.make_array(array)(context, builder, arguments[0])
        return _made(context, builder, kind, source.data, source.nitems)

    return kind(array), generate


_NOTHING: Floats = np.zeros(0)
_ITEMS = {
    name: numpy_support.from_dtype(array.dtype)
    for name, array in empty_net(_NOTHING, _NOTHING, _NOTHING, _NOTHING)._asdict().items()
}
_PLACE = {name: place for place, name in enumerate(_ITEMS)}


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
        return _COLUMNS.get(name)


@lower_getattr_generic(_ViewType)
def _field(context: Any, builder: Any, kind: Any, view: Any, name: str) -> Any:
    place = ir.Constant(ir.IntType(32), _PLACE[name])
    entry = builder.gep(view, [_FIRST, _FIRST, place], inbounds=True)
    return builder.load(builder.bitcast(entry, context.get_value_type(_COLUMNS[name]).as_pointer()))


def _attach(typing: Any, table: Any) -> Any:
    """Type and code of :func:`attach`: copy a table to the stack, and return a pointer to the copy."""
    if not (isinstance(table, types.Array) and table.dtype == types.int64 and table.ndim == 1):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(table)(context, builder, arguments[0])
        source = builder.bitcast(array.data, _TABLE.as_pointer())
        view = cgutils.alloca_once(builder, _TABLE)
        builder.store(builder.load(source), view)
        return view

    return _VIEW(table), generate


def _attach_at(typing: Any, address: Any) -> Any:
    """As :func:`_attach`, for a table given by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = cgutils.alloca_once(builder, _TABLE)
        builder.store(builder.load(builder.inttoptr(arguments[0], _TABLE.as_pointer())), view)
        return view

    return _VIEW(types.int64), generate


def _view_at(typing: Any, address: Any) -> Any:
    """As :func:`_attach_at` without the copy, for code that is not inlined and cannot keep addresses in registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _TABLE.as_pointer())

    return _VIEW(types.int64), generate


def _call_extension(typing: Any, code: Any, net: Any, what: Any, argument: Any, limit: Any) -> Any:
    """Type and code of :func:`call_extension`."""
    kind = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD, ir.DoubleType()])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, view, *others = arguments
        table = builder.load(builder.gep(view, [_FIRST, _SECOND], inbounds=True))
        return builder.call(builder.inttoptr(code, kind.as_pointer()), [table, *others])

    return types.int64(types.int64, _VIEW, types.int64, types.int64, types.float64), generate


if TYPE_CHECKING:

    def attach(table: Ints) -> Net:
        """Return compiled code's view of the net with this table."""

    def column(array: Array) -> Array:
        """Return compiled code's view of a one-dimensional array."""

    def attach_at(address: int) -> Net:
        """Return compiled code's view of the net whose table is at this address."""

    def view_at(address: int) -> Net:
        """As :func:`attach_at`, without a copy of the table."""

    def call_extension(code: int, net: Net, what: int, argument: int, limit: float) -> int:
        """Call the kernel extension at the address `code` (:mod:`ddlsim.network.extensions`)."""
else:
    attach = intrinsic(_attach)
    attach_at = intrinsic(_attach_at)
    column = intrinsic(_column)
    view_at = intrinsic(_view_at)
    call_extension = intrinsic(_call_extension)
