"""`Measurement`: one row of the table of measured times (docs/formats/measurements.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from ddlsim.arguments import Rule, checked, integer, number
from ddlsim.collectives import KINDS
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.units import parse

#: experiment -> its operations
OPERATIONS = {
    "point_to_point": ("one_way", "both_ways"),
    "collective": KINDS,
    "memory": ("reduction", "copy"),
    "step": ("training",),
}


def _cell(rule: Rule, dimension: str = "") -> Rule:
    """Return a rule that also accepts strings: numbers, or quantities if there is a `dimension`; integers stay so."""

    def keep(value: Any, where: str) -> object:
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                if not dimension:
                    raise ConfigError(f"{where} = {shown(value)}: must be {rule.text}") from None
                number = parse(value, dimension, where)
            value = int(number) if number.is_integer() else number
        return rule(value, where)

    return Rule(rule.text, lambda value: isinstance(value, str) or rule.takes(value), keep)


#: limits above which values are typing errors: bytes of a message, and ranks, hosts, repetitions, samples
MAX_NBYTES, MAX_COUNT = 10**18, 10**9

Seconds = Annotated[float, _cell(number(0.0, above=True, hint=", like 0.0012 or '1.2 ms'"), "time")]
Nbytes = Annotated[int, _cell(integer(0, MAX_NBYTES), "bytes")]
Count = Annotated[int, _cell(integer(0, MAX_COUNT))]
Some = Annotated[int, _cell(integer(1, MAX_COUNT))]


@checked
@dataclass(frozen=True)
class Measurement:
    """A measured time. Fields after `median_s` are optional.

    experiment     kind of measurement: "point_to_point", "collective", "memory" or "step", a key of :data:`OPERATIONS`
    operation      one of the operations that :data:`OPERATIONS` lists for this kind
    n_ranks        number of participating ranks. For point_to_point, this is two per concurrent pair; for memory and
                   step, it is the number of concurrent ranks
    n_hosts        number of machines; 1: all ranks on the same machine
    median_s       median over the repetitions, in s; for a one-way message, half the time of a ping-pong
    nbytes         size in bytes of one message or, for a collective, of the buffer on each rank, as in
                   :func:`ddlsim.collective_time` (for all-gather, gather and scatter, the full buffer); 0 for a step
    min_s, p25_s, p75_s, max_s
                   minimum, quartiles and maximum over the repetitions, in s; None: unknown
    n_repetitions  number of repetitions
    backend        library that moved the bytes: "mpi", "gloo", "nccl", ...; "": none
    dtype          type of the elements
    batch_size     samples per rank, for a step; otherwise 0
    model          name of the trained model, for a step; otherwise ""
    version        versions of ddlsim and of the backend
    note           any other remark, on one line

    Raises ConfigError if the fields contradict each other.
    """

    experiment: str
    operation: str
    n_ranks: Some
    n_hosts: Some
    median_s: Seconds
    nbytes: Nbytes = 0
    min_s: Seconds | None = None
    max_s: Seconds | None = None
    p25_s: Seconds | None = None
    p75_s: Seconds | None = None
    n_repetitions: Some = 1
    backend: str = ""
    dtype: str = "float32"
    batch_size: Count = 0
    model: str = ""
    version: str = ""
    note: str = ""

    @property
    def bandwidth(self) -> float:
        """Size of the message or buffer divided by the median time, in bytes/s."""
        return self.nbytes / self.median_s

    @property
    def n_pairs(self) -> int:
        """Number of pairs of ranks that exchanged messages at the same time, for point_to_point; otherwise 0."""
        return self.n_ranks // 2 if self.experiment == "point_to_point" else 0

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify what was measured, without the times: rows with equal keys are repetitions."""
        where = self.n_ranks, self.n_hosts, self.nbytes
        return (self.experiment, self.operation, *where, self.backend, self.dtype, self.batch_size, self.model)

    def __post_init__(self) -> None:
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
                raise ConfigError(f"{name} = {value!r}: must be at least the previous quantile; sort the times")
            low = low if value is None else value

    def _check_size(self) -> None:
        if self.experiment == "step":
            if self.nbytes:
                raise ConfigError(f"nbytes = {self.nbytes}: a step has no message size; leave nbytes out")
            if not self.batch_size or not self.model:
                missing = "model" if self.batch_size else "batch_size"
                raise ConfigError(f"{missing} is missing; a step requires model and batch_size")
        else:
            if not self.nbytes:
                raise ConfigError(f"nbytes is missing or 0; {self.experiment} requires a size, such as '1 MB'")
            if self.batch_size or self.model:
                raise ConfigError("batch_size and model apply only to experiment = step; leave them out")

    def _check_ranks(self) -> None:
        if self.n_hosts > self.n_ranks:
            n_ranks = self.n_ranks
            raise ConfigError(f"n_hosts = {self.n_hosts}: must be at most n_ranks = {n_ranks}; correct one of them")
        if self.experiment == "point_to_point" and self.n_ranks % 2:
            raise ConfigError(f"n_ranks = {self.n_ranks}: must be even, because point_to_point has two ranks per pair")
        if self.experiment == "collective" and self.n_ranks < 2:
            raise ConfigError("n_ranks = 1: a collective requires at least 2 ranks")
