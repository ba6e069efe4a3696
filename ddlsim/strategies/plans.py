"""Strategies whose step is a table: who has a plan, where its ranks are, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.runtime.setting import Strategy
from ddlsim.workload.compute import Workload


def plan_of(strategy: Strategy, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
    """Return what workers with these workloads do in `steps` steps of a strategy that can tell.

    Raises ConfigError for a strategy whose step is no plan yet.
    """
    if not tells_plan(strategy):
        raise ConfigError(
            f"plan: the step of {strategy.label} is not a table yet; those of AllReduce, LocalSGD, "
            "ParameterServer and ShardedUpdate are"
        )
    plan: Plan = strategy.plan(workloads, steps, accumulation)  # type: ignore[attr-defined]  # it has one
    return plan


def nodes_of_plan(strategy: Strategy, cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the node of each rank of a strategy's plan: those of the workers, in ``nodes``, and where the strategy has
    more ranks, such as servers, what its method ``plan_nodes(cluster, nodes)`` says."""
    places = getattr(strategy, "plan_nodes", None)
    return list(nodes) if places is None else list(places(cluster, list(nodes)))


def first_workers(strategy: Strategy, n_workers: int) -> list[int]:
    """Return the worker that each rank of a strategy's plan is, or the first of those that it stands for by what the
    method ``plan_workers(n_workers)`` says."""
    workers = getattr(strategy, "plan_workers", None)
    return list(range(n_workers)) if workers is None else list(workers(n_workers))


def tells_plan(strategy: object) -> bool:
    """Return whether a strategy has a method `plan` that is true of its method `start`.

    A subclass that starts in another way than its parent has to say its plan anew.
    """
    order = type(strategy).__mro__
    plan, start = (next((i for i, c in enumerate(order) if name in vars(c)), None) for name in ("plan", "start"))
    return plan is not None and (start is None or plan <= start)
