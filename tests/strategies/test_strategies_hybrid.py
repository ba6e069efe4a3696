"""Das et al.'s hybrids as a run: what they learn, hold and refuse."""

import numpy as np
import pytest
from draws import few

from ddlsim import AllReduce, ConfigError, Hybrid, Training, load_experiment, load_model, simulate
from ddlsim.plan.hybrid import kept_nbytes
from ddlsim.run import run


def learned(strategy, batch_size):
    result = simulate("lab-heterogeneous", "digits-cnn", strategy, workers=4, batch_size=batch_size, seed=3,
                      training=Training("digits", epochs=2))  # fmt: skip
    return result.params, result.history["accuracy"].tolist()


@pytest.mark.parametrize("groups", few(["balance", {"fc": 1}, {"conv1": 2, "conv2": 1, "fc": 2}], 1, start=2), ids=str)
def test_it_learns_what_data_parallelism_learns(groups):
    """Bit for bit, whoever computes the outputs."""
    names = [layer.name for layer in load_model("digits-cnn").layers if layer.n_params]
    if not isinstance(groups, str):
        groups = dict(zip(names[-len(groups) :], groups.values(), strict=True))
    params, accuracy = learned(Hybrid(groups), 64)
    expected, same = learned(AllReduce(), 16)
    np.testing.assert_array_equal(params, expected)
    assert accuracy == same
    assert accuracy[-1] > 0.5


def test_without_groups_it_takes_as_long_as_data_parallelism():
    hybrid = simulate("aws-10g-16", "vgg-a", Hybrid({}), batch_size=256, steps=3)
    data = simulate("aws-10g-16", "vgg-a", AllReduce(overlap="layer"), batch_size=16, steps=3)
    assert hybrid.step_time == pytest.approx(data.step_time, rel=1e-12)
    assert hybrid.throughput == pytest.approx(data.throughput, rel=1e-12)


def test_vgg_on_aws():
    """Splitting the dense layers makes 10 Gbit/s enough: the paper's point."""
    result = simulate("aws-10g-16", "vgg-a", Hybrid("balance"), batch_size=256, steps=3)
    data = simulate("aws-10g-16", "vgg-a", Hybrid({}), batch_size=256, steps=3)
    assert result.throughput > 1.5 * data.throughput
    assert result.notes == ("number of groups by layer: fc6 1, fc7 1, fc8 2; all other layers are data parallel",)
    assert result.samples_per_update == 256


def test_both_speed_ups_are_named():
    """Das et al. compare to a node with the whole batch of 256, `speedup` to a worker with the 16 samples of a replica,
    which updates 16 times as often."""
    many = simulate("aws-10g-16", "vgg-a", Hybrid("balance"), batch_size=256, steps=3)
    one = simulate("aws-10g-16", "vgg-a", AllReduce(), batch_size=256, workers=1, steps=3)
    assert many.samples_alone == 16
    assert many.speedup == pytest.approx(15.2, abs=0.05)
    assert many.whole_batch_speedup == pytest.approx(14.6, abs=0.05)
    assert many.whole_batch_speedup == pytest.approx(many.throughput / one.throughput, rel=1e-4)
    text = "15.2 over one worker with a batch of 16, 14.56 over one with a batch of 256, efficiency 95.0 %"
    assert text in str(many)
    assert "over one worker, efficiency" in str(one)


def test_memory_is_that_of_the_parts():
    workload = simulate("aws-10g-16", "vgg-a", Hybrid({}), batch_size=256, steps=1, warmup=0).workloads[0]
    model = workload.model
    dense = sum(layer.n_params for layer in model.layers if layer.name in ("fc6", "fc7"))
    whole, split = (Hybrid(groups).stage(workload, 0, 16).memory for groups in ({}, {"fc6": 1, "fc7": 2}))
    share = {"fc6": 16, "fc7": 8}
    held = sum(layer.n_params / share.get(layer.name, 1) for layer in model.layers)
    assert (whole.weights, split.weights) == (4 * model.n_params, 4 * held)
    assert model.n_params - held > 0.9 * dense
    gathered = 16 * 4 * (15 * 25088 + 7 * 4096)  # samples of other workers
    # fc8 is data parallel again, and gathers nothing
    assert split.activations - whole.activations == gathered
    layout = Hybrid({"fc6": 1, "fc7": 2}).layout(workload, 16)
    assert kept_nbytes(workload, layout).sum() == pytest.approx(split.activations)


@pytest.mark.parametrize(
    ("groups", "batch_size", "text"),
    [
        ({"fc6": 3}, 256, r"groups\['fc6'\] = 3: must divide the number of workers, 16; use 1, 2, 4"),
        ({"fc66": 4}, 256, r"groups of vgg-a: unknown layer 'fc66'.*did you mean 'fc6'"),
        ({"fc6": 0}, 256, r"groups\['fc6'\] = 0: must be a positive integer"),
        ("balanced", 256, "groups = 'balanced': must be"),
        ({}, 100, r"batch_size = 100: must be a multiple of 16 \(16 workers\) with Hybrid; use 96 or 112"),
    ],
)
def test_what_does_not_match_is_said(groups, batch_size, text):
    with pytest.raises(ConfigError, match=text) as error:
        simulate("aws-10g-16", "vgg-a", Hybrid(groups), batch_size=batch_size, steps=1)
    assert "\n" not in str(error.value)


def test_layers_in_branches_and_narrow_layers_are_not_split():
    name = next(layer.name for layer in load_model("resnet50").layers if "conv" in layer.name[3:])
    with pytest.raises(ConfigError, match="only dense layers and convolutions outside of branches can"):
        simulate("aws-10g-16", "resnet50", Hybrid({name: 1}), batch_size=256)
    with pytest.raises(ConfigError, match=r"groups\['fc'\] = 1: 16 workers cannot share 10 outputs; use 2, 4, 8"):
        simulate("aws-10g-16", "resnet18-cifar", Hybrid({"fc": 1}), batch_size=256)
    with pytest.raises(
        ConfigError, match="accumulation = 2: has no effect with Hybrid, whose batch_size is already the global"
    ):
        simulate("aws-10g-16", "vgg-a", Hybrid(), batch_size=256, accumulation=2)


def test_a_layer_in_branches_stays_data_parallel():
    result = simulate("aws-10g-16", "resnet50", Hybrid({"fc": 1}), batch_size=256, steps=2)
    result.plan.check()
    assert np.isfinite(result.step_time)


def test_it_is_written_in_a_file(tmp_path):
    path = tmp_path / "das.toml"
    path.write_text("""
cluster = "aws-10g-16"
model = "vgg-a"
batch_size = 256
steps = 3
[strategy]
type = "hybrid"
groups = { fc6 = 1, fc7 = 2 }
overlap = "none"
""")
    written = run(load_experiment(path))
    said = simulate("aws-10g-16", "vgg-a", Hybrid({"fc6": 1, "fc7": 2}, overlap="none"), batch_size=256, steps=3)
    np.testing.assert_array_equal(written.step_times, said.step_times)
