"""Reader for MLPerf training logs: ``:::MLLOG {json}`` lines, and the older formats of v0.5 and v0.6.

Format: https://github.com/mlcommons/logging (``mlperf_logging/mllog``; keys in ``constants.py``), with any prefix
before the three colons; v0.5 and v0.6: https://github.com/mlperf/training (the package mlperf_compliance).

Several ranks may log the same: for one-time keys, the first entry counts; repeated accuracies and epochs are dropped.
Object detection logs two accuracies at a time (boxes and masks), as a list or under names, image generation under
``metric``. Evaluations after ``run_stop`` are evaluations of checkpoints. They count when training reached the
checkpoint, according to the ends of epochs and blocks, or else at ``run_stop``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ddlsim.arguments import Index, checked
from ddlsim.errors import ConfigError
from ddlsim.imports.json_values import Node, beginning
from ddlsim.imports.text import LeftOut, SourceText, read_text
from ddlsim.imports.timing import Timing

_MLLOG = re.compile(r":::MLL(?:OG\s*|\s+(?P<time>[\d.]+)\s+(?P<key>\w+):\s*)(?=\{)")
_KEY = re.compile(r'"key":\s*"(\w+)"')
#: keys that are used
_COUNT = {"submission_benchmark", "global_batch_size", "train_samples", "run_start", "run_stop", "run_final"}
_COUNT |= {"eval_accuracy", "epoch_start", "epoch_stop", "block_start", "block_stop", "throughput", "tracked_stats"}
_MARK = re.compile(r":::MLL(?:OG\b|\s)")
_OLD = re.compile(
    r"(?::::MLPv0\.[56](?:\.\d+)?\s+(?P<benchmark>\S+)\s+(?P<time>[\d.]+)\s+\([^)]*\)"
    r"|\bMLPerf:\s+(?P<name>\S+)\s+\[(?P<date>\d\d/\d\d/\d\d \d\d:\d\d:\d\d)\],)\s+(?P<key>\w+)(?::\s*(?P<value>.*))?$"
)
_PERCENT = re.compile(r"(?<=[:\s])([0-9]{1,3}(?:\.[0-9]{1,12})?)%")
#: keys of the first rounds -> current keys
_RENAMED = {"preproc_num_train_examples": "train_samples"}
_EPOCH_KEYS = ("epoch_num", "epoch", "first_epoch_num", "epoch_no", "samples_count", "iteration", "step_num")


@dataclass(frozen=True)
class MlperfRun:
    """One run of an MLPerf training benchmark.

    run_s        MLPerf's score: seconds from run_start to run_stop; NaN if either is missing from the log
    status       "success", "aborted", "killed" (the log ends without run_stop), or "" (run_stop has no status)
    global_batch_size   samples per step over all ranks; 0: not in the log
    train_samples       samples in the training set; 0: not in the log
    accuracies   one tuple per evaluation: the seconds since run_start, the epoch or sample number in the log, and the
                 measured value
    metrics      metric of each accuracy, as named in the log, such as "BBOX" or "SEGM". If an evaluation is a list of
                 values, this is the index in the list; for a single value without a name, it is ""
    epochs       one tuple per epoch: its number, and the seconds from epoch_start to epoch_stop. If the log only
                 contains times of blocks of several epochs, this is the average time per epoch
    timings      one "step" timing for each logged throughput and, if `train_samples` is known, one "epoch" timing for
                 each epoch
    notes        remarks on the log, such as skipped entries, evaluations after run_stop, and the length of a killed run
    """

    benchmark: str
    status: str
    run_s: float
    global_batch_size: int
    train_samples: int
    accuracies: tuple[tuple[float, float, float], ...]
    metrics: tuple[str, ...]
    epochs: tuple[tuple[float, float], ...]
    timings: tuple[Timing, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    line: int
    key: str
    time_s: float
    value: Node
    metadata: Node

    def epoch(self) -> float:
        """Return the epoch (or the unit that the log uses instead); 0 if missing."""
        for node in (self.metadata, self.value):
            for key in _EPOCH_KEYS:
                if node.has(key):
                    return node[key].number()
        return self.value.number() if isinstance(self.value.value, int | float) and self.key.startswith("ep") else 0.0


@checked
def read_mllog(path: str | Path, *, n_ranks: Index = 0) -> MlperfRun:
    """Read an MLPerf training log that contains one run.

    n_ranks   number of accelerators, which cannot be read from the log; 0: unknown

    Invalid entries are skipped, and a warning says how many.

    Raises ConfigError, giving the file, line and reason, if the log contains more than one run, or none (as in a power
    log), or if its timestamps decrease.
    """
    source = read_text(path, log=True)
    broken, entries = list[str](), list[_Entry]()
    left_out = LeftOut(ConfigError)
    for number, line in source.lines():
        with left_out:
            entries.extend(_entries(source, number, line, broken))
    notes = source.notes
    if broken:
        keys = ", ".join(sorted(set(broken)))
        notes += (f"{source.path}: skipped {len(broken)} invalid entries with the keys {keys}",)
    if not any(entry.key in _COUNT for entry in entries):
        left_out.tell(entries)
        if any(entry.key.startswith("power_") for entry in entries):
            raise source.error(None, "this is an MLPerf power log; read the corresponding result_*.txt instead")
        raise source.error(None, "no ':::MLLOG {...}' lines of a run (run_start, ...) found; is it an MLPerf log?")
    entries.sort(key=lambda entry: entry.time_s)  # ranks write in any order; stable for equal times
    once: dict[str, _Entry] = {}
    for entry in entries:
        once.setdefault(entry.key, entry)
    start, stop = once.get("run_start"), once.get("run_stop") or once.get("run_final")
    _check_single(source, entries)
    if start is not None and stop is not None and stop.time_s < start.time_s:
        raise source.error(stop.line, "run_stop is before run_start; is it the log of a single run?")
    counts = {"global_batch_size": 0, "train_samples": 0}
    for key in counts:
        with left_out:
            if key in once and once[key].value.value is not None:
                counts[key] = once[key].value.count()
    batch, samples = counts.values()
    begin = start.time_s if start is not None else entries[0].time_s
    epochs = _epochs(entries)
    accuracies, late = _accuracies(entries, begin, stop, left_out)
    timings = _steps(source, entries, batch, n_ranks, left_out)
    for epoch, seconds, at_line in epochs if samples else ():
        name, at = f"epoch {epoch:g}", f"{source.path}:{at_line}"
        timing = Timing("mlperf", "epoch", n_ranks, 0.0, seconds, "single", n_reps=1, variant=name, place=at)
        timings.append(replace(timing, n_samples=float(samples)))
    left_out.tell(start or stop or accuracies or epochs or timings)
    if late:
        reached = "each is assigned the time at which training reached the evaluated point"
        notes += (f"{source.path}: {late} evaluations were logged after run_stop; {reached}",)
    status, run_s = "", math.nan
    if stop is not None:
        run_s = stop.time_s - begin if start is not None else math.nan
        if stop.metadata.has("status"):
            status = stop.metadata["status"].text()
        elif stop.metadata.has("success"):  # v0.5
            status = {"true": "success", "false": "aborted"}.get(str(stop.metadata["success"].value).lower(), "")
    elif start is not None:
        status, seconds = "killed", entries[-1].time_s - begin
        notes += (f"{source.path}: the log ends {seconds:.6g} s after run_start without run_stop; was the run killed?",)
    rows, names = tuple(row for row, _ in accuracies), tuple(name for _, name in accuracies)
    lengths = tuple((number, seconds) for number, seconds, _ in epochs)
    summary = _benchmark(source, once), status, run_s, batch, samples
    return MlperfRun(*summary, rows, names, lengths, tuple(timings), notes)


def _entries(source: SourceText, number: int, line: str, broken: list[str]) -> Iterator[_Entry]:
    """Yield the entries of a line; with several ranks, it may contain several entries, and other output after them.

    A broken entry with a required key is an error; keys of other broken entries are added to `broken`.
    """
    place = f"{source.path}:{number}: "
    matches = list(_MLLOG.finditer(line))
    for match in matches:
        try:
            node = Node(beginning(line[match.end() :]), place)
        except (ValueError, RecursionError) as error:
            key = match["key"] or next(iter(_KEY.findall(line, match.end())), None)
            if key is None or key in _COUNT:
                mark = match[0].split()[0]
                raise source.error(number, f"not valid JSON after {mark}: {error}; is the line complete?") from None
            broken.append(key)
            continue
        metadata = node["metadata"] if node.has("metadata") else Node({}, place)
        value = node["value"] if node.has("value") else Node(None, place)
        if match["key"]:
            yield _Entry(number, match["key"], Node(match["time"], place).number(), value, metadata)
        else:
            yield _Entry(number, node["key"].text(), node["time_ms"].number() * 1e-3, value, metadata)
    if len(matches) < len(_MARK.findall(line)):
        raise source.error(number, "truncated: no {...} follows :::MLLOG or :::MLL; is the line complete?")
    if old := _OLD.search(line):
        value = Node(old["value"], place)
        with suppress(ValueError, RecursionError):  # JSON, with percentages as fractions, or else a word
            fractions = _PERCENT.sub(lambda match: repr(float(match[1]) / 100), old["value"] or "null")
            value = Node(json.loads(fractions), place)
        if old["time"]:
            time = Node(old["time"], place).number()
        else:
            try:
                time = datetime.strptime(old["date"], "%m/%d/%y %H:%M:%S").replace(tzinfo=UTC).timestamp()
            except ValueError:
                what = f"{old['date']!r} is not a date (month/day/year hours:minutes:seconds)"
                raise source.error(number, f"{what}; correct it") from None
        yield _Entry(number, _RENAMED.get(old["key"], old["key"]), time, value, value)


def _benchmark(source: SourceText, once: dict[str, _Entry]) -> str:
    """Return the benchmark's name; logs of the first rounds contain it in every line."""
    if "submission_benchmark" in once:
        return str(once["submission_benchmark"].value.value)
    lines = source.lines()
    return next((match["benchmark"] or match["name"] for _, line in lines if (match := _OLD.search(line))), "")


