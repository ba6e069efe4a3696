"""The page: a form at the side, one screen at a time, served only on this machine.

Requests must be addressed to this machine's host names. Any web page can make a browser send a request to this machine,
so requests can only set values of the form, within limits: they cannot run code, start simulations, build huge clusters
or read files.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import ipaddress
import json
import re
import tempfile
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode, urlsplit

import panel as pn
from bokeh.server.server import Server
from panel.theme import fast
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import RequestHandler

import ddlsim
from ddlsim import plain
from ddlsim.arguments.annotations import rule_of
from ddlsim.arguments.checking import annotations_of
from ddlsim.bundled import split_options
from ddlsim.cluster import cluster_names, load_cluster
from ddlsim.cluster.quantity import limit_size
from ddlsim.collectives.schedule import KINDS
from ddlsim.errors import ConfigError, DdlsimError, shown
from ddlsim.explore.components import UPLOADED, message
from ddlsim.explore.jobs import Jobs
from ddlsim.explore.screens import cluster, collective, learning, run, scaling, what_if
from ddlsim.explore.setup import FIELDS, Setup
from ddlsim.output_files import replacing
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, ORDERS
from ddlsim.readable import in_words
from ddlsim.run.files import COMPRESSORS, OVERLAPS, SCHEMA, STRATEGIES
from ddlsim.schema import Names, members, toml_value
from ddlsim.strategies.gossip import NAMES
from ddlsim.workload.model import model_names
from ddlsim.workload.precision import ELEMENT_NBYTES, GRADIENT_TYPES
from ddlsim.workload.stacks import stack_names

#: settings that are always shown; the others are shown on request
COMMON = {"algorithm", "overlap", "tensor", "pipeline", "data", "micro_batch", "order", "stage", "servers"}
COMMON |= {"placement", "period", "groups", "degree", "sharding", "probability", "fraction"}


@dataclass(frozen=True)
class Setting:
    """One field of a form.

    kind      "flag", "count", "choice" or "text"
    choices   options of a choice; the first is the default of the class
    default   None: no default, or a computed one
    needed    whether a value is required
    about     description from the class's docstring
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()
    default: object = None
    needed: bool = False
    about: str = ""

    @property
    def label(self) -> str:
        """Label in the form."""
        return in_words(self.name)[:1].upper() + in_words(self.name)[1:]


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return the settings of a strategy or compressor, common ones first."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    about = _descriptions(kind)
    settings = [
        _setting(kind, name, annotation, defaults.get(name), about.get(name, ""))
        for name, annotation in SCHEMA.arguments_of(kind).items()
    ]
    return tuple(sorted(settings, key=lambda setting: not (setting.needed or setting.name in COMMON)))


def _setting(kind: type, name: str, annotation: object, default: object, about: str) -> Setting:
    must = default is dataclasses.MISSING
    kinds = set(members(annotation)) - {type(None)}
    is_text = str in kinds or any(typing.get_origin(member) is typing.Literal for member in kinds)
    choices = _choices(kind, name) if is_text and int not in kinds else ()
    value = default if isinstance(default, str | int | float) else None
    if bool in kinds:
        return Setting(name, "flag", (), value, must, about)
    if choices:
        first = (str(value),) if value in choices else ("",)
        return Setting(name, "choice", (*first, *(text for text in choices if text != value)), value, must, about)
    return Setting(name, "count" if kinds == {int} else "text", (), value, must, about)


def _choices(kind: type, name: str) -> tuple[str, ...]:
    rule, taken = rule_of(annotations_of(kind)[name]), list[str]()
    if rule is None or rule.words:
        return () if rule is None else rule.words
    for word in _vocabulary().get(name, ()):
        with suppress(ConfigError):
            rule(word, name)
            taken.append(word)
    return tuple(taken)


