"""Longest chains of dependent tasks, from which lower bounds of step times follow. Compiled."""

from __future__ import annotations

from ddlsim.compiler import entry

NEVER = float("-inf")


@entry
def order_events(event, first, rows, offsets, following, missing, order):  # type: ignore[no-untyped-def]
    """Write the events to `order`, topologically sorted; return how many have no cyclic dependency.

    event           (n,) event of each row
    first, rows     CSR: the rows of each event
    offsets, following  CSR: the successors of each row
    missing         (n_events,) number of dependencies on other events; modified
    """
    n = 0
    for e in range(len(missing)):
        if missing[e] == 0:
            order[n] = e
            n += 1
    i = 0
    while i < n:
        e = order[i]
        i += 1
        for m in range(first[e], first[e + 1]):
            row = rows[m]
            for k in range(offsets[row], offsets[row + 1]):
                later = event[following[k]]
                missing[later] -= 1
                if missing[later] == 0:
                    order[n] = later
                    n += 1
    return n


@entry
def longest(  # type: ignore[no-untyped-def]
    order, first, rows, offsets, following, work, ends, place, out, into, after, start,
):  # fmt: skip
    """Compute the longest chain (s) from the `start` of each row, and from its end (`after`, which on entry holds
    the chain through later steps).

    ends       (n,) whether a chain may end with the row
    place      (n_levels, n) for rows of collectives: where the member is; -1: apart from all others; -2: no bounds
    out, into  (n_levels, n) lower bounds (s) for a member's data to leave its place, and for its result to enter it
    """
    for i in range(len(order) - 1, -1, -1):
        e = order[i]
        begin, end = first[e], first[e + 1]
        for m in range(begin, end):
            row = rows[m]
            best = after[row]
            for k in range(offsets[row], offsets[row + 1]):
                best = max(best, start[following[k]])
            after[row] = best
            start[row] = work[row] + (max(best, 0.0) if ends[row] else best)
        if end - begin == 1 or ends[rows[begin]]:
            continue
        latest = NEVER
        for m in range(begin, end):
            latest = max(latest, start[rows[m]])
        for m in range(begin, end):
            work[rows[m]] = start[rows[m]]  # reused: from here on, the longest chain from the row itself
            start[rows[m]] = latest
        for level in range(len(place)):
            if latest == NEVER or place[level, rows[begin]] == -2:
                continue
            # for the chains of members, with and without entering: the largest one, its place, and the largest one
            # elsewhere
            ends_at, entered_at, ends_1, ends_2, entered_1, entered_2 = -3, -3, NEVER, NEVER, NEVER, NEVER
            for m in range(begin, end):
                row = rows[m]
                chain, entered = work[row], work[row] + into[level, row]
                if place[level, row] == ends_at:
                    ends_1 = max(ends_1, chain)
                elif chain > ends_1:
                    ends_at, ends_2, ends_1 = place[level, row], ends_1, chain
                else:
                    ends_2 = max(ends_2, chain)
                if place[level, row] == entered_at:
                    entered_1 = max(entered_1, entered)
                elif entered > entered_1:
                    entered_at, entered_2, entered_1 = place[level, row], entered_1, entered
                else:
                    entered_2 = max(entered_2, entered)
            for m in range(begin, end):
                row = rows[m]
                apart = place[level, row] == -1
                others = ends_1 if apart or place[level, row] != ends_at else ends_2
                enters = entered_1 if apart or place[level, row] != entered_at else entered_2
                start[row] = max(start[row], others + out[level, row], enters)


@entry
def reach(order, first, rows, offsets, following, reached):  # type: ignore[no-untyped-def]
    """Mark all successors of the rows that are `reached`."""
    for e in order:
        for m in range(first[e], first[e + 1]):
            row = rows[m]
            if reached[row]:
                for k in range(offsets[row], offsets[row + 1]):
                    reached[following[k]] = True