def _check_single(source: SourceText, entries: list[_Entry]) -> None:
    """Raise ConfigError if a run starts after another one has ended, or was killed after some progress."""
    last: _Entry | None = None
    for entry in entries:
        if entry.key in ("run_stop", "eval_accuracy", "epoch_stop", "block_stop"):
            last = entry
        elif entry.key == "run_start" and last is not None:
            ended = "ended in" if last.key == "run_stop" else "was killed after"
            raise source.error(entry.line, f"a second run starts (the first {ended} line {last.line}); split the log")


def _accuracies(
    entries: list[_Entry], begin: float, stop: _Entry | None, left_out: LeftOut
) -> tuple[list[tuple[tuple[float, float, float], str]], int]:
    """Return the accuracies, each with the name of its metric, and the number of evaluations logged after the run.

    Duplicates from other ranks are dropped, and so are evaluations of states after the end of the run.
    """
    reached = {entry.epoch(): entry.time_s for entry in reversed(entries) if entry.key in ("block_stop", "epoch_stop")}
    rows: dict[tuple[float, str, str], tuple[float, float, float]] = {}
    n_late = 0
    for entry in entries:
        if entry.key != "eval_accuracy" or entry.value.value is None:
            continue
        with left_out:
            value = entry.value["value"] if entry.value.has("value") else entry.value
            name = entry.metadata["metric"].text() if entry.metadata.has("metric") else ""
            metrics = {name: value}
            if isinstance(value.value, dict):
                metrics = {str(name): value[name] for name in value.value}
            elif isinstance(value.value, list):
                metrics = {str(place): node for place, node in enumerate(value.items())}
            time, late = entry.time_s, stop is not None and entry.time_s > stop.time_s
            if stop is not None and late:
                time = reached.get(entry.epoch(), stop.time_s)
                if time > stop.time_s:
                    raise value.entry_error("evaluates a point after run_stop that training had not reached")
            for name, node in metrics.items():
                row = (time - begin, entry.epoch(), node.number())
                n_late += late and (row[1], name, f"{row[2]:.12g}") not in rows
                rows.setdefault((row[1], name, f"{row[2]:.12g}"), row)
    accuracies = [(row, name) for (_, name, _), row in rows.items()]
    return sorted(accuracies, key=lambda pair: pair[0][0]), n_late


