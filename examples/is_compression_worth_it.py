"""Does it pay to compress gradients, and up to which bandwidth?

Eight machines with a V100 each train VGG-16. Compressors send fewer bytes, but take time to encode and decode. By
default, this time is that of the memory traffic, a lower bound; for sorting, it comes from a published fit. The script
simulates step times from 1 to 100 Gbit/s.
"""

from pathlib import Path

import ddlsim
from ddlsim.compression.cost import SORT_V100

COMPRESSORS = {
    "none": None,
    "fp16": ddlsim.FP16(),
    "top-k 1 %": ddlsim.ErrorFeedback(ddlsim.TopK(0.01)),
    "top-k 1 %, by sorting": ddlsim.Compression(ddlsim.ErrorFeedback(ddlsim.TopK(0.01)), cost=SORT_V100),
    "signs": ddlsim.SignSGD(),
    "PowerSGD, rank 4": ddlsim.ErrorFeedback(ddlsim.PowerSGD(4)),
}
BANDWIDTHS = ["1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "40 Gbit/s", "100 Gbit/s"]


def main() -> None:
    base = ddlsim.Experiment("aws-p3-2xlarge", "vgg16", batch_size=64, steps=1, warmup=0)
    study = ddlsim.Study(base, vary={"compression": COMPRESSORS, "cluster.nic.bandwidth": BANDWIDTHS})
    summary = study.run(jobs=1).summary  # takes a few seconds, so starting more processes would not pay
    times = summary.pivot(index="compression", columns="cluster.nic.bandwidth", values="step_time")
    times = times.loc[list(COMPRESSORS), BANDWIDTHS]

    print("ms a step at " + ", ".join(BANDWIDTHS))
    for name, row in times.iterrows():
        print(f"  {name:<22}" + "".join(f"{1e3 * seconds:8.1f}" for seconds in row))
    print("\nspeed-up over no compression, and the highest bandwidth at which it is at least 1 %")
    for name, speedup in (times.loc["none"] / times).drop("none").iterrows():
        pays = [bandwidth for bandwidth in BANDWIDTHS if speedup[bandwidth] > 1.01]
        print(f"  {name:<22}" + "".join(f"{factor:6.2f} x" for factor in speedup) + f"  {until(pays)}")
    print("\nThese are times of a step, not of a training run: omitted or rounded elements can cost accuracy or more")
    print("steps. examples/error_feedback.py trains with such gradients.")

    out = Path("out")
    out.mkdir(exist_ok=True)
    study.plot_lines("cluster.nic.bandwidth", out / "compression.png", metric="step_time")


def until(pays: list[str]) -> str:
    if not pays:
        return "never pays"
    if pays[-1] == BANDWIDTHS[-1]:
        return f"still pays at {pays[-1]}"
    return f"pays at {pays[-1]}, no longer at {BANDWIDTHS[BANDWIDTHS.index(pays[-1]) + 1]}"


if __name__ == "__main__":
    main()
