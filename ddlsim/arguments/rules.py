"""Rules for arguments: numbers, quantities with units, names, strings and paths."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddlsim.errors import ConfigError, listed, nearest, shown
from ddlsim.units import DIMENSIONS, LARGEST, SMALLEST, parse

#: of any integer that nothing else limits: what is counted must fit into memory, and into a lifetime
MOST = 10**9
MAX_TEXT = 10**6  # characters
MAX_PATH = 4096  # bytes


@dataclass(frozen=True)
class Rule:
    """A rule that validates an argument.

    text       description of valid values, for error messages
    takes      function that returns whether a value has the right type
    keep       function that takes a value and its name (for error messages), and returns the value to store (default:
               the value itself). It raises ConfigError if the value is invalid
    dimension  physical dimension of a quantity with units, a key of :data:`ddlsim.units.DIMENSIONS`; "": no units
    plural     description of several valid values, for messages about lists ("integers")
    words      the strings among the valid values, if they are a fixed choice
    """

    text: str
    takes: Callable[[object], bool]
    keep: Callable[[Any, str], object] = lambda value, _: value
    dimension: str = ""
    plural: str = ""
    words: tuple[str, ...] = ()

    def __call__(self, value: object, where: str) -> object:
        if not self.takes(value):
            raise wrong(value, where, self.text)
        return self.keep(value, where)


def wrong(value: object, where: str, text: str) -> ConfigError:
    call = f"; create an instance: {value.__name__}(...)" if isinstance(value, type) else ""
    return ConfigError(f"{where} = {shown(value)}: must be {text}{call}")


def validated_by(check: Callable[[Any, str], object]) -> Rule:
    """Return a rule that accepts all values for which `check` does not raise ConfigError.

    check  function that takes a value and its name (for error messages), and returns the value to store
    """
    return Rule("", lambda value: True, check)


def with_attributes(text: str, *attributes: str, plural: str = "") -> Rule:
    """Return a rule that accepts instances that have all of the given `attributes`, but not classes.

    text    description of valid values, for error messages
    plural  description of several valid values, for messages about lists
    """

    def takes(value: object) -> bool:
        return not isinstance(value, type) and all(hasattr(value, name) for name in attributes)

    return Rule(text, takes, plural=plural)


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


#: lowest value of an integer -> adjective for the message
_SIGNS: dict[int | None, str] = {0: "non-negative", 1: "positive"}


def integer(least: int | None = None, most: int = MOST) -> Rule:
    """Return a rule that accepts integers from `least` (None: no lower limit) to `most`, both inclusive."""
    if most < MOST:
        text, plural = f"an integer from {least} to {most}", f"integers from {least} to {most}"
    elif least in _SIGNS:
        text, plural = f"a {_SIGNS[least]} integer", f"{_SIGNS[least]} integers"
    elif least is not None:
        text, plural = f"an integer of at least {least}", f"integers of at least {least}"
    else:
        text, plural = "an integer", "integers"
    low = -MOST if least is None else least

    def keep(value: Any, where: str) -> int:
        kept = int(value)
        if low <= kept <= most:
            return kept
        raise wrong(value, where, text if kept < low or most < MOST else f"at most {most}")

    return Rule(text, _is_integer, keep, plural=plural)


@dataclass(frozen=True)
class _Interval:
    low: float
    high: float
    above: bool = False
    below: bool = False
    infinite: bool = False
    hint: str = ""

    def __str__(self) -> str:
        if math.isinf(self.high):
            least = f"at least {self.low:g}" if self.low or self.infinite else "not negative"
            start = f"above {self.low:g}" if self.above else least
            words = "finite" if math.isinf(self.low) else start if self.infinite else f"finite and {start}"
        elif self.above or self.below:
            words = f"{'above' if self.above else 'at least'} {self.low:g} and "
            words += f"{'below' if self.below else 'at most'} {self.high:g}"
        else:
            words = f"between {self.low:g} and {self.high:g}"
        return words + self.hint

    def of(self, noun: str) -> str:
        """Return the description of a number ("number") or of several ("numbers") in this interval."""
        if math.isinf(self.high):
            words = "" if self.infinite else "finite "
            if not math.isinf(self.low) and not self.low and not self.above:
                words = "non-negative " if self.infinite else "finite, non-negative "
                return f"{words}{noun}{self.hint}"
            bound = f" {'above' if self.above else 'of at least'} {self.low:g}"
            return f"{words}{noun}{'' if math.isinf(self.low) else bound}{self.hint}"
        return f"{noun} {'of ' if self.below and not self.above else ''}{self}"

    def problem(self, value: float) -> str:
        """Return what `value` must be, if it is not."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        if not over or not under or not (math.isfinite(value) or self.infinite):
            return str(self)
        if math.isfinite(value) and abs(value) > LARGEST:
            return f"at most {LARGEST:g} in magnitude"
        if self.low == 0.0 and self.above and value < SMALLEST:
            return f"at least {SMALLEST:g}, because the simulator divides by it"
        return ""


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan  # as wrong as it gets, also where infinite numbers are welcome


