"""Tiles of SIMD vectors of eight numbers for compiled code, where numba's automatic vectorisation is not enough.

A kernel that keeps sums in registers, as matrix libraries do, needs vectors as values. A tile is a tuple of vectors:
rows times columns, row by row. `rows` and `columns` are tuples of integers, whose lengths are part of their types, so
that kernels are compiled for each size of tile. The functions here operate on tiles, inside ``@njit`` functions only.
Arrays are flat and contiguous, indices count elements and are not checked. Each operation on a vector becomes one or
two instructions on machines with 256-bit vectors (float32), and is lowered to the available instructions on others.
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


def _pointer(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.gep(data, [index], inbounds=True)


def _load(context, builder, kind, array, index):
    pointer = _pointer(context, builder, kind, array, index)
    vector = context.get_value_type(_Vector(kind.dtype))
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=kind.dtype.bitwidth // 8)


def _splat(context, builder, kind, array, index):
    scalar = builder.load(_pointer(context, builder, kind, array, index))
    wide = ir.Constant(ir.VectorType(scalar.type, WIDTH), ir.Undefined)
    wide = builder.insert_element(wide, scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(wide, wide, mask)


def _fma(builder, a, b, c):
    name = f"llvm.fma.v{WIDTH}f{64 if isinstance(a.type.element, ir.DoubleType) else 32}"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), (a, b, c))


def _maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _blend_equal(builder, a, b, c, d):
    return builder.select(builder.fcmp_ordered("==", a, b), c, d)


def _total(builder, vector):
    """Return the sum of the eight elements, added pairwise."""
    width = WIDTH
    while width > 1:
        half = width // 2
        index = ir.VectorType(ir.IntType(32), half)
        low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half, width))))
        vector, width = builder.fadd(low, high), half
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _items(builder, tile):
    return cgutils.unpack_tuple(builder, tile, tile.type.count)


def _steps(builder, at, step, count):
    """Return at + i * step for `count` values of i."""
    return [builder.add(at, builder.mul(step, step.type(i))) for i in range(count)]


def _operation(function: Callable[..., object]) -> Callable[..., Any]:
    """Register a typing function as an operation; tiles exist only in compiled code, so they have no Python type."""
    return intrinsic(function)


def _elementwise(operate, *tiles):
    """Return the type and the code of an operation on tiles, vector by vector; a tile of one vector fits all others."""
    kind = max(tiles, key=lambda tile: tile.count)

    def generate(context, builder, signature, args):
        parts = [_items(builder, tile) * (kind.count // tile.type.count) for tile in args]
        return context.make_tuple(builder, kind, [operate(builder, *items) for items in zip(*parts, strict=True)])

    return kind(*tiles), generate


@_operation
def fma(typing_context, a, b, c):
    """fma(a, b, c): a * b + c, rounded once."""
    return _elementwise(_fma, a, b, c)


@_operation
def add(typing_context, a, b):
    """add(a, b): a + b."""
    return _elementwise(ir.IRBuilder.fadd, a, b)


@_operation
def maximum(typing_context, a, b):
    """maximum(a, b): the larger of each pair; b if they cannot be compared."""
    return _elementwise(_maximum, a, b)


@_operation
def blend_equal(typing_context, a, b, c, d):
    """blend_equal(a, b, c, d): c where a == b, otherwise d."""
    return _elementwise(_blend_equal, a, b, c, d)


def _column(read, array, rows):
    """Return the type and the code of an operation that makes a tile of one column from an array's elements."""
    kind = types.UniTuple(_Vector(array.dtype), rows.count)

    def generate(context, builder, signature, args):
        at = [builder.add(args[1], row) for row in _items(builder, args[2])]
        return context.make_tuple(builder, kind, [read(context, builder, array, args[0], offset) for offset in at])

    return kind(array, types.intp, rows), generate


@_operation
def load(typing_context, array, index, rows):
    """load(array, i, rows): the elements i + row .. i + row + 7, for each row."""
    return _column(_load, array, rows)


@_operation
def splat(typing_context, array, index, rows):
    """splat(array, i, rows): copies of element i + row, for each row."""
    return _column(_splat, array, rows)


