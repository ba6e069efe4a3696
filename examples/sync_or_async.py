"""With stragglers: synchronous, asynchronous, or waiting for the first 6 of 8?

Eight machines learn digits to 80 %. Gradients have the size of ResNet-18's, and a step takes 0.4 s, multiplied by
1 + x, where x is exponentially distributed with mean 0.3. One machine has a third of the others' speed. For a fair
comparison, each strategy uses its own best learning rate: the best of three with seed 0, a factor of two apart. It then
runs with four other seeds, the same for all strategies. The seeds differ so much (see the intervals) that only ratios
for the same seed distinguish the strategies.
"""

from pathlib import Path

import ddlsim

SYNCHRONOUS, PARTLY, ASYNCHRONOUS = "synchronous", "first 6 of 8", "asynchronous"
STRATEGIES = {
    SYNCHRONOUS: ddlsim.AllReduce("ring"),
    PARTLY: ddlsim.KSync(6, servers=2, placement="colocated"),
    ASYNCHRONOUS: ddlsim.AsyncParameterServer(2, "colocated"),
}
RATES = {  # eight asynchronous updates correspond to about one synchronous update, so rates are about an eighth
    SYNCHRONOUS: [0.2, 0.4, 0.8],
    PARTLY: [0.2, 0.4, 0.8],
    ASYNCHRONOUS: [0.025, 0.05, 0.1],
}


def main() -> None:
    training = ddlsim.Training("digits", epochs=7, target_accuracy=0.8, moving_average=2, evaluate_every="4 s")
    base = ddlsim.Experiment(
        "aws-p3-2xlarge", "digits-cnn", batch_size=16, training=training, time_model="resnet18",
        compute=ddlsim.Measured("400 ms", 16), jitter=ddlsim.ShiftedExponential(0.3), speed=(1 / 3, *[1.0] * 7),
    )  # fmt: skip
    best = []
    for name, strategy in STRATEGIES.items():
        tuning = ddlsim.Study(base.with_(strategy=strategy), vary={"training.rate": RATES[name]}, seeds=1)
        best.append(tuning.run(jobs=1).best("time_to_accuracy").iloc[0]["training.rate"])
    study = ddlsim.Study(base, vary={"strategy": STRATEGIES, "training.rate": best}, design="list", seeds=[1, 2, 3, 4])
    table = study.run(jobs=1)  # takes a few seconds, so starting more processes would not pay

    print("strategy       rate  images/s  waiting  staleness  s to 80 % (95 % interval)  USD")
    for _, row in table.summary.iterrows():
        low, high = row["time_to_accuracy_low"], row["time_to_accuracy_high"]
        print(
            f"{row['strategy']:<12}  {row['training.rate']:5.3g}  {row['throughput']:8.0f}  {row['waiting_share']:7.1%}"
            f"  {row['mean_staleness']:9.1f}  {row['time_to_accuracy']:9.1f} ({low:5.1f} to {high:5.1f})"
            f"  {row['cost_to_accuracy']:7.3f}"
        )
    print()
    times = table.frame.pivot(index="seed", columns="strategy", values="time_to_accuracy")
    for name in (PARTLY, ASYNCHRONOUS):
        ratio = times[name] / times[SYNCHRONOUS]
        print(
            f"{name:<12}  takes {ratio.mean():.0%} of the synchronous time ({ratio.min():.0%} to {ratio.max():.0%}), "
            f"and is first with {(ratio < 1.0).sum()} of {len(ratio)} seeds"
        )

    out = Path("out")
    out.mkdir(exist_ok=True)
    study.plot_lines("strategy", out / "sync_or_async.png", metric="time_to_accuracy")


if __name__ == "__main__":
    main()
