"""Chakra execution traces as JSON: what ``chakra_jsonizer`` writes of a binary trace, one object for each message.

Shape: https://github.com/mlcommons/chakra (``src/jsonizer``), which is protobuf's mapping to JSON: names in camelCase
or as in the schema, whole numbers of 64 bits as texts, enumerations by name, what is 0 or empty left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ddlsim.errors import listed, shown
from ddlsim.imports.json_values import Node, finite
from ddlsim.imports.text import SourceText
from ddlsim.plan.chakra_file import NODE_TYPES, Attribute, Scalar, TraceNode

#: fields of a node, without capitals and underscores
_FIELDS = {
    "id", "name", "type", "ctrldeps", "datadeps", "starttimemicros", "durationmicros", "inputs", "outputs", "attr",
}  # fmt: skip
_WHOLE = re.compile(r"(?:u?int|sint|s?fixed)(?:32|64)(val|list)")


def json_nodes(path: Path, text: str) -> tuple[dict[str, Attribute], list[TraceNode]]:
    """Return the attributes of the metadata in `text`, and the nodes; raises ConfigError with place and reason."""
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
    """Yield the objects that stand one behind the other."""
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
    """Return the fields of an object by their names without capitals and underscores."""
    if not isinstance(node.value, dict):
        raise node.error(f"must be an object, not {shown(node.value)}")
    return {name.replace("_", "").lower(): node[name] for name in node.value}


def _node(place: Node, fields: dict[str, Node]) -> TraceNode:
    strange = next((name for name in fields if name not in _FIELDS), None)
    if strange is not None:
        raise place.error(f"{strange!r} is no field of a node of Chakra's schema 0.0.4 to 1.0; leave it out")
    kind = fields["type"].value if "type" in fields else NODE_TYPES[0]
    if kind not in NODE_TYPES:
        raise place.error(f"type = {shown(kind)} is unknown; known: {listed(NODE_TYPES)}")
    inputs = _plain(fields["inputs"]) if "inputs" in fields else {}
    return TraceNode(
        number=_whole(fields["id"]) if "id" in fields else 0,
        name=fields["name"].text() if "name" in fields else "", type=NODE_TYPES.index(str(kind)),
        control=[_whole(each) for each in fields["ctrldeps"].items()] if "ctrldeps" in fields else [],
        data=[_whole(each) for each in fields["datadeps"].items()] if "datadeps" in fields else [],
        micros=_whole(fields["durationmicros"]) if "durationmicros" in fields else 0,
        inputs=inputs["values"].text() if "values" in inputs else "", attributes=_attributes(fields),
    )  # fmt: skip


def _attributes(fields: dict[str, Node]) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {}
    for entry in fields["attr"].items() if "attr" in fields else []:
        parts = _plain(entry)
        if "name" not in parts:
            raise entry.error("has no name; give every attribute one")
        value: Attribute = 0
        for kind, part in parts.items():
            if kind.endswith("val"):
                value = _scalar(kind, part)
            elif kind.endswith("list"):
                values = _plain(part)
                value = [_scalar(kind, each) for each in values["values"].items()] if "values" in values else []
        attributes[parts["name"].text()] = value
    return attributes


def _scalar(kind: str, part: Node) -> Scalar:
    if _WHOLE.fullmatch(kind):
        return _whole(part, least=-(2**63))
    if kind.startswith(("double", "float")):
        return part.number()
    if kind.startswith("bool"):
        if not isinstance(part.value, bool):
            raise part.error(f"must be true or false, not {shown(part.value)}")
        return part.value
    return part.text()


def _whole(node: Node, least: int = 0) -> int:
    """Return a whole number, which may be written as a text."""
    value = node.value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        value = int(value)
    number = finite(value)
    if number is None or number != int(number) or not least <= int(number) < 2**64:
        raise node.error(f"{shown(node.value)} must be a whole number of at least {least}")
    return value if isinstance(value, int) else int(number)
