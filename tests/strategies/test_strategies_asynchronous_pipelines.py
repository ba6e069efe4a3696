"""`Parallel` without a flush: PipeDream and PipeDream-2BW as runs, whose weights are as old as the rule says."""

import re

import numpy as np
import pytest
from draws import few, rows
from strategy_plans import plan_of

from ddlsim import AllReduce, ConfigError, Experiment, Measured, Momentum, Parallel, Training, simulate
from ddlsim.cluster import star
from ddlsim.data import DataSet
from ddlsim.plan.pipeline import stage_delays
from ddlsim.plan.plan import UPDATE
from ddlsim.run import run
from ddlsim.run.notes import delay_warnings
from ddlsim.run.prepare import prepare
from ddlsim.run.simulate import plan_of_run

INSTANT = star(8, bandwidth=1e15, latency=0.0)


@pytest.mark.parametrize(("strategy", "batch_size"), [
    (Parallel(pipeline=4, order="pipedream"), 32), (Parallel(pipeline=2, order="pipedream", overlap="layer"), 32),
    (Parallel(pipeline=4, order="2bw", micro_batch=8), 32), (Parallel(pipeline=2, order="2bw", recompute="stage"), 8),
    (Parallel(pipeline=1, order="pipedream", overlap="none"), 32),
])  # fmt: skip
def test_a_run_is_its_plan_again_and_again(strategy, batch_size):
    result = simulate("dgx1-v100", "resnet18", strategy, batch_size=batch_size, workers=4, steps=8, warmup=1)
    plan = result.plan
    plan.check()
    m = batch_size // strategy.micro_batch_size(batch_size, 4) // strategy.mesh(4).data
    longer = plan_of(strategy, result.workloads, 9, m)
    longer.check()
    run = longer.execute(result.cluster, nodes=result.cluster.workers[:4].tolist())
    times = np.diff([time for time, _ in result.recorder.updates], prepend=0.0)
    assert times[:8] == pytest.approx(run.step_times[:8], rel=1e-9)
    assert result.samples_per_update == batch_size


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_the_slowest_stage_works_all_the_time(micro_batch):
    """On an instant network, an update takes the micro-batches of the slowest stage, without a bubble."""
    p, batch_size = 4, 32
    for order, samples in (("2bw", micro_batch), ("pipedream", batch_size)):
        given = micro_batch if order == "2bw" else None
        result = simulate(INSTANT, "resnet18", Parallel(pipeline=p, micro_batch=given, order=order), workers=p,
                          batch_size=batch_size, steps=12, warmup=6, compute=Measured("80 ms", samples))  # fmt: skip
        stages = [stage.workload for stage in prepare(result.experiment).stages]
        slowest = max(stage.forward_time + stage.backward_time for stage in stages)
        assert result.step_time == pytest.approx(batch_size / samples * slowest, rel=1e-6)


