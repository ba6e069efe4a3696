"""The caching allocator by hand, and training steps on it."""

from __future__ import annotations

import pytest

from accuracy.allocator import MIB, STREAMS, Allocator, Training
from accuracy.memory import reserved
from ddlsim import load_model


def test_segments_by_hand() -> None:
    """2 MiB for small tensors, 20 MiB below 10 MiB, multiples of 2 MiB above."""
    for nbytes, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12)):
        memory = Allocator()
        memory.take(nbytes)
        assert memory.reserved == segment * MIB


def test_blocks_are_split_and_put_together_again() -> None:
    memory = Allocator()
    blocks = [memory.take(3 * MIB) for _ in range(6)]
    assert memory.reserved == 20 * MIB  # 2 MiB are left
    assert memory.take(3 * MIB).nbytes == 3 * MIB
    assert memory.reserved == 40 * MIB
    for block in blocks[1], blocks[3], blocks[2]:
        memory.give(block)
    assert memory.take(9 * MIB).address == blocks[1].address  # of the three together
    assert memory.reserved == 40 * MIB
    assert memory.take(512).nbytes == 512
    assert memory.reserved == 42 * MIB


def test_streams_do_not_share_blocks() -> None:
    memory = Allocator()
    memory.give(memory.take(5 * MIB, 1))
    memory.take(5 * MIB, 2)
    assert memory.reserved == 40 * MIB
    memory.take(5 * MIB, 1)
    assert memory.reserved == 40 * MIB


def test_a_full_device_takes_back_what_is_free() -> None:
    memory = Allocator(capacity=45 * MIB)
    blocks = [memory.take(20 * MIB), memory.take(20 * MIB)]
    memory.give(blocks[0])
    memory.take(24 * MIB)
    assert (memory.reserved, memory.peak) == (44 * MIB, 44 * MIB)


def test_a_chain_by_hand() -> None:
    """LeNet-5 with 1,024 samples: what is kept of all layers at once, gradients of two neighbours, weights twice."""
    model, samples = load_model("lenet5"), 1024
    training = Training(model, 0, len(model.layers), samples, 1, again=False, states=0)
    kept = samples * sum(layer.stored_nbytes + layer.fixed_nbytes for layer in model.layers)
    least = kept + 2 * 4 * model.n_params
    most = least + 3 * max(training.nbytes.values()) + training.nbytes[-1] + 40 * MIB
    assert least < training.reserved_nbytes() < most


def test_copies_of_a_stage_have_streams_of_their_own() -> None:
    """What enters the second stage, 2 tensors of 3.25 MiB of 128 micro-batches on 32 streams: six to a segment, so two
    segments each, where two micro-batches take one each."""
    model = load_model("amoebanet-d-18-544")
    first = next(i for i, layer in enumerate(model.layers) if layer.name.startswith("reduction2"))
    second = Training(model, first, len(model.layers), 1, 128, again=True, states=1)
    assert [second.nbytes[i] for i in second.enters] == [4 * 2176 * 14 * 14 * 2.0] * 2
    few = Training(model, first, len(model.layers), 1, 2, again=True, states=1)
    copies = second.reserved_nbytes() - few.reserved_nbytes()
    assert copies == (2 * STREAMS - 2) * 20 * MIB


@pytest.mark.parametrize(("name", "modules"), [("amoebanet-d-18-208", [24]), ("unet", [241])])
def test_recomputed_micro_batches_take_less(name: str, modules: list[int]) -> None:
    whole, parts = reserved(name, 16, 1, []), reserved(name, 16, 16, modules)
    assert parts < 0.6 * whole
