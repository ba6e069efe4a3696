"""SVG pictures of a collective: senders and receivers, data on every rank, duration of the rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from ddlsim.collectives import State
from ddlsim.explore.rounds import Played
from ddlsim.readable import seconds
from ddlsim.report.drawing import COLOURS

#: combined data are solid, overwritten data dashed, so that they do not differ only in colour
ADDED, COPIED, WHOLE, PART = COLOURS[1], COLOURS[3], COLOURS[2], COLOURS[0]
DASHES = "5 3"
_FONT = 'font-family="inherit" fill="currentColor" text-anchor="middle" dominant-baseline="central"'
#: maximum number of cells with readable numbers
_READABLE = 20


def messages_of(state: State) -> list[tuple[int, int, bool, list[int]]]:
    """Return the messages of a state's round: sender, receiver, whether data are combined, chunks in order."""
    columns = state.src, state.dst, state.reduced, state.chunk
    found = sorted(set(zip(*(column.tolist() for column in columns), strict=True)))
    return [(*key, [chunk for *_, chunk in group]) for key, group in groupby(found, lambda message: message[:3])]


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as "0-2, 5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def in_words(played: Played, number: int) -> str:
    """Describe round `number` in a sentence."""
    state = played.states[number]
    done, n_ranks = int(state.done.sum()), len(state.done)
    whole = f"{'every rank is' if done == n_ranks else f'{done} of {n_ranks} ranks are'} complete"
    if not number:
        return f"Before the first round: {whole}."
    sent = messages_of(state)
    most = max(len(chunks) for *_, chunks in sent) if sent else 0
    each = "no chunk" if not most else "a chunk" if most == 1 else f"up to {most} chunks"
    added = sum(added for _, _, added, _ in sent)
    how = "added" if added == len(sent) else "overwritten" if not added else "partly added, partly overwritten"
    took = played.times[number] - played.times[number - 1]
    move = f"{len(sent)} message{'' if len(sent) == 1 else 's'} of {each}"
    return (
        f"Round {number} of {played.n_rounds}: {move}{f', {how}' if state.reduces else ''}; {seconds(took)}, "
        f"ends after {seconds(played.times[number])}; {whole}."
    )


def network(state: State) -> str:
    """Return the ranks in a circle, with an arrow per message of the round."""
    n_ranks, radius, middle = len(state.done), 150.0, 190.0
    size = min(17.0, 0.8 * math.pi * radius / n_ranks)
    angles = [2.0 * math.pi * rank / n_ranks - math.pi / 2.0 for rank in range(n_ranks)]
    at = [(middle + radius * math.cos(angle), middle + radius * math.sin(angle)) for angle in angles]
    sent = messages_of(state)
    parts = list(_markers(size))
    for src, dst, added, chunks in sent:
        parts.append(_arrow(at[src], at[dst], size, added, ranges(chunks) if len(sent) <= _READABLE else ""))
    for rank, (x, y) in enumerate(at):
        required = int(state.required[rank].sum())
        share = float(state.whole[rank].sum()) / required if required else 1.0
        fill = f'fill="{WHOLE}" fill-opacity="{0.12 + 0.78 * share:.2f}"'
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {fill} stroke="currentColor"/>'
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{max(0.9 * size, 5.0):.1f}" {_FONT}>{rank}</text>'
        )
    words = "; ".join(f"{src} to {dst}: {ranges(chunks)}" for src, dst, _, chunks in sent) or "no messages"
    return _svg(380.0, 380.0, parts, f"Messages of the round (sender, receiver, chunks): {words}")


def _markers(size: float) -> Iterator[str]:
    for name, colour in (("added", ADDED), ("copied", COPIED)):
        head = f'<path d="M0 0L8 4L0 8z" fill="{colour}"/>'
        wide = min(8.0, 0.6 * size)
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="{wide:.1f}" '
            f'markerHeight="{wide:.1f}" markerUnits="userSpaceOnUse" orient="auto">{head}</marker>'
        )