def _epochs(entries: list[_Entry]) -> list[tuple[float, float, int]]:
    """Return (number, s per epoch, line) of every epoch, or of every block if the log only has blocks."""
    unit = "epoch" if any(entry.key == "epoch_stop" for entry in entries) else "block"
    begun: dict[float, _Entry] = {}
    epochs: dict[float, tuple[float, float, int]] = {}
    for entry in entries:
        if entry.key == f"{unit}_start":
            begun.setdefault(entry.epoch(), entry)
        elif entry.key == f"{unit}_stop" and (start := begun.get(entry.epoch())) is not None:
            n_epochs = start.metadata["epoch_count"].positive() if start.metadata.has("epoch_count") else 1.0
            if entry.time_s > start.time_s:
                seconds = (entry.time_s - start.time_s) / n_epochs
                epochs.setdefault(entry.epoch(), (entry.epoch(), seconds, start.line))
    return list(epochs.values())


def _steps(source: SourceText, entries: list[_Entry], batch: int, n_ranks: int, left_out: LeftOut) -> list[Timing]:
    """Return a step timing per logged throughput (samples/s), for the global batch, or one sample if it is unknown."""
    timings, samples = list[Timing](), float(batch or 1)
    for entry in entries:
        tracked = entry.key == "tracked_stats" and entry.value.has("throughput")
        if tracked or entry.key == "throughput":
            with left_out:
                rate, place = entry.value["throughput"] if tracked else entry.value, f"{source.path}:{entry.line}"
                seconds = samples / rate.positive()
                timings.append(Timing("mlperf", "step", n_ranks, 0.0, seconds, n_samples=samples, place=place))
    return timings
