"""SIMD vectors of eight numbers for compiled code, where numba's automatic vectorisation is not enough.

A kernel that keeps a tile of sums in registers, as matrix libraries do, needs vectors as values. The
functions here operate on such values, inside ``@njit`` functions only. Arrays are flat and
contiguous, indices count elements and are not checked. Each operation becomes one or two instructions on machines with
256-bit vectors (float32), and is lowered to the available instructions on others.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ddlsim.nn.vectors import WIDTH


class _Vector(types.Type):
    """The numba type of eight numbers of one float type."""

    def __init__(self, dtype) -> None:
        self.dtype = dtype
        super().__init__(name=f"vector{WIDTH}({dtype})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    """Stored in a vector register, or in two if it is too wide for one."""

    def __init__(self, manager, kind) -> None:
        scalar = ir.DoubleType() if kind.dtype == types.float64 else ir.FloatType()
        super().__init__(manager, kind, ir.VectorType(scalar, WIDTH))


def _operation(function: Callable[..., object]) -> Callable[..., Any]:
    """Register a typing function as an operation; vectors exist only in compiled code, so they have no Python type."""
    return intrinsic(function)


def _pointer(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.gep(data, [index], inbounds=True)


def _broadcast(builder, scalar):
    wide = ir.Constant(ir.VectorType(scalar.type, WIDTH), ir.Undefined)
    wide = builder.insert_element(wide, scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(wide, wide, mask)


@_operation
def load(typing_context, array, index):
    """load(array, i): the elements i .. i + 7."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, args[0], args[1])
        vector = context.get_value_type(signature.return_type)
        size = 8 if kind.dtype == types.float64 else 4
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=size)

    return _Vector(array.dtype)(array, types.intp), generate


@_operation
def store(typing_context, array, index, vector):
    """store(array, i, v): write v to the elements i .. i + 7."""

    def generate(context, builder, signature, args):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, args[0], args[1])
        size = 8 if kind.dtype == types.float64 else 4
        builder.store(args[2], builder.bitcast(pointer, args[2].type.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@_operation
def splat(typing_context, array, index):
    """splat(array, i): a vector of eight copies of element i."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return _broadcast(builder, builder.load(pointer))

    return _Vector(array.dtype)(array, types.intp), generate


@_operation
def zeros(typing_context, array):
    """zeros(array): eight zeros of the array's type."""

    def generate(context, builder, signature, args):
        return cgutils.get_null_value(context.get_value_type(signature.return_type))

    return _Vector(array.dtype)(array), generate


@_operation
def fma(typing_context, a, b, c):
    """fma(a, b, c): a * b + c, rounded once."""

    def generate(context, builder, signature, args):
        kind = args[0].type
        name = f"llvm.fma.v{WIDTH}f{64 if isinstance(kind.element, ir.DoubleType) else 32}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind, kind]), name)
        return builder.call(function, args)

    return a(a, b, c), generate


@_operation
def add(typing_context, a, b):
    """add(a, b): a + b."""

    def generate(context, builder, signature, args):
        return builder.fadd(*args)

    return a(a, b), generate


@_operation
def maximum(typing_context, a, b):
    """maximum(a, b): the larger of each pair; b if they cannot be compared."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, b), generate


@_operation
def blend_equal(typing_context, a, b, c, d):
    """blend_equal(a, b, c, d): c where a == b, otherwise d."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("==", args[0], args[1]), args[2], args[3])

    return a(a, b, c, d), generate


@_operation
def total(typing_context, a):
    """total(a): the sum of the eight elements, added pairwise."""

    def generate(context, builder, signature, args):
        vector, width = args[0], WIDTH
        while width > 1:
            half = width // 2
            index = ir.VectorType(ir.IntType(32), half)
            low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half))))
            high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half, width))))
            vector, width = builder.fadd(low, high), half
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return a.dtype(a), generate
