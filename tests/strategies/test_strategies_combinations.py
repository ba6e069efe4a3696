"""Strategy x codec x fabric x place: every two choices meet in one run at least (a pairwise covering array).

A combination runs and keeps the rules of all, or is refused in one line with a reason that is listed here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from allpairspy import AllPairs

import ddlsim
from ddlsim import (
    ADPSGD,
    BMUF,
    CHOCOSGD,
    DPSGD,
    FP16,
    QSGD,
    SGD,
    SPARTA,
    AdaComm,
    AllReduce,
    AsyncParameterServer,
    BackupWorkers,
    CoCoDSGD,
    CodecCost,
    Compression,
    ConfigError,
    DaSGD,
    DiLoCo,
    ElasticAveraging,
    ErrorFeedback,
    Experiment,
    Fabric,
    FedAvg,
    FedBuff,
    GossipSGD,
    GTopK,
    HierarchicalLocalSGD,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    LocalSGD,
    Lognormal,
    Measured,
    OverlapLocalSGD,
    ParameterServer,
    PowerSGD,
    QsparseLocalSGD,
    ShardedUpdate,
    SignSGD,
    SlowMo,
    SoftSync,
    StaleSynchronous,
    Threshold,
    TopK,
    Training,
)
from ddlsim.cluster import MultiGpu, star
from ddlsim.cluster.calibration_table import CalibrationTable, CurveTable
from ddlsim.strategies import contract

STRATEGIES = [
    AllReduce(overlap="none"), AllReduce(overlap="layer"), ShardedUpdate(), ShardedUpdate(overlap="layer"),
    ParameterServer(placement="colocated"), AsyncParameterServer(2, "colocated"), LocalSGD(2), AdaComm(2, 2), BMUF(2),
    DaSGD(2, 1), OverlapLocalSGD(2), CoCoDSGD(2), DPSGD(), ADPSGD(), GossipSGD(0.5), SoftSync(2, placement="colocated"),
    StaleSynchronous(1, placement="colocated"), KSync(2, placement="colocated"), KBatchSync(2, placement="colocated"),
    KAsync(2, placement="colocated"), KBatchAsync(2, placement="colocated"), BackupWorkers(1, placement="colocated"),
    BackupWorkers(1, restart=False, placement="colocated"), ElasticAveraging(0.2, 2, placement="colocated"),
    ElasticAveraging(0.2, 2, synchronous=False, placement="colocated"), DiLoCo(2), SlowMo(2),
    QsparseLocalSGD(2, ErrorFeedback(TopK(0.05))), HierarchicalLocalSGD(1, 2), HierarchicalLocalSGD(1, 2, 3),
    SPARTA(0.1), CHOCOSGD(0.5), FedAvg(0.5, local_steps=2, placement="colocated"),
    FedBuff(1, 2, servers=2, placement="colocated"),
]  # fmt: skip
CODECS = [
    None, FP16(), ErrorFeedback(TopK(0.05)), TopK(0.05), QSGD(4), GTopK(0.05), SignSGD(), PowerSGD(2), Threshold(0.01),
    Compression(TopK(0.05), down=FP16()), Compression(FP16(), cost=CodecCost(encode=1e-9, decode=1e-9)),
]  # fmt: skip
FABRICS = [
    None, Fabric("double_binary_tree", "given"), Fabric("hierarchical"), Fabric("auto"), Fabric("ring", cost="nccl"),
    Fabric("hierarchical", cost="nccl"), Fabric("ring", cost="calibrated"),
]  # fmt: skip
#: all workers, and a part of them that is not the first one
PLACES = [None, (2, 3, 4, 5)]
LEARNS = [True, False]
#: why a combination makes no sense, or cannot be known
REASONS = (
    r"fabric has no effect with .*, which has no collectives",
    r"a form of error feedback",
    r"down = FP16 has no effect with",
    r"the size of its output depends on the input values",
    r"no library provides the collective",
    r"cluster .* is not calibrated; measure",
    r"needs whole tensors, but .* is divided among several servers",
    r"AdaComm: its period depends on the loss",
    r"needs the same number of workers on every machine",
    r"QsparseLocalSGD already compresses",
    r"SPARTA does not support compression",
)  # fmt: skip


def cluster() -> ddlsim.Cluster:
    """Four machines of two devices each, on which rings have been measured."""
    plain = ddlsim.load_cluster(star(4, bandwidth="10 Gbit/s", latency="5 us", host=MultiGpu(2)))
    curves = [
        CurveTable(
            operation=operation, algorithm="ring", per_message=2.0, sizes=[65536], per_byte=[1.5, 1.1],
            covariance=[[0.01, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.01]], spread=0.03, dof=5.0, nbytes=[64, 2**24],
            ranks=[2, 8], inside=inside,
        )
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        for inside in (False, True)
    ]  # fmt: skip
    return dataclasses.replace(plain, calibration=CalibrationTable(curves=curves))


def possible(row: list[object]) -> bool:
    """Whether what is chosen first leaves a choice of what comes after: the rest of a refused run is not tried."""
    strategy = row[0]
    if len(row) > 2 and row[2] is not None and contract.of(strategy).collectives().fabric is None:
        return False
    if len(row) > 1 and row[1] is not None and isinstance(strategy, QsparseLocalSGD | SPARTA):
        return False
    if len(row) > 1 and row[1] is not None and contract.of(strategy).collectives().fabric is None:
        tracked = isinstance(strategy, DPSGD | CHOCOSGD | ADPSGD | GossipSGD | ElasticAveraging | FedAvg)
        if tracked and (isinstance(row[1], ErrorFeedback | SignSGD | Compression)):
            return isinstance(row[1], Compression) and isinstance(strategy, ElasticAveraging | FedAvg)
    return not (len(row) > 4 and isinstance(strategy, AdaComm) and not row[4])


CLUSTER = cluster()
ROWS = [tuple(row) for row in AllPairs([STRATEGIES, CODECS, FABRICS, PLACES, LEARNS], filter_func=possible)]


def in_part() -> list[Any]:
    """Return all rows, of which those with a new strategy, or a new pair of codec and fabric, are in `make test`."""
    seen: set[object] = set()
    found = []
    for row in ROWS:
        new = {repr(row[0]), (repr(row[1]), repr(row[2]))} - seen
        seen |= new
        found.append(pytest.param(row, marks=[] if new else pytest.mark.slow))
    return found


def experiment(row: tuple[object, ...]) -> Experiment:
    strategy, codec, fabric, places, learns = row
    training = Training("digits", rate=0.02, updates=6, optimizer=SGD(), evaluate_every=3) if learns else None
    return Experiment(
        CLUSTER, "digits-cnn", strategy, 8, places, steps=4, warmup=0, compute=Measured("2 ms", 8),  # type: ignore[arg-type]
        jitter=Lognormal(0.1), training=training, compression=codec, fabric=fabric, seed=3,  # type: ignore[arg-type]
    )  # fmt: skip


def named(row: tuple[object, ...]) -> str:
    strategy, codec, fabric, places, learns = row
    kind = "none" if codec is None else type(codec).__name__
    way = "own" if fabric is None else f"{fabric.algorithm}-{fabric.cost}"  # type: ignore[attr-defined]
    return f"{type(strategy).__name__}-{kind}-{way}-{'part' if places else 'all'}-{'learns' if learns else 'times'}"


REFUSED = [
    (DPSGD(), None, Fabric("ring", "given"), None, False),
    (KSync(2, placement="colocated"), None, Fabric("auto"), None, False),
    (DPSGD(), ErrorFeedback(TopK(0.05)), None, None, False),
    (ElasticAveraging(0.2, placement="colocated"), SignSGD(), None, None, False),
    (GossipSGD(0.5), Compression(TopK(0.05), down=FP16()), None, None, False),
    (LocalSGD(2), Compression(TopK(0.05), down=FP16()), None, None, False),
    (AdaComm(2, 2), None, None, None, False),
    (AllReduce(), Threshold(0.01), None, None, False),
    (LocalSGD(2), Threshold(0.01), Fabric("hierarchical"), None, True),
    (AllReduce(overlap="none"), GTopK(0.05), Fabric("ring", cost="nccl"), None, False),
    (AsyncParameterServer(2, "colocated"), PowerSGD(2), None, None, False),
    (LocalSGD(2), None, Fabric("hierarchical", cost="nccl"), (0, 1, 2), False),
    (QsparseLocalSGD(2), FP16(), None, None, False),
    (SPARTA(0.1), FP16(), None, None, False),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_what_makes_no_sense_is_refused_in_one_line(row: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError, match="|".join(REASONS)) as error:
        ddlsim.simulate(experiment(row))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", in_part(), ids=named)
def test_it_runs_and_keeps_the_rules_or_says_why_not(row: tuple[object, ...]) -> None:
    try:
        wanted = experiment(row)
        result = ddlsim.simulate(wanted)  # bytes, seconds and updates add up, or it raises
    except ConfigError as error:
        if not any(re.search(reason, str(error)) for reason in REASONS):
            raise
        return
    places = row[3]
    assert result.nodes.tolist() == (CLUSTER.workers if places is None else CLUSTER.workers[list(places)]).tolist()  # type: ignore[call-overload]
    assert result.nbytes_sent > 0.0
    again = ddlsim.simulate(wanted)
    assert (again.end_time, again.nbytes_sent, again.recorder.updates) == (
        result.end_time, result.nbytes_sent, result.recorder.updates
    )  # fmt: skip
    if row[4]:
        assert result.history["loss"].tolist() == again.history["loss"].tolist()
        assert result.params.tolist() == again.params.tolist()
        if type(row[1]).__name__ in ("FP16", "QSGD", "SignSGD"):
            kept = ddlsim.simulate(wanted.with_(compression=None))
            sent, dense = (each.nbytes_sent / len(each.recorder.updates) for each in (result, kept))
            assert sent < 1.01 * dense
