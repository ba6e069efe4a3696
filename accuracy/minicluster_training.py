"""Training steps and parameter servers on the namespaces of :mod:`accuracy.minicluster`.

Seconds of computing come from the steps of a single worker. Where workers "sleep" instead of computing, everything but
the arithmetic is real; where they compute, two of them share two cores (and torch's threads), which nobody predicts.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accuracy.minicluster import DATA, Measurement, calibration, cluster_of, predicted, read
from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim.cluster import Cluster, with_detail
from ddlsim.errors import ConfigError
from ddlsim.run import Experiment, Result, run
from ddlsim.runtime.context import Factors, RunContext
from ddlsim.strategies import (
    AllReduce,
    AsyncParameterServer,
    DdpBuckets,
    LocalSGD,
    ParameterServer,
    StaleSynchronous,
    Strategy,
    contract,
)
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model

__all__ = ["left_out", "rows", "server_rows", "server_table", "training_rows", "training_table"]

MODEL = DATA / "lenet-like.toml"
BATCH = 128
LAYERS = ("conv1", "conv2", "fc1", "fc2")
DRAWS = 32  # of the calibration and of windows, for asynchronous servers
WARM_UP = 0.15  # of a run, before rates and staleness are counted
#: bytes in flight of a BBR connection with data to send: median, and standard deviation of their logarithm, over
#: messages of runs that are no rows (README of the data)
WINDOW, WINDOW_SPREAD = 52 * 1448, 0.43


@dataclass(frozen=True)
class Given:
    """A strategy whose workers compute and send what `workload` says.

    With a `seed`, rank r takes the k-th draw of ``random.Random(1000 * seed + r)`` times as long in its k-th step: the
    very compute times of the run, exponential.
    """

    strategy: Strategy
    workload: Workload
    seed: int | None = None

    @property
    def label(self) -> str:
        """The strategy's own."""
        return self.strategy.label

    def updates(self, steps: int, n_workers: int) -> int:
        """The strategy's own."""
        return contract.of(self.strategy).updates(steps, n_workers)

    def start(self, context: RunContext) -> None:
        """Give all workers the workload and start them."""
        for worker in context.workers:
            worker.workload = self.workload
            if self.seed is not None:
                worker.factors = _Exponential(random.Random(1000 * self.seed + worker.rank))
        self.strategy.start(context)


class _Exponential(Factors):
    def __init__(self, source: random.Random) -> None:
        self._random = source

    def take(self, n: int) -> np.ndarray:
        return np.array([self._random.expovariate(1.0) for _ in range(n)])


def workload_of(forward: float, backward: list[float], optimizer: float, nbytes: float | None = None) -> Workload:
    """Return the workload of measured s, `backward` per layer with parameters from conv1 to fc2.

    With `nbytes`, gradients of that many bytes in one tensor take the place of the model's.
    """
    model = load_model(MODEL)
    made = make_workload(model, load_device("desktop-cpu"), BATCH)
    places = [i for i, layer in enumerate(model.layers) if layer.n_params]
    ahead, behind, sizes = (np.zeros(len(model.layers)) for _ in range(3))
    ahead[0] = forward
    behind[places] = backward
    made = dataclasses.replace(made, forward=ahead, backward=behind, optimizer=optimizer)
    if nbytes is None:
        return made
    sizes[places[0]] = nbytes
    return dataclasses.replace(
        made, grad_nbytes=sizes, tensor_layer=np.array(places[:1]), tensor_nbytes=np.array([nbytes])
    )


def simulated(
    row: Measurement, strategy: Given, n_hosts: int, cluster: Cluster | None = None, **options: int | float
) -> Result:
    """Run a row's workers on its cluster, or on a given one."""
    cluster = cluster_of(row, n_hosts) if cluster is None else cluster
    return run(Experiment(cluster, MODEL, strategy, BATCH, row.n, device="desktop-cpu").with_(**options))


def _sleeps_alone(row: Measurement) -> bool:
    return row.algorithm == "train_sleep_single" and {"fwd_s", "bwd_s", "opt_s", "tb_sleep"} <= set(row.extra)


def _is_single(rows: list[Measurement]) -> bool:
    return any(map(_sleeps_alone, rows))


