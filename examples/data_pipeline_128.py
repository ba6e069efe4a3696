"""Can the data pipeline keep up with 128 V100?

ResNet-50 on 16 cloud machines of 8 GPUs reads 36,600 images per second, which is 4.2 GB/s of JPEG files, from one
storage system of 2 GB/s that all machines share. A core is assumed to decode and augment 100 images per second.
"""

import ddlsim
from ddlsim import Cache, Experiment, Input
from ddlsim.cluster import with_storage

cluster = with_storage("cloud-25g-16x8-v100", "nfs0", read="2 GB/s", write="1 GB/s", bandwidth="100 Gbit/s")
experiment = Experiment(cluster, "resnet50", batch_size=64, workers=128, steps=20, warmup=20)


def read(cpu_workers=48, **fields):
    return Input("imagenet", storage="nfs0", prep_seconds="10 ms", cpu_workers=cpu_workers, prefetch=4, **fields)


sources = {
    "data in memory    ": None,
    "storage, first epoch": read(),
    "LRU (page cache), 64 GB": read(cache=Cache("lru", "64 GB")),
    "MinIO cache, 64 GB": read(cache=ddlsim.minio_cache("64 GB")),
    "partitioned, 16 x 64 GB": read(cache=ddlsim.partitioned_cache("64 GB")),
    "Shi et al., SSD of 2 GB/s": read(cache=ddlsim.multi_level_cache("64 GB", "400 GB", "2 GB/s")),
    "the same, 16 cores": read(cpu_workers=16, cache=ddlsim.multi_level_cache("64 GB", "400 GB", "2 GB/s")),
}
print("source of the samples       samples/s   waits for input   waits for others")
for name, source in sources.items():
    result = ddlsim.simulate(experiment.with_(input=source))
    shares = result.shares
    print(f"{name:26s} {result.throughput:10,.0f} {shares.get('input', 0.0):12.1%} {shares['waiting']:14.1%}")

save = ddlsim.Checkpoints("30 min", to="nfs0")
print("\na checkpoint to the same storage takes", end=" ")
print(f"{ddlsim.simulate(experiment.with_(checkpoints=save)).failure_timeline.timeline.cost.stall:.2f} s")
