"""Chrome trace events: the JSON under PyTorch's and Horovod's traces.

Format: "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), an object with
``traceEvents`` or a bare list, which may lack its end when the program was killed. Times are microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddlsim.errors import shown
from ddlsim.imports.json_values import finite, loads, parse_json
from ddlsim.imports.text import SourceText


@dataclass(frozen=True)
class Event:
    """One event; `ts` and `dur` in seconds, `index` its place in the list (``traceEvents[index]``)."""

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
        """The time at which the span ends, s."""
        return self.ts + self.dur

    def integer(self, key: str) -> int | None:
        """Return an argument that is a whole number (or a text of one), else None."""
        value = self.args.get(key)
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
            return int(value)
        number = finite(value)
        return None if number is None else int(number)


def read_events(source: SourceText) -> tuple[dict[str, object], list[Event]]:
    """Return the object around the events (empty for a bare list), and the events in the order of the file.

    Raises ConfigError with file, line or index and reason for what is no trace.
    """
    text = source.text.strip()
    if text.startswith("["):
        top: dict[str, object] = {}
        raw = _bare_list(source, text)
    else:
        value = parse_json(source).value
        if not isinstance(value, dict) or not isinstance(value.get("traceEvents"), list):
            raise source.error(None, "has no list 'traceEvents'; is it a chrome trace?")
        top = {key: part for key, part in value.items() if key != "traceEvents"}
        raw = value["traceEvents"]
    events = [_event(source, index, item) for index, item in enumerate(raw) if item]  # {} pads some writers' ends
    return top, events


def _bare_list(source: SourceText, text: str) -> list[object]:
    """Return the list, also without its end: then what is cut in the last line goes."""
    whole_lines = text.rpartition("\n")[0].rstrip()
    for candidate in (text, text.rstrip(",") + "]", whole_lines.rstrip(",") + "]"):
        try:
            value = loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list):
            return value
    raise parse_json(source).error("is no list of events")  # parse_json raises, with the line of the first mistake


def _event(source: SourceText, index: int, item: object) -> Event:
    if not isinstance(item, dict):
        raise source.error(None, f"traceEvents[{index}] is no object; is it a chrome trace?")
    args = item.get("args")
    return Event(
        index=index, phase=str(item.get("ph", "")), name=str(item.get("name", "")),
        category=str(item.get("cat", "")).lower(), pid=str(item.get("pid", "")), tid=str(item.get("tid", "")),
        ts=_seconds(source, index, item, "ts"), dur=_seconds(source, index, item, "dur"),
        args=args if isinstance(args, dict) else {},
    )  # fmt: skip


def _seconds(source: SourceText, index: int, item: dict[str, object], key: str) -> float:
    number = finite(item.get(key, 0.0))
    if number is None or (number < 0 and key == "dur"):
        rule = "a number of microseconds" + (", not negative" if key == "dur" else "")
        raise source.error(None, f"traceEvents[{index}].{key} = {shown(item[key])} must be {rule}")
    return number * 1e-6
