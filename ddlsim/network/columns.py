"""Arrays as compiled code sees them through a view: an address and a length.

numba's own arrays have seven fields, and each access looks whether the place is negative, counted from the end. A
:class:`Column` has neither: items lie next to each other, places count from 0. There is less code to compile, and less
to do at each access.
"""

from __future__ import annotations

import operator
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import infer_getattr, lower_builtin, lower_getattr, register_model, type_callable


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
