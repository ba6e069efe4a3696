"""Gradient buckets against PyTorch's rule and by hand."""

from __future__ import annotations

import pytest

from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError
from ddlsim.workload.buckets import Bucket, ddp_buckets, megatron_buckets, one_bucket, partitioned, per_layer
from ddlsim.workload.compute import Affine, Workload, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model, model_names

MIB = 2**20
#: the files, of those that are there by their sizes only one size
FILES = [name for name in bundled_files("models") if name in model_names()] + ["llama-7b", "transformer-base"]


def _workload(name: str) -> Workload:
    return make_workload(load_model(name), load_device("v100"), 8, compute=Affine(0.01, 0.001))


RESNET50 = _workload("resnet50")


@pytest.mark.parametrize("name", FILES)
def test_every_byte_is_in_one_bucket_and_order_is_backward(name: str):
    workload = _workload(name)
    ways = [per_layer(workload), one_bucket(workload), ddp_buckets(workload), partitioned(workload, 4 * MIB)]
    ways.append(megatron_buckets(workload, 8))
    for buckets in ways:
        assert sum(bucket.nbytes for bucket in buckets) == pytest.approx(workload.gradient_nbytes, rel=1e-12)
        ready = [bucket.ready_layer for bucket in buckets]
        assert ready == sorted(ready, reverse=True)
        assert all(bucket.priority == bucket.first_layer for bucket in buckets)
    assert len(one_bucket(workload)) == 1


@pytest.mark.parametrize(("replicas", "cap"), [(2, 40e6), (64, 64e6)])
def test_buckets_of_megatron_are_counted_in_parameters(replicas: int, cap: float):
    workload = _workload("gpt2-xl")
    *full, last = (bucket.nbytes / 4.0 for bucket in megatron_buckets(workload, replicas))
    largest = max(workload.tensor_nbytes) / 4.0
    assert len(full) > 10
    assert last <= cap + largest
    assert all(cap <= n < cap + largest for n in full)


def test_per_layer_is_the_reversed_layers_with_parameters():
    """54 layers of convolution or fc, 53 of batch normalisation."""
    buckets = per_layer(RESNET50)
    assert len(buckets) == 54 + 53
    assert buckets[0] == Bucket(8_196_000.0, 174, 174, 174)
    assert buckets[-1].nbytes == 4 * 9408


def test_ddp_buckets_of_resnet50():
    """The last layer, fc, exceeds 1 MiB with its weight alone and makes the first bucket; the others close
    as soon as they reach 25 MiB, and what is left makes the last.
    """
    buckets = ddp_buckets(RESNET50)
    assert [bucket.nbytes for bucket in buckets] == [8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160]
    assert all(bucket.nbytes >= 25 * MIB for bucket in buckets[1:-1])
    assert buckets[-1].ready_layer == 0


def test_ddp_rule_by_replay():
    """compute_bucket_assignment_by_size on the reversed tensors: close when the size reaches the limit."""
    for first, cap in [(MIB, 25 * MIB), (MIB, MIB), (25 * MIB, 25 * MIB), (1, 1)]:
        buckets = list(ddp_buckets(RESNET50, cap_nbytes=cap, first_nbytes=first))
        tensors = list(zip(RESNET50.tensor_nbytes[::-1], RESNET50.tensor_layer[::-1], strict=True))
        limit = first
        while tensors:
            size, last = 0.0, 0.0
            while tensors and size < limit:
                last, layer = tensors.pop(0)
                size += last
            bucket = buckets.pop(0)
            assert (bucket.nbytes, bucket.ready_layer) == (size, layer)
            limit = cap
        assert not buckets


def test_a_tensor_that_exactly_fills_a_bucket_closes_it(tmp_path):
    """Two dense layers of 512 x 512 fp32 weights are 1 MiB each."""
    path = tmp_path / "two.toml"
    path.write_text(
        'title = "Two"\ninput = [512]\n'
        'layers = [{ type = "dense", units = 512, bias = false }, '
        '{ type = "dense", units = 512, bias = false }]\n'
    )
    workload = make_workload(load_model(path), load_device("v100"), 1)
    assert ddp_buckets(workload) == (Bucket(MIB, 1, 1, 1), Bucket(MIB, 0, 0, 0))


def test_partitions_are_equal_slices_of_a_tensor():
    """fc's bias, then its 8,192,000 bytes of weight in three slices of at most 4,000,000."""
    slices = partitioned(RESNET50, 4e6)
    assert slices[0].nbytes == 4000.0
    assert [bucket.nbytes for bucket in slices[1:4]] == [pytest.approx(8_192_000 / 3)] * 3
    assert max(bucket.nbytes for bucket in slices) <= 4e6


def test_bad_sizes():
    with pytest.raises(ConfigError, match="partition_nbytes = 0"):
        partitioned(RESNET50, 0)
    with pytest.raises(ConfigError, match="cap_nbytes = -1"):
        ddp_buckets(RESNET50, cap_nbytes=-1)
