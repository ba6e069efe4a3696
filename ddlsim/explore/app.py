"""The page: a form at the side, one screen at a time, served on this machine alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import panel as pn
from panel.theme import fast

from ddlsim.errors import ConfigError
from ddlsim.explore.form import form
from ddlsim.explore.jobs import Jobs
from ddlsim.explore.screens import cluster, run, what_if
from ddlsim.explore.setup import Setup

#: in the order of the buttons
SCREENS: tuple[ModuleType, ...] = (cluster, run, what_if)
ADDRESS = "127.0.0.1"


class Fast(fast.Fast):
    """Panel's design without the font that it would fetch from the internet; its files are found by its name."""

    _resources = {name: files for name, files in fast.Fast._resources.items() if name != "font"}  # noqa: RUF012


def made_setup(cluster_name: str | None, model: str | None) -> Setup:
    """Return the state of a page that shows these first. Raises ConfigError for what cannot be used."""
    from ddlsim.cluster import load_cluster
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
    buttons = {module.NAME: pn.widgets.Button(name=module.TITLE) for module in SCREENS}

    def go(module: ModuleType) -> None:
        setup.screen = module.NAME
        for name, button in buttons.items():
            button.button_type = "primary" if name == module.NAME else "default"
        if module.NAME not in made:
            made[module.NAME] = module.screen(setup, jobs)
        place[:] = [made[module.NAME]]

    for module in SCREENS:
        buttons[module.NAME].on_click(lambda _, module=module: go(module))
    go(SCREENS[0])
    return pn.FlexBox(*buttons.values()), place


def template(setup: Setup) -> pn.template.FastListTemplate:
    """Return the page of one visitor."""
    buttons, place = screens(setup, Jobs())
    return pn.template.FastListTemplate(
        title="ddlsim explorer", sidebar=[form(setup)], main=[buttons, place], main_layout=None, font_url="", design=Fast,
        font="system-ui, sans-serif", sidebar_width=320, main_max_width="1200px", accent="#33628f",
    )  # fmt: skip


def serve(cluster_name: str | None, model: str | None, port: int, browser: bool) -> None:
    """Serve the explorer until Ctrl-C. Raises ConfigError for names that cannot be used, and a port that is taken."""
    made_setup(cluster_name, model)
    try:
        pn.serve(
            lambda: template(made_setup(cluster_name, model)), address=ADDRESS, port=port, show=browser,
            title="ddlsim explorer", verbose=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"port = {port}: cannot be used: {error.strerror or error}; give another, or 0") from None


def in_notebook(cluster_name: str | None, model: str | None) -> pn.Row:
    """Return form and screens side by side."""
    setup = made_setup(cluster_name, model)
    buttons, place = screens(setup, Jobs())
    return pn.Row(pn.Column(form(setup), width=320), pn.Column(buttons, place, sizing_mode="stretch_width"))
