"""NCCL sweeps predicted from machine and size alone, and the one number of each network plugin that was fitted to some.

``python -m accuracy.sweeps`` prints the rows, ``python -m accuracy.sweeps fit`` the fitted numbers. The procedure: what
a plugin's threads add to each message (`overhead` of the links) is the number of whole us with the least mean |error|
over the plugin's fitted sweeps (`FITTED`: of EFA all-reduces and all-gathers, 32 rows; of FasTrak every second size of
its one sweep, 16 rows). It stands in the topologies. All other numbers are NCCL's or the plugins' (`plugins.toml`).

A thread that launches the kernels of eight GPUs takes a + b n, because NCCL enqueues work for each of the n channels
that the buffer's size needs (`CHANNEL`). nccl-tests launches the next collective while the GPUs are busy, so the longer
of both times counts. The line is the least-squares fit to one sweep of all-reduces up to 512 KiB, in which the thread
takes longer than the GPUs. It stays outside the library, as trainings have a process for every GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from accuracy import collectives
from accuracy.rows import Row, mean_error, number, show
from ddlsim import collective_time, load_cluster
from ddlsim.cluster import Cluster, MultiGpu, star

__all__ = ["FAMILIES", "families", "fitted", "interpolated", "launches", "n_channels", "remark", "rows"]

DATA = Path(__file__).with_name("data") / "sweeps.yaml"
#: two CPUs with two GPUs each, joined as NCCL counts Skylake's (``src/graph/topo.h``); PCIe 3.0 x16
PCIE_4 = star(
    1,
    bandwidth="1 Gbit/s",  # not used
    latency="10 us",
    host=MultiGpu(n_gpus=4, n_pcie_switches=2, pcie_bandwidth="12 GB/s", cpu_bandwidth="10 GB/s"),
)
#: family -> its name on the page
FAMILIES = {
    "efa": "EFA, 2 and 8 p5.48xlarge",
    "fastrak": "FasTrak, 2 a3-megagpu-8g",
    "nvls": "NVSwitches that add up, one machine",
    "infiniband": "4 machines of 8 A100, network not stated",
    "one_thread": "one machine of 8 A100, one thread launches all kernels",
    "pcie": "4 GPUs on PCIe, through host memory",
}
#: family -> (cluster, us that are tried, whether a kind and the place of a size in its sweep are fitted)
FITTED = {
    "efa": ("aws-p5-48xlarge", range(41), lambda kind, place: kind != "all_to_all"),
    "fastrak": ("gcp-a3-mega", range(21), lambda kind, place: place % 2 == 0),
}
#: largest all-reduce (bytes) to which the launches of one thread are fitted, and its sweep
LAUNCHED, LAUNCHES = 512 * 2**10, "superbench_all_reduce"
#: channels of eight A100, and bytes per channel: 512 threads with 8 bytes per GPU for LL, which is used up to 1 MiB at
#: least; other protocols use all channels (``src/enqueue.cc``, getAlgoInfo, and ``src/graph/tuning.cc``, version 2.18)
N_CHANNELS, CHANNEL = 24, 8 * 512 * 8


def _cases() -> Iterator[tuple[dict[str, Any], dict[float, float]]]:
    """Yield each sweep and its s by bytes, those of ``collectives.yaml`` included."""
    for case in yaml.safe_load(DATA.read_text(encoding="utf-8"))["sweeps"]:
        n, laps = case["ranks"], 2 if case["kind"] == "all_reduce" else 1
        moved = laps * (n - 1) / n * 1e-9 if case.get("unit") == "GB/s" else 0.0
        data = {float(size): number(case["data"], size) for size in case["data"]}
        yield case, {size: moved * size / value if moved else value * 1e-6 for size, value in data.items()}
    known = {
        "nccl_a100_8gpu_allreduce": ("one_thread", "dgx-a100-pod", 8),
        "nccl_4x8_allreduce": ("infiniband", "ib-800g-a100", 32),
    }
    for case in yaml.safe_load(collectives.DATA.read_text(encoding="utf-8"))["collectives"]:
        if case["id"] in known:
            family, cluster, n = known[case["id"]]
            yield {**case, "family": family, "cluster": cluster, "ranks": n}, collectives.read_sweep(case)
        elif "ring only" in str(case["columns"]):
            for n, (measured, _) in case["data"].items():
                seconds = 2 * (n - 1) / n * 8 * collectives.GIB / (measured * 1e9)
                found = {**case, "family": "nvls", "cluster": "azure-nd-h200-v5", "ranks": n}
                yield {**found, "id": f"{case['id']}_{n}"}, {8 * collectives.GIB: seconds}


def _seconds(case: dict[str, Any], size: float, cluster: str | Cluster | None = None) -> float:
    place = cluster or (PCIE_4 if case["cluster"] == "pcie-4" else case["cluster"])
    kind, algorithm = case.get("kind", "all_reduce"), case.get("algorithm", "default")
    return collective_time(place, algorithm, size, kind=kind, ranks=case["ranks"])


@cache
def rows() -> list[Row]:
    """Return all sizes of all sweeps, in us."""
    cases = list(_cases())
    first, each = launches()
    found = []
    for case, data in cases:
        family, kind = case["family"], case.get("kind", "all_reduce")
        for place, (size, measured) in enumerate(sorted(data.items())):
            given = family in FITTED and FITTED[family][2](kind, place)
            given = given or (case["id"] == LAUNCHES and size <= LAUNCHED)
            predicted = _seconds(case, size)
            if family == "one_thread":
                predicted = max(predicted, first + each * n_channels(size))
            what = collectives.size_text(size)
            found.append(Row(f"{family}: {case['id']}", what, measured * 1e6, predicted * 1e6, "us", given))
    return found


def n_channels(nbytes: float) -> int:
    """Return the number of channels that NCCL uses on eight A100 for a buffer of `nbytes`."""
    return min(max(int(nbytes // CHANNEL), 1), N_CHANNELS)


def launches() -> tuple[float, float]:
    """Return the time (s) that a thread takes to launch a collective on eight GPUs: constant, and per channel."""
    data = next(data for case, data in _cases() if case["id"] == LAUNCHES)
    sizes = [size for size in data if size <= LAUNCHED]
    slope, first = np.polyfit([n_channels(size) for size in sizes], [data[size] for size in sizes], 1)
    return float(first), float(slope)


def families() -> dict[str, list[Row]]:
    """Return the rows of each family."""
    return {key: [row for row in rows() if row.case.startswith(f"{key}: ")] for key in FAMILIES}


def remark() -> str:
    """Return mean error and bias of each family, and the mean error of its fitted rows, as a list."""
    texts = []
    for key, name in FAMILIES.items():
        own = families()[key]
        judged = [row for row in own if not row.fitted_on]
        bias = sum(row.error for row in judged) / len(judged)
        text = f"- {name}: {mean_error(own):.1%} (bias {bias:+.1%}, {len(judged)} rows)"
        given = [abs(row.error) for row in own if row.fitted_on]
        texts.append(text + (f", {sum(given) / len(given):.1%} on {len(given)} fitted rows" if given else ""))
    return "\n".join(["Mean errors by machine:\n", *texts])


def fitted(family: str) -> tuple[float, float]:
    """Return the us that a plugin's threads add to a message, and the mean |error| of the fitted rows."""
    name, tried, chosen = FITTED[family]
    points = [
        (case, size, seconds)
        for case, data in _cases()
        for place, (size, seconds) in enumerate(sorted(data.items()))
        if case["family"] == family and chosen(case.get("kind", "all_reduce"), place)
    ]
    errors = {}
    for us in tried:
        cluster = load_cluster(f"{name}+overhead={us} us")
        off = [abs(_seconds(case, size, cluster) / seconds - 1.0) for case, size, seconds in points]
        errors[float(us)] = sum(off) / len(off)
    best = min(errors, key=errors.__getitem__)
    return best, errors[best]


