"""Closed forms: the exact time of each algorithm on an idle, uniform network.

Hockney's model: a message of n bytes takes ``alpha + n * beta`` (seconds, seconds per byte), then ``n * gamma`` at the
receiver if it is reduced; one full-duplex port per rank, no other contention; all ranks start together. All-reduce
algorithms keep their names (`ring`), and the others are prefixed with their kind (`all_to_all_bruck`). The algorithms'
docstrings cite the sources. Algorithms that take equally long share a function. Every function is exact for all
arguments that it accepts. If an algorithm folds ranks or prunes a tree to fit the number of ranks, messages contend for
ports and the textbook's sum of steps does not hold; these functions require a power of two. (Only bounds are known for
`double_binary_tree`.)

n_ranks  p                                    alpha  latency of a message, s
nbytes   S, the buffer of one rank in bytes   beta   s per byte;  gamma  s per byte reduced

Every function returns seconds, 0 for one rank.
"""

from __future__ import annotations

from ddlsim.arguments import Count, NotNegative, checked
from ddlsim.errors import ConfigError

#: sizes in bytes; latencies and costs in s
Real = NotNegative
#: alpha, beta and gamma of one level of a hierarchy
Link = tuple[Real, Real, Real]


@checked
def ring(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """2 (p-1) alpha + 2 (p-1)/p S beta + (p-1)/p S gamma."""
    gathered = all_gather_ring(n_ranks, nbytes, alpha, beta)
    return reduce_scatter_ring(n_ranks, nbytes, alpha, beta, gamma) + gathered


@checked
def naive_ring(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """(p-1) (alpha + S beta)."""
    return (n_ranks - 1) * (alpha + nbytes * beta)


@checked
def pipelined_ring(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """2 (p-1) u + max(alpha, 2 alpha - u/4) + (2p-3) max(0, alpha - u/2), with u = S/p beta.

    For two lanes and gamma = 0. The lanes take turns at the port. If the latency is at most half a chunk's time, only
    the first one is exposed, plus a little more above a quarter (the second lane's first piece). Otherwise each of the
    2p-3 later steps waits for the remainder.
    """
    if n_ranks == 1:
        return 0.0
    chunk = nbytes / n_ranks * beta
    start = max(alpha, 2 * alpha - chunk / 4)
    return 2 * (n_ranks - 1) * chunk + start + (2 * n_ranks - 3) * max(0.0, alpha - chunk / 2)


@checked
def recursive_doubling(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """log2 p (alpha + S (beta + gamma)), p = 2^q."""
    return _log2(n_ranks) * (alpha + nbytes * (beta + gamma))


@checked
def halving_doubling(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma, p = 2^q."""
    return 2 * _log2(n_ranks) * alpha + _remote_nbytes(n_ranks, nbytes) * (2 * beta + gamma)


@checked
def binomial_tree(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """2 log2 p (alpha + S beta) + log2 p S gamma, p = 2^q."""
    spread = broadcast_binomial(n_ranks, nbytes, alpha, beta)
    return reduce_binomial(n_ranks, nbytes, alpha, beta, gamma) + spread


@checked
def parameter_server(
    n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0, n_servers: Count = 1
) -> float:
    """2 alpha + 2 (p-1)/k S beta + S/k gamma with k of the ranks as servers.

    A server's port carries p-1 shards in each direction, all at the same rate. Messages that arrive together are
    reduced concurrently (gamma is charged per message).
    """
    if n_ranks == 1:
        return 0.0
    shard = nbytes / n_servers
    return 2 * alpha + 2 * (n_ranks - 1) * shard * beta + shard * gamma


@checked
def torus_2d(
    n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0, *, rows: Count, columns: Count
) -> float:
    """The ring's time along rows of X = `columns` ranks for S bytes, plus along Y = `rows` for S/X bytes."""
    if rows * columns != n_ranks:
        raise ConfigError(f"cost.torus_2d: {rows} x {columns} does not equal the number of ranks, {n_ranks}")
    return hierarchical(columns, rows, nbytes, (alpha, beta, gamma), (alpha, beta, gamma))


@checked
def hierarchical(n_inside: Count, n_groups: Count, nbytes: Real, inside: Link, between: Link) -> float:
    """Rings inside and between: 2(n-1) a1 + 2 (n-1)/n S b1 + 2(m-1) a2 + 2 (m-1)/m S/n b2 (+ gamma terms).

    inside, between  (alpha, beta, gamma) of each level. If the n rings between groups share one network
                     interface, its beta counts n times.
    """
    return ring(n_inside, nbytes, *inside) + ring(n_groups, nbytes / n_inside, *between)


@checked
def broadcast_binomial(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """ceil(log2 p) (alpha + S beta)."""
    return (n_ranks - 1).bit_length() * (alpha + nbytes * beta)


@checked
def broadcast_chain(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, n_segments: Count = 1) -> float:
    """(p - 2 + c) (alpha + S/c beta) with c segments."""
    return reduce_chain(n_ranks, nbytes, alpha, beta, 0.0, n_segments)


@checked
def broadcast_scatter_all_gather(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """(log2 p + p - 1) alpha + 2 (p-1)/p S beta, p = 2^q."""
    n_steps = _log2(n_ranks) + n_ranks - 1
    return n_steps * alpha + 2 * _remote_nbytes(n_ranks, nbytes) * beta


@checked
def reduce_chain(
    n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0, n_segments: Count = 1
) -> float:
    """(p - 2 + c) (alpha + S/c (beta + gamma)) with c segments."""
    if n_ranks == 1:
        return 0.0
    return (n_ranks - 2 + n_segments) * (alpha + nbytes / n_segments * (beta + gamma))


@checked
def reduce_scatter_ring(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """(p-1) alpha + (p-1)/p S (beta + gamma)."""
    return (n_ranks - 1) * alpha + _remote_nbytes(n_ranks, nbytes) * (beta + gamma)


@checked
def reduce_scatter_recursive_halving(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """log2 p alpha + (p-1)/p S (beta + gamma), p = 2^q."""
    n_steps = _log2(n_ranks)
    return n_steps * alpha + _remote_nbytes(n_ranks, nbytes) * (beta + gamma)


@checked
def reduce_scatter_direct(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real, gamma: Real = 0.0) -> float:
    """alpha + (p-1)/p S beta + S/p gamma (all messages arrive together, see :func:`parameter_server`)."""
    return all_to_all_direct(n_ranks, nbytes, alpha, beta) + (n_ranks > 1) * nbytes / n_ranks * gamma


@checked
def all_gather_ring(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """(p-1) alpha + (p-1)/p S beta."""
    return reduce_scatter_ring(n_ranks, nbytes, alpha, beta)


@checked
def all_gather_recursive_doubling(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """log2 p alpha + (p-1)/p S beta, p = 2^q."""
    return _log2(n_ranks) * alpha + _remote_nbytes(n_ranks, nbytes) * beta


@checked
def all_gather_bruck(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """ceil(log2 p) alpha + (p-1)/p S beta."""
    return (n_ranks - 1).bit_length() * alpha + _remote_nbytes(n_ranks, nbytes) * beta


@checked
def all_to_all_bruck(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """Sum over the bits k of p-1 of alpha + n_k/p S beta; n_k of the numbers 0..p-1 have bit k set.

    For p = 2^q that is log2 p (alpha + S/2 beta).
    """
    n_moved = sum(j.bit_count() for j in range(n_ranks))
    return (n_ranks - 1).bit_length() * alpha + n_moved / n_ranks * nbytes * beta


@checked
def all_to_all_direct(n_ranks: Count, nbytes: Real, alpha: Real, beta: Real) -> float:
    """alpha + (p-1)/p S beta."""
    return (n_ranks > 1) * alpha + _remote_nbytes(n_ranks, nbytes) * beta


@checked
def all_to_all_nccl(n_inside: Count, n_machines: Count, nbytes: Real, inside: Link, between: Link) -> float:
    """a1 + (n-1)/n S b1 + a2 + (m-1)/m S b2 with n ranks in each of m machines, in one round."""
    to_rails = all_to_all_direct(n_inside, nbytes, *inside[:2])
    return to_rails + all_to_all_direct(n_machines, nbytes, *between[:2])


reduce_binomial = recursive_doubling
all_to_all_pairwise = all_gather_ring
all_gather_direct = gather_direct = scatter_direct = all_to_all_direct


def _remote_nbytes(n_ranks: Count, nbytes: Real) -> float:
    """Bytes of the buffer that belong to the other ranks, (p-1)/p S."""
    return (n_ranks - 1) / n_ranks * nbytes


def _log2(n_ranks: Count) -> int:
    if n_ranks & (n_ranks - 1):
        raise ConfigError(
            f"cost: n_ranks = {n_ranks}: this closed form is exact only for powers of two; simulate the schedule "
            "instead"
        )
    return n_ranks.bit_length() - 1
