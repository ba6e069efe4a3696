"""What whole runs cost: CPU seconds of named workloads beside their targets, as JSON.

    python benchmarks/workloads.py [--workload NAME ...] [--repeat N] [--against CHECKOUT] [--tiny] [--json FILE]

Compute times jitter (lognormal, 10 %), so no two rounds are alike and none can be replayed. Every run has a process
of its own, on one thread; ``seconds`` is the CPU time in it (user and system) of all that :func:`ddlsim.simulate` does
on a cluster that is loaded (models that are split: loading it included), after a tiny run that loads or compiles the
kernel; medians of the repeats. Where a workload is compared with something (a run without a timeline, the same
gradients in a plain loop), ``relative`` is the quotient of the two, and the target is one of that. ``ratio`` is what
was measured over the target.

With ``--against`` another checkout of ddlsim takes turns with this one, run by run, so that ``before`` (the other),
``seconds`` and ``speed_up``, the median of their quotients, do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, fat_tree, star
from ddlsim.network import Network, kernel
from ddlsim.network.view import Table
from ddlsim.output_files import write_text
from ddlsim.run.simulate import run
from ddlsim.strategies import Strategy

CHECKOUT = Path(__file__).resolve().parents[1]
#: what a first-time user does
FIRST = "import ddlsim; print(ddlsim.simulate('dgx1-v100', 'resnet50').throughput)"

#: Runs something, tiny or whole; returns "seconds" of CPU time, and "relative" where the target is one of that.
Work = Callable[[bool], dict[str, float]]


@dataclass(frozen=True)
class Workload:
    """What is run, and what it should stay below: CPU seconds, or a quotient where the work returns one."""

    name: str
    title: str
    work: Work
    target: float


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def switch(n_hosts: int) -> Cluster:
    return Cluster.from_graph(star(n_hosts, bandwidth="10 Gbit/s", latency="10 us"))


def machines(n_workers: int) -> Cluster:
    """Machines of 8 V100 each, 100 Gbit/s between them."""
    host = MultiGpu(n_gpus=8, inside="nvswitch", device="v100", nvlink_bandwidth="150 GB/s", pcie_bandwidth="12 GB/s")
    return Cluster.from_graph(star(n_workers // 8, bandwidth="100 Gbit/s", latency="10 us", host=host))


def experiment(cluster: Cluster, strategy: Strategy, workers: int, steps: int) -> ddlsim.Experiment:
    return ddlsim.Experiment(
        cluster,
        "resnet50",
        strategy,
        workers=workers,
        steps=steps,
        warmup=0,
        device="v100",
        jitter=ddlsim.Lognormal(0.1),
    )


def training(
    cluster: Callable[[int], Cluster], strategy: Strategy, workers: int, steps: int, beside: int, tiny: bool
) -> dict[str, float]:
    """Simulate a run of ResNet-50; the cluster has devices for the workers and as many `beside` them."""
    if tiny:
        workers, steps = 16, 1
    made = experiment(cluster(workers + beside), strategy, workers, steps)
    return {"seconds": cpu(lambda: run(made))}


def run_of(cluster: Callable[[int], Cluster], strategy: Strategy, workers: int, steps: int, beside: int = 0) -> Work:
    return partial(training, cluster, strategy, workers, steps, beside)


def split(model: str, leaves: int, layout: ddlsim.Parallel, batch_size: int, tiny: bool) -> dict[str, float]:
    """Simulate a step of a model that is split over the GPUs of a SuperPOD."""
    if tiny:
        model, leaves, layout, batch_size = "gpt3-175b", 8, ddlsim.Parallel(tensor=8, pipeline=2, data=2), 16
    made = ddlsim.Experiment(
        f"dgx-a100-pod+n_leaves={leaves}", model, layout, batch_size=batch_size, precision="fp16", steps=1, warmup=0
    )
    return {"seconds": cpu(lambda: run(made))}


def shards(workers: int, tiny: bool) -> dict[str, float]:
    """Simulate a step in which every GPU has a share of the weights (ZeRO stage 3)."""
    workers = 16 if tiny else workers
    made = ddlsim.Experiment(
        "dgx-h100-pod+n_leaves=16", "llama-7b", ddlsim.FSDP(stage=3), workers=workers, batch_size=workers,
        precision="bf16", steps=1, warmup=0,
    )  # fmt: skip
    return {"seconds": cpu(lambda: run(made))}


def jobs(tiny: bool) -> dict[str, float]:
    """Simulate eight jobs of 16 GPUs, anywhere on a fat tree of 128."""
    tree, steps = Cluster.from_graph(fat_tree(8, bandwidth="25 Gbit/s", latency="2 us")), 1 if tiny else 100
    made = experiment(tree, ddlsim.AllReduce("ring"), 16, steps)
    several = [ddlsim.Job(made.with_(seed=seed), placement="random", start=0.01 * seed) for seed in range(8)]
    return {"seconds": cpu(lambda: ddlsim.simulate_jobs(several))}


def timeline(tiny: bool) -> dict[str, float]:
    """A run that keeps its spans against one that does not."""
    workers, steps = (16, 1) if tiny else (256, 20)
    made = experiment(switch(workers), ddlsim.AllReduce("ring", overlap="ddp"), workers, steps)
    pairs = [(cpu(lambda: run(made, keep_spans=True)), cpu(lambda: run(made))) for _ in range(1 if tiny else 3)]
    return {
        "seconds": statistics.median(kept for kept, _ in pairs),
        "relative": statistics.median(kept / plain for kept, plain in pairs),
    }


def kernel_call(tiny: bool) -> dict[str, float]:
    """The way into the kernel and back, where nothing is to be done."""
    net, calls = Network(switch(16)).engine.net, 100 if tiny else 200_000
    table = Table()

    def call() -> None:
        for _ in range(calls):
            kernel.advance(table.of(net), 0.0)

    call()
    return {"seconds": cpu(call) / calls}


def co_simulation(tiny: bool) -> dict[str, float]:
    """16 asynchronous workers that learn digits, against the same gradients in a plain loop."""
    sys.path.insert(0, str(Path(__file__).parent))
    import cosimulation  # beside this file

    case = cosimulation.Case("", cosimulation.ASYNC, "digits-cnn", 16, 32, 32 if tiny else 3200, None)
    row = cosimulation.measure(case, 1 if tiny else 5)
    return {"seconds": cast(float, row["run_cpu_s"]), "relative": cast(float, row["ratio"])}


def first_result(tiny: bool) -> dict[str, float]:
    """A process that simulates a step as the first one after the installation: nothing is compiled (tiny: it is)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) if tiny else {**os.environ, "NUMBA_CACHE_DIR": folder}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", FIRST], env=environment, cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


