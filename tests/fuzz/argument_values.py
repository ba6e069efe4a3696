"""What people give by mistake in the place of an argument."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np


def numbers_without_end():
    n = 0
    while True:
        yield n
        n += 1


class Strange:
    """Its repr fails, and it is equal to nothing."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")

    __hash__ = object.__hash__


#: a name -> what makes the value anew
VALUES = {
    "None": lambda: None,
    "True": lambda: True,
    "np.False_": lambda: np.False_,
    "empty text": lambda: "",
    "no": lambda: "no",
    "nan as text": lambda: "nan",
    "text with unit": lambda: "12 parsecs",
    "right unit, absurd": lambda: "1e-320 s",
    "bidi": lambda: "\u202egnir\u202c",
    "zero byte": lambda: "a\0b",
    "half a surrogate": lambda: "\ud800",
    "new line": lambda: "a\nb",
    "huge text": lambda: "x" * 10**6,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "10**12": lambda: 10**12,
    "10**29": lambda: 10**29,
    "10**5000": lambda: 10**5000,
    "-10**5000": lambda: -(10**5000),
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "1e-320": lambda: 1e-320,
    "1e308": lambda: 1e308,
    "-0.5": lambda: -0.5,
    "complex": lambda: 1 + 2j,
    "Decimal": lambda: Decimal("0.5"),
    "Decimal nan": lambda: Decimal("nan"),
    "Fraction": lambda: Fraction(1, 3),
    "np.float64 nan": lambda: np.float64(np.nan),
    "np.int64 -1": lambda: np.int64(-1),
    "np.float32": lambda: np.float32(0.3),
    "array 0-d": lambda: np.array(3),
    "array (0,)": lambda: np.zeros(0),
    "array (2, 3)": lambda: np.zeros((2, 3)),
    "array of nan": lambda: np.full(4, np.nan),
    "array of objects": lambda: np.array([None, "a"], dtype=object),
    "array of dates": lambda: np.array(["2024-01-01"], dtype="datetime64[D]"),
    "[]": list,
    "[None]": lambda: [None],
    "[nan, -1]": lambda: [math.nan, -1],
    "[[], [1]]": lambda: [[], [1]],
    "list with itself": lambda: _recursive(),
    "()": lambda: (),
    "{}": dict,
    "wrong keys": lambda: {1: None, "nope": [10**5000]},
    "set": lambda: {1, 2},
    "object": object,
    "strange": Strange,
    "a class": lambda: dict,
    "a class of ours": lambda: _ours(),
    "a function": lambda: lambda *args, **more: None,
    "a function without arguments": lambda: lambda: 1,
    "bytes": lambda: b"ring",
    "Path": lambda: Path("no/such/thing"),
    "folder": lambda: Path("."),
    "generator without end": numbers_without_end,
    "empty generator": lambda: iter(()),
    "module": lambda: math,
    "Ellipsis": lambda: ...,
}
#: never right, whatever the argument is
NEVER = (
    "nan", "-inf", "-1", "-0.5", "np.int64 -1", "np.float64 nan", "10**29", "10**5000", "-10**5000", "complex",
    "Decimal nan", "zero byte", "half a surrogate", "array of nan", "[nan, -1]", "array of objects", "array of dates",
    "list with itself", "1e308", "bytes", "Ellipsis", "module",
)  # fmt: skip


def _recursive():
    items = []
    items.append(items)
    return items


def _ours():
    import ddlsim

    return ddlsim.AllReduce
