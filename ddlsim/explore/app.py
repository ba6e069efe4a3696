"""The page: a form at the side, one screen at a time, served on this machine alone.

What may reach the explorer: host names that are this machine's, and addresses that fill in the form within limits.

Any web page can make a browser send a request to this machine, so a request only fills in the form: it runs no code,
starts no simulation, builds no huge cluster and is shown no file.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any
from urllib.parse import urlencode, urlsplit

import panel as pn
from bokeh.server.server import Server
from panel.theme import fast
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import RequestHandler

from ddlsim import plain
from ddlsim.cluster import load_cluster
from ddlsim.cluster.quantity import limit_size
from ddlsim.errors import ConfigError, shown
from ddlsim.explore.form import form
from ddlsim.explore.jobs import Jobs
from ddlsim.explore.pieces import message
from ddlsim.explore.screens import cluster, collective, learning, run, scaling, what_if
from ddlsim.explore.setup import FIELDS, Setup

#: what an address may ask for: whole numbers, characters of a text and of a word in it
MOST = {"workers": 4096, "batch_size": 2**20, "accumulation": 1024, "steps": 1000}
MOST_TEXT, MOST_WORD = 2000, 250
REFUSAL = "This host name or origin is not accepted; open http://localhost, or start with --host NAME."
#: nodes and links of a cluster that the explorer builds, in about a second
MOST_NODES, MOST_LINKS = 20_000, 100_000


class Foreign(Matcher):
    """Matches requests that are not for this machine's names, or come from a page of another server.

    A name that anybody's DNS gives this machine's address (rebinding) is none of its names: `hosts` are those accepted
    besides localhost and loopback addresses.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = {host.lower() for host in hosts}

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return {} for a request to be refused, else None."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        try:
            name, page = urlsplit(f"//{host}").hostname or "", urlsplit(origin or f"//{host}")
            own = page.netloc.lower() == host.lower() or page.hostname in self._hosts
            accepted = name in (*self._hosts, "localhost") or ipaddress.ip_address(name).is_loopback
        except ValueError:  # no address, or not even a name
            return {}
        return None if own and accepted else {}


class Refusal(RequestHandler):
    """Answers what is :class:`Foreign`."""

    def prepare(self) -> None:
        """Answer every method alike."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(REFUSAL)


def fill_in(setup: Setup, query: Mapping[str, object]) -> list[str]:
    """Put an address's settings into the form. Returns a line for each that is left out, with the reason."""
    left_out = []
    for name, value in query.items():
        if name in (*FIELDS, "screen"):
            try:
                _check(name, value)
                setup.param.update(**{name: str(value) if name in ("cluster", "model") else value})
            except ValueError as error:
                left_out.append(f"{name} of the address is ignored: {error}")
    return left_out


def _check(name: str, value: object) -> None:
    """Raise ConfigError for a value beyond the limits."""
    plain.checked(value, name)
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MOST_TEXT or (isinstance(value, str) and max(map(len, text.split()), default=0) > MOST_WORD):
        raise ConfigError(f"it has {len(text)} characters; an address may have {MOST_TEXT}, and words of {MOST_WORD}")
    if re.search(r"""(^|["'=\s])[\\/]{2}""", text):
        raise ConfigError("it names a folder of another computer; type it into the form")
    if name in MOST and isinstance(value, int | float) and value > MOST[name]:
        raise ConfigError(f"{shown(value)} is more than {MOST[name]}; type it into the form")


#: in the order of the buttons
SCREENS: tuple[ModuleType, ...] = (cluster, run, what_if, scaling, learning, collective)
ADDRESS = "127.0.0.1"
#: where the form has no place beside a screen it lies above it, closed at first; what Panel makes of mouse clicks alone
#: is made for keys, too
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
    """Panel's design without the font that it would fetch from the internet; its files are found by its name."""

    _resources = {**fast.Fast._resources, "font": {}}  # noqa: RUF012


def made_setup(cluster_name: str | None, model: str | None) -> Setup:
    """Return the state of a page that shows these first. Raises ConfigError for what cannot be used."""
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
    """Return buttons that choose a screen, and the place where the chosen one is; screens are made when first shown."""
    place = pn.Column(sizing_mode="stretch_width")
    made: dict[str, Any] = {}
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
        start.visible = not setup.started and setup.screen not in ("cluster", "learning")  # which have no need of it
        if setup.screen not in made:
            made[setup.screen] = modules[setup.screen].screen(setup, jobs)
        place[:] = [made[setup.screen]]

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
    """Return the page of one visitor, who has asked for it by an address: nothing is simulated before Start."""
    setup.started = False
    left_out = keep_in_address(setup)
    buttons, place = screens(setup, Jobs())
    return pn.template.FastListTemplate(
        title="ddlsim explorer", sidebar=[form(setup)], main=[*map(message, left_out), buttons, place],
        main_layout=None, font_url="", font="system-ui, sans-serif", design=Fast, sidebar_width=320,
        sidebar_footer=NARROW, main_max_width="1200px", accent="#33628f",
    )  # fmt: skip


def keep_in_address(setup: Setup) -> list[str]:
    """Begin with what the page's address says, and write changes into it: links and reloads bring the same page.

    Returns why parts of the address are left out.
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
    """Return a server of the explorer, to be started. Raises ConfigError for names that cannot be used, and a port
    that is taken."""
    shown = load_cluster(made_setup(cluster_name, model).cluster)
    limit_size(max(MOST_NODES, shown.n_nodes), max(MOST_LINKS, shown.n_links))
    try:
        made: Server = pn.serve(
            lambda: template(made_setup(cluster_name, model)), address=ADDRESS, port=port, show=browser, start=False,
            title="ddlsim explorer", verbose=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"port = {port}: cannot be used: {error.strerror or error}; give another, or 0") from None
    made._tornado.default_router.rules.insert(0, Rule(Foreign(hosts), Refusal))
    made._tornado.websocket_origins.add("*")  # of those that the rule lets through
    return made


def serve(cluster_name: str | None, model: str | None, port: int, browser: bool, hosts: Sequence[str] = ()) -> None:
    """Serve the explorer until Ctrl-C. Errors as for :func:`server`."""
    made = server(cluster_name, model, port, browser, hosts)
    made.start()
    made.io_loop.start()


def in_notebook(cluster_name: str | None, model: str | None) -> pn.Row:
    """Return form and screens side by side."""
    setup = made_setup(cluster_name, model)
    buttons, place = screens(setup, Jobs())
    return pn.Row(pn.Column(form(setup), width=320), pn.Column(buttons, place, sizing_mode="stretch_width"))