def interpolated() -> tuple[int, float, float]:
    """Interpolate sweeps that :mod:`accuracy.collectives` does not read between every third size, from 32 KiB on.

    Return their number and the mean |error| of the other sizes, with times linear in the size and in the logarithms.
    """
    errors = []
    for case, data in _cases():
        sizes = np.array(sorted(size for size in data if size >= 2**15))
        if "nccl_" in case["id"] or len(sizes) <= 2 * collectives.EVERY:
            continue
        times = np.array([data[size] for size in sizes])
        known = np.arange(0, len(sizes), collectives.EVERY)
        others = np.setdiff1d(np.arange(known[-1]), known)
        logs, log_times = np.log(sizes), np.log(times)
        linear = np.interp(sizes[others], sizes[known], times[known])
        power = np.exp(np.interp(logs[others], logs[known], log_times[known]))
        errors.append([np.abs(each / times[others] - 1.0).mean() for each in (linear, power)])
    means = np.mean(errors, axis=0)
    return len(errors), float(means[0]), float(means[1])


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        for key in FITTED:
            best, error = fitted(key)
            print(f"{key}: overhead {best:g} us, mean |error| of the fitted rows {error:.1%}")
        first, each = launches()
        print(f"one_thread: launches take {1e6 * first:.1f} us and {1e6 * each:.2f} us per channel")
    else:
        show(rows())
        print(remark())