def _single(data: list[Measurement]) -> dict[str, float]:
    """Return the s that the single worker's sleeping steps take beyond what they sleep, and their optimizer."""
    row = next(filter(_sleeps_alone, data))
    backward = [float(part) for part in row.extra["tb_sleep"].split("/")]
    return {
        "forward": float(row.extra["fwd_s"]) - float(row.extra["tf_sleep"]),
        "layer": (float(row.extra["bwd_s"]) - sum(backward)) / len(backward),
        "rest": float(row.extra["opt_s"]) + float(row.extra["data_s"]),
    }


def _workload(row: Measurement, beyond: dict[str, float]) -> Workload:
    """Return what a worker of a training row does besides communicating."""
    if "tf_sleep" in row.extra:
        backward = [float(part) + beyond["layer"] for part in row.extra["tb_sleep"].split("/")]
        return workload_of(float(row.extra["tf_sleep"]) + beyond["forward"], backward, beyond["rest"])
    known = json.loads((DATA / "training_calibration.json").read_text(encoding="utf-8"))["calibration"]
    ready = [known["grad_ready_s"][name] for name in LAYERS]
    backward = [late - early for late, early in zip(ready, [*ready[1:], 0.0], strict=True)]
    return workload_of(known["forward_s"], backward, known["optimizer_s"] + known["data_s"])


def strategy_of(row: Measurement) -> Strategy:
    """Return how the workers of a training row talk; DDP with an explicit size has no smaller first bucket."""
    local = re.search(r"local(\d+)", row.algorithm)
    if local is not None:
        return LocalSGD(int(local[1]), algorithm="gloo_ring", rank_order="given")
    if "blocking" in row.algorithm:
        overlap: str | DdpBuckets = "none"
    elif "default" in row.algorithm:
        overlap = "ddp"
    else:
        cap = number(row.extra, "bucket_mb") * 2**20
        overlap = DdpBuckets(cap, cap)
    return AllReduce("gloo_ring", overlap, "given")


def training_table(folder: Path = DATA) -> Table:
    """Return what becomes of the training steps; single workers calibrate, those of :data:`DATA` if there are none."""
    found = Table()
    data = read(folder / "training.csv", found)
    single = next((rows for rows in (data, read(DATA / "training.csv")) if _is_single(rows)), [])
    beyond = _single(single)
    for row in data:
        found.add(row.name, row.where, lambda row=row: _step_row(row, beyond))
    return found


def _step_row(row: Measurement, beyond: dict[str, float]) -> Row:
    workload = _workload(row, beyond)
    real = "two workers compute on two cores" if "real" in row.algorithm else ""
    if row.n == 1:
        return Row(row.name, row.where, row.seconds, workload.step_time, "s", True, "gave compute times")
    result = simulated(row, Given(strategy_of(row), workload), row.n, steps=8)
    seconds, alone = float(np.mean(result.step_times)), workload.step_time
    return Row(row.name, row.where, row.seconds, seconds, "s", False, real, unchanged=alone,
               kind=f"run/all-reduce/{'tcp-shared-cores' if real else 'tcp'}")  # fmt: skip


def training_rows(folder: Path = DATA) -> list[Row]:
    """Return the training steps."""
    return training_table(folder).rows


def server_strategy(row: Measurement) -> Strategy:
    """Return how the workers of a row use their parameter server."""
    mode = row.extra["mode"]
    if mode == "ssp":
        return StaleSynchronous(int(row.extra["bound"]))
    if mode not in ("async", "sync"):
        raise UnpredictableError(f"no server of mode {mode!r} is described")
    return AsyncParameterServer() if mode == "async" else ParameterServer(overlap="none")


def drawn_clusters(row: Measurement) -> list[Cluster]:
    """Return a row's cluster with windows, and with parameters drawn from what their calibration is unsure about.

    Which of several workers is served first depends on milliseconds, and what follows on that: a thousandth of the
    rate moves the updates of a run by up to 5 %, so the mean of several is the prediction.
    """
    found, cluster = calibration(row.mbps)[0], queued(cluster_of(row, row.n + 1))
    uncertain, source = dataclasses.replace(found, cluster=cluster), np.random.default_rng(0)
    return [uncertain.sampled(source).sampled(seed) for seed in range(DRAWS)]


