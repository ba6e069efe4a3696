"""Compiled code's view of a :class:`~ddlsim.network.state.Net`: one pointer to a table of addresses and lengths.

Compiled functions that took the forty arrays of a `Net` would take hundreds of arguments, and compiling each of them
would cost as much as a page of code. So Python hands over one :class:`~ddlsim.network.state.Table`, an entry point
copies it to its own stack (:func:`attach`), and what it calls, all of it inlined, gets a pointer. After inlining, LLVM
keeps the addresses in registers, because no other code can see that copy.

Each array is a :class:`Column`, an address and a length. numba's own arrays have seven fields, and each access looks
whether the place is negative, counted from the end. A column has neither: items lie next to each other, places count
from 0. There is less code to compile, and less to do at each access.
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
from ddlsim.network.state import Floats, Ints, Net


class Column(types.Type):  # type: ignore[misc,unused-ignore]
    """The numba type of such an array, of items of a numba type."""

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
    return cgutils.create_struct_proxy(kind)(context, builder, column).size


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
    column = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    index = context.cast(builder, args[1], sig.args[1], types.intp)
    return builder.gep(column.data, [index], inbounds=True)


@lower_builtin(operator.getitem, Column, types.Integer)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return context.unpack_value(builder, sig.args[0].item, _item(context, builder, sig, args))


@lower_builtin(operator.setitem, Column, types.Integer, types.Any)
def _setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    context.pack_value(builder, sig.args[0].item, args[2], _item(context, builder, sig, args))
    return context.get_dummy_value()


_NOTHING: Floats = np.zeros(0)
_ITEMS = {
    name: numpy_support.from_dtype(array.dtype)
    for name, array in empty_net(_NOTHING, _NOTHING, _NOTHING, _NOTHING)._asdict().items()
}
_PLACE = {name: place for place, name in enumerate(_ITEMS)}


class _ViewType(types.Type):
    """The numba type of the pointer."""

    def __init__(self) -> None:
        super().__init__(name="ddlsim.network.View")


_VIEW = _ViewType()
_WORD = ir.IntType(64)
_ENTRY = ir.LiteralStructType([ir.IntType(8).as_pointer(), _WORD])  # address, length
_ENTRIES = ir.ArrayType(_ENTRY, len(_ITEMS))


@register_model(_ViewType)
class _ViewModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _ENTRIES.as_pointer())


_COLUMNS = {name: Column(item) for name, item in _ITEMS.items()}


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = _ViewType

    def generic_resolve(self, kind: Any, name: str) -> Any:  # type: ignore[override,unused-ignore]
        return _COLUMNS.get(name)


@lower_getattr_generic(_ViewType)
def _field(context: Any, builder: Any, kind: Any, view: Any, name: str) -> Any:
    """Return the column of a field."""
    place = ir.Constant(ir.IntType(32), _PLACE[name])
    zero, one = ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), 1)
    column = cgutils.create_struct_proxy(_COLUMNS[name])(context, builder)
    address = builder.load(builder.gep(view, [zero, place, zero], inbounds=True))
    column.data = builder.bitcast(address, column.data.type)
    column.size = builder.load(builder.gep(view, [zero, place, one], inbounds=True))
    return column._getvalue()


def _attach(typing: Any, table: Any) -> Any:
    """Return the pointer through which compiled code reaches the arrays of a :class:`~ddlsim.network.state.Table`."""
    if not (isinstance(table, types.Array) and table.dtype == types.int64 and table.ndim == 1):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(table)(context, builder, arguments[0])
        source = builder.bitcast(array.data, _ENTRIES.as_pointer())
        view = cgutils.alloca_once(builder, _ENTRIES)
        builder.store(builder.load(source), view)
        return view

    return _VIEW(table), generate


if TYPE_CHECKING:

    def attach(table: Ints) -> Net:
        """Return what compiled code sees of the net whose table this is."""
else:
    attach = intrinsic(_attach)
