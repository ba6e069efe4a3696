"""Calls between separately compiled entry points of the kernel, by address.

Inlining the kernel a second time would compile it a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ddlsim.network.state import Ints

_INTS = types.Array(types.int64, 1, "C")
_ADVANCE = (_INTS, types.float64)
_JOIN = (_INTS, _INTS, _INTS, types.float64)
_SEND = (_INTS, types.int64, types.int64, types.int64, types.int64, types.float64, types.float64)
_EXTENSION = (types.int64, types.int64, types.int64, types.float64)


#: arguments of the kernel's functions that are called by address
ARGUMENTS = {
    "advance": _ADVANCE,
    "join": _JOIN,
    "send_one": _SEND,
    "work_queues": _EXTENSION,
    "shape": _EXTENSION,
    "change": _EXTENSION,
    "replay_rounds": _EXTENSION,
}


_Generate: TypeAlias = Callable[[Any, Any, Any, Any], Any]


def _calling(returned: types.Type, arguments: tuple[types.Type, ...]) -> tuple[Any, _Generate]:
    """Return the signature of a call by address, and the generator of its code."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(argument) for argument in arguments]
        kind = ir.FunctionType(context.get_value_type(returned), kinds)
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value() if returned is types.none else result

    return returned(types.int64, *arguments), generate


def _advance(typing: Any, address: Any, table: Any, until: Any) -> Any:
    return _calling(types.int64, _ADVANCE)


def _join(typing: Any, address: Any, table: Any, instances: Any, ranks: Any, now: Any) -> Any:
    return _calling(types.none, _JOIN)


def _send(
    typing: Any, address: Any, table: Any, handle: Any, source: Any, target: Any, route: Any, nbytes: Any, now: Any
) -> Any:
    return _calling(types.none, _SEND)


if TYPE_CHECKING:

    def call_advance(address: int, table: Ints, until: float) -> int:
        """Call :func:`ddlsim.network.kernel.advance` at its address."""

    def call_join(address: int, table: Ints, instances: Ints, ranks: Ints, now: float) -> None:
        """Call :func:`ddlsim.network.kernel.join` at its address."""

    def call_send(
        address: int, table: Ints, handle: int, source: int, target: int, route: int, nbytes: float, now: float
    ) -> None:
        """Call :func:`ddlsim.network.kernel.send_one` at its address."""
else:
    call_advance = intrinsic(_advance)
    call_join = intrinsic(_join)
    call_send = intrinsic(_send)