def _vocabulary() -> Mapping[str, Sequence[str]]:
    """Return the names for fields whose rules do not list them; each class accepts some of them."""
    collectives = {kind: ("default", *ddlsim.algorithm_names(kind)) for kind in KINDS}
    reduces = ("default", "auto", *collectives["all_reduce"][1:])
    others = {"algorithm": reduces, "all_reduce": reduces, "shared_norms": collectives["all_gather"][1:]}
    others |= {"overlap": (*OVERLAPS, "megatron"), "order": (*ORDERS, *ASYNCHRONOUS), "graph": NAMES}
    return collectives | others


def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of fields in a class's docstring: lines with a name, two spaces and a text."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        lines = inspect.cleandoc(base.__doc__ or "").splitlines()
        name = ""
        for line in lines:
            begins = re.match(r"(\w+)  +(\S.*)", line)
            if begins and line[0] != " ":
                name, text = begins[1], begins[2]
                texts[name] = text
            elif name and line.startswith("  "):
                texts[name] += " " + line.strip()
            else:
                name = ""
    return {name: re.sub(r":\w+:`~?([\w.]*\.)?(\w+)`", r"\2", text).replace("``", "") for name, text in texts.items()}


CUSTOM = "own ..."
#: placeholders of empty fields
PLACEHOLDER = 'max_time = "720 h"\n[failures]\nmtbf = "5000 h"\n[checkpoints]\nevery = "1 h"\nto = "peers"'


def form(setup: Setup) -> pn.Column:
    """Return the widgets of the setup, grouped in cards."""
    problem = message("")

    def tell() -> None:
        text = ""
        try:
            setup.experiment()
        except DdlsimError as error:
            text = str(error)
        problem.object = message(text).object

    setup.when_changed(tell)
    return pn.Column(
        problem,
        _card("Cluster and model", [
            *_source(setup, "cluster", cluster_names()), *_source(setup, "model", model_names()),
            _count(setup, "workers", "Workers (empty: all devices)"),
            _count(setup, "batch_size", "Batch size (empty: default)"),
        ]),
        _choice_card(setup, "Strategy", "strategy", "settings", STRATEGIES, setup.choose_strategy),
        _choice_card(setup, "Compression", "compression", "compression_settings", COMPRESSORS,
                     setup.choose_compression),
        _card("More", [
            _count(setup, "accumulation", "Micro-steps per exchange"),
            _select(setup, "precision", "Arithmetic", ELEMENT_NBYTES),
            _select(setup, "stack", "Software", stack_names()),
            _select(setup, "gradient_dtype", "Gradients on the wire", GRADIENT_TYPES),
            pn.widgets.FloatInput.from_param(setup.param.jitter, label="Jitter (coefficient of variation)", step=0.05,
                                             start=0.0, sizing_mode="stretch_width"),
            _count(setup, "steps", "Measured steps (empty: 10)"), _count(setup, "seed", "Seed"),
            pn.widgets.TextAreaInput.from_param(setup.param.others, label="Other fields, as in experiment files",
                                                placeholder=PLACEHOLDER, rows=6, sizing_mode="stretch_width"),
        ], collapsed=True),
        sizing_mode="stretch_width",
    )  # fmt: skip


def _card(title: str, widgets: Sequence[Any], collapsed: bool = False) -> pn.Card:
    return pn.Card(*widgets, title=title, collapsed=collapsed, sizing_mode="stretch_width", margin=(4, 0))


def _count(setup: Setup, name: str, label: str) -> pn.widgets.IntInput:
    return pn.widgets.IntInput.from_param(setup.param[name], label=label, sizing_mode="stretch_width")


def _select(setup: Setup, name: str, label: str, options: Iterable[str]) -> pn.widgets.Select:
    labels = {"default": "", **{option: option for option in options}}
    return pn.widgets.Select.from_param(setup.param[name], label=label, options=labels, sizing_mode="stretch_width")


