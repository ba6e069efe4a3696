"""Protocol buffers on the wire: numbered fields of a message, and messages one after the other, each with its length.

What Chakra's three messages need of https://protobuf.dev/programming-guides/encoding. The library itself would be a
dependency that many environments pin to a version of their own, for the sake of a few fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
_ONE_BYTE = [bytes([value]) for value in range(0x80)]

#: a field's value: a number below 2^64, or bytes (of both fixed sizes too)
Value = int | bytes


class WireError(Exception):
    """The bytes are no such message; the reader of a file says which file."""


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the messages of a file, each of which stands behind its length."""
    at = 0
    while at < len(data):
        begin = at
        length, at = _varint(data, at, len(data))
        if length > len(data) - at:
            raise WireError(f"byte {begin}: a message of {length} bytes is announced, {len(data) - at} are left")
        yield at, data[at : at + length]
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
            raise WireError(f"field {number} has the wire type {wire}, which no field of this format has")
        if not number or length > end - at:
            raise WireError(f"field {number} is cut off: {length} bytes announced, {end - at} are left")
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
    raise WireError("a number is cut off" if at >= end else "a number has more than 64 bits")


def signed(value: int) -> int:
    """Return a number of 64 bits in two's complement."""
    return value - 2**64 if value >= 2**63 else value


# ---------------------------------------------------------------- writing


def varint(value: int) -> bytes:
    """Return a number, seven bits a byte; negative ones as 64 bits in two's complement."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put(number: int, value: int | float | str | bytes) -> bytes:
    """Return a field: whole numbers as varints, others as doubles, texts and bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | FIXED64) + struct.pack("<d", value)
    data = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def lengthened(message: bytes) -> bytes:
    """Return a message behind its length."""
    return varint(len(message)) + message
