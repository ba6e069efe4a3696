"""A small well-formed document of every format that ddlsim reads."""

import json
import sys
from pathlib import Path

import networkx as nx

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "imports"))  # the readers of other tools' files have samples there

from test_imports_graphml import YED  # noqa: E402
from test_imports_horovod import FUSED, listed  # noqa: E402
from test_imports_kineto import gpu_events  # noqa: E402
from test_imports_mllog import V06  # noqa: E402
from test_imports_nccl_tests import headless  # noqa: E402
from test_imports_nccl_topology import AMD, SMALL  # noqa: E402
from test_imports_simgrid import DOGBONE, HEAD  # noqa: E402
from test_imports_sniff import SAMPLES  # noqa: E402

GENERATED = """
name = "generated"
title = "Two hosts"
sources = ["here"]
notes = ["so"]
routing = "shortest"
switch_power = "300 W"
[generator]
type = "star"
n_hosts = 2
bandwidth = "25 Gbit/s"
latency = "10 us"
efficiency = 0.9
source = "there"
[host]
n_gpus = 2
inside = "nvswitch"
device = "v100"
nvlink_bandwidth = "25 GB/s"
nvlink_latency = "1 us"
pcie_bandwidth = "12 GB/s"
n_pcie_switches = 2
n_nics = 2
speed = 0.5
send_overhead = "1 us"
reduce_bandwidth = "10 GB/s"
price = "3 USD/h"
[link]
frame_header = "66 B"
frame_payload = "1448 B"
burst = "1 MB"
reverse_load = 0.02
transport = "tcp-reno"
connections = 2
flow_rate = "5 Gbit/s"
window = "3 MiB"
rendezvous = "64 KiB"
loss = 0.001
unordered = true
warm = true
queued_acks = true
window_spread = 0.4
buffer = "128 KiB"
sharing = "fifo"
kinds = ["nic"]
"""
EXPLICIT = """
[[hosts]]
name = "a"
device = "v100"
send_overhead = "1 us"
[[hosts]]
name = "b"
count = 2
n_gpus = 1
[[switches]]
name = "s"
count = 1
power = "100 W"
[[links]]
between = ["*[ab]*", "s0"]
bandwidth = "1 Gbit/s"
reverse_bandwidth = "2 Gbit/s"
latency = "10 us"
efficiency = 0.9
kind = "nic"
burst = "1 MB"
[[links]]
between = ["a", "b0"]
bandwidth = "1 Gbit/s"
latency = "1 us"
shared = true
[[routes]]
path = ["a", "s0", "b1.pcie0"]
source = "x"
"""
_RATES = 'bandwidth = "1 Gbit/s"\nlatency = "1 us"\n'
GENERATORS = {
    "star": "n_hosts = 3\nshared = true",
    "ring": 'n_hosts = 3\nreverse_bandwidth = "2 Gbit/s"',
    "line": "n_hosts = 3",
    "fully-connected": "n_hosts = 3",
    "torus": "sizes = [2, 3]",
    "hypercube": "n_dims = 2",
    "leaf-spine": "n_leaves = 2\nhosts_per_leaf = 2\nn_spines = 2\noversubscription = 2.0\nrail_optimised = false",
    "fat-tree": 'k = 4\ntrunk_bandwidth = "2 Gbit/s"\ntrunk_latency = "1 us"',
    "racks": "n_racks = 3\nhosts_per_rack = 2\noversubscription = 2.0",
    "two-racks": "hosts_per_rack = 2",
    "dragonfly": "n_groups = 3\ngroup_shape = [2, 2]\nhosts_per_router = 1\nglobal_links = 1\nlocal_cables = [1, 2]\n"
    'n_hosts = 8\nlocal_bandwidth = "2 Gbit/s"\nglobal_latency = "2 us"',
}
CALIBRATED = """
[generator]
type = "star"
n_hosts = 2
bandwidth = "10 Gbit/s"
latency = "10 us"
[calibration]
ddlsim = "0.1.0"
sources = ["x"]
notes = ["y"]
spread = 0.01
dof = 3.0
covariance = [[0.001]]
[[calibration.parameters]]
name = "between.latency"
value = "11 us"
low = "10 us"
high = "12 us"
file = "10 us"
nbytes = [1, 1000]
informed = 0.9
prior = "10 us"
prior_factor = 2.0
bounds = ["1 us", "1 ms"]
[[calibration.curves]]
operation = "all_reduce"
backend = "nccl"
algorithm = "ring"
inside = false
per_message = 1.1
sizes = [1000]
per_byte = [1.0, 1.2]
covariance = [[0.1, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.1]]
spread = 0.02
dof = 2.0
nbytes = [1, 10000]
ranks = [2, 2]
[[calibration.compute]]
model = "resnet50"
c0 = "1 ms"
c1 = "2 ms"
covariance = [[0.1, 0.0], [0.0, 0.1]]
spread = 0.01
dof = 2.0
batch_sizes = [1, 2]
[calibration.jitter]
type = "lognormal"
shape = 0.05
base = "10 ms"
ks = 0.1
p_value = 0.5
n_samples = 10
[calibration.measured]
residuals = [{ operation = "all_reduce", backend = "nccl", n_ranks = 2, n_hosts = 2, nbytes = 1000, measured = "1 ms", predicted = "1 ms", fitted = true }]
"""  # noqa: E501
MODEL = """
title = "All kinds"
input = [3, 16, 16]
trainable = false
sources = ["x"]
layers = [
  { type = "conv", name = "first", channels = 8, kernel = 3, stride = 1, padding = 1, groups = 1, bias = false },
  { type = "batch_norm", eps = 1e-5, momentum = 0.1 },
  { type = "relu" },
  { block = "twice", repeat = 2, name = "part", width = 8 },
  { type = "residual", body = [{ type = "conv", channels = 8, kernel = [1, 1] }], shortcut = [] },
  { type = "concat", branches = [[{ type = "max_pool", kernel = 2 }], [{ type = "avg_pool", kernel = 2, ceil_mode = true }]] },
  { type = "side", body = [{ type = "flatten" }, { type = "dense", units = 3 }] },
  { type = "adaptive_avg_pool", size = 1 },
  { type = "flatten" },
  { type = "dropout", rate = 0.5, option = "aux" },
  { type = "dense", units = 10, bias = true },
]
[blocks.twice]
defaults = { depth = 1 }
layers = [{ type = "conv", channels = "$width", kernel = 3, padding = "$depth" }, { type = "tanh" }]
"""  # noqa: E501
TOKENS = """
title = "Tokens"
input = [16]
layers = [
  { type = "embedding", vocabulary = 100, dim = 8, positions = 16, types = 2 },
  { type = "attention", heads = 2 },
  { type = "layer_norm", eps = 1e-5 },
  { type = "tied_dense", units = 100 },
  { type = "take", count = 1 },
]
"""
EXPERIMENT = """
cluster = "office-1gbe"
model = "lenet5"
workers = 4
batch_size = 32
steps = 3
warmup = 1
accumulation = 2
precision = "fp32"
device = "v100"
speed = [1.0, 0.5, 1.0, 1.0]
seed = 7
max_time = "10 s"
time_model = "resnet50"
[strategy]
type = "all-reduce"
algorithm = "ring"
overlap = { type = "ddp", cap = "1 MiB" }
[compute]
type = "affine"
c0 = "10 ms"
c1 = "1 ms"
[jitter]
type = "lognormal"
cv = 0.05
[training]
data = "digits"
epochs = 2.0
optimizer = { type = "momentum", beta = 0.9 }
rate = { type = "warm-up", n_epochs = 1, then = { type = "cosine", base = 0.1, n_epochs = 10 } }
target_accuracy = 0.9
sharding = { type = "dirichlet", alpha = 0.5 }
[compression]
compressor = { type = "error-feedback", inner = { type = "top-k", density = 0.01 } }
[[slowdowns]]
ranks = [0, 1]
start = "1 s"
duration = "2 s"
factor = 2.0
"""
STRATEGIES = """
cluster = "office-1gbe"
model = "lenet5"
[strategy]
type = "async-parameter-server"
servers = 2
staleness_scaling = { type = "inverse" }
[compute]
type = "measured"
batch_size = 32
throughput = "100 images/s"
[jitter]
type = "pareto"
a = 3.0
"""
STUDY = """
seeds = 2
design = "latin-hypercube"
n_points = 3
design_seed = 1
[base]
cluster = "office-1gbe"
model = "lenet5"
steps = 2
[vary]
workers = [2, 4]
strategy = { ring = { type = "all-reduce", algorithm = "ring" }, ps = { type = "parameter-server", servers = 2 } }
compression = ["none", { type = "top-k", density = 0.01 }]
"cluster.nic.bandwidth" = { low = "1 Gbit/s", high = "10 Gbit/s", log = true }
accumulation = { low = 1, high = 4, integer = true }
"model, batch_size" = [["lenet5", 8], ["resnet50", 4]]
"""
MEASUREMENTS = """experiment,operation,n_ranks,n_hosts,median_s,nbytes,min_s,p25_s,p75_s,max_s,n_repetitions,backend,dtype,batch_size,model,note
point_to_point,one_way,2,2,1.2 ms,1 MB,0.001,0.0011,0.0013,0.002,10,mpi,float32,,,said
collective,all_reduce,2,1,0.004,1048576,,,,,5,nccl,float32,,,
step,training,1,1,0.1,,,,,,3,,float32,32,resnet50,
"""  # noqa: E501
MEASUREMENTS_JSON = {
    "experiment": "collective", "operation": "all_reduce", "n_ranks": 2, "n_hosts": 1, "median_s": 0.004,
    "nbytes": 1048576, "min_s": 0.003, "max_s": "5 ms", "n_repetitions": 5, "backend": "nccl", "note": "x",
}  # fmt: skip
RUNS = """workers,batch_size,throughput (images/s),accumulation,nodes,model,strategy,algorithm,precision,note
1,32,100,1,1,resnet50,all-reduce,ring,fp32,x
4,32,350,1,4,resnet50,all-reduce,ring,fp32,
"""
STEP_TIMES = "workers,batch_size,step_time\n1,32,320 ms\n2,32,330 ms\n"


