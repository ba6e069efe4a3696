"""*What-if*: a run that is kept, another beside it, and what differs."""

from __future__ import annotations

import panel as pn

from ddlsim.explore.jobs import Jobs
from ddlsim.explore.pieces import html
from ddlsim.explore.setup import Setup

NAME = "what-if"
TITLE = "What if"


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    return pn.Column(html(), sizing_mode="stretch_width")
