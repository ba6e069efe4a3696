"""Large batches: 32 workers make 32 times fewer updates in an epoch, so each must be larger.

The digits are learned, the clock is that of ResNet-50 on 32 V100 with 25 Gbit/s between nodes of eight. The number
of epochs is the same for all. With the learning rate of one worker, 32 hardly learn; linear scaling after a warm-up
(Goyal et al. 2017) comes closest to one worker, in a twentieth of the time.
"""

import ddlsim

rate, workers, batch = 0.01, 32, 8


def learn(n: int, schedule: float | ddlsim.WarmUp) -> ddlsim.Result:
    training = ddlsim.Training("digits", rate=schedule, epochs=12, sharding="shared", evaluate_every=10**6)
    return ddlsim.simulate(
        "cloud-25g-16x8-v100", "digits-cnn", ddlsim.AllReduce("hierarchical"), batch, n, training=training,
        time_model="resnet50",
    )  # fmt: skip


linear, root = ddlsim.linear_scaling(rate, workers), ddlsim.square_root_scaling(rate, workers)
print("workers  learning rate             updates  seconds  loss    accuracy")
for n, label, schedule in (
    (1, f"{rate:.2f}", rate),
    (workers, f"{rate:.2f} as for one", rate),
    (workers, f"{root:.2f} square root", root),
    (workers, f"{linear:.2f} linear", linear),
    (workers, f"{linear:.2f} linear, warm-up", ddlsim.WarmUp(ddlsim.Constant(linear), 4.0, start=rate)),
):
    result = learn(n, schedule)
    last = result.history.iloc[-1]
    print(
        f"{n:>7}  {label:<24}  {last['updates']:7.0f}  {result.end_time:7.2f}  {last['loss']:6.3f}"
        f"  {last['accuracy']:8.1%}"
    )
