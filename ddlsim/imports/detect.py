"""Detection of a file's kind by content, because names and suffixes of batch job output are not reliable."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Union

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, listed, unknown_name
from ddlsim.imports.text import SourceText, read_text, warn
from ddlsim.imports.timing import Timing

if TYPE_CHECKING:
    from ddlsim.imports import HorovodTimeline, KinetoTrace, MlperfRun
    from ddlsim.plan import Plan

#: results of readers
Imported = Union[tuple[Timing, ...], "KinetoTrace", "HorovodTimeline", "MlperfRun", Cluster, "Plan"]


def _chakra(
    path: str | Path, *, n_ranks: int | None = None, flops: str | None = None, memory_bandwidth: str | None = None
) -> Plan:
    from ddlsim.plan import read_chakra

    plan = read_chakra(path, n_ranks=n_ranks, flops=flops, memory_bandwidth=memory_bandwidth)
    numbered = re.search(r"\.\d+\.(?:et|json)(?:\.gz)?$", str(path))
    if plan.n_ranks == 1 and n_ranks is None and len(plan.collectives) and numbered:
        warn(
            f"{path}: found no traces of other ranks, so collectives have one rank; set n_ranks if all ranks run this "
            "trace"
        )
    return plan


#: topologies of single machines, which can be replicated
MACHINES = ("nccl-topology", "nvidia-smi", "rocm-smi", "lstopo")
TOPOLOGIES = (*MACHINES, "simgrid", "astra", "graphml")
KINDS: tuple[str, ...] = ("nccl-tests", "osu", "iperf3", "ping", "kineto", "horovod", "mllog", "nccl-topology")
KINDS += ("nvidia-smi", "simgrid", "astra", "throughput", "chakra", "goal", "graphml", "rocm-smi", "lstopo")


def _reader(kind: str) -> Callable[..., Imported]:
    """Return the reader of a kind, which takes a path and, as keywords, values that the file may lack."""
    from ddlsim import imports, plan

    if kind == "chakra":
        return _chakra
    reader: Callable[..., Imported] = getattr(plan if kind == "goal" else imports, f"read_{kind.replace('-', '_')}")
    return reader


#: kind -> argument of its reader for the value that most files of the kind lack
_BANDWIDTH = dict.fromkeys(MACHINES, "nvlink_bandwidth") | {"rocm-smi": "xgmi_bandwidth"}
_LATENCY = dict.fromkeys(MACHINES, "network_latency")

#: (kind, pattern that only this kind contains); tried in this order
_MARKS = (
    ("simgrid", r"<platform\b[^>]*version|<!DOCTYPE\s+platform"),
    ("graphml", r"<(?:\w+:)?graphml\b"),
    ("lstopo", r"<topology\b[^>]*>\s*<object\b|<!DOCTYPE\s+topology\b"),
    ("nccl-topology", r"<system\b[^>]*version\s*="),
    ("horovod", r'"(?:NEGOTIATE_(?:ALL|BROADCAST|ADASUM|REDUCE)\w*|start_time_since_epoch_in_micros)"'),
    ("kineto", r'"traceEvents"\s*:'),
    ("nccl-tests", r'"(?:alg_bw|out_of_place|busBw)"\s*:'),
    ("nccl-tests", r"(?m)^\s*(?:numCycle,\s*)?collective,.*\balgbw,\s*busbw\b"),
    ("chakra", r'"type"\s*:\s*"(?:METADATA|MEM_LOAD|MEM_STORE|COMP|COMM_SEND|COMM_RECV|COMM_COLL)_NODE"'),
    ("iperf3", r'"(?:sum_received|sum_sent|bits_per_second)"\s*:|"version"\s*:\s*"iperf'),
    ("iperf3", r'(?m)"intervals"\s*:\s*\[\s*\],\s*"end"|bits/sec.*\breceiver\s*$'),
    ("mllog", r":::MLL(?:OG)?\b|:::MLPv0\.[56]|\bMLPerf: \S+ \[\d\d/"),
    ("nccl-tests", r"(?m)^.*#\s+size\s+count.*\balgbw\s+busbw"),
    ("osu", r"#\s*(?:OSU|OMB-Py)\s+\S+\s+.+\sTest\b"),
    ("ping", r"(?m)(?:rtt|round-trip) min/avg/max|bytes from .*\btime[=<]|^PING\s"),
    ("rocm-smi", r"\b(?:Hops|Weight|Link Type) between two GPUs\b|\(Topology\) (?:Weight|Hops|Link type) between"),
    ("rocm-smi", r'"\(Topology\) Numa Node"'),
    ("nvidia-smi", r"(?m)^(?:\x1b\[[0-9;]*m|\s|[\w.-]+: )*GPU0(?:\s+GPU1|\s+CPU Affinity|\s+\S+\s).*$"),
    ("nvidia-smi", r"(?m)^\s*GPU 0: .*\n\s*Link 0: "),
    ("goal", r"(?m)^\s*num_ranks\s+\d+\s*$"),
    ("astra", r"(?ms)^topology\s*:.*^npus_count\s*:|^npus_count\s*:.*^topology\s*:"),
)
_LOOK = 2**24  # characters
#: pattern of tables written by :func:`ddlsim.measure.save_measurements`; required columns in any order
_MEASURED = re.compile(r"(?:#.*\n)*(?=.*\bexperiment\b)(?=.*\boperation\b)(?=.*\bn_ranks\b)(?=.*\bmedian_s\b).*,")
#: other common files: (pattern, description, alternative)
_UNSUPPORTED = (
    (r"(?m)^\s*(?:graph|Creator)\s.*\n*(?:.*\n){0,60}\s*node\s*\[", "GML", "save it as GraphML"),
    (r"(?m)^duration: [\d.]+ sec|algo throughput: |all_reduce_bench\.py",
     "the output of an all_reduce_bench.py for torch.distributed, which has no fixed format",
     "write it as CSV (throughput)"),
    (r"#bytes\s+#iterations\s+BW peak|RDMA_Write|---\s*\n\s*Send BW Test", "perftest (ib_write_bw)",
     "measure with OSU or nccl-tests"),
    (r"(?m)^\[ ID\]\S* Interval\s+Transfer\s+B\w+", "iperf without totals, or iperf 2", "measure with iperf3 -J"),
    (r'"(?:scheduling-policy|topologies-per-dim|logical-dims|memory-type)"\s*:', "another file of ASTRA-sim",
     "use its analytical network (topology, npus_count, ...)"),
    (r'"workload_graph"\s*:|"NodeType"\s*:', "the JSON of Chakra's feeder", "use the trace itself (.et)"),
    (r'"(?:architectures|model_type)"\s*:', "the configuration of a model",
     "pass it as a model, as in ddlsim show model FILE"),
    (r"NCCL INFO ", "a log of NCCL_DEBUG without results", "save the output of the program itself"),
    (r'"schema"\s*:\s*"[\w.-]+",\s*"pid"', "an execution trace of PyTorch", "convert it to Chakra's .et"),
    (r"(?im)^(?:SwitchName|BlockName)=\S+\s", "Slurm's topology.conf", "write a .toml with a [generator]"),
    (r'(?m)^(?:switchguid|caguid)=0x|^Switch\s+\d+ "S-', "the output of ibnetdiscover",
     "write a .toml with a [generator]"),
    (r"<nvidia_smi_log>|NVIDIA-SMI \d", "nvidia-smi's list of GPUs", "use nvidia-smi topo -m"),
)  # fmt: skip


@checked
def detect_kind(path: str | Path) -> str:
    """Detect the kind of a file from its content, and return it as one of :data:`KINDS`.

    Raises :class:`ConfigError` if no kind matches. The message shows the beginning of the file and lists the kinds that
    were considered.
    """
    from ddlsim.plan.chakra_file import is_chakra

    return "chakra" if is_chakra(path) else _kind(read_text(path, log=True))


def _kind(source: SourceText) -> str:
    beginning = source.text[:_LOOK]  # traces can be large, and the pattern is near the beginning
    for kind, pattern in _MARKS:
        if re.search(pattern, beginning):
            return kind
    for mark, what, remedy in _UNSUPPORTED:
        if re.search(mark, beginning):
            raise source.error(None, f"seems to be {what}, which has no reader; {remedy}")
    if not source.text.strip():
        raise source.error(None, "is empty; is it the right file?")
    if _MEASURED.match(beginning):
        raise source.error(
            None, "is already a table of measurements; pass it to ddlsim calibrate, or read it with read_measurements"
        )
    if str(source.path).endswith(".toml"):
        raise source.error(None, "is a TOML file, ddlsim's own format; use it directly, as in ddlsim run FILE")
    from ddlsim.imports.throughput import NO_ROWS, is_throughput_table

    if is_throughput_table(source):
        return "throughput"
    lines = [(number, line) for number, line in enumerate(source.text.splitlines(), 1) if line.strip()]
    if len(lines) == 1 and re.fullmatch(r"[^\d\W]\w*(?:[,;\t] *[^\d\W]\w*)+\s*", lines[0][1]):
        raise source.error(lines[0][0], NO_ROWS)
    start = " ".join(source.text[:200].split())[:60]
    raise source.error(None, f"begins with {start!r}, which matches none of {listed(KINDS)}; is it the right file?")


@checked
def read_any(path: str | Path, *, kind: str | None = None, facts: Mapping[str, object] | None = None) -> Imported:
    """Read a file of any supported kind.

    kind    one of :data:`KINDS`; None: the kind is detected from the content of the file
    facts   mapping of values that the file does not contain. The keys are arguments of the reader for this kind of
            file, such as `operation`, `n_ranks`, `n_hosts`, `device` or `ignore_unknown`. If the reader has several
            bandwidth and latency arguments, `bandwidth` sets the NVLink bandwidth, and `latency` sets the network
            latency.

    The return type depends on the file. Measurements are returned as a tuple of :class:`Timing` objects, and topologies
    as a :class:`~ddlsim.cluster.Cluster`. Execution traces (Chakra) and GOAL schedules are returned as a
    :class:`~ddlsim.plan.Plan`. All other kinds of traces and logs have their own classes.

    Raises :class:`ConfigError`, giving the file, line and reason, if the file is invalid. If a required value is
    missing from both the file and `facts`, the message gives the name of the value.
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind", kind, KINDS, "read_any")
    chosen = kind or detect_kind(path)
    reader = _reader(chosen)
    names = facts_of(chosen)
    arguments: dict[str, object] = {}
    for name, value in (facts or {}).items():
        argument = argument_of(name, chosen)
        if argument not in names:
            accepted = ", ".join(sorted(names)) if names else "none"
            raise ConfigError(
                f"{path} is read as {chosen}, which does not accept {name} (accepted: {accepted}); remove {name}"
            )
        arguments[argument] = value
    try:
        if chosen == "graphml" and not arguments.get("ignore_unknown"):
            from ddlsim.cluster.files import read_cluster
            from ddlsim.imports.graphml import is_own

            if is_own(path):
                return read_cluster(Path(path), read_text(path).text)
        return reader(path, **arguments)
    except ConfigError as error:
        raise type(error)(f"{error} (read as {chosen})") from None


