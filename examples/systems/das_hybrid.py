"""Das et al. 2016 (arXiv:1602.06709): synchronous SGD on clusters of Xeons, with data or model parallelism per layer.

Compares the speed-ups over one node in the paper's abstract with those of "balance" and of data parallelism alone. The
compute times of nodes come from the roofline of their datasheet. A node with only 4 samples computes at the rate of two
Xeon Gold 6148 (PaddlePaddle 0.11, benchmark/IntelOptimizedPaddle.md, inference: 82.6 of 96.8 images/s of VGG-19 and 719
of 851 of AlexNet, at batch sizes 4 and 16).
"""

import ddlsim

CORI = "cori-haswell+n_groups=1+n_hosts=128"
#: cluster, model, batch (unknown for the last two), nodes, relative rate with few samples, published speed-up
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
Why they differ: with 128 nodes, the slowest node determines the time of each step, and other jobs use Cori's
network. In the simulation, all nodes are equally fast, and there are no other jobs. The batch size of the speech
network is unknown: with 512 to 2,048 samples, the simulated speed-up is 12 to 14, and with 256 it is 10, so its
nodes lose time that the simulation does not model. The model, batch size and machines of the AWS cluster are
assumptions. "balance" counts all bytes, also those that computation hides, so it splits some convolutions.""")
