"""Every public callable with a valid call of it: what the fuzz over arguments starts from.

Something new that has arguments without defaults needs a line here (:data:`CALLS`); the tests say so.
"""

import functools
import importlib
import inspect
import types
from pathlib import Path

import numpy as np
from documentation import public_names

import ddlsim

#: where public names come from: everything that they say or define
MODULES = (
    "ddlsim", "ddlsim.cluster", "ddlsim.collectives", "ddlsim.collectives.all_gather",
    "ddlsim.collectives.all_reduce", "ddlsim.collectives.all_to_all", "ddlsim.collectives.broadcast",
    "ddlsim.collectives.cost", "ddlsim.collectives.gather", "ddlsim.collectives.reduce",
    "ddlsim.collectives.reduce_scatter", "ddlsim.collectives.scatter", "ddlsim.compression", "ddlsim.data",
    "ddlsim.imports", "ddlsim.measure", "ddlsim.optim", "ddlsim.planner", "ddlsim.planner.guidelines",
    "ddlsim.report.cluster_plot", "ddlsim.report.compare", "ddlsim.report.gantt", "ddlsim.report.learning",
    "ddlsim.report.plots", "ddlsim.report.trace", "ddlsim.study", "ddlsim.validation",
    "ddlsim.workload.jitter",
)  # fmt: skip
#: what the library makes and nobody else: their arguments come from it
MADE_HERE = {
    "Cluster", "ClusterLike", "LinkDetails", "Routes", "Result", "Seeds", "SeedRun", "Comparison", "Traits",
    "ExchangeResult", "HierarchicalExchangeResult", "OptimizerState", "Plan", "Recommendation", "Choice", "Calibration",
    "ComparedRun", "ComputeFit", "Curve", "Interval", "JitterFit", "NcclTime", "Parameter", "Residual", "RunInterval",
    "Summary", "Validation",
    "StackFit", "HorovodTimeline", "KinetoTrace", "LayerTime", "MlperfRun", "Timing", "Count", "Point", "Table",
    "Model", "SourceText", "State", "FailureTimeline", "CheckpointIntervals", "Jobs", "Placements",
    "Bar", "Style", "bars_of", "draw", "gantt", "jobs_timeline", "spread", "styles_of", "tracks", "window",
    "Items", "Joints", "arranged", "joints",
    "Tried", "positive_number", "nonnegative_number", "check_gradient", "slowed_duration", "slow_intervals",
}  # fmt: skip
#: protocols, types of functions, and errors
NO_CALLS = {
    "Collective", "Compressor", "Payload", "Optimizer", "Schedule of optim", "ConfigError", "DdlsimError",
    "DeadlockError", "UnitError", "ConservationError",
}  # fmt: skip
#: methods that the library calls (a schedule's for every round), and two that have a line of their own
INSIDE = {
    "Calibration.sampled", "Calibration.simulated", "Cluster.no_route", "Result.require_single_job",
    "Cluster.operation_seconds", "Cluster.with_links", "Table.places",
    "Result.interval", "Result.timelines", "Schedule.blocks", "Schedule.chunks",
    "Schedule.message_bytes",
}  # fmt: skip
FUNCTIONS = (types.FunctionType, classmethod, staticmethod)
LINK = {"bandwidth": "10 Gbit/s", "latency": "10 us"}


@functools.cache
def star():
    return ddlsim.load_cluster(importlib.import_module("ddlsim.cluster").star(4, **LINK))


@functools.cache
def experiment():
    return ddlsim.Experiment(
        "office-1gbe", "lenet5", batch_size=8, workers=4, steps=1, warmup=0,
        compute=ddlsim.Affine(0.01, 0.01), jitter=ddlsim.Lognormal(0.1),
    )  # fmt: skip


@functools.cache
def learning():
    data = ddlsim.shapes(24, 32)
    return experiment().with_(
        model="shapes-cnn", jitter=ddlsim.NoJitter(),
        training=ddlsim.Training(data, held_out=8, rate=0.1, updates=2, evaluate_every=1),
    )  # fmt: skip


@functools.cache
def result():
    return ddlsim.simulate(learning())


