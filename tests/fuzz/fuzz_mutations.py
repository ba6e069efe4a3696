"""Malformed files from well-formed ones: every leaf, table and list replaced, left out, repeated; bytes changed; cut.

A *document* is a text or bytes of a format. :func:`mutations` yields (what was done, what writes the bytes) in a fixed
order: a run that takes a few of them writes no others.
"""

import csv
import io
import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from xml.etree import ElementTree

import yaml

DEEP = 5000


@dataclass(frozen=True)
class Raw:
    """Source text that stands for a value, whatever it is."""

    text: str


HUGE = "9" * 5000
#: what every language of plain values can say
VALUES = [
    "", "x", " ", "-1", "25", "nan", "25 Gbit/s", "-25 Gbit/s", "1e400 Gbit/s", "1e-320 s", "10 us", "1 MB", "NaN s",
    "none", "../..", "/", "\x7f\u202e", "\u00e9" * 300, "a:b", "os:system", "x" * 100_000,
    0, -1, 1, 2, 10**12, 2**63 - 1, -(2**63), 0.5, -0.5, 1e-99, 1e99, 1e308, True, False,
    [], [[]], [0], [-1], ["x"], [1, 2], {}, {"x": 1}, {"type": "x"}, {"type": []},
]  # fmt: skip
#: what only one of them says (or none of them)
SOURCES = {
    "toml": [
        "nan", "inf", "-inf", "1e-320", "1e400", HUGE, "-" + HUGE, str(2**63), "0x" + "f" * 3000, "1979-05-27",
        "07:32:00", "1979-05-27T07:32:00Z", "[" * DEEP + "]" * DEEP, "{a=" * DEEP + "1" + "}" * DEEP, "", "'''\n'''",
        '"\\uD800"', "[1, 'x', 2.0]",
    ],
    "json": [
        "NaN", "Infinity", "-Infinity", "null", "1e-320", "1e400", HUGE, str(2**63), str(10**400), '"\\ud800"',
        "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "", '"\\u0000"', "[null]", '{"id": 1}',
    ],
    "yaml": [
        ".nan", ".inf", "null", "1e-320", "1e400", HUGE, str(10**400), "[" * DEEP + "]" * DEEP, "", "&a [*a]", "!!x 1",
        "2001-01-01", "2001-99-01", "0b1", "~", "!!python/object/apply:os.system [x]", "*missing",
    ],
}  # fmt: skip
#: what is put anywhere
BYTES = [b"\0", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b'"', b"[", b"{", b"<", b"9" * 5000, b"\x1b[2J"]
#: what stands in place of a number, a word or an attribute in texts
WORDS = [
    "", "x", "0", "-1", "1", "nan", "inf", "-inf", "1e400", "1e-320", "1e99", HUGE, "10000000000000", "0x10", "1,5",
    "1_0", "\u0661", "\u00b2", "25Gbps", "-1s", "0-999999999999", "\u00e9" * 300, "\u202e", "a b", "'", '"', "<", "&",
    "true", "{}", "[]", "=1+1",
]  # fmt: skip


def mutations(document, language) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield every structured mutation of a document."""
    if language in ("toml", "json", "yaml"):
        yield from _trees(document, language)
    elif language == "xml":
        yield from _elements(document)
    elif language == "csv":
        yield from _tables(document)
    else:
        yield from _lines(document)


def damages(data: bytes, rng: random.Random, n: int) -> Iterator[tuple[str, bytes]]:
    """Yield `n` damaged copies: cut off, bytes changed, put in, taken out, parts exchanged."""
    for _ in range(n):
        kind = rng.choice(["cut", "change", "insert", "remove", "repeat", "swap"])
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        if kind == "cut":
            yield f"cut at {a}", data[:a]
        elif kind == "change":
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 1, 1, 5, 50])):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
            yield f"change near {a}", bytes(damaged)
        elif kind == "insert":
            part = rng.choice(BYTES)
            yield f"insert {part[:4]!r} at {a}", data[:a] + part + data[a:]
        elif kind == "remove":
            yield f"remove {a}:{b}", data[:a] + data[b:]
        elif kind == "repeat":
            yield f"repeat {a}:{b}", data[:b] + data[a:b] + data[b:]
        else:
            yield f"swap at {a}, {b}", data[b:] + data[a:b] + data[:a]


# ---------------------------------------------------------------- trees of plain values


def _trees(document, language):
    tree = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}[language](document)
    write = {"toml": toml_text, "json": json_text, "yaml": yaml_text}[language]
    values = [*VALUES, *map(Raw, SOURCES[language])]
    for path in places(tree):
        for value in values:
            yield f"{_name(path)} = {str(value)[:40]!r}", partial(_replaced, write, tree, path, value)
        for what, after in altered(tree, path):
            yield f"{_name(path)} {what}", partial(_written, write, after)
    if language == "toml":
        yield "5,000 dotted keys", partial(_encoded, document + "\n" + ".".join(["a"] * DEEP) + " = 1\n")
        yield "5,000 tables", partial(_encoded, document + "\n[" + ".".join(["a"] * DEEP) + "]\n")
    for source in SOURCES[language]:
        yield f"nothing but {source[:40]!r}", partial(_encoded, source)


def _written(write, tree):
    return _encoded(write(tree))


def _replaced(write, tree, path, value):
    return _encoded(write(changed(tree, path, value)))


def places(tree, path=()):
    """Yield the path of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(tree, path, value):
    """Return the tree with another value at a place."""
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def altered(tree, path):
    """Yield (what was done, tree): a value left out, repeated, renamed, put deeper."""
    *above, key = path
    parent = tree
    for step in above:
        parent = parent[step]
    if isinstance(parent, dict):
        rest = {k: v for k, v in parent.items() if k != key}
        yield "left out", changed(tree, above, rest)
        yield "renamed", changed(tree, above, {**rest, f"{key}x": parent[key]})
        yield "beside another", changed(tree, above, {**parent, "surprise": parent[key]})
        yield "beside a long name", changed(tree, above, {**parent, "y" * 10_000: 1})
        yield "without a name", changed(tree, above, {**rest, "": parent[key]})
    else:
        yield "left out", changed(tree, above, parent[:key] + parent[key + 1 :])
        yield "repeated", changed(tree, above, [*parent, parent[key]])
    yield "in a list", changed(tree, path, [parent[key]])
    yield "in a table", changed(tree, path, {"a": parent[key]})
    if isinstance(parent[key], list):
        yield "a thousand times", changed(tree, path, parent[key] * 1000)


