"""Speed of gradients: samples per CPU second, forward and backward, on one thread; prints JSON.

Where PyTorch is installed it runs the same network on the same batch in turns with ddlsim, so that the ratio
does not depend on what else the machine does at the time (ddlsim always computes on one thread)::

    python benchmarks/gradients.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from ddlsim.nn.network import build_network
from ddlsim.workload.layers import Activation, Conv, Dense, Flatten, Pool
from ddlsim.workload.model import Leaf, Model, load_model

ROUNDS = 9
CASES = (("lenet-relu", 32), ("lenet-relu", 256), ("cifar-cnn", 32), ("cifar-cnn", 256), ("digits-cnn", 32))


def lenet_relu() -> Model:
    """LeNet-5 with ReLU and 2x2 maximum pooling in place of tanh and averages: 61,706 parameters."""
    model = load_model("lenet5")
    layers, structure = list(model.layers), []
    for node in model.structure:
        assert isinstance(node, Leaf)
        spec = node.spec
        if isinstance(spec, Activation):
            spec = Activation("relu")
        elif isinstance(spec, Pool):
            spec = dataclasses.replace(spec, type="max_pool")
        if isinstance(spec, Activation | Pool):
            layers[node.index] = dataclasses.replace(layers[node.index], type=spec.type)
        structure.append(Leaf(node.index, spec))
    return dataclasses.replace(model, name="lenet-relu", layers=tuple(layers), structure=tuple(structure))


def torch_step(model: Model, x: np.ndarray, labels: np.ndarray) -> Callable[[], object] | None:
    """Return a function that computes the gradient once in PyTorch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    parts: list[torch.nn.Module] = []
    for node in model.structure:
        assert isinstance(node, Leaf)
        spec, n = node.spec, model.layers[node.index].in_shape[0]
        if isinstance(spec, Conv):
            parts.append(torch.nn.Conv2d(n, spec.channels, spec.kernel, spec.stride, spec.padding))
        elif isinstance(spec, Dense):
            parts.append(torch.nn.Linear(n, spec.units))
        elif isinstance(spec, Pool):
            parts.append(torch.nn.MaxPool2d(spec.kernel))
        else:
            parts.append(torch.nn.Flatten() if isinstance(spec, Flatten) else torch.nn.ReLU())
    network, loss = torch.nn.Sequential(*parts), torch.nn.CrossEntropyLoss()
    inputs, targets = torch.from_numpy(x), torch.from_numpy(labels)

    def step() -> object:
        network.zero_grad(set_to_none=True)
        value = loss(network(inputs), targets)
        value.backward()
        return value

    return step


def cpu_seconds(step: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of one step, averaged over `repeats`."""
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def measure(name: str, batch: int, seconds: float) -> dict[str, object]:
    """Return the speeds for one network and batch, medians of rounds in which the two take turns."""
    model = lenet_relu() if name == "lenet-relu" else load_model(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *model.input_shape), dtype=np.float32)
    labels = rng.integers(0, 10, batch)
    network = build_network(model, seed=0)

    def ours() -> object:
        return network.loss_and_gradient(network.initial_params, x, labels)

    steps = {"ddlsim": ours}
    if (theirs := torch_step(model, x, labels)) is not None:
        steps["torch"] = theirs
    repeats = {}
    for key, step in steps.items():
        step()  # compiles, allocates
        once = max(cpu_seconds(step, 3), 1e-6)
        repeats[key] = max(1, round(seconds / ROUNDS / len(steps) / once))
    rounds: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            rounds[key].append(cpu_seconds(step, repeats[key]))
    result: dict[str, object] = {"network": name, "n_params": model.n_params, "batch": batch}
    for key, times in rounds.items():
        result[f"{key}_samples_per_cpu_second"] = round(batch / statistics.median(times))
    if "torch" in rounds:
        ratios = [b / a for a, b in zip(rounds["ddlsim"], rounds["torch"], strict=True)]
        result["ratio_to_torch"] = round(statistics.median(ratios), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds a case (default 4)")
    seconds = parser.parse_args().seconds
    print(json.dumps([measure(name, batch, seconds) for name, batch in CASES], indent=2))


if __name__ == "__main__":
    main()
