"""DaSGD hides communication: delayed averaging against local SGD and synchronous SGD on 1 Gbit/s.

The all-reduce of the clock's model (ResNet-18) takes several steps on office links. Local SGD waits for it once a
period; DaSGD (Zhou et al. 2020) goes on and merges the average `delay` steps later, and when the all-reduce fits
into the delay a step takes no longer than its computation. The time to 95 % is the mean of five seeds, with its 95 %
interval; where a seed missed 95 %, the mean is a lower bound and the interval has no upper end. Strategies that average
models are not distinguishable from each other.
"""

import ddlsim

batch, compute = 32, ddlsim.Measured("400 ms", 32)
averaging = ddlsim.collective_time("office-1gbe", "ring", ddlsim.load_model("resnet18").n_params * 4.0)
print(f"all-reduce alone: {averaging * 1e3:.0f} ms, computation of a step: {compute.step_time * 1e3:.0f} ms\n")

training = ddlsim.Training("digits", rate=0.2, epochs=40, target_accuracy=0.95, evaluate_every=8)
print("strategy                   ms a step  exposed  consensus distance  seconds to 95 %")
for name, strategy in {
    "synchronous, no overlap": ddlsim.AllReduce("ring", overlap="none"),
    "synchronous, overlap": ddlsim.AllReduce("ring"),
    "local SGD, period 4": ddlsim.LocalSGD(period=4),
    "DaSGD, period 4, delay 1": ddlsim.DaSGD(period=4, delay=1),
    "DaSGD, period 4, delay 3": ddlsim.DaSGD(period=4, delay=3),
    "CoCoD, period 4": ddlsim.CoCoDSGD(period=4),
}.items():
    experiment = ddlsim.Experiment(
        "office-1gbe", "digits-cnn", strategy, batch, 8, training=training, time_model="resnet18", compute=compute
    )
    result, runs = ddlsim.simulate(experiment), ddlsim.simulate_seeds(experiment, 5, processes=1)
    last, reached = result.history.iloc[-1], runs.time_to_accuracy(0.95)
    print(
        f"{name:<25}  {result.step_time * 1e3:9.1f}  {result.shares['communication']:7.1%}  {last['consensus']:18.4f}"
        f"  {reached.mean:6.1f} ({reached.low:.1f} to {reached.high:.1f})"
    )
