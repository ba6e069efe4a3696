"""Which local SGD is soonest at 95 % over a WAN? A search with Optuna instead of a grid.

Six workers in three regions train a small CNN. How many steps they make on their own, at which learning rate and with
which batch, hang together: long periods save traffic, but diverge at rates that are best for short ones. The search
proposes eight configurations at a time from what came of those before. With --grid, all 280 of a grid beside it: the
same best in 178 s of processor time instead of 18.
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
