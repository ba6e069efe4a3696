"""A part of a training in which groups of workers take turns."""

from __future__ import annotations

from typing import NamedTuple

from ddlsim.errors import DdlsimError
from ddlsim.learning.handover import Handover


class Shift(NamedTuple):
    """What a group of workers begins with, and whether another one goes on after it."""

    begin: Handover | None
    goes_on: bool


class NoUpdateError(DdlsimError):
    """A run that was over before its first update."""
