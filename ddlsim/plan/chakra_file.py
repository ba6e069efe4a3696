"""Reader and writer for files of Chakra execution traces, one per rank.

A file in MLCommons Chakra's schema (``et_def.proto``, 0.0.4 to 1.0; https://github.com/mlcommons/chakra) consists of a
``GlobalMetadata`` message and ``Node`` messages, each preceded by its length.

This module implements the part of the protocol buffers' encoding that these messages need
(https://protobuf.dev/programming-guides/encoding). It does not depend on the protobuf library, because many
environments pin that to another version.
"""

from __future__ import annotations

import functools
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlsim.errors import ConfigError
from ddlsim.imports.text import read_bytes
from ddlsim.output_files import replacing

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}

#: value of a field: a number below 2^64, or bytes (also for both fixed sizes)
Value = int | bytes


class WireError(Exception):
    """The bytes are not a valid message. Readers of files add the file's name."""


def messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a file, each of which is preceded by its length."""
    at = 0
    while at < len(data):
        begin = at
        length, at = _varint(data, at, len(data))
        if length > len(data) - at:
            raise WireError(
                f"byte {begin}: expected a message of {length} bytes, but only {len(data) - at} bytes are left"
            )
        yield data[at : at + length]
        at += length


def fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    """Yield (number, wire type, value) of the fields of a message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(data, at, end)
            yield number, wire, value
            continue
        if wire == BYTES:
            length, at = _varint(data, at, end)
        elif wire in _SIZES:
            length = _SIZES[wire]
        else:
            raise WireError(f"field {number} has wire type {wire}, which this format does not use")
        if not number or length > end - at:
            raise WireError(f"field {number} is truncated: expected {length} bytes, but only {end - at} are left")
        yield number, wire, data[at : at + length]
        at += length


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at
        shift += 7
    raise WireError("a number is truncated" if at >= end else "a number has more than 64 bits")


# ---------------------------------------------------------------- writing


def varint(value: int) -> bytes:
    """Encode a number with seven bits per byte; negative ones as 64 bits in two's complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put(number: int, value: int | float | str | bytes) -> bytes:
    """Encode a field: integers as varints, other numbers as doubles, strings and bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | FIXED64) + struct.pack("<d", value)
    data = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def lengthened(message: bytes) -> bytes:
    """Return a message preceded by its length."""
    return varint(len(message)) + message


#: indices are the numbers in the schema's NodeType and CollectiveCommType
NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)  # fmt: skip
COLLECTIVES = (
    "ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK", "BARRIER",
)  # fmt: skip

Scalar = int | float | bool | str
Attribute = Scalar | list[Scalar]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _unpacked(layout: str) -> tuple[int, Callable[[Any], Scalar]]:
    wire = FIXED64 if struct.calcsize(layout) == 8 else FIXED32
    return wire, lambda value: struct.unpack(layout, value)[0]


#: number of a scalar attribute -> (wire type, conversion); the list of such scalars has the next number
_SCALARS: dict[int, tuple[int, Callable[[Any], Scalar]]] = {
    **dict.fromkeys((7, 9), (VARINT, lambda value: value - 2**64 if value >= 2**63 else value)),
    **dict.fromkeys((11, 13), (VARINT, int)),
    **dict.fromkeys((15, 17), (VARINT, lambda value: value >> 1 ^ -(value & 1))),
    **{i: _unpacked(f"<{code}") for i, code in zip((3, 5, 19, 21, 23, 25), "dfIQiq", strict=True)},
    27: (VARINT, bool),
    **dict.fromkeys((29, 31), (BYTES, _text)),
}
_INT32, _INT64, _DOUBLE, _BOOL, _TEXT = 7, 9, 3, 27, 29


@dataclass
class TraceNode:
    """A node: its dependencies are numbers of nodes of the same file; times are in microseconds."""

    number: int = 0
    name: str = ""
    type: int = 0
    control: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    micros: int = 0
    inputs: str = ""
    attributes: dict[str, Attribute] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Name of the node's type."""
        return NODE_TYPES[self.type]


def is_chakra(path: str | Path) -> bool:
    """Return whether a file begins like a Chakra trace."""
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            start = gzip.GzipFile(fileobj=file).read(2**20) if packed else file.read(2**20)
        stream = messages(start)
        first, second = _metadata(next(stream)), next(stream, None)
        return first is not None and (second is None or _node(second).type > 0)
    except (WireError, OSError, ValueError, EOFError, zlib.error, StopIteration):
        return False


def read_nodes(path: Path) -> tuple[dict[str, Attribute], list[TraceNode]]:
    """Return the attributes of a file's metadata, and its nodes.

    Raises ConfigError with file, node and reason if the file or a part of it is invalid.
    """
    data = read_bytes(path)
    metadata: dict[str, Attribute] | None = None
    nodes: list[TraceNode] = []
    count = 0
    try:
        for count, message in enumerate(messages(data)):
            if count == 0:
                metadata = _metadata(message)
            if count or metadata is None:
                nodes.append(_node(message))
    except WireError as error:
        raise ConfigError(
            f"{path}: message {count}: {error}; is it a complete Chakra trace (schema 0.0.4 or later)?"
        ) from None
    if not data:
        raise ConfigError(f"{path}: the file is empty; is it a complete Chakra trace?")
    return metadata or {}, nodes


