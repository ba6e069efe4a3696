"""Random worlds: conservation (in every run) and invariants. More of them: ``python -m tests.worlds --worlds 1000``."""

import inspect

import pytest
from worlds_generator import BUNDLED, world
from worlds_invariants import check_world

from ddlsim import compression, strategies


@pytest.mark.parametrize("seed", range(30))
def test_a_world_adds_up(seed):
    check_world(world(seed))


def test_every_part_can_be_drawn():
    """A strategy, overlap, compressor or bundled cluster that is new must be drawn as well."""
    drawn, clusters = set(), set()
    for seed in range(3000):
        one = world(seed).experiment
        clusters.add(one.cluster.name)
        used = [one.strategy, getattr(one.strategy, "overlap", None), getattr(one.strategy, "work", None)]
        if one.compression is not None:
            used += [one.compression.compressor, getattr(one.compression.compressor, "inner", None)]
        drawn |= {type(part).__name__ for part in used}
    assert classes(strategies, "start", "updates") | {"ServerWork"} <= drawn | {"Strategy"}
    assert classes(strategies, "buckets") <= drawn
    assert classes(compression, "encode") <= drawn | {"Compressor"}
    assert set(BUNDLED) <= clusters
    assert (len(classes(strategies, "start", "updates")), len(classes(strategies, "buckets"))) > (20, 4)


def classes(package, *attributes):
    """Return the names of the package's public classes that have all these attributes."""
    found = [getattr(package, name) for name in package.__all__]
    return {c.__name__ for c in found if inspect.isclass(c) and all(hasattr(c, name) for name in attributes)}
