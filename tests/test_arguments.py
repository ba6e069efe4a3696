"""The layer that every public argument passes: what is welcome, what is kept, what is said."""

import dataclasses
import inspect
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from ddlsim.arguments import (
    Bytes,
    Count,
    Density,
    Duration,
    Index,
    NotNegative,
    Positive,
    Share,
    checked,
    integer,
    number,
    one_of,
    quantity,
    validated_by,
)
from ddlsim.arguments.annotations import alternatives, rule_of
from ddlsim.errors import ConfigError, UnitError, nearest, shown


class Speaks(Protocol):
    name: str

    def speak(self) -> str: ...


@dataclass(frozen=True)
class Dog:
    name: str = "dog"

    def speak(self) -> str:
        return "wuff"


@checked
@dataclass(frozen=True)
class Part:
    """A part."""

    size: Count
    share: Share = 0.5
    time: Duration = "1 ms"
    label: str = ""
    on: bool = True


@checked
def function(first: Count, *rest: Index, flag: bool = False, **more: Positive) -> tuple[object, ...]:
    """A function."""
    return first, rest, flag, more


def kept(annotation, value):
    return rule_of(annotation)(value, "x")


def refused(annotation, value):
    with pytest.raises(ConfigError) as caught:
        kept(annotation, value)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


# ---------------------------------------------------------------- what is welcome


@pytest.mark.parametrize(
    ("annotation", "given", "wanted"),
    [
        (int, 3, 3),
        (int, np.int32(3), 3),
        (float, 3, 3),
        (float, np.float32(0.5), 0.5),
        (float, Fraction(1, 2), 0.5),
        (bool, np.True_, True),
        (str, "a", "a"),
        (int | None, None, None),
        (float | int, np.int64(2), 2),
        (float | str, "2 s", "2 s"),
        (tuple[int, ...], [1, np.int64(2)], (1, 2)),
        (Sequence[float], np.array([0.5, 1.5]), (0.5, 1.5)),
        (Iterable[int], iter([1, 2]), (1, 2)),
        (list[int], (1, 2), [1, 2]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Mapping[str, Count], {"a": np.int8(1)}, {"a": 1}),
        (Literal["a", "b"], "a", "a"),
        (Bytes, "25 MiB", "25 MiB"),
        (Bytes, 1, 1),
        (Density, 1.0, 1.0),
        (Annotated[float, number(0.0, infinite=True)], math.inf, math.inf),
        (Annotated[float | str, quantity("time", infinite=True)], "inf", math.inf),
        (Annotated[float | str, quantity("bytes", infinite=True, si=True)], " Infinity", math.inf),
        (Path | str, Path("a"), Path("a")),
        (int | Sequence[int], 4, 4),
        (int | Sequence[int], range(3), (0, 1, 2)),
    ],
)
def test_what_is_kept_is_plain_python(annotation, given, wanted):
    result = kept(annotation, given)
    assert result == wanted
    assert type(result) is type(wanted)


def test_arrays_are_converted_only_where_they_must_be():
    same = np.arange(3)
    assert kept(npt.NDArray[np.int64], same) is same
    assert kept(npt.NDArray[np.float64], [1, 2]).dtype == np.float64
    assert "must be an array of integers" in refused(npt.NDArray[np.int64], [1.5])
    assert "must be an array of numbers" in refused(npt.NDArray[np.float64], ["a"])


WRONG = [
    (int, True, "must be an integer"),
    (int, 2.0, "x = 2.0: must be an integer"),
    (int, 10**29, "x = 100000000000000000000000000000: must be at most 1000000000"),
    (int, 10**5000, "x = 10**5000 approximately: must be at most 1000000000"),
    (Count, 0, "x = 0: must be a positive integer"),
    (Annotated[int, integer(1, 4)], 5, "must be an integer from 1 to 4"),
    (float, True, "must be a finite number"),
    (float, math.nan, "x = nan: must be finite"),
    (float, 10**5000, "must be finite"),
    (float, 1e101, "must be at most 1e+100 in magnitude"),
    (float, 1j, "must be a finite number"),
    (Positive, 1e-320, "must be at least 1e-100"),
    (NotNegative, -1, "x = -1: must be finite and not negative"),
    (bool, "no", "x = 'no': must be True or False"),
    (bool, 1, "x = 1: must be True or False"),
    (str, b"a", "must be a string"),
    (str, "\ud800", "must be a string without null characters and unpaired surrogates"),
    (str | Path, "a\0b", "must be a valid path of at most"),
    (int | None, "a", "x = 'a': must be an integer or None"),
    (Duration, "2 GB", "x: '2 GB' is a size, not a time"),
    (Duration, "0 s", "x = '0 s': must be finite and above 0, e.g. '1 ms'"),
    (Duration, "1e-320 s", "'1e-320 s'"),
    (Duration, None, "x = None: must be a number or a string like '1 ms'"),
    (tuple[Count, ...], [1, 0], "x[1] = 0: must be a positive integer"),
    (tuple[int, ...], "12", "x = '12': must be a list"),
    (tuple[int, ...], {1, 2}, "x = {1, 2}: must be a list"),
    (tuple[int, int], [1], "x = [1]: must be a list of 2"),
    (Sequence[int], 3, "must be a list"),
    (Sequence[int], np.array(3), "array(3): must be a list, or an array with at least one dimension"),
    (Mapping[str, int], {"a": None}, "x['a'] = None: must be an integer"),
    (Mapping[str, int], {1: 2}, "x: key = 1: must be a string"),
    (Literal["ring", "tree"], "rign", "x = 'rign': must be 'ring' or 'tree'; did you mean 'ring'?"),
    (Annotated[str, one_of("a", "b", also="3 or ")], "c", "must be 3 or 'a' or 'b'"),
    (Speaks, Dog, "must be an object with the attributes name and speak"),
    (Speaks, 3, "must be an object with the attributes name and speak"),
    (Annotated[Dog, "a dog such as Dog('rex')"], "cat", "x = 'cat': must be a dog such as Dog('rex')"),
    (Dog, "cat", "must be a Dog"),
]