RING, NESTED = ddlsim.AllReduce("ring", overlap="ddp"), ddlsim.AllReduce("hierarchical", overlap="ddp")
GPT3 = partial(split, "gpt3-175b", 64, ddlsim.Parallel(tensor=8, pipeline=8, data=16), 1536)
MEGATRON_1T = partial(
    split, "megatron+dim=25600+layers=128+heads=160", 160, ddlsim.Parallel(tensor=8, pipeline=64, data=6), 3072
)
FSDP_256, FSDP_512 = partial(shards, 256), partial(shards, 512)
SERVERS, ASYNC, GOSSIP = ddlsim.ParameterServer(64), ddlsim.AsyncParameterServer(), ddlsim.DPSGD("ring")
WORKLOADS = [
    Workload("ddp-ring-1024", "DDP ring, 1,024 workers, 100 steps", run_of(switch, RING, 1024, 100), 15.0),
    Workload("hierarchical-1024", "hierarchical, 128 x 8 GPUs, 10 steps", run_of(machines, NESTED, 1024, 10), 1.2),
    Workload("servers-256", "256 workers, 64 servers, 10 steps", run_of(switch, SERVERS, 256, 10, 64), 2.0),
    Workload("async-1024", "asynchronous server, 1,024 x 100 updates", run_of(switch, ASYNC, 1024, 100, 1), 2.0),
    Workload("gossip-256", "D-PSGD on a ring, 256 workers, 100 steps", run_of(switch, GOSSIP, 256, 100), 1.0),
    Workload("long-128", "hierarchical, 16 x 8 GPUs, 1,000 steps", run_of(machines, NESTED, 128, 1000), 4.0),
    Workload("gpt3-1024", "GPT-3 on 1,024 A100, a step of 1,536 sequences", GPT3, 1.0),
    Workload("megatron-1t", "Megatron with 1T parameters on 3,072 A100, a step of 3,072 sequences", MEGATRON_1T, 5.0),
    Workload("fsdp-256", "Llama 7B in shards over 256 H100, a step, rings on all interfaces", FSDP_256, 3.0),
    Workload("fsdp-512", "Llama 7B in shards over 512 H100, a step, rings on all interfaces", FSDP_512, 10.0),
    Workload("jobs", "eight jobs of 16 GPUs on a fat tree, 100 steps each", jobs, 5.0),
    Workload("kernel-call", "a kernel call from Python", kernel_call, 1e-6),
    Workload("co-simulation", "16 asynchronous workers learn digits, to the gradients alone", co_simulation, 1.15),
    Workload("timeline", "spans kept to not kept, DDP ring, 256 workers, 20 steps", timeline, 1.2),
    Workload("first-result", "first result after the installation", first_result, 10.0),
]
NAMES = [workload.name for workload in WORKLOADS]


