"""The judge reads the columns of the five files, runs their rows, and says why it cannot run a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accuracy.judge import Judged, judge, main, read
from ddlsim import ConfigError

BRIDGE = """release,system,model,gpus,precision,global_batch,micro_batch,sequence,fsdp,tensor,pipeline,context,virtual,expert,tokens_per_s_gpu,tflops_gpu,routing
25.11,h100,llama-3-8b,8,fp8-cs,128,1,8192,8,1,1,1,1,1,14451,744,
25.11,b200,llama-3.1-405b,128,fp8-cs,64,1,8192,0,4,8,2,8,1,661,1667,
25.11,h100,qwen3-30b-a3b,16,fp8-cs,512,2,4096,0,1,2,1,24,8,5275,121,"balanced, dropless"
"""  # noqa: E501
TORCHTITAN = """source,model,system,gpus,local_batch,global_batch,sequence,fsdp,tensor,pipeline,schedule,context,recompute,compile,precision,async_tensor,tokens_per_s_gpu,memory_gib
2024-12,llama-3.1-8b,h100-96g-500w,8,2,16,8192,8,1,1,,1,selective,1,bf16,0,6667,77.0
"""  # noqa: E501
FMS = """model,system,gpus,nic_gbit_per_s,sharding,recompute,local_batch,sequence,tokens_per_s_gpu,table
llama-2-34b,a100-80g,128,400,fsdp,full,8,4096,772,README
"""
MAXTEXT = """system,slices,chips_per_slice,model,layers,width,mlp,heads,head_size,local_batch,sequence,recompute,fsdp,tensor,tflops_chip,mfu_percent
tpu-v4,1,64,maxtext-22b,48,6144,24576,24,256,13,2048,full,64,1,156,56.7
"""  # noqa: E501
LARGE = """rows:
- [nemo2504, nemotron4-15b, h100, 16, 2, 1, 1, 2, 64, megatron, none, 2.66]
"""


@pytest.mark.parametrize(
    ("kind", "text", "within"),
    [
        ("bridge", BRIDGE, 0.08),
        ("torchtitan", TORCHTITAN, 0.08),
        ("fms", FMS, 0.08),
        ("maxtext", MAXTEXT, 0.1),
        ("large", LARGE, 0.08),
    ],
)
def test_files(tmp_path: Path, kind: str, text: str, within: float) -> None:
    path = tmp_path / f"runs.{'yaml' if kind == 'large' else 'csv'}"
    path.write_text(text)
    assert read(path)[0] == kind
    first, *others = judge(path)
    assert first.error is not None
    assert abs(first.error) < within
    if kind == "bridge":
        assert [each.reason for each in others] == [
            "context parallelism is not simulated yet", "experts: these models are not simulated yet",
        ]  # fmt: skip
    if kind == "torchtitan":
        assert first.memory == 77.0
        assert first.predicted_memory == pytest.approx(77.0, rel=0.08)


def test_fms_checkpoints_whole_blocks(tmp_path: Path) -> None:
    """Its "selective" checkpoints every k-th block, so a step takes about the mean of one without and one with all."""
    path = tmp_path / "runs.csv"
    lines = [FMS.splitlines()[1].replace(",full,", f",{each},") for each in ("none", "selective", "full")]
    path.write_text("\n".join([FMS.splitlines()[0], *lines]))
    none, selective, full = (1.0 / (each.predicted or 0.0) for each in judge(path))
    assert selective == pytest.approx((none + full) / 2.0, rel=0.01)
    assert full > 1.15 * none


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per row in the file's order, then the errors; JSON with one entry per row."""
    path, out = tmp_path / "runs.csv", tmp_path / "out.json"
    path.write_text(BRIDGE)
    assert main([str(path), "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("figures: 1 of 3 rows: mean ")
    rows = json.loads(out.read_text())["rows"]
    assert [set(row) for row in rows] == [{"published", "predicted", "unit", "reason"}] * 3
    assert [row["published"] for row in rows] == [14451, 661, 5275]
    assert rows[1]["predicted"] is None


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has the columns of none of the known files; known: bridge"):
        read(path)
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err


def _judged(tmp_path: Path, text: str, old: str = "", new: str = "") -> Judged:
    """Return the first row of a file, with a part replaced."""
    assert old in text
    path = tmp_path / ("runs.yaml" if text.startswith("rows") else "runs.csv")
    path.write_text("\n".join(text.replace(old, new, 1).splitlines()[:2]) + "\n")
    return next(judge(path))


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (BRIDGE, "h100,llama-3-8b,8,fp8-cs", "NVIDIA H100 80GB HBM3,Llama 3 8B,8,FP8-CS"),
        (BRIDGE, "h100,llama-3-8b,8,fp8-cs", "DGX H100,llama3-8b,8,float8"),
        (
            BRIDGE,
            "llama-3-8b,8,fp8-cs,128,1,8192,8,1,1,1,1,1,",
            'meta-llama/Meta-Llama-3-8B,8,FP8 (CS),128,1,"8,192",8,1,-,n/a,,NA,',
        ),
        (BRIDGE, "release,system,model,gpus", "Release,System, Model,GPUs"),
        (BRIDGE, ",14451,744,", ",14451"),  # without the empty values at the end
        (LARGE, "16, 2, 1, 1, 2, 64, megatron, none", "16.0, '2', '-', n/a, 2, '64', megatron, Null"),
        (TORCHTITAN, ",,1,selective,1,bf16,0,", ",1F1B,,op,true,BFloat16,False,"),
        (FMS, "a100-80g,128,400,fsdp", "A100-SXM4-80GB,128,400,FULL_SHARD"),
        (
            LARGE,
            "nemotron4-15b, h100, 16, 2, 1, 1, 2, 64, megatron, none",
            "Nemotron-4 15B, H100, 16, 2, 0, null, 2, 64, NeMo, null",
        ),
        (MAXTEXT, "tpu-v4,", "v4-128,"),
    ],
)
def test_other_spellings(tmp_path: Path, text: str, old: str, new: str) -> None:
    """Public sources spell the same devices, models, precisions and flags in other ways."""
    same, other = _judged(tmp_path, text), _judged(tmp_path, text, old, new)
    assert (other.predicted, other.reason, other.notes) == (same.predicted, "", same.notes)


