"""Reader for ASTRA-sim's analytical network files (YAML).

Format: https://github.com/astra-sim/astra-network-analytical, ``common/network-parser/NetworkParser.cc``, shown in
docs/formats/topologies.md. **GB means 2**30 bytes there** (``common/NetworkFunction.cc``, ``bw_GBps_to_Bpns``). NPU i
has the coordinates of i in mixed radix, dimension 0 fastest (``MultiDimTopology.cc``); in each dimension, every group
of NPUs that differ only there is one building block. A switch costs the latency twice, once per link (``Switch.cc``).
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Any

from ddlsim.arguments import NotNegative, Positive, checked, integer, one_of, several
from ddlsim.cluster import Cluster, Host
from ddlsim.cluster.nodes import Graph, add_host, connect
from ddlsim.cluster.quantity import check_size
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.imports.machines import named_cluster
from ddlsim.imports.text import SourceText, read_text

_GB = float(2**30)
#: key -> its entries, one per dimension; a single one can be written without brackets
_KEYS = {
    "topology": several(Annotated[str, one_of("Ring", "FullyConnected", "Switch")]),
    "npus_count": several(Annotated[int, integer(2)]),
    "bandwidth": several(Positive),
    "latency": several(NotNegative),
}


@checked
def read_astra(path: str | Path) -> Cluster:
    """Read a cluster from an ASTRA-sim network file in YAML. Each NPU becomes a host: npu0, npu1, and so on.

    Raises ConfigError if the file is invalid, for example if lists differ in length or if the file contains unknown
    building blocks, invalid numbers, or keys that have no effect. The message gives the file, key and reason.
    """
    source = read_text(path)
    blocks, counts, bandwidths, latencies = _read(source)
    n_npus = math.prod(counts)
    cables = ({"Switch": n, "FullyConnected": n * (n - 1) // 2, "Ring": n if n > 2 else 1} for n in counts)
    n_links = 2 * sum(n_npus // n * n_cables[block] for block, n, n_cables in zip(blocks, counts, cables, strict=True))
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


def _join(graph: Graph, block: str, group: list[str], switch: str, bandwidth: float, latency: float) -> None:
    if block == "Switch":
        graph.add_node(switch, kind="switch")
        for npu in group:
            connect(graph, npu, switch, "nic", bandwidth, latency)
    elif block == "FullyConnected":
        for npu, other in itertools.combinations(group, 2):
            connect(graph, npu, other, "link", bandwidth, latency)
    else:  # two NPUs in a ring have one link, not two: ASTRA-sim stores one per neighbour
        for i in range(len(group) if len(group) > 2 else 1):
            connect(graph, group[i], group[(i + 1) % len(group)], "link", bandwidth, latency)


def _line(source: SourceText, key: str) -> int | None:
    return next((n for n, line in enumerate(source.text.splitlines(), 1) if line.startswith(key)), None)


def _read(source: SourceText) -> list[Any]:
    """Return the entries of each key."""
    import yaml

    try:
        table: object = yaml.safe_load(source.text)
    except RecursionError:
        raise source.error(None, "nested too deeply; is it the right file?") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date, an integer of thousands of digits
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        what = f"not valid YAML: {problem or ' '.join(str(error).split())}; correct it"
        raise source.error(mark.line + 1 if mark else None, what) from None
    if not isinstance(table, dict):
        raise source.error(None, f"the keys {', '.join(_KEYS)} are missing; is it an ASTRA-sim network file?")
    for key in table:
        if key not in _KEYS:
            raise source.error(_line(source, str(key)), str(unknown_name("key", str(key), _KEYS)))
    columns: list[Any] = []
    for key, rule in _KEYS.items():
        lines = [n for n, line in enumerate(source.text.splitlines(), 1) if re.match(rf"{key}\s*:", line)]
        if len(lines) > 1:  # YAML's reader silently takes the last
            raise source.error(lines[1], f"{key} appears twice (first in line {lines[0]}); remove one")
        if table.get(key) in (None, []):
            raise source.error(_line(source, key), f"the key {key!r} is missing or empty; give one entry per dimension")
        try:
            columns.append(rule(table[key], key))
        except ConfigError as error:
            raise source.error(_line(source, key), str(error)) from None
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{key} {len(column)}" for key, column in zip(_KEYS, columns, strict=True))
        raise source.error(None, f"all lists must have one entry per dimension, but their lengths are {sizes}")
    return columns
