"""What simulating costs beside the arithmetic: training runs against the same gradients in a plain loop; JSON.

A run and its loop take turns, so that their ratio does not depend on what else the machine does; CPU seconds,
medians. Both compute on one thread::

    python benchmarks/cosimulation.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

import ddlsim
from ddlsim.cluster.generators import star
from ddlsim.data import DataSet, from_arrays, load_digits
from ddlsim.nn.network import Network, build_network
from ddlsim.strategies import Strategy
from ddlsim.workload.model import Model, load_model

sys.path.insert(0, os.path.dirname(__file__))
from gradients import lenet_relu

NEVER = 10**9  # updates between evaluations: only the first and the last


@dataclass(frozen=True)
class Case:
    """A training run: `n_gradients` gradients of `batch` samples, and the ratio it should stay below."""

    name: str
    strategy: Strategy
    model: str
    n_workers: int
    batch: int
    n_gradients: int
    at_most: float | None


SYNC, ASYNC = ddlsim.AllReduce("ring"), ddlsim.AsyncParameterServer()
CASES = (
    Case("synchronous, 16 workers, LeNet", SYNC, "lenet-relu", 16, 32, 640, 1.05),
    Case("synchronous, 16 workers, CIFAR network", SYNC, "cifar-cnn", 16, 32, 96, 1.05),
    Case("synchronous, 16 workers, digits", SYNC, "digits-cnn", 16, 32, 3200, 1.05),
    Case("asynchronous, 16 workers, LeNet", ASYNC, "lenet-relu", 16, 32, 640, 1.15),
    Case("asynchronous, 16 workers, CIFAR network", ASYNC, "cifar-cnn", 16, 32, 96, 1.15),
    Case("asynchronous, 16 workers, digits", ASYNC, "digits-cnn", 16, 32, 3200, 1.15),
    Case("asynchronous, 64 workers, digits", ASYNC, "digits-cnn", 64, 32, 3200, None),
)


def model_named(name: str) -> Model:
    return lenet_relu() if name == "lenet-relu" else load_model(name)


def data_for(model: Model) -> DataSet:
    if model.name == "digits-cnn":
        return load_digits()
    draws = np.random.default_rng(0)
    x = draws.standard_normal((2000, *model.input_shape), np.float32)
    return from_arrays(x, draws.integers(0, 10, 2000))


def simulated(case: Case, model: Model, data: DataSet) -> float:
    """Return the CPU seconds of the run, without building the cluster."""
    cluster = ddlsim.load_cluster(star(case.n_workers + 1, bandwidth="10 Gbit/s", latency="10 us"))
    updates = case.n_gradients // (case.n_workers if case.strategy is SYNC else 1)
    training = ddlsim.Training(data, rate=0.01, updates=updates, evaluate_every=NEVER, held_out=16)
    start = time.process_time()
    result = ddlsim.simulate(cluster, model, case.strategy, case.batch, case.n_workers, training=training)
    assert sum(n for _, n in result.recorder.updates) == case.n_gradients * case.batch
    return time.process_time() - start


def plain(case: Case, network: Network, data: DataSet) -> float:
    """Return the CPU seconds of as many gradients, batch by batch, without anything around them."""
    draws = np.random.default_rng(1)
    start = time.process_time()
    for _ in range(case.n_gradients):
        chosen = draws.integers(0, data.n_samples, case.batch)
        network.loss_and_gradient(network.initial_params, data.x[chosen], data.labels[chosen])
    return time.process_time() - start


def measure(case: Case, rounds: int) -> dict[str, object]:
    """Return a row: medians of the rounds and of their ratios, after one round that does not count."""
    model = model_named(case.model)
    data, network = data_for(model), build_network(model, 0)
    pairs = [(simulated(case, model, data), plain(case, network, data)) for _ in range(rounds + 1)][1:]
    run = statistics.median(a for a, _ in pairs)
    return {
        "scenario": case.name,
        "run_cpu_s": round(run, 4),
        "plain_cpu_s": round(statistics.median(b for _, b in pairs), 4),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "ratio_at_most": case.at_most,
        "samples_per_cpu_s": round(case.n_gradients * case.batch / run),
    }


def memory() -> dict[str, object]:
    """Return the peak memory of 256 workers that train a model of 61,706 parameters, in a process of its own."""
    code = (
        "import resource, sys; sys.argv = ['']; import cosimulation as c\n"
        "case = c.Case('', c.ASYNC, 'lenet-relu', 256, 8, 1024, None); model = c.model_named(case.model)\n"
        "c.simulated(case, model, c.data_for(model))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return {"scenario": "256 asynchronous workers, LeNet", "peak_mib": round(float(done.stdout)), "mib_at_most": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(json.dumps([*(measure(case, rounds) for case in CASES), memory()], indent=2))


if __name__ == "__main__":
    main()
