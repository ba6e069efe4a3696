"""Random worlds: conservation (in every run) and invariants. More of them: ``python -m tests.worlds --worlds 1000``."""

import inspect

import pytest
from worlds_generator import BUNDLED, world
from worlds_invariants import check_world

from ddlsim import compression, strategies
from ddlsim.cluster.nodes import INTERIORS


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
    named = [n for n, c in vars(strategies).items() if inspect.isclass(c) and hasattr(c, "start") and hasattr(c, "updates")]
    overlaps = [n for n, c in vars(strategies).items() if inspect.isclass(c) and hasattr(c, "buckets")]
    compressors = [n for n, c in vars(compression).items() if inspect.isclass(c) and hasattr(c, "encode") and n != "Compressor"]
    assert len(named) > 20 and len(overlaps) == 5 and len(compressors) > 15
    assert {*named, *overlaps, *compressors, "ServerWork"} - {"Strategy"} - drawn == set()
    assert set(BUNDLED) <= clusters
