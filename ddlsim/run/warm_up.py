"""Compilation ahead of time, so that the first simulation is as fast as all later ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ddlsim import compiler
from ddlsim.arguments import checked
from ddlsim.cluster import load_cluster
from ddlsim.compile_messages import Part, teller
from ddlsim.errors import ConfigError
from ddlsim.network import Network
from ddlsim.network.extensions import prepare_extensions
from ddlsim.nn.network import build_network
from ddlsim.plan.program import StepProgram
from ddlsim.run.result import Result
from ddlsim.run.simulate import simulate
from ddlsim.strategies import AllReduce, AsyncParameterServer
from ddlsim.workload.activations import with_kept
from ddlsim.workload.model import Model, load_model
from ddlsim.workload.model_build import Builder, Flow


@dataclass(frozen=True)
class Warmth:
    """Result of :func:`warm_up`.

    compiled   functions that were not in the cache
    functions  functions in the cache now
    seconds    CPU time that it took
    folders    folders of the cache
    nbytes     size of the cache
    """

    compiled: tuple[str, ...]
    functions: int
    seconds: float
    folders: tuple[Path, ...]
    nbytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return {**dataclasses.asdict(self), "folders": [str(folder) for folder in self.folders]}

    def __str__(self) -> str:
        n = len(self.compiled)
        done = f"compiled {n} functions in {self.seconds:.0f} s of CPU time" if n else "warm: nothing to compile"
        places = "\n".join(f"  {folder}" for folder in self.folders)
        return f"{done}; {self.functions} functions are in the cache, {self.nbytes / 1e6:.1f} MB in\n{places}"


def _run(cluster: str = "office-1gbe", workers: int = 4) -> Result:
    return simulate(cluster, "lenet5", AllReduce("ring"), batch_size=8, workers=workers)


def _asynchronous() -> None:
    simulate("office-1gbe", "lenet5", AsyncParameterServer(), batch_size=8, workers=4, steps=2)


def _messages() -> None:
    cluster = load_cluster("office-1gbe")
    network = Network(cluster)
    network.send(cluster.workers[:2], cluster.workers[2:4], np.ones(2), 0.0)
    network.advance()


def _timelines() -> None:
    busy = _run().traced.busy
    if busy is not None:
        busy.of(0)


def _bounds() -> None:
    """Compute a lower bound on a step, as the planner does."""
    plan = _run().plan
    program = StepProgram.of(plan)
    program.bound(0, plan.n_steps)
    program.graph.later_than(0, np.zeros(1, dtype=np.int64), plan.n_steps)


def _images() -> None:
    """Compute a gradient of a network with every layer type of convolutional networks."""
    entries = [
        {"type": "conv", "channels": 6, "kernel": 3}, {"type": "batch_norm"}, {"type": "sigmoid"},
        {"type": "avg_pool", "kernel": 2}, {"type": "conv", "channels": 4, "kernel": 1}, {"type": "tanh"},
        {"type": "max_pool", "kernel": 2}, {"type": "flatten"}, {"type": "dense", "units": 8}, {"type": "relu"},
        {"type": "dense", "units": 2},
    ]  # fmt: skip
    builder = Builder("warm-up", {}, frozenset())
    structure, _ = builder.sequence(entries, "layers", "", Flow((3, 12, 12), learned=False), 0)
    _learn(Model("warm-up", "warm-up", (3, 12, 12), with_kept(builder.layers, structure), True, (), structure))


def _learn(model: Model) -> None:
    rng = np.random.default_rng(0)
    network = build_network(model, seed=0)
    x, labels = network.random_batch(4, rng)
    network.loss_and_gradient(network.initial_params, x, labels, rng, network.initial_state.copy())
    network.predict(network.initial_params, x, network.initial_state)


def _targets() -> None:
    network = build_network("digits-cnn", seed=0, loss="mean_squared_error")
    x, labels = network.random_batch(4, np.random.default_rng(0))
    network.loss_and_gradient(network.initial_params, x, np.eye(network.n_outputs, dtype=x.dtype)[labels])


#: (purpose, function that compiles it, CPU time in s with a cold cache)
STEPS: tuple[tuple[str, Callable[[], object], float], ...] = (
    ("collectives", _run, 8.0),
    ("frames of TCP", partial(_run, "cloud-25g-16x8-v100", 16), 1.0),
    ("routes on tori", partial(_run, "torus-2d"), 0.3),
    ("asynchronous workers", _asynchronous, 3.5),
    ("messages", _messages, 0.1),
    ("queues, transports, changes of links, replays", prepare_extensions, 3.0),
    ("timelines", _timelines, 0.3),
    ("lower bounds", _bounds, 0.4),
    ("gradients of image networks", _images, 6.0),
    ("gradients of transformers", lambda: _learn(load_model("char-transformer")), 1.2),
    ("targets that are numbers", _targets, 0.8),
)

#: called with what is being compiled, and the finished and total seconds
Watcher = Callable[[str, float, float], None]


@checked
def warm_up(watch: Watcher | None = None) -> Warmth:
    """Compile all functions that simulations and training call, store them in numba's cache, and return a report.

    watch  function that is called with the progress; None: print the progress to stderr
           (:mod:`ddlsim.compile_messages`)

    The first call takes 25 s of CPU time, and each later call takes 2 s. Raises ConfigError if the cache cannot be
    written.
    """
    if not compiler.is_kept() or teller.remark:
        raise ConfigError(f"warm-up: compiled code cannot be stored: {teller.remark}")
    began, done, total = time.process_time(), 0.0, sum(seconds for _, _, seconds in STEPS)
    compiled: list[str] = []
    step = ""

    def note(name: str, part: Part) -> None:
        compiled.append(name)
        if watch is not None:
            watch(f"{step}: {part.words}", done, total)

    teller.listeners.append(note)
    teller.muted = watch is not None
    try:
        for words, play, seconds in STEPS:
            step = words
            if watch is not None:
                watch(words, done, total)
            play()
            done += seconds
    finally:
        teller.listeners.remove(note)
        teller.muted = False
    files = compiler.files()
    return Warmth(
        compiled=tuple(compiled),
        functions=sum(file.suffix in (".code", ".nbi") for file in files),  # numba has one index per function
        seconds=time.process_time() - began,
        folders=tuple(sorted({file.parent for file in files})),
        nbytes=sum(file.stat().st_size for file in files),
    )
