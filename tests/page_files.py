"""The files that commands of documentation pages name, as their readers have them, and small."""

from __future__ import annotations

import json

STUDY = """
seeds = 1

[base]
cluster = "office-1gbe"
model = "lenet5"
batch_size = 32

[vary]
workers = [2, 4]
"cluster.nic.bandwidth" = ["1 Gbit/s", "100 Gbit/s"]
"""

JOBS = """
cluster = "two-racks-oversubscribed"

[[jobs]]
experiment = { model = "lenet5", workers = 2, steps = 2 }

[[jobs]]
start = "1 ms"
experiment = { model = "lenet5", workers = 4, steps = 2 }
"""

CLUSTER = """
title = "Two machines of eight GPUs"

[generator]
type = "star"
n_hosts = 2
bandwidth = "10 Gbit/s"
latency = "20 us"

[host]
device = "v100"
n_gpus = 8
inside = "nvlink_mesh"
nvlink_bandwidth = "20 GB/s"
nvlink_latency = "2 us"
"""

SMALL_CLUSTER = """
title = "Three machines on a switch"

[generator]
type = "star"
n_hosts = 3
bandwidth = "100 Mbit/s"
latency = "30 us"

[host]
device = "cpu-core"
"""

QUESTION = """
clusters = ["dgx1-v100-16"]
model = "bert-base"
workers = [16]
batch_sizes = [64]
strategies = [{ type = "splits", micro_batch = [1, 2], stage = [1, 3] }, { type = "all-reduce" }]
target = { throughput = "500 samples/s" }
base = { precision = "fp16" }
"""

RUNS = """\
workers,batch_size,throughput (images/s)
1,32,290
2,32,560
4,32,1080
8,32,2050
"""

CONV_RUNS = """\
model,cluster,workers,batch_size,precision,step_time (ms)
resnet50,dgx1-v100,1,32,fp16,45.2
resnet50,dgx1-v100,1,128,fp16,150.8
resnet50,dgx1-v100,8,32,fp16,55.6
resnet50,dgx1-v100,8,128,fp16,161.2
"""

#: what PyTorch's profiler writes of a rank of eight: steps of 4.2 s
TRACE = json.dumps(
    {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1, "ts": i * 4.2e6,
             "dur": 4.2e6}
            for i in range(3)
        ],
    }
)  # fmt: skip

CONFIG = """\
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
 "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
 "max_position_embeddings": 2048, "tie_word_embeddings": true}
"""

MEGATRON = """\
MODEL="--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL --micro-batch-size 4
"""

TRAINING = """
cluster = "office-1gbe"
model = "digits-cnn"
workers = 2
batch_size = 32

[training]
data = "digits"
rate = 0.1
epochs = 1
"""


def nccl_tests(n_ranks: int, *, named: bool) -> str:
    """Return an all-reduce at 100 GB/s of bus bandwidth with 20 us, as nccl-tests prints it; `named` with its ranks."""
    lines = ["# nThread 1 nGpus 8"]
    if named:
        lines += [f"#  Rank {i:2d} Group  0 Pid   {700 + i} on  node0 device {i:2d} [00] V100" for i in range(n_ranks)]
    lines.append("#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong")
    factor = 2.0 * (n_ranks - 1) / n_ranks
    for size in (2**16, 2**18, 2**20, 2**22, 2**24, 2**26):
        seconds = 20e-6 + size * factor / 100e9
        rate = size / seconds / 1e9
        one = f"{seconds * 1e6:.2f} {rate:.2f} {rate * factor:.2f} 0"
        lines.append(f"  {size}  {size // 4}  float  sum  -1  {one}  {one}")
    return "\n".join(lines) + "\n"


def iperf3(bandwidth: float) -> str:
    """Return 10 s of one stream at `bandwidth` bit/s, as ``iperf3 -J`` writes it."""
    nbytes = bandwidth / 8.0 * 10.0
    received = {"start": 0, "seconds": 10.0, "bytes": nbytes, "bits_per_second": bandwidth}
    start = {"version": "iperf 3.18", "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0}}
    return json.dumps({"start": start, "intervals": [], "end": {"sum_sent": received, "sum_received": received}})


def nvidia_smi(n_gpus: int) -> str:
    """Return ``nvidia-smi topo -m`` of a machine whose GPUs have one NVLink between any two."""
    lines = ["".join(f"\tGPU{i}" for i in range(n_gpus)) + "\tCPU Affinity\tNUMA Affinity"]
    for i in range(n_gpus):
        lines.append(f"GPU{i}" + "".join("\t X " if i == j else "\tNV1" for j in range(n_gpus)) + "\t0-15\t0")
    return "\n".join(lines) + "\n"


NCCL_TOPOLOGY = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <pci busid="0000:41:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:47:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1">
          <nvlink target="0000:48:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:48:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:47:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
    </pci>
  </cpu>
</system>
"""

GRAPHML = """<?xml version="1.0" encoding="utf-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
  <key attr.name="label" attr.type="string" for="node" id="d0"/>
  <key attr.name="Colour" attr.type="string" for="edge" id="d1"/>
  <graph edgedefault="undirected">
    <node id="0"><data key="d0">Perth</data></node>
    <node id="1"><data key="d0">Sydney</data></node>
    <node id="2"><data key="d0">Hobart</data></node>
    <edge source="0" target="1"><data key="d1">red</data></edge>
    <edge source="1" target="2"/>
  </graph>
</graphml>
"""

GPU_RUNS = """\
model,cluster,workers,strategy,batch_size,gradient_dtype,tokens_per_s
mpt-13b+seq=2048,roce-h100+n_hosts=1,8,fsdp+micro_batch=2,16,fp32,38337
mpt-1b+seq=2048,roce-h100+n_hosts=1,8,fsdp+micro_batch=14,112,fp32,363645
mpt-760m+seq=2048,roce-h100+n_hosts=1,8,fsdp+micro_batch=24,384,fp32,505172
"""