def _name(path):
    return ".".join(map(str, path))[:80]


def _encoded(text):
    return text.encode("utf-8", "surrogatepass")


def json_text(value):
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {json_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(json_text, value)) + "]"
    return json.dumps(value)


def yaml_text(value):
    """Return the keys of a table on lines of their own, as people write them, the rest as JSON, which is YAML."""
    if not isinstance(value, dict):
        return json_text(value)
    return "".join(f"{key if key.isalpha() else json.dumps(key)}: {json_text(part)}\n" for key, part in value.items())


def toml_text(table):
    if not isinstance(table, dict):
        return _toml_value(table)
    return "".join(f"{_toml_string(key)} = {_toml_value(value)}\n" for key, value in table.items())


def _toml_value(value):
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_string(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _toml_string(text):
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------- XML, tables, lines


def _elements(document):
    def after(change):
        """Return what writes the document after `change(nodes)`, from the beginning each time."""

        def written():
            root = ElementTree.fromstring(document)
            change(list(root.iter()))
            return ElementTree.tostring(root, encoding="utf-8")

        return written

    nodes = list(ElementTree.fromstring(document).iter())
    for i, node in enumerate(nodes):
        for name in node.attrib:
            for word in WORDS:
                change = after(lambda nodes, i=i, name=name, word=word: nodes[i].set(name, word))
                yield f"{i} {node.tag}.{name} = {word[:40]!r}", change
            yield f"{i} {node.tag}.{name} left out", after(lambda nodes, i=i, name=name: nodes[i].attrib.pop(name))
        if node.text and node.text.strip():
            for word in WORDS:
                change = after(lambda nodes, i=i, word=word: setattr(nodes[i], "text", word))
                yield f"{i} {node.tag}: {word[:40]!r}", change
        yield f"{i} {node.tag} renamed", after(lambda nodes, i=i: setattr(nodes[i], "tag", "surprise"))
        for j, child in enumerate(node):
            yield f"{i} {node.tag} without {child.tag} {j}", after(lambda n, i=i, j=j: n[i].remove(n[i][j]))
            yield f"{i} {node.tag} with {child.tag} {j} twice", after(lambda n, i=i, j=j: n[i].append(n[i][j]))
            for k, other in enumerate(nodes[: i + 1]):
                if other.tag != child.tag:
                    yield (
                        f"{child.tag} {j} of {i} also in {k} {other.tag}",
                        after(lambda n, i=i, j=j, k=k: n[k].append(n[i][j])),
                    )
    data = ElementTree.tostring(nodes[0], encoding="utf-8")
    yield "an entity", partial(_encoded, '<!DOCTYPE x [<!ENTITY a "b">]>' + data.decode())
    yield "nested", partial(_encoded, "<a>" * DEEP + "</a>" * DEEP)
    yield "in itself", partial(_encoded, f"<a>{data.decode()}</a>")


def _tables(document):
    rows = [row for row in csv.reader(document.splitlines()) if row]

    def written(rows):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return _encoded(text.getvalue())

    def with_cell(i, j, word):
        return written([*rows[:i], [*rows[i][:j], word, *rows[i][j + 1 :]], *rows[i + 1 :]])

    for i, row in enumerate(rows):
        for j in range(len(row)):
            for word in WORDS:
                yield f"row {i} cell {j} = {word[:40]!r}", partial(with_cell, i, j, word)
        for what, part in (("gone", []), ("twice", [row, row]), ("short", [row[:-1]]), ("long", [[*row, "x"]])):
            yield f"row {i} {what}", partial(written, [*rows[:i], *part, *rows[i + 1 :]])
    for j in range(len(rows[0])):
        yield f"column {j} gone", partial(written, [row[:j] + row[j + 1 :] for row in rows])
        yield f"column {j} twice", partial(written, [[*row, *row[j : j + 1]] for row in rows])
    yield "an open quote", partial(_encoded, document + '"')
    yield "a huge cell", partial(_encoded, document + "x" * 200_000)


def _lines(document):
    lines = document.splitlines(keepends=True)

    def joined(*lines):
        return b"".join(line if isinstance(line, bytes) else _encoded(line) for line in lines)

    for i, line in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        numbers_inside = re.finditer(r"(?<=\S)-?\d+(?:\.\d+)?|-?\d+(?:\.\d+)?(?=\S)", line)
        for match in (*re.finditer(r"\S+", line), *numbers_inside):
            for word in WORDS:
                yield (
                    f"line {i}: {match[0][:20]!r} -> {word[:40]!r}",
                    partial(joined, *before, line[: match.start()], word, line[match.end() :], *after),
                )
        yield f"line {i} gone", partial(joined, *before, *after)
        yield f"line {i} twice", partial(joined, *before, line, line, *after)
        yield f"line {i} first", partial(joined, line, *before, *after)
        yield f"line {i} broken", partial(joined, *before, b"\xff", line, *after)
    yield "backwards", partial(joined, *reversed(lines))
    yield "many times", partial(joined, lines[-1] * 20_000)
