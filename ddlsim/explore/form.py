"""The form beside every screen: widgets of a `Setup`, and a message where what they say makes no sense."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import tempfile
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import panel as pn

import ddlsim
from ddlsim.arguments.annotations import rule_of
from ddlsim.arguments.checking import annotations_of
from ddlsim.bundled import split_options
from ddlsim.cluster import cluster_names
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.explore.pieces import UPLOADED, message
from ddlsim.explore.setup import Setup
from ddlsim.output_files import replacing
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, ORDERS
from ddlsim.run.files import COMPRESSORS, OVERLAPS, SCHEMA, STRATEGIES
from ddlsim.schema import Names, members, toml_value
from ddlsim.workload.model import model_names
from ddlsim.workload.precision import GRADIENT_TYPES

# ---------------------------------------------------------------- settings, read off classes

#: what people change most: shown at once, the others on request
COMMON = (
    "algorithm", "overlap", "tensor", "pipeline", "data", "micro_batch", "order", "stage", "servers", "placement",
    "period", "groups", "ways", "sharding", "probability", "fraction",
)  # fmt: skip

#: names that fields take which have no list of their own
WORDS = (
    "simulated", "calibrated", "nccl", "topology", "given", "own", "colocated", "none", "selective", "full",
    "early-stop", "fp32", "fp16", "bf16", "ring", "complete", "bipartite", "exponential", "table-wise", "row-wise",
    "column-wise", "balance", "exchanged", "prefetched", "data-parallel", "one rank", "sgd", "rowwise_adagrad",
    "inverse", "square-root", "maintain", "reset", "average",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One field of a form.

    kind      "flag", "count", "choice" or "text"
    choices   of a choice; the first is what the class does by default
    default   None: it has none, or it is worked out
    needed    whether something must be given
    about     what its class says about it
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()
    default: object = None
    needed: bool = False
    about: str = ""

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name.replace("_", " ").capitalize()


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return what a strategy or compressor can be told in a file, common things first."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    about = _descriptions(kind)
    made = [
        _setting(kind, name, annotation, defaults.get(name), about.get(name, ""))
        for name, annotation in SCHEMA.arguments_of(kind).items()
    ]
    return tuple(sorted(made, key=lambda each: not (each.needed or each.name in COMMON)))


def _setting(kind: type, name: str, annotation: object, default: object, about: str) -> Setting:
    must = default is dataclasses.MISSING
    kinds = set(members(annotation)) - {type(None)}
    is_text = str in kinds or any(typing.get_origin(each) is typing.Literal for each in kinds)
    choices = _choices(kind, name) if is_text else ()
    known = default if isinstance(default, str | int | float) else None
    if bool in kinds:
        return Setting(name, "flag", (), known, must, about)
    if choices:
        first = (str(known),) if known in choices else ("",)
        return Setting(name, "choice", (*first, *(each for each in choices if each != known)), known, must, about)
    return Setting(name, "count" if kinds == {int} else "text", (), known, must, about)


def _choices(kind: type, name: str) -> tuple[str, ...]:
    """Return the names that the class takes for one of its fields."""
    annotation = annotations_of(kind)[name]
    literals = _literals(annotation)
    if literals:
        return literals
    rule = rule_of(annotation)
    if rule is None:
        return ()
    taken = []
    for word in _vocabulary(name):
        try:
            rule(word, name)
        except ConfigError:
            continue
        taken.append(word)
    return tuple(taken)


def _literals(annotation: object) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(each for each in typing.get_args(annotation) if isinstance(each, str))
    return tuple(word for each in typing.get_args(annotation) for word in _literals(each))


def _vocabulary(name: str) -> Iterable[str]:
    """Return names that may stand in a field."""
    if name in ("reduce_scatter", "all_gather", "all_to_all"):
        return ("default", *ddlsim.algorithm_names(name))
    if name == "shared_norms":
        return ddlsim.algorithm_names("all_gather")
    if name in ("algorithm", "all_reduce"):
        return ("default", "auto", *ddlsim.algorithm_names("all_reduce"))
    if name == "overlap":
        return (*OVERLAPS, "megatron")
    if name == "order":
        return (*ORDERS, *ASYNCHRONOUS)
    return WORDS


def _descriptions(kind: type) -> dict[str, str]:
    """Return what the class's docstring says about its fields: lines of a name, two spaces and a text."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        lines = inspect.cleandoc(base.__doc__ or "").splitlines()
        name = ""
        for line in lines:
            begins = re.match(r"(\w+)  +(\S.*)", line)
            if begins and line[0] != " ":
                name, text = begins[1], begins[2]
                found[name] = text
            elif name and line.startswith("  "):
                found[name] += " " + line.strip()
            else:
                name = ""
    return {name: re.sub(r":\w+:`~?([\w.]*\.)?(\w+)`", r"\2", text).replace("``", "") for name, text in found.items()}


