"""`Fabric`: algorithm, rank order and cost of collectives, independent of the strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from ddlsim.arguments import Index, Rule, checked, one_of, validated_by
from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective
from ddlsim.collectives.build import default_algorithm
from ddlsim.collectives.lookup import find
from ddlsim.errors import ConfigError, shown

if TYPE_CHECKING:
    from ddlsim.compression.contract import AnyCompressor

#: all-reduce -> the reduce-scatter and the all-gather of which it consists
HALVES = {
    "default": ("default", "default"),
    "ring": ("ring", "ring"),
    "nccl": ("nccl", "nccl"),
    "nccl_ring": ("nccl_ring", "nccl_ring"),
    "halving_doubling": ("recursive_halving", "recursive_doubling"),
    "hierarchical": ("hierarchical", "hierarchical"),
    "torus": ("torus", "torus"),
    "gloo_ring": ("gloo_reduce_scatter", "gloo_all_gather"),
}
COSTS = ("simulated", "calibrated", "nccl")


def algorithm_of(kind: str) -> Rule:
    """Annotation of algorithms: a function, or a name, which is looked up at once so that errors precede the run."""

    def check(algorithm: object, where: str) -> object:
        if isinstance(algorithm, str) and algorithm != "default" and (algorithm != "auto" or kind != "all_reduce"):
            try:
                find(algorithm, kind)
            except ConfigError as error:
                raise ConfigError(f"{where.partition(':')[0]}: {error}") from None
        elif isinstance(algorithm, type) or not (isinstance(algorithm, str) or callable(algorithm)):
            raise ConfigError(f"{where} = {shown(algorithm)}: must be a name such as 'ring', or a function")
        return algorithm

    return validated_by(check)


#: order of the ranks of a collective
RankOrder = Annotated[str, one_of("given", "topology", also="a list of ranks, ")] | Sequence[Index]
AllReduceAlgorithm = Annotated[str | Collective, algorithm_of("all_reduce")]
Cost = Annotated[str, one_of(*COSTS)]


@checked
@dataclass(frozen=True)
class Fabric:
    """Settings for the collectives of a group of workers, as in ``simulate(..., fabric=Fabric("hierarchical"))``.

    algorithm   name of an all-reduce algorithm ("ring", "nccl", "hierarchical", "double_binary_tree", ...), a function
                ``n_ranks -> Schedule``, or its path as ``"package.module:function"``. "auto" simulates the algorithms
                and selects the fastest one for each size. "default" selects one of the following: "torus" for tori of
                TPUs; "hierarchical" if each machine has one worker and the rounds of "hierarchical" have a shorter
                total transfer time than those of "ring" (ignoring latency); "nccl" if machines have several GPUs and
                NCCL can use several paths (NVLinks, network interfaces, parallel switches); otherwise "ring"
    rank_order  "topology" (neighbours in the network are neighbours in the ring, as NCCL arranges them), "given" (the
                cluster's order, as for MPI ranks), or a permutation of the ranks
    cost        source of collective times: "simulated", message by message; "calibrated", the curve measured on this
                cluster (see docs/calibration.md); "nccl", the estimate of NCCL's tuner. The estimate is for
                `algorithm`, which must be "ring" or "double_binary_tree" ("auto" and "nccl" use the faster one) or, for
                "hierarchical", for its calls on every level
    """

    algorithm: AllReduceAlgorithm = "default"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"


class Collectives(NamedTuple):
    """The collectives of a strategy.

    algorithms  of each kind of collective, by the strategy's field; ``algorithm`` is that of all-reduces
    cost        as that of a :class:`Fabric`
    fabric      the common fabric, if there is one that ``simulate(..., fabric=...)`` can set
    in_halves   whether ``algorithm`` runs as the reduce-scatter and the all-gather that it consists of
    compressor  compressor that the strategy sets itself; None: that of the run
    """

    algorithms: Mapping[str, str | Collective] = {}
    cost: str = "simulated"
    fabric: Fabric | None = None
    in_halves: bool = False
    compressor: AnyCompressor | None = None


class OnFabric:
    """A strategy that declares the fields of a :class:`Fabric`."""

    algorithm: str | Collective
    rank_order: str | Sequence[int]
    cost: str

    def collectives(self) -> Collectives:
        """Return its fabric."""
        return Collectives({"algorithm": self.algorithm}, self.cost, fabric_of(self))

    def on_fabric(self, fabric: Fabric) -> Self:
        """Return the strategy on another fabric. Raises ConfigError if the strategy's own fields already set one."""
        before = fabric_of(self)
        if before not in (Fabric(), fabric):
            label = self.label  # type: ignore[attr-defined]  # every strategy has one
            raise ConfigError(f"fabric = {fabric}: the strategy {label} already has {before}; set the fabric only once")
        return dataclasses.replace(self, **vars(fabric))  # type: ignore[type-var]  # a strategy is a dataclass


@checked
@dataclass(frozen=True, kw_only=True)
class WithFabric(OnFabric):
    """Mixin that gives a strategy the fields of a :class:`Fabric`, which ``simulate(..., fabric=...)`` can set."""

    algorithm: AllReduceAlgorithm = "default"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"


def fabric_of(strategy: OnFabric) -> Fabric:
    """Return the fabric with a strategy's fields."""
    return Fabric(strategy.algorithm, strategy.rank_order, strategy.cost)


def halves_of(fabric: Fabric, owner: str) -> tuple[str, str]:
    """Return the algorithms of the reduce-scatter and the all-gather that form a fabric's all-reduce. Raises
    ConfigError if it does not consist of these."""
    if fabric.algorithm not in HALVES:
        raise ConfigError(
            f"fabric: algorithm = {algorithm_name(fabric.algorithm)!r}: {owner} requires an algorithm that consists "
            f"of a reduce-scatter and an all-gather; use {', '.join(map(repr, HALVES))}"
        )
    return HALVES[str(fabric.algorithm)]


def with_algorithm(fabric: Fabric, cluster: Cluster, nodes: Sequence[int]) -> Fabric:
    """Return the fabric with "default" resolved for the nodes."""
    return dataclasses.replace(fabric, algorithm=algorithm_for(fabric.algorithm, cluster, nodes, fabric.cost))


def algorithm_for(
    algorithm: str | Collective,
    cluster: Cluster,
    nodes: Sequence[int],
    cost: str = "simulated",
    kind: str = "all_reduce",
) -> str | Collective:
    """Return the algorithm, with "default" resolved for the nodes; with calibrated costs, it is that of the curve."""
    if algorithm != "default":
        return algorithm
    curves = () if cluster.calibration is None or cost != "calibrated" else cluster.calibration.curves
    measured = {curve.algorithm for curve in curves if curve.operation == kind}
    return measured.pop() if len(measured) == 1 else default_algorithm(cluster, nodes, kind)


def algorithm_name(algorithm: str | Collective) -> str:
    """Return an algorithm's name, for labels and messages."""
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")


def cost_suffix(cost: str) -> str:
    """Return the part of a label that names the cost model; empty for simulated costs."""
    return "" if cost == "simulated" else f", {cost} cost"


def fabric_label(algorithm: str | Collective, cost: str) -> str:
    """Return the part of a label that names the algorithm and the cost model."""
    return algorithm_name(algorithm) + cost_suffix(cost)
