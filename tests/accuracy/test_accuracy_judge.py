"""The judge reads the columns of the five files, runs their rows, and says why it cannot run a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accuracy.judge import judge, main, read
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
    assert "none.csv: No such file" in capsys.readouterr().err
