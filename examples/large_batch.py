"""Large batches: with the same batch per worker, 32 workers make 32 times fewer updates per epoch than one.

The model learns digits; message sizes and compute times are those of ResNet-50 on 32 V100 with 25 Gbit/s between nodes
of eight. All runs have the same number of epochs, and the table shows means of five seeds with 95 % intervals. With the
learning rate of one worker, 32 workers hardly learn. Linear scaling (Goyal et al. 2017) comes closest to the accuracy
of one worker, in a twentieth of the time. Warm-up is meant for the first epochs of deep networks; with this small
network, it makes no difference beyond the spread between seeds.
"""

import ddlsim

rate, workers, batch, seeds = 0.01, 32, 8, 5


def learn(n: int, schedule: float | ddlsim.WarmUp) -> ddlsim.Seeds:
    training = ddlsim.Training("digits", rate=schedule, epochs=8, sharding="shared", evaluate_every=10**6)
    experiment = ddlsim.Experiment(
        "cloud-25g-16x8-v100", "digits-cnn", ddlsim.AllReduce("hierarchical"), batch, n, training=training,
        time_model="resnet50",
    )  # fmt: skip
    return ddlsim.simulate_seeds(experiment, seeds, processes=1)


linear, root = ddlsim.linear_scaling(rate, workers), ddlsim.square_root_scaling(rate, workers)
print("workers  learning rate             updates  seconds  accuracy (95 % interval)")
for n, label, schedule in (
    (1, f"{rate:.2f}", rate),
    (workers, f"{rate:.2f} as for one", rate),
    (workers, f"{root:.2f} square root", root),
    (workers, f"{linear:.2f} linear", linear),
    (workers, f"{linear:.2f} linear, warm-up", ddlsim.WarmUp(ddlsim.Constant(linear), 3.0, start=rate)),
):
    runs = learn(n, schedule)
    end, accuracy = runs.runs[0].history[-1], runs.accuracy()
    print(
        f"{n:>7}  {label:<24}  {end.updates:7d}  {runs.runs[0].end_time:7.2f}  {accuracy.mean:8.1%}"
        f" ({accuracy.low:.1%} to {accuracy.high:.1%})"
    )