@pytest.mark.parametrize("slow", few([0, 1, 2, 3], 1, start=1))
@pytest.mark.parametrize("strategy", [
    Parallel(pipeline=4, data=2, order="pipedream"), Parallel(pipeline=4, data=2, order="2bw", micro_batch=2),
])  # fmt: skip
def test_one_stage_that_is_late(strategy, slow):
    """Whichever stage computes or sums slowly, others run ahead no further than the slots for their steps."""
    speed = [0.1 if rank // 2 == slow else 1.0 for rank in range(8)]
    for cluster in (INSTANT, star(8, bandwidth=2e8, latency=1e-4)):
        result = simulate(cluster, "vgg16", strategy, workers=8, batch_size=16, steps=10, speed=speed)
        # in a plan that ends, the last messages would be alone on their links
        longer = plan_of(strategy, result.workloads, 16, 16 // 2 // (strategy.micro_batch or 8))
        run = longer.execute(cluster)
        times = np.diff([time for time, _ in result.recorder.updates], prepend=0.0)
        assert times[:10] == pytest.approx(run.step_times[:10], rel=1e-9)


def history_of(strategy, updates=14, workers=4, batch_size=32, **more):
    return simulate("lab-heterogeneous", "digits-cnn", strategy, workers=workers, batch_size=batch_size, seed=3,
                    training=Training("digits", updates=updates, evaluate_every=5, **more))  # fmt: skip


def by_hand(result, delays, n_replicas, momentum, rate):
    """Return the parameters after a run, by the rule: gradients of each stage's older weights, in NumPy."""
    task = prepare(result.experiment).task
    network, samples = task.network, result.experiment.batch_size // n_replicas
    updates = result.plan.rows(UPDATE)
    stage_of = {}  # layer -> stage
    for row in updates[result.plan.step[updates] == 0].tolist():
        for layer in range(result.plan.first[row], result.plan.end[row]):
            stage_of[layer] = int(result.plan.rank[row]) // n_replicas
    names = [layer.name for layer in network.model.layers]
    delay = np.empty(network.n_params, dtype=np.int64)
    for slot in network.slots:
        layer = next(i for i, name in enumerate(names) if slot.name.startswith(f"{name}."))
        delay[slot.start : slot.stop] = delays[stage_of[layer]]
    versions, velocity = [network.initial_params], np.zeros(network.n_params, np.float32)
    for step in range(len(result.recorder.updates)):
        met = np.choose(np.minimum(delay, step), [*reversed(versions)][: max(delays) + 1]) if step else versions[0]
        gradients = []
        for replica in range(n_replicas):
            indices = task.shards[replica].indices(step * samples, samples)
            gradients.append(network.loss_and_gradient(met, task.train.x[indices], task.train.labels[indices])[1])
        velocity = momentum * velocity + np.mean(gradients, axis=0)
        versions.append((versions[-1] - rate * velocity).astype(np.float32))
    return versions[-1]


@pytest.mark.parametrize(("strategy", "workers", "momentum"), rows([
    (Parallel(pipeline=4, order="pipedream"), 4, 0.0), (Parallel(pipeline=2, order="pipedream"), 4, 0.9),
    (Parallel(pipeline=3, order="pipedream"), 3, 0.5), (Parallel(pipeline=2, order="2bw", micro_batch=4), 4, 0.0),
    (Parallel(pipeline=4, order="2bw", micro_batch=2), 4, 0.9), (Parallel(pipeline=1, order="2bw"), 2, 0.0),
], 2))  # fmt: skip
def test_values_are_those_of_the_rule(strategy, workers, momentum):
    rate = 0.05
    data = workers // strategy.pipeline
    batch_size = 30 if strategy.pipeline == 3 else 32
    result = history_of(strategy, workers=workers, rate=rate, optimizer=Momentum(momentum), batch_size=batch_size)
    delays = stage_delays(strategy.order, strategy.pipeline)
    expected = by_hand(result, delays, data, momentum, rate)
    np.testing.assert_allclose(result.params, expected, rtol=0, atol=2e-6)
    # and another rule ends elsewhere
    if max(delays):
        other = by_hand(result, [0 for _ in delays], data, momentum, rate)
        assert np.abs(result.params - other).max() > 1e-4
    counted = {}
    for step in range(len(result.recorder.updates)):
        for delay in delays:
            counted[min(delay, step)] = counted.get(min(delay, step), 0) + data
    assert result.staleness_histogram == counted


def test_one_stage_is_synchronous():
    """Without other stages nothing is old: PipeDream on one stage is the all-reduce of its replicas, bit for bit."""
    split = history_of(Parallel(pipeline=1, order="pipedream"), workers=2)
    whole = history_of(AllReduce(), workers=2, batch_size=16)
    np.testing.assert_array_equal(split.params, whole.params)
    assert split.staleness_histogram == {0: 28}


@pytest.mark.parametrize("order", ["pipedream", "2bw"])
@pytest.mark.parametrize("p", few([2, 3, 4], 1, start=1))
def test_a_quadratic_is_stable_up_to_the_bound_of_the_delay(order, p, tmp_path):
    """L w^2 / 2 with gradients of w tau updates ago: stable where eta L < 2 sin(pi / (2 (2 tau + 1))).

    One weight and one bias on the first of p stages, inputs of 1, squared error: their sum has L = 4.
    """
    tau = p - 1 if order == "pipedream" else 1
    path = tmp_path / "line.toml"
    more = "".join('  { type = "flatten" },\n' for _ in range(p - 1))
    path.write_text(f'title = "a line"\nsources = ["by hand"]\ntrainable = true\ninput = [1]\n'
                    f'layers = [\n  {{ type = "dense", units = 1 }},\n{more}]\n')  # fmt: skip
    data = DataSet("ones", np.ones((16, 1), np.float32), np.zeros(16, np.int64), ("one",))
    bound = 2.0 * np.sin(np.pi / (2 * (2 * tau + 1))) / 4.0
    losses = {}
    for share in (0.9, 1.1):
        strategy = Parallel(pipeline=p, order=order)
        training = Training(data, held_out=data, rate=share * bound, loss="mean_squared_error", updates=240,
                            evaluate_every=80)  # fmt: skip
        result = simulate("office-1gbe", str(path), strategy, workers=p, batch_size=8, training=training)
        losses[share] = result.history["loss"].tolist()
    assert losses[0.9][-1] < 0.1 * losses[0.9][1]
    assert losses[1.1][-1] > 10 * losses[1.1][1]


@pytest.mark.slow
def test_it_learns():
    result = simulate(
        "office-1gbe", "cifar-cnn", Parallel(pipeline=4, data=2, order="pipedream"),
        training=Training("shapes", updates=60, rate=0.02, evaluate_every=30),
    )  # fmt: skip
    losses = result.history["loss"].tolist()
    assert losses[-1] < 0.8 * losses[0]
    assert result.mean_staleness == pytest.approx(np.mean([min(d, u) for u in range(60) for d in (3, 2, 1, 0)]))
    assert "staleness" in str(result)


def test_another_model_for_the_clock():
    """Stages of the model that learns have the same shares of its layers as those of the one that takes the time."""
    result = simulate("office-1gbe", "digits-cnn", Parallel(pipeline=2, order="2bw"), workers=2, batch_size=8,
                      time_model="resnet18", training=Training("digits", updates=4))  # fmt: skip
    assert result.staleness_histogram == {0: 2, 1: 6}


def test_memory_has_all_versions():
    """Stage i of p keeps p - i versions of its weights, with 2BW every stage two."""
    whole = simulate("dgx1-v100", "resnet18", Parallel(pipeline=4), batch_size=32, workers=4, steps=1, warmup=0)
    for order, versions in (("1f1b", (1, 1, 1, 1)), ("pipedream", (4, 3, 2, 1)), ("2bw", (2, 2, 2, 2))):
        strategy = Parallel(pipeline=4, order=order)
        for rank, n in enumerate(versions):
            memory = strategy.stages(whole.workloads[:1] * 4)[rank].memory
            plain = Parallel(pipeline=4).stages(whole.workloads[:1] * 4)[rank].memory
            assert memory.weights == n * plain.weights
            assert (memory.gradients, memory.optimizer) == (plain.gradients, plain.optimizer)


@pytest.mark.parametrize(("strategy", "more", "text"), [
    ({"order": "pipedream", "micro_batch": 2}, {}, "micro_batch = 2 cannot be combined with batch_size = "),
    ({"order": "2bw", "micro_batch": 16}, {},
     "batch_size = 32: must be at least 64 (data 2 x micro_batch 16 x pipeline 2), because '2bw' needs"),
    ({"order": "pipedreams"}, {}, "unknown pipeline order 'pipedreams'; did you mean 'pipedream'"),
    ({"order": "pipedream", "interleave": 2}, {}, "interleave = 2 has no effect with order = 'pipedream'"),
    ({"order": "2bw", "sharded": True}, {}, "sharded = True needs a synchronous order"),
])  # fmt: skip
def test_what_does_not_fit(strategy, more, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate("dgx1-v100", "resnet18", Parallel(pipeline=2, **strategy), batch_size=32, workers=4, **more)


def test_it_is_written_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('cluster = "dgx1-v100"\nmodel = "resnet18"\nbatch_size = 64\nsteps = 2\nwarmup = 0\n'
                    '[strategy]\ntype = "parallel"\npipeline = 4\norder = "pipedream"\n')  # fmt: skip
    from ddlsim.run.files import load_experiment

    experiment = load_experiment(path)
    assert experiment.strategy == Parallel(pipeline=4, order="pipedream")
    assert isinstance(experiment, Experiment)
    assert run(experiment).staleness_histogram[0] > 0


@pytest.mark.parametrize("delay", [1, 3, 7])
def test_the_rate_that_a_delay_allows(delay):
    """w <- w - rate * w of `delay` updates before: stable below 2 sin(pi / (4 d + 2)), which the warning says of 2."""
    limit = 2.0 * np.sin(np.pi / (4 * delay + 2))
    for rate, stable in ((0.98 * limit, True), (1.02 * limit, False)):
        w = [1.0] * (delay + 1)
        for _ in range(4000):
            w.append(w[-1] - rate * w[-1 - delay])
        assert (max(np.abs(w[-50:])) < 1e-3) == stable
    (text,) = delay_warnings(Training("digits", rate=2.0), [0, delay, 1], "diverged: the loss is nan")
    assert f"the rate ({limit:.2g})" in text
    assert not list(delay_warnings(Training("digits"), [0, delay], "target loss"))
    assert not list(delay_warnings(Training("digits"), [0], "diverged: the loss is nan"))


def test_who_diverges_by_the_delay_hears_of_it():
    result = simulate("office-1gbe", "digits-cnn", Parallel(pipeline=4, order="pipedream"), 16, 4,
                      training=Training("digits", rate=1e12, updates=12, evaluate_every=12))  # fmt: skip
    assert any("gradients were up to 3 updates old" in each and "\n" not in each for each in result.warnings)


@pytest.mark.parametrize(("strategy", "workers", "batch_size"), [
    (Parallel(pipeline=4, order="pipedream"), 4, 32), (Parallel(pipeline=3, order="pipedream"), 6, 36),
    (Parallel(pipeline=2, order="2bw", micro_batch=4), 4, 64),
])  # fmt: skip
def test_a_plan_with_a_step_more_for_each_stage_ends_as_the_run(strategy, workers, batch_size):
    """Its k-th step ends at the same instant to the last bit; with one step more that of PipeDream ends too early."""
    result = simulate("office-1gbe", "vgg16", strategy, batch_size=batch_size, workers=workers, steps=3, warmup=0)
    ends = [
        float(plan_of_run(result.experiment, 3 + more).execute("office-1gbe", "ring")
              .step_ends[:, 2].max()) for more in (1, strategy.pipeline, strategy.pipeline + 3)
    ]  # fmt: skip
    assert ends[1] == ends[2] == result.end_time
    assert (ends[0] < result.end_time) == (strategy.order == "pipedream")
