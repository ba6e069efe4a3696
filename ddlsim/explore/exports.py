"""What a screen shows as files: the experiment file and the program that give the same, to copy and to download."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import panel as pn

from ddlsim.errors import DdlsimError
from ddlsim.explore.pieces import html, message, plain
from ddlsim.run.experiment import Experiment


@dataclass(frozen=True)
class File:
    """A file that a screen is exported as: its name and its text."""

    name: str
    text: str


def experiment_files(experiment: Experiment, stem: str = "run") -> list[File]:
    """Return the experiment as a file for ``ddlsim run``, and as a program. Raises ConfigError as those do."""
    return [File(f"{stem}.toml", experiment.to_toml()), File(f"{stem}.py", experiment.to_python())]


class Exports:
    """The panel of a screen's files, made by `files` whenever it is open and something has changed."""

    def __init__(self, files: Callable[[], Sequence[File]]) -> None:
        from ddlsim.explore.pieces import LazyCard

        self._files = files
        self._content = pn.Column(sizing_mode="stretch_width")
        self._lazy = LazyCard("Export as TOML and Python", self._show, self._content)
        self.card = self._lazy.card

    def stale(self) -> None:
        """Say that the screen shows something else now."""
        self._lazy.stale()

    def _show(self) -> None:
        try:
            files = self._files()
        except DdlsimError as error:
            self._content[:] = [message(str(error))]
            return
        self._content[:] = [each for file in files for each in _file(file)]


def _file(file: File) -> list[Any]:
    copy = pn.widgets.Button(label=f"Copy {file.name}", css_classes=["copy"])
    text = html(f"<pre tabindex='0'>{plain(file.text)}</pre>", css_classes=["exported"])
    copy.js_on_click(args={"content": file.text}, code=_COPY)
    download = pn.widgets.FileDownload(
        io.BytesIO(file.text.encode()), filename=file.name, label=f"Download {file.name}", button_type="default"
    )
    return [html(f"<h3>{plain(file.name)}</h3>"), text, pn.FlexBox(copy, download)]


_COPY = "navigator.clipboard.writeText(content)"
