"""The guidelines of Zou et al. 2017 (arXiv:1709.06622): batch and convolutions, number of GPUs, parameter servers.

We could not read the paper's own measurements (MXNet, AlexNet, GPUs of AWS). The script compares its rules with MXNet's
published run of the same kind: AlexNet, batch 512, up to 256 K80 of p2.16xlarge with a parameter server on each machine
(apache/mxnet, example/image-classification/README.md): 457 images/s on one GPU and 61,938 on 256.
"""

import ddlsim
from ddlsim.planner import convolutions, guidelines

MODEL, BATCH, CLUSTER = "alexnet", 512, "aws-p2-16xlarge-16"
PUBLISHED = {1: 457.07, 2: 870.43, 4: 1514.8, 8: 2852.5, 16: 4244.18, 32: 7945.57, 64: 15840.52, 128: 31334.88,
             256: 61938.36}  # fmt: skip
model, device = ddlsim.load_model(MODEL), ddlsim.load_device("k80")

print("1. algorithm of each convolution of VGG-A within the memory that the batch leaves free (integer program)")
vgg = ddlsim.load_model("vgg-a")
for batch in (16, 64, 128):
    left = device.memory_nbytes - ddlsim.fits("vgg-a", "k80", batch).memory.total
    if left < 0.0:
        print(f"batch {batch:3}: does not fit")
        continue
    chosen = convolutions.choose_algorithms(convolutions.convolution_options(vgg, device, batch), left)
    seconds = sum(each.seconds for each in chosen.values())
    names = ", ".join(f"{sum(each.name == name for each in chosen.values())} {name}"
                      for name in sorted({each.name for each in chosen.values()}))  # fmt: skip
    print(f"batch {batch:3}: {left / 1e9:4.1f} GB left, {seconds / batch * 1e3:5.2f} ms per image: {names}")

compute = ddlsim.Measured(BATCH / PUBLISHED[1], BATCH)
nbytes, machines, nic = model.gradient_nbytes(), 16, 20e9 / 8
servers = guidelines.n_parameter_servers(nbytes, machines, nic, compute.step_time)
print(f"\n2. servers with which {machines} machines hide {nbytes / 1e6:.0f} MB behind {compute.step_time:.2f} s:"
      f" {servers}")  # fmt: skip
for n in sorted({1, servers, machines}):
    strategy = ddlsim.ParameterServer(n, "colocated", local_reduction="star")
    result = ddlsim.simulate(CLUSTER, MODEL, strategy, BATCH, 256, steps=2, warmup=1, compute=compute)
    exposed = result.shares["communication"]
    print(f"{n:4} servers: {result.throughput:9,.0f} images/s, {exposed:6.1%} of the time exposed")

print(
    "\n3. number of GPUs: efficiency (1 + R)/(1 + G R), R from the published run on two, compared with the measurements"
)
efficiency = PUBLISHED[2] / PUBLISHED[1] / 2
ratio = guidelines.largest_overhead_ratio(2, efficiency)
print("  GPUs  published   rule  simulated")
for n, throughput in PUBLISHED.items():
    servers = -(-n // 16)
    star = ddlsim.ParameterServer(servers, "colocated", local_reduction="star")  # dist_device_sync sums on a GPU
    strategy = star if n > 1 else ddlsim.AllReduce()
    result = ddlsim.simulate(CLUSTER, MODEL, strategy, BATCH, n, steps=2, warmup=1, compute=compute)
    rule = guidelines.scaling_efficiency(ratio, n)
    print(f"{n:6}  {throughput / PUBLISHED[1] / n:9.1%} {rule:6.1%}  {result.efficiency:9.1%}")
print("""
Why they differ: the rule assumes a fixed overhead and a batch that is divided among the GPUs, so its efficiency keeps
falling. In the published run, every GPU has its own batch, and from 16 GPUs on, the efficiency stays almost constant,
as in the simulation. The loss occurs inside a machine, where 16 dies copy gradients to one of them. At the rate of
PCIe, a step hides this copy; in the published run, it did not. The accuracy page fits that rate to one row and compares
the others. The rule and the simulation agree that one server is too few, but the rule's answer of three ignores that
servers share links with workers.""")