@_operation
def zeros(typing_context, array, rows, columns):
    """zeros(array, rows, columns): a tile of zeros of the array's type."""
    kind = types.UniTuple(_Vector(array.dtype), rows.count * columns.count)

    def generate(context, builder, signature, args):
        return cgutils.get_null_value(context.get_value_type(kind))

    return kind(array, rows, columns), generate


@_operation
def numbers(typing_context, rows):
    """numbers(rows): 0, 1, ... for each row, as constants of the code."""

    def generate(context, builder, signature, args):
        constants = [context.get_constant(rows.dtype, i) for i in range(rows.count)]
        return context.make_tuple(builder, rows, constants)

    return rows(rows), generate


@_operation
def limited(typing_context, rows, last, step):
    """limited(rows, last, step): min(row, last) * step for each row."""

    def generate(context, builder, signature, args):
        tile, last, step = args
        below = [(row, builder.icmp_signed("<", row, last)) for row in _items(builder, tile)]
        offsets = [builder.mul(builder.select(is_below, row, last), step) for row, is_below in below]
        return context.make_tuple(builder, rows, offsets)

    return rows(rows, types.intp, types.intp), generate


def _products(read, tile, array, rows, vectors):
    """Return the type and the code of an operation that adds products of an array's elements and vectors to a tile."""

    def generate(context, builder, signature, args):
        sums, columns, totals = _items(builder, args[0]), _items(builder, args[4]), list[Any]()
        for row in _items(builder, args[3]):
            factor = read(context, builder, array, args[1], builder.add(args[2], row))
            totals += [_fma(builder, factor, column, sums[len(totals) + j]) for j, column in enumerate(columns)]
        return context.make_tuple(builder, tile, totals)

    return tile(tile, array, types.intp, rows, vectors), generate


@_operation
def add_products(typing_context, tile, array, index, rows, vectors):
    """add_products(tile, array, i, rows, vectors): add the vector at i + row times a vector to each row and column."""
    return _products(_load, tile, array, rows, vectors)


@_operation
def add_multiples(typing_context, tile, array, index, rows, vectors):
    """add_multiples(tile, array, i, rows, vectors): add element i + row times a vector to each row and column."""
    return _products(_splat, tile, array, rows, vectors)


@_operation
def store(typing_context, tile, array, index, step, n_rows, columns):
    """store(tile, array, i, step, n, columns): write rows 0 .. n - 1, `step` apart, to the elements from
    i + column on."""

    def generate(context, builder, signature, args):
        vectors, columns = iter(_items(builder, args[0])), _items(builder, args[5])
        for i, at in enumerate(_steps(builder, args[2], args[3], tile.count // len(columns))):
            with builder.if_then(builder.icmp_signed(">", args[4], args[4].type(i)), likely=True):
                for column in columns:
                    vector = next(vectors)
                    pointer = _pointer(context, builder, array, args[1], builder.add(at, column))
                    pointer = builder.bitcast(pointer, vector.type.as_pointer())
                    builder.store(vector, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(tile, array, types.intp, types.intp, types.intp, columns), generate


@_operation
def add_totals(typing_context, tile, array, index, row_step, n_rows, column_step, n_columns, columns):
    """add_totals(tile, array, i, row_step, n_rows, column_step, n_columns, columns): add the total of each vector to an
    element, only for the first `n_rows` and `n_columns`."""

    def generate(context, builder, signature, args):
        vectors = iter(_items(builder, args[0]))
        for i, at in enumerate(_steps(builder, args[2], args[3], tile.count // columns.count)):
            for j, element in enumerate(_steps(builder, at, args[5], columns.count)):
                vector = next(vectors)
                used = [builder.icmp_signed(">", n, n.type(k)) for n, k in ((args[4], i), (args[6], j))]
                with builder.if_then(builder.and_(*used), likely=True):
                    pointer = _pointer(context, builder, array, args[1], element)
                    builder.store(builder.fadd(builder.load(pointer), _total(builder, vector)), pointer)
        return context.get_dummy_value()

    return types.void(tile, array, *[types.intp] * 5, columns), generate