@functools.cache
def timed():
    return ddlsim.simulate(experiment())


@functools.cache
def failing():
    return ddlsim.simulate(experiment().with_(failures=ddlsim.Failures("50000 h")))


@functools.cache
def seeds():
    return ddlsim.simulate_seeds(learning(), 2, processes=1)


@functools.cache
def study():
    return ddlsim.Study(experiment(), {"workers": [1, 2]})


@functools.cache
def table():
    return study().run(jobs=1)


@functools.cache
def rows():
    from ddlsim.measure import Measurement

    return [
        Measurement("point_to_point", "one_way", 2, 2, median_s=1e-5 + n * 8e-10, nbytes=n) for n in (1, 10**4, 10**7)
    ]


@functools.cache
def calibration():
    return ddlsim.calibrate(rows(), star())


@functools.cache
def measured():
    from ddlsim.validation import MeasuredRun

    return [MeasuredRun(workers=n, batch_size=8, throughput=50.0 * n) for n in (1, 2)]


@functools.cache
def validation():
    return ddlsim.validate(measured(), star(), "lenet5", explain=0)


@functools.cache
def ring():
    return importlib.import_module("ddlsim.collectives").build("ring", 4)


def gradients():
    return [np.ones(8, np.float32), np.ones(8, np.float32)]


@functools.cache
def saved():
    result().save("run.npz")
    return "run.npz"


@functools.cache
def workload():
    return result().workloads[0]


def written(name, text):
    Path(name).write_text(text, encoding="utf-8")
    return name


