"""What all pictures share: figures without a screen, colours and markers, names from elsewhere as they are written."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddlsim.errors import ConfigError
from ddlsim.output_files import replacing
from ddlsim.printable import shown
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, WAITING

#: kind of time -> (colour, hatch, what it is called)
TIME_STYLES = {
    COMPUTE: ("#4477aa", "", "compute"),
    COMMUNICATION: ("#ee9944", "//", "exposed communication"),
    WAITING: ("#cc6677", "xx", "waiting for others"),
    "idle": ("#dddddd", "..", "idle"),
}
MARKERS = "osD^vP*X"
STYLES = ("-", "--", "-.", ":")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#555555", "#994455")


def figure(width: float, height: float) -> Figure:
    """Return an empty figure that is drawn without a screen, in inches."""
    made = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: str | Path | None) -> None:
    """Write the figure if a path is given. Raises ConfigError if it cannot be written, or is no kind of picture."""
    if path is not None:
        path = Path(path)
        kind, known = path.suffix[1:].lower(), made.canvas.get_supported_filetypes()
        if not kind:  # as in matplotlib: a picture without a kind is a PNG
            kind, path = "png", path.with_name(f"{path.name}.png") if path.is_file() or not path.exists() else path
        if kind not in known:
            raise ConfigError(f"{path}: no kind of picture; end the name in one of .{', .'.join(sorted(known))}")
        with replacing(path) as file:
            made.savefig(file, format=kind)


def drawn(text: str) -> str:
    """Return what to hand to matplotlib for `text`: a "$" begins no formula, and no "_" keeps it out of a legend."""
    text = shown(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
