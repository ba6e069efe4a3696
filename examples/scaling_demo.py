"""How does ResNet-50 scale from 1 to 128 GPUs on a cloud cluster with 25 Gbit/s Ethernet?

Prints the scaling table and the bottleneck, and writes scaling.png, timeline.png, cluster.png and trace.json to
the folder given as argument (default: out).
"""

import sys
from pathlib import Path

import ddlsim
from ddlsim.report.plots import scaling
from ddlsim.report.summary import scaling_table

out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
out.mkdir(exist_ok=True)

experiment = ddlsim.Experiment(
    cluster="cloud-25g-16x8-v100", model="resnet50", strategy=ddlsim.AllReduce("ring"), batch_size=64
)
workers = [1, 8, 16, 32, 64, 128]
results = ddlsim.scaling(experiment, workers)
no_overlap = ddlsim.scaling(experiment.with_(strategy=ddlsim.AllReduce("ring", overlap="none")), workers)

print("ResNet-50 on 16 x 8 V100, 25 Gbit/s: PyTorch-DDP buckets, ring all-reduce\n")
print(scaling_table(results))
print("\nWithout overlap of communication and backward pass\n")
print(scaling_table(no_overlap))
print("\nThe largest run in detail\n")
results[-1].sensitivities()  # simulates 10 % better parts, for the summary
print(results[-1])

scaling({"overlapped (DDP buckets)": results, "no overlap": no_overlap}, out / "scaling.png")
results[-1].plot_timeline(out / "timeline.png")
results[-1].plot_cluster(out / "cluster.png")
results[-1].save_trace(out / "trace.json")
print(f"\nPictures: {out}/scaling.png, {out}/timeline.png, {out}/cluster.png")
print(f"Timeline for ui.perfetto.dev (open, or drag the file in): {out}/trace.json")
