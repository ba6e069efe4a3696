"""DaSGD hides communication: delayed averaging compared with local SGD and synchronous SGD on 1 Gbit/s.

On office links, an all-reduce of ResNet-18, which determines the simulated times, takes several steps. Local SGD waits
for it once per period. DaSGD (Zhou et al. 2020) continues and merges the average `delay` steps later. If the all-reduce
takes no longer than the delay, a step takes no longer than its computation. The time to 95 % is the mean of five seeds,
with its 95 % interval. If a seed missed 95 %, the mean is a lower bound, and the interval has no upper end. The
differences between the strategies that average models are not significant.
"""

import ddlsim

batch, compute = 32, ddlsim.Measured("400 ms", 32)
averaging = ddlsim.collective_time("office-1gbe", "ring", ddlsim.load_model("resnet18").n_params * 4.0)
print(f"one all-reduce: {averaging * 1e3:.0f} ms, computation of a step: {compute.step_time * 1e3:.0f} ms\n")

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