def queued(cluster: Cluster) -> Cluster:
    """Return a cluster whose links serve bytes in the order of their arrival, with the windows of its connections.

    The rows ran BBR (README of the data), whose windows differ between messages. Acknowledgements wait behind data, as
    the token buckets of the hosts' links serve all bytes in one queue.
    """
    assert cluster.details is not None
    kept = cluster.details.of(0).written()
    return with_detail(
        cluster,
        **kept,
        sharing="fifo",
        transport="tcp-bbr",
        warm=True,
        queued_acks=True,
        window=WINDOW,
        window_spread=WINDOW_SPREAD,
    )


def server_table(folder: Path = DATA) -> Table:
    """Return what becomes of the asynchronous, synchronous and stale synchronous servers: update rates, staleness."""
    found = Table()
    for row in read(folder / "async_ps.csv", found):
        try:
            found.rows += _server_rows(row)
        except (KeyError, ValueError) as error:  # what a run needs and the row does not say
            found.omit(row.name, row.where, f"the row does not state {error}")
        except (UnpredictableError, ConfigError) as error:
            found.omit(row.name, row.where, str(error))
    return found


def _server_rows(row: Measurement) -> list[Row]:
    end, mean = float(row.extra["duration_s"]), float(row.extra["mean_compute_s"])
    workload = workload_of(mean, [0.0] * len(LAYERS), 0.0, row.nbytes)
    seed = int(row.extra["seed"]) if row.extra["compute"] == "exp" else None
    rate, stale = number(row.extra, "update_rate_per_s"), row.extra["mode"] != "sync"
    measured_staleness = number(row.extra, "mean_staleness") if stale else 0.0
    begin = WARM_UP * end
    n_counted, staleness = 0, []
    drawn = drawn_clusters(row)
    for cluster in drawn:
        given = Given(server_strategy(row), workload, seed)
        result = simulated(row, given, row.n + 1, cluster, max_time=end, steps=10**6)
        counted = [i for i, (time, _) in enumerate(result.recorder.updates) if time >= begin]
        n_counted += len(counted)
        staleness += [result.recorder.staleness[i] for i in counted] if stale else []
    case = f"{row.name} {row.extra['mode']} {row.extra.get('bound', '')} {row.extra['compute']} {mean:g} s"
    alone = 1.0 / (mean + 2 * message(row)) * (1 if row.extra["mode"] == "sync" else row.n)
    made = [Row(case, row.where, rate, n_counted / len(drawn) / (end - begin), "1/s", False, unchanged=alone,
                kind=f"run/parameter-server/{row.extra['mode']}")]  # fmt: skip
    if stale:
        apart = f"histograms overlap by {_overlap(row, staleness):.0%}"
        mine = float(np.mean(staleness)) if staleness else 0.0
        made.append(Row(case, f"{row.where} staleness", measured_staleness, mine, "updates", False, apart,
                        kind="run/parameter-server/staleness"))  # fmt: skip
    return made


def server_rows(folder: Path = DATA) -> list[Row]:
    """Return update rates and staleness of asynchronous, synchronous and stale synchronous parameter servers."""
    return server_table(folder).rows


def left_out() -> list[Omitted]:
    """Return the rows of training steps and servers that are not predicted."""
    return training_table().omitted + server_table().omitted


def message(row: Measurement) -> float:
    """Return the s of one message of a row's size between two hosts."""
    return predicted(dataclasses.replace(row, algorithm="oneway", n=2))


def _overlap(row: Measurement, staleness: list[int]) -> float:
    """Return the share that the measured and the predicted histogram of the staleness have in common."""
    pairs = (part.split(":") for part in row.extra["staleness_hist"].split("/"))
    if not staleness:
        return 0.0
    measured = {int(value): int(count) for value, count in pairs}
    n = sum(measured.values())
    return sum(min(count / n, staleness.count(value) / len(staleness)) for value, count in measured.items())


def rows() -> list[Row]:
    """Return training steps and parameter servers beside their predictions."""
    return training_rows() + server_rows()


if __name__ == "__main__":
    show(rows(), left_out())