EXPERIMENT = 'cluster = "office-1gbe"\nmodel = "lenet5"\nsteps = 1\n'
JOBS = (
    'cluster = "office-1gbe"\n[[jobs]]\n'
    'experiment = { model = "lenet5", workers = 2, steps = 1, strategy = { type = "all-reduce", cost = "nccl" } }\n'
    '[[jobs]]\nexperiment = { model = "lenet5", workers = 2, steps = 1, max_time = "1 s", '
    'strategy = { type = "async-parameter-server" }, failures = { mtbf = "1 s" } }\n'
)
COLLECTIVE = {"n_ranks": 4}
CLOSED_FORM = {"n_ranks": 4, "nbytes": 1e6, "alpha": 1e-6, "beta": 1e-9}
LAYER = {"n_weights": 1e4, "n_inputs": 1e3, "batch_size": 64.0, "n_nodes": 8}
#: name -> the arguments that have no default, and those that make a call quick; made when they are needed
CALLS = {
    "BackupWorkers": lambda: {"backups": 1},
    "Distribution": lambda: {"data": 2, "model": 2},
    "Endpoints": lambda: {"cores": 1, "total_cores": 4},
    "CHOCOSGD": lambda: {"gamma": 0.5},
    "ElasticAveraging": lambda: {"alpha": 0.1},
    "FedAvg": lambda: {"local_steps": 2},
    "fits": lambda: {"model": "lenet5", "device": "v100"},
    "FedBuff": lambda: {"local_steps": 2},
    **{name: (lambda: {"k": 2}) for name in ("KAsync", "KBatchAsync", "KBatchSync", "KSync")},
    "SoftSync": lambda: {"n": 2},
    "StaleSynchronous": lambda: {"slack": 2},
    "ExponentialPenalty": lambda: {"rho": 0.5},
    **{name: (lambda: {"density": 0.1}) for name in ("TopK", "MSTopK", "RandomK", "GTopK")},
    "CountSketch": lambda: {"density": 0.1, "rows": 3, "columns": 8},
    "DGC": lambda: {"steps_per_stage": 4},
    "QSGD": lambda: {"n_levels": 4},
    "PowerSGD": lambda: {"rank": 2},
    "Threshold": lambda: {"minimum": 0.1},
    "ErrorFeedback": lambda: {"inner": ddlsim.TopK(0.1)},
    "Compression": lambda: {"compressor": ddlsim.TopK(0.1)},
    "aggregate": lambda: {"compressor": ddlsim.FP16(), "payloads": [_payload()]},
    "average": lambda: {"compressor": ddlsim.FP16(), "payloads": [_payload()]},
    "exchange": lambda: {
        "compressor": ddlsim.FP16(), "gradients": gradients(), "states": [None, None], "rngs": _generators(2),
    },
    "hierarchical_exchange": lambda: {
        "compressor": ddlsim.FP16(), "gradients": gradients(), "states": [None, None], "rngs": _generators(2),
        "n_local": 2,
    },
    "measure_cost": lambda: {"compressor": ddlsim.FP16(), "n": 100},
    "sent_nbytes": lambda: {"collective": "all_reduce", "nbytes": [8.0, 8.0]},
    "settle": lambda: {"compressor": ddlsim.FP16(), "payload": _payload(), "mean": gradients()[0], "state": None},
    "Affine": lambda: {"c0": 0.01, "c1": 0.01},
    "Measured": lambda: {"step_time": 0.1, "batch_size": 8},
    "Device": lambda: {
        "name": "d", "title": "d", "peak_flops": {"fp32": 1e12}, "memory_nbytes": 1e9, "memory_bandwidth": 1e11,
        "power_w": 100.0, "efficiency": {"fp32": 0.5}, "efficiency_basis": "x", "sources": (),
    },
    "DataSet": lambda: {
        "name": "d", "x": np.ones((4, 1, 2, 2), np.float32), "labels": np.zeros(4, np.int64), "class_names": ("a",),
    },
    "Dirichlet": lambda: {"alpha": 0.5},
    "Background": lambda: {"source": "h0", "target": "h1"},
    "Failures": lambda: {"mtbf": "100 h"},
    "Job": lambda: {"experiment": experiment().with_(workers=2)},
    "load_jobs": lambda: {"source": written("jobs.toml", JOBS)},
    "place": lambda: {"jobs": [ddlsim.Job(experiment().with_(workers=2))], "tries": 2},
    "simulate_jobs": lambda: {"jobs": [
        ddlsim.Job(experiment().with_(workers=2, strategy=ddlsim.AllReduce(cost="nccl"))),
        ddlsim.Job(experiment().with_(workers=2)),
    ]},
    "Checkpoints": lambda: {"every": "10 min", "stall": "5 s"},
    "young_interval": lambda: {"mtbf": 3600.0, "cost": 5.0},
    "daly_interval": lambda: {"mtbf": 3600.0, "cost": 5.0},
    "daly_time": lambda: {"work": 3600.0, "interval": 60.0, "cost": 5.0, "restart": 5.0, "mtbf": 3600.0},
    "best_checkpoint_interval": lambda: {
        "experiment": experiment().with_(
            failures=ddlsim.Failures("1 h"), checkpoints=ddlsim.Checkpoints("1 min", stall="1 s"), max_time="10 min"
        ), "n_timelines": 2,
    },
    "HostMemory": lambda: {"capacity": "64 GB"},
    "Experiment": lambda: {"cluster": star(), "model": "lenet5"},
    "Constant": lambda: {"base": 0.1},
    "Cosine": lambda: {"base": 0.1, "n_epochs": 10},
    "Polynomial": lambda: {"base": 0.1, "n_epochs": 10},
    "Steps": lambda: {"base": 0.1, "milestones": [1.0, 2.0]},
    "WarmUp": lambda: {"then": ddlsim.Constant(0.1), "n_epochs": 5},
    "Phase": lambda: {"epochs": 1.0, "rate": 0.1},
    "GrowingBatch": lambda: {"base": 32, "milestones": [1.0, 2.0]},
    "Lognormal": lambda: {"cv": 0.1},
    "Gamma": lambda: {"cv": 0.1},
    "Pareto": lambda: {"a": 3.0},
    "ShiftedExponential": lambda: {"mean_extra": 0.1},
    "Uniform": lambda: {"low": 0.9, "high": 1.1},
    "Trace": lambda: {"values": [0.9, 1.1]},
    "Elastic": dict,
    "Stop": lambda: {"ranks": [0], "start": 0.0, "duration": 1.0},
    "Pause": lambda: {"start": 0.0, "duration": 1.0},
    "RandomFaults": lambda: {"mtbf": "1 h", "duration": "1 min", "factor": 2.0},
    "LinkFault": lambda: {"source": "h0", "target": "switch", "start": 0.0, "duration": 1.0},
    "Slowdown": lambda: {"ranks": [0], "start": 0.0, "duration": 1.0, "factor": 2.0},
    "Study": lambda: {"base": experiment(), "vary": {"workers": [1, 2]}},
    "Traced": lambda: {"path": _trace()},
    "build_network": lambda: {"model": "shapes-cnn", "seed": 0},
    "calibrate": lambda: {"measurements": rows(), "cluster": star()},
    "calibrate_stack": lambda: {"runs": measured(), "stack": "pytorch", "cluster": "dgx-h100-pod", "model": "gpt2"},
    "collective_time": lambda: {"cluster": star(), "algorithm": "ring", "nbytes": 1e6},
    "compare": lambda: {"results": {"a": result()}, "target": 0.5},
    "gradient_noise_scale": lambda: {
        "model": "shapes-cnn", "data": ddlsim.shapes(24, 32), "batch_size": 2, "n_batches": 2,
    },
    "linear_scaling": lambda: {"rate": 0.1, "n_workers": 4},
    "square_root_scaling": lambda: {"rate": 0.1, "n_workers": 4},
    "load_cluster": lambda: {"source": "office-1gbe"},
    "load_data": lambda: {"source": "digits"},
    "load_device": lambda: {"name": "v100"},
    "load_experiment": lambda: {"source": written("e.toml", EXPERIMENT)},
    "load_model": lambda: {"source": "lenet5"},
    "load_stack": lambda: {"name": "megatron"},
    "Stack": lambda: {"name": "own", "title": "My framework", "release": "1.0", "sources": ("measured",)},
    "plot_learning": lambda: {"results": result()},
    "interval": lambda: {"self": timed(), "n_draws": 2},
    "predict_interval": lambda: {"experiment": experiment(), "n_draws": 2},
    "recommend": lambda: {
        "clusters": star(), "model": "lenet5", "workers": [1, 2], "strategies": [ddlsim.AllReduce()],
        "batch_sizes": [8], "n_best": 1, "jobs": 1,
    },
    "resume": lambda: {"path": saved(), "experiment": learning()},
    "scaling": lambda: {"experiment": experiment(), "workers": [1, 2]},
    "shapes": lambda: {"n_samples": 8, "size": 8},
    "clicks": lambda: {"n_samples": 8},
    "sentences": lambda: {"n_samples": 8},
    "simulate": lambda: {"cluster": star(), "model": "lenet5", "batch_size": 8, "steps": 1, "warmup": 0},
    "simulate_seeds": lambda: {"experiment": learning(), "seeds": 1, "processes": 1},
    "validate": lambda: {"runs": measured(), "cluster": star(), "model": "lenet5", "explain": 0},
    "Round": lambda: {
        "src": np.array([0]), "dst": np.array([1]), "start": np.array([0]), "count": np.array([1]), "reduce": True,
    },
    "Schedule": lambda: {"n_ranks": 4, "n_chunks": 4, "lanes": ring().lanes},
    "build": lambda: {"algorithm": "ring", "n_ranks": 4},
    "check": lambda: {"schedule": ring()},
    "messages": lambda: {"src": [0], "dst": [1], "reduce": True},
    "on_ranks": lambda: {"schedule": ring(), "ranks": [0, 1, 2, 3], "n_ranks": 8},
    "reorder": lambda: {"schedule": ring(), "order": [1, 0, 2, 3]},
    "parallel": lambda: {"schedules": (ring(),)},
    "sequence": lambda: {"schedules": (ring(),), "kind": "all_reduce"},
    "split": lambda: {"schedules": (ring(),)},
    "states": lambda: {"schedule": ring()},
    "hierarchical": lambda: {"n_ranks": 4, "groups": [[0, 1], [2, 3]]},
    "cost.hierarchical": lambda: {
        "n_inside": 2, "n_groups": 2, "nbytes": 1e6, "inside": (1e-6, 1e-9, 0.0), "between": (1e-6, 1e-9, 0.0),
    },
    "cost.all_to_all_nccl": lambda: {
        "n_inside": 2, "n_machines": 2, "nbytes": 1e6, "inside": (1e-6, 1e-9, 0.0), "between": (1e-6, 1e-9, 0.0),
    },
    "all_gather.torus": lambda: COLLECTIVE,
    "all_reduce.torus": lambda: COLLECTIVE,
    "reduce_scatter.torus": lambda: COLLECTIVE,
    "cost.torus_2d": lambda: {**CLOSED_FORM, "rows": 2, "columns": 2},
    "largest_overhead_ratio": lambda: {"n_gpus": 8, "efficiency": 0.9},
    "algorithm_names": dict,
    "byteps_time": lambda: {"nbytes": 1e6, "n_machines": 4, "n_servers": 2, "bandwidth": 1e9},
    "data_parallel_nbytes": lambda: {"n_weights": 1e6},
    "hybrid_groups": lambda: LAYER,
    "largest_batch": lambda: {"model": ddlsim.load_model("lenet5"), "device": ddlsim.load_device("v100")},
    "largest_n_gpus": lambda: {"overhead_ratio": 0.1, "efficiency": 0.9},
    "local_sgd_speedup": lambda: {"ratio": 0.5, "period": 4},
    "medium_speedup": lambda: {"share": 0.5, "bandwidth": 1e9, "new_bandwidth": 2e9},
    "model_parallel_nbytes": lambda: {"n_inputs": 1e4, "batch_size": 64.0},
    "n_parameter_servers": lambda: {"nbytes": 1e8, "n_workers": 8, "bandwidth": 1e9, "compute_time": 0.1},
    "scaling_efficiency": lambda: {"overhead_ratio": 0.1, "n_gpus": 8},
    "traffic_share": lambda: {"traffic_time": 0.1, "other_time": 0.2},
    "fit_compute": lambda: {"model": "m", "batch_sizes": [8, 16, 32], "seconds": [0.1, 0.2, 0.4]},
    "fit_jitter": lambda: {"step_times": np.linspace(0.9, 1.2, 30)},
    "load_calibration": lambda: {"source": calibration().cluster},
    "nccl_time": lambda: {"cluster": "dgx-a100-pod", "nbytes": 1e6},
    "read_runs": lambda: {"path": written("runs.csv", "workers,batch_size,step_time (s)\n1,8,0.1\n")},
    "MeasuredRun": lambda: {"workers": 1, "batch_size": 8, "throughput": 50.0},
    "Measurement": lambda: {
        "experiment": "point_to_point", "operation": "one_way", "n_ranks": 2, "n_hosts": 2, "median_s": 1e-5,
        "nbytes": 8,
    },
    "Range": lambda: {"low": 1, "high": 2},
    "load_question": lambda: {"source": written("q.toml", 'clusters = ["office-1gbe"]\n')},
    "Search": lambda: {"objective": "throughput", "n_trials": 2},
    "load_study": lambda: {"source": written("s.toml", f"[base]\n{EXPERIMENT}[vary]\nworkers = [1, 2]\n")},
    "load_table": lambda: {"store": _store()},
    "MultiGpu": lambda: {"n_gpus": 2},
    **{name: (lambda: {"n_hosts": 4, **LINK}) for name in ("star", "cluster.ring", "line", "fully_connected")},
    "dragonfly": lambda: {"n_groups": 2, "group_shape": [2], "hosts_per_router": 1, "global_links": 1, **LINK},
    "fat_tree": lambda: {"k": 2, **LINK},
    "hypercube": lambda: {"n_dims": 2, **LINK},
    "leaf_spine": lambda: {"n_leaves": 2, "hosts_per_leaf": 2, "n_spines": 1, **LINK},
    "racks": lambda: {"n_racks": 2, "hosts_per_rack": 2, **LINK},
    "two_racks": lambda: {"hosts_per_rack": 2, **LINK},
    "torus": lambda: {"sizes": [2, 2], **LINK},
    "with_detail": lambda: {"cluster": star()},
    "with_storage": lambda: {"cluster": star(), "name": "nfs0", "read": "1 GB/s"},
    "Cache": lambda: {"policy": "minio", "size": "1 GB"},
    "minio_cache": lambda: {"size": "1 GB"},
    "partitioned_cache": lambda: {"size": "1 GB"},
    "multi_level_cache": lambda: {"ram": "1 GB", "ssd": "1 TB"},
    "BatchStream": lambda: {"shard": np.arange(4), "seed": 0},
    "by_class": lambda: {"labels": np.arange(8) % 2, "n_workers": 2},
    "dirichlet": lambda: {"labels": np.arange(8) % 2, "n_workers": 2, "alpha": 1.0, "seed": 0},
    "iid": lambda: {"labels": np.arange(8) % 2, "n_workers": 2, "seed": 0},
    "from_arrays": lambda: {"x": np.ones((4, 2)), "labels": [0, 1, 0, 1]},
    "split.data": lambda: {"data": ddlsim.shapes(8, 8), "held_out": 2, "seed": 0},
    "standardize": lambda: {"data": ddlsim.shapes(8, 8)},
    "breakdown": lambda: {"results": {"a": result()}},
    "plots.scaling": lambda: {"results": [result()]},
    "step_times": lambda: {"result": result()},
    "timeline": lambda: {"result": result().traced},
    "cluster_plot": lambda: {"result": star()},
    "save_trace": lambda: {"result": result(), "path": "trace.json"},
    "fastest_over_ranks": lambda: {"traces": []},
    "profile_workload": lambda: {"workload": workload(), "layers": []},
    "to_measurements": lambda: {"timings": []},
    "save_measurements": lambda: {"rows": [], "path": "m.csv"},
    **{
        name: (lambda: {"n": 4})
        for name in ("exponential", "lognormal", "normal", "pareto", "shifted_exponential", "uniform")
    },
}  # fmt: skip
#: readers of files, and what takes what they read: their call starts from nothing and ends in an error that says so
READERS = (
    "read_any", "detect_kind", "read_astra", "read_horovod", "read_iperf3", "read_kineto", "read_lstopo", "read_mllog",
    "read_nccl_tests", "read_nccl_topology", "read_nvidia_smi", "read_osu", "read_ping", "read_rocm_smi",
    "read_simgrid", "read_throughput", "read_cifar", "read_idx", "read_images", "read_npz", "read_measurements",
    "read_downloaded", "Traced", "fastest_over_ranks", "profile_workload", "read_text", "read_graphml", "read_topology",
)  # fmt: skip
#: objects whose methods people call
OBJECTS = {
    "Calibration": calibration, "Cluster": star, "Experiment": experiment, "Result": result, "Schedule": ring,
    "Seeds": seeds, "Study": study, "Table": table, "Validation": validation,
    "ddlsim.DataSet": lambda: ddlsim.shapes(4, 8),
}  # fmt: skip
METHODS = {
    "Validation.save_html": lambda: {"path": "v.html"},
    "Calibration.time": lambda: {"operation": "one_way", "nbytes": 1e6},
    "Calibration.compute_of": lambda: {"model": "lenet5"},
    "Calibration.save": lambda: {"path": "c.toml", "source": "office-1gbe"},
    "Cluster.node": lambda: {"name": "h0"},
    "Cluster.around": lambda: {"down": [0]},
    "Cluster.routes": lambda: {"src": [0], "dst": [1]},
    "Cluster.split_routes": lambda: {"src": [0], "dst": [1]},
    "Cluster.check_connected": lambda: {"nodes": [0, 1]},
    "Cluster.scaled": lambda: {"kind": "nic"},
    "Cluster.sampled": lambda: {"seed": 1},
    "Cluster.locality_order": lambda: {"nodes": [0, 1]},
    "Cluster.from_graph": lambda: {"graph": star().to_graph()},
    "Cluster.save": lambda: {"path": "c.json"},
    "Experiment.speeds": lambda: {"n_workers": 4},
    "Experiment.batch": lambda: {"n_workers": 4},
    "Experiment.save": lambda: {"path": "e.toml"},
    "Experiment.with_": lambda: {"steps": 2, "strategy": ddlsim.AllReduce(), "seed": 1},
    "Result.known": lambda: {"quantity": "cost"},
    "Result.time_to_accuracy": lambda: {"target": 0.5},
    "Result.stability": lambda: {"runs": 1},
    "Result.save": lambda: {"path": "r.npz"},
    "Result.save_trace": lambda: {"path": "t.json"},
    "Schedule.animate": lambda: {"path": "rounds.html"},
    "Schedule.bytes_sent": lambda: {"nbytes": 1e6},
    "Schedule.bytes_handled": lambda: {"nbytes": 1e6},
    "Seeds.times_to_accuracy": lambda: {"target": 0.5},
    "Seeds.time_to_accuracy": lambda: {"target": 0.5},
    "Study.run": lambda: {"jobs": 1},
    "Study.plot_lines": lambda: {"field": "workers"},
    "Study.plot_pareto": lambda: {"x": "throughput", "y": "step_time"},
    "Study.pareto": lambda: {"metrics": ("throughput", "step_time")},
    "Study.save_html": lambda: {"path": "s.html"},
    "Study.with_": lambda: {"seeds": 1},
    "Table.known": lambda: {"metrics": ("throughput", "step_time")},
    "Table.pareto": lambda: {"metrics": ("throughput", "step_time")},
    "Table.plot_lines": lambda: {"field": "workers"},
    "Table.plot_pareto": lambda: {"x": "throughput", "y": "step_time"},
    "Table.save": lambda: {"path": "t.csv"},
    "Table.save_html": lambda: {"path": "t.html"},
    "Validation.within": lambda: {"tolerance": 0.1},
    "Validation.summary": lambda: {"fitted": False},
    "DataSet.take": lambda: {"indices": np.array([0, 1])},
}


