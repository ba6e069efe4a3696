"""The families of measurements that the accuracy report consists of: target, what calibrates them, causes of misses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from accuracy import (
    aws,
    collectives,
    coverage,
    hybrids,
    megatron,
    memory,
    minicluster,
    minicluster_failures,
    minicluster_jobs,
    minicluster_splits,
    minicluster_storage,
    minicluster_training,
    mosaic_fsdp,
    own_runs,
    published,
    recommendation,
    stacks,
    strong,
    sweeps,
    techniques,
    torchgpipe,
    vtrain,
)  # fmt: skip
from accuracy.rows import Omitted, Row, mean_error

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """A section of the report.

    limit       mean absolute error to reach on the rows that `counts`
    remark      what the calibration found, or how the result depends on it
    left_out    what is not predicted, and why
    causes      (part of a case's name, part of a row's name, what explains the difference); empty parts match all
    """

    key: str
    title: str
    limit: float
    script: str
    calibration: str
    rows: Callable[[], list[Row]]
    counts: Callable[[Row], bool] = lambda row: True
    causes: tuple[tuple[str, str, str], ...] = ()
    remark: Callable[[], str] = lambda: ""
    left_out: Callable[[], list[Omitted]] = list

    def cause(self, row: Row) -> str:
        """Return what explains a row's error, as far as it is known."""
        found = (why for case, what, why in self.causes if case in row.case and what in row.what)
        return next(found, "not explained")


def _of(library: str) -> Callable[[], list[Row]]:
    return lambda: [row for row in aws.rows() if row.case.startswith(library)]


def _copies() -> str:
    rates = {
        row.case: published.calibrated(run)[1]
        for row in published.rows()
        if row.fitted_on
        for run in published.runs()
        if run.kvstore and run.name == row.case
    }
    found = ", ".join(f"{rate * 1e-9:.2f} GB/s ({name})" for name, rate in rates.items() if rate is not None)
    return f"The copies inside a machine of MXNet's, calibrated on each run by itself: {found}.\n\n{_by_system()}"


def _by_system() -> str:
    """Return the mean of each system: many easy rows could hide a bad one."""
    systems: dict[str, list[Row]] = {}
    for row in published.rows():
        systems.setdefault(row.case.split("_")[0], []).append(row)
    means = ", ".join(f"{name} {mean_error(rows):.1%}" for name, rows in systems.items())
    return f"Mean by system: {means}."


def _interfaces() -> str:
    rates = {name: aws.parameters(name)["between.bandwidth"] * 8e-9 for name in aws.CONNECTIONS}
    messages = {name: [row for row in _of(name)() if "p2p" in row.case] for name in rates}
    found = "; ".join(
        f"{name} {rates[name]:.2f} Gbit/s, and the messages behind delays and rates with a mean error of "
        f"{mean_error(messages[name]):.1%}" for name in rates
    )  # fmt: skip
    return (
        f"Two messages between machines as they are give each library's rate: {found}. Interfaces that are not shaped "
        f"are unequal, and the slowest decides. Standard deviation of their times: {aws.left_one_out()}."
    )


def _other_thirds() -> str:
    found = []
    for first in (1, 2):
        rows = [row for row in collectives.rows(first=first) if "gpu_count" not in row.case]
        found.append(f"{mean_error(rows):.1%}")
    return (
        "The curves go through all calibrated sizes and are linear in the size between them, which was chosen on these "
        "sweeps: linear in the logarithms the mean is 8.8 %. "
        f"Calibrated on the other two thirds of the sizes it is {found[0]} and {found[1]}."
    )


