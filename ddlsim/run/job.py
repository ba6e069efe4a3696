"""A run beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, cast

from ddlsim.arguments import Index, by, checked, one_of, quantity
from ddlsim.errors import ConfigError, shown
from ddlsim.run.experiment import Experiment
from ddlsim.run.placement import PLACEMENTS


def _places(value: object, where: str) -> object:
    places = tuple(cast("Sequence[int]", value))
    if not places or len(set(places)) < len(places):
        raise ConfigError(f"{where} = {list(places)}: must list one place or more, each once")
    return places


PlacementLike = (
    Annotated[str, one_of(*PLACEMENTS)]
    | Annotated[Sequence[Index], "a placement or a list of places such as [0, 1, 2, 3]", by(_places)]
)


@checked
@dataclass(frozen=True)
class Job:
    """A run that shares a cluster with others.

    experiment  what runs; its `workers` say on how many devices, or on which
    name        in tables and messages; by default "job 1", "job 2" and so on
    start       s on the cluster's clock at which it begins
    placement   "packed" on neighbouring devices that are free then, "spread" over machines, "random", or places in
                ``cluster.workers``; has no effect where the experiment names its places
    goes_on     it goes on after its steps until all jobs that do not have ended: others are never alone. (A training
                ends when it has learned enough.)

    Raises ConfigError for an experiment that has others beside it, and for two placements.
    """

    experiment: Annotated[Experiment, "a ddlsim.Experiment"]
    name: str = ""
    _: KW_ONLY
    start: Annotated[float | str, quantity("time", "12 s", zero=True)] = 0.0
    placement: PlacementLike = "packed"
    goes_on: bool = False

    def __post_init__(self) -> None:
        workers = self.experiment.workers
        if self.experiment.beside:
            raise ConfigError("Job: experiment has others beside it; list all jobs, and give none of them `beside`")
        if isinstance(workers, Sequence) and self.placement != "packed":
            raise ConfigError(
                f"Job: placement = {shown(self.placement)} beside an experiment with workers = {list(workers)}; "
                "give workers a number, or leave placement out"
            )

    def n_workers(self, n_devices: int) -> int:
        """Return on how many devices it runs, of a cluster that has `n_devices`."""
        if not isinstance(self.placement, str):
            return len(self.placement)
        asked = self.experiment.n_workers
        return n_devices if asked is None else asked
