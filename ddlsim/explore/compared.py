"""Strategies beside the form's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from ddlsim.cluster import load_cluster
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.explore.setup import Setup, beginnings
from ddlsim.run.files import SCHEMA, STRATEGIES
from ddlsim.runtime.servers import server_nodes
from ddlsim.strategies import Strategy


def at_most(n: int, setup: Setup) -> int:
    """Return how many workers a screen begins with: `n`, or all that the form's cluster has."""
    with contextlib.suppress(DdlsimError):  # the form says what is wrong with it
        return min(n, len(load_cluster(setup.cluster.strip()).workers))
    return n


def chosen_strategies(setup: Setup, others: Sequence[str], workers: int | None = None) -> dict[str, Strategy]:
    """Return the form's strategy, and others as they begin, by label. Raises a DdlsimError for what makes no sense.

    workers  how many there are: servers of the others go beside them where no machine is left. None: it is not fixed
    """
    own = setup.experiment().strategy
    found: dict[str, Strategy] = {own.label: own}
    for name in others:
        begins = beginnings(name, STRATEGIES)
        if workers is not None and "placement" in {each.name for each in dataclasses.fields(STRATEGIES[name])}:  # type: ignore[arg-type]
            begins |= _placement(setup, workers)
        made: Strategy = SCHEMA.build(STRATEGIES[name], begins, name)
        if made != own:
            found[made.label if made.label not in found else f"{made.label} ({name})"] = made
    return found


def _placement(setup: Setup, workers: int) -> dict[str, object]:
    """Return where a server begins: on a machine of its own, if one is left."""
    cluster = load_cluster(setup.cluster.strip())
    try:
        server_nodes(cluster, cluster.workers[:workers].tolist(), 1, "own")
    except ConfigError:
        return {"placement": "colocated"}
    return {}
