"""Chakra execution traces as plans: those of other tools (ASTRA-sim, PyTorch), and plans as such traces and back.

In traces written by `to_chakra`, attributes store what the schema lacks, so that they are read without loss.

They can be binary, or JSON as written by ``chakra_jsonizer``: one object per message, in protobuf's JSON mapping, with
names in camelCase or as in the schema, 64-bit integers as strings, enumerations by name, and zero or empty fields
omitted (https://github.com/mlcommons/chakra, ``src/jsonizer``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, listed, shown
from ddlsim.imports.json_values import Node, finite
from ddlsim.imports.text import SourceText, read_bytes, read_text
from ddlsim.output_files import write_text
from ddlsim.plan.chakra_file import COLLECTIVES, NODE_TYPES, Attribute, Scalar, TraceNode, read_nodes, write_nodes
from ddlsim.plan.graph import Operation, plan_of_operations
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, COLUMNS, GATHER, KINDS, RECEIVE, SEND, Lane, Part, Plan
from ddlsim.plan.queues import FusedQueue, PriorityQueue
from ddlsim.plan.rows import refuse_needs_across_ranks
from ddlsim.plan.transforms import as_messages
from ddlsim.units import LARGEST, si

#: fields of a node, in lower case and without underscores
_FIELDS = {
    "id", "name", "type", "ctrldeps", "datadeps", "starttimemicros", "durationmicros", "inputs", "outputs", "attr",
}  # fmt: skip
_WHOLE = re.compile(r"(?:u?int|sint|s?fixed)(?:32|64)(val|list)")


def json_nodes(path: Path, text: str) -> tuple[dict[str, Attribute], list[TraceNode]]:
    """Return the attributes of the metadata in `text`, and the nodes. Raises ConfigError with position and reason."""
    metadata: dict[str, Attribute] = {}
    nodes: list[TraceNode] = []
    for count, value in enumerate(_objects(path, text)):
        fields = _plain(Node(value, f"{path}: message {count}"))
        if count == 0 and fields.keys() <= {"version", "attr"}:
            metadata = _attributes(fields)
        else:
            nodes.append(_node(Node(value, f"{path}: message {count}"), fields))
    return metadata, nodes


def _objects(path: Path, text: str) -> Iterator[object]:
    """Yield the concatenated objects of a text."""
    decoder, at, n = json.JSONDecoder(), 0, 0
    while match := re.compile(r"\s*(?=\S)").match(text, at):
        try:
            value, at = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, match.end()) + 1
            reason = f"message {n} is not valid JSON: {error}; is the file complete?"
            raise SourceText(path, text).error(line, reason) from None
        yield value
        n += 1


def _plain(node: Node) -> dict[str, Node]:
    """Return the fields of an object, by name in lower case and without underscores."""
    if not isinstance(node.value, dict):
        raise node.error(f"must be an object, not {shown(node.value)}")
    return {name.replace("_", "").lower(): node[name] for name in node.value}


def _node(place: Node, fields: dict[str, Node]) -> TraceNode:
    for strange in [name for name in fields if name not in _FIELDS][:1]:
        raise place.error(f"{strange!r} is not a field of a node in Chakra's schema 0.0.4 to 1.0; leave it out")
    kind = fields["type"].value if "type" in fields else NODE_TYPES[0]
    if kind not in NODE_TYPES:
        raise place.error(f"type = {shown(kind)} is unknown; known: {listed(NODE_TYPES)}")
    inputs = _plain(fields["inputs"]) if "inputs" in fields else {}
    return TraceNode(
        number=_integer(fields["id"]) if "id" in fields else 0,
        name=fields["name"].text() if "name" in fields else "",
        type=NODE_TYPES.index(str(kind)),
        control=[_integer(item) for item in fields["ctrldeps"].items()] if "ctrldeps" in fields else [],
        data=[_integer(item) for item in fields["datadeps"].items()] if "datadeps" in fields else [],
        micros=_integer(fields["durationmicros"]) if "durationmicros" in fields else 0,
        inputs=inputs["values"].text() if "values" in inputs else "",
        attributes=_attributes(fields),
    )


def _attributes(fields: dict[str, Node]) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {}
    for entry in fields["attr"].items() if "attr" in fields else []:
        parts = _plain(entry)
        if "name" not in parts:
            raise entry.error("has no name; every attribute needs one")
        value: Attribute = 0
        for kind, part in parts.items():
            if kind.endswith("val"):
                value = _scalar(kind, part)
            elif kind.endswith("list"):
                values = _plain(part)
                value = [_scalar(kind, item) for item in values["values"].items()] if "values" in values else []
        attributes[parts["name"].text()] = value
    return attributes


def _scalar(kind: str, part: Node) -> Scalar:
    if _WHOLE.fullmatch(kind):
        return _integer(part, least=-(2**63))
    if kind.startswith(("double", "float")):
        return part.number()
    if kind.startswith("bool"):
        if not isinstance(part.value, bool):
            raise part.error(f"must be true or false, not {shown(part.value)}")
        return part.value
    return part.text()


def _integer(node: Node, least: int = 0) -> int:
    """Return an integer, which may be written as a string."""
    value = node.value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    number = finite(value)
    if number is None or number != int(number) or not least <= int(number) < 2**64:
        rule = f"an integer of at least {least}" if least else "a non-negative integer"
        raise node.error(f"{shown(node.value)} must be {rule}")
    return value if isinstance(value, int) else int(number)


_KIND_OF = {
    **{name: KINDS.index(name.lower()) for name in COLLECTIVES[:8]},
    "REDUCE_SCATTER_BLOCK": KINDS.index("reduce_scatter"),
    "BARRIER": KINDS.index("all_reduce"),
}
_MAX_RANKS = 10**5


@checked
def read_chakra(
    path: str | Path,
    *,
    n_ranks: int | None = None,
    groups: str | Path | Mapping[str, Sequence[int]] | None = None,
    flops: float | str | None = None,
    memory_bandwidth: float | str | None = None,
) -> Plan:
    """Read a plan from Chakra execution traces, one file per rank: ``step.0.et``, ``step.1.et``, ...

    path              path to the file of rank 0, or the common part of all paths, as for ASTRA-sim: ``step`` or
                      ``step.et``. JSON output of ``chakra_jsonizer`` (``step.0.json``) is also accepted
    n_ranks           number of ranks that execute the trace, if there is a single file for all ranks
    groups            ranks of each process group: a mapping from the group's ``pg_name``, or a file in ASTRA-sim's
                      format. None: the groups that PyTorch recorded in the trace or, if none are recorded, the ranks
                      whose files contain the group
    flops             compute rate, such as "100 TFLOP/s", for nodes that have ``num_ops`` but no duration
    memory_bandwidth  memory bandwidth, such as "2 TB/s". If it is set, such a node takes at least the time to move
                      ``tensor_size`` bytes (roofline model)

    A trace written by :meth:`ddlsim.plan.Plan.to_chakra` is read as the same plan. In other traces, the nodes of a
    stream (or thread) run in the order in which they could start; without streams, a rank does one computation and one
    exchange at a time, as in ASTRA-sim. ``comm_size`` is the size of a rank's input: for an all-gather, its own part.

    Raises ConfigError, naming file and node, for an invalid trace and for content that a plan cannot express.
    """
    files = trace_files(Path(path))
    traces = [(file, *_nodes(file)) for file in files]
    if is_plan(traces[0][1]):
        return plan_of_files(traces)
    if not any(node.type for _, _, nodes in traces for node in nodes):
        raise ConfigError(f"{files[0]}: contains no nodes; is it a Chakra trace (schema 0.0.4 or later)?")
    if n_ranks is not None:
        if len(files) > 1 or not 1 <= n_ranks <= _MAX_RANKS:
            raise ConfigError(
                f"read_chakra: n_ranks = {n_ranks} has no effect with {len(files)} files; leave n_ranks out"
            )
        traces *= n_ranks
    speed = si(flops, "flops") if flops is not None else None
    moves = si(memory_bandwidth, "bandwidth") if memory_bandwidth is not None else None
    ranks_by_name = _groups(groups) if groups is not None else _created(traces)
    for name, ranks in ranks_by_name.items():
        if ranks and max(ranks) >= len(traces):
            raise ConfigError(
                f"{files[0]}: process group {name!r} contains rank {max(ranks)}, but only {len(traces)} ranks have "
                "traces; provide one file per rank, or set n_ranks if all ranks run the same trace"
            )
    using: dict[str, list[int]] = {}
    for rank, (_, _, nodes) in enumerate(traces):
        for name in {str(node.attributes.get("pg_name", "")) for node in nodes if node.kind == "COMM_COLL_NODE"}:
            using.setdefault(name, []).append(rank)
    everyone = tuple(range(len(traces)))
    members = {name: ranks_by_name.get(name) or (tuple(ranks) if name else everyone) for name, ranks in using.items()}
    operations: list[Operation] = []
    for rank, (file, _, nodes) in enumerate(traces):
        reader = _Rank(rank, file, members, speed, moves)
        number = reader.numbers(nodes, len(operations))
        operations += [reader.operation(node, number) for node in nodes]
    return plan_of_operations(operations, len(traces))


def _nodes(file: Path) -> tuple[dict[str, Attribute], list[TraceNode]]:
    if re.match(rb"\s*\{\s*[\"}]", read_bytes(file)):
        return json_nodes(file, read_text(file).text)
    return read_nodes(file)


def trace_files(path: Path) -> list[Path]:
    """Return the files of all ranks, or the only file. Raises ConfigError if there is none, or if one is missing."""
    match = re.fullmatch(r"(.*)\.(\d{1,6})(\.(?:et|json)(?:\.gz)?)", path.name)
    stem, suffix = (match[1], match[3]) if match else (path.name.removesuffix(".et"), ".et")
    pattern = re.compile(re.escape(stem) + r"\.(\d{1,6})" + re.escape(suffix))
    try:
        names = {int(m[1]): file for file in path.parent.iterdir() if (m := pattern.fullmatch(file.name))}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}; check the path") from None
    if not names:
        if os.path.isfile(path):
            return [path]
        raise ConfigError(f"{path}: no such file, and there is no {stem}.0{suffix} in its folder; check the path")
    if list(names.values()) == [path]:  # one file for all ranks
        return [path]
    for missing in sorted(set(range(len(names))) - set(names))[:1]:
        raise ConfigError(
            f"{path.parent / f'{stem}.{missing}{suffix}'}: no such file, although there is "
            f"{names[max(names)].name}; provide one file per rank, numbered from 0"
        )
    return [names[rank] for rank in range(len(names))]


# ---------------------------------------------------------------- process groups


def _groups(groups: str | Path | Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group, from a mapping or a file ``{"1": [0, 1], "2": [2, 3]}``."""
    where, content = "read_chakra: groups", groups
    if isinstance(groups, str | Path):
        where = str(groups)
        try:
            content = json.loads(read_bytes(Path(groups)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{where}: invalid JSON ({error}); expected a mapping such as {{"1": [0, 1]}}') from None
    if not isinstance(content, Mapping):
        raise ConfigError(f'{where}: must map names of groups to lists of ranks, such as {{"1": [0, 1]}}')
    return {str(name): _ranks(where, name, ranks) for name, ranks in content.items()}


def _ranks(where: str, name: object, ranks: object) -> tuple[int, ...]:
    are_ranks = isinstance(ranks, Sequence) and all(type(rank) is int and 0 <= rank < _MAX_RANKS for rank in ranks)
    if not isinstance(ranks, Sequence) or not are_ranks or len(set(ranks)) < len(ranks):
        raise ConfigError(f"{where}: group {shown(name)} = {shown(ranks)}: must be a list of distinct ranks")
    return tuple(ranks)


def _created(traces: Sequence[tuple[Path, Mapping[str, Attribute], Sequence[TraceNode]]]) -> dict[str, tuple[int, ...]]:
    """Return the groups in PyTorch's ``process_group:init`` nodes."""
    ranks_by_name: dict[str, tuple[int, ...]] = {}
    for file, _, nodes in traces[:1]:
        for node in nodes:
            text = node.inputs[node.inputs.find("[{") : node.inputs.rfind("}]") + 2]
            if node.kind != "METADATA_NODE" or not text.startswith("[{"):
                continue
            try:
                content = json.loads(text.replace('\\"', '"'))
            except (ValueError, RecursionError):
                continue
            for group in content:
                if isinstance(group, dict) and "pg_name" in group and group.get("ranks"):
                    where = f"{file}: node {node.number}"
                    ranks_by_name[str(group["pg_name"])] = _ranks(where, group["pg_name"], group["ranks"])
    return ranks_by_name


# ---------------------------------------------------------------- nodes


class _Rank:
    """The nodes of one rank as operations."""

    def __init__(
        self, rank: int, file: Path, groups: Mapping[str, tuple[int, ...]], flops: float | None, moves: float | None
    ) -> None:
        self.rank, self.file, self.groups, self.flops, self.moves = rank, file, groups, flops, moves
        self.calls = False

    def error(self, node: TraceNode, reason: str) -> ConfigError:
        return ConfigError(f"{self.where(node)}: {reason}")

    def where(self, node: TraceNode) -> str:
        return f"{self.file}: node {node.number} ({shown(node.name)}, {node.kind})"

    def numbers(self, nodes: Sequence[TraceNode], begin: int) -> dict[int, int]:
        """Return the index among the operations of each node, by its number."""
        # PyTorch's control dependencies are caller relations (some on the node itself); the other dependencies define
        # the order
        self.calls = any("rf_id" in node.attributes for node in nodes)
        number: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if node.number in number:
                raise self.error(node, "another node has the same number; numbers must be unique")
            number[node.number] = begin + i
        return number

    def operation(self, node: TraceNode, number: Mapping[int, int]) -> Operation:
        operation = Operation(self.rank, self.where(node), name=node.name)
        for need in (*node.data, *(() if self.calls else node.control)):
            if need not in number:
                raise self.error(node, f"depends on node {need}, which is not in the file; is it complete?")
            operation.needs.append(number[need])
        stream = node.attributes.get("stream")
        lane = f"stream {shown(stream)}" if stream is not None else None
        if node.kind in ("INVALID_NODE", "METADATA_NODE"):
            return operation
        work = node.kind not in ("COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE")
        if node.attributes.get("is_cpu_op"):
            # PyTorch's calls of collectives have a duration but no size; the actual communication is in their kernels
            work |= "comm_size" not in node.attributes and self.seconds(node) > 0.0
            if work:
                thread = node.attributes.get("tid")
                lane = "cpu" if thread is None else f"cpu {shown(thread)}"
        if work:
            memory = node.kind in ("MEM_LOAD_NODE", "MEM_STORE_NODE")
            operation.lane, operation.seconds = lane or ("memory" if memory else "compute"), self.seconds(node)
            if memory and not operation.seconds and self.amount(node, "tensor_size"):
                raise self.error(
                    node, "accesses memory but has no duration, and a plan has no separate memory; set its duration"
                )
        else:
            self.convert_communication(node, operation, lane)
        return operation

    def convert_communication(self, node: TraceNode, operation: Operation, lane: str | None) -> None:
        """Convert a node of communication to an operation."""
        barrier = node.kind == "COMM_COLL_NODE" and node.attributes.get("comm_type") == COLLECTIVES.index("BARRIER")
        operation.nbytes = self.amount(node, "comm_size", 0 if barrier else None)
        operation.tag = self.amount(node, "comm_tag")
        if node.kind == "COMM_COLL_NODE":
            operation.lane = lane or "stream"
            operation.group = self.groups[str(node.attributes.get("pg_name", ""))]
            kind = self.amount(node, "comm_type", None)
            if kind >= len(COLLECTIVES):
                raise self.error(node, f"comm_type = {kind}: the schema defines 0 to {len(COLLECTIVES) - 1}")
            operation.kind = _KIND_OF[COLLECTIVES[kind]]
            if operation.kind in (ALL_GATHER, GATHER):  # the size is that of a rank's own part
                operation.nbytes *= len(operation.group)
            if self.rank not in operation.group:
                raise self.error(node, f"rank {self.rank} is not in its group {list(operation.group)}")
            dims = node.attributes.get("involved_dim")
            if isinstance(dims, list) and not all(dims):
                raise self.error(
                    node,
                    f"involved_dim = {shown(dims)}: a plan has groups of ranks, not network dimensions; set its "
                    "group (pg_name)",
                )
            return
        sends = node.kind == "COMM_SEND_NODE"
        operation.kind, operation.lane = SEND if sends else RECEIVE, lane or ("stream" if sends else None)
        local, remote = ("comm_src", "comm_dst") if sends else ("comm_dst", "comm_src")
        if self.amount(node, local, self.rank) != self.rank:
            raise self.error(node, f"{local} = {node.attributes[local]}, in the file of rank {self.rank}")
        operation.peer = self.amount(node, remote, None)
        if operation.peer == self.rank:
            raise self.error(node, f"{remote} = {self.rank}: must be another rank; leave the message out")

    def seconds(self, node: TraceNode) -> float:
        """Return the compute time of a node: as measured, or from its number of operations."""
        micros = node.micros or self.amount(node, "runtime")
        n_ops = self.amount(node, "num_ops")
        if micros or not n_ops:
            if micros > 1e6 * LARGEST:
                raise self.error(node, f"its duration of {micros} us is out of range")
            return 1e-6 * micros
        if self.flops is None:
            raise self.error(node, f"has num_ops = {n_ops} but no duration; pass flops='...' to read_chakra")
        memory = self.amount(node, "tensor_size") / self.moves if self.moves is not None else 0.0
        return max(n_ops / self.flops, memory)

    def amount(self, node: TraceNode, name: str, default: int | None = 0) -> int:
        """Return a node's attribute, which must be a non-negative integer."""
        value = node.attributes.get(name, default)
        if value is None:
            raise self.error(node, f"has no {name}, which a plan needs")
        if isinstance(value, list | str) or not 0 <= value < 2**63 or value != int(value):
            raise self.error(node, f"{name} = {shown(value)}: must be a non-negative integer")
        return int(value)


# ---------------------------------------------------------------- plans as traces


_PLAN, _LANES = "ddlsim.plan", "ddlsim.lanes"
#: default values of columns, which are not written; lane and kind always are
_DEFAULTS = {name: -1 if name in ("name", "peer", "key", "batch", "part") else 0 for name in COLUMNS[2:]}
_QUEUES = {"urgent": PriorityQueue, "fused": FusedQueue}


def to_chakra(plan: Plan, path: str | Path) -> list[Path]:
    """Write a plan as Chakra execution traces (schema 0.0.4), one file per rank, and return the files.

    path  ``step.et``: writes ``step.0.et``, ``step.1.et``, ... as ASTRA-sim takes them; if collectives have smaller
          groups, also ``step.groups.json`` for its ``--comm-group-configuration``

    Times in traces are whole microseconds; attributes ``ddlsim.*`` hold the exact ones, and everything else that
    :func:`ddlsim.plan.read_chakra` needs for the same plan. Push-pulls become messages to servers
    and back. Raises ConfigError for plans that no trace can express: dependencies between ranks without a message, and
    custom queues.
    """
    stem, plan = Path(str(path).removesuffix(".et")), as_messages(plan)
    refuse_needs_across_ranks(plan, "to_chakra", "a trace")
    common = json.dumps({
        "groups": plan.groups, "parts": plan.parts, "names": plan.names, "n_layers": plan.n_layers,
        "n_ranks": plan.n_ranks, "queues": [_encoded_queue(queue) for queue in plan.queues], "delays": plan.delays,
        "tensor": plan.tensor, "servers": plan.servers, "notes": plan.notes,
    })  # fmt: skip
    files = []
    for rank in range(plan.n_ranks):
        rows = np.flatnonzero(plan.rank == rank).tolist()
        lanes = json.dumps([[i, lane.name, lane.queue] for i, lane in enumerate(plan.lanes) if lane.rank == rank])
        files.append(stem.with_name(f"{stem.name}.{rank}.et"))
        write_nodes(files[-1], {_PLAN: common, _LANES: lanes}, [_task_node(plan, row) for row in rows])
    partial = {str(i + 1): group for i, group in enumerate(plan.groups) if len(group) < plan.n_ranks}
    if partial:
        files.append(stem.with_name(f"{stem.name}.groups.json"))
        write_text(files[-1], json.dumps(partial))
    return files


def _encoded_queue(queue: object) -> list[object]:
    for name, kind in _QUEUES.items():
        if type(queue) is kind:
            return [name, vars(queue)]
    raise ConfigError(f"to_chakra: queue {queue!r} cannot be stored in a trace; use PriorityQueue or FusedQueue")


def _task_node(plan: Plan, row: int) -> TraceNode:
    kind, nbytes = int(plan.kind[row]), float(plan.nbytes[row])
    attributes: dict[str, Attribute] = {"is_cpu_op": False}
    type_name = "COMP_NODE"
    if kind in (SEND, RECEIVE):
        type_name = "COMM_SEND_NODE" if kind == SEND else "COMM_RECV_NODE"
        ends = (int(plan.rank[row]), int(plan.peer[row]))
        src, dst = ends if kind == SEND else ends[::-1]
        attributes |= {"comm_src": src, "comm_dst": dst, "comm_tag": int(plan.key[row])}
    elif kind >= ALL_REDUCE:
        type_name, group = "COMM_COLL_NODE", plan.groups[plan.peer[row]]
        attributes["comm_type"] = COLLECTIVES.index(KINDS[kind].upper())
        if len(group) < plan.n_ranks:
            attributes["pg_name"] = str(int(plan.peer[row]) + 1)
        nbytes /= len(group) if kind in (ALL_GATHER, GATHER) else 1
    if kind >= SEND:
        attributes["comm_size"] = round(nbytes)
    for name in COLUMNS:
        value = getattr(plan, name)[row].item()
        if value != _DEFAULTS.get(name):
            attributes[f"ddlsim.{name}"] = value
    needs = plan.needs_of(row)
    before = int(plan.previous[row])
    return TraceNode(
        row,
        plan._what(row),
        NODE_TYPES.index(type_name),
        control=[before] if before >= 0 else [],
        data=needs,
        micros=round(1e6 * float(plan.seconds[row])),
        attributes=attributes,
    )


# ---------------------------------------------------------------- and back


def is_plan(metadata: Mapping[str, Attribute]) -> bool:
    """Return whether a trace was written by :func:`to_chakra`."""
    return _PLAN in metadata


def plan_of_files(traces: Sequence[tuple[Path, Mapping[str, Attribute], Sequence[TraceNode]]]) -> Plan:
    """Return the plan that these traces store. Raises ConfigError, naming the file, if they have been changed."""
    file, metadata, _ = traces[0]
    try:
        common = json.loads(str(metadata[_PLAN]))
        if common["n_ranks"] != len(traces):
            raise ConfigError(
                f"{file}: the plan consists of {common['n_ranks']} files, but its folder contains only "
                f"{len(traces)}; put all files into one folder"
            )
        return _plan(traces, common)
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{file}: the ddlsim attributes are damaged ({type(error).__name__}: {error}); export the "
            "plan again, or remove these attributes to read the file as an ordinary trace"
        ) from None


def _plan(traces: Sequence[tuple[Path, Mapping[str, Attribute], Sequence[TraceNode]]], common: dict[str, Any]) -> Plan:
    lanes: dict[int, Lane] = {}
    nodes: dict[int, TraceNode] = {}
    for rank, (_, metadata, mine) in enumerate(traces):
        for number, name, queue in json.loads(str(metadata[_LANES])):
            lanes[int(number)] = Lane(rank, str(name), int(queue))
        nodes.update((node.number, node) for node in mine)
    n = sum(len(mine) for _, _, mine in traces)
    if set(nodes) != set(range(n)) or set(lanes) != set(range(len(lanes))):
        raise ValueError("rows or lanes are missing")
    ordered = [nodes[row] for row in range(n)]
    columns: dict[str, Any] = {
        name: np.array([node.attributes.get(f"ddlsim.{name}", default) for node in ordered])
        for name, default in _DEFAULTS.items()
    }
    columns |= {name: np.array([node.attributes[f"ddlsim.{name}"] for node in ordered]) for name in COLUMNS[:2]}
    needs = [node.data for node in ordered]
    return Plan(
        lanes=tuple(lanes[i] for i in range(len(lanes))),
        queues=tuple(_QUEUES[name](**arguments) for name, arguments in common["queues"]),
        groups=tuple(tuple(int(rank) for rank in group) for group in common["groups"]),
        parts=tuple(Part(float(size), *map(int, layers)) for size, *layers in common["parts"]),
        names=tuple(str(name) for name in common["names"]),
        n_layers=int(common["n_layers"]),
        delays=tuple(map(int, common["delays"])),
        tensor=int(common["tensor"]),
        servers=tuple(map(int, common["servers"])),
        notes=tuple(map(str, common["notes"])),
        need_offsets=np.cumsum([0, *map(len, needs)]),
        needs=np.array([need for one in needs for need in one], dtype=np.int64),
        **columns,
    )
