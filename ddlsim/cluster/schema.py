"""The TOML format of a cluster, checked strictly: an unknown key, a missing unit or a senseless number is an error.

The keys of `[generator]` and `[host]` are the parameters of the generator functions and of
:class:`~ddlsim.cluster.nodes.Host` or :class:`~ddlsim.cluster.nodes.MultiGpu` themselves, so they need no second
description. What ends in "bandwidth" is text like "25 Gbit/s", what ends in "latency" or "overhead" like "10 us".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from ddlsim.cluster import generators
from ddlsim.cluster.details import IDEAL, TRANSPORT_KEYS, LinkDetail, Told
from ddlsim.cluster.nodes import Graph, Host, Interior, MultiGpu
from ddlsim.cluster.quantity import MAX_NODES, nonnegative, positive
from ddlsim.cluster.routing import check_policy
from ddlsim.errors import ConfigError, listed, shown, unknown_name
from ddlsim.plain import parse_value

#: `type` of `[generator]` -> the function
GENERATORS: dict[str, Callable[..., Graph]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(generators.star, generators.ring, generators.line, generators.fully_connected, generators.torus),
        *(generators.hypercube, generators.leaf_spine, generators.fat_tree, generators.racks, generators.two_racks),
        generators.dragonfly,
    )
}

Table = dict[str, Any]  # as the TOML parser gives it; every value is checked below


def _text_with_unit(dimension: str, check: Callable[[object, str, str], float]) -> BeforeValidator:
    from ddlsim.units import DIMENSIONS

    def read(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f"a {dimension} is a text with a unit; write it like {DIMENSIONS[dimension][2]!r}")
        return check(value, dimension, "")

    return BeforeValidator(read)


Bandwidth = Annotated[float, _text_with_unit("bandwidth", positive)]
Time = Annotated[float, _text_with_unit("time", nonnegative)]
Power = Annotated[float, _text_with_unit("power", nonnegative)]
Size = Annotated[float, _text_with_unit("bytes", nonnegative)]
Price = Annotated[float, _text_with_unit("price", nonnegative)]
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Path = Annotated[list[str], Field(min_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class HostTable(_Strict):
    """`[[hosts]]`: one machine, or `count` of them called name0, name1, ... (besides the interior's keys)."""

    name: str
    count: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None


class SwitchTable(_Strict):
    """`[[switches]]`: one switch, or `count` of them called name0, name1, ..."""

    name: str
    count: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    power: Power | None = None
    reduces: bool = False
    source: str | None = None


class DetailTable(_Strict):
    """What a link does besides carrying bytes at a rate, see :class:`~ddlsim.cluster.details.LinkDetail`."""

    frame_header: Size = 0.0
    frame_payload: Size = 0.0
    burst: Size = 0.0
    reverse_load: Annotated[float, Field(ge=0, lt=1)] = 0.0
    transport: str = ""
    mtu: Size = 0.0
    connections: int = 1
    flow_rate: Bandwidth = 0.0
    window: Size = 0.0
    rendezvous: Size = 0.0
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    unordered: bool = False
    warm: bool = False
    buffer: Size = 0.0

    def detail(self, place: str) -> LinkDetail:
        """Return the checked details; `place` is where the table stands."""
        return Told(**{key: getattr(self, key) for key in DetailTable.model_fields}).detail(f"{place}: ")


class AllLinksTable(DetailTable):
    """`[link]`: details of all links of the given `kinds` (of all between hosts)."""

    kinds: Annotated[list[str], Field(min_length=1)] | None = None
    source: str | None = None


class StorageTable(_Strict):
    """`[[storage]]`: where data sets and checkpoints lie, joined to `at`, a switch, say (where there is one, that)."""

    name: str
    at: str | None = None
    read: Bandwidth
    write: Bandwidth | None = None
    operations: Annotated[float, Field(gt=0)] | None = None
    bandwidth: Bandwidth | None = None
    latency: Time | None = None
    source: str | None = None


class LinkTable(DetailTable):
    """`[[links]]`: between two names; `*` in a name makes one link for each match."""

    between: Pair
    bandwidth: Bandwidth
    latency: Time
    reverse_bandwidth: Bandwidth | None = None
    efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    shared: bool = False
    kind: str | None = None
    source: str | None = None


class RouteTable(_Strict):
    """`[[routes]]`: the path to take from its first to its last node, against the routing policy."""

    path: Path
    source: str | None = None


class ClusterFile(_Strict):
    """The whole file. `generator` and `host`, or else `hosts`, `switches`, `links`; `nodes`, `edges`."""

    name: str | None = None
    title: str = ""
    sources: list[str] = []
    notes: list[str] = []
    routing: Literal["shortest", "ecmp", "d-mod-k", "dimension-order", "fixed", "spray"] | None = None
    grid: list[int] = []
    switch_power: Power | None = None  # of every switch between the machines
    switch_reduces: bool | None = None  # whether each of them adds up what passes through it
    generator: Table | None = None
    link: Table | None = None
    host: Table | None = None
    hosts: list[Table] = []
    switches: list[Table] = []
    links: list[Table] = []
    storage: list[Table] = []
    nodes: list[Table] = []
    edges: list[Table] = []
    routes: list[Table] = []
    calibration: Table | None = None  # see calibration_table.py


def _one_line(error: ErrorDetails, model: type[BaseModel], place: str) -> ConfigError:
    """Return pydantic's first error as one line: place and field, value, rule, remedy."""
    where = ".".join([place, *map(str, error["loc"])]).strip(".") if error["loc"] else place
    value, kind, context = error["input"], error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_name("key", str(error["loc"][-1]), model.model_fields, place)
    if kind == "missing":
        return ConfigError(f"{where} is missing; add it to the file")
    if kind == "literal_error":
        choices = [choice for choice in str(context["expected"]).split("'") if choice not in ("", ", ", " or ")]
        return unknown_name(str(error["loc"][-1]), str(value), choices, place)
    text = str(context.get("error", error["msg"])).removeprefix(":").strip().replace(" after validation", "")
    if shown(value) in text:
        return ConfigError(f"{where}: {text}")
    return ConfigError(f"{where} = {shown(value)}: {text[:1].lower()}{text[1:]}")


Model = TypeVar("Model", bound=BaseModel)


def check_table(model: type[Model], table: object, place: str) -> Model:
    """Return `table` as a `model`, or raise :class:`ConfigError` in one line, naming the field."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # An unknown key explains a missing one: it is the misspelt one, so it goes first.
        errors = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise _one_line(errors[0], model, place) from None


@functools.cache
def _parameters(target: Callable[..., object]) -> type[BaseModel]:
    """Return the model of the keyword arguments of a generator or of an interior."""
    hints = get_type_hints(target)
    known: dict[str, Any] = {"source": (str | None, None)}
    for parameter in inspect.signature(target).parameters.values():
        kind = hints[parameter.name]
        if parameter.name == "host":
            continue  # a table of its own
        if parameter.name.endswith("bandwidth"):
            kind = Bandwidth
        elif parameter.name.endswith(("latency", "overhead")):
            kind = Time
        elif parameter.name.endswith("price"):
            kind = Price
        if parameter.default is inspect.Parameter.empty:
            known[parameter.name] = (kind, ...)
        else:
            known[parameter.name] = (kind | None if parameter.default is None else kind, parameter.default)
    return create_model(f"{target.__name__}_table", __config__=ConfigDict(extra="forbid", strict=True), **known)


def _arguments(target: Callable[..., object], table: Table, place: str) -> tuple[dict[str, Any], list[str]]:
    """Return the checked keyword arguments in `table`, and its source."""
    checked = check_table(_parameters(target), table, place)
    arguments = {name: getattr(checked, name) for name in checked.model_fields_set - {"source"}}
    source = getattr(checked, "source", None)
    return arguments, [source] if source else []


def interior(table: Table, place: str) -> tuple[Interior, list[str]]:
    """Return the machine that a `[host]` table describes (GPUs if it has `n_gpus`), and its source."""
    if "n_gpus" in table:
        return _machine(MultiGpu, table, place)
    only_gpu = {field.name for field in fields(MultiGpu)} - {field.name for field in fields(Host)}
    for key in sorted(table.keys() & only_gpu):
        raise ConfigError(f"{place}.{key} = {shown(table[key])} is for machines with GPUs; add n_gpus or remove it")
    return _machine(Host, table, place)


def _machine(kind: type[Host] | type[MultiGpu], table: Table, place: str) -> tuple[Interior, list[str]]:
    arguments, sources = _arguments(kind, table, place)
    try:
        return kind(**arguments), sources
    except ConfigError as error:
        raise type(error)(f"{place}: {error}") from None


def generate(table: Table, host: Interior) -> tuple[Graph, list[str]]:
    """Return the graph that a `[generator]` table describes, and the table's source."""
    parameters = dict(table)
    kind = parameters.pop("type", None)
    if kind is None:
        raise ConfigError(f"generator.type is missing; add one of {listed(sorted(GENERATORS))}")
    if not isinstance(kind, str) or kind not in GENERATORS:
        raise unknown_name("type", str(kind), GENERATORS, "generator")
    function = GENERATORS[kind]
    arguments, sources = _arguments(function, parameters, "generator")
    try:
        return function(host=host, **arguments), sources
    except ConfigError as error:
        place = "" if str(error).startswith("host: ") else "generator: "
        raise type(error)(f"{place}{error}") from None


def set_key(file: ClusterFile, setting: str) -> None:
    """Set a key of the file's [generator], [host] or [link] by a text like ``n_hosts=64`` or ``transport=roce``."""
    key, is_setting, text = setting.partition("=")
    if not is_setting:
        raise ConfigError(f"+{setting}: write +key=value with a key of [generator], [host] or [link], like +n_hosts=64")
    if key == "transport":
        _set_transport(file, parse_value(text))
        return
    if key == "storage":  # of a file whose machines meet in one switch
        file.storage = [*file.storage, {"name": "storage", "read": text}]
        return
    if key in DetailTable.model_fields:
        file.link = {**(file.link or {}), key: parse_value(text)}
        return
    if key == "routing":
        file.routing = check_policy(text, f"+{setting}")  # type: ignore[assignment]
        return
    if key == "switch_reduces":
        if text not in ("true", "false"):
            raise ConfigError(f"+{setting}: must be true or false")
        file.switch_reduces = text == "true"
        return
    if file.generator is None:
        raise ConfigError(f"+{setting}: the file has no [generator] whose keys could be set; change a copy of it")
    kind = GENERATORS.get(str(file.generator.get("type")))
    of_network = set(_parameters(kind).model_fields) if kind is not None else set()
    of_host = {field.name for field in fields(MultiGpu)}
    if key not in of_network | of_host:
        raise unknown_name("key", key, (of_network | of_host) - {"source"}, f"+{setting}")
    if key in of_network:
        file.generator[key] = parse_value(text)
    else:
        file.host = {**(file.host or {}), key: parse_value(text)}


def _set_transport(file: ClusterFile, name: object) -> None:
    """Let the links between hosts have this transport; what the file says of another one does not hold for it."""
    tables = (file.link or {}, *file.links, *file.edges)
    for table in tables:
        if table.get("transport", name) != name:
            for key in ("transport", "mtu", *TRANSPORT_KEYS):
                table.pop(key, None)
    if name != IDEAL and not any(table.get("transport") == name for table in tables):
        file.link = {**(file.link or {}), "transport": name}


def parse_file(table: Table) -> ClusterFile:
    """Return the checked outline of a file; its tables are checked when they are used."""
    file = check_table(ClusterFile, table, "")
    if file.generator is None and not (file.hosts or file.nodes):
        raise ConfigError("the file describes no machines; add [generator] (type = 'star', say) or [[hosts]]")
    if file.generator is not None:
        for key in ("hosts", "switches", "links", "nodes", "edges", "grid"):
            if getattr(file, key):
                raise ConfigError(f"{key} cannot stand beside [generator]; remove one of them")
    elif file.host is not None:
        raise ConfigError("[host] goes with [generator]; write these keys into [[hosts]]")
    return file
