"""CaffeOnSpark (Yahoo, 2016): synchronous SGD with Caffe on Hadoop clusters. Each machine is the server of a shard.

Executors pull the parameters, compute gradients, and push them to the machines that own the shards, over Ethernet or
InfiniBand. The authors' slides (Feng, Shi and Jain 2016, CaffeOnSpark: deep learning on Spark cluster) report "19x
speedup (est.)" without the number of GPUs. Machines: 4 boards of Tesla K80 with two GPUs each (Yahoo Hadoop blog,
2015); 32 images per GPU.
"""

import ddlsim
from ddlsim.cluster import MultiGpu, star


def cluster(machines: int, bandwidth: str, latency: str) -> ddlsim.Cluster:
    host = MultiGpu(8, "pcie_tree", "k80")
    return ddlsim.load_cluster(star(machines, bandwidth=bandwidth, latency=latency, efficiency=0.95, host=host))


NETWORKS = {"InfiniBand, 56 Gbit/s": ("54.5 Gbit/s", "1 us"), "Ethernet, 10 Gbit/s": ("10 Gbit/s", "15 us")}
print("                                     GPUs:     8     16     24     32   published: 19, number of GPUs unknown")
for model in ("alexnet", "googlenet"):
    alone = ddlsim.simulate(cluster(1, *NETWORKS["Ethernet, 10 Gbit/s"]), model, ddlsim.AllReduce(), 32, 1, steps=2)
    for name, (bandwidth, latency) in NETWORKS.items():
        speedups = []
        for machines in (1, 2, 3, 4):
            servers = ddlsim.ParameterServer(machines, "colocated", overlap="none", local_reduction=True)
            result = ddlsim.simulate(cluster(machines, bandwidth, latency), model, servers, 32, steps=2, warmup=1)
            speedups.append(result.throughput / alone.throughput)
        print(f"{model:<12}{name:<32}" + "".join(f"{speedup:7.1f}" for speedup in speedups))
print("""
Why they differ: 19 would be the result for GoogLeNet on 24 GPUs, but the slides name neither the network nor the batch
size nor the number of GPUs. AlexNet has 244 MB of gradients and little computation, so most of its time is lost to the
sums inside a machine, over PCIe. Spark itself only starts the executors; reading from HDFS is not simulated.""")
