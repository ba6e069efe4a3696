"""Collectives round by round: the contents of each rank's chunks, the messages, and the times, as in the explorer."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from ddlsim.collectives import Schedule, State, states
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.output_files import replacing, write_text
from ddlsim.readable import count, seconds
from ddlsim.report.drawing import single

with needs("matplotlib"):
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

#: maximum number of ranks, chunks and rounds, and of chunks with numbers in their cells
MOST_RANKS, MOST_CHUNKS, MOST_ROUNDS, NUMBERED = 32, 128, 200, 24
EMPTY, FULL, WHOLE, CHANGED, SENT = "#ffffff", "#9ec3e6", "#1f4e79", "#d55e00", "#333333"
#: maximum number of messages with labels
LABELLED = 20
#: number of frames for which the last state is shown
LAST = 3
DPI = 110
GIFS, PAGES = (".gif", ".webp"), (".html", ".htm")
#: characters instead of the icons of matplotlib's buttons, which would be loaded from the internet
_ICON = re.compile(r'<i class="fa fa-([a-z-]+)(?: fa-flip-horizontal)?"></i>')
_ICONS = {"minus": "−", "fast-backward": "|◀", "step-backward": "◂", "pause": "‖", "play": "▶"}
_ICONS |= {"step-forward": "▸", "fast-forward": "▶|", "plus": "+"}
_STYLESHEET = re.compile(r"<link rel=\"stylesheet\"[^>]*>")
#: figure sizes that fit on a phone
_NARROW = "<style>.animation, .animation img, .animation input { max-width: 100%; }</style>"
_HEAD = (
    '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><body style="font-family: sans-serif">\n'
)


class RoundByRound(FuncAnimation):
    """A matplotlib animation that notebooks display with buttons, without loading anything from the internet."""

    def _repr_html_(self) -> str:
        return self.to_html()

    def __del__(self) -> None:
        """Discard an animation that was never shown, without matplotlib's warning."""

    def to_html(self) -> str:
        """Return the frames as HTML with playback controls."""
        page = _NARROW + _STYLESHEET.sub("", self.to_jshtml(default_mode="once"))
        flipped = page.replace('fa-play fa-flip-horizontal"></i>', '"></i>◀').replace('<i class="fa "></i>', "")
        return _ICON.sub(lambda match: _ICONS[match[1]], flipped)


def animate(schedule: Schedule, path: str | Path | None = None, *, seconds: float = 0.8) -> RoundByRound:
    """Animate a schedule round by round, and write the animation to `path` if it is set: .gif, .webp or .html.

    Rows are ranks, columns are chunks of the buffer. Arrows show the chunks that a round moves, from sender to
    receiver: solid if they are combined with the receiver's data, dashed if they overwrite it. For all-reduces, reduces
    and reduce-scatters, a cell shows the number of contributions; for other collectives, the rank whose data it holds.
    Cells with their final contents are dark.

    seconds  time per round

    Raises ConfigError for more than 32 ranks, 128 chunks or 200 rounds, for other formats, and if the file cannot be
    written.
    """
    kind = None if path is None else Path(path).suffix.lower()
    if kind is not None and kind not in GIFS + PAGES:
        formats = ", ".join(GIFS + PAGES)
        raise ConfigError(f"{path}: unknown animation format; use one of {formats}")
    frames = Frames(schedule, _played(schedule))
    numbers = [*range(len(frames.played)), *[len(frames.played) - 1] * (LAST - 1)]

    def draw(number: int) -> list[Rectangle]:
        frames.draw(number)
        return []

    animation = RoundByRound(
        frames.figure, draw, numbers, interval=1000.0 * seconds, repeat=True, cache_frame_data=False
    )
    if path is not None and kind in PAGES:
        write_text(path, f"{_HEAD}{animation.to_html()}</body></html>\n")
    elif path is not None:
        with replacing(path) as file, tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / f"rounds{kind}"
            animation.save(written, PillowWriter(fps=1.0 / seconds), dpi=DPI)  # type: ignore[arg-type]  # may be below one
            file.write(written.read_bytes())
    return animation


def _played(schedule: Schedule) -> list[State]:
    n_chunks = schedule.n_chunks // schedule.copies
    for items, n, limit in (("ranks", schedule.n_ranks, MOST_RANKS), ("chunks", n_chunks, MOST_CHUNKS)):
        if n > limit:
            raise ConfigError(f"animate: the schedule has {n} {items}, above the limit of {limit}; use fewer {items}")
    played = list(islice(states(schedule), MOST_ROUNDS + 2))
    if len(played) > MOST_ROUNDS + 1:
        raise ConfigError(f"animate: the schedule has more than {MOST_ROUNDS} rounds; use fewer ranks or chunks")
    return played


