"""Plans as Chakra execution traces, and back without loss: attributes store what the schema lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.output_files import write_text
from ddlsim.plan.chakra_file import COLLECTIVES, NODE_TYPES, Attribute, TraceNode, write_nodes
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, COLUMNS, GATHER, KINDS, RECEIVE, SEND, Lane, Part, Plan
from ddlsim.plan.queues import FusedQueue, PriorityQueue
from ddlsim.plan.rows import refuse_needs_across_ranks
from ddlsim.plan.servers import as_messages

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
        write_nodes(files[-1], {_PLAN: common, _LANES: lanes}, [_node(plan, row) for row in rows])
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


def _node(plan: Plan, row: int) -> TraceNode:
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
    each = [nodes[row] for row in range(n)]
    columns: dict[str, Any] = {
        name: np.array([node.attributes.get(f"ddlsim.{name}", default) for node in each])
        for name, default in _DEFAULTS.items()
    }
    columns |= {name: np.array([node.attributes[f"ddlsim.{name}"] for node in each]) for name in COLUMNS[:2]}
    needs = [node.data for node in each]
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
