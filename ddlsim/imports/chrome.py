"""Chrome trace events, the JSON format of PyTorch's and Horovod's traces. Times are in microseconds.

Format: "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ddlsim.errors import shown
from ddlsim.imports.json_values import finite, loads, parse_json
from ddlsim.imports.text import EntryError, LeftOut, SourceText


@dataclass(frozen=True)
class Event:
    """One event; `ts` and `dur` are in seconds (NaN if missing or not a number), and `index` is its index in the list
    (``traceEvents[index]``)."""

    index: int
    phase: str
    name: str
    category: str
    pid: str
    tid: str
    ts: float
    dur: float
    args: dict[str, object]

    @property
    def end(self) -> float:
        """Time at which the span ends, in s."""
        return self.ts + self.dur

    def integer(self, key: str) -> int | None:
        """Return an argument that is an integer (or a string with one), else None."""
        value = self.args.get(key)
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
            return int(value)
        number = finite(value)
        return None if number is None else int(number)


def read_events(source: SourceText, left_out: LeftOut) -> tuple[dict[str, object], list[Event]]:
    """Return the object that contains the events (empty for a bare list), and the events in file order.

    Values that are no objects, and spans with an invalid or negative begin or duration, are `left_out`. Raises
    ConfigError with file, line or index and reason if the file is not a trace.
    """
    text = source.text.strip()
    if text.startswith("["):
        top: dict[str, object] = {}
        raw = _bare_list(source, text)
    else:
        value = parse_json(source).value
        if not isinstance(value, dict) or not isinstance(value.get("traceEvents"), list):
            raise source.error(None, "the list 'traceEvents' is missing; is the file a Chrome trace?")
        top = {key: part for key, part in value.items() if key != "traceEvents"}
        raw = value["traceEvents"]
    events: list[Event] = []
    for index, item in enumerate(raw):
        if item:  # some writers end the list with {}
            with left_out:
                events.append(_event(f"{source.path}: traceEvents[{index}]", index, item))
    return top, events


def _bare_list(source: SourceText, text: str) -> list[object]:
    """Return a list that may lack its end; an incomplete last line is dropped."""
    whole_lines = text.rpartition("\n")[0].rstrip()
    for candidate in (text, text.rstrip(",") + "]", whole_lines.rstrip(",") + "]"):
        try:
            value = loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list):
            return value
    raise parse_json(source).error("is not a list of events")  # parse_json raises, with the line of the first error


def _event(place: str, index: int, item: object) -> Event:
    if not isinstance(item, dict):
        raise EntryError(f"{place} is not an object; is the file a Chrome trace?")
    args, phase = item.get("args"), str(item.get("ph", ""))
    ts, dur = (finite(item.get(key, 0.0)) for key in ("ts", "dur"))
    if phase == "X" and (ts is None or dur is None or dur < 0):
        key = "ts" if ts is None else "dur"
        rule = ("a non-negative" if key == "dur" else "a") + " number of microseconds"
        raise EntryError(f"{place}.{key} = {shown(item.get(key))} must be {rule}")
    texts = {key: str(item.get(key, "")) for key in ("name", "pid", "tid")}
    begin, lasts = (math.nan if time is None else time * 1e-6 for time in (ts, dur))
    arguments, category = args if isinstance(args, dict) else {}, str(item.get("cat", "")).lower()
    return Event(index=index, phase=phase, category=category, ts=begin, dur=lasts, args=arguments, **texts)
