"""The staleness study of Zhang, Gupta, Lian and Liu (2016), scaled down: 30 workers, n-softsync, batch 4, five seeds.

With n = 1, the server averages 30 gradients before each update; with n = 30, it applies each gradient at once. The mean
staleness is about n. A constant learning rate that suits n = 1 diverges for larger n, with every seed. If the rate is
divided by each gradient's staleness, the model learns for every n. The result depends on the rate: at half of this one,
the constant rate diverges only with some seeds, which a single seed would not show.
"""

import ddlsim
from ddlsim.cluster.generators import star

workers, rate, seeds = 30, 0.1, 5
cluster = ddlsim.load_cluster(star(workers + 1, bandwidth="10 Gbit/s", latency="20 us"))

print("n   learning rate       staleness  updates  accuracy: mean (95 % interval), worst and best seed")
for n in (1, 15, 30):
    for label, scaling in (("alpha0", None), ("alpha0 / staleness", "inverse")):
        experiment = ddlsim.Experiment(
            cluster, "digits-cnn", ddlsim.SoftSync(n, staleness_scaling=scaling), 4, workers,
            training=ddlsim.Training("digits", rate=rate, epochs=12, evaluate_every=10**6),
            compute=ddlsim.Measured("10 ms", 4), jitter=ddlsim.Lognormal(0.05),
        )  # fmt: skip
        runs = ddlsim.simulate_seeds(experiment, seeds, processes=1)
        ends = [run.history[-1] for run in runs.runs]
        accuracy, staleness = runs.accuracy(), sum(run.mean_staleness for run in runs.runs) / seeds
        reached = sorted(row.accuracy for row in ends)
        print(
            f"{n:<3} {label:<19} {staleness:9.2f} {ends[0].updates:8d}  {accuracy.mean:6.1%} ({accuracy.low:.1%} to "
            f"{accuracy.high:.1%}), {reached[0]:.1%} and {reached[-1]:.1%}"
        )
