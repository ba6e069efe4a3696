"""Das et al.'s hybrids of data and model parallelism: layouts, their plans, and what every rank has when."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from draws import few
from numpy.lib.stride_tricks import sliding_window_view
from strategy_plans import plan_of
from unrolled import hybrid

from ddlsim import ConfigError, Hybrid, load_cluster, load_model, simulate
from ddlsim.cluster import star
from ddlsim.network import Network
from ddlsim.plan.execute import run_to_end
from ddlsim.plan.hybrid import Layout, balanced_layout, layout_of, sizes, split_factors, splittable
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, KINDS, REDUCE_SCATTER, Plan
from ddlsim.plan.schedules import Schedules
from ddlsim.workload.buckets import one_bucket, per_layer
from ddlsim.workload.compute import Roofline, Workload, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import Model

PASSES = KINDS.index("backward"), KINDS.index("backward_weight")
ALL_TO_ALL = KINDS.index("all_to_all")
CHAIN = """
title = "convolutions and dense layers in a row"
sources = ["made for this test"]
trainable = true
input = [3, 6, 6]
layers = [
  { type = "conv", name = "a", channels = 6, kernel = 3, padding = 1 },
  { type = "relu" },
  { type = "conv", name = "b", channels = 8, kernel = 3 },
  { type = "relu" },
  { type = "flatten" },
  { type = "dense", name = "c", units = 10 },
  { type = "relu" },
  { type = "dense", name = "d", units = 7 },
]
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "chain.toml"
    path.write_text(CHAIN)
    return load_model(path)


def workload_of(model: Model, batch: int, **more) -> Workload:
    return make_workload(model, load_device("xeon-e5-2698v3"), batch, **more)


# ------------------------------------------------------------ the formulas of the paper


def test_computation_for_each_byte_of_data_parallelism():
    """Section 3.1: comp / comm = 1.5 out_w out_h MB: three passes of 2 FLOPs, four bytes a weight each way, whose
    sending overlaps with receiving."""
    workload = workload_of(load_model("vgg-a"), 4)
    plan = hybrid([workload] * 2, layout_of(workload.model, 2, {}))
    for part in (p for p in plan.parts if workload.model.layers[p.first].type == "conv"):
        layer = workload.model.layers[part.first]
        weights = dict(layer.tensors)["weight"]
        operations = 3 * 2 * layer.macs * workload.batch_size
        nbytes = part.nbytes * weights / layer.n_params  # without biases
        assert operations / nbytes == pytest.approx(1.5 * layer.out_shape[1] * layer.out_shape[2] * 4, rel=1e-12)


@pytest.mark.parametrize("n", [2, 16, 64])
def test_where_model_parallelism_begins_to_pay(n: int):
    """Section 3.2: ofm k_w k_h (2 - overlap)/2 > in_w in_h mb; both are (n - 1)/n of it, of bytes received."""
    ofm, ifm, k, side = 64, 16, 3, 8
    weights = 4.0 * ofm * ifm * k * k
    for samples in (8, 9, 10, 64):
        inputs = 2 * 4.0 * ifm * side * side * samples
        layouts = [Layout(n, (n, g, n), (0, ofm, 0), (False,) * 3) for g in (1, n)]
        split, data = (each.received((0, inputs, 0), (0, weights, 0), samples) for each in layouts)
        split -= layouts[0].received((0, 0, 0), (0, 0, 0), samples)
        assert (split < data) == (ofm * k * k > side * side * samples)  # overlap 0: 9 samples are the limit
        assert split == pytest.approx(2 * (n - 1) / n * 4 * ifm * side * side * samples, rel=1e-12)
        assert data == pytest.approx(2 * (n - 1) / n * weights, rel=1e-12)


@pytest.mark.parametrize("g", [1, 2, 4, 8])
def test_bytes_of_any_number_of_groups(g: int):
    """2 (M - 1)/M size in mb/G + 2 (G - 1)/G size w G/N, each for the layer itself."""
    layout = Layout(8, (8, g), (0, 64), (False, False))
    received = layout.received((0.0, 2 * 1000.0), (0.0, 300.0), 0.0)
    m = 8 // g
    assert received == pytest.approx(2 * (m - 1) / m * 1000 / g + 2 * (g - 1) / g * 300 * g / 8, rel=1e-12)


