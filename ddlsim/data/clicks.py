"""Generated clicks, for models that predict whether somebody clicks on what is shown."""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import Count, Seed, checked
from ddlsim.data.dataset import DataSet
from ddlsim.streams import stream

N_DENSE = 4
#: values of each categorical feature
FEATURE_ROWS = (60, 40, 20, 12, 6, 3)
_LATENT = 2


@checked
def clicks(n_samples: Count, seed: Seed = 0) -> DataSet:
    """Return `n_samples` of 4 numbers and 6 categorical features, as ids behind them: (n_samples, 10); labels are 1 for
    a click.

    Who clicks is drawn: the logit is a sum of weights of the numbers and the values of features, and of the dot product
    of two hidden vectors, one of each value of the two largest features. Half of all samples are clicks, more or less;
    of values of a feature some are more frequent than others (Zipf's law).
    """
    world, draws = stream(seed, 0, "clicks: the world"), stream(seed, 1, "clicks: the samples")
    numbers = draws.standard_normal((n_samples, N_DENSE))
    logit = numbers @ world.normal(0.0, 0.5, N_DENSE)
    ids = np.empty((n_samples, len(FEATURE_ROWS)), dtype=np.int64)
    hidden = []
    for feature, rows in enumerate(FEATURE_ROWS):
        shares = 1.0 / np.arange(1, rows + 1)
        ids[:, feature] = draws.choice(rows, n_samples, p=shares / shares.sum())
        logit += world.normal(0.0, 1.0, rows)[ids[:, feature]]
        hidden.append(world.normal(0.0, 1.2, (rows, _LATENT))[ids[:, feature]])
    logit += (hidden[0] * hidden[1]).sum(axis=1)
    labels = (draws.random(n_samples) < 1.0 / (1.0 + np.exp(np.median(logit) - logit))).astype(np.int64)
    x = np.concatenate([numbers, ids], axis=1).astype(np.float32)
    return DataSet("clicks", x, labels, ("no click", "click"), "generated: clicks drawn from a factorisation model")
