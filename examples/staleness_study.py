"""The staleness study of Zhang, Gupta, Lian and Liu (2016) in small: 30 workers, n-softsync, batch 4.

With n = 1 the server averages 30 gradients before it updates, with n = 30 it applies each at once. Mean staleness is
about n. A constant learning rate that is right for n = 1 diverges for larger n; divided by each gradient's staleness
it learns for every n. The rate matters: at 0.1 the same holds, from 0.2 on the scaled runs learn badly, too.
"""

import ddlsim
from ddlsim.cluster.generators import star

workers, rate = 30, 0.05
cluster = ddlsim.load_cluster(star(workers + 1, bandwidth="10 Gbit/s", latency="20 us"))

print("n   learning rate      staleness (mean, most)  updates  loss    accuracy")
for n in (1, 15, 30):
    for label, scaling in (("alpha0", None), ("alpha0 / staleness", "inverse")):
        result = ddlsim.simulate(
            cluster, "digits-cnn", ddlsim.SoftSync(n, staleness_scaling=scaling), 4, workers,
            training=ddlsim.Training("digits", rate=rate, epochs=12, evaluate_every=10**6),
            compute=ddlsim.Measured("10 ms", 4), jitter=ddlsim.Lognormal(0.05), seed=3,
        )  # fmt: skip
        last = result.history.iloc[-1]
        print(
            f"{n:<3} {label:<19} {result.mean_staleness:8.2f} {max(result.staleness_histogram):5d}"
            f"          {last['updates']:7.0f}  {last['loss']:6.3f}  {last['accuracy']:8.1%}"
        )
