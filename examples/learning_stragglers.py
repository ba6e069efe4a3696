"""Which reaches 90 % first on a straggling cluster: synchronous, asynchronous or local SGD?

Sixteen workers learn the digits; the clock is that of ResNet-50 behind one 10 Gbit/s switch. A step takes 1 + an
exponential of mean 0.3 times its nominal time, and two machines are half as fast as the others. Parameter servers
are shards on the workers' machines.
"""

import ddlsim

speed = (0.5, 0.5, *[1.0] * 14)
training = ddlsim.Training("digits", rate=0.1, epochs=20, target_accuracy=0.9, moving_average=3, evaluate_every="1 s")
strategies = {
    "all-reduce": ddlsim.AllReduce("ring"),
    "backup workers (14 of 16)": ddlsim.BackupWorkers(2, servers=16, placement="colocated"),
    "asynchronous": ddlsim.AsyncParameterServer(16, "colocated"),
    "asynchronous, / staleness": ddlsim.AsyncParameterServer(16, "colocated", staleness_scaling="inverse"),
    "local SGD, period 4": ddlsim.LocalSGD(period=4),
    "DaSGD, period 4, delay 2": ddlsim.DaSGD(period=4, delay=2),
}

print("strategy                    images/s  waiting  staleness  epochs  seconds to 90 %  GB sent")
for name, strategy in strategies.items():
    result = ddlsim.simulate(
        "two-racks-oversubscribed", "digits-cnn", strategy, 8, 16, training=training, time_model="resnet50",
        jitter=ddlsim.ShiftedExponential(mean_extra=0.3), speed=speed, seed=2,
    )  # fmt: skip
    last = result.history.iloc[-1]
    print(
        f"{name:<26}  {result.throughput:8.0f}  {result.shares['waiting']:7.1%}  {result.mean_staleness:9.2f}"
        f"  {last['epoch']:6.2f}  {result.time_to_accuracy(0.9):15.2f}  {last['nbytes'] / 1e9:7.1f}"
    )
