"""Which local SGD reaches 95 % soonest over a WAN? A search with Optuna instead of a grid.

Six workers in three regions train a small CNN. The number of local steps, the learning rate and the batch size
interact: long periods save traffic, but diverge at learning rates that are best for short periods. The search proposes
eight configurations at a time, based on the results so far. With --grid, the script also simulates all 280 points of a
grid, which takes 109 s of CPU time instead of 12 s.
"""

import sys

import ddlsim
from ddlsim import LocalSGD, Study, Training
from ddlsim.study import Range, Search

BASE = ddlsim.Experiment(
    "three-regions-wan", "digits-cnn", LocalSGD(8, algorithm="ring"), batch_size=16, workers=6,
    training=Training("digits", rate=0.1, epochs=20, target_accuracy=0.95, evaluate_every=8),
)  # fmt: skip
SPACE = {
    "strategy.period": Range(1, 64, log=True, integer=True),
    "training.rate": Range(0.02, 1.6, log=True),
    "batch_size": [4, 8, 16, 32, 64],
}
GRID = {
    "strategy.period": [2**k for k in range(7)],
    "training.rate": [0.0125 * 2**k for k in range(8)],
    "batch_size": [4, 8, 16, 32, 64],
}
METRIC = "time_to_accuracy"


def main() -> None:
    table = Study(BASE, SPACE, search=Search(METRIC, n_trials=40)).run(jobs=1)
    show("search", table)
    times = table.frame[METRIC].tolist()
    for n in (8, 16, 24, 32, 40):
        print(f"  the best of the first {n:2}: {min(times[:n]):7.2f} s")
    if "--grid" in sys.argv[1:]:
        print()
        show("grid", Study(BASE, GRID).run())


def show(name: str, table: ddlsim.study.Table) -> None:
    best = table.best(METRIC).iloc[0]
    print(
        f"{name}: {len(table.members)} runs, best {best[METRIC]:.2f} s with period {best['strategy.period']:.0f}, "
        f"rate {best['training.rate']:.3g}, batch {best['batch_size']:.0f}"
    )


if __name__ == "__main__":
    main()
