"""Describe your own cluster with networkx, then simulate it.

Two workstations with two GPUs each and one with a single, slower GPU are connected by an office switch.
"""

import networkx as nx

import ddlsim

lab = nx.Graph(name="my lab")
lab.add_node("switch", kind="switch")
for name, device, uplink in (("anna", "p100", "10 Gbit/s"), ("bert", "p100", "10 Gbit/s"), ("cora", "m60", "1 Gbit/s")):
    lab.add_node(name, kind="host", device=device)
    lab.add_edge(name, "switch", bandwidth=uplink, latency="20 us", kind="ethernet")

for strategy in (ddlsim.AllReduce("ring"), ddlsim.AllReduce("auto"), ddlsim.ParameterServer(1, "colocated")):
    result = ddlsim.simulate(lab, model="resnet18", strategy=strategy, batch_size=32)
    print(f"{strategy.label:<34} {result.throughput:6.1f} images/s, efficiency {result.efficiency:.0%}")
    print(f"    {result.bottleneck}")