def _source(setup: Setup, name: str, presets: Sequence[str]) -> list[Any]:
    """Return the widgets for a cluster or a model: a preset, any text, or an uploaded file."""
    choice = pn.widgets.Select(label=name.capitalize(), options=[*presets, CUSTOM], sizing_mode="stretch_width")
    text = pn.widgets.TextInput.from_param(
        setup.param[name], label=f"{name.capitalize()} or file, with +key=value", sizing_mode="stretch_width"
    )
    upload = pn.widgets.FileInput(label=f"Upload a {name} file", sizing_mode="stretch_width")

    def show(*_: object) -> None:
        stem = split_options(getattr(setup, name))[0]
        choice.value = stem if stem in presets else CUSTOM

    def chosen(event: Any) -> None:
        if event.new != CUSTOM and event.new != split_options(getattr(setup, name))[0]:
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
    """Write an uploaded file to its own folder, under its name without plus signs, which would start a setting."""
    folder = Path(tempfile.mkdtemp(prefix=UPLOADED))
    path = folder / (re.sub(r"[^\w.-]", "_", Path(name).name).lstrip(".") or "file")
    with replacing(path) as file:
        file.write(content)
    return path


def _choice_card(
    setup: Setup, title: str, field: str, settings: str, kinds: Names, choose: Callable[[str], None]
) -> pn.Card:
    """Return a card for the choice of a class, with widgets of its settings."""
    choice = pn.widgets.Select(
        label=title, options=sorted(kinds), value=getattr(setup, field), sizing_mode="stretch_width"
    )
    common = pn.Column(sizing_mode="stretch_width", margin=0)
    others = pn.Card(title="More settings", collapsed=True, sizing_mode="stretch_width", margin=(4, 0), visible=False)

    def fill(*_: object) -> None:
        kind = kinds.get(getattr(setup, field))
        offered = settings_of(kind) if kind is not None else ()
        widgets = {setting: _widget(setup, settings, setting) for setting in offered}
        common[:] = [widget for setting, widget in widgets.items() if setting.needed or setting.name in COMMON]
        others[:] = [widget for setting, widget in widgets.items() if not (setting.needed or setting.name in COMMON)]
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
    """Return the widget of one setting, which updates the setup's table of settings."""
    value = getattr(setup, settings).get(setting.name)
    more: dict[str, Any] = {"label": setting.label, "sizing_mode": "stretch_width"}
    if setting.about:
        more["description"] = setting.about
    if setting.kind == "flag":
        widget: Any = pn.widgets.Checkbox(label=setting.label, value=bool(setting.default if value is None else value))
    elif setting.kind == "choice":
        several = [choice for choice in setting.choices if choice != "default" or "" not in setting.choices]
        labels = {choice or "default": choice for choice in several}
        widget = pn.widgets.Select(options=labels, value=setting.choices[0] if value is None else value, **more)
    elif setting.kind == "count":
        shown = setting.default if value is None else value
        widget = pn.widgets.IntInput(value=shown if isinstance(shown, int) else None, **more)
    else:
        default = "" if setting.default is None else str(setting.default)
        text = "" if value is None else value if isinstance(value, str) else toml_value(value)
        widget = pn.widgets.TextInput(value=text, placeholder=default, **more)

    def changed(event: Any) -> None:
        table = dict(getattr(setup, settings))
        table.pop(setting.name, None)
        if event.new not in (None, "") and (event.new != setting.default or setting.needed):
            table[setting.name] = event.new
        setup.param.update(**{settings: table})

    widget.param.watch(changed, "value")
    return widget


#: limits on values in addresses: integers, length of a text and of a word in it
MOST = {"workers": 4096, "batch_size": 2**20, "accumulation": 1024, "steps": 1000}
MOST_TEXT, MOST_WORD = 2000, 250
REFUSAL = "This host name or origin is not accepted; open http://localhost, or start with --host NAME."
#: maximum nodes and links of a cluster that the explorer builds, which takes about a second
MOST_NODES, MOST_LINKS = 20_000, 100_000


