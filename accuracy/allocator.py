"""PyTorch's caching allocator on training steps of torchgpipe: what `max_memory_cached` of all GPUs is together.

The allocator (c10/cuda/CUDACachingAllocator.cpp since PyTorch 1.1) takes segments of 2 MiB for tensors up to 1 MiB, of
20 MiB for those below 10 MiB, and of multiples of 2 MiB for larger ones. It splits them, and never gives a block to
another stream than the one that it was taken for; if the device is full, it gives back free segments. A step takes and
frees memory as autograd does, tensor by tensor: weights, outputs, gradients, and what is kept for the backward pass.
Workspaces of cuDNN are not in it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ddlsim.plan.chunks import uses_of
from ddlsim.workload.layers import Slice
from ddlsim.workload.model import Concat, Leaf, Model, Node
from ddlsim.workload.precision import FP32_NBYTES

__all__ = ["Allocator", "Block", "Training"]

MIB = 2**20
#: streams of a device that PyTorch hands out in turn (c10/cuda/CUDAStream.cpp: kStreamsPerPool)
STREAMS = 32
#: layers that make no tensor of their own
VIEWS = ("flatten", "slice")


class Block(NamedTuple):
    """Bytes at an address, for a stream, in segments for small tensors or others."""

    address: int
    nbytes: int
    stream: int
    small: bool


class Allocator:
    """The memory of one device.

    capacity  bytes; before it reserves more, segments that are free as a whole go back
    """

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity, self.reserved, self.peak = capacity, 0, 0
        self._sizes: dict[int, int] = {}  # of segments, by address
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # (bytes, address), sorted
        self._segments = itertools.count(0, 2**40)

    def take(self, nbytes: float, stream: int = 0) -> Block:
        """Return the smallest free block that is large enough, or one of a new segment."""
        size = max(512, -(-round(nbytes) // 512) * 512)
        small = size <= MIB
        free = self._free[stream, small]
        at = bisect.bisect_left(free, (size, -1))
        if at < len(free):
            found, address = free.pop(at)
        else:
            found = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            address = next(self._segments)
            if self.reserved + found > self.capacity:
                self._release()
            self._sizes[address] = found
            self.reserved += found
            self.peak = max(self.peak, self.reserved)
        if found - size >= (512 if small else MIB + 1):
            bisect.insort(free, (found - size, address + size))
            found = size
        return Block(address, found, stream, small)

    def _release(self) -> None:
        for free in self._free.values():
            for whole in [each for each in free if self._sizes.get(each[1]) == each[0]]:
                free.remove(whole)
                self.reserved -= self._sizes.pop(whole[1])

    def give(self, block: Block) -> None:
        """Free a block, which becomes one with its free neighbours."""
        address, size = block.address, block.nbytes
        free = self._free[block.stream, block.small]
        for each in [each for each in free if sum(each) == address or each[1] == address + size]:
            free.remove(each)
            address, size = min(address, each[1]), size + each[0]
        bisect.insort(free, (size, address))


def _first_channels(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the first channel that each slice takes."""
    found: dict[int, int] = {}
    for node in nodes:
        if isinstance(node, Leaf):
            found |= {node.index: node.spec.first} if isinstance(node.spec, Slice) else {}
        else:
            inner = node.branches if isinstance(node, Concat) else [node.body, getattr(node, "shortcut", ())]
            for branch in inner:
                found |= _first_channels(branch)
    return found


