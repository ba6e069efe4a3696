"""What to rent for 90 epochs of ResNet-50 on ImageNet within 12 hours, and how to use it.

Eight machines with a V100 each are connected by 10 Gbit/s or, for 5 % more, by 25 Gbit/s. The recommendation names the
cheapest configuration that meets the deadline, compares it with the alternatives, and evaluates rules of thumb.
"""

import dataclasses

import ddlsim

slow = ddlsim.load_cluster("aws-p3-2xlarge")
fast = dataclasses.replace(slow.scaled("nic", bandwidth=2.5).with_costs(price="3.21 USD/h"), name="with-25-gbit/s")

plan = ddlsim.recommend(
    [slow, fast], "resnet50", ddlsim.Target(deadline="12 h"), samples=90 * 1_281_167,
    workers=[2, 4, 8], batch_sizes=[64], jobs=1,
)  # fmt: skip
print(plan)
print()
simulated = plan.table[plan.table["status"] == "simulated"].head(8)
print(simulated[["cluster", "strategy", "compression", "cost", "miss"]].to_string(index=False, float_format="%.4g"))
