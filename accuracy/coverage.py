"""Every figure of the file of published cases is predicted in some section, or listed here with the reason.

A case belongs to one section: gains of techniques, strong scaling, hybrids, or weak scaling; what is none of these has
no section, and why is what :func:`accuracy.published.read` says about it.
"""

from __future__ import annotations

from pathlib import Path

from accuracy import hybrids, published, strong, techniques
from accuracy.rows import Omitted, UnpredictableError

__all__ = ["left_out"]

#: what the data file does not say of itself
REASONS = {
    "ffn_horovod_theta_knl": "its losses are caused by stragglers, about which no one-node row has information",
    "mlsl_zenith_resnet50": "only efficiencies, with batches per node that shrink beyond some number of nodes",
    "dawnbench_resnet50_93top5": "seconds to an accuracy, under different training schedules",
}


def left_out(path: Path = published.DATA) -> list[Omitted]:
    """Return the figures of cases without a section, and the columns of weak scaling that say no step time."""
    found: list[Omitted] = []
    for case in published.cases(path):
        if techniques.claims(case) or strong.claims(case) or hybrids.claims(case):
            continue
        name, n_rows = str(case.get("id")), len(case.get("measured") or [])
        try:
            runs, omitted = published.read(case)
            found += omitted if runs else [Omitted(name, f"{n_rows} rows", "no step time is stated")]
        except UnpredictableError as error:
            found.append(Omitted(name, f"{n_rows} rows", REASONS.get(name, str(error))))
    return found


if __name__ == "__main__":
    for each in left_out():
        print(f"{each.case:42} {each.what:24} not predicted: {each.reason}")