def facts_of(kind: str) -> set[str]:
    """Return the names of the facts accepted by the reader of a kind of file."""
    return set(inspect.signature(_reader(kind)).parameters) - {"path"}


def argument_of(fact: str, kind: str) -> str:
    """Return the argument of the reader of a kind of file that a fact sets."""
    return {"bandwidth": _BANDWIDTH, "latency": _LATENCY}.get(fact, {}).get(kind, fact)


@checked
def read_topology(path: str | Path, facts: Mapping[str, object] | None = None) -> Cluster:
    """Read a cluster from a file of one of the kinds in :data:`TOPOLOGIES`.

    facts   mapping of values that the file does not contain, as in :func:`read_any`

    Raises :class:`ConfigError` if the file is invalid or does not contain a topology.
    """
    try:
        kind = detect_kind(path)
    except ConfigError as error:
        raise type(error)(f"{error} (ddlsim's own clusters end in .toml, .json or .graphml)") from None
    if kind not in TOPOLOGIES:
        kinds = listed(["toml", "json", *TOPOLOGIES])
        raise ConfigError(f"{path}: a {kind} file does not describe a topology; use one of {kinds}")

    def appended(option: re.Match[str]) -> str:
        """Return what to append to the path, instead of an option of ``ddlsim import``."""
        name = option[1].replace("-", "_")
        return f"(append +{name}={'true' if name in ('ignore_unknown', 'virtual_nics') else '...'} to the path)"

    try:
        cluster = read_any(path, kind=kind, facts=facts)
    except ConfigError as error:
        raise type(error)(re.sub(r"\(--(?:set )?(\w[\w-]*)(?:=[^)]*)?\)", appended, str(error))) from None
    assert isinstance(cluster, Cluster)
    return cluster
