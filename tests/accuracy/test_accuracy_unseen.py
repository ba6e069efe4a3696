"""Data files as nobody here has seen them: every row is predicted, or listed with a reason in one line."""

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accuracy import (
    aws,
    collectives,
    coverage,
    hybrids,
    minicluster,
    minicluster_splits,
    minicluster_training,
    mosaic_fsdp,
    published,
    recommendation,
    strong,
    techniques,
    torchgpipe,
)
from accuracy.report import not_predicted
from accuracy.rows import Omitted, Row, covered, mean_error, skill

CASES: list[dict[str, Any]] = yaml.safe_load(published.DATA.read_text(encoding="utf-8"))["cases"]
BY_ID = {case["id"]: case for case in CASES}


def changed(path: Path, *cases: dict[str, Any]) -> Path:
    """Write a file of these cases."""
    path.write_text(yaml.safe_dump({"cases": list(cases)}), encoding="utf-8")
    return path


def case(name: str, **parts: Any) -> dict[str, Any]:
    """Return a copy of a case with changed parts; those of nested tables as table__key."""
    made = copy.deepcopy(BY_ID[name])
    for key, value in parts.items():
        table, _, inner = key.partition("__")
        if inner:
            made[table][inner] = value
        else:
            made[table] = value
    return made


def reasons(omitted: list[Omitted]) -> set[str]:
    assert all(each.reason and "\n" not in each.reason for each in omitted)
    return {each.reason for each in omitted}


def test_every_case_of_the_file_is_in_a_section_or_listed(tmp_path: Path) -> None:
    """One row of each case, so that it is cheap: what the sections predict, and what they and the list leave out."""
    told = {each.case.split(" (")[0] for each in coverage.left_out()}
    told |= {run.name.split(" (")[0] for run in published.runs()}
    told |= {each["id"] for each in CASES if techniques.claims(each) or strong.claims(each) or hybrids.claims(each)}
    assert told == set(BY_ID)
    assert not_predicted(coverage.left_out()).count("\n") == len({(e.case, e.reason) for e in coverage.left_out()})


def test_every_row_of_weak_scaling_is_predicted_or_listed(tmp_path: Path) -> None:
    case_ = case("paddle_v100_resnet50_fp32_b32")
    path = changed(tmp_path / "cases.yaml", case_)
    for machine in (True, False):
        n = len(published.rows(path, machine=machine)) + len(published.left_out(path, machine=machine))
        assert n == len(case_["measured"])
    assert [row.what for row in published.rows(path, machine=False) if row.fitted_on] == ["1 GPU"]


def test_both_columns_of_buckets_are_read() -> None:
    (default, small), omitted = published.read(BY_ID["pytorch_ddp_dgx1v_resnet50"])
    assert (default.bucket_mb, small.bucket_mb, omitted) == (None, 1.0, [])
    assert small.name == "pytorch_ddp_dgx1v_resnet50 (1 MiB buckets, p75)"
    assert (default.measured[16], small.measured[16]) == (0.104, 0.108)


