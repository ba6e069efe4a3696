"""The TOML format of a cluster, checked strictly: an unknown key, a missing unit or a senseless number is an
error.

The keys of `[generator]` and `[host]` are the parameters of the generator functions and of
:class:`~ddlsim.cluster.nodes.Host` or :class:`~ddlsim.cluster.nodes.MultiGpu` themselves, so they need no
second description. What ends in "bandwidth" is text like "25 Gbit/s", what ends in "latency" or "overhead"
like "10 us".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ddlsim.arguments import Count, Density, Rule, checked, one_of, quantity, whole
from ddlsim.cluster import direct, generators
from ddlsim.cluster.details import IDEAL, TRANSPORT_KEYS, Told
from ddlsim.cluster.nodes import Graph, Host, Interior, MultiGpu
from ddlsim.cluster.quantity import MAX_NODES
from ddlsim.cluster.routing import POLICIES, check_policy
from ddlsim.cluster.storage import Storage
from ddlsim.errors import ConfigError, listed, shown, unknown_name
from ddlsim.plain import parse_value
from ddlsim.schema import PLAIN, Source

#: `type` of `[generator]` -> the function
GENERATORS: dict[str, Callable[..., Graph]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        generators.star, direct.ring, direct.line, direct.fully_connected, direct.torus,
        direct.hypercube, generators.leaf_spine, generators.fat_tree, generators.racks,
        generators.two_racks, generators.dragonfly,
    )
}  # fmt: skip

Table = dict[str, Any]  # as the TOML parser gives it; every value is checked below
_Names = Annotated[Sequence[str], Rule("a list of at least 2 names", lambda value: _is_names(value, 2), lambda v, _: v)]
_Pair = Annotated[
    Sequence[str], Rule("a list of 2 names", lambda value: _is_names(value, 2) and len(value) == 2, lambda v, _: v)
]
_Machines = Annotated[int, whole(1, MAX_NODES)]
_Power = Annotated[float | str, quantity("power", zero=True)]


def _is_names(value: Any, least: int) -> bool:
    return isinstance(value, list | tuple) and len(value) >= least and all(isinstance(name, str) for name in value)


@checked
@dataclass(frozen=True)
class Numbered:
    """The first keys of `[[hosts]]`: one machine, or `count` of them called name0, name1, ..."""

    name: str
    count: _Machines | None = None

    @property
    def names(self) -> list[str]:
        """All names."""
        return [self.name] if self.count is None else [f"{self.name}{i}" for i in range(self.count)]


@checked
@dataclass(frozen=True)
class SwitchTable(Numbered):
    """`[[switches]]`: one switch, or `count` of them called name0, name1, ..."""

    power: Annotated[float, quantity("power", zero=True, si=True)] | None = None
    reduces: bool = False
    source: str | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class AllLinksTable(Told):
    """`[link]`: details of all links of the given `kinds` (of all between hosts)."""

    kinds: Sequence[str] | None = None
    source: str | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class StorageTable(Storage):
    """`[[storage]]`: where data sets and checkpoints lie, joined to `at`, a switch, say (where there is one, that)."""

    source: str | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class LinkTable(Told):
    """`[[links]]`: between two names; `*` in a name makes one link for each match."""

    between: _Pair
    bandwidth: Annotated[float, quantity("bandwidth", si=True)]
    latency: Annotated[float, quantity("time", zero=True, si=True)]
    reverse_bandwidth: Annotated[float, quantity("bandwidth", si=True)] | None = None
    efficiency: Density = 1.0
    shared: bool = False
    kind: str | None = None
    source: str | None = None


@checked
@dataclass(frozen=True)
class RouteTable:
    """`[[routes]]`: the path to take from its first to its last node, against the routing policy."""

    path: _Names
    source: str | None = None


@checked
@dataclass(frozen=True)
class ClusterFile:
    """The whole file. `generator` and `host`, or else `hosts`, `switches`, `links`; `nodes` and `edges`."""

    name: str | None = None
    title: str = ""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    routing: Annotated[str, one_of(*POLICIES)] | None = None
    grid: Sequence[Count] = ()
    switch_power: _Power | None = None  # of every switch between the machines
    switch_reduces: bool | None = None  # whether each of them adds up what passes through it
    generator: Mapping[str, object] | None = None
    link: Mapping[str, object] | None = None
    host: Mapping[str, object] | None = None
    hosts: Sequence[Mapping[str, object]] = ()
    switches: Sequence[Mapping[str, object]] = ()
    links: Sequence[Mapping[str, object]] = ()
    storage: Sequence[Mapping[str, object]] = ()
    nodes: Sequence[Mapping[str, object]] = ()
    edges: Sequence[Mapping[str, object]] = ()
    routes: Sequence[Mapping[str, object]] = ()
    calibration: Mapping[str, object] | None = None  # see calibration_table.py


def _call(make: Callable[..., Any], table: Mapping[str, object], place: str, **more: object) -> tuple[Any, list[str]]:
    """Return what a function or class makes of the arguments in a table, and the table's source."""
    arguments = dict(table)
    source = arguments.pop("source", None)
    if not isinstance(source, str | None):
        raise ConfigError(f"{place}.source = {shown(source)}: must be a text")
    for key in more.keys() & arguments.keys():
        raise unknown_name("key", key, PLAIN.arguments_of(make).keys() - more, place)
    checked_arguments = PLAIN.arguments(make, arguments, place)
    try:
        return make(**checked_arguments, **more), [source] if source else []
    except ConfigError as error:
        text = str(error)
        raise type(error)(text if text.startswith("host: ") else f"{place}: {text}") from None