def _metadata(message: bytes) -> dict[str, Attribute] | None:
    """Return the attributes of a GlobalMetadata message; None if the message is not one."""
    attributes: dict[str, Attribute] = {}
    for number, wire, value in fields(message):
        if wire != BYTES or number > 2:
            return None
        if number == 2:
            name, attribute = _attribute(_bytes(number, value))
            attributes[name] = attribute
    return attributes


def _node(message: bytes) -> TraceNode:
    node = TraceNode()
    parts = list(fields(message))
    strange = max((number for number, _, _ in parts), default=0)
    if strange > 10:
        raise WireError(f"the node has field {strange}, as in schemas before 0.0.4, which are not supported")
    for number, wire, value in parts:
        if number in (4, 5):
            (node.control if number == 4 else node.data).extend(_numbers(number, wire, value))
        elif number == 10:
            name, attribute = _attribute(_bytes(number, value))
            node.attributes[name] = attribute
        elif number == 2:
            node.name = _text(_bytes(number, value))
        elif number == 8:
            node.inputs = next((_text(_bytes(n, v)) for n, _, v in fields(_bytes(number, value)) if n == 1), "")
        elif number in (1, 3, 7):
            if not isinstance(value, int):
                raise WireError(f"field {number} of the node is not an integer")
            setattr(node, {1: "number", 3: "type", 7: "micros"}[number], value)
    if node.type >= len(NODE_TYPES):
        raise WireError(f"node {node.number} has type {node.type}; the schema defines types 0 to {len(NODE_TYPES) - 1}")
    return node


def _bytes(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise WireError(f"field {number} is a number; expected a string or a message")
    return value


def _numbers(number: int, wire: int, value: int | bytes) -> list[int]:
    """Return the numbers of a repeated field, which is packed (as in proto3) or not."""
    if isinstance(value, int):
        return [value]
    if wire != BYTES:
        raise WireError(f"field {number} is not a list of integers")
    return [item for item in _packed(VARINT, value) if isinstance(item, int)]


def _packed(wire: int, data: bytes) -> list[int | bytes]:
    """Return the values of a packed field."""
    size = _SIZES.get(wire)
    if size is not None:
        if len(data) % size:
            raise WireError("a list of numbers is truncated")
        return [data[i : i + size] for i in range(0, len(data), size)]
    out: list[int | bytes] = []
    at = 0
    while at < len(data):
        value, at = _varint(data, at, len(data))
        out.append(value)
    return out


def _attribute(message: bytes) -> tuple[str, Attribute]:
    name = ""
    attribute: Attribute = 0
    for number, wire, value in fields(message):
        if number == 1:
            name = _text(_bytes(number, value))
        elif number in _SCALARS:
            attribute = _scalar(number, wire, value)
        elif number - 1 in _SCALARS:
            attribute = _list(number - 1, _bytes(number, value))
    return name, attribute


def _list(number: int, message: bytes) -> list[Scalar]:
    out: list[Scalar] = []
    expected = _SCALARS[number][0]
    for place, wire, value in fields(message):
        if place == 1 and wire == BYTES != expected:
            out += [_scalar(number, expected, item) for item in _packed(expected, _bytes(place, value))]
        elif place == 1:
            out.append(_scalar(number, wire, value))
    return out


def _scalar(number: int, wire: int, value: int | bytes) -> Scalar:
    """Return the value of an attribute whose field has this number."""
    expected, convert = _SCALARS[number]
    if wire == expected:
        return convert(value)
    raise WireError(f"field {number} of an attribute has wire type {wire}, which does not match its type")


# ---------------------------------------------------------------- writing


def write_nodes(path: Path, metadata: dict[str, Attribute], nodes: list[TraceNode]) -> None:
    """Write a trace."""
    with replacing(path) as file:
        head = put(1, "0.0.4") + b"".join(put(2, _encoded(*item)) for item in metadata.items())
        file.write(lengthened(head))
        for node in nodes:
            body = put(1, node.number) + put(2, node.name) + put(3, node.type)
            body += b"".join(put(4, need) for need in node.control) + b"".join(put(5, need) for need in node.data)
            body += put(7, node.micros) + b"".join(put(10, _encoded(*item)) for item in node.attributes.items())
            file.write(lengthened(body))


@functools.lru_cache(maxsize=1024)
def _named(name: str) -> bytes:
    return put(1, name)


def _encoded(name: str, value: Attribute) -> bytes:
    """Encode an attribute: tags and ranks as 32-bit integers, others as 64-bit ones, as ASTRA-sim reads them."""
    if isinstance(value, list):
        raise TypeError(f"attribute {name}: lists cannot be written")
    if isinstance(value, bool):
        number: int = _BOOL
    elif isinstance(value, int):
        number = _INT32 if name in ("comm_tag", "comm_src", "comm_dst") else _INT64
    else:
        number = _DOUBLE if isinstance(value, float) else _TEXT
    return _named(name) + put(number, int(value) if isinstance(value, bool) else value)