class Training:
    """Training steps of the layers `first` to `end` - 1 of a model on one device.

    samples        of a micro-batch
    micro_batches  of a step. Of each the device keeps what enters its layers
    again          whether layers are computed again before their backward pass
    states         tensors of the optimizer for each weight
    capacity       bytes of the device
    """

    def __init__(
        self, model: Model, first: int, end: int, samples: int, micro_batches: int, *, again: bool, states: int,
        capacity: float = math.inf,
    ) -> None:  # fmt: skip
        self.memory, self.layers, self.first = Allocator(capacity), model.layers, first
        self.micro_batches, self.again, self.states = micro_batches, again, states
        layers, parents = model.layers, defaultdict[int, list[int]](list)
        for made, used in uses_of(model):
            parents[used].append(made)
        views = {i for i, layer in enumerate(layers) if layer.type in VIEWS}
        views |= {i for i, layer in enumerate(layers) if layer.type == "concat" and not layer.moved_nbytes}

        firsts = _first_channels(model.structure)

        @functools.cache
        def parts(layer: int) -> list[tuple[int, int]]:
            """Return the tensors that an output is made of, with the channels of each; -1 is the model's input."""
            shape = model.input_shape if layer < 0 else layers[layer].out_shape
            if layer not in views:
                return [(layer, shape[0])]
            every = [part for parent in parents[layer] for part in parts(parent)]
            if layer not in firsts:
                return every
            begins = itertools.accumulate((n for _, n in every), initial=0)
            low, high = firsts[layer], firsts[layer] + shape[0]
            cut = [(tensor, min(at + n, high) - max(at, low)) for at, (tensor, n) in zip(begins, every, strict=False)]
            return [part for part in cut if part[1] > 0]

        every = {
            i: {tensor for parent in parents[i] for tensor, _ in parts(parent)}
            for i in range(len(layers))
            if i not in views
        }
        self.reads = {i: tensors for i, tensors in every.items() if first <= i < end}
        self.last = {tensor: i for i, tensors in self.reads.items() for tensor in tensors}
        later = {tensor for i, tensors in every.items() if i >= end for tensor in tensors}
        self.leaves = [i for i in self.reads if i in later]
        self.enters = [tensor for tensor in self.last if tensor < first]
        self.nbytes = {i: FP32_NBYTES * samples * math.prod(layer.out_shape) for i, layer in enumerate(layers)}
        self.nbytes[-1] = FP32_NBYTES * samples * math.prod(model.input_shape)
        self.weights = {i: [FP32_NBYTES * n for _, n in layers[i].tensors] for i in self.reads}
        self.statistics = {
            i: 2 * [FP32_NBYTES * layers[i].out_shape[0]] for i in self.reads if layers[i].type == "batch_norm"
        }
        stored = {i: samples * layers[i].stored_nbytes for i in self.reads}
        self.kept = {i for i in self.reads if stored[i] >= self.nbytes[i]}
        inner = {
            i: stored[i] - self.nbytes[i] * (i in self.kept) + samples * layers[i].fixed_nbytes for i in self.reads
        }
        self.inner = {i: nbytes for i, nbytes in inner.items() if nbytes > 0.0}

    def reserved_nbytes(self) -> int:
        """Return the bytes that the allocator has reserved at most in two steps."""
        take, give, streams = self.memory.take, self.memory.give, [1 + i % STREAMS for i in range(self.micro_batches)]
        for i in self.reads:
            for nbytes in (*self.weights[i], *self.statistics.get(i, ())):
                take(nbytes)
        if self.first == 0:
            take(self.nbytes[-1] * self.micro_batches)
        for step in range(2):
            # what enters arrives on the copy stream of its micro-batch, as do gradients of what leaves
            inputs = [[take(self.nbytes[i], stream) for i in self.enters if i >= 0] for stream in streams]
            kept = None
            if self.again:
                for block in self._forward(keep=False).values():
                    give(block)
            else:
                kept = self._forward(keep=True)
            for micro, stream in reversed(list(enumerate(streams))):
                arrived = [take(self.nbytes[i], stream) for i in self.leaves]
                if micro >= self.micro_batches - 2:  # the others do the same
                    self._backward(
                        self._forward(keep=True) if kept is None else kept,
                        first=not step and micro == self.micro_batches - 1,
                    )
                for block in (*arrived, *inputs[micro]):
                    give(block)
            for nbytes in itertools.chain.from_iterable(self.weights.values()) if self.states else ():
                for _ in range(self.states if not step else 0):
                    take(nbytes)
                give(take(nbytes))  # the square root
        return self.memory.peak

    def _forward(self, *, keep: bool) -> dict[tuple[int, str], Block]:
        """Compute all layers; return the blocks of what is there afterwards: what leaves, and with `keep` what backward
        passes read."""
        live: dict[tuple[int, str], Block] = {}
        for i, tensors in self.reads.items():
            live[i, "out"] = self.memory.take(self.nbytes[i])
            if keep and i in self.inner:
                live[i, "inner"] = self.memory.take(self.inner[i])
            for tensor in sorted(tensors):
                done = self.last[tensor] == i and tensor not in self.leaves and not (keep and tensor in self.kept)
                if done and (tensor, "out") in live:
                    self.memory.give(live.pop((tensor, "out")))
        return live

    def _backward(self, live: dict[tuple[int, str], Block], *, first: bool) -> None:
        """Compute the gradients of all layers; those of weights stay from the `first` time on."""
        gradients: dict[int, Block] = {}
        shares = Counter[Block]()  # gradients of sums and concatenations are those of what they are made of, or parts

        def drop(block: Block | None) -> None:
            if block is not None:
                shares[block] -= 1
                if shares[block] <= 0:
                    self.memory.give(block)

        for i in reversed(self.reads):
            own = gradients.pop(i, None)
            for tensor in sorted(self.reads[i]):
                if tensor < 0:
                    continue
                passes_on = own is not None and self.layers[i].type in ("add", "concat")
                new = own if passes_on and own is not None else self.memory.take(self.nbytes[tensor])
                shares[new] += 1
                if tensor in gradients or tensor in self.leaves:  # a new tensor for the sum
                    total = self.memory.take(self.nbytes[tensor])
                    shares[total] += 1
                    drop(new)
                    drop(gradients.pop(tensor, None))
                    new = total
                gradients[tensor] = new
            for nbytes in self.weights[i]:
                of_weight = self.memory.take(nbytes)
                if not first:
                    self.memory.give(of_weight)
            drop(own)
            for block in (live.pop((i, "out"), None), live.pop((i, "inner"), None)):
                if block is not None:
                    self.memory.give(block)
        for block in gradients.values():
            drop(block)
