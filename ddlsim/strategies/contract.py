"""The strategy contract: the methods that a strategy can define, and the default of each.

:func:`of` returns the :class:`Contract` of any object. It reads methods of the class only, so fields and attributes of
the object may have any name. A strategy needs no base class.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, shown
from ddlsim.plan import Plan, StepProgram
from ddlsim.plan.plan import Floats
from ddlsim.plan.program import Folded
from ddlsim.runtime.context import RunContext as RunContext
from ddlsim.runtime.context import Strategy as Strategy
from ddlsim.runtime.fabric import Collectives, Fabric
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import Model
from ddlsim.workload.stage import Stage, for_each

P = ParamSpec("P")
R = TypeVar("R")
#: names of positional and keyword parameters
Parameters = tuple[tuple[str, ...], tuple[str, ...]]
#: default number of samples per worker
SAMPLES = 32
#: parameters of methods that a class must define (``buckets``: for an overlap policy), and of optional methods
REQUIRED: dict[str, Parameters] = {"start": (("context",), ()), "buckets": (("workload",), ())}
OPTIONAL: dict[str, Parameters] = {}
#: methods that describe others: a subclass that overrides one of the latter must override the former, too
_DESCRIBES = {
    "program": ("start",),
    "plan": ("start", "program"),
    "folded_program": ("start", "program", "plan"),
    "peak_memory": ("program", "plan"),
    "stages": ("stage",),
}


def _optional(default: Callable[Concatenate[Contract, P], R]) -> Callable[Concatenate[Contract, P], R]:
    """Make an optional method of the contract: the strategy's own, or `default` if its class has none."""
    name = default.__name__
    parameters = list(inspect.signature(default).parameters.values())[1:]
    by_keyword = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    OPTIONAL[name] = tuple(parameter.name for parameter in parameters if parameter.name not in by_keyword), by_keyword

    @functools.wraps(default)
    def method(self: Contract, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.defines(name):
            return default(self, *args, **kwargs)
        answer: R = _bound(self._methods[name], self.strategy, type(self.strategy))(*args, **kwargs)
        return answer

    return cast("Callable[Concatenate[Contract, P], R]", method)


@dataclass(frozen=True, eq=False)
class Contract:
    """The methods of a strategy, with defaults. Overlap policies can have a method ``program``, too."""

    strategy: Any
    _methods: Mapping[str, Any]

    def defines(self, name: str) -> bool:
        """Return whether the class has a method of this name that still describes its overridden methods."""
        return name in self._methods

    # ------------------------------------------------------------ batches and parts of the model

    @_optional
    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Samples that a worker computes at once; with this method, the batch size is the total of all workers.

        Default: the batch size, which is per worker.
        """
        return batch_size

    @_optional
    def default_batch_size(self, n_workers: int) -> int:
        """Batch size of a run that sets none. Default: 32; if workers share a batch, one sample each."""
        return n_workers if self.shares_batch else SAMPLES

    @_optional
    def n_replicas(self, n_workers: int) -> int:
        """Number of groups of workers with separate samples. Default: every worker."""
        return n_workers

    @_optional
    def n_workers(self) -> int | None:
        """Number of workers if none is given; None: all devices of the cluster. Default: None."""
        return None

    @_optional
    def check_sizes(self, model: Model, batch_size: int, n_workers: int) -> None:
        """Nothing; raises ConfigError, with sizes that work, for an incompatible model, batch and number of workers.

        Default: accepts all.
        """

    @_optional
    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Part of the model that a worker computes and holds. Default: all of it."""
        return Stage(workload)

    @_optional
    def stages(self, workloads: Sequence[Workload]) -> Sequence[Stage]:
        """The stages of all workers, if they depend on each other. Default: by ``stage``."""
        if not self.defines("stage"):  # one object for equal workers
            return for_each(workloads, Stage)
        return [self.stage(workload, rank, len(workloads)) for rank, workload in enumerate(workloads)]

    @_optional
    def exchanges_tables(self) -> bool:
        """Whether the rows of embedding tables are exchanged in the simulation. Default: no, which results note."""
        return False

    @_optional
    def recomputes_layers(self) -> bool:
        """Whether the backward pass recomputes whole transformer layers. Default: no."""
        return False

    @_optional
    def accumulates_shards(self, n_workers: int) -> bool:
        """Whether each micro-batch's gradients are reduce-scattered, and only shards are added up. Default: no."""
        return False

    @_optional
    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Number of fp32 models that each device keeps in addition to the one that it trains; `compressed`: whether the
        run compresses messages. Default: 0."""
        return 0.0

    # ------------------------------------------------------------ steps

    @_optional
    def updates(self, steps: int, n_workers: int) -> int:
        """Number of updates in `steps` steps of every worker; a run ends after them. Default: one per step."""
        return steps

    @_optional
    def waits_for_all(self) -> bool:
        """Whether every step or round waits for all workers. Default: unless each step of a worker is an update."""
        return self.updates(1000, 2) < 2000

    @_optional
    def cycle(self) -> int:
        """Steps after which the work of each worker repeats; runs measure complete cycles by default. Default: 1."""
        return 1

    @_optional
    def program(self, workloads: Sequence[Workload], accumulation: int) -> StepProgram:
        """Step program of all workers. Default: ConfigError, because processes decide their next operation."""
        raise ConfigError(
            f"plan: {self.strategy.label} has no step program, because its processes decide during the run what to do "
            "next; define program(workloads, accumulation), or set context.plan in start"
        )

    @_optional
    def plan(self, workloads: Sequence[Workload], steps: int, accumulation: int) -> Plan:
        """Tasks of all workers in a given number of steps. Default: those of the step program."""
        return self.program(workloads, accumulation).unroll(steps)

    @_optional
    def plan_nodes(self, cluster: Cluster, nodes: Sequence[int]) -> Sequence[int]:
        """Node of each rank of the plan, given those of the workers. Default: `nodes`, since each rank is a worker."""
        return list(nodes)

    @_optional
    def peak_memory(self, workloads: Sequence[Workload], accumulation: int) -> Floats | None:
        """Peak bytes of the tasks of each rank, (n_ranks,); None if unknown.

        Default: those of the plan, None without a step program.
        """
        if not (self.defines("program") or self.defines("plan")):
            return None
        return self.plan(workloads, 1, accumulation).peak_memory()

    @_optional
    def folded_program(
        self, workloads: Sequence[Workload], micro_batches: int, cluster: Cluster, nodes: Sequence[int]
    ) -> Folded | None:
        """A smaller step program that takes at most as long as the strategy's, such as one with a single rank for all
        workers that do the same; None if there is none. Default: None."""
        return None

    # ------------------------------------------------------------ collectives

    @_optional
    def collectives(self) -> Collectives:
        """Algorithms and cost of its collectives. Default: none. ``ddlsim.WithFabric`` has this."""
        return Collectives()

    @_optional
    def on_fabric(self, fabric: Fabric) -> Any:
        """The strategy with its collectives on a fabric. Default: ConfigError. ``ddlsim.WithFabric`` has this."""
        if names := list(self.collectives().algorithms):
            fields = " and ".join(f"{name}=" for name in names)
            raise ConfigError(
                f"fabric cannot be combined with {self.strategy.label}, whose collectives are set one by one; remove "
                f"fabric, and set {fields} of the strategy"
            )
        raise ConfigError(
            f"fabric has no effect with {self.strategy.label}, which has no collectives: its workers send messages to "
            "servers or to each other. Remove fabric; a custom strategy with collectives must inherit from "
            "ddlsim.WithFabric"
        )

    # ------------------------------------------------------------ variants

    @_optional
    def scaled_down(self) -> Any:
        """An equally exact strategy for two workers and any model. Default: the strategy itself."""
        return self.strategy

    @_optional
    def lower_memory_variants(
        self, workload: Workload, batch_size: int, n_workers: int, memory_limit: float
    ) -> Iterator[tuple[Any, Mapping[str, object]]]:
        """Variants whose state fits in `memory_limit` bytes per worker, with the changed fields. Default: none."""
        return iter(())

    @_optional
    def split_sizes(self, n_workers: int) -> Mapping[str, object]:
        """Sizes that ``ddlsim.Splits`` varies, by name. Default: none."""
        return {}

    @_optional
    def layouts(
        self, cluster: Cluster, model: Model, n_workers: int, batch_size: int, invalid: Counter[str]
    ) -> Iterator[Any]:
        """Strategies that an object such as ``ddlsim.Splits`` represents; counts why others do not fit.

        Default: the strategy itself.
        """
        yield self.strategy

    # ------------------------------------------------------------ what follows

    @property
    def name(self) -> str:
        """Name of its class, for messages."""
        return type(self.strategy).__name__

    @property
    def shares_batch(self) -> bool:
        """Whether the batch size is that of all workers together."""
        return self.defines("micro_batch_size")

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers do not wait for each other."""
        return not self.waits_for_all()

    def stages_of(self, workloads: Sequence[Workload]) -> list[Stage]:
        """Return the stage of each worker, given their workloads with the full model.

        Raises ConfigError for a strategy that returns something else.
        """
        stages = list(self.stages(workloads))
        for rank, stage in enumerate(stages):
            if not isinstance(stage, Stage):
                raise ConfigError(
                    f"{self.name}.stage returned {stage!r} for rank {rank}; it must return a Stage, such as "
                    "Stage(workload.cut(first, end))"
                )
        return stages

    def samples_at_once(self, batch_size: int, n_workers: int) -> int:
        """Return the samples that a worker computes at once. Raises ConfigError for an invalid number."""
        size = self.micro_batch_size(batch_size, n_workers)
        return self._positive_integer(size, "micro_batch_size", f" for batch_size = {batch_size}")

    @property
    def cycle_length(self) -> int:
        """Steps after which the work of each worker repeats. Raises ConfigError for an invalid number."""
        return self._positive_integer(self.cycle(), "cycle")

    def _positive_integer(self, number: int, method: str, why: str = "") -> int:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"{self.name}.{method} returned {number!r}{why}; it must return a positive integer")
        return number

    def micro_batches(self, batch_size: int, n_workers: int, accumulation: int) -> int:
        """Return the number of (micro-)batches of a worker per update: `accumulation`, or, if workers share a batch,
        those of its replica's share.

        Raises ConfigError for an `accumulation` there: the batch size is that of an update already.
        """
        if not self.shares_batch:
            return accumulation
        if accumulation > 1:
            raise ConfigError(
                f"accumulation = {accumulation}: has no effect with {self.name}, whose batch_size is already the "
                f"global batch size per update; remove accumulation, and set batch_size={accumulation * batch_size} to "
                "process as many samples per update"
            )
        return batch_size // (self.samples_at_once(batch_size, n_workers) * self.n_replicas(n_workers))

    def whole_cycles(self, warmup: int, steps: int) -> tuple[int, int]:
        """Return warm-up and measured steps, each rounded up to complete cycles."""
        cycle = self.cycle_length
        return cycle * -(-warmup // cycle), cycle * -(-steps // cycle)


def of(strategy: object) -> Contract:
    """Return the contract of a strategy, or of any object: the methods of its class, and defaults for the rest.

    Raises ConfigError for an attribute of the class that has the name of a method but is not a method, and for a method
    with different parameters.
    """
    kind: Any = type(strategy)
    return Contract(strategy, _methods_of(kind))


@functools.lru_cache(maxsize=1024)
def _methods_of(kind: type) -> Mapping[str, Any]:
    """Return the methods of the contract that a class has, by name."""
    methods, place = dict[str, Any](), dict[str, int]()
    for name, (positional, by_keyword) in (REQUIRED | OPTIONAL).items():
        for i, base in enumerate(kind.__mro__):
            attribute = vars(base).get(name)
            field = name in vars(base).get("__dataclass_fields__", {}) or inspect.ismemberdescriptor(attribute)
            if name not in vars(base) or field:
                continue
            computed = isinstance(attribute, property | functools.cached_property)
            bound = attribute if computed else _bound(attribute, object(), kind)
            signature = f"{name}({', '.join((*positional, *('*',) * bool(by_keyword), *by_keyword))})"
            owner = kind.__name__
            if not callable(bound):
                actual = "a property" if computed else shown(attribute)
                raise ConfigError(
                    f"{owner}.{name} is {actual}; it must be a method with the signature {signature}, or a dataclass "
                    "field"
                )
            try:
                inspect.signature(bound).bind(*positional, **dict.fromkeys(by_keyword))
            except TypeError:
                parameters = inspect.signature(bound)
                raise ConfigError(
                    f"{owner}.{name} has the parameters {parameters}; its signature must be {signature}"
                ) from None
            methods[name], place[name] = attribute, i
            break
    for name, described in _DESCRIBES.items():
        if name in methods and place[name] > min(place.get(method, len(kind.__mro__)) for method in described):
            del methods[name]
    return methods


def _bound(attribute: Any, owner: object, kind: type) -> Any:
    """Return the value of ``owner.attribute`` for a function, static method, class method or callable of its class."""
    descriptor: Any = attribute
    return descriptor.__get__(owner, kind) if inspect.isroutine(attribute) else attribute
