"""One entrance for arguments: an annotation says what is welcome, :func:`checked` sees to it.

>>> from dataclasses import dataclass
>>> from ddlsim.arguments import Count, checked
>>> @checked
... @dataclass(frozen=True)
... class Window:
...     size: Count
>>> Window(0)
Traceback (most recent call last):
    ...
ddlsim.errors.ConfigError: Window: size = 0: must be a whole number of at least 1

The annotations of functions and of constructors are read once, at the first call. Plain types are checked as they
stand (a ``float`` must be finite, a ``bool`` is no number, numpy's numbers are welcome and become Python's), unions,
tuples, sequences, mappings, arrays and protocols with what is in them. ``Annotated`` narrows a type:

- a :class:`Rule`, such as ``whole(1)``, takes the type's place (which is for mypy only, then);
- a text says what is welcome in the place of the words made from the type;
- a function ``(value, where) -> value`` looks at what the type's own rule has let through.

Relations between arguments stay in ``__post_init__``. Texts with units are kept as they are written.
"""

from typing import Annotated

from ddlsim.arguments.checking import checked as checked
from ddlsim.arguments.checking import takes_fields_of as takes_fields_of
from ddlsim.arguments.rules import (
    Rule as Rule,
    by as by,
    having as having,
    number as number,
    one_of as one_of,
    quantity as quantity,
    whole as whole,
)

Count = Annotated[int, whole(1)]
Index = Annotated[int, whole(0)]
#: of random streams
Seed = Annotated[int, whole(0, 2**64 - 1)]
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
