"""`Experiment`: the complete, immutable description of a run; and `Job`: a run that shares a cluster with others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np

from ddlsim.arguments import (
    Count,
    Index,
    Positive,
    Rule,
    Seed,
    checked,
    one_of,
    quantity,
    several,
    validated_by,
    with_attributes,
)
from ddlsim.arguments.annotations import rule_of
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.cluster.groups import rack_of_hosts
from ddlsim.compression import Compression
from ddlsim.compression.choice import compression_of
from ddlsim.compression.contract import AnyCompressor
from ddlsim.errors import ConfigError, shown
from ddlsim.learning import Training
from ddlsim.output_files import check_suffix, write_text
from ddlsim.reliability import Background, Checkpoints, Elastic, Failures, Slowdown
from ddlsim.reliability.faults import AnyFault
from ddlsim.run.traced import Traced
from ddlsim.runtime.fabric import Fabric
from ddlsim.schema import to_toml
from ddlsim.spread import Spread
from ddlsim.strategies import AllReduce, Strategy, contract
from ddlsim.streams import stream
from ddlsim.units import si
from ddlsim.workload.compute import Affine, Measured, PerKernel, Roofline
from ddlsim.workload.contention import OverlapSlowdown, Slower
from ddlsim.workload.devices import DeviceLike
from ddlsim.workload.input import Copies, Input
from ddlsim.workload.jitter import Jitter, NoJitter
from ddlsim.workload.model import ModelLike
from ddlsim.workload.optimizer_rules import OPTIMIZER_RULES
from ddlsim.workload.precision import ELEMENT_NBYTES, GRADIENT_TYPES
from ddlsim.workload.stacks import StackLike


def _neighbours(value: object, where: str) -> object:
    one, more = "a ddlsim.Background or ddlsim.Job object", "ddlsim.Background and ddlsim.Job objects"
    return several(Annotated[Job | Background, one, more])(value, where)


def listed_places(value: object, where: str) -> object:
    """Return a list of places as a tuple. Raises ConfigError if it is empty or has duplicates."""
    places = tuple(cast("Sequence[int]", value))
    if not places or len(set(places)) < len(places):
        raise ConfigError(f"{where} = {list(places)}: must list at least one position, without duplicates")
    return places


def _overlap_slowdown(value: object, where: str) -> object:
    if isinstance(value, OverlapSlowdown):
        return value
    factor = cast("float", cast(Rule, rule_of(Slower))(value, where))
    return OverlapSlowdown(factor, factor)


def _speeds(value: object, where: str) -> object:
    if isinstance(value, Spread):
        return value
    factors = cast("tuple[float, ...]", _FACTORS(value, where))
    if not factors:
        raise ConfigError(f"{where} = (): must contain one factor above 0 per worker, or be None")
    return factors


#: default number of warm-up and measured steps, before rounding up to whole cycles
WARMUP, STEPS = 2, 10

_FACTORS = cast(Rule, rule_of(tuple[Annotated[Positive, "a factor above 0", "factors above 0"], ...]))
#: how many workers, or where
WorkersLike = (
    Count | Annotated[Sequence[Index], "a list of positions such as [0, 1, 2, 3]", validated_by(listed_places)]
)
StrategyLike = Annotated[
    Strategy, "a strategy such as ddlsim.AllReduce('ring') or FSDP() (Splits are only for recommend and studies)"
]
GradientType = Annotated[str, one_of(*GRADIENT_TYPES)]
ComputeLike = Annotated[
    Measured | Affine | PerKernel | Roofline | Traced,
    "a Measured, Affine, PerKernel, Roofline or Traced object, such as Measured('97 ms', 32)",
]
JitterLike = Annotated[Jitter, with_attributes("a jitter model such as ddlsim.Lognormal(0.1)", "sample", "mean")]
Slowdowns = Annotated[Sequence[Slowdown], several(Slowdown)]
Neighbours = Annotated[Sequence[Any], validated_by(_neighbours)]
Faults = Annotated[Sequence[AnyFault], several(AnyFault)]
SlowdownLike = Annotated[
    float | OverlapSlowdown,
    "a number of at least 1, or an object such as ddlsim.OverlapSlowdown(inside=1.2)",
    validated_by(_overlap_slowdown),
]
SpeedLike = Annotated[
    Sequence[Positive] | Spread,
    "a list with one factor above 0 per worker, or a ddlsim.Spread object",
    validated_by(_speeds),
]
TrainingLike = Annotated[Training, "a ddlsim.Training object, such as Training('digits', rate=0.1, epochs=5)"]
CompressionLike = Annotated[
    Compression | AnyCompressor, "a compressor such as ddlsim.TopK(0.01), or a ddlsim.Compression object"
]


@checked
@dataclass(frozen=True)
class Experiment:
    """A training run to be simulated.

    cluster         bundled name, path, networkx graph or :class:`~ddlsim.Cluster`
    model           bundled name, path or :class:`~ddlsim.Model`
    strategy        how workers exchange gradients
    batch_size      samples per worker per (micro-)step; 32 by default. If the strategy splits the model, this is the
                    global batch size instead. Its default is one micro-batch per data-parallel rank or, with a
                    pipeline, one micro-batch per stage for each data-parallel rank. A micro-batch is one sample unless
                    the strategy sets its size
    workers         number of workers (the cluster's first devices are used), or a list of indices into
                    ``cluster.workers``, such as [4, 5, 6, 7]; None: all devices
    steps           number of measured steps per worker (on average, if workers are asynchronous); None: 10. If the
                    strategy does not communicate in every step, as in local SGD, the default is rounded up to complete
                    cycles
    warmup          number of steps that are simulated before the measured ones; None: 2, rounded up in the same way
    accumulation    number of micro-steps per exchange of gradients
    precision       arithmetic ("fp32", "tf32", "fp16", "bf16"; "fp8", "mxfp8" and "nvfp4" for the matrix products of
                    transformer layers); None: bf16 for transformers on devices whose bf16 kernels are known, tf32
                    for convolutional networks on devices that have it, as PyTorch does, else fp32
    gradient_dtype  dtype of gradients on the wire ("fp32", "fp16", "bf16"); None: the stack's dtype for transformers
                    whose kernels are known, else fp32
    optimizer       optimizer whose time and memory are simulated in timing-only runs: "sgd", "momentum", "adam", "lars"
                    or "lamb"; None: Adam for transformers whose kernels are known, else momentum, without kernel
                    launches. Training runs use the optimizer of `training`
    compute         source of compute times: Measured, Affine, PerKernel, Roofline, Traced; None: the device's measured
                    curve for this model if the catalogue has one, else PerKernel if kernels are known, else Roofline
    stack           training software, such as "megatron" or "torchtitan" (:func:`ddlsim.stack_names`); None: the
                    default for the strategy on this device
    flash           whether attention is fused, so that attention matrices are not written to memory; None: as in the
                    stack on this device
    device          device of all workers, which replaces the devices of the cluster
    jitter          distribution of a random factor applied to the compute time of every step
    slowdowns       temporary slowdowns of some workers
    faults          slow or stopped workers (Slowdown, Stop), maintenance windows (Pause), slow or dead links
                    (LinkFault), random faults (RandomFaults), and custom faults (objects with a method `effects`)
    overlap_slowdown  factor by which computation takes longer while the device communicates: a number, or an
                      OverlapSlowdown; None: the stack's factor for transformers whose kernels are known, else 1
    speed           permanent compute speed factor per worker (1.0: nominal), or a Spread of speeds over devices of the
                    same kind; None: equal devices or, in synchronous training on more devices than the stack was
                    measured on (`Stack.measured_on`), the pace of the slowest one
    input           how samples reach the workers: an Input (the source from which they are read), or Copies (from host
                    memory to the devices); None: samples are already on the devices
    failures        failures that stop the run, and recovery from them; see ``Result.failure_timeline``
    checkpoints     how often the state is saved, and at what cost
    background      co-located traffic and jobs: ddlsim.Background, and ddlsim.Job on devices that the run leaves free;
                    they continue until the run ends
    elastic         Elastic: after a failure, training continues with the surviving workers instead of restarting all
                    workers from a checkpoint
    seed            seed of all random streams
    max_time        simulated time in s at which the run ends at the latest. With failures or checkpoints, this is the
                    length of :attr:`ddlsim.Result.failure_timeline` (30 days by default for timing-only runs)
    training        what the workers train, and when the training ends (``steps`` has no effect then); None: timing only
    time_model      model whose sizes and compute times are simulated, if `model` is a smaller model that is trained
    compression     compressor for everything that workers send, such as TopK(0.01), or a Compression
    fabric          Fabric that specifies how groups of workers execute collectives. It replaces the strategy's fabric
    """

    cluster: ClusterLike
    model: ModelLike = "resnet50"
    strategy: StrategyLike = AllReduce()
    batch_size: Count | None = None
    workers: WorkersLike | None = None
    _: KW_ONLY
    steps: Count | None = None
    warmup: Index | None = None
    accumulation: Count = 1
    precision: Annotated[str, one_of(*ELEMENT_NBYTES)] | None = None
    gradient_dtype: GradientType | None = None
    optimizer: Annotated[str, one_of(*OPTIMIZER_RULES)] | None = None
    compute: ComputeLike | None = None
    stack: StackLike | None = None
    flash: bool | None = None
    device: DeviceLike | None = None
    jitter: JitterLike = NoJitter()
    slowdowns: Slowdowns = ()
    faults: Faults = ()
    overlap_slowdown: SlowdownLike | None = None
    speed: SpeedLike | None = None
    input: Input | Copies | None = None
    failures: Failures | None = None
    checkpoints: Checkpoints | None = None
    elastic: Elastic | None = None
    background: Neighbours = ()
    seed: Seed = 0
    max_time: Annotated[float | str, quantity("time", "8 h", infinite=True)] = math.inf
    training: TrainingLike | None = None
    time_model: ModelLike | None = None
    compression: CompressionLike | None = None
    fabric: Fabric | None = None

    def __post_init__(self) -> None:
        max_time = si(self.max_time, "time")
        object.__setattr__(self, "max_time", max_time)
        if self.training is not None and not self.training.has_end and math.isinf(max_time):
            raise ConfigError(
                "training has no end; set epochs, updates, target_accuracy or target_loss, or max_time for the run"
            )
        if self.training is None and self.time_model is not None:
            raise ConfigError("time_model has no effect without training; pass it as model instead")
        if self.training is not None and self.optimizer is not None:
            raise ConfigError(
                f"optimizer = {self.optimizer!r} has no effect with training, which has its own optimizer; leave "
                "optimizer out"
            )
        contract.of(self.strategy)  # checks the parameters of its methods
        object.__setattr__(self, "compression", compression_of(self.compression))
        if self.fabric is not None:  # it becomes part of the strategy, so that it is stored once
            object.__setattr__(self, "strategy", contract.of(self.strategy).on_fabric(self.fabric))
            object.__setattr__(self, "fabric", None)
        if self.compression is not None and self.gradient_dtype not in (None, "fp32"):
            raise ConfigError(
                f"gradient_dtype = {self.gradient_dtype!r} cannot be combined with compression, because compressors "
                "read fp32 gradients and define the format of the messages; leave gradient_dtype out, or use "
                "compression=ddlsim.FP16() alone"
            )

    @checked
    def speeds(self, n_workers: Count) -> tuple[float, ...]:
        """Return the speed factor of each of `n_workers` workers.

        Raises ConfigError if `speed` is a list of another length, or the pace of the slowest device although no worker
        waits for it.
        """
        if self.speed is None:
            return (1.0,) * n_workers
        if isinstance(self.speed, Spread):
            if self.speed.measured_on is not None and contract.of(self.strategy).is_asynchronous:
                raise ConfigError(
                    f"speed = Spread(measured_on={self.speed.measured_on}): gives all workers the pace of the "
                    f"slowest, but those of {contract.of(self.strategy).name} do not wait for each other; use "
                    "speed=ddlsim.Spread()"
                )
            return self.speed.speeds(n_workers, self.seed)
        if len(self.speed) != n_workers:
            raise ConfigError(f"speed has {len(self.speed)} factors for {n_workers} workers; pass one per worker")
        return tuple(self.speed)

    @property
    def window(self) -> tuple[int, int]:
        """Numbers of warm-up and measured steps. By default, they are complete cycles of the strategy."""
        warmup, steps = contract.of(self.strategy).whole_cycles(WARMUP, STEPS)
        return warmup if self.warmup is None else self.warmup, steps if self.steps is None else self.steps

    @property
    def n_workers(self) -> int | None:
        """Number of workers; None: one per device of the cluster."""
        return self.workers if self.workers is None or isinstance(self.workers, int) else len(self.workers)

    @checked
    def batch(self, n_workers: Count) -> int:
        """Return the batch size: the value that is set or, by default, the strategy's default for `n_workers`."""
        return self.batch_size or contract.of(self.strategy).default_batch_size(n_workers)

    def with_(self, **changes: object) -> Experiment:
        """Return the experiment with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @checked
    def to_toml(self, folder: str | Path | None = None) -> str:
        """Return the experiment as the text of a TOML file for :func:`ddlsim.load_experiment`.

        folder  folder of the file. It names the files of clusters, models, devices and data relative to this folder;
                None: as the experiment names them

        Raises ConfigError for anything that files cannot express: cluster and model objects, and user-defined parts.
        """
        from ddlsim.run.files import SCHEMA

        return to_toml(SCHEMA.table(self, folder=None if folder is None else Path(folder)))

    def to_python(self) -> str:
        """Return a Python program that creates and runs this experiment.

        Raises ConfigError in the same cases as :meth:`to_toml`.
        """
        from ddlsim.run.files import SCHEMA

        arguments = SCHEMA.call(self, between=",\n    ")
        return f"import ddlsim\n\nresult = ddlsim.simulate(\n    {arguments},\n)\nprint(result)\n"

    @checked
    def save(self, path: str | Path) -> None:
        """Write the experiment to `path`, as a Python program (``.py``) or as a TOML file (``.toml``).

        A TOML file names other files relative to its own folder. A program names them as the experiment does, so
        relative paths in it start from the working directory.

        Raises ConfigError for any other suffix, and in the same cases as :meth:`to_toml`.
        """
        path = Path(path)
        check_suffix(path, ".toml", ".py")
        write_text(path, self.to_python() if path.suffix == ".py" else self.to_toml(path.parent))

    def manifest(self) -> dict[str, object]:
        """Return all fields as plain values, for printing and storing."""
        from ddlsim.run.files import SCHEMA

        return SCHEMA.table(self, full=True)


# ---------------------------------------------------------------- jobs


PLACEMENTS = ("packed", "spread", "random")


def placed(cluster: Cluster, free: Collection[int], n: int, how: str, seed: int = 0) -> list[int]:
    """Return `n` of the places ``free`` (indices into ``cluster.workers``), in the order of the job's ranks.

    "packed"  neighbouring places, on as few switches and partly used machines as possible
    "spread"  one per machine, on as many switches as possible, before any machine gets two
    "random"  random places

    Ranks follow :meth:`ddlsim.Cluster.locality_order`. Raises ConfigError if fewer than `n` places are free.
    """
    if n > len(free):
        raise ConfigError(f"{n} devices are needed, but only {len(free)} devices of {cluster.name!r} are free")
    order = cluster.locality_order(cluster.workers).tolist()
    ready = [place for place in order if place in set(free)]
    machine = cluster.host_of[cluster.workers]
    rack_of = rack_of_hosts(cluster)
    n_hosts = len(cluster.host_names)  # a machine without a switch is its own rack
    in_rack = np.array([rack_of.get(host, cluster.n_nodes + host) for host in range(n_hosts)])
    switch = np.unique(in_rack, return_inverse=True)[1].reshape(-1)[machine]
    if how == "packed":
        left = np.bincount(machine[ready], minlength=len(cluster.host_names))

        def cost(first: int) -> tuple[int, int, int]:
            places = ready[first : first + n]
            begun = np.bincount(machine[places], minlength=len(left))
            touched = begun > 0
            return len(np.unique(switch[places])), int(touched.sum()), int((left - begun)[touched].sum())

        first = min(range(len(ready) - n + 1), key=cost)
        return ready[first : first + n]
    if how == "random":
        drawn = stream(seed, 0, "placement").permutation(len(ready))[:n]
        return [ready[i] for i in sorted(drawn.tolist())]
    chosen: list[int] = []
    of_machine, of_switch = np.zeros(len(cluster.host_names), dtype=int), np.zeros(int(switch.max()) + 1, dtype=int)
    for _ in range(n):
        left_over = [place for place in ready if place not in chosen]
        place = min(left_over, key=lambda i: (of_machine[machine[i]], of_switch[switch[i]]))
        of_machine[machine[place]] += 1
        of_switch[switch[place]] += 1
        chosen.append(place)
    return [place for place in order if place in set(chosen)]


def machine_names(cluster: Cluster, places: Sequence[int]) -> list[str]:
    """Return the names of the machines with these places (in ``cluster.workers``)."""
    hosts = cluster.host_of[cluster.workers[list(places)]].tolist()
    return [cluster.host_names[host] for host in dict.fromkeys(hosts)]


PlacementLike = (
    Annotated[str, one_of(*PLACEMENTS)]
    | Annotated[Sequence[Index], "a placement or a list of positions such as [0, 1, 2, 3]", validated_by(listed_places)]
)


@checked
@dataclass(frozen=True)
class Job:
    """A training run that shares a cluster with other jobs.

    experiment  the run to simulate; its `workers` field is the number of devices, or a list of devices
    name        name in tables and messages; the default is "job 1", "job 2", and so on
    start       time at which the job arrives, in s on the cluster's clock
    placement   "packed" (neighbouring free devices), "spread" (across machines), "random", or a list of indices into
                ``cluster.workers``. If the experiment lists its devices, keep the default
    endless     True: after its last step, the job continues until all jobs without `endless` have ended, so that its
                traffic is present as long as those jobs run. (A training job still ends when it reaches its target.)

    Raises ConfigError if the experiment has co-located jobs itself, or if both the experiment and `placement` specify
    the devices.
    """

    experiment: Annotated[Experiment, "a ddlsim.Experiment object"]
    name: str = ""
    _: KW_ONLY
    start: Annotated[float | str, quantity("time", "12 s", zero=True)] = 0.0
    placement: PlacementLike = "packed"
    endless: bool = False

    def __post_init__(self) -> None:
        workers = self.experiment.workers
        if self.experiment.background:
            raise ConfigError(
                "Job: background of an experiment is its other jobs and traffic; list these next to the job instead"
            )
        if isinstance(workers, Sequence) and self.placement != "packed":
            raise ConfigError(
                f"Job: placement = {shown(self.placement)} has no effect with workers = {list(workers)}; set "
                "workers to a number, or leave placement out"
            )

    def phases(self) -> list[tuple[float, float, Job]]:
        """Return (start, end, job) tuples, one for each time span in which the job is present.

        The job in each tuple starts at 0 s and never ends. The list is empty if the job is always present.
        """
        start = si(self.start, "time")
        return [(start, math.inf, replace(self, start=0.0))] if start else []

    @property
    def listed(self) -> tuple[int, ...]:
        """The indices into ``cluster.workers`` that the job lists; empty if it is placed."""
        places = self.experiment.workers if isinstance(self.placement, str) else self.placement
        return () if places is None or isinstance(places, int) else tuple(places)

    def n_workers(self, n_devices: int) -> int:
        """Return the number of devices that the job uses, on a cluster with `n_devices`."""
        if not isinstance(self.placement, str):
            return len(self.placement)
        asked = self.experiment.n_workers
        return n_devices if asked is None else asked