# ---------------------------------------------------------------- form

OWN = "own ..."
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
#: what is seen where nothing is written
OTHERS = 'max_time = "720 h"\n[failures]\nmtbf = "5000 h"\n[checkpoints]\nevery = "1 h"\nto = "peers"'


def form(setup: Setup) -> pn.Column:
    """Return the widgets of the setup, in cards."""
    problem = message("")

    def tell() -> None:
        try:
            setup.experiment()
        except DdlsimError as error:
            problem.object = message(str(error)).object
        else:
            problem.object = ""

    setup.when_changed(tell)
    return pn.Column(
        problem,
        _card("Cluster and model", [
            *_source(setup, "cluster", cluster_names()), *_source(setup, "model", model_names()),
            _count(setup, "workers", "Workers (empty: all devices)"), _count(setup, "batch_size", "Batch size"),
        ]),
        _choice_card(setup, "Strategy", "strategy", "settings", STRATEGIES, setup.choose_strategy),
        _choice_card(setup, "Compression", "compression", "compression_settings", COMPRESSORS,
                     setup.choose_compression),
        _card("More", [
            _count(setup, "accumulation", "Micro-steps per exchange"),
            _select(setup, "precision", "Arithmetic", PRECISIONS),
            _select(setup, "gradient_dtype", "Gradients on the wire", GRADIENT_TYPES),
            pn.widgets.FloatInput.from_param(setup.param.jitter, label="Jitter (coefficient of variation)", step=0.05,
                                             start=0.0, sizing_mode="stretch_width"),
            _count(setup, "steps", "Measured steps (empty: 10)"), _count(setup, "seed", "Seed"),
            pn.widgets.TextAreaInput.from_param(setup.param.others, label="Other fields, as in experiment files",
                                                placeholder=OTHERS, rows=6, sizing_mode="stretch_width"),
        ], collapsed=True),
        sizing_mode="stretch_width",
    )  # fmt: skip


def _card(title: str, widgets: Sequence[Any], collapsed: bool = False) -> pn.Card:
    return pn.Card(*widgets, title=title, collapsed=collapsed, sizing_mode="stretch_width", margin=(4, 0))


def _count(setup: Setup, name: str, label: str) -> pn.widgets.IntInput:
    return pn.widgets.IntInput.from_param(setup.param[name], label=label, sizing_mode="stretch_width")


def _select(setup: Setup, name: str, label: str, options: Sequence[str]) -> pn.widgets.Select:
    return pn.widgets.Select.from_param(
        setup.param[name], label=label, options=list(options), sizing_mode="stretch_width"
    )


