"""Classifying images of two classes on CPU machines in an office: how much faster are eight PCs than one?

A small CNN distinguishes striped discs from chequered squares (procedural, noisy images, as a stand-in for Dogs vs
Cats). Workers average their gradients with three all-reduce algorithms, which give the same parameters at different
speeds. The learning rate is scaled with the square root of the number of workers, or linearly after a warm-up.
"""

import ddlsim
from ddlsim.data import standardize

images = standardize(ddlsim.shapes(1500, size=32, difficulty=0.2, seed=1))
rate, batch, target = 0.01, 16, 0.95


def learn(workers: int, algorithm: str, scaled_rate: float) -> ddlsim.Experiment:
    training = ddlsim.Training(
        images, optimizer=ddlsim.Momentum(0.9), rate=ddlsim.WarmUp(ddlsim.Constant(scaled_rate), 1.0, start=rate),
        epochs=15, target_accuracy=target, moving_average=2, evaluate_every=max(80 // workers, 5),
    )  # fmt: skip
    return ddlsim.Experiment(
        "office-1gbe", "shapes-cnn", ddlsim.AllReduce(algorithm), batch, workers, training=training,
        compute=ddlsim.Measured("12 ms", batch),
    )  # fmt: skip


print("PCs  all-reduce        learning rate  images/s  efficiency  seconds to 95 % (of five seeds; inf: one missed it)")
square_root, linear = ddlsim.square_root_scaling(rate, 8), ddlsim.linear_scaling(rate, 8)
for workers, algorithm, scaled in (
    (1, "ring", rate), (8, "ring", square_root), (8, "ring", linear),
    (8, "binomial_tree", linear), (8, "halving_doubling", linear),
):  # fmt: skip
    experiment = learn(workers, algorithm, scaled)
    result = ddlsim.simulate(experiment)
    reached = ddlsim.simulate_seeds(experiment, 5, processes=1).time_to_accuracy(target)
    print(
        f"{workers:>3}  {algorithm:<16}  {scaled:13.4f}  {result.throughput:8.0f}  {result.efficiency:10.1%}"
        f"  {reached.mean:6.3f} ({reached.low:.3f} to {reached.high:.3f})"
    )
