"""Random worlds: conservation (in every run) and invariants. More of them: ``python -m tests.worlds --worlds 1000``."""

import dataclasses
import inspect

import pytest
from documentation import public_names
from draws import seeds
from worlds_generator import BUNDLED, with_queues, world
from worlds_invariants import check_faults_without_effect, check_pauses, check_world

from ddlsim import compression, strategies


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_a_world_adds_up(seed):
    check_world(world(seed))


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_a_world_whose_links_serve_in_order_of_arrival_adds_up(seed):
    one = world(seed)
    queued = one.experiment.with_(cluster=with_queues(one.experiment.cluster))
    check_world(dataclasses.replace(one, experiment=queued))


@pytest.mark.parametrize("seed", seeds(8, 60))
def test_nothing_starts_in_a_pause(seed):
    check_pauses(world(seed))


@pytest.mark.parametrize("seed", seeds(5, 60))
def test_a_fault_without_effect_changes_nothing(seed):
    check_faults_without_effect(world(seed))


@pytest.mark.slow
def test_every_part_can_be_drawn():
    """A strategy, overlap or compressor that is new must be drawn as well."""
    named, overlaps = classes(strategies, "start", "label") - {"Strategy"}, classes(strategies, "buckets")
    assert (len(named), len(overlaps)) > (20, 4)
    missing = {*named, *overlaps, *classes(compression, "encode"), *BUNDLED, "ServerWork"} - {"Compressor"}
    for seed in range(3000):
        one = world(seed).experiment
        used = [one.strategy, getattr(one.strategy, "overlap", None), getattr(one.strategy, "work", None)]
        if one.compression is not None:
            compressor = one.compression.compressor
            used += [compressor, getattr(compressor, "inner", None), one.compression.cost]
        missing -= {one.cluster.name, *(type(part).__name__ for part in used)}
        if not missing:
            return
    assert not missing


def classes(package, *attributes):
    """Return the names of the package's public classes that have all these attributes."""
    found = [getattr(package, name) for name in public_names(package.__name__)]
    return {c.__name__ for c in found if inspect.isclass(c) and all(hasattr(c, name) for name in attributes)}