def _payload():
    return ddlsim.FP16().encode(gradients()[0], None, np.random.default_rng(0))[0]


def _generators(n):
    return [np.random.default_rng(i) for i in range(n)]


def _store():
    study().run("store.sqlite", jobs=1)
    return "store.sqlite"


def _trace():
    events = [
        {"ph": "X", "cat": "python_function", "name": "ProfilerStep#1", "ts": 0, "dur": 100, "pid": 1, "tid": 1},
    ]
    import json

    return written("trace_in.json", json.dumps({"traceEvents": events}))


def public():
    """Yield (name, callable, what makes the arguments of a valid call, or None where none is known)."""
    seen = set()
    for module in MODULES:
        loaded = importlib.import_module(module)
        short = module.rpartition(".")[2]
        for name in public_names(module):
            target = getattr(loaded, name)
            if not callable(target) or id(target) in seen or name in MADE_HERE or name in NO_CALLS:
                continue
            if getattr(target, "_is_protocol", False) or not hasattr(target, "__module__"):
                continue
            seen.add(id(target))
            yield f"{short}.{name}", target, _call_of(short, name, target)
    yield "Result.interval", ddlsim.Result.interval, CALLS["interval"]
    yield "Result.timelines", ddlsim.Result.timelines, lambda: {"self": failing(), "n": 2}
    for name, make in OBJECTS.items():
        kind = name.rpartition(".")[2]
        for method in sorted(vars(type(make()))):
            static = inspect.getattr_static(type(make()), method)
            if method.startswith("_") or f"{kind}.{method}" in INSIDE or not isinstance(static, FUNCTIONS):
                continue
            function = getattr(make(), method)
            if not inspect.signature(function).parameters:
                continue
            yield f"{kind}.{method}", function, METHODS.get(f"{kind}.{method}") or _if_free(function)


def _call_of(module, name, target):
    for key in (f"{module}.{name}", f"{name}.{module}", name):
        if key in CALLS and (key != name or module != "cost" or name not in ("hierarchical", "torus_2d")):
            return CALLS[key]
    if name in READERS:
        return lambda: {first: written("nothing.txt", "nothing\n") for first in _required(target)}
    if module == "cost":
        return lambda: CLOSED_FORM
    if _required(target) == ["n_ranks"]:
        return lambda: COLLECTIVE
    return _if_free(target)


def _required(target):
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(target).parameters.values()
    return [p.name for p in parameters if p.default is empty and p.kind not in kinds]


def _if_free(target):
    return None if _required(target) else dict


__all__ = ["CALLS", "METHODS", "OBJECTS", "READERS", "public"]
