"""By how much predictions deviate from measurements, by kind: what intervals rest on where no calibration tells.

``python -m accuracy.deviations`` predicts every row of the accuracy page, writes ``deviations/learned.toml`` (which the
library reads, see :mod:`ddlsim.cluster.calibrated`) and prints how often the intervals hold.

score      of a row: ln(measured / predicted), of times, less what its calibration says by itself, as the two add up in
           squares; rows that calibrate have none
kind       such as "run/all-reduce/strong": operation, algorithm or strategy, transport or setting; a kind's rows
           belong to those above it ("run/all-reduce", "run", "") too
quantile   one-sided, of 97.5 % on each side; every series of a kind counts the same, however many rows it has. Of n
           rows it is the one at (n + 1) / n of that level (split conformal prediction: Lei et al. 2018, Journal of the
           American Statistical Association 113), so of fewer than 39 it is the largest score. Its logarithm is the
           mean of that and of the quantile of the kind above, which counts as much as :data:`WEIGHT` rows; no quantile
           is less than the kind's own
judged by  leaving whole series out: the rows of each series are judged by quantiles from the others (a new cluster,
           system or algorithm); and by halves of all rows, drawn at random: each is judged by the other (a setting like
           those that were measured)
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accuracy.rows import TIMES, Row, covered, mean_error
from ddlsim.cluster.calibrated import Beyond, deviation
from ddlsim.output_files import write_text

__all__ = ["FILE", "Scored", "halves", "learn", "main", "scored", "series_left_out", "sides", "words", "written"]

FILE = Path(__file__).parents[1] / "deviations" / "learned.toml"
LEVEL, WEIGHT = 0.975, 20.0
LEAST = 1e-3  #: no prediction is surer than this

Learned = dict[str, Beyond]


@dataclass(frozen=True)
class Scored:
    """A prediction: `own` is the half width (logarithm) that its calibration alone gives, `series` what is left out."""

    row: Row
    series: str
    error: float
    own: float

    @property
    def score(self) -> float:
        """See above."""
        return math.copysign(math.sqrt(max(self.error**2 - self.own**2, 0.0)), self.error)

    def judged(self, given: Beyond) -> Row:
        """Return the row with the interval that it has if this is learned."""
        low, high = given.around(1.0, self.own, self.own)
        ends = (low, high) if self.row.unit in TIMES else (1.0 / high, 1.0 / low)
        return dataclasses.replace(self.row, interval=(ends[0] * self.row.predicted, ends[1] * self.row.predicted))


def series_of(key: str, case: str) -> str:
    """Return the series that a case of a family belongs to: its system, or its algorithm on the mini-cluster."""
    words = case.partition(": ")[2].split() or case.replace("-", "_").split(",")[0].split("_")[:2]
    return f"{key.removesuffix('_device')}: {' '.join(words[: 1 if ': ' in case else 2])}"


def scored(key: str, rows: Iterable[Row]) -> list[Scored]:
    """Return the predictions of a family that have a kind."""
    found = []
    for row in rows:
        if row.fitted_on or not row.kind or row.interval is None:
            continue
        sign, learned = (1.0 if row.unit in TIMES else -1.0), deviation(row.kind)
        error, whole = (sign * math.log(x / row.predicted) for x in (row.measured, row.interval[sign > 0.0]))
        own = math.sqrt(max(whole**2 - learned.slower**2, 0.0))
        found.append(Scored(row, series_of(key, row.case), error, own))
    return found


def sides(rows: Sequence[Scored]) -> tuple[float, float]:
    """Return the quantiles of how much faster and how much slower than predicted the rows are."""
    count = Counter(row.series for row in rows)
    weights = np.array([1.0 / count[row.series] / len(count) for row in rows])
    found = []
    for sign in (-1.0, 1.0):
        scores = np.array([max(sign * row.score, LEAST) for row in rows])
        order = np.argsort(scores)
        at = np.searchsorted(np.cumsum(weights[order]), min(LEVEL * (len(rows) + 1) / len(rows), 1.0) - 1e-9)
        found.append(float(scores[order][min(int(at), len(rows) - 1)]))
    return found[0], found[1]


def learn(rows: Sequence[Scored]) -> Learned:
    """Return what is learned from rows, by kind."""
    by_kind: dict[str, list[Scored]] = {}
    for row in rows:
        parts = row.row.kind.split("/")
        for n in range(len(parts) + 1):
            by_kind.setdefault("/".join(parts[:n]), []).append(row)
    found: Learned = {}
    for kind in sorted(by_kind):  # each after the kind above it
        own, share = sides(by_kind[kind]), len(by_kind[kind]) / (len(by_kind[kind]) + WEIGHT)
        if kind:
            above = found[kind.rpartition("/")[0]]
            mixed = (x**share * y ** (1.0 - share) for x, y in zip(own, (above.faster, above.slower), strict=True))
            own = tuple(map(max, own, mixed))  # type: ignore[assignment]
        found[kind] = Beyond(0.0, (), 0.0, *own)
    return found


def nearest(learned: Learned, kind: str) -> Beyond:
    """Return what is learned for a kind, or for the kind above it."""
    while kind not in learned:
        kind = kind.rpartition("/")[0]
    return learned[kind]


def series_left_out(rows: Sequence[Scored]) -> list[Row]:
    """Return the rows, judged by what all other series tell."""
    names = dict.fromkeys(row.series for row in rows)
    others = {name: learn([row for row in rows if row.series != name]) for name in names}
    return [row.judged(nearest(others[row.series], row.row.kind)) for row in rows]


def halves(rows: Sequence[Scored]) -> list[Row]:
    """Return the rows, those of each half judged by what the other one tells."""
    drawn = (np.random.default_rng(0).permutation(len(rows)) % 2).tolist()
    other = [learn([row for row, part in zip(rows, drawn, strict=True) if part != half]) for half in (0, 1)]
    return [row.judged(nearest(other[part], row.row.kind)) for row, part in zip(rows, drawn, strict=True)]


def written(rows: Sequence[Scored]) -> str:
    """Return the file that the library reads."""
    lines = [
        "# How much faster and slower measurements were than predicted, by kind of prediction: one-sided 97.5 %",
        "# quantiles of ln(measured / predicted), of times. Written by `python -m accuracy.deviations` (it says how)",
        "# from the measurements in accuracy/data and tests/accuracy/data, whose sources docs/accuracy/ names.",
        "[kinds]",
    ]
    for kind, learned in learn(rows).items():
        own = [row for row in rows if not kind or f"{row.row.kind}/".startswith(f"{kind}/")]
        lines.append(
            f'"{kind}" = {{ faster = {learned.faster:.4f}, slower = {learned.slower:.4f}, '
            f"series = {len({row.series for row in own})}, rows = {len(own)} }}"
        )
    return "\n".join([*lines, ""])


def words(rows: Sequence[Scored], judge: Callable[[Sequence[Scored]], list[Row]]) -> str:
    """Return coverage, misses on the slow side, half-width and mean error of all rows as sentences, without the last
    period."""
    judged = judge(rows)
    inside, half = covered(judged) or (math.nan, math.nan)
    ends = [(row, row.interval) for row in judged if row.interval is not None]
    slow = sum(row.measured > high if row.unit in TIMES else row.measured < low for row, (low, high) in ends)
    missed = round((1.0 - inside) * len(judged))
    return (
        f"{inside:.1%} of the {len(judged):,} measured values fall within their intervals. Of the {missed} values "
        f"outside, {slow} are slower than predicted. The median half-width of the intervals is {half:.1%}, and the "
        f"mean error is {mean_error(judged):.1%}"
    )


def main() -> None:
    """Predict everything, write the file, and print how often intervals hold."""
    from accuracy.families import FAMILIES

    rows = [each for family in FAMILIES for each in scored(family.key, family.rows())]
    write_text(FILE, written(rows))
    print(f"series left out: {words(rows, series_left_out)}")
    print(f"halves: {words(rows, halves)}")


if __name__ == "__main__":
    main()
