"""A part of a training in which groups of workers take turns."""

from __future__ import annotations

from typing import NamedTuple

from ddlsim.errors import DdlsimError
from ddlsim.learning.learner import Handover


class Shift(NamedTuple):
    """What a group of workers begins with, whether another one goes on after it, and when on the clock it begins, s."""

    begin: Handover | None
    goes_on: bool
    since: float = 0.0


class NoUpdateError(DdlsimError):
    """A run that was over before its first update."""
