"""What whole runs cost: CPU seconds of named workloads beside their targets, and in yardsticks, as JSON.

    python benchmarks/workloads.py [--workload NAME ...] [--repeat N] [--against CHECKOUT] [--tiny] [--json FILE]

Compute times jitter (lognormal, 10 %) unless a title says otherwise, so no two rounds are alike and none can be
replayed. Every run has a process of its own, on one thread. ``seconds`` is the CPU time (user and system, child
processes included) of all that :func:`ddlsim.simulate` does on a loaded cluster (models that are split: loading
included), after a tiny run that loads or compiles the kernel; medians of the repeats. Where a workload is compared with
something (a run without a timeline, the same gradients in a plain loop), ``relative`` is the quotient of the two; where
memory is measured, ``mebibytes`` is what is held at the end. The target is one of these if there is one, else of
seconds. ``ratio`` is what was measured over the target.

Seconds differ by a factor of two between machines. ``yardsticks`` are the seconds over those of a fixed small task
(:func:`yardstick`) in the same process, before and after the workload; compare these between machines.

With ``--against`` another checkout of ddlsim takes turns with this one, run by run, so that ``before`` (the other),
``seconds`` and ``speed_up``, the median of their quotients, do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, fat_tree, leaf_spine, star
from ddlsim.collectives import all_reduce
from ddlsim.network import Network, kernel
from ddlsim.output_files import write_text
from ddlsim.run.prepare import prepare
from ddlsim.run.simulate import run
from ddlsim.strategies import Strategy

CHECKOUT = Path(__file__).resolve().parents[1]
#: what a first-time user does
FIRST = "import ddlsim; print(ddlsim.simulate('dgx1-v100', 'resnet50').throughput)"
#: what a process runs that simulates a step of GPT-3
GPT3_ALONE = (
    "import ddlsim; layout = ddlsim.Parallel(tensor=8, pipeline=8, data=16); ddlsim.simulate("
    "'dgx-a100-pod+n_leaves=64', 'gpt3-175b', layout, batch_size=1536, precision='fp16', steps=1, warmup=0)"
)

#: Runs something, tiny or whole; returns "seconds" of CPU time, and "relative" or "mebibytes" if the target is of that.
Work = Callable[[bool], dict[str, float]]


@dataclass(frozen=True)
class Workload:
    """What is run, and what it should stay below: CPU seconds, or a quotient where the work returns one."""

    name: str
    title: str
    work: Work
    target: float


def spent() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = spent()
    call()
    return spent() - start


def yardstick() -> float:
    """Return the CPU seconds of a fixed task: integers in a Python loop, then floats in arrays."""

    def task() -> None:
        number = 1
        for _ in range(400_000):
            number = (1103515245 * number + 12345) % (1 << 31)
        values = np.linspace(0.0, 1.0, 200_000)
        for _ in range(40):
            values = np.sort(values * 3.7 % 1.0) + values[::-1]

    return cpu(task)


def switch(n_hosts: int) -> Cluster:
    return Cluster.from_graph(star(n_hosts, bandwidth="10 Gbit/s", latency="10 us"))


def machines(n_workers: int) -> Cluster:
    """Machines of 8 V100 each, 100 Gbit/s between them."""
    host = MultiGpu(n_gpus=8, inside="nvswitch", device="v100", nvlink_bandwidth="150 GB/s", pcie_bandwidth="12 GB/s")
    return Cluster.from_graph(star(n_workers // 8, bandwidth="100 Gbit/s", latency="10 us", host=host))


JITTER = ddlsim.Lognormal(0.1)


def experiment(cluster: Cluster, strategy: Strategy, workers: int, steps: int) -> ddlsim.Experiment:
    return ddlsim.Experiment(
        cluster,
        "resnet50",
        strategy,
        workers=workers,
        steps=steps,
        warmup=0,
        device="v100",
        jitter=JITTER,
    )


def training(
    cluster: Callable[[int], Cluster], strategy: Strategy, workers: int, steps: int, beside: int, tiny: bool
) -> dict[str, float]:
    """Simulate a run of ResNet-50; the cluster has devices for the workers and as many `background` them."""
    if tiny:
        workers, steps = 16, 1
    made = experiment(cluster(workers + beside), strategy, workers, steps)
    return {"seconds": cpu(lambda: run(made))}


def run_of(cluster: Callable[[int], Cluster], strategy: Strategy, workers: int, steps: int, beside: int = 0) -> Work:
    return partial(training, cluster, strategy, workers, steps, beside)


def split(
    model: str, leaves: int, layout: ddlsim.Parallel, batch_size: int, jitter: Any, tiny: bool
) -> dict[str, float]:
    """Simulate a step of a model that is split over the GPUs of a SuperPOD."""
    if tiny:
        model, leaves, layout, batch_size = "gpt3-175b", 8, ddlsim.Parallel(tensor=8, pipeline=2, data=2), 16
    sizes: dict[str, Any] = {"batch_size": batch_size, "steps": 1, "warmup": 0}
    cluster = f"dgx-a100-pod+n_leaves={leaves}"
    made = ddlsim.Experiment(cluster, model, layout, precision="fp16", jitter=jitter, **sizes)
    return {"seconds": cpu(lambda: run(made))}


def shards(workers: int, jitter: Any, tiny: bool) -> dict[str, float]:
    """Simulate a step in which every GPU has a share of the weights (ZeRO stage 3)."""
    workers = 16 if tiny else workers
    sizes: dict[str, Any] = {"workers": workers, "batch_size": workers, "steps": 1, "warmup": 0}
    made = ddlsim.Experiment(
        "dgx-h100-pod+n_leaves=16", "llama-7b", ddlsim.FSDP(stage=3), precision="bf16", jitter=jitter, **sizes
    )
    return {"seconds": cpu(lambda: run(made))}


def rings(tiny: bool) -> dict[str, float]:
    """Six rings of different sizes, whose messages are all equal within a ring, on machines drawn by chance.

    All messages begin together, then small parts of the network have events of their own.
    """
    n = 8 if tiny else 64
    tree = leaf_spine(16, 6 * n // 16, 8, bandwidth="25 Gbit/s", latency="100 us")
    cluster, schedule = Cluster.from_graph(tree), all_reduce.ring(n)
    places = np.random.default_rng(0).permutation(cluster.workers).reshape(6, n)
    sizes = 1e8 * 0.7 ** np.arange(6)

    def ten_times() -> None:
        for _ in range(1 if tiny else 10):
            network = Network(cluster)
            numbers = [network.collective(schedule, *ring) for ring in zip(places, sizes.tolist(), strict=True)]
            network.join(np.repeat(numbers, n), np.tile(np.arange(n), 6), 0.0)
            while network.advance() is not None:
                pass

    return {"seconds": cpu(ten_times) / 10}


def splits(tiny: bool) -> dict[str, float]:
    """Search all ways to split GPT-3 over 512 GPUs."""
    planner = beside("planner")
    sizes = {"model": "bert-large", "workers": 8, "batch_size": 32} if tiny else {}
    return {"seconds": cpu(lambda: planner.split(1, **sizes))}


def plan_memory(tiny: bool) -> dict[str, float]:
    """Make what a run of 1,024 workers holds of its steps, however many: the program and the steps in flight."""
    workers = 16 if tiny else 1024
    made = experiment(switch(workers), RING, workers, 100)
    workloads, held = prepare(made).workloads, []
    try:
        from ddlsim.strategies import contract

        def hold() -> None:
            program = contract.of(made.strategy).program(workloads, 1)
            steps = program.live_steps()  # in older checkouts, these also hold the tasks that an executor copies
            held.append((program, steps[0] if isinstance(steps, tuple) else steps))

    except ImportError:  # an older checkout, whose runs hold a plan of their first steps

        def hold() -> None:
            live = importlib.import_module("ddlsim.plan.live")
            plan = cast(Any, made.strategy).plan(workloads, live.N_STEPS)
            held.append((plan, live.live_steps(plan)))

    tracemalloc.start()
    seconds = cpu(hold)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"seconds": seconds, "mebibytes": nbytes / 2**20}


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
    try:
        from ddlsim.network.state import Table
    except ImportError:  # an older checkout
        Table = importlib.import_module("ddlsim.network.view").Table
    table = Table()

    def call() -> None:
        for _ in range(calls):
            kernel.advance(table.of(net), 0.0)

    call()
    return {"seconds": cpu(call) / calls}


def beside(name: str) -> Any:
    """Import another benchmark."""
    sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module(name)


def co_simulation(tiny: bool) -> dict[str, float]:
    """16 asynchronous workers that learn digits, against the same gradients in a plain loop."""
    cosimulation = beside("cosimulation")
    case = cosimulation.Case("", cosimulation.ASYNC, "digits-cnn", 16, 32, 32 if tiny else 3200, None)
    row = cosimulation.measure(case, 1 if tiny else 5)
    return {"seconds": cast(float, row["run_cpu_s"]), "relative": cast(float, row["ratio"])}


def process(code: str, *, compiled: bool) -> dict[str, float]:
    """Run code in a process of its own, for which everything is compiled, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) if compiled else {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", code]
        run = partial(subprocess.run, command, env=environment, cwd=folder, check=True, capture_output=True)
        return {"seconds": cpu(run)}


def first_result(tiny: bool) -> dict[str, float]:
    """A process that simulates a step as the first one after the installation: nothing is compiled (tiny: it is)."""
    return process(FIRST, compiled=tiny)


def fresh(tiny: bool) -> dict[str, float]:
    """A process that does nothing but simulate GPT-3 (tiny: ResNet-50); what it needs is compiled."""
    return process(FIRST if tiny else GPT3_ALONE, compiled=True)


RING, NESTED = ddlsim.AllReduce("ring", overlap="ddp"), ddlsim.AllReduce("hierarchical", overlap="ddp")
GPT3 = partial(split, "gpt3-175b", 64, ddlsim.Parallel(tensor=8, pipeline=8, data=16), 1536)
MEGATRON_1T = partial(
    split, "megatron+dim=25600+layers=128+heads=160", 160, ddlsim.Parallel(tensor=8, pipeline=64, data=6), 3072
)
SERVERS, ASYNC, GOSSIP = ddlsim.ParameterServer(64), ddlsim.AsyncParameterServer(), ddlsim.DPSGD("ring")
PLAIN = ddlsim.NoJitter()
WORKLOADS = [
    Workload("ddp-ring-1024", "DDP ring, 1,024 workers, 100 steps", run_of(switch, RING, 1024, 100), 15.0),
    Workload("hierarchical-1024", "hierarchical, 128 x 8 GPUs, 10 steps", run_of(machines, NESTED, 1024, 10), 1.2),
    Workload("servers-256", "256 workers, 64 servers, 10 steps", run_of(switch, SERVERS, 256, 10, 64), 2.0),
    Workload("async-1024", "asynchronous server, 1,024 x 100 updates", run_of(switch, ASYNC, 1024, 100, 1), 2.0),
    Workload("gossip-256", "D-PSGD on a ring, 256 workers, 100 steps", run_of(switch, GOSSIP, 256, 100), 1.0),
    Workload("long-128", "hierarchical, 16 x 8 GPUs, 1,000 steps", run_of(machines, NESTED, 128, 1000), 4.0),
    Workload("gpt3-1024", "GPT-3 on 1,024 A100, a step of 1,536 sequences, no jitter", partial(GPT3, PLAIN), 1.0),
    Workload("gpt3-1024-jitter", "the same with jitter", partial(GPT3, JITTER), 2.0),
    Workload("gpt3-1024-fresh", "the same without jitter, process included", fresh, 3.0),
    Workload("megatron-1t", "Megatron 1T on 3,072 A100, 3,072 sequences, no jitter", partial(MEGATRON_1T, PLAIN), 5.0),
    Workload("megatron-1t-jitter", "the same with jitter", partial(MEGATRON_1T, JITTER), 8.0),
    Workload("fsdp-256", "Llama 7B in shards over 256 H100, a step, no jitter", partial(shards, 256, PLAIN), 3.0),
    Workload("fsdp-512", "Llama 7B in shards over 512 H100, a step, no jitter", partial(shards, 512, PLAIN), 10.0),
    Workload("fsdp-512-jitter", "the same with jitter", partial(shards, 512, JITTER), 60.0),
    Workload("rings", "six even rings of 64 on eight spines, of different sizes", rings, 0.05),
    Workload("splits", "564 splits of GPT-3 over 512 GPUs, one process", splits, 60.0),
    Workload("jobs", "eight jobs of 16 GPUs on a fat tree, 100 steps each", jobs, 5.0),
    Workload("kernel-call", "a kernel call from Python", kernel_call, 1e-6),
    Workload("co-simulation", "16 asynchronous workers learn digits, to the gradients alone", co_simulation, 1.15),
    Workload("timeline", "spans kept to not kept, DDP ring, 256 workers, 20 steps", timeline, 1.2),
    Workload("plan-memory", "program and live steps of a run of 1,024 workers x 100 steps, MiB", plan_memory, 15.0),
    Workload("first-result", "first result after the installation", first_result, 10.0),
]
WORK = {workload.name: workload.work for workload in WORKLOADS}
#: these start processes
OUTSIDE = ("first-result", "gpt3-1024-fresh")
NAMES = [workload.name for workload in WORKLOADS]


def once(name: str, *, tiny: bool) -> dict[str, float]:
    """Run a workload in this process."""
    if not tiny and name not in OUTSIDE:
        WORK[name](True)  # loads or compiles the kernel
    before = yardstick()
    measured = WORK[name](tiny)
    return {**measured, "yardsticks": measured["seconds"] / (0.5 * (before + yardstick()))}


def in_process(name: str, checkout: Path, *, tiny: bool) -> dict[str, float]:
    """Run a workload in a process of its own, with the ddlsim of a checkout, whose modules are compiled to bytecode."""
    for package in (checkout / "ddlsim", Path(__file__).parent):
        compileall.compile_dir(package, quiet=2)  # like an installation, even if PYTHONDONTWRITEBYTECODE is set
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
    quantity = next(name for name in ("relative", "mebibytes", "seconds") if name in runs[0])
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
