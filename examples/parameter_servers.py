"""How many parameter servers do 32 workers need?

According to the lemma of Zou et al. 2017 (arXiv:1709.06622), k >= N S / (B T) servers carry all gradients within the
compute time of one step if links are full duplex. The simulation also models the workers' own links, and a gradient is
not sent before it has been computed.
"""

from pathlib import Path

import ddlsim
from ddlsim.planner.guidelines import n_parameter_servers


def main() -> None:
    cluster = ddlsim.load_cluster("fat-tree-k8-10g")
    base = ddlsim.Experiment(cluster, "resnet50", batch_size=32, workers=32, steps=1, warmup=1)
    strategies = {"synchronous": ddlsim.ParameterServer(), "asynchronous": ddlsim.AsyncParameterServer()}
    study = ddlsim.Study(base, vary={"strategy": strategies, "strategy.servers": [1, 2, 4, 8, 16, 32, 64]})
    table = study.run(jobs=1)  # takes a few seconds, so starting more processes would not pay
    print("strategy      servers  images/s  efficiency  ms a step")
    for _, row in table.summary.iterrows():
        print(
            f"{row['strategy']:<12}  {row['strategy.servers']:7d}  {row['throughput']:8,.0f}  {row['efficiency']:10.1%}"
            f"  {1e3 * row['step_time']:9.0f}"
        )

    alone = ddlsim.simulate(base.with_(workers=1, strategy=ddlsim.AllReduce()))
    nbytes, bandwidth = alone.workloads[0].gradient_nbytes, float(cluster.channel_capacity.max())
    lemma = n_parameter_servers(nbytes, 32, bandwidth, alone.step_time, full_duplex=True)
    print(f"\nlemma         {lemma} servers hide the exchange behind {1e3 * alone.step_time:.0f} ms of computation")
    for name in strategies:
        rows = table.summary[table.summary["strategy"] == name]
        enough = rows[rows["throughput"] > 0.99 * rows["throughput"].max()].iloc[0]
        print(
            f"{name:<12}  {enough['strategy.servers']} servers are enough for {enough['throughput']:,.0f} images/s, "
            f"{enough['efficiency']:.0%} of what 32 workers compute"
        )
    compute, link = 1e3 * alone.step_time, 1e3 * nbytes / bandwidth
    print(
        f"reason        a worker's own link takes {link:.0f} ms to push and as long to pull, regardless of the servers:"
    )
    print(f"              asynchronous {compute:.0f} + 2 x {link:.0f} ms; synchronous ones push while they compute")

    out = Path("out")
    out.mkdir(exist_ok=True)
    study.plot_lines("strategy.servers", out / "parameter_servers.png")


if __name__ == "__main__":
    main()