@pytest.mark.parametrize(
    ("text", "old", "new", "reason"),
    [
        (BRIDGE, "8,fp8-cs", ",fp8-cs", "gpus is missing"),
        (BRIDGE, "128,1,8192", "many,1,8192", "global_batch = 'many': must be a positive integer"),
        (BRIDGE, "fp8-cs", "int8", "precision = 'int8': not known"),
        (BRIDGE, "llama-3-8b", "", "model is missing"),
        (BRIDGE, "128,1,8192,8,", "128,1,8192,16,", "fsdp = 16: must divide gpus / (tensor x pipeline) = 8"),
        (BRIDGE, ",14451,744,", "", "has 14 values; the columns are release, system"),
        (FMS, ",sequence,", ",context_length,", "sequence is missing"),
        (TORCHTITAN, ",sequence,", ",context_length,", "sequence is missing"),
        (MAXTEXT, ",sequence,", ",context_length,", "sequence is missing"),
        (MAXTEXT, "full,64", "full,128", "fsdp = 128: must divide slices x chips_per_slice / tensor = 64"),
        (LARGE, "none", "block", "recompute = 'block': not known"),
        (BRIDGE, "h100", "H100 96GB", "another size of memory"),
        (BRIDGE, "h100", "gtx-9000", "no such device"),
        (BRIDGE, "h100", "l4", "no bundled DGX or NVL72 cluster with l4"),
        (BRIDGE, "8,1,1,1,1,1,14451", "8,3,1,1,1,1,14451", "gpus = 8: must be a multiple of tensor x pipeline = 3"),
        (BRIDGE, "8,1,1,1,1,1,14451", "2,2,1,1,1,1,14451", "fsdp = 2: in layouts, FSDP is only simulated if"),
        (BRIDGE, "llama-3-8b", "mixtral-8x7b", "experts: these models are not simulated yet"),
        (TORCHTITAN, "8,1,1,,1", "1,1,8,zigzag,1", "schedule = 'zigzag': not known; known: 1f1b"),
        (TORCHTITAN, "selective", "sometimes", "recompute = 'sometimes': not known"),
        (TORCHTITAN, "selective,1", "selective,maybe", "compile = 'maybe': must be 0 or 1"),
        (FMS, "fsdp", "ddp", "sharding = 'ddp': not known"),
        (FMS, "400", "-400", "nic_gbit_per_s = -400: must be a positive number"),
        (FMS, "400", "0", "nic_gbit_per_s = 0: must be a positive number"),
        (MAXTEXT, "tpu-v4,1", "tpu-v4,0", "slices = 0: must be a positive integer"),
        (MAXTEXT, "full", "some", "recompute = 'some': not known"),
        (MAXTEXT, "tpu-v4", "h100", "no slices of h100; must be a TPU"),
        (LARGE, ", 2.66", "", "has 11 values; the columns are case, model"),
    ],
)  # fmt: skip
def test_reasons(tmp_path: Path, text: str, old: str, new: str, reason: str) -> None:
    """A row that cannot be run says which column, which value and why."""
    judged = _judged(tmp_path, text, old, new)
    assert judged.predicted is None
    assert reason in judged.reason


