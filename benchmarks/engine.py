"""How fast the network engine is: CPU seconds, simulated times and memory of standard scenarios, as JSON.

    python benchmarks/engine.py [--repeat N] [--scenario NAME] [--json FILE]

`cpu_s` is all the CPU time of a simulation on a cluster and a schedule that exist already: making the network,
compiling the schedule for it, running to the end. `run_cpu_s` is the last part of it, what a second execution
of the same collective costs. For a training step, `cpu_s` is all that :func:`ddlsim.simulate` takes. Medians of
the repeats, after a first small run that compiles the kernel. Memory is the peak of a process of its own that
does nothing else.

`expected_simulated_s` comes from other programs (LogGOPSim, ASTRA-sim, SimGrid) or from filling all flows anew at
every event, except where the scenario says otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, fat_tree, load_cluster, star, with_detail
from ddlsim.collectives import Schedule, all_reduce, all_to_all, build
from ddlsim.network import Network
from ddlsim.output_files import write_text

LINK = {"bandwidth": "10 Gbit/s", "latency": "10 us"}
MIB = 2**20


#: Runs something once; returns CPU seconds, simulated seconds and numbers of messages.
Work = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Scenario:
    """What is run, the simulated seconds that come out (None: not known beforehand), and the limits."""

    name: str
    title: str
    make: Callable[[], Work]
    target_cpu_s: float
    simulated_s: float | None = None
    target_mib: float | None = None


def switch(n_hosts: int) -> Cluster:
    return Cluster.from_graph(star(n_hosts, **LINK))


def tree() -> Cluster:
    """128 hosts on a k = 8 fat tree with D-mod-k routing."""
    return Cluster.from_graph(fat_tree(8, **LINK))


def ring(n_hosts: int) -> Work:
    return partial(collective, switch(n_hosts), all_reduce.ring(n_hosts), 1e8)


def uneven_ring(n_hosts: int) -> Work:
    """Every one of the 2 n (n-1) messages has a size of its own, 0.5 to 1.5 times the even one."""
    schedule = all_reduce.ring(n_hosts)
    rng = np.random.default_rng(1)
    sizes = [rng.uniform(0.5, 1.5, (r.repeat, len(r.src))) * 1e8 / n_hosts for r in schedule.lanes[0]]
    return partial(collective, switch(n_hosts), schedule, sizes)


def pairwise(cluster: Cluster) -> Work:
    """1 MB for every pair, partners in turn."""
    n = len(cluster.workers)
    return partial(collective, cluster, all_to_all.pairwise(n), 1e6 * n)


def all_pairs(cluster: Cluster) -> Work:
    """All pairs at once, sizes spread over 0.5 to 1.5 MB so that nearly every flow ends alone."""
    schedule = all_to_all.direct(len(cluster.workers))
    (round,) = schedule.lanes[0]
    sizes = (1e6 * (0.5 + (7919 * round.src + 104729 * round.dst) % 1000 / 1000)).astype(np.int64)
    return partial(collective, cluster, schedule, [sizes.astype(np.float64)[None, :]])


def queued(n_hosts: int) -> Work:
    """The same on links that serve bytes in the order of their arrival."""
    return all_pairs(with_detail(switch(n_hosts), sharing="fifo"))


def pod(algorithm: str, n_gpus: int, nbytes: float) -> Work:
    """An all-reduce of so many GPUs of a SuperPOD, by one ring or over all the channels that NCCL has."""
    cluster = load_cluster("dgx-a100-pod+n_leaves=32")
    where = cluster, tuple(cluster.workers[:n_gpus].tolist())
    return partial(collective, cluster, build(algorithm, n_gpus, nbytes, where=where), nbytes)


def ddp_step() -> Work:
    """One step of ResNet-50 in DDP buckets on 128 machines of 8 V100, 100 Gbit/s between them."""
    host = MultiGpu(
        n_gpus=8,
        inside="nvswitch",
        device="v100",
        nvlink_bandwidth="150 GB/s",
        pcie_bandwidth="12 GB/s",
    )
    return partial(train, Cluster.from_graph(star(128, bandwidth="100 Gbit/s", latency="10 us", host=host)))


SCENARIOS = [
    Scenario("ring-256", "ring, 256 hosts on a switch", lambda: ring(256), 0.012, 0.169575),
    Scenario("ring-1024", "ring, 1,024 hosts", lambda: ring(1024), 0.25, 0.20076375, 300.0),
    Scenario("uneven-ring-1024", "ring, 1,024 hosts, all message sizes different", lambda: uneven_ring(1024), 1.0),
    Scenario("pairwise-256", "pairwise all-to-all, 256 hosts", lambda: pairwise(switch(256)), 0.015, 0.2091),
    Scenario("pairwise-tree-128", "pairwise all-to-all, k=8 fat tree", lambda: pairwise(tree()), 0.005, 0.10922),
    Scenario("all-pairs-64", "all pairs at once, 64 hosts", lambda: all_pairs(switch(64)), 0.08, 0.0516904233331),
    # the last of the bytes to the node that gets most, which its link has to serve without a pause
    Scenario("all-pairs-fifo-64", "the same in order of arrival", lambda: queued(64), 0.08),
    # Plain max-min, all flows filled anew at every event; SimGrid says 0.106927285316, because it gives flows
    # shares in inverse proportion to the latency of their routes (docs/models/network.md).
    Scenario("all-pairs-tree-128", "all pairs, k=8 fat tree", lambda: all_pairs(tree()), 5.0, 0.105672577505346),
    Scenario("ring-16384", "ring, 16,384 hosts", lambda: ring(16_384), 10.0, None, 1000.0),
    Scenario("pod-ring-64", "one ring, 64 A100 of a SuperPOD, 10 GB", lambda: pod("ring", 64, 1e10), 0.01),
    Scenario("pod-nccl-64", "NCCL's 8 rings, 64 A100, 10 GB", lambda: pod("nccl", 64, 1e10), 0.01),
    Scenario("pod-ring-512", "one ring, 512 A100, 10 GB", lambda: pod("ring", 512, 1e10), 0.1),
    Scenario("pod-nccl-512", "NCCL's 8 rings, 512 A100, 10 GB", lambda: pod("nccl", 512, 1e10), 0.1),
    Scenario("pod-trees-512", "NCCL's double trees on 8 channels, 512 A100, 1 GB", lambda: pod("nccl", 512, 1e9), 0.3),
    Scenario("ddp-step-1024", "ResNet-50 DDP step, 1,024 V100, hierarchical all-reduce", ddp_step, 1.0),
]


def collective(cluster: Cluster, schedule: Schedule, nbytes: float | Sequence[np.ndarray]) -> dict[str, float]:
    """Run one collective; `nbytes` as in :meth:`ddlsim.network.Network.collective`."""
    begin = time.process_time()
    network = Network(cluster)
    n = schedule.n_ranks
    number = network.collective(schedule, cluster.workers[:n], nbytes)
    ready = time.process_time()
    network.join(np.full(n, number), np.arange(n), 0.0)
    last = 0.0
    while (done := network.advance()) is not None:
        last = done.time
    end = time.process_time()
    return {
        "simulated_s": last,
        "messages": network.n_messages,
        "replayed": network.n_replayed,
        "cpu_s": end - begin,
        "run_cpu_s": end - ready,
    }


def train(cluster: Cluster) -> dict[str, float]:
    """Run one training step on all workers of the cluster."""
    begin = time.process_time()
    result = ddlsim.simulate(
        cluster,
        model="resnet50",
        strategy=ddlsim.AllReduce("hierarchical", overlap="ddp"),
        steps=1,
        warmup=0,
    )
    end = time.process_time()
    return {"simulated_s": result.end_time, "messages": result.n_messages, "cpu_s": end - begin}


def measure(scenario: Scenario, repeat: int) -> dict[str, object]:
    """Return the report of one scenario."""
    work = scenario.make()
    collective(switch(4), all_reduce.ring(4), 1e6)  # loads or compiles the kernel
    runs = [work() for _ in range(repeat)]
    report: dict[str, object] = {"scenario": scenario.name, "title": scenario.title, **runs[0]}
    for key in ("cpu_s", "run_cpu_s"):
        if key in report:
            report[key] = statistics.median(run[key] for run in runs)
    report["target_cpu_s"] = scenario.target_cpu_s
    reached = report["cpu_s"] <= scenario.target_cpu_s
    if scenario.simulated_s is not None:
        report["expected_simulated_s"] = scenario.simulated_s
        reached &= abs(runs[0]["simulated_s"] / scenario.simulated_s - 1) < 1e-9
    if scenario.target_mib is not None:
        report["peak_mib"] = peak_mib(scenario.name)
        report["target_mib"] = scenario.target_mib
        reached &= report["peak_mib"] <= scenario.target_mib
    report["reached"] = reached
    return report


def peak_mib(name: str) -> float:
    """Return the peak memory of a process that builds and runs one scenario."""
    command = [sys.executable, __file__, "--scenario", name, "--peak-memory"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="measured runs per scenario (default 5)")
    parser.add_argument("--scenario", choices=[s.name for s in SCENARIOS], help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--peak-memory", action="store_true", help="run once, print the peak memory in MiB")
    args = parser.parse_args(argv)
    chosen = [s for s in SCENARIOS if args.scenario in (None, s.name)]
    if args.peak_memory:
        for scenario in chosen:
            scenario.make()()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB)
        return 0
    reports = [measure(scenario, max(args.repeat, 1)) for scenario in chosen]
    text = json.dumps(reports, indent=2)
    print(text)
    if args.json is not None:
        write_text(args.json, text + "\n")
    return 0 if all(report["reached"] for report in reports) else 1


if __name__ == "__main__":
    raise SystemExit(main())
