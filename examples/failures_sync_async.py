"""Which strategy reaches a target accuracy first when machines fail: restarting, an elastic group, or asynchronous SGD?

Eight workers learn digits. A step computes for 2 s, and a failed machine is out of service for 80 s. Restarting from a
checkpoint, an elastic group and an asynchronous server experience the same failures.
"""

import ddlsim
from ddlsim import AllReduce, AsyncParameterServer, Checkpoints, Elastic, Experiment, Failures, Training
from ddlsim.cluster import star

TARGET = 0.95
cluster = ddlsim.load_cluster(star(9, bandwidth="1 Gbit/s", latency="50 us"))
base = Experiment(
    cluster, "digits-cnn", workers=8, batch_size=16, compute=ddlsim.Affine("2 s", 0.0), jitter=ddlsim.Lognormal(0.1),
    training=Training("digits", rate=0.15, target_accuracy=TARGET, epochs=60, evaluate_every=10), max_time="3 h",
)  # fmt: skip
strategies = {
    "restart from a checkpoint": base.with_(strategy=AllReduce(), checkpoints=Checkpoints("1 min", stall="1 s")),
    "elastic": base.with_(strategy=AllReduce(), elastic=Elastic(min_workers=2, rejoin="10 s", rate="linear")),
    "asynchronous server": base.with_(
        strategy=AsyncParameterServer(),
        training=Training("digits", rate=0.03, target_accuracy=TARGET, epochs=60, evaluate_every=80),
    ),
}

print(f"time to {TARGET:.0%} held-out accuracy: mean of 5 seeds (95 % interval), by MTBF of a machine\n")
print(f"{'MTBF':>10}" + "".join(f"{name:>28}" for name in strategies))
for mtbf in ("never", "30 min", "10 min"):
    cells = []
    for experiment in strategies.values():
        if mtbf == "never":
            one = experiment.with_(checkpoints=None, elastic=None)
        else:
            one = experiment.with_(failures=Failures(mtbf, per="host", repair="1 min", restart="20 s"))
        cells.append(ddlsim.simulate_seeds(one, 5, processes=1).time_to_accuracy(TARGET))
    texts = (f"{each.mean:.0f} s ({each.low:.0f} to {each.high:.0f})" for each in cells)
    print(f"{mtbf:>10}" + "".join(f"{text:>28}" for text in texts))