def test_notes(tmp_path: Path) -> None:
    """What is simulated differently from what the row says is noted."""
    for text, old, new, note in (
        (LARGE, "megatron,", "other,", "framework = 'other': simulated as Megatron"),
        (LARGE, "megatron,", "deepspeed,", "framework = 'deepspeed': simulated as Megatron"),
        (TORCHTITAN, ",8,2,16,8192,8,1,", ",16,2,16,8192,4,2,", "weights sharded over 8 ranks, not 4"),
        (BRIDGE, "128,1,8192", "128,1,131072", "memory does not suffice: "),
        (BRIDGE, "fp8-cs", "fp8-blockwise", "precision = 'fp8-blockwise': simulated as fp8"),
        (BRIDGE, "14451", "inf", "tokens_per_s_gpu = inf: not compared, must be a positive number"),
        (TORCHTITAN, ",recompute,", ",note,", "memory does not suffice: "),
        (BRIDGE, "25.11", "24.07", "release = 24.07: simulated as NeMo 25.03 to Megatron-Bridge 26.02"),
        (BRIDGE, "8,1,1,1,1,1,14451", "8,1,1,1,4,1,14451", "virtual = 4: has no effect without a pipeline"),
        (BRIDGE, "h100", "h800", "simulated with the links of dgx-h100-pod"),
        (TORCHTITAN, "h100-96g-500w", "b200", "simulated with the links of roce-h100"),
        (TORCHTITAN, "77.0", "77 GiB", "memory_gib = '77 GiB': not compared, must be a positive number"),
    ):
        judged = _judged(tmp_path, text, old, new)
        assert judged.predicted is not None
        assert any(note in each for each in judged.notes)


@pytest.mark.parametrize(("text", "sizes"), [(BRIDGE, "8,1,{},1,{},1,14451"), (LARGE, "16, 2, {}, {}, 2, 16,")])
def test_chunks_of_pipelines_shorten_bubbles(tmp_path: Path, text: str, sizes: str) -> None:
    layouts = ((1, 1), (2, 1), (2, 4))
    old = sizes.format(1, 1).replace("2, 16,", "2, 64,")
    judged = [_judged(tmp_path, text, old, sizes.replace("8,1,", "0,1,").format(*layout)) for layout in layouts]
    assert not any(row.reason or row.notes for row in judged)
    full, stages, chunks = ((row.predicted or 0.0) ** (-1.0 if row.unit == "s" else 1.0) for row in judged)
    assert full > chunks > stages


def test_releases_of_deepspeed(tmp_path: Path) -> None:
    """On A100, any name that contains DeepSpeed is Megatron-DeepSpeed in bf16."""
    text = LARGE.replace("h100", "a100")
    megatron, *others = (
        _judged(tmp_path, text, "megatron,", f"{name},")
        for name in ("megatron", "deepspeed", "Megatron-DeepSpeed", "deepspeed-0.9")
    )
    assert len({each.predicted for each in others}) == 1
    assert others[0].predicted != megatron.predicted
    assert not any("framework" in note for each in others for note in each.notes)


