"""Texts of a picture that lie on each other, or are cut off at its edge: what no picture of the library may have."""

import itertools

import numpy as np
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

#: pixels (at 150 to the inch) that boxes may share: letters do not fill theirs
SHARED = 2.0


def overlaps(figure):
    """Return a line for each pair of texts that overlap, and for each text that is cut off.

    Looked at are titles, labels of axes and of ticks, annotations, and legends (as one box each).
    """
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [(f"legend {[text.get_text() for text in legend.get_texts()]}", legend.get_window_extent(renderer), None)
             for legend in figure.findobj(Legend)]  # fmt: skip
    boxes += [(repr(text.get_text()), text.get_window_extent(renderer), text) for text in _texts(figure)]
    page = figure.bbox.padded(1.0)
    found = [f"{name} is cut off" for name, box, _ in boxes
             if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1]  # fmt: skip
    for (name, box, text), (other, its, another) in itertools.combinations(boxes, 2):
        wide, high = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
        if wide > SHARED and high > SHARED and not _aslant(text, another, renderer):
            found.append(f"{name} and {other} overlap by {wide:.0f} x {high:.0f} pixels")
    return found


def _aslant(text, other, renderer):
    """Return whether two texts that are aslant by the same angle pass each other, although their boxes overlap."""
    angle = 0.0 if text is None or other is None else text.get_rotation()
    if angle % 90.0 == 0.0 or other.get_rotation() != angle:
        return False
    sizes, middles = [], []
    for one in (text, other):
        box = one.get_window_extent(renderer)
        middles.append(np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2)
        one.set_rotation(0.0)
        box = one.get_window_extent(renderer)
        sizes.append(np.array([box.width, box.height]))
        one.set_rotation(angle)
    turn = np.radians(angle)
    away = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) @ (middles[1] - middles[0])
    return bool((np.abs(away) > (sizes[0] + sizes[1]) / 2 - SHARED).any())


def _texts(figure):
    """Return the texts that are seen: not those in legends, nor ticks beyond the ends of their axis."""
    hidden = {text for legend in figure.findobj(Legend) for text in legend.findobj(Text)}
    for axes in figure.get_axes():
        for axis in (axes.xaxis, axes.yaxis):
            seen = {id(tick) for tick in axis._update_ticks()} if axes.axison else set()
            ticks = (*axis.get_major_ticks(), *axis.get_minor_ticks())
            hidden |= {label for tick in ticks if id(tick) not in seen for label in (tick.label1, tick.label2)}
            if not axes.axison:
                hidden |= {axis.label, axis.offsetText}
    texts = (text for text in figure.findobj(Text) if text not in hidden)
    return [text for text in texts if text.get_visible() and text.get_text().strip()]