def once(name: str, *, tiny: bool) -> dict[str, float]:
    """Run a workload in this process."""
    (workload,) = [one for one in WORKLOADS if one.name == name]
    if not tiny and name != "first-result":
        workload.work(True)  # loads or compiles the kernel
    return workload.work(tiny)


def in_process(name: str, checkout: Path, *, tiny: bool) -> dict[str, float]:
    """Run a workload in a process of its own, with the ddlsim of a checkout."""
    command = [sys.executable, __file__, "--workload", name, "--once", *(["--tiny"] if tiny else [])]
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(workload: Workload, repeat: int, against: Path | None, *, tiny: bool) -> dict[str, object]:
    """Return the row of a workload."""
    runs, others = [], []
    for _ in range(repeat):
        if against is not None:
            others.append(in_process(workload.name, against, tiny=tiny))
        runs.append(in_process(workload.name, CHECKOUT, tiny=tiny))
    quantity = "relative" if "relative" in runs[0] else "seconds"
    value = statistics.median(run[quantity] for run in runs)
    row: dict[str, object] = {"workload": workload.name, "title": workload.title}
    row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    row |= {"target": workload.target, "ratio": value / workload.target, "runs": [run[quantity] for run in runs]}
    if others:
        row["before"] = statistics.median(run[quantity] for run in others)
        quotients = [before[quantity] / run[quantity] for before, run in zip(others, runs, strict=True)]
        row["speed_up"] = statistics.median(quotients)
    return row


def machine() -> dict[str, object]:
    """Return what the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=NAMES, action="append", help="only this one; can be repeated")
    parser.add_argument("--repeat", type=int, default=3, help="processes per workload (default 3)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to take turns with")
    parser.add_argument("--tiny", action="store_true", help="few workers and steps: whether it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--once", action="store_true", help="run the chosen one here, and print what it took")
    args = parser.parse_args(argv)
    chosen = [one for one in WORKLOADS if args.workload is None or one.name in args.workload]
    if args.once:
        print(json.dumps(once(chosen[0].name, tiny=args.tiny)))
        return 0
    if args.against is not None and not (args.against / "ddlsim").is_dir():
        parser.error(f"--against {args.against}: no checkout of ddlsim is there")
    rows = []
    for workload in chosen:
        print(f"{workload.name} ...", file=sys.stderr, flush=True)
        rows.append(measure(workload, max(args.repeat, 1), args.against, tiny=args.tiny))
    text = json.dumps({"ddlsim": ddlsim.__version__, "machine": machine(), "workloads": rows}, indent=2)
    print(text)
    if args.json is not None:
        write_text(args.json, text + "\n")
    return 0 if all(cast(float, row["ratio"]) <= 1.0 for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