def graph(kind):
    """A graph with every attribute that :mod:`ddlsim.cluster.graphs` reads."""
    made = kind(name="g", title="t", sources=["a"], notes=["b"], routing="shortest", routes=[["a", "s", "b"]])
    made.add_node("a", kind="host", device="v100", speed=0.5, send_overhead=1e-6, price="3 USD/h")
    made.add_node("b", kind="gpu", host="m", recv_overhead="1 us", reduce_time=1e-10, device_price=1e-4)
    made.add_node("s", kind="switch", power="100 W")
    rates = {"bandwidth": "1 Gbit/s", "latency": 1e-6, "efficiency": 0.9, "kind": "nic"}
    details = {"frame_header": 66.0, "frame_payload": "1448 B", "burst": 1e5, "reverse_load": 0.02,
               "transport": "tcp-cubic", "connections": 2, "flow_rate": "5 Gbit/s", "window": 3e6, "loss": 1e-3,
               "rendezvous": "64 KiB", "unordered": True, "warm": True, "buffer": "128 KiB",
               "queued_acks": True, "window_spread": 0.4, "sharing": "fifo"}  # fmt: skip
    for u, v in (("a", "s"), ("s", "a"), ("b", "s"), ("s", "b")) if made.is_directed() else (("a", "s"), ("b", "s")):
        made.add_edge(u, v, **rates, **details)
    return made


