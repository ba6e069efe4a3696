"""Choice of the measurements to which links are fitted, and of the algorithm of collectives if none is named.

Transports are fitted separately: iperf3 measures TCP, NCCL RDMA or NVLink, MPI inside a host shared memory, and no
single latency and bandwidth explains two of them. A cluster file has one kind of link, so the transport that runs use
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.readable import percent
from ddlsim.validation.calibration_text import shown
from ddlsim.validation.cases import candidates, make_case
from ddlsim.validation.links import LinkRow, fit_links
from ddlsim.validation.noise import fit_noise, minus_log_likelihood

#: backend -> transport; others have their own, and rows without one go with any
TRANSPORTS = {"icmp": "tcp", "gloo": "tcp", "numpy": ""}
#: which transport counts, where several were measured
PREFERRED = ("nccl", "mpi", "tcp")
#: rows of a collective that tell algorithms apart: choosing takes a fit per algorithm
MOST_ROWS = 16
#: mean error of the measurements fitted to from which on a fit is called bad: three times what is usual
BAD_FIT = 0.1

WHERE = {"between": "between hosts", "inside": "inside a host"}


def placed(
    rows: Sequence[Measurement], cluster: Cluster, given: Mapping[str, str] | None
) -> tuple[list[LinkRow], list[str]]:
    """Return the rows of messages with their places on the cluster, collectives by their likeliest algorithm unless one
    is `given`, and notes on these choices and on rows without a place."""
    groups: dict[tuple[str, str, str], list[LinkRow]] = {}
    refused: list[ConfigError] = []
    for row in rows:
        if row.experiment in ("point_to_point", "collective"):
            try:
                link = LinkRow(row, make_case(row, cluster, {row.operation: candidates(row, given)[0]}))
                groups.setdefault((row.operation, row.backend, link.link_class), []).append(link)
            except ConfigError as error:
                refused.append(error)
    if refused and not groups:
        raise refused[0]
    links: list[LinkRow] = []
    notes = [f"{len(refused)} rows left out: {refused[0]}"] if refused else []
    for (operation, backend, link_class), members in groups.items():
        likeliest, why = _likeliest(cluster, members, candidates(members[0].row, given))
        links += likeliest
        notes += [f"{operation} {backend} {WHERE[link_class]}: {why}"] if why else []
    return links, notes


def _likeliest(cluster: Cluster, links: list[LinkRow], options: Sequence[str]) -> tuple[list[LinkRow], str]:
    """Return the rows of one operation by the algorithm whose fit makes them most likely, and how it was chosen."""
    usual = links[0].case.algorithm
    if usual == options[-1]:
        return links, ""
    few = sorted(links, key=lambda link: link.row.nbytes)[:: -(-len(links) // MOST_ROWS)]
    seconds = np.array([link.row.median_s for link in few])
    unlikely: dict[str, float] = {}
    for option in dict.fromkeys((usual, *options[1:])):
        try:
            errors = fit_links(cluster, _by(option, few, cluster))[0].errors
        except ConfigError:  # too few sizes, which the fit itself says
            return links, ""
        unlikely[option] = minus_log_likelihood(errors, seconds, *fit_noise(errors, seconds))
    best = min(unlikely, key=lambda option: unlikely[option])  # of equals that of runs
    told = ", ".join(f"{option} {value:.1f}" for option, value in unlikely.items())
    runs = "" if best == usual else f"; runs use {usual} unless they set algorithm = {best!r}"
    return _by(best, links, cluster), f"fitted as {best}, the likeliest (-ln of the likelihood: {told}){runs}"


def _by(algorithm: str, links: Sequence[LinkRow], cluster: Cluster) -> list[LinkRow]:
    return [LinkRow(link.row, make_case(link.row, cluster, {link.row.operation: algorithm})) for link in links]


def for_links(links: Sequence[LinkRow], named: set[str]) -> Iterator[tuple[list[LinkRow], list[list[LinkRow]]]]:
    """Yield for each class of links (inside hosts first, which routes between them use too) the rows to fit it to, and
    those of each other transport."""
    for link_class in ("inside", "between"):
        by_transport: dict[str, list[LinkRow]] = {}
        for row in links:
            if row.link_class == link_class:
                by_transport.setdefault(TRANSPORTS.get(row.row.backend, row.row.backend), []).append(row)
        anyhow = by_transport.pop("", [])
        order = sorted(by_transport, key=lambda name: PREFERRED.index(name) if name in PREFERRED else len(PREFERRED))
        own, *others = [by_transport[name] for name in order] or [[]]
        if anyhow or own:
            yield _purest([*anyhow, *own], named), [_purest(rows, named) for rows in others]


def _purest(own: list[LinkRow], named: set[str]) -> list[LinkRow]:
    """Return single pairs one way, else other messages, else collectives; and those whose algorithm is named."""
    messages = [row for row in own if row.row.experiment == "point_to_point"]
    single = [row for row in messages if row.row.operation == "one_way" and row.row.n_pairs == 1]
    first = next((group for group in (single, messages) if len({r.row.nbytes for r in group}) > 1), messages)
    first = first or [row for row in own if row.row.operation not in named]
    return first + [row for row in own if row.row.operation in named]


def contradictions(
    before: Cluster, after: Cluster, own: Sequence[LinkRow], others: Sequence[Sequence[LinkRow]]
) -> Iterator[str]:
    """Yield a warning for each transport whose rows are far from what the links `after` the fit say of them."""
    for rows in others:
        off = sum(abs(row.case.seconds(after) / row.row.median_s - 1.0) for row in rows) / len(rows)
        if off < BAD_FIT:
            continue
        try:
            values = fit_links(before, rows)[0].values
            alone = f"; fitted by themselves: {', '.join(f'{name} {shown(name, x)}' for name, x in values.items())}"
        except ConfigError:  # one size of messages
            alone = ""
        used, name = (", ".join(dict.fromkeys(r.row.backend for r in group if r.row.backend)) for group in (own, rows))
        yield (
            f"warning: {len(rows)} measurements by {name} contradict the links {WHERE[own[0].link_class]}, which are "
            f"those of {len(own)} by {used}: {percent(off)} off on average{alone}; runs use {used}, for others "
            f"calibrate with --backend {rows[0].row.backend}"
        )