class Frames:
    """A figure of the `played` states of a schedule, before the first round and after each: ranks (rows) by chunks."""

    def __init__(self, schedule: Schedule, played: Sequence[State]) -> None:
        self._schedule, self.played = schedule, played
        n_ranks, n_chunks = played[0].whole.shape
        width, height = np.clip((2.2 + 0.62 * n_chunks, 1.7 + 0.42 * n_ranks), (5.4, 3.2), (14.0, 10.0)).tolist()
        self.figure, self._axes = fig, axes = single(width, height)
        axes.set(xlim=(-0.5, n_chunks - 0.5), ylim=(n_ranks - 0.5, -0.5))
        axes.set_xticks(range(0, n_chunks, 1 + (n_chunks - 1) // 24))
        axes.set_yticks(range(0, n_ranks, 1 + (n_ranks - 1) // 32))
        axes.tick_params(length=0, labelsize=8)
        axes.set(xlabel="chunk of the buffer", ylabel="rank")
        number = "number of contributions" if played[0].reduces else "rank whose data it is"
        handles: list[Patch | Line2D] = [
            Patch(facecolor=FULL, edgecolor="#888888", label=number),
            Patch(facecolor=WHOLE, label="as promised"),
            Patch(facecolor="white", edgecolor=CHANGED, linewidth=2.0, label="changed in this round"),
        ]
        reduced = np.concatenate([state.reduced for state in played])
        for style, is_any, label in (("-", reduced.any(), "combined"), ("--", not reduced.all(), "overwritten")):
            if is_any:
                line: Any = {"color": SENT, "marker": ">", "markersize": 4, "linestyle": style}
                handles.append(Line2D([], [], label=f"sent, {label}", **line))
        look: Any = {"ncols": 3 if n_chunks > 4 else 2, "fontsize": 8, "frameon": False, "handlelength": 2.8}
        fig.legend(handles=handles, loc="outside lower center", **look)
        axes.set_title("two\nlines", fontsize=9)
        axes.hlines(np.arange(1, n_ranks) - 0.5, -0.5, n_chunks - 0.5, color="#888888", linewidth=0.5)
        axes.vlines(np.arange(1, n_chunks) - 0.5, -0.5, n_ranks - 0.5, color="#888888", linewidth=0.5)
        fig.set_dpi(DPI)
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # frames must not move

    def draw(self, number: int) -> Axes:
        """Draw the state after round `number`, with the chunks that it moved."""
        axes, state = self._axes, self.played[number]
        axes.set_title(self._title(state), fontsize=9)
        for artist in (*axes.patches, *axes.texts, *axes.images):
            artist.remove()
        held = state.contributors[:, :, None]
        level = held / len(held) if state.reduces else np.where(held == 0, 0.0, 0.25)
        shades = (1.0 - level) * np.array(to_rgb(EMPTY)) + level * np.array(to_rgb(FULL))
        axes.imshow(np.where(state.whole[:, :, None], to_rgb(WHOLE), shades), aspect="auto", zorder=0)
        if state.whole.shape[1] <= NUMBERED:
            for (rank, chunk), text in np.ndenumerate(state.labels):
                colour = "white" if state.whole[rank, chunk] else "black"
                axes.text(chunk, rank, text, ha="center", va="center", fontsize=8, color=colour)
        box: Any = {"fill": False, "edgecolor": CHANGED, "linewidth": 1.8}
        for rank, chunk in sorted(set(zip(state.dst.tolist(), state.chunk.tolist(), strict=True))):
            axes.add_patch(Rectangle((chunk - 0.46, rank - 0.46), 0.92, 0.92, **box))
        for src, dst, x, reduced in _arrows(state):
            outline = withStroke(linewidth=2.6, foreground="white")
            axes.annotate("", (x, dst), (x, src), arrowprops=_arrow(reduced, path_effects=[outline]))
        return axes

    def _title(self, state: State) -> str:
        schedule = self._schedule
        name = f"{schedule.kind.replace('_', '-')}, {count(schedule.n_ranks, 'rank')}"
        if not state.round:
            return f"{name}: before the first round\n"
        n_added = int(state.reduced.sum())
        moved = [f"{n} {what}" for n, what in ((n_added, "combined"), (len(state.chunk) - n_added, "overwritten")) if n]
        rounds = f"round {state.round} of {len(self.played) - 1}"
        return f"{name}: {rounds}\nchunks sent: {', '.join(moved) or 'none'}"


def _arrow(reduced: bool, **more: Any) -> dict[str, Any]:
    """Return the look of an arrow, solid if the receiver combines the data with its own, else dashed."""
    style = "-" if reduced else (0, (3, 2))
    look = {"arrowstyle": "-|>", "color": SENT, "linewidth": 1.1, "linestyle": style, "mutation_scale": 8}
    return {**look, "shrinkA": 0, "shrinkB": 0, **more}


def _arrows(state: State) -> list[tuple[int, int, float, bool]]:
    """Return sender, receiver, x and whether combined for each arrow. In a chunk's column, arrows that point down are
    right of the numbers, the others left; overlapping ones are next to each other."""
    arrows: list[tuple[int, int, float, bool]] = []
    for chunk in np.unique(state.chunk).tolist():
        of = np.flatnonzero(state.chunk == chunk)
        for down in (True, False):
            mine = [i for i in of.tolist() if (state.dst[i] > state.src[i]) == down]
            place: dict[int, int] = {}
            ends: list[int] = []  # row where the last arrow ends, per column
            for low, high, i in sorted((*sorted((int(state.src[i]), int(state.dst[i]))), i) for i in mine):
                column = next((k for k, end in enumerate(ends) if end < low), len(ends))
                ends[column : column + 1] = [high]
                place[i] = column
            for i, column in place.items():
                away = 0.2 + 0.24 * (column + 0.5) / len(ends)
                arrows.append(
                    (int(state.src[i]), int(state.dst[i]), chunk + (away if down else -away), bool(state.reduced[i]))
                )
    return arrows


def messages_of(state: State) -> list[tuple[int, int, bool, list[int]]]:
    """Return the messages of a state's round: sender, receiver, whether data are combined, chunks in order."""
    columns = state.src, state.dst, state.reduced, state.chunk
    messages = sorted(set(zip(*(column.tolist() for column in columns), strict=True)))
    return [(*key, [chunk for *_, chunk in group]) for key, group in groupby(messages, lambda message: message[:3])]


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as "0-2, 5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ring_of_ranks(state: State) -> Axes:
    """Draw the ranks on a circle, the darker the more of their final contents they have, with an arrow per message."""
    n_ranks, sent = len(state.done), messages_of(state)
    required = state.required.sum(axis=1)
    share = np.where(required > 0, state.whole.sum(axis=1) / np.maximum(required, 1), 1.0)
    angles = 2.0 * np.pi * np.arange(n_ranks) / n_ranks
    at = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    size = min(34.0, 250.0 / n_ranks)  # diameter of a rank in points
    fig, axes = single(4.0, 4.0)
    fig.set_layout_engine("none")
    axes.set_position((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    axes.set_axis_off()
    shades = LinearSegmentedColormap.from_list("share", [EMPTY, FULL, WHOLE])
    axes.scatter(at[:, 0], at[:, 1], s=size**2, c=shades(share), edgecolors=SENT, zorder=2)
    for rank, (x, y) in enumerate(at.tolist()):
        colour = "white" if share[rank] > 0.7 else "black"
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=max(0.45 * size, 3.0), color=colour)
    for src, dst, reduced, chunks in sent:
        (x0, y0), (x1, y1) = at[src], at[dst]
        arrow = _arrow(reduced, connectionstyle="arc3,rad=0.24") | {"shrinkA": size / 2, "shrinkB": size / 2}
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
        if len(sent) <= LABELLED:  # beside the middle of the arc, which bends by 0.12 of its length
            place = (x0 + x1) / 2 + 0.2 * (y1 - y0), (y0 + y1) / 2 - 0.2 * (x1 - x0)
            axes.text(*place, ranges(chunks), ha="center", va="center", fontsize=8)
    return axes


def round_times(times: Sequence[float], number: int) -> Axes:
    """Draw the time of each round, given the `times` (s) by which they have ended; round `number` is coloured."""
    takes = np.diff(times)
    _, axes = single(9.0, 1.5)
    axes.bar(
        range(1, len(takes) + 1), takes, color=[CHANGED if i == number else "#aaaaaa" for i in range(1, len(times))]
    )
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    return axes