def graphml():
    made = graph(nx.MultiDiGraph)
    for key in ("sources", "notes", "routes"):
        made.graph[key] = json.dumps(made.graph[key])
    return "\n".join(nx.generate_graphml(made))


def importers():
    """(kind, language, text) of every format of other tools, some more than once."""
    languages = {"kineto": "json", "horovod": "json", "iperf3": "json", "nccl-topology": "xml", "simgrid": "xml",
                 "lstopo": "xml", "graphml": "xml", "astra": "yaml", "throughput": "csv"}  # fmt: skip
    yield from ((kind, languages.get(kind, "lines"), text) for kind, text in SAMPLES.items())
    trace = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}}
    yield "kineto", "json", json.dumps({**trace, "traceEvents": gpu_events()[:6]})
    yield "horovod", "json", json.dumps(json.loads(listed(FUSED) + "\n]")[:11])
    yield "nccl-topology", "xml", SMALL
    yield "nccl-topology", "xml", AMD.replace("GCN", "gfx90a")
    yield "graphml", "xml", YED.replace("LABEL", "2 x 10 Gbps")
    yield "mllog", "lines", "\n".join(V06)
    yield "nccl-tests", "lines", headless("all_gather", 4) + headless("all_reduce", 8, old=True, listed=[0, 7])
    zones = HEAD.replace('<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n', "") + DOGBONE + "</platform>"
    yield "simgrid", "xml", zones
    yield "astra", "yaml", "topology: [Ring, Switch]\nnpus_count: [4, 2]\nbandwidth: [50, 25.0]\nlatency: [500, 1.0]\n"