def test_sharding_inside_a_slice(tmp_path: Path) -> None:
    """The fsdp column counts: 16 of 64 chips hold a copy of the weights."""
    whole, part = _judged(tmp_path, MAXTEXT), _judged(tmp_path, MAXTEXT, "full,64", "full,16")
    assert part.predicted is not None
    assert part.predicted != whole.predicted


def test_gates_by_parameters(tmp_path: Path) -> None:
    """Whether MaxText's model has a gate follows from the parameters in its name, on any device."""

    def rate(old: str, new: str) -> float:
        judged = _judged(tmp_path, MAXTEXT.replace("13,2048", "1,2048"), old, new)
        assert judged.predicted is not None
        return judged.predicted

    assert rate("maxtext-22b", "maxtext-29b") != rate("maxtext-22b", "maxtext-22b")
    assert rate("tpu-v4,1,64,maxtext-22b", "tpu-v5p,1,64,maxtext-29b") == rate(
        "tpu-v4,1,64,maxtext-22b", "tpu-v5p,1,64,unnamed"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1\n",
        "rows: 5\n",
        "a: [\n",
        "columns: [a]\n",
        "rows: []\nrows: []\n",
        "rows: " + 3000 * "[",
        "a: 2025-13-01\n",
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not YAML|must be a table with a list of rows"):
        read(path)


def test_missing_and_additional_columns(tmp_path: Path) -> None:
    """A file is recognised without some of its columns; rows without a published figure are predicted."""
    path = tmp_path / "runs.csv"
    path.write_text(
        "system,model,gpus,precision,global_batch,micro_batch,sequence,virtual,tokens_per_s_gpu,notes\n"
        "h100,llama-3-8b,8,bf16,8,1,8192,1,n/a,odd\n"
    )
    (only,) = judge(path)
    assert only.predicted is not None
    assert only.error is None
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="invalid UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("text", "misspelt", "column"),
    [
        (BRIDGE, "micro_batches", "micro_batch"), (TORCHTITAN, "fsdp_size", "fsdp"), (FMS, "shardng", "sharding"),
        (MAXTEXT, "tensor_parallel", "tensor"), (BRIDGE, "contxt", "context"), (TORCHTITAN, "recomputes", "recompute"),
    ],
)  # fmt: skip
def test_misspelt_columns_are_errors_and_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, misspelt: str, column: str
) -> None:
    """An ignored column would be simulated with its default."""
    path, (head, *rows) = tmp_path / "runs.csv", text.splitlines()
    path.write_text(text)
    columns = [*read(path)[1][0]]
    assert capsys.readouterr().err == ""
    path.write_text("\n".join([",".join(misspelt if name == column else name for name in head.split(",")), *rows]))
    with pytest.raises(ConfigError, match=f"unknown column '{misspelt}'; did you mean '{column}'"):
        read(path)
    path.write_text("\n".join([f"{head},remark", *(f"{row},x" for row in rows)]))
    assert [*read(path)[1][0]] == [*columns, "remark"]
    assert capsys.readouterr().err == f"note: {path}: unknown columns are not used: remark\n"


def test_misspelt_keys_of_large_runs_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text("rows:\n- {case: a, model: b, machine: h100, gpus: 8, tensor: 2, pipline: 4, seconds: 1.0}\n")
    with pytest.raises(ConfigError, match="unknown column 'pipline'; did you mean 'pipeline'"):
        read(path)


def test_no_row_is_lost(tmp_path: Path) -> None:
    """An open quotation mark does not hide the rows below it, and no column replaces another one."""
    path = tmp_path / "runs.csv"
    path.write_text(BRIDGE.replace("744,", '744,"'))
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        read(path)
    path.write_text(BRIDGE.replace("routing", "gpus"))
    with pytest.raises(ConfigError, match="column 'gpus' occurs twice; remove one"):
        read(path)
