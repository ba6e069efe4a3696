"""Validation of arguments: annotations declare what is accepted, and :func:`checked` enforces it.

>>> from dataclasses import dataclass
>>> from ddlsim.arguments import Count, checked
>>> @checked
... @dataclass(frozen=True)
... class Window:
...     size: Count
>>> Window(0)
Traceback (most recent call last):
    ...
ddlsim.errors.ConfigError: Window: size = 0: must be a positive integer

Annotations of functions and constructors are read once, at the first call. Plain types are checked as they are: a
``float`` must be finite, a ``bool`` is not a number, and numpy's numbers are accepted and converted to Python's.
Unions, tuples, sequences, mappings, arrays and protocols are checked with their contents. ``Annotated`` narrows a type:

- a :class:`Rule`, such as ``integer(1)``, replaces the check of the type (which is then for mypy only);
- a string replaces the description of the type in messages; a second one is its plural, for messages about lists;
- a function ``(value, where) -> value`` checks values that have passed the rule of the type.

Constraints between arguments are checked in ``__post_init__``. Strings with units are stored unchanged.
"""

from typing import Annotated

from ddlsim.arguments.annotations import several as several
from ddlsim.arguments.checking import (
    checked as checked,
    settings as settings,
    takes_fields_of as takes_fields_of,
)
from ddlsim.arguments.rules import (
    Rule as Rule,
    validated_by as validated_by,
    with_attributes as with_attributes,
    number as number,
    one_of as one_of,
    quantity as quantity,
    integer as integer,
)

Count = Annotated[int, integer(1)]
Index = Annotated[int, integer(0)]
#: of random streams
Seed = Annotated[int, integer(0, 2**64 - 1)]
Positive = Annotated[float, number(0.0, above=True)]
NotNegative = Annotated[float, number(0.0)]
#: of a whole
Share = Annotated[float, number(0.0, 1.0)]
Density = Annotated[float, number(0.0, 1.0, above=True, hint=" (0.01 is 1 %)")]
#: of something that is multiplied with it again and again
Decay = Annotated[float, number(0.0, 1.0, below=True)]
Duration = Annotated[float | str, quantity("time", "1 ms")]
Bytes = Annotated[float | str, quantity("bytes", "25 MiB")]
Bandwidth = Annotated[float | str, quantity("bandwidth")]