def _source(setup: Setup, name: str, presets: Sequence[str]) -> list[Any]:
    """Return the widgets of a cluster or a model: a preset, or any text; a file can be uploaded."""
    choice = pn.widgets.Select(label=name.capitalize(), options=[*presets, OWN], sizing_mode="stretch_width")
    text = pn.widgets.TextInput.from_param(
        setup.param[name], label=f"{name.capitalize()} or file, with +key=value", sizing_mode="stretch_width"
    )
    upload = pn.widgets.FileInput(label=f"Upload a {name} file", sizing_mode="stretch_width")

    def show(*_: object) -> None:
        stem = split_options(getattr(setup, name))[0]
        choice.value = stem if stem in presets else OWN

    def chosen(event: Any) -> None:
        if event.new != OWN and event.new != split_options(getattr(setup, name))[0]:
            setup.param.update(**{name: event.new})

    def uploaded(event: Any) -> None:
        if event.new and upload.filename:
            setup.param.update(**{name: str(_kept(str(upload.filename), event.new))})

    setup.param.watch(show, name)
    choice.param.watch(chosen, "value")
    upload.param.watch(uploaded, "value")
    show()
    return [choice, text, upload]


def _kept(name: str, content: bytes) -> Path:
    """Write an uploaded file to a folder of its own, under its name; a plus in it would begin a setting."""
    folder = Path(tempfile.mkdtemp(prefix=UPLOADED))
    path = folder / (re.sub(r"[^\w.-]", "_", Path(name).name).lstrip(".") or "file")
    with replacing(path) as file:
        file.write(content)
    return path


def _choice_card(
    setup: Setup, title: str, field: str, settings: str, kinds: Names, choose: Callable[[str], None]
) -> pn.Card:
    """Return a choice of a class and widgets of what it can be told."""
    choice = pn.widgets.Select(
        label=title, options=sorted(kinds), value=getattr(setup, field), sizing_mode="stretch_width"
    )
    common = pn.Column(sizing_mode="stretch_width", margin=0)
    others = pn.Card(title="More settings", collapsed=True, sizing_mode="stretch_width", margin=(4, 0), visible=False)

    def fill(*_: object) -> None:
        kind = kinds.get(getattr(setup, field))
        found = settings_of(kind) if kind is not None else ()
        widgets = {each: _widget(setup, settings, each) for each in found}
        common[:] = [widget for each, widget in widgets.items() if each.needed or each.name in COMMON]
        others[:] = [widget for each, widget in widgets.items() if not (each.needed or each.name in COMMON)]
        others.visible = bool(len(others))
        choice.value = getattr(setup, field)

    def chosen(event: Any) -> None:
        if event.new != getattr(setup, field):
            choose(event.new)

    choice.param.watch(chosen, "value")
    setup.param.watch(fill, field)
    fill()
    return _card(title, [choice, common, others])


def _widget(setup: Setup, settings: str, setting: Setting) -> Any:
    """Return the widget of one setting, which changes the setup's table of them."""
    value = getattr(setup, settings).get(setting.name)
    more: dict[str, Any] = {"label": setting.label, "sizing_mode": "stretch_width"}
    if setting.about:
        more["description"] = setting.about
    if setting.kind == "flag":
        widget: Any = pn.widgets.Checkbox(label=setting.label, value=bool(setting.default if value is None else value))
    elif setting.kind == "choice":
        labels = {each or "default": each for each in setting.choices}
        widget = pn.widgets.Select(options=labels, value=setting.choices[0] if value is None else value, **more)
    elif setting.kind == "count":
        shown = setting.default if value is None else value
        widget = pn.widgets.IntInput(value=shown if isinstance(shown, int) else None, **more)
    else:
        default = "" if setting.default is None else str(setting.default)
        widget = pn.widgets.TextInput(value="" if value is None else _written(value), placeholder=default, **more)

    def changed(event: Any) -> None:
        table = dict(getattr(setup, settings))
        table.pop(setting.name, None)
        if event.new not in (None, "") and (event.new != setting.default or setting.needed):
            table[setting.name] = event.new
        setup.param.update(**{settings: table})

    widget.param.watch(changed, "value")
    return widget


def _written(value: object) -> str:
    """Return a value as TOML writes it; texts without quotes."""
    return value if isinstance(value, str) else toml_value(value)
