"""`Measurement`: one row of the table of measured times. The format is told in docs/formats/measurements.md."""

from __future__ import annotations

import functools
import math
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ddlsim.arguments.rules import TEXT
from ddlsim.collectives import KINDS
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.units import LARGEST, SMALLEST, in_range, parse

T = TypeVar("T")

#: experiment -> what it can time
OPERATIONS = {
    "point_to_point": ("one_way", "both_ways"),
    "collective": KINDS,
    "memory": ("reduction", "copy"),
    "step": ("training",),
}


def _number(dimension: str | None) -> BeforeValidator:
    """Return what turns a cell into a number: plain SI, or where there is a `dimension` text with a unit."""

    def read(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("is no number")
        if not isinstance(value, str):
            return value
        try:
            number = float(value)
        except ValueError:
            if dimension is None:
                raise ValueError("is no number") from None
            number = parse(value, dimension)
        return int(number) if number.is_integer() else number

    return BeforeValidator(read)


def _in_range(number: float) -> float:
    if not in_range(number):
        raise ValueError(f"must be from {SMALLEST:g} to {LARGEST:g}")
    return number


#: more of anything than these is a slip of the keyboard: bytes of a message, and ranks, hosts, repetitions, samples
MAX_NBYTES, MAX_COUNT = 10**18, 10**9

Seconds = Annotated[float, _number("time"), Field(gt=0, allow_inf_nan=False), AfterValidator(_in_range)]
Nbytes = Annotated[int, _number("bytes"), Field(ge=0, le=MAX_NBYTES)]
Count = Annotated[int, _number(None), Field(ge=0, le=MAX_COUNT)]
Some = Annotated[int, _number(None), Field(ge=1, le=MAX_COUNT)]


def _told(kind: type[T]) -> type[T]:
    """Let a row that makes no sense be a ConfigError of one line. (Readers of tables ask pydantic themselves.)"""
    checked_init = kind.__init__

    @functools.wraps(checked_init)
    def init(self: object, *args: object, **kwargs: object) -> None:
        try:
            checked_init(self, *args, **kwargs)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            place = "".join(f": {part}" for part in first["loc"])
            value = "" if cause and not place else f" = {shown(first['input'])}"
            rule = str(cause or first["msg"]).replace("Input should be", "must be")
            raise ConfigError(f"Measurement{place}{value}: {rule}") from None

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


Text = Annotated[str, Strict(), AfterValidator(lambda text: TEXT.keep(text, "text"))]


@_told
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Measurement:
    """One measured time. Everything after `median_s` may be left out where it does not apply or is not known.

    experiment, operation  a key of :data:`OPERATIONS` and one of its values
    n_ranks        ranks that took part (point_to_point: two for each pair that exchanged at the same time;
                   memory and step: that worked at the same time)
    n_hosts        machines that they were on: 1 is all on the same host
    median_s       s, median over the repetitions; a one-way message is half of a ping-pong
    nbytes         bytes of one message, or for a collective the buffer per rank as in
                   :func:`ddlsim.collective_time` (all-gather, gather, scatter: the whole buffer); 0 for a step
    min_s, p25_s, p75_s, max_s   s, the spread over the repetitions, None if it is not known
    n_repetitions  times that the median is over
    backend        what moved the bytes: "mpi", "gloo", "nccl", ... or "" for none
    dtype          type of the elements
    batch_size, model            samples per rank, and what was trained (step), else 0 and ""
    version        of ddlsim and of the backend
    note           anything else, one line

    Raises ConfigError for a row that makes no sense.
    """

    experiment: Text
    operation: Text
    n_ranks: Some
    n_hosts: Some
    median_s: Seconds
    nbytes: Nbytes = 0
    min_s: Seconds | None = None
    max_s: Seconds | None = None
    p25_s: Seconds | None = None
    p75_s: Seconds | None = None
    n_repetitions: Some = 1
    backend: Text = ""
    dtype: Text = "float32"
    batch_size: Count = 0
    model: Text = ""
    version: Text = ""
    note: Text = ""

    @property
    def bandwidth(self) -> float:
        """Bytes of the message or buffer per second of the median time, bytes/s."""
        return self.nbytes / self.median_s

    @property
    def n_pairs(self) -> int:
        """Pairs of ranks that exchanged at the same time (point_to_point only, else 0)."""
        return self.n_ranks // 2 if self.experiment == "point_to_point" else 0

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured, without what came out: rows with equal keys repeat each other."""
        where = (self.n_ranks, self.n_hosts, self.nbytes, self.backend, self.dtype)
        return (self.experiment, self.operation, *where, self.batch_size, self.model)

    @model_validator(mode="after")
    def _consistent(self) -> Measurement:
        if self.experiment not in OPERATIONS:
            raise unknown_name("experiment", self.experiment, OPERATIONS)
        known = OPERATIONS[self.experiment]
        if self.operation not in known:
            raise unknown_name(f"{self.experiment} operation", self.operation, known)
        self._check_size()
        self._check_ranks()
        low, high = -math.inf, math.inf
        for name in ("min_s", "p25_s", "median_s", "p75_s", "max_s"):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} = {value!r}: must be at least the quantile before it; sort the times")
            low = low if value is None else value
        return self

    def _check_size(self) -> None:
        if self.experiment == "step":
            if self.nbytes:
                raise ConfigError(f"nbytes = {self.nbytes}: a step has no message size; leave it out")
            if not self.batch_size or not self.model:
                missing = "model" if self.batch_size else "batch_size"
                raise ConfigError(f"{missing} is missing: a step time needs model and batch_size; add it")
        else:
            if not self.nbytes:
                raise ConfigError(f"nbytes is missing or 0: {self.experiment} needs a size; write it like '1 MB'")
            if self.batch_size or self.model:
                raise ConfigError("batch_size and model are for experiment = step; leave them out")

    def _check_ranks(self) -> None:
        if self.n_hosts > self.n_ranks:
            raise ConfigError(
                f"n_hosts = {self.n_hosts}: {self.n_ranks} ranks cannot be on more hosts than that; correct one"
            )
        if self.experiment == "point_to_point" and self.n_ranks % 2:
            raise ConfigError(f"n_ranks = {self.n_ranks}: point_to_point has two ranks for each pair; make it even")
        if self.experiment == "collective" and self.n_ranks < 2:
            raise ConfigError("n_ranks = 1: a collective needs at least 2 ranks; correct n_ranks")
