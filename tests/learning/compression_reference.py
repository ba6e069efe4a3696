"""What tests of compressed runs share: all compressors, and small runs."""

import ddlsim
from ddlsim.compression import NoCompression

STAR = "office-1gbe"

#: one of every kind, with error feedback where it is usual
COMPRESSORS = {
    "none": NoCompression(),
    "fp16": ddlsim.FP16(),
    "bf16": ddlsim.BF16(),
    "top-k": ddlsim.ErrorFeedback(ddlsim.TopK(0.1)),
    "ms-top-k": ddlsim.ErrorFeedback(ddlsim.MSTopK(0.1, n_searches=8)),
    "threshold": ddlsim.ErrorFeedback(ddlsim.Threshold(0.01)),
    "random-k": ddlsim.ErrorFeedback(ddlsim.RandomK(0.2)),
    "dgc": ddlsim.DGC(4, momentum=0.5),
    "g-top-k": ddlsim.ErrorFeedback(ddlsim.GTopK(0.1)),
    "count-sketch": ddlsim.ErrorFeedback(ddlsim.CountSketch(0.1, 5, 64)),
    "qsgd": ddlsim.QSGD(16, bucket_size=64),
    "tern-grad": ddlsim.TernGrad(),
    "natural": ddlsim.Natural(),
    "sign": ddlsim.SignSGD(),
    "one-bit": ddlsim.ErrorFeedback(ddlsim.OneBit()),
    "power-sgd": ddlsim.ErrorFeedback(ddlsim.PowerSGD(2)),
}
STRATEGIES = {
    "all-reduce": ddlsim.AllReduce("ring", overlap="layer"),
    "servers": ddlsim.ParameterServer(),
    "async": ddlsim.AsyncParameterServer(),
}


def learn(compression, strategy=None, n_updates=10, workers=4, batch_size=16, **more):
    """A run that learns. Without `batching` gradients are averaged as compressed ones are, worker by worker."""
    training = more.pop("training", None) or ddlsim.Training(
        rate=0.1, updates=n_updates, evaluate_every=1000, batching=False
    )
    return ddlsim.simulate(
        STAR, "digits-cnn", strategy or STRATEGIES["all-reduce"], batch_size, workers, training=training,
        compression=compression, **more,
    )  # fmt: skip


def timing(compression, strategy=None, n_steps=4, workers=4, cluster=STAR, model="digits-cnn", **more):
    """A run about time only, that of the optimizer of `learn`."""
    return ddlsim.simulate(
        cluster, model, strategy or STRATEGIES["all-reduce"], 16, workers, steps=n_steps, warmup=0,
        compression=compression, **{"optimizer": "sgd"} | more,
    )  # fmt: skip