@pytest.mark.parametrize(("annotation", "given", "rule"), WRONG, ids=[rule for _, _, rule in WRONG])
def test_what_is_wrong_is_said_in_one_line(annotation, given, rule):
    assert rule in refused(annotation, given)


def test_sequences_without_end_are_refused(monkeypatch):
    monkeypatch.setattr("ddlsim.arguments.annotations.MAX_LENGTH", 100)

    def forever():
        while True:
            yield 1

    assert "has more than 100 entries, or is infinite" in refused(Iterable[int], forever())


def test_a_function_looks_at_what_the_type_lets_through():
    def even(value, where):
        if value % 2:
            raise ConfigError(f"{where} = {value}: must be even")
        return value // 2

    assert kept(Annotated[int, even], 4) == 2
    assert "must be even" in refused(Annotated[int, even], 3)
    assert "must be an integer" in refused(Annotated[int, even], "3")
    assert kept(Annotated["Nowhere", validated_by(even)], 4) == 2  # noqa: F821  (the rule stands for the type)


def test_units_are_checked_and_texts_kept():
    with pytest.raises(UnitError):
        kept(Annotated[float | str, quantity("bandwidth")], "3")


# ---------------------------------------------------------------- functions and classes


def test_functions_check_all_kinds_of_parameters():
    assert function(np.int64(1), 2, 3, flag=np.True_, x=1) == (1, (2, 3), True, {"x": 1})
    with pytest.raises(ConfigError, match=r"^function: rest\[1\] = -1: must be"):
        function(1, 2, -1)
    with pytest.raises(ConfigError, match=r"^function: x = 0: must be"):
        function(1, x=0)
    with pytest.raises(
        ConfigError, match="function: missing a required argument: 'first'; valid arguments: first, rest"
    ):
        function()


def test_classes_check_when_they_are_made_and_when_they_are_changed():
    part = Part(np.int64(3), time="2 ms")
    assert part == Part(3, time="2 ms")
    assert type(part.size) is int
    with pytest.raises(ConfigError, match=r"^Part: size = 0: must be a positive integer$"):
        dataclasses.replace(part, size=0)
    with pytest.raises(ConfigError, match=r"^Part: unknown argument 'labell'; did you mean 'label'\?$"):
        Part(1, labell="a")
    with pytest.raises(ConfigError, match=r"^Part: too many positional arguments"):
        Part(1, 0.5, "1 s", "", True, None)


def test_a_class_that_inherits_is_checked_under_its_own_name():
    class Own(Part):
        pass

    with pytest.raises(ConfigError, match=r"^Own: size = 0"):
        Own(0)


def test_what_is_decorated_stays_what_it_was():
    assert pickle.loads(pickle.dumps(Part(3))) == Part(3)
    assert pickle.loads(pickle.dumps(function)) is function
    assert Part.__doc__ == "A part."
    assert list(inspect.signature(Part).parameters) == ["size", "share", "time", "label", "on"]
    assert function.__doc__ == "A function."
    assert list(inspect.signature(function).parameters) == ["first", "rest", "flag", "more"]


def test_alternatives_are_the_types_without_what_narrows_them():
    assert alternatives(Count | Annotated[str, one_of("a")] | None) == [int, str, type(None)]
    assert alternatives(tuple[Positive, ...]) == [tuple[float, ...]]
    assert alternatives(Literal["a"]) == [str]


# ---------------------------------------------------------------- words


class Strange:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "make",
    [
        lambda: 10**5000,
        lambda: [10**5000] * 99,
        lambda: "x" * 10**6,
        lambda: np.zeros((9, 9)),
        Strange,
        lambda: "\u202eabc",
        lambda: {"a": {"b": [1] * 99}},
    ],
)
def test_values_are_shown_short_and_printable(make):
    text = shown(make())
    assert len(text) <= 200
    assert text.isprintable()


@pytest.mark.parametrize(
    ("written", "known", "meant"),
    [
        ("async", ["k-async", "k-batch-async", "async-parameter-server"], "async-parameter-server"),
        ("rign", ["ring", "tree"], "ring"),
        ("Local_SGD", ["local-sgd", "k-sync"], "local-sgd"),
        ("parameter", ["parameter-server", "async-parameter-server"], "parameter-server"),
        ("server", ["ring", "parameter-server"], "parameter-server"),
        ("NVIDIA H100 80GB HBM3", ["a100-80g", "h100", "h100-pcie"], "h100"),
        ("NVIDIA H100 PCIe", ["a100-80g", "h100", "h100-pcie"], "h100-pcie"),
        ("h100-96g", ["h100", "h100-96g-500w"], "h100-96g-500w"),
        ("h100-80g", ["a100-80g", "h100", "h100-pcie"], "h100"),
        ("xyz", ["ring"], ""),
        ("", ["ring"], ""),
    ],
)
def test_the_name_that_was_meant(written, known, meant):
    assert nearest(written, known) == meant
