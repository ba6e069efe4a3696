"""How long plans over more than 500 configurations take: of up to 128 workers, and of a model over 512, as JSON.

    python benchmarks/planner.py [--jobs N] [--only PLAN] [--json FILE]

The fastest configuration, and the cheapest that meets a deadline (for which fewer can be left out). `seconds` is real
time, `processor_seconds` that of all processes, whatever else the machine does: their start, crossovers, rules of thumb
and sensitivities included.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import ddlsim
from ddlsim.output_files import write_text

if TYPE_CHECKING:  # an older checkout calls it otherwise
    from ddlsim.planner import Recommendation

CLUSTER = "cloud-25g-16x8-v100"
WORKERS = [8, 16, 24, 32, 48, 64, 96, 112, 128]
TARGETS = {"fastest": ddlsim.Target(), "cheapest in 3 h": ddlsim.Target(deadline="3 h")}
TARGET_SECONDS = 120.0
#: GPT-3 175B over 512 A100: a search over tensor, pipeline, data, micro-batch, interleaving and recomputation
SPLIT, SPLIT_CLUSTER, SPLIT_SECONDS = "split", "selene+n_leaves=32", 60.0


def spent() -> float:
    """Return the processor time of this process and of its children that have ended, in s."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def plan(target: ddlsim.Target, jobs: int | None) -> dict[str, object]:
    """Recommend once, and return the time that it took."""
    started, before = time.perf_counter(), spent()
    found = ddlsim.recommend(
        CLUSTER, "resnet50", target, workers=WORKERS, batch_sizes=(32, 64, 96, 128), samples=90 * 1_281_167, jobs=jobs
    )
    seconds = time.perf_counter() - started
    return _row(CLUSTER, found, seconds, spent() - before, TARGET_SECONDS)


def split(
    jobs: int | None, *, model: str = "gpt3-175b", workers: int = 512, batch_size: int = 1536
) -> dict[str, object]:
    """Share a model out once, and return what it took."""
    started, before = time.perf_counter(), spent()
    base = ddlsim.Experiment(SPLIT_CLUSTER, model, precision="fp16", optimizer="adam")
    found = ddlsim.recommend(
        SPLIT_CLUSTER,
        model,
        strategies=[ddlsim.Splits()],
        workers=[workers],
        batch_sizes=[batch_size],
        base=base,
        jobs=jobs,
    )
    return _row(SPLIT_CLUSTER, found, time.perf_counter() - started, spent() - before, SPLIT_SECONDS)


def _row(
    cluster: str, found: Recommendation, seconds: float, processor_seconds: float, target: float
) -> dict[str, object]:
    return {
        "cluster": cluster,
        "configurations": len(found.table),
        "status": dict(Counter(found.table["status"])),
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "target_seconds": target,
        "best": str(found.best),
        "best_exact": str(found.best_exact),
        "throughput": found.best.throughput,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, help="processes (default: a core each)")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--only", choices=[*TARGETS, SPLIT], help="one of the plans")
    options = parser.parse_args()
    wanted = [*TARGETS, SPLIT] if options.only is None else [options.only]
    plans = {name: split(options.jobs) if name == SPLIT else plan(TARGETS[name], options.jobs) for name in wanted}
    text = json.dumps({"ddlsim": ddlsim.__version__, "plans": plans}, indent=2)
    print(text)
    if options.json is not None:
        write_text(options.json, text + "\n")


if __name__ == "__main__":
    main()
