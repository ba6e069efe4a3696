"""Reader for ASTRA-sim's analytical network files (YAML).

Format: https://github.com/astra-sim/astra-network-analytical, ``common/network-parser/NetworkParser.cc``, shown in
docs/formats/topologies.md. **GB means 2**30 bytes there** (``common/NetworkFunction.cc``, ``bw_GBps_to_Bpns``). NPU i
has the coordinates of i in mixed radix, dimension 0 fastest (``MultiDimTopology.cc``); in each dimension, every group
of NPUs that differ only there is one building block. A switch costs the latency twice, once per link (``Switch.cc``).
"""

from __future__ import annotations

import math
import re
import reprlib
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster, Host
from ddlsim.cluster.nodes import Graph, add_host, connect
from ddlsim.cluster.quantity import check_size
from ddlsim.errors import ConfigError, shown
from ddlsim.imports.json_values import finite
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.text import SourceText, read_text

_GB = float(2**30)
_BLOCKS = ("Ring", "FullyConnected", "Switch")
_KEYS = ("topology", "npus_count", "bandwidth", "latency")


@checked
def read_astra(path: str | Path) -> Cluster:
    """Read a cluster from an ASTRA-sim network file in YAML. Each NPU becomes a host: npu0, npu1, and so on.

    Raises ConfigError if the file is invalid, for example if lists differ in length or if the file contains unknown
    building blocks, invalid numbers, or keys that have no effect. The message gives the file, key and reason.
    """
    source = read_text(path)
    blocks, counts, bandwidths, latencies = _read(source)
    n_npus = math.prod(counts)
    n_links = 2 * sum(n_npus // n * _n_cables(block, n) for block, n in zip(blocks, counts, strict=True))
    n_switches = sum(n_npus // n for block, n in zip(blocks, counts, strict=True) if block == "Switch")
    try:
        check_size(n_npus + n_switches, n_links, f"npus_count gives {shown(n_npus)} NPUs")
    except ConfigError as error:
        raise source.error(_line(source, "npus_count"), str(error)) from None
    graph: Graph = Graph(
        name=source.path.stem, title=f"ASTRA-sim: {' x '.join(blocks)}", sources=[source.path.name], grid=counts[::-1]
    )
    npus = [add_host(graph, f"npu{i}", Host())[0] for i in range(n_npus)]
    stride = 1
    for dim, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        bandwidth, latency = bandwidths[dim] * _GB, latencies[dim] * 1e-9
        for first in (i for i in range(n_npus) if i // stride % count == 0):
            group = [npus[first + i * stride] for i in range(count)]
            _join(graph, block, group, f"switch{dim}.{first}", bandwidth, latency)
        stride *= count
    return named_cluster(graph, source.path)


def _n_cables(block: str, n: int) -> int:
    """Return the number of cables added by :func:`_join`."""
    return {"Switch": n, "FullyConnected": n * (n - 1) // 2, "Ring": n if n > 2 else 1}[block]


def _join(graph: Graph, block: str, group: list[str], switch: str, bandwidth: float, latency: float) -> None:
    if block == "Switch":
        graph.add_node(switch, kind="switch")
        for npu in group:
            connect(graph, npu, switch, "nic", bandwidth, latency)
    elif block == "FullyConnected":
        for i, npu in enumerate(group):
            for other in group[i + 1 :]:
                connect(graph, npu, other, "link", bandwidth, latency)
    else:  # two NPUs in a ring have one link, not two: ASTRA-sim stores one per neighbour
        for i in range(len(group) if len(group) > 2 else 1):
            connect(graph, group[i], group[(i + 1) % len(group)], "link", bandwidth, latency)


def _line(source: SourceText, key: str) -> int | None:
    return next((n for n, line in enumerate(source.text.splitlines(), 1) if line.startswith(key)), None)


def _read(source: SourceText) -> tuple[list[str], list[int], list[float], list[float]]:
    import yaml

    try:
        table: object = yaml.safe_load(source.text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise source.error(line, f"not valid YAML: {error.problem}; correct that line") from None
    except yaml.YAMLError as error:
        raise source.error(None, f"not valid YAML: {' '.join(str(error).split())}; correct it") from None
    except ValueError as error:  # an invalid date, or an integer of thousands of digits
        raise source.error(None, f"invalid value in YAML: {error}; correct it") from None
    except RecursionError:
        raise source.error(None, "nested too deeply; is it the right file?") from None
    if not isinstance(table, dict):
        raise source.error(None, f"the keys {', '.join(_KEYS)} are missing; is it an ASTRA-sim network file?")
    for key in table:
        if key not in _KEYS:
            hint = "the keys of ASTRA-sim's analytical network are " + ", ".join(_KEYS)
            raise source.error(_line(source, str(key)), f"unknown key {str(key)!r}; {hint}")
    for key in _KEYS:  # of duplicate keys, YAML's reader silently takes the last
        lines = [n for n, line in enumerate(source.text.splitlines(), 1) if re.match(rf"{key}\s*:", line)]
        if len(lines) > 1:
            raise source.error(lines[1], f"{key} appears twice (first in line {lines[0]}); remove one")
    columns = [_column(source, table, key) for key in _KEYS]
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{key} {len(column)}" for key, column in zip(_KEYS, columns, strict=True))
        raise source.error(None, f"all lists must have one entry per dimension, but their lengths are {sizes}")
    blocks = [_block(source, value) for value in columns[0]]
    counts = [round(_number(source, "npus_count", value, 2.0, whole=True)) for value in columns[1]]
    bandwidths = [_number(source, "bandwidth", value, 0.0, above=True) for value in columns[2]]
    latencies = [_number(source, "latency", value, 0.0) for value in columns[3]]
    return blocks, counts, bandwidths, latencies


def _column(source: SourceText, table: dict[object, object], key: str) -> list[object]:
    if key not in table:
        raise source.error(None, f"the key {key!r} is missing; add it")
    value = table[key]
    values = value if isinstance(value, list) else [value]  # a single dimension can be written without brackets
    if not values:
        raise source.error(_line(source, key), f"{key} is empty; give one entry per dimension")
    return values


def _block(source: SourceText, value: object) -> str:
    if value not in _BLOCKS:
        known = ", ".join(_BLOCKS)
        line = _line(source, "topology")
        raise source.error(line, f"topology: unknown building block {reprlib.repr(value)}; known: {known}")
    return str(value)


def _number(
    source: SourceText, key: str, value: object, least: float, *, above: bool = False, whole: bool = False
) -> float:
    rule = f"{'an integer' if whole else 'a number'} {'above' if above else 'of at least'} {least:g}"
    known = finite(value)
    number = math.nan if known is None else known
    enough = math.isfinite(number) and (number > least or (not above and number == least))
    if not enough or (whole and number != int(number)):
        raise source.error(_line(source, key), f"{key}: {reprlib.repr(value)} must be {rule}; correct it")
    return number
