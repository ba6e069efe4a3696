"""What is found in a cache: closed forms, and caches that are filled sample by sample."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from draws import pairwise

from ddlsim.errors import ConfigError
from ddlsim.workload.input import DATASETS, Input, hit_rate


def found(policy: str, room: float, machines: int, n_epochs: int, n: int = 20_000, seed: int = 1) -> list[float]:
    """Return the share of hits in each epoch, of caches that keep the samples of random orders one by one."""
    source = np.random.default_rng(seed)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(machines)]
    size, shares = round(room * n), []
    for _ in range(n_epochs):
        hits = 0
        for cache, samples in zip(caches, np.array_split(source.permutation(n), machines), strict=True):
            for sample in samples.tolist():
                if sample in cache:
                    hits += 1
                    if policy == "lru":
                        cache.move_to_end(sample)
                elif size and (len(cache) < size or policy == "lru"):
                    cache[sample] = None
                    if len(cache) > size:
                        cache.popitem(last=False)
        shares.append(hits / n)
    return shares


@pytest.mark.parametrize(("room", "share"), [(0.2, 0.0215), (0.5, 0.153), (0.8, 0.478)])
def test_lru_under_new_permutations(room, share):
    """x + (1-x) ln(1-x), and within 1 % of the data set what a cache finds that is filled one by one."""
    rate = hit_rate("lru", room)
    assert rate == pytest.approx(room + (1.0 - room) * math.log(1.0 - room), rel=1e-12)
    assert rate == pytest.approx(share, abs=5e-4)
    first, *later = found("lru", room, 1, 6)
    assert first == 0.0
    assert np.mean(later) == pytest.approx(rate, abs=0.01)


@pytest.mark.parametrize("room", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_what_is_never_evicted_is_found(room):
    first, *later = found("minio", room, 1, 3)
    assert first == hit_rate("minio", room, 1, 1) == 0.0
    assert later == pytest.approx([hit_rate("minio", room, 1, 2)] * 2, abs=1e-9)
    assert hit_rate("minio", room) == room


@pytest.mark.parametrize(("policy", "room", "machines"), pairwise(["lru", "minio"], [0.1, 0.3, 0.6], [2, 4]))
def test_machines_that_share_the_samples_of_an_epoch(policy, room, machines):
    shares = found(policy, room, machines, 6, n=60_000)
    expected = [hit_rate(policy, room, machines, epoch) for epoch in range(1, 7)]
    assert shares == pytest.approx(expected, abs=0.01)


def test_what_does_not_depend_on_the_order():
    """With many machines LRU finds as much as what is drawn at random: its share of the data set."""
    assert hit_rate("lru", 0.3, 4096) == pytest.approx(0.3, abs=1e-3)
    rates = [hit_rate("lru", 0.3, machines) for machines in (1, 2, 4, 16, 64)]
    assert rates == sorted(rates)
    assert hit_rate("lru", 1.0) == hit_rate("lru", 1.0, 7) == 1.0
    assert hit_rate("lru", 0.0) == 0.0


def test_data_sets():
    assert Input("imagenet").stored_nbytes == pytest.approx(115.4e3, rel=1e-3)
    assert Input("imagenet").n_samples == 1_281_167
    assert Input("imagenet", sample_bytes="600 kB").stored_nbytes == 600e3
    assert Input("imagenet").decoded_nbytes((3, 224, 224)) == 4 * 3 * 224 * 224
    assert all(size.source and size.samples * size.sample_nbytes > 1e6 for size in DATASETS.values())


@pytest.mark.parametrize("bad", [{"room": 1.5}, {"machines": 0}, {"policy": "fifo"}, {"epoch": -1}])
def test_errors(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        hit_rate(**{"policy": "lru", "room": 0.5, **bad})
