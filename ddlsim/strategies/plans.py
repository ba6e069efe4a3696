"""Strategies whose step is a table: who has a plan, where its ranks are, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.plan.plan import Floats
from ddlsim.runtime.setting import Strategy
from ddlsim.workload.compute import Workload


def plan_of(strategy: Strategy, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
    """Return what workers with these workloads do in `steps` steps of a strategy that can tell.

    Raises ConfigError for a strategy whose step is no plan yet.
    """
    if not tells_plan(strategy):
        raise ConfigError(f"plan: the step of {strategy.label} is not a table yet; those of {_with_plans()} are")
    plan: Plan = strategy.plan(workloads, steps, accumulation)  # type: ignore[attr-defined]  # it has one
    return plan


def _with_plans() -> str:
    """Return the names of the bundled strategies that tell their plans."""
    import ddlsim.strategies as bundled

    kinds = [kind for kind in vars(bundled).values() if isinstance(kind, type) and hasattr(kind, "start")]
    *others, last = sorted(kind.__name__ for kind in kinds if _tells(kind, "plan", "start"))
    return f"{', '.join(others)} and {last}"


def cycle_length(strategy: Strategy) -> int:
    """Return the number of steps after which the work of each worker repeats: the ``period`` of local SGD, say.

    A strategy whose cycle is not its ``period`` has a property ``cycle``.
    """
    cycle = getattr(strategy, "cycle" if hasattr(type(strategy), "cycle") else "period", 1)
    return cycle if isinstance(cycle, int) and cycle > 0 else 1


def whole_cycles(strategy: Strategy, warmup: int, steps: int) -> tuple[int, int]:
    """Return warm-up and measured steps, each rounded up to whole cycles of a strategy."""
    cycle = cycle_length(strategy)
    return cycle * -(-warmup // cycle), cycle * -(-steps // cycle)


def peak_memory(strategy: Strategy, workloads: Sequence[Workload], accumulation: int) -> Floats:
    """Return the bytes that the tasks of each rank of a strategy's plan hold at most, (n_ranks,).

    A strategy can have a method ``peak_memory(workloads, accumulation)`` that says so without writing the plan.
    """
    if _tells(type(strategy), "peak_memory", "plan"):
        peak: Floats = strategy.peak_memory(workloads, accumulation)  # type: ignore[attr-defined]  # it has one
        return peak
    return plan_of(strategy, workloads, 1, accumulation).peak_memory()


def nodes_of_plan(strategy: Strategy, cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the node of each rank of a strategy's plan: those of the workers, in ``nodes``, and where the strategy has
    more ranks, such as servers, what its method ``plan_nodes(cluster, nodes)`` says."""
    places = getattr(strategy, "plan_nodes", None)
    return list(nodes) if places is None else list(places(cluster, list(nodes)))


def tells_plan(strategy: object) -> bool:
    """Return whether a strategy has a method `plan` that is true of its method `start`.

    A subclass that starts in another way than its parent has to say its plan anew.
    """
    return _tells(type(strategy), "plan", "start")


def _tells(kind: type, name: str, of: str) -> bool:
    """Return whether a class has a method that is true of another one: no class below has that one anew."""
    order = kind.__mro__
    told, done = (next((i for i, c in enumerate(order) if each in vars(c)), None) for each in (name, of))
    return told is not None and (done is None or told <= done)
