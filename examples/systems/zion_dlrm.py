"""Zion (Naumov et al. 2020, arXiv:2003.09518): recommendation models on 8 accelerators and 8 CPUs with their memory.

The abstract and the talk at Hot Chips 31 report no throughput. Their point is that tables outgrow the accelerators'
memory, and that the CPUs' memory (about 2 TB in 8 sockets, from memory) holds the tables while accelerators compute. In
this script, 8 V100 of 32 GB in a hybrid cube mesh represent the accelerators, each with 200 GB behind a cache, and a
step has 65,536 samples.
"""

import ddlsim
from ddlsim.cluster import MultiGpu, star

host = MultiGpu(8, "hybrid_cube_mesh", "v100-32g", nvlink_bandwidth="20 GB/s")
CLUSTER = ddlsim.load_cluster(star(1, bandwidth="100 Gbit/s", latency="1 us", host=host))
PLACES = {
    "accelerators only": None,
    "with CPUs, 10 GB/s each": ddlsim.HostMemory("200 GB", "10 GB/s"),
    "with CPUs, 80 GB/s each": ddlsim.HostMemory("200 GB", "80 GB/s"),
}

print("samples/s                    " + "".join(f"{name:>26}" for name in PLACES))
for model in ("dlrm-criteo", "dlrm-criteo-large", "dlrm-criteo-xlarge"):
    figures = []
    for memory in PLACES.values():
        try:
            strategy = ddlsim.EmbeddingParallel("row-wise", host=memory)
            result = ddlsim.simulate(CLUSTER, model, strategy, batch_size=65536, steps=3, warmup=1)
            figures.append(f"{result.throughput:,.0f}")
        except ddlsim.ConfigError:
            figures.append("do not fit")
    nbytes = 4 * sum(layer.n_params for layer in ddlsim.load_model(model).layers if layer.type == "embedding_bag")
    print(f"{model:<19}{nbytes / 1e9:5.0f} GB   " + "".join(f"{figure:>26}" for figure in figures))

NVIDIA = (  # NVIDIA DeepLearningExamples, PyTorch DLRM: README.md; samples per GPU and step
    ("8 x A100, large", "dgx-a100-pod", "a100-80g", 8, "dlrm-criteo-large", 8192, {"tf32": 11.4e6, "fp16": 16.5e6}),
    ("1 x A100, small", "dgx-a100-pod", "a100-80g", 1, "dlrm-criteo", 65536, {"tf32": 2.88e6, "fp16": 4.02e6}),
    ("1 x V100, small", "dgx1-v100-16", "v100-32g", 1, "dlrm-criteo", 65536, {"fp32": 0.672e6, "fp16": 2.09e6}),
)
LAYOUT = ddlsim.EmbeddingParallel("table-wise", table_optimizer="sgd", indices="local", bottom_mlp="one rank")
print("\nNVIDIA's DLRM, 10^6 samples/s  precision  published  simulated")
for name, cluster, device, gpus, model, batch, rows in NVIDIA:
    for precision, published in rows.items():
        result = ddlsim.simulate(
            cluster, model, LAYOUT, batch * gpus, gpus, device=device, precision=precision, steps=3, warmup=1
        )
        print(f"{name:<29}  {precision:>9}  {published / 1e6:9.2f}  {result.throughput / 1e6:9.2f}")
print("""
Published: no samples/s, only that models whose tables outgrow 8 accelerators can be trained on Zion. The simulation
agrees: 452 GB do not fit the accelerators, and with the CPUs' memory they take hardly more time, because nine of ten
rows are assumed to be in the cache, and these models look up one row of each table. For models that look up dozens of
rows, the links to the CPUs would matter. Nothing is fitted to NVIDIA's rows: the catalogue's efficiencies are those of
ResNet-50, and DLRM's products of 65,536 rows reach more in TF32 and fp32. In mixed precision, 8,192 samples per GPU are
predicted too fast. The cause is unknown; it is not launches, because this code replays a CUDA graph on an A100.""")
