"""How much do stragglers slow down a synchronous run, and does an asynchronous server help?

The compute time of every step is multiplied by 1 + x, where x is exponentially distributed with mean 0.3. In the third
case, one machine is also three times slower for ten seconds.
"""

import ddlsim
from ddlsim.workload import order_statistics

base = ddlsim.Experiment("aws-p3-2xlarge", "resnet50", batch_size=64, steps=200, warmup=5, seed=1)
jitter = ddlsim.ShiftedExponential(mean_extra=0.3)
slow = ddlsim.Slowdown(ranks=3, start="10 s", duration="10 s", factor=3.0)

expected = order_statistics.shifted_exponential(8, shift=1.0, mean_extra=0.3)
print(f"expected maximum of 8 factors: {expected:.3f}, mean factor {jitter.mean:.3f}")
for label, changes in (
    ("no variability", {}),
    ("jitter", {"jitter": jitter}),
    ("jitter, one slow-down", {"jitter": jitter, "slowdowns": (slow,)}),
):
    sync = ddlsim.simulate(base.with_(**changes))
    free = ddlsim.simulate(base.with_(strategy=ddlsim.AsyncParameterServer(8, "colocated"), **changes))
    print(
        f"{label:<22} all-reduce {sync.throughput:7.1f} images/s (waiting {sync.shares['waiting']:5.1%})   "
        f"asynchronous server {free.throughput:7.1f} images/s (staleness {free.mean_staleness:.2f})"
    )