def test_balance_finds_the_least_of_all_layouts(chain: Model):
    for n, samples, element in itertools.product((4, 6), (12, 1200), (2.0, 4.0)):
        inputs, weights = sizes(chain, samples, element, 4.0)
        names = [chain.layers[i].name for i in splittable(chain)]
        every = []
        for numbers in itertools.product([g for g in range(1, n + 1) if n % g == 0], repeat=len(names)):
            layout = layout_of(chain, n, dict(zip(names, numbers, strict=True)))
            every.append(layout.received(inputs, weights, samples))
        best = balanced_layout(chain, n, samples, element, 4.0)
        assert best.received(inputs, weights, samples) == pytest.approx(min(every), rel=1e-12)


def test_balance_of_vgg_splits_what_has_many_weights_for_its_inputs():
    model = load_model("vgg-a")
    layout = balanced_layout(model, 64, 256, 4.0, 4.0)
    assert {model.layers[i].name: layout.groups[i] for i in layout.split} == {
        "conv5.0.conv": 32,
        "conv5.1.conv": 32,
        "fc6": 2,
        "fc7": 2,
        "fc8": 4,
    }
    assert balanced_layout(model, 64, 256 * 10**6, 4.0, 4.0).split == ()


# ------------------------------------------------------------ plans


LAYOUTS = [
    {}, {"c": 1, "d": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}, {"b": 2, "c": 1}, {"a": 1, "c": 2},
    {"a": 2, "b": 3, "c": 1, "d": 2}, {"a": 3, "b": 2, "c": 3, "d": 2}, {"c": 3}, {"d": 1},
]  # fmt: skip


@pytest.mark.parametrize("groups", few(LAYOUTS, 4), ids=str)
@pytest.mark.parametrize("buckets", [one_bucket, per_layer])
def test_plans_are_proved_and_the_network_counts_what_the_formula_says(chain: Model, groups, buckets):
    n, workload = 6, workload_of(chain, 5)
    layout = layout_of(chain, n, groups)
    hybrid([workload] * n, layout, buckets, steps=3).check()
    strategy = Hybrid(groups, overlap="none" if buckets is one_bucket else "layer")
    cluster = load_cluster(star(n, bandwidth=1e9, latency=0.0))
    result = simulate(cluster, chain, strategy, batch_size=5 * n, steps=4, warmup=0, device="xeon-e5-2698v3")
    plan = plan_of(strategy, result.workloads)
    network, nodes = Network(cluster), np.arange(n)
    run_to_end(plan, network, nodes, Schedules(plan, "ring", cluster, nodes))
    inputs, weights = sizes(chain, 5 * n, 4.0, 4.0)
    received = n * layout.received(inputs, weights, 5 * n)
    assert network.nbytes_sent == pytest.approx(received, rel=1e-9, abs=1e-9)
    every = plan_of(strategy, result.workloads, 5)
    execution = every.execute(cluster)
    for row in every.rows(ALL_REDUCE)[every.part[every.rows(ALL_REDUCE)] < 0].tolist():
        name = every.names[every.name[row]]  # of a split layer, whose gradients have been computed by then
        layer = next((i for i, each in enumerate(chain.layers) if each.name == name), 7)
        passes = every.rows(*((KINDS.index("forward"),) if name == "loss" else PASSES))
        own = (every.rank[passes] == every.rank[row]) & (every.step[passes] == every.step[row])
        (before,) = passes[own & (every.first[passes] <= layer) & (layer < every.end[passes])]
        assert execution.start[row] >= execution.end[before]
    np.testing.assert_allclose(result.step_times, execution.step_times[:4], rtol=1e-12)


def test_without_a_group_of_several_it_is_data_parallelism(chain: Model):
    plan = hybrid([workload_of(chain, 5)] * 4, layout_of(chain, 4, {}))
    assert set(np.unique(plan.kind[plan.collectives])) == {ALL_REDUCE}


def test_a_mutated_plan_is_refused(chain: Model):
    plan = hybrid([workload_of(chain, 5)] * 4, layout_of(chain, 4, {"c": 2, "d": 1}), steps=2)
    plan.check()
    rng = np.random.default_rng(0)
    for row in rng.choice(plan.rows(KINDS.index("forward"), KINDS.index("backward_input")), 5, replace=False):
        kind = plan.kind.copy()
        kind[row] = KINDS.index("compute")
        with pytest.raises(ConfigError, match=r"has no [a-z-]+ pass"):
            dataclasses.replace(plan, kind=kind).check()


