"""How often should 1,024 GPUs save a checkpoint, and is a spare machine worth its rental cost?

A transformer with 76 billion parameters is trained on 128 machines of 8 A100. A GPU fails every 50,000 h on average, so
the job fails about every two days. The storage receives 25 GB/s from all machines together.
"""

import ddlsim
from ddlsim import Checkpoints, Experiment, Failures

HOSTS = 128
experiment = Experiment(
    f"dgx-a100-pod+hosts_per_leaf={HOSTS}", "megatron-76.1b", ddlsim.Parallel(tensor=8, pipeline=4, sharded=True),
    batch_size=1792, workers=8 * HOSTS, precision="bf16", optimizer="adam", steps=3, warmup=1,
    failures=Failures("50000 h", repair="4 h", restart="5 min"),
    checkpoints=Checkpoints("1 h", bandwidth="25 GB/s"),
)  # fmt: skip

print(ddlsim.best_checkpoint_interval(experiment))

print("\neffective share of a month, by number of spare machines\n")
for spares in (0, 1, 2, 4):
    failures = Failures("50000 h", repair="4 h", restart="5 min", spares=spares)
    timelines = ddlsim.simulate(experiment.with_(failures=failures)).timelines(200)
    effective = sum(timeline.effective for timeline in timelines) / len(timelines)
    paid = effective * HOSTS / (HOSTS + spares)
    print(f"{spares} spares: {effective:.1%} effective, {paid:.1%} of the paid machine time")
