"""Cuts of a model: balanced against all there are, and what must cross them."""

import itertools
import math

import numpy as np
import pytest
from plan_examples import workload
from split_models import chain

from ddlsim import ConfigError
from ddlsim.plan import balanced_chunks, between_blocks, chunks_at, crossing_nbytes
from ddlsim.plan.chunks import balanced_cuts


def slowest(seconds, ends):
    return max(math.fsum(seconds[a:b]) for a, b in itertools.pairwise([0, *ends, len(seconds)]))


@pytest.mark.parametrize("seed", range(30))
def test_balanced_cuts_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 13))
    chunks = int(rng.integers(1, n + 1))
    work = chain(rng.exponential(size=n) * rng.integers(0, 2, n), rng.exponential(size=n))
    seconds = work.forward + work.backward
    best = min(slowest(seconds, ends) for ends in itertools.combinations(range(1, n), chunks - 1))
    cut = balanced_chunks(work, chunks)
    assert [chunk.first for chunk in cut] == [0, *(chunk.end for chunk in cut[:-1])]
    assert cut[-1].end == n
    assert len(cut) == chunks
    took = [chunk.workload.forward_time + chunk.workload.backward_time for chunk in cut]
    assert max(took) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_balanced_cuts_for_different_devices(seed):
    """Each chunk takes its own device's time; the slowest one takes the least possible."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 10))
    chunks = int(rng.integers(2, n + 1))
    devices = [chain(rng.exponential(size=n), rng.exponential(size=n)) for _ in range(2)]
    of_chunks = [devices[i] for i in rng.integers(0, 2, chunks)]

    def longest(ends):
        spans = itertools.pairwise([0, *ends, n])
        return max(
            math.fsum((work.forward + work.backward)[a:b]) for work, (a, b) in zip(of_chunks, spans, strict=True)
        )

    cuts = balanced_cuts(devices[0], chunks, of_chunks=of_chunks)
    best = min(longest(ends) for ends in itertools.combinations(range(1, n), chunks - 1))
    assert longest(cuts) == pytest.approx(best, rel=1e-12)


def test_of_equally_fast_cuts_the_fewest_bytes_cross():
    """ResNet-50's cuts between blocks cross one tensor, those inside two."""
    work = workload("resnet50")
    seconds, crossing = work.forward + work.backward, crossing_nbytes(work)
    cut = balanced_chunks(work, 2)
    best = min(slowest(seconds, [end]) for end in range(1, len(seconds)))
    as_fast = [end for end in range(1, len(seconds)) if slowest(seconds, [end]) <= best * (1 + 1e-12)]
    assert cut[1].enters == min(crossing[end] for end in as_fast)


def test_stages_of_several_chunks():
    cut = balanced_chunks(chain([1.0] * 12, [2.0] * 12), 3, 2)
    assert [(chunk.first, chunk.end) for chunk in cut] == [(i, i + 2) for i in range(0, 12, 2)]


def test_cuts_where_one_may_cut():
    work = workload("resnet50")
    places = between_blocks(work.model)
    cut = balanced_chunks(work, 4, at=places)
    assert {chunk.first for chunk in cut[1:]} <= set(places)
    assert all(chunk.enters == 4.0 * 8 * math.prod(work.model.layers[chunk.first].in_shape) for chunk in cut[1:])


def test_what_skips_a_cut_crosses_it_too():
    """In a basic block of ResNet-18 the input of the block goes past both convolutions."""
    work = workload("resnet18", 2)
    names = [layer.name for layer in work.model.layers]
    crossing = crossing_nbytes(work)
    inside = [i for i in range(len(names)) if i not in between_blocks(work.model) and i > 0]
    assert inside
    block = next(node for node in work.model.structure if type(node).__name__ == "Residual" and not node.shortcut)
    first = block.body[0].index
    width = 4.0 * 2 * math.prod(work.model.layers[first].in_shape)
    assert crossing[first] == width  # before the block
    assert crossing[first + 1] == 2 * width  # after its first layer: that and the input
    assert crossing[block.index] == 2 * width  # before the sum
    assert crossing[block.index + 1] == width
    assert crossing[0] == 4.0 * 2 * 3 * 224 * 224


def test_a_chain_crosses_what_its_layers_make():
    assert crossing_nbytes(chain([1.0] * 3, [1.0] * 3, width=7, batch_size=2)).tolist() == [56.0] * 3


def test_gradients_of_weights_are_half_of_the_backward_pass():
    work = workload("resnet18")
    chunk = chunks_at(work, [])[0]
    for layer, seconds, backward in zip(work.model.layers, chunk.weight_seconds, work.backward, strict=True):
        expected = 0.0 if not layer.n_params else 0.5 * backward if layer.input_grad else backward
        assert seconds == pytest.approx(expected)
    assert chunk.weight_seconds[0] == work.backward[0] > 0.0  # nothing needs the gradient of the image


def test_what_does_not_fit():
    work = chain([1.0] * 3, [1.0] * 3)
    with pytest.raises(ConfigError, match="stages = 4: chain has only 3 layers; use at most 3"):
        balanced_chunks(work, 4)
    with pytest.raises(ConfigError, match="stages 2 x chunks 2 = 4: chain has only 3 layers; use at most 3"):
        balanced_chunks(work, 2, 2)
    with pytest.raises(ConfigError, match="stages = 3: chain has only 2 pieces between the layers where it may be cut"):
        balanced_chunks(work, 3, at=[1])
    with pytest.raises(ConfigError, match="at = 5: must be below 3, the number of layers of chain"):
        balanced_chunks(work, 1, at=[5])
    for cuts in ([0], [2, 1], [1, 1], [3]):
        with pytest.raises(ConfigError, match="from 1 to 2; chain is cut before each"):
            chunks_at(work, cuts)