class Foreign(Matcher):
    """Matches requests that are not addressed to this machine, or come from a page of another server.

    A foreign domain name that resolves to this machine's address (DNS rebinding) is not accepted: `hosts` are the names
    accepted in addition to localhost and loopback addresses.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = {host.lower() for host in hosts}

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return {} for a request to be rejected, else None."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        try:
            name, page = urlsplit(f"//{host}").hostname or "", urlsplit(origin or f"//{host}")
            same_origin = page.netloc.lower() == host.lower() or page.hostname in self._hosts
            accepted = name in (*self._hosts, "localhost") or ipaddress.ip_address(name).is_loopback
        except ValueError:  # not an address
            return {}
        return None if same_origin and accepted else {}


class Refusal(RequestHandler):
    """Rejects requests that are :class:`Foreign`."""

    def prepare(self) -> None:
        """Reject every method."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(REFUSAL)


def fill_in(setup: Setup, query: Mapping[str, object]) -> list[str]:
    """Set the form from an address's settings. Returns a line for each setting that is ignored, with the reason."""
    left_out = []
    for name, value in query.items():
        if name in (*FIELDS, "screen"):
            try:
                _check(name, value)
                setup.param.update(**{name: str(value) if name in ("cluster", "model") else value})
            except ValueError as error:
                left_out.append(f"{name} in the address is ignored: {error}")
    return left_out


def _check(name: str, value: object) -> None:
    """Raise ConfigError for a value that exceeds the limits."""
    plain.checked(value, name)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MOST_TEXT or (isinstance(value, str) and max(map(len, text.split()), default=0) > MOST_WORD):
        raise ConfigError(
            f"the value has {len(text)} characters; at most {MOST_TEXT} are allowed, and at most {MOST_WORD} per word"
        )
    if re.search(r"""(^|["'=\s])[\\/]{2}""", text):
        raise ConfigError("the value refers to a folder on another computer; enter the value in the form")
    if name in MOST and isinstance(value, int | float) and value > MOST[name]:
        raise ConfigError(f"{shown(value)} exceeds the limit of {MOST[name]}; enter the value in the form")


#: screens in the order of the buttons
SCREENS: tuple[ModuleType, ...] = (cluster, run, what_if, scaling, learning, collective)
ADDRESS = "127.0.0.1"
#: if there is no space for the form beside a screen, it is above it, initially closed; also makes Panel's click-only
#: elements usable with the keyboard
NARROW = """
<style>
@media (max-width: 767px) {
  #sidebar:not(.hidden) { position: fixed; z-index: 10; left: 0; min-width: 100vw; max-width: 100vw;
                          background: var(--background-color); box-sizing: border-box; }
  #header .title { font-size: 1.1em; }
  #main { padding: 0 4px; }
}
.fullscreen-button { display: none; }
#sidebar-button:focus-visible, #theme-switch:focus-visible { outline: 2px solid white; outline-offset: 3px; }
</style>
<script>
document.addEventListener('DOMContentLoaded', () => {
  const button = document.getElementById('sidebar-button');
  button.tabIndex = 0;
  button.setAttribute('role', 'button');
  button.setAttribute('aria-label', 'Settings');
  button.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); button.click(); }
  });
  document.getElementById('theme-switch').setAttribute('aria-label', 'Light or dark');
  if (window.innerWidth < 768) closeNav();
}, { once: true });  // a library announces it again when its own parts are loaded
</script>
"""


class Fast(fast.Fast):
    """Panel's design without the font from the internet. Panel finds its files by the class name."""

    _resources = {**fast.Fast._resources, "font": {}}  # noqa: RUF012


def new_setup(cluster_name: str | None, model: str | None) -> Setup:
    """Return the initial state of a page. Raises ConfigError for an invalid cluster or model."""
    from ddlsim.workload.model import load_model

    setup = Setup()
    if cluster_name is not None:
        load_cluster(cluster_name)
        setup.cluster = cluster_name
    if model is not None:
        load_model(model)
        setup.model = model
    return setup


