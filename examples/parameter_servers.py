"""How many parameter servers does a training run need?

To hide push and pull behind the computation of one step, k servers must carry N gradients in each direction in
that time: k >= N S / (B T) with full-duplex links (Zou et al. 2017, lemma 2, with duplex made explicit).
"""

import math

import ddlsim

cluster = ddlsim.load_cluster("fat-tree-k8-10g")
workers = 32
base = ddlsim.Experiment(cluster, "resnet50", batch_size=32, workers=workers, steps=4, warmup=1)

alone = ddlsim.simulate(base.with_(workers=1))
bandwidth = float(cluster.channel_capacity.max())
needed = math.ceil(workers * alone.workloads[0].gradient_nbytes / (bandwidth * alone.step_time))
print(f"{workers} workers, step {1e3 * alone.step_time:.0f} ms: the lemma asks for {needed} servers")

print("servers  synchronous images/s  efficiency  asynchronous images/s  mean staleness")
for servers in (1, 2, 4, 8, 16, 32):
    sync = ddlsim.simulate(base.with_(strategy=ddlsim.ParameterServer(servers)))
    free = ddlsim.simulate(base.with_(strategy=ddlsim.AsyncParameterServer(servers)))
    print(
        f"{servers:7d}  {sync.throughput:20.1f}  {sync.efficiency:10.1%}  {free.throughput:21.1f}  "
        f"{free.mean_staleness:14.2f}"
    )
