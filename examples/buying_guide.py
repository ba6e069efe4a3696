"""Faster network or more GPUs: which upgrade buys more per dollar?

BERT-large is trained on 20 million sequences within 24 hours, on rented machines with eight V100 each. The baseline is
four machines with 25 Gbit/s. The prices are assumptions, which you should replace by your own offers: 24.48 USD/h for a
machine with 25 Gbit/s and 31.21 USD/h for one with 100 Gbit/s (about the on-demand prices of AWS p3.16xlarge and
p3dn.24xlarge). Rings over TCP do not use the full rate: they reach 13.6 of 25 Gbit/s (see the cluster's file), and 4 to
6 GB/s of 100 Gbit/s between machines with eight V100 (github.com/NVIDIA/nccl/issues/450).
"""

from pathlib import Path

import ddlsim
from ddlsim.report.study_figures import tornado

SAMPLES, HOURS = 20e6, 24.0
PRICES = {"25 Gbit/s": 24.48, "100 Gbit/s": 31.21}  # USD per machine and hour


def main() -> None:
    machine = ddlsim.load_cluster("cloud-25g-16x8-v100")
    faster = ddlsim.load_cluster("cloud-25g-16x8-v100+bandwidth=100 Gbit/s+flow_rate=40 Gbit/s")
    offers = {
        "25 Gbit/s": machine.with_costs(price=f"{PRICES['25 Gbit/s']} USD/h"),
        "100 Gbit/s": faster.with_costs(price=f"{PRICES['100 Gbit/s']} USD/h"),
    }
    base = ddlsim.Experiment(machine, "bert-large", batch_size=8, steps=1, warmup=0)
    study = ddlsim.Study(base, vary={"cluster": offers, "workers": [16, 32, 64]})
    table = study.run(jobs=1)  # takes a few seconds, so starting more processes would not pay

    rows = table.summary.assign(
        machines=lambda t: t["workers"] // 8,
        hours=lambda t: SAMPLES / t["throughput"] / 3600.0,
        usd=lambda t: SAMPLES * t["cost_per_sample"],
    ).set_index(["cluster", "machines"])
    print("network     machines  sequences/s  efficiency  hours      USD")
    for (network, machines), row in rows.iterrows():
        late = "" if row["hours"] <= HOURS else "  too late"
        print(
            f"{network:<10}  {machines:8d}  {row['throughput']:11.1f}  {row['efficiency']:10.1%}  {row['hours']:5.1f}"
            f"  {row['usd']:7,.0f}{late}"
        )

    today = rows.loc["25 Gbit/s", 4]
    print("\ngain over four machines with 25 Gbit/s")
    for name, network, machines in (("faster network", "100 Gbit/s", 4), ("twice the machines", "25 Gbit/s", 8)):
        gain = rows.loc[(network, machines), "throughput"] - today["throughput"]
        price = machines * PRICES[network] - 4 * PRICES["25 Gbit/s"]
        print(f"  {name:<18}  {gain:+.0f} sequences/s for {price:+.2f} USD/h: {gain / price:.1f} per USD/h")
    in_time = rows[rows["hours"] <= HOURS].sort_values("usd")
    (network, machines), best = in_time.index[0], in_time.iloc[0]
    worth = PRICES["25 Gbit/s"] * rows.loc[("100 Gbit/s", 4), "throughput"] / today["throughput"]
    print(f"\ncheapest in time  {machines} machines with {network}: {best['hours']:.1f} h, {best['usd']:,.0f} USD")
    print(f"break-even price  four machines with 100 Gbit/s cost less up to {worth:.2f} USD/h each")

    out = Path("out")
    out.mkdir(exist_ok=True)
    study.plot_pareto("throughput", "cost_per_sample", out / "buying.png")
    now = ddlsim.simulate(base.with_(workers=32))
    tornado(now.sensitivities(), out / "buying_sensitivity.png", title="four machines with 25 Gbit/s")
    print(f"bottleneck        {now.bottleneck}")


if __name__ == "__main__":
    main()