def screens(setup: Setup, jobs: Jobs) -> tuple[pn.FlexBox, pn.Column]:
    """Return the buttons that choose a screen, and the chosen one's container; screens are built when first shown."""
    place = pn.Column(sizing_mode="stretch_width")
    contents: dict[str, Any] = {}
    modules = {module.NAME: module for module in SCREENS}
    start = pn.widgets.Button(label="Start", margin=4)
    start.button_type = "primary"
    buttons = {name: pn.widgets.Button(label=module.TITLE, margin=4) for name, module in modules.items()}

    def show(*_: object) -> None:
        if setup.screen not in modules:
            setup.screen = SCREENS[0].NAME
            return
        for name, button in buttons.items():
            button.button_type = "primary" if name == setup.screen else "default"
        start.visible = not setup.started and setup.screen not in ("cluster", "learning")  # these need no start
        if setup.screen not in contents:
            contents[setup.screen] = modules[setup.screen].screen(setup, jobs)
        place[:] = [contents[setup.screen]]

    def go(name: str, _: object) -> None:
        setup.screen = name

    def begin(_: object) -> None:
        setup.started = True

    for name, button in buttons.items():
        button.on_click(functools.partial(go, name))
    start.on_click(begin)
    setup.param.watch(show, ["screen", "started"])
    show()
    return pn.FlexBox(*buttons.values(), start), place


def template(setup: Setup) -> pn.template.FastListTemplate:
    """Return the page of one visitor; nothing is simulated before Start, because the address may be foreign."""
    setup.started = False
    left_out = keep_in_address(setup)
    buttons, place = screens(setup, Jobs())
    content = {"sidebar": [form(setup)], "main": [*map(message, left_out), buttons, place], "main_layout": None}
    look = {"font_url": "", "font": "system-ui, sans-serif", "design": Fast, "accent": "#33628f"}
    look |= {"sidebar_width": 320, "sidebar_footer": NARROW, "main_max_width": "1200px"}
    return pn.template.FastListTemplate(title="ddlsim explorer", **content, **look)


def keep_in_address(setup: Setup) -> list[str]:
    """Apply the settings in the page's address, and write changes to it, so that links and reloads show the same page.

    Returns the reasons for ignored settings.
    """
    location = pn.state.location
    if location is None:
        return []
    kept = (*FIELDS, "screen")
    left_out = fill_in(setup, location.query_params)

    def write(*_: object) -> None:
        others = {name: value for name, value in location.query_params.items() if name not in kept}
        changed = {name: getattr(setup, name) for name in kept if getattr(setup, name) != setup.param[name].default}
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in changed.items()}
        location.search = f"?{urlencode(others | texts)}" if others or texts else ""

    setup.param.watch(write, list(kept))
    return left_out


def server(cluster_name: str | None, model: str | None, port: int, browser: bool, hosts: Sequence[str]) -> Server:
    """Return a server of the explorer, not started yet. Raises ConfigError for invalid names, and for a port in use."""
    shown = load_cluster(new_setup(cluster_name, model).cluster)
    limit_size(max(MOST_NODES, shown.n_nodes), max(MOST_LINKS, shown.n_links))
    try:
        options = {"address": ADDRESS, "port": port, "show": browser, "start": False, "verbose": True}
        service: Server = pn.serve(lambda: template(new_setup(cluster_name, model)), title="ddlsim explorer", **options)
    except OSError as error:
        raise ConfigError(
            f"port = {port}: cannot be used ({error.strerror or error}); choose another one, or 0 for any free port"
        ) from None
    service._tornado.default_router.rules.insert(0, Rule(Foreign(hosts), Refusal))
    service._tornado.websocket_origins.add("*")  # the rule has rejected all others
    return service


def serve(cluster_name: str | None, model: str | None, port: int, browser: bool, hosts: Sequence[str] = ()) -> None:
    """Serve the explorer until Ctrl-C. Raises the same errors as :func:`server`."""
    service = server(cluster_name, model, port, browser, hosts)
    service.start()
    service.io_loop.start()


def in_notebook(cluster_name: str | None, model: str | None) -> pn.Row:
    """Return form and screens side by side."""
    setup = new_setup(cluster_name, model)
    buttons, place = screens(setup, Jobs())
    return pn.Row(pn.Column(form(setup), width=320), pn.Column(buttons, place, sizing_mode="stretch_width"))
