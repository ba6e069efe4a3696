"""What links do besides carrying bytes at a rate: frames with headers, token buckets, acknowledgements.

The network engine applies them (docs/models/tcp.md has the formulas); links without them cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import Decay, NotNegative, checked
from ddlsim.cluster.cluster import Cluster, Floats, Ints
from ddlsim.cluster.quantity import Quantity, nonnegative
from ddlsim.errors import ConfigError, shown, unknown_name


@checked
@dataclass(frozen=True)
class LinkDetail:
    """The details of one link, SI floats; 0 is what a link does without them.

    frame_header, frame_payload  bytes that every frame of at most `frame_payload` bytes adds to a message
    burst                        bytes that an idle link has saved up and lets through at once (token bucket)
    reverse_load                 share of its rate that traffic takes of the other direction (acknowledgements)
    """

    frame_header: NotNegative = 0.0
    frame_payload: NotNegative = 0.0
    burst: NotNegative = 0.0
    reverse_load: Decay = 0.0

    def __bool__(self) -> bool:
        """Whether the link does anything besides carrying bytes."""
        return self != LinkDetail()


#: names in graphs and in files
DETAIL_KEYS = tuple(field.name for field in dataclasses.fields(LinkDetail))


@dataclass(frozen=True, eq=False)
class LinkDetails:
    """The details of all links of a cluster, each of shape (n_links,), as in :class:`LinkDetail`."""

    frame_header: Floats
    frame_payload: Floats
    burst: Floats
    reverse_load: Floats

    def __post_init__(self) -> None:
        for key in DETAIL_KEYS:
            getattr(self, key).setflags(write=False)

    def of(self, link: int) -> LinkDetail:
        """Return the details of one link."""
        return LinkDetail(*(float(getattr(self, key)[link]) for key in DETAIL_KEYS))


def checked_detail(
    frame_header: Quantity = 0.0,
    frame_payload: Quantity = 0.0,
    burst: Quantity = 0.0,
    reverse_load: float = 0.0,
    where: str = "",
) -> LinkDetail:
    """Return the details as SI floats; sizes are bytes or text such as "66 B".

    Raises :class:`ConfigError` for a number that makes no sense, naming it.
    """
    header = nonnegative(frame_header, "bytes", f"{where}frame_header")
    payload = nonnegative(frame_payload, "bytes", f"{where}frame_payload")
    if bool(header) != bool(payload):
        raise ConfigError(
            f"{where}frame_header = {shown(frame_header)} and frame_payload = {shown(frame_payload)} say together what "
            f"a frame is; give both, like '66 B' and '1448 B'"
        )
    if isinstance(reverse_load, bool) or not isinstance(reverse_load, int | float) or not 0 <= reverse_load < 1:
        raise ConfigError(f"{where}reverse_load = {shown(reverse_load)} must be a share in [0, 1), like 0.022")
    return LinkDetail(header, payload, nonnegative(burst, "bytes", f"{where}burst"), float(reverse_load))


def collected(details: Collection[LinkDetail]) -> LinkDetails | None:
    """Return the details of all links as arrays, or None if no link has any."""
    if not any({id(detail): detail for detail in details}.values()):  # most links of a cluster share theirs
        return None
    columns = np.array([dataclasses.astuple(detail) for detail in details], dtype=np.float64).T
    return LinkDetails(*(column.copy() for column in columns))


@checked
def with_detail(
    cluster: Cluster,
    *,
    frame_header: Quantity = 0.0,
    frame_payload: Quantity = 0.0,
    burst: Quantity = 0.0,
    reverse_load: float = 0.0,
    kinds: Collection[str] | None = None,
) -> Cluster:
    """Return the cluster with these details on all links of the given `kinds` (None: all between hosts).

    The parameters are those of :class:`LinkDetail`. Links of other kinds keep theirs. Raises :class:`ConfigError`
    for a number that makes no sense, or a kind that no link has.
    """
    detail = checked_detail(frame_header, frame_payload, burst, reverse_load)
    for kind in kinds or ():
        if kind not in cluster.link_kind:
            raise unknown_name("link kind", kind, set(cluster.link_kind), f"cluster {cluster.name!r}")
    host = cluster.host_of
    inside = (host[cluster.link_src] == host[cluster.link_dst]) & (host[cluster.link_src] >= 0)
    chosen = [
        not inside[link] if kinds is None else kind in kinds for link, kind in enumerate(cluster.link_kind)
    ]
    before = cluster.details
    return dataclasses.replace(
        cluster,
        details=collected(
            [
                detail if mine else before.of(link) if before else LinkDetail()
                for link, mine in enumerate(chosen)
            ]
        ),
    )


def reverse_links(cluster: Cluster) -> Ints:
    """Return for each link the one that leads back, -1 if there is none, shape (n_links,).

    Of several links in parallel, the first one belongs to the first one back, and so on.
    """
    waiting: dict[tuple[int, int], list[int]] = {}
    ends = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    for link, pair in enumerate(ends):
        waiting.setdefault(pair, []).append(link)
    reverse = np.full(cluster.n_links, -1, dtype=np.int64)
    for (u, v), links in waiting.items():
        for link, back in zip(links, waiting.get((v, u), []), strict=False):
            reverse[link] = back
    return reverse
