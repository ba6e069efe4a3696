"""What can be asked of a laboratory: collectives by name, messages, a parameter server. All are schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.collectives import Schedule, build
from ddlsim.collectives.all_gather import ring as exchange
from ddlsim.collectives.broadcast import binomial
from ddlsim.collectives.combine import on_ranks
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.measure.table import OPERATIONS
from ddlsim.network import schedule_time

#: commas that are not inside parentheses, as in hierarchical(ring, ring)
_COMMA = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True)
class Operation:
    """An operation of the table of measurements, and what does it.

    experiment, operation  as in :class:`~ddlsim.measure.Measurement`
    algorithm  of a collective: a name, or "package.module:function"; "" for a message; "parameter_server"
    n_servers  for a parameter server: machines that hold the sum, the last ones; else 0
    """

    label: str
    experiment: str
    operation: str
    algorithm: str = ""
    n_servers: int = 0

    @property
    def factor(self) -> int:
        """Size of the schedule's buffer over that of the table: an exchange needs one half for each direction."""
        return 2 if self.operation == "both_ways" else 1


def parse_operations(text: str) -> list[Operation]:
    """Return the operations of a list like "all_reduce:ring, point_to_point:one_way, parameter_server:2".

    Raises :class:`ConfigError` for what is not known. (A collective's algorithm is looked up by
    :func:`schedule_of`.)
    """
    words = [word.strip() for word in _COMMA.split(text) if word.strip()]
    if not words:
        raise ConfigError(f"--operations {text!r}: is empty; write it like all_reduce:ring,parameter_server")
    return [_parsed(word) for word in words]


def _parsed(word: str) -> Operation:
    kind, _, detail = word.partition(":")
    if kind == "parameter_server":
        if detail and not (detail.isascii() and detail.isdigit() and int(detail) > 0):
            raise ConfigError(f"--operations {word}: {detail!r} is no number of servers; write parameter_server:2")
        return Operation(word, "collective", "all_reduce", kind, int(detail or 1))
    if kind == "point_to_point":
        if detail not in OPERATIONS[kind]:
            raise unknown_name("point_to_point operation", detail, OPERATIONS[kind], f"--operations {word}")
        return Operation(word, kind, detail)
    if kind not in OPERATIONS["collective"]:
        known = (*OPERATIONS["collective"], "point_to_point", "parameter_server")
        raise unknown_name("operation", kind, known, f"--operations {word}")
    if not detail:
        raise ConfigError(f"--operations {word}: needs an algorithm, like {kind}:ring (see: ddlsim algorithms)")
    return Operation(word, "collective", kind, detail)


def schedule_of(operation: Operation, n_ranks: int, nbytes: int) -> Schedule:
    """Return the schedule that does `operation` on `n_ranks` machines, proved if it is a user's own.

    Raises :class:`ConfigError` for an unknown algorithm, or one that is not for so many ranks.
    """
    if operation.experiment == "point_to_point":
        pair = binomial(2) if operation.operation == "one_way" else exchange(2)
        return on_ranks(pair, np.arange(2), n_ranks)
    if operation.n_servers:
        if operation.n_servers >= n_ranks:
            raise ConfigError(
                f"--operations {operation.label}: {n_ranks} machines are too few for {operation.n_servers} servers and "
                "a worker; use fewer servers"
            )
        return push_pull(n_ranks - operation.n_servers, operation.n_servers)
    return build(operation.algorithm, n_ranks, nbytes, list(range(n_ranks)), operation.operation)


def predicted(cluster: Cluster, schedule: Schedule, nbytes: int) -> float:
    """Return the s that ddlsim predicts for `schedule` on the workers of `cluster`."""
    return schedule_time(cluster, schedule, cluster.workers.tolist(), float(nbytes))
