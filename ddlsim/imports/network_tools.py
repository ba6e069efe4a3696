"""Readers for iperf3 and ping.

iperf3: https://software.es.net/iperf/; without ``-J`` it prints bytes in powers of 1024 (``units.c``). ping: the output
of iputils, the BSDs, macOS and busybox. docs/formats/benchmarks.md describes both.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError
from ddlsim.imports.json_values import Node, documents
from ddlsim.imports.text import LeftOut, SourceText, positive_number, read_text
from ddlsim.imports.timing import Timing

_TOTAL = re.compile(
    r"\[\s*(\d+|SUM)\](?:\[([TR])X-[CS]\])?\s+([\d.]+)-\s*([\d.]+)\s+sec\s+([\d.]+)\s+([KMGT]?)Bytes\s.*\breceiver\s*$"
)
_REPLY = re.compile(r"\b([0-9]{1,6}) bytes from (\S+?):? .*?\btime[=<]([\d.]+) ?(ms|us|s)\b")
_SUMMARY = re.compile(
    r"(?:rtt|round-trip) min/avg/max(?:/(?:mdev|stddev|std-dev))? = ([\d.]+)/([\d.]+)/([\d.]+)(?:/[\w.]+)? ms"
)
_LOSS = re.compile(r"(\d+) packets transmitted, (\d+) (?:packets )?received")
_HEAD = re.compile(r"PING (\S+).*?\b([0-9]{1,6})(?:\(\d+\))?(?: bytes of data| data bytes)")
_ICMP_HEADER = 8  # bytes; "56 data bytes" are sent as 64 bytes
_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


@checked
def read_iperf3(path: str | Path) -> tuple[Timing, ...]:
    """Read iperf3 output, and return one row per direction.

    Each row contains the total number of bytes received by all streams, and the time that this took. If the file
    contains several runs, those that failed (iperf3 reports an error), were truncated or received nothing are skipped,
    and a warning says how many.

    Raises :class:`ConfigError` if no run remains, or if the file is not from iperf3.
    """
    source = read_text(path)
    rows, left_out = list[Timing](), LeftOut(ConfigError)
    if "{" not in source.text:
        rows += _iperf3_text(source, left_out)
    else:
        with left_out:
            for root in _iperf3_runs(source):
                with left_out:
                    rows += _iperf3_rows(source, root)
    left_out.tell(rows)
    return tuple(rows)


def _iperf3_runs(source: SourceText) -> Iterator[Node]:
    """Yield the runs in the file; ``--json-stream`` writes each in parts, from "start" to "end"."""
    parts: dict[str, object] = {}
    for document in documents(source):
        value = document.value
        if not (isinstance(value, dict) and isinstance(value.get("event"), str)):
            yield document
            continue
        if value["event"] == "start" and parts:
            yield Node(parts, document.place)
            parts = {}
        parts[value["event"]] = value.get("data")
    if parts:
        yield Node(parts, f"{source.path}: ")


def _iperf3_text(source: SourceText, left_out: LeftOut) -> list[Timing]:
    """Return the rows of iperf3's text output; a server's log has several runs."""
    runs: list[tuple[int, bool, dict[str, list[tuple[int, re.Match[str]]]]]] = []
    for number, line in enumerate(source.text.splitlines(), start=1):
        if line.startswith(("Connecting to host", "Accepted connection")):
            runs.append((number, False, {}))
        elif "is sending" in line and runs:
            runs[-1] = (number, True, runs[-1][2])
        elif match := _TOTAL.search(line):
            if not runs:
                runs.append((number, False, {}))
            runs[-1][2].setdefault(match[2] or "", []).append((number, match))
    rows: list[Timing] = []
    for number, reverse, sides in runs or [(1, False, {})]:
        with left_out:
            if not sides:
                reason = "no line of totals that ends in 'receiver' found; measure with iperf3 -J"
                raise source.entry_error(number, reason)
            rows += [_printed_row(source, reverse, len(sides), side, totals) for side, totals in sides.items()]
    return rows


def _printed_row(
    source: SourceText, reverse: bool, n_ways: int, way: str, totals: list[tuple[int, re.Match[str]]]
) -> Timing:
    number, total = next(((n, m) for n, m in totals if m[1] == "SUM"), totals[-1])
    n_streams = len({m[1] for _, m in totals if m[1] != "SUM"})
    seconds = float(total[4]) - float(total[3])
    nbytes = positive_number(source, number, total[5], "Transfer") * 1024.0 ** " KMGT".index(total[6] or " ")
    direction = "from server" if (way == "R" or (reverse and not way)) else "to server"
    return _stream(n_ways > 1, nbytes, seconds, direction, n_streams, f"{source.path}:{number}")


def _stream(both_ways: bool, nbytes: float, seconds: float, direction: str, n_streams: int, place: str) -> Timing:
    operation = "bidirectional" if both_ways else "stream"
    variant = f"{direction}, {n_streams} streams" if n_streams > 1 else direction
    return Timing("iperf3", operation, 2, nbytes, seconds, "single", n_reps=1, n_hosts=2, variant=variant, place=place)


def _iperf3_rows(source: SourceText, root: Node) -> tuple[Timing, ...]:
    if root.has("error"):
        raise source.error(None, f"iperf3 failed: {root['error'].text()}; repeat the measurement")
    end = root["end"]
    test = root["start"]["test_start"] if root.has("start") and root["start"].has("test_start") else None
    n_streams = test["num_streams"].count() if test is not None and test.has("num_streams") else 1
    reverse = test is not None and test.has("reverse") and test["reverse"].number() == 1
    first, second = ("from server", "to server") if reverse else ("to server", "from server")
    rows = [_iperf3_row(end, "", first, n_streams)]
    if end.has("sum_received_bidir_reverse") or end.has("sum_sent_bidir_reverse"):
        rows.append(_iperf3_row(end, "_bidir_reverse", second, n_streams))
    return tuple(rows)


def _iperf3_row(end: Node, suffix: str, direction: str, n_streams: int) -> Timing:
    key = f"sum_received{suffix}"
    if end.has(key) and not (end[key].has("bytes") and end[key]["bytes"].number() == 0 and end.has(f"sum{suffix}")):
        total, lost = end[key], 0.0
    elif end.has(f"sum{suffix}"):  # UDP before 3.12: sent bytes, and the share that was lost
        total = end[f"sum{suffix}"]
        lost = total["lost_percent"].number() / 100 if total.has("lost_percent") else 0.0
    else:
        raise end.error(f"'sum_received{suffix}' and 'sum{suffix}' are both missing; is the file complete?")
    nbytes = total["bytes"].nonnegative() * (1 - lost)
    if nbytes <= 0:
        raise total.error("nothing was received; repeat the measurement")
    both_ways = bool(suffix) or end.has("sum_received_bidir_reverse")
    return _stream(both_ways, nbytes, total["seconds"].positive(), direction, n_streams, total.place)


@checked
def read_ping(path: str | Path) -> tuple[Timing, ...]:
    """Read ping output, and return one row per host.

    The time in each row is the median round-trip time of the replies, or the average from the summary if individual
    replies are not listed (``ping -q``). ``nbytes`` is the size of the ICMP message (data plus an 8-byte header), which
    is sent in both directions. Hosts that did not reply and replies without a time are skipped, and a warning says how
    many.

    Raises :class:`ConfigError`, giving the file, line and reason, if no round-trip time remains, or if the file is not
    from ping.
    """
    source = read_text(path, log=True)
    rows, left_out = list[Timing](), LeftOut()
    host, nbytes = "", 0.0
    replies: list[float] = []
    for number, line in source.lines():
        if match := _HEAD.search(line):
            if replies:
                with left_out:
                    rows.append(_ping_row(source, number - 1, host, nbytes, replies))
            host, nbytes, replies = match[1], float(match[2]) + _ICMP_HEADER, []
        elif match := _REPLY.search(line):
            nbytes, host = float(match[1]), host or match[2]
            with left_out:
                replies.append(positive_number(source, number, match[3], "time") * _UNITS[match[4]])
        elif (match := _LOSS.search(line)) and match[2] == "0":
            with left_out:
                reason = f"no reply to {match[1]} packets to {host or 'the host'}; remove this part"
                raise source.entry_error(number, reason)
            host, nbytes, replies = "", 0.0, []
        elif match := _SUMMARY.search(line):
            with left_out:
                rows.append(_ping_row(source, number, host, nbytes, replies, match))
            host, nbytes, replies = "", 0.0, []
    if replies:  # no summary: stopped or truncated
        with left_out:
            rows.append(_ping_row(source, number, host, nbytes, replies))
    left_out.tell(rows, source, "no reply and no summary of ping found; is it the right file?")
    return tuple(rows)


def _ping_row(
    source: SourceText, line: int, host: str, nbytes: float, replies: list[float], summary: re.Match[str] | None = None
) -> Timing:
    if not nbytes:
        reason = "the first line of ping (PING host ...) with the size is missing before this summary; add it"
        raise source.entry_error(line, reason)
    low, middle, high = (float(word) * 1e-3 for word in summary.groups()) if summary else (0.0, 0.0, 0.0)
    if replies:
        low, middle, high = min(replies), statistics.median(replies), max(replies)
    if middle <= 0:
        raise source.entry_error(line, "the average is 0 ms, below ping's resolution; remove this part")
    statistic, place = "median" if replies else "mean", f"{source.path}:{line}"
    timing = Timing("ping", "round_trip", 2, nbytes, middle, statistic, n_hosts=2, variant=host, place=place)
    return replace(timing, min_s=low, max_s=high, n_reps=len(replies) or None)
