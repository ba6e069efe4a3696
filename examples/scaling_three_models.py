"""How do three models scale on three clusters, and where does each stop?

A model stops where another worker adds less than 80 % of what a worker does alone (weak scaling: every worker has a
batch of its own, the largest round one that fits into a V100 of 16 GB).
"""

from pathlib import Path

import ddlsim

BATCH_SIZES = {"resnet50": 64, "vgg16": 64, "bert-large": 8}
CLUSTERS = {
    "cloud V100, 25 Gbit/s": "cloud-25g-16x8-v100",
    "DGX A100, 8 x 200 Gbit/s": "dgx-a100-pod",
    "single V100s, 10 Gbit/s": "fat-tree-k8-10g",
}
WORKERS = [1, 4, 8, 16, 32, 64]


def main() -> None:
    out = Path("out")
    out.mkdir(exist_ok=True)
    answers = []
    for model, batch_size in BATCH_SIZES.items():
        base = ddlsim.Experiment("cloud-25g-16x8-v100", model, batch_size=batch_size, steps=1, warmup=0)
        study = ddlsim.Study(base, vary={"cluster": CLUSTERS, "workers": WORKERS})
        summary = study.run(jobs=1).summary  # a few seconds: other processes would not be worth their start
        study.plot_scaling(out / f"efficiency_{model}.png", metric="efficiency")

        print(f"{model}, {batch_size} samples a worker: samples/s, and efficiency, with so many workers")
        for name in CLUSTERS:
            rows = summary[summary["cluster"] == name].set_index("workers")
            print(f"  {name:<26}" + "".join(f"{rate:9,.0f}" for rate in rows["throughput"]))
            print(f"  {'':<26}" + "".join(f"{100 * share:7.1f} %" for share in rows["efficiency"]))
            answers.append(f"{model:<10}  {name:<26}  {answer(rows['efficiency'].to_dict())}")
    print("\nwhere it stops")
    print("\n".join(answers))


def answer(efficiency: dict[int, float]) -> str:
    below = [workers for workers, share in efficiency.items() if share < 0.8]
    if not below:
        return f"not up to {max(efficiency)} workers"
    last = max(workers for workers in efficiency if workers < below[0])
    return f"after {last}: {efficiency[below[0]]:.0%} with {below[0]} workers"


if __name__ == "__main__":
    main()
