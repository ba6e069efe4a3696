"""Texts of a picture that lie on each other, or are cut off at its edge: what no picture of the library may have."""

import itertools

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
    boxes = []
    for legend in figure.findobj(Legend):
        boxes.append((f"legend {[text.get_text() for text in legend.get_texts()]}", legend.get_window_extent(renderer)))
    for text in _texts(figure):
        boxes.append((repr(text.get_text()), text.get_window_extent(renderer)))
    page = figure.bbox.padded(1.0)
    found = [f"{name} is cut off" for name, box in boxes
             if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1]  # fmt: skip
    for (name, box), (other, its) in itertools.combinations(boxes, 2):
        wide, high = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
        if wide > SHARED and high > SHARED:
            found.append(f"{name} and {other} overlap by {wide:.0f} x {high:.0f} pixels")
    return found


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
