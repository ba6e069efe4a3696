"""How do three models scale on three clusters, and where does each stop scaling?

A model stops scaling where its throughput falls below 80 % of the throughput without communication (weak scaling: each
worker has its own batch, which fits into a V100 of 16 GB).
"""

from pathlib import Path

import ddlsim

MODELS = {"ResNet-50": ("resnet50", 64), "VGG-16": ("vgg16", 64), "BERT-large": ("bert-large", 8)}  # and batch size
CLUSTERS = {
    "cloud V100, 25 Gbit/s": "cloud-25g-16x8-v100",
    "DGX A100, 8 x 200 Gbit/s": "dgx-a100-pod",
    "single V100s, 10 Gbit/s": "fat-tree-k8-10g",
}
WORKERS = [1, 4, 8, 16, 32, 64]


def main() -> None:
    base = ddlsim.Experiment("cloud-25g-16x8-v100", "resnet50", steps=1, warmup=0)
    study = ddlsim.Study(base, vary={"model, batch_size": MODELS, "cluster": CLUSTERS, "workers": WORKERS})
    table = study.run(jobs=1)  # takes a few seconds, so starting more processes would not pay

    print("samples/s, and efficiency, with " + ", ".join(str(n) for n in WORKERS) + " workers")
    answers = []
    for (model, cluster), rows in table.summary.groupby(["model, batch_size", "cluster"], sort=False):
        print(f"{model:<10}  {cluster:<26}" + "".join(f"{rate:9,.0f}" for rate in rows["throughput"]))
        print(f"{'':<38}" + "".join(f"{100 * share:7.1f} %" for share in rows["efficiency"]))
        efficiency = rows.set_index("workers")["efficiency"].to_dict()
        answers.append(f"{model:<10}  {cluster:<26}  {answer(efficiency)}")
    print("\nwhere it stops")
    print("\n".join(answers))

    out = Path("out")
    out.mkdir(exist_ok=True)
    study.plot_scaling(out / "scaling.png")
    study.plot_scaling(out / "efficiency.png", metric="efficiency")


def answer(efficiency: dict[int, float]) -> str:
    below = [workers for workers, share in efficiency.items() if share < 0.8]
    if not below:
        return f"not up to {max(efficiency)} workers"
    last = max(workers for workers in efficiency if workers < below[0])
    return f"after {last}: {efficiency[below[0]]:.0%} with {below[0]} workers"


if __name__ == "__main__":
    main()