def interior(table: Mapping[str, object], place: str) -> tuple[Interior, list[str]]:
    """Return the machine that a `[host]` table describes (GPUs if it has `n_gpus`), and its source."""
    if "n_gpus" in table:
        return _call(MultiGpu, table, place)
    only_gpu = {field.name for field in fields(MultiGpu)} - {field.name for field in fields(Host)}
    for key in sorted(table.keys() & only_gpu):
        raise ConfigError(f"{place}.{key} = {shown(table[key])} is for machines with GPUs; add n_gpus or remove it")
    return _call(Host, table, place)


def generate(table: Mapping[str, object], host: Interior) -> tuple[Graph, list[str]]:
    """Return the graph that a `[generator]` table describes, and the table's source."""
    parameters = dict(table)
    kind = parameters.pop("type", None)
    if kind is None:
        raise ConfigError(f"generator.type is missing; add one of {listed(sorted(GENERATORS))}")
    if not isinstance(kind, str) or kind not in GENERATORS:
        raise unknown_name("type", str(kind), GENERATORS, "generator")
    return _call(GENERATORS[kind], parameters, "generator", host=host)


def set_key(file: Table, setting: str) -> None:
    """Set a key of a file's [generator], [host] or [link] by a text like ``n_hosts=64`` or ``transport=roce``."""
    key, is_setting, text = setting.partition("=")
    if not is_setting:
        raise ConfigError(f"+{setting}: write +key=value with a key of [generator], [host] or [link], like +n_hosts=64")
    if key == "transport":
        _set_transport(file, parse_value(text))
    elif key == "storage":  # of a file whose machines meet in one switch
        file["storage"] = [*file.get("storage", []), {"name": "storage", "read": text}]
    elif key in {field.name for field in fields(Told)}:
        file["link"] = {**file.get("link", {}), key: parse_value(text)}
    elif key == "routing":
        file["routing"] = check_policy(text, f"+{setting}")
    elif key == "switch_reduces":
        if text not in ("true", "false"):
            raise ConfigError(f"+{setting}: must be true or false")
        file["switch_reduces"] = text == "true"
    else:
        _set_in_generator(file, key, parse_value(text), setting)


def _set_in_generator(file: Table, key: str, value: object, setting: str) -> None:
    if not isinstance(file.get("generator"), dict):
        raise ConfigError(f"+{setting}: the file has no [generator] whose keys could be set; change a copy of it")
    make = GENERATORS.get(str(file["generator"].get("type")))
    of_network = set() if make is None else PLAIN.arguments_of(make).keys() - {"host"}
    of_host = {field.name for field in fields(MultiGpu)}
    if key not in of_network | of_host:
        raise unknown_name("key", key, of_network | of_host, f"+{setting}")
    table = "generator" if key in of_network else "host"
    file[table] = {**file.get(table, {}), key: value}


def _set_transport(file: Table, name: object) -> None:
    """Let the links between hosts have this transport; what the file says of another one does not hold for it."""
    tables = (file.get("link", {}), *file.get("links", ()), *file.get("edges", ()))
    for table in tables:
        if table.get("transport", name) != name:
            for key in ("transport", "mtu", *TRANSPORT_KEYS):
                table.pop(key, None)
    if name != IDEAL and not any(table.get("transport") == name for table in tables):
        file["link"] = {**file.get("link", {}), "transport": name}


def parse_file(table: Table, settings: Sequence[str] = ()) -> ClusterFile:
    """Return the checked outline of a file, with some keys set; its tables are checked when they are used."""
    outline = Source(allow_code=True)  # nothing is imported here: tables are checked when they are used
    PLAIN.build(ClusterFile, table, "", outline, "")
    for setting in sorted(settings, key=lambda setting: not setting.startswith("transport=")):
        set_key(table, setting)
    file = PLAIN.build(ClusterFile, table, "", outline, "")
    if file.generator is None and not (file.hosts or file.nodes):
        raise ConfigError("the file describes no machines; add [generator] (type = 'star', say) or [[hosts]]")
    if file.generator is not None:
        for key in ("hosts", "switches", "links", "nodes", "edges", "grid"):
            if getattr(file, key):
                raise ConfigError(f"{key} cannot stand beside [generator]; remove one of them")
    elif file.host is not None:
        raise ConfigError("[host] goes with [generator]; write these keys into [[hosts]]")
    return file