def test_gradients_of_weights_hide_those_of_inputs(chain: Model):
    """A layer that is split makes the gradient of its input first, which travels while its weights' is computed."""
    plan = hybrid([workload_of(chain, 5)] * 2, layout_of(chain, 2, {"c": 1}))
    run = plan.execute(star(2, bandwidth=1e9, latency=0.0))
    scatter = plan.rows(REDUCE_SCATTER)
    weights = plan.rows(KINDS.index("backward_weight"))
    weights = weights[plan.first[weights] == next(iter(layout_of(chain, 2, {"c": 1}).split))]
    assert run.start[scatter].tolist() == run.start[weights].tolist()


def test_a_layer_that_is_split_reads_fewer_weights():
    """By the roofline: 2 samples of all outputs, or 32 samples of a 16th of them, read 1/16 of the weights."""
    workload = workload_of(load_model("vgg-a"), 2, compute=Roofline(0.5))
    layout = layout_of(workload.model, 16, {"fc6": 1})
    factor = split_factors(workload, layout)
    (index,) = layout.split
    layer, device = workload.model.layers[index], workload.device
    assert device is not None
    arithmetic = 32 * layer.flops / 16 / (0.5 * device.peak_flops["fp32"])
    moved = 4 * (32 * (25088 + 4096 / 16) + layer.n_params // 16) / workload.memory_bandwidth
    assert factor[index] * workload.forward[index] == pytest.approx(max(arithmetic, moved), rel=1e-9)
    assert factor[index] < 0.5
    assert np.delete(factor, index).tolist() == [1.0] * (len(factor) - 1)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_low_precisions_split_layers_as_bf16(precision: str):
    """They apply to transformer layers only, and these are not split."""
    model, device = load_model("vgg-a"), load_device("b200")
    low, bf16 = (make_workload(model, device, 2, precision=each) for each in (precision, "bf16"))
    layout = layout_of(model, 16, {"fc6": 1, "fc7": 4})
    np.testing.assert_array_equal(split_factors(low, layout), split_factors(bf16, layout))


# ------------------------------------------------------------ values: the plan's moves, done with numbers


def conv(x, w, pad):
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    return np.einsum("ncijkl,ockl->noij", sliding_window_view(padded, (3, 3), axis=(2, 3)), w)


def conv_back(x, w, pad, gradient):
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    weights = np.einsum("ncijkl,noij->ockl", sliding_window_view(padded, (3, 3), axis=(2, 3)), gradient)
    flipped = w.transpose(1, 0, 2, 3)[..., ::-1, ::-1]
    return conv(np.pad(gradient, ((0, 0), (0, 0), (2 - pad,) * 2, (2 - pad,) * 2)), flipped, 0), weights


class Ranks:
    """Ranks of a layout that do with numbers what it says. What a rank does not have is nan."""

    def __init__(self, model: Model, layout: Layout, plan: Plan, weights, inputs):
        self.model, self.layout, self.n, self.plan = model, layout, layout.n_ranks, plan
        self.samples, self.weights = len(inputs), weights
        self.moved: list[tuple[int, float]] = []
        self.have = [self.of_rank(inputs, r, layout.n_ranks, 0) for r in range(self.n)]

    def block(self, rank, groups):
        size = self.samples // groups
        return slice(rank // (self.n // groups) * size, (rank // (self.n // groups) + 1) * size)

    def of_rank(self, whole, rank, groups, layer):
        own = np.full(whole.shape, np.nan)
        own[self.block(rank, groups)] = whole[self.block(rank, groups)]
        return own

    def outputs(self, layer, rank):
        """Features of a layer that a rank computes: interleaved so that groups that deal samples out hold what fits."""
        ways, n = self.layout.group_size(layer), self.layout.outputs[layer]
        ends = np.cumsum([round(self.layout.share(layer, r) * n) for r in range(ways)])
        place = rank % ways
        return np.arange(ends[place - 1] if place else 0, ends[place])

    def travel(self, layer, have, back):
        """Do the moves: deal samples out, and gather (back: sum) what a layer needs."""
        nbytes = 4.0 * self.samples * np.prod(self.model.layers[layer].in_shape)
        for kind, groups, size in self.layout.moves(layer, nbytes, back=back):
            self.moved.append((KINDS.index(kind), size))
            after = [a.copy() for a in have]
            for group in groups:
                if kind == "reduce_scatter":
                    total = np.sum([have[r] for r in group], axis=0)
                    assert not np.isnan(total[self.block(group[0], self.layout.groups[layer])]).any()
                    for r in group:
                        after[r] = np.where(np.isnan(self.was[layer][r]), np.nan, total)
                elif back:  # dealt out samples go back to those who had their features
                    for r in group:
                        got = np.full(have[r].shape, np.nan)
                        for other in group:
                            theirs = ~np.isnan(self.before[layer][r]) & ~np.isnan(have[other])
                            got = np.where(theirs, have[other], got)
                        after[r] = got
                else:
                    union = np.full(have[group[0]].shape, np.nan)
                    for r in group:
                        union = np.where(np.isnan(union), have[r], union)
                    own = self.layout.groups[layer] if kind == "all_gather" else None
                    for r in group:
                        if own is not None:
                            after[r] = np.where(np.isnan(have[r]), union, have[r])
                            assert not np.isnan(after[r][self.block(r, own)]).any(), "a layer lacks inputs"
                        else:
                            smaller = self.n // self.layout.group_size(layer - 1) * len(group)
                            after[r] = np.full(union.shape, np.nan)
                            block = self.block(r, smaller)
                            after[r][block] = union[block]
            if kind == "all_to_all" and not back:
                self.was_dealt = after
            have = after
        return have

    def step(self, labels):
        """Return the gradients of all weights, from each rank's part of them."""
        layers, layout = self.model.layers, self.layout
        have, inputs = self.have, []
        self.was, self.before = {}, {}
        for i, layer in enumerate(layers):
            self.before[i] = have
            if layout.exchanges(i):
                dealt = layout.moves(i, 0.0)[0][0] == "all_to_all"
                gathered = self.travel(i, have, back=False)
                self.was[i] = self.was_dealt if dealt else have
                have = gathered
            inputs.append(have)
            after = []
            for r in range(self.n):
                block = self.block(r, layout.groups[i])
                out = np.full((self.samples, *layer.out_shape), np.nan)
                x = have[r]
                if layer.type == "relu":
                    out = np.maximum(x, 0.0)
                elif layer.type == "flatten":
                    out = x.reshape(len(x), -1)
                else:
                    own = self.outputs(i, r)
                    w = self.weights[layer.name][own]
                    out[block, own] = conv(x[block], w, layer.name == "a") if layer.type == "conv" else x[block] @ w.T
                after.append(out)
            have = after
        gradients = [2.0 * (out - labels) / self.samples for out in have]  # of a squared error: each output by itself
        sums = {name: np.zeros_like(w) for name, w in self.weights.items()}
        for i, layer in reversed(list(enumerate(layers))):
            after = []
            for r in range(self.n):
                block, x, g = self.block(r, layout.groups[i]), inputs[i][r], gradients[r]
                if layer.type == "relu":
                    after.append(np.where(np.isnan(x), np.nan, g * (x > 0)))
                elif layer.type == "flatten":
                    after.append(g.reshape(x.shape))
                else:
                    own, to_input = self.outputs(i, r), np.full(x.shape, np.nan)
                    w, g = self.weights[layer.name][own], g[block][:, own]
                    if layer.type == "conv":
                        to_input[block], to_weights = conv_back(x[block], w, int(layer.name == "a"), g)
                    else:
                        to_input[block], to_weights = g @ w, g.T @ x[block]
                    sums[layer.name][own] += to_weights
                    after.append(to_input)
            gradients = self.travel(i, after, back=True) if layout.exchanges(i) and layer.input_grad else after
        return sums


@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
def test_what_the_plan_moves_is_enough_for_the_gradients_of_one_worker(chain: Model, groups):
    """Ranks that start with their own samples, and get nothing but what the plan's collectives bring, end with the
    gradients of the whole batch on one worker."""
    n, rng = 6, np.random.default_rng(1)
    layout, workload = layout_of(chain, n, groups), workload_of(chain, 2)
    plan = hybrid([workload] * n, layout)
    shapes = {"a": (6, 3, 3, 3), "b": (8, 6, 3, 3), "c": (10, 128), "d": (7, 10)}
    weights = {name: rng.normal(size=shape) / shape[1] for name, shape in shapes.items()}
    inputs, labels = rng.normal(size=(12, 3, 6, 6)), rng.normal(size=(12, 7))
    ranks = Ranks(chain, layout, plan, weights, inputs)
    split = ranks.step(labels)
    single = Ranks(chain, layout_of(chain, 1, {}), plan, weights, inputs).step(labels)
    for name in weights:
        np.testing.assert_allclose(split[name], single[name], rtol=1e-9, atol=1e-12)
    rows = plan.rows(ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
    rows = rows[plan.rank[rows] == 0]
    assert ranks.moved == [(int(plan.kind[row]), float(plan.nbytes[row])) for row in rows]
