"""Das et al. 2016 (arXiv:1602.06709): synchronous SGD on clusters of Xeons, layer by layer data or model parallel.

The abstract's speed-ups over one node, beside what "balance" reaches here and what data parallelism alone would. Nodes
compute by the roofline of their datasheet; a node that has 4 samples only computes at the rate at which two Xeon Gold
6148 do (PaddlePaddle 0.11, benchmark/IntelOptimizedPaddle.md, inference: 82.6 of 96.8 images/s of VGG-19 and 719 of
851 of AlexNet, at batch 4 and 16).
"""

import ddlsim

CORI = "cori-haswell+n_groups=1+n_hosts=128"
#: cluster, model, batch (of the last two not stated), nodes, rate with so few samples, published speed-up
RUNS = [
    (CORI, "vgg-a", 256, 64, 82.58 / 96.75, 53.0),
    (CORI, "vgg-a", 512, 128, 82.58 / 96.75, 90.0),
    (CORI, "overfeat-fast", 256, 64, 719.10 / 850.51, 42.0),
    ("aws-10g-16", "vgg-a", 256, 16, 1.0, 14.0),
    ("endeavor-16", "speech-dnn", 1024, 16, 1.0, 6.5),
]

print("model          nodes  batch  published  hybrid  data parallel  split layers")
for cluster, model, batch, nodes, rate, published in RUNS:
    one = ddlsim.simulate(cluster, model, ddlsim.AllReduce(), batch_size=batch, workers=1, steps=2)
    hybrid, data = (
        ddlsim.simulate(cluster, model, ddlsim.Hybrid(groups), batch_size=batch, workers=nodes, speed=[rate] * nodes,
                        steps=2, warmup=1)
        for groups in ("balance", {})
    )  # fmt: skip
    layout = ddlsim.Hybrid().layout(hybrid.workloads[0], nodes)
    sizes = sorted({layout.groups[i] for i in layout.split})
    print(f"{model:<13}  {nodes:5}  {batch:5}  {published:9.1f}  {hybrid.throughput / one.throughput:6.1f}"
          f"  {data.throughput / one.throughput:13.1f}"
          f"  {len(layout.split)}, in groups: {', '.join(map(str, sizes))}")  # fmt: skip
print("""
Why they differ: with 128 nodes the slowest one of each step counts, and other jobs use Cori's network; here all nodes
are alike and alone. The speech network's minibatch is not stated: 512 to 2,048 give 12 to 14, 256 gives 10, so its
nodes lose time that is neither computing nor exchange here. What the AWS cluster ran, its batch and its machines are
assumptions. "balance" counts bytes, also those that computing hides: it splits some convolutions for that.""")
