"""The form beside every screen: widgets of a `Setup`, and a message where what they say makes no sense."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import panel as pn

from ddlsim.bundled import split_options
from ddlsim.cluster import cluster_names
from ddlsim.errors import DdlsimError
from ddlsim.explore.pieces import UPLOADED, message
from ddlsim.explore.settings import COMMON, Setting, settings_of
from ddlsim.explore.setup import Setup
from ddlsim.output_files import replacing
from ddlsim.run.files import COMPRESSORS, STRATEGIES
from ddlsim.schema import Names, toml_value
from ddlsim.workload.model import model_names
from ddlsim.workload.precision import GRADIENT_TYPES

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