def _arrow(start: tuple[float, float], end: tuple[float, float], size: float, added: bool, label: str) -> str:
    """Return an arrow that is bent to its left, so that opposite arrows do not overlap."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    ux, uy = dx / length, dy / length
    bend = 0.12 * length
    bow = ((start[0] + end[0]) / 2.0 + bend * uy, (start[1] + end[1]) / 2.0 - bend * ux)
    ends = []
    for x, y in (start, end):
        to = math.hypot(bow[0] - x, bow[1] - y)
        ends.append((x + size * (bow[0] - x) / to, y + size * (bow[1] - y) / to))
    (x0, y0), (x1, y1) = ends
    name, colour, dashes = ("added", ADDED, "") if added else ("copied", COPIED, f' stroke-dasharray="{DASHES}"')
    path = (
        f'<path d="M{x0:.1f} {y0:.1f}Q{bow[0]:.1f} {bow[1]:.1f} {x1:.1f} {y1:.1f}" fill="none" stroke="{colour}" '
        f'stroke-width="1.6"{dashes} marker-end="url(#{name})"/>'
    )
    x, y = (start[0] + end[0]) / 4.0 + bow[0] / 2.0 + 7.0 * uy, (start[1] + end[1]) / 4.0 + bow[1] / 2.0 - 7.0 * ux
    return path + (f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" {_FONT}>{label}</text>' if label else "")


def matrix(played: Played, number: int) -> str:
    """Return the contents of every chunk (column) on every rank (row): filled by contributions, green if complete."""
    state = played.states[number]
    n_ranks, n_chunks = state.whole.shape
    members = np.maximum(state.counts.max(axis=(0, 1)).sum(), 1) if n_ranks else 1
    cell = min(34.0, 640.0 / n_chunks, max(8.0, 480.0 / n_ranks))
    left, top = 46.0, 40.0
    changed = set(zip(state.dst.tolist(), state.chunk.tolist(), strict=True))
    held, labels, numbered = state.contributors, state.labels, max(n_chunks, n_ranks) <= _READABLE
    parts = [_axis(left, top, cell, n_ranks, n_chunks)]
    for (rank, chunk), label in np.ndenumerate(labels):
        x, y = left + chunk * cell, top + rank * cell
        whole, share = bool(state.whole[rank, chunk]), float(held[rank, chunk]) / float(members)
        part = 0.75 * share if state.reduces else 0.25 * (share > 0.0)
        colour, opacity = (WHOLE, 0.85) if whole else (PART, part)
        edge = ' stroke="currentColor" stroke-width="1.6"' if (rank, chunk) in changed else ""
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{cell - 2:.1f}" height="{cell - 2:.1f}" rx="2" '
            f'fill="{colour}" fill-opacity="{opacity:.2f}"{edge}/>'
        )
        if numbered and label:
            place = f'x="{x + cell / 2:.1f}" y="{y + cell / 2:.1f}"'
            parts.append(f'<text {place} font-size="{0.42 * cell:.1f}" {_FONT}>{label}</text>')
    return _svg(
        left + n_chunks * cell + 4.0,
        top + n_ranks * cell + 4.0,
        parts,
        f"Ranks by chunks: {int(state.whole.sum())} of {int(state.required.sum())} required blocks are complete",
    )


def _axis(left: float, top: float, cell: float, n_ranks: int, n_chunks: int) -> str:
    each = max(1, math.ceil(14.0 / cell))
    small = f'font-size="10" {_FONT}'
    ranks = "".join(
        f'<text x="{left - 12:.1f}" y="{top + (rank + 0.5) * cell:.1f}" {small}>{rank}</text>'
        for rank in range(0, n_ranks, each)
    )
    wide = max(1, math.ceil(20.0 / cell))
    chunks = "".join(
        f'<text x="{left + (chunk + 0.5) * cell:.1f}" y="{top - 8:.1f}" {small}>{chunk}</text>'
        for chunk in range(0, n_chunks, wide)
    )
    x, y = left - 34.0, top + n_ranks * cell / 2.0
    names = (
        f'<text x="{left + n_chunks * cell / 2.0:.1f}" y="{top - 28:.1f}" {small}>chunk</text>'
        f'<text x="{x:.1f}" y="{y:.1f}" transform="rotate(-90 {x:.1f} {y:.1f})" {small}>rank</text>'
    )
    return names + ranks + chunks


def durations(played: Played, number: int) -> str:
    """Return a bar for the time of each round; the displayed round is coloured."""
    times = np.diff(played.times)
    if not len(times):
        return ""
    width, height = 640.0, 60.0
    step, longest = width / len(times), max(float(times.max()), 1e-30)
    parts = []
    for i, time in enumerate(times.tolist()):
        tall = height * max(time, 0.0) / longest
        colour = f'fill="{ADDED}"' if i + 1 == number else 'fill="currentColor" fill-opacity="0.35"'
        parts.append(
            f'<rect x="{(i + 0.1) * step:.1f}" y="{height - tall:.1f}" width="{0.8 * step:.1f}" height="{tall:.1f}" '
            f"{colour}><title>round {i + 1}: {seconds(time)}</title></rect>"
        )
    return (
        f"<div>Time of each round, 1 to {len(times)}, up to {seconds(float(times.max()))}</div>"
        f"{_svg(width, height, parts, f'Time of each of {len(times)} rounds')}"
    )


def _svg(width: float, height: float, parts: Sequence[str], words: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="width:100%;max-width:{width:.0f}px;height:auto" '
        f'role="img" aria-label="{words}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def legend(played: Played) -> str:
    """Return a legend of colours and lines as HTML."""
    reduces = played.states[0].reduces
    holds = "contributions of some ranks (their number)" if reduces else "data of the rank with this number"
    boxes = [(WHOLE, "has its final result"), (PART, f"holds {holds}")]
    arrows = [
        *([(ADDED, "solid", "added to the data there")] if reduces else []),
        (COPIED, "dashed", "overwrites the data there"),
    ]
    keys = [f'<i style="background:{colour}"></i>{text}' for colour, text in boxes]
    keys += [f'<b style="border-top:2px {line} {colour}"></b>{text}' for colour, line, text in arrows]
    return "".join(f'<span class="key">{key}</span>' for key in keys)