ROWS = [{"n": 8, "throughput": None}, {"n": 16, "throughput": 4629.7}, {"n": None, "throughput": 5.0}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"measured": ROWS}, "throughput is not stated"),
        ({"worker__batch": None}, "batch is not stated"),
        ({"topology__gpus_per_node": None}, "gpus_per_node is not stated"),
        ({"topology__nic_gbps": None}, "nic_gbps is not stated"),
        ({"topology__nic_gbps": [100, 10]}, "nic_gbps is not stated"),
        ({"topology__intra": "NVLink", "worker__device": "TITAN X"}, "how the NVLinks of 8 v100 lead is not stated"),
        ({"topology__gpus_per_node": 4}, "no row of one full machine"),
        ({"model__name": "SqueezeNet"}, "model 'SqueezeNet' is not described"),
        (
            {"algorithm__scaling": None},
            "the source does not say that this is weak scaling, with the same batch on every device",
        ),
        ({"worker__device": "Xeon E5"}, "processors: none of the machines with GPUs that are described"),
        ({"measured": [{"n": 16, "throughput": 9.0}]}, "no row of one full machine"),
        ({"measured": []}, "no step time is stated"),
        ({"measured": None}, "no step time is stated"),
    ],
)
def test_weak_scaling(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    if changes == {"topology__intra": "NVLink", "worker__device": "TITAN X"}:
        changes["topology__gpus_per_node"] = 8
        reason = ""  # eight of them are taken for a cube mesh: nothing is left out but rows below a machine
    path = changed(tmp_path / "cases.yaml", case("paddle_v100_resnet50_fp32_b32", **changes))
    found = reasons(published.left_out(path) + coverage.left_out(path))
    assert not reason or reason in found
    assert all(row.predicted > 0.0 for row in published.rows(path))


def mlperf(machine: str, *points: tuple[int, int, float | None]) -> dict[str, Any]:
    made = case("mlperf07_dgxa100", system=f"MLPerf Training v9 closed, {machine}", id=f"a {machine}")
    made["measured"] = [{"n": n, "global_batch": batch, "throughput": t} for n, batch, t in points]
    return made


THREE = mlperf("DGX A100", (8, 3264, 22522.1), (16, 3264, 37412.9), (24, 2880, 52000.0))


@pytest.mark.parametrize(
    ("cases", "n_rows", "reason"),
    [
        ([mlperf("DGX A100", (8, 800, 2e4), (16, 1600, 3.9e4))], 2, ""),  # equal batches: weak scaling
        ([mlperf("DGX A100", (8, 800, 2e4), (16, 1600, 3.9e4), (64, 6400, 1.5e5))], 3, ""),
        ([mlperf("DGX A100", (8, 800, 2e4), (16, 800, 3.9e4))], 0, "two batches, and no other series"),
        ([mlperf("DGX A100", (8, 800, 2e4), (16, 800, 3.9e4)), THREE], 5, ""),
        ([THREE, mlperf("DGX A100", (8, 800, 2e4), (16, 800, None))], 3, "throughput is not stated"),
        ([mlperf("DGX A100", (8, 800, 2e4))], 0, "the only row of its series"),
        ([mlperf("2 x Xeon 8180", (4, 800, 2e2), (8, 800, 3e2))], 0, "machines of this kind are not described"),
        ([mlperf("DGX A100", (8, 800, 2e4), (9, 900, 2e4))], 2, ""),  # a machine that is not full
        ([case("dle_bert_pt_a100_strong", algorithm__sync="accumulation")], 0, "global batch are not stated"),
        ([case("dle_bert_pt_a100_strong", system="NVIDIA BERT on TPU", worker={})], 0, "not described"),
        ([case("dle_bert_pt_a100_strong", measured=[{"n": 1, "throughput": 4e3}, {"n": 3, "throughput": 1e4}])], 1,
         "32 micro-batches cannot be shared by 3 machines"),
    ],
)  # fmt: skip
def test_strong_scaling(tmp_path: Path, cases: list[dict[str, Any]], n_rows: int, reason: str) -> None:
    path = changed(tmp_path / "cases.yaml", *cases)
    rows, omitted = strong.rows(path), strong.left_out(path)
    assert len(rows) == n_rows
    assert len(rows) + len(omitted) == sum(len(each["measured"]) for each in cases)
    assert any(reason in each for each in reasons(omitted)) if reason else not omitted
    assert all(row.predicted > 0.0 for row in rows)


def test_the_fixed_part_does_not_depend_on_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange does not count here, so a step is computing alone."""
    monkeypatch.setattr(strong, "step", lambda series, point, compute: compute.c0 + compute.c1 * point.batch)
    two = mlperf("DGX-2H", (16, 1600, 2e4), (32, 1600, 3.5e4))
    other = mlperf("DGX-1", (8, 1664, 1e4), (16, 1664, 1.8e4), (64, 1664, 5.5e4))
    orders = [(THREE, other, two), (two, other, THREE)]
    paths = [changed(tmp_path / f"{i}.yaml", *order) for i, order in enumerate(orders)]
    first, second = ({(r.case, r.what): r.predicted for r in strong.rows(path)} for path in paths)
    assert len(first) == 8
    assert first == second


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("paddle_localsgd_resnet50_32xV100", {"n": None}, "n is not stated"),
        ("paddle_localsgd_resnet50_32xV100", {"measured": [{"tau": 1, "t_step_s": 0.5}, {"tau": 2}]}, "two values"),
        ("paddle_localsgd_resnet50_32xV100", {"topology": None}, "the machines are not stated"),
        ("paddle_dgc_fasterrcnn_2xP40", {"n": 4}, "described for two machines"),
        ("paddle_dgc_fasterrcnn_2xP40", {"measured": [{"link_gbps": 1, "t_dense_s": 1, "t_dgc_s": None}]}, "two rates"),
        ("onebit_adam_bertlarge_tcp40", {"topology__effective_gbps": None}, "effective_gbps is not stated"),
        ("onebit_adam_bertlarge_tcp40", {"topology__gpus_per_node": 2}, "no row of one full machine"),
        ("onebit_adam_bertlarge_tcp40", {"worker__note": ""}, "the throughput of one GPU is not stated"),
        ("onebit_adam_bertlarge_tcp40", {"model__name": "GPT"}, "model 'GPT' is not described"),
        ("bytescheduler_mxnet_ps_rdma_vgg16", {"model__name": "Transformer"}, "model 'Transformer' is not described"),
        ("bytescheduler_mxnet_ps_rdma_vgg16", {"topology__nic_gbps": None}, "nic_gbps is not stated"),
    ],
)
def test_techniques(tmp_path: Path, name: str, changes: dict[str, Any], reason: str) -> None:
    path = changed(tmp_path / "cases.yaml", case(name, **changes))
    assert techniques.rows(path) == []
    assert any(reason in each for each in reasons(techniques.left_out(path)))


def test_hybrids_with_other_rows(tmp_path: Path) -> None:
    rows = [{"model": "GoogLeNet", "n": 8, "speedup": 7.0}, {"model": "VGG-A", "n": 8, "global_batch": 24,
             "speedup": None}, {"model": "VGG-A", "n": 4, "global_batch": 24, "speedup": 3.0}]  # fmt: skip
    path = changed(tmp_path / "cases.yaml", case("das2016_abstract", measured=rows))
    assert len(hybrids.rows(path)) == 1  # 6 samples of a node: between two of the table
    assert reasons(hybrids.left_out(path)) == {
        "neither machine nor model of this name is described", "speedup is not stated"
    }  # fmt: skip


def test_sweeps_with_other_rows(tmp_path: Path) -> None:
    sweep = {1024: 5.0, 2048: None, 4096: 9.0, 8192: 12.0, 16384: 20.0, 32768: 31.0}
    found = [
        {"id": "a", "columns": "bytes: time_us", "data": sweep},
        {"id": "b", "columns": "bytes: time_us", "data": {1024: 5.0}},
        {"id": "c", "columns": "n: [busbw_GBps, busbw ring only]", "data": {4: [300.0, None], 8: [400.0, 310.0]}},
        {"id": "d", "columns": "GB/s", "data": {"x": 4.0}},
    ]
    path = tmp_path / "collectives.yaml"
    path.write_text(yaml.safe_dump({"collectives": found}), encoding="utf-8")
    assert [row.case for row in collectives.rows(path)] == 5 * ["a"] + ["c"]
    assert {each.case for each in collectives.left_out(path)} == {"a", "b", "c", "d"}
    reasons(collectives.left_out(path))


def test_aws_with_other_rows(tmp_path: Path) -> None:
    """All-reduces without point-to-point rows are calibrated on those that are known."""
    path = tmp_path / "aws.csv"
    path.write_text(
        "operation,library,n_nodes,size_mib,shaped_delay_ms,shaped_gbit_s,measured_ms\n"
        "all_reduce,nccl,8,128,1,5,380\nall_reduce,mpi,8,128,1,5,380\nbroadcast,nccl,8,128,1,5,380\n"
        "all_reduce,gloo,8,128,,5,\n", encoding="utf-8",
    )  # fmt: skip
    (row,) = aws.rows(path)
    assert abs(row.error) < 0.05
    assert reasons(aws.left_out(path)) == {
        "how many connections mpi opens is not known", "which algorithm nccl uses for broadcast is not known",
        "measured_ms is not stated",
    }  # fmt: skip


def rewritten(source: Path, path: Path, change: Callable[[list[dict[str, str]]], None]) -> None:
    """Write the rows of a CSV file, changed, to another one."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    fields = list(rows[0])
    change(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


def two_odd_ones(rows: list[dict[str, str]]) -> None:
    """Leave three rows, of which one has another algorithm and one no time."""
    del rows[3:]
    rows[0]["algorithm"], rows[0]["experiment"], rows[1]["median_s"] = "some_other", "else", ""


def test_minicluster_with_other_rows(tmp_path: Path) -> None:
    for name in ("collectives", "ps", "topology", "delay", "training", "async_ps"):
        rewritten(minicluster.DATA / f"{name}.csv", tmp_path / f"{name}.csv", two_odd_ones)
    found = minicluster.collective_table(tmp_path)
    assert len(found.rows) + len(found.omitted) == 12
    assert reasons(found.omitted) == {"no algorithm of this name is described", "median_s is not stated"}
    steps, servers = minicluster_training.training_table(tmp_path), minicluster_training.server_table(tmp_path)
    assert len(steps.rows) + len(steps.omitted) == 3
    reasons(steps.omitted + servers.omitted)


def test_servers_without_what_a_run_needs(tmp_path: Path) -> None:
    def change(rows: list[dict[str, str]]) -> None:
        del rows[2:]
        rows[0]["extra"] = rows[0]["extra"].replace("mode=async", "mode=other")
        rows[1]["extra"] = "mode=async"

    rewritten(minicluster.DATA / "async_ps.csv", tmp_path / "async_ps.csv", change)
    found = minicluster_training.server_table(tmp_path)
    assert (found.rows, len(found.omitted)) == ([], 2)
    assert any("no server of mode 'other'" in each for each in reasons(found.omitted))


def test_trains_of_messages_are_predicted() -> None:
    """18 rows of twenty ping-pongs in a row, and three rings of torch's send and receive."""
    trains = [row for row in minicluster.read(minicluster.DATA / "p2p.csv") if "train20" in row.algorithm]
    assert len(trains) == 18
    large = [row for row in trains if row.nbytes == 16384]
    assert all(minicluster.predicted(row) == pytest.approx(row.seconds, rel=0.05) for row in large)
    rings = [row for row in minicluster.read(minicluster.DATA / "collectives.csv") if "sendrecv" in row.algorithm]
    assert len(rings) == 3
    assert all(minicluster.predicted(row) > 0.0 for row in rings)


def test_splits_with_other_rows(tmp_path: Path) -> None:
    rewritten(minicluster_splits.DATA / "pipeline.csv", tmp_path / "pipeline.csv", two_odd_ones)
    found = minicluster_splits.table("pipeline", tmp_path)
    assert len(found.rows) == 1
    assert reasons(found.omitted) == {"no split of this name is described", "median_s is not stated"}


def test_fsdp_with_other_rows(tmp_path: Path) -> None:
    """Machines without rows of their own in the file are calibrated on those that are known."""
    path = tmp_path / "rows.csv"
    lines = [line for line in mosaic_fsdp.DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    fields = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    other = [{"section": "MI250"}, {"tokens_per_s": ""}, {"precision": "amp_fp8"}, {"micro": "11"}]
    rows = [",".join({**fields, **change}.values()) for change in other]
    path.write_text("\n".join([lines[0], *rows]), encoding="utf-8")
    found = mosaic_fsdp.table(path)
    assert (found.rows, len(found.omitted)) == ([], 4)
    assert len(reasons(found.omitted)) == 4


def test_recommendation_and_pipelines_with_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "dlrm.yaml"
    rows = [["pytorch", "hgx-h100", 1, "small", 8, 5, 6], ["jax", "dgx-1", 8, "small", 65536, None, 7e6]]
    path.write_text(yaml.safe_dump({"rows": rows}), encoding="utf-8")
    assert recommendation.rows(path) == []
    assert len(reasons(recommendation.left_out(path))) == 3
    path = tmp_path / "torchgpipe.yaml"
    found = {"source": "x", "unet_5_64": {"pipeline_2": 35.5, "pipeline_16": 3.0}, "resnet101": {"baseline": None}}
    path.write_text(yaml.safe_dump(found), encoding="utf-8")
    assert torchgpipe.rows(path) == []
    assert len(reasons(torchgpipe.left_out(path))) == 3


def test_skill_and_intervals() -> None:
    """By hand: measured 1.2 and 2 where nothing would change at 1; predicted 1.1 and 2.2."""
    rows = [Row("a", "b", 1.2, 1.1, "s", False, unchanged=1.0, interval=(1.0, 1.15)),
            Row("a", "c", 2.0, 2.2, "s", False, unchanged=1.0, interval=(1.5, 2.5)),
            Row("a", "d", 1.0, 1.0, "s", True, unchanged=1.0, interval=(0.9, 1.1))]  # fmt: skip
    naive, added = skill(rows)
    assert naive == pytest.approx((1 / 6 + 1 / 2) / 2)
    assert added == pytest.approx(mean_error(rows) / naive)
    assert covered(rows) == (0.5, pytest.approx(0.5 / 2.2))
    assert covered(rows[2:]) is None