def number(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    infinite: bool = False,
    hint: str = "",
) -> Rule:
    """Return a rule that accepts finite numbers from `low` to `high`.

    above     exclude `low` itself
    below     exclude `high` itself
    infinite  also accept infinity
    hint      text appended to the description of valid values in error messages
    """
    interval = _Interval(low, high, above, below, infinite, hint)

    def keep(value: Any, where: str) -> float:
        problem = interval.problem(_float(value))
        if problem:
            raise wrong(value, where, problem)
        exact = isinstance(value, numbers.Integral) and abs(int(value)) <= 2**53
        return int(value) if exact else float(value)

    return Rule(f"a {interval.of('number')}", _is_number, keep, plural=interval.of("numbers"))


def quantity(
    dimension: str, example: str = "", *, zero: bool = False, infinite: bool = False, si: bool = False
) -> Rule:
    """Return a rule that accepts positive numbers in SI units, or strings with a unit of the given `dimension`.

    dimension  a key of :data:`ddlsim.units.DIMENSIONS`
    example    string that error messages show as an example, such as "10 Gbit/s"
    zero       also accept 0
    infinite   also accept infinity
    si         store the number in SI units, instead of the value as the caller passed it
    """
    example = example or DIMENSIONS[dimension][2]
    interval = _Interval(0.0, math.inf, above=not zero, infinite=infinite, hint=f", e.g. {example!r}")

    keep_number = number(infinite=True).keep

    def keep(value: Any, where: str) -> object:
        if infinite and isinstance(value, str) and value.strip().lower() in ("inf", "infinity"):
            value = math.inf
        problem = interval.problem(parse(value, dimension, where) if isinstance(value, str) else _float(value))
        if problem:
            raise wrong(value, where, problem)
        if isinstance(value, str):
            return parse(value, dimension, where) if si else value
        return float(value) if si else keep_number(value, where)

    return Rule(
        f"a number or a string like {example!r}",
        lambda v: isinstance(v, str) or _is_number(v),
        keep,
        dimension,
        f"numbers or strings like {example!r}",
    )


def one_of(*names: str, also: str = "") -> Rule:
    """Return a rule that accepts one of the strings in `names`.

    also  description of other accepted values, for error messages
    """
    if len(names) < 5:
        text = f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}".removeprefix(" or ")
    else:
        text = f"one of {listed(name for name in names if name)}"

    def keep(value: str, where: str) -> str:
        if value in names:
            return value
        hint = nearest(value, names)
        raise wrong(value, where, f"{also}{text}; did you mean {hint!r}?" if hint else also + text)

    return Rule(text, lambda value: isinstance(value, str), keep, words=names)


def _keep_text(value: str, where: str) -> str:
    if len(value) > MAX_TEXT:
        raise wrong(value, where, f"a string of at most {MAX_TEXT} characters")
    try:
        value.encode()
        writable = "\0" not in value
    except UnicodeEncodeError:
        writable = False
    if not writable:
        raise wrong(value, where, "a string without null characters and unpaired surrogates")
    return value


def _keep_path(value: Any, where: str) -> object:
    try:
        name = os.fsencode(value)
    except UnicodeEncodeError:
        name = b"\0"
    is_content = isinstance(value, str) and (value[:1] == "{" or "\n" in value)  # in place of a file's path
    if b"\0" in name or len(name) > (MAX_TEXT if is_content else MAX_PATH):
        raise wrong(value, where, f"a valid path of at most {MAX_PATH} bytes")
    return value


TEXT = Rule("a string", lambda value: isinstance(value, str), _keep_text, plural="strings")
PATH = Rule("a path", lambda value: isinstance(value, str | os.PathLike), _keep_path, plural="paths")