FAMILIES = (
    Family(
        "weak", "Published weak scaling", 0.07, "published",
        "The row of one full machine gives the compute time; runs on a single machine: the one-device row. MXNet: the "
        "one-device row gives the compute time, the one-machine row the rate of copies inside the machine.",
        published.rows,
        causes=(
            ("paddle_v100_vgg16_fp32_b32", "", "the measured steps are those of a ring that overlaps with the backward "
             "pass and gets 8.1 (16 GPUs) and 8.0 GB/s (32) through the interface, two thirds of what NCCL assumes; a "
             "missing GPUDirect or contention with compute could do that, and the source does not say"),
            ("mxnet_k80_ps", "", "the servers' work hides behind the copies inside the machines, since everything "
             "travels as soon as it is ready; MXNet of 2017 waits in its main thread for each tensor's sum before it "
             "pushes the next one (src/kvstore/kvstore_dist.h, WaitToRead)"),
            ("tf_k80_ps_resnet152", "64", "as if pulling did not overlap with the backward pass (337 ms at the nominal "
             "rate, 334 ms measured); the tokens queued for each variable are not modelled"),
            ("tf_dgx1_p100", "", "AlexNet and VGG-16 lack the same time with the same number of devices (6 to 11, 9 to "
             "18 and 40 to 50 ms with 2, 4 and 8), whatever their bytes and tensors: a cost of the one process that "
             "drives all devices, it seems, which Inception-v3 with its variables on the CPU does not show"),
            ("theano_mpi_k80_vgg16", "8", "the *compute* part of the measured step is 23 % longer on 8 devices than on "
             "one (1.378 s, 1.120 s); a process beside each loads its input, how fast is not stated"),
            ("theano_mpi", "", "copies between the dies of a K80 reach about 6.5 GB/s and between sockets 3.5, not the "
             "12 and 6 GB/s that NCCL assumes for PCIe and QPI"),
        ),
        remark=_copies,
        left_out=lambda: [*published.left_out(), *coverage.left_out()],
    ),
    Family(
        "weak_device", "Published weak scaling from one device", 0.05, "published",
        "The row of one device gives the compute time; nothing else is read. Copies inside MXNet's machines have the "
        "rate that NCCL assumes for PCIe. Devices are as unequal as `Spread()` says, MXNet's share the input of "
        "`MXNET_INPUT`, and compute is `BESIDE_KERNELS` times slower beside NCCL's kernels: the library's values. "
        "Updates of Paddle in mixed precision and of TensorFlow's distributed sessions take the fixed times of the "
        "stacks `paddle-amp` and `tensorflow-distributed`, which come from three rows of 8 GPUs.",
        lambda: published.rows(machine=False),
        causes=(
            ("mxnet_k80_ps", "", "the input's share is half of what 16 GPUs lose; host memory that is not pinned, and "
             "pairs of K80 that reach each other only through it (a device has eight peers at most), are not modelled"),
            ("paddle_v100_vgg16_fp32_b32", "", "as from one machine"),
            ("theano_mpi", "", "as from one machine"),
            ("tf_dgx1_p100", "", "as from one machine"),
            ("tf_k80_ps_resnet152", "64", "as from one machine"),
            ("", "", "what a device loses beside the others of its machine (the processor's time for launches, input "
             "that the source does not describe): most of the error is there in the row of one full machine already"),
        ),
        left_out=lambda: published.left_out(machine=False),
    ),
    Family(
        "strong", "Strong scaling", 0.10, "strong",
        "The rows with the fewest devices, and with the most of another batch, give c0 + c1 b; a series of two rows "
        "takes c0 from the series of the same model with three (the median; of its own release if there are any). "
        "NVIDIA's table (dle_bert): its rows of one and of most machines give micro-step and update; it does not "
        "count for the target.",
        strong.rows, lambda row: row.case.startswith("mlperf"), left_out=strong.left_out, causes=
        (("mlperf07_dgxa100", "16 GPUs", "204 images per GPU take 12 % longer than the line between 408 and 45: a "
          "step is not quite affine, and two machines share the input of one global batch"),
         ("mlperf07_bert", "", "small runs skip padding (--unpad), large ones do not: other work per sequence")),
    ),
    Family(
        "techniques", "What techniques gain (ratio of throughputs)", 0.15, "techniques",
        "ByteScheduler: the one-machine row gives the rate of copies inside the machine, the catalogue's device the "
        "compute time. 1-bit Adam: the one-machine rows. DGC: the dense rows at 100 and 1 Gbit/s. Local SGD: tau = "
        "1 and 16, as the page does not state the network.",
        techniques.rows, left_out=techniques.left_out,
        causes=(
            ("localsgd", "", "the measured steps scatter around the line t_c + t_ar / tau (0.470, 0.467 and 0.446 s at "
             "tau = 2, 4, 8; on it lie 0.463, 0.446, 0.438)"),
            ("dgc", "100", "a step with DGC takes 10 ms longer than predicted, 2.5 ms longer than a dense one; "
             "PaddlePaddle's host waits for every all-gather (FLAGS_sync_nccl_allreduce), which may delay launches"),
            ("onebit", "32", "dense Adam is 30 % slower at 8 machines than 4.1 Gbit/s, the rate measured between two, "
             "allows (3.85 s a step, 2.98 s predicted)"),
            ("onebit", "", "the exchange of signs took two thirds of the time that 4.1 Gbit/s allows: many flows seem "
             "to get more than the single one of iperf"),
            ("bytescheduler_mxnet_ps_rdma_vgg16", "", "nearly all is hidden with slices, but the measured steps are 4 "
             "to 16 % longer than on one machine"),
            ("bytescheduler", "", "161 tensors of ResNet-50, most of them small: time per request (ps-lite's handling, "
             "the update in Python) is not modelled"),
        ),
    ),
    Family(
        "nccl", "AWS p3.2xlarge behind a shaped network: NCCL", 0.03, "aws",
        "Messages of two sizes between two machines as they are, without delay or shaped rate. All-reduces count.",
        _of("nccl"), lambda row: "p2p" not in row.case, left_out=aws.left_out,
        causes=(("p2p", "", "messages through a delay are measured as if half of it did not count, as when a sender is "
                 "done as soon as its last bytes are in the socket (not tested)"),
                ("nccl", "not shaped", "the slowest of these unequal interfaces decides; their spread is that of other "
                 "EC2 machines, and single sets of machines are faster or slower than the average one"),),
        remark=_interfaces,
    ),
    Family(
        "gloo", "AWS p3.2xlarge behind a shaped network: Gloo", 0.08, "aws",
        "Messages of two sizes between two machines as they are, without delay or shaped rate. All-reduces count.",
        _of("gloo"), lambda row: "p2p" not in row.case,
        causes=(("p2p", "", "the window seems to be 2.9 MiB, not the 3 MiB of Linux's default (not tested)"),
                ("gloo", "1 ms", "notifications queue behind segments, which is simulated (else it would be 23 %); "
                 "the rest is not explained"),),
    ),
    Family(
        "sweeps", "NCCL sweeps, 32 KiB to 16 GiB", 0.05, "collectives",
        "Sizes 0, 3, 6, ...; numbers of GPUs: the smallest (these do not count for the target).",
        collectives.rows, lambda row: "gpu_count" not in row.case,
        (("nccl_a100", "", "2 to 4 MiB take the same 101 us as 1 MiB: NCCL changes its protocol there, between two "
          "calibrated sizes"),),
        _other_thirds, collectives.left_out,
    ),
    Family(
        "nccl_alone", "NCCL from machine and size alone, 8 B to 16 GiB", 0.15, "sweeps",
        "One number each of EFA and of FasTrak, and the launches of eight kernels by one thread; the rows that gave "
        "them do not count (`accuracy/sweeps.py`).",
        sweeps.rows,
        causes=(
            ("infiniband", "", "the source does not state the machines; 8 to 32 MiB reach 98 GB/s of bus bandwidth, "
             "more than the 92 of large buffers, which NCCL's constants for trees of four machines do not allow"),
            ("one_thread", "", "kernels that one thread launches for all GPUs begin one after the other; beyond that, "
             "256 KiB to 32 MiB take up to 45 us longer than NCCL's constants say (not explained)"),
            ("pcie", "", "through memory of the host 8.2 GB/s arrive of the 10 that NCCL counts between two Skylakes"),
            ("p5_all_gather_2", "256 MiB", "the measured bandwidth falls from 128 to 256 MiB, and rises again (once)"),
            ("p5_all_gather_8", "1 GiB", "the measured bandwidth falls from 512 MiB to 1 GiB, and rises again (once)"),
            ("p5_all", "", "messages between machines wait for each other in the proxies of rings (not simulated)"),
            ("a3_mega", "KiB", "from 32 KiB on a step of 20 us that no setting explains (how FasTrak sends small "
             "messages is not published)"),
            ("a3_mega", "", "chunks of trees that have just filled the stages"),
            ("p5_1_machine", "", "the shortest collectives take 12.9 us, three less than the tuner's constants"),
        ),
        remark=sweeps.remark,
    ),
    Family(
        "minicluster", "Mini-cluster of network namespaces: messages and collectives", 0.02, "minicluster",
        "Point-to-point rows, and of the rows with delays the smallest message without one. Rows below 64 KiB and "
        "two-way traffic under cubic (which loses up to half of the rate to bunched acknowledgements, without loss or "
        "a busy processor) are shown and do not count.",
        lambda: minicluster.p2p_table(intervals=True).rows + minicluster.collective_table(intervals=True).rows,
        lambda row: row.note not in ("below 64 KiB", "two-way under cubic"), left_out=minicluster.left_out, causes=
        (("gloo_all_gather", "", "the measurements are bimodal, at 1 and 1.5 times the prediction: a rank that starts "
          "second may write its data before its readiness message, so that the two directions take turns (not tested)"),
         ("ps_sync", "", "not explained: one slow host takes 14 % longer than under fair sharing"),
         ("switch_buffer=128KiB", "", "near the limit some repetitions time out and others do not"),
         ("own_", "", "the wake-up of a process between steps, some 45 us a step, it seems (not tested)"),),
    ),
    Family(
        "training", "Mini-cluster of network namespaces: training steps and servers", 0.04, "minicluster_training",
        "The one-worker rows give the times of layers; the latency comes from point-to-point rows.",
        minicluster_training.rows, left_out=minicluster_training.left_out,
        # mean staleness is N - 1 in any closed system
        counts=lambda row: row.unit != "updates", causes=
        (("_real", "", "two workers compute on the two cores of one machine: the forward pass alone took 2.2 to 2.7 "
          "times as long as a single worker's at 50 and 100 Mbit/s (1.3 times in the last row), 1.03 to 1.06 times at "
          "200; with computing as slow as each row's own forward pass the seven rows are predicted within 2.4 % on "
          "average, 4.2 % at worst"),
         ("fixed", "1756", "equal workers that push together separate as one of BBR's flows gets ahead, left to "
          "chance here; with windows of 128 KiB 2 workers are 8 % too slow instead of 20 %, and 4 are 20 % too fast"),
         ("sync", "", "18 updates are counted, so that one is 5 %; the server's answers share its link side by side"),
         ("", "staleness", "few updates in a run (presumed)"),
         ("exp", "", "not explained"),),
    ),
    Family(
        "dlrm", "Recommendation models: DLRM on several GPUs", 0.12, "recommendation",
        "The one-GPU row of each framework, machine and precision gives the efficiency of matrix products; the smaller "
        "batch of several GPUs lowers it by what is left empty of waves of tiles. Without CUDA graphs the host "
        "launches kernels of PyTorch in the times of `megatron-2021`.",
        recommendation.rows,
        causes=(
            ("", "", "of the host only launches of kernels are modelled: the code waits for the GPU at the begin of "
             "each step, updates outside of the CUDA graph, and in mixed precision waits again to look for infinite "
             "gradients; its sparse SGD passes over the gradients of rows several times"),
        ),
        remark=recommendation.remark,
        left_out=recommendation.left_out,
    ),
    Family(
        "torchgpipe", "Pipelines with recomputation: torchgpipe on eight P40", 0.10, "torchgpipe",
        "One row of each model gives the efficiency of convolutions: AmoebaNet-D on two stages with one micro-batch, "
        "the others without a pipeline. Batches, cuts and what is recomputed are those of the benchmarks' code.",
        torchgpipe.rows,
        causes=(("amoebanet", "n4 m4", "not explained: four stages are measured 8 % faster than two, with cuts whose "
                 "slowest stage has three fifths of the time; the same stages with 32 micro-batches are not among "
                 "these rows"),),
        remark=torchgpipe.remark,
        left_out=torchgpipe.left_out,
    ),
    Family(
        "memory", "Memory of a GPU: torchgpipe on P40, and Megatron-LM as its paper computes it", 0.08, "memory",
        "Nothing. The rows of Megatron-LM are the paper's own formulas and do not count.",
        memory.rows, lambda row: not row.case.startswith("megatron"),
        causes=(
            ("amoebanet", "activations", "workspaces of cuDNN and the padded copies of AmoebaNet-D's factorized "
             "reductions are not modelled (their shares are not tested)"),
            ("unet", "whole batch", "not explained: weights, gradients and the tensors that PyTorch saves are 20.95 "
             "GiB together, more than was measured"),
            ("unet", "micro-batches", "workspaces of cuDNN are not modelled (their share is not tested)"),
        ),
    ),
    Family(
        "pipelines", "Mini-cluster of network namespaces: pipelines", 0.02, "minicluster_splits",
        "`calibration.csv` (messages between two idle hosts, the calls that hand over and fetch them, a sleep).",
        minicluster_splits.pipeline_rows, left_out=lambda: minicluster_splits.table("pipeline").omitted,
        causes=(("pipeline_1f1b", "", "how many bytes of a connection its host has in its queue: with a window of 182 "
                 "segments the rows of 1F1B from 256 KiB are 0.2 % off, with 364 0.7 % (chosen on these rows and "
                 "those of jobs together), without one 1.6 %"),),
    ),
    Family(
        "hybrids", "Mini-cluster of network namespaces: pipelines in replicas, tensor groups, shards", 0.03,
        "minicluster_splits", "As the pipelines.", minicluster_splits.hybrid_rows,
        left_out=lambda: minicluster_splits.table("hybrid").omitted,
        causes=(("tensor_ring", "16 KiB", "an idle link lets 4,542 bytes through at once, half of what a chunk has: "
                 "what is left is software, 0.31 ms a step measured, 0.39 predicted"),
                ("tensor_ring", "", "two cores serve all hosts, which copy and add at the same time (not modelled)"),
                ("_then_ring", "", "the fixed cost of a message is that of the large ones")),
    ),
    Family(
        "stopped", "Mini-cluster of network namespaces: workers that stand still", 0.03, "minicluster_failures",
        "As the pipelines; of these rows nothing.", minicluster_failures.failure_rows,
        left_out=lambda: minicluster_failures.failure_table().omitted,
    ),
    Family(
        "storage", "Mini-cluster of network namespaces: workers that read from one storage host", 0.01,
        "minicluster_storage", "As the pipelines; of these rows nothing.", minicluster_storage.rows,
        left_out=lambda: minicluster_storage.table().omitted,
    ),
    Family(
        "jobs", "Mini-cluster of network namespaces: jobs that share a trunk", 0.02, "minicluster_jobs",
        "As the pipelines; of these rows nothing.", minicluster_jobs.shared_rows,
        left_out=lambda: minicluster_jobs.table().omitted,
        causes=(("job_alone", "", "two cores serve all hosts, which copy and add at the same time (not modelled)"),),
    ),
    Family(
        "background", "Mini-cluster of network namespaces: a job beside a background flow", 0.15, "minicluster_jobs",
        "As the pipelines; of these rows nothing.", minicluster_jobs.background_rows,
        causes=(("background", "greedy", "the flow fills the queue of 256 KiB and loses packets, and so does the ring, "
                 "which waits for time-outs"),
                ("background", "beside", "lost packets are not modelled")),
    ),
    Family(
        "mosaic_fsdp", "Transformers with PyTorch FSDP: several machines from one", 0.04, "mosaic_fsdp",
        "The rows of one machine of 8 GPUs give four numbers of the catalogue: the share of matrix products' rate and "
        "the element-wise traffic of the stack `llm-foundry`, and the rate of Triton's attention on H100 and on A100.",
        mosaic_fsdp.rows,
        causes=(
            ("A100 40GB_1b", "32 GPUs", "each GPU is 18 % slower here than in the rows of 8 and 16 GPUs with smaller "
             "micro-batches, while larger and smaller models lose nothing; the source does not say why"),
            ("H100 80GB_13b", "16 GPUs", "not explained: the smallest micro-batches of the series (4,096 tokens), with "
             "collectives under way a third of the time; the row of 8 GPUs, which was fitted, misses by as much"),
        ),
        remark=mosaic_fsdp.remark,
        left_out=mosaic_fsdp.left_out,
    ),
    Family(
        "own_runs", "Transformers with FSDP: many GPUs from a few runs of few", 0.08, "own_runs",
        "Two numbers of the stack `fsdp-eager`, as calibrating that stack fits them to rows "
        "of 8 GPUs with 2,048 tokens (MPT: three on H100, five on A100), and to Llama 2 7B on 128 A100 (fms-fsdp).",
        own_runs.rows,
        causes=(
            ("A100 40GB", "32 GPUs, mpt-1b", "as in the rows below that the catalogue predicts: not explained"),
            ("A100 40GB", "", "the smallest models, of which no row was fitted"),
            ("H100 80GB", "", "the fitted rows of 13B and 1B differ by 15 %, in micro-batches of 2 and 14"),
            ("fms-fsdp", "96 GPUs", "fitted on A100: the H100 computes in less time, and the network is exposed"),
        ),
        remark=own_runs.remark,
    ),
    Family(
        "vtrain_single", "Megatron-DeepSpeed on one machine of 8 A100", 0.05, "vtrain",
        "Two halves: rows with an even number are predicted by what is fitted to the odd ones (the rate of matrix "
        "products and four times of the stack `megatron-2021`, by least squares, `accuracy/kernels.py`), and the other "
        "way round.",
        vtrain.single_rows,
        causes=(
            ("h=2048", "t=4", "not explained: with t = 4 a layer takes 3.1 ms for two samples, and 3.3 ms for one"),
            ("", "", "products are made of tiles of one size, and kernels take as long to launch (presumed)"),
        ),
        remark=lambda: "vTrain's authors claim 8.37 % on one machine (with kernels profiled one by one).",
    ),
    Family(
        "vtrain_multi", "Megatron-DeepSpeed on 8 to 64 machines of 8 A100", 0.06, "vtrain",
        "The catalogue, fitted to all 363 steps of one machine; nothing is fitted to these rows. How DeepSpeed "
        "exchanges is taken from its code.",
        vtrain.multi_rows,
        causes=(
            ("3.6B", "micro-batch 64", "not explained: a micro-batch of 64 samples takes twice as long as two of 32; "
             "nearly full memory, which PyTorch frees and allocates again, could do that"),
            ("3.6B", "t=16", "the delay at collectives, fitted up to t = 8, grows in proportion to t - 1"),
            ("3.6B", "micro-batch 2", "not explained: with t = 4 and 8 a sample takes 30 and 70 % longer than in "
             "micro-batches of 4 and 8, which launches do not explain, as on one machine they take half of that"),
            ("39.1B", "t=2, d=16", "not explained: both rows take 0.19 s per sample and stage; "
             "with t = 1 and 4 a stage of as many layers takes 0.215 and 0.062 s, so 0.11 s would be in line: it "
             "looks like a slow machine"),
            ("", "t=2", "replicas with two to four GPUs in each machine seem to sum at 4 to 16 GB/s a machine, those "
             "with one at 30 GB/s or more (by hand, from what is missing); the rings of the former go from one "
             "adapter's switch to another's, and how these are joined is not known"),
            ("", "t=4", "as with t = 2"),
        ),
        remark=vtrain.remark,
    ),
    Family(
        "megatron_table5", "Megatron-LM with sequence parallelism and selective recomputation, A100", 0.05, "megatron",
        "Nothing is fitted: the stack `megatron-2021` is that of Megatron-DeepSpeed on one machine of another cluster.",
        megatron.table_5_rows,
    ),
    Family(
        "megatron_a100", "Megatron-LM, weak scaling on up to 3,072 A100", 0.08, "megatron",
        "Nothing is fitted (stack `megatron-2021`); layouts and micro-batches are those of the repository's scripts.",
        megatron.a100_rows,
        causes=(("", "", "all rows are too fast, their ratios are right: the rate of matrix products is that of "
                 "another cluster and a later release; published rates of the A100 differ by as much"),),
    ),
    Family(
        "megatron_h100", "Megatron Core, weak scaling on up to 2,304 H100", 0.06, "megatron",
        "Nothing is fitted (stack `megatron-2024`). Micro-batches and virtual stages are not stated (assumptions: all "
        "samples of a replica at once without a pipeline, else one, and one layer).",
        megatron.h100_rows,
        left_out=megatron.left_out,
    ),
    *(
        Family(
            name, title, 0.08, "stacks", "Nothing in this section. Rows that gave a number of a stack or device do not "
            "count (`accuracy/stacks.py`).", functools.partial(stacks.rows, name), causes=causes,
            left_out=functools.partial(stacks.left_out, name),
        )
        for name, title, causes in (
            ("megatron_bridge", "Megatron-Bridge: H100 to GB300, BF16 to NVFP4", (
                ("gb200_llama-3-70b", "micro batch 2", "the layout does not say how activations fit; here all layers "
                 "are recomputed, where Megatron can recompute some of them or move activations to the host"),
            )),
            ("torchtitan", "torchtitan: FSDP2, tensor and pipeline parallelism, torch.compile, FP8", (
                ("405b", "", "not explained: the published run reaches 0.79 of the predicted rate, pipeline included"),
                ("70b", "tensor 8", "weights are sharded over replicas as well (ZeRO 3), here only the optimizer"),
            )),
            ("fms_fsdp", "fms-fsdp: PyTorch FSDP and HSDP on A100 and H100", (
                ("h100", "", "not explained: 0.78 of the predicted rate, while the same model on A100 agrees"),
            )),
            ("maxtext", "MaxText: TPU v4, v5e and v5p, one slice and several", (
                ("", "16 slices", "slices reach the line rate of their network cards here, and none is slower; "
                 "published runs lose 8 to 11 % on 16 slices, predicted are 2 to 5 %"),
                ("", "4 slices", "as with 16 slices"),
            )),
            ("large_runs", "Large runs of GPT-3, MT-NLG and Nemotron-4", (
                ("megatron-530b", "", "not explained: the same year's Megatron-LM reached 1.3 times its rate"),
            )),
        )
    ),
    Family(
        "das", "Hybrids of data and model parallelism on Xeons", 0.10, "hybrids",
        "None on these rows: nodes by the roofline, slower with fewer than 16 samples as another Xeon is. Speed-ups "
        "are over one node with the whole batch (`result.whole_batch_speedup`; `result.speedup` is over one with the "
        "batch of a replica). The speech network does not count: its batch is not stated, and decides.",
        hybrids.rows, hybrids.counts,
        (("", "128 nodes", "all nodes compute alike here; with 128 the slowest one of each step counts (not tested)"),
         ("", "speech", "no batch from 256 to 2,048 gives less than 9.7: the nodes seem to lose time that is neither "
          "computing nor the exchange of activations; what 64 samples lose in dense layers is not known")),
        hybrids.remark, hybrids.left_out,
    ),
)  # fmt: skip
