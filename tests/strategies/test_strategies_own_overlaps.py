"""Overlaps that a user has written: buckets are enough, and what is said of those that are wrong."""

from dataclasses import dataclass

import pytest

import ddlsim
from ddlsim.workload.buckets import per_layer


@dataclass(frozen=True)
class Own:
    """PerLayer, or with a mistake."""

    mistake: str = ""

    def buckets(self, workload):
        buckets = per_layer(workload)
        return {
            "": buckets, "left out": buckets[1:], "twice": (*buckets, buckets[-1]), "order": buckets[::-1],
            "none": (), "sizes": tuple(bucket.nbytes for bucket in buckets),
        }[self.mistake]  # fmt: skip


@dataclass
class Changing:
    """Not frozen."""

    def buckets(self, workload):
        return per_layer(workload)


def run(overlap, **more):
    return ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(overlap=overlap), 8, 4, steps=3, **more)


def test_buckets_are_enough():
    """Times, bytes, plan and compression are those of the bundled overlap with the same buckets."""
    own, bundled = run(Own()), run("layer")
    assert own.step_time == bundled.step_time
    assert own.channel_nbytes.tolist() == bundled.channel_nbytes.tolist()
    assert own.plan.critical_path() == bundled.plan.critical_path()
    packed, known = (run(overlap, compression=ddlsim.TopK(0.1)) for overlap in (Own(), "layer"))
    assert packed.step_time == known.step_time
    shards, known = (ddlsim.ShardedUpdate(overlap=overlap) for overlap in (Own(), "layer"))
    shards, known = (ddlsim.simulate("office-1gbe", "lenet5", each, 8, 4, steps=3) for each in (shards, known))
    assert shards.step_time == known.step_time
    assert shards.plan == known.plan
    served, known = (
        ddlsim.simulate("office-1gbe", "lenet5", ddlsim.ParameterServer(overlap=overlap), 8, 4, steps=3)
        for overlap in (Own(), "layer")
    )
    assert served.step_time == known.step_time


@pytest.mark.parametrize(
    ("overlap", "said"),
    [
        (
            Own("left out"),
            r"Own\.buckets: the buckets hold \d+ bytes, but the gradients have 246824; put every gradient",
        ),
        (Own("twice"), r"Own\.buckets: the buckets hold \d+ bytes, but the gradients have 246824"),
        (Own("order"), r"Own\.buckets: the bucket of layer \d+ follows that of layer 0, but"),
        (Own("none"), r"Own\.buckets returned \(\); it must return at least one ddlsim\.runtime\.Bucket"),
        (Own("sizes"), r"Own\.buckets returned .*; it must return at least one ddlsim\.runtime\.Bucket"),
        (Own, "overlap = .*Own.*: must be one of none, layer, .* a frozen dataclass with a method buckets"),
        (object(), "overlap = .*: must be one of none, layer"),
        (Changing(), r"overlap = .*Changing.*: must be immutable; make its class @dataclass\(frozen=True\)"),
        ("os:no_such", "overlap 'os:no_such': .*; expected 'package.module:Name'"),
    ],
)
def test_what_is_wrong_with_an_overlap(overlap, said):
    with pytest.raises(ddlsim.ConfigError, match=said):
        run(overlap)
